/*
 * Any bytes as a shard's block: refused with an error, or a block that encodes back to the same
 * tokens. Once as they are and once with the checksums made right, so that what lies behind them is
 * reached.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/hash.h"
#include "loader/block.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

enum { NUMBER = 3, VOCAB = 70000 };

static void check_block(const struct block *b)
{
    struct block again = {0};
    struct buf v = BUF_INIT;
    uint32_t last = 0;
    CHECK(b->token_count >= 1 && b->token_count <= BLOCK_MAX_TOKENS);
    for (size_t i = 0; i < b->token_count; i++)
        CHECK(b->tokens[i] < VOCAB);
    for (size_t i = 0; i < b->end_count; i++) {
        CHECK(b->ends[i] > last && b->ends[i] <= b->token_count);
        last = b->ends[i];
    }
    CHECK(block_encode(b, NUMBER, 4, &v, NULL) == 0);
    CHECK(block_decode(v.data, v.len, NUMBER, VOCAB, &again, NULL) == 0);
    CHECK(again.token_count == b->token_count && again.end_count == b->end_count);
    CHECK(memcmp(again.tokens, b->tokens, b->token_count * sizeof *b->tokens) == 0);
    block_release(&again);
    buf_release(&v);
}

static void try_block(const uint8_t *bytes, size_t n)
{
    struct block b = {0};
    struct err e = {0};
    if (block_decode(bytes, n, NUMBER, VOCAB, &b, &e) == 0)
        check_block(&b);
    else
        CHECK(e.code < 0 && e.msg[0]);
    block_release(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    try_block(bytes, n);
    if (n < BLOCK_HEAD_BYTES)
        return 0;
    uint8_t *v = malloc(n);
    CHECK(v);
    memcpy(v, bytes, n);
    size_t ends = (size_t)get_u32(v + 12) * 4;
    if (ends <= n - BLOCK_HEAD_BYTES)
        put_u64(v + 32, hash_xxh64(v + BLOCK_HEAD_BYTES, ends, 0));
    uint64_t head = hash_xxh64(v, 40, NUMBER);
    put_u64(v + 40, hash_xxh64(v + BLOCK_HEAD_BYTES, n - BLOCK_HEAD_BYTES, head));
    try_block(v, n);
    free(v);
    return 0;
}
