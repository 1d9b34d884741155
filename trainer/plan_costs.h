/*
 * What a plan costs: steps by pass count, tokens, memory by purpose, arithmetic and time. For
 * people who are about to start a run; nothing here decides anything.
 */
#ifndef TRAINER_PLAN_COSTS_H
#define TRAINER_PLAN_COSTS_H

#include <stdint.h>

#include "common/plan.h"
#include "trainer/plan_memory.h"

struct plan_costs {
    int64_t params;
    int64_t steps[CONFIG_MAX_PASSES + 1]; /* by pass count; [0] unused */
    double rows, tokens;                  /* of the run */
    double token_passes;                  /* tokens times the passes over them */

    struct plan_memory memory; /* of the only rank */

    /* Multiplications and additions of forward and backward. */
    double flops_token[CONFIG_MAX_PASSES + 1]; /* of one token by pass count */
    double flops, flops_one_pass;              /* of the run; were every step 1-pass */
    double fused_share;                        /* of a further pass that is computed, expected */
    double flops_computed;                     /* of the run, so much of the further passes */
    double flops_optimizer;                    /* of the run: Muon's products */

    double matmul_flops; /* per second, measured or given */
    int measured;
    double seconds; /* of the run at PLAN_EFFICIENCY of that rate */
};

/* Share of the bare matrix-multiplication rate that a training step is assumed to reach. */
#define PLAN_EFFICIENCY 0.6

/*
 * run: what is not the plan's: threads, recompute. rate: FLOP/s of matrix products, or 0 to measure
 * it for a fraction of a second on this machine.
 */
int plan_costs_make(const struct plan *p, const struct config *run, double rate,
    struct plan_costs *out, struct err *e);

/* FLOPs of forward and backward of one token in a step of `passes`; attention over half of seq on
 * average, less with a window. */
double plan_flops_token(const struct model_config *m, int seq, int passes);

/* Rows that the run draws from source s. */
uint64_t plan_source_rows(const struct plan *p, int s);

#endif
