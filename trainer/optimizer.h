/*
 * The optimizer over the flat parameters, by weight group: AdamW for all, or Muon or NorMuon for
 * the matrices of the blocks and Adam for the rest.
 *
 *  - WEIGHT_MATRIX is decayed, WEIGHT_VECTOR is not.
 *  - WEIGHT_FUSION has its own learning-rate scale and no decay, and takes no part in 1-pass steps:
 *    such a step has no gradient for it, so neither the weights, nor the moments, nor its count of
 *    updates move.
 *  - The gradient is clipped by its global norm, taken over the tensors that take part: a sum of
 *    squares per part (shards.h), added in table order, in double.
 *  - A norm that is not finite leaves everything as it was, and is reported.
 *
 * AdamW (Loshchilov, Hutter, arXiv 1711.05101), g the clipped gradient, t the group's updates:
 *   m ← β1 m + (1 − β1) g,  v ← β2 v + (1 − β2) g²
 *   w ← w − η (m / (1 − β1ᵗ) / (√(v / (1 − β2ᵗ)) + ε) + λ w)
 * Muon (K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024), for a
 * matrix (rows, columns), μ the momentum:
 *   m ← μ m + (1 − μ) g,  u = μ m + (1 − μ) g (Nesterov),  O = orthogonalised u (kernels/muon.h)
 *   w ← w − η √max(1, rows / columns) O − η λ w
 * NorMuon (Z. Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491): O's
 * rows, one a neuron, are evened out before the step:
 *   v_i ← β2 v_i + (1 − β2) mean_j O_ij²,  O'_ij = O_ij / √v_i,  O ← O' ‖O‖ / ‖O'‖
 * Its paper scales O' to an RMS of 0.2 η instead; keeping Muon's norm, as their published code
 * does, leaves one meaning of η for both, and is what a rate of 1e-2 beside Adam's 5e-4 fits.
 *
 * With several ranks each updates the parts that it owns. Between optimizer_sums() and
 * optimizer_apply() the ranks add up their sums; afterwards owners give their parts to the others.
 *
 * Owns the moments m and v of its parts on the device, laid out as shards.h says: with one rank and
 * AdamW as the parameters. Not thread-safe. Nothing is allocated after optimizer_new().
 * Deterministic as far as the device is.
 */
#ifndef TRAINER_OPTIMIZER_H
#define TRAINER_OPTIMIZER_H

#include <stdint.h>

#include "common/config.h"
#include "common/err.h"
#include "common/safetensors.h"
#include "kernels/device.h"
#include "kernels/weights.h"
#include "trainer/shards.h"

#define OPTIMIZER_GROUPS (WEIGHT_FUSION + 1)
#define OPTIMIZER_FILE   "optimizer-%05d-of-%05d.safetensors" /* rank, world */

struct optimizer;

struct optimizer_settings {
    enum optim_kind kind;
    double rest_lr_scale;        /* times the learning rate, for all but WEIGHT_MATRIX */
    double momentum, muon_beta2; /* μ; NorMuon's β2 */
    double beta1, beta2, eps, weight_decay;
    double clip_norm;       /* 0: never clip */
    double fusion_lr_scale; /* times that, for WEIGHT_FUSION */
    int rank, world;        /* world 0: alone, as 1 */
};

struct optimizer_result {
    double grad_norm; /* before clipping; may be infinite or NaN */
    int skipped;      /* 1: the norm was not finite and nothing moved */
};

/* The table stays the caller's and must outlive the optimizer. */
int optimizer_new(struct device *d, const struct weight_table *table,
    const struct optimizer_settings *settings, struct optimizer **out, struct err *e);
void optimizer_free(struct optimizer **o);

/* One update of `params` from `grads` (device, table->total floats) at learning rate lr; passes of
 * the step. For one rank. */
void optimizer_update(struct optimizer *o, float *params, const float *grads, double lr, int passes,
    struct optimizer_result *out);

/* Its two halves. sums (shards->count): of the squares of each part that this rank owns and that
 * takes part, 0 of the others. */
void optimizer_sums(const struct optimizer *o, const float *grads, int passes, double *sums);
/* sums: of all ranks. Updates the own parts. */
void optimizer_apply(struct optimizer *o, float *params, const float *grads, const double *sums,
    double lr, int passes, struct optimizer_result *out);

/* Bytes that a rank's optimizer takes on the device. */
struct optimizer_memory {
    size_t moments, workspace;
};
void optimizer_memory_of(const struct weight_table *table, enum optim_kind kind, int rank,
    int world, struct optimizer_memory *out);
/* Arithmetic of one update beside sweeps over the parameters, twice the multiplications. */
double optimizer_flops(const struct weight_table *table, enum optim_kind kind);

enum optim_kind optimizer_kind(const struct optimizer *o);
const struct shards *optimizer_shards(const struct optimizer *o);
/* Moments of the own parts on the device, and how often a group has been updated. */
const float *optimizer_m(const struct optimizer *o);
const float *optimizer_v(const struct optimizer *o);
int64_t optimizer_updates(const struct optimizer *o, enum weight_group group);

/* Back to the state of optimizer_new(). */
void optimizer_reset(struct optimizer *o);

/*
 * Saving: tensors "m.<name>" and "v.<name>" of the parts of `rank`, named by shards_name(), that
 * point into host copies of its moments; kind and counts as text for the metadata, NULL-terminated
 * pairs in `meta`. Returns how many tensors: shards_tensors_of(), at most 2 · shards->count.
 */
int optimizer_as_tensors(const struct shards *s, int rank, const float *m, const float *v,
    struct st_tensor *out, char (*names)[128]);

struct optimizer_meta {
    char values[OPTIMIZER_GROUPS][24];
    const char *pairs[2 * OPTIMIZER_GROUPS + 3];
};
void optimizer_meta_make(
    enum optim_kind kind, const int64_t updates[OPTIMIZER_GROUPS], struct optimizer_meta *out);

/*
 * Reads what the ranks of a world of any size wrote: files[r] is rank r's; it may be NULL where
 * optimizer_needs() says so. On failure the state is undefined (reset or load again).
 */
int optimizer_load(
    struct optimizer *o, const struct safetensors *const *files, int world, struct err *e);
/* Whether this rank reads the file of rank r of such a world. */
int optimizer_needs(const struct optimizer *o, int r, int world);

#endif
