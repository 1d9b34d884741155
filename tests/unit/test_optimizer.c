/* The optimizers against a float64 twin, their groups, clipping, the skipped update, and saving. */
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/rng.h"
#include "kernels/muon.h"
#include "tests/unit/temp_dir.h"
#include "trainer/optimizer.h"

#define TOTAL 160

/* Padding between tensors, two neighbours of one group, and each group in two places. */
static struct weight items[] = {
    {.name = "embed", .ndim = 2, .shape = {5, 6}, .count = 30, .offset = 0, .group = WEIGHT_VECTOR},
    {.name = "norm", .ndim = 1, .shape = {6}, .count = 6, .offset = 32, .group = WEIGHT_VECTOR},
    {.name = "q", .ndim = 2, .shape = {4, 6}, .count = 24, .offset = 48, .group = WEIGHT_MATRIX},
    {.name = "k", .ndim = 2, .shape = {3, 5}, .count = 15, .offset = 80, .group = WEIGHT_MATRIX},
    {.name = "last", .ndim = 1, .shape = {7}, .count = 7, .offset = 96, .group = WEIGHT_VECTOR},
    {.name = "w_u", .ndim = 2, .shape = {4, 4}, .count = 16, .offset = 112, .group = WEIGHT_FUSION},
    {.name = "w_g", .ndim = 2, .shape = {4, 4}, .count = 16, .offset = 128, .group = WEIGHT_FUSION},
    {.name = "down",
        .ndim = 2,
        .shape = {6, 2},
        .count = 12,
        .offset = 144,
        .group = WEIGHT_MATRIX},
};
static const struct weight_table table = {items, sizeof items / sizeof *items, TOTAL};
static const struct optimizer_settings settings = {.rest_lr_scale = 0.5,
    .momentum = 0.9,
    .muon_beta2 = 0.8,
    .beta1 = 0.9,
    .beta2 = 0.95,
    .eps = 1e-8,
    .weight_decay = 0.1,
    .clip_norm = 1.0,
    .fusion_lr_scale = 0.3};

struct fixture {
    struct device *device;
    struct optimizer *optimizer;
    float *params, *grads;
};

static struct fixture fixture_new(enum optim_kind kind)
{
    struct fixture f = {0};
    struct err e;
    struct optimizer_settings s = settings;
    s.kind = kind;
    assert_int_equal(device_cpu_new(1, &f.device, &e), 0);
    assert_int_equal(optimizer_new(f.device, &table, &s, &f.optimizer, &e), 0);
    f.params = f.device->ops->alloc(f.device, TOTAL * sizeof(float));
    f.grads = f.device->ops->alloc(f.device, TOTAL * sizeof(float));
    return f;
}

static void fixture_free(struct fixture *f)
{
    f->device->ops->free(f->device, f->params);
    f->device->ops->free(f->device, f->grads);
    optimizer_free(&f->optimizer);
    device_free(&f->device);
}

/* Values everywhere but in the padding, which must stay zero. */
static void fill(float *flat, uint64_t key, float scale)
{
    memset(flat, 0, TOTAL * sizeof *flat);
    for (int i = 0; i < table.count; i++)
        for (int64_t k = 0; k < items[i].count; k++)
            flat[items[i].offset + k] =
                scale * (float)rng_normal(key, (uint64_t)(items[i].offset + k));
}

static void upload(struct fixture *f, float *dst, const float *host)
{
    f->device->ops->upload(f->device, dst, host, TOTAL * sizeof(float));
}

static void download(struct fixture *f, float *host, const float *src)
{
    f->device->ops->download(f->device, host, src, TOTAL * sizeof(float));
}

/* -- the twin: the same formulas in double, tensor by tensor, nothing shared with the code under
 * test */
struct twin {
    enum optim_kind kind;
    double w[TOTAL], m[TOTAL], v[TOTAL]; /* of a NorMuon matrix v's first numbers, one a row */
    int t[3];
};

static double twin_norm(const float *g, int passes)
{
    double sum = 0;
    for (int i = 0; i < table.count; i++)
        for (int64_t k = 0; k < items[i].count; k++)
            if (items[i].group != WEIGHT_FUSION || passes > 1)
                sum += (double)g[items[i].offset + k] * g[items[i].offset + k];
    return sqrt(sum);
}

/* x (r, c), by A = X Xᵀ whatever the shape: that X (Xᵀ X) = (X Xᵀ) X is what the code relies on. */
static void twin_orthogonalize(double *x, int r, int c)
{
    double norm = 0, a[36] = {0}, b[36] = {0}, y[36] = {0};
    for (int i = 0; i < r * c; i++)
        norm += x[i] * x[i];
    for (int i = 0; i < r * c; i++)
        x[i] /= sqrt(norm) + 1e-7;
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i < r; i++)
            for (int j = 0; j < r; j++) {
                a[i * r + j] = 0;
                for (int k = 0; k < c; k++)
                    a[i * r + j] += x[i * c + k] * x[j * c + k];
            }
        for (int i = 0; i < r; i++)
            for (int j = 0; j < r; j++) {
                b[i * r + j] = -4.7750 * a[i * r + j];
                for (int k = 0; k < r; k++)
                    b[i * r + j] += 2.0315 * a[i * r + k] * a[k * r + j];
            }
        for (int i = 0; i < r; i++)
            for (int j = 0; j < c; j++) {
                y[i * c + j] = 3.4445 * x[i * c + j];
                for (int k = 0; k < r; k++)
                    y[i * c + j] += b[i * r + k] * x[k * c + j];
            }
        memcpy(x, y, sizeof(double) * (size_t)(r * c));
    }
}

static void twin_even_rows(double *x, double *v, int r, int c)
{
    double before = 0, after = 0;
    for (int i = 0; i < r; i++) {
        double mean = 0;
        for (int j = 0; j < c; j++)
            mean += x[i * c + j] * x[i * c + j] / c;
        before += mean;
        v[i] = 0.8 * v[i] + 0.2 * mean;
        for (int j = 0; j < c; j++) {
            x[i * c + j] /= sqrt(v[i]);
            after += x[i * c + j] * x[i * c + j] / c;
        }
    }
    for (int i = 0; i < r * c; i++)
        x[i] *= sqrt(before / after);
}

static void twin_matrix(
    struct twin *t, const struct weight *p, const float *g, double lr, double clip)
{
    double x[36] = {0}, *w = t->w + p->offset, *m = t->m + p->offset;
    int r = (int)p->shape[0], c = (int)p->shape[1];
    for (int i = 0; i < r * c; i++) {
        double grad = g[p->offset + i] * clip;
        m[i] += 0.1 * (grad - m[i]);
        x[i] = grad + 0.9 * (m[i] - grad);
    }
    twin_orthogonalize(x, r, c);
    if (t->kind == OPTIM_NORMUON)
        twin_even_rows(x, t->v + p->offset, r, c);
    for (int i = 0; i < r * c; i++)
        w[i] -= lr * (0.1 * w[i] + (r > c ? sqrt((double)r / c) : 1) * x[i]);
}

static void twin_update(struct twin *t, const float *g, double lr, int passes)
{
    double norm = twin_norm(g, passes), clip = norm > 1.0 ? 1.0 / norm : 1.0;
    t->t[WEIGHT_MATRIX]++;
    t->t[WEIGHT_VECTOR]++;
    t->t[WEIGHT_FUSION] += passes > 1;
    for (int i = 0; i < table.count; i++) {
        int group = items[i].group;
        if (group == WEIGHT_FUSION && passes == 1)
            continue;
        if (group == WEIGHT_MATRIX && t->kind != OPTIM_ADAMW) {
            twin_matrix(t, &items[i], g, lr, clip);
            continue;
        }
        double rate = group == WEIGHT_MATRIX ? lr : group == WEIGHT_FUSION ? 0.15 * lr : 0.5 * lr;
        double decay = group == WEIGHT_MATRIX ? 0.1 : 0.0;
        for (int64_t k = items[i].offset; k < items[i].offset + items[i].count; k++) {
            double x = g[k] * clip;
            t->m[k] = 0.9 * t->m[k] + 0.1 * x;
            t->v[k] = 0.95 * t->v[k] + 0.05 * x * x;
            double mhat = t->m[k] / (1 - pow(0.9, t->t[group]));
            double vhat = t->v[k] / (1 - pow(0.95, t->t[group]));
            t->w[k] -= rate * (mhat / (sqrt(vhat) + 1e-8) + decay * t->w[k]);
        }
    }
}

static void compare(struct fixture *f, const struct twin *t)
{
    float w[TOTAL];
    download(f, w, f->params);
    for (int i = 0; i < TOTAL; i++)
        if (fabs(w[i] - t->w[i]) > 1e-5 * (1e-2 + fabs(t->w[i])))
            fail_msg("element %d is %.9g, the twin has %.9g", i, w[i], t->w[i]);
    for (int g = 0; g < OPTIMIZER_GROUPS; g++)
        assert_int_equal(optimizer_updates(f->optimizer, (enum weight_group)g), t->t[g]);
}

static void follow_the_twin(enum optim_kind kind)
{
    static const int passes[] = {1, 2, 1, 1, 3, 2, 1, 2};
    struct fixture f = fixture_new(kind);
    struct twin t = {.kind = kind};
    float host[TOTAL];
    fill(host, 1, 0.5f);
    upload(&f, f.params, host);
    for (int i = 0; i < TOTAL; i++)
        t.w[i] = host[i];
    for (size_t s = 0; s < sizeof passes / sizeof *passes; s++) {
        struct optimizer_result r;
        float grads[TOTAL];
        double lr = 1e-2 / (double)(s + 1);
        fill(grads, 100 + s, s % 2 ? 0.5f : 0.01f); /* with and without clipping */
        upload(&f, f.grads, grads);
        optimizer_update(f.optimizer, f.params, f.grads, lr, passes[s], &r);
        assert_false(r.skipped);
        assert_true(fabs(r.grad_norm - twin_norm(grads, passes[s])) < 1e-9 * r.grad_norm);
        twin_update(&t, grads, lr, passes[s]);
        compare(&f, &t);
    }
    fixture_free(&f);
}

static void test_follows_the_twin(void **state)
{
    (void)state;
    for (int kind = 0; kind < OPTIM_COUNT; kind++)
        follow_the_twin((enum optim_kind)kind);
}

enum { SMALL = 5, LARGE = 8 };

/* h (n, n): the reflection that keeps all but the direction drawn from the key. */
static void reflection(double *h, int n, uint64_t key)
{
    double a[LARGE], norm = 0;
    for (int i = 0; i < n; i++) {
        a[i] = rng_normal(key, (uint64_t)i);
        norm += a[i] * a[i];
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            h[i * n + j] = (i == j) - 2 * a[i] * a[j] / norm;
}

/* out (SMALL, LARGE) = Σ_k values[k] u_k v_kᵀ, u and v columns of two reflections. */
static void of_singular_values(const double *values, double *out)
{
    double u[SMALL * SMALL], v[LARGE * LARGE];
    reflection(u, SMALL, 7);
    reflection(v, LARGE, 8);
    for (int i = 0; i < SMALL; i++)
        for (int j = 0; j < LARGE; j++) {
            out[i * LARGE + j] = 0;
            for (int k = 0; k < SMALL; k++)
                out[i * LARGE + j] += values[k] * u[i * SMALL + k] * v[j * LARGE + k];
        }
}

/* A matrix of known singular values, wide and tall: each comes out as the polynomial of it, five
 * times. */
static void test_orthogonalize(void **state)
{
    enum { N = SMALL * LARGE };
    double values[SMALL] = {3, 1, 0.5, 0.02, 0}, in[N], right[N], norm = 0;
    struct device *d;
    struct err e;
    (void)state;
    assert_int_equal(device_cpu_new(2, &d, &e), 0);
    float *x = d->ops->alloc(d, N * sizeof *x);
    float *work = d->ops->alloc(d, muon_work_floats(SMALL, LARGE) * sizeof *work);
    of_singular_values(values, in);
    for (int k = 0; k < SMALL; k++)
        norm += values[k] * values[k];
    for (int k = 0; k < SMALL; k++) {
        double s = values[k] / sqrt(norm);
        for (int step = 0; step < 5; step++)
            s = 3.4445 * s - 4.7750 * s * s * s + 2.0315 * s * s * s * s * s;
        values[k] = s;
    }
    of_singular_values(values, right);
    for (int tall = 0; tall < 2; tall++) {
        for (int i = 0; i < N; i++)
            x[tall ? i % LARGE * SMALL + i / LARGE : i] = (float)in[i];
        muon_orthogonalize(d, x, tall ? LARGE : SMALL, tall ? SMALL : LARGE, work);
        for (int i = 0; i < N; i++) {
            double got = (double)x[tall ? i % LARGE * SMALL + i / LARGE : i];
            if (fabs(got - right[i]) > 1e-4)
                fail_msg("tall %d: element %d is %g, right is %g", tall, i, got, right[i]);
        }
    }
    d->ops->zero(d, x, N * sizeof *x);
    muon_orthogonalize(d, x, SMALL, LARGE, work);
    for (int i = 0; i < N; i++)
        assert_true(x[i] == 0);
    d->ops->free(d, x);
    d->ops->free(d, work);
    device_free(&d);
}

/* What v holds and how much memory that is. */
static void test_second_moments(void **state)
{
    (void)state;
    static const int tensors[OPTIM_COUNT] = {16, 13, 16}, total[OPTIM_COUNT] = {TOTAL, 96, 144};
    for (int kind = 0; kind < OPTIM_COUNT; kind++) {
        struct shards s;
        struct optimizer_memory mem;
        shards_make(&table, (enum optim_kind)kind, 1, &s);
        optimizer_memory_of(&table, (enum optim_kind)kind, 0, 1, &mem);
        assert_int_equal(s.totals[0], TOTAL);
        assert_int_equal(s.second_totals[0], total[kind]);
        assert_int_equal(shards_tensors_of(&s, 0), tensors[kind]);
        assert_int_equal(mem.moments, (TOTAL + total[kind]) * 4);
        assert_true((mem.workspace > 0) == (kind != OPTIM_ADAMW));
        for (int i = 0; i < s.count; i++) {
            const struct weight *w = &items[i];
            int64_t want = kind == OPTIM_ADAMW || w->group != WEIGHT_MATRIX ? w->count
                           : kind == OPTIM_NORMUON                          ? w->shape[0]
                                                                            : 0;
            int64_t end = i + 1 < s.count ? s.second_local[i + 1] : s.second_totals[0];
            assert_int_equal(s.second_count[i], want);
            assert_true(s.second_local[i] % 16 == 0 && s.second_local[i] + want <= end);
        }
        shards_release(&s);
    }
    double f = 0; /* products of q (4, 6), k (3, 5), down (6, 2) */
    static const double sides[][2] = {{4, 6}, {3, 5}, {2, 6}};
    for (int i = 0; i < 3; i++) {
        double s = sides[i][0], l = sides[i][1];
        f += 5 * (2 * s * s * l + 2 * s * s * s + 2 * s * s * l);
    }
    assert_true(optimizer_flops(&table, OPTIM_MUON) == f);
    assert_true(optimizer_flops(&table, OPTIM_ADAMW) == 0);
}

static void test_one_pass_leaves_the_fusion_alone(void **state)
{
    struct fixture f = fixture_new(OPTIM_NORMUON);
    struct optimizer_result r;
    float before[TOTAL], after[TOTAL], grads[TOTAL];
    (void)state;
    fill(before, 2, 0.5f);
    upload(&f, f.params, before);
    fill(grads, 3, 0.1f);
    grads[112] = NAN; /* takes no part, so it does not count either */
    upload(&f, f.grads, grads);
    optimizer_update(f.optimizer, f.params, f.grads, 1e-2, 1, &r);
    download(&f, after, f.params);
    assert_false(r.skipped);
    assert_memory_equal(before + 112, after + 112, 32 * sizeof(float));
    assert_memory_not_equal(before, after, 30 * sizeof(float));
    assert_int_equal(optimizer_updates(f.optimizer, WEIGHT_FUSION), 0);
    fixture_free(&f);
}

static void test_not_finite_moves_nothing(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct fixture f = fixture_new(OPTIM_NORMUON);
    float before[TOTAL], after[TOTAL], grads[TOTAL];
    (void)state;
    fill(before, 4, 0.5f);
    upload(&f, f.params, before);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct optimizer_result r;
        fill(grads, 5, 0.1f);
        grads[60 + i] = bad[i];
        upload(&f, f.grads, grads);
        optimizer_update(f.optimizer, f.params, f.grads, 1e-2, 2, &r);
        assert_true(r.skipped);
        assert_false(isfinite(r.grad_norm));
        download(&f, after, f.params);
        assert_memory_equal(before, after, sizeof before);
        const float *v = optimizer_v(f.optimizer), *m = optimizer_m(f.optimizer);
        for (int k = 0; k < TOTAL; k++)
            assert_true(
                m[k] == 0 && (k >= optimizer_shards(f.optimizer)->second_totals[0] || v[k] == 0));
        assert_int_equal(optimizer_updates(f.optimizer, WEIGHT_MATRIX), 0);
    }
    fixture_free(&f);
}

static void run_steps(struct fixture *f, int from, int to)
{
    for (int s = from; s < to; s++) {
        struct optimizer_result r;
        float grads[TOTAL];
        fill(grads, 200 + (uint64_t)s, 0.2f);
        upload(f, f->grads, grads);
        optimizer_update(f->optimizer, f->params, f->grads, 1e-2, 1 + s % 3, &r);
    }
}

static void save(struct fixture *f, const char *path, const char *const *meta)
{
    float m[TOTAL], v[TOTAL];
    struct st_tensor tensors[2 * sizeof items / sizeof *items];
    char names[2 * sizeof items / sizeof *items][128];
    struct err e;
    const struct shards *s = optimizer_shards(f->optimizer);
    download(f, m, optimizer_m(f->optimizer));
    f->device->ops->download(
        f->device, v, optimizer_v(f->optimizer), (size_t)s->second_totals[0] * sizeof *v);
    int n = optimizer_as_tensors(s, 0, m, v, tensors, names);
    assert_int_equal(n, shards_tensors_of(s, 0));
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(safetensors_write(fd, path, tensors, n, meta, &e), 0);
    close(fd);
}

static int load_one(struct optimizer *o, const struct safetensors *st, struct err *e)
{
    return optimizer_load(o, &st, 1, e);
}

/* A file of another kind, or without its counts. */
static void refuse_foreign(struct fixture *f, const char *path)
{
    int kind = (int)optimizer_kind(f->optimizer);
    struct fixture other = fixture_new((enum optim_kind)((kind + 1) % OPTIM_COUNT));
    struct safetensors *st;
    struct err e;
    assert_int_equal(safetensors_open(path, &st, &e), 0);
    assert_int_equal(load_one(other.optimizer, st, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, optim_name(kind)));
    safetensors_close(&st);
    save(f, path, NULL);
    assert_int_equal(safetensors_open(path, &st, &e), 0);
    assert_int_equal(load_one(f->optimizer, st, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "updates.matrix"));
    safetensors_close(&st);
    fixture_free(&other);
}

static void continue_bit_for_bit(enum optim_kind kind)
{
    struct fixture f = fixture_new(kind), g = fixture_new(kind);
    struct optimizer_meta meta;
    struct safetensors *st;
    struct err e;
    char *dir, *path;
    float host[TOTAL], other[TOTAL];
    dir = temp_dir_make();
    path = mem_printf("%s/o.safetensors", dir);
    fill(host, 6, 0.5f);
    upload(&f, f.params, host);
    run_steps(&f, 0, 4);
    int64_t updates[OPTIMIZER_GROUPS];
    for (int k = 0; k < OPTIMIZER_GROUPS; k++)
        updates[k] = optimizer_updates(f.optimizer, (enum weight_group)k);
    optimizer_meta_make(kind, updates, &meta);
    save(&f, path, meta.pairs);
    download(&f, host, f.params);
    upload(&g, g.params, host);

    run_steps(&g, 8, 9); /* something to be overwritten */
    upload(&g, g.params, host);
    assert_int_equal(safetensors_open(path, &st, &e), 0);
    assert_int_equal(load_one(g.optimizer, st, &e), 0);
    safetensors_close(&st);
    run_steps(&f, 4, 9);
    run_steps(&g, 4, 9);
    download(&f, host, f.params);
    download(&g, other, g.params);
    assert_memory_equal(host, other, sizeof host);

    refuse_foreign(&f, path);
    temp_dir_remove(&dir);
    free(path);
    fixture_free(&f);
    fixture_free(&g);
}

static void test_saved_state_continues_bit_for_bit(void **state)
{
    (void)state;
    for (int kind = 0; kind < OPTIM_COUNT; kind++)
        continue_bit_for_bit((enum optim_kind)kind);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_orthogonalize),
        cmocka_unit_test(test_second_moments),
        cmocka_unit_test(test_follows_the_twin),
        cmocka_unit_test(test_one_pass_leaves_the_fusion_alone),
        cmocka_unit_test(test_not_finite_moves_nothing),
        cmocka_unit_test(test_saved_state_continues_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
