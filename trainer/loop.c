#include "trainer/loop.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/bus.h"
#include "common/checkpoint.h"
#include "common/clock.h"
#include "common/field.h"
#include "common/fs.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/process.h"
#include "common/rundir.h"
#include "trainer/engine.h"
#include "trainer/feed.h"
#include "trainer/saver.h"
#include "trainer/uplink.h"

#define EXIT_INPUT      1
#define EXIT_DO_NOT     100
#define EXIT_RESTART    111
#define GIVE_UP_SECONDS 60  /* scheduler gone for so long */
#define LEAVE_SECONDS   20  /* leaving may take so long, then the process ends by force */
#define TORN_SECONDS    4   /* the same without the other ranks, who wait for this one to be gone */
#define RANKS_SECONDS   120 /* for other ranks of which the scheduler says nothing */
#define RANKS_OBJECT    "fb-coll-mpi.so" /* beside this program */
#define FEED_RETRY_MS   2000
#define GRANT_WINDOW    64  /* grants may run ahead of the steps by so many */
#define WAIT_MS         250 /* longest sleep of the loop */

struct trainer {
    struct rundir run;
    char *checkpoints;
    struct bus *bus;
    struct uplink *uplink;
    struct feed *feed;
    struct engine *engine;
    struct coll *ranks;
    struct saver *saver;
    int signal_fd;
    int rank, world;

    uint32_t epoch;                   /* run epoch of the loaded state; 0: nothing loaded yet */
    int64_t step;                     /* the next one to run */
    int64_t ready;                    /* READY was sent for the steps before this one */
    int64_t granted;                  /* the steps before this one may run */
    uint8_t save_after[GRANT_WINDOW]; /* of granted steps, at step mod GRANT_WINDOW */
    int save_due;                     /* the grant of the step just done asked for a checkpoint */
    int64_t save_at;                  /* CHECKPOINT: when so many steps are done; −1 none */
    int64_t saving;                   /* the step being written, under epoch; −1 none */
    struct saver_result saved;        /* the last result; step −1 none */
    double saver_wait;                /* seconds spent waiting for the save before */
    double idle_since;                /* the end of the last step, or of loading */
    int torn;                         /* out of step with the other ranks, for good */
    int leaving;                      /* the loop ends with `status` */
    int status;
    char reason[1024]; /* for BYE */
};

static void leave(struct trainer *t, int status, const char *reason)
{
    t->leaving = 1;
    t->status = status;
    snprintf(t->reason, sizeof t->reason, "%s", reason);
}

/* What an error means for the process: outside trouble that may pass, or something only a person
 * can put right. */
static int status_of(int code)
{
    switch (code) {
    case ERR_IO:
    case ERR_NOMEM:
    case ERR_TIMEOUT:
        return EXIT_RESTART;
    default:
        return EXIT_DO_NOT;
    }
}

/* -- what goes to the scheduler ------------------------------------------------------------- */

static json_t *json_hex(uint64_t x)
{
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, x);
    return json_string(text);
}

static void send_step(
    struct trainer *t, const struct engine_report *r, double seconds, double wait_seconds)
{
    json_t *losses = json_array();
    for (int k = 0; k < r->passes; k++)
        json_array_append_new(losses, json_real_or_null(r->losses[k]));
    uplink_send(t->uplink, WIRE_STEP, t->epoch,
        json_pack("{s:I, s:i, s:o, s:o, s:o, s:f, s:b, s:I, s:i, s:f, s:f, s:o, s:o}", "step",
            (json_int_t)r->step, "passes", r->passes, "losses", losses, "total",
            json_real_or_null(r->total), "grad_norm", json_real_or_null(r->grad_norm), "lr", r->lr,
            "skipped", r->skipped, "tokens", (json_int_t)r->tokens, "rows", r->rows, "seconds",
            seconds, "wait_seconds", wait_seconds, "ids", json_hex(r->digest.ids), "content",
            json_hex(r->digest.content)));
}

static void send_saved(struct trainer *t, const struct saver_result *r)
{
    json_t *j;
    if (r->err.code) {
        j = json_pack("{s:I, s:s}", "step", (json_int_t)r->step, "error", r->err.msg);
    } else {
        json_t *files = json_array();
        for (int i = 0; i < r->file_count; i++)
            json_array_append_new(
                files, json_pack("{s:s, s:I, s:s}", "name", r->files[i].name, "bytes",
                           (json_int_t)r->files[i].bytes, "sha256", r->files[i].sha256));
        j = json_pack("{s:I, s:o, s:f, s:f}", "step", (json_int_t)r->step, "files", files,
            "stall_seconds", r->stall_seconds, "write_seconds", r->write_seconds);
    }
    uplink_send(t->uplink, WIRE_SAVED, r->run_epoch, j);
}

/* -- checkpoints ---------------------------------------------------------------------------- */

static void poll_saver(struct trainer *t, int timeout_ms)
{
    struct saver_result r;
    if (!saver_poll(t->saver, timeout_ms, &r))
        return;
    r.stall_seconds += t->saver_wait;
    t->saving = -1;
    if (r.err.code)
        log_error("checkpoint failed", "step=%" PRId64 " error=\"%s\"", r.step, r.err.msg);
    else
        log_info("checkpoint written", "step=%" PRId64 " stall_ms=%.1f write_ms=%.1f", r.step,
            1e3 * r.stall_seconds, 1e3 * r.write_seconds);
    t->saved = r;
    send_saved(t, &r);
}

static int stop_signalled(const struct trainer *t)
{
    struct pollfd p = {.fd = t->signal_fd, .events = POLLIN};
    return poll(&p, 1, 0) > 0;
}

/* Asked between micro-batches: the step is void when a newer epoch has begun, and unwanted after a
 * signal. */
static int step_is_void(void *ctx)
{
    const struct trainer *t = ctx;
    return uplink_epoch(t->uplink) != t->epoch || stop_signalled(t);
}

/* Saves the state after t->step steps; waits for the save before, if it is still running. */
static void save(struct trainer *t)
{
    struct saver_source src = engine_source(t->engine);
    struct err e = {0};
    double start = clock_seconds();
    while (saver_busy(t->saver)) {
        if (step_is_void(t))
            return;
        poll_saver(t, WAIT_MS);
    }
    t->saver_wait = clock_seconds() - start;
    if (saver_begin(t->saver, &src, t->step, t->epoch, &e) < 0) {
        t->saved = (struct saver_result){.step = t->step, .run_epoch = t->epoch, .err = e};
        log_error("checkpoint failed", "step=%" PRId64 " error=\"%s\"", t->step, e.msg);
        send_saved(t, &t->saved);
        return;
    }
    t->saving = t->step;
}

/* -- messages of the scheduler ---------------------------------------------------------------- */

static int json_step(const json_t *j, int64_t *out)
{
    const json_t *v = json_object_get(j, "step");
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return 0;
    *out = json_integer_value(v);
    return 1;
}

/* Loads what WELCOME or RELOAD names: a checkpoint of our own directory, or fresh weights. */
static int load_state(struct trainer *t, const json_t *j, struct err *e)
{
    const json_t *name = json_object_get(j, "checkpoint");
    int64_t step = -1;
    if (!json_step(j, &step) || step > t->run.plan.c.train.steps)
        return err_set(e, ERR_INPUT, "scheduler: names no step of the plan to continue at");
    if (!name || json_is_null(name)) {
        if (step != 0)
            return err_set(e, ERR_INPUT,
                "scheduler: fresh weights at step %" PRId64 ", expected a checkpoint", step);
        t->step = 0;
        return engine_load_fresh(t->engine, e);
    }
    if (!json_is_string(name) || checkpoint_step(json_string_value(name)) != step)
        return err_set(e, ERR_INPUT,
            "scheduler: checkpoint is not the one of step %" PRId64 " it is to continue at", step);
    char *dir = mem_printf("%s/%s", t->checkpoints, json_string_value(name));
    int rc = engine_load(t->engine, dir, step, e);
    free(dir);
    t->step = step;
    return rc;
}

/* WELCOME and RELOAD: under a newer run epoch everything held is void. */
static int on_load(struct trainer *t, const struct message *m, const json_t *j, struct err *e)
{
    if (m->head.run_epoch <= t->epoch)
        return 0; /* an answer to a HELLO sent twice */
    int rc = load_state(t, j, e);
    if (rc < 0)
        return rc;
    t->epoch = m->head.run_epoch;
    t->ready = t->granted = t->step;
    t->save_due = 0;
    t->save_at = -1;
    t->saving = t->saved.step = -1;
    feed_restart(t->feed, t->epoch, t->step);
    t->idle_since = clock_seconds();
    const char *name = json_string_value(json_object_get(j, "checkpoint"));
    const char *reason = json_string_value(json_object_get(j, "reason"));
    log_info("state loaded", "run_epoch=%u step=%" PRId64 " checkpoint=%s reason=\"%s\"", t->epoch,
        t->step, name ? name : "none", reason ? reason : "welcome");
    return 0;
}

static int on_grant(struct trainer *t, const struct message *m, const json_t *j, struct err *e)
{
    int64_t step = -1;
    (void)m;
    (void)e;
    if (!json_step(j, &step) || step != t->granted || step >= t->step + GRANT_WINDOW) {
        log_warn("grant ignored", "step=%" PRId64 " expected=%" PRId64, step, t->granted);
        return 0;
    }
    t->save_after[step % GRANT_WINDOW] = json_is_true(json_object_get(j, "checkpoint"));
    t->granted++;
    return 0;
}

static int on_checkpoint(struct trainer *t, const struct message *m, const json_t *j, struct err *e)
{
    int64_t step = -1;
    (void)m;
    (void)e;
    if (!json_step(j, &step) || step < t->step) {
        log_warn("checkpoint request ignored", "step=%" PRId64 " done=%" PRId64, step, t->step);
        return 0;
    }
    t->save_at = step;
    return 0;
}

static int on_finish(struct trainer *t, const struct message *m, const json_t *j, struct err *e)
{
    const char *reason = json_string_value(json_object_get(j, "reason"));
    (void)m;
    (void)e;
    log_info("finished", "step=%" PRId64 " reason=\"%s\"", t->step, reason ? reason : "");
    leave(t, 0, "finished");
    return 0;
}

static const struct handler {
    int type;
    int (*handle)(struct trainer *t, const struct message *m, const json_t *j, struct err *e);
} handlers[] = {
    {WIRE_WELCOME, on_load},
    {WIRE_RELOAD, on_load},
    {WIRE_GRANT, on_grant},
    {WIRE_CHECKPOINT, on_checkpoint},
    {WIRE_FINISH, on_finish},
};

static int dispatch(struct trainer *t, const struct message *m, struct err *e)
{
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        if (handlers[i].type != m->head.type)
            continue;
        json_t *j = message_json(m, e);
        if (!j) {
            log_warn("bad message dropped", "error=\"%s\"", e->msg);
            return 0;
        }
        /* Before the first load, and of an epoch that is not the loaded one, only a load means
         * something. */
        int loads = handlers[i].handle == on_load;
        int rc = 0;
        if (loads || m->head.type == WIRE_FINISH || m->head.run_epoch == t->epoch)
            rc = handlers[i].handle(t, m, j, e);
        json_decref(j);
        return rc;
    }
    return 0;
}

static int take_messages(struct trainer *t, struct err *e)
{
    for (;;) {
        struct message m;
        int rc = uplink_next(t->uplink, &m, e);
        if (rc <= 0)
            return rc;
        rc = dispatch(t, &m, e);
        message_release(&m);
        if (rc < 0)
            return rc;
    }
}

/* -- the loop ------------------------------------------------------------------------------- */

static void run_step(struct trainer *t)
{
    struct engine_report r;
    struct err e = {0};
    double start = clock_seconds(), waited = start - t->idle_since;
    int rc = engine_step(t->engine, t->feed, t->step, step_is_void, t, &r, &e);
    if (rc < 0) {
        t->torn = 1;
        leave(t, EXIT_RESTART, e.msg);
    }
    if (rc <= 0)
        return;
    t->idle_since = clock_seconds();
    if (r.skipped)
        log_warn("update skipped", "step=%" PRId64 " grad_norm=%g loss=%g", r.step, r.grad_norm,
            r.total);
    send_step(t, &r, t->idle_since - start, waited);
    feed_done(t->feed, t->step);
    t->save_due = t->save_after[t->step % GRANT_WINDOW];
    t->step++;
}

/* A save that is due. One that is being written answers for itself; of one that is written the
 * scheduler hears the result once more; one that failed is tried again. */
static void save_if_due(struct trainer *t)
{
    if (t->epoch == 0 || (!t->save_due && t->save_at != t->step))
        return;
    t->save_due = 0;
    if (t->save_at == t->step) /* an order for a later step stands */
        t->save_at = -1;
    if (t->saving == t->step)
        return;
    if (t->saved.step == t->step && t->saved.run_epoch == t->epoch && t->saved.err.code == 0)
        send_saved(t, &t->saved);
    else
        save(t);
}

/* Steps are announced as soon as they are held, so that grants come while a step runs. */
static void announce_ready(struct trainer *t)
{
    for (; t->epoch && feed_ready(t->feed, t->ready); t->ready++)
        uplink_send(
            t->uplink, WIRE_READY, t->epoch, json_pack("{s:I}", "step", (json_int_t)t->ready));
}

static int sleep_until_something(struct trainer *t, struct err *e)
{
    struct bus_poll items[] = {{.fd = t->signal_fd}, {.fd = uplink_fd(t->uplink)},
        {.fd = saver_fd(t->saver)}, {.ep = feed_endpoint(t->feed), .fd = -1}};
    int rc = bus_wait(items, sizeof items / sizeof *items, WAIT_MS, e);
    return rc < 0 ? rc : 0;
}

static int turn(struct trainer *t, struct err *e)
{
    int rc = take_messages(t, e);
    if (rc == 0)
        rc = feed_pump(t->feed, (int64_t)(1e3 * clock_seconds()) + 1, e);
    if (rc < 0 || t->leaving)
        return rc;
    poll_saver(t, 0);
    save_if_due(t);
    announce_ready(t);
    if (t->step < t->granted && feed_ready(t->feed, t->step)) {
        run_step(t);
        return 0;
    }
    return sleep_until_something(t, e);
}

static int loop(struct trainer *t, struct err *e)
{
    while (!t->leaving) {
        if (stop_signalled(t)) {
            log_info("asked to leave by a signal", "step=%" PRId64, t->step);
            /* Several ranks start over together, or not at all. */
            t->torn = t->world > 1;
            leave(t, t->torn ? EXIT_RESTART : 0, "asked to leave by a signal");
            break;
        }
        int rc = turn(t, e);
        if (rc < 0)
            leave(t, status_of(rc), e->msg);
    }
    if (t->status)
        err_set(e, ERR_STOPPED, "%s", t->reason);
    return t->status;
}

/* -- opening and closing -------------------------------------------------------------------- */

/* The shared object lies beside the program. */
static int load_transport(const struct coll_transport **out, struct err *e)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0)
        return err_errno(e, "/proc/self/exe");
    self[n] = 0;
    char *dir = fs_dirname(self), *path = mem_printf("%s/" RANKS_OBJECT, dir);
    int rc = coll_load(path, out, e);
    if (rc < 0)
        err_prefix(e, "several ranks need OpenMPI (ops/setup, then make)");
    free(path);
    free(dir);
    return rc;
}

static int open_ranks(struct trainer *t, struct err *e)
{
    struct coll_settings s = {.rank = t->rank, .world = t->world, .timeout_seconds = RANKS_SECONDS};
    int micros = t->run.plan.c.train.batch_rows / t->run.plan.c.train.micro_rows;
    if (t->world > micros)
        return err_set(e, ERR_INPUT, "%d ranks for %d micro-batches a step: right is at most %d",
            t->world, micros, micros);
    int rc = t->world > 1 ? load_transport(&s.transport, e) : 0;
    if (rc == 0)
        rc = coll_open(&s, &t->ranks, e);
    if (rc == 0)
        engine_join(t->engine, t->ranks);
    return rc;
}

static int open_worker(struct trainer *t, const struct loop_settings *s, struct err *e)
{
    struct engine_settings engine = {.plan = &t->run.plan,
        .threads = t->run.config.process.trainer_threads,
        .rank = s->rank,
        .world = s->world,
        .recompute = t->run.config.train.recompute};
    int rc = engine_new(&engine, &t->engine, e);
    if (rc == 0)
        rc = open_ranks(t, e);
    if (rc < 0)
        return rc;
    struct saver_settings saver = {.root = t->checkpoints,
        .plan_hash = t->run.plan.hash,
        .rank = s->rank,
        .world = s->world,
        .table = engine_weights(t->engine),
        .optim = t->run.plan.c.optim.kind};
    return saver_new(&saver, &t->saver, e);
}

static int open_sockets(struct trainer *t, const struct loop_settings *s, struct err *e)
{
    struct feed_settings feed = {.plan = &t->run.plan,
        .rank = s->rank,
        .world = s->world,
        .steps_ahead = FEED_STEPS_AHEAD,
        .byte_cap = FEED_BYTE_CAP,
        .retry_ms = FEED_RETRY_MS};
    struct member_id id = {.role = "trainer",
        .rank = s->rank,
        .world = s->world,
        .give_up_seconds = GIVE_UP_SECONDS,
        .run = &t->run};
    char *sock = rundir_path(&t->run, "%s", RUNDIR_LOADER_SOCK), identity[32];
    snprintf(identity, sizeof identity, "trainer-%d-%d", s->rank, (int)getpid());
    int rc = bus_new(&t->bus, e);
    if (rc == 0)
        rc = feed_new(t->bus, sock, identity, &feed, &t->feed, e);
    if (rc == 0)
        rc = uplink_start(t->bus, &id, &t->uplink, e);
    free(sock);
    return rc;
}

static void log_memory(const struct trainer *t)
{
    struct plan_memory m;
    struct buf parts = BUF_INIT;
    engine_memory(t->engine, &m);
    for (int i = 0; i < m.count; i++)
        buf_printf(&parts, "%s_mib=%.1f ", m.parts[i].key, (double)m.parts[i].bytes / (1 << 20));
    log_info("memory planned", "%stotal_mib=%.1f", parts.data, (double)m.total / (1 << 20));
    buf_release(&parts);
    enum precision precision = t->run.plan.c.train.precision;
    log_info("products", "precision=%s", precision_name((int)precision));
    if (precision == PRECISION_BF16 && !engine_bf16_native(t->engine))
        log_warn("this processor has no bf16 products: they are imitated, slower than float32",
            "right=AVX512-BF16 or AMX, or a plan with train.precision f32");
    if (m.passes > 1)
        log_info("passes after the first", "prefix_sharing=%s doc_mask=%s compute=%s",
            t->run.plan.c.train.prefix_sharing ? "auto" : "off",
            t->run.plan.c.model.doc_mask ? "true" : "false",
            m.sharing ? "fused_tokens" : "every_token");
    log_info("feed credit", "steps_ahead=%d byte_cap=%zu", FEED_STEPS_AHEAD, FEED_BYTE_CAP);
}

static int open_trainer(struct trainer *t, const struct loop_settings *s, struct err *e)
{
    int rc = process_signal_fd(&t->signal_fd, e);
    if (rc == 0)
        rc = fs_mkdir_p(t->checkpoints, 0755, e);
    if (rc == 0)
        rc = open_worker(t, s, e);
    if (rc == 0)
        rc = open_sockets(t, s, e);
    if (rc < 0)
        return rc;
    log_info("ready", "run=%s plan=%.12s parameters=%" PRId64 " world=%d threads=%d pid=%d",
        t->run.path, t->run.plan.hash, model_config_params(&t->run.plan.c.model), t->world,
        engine_threads(t->engine), (int)getpid());
    log_memory(t);
    return 0;
}

/* The most memory this process ever had, as the kernel counted it, beside the plan. */
static void log_peak(const struct trainer *t)
{
    struct plan_memory m;
    struct rusage used;
    if (!t->engine || getrusage(RUSAGE_SELF, &used) < 0)
        return;
    engine_memory(t->engine, &m);
    log_info("memory used", "peak_mib=%.1f planned_mib=%.1f", (double)used.ru_maxrss / 1024,
        (double)m.total / (1 << 20));
}

static void log_feed(const struct trainer *t)
{
    if (!t->feed)
        return;
    const struct feed_stats *s = feed_stats_of(t->feed);
    log_info("fed",
        "batches=%" PRIu64 " mib=%.1f asked=%" PRIu64 " resends=%" PRIu64 " reconnects=%" PRIu64
        " refused=%" PRIu64 " duplicates=%" PRIu64 " stale=%" PRIu64 " damaged=%" PRIu64,
        s->batches, (double)s->bytes / (1 << 20), s->asked, s->resends, s->reconnects, s->refused,
        s->duplicates, s->stale, s->damaged);
}

static void close_trainer(struct trainer *t)
{
    log_peak(t);
    log_feed(t);
    alarm(t->torn ? TORN_SECONDS : LEAVE_SECONDS); /* not blocked: whatever hangs below ends then */
    uplink_stop(&t->uplink, t->reason);
    if (t->torn)
        return; /* nothing may be waited for; the process ends now */
    if (coll_free(&t->ranks) < 0)
        log_warn("the other ranks did not take leave", "rank=%d world=%d", t->rank, t->world);
    feed_free(&t->feed);
    saver_free(&t->saver);
    engine_free(&t->engine);
    if (t->bus)
        bus_free(&t->bus);
    if (t->signal_fd >= 0)
        close(t->signal_fd);
    free(t->checkpoints);
    rundir_release(&t->run);
}

int loop_run(const struct loop_settings *settings, struct err *e)
{
    struct trainer t = {.signal_fd = -1,
        .save_at = -1,
        .saving = -1,
        .rank = settings->rank,
        .world = settings->world};
    t.saved.step = -1;
    if (rundir_open(settings->run_dir, &t.run, e) < 0)
        return EXIT_INPUT;
    t.checkpoints = rundir_path(&t.run, "checkpoints");
    int rc = open_trainer(&t, settings, e);
    int status = rc < 0 ? status_of(rc) : loop(&t, e);
    t.torn |= t.world > 1 && status != 0;
    close_trainer(&t);
    return status;
}
