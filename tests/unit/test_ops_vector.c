/* Device memory, vector operations and AdamW against float64 twins. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "tests/unit/ops_check.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static const size_t lengths[] = {1, 3, 255, 256, 257, 8193, 100003};

static void test_memory(void **state)
{
    (void)state;
    struct device *d = test_device(1);
    const size_t sizes[] = {0, 1, 63, 64, 65, 100000};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        unsigned char *p = d->ops->alloc(d, sizes[i]);
        assert_non_null(p);
        assert_true((uintptr_t)p % 64 == 0);
        for (size_t j = 0; j < sizes[i]; j++)
            assert_int_equal(p[j], 0);
        d->ops->free(d, p);
    }
    assert_null(d->ops->alloc(d, SIZE_MAX));
    assert_null(d->ops->alloc(d, SIZE_MAX / 2));
    const float in[3] = {1, 2, 3};
    float out[3], *a = d->ops->alloc(d, sizeof in), *b = d->ops->alloc(d, sizeof in);
    d->ops->upload(d, a, in, sizeof in);
    d->ops->copy(d, b, a, sizeof in);
    d->ops->zero(d, a, 2 * sizeof *a);
    d->ops->download(d, out, b, sizeof out);
    assert_memory_equal(out, in, sizeof in);
    d->ops->download(d, out, a, sizeof out);
    assert_true(out[0] == 0.0f && out[1] == 0.0f && out[2] == 3.0f);
    assert_int_equal(d->ops->sync(d, NULL), 0);
    d->ops->free(d, a);
    d->ops->free(d, b);
    d->ops->free(d, NULL);
}

static void test_threads(void **state)
{
    (void)state;
    struct device *d = NULL;
    struct err e;
    assert_int_equal(device_cpu_new(0, &d, &e), 0);
    assert_true(d->threads >= 1);
    assert_string_equal(d->ops->name, "cpu");
    device_free(&d);
    assert_null(d);
    device_free(&d);
}

static void check_vectors(size_t n)
{
    struct device *d = test_device(2);
    float *x = random_floats(n, 3.0f, 1), *y = random_floats(n, 1.0f, 2);
    double *added = as_doubles(y, n), *scaled = as_doubles(x, n), sum = 0.0, sq = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)x[i];
        sq += (double)x[i] * (double)x[i];
        added[i] += -0.7 * (double)x[i];
        scaled[i] *= 0.3;
    }
    assert_true(fabs(d->ops->sum(d, x, n) - sum) <= 1e-11 * (double)n);
    assert_true(fabs(d->ops->sum_sq(d, x, n) - sq) <= 1e-12 * sq);
    for (int threads = 1; threads <= 3; threads++) {
        struct device *other = test_device(threads);
        assert_true(other->ops->sum(other, x, n) == d->ops->sum(d, x, n));
        assert_true(other->ops->sum_sq(other, x, n) == d->ops->sum_sq(d, x, n));
    }
    d->ops->add(d, y, x, -0.7f, n);
    assert_near("added", y, added, n, 2e-7);
    d->ops->scale(d, x, 0.3f, n);
    assert_near("scaled", x, scaled, n, 2e-7);
    void *all[] = {x, y, added, scaled};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_vectors(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    for (size_t i = 0; i < COUNT(lengths); i++)
        check_vectors(lengths[i]);
    assert_true(d->ops->sum(d, NULL, 0) == 0.0 && d->ops->sum_sq(d, NULL, 0) == 0.0);
}

/* Five updates with the rule as it is written in the paper, in double. */
static void check_adamw(size_t n, float weight_decay, float grad_scale)
{
    struct adamw_args a = {.lr = 3e-3f,
        .beta1 = 0.9f,
        .beta2 = 0.95f,
        .eps = 1e-8f,
        .weight_decay = weight_decay,
        .grad_scale = grad_scale};
    float *w = random_floats(n, 1.0f, 1), *m = filled_floats(n, 0), *v = filled_floats(n, 0);
    double *w64 = as_doubles(w, n), *m64 = as_doubles(m, n), *v64 = as_doubles(v, n);
    float *w1 = copied_floats(w, n), *m1 = copied_floats(m, n), *v1 = copied_floats(v, n);
    for (a.t = 1; a.t <= 5; a.t++) {
        float *g = random_floats(n, 0.1f, (uint64_t)a.t);
        for (size_t i = 0; i < n; i++) {
            double gi = (double)g[i] * (double)grad_scale, b1 = (double)a.beta1,
                   b2 = (double)a.beta2;
            m64[i] = b1 * m64[i] + (1 - b1) * gi;
            v64[i] = b2 * v64[i] + (1 - b2) * gi * gi;
            double mh = m64[i] / (1 - pow(b1, (double)a.t)),
                   vh = v64[i] / (1 - pow(b2, (double)a.t));
            w64[i] -=
                (double)a.lr * (mh / (sqrt(vh) + (double)a.eps) + (double)weight_decay * w64[i]);
        }
        struct device *d = test_device(2), *one = test_device(1);
        d->ops->adamw(d, w, m, v, g, n, &a);
        one->ops->adamw(one, w1, m1, v1, g, n, &a);
        free(g);
    }
    assert_near("w", w, w64, n, 1e-6);
    assert_near("m", m, m64, n, 1e-7);
    assert_near("v", v, v64, n, 1e-8);
    assert_same_bits("w on one thread", w, w1, n);
    void *all[] = {w, m, v, w64, m64, v64, w1, m1, v1};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_adamw(void **state)
{
    (void)state;
    check_adamw(1, 0.1f, 1.0f);
    check_adamw(33, 0.0f, 0.5f);
    check_adamw(20001, 0.1f, 1e-3f);
}

/* Three updates of each row's second moment, in double; the norm of the whole stays. */
static void check_normuon(int rows, int columns)
{
    size_t n = (size_t)rows * (size_t)columns;
    const double beta2 = (double)0.95f;
    float *v = filled_floats((size_t)rows, 0), *v1 = filled_floats((size_t)rows, 0);
    float *work = filled_floats((size_t)rows, NAN);
    double *v64 = mem_array((size_t)rows, sizeof *v64);
    for (uint64_t step = 1; step <= 3; step++) {
        struct device *d = test_device(2), *one = test_device(1);
        float *x = random_floats(n, 0.2f, step), *x1 = copied_floats(x, n);
        double *x64 = as_doubles(x, n), before = 0, after = 0;
        for (size_t i = 0; i < n; i++) { /* uneven rows */
            size_t row = i / (size_t)columns;
            x[i] = x1[i] = (float)(x64[i] *= 1 + (double)row);
        }
        for (int i = 0; i < rows; i++) {
            double *row = x64 + (size_t)i * (size_t)columns, mean = 0;
            for (int j = 0; j < columns; j++)
                mean += row[j] * row[j] / columns;
            before += mean;
            v64[i] = beta2 * v64[i] + (1 - beta2) * mean;
            for (int j = 0; j < columns; j++) {
                row[j] /= sqrt(v64[i]);
                after += row[j] * row[j] / columns;
            }
        }
        for (size_t i = 0; i < n; i++)
            x64[i] *= sqrt(before / after);
        d->ops->normuon(d, x, v, rows, columns, 0.95f, work);
        one->ops->normuon(one, x1, v1, rows, columns, 0.95f, work);
        assert_near("x", x, x64, n, 2e-6);
        assert_near("v", v, v64, (size_t)rows, 2e-6);
        assert_same_bits("x on one thread", x, x1, n);
        free(x);
        free(x1);
        free(x64);
    }
    void *all[] = {v, v1, v64, work};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_normuon(void **state)
{
    (void)state;
    check_normuon(1, 1);
    check_normuon(5, 33);
    check_normuon(300, 257);
    struct device *d = test_device(1); /* nothing to divide stays nothing */
    float x[6] = {0}, v[2] = {0}, work[2];
    d->ops->normuon(d, x, v, 2, 3, 0.9f, work);
    for (int i = 0; i < 6; i++)
        assert_true(x[i] == 0.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_normuon),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
