/*
 * The training side of the scheduler: run epochs, grants, finished steps, checkpoints, the clean
 * stop, and the way from the last step to the end of the run.
 */
#ifndef SCHEDULER_TRAINING_H
#define SCHEDULER_TRAINING_H

#include "scheduler/core.h"

/* A trainer takes its place (no other holds the rank); its world is the run's from now on. */
void training_join(struct scheduler *s, int world);
/* A trainer is gone (and no member any more): back to the last commit in a new epoch. */
void training_lost(struct scheduler *s, const char *why, int64_t now_ms);

/* What a trainer of this epoch says. */
void training_ready(struct scheduler *s, int rank, const json_t *body);
void training_step(struct scheduler *s, int rank, const json_t *body, int64_t now_ms);
void training_saved(struct scheduler *s, int rank, const json_t *body, int64_t now_ms);

void training_stop(struct scheduler *s, const char *reason, int64_t now_ms);
/* The step after which a stop ends, or the last commit's when there is nothing to wait for. */
int64_t training_stop_step(const struct scheduler *s);
/* Retention: after a commit, and when a checkpoint may have become free of jobs. */
void training_retain(struct scheduler *s);
/* Timers: retries, the stop's limit, the end of the run. */
void training_tick(struct scheduler *s, int64_t now_ms);

#endif
