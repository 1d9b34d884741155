/*
 * Incremental decoding with a key/value cache and the carried state, for many sequences at once.
 *
 * A decoder has slots; each holds one sequence: its cached keys and values and the top hidden state
 * h of every position. One primitive runs any set of rows (slot, position, token):
 *
 *   plain rows read the token's embedding; fused rows read fuse(h[slot, position−1], e);
 *   all rows' carried states are read before any new one is written.
 *
 * A fused row reads the newest state of the position before it, so a FUSED pass over a prompt must
 * be one call (all rows together) or decoder_prefill(), which keeps the older state at the border
 * of two calls. A row's position may be anything up to the first that its slot has not run yet;
 * running a position forgets those behind it. With doc_mask positions for the rotary embedding
 * count from `first`.
 *
 * From it: STANDARD prefill (all prompt rows plain), FUSED pass k (all prompt rows but document
 * starts fused, the cache overwritten from position 0), sequential prefill (one position a call),
 * generation. Rows of one call that belong to one slot must be at consecutive ascending positions,
 * and attend to each other causally.
 */
#ifndef KERNELS_DECODE_H
#define KERNELS_DECODE_H

#include "kernels/model.h"

struct decoder;

/* slots sequences of up to capacity tokens; at most max_rows rows a call. Shares m's weights. */
int decoder_new(
    struct model *m, int slots, int capacity, int max_rows, struct decoder **out, struct err *e);
void decoder_free(struct decoder **dec);

struct decode_row {
    int slot, pos, first; /* first: first visible position (the document's start) */
    int32_t token;
    int fused; /* 0 or 1; position `first` must be plain */
};

/* Runs n ≤ max_rows rows. logits (n, V) host, or NULL; where row_logits (n) is given only rows with
 * 1 are computed, packed in order. ERR_INPUT for a position past the capacity (or another wrong
 * row), ERR_UNSUPPORTED for a fused row on a model without feedback; then nothing was run. */
int decoder_run(struct decoder *dec, const struct decode_row *rows, int n,
    const uint8_t *row_logits, float *logits, struct err *e);

/* Host copy of h at (slot, pos): D floats. */
void decoder_hidden(struct decoder *dec, int slot, int pos, float *out);

/*
 * Prefill of one prompt of n tokens (position 0 its document's start) in a regime:
 * passes = 1: plain; > 1: that many passes (FUSED); 0: sequential. Returns logits (V) of the last
 * position. Splits into calls of max_rows where n is larger.
 */
int decoder_prefill(struct decoder *dec, int slot, const int32_t *tokens, int n, int passes,
    float *logits, struct err *e);

#endif
