#include "loader/block.h"

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "common/check.h"
#include "common/hash.h"

enum { BLOCK_MAGIC = 0x4b424246, BLOCK_VERSION = 1, CODEC_ZSTD = 1 };

/* The header as numbers. */
struct head {
    uint32_t magic, tokens, ends, raw_bytes, frame_bytes;
    int version, codec, dtype, zero;
    uint64_t raw_hash, ends_hash, stored_hash;
};

void block_release(struct block *b)
{
    free(b->tokens);
    free(b->ends);
    free(b->scratch);
    memset(b, 0, sizeof *b);
}

int block_dtype(int vocab)
{
    return vocab <= 65536 ? 2 : 4;
}

/* An array with room for `need` items; what it held is kept. */
static void *grown(void *array, size_t *cap, size_t need, size_t size)
{
    if (need <= *cap)
        return array;
    *cap = need;
    return mem_grow_array(array, need, size);
}

static uint64_t stored_hash(const uint8_t *value, size_t n, uint64_t number)
{
    uint64_t head = hash_xxh64(value, 40, number);
    return hash_xxh64(value + BLOCK_HEAD_BYTES, n - BLOCK_HEAD_BYTES, head);
}

static void tokens_to_bytes(const uint32_t *t, size_t n, int dtype, uint8_t *out)
{
    for (size_t i = 0; i < n; i++)
        if (dtype == 2)
            put_u16(out + 2 * i, (uint16_t)t[i]);
        else
            put_u32(out + 4 * i, t[i]);
}

int block_encode(const struct block *b, uint64_t number, int dtype, struct buf *out, struct err *e)
{
    CHECK(dtype == 2 || dtype == 4);
    CHECK(b->token_count >= 1 && b->token_count <= BLOCK_MAX_TOKENS);
    CHECK(b->end_count <= b->token_count);
    size_t raw_bytes = b->token_count * (size_t)dtype, ends_bytes = b->end_count * 4;
    size_t bound = ZSTD_compressBound(raw_bytes), start = out->len;
    uint8_t *raw = mem_array(raw_bytes, 1);
    for (size_t i = 0; i < b->token_count; i++)
        CHECK(dtype == 4 || b->tokens[i] < 65536);
    tokens_to_bytes(b->tokens, b->token_count, dtype, raw);
    buf_reserve(out, BLOCK_HEAD_BYTES + ends_bytes + bound);
    uint8_t *v = (uint8_t *)out->data + start;
    for (size_t i = 0; i < b->end_count; i++)
        put_u32(v + BLOCK_HEAD_BYTES + 4 * i, b->ends[i]);
    size_t frame =
        ZSTD_compress(v + BLOCK_HEAD_BYTES + ends_bytes, bound, raw, raw_bytes, BLOCK_ZSTD_LEVEL);
    uint64_t raw_hash = hash_xxh64(raw, raw_bytes, 0);
    free(raw);
    if (ZSTD_isError(frame))
        return err_set(e, ERR_NOMEM, "block %llu: zstd: %s", (unsigned long long)number,
            ZSTD_getErrorName(frame));
    put_u32(v, BLOCK_MAGIC);
    v[4] = BLOCK_VERSION;
    v[5] = CODEC_ZSTD;
    v[6] = (uint8_t)dtype;
    v[7] = 0;
    put_u32(v + 8, (uint32_t)b->token_count);
    put_u32(v + 12, (uint32_t)b->end_count);
    put_u32(v + 16, (uint32_t)raw_bytes);
    put_u32(v + 20, (uint32_t)frame);
    put_u64(v + 24, raw_hash);
    put_u64(v + 32, hash_xxh64(v + BLOCK_HEAD_BYTES, ends_bytes, 0));
    size_t n = BLOCK_HEAD_BYTES + ends_bytes + frame;
    put_u64(v + 40, stored_hash(v, n, number));
    out->len = start + n;
    out->data[out->len] = 0;
    return 0;
}

static int head_decode(const uint8_t *v, size_t n, struct head *h, struct err *e)
{
    if (n < BLOCK_HEAD_BYTES)
        return err_set(e, ERR_CORRUPT, "%zu bytes, a block's header has %d", n, BLOCK_HEAD_BYTES);
    *h = (struct head){.magic = get_u32(v),
        .version = v[4],
        .codec = v[5],
        .dtype = v[6],
        .zero = v[7],
        .tokens = get_u32(v + 8),
        .ends = get_u32(v + 12),
        .raw_bytes = get_u32(v + 16),
        .frame_bytes = get_u32(v + 20),
        .raw_hash = get_u64(v + 24),
        .ends_hash = get_u64(v + 32),
        .stored_hash = get_u64(v + 40)};
    if (h->magic != BLOCK_MAGIC)
        return err_set(e, ERR_CORRUPT, "magic %08x, expected %08x", h->magic, BLOCK_MAGIC);
    if (h->version != BLOCK_VERSION || h->codec != CODEC_ZSTD)
        return err_set(e, ERR_UNSUPPORTED,
            "version %d, codec %d; this build reads version %d, codec %d", h->version, h->codec,
            BLOCK_VERSION, CODEC_ZSTD);
    if ((h->dtype != 2 && h->dtype != 4) || h->zero || h->tokens < 1 ||
        h->tokens > BLOCK_MAX_TOKENS || h->ends > h->tokens ||
        h->raw_bytes != h->tokens * (uint32_t)h->dtype ||
        n != BLOCK_HEAD_BYTES + (uint64_t)h->ends * 4 + h->frame_bytes)
        return err_set(e, ERR_CORRUPT, "header and size (%zu bytes) do not fit together", n);
    return 0;
}

static int ends_decode(const uint8_t *p, const struct head *h, struct block *out, struct err *e)
{
    uint32_t last = 0;
    if (hash_xxh64(p, (size_t)h->ends * 4, 0) != h->ends_hash)
        return err_set(e, ERR_CORRUPT, "checksum of the document ends does not hold");
    out->ends = grown(out->ends, &out->end_cap, h->ends, sizeof *out->ends);
    for (uint32_t i = 0; i < h->ends; i++) {
        uint32_t end = get_u32(p + 4 * (size_t)i);
        if (end <= last || end > h->tokens)
            return err_set(e, ERR_CORRUPT, "document end %u: %u after %u, of %u tokens", i, end,
                last, h->tokens);
        out->ends[i] = last = end;
    }
    out->end_count = h->ends;
    return 0;
}

static int tokens_decode(const struct head *h, int vocab, struct block *out, struct err *e)
{
    const uint8_t *raw = out->scratch;
    uint32_t max = 0;
    out->tokens = grown(out->tokens, &out->token_cap, h->tokens, sizeof *out->tokens);
    for (uint32_t i = 0; i < h->tokens; i++) {
        uint32_t t = h->dtype == 2 ? get_u16(raw + 2 * (size_t)i) : get_u32(raw + 4 * (size_t)i);
        out->tokens[i] = t;
        max = t > max ? t : max;
    }
    if (max >= (uint32_t)vocab)
        return err_set(e, ERR_CORRUPT, "token id %u, the vocabulary has %d", max, vocab);
    out->token_count = h->tokens;
    return 0;
}

int block_decode(
    const void *value, size_t n, uint64_t number, int vocab, struct block *out, struct err *e)
{
    const uint8_t *v = value;
    struct head h = {0};
    out->token_count = out->end_count = 0;
    int rc = head_decode(v, n, &h, e);
    if (rc < 0)
        return rc;
    uint64_t stored = stored_hash(v, n, number);
    if (stored != h.stored_hash)
        return err_set(e, ERR_CORRUPT, "checksum %016llx, expected %016llx",
            (unsigned long long)stored, (unsigned long long)h.stored_hash);
    if ((rc = ends_decode(v + BLOCK_HEAD_BYTES, &h, out, e)) < 0)
        return rc;
    out->scratch = grown(out->scratch, &out->scratch_cap, h.raw_bytes, 1);
    size_t got = ZSTD_decompress(
        out->scratch, h.raw_bytes, v + BLOCK_HEAD_BYTES + (size_t)h.ends * 4, h.frame_bytes);
    if (ZSTD_isError(got) || got != h.raw_bytes)
        return err_set(e, ERR_CORRUPT, "zstd: %s",
            ZSTD_isError(got) ? ZSTD_getErrorName(got) : "another size than the header says");
    uint64_t raw = hash_xxh64(out->scratch, h.raw_bytes, 0);
    if (raw != h.raw_hash)
        return err_set(e, ERR_CORRUPT, "checksum of the tokens %016llx, expected %016llx",
            (unsigned long long)raw, (unsigned long long)h.raw_hash);
    out->raw_hash = h.raw_hash;
    out->ends_hash = h.ends_hash;
    return tokens_decode(&h, vocab, out, e);
}
