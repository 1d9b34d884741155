/*
 * The journal: what the scheduler must still know after it was killed, in an LMDB environment.
 * Every call that writes is one transaction, durable when it returns: either all of it is there
 * after a power cut or nothing.
 *
 *   meta     run_epoch, state                     JSON values
 *   events   sequence (u64, big-endian) → {time, run_epoch, kind, text}
 *   commits  step (u64, big-endian) → {step, run_epoch, manifest_sha256, cursor}
 *   jobs     id → {id, step, suite, regime, seed, manifest_sha256, state, tries, error}
 *   results  job id → {…}, put if absent
 *
 * One process, one thread; never open the same directory twice.
 */
#ifndef SCHEDULER_JOURNAL_H
#define SCHEDULER_JOURNAL_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"

struct journal;

/* Makes DIR where it is missing. */
int journal_open(const char *dir, struct journal **out, struct err *e);
void journal_close(struct journal **j);

/* The last run epoch; 0 before the first. */
int journal_epoch(struct journal *j, uint32_t *epoch, struct err *e);
/* One more, and more than `above`, durably. */
int journal_next_epoch(struct journal *j, uint32_t above, uint32_t *epoch, struct err *e);

int journal_event(
    struct journal *j, uint32_t run_epoch, const char *kind, const char *text, struct err *e);
/* The last `max` events, oldest first; the caller's. NULL on failure. */
json_t *journal_events(struct journal *j, int max, struct err *e);

/* What the run came to: {state, reason}; NULL (and no error) before the first. */
int journal_set_state(struct journal *j, const char *state, const char *reason, struct err *e);
json_t *journal_state(struct journal *j, struct err *e);

/* Records a commit; steals `commit`. */
int journal_put_commit(struct journal *j, int64_t step, json_t *commit, struct err *e);
/* Forgets the commits of later steps, as a resume from an older checkpoint has to. */
int journal_drop_commits_after(struct journal *j, int64_t step, struct err *e);
json_t *journal_commit(struct journal *j, int64_t step, struct err *e);

/* 1: stored, 0: there was one already (which stays). Steals the value. */
int journal_put_job_if_absent(struct journal *j, const char *id, json_t *job, struct err *e);
int journal_put_job(struct journal *j, const char *id, json_t *job, struct err *e);
json_t *journal_jobs(struct journal *j, struct err *e); /* array */

/* The same; in one transaction with the job's new state. */
int journal_put_result_if_absent(
    struct journal *j, const char *id, json_t *result, json_t *job, struct err *e);
json_t *journal_result(struct journal *j, const char *id, struct err *e); /* NULL: none */

#endif
