#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fast_math.h"

void cpu_swiglu_fwd(struct device *d, float *out, const float *gate, const float *up, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++)
        out[i] = gate[i] * fast_sigmoid(gate[i]) * up[i];
}

/* d silu(g)/dg = σ(g) · (1 + g · (1 − σ(g))) */
void cpu_swiglu_bwd(struct device *d, float *dgate, float *dup, const float *dout,
    const float *gate, const float *up, size_t n)
{
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t i = 0; i < n; i++) {
        float g = gate[i], u = up[i], dy = dout[i], s = fast_sigmoid(g);
        dgate[i] = dy * u * s * (1.0f + g * (1.0f - s));
        dup[i] = dy * g * s;
    }
}
