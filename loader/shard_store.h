/*
 * Shards: one LMDB file each, sealed and read-only once built.
 *
 * `blocks` maps a block's number (u64, big-endian) to its value (loader/block.h); `meta` holds what
 * the tokens mean (tokenizer hash, vocabulary, policy, counts). The manifest beside the shards says
 * how large each file must be, so that a truncated one is refused before LMDB maps it.
 *
 * Content hash of a shard: SHA-256 over, for each block in order, (tokens u32, document ends u32,
 * XXH64 of the tokens, XXH64 of the document ends), little-endian. It does not depend on the
 * compressor.
 *
 * Reading: opening walks the index once, notes where each value lies, and closes LMDB again. A read
 * is then one read of the file and never follows LMDB's tree: damage, a disk that fails or a file
 * that is cut off meanwhile cost an error, not a crash. An open shard may be read from several
 * threads, each with its own struct block.
 */
#ifndef LOADER_SHARD_STORE_H
#define LOADER_SHARD_STORE_H

#include <stdint.h>

#include "common/err.h"
#include "common/manifest.h"
#include "loader/block.h"

/* -- reading -- */

struct shard;

/* dir: the source's directory; m and info describe it and must outlive the shard. */
int shard_open(const char *dir, const struct manifest *m, const struct manifest_shard *info,
    struct shard **out, struct err *e);
void shard_close(struct shard **s);

/*
 * Decodes block `i`, checking all of it; asks the system to read `ahead` blocks from i on at once
 * (1 for random access). Where the block is damaged it is read once more, past the page cache's
 * copy. Errors name shard and block; ERR_CORRUPT when both readings are wrong. Returns 0, or 1 when
 * only the second was right.
 */
int shard_block(struct shard *s, uint64_t i, int ahead, struct block *out, struct err *e);

/* Bytes of block i as stored. */
uint64_t shard_block_bytes(const struct shard *s, uint64_t i);

/* -- content hash, block by block -- */

struct shard_hash {
    struct buf rows; /* 24 bytes a block */
};
void shard_hash_add(struct shard_hash *h, const struct block *b);
void shard_hash_final(struct shard_hash *h, char out[SHA256_HEX]); /* and releases */

/* -- writing -- */

struct shard_writer;

/* What every shard of a source shares. */
struct shard_kind {
    const char *tokenizer_sha256;
    int vocab, eot, block_tokens;
    uint64_t max_bytes; /* stored bytes a shard may come to hold, for the map's size */
};

/* Starts PATH (must not exist). The kind must outlive the writer. */
int shard_writer_new(
    const char *path, const struct shard_kind *kind, struct shard_writer **out, struct err *e);
/* Appends a whole document; its first token is the kind's eot. */
int shard_writer_document(struct shard_writer *w, const uint32_t *ids, size_t n, struct err *e);
/* Stored bytes so far, what is not yet a full block left out. */
uint64_t shard_writer_bytes(const struct shard_writer *w);
/* Writes the last block and `meta`, syncs, makes the file read-only and describes it (but
 * info->file). Frees w. */
int shard_writer_seal(struct shard_writer **w, struct manifest_shard *info, struct err *e);
/* Gives up: closes and removes the file. */
void shard_writer_abort(struct shard_writer **w);

#endif
