/*
 * The evaluator's working thread: scores one job at a time so that the main thread can keep the
 * heartbeats flowing. It keeps the last snapshot and the validation rows between jobs.
 */
#ifndef EVALUATOR_WORKER_H
#define EVALUATOR_WORKER_H

#include <jansson.h>

#include "common/bus.h"
#include "common/rundir.h"

struct worker;

struct worker_job {
    char *checkpoint; /* directory; freed by worker_job_release */
    int suite, regime;
};
void worker_job_release(struct worker_job *j);

/* threads: the device's. The run and the bus must outlive the worker. */
int worker_new(
    struct bus *b, const struct rundir *run, int threads, struct worker **out, struct err *e);
/* Tells the thread to stop (between two batches) and waits for it. */
void worker_free(struct worker **w);

/* Starts a job; takes over its strings. The worker must be idle (CHECK). */
void worker_start(struct worker *w, struct worker_job *job);
int worker_busy(const struct worker *w);

/* Readable when a job has ended. */
int worker_fd(const struct worker *w);

/*
 * After worker_fd() was readable: 0 and *result (the caller's), or the job's error. Idle
 * afterwards.
 */
int worker_finish(struct worker *w, json_t **result, struct err *e);

/* The same job without a thread, for scoring by hand. */
int worker_score(struct bus *b, const struct rundir *run, int threads, const struct worker_job *job,
    json_t **result, struct err *e);

#endif
