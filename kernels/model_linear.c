/* The products of linear layers, in float32 or of operands rounded to bf16. */
#include "kernels/model_internal.h"

void products_begin(const struct products *p, size_t count)
{
    if (p->weights)
        p->d->ops->to_bf16(p->d, p->weights, p->params, count);
}

struct operand operand(const struct products *p, bf16 *place, const float *x, int n, int width)
{
    if (!p->weights)
        return (struct operand){.f = x};
    p->d->ops->to_bf16(p->d, place, x, (size_t)n * (size_t)width);
    return (struct operand){.h = place};
}

static const bf16 *rounded_weight(const struct products *p, const float *w)
{
    return p->weights + (w - p->params);
}

void linear(const struct products *p, float *y, struct operand x, const float *w, int n, int out,
    int in, float alpha, int accumulate)
{
    const struct device_ops *o = p->d->ops;
    if (p->weights)
        o->matmul_bf16(
            p->d, 0, 1, n, out, in, alpha, x.h, in, rounded_weight(p, w), in, accumulate, y, out);
    else
        o->matmul(p->d, 0, 1, n, out, in, alpha, x.f, in, w, in, (float)accumulate, y, out);
}

void linear_dw(const struct products *p, float *dw, struct operand dy, struct operand x, int n,
    int out, int in, float alpha)
{
    const struct device_ops *o = p->d->ops;
    if (p->weights)
        o->matmul_bf16(p->d, 1, 0, out, in, n, alpha, dy.h, out, x.h, in, 1, dw, in);
    else
        o->matmul(p->d, 1, 0, out, in, n, alpha, dy.f, out, x.f, in, 1, dw, in);
}

void linear_dx(const struct products *p, float *dx, struct operand dy, const float *w, int n,
    int out, int in, float alpha, int accumulate)
{
    const struct device_ops *o = p->d->ops;
    if (p->weights)
        o->matmul_bf16(
            p->d, 0, 0, n, in, out, alpha, dy.h, out, rounded_weight(p, w), in, accumulate, dx, in);
    else
        o->matmul(p->d, 0, 0, n, in, out, alpha, dy.f, out, w, in, (float)accumulate, dx, in);
}
