#include "kernels/cpu/cpu.h"

/* A sum is made of at most this many parts, added in order. */
#define MAX_PARTS 256

void cpu_add(struct device *d, float *y, const float *x, float alpha, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++)
        y[i] += alpha * x[i];
}

void cpu_scale(struct device *d, float *y, float alpha, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++)
        y[i] *= alpha;
}

static double part_sum_sq(const float *x, size_t n)
{
    double s = 0.0;
#pragma omp simd reduction(+ : s)
    for (size_t i = 0; i < n; i++)
        s += (double)x[i] * (double)x[i];
    return s;
}

static double part_sum(const float *x, size_t n)
{
    double s = 0.0;
#pragma omp simd reduction(+ : s)
    for (size_t i = 0; i < n; i++)
        s += (double)x[i];
    return s;
}

static double sum_parts(
    struct device *d, double (*part)(const float *, size_t), const float *x, size_t n)
{
    double sums[MAX_PARTS];
    size_t each = n / MAX_PARTS + 1;
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t p = 0; p < MAX_PARTS; p++) {
        size_t at = p * each < n ? p * each : n;
        size_t len = n - at < each ? n - at : each;
        sums[p] = part(x + at, len);
    }
    double total = 0.0;
    for (int p = 0; p < MAX_PARTS; p++)
        total += sums[p];
    return total;
}

double cpu_sum_sq(struct device *d, const float *x, size_t n)
{
    return sum_parts(d, part_sum_sq, x, n);
}

double cpu_sum(struct device *d, const float *x, size_t n)
{
    return sum_parts(d, part_sum, x, n);
}
