/* SwiGLU, the fusion's gate, the carried state and row selection against float64 twins. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/ops_check.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static const size_t lengths[] = {1, 7, 33, 4096, 20001};

/* -- two operations of the same form: out = x · f(g), and their derivatives -- */
static double sigmoid64(double g)
{
    return 1.0 / (1.0 + exp(-g));
}
static double silu64(double g)
{
    return g * sigmoid64(g);
}

typedef void fwd_fn(struct device *, float *, const float *, const float *, size_t);
typedef void bwd_fn(
    struct device *, float *, float *, const float *, const float *, const float *, size_t);

/* gated_first: the argument of f comes first in the operation's signature. */
struct gated {
    double (*f)(double);
    int gated_first;
    fwd_fn *fwd;
    bwd_fn *bwd;
};

static void check_fwd(const struct gated *op, size_t n)
{
    float *g = random_floats(n, 12.0f, 1), *x = random_floats(n, 2.0f, 2);
    float *out = filled_floats(n, NAN);
    double *want = mem_array(n, sizeof *want);
    for (size_t i = 0; i < n; i++)
        want[i] = (double)x[i] * op->f((double)g[i]);
    const float *a = op->gated_first ? g : x, *b = op->gated_first ? x : g;
    op->fwd(test_device(2), out, a, b, n);
    assert_near("out", out, want, n, 3e-7);
    void *all[] = {g, x, out, want};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

/* in_place 0: outputs apart from dout; 1: dout is the first output; 2: the second. */
static void check_bwd(const struct gated *op, size_t n, int in_place)
{
    float *g = random_floats(n, 8.0f, 3), *x = random_floats(n, 2.0f, 4);
    float *dout = random_floats(n, 1.0f, 5);
    double *dg = mem_array(n, sizeof *dg), *dx = mem_array(n, sizeof *dx);
    const double h = 1e-5;
    for (size_t i = 0; i < n; i++) {
        double gi = (double)g[i], dy = (double)dout[i];
        dg[i] = dy * (double)x[i] * (op->f(gi + h) - op->f(gi - h)) / (2.0 * h);
        dx[i] = dy * op->f(gi);
    }
    float *first = in_place == 1 ? dout : filled_floats(n, NAN);
    float *second = in_place == 2 ? dout : filled_floats(n, NAN);
    const float *a = op->gated_first ? g : x, *b = op->gated_first ? x : g;
    op->bwd(test_device(2), first, second, dout, a, b, n);
    assert_near("dg", op->gated_first ? first : second, dg, n, 1e-6);
    assert_near("dx", op->gated_first ? second : first, dx, n, 1e-6);
    if (first != dout)
        free(first);
    if (second != dout)
        free(second);
    void *all[] = {g, x, dout, dg, dx};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_gated(void **state)
{
    (void)state;
    const struct device_ops *ops = test_device(2)->ops;
    const struct gated both[] = {
        {silu64, 1, ops->swiglu_fwd, ops->swiglu_bwd},
        {sigmoid64, 0, ops->gate_fwd, ops->gate_bwd},
    };
    for (size_t k = 0; k < COUNT(both); k++) {
        for (size_t i = 0; i < COUNT(lengths); i++) {
            check_fwd(&both[k], lengths[i]);
            for (int in_place = 0; in_place <= 2; in_place++)
                check_bwd(&both[k], lengths[i], in_place);
        }
    }
}

static void test_gated_far_out(void **state)
{
    (void)state;
    struct device *d = test_device(1);
    const float g[] = {-1e30f, -200.0f, -88.0f, 0.0f, 88.0f, 200.0f, 1e30f, NAN};
    const float one[] = {1, 1, 1, 1, 1, 1, 1, 1};
    float out[8], du[8], dg[8];
    d->ops->gate_fwd(d, out, one, g, 8);
    d->ops->gate_bwd(d, du, dg, one, one, g, 8);
    for (int i = 0; i < 7; i++) {
        assert_true(fabs((double)out[i] - sigmoid64((double)g[i])) < 1e-6);
        assert_true(isfinite(du[i]) && isfinite(dg[i]));
    }
    assert_true(isnan(out[7]) && isnan(du[7]) && isnan(dg[7])); /* a NaN must not be hidden */
}

/* -- the carried state -- */
struct carry_case {
    int batch, seq, dim;
};
static const struct carry_case carry_cases[] = {
    {1, 1, 1}, {1, 17, 8}, {3, 1, 5}, {2, 33, 12}, {3, 40, 96}};

/* How the noise comes: none, an array, drawn. */
enum noise { NONE, GIVEN, DRAWN };

static void check_carry(const struct carry_case *c, enum noise from)
{
    struct device *d = test_device(2);
    const float jitter = 0.02f;
    const uint64_t keys[] = {rng_key(5, 0), rng_key(5, 1), rng_key(5, 2)};
    size_t dim = (size_t)c->dim, seq = (size_t)c->seq, n = (size_t)c->batch * seq * dim;
    float *h = random_floats(n, 1.0f, 1), *given = random_floats(n, 0.5f, 2);
    float *out = filled_floats(n, NAN), *want = mem_array(n, sizeof *want);
    for (size_t i = 0; i < n; i++) {
        size_t b = i / (seq * dim), t = i / dim % seq, x = i % dim;
        if (t == 0)
            continue;
        want[i] = h[i - dim];
        if (from == GIVEN)
            want[i] += given[i - dim];
        if (from == DRAWN)
            want[i] += jitter * (2.0f * rng_unitf(keys[b], (t - 1) * dim + x) - 1.0f);
    }
    d->ops->carry_fwd(d, out, h, from == GIVEN ? given : NULL, from == DRAWN ? jitter : 0.0f,
        from == DRAWN ? keys : NULL, c->batch, c->seq, c->dim);
    assert_same_bits("carried", out, want, n);
    /* dh[t] += dcarried[t + 1]; the last token of a row gets nothing */
    float *dcarried = random_floats(n, 1.0f, 3), *dh = random_floats(n, 1.0f, 4);
    double *dh64 = as_doubles(dh, n);
    for (size_t i = 0; i < n; i++)
        if (i / dim % seq + 1 < seq)
            dh64[i] += (double)dcarried[i + dim];
    d->ops->carry_bwd(d, dh, dcarried, c->batch, c->seq, c->dim);
    assert_near("dh", dh, dh64, n, 1e-7);
    void *all[] = {h, given, out, want, dcarried, dh, dh64};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_carry(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(carry_cases); i++)
        for (int from = NONE; from <= DRAWN; from++)
            check_carry(&carry_cases[i], (enum noise)from);
}

/* -- row selection -- */
static void check_select(int n, int dim)
{
    struct device *d = test_device(2);
    size_t width = (size_t)dim, all_n = (size_t)n * width;
    uint8_t *mask = mem_array((size_t)n, 1);
    float *a = random_floats(all_n, 1.0f, 1), *b = random_floats(all_n, 1.0f, 2);
    float *want = mem_array(all_n, sizeof *want), *da = mem_array(all_n, sizeof *da);
    float *dout = random_floats(all_n, 1.0f, 3), *db = random_floats(all_n, 1.0f, 4);
    float *db_want = copied_floats(db, all_n), *db_in_place = copied_floats(db, all_n);
    for (size_t i = 0; i < all_n; i++) {
        mask[i / width] = rng_u64(9, i / width) % 2;
        want[i] = mask[i / width] ? a[i] : b[i];
        da[i] = mask[i / width] ? dout[i] : 0.0f;
        db_want[i] += mask[i / width] ? 0.0f : dout[i];
    }
    float *out = filled_floats(all_n, NAN), *got_da = filled_floats(all_n, NAN);
    float *a2 = copied_floats(a, all_n), *b2 = copied_floats(b, all_n);
    d->ops->select_rows(d, out, mask, a, b, n, dim);
    d->ops->select_rows(d, a2, mask, a2, b, n, dim);
    d->ops->select_rows(d, b2, mask, a, b2, n, dim);
    assert_same_bits("out", out, want, all_n);
    assert_same_bits("out in a", a2, want, all_n);
    assert_same_bits("out in b", b2, want, all_n);
    d->ops->select_rows_bwd(d, got_da, db, dout, mask, n, dim);
    assert_same_bits("da", got_da, da, all_n);
    assert_same_bits("db", db, db_want, all_n);
    d->ops->select_rows_bwd(d, dout, db_in_place, dout, mask, n, dim);
    assert_same_bits("da in dout", dout, da, all_n);
    assert_same_bits("db with da in dout", db_in_place, db_want, all_n);
    void *all[] = {mask, a, b, want, da, dout, db, db_want, db_in_place, out, got_da, a2, b2};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_select_rows(void **state)
{
    (void)state;
    check_select(1, 1);
    check_select(17, 33);
    check_select(33, 8);
    check_select(200, 96);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gated),
        cmocka_unit_test(test_gated_far_out),
        cmocka_unit_test(test_carry),
        cmocka_unit_test(test_select_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
