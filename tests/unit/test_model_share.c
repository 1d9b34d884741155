/*
 * Prefix sharing and recompute against the plain computation: the same losses and gradients over
 * random models, rows, documents, cuts, pass counts and noise.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/model_case.h"
#include "tests/unit/ops_check.h"

#define LAMBDA 0.7f
#define SCALE  0.05f

/*
 * Of a gradient's relative error. Without a norm of the fused input its small values are normalised
 * in the first block, which blows rounding up: there one unit in the last place of the weights
 * moves a gradient of the plain computation by 3e-5.
 */
#define LIMIT       1e-5
#define LIMIT_LOOSE 1e-4

static double worst; /* error of a gradient, over the cases held to LIMIT */

static int drawn(uint64_t key, uint64_t i, int count)
{
    return (int)(rng_u64(key, i) % (uint64_t)count);
}

/* A model with every option drawn. */
static struct model_config drawn_config(uint64_t key)
{
    struct model_config c = small_config();
    c.vocab = 11 + drawn(key, 0, 40);
    c.layers = 1 + drawn(key, 1, 3);
    c.kv_heads = 1 << drawn(key, 2, 3);
    c.in_norm = drawn(key, 3, 2);
    c.gate_norm = drawn(key, 4, 2);
    c.out_norm = drawn(key, 5, 2);
    c.qk_norm = drawn(key, 6, 2);
    c.attn_gate = drawn(key, 7, 2);
    c.window = drawn(key, 8, 2) ? 1 + drawn(key, 9, 9) : 0;
    c.full_every = c.window ? drawn(key, 10, 3) : 0;
    return c;
}

/* Documents of about doc_tokens, each with a cut of its own in every pass: a prefix of any length,
 * all of it or its first token. */
static void cut(struct test_batch *t, int doc_tokens, uint64_t key)
{
    int n = t->b.batch * t->b.seq;
    for (int i = 0; i < n; i++)
        t->doc_starts[i] = i % t->b.seq == 0 || drawn(key, (uint64_t)i, doc_tokens) == 0;
    for (int k = 0; k + 1 < t->b.passes; k++)
        for (int start = 0, end; start < n; start = end) {
            for (end = start + 1; end < n && end % t->b.seq && !t->doc_starts[end]; end++)
                ;
            uint64_t id = (uint64_t)(k + 1) << 32 | (uint64_t)start;
            int kind = drawn(key + 1, id, 4), len = end - start;
            int plain = kind == 0 ? len : kind == 1 ? 1 : 1 + drawn(key + 2, id, len);
            for (int i = start; i < end; i++)
                t->masks[(size_t)k * (size_t)n + (size_t)i] = i - start >= plain;
        }
}

static float *train(struct model *m, const struct model_batch *b, double *sums)
{
    struct device *d = model_device(m);
    size_t bytes = (size_t)model_weights(m)->total * sizeof(float);
    float *g = mem_array(bytes, 1);
    d->ops->zero(d, model_grads(m), bytes);
    model_train(m, b, LAMBDA, SCALE, sums);
    d->ops->download(d, g, model_grads(m), bytes);
    return g;
}

static double norm_of(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

/* A gradient that is nothing but rounding (of q where a query sees one key) is held against the
 * whole gradient instead. */
static void compare(const char *what, const struct weight_table *t, const float *got,
    const float *want, const double *sums, const double *want_sums, int passes, double limit)
{
    double whole = norm_of(want, (size_t)t->total);
    for (int i = 0; i < t->count; i++) {
        const struct weight *w = &t->items[i];
        size_t n = (size_t)w->count;
        double norm = norm_of(want + w->offset, n);
        double error = relative_error_f(got + w->offset, want + w->offset, n);
        if (norm < 1e-6 * whole)
            error = norm_of(got + w->offset, n) / whole;
        if (!(error <= limit))
            fail_msg("%s: gradient of %s (norm %g of %g) differs by %g", what, w->name, norm, whole,
                error);
        if (limit == LIMIT && norm >= 1e-6 * whole && error > worst)
            worst = error;
    }
    for (int k = 0; k < passes; k++)
        if (!(fabs(sums[k] - want_sums[k]) <= 1e-6 * fabs(want_sums[k])))
            fail_msg("%s: loss of pass %d is %.9g, not %.9g", what, k + 1, sums[k], want_sums[k]);
}

static void check_random(uint64_t key)
{
    struct device *d = test_device(2);
    struct model_config c = drawn_config(key);
    int batch = 1 + drawn(key, 20, 4), seq = 2 + drawn(key, 21, 40), passes = 2 + drawn(key, 22, 3);
    struct model_limits lim = {.batch = batch + drawn(key, 23, 2),
        .seq = seq + drawn(key, 24, 5),
        .passes = passes,
        .train = 1};
    struct test_batch tb;
    double plain_sums[4], sums[4], again_sums[4];
    float *flat, *flat2;
    char what[64];
    snprintf(what, sizeof what, "case %llu", (unsigned long long)key);
    struct model *plain = small_model(d, &c, &lim, key, &flat);
    lim.prefix_sharing = 1;
    for (int k = 0; k < passes; k++)
        lim.recompute[k] = (enum recompute)drawn(key, 30 + (uint64_t)k, 3);
    struct model *sharing = small_model(d, &c, &lim, key, &flat2);
    test_batch_make(&tb, &c, batch, seq, passes, 0, drawn(key, 25, 2) ? 0.2f : 0, key);
    tb.b.z_loss = drawn(key, 27, 2) ? 0.01f : 0;
    cut(&tb, 1 + drawn(key, 26, 20), key + 7);
    float *want = train(plain, &tb.b, plain_sums);
    float *got = train(sharing, &tb.b, sums), *again = train(sharing, &tb.b, again_sums);
    assert_false(model_shared(plain));
    assert_true(model_shared(sharing));
    compare(what, model_weights(plain), got, want, sums, plain_sums, passes,
        c.out_norm ? LIMIT : LIMIT_LOOSE);
    assert_same_bits("gradients again", again, got, (size_t)model_weights(plain)->total);
    assert_memory_equal(sums, again_sums, (size_t)passes * sizeof *sums);
    test_batch_release(&tb);
    model_free(&plain);
    model_free(&sharing);
    void *all[] = {flat, flat2, want, got, again};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void test_random(void **state)
{
    (void)state;
    for (uint64_t key = 1; key <= 60; key++)
        check_random(key);
    print_message("worst relative error of a gradient: %.2g\n", worst);
}

/* Masks that are no prefixes, whole rows, one pass: the plain computation, to the bit. */
static void test_falls_back(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    for (int kind = 0; kind < 3; kind++) {
        struct model_config c = small_config();
        struct model_limits lim = {.batch = 2, .seq = 12, .passes = 3, .train = 1};
        struct test_batch tb;
        double plain_sums[3], sums[3];
        float *flat, *flat2;
        c.doc_mask = kind != 1;
        struct model *plain = small_model(d, &c, &lim, 5, &flat);
        lim.prefix_sharing = 1;
        struct model *sharing = small_model(d, &c, &lim, 5, &flat2);
        test_batch_make(&tb, &c, 2, 12, 3, 0, 0.1f, 77);
        memset(tb.doc_starts, 0, 24);
        memset(tb.masks, 0, 48);
        if (kind == 0)
            tb.masks[3] = 1; /* fused, then plain again */
        if (kind == 2)
            tb.b.passes = 1;
        assert_int_equal(model_shares_prefixes(sharing), kind != 1);
        float *want = train(plain, &tb.b, plain_sums), *got = train(sharing, &tb.b, sums);
        assert_false(model_shared(sharing));
        assert_same_bits("gradients", got, want, (size_t)model_weights(plain)->total);
        assert_memory_equal(sums, plain_sums, (size_t)tb.b.passes * sizeof *sums);
        test_batch_release(&tb);
        model_free(&plain);
        model_free(&sharing);
        void *all[] = {flat, flat2, want, got};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
}

/* Every level in every pass, with and without sharing: the bits of keeping everything, in less
 * memory. */
static void test_recompute(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    for (int i = 0; i < 2 * 27; i++) {
        struct model_config c = small_config();
        struct model_limits lim = {
            .batch = 3, .seq = 40, .passes = 3, .train = 1, .prefix_sharing = i % 2};
        struct model_memory kept, dropped;
        struct test_batch tb;
        double want_sums[3], sums[3];
        float *flat, *flat2;
        c.layers = 4;
        c.qk_norm = c.attn_gate = i / 2 % 2;
        c.window = 5;
        c.full_every = 2;
        struct model *keeping = small_model(d, &c, &lim, 5, &flat);
        model_memory_estimate(d, &c, &lim, &kept);
        for (int k = 0, x = i / 2; k < 3; k++, x /= 3)
            lim.recompute[k] = (enum recompute)(x % 3);
        struct model *dropping = small_model(d, &c, &lim, 5, &flat2);
        model_memory_estimate(d, &c, &lim, &dropped);
        for (int k = 0; k < 3; k++)
            assert_true(lim.recompute[k] ? dropped.activations[k] < kept.activations[k]
                                         : dropped.activations[k] == kept.activations[k]);
        test_batch_make(&tb, &c, 3, 40, 3, 0, 0.1f, 77);
        float *want = train(keeping, &tb.b, want_sums), *got = train(dropping, &tb.b, sums);
        assert_int_equal(model_shared(dropping), i % 2);
        assert_same_bits("gradients", got, want, (size_t)model_weights(keeping)->total);
        assert_memory_equal(sums, want_sums, sizeof sums);
        test_batch_release(&tb);
        model_free(&keeping);
        model_free(&dropping);
        void *all[] = {flat, flat2, want, got};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            free(all[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_falls_back),
        cmocka_unit_test(test_recompute),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
