/*
 * Who owns which part of the flat parameters: an owner sums the gradient of its parts, keeps their
 * moments and updates them (ZeRO-1).
 *
 * A pure function of (table, optimizer, world). Matrices that an update takes as a whole, and
 * vectors, have one owner; the embedding is cut so that all ranks carry nearly the same. With one
 * rank each tensor is one part.
 */
#ifndef TRAINER_SHARDS_H
#define TRAINER_SHARDS_H

#include <stdint.h>

#include "common/config.h"
#include "kernels/coll.h"
#include "kernels/weights.h"

struct shards {
    const struct weight_table *table; /* the caller's; outlives this */
    int world;
    int count;
    struct coll_span *spans; /* (count) in table order; offsets into the flat array */
    int *weight;             /* (count) index into the table */
    int64_t *local;          /* (count) where the part lies in its owner's own flat arrays */
    int *first;      /* (table->count + 1) the parts of a weight: first[w] … first[w+1] − 1 */
    int64_t *totals; /* (world) floats of a rank's own arrays, padding included */

    /* The second moments, which a part of Muon's does without and of NorMuon's has one a row of. */
    int64_t *second_count;  /* (count) */
    int64_t *second_local;  /* (count) */
    int64_t *second_totals; /* (world) */
};

void shards_make(
    const struct weight_table *table, enum optim_kind optim, int world, struct shards *out);
void shards_release(struct shards *s);

/* Whether part i is its whole tensor. */
int shards_is_whole(const struct shards *s, int i);
/* "m.NAME" of a whole tensor, "m.NAME[FROM:TO]" (floats of the tensor) of a part. */
void shards_name(const struct shards *s, int i, const char *prefix, char out[128]);
/* Tensors that a rank's moments are saved as. */
int shards_tensors_of(const struct shards *s, int rank);
/* Whether Muon or NorMuon updates a tensor, as a whole. */
int shards_is_muon(enum optim_kind optim, const struct weight *w);

#endif
