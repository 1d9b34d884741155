/*
 * Any bytes as the body of GET or BATCH: refused with an error, or a value that encodes back to the
 * same bytes. Bodies of a fitting size are tried with their digest made right too.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/batch.h"
#include "common/check.h"
#include "common/cursor.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

enum { VOCAB = 1000, HEAD = 40 };

static void try_batch(const uint8_t *bytes, size_t n)
{
    struct batch b;
    struct err e = {0};
    if (batch_decode(bytes, n, VOCAB, &b, &e) < 0) {
        CHECK(e.code < 0 && e.msg[0] && !b.tokens);
        return;
    }
    struct buf back = BUF_INIT;
    for (size_t i = 0; i < (size_t)b.rows * ((size_t)b.seq + 1); i++)
        CHECK(b.tokens[i] < VOCAB);
    batch_encode(&b, &back);
    CHECK(back.len == n && memcmp(back.data, bytes, n) == 0);
    buf_release(&back);
    batch_release(&b);
}

static void try_right_digest(const uint8_t *bytes, size_t n)
{
    uint64_t rows = get_u32(bytes + 4), seq = get_u32(bytes + 8), content = 0;
    if (rows > n || seq > n || HEAD + rows * (8 + (seq + 1) * 4 + seq) != n)
        return;
    uint8_t *v = malloc(n);
    uint32_t *row = malloc((seq + 1) * 4);
    CHECK(v && row);
    memcpy(v, bytes, n);
    for (uint64_t r = 0; r < rows; r++) {
        memcpy(row, v + HEAD + rows * 8 + r * (seq + 1) * 4, (seq + 1) * 4);
        content += row_digest(get_u64(v + HEAD + r * 8), row, seq + 1);
    }
    put_u64(v + 32, content);
    try_batch(v, n);
    free(row);
    free(v);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    struct batch_request r;
    struct err e = {0};
    if (batch_request_decode(bytes, n, &r, &e) == 0) {
        struct buf back = BUF_INIT;
        batch_request_encode(&r, &back);
        CHECK(r.lo <= r.hi && back.len == n && memcmp(back.data, bytes, n) == 0);
        buf_release(&back);
    }
    try_batch(bytes, n);
    if (n >= HEAD)
        try_right_digest(bytes, n);
    return 0;
}
