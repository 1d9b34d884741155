#include "evaluator/suites.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/field.h"
#include "common/mem.h"
#include "evaluator/regime_loss.h"

struct model_limits suite_limits(int seq)
{
    return (struct model_limits){.batch = SUITE_BATCH_ROWS, .seq = seq, .passes = 1, .train = 0};
}

static double bits_per_byte(double nats, double bytes)
{
    return bytes > 0 ? nats / (bytes * 0.69314718055994531) : NAN;
}

/* -- parallel passes over all rows ---------------------------------------------------------- */

struct pass_sums {
    double nats, change_sq, before_sq;
    uint64_t tokens, positions;
};

/* What visiting one batch needs. `before` holds the previous pass's hidden states (B, T, D). */
struct pass_walk {
    const struct suite_job *job;
    struct pass_sums *sums; /* by pass from 0 */
    float *before;          /* NULL: hidden states are not looked at */
    const int32_t *age;     /* (B, T): distance from the document's start */
    size_t n, dim;          /* B·T, D */
};

static void sum_change(const struct pass_walk *w, const struct model_pass *p)
{
    struct pass_sums *s = &w->sums[p->pass - 1];
    for (size_t i = 0; p->pass > 1 && i < w->n; i++) {
        if (w->age[i] < p->pass - 1)
            continue;
        const float *now = p->hidden + i * w->dim, *was = w->before + i * w->dim;
        for (size_t k = 0; k < w->dim; k++) {
            double diff = (double)now[k] - (double)was[k];
            s->change_sq += diff * diff;
            s->before_sq += (double)was[k] * (double)was[k];
        }
        s->positions++;
    }
    memcpy(w->before, p->hidden, w->n * w->dim * sizeof *w->before);
}

static int visit_pass(void *ctx, const struct model_pass *p)
{
    struct pass_walk *w = ctx;
    struct pass_sums *s = &w->sums[p->pass - 1];
    for (size_t i = 0; i < w->n; i++)
        s->nats += (double)p->losses[i];
    s->tokens += w->n;
    if (w->before)
        sum_change(w, p);
    return w->job->stop && atomic_load(w->job->stop);
}

static void find_ages(const struct rows *r, int at, int count, int32_t *age)
{
    for (int i = 0; i < count * r->seq; i++) {
        int start = r->doc_starts[(size_t)at * (size_t)r->seq + (size_t)i] || i % r->seq == 0;
        age[i] = start ? 0 : age[i - 1] + 1;
    }
}

/* One batch of rows [at, at + count) through all passes. */
static int walk_batch(
    const struct pass_walk *w, int at, int count, int passes, uint8_t *masks, struct err *e)
{
    const struct rows *r = w->job->rows;
    struct pass_walk walk = *w;
    size_t from = (size_t)at * (size_t)r->seq;
    walk.n = (size_t)count * (size_t)r->seq;
    for (size_t i = 0; i < walk.n * (size_t)(passes - 1); i++)
        masks[i] = walk.age[i % walk.n] > 0;
    struct model_batch b = {.batch = count,
        .seq = r->seq,
        .tokens = r->tokens + from,
        .targets = r->targets + from,
        .doc_starts = r->doc_starts + from,
        .passes = passes,
        .masks = passes > 1 ? masks : NULL};
    int want = MODEL_WANT_LOSSES | (w->before ? MODEL_WANT_HIDDEN : 0);
    int rc = model_forward(w->job->snapshot->model, &b, want, visit_pass, &walk);
    if (rc > 0) /* visit_pass() was asked to stop */
        return err_set(e, ERR_STOPPED, "stopped while scoring");
    return rc < 0 ? err_set(e, rc, "%d rows through %d passes failed", count, passes) : 0;
}

/* Runs `passes` fully fused passes over all rows; sums (passes) are added to. */
static int walk_passes(
    const struct suite_job *job, int passes, int want_hidden, struct pass_sums *sums, struct err *e)
{
    const struct rows *r = job->rows;
    size_t n = SUITE_BATCH_ROWS * (size_t)r->seq, dim = (size_t)job->snapshot->config.dim;
    size_t masks_bytes, hidden_count;
    if (mem_mul(n, (size_t)passes, &masks_bytes) < 0 || mem_mul(n, dim, &hidden_count) < 0)
        return err_set(e, ERR_INPUT, "rows of %d tokens, %d passes are too many", r->seq, passes);
    uint8_t *masks = mem_try_array(masks_bytes, 1);
    int32_t *age = mem_try_array(n, sizeof *age);
    float *before = want_hidden ? mem_try_array(hidden_count, sizeof *before) : NULL;
    struct pass_walk w = {.job = job, .sums = sums, .before = before, .age = age, .dim = dim};
    int rc = masks && age && (before || !want_hidden)
                 ? 0
                 : err_set(e, ERR_NOMEM, "no memory to score %d passes", passes);
    for (int at = 0; rc == 0 && at < r->count; at += SUITE_BATCH_ROWS) {
        int count = r->count - at < SUITE_BATCH_ROWS ? r->count - at : SUITE_BATCH_ROWS;
        find_ages(r, at, count, age);
        rc = walk_batch(&w, at, count, passes, masks, e);
    }
    free(masks);
    free(age);
    free(before);
    return rc;
}

/* -- loss ------------------------------------------------------------------------------------ */

/* Standard error of the mean over rows (n − 1). */
static double row_stderr(const double *x, int n)
{
    double mean = 0, sq = 0;
    if (n < 2)
        return NAN;
    for (int i = 0; i < n; i++)
        mean += x[i] / n;
    for (int i = 0; i < n; i++)
        sq += (x[i] - mean) * (x[i] - mean);
    return sqrt(sq / (n - 1) / n);
}

static double target_bytes(const struct suite_job *job)
{
    const struct rows *r = job->rows;
    double bytes = 0;
    for (size_t i = 0; i < (size_t)r->count * (size_t)r->seq; i++)
        bytes += tokenizer_bytes_of(job->snapshot->tokenizer, (uint32_t)r->targets[i]);
    return bytes;
}

static int add_passes(const struct suite_job *job, json_t *result, struct err *e)
{
    int passes = job->snapshot->config.feedback ? job->passes : 1;
    struct pass_sums *sums = mem_array((size_t)passes, sizeof *sums);
    int rc = walk_passes(job, passes, 0, sums, e);
    json_t *list = json_array();
    double bytes = target_bytes(job);
    for (int k = 0; rc == 0 && k < passes; k++)
        json_array_append_new(
            list, json_pack("{s:i, s:o, s:o}", "pass", k + 1, "nats_per_token",
                      json_real_or_null(sums[k].nats / (double)sums[k].tokens), "bits_per_byte",
                      json_real_or_null(bits_per_byte(sums[k].nats, bytes))));
    json_object_set_new(result, "passes", list);
    free(sums);
    return rc;
}

static int run_loss(const struct suite_job *job, json_t *result, struct err *e)
{
    int n = job->rows->count;
    struct regime_loss s = {.row_nats = mem_array((size_t)n, sizeof(double))};
    int rc = regime_loss_run(job, &s, e);
    if (rc == 0) {
        json_object_set_new(result, "tokens", json_integer((json_int_t)s.tokens));
        json_object_set_new(result, "nats_per_token", json_real_or_null(s.nats / (double)s.tokens));
        json_object_set_new(
            result, "bits_per_byte", json_real_or_null(bits_per_byte(s.nats, s.bytes)));
        json_object_set_new(result, "stderr", json_real_or_null(row_stderr(s.row_nats, n)));
    }
    if (rc == 0 && job->regime == REGIME_STANDARD)
        rc = add_passes(job, result, e);
    free(s.row_nats);
    return rc;
}

/* -- fixed point ------------------------------------------------------------------------------ */

/* Changes below this are float32 rounding, not the map. */
static const double change_floor = 1e-6;

static double contraction(const double *change, int passes)
{
    double logs = 0;
    int n = 0;
    for (int k = 2; k + 1 < passes; k++) /* change[1] is pass 2's */
        if (change[k] > change_floor && change[k + 1] > change_floor) {
            logs += log(change[k + 1] / change[k]);
            n++;
        }
    return n ? exp(logs / n) : NAN;
}

static int run_fixed_point(const struct suite_job *job, json_t *result, struct err *e)
{
    int passes = job->fixed_point_passes;
    if (!job->snapshot->config.feedback)
        return err_set(e, ERR_UNSUPPORTED, "%s: fixed_point needs feedback weights, it has none",
            job->snapshot->dir);
    if (job->rows->seq <= passes)
        return err_set(e, ERR_INPUT,
            "fixed_point: %d passes need rows longer than that, they have %d tokens", passes,
            job->rows->seq);
    struct pass_sums *sums = mem_array((size_t)passes, sizeof *sums);
    double *change = mem_array((size_t)passes, sizeof *change);
    int rc = walk_passes(job, passes, 1, sums, e);
    json_t *list = json_array();
    for (int k = 0; rc == 0 && k < passes; k++) {
        const struct pass_sums *s = &sums[k];
        change[k] = s->positions ? sqrt(s->change_sq / s->before_sq) : NAN;
        json_array_append_new(
            list, json_pack("{s:i, s:o, s:I, s:o}", "pass", k + 1, "relative_change",
                      json_real_or_null(change[k]), "positions", (json_int_t)s->positions,
                      "nats_per_token", json_real_or_null(s->nats / (double)s->tokens)));
    }
    if (rc == 0) {
        json_object_set_new(result, "tokens", json_integer((json_int_t)sums[0].tokens));
        json_object_set_new(result, "contraction", json_real_or_null(contraction(change, passes)));
    }
    json_object_set_new(result, "passes", list);
    free(change);
    free(sums);
    return rc;
}

int suite_run(const struct suite_job *job, json_t **result, struct err *e)
{
    static int (*const runs[SUITE_COUNT])(const struct suite_job *, json_t *, struct err *) = {
        [SUITE_LOSS] = run_loss,
        [SUITE_FIXED_POINT] = run_fixed_point,
    };
    CHECK(job->suite >= 0 && job->suite < SUITE_COUNT);
    CHECK(job->rows->count > 0);
    double start = clock_seconds();
    json_t *j = json_pack("{s:s, s:I, s:i}", "suite", suite_name(job->suite), "step",
        (json_int_t)job->snapshot->step, "rows", job->rows->count);
    if (job->suite == SUITE_LOSS)
        json_object_set_new(j, "regime", json_string(regime_name(job->regime)));
    int rc = runs[job->suite](job, j, e);
    if (rc < 0) {
        json_decref(j);
        return rc;
    }
    json_object_set_new(j, "seconds", json_real(clock_seconds() - start));
    *result = j;
    return 0;
}
