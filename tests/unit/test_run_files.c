/* The files of a run when the disk is full or a file has changed: nothing is lost, nothing false is
 * kept. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/fs.h"
#include "common/mem.h"
#include "tests/unit/scheduler_rig.h"

#define NO_EVAL "eval: {every_steps: 0}"

/* No file grows beyond `bytes`: what a full disk is to a write, for this process alone. */
static void room(rlim_t bytes)
{
    struct rlimit r;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &r), 0);
    r.rlim_cur = bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &r), 0);
}

static json_t *line(int n)
{
    return json_pack("{s:i}", "n", n);
}

static void test_metrics_wait_for_room(void **state)
{
    (void)state;
    static const char want[] = "{\"n\":0}\n{\"n\":1}\n{\"n\":2}\n{\"n\":3}\n{\"n\":4}\n";
    struct rig r;
    struct err e = {0};
    struct metrics m;
    struct buf text = BUF_INIT;
    rig_prepare(&r, NO_EVAL);
    char *path = mem_printf("%s/metrics.jsonl", r.dir);
    assert_int_equal(metrics_open(&m, path, &e), 0);
    assert_int_equal(metrics_write(&m, line(0), &e), 0);
    room(11); /* ends within the second line */
    for (int n = 1; n <= 3; n++)
        assert_int_equal(metrics_write(&m, line(n), &e), ERR_IO);
    room(RLIM_INFINITY);
    assert_int_equal(metrics_write(&m, line(4), &e), 0);
    metrics_close(&m);
    assert_int_equal(fs_read(path, 1000, &text, &e), 0);
    assert_string_equal(text.data, want);
    buf_release(&text);
    free(path);
    rig_close(&r);
}

/* The journal does not take the commit, after its manifest was there. */
static void test_a_failed_commit_leaves_no_manifest(void **state)
{
    (void)state;
    struct rig r;
    int64_t *steps;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 3);
    room(16384); /* the journal is larger, the checkpoint's files are smaller */
    rig_train(&r, 1, 4);
    room(RLIM_INFINITY);
    assert_int_equal(r.s->commits.last, 0);
    assert_int_equal(checkpoint_list(r.s->commits.root, &steps, NULL), 0);
    rig_train(&r, 1, 8);
    assert_int_equal(r.s->commits.last, 8);
    rig_restart(&r);
    assert_int_equal(r.s->commits.last, 8);
    rig_close(&r);
}

static void test_another_tokenizer(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    struct buf text = BUF_INIT;
    rig_open(&r, NO_EVAL);
    const char *path = r.run.plan.c.data.tokenizer;
    /* Changed while the run goes on: checkpoints hold the one that it trains with. */
    assert_int_equal(fs_write_atomic(path, "{ }", 3, &e), 0);
    rig_join(&r, 1);
    rig_train(&r, 1, 4);
    char *copy = mem_printf("%s/checkpoints/step-00000004/tokenizer.json", r.dir);
    assert_int_equal(fs_read(copy, 1000, &text, &e), 0);
    assert_string_equal(text.data, "{}");
    scheduler_free(&r.s);
    assert_int_equal(rig_try_start(&r, &e), ERR_MISMATCH);
    char theirs[SHA256_HEX];
    hash_sha256_hex("{ }", 3, theirs);
    assert_non_null(strstr(e.msg, theirs));
    assert_non_null(strstr(e.msg, r.run.plan.tokenizer_sha256));
    buf_release(&text);
    free(copy);
    rig_close(&r);
}

/* Without its journal a run goes on from its checkpoint, in an epoch above that one's. */
static void test_a_lost_journal(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_restart(&r);
    rig_restart(&r);
    rig_join(&r, 1);
    rig_train(&r, 1, 5);
    assert_int_equal(r.s->epoch, 3);
    char *journal = mem_printf("%s/journal", r.dir);
    assert_int_equal(fs_remove_tree(journal, NULL), 0);
    rig_restart(&r);
    assert_int_equal(r.s->commits.last, 4);
    assert_int_equal(r.s->epoch, 4);
    free(journal);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_metrics_wait_for_room),
        cmocka_unit_test(test_a_failed_commit_leaves_no_manifest),
        cmocka_unit_test(test_another_tokenizer),
        cmocka_unit_test(test_a_lost_journal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
