/*
 * Choosing a token from logits: greedy, or temperature with top-k and top-p. A draw is a pure
 * function of (seed, prompt, position), so a batch draws what each prompt alone would.
 */
#ifndef EVALUATOR_SAMPLER_H
#define EVALUATOR_SAMPLER_H

#include <stdint.h>

struct sampler {
    float temperature; /* 0: greedy, the lowest id among equals */
    int top_k;         /* 0: off */
    float top_p;       /* 1: off */
    uint64_t seed;
};

/* work: vocab ints, the caller's. *logprob (may be NULL): log-probability of the choice at
 * temperature 1. */
int32_t sampler_choose(const struct sampler *s, const float *logits, int vocab, uint64_t prompt,
    uint64_t position, int32_t *work, double *logprob);

#endif
