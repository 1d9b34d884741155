/* The bus: two real ZeroMQ ends in one process, and a raw socket that sends what it should not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "common/bus.h"
#include "common/fs.h"
#include "common/mem.h"
#include "tests/unit/temp_dir.h"

#define WAIT_MS 5000 /* more than any of these ever takes; only a failure waits so long */

struct fixture {
    char *dir;
    struct bus *bus;
    struct endpoint *router;
    char *path;
};

static void open_at(struct fixture *f, const char *sub)
{
    struct err e = {0};
    f->dir = temp_dir_make();
    f->path = mem_printf("%s/%scontrol", f->dir, sub);
    char *parent = fs_dirname(f->path);
    assert_int_equal(fs_mkdir_p(parent, 0700, &e), 0);
    free(parent);
    assert_int_equal(bus_new(&f->bus, &e), 0);
    assert_int_equal(endpoint_bind(f->bus, f->path, &f->router, &e), 0);
}

static void close_all(struct fixture *f)
{
    endpoint_close(&f->router);
    bus_free(&f->bus);
    free(f->path);
    temp_dir_remove(&f->dir);
}

static void send_text(struct endpoint *ep, const char *peer, int type, const char *text)
{
    struct err e = {0};
    if (endpoint_send(ep, peer, type, 7, 99, text, strlen(text), &e) != 0)
        fail_msg("%s", e.msg);
}

static void expect_text(struct endpoint *ep, const char *peer, int type, const char *text)
{
    struct message m;
    struct err e = {0};
    int rc = endpoint_recv(ep, WAIT_MS, &m, &e);
    if (rc != 1)
        fail_msg("rc %d %s", rc, e.msg);
    assert_int_equal(m.head.type, type);
    assert_int_equal(m.head.run_epoch, 7);
    assert_int_equal(m.head.request_id, 99);
    assert_string_equal(m.peer, peer);
    assert_int_equal(m.body_bytes, strlen(text));
    assert_memory_equal(m.body, text, strlen(text));
    message_release(&m);
}

static void round_trip_at(const char *sub)
{
    struct fixture f;
    struct endpoint *dealer;
    struct err e = {0};
    open_at(&f, sub);
    assert_int_equal(endpoint_connect(f.bus, f.path, "trainer-0", &dealer, &e), 0);
    send_text(dealer, NULL, WIRE_HELLO, "{\"rank\":0}");
    expect_text(f.router, "trainer-0", WIRE_HELLO, "{\"rank\":0}");
    send_text(f.router, "trainer-0", WIRE_WELCOME, "");
    expect_text(dealer, "", WIRE_WELCOME, "");
    endpoint_close(&dealer);
    close_all(&f);
}

static void test_round_trip(void **state)
{
    (void)state;
    round_trip_at("");
}

/* Longer than a UNIX address, shorter than PATH_MAX. */
static void test_long_path(void **state)
{
    (void)state;
    round_trip_at("a-run-with-a-name-that-goes-on-and-on-and-on-and-on/"
                  "and-another-directory-below-it-that-is-as-long-as-the-first-one/sock/");
}

/* A socket that a dead process left is replaced; a file of the user's is not. */
static void test_bind_over_file(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *second = NULL;
    struct err e = {0};
    open_at(&f, "");
    char *file = mem_printf("%s.txt", f.path);
    assert_int_equal(fs_write_atomic(file, "mine", 4, &e), 0);
    assert_int_equal(endpoint_bind(f.bus, file, &second, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "not a socket"));
    assert_int_equal(fs_size(file, &e), 4);
    free(file);
    close_all(&f);
}

/* A DEALER may come first; what it sent waits for the ROUTER. */
static void test_connect_before_bind(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *dealer;
    struct err e = {0};
    open_at(&f, "");
    endpoint_close(&f.router);
    bus_free(&f.bus); /* waits until the socket file is gone */
    assert_int_equal(bus_new(&f.bus, &e), 0);
    assert_int_equal(endpoint_connect(f.bus, f.path, "early", &dealer, &e), 0);
    send_text(dealer, NULL, WIRE_HELLO, "{}");
    usleep(20000);
    assert_int_equal(endpoint_bind(f.bus, f.path, &f.router, &e), 0);
    expect_text(f.router, "early", WIRE_HELLO, "{}");
    endpoint_close(&dealer);
    close_all(&f);
}

/* The ROUTER's process is replaced: the same DEALER goes on with the new one. */
static void test_reconnect(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *dealer;
    struct err e = {0};
    open_at(&f, "");
    assert_int_equal(endpoint_connect(f.bus, f.path, "t", &dealer, &e), 0);
    send_text(dealer, NULL, WIRE_HELLO, "1");
    expect_text(f.router, "t", WIRE_HELLO, "1");
    endpoint_close(&f.router);
    bus_wait(NULL, 0, 100, &e); /* time to notice */
    assert_int_equal(endpoint_bind(f.bus, f.path, &f.router, &e), 0);
    struct message m;
    int rc = 0;
    for (int i = 0; i < 50 && rc == 0; i++) {
        send_text(dealer, NULL, WIRE_HELLO, "2");
        rc = endpoint_recv(f.router, 100, &m, &e);
    }
    assert_int_equal(rc, 1);
    message_release(&m);
    endpoint_close(&dealer);
    close_all(&f);
}

static void test_timeout(void **state)
{
    (void)state;
    struct fixture f;
    struct message m;
    struct err e = {0};
    open_at(&f, "");
    assert_int_equal(endpoint_recv(f.router, 0, &m, &e), 0);
    assert_int_equal(endpoint_recv(f.router, 20, &m, &e), 0);
    struct bus_poll item = {.ep = f.router, .fd = -1};
    assert_int_equal(bus_wait(&item, 1, 20, &e), 0);
    assert_int_equal(item.ready, 0);
    close_all(&f);
}

static void test_peer_gone(void **state)
{
    (void)state;
    struct fixture f;
    struct err e = {0};
    open_at(&f, "");
    assert_int_equal(endpoint_send(f.router, "nobody", WIRE_GRANT, 1, 0, "{}", 2, &e), ERR_IO);
    assert_non_null(strstr(e.msg, "nobody is gone"));
    struct endpoint *dealer;
    assert_int_equal(endpoint_connect(f.bus, f.path, "short-lived", &dealer, &e), 0);
    send_text(dealer, NULL, WIRE_HELLO, "{}");
    expect_text(f.router, "short-lived", WIRE_HELLO, "{}");
    endpoint_close(&dealer);
    int rc = 0;
    for (int i = 0; i < 100 && rc == 0; i++) {
        bus_wait(NULL, 0, 20, &e);
        rc = endpoint_send(f.router, "short-lived", WIRE_GRANT, 1, 0, "{}", 2, &e);
    }
    assert_int_equal(rc, ERR_IO);
    close_all(&f);
}

/* A peer that reads nothing: the queue fills, and the sender is told instead of blocking. */
static void test_queue_full(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *dealer;
    struct err e = {0};
    static char body[4096];
    open_at(&f, "");
    assert_int_equal(endpoint_connect(f.bus, f.path, "sleeper", &dealer, &e), 0);
    send_text(dealer, NULL, WIRE_HELLO, "{}");
    expect_text(f.router, "sleeper", WIRE_HELLO, "{}");
    int rc = 0;
    for (int i = 0; i < 100000 && rc == 0; i++)
        rc = endpoint_send(f.router, "sleeper", WIRE_GRANT, 1, 0, body, sizeof body, &e);
    assert_int_equal(rc, ERR_TIMEOUT);
    endpoint_close(&dealer);
    close_all(&f);
}

/* A second connection under the same identity takes it over. */
static void test_handover(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *one, *two;
    struct message m;
    struct err e = {0};
    open_at(&f, "");
    assert_int_equal(endpoint_connect(f.bus, f.path, "rank-0", &one, &e), 0);
    send_text(one, NULL, WIRE_HELLO, "one");
    expect_text(f.router, "rank-0", WIRE_HELLO, "one");
    assert_int_equal(endpoint_connect(f.bus, f.path, "rank-0", &two, &e), 0);
    send_text(two, NULL, WIRE_HELLO, "two");
    expect_text(f.router, "rank-0", WIRE_HELLO, "two");
    send_text(f.router, "rank-0", WIRE_WELCOME, "hello two");
    expect_text(two, "", WIRE_WELCOME, "hello two");
    assert_int_equal(endpoint_recv(one, 20, &m, &e), 0);
    endpoint_close(&one);
    endpoint_close(&two);
    close_all(&f);
}

/* What a stranger may send: each is dropped with a reason and the next good message arrives. */
static void test_garbage(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *good;
    struct err e = {0};
    uint8_t head[WIRE_HEADER_BYTES];
    struct wire_header h = {.type = WIRE_STOP, .major = WIRE_MAJOR, .body_bytes = 2};
    wire_encode(&h, "{}", head);
    open_at(&f, "");
    void *raw = zmq_socket(zmq_ctx_new(), ZMQ_DEALER);
    int linger = 0;
    zmq_setsockopt(raw, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(raw, ZMQ_ROUTING_ID, "raw", 3);
    char *address = mem_printf("ipc://%s", f.path);
    assert_int_equal(zmq_connect(raw, address), 0);
    free(address);
    struct {
        const char *frames[5], *says;
        size_t sizes[5];
    } cases[] = {
        {{"junk"}, "1 frames", {4}},
        {{""}, "1 frames", {0}},
        {{"junk", "{}"}, "4 bytes", {4, 2}},
        {{(char *)head}, "1 frames", {sizeof head}},
        {{(char *)head, "{]"}, "checksum", {sizeof head, 2}},
        {{(char *)head, "{", "}"}, "3 frames", {sizeof head, 1, 1}},
        {{(char *)head, "{", "}", "", "x"}, "5 frames", {sizeof head, 1, 1, 0, 1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct message m;
        for (int k = 0; k < 5 && cases[i].frames[k]; k++)
            zmq_send(raw, cases[i].frames[k], cases[i].sizes[k],
                k < 4 && cases[i].frames[k + 1] ? ZMQ_SNDMORE : 0);
        assert_int_equal(endpoint_recv(f.router, WAIT_MS, &m, &e), ERR_CORRUPT);
        if (!strstr(e.msg, cases[i].says) || !strstr(e.msg, "raw"))
            fail_msg("case %zu: %s", i, e.msg);
    }
    head[4] = 9;
    zmq_send(raw, head, sizeof head, ZMQ_SNDMORE);
    zmq_send(raw, "{}", 2, 0);
    struct message m;
    assert_int_equal(endpoint_recv(f.router, WAIT_MS, &m, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "9.0"));
    assert_non_null(strstr(e.msg, "1.0"));
    assert_int_equal(endpoint_connect(f.bus, f.path, "good", &good, &e), 0);
    send_text(good, NULL, WIRE_HELLO, "{}");
    expect_text(f.router, "good", WIRE_HELLO, "{}");
    zmq_close(raw);
    endpoint_close(&good);
    close_all(&f);
}

static void test_identity(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *ep = NULL;
    struct err e = {0};
    char longest[BUS_PEER_BYTES + 1];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    open_at(&f, "");
    assert_int_equal(endpoint_connect(f.bus, f.path, "", &ep, &e), ERR_INPUT);
    assert_int_equal(endpoint_connect(f.bus, f.path, "two words", &ep, &e), ERR_INPUT);
    assert_int_equal(endpoint_connect(f.bus, f.path, longest, &ep, &e), ERR_INPUT);
    assert_null(ep);
    close_all(&f);
}

static void test_json(void **state)
{
    (void)state;
    struct fixture f;
    struct endpoint *ep;
    struct message m;
    struct err e = {0};
    open_at(&f, "");
    assert_int_equal(endpoint_connect(f.bus, f.path, "t", &ep, &e), 0);
    assert_int_equal(
        endpoint_send_json(ep, NULL, WIRE_READY, 1, 0, json_pack("{s:i}", "step", 3), &e), 0);
    assert_int_equal(endpoint_send(ep, NULL, WIRE_READY, 1, 0, "[1]", 3, &e), 0);
    assert_int_equal(endpoint_send(ep, NULL, WIRE_READY, 1, 0, "{\"a\":1,\"a\":2}", 13, &e), 0);
    assert_int_equal(endpoint_send(ep, NULL, WIRE_READY, 1, 0, NULL, 0, &e), 0);
    assert_int_equal(endpoint_recv(f.router, WAIT_MS, &m, &e), 1);
    assert_int_equal(m.head.sequence, 1);
    json_t *j = message_json(&m, &e);
    assert_int_equal(json_integer_value(json_object_get(j, "step")), 3);
    json_decref(j);
    message_release(&m);
    for (uint64_t i = 2; i < 5; i++) {
        assert_int_equal(endpoint_recv(f.router, WAIT_MS, &m, &e), 1);
        assert_int_equal(m.head.sequence, i);
        assert_null(message_json(&m, &e));
        assert_non_null(strstr(e.msg, "READY body"));
        message_release(&m);
    }
    endpoint_close(&ep);
    close_all(&f);
}

/* A socket and a descriptor in one wait. */
static void test_wait_fd(void **state)
{
    (void)state;
    struct fixture f;
    struct err e = {0};
    int pipe_fd[2];
    open_at(&f, "");
    assert_int_equal(pipe(pipe_fd), 0);
    assert_int_equal(write(pipe_fd[1], "x", 1), 1);
    struct bus_poll items[2] = {{.ep = f.router, .fd = -1}, {.fd = pipe_fd[0]}};
    assert_int_equal(bus_wait(items, 2, WAIT_MS, &e), 1);
    assert_int_equal(items[0].ready, 0);
    assert_int_equal(items[1].ready, 1);
    close(pipe_fd[0]);
    close(pipe_fd[1]);
    close_all(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_long_path),
        cmocka_unit_test(test_bind_over_file),
        cmocka_unit_test(test_connect_before_bind),
        cmocka_unit_test(test_reconnect),
        cmocka_unit_test(test_timeout),
        cmocka_unit_test(test_peer_gone),
        cmocka_unit_test(test_queue_full),
        cmocka_unit_test(test_handover),
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_wait_fd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
