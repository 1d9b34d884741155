#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fast_math.h"

/* A thread takes so many elements at a time. */
#define STRETCH 4096

static size_t stretch_of(size_t at, size_t n)
{
    return n - at < STRETCH ? n - at : STRETCH;
}

CPU_CLONES static void forward(float *out, const float *gate, const float *up, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        out[i] = gate[i] * fast_sigmoid(gate[i]) * up[i];
}

void cpu_swiglu_fwd(struct device *d, float *out, const float *gate, const float *up, size_t n)
{
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t at = 0; at < n; at += STRETCH)
        forward(out + at, gate + at, up + at, stretch_of(at, n));
}

/* d silu(g)/dg = σ(g) · (1 + g · (1 − σ(g))); dout may be dgate or dup */
CPU_CLONES static void backward(
    float *dgate, float *dup, const float *dout, const float *gate, const float *up, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = gate[i], u = up[i], dy = dout[i], s = fast_sigmoid(g);
        dgate[i] = dy * u * s * (1.0f + g * (1.0f - s));
        dup[i] = dy * g * s;
    }
}

void cpu_swiglu_bwd(struct device *d, float *dgate, float *dup, const float *dout,
    const float *gate, const float *up, size_t n)
{
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n > CPU_SMALL)
    for (size_t at = 0; at < n; at += STRETCH)
        backward(dgate + at, dup + at, dout + at, gate + at, up + at, stretch_of(at, n));
}
