// plan_costs: arithmetic against the weight table, steps and rows against counting, and both
// reports.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "trainer/plan_costs.h"
#include "trainer/plan_report.h"

#define SHA "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static void make(struct plan *p)
{
    static const char yaml[] =
        "data: {tokenizer: /t, seq_len: 32, sources: [{name: one, path: /a, weight: 3}, "
        "{name: two, path: /b}]}\n"
        "model: {dim: 48, layers: 3, heads: 6, kv_heads: 2, ffn: 80}\n"
        "eval: {every_steps: 0}\ntrain: {steps: 500, batch_rows: 20, micro_rows: 4}\n";
    struct config c;
    struct err e = {0};
    assert_int_equal(config_parse(yaml, strlen(yaml), "y", NULL, 0, &c, &e), 0);
    json_t *j = json_pack("{s:i, s:o, s:[{s:s, s:i, s:i}, {s:s, s:i, s:i}], s:{s:s, s:i}}",
        "version", PLAN_VERSION, "config", config_plan_json(&c), "sources", "manifest_root", SHA,
        "train_tokens", 50000, "val_tokens", 0, "manifest_root", SHA, "train_tokens", 9000,
        "val_tokens", 0, "tokenizer", "sha256", SHA, "vocab", 100);
    char *text = json_dumps(j, 0);
    assert_int_equal(plan_parse(text, strlen(text), "p", p, &e), 0);
    free(text);
    p->c.process.trainer_threads = 1;
    json_decref(j);
    config_release(&c);
}

/* 6 FLOPs a matrix weight and pass (the embedding is one as the readout), W_U and W_G in all passes
 * but one. */
static void test_flops(void **state)
{
    (void)state;
    struct plan p;
    struct weight_table t;
    struct err e = {0};
    make(&p);
    assert_int_equal(weight_table_make(&p.c.model, &t, &e), 0);
    for (int k = 1; k <= 3; k++) {
        double want = k * 6.0 * 3 * 32 * 48; /* scores and values of causal attention */
        for (int i = 0; i < t.count; i++)
            if (t.items[i].ndim == 2)
                want += 6.0 * (double)t.items[i].count *
                        (t.items[i].group == WEIGHT_FUSION ? k - 1 : k);
        assert_true(fabs(plan_flops_token(&p.c.model, 32, k) - want) < 1e-6 * want);
    }
    /* A window of 8 of 32 positions in two of three layers; a gate is one matrix more a layer. */
    double whole = plan_flops_token(&p.c.model, 32, 1);
    p.c.model.window = 8;
    p.c.model.full_every = 3;
    double less = 2 * 12.0 * 48 * (16 - (8 - 1.0)); /* (8·9/2 + 24·8) / 32 = 7.1, without ends 7 */
    assert_true(fabs(whole - less - plan_flops_token(&p.c.model, 32, 1)) < 1e-6 * whole);
    p.c.model.window = 32;
    p.c.model.attn_gate = 1;
    assert_true(fabs(whole + 3 * 6 * 48 * 48 - plan_flops_token(&p.c.model, 32, 1)) < 1e-6 * whole);
    weight_table_release(&t);
    plan_release(&p);
}

static void test_costs(void **state)
{
    (void)state;
    struct plan p;
    struct plan_costs c;
    struct err e = {0};
    make(&p);
    assert_int_equal(plan_costs_make(&p, &p.c, 1e9, &c, &e), 0);
    int64_t steps[4] = {0};
    uint64_t rows[2] = {0};
    double flops = 0;
    for (int64_t s = 0; s < 500; s++) {
        int k = plan_passes(&p, s);
        steps[k]++;
        flops += 20 * 32 * plan_flops_token(&p.c.model, 32, k);
        for (int i = 0; i < 20; i++)
            rows[plan_train_sample(&p, (uint64_t)(s * 20 + i)).source]++;
    }
    for (int k = 1; k <= 3; k++)
        assert_int_equal(c.steps[k], steps[k]);
    for (int s = 0; s < 2; s++)
        assert_int_equal(plan_source_rows(&p, s), rows[s]);
    assert_true(fabs(c.flops - flops) < 1e-9 * flops);
    double one = 500 * 20 * 32 * plan_flops_token(&p.c.model, 32, 1);
    double computed = one + 0.75 * (flops - one); /* half of the documents fully fused */
    assert_true(fabs(c.flops_computed - computed) < 1e-9 * computed);
    assert_true(fabs(c.seconds - computed / 6e8) < 1e-9 * c.seconds);
    assert_true(c.tokens == 500.0 * 20 * 32);
    assert_int_equal(c.memory.passes, 3);
    assert_true(plan_memory_of(&c.memory, "weights") >= (size_t)c.params * 4);
    assert_int_equal(
        plan_memory_of(&c.memory, "moments"), 2 * plan_memory_of(&c.memory, "weights"));
    size_t sum = 0;
    for (int i = 0; i < c.memory.count; i++)
        sum += c.memory.parts[i].bytes;
    assert_int_equal(c.memory.total, sum);
    assert_true(plan_memory_of(&c.memory, "activations_3") > 0);
    assert_int_equal(plan_memory_of(&c.memory, "activations_4"), 0);
    assert_true(c.memory.sharing);
    p.c.train.prefix_sharing = 0;
    assert_int_equal(plan_costs_make(&p, &p.c, 1e9, &c, &e), 0);
    assert_false(c.memory.sharing);
    assert_true(c.flops_computed == c.flops);
    plan_release(&p);
}

static void test_reports(void **state)
{
    (void)state;
    struct plan p;
    struct plan_costs c;
    struct err e = {0};
    struct buf text = BUF_INIT;
    make(&p);
    assert_int_equal(plan_costs_make(&p, &p.c, 1e9, &c, &e), 0);
    plan_report_text(&p, &c, &text);
    static const char *const parts[] = {
        "model       3 layers, dim 48, heads 6 of 8 (key/value 2), ffn 80, vocabulary 100\n",
        "1-pass 375 steps (75.0 %), 2-pass 111 steps (22.2 %), 3-pass 14 steps (2.8 %)\n",
        "  1-pass     |################################################                |\n",
        "two                   25.00 %     9.00 k"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(text.data, parts[i]))
            fail_msg("no \"%s\" in\n%s", parts[i], text.data);
    json_t *j = plan_report_json(&p, &c);
    assert_string_equal(json_string_value(json_object_get(j, "plan_hash")), p.hash);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(j, "steps"), "1")), 375);
    json_decref(j);
    buf_release(&text);
    plan_release(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flops),
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_reports),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
