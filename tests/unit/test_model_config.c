// model_config: checks, the parameter count, and config.json there and back.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/model_config.h"
#include "common/number.h"

static struct model_config tiny(void)
{
    return (struct model_config){.vocab = 256,
        .dim = 48,
        .layers = 3,
        .heads = 6,
        .kv_heads = 2,
        .head_dim = 8,
        .ffn = 96,
        .norm_eps = 1e-5f,
        .rope_theta = 10000,
        .residual_scale = 0.40824829f,
        .feedback = 1,
        .in_norm = 1,
        .gate_norm = 1,
        .out_norm = 0,
        .doc_mask = 1};
}

/* Counted tensor by tensor, as a Llama of these sizes lists them. */
static void test_params(void **state)
{
    (void)state;
    struct model_config c = tiny();
    int64_t layer = 48 /* input norm */ + 48 * 48 /* q */ + 16 * 48 /* k */ + 16 * 48 /* v */ +
                    48 * 48 /* o */ + 48 /* post norm */ + 96 * 48 /* gate */ + 96 * 48 /* up */ +
                    48 * 96 /* down */;
    assert_int_equal(model_config_params(&c), 256 * 48 + 3 * layer + 48 + 2 * 48 * 48);
    c.feedback = 0;
    assert_int_equal(model_config_params(&c), 256 * 48 + 3 * layer + 48);
    c.qk_norm = c.attn_gate = 1;
    layer += 8 + 8 /* q and k norm */ + 48 * 48 /* gate */;
    assert_int_equal(model_config_params(&c), 256 * 48 + 3 * layer + 48);
}

static void test_window(void **state)
{
    (void)state;
    struct model_config c = tiny();
    assert_int_equal(model_config_window(&c, 0), 0);
    c.window = 5;
    for (int l = 0; l < 6; l++) {
        c.full_every = 0;
        assert_int_equal(model_config_window(&c, l), 5);
        c.full_every = 3;
        assert_int_equal(model_config_window(&c, l), l == 2 || l == 5 ? 0 : 5);
    }
}

static void test_check(void **state)
{
    (void)state;
    static const struct {
        size_t offset;
        int value;
        const char *message;
    } bad[] = {
        {offsetof(struct model_config, vocab), 0, "model.vocab: 0 is out of range, 1 to 16777216"},
        {offsetof(struct model_config, dim), -1, "model.dim: -1 is out of range, 1 to 65536"},
        {offsetof(struct model_config, layers), 2000,
            "model.layers: 2000 is out of range, 1 to 1024"},
        {offsetof(struct model_config, kv_heads), 4,
            "model.heads: 6 is not a multiple of model.kv_heads (4)"},
        {offsetof(struct model_config, head_dim), 7,
            "model.head_dim: 7 is odd; rotary embedding needs an even one"},
        {offsetof(struct model_config, feedback), 2, "model.feedback: 2 is neither 0 nor 1"},
        {offsetof(struct model_config, qk_norm), -1, "model.qk_norm: -1 is neither 0 nor 1"},
        {offsetof(struct model_config, window), -1,
            "model.window: -1 is out of range, 0 to 16777216"},
        {offsetof(struct model_config, full_every), 1025,
            "model.full_every: 1025 is out of range, 0 to 1024"},
    };
    struct model_config c = tiny();
    struct err e = {0};
    assert_int_equal(model_config_check(&c, &e), 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        c = tiny();
        *(int *)((char *)&c + bad[i].offset) = bad[i].value;
        assert_int_equal(model_config_check(&c, &e), ERR_INPUT);
        assert_string_equal(e.msg, bad[i].message);
    }
    c = tiny();
    c.dim = 65536;
    c.ffn = 1 << 20;
    c.layers = 1024;
    assert_int_equal(model_config_check(&c, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "parameters, at most 1099511627776"));
    c = tiny();
    c.norm_eps = 0;
    assert_int_equal(model_config_check(&c, &e), ERR_INPUT);
}

static void test_round_trip(void **state)
{
    (void)state;
    struct model_config c = tiny(), back;
    struct err e = {0};
    json_t *j = model_config_to_json(&c);
    char *text = json_dumps(j, JSON_SORT_KEYS);
    json_t *again = json_loads(text, 0, NULL);
    assert_int_equal(model_config_from_json(again, &back, &e), 0);
    assert_memory_equal(&c, &back, sizeof c);
    assert_string_equal(json_string_value(json_array_get(json_object_get(j, "architectures"), 0)),
        "LlamaForCausalLM");
    assert_true(json_real_value(json_object_get(j, "rms_norm_eps")) == 1e-5);
    free(text);
    json_decref(again);
    json_decref(j);
}

/* With QK-norm the names are Qwen3's, and so is the way to say windows; ours are kept beside. */
static void test_qwen3(void **state)
{
    (void)state;
    struct model_config c = tiny(), back;
    struct err e = {0};
    c.qk_norm = c.attn_gate = 1;
    c.window = 4;
    c.full_every = 2;
    json_t *j = model_config_to_json(&c);
    assert_int_equal(model_config_from_json(j, &back, &e), 0);
    assert_memory_equal(&c, &back, sizeof c);
    assert_string_equal(json_string_value(json_object_get(j, "model_type")), "qwen3");
    assert_int_equal(json_integer_value(json_object_get(j, "sliding_window")), 4);
    json_t *kinds = json_object_get(j, "layer_types");
    assert_int_equal(json_array_size(kinds), 3);
    for (size_t i = 0; i < 3; i++)
        assert_string_equal(json_string_value(json_array_get(kinds, i)),
            i == 1 ? "full_attention" : "sliding_attention");
    json_t *own = json_object_get(j, "fullband");
    json_object_set_new(own, "window", json_integer(-1));
    assert_true(model_config_from_json(j, &back, &e) < 0);
    assert_string_equal(e.msg, "fullband.window: wanted an integer, 0 to 16777216");
    json_object_del(own, "window"); /* files from before these options */
    json_object_del(own, "full_every");
    json_object_del(own, "attn_gate");
    assert_int_equal(model_config_from_json(j, &back, &e), 0);
    assert_int_equal(back.window + back.full_every + back.attn_gate, 0);
    json_object_set_new(own, "attn_gate", json_integer(1));
    assert_true(model_config_from_json(j, &back, &e) < 0);
    json_object_del(j, "fullband");
    assert_int_equal(model_config_from_json(j, &back, &e), ERR_UNSUPPORTED);
    json_decref(j);
}

/* A plain Llama without "fullband" reads as a model without feedback; what we do not compute is
 * refused. */
static void test_foreign(void **state)
{
    (void)state;
    static const char plain[] =
        "{\"model_type\":\"llama\",\"hidden_act\":\"silu\",\"tie_word_embeddings\":true,"
        "\"hidden_size\":64,\"intermediate_size\":128,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":4,\"vocab_size\":100,\"rms_norm_eps\":1e-06}";
    struct model_config c;
    struct err e = {0};
    json_t *j = json_loads(plain, 0, NULL);
    assert_int_equal(model_config_from_json(j, &c, &e), 0);
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.feedback, 0);
    assert_true(c.residual_scale == 1.0f);
    static const struct {
        const char *key, *value, *message;
    } bad[] = {
        {"tie_word_embeddings", "false", "tie_word_embeddings: not true; the readout is tied here"},
        {"model_type", "\"gpt2\"", "model_type: gpt2, wanted \"llama\" or \"qwen3\""},
        {"hidden_size", "1.5", "hidden_size: not an integer, wanted an integer"},
        {"hidden_size", "99999999999", "hidden_size: 99999999999 is out of range, 1 to 65536"},
        {"attention_bias", "true", "attention_bias: not false; linear layers have no bias here"},
        {"rope_scaling", "{}", "rope_scaling: wanted null"},
        {"fullband", "{}", "fullband.feedback: missing, wanted true or false"},
        {"rms_norm_eps", "\"x\"", "rms_norm_eps: not a number, wanted a number"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *copy = json_deep_copy(j);
        json_object_set_new(copy, bad[i].key, json_loads(bad[i].value, JSON_DECODE_ANY, NULL));
        assert_true(model_config_from_json(copy, &c, &e) < 0);
        assert_string_equal(e.msg, bad[i].message);
        json_decref(copy);
    }
    json_decref(j);
}

static void test_numbers(void **state)
{
    (void)state;
    static const struct {
        double x;
        const char *text;
    } cases[] = {{1, "1.0"}, {0.02, "0.02"}, {1e-5, "1e-05"}, {0.1 + 0.2, "0.30000000000000004"},
        {1e300, "1e+300"}, {-2.5, "-2.5"}, {1e15, "1e+15"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[NUMBER_TEXT];
        number_text(cases[i].x, text);
        assert_string_equal(text, cases[i].text);
    }
    assert_true(number_from_float(1e-5f) == 1e-5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_params),
        cmocka_unit_test(test_check),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_qwen3),
        cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
