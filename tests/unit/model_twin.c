#include "tests/unit/model_twin.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/rng.h"

struct twin {
    const struct model_config *c;
    const struct weight_table *t;
    const double *w;
};

static const double *tensor(const struct twin *m, int index)
{
    return m->w + m->t->items[index].offset;
}

/* y (out) = W (out, in) x */
static void matvec(double *y, const double *w, const double *x, int out, int in)
{
    for (int o = 0; o < out; o++) {
        y[o] = 0;
        for (int i = 0; i < in; i++)
            y[o] += w[(size_t)o * (size_t)in + (size_t)i] * x[i];
    }
}

static void norm(double *y, const double *x, const double *w, int dim, double eps)
{
    double s = 0;
    for (int i = 0; i < dim; i++)
        s += x[i] * x[i] / dim;
    s = 1 / sqrt(s + eps);
    for (int i = 0; i < dim; i++)
        y[i] = x[i] * s * (w ? w[i] : 1);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* Half-split rotation of one head by `pos`. */
static void rotate(double *x, int pos, int hd, double theta)
{
    for (int i = 0; i < hd / 2; i++) {
        double angle = pos * pow(theta, -2.0 * i / hd), a = x[i], b = x[i + hd / 2];
        x[i] = a * cos(angle) - b * sin(angle);
        x[i + hd / 2] = b * cos(angle) + a * sin(angle);
    }
}

/* One query of one head over positions first … t. */
static void attend(double *out, const double *q, const double *k, const double *v, int first, int t,
    int stride, int hd)
{
    double top = -INFINITY, sum = 0;
    double *s = mem_array((size_t)t + 1, sizeof *s);
    for (int j = first; j <= t; j++) {
        for (int i = 0; i < hd; i++)
            s[j] += q[i] * k[j * stride + i] / sqrt(hd);
        top = fmax(top, s[j]);
    }
    for (int j = first; j <= t; j++)
        sum += s[j] = exp(s[j] - top);
    memset(out, 0, (size_t)hd * sizeof *out);
    for (int j = first; j <= t; j++)
        for (int i = 0; i < hd; i++)
            out[i] += s[j] / sum * v[j * stride + i];
    free(s);
}

/* x (T, D) through one block, in place. first, pos: (T). */
static void block(
    const struct twin *m, int layer, double *x, const int *first, const int *pos, int seq)
{
    const struct model_config *c = m->c;
    struct layer_weights w = weight_layer(c, layer);
    int d = c->dim, hd = c->head_dim, nq = c->heads * hd, nkv = c->kv_heads * hd;
    double *gate = mem_array((size_t)(seq * nq), sizeof *gate);
    double *a = mem_array((size_t)d, sizeof *a), *f = mem_array((size_t)c->ffn * 2, sizeof *f);
    double *q = mem_array((size_t)(seq * nq), sizeof *q), *att = mem_array((size_t)nq, sizeof *att);
    double *k = mem_array((size_t)(seq * nkv), sizeof *k);
    double *v = mem_array((size_t)(seq * nkv), sizeof *v);
    for (int t = 0; t < seq; t++) {
        norm(a, x + t * d, tensor(m, w.input_norm), d, (double)c->norm_eps);
        matvec(q + t * nq, tensor(m, w.q), a, nq, d);
        matvec(k + t * nkv, tensor(m, w.k), a, nkv, d);
        matvec(v + t * nkv, tensor(m, w.v), a, nkv, d);
        if (c->attn_gate)
            matvec(gate + t * nq, tensor(m, w.attn_gate), a, nq, d);
        for (int h = 0; c->qk_norm && h < c->heads; h++)
            norm(q + t * nq + h * hd, q + t * nq + h * hd, tensor(m, w.q_norm), hd,
                (double)c->norm_eps);
        for (int h = 0; c->qk_norm && h < c->kv_heads; h++)
            norm(k + t * nkv + h * hd, k + t * nkv + h * hd, tensor(m, w.k_norm), hd,
                (double)c->norm_eps);
        for (int h = 0; h < c->heads; h++)
            rotate(q + t * nq + h * hd, pos[t], hd, c->rope_theta);
        for (int h = 0; h < c->kv_heads; h++)
            rotate(k + t * nkv + h * hd, pos[t], hd, c->rope_theta);
    }
    for (int t = 0; t < seq; t++) {
        int full = c->full_every > 0 && (layer + 1) % c->full_every == 0, from = first[t];
        if (c->window > 0 && !full && t - from >= c->window)
            from = t - c->window + 1;
        for (int h = 0; h < c->heads; h++) {
            int g = h / (c->heads / c->kv_heads) * hd;
            attend(att + h * hd, q + t * nq + h * hd, k + g, v + g, from, t, nkv, hd);
        }
        for (int i = 0; c->attn_gate && i < nq; i++)
            att[i] *= sigmoid(gate[t * nq + i]);
        matvec(a, tensor(m, w.o), att, d, nq);
        for (int i = 0; i < d; i++)
            x[t * d + i] += (double)c->residual_scale * a[i];
        norm(a, x + t * d, tensor(m, w.post_norm), d, (double)c->norm_eps);
        matvec(f, tensor(m, w.gate), a, c->ffn, d);
        matvec(f + c->ffn, tensor(m, w.up), a, c->ffn, d);
        for (int i = 0; i < c->ffn; i++)
            f[i] *= sigmoid(f[i]) * f[c->ffn + i];
        matvec(a, tensor(m, w.down), f, d, c->ffn);
        for (int i = 0; i < d; i++)
            x[t * d + i] += (double)c->residual_scale * a[i];
    }
    free(gate);
    free(a);
    free(f);
    free(q);
    free(att);
    free(k);
    free(v);
}

/* What pass k (from 1) adds to element i of position t of row r. */
static double noise_at(
    const struct model_config *c, const struct model_batch *b, int k, int r, int t, int i)
{
    size_t extra = (size_t)(k - 1) * (size_t)b->batch + (size_t)r;
    if (b->noise)
        return (double)b->noise[(extra * (size_t)b->seq + (size_t)t) * (size_t)c->dim + (size_t)i];
    if (!(b->jitter > 0))
        return 0;
    double u = (double)rng_unitf(b->noise_keys[extra], (uint64_t)(t * c->dim + i));
    return (double)b->jitter * (2 * u - 1);
}

/* The input of position t of row r in pass k (from 0); before: h of position t − 1, pass k − 1. */
static void input(const struct twin *m, const struct model_batch *b, int k, int r, int t,
    const double *before, double *u)
{
    const struct model_config *c = m->c;
    int d = c->dim, at = r * b->seq + t;
    const double *e = tensor(m, weight_embed()) + (size_t)b->tokens[at] * (size_t)d;
    int fused = k > 0 && b->masks[(k - 1) * b->batch * b->seq + at];
    if (!fused) {
        memcpy(u, e, (size_t)d * sizeof *u);
        if (c->in_norm)
            norm(u, e, NULL, d, (double)c->norm_eps);
        return;
    }
    double *x = mem_array((size_t)d * 3, sizeof *x), *g = x + d, *n = g + d;
    for (int i = 0; i < d; i++) {
        x[i] = before[i] + noise_at(c, b, k, r, t - 1, i);
        n[i] = e[i];
    }
    if (c->gate_norm)
        norm(n, e, NULL, d, (double)c->norm_eps);
    matvec(g, tensor(m, weight_w_g(c)), n, d, d);
    matvec(u, tensor(m, weight_w_u(c)), x, d, d);
    for (int i = 0; i < d; i++)
        u[i] *= sigmoid(g[i]);
    if (c->out_norm)
        norm(u, u, NULL, d, (double)c->norm_eps);
    free(x);
}

/* Loss of one position, from its h, and the log-sum-exp of its logits. */
static double token_loss(const struct twin *m, const double *h, int target, double *lse)
{
    const double *e = tensor(m, weight_embed());
    int v = m->c->vocab, d = m->c->dim;
    double *z = mem_array((size_t)v, sizeof *z), top = -INFINITY, sum = 0;
    matvec(z, e, h, v, d);
    for (int i = 0; i < v; i++)
        top = fmax(top, z[i]);
    for (int i = 0; i < v; i++)
        sum += exp(z[i] - top);
    *lse = top + log(sum);
    double loss = *lse - z[target];
    free(z);
    return loss;
}

/* Row r, pass k: h (T, D) of the pass before → of this one; returns the sum of losses, adds squared
 * log-sum-exps to lse_sq. */
static double row_pass(
    const struct twin *m, const struct model_batch *b, int k, int r, double *h, double *lse_sq)
{
    const struct model_config *c = m->c;
    int d = c->dim, seq = b->seq;
    double *x = mem_array((size_t)(seq * d), sizeof *x), sum = 0;
    int *first = mem_array((size_t)seq, sizeof *first), *pos = mem_array((size_t)seq, sizeof *pos);
    for (int t = 0, start = 0; t < seq; t++) {
        if (c->doc_mask && b->doc_starts[r * seq + t])
            start = t;
        first[t] = start;
        pos[t] = t - start;
        input(m, b, k, r, t, t ? h + (t - 1) * d : NULL, x + t * d);
    }
    for (int l = 0; l < c->layers; l++)
        block(m, l, x, first, pos, seq);
    for (int t = 0; t < seq; t++) {
        norm(h + t * d, x + t * d, tensor(m, weight_norm(c)), d, (double)c->norm_eps);
        if (b->targets && b->targets[r * seq + t] >= 0) {
            double lse;
            sum += token_loss(m, h + t * d, b->targets[r * seq + t], &lse);
            *lse_sq += lse * lse;
        }
    }
    free(x);
    free(first);
    free(pos);
    return sum;
}

void twin_forward(const struct model_config *c, const struct weight_table *t, const double *w,
    const struct model_batch *b, const struct twin_result *out)
{
    struct twin m = {c, t, w};
    size_t row = (size_t)b->seq * (size_t)c->dim;
    double *h = mem_array(row, sizeof *h);
    memset(out->losses, 0, (size_t)b->passes * sizeof *out->losses);
    if (out->lse_sq)
        memset(out->lse_sq, 0, (size_t)b->passes * sizeof *out->lse_sq);
    for (int r = 0; r < b->batch; r++)
        for (int k = 0; k < b->passes; k++) {
            double squares = 0;
            out->losses[k] += row_pass(&m, b, k, r, h, &squares);
            if (out->lse_sq)
                out->lse_sq[k] += squares;
            if (out->hidden)
                memcpy(out->hidden + ((size_t)k * (size_t)b->batch + (size_t)r) * row, h,
                    row * sizeof *h);
        }
    free(h);
}

double twin_total(const struct model_config *c, const struct weight_table *t, const double *w,
    const struct model_batch *b, double lambda, double scale)
{
    double *losses = mem_array((size_t)b->passes * 2, sizeof *losses), extra = 0;
    struct twin_result r = {NULL, losses, losses + b->passes};
    twin_forward(c, t, w, b, &r);
    for (int k = 0; k < b->passes; k++)
        losses[k] += (double)b->z_loss * r.lse_sq[k];
    for (int k = 1; k < b->passes; k++)
        extra += losses[k];
    double total = scale * (losses[0] + (b->passes > 1 ? lambda * extra / (b->passes - 1) : 0));
    free(losses);
    return total;
}
