/* Backward from the last pass to the first: a pass's loss, and what later passes took from it. */
#include "common/check.h"
#include "kernels/model_internal.h"

/* s.dgate holds dL/d(the SwiGLU's output): through it, into s.dgate and s.dup. */
static void swiglu_backward(struct model *m, int n, const struct layer_acts *a)
{
    const struct device_ops *o = m->d->ops;
    struct scratch *s = &m->s;
    size_t all = (size_t)n * (size_t)m->c.ffn;
    if (a->gate16)
        o->swiglu_bwd_bf16(m->d, s->dgate, s->dup, s->dgate, a->gate16, a->up16, all);
    else
        o->swiglu_bwd(m->d, s->dgate, s->dup, s->dgate, a->gate, a->up, all);
}

/* s.dnorm = or += dy w, dw += dyᵀ x, of a layer that reads the normalised input x (n, D). */
static void normed_backward(struct model *m, float *dw, const float *dy, struct operand x,
    const float *w, int n, int out, int accumulate)
{
    const struct products *mul = &m->mul;
    struct operand g = operand(mul, mul->dy, dy, n, out);
    linear_dw(mul, dw, g, x, n, out, m->c.dim, 1);
    linear_dx(mul, m->s.dnorm, g, w, n, out, m->c.dim, 1, accumulate);
}

/* The MLP half: s.dx holds dL/d(block output), then dL/d(x1). */
static void mlp_backward(struct model *m, const struct pass_acts *p, int layer)
{
    const struct layer_acts *a = &p->layers[layer];
    const struct model_config *c = &m->c;
    const struct layer_tensors *w = &m->w.layers[layer], *g = &m->g.layers[layer];
    const struct device_ops *o = m->d->ops;
    const struct products *mul = &m->mul;
    struct block_run r = model_block_run(m, &p->rows);
    struct scratch *s = &m->s;
    struct device *d = m->d;
    int n = p->rows.n;
    o->rmsnorm_fwd(d, s->norm, a->rstd2, a->x1, w->post_norm, n, c->dim, c->norm_eps);
    struct operand act = swiglu(&r, a), dy = operand(mul, mul->dy, s->dx, n, c->dim);
    linear_dw(mul, g->down, dy, act, n, c->dim, c->ffn, c->residual_scale);
    linear_dx(mul, s->dgate, dy, w->down, n, c->dim, c->ffn, c->residual_scale, 0);
    swiglu_backward(m, n, a);
    struct operand x = operand(mul, mul->x, s->norm, n, c->dim);
    normed_backward(m, g->gate, s->dgate, x, w->gate, n, c->ffn, 0);
    normed_backward(m, g->up, s->dup, x, w->up, n, c->ffn, 1);
    o->rmsnorm_bwd(d, s->dx, 1, g->post_norm, s->dnorm, a->x1, w->post_norm, a->rstd2, n, c->dim,
        s->norm_work);
}

/* s.dx through o_proj and the gate: dL/d(att) into s.datt, the gate's into s.gated. */
static void output_backward(struct model *m, int n, int layer, const struct layer_acts *a)
{
    const struct model_config *c = &m->c;
    const struct device_ops *o = m->d->ops;
    const struct products *mul = &m->mul;
    struct scratch *s = &m->s;
    int q = c->heads * c->head_dim;
    size_t all = (size_t)n * (size_t)q;
    const float *att = c->attn_gate ? s->gated : a->att;
    if (c->attn_gate)
        o->gate_fwd(m->d, s->gated, a->att, a->att_gate, all);
    struct operand dy = operand(mul, mul->dy, s->dx, n, c->dim);
    struct operand x = operand(mul, mul->x, att, n, q);
    linear_dw(mul, m->g.layers[layer].o, dy, x, n, c->dim, q, c->residual_scale);
    linear_dx(mul, s->datt, dy, m->w.layers[layer].o, n, c->dim, q, c->residual_scale, 0);
    if (c->attn_gate)
        o->gate_bwd(m->d, s->datt, s->gated, s->datt, a->att, a->att_gate, all);
}

/* From s.datt: s.dq, and the gradients of the pass's keys and values. */
static void keys_backward(
    struct model *m, const struct model_batch *b, const struct pass_acts *p, int layer)
{
    const struct device_ops *o = m->d->ops;
    const struct layer_acts *a = &p->layers[layer];
    struct attn_shape shape = model_attn_shape(m, b);
    struct scratch *s = &m->s;
    size_t kv = (size_t)p->rows.n * (size_t)m->c.kv_heads * (size_t)m->c.head_dim;
    if (p->rows.shared) {
        share_attend_backward(m, b, p, layer);
        return;
    }
    o->attn_bwd(m->d, s->dq, s->dk, s->dv, s->datt, a->att, a->lse, a->q, a->k, a->v,
        model_first(m, &p->rows, layer), &shape, s->attn_work);
    if (m->sharing) { /* pass 1, whose keys the others saw */
        o->add(m->d, s->dk, m->shared_keys[layer].dk, 1, kv);
        o->add(m->d, s->dv, m->shared_keys[layer].dv, 1, kv);
    }
}

/* The attention half: s.dx holds dL/d(x1), then dL/d(x0). */
static void attn_backward(
    struct model *m, const struct model_batch *b, const struct pass_acts *p, int layer)
{
    const struct layer_acts *a = &p->layers[layer];
    const struct pass_rows *rows = &p->rows;
    const struct model_config *c = &m->c;
    const struct layer_tensors *w = &m->w.layers[layer], *g = &m->g.layers[layer];
    const struct device_ops *o = m->d->ops;
    struct scratch *s = &m->s;
    struct device *d = m->d;
    int n = rows->n, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    float *dk = rows->shared ? s->k_all : s->dk, *dv = rows->shared ? s->v_all : s->dv;
    o->rmsnorm_fwd(d, s->norm, a->rstd1, a->x0, w->input_norm, n, c->dim, c->norm_eps);
    output_backward(m, n, layer, a);
    keys_backward(m, b, p, layer);
    o->rope(d, s->dq, rows->positions, m->cos_table, m->sin_table, n, c->heads, c->head_dim, 1);
    o->rope(d, dk, rows->positions, m->cos_table, m->sin_table, n, c->kv_heads, c->head_dim, 1);
    if (c->qk_norm) {
        o->rmsnorm_bwd(d, s->dq, 0, g->q_norm, s->dq, a->q_raw, w->q_norm, a->rstd_q, n * c->heads,
            c->head_dim, s->norm_work);
        o->rmsnorm_bwd(d, dk, 0, g->k_norm, dk, a->k_raw, w->k_norm, a->rstd_k, n * c->kv_heads,
            c->head_dim, s->norm_work);
    }
    struct operand x = operand(&m->mul, m->mul.x, s->norm, n, c->dim);
    normed_backward(m, g->q, s->dq, x, w->q, n, q, 0);
    normed_backward(m, g->k, dk, x, w->k, n, kv, 1);
    normed_backward(m, g->v, dv, x, w->v, n, kv, 1);
    if (c->attn_gate)
        normed_backward(m, g->attn_gate, s->gated, x, w->attn_gate, n, q, 1);
    o->rmsnorm_bwd(d, s->dx, 1, g->input_norm, s->dnorm, a->x0, w->input_norm, a->rstd1, n, c->dim,
        s->norm_work);
}

/*
 * The fused input: s.dx holds dL/d(input of this pass). The plain rows go to s.dplain, the gate's
 * part is summed in s.dg, and s.dcarried becomes what this pass asks of the state of the pass
 * before.
 */
static void fusion_backward(struct model *m, const struct pass_acts *p)
{
    const struct model_config *c = &m->c;
    const struct device_ops *o = m->d->ops;
    struct scratch *s = &m->s;
    struct device *d = m->d;
    int n = p->rows.n;
    size_t all = (size_t)n * (size_t)c->dim;
    const float *g = m->in.g;
    if (p->rows.shared) { /* every row is fused */
        o->gather_rows(d, s->norm, m->in.g, p->rows.index, n, (size_t)c->dim * sizeof(float));
        g = s->norm;
    } else
        o->select_rows_bwd(d, s->dx, s->dplain, s->dx, p->mask, n, c->dim);
    if (c->out_norm)
        o->rmsnorm_bwd(
            d, s->dx, 0, NULL, s->dx, p->prod, NULL, p->rstd_prod, n, c->dim, s->norm_work);
    o->gate_bwd(d, s->du, s->dg_pass, s->dx, p->u, g, all);
    if (p->rows.shared)
        o->scatter_add_rows(d, s->dg, s->dg_pass, p->rows.index, n, c->dim);
    else
        o->add(d, s->dg, s->dg_pass, 1, all);
    struct operand du = operand(&m->mul, m->mul.dy, s->du, n, c->dim);
    struct operand carried = {p->carried, p->carried16};
    linear_dw(&m->mul, m->g.w_u, du, carried, n, c->dim, c->dim, 1);
    linear_dx(&m->mul, s->dcarried, du, m->w.w_u, n, c->dim, c->dim, 1, 0);
}

static void tell_final(struct model *m, int first, int end)
{
    if (m->final)
        m->final(m->final_ctx, first, end);
}

static int first_weight(const struct model_config *c, int layer)
{
    return layer < c->layers ? weight_layer(c, layer).input_norm : weight_norm(c);
}

/* Through the blocks of one pass: dh holds dL/dh, s.dx becomes dL/d(input). */
static void pass_backward(
    struct model *m, const struct model_batch *b, struct pass_acts *p, const float *dh)
{
    m->d->ops->rmsnorm_bwd(m->d, m->s.dx, 0, m->g.norm, dh, p->x_out, m->w.norm, p->rstd, p->rows.n,
        m->c.dim, m->s.norm_work);
    int last = p == m->passes, norm = weight_norm(&m->c); /* pass 1 is the last to add to them */
    if (last)
        tell_final(m, norm, norm + 1);
    for (int l = m->c.layers - 1; l >= 0; l--) {
        model_layer_remake(m, b, p, l);
        mlp_backward(m, p, l);
        attn_backward(m, b, p, l);
        if (last)
            tell_final(m, first_weight(&m->c, l), first_weight(&m->c, l + 1));
    }
}

/* dL/d(gate's input) from dg = s.dg, into s.dplain. */
static void gate_backward(struct model *m, struct operand dg, int n)
{
    const struct model_config *c = &m->c;
    struct scratch *s = &m->s;
    int own = gate_own_norm(c);
    linear_dx(&m->mul, own ? s->dnorm : s->dplain, dg, m->w.w_g, n, c->dim, c->dim, 1, !own);
    if (own)
        m->d->ops->rmsnorm_bwd(m->d, s->dplain, 1, NULL, s->dnorm, m->in.e, NULL, m->in.rstd_gate,
            n, c->dim, s->norm_work);
}

/* What all passes share: s.dplain, and s.dg through W_G, into the embedding. */
static void input_backward(struct model *m, int n, int gated)
{
    const struct model_config *c = &m->c;
    const struct device_ops *o = m->d->ops;
    struct scratch *s = &m->s;
    const struct input_acts *in = &m->in;
    struct device *d = m->d;
    int of_plain = in->gate_in == in->plain; /* else the gate reads E[x], behind in_norm */
    const struct products *mul = &m->mul;
    struct operand dg = {0};
    if (gated) {
        dg = operand(mul, mul->dy, s->dg, n, c->dim);
        linear_dw(
            mul, m->g.w_g, dg, operand(mul, mul->x, in->gate_in, n, c->dim), n, c->dim, c->dim, 1);
    }
    if (gated && of_plain)
        gate_backward(m, dg, n);
    if (c->in_norm)
        o->rmsnorm_bwd(
            d, s->dplain, 0, NULL, s->dplain, in->e, NULL, in->rstd_in, n, c->dim, s->norm_work);
    if (gated && !of_plain)
        gate_backward(m, dg, n);
    o->embed_bwd(d, m->g.embed, m->tokens, s->dplain, n, c->dim, c->vocab);
}

/* One pass, its loss weighted by `weight`: s.dh (pass 1 with sharing: s.dh_first) holds what later
 * passes ask of its states; the same of the pass before it is left behind. */
static void backward_of(struct model *m, const struct model_batch *b, int k, float weight)
{
    const struct device_ops *o = m->d->ops;
    struct pass_acts *p = &m->passes[k];
    struct scratch *s = &m->s;
    size_t all = (size_t)b->batch * (size_t)b->seq * (size_t)m->c.dim;
    int first = k == 0 && m->sharing;
    float *dh = first ? s->dh_first : s->dh;
    if (p->rows.n > 0) {
        model_readout(m, p, weight, first ? s->row_weights : NULL, dh, NULL);
        pass_backward(m, b, p, dh);
        if (k > 0)
            fusion_backward(m, p);
    }
    if (k == 0)
        o->add(m->d, s->dplain, s->dx, 1, all);
    else if (m->sharing)
        share_carry_backward(m, b, k);
    else {
        o->zero(m->d, s->dh, all * sizeof(float));
        o->carry_bwd(m->d, s->dh, s->dcarried, b->batch, b->seq, m->c.dim);
    }
}

static void backward(
    struct model *m, const struct model_batch *b, float lambda, float scale, double *loss_sums)
{
    const struct device_ops *o = m->d->ops;
    int n = b->batch * b->seq, last = b->passes - 1;
    size_t all = (size_t)n * (size_t)m->c.dim;
    o->zero(m->d, m->s.dplain, all * sizeof(float));
    o->zero(m->d, m->s.dh, all * sizeof(float));
    if (last > 0)
        o->zero(m->d, m->s.dg, all * sizeof(float));
    if (m->sharing)
        share_backward_begin(m, b);
    for (int k = last; k >= 0; k--) {
        if (k == 0 && last > 0)
            tell_final(m, weight_w_u(&m->c), weight_w_u(&m->c) + 1);
        backward_of(m, b, k, k == 0 ? scale : scale * lambda / (float)last);
    }
    if (m->sharing)
        share_loss_sums(m, b, loss_sums);
    else
        for (int k = 0; k <= last; k++)
            loss_sums[k] = o->sum(m->d, m->passes[k].losses, (size_t)n);
    input_backward(m, n, last > 0);
    if (last > 0)
        tell_final(m, weight_w_g(&m->c), weight_w_g(&m->c) + 1);
    tell_final(m, weight_embed(), weight_embed() + 1);
}

void model_train(
    struct model *m, const struct model_batch *b, float lambda, float scale, double *loss_sums)
{
    CHECK(m->lim.train && b->passes <= m->lim.passes && b->targets);
    m->z_loss = b->z_loss;
    model_batch_upload(m, b);
    products_begin(&m->mul, (size_t)m->table.total);
    for (int k = 0; k < b->passes; k++)
        m->passes[k].rows = model_all_rows(m, b);
    share_begin(m, b, lambda);
    struct block_run r = model_block_run(m, &m->passes[0].rows);
    plain_input(&r, m->tokens, &m->in, b->passes > 1);
    for (int k = 0; k < b->passes; k++)
        model_pass_forward(m, b, k, k ? &m->passes[k - 1] : NULL, &m->passes[k]);
    backward(m, b, lambda, scale, loss_sums);
}
