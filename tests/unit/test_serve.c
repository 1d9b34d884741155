/*
 * The scheduler as a process: the lock, signals, strangers on its socket, kill -9. The trainer is
 * messages over the real socket.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include "common/clock.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/member.h"
#include "scheduler/serve.h"
#include "tests/unit/scheduler_rig.h"

#define CONFIG                                                                                     \
    "eval.every_steps: 0\n"                                                                        \
    "process.heartbeat_seconds: 0.2"
#define LIMIT_SECONDS 20 /* only a failure takes so long */

static pid_t start(const struct rig *r)
{
    pid_t pid = fork();
    if (pid == 0)
        _exit(scheduler_serve(&r->run));
    assert_true(pid > 0);
    return pid;
}

static int exit_code(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

struct client {
    const struct rig *r;
    struct bus *bus;
    struct member *m;
    uint32_t epoch;
    int64_t step;
    int finished;
};

static void client_open(struct client *c, const struct rig *r)
{
    struct err e = {0};
    struct member_id id = {.role = "trainer", .world = 1, .give_up_seconds = 60, .run = &r->run};
    *c = (struct client){.r = r};
    assert_int_equal(bus_new(&c->bus, &e), 0);
    if (member_new(c->bus, &id, &c->m, &e) < 0)
        fail_msg("%s", e.msg);
}

static void client_close(struct client *c)
{
    member_free(&c->m, "done");
    bus_free(&c->bus);
}

static void client_ready(struct client *c)
{
    if (c->step < c->r->run.plan.c.train.steps)
        member_send(c->m, WIRE_READY, 0, json_pack("{s:I}", "step", (json_int_t)c->step), NULL);
}

static void client_take(struct client *c, const struct message *m)
{
    struct err e = {0};
    json_t *j = message_json(m, &e);
    int64_t step = json_integer_value(json_object_get(j, "step"));
    int load = m->head.type == WIRE_WELCOME || m->head.type == WIRE_RELOAD;
    if (load && m->head.run_epoch > c->epoch) {
        c->epoch = m->head.run_epoch;
        c->step = step;
        client_ready(c);
    } else if (m->head.type == WIRE_GRANT && step == c->step) {
        member_send(c->m, WIRE_STEP, 0, rig_step_body(c->r, 0, 1, step), NULL);
        c->step++;
        if (json_is_true(json_object_get(j, "checkpoint")))
            member_send(c->m, WIRE_SAVED, 0, rig_saved_body(c->r, 0, 1, c->step), NULL);
        client_ready(c);
    } else if (m->head.type == WIRE_CHECKPOINT) {
        member_send(c->m, WIRE_SAVED, 0, rig_saved_body(c->r, 0, 1, step), NULL);
    }
    c->finished |= m->head.type == WIRE_FINISH;
    json_decref(j);
}

/* Trains until `until` steps are done, or FINISH. */
static void client_run(struct client *c, int64_t until)
{
    struct err e = {0};
    double end = clock_seconds() + LIMIT_SECONDS;
    while (!c->finished && c->step < until) {
        struct message m;
        struct bus_poll item = {.ep = member_endpoint(c->m), .fd = -1};
        assert_true(clock_seconds() < end);
        assert_true(bus_wait(&item, 1, member_tick(c->m, &e), &e) >= 0);
        for (int rc; (rc = member_recv(c->m, &m, &e)) != 0 && c->step < until;) {
            if (rc < 0)
                fail_msg("%s", e.msg);
            client_take(c, &m);
            message_release(&m);
        }
    }
}

static void wait_for(const struct rig *r, const char *name)
{
    char *path = mem_printf("%s/%s", r->dir, name);
    double end = clock_seconds() + LIMIT_SECONDS;
    while (!fs_exists(path) && clock_seconds() < end)
        usleep(5000);
    assert_true(fs_exists(path));
    free(path);
}

static void test_whole_run(void **state)
{
    (void)state;
    struct rig r;
    struct client c;
    rig_prepare(&r, CONFIG);
    pid_t pid = start(&r);
    client_open(&c, &r);
    client_run(&c, INT64_MAX);
    client_close(&c);
    assert_int_equal(exit_code(pid), 0);
    wait_for(&r, "summary.json");
    assert_int_equal(exit_code(start(&r)), 0); /* finished before */
    rig_close(&r);
}

static void test_second_scheduler(void **state)
{
    (void)state;
    struct rig r;
    rig_prepare(&r, CONFIG);
    pid_t pid = start(&r);
    wait_for(&r, RUNDIR_CONTROL_SOCK);
    assert_int_equal(exit_code(start(&r)), EXIT_STAY_DOWN);
    kill(pid, SIGTERM);
    assert_int_equal(exit_code(pid), 0);
    rig_close(&r);
}

static void test_sigterm(void **state)
{
    (void)state;
    struct rig r;
    struct client c;
    rig_prepare(&r, CONFIG);
    pid_t pid = start(&r);
    client_open(&c, &r);
    client_run(&c, 6);
    kill(pid, SIGTERM);
    client_run(&c, INT64_MAX);
    client_close(&c);
    assert_int_equal(exit_code(pid), 0);
    struct err e = {0};
    struct buf damaged = BUF_INIT;
    int64_t step;
    char *root = mem_printf("%s/checkpoints", r.dir);
    assert_int_equal(checkpoint_newest(root, &step, &damaged, &e), 0);
    assert_true(step >= 6); /* everything that was granted when the signal came */
    buf_release(&damaged);
    free(root);
    rig_close(&r);
}

/* The scheduler dies again and again under a trainer that stays. */
static void test_kill(void **state)
{
    (void)state;
    struct rig r;
    struct client c;
    rig_prepare(&r, CONFIG);
    pid_t pid = start(&r);
    client_open(&c, &r);
    for (int64_t until = 3; until < 12; until += 4) {
        client_run(&c, until);
        kill(pid, SIGKILL);
        assert_int_equal(exit_code(pid), -SIGKILL);
        pid = start(&r);
    }
    client_run(&c, INT64_MAX);
    client_close(&c);
    assert_int_equal(exit_code(pid), 0);
    wait_for(&r, "summary.json");
    rig_close(&r);
}

static void test_strangers(void **state)
{
    (void)state;
    struct rig r;
    struct client c;
    rig_prepare(&r, CONFIG);
    pid_t pid = start(&r);
    void *ctx = zmq_ctx_new(), *raw = zmq_socket(ctx, ZMQ_DEALER);
    char *address = mem_printf("ipc://%s/" RUNDIR_CONTROL_SOCK, r.dir);
    int linger = 0;
    zmq_setsockopt(raw, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(raw, ZMQ_ROUTING_ID, "stranger", 8);
    zmq_connect(raw, address);
    for (int type = 0; type < 40; type++) {
        uint8_t head[WIRE_HEADER_BYTES];
        struct wire_header h = {.type = type, .major = WIRE_MAJOR, .body_bytes = 4};
        wire_encode(&h, "[3]{", head);
        zmq_send(raw, head, sizeof head, ZMQ_SNDMORE | ZMQ_DONTWAIT);
        zmq_send(raw, "[3]{", 4, ZMQ_DONTWAIT);
        zmq_send(raw, "noise", 5, ZMQ_DONTWAIT);
    }
    client_open(&c, &r);
    client_run(&c, INT64_MAX);
    client_close(&c);
    assert_int_equal(exit_code(pid), 0);
    zmq_close(raw);
    zmq_ctx_term(ctx);
    free(address);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_run),
        cmocka_unit_test(test_second_scheduler),
        cmocka_unit_test(test_sigterm),
        cmocka_unit_test(test_kill),
        cmocka_unit_test(test_strangers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
