/* The feedback's own operations: the carried state, its gate, and which rows are fused. */
#include <string.h>

#include "common/check.h"
#include "common/rng.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fast_math.h"

void cpu_carry_fwd(struct device *d, float *carried, const float *h, const float *noise,
    float jitter, const uint64_t *noise_keys, int batch, int seq, int dim)
{
    int n = batch * seq;
    int draw = !noise && jitter > 0.0f;
    CHECK(!draw || noise_keys);
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        int b = i / seq, t = i % seq;
        float *out = carried + (size_t)i * (size_t)dim;
        if (t == 0) {
            memset(out, 0, (size_t)dim * sizeof(float));
            continue;
        }
        size_t from = (size_t)(i - 1) * (size_t)dim;
        memcpy(out, h + from, (size_t)dim * sizeof(float));
        if (draw) {
            uint64_t counter = (uint64_t)(t - 1) * (uint64_t)dim;
            for (int c = 0; c < dim; c++)
                out[c] += jitter * (2.0f * rng_unitf(noise_keys[b], counter + (uint64_t)c) - 1.0f);
        } else if (noise) {
#pragma omp simd
            for (int c = 0; c < dim; c++)
                out[c] += noise[from + (size_t)c];
        }
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
