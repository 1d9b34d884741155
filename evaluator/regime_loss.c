#include "evaluator/regime_loss.h"

#include <math.h>
#include <stdlib.h>

#include "common/mem.h"
#include "kernels/decode.h"

/* The walk of one batch of rows through the decoder: row i of the batch is slot i. */
struct walk {
    const struct suite_job *job;
    struct decoder *dec;
    struct decode_row *rows; /* (SUITE_BATCH_ROWS · S/2) */
    float *logits;           /* (SUITE_BATCH_ROWS, V) */
    int at, count, prompt;
};

/* Position t of row i as the decoder takes it. */
static struct decode_row row_at(const struct walk *w, int i, int t, int fused)
{
    const struct rows *r = w->job->rows;
    size_t base = (size_t)(w->at + i) * (size_t)r->seq;
    int start = t;
    while (start > 0 && !r->doc_starts[base + (size_t)start])
        start--;
    return (struct decode_row){.slot = i,
        .pos = t,
        .first = w->job->snapshot->config.doc_mask ? start : 0,
        .token = r->tokens[base + (size_t)t],
        .fused = fused && t != start};
}

/* Feeds positions [from, to) of every row. */
static int feed(struct walk *w, int from, int to, int fused, float *logits, struct err *e)
{
    int n = 0;
    for (int i = 0; i < w->count; i++)
        for (int t = from; t < to; t++)
            w->rows[n++] = row_at(w, i, t, fused);
    return decoder_run(w->dec, w->rows, n, NULL, logits, e);
}

static int prefill(struct walk *w, struct err *e)
{
    const struct suite_job *job = w->job;
    int rc = 0, fused = job->regime == REGIME_FUSED;
    if (fused && job->fused_passes == 0) {
        for (int t = 0; rc == 0 && t < w->prompt; t++)
            rc = feed(w, t, t + 1, 1, NULL, e);
        return rc;
    }
    rc = feed(w, 0, w->prompt, 0, NULL, e);
    for (int k = 1; rc == 0 && fused && k < job->fused_passes; k++)
        rc = feed(w, 0, w->prompt, 1, NULL, e);
    return rc;
}

static double token_nats(const float *logits, int vocab, int32_t target)
{
    double top = -INFINITY, sum = 0;
    for (int v = 0; v < vocab; v++)
        top = (double)logits[v] > top ? (double)logits[v] : top;
    for (int v = 0; v < vocab; v++)
        sum += exp((double)logits[v] - top);
    return log(sum) + top - (double)logits[target];
}

static void score_position(const struct walk *w, int t, struct regime_loss *s)
{
    const struct rows *r = w->job->rows;
    const struct snapshot *snap = w->job->snapshot;
    for (int i = 0; i < w->count; i++) {
        int32_t target = r->targets[(size_t)(w->at + i) * (size_t)r->seq + (size_t)t];
        double nats = token_nats(
            w->logits + (size_t)i * (size_t)snap->config.vocab, snap->config.vocab, target);
        s->nats += nats;
        s->row_nats[w->at + i] += nats / (r->seq - w->prompt);
        s->bytes += tokenizer_bytes_of(snap->tokenizer, (uint32_t)target);
        s->tokens++;
    }
}

static int score_batch(struct walk *w, struct regime_loss *s, struct err *e)
{
    const struct suite_job *job = w->job;
    int rc = prefill(w, e);
    for (int t = w->prompt; rc == 0 && t < job->rows->seq; t++) {
        rc = feed(w, t, t + 1, job->regime != REGIME_STANDARD, w->logits, e);
        if (rc == 0)
            score_position(w, t, s);
        if (rc == 0 && job->stop && atomic_load(job->stop))
            rc = err_set(e, ERR_STOPPED, "stopped while scoring");
    }
    return rc;
}

int regime_loss_run(const struct suite_job *job, struct regime_loss *s, struct err *e)
{
    const struct rows *r = job->rows;
    const struct snapshot *snap = job->snapshot;
    if (job->regime != REGIME_STANDARD && !snap->config.feedback)
        return err_set(e, ERR_UNSUPPORTED, "%s: regime %s needs feedback weights, it has none",
            snap->dir, regime_name(job->regime));
    if (r->seq < 2)
        return err_set(e, ERR_INPUT, "rows of %d token: at least 2 are needed", r->seq);
    struct walk w = {.job = job, .prompt = r->seq / 2};
    size_t max_rows = SUITE_BATCH_ROWS * (size_t)w.prompt;
    int rc = decoder_new(snap->model, SUITE_BATCH_ROWS, r->seq, (int)max_rows, &w.dec, e);
    if (rc < 0)
        return rc;
    w.rows = mem_array(max_rows, sizeof *w.rows);
    w.logits = mem_array(SUITE_BATCH_ROWS * (size_t)snap->config.vocab, sizeof *w.logits);
    for (w.at = 0; rc == 0 && w.at < r->count; w.at += SUITE_BATCH_ROWS) {
        w.count = r->count - w.at < SUITE_BATCH_ROWS ? r->count - w.at : SUITE_BATCH_ROWS;
        rc = score_batch(&w, s, e);
    }
    free(w.rows);
    free(w.logits);
    decoder_free(&w.dec);
    return rc;
}
