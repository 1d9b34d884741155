/*
 * A daemon's side of the control socket: HELLO until welcomed, heartbeats both ways, the run epoch,
 * and what to do when the scheduler is silent. Loader, trainer and evaluator all use it.
 *
 *     member_new(bus, &id, &m, &e);
 *     for (;;) {
 *         int wait = member_tick(m, &e);            // sends what is due; < 0: give up
 *         struct bus_poll items[] = {{.ep = member_endpoint(m), .fd = -1}, …};
 *         bus_wait(items, n, wait, &e);
 *         while ((rc = member_recv(m, &msg, &e)) == 1)
 *             … msg is WELCOME, RELOAD, GRANT, JOB, FINISH, …
 *     }
 *
 * The epoch is the highest one welcomed or told by RELOAD; older messages are dropped here. When
 * the scheduler has been silent for 3 heartbeats HELLO is sent again (it may have restarted), and a
 * second WELCOME is handed to the caller. Not thread-safe: one thread owns a member.
 */
#ifndef COMMON_MEMBER_H
#define COMMON_MEMBER_H

#include <stdint.h>

#include <jansson.h>

#include "common/bus.h"
#include "common/rundir.h"

struct member;

struct member_id {
    const char *role; /* "trainer", "loader", "evaluator" */
    int rank, world;
    double give_up_seconds;   /* scheduler gone for so long: member_tick fails with ERR_TIMEOUT */
    const struct rundir *run; /* plan hash, manifest root, socket path; must outlive the member */
};

int member_new(struct bus *b, const struct member_id *id, struct member **out, struct err *e);

/* Sends BYE with the reason (may be NULL: none is sent) and closes. */
void member_free(struct member **m, const char *reason);

struct endpoint *member_endpoint(struct member *m);

/*
 * Sends HELLO or HEARTBEAT when due. Returns the milliseconds until the next one is, or ERR_TIMEOUT
 * when the scheduler has been gone for give_up_seconds.
 */
int member_tick(struct member *m, struct err *e);

/*
 * 1: a message for the caller (release it); 0: nothing more now. ERR_MISMATCH: REFUSEd, the
 * scheduler's reason in e (the process exits 100). ERR_IO: the socket is unusable. Heartbeats are
 * taken in here. Frames that are not ours are dropped.
 */
int member_recv(struct member *m, struct message *msg, struct err *e);

/* Sends with the current epoch; steals j. */
int member_send(struct member *m, int type, uint64_t request_id, json_t *j, struct err *e);

int member_welcomed(const struct member *m);
uint32_t member_epoch(const struct member *m);

#endif
