/*
 * Matrix products through oneDNN's sgemm, which is row-major and fast in all three layouts of a
 * linear layer at large and small shapes. It picks its partition from the shape and the number of
 * threads, not from addresses, so it repeats bit for bit at a fixed number of threads.
 */
#include <dnnl.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"

void cpu_gemm(int ta, int tb, int m, int n, int k, float alpha, const float *a, size_t lda,
    const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    if (m == 0 || n == 0)
        return;
    dnnl_status_t st = dnnl_sgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, alpha, a,
        (dnnl_dim_t)lda, b, (dnnl_dim_t)ldb, beta, c, (dnnl_dim_t)ldc);
    CHECK(st == dnnl_success);
}

void cpu_matmul(struct device *d, int ta, int tb, int m, int n, int k, float alpha, const float *a,
    int lda, const float *b, int ldb, float beta, float *c, int ldc)
{
    CHECK(m >= 0 && n >= 0 && k > 0);
    CHECK(lda >= (ta ? m : k) && ldb >= (tb ? k : n) && ldc >= n);
    cpu_use_threads(cpu_team(d, (int64_t)m * n * k));
    if (!ta && tb && m <= DEVICE_DECODE_ROWS)
        cpu_matmul_rows(m, n, k, alpha, a, (size_t)lda, b, (size_t)ldb, beta, c, (size_t)ldc);
    else
        cpu_gemm(ta, tb, m, n, k, alpha, a, (size_t)lda, b, (size_t)ldb, beta, c, (size_t)ldc);
}
