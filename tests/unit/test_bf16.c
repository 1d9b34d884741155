/*
 * bf16: rounding, products against a float64 twin of rounded operands, the SwiGLU, and a model's
 * losses and gradients against float32's.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "kernels/cpu/cpu.h"
#include "tests/unit/model_case.h"
#include "tests/unit/ops_check.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static float of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static double wide(bf16 x)
{
    return (double)of_bits((uint32_t)x << 16);
}

/* Of the two neighbours the nearer one, of equally near ones the even. */
static bf16 nearest(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bf16 low = (bf16)(bits >> 16), high = (bf16)(low + 1);
    double below = fabs((double)x - wide(low)), above = fabs(wide(high) - (double)x);
    return below < above || (below == above && !(low & 1)) ? low : high;
}

static void test_rounding(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    static const struct {
        uint32_t in;
        bf16 out;
    } edges[] = {{0, 0}, {0x80000000, 0x8000}, {0x7f800000, 0x7f80}, {0xff800000, 0xff80},
        {0x7f7fffff, 0x7f80}, {0x00000001, 0}, {0x00018000, 2}, {0x00008000, 0},
        {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0x7f800001, 0x7fc0},
        {0xffffffff, 0xffff}};
    for (size_t i = 0; i < COUNT(edges); i++) {
        float x = of_bits(edges[i].in);
        bf16 got;
        d->ops->to_bf16(d, &got, &x, 1);
        if (got != edges[i].out)
            fail_msg("%08x becomes %04x, expected %04x", edges[i].in, got, edges[i].out);
    }
    size_t n = 100003;
    float *x = random_floats(n, 3, 4);
    bf16 *got = mem_array(n, sizeof *got);
    d->ops->to_bf16(d, got, x, n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(got[i], nearest(x[i]));
    free(x);
    free(got);
}

/* -- products -- */
struct gemm_case {
    int m, n, k, pad; /* pad: how much wider than needed the rows are */
};
static const struct gemm_case gemm_cases[] = {{1, 1, 1, 0}, {1, 17, 33, 0}, {33, 1, 17, 3},
    {17, 33, 5, 1}, {64, 48, 96, 0}, {130, 70, 257, 2}, {5, 300, 64, 0}, {256, 256, 31, 5}};

static bf16 *random_bf16(struct device *d, size_t n, uint64_t key)
{
    float *x = random_floats(n, 1, key);
    bf16 *out = mem_array(n, sizeof *out);
    d->ops->to_bf16(d, out, x, n);
    free(x);
    return out;
}

static void check_product(struct bf16_product p, const struct gemm_case *g, int plain)
{
    struct device *d = test_device(2);
    bf16 *a = random_bf16(d, (size_t)(p.ta ? p.k : p.m) * (size_t)p.lda, 1);
    bf16 *b = random_bf16(d, (size_t)(p.tb ? p.n : p.k) * (size_t)p.ldb, 2);
    size_t nc = (size_t)p.m * (size_t)p.ldc;
    float *c = p.accumulate ? random_floats(nc, 1, 3) : filled_floats(nc, NAN);
    float *before = copied_floats(c, nc);
    double *want = mem_array((size_t)p.n, sizeof *want);
    p.a = a;
    p.b = b;
    p.c = c;
    if (plain)
        cpu_matmul_bf16_plain(d, &p);
    else
        d->ops->matmul_bf16(
            d, p.ta, p.tb, p.m, p.n, p.k, p.alpha, a, p.lda, b, p.ldb, p.accumulate, c, p.ldc);
    for (int i = 0; i < p.m; i++) {
        size_t row = (size_t)i * (size_t)p.ldc;
        for (int j = 0; j < p.n; j++) {
            double sum = 0;
            for (int x = 0; x < p.k; x++)
                sum += wide(a[p.ta ? x * p.lda + i : i * p.lda + x]) *
                       wide(b[p.tb ? j * p.ldb + x : x * p.ldb + j]);
            want[j] = (double)p.alpha * sum;
            want[j] += p.accumulate ? (double)before[row + (size_t)j] : 0;
        }
        assert_near("C", c + row, want, (size_t)p.n, 1e-5);
        assert_same_bits("padding", c + row + p.n, before + row + p.n, (size_t)g->pad);
    }
    void *all[] = {a, b, c, before, want};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_products(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(gemm_cases); i++)
        for (int kind = 0; kind < 16; kind++) {
            const struct gemm_case *g = &gemm_cases[i];
            int ta = kind & 1, tb = kind >> 1 & 1;
            struct bf16_product p = {.ta = ta,
                .tb = tb,
                .m = g->m,
                .n = g->n,
                .k = g->k,
                .alpha = kind & 8 ? 0.3f : 1,
                .lda = (ta ? g->m : g->k) + g->pad,
                .ldb = (tb ? g->k : g->n) + g->pad,
                .accumulate = kind >> 2 & 1,
                .ldc = g->n + g->pad};
            check_product(p, g, 0);
            check_product(p, g, 1);
        }
}

/* More kinds of products than the device keeps at a time, twice round. */
static void test_many_kinds(void **state)
{
    (void)state;
    static const struct gemm_case g = {9, 8, 7, 0};
    for (int i = 0; i < 50; i++) {
        struct bf16_product p = {.m = 9, .n = 8, .k = 7, .lda = 7, .ldb = 8, .ldc = 8};
        p.alpha = 1 + 0.125f * (float)(i % 25);
        check_product(p, &g, 0);
    }
}

/* The same bits wherever the operands lie. */
static void test_products_repeat(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    enum { M = 193, N = 130, K = 257, OFFSETS = 4 };
    bf16 *a = random_bf16(d, M * K, 1), *b = random_bf16(d, N * K, 2);
    bf16 *a2 = mem_array(M * K + OFFSETS, sizeof *a2), *b2 = mem_array(N * K + OFFSETS, sizeof *b2);
    float *c = filled_floats(M * N, NAN), *c2 = filled_floats(M * N, NAN);
    for (int kind = 0; kind < 4 * OFFSETS; kind++) {
        int ta = kind & 1, tb = kind >> 1 & 1, off = kind >> 2;
        memcpy(a2 + off, a, M * K * sizeof *a);
        memcpy(b2 + off, b, N * K * sizeof *b);
        d->ops->matmul_bf16(d, ta, tb, M, N, K, 1, a, ta ? M : K, b, tb ? K : N, 0, c, N);
        d->ops->matmul_bf16(
            d, ta, tb, M, N, K, 1, a2 + off, ta ? M : K, b2 + off, tb ? K : N, 0, c2, N);
        assert_same_bits("C", c, c2, M * N);
    }
    void *all[] = {a, b, a2, b2, c, c2};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_swiglu(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    static const size_t sizes[] = {1, 17, 70001};
    for (size_t s = 0; s < COUNT(sizes); s++) {
        size_t n = sizes[s];
        bf16 *gate = random_bf16(d, n, 1), *up = random_bf16(d, n, 2), *out = mem_array(n, 2);
        float *dout = random_floats(n, 1, 3), *dgate = copied_floats(dout, n),
              *dup = filled_floats(n, NAN);
        double *want_gate = mem_array(n, sizeof(double)), *want_up = mem_array(n, sizeof(double));
        d->ops->swiglu_fwd_bf16(d, out, gate, up, n);
        d->ops->swiglu_bwd_bf16(d, dgate, dup, dgate, gate, up, n); /* in place */
        for (size_t i = 0; i < n; i++) {
            double g = wide(gate[i]), u = wide(up[i]), sigma = 1 / (1 + exp(-g));
            assert_true(fabs(wide(out[i]) - g * sigma * u) <= fabs(g * sigma * u) / 250);
            want_gate[i] = (double)dout[i] * u * sigma * (1 + g * (1 - sigma));
            want_up[i] = (double)dout[i] * g * sigma;
        }
        assert_near("dgate", dgate, want_gate, n, 1e-6);
        assert_near("dup", dup, want_up, n, 1e-6);
        void *all[] = {gate, up, out, dout, dgate, dup, want_gate, want_up};
        for (size_t i = 0; i < COUNT(all); i++)
            free(all[i]);
    }
}

/* -- a model -- */

static float *train(struct model *m, const struct model_batch *b, double *sums)
{
    struct device *d = model_device(m);
    size_t bytes = (size_t)model_weights(m)->total * sizeof(float);
    float *g = mem_array(bytes, 1);
    d->ops->zero(d, model_grads(m), bytes);
    model_train(m, b, 1, 0.01f, sums);
    d->ops->download(d, g, model_grads(m), bytes);
    return g;
}

/* Operands have 8 bits, so that one is off by at most 2⁻⁹; through two layers and three passes a
 * loss stays within a hundredth, a gradient within a fiftieth (measured: 0.006). */
#define LOSS_LIMIT 0.01
#define GRAD_LIMIT 0.02

static void check_model(const struct model_config *c, int sharing, enum recompute recompute)
{
    struct device *d = test_device(2);
    struct model_limits lim = {.batch = 4,
        .seq = 60,
        .passes = 3,
        .train = 1,
        .prefix_sharing = sharing,
        .recompute = {recompute, recompute, recompute}};
    struct test_batch tb;
    double want_sums[3], sums[3], again_sums[3];
    float *flat, *flat2;
    struct model *f32 = small_model(d, c, &lim, 5, &flat);
    lim.precision = PRECISION_BF16;
    struct model *m = small_model(d, c, &lim, 5, &flat2);
    size_t total = (size_t)model_weights(m)->total;
    test_batch_make(&tb, c, 4, 60, 3, 0, 0.1f, 77);
    float *want = train(f32, &tb.b, want_sums), *got = train(m, &tb.b, sums),
          *again = train(m, &tb.b, again_sums);
    assert_int_equal(model_shared(m), sharing);
    for (int k = 0; k < 3; k++)
        if (!(fabs(sums[k] - want_sums[k]) <= LOSS_LIMIT * want_sums[k]))
            fail_msg("loss of pass %d: %g, float32 %g", k + 1, sums[k], want_sums[k]);
    double error = relative_error_f(got, want, total);
    print_message("gradients of bf16 against float32: %.2g\n", error);
    assert_true(error < GRAD_LIMIT && error > 1e-5); /* products were rounded indeed */
    assert_same_bits("gradients again", again, got, total);
    assert_memory_equal(sums, again_sums, sizeof sums);

    /* new weights are seen: the same as a model that had them from the start */
    float *scaled = copied_floats(flat, total);
    for (size_t i = 0; i < total; i++)
        scaled[i] *= 0.75f;
    d->ops->upload(d, model_params(m), scaled, total * sizeof *scaled);
    float *moved = train(m, &tb.b, sums);
    assert_true(relative_error_f(moved, got, total) > GRAD_LIMIT);
    test_batch_release(&tb);
    model_free(&f32);
    model_free(&m);
    void *all[] = {flat, flat2, want, got, again, scaled, moved};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_model(void **state)
{
    (void)state;
    for (int options = 0; options < 2; options++)
        for (int sharing = 0; sharing < 2; sharing++)
            for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_LAYER; level++) {
                struct model_config c = small_config();
                c.dim = 64;
                c.head_dim = 16;
                c.ffn = 160;
                c.vocab = 500;
                c.qk_norm = c.attn_gate = options;
                check_model(&c, sharing, (enum recompute)level);
            }
}

/* What the SwiGLU's inputs and the carried state give back, to the byte. */
static void test_memory(void **state)
{
    (void)state;
    struct device *d = test_device(2);
    struct model_config c = small_config();
    struct model_limits lim = {.batch = 8, .seq = 128, .passes = 2, .train = 1};
    struct model_memory f32, half;
    c.dim = 128;
    c.head_dim = 32;
    c.ffn = 352;
    model_memory_estimate(d, &c, &lim, &f32);
    lim.precision = PRECISION_BF16;
    model_memory_estimate(d, &c, &lim, &half);
    size_t n = 8 * 128, saved = n * (2 * (size_t)c.layers * (size_t)c.ffn + (size_t)c.dim) * 2;
    assert_int_equal(half.weights, f32.weights);
    assert_int_equal(half.gradients, f32.gradients);
    for (int k = 0; k < 2; k++)
        assert_int_equal(f32.activations[k] - half.activations[k], saved);
    print_message("a pass keeps %zu bytes, float32 %zu\n", half.activations[0], f32.activations[0]);
    lim.train = 0; /* without training precision asks for nothing */
    struct model_memory plain, same;
    model_memory_estimate(d, &c, &lim, &same);
    lim.precision = PRECISION_F32;
    model_memory_estimate(d, &c, &lim, &plain);
    assert_int_equal(same.total, plain.total);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_many_kinds),
        cmocka_unit_test(test_products_repeat),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
