/*
 * Evaluation results as a table: a row a checkpoint, columns per pass and per decoding regime.
 * Filled from RUN/evals and from the scheduler's status; the same result twice is one.
 */
#ifndef OPS_EVALS_H
#define OPS_EVALS_H

#include <stdint.h>

#include <jansson.h>

#include "common/config.h"
#include "common/err.h"
#include "common/mem.h"

/* NAN where there is no result. */
struct eval_row {
    int64_t step;
    double pass_nats[CONFIG_MAX_PASSES + 1]; /* all targets, parallel passes; [0] unused */
    double pass_bits[CONFIG_MAX_PASSES + 1]; /* the same, bits/byte */
    double nats[REGIME_COUNT];               /* what the regimes score of a row's second half */
    double bits[REGIME_COUNT];
    double contraction;
};

/* Rows ascending by step; evals_release() frees them. */
struct evals {
    struct eval_row *rows;
    int count;
    double newest; /* time of the newest file read: older ones are not read again */
};

/* Takes every object of the document, however deep, that is a suite's result ({suite, step, …}). */
void evals_take(struct evals *t, const json_t *document);

/* Reads RUN/evals/step-*; none yet is no error, files that are not JSON are passed over.
 * Called again it reads what is new. */
void evals_read(struct evals *t, const char *dir);

void evals_release(struct evals *t);

/* Every number that the config asks for is there. */
int eval_row_complete(const struct eval_row *r, const struct config *c);

/* One row in words: "step 40: pass 1 2.0000, …, standard 2.5000, … nats/token". */
void eval_row_print(const struct eval_row *r, struct buf *out);

/* The table as text, the last `max_rows` rows. Empty when there are none. */
void evals_print(const struct evals *t, int max_rows, struct buf *out);

#endif
