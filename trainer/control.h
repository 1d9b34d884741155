/*
 * The control socket of the trainer in a thread of its own, so that heartbeats flow and the
 * scheduler is answered while a step of any length runs.
 *
 * The thread owns the member (common/member.h). Messages for the trainer wait in a queue, in order;
 * what the trainer sends waits in another. A message sent under another run epoch than the newest
 * is dropped: it belongs to a history that is void. Apart from start and stop, functions may be
 * called from any thread.
 */
#ifndef TRAINER_CONTROL_H
#define TRAINER_CONTROL_H

#include <stdint.h>

#include <jansson.h>

#include "common/bus.h"
#include "common/err.h"
#include "common/member.h"

struct control;

/* Connects and starts the thread. id->run must outlive it. */
int control_start(struct bus *bus, const struct member_id *id, struct control **out, struct err *e);

/* Sends what waits (for at most a second) and BYE with the reason, ends the thread. */
void control_stop(struct control **c, const char *reason);

/* Readable when control_next() has something, or the thread has ended with an error. */
int control_fd(const struct control *c);

/* 1: the oldest message (release it); 0: none; ERR_MISMATCH: refused by the scheduler; ERR_TIMEOUT:
 * the scheduler is gone; another code: the socket is unusable. */
int control_next(struct control *c, struct message *out, struct err *e);

/* Queues a message; steals j. */
void control_send(struct control *c, int type, uint32_t run_epoch, json_t *j);

/* The newest run epoch heard of. */
uint32_t control_epoch(const struct control *c);

#endif
