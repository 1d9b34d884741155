/* Forward: input, blocks, readout; and model_forward(), which keeps one pass at a time. */
#include <stdlib.h>

#include "common/check.h"
#include "common/mem.h"
#include "kernels/model_internal.h"

static size_t dim_bytes(const struct block_run *r)
{
    return (size_t)r->n * (size_t)r->c->dim * sizeof(float);
}

void block_qkv(const struct block_run *r, int layer, struct layer_acts *a)
{
    const struct model_config *c = r->c;
    const struct layer_tensors *w = &r->w->layers[layer];
    const struct device_ops *o = r->d->ops;
    int q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    o->rmsnorm_fwd(r->d, r->norm, a->rstd1, a->x0, w->input_norm, r->n, c->dim, c->norm_eps);
    struct operand x = operand(r->mul, r->mul->x, r->norm, r->n, c->dim);
    linear(r->mul, c->qk_norm ? a->q_raw : a->q, x, w->q, r->n, q, c->dim, 1, 0);
    linear(r->mul, c->qk_norm ? a->k_raw : a->k, x, w->k, r->n, kv, c->dim, 1, 0);
    linear(r->mul, a->v, x, w->v, r->n, kv, c->dim, 1, 0);
    if (c->attn_gate)
        linear(r->mul, a->att_gate, x, w->attn_gate, r->n, q, c->dim, 1, 0);
    if (c->qk_norm) {
        o->rmsnorm_fwd(
            r->d, a->q, a->rstd_q, a->q_raw, w->q_norm, r->n * c->heads, c->head_dim, c->norm_eps);
        o->rmsnorm_fwd(r->d, a->k, a->rstd_k, a->k_raw, w->k_norm, r->n * c->kv_heads, c->head_dim,
            c->norm_eps);
    }
    o->rope(r->d, a->q, r->positions, r->cos_table, r->sin_table, r->n, c->heads, c->head_dim, 0);
    o->rope(
        r->d, a->k, r->positions, r->cos_table, r->sin_table, r->n, c->kv_heads, c->head_dim, 0);
}

void block_attn_out(const struct block_run *r, int layer, struct layer_acts *a)
{
    const struct model_config *c = r->c;
    const struct device_ops *o = r->d->ops;
    int q = c->heads * c->head_dim;
    const float *att = c->attn_gate ? r->gated : a->att;
    if (c->attn_gate)
        o->gate_fwd(r->d, r->gated, a->att, a->att_gate, (size_t)r->n * (size_t)q);
    o->copy(r->d, a->x1, a->x0, dim_bytes(r));
    linear(r->mul, a->x1, operand(r->mul, r->mul->x, att, r->n, q), r->w->layers[layer].o, r->n,
        c->dim, q, c->residual_scale, 1);
}

/* y (n, F) = x wᵀ, or rounded into y16, by way of r->act. */
static void mlp_linear(
    const struct block_run *r, float *y, bf16 *y16, struct operand x, const float *w)
{
    const struct model_config *c = r->c;
    linear(r->mul, y16 ? r->act : y, x, w, r->n, c->ffn, c->dim, 1, 0);
    if (y16)
        r->d->ops->to_bf16(r->d, y16, r->act, (size_t)r->n * (size_t)c->ffn);
}

struct operand swiglu(const struct block_run *r, const struct layer_acts *a)
{
    size_t all = (size_t)r->n * (size_t)r->c->ffn;
    if (!a->gate16) {
        r->d->ops->swiglu_fwd(r->d, r->act, a->gate, a->up, all);
        return (struct operand){.f = r->act};
    }
    r->d->ops->swiglu_fwd_bf16(r->d, r->mul->x, a->gate16, a->up16, all);
    return (struct operand){.h = r->mul->x};
}

void block_mlp_in(const struct block_run *r, int layer, struct layer_acts *a)
{
    const struct model_config *c = r->c;
    const struct layer_tensors *w = &r->w->layers[layer];
    r->d->ops->rmsnorm_fwd(r->d, r->norm, a->rstd2, a->x1, w->post_norm, r->n, c->dim, c->norm_eps);
    struct operand x = operand(r->mul, r->mul->x, r->norm, r->n, c->dim);
    mlp_linear(r, a->gate, a->gate16, x, w->gate);
    mlp_linear(r, a->up, a->up16, x, w->up);
}

void block_finish(const struct block_run *r, int layer, struct layer_acts *a, float *x_next)
{
    const struct model_config *c = r->c;
    const struct device_ops *o = r->d->ops;
    block_attn_out(r, layer, a);
    block_mlp_in(r, layer, a);
    struct operand act = swiglu(r, a);
    o->copy(r->d, x_next, a->x1, dim_bytes(r));
    linear(
        r->mul, x_next, act, r->w->layers[layer].down, r->n, c->dim, c->ffn, c->residual_scale, 1);
}

int gate_own_norm(const struct model_config *c)
{
    return c->gate_norm && !c->in_norm;
}

void gate_source(const struct model_config *c, struct input_acts *in)
{
    if (!gate_own_norm(c))
        in->gate_in = c->gate_norm ? in->plain : in->e;
}

void plain_input(const struct block_run *r, const int32_t *tokens, struct input_acts *in, int gate)
{
    const struct model_config *c = r->c;
    const struct device_ops *o = r->d->ops;
    o->embed_fwd(r->d, in->e, tokens, r->w->embed, r->n, c->dim, c->vocab);
    if (c->in_norm)
        o->rmsnorm_fwd(r->d, in->plain, in->rstd_in, in->e, NULL, r->n, c->dim, c->norm_eps);
    if (!gate)
        return;
    if (gate_own_norm(c))
        o->rmsnorm_fwd(r->d, in->gate_in, in->rstd_gate, in->e, NULL, r->n, c->dim, c->norm_eps);
    linear(r->mul, in->g, operand(r->mul, r->mul->x, in->gate_in, r->n, c->dim), r->w->w_g, r->n,
        c->dim, c->dim, 1, 0);
}

void fuse(const struct block_run *r, const float *g, struct pass_acts *p, float *out)
{
    const struct model_config *c = r->c;
    const struct device_ops *o = r->d->ops;
    float *prod = c->out_norm ? p->prod : out;
    struct operand carried = {p->carried, p->carried16};
    if (p->carried16)
        o->to_bf16(r->d, p->carried16, p->carried, (size_t)r->n * (size_t)c->dim);
    linear(r->mul, p->u, carried, r->w->w_u, r->n, c->dim, c->dim, 1, 0);
    o->gate_fwd(r->d, prod, p->u, g, (size_t)r->n * (size_t)c->dim);
    if (c->out_norm)
        o->rmsnorm_fwd(r->d, out, p->rstd_prod, prod, NULL, r->n, c->dim, c->norm_eps);
}

void fused_input(
    const struct block_run *r, const struct input_acts *in, struct pass_acts *p, float *out)
{
    fuse(r, in->g, p, out);
    r->d->ops->select_rows(r->d, out, p->mask, out, in->plain, r->n, r->c->dim);
}

struct block_run model_block_run(struct model *m, const struct pass_rows *rows)
{
    return (struct block_run){
        .d = m->d,
        .c = &m->c,
        .w = &m->w,
        .mul = &m->mul,
        .n = rows->n,
        .positions = rows->positions,
        .cos_table = m->cos_table,
        .sin_table = m->sin_table,
        .norm = m->s.norm,
        .act = m->s.act,
        .gated = m->s.gated,
    };
}

struct pass_noise model_noise(struct model *m, const struct model_batch *b, int k)
{
    size_t rows = (size_t)b->batch * (size_t)b->seq, extra = (size_t)(k - 1);
    size_t floats = rows * (size_t)m->c.dim;
    struct pass_noise x = {NULL, NULL};
    if (b->noise) {
        m->d->ops->upload(m->d, m->s.noise, b->noise + extra * floats, floats * sizeof(float));
        x.given = m->s.noise;
    } else if (b->jitter > 0 && b->noise_keys)
        x.keys = b->noise_keys + extra * (size_t)b->batch;
    CHECK(x.given || x.keys || !(b->jitter > 0));
    return x;
}

/* The carried state and the fused input of pass k > 0, into x (N, D). */
static void feed_back(struct model *m, const struct block_run *r, const struct model_batch *b,
    int k, const struct pass_acts *prev, struct pass_acts *p, float *x)
{
    const struct device_ops *o = m->d->ops;
    struct pass_noise noise = model_noise(m, b, k);
    o->carry_fwd(
        m->d, p->carried, prev->h, noise.given, b->jitter, noise.keys, b->batch, b->seq, m->c.dim);
    o->upload(m->d, p->mask, b->masks + (size_t)(k - 1) * (size_t)r->n, (size_t)r->n);
    fused_input(r, &m->in, p, x);
}

static void attend(struct model *m, const struct model_batch *b, struct pass_acts *p, int layer)
{
    struct layer_acts *a = &p->layers[layer];
    struct attn_shape shape = model_attn_shape(m, b);
    if (p->rows.shared)
        share_attend(m, b, p, layer);
    else
        m->d->ops->attn_fwd(
            m->d, a->att, a->lse, a->q, a->k, a->v, model_first(m, &p->rows, layer), &shape);
}

void model_pass_forward(struct model *m, const struct model_batch *b, int k,
    const struct pass_acts *prev, struct pass_acts *p)
{
    const struct device_ops *o = m->d->ops;
    struct block_run r = model_block_run(m, &p->rows);
    float *x = p->layers[0].x0;
    if (r.n == 0)
        return; /* every token is pass 1's */
    if (k == 0)
        o->copy(m->d, x, m->in.plain, dim_bytes(&r));
    else if (p->rows.shared)
        share_feed_back(m, &r, b, k, x);
    else
        feed_back(m, &r, b, k, prev, p, x);
    for (int l = 0; l < m->c.layers; l++) {
        struct layer_acts *a = &p->layers[l];
        block_qkv(&r, l, a);
        attend(m, b, p, l);
        block_finish(&r, l, a, l + 1 < m->c.layers ? p->layers[l + 1].x0 : p->x_out);
    }
    o->rmsnorm_fwd(m->d, p->h, p->rstd, p->x_out, m->w.norm, r.n, m->c.dim, m->c.norm_eps);
}

void model_layer_remake(
    struct model *m, const struct model_batch *b, struct pass_acts *p, int layer)
{
    struct block_run r = model_block_run(m, &p->rows);
    struct layer_acts *a = &p->layers[layer];
    if (p->recompute == RECOMPUTE_NONE)
        return;
    block_qkv(&r, layer, a);
    if (p->recompute == RECOMPUTE_LAYER) {
        attend(m, b, p, layer);
        block_attn_out(&r, layer, a);
    }
    block_mlp_in(&r, layer, a);
}

void model_readout(struct model *m, struct pass_acts *p, float dscale, const float *weights,
    float *dh, float *host)
{
    const struct device_ops *o = m->d->ops;
    int n = p->rows.n, dim = m->c.dim, vocab = m->c.vocab;
    const struct products *mul = &m->mul;
    float *logits = m->s.logits;
    for (int at = 0; at < n; at += m->chunk) {
        int rows = n - at < m->chunk ? n - at : m->chunk;
        struct operand part = operand(mul, mul->x, p->h + (size_t)at * (size_t)dim, rows, dim);
        linear(mul, logits, part, m->w.embed, rows, vocab, dim, 1, 0);
        if (host)
            o->download(m->d, host + (size_t)at * (size_t)vocab, logits,
                (size_t)rows * (size_t)vocab * sizeof(float));
        o->xent(m->d, p->losses + at, logits, p->rows.targets + at, weights ? weights + at : NULL,
            rows, vocab, dscale, m->z_loss);
        if (dscale == 0)
            continue;
        struct operand dy = operand(mul, m->s.logits16, logits, rows, vocab);
        linear_dx(mul, dh + (size_t)at * (size_t)dim, dy, m->w.embed, rows, vocab, dim, 1, 1);
        linear_dw(mul, m->g.embed, dy, part, rows, vocab, dim, 1);
    }
}

/* --- model_forward ---------------------------------------------------------------------------- */

/* Host copies of one pass; NULL where not wanted. */
struct host_copies {
    float *hidden, *losses, *logits;
};

static int copies_new(const struct model *m, size_t n, int want, struct host_copies *h)
{
    size_t logits;
    *h = (struct host_copies){NULL, NULL, NULL};
    if (want & MODEL_WANT_HIDDEN)
        h->hidden = mem_try_array(n * (size_t)m->c.dim, sizeof(float));
    if (want & MODEL_WANT_LOSSES)
        h->losses = mem_try_array(n, sizeof(float));
    if (want & MODEL_WANT_LOGITS && mem_mul(n, (size_t)m->c.vocab, &logits) == 0)
        h->logits = mem_try_array(logits, sizeof(float));
    return (want & MODEL_WANT_HIDDEN && !h->hidden) || (want & MODEL_WANT_LOSSES && !h->losses) ||
                   (want & MODEL_WANT_LOGITS && !h->logits)
               ? ERR_NOMEM
               : 0;
}

static void copies_free(struct host_copies *h)
{
    free(h->hidden);
    free(h->losses);
    free(h->logits);
}

static void copies_fill(struct model *m, struct pass_acts *p, int n, struct host_copies *h)
{
    const struct device_ops *o = m->d->ops;
    if (h->losses || h->logits)
        model_readout(m, p, 0, NULL, NULL, h->logits);
    if (h->losses)
        o->download(m->d, h->losses, p->losses, (size_t)n * sizeof(float));
    if (h->hidden)
        o->download(m->d, h->hidden, p->h, (size_t)n * (size_t)m->c.dim * sizeof(float));
}

int model_forward(struct model *m, const struct model_batch *b, int want,
    int (*visit)(void *ctx, const struct model_pass *p), void *ctx)
{
    struct pass_acts *p = &m->passes[0];
    struct host_copies h;
    int n = b->batch * b->seq, rc = copies_new(m, (size_t)n, visit ? want : 0, &h);
    CHECK(b->targets || !(want & MODEL_WANT_LOSSES));
    if (rc == 0) {
        p->rows = model_all_rows(m, b);
        struct block_run r = model_block_run(m, &p->rows);
        model_batch_upload(m, b);
        products_begin(&m->mul, (size_t)m->table.total);
        plain_input(&r, m->tokens, &m->in, b->passes > 1);
    }
    for (int k = 0; rc == 0 && k < b->passes; k++) {
        model_pass_forward(m, b, k, p, p);
        copies_fill(m, p, n, &h);
        struct model_pass pass = {k + 1, h.hidden, h.losses, h.logits};
        rc = visit ? visit(ctx, &pass) : 0;
    }
    copies_free(&h);
    return rc ? rc : m->d->ops->sync(m->d, NULL);
}
