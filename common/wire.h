/*
 * The wire: frame 0 of every message, 56 bytes, little-endian by shifts:
 *
 *   0 magic u32 "FBND"   4 major u8   5 minor u8   6 type u16   8 header length u16   10 flags u16
 *  12 run epoch u32     16 sequence u64   24 request id u64   32 body length u64
 *  40 crc32c u32 over bytes 0–39 and the body    44–55 reserved, zero
 *
 * Frame 1 is the body: JSON for control, arrays for batches. A different major is refused naming
 * both; a longer header of a later minor is accepted and its tail ignored. common/proto.abnf states
 * every message.
 *
 * Who sends what (JSON bodies unless noted; every message of the control socket but HELLO,
 * STATUS_GET and STOP carries the run epoch, and a receiver drops an older one; the scheduler does
 * so for trainers only, since what a loader or an evaluator says stays true when the training epoch
 * changes). Steps count from 0; a checkpoint's step is the number of steps done, so GRANT {step:
 * 99, checkpoint: true}, SAVED {step: 100} and step-00000100 belong together. A number that is not
 * finite travels as null:
 *
 *  HELLO       any → scheduler   {role: "trainer"|"loader"|"evaluator", rank, world, pid, version,
 *                                 plan_hash, manifest_root}
 *  WELCOME     scheduler →       {heartbeat_ms, checkpoint: "step-00000100"|null, step}; header:
 * run epoch. A trainer loads that checkpoint (null: fresh weights) and continues at `step`. REFUSE
 * scheduler →       {reason}; the receiver exits 100 HEARTBEAT   both ways         {} every
 * heartbeat_ms; dead after 3 missed BYE         any → scheduler   {reason} READY       trainer →
 * {step}: the rank holds all data of that step GRANT       scheduler → trainer {step, checkpoint:
 * bool}: may run `step`; afterwards writes a checkpoint if true STEP        trainer → {step,
 * passes, losses: [K], total, grad_norm, lr, tokens, rows, seconds, wait_seconds, ids: hex,
 * content: hex} RELOAD      scheduler → trainer {checkpoint|null, step, reason}; header: the new
 * run epoch CHECKPOINT  scheduler → trainer {step}: when `step` steps are done write one (the clean
 * stop) SAVED       trainer →         {step, files: [{name, bytes, sha256}], stall_seconds,
 * write_seconds} or {step, error} JOB_GET     evaluator →       {} JOB         scheduler → {id,
 * checkpoint: absolute directory, step, suite, regime, seed} or {id: null}. fixed_point iterates
 * passes over a whole row: its one regime is "fused" RESULT      evaluator →       {id, result:
 * {…}} or {id, error} RESULT_ACK  scheduler →       {id}, after the result is durable FINISH
 * scheduler → all   {reason}: leave cleanly, exit 0 STATUS_GET  any →  {}         STATUS  scheduler
 * → one JSON document (see scheduler/status.h) STOP        operator → {}     STOP_ACK scheduler →
 * {step} GET         → loader (batch_request)   BATCH loader → (batch)   NAK loader → {reason,
 * retry: bool}
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
#define WIRE_TYPES(X)                                                                              \
    X(HELLO, 1)                                                                                    \
    X(WELCOME, 2) X(REFUSE, 3) X(HEARTBEAT, 4) X(BYE, 5) X(READY, 6) X(GRANT, 7) X(STEP, 8)        \
        X(RELOAD, 9) X(CHECKPOINT, 10) X(SAVED, 11) X(JOB_GET, 12) X(JOB, 13) X(RESULT, 14)        \
            X(RESULT_ACK, 15) X(FINISH, 16) X(STATUS_GET, 17) X(STATUS, 18) X(STOP, 19)            \
                X(STOP_ACK, 20) X(GET, 32) X(BATCH, 33) X(NAK, 34)

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
