/*
 * Teacher-forced loss in a decoding regime, through the decoder: a row's first half is prefilled as
 * the regime does, its second half is fed token by token and scored.
 */
#ifndef EVALUATOR_REGIME_LOSS_H
#define EVALUATOR_REGIME_LOSS_H

#include "evaluator/suites.h"

struct regime_loss {
    double nats, bytes; /* sums over the scored targets; bytes: their text's length */
    uint64_t tokens;
    double *row_nats; /* (rows), the caller's: mean of each row */
};

/* Adds to `s`. ERR_UNSUPPORTED for SOFT and FUSED where the model has no feedback weights. */
int regime_loss_run(const struct suite_job *job, struct regime_loss *s, struct err *e);

#endif
