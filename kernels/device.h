/*
 * A device: memory and the table of operations that the model is written against.
 *
 * The model (kernels/model.c), the decoder and the optimizer call only this table, so
 * that a new device is one new table. This version has `cpu` (float32, OpenMP, oneDNN).
 *
 * Conventions
 *  - Pointers are device memory of the device that is passed. Shapes are row-major and
 *    stated as (rows, columns). N = B·T token rows. Reals are float32 but where bf16 is said.
 *  - "+=" in a comment means the result is accumulated into the output, "=" overwritten.
 *  - Operations cannot fail on valid arguments; wrong arguments are our bug (CHECK).
 *    An asynchronous device reports its errors at sync().
 *  - Deterministic: the same arguments on the same device with the same thread count give
 *    the same bits.
 *  - No operation allocates (what oneDNN packs inside a product aside): an operation's `_work`
 *    function says how many floats of scratch it needs, the caller gives them.
 *  - Not thread-safe: one device object a thread.
 */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

struct device;

enum { DEVICE_DECODE_ROWS = 32 }; /* see matmul */

/* The upper half of a float32: its range, 8 bits of precision. */
typedef uint16_t bf16;

/* Shape of one attention call. Rows of q, k, v, out are tokens. */
struct attn_shape {
    int batch, seq; /* B rows of T tokens */
    int heads, kv_heads, head_dim;
};

/*
 * Some of the rows of a batch, compacted: n of them, ascending. Row i stands at rows[i] = b·T + t
 * of the batch; those of batch row b are starts[b] … starts[b + 1] − 1.
 */
struct attn_rows {
    int n;
    const int32_t *rows;   /* (n) */
    const int32_t *starts; /* (B + 1) */
    const int32_t *first;  /* (n) the first key that row i sees, as attention's `first` */
};

/* One parameter range for the optimizer (a contiguous slice of the flat parameters). */
struct adamw_args {
    float lr, beta1, beta2, eps;
    float weight_decay; /* decoupled; 0 for norms and fusion matrices */
    float grad_scale;   /* multiplies the gradient first: the clipping factor */
    int64_t t;          /* 1-based count of updates of this range (bias correction) */
};

struct device_ops {
    const char *name;
    void (*release)(struct device *d); /* what d->own holds; for device_free() */

    /* -- memory ------------------------------------------------------------------------- */
    /* 64-byte aligned, zeroed; NULL when exhausted */
    void *(*alloc)(struct device *d, size_t bytes);
    void (*free)(struct device *d, void *p);
    void (*upload)(struct device *d, void *dst, const void *host, size_t bytes);
    void (*download)(struct device *d, void *host, const void *src, size_t bytes);
    void (*copy)(struct device *d, void *dst, const void *src, size_t bytes);
    void (*zero)(struct device *d, void *dst, size_t bytes);
    int (*sync)(struct device *d, struct err *e);

    /* -- linear algebra ------------------------------------------------------------------
     * C (M, N) = alpha · op(A) op(B) + beta · C; op(X) = X or Xᵀ. Row-major with row strides ld.
     * The three layouts of a linear layer y = x Wᵀ with W (out, in):
     *   forward  y (N,out)  = x · Wᵀ      matmul(0, 1, N, out, in, …)
     *   dx       (N,in)     = dy · W      matmul(0, 0, N, in, out, …)
     *   dW       (out,in)  += dyᵀ · x     matmul(1, 0, out, in, N, …, beta 1)
     * In the forward layout with M ≤ DEVICE_DECODE_ROWS a row of C has the same bits whatever M is,
     * so that what a prompt decodes to does not depend on the batch it is in. */
    void (*matmul)(struct device *d, int ta, int tb, int m, int n, int k, float alpha,
        const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);

    /* -- bf16: operands that were rounded, sums in float32 -------------------------------------
     * 1: the device multiplies bf16 in hardware; 0: it imitates that, slower than float32. */
    int (*bf16_native)(struct device *d);
    /* out = in, to the nearest, ties to even; NaN stays NaN */
    void (*to_bf16)(struct device *d, bf16 *out, const float *in, size_t n);
    /* C (M, N) = alpha · op(A) op(B), += where accumulate; layouts as matmul. What the library
     * needs for a layout, alpha and accumulate is made at the first call with them. */
    void (*matmul_bf16)(struct device *d, int ta, int tb, int m, int n, int k, float alpha,
        const bf16 *a, int lda, const bf16 *b, int ldb, int accumulate, float *c, int ldc);

    /* -- embedding ------------------------------------------------------------------------ */
    /* out (N, D) = table[tokens] */
    void (*embed_fwd)(struct device *d, float *out, const int32_t *tokens, const float *table,
        int n, int dim, int vocab);
    /* dtable (V, D) += scatter of dout (N, D); no float atomics */
    void (*embed_bwd)(struct device *d, float *dtable, const int32_t *tokens, const float *dout,
        int n, int dim, int vocab);

    /* -- RMSNorm: out = x / sqrt(mean(x²) + eps) · w; w may be NULL (weightless) ------------ */
    /* out (N, D), rstd (N) */
    void (*rmsnorm_fwd)(struct device *d, float *out, float *rstd, const float *x, const float *w,
        int n, int dim, float eps);
    /* dx (N, D) = or += (accumulate != 0); dw (D) += (NULL when w is NULL).
     * work: rmsnorm_bwd_work floats. dx may be dout (accumulate 0). */
    void (*rmsnorm_bwd)(struct device *d, float *dx, int accumulate, float *dw, const float *dout,
        const float *x, const float *w, const float *rstd, int n, int dim, float *work);
    size_t (*rmsnorm_bwd_work)(struct device *d, int n, int dim);

    /* -- rotary embedding, half-split as Llama, in place on x (N, heads, head_dim); row i turns by
     * positions[i]. inverse != 0 turns back, which is the backward. cos/sin tables (max_pos, hd/2)
     * come from rope_table() and are on the device. */
    void (*rope)(struct device *d, float *x, const int32_t *positions, const float *cos_table,
        const float *sin_table, int n, int heads, int head_dim, int inverse);

    /* -- attention: causal, query (b, t) sees keys first[b, t] … t of its row (a document mask, or
     * a window, is a choice of `first`); first is non-decreasing in t. Scale 1/sqrt(head_dim).
     * Never T×T in memory.
     * q, out (B·T, heads, hd); k, v (B·T, kv_heads, hd); lse (B, heads, T): log-sum-exp of scores
     */
    void (*attn_fwd)(struct device *d, float *out, float *lse, const float *q, const float *k,
        const float *v, const int32_t *first, const struct attn_shape *s);
    /* dq = ; dk =, dv = ; work: attn_bwd_work floats */
    void (*attn_bwd)(struct device *d, float *dq, float *dk, float *dv, const float *dout,
        const float *out, const float *lse, const float *q, const float *k, const float *v,
        const int32_t *first, const struct attn_shape *s, float *work);
    size_t (*attn_bwd_work)(struct device *d, const struct attn_shape *s);

    /* Attention of some queries of the batch: q, out (r->n, heads, hd) are compacted, k, v
     * (B·T, kv_heads, hd) are whole; query i sees keys first[i] … t of its batch row. lse (heads,
     * n). Work in proportion to the keys that are seen. */
    void (*attn_rows_fwd)(struct device *d, float *out, float *lse, const float *q, const float *k,
        const float *v, const struct attn_rows *r, const struct attn_shape *s);
    /* dq (r->n rows) = ; dk =, dv = of all B·T keys; work: attn_rows_bwd_work floats */
    void (*attn_rows_bwd)(struct device *d, float *dq, float *dk, float *dv, const float *dout,
        const float *out, const float *lse, const float *q, const float *k, const float *v,
        const struct attn_rows *r, const struct attn_shape *s, float *work);
    size_t (*attn_rows_bwd_work)(struct device *d, const struct attn_shape *s);

    /* Attention of new tokens against a key/value cache.
     * n query rows; row i belongs to cache slot slot[i] at position pos[i] and sees cached keys
     * first[i] … pos[i] of that slot. cache_k, cache_v (slots, capacity, kv_heads, hd).
     * s: heads, kv_heads, head_dim used; seq = capacity. */
    void (*attn_cached)(struct device *d, float *out, const float *q, const float *cache_k,
        const float *cache_v, const int32_t *slot, const int32_t *pos, const int32_t *first, int n,
        const struct attn_shape *s);
    /* Writes row i of k and v (n, kv_heads, hd) to slot[i], pos[i] of the caches. */
    void (*cache_put)(struct device *d, float *cache_k, float *cache_v, const float *k,
        const float *v, const int32_t *slot, const int32_t *pos, int n, const struct attn_shape *s);

    /* -- SwiGLU on gate and up (n elements each): out = silu(gate) · up ----------------------- */
    void (*swiglu_fwd)(struct device *d, float *out, const float *gate, const float *up, size_t n);
    /* dgate =, dup = ; dout may be dgate or dup */
    void (*swiglu_bwd)(struct device *d, float *dgate, float *dup, const float *dout,
        const float *gate, const float *up, size_t n);
    /* The same of rounded gate and up, computed in float32. */
    void (*swiglu_fwd_bf16)(
        struct device *d, bf16 *out, const bf16 *gate, const bf16 *up, size_t n);
    void (*swiglu_bwd_bf16)(struct device *d, float *dgate, float *dup, const float *dout,
        const bf16 *gate, const bf16 *up, size_t n);

    /* -- the feedback (paper's fusion) ------------------------------------------------------- */
    /* carried (B·T, D): row (b, t) = h[b, t−1] + noise[b, t−1]; row (b, 0) = 0.
     * noise (B·T, D) may be NULL; then, where jitter > 0, noise[b, t, i] = jitter · (2u − 1) with
     * u = rng_unitf(noise_keys[b], t·D + i) (noise_keys: host memory, B keys). */
    void (*carry_fwd)(struct device *d, float *carried, const float *h, const float *noise,
        float jitter, const uint64_t *noise_keys, int batch, int seq, int dim);
    /* dh[b, t] += dcarried[b, t+1] */
    void (*carry_bwd)(
        struct device *d, float *dh, const float *dcarried, int batch, int seq, int dim);
    /* The same for some rows of the batch: carried (n, D): row i is that of token rows[i], which
     * must not be the first of its batch row. h, noise as above. */
    void (*carry_rows_fwd)(struct device *d, float *carried, const float *h, const float *noise,
        float jitter, const uint64_t *noise_keys, const int32_t *rows, int n, int seq, int dim);
    /* dh (B·T, D) row rows[i] − 1 += dcarried (n, D) row i */
    void (*carry_rows_bwd)(
        struct device *d, float *dh, const float *dcarried, const int32_t *rows, int n, int dim);
    /* out = u ⊙ σ(g), n elements */
    void (*gate_fwd)(struct device *d, float *out, const float *u, const float *g, size_t n);
    /* du =, dg = ; dout may be du or dg */
    void (*gate_bwd)(struct device *d, float *du, float *dg, const float *dout, const float *u,
        const float *g, size_t n);
    /* out (N, D): row i = mask[i] ? a[i] : b[i]; out may be a or b */
    void (*select_rows)(struct device *d, float *out, const uint8_t *mask, const float *a,
        const float *b, int n, int dim);
    /* da row i = mask[i] ? dout[i] : 0; db row i += mask[i] ? 0 : dout[i]; da may be dout */
    void (*select_rows_bwd)(struct device *d, float *da, float *db, const float *dout,
        const uint8_t *mask, int n, int dim);

    /* -- compacted rows: rows[i], i < n, are different rows of the whole
     * --------------------------- */
    /* out (n rows) row i = in row rows[i]; elements of any kind, row_bytes a row */
    void (*gather_rows)(
        struct device *d, void *out, const void *in, const int32_t *rows, int n, size_t row_bytes);
    /* out row rows[i] = in (n rows) row i; the others stay */
    void (*scatter_rows)(
        struct device *d, void *out, const void *in, const int32_t *rows, int n, size_t row_bytes);
    /* out row rows[i] += in (n, D) row i */
    void (*scatter_add_rows)(
        struct device *d, float *out, const float *in, const int32_t *rows, int n, int dim);

    /* -- cross-entropy on a chunk of logits (n, V); targets −1 are not counted ----------------- */
    /* losses[i] = −log softmax(logits[i])[target] (0 where not counted). Where dscale != 0 the
     * logits are replaced by dscale · weights[i] · the gradient of losses[i] + z_loss · lse², lse
     * the log-sum-exp of the row: (1 + 2 z_loss lse) softmax − onehot; 0 rows where not counted.
     * The losses are those without z_loss. weights (n) may be NULL: all 1. */
    void (*xent)(struct device *d, float *losses, float *logits, const int32_t *targets,
        const float *weights, int n, int vocab, float dscale, float z_loss);

    /* -- vectors ------------------------------------------------------------------------------ */
    /* y += alpha·x */
    void (*add)(struct device *d, float *y, const float *x, float alpha, size_t n);
    void (*scale)(struct device *d, float *y, float alpha, size_t n);
    /* Σ x² and Σ x in double, fixed order; host results; synchronises */
    double (*sum_sq)(struct device *d, const float *x, size_t n);
    double (*sum)(struct device *d, const float *x, size_t n);

    /* -- optimizer: decoupled AdamW (Loshchilov & Hutter) on n elements, in place ------------ */
    void (*adamw)(struct device *d, float *w, float *m, float *v, const float *g, size_t n,
        const struct adamw_args *a);
    /* NorMuon's second moment, one a row (neuron): v (rows) = beta2 v + (1 − beta2) mean of x²;
     * each row of x is divided by √v, then all of x (rows, columns) scaled to the norm it had.
     * work: rows floats */
    void (*normuon)(
        struct device *d, float *x, float *v, int rows, int columns, float beta2, float *work);
};

/* A device object embeds this first. */
struct device {
    const struct device_ops *ops;
    int threads; /* what it runs with; part of what makes a run repeat bit for bit */
    void *own;   /* what its operations keep, NULL until they do */
};

/* The CPU device; threads ≤ 0 means one for each core the process may use. */
int device_cpu_new(int threads, struct device **out, struct err *e);
void device_free(struct device **d);

/* Fills host tables (max_pos, head_dim/2), angles computed in double. */
void rope_table(float *cos_table, float *sin_table, int max_pos, int head_dim, double theta);

#endif
