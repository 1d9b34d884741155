/* RMSNorm against a float64 twin and its central differences. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "tests/unit/ops_check.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

struct norm_case {
    int n, dim, weighted;
    float scale; /* of x: small ones make eps count */
};
static const struct norm_case cases[] = {{1, 1, 1, 1.0f}, {1, 8, 0, 1.0f}, {3, 17, 1, 1.0f},
    {33, 12, 0, 0.01f}, {17, 33, 1, 0.003f}, {65, 20, 1, 5.0f}, {130, 10, 1, 1.0f},
    {70, 40, 0, 1.0f}};
static const float eps = 1e-5f;

struct norm_run {
    const struct norm_case *c;
    size_t n, dim;
    float *x, *w, *dout, *out, *rstd;
    double *x64, *w64, *dout64, *out64, *rstd64;
};

static void twin_fwd(struct norm_run *r)
{
    for (size_t i = 0; i < (size_t)r->c->n; i++) {
        double ss = 0.0;
        for (size_t j = 0; j < r->dim; j++)
            ss += r->x64[i * r->dim + j] * r->x64[i * r->dim + j];
        r->rstd64[i] = 1.0 / sqrt(ss / (double)r->dim + (double)eps);
        for (size_t j = 0; j < r->dim; j++)
            r->out64[i * r->dim + j] = r->x64[i * r->dim + j] * r->rstd64[i] * r->w64[j];
    }
}

static double twin_loss(void *ctx)
{
    struct norm_run *r = ctx;
    double s = 0.0;
    twin_fwd(r);
    for (size_t i = 0; i < r->n; i++)
        s += r->out64[i] * r->dout64[i];
    return s;
}

static void run_init(struct norm_run *r, const struct norm_case *c)
{
    size_t dim = (size_t)c->dim, n = (size_t)c->n * dim;
    *r = (struct norm_run){.c = c, .n = n, .dim = dim};
    r->x = random_floats(n, c->scale, 1);
    r->w = c->weighted ? random_floats(dim, 2.0f, 2) : NULL;
    r->dout = random_floats(n, 1.0f, 3);
    r->out = filled_floats(n, NAN);
    r->rstd = filled_floats((size_t)c->n, NAN);
    r->x64 = as_doubles(r->x, n);
    r->dout64 = as_doubles(r->dout, n);
    r->out64 = mem_array(n, sizeof(double));
    r->rstd64 = mem_array((size_t)c->n, sizeof(double));
    float *ones = filled_floats(dim, 1.0f);
    r->w64 = as_doubles(r->w ? r->w : ones, dim);
    free(ones);
}

static void run_release(struct norm_run *r)
{
    void *all[] = {
        r->x, r->w, r->dout, r->out, r->rstd, r->x64, r->w64, r->dout64, r->out64, r->rstd64};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void run_bwd(
    struct norm_run *r, int threads, float *dx, int accumulate, float *dw, const float *dout)
{
    struct device *d = test_device(threads);
    float *work = filled_floats(d->ops->rmsnorm_bwd_work(d, r->c->n, r->c->dim) + 1, NAN);
    d->ops->rmsnorm_bwd(d, dx, accumulate, dw, dout, r->x, r->w, r->rstd, r->c->n, r->c->dim, work);
    free(work);
}

static void test_forward(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct norm_run r;
        struct device *d = test_device(2);
        run_init(&r, &cases[i]);
        d->ops->rmsnorm_fwd(d, r.out, r.rstd, r.x, r.w, r.c->n, r.c->dim, eps);
        twin_fwd(&r);
        assert_near("out", r.out, r.out64, r.n, 1e-6);
        assert_near("rstd", r.rstd, r.rstd64, (size_t)r.c->n, 1e-6);
        run_release(&r);
    }
}

static void check_bwd(const struct norm_case *c)
{
    struct norm_run r;
    struct device *d = test_device(2);
    run_init(&r, c);
    d->ops->rmsnorm_fwd(d, r.out, r.rstd, r.x, r.w, c->n, c->dim, eps);
    double *dx64 = mem_array(r.n, sizeof *dx64), *dw64 = mem_array(r.dim, sizeof *dw64);
    central_differences(twin_loss, &r, r.x64, r.n, 1e-6 * (double)c->scale, dx64);
    central_differences(twin_loss, &r, r.w64, r.dim, 1e-5, dw64);
    /* overwriting, and dw added to what is there */
    float *dx = filled_floats(r.n, NAN), *dw = r.w ? random_floats(r.dim, 1.0f, 7) : NULL;
    for (size_t j = 0; r.w && j < r.dim; j++)
        dw64[j] += (double)dw[j];
    run_bwd(&r, 2, dx, 0, dw, r.dout);
    assert_near("dx", dx, dx64, r.n, 2e-6);
    if (r.w)
        assert_near("dw", dw, dw64, r.dim, 5e-6);
    /* in place: the same bits */
    float *in_place = copied_floats(r.dout, r.n), *dw2 = r.w ? random_floats(r.dim, 1.0f, 7) : NULL;
    run_bwd(&r, 2, in_place, 0, dw2, in_place);
    assert_same_bits("dx in place", dx, in_place, r.n);
    if (r.w)
        assert_same_bits("dw in place", dw, dw2, r.dim);
    /* accumulating */
    float *more = random_floats(r.n, 1.0f, 8);
    for (size_t j = 0; j < r.n; j++)
        dx64[j] += (double)more[j];
    run_bwd(&r, 2, more, 1, dw2, r.dout);
    assert_near("dx added", more, dx64, r.n, 2e-6);
    void *all[] = {dx64, dw64, dx, dw, in_place, dw2, more};
    for (size_t j = 0; j < COUNT(all); j++)
        free(all[j]);
    run_release(&r);
}

static void test_backward(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        check_bwd(&cases[i]);
}

static void test_repeats_bit_for_bit(void **state)
{
    (void)state;
    struct norm_run r;
    struct norm_case c = {700, 96, 1, 1.0f};
    run_init(&r, &c);
    float *dx[4], *dw[4];
    for (int threads = 1; threads <= 3; threads++) {
        struct device *d = test_device(threads);
        dx[threads] = filled_floats(r.n, NAN);
        dw[threads] = filled_floats(r.dim, 0.5f);
        d->ops->rmsnorm_fwd(d, r.out, r.rstd, r.x, r.w, c.n, c.dim, eps);
        run_bwd(&r, threads, dx[threads], 0, dw[threads], r.dout);
        assert_same_bits("dx", dx[1], dx[threads], r.n);
        assert_same_bits("dw", dw[1], dw[threads], r.dim);
    }
    for (int threads = 1; threads <= 3; threads++) {
        free(dx[threads]);
        free(dw[threads]);
    }
    run_release(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_repeats_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
