#include <math.h>

#include "kernels/cpu/cpu.h"

#define EPS 1e-10f

static float row_sum_sq(const float *x, int n)
{
    float s = 0.0f;
#pragma omp simd reduction(+ : s)
    for (int c = 0; c < n; c++)
        s += x[c] * x[c];
    return s;
}

void cpu_normuon(
    struct device *d, float *x, float *v, int rows, int columns, float beta2, float *work)
{
    size_t width = (size_t)columns, n = (size_t)rows * width;
    double before = 0.0, after = 0.0;
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (int i = 0; i < rows; i++) {
        work[i] = row_sum_sq(x + (size_t)i * width, columns);
        v[i] = beta2 * v[i] + (1.0f - beta2) * (work[i] / (float)columns);
    }
    for (int i = 0; i < rows; i++) {
        double f = 1.0 / ((double)sqrtf(v[i]) + (double)EPS);
        before += (double)work[i];
        after += (double)work[i] * f * f;
    }
    float keep = after > 0.0 ? (float)sqrt(before / after) : 1.0f;
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (int i = 0; i < rows; i++) {
        float f = keep / (sqrtf(v[i]) + EPS), *row = x + (size_t)i * width;
#pragma omp simd
        for (int c = 0; c < columns; c++)
            row[c] *= f;
    }
}
