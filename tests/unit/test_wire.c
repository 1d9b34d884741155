/* The wire format: golden bytes of every type, and every field of the header spoilt in turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "common/wire.h"

/* CRC-32C bit by bit, as its definition reads: not the table that the code uses. */
static uint32_t crc32c_naive(const uint8_t *p, size_t n, const uint8_t *q, size_t m)
{
    uint32_t c = 0xffffffffu;
    for (size_t i = 0; i < n + m; i++) {
        c ^= i < n ? p[i] : q[i - n];
        for (int k = 0; k < 8; k++)
            c = c & 1 ? (c >> 1) ^ 0x82f63b78u : c >> 1;
    }
    return ~c;
}

/*
 * One line a type. Its golden message has the name as its body; the
 * rest of the frame is the same for all and written out in golden_frame(). Numbers and layout are
 * those of common/proto.abnf.
 */
static const struct golden {
    const char *name;
    int number;
} golden[] = {
    {"HELLO", 1},
    {"WELCOME", 2},
    {"REFUSE", 3},
    {"HEARTBEAT", 4},
    {"BYE", 5},
    {"READY", 6},
    {"GRANT", 7},
    {"STEP", 8},
    {"RELOAD", 9},
    {"CHECKPOINT", 10},
    {"SAVED", 11},
    {"JOB_GET", 12},
    {"JOB", 13},
    {"RESULT", 14},
    {"RESULT_ACK", 15},
    {"FINISH", 16},
    {"STATUS_GET", 17},
    {"STATUS", 18},
    {"STOP", 19},
    {"STOP_ACK", 20},
    {"GET", 32},
    {"BATCH", 33},
    {"NAK", 34},
};
#define GOLDEN_COUNT (sizeof golden / sizeof *golden)

static void golden_frame(const struct golden *g, uint8_t out[WIRE_HEADER_BYTES])
{
    static const uint8_t fixed[WIRE_HEADER_BYTES] = {
        'F', 'B', 'N', 'D',                             /* magic */
        1, 0,                                           /* version */
        0, 0,                                           /* type */
        56, 0,                                          /* header length */
        0x34, 0x12,                                     /* flags */
        0x78, 0x56, 0x34, 0x12,                         /* run epoch */
        0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01, /* sequence */
        0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, /* request id */
        0, 0, 0, 0, 0, 0, 0, 0,                         /* body length */
        0, 0, 0, 0,                                     /* checksum */
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,             /* reserved */
    };
    size_t n = strlen(g->name);
    memcpy(out, fixed, sizeof fixed);
    out[6] = (uint8_t)g->number;
    out[32] = (uint8_t)n;
    uint32_t crc = crc32c_naive(out, 40, (const uint8_t *)g->name, n);
    for (int i = 0; i < 4; i++)
        out[40 + i] = (uint8_t)(crc >> 8 * i);
}

static struct wire_header header_of(const struct golden *g)
{
    return (struct wire_header){.type = g->number,
        .major = 1,
        .minor = 0,
        .flags = 0x1234,
        .run_epoch = 0x12345678u,
        .sequence = 0x0123456789abcdefu,
        .request_id = 0x0102030405060708u,
        .body_bytes = strlen(g->name)};
}

static void test_crc_of_the_standard(void **state)
{
    (void)state;
    assert_int_equal(hash_crc32c(0, "123456789", 9), 0xe3069283u); /* RFC 3720 */
    assert_int_equal(crc32c_naive((const uint8_t *)"123456789", 9, NULL, 0), 0xe3069283u);
}

static void test_golden(void **state)
{
    (void)state;
    for (size_t i = 0; i < GOLDEN_COUNT; i++) {
        uint8_t want[WIRE_HEADER_BYTES], got[WIRE_HEADER_BYTES];
        struct wire_header h = header_of(&golden[i]), back;
        struct err e = {0};
        golden_frame(&golden[i], want);
        wire_encode(&h, golden[i].name, got);
        assert_memory_equal(got, want, sizeof want);
        assert_int_equal(
            wire_decode(want, sizeof want, golden[i].name, h.body_bytes, &back, &e), 0);
        assert_int_equal(back.type, h.type);
        assert_int_equal(back.major, 1);
        assert_int_equal(back.minor, 0);
        assert_int_equal(back.flags, h.flags);
        assert_int_equal(back.run_epoch, h.run_epoch);
        assert_int_equal(back.sequence, h.sequence);
        assert_int_equal(back.request_id, h.request_id);
        assert_int_equal(back.body_bytes, h.body_bytes);
        assert_string_equal(wire_type_name(golden[i].number), golden[i].name);
    }
}

/* The table above and the one in wire.h hold the same types. */
static void test_no_other_types(void **state)
{
    (void)state;
    size_t known = 0;
    for (int type = -2; type <= 70000; type++)
        known += wire_type_name(type) != NULL;
    assert_int_equal(known, GOLDEN_COUNT);
}

/* A frame with one field changed; fix_crc: so that the checksum is right and the field itself is
 * judged. */
static const struct spoilt {
    int offset, bytes;
    uint64_t value;
    int fix_crc, code;
    const char *says;
} spoilt[] = {
    {0, 4, 0x31444e46, 1, ERR_CORRUPT, "magic"},
    {4, 1, 2, 1, ERR_MISMATCH, "protocol version 2.0, this program speaks 1.0"},
    {4, 1, 0, 1, ERR_MISMATCH, "protocol version 0.0, this program speaks 1.0"},
    {5, 1, 1, 0, ERR_CORRUPT, "checksum"},
    {6, 2, 99, 1, ERR_MISMATCH, "type 99"},
    {6, 2, 0, 1, ERR_MISMATCH, "type 0"},
    {6, 2, 9, 0, ERR_CORRUPT, "checksum"},
    {8, 2, 55, 1, ERR_CORRUPT, "header length 55"},
    {8, 2, 0, 1, ERR_CORRUPT, "header length 0"},
    {8, 2, 64, 1, ERR_CORRUPT, "header length 64, but the frame has 56"},
    {8, 2, 65535, 1, ERR_CORRUPT, "header length 65535"},
    {10, 2, 1, 0, ERR_CORRUPT, "checksum"},
    {12, 4, 1, 0, ERR_CORRUPT, "checksum"},
    {16, 8, 1, 0, ERR_CORRUPT, "checksum"},
    {24, 8, 1, 0, ERR_CORRUPT, "checksum"},
    {32, 8, 3, 1, ERR_CORRUPT, "body length 3, but the body has 5"},
    {32, 8, UINT64_MAX, 1, ERR_CORRUPT, "body length"},
    {40, 4, 1, 0, ERR_CORRUPT, "checksum"},
    {44, 1, 1, 0, ERR_CORRUPT, "reserved byte 44"},
    {55, 1, 1, 0, ERR_CORRUPT, "reserved byte 55"},
};

static void fix_crc(uint8_t *frame, const char *body, size_t n)
{
    uint32_t crc = crc32c_naive(frame, 40, (const uint8_t *)body, n);
    put_u32(frame + 40, crc);
}

static void test_spoilt_fields(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof spoilt / sizeof *spoilt; i++) {
        uint8_t frame[WIRE_HEADER_BYTES];
        struct wire_header out = {.type = -7};
        struct err e = {0};
        golden_frame(&golden[0], frame);
        for (int k = 0; k < spoilt[i].bytes; k++)
            frame[spoilt[i].offset + k] = (uint8_t)(spoilt[i].value >> 8 * k);
        if (spoilt[i].fix_crc)
            fix_crc(frame, "HELLO", 5);
        int rc = wire_decode(frame, sizeof frame, "HELLO", 5, &out, &e);
        if (rc != spoilt[i].code || !strstr(e.msg, spoilt[i].says))
            fail_msg("case %zu: %d %s", i, rc, e.msg);
        assert_int_equal(out.type, -7);
    }
}

static void test_every_bit(void **state)
{
    (void)state;
    for (int bit = 0; bit < WIRE_HEADER_BYTES * 8; bit++) {
        uint8_t frame[WIRE_HEADER_BYTES];
        struct wire_header out;
        struct err e = {0};
        golden_frame(&golden[0], frame);
        frame[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_true(wire_decode(frame, sizeof frame, "HELLO", 5, &out, &e) < 0);
        assert_true(e.msg[0] != 0);
    }
}

static void test_sizes(void **state)
{
    (void)state;
    uint8_t frame[WIRE_HEADER_BYTES];
    struct wire_header out;
    struct err e = {0};
    golden_frame(&golden[0], frame);
    for (size_t n = 0; n < sizeof frame; n++)
        assert_int_equal(wire_decode(frame, n, "HELLO", 5, &out, &e), ERR_CORRUPT);
    assert_int_equal(wire_decode(frame, sizeof frame, "HELLO", 4, &out, &e), ERR_CORRUPT);
    assert_int_equal(wire_decode(frame, sizeof frame, "HELLP", 5, &out, &e), ERR_CORRUPT);
    assert_int_equal(wire_decode(NULL, 0, NULL, 0, &out, &e), ERR_CORRUPT);
    /* A control body may not be as long as a batch. */
    size_t n = WIRE_MAX_CONTROL_BYTES + 1;
    char *body = mem_array(n, 1);
    struct wire_header h = {.type = 1, .major = 1, .body_bytes = n};
    wire_encode(&h, body, frame);
    assert_int_equal(wire_decode(frame, sizeof frame, body, n, &out, &e), ERR_CORRUPT);
    assert_non_null(strstr(e.msg, "at most"));
    h.type = 33;
    wire_encode(&h, body, frame);
    assert_int_equal(wire_decode(frame, sizeof frame, body, n, &out, &e), 0);
    free(body);
}

/* Minors only append: a longer header of a later minor is read as far as we know it. */
static void test_later_minor(void **state)
{
    (void)state;
    uint8_t frame[80];
    struct wire_header out;
    struct err e = {0};
    memset(frame, 0xab, sizeof frame);
    golden_frame(&golden[5], frame);
    frame[5] = 3;
    frame[8] = sizeof frame;
    frame[44] = 7; /* given a meaning by then */
    fix_crc(frame, "READY", 5);
    assert_int_equal(wire_decode(frame, sizeof frame, "READY", 5, &out, &e), 0);
    assert_int_equal(out.type, 6);
    assert_int_equal(out.minor, 3);
    frame[5] = 0; /* our own minor has no longer header */
    fix_crc(frame, "READY", 5);
    assert_int_equal(wire_decode(frame, sizeof frame, "READY", 5, &out, &e), ERR_CORRUPT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_crc_of_the_standard),
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_no_other_types),
        cmocka_unit_test(test_spoilt_fields),
        cmocka_unit_test(test_every_bit),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_later_minor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
