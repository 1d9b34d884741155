/*
 * A message as it comes from a socket: two bytes say where the header frame ends, the rest is the
 * body. What is accepted must encode to the same bytes again, and its body is then read as what its
 * type says it is.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/batch.h"
#include "common/bus.h"
#include "common/check.h"
#include "common/hash.h"
#include "common/mem.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_body(const struct wire_header *h, const uint8_t *body, size_t n)
{
    struct err e = {0};
    if (h->type == WIRE_GET) {
        struct batch_request r;
        batch_request_decode(body, n, &r, &e);
    } else if (h->type == WIRE_BATCH) {
        struct batch b;
        if (batch_decode(body, n, 1000, &b, &e) == 0)
            batch_release(&b);
    } else {
        struct message m = {.head = *h, .body = (void *)(uintptr_t)body, .body_bytes = n};
        json_decref(message_json(&m, &e));
    }
}

static void decode(const uint8_t *frame, size_t n, const uint8_t *body, size_t body_bytes)
{
    struct wire_header h;
    struct err e = {0};
    if (wire_decode(frame, n, body, body_bytes, &h, &e) < 0) {
        CHECK(e.msg[0]);
        return;
    }
    if (h.minor <= WIRE_MINOR) {
        uint8_t again[WIRE_HEADER_BYTES];
        wire_encode(&h, body, again);
        CHECK(n == sizeof again && memcmp(frame, again, n) == 0);
    }
    read_body(&h, body, body_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    size_t n = get_u16(data) % (size - 1);
    const uint8_t *frame = data + 2, *body = frame + n;
    size_t body_bytes = size - 2 - n;
    decode(frame, n, body, body_bytes);
    /* Once more with length and checksum put right, which chance would never find. */
    if (n >= WIRE_HEADER_BYTES) {
        uint8_t *fixed = mem_array(n, 1);
        memcpy(fixed, frame, n);
        memcpy(fixed, "FBND\1", 5);
        fixed[5] = 0;
        fixed[7] = 0;
        put_u16(fixed + 8, WIRE_HEADER_BYTES);
        put_u64(fixed + 32, body_bytes);
        memset(fixed + 44, 0, 12);
        put_u32(fixed + 40, hash_crc32c(hash_crc32c(0, fixed, 40), body, body_bytes));
        decode(fixed, WIRE_HEADER_BYTES, body, body_bytes);
        free(fixed);
    }
    return 0;
}
