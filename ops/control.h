/*
 * The operator's side of the control socket: asks the scheduler for its status and tells it to
 * stop. Nothing blocks; an absent scheduler simply does not answer.
 */
#ifndef OPS_CONTROL_H
#define OPS_CONTROL_H

#include <jansson.h>

#include "common/bus.h"
#include "common/rundir.h"

struct control;

int control_new(const struct rundir *run, struct control **out, struct err *e);
void control_free(struct control **c);

struct endpoint *control_endpoint(struct control *c);

int control_ask_status(struct control *c, struct err *e);
int control_ask_stop(struct control *c, struct err *e);

/* 1: *type is WIRE_STATUS or WIRE_STOP_ACK and *body the caller's to decref; 0: nothing more now.
 * What else arrives is dropped. Waits up to timeout_ms for the first message. */
int control_take(struct control *c, int timeout_ms, int *type, json_t **body, struct err *e);

/* Asks and waits up to timeout_ms; NULL when no scheduler answers. */
json_t *control_status(struct control *c, int timeout_ms);

#endif
