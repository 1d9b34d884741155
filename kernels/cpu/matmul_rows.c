/*
 * y = x Wᵀ for the few rows of a decoding step. A library's sgemm picks its kernel by the number of
 * rows, and with it the order of summation: then a prompt's greedy tokens would depend on the batch
 * it is in. Here every element is the same eight-lane sum over k whatever rows stand beside it, and
 * weights are read once for ROW_TILE rows.
 */
#include "kernels/cpu/cpu.h"

typedef float lanes __attribute__((vector_size(32), aligned(4)));

enum { LANES = 8, ROW_TILE = 4, COL_TILE = 2 };

static inline float lane_sum(lanes v)
{
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* c[i][j] = alpha · x_i·w_j + beta · c[i][j] for i < rows, j < cols; rows and cols are constants at
 * every call. */
static inline __attribute__((always_inline)) void tile(int rows, int cols, int k, float alpha,
    const float *x, size_t ldx, const float *w, size_t ldw, float beta, float *c, size_t ldc)
{
    lanes sum[ROW_TILE][COL_TILE] = {{{0}}};
    float rest[ROW_TILE][COL_TILE] = {{0}};
    int at = 0;
    for (; at + LANES <= k; at += LANES)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++)
                sum[i][j] += *(const lanes *)(x + (size_t)i * ldx + at) *
                             *(const lanes *)(w + (size_t)j * ldw + at);
    for (; at < k; at++)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++)
                rest[i][j] += x[(size_t)i * ldx + (size_t)at] * w[(size_t)j * ldw + (size_t)at];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            float *out = c + (size_t)i * ldc + j, dot = lane_sum(sum[i][j]) + rest[i][j];
            *out = beta == 0 ? alpha * dot : alpha * dot + beta * *out; /* 0 · NaN is not 0 */
        }
}

/* All rows against columns [j, j + cols). */
static inline __attribute__((always_inline)) void columns(int cols, int m, int k, float alpha,
    const float *x, size_t ldx, const float *w, size_t ldw, float beta, float *c, size_t ldc)
{
    int i = 0;
    for (; i + ROW_TILE <= m; i += ROW_TILE)
        tile(ROW_TILE, cols, k, alpha, x + (size_t)i * ldx, ldx, w, ldw, beta, c + (size_t)i * ldc,
            ldc);
    for (; i < m; i++)
        tile(1, cols, k, alpha, x + (size_t)i * ldx, ldx, w, ldw, beta, c + (size_t)i * ldc, ldc);
}

void cpu_matmul_rows(int m, int n, int k, float alpha, const float *x, size_t ldx, const float *w,
    size_t ldw, float beta, float *c, size_t ldc)
{
#pragma omp parallel for schedule(static)
    for (int j = 0; j < n / COL_TILE; j++)
        columns(COL_TILE, m, k, alpha, x, ldx, w + (size_t)j * COL_TILE * ldw, ldw, beta,
            c + (size_t)j * COL_TILE, ldc);
    for (int j = n - n % COL_TILE; j < n; j++)
        columns(1, m, k, alpha, x, ldx, w + (size_t)j * ldw, ldw, beta, c + j, ldc);
}
