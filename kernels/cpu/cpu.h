/*
 * What the files of the CPU device share: the operations that device.c puts into the table, and how
 * they use threads.
 *
 * Threads: an operation splits its work into parts whose number and borders depend on the shapes
 * only. Each part writes its own outputs, and partial sums are added in the order of the parts, so
 * that which thread runs a part changes nothing: every operation gives the same bits at any number
 * of threads, except those that call oneDNN's sgemm, which gives the same bits at the same number.
 */
#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include "kernels/device.h"

/*
 * Below this much work the calling thread does it alone: waking a team of sleeping threads takes
 * about as long, 30 to 50 µs on a busy machine. Elements of element-wise operations, and
 * multiply-adds of products.
 */
#define CPU_SMALL      32768
#define CPU_SMALL_MADS (1 << 20)

/*
 * Compiles a function twice, for AVX-512 and for the build's own target, and lets the loader
 * choose. Not through OpenMP: what a parallel region calls, not what holds the region. The address
 * sanitizer starts after the choice is made, so there it stays with one.
 */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define CPU_CLONES
#endif

/* How many threads a product of that many multiply-adds should have. */
int cpu_team(const struct device *d, int64_t multiply_adds);

/* oneDNN takes the number of threads from the calling thread's state: sets it. */
void cpu_use_threads(int threads);

/* C (m, n) = alpha · op(A) op(B) + beta · C on the calling thread's team; alone inside a parallel
 * region. */
void cpu_gemm(int ta, int tb, int m, int n, int k, float alpha, const float *a, size_t lda,
    const float *b, size_t ldb, float beta, float *c, size_t ldc);

/* C (m, n) = alpha · X Wᵀ + beta · C where a row of C has the same bits whatever m is. */
void cpu_matmul_rows(int m, int n, int k, float alpha, const float *x, size_t ldx, const float *w,
    size_t ldw, float beta, float *c, size_t ldc);

void cpu_matmul(struct device *d, int ta, int tb, int m, int n, int k, float alpha, const float *a,
    int lda, const float *b, int ldb, float beta, float *c, int ldc);

/* A product of bf16, as matmul_bf16's arguments. */
struct bf16_product {
    int ta, tb, m, n, k;
    float alpha;
    const bf16 *a;
    int lda;
    const bf16 *b;
    int ldb, accumulate;
    float *c;
    int ldc;
};
/* By loops, for processors that oneDNN has no bf16 product for. */
void cpu_matmul_bf16_plain(struct device *d, const struct bf16_product *p);
void cpu_matmul_bf16(struct device *d, int ta, int tb, int m, int n, int k, float alpha,
    const bf16 *a, int lda, const bf16 *b, int ldb, int accumulate, float *c, int ldc);
int cpu_bf16_native(struct device *d);
/* What a device keeps for bf16 products; it starts oneDNN at the first of them. */
struct cpu_bf16;
struct cpu_bf16 *cpu_bf16_new(void);
void cpu_bf16_release(struct device *d);
void cpu_to_bf16(struct device *d, bf16 *out, const float *in, size_t n);
void cpu_swiglu_fwd_bf16(struct device *d, bf16 *out, const bf16 *gate, const bf16 *up, size_t n);
void cpu_swiglu_bwd_bf16(struct device *d, float *dgate, float *dup, const float *dout,
    const bf16 *gate, const bf16 *up, size_t n);

void cpu_embed_fwd(struct device *d, float *out, const int32_t *tokens, const float *table, int n,
    int dim, int vocab);
void cpu_embed_bwd(struct device *d, float *dtable, const int32_t *tokens, const float *dout, int n,
    int dim, int vocab);
void cpu_rmsnorm_fwd(struct device *d, float *out, float *rstd, const float *x, const float *w,
    int n, int dim, float eps);
void cpu_rmsnorm_bwd(struct device *d, float *dx, int accumulate, float *dw, const float *dout,
    const float *x, const float *w, const float *rstd, int n, int dim, float *work);
size_t cpu_rmsnorm_bwd_work(struct device *d, int n, int dim);
void cpu_rope(struct device *d, float *x, const int32_t *positions, const float *cos_table,
    const float *sin_table, int n, int heads, int head_dim, int inverse);
void cpu_attn_fwd(struct device *d, float *out, float *lse, const float *q, const float *k,
    const float *v, const int32_t *first, const struct attn_shape *s);
void cpu_attn_bwd(struct device *d, float *dq, float *dk, float *dv, const float *dout,
    const float *out, const float *lse, const float *q, const float *k, const float *v,
    const int32_t *first, const struct attn_shape *s, float *work);
size_t cpu_attn_bwd_work(struct device *d, const struct attn_shape *s);
void cpu_attn_rows_fwd(struct device *d, float *out, float *lse, const float *q, const float *k,
    const float *v, const struct attn_rows *r, const struct attn_shape *s);
void cpu_attn_rows_bwd(struct device *d, float *dq, float *dk, float *dv, const float *dout,
    const float *out, const float *lse, const float *q, const float *k, const float *v,
    const struct attn_rows *r, const struct attn_shape *s, float *work);
size_t cpu_attn_rows_bwd_work(struct device *d, const struct attn_shape *s);
void cpu_attn_cached(struct device *d, float *out, const float *q, const float *cache_k,
    const float *cache_v, const int32_t *slot, const int32_t *pos, const int32_t *first, int n,
    const struct attn_shape *s);
void cpu_cache_put(struct device *d, float *cache_k, float *cache_v, const float *k, const float *v,
    const int32_t *slot, const int32_t *pos, int n, const struct attn_shape *s);
void cpu_swiglu_fwd(struct device *d, float *out, const float *gate, const float *up, size_t n);
void cpu_swiglu_bwd(struct device *d, float *dgate, float *dup, const float *dout,
    const float *gate, const float *up, size_t n);
void cpu_carry_fwd(struct device *d, float *carried, const float *h, const float *noise,
    float jitter, const uint64_t *noise_keys, int batch, int seq, int dim);
void cpu_carry_bwd(struct device *d, float *dh, const float *dcarried, int batch, int seq, int dim);
void cpu_carry_rows_fwd(struct device *d, float *carried, const float *h, const float *noise,
    float jitter, const uint64_t *noise_keys, const int32_t *rows, int n, int seq, int dim);
void cpu_carry_rows_bwd(
    struct device *d, float *dh, const float *dcarried, const int32_t *rows, int n, int dim);
void cpu_gate_fwd(struct device *d, float *out, const float *u, const float *g, size_t n);
void cpu_gate_bwd(struct device *d, float *du, float *dg, const float *dout, const float *u,
    const float *g, size_t n);
void cpu_select_rows(struct device *d, float *out, const uint8_t *mask, const float *a,
    const float *b, int n, int dim);
void cpu_select_rows_bwd(
    struct device *d, float *da, float *db, const float *dout, const uint8_t *mask, int n, int dim);
void cpu_gather_rows(
    struct device *d, void *out, const void *in, const int32_t *rows, int n, size_t row_bytes);
void cpu_scatter_rows(
    struct device *d, void *out, const void *in, const int32_t *rows, int n, size_t row_bytes);
void cpu_scatter_add_rows(
    struct device *d, float *out, const float *in, const int32_t *rows, int n, int dim);
void cpu_xent(struct device *d, float *losses, float *logits, const int32_t *targets,
    const float *weights, int n, int vocab, float dscale, float z_loss);
void cpu_add(struct device *d, float *y, const float *x, float alpha, size_t n);
void cpu_scale(struct device *d, float *y, float alpha, size_t n);
double cpu_sum_sq(struct device *d, const float *x, size_t n);
double cpu_sum(struct device *d, const float *x, size_t n);
void cpu_adamw(struct device *d, float *w, float *m, float *v, const float *g, size_t n,
    const struct adamw_args *a);
void cpu_normuon(
    struct device *d, float *x, float *v, int rows, int columns, float beta2, float *work);

#endif
