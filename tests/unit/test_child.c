/* ops/child: what an exit means, the back-off, real processes and their logs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/fs.h"
#include "ops/child.h"
#include "ops/last_error.h"
#include "tests/unit/temp_dir.h"

static char *dir;

static int make_dir(void **state)
{
    (void)state;
    dir = temp_dir_make();
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    temp_dir_remove(&dir);
    return 0;
}

#define EXITED(n) ((n) << 8)

static void verdicts(void **state)
{
    static const struct {
        int status;
        enum child_verdict verdict;
        const char *words;
    } cases[] = {
        {EXITED(0), CHILD_LEFT, "exit 0"},
        {EXITED(1), CHILD_FATAL, "exit 1"},
        {EXITED(2), CHILD_FATAL, "exit 2"},
        {EXITED(100), CHILD_FATAL, "exit 100"},
        {EXITED(111), CHILD_RESTART, "exit 111"},
        {SIGKILL, CHILD_RESTART, "signal 9 (Killed)"},
        {SIGSEGV, CHILD_RESTART, "signal 11 (Segmentation fault)"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct child c = {.state = CHILD_RUNNING};
        char words[64];
        assert_int_equal(child_ended(&c, cases[i].status, 1), cases[i].verdict);
        assert_int_equal(c.state, cases[i].verdict == CHILD_RESTART ? CHILD_WAITING : CHILD_OUT);
        child_end_words(cases[i].status, words);
        assert_string_equal(words, cases[i].words);
    }
}

static void backoff(void **state)
{
    static const double expected[] = {0.5, 1, 2, 4, 8, 16, 30, 30, 30};
    struct child c = {0};
    double now = 1000;
    (void)state;
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        c.started_at = now;
        now += 1; /* it ran for a second */
        child_ended(&c, SIGKILL, now);
        assert_true(fabs(c.restart_at - now - expected[i]) < 1e-9);
        assert_int_equal(c.deaths, (int)i + 1);
        now = c.restart_at;
    }
    c.started_at = now;
    now += 61; /* and now for a minute: it starts over */
    child_ended(&c, EXITED(111), now);
    assert_true(fabs(c.restart_at - now - 0.5) < 1e-9);
    c.started_at = now;
    for (int i = 2; i < CHILD_MAX_DEATHS; i++)
        assert_int_equal(child_ended(&c, EXITED(111), now), CHILD_RESTART);
    assert_int_equal(child_ended(&c, EXITED(111), now), CHILD_FATAL);
}

static int run_shell(struct child *c, const char *script)
{
    int status = -1;
    struct err e;
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "shell");
    c->argv[0] = mem_strdup("/bin/sh");
    c->argv[1] = mem_strdup("-c");
    c->argv[2] = mem_strdup(script);
    assert_int_equal(child_start(c, dir, &e), 0);
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    child_release(c);
    return status;
}

static void log_of(const char *name, struct buf *out)
{
    char *path = mem_printf("%s/%s", dir, name);
    assert_int_equal(fs_read(path, 1 << 26, out, NULL), 0);
    free(path);
}

static void processes(void **state)
{
    struct child c;
    struct buf log = BUF_INIT;
    (void)state;
    assert_int_equal(run_shell(&c, "echo one; echo two >&2; exit 7"), EXITED(7));
    assert_int_equal(run_shell(&c, "kill -9 $$"), SIGKILL);
    /* Its own process group, so that Ctrl-C is the supervisor's alone; and its log is appended to.
     */
    assert_int_equal(
        run_shell(&c, "set -- $(cat /proc/$$/stat); [ $5 = $$ ] && echo three"), EXITED(0));
    log_of("shell.log", &log);
    assert_string_equal(log.data, "one\ntwo\nthree\n");
    buf_release(&log);
}

static void missing_program(void **state)
{
    struct child c = {.name = "nothing"};
    struct err e;
    int status;
    struct buf log = BUF_INIT;
    (void)state;
    c.argv[0] = mem_strdup("/nonexistent/program");
    assert_int_equal(child_start(&c, dir, &e), 0);
    waitpid(c.pid, &status, 0);
    child_release(&c);
    assert_int_equal(status, EXITED(1));
    log_of("nothing.log", &log);
    assert_non_null(strstr(log.data, "/nonexistent/program: No such file"));
    buf_release(&log);
}

static void rotation(void **state)
{
    struct child c;
    struct buf log = BUF_INIT;
    char *path = mem_printf("%s/shell.log", dir);
    (void)state;
    assert_int_equal(truncate(path, (off_t)CHILD_LOG_BYTES + 1), 0);
    run_shell(&c, "echo fresh");
    log_of("shell.log", &log);
    assert_string_equal(log.data, "fresh\n");
    log_of("shell.log.1", &log);
    assert_int_equal(log.len, CHILD_LOG_BYTES + 1);
    buf_release(&log);
    free(path);
}

static void last_errors(void **state)
{
    static const struct {
        const char *log, *found;
    } cases[] = {
        {"", ""},
        {"a\nb\n", "b"},
        {"ts=1 level=error msg=\"bad shard\"\nts=2 level=info msg=bye\n", "bad shard"},
        {"ts=1 level=error msg=\"it failed\" step=3 why=\"no \\\"x\\\" in a\\\\b\" text=\"y\"\n",
            "it failed: no \"x\" in a\\b"},
        {"ts=1 level=error msg=\"a why=\\\"b\" rank=1\n", "a why=\"b"},
        {"ts=1 level=error msg=x\nfb-loader: shard 3: checksum\nbye",
            "fb-loader: shard 3: checksum"},
    };
    struct buf line = BUF_INIT;
    char *path = mem_printf("%s/some.log", dir);
    (void)state;
    last_error(path, 0, &line);
    assert_int_equal(line.len, 0);
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(fs_write_atomic(path, cases[i].log, strlen(cases[i].log), NULL), 0);
        last_error(path, 0, &line);
        assert_string_equal(line.len ? line.data : "", cases[i].found);
    }
    last_error(
        path, (off_t)strlen(cases[i - 1].log) - 3, &line); /* an earlier life does not count */
    assert_string_equal(line.data, "bye");
    buf_release(&line);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(verdicts),
        cmocka_unit_test(backoff),
        cmocka_unit_test(processes),
        cmocka_unit_test(missing_program),
        cmocka_unit_test(rotation),
        cmocka_unit_test(last_errors),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
