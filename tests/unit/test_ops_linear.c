/* Matrix products, embedding and rotary embedding against float64 twins. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "tests/unit/ops_check.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* -- matmul -- */
struct gemm_case {
    int m, n, k, pad; /* pad: how much wider than needed the rows are */
};
static const struct gemm_case gemm_cases[] = {{1, 1, 1, 0}, {1, 17, 33, 0}, {33, 1, 17, 3},
    {17, 33, 5, 1}, {64, 48, 96, 0}, {130, 70, 257, 2}, {5, 300, 64, 0}, {256, 256, 31, 5}};

static double gemm_element(int ta, int tb, const struct gemm_case *c, const float *a, int lda,
    const float *b, int ldb, int i, int j)
{
    double s = 0.0;
    for (int p = 0; p < c->k; p++) {
        double x = (double)(ta ? a[(size_t)p * lda + i] : a[(size_t)i * lda + p]);
        double y = (double)(tb ? b[(size_t)j * ldb + p] : b[(size_t)p * ldb + j]);
        s += x * y;
    }
    return s;
}

/* beta 0 must overwrite whatever is there, NaN as well; the padding must stay as it was. */
static void check_gemm(int ta, int tb, const struct gemm_case *c, float alpha, float beta)
{
    struct device *d = test_device(2);
    int lda = (ta ? c->m : c->k) + c->pad, ldb = (tb ? c->k : c->n) + c->pad, ldc = c->n + c->pad;
    float *a = random_floats((size_t)(ta ? c->k : c->m) * (size_t)lda, 1.0f, 1);
    float *b = random_floats((size_t)(tb ? c->n : c->k) * (size_t)ldb, 1.0f, 2);
    size_t nc = (size_t)c->m * (size_t)ldc;
    float *out = beta != 0.0f ? random_floats(nc, 1.0f, 3) : filled_floats(nc, NAN);
    float *before = copied_floats(out, nc);
    double *want = mem_array((size_t)c->n, sizeof *want);
    d->ops->matmul(d, ta, tb, c->m, c->n, c->k, alpha, a, lda, b, ldb, beta, out, ldc);
    for (int i = 0; i < c->m; i++) {
        size_t row = (size_t)i * (size_t)ldc;
        for (int j = 0; j < c->n; j++) {
            double old = beta != 0.0f ? (double)beta * (double)before[row + (size_t)j] : 0.0;
            want[j] = (double)alpha * gemm_element(ta, tb, c, a, lda, b, ldb, i, j) + old;
        }
        assert_near("C", out + row, want, (size_t)c->n, 1e-5);
        assert_same_bits("padding", out + row + c->n, before + row + c->n, (size_t)c->pad);
    }
    free(a);
    free(b);
    free(out);
    free(before);
    free(want);
}

static void test_matmul(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(gemm_cases); i++) {
        for (int layout = 0; layout < 4; layout++) {
            check_gemm(layout & 1, layout >> 1, &gemm_cases[i], 1.0f, 0.0f);
            check_gemm(layout & 1, layout >> 1, &gemm_cases[i], 1.0f, 1.0f);
            check_gemm(layout & 1, layout >> 1, &gemm_cases[i], 0.3f, -0.7f);
        }
    }
}

/* The three products of a linear layer, at addresses of any alignment: the same bits. */
static void test_matmul_repeats(void **state)
{
    (void)state;
    const int m = 193, n = 130, k = 257;
    for (int threads = 1; threads <= 3; threads++) {
        struct device *d = test_device(threads);
        for (int layout = 0; layout < 4; layout++) {
            int ta = layout & 1, tb = layout >> 1;
            size_t na = (size_t)(m * k), nb = (size_t)(n * k), nc = (size_t)(m * n);
            float *a = random_floats(na + 4, 1.0f, 1), *b = random_floats(nb + 4, 1.0f, 2);
            float *c[2] = {filled_floats(nc + 4, NAN), filled_floats(nc + 4, NAN)};
            for (int off = 0; off < 4; off++) {
                memmove(a + off, a + (off ? off - 1 : 0), na * sizeof *a);
                memmove(b + off, b + (off ? off - 1 : 0), nb * sizeof *b);
                float *out = c[off > 0] + off;
                d->ops->matmul(d, ta, tb, m, n, k, 1.0f, a + off, ta ? m : k, b + off, tb ? k : n,
                    0.0f, out, n);
                assert_same_bits("C", c[0], out, nc);
            }
            free(a);
            free(b);
            free(c[0]);
            free(c[1]);
        }
    }
}

/* -- embedding -- */
struct embed_case {
    int n, dim, vocab;
};
static const struct embed_case embed_cases[] = {
    {1, 1, 1}, {17, 33, 5}, {33, 8, 100}, {700, 48, 256}, {300, 250, 7}};

static void check_embed(const struct embed_case *c)
{
    size_t no = (size_t)c->n * (size_t)c->dim, nt = (size_t)c->vocab * (size_t)c->dim;
    float *table = random_floats(nt, 1.0f, 1), *dout = random_floats(no, 1.0f, 2);
    float *out = filled_floats(no, NAN), *dtable = random_floats(nt, 1.0f, 3);
    double *want_out = mem_array(no, sizeof *want_out), *want_dtable = as_doubles(dtable, nt);
    int32_t *tokens = mem_array((size_t)c->n, sizeof *tokens);
    for (int i = 0; i < c->n; i++) {
        tokens[i] = (int32_t)((unsigned)i * 2654435761u % (unsigned)c->vocab);
        for (int x = 0; x < c->dim; x++) {
            size_t at = (size_t)i * (size_t)c->dim + (size_t)x;
            size_t from = (size_t)tokens[i] * (size_t)c->dim + (size_t)x;
            want_out[at] = (double)table[from];
            want_dtable[from] += (double)dout[at];
        }
    }
    float *again[4];
    for (int threads = 1; threads <= 3; threads++) {
        struct device *d = test_device(threads);
        again[threads] = copied_floats(dtable, nt);
        d->ops->embed_fwd(d, out, tokens, table, c->n, c->dim, c->vocab);
        assert_near("out", out, want_out, no, 0.0);
        d->ops->embed_bwd(d, again[threads], tokens, dout, c->n, c->dim, c->vocab);
        assert_near("dtable", again[threads], want_dtable, nt, 1e-6);
        assert_same_bits("dtable", again[1], again[threads], nt);
    }
    void *all[] = {
        table, dout, out, dtable, want_out, want_dtable, tokens, again[1], again[2], again[3]};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_embedding(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(embed_cases); i++)
        check_embed(&embed_cases[i]);
}

/* -- rotary embedding -- */
struct rope_case {
    int n, heads, head_dim;
    double theta;
};
static const struct rope_case rope_cases[] = {
    {1, 1, 2, 1e4}, {17, 3, 8, 1e4}, {33, 2, 12, 5e5}, {200, 4, 64, 1e4}};
enum { MAX_POS = 301 };

static void check_rope(const struct rope_case *c)
{
    struct device *d = test_device(2);
    int half = c->head_dim / 2;
    size_t width = (size_t)(c->heads * c->head_dim), n = (size_t)c->n * width;
    size_t table = (size_t)MAX_POS * (size_t)half;
    float *cs = filled_floats(table, NAN), *sn = filled_floats(table, NAN);
    float *x = random_floats(n, 1.0f, 5), *start = copied_floats(x, n);
    double *want = mem_array(n, sizeof *want), *back = as_doubles(start, n);
    int32_t *pos = mem_array((size_t)c->n, sizeof *pos);
    rope_table(cs, sn, MAX_POS, c->head_dim, c->theta);
    for (int i = 0; i < c->n; i++) {
        pos[i] = i * 37 % MAX_POS;
        for (int h = 0; h < c->heads; h++) {
            size_t at = (size_t)i * width + (size_t)(h * c->head_dim);
            for (int j = 0; j < half; j++) {
                double angle = pos[i] * pow(c->theta, -2.0 * j / c->head_dim);
                double lo = back[at + (size_t)j], hi = back[at + (size_t)(j + half)];
                want[at + (size_t)j] = lo * cos(angle) - hi * sin(angle);
                want[at + (size_t)(j + half)] = hi * cos(angle) + lo * sin(angle);
            }
        }
    }
    d->ops->rope(d, x, pos, cs, sn, c->n, c->heads, c->head_dim, 0);
    assert_near("turned", x, want, n, 1e-6);
    d->ops->rope(d, x, pos, cs, sn, c->n, c->heads, c->head_dim, 1);
    assert_near("turned back", x, back, n, 1e-6); /* a rotation's transpose is its inverse */
    void *all[] = {cs, sn, x, start, want, back, pos};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void test_rope(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(rope_cases); i++)
        check_rope(&rope_cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_matmul_repeats),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_rope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
