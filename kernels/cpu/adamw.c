#include <math.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"

/* m and v: running means of g and g²; they start at 0, which the division by 1 − βᵗ undoes. */
void cpu_adamw(struct device *d, float *w, float *m, float *v, const float *g, size_t n,
    const struct adamw_args *a)
{
    CHECK(a->t >= 1);
    const float b1 = a->beta1, b2 = a->beta2, c1 = 1.0f - b1, c2 = 1.0f - b2;
    const float undo1 = (float)(1.0 / (1.0 - pow((double)b1, (double)a->t)));
    const float undo2 = (float)(1.0 / (1.0 - pow((double)b2, (double)a->t)));
    const float lr = a->lr, eps = a->eps, decay = a->weight_decay, gs = a->grad_scale;
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++) {
        float gi = g[i] * gs;
        float mi = b1 * m[i] + c1 * gi;
        float vi = b2 * v[i] + c2 * gi * gi;
        m[i] = mi;
        v[i] = vi;
        w[i] -= lr * (mi * undo1 / (sqrtf(vi * undo2) + eps) + decay * w[i]);
    }
}
