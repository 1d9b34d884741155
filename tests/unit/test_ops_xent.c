/* Cross-entropy against a float64 twin and central differences, and the exponential under it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/rng.h"
#include "kernels/cpu/fast_math.h"
#include "tests/unit/ops_check.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* Every 97th float from -100 to 100 and what lies outside. */
static void test_exp(void **state)
{
    (void)state;
    double worst = 0.0;
    for (uint32_t bits = 0; bits < 0x42c80000u; bits += 97) {
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t all = bits | sign << 31;
            float x;
            memcpy(&x, &all, sizeof x);
            double want = exp((double)x), got = (double)fast_expf(x);
            if (x < -87.3f)
                assert_true(got == 0.0);
            else if (x <= 88.3f)
                worst = fmax(worst, fabs(got - want) / want);
        }
    }
    if (worst > 1.2e-7)
        fail_msg("worst relative error %.3g", worst);
    assert_true(fast_expf(0.0f) == 1.0f);
    assert_true(fast_expf(-INFINITY) == 0.0f);
    assert_true(fast_expf(1e30f) > 1e38f);
    assert_true(isnan(fast_expf(NAN)));
}

struct xent_case {
    int n, vocab;
    float scale;
};
static const struct xent_case cases[] = {
    {1, 1, 1.0f}, {1, 2, 1.0f}, {17, 33, 5.0f}, {33, 257, 50.0f}, {9, 8193, 10.0f}};

struct twin {
    const struct xent_case *c;
    double *x, *losses;
    int32_t *targets;
    double dscale, z_loss;
};

static double twin_loss(void *ctx)
{
    struct twin *w = ctx;
    double sum = 0.0;
    for (int i = 0; i < w->c->n; i++) {
        const double *row = w->x + (size_t)i * (size_t)w->c->vocab;
        double max = -INFINITY, z = 0.0;
        for (int j = 0; j < w->c->vocab; j++)
            max = fmax(max, row[j]);
        for (int j = 0; j < w->c->vocab; j++)
            z += exp(row[j] - max);
        double lse = max + log(z);
        w->losses[i] = w->targets[i] < 0 ? 0.0 : lse - row[w->targets[i]];
        sum += w->losses[i] + (w->targets[i] < 0 ? 0.0 : w->z_loss * lse * lse);
    }
    return sum * w->dscale;
}

/* The gradient by its formula; the test below holds the formula against differences. */
static void twin_grad(const struct twin *w, double *grad)
{
    for (int i = 0; i < w->c->n; i++) {
        size_t at = (size_t)i * (size_t)w->c->vocab;
        for (int j = 0; j < w->c->vocab; j++) {
            int t = w->targets[i];
            double p =
                t < 0 ? 0.0 : exp(w->x[at + (size_t)j] - w->losses[i] - w->x[at + (size_t)t]);
            grad[at + (size_t)j] = w->dscale * (p - (j == t ? 1.0 : 0.0));
        }
    }
}

static void check_xent(const struct xent_case *c)
{
    size_t n = (size_t)c->n, all_n = n * (size_t)c->vocab;
    float *logits = random_floats(all_n, c->scale, 1), *losses = filled_floats(n, NAN);
    float *kept = copied_floats(logits, all_n);
    struct twin w = {.c = c,
        .x = as_doubles(logits, all_n),
        .losses = mem_array(n, sizeof(double)),
        .targets = mem_array(n, sizeof(int32_t)),
        .dscale = 0.25};
    for (int i = 0; i < c->n; i++)
        w.targets[i] = i % 4 == 3 ? -1 : (int32_t)(rng_u64(3, (uint64_t)i) % (uint64_t)c->vocab);
    double *grad = mem_array(all_n, sizeof *grad);
    twin_loss(&w);
    struct device *d = test_device(2);
    d->ops->xent(d, losses, logits, w.targets, NULL, c->n, c->vocab, 0.0f, 0.0f);
    assert_near("losses", losses, w.losses, n, 1e-6);
    assert_same_bits("logits without a gradient", logits, kept, all_n);
    float *first = copied_floats(losses, n);
    d->ops->xent(d, losses, logits, w.targets, NULL, c->n, c->vocab, 0.25f, 0.0f);
    assert_same_bits("losses with a gradient", losses, first, n);
    twin_grad(&w, grad);
    assert_near("dlogits", logits, grad, all_n, 1e-7);
    if (all_n < 10000) {
        central_differences(twin_loss, &w, w.x, all_n, 1e-5, grad);
        assert_near("dlogits by differences", logits, grad, all_n, 1e-6);
    }
    for (int threads = 1; threads <= 3; threads++) {
        struct device *dt = test_device(threads);
        float *again = copied_floats(kept, all_n);
        dt->ops->xent(dt, losses, again, w.targets, NULL, c->n, c->vocab, 0.25f, 0.0f);
        assert_same_bits("dlogits again", logits, again, all_n);
        assert_same_bits("losses again", losses, first, n);
        free(again);
    }
    void *all[] = {logits, losses, kept, w.x, w.losses, w.targets, grad, first};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_xent(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        check_xent(&cases[i]);
}

/* A row's weight multiplies its gradient and leaves its loss; a weight of 0 gives zeros. */
static void test_weights(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    enum { N = 19, V = 4001 };
    float *plain = random_floats((size_t)N * V, 8.0f, 1), *weighted = copied_floats(plain, N * V);
    float losses[N], again[N], weights[N];
    int32_t targets[N];
    double *want = mem_array((size_t)N * V, sizeof *want);
    for (int i = 0; i < N; i++) {
        weights[i] = 0.5f * (float)(i % 5);
        targets[i] = i % 6 == 5 ? -1 : i * 200;
    }
    d->ops->xent(d, losses, plain, targets, NULL, N, V, 0.25f, 0.0f);
    d->ops->xent(d, again, weighted, targets, weights, N, V, 0.25f, 0.0f);
    assert_same_bits("losses", again, losses, N);
    for (size_t i = 0; i < (size_t)N * V; i++)
        want[i] = (double)plain[i] * (double)weights[i / V];
    assert_near("weighted dlogits", weighted, want, (size_t)N * V, 1e-7);
    assert_true(weighted[0] == 0.0f && weighted[(size_t)5 * V] == 0.0f);
    free(plain);
    free(weighted);
    free(want);
}

/* The squared log-sum-exp changes the gradient, by the differences of the whole, and no loss. */
static void test_z_loss(void **state)
{
    (void)state;
    static const struct xent_case c = {17, 33, 5.0f};
    enum { N = 17, ALL = 17 * 33 };
    struct device *d = test_device(2);
    float *logits = random_floats(ALL, c.scale, 1), losses[N], plain[N];
    float *kept = copied_floats(logits, ALL);
    int32_t targets[N];
    double twin_losses[N], *grad = mem_array(ALL, sizeof *grad);
    for (int i = 0; i < N; i++)
        targets[i] = i % 4 == 3 ? -1 : i;
    struct twin w = {&c, as_doubles(logits, ALL), twin_losses, targets, 0.25, 0.03};
    d->ops->xent(d, plain, kept, targets, NULL, N, c.vocab, 0.0f, 0.03f);
    d->ops->xent(d, losses, logits, targets, NULL, N, c.vocab, 0.25f, 0.03f);
    assert_same_bits("losses", losses, plain, N);
    central_differences(twin_loss, &w, w.x, ALL, 1e-5, grad);
    assert_near("dlogits by differences", logits, grad, ALL, 1e-6);
    twin_loss(&w);
    assert_near("losses of the twin", losses, twin_losses, N, 1e-6);
    free(logits);
    free(kept);
    free(w.x);
    free(grad);
}

static void test_extremes(void **state)
{
    (void)state;
    struct device *d = test_device(1);
    float losses[3], logits[9] = {1e4f, -1e4f, 0, -1e30f, 1e30f, 0, 1, NAN, 2};
    const int32_t targets[] = {1, 1, 0};
    d->ops->xent(d, losses, logits, targets, NULL, 3, 3, 1.0f, 0.0f);
    assert_true(losses[0] == 2e4f && losses[1] == 0.0f);
    assert_true(isnan(losses[2])); /* a NaN must not be hidden */
    assert_true(logits[0] == 1.0f && logits[1] == -1.0f && logits[2] == 0.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_xent),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_z_loss),
        cmocka_unit_test(test_extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
