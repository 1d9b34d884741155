/* The saver: what it writes, what it replaces, and a disk that fills up. */
#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "common/fs.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "tests/unit/temp_dir.h"
#include "trainer/saver.h"

#define COUNT 4096
#define TOTAL (2 * COUNT)

static struct weight items[] = {
    {.name = "a", .ndim = 2, .shape = {64, 64}, .count = COUNT, .group = WEIGHT_MATRIX},
    {.name = "b",
        .ndim = 1,
        .shape = {COUNT},
        .count = COUNT,
        .offset = COUNT,
        .group = WEIGHT_VECTOR},
};
static const struct weight_table table = {items, 2, TOTAL};

struct fixture {
    char *root;
    struct device *device;
    struct optimizer *optimizer;
    float *params, *grads;
    struct saver *saver;
};

static int setup(void **state)
{
    struct fixture *f = mem_array(1, sizeof *f);
    struct optimizer_settings o = {.rest_lr_scale = 1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    struct err e;
    float host[TOTAL];
    f->root = temp_dir_make();
    assert_int_equal(device_cpu_new(1, &f->device, &e), 0);
    assert_int_equal(optimizer_new(f->device, &table, &o, &f->optimizer, &e), 0);
    f->params = f->device->ops->alloc(f->device, sizeof host);
    f->grads = f->device->ops->alloc(f->device, sizeof host);
    for (int i = 0; i < TOTAL; i++)
        host[i] = (float)(i % 97) / 97;
    f->device->ops->upload(f->device, f->params, host, sizeof host);
    f->device->ops->upload(f->device, f->grads, host, sizeof host);
    struct optimizer_result r;
    optimizer_update(f->optimizer, f->params, f->grads, 0.01, 2, &r);
    struct saver_settings s = {
        .root = f->root, .plan_hash = "cafe", .rank = 0, .world = 1, .table = &table};
    assert_int_equal(saver_new(&s, &f->saver, &e), 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    saver_free(&f->saver);
    f->device->ops->free(f->device, f->params);
    f->device->ops->free(f->device, f->grads);
    optimizer_free(&f->optimizer);
    device_free(&f->device);
    temp_dir_remove(&f->root);
    free(f);
    return 0;
}

/* Saves `step` and waits for the result. */
static struct saver_result save(struct fixture *f, int64_t step)
{
    struct saver_source src = {f->device, f->params, f->optimizer};
    struct saver_result r;
    struct err e;
    assert_int_equal(saver_begin(f->saver, &src, step, 7, &e), 0);
    assert_true(saver_busy(f->saver));
    assert_int_equal(saver_begin(f->saver, &src, step + 1, 7, &e), ERR_STATE);
    assert_int_equal(saver_poll(f->saver, 20000, &r), 1);
    assert_false(saver_busy(f->saver));
    assert_int_equal(saver_poll(f->saver, 0, &r), 0);
    return r;
}

static int exists(struct fixture *f, const char *part)
{
    char *path = mem_printf("%s/%s", f->root, part);
    int yes = fs_exists(path);
    free(path);
    return yes;
}

static int files_in(struct fixture *f, const char *part)
{
    char *path = mem_printf("%s/%s", f->root, part);
    DIR *d = opendir(path);
    int n = 0;
    assert_non_null(d);
    for (struct dirent *entry; (entry = readdir(d));)
        n += entry->d_name[0] != '.';
    closedir(d);
    free(path);
    return n;
}

static void put(struct fixture *f, const char *part)
{
    char *path = mem_printf("%s/%s", f->root, part), *dir = fs_dirname(path);
    assert_int_equal(fs_mkdir_p(dir, 0755, NULL), 0);
    assert_int_equal(fs_write_atomic(path, "x", 1, NULL), 0);
    free(dir);
    free(path);
}

static void check_file(
    struct fixture *f, const char *step, const struct checkpoint_file *file, const char *name)
{
    char *path = mem_printf("%s/%s/%s", f->root, step, name), sha[SHA256_HEX];
    uint64_t bytes;
    assert_string_equal(file->name, name);
    assert_int_equal(hash_sha256_file(path, sha, &bytes, NULL), 0);
    assert_string_equal(file->sha256, sha);
    assert_true(file->bytes == bytes);
    free(path);
}

static void test_writes_what_training_has(void **state)
{
    struct fixture *f = *state;
    struct saver_result r = save(f, 12);
    float want[TOTAL], got[COUNT];
    struct safetensors *st;
    char *path = mem_printf("%s/step-00000012/model.safetensors", f->root);
    assert_int_equal(r.err.code, 0);
    assert_int_equal(r.step, 12);
    assert_int_equal(r.run_epoch, 7);
    assert_int_equal(r.file_count, 2);
    check_file(f, "step-00000012", &r.files[0], "model.safetensors");
    check_file(f, "step-00000012", &r.files[1], "optimizer-00000-of-00001.safetensors");
    assert_int_equal(files_in(f, "step-00000012"), 2); /* no temporary ones */

    assert_int_equal(safetensors_open(path, &st, NULL), 0);
    assert_string_equal(safetensors_meta(st, "format"), "pt");
    assert_string_equal(safetensors_meta(st, "step"), "12");
    assert_string_equal(safetensors_meta(st, "plan_hash"), "cafe");
    f->device->ops->download(f->device, want, f->params, sizeof want);
    assert_int_equal(safetensors_read_f32(st, "b", COUNT, got, NULL), 0);
    assert_memory_equal(got, want + COUNT, sizeof got);
    safetensors_close(&st);
    free(path);

    path = mem_printf("%s/step-00000012/optimizer-00000-of-00001.safetensors", f->root);
    assert_int_equal(safetensors_open(path, &st, NULL), 0);
    assert_string_equal(safetensors_meta(st, "updates.fusion"), "1");
    f->device->ops->download(f->device, want, optimizer_v(f->optimizer), sizeof want);
    assert_int_equal(safetensors_read_f32(st, "v.a", COUNT, got, NULL), 0);
    assert_memory_equal(got, want, sizeof got);
    safetensors_close(&st);
    free(path);
}

static void test_replaces_only_what_is_not_committed(void **state)
{
    struct fixture *f = *state;
    put(f, "step-00000003/model.safetensors");
    put(f, "step-00000003/optimizer-00001-of-00002.safetensors");
    struct saver_result third = save(f, 3);
    assert_int_equal(third.err.code, 0);
    check_file(f, "step-00000003", &third.files[0], "model.safetensors");
    assert_true(exists(f, "step-00000003/optimizer-00001-of-00002.safetensors")); /* another's */

    put(f, "step-00000004/MANIFEST.json");
    struct saver_result r = save(f, 4);
    assert_int_equal(r.err.code, ERR_STATE);
    assert_non_null(strstr(r.err.msg, "step-00000004"));
    assert_true(exists(f, "step-00000004/MANIFEST.json"));
    assert_int_equal(files_in(f, "step-00000004"), 1);
}

/* A limit on the size of files stands for the full disk: write() fails in the middle of the first,
 * or of the second file. */
static void test_failed_write_leaves_nothing(void **state)
{
    static const rlim_t limits[] = {1000, COUNT * 4, TOTAL * 4 + 8192};
    struct fixture *f = *state;
    struct rlimit old;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit small = {limits[i], old.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        struct saver_result r = save(f, 5);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_int_not_equal(r.err.code, 0);
        assert_non_null(strstr(r.err.msg, "step-00000005"));
        assert_false(exists(f, "step-00000005"));
    }
    assert_int_equal(save(f, 5).err.code, 0); /* and then there is room again */
    assert_true(exists(f, "step-00000005/model.safetensors"));
}

/* Two ranks at once, then one that fails while the other's file is there. */
static void test_ranks_write_side_by_side(void **state)
{
    struct fixture *f = *state;
    struct saver *savers[2];
    struct optimizer *optimizers[2];
    struct saver_result r[2];
    struct err e;
    for (int k = 0; k < 2; k++) {
        struct saver_settings s = {
            .root = f->root, .plan_hash = "cafe", .rank = k, .world = 2, .table = &table};
        struct optimizer_settings o = {
            .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .rank = k, .world = 2};
        assert_int_equal(saver_new(&s, &savers[k], &e), 0);
        assert_int_equal(optimizer_new(f->device, &table, &o, &optimizers[k], &e), 0);
    }
    for (int k = 0; k < 2; k++) {
        struct saver_source src = {f->device, f->params, optimizers[k]};
        assert_int_equal(saver_begin(savers[k], &src, 8, 1, &e), 0);
    }
    for (int k = 0; k < 2; k++) {
        assert_int_equal(saver_poll(savers[k], 20000, &r[k]), 1);
        assert_int_equal(r[k].err.code, 0);
        assert_int_equal(r[k].file_count, 2 - k);
    }
    check_file(f, "step-00000008", &r[0].files[0], "model.safetensors");
    check_file(f, "step-00000008", &r[0].files[1], "optimizer-00000-of-00002.safetensors");
    check_file(f, "step-00000008", &r[1].files[0], "optimizer-00001-of-00002.safetensors");
    assert_int_equal(files_in(f, "step-00000008"), 3);

    struct rlimit old, small;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){1000, old.rlim_max};
    put(f, "step-00000009/model.safetensors");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    struct saver_source src = {f->device, f->params, optimizers[1]};
    assert_int_equal(saver_begin(savers[1], &src, 9, 1, &e), 0);
    assert_int_equal(saver_poll(savers[1], 20000, &r[1]), 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_not_equal(r[1].err.code, 0);
    assert_int_equal(files_in(f, "step-00000009"), 1);
    for (int k = 0; k < 2; k++) {
        saver_free(&savers[k]);
        optimizer_free(&optimizers[k]);
    }
}

static void test_missing_root_is_an_error(void **state)
{
    struct fixture *f = *state;
    char *moved = mem_printf("%s.away", f->root);
    assert_int_equal(rename(f->root, moved), 0);
    struct saver_result r = save(f, 6);
    assert_int_equal(r.err.code, ERR_IO);
    assert_int_equal(rename(moved, f->root), 0);
    free(moved);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_writes_what_training_has, setup, teardown),
        cmocka_unit_test_setup_teardown(test_replaces_only_what_is_not_committed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failed_write_leaves_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ranks_write_side_by_side, setup, teardown),
        cmocka_unit_test_setup_teardown(test_missing_root_is_an_error, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
