#include <math.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"

void rope_table(float *cos_table, float *sin_table, int max_pos, int head_dim, double theta)
{
    int half = head_dim / 2;
    for (int p = 0; p < max_pos; p++) {
        for (int i = 0; i < half; i++) {
            double angle = p * pow(theta, -2.0 * i / head_dim);
            cos_table[(size_t)p * (size_t)half + (size_t)i] = (float)cos(angle);
            sin_table[(size_t)p * (size_t)half + (size_t)i] = (float)sin(angle);
        }
    }
}

/* Element i of the first half and element i of the second turn together by angle i. */
static void turn(float *restrict lo, float *restrict hi, const float *restrict cs,
    const float *restrict sn, float sign, int half)
{
#pragma omp simd
    for (int i = 0; i < half; i++) {
        float a = lo[i], b = hi[i], s = sign * sn[i];
        lo[i] = a * cs[i] - b * s;
        hi[i] = b * cs[i] + a * s;
    }
}

void cpu_rope(struct device *d, float *x, const int32_t *positions, const float *cos_table,
    const float *sin_table, int n, int heads, int head_dim, int inverse)
{
    CHECK(head_dim % 2 == 0);
    size_t half = (size_t)head_dim / 2, width = (size_t)heads * (size_t)head_dim;
    float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for num_threads(d->threads) schedule(static) if ((size_t)n * width > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        const float *cs = cos_table + (size_t)positions[i] * half;
        const float *sn = sin_table + (size_t)positions[i] * half;
        for (int h = 0; h < heads; h++) {
            float *row = x + (size_t)i * width + (size_t)h * (size_t)head_dim;
            turn(row, row + half, cs, sn, sign, (int)half);
        }
    }
}
