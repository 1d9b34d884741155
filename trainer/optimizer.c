#include "trainer/optimizer.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "kernels/muon.h"

#define ALIGN_FLOATS 16

/* A run of neighbouring parts of one group (with the zero padding between them), one call of the
 * device; or one matrix. */
struct range {
    int64_t offset, count; /* of the flat array */
    int64_t local, second; /* of m, of v */
    int64_t second_count;
    enum weight_group group;
    int rows, columns; /* of a matrix of Muon's, else 0 */
};

struct optimizer {
    struct device *device;
    const struct weight_table *table;
    struct optimizer_settings settings;
    struct shards shards;
    int rank;
    struct range *ranges;
    int range_count;
    float *m, *v; /* (total of the rank; of the second moments) */
    float *work;
    double *sums; /* (parts): optimizer_update()'s */
    int64_t updates[OPTIMIZER_GROUPS];
};

/* Metadata keys: which optimizer, and each group's count. */
static const char kind_key[] = "optimizer";
static const char *const count_keys[OPTIMIZER_GROUPS] = {
    [WEIGHT_MATRIX] = "updates.matrix",
    [WEIGHT_VECTOR] = "updates.vector",
    [WEIGHT_FUSION] = "updates.fusion",
};

static int64_t aligned(int64_t floats)
{
    return (floats + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

/* Floats of scratch for the largest matrix: its update, and what orthogonalising that takes. */
static size_t work_floats(const struct weight_table *t, enum optim_kind kind)
{
    size_t most = 0;
    for (int i = 0; i < t->count; i++) {
        const struct weight *w = &t->items[i];
        if (!shards_is_muon(kind, w))
            continue;
        size_t n = (size_t)aligned(w->count) + muon_work_floats((int)w->shape[0], (int)w->shape[1]);
        most = n > most ? n : most;
    }
    return most;
}

void optimizer_memory_of(const struct weight_table *table, enum optim_kind kind, int rank,
    int world, struct optimizer_memory *out)
{
    struct shards s;
    shards_make(table, kind, world, &s);
    out->moments = (size_t)(s.totals[rank] + s.second_totals[rank]) * sizeof(float);
    out->workspace = work_floats(table, kind) * sizeof(float);
    shards_release(&s);
}

double optimizer_flops(const struct weight_table *table, enum optim_kind kind)
{
    double sum = 0;
    for (int i = 0; i < table->count; i++) {
        const struct weight *w = &table->items[i];
        if (shards_is_muon(kind, w))
            sum += muon_flops((int)w->shape[0], (int)w->shape[1]);
    }
    return sum;
}

static enum weight_group group_of(const struct optimizer *o, int part)
{
    return o->table->items[o->shards.weight[part]].group;
}

/* Whether a part lies behind a range as its moments do, with nothing of another's in between. */
static int continues(const struct optimizer *o, const struct range *r, int part)
{
    int64_t gap = o->shards.spans[part].offset - r->offset;
    return part > 0 && !r->rows && o->shards.spans[part - 1].owner == o->rank &&
           r->group == group_of(o, part) && gap == o->shards.local[part] - r->local &&
           gap == o->shards.second_local[part] - r->second;
}

/* A range that begins with a part. */
static struct range range_of(const struct optimizer *o, int part)
{
    const struct weight *w = &o->table->items[o->shards.weight[part]];
    int muon = shards_is_muon(o->settings.kind, w);
    return (struct range){.offset = o->shards.spans[part].offset,
        .local = o->shards.local[part],
        .second = o->shards.second_local[part],
        .group = w->group,
        .rows = muon ? (int)w->shape[0] : 0,
        .columns = muon ? (int)w->shape[1] : 0};
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
            o->ranges[o->range_count++] = range_of(o, i);
        struct range *r = &o->ranges[o->range_count - 1];
        r->count = s->offset + s->count - r->offset;
        r->second_count = o->shards.second_local[i] + o->shards.second_count[i] - r->second;
    }
}

static int64_t own_total(const struct optimizer *o)
{
    return o->shards.totals[o->rank];
}

static int64_t own_second(const struct optimizer *o)
{
    return o->shards.second_totals[o->rank];
}

static float *alloc_floats(struct device *d, size_t n)
{
    size_t bytes;
    return mem_mul(n, sizeof(float), &bytes) == 0 ? d->ops->alloc(d, bytes) : NULL;
}

int optimizer_new(struct device *d, const struct weight_table *table,
    const struct optimizer_settings *settings, struct optimizer **out, struct err *e)
{
    struct optimizer *o = mem_array(1, sizeof *o);
    o->device = d;
    o->table = table;
    o->settings = *settings;
    o->rank = settings->rank;
    shards_make(table, settings->kind, settings->world > 0 ? settings->world : 1, &o->shards);
    ranges_make(o);
    o->sums = mem_array((size_t)o->shards.count, sizeof *o->sums);
    size_t work = work_floats(table, settings->kind);
    o->m = alloc_floats(d, (size_t)own_total(o));
    o->v = alloc_floats(d, (size_t)own_second(o));
    o->work = alloc_floats(d, work);
    if (!o->m || !o->v || !o->work) {
        int64_t moments = own_total(o) + own_second(o);
        optimizer_free(&o);
        return err_set(e, ERR_NOMEM,
            "optimizer: no memory for %" PRId64 " moments and %zu floats of workspace", moments,
            work);
    }
    *out = o;
    return 0;
}

void optimizer_free(struct optimizer **po)
{
    struct optimizer *o = *po;
    if (!o)
        return;
    if (o->work)
        o->device->ops->free(o->device, o->work);
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

static void update_adamw(struct optimizer *o, const struct range *r, float *params,
    const float *grads, double lr, double clip)
{
    const struct optimizer_settings *s = &o->settings;
    double rate = lr;
    if (r->group != WEIGHT_MATRIX)
        rate *= s->rest_lr_scale * (r->group == WEIGHT_FUSION ? s->fusion_lr_scale : 1);
    struct adamw_args a = {
        .lr = (float)rate,
        .beta1 = (float)s->beta1,
        .beta2 = (float)s->beta2,
        .eps = (float)s->eps,
        .weight_decay = r->group == WEIGHT_MATRIX ? (float)s->weight_decay : 0,
        .grad_scale = (float)clip,
        .t = o->updates[r->group],
    };
    o->device->ops->adamw(o->device, params + r->offset, o->m + r->local, o->v + r->second,
        grads + r->offset, (size_t)r->count, &a);
}

/* y = momentum · y + (1 − momentum) · g */
static void blend(struct optimizer *o, float *y, const float *g, double clip, size_t n)
{
    double mu = o->settings.momentum;
    o->device->ops->scale(o->device, y, (float)mu, n);
    o->device->ops->add(o->device, y, g, (float)((1 - mu) * clip), n);
}

/* Muon and NorMuon. */
static void update_matrix(struct optimizer *o, const struct range *r, float *params,
    const float *grads, double lr, double clip)
{
    const struct device_ops *ops = o->device->ops;
    const struct optimizer_settings *s = &o->settings;
    size_t n = (size_t)r->count;
    float *m = o->m + r->local, *w = params + r->offset;
    float *step = o->work, *work = step + aligned(r->count);
    blend(o, m, grads + r->offset, clip, n);
    ops->copy(o->device, step, m, n * sizeof *m);
    blend(o, step, grads + r->offset, clip, n);
    muon_orthogonalize(o->device, step, r->rows, r->columns, work);
    if (r->second_count > 0)
        ops->normuon(
            o->device, step, o->v + r->second, r->rows, r->columns, (float)s->muon_beta2, work);
    double shape = r->rows > r->columns ? sqrt((double)r->rows / r->columns) : 1;
    ops->scale(o->device, w, (float)(1 - lr * s->weight_decay), n);
    ops->add(o->device, w, step, (float)(-lr * shape), n);
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
        (r->rows ? update_matrix : update_adamw)(o, r, params, grads, lr, clip);
    }
}

void optimizer_update(struct optimizer *o, float *params, const float *grads, double lr, int passes,
    struct optimizer_result *out)
{
    CHECK(o->shards.world == 1);
    optimizer_sums(o, grads, passes, o->sums);
    optimizer_apply(o, params, grads, o->sums, lr, passes, out);
}

enum optim_kind optimizer_kind(const struct optimizer *o)
{
    return o->settings.kind;
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
    o->device->ops->zero(o->device, o->m, (size_t)own_total(o) * sizeof(float));
    o->device->ops->zero(o->device, o->v, (size_t)own_second(o) * sizeof(float));
    memset(o->updates, 0, sizeof o->updates);
}

int optimizer_as_tensors(const struct shards *s, int rank, const float *m, const float *v,
    struct st_tensor *out, char (*names)[128])
{
    const struct {
        const char *prefix;
        const float *values;
        const int64_t *local, *count; /* NULL: the parts' own */
    } both[] = {{"m.", m, s->local, NULL}, {"v.", v, s->second_local, s->second_count}};
    int n = 0;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < s->count; i++) {
            const struct weight *w = &s->table->items[s->weight[i]];
            int64_t count = both[k].count ? both[k].count[i] : s->spans[i].count;
            int whole = count == w->count;
            if (s->spans[i].owner != rank || count == 0)
                continue;
            shards_name(s, i, both[k].prefix, names[n]);
            out[n] = (struct st_tensor){.name = names[n],
                .dtype = ST_F32,
                .ndim = whole ? w->ndim : 1,
                .shape = {whole ? w->shape[0] : count, whole ? w->shape[1] : 0},
                .data = both[k].values + both[k].local[i],
                .bytes = (size_t)count * sizeof(float)};
            n++;
        }
    return n;
}

void optimizer_meta_make(
    enum optim_kind kind, const int64_t updates[OPTIMIZER_GROUPS], struct optimizer_meta *out)
{
    for (int g = 0; g < OPTIMIZER_GROUPS; g++) {
        snprintf(out->values[g], sizeof out->values[g], "%" PRId64, updates[g]);
        out->pairs[2 * g] = count_keys[g];
        out->pairs[2 * g + 1] = out->values[g];
    }
    out->pairs[2 * OPTIMIZER_GROUPS] = kind_key;
    out->pairs[2 * OPTIMIZER_GROUPS + 1] = optim_name((int)kind);
    out->pairs[2 * OPTIMIZER_GROUPS + 2] = NULL;
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
    shards_make(o->table, o->settings.kind, world, &saved);
    for (int i = 0; i < saved.count && !yes; i++)
        yes = saved.spans[i].owner == r && touches_own(o, &saved.spans[i]);
    shards_release(&saved);
    return yes || r == 0; /* the counts */
}

static int check_kind(const struct optimizer *o, const struct safetensors *st, struct err *e)
{
    const char *want = optim_name((int)o->settings.kind), *got = safetensors_meta(st, kind_key);
    if (got && strcmp(got, want) == 0)
        return 0;
    return err_set(e, ERR_MISMATCH, "metadata %s is \"%.32s\", expected \"%s\"", kind_key,
        got ? got : "", want);
}

static int check_counts(struct optimizer *o, const struct shards *saved,
    const struct safetensors *const *files, struct err *e)
{
    for (int r = 0; r < saved->world; r++) {
        int64_t updates[OPTIMIZER_GROUPS];
        int tensors = shards_tensors_of(saved, r), rc = 0;
        if (!files[r])
            continue;
        for (int g = 0; g < OPTIMIZER_GROUPS && rc == 0; g++)
            rc = read_count(files[r], count_keys[g], &updates[g], e);
        if (rc == 0)
            rc = check_kind(o, files[r], e);
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

/* Reads `count` floats of one part's moment to the part's place in the host's flat array. */
static int read_part(const struct shards *saved, int i, const struct safetensors *st,
    const char *prefix, int64_t count, float *flat, struct err *e)
{
    const struct weight *w = &saved->table->items[saved->weight[i]];
    char name[128];
    shards_name(saved, i, prefix, name);
    if (count == w->count)
        return weight_load(w, st, name, flat, e);
    return safetensors_read_f32(st, name, count, flat + saved->spans[i].offset, e);
}

/* m, or with `second` v. */
static int load_moment(struct optimizer *o, const struct shards *saved,
    const struct safetensors *const *files, int second, float *flat, struct err *e)
{
    const char *prefix = second ? "v." : "m.";
    for (int i = 0; i < saved->count; i++) {
        int64_t count = second ? saved->second_count[i] : saved->spans[i].count;
        if (count == 0 || !touches_own(o, &saved->spans[i]))
            continue;
        int rc = read_part(saved, i, files[saved->spans[i].owner], prefix, count, flat, e);
        if (rc < 0)
            return rc;
    }
    for (int i = 0; i < o->range_count; i++) {
        const struct range *r = &o->ranges[i];
        float *to = second ? o->v + r->second : o->m + r->local;
        size_t count = (size_t)(second ? r->second_count : r->count);
        o->device->ops->upload(o->device, to, flat + r->offset, count * sizeof(float));
    }
    return 0;
}

int optimizer_load(
    struct optimizer *o, const struct safetensors *const *files, int world, struct err *e)
{
    struct shards saved;
    size_t total = (size_t)o->table->total;
    float *flat = NULL;
    shards_make(o->table, o->settings.kind, world, &saved);
    int rc = check_counts(o, &saved, files, e);
    if (rc == 0 && !(flat = mem_try_array(total, sizeof *flat)))
        rc = err_set(e, ERR_NOMEM, "no memory to read %zu bytes of moments", total * sizeof(float));
    if (rc == 0)
        rc = load_moment(o, &saved, files, 0, flat, e);
    if (rc == 0)
        rc = load_moment(o, &saved, files, 1, flat, e);
    free(flat);
    shards_release(&saved);
    return rc;
}
