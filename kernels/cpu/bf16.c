/* What rounds to bfloat16 and what reads it. */
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fast_math.h"

static inline float widened(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* To the nearest, ties to even; a NaN stays one. */
static inline bf16 rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : nearest);
}

void cpu_to_bf16(struct device *d, bf16 *out, const float *in, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++)
        out[i] = rounded(in[i]);
}

void cpu_swiglu_fwd_bf16(struct device *d, bf16 *out, const bf16 *gate, const bf16 *up, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++) {
        float g = widened(gate[i]);
        out[i] = rounded(g * fast_sigmoid(g) * widened(up[i]));
    }
}

void cpu_swiglu_bwd_bf16(struct device *d, float *dgate, float *dup, const float *dout,
    const bf16 *gate, const bf16 *up, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++) {
        float g = widened(gate[i]), u = widened(up[i]), dy = dout[i], s = fast_sigmoid(g);
        dgate[i] = dy * u * s * (1.0f + g * (1.0f - s));
        dup[i] = dy * g * s;
    }
}

/* One row of C: the sum over k in its order, element by element. */
static void plain_row(const struct bf16_product *p, int i)
{
    float *c = p->c + (size_t)i * (size_t)p->ldc;
    for (int j = 0; j < p->n; j++) {
        float sum = 0;
        for (int x = 0; x < p->k; x++) {
            size_t row = (size_t)(p->ta ? x : i), column = (size_t)(p->ta ? i : x);
            size_t from = (size_t)(p->tb ? j : x), at = (size_t)(p->tb ? x : j);
            sum += widened(p->a[row * (size_t)p->lda + column]) *
                   widened(p->b[from * (size_t)p->ldb + at]);
        }
        c[j] = p->alpha * sum + (p->accumulate ? c[j] : 0);
    }
}

void cpu_matmul_bf16_plain(struct device *d, const struct bf16_product *p)
{
    (void)d; /* not used in a build without OpenMP */
#pragma omp parallel for num_threads(d->threads) schedule(static)
    for (int i = 0; i < p->m; i++)
        plain_row(p, i);
}
