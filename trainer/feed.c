#include "trainer/feed.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/batch.h"
#include "common/check.h"
#include "common/mem.h"
#include "common/rng.h"

#define DAMAGED_MAX 5 /* times one micro-batch may arrive damaged before that is an error */

/* One micro-batch of a step in the window. */
struct slot {
    enum { SLOT_EMPTY, SLOT_ASKED, SLOT_HELD } state;
    int64_t step;
    int m; /* micro-batch of the step */
    uint64_t request_id;
    int64_t sent_ms; /* 0: not sent yet */
    int wait_ms;     /* until it is asked for again */
    int damaged;
    struct batch batch; /* when held */
};

struct feed {
    const struct plan *plan;
    struct feed_settings settings;
    struct bus *bus;
    char *sock, *identity;
    struct endpoint *endpoint;
    int micros, per_rank; /* micro-batches of a step; most a rank takes */
    int steps_ahead;      /* after the byte cap */
    size_t batch_bytes;   /* of one answer */
    struct slot *slots;   /* (steps_ahead, per_rank): step s at row s mod steps_ahead */
    uint32_t run_epoch;
    int64_t next_step; /* the first step not done; −1 before feed_restart() */
    uint64_t next_id;
    int64_t heard_ms; /* when the loader last said something, or the connection was made */
    struct feed_stats stats;
    /* arrays of the micro-batch handed out */
    int32_t *tokens, *targets;
    uint8_t *masks;
    uint64_t *noise_keys;
};

/* Of one micro-batch as it comes over the wire. */
static size_t batch_bytes(const struct plan *p)
{
    size_t rows = (size_t)p->c.train.micro_rows, seq = (size_t)p->c.data.seq_len;
    return 64 + rows * 8 + rows * (seq + 1) * 4 + rows * seq;
}

/* Steps that the credit allows: at least one. */
static size_t steps_that_fit(size_t step_bytes, int steps_ahead, size_t byte_cap)
{
    size_t fit = byte_cap / step_bytes;
    return fit < 1 ? 1 : fit < (size_t)steps_ahead ? fit : (size_t)steps_ahead;
}

static int arrays_new(struct feed *f, struct err *e)
{
    size_t rows = (size_t)f->plan->c.train.micro_rows, seq = (size_t)f->plan->c.data.seq_len;
    size_t extra = (size_t)plan_max_passes(f->plan) - 1, n;
    if (mem_mul(rows, seq, &n) < 0 || mem_mul(n, 14 + extra, &(size_t){0}) < 0)
        return err_set(e, ERR_NOMEM, "feed: micro-batch too large");
    f->tokens = mem_try_array(n, sizeof *f->tokens);
    f->targets = mem_try_array(n, sizeof *f->targets);
    f->masks = mem_try_array(n * extra, 1);
    f->noise_keys = mem_try_array(rows * extra, sizeof *f->noise_keys);
    if (!f->tokens || !f->targets || !f->masks || !f->noise_keys)
        return err_set(e, ERR_NOMEM, "feed: no memory for a micro-batch of %zu tokens", n);
    f->batch_bytes = batch_bytes(f->plan);
    return 0;
}

int feed_new(struct bus *bus, const char *sock, const char *identity,
    const struct feed_settings *settings, struct feed **out, struct err *e)
{
    const struct plan *p = settings->plan;
    struct feed *f = mem_array(1, sizeof *f);
    CHECK(settings->steps_ahead >= 1 && settings->world >= 1);
    f->plan = p;
    f->settings = *settings;
    f->bus = bus;
    f->sock = mem_strdup(sock);
    f->identity = mem_strdup(identity);
    f->next_step = -1;
    f->next_id = 1;
    f->micros = p->c.train.batch_rows / p->c.train.micro_rows;
    f->per_rank = (f->micros + settings->world - 1) / settings->world;
    int rc = arrays_new(f, e);
    if (rc == 0) {
        size_t step_bytes = f->batch_bytes * (size_t)f->per_rank;
        f->steps_ahead = (int)steps_that_fit(step_bytes, settings->steps_ahead, settings->byte_cap);
        f->slots = mem_array((size_t)f->steps_ahead * (size_t)f->per_rank, sizeof *f->slots);
        rc = endpoint_connect(bus, f->sock, f->identity, &f->endpoint, e);
    }
    if (rc < 0)
        feed_free(&f);
    *out = f;
    return rc;
}

static int slot_count(const struct feed *f)
{
    return f->slots ? f->steps_ahead * f->per_rank : 0;
}

static void slot_clear(struct slot *s)
{
    if (s->state == SLOT_HELD)
        batch_release(&s->batch);
    *s = (struct slot){.state = SLOT_EMPTY};
}

void feed_free(struct feed **pf)
{
    struct feed *f = *pf;
    if (!f)
        return;
    for (int i = 0; i < slot_count(f); i++)
        slot_clear(&f->slots[i]);
    endpoint_close(&f->endpoint);
    free(f->slots);
    free(f->noise_keys);
    free(f->masks);
    free(f->targets);
    free(f->tokens);
    free(f->identity);
    free(f->sock);
    free(f);
    *pf = NULL;
}

/* Gives every empty slot of the window the micro-batch it stands for. */
static void fill_window(struct feed *f)
{
    int64_t end = f->next_step + f->steps_ahead;
    if (end > f->plan->c.train.steps)
        end = f->plan->c.train.steps;
    for (int64_t step = f->next_step; step < end; step++) {
        struct slot *row = &f->slots[(step % f->steps_ahead) * f->per_rank];
        for (int i = 0; i < f->per_rank; i++) {
            int m = f->settings.rank + i * f->settings.world;
            if (row[i].state != SLOT_EMPTY || m >= f->micros)
                continue;
            row[i] = (struct slot){.state = SLOT_ASKED,
                .step = step,
                .m = m,
                .request_id = f->next_id++,
                .wait_ms = f->settings.retry_ms};
        }
    }
}

void feed_restart(struct feed *f, uint32_t run_epoch, int64_t step)
{
    CHECK(step >= 0);
    for (int i = 0; i < slot_count(f); i++)
        slot_clear(&f->slots[i]);
    f->run_epoch = run_epoch;
    f->next_step = step;
    fill_window(f);
}

static uint64_t slot_lo(const struct feed *f, const struct slot *s)
{
    return (uint64_t)s->step * (uint64_t)f->plan->c.train.batch_rows +
           (uint64_t)s->m * (uint64_t)f->plan->c.train.micro_rows;
}

/* Sends the GET of a slot; a queue that is full is tried again at the next pump. */
static int slot_ask(struct feed *f, struct slot *s, int64_t now, struct err *e)
{
    uint64_t lo = slot_lo(f, s);
    struct batch_request r = {.stream = BATCH_TRAIN,
        .step = (uint64_t)s->step,
        .lo = lo,
        .hi = lo + (uint64_t)f->plan->c.train.micro_rows};
    struct buf body = BUF_INIT;
    batch_request_encode(&r, &body);
    int rc = endpoint_send(
        f->endpoint, NULL, WIRE_GET, f->run_epoch, s->request_id, body.data, body.len, e);
    buf_release(&body);
    if (rc == 0) {
        s->sent_ms = now;
        f->stats.asked++;
    }
    return rc == ERR_TIMEOUT ? 0 : rc;
}

static struct slot *slot_by_request(struct feed *f, uint64_t id)
{
    for (int i = 0; i < slot_count(f); i++)
        if (f->slots[i].state != SLOT_EMPTY && f->slots[i].request_id == id)
            return &f->slots[i];
    return NULL;
}

/* The answer must be what the slot asked for, and its samples those of the plan. */
static int batch_check(
    const struct feed *f, const struct slot *s, const struct batch *b, struct err *e)
{
    const struct config *c = &f->plan->c;
    if (b->stream != BATCH_TRAIN || b->step != (uint64_t)s->step || b->lo != slot_lo(f, s) ||
        b->rows != c->train.micro_rows || b->seq != c->data.seq_len)
        return err_set(e, ERR_MISMATCH,
            "loader: step %" PRId64 ": answered with step %" PRIu64 ", rows %" PRIu64
            " + %d of %d tokens; expected rows %" PRIu64 " + %d of %d tokens",
            s->step, b->step, b->lo, b->rows, b->seq, slot_lo(f, s), c->train.micro_rows,
            c->data.seq_len);
    for (int r = 0; r < b->rows; r++) {
        uint64_t want = plan_train_sample(f->plan, b->lo + (uint64_t)r).id;
        if (b->sample_ids[r] != want)
            return err_set(e, ERR_MISMATCH,
                "loader: step %" PRId64 ": ordinal %" PRIu64 " has sample %016" PRIx64
                ", the plan says %016" PRIx64,
                s->step, b->lo + (uint64_t)r, b->sample_ids[r], want);
    }
    return 0;
}

/* A damaged answer is dropped and asked for again at once, a few times. */
static int take_damaged(struct feed *f, struct slot *s, struct err *e)
{
    f->stats.damaged++;
    if (++s->damaged >= DAMAGED_MAX)
        return err_prefix(e, "loader: step %" PRId64 ": damaged %d times", s->step, s->damaged);
    s->sent_ms = 0;
    return 0;
}

static int take_batch(struct feed *f, struct slot *s, const struct message *m, struct err *e)
{
    struct batch b;
    if (batch_decode(m->body, m->body_bytes, f->plan->c.model.vocab, &b, e) < 0)
        return take_damaged(f, s, e);
    int rc = batch_check(f, s, &b, e);
    if (rc < 0) {
        batch_release(&b);
        return rc;
    }
    s->batch = b;
    s->state = SLOT_HELD;
    f->stats.batches++;
    f->stats.bytes += m->body_bytes;
    return 0;
}

/* The loader cannot give these rows: now (asked again later), or at all (an error with its reason).
 */
static int take_nak(
    struct feed *f, struct slot *s, const struct message *m, int64_t now, struct err *e)
{
    f->stats.refused++;
    json_t *j = message_json(m, NULL);
    const char *reason = j ? json_string_value(json_object_get(j, "reason")) : NULL;
    int retry = !j || !json_is_false(json_object_get(j, "retry")), rc = 0;
    if (!retry)
        rc = err_set(e, ERR_INPUT, "loader: step %" PRId64 ": %s", s->step,
            reason ? reason : "refused without a reason");
    s->sent_ms = now;
    s->wait_ms = f->settings.retry_ms;
    json_decref(j);
    return rc;
}

static int take(struct feed *f, const struct message *m, int64_t now, struct err *e)
{
    struct slot *s = slot_by_request(f, m->head.request_id);
    if (m->head.run_epoch != f->run_epoch || !s) {
        f->stats.stale++;
        return 0;
    }
    if (s->state == SLOT_HELD) {
        f->stats.duplicates++;
        return 0;
    }
    if (m->head.type == WIRE_BATCH)
        return take_batch(f, s, m, e);
    if (m->head.type == WIRE_NAK)
        return take_nak(f, s, m, now, e);
    f->stats.stale++;
    return 0;
}

static int receive(struct feed *f, int64_t now, struct err *e)
{
    for (;;) {
        struct message m;
        int rc = endpoint_recv(f->endpoint, 0, &m, e);
        if (rc == ERR_CORRUPT || rc == ERR_MISMATCH) { /* a frame that is not ours: dropped */
            f->stats.damaged++;
            continue;
        }
        if (rc <= 0)
            return rc;
        f->heard_ms = now;
        rc = take(f, &m, now, e);
        message_release(&m);
        if (rc < 0)
            return rc;
    }
}

/* After a silence while something is owed: a new connection, which also drops what was queued for
 * the old one. */
static int reconnect_if_silent(struct feed *f, int64_t now, struct err *e)
{
    int64_t oldest = INT64_MAX;
    for (int i = 0; i < slot_count(f); i++)
        if (f->slots[i].state == SLOT_ASKED && f->slots[i].sent_ms && f->slots[i].sent_ms < oldest)
            oldest = f->slots[i].sent_ms;
    int64_t since = oldest == INT64_MAX ? now : oldest > f->heard_ms ? oldest : f->heard_ms;
    if (now - since < f->settings.retry_ms)
        return 0;
    endpoint_close(&f->endpoint);
    int rc = endpoint_connect(f->bus, f->sock, f->identity, &f->endpoint, e);
    if (rc < 0)
        return rc;
    f->heard_ms = now;
    f->stats.reconnects++;
    for (int i = 0; i < slot_count(f); i++)
        f->slots[i].sent_ms = 0;
    return 0;
}

static int ask_due(struct feed *f, int64_t now, struct err *e)
{
    for (int k = 0; k < f->steps_ahead; k++) { /* in the order the steps come */
        struct slot *row = &f->slots[((f->next_step + k) % f->steps_ahead) * f->per_rank];
        for (int i = 0; i < f->per_rank; i++) {
            struct slot *s = &row[i];
            if (s->state != SLOT_ASKED || (s->sent_ms && now - s->sent_ms < s->wait_ms))
                continue;
            if (s->sent_ms) {
                f->stats.resends++;
                if (s->wait_ms < 8 * f->settings.retry_ms)
                    s->wait_ms *= 2;
            }
            int rc = slot_ask(f, s, now, e);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

int feed_pump(struct feed *f, int64_t now, struct err *e)
{
    if (f->next_step < 0)
        return 0;
    if (!f->heard_ms)
        f->heard_ms = now;
    int rc = receive(f, now, e);
    if (rc == 0)
        rc = reconnect_if_silent(f, now, e);
    if (rc == 0)
        rc = ask_due(f, now, e);
    return rc;
}

struct endpoint *feed_endpoint(const struct feed *f)
{
    return f->endpoint;
}

static struct slot *held_slot(const struct feed *f, int64_t step, int m)
{
    struct slot *s = &f->slots[(step % f->steps_ahead) * f->per_rank + m / f->settings.world];
    return s->state == SLOT_HELD && s->step == step && s->m == m ? s : NULL;
}

int feed_ready(const struct feed *f, int64_t step)
{
    if (step < f->next_step || step >= f->plan->c.train.steps)
        return 0;
    for (int m = f->settings.rank; m < f->micros; m += f->settings.world)
        if (!held_slot(f, step, m))
            return 0;
    return 1;
}

int feed_micros(const struct feed *f)
{
    return f->micros;
}

void feed_micro(struct feed *f, int64_t step, int m, int passes, struct feed_micro *out)
{
    const struct slot *s = held_slot(f, step, m);
    CHECK(s && passes >= 1 && passes <= plan_max_passes(f->plan));
    const struct batch *b = &s->batch;
    size_t rows = (size_t)b->rows, seq = (size_t)b->seq;
    *out = (struct feed_micro){.rows = b->rows,
        .seq = b->seq,
        .tokens = f->tokens,
        .targets = f->targets,
        .doc_starts = b->doc_starts,
        .masks = passes > 1 ? f->masks : NULL,
        .noise_keys = passes > 1 ? f->noise_keys : NULL};
    for (size_t r = 0; r < rows; r++) {
        const uint32_t *row = b->tokens + r * (seq + 1);
        for (size_t t = 0; t < seq; t++) {
            f->tokens[r * seq + t] = (int32_t)row[t];
            f->targets[r * seq + t] = (int32_t)row[t + 1];
        }
        out->digest.ids += rng_mix(b->sample_ids[r]);
        out->digest.content += row_digest(b->sample_ids[r], row, seq + 1);
    }
    for (int pass = 2; pass <= passes; pass++)
        for (size_t r = 0; r < rows; r++) {
            size_t at = (size_t)(pass - 2) * rows + r;
            plan_fuse_mask(
                f->plan, b->sample_ids[r], pass, b->doc_starts + r * seq, f->masks + at * seq);
            f->noise_keys[at] = plan_noise_key(f->plan, b->sample_ids[r], pass);
        }
}

void feed_done(struct feed *f, int64_t step)
{
    CHECK(step >= f->next_step);
    for (int i = 0; i < slot_count(f); i++)
        if (f->slots[i].state != SLOT_EMPTY && f->slots[i].step <= step)
            slot_clear(&f->slots[i]);
    f->next_step = step + 1;
    fill_window(f);
}

const struct feed_stats *feed_stats_of(const struct feed *f)
{
    return &f->stats;
}

size_t feed_planned_bytes(const struct plan *p, int world)
{
    size_t micros = (size_t)(p->c.train.batch_rows / p->c.train.micro_rows);
    size_t per_rank = (micros + (size_t)world - 1) / (size_t)world;
    size_t n = (size_t)p->c.train.micro_rows * (size_t)p->c.data.seq_len;
    size_t extra = (size_t)plan_max_passes(p) - 1;
    size_t held = steps_that_fit(batch_bytes(p) * per_rank, FEED_STEPS_AHEAD, FEED_BYTE_CAP);
    return n * (8 + extra) + held * per_rank * batch_bytes(p);
}
