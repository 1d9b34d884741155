/* Checkpoint directories: commit, damage of every kind, retention, and kills between any two steps.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/checkpoint.h"
#include "common/fs.h"
#include "common/rng.h"
#include "tests/unit/temp_dir.h"

#define PLAN "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static char *root;

static int set_up(void **state)
{
    (void)state;
    root = temp_dir_make();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    temp_dir_remove(&root);
    return 0;
}

/* root/step-…/name, to be freed. */
static char *path_of(int64_t step, const char *name)
{
    char dir[32];
    checkpoint_name(step, dir);
    return mem_printf("%s/%s/%s", root, dir, name);
}

static void write_file(int64_t step, const char *name, const char *text)
{
    struct err e = {0};
    char *path = path_of(step, name), *dir = fs_dirname(path);
    if (fs_mkdir_p(dir, 0700, &e) < 0 || fs_write_atomic(path, text, strlen(text), &e) < 0)
        fail_msg("%s", e.msg);
    free(dir);
    free(path);
}

static struct checkpoint_file entry(const char *name, const char *text)
{
    struct checkpoint_file f = {.bytes = strlen(text)};
    snprintf(f.name, sizeof f.name, "%s", name);
    hash_sha256_hex(text, strlen(text), f.sha256);
    return f;
}

static int commit(int64_t step, struct err *e)
{
    char weights[64];
    snprintf(weights, sizeof weights, "weights of step %lld", (long long)step);
    write_file(step, "model.safetensors", weights);
    write_file(step, "state.json", "{}");
    struct checkpoint_file f = entry("model.safetensors", weights);
    char *dir = path_of(step, "");
    dir[strlen(dir) - 1] = 0;
    int rc = checkpoint_commit(dir, step, PLAN, 3, &f, 1, e);
    free(dir);
    return rc;
}

static void commit_ok(int64_t step)
{
    struct err e = {0};
    if (commit(step, &e) < 0)
        fail_msg("%s", e.msg);
}

static void expect_newest(int64_t want, const char *says)
{
    struct err e = {0};
    struct buf damaged = BUF_INIT;
    int64_t step;
    if (checkpoint_newest(root, &step, &damaged, &e) < 0)
        fail_msg("%s", e.msg);
    assert_int_equal(step, want);
    if (!says)
        assert_int_equal(damaged.len, 0);
    else if (!damaged.len || !strstr(damaged.data, says))
        fail_msg("\"%s\" does not say \"%s\"", damaged.len ? damaged.data : "", says);
    buf_release(&damaged);
}

static void test_names(void **state)
{
    (void)state;
    char name[32];
    checkpoint_name(1000, name);
    assert_string_equal(name, "step-00001000");
    static const struct {
        const char *name;
        int64_t step;
    } cases[] = {{"step-00001000", 1000}, {"step-00000000", 0}, {"step-123456789", 123456789},
        {"step-1000", -1}, {"step-000001000", -1}, {"step-0000100x", -1}, {"step-00001000.tmp", -1},
        {"step--0001000", -1}, {"", -1}, {"step-", -1}, {"step-99999999999999999999", -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(checkpoint_step(cases[i].name), cases[i].step);
}

static void test_commit(void **state)
{
    (void)state;
    struct err e = {0};
    expect_newest(-1, NULL);
    commit_ok(10);
    char *dir = path_of(10, ""), sha[SHA256_HEX], again[SHA256_HEX];
    dir[strlen(dir) - 1] = 0;
    int64_t step = 0;
    assert_int_equal(checkpoint_verify(dir, 1, sha, &step, &e), 0);
    assert_int_equal(step, 10);
    assert_int_equal(checkpoint_verify(dir, 0, again, NULL, &e), 0);
    assert_string_equal(sha, again);
    free(dir);
    expect_newest(10, NULL);
    int64_t *steps;
    commit_ok(5);
    assert_int_equal(checkpoint_list(root, &steps, &e), 2);
    assert_int_equal(steps[0], 5);
    assert_int_equal(steps[1], 10);
    free(steps);
}

static void test_commit_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *name, *text, *says;
    } cases[] = {{"model.safetensors", "longer than it is", "bytes"},
        {"absent.safetensors", "x", "absent"}, {"../model.safetensors", "x", "name"},
        {"MANIFEST.json", "x", "name"}, {"", "x", "name"}};
    write_file(10, "model.safetensors", "weights");
    char *dir = path_of(10, "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err e = {0};
        struct checkpoint_file f = entry(cases[i].name, cases[i].text);
        assert_true(checkpoint_commit(dir, 10, PLAN, 1, &f, 1, &e) < 0);
        if (!strstr(e.msg, cases[i].says))
            fail_msg("%s: %s", cases[i].name, e.msg);
    }
    struct checkpoint_file twice[2] = {
        entry("model.safetensors", "weights"), entry("model.safetensors", "weights")};
    struct err e = {0};
    assert_true(checkpoint_commit(dir, 10, PLAN, 1, twice, 2, &e) < 0);
    free(dir);
    char *sub = path_of(10, "directory");
    assert_int_equal(mkdir(sub, 0700), 0);
    free(sub);
    assert_true(commit(10, &e) < 0);
    assert_non_null(strstr(e.msg, "regular"));
    expect_newest(-1, NULL);
}

enum damage { FLIP, TRUNCATE, EMPTY, APPEND, REMOVE, DIRECTORY, REWRITE };

static void damage_file(int64_t step, const char *name, enum damage how, const char *text)
{
    char *path = path_of(step, name);
    struct buf b = BUF_INIT;
    struct err e = {0};
    assert_int_equal(fs_read(path, 1 << 20, &b, &e), 0);
    if (how == FLIP)
        b.data[b.len / 2] ^= 1;
    if (how == TRUNCATE)
        b.len--;
    if (how == EMPTY)
        b.len = 0;
    if (how == APPEND)
        buf_add_char(&b, 'x');
    if (how == REWRITE) {
        buf_clear(&b);
        buf_add_str(&b, text);
    }
    assert_int_equal(unlink(path), 0);
    if (how == DIRECTORY)
        assert_int_equal(mkdir(path, 0700), 0);
    else if (how != REMOVE)
        assert_int_equal(fs_write_atomic(path, b.data, b.len, &e), 0);
    buf_release(&b);
    free(path);
}

/* Whatever is broken in the newest, the one before is chosen and the damage described. */
static void test_damage(void **state)
{
    static const struct {
        const char *name;
        enum damage how;
        const char *text, *says;
    } cases[] = {
        {"model.safetensors", FLIP, NULL, "model.safetensors: SHA-256"},
        {"model.safetensors", TRUNCATE, NULL, "model.safetensors: 17 bytes, 18 expected"},
        {"model.safetensors", EMPTY, NULL, "0 bytes"},
        {"model.safetensors", APPEND, NULL, "19 bytes"},
        {"model.safetensors", REMOVE, NULL, "No such file"},
        {"model.safetensors", DIRECTORY, NULL, "not a regular file"},
        {"state.json", FLIP, NULL, "state.json: SHA-256"},
        {"state.json", REMOVE, NULL, "state.json"},
        {"MANIFEST.json", TRUNCATE, NULL, "MANIFEST.json"},
        {"MANIFEST.json", EMPTY, NULL, "MANIFEST.json"},
        {"MANIFEST.json", DIRECTORY, NULL, "MANIFEST.json"},
        {"MANIFEST.json", REWRITE, "{}", "version"},
        {"MANIFEST.json", REWRITE, "[]", "version"},
        {"MANIFEST.json", REWRITE, "{\"version\":2}", "version 2"},
        {"MANIFEST.json", REWRITE, "{\"version\":1,\"step\":-1}", "step"},
        {"MANIFEST.json", REWRITE, "{\"version\":1,\"step\":21}", "directory is step-00000020"},
        {"MANIFEST.json", REWRITE, "{\"version\":1,\"step\":20}", "files"},
        {"MANIFEST.json", REWRITE, "{\"version\":1,\"step\":20,\"files\":[]}", "files"},
        {"MANIFEST.json", REWRITE, "{\"version\":1,\"step\":20,\"files\":[3]}", "files[0]"},
        {"MANIFEST.json", REWRITE,
            "{\"version\":1,\"step\":20,\"files\":[{\"name\":\"../"
            "x\",\"bytes\":1,\"sha256\":\"" PLAN "\"}]}",
            "files[0]"},
        {"MANIFEST.json", REWRITE,
            "{\"version\":1,\"step\":20,\"files\":[{\"name\":\"x\",\"bytes\":1,\"sha256\":\"12\"}]"
            "}",
            "files[0]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        commit_ok(10);
        commit_ok(20);
        damage_file(20, cases[i].name, cases[i].how, cases[i].text);
        expect_newest(10, cases[i].says);
        expect_newest(10, "step-00000020");
        tear_down(state);
        assert_int_equal(set_up(state), 0);
    }
    commit_ok(10);
    damage_file(10, "model.safetensors", FLIP, NULL);
    expect_newest(-1, "step-00000010");
}

static void expect_steps(const int64_t *want, int count)
{
    struct err e = {0};
    int64_t *steps;
    assert_int_equal(checkpoint_list(root, &steps, &e), count);
    for (int i = 0; i < count; i++)
        assert_int_equal(steps[i], want[i]);
    free(steps);
}

static void test_retention(void **state)
{
    (void)state;
    struct err e = {0};
    for (int64_t step = 10; step <= 80; step += 10)
        commit_ok(step);
    write_file(35, "model.safetensors", "never committed, old");
    write_file(85, "model.safetensors", "being written");
    assert_int_equal(checkpoint_retain(root, 2, 40, (int64_t[]){10, 20}, 2, &e), 0);
    expect_steps((int64_t[]){10, 20, 40, 70, 80}, 5);
    char *old = path_of(35, ""), *young = path_of(85, "");
    assert_false(fs_exists(old));
    assert_true(fs_exists(young));
    free(old);
    free(young);
    assert_int_equal(checkpoint_retain(root, 2, 0, NULL, 0, &e), 0);
    expect_steps((int64_t[]){70, 80}, 2);
    assert_int_equal(checkpoint_retain(root, 0, 0, NULL, 0, &e), 0); /* the newest always stays */
    expect_steps((int64_t[]){80}, 1);
}

/* The states that a kill can leave, made by hand. */
static void test_killed_states(void **state)
{
    (void)state;
    struct err e = {0};
    commit_ok(10);
    write_file(20, "model.safetensors.tmp.123", "half of it");
    expect_newest(10, NULL);
    write_file(20, "MANIFEST.json.tmp.123", "{\"version\":1,");
    expect_newest(10, NULL);
    commit_ok(20); /* goes through over what was left */
    expect_newest(20, NULL);
    commit_ok(30);
    damage_file(10, "MANIFEST.json", REMOVE, NULL); /* a removal that was cut short */
    damage_file(10, "state.json", REMOVE, NULL);
    assert_int_equal(checkpoint_retain(root, 5, 0, NULL, 0, &e), 0);
    expect_steps((int64_t[]){20, 30}, 2);
    char *gone = path_of(10, "");
    assert_false(fs_exists(gone));
    free(gone);
}

/* A child commits and retires; kill -9 at random instants; what it acknowledged must be there. */
static void test_kill(void **state)
{
    (void)state;
    int64_t step = 0;
    for (uint64_t round = 0; round < 25; round++) {
        int ack[2];
        assert_int_equal(pipe(ack), 0);
        pid_t pid = fork();
        if (pid == 0) {
            for (int64_t s = step + 1;; s++) {
                struct err e;
                if (commit(s, &e) < 0 || write(ack[1], &s, sizeof s) != sizeof s ||
                    checkpoint_retain(root, 2, 0, NULL, 0, &e) < 0)
                    _exit(1);
            }
        }
        close(ack[1]);
        /* In every other round at least one gets through, however slow the disk is. */
        struct pollfd first = {.fd = ack[0], .events = POLLIN};
        if (round % 2)
            assert_int_equal(poll(&first, 1, 10000), 1);
        usleep((useconds_t)(rng_u64(5, round) % 20000));
        kill(pid, SIGKILL);
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        int64_t acked = step, got;
        while (read(ack[0], &got, sizeof got) == sizeof got)
            acked = got;
        close(ack[0]);
        struct buf damaged = BUF_INIT;
        struct err e = {0};
        int64_t newest;
        assert_int_equal(checkpoint_newest(root, &newest, &damaged, &e), 0);
        assert_int_equal(damaged.len, 0);
        buf_release(&damaged);
        assert_true(newest == acked || newest == acked + 1 || (acked == 0 && newest == -1));
        step = newest < 0 ? 0 : newest;
    }
    assert_true(step > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test_setup_teardown(test_commit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_commit_refuses, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_damage, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_retention, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_killed_states, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_kill, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
