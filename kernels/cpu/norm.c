#include <math.h>
#include <string.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"

/* Rows are summed for dw in at most this many ranges, whose sums are then added in order. */
#define MAX_PARTS 64

static int parts_of(int n)
{
    return n < MAX_PARTS ? n : MAX_PARTS;
}

void cpu_rmsnorm_fwd(struct device *d, float *out, float *rstd, const float *x, const float *w,
    int n, int dim, float eps)
{
#pragma omp parallel for num_threads(d->threads)                                                   \
    schedule(static) if ((size_t)n * (size_t)dim > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        const float *xi = x + (size_t)i * (size_t)dim;
        float *oi = out + (size_t)i * (size_t)dim;
        float ss = 0.0f;
#pragma omp simd reduction(+ : ss)
        for (int c = 0; c < dim; c++)
            ss += xi[c] * xi[c];
        float r = 1.0f / sqrtf(ss / (float)dim + eps);
        rstd[i] = r;
        if (w) {
#pragma omp simd
            for (int c = 0; c < dim; c++)
                oi[c] = xi[c] * r * w[c];
        } else {
#pragma omp simd
            for (int c = 0; c < dim; c++)
                oi[c] = xi[c] * r;
        }
    }
}

size_t cpu_rmsnorm_bwd_work(struct device *d, int n, int dim)
{
    (void)d;
    return (size_t)parts_of(n) * (size_t)dim;
}

/*
 * One row. With x̂ = x·rstd and g = dout·w:  dx = rstd · (g − x̂ · mean(g·x̂)),  dw += dout·x̂.
 * dx may be dout: each element is read before it is written, and dw is taken first.
 */
static void row_bwd(float *dx, int accumulate, float *dw, const float *dout, const float *x,
    const float *w, float rstd, int dim)
{
    float dot = 0.0f;
    if (w) {
#pragma omp simd reduction(+ : dot)
        for (int c = 0; c < dim; c++)
            dot += dout[c] * w[c] * x[c];
#pragma omp simd
        for (int c = 0; c < dim; c++)
            dw[c] += dout[c] * (x[c] * rstd);
    } else {
#pragma omp simd reduction(+ : dot)
        for (int c = 0; c < dim; c++)
            dot += dout[c] * x[c];
    }
    float back = dot * rstd * rstd * rstd / (float)dim;
    if (accumulate) {
#pragma omp simd
        for (int c = 0; c < dim; c++)
            dx[c] += dout[c] * (w ? w[c] : 1.0f) * rstd - x[c] * back;
    } else {
#pragma omp simd
        for (int c = 0; c < dim; c++)
            dx[c] = dout[c] * (w ? w[c] : 1.0f) * rstd - x[c] * back;
    }
}

void cpu_rmsnorm_bwd(struct device *d, float *dx, int accumulate, float *dw, const float *dout,
    const float *x, const float *w, const float *rstd, int n, int dim, float *work)
{
    CHECK(!w == !dw);
    CHECK(!(accumulate && dx == dout));
    int parts = parts_of(n);
    size_t width = (size_t)dim;
#pragma omp parallel for num_threads(d->threads) schedule(static) if ((size_t)n * width > CPU_SMALL)
    for (int p = 0; p < parts; p++) {
        float *part_dw = w ? work + (size_t)p * width : NULL;
        if (w)
            memset(part_dw, 0, width * sizeof(float));
        int end = (int)((int64_t)n * (p + 1) / parts);
        for (int i = (int)((int64_t)n * p / parts); i < end; i++) {
            size_t at = (size_t)i * width;
            row_bwd(dx + at, accumulate, part_dw, dout + at, x + at, w, rstd[i], dim);
        }
    }
    for (int p = 0; w && p < parts; p++) {
        const float *part_dw = work + (size_t)p * width;
#pragma omp simd
        for (int c = 0; c < dim; c++)
            dw[c] += part_dw[c];
    }
}
