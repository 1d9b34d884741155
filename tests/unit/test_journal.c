/* The journal: what was acknowledged is there after a kill at any instant. */
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
#include <sys/wait.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/rng.h"
#include "scheduler/journal.h"
#include "tests/unit/temp_dir.h"

static char *dir;

static int set_up(void **state)
{
    (void)state;
    dir = temp_dir_make();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    temp_dir_remove(&dir);
    return 0;
}

static struct journal *open_it(void)
{
    struct journal *j;
    struct err e = {0};
    if (journal_open(dir, &j, &e) < 0)
        fail_msg("%s", e.msg);
    return j;
}

static void test_epochs(void **state)
{
    (void)state;
    struct err e = {0};
    uint32_t epoch = 99;
    struct journal *j = open_it();
    assert_int_equal(journal_epoch(j, &epoch, &e), 0);
    assert_int_equal(epoch, 0);
    for (uint32_t i = 1; i <= 3; i++) {
        assert_int_equal(journal_next_epoch(j, 0, &epoch, &e), 0);
        assert_int_equal(epoch, i);
    }
    journal_close(&j);
    j = open_it();
    assert_int_equal(journal_next_epoch(j, 0, &epoch, &e), 0);
    assert_int_equal(epoch, 4);
    journal_close(&j);
}

/* Cut off, a file is refused; that it faults where it is read would end the scheduler. */
static void test_cut_off(void **state)
{
    (void)state;
    struct err e = {0};
    char path[300];
    snprintf(path, sizeof path, "%s/data.mdb", dir);
    struct journal *j = open_it();
    for (int i = 0; i < 500; i++)
        assert_int_equal(journal_event(j, 1, "test", "an event", &e), 0);
    journal_close(&j);
    assert_int_equal(truncate(path, 3 * 4096 + 100), 0);
    int rc = journal_open(dir, &j, &e);
    if (rc == 0) {
        json_t *events = journal_events(j, 0, &e);
        assert_null(events);
        rc = e.code;
        journal_close(&j);
    }
    assert_int_equal(rc, ERR_CORRUPT);
}

static void test_events_and_state(void **state)
{
    (void)state;
    struct err e = {0};
    struct journal *j = open_it();
    assert_null(journal_state(j, &e));
    assert_int_equal(e.code, 0);
    for (int i = 0; i < 40; i++) {
        char text[32];
        snprintf(text, sizeof text, "event %d", i);
        assert_int_equal(journal_event(j, 2, "test", i == 39 ? "not UTF-8: \xff" : text, &e), 0);
    }
    json_t *events = journal_events(j, 2, &e);
    assert_int_equal(json_array_size(events), 2);
    const json_t *event = json_array_get(events, 0);
    assert_string_equal(json_string_value(json_object_get(event, "text")), "event 38");
    event = json_array_get(events, 1);
    assert_string_equal(json_string_value(json_object_get(event, "text")), "not UTF-8: ?");
    json_decref(events);
    assert_int_equal(journal_set_state(j, "finished", "all done", &e), 0);
    journal_close(&j);
    j = open_it();
    json_t *s = journal_state(j, &e);
    assert_string_equal(json_string_value(json_object_get(s, "state")), "finished");
    json_decref(s);
    journal_close(&j);
}

static void test_commits(void **state)
{
    (void)state;
    struct err e = {0};
    struct journal *j = open_it();
    /* Keys sort as numbers, not as text. */
    static const int64_t steps[] = {1000, 9, 256, 255, 70000};
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(
            journal_put_commit(j, steps[i], json_pack("{s:I}", "step", (json_int_t)steps[i]), &e),
            0);
    assert_int_equal(journal_drop_commits_after(j, 256, &e), 0);
    static const int64_t kept[] = {9, 255, 256};
    for (size_t i = 0; i < 3; i++) {
        json_t *commit = journal_commit(j, kept[i], &e);
        assert_int_equal(json_integer_value(json_object_get(commit, "step")), kept[i]);
        json_decref(commit);
    }
    assert_null(journal_commit(j, 1000, &e));
    assert_null(journal_commit(j, 70000, &e));
    assert_int_equal(journal_drop_commits_after(j, -1, &e), 0);
    for (size_t i = 0; i < 3; i++)
        assert_null(journal_commit(j, kept[i], &e));
    journal_close(&j);
}

static void test_put_if_absent(void **state)
{
    (void)state;
    struct err e = {0};
    struct journal *j = open_it();
    assert_int_equal(journal_put_job_if_absent(j, "a", json_pack("{s:i}", "n", 1), &e), 1);
    assert_int_equal(journal_put_job_if_absent(j, "a", json_pack("{s:i}", "n", 2), &e), 0);
    assert_int_equal(journal_put_result_if_absent(
                         j, "a", json_pack("{s:i}", "x", 1), json_pack("{s:i}", "n", 3), &e),
        1);
    assert_int_equal(journal_put_result_if_absent(
                         j, "a", json_pack("{s:i}", "x", 2), json_pack("{s:i}", "n", 4), &e),
        0);
    json_t *r = journal_result(j, "a", &e), *jobs = journal_jobs(j, &e);
    assert_int_equal(json_integer_value(json_object_get(r, "x")), 1);
    assert_int_equal(json_array_size(jobs), 1);
    json_decref(r);
    json_decref(jobs);
    assert_null(journal_result(j, "b", &e));
    journal_close(&j);
}

/* A child writes commits with an event each; kill -9; every acknowledged one is there, in order,
 * whole. */
static void test_kill(void **state)
{
    (void)state;
    int64_t last = 0;
    for (uint64_t round = 0; round < 20; round++) {
        int ack[2];
        assert_int_equal(pipe(ack), 0);
        pid_t pid = fork();
        if (pid == 0) {
            struct journal *j;
            struct err e;
            if (journal_open(dir, &j, &e) < 0)
                _exit(1);
            for (int64_t s = last + 1;; s++)
                if (journal_event(j, 1, "commit", "one more", &e) < 0 ||
                    journal_put_commit(j, s, json_pack("{s:I}", "step", (json_int_t)s), &e) < 0 ||
                    write(ack[1], &s, sizeof s) != sizeof s)
                    _exit(1);
        }
        close(ack[1]);
        /* In every other round at least one gets through, however slow the disk is. */
        struct pollfd first = {.fd = ack[0], .events = POLLIN};
        if (round % 2)
            assert_int_equal(poll(&first, 1, 10000), 1);
        usleep((useconds_t)(rng_u64(11, round) % 30000));
        kill(pid, SIGKILL);
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        int64_t acked = last, got;
        while (read(ack[0], &got, sizeof got) == sizeof got)
            acked = got;
        close(ack[0]);
        struct journal *j = open_it();
        struct err e = {0};
        json_t *events = journal_events(j, 0, &e), *commit;
        int64_t n = 0, m = (int64_t)json_array_size(events);
        while ((commit = journal_commit(j, n + 1, &e))) {
            assert_int_equal(json_integer_value(json_object_get(commit, "step")), ++n);
            json_decref(commit);
        }
        assert_true(n == acked || n == acked + 1);
        assert_true(m >= n && m <= n + (int64_t)round + 1);
        json_decref(events);
        journal_close(&j);
        last = n;
    }
    assert_true(last > 0);
}

static void test_not_a_journal(void **state)
{
    (void)state;
    char path[300], garbage[8192];
    struct journal *j = NULL;
    struct err e = {0};
    memset(garbage, 0x5a, sizeof garbage);
    snprintf(path, sizeof path, "%s/data.mdb", dir);
    assert_int_equal(fs_write_atomic(path, garbage, sizeof garbage, &e), 0);
    assert_true(journal_open(dir, &j, &e) < 0);
    assert_null(j);
    assert_non_null(strstr(e.msg, dir));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_epochs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_events_and_state, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_cut_off, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_commits, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_put_if_absent, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_kill, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_not_a_journal, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
