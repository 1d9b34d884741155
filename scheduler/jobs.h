/*
 * Eval jobs: one for every (checkpoint, suite, regime), durable in the journal before anyone hears
 * of it; leased to one evaluator at a time, returned when that one dies, done once its result is
 * durable. A job's id is SHA-256(manifest hash, suite, regime, seed), so the same question is never
 * answered twice, whatever happens between.
 */
#ifndef SCHEDULER_JOBS_H
#define SCHEDULER_JOBS_H

#include <stdint.h>

#include <jansson.h>

#include "common/bus.h"
#include "common/hash.h"
#include "common/rundir.h"
#include "scheduler/journal.h"

#define JOB_MAX_TRIES 5 /* errors and deaths of evaluators, together */

enum job_state { JOB_PENDING, JOB_DONE, JOB_FAILED, JOB_DROPPED, JOB_STATE_COUNT };

struct job {
    char id[SHA256_HEX], manifest_sha256[SHA256_HEX];
    int64_t step;
    int suite, regime, state, tries;
    uint64_t seed;
    char *error;                 /* of the last try, or NULL */
    char holder[BUS_PEER_BYTES]; /* of the lease, "" without one; not in the journal */
};

struct jobs {
    const struct rundir *run;
    struct journal *journal;
    struct job *list; /* ascending by step */
    int count;
};

/* Reads what the journal holds; run and journal must outlive it. */
int jobs_load(struct jobs *q, const struct rundir *run, struct journal *journal, struct err *e);
void jobs_release(struct jobs *q);

/* The jobs of a committed checkpoint, if its step is one to be evaluated. Returns how many are new.
 */
int jobs_add_for(struct jobs *q, int64_t step, const char *manifest_sha256, struct err *e);
/* Forgets (for good) jobs of later steps: those checkpoints are not part of the run any more. */
int jobs_drop_after(struct jobs *q, int64_t step, struct err *e);
/* Forgets pending jobs whose checkpoint is not among `steps` (ascending). */
int jobs_drop_without(struct jobs *q, const int64_t *steps, int count, struct err *e);

/* The oldest job for `peer`: the one it holds already, or the next free one; NULL: nothing to do.
 */
struct job *jobs_lease(struct jobs *q, const char *peer);
/* The body of JOB; job may be NULL. */
json_t *job_message(const struct jobs *q, const struct job *job);
/* An evaluator is gone: what it held is free again, or failed after too many tries. 1: it held one.
 */
int jobs_return(struct jobs *q, const char *peer, struct err *e);

/*
 * A result arrives. 1: new and durable; 0: it was known already; either way it may be acknowledged.
 * ERR_INPUT: no such job. summary.json of its step is written anew; when only that fails, *summary
 * says so and the result counts.
 */
int jobs_result(struct jobs *q, const char *id, json_t *result, struct err *summary, struct err *e);
/* A try failed. The job is free again, or failed for good. */
int jobs_error(struct jobs *q, const char *id, const char *error, struct err *e);

int jobs_pending(const struct jobs *q); /* leased ones too */
int jobs_leased(const struct jobs *q);
/* Steps that jobs still need, ascending and once each; to be freed. */
int jobs_steps(const struct jobs *q, int64_t **steps);
/* [{id, step, suite, regime, result or error}], ascending by step; the caller's. */
json_t *jobs_table(const struct jobs *q);

#endif
