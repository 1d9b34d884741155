/*
 * The full-bandwidth transformer, written once against the device table: K passes forward, and
 * backward through all of them (arXiv 2608.08888; DESIGN: model and objective).
 *
 *   u_1 = n(E[x]);  u_k = mask_k ? fuse(h^{(k−1)}_{t−1} + jitter, E[x_t]) : u_1   (k > 1)
 *   fuse(h, e) = n((W_U h) ⊙ σ(W_G n(e)))         each n() a weightless RMS norm where switched on
 *   h^{(k)} = norm(blocks(u_k));  logits = h Eᵀ
 *   L = L_1 + λ · mean(L_2 … L_K)
 *
 * All memory is taken at model_new() for the given maximum shape; nothing is allocated afterwards.
 *
 * Prefix sharing: where a pass leaves a whole prefix of every document plain, its states there are
 * those of pass 1. Then model_train() computes only the fused tokens of that pass: their queries
 * see pass 1's keys and values of the prefix and their own of the rest, the prefix's loss is pass
 * 1's. The same losses and gradients to rounding. It needs doc_mask.
 *
 * Precision bf16: the products of linear layers (blocks, fusion, readout; forward and both
 * gradients) read operands rounded to bf16 and add in float32. The weights are rounded into a copy
 * at the start of each micro-batch. Of what is kept for backward the SwiGLU's two inputs and the
 * carried state are bf16; the rest (residual stream, queries, keys, values, attention's output,
 * states) is float32, as are weights, gradients, norms, attention, softmax, losses and every sum.
 * Decoding is always float32.
 */
#ifndef KERNELS_MODEL_H
#define KERNELS_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/weights.h"

struct model;

enum { MODEL_MAX_PASSES = 16 }; /* of a training step */

struct model_limits {
    int batch, seq;           /* rows and tokens of the largest micro-batch */
    int passes;               /* most passes of a training step (activations are kept for each) */
    int train;                /* 0: no gradients, activations of one pass only */
    enum precision precision; /* training only */
    int prefix_sharing;       /* 1: share prefixes where a batch and the model allow it */
    enum recompute recompute[MODEL_MAX_PASSES]; /* by pass; training only */
};

/* One micro-batch; all pointers are host memory and stay the caller's. */
struct model_batch {
    int batch, seq;            /* B, T */
    const int32_t *tokens;     /* (B, T) */
    const int32_t *targets;    /* (B, T); −1 is not counted */
    const uint8_t *doc_starts; /* (B, T) */
    int passes;                /* K */
    const uint8_t *masks;      /* (K−1, B, T); NULL when K = 1 */
    float jitter;
    const uint64_t *noise_keys; /* (K−1, B); used where jitter > 0 and noise is NULL */
    const float *noise;         /* (K−1, B, T, D) or NULL: given noise (golden cases) */
    float z_loss;               /* gradients only: of loss + z_loss · (log-sum-exp of logits)² */
};

int model_new(struct device *d, const struct model_config *c, const struct model_limits *lim,
    struct model **out, struct err *e);
void model_free(struct model **m);

const struct model_config *model_config_of(const struct model *m);
const struct weight_table *model_weights(const struct model *m);
struct device *model_device(const struct model *m);
float *model_params(struct model *m); /* device, table->total floats */
float *model_grads(struct model *m);  /* device, the same layout; NULL when not training */

/* What the model takes, by purpose, in bytes; `total` is the sum, SIZE_MAX where that overflows. */
struct model_memory {
    size_t weights, gradients;
    size_t activations[MODEL_MAX_PASSES]; /* kept from forward to backward, by pass */
    size_t workspace;                     /* in turn: scratch, inputs, a chunk of logits */
    size_t total;
};
/* d: its operations say how much workspace they need. Exactly what model_new() allocates. */
void model_memory_estimate(struct device *d, const struct model_config *c,
    const struct model_limits *lim, struct model_memory *out);

/* 1: a model within these limits shares prefixes of batches whose masks allow it. */
int model_limits_share(const struct model_config *c, const struct model_limits *lim);
/* The same of a model. */
int model_shares_prefixes(const struct model *m);
/* 1: the last model_train() did. */
int model_shared(const struct model *m);

/*
 * A micro-batch from outside, checked against what the model requires: ids in range, targets −1 or
 * in range, masks and starts 0 or 1, no fused position 0 or (doc_mask) document start, feedback
 * weights where passes > 1. model_train() and model_forward() trust their caller.
 */
int model_batch_check(const struct model_config *c, const struct model_batch *b, struct err *e);

/*
 * Forward and backward of all passes. Gradients of
 *     scale · (Σ_counted loss_1 + λ/(K−1) · Σ_{k>1} Σ_counted loss_k)
 * are added to model_grads(). With scale = 1 / (counted targets of the whole step) the sum over
 * micro-batches is the gradient of L. loss_sums[K]: sums of losses over counted targets.
 */
void model_train(
    struct model *m, const struct model_batch *b, float lambda, float scale, double *loss_sums);

/*
 * Tells during model_train() which gradients it has finished: those of the weights first … end − 1
 * of the table, one group after another, while it goes on with the rest. Every weight once, those
 * of the fusion only with more than one pass. NULL: nobody is told.
 */
typedef void model_final_fn(void *ctx, int first, int end);
void model_on_final(struct model *m, model_final_fn *final, void *ctx);

/*
 * Forward only, any number of passes: after each pass `visit` (may be NULL) gets host copies of
 * what it asked for: hidden (B, T, D), token losses (B, T), logits (B, T, V); NULL where not asked.
 * Returns 0, what visit returned when it was not 0, or ERR_NOMEM (the copies are allocated for the
 * call).
 */
#define MODEL_WANT_HIDDEN 1
#define MODEL_WANT_LOSSES 2
#define MODEL_WANT_LOGITS 4
struct model_pass {
    int pass; /* from 1 */
    const float *hidden, *losses, *logits;
};
int model_forward(struct model *m, const struct model_batch *b, int want,
    int (*visit)(void *ctx, const struct model_pass *p), void *ctx);

#endif
