/*
 * A block: the value a shard stores for up to `block_tokens` consecutive tokens of its stream.
 *
 *   0 magic u32 "FBBK"   4 version u8   5 codec u8 (1: zstd)   6 dtype u8 (2: u16, 4: u32)   7 zero
 *   8 tokens u32        12 document ends u32        16 raw bytes u32        20 frame bytes u32
 *  24 XXH64 of the raw bytes (tokens, little-endian)
 *  32 XXH64 of the document ends
 *  40 XXH64 of what is stored (bytes 0–39, then ends and frame), keyed by the block's number: a
 *     damaged or misplaced value is noticed before it is decompressed
 *  48 document ends (u32 each) ‖ one zstd frame
 *
 * A document end is the position behind a document's last token, in (0, tokens], ascending; the
 * document that crosses into the next block has its end there.
 *
 * All functions work on caller's memory and are thread-safe on different objects.
 */
#ifndef LOADER_BLOCK_H
#define LOADER_BLOCK_H

#include <stdint.h>

#include "common/err.h"
#include "common/mem.h"

#define BLOCK_TOKENS     32768 /* of a block made here */
#define BLOCK_MAX_TOKENS (1 << 24)
#define BLOCK_HEAD_BYTES 48
#define BLOCK_ZSTD_LEVEL 3

/* A decoded block. Arrays grow as needed and are reused; block_release() frees them. */
struct block {
    uint32_t *tokens, *ends;
    size_t token_count, end_count;
    size_t token_cap, end_cap;
    uint64_t raw_hash, ends_hash;
    uint8_t *scratch; /* raw bytes of the frame */
    size_t scratch_cap;
};

void block_release(struct block *b);

/* Appends the encoded block to `out`. `number`: the block's key. dtype: 2 or 4 bytes a token; ids
 * must fit. */
int block_encode(const struct block *b, uint64_t number, int dtype, struct buf *out, struct err *e);

/* Checks everything: sizes, the checksums, document ends, token ids < vocab. */
int block_decode(
    const void *value, size_t n, uint64_t number, int vocab, struct block *out, struct err *e);

/* Bytes a token takes in a shard of this vocabulary: 2 up to 65,536 ids, else 4. */
int block_dtype(int vocab);

#endif
