/* Compacted rows: gather, scatter, and the carried state of some rows against that of all. */
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

struct rows_case {
    int batch, seq, dim, one_in; /* about one row in so many */
};
static const struct rows_case cases[] = {
    {1, 2, 1, 1}, {2, 17, 8, 2}, {3, 33, 12, 3}, {2, 40, 5, 1000}, {4, 64, 200, 2}};

/* Ascending rows, none the first of its batch row. */
static int choose(const struct rows_case *c, int32_t *rows)
{
    int n = 0;
    for (int i = 0; i < c->batch * c->seq; i++)
        if (i % c->seq && rng_u64(7, (uint64_t)i) % (uint64_t)c->one_in == 0)
            rows[n++] = i;
    return n;
}

static void check_moves(const struct rows_case *c)
{
    struct device *d = test_device(2);
    size_t dim = (size_t)c->dim, all = (size_t)c->batch * (size_t)c->seq * dim;
    int32_t *rows = mem_array(all / dim, sizeof *rows);
    int n = choose(c, rows);
    float *whole = random_floats(all, 1.0f, 1), *part = filled_floats(all, NAN);
    float *back = random_floats(all, 1.0f, 2), *sum = copied_floats(back, all);
    float *back_want = copied_floats(back, all), *sum_want = copied_floats(sum, all);
    d->ops->gather_rows(d, part, whole, rows, n, dim * sizeof(float));
    for (int i = 0; i < n; i++) {
        size_t at = (size_t)rows[i] * dim;
        assert_same_bits("gathered", part + (size_t)i * dim, whole + at, dim);
        for (size_t j = 0; j < dim; j++) {
            back_want[at + j] = whole[at + j];
            sum_want[at + j] += whole[at + j];
        }
    }
    assert_true((size_t)n * dim == all || isnan(part[(size_t)n * dim]));
    d->ops->scatter_rows(d, back, part, rows, n, dim * sizeof(float));
    d->ops->scatter_add_rows(d, sum, part, rows, n, c->dim);
    assert_same_bits("scattered", back, back_want, all);
    assert_same_bits("added", sum, sum_want, all);
    void *rest[] = {rows, whole, part, back, sum, back_want, sum_want};
    for (size_t i = 0; i < COUNT(rest); i++)
        free(rest[i]);
}

/* noise: 0 none, 1 given, 2 drawn. */
static void check_carry(const struct rows_case *c, int noise)
{
    struct device *d = test_device(2);
    const uint64_t keys[] = {rng_key(5, 0), rng_key(5, 1), rng_key(5, 2), rng_key(5, 3)};
    size_t dim = (size_t)c->dim, tokens = (size_t)c->batch * (size_t)c->seq, all = tokens * dim;
    int32_t *rows = mem_array(tokens, sizeof *rows);
    int n = choose(c, rows);
    float *h = random_floats(all, 1.0f, 1), *given = random_floats(all, 0.5f, 2);
    float *whole = mem_array(all, sizeof *whole), *part = filled_floats(all, NAN);
    float *dpart = random_floats(all, 1.0f, 3), *dwhole = mem_array(all, sizeof *dwhole);
    float *dh = random_floats(all, 1.0f, 4), *dh_want = copied_floats(dh, all);
    const float *array = noise == 1 ? given : NULL;
    float jitter = noise == 2 ? 0.02f : 0.0f;
    d->ops->carry_fwd(d, whole, h, array, jitter, keys, c->batch, c->seq, c->dim);
    d->ops->carry_rows_fwd(d, part, h, array, jitter, keys, rows, n, c->seq, c->dim);
    for (int i = 0; i < n; i++) {
        size_t at = (size_t)rows[i] * dim, from = (size_t)i * dim;
        assert_same_bits("carried", part + from, whole + at, dim);
        memcpy(dwhole + at, dpart + from, dim * sizeof *dwhole);
    }
    d->ops->carry_bwd(d, dh_want, dwhole, c->batch, c->seq, c->dim);
    d->ops->carry_rows_bwd(d, dh, dpart, rows, n, c->dim);
    assert_same_bits("dh", dh, dh_want, all);
    void *rest[] = {rows, h, given, whole, part, dpart, dwhole, dh, dh_want};
    for (size_t i = 0; i < COUNT(rest); i++)
        free(rest[i]);
}

static void test_moves(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        check_moves(&cases[i]);
}

static void test_carry(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int noise = 0; noise <= 2; noise++)
            check_carry(&cases[i], noise);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_carry),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
