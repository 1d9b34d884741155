/*
 * Generation: many prompts of different lengths at once, in one decoding regime.
 *
 * STANDARD: a plain prompt, plain generation. SOFT: a plain prompt; every generated token's input
 * is fused with the state before it. FUSED: the prompt too, by `fused_passes` passes (0: token by
 * token, the fixed point exactly). Greedy output of a prompt does not depend on the batch it is in.
 */
#ifndef EVALUATOR_GENERATE_H
#define EVALUATOR_GENERATE_H

#include <stdatomic.h>

#include "common/tokenizer.h"
#include "evaluator/sampler.h"
#include "evaluator/snapshot.h"

struct generation {
    const int32_t *prompt; /* the caller's; prompt[0] begins the document */
    int prompt_len;
    int32_t *tokens;  /* (max_new), owned; generation_release() */
    double *logprobs; /* (max_new) */
    int len;          /* tokens made, the end-of-text token not among them */
    int ended;        /* 1: the model ended the text */
};

struct generate_options {
    int regime;       /* enum regime */
    int fused_passes; /* FUSED: passes over the prompt, ≥ 2, or 0 for sequential */
    int max_new;
    struct sampler sampler;
    const atomic_int *stop; /* may be NULL */
    /* called for every new token, in order of position; may be NULL */
    void (*on_token)(void *ctx, int prompt, int32_t token);
    void *ctx;
};

struct generate_times {
    double prefill_seconds, decode_seconds;
    int64_t prefill_tokens, decode_tokens;
};

/* Prompts decoded side by side; more are done in turns. */
enum { GENERATE_SLOTS = DEVICE_DECODE_ROWS };

int generate(struct snapshot *snap, struct generation *items, int count,
    const struct generate_options *o, struct generate_times *times, struct err *e);
void generation_release(struct generation *g);

#endif
