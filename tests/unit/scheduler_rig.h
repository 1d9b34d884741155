/*
 * A scheduler core on a run directory of its own, and trainers and evaluators that are only
 * messages. Time stands still unless a test moves it.
 */
#ifndef TESTS_UNIT_SCHEDULER_RIG_H
#define TESTS_UNIT_SCHEDULER_RIG_H

#include "scheduler/core.h"

#define RIG_BEAT 1000 /* ms */

struct rig {
    char *dir;
    struct rundir run;
    struct scheduler *s;
    int64_t now;
    struct outgoing *got; /* what the scheduler sent and no one has looked at */
    int count;
};

/* yaml: more lines of the config (flow style, dotted keys), or "". */
void rig_open(struct rig *r, const char *yaml);
/* Only the run directory; no scheduler is started. */
void rig_prepare(struct rig *r, const char *yaml);
void rig_close(struct rig *r);
/* The scheduler is killed, and a new one starts on what lies there. */
void rig_restart(struct rig *r);
int rig_try_start(struct rig *r, struct err *e);

/* A message under the current epoch (or `epoch`); steals body. Then collects what came of it. */
void rig_say(struct rig *r, const char *peer, int type, json_t *body);
void rig_say_epoch(struct rig *r, const char *peer, int type, uint32_t epoch, json_t *body);
void rig_wait(struct rig *r, int64_t ms); /* in steps of a heartbeat, only the clock moves */

/* The oldest message of that kind to peer, taken out; NULL: there is none. The caller's to decref.
 */
json_t *rig_take(struct rig *r, const char *peer, int type);
void rig_expect(struct rig *r, const char *peer, int type); /* and drops it */
void rig_expect_none(struct rig *r, const char *peer, int type);
int64_t json_step(json_t *j); /* "step" of j; drops j */

/* Peers are called trainer-R, loader-0, evaluator-N. */
json_t *rig_hello(const struct rig *r, const char *role, int rank, int world);
void rig_join(struct rig *r, int world); /* all trainers, and takes their WELCOMEs */
void rig_ready(struct rig *r, int rank, int64_t step);
json_t *rig_step_body(const struct rig *r, int rank, int world, int64_t step);
void rig_step(struct rig *r, int rank, int world, int64_t step);
/* Writes the rank's files of a checkpoint: the body of SAVED. */
json_t *rig_saved_body(const struct rig *r, int rank, int world, int64_t step);
void rig_saved(struct rig *r, int rank, int world, int64_t step);
/* Trains to `until` steps as good trainers do, checkpoints with it. */
void rig_train(struct rig *r, int world, int64_t until);

#endif
