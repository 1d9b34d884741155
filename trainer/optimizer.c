#include "trainer/optimizer.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"

/* A run of neighbouring tensors of one group (with the zero padding between them): one call of the
 * device. */
struct range {
    int64_t offset, count;
    enum weight_group group;
};

struct optimizer {
    struct device *device;
    const struct weight_table *table;
    struct optimizer_settings settings;
    struct range *ranges;
    int range_count;
    float *m, *v;
    int64_t updates[OPTIMIZER_GROUPS];
};

/* Metadata key of each group's count. */
static const char *const count_keys[OPTIMIZER_GROUPS] = {
    [WEIGHT_MATRIX] = "updates.matrix",
    [WEIGHT_VECTOR] = "updates.vector",
    [WEIGHT_FUSION] = "updates.fusion",
};

static void ranges_make(struct optimizer *o)
{
    const struct weight_table *t = o->table;
    o->ranges = mem_array((size_t)t->count, sizeof *o->ranges);
    for (int i = 0; i < t->count; i++) {
        const struct weight *w = &t->items[i];
        int n = o->range_count;
        if (n == 0 || o->ranges[n - 1].group != w->group)
            o->ranges[o->range_count++] = (struct range){.offset = w->offset, .group = w->group};
        struct range *r = &o->ranges[o->range_count - 1];
        r->count = w->offset + w->count - r->offset;
    }
}

int optimizer_new(struct device *d, const struct weight_table *table,
    const struct optimizer_settings *settings, struct optimizer **out, struct err *e)
{
    struct optimizer *o = mem_array(1, sizeof *o);
    size_t bytes = 0;
    o->device = d;
    o->table = table;
    o->settings = *settings;
    ranges_make(o);
    if (mem_mul((size_t)table->total, sizeof(float), &bytes) == 0) {
        o->m = d->ops->alloc(d, bytes);
        o->v = d->ops->alloc(d, bytes);
    }
    if (!o->m || !o->v) {
        optimizer_free(&o);
        return err_set(
            e, ERR_NOMEM, "optimizer: no memory for 2 x %" PRId64 " moments", table->total);
    }
    *out = o;
    return 0;
}

void optimizer_free(struct optimizer **po)
{
    struct optimizer *o = *po;
    if (!o)
        return;
    if (o->v)
        o->device->ops->free(o->device, o->v);
    if (o->m)
        o->device->ops->free(o->device, o->m);
    free(o->ranges);
    free(o);
    *po = NULL;
}

static int takes_part(enum weight_group group, int passes)
{
    return group != WEIGHT_FUSION || passes > 1;
}

static double global_norm(const struct optimizer *o, const float *grads, int passes)
{
    double sum = 0;
    for (int i = 0; i < o->table->count; i++) {
        const struct weight *w = &o->table->items[i];
        if (takes_part(w->group, passes))
            sum += o->device->ops->sum_sq(o->device, grads + w->offset, (size_t)w->count);
    }
    return sqrt(sum);
}

void optimizer_update(struct optimizer *o, float *params, const float *grads, double lr, int passes,
    struct optimizer_result *out)
{
    const struct optimizer_settings *s = &o->settings;
    double norm = global_norm(o, grads, passes);
    *out = (struct optimizer_result){.grad_norm = norm, .skipped = !isfinite(norm)};
    if (out->skipped)
        return;
    double clip = s->clip_norm > 0 && norm > s->clip_norm ? s->clip_norm / norm : 1.0;
    for (int g = 0; g < OPTIMIZER_GROUPS; g++)
        o->updates[g] += takes_part((enum weight_group)g, passes);
    for (int i = 0; i < o->range_count; i++) {
        const struct range *r = &o->ranges[i];
        if (!takes_part(r->group, passes))
            continue;
        struct adamw_args a = {
            .lr = (float)(r->group == WEIGHT_FUSION ? lr * s->fusion_lr_scale : lr),
            .beta1 = (float)s->beta1,
            .beta2 = (float)s->beta2,
            .eps = (float)s->eps,
            .weight_decay = r->group == WEIGHT_MATRIX ? (float)s->weight_decay : 0,
            .grad_scale = (float)clip,
            .t = o->updates[r->group],
        };
        o->device->ops->adamw(o->device, params + r->offset, o->m + r->offset, o->v + r->offset,
            grads + r->offset, (size_t)r->count, &a);
    }
}

const float *optimizer_m(const struct optimizer *o)
{
    return o->m;
}

const float *optimizer_v(const struct optimizer *o)
{
    return o->v;
}

int64_t optimizer_updates(const struct optimizer *o, enum weight_group group)
{
    return o->updates[group];
}

void optimizer_reset(struct optimizer *o)
{
    size_t bytes = (size_t)o->table->total * sizeof(float);
    o->device->ops->zero(o->device, o->m, bytes);
    o->device->ops->zero(o->device, o->v, bytes);
    memset(o->updates, 0, sizeof o->updates);
}

void optimizer_as_tensors(const struct weight_table *table, const float *m, const float *v,
    struct st_tensor *out, char (*names)[128])
{
    weights_as_tensors(table, m, "m.", out, names);
    weights_as_tensors(table, v, "v.", out + table->count, names + table->count);
}

void optimizer_meta_make(const int64_t updates[OPTIMIZER_GROUPS], struct optimizer_meta *out)
{
    for (int g = 0; g < OPTIMIZER_GROUPS; g++) {
        snprintf(out->values[g], sizeof out->values[g], "%" PRId64, updates[g]);
        out->pairs[2 * g] = count_keys[g];
        out->pairs[2 * g + 1] = out->values[g];
    }
    out->pairs[2 * OPTIMIZER_GROUPS] = NULL;
}

static int read_count(const struct safetensors *st, const char *key, int64_t *out, struct err *e)
{
    const char *text = safetensors_meta(st, key);
    char *end = NULL;
    if (!text)
        return err_set(e, ERR_INPUT, "metadata lacks %s: not an optimizer file", key);
    errno = 0;
    long long n = strtoll(text, &end, 10);
    if (end == text || *end || errno || n < 0)
        return err_set(
            e, ERR_INPUT, "metadata %s is \"%.32s\", expected a count of updates", key, text);
    *out = n;
    return 0;
}

int optimizer_load(struct optimizer *o, const struct safetensors *st, struct err *e)
{
    const struct weight_table *t = o->table;
    size_t bytes = (size_t)t->total * sizeof(float);
    int rc = 0;
    for (int g = 0; g < OPTIMIZER_GROUPS && rc == 0; g++)
        rc = read_count(st, count_keys[g], &o->updates[g], e);
    float *host = rc == 0 ? mem_try_array((size_t)t->total, sizeof *host) : NULL;
    if (rc == 0 && !host)
        rc = err_set(e, ERR_NOMEM, "no memory to read %zu bytes of moments", bytes);
    if (rc == 0 && safetensors_count(st) != 2 * t->count)
        rc = err_set(e, ERR_MISMATCH, "%d tensors, expected %d (m. and v. of each weight)",
            safetensors_count(st), 2 * t->count);
    if (rc == 0 && (rc = weights_load(t, st, "m.", 1, host, e)) == 0)
        o->device->ops->upload(o->device, o->m, host, bytes);
    if (rc == 0 && (rc = weights_load(t, st, "v.", 1, host, e)) == 0)
        o->device->ops->upload(o->device, o->v, host, bytes);
    free(host);
    return rc;
}
