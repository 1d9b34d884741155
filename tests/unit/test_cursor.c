// cursor: the digest chain against a hand-made one, refusal of a wrong step, and reading back.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/cursor.h"
#include "common/rng.h"

#define SHA "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static void make(struct plan *p)
{
    static const char yaml[] =
        "data: {tokenizer: /t, seq_len: 16, sources: [{name: a, path: /a, weight: 3}, "
        "{name: b, path: /b}]}\neval.every_steps: 0\neval.fixed_point_passes: 4\n"
        "train: {steps: 600, batch_rows: 24, micro_rows: 4}\n";
    struct config c;
    struct err e = {0};
    assert_int_equal(config_parse(yaml, strlen(yaml), "y", NULL, 0, &c, &e), 0);
    json_t *j = json_pack("{s:i, s:o, s:[{s:s, s:i, s:i}, {s:s, s:i, s:i}], s:{s:s, s:i}}",
        "version", PLAN_VERSION, "config", config_plan_json(&c), "sources", "manifest_root", SHA,
        "train_tokens", 5000, "val_tokens", 0, "manifest_root", SHA, "train_tokens", 900,
        "val_tokens", 0, "tokenizer", "sha256", SHA, "vocab", 100);
    char *text = json_dumps(j, 0);
    int rc = plan_parse(text, strlen(text), "p", p, &e);
    if (rc < 0)
        print_error("%s\n", e.msg);
    assert_int_equal(rc, 0);
    free(text);
    json_decref(j);
    config_release(&c);
}

static void advance(struct cursor *c, const struct plan *p, int64_t steps)
{
    struct err e = {0};
    for (int64_t end = c->step + steps; c->step < end;) {
        struct step_digest d = {plan_ids_digest(p, c->step), (uint64_t)c->step * 77};
        assert_int_equal(cursor_advance(c, p, &d, &e), 0);
    }
}

/* A row's digest depends on its id, every token and their order, but not on where its memory lies.
 */
static void test_row_digest(void **state)
{
    (void)state;
    uint32_t a[5] = {1, 2, 3, 4, 0}, b[5] = {0, 1, 2, 3, 4}, swapped[4] = {1, 3, 2, 4};
    uint64_t d = row_digest(9, a, 4);
    assert_int_equal(d, row_digest(9, b + 1, 4));
    assert_true(d != row_digest(8, a, 4));
    assert_true(d != row_digest(9, a, 3));
    assert_true(d != row_digest(9, swapped, 4));
    assert_int_equal(
        row_digest(9, a, 4), hash_xxh64("\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0", 16, rng_mix(9)));
}

static void test_chain(void **state)
{
    (void)state;
    struct plan p;
    struct cursor c;
    struct err e = {0};
    make(&p);
    cursor_start(&c, &p);
    assert_string_equal(c.chain, p.hash);
    struct step_digest d = {0, 0x1122334455667788};
    for (uint64_t i = 0; i < 24; i++)
        d.ids += rng_mix(plan_train_sample(&p, i).id);
    assert_int_equal(d.ids, plan_ids_digest(&p, 0));
    uint8_t link[88];
    memcpy(link, p.hash, 64);
    memset(link + 64, 0, 8);
    for (int i = 0; i < 8; i++) {
        link[72 + i] = (uint8_t)(d.ids >> 8 * i);
        link[80 + i] = (uint8_t)(d.content >> 8 * i);
    }
    char want[SHA256_HEX];
    hash_sha256_hex(link, sizeof link, want);
    assert_int_equal(cursor_advance(&c, &p, &d, &e), 0);
    assert_string_equal(c.chain, want);
    assert_int_equal(c.step, 1);
    assert_int_equal(c.ordinal, 24);
    assert_int_equal(c.source_rows[0] + c.source_rows[1], 24);
    /* the digest of step 0 again is not step 1's */
    struct cursor before = c;
    assert_int_equal(cursor_advance(&c, &p, &d, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "step 1: digest of sample ids "));
    assert_memory_equal(&before, &c, sizeof c);
    plan_release(&p);
}

/* Stopped and read back at any step, the chain ends the same; another content changes it. */
static void test_resume(void **state)
{
    (void)state;
    struct plan p;
    struct cursor whole, part, back;
    struct err e = {0};
    make(&p);
    cursor_start(&whole, &p);
    advance(&whole, &p, 600);
    struct step_digest over = {0, 0};
    assert_int_equal(cursor_advance(&whole, &p, &over, &e), ERR_STATE);
    static const int64_t stops[] = {0, 1, 170, 171, 345, 600};
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        cursor_start(&part, &p);
        advance(&part, &p, stops[i]);
        json_t *j = cursor_to_json(&part, &p);
        char *text = json_dumps(j, 0);
        json_t *again = json_loads(text, 0, NULL);
        assert_int_equal(cursor_from_json(again, &p, &back, &e), 0);
        assert_memory_equal(&part, &back, sizeof part);
        advance(&back, &p, 600 - stops[i]);
        assert_memory_equal(&whole, &back, sizeof whole);
        json_decref(again);
        json_decref(j);
        free(text);
    }
    cursor_start(&part, &p);
    struct step_digest d = {plan_ids_digest(&p, 0), 1};
    assert_int_equal(cursor_advance(&part, &p, &d, &e), 0);
    advance(&part, &p, 599);
    assert_string_not_equal(part.chain, whole.chain);
    plan_release(&p);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value, *message;
    } cases[] = {
        {"version", "2", "cursor: version 2, this build reads 1"},
        {"step", "601", "cursor: step: 601, 0 to 600 expected"},
        {"step", "-1", "cursor: step: -1, 0 to 600 expected"},
        {"step", "4", "cursor: ordinal 120 at step 4 of 24 rows"},
        {"ordinal", "1.5", "cursor: ordinal: a whole number expected"},
        {"chain", "\"x\"", "cursor: chain: 64 lower-case hex digits expected"},
        {"plan_hash", "null", "cursor: plan_hash: 64 lower-case hex digits expected"},
        {"source_rows", "[]", "cursor: source_rows[0] (a): 0, the plan says 91"},
    };
    struct plan p;
    struct cursor c, back;
    struct err e = {0};
    make(&p);
    cursor_start(&c, &p);
    advance(&c, &p, 5);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *j = cursor_to_json(&c, &p);
        json_object_set_new(j, cases[i].key, json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
        assert_true(cursor_from_json(j, &p, &back, &e) < 0);
        assert_string_equal(e.msg, cases[i].message);
        json_decref(j);
    }
    json_t *j = cursor_to_json(&c, &p);
    json_object_set_new(j, "plan_hash", json_string(SHA));
    assert_int_equal(cursor_from_json(j, &p, &back, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, SHA));
    assert_non_null(strstr(e.msg, p.hash));
    json_decref(j);
    plan_release(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_row_digest),
        cmocka_unit_test(test_chain),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
