#include <string.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"

void cpu_embed_fwd(struct device *d, float *out, const int32_t *tokens, const float *table, int n,
    int dim, int vocab)
{
    size_t w = (size_t)dim;
#pragma omp parallel for num_threads(d->threads) schedule(static) if ((size_t)n * w > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        CHECK(tokens[i] >= 0 && tokens[i] < vocab);
        memcpy(out + (size_t)i * w, table + (size_t)tokens[i] * w, w * sizeof(float));
    }
}

/* A token may occur many times, so rows cannot be shared out: each thread takes some of the
 * columns, a cache line wide, and goes through all tokens in order. */
void cpu_embed_bwd(struct device *d, float *dtable, const int32_t *tokens, const float *dout, int n,
    int dim, int vocab)
{
    enum { LINE = 16 };
    int lines = (dim + LINE - 1) / LINE;
    for (int i = 0; i < n; i++)
        CHECK(tokens[i] >= 0 && tokens[i] < vocab);
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int part = 0; part < d->threads; part++) {
        int c0 = lines * part / d->threads * LINE;
        int c1 = lines * (part + 1) / d->threads * LINE;
        if (c1 > dim)
            c1 = dim;
        for (int i = 0; i < n; i++) {
            float *row = dtable + (size_t)tokens[i] * (size_t)dim;
            const float *g = dout + (size_t)i * (size_t)dim;
#pragma omp simd
            for (int c = c0; c < c1; c++)
                row[c] += g[c];
        }
    }
}
