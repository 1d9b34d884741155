/*
 * The bodies of GET and BATCH: rows of tokens on their way from loader to trainer or evaluator.
 * Little-endian; see common/proto.abnf.
 */
#ifndef COMMON_BATCH_H
#define COMMON_BATCH_H

#include <stdint.h>

#include "common/err.h"
#include "common/mem.h"

enum batch_stream { BATCH_TRAIN = 0, BATCH_VAL = 1 };

/* Asks for the rows of ordinals [lo, hi) (validation: row numbers). */
struct batch_request {
    int stream;
    uint64_t step, lo, hi;
};

/* Arrays are owned; batch_release() frees them. */
struct batch {
    int stream;
    uint64_t step, lo;
    int rows, seq;        /* R, S */
    uint64_t *sample_ids; /* (R) */
    uint32_t *tokens;     /* (R, S + 1): inputs are [0, S), targets [1, S] */
    uint8_t *doc_starts;  /* (R, S): 1 at the first token of a document; column 0 always 1 */
    uint64_t content;     /* Σ row_digest over the rows, as the loader computed it */
};

void batch_request_encode(const struct batch_request *r, struct buf *out);
int batch_request_decode(const void *body, size_t n, struct batch_request *out, struct err *e);

void batch_encode(const struct batch *b, struct buf *out);
/* Validates sizes, token ids < vocab, doc_starts ∈ {0, 1}; recomputes the content digest and
 * refuses a difference. */
int batch_decode(const void *body, size_t n, int vocab, struct batch *out, struct err *e);
int batch_new(int rows, int seq, struct batch *out, struct err *e); /* zeroed arrays */
void batch_release(struct batch *b);

#endif
