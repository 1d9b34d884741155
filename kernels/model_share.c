/*
 * Prefix sharing: passes after the first compute only their fused tokens (see model.h).
 *
 * Exact because a plain token with nothing fused before it in its document has, in every pass, the
 * state of pass 1. A pass's own rows are compacted. Where it needs the whole batch (keys and
 * values, states to carry) pass 1's rows and its own are merged in scratch; backward, the gradient
 * of what was merged is parted again: the pass keeps that of its own rows, pass 1 gets the rest.
 */
#include "common/check.h"
#include "kernels/model_internal.h"

int model_limits_share(const struct model_config *c, const struct model_limits *lim)
{
    return lim->train && lim->passes > 1 && lim->prefix_sharing && c->feedback && c->doc_mask;
}

/* --- which rows ------------------------------------------------------------------------------- */

/* 1: in every document of every pass the plain tokens come before the fused ones. */
static int masks_are_prefixes(const struct model_batch *b)
{
    int n = b->batch * b->seq;
    for (int k = 0; k + 1 < b->passes; k++) {
        const uint8_t *mask = b->masks + (size_t)k * (size_t)n;
        for (int i = 0, fused = 0; i < n; i++) {
            if (i % b->seq == 0 || b->doc_starts[i])
                fused = 0;
            if (fused && !mask[i])
                return 0;
            fused = mask[i];
        }
    }
    return 1;
}

static void gather_ints(struct model *m, const struct pass_acts *p, int which, const int32_t *from)
{
    m->d->ops->gather_rows(
        m->d, p->compact[which], from, p->compact[COMPACT_INDEX], p->rows.n, sizeof(int32_t));
}

static void choose_rows(
    struct model *m, const struct model_batch *b, const uint8_t *mask, struct pass_acts *p)
{
    const struct device_ops *o = m->d->ops;
    int32_t *const *at = p->compact;
    int n = 0, all = b->batch * b->seq;
    for (int i = 0; i < all; i++) {
        if (i % b->seq == 0)
            m->host_starts[i / b->seq] = n;
        if (mask[i])
            m->host_index[n++] = i;
    }
    m->host_starts[b->batch] = n;
    p->rows = (struct pass_rows){n, 1, at[COMPACT_POSITIONS], at[COMPACT_TARGETS],
        at[COMPACT_FIRST], at[COMPACT_WINDOW], at[COMPACT_INDEX], at[COMPACT_STARTS]};
    o->upload(m->d, at[COMPACT_INDEX], m->host_index, (size_t)n * sizeof(int32_t));
    o->upload(m->d, at[COMPACT_STARTS], m->host_starts, ((size_t)b->batch + 1) * sizeof(int32_t));
    o->upload(m->d, p->mask, mask, (size_t)all);
    gather_ints(m, p, COMPACT_POSITIONS, m->positions);
    gather_ints(m, p, COMPACT_TARGETS, m->targets);
    gather_ints(m, p, COMPACT_FIRST, m->first);
    gather_ints(m, p, COMPACT_WINDOW, m->first_window);
}

/* A token's loss in pass 1 counts for every pass in which it is plain. */
static void weigh_rows(struct model *m, const struct model_batch *b, float lambda)
{
    int n = b->batch * b->seq;
    for (int i = 0; i < n; i++) {
        int plain = 0;
        for (int k = 0; k + 1 < b->passes; k++)
            plain += !b->masks[(size_t)k * (size_t)n + (size_t)i];
        m->host_weights[i] = 1 + lambda * (float)plain / (float)(b->passes - 1);
    }
    m->d->ops->upload(m->d, m->s.row_weights, m->host_weights, (size_t)n * sizeof(float));
}

void share_begin(struct model *m, const struct model_batch *b, float lambda)
{
    size_t n = (size_t)b->batch * (size_t)b->seq;
    m->sharing = b->passes > 1 && model_limits_share(&m->c, &m->lim) && masks_are_prefixes(b);
    if (!m->sharing)
        return;
    for (int k = 1; k < b->passes; k++)
        choose_rows(m, b, b->masks + (size_t)(k - 1) * n, &m->passes[k]);
    weigh_rows(m, b, lambda);
}

/* --- forward ---------------------------------------------------------------------------------- */

/* out (N, width) = pass 1's rows, those of p in their places */
static void merge(struct model *m, const struct model_batch *b, const struct pass_acts *p,
    float *out, const float *of_first, const float *own, int width)
{
    const struct device_ops *o = m->d->ops;
    size_t row = (size_t)width * sizeof(float);
    o->copy(m->d, out, of_first, (size_t)b->batch * (size_t)b->seq * row);
    o->scatter_rows(m->d, out, own, p->rows.index, p->rows.n, row);
}

void share_feed_back(
    struct model *m, const struct block_run *r, const struct model_batch *b, int k, float *x)
{
    const struct device_ops *o = m->d->ops;
    struct pass_acts *p = &m->passes[k];
    const struct pass_acts *prev = &m->passes[k - 1];
    struct pass_noise noise = model_noise(m, b, k);
    const float *h = prev->h;
    if (prev->rows.shared) {
        merge(m, b, prev, m->s.h_all, m->passes[0].h, prev->h, m->c.dim);
        h = m->s.h_all;
    }
    o->carry_rows_fwd(m->d, p->carried, h, noise.given, b->jitter, noise.keys, p->rows.index,
        p->rows.n, b->seq, m->c.dim);
    o->gather_rows(
        m->d, m->s.norm, m->in.g, p->rows.index, p->rows.n, (size_t)m->c.dim * sizeof(float));
    fuse(r, m->s.norm, p, x);
}

static struct attn_rows attn_rows_of(const struct model *m, const struct pass_acts *p, int layer)
{
    return (struct attn_rows){
        p->rows.n, p->rows.index, p->rows.starts, model_first(m, &p->rows, layer)};
}

static void merge_keys(
    struct model *m, const struct model_batch *b, const struct pass_acts *p, int layer)
{
    const struct layer_acts *own = &p->layers[layer], *first = &m->passes[0].layers[layer];
    int width = m->c.kv_heads * m->c.head_dim;
    merge(m, b, p, m->s.k_all, first->k, own->k, width);
    merge(m, b, p, m->s.v_all, first->v, own->v, width);
}

void share_attend(struct model *m, const struct model_batch *b, struct pass_acts *p, int layer)
{
    struct layer_acts *a = &p->layers[layer];
    struct attn_shape shape = model_attn_shape(m, b);
    struct attn_rows rows = attn_rows_of(m, p, layer);
    merge_keys(m, b, p, layer);
    m->d->ops->attn_rows_fwd(m->d, a->att, a->lse, a->q, m->s.k_all, m->s.v_all, &rows, &shape);
}

/* --- backward --------------------------------------------------------------------------------- */

void share_backward_begin(struct model *m, const struct model_batch *b)
{
    const struct device_ops *o = m->d->ops;
    size_t n = (size_t)b->batch * (size_t)b->seq * sizeof(float);
    size_t kv = n * (size_t)m->c.kv_heads * (size_t)m->c.head_dim;
    o->zero(m->d, m->s.dh_first, n * (size_t)m->c.dim);
    for (int l = 0; l < m->c.layers; l++) {
        o->zero(m->d, m->shared_keys[l].dk, kv);
        o->zero(m->d, m->shared_keys[l].dv, kv);
    }
}

/* Parts dmerged (N, width), which is spent: own (n, width) = its rows of p, of_first (N, width) +=
 * the others. */
static void part(struct model *m, const struct model_batch *b, const struct pass_acts *p,
    float *dmerged, float *own, float *of_first, int width)
{
    const struct device_ops *o = m->d->ops;
    o->gather_rows(m->d, own, dmerged, p->rows.index, p->rows.n, (size_t)width * sizeof(float));
    o->select_rows_bwd(m->d, dmerged, of_first, dmerged, p->mask, b->batch * b->seq, width);
}

void share_attend_backward(
    struct model *m, const struct model_batch *b, const struct pass_acts *p, int layer)
{
    const struct layer_acts *a = &p->layers[layer];
    struct attn_shape shape = model_attn_shape(m, b);
    struct attn_rows rows = attn_rows_of(m, p, layer);
    struct scratch *s = &m->s;
    int width = m->c.kv_heads * m->c.head_dim;
    merge_keys(m, b, p, layer);
    m->d->ops->attn_rows_bwd(m->d, s->dq, s->dk, s->dv, s->datt, a->att, a->lse, a->q, s->k_all,
        s->v_all, &rows, &shape, s->attn_work);
    part(m, b, p, s->dk, s->k_all, m->shared_keys[layer].dk, width);
    part(m, b, p, s->dv, s->v_all, m->shared_keys[layer].dv, width);
}

void share_carry_backward(struct model *m, const struct model_batch *b, int k)
{
    const struct device_ops *o = m->d->ops;
    const struct pass_acts *p = &m->passes[k], *prev = &m->passes[k - 1];
    struct scratch *s = &m->s;
    float *dh = k == 1 ? s->dh_first : s->dh_all;
    if (k > 1)
        o->zero(m->d, dh, (size_t)b->batch * (size_t)b->seq * (size_t)m->c.dim * sizeof(float));
    o->carry_rows_bwd(m->d, dh, s->dcarried, p->rows.index, p->rows.n, m->c.dim);
    if (k > 1)
        part(m, b, prev, dh, s->dh, s->dh_first, m->c.dim);
}

void share_loss_sums(struct model *m, const struct model_batch *b, double *loss_sums)
{
    size_t n = (size_t)b->batch * (size_t)b->seq;
    float *all = m->s.norm; /* (N) of its (N, D) */
    loss_sums[0] = m->d->ops->sum(m->d, m->passes[0].losses, n);
    for (int k = 1; k < b->passes; k++) {
        merge(m, b, &m->passes[k], all, m->passes[0].losses, m->passes[k].losses, 1);
        loss_sums[k] = m->d->ops->sum(m->d, all, n);
    }
}
