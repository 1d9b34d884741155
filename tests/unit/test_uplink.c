/* The trainer's control thread against a scheduler played by the test. */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/fs.h"
#include "common/mem.h"
#include "tests/unit/temp_dir.h"
#include "trainer/uplink.h"

#define PATIENCE_MS 10000 /* for what must come; nothing waits so long when it is right */

struct fixture {
    char *dir;
    struct rundir run;
    struct bus *bus;
    struct endpoint *scheduler;
    struct uplink *uplink;
    char peer[BUS_PEER_BYTES]; /* of the trainer, as its last message said */
};

static int setup(void **state)
{
    struct fixture *f = mem_array(1, sizeof *f);
    struct err e;
    f->dir = temp_dir_make();
    f->run.path = f->dir;
    f->run.config.process.heartbeat_seconds = 0.03;
    snprintf(f->run.plan.hash, sizeof f->run.plan.hash, "plan");
    snprintf(f->run.plan.manifest_root, sizeof f->run.plan.manifest_root, "root");
    char *sock = rundir_path(&f->run, "%s", RUNDIR_CONTROL_SOCK), *dir = fs_dirname(sock);
    assert_int_equal(fs_mkdir_p(dir, 0700, &e), 0);
    assert_int_equal(bus_new(&f->bus, &e), 0);
    assert_int_equal(endpoint_bind(f->bus, sock, &f->scheduler, &e), 0);
    free(dir);
    free(sock);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    uplink_stop(&f->uplink, NULL);
    endpoint_close(&f->scheduler);
    bus_free(&f->bus);
    temp_dir_remove(&f->dir);
    free(f);
    return 0;
}

static void start(struct fixture *f, double give_up_seconds)
{
    struct member_id id = {.role = "trainer",
        .rank = 0,
        .world = 1,
        .give_up_seconds = give_up_seconds,
        .run = &f->run};
    struct err e;
    assert_int_equal(uplink_start(f->bus, &id, &f->uplink, &e), 0);
}

/* The next message of `type` to the scheduler; others on the way are dropped. 0: none came. */
static int hear(struct fixture *f, int type, struct message *m, int patience_ms)
{
    double end = clock_seconds() + patience_ms * 1e-3;
    struct err e;
    while (clock_seconds() < end) {
        if (endpoint_recv(f->scheduler, 5, m, &e) != 1)
            continue;
        memcpy(f->peer, m->peer, sizeof f->peer);
        if (m->head.type == type)
            return 1;
        message_release(m);
    }
    return 0;
}

static void tell(struct fixture *f, int type, uint32_t epoch, json_t *j)
{
    struct err e;
    assert_int_equal(endpoint_send_json(f->scheduler, f->peer, type, epoch, 0, j, &e), 0);
}

/* What uplink_next() says within the patience: a message, or an error. */
static int next(struct fixture *f, struct message *m, struct err *e)
{
    double end = clock_seconds() + PATIENCE_MS * 1e-3;
    int rc = 0;
    while (rc == 0 && clock_seconds() < end) {
        struct pollfd p = {.fd = uplink_fd(f->uplink), .events = POLLIN};
        poll(&p, 1, 50);
        rc = uplink_next(f->uplink, m, e);
    }
    return rc;
}

static void welcome(struct fixture *f, uint32_t epoch)
{
    struct message m;
    struct err e;
    assert_int_equal(hear(f, WIRE_HELLO, &m, PATIENCE_MS), 1);
    json_t *j = message_json(&m, &e);
    assert_string_equal(json_string_value(json_object_get(j, "plan_hash")), "plan");
    assert_int_equal(strncmp(m.peer, "trainer-0", 9), 0);
    json_decref(j);
    message_release(&m);
    tell(f, WIRE_WELCOME, epoch, json_pack("{s:n, s:i}", "checkpoint", "step", 0));
    assert_int_equal(next(f, &m, &e), 1);
    assert_int_equal(m.head.type, WIRE_WELCOME);
    message_release(&m);
    assert_int_equal(uplink_epoch(f->uplink), epoch);
}

static void test_heartbeats_flow_while_nobody_calls(void **state)
{
    struct fixture *f = *state;
    struct message m;
    start(f, 60);
    welcome(f, 1);
    for (int i = 0; i < 5; i++) { /* no uplink_ function runs meanwhile, as during a long step */
        tell(f, WIRE_HEARTBEAT, 1, json_object());
        assert_int_equal(hear(f, WIRE_HEARTBEAT, &m, PATIENCE_MS), 1);
        assert_int_equal(m.head.run_epoch, 1);
        message_release(&m);
    }
}

static void test_old_epochs_are_void_both_ways(void **state)
{
    struct fixture *f = *state;
    struct message m;
    struct err e;
    start(f, 60);
    welcome(f, 4);
    tell(f, WIRE_GRANT, 3, json_pack("{s:i}", "step", 1));
    tell(f, WIRE_RELOAD, 5, json_pack("{s:i}", "step", 2));
    tell(f, WIRE_GRANT, 4, json_pack("{s:i}", "step", 3));
    tell(f, WIRE_GRANT, 5, json_pack("{s:i}", "step", 4));
    assert_int_equal(next(f, &m, &e), 1);
    assert_int_equal(m.head.type, WIRE_RELOAD);
    message_release(&m);
    assert_int_equal(next(f, &m, &e), 1);
    assert_int_equal(m.head.type, WIRE_GRANT);
    assert_int_equal(m.head.run_epoch, 5);
    message_release(&m);

    uplink_send(f->uplink, WIRE_STEP, 4, json_pack("{s:i}", "step", 9)); /* of the void history */
    uplink_send(f->uplink, WIRE_READY, 5, json_pack("{s:i}", "step", 1));
    assert_int_equal(hear(f, WIRE_STEP, &m, 200), 0);
}

static void test_order_is_kept_and_bye_comes_last(void **state)
{
    static const int types[] = {WIRE_READY, WIRE_STEP, WIRE_SAVED, WIRE_BYE};
    struct fixture *f = *state;
    struct message m;
    start(f, 60);
    welcome(f, 1);
    for (int i = 0; i < 3; i++)
        uplink_send(f->uplink, types[i], 1, json_pack("{s:i}", "step", i));
    uplink_stop(&f->uplink, "asked to");
    for (int i = 0; i < 4;) {
        struct err e;
        assert_int_equal(endpoint_recv(f->scheduler, PATIENCE_MS, &m, &e), 1);
        if (m.head.type != WIRE_HEARTBEAT && m.head.type != WIRE_HELLO)
            assert_int_equal(m.head.type, types[i++]);
        message_release(&m);
    }
}

static void test_refused(void **state)
{
    struct fixture *f = *state;
    struct message m;
    struct err e = {0};
    start(f, 60);
    assert_int_equal(hear(f, WIRE_HELLO, &m, PATIENCE_MS), 1);
    message_release(&m);
    tell(f, WIRE_REFUSE, 0, json_pack("{s:s}", "reason", "plan hash a, not b"));
    assert_int_equal(next(f, &m, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "plan hash a, not b"));
}

static void test_silence_means_hello_again_and_then_giving_up(void **state)
{
    struct fixture *f = *state;
    struct message m;
    struct err e = {0};
    start(f, 0.5);
    welcome(f, 1);
    assert_int_equal(hear(f, WIRE_HELLO, &m, PATIENCE_MS), 1); /* we have said nothing since */
    message_release(&m);
    assert_int_equal(next(f, &m, &e), ERR_TIMEOUT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_heartbeats_flow_while_nobody_calls, setup, teardown),
        cmocka_unit_test_setup_teardown(test_old_epochs_are_void_both_ways, setup, teardown),
        cmocka_unit_test_setup_teardown(test_order_is_kept_and_bye_comes_last, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(
            test_silence_means_hello_again_and_then_giving_up, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
