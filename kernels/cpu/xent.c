#include <math.h>
#include <string.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fast_math.h"

/* Exponentials are added in float within a stretch of this length, the stretches in double. */
#define STRETCH 1024

static inline __attribute__((always_inline)) float row_max(const float *x, int n)
{
    float m = -INFINITY;
#pragma omp simd reduction(max : m)
    for (int j = 0; j < n; j++)
        m = x[j] > m ? x[j] : m;
    return m;
}

/* Σ exp(x − m); where keep, x becomes exp(x − m). */
static inline __attribute__((always_inline)) double exp_sum(float *x, int n, float m, int keep)
{
    double total = 0.0;
    for (int j0 = 0; j0 < n; j0 += STRETCH) {
        int j1 = n - j0 < STRETCH ? n : j0 + STRETCH;
        float s = 0.0f;
        if (keep) {
#pragma omp simd reduction(+ : s)
            for (int j = j0; j < j1; j++) {
                float p = fast_expf(x[j] - m);
                x[j] = p;
                s += p;
            }
        } else {
#pragma omp simd reduction(+ : s)
            for (int j = j0; j < j1; j++)
                s += fast_expf(x[j] - m);
        }
        total += (double)s;
    }
    return total;
}

/* Where keep, x becomes dscale · ((1 + 2 z_loss lse) softmax − onehot). */
CPU_CLONES static float xent_row(
    float *x, int target, int vocab, int keep, float dscale, float z_loss)
{
    float m = row_max(x, vocab), at_target = x[target];
    double sum = exp_sum(x, vocab, m, keep);
    double lse = log(sum) + (double)m;
    if (keep) {
        float f = (float)((double)dscale * (1.0 + 2.0 * (double)z_loss * lse) / sum);
#pragma omp simd
        for (int j = 0; j < vocab; j++)
            x[j] *= f;
        x[target] -= dscale;
    }
    return (float)(lse - (double)at_target);
}

void cpu_xent(struct device *d, float *losses, float *logits, const int32_t *targets,
    const float *weights, int n, int vocab, float dscale, float z_loss)
{
    size_t width = (size_t)vocab;
#pragma omp parallel for num_threads(d->threads) schedule(static) if ((size_t)n * width > CPU_SMALL)
    for (int i = 0; i < n; i++) {
        float *row = logits + (size_t)i * width;
        CHECK(targets[i] >= -1 && targets[i] < vocab);
        if (targets[i] >= 0) {
            float w = weights ? dscale * weights[i] : dscale;
            losses[i] = xent_row(row, targets[i], vocab, dscale != 0.0f, w, z_loss);
        } else {
            losses[i] = 0.0f;
            if (dscale != 0.0f)
                memset(row, 0, width * sizeof(float));
        }
    }
}
