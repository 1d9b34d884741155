/*
 * The wire: frame 0 of every message, 56 bytes, little-endian by shifts:
 *
 *   0 magic u32 "FBND"   4 major u8   5 minor u8   6 type u16   8 header length u16   10 flags u16
 *  12 run epoch u32     16 sequence u64   24 request id u64   32 body length u64
 *  40 crc32c u32 over bytes 0–39 and the body    44–55 reserved, zero
 *
 * Frame 1 is the body: JSON for control, arrays for batches. A different major is refused naming
 * both; a longer header of a later minor is accepted and its tail ignored. common/proto.abnf states
 * every message: who sends it to whom, and its body.
 */
#ifndef COMMON_WIRE_H
#define COMMON_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define WIRE_MAJOR             1
#define WIRE_MINOR             0
#define WIRE_HEADER_BYTES      56
#define WIRE_MAX_CONTROL_BYTES (16u << 20) /* a JSON body */
#define WIRE_MAX_BATCH_BYTES   (256u << 20)

/* name, number */
/* clang-format off */
#define WIRE_TYPES(X) \
    X(HELLO, 1) X(WELCOME, 2) X(REFUSE, 3) X(HEARTBEAT, 4) X(BYE, 5) X(READY, 6) X(GRANT, 7) \
    X(STEP, 8) X(RELOAD, 9) X(CHECKPOINT, 10) X(SAVED, 11) X(JOB_GET, 12) X(JOB, 13) X(RESULT, 14) \
    X(RESULT_ACK, 15) X(FINISH, 16) X(STATUS_GET, 17) X(STATUS, 18) X(STOP, 19) X(STOP_ACK, 20) X(GET, 32) \
    X(BATCH, 33) X(NAK, 34)
/* clang-format on */

enum wire_type {
#define X(name, number) WIRE_##name = number,
    WIRE_TYPES(X)
#undef X
};

struct wire_header {
    int type;
    int major, minor;
    uint16_t flags;
    uint32_t run_epoch;
    uint64_t sequence;
    uint64_t request_id; /* an answer repeats the request's */
    uint64_t body_bytes;
};

const char *wire_type_name(int type); /* "HELLO"; NULL when unknown */

void wire_encode(const struct wire_header *h, const void *body, uint8_t out[WIRE_HEADER_BYTES]);
/* Checks magic, major, lengths, type, size limit and checksum. */
int wire_decode(const void *frame, size_t n, const void *body, size_t body_bytes,
    struct wire_header *out, struct err *e);

#endif
