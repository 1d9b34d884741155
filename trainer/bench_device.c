#include "trainer/bench_device.h"

#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "trainer/bench_clock.h"

/* Parenthesised lists of one operation each: what it returns, its name, parameters, arguments. */
#define MEMORY_OPS(X)                                                                              \
    X(upload, (struct device * d, void *dst, const void *host, size_t bytes),                      \
        (in, dst, host, bytes))                                                                    \
    X(download, (struct device * d, void *host, const void *src, size_t bytes),                    \
        (in, host, src, bytes))                                                                    \
    X(copy, (struct device * d, void *dst, const void *src, size_t bytes), (in, dst, src, bytes))  \
    X(zero, (struct device * d, void *dst, size_t bytes), (in, dst, bytes))                        \
    X(gather_rows,                                                                                 \
        (struct device * d, void *out, const void *from, const int32_t *rows, int n,               \
            size_t bytes),                                                                         \
        (in, out, from, rows, n, bytes))                                                           \
    X(scatter_rows,                                                                                \
        (struct device * d, void *out, const void *from, const int32_t *rows, int n,               \
            size_t bytes),                                                                         \
        (in, out, from, rows, n, bytes))                                                           \
    X(scatter_add_rows,                                                                            \
        (struct device * d, float *out, const float *from, const int32_t *rows, int n, int dim),   \
        (in, out, from, rows, n, dim))

#define BLOCK_OPS(X)                                                                               \
    X(embed_fwd,                                                                                   \
        (struct device * d, float *out, const int32_t *tokens, const float *table, int n, int dim, \
            int vocab),                                                                            \
        (in, out, tokens, table, n, dim, vocab))                                                   \
    X(embed_bwd,                                                                                   \
        (struct device * d, float *dtable, const int32_t *tokens, const float *dout, int n,        \
            int dim, int vocab),                                                                   \
        (in, dtable, tokens, dout, n, dim, vocab))                                                 \
    X(rmsnorm_fwd,                                                                                 \
        (struct device * d, float *out, float *rstd, const float *x, const float *w, int n,        \
            int dim, float eps),                                                                   \
        (in, out, rstd, x, w, n, dim, eps))                                                        \
    X(rmsnorm_bwd,                                                                                 \
        (struct device * d, float *dx, int accumulate, float *dw, const float *dout,               \
            const float *x, const float *w, const float *rstd, int n, int dim, float *work),       \
        (in, dx, accumulate, dw, dout, x, w, rstd, n, dim, work))                                  \
    X(rope,                                                                                        \
        (struct device * d, float *x, const int32_t *positions, const float *cs, const float *sn,  \
            int n, int heads, int hd, int inverse),                                                \
        (in, x, positions, cs, sn, n, heads, hd, inverse))                                         \
    X(attn_fwd,                                                                                    \
        (struct device * d, float *out, float *lse, const float *q, const float *k,                \
            const float *v, const int32_t *first, const struct attn_shape *s),                     \
        (in, out, lse, q, k, v, first, s))                                                         \
    X(attn_bwd,                                                                                    \
        (struct device * d, float *dq, float *dk, float *dv, const float *dout, const float *out,  \
            const float *lse, const float *q, const float *k, const float *v,                      \
            const int32_t *first, const struct attn_shape *s, float *work),                        \
        (in, dq, dk, dv, dout, out, lse, q, k, v, first, s, work))                                 \
    X(attn_rows_fwd,                                                                               \
        (struct device * d, float *out, float *lse, const float *q, const float *k,                \
            const float *v, const struct attn_rows *r, const struct attn_shape *s),                \
        (in, out, lse, q, k, v, r, s))                                                             \
    X(attn_rows_bwd,                                                                               \
        (struct device * d, float *dq, float *dk, float *dv, const float *dout, const float *out,  \
            const float *lse, const float *q, const float *k, const float *v,                      \
            const struct attn_rows *r, const struct attn_shape *s, float *work),                   \
        (in, dq, dk, dv, dout, out, lse, q, k, v, r, s, work))                                     \
    X(swiglu_fwd, (struct device * d, float *out, const float *gate, const float *up, size_t n),   \
        (in, out, gate, up, n))                                                                    \
    X(swiglu_bwd,                                                                                  \
        (struct device * d, float *dgate, float *dup, const float *dout, const float *gate,        \
            const float *up, size_t n),                                                            \
        (in, dgate, dup, dout, gate, up, n))                                                       \
    X(to_bf16, (struct device * d, bf16 * out, const float *from, size_t n), (in, out, from, n))   \
    X(swiglu_fwd_bf16,                                                                             \
        (struct device * d, bf16 * out, const bf16 *gate, const bf16 *up, size_t n),               \
        (in, out, gate, up, n))                                                                    \
    X(swiglu_bwd_bf16,                                                                             \
        (struct device * d, float *dgate, float *dup, const float *dout, const bf16 *gate,         \
            const bf16 *up, size_t n),                                                             \
        (in, dgate, dup, dout, gate, up, n))                                                       \
    X(xent,                                                                                        \
        (struct device * d, float *losses, float *logits, const int32_t *targets,                  \
            const float *weights, int n, int vocab, float dscale, float z_loss),                   \
        (in, losses, logits, targets, weights, n, vocab, dscale, z_loss))

#define FEEDBACK_OPS(X)                                                                            \
    X(carry_fwd,                                                                                   \
        (struct device * d, float *carried, const float *h, const float *noise, float jitter,      \
            const uint64_t *keys, int batch, int seq, int dim),                                    \
        (in, carried, h, noise, jitter, keys, batch, seq, dim))                                    \
    X(carry_bwd,                                                                                   \
        (struct device * d, float *dh, const float *dcarried, int batch, int seq, int dim),        \
        (in, dh, dcarried, batch, seq, dim))                                                       \
    X(carry_rows_fwd,                                                                              \
        (struct device * d, float *carried, const float *h, const float *noise, float jitter,      \
            const uint64_t *keys, const int32_t *rows, int n, int seq, int dim),                   \
        (in, carried, h, noise, jitter, keys, rows, n, seq, dim))                                  \
    X(carry_rows_bwd,                                                                              \
        (struct device * d, float *dh, const float *dcarried, const int32_t *rows, int n,          \
            int dim),                                                                              \
        (in, dh, dcarried, rows, n, dim))                                                          \
    X(gate_fwd, (struct device * d, float *out, const float *u, const float *g, size_t n),         \
        (in, out, u, g, n))                                                                        \
    X(gate_bwd,                                                                                    \
        (struct device * d, float *du, float *dg, const float *dout, const float *u,               \
            const float *g, size_t n),                                                             \
        (in, du, dg, dout, u, g, n))                                                               \
    X(select_rows,                                                                                 \
        (struct device * d, float *out, const uint8_t *mask, const float *a, const float *b,       \
            int n, int dim),                                                                       \
        (in, out, mask, a, b, n, dim))                                                             \
    X(select_rows_bwd,                                                                             \
        (struct device * d, float *da, float *db, const float *dout, const uint8_t *mask, int n,   \
            int dim),                                                                              \
        (in, da, db, dout, mask, n, dim))

#define VECTOR_OPS(X)                                                                              \
    X(add, (struct device * d, float *y, const float *x, float alpha, size_t n),                   \
        (in, y, x, alpha, n))                                                                      \
    X(scale, (struct device * d, float *y, float alpha, size_t n), (in, y, alpha, n))              \
    X(adamw,                                                                                       \
        (struct device * d, float *w, float *m, float *v, const float *g, size_t n,                \
            const struct adamw_args *a),                                                           \
        (in, w, m, v, g, n, a))                                                                    \
    X(normuon,                                                                                     \
        (struct device * d, float *x, float *v, int rows, int columns, float beta2, float *work),  \
        (in, x, v, rows, columns, beta2, work))

#define VOID_OPS(X) MEMORY_OPS(X) BLOCK_OPS(X) FEEDBACK_OPS(X) VECTOR_OPS(X)
/* These return the host's result. */
#define SUM_OPS(X)                                                                                 \
    X(sum_sq, (struct device * d, const float *x, size_t n), (in, x, n))                           \
    X(sum, (struct device * d, const float *x, size_t n), (in, x, n))

#define NAME_OP(name, parameters, arguments) OP_##name,
enum op {
    OP_matmul_forward,
    OP_matmul_dx,
    OP_matmul_dw,
    VOID_OPS(NAME_OP) SUM_OPS(NAME_OP) OP_COUNT
};
_Static_assert((int)OP_COUNT <= (int)BENCH_OPS_MAX, "more operations than bench_counts has rows");

#define TEXT_OP(name, parameters, arguments) #name,
static const char *const op_names[OP_COUNT] = {
    "matmul x Wt", "matmul dy W", "matmul dyt x", VOID_OPS(TEXT_OP) SUM_OPS(TEXT_OP)};

struct bench_device {
    struct device base; /* the table of the wrappers, and the inner device's threads */
    struct device_ops ops;
    struct device *inner;
    struct bench_counts counts;
};

static struct bench_device *self(struct device *d)
{
    return (struct bench_device *)d;
}

static void spent(struct device *d, enum op op, double since)
{
    struct bench_op *row = &self(d)->counts.ops[op];
    row->seconds += bench_seconds() - since;
    row->calls++;
}

#define WRAP_VOID(name, parameters, arguments)                                                     \
    static void timed_##name parameters                                                            \
    {                                                                                              \
        struct device *in = self(d)->inner;                                                        \
        double since = bench_seconds();                                                            \
        in->ops->name arguments;                                                                   \
        spent(d, OP_##name, since);                                                                \
    }
#define WRAP_SUM(name, parameters, arguments)                                                      \
    static double timed_##name parameters                                                          \
    {                                                                                              \
        struct device *in = self(d)->inner;                                                        \
        double since = bench_seconds(), result = in->ops->name arguments;                          \
        spent(d, OP_##name, since);                                                                \
        return result;                                                                             \
    }
VOID_OPS(WRAP_VOID)
SUM_OPS(WRAP_SUM)

static void count_shape(struct bench_counts *c, const struct bench_shape *s)
{
    for (int i = 0; i < c->shape_count; i++) {
        struct bench_shape *have = &c->shapes[i];
        if (have->ta == s->ta && have->tb == s->tb && have->m == s->m && have->n == s->n &&
            have->k == s->k && have->accumulates == s->accumulates && have->bf16 == s->bf16) {
            have->calls++;
            return;
        }
    }
    if (c->shape_count < BENCH_SHAPES_MAX)
        c->shapes[c->shape_count++] = *s;
}

static void timed_matmul(struct device *d, int ta, int tb, int m, int n, int k, float alpha,
    const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc)
{
    enum op op = ta ? OP_matmul_dw : tb ? OP_matmul_forward : OP_matmul_dx;
    struct bench_shape shape = {ta, tb, m, n, k, beta != 0, 1, 0};
    struct device *in = self(d)->inner;
    double since = bench_seconds();
    in->ops->matmul(in, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    spent(d, op, since);
    self(d)->counts.ops[op].flops += 2.0 * m * n * k;
    count_shape(&self(d)->counts, &shape);
}

static void timed_matmul_bf16(struct device *d, int ta, int tb, int m, int n, int k, float alpha,
    const bf16 *a, int lda, const bf16 *b, int ldb, int accumulate, float *c, int ldc)
{
    enum op op = ta ? OP_matmul_dw : tb ? OP_matmul_forward : OP_matmul_dx;
    struct bench_shape shape = {ta, tb, m, n, k, accumulate, 1, 1};
    struct device *in = self(d)->inner;
    double since = bench_seconds();
    in->ops->matmul_bf16(in, ta, tb, m, n, k, alpha, a, lda, b, ldb, accumulate, c, ldc);
    spent(d, op, since);
    self(d)->counts.ops[op].flops += 2.0 * m * n * k;
    count_shape(&self(d)->counts, &shape);
}

struct device *bench_device_new(struct device *inner)
{
    struct bench_device *b = mem_array(1, sizeof *b);
    b->inner = inner;
    b->ops = *inner->ops;
#define SET_OP(name, parameters, arguments) b->ops.name = timed_##name;
    VOID_OPS(SET_OP)
    SUM_OPS(SET_OP)
    b->ops.matmul = timed_matmul;
    b->ops.matmul_bf16 = timed_matmul_bf16;
    b->base.ops = &b->ops;
    b->base.threads = inner->threads;
    bench_device_reset(&b->base);
    return &b->base;
}

void bench_device_free(struct device **d)
{
    if (!*d)
        return;
    device_free(&self(*d)->inner);
    device_free(d);
}

void bench_device_reset(struct device *d)
{
    struct bench_counts *c = &self(d)->counts;
    memset(c, 0, sizeof *c);
    c->op_count = OP_COUNT;
    for (int i = 0; i < OP_COUNT; i++)
        snprintf(c->ops[i].name, sizeof c->ops[i].name, "%s", op_names[i]);
}

void bench_device_counts(const struct device *d, struct bench_counts *out)
{
    *out = ((const struct bench_device *)d)->counts;
}
