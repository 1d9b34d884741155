/*
 * The suites that need only validation rows: what a snapshot loses on text, per pass and in each
 * decoding regime, and whether the feedback map settles.
 *
 * Results are JSON objects the caller decrefs. Deterministic given (snapshot, rows, threads).
 * `stop` becoming non-zero ends a suite with ERR_STOPPED.
 */
#ifndef EVALUATOR_SUITES_H
#define EVALUATOR_SUITES_H

#include <stdatomic.h>

#include <jansson.h>

#include "common/config.h"
#include "evaluator/rows.h"
#include "evaluator/snapshot.h"

struct suite_job {
    struct snapshot *snapshot;
    const struct rows *rows;
    int suite;        /* enum suite */
    int regime;       /* enum regime; ignored by fixed_point */
    int passes;       /* loss, STANDARD: parallel passes reported */
    int fused_passes; /* loss, FUSED: passes over the prompt; 0 sequential */
    int fixed_point_passes;
    const atomic_int *stop;
};

/*
 * loss: a row's first half is a prompt, its second half is scored token by token as the regime
 * generates (teacher-forced), so the three regimes' numbers are of the same targets:
 *   {rows, tokens, nats_per_token, bits_per_byte, stderr, seconds}
 * STANDARD adds "passes": [{pass, nats_per_token, bits_per_byte}] over all targets of the rows,
 * each pass after the first reading fused input everywhere but at document starts.
 *
 * fixed_point: {rows, tokens, passes: [{pass, relative_change, positions, nats_per_token}],
 * contraction}. relative_change is ‖h_k − h_{k−1}‖ / ‖h_{k−1}‖ over the positions at least k − 1
 * away from their document's start (nearer ones are final whatever the weights); null where none is
 * left. contraction: geometric mean of the ratios of successive changes from pass 3 on, above
 * float32 noise.
 */
int suite_run(const struct suite_job *job, json_t **result, struct err *e);

/* Rows of one parallel forward, and the limits a snapshot needs for these suites. */
enum { SUITE_BATCH_ROWS = 8 };
struct model_limits suite_limits(int seq);

#endif
