/* Attention against a naive float64 twin: forward, backward, the cached form, determinism. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/rng.h"
#include "kernels/cpu/attn_block.h"
#include "tests/unit/ops_check.h"

struct shape_case {
    int batch, seq, heads, kv_heads, head_dim, doc_tokens;
};

/* doc_tokens 0: one document; 1: every token its own document. */
static const struct shape_case small_cases[] = {
    {1, 1, 1, 1, 8, 0},
    {2, 3, 2, 1, 12, 2},
    {3, 17, 2, 2, 8, 0},
    {2, 17, 6, 2, 6, 5},
    {1, 33, 2, 1, 12, 7},
    {1, 9, 1, 1, 2, 1},
};
/* Longer than the blocks the work is cut into. */
static const struct shape_case large_cases[] = {
    {1, 64, 2, 1, 64, 0}, {2, 129, 2, 2, 8, 0}, {1, 200, 4, 2, 12, 30}, {1, 300, 2, 1, 16, 0},
    {1, 300, 3, 1, 16, 150}, {2, 257, 1, 1, 10, 9},
    {1, 130, 2, 1, 54, 40}, /* two vectors and a rest */
};
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* -- the twin: whole score rows, in double -- */
struct twin {
    struct attn_shape s;
    const int32_t *first;
    double *q, *k, *v, *dout, *out, *lse, *dq, *dk, *dv;
};

static const double *key_row(const struct twin *w, const double *x, int b, int t, int h)
{
    int kv = h / (w->s.heads / w->s.kv_heads);
    return x + (((size_t)b * w->s.seq + t) * w->s.kv_heads + kv) * w->s.head_dim;
}

static double dot(const double *a, const double *b, int n)
{
    double s = 0.0;
    for (int i = 0; i < n; i++)
        s += a[i] * b[i];
    return s;
}

/* Probabilities of query (b, t, h) over keys first … t; returns the log-sum-exp. */
static double twin_row(const struct twin *w, int b, int t, int h, double *p)
{
    int lo = w->first[b * w->s.seq + t], hd = w->s.head_dim;
    const double *q = w->q + (((size_t)b * w->s.seq + t) * w->s.heads + h) * hd;
    double max = -INFINITY, sum = 0.0;
    for (int j = lo; j <= t; j++) {
        p[j] = dot(q, key_row(w, w->k, b, j, h), hd) / sqrt(hd);
        max = fmax(max, p[j]);
    }
    for (int j = lo; j <= t; j++)
        sum += exp(p[j] - max);
    for (int j = lo; j <= t; j++)
        p[j] = exp(p[j] - max) / sum;
    return max + log(sum);
}

static void twin_fwd(const struct twin *w)
{
    const struct attn_shape *s = &w->s;
    double *p = mem_array((size_t)s->seq, sizeof *p);
    for (int b = 0; b < s->batch; b++) {
        for (int t = 0; t < s->seq; t++) {
            for (int h = 0; h < s->heads; h++) {
                double *o = w->out + (((size_t)b * s->seq + t) * s->heads + h) * s->head_dim;
                w->lse[((size_t)b * s->heads + h) * s->seq + t] = twin_row(w, b, t, h, p);
                for (int c = 0; c < s->head_dim; c++) {
                    o[c] = 0.0;
                    for (int j = w->first[b * s->seq + t]; j <= t; j++)
                        o[c] += p[j] * key_row(w, w->v, b, j, h)[c];
                }
            }
        }
    }
    free(p);
}

static void twin_bwd_row(const struct twin *w, int b, int t, int h, double *p)
{
    const struct attn_shape *s = &w->s;
    int hd = s->head_dim, lo = w->first[b * s->seq + t];
    size_t at = (((size_t)b * s->seq + t) * s->heads + h) * hd;
    twin_row(w, b, t, h, p);
    double mean = 0.0;
    for (int j = lo; j <= t; j++)
        mean += p[j] * dot(w->dout + at, key_row(w, w->v, b, j, h), hd);
    for (int j = lo; j <= t; j++) {
        const double *k = key_row(w, w->k, b, j, h), *v = key_row(w, w->v, b, j, h);
        double ds = p[j] * (dot(w->dout + at, v, hd) - mean) / sqrt(hd);
        double *dk = w->dk + (k - w->k), *dv = w->dv + (v - w->v);
        for (int c = 0; c < hd; c++) {
            w->dq[at + c] += ds * k[c];
            dk[c] += ds * w->q[at + c];
            dv[c] += p[j] * w->dout[at + c];
        }
    }
}

static void twin_bwd(const struct twin *w)
{
    const struct attn_shape *s = &w->s;
    double *p = mem_array((size_t)s->seq, sizeof *p);
    for (int b = 0; b < s->batch; b++)
        for (int t = 0; t < s->seq; t++)
            for (int h = 0; h < s->heads; h++)
                twin_bwd_row(w, b, t, h, p);
    free(p);
}

/* -- one case: inputs in float, the twin's copies, and what the op gives -- */
struct run {
    struct attn_shape s;
    size_t nq, nkv, nlse;
    int32_t *first;
    float *q, *k, *v, *dout, *out, *lse, *dq, *dk, *dv;
    struct twin w;
};

static void run_init(struct run *r, const struct shape_case *c)
{
    memset(r, 0, sizeof *r);
    r->s = (struct attn_shape){c->batch, c->seq, c->heads, c->kv_heads, c->head_dim};
    size_t n = (size_t)c->batch * (size_t)c->seq;
    r->nq = n * (size_t)(c->heads * c->head_dim);
    r->nkv = n * (size_t)(c->kv_heads * c->head_dim);
    r->nlse = n * (size_t)c->heads;
    r->first = random_first(c->batch, c->seq, c->doc_tokens, 11);
    r->q = random_floats(r->nq, 3.0f, 1);
    r->k = random_floats(r->nkv, 3.0f, 2);
    r->v = random_floats(r->nkv, 1.0f, 3);
    r->dout = random_floats(r->nq, 1.0f, 4);
    r->out = filled_floats(r->nq, NAN);
    r->lse = filled_floats(r->nlse, NAN);
    r->dq = filled_floats(r->nq, NAN);
    r->dk = filled_floats(r->nkv, NAN);
    r->dv = filled_floats(r->nkv, NAN);
    r->w = (struct twin){.s = r->s,
        .first = r->first,
        .q = as_doubles(r->q, r->nq),
        .k = as_doubles(r->k, r->nkv),
        .v = as_doubles(r->v, r->nkv),
        .dout = as_doubles(r->dout, r->nq),
        .out = mem_array(r->nq, sizeof(double)),
        .lse = mem_array(r->nlse, sizeof(double)),
        .dq = mem_array(r->nq, sizeof(double)),
        .dk = mem_array(r->nkv, sizeof(double)),
        .dv = mem_array(r->nkv, sizeof(double))};
}

static void run_release(struct run *r)
{
    void *all[] = {r->first, r->q, r->k, r->v, r->dout, r->out, r->lse, r->dq, r->dk, r->dv, r->w.q,
        r->w.k, r->w.v, r->w.dout, r->w.out, r->w.lse, r->w.dq, r->w.dk, r->w.dv};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void run_fwd(struct run *r, int threads)
{
    struct device *d = test_device(threads);
    d->ops->attn_fwd(d, r->out, r->lse, r->q, r->k, r->v, r->first, &r->s);
}

static void run_bwd(struct run *r, int threads)
{
    struct device *d = test_device(threads);
    float *work = filled_floats(d->ops->attn_bwd_work(d, &r->s) + 1, NAN);
    d->ops->attn_bwd(
        d, r->dq, r->dk, r->dv, r->dout, r->out, r->lse, r->q, r->k, r->v, r->first, &r->s, work);
    free(work);
}

static void check_against_twin(const struct shape_case *c)
{
    struct run r;
    run_init(&r, c);
    run_fwd(&r, 2);
    twin_fwd(&r.w);
    assert_near("out", r.out, r.w.out, r.nq, 2e-6);
    assert_near("lse", r.lse, r.w.lse, r.nlse, 2e-6);
    run_bwd(&r, 2);
    twin_bwd(&r.w);
    assert_near("dq", r.dq, r.w.dq, r.nq, 5e-6);
    assert_near("dk", r.dk, r.w.dk, r.nkv, 5e-6);
    assert_near("dv", r.dv, r.w.dv, r.nkv, 5e-6);
    run_release(&r);
}

static void test_matches_twin(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(small_cases); i++)
        check_against_twin(&small_cases[i]);
    for (size_t i = 0; i < COUNT(large_cases); i++)
        check_against_twin(&large_cases[i]);
}

static double twin_loss(void *ctx)
{
    struct run *r = ctx;
    twin_fwd(&r->w);
    double sum = 0.0;
    for (size_t i = 0; i < r->nq; i++)
        sum += r->w.out[i] * r->w.dout[i];
    return sum;
}

static void test_backward_is_the_derivative(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(small_cases); i++) {
        struct run r;
        run_init(&r, &small_cases[i]);
        run_fwd(&r, 2);
        run_bwd(&r, 2);
        double *grad = mem_array(r.nq > r.nkv ? r.nq : r.nkv, sizeof *grad);
        central_differences(twin_loss, &r, r.w.q, r.nq, 1e-5, grad);
        assert_near("dq", r.dq, grad, r.nq, 1e-5);
        central_differences(twin_loss, &r, r.w.k, r.nkv, 1e-5, grad);
        assert_near("dk", r.dk, grad, r.nkv, 1e-5);
        central_differences(twin_loss, &r, r.w.v, r.nkv, 1e-5, grad);
        assert_near("dv", r.dv, grad, r.nkv, 1e-5);
        free(grad);
        run_release(&r);
    }
}

static void test_large_scores_stay_finite(void **state)
{
    (void)state;
    struct run r;
    run_init(&r, &large_cases[2]);
    for (size_t i = 0; i < r.nq; i++)
        r.w.q[i] = (double)(r.q[i] *= 100.0f);
    run_fwd(&r, 2);
    twin_fwd(&r.w);
    assert_near("out", r.out, r.w.out, r.nq, 2e-3); /* scores near 3000 carry errors near 1e-4 */
    run_bwd(&r, 2);
    for (size_t i = 0; i < r.nkv; i++)
        assert_true(isfinite(r.dk[i]) && isfinite(r.dv[i]));
    run_release(&r);
}

static void test_repeats_bit_for_bit(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(large_cases); i++) {
        struct run a;
        run_init(&a, &large_cases[i]);
        run_fwd(&a, 2);
        run_bwd(&a, 2);
        for (int threads = 1; threads <= 3; threads++) {
            struct run b;
            run_init(&b, &large_cases[i]);
            run_fwd(&b, threads);
            run_bwd(&b, threads);
            assert_same_bits("out", a.out, b.out, a.nq);
            assert_same_bits("lse", a.lse, b.lse, a.nlse);
            assert_same_bits("dq", a.dq, b.dq, a.nq);
            assert_same_bits("dk", a.dk, b.dk, a.nkv);
            assert_same_bits("dv", a.dv, b.dv, a.nkv);
            run_release(&b);
        }
        run_release(&a);
    }
}

/*
 * The rows of a batch put into slots of a cache, in pieces: what the cached form gives for the last
 * rows is what the whole computation gives. Slot b + 1 holds batch row b; slot 0 stays NaN and must
 * not be read.
 */
static void check_cached(const struct shape_case *c, int piece)
{
    struct run r;
    run_init(&r, c);
    run_fwd(&r, 2);
    struct device *d = test_device(2);
    int capacity = c->seq + 5, n = 0;
    size_t kv_row = (size_t)(c->kv_heads * c->head_dim), q_row = (size_t)(c->heads * c->head_dim);
    size_t cache = (size_t)(c->batch + 1) * (size_t)capacity * kv_row;
    float *ck = filled_floats(cache, NAN), *cv = filled_floats(cache, NAN);
    size_t rows = (size_t)c->batch * (size_t)c->seq;
    float *q = mem_array(rows * q_row, sizeof *q), *out = filled_floats(rows * q_row, NAN);
    float *k = mem_array(rows * kv_row, sizeof *k), *v = mem_array(rows * kv_row, sizeof *v);
    double *want = mem_array(rows * q_row, sizeof *want);
    int32_t *slot = mem_array(rows, sizeof *slot), *pos = mem_array(rows, sizeof *pos);
    int32_t *first = mem_array(rows, sizeof *first);
    struct attn_shape s = {0, capacity, c->heads, c->kv_heads, c->head_dim};
    for (int t0 = 0; t0 < c->seq; t0 += piece) {
        n = 0;
        for (int b = 0; b < c->batch; b++) {
            for (int t = t0; t < c->seq && t < t0 + piece; t++, n++) {
                size_t from = (size_t)b * (size_t)c->seq + (size_t)t;
                slot[n] = b + 1;
                pos[n] = t;
                first[n] = r.first[from];
                memcpy(q + (size_t)n * q_row, r.q + from * q_row, q_row * sizeof *q);
                memcpy(k + (size_t)n * kv_row, r.k + from * kv_row, kv_row * sizeof *k);
                memcpy(v + (size_t)n * kv_row, r.v + from * kv_row, kv_row * sizeof *v);
                for (size_t i = 0; i < q_row; i++)
                    want[(size_t)n * q_row + i] = (double)r.out[from * q_row + i];
            }
        }
        d->ops->cache_put(d, ck, cv, k, v, slot, pos, n, &s);
        d->ops->attn_cached(d, out, q, ck, cv, slot, pos, first, n, &s);
        assert_near("cached out", out, want, (size_t)n * q_row, 2e-6);
    }
    assert_true(isnan(ck[0]) && isnan(cv[0]));
    void *all[] = {ck, cv, q, out, k, v, want, slot, pos, first};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    run_release(&r);
}

static void test_cached_equals_whole(void **state)
{
    (void)state;
    const int pieces[] = {1, 3, 100, 1000};
    for (size_t p = 0; p < COUNT(pieces); p++) {
        for (size_t i = 0; i < COUNT(small_cases); i++)
            check_cached(&small_cases[i], pieces[p]);
        for (size_t i = 2; i < 5; i++)
            check_cached(&large_cases[i], pieces[p]);
    }
}

/* Rows in any order and with any `first`: row i is position i of batch row i mod B, then all
 * backwards. */
static void check_cached_any_order(const struct shape_case *c)
{
    struct run r;
    run_init(&r, c);
    struct device *d = test_device(2);
    size_t q_row = (size_t)(c->heads * c->head_dim), n = 2 * (size_t)c->seq;
    float *q = mem_array(n * q_row, sizeof *q), *out = filled_floats(n * q_row, NAN);
    double *want = mem_array(n * q_row, sizeof *want);
    int32_t *slot = mem_array(n, sizeof *slot), *pos = mem_array(n, sizeof *pos);
    int32_t *first = mem_array(n, sizeof *first);
    for (int b = 0; b < c->batch; b++)
        for (int t = 0; t < c->seq; t++)
            r.first[b * c->seq + t] = (int32_t)(rng_u64(21, (uint64_t)t) % (uint64_t)(t + 1));
    twin_fwd(&r.w);
    for (size_t i = 0; i < n; i++) {
        pos[i] = (int32_t)(i < n / 2 ? i : n - 1 - i);
        slot[i] = (int32_t)(i < n / 2 ? i % (size_t)c->batch : 0);
        size_t from = (size_t)slot[i] * (size_t)c->seq + (size_t)pos[i];
        first[i] = r.first[from];
        memcpy(q + i * q_row, r.q + from * q_row, q_row * sizeof *q);
        memcpy(want + i * q_row, r.w.out + from * q_row, q_row * sizeof *want);
    }
    struct attn_shape s = {0, c->seq, c->heads, c->kv_heads, c->head_dim};
    d->ops->attn_cached(d, out, q, r.k, r.v, slot, pos, first, (int)n, &s);
    assert_near("cached out", out, want, n * q_row, 2e-6);
    void *all[] = {q, out, want, slot, pos, first};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    run_release(&r);
}

static void test_cached_any_order(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(small_cases); i++)
        check_cached_any_order(&small_cases[i]);
    for (size_t i = 0; i < 3; i++)
        check_cached_any_order(&large_cases[i]);
}

/* -- some of the queries, compacted -- */

/* One query in `keep` of each batch row, and none of batch row 1. */
struct chosen {
    struct attn_rows r;
    int32_t *rows, *starts, *first;
    float *q, *dout, *out, *lse, *dq;
};

static void chosen_init(struct chosen *c, struct run *r, int keep)
{
    int seq = r->s.seq, n = 0;
    size_t row = (size_t)(r->s.heads * r->s.head_dim), all = (size_t)(r->s.batch * seq);
    *c = (struct chosen){.rows = mem_array(all, sizeof(int32_t)),
        .starts = mem_array((size_t)r->s.batch + 1, sizeof(int32_t)),
        .first = mem_array(all, sizeof(int32_t)),
        .q = mem_array(r->nq, sizeof(float)),
        .dout = mem_array(r->nq, sizeof(float)),
        .out = filled_floats(r->nq, NAN),
        .lse = filled_floats(r->nlse, NAN),
        .dq = filled_floats(r->nq, NAN)};
    for (int i = 0; i < (int)all; i++) {
        if (i % seq == 0)
            c->starts[i / seq] = n;
        if (i / seq == 1 || rng_u64(31, (uint64_t)i) % (uint64_t)keep != 0) {
            memset(r->dout + (size_t)i * row, 0, row * sizeof(float));
            memset(r->w.dout + (size_t)i * row, 0, row * sizeof(double));
            continue;
        }
        memcpy(c->q + (size_t)n * row, r->q + (size_t)i * row, row * sizeof(float));
        memcpy(c->dout + (size_t)n * row, r->dout + (size_t)i * row, row * sizeof(float));
        c->first[n] = r->first[i];
        c->rows[n++] = i;
    }
    c->starts[r->s.batch] = n;
    c->r = (struct attn_rows){n, c->rows, c->starts, c->first};
}

static void chosen_release(struct chosen *c)
{
    void *all[] = {c->rows, c->starts, c->first, c->q, c->dout, c->out, c->lse, c->dq};
    for (size_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

static void chosen_run(struct chosen *c, struct run *r, int threads)
{
    struct device *d = test_device(threads);
    float *work = filled_floats(d->ops->attn_rows_bwd_work(d, &r->s) + 1, NAN);
    d->ops->attn_rows_fwd(d, c->out, c->lse, c->q, r->k, r->v, &c->r, &r->s);
    d->ops->attn_rows_bwd(
        d, c->dq, r->dk, r->dv, c->dout, c->out, c->lse, c->q, r->k, r->v, &c->r, &r->s, work);
    free(work);
}

/* The chosen rows of the twin's whole output and gradient. */
static void check_chosen(const struct chosen *c, const struct run *r)
{
    size_t row = (size_t)(r->s.heads * r->s.head_dim), n = (size_t)c->r.n;
    double *out = mem_array(n * row, sizeof *out), *dq = mem_array(n * row, sizeof *dq);
    double *lse = mem_array(n * (size_t)r->s.heads, sizeof *lse);
    for (size_t i = 0; i < n; i++) {
        size_t at = (size_t)c->rows[i], seq = (size_t)r->s.seq, heads = (size_t)r->s.heads;
        memcpy(out + i * row, r->w.out + at * row, row * sizeof *out);
        memcpy(dq + i * row, r->w.dq + at * row, row * sizeof *dq);
        for (size_t h = 0; h < heads; h++)
            lse[h * n + i] = r->w.lse[(at / seq * heads + h) * seq + at % seq];
    }
    assert_near("out of chosen", c->out, out, n * row, 2e-6);
    assert_near("lse of chosen", c->lse, lse, n * (size_t)r->s.heads, 2e-6);
    assert_near("dq of chosen", c->dq, dq, n * row, 5e-6);
    assert_near("dk by chosen", r->dk, r->w.dk, r->nkv, 5e-6);
    assert_near("dv by chosen", r->dv, r->w.dv, r->nkv, 5e-6);
    assert_true(n * row == r->nq || isnan(c->out[n * row]));
    free(out);
    free(dq);
    free(lse);
}

static void check_rows(const struct shape_case *sc, int keep)
{
    struct run r;
    struct chosen c, again;
    run_init(&r, sc);
    chosen_init(&c, &r, keep);
    twin_fwd(&r.w);
    twin_bwd(&r.w);
    chosen_run(&c, &r, 2);
    check_chosen(&c, &r);
    for (int threads = 1; threads <= 3; threads++) {
        float *dk = copied_floats(r.dk, r.nkv), *dv = copied_floats(r.dv, r.nkv);
        chosen_init(&again, &r, keep);
        chosen_run(&again, &r, threads);
        assert_same_bits("out", c.out, again.out, r.nq);
        assert_same_bits("dq", c.dq, again.dq, r.nq);
        assert_same_bits("dk", dk, r.dk, r.nkv);
        assert_same_bits("dv", dv, r.dv, r.nkv);
        chosen_release(&again);
        free(dk);
        free(dv);
    }
    chosen_release(&c);
    run_release(&r);
}

static void test_rows_equal_whole(void **state)
{
    (void)state;
    for (int keep = 1; keep <= 5; keep += 2) {
        for (size_t i = 0; i < COUNT(small_cases); i++)
            check_rows(&small_cases[i], keep);
        for (size_t i = 0; i < COUNT(large_cases); i++)
            check_rows(&large_cases[i], keep);
    }
}

/* The code for processors without AVX-512, on any. */
static void test_avx2_matches_twin(void **state)
{
    cpu_attn_block_choose(&cpu_attn_block_v3);
    test_matches_twin(state);
    test_cached_equals_whole(state);
    test_rows_equal_whole(state);
    cpu_attn_block_choose(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_equal_whole),
        cmocka_unit_test(test_matches_twin),
        cmocka_unit_test(test_avx2_matches_twin),
        cmocka_unit_test(test_backward_is_the_derivative),
        cmocka_unit_test(test_large_scores_stay_finite),
        cmocka_unit_test(test_repeats_bit_for_bit),
        cmocka_unit_test(test_cached_equals_whole),
        cmocka_unit_test(test_cached_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
