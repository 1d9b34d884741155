/*
 * Which steps may start, and what the finished ones saw. No messages and no clock: READY and STEP
 * come in as calls, grants come out.
 *
 * A step is granted when every rank holds its data, in order, at most STEPS_AHEAD beyond the last
 * step that all ranks have reported, and below `limit`. A step is done when all ranks have reported
 * it; then its digests are compared with the plan's and chained into the cursor.
 *
 * Digests of a STEP are of the rows that its rank trained: micro-batches m ≡ rank (mod world).
 */
#ifndef SCHEDULER_STEPS_H
#define SCHEDULER_STEPS_H

#include <stdint.h>

#include <jansson.h>

#include "common/cursor.h"
#include "common/plan.h"

#define STEPS_AHEAD  4
#define STEPS_WINDOW 64 /* how far ahead a rank may be ready */

/* What a STEP says, or the sum over ranks. */
struct step_report {
    int64_t step;
    int passes;
    double losses[CONFIG_MAX_PASSES]; /* NAN: not finite */
    double total, grad_norm, lr, seconds, wait_seconds;
    int skipped; /* the update was not made: the gradient was not finite */
    int64_t tokens, rows;
    struct step_digest digest;
};

struct step_slot {
    int reported;              /* ranks */
    struct step_report report; /* rank by rank added up */
};

struct steps {
    const struct plan *plan;
    struct cursor cursor; /* what all ranks have done */
    int64_t granted;      /* the next step to grant */
    int64_t limit;        /* no step from here on is granted */
    int64_t save_every;   /* a checkpoint after every so many steps; 0: only after the last */
    int world;            /* 0: no trainer yet */
    uint8_t *ready;       /* (world, STEPS_WINDOW): of steps granted …, slot = step mod window */
    int64_t *next;        /* (world): the step each rank reports next */
    struct step_slot slots[STEPS_WINDOW];
};

void steps_init(struct steps *s, const struct plan *p, int64_t save_every);
void steps_release(struct steps *s);
/* Back to `cursor`, with `world` ranks that hold nothing. Leaves `limit`. */
void steps_reset(struct steps *s, const struct cursor *cursor, int world);

int step_report_parse(
    const json_t *j, const struct plan *p, struct step_report *out, struct err *e);

/* 0 also for a step that was granted already; ERR_INPUT far beyond the window or the run's end. */
int steps_ready(struct steps *s, int rank, int64_t step, struct err *e);
/* 1: *step may run now, and is counted as granted. */
int steps_grant(struct steps *s, int64_t *step);
/* Whether a checkpoint is due after `step`. */
int steps_checkpoint_after(const struct steps *s, int64_t step);

/*
 * 1: with this the step is done by all ranks: *done is their sum and the cursor stands behind it.
 * 0: taken, or known already. ERR_MISMATCH: the rank trained other rows than the plan's.
 * ERR_STATE: a report before it is missing, or a step that was never granted.
 */
int steps_report(struct steps *s, int rank, const struct step_report *r, struct step_report *done,
    struct err *e);

#endif
