/*
 * The control socket of the trainer in a thread of its own, so that heartbeats flow and the
 * scheduler is answered while a step of any length runs.
 *
 * The thread owns the member (common/member.h). Messages for the trainer wait in a queue, in order;
 * what the trainer sends waits in another. A message sent under another run epoch than the newest
 * is dropped: it belongs to a history that is void. Apart from start and stop, functions may be
 * called from any thread.
 */
#ifndef TRAINER_UPLINK_H
#define TRAINER_UPLINK_H

#include <stdint.h>

#include <jansson.h>

#include "common/bus.h"
#include "common/err.h"
#include "common/member.h"

struct uplink;

/* Connects and starts the thread. id->run must outlive it. */
int uplink_start(struct bus *bus, const struct member_id *id, struct uplink **out, struct err *e);

/* Sends what waits (for at most a second) and BYE with the reason, ends the thread. */
void uplink_stop(struct uplink **c, const char *reason);

/* Readable when uplink_next() has something, or the thread has ended with an error. */
int uplink_fd(const struct uplink *c);

/* 1: the oldest message (release it); 0: none; ERR_MISMATCH: refused by the scheduler; ERR_TIMEOUT:
 * the scheduler is gone; another code: the socket is unusable. */
int uplink_next(struct uplink *c, struct message *out, struct err *e);

/* Queues a message; steals j. */
void uplink_send(struct uplink *c, int type, uint32_t run_epoch, json_t *j);

/* The newest run epoch heard of. */
uint32_t uplink_epoch(const struct uplink *c);

#endif
