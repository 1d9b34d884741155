#include "trainer/worker.h"

#include <immintrin.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "common/safetensors.h"

#define MXCSR_FLUSH_TO_ZERO      0x8000u
#define MXCSR_DENORMALS_ARE_ZERO 0x0040u

struct worker {
    const struct plan *plan;
    int rank, world;
    struct device *device;
    struct model *model;
    struct optimizer *optimizer;
};

/*
 * Denormals count as zero, in this thread and in every thread of the pool: old moments decay into
 * denormals, which are slow, and the setting decides bits, so it must be the same wherever a sum is
 * computed.
 */
static void flush_denormals(int threads)
{
#pragma omp parallel num_threads(threads)
    _mm_setcsr(_mm_getcsr() | MXCSR_FLUSH_TO_ZERO | MXCSR_DENORMALS_ARE_ZERO);
}

static struct model_limits limits_of(const struct plan *p)
{
    return (struct model_limits){.batch = p->c.train.micro_rows,
        .seq = p->c.data.seq_len,
        .passes = plan_max_passes(p),
        .train = 1};
}

static struct optimizer_settings optimizer_settings_of(const struct plan *p)
{
    return (struct optimizer_settings){.beta1 = p->c.optim.beta1,
        .beta2 = p->c.optim.beta2,
        .eps = p->c.optim.eps,
        .weight_decay = p->c.optim.weight_decay,
        .clip_norm = p->c.optim.clip_norm,
        .fusion_lr_scale = p->c.optim.fusion_lr_scale};
}

int worker_new(const struct worker_settings *settings, struct worker **out, struct err *e)
{
    struct worker *w = mem_array(1, sizeof *w);
    struct model_limits limits = limits_of(settings->plan);
    struct optimizer_settings optim = optimizer_settings_of(settings->plan);
    w->plan = settings->plan;
    w->rank = settings->rank;
    w->world = settings->world;
    int rc = device_cpu_new(settings->threads, &w->device, e);
    if (rc == 0) {
        flush_denormals(w->device->threads);
        rc = model_new(w->device, &w->plan->c.model, &limits, &w->model, e);
    }
    if (rc == 0)
        rc = optimizer_new(w->device, model_weights(w->model), &optim, &w->optimizer, e);
    if (rc < 0)
        worker_free(&w);
    *out = w;
    return rc;
}

void worker_free(struct worker **pw)
{
    struct worker *w = *pw;
    if (!w)
        return;
    optimizer_free(&w->optimizer);
    if (w->model)
        model_free(&w->model);
    if (w->device)
        device_free(&w->device);
    free(w);
    *pw = NULL;
}

static size_t params_bytes(const struct worker *w)
{
    return (size_t)model_weights(w->model)->total * sizeof(float);
}

static int host_params(const struct worker *w, float **out, struct err *e)
{
    *out = mem_try_array(params_bytes(w), 1);
    return *out ? 0
                : err_set(e, ERR_NOMEM, "no memory to read %zu bytes of weights", params_bytes(w));
}

int worker_load_fresh(struct worker *w, struct err *e)
{
    float *host;
    int rc = host_params(w, &host, e);
    if (rc < 0)
        return rc;
    weights_init(model_weights(w->model), w->plan->c.train.seed, host);
    w->device->ops->upload(w->device, model_params(w->model), host, params_bytes(w));
    optimizer_reset(w->optimizer);
    free(host);
    return w->device->ops->sync(w->device, e);
}

/* Opens a file of the checkpoint and checks that it is of this step and plan. */
static int open_part(
    const struct worker *w, const char *path, int64_t step, struct safetensors **out, struct err *e)
{
    char want[24];
    int rc = safetensors_open(path, out, e);
    if (rc < 0)
        return rc;
    snprintf(want, sizeof want, "%" PRId64, step);
    const struct {
        const char *key, *want;
    } checks[] = {{"step", want}, {"plan_hash", w->plan->hash}};
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        const char *got = safetensors_meta(*out, checks[i].key);
        if (got && strcmp(got, checks[i].want) == 0)
            continue;
        rc = err_set(e, ERR_MISMATCH, "%s: %s is \"%.80s\", expected \"%s\"", path, checks[i].key,
            got ? got : "", checks[i].want);
        safetensors_close(out);
        return rc;
    }
    return 0;
}

static int load_model(struct worker *w, const char *dir, int64_t step, struct err *e)
{
    char *path = mem_printf("%s/model.safetensors", dir);
    struct safetensors *st = NULL;
    float *host = NULL;
    int rc = open_part(w, path, step, &st, e);
    if (rc == 0)
        rc = host_params(w, &host, e);
    if (rc == 0 && (rc = weights_load(model_weights(w->model), st, "", 0, host, e)) < 0)
        err_prefix(e, "%s", path);
    if (rc == 0)
        w->device->ops->upload(w->device, model_params(w->model), host, params_bytes(w));
    free(host);
    safetensors_close(&st);
    free(path);
    return rc;
}

static int load_optimizer(struct worker *w, const char *dir, int64_t step, struct err *e)
{
    char *path = mem_printf("%s/optimizer-%05d-of-%05d.safetensors", dir, w->rank, w->world);
    struct safetensors *st = NULL;
    int rc = open_part(w, path, step, &st, e);
    if (rc == 0 && (rc = optimizer_load(w->optimizer, st, e)) < 0)
        err_prefix(e, "%s", path);
    safetensors_close(&st);
    free(path);
    return rc;
}

int worker_load(struct worker *w, const char *dir, int64_t step, struct err *e)
{
    int rc = load_model(w, dir, step, e);
    if (rc == 0)
        rc = load_optimizer(w, dir, step, e);
    return rc == 0 ? w->device->ops->sync(w->device, e) : rc;
}

/* Sums to means, and the objective from them. */
static void report_losses(struct worker_report *r, const double *sums, double lambda)
{
    double extra = 0;
    for (int k = 0; k < r->passes; k++) {
        r->losses[k] = sums[k] / (double)r->tokens;
        if (k > 0)
            extra += r->losses[k];
    }
    r->total = r->losses[0] + (r->passes > 1 ? lambda * extra / (r->passes - 1) : 0);
}

/* Forward and backward of one micro-batch; adds its losses and digests. */
static void run_micro(
    struct worker *w, struct feed *f, int m, struct worker_report *r, double *sums)
{
    const struct config *c = &w->plan->c;
    double micro_sums[CONFIG_MAX_PASSES] = {0};
    double targets = (double)c->train.batch_rows * c->data.seq_len; /* of the whole step */
    struct feed_micro micro;
    feed_micro(f, r->step, m, r->passes, &micro);
    struct model_batch b = {.batch = micro.rows,
        .seq = micro.seq,
        .tokens = micro.tokens,
        .targets = micro.targets,
        .doc_starts = micro.doc_starts,
        .passes = r->passes,
        .masks = micro.masks,
        .jitter = (float)c->train.jitter,
        .noise_keys = micro.noise_keys};
    model_train(w->model, &b, (float)c->train.lambda, (float)(1.0 / targets), micro_sums);
    for (int k = 0; k < r->passes; k++)
        sums[k] += micro_sums[k];
    r->rows += micro.rows;
    r->tokens += (int64_t)micro.rows * micro.seq;
    r->digest.ids += micro.digest.ids;
    r->digest.content += micro.digest.content;
}

int worker_step(struct worker *w, struct feed *f, int64_t step, worker_abandon_fn *abandon,
    void *ctx, struct worker_report *out)
{
    double sums[CONFIG_MAX_PASSES] = {0};
    struct optimizer_result result;
    float *grads = model_grads(w->model);
    CHECK(feed_ready(f, step));
    *out = (struct worker_report){
        .step = step, .passes = plan_passes(w->plan, step), .lr = plan_lr(w->plan, step)};
    w->device->ops->zero(w->device, grads, params_bytes(w));
    for (int m = w->rank; m < feed_micros(f); m += w->world) {
        if (abandon && abandon(ctx))
            return 0;
        run_micro(w, f, m, out, sums);
    }
    report_losses(out, sums, w->plan->c.train.lambda);
    optimizer_update(w->optimizer, model_params(w->model), grads, out->lr, out->passes, &result);
    out->grad_norm = result.grad_norm;
    out->skipped = result.skipped;
    return 1;
}

struct saver_source worker_source(const struct worker *w)
{
    return (struct saver_source){
        .device = w->device, .params = model_params(w->model), .optimizer = w->optimizer};
}

const struct weight_table *worker_weights(const struct worker *w)
{
    return model_weights(w->model);
}

void worker_memory(const struct worker *w, struct worker_memory *out)
{
    struct model_limits limits = limits_of(w->plan);
    model_memory_estimate(w->device, &w->plan->c.model, &limits, &out->model);
    out->moments = 2 * params_bytes(w);
    out->passes = limits.passes;
}

int worker_threads(const struct worker *w)
{
    return w->device->threads;
}
