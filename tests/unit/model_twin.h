/*
 * The whole model once more, in double, one position after the other, sharing nothing with kernels/
 * but the order of the weights: the oracle of the model's tests. Gradients of it are finite
 * differences.
 */
#ifndef TESTS_MODEL_TWIN_H
#define TESTS_MODEL_TWIN_H

#include "kernels/model.h"

struct twin_result {
    double *hidden; /* (K, B, T, D), or NULL: not wanted */
    double *losses; /* (K) sums over counted targets */
    double *lse_sq; /* (K) sums of squared log-sum-exps of the same, or NULL: not wanted */
};

/* Forward of all passes of b with weights w (the model's flat layout). */
void twin_forward(const struct model_config *c, const struct weight_table *t, const double *w,
    const struct model_batch *b, const struct twin_result *out);

/* scale · (Σ_1 + λ/(K−1) Σ_{k>1} Σ_k), what model_train() differentiates; Σ_k the sum of losses
 * and, times b->z_loss, of squared log-sum-exps. */
double twin_total(const struct model_config *c, const struct weight_table *t, const double *w,
    const struct model_batch *b, double lambda, double scale);

#endif
