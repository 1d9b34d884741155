/* The feedback's own operations: the carried state, its gate, and which rows are fused. */
#include <string.h>

#include "common/check.h"
#include "common/rng.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fast_math.h"

/* How the carried state is disturbed: by given noise, by drawn noise, or (both off) not at all. */
struct noise {
    const float *given; /* (B·T, D) */
    float jitter;
    const uint64_t *keys; /* (B) */
    int seq, dim;
};

static struct noise noise_of(
    const float *given, float jitter, const uint64_t *keys, int seq, int dim)
{
    CHECK(given || !(jitter > 0.0f) || keys);
    return (struct noise){given, given ? 0.0f : jitter, keys, seq, dim};
}

/* out (D) = the state of batch row `from` and its noise */
static void carry_row(float *out, const float *h, const struct noise *x, int from)
{
    size_t dim = (size_t)x->dim, at = (size_t)from * dim;
    memcpy(out, h + at, dim * sizeof(float));
    if (x->jitter > 0.0f) {
        uint64_t key = x->keys[from / x->seq], counter = (uint64_t)(from % x->seq) * (uint64_t)dim;
        for (size_t c = 0; c < dim; c++)
            out[c] += x->jitter * (2.0f * rng_unitf(key, counter + (uint64_t)c) - 1.0f);
    } else if (x->given) {
#pragma omp simd
        for (size_t c = 0; c < dim; c++)
            out[c] += x->given[at + c];
    }
}

void cpu_carry_fwd(struct device *d, float *carried, const float *h, const float *noise,
    float jitter, const uint64_t *noise_keys, int batch, int seq, int dim)
{
    int n = batch * seq;
    struct noise x = noise_of(noise, jitter, noise_keys, seq, dim);
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        float *out = carried + (size_t)i * (size_t)dim;
        if (i % seq == 0)
            memset(out, 0, (size_t)dim * sizeof(float));
        else
            carry_row(out, h, &x, i - 1);
    }
}

void cpu_carry_rows_fwd(struct device *d, float *carried, const float *h, const float *noise,
    float jitter, const uint64_t *noise_keys, const int32_t *rows, int n, int seq, int dim)
{
    struct noise x = noise_of(noise, jitter, noise_keys, seq, dim);
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        CHECK(rows[i] % seq != 0);
        carry_row(carried + (size_t)i * (size_t)dim, h, &x, rows[i] - 1);
    }
}

void cpu_carry_rows_bwd(
    struct device *d, float *dh, const float *dcarried, const int32_t *rows, int n, int dim)
{
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        float *to = dh + (size_t)(rows[i] - 1) * (size_t)dim;
        const float *g = dcarried + (size_t)i * (size_t)dim;
#pragma omp simd
        for (int c = 0; c < dim; c++)
            to[c] += g[c];
    }
}

void cpu_carry_bwd(struct device *d, float *dh, const float *dcarried, int batch, int seq, int dim)
{
    int n = batch * seq;
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        if (i % seq == seq - 1)
            continue;
        float *to = dh + (size_t)i * (size_t)dim;
        const float *g = dcarried + (size_t)(i + 1) * (size_t)dim;
#pragma omp simd
        for (int c = 0; c < dim; c++)
            to[c] += g[c];
    }
}

void cpu_gate_fwd(struct device *d, float *out, const float *u, const float *g, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++)
        out[i] = u[i] * fast_sigmoid(g[i]);
}

void cpu_gate_bwd(struct device *d, float *du, float *dg, const float *dout, const float *u,
    const float *g, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++) {
        float dy = dout[i], x = u[i], s = fast_sigmoid(g[i]);
        du[i] = dy * s;
        dg[i] = dy * x * s * (1.0f - s);
    }
}

void cpu_select_rows(struct device *d, float *out, const uint8_t *mask, const float *a,
    const float *b, int n, int dim)
{
    size_t width = (size_t)dim;
#pragma omp parallel for num_threads(d->threads) schedule(static) if ((size_t)n * width > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        const float *from = (mask[i] ? a : b) + (size_t)i * width;
        float *to = out + (size_t)i * width;
        if (to != from)
            memcpy(to, from, width * sizeof(float));
    }
}

void cpu_select_rows_bwd(
    struct device *d, float *da, float *db, const float *dout, const uint8_t *mask, int n, int dim)
{
    size_t width = (size_t)dim;
#pragma omp parallel for num_threads(d->threads) schedule(static) if ((size_t)n * width > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        size_t at = (size_t)i * width;
        if (!mask[i]) { /* db first: da may be dout */
#pragma omp simd
            for (size_t c = 0; c < width; c++)
                db[at + c] += dout[at + c];
            memset(da + at, 0, width * sizeof(float));
        } else if (da != dout) {
            memcpy(da + at, dout + at, width * sizeof(float));
        }
    }
}
