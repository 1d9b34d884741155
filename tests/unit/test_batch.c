/* GET and BATCH: round trip, and every way a body can be wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "common/batch.h"
#include "common/cursor.h"

enum { ROWS = 3, SEQ = 5, VOCAB = 50 };

static struct batch example(void)
{
    struct batch b;
    assert_int_equal(batch_new(ROWS, SEQ, &b, NULL), 0);
    b.stream = BATCH_VAL;
    b.step = 0x0102030405060708u;
    b.lo = 77;
    for (int r = 0; r < ROWS; r++) {
        b.sample_ids[r] = (uint64_t)r << 56 | 9;
        for (int i = 0; i <= SEQ; i++)
            b.tokens[r * (SEQ + 1) + i] = (uint32_t)(r * 7 + i * 3) % VOCAB;
        for (int i = 0; i < SEQ; i++)
            b.doc_starts[r * SEQ + i] = i == 0 || i == r + 1;
        b.content += row_digest(b.sample_ids[r], b.tokens + r * (SEQ + 1), SEQ + 1);
    }
    return b;
}

static void test_round_trip(void **state)
{
    (void)state;
    struct batch b = example(), got;
    struct buf body = BUF_INIT;
    struct err e = {0};
    batch_encode(&b, &body);
    assert_int_equal(body.len, 40 + ROWS * (8 + (SEQ + 1) * 4 + SEQ));
    assert_int_equal(batch_decode(body.data, body.len, VOCAB, &got, &e), 0);
    assert_int_equal(got.stream, BATCH_VAL);
    assert_true(got.step == b.step && got.lo == b.lo && got.content == b.content);
    assert_true(got.rows == ROWS && got.seq == SEQ);
    assert_memory_equal(got.sample_ids, b.sample_ids, ROWS * 8);
    assert_memory_equal(got.tokens, b.tokens, ROWS * (SEQ + 1) * 4);
    assert_memory_equal(got.doc_starts, b.doc_starts, ROWS * SEQ);
    batch_release(&got);
    batch_release(&b);
    buf_release(&body);
}

/* The first bytes as stated, so that another program's reading of the format is checked too. */
static void test_golden(void **state)
{
    (void)state;
    static const uint8_t get[32] = {1, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 16, 0, 0, 0, 0,
        0, 0, 0, 24, 1, 0, 0, 0, 0, 0, 0};
    static const uint8_t head[32] = {1, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4,
        3, 2, 1, 77, 0, 0, 0, 0, 0, 0, 0};
    struct batch_request r = {
        .stream = BATCH_VAL, .step = 0x0102030405060708u, .lo = 16, .hi = 280};
    struct batch_request back;
    struct batch b = example();
    struct buf body = BUF_INIT;
    batch_request_encode(&r, &body);
    assert_int_equal(body.len, sizeof get);
    assert_memory_equal(body.data, get, sizeof get);
    assert_int_equal(batch_request_decode(body.data, body.len, &back, NULL), 0);
    assert_memory_equal(&back, &r, sizeof r);
    buf_clear(&body);
    batch_encode(&b, &body);
    assert_memory_equal(body.data, head, sizeof head);
    batch_release(&b);
    buf_release(&body);
}

static void test_request_errors(void **state)
{
    (void)state;
    struct batch_request r = {.stream = BATCH_TRAIN, .lo = 5, .hi = 5}, back;
    struct buf body = BUF_INIT;
    batch_request_encode(&r, &body);
    assert_int_equal(batch_request_decode(body.data, body.len, &back, NULL), 0);
    for (size_t n = 0; n < body.len; n++)
        assert_int_equal(batch_request_decode(body.data, n, &back, NULL), ERR_INPUT);
    body.data[16] = 6; /* lo 6, hi 5 */
    assert_int_equal(batch_request_decode(body.data, body.len, &back, NULL), ERR_INPUT);
    body.data[16] = 5;
    body.data[0] = 2;
    assert_int_equal(batch_request_decode(body.data, body.len, &back, NULL), ERR_INPUT);
    buf_release(&body);
}

/* Any bit flipped in the arrays or sizes is refused; so is every shorter body and one token too
 * large. */
static void test_batch_errors(void **state)
{
    (void)state;
    struct batch b = example(), got;
    struct buf body = BUF_INIT;
    struct err e = {0};
    batch_encode(&b, &body);
    for (size_t n = 0; n < body.len; n++)
        assert_int_equal(batch_decode(body.data, n, VOCAB, &got, &e), ERR_CORRUPT);
    /* the document marks stand outside of the digest: their values and first column are checked */
    size_t marks = body.len - (size_t)ROWS * SEQ;
    for (size_t bit = 0; bit < marks * 8; bit++) {
        if (bit / 8 < 4 || (bit / 8 >= 16 && bit / 8 < 32))
            continue; /* stream, step and lo are the asker's to compare */
        body.data[bit / 8] ^= (char)(1 << bit % 8);
        if (batch_decode(body.data, body.len, VOCAB, &got, &e) != ERR_CORRUPT)
            fail_msg("bit %zu", bit);
        body.data[bit / 8] ^= (char)(1 << bit % 8);
    }
    for (int r = 0; r < ROWS; r++) {
        char *first = body.data + marks + r * SEQ;
        *first = 0;
        assert_int_equal(batch_decode(body.data, body.len, VOCAB, &got, &e), ERR_CORRUPT);
        *first = 1;
        first[1] ^= 2;
        assert_int_equal(batch_decode(body.data, body.len, VOCAB, &got, &e), ERR_CORRUPT);
        first[1] ^= 2;
    }
    assert_int_equal(batch_decode(body.data, body.len, 29, &got, &e), ERR_CORRUPT);
    assert_non_null(strstr(e.msg, "token 29"));
    assert_int_equal(batch_decode(body.data, body.len, 30, &got, &e), 0);
    batch_release(&got);
    batch_release(&b);
    buf_release(&body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_request_errors),
        cmocka_unit_test(test_batch_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
