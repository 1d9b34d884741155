#include "kernels/muon.h"

#include <math.h>

#define ALIGN_FLOATS 16

static const float coef_a = 3.4445f, coef_b = -4.7750f, coef_c = 2.0315f;

static size_t aligned(size_t floats)
{
    return (floats + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

static int smaller(int rows, int columns)
{
    return rows < columns ? rows : columns;
}

size_t muon_work_floats(int rows, int columns)
{
    size_t side = (size_t)smaller(rows, columns);
    return aligned((size_t)rows * (size_t)columns) + 2 * aligned(side * side);
}

double muon_flops(int rows, int columns)
{
    double s = smaller(rows, columns), l = (double)rows + columns - s;
    return MUON_STEPS * (4 * s * s * l + 2 * s * s * s);
}

void muon_orthogonalize(struct device *d, float *x, int rows, int columns, float *work)
{
    const struct device_ops *o = d->ops;
    int wide = rows <= columns, side = smaller(rows, columns), longer = rows + columns - side;
    size_t n = (size_t)rows * (size_t)columns, square = (size_t)side * (size_t)side;
    float *was = work, *a = was + aligned(n), *b = a + aligned(square);
    o->scale(d, x, (float)(1 / (sqrt(o->sum_sq(d, x, n)) + 1e-7)), n);
    for (int i = 0; i < MUON_STEPS; i++) {
        o->matmul(d, !wide, wide, side, side, longer, 1, x, columns, x, columns, 0, a, side);
        o->copy(d, b, a, square * sizeof *b);
        o->matmul(d, 0, 0, side, side, side, coef_c, a, side, a, side, coef_b, b, side);
        o->copy(d, was, x, n * sizeof *x);
        if (wide)
            o->matmul(d, 0, 0, rows, columns, side, 1, b, side, was, columns, coef_a, x, columns);
        else
            o->matmul(d, 0, 0, rows, columns, side, 1, was, columns, b, side, coef_a, x, columns);
    }
}
