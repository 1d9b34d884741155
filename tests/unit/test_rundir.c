// rundir: making, opening again, and every refusal.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "common/fs.h"
#include "common/manifest.h"
#include "common/rundir.h"
#include "tests/unit/temp_dir.h"

#define SHA "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

struct place {
    char *dir, *yaml;
};

static int setup(void **state)
{
    struct place *t = mem_array(1, sizeof *t);
    struct err e = {0};
    t->dir = temp_dir_make();
    char *tok = mem_printf("%s/t.json", t->dir), *src = mem_printf("%s/a", t->dir), name[] = "a";
    struct manifest_shard shard = {.file = "s",
        .bytes = 8192,
        .last_pgno = 1,
        .tokens = 5001,
        .documents = 9,
        .blocks = 1,
        .hash = SHA,
        .sha256 = SHA};
    struct manifest_shard val = shard;
    val.file[0] = 'v';
    struct manifest m = {.name = name,
        .vocab = 300,
        .eot = 299,
        .block_tokens = 32768,
        .fingerprint = SHA,
        .splits = {{&shard, 1, 0, 0, 9}, {&val, 1, 0, 0, 9}}};
    int rc = fs_write_atomic(tok, "{}", 2, &e);
    if (rc == 0)
        rc = hash_sha256_file(tok, m.tokenizer_sha256, NULL, &e);
    if (rc == 0)
        rc = fs_mkdir_p(src, 0755, &e);
    if (rc == 0)
        rc = manifest_write(src, &m, &e);
    t->yaml = mem_printf("run: {name: r1, dir: %s/runs}\n"
                         "data: {tokenizer: %s, sources: [{name: a, path: %s/../a}]}\n",
        t->dir, tok, src);
    free(tok);
    free(src);
    *state = t;
    return rc;
}

static int teardown(void **state)
{
    struct place *t = *state;
    temp_dir_remove(&t->dir);
    free(t->yaml);
    free(t);
    return 0;
}

static void config_of(const struct place *t, const char *override, struct config *c)
{
    struct err e = {0};
    assert_int_equal(
        config_parse(t->yaml, strlen(t->yaml), "y", &override, override != NULL, c, &e), 0);
}

static mode_t mode_of(const struct rundir *r, const char *part)
{
    char *path = rundir_path(r, "%s", part);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    free(path);
    return st.st_mode & 07777;
}

static void test_create(void **state)
{
    const struct place *t = *state;
    struct config c;
    struct rundir r, again;
    struct err e = {0};
    int existed = -1;
    config_of(t, NULL, &c);
    assert_int_equal(rundir_create(&c, &r, &existed, &e), 0);
    assert_int_equal(existed, 0);
    char *want = mem_printf("%s/runs/r1", t->dir), *source = mem_printf("%s/a", t->dir);
    assert_string_equal(r.path, want);
    assert_string_equal(r.config.data.sources[0].path, source); /* no ".." left */
    assert_string_equal(r.plan.sources[0].path, source);
    assert_true(r.config.process.trainer_threads > 0);
    assert_int_equal(r.config.model.vocab, 300);
    assert_int_equal(mode_of(&r, "sock"), 0700);
    assert_int_equal(mode_of(&r, "keys"), 0700);
    assert_int_equal(mode_of(&r, "journal"), 0755);
    assert_int_equal(mode_of(&r, "checkpoints"), 0755);
    assert_int_equal(mode_of(&r, "evals"), 0755);
    assert_int_equal(mode_of(&r, "logs"), 0755);
    char *path = rundir_path(&r, "checkpoints/step-%08d", 7);
    assert_non_null(strstr(path, "/runs/r1/checkpoints/step-00000007"));
    free(path);

    /* the same config finds it; threads may differ, and the run keeps its own */
    assert_int_equal(rundir_create(&c, &again, &existed, &e), 0);
    assert_int_equal(existed, 1);
    assert_string_equal(r.plan.hash, again.plan.hash);
    rundir_release(&again);
    config_release(&c);
    config_of(t, "process.trainer_threads=77", &c);
    assert_int_equal(rundir_create(&c, &again, &existed, &e), 0);
    assert_int_equal(again.config.process.trainer_threads, r.config.process.trainer_threads);
    rundir_release(&again);
    config_release(&c);

    /* another plan is refused naming both */
    config_of(t, "train.seed=2", &c);
    assert_int_equal(rundir_create(&c, &again, &existed, &e), ERR_STATE);
    assert_non_null(strstr(e.msg, r.plan.hash));
    assert_non_null(strstr(e.msg, "this config makes plan "));
    config_release(&c);
    rundir_release(&r);
    free(want);
    free(source);
}

static void edit(const struct place *t, const char *from, const char *to)
{
    char *path = mem_printf("%s/runs/r1/run.yaml", t->dir);
    struct buf text = BUF_INIT, out = BUF_INIT;
    struct err e = {0};
    assert_int_equal(fs_read(path, 1 << 20, &text, &e), 0);
    char *at = strstr(text.data, from);
    assert_non_null(at);
    buf_add(&out, text.data, (size_t)(at - text.data));
    buf_add_str(&out, to);
    buf_add_str(&out, at + strlen(from));
    assert_int_equal(fs_write_atomic(path, out.data, out.len, &e), 0);
    buf_release(&text);
    buf_release(&out);
    free(path);
}

static void test_open(void **state)
{
    const struct place *t = *state;
    struct config c;
    struct rundir r;
    struct err e = {0};
    int existed;
    char *path = mem_printf("%s/runs/r1", t->dir);
    assert_int_equal(rundir_open(path, &r, &e), ERR_IO);
    config_of(t, NULL, &c);
    assert_int_equal(rundir_create(&c, &r, &existed, &e), 0);
    rundir_release(&r);
    config_release(&c);
    /* what may be edited, and what may not */
    edit(t, "keep_last: 3", "keep_last: 9");
    assert_int_equal(rundir_open(path, &r, &e), 0);
    assert_int_equal(r.config.checkpoint.keep_last, 9);
    rundir_release(&r);
    edit(t, "steps: 1000", "steps: 1001");
    assert_int_equal(rundir_open(path, &r, &e), ERR_MISMATCH);
    char *want =
        mem_printf("%s/run.yaml: train.steps: 1001, but plan.json says 1000; it is fixed once "
                   "the run exists",
            path);
    assert_string_equal(e.msg, want);
    free(want);
    assert_int_equal(rundir_open(t->dir, &r, &e), ERR_STATE);
    assert_non_null(strstr(e.msg, ": not a run directory, it has no plan.json"));
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_create, setup, teardown),
        cmocka_unit_test_setup_teardown(test_open, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
