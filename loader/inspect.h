/*
 * What a source holds: counts, lengths of documents, compression; and one row as text.
 */
#ifndef LOADER_INSPECT_H
#define LOADER_INSPECT_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"
#include "common/mem.h"
#include "loader/source.h"

#define INSPECT_BINS 32 /* bin k counts documents of 2^k … 2^(k+1) − 1 tokens */

struct inspection {
    uint64_t blocks, raw_bytes, stored_bytes; /* stored: the blocks' values */
    uint64_t documents, tokens, shortest, longest;
    uint64_t lengths[INSPECT_BINS];
};

/* Reads every block of a split. progress as in source_verify(). */
int inspect_split(struct source *s, int split, source_progress *progress, void *arg,
    struct inspection *out, struct err *e);

/* Everything about a source as JSON; per: SPLIT_COUNT inspections. The caller's to drop. */
json_t *inspect_json(const struct manifest *m, const struct inspection *per);
/* The same to read. */
void inspect_print(const struct manifest *m, const struct inspection *per, struct buf *out);

/*
 * Row `index` of S tokens, decoded with the tokenizer at `tokenizer_path`, "⟦document⟧" put before
 * each document that begins in it. ERR_MISMATCH when the source was made with another tokenizer.
 */
int inspect_row(struct source *s, int split, uint64_t index, int seq, const char *tokenizer_path,
    struct buf *out, struct err *e);

#endif
