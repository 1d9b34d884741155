/*
 * The scheduler without sockets: messages, signals and the time go in, messages come out. One
 * object is one run; it owns the run directory's files (the caller holds the lock).
 *
 *     scheduler_open(&run, NULL, now, &s, &e);
 *     while (!scheduler_done(s)) {
 *         scheduler_message(s, peer, &header, body, now);   // each that arrived
 *         scheduler_tick(s, now);
 *         while (scheduler_next(s, &out)) … send it; where that fails: scheduler_unreachable()
 *     }
 *
 * Every message of a known type is validated field by field; one that is wrong is logged and
 * dropped. Times are milliseconds of any monotonic clock. Not thread-safe.
 */
#ifndef SCHEDULER_CORE_H
#define SCHEDULER_CORE_H

#include <stdint.h>

#include <jansson.h>

#include "common/log.h"
#include "common/rundir.h"
#include "common/wire.h"
#include "scheduler/commits.h"
#include "scheduler/jobs.h"
#include "scheduler/journal.h"
#include "scheduler/members.h"
#include "scheduler/metrics.h"
#include "scheduler/steps.h"

enum run_state {
    RUN_STARTING, /* not every rank is there and ready */
    RUN_TRAINING,
    RUN_SAVING, /* every step that may run has; the checkpoint is on its way */
    RUN_EVALUATING,
    RUN_FINISHED, /* from here on nothing changes any more */
    RUN_STOPPED,
    RUN_FAILED,
    RUN_STATE_COUNT
};
const char *run_state_name(int state);

#define EXIT_STAY_DOWN 100 /* do not restart me */
#define EXIT_RESTART   111

/* Waits, in milliseconds; NULL to scheduler_open() takes the usual ones. */
struct scheduler_tuning {
    int64_t heartbeat_ms;      /* 0: the config's */
    int64_t evaluator_wait_ms; /* all is trained, jobs wait, and no evaluator is there */
    int64_t retry_pause_ms; /* before the last checkpoint is tried again; grows by it each time */
    int retries;
    int64_t stop_wait_ms; /* a stop that does not get its checkpoint */
};

struct outgoing {
    char peer[BUS_PEER_BYTES];
    int type;
    uint32_t run_epoch;
    uint64_t request_id;
    json_t *body; /* the receiver's to decref */
};

#define RECENT_STEPS 32
#define MAX_WARNINGS 16

/* What STATUS tells of the training. */
struct progress {
    struct step_report last;
    int has_last;
    struct {
        int64_t at_ms, step;
        int passes;
    } recent[RECENT_STEPS];
    int recent_count;
    struct {
        int64_t step; /* −1: not seen */
        double loss;
    } pass[CONFIG_MAX_PASSES];
};

struct scheduler {
    const struct rundir *run;
    struct scheduler_tuning tuning;
    struct journal *journal;
    struct commits commits;
    struct jobs jobs;
    struct members members;
    struct steps steps;
    struct metrics metrics;
    int metrics_failing; /* the last line could not be written */
    struct progress progress;
    uint32_t epoch;
    int state, exit_code;
    char reason[512];

    int stopping;             /* a clean stop is under way */
    int64_t stop_deadline_ms; /* when it is given up */
    int64_t retry_at_ms;      /* 0: no checkpoint to be tried again */
    int retries;
    int64_t next_heartbeat_ms, last_tick_ms, started_ms;
    int64_t evaluator_seen_ms;

    char *warnings[MAX_WARNINGS];
    int warning_count;
    uint64_t dropped; /* messages that were not ours or not now */

    struct outgoing *outbox;
    int outbox_first, outbox_count, outbox_cap;
};

/* run must outlive it. ERR_ when the run directory cannot be used. */
int scheduler_open(const struct rundir *run, const struct scheduler_tuning *tuning, int64_t now_ms,
    struct scheduler **out, struct err *e);
void scheduler_free(struct scheduler **s);

/* body: the parsed JSON object, borrowed; NULL where it was none (the message is dropped). */
void scheduler_message(struct scheduler *s, const char *peer, const struct wire_header *h,
    const json_t *body, int64_t now_ms);
/* Timers; call it after the messages that have arrived, at least when scheduler_wait_ms() is over.
 */
void scheduler_tick(struct scheduler *s, int64_t now_ms);
int64_t scheduler_wait_ms(const struct scheduler *s, int64_t now_ms);
/* The clean stop: what is granted is finished and committed, then everyone leaves. */
void scheduler_stop(struct scheduler *s, const char *reason, int64_t now_ms);
/* A message could not be delivered. */
void scheduler_unreachable(struct scheduler *s, const char *peer, int64_t now_ms);
/* Takes the next outgoing message; 0: none. */
int scheduler_next(struct scheduler *s, struct outgoing *out);
int scheduler_done(const struct scheduler *s); /* then exit_code and reason hold */

/* -- for the other files of the core -- */

/* Logs, writes the event to the journal, and keeps warnings for STATUS. */
void say(struct scheduler *s, enum log_level level, const char *kind, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* The same for what others send wrongly: not in the journal, and ever fewer lines of a flood. */
void complain(struct scheduler *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Into metrics.jsonl; steals line. A failure is said once, and when it is over. */
void record(struct scheduler *s, json_t *line);
/* Queues a message; steals body. */
void post(struct scheduler *s, const char *peer, int type, uint64_t request_id, json_t *body);
/* To all of a role (ROLE_COUNT: to all). */
void post_all(struct scheduler *s, int role, int type, const json_t *body);
/* The end, whatever it is: recorded, and said to everyone. */
void conclude(struct scheduler *s, int state, int exit_code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* {checkpoint, step}: where a trainer is to continue. */
json_t *position_json(const struct scheduler *s);

#endif
