/* Compacted rows: gathered from the whole batch, put back, added back. */
#include <string.h>

#include "kernels/cpu/cpu.h"

void cpu_gather_rows(
    struct device *d, void *out, const void *in, const int32_t *rows, int n, size_t row_bytes)
{
    char *to = out;
    const char *from = in;
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * row_bytes > CPU_SMALL * sizeof(float))
    for (int i = 0; i < n; i++)
        memcpy(to + (size_t)i * row_bytes, from + (size_t)rows[i] * row_bytes, row_bytes);
}

void cpu_scatter_rows(
    struct device *d, void *out, const void *in, const int32_t *rows, int n, size_t row_bytes)
{
    char *to = out;
    const char *from = in;
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * row_bytes > CPU_SMALL * sizeof(float))
    for (int i = 0; i < n; i++)
        memcpy(to + (size_t)rows[i] * row_bytes, from + (size_t)i * row_bytes, row_bytes);
}

void cpu_scatter_add_rows(
    struct device *d, float *out, const float *in, const int32_t *rows, int n, int dim)
{
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        float *to = out + (size_t)rows[i] * (size_t)dim;
        const float *x = in + (size_t)i * (size_t)dim;
#pragma omp simd
        for (int c = 0; c < dim; c++)
            to[c] += x[c];
    }
}
