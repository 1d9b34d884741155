/*
 * A source: one directory of shards as one stream of tokens a split, with random access to rows.
 *
 * Row i of a split is tokens [i·S, i·S + S] of the concatenated stream (S + 1 of them; neighbours
 * share one), over block and shard borders alike. Shards are opened when first needed. Decoded
 * blocks are kept in a small cache. Not thread-safe: the caller guards a source with a lock.
 */
#ifndef LOADER_SOURCE_H
#define LOADER_SOURCE_H

#include <stdint.h>

#include "common/err.h"
#include "common/manifest.h"
#include "loader/block.h"

struct source;

/* Reads the manifest; shards are not touched yet. cache_blocks ≥ 2. */
int source_open(const char *dir, int cache_blocks, struct source **out, struct err *e);
void source_close(struct source **s);

const struct manifest *source_manifest(const struct source *s);
/* ⌊(tokens − 1) / S⌋, 0 if empty */
uint64_t source_rows(const struct source *s, int split, int seq);

/*
 * Row `index` of a split: tokens (S + 1), doc_starts (S): 1 at a document's first token, and at
 * column 0 always. Errors name shard and block.
 */
int source_row(struct source *s, int split, uint64_t index, int seq, uint32_t *tokens,
    uint8_t *doc_starts, struct err *e);

/* Blocks that only their second reading got right, so far. */
uint64_t source_rereads(const struct source *s);

/* -- one block at a time, in order; for inspection -- */

uint64_t source_blocks(const struct source *s, int split);
/* Decodes block `i` of the split; *shard (may be NULL) tells which shard it is in. */
int source_block(struct source *s, int split, uint64_t i, struct block *out, int *shard,
    uint64_t *stored_bytes, struct err *e);

/* Bytes of files done, of all; may be NULL. A value ≠ 0 stops the work with ERR_STOPPED. */
typedef int source_progress(void *arg, uint64_t done, uint64_t total);

/* Checks every shard: the file's SHA-256, all blocks, counts, the content hash in the manifest's
 * root. */
int source_verify(const char *dir, source_progress *progress, void *arg, struct err *e);

#endif
