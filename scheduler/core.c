#include "scheduler/core.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/field.h"
#include "common/mem.h"
#include "scheduler/status.h"
#include "scheduler/training.h"

static const struct scheduler_tuning usual = {
    .heartbeat_ms = 0,
    .evaluator_wait_ms = 120000,
    .retry_pause_ms = 5000,
    .retries = 5,
    .stop_wait_ms = 600000,
};

const char *run_state_name(int state)
{
    static const char *const names[RUN_STATE_COUNT] = {
        [RUN_STARTING] = "starting",
        [RUN_TRAINING] = "training",
        [RUN_SAVING] = "saving",
        [RUN_EVALUATING] = "evaluating",
        [RUN_FINISHED] = "finished",
        [RUN_STOPPED] = "stopped",
        [RUN_FAILED] = "failed",
    };
    CHECK(state >= 0 && state < RUN_STATE_COUNT);
    return names[state];
}

int scheduler_done(const struct scheduler *s)
{
    return s->state >= RUN_FINISHED;
}

/* -- saying and sending -- */

static void keep_warning(struct scheduler *s, const char *text)
{
    if (s->warning_count && strcmp(s->warnings[s->warning_count - 1], text) == 0)
        return;
    if (s->warning_count == MAX_WARNINGS) {
        free(s->warnings[0]);
        memmove(s->warnings, s->warnings + 1, (MAX_WARNINGS - 1) * sizeof *s->warnings);
        s->warning_count--;
    }
    s->warnings[s->warning_count++] = mem_strdup(text);
}

void say(struct scheduler *s, enum log_level level, const char *kind, const char *fmt, ...)
{
    char text[900];
    struct err e = {0};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    log_line(level, kind, "run_epoch=%u text=\"%s\"", s->epoch, text);
    if (level >= LOG_WARN)
        keep_warning(s, text);
    if (s->journal && journal_event(s->journal, s->epoch, kind, text, &e) < 0)
        log_line(LOG_ERROR, "the journal does not take an event", "text=\"%s\"", e.msg);
}

void complain(struct scheduler *s, const char *fmt, ...)
{
    char text[900];
    uint64_t n = ++s->dropped;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    keep_warning(s, text);
    if (log_is_told(n))
        log_warn("message dropped", "run_epoch=%u why=\"%s\" dropped=%llu", s->epoch, text,
            (unsigned long long)n);
}

void record(struct scheduler *s, json_t *line)
{
    struct err e = {0};
    int failing = metrics_write(&s->metrics, line, &e) < 0;
    if (failing && !s->metrics_failing)
        say(s, LOG_WARN, "metrics", "%s; training goes on, the lines wait in memory", e.msg);
    else if (!failing && s->metrics_failing)
        say(s, LOG_INFO, "metrics", "%s is written again", s->metrics.path);
    s->metrics_failing = failing;
}

void post(struct scheduler *s, const char *peer, int type, uint64_t request_id, json_t *body)
{
    CHECK(body);
    if (s->outbox_count == s->outbox_cap) {
        s->outbox_cap = s->outbox_cap ? 2 * s->outbox_cap : 16;
        s->outbox = mem_grow_array(s->outbox, (size_t)s->outbox_cap, sizeof *s->outbox);
    }
    struct outgoing *o = &s->outbox[s->outbox_count++];
    *o = (struct outgoing){
        .type = type, .run_epoch = s->epoch, .request_id = request_id, .body = body};
    snprintf(o->peer, sizeof o->peer, "%s", peer);
}

void post_all(struct scheduler *s, int role, int type, const json_t *body)
{
    for (int i = 0; i < s->members.count; i++)
        if (role == ROLE_COUNT || s->members.list[i].role == role)
            post(s, s->members.list[i].peer, type, 0, json_deep_copy(body));
}

int scheduler_next(struct scheduler *s, struct outgoing *out)
{
    if (s->outbox_first == s->outbox_count) {
        s->outbox_first = s->outbox_count = 0;
        return 0;
    }
    *out = s->outbox[s->outbox_first++];
    return 1;
}

json_t *position_json(const struct scheduler *s)
{
    char name[32];
    checkpoint_name(s->commits.last, name);
    return json_pack("{s:o, s:I}", "checkpoint",
        s->commits.last > 0 ? json_string(name) : json_null(), "step", (json_int_t)s->commits.last);
}

void conclude(struct scheduler *s, int state, int exit_code, const char *fmt, ...)
{
    struct err e = {0};
    char text[sizeof s->reason];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(s->reason, text, sizeof text);
    s->state = state;
    s->exit_code = exit_code;
    say(s, state == RUN_FAILED ? LOG_ERROR : LOG_INFO, run_state_name(state), "%s", text);
    if (journal_set_state(s->journal, run_state_name(state), text, &e) < 0)
        log_line(LOG_ERROR, "the journal does not take the end", "text=\"%s\"", e.msg);
    /* A scheduler that comes back finds its members waiting for it. */
    if (exit_code != EXIT_RESTART) {
        json_t *body = json_pack("{s:o}", "reason", json_text(text));
        post_all(s, ROLE_COUNT, WIRE_FINISH, body);
        json_decref(body);
    }
}

/* -- opening -- */

static int start_epoch(struct scheduler *s, int64_t now_ms, struct err *e)
{
    int rc = journal_next_epoch(s->journal, s->commits.run_epoch, &s->epoch, e);
    if (rc == 0)
        rc = jobs_drop_after(&s->jobs, s->commits.last, e);
    /* For a commit that was made just before a kill. */
    if (rc == 0 && s->commits.last > 0)
        rc = jobs_add_for(&s->jobs, s->commits.last, s->commits.manifest_sha256, e);
    if (rc < 0)
        return rc;
    s->steps.granted = s->commits.last;
    say(s, LOG_INFO, "start", "run epoch %u begins at step %lld of %lld", s->epoch,
        (long long)s->commits.last, (long long)s->run->plan.c.train.steps);
    if (s->commits.last == s->run->plan.c.train.steps) {
        s->state = RUN_EVALUATING;
        s->evaluator_seen_ms = now_ms;
    }
    return journal_set_state(s->journal, run_state_name(s->state), "", e);
}

static void say_damage(struct scheduler *s, char *lines)
{
    char *rest = NULL;
    for (char *line = lines ? strtok_r(lines, "\n", &rest) : NULL; line;
         line = strtok_r(NULL, "\n", &rest))
        say(s, LOG_WARN, "damaged checkpoint", "%s; the run goes on from step %lld", line,
            (long long)s->commits.last);
}

static int is_finished(struct scheduler *s)
{
    json_t *j = journal_state(s->journal, NULL);
    const char *state = json_string_value(json_object_get(j, "state"));
    int yes = state && strcmp(state, run_state_name(RUN_FINISHED)) == 0 &&
              s->commits.last == s->run->plan.c.train.steps;
    json_decref(j);
    return yes;
}

static int open_files(struct scheduler *s, struct buf *damaged, struct err *e)
{
    char *journal = rundir_path(s->run, "journal"), *metrics = rundir_path(s->run, "metrics.jsonl");
    int rc = journal_open(journal, &s->journal, e);
    if (rc == 0)
        rc = journal_epoch(s->journal, &s->epoch, e);
    if (rc == ERR_CORRUPT) {
        struct err why = *e;
        err_set(e, rc,
            "%s; move %s away: the run then goes on from its last checkpoint, without the eval "
            "results and events that are in there",
            why.msg, journal);
    }
    if (rc == 0)
        rc = commits_open(&s->commits, s->run, s->journal, damaged, e);
    if (rc == 0)
        rc = jobs_load(&s->jobs, s->run, s->journal, e);
    if (rc == 0)
        rc = metrics_open(&s->metrics, metrics, e);
    free(metrics);
    free(journal);
    return rc;
}

int scheduler_open(const struct rundir *run, const struct scheduler_tuning *tuning, int64_t now_ms,
    struct scheduler **out, struct err *e)
{
    struct scheduler *s = mem_array(1, sizeof *s);
    struct buf damaged = BUF_INIT;
    s->run = run;
    s->tuning = tuning ? *tuning : usual;
    if (!s->tuning.heartbeat_ms)
        s->tuning.heartbeat_ms = (int64_t)(run->config.process.heartbeat_seconds * 1000.0);
    s->metrics.fd = -1;
    s->started_ms = s->last_tick_ms = s->next_heartbeat_ms = s->evaluator_seen_ms = now_ms;
    for (int k = 0; k < CONFIG_MAX_PASSES; k++)
        s->progress.pass[k].step = -1;
    int rc = open_files(s, &damaged, e);
    if (rc == 0) {
        steps_init(&s->steps, &run->plan, run->config.checkpoint.every_steps);
        steps_reset(&s->steps, &s->commits.cursor, 0);
        if (is_finished(s)) {
            s->state = RUN_FINISHED;
            snprintf(s->reason, sizeof s->reason, "the run was finished before: %lld steps",
                (long long)s->commits.last);
        } else {
            rc = start_epoch(s, now_ms, e);
        }
    }
    if (rc == 0)
        say_damage(s, damaged.data);
    buf_release(&damaged);
    *out = s;
    if (rc < 0)
        scheduler_free(out);
    return rc;
}

void scheduler_free(struct scheduler **ps)
{
    struct scheduler *s = *ps;
    struct outgoing o;
    if (!s)
        return;
    while (scheduler_next(s, &o))
        json_decref(o.body);
    free(s->outbox);
    for (int i = 0; i < s->warning_count; i++)
        free(s->warnings[i]);
    metrics_close(&s->metrics);
    steps_release(&s->steps);
    members_release(&s->members);
    jobs_release(&s->jobs);
    commits_release(&s->commits);
    journal_close(&s->journal);
    free(s);
    *ps = NULL;
}

/* -- members come and go -- */

/* Takes `a` out; what it held is returned. The pointer is void afterwards. */
static void lose(struct scheduler *s, struct attendee *a, const char *why, int64_t now_ms)
{
    struct attendee gone = *a;
    struct err e = {0};
    char text[400];
    members_remove(&s->members, a);
    snprintf(text, sizeof text, "%s %d (process %lld) is gone: %s", role_name(gone.role), gone.rank,
        (long long)gone.pid, why);
    int over = scheduler_done(s);
    say(s, over || gone.role != ROLE_TRAINER ? LOG_INFO : LOG_WARN, over ? "left" : "lost", "%s",
        text);
    if (over)
        return;
    if (gone.role == ROLE_TRAINER)
        training_lost(s, text, now_ms);
    else if (gone.role == ROLE_EVALUATOR && jobs_return(&s->jobs, gone.peer, &e) < 0)
        say(s, LOG_WARN, "journal", "%s", e.msg);
}

static void welcome(struct scheduler *s, struct attendee *a, uint64_t request_id, int64_t now_ms)
{
    json_t *body = position_json(s);
    json_object_set_new(body, "heartbeat_ms", json_integer(s->tuning.heartbeat_ms));
    a->welcomed_ms = a->heard_ms = now_ms;
    post(s, a->peer, WIRE_WELCOME, request_id, body);
}

static void refuse(struct scheduler *s, const char *peer, uint64_t request_id, const char *why)
{
    complain(s, "%s is refused: %s", peer, why);
    post(s, peer, WIRE_REFUSE, request_id, json_pack("{s:o}", "reason", json_text(why)));
}

/* All trainers must be of one world; only when none is there may it change. */
static int check_world(const struct scheduler *s, const struct hello *h, struct err *e)
{
    for (int i = 0; i < s->members.count; i++) {
        const struct attendee *a = &s->members.list[i];
        if (a->role == ROLE_TRAINER && a->rank != h->rank && a->world != h->world)
            return err_set(e, ERR_MISMATCH,
                "trainer %d is one of %d ranks, trainer %d, which is here, one of %d", h->rank,
                h->world, a->rank, a->world);
    }
    return 0;
}

/*
 * 1: the same process says HELLO again, as it does when we were silent (a slow disk under a
 * commit), and there is nothing to undo. A trainer that has begun anew is in no run epoch.
 */
static int is_repeat(
    const struct scheduler *s, const struct attendee *a, uint32_t run_epoch, const struct hello *h)
{
    return a && a->pid == h->pid && a->role == h->role && a->rank == h->rank &&
           a->world == h->world && (h->role != ROLE_TRAINER || !a->active || run_epoch == s->epoch);
}

/* Whoever holds the peer's name or its place leaves it. */
static void make_room(struct scheduler *s, const char *peer, const struct hello *h, int64_t now_ms)
{
    struct attendee *a;
    while ((a = members_by_peer(&s->members, peer)) ||
           (a = members_by_rank(&s->members, h->role, h->rank))) {
        char old[BUS_PEER_BYTES];
        snprintf(old, sizeof old, "%s", a->peer);
        lose(s, a, "its place is taken by a new HELLO", now_ms);
        if (strcmp(old, peer) != 0)
            post(s, old, WIRE_FINISH, 0,
                json_pack("{s:s}", "reason", "another process took this one's place"));
    }
}

struct incoming {
    const char *peer;
    const struct wire_header *head;
    const json_t *body;
    struct attendee *from; /* NULL: not a member */
    int64_t now_ms;
};

static void on_hello(struct scheduler *s, const struct incoming *in)
{
    struct hello h;
    struct err e = {0};
    if (hello_parse(in->body, &h, &e) < 0 || hello_check(&h, &s->run->plan, &e) < 0 ||
        (h.role == ROLE_TRAINER && check_world(s, &h, &e) < 0)) {
        refuse(s, in->peer, in->head->request_id, e.msg);
        return;
    }
    if (scheduler_done(s)) {
        post(s, in->peer, WIRE_FINISH, in->head->request_id,
            json_pack("{s:o}", "reason", json_text(s->reason)));
        return;
    }
    struct attendee *a = members_by_peer(&s->members, in->peer);
    if (is_repeat(s, a, in->head->run_epoch, &h)) {
        /* HELLOs that queued up while nobody answered need one answer. */
        if (in->now_ms - a->welcomed_ms >= s->tuning.heartbeat_ms / 2)
            welcome(s, a, in->head->request_id, in->now_ms);
        return;
    }
    make_room(s, in->peer, &h, in->now_ms);
    if (scheduler_done(s))
        return;
    if (h.role == ROLE_TRAINER)
        training_join(s, h.world);
    a = members_add(&s->members, in->peer, &h, in->now_ms);
    say(s, LOG_INFO, "joined", "%s %d of %d (process %lld)", role_name(h.role), h.rank, h.world,
        (long long)h.pid);
    welcome(s, a, in->head->request_id, in->now_ms);
}

static void on_heartbeat(struct scheduler *s, const struct incoming *in)
{
    (void)s;
    (void)in; /* that it was heard is all */
}

static void on_bye(struct scheduler *s, const struct incoming *in)
{
    struct err e = {0};
    const char *reason;
    if (field_text(in->body, "reason", 1024, &reason, &e) < 0)
        reason = "it said BYE";
    lose(s, in->from, reason, in->now_ms);
}

/* -- what trainers say -- */

static void on_ready(struct scheduler *s, const struct incoming *in)
{
    in->from->active = 1;
    training_ready(s, in->from->rank, in->body);
}

static void on_step(struct scheduler *s, const struct incoming *in)
{
    in->from->active = 1;
    training_step(s, in->from->rank, in->body, in->now_ms);
}

static void on_saved(struct scheduler *s, const struct incoming *in)
{
    in->from->active = 1;
    training_saved(s, in->from->rank, in->body, in->now_ms);
}

/* -- what evaluators say -- */

static void on_job_get(struct scheduler *s, const struct incoming *in)
{
    const struct job *job = jobs_lease(&s->jobs, in->peer);
    if (job)
        log_info("job leased", "to=%s step=%lld suite=%s regime=%s", in->peer, (long long)job->step,
            suite_name(job->suite), regime_name(job->regime));
    post(s, in->peer, WIRE_JOB, in->head->request_id, job_message(&s->jobs, job));
}

static double pass_loss(const json_t *result, size_t pass)
{
    const json_t *p = json_array_get(json_object_get(result, "passes"), pass - 1);
    return json_number_value(json_object_get(p, "nats_per_token"));
}

/* 1 when a step before `step` had three passes: before that their loss says nothing. */
static int three_passes_trained(const struct scheduler *s, int64_t step)
{
    const struct plan *p = &s->run->plan;
    for (int64_t i = 0; i < step; i++)
        if (plan_passes(p, i) >= 3)
            return 1;
    return 0;
}

/* A result is news: into metrics.jsonl, and a warning where more passes make it worse. */
static void tell_result(struct scheduler *s, const char *id, const json_t *result)
{
    for (int i = 0; i < s->jobs.count; i++) {
        const struct job *job = &s->jobs.list[i];
        if (strcmp(job->id, id) != 0)
            continue;
        json_t *line = json_pack("{s:s, s:I, s:I, s:s, s:s, s:O}", "kind", "eval", "step",
            (json_int_t)job->step, "run_epoch", (json_int_t)s->epoch, "suite",
            suite_name(job->suite), "regime", regime_name(job->regime), "result", result);
        record(s, line);
        double two = pass_loss(result, 2), three = pass_loss(result, 3);
        if (job->suite == SUITE_LOSS && two > 0 && three > two &&
            three_passes_trained(s, job->step))
            say(s, LOG_WARN, "passes",
                "step %lld: the validation loss of pass 3 (%.4f) is above that of pass 2 (%.4f)",
                (long long)job->step, three, two);
        return;
    }
}

static int take_result(
    struct scheduler *s, const struct incoming *in, const char *id, struct err *e)
{
    const json_t *result = json_object_get(in->body, "result");
    const char *error;
    struct err summary = {0};
    if (!json_is_object(result)) {
        int rc = field_text(in->body, "error", 4096, &error, e);
        if (rc < 0)
            return err_set(e, ERR_INPUT, "neither a result (an object) nor an error (a text)");
        say(s, LOG_WARN, "evaluation", "%s: %s", in->peer, error);
        return jobs_error(&s->jobs, id, error, e);
    }
    json_t *copy = json_deep_copy(result);
    int rc = jobs_result(&s->jobs, id, copy, &summary, e);
    if (rc == 1) {
        tell_result(s, id, copy);
        training_retain(s);
    }
    if (summary.code)
        say(s, LOG_WARN, "evaluation", "the result is kept, but %s", summary.msg);
    json_decref(copy);
    return rc;
}

static void on_result(struct scheduler *s, const struct incoming *in)
{
    struct err e = {0};
    const char *id;
    int rc = field_text(in->body, "id", SHA256_HEX - 1, &id, &e);
    if (rc < 0) {
        complain(s, "RESULT of %s: %s", in->peer, e.msg);
        return;
    }
    rc = take_result(s, in, id, &e);
    if (rc < 0)
        say(s, LOG_WARN, "evaluation", "RESULT of %s: %s", in->peer, e.msg);
    /* What the journal could not take is sent again; anything else is not better the second time.
     */
    if (rc >= 0 || rc == ERR_INPUT)
        post(s, in->peer, WIRE_RESULT_ACK, in->head->request_id, json_pack("{s:s}", "id", id));
    training_tick(s, in->now_ms);
}

/* -- what operators say -- */

static void on_status_get(struct scheduler *s, const struct incoming *in)
{
    post(s, in->peer, WIRE_STATUS, in->head->request_id, status_json(s, in->now_ms));
}

static void on_stop(struct scheduler *s, const struct incoming *in)
{
    int64_t step = training_stop_step(s);
    post(s, in->peer, WIRE_STOP_ACK, in->head->request_id,
        json_pack("{s:I}", "step", (json_int_t)step));
    training_stop(s, "stopped by the operator", in->now_ms);
}

/* -- dispatch -- */

enum { FROM_ANYONE = -2, FROM_MEMBER = -1 }; /* or a role */

static const struct {
    int type, from;
    void (*handle)(struct scheduler *, const struct incoming *);
} handlers[] = {
    {WIRE_HELLO, FROM_ANYONE, on_hello},
    {WIRE_HEARTBEAT, FROM_MEMBER, on_heartbeat},
    {WIRE_BYE, FROM_MEMBER, on_bye},
    {WIRE_READY, ROLE_TRAINER, on_ready},
    {WIRE_STEP, ROLE_TRAINER, on_step},
    {WIRE_SAVED, ROLE_TRAINER, on_saved},
    {WIRE_JOB_GET, ROLE_EVALUATOR, on_job_get},
    {WIRE_RESULT, ROLE_EVALUATOR, on_result},
    {WIRE_STATUS_GET, FROM_ANYONE, on_status_get},
    {WIRE_STOP, FROM_ANYONE, on_stop},
};

/* Why a message is not for us now; NULL: it is. */
static const char *why_not(const struct scheduler *s, const struct incoming *in, int from)
{
    if (from == FROM_ANYONE)
        return NULL;
    if (!in->from)
        return "its sender is not a member; it has to say HELLO";
    if (from >= 0 && in->from->role != from)
        return "its sender has another role";
    if (in->from->role == ROLE_TRAINER && in->head->run_epoch != s->epoch)
        return "it is of another run epoch";
    if (scheduler_done(s) && in->head->type != WIRE_BYE && in->head->type != WIRE_HEARTBEAT)
        return "the run is over";
    return NULL;
}

/* Old epochs and strangers are the normal after-effects of a death: counted, not kept as warnings.
 */
static void drop(struct scheduler *s, const struct incoming *in, const char *why)
{
    s->dropped++;
    log_debug("message dropped", "from=%s type=%s message_epoch=%u run_epoch=%u why=\"%s\"",
        in->peer, wire_type_name(in->head->type), in->head->run_epoch, s->epoch, why);
}

void scheduler_message(struct scheduler *s, const char *peer, const struct wire_header *h,
    const json_t *body, int64_t now_ms)
{
    struct incoming in = {.peer = peer,
        .head = h,
        .body = body,
        .from = members_by_peer(&s->members, peer),
        .now_ms = now_ms};
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        if (handlers[i].type != h->type)
            continue;
        if (!body) {
            complain(s, "%s of %s: its body is not a JSON object", wire_type_name(h->type), peer);
            return;
        }
        const char *why = why_not(s, &in, handlers[i].from);
        if (why) {
            drop(s, &in, why);
            return;
        }
        if (in.from)
            in.from->heard_ms = now_ms;
        handlers[i].handle(s, &in);
        return;
    }
    drop(s, &in, "no message of this type is for a scheduler");
}

void scheduler_unreachable(struct scheduler *s, const char *peer, int64_t now_ms)
{
    struct attendee *a = members_by_peer(&s->members, peer);
    if (a)
        lose(s, a, "a message cannot be delivered", now_ms);
}

void scheduler_stop(struct scheduler *s, const char *reason, int64_t now_ms)
{
    training_stop(s, reason, now_ms);
}

/* -- time -- */

static void lose_the_silent(struct scheduler *s, int64_t now_ms)
{
    int64_t beat = s->tuning.heartbeat_ms, away = now_ms - s->last_tick_ms;
    struct attendee *a;
    if (away > 2 * beat)
        members_forgive(&s->members, away - beat);
    s->last_tick_ms = now_ms;
    /* Three missed, and half of one for the way. */
    while ((a = members_silent(&s->members, now_ms, 3 * beat + beat / 2)))
        lose(s, a, "3 heartbeats are missing", now_ms);
}

void scheduler_tick(struct scheduler *s, int64_t now_ms)
{
    lose_the_silent(s, now_ms);
    if (now_ms >= s->next_heartbeat_ms) {
        json_t *body = json_object();
        post_all(s, ROLE_COUNT, WIRE_HEARTBEAT, body);
        json_decref(body);
        s->next_heartbeat_ms = now_ms + s->tuning.heartbeat_ms;
    }
    training_tick(s, now_ms);
}

int64_t scheduler_wait_ms(const struct scheduler *s, int64_t now_ms)
{
    int64_t wait = s->next_heartbeat_ms - now_ms;
    if (s->retry_at_ms && s->retry_at_ms - now_ms < wait)
        wait = s->retry_at_ms - now_ms;
    return wait < 0 ? 0 : wait > 1000 ? 1000 : wait;
}
