/*
 * A golden case: one batch, the weights, and what an independent implementation computed from them.
 * Its format is stated in the reference's README; everything in it is checked before use.
 *
 *   struct step_case sc;
 *   if (step_case_read(st, &sc, &e) == 0 && step_run(device, &sc, st, &result, &e) == 0) …
 */
#ifndef TRAINER_STEP_CASE_H
#define TRAINER_STEP_CASE_H

#include <stdint.h>

#include "common/model_config.h"
#include "common/safetensors.h"
#include "kernels/model.h"

struct step_case {
    struct model_config model;
    float lambda;
    struct model_batch batch; /* points into what is owned below */
    int64_t counted;          /* targets that are not −1 */
    int32_t *tokens, *targets;
    uint8_t *masks, *doc_starts;
    float *noise;
};

/* Configuration from the metadata, tensors from the file, without checking them against each other:
 * the caller may replace `model` and `lambda`, then calls step_case_check(). */
int step_case_read(const struct safetensors *st, struct step_case *out, struct err *e);
int step_case_check(const struct step_case *sc, struct err *e);
void step_case_release(struct step_case *sc);

/* What fb-step writes and compares: out.* and g.* tensors. */
struct step_result {
    struct st_tensor *tensors;
    char (*names)[128];
    int count;
    float *losses, total, **hidden, **logits, *grads; /* owned */
    int passes;
    struct weight_table table;
};

/* Runs the case with the weights `w.*` of st: every pass's state and logits, losses, gradients. */
int step_run(struct device *d, const struct step_case *sc, const struct safetensors *st,
    struct step_result *out, struct err *e);
void step_result_release(struct step_result *r);
int step_result_write(const struct step_result *r, const char *path, struct err *e);

struct step_comparison {
    const char *name;
    double error; /* ‖ours − theirs‖ / ‖theirs‖; NAN where it cannot be compared */
    int pass;
};
#define STEP_TOLERANCE 1e-4

/* Every out.* and g.* of st beside ours; *out is the caller's to free. Returns how many, or a code.
 */
int step_compare(const struct step_result *r, const struct safetensors *st,
    struct step_comparison **out, struct err *e);

#endif
