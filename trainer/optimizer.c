#include "trainer/optimizer.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"

/* A run of neighbouring parts of one group (with the zero padding between them): one call of the
 * device. */
struct range {
    int64_t offset, count; /* of the flat array */
    int64_t local;         /* of the moments */
    enum weight_group group;
};

struct optimizer {
    struct device *device;
    const struct weight_table *table;
    struct optimizer_settings settings;
    struct shards shards;
    int rank;
    struct range *ranges;
    int range_count;
    float *m, *v; /* (total of the rank) */
    double *sums; /* (parts): optimizer_update()'s */
    int64_t updates[OPTIMIZER_GROUPS];
};

/* Metadata key of each group's count. */
static const char *const count_keys[OPTIMIZER_GROUPS] = {
    [WEIGHT_MATRIX] = "updates.matrix",
    [WEIGHT_VECTOR] = "updates.vector",
    [WEIGHT_FUSION] = "updates.fusion",
};

static enum weight_group group_of(const struct optimizer *o, int part)
{
    return o->table->items[o->shards.weight[part]].group;
}

/* Whether a part lies behind a range as its moments do, with nothing of another's in between. */
static int continues(const struct optimizer *o, const struct range *r, int part)
{
    int64_t gap = o->shards.spans[part].offset - r->offset;
    return part > 0 && o->shards.spans[part - 1].owner == o->rank &&
           r->group == group_of(o, part) && gap == o->shards.local[part] - r->local;
}

static void ranges_make(struct optimizer *o)
{
    o->ranges = mem_array((size_t)o->shards.count, sizeof *o->ranges);
    for (int i = 0; i < o->shards.count; i++) {
        const struct coll_span *s = &o->shards.spans[i];
        if (s->owner != o->rank)
            continue;
        int n = o->range_count;
        if (n == 0 || !continues(o, &o->ranges[n - 1], i))
            o->ranges[o->range_count++] = (struct range){
                .offset = s->offset, .local = o->shards.local[i], .group = group_of(o, i)};
        struct range *r = &o->ranges[o->range_count - 1];
        r->count = s->offset + s->count - r->offset;
    }
}

static int64_t own_total(const struct optimizer *o)
{
    return o->shards.totals[o->rank];
}

int optimizer_new(struct device *d, const struct weight_table *table,
    const struct optimizer_settings *settings, struct optimizer **out, struct err *e)
{
    struct optimizer *o = mem_array(1, sizeof *o);
    size_t bytes = 0;
    o->device = d;
    o->table = table;
    o->settings = *settings;
    o->rank = settings->rank;
    shards_make(table, settings->world > 0 ? settings->world : 1, &o->shards);
    ranges_make(o);
    o->sums = mem_array((size_t)o->shards.count, sizeof *o->sums);
    if (mem_mul((size_t)own_total(o), sizeof(float), &bytes) == 0) {
        o->m = d->ops->alloc(d, bytes);
        o->v = d->ops->alloc(d, bytes);
    }
    if (!o->m || !o->v) {
        int64_t total = own_total(o);
        optimizer_free(&o);
        return err_set(e, ERR_NOMEM, "optimizer: no memory for 2 x %" PRId64 " moments", total);
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
    free(o->sums);
    free(o->ranges);
    shards_release(&o->shards);
    free(o);
    *po = NULL;
}

static int takes_part(enum weight_group group, int passes)
{
    return group != WEIGHT_FUSION || passes > 1;
}

void optimizer_sums(const struct optimizer *o, const float *grads, int passes, double *sums)
{
    for (int i = 0; i < o->shards.count; i++) {
        const struct coll_span *s = &o->shards.spans[i];
        sums[i] = 0;
        if (s->owner == o->rank && takes_part(group_of(o, i), passes))
            sums[i] = o->device->ops->sum_sq(o->device, grads + s->offset, (size_t)s->count);
    }
}

void optimizer_apply(struct optimizer *o, float *params, const float *grads, const double *sums,
    double lr, int passes, struct optimizer_result *out)
{
    const struct optimizer_settings *s = &o->settings;
    double sum = 0;
    for (int i = 0; i < o->shards.count; i++)
        sum += sums[i];
    double norm = sqrt(sum);
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
        o->device->ops->adamw(o->device, params + r->offset, o->m + r->local, o->v + r->local,
            grads + r->offset, (size_t)r->count, &a);
    }
}

void optimizer_update(struct optimizer *o, float *params, const float *grads, double lr, int passes,
    struct optimizer_result *out)
{
    CHECK(o->shards.world == 1);
    optimizer_sums(o, grads, passes, o->sums);
    optimizer_apply(o, params, grads, o->sums, lr, passes, out);
}

const struct shards *optimizer_shards(const struct optimizer *o)
{
    return &o->shards;
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
    size_t bytes = (size_t)own_total(o) * sizeof(float);
    o->device->ops->zero(o->device, o->m, bytes);
    o->device->ops->zero(o->device, o->v, bytes);
    memset(o->updates, 0, sizeof o->updates);
}

int optimizer_as_tensors(const struct shards *s, int rank, const float *m, const float *v,
    struct st_tensor *out, char (*names)[128])
{
    const struct {
        const char *prefix;
        const float *values;
    } both[] = {{"m.", m}, {"v.", v}};
    int n = 0;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < s->count; i++) {
            const struct weight *w = &s->table->items[s->weight[i]];
            int whole = shards_is_whole(s, i);
            if (s->spans[i].owner != rank)
                continue;
            shards_name(s, i, both[k].prefix, names[n]);
            out[n] = (struct st_tensor){.name = names[n],
                .dtype = ST_F32,
                .ndim = whole ? w->ndim : 1,
                .shape = {whole ? w->shape[0] : s->spans[i].count, whole ? w->shape[1] : 0},
                .data = both[k].values + s->local[i],
                .bytes = (size_t)s->spans[i].count * sizeof(float)};
            n++;
        }
    return n;
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

/* Whether a span and any part of this rank have a float in common. */
static int touches_own(const struct optimizer *o, const struct coll_span *s)
{
    for (int i = 0; i < o->range_count; i++) {
        const struct range *r = &o->ranges[i];
        if (s->offset < r->offset + r->count && r->offset < s->offset + s->count)
            return 1;
    }
    return 0;
}

int optimizer_needs(const struct optimizer *o, int r, int world)
{
    struct shards saved;
    int yes = 0;
    shards_make(o->table, world, &saved);
    for (int i = 0; i < saved.count && !yes; i++)
        yes = saved.spans[i].owner == r && touches_own(o, &saved.spans[i]);
    shards_release(&saved);
    return yes || r == 0; /* the counts */
}

static int check_counts(struct optimizer *o, const struct shards *saved,
    const struct safetensors *const *files, struct err *e)
{
    for (int r = 0; r < saved->world; r++) {
        int64_t updates[OPTIMIZER_GROUPS];
        int tensors = 2 * shards_parts_of(saved, r), rc = 0;
        if (!files[r])
            continue;
        for (int g = 0; g < OPTIMIZER_GROUPS && rc == 0; g++)
            rc = read_count(files[r], count_keys[g], &updates[g], e);
        if (rc < 0)
            return rc;
        if (safetensors_count(files[r]) != tensors)
            return err_set(e, ERR_MISMATCH,
                "rank %d of %d: %d tensors, expected %d (m. and v. of each part)", r, saved->world,
                safetensors_count(files[r]), tensors);
        if (r > 0 && memcmp(updates, o->updates, sizeof updates) != 0)
            return err_set(
                e, ERR_MISMATCH, "ranks 0 and %d of %d: other counts of updates", r, saved->world);
        memcpy(o->updates, updates, sizeof updates);
    }
    return 0;
}

/* Reads one part into the host's flat array. */
static int read_part(const struct shards *saved, int i, const struct safetensors *st,
    const char *prefix, float *flat, struct err *e)
{
    char name[128];
    shards_name(saved, i, prefix, name);
    if (shards_is_whole(saved, i))
        return weight_load(&saved->table->items[saved->weight[i]], st, name, flat, e);
    return safetensors_read_f32(st, name, saved->spans[i].count, flat + saved->spans[i].offset, e);
}

static int load_moment(struct optimizer *o, const struct shards *saved,
    const struct safetensors *const *files, const char *prefix, float *flat, float *moment,
    struct err *e)
{
    for (int i = 0; i < saved->count; i++) {
        if (!touches_own(o, &saved->spans[i]))
            continue;
        int rc = read_part(saved, i, files[saved->spans[i].owner], prefix, flat, e);
        if (rc < 0)
            return rc;
    }
    for (int i = 0; i < o->range_count; i++) {
        const struct range *r = &o->ranges[i];
        o->device->ops->upload(
            o->device, moment + r->local, flat + r->offset, (size_t)r->count * sizeof(float));
    }
    return 0;
}

int optimizer_load(
    struct optimizer *o, const struct safetensors *const *files, int world, struct err *e)
{
    struct shards saved;
    size_t total = (size_t)o->table->total;
    float *flat = NULL;
    shards_make(o->table, world, &saved);
    int rc = check_counts(o, &saved, files, e);
    if (rc == 0 && !(flat = mem_try_array(total, sizeof *flat)))
        rc = err_set(e, ERR_NOMEM, "no memory to read %zu bytes of moments", total * sizeof(float));
    if (rc == 0)
        rc = load_moment(o, &saved, files, "m.", flat, o->m, e);
    if (rc == 0)
        rc = load_moment(o, &saved, files, "v.", flat, o->v, e);
    free(flat);
    shards_release(&saved);
    return rc;
}
