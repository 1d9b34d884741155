#include "trainer/engine.h"

#include <dirent.h>
#include <immintrin.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "common/plan_init.h"
#include "common/safetensors.h"

#define MXCSR_FLUSH_TO_ZERO      0x8000u
#define MXCSR_DENORMALS_ARE_ZERO 0x0040u
#define MAX_SAVED_WORLD          4096

struct engine {
    const struct plan *plan;
    int rank, world;
    struct plan_memory memory;
    struct device *device;
    struct model *model;
    struct optimizer *optimizer;
    struct coll *ranks; /* the caller's; NULL with one rank */
    double *shared;     /* (parts + CONFIG_MAX_PASSES + 1): what the ranks add up after backward */
    int last_micro;     /* the gradients that become final are those of the step */
};

/*
 * Denormals count as zero, in this thread and in every thread of the pool: old moments decay into
 * denormals, which are slow, and the setting decides bits, so it must be the same wherever a sum is
 * computed.
 */
static void flush_denormals(int threads)
{
    (void)threads; /* not used in a build without OpenMP */
#pragma omp parallel num_threads(threads)
    _mm_setcsr(_mm_getcsr() | MXCSR_FLUSH_TO_ZERO | MXCSR_DENORMALS_ARE_ZERO);
}

static struct optimizer_settings optimizer_settings_of(const struct plan *p, int rank, int world)
{
    return (struct optimizer_settings){.kind = p->c.optim.kind,
        .rest_lr_scale = p->c.optim.adam_lr / p->c.optim.lr,
        .momentum = p->c.optim.momentum,
        .muon_beta2 = p->c.optim.muon_beta2,
        .beta1 = p->c.optim.beta1,
        .beta2 = p->c.optim.beta2,
        .eps = p->c.optim.eps,
        .weight_decay = p->c.optim.weight_decay,
        .clip_norm = p->c.optim.clip_norm,
        .fusion_lr_scale = p->c.optim.fusion_lr_scale,
        .rank = rank,
        .world = world};
}

int engine_new(const struct engine_settings *settings, struct engine **out, struct err *e)
{
    struct engine *g = mem_array(1, sizeof *g);
    static const enum recompute none[CONFIG_MAX_PASSES];
    const enum recompute *recompute = settings->recompute ? settings->recompute : none;
    struct optimizer_settings optim =
        optimizer_settings_of(settings->plan, settings->rank, settings->world);
    struct model_limits limits = plan_model_limits(settings->plan, recompute);
    g->plan = settings->plan;
    g->rank = settings->rank;
    g->world = settings->world;
    int rc = device_cpu_new(settings->threads, &g->device, e);
    if (rc == 0)
        rc = plan_memory_make(settings->plan, recompute, g->device,
            (struct plan_rank){settings->rank, settings->world}, &g->memory, e);
    if (rc == 0) {
        flush_denormals(g->device->threads);
        rc = model_new(g->device, &g->plan->c.model, &limits, &g->model, e);
    }
    if (rc == 0)
        rc = optimizer_new(g->device, model_weights(g->model), &optim, &g->optimizer, e);
    if (rc == 0) {
        size_t parts = (size_t)optimizer_shards(g->optimizer)->count;
        g->shared = mem_array(parts + CONFIG_MAX_PASSES + 1, sizeof *g->shared);
    }
    if (rc < 0)
        engine_free(&g);
    *out = g;
    return rc;
}

void engine_free(struct engine **pg)
{
    struct engine *g = *pg;
    if (!g)
        return;
    free(g->shared);
    optimizer_free(&g->optimizer);
    if (g->model)
        model_free(&g->model);
    if (g->device)
        device_free(&g->device);
    free(g);
    *pg = NULL;
}

/* Final gradients go to their owners while backward goes on. */
static void on_final(void *ctx, int first, int end)
{
    struct engine *g = ctx;
    const struct shards *s = optimizer_shards(g->optimizer);
    if (g->last_micro)
        coll_reduce(g->ranks, model_grads(g->model), s->spans + s->first[first],
            s->first[end] - s->first[first]);
}

void engine_join(struct engine *g, struct coll *ranks)
{
    CHECK(coll_world(ranks) == g->world && coll_rank(ranks) == g->rank);
    g->ranks = ranks;
    if (g->world > 1)
        model_on_final(g->model, on_final, g);
}

static size_t params_bytes(const struct engine *g)
{
    return (size_t)model_weights(g->model)->total * sizeof(float);
}

static int host_params(const struct engine *g, float **out, struct err *e)
{
    *out = mem_try_array(params_bytes(g), 1);
    return *out ? 0
                : err_set(e, ERR_NOMEM, "no memory to read %zu bytes of weights", params_bytes(g));
}

/* Over fresh weights: those of the checkpoint that the plan branches off. */
static int load_init(const struct engine *g, float *host, struct err *e)
{
    struct model_config from;
    struct weight_table table;
    struct safetensors *st = NULL;
    int rc = plan_init_verify(g->plan, 1, &from, e);
    if (rc < 0)
        return rc;
    if ((rc = weight_table_make(&from, &table, e)) < 0)
        return rc;
    /* Fusion matrices stand last: what both models have lies at the same places. */
    CHECK(table.total <= model_weights(g->model)->total);
    char *path = mem_printf("%s/model.safetensors", g->plan->c.init_from);
    rc = safetensors_open(path, &st, e);
    if (rc == 0 && (rc = weights_load(&table, st, "", 0, host, e)) < 0)
        err_prefix(e, "%s", path);
    safetensors_close(&st);
    free(path);
    weight_table_release(&table);
    return rc;
}

int engine_load_fresh(struct engine *g, struct err *e)
{
    float *host;
    int rc = host_params(g, &host, e);
    if (rc < 0)
        return rc;
    weights_init(model_weights(g->model), g->plan->c.train.seed, host);
    if (plan_has_init(g->plan) && (rc = load_init(g, host, e)) < 0) {
        free(host);
        return rc;
    }
    g->device->ops->upload(g->device, model_params(g->model), host, params_bytes(g));
    optimizer_reset(g->optimizer);
    free(host);
    return g->device->ops->sync(g->device, e);
}

/* Opens a file of the checkpoint and checks that it is of this step and plan. */
static int open_part(
    const struct engine *g, const char *path, int64_t step, struct safetensors **out, struct err *e)
{
    char want[24];
    int rc = safetensors_open(path, out, e);
    if (rc < 0)
        return rc;
    snprintf(want, sizeof want, "%" PRId64, step);
    const struct {
        const char *key, *want;
    } checks[] = {{"step", want}, {"plan_hash", g->plan->hash}};
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

static int load_model(struct engine *g, const char *dir, int64_t step, struct err *e)
{
    char *path = mem_printf("%s/model.safetensors", dir);
    struct safetensors *st = NULL;
    float *host = NULL;
    int rc = open_part(g, path, step, &st, e);
    if (rc == 0)
        rc = host_params(g, &host, e);
    if (rc == 0 && (rc = weights_load(model_weights(g->model), st, "", 0, host, e)) < 0)
        err_prefix(e, "%s", path);
    if (rc == 0)
        g->device->ops->upload(g->device, model_params(g->model), host, params_bytes(g));
    free(host);
    safetensors_close(&st);
    free(path);
    return rc;
}

/* Of how many ranks the optimizer files of a checkpoint are; one that has files of several worlds
 * is not one that a scheduler commits. */
static int saved_world(const char *dir, int *world, struct err *e)
{
    DIR *d = opendir(dir);
    if (!d)
        return err_errno(e, "%s", dir);
    *world = 0;
    for (struct dirent *entry; *world == 0 && (entry = readdir(d));) {
        char again[64];
        if (sscanf(entry->d_name, "optimizer-00000-of-%d.", world) != 1)
            continue;
        snprintf(again, sizeof again, OPTIMIZER_FILE, 0, *world);
        if (*world < 1 || *world > MAX_SAVED_WORLD || strcmp(again, entry->d_name) != 0)
            *world = 0;
    }
    closedir(d);
    return *world ? 0 : err_set(e, ERR_INPUT, "%s: holds no optimizer-00000-of-….safetensors", dir);
}

static int load_optimizer(struct engine *g, const char *dir, int64_t step, struct err *e)
{
    int world, rc = saved_world(dir, &world, e);
    if (rc < 0)
        return rc;
    struct safetensors **files = mem_array((size_t)world, sizeof *files);
    for (int r = 0; rc == 0 && r < world; r++) {
        if (!optimizer_needs(g->optimizer, r, world))
            continue;
        char *path = mem_printf("%s/" OPTIMIZER_FILE, dir, r, world);
        rc = open_part(g, path, step, &files[r], e);
        free(path);
    }
    if (rc == 0 &&
        (rc = optimizer_load(g->optimizer, (const struct safetensors *const *)files, world, e)) < 0)
        err_prefix(e, "%s", dir);
    for (int r = 0; r < world; r++)
        safetensors_close(&files[r]);
    free(files);
    return rc;
}

int engine_load(struct engine *g, const char *dir, int64_t step, struct err *e)
{
    int rc = load_model(g, dir, step, e);
    if (rc == 0)
        rc = load_optimizer(g, dir, step, e);
    return rc == 0 ? g->device->ops->sync(g->device, e) : rc;
}

/* Sums over `tokens` to means, and the objective from them. */
static void report_losses(struct engine_report *r, const double *sums, double tokens, double lambda)
{
    double extra = 0;
    for (int k = 0; k < r->passes; k++) {
        r->losses[k] = sums[k] / tokens;
        if (k > 0)
            extra += r->losses[k];
    }
    r->total = r->losses[0] + (r->passes > 1 ? lambda * extra / (r->passes - 1) : 0);
}

/* Forward and backward of one micro-batch; adds its losses and digests. */
static void run_micro(
    struct engine *g, struct feed *f, int m, struct engine_report *r, double *sums)
{
    const struct config *c = &g->plan->c;
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
        .noise_keys = micro.noise_keys,
        .z_loss = (float)plan_z_loss(g->plan, r->step)};
    model_train(g->model, &b, (float)c->train.lambda, (float)(1.0 / targets), micro_sums);
    for (int k = 0; k < r->passes; k++)
        sums[k] += micro_sums[k];
    r->rows += micro.rows;
    r->tokens += (int64_t)micro.rows * micro.seq;
    r->digest.ids += micro.digest.ids;
    r->digest.content += micro.digest.content;
}

static int wait_for_ranks(struct engine *g, engine_abandon_fn *abandon, void *ctx, struct err *e)
{
    return g->world > 1 ? coll_wait(g->ranks, abandon, ctx, e) : 0;
}

/* Everyone gets the updated parts; the fusion's, the last of the table, only where they moved. */
static int spread_params(
    struct engine *g, int passes, engine_abandon_fn *abandon, void *ctx, struct err *e)
{
    const struct shards *s = optimizer_shards(g->optimizer);
    int n = s->count;
    while (passes == 1 && n > 0 && s->table->items[s->weight[n - 1]].group == WEIGHT_FUSION)
        n--;
    if (g->world > 1)
        coll_gather(g->ranks, model_params(g->model), s->spans, n);
    return wait_for_ranks(g, abandon, ctx, e);
}

/* What follows the last backward: the ranks' gradients and losses become one update. */
static int update(struct engine *g, const double *sums, engine_abandon_fn *abandon, void *ctx,
    struct engine_report *r, struct err *e)
{
    int parts = optimizer_shards(g->optimizer)->count;
    double *losses = g->shared + parts, *tokens = losses + r->passes;
    struct optimizer_result result;
    int rc = wait_for_ranks(g, abandon, ctx, e);
    if (rc < 0)
        return rc;
    optimizer_sums(g->optimizer, model_grads(g->model), r->passes, g->shared);
    memcpy(losses, sums, (size_t)r->passes * sizeof *sums);
    *tokens = (double)r->tokens;
    if (g->world > 1)
        coll_sum(g->ranks, g->shared, parts + r->passes + 1);
    if ((rc = wait_for_ranks(g, abandon, ctx, e)) < 0)
        return rc;
    report_losses(r, losses, *tokens, g->plan->c.train.lambda);
    optimizer_apply(g->optimizer, model_params(g->model), model_grads(g->model), g->shared, r->lr,
        r->passes, &result);
    r->grad_norm = result.grad_norm;
    r->skipped = result.skipped;
    return result.skipped ? 0 : spread_params(g, r->passes, abandon, ctx, e);
}

int engine_step(struct engine *g, struct feed *f, int64_t step, engine_abandon_fn *abandon,
    void *ctx, struct engine_report *out, struct err *e)
{
    double sums[CONFIG_MAX_PASSES] = {0};
    CHECK(feed_ready(f, step));
    CHECK(g->world == 1 || g->ranks);
    CHECK(g->world <= feed_micros(f));
    *out = (struct engine_report){
        .step = step, .passes = plan_passes(g->plan, step), .lr = plan_lr(g->plan, step)};
    g->device->ops->zero(g->device, model_grads(g->model), params_bytes(g));
    for (int m = g->rank; m < feed_micros(f); m += g->world) {
        if (abandon && abandon(ctx))
            return 0;
        g->last_micro = m + g->world >= feed_micros(f);
        run_micro(g, f, m, out, sums);
    }
    int rc = update(g, sums, abandon, ctx, out, e);
    return rc < 0 ? rc : 1;
}

struct saver_source engine_source(const struct engine *g)
{
    return (struct saver_source){
        .device = g->device, .params = model_params(g->model), .optimizer = g->optimizer};
}

const struct weight_table *engine_weights(const struct engine *g)
{
    return model_weights(g->model);
}

void engine_memory(const struct engine *g, struct plan_memory *out)
{
    *out = g->memory;
}

int engine_threads(const struct engine *g)
{
    return g->device->threads;
}

int engine_bf16_native(const struct engine *g)
{
    return g->device->ops->bf16_native(g->device);
}
