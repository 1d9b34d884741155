/*
 * ZeroMQ sockets that speak the wire format, and the poll loop's needs.
 *
 * A bus is one ZeroMQ context (one a process). An endpoint is one socket: ROUTER where it was
 * bound, DEALER where it was connected. Not thread-safe: an endpoint belongs to the thread that
 * uses it. Paths longer than a UNIX socket address allows are handled. LINGER is 0; nothing here
 * blocks without a timeout.
 */
#ifndef COMMON_BUS_H
#define COMMON_BUS_H

#include <jansson.h>

#include "common/err.h"
#include "common/wire.h"

struct bus;
struct endpoint;

#define BUS_PEER_BYTES 64

/* A received message; body belongs to it, message_release() frees. */
struct message {
    struct wire_header head;
    char peer[BUS_PEER_BYTES]; /* printable identity of the sender on a ROUTER; "" on a DEALER */
    void *body;
    size_t body_bytes;
};
void message_release(struct message *m);

int bus_new(struct bus **out, struct err *e);
void bus_free(struct bus **b);

/* ROUTER (MANDATORY, HANDOVER) on the UNIX socket `path` (its directory must exist; a stale file is
 * replaced). */
int endpoint_bind(struct bus *b, const char *path, struct endpoint **out, struct err *e);
/* DEALER to `path` under `identity` (≤ 63 printable characters); reconnects by itself for ever. */
int endpoint_connect(
    struct bus *b, const char *path, const char *identity, struct endpoint **out, struct err *e);
void endpoint_close(struct endpoint **ep);

/* Sequence numbers are filled in. peer: NULL on a DEALER. ERR_IO when a ROUTER's peer is gone,
 * ERR_TIMEOUT when the queue is full. Never blocks. */
int endpoint_send(struct endpoint *ep, const char *peer, int type, uint32_t run_epoch,
    uint64_t request_id, const void *body, size_t n, struct err *e);
/* The same with a JSON body; steals the reference to j. */
int endpoint_send_json(struct endpoint *ep, const char *peer, int type, uint32_t run_epoch,
    uint64_t request_id, json_t *j, struct err *e);

/*
 * 1: a message; 0: none within timeout_ms; ERR_CORRUPT/ERR_MISMATCH: a frame that is not ours was
 * dropped (say so, go on); ERR_IO: the socket is unusable. EINTR counts as a time-out.
 */
int endpoint_recv(struct endpoint *ep, int timeout_ms, struct message *m, struct err *e);

/* JSON body of m (an object), or NULL with the reason. Caller decrefs. */
json_t *message_json(const struct message *m, struct err *e);

/* Waits until one of the endpoints (or descriptors: fd ≥ 0) is readable; ready[i] = 0 or 1. Returns
 * their number, 0 on time-out or EINTR. Poll an item through either `ep` or `fd`. */
struct bus_poll {
    struct endpoint *ep;
    int fd;
    int ready;
};
int bus_wait(struct bus_poll *items, int count, int timeout_ms, struct err *e);

#endif
