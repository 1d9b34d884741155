#include "tests/unit/ops_check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/rng.h"

struct device *test_device(int threads)
{
    static struct device *made[9];
    assert_in_range(threads, 1, 8);
    if (!made[threads]) {
        struct err e;
        if (device_cpu_new(threads, &made[threads], &e) < 0)
            fail_msg("%s", e.msg);
    }
    return made[threads];
}

float *random_floats(size_t n, float scale, uint64_t key)
{
    float *x = mem_array(n, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = scale * (2.0f * rng_unitf(key, i) - 1.0f);
    return x;
}

float *filled_floats(size_t n, float value)
{
    float *x = mem_array(n, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = value;
    return x;
}

float *copied_floats(const float *x, size_t n)
{
    float *y = mem_array(n, sizeof *y);
    memcpy(y, x, n * sizeof *y);
    return y;
}

double *as_doubles(const float *x, size_t n)
{
    double *y = mem_array(n, sizeof *y);
    for (size_t i = 0; i < n; i++)
        y[i] = (double)x[i];
    return y;
}

void assert_near(const char *what, const float *got, const double *want, size_t n, double tol)
{
    double largest = 1.0;
    for (size_t i = 0; i < n; i++)
        largest = fmax(largest, fabs(want[i]));
    for (size_t i = 0; i < n; i++) {
        double diff = fabs((double)got[i] - want[i]);
        if (!(diff <= tol * largest))
            fail_msg("%s[%zu of %zu]: %.9g, expected %.9g within %.2g", what, i, n, (double)got[i],
                want[i], tol * largest);
    }
}

void assert_same_bits(const char *what, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], sizeof a[i]) != 0)
            fail_msg("%s[%zu of %zu]: %a and %a differ", what, i, n, (double)a[i], (double)b[i]);
    }
}

void central_differences(
    double (*f)(void *ctx), void *ctx, double *x, size_t n, double step, double *grad)
{
    for (size_t i = 0; i < n; i++) {
        double at = x[i];
        x[i] = at + step;
        double above = f(ctx);
        x[i] = at - step;
        double below = f(ctx);
        x[i] = at;
        grad[i] = (above - below) / (2.0 * step);
    }
}

int32_t *random_first(int batch, int seq, int doc_tokens, uint64_t key)
{
    int32_t *first = mem_array((size_t)batch * (size_t)seq, sizeof *first);
    for (int b = 0; b < batch; b++) {
        int32_t start = 0;
        for (int t = 0; t < seq; t++) {
            uint64_t i = (uint64_t)b * (uint64_t)seq + (uint64_t)t;
            if (doc_tokens && rng_u64(key, i) % (uint64_t)doc_tokens == 0)
                start = t;
            first[i] = start;
        }
    }
    return first;
}
