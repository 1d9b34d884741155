#include "common/batch.h"

#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/cursor.h"

/*
 * GET:   0 stream u32   4 zero u32   8 step u64   16 lo u64   24 hi u64
 * BATCH: 0 stream u32   4 rows u32   8 seq u32   12 zero u32   16 step u64   24 lo u64
 *       32 content u64   40 sample ids (R) u64 ‖ tokens (R, S + 1) u32 ‖ document starts (R, S) u8
 */
#define GET_BYTES      32
#define BATCH_HEAD     40
#define BATCH_MAX_ROWS (1 << 20)
#define BATCH_MAX_SEQ  (1 << 24)

/* The arrays are written and read as they lie in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "batches are little-endian arrays");

void batch_request_encode(const struct batch_request *r, struct buf *out)
{
    uint8_t b[GET_BYTES] = {0};
    put_u32(b, (uint32_t)r->stream);
    put_u64(b + 8, r->step);
    put_u64(b + 16, r->lo);
    put_u64(b + 24, r->hi);
    buf_add(out, b, sizeof b);
}

int batch_request_decode(const void *body, size_t n, struct batch_request *out, struct err *e)
{
    const uint8_t *b = body;
    if (n != GET_BYTES)
        return err_set(e, ERR_INPUT, "GET: body of %zu bytes, expected %d", n, GET_BYTES);
    uint32_t stream = get_u32(b);
    if (stream > BATCH_VAL || get_u32(b + 4) != 0)
        return err_set(
            e, ERR_INPUT, "GET: stream %u, expected 0 (train) or 1 (validation)", stream);
    *out = (struct batch_request){.stream = (int)stream,
        .step = get_u64(b + 8),
        .lo = get_u64(b + 16),
        .hi = get_u64(b + 24)};
    if (out->lo > out->hi)
        return err_set(e, ERR_INPUT, "GET: rows [%llu, %llu) end before they begin",
            (unsigned long long)out->lo, (unsigned long long)out->hi);
    return 0;
}

/* Bytes of a batch's arrays; rows and seq are within bounds, so this cannot overflow 64 bits. */
static uint64_t arrays_bytes(uint64_t rows, uint64_t seq)
{
    return rows * (8 + (seq + 1) * 4 + seq);
}

void batch_encode(const struct batch *b, struct buf *out)
{
    uint8_t head[BATCH_HEAD] = {0};
    size_t rows = (size_t)b->rows, seq = (size_t)b->seq;
    put_u32(head, (uint32_t)b->stream);
    put_u32(head + 4, (uint32_t)b->rows);
    put_u32(head + 8, (uint32_t)b->seq);
    put_u64(head + 16, b->step);
    put_u64(head + 24, b->lo);
    put_u64(head + 32, b->content);
    buf_reserve(out, BATCH_HEAD + (size_t)arrays_bytes(rows, seq));
    buf_add(out, head, sizeof head);
    buf_add(out, b->sample_ids, rows * 8);
    buf_add(out, b->tokens, rows * (seq + 1) * 4);
    buf_add(out, b->doc_starts, rows * seq);
}

/* What a batch holds must be usable without a further look: ids in range, marks 0 or 1, digest
 * right. */
static int check_rows(const struct batch *b, int vocab, struct err *e)
{
    uint64_t content = 0;
    for (int r = 0; r < b->rows; r++) {
        const uint32_t *t = b->tokens + (size_t)r * ((size_t)b->seq + 1);
        const uint8_t *d = b->doc_starts + (size_t)r * (size_t)b->seq;
        for (int i = 0; i <= b->seq; i++)
            if (t[i] >= (uint32_t)vocab)
                return err_set(e, ERR_CORRUPT,
                    "BATCH: row %d: token %u at %d, the vocabulary is %d", r, t[i], i, vocab);
        for (int i = 0; i < b->seq; i++)
            if (d[i] > 1 || (i == 0 && d[i] != 1))
                return err_set(e, ERR_CORRUPT,
                    "BATCH: row %d: document mark %d at %d, expected 0 or 1 (1 at 0)", r, d[i], i);
        content += row_digest(b->sample_ids[r], t, (size_t)b->seq + 1);
    }
    if (content != b->content)
        return err_set(e, ERR_CORRUPT, "BATCH: content digest %016llx, its rows give %016llx",
            (unsigned long long)b->content, (unsigned long long)content);
    return 0;
}

int batch_decode(const void *body, size_t n, int vocab, struct batch *out, struct err *e)
{
    const uint8_t *b = body;
    memset(out, 0, sizeof *out);
    if (n < BATCH_HEAD)
        return err_set(
            e, ERR_CORRUPT, "BATCH: body of %zu bytes, expected at least %d", n, BATCH_HEAD);
    uint32_t stream = get_u32(b), rows = get_u32(b + 4), seq = get_u32(b + 8);
    if (stream > BATCH_VAL || rows > BATCH_MAX_ROWS || seq < 1 || seq > BATCH_MAX_SEQ ||
        get_u32(b + 12) != 0)
        return err_set(e, ERR_CORRUPT, "BATCH: stream %u, %u rows of %u tokens: out of range",
            stream, rows, seq);
    if (n - BATCH_HEAD != arrays_bytes(rows, seq))
        return err_set(e, ERR_CORRUPT, "BATCH: body of %zu bytes, %u rows of %u tokens need %llu",
            n, rows, seq, (unsigned long long)(BATCH_HEAD + arrays_bytes(rows, seq)));
    int rc = batch_new((int)rows, (int)seq, out, e);
    if (rc < 0)
        return rc;
    out->stream = (int)stream;
    out->step = get_u64(b + 16);
    out->lo = get_u64(b + 24);
    out->content = get_u64(b + 32);
    size_t ids = (size_t)rows * 8, tokens = (size_t)rows * ((size_t)seq + 1) * 4;
    memcpy(out->sample_ids, b + BATCH_HEAD, ids);
    memcpy(out->tokens, b + BATCH_HEAD + ids, tokens);
    memcpy(out->doc_starts, b + BATCH_HEAD + ids + tokens, (size_t)rows * seq);
    if ((rc = check_rows(out, vocab, e)) < 0)
        batch_release(out);
    return rc;
}

int batch_new(int rows, int seq, struct batch *out, struct err *e)
{
    CHECK(rows >= 0 && seq >= 1);
    *out = (struct batch){.rows = rows, .seq = seq};
    size_t r = (size_t)rows, tokens, marks;
    if (mem_mul(r, (size_t)seq + 1, &tokens) == 0 && mem_mul(r, (size_t)seq, &marks) == 0) {
        out->sample_ids = mem_try_array(r, sizeof *out->sample_ids);
        out->tokens = mem_try_array(tokens, sizeof *out->tokens);
        out->doc_starts = mem_try_array(marks, 1);
    }
    if (out->sample_ids && out->tokens && out->doc_starts)
        return 0;
    batch_release(out);
    return err_set(e, ERR_NOMEM, "a batch of %d rows of %d tokens: not enough memory", rows, seq);
}

void batch_release(struct batch *b)
{
    free(b->sample_ids);
    free(b->tokens);
    free(b->doc_starts);
    memset(b, 0, sizeof *b);
}
