/*
 * Shards and the sharded optimizer: every float has one owner, loads are even, and W ranks together
 * do what one does, bit for bit, also across a save and a load under another W.
 */
#include <fcntl.h>
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
#include "tests/unit/temp_dir.h"
#include "trainer/optimizer.h"

#define MAX_WORLD 8

static const struct model_config config = {.vocab = 501,
    .dim = 20,
    .layers = 3,
    .heads = 2,
    .kv_heads = 1,
    .head_dim = 10,
    .ffn = 33,
    .norm_eps = 1e-5f,
    .rope_theta = 1e4,
    .residual_scale = 0.4f,
    .feedback = 1};
static struct weight_table table;

static int make_table(void **state)
{
    struct err e;
    (void)state;
    return weight_table_make(&config, &table, &e);
}

static int drop_table(void **state)
{
    (void)state;
    weight_table_release(&table);
    return 0;
}

static void test_every_float_has_one_owner(void **state)
{
    (void)state;
    for (int world = 1; world <= MAX_WORLD; world++) {
        struct shards s;
        uint8_t *owned = mem_array((size_t)table.total, 1);
        int64_t local[MAX_WORLD] = {0}, most = 0, least = INT64_MAX;
        shards_make(&table, OPTIM_ADAMW, world, &s);
        for (int i = 0; i < s.count; i++) {
            const struct weight *w = &table.items[s.weight[i]];
            const struct coll_span *p = &s.spans[i];
            assert_in_range(p->owner, 0, world - 1);
            assert_true(p->offset >= w->offset && p->count > 0);
            assert_true(p->offset + p->count <= w->offset + w->count);
            assert_true(p->offset % 16 == 0 && s.local[i] % 16 == 0);
            assert_true(shards_is_whole(&s, i) || s.weight[i] == weight_embed());
            assert_true(s.first[s.weight[i]] <= i && i < s.first[s.weight[i] + 1]);
            assert_true(s.local[i] >= local[p->owner]); /* no overlap in the owner's arrays */
            local[p->owner] = s.local[i] + p->count;
            for (int64_t k = 0; k < p->count; k++)
                owned[p->offset + k]++;
        }
        for (int w = 0; w < table.count; w++)
            for (int64_t k = 0; k < table.items[w].count; k++)
                assert_int_equal(owned[table.items[w].offset + k], 1);
        for (int r = 0; r < world; r++) {
            assert_true(local[r] <= s.totals[r]);
            most = s.totals[r] > most ? s.totals[r] : most;
            least = s.totals[r] < least ? s.totals[r] : least;
        }
        assert_true(most - least <= 16 * world);
        if (world == 1)
            for (int i = 0; i < s.count; i++)
                assert_true(s.local[i] == s.spans[i].offset);
        shards_release(&s);
        free(owned);
    }
}

/* -- W optimizers over one set of parameters ----------------------------------------------------
 */

struct team {
    int world;
    struct device *device;
    struct optimizer *ranks[MAX_WORLD];
    float *params, *grads;
};

static struct team team_new(enum optim_kind kind, int world)
{
    struct team t = {.world = world};
    struct err e;
    assert_int_equal(device_cpu_new(1, &t.device, &e), 0);
    for (int r = 0; r < world; r++) {
        struct optimizer_settings s = {.kind = kind,
            .rest_lr_scale = 0.5,
            .momentum = 0.9,
            .muon_beta2 = 0.8,
            .beta1 = 0.9,
            .beta2 = 0.95,
            .eps = 1e-8,
            .weight_decay = 0.1,
            .fusion_lr_scale = 0.3,
            .rank = r,
            .world = world};
        assert_int_equal(optimizer_new(t.device, &table, &s, &t.ranks[r], &e), 0);
    }
    t.params = mem_array((size_t)table.total, sizeof(float));
    t.grads = mem_array((size_t)table.total, sizeof(float));
    weights_init(&table, 3, t.params);
    return t;
}

static void team_free(struct team *t)
{
    for (int r = 0; r < t->world; r++)
        optimizer_free(&t->ranks[r]);
    device_free(&t->device);
    free(t->params);
    free(t->grads);
}

/* Each rank sees garbage where it owns nothing, and must not touch it. */
static void team_step(struct team *t, int step)
{
    const struct shards *s = optimizer_shards(t->ranks[0]);
    double *sums = mem_array((size_t)s->count, sizeof *sums), *own = mem_array((size_t)s->count, 8);
    struct optimizer_result result;
    int passes = 1 + step % 2;
    for (int64_t i = 0; i < table.total; i++)
        t->grads[i] = 0;
    for (int w = 0; w < table.count; w++)
        for (int64_t k = 0; k < table.items[w].count; k++)
            t->grads[table.items[w].offset + k] =
                rng_unitf(rng_key((uint64_t)step, (uint64_t)w), (uint64_t)k) - 0.5f;
    for (int r = 0; r < t->world; r++) {
        optimizer_sums(t->ranks[r], t->grads, passes, own);
        for (int i = 0; i < s->count; i++) {
            assert_true(own[i] == 0 || s->spans[i].owner == r);
            sums[i] += own[i];
        }
    }
    for (int r = 0; r < t->world; r++) /* disjoint parts: the order does not matter */
        optimizer_apply(t->ranks[r], t->params, t->grads, sums, 1e-2, passes, &result);
    free(own);
    free(sums);
}

static char *dir;

static int make_dir(void **state)
{
    dir = temp_dir_make();
    return make_table(state);
}

static int drop_dir(void **state)
{
    temp_dir_remove(&dir);
    return drop_table(state);
}

static void team_save(struct team *t)
{
    const struct shards *s = optimizer_shards(t->ranks[0]);
    struct st_tensor *tensors = mem_array(2 * (size_t)s->count, sizeof *tensors);
    char(*names)[128] = mem_array(2 * (size_t)s->count, sizeof *names);
    struct err e = {0};
    for (int r = 0; r < t->world; r++) {
        struct optimizer_meta meta;
        int64_t updates[OPTIMIZER_GROUPS];
        for (int g = 0; g < OPTIMIZER_GROUPS; g++)
            updates[g] = optimizer_updates(t->ranks[r], (enum weight_group)g);
        optimizer_meta_make(optimizer_kind(t->ranks[r]), updates, &meta);
        int n = optimizer_as_tensors(
            s, r, optimizer_m(t->ranks[r]), optimizer_v(t->ranks[r]), tensors, names);
        assert_int_equal(n, shards_tensors_of(s, r));
        char *path = mem_printf("%s/" OPTIMIZER_FILE, dir, r, t->world);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        assert_int_equal(safetensors_write(fd, path, tensors, n, meta.pairs, &e), 0);
        close(fd);
        free(path);
    }
    free(names);
    free(tensors);
}

/* Only what a rank says it needs is opened for it. */
static void team_load(struct team *t, int saved)
{
    for (int r = 0; r < t->world; r++) {
        struct safetensors *files[MAX_WORLD] = {NULL};
        struct err e = {0};
        int opened = 0;
        for (int k = 0; k < saved; k++) {
            char *path = mem_printf("%s/" OPTIMIZER_FILE, dir, k, saved);
            if (optimizer_needs(t->ranks[r], k, saved)) {
                assert_int_equal(safetensors_open(path, &files[k], &e), 0);
                opened++;
            }
            free(path);
        }
        if (saved == t->world)
            assert_true(opened <= 2); /* its own, and rank 0's for the counts */
        if (optimizer_load(t->ranks[r], (const struct safetensors *const *)files, saved, &e) < 0)
            fail_msg("%s", e.msg);
        for (int k = 0; k < saved; k++)
            safetensors_close(&files[k]);
    }
}

static void ranks_together(enum optim_kind kind)
{
    static const int worlds[] = {2, 3, 4, 8};
    size_t bytes = (size_t)table.total * sizeof(float);
    struct team one = team_new(kind, 1);
    for (int s = 0; s < 3; s++)
        team_step(&one, s);
    float *half = mem_array(bytes, 1);
    memcpy(half, one.params, bytes);
    for (int s = 3; s < 6; s++)
        team_step(&one, s);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        struct team many = team_new(kind, worlds[i]);
        struct team other = team_new(kind, i % 2 ? 1 : 5), same = team_new(kind, worlds[i]);
        for (int s = 0; s < 3; s++)
            team_step(&many, s);
        assert_memory_equal(many.params, half, bytes);
        team_save(&many);
        team_load(&other, worlds[i]);
        team_load(&same, worlds[i]);
        memcpy(other.params, half, bytes);
        memcpy(same.params, half, bytes);
        for (int s = 3; s < 6; s++) {
            team_step(&other, s);
            team_step(&same, s);
        }
        assert_memory_equal(other.params, one.params, bytes);
        assert_memory_equal(same.params, one.params, bytes);
        team_free(&many);
        team_free(&other);
        team_free(&same);
    }
    free(half);
    team_free(&one);
}

static void test_ranks_together_do_what_one_does(void **state)
{
    (void)state;
    for (int kind = 0; kind < OPTIM_COUNT; kind++)
        ranks_together((enum optim_kind)kind);
}

static void test_files_that_do_not_fit(void **state)
{
    struct team two = team_new(OPTIM_ADAMW, 2);
    struct safetensors *first, *second;
    struct err e = {0};
    (void)state;
    team_step(&two, 0);
    team_save(&two);
    char *path = mem_printf("%s/" OPTIMIZER_FILE, dir, 0, 2);
    assert_int_equal(safetensors_open(path, &first, &e), 0);
    free(path);
    path = mem_printf("%s/" OPTIMIZER_FILE, dir, 1, 2);
    assert_int_equal(safetensors_open(path, &second, &e), 0);
    free(path);
    const struct safetensors *swapped[] = {second, first};
    assert_int_not_equal(optimizer_load(two.ranks[0], swapped, 2, &e), 0);
    assert_int_equal(optimizer_load(two.ranks[0], swapped, 1, &e), ERR_MISMATCH);
    safetensors_close(&first);
    safetensors_close(&second);
    team_free(&two);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_float_has_one_owner, make_table, drop_table),
        cmocka_unit_test_setup_teardown(test_ranks_together_do_what_one_does, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_files_that_do_not_fit, make_dir, drop_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
