/*
 * The loader: rows against the plan and the sources; the daemon over its sockets, with and without
 * a scheduler (a stand-in here), and with damaged data.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/batch.h"
#include "common/bus.h"
#include "common/cursor.h"
#include "common/fs.h"
#include "common/rundir.h"
#include "loader/serve.h"
#include "loader/source.h"
#include "tests/unit/temp_dir.h"
#include "tests/unit/text_case.h"

enum { SEQ = 48, BATCH_ROWS = 8, MICRO_ROWS = 4, STEPS = 30, SOURCES = 2, WAIT_MS = 10000 };

static char *dir, *program;
static struct rundir run;

static int set_up(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    int existed;
    dir = temp_dir_make();
    char *bin = text_case_bin();
    program = mem_printf("%s/fb-loader", bin);
    free(bin);
    text_case_tokenizer(dir, "tokenizer.json");
    text_case_source(dir, "one", 0, 60, 8000);
    text_case_source(dir, "two", 100, 30, 8000);
    char *yaml = mem_printf("run: {name: r, dir: %s}\n"
                            "model: {dim: 32, layers: 1, heads: 2}\n"
                            "data: {tokenizer: %s/tokenizer.json, seq_len: %d, sources: ["
                            "{name: one, path: %s/one, weight: 3}, {name: two, path: %s/two}]}\n"
                            "train: {steps: %d, batch_rows: %d, micro_rows: %d}\n"
                            "optim: {warmup_steps: 1}\n",
        dir, dir, SEQ, dir, dir, STEPS, BATCH_ROWS, MICRO_ROWS);
    if (config_parse(yaml, strlen(yaml), "test", NULL, 0, &c, &e) < 0 ||
        rundir_create(&c, &run, &existed, &e) < 0)
        fail_msg("%s", e.msg);
    config_release(&c);
    free(yaml);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    rundir_release(&run);
    temp_dir_remove(&dir);
    free(program);
    return 0;
}

/* A body against what plan and sources say, row by row. */
static void check_batch(const void *body, size_t n, const struct batch_request *r)
{
    struct source *sources[SOURCES];
    struct batch b;
    struct err e = {0};
    uint32_t tokens[SEQ + 1];
    uint8_t starts[SEQ];
    for (int i = 0; i < SOURCES; i++)
        assert_int_equal(source_open(run.plan.sources[i].path, 4, &sources[i], NULL), 0);
    if (batch_decode(body, n, 257, &b, &e) < 0)
        fail_msg("%s", e.msg);
    assert_true(b.stream == r->stream && b.step == r->step && b.lo == r->lo && b.seq == SEQ);
    assert_int_equal(b.rows, r->hi - r->lo);
    for (int k = 0; k < b.rows; k++) {
        struct sample x = r->stream == BATCH_TRAIN
                              ? plan_train_sample(&run.plan, r->lo + (uint64_t)k)
                              : plan_val_sample(&run.plan, r->lo + (uint64_t)k);
        assert_true(b.sample_ids[k] == x.id);
        assert_int_equal(
            source_row(sources[x.source], r->stream == BATCH_TRAIN ? SPLIT_TRAIN : SPLIT_VAL,
                x.index, SEQ, tokens, starts, NULL),
            0);
        assert_memory_equal(b.tokens + k * (SEQ + 1), tokens, sizeof tokens);
        assert_memory_equal(b.doc_starts + k * SEQ, starts, sizeof starts);
    }
    batch_release(&b);
    for (int i = 0; i < SOURCES; i++)
        source_close(&sources[i]);
}

static void test_server(void **state)
{
    (void)state;
    struct server *s;
    struct server_stats st;
    struct buf body = BUF_INIT;
    struct err e = {0};
    uint64_t total = STEPS * BATCH_ROWS, val = plan_val_rows(&run.plan);
    const struct batch_request requests[] = {{BATCH_TRAIN, 0, 0, 4}, {BATCH_TRAIN, 0, 4, 8},
        {BATCH_TRAIN, 0, 0, 4}, {BATCH_VAL, 0, 0, 3}, {BATCH_TRAIN, 20, 160, 168},
        {BATCH_TRAIN, 1, 8, 8}, {BATCH_VAL, 0, val - 1, val}, {BATCH_TRAIN, 29, total - 8, total},
        {BATCH_TRAIN, 0, 0, total}};
    const struct batch_request refused[] = {{BATCH_TRAIN, 0, total - 1, total + 1},
        {BATCH_TRAIN, 0, UINT64_MAX - 1, UINT64_MAX}, {BATCH_VAL, 0, val, val + 1},
        {BATCH_TRAIN, 0, 4, 3}};
    if (server_new(&run.plan, 1, &s, &e) < 0)
        fail_msg("%s", e.msg);
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        buf_clear(&body);
        if (server_answer(s, &requests[i], &body, &e) < 0)
            fail_msg("%s", e.msg);
        check_batch(body.data, body.len, &requests[i]);
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        buf_clear(&body);
        assert_int_equal(server_answer(s, &refused[i], &body, &e), ERR_INPUT);
        assert_int_equal(body.len, 0);
    }
    server_stats(s, &st);
    assert_int_equal(st.answers, sizeof requests / sizeof *requests);
    server_free(&s);
    buf_release(&body);
}

/* A source that is not the plan's is refused, naming both roots. */
static void test_other_root(void **state)
{
    (void)state;
    struct server *s;
    struct err e = {0};
    struct plan *p = &run.plan;
    char *path = p->sources[0].path;
    p->sources[0].path = p->sources[1].path;
    assert_int_equal(server_new(p, 1 << 20, &s, &e), ERR_MISMATCH);
    p->sources[0].path = path;
    char first[17] = {0}, second[17] = {0};
    memcpy(first, p->sources[0].manifest_root, 16);
    memcpy(second, p->sources[1].manifest_root, 16);
    assert_non_null(strstr(e.msg, first));
    assert_non_null(strstr(e.msg, second));
}

/* -- the daemon -- */

static pid_t start(int standalone)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        execl(program, "fb-loader", "--run", run.path, standalone ? "--standalone" : NULL,
            (char *)NULL);
        _exit(127);
    }
    return pid;
}

/* Its exit code, or −1 when it does not leave in time (then it is killed). */
static int exit_code(pid_t pid)
{
    int status;
    for (int ms = 0; ms < WAIT_MS; ms += 10) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid)
            return WIFEXITED(status) ? WEXITSTATUS(status) : -2;
        usleep(10000);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return -1;
}

static void ask(struct endpoint *ep, const struct batch_request *r, uint64_t id, struct message *m)
{
    struct buf body = BUF_INIT;
    struct err e = {0};
    batch_request_encode(r, &body);
    assert_int_equal(endpoint_send(ep, NULL, WIRE_GET, 5, id, body.data, body.len, &e), 0);
    buf_release(&body);
    int rc = endpoint_recv(ep, WAIT_MS, m, &e);
    if (rc != 1)
        fail_msg("no answer: %s", e.msg);
    assert_int_equal(m->head.request_id, id);
    assert_int_equal(m->head.run_epoch, 5);
}

static void expect_nak(struct endpoint *ep, const struct batch_request *r, const char *says)
{
    struct message m;
    ask(ep, r, 9, &m);
    assert_int_equal(m.head.type, WIRE_NAK);
    json_t *j = message_json(&m, NULL);
    const char *reason = json_string_value(json_object_get(j, "reason"));
    assert_non_null(reason);
    if (!strstr(reason, says))
        fail_msg("%s", reason);
    assert_true(json_is_false(json_object_get(j, "retry")));
    json_decref(j);
    message_release(&m);
}

static struct endpoint *connect_to(struct bus *bus, const char *part)
{
    struct endpoint *ep;
    char *sock = rundir_path(&run, "%s", part);
    assert_int_equal(endpoint_connect(bus, sock, "tester", &ep, NULL), 0);
    free(sock);
    return ep;
}

static void test_standalone(void **state)
{
    (void)state;
    struct bus *bus;
    struct message m;
    pid_t pid = start(1);
    assert_int_equal(bus_new(&bus, NULL), 0);
    struct endpoint *ep = connect_to(bus, RUNDIR_LOADER_SOCK);
    for (uint64_t step = 0; step < STEPS; step += 3) {
        struct batch_request r = {BATCH_TRAIN, step, step * BATCH_ROWS, (step + 1) * BATCH_ROWS};
        ask(ep, &r, step + 1, &m);
        assert_int_equal(m.head.type, WIRE_BATCH);
        check_batch(m.body, m.body_bytes, &r);
        message_release(&m);
    }
    struct batch_request beyond = {BATCH_TRAIN, STEPS, STEPS * BATCH_ROWS, STEPS * BATCH_ROWS + 1};
    expect_nak(ep, &beyond, "beyond the run");
    assert_int_equal(endpoint_send(ep, NULL, WIRE_STOP, 5, 9, "{}", 2, NULL), 0);
    assert_int_equal(endpoint_recv(ep, WAIT_MS, &m, NULL), 1);
    assert_int_equal(m.head.type, WIRE_NAK);
    message_release(&m);
    assert_int_equal(exit_code(start(1)), 100); /* a second one is refused, the first goes on */
    struct batch_request val = {BATCH_VAL, 0, 0, 2};
    ask(ep, &val, 3, &m);
    assert_int_equal(m.head.type, WIRE_BATCH);
    message_release(&m);
    endpoint_close(&ep);
    bus_free(&bus);
    kill(pid, SIGTERM);
    assert_int_equal(exit_code(pid), 0);
}

/* kill -9 loses nothing: its successor takes the socket over and answers. */
static void test_killed(void **state)
{
    (void)state;
    struct bus *bus;
    struct message m;
    struct batch_request r = {BATCH_TRAIN, 0, 0, 8};
    pid_t pid = start(1);
    assert_int_equal(bus_new(&bus, NULL), 0);
    struct endpoint *ep = connect_to(bus, RUNDIR_LOADER_SOCK);
    ask(ep, &r, 1, &m);
    message_release(&m);
    kill(pid, SIGKILL);
    assert_int_equal(exit_code(pid), -2);
    pid = start(1);
    ask(ep, &r, 2, &m);
    check_batch(m.body, m.body_bytes, &r);
    message_release(&m);
    endpoint_close(&ep);
    bus_free(&bus);
    kill(pid, SIGTERM);
    assert_int_equal(exit_code(pid), 0);
}

/* Plays the scheduler: greets, answers with one message, returns the loader's exit code. */
static int with_scheduler(int type, const char *body)
{
    struct bus *bus;
    struct endpoint *ep;
    struct message m;
    char *sock = rundir_path(&run, "%s", RUNDIR_CONTROL_SOCK);
    assert_int_equal(bus_new(&bus, NULL), 0);
    assert_int_equal(endpoint_bind(bus, sock, &ep, NULL), 0);
    pid_t pid = start(0);
    assert_int_equal(endpoint_recv(ep, WAIT_MS, &m, NULL), 1);
    assert_int_equal(m.head.type, WIRE_HELLO);
    json_t *j = message_json(&m, NULL);
    assert_string_equal(json_string_value(json_object_get(j, "role")), "loader");
    assert_string_equal(json_string_value(json_object_get(j, "plan_hash")), run.plan.hash);
    json_decref(j);
    j = json_pack("{s:i, s:n, s:i}", "heartbeat_ms", 100, "checkpoint", "step", 0);
    if (type != WIRE_REFUSE)
        assert_int_equal(
            endpoint_send_json(ep, m.peer, WIRE_WELCOME, 1, 0, json_incref(j), NULL), 0);
    json_decref(j);
    assert_int_equal(endpoint_send(ep, m.peer, type, 1, 0, body, strlen(body), NULL), 0);
    message_release(&m);
    int code = exit_code(pid);
    endpoint_close(&ep);
    bus_free(&bus);
    free(sock);
    return code;
}

static void test_scheduler(void **state)
{
    (void)state;
    assert_int_equal(with_scheduler(WIRE_FINISH, "{\"reason\": \"done\"}"), 0);
    assert_int_equal(with_scheduler(WIRE_REFUSE, "{\"reason\": \"other plan\"}"), 100);
}

/* Damages every block of one shard: rows in it are refused by name, others are served. Runs last.
 */
static void test_damaged(void **state)
{
    (void)state;
    struct bus *bus;
    char *path = mem_printf("%s/two/train-00000.shard", dir);
    struct buf file = BUF_INIT;
    assert_int_equal(fs_read(path, 1 << 30, &file, NULL), 0);
    for (char *p = file.data; (p = memmem(p, file.len - (size_t)(p - file.data), "FBBK", 4));
         p += 4)
        p[50] ^= 1;
    chmod(path, 0644);
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, file.data, file.len, 0), file.len);
    close(fd);
    pid_t pid = start(1);
    assert_int_equal(bus_new(&bus, NULL), 0);
    struct endpoint *ep = connect_to(bus, RUNDIR_LOADER_SOCK);
    int refused = 0, served = 0;
    for (uint64_t i = 0; i < 64; i++) {
        struct batch_request r = {BATCH_TRAIN, 0, i, i + 1};
        struct message m;
        ask(ep, &r, 1, &m);
        served += m.head.type == WIRE_BATCH;
        if (m.head.type == WIRE_NAK && refused++ == 0)
            expect_nak(ep, &r, "source two");
        if (m.head.type == WIRE_NAK)
            expect_nak(ep, &r, "train-00000.shard: block ");
        message_release(&m);
    }
    assert_true(refused > 0);
    assert_true(served > 32);
    endpoint_close(&ep);
    bus_free(&bus);
    kill(pid, SIGTERM);
    assert_int_equal(exit_code(pid), 0);
    buf_release(&file);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_server),
        cmocka_unit_test(test_other_root),
        cmocka_unit_test(test_standalone),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_scheduler),
        cmocka_unit_test(test_damaged),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
