#include "evaluator/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/batch.h"
#include "common/mem.h"

enum { ROWS_PER_GET = 16, RESEND_SECONDS = 5 };

int rows_new(int count, int seq, struct rows *out, struct err *e)
{
    size_t n;
    if (mem_mul((size_t)count, (size_t)seq, &n) < 0)
        return err_set(e, ERR_INPUT, "%d rows of %d tokens are too many", count, seq);
    struct rows r = {.count = count, .seq = seq};
    r.tokens = mem_try_array(n, sizeof *r.tokens);
    r.targets = mem_try_array(n, sizeof *r.targets);
    r.doc_starts = mem_try_array(n, 1);
    if (!r.tokens || !r.targets || !r.doc_starts) {
        rows_release(&r);
        return err_set(e, ERR_NOMEM, "no memory for %d rows of %d tokens", count, seq);
    }
    *out = r;
    return 0;
}

void rows_release(struct rows *r)
{
    free(r->tokens);
    free(r->targets);
    free(r->doc_starts);
    memset(r, 0, sizeof *r);
}

static void take_batch(struct rows *r, int at, const struct batch *b)
{
    size_t seq = (size_t)r->seq;
    for (int i = 0; i < b->rows; i++) {
        const uint32_t *from = b->tokens + (size_t)i * (seq + 1);
        size_t to = (size_t)(at + i) * seq;
        for (size_t t = 0; t < seq; t++) {
            r->tokens[to + t] = (int32_t)from[t];
            r->targets[to + t] = (int32_t)from[t + 1];
        }
        memcpy(r->doc_starts + to, b->doc_starts + (size_t)i * seq, seq);
    }
}

static int nak_error(const struct message *msg, struct err *e)
{
    json_t *j = message_json(msg, NULL);
    const char *reason = json_string_value(json_object_get(j, "reason"));
    int retry = json_is_true(json_object_get(j, "retry"));
    int rc = retry ? 0 : err_set(e, ERR_CORRUPT, "loader: %s", reason ? reason : "no reason given");
    json_decref(j);
    return rc;
}

/* 1: the rows [at, hi) arrived; 0: something else, or a NAK that allows another try. */
static int take_answer(
    struct rows *r, int at, int hi, const struct message *msg, int vocab, struct err *e)
{
    struct batch b;
    if (msg->head.type == WIRE_NAK)
        return nak_error(msg, e);
    if (msg->head.type != WIRE_BATCH || msg->head.request_id != (uint64_t)hi)
        return 0;
    int rc = batch_decode(msg->body, msg->body_bytes, vocab, &b, e);
    if (rc < 0)
        return err_prefix(e, "loader's rows %d to %d", at, hi - 1);
    int fits =
        b.stream == BATCH_VAL && b.lo == (uint64_t)at && b.rows == hi - at && b.seq == r->seq;
    if (fits)
        take_batch(r, at, &b);
    batch_release(&b);
    return fits;
}

/* One GET until it is answered, resent now and then: a loader may have restarted in between. */
static int fetch_some(struct endpoint *ep, struct rows *r, int at, int hi, int vocab,
    int timeout_seconds, const atomic_int *stop, struct err *e)
{
    struct batch_request q = {.stream = BATCH_VAL, .lo = (uint64_t)at, .hi = (uint64_t)hi};
    struct buf body = BUF_INIT;
    struct message msg;
    int rc = 0;
    batch_request_encode(&q, &body);
    for (int tenths = 0; rc == 0; tenths++) {
        if (tenths % (RESEND_SECONDS * 10) == 0)
            endpoint_send(ep, NULL, WIRE_GET, 0, (uint64_t)hi, body.data, body.len, NULL);
        if (tenths >= timeout_seconds * 10)
            rc = err_set(e, ERR_TIMEOUT, "the loader did not answer for %d s", timeout_seconds);
        else if (stop && atomic_load(stop))
            rc = err_set(e, ERR_STOPPED, "stopped while waiting for validation rows");
        else if (endpoint_recv(ep, 100, &msg, e) == 1) {
            rc = take_answer(r, at, hi, &msg, vocab, e);
            message_release(&msg);
        }
    }
    buf_release(&body);
    return rc < 0 ? rc : 0;
}

int rows_fetch(struct bus *b, const struct rundir *run, int count, int timeout_seconds,
    const atomic_int *stop, struct rows *out, struct err *e)
{
    static atomic_uint serial;
    uint64_t have = plan_val_rows(&run->plan);
    struct endpoint *ep = NULL;
    struct rows r = {0};
    char identity[BUS_PEER_BYTES];
    if (have == 0)
        return err_set(e, ERR_INPUT, "%s: its sources hold no validation rows", run->path);
    if ((uint64_t)count > have)
        count = (int)have;
    snprintf(identity, sizeof identity, "rows-%d-%u", (int)getpid(), atomic_fetch_add(&serial, 1));
    char *path = rundir_path(run, "%s", RUNDIR_LOADER_SOCK);
    int rc = rows_new(count, run->plan.c.data.seq_len, &r, e);
    if (rc == 0)
        rc = endpoint_connect(b, path, identity, &ep, e);
    for (int at = 0; rc == 0 && at < count; at += ROWS_PER_GET) {
        int hi = at + ROWS_PER_GET < count ? at + ROWS_PER_GET : count;
        rc = fetch_some(ep, &r, at, hi, run->plan.c.model.vocab, timeout_seconds, stop, e);
    }
    endpoint_close(&ep);
    free(path);
    if (rc < 0)
        rows_release(&r);
    else
        *out = r;
    return rc;
}
