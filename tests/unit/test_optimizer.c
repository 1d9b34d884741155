/* The optimizer against a float64 twin, its groups, clipping, the skipped update, and saving. */
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

#include "common/fs.h"
#include "common/mem.h"
#include "common/rng.h"
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
        .shape = {2, 6},
        .count = 12,
        .offset = 144,
        .group = WEIGHT_MATRIX},
};
static const struct weight_table table = {items, sizeof items / sizeof *items, TOTAL};
static const struct optimizer_settings settings = {.beta1 = 0.9,
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

static struct fixture fixture_new(void)
{
    struct fixture f = {0};
    struct err e;
    assert_int_equal(device_cpu_new(1, &f.device, &e), 0);
    assert_int_equal(optimizer_new(f.device, &table, &settings, &f.optimizer, &e), 0);
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
    double w[TOTAL], m[TOTAL], v[TOTAL];
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
        double rate = group == WEIGHT_FUSION ? 0.3 * lr : lr;
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

static void test_follows_the_twin(void **state)
{
    static const int passes[] = {1, 2, 1, 1, 3, 2, 1, 2};
    struct fixture f = fixture_new();
    struct twin t = {0};
    float host[TOTAL];
    (void)state;
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

static void test_one_pass_leaves_the_fusion_alone(void **state)
{
    struct fixture f = fixture_new();
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
    struct fixture f = fixture_new();
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
        download(&f, after, optimizer_v(f.optimizer));
        for (int k = 0; k < TOTAL; k++)
            assert_true(after[k] == 0);
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
    download(f, m, optimizer_m(f->optimizer));
    download(f, v, optimizer_v(f->optimizer));
    int n = optimizer_as_tensors(optimizer_shards(f->optimizer), 0, m, v, tensors, names);
    assert_int_equal(n, 2 * table.count);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(safetensors_write(fd, path, tensors, 2 * table.count, meta, &e), 0);
    close(fd);
}

static void test_saved_state_continues_bit_for_bit(void **state)
{
    struct fixture f = fixture_new(), g = fixture_new();
    struct optimizer_meta meta;
    struct safetensors *st;
    struct err e;
    char dir[512], *path;
    float host[TOTAL], other[TOTAL];
    (void)state;
    snprintf(dir, sizeof dir, "%s/optimizer.XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    assert_non_null(mkdtemp(dir));
    path = mem_printf("%s/o.safetensors", dir);
    fill(host, 6, 0.5f);
    upload(&f, f.params, host);
    run_steps(&f, 0, 4);
    int64_t updates[OPTIMIZER_GROUPS];
    for (int k = 0; k < OPTIMIZER_GROUPS; k++)
        updates[k] = optimizer_updates(f.optimizer, (enum weight_group)k);
    optimizer_meta_make(updates, &meta);
    save(&f, path, meta.pairs);
    download(&f, host, f.params);
    upload(&g, g.params, host);

    run_steps(&g, 8, 9); /* something to be overwritten */
    upload(&g, g.params, host);
    assert_int_equal(safetensors_open(path, &st, &e), 0);
    assert_int_equal(
        optimizer_load(g.optimizer, (const struct safetensors *const[]){st}, 1, &e), 0);
    safetensors_close(&st);
    run_steps(&f, 4, 9);
    run_steps(&g, 4, 9);
    download(&f, host, f.params);
    download(&g, other, g.params);
    assert_memory_equal(host, other, sizeof host);

    save(&f, path, NULL); /* no counts */
    assert_int_equal(safetensors_open(path, &st, &e), 0);
    assert_int_equal(
        optimizer_load(g.optimizer, (const struct safetensors *const[]){st}, 1, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "updates.matrix"));
    safetensors_close(&st);
    assert_int_equal(fs_remove_tree(dir, &e), 0);
    free(path);
    fixture_free(&f);
    fixture_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_follows_the_twin),
        cmocka_unit_test(test_one_pass_leaves_the_fusion_alone),
        cmocka_unit_test(test_not_finite_moves_nothing),
        cmocka_unit_test(test_saved_state_continues_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
