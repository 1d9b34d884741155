// config: defaults, the exact message of every kind of mistake, overrides, and printing that reads
// back.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/config.h"
#include "common/fs.h"
#include "common/model_preset.h"
#include "common/yaml_tree.h"
#include "tests/unit/temp_dir.h"

/* The least a config needs, on lines 1 to 3. */
#define DATA "data:\n  tokenizer: tok.json\n  sources: [{name: a, path: /d/a}]\n"

static int parse(const char *yaml, struct config *c, struct err *e)
{
    return config_parse(yaml, strlen(yaml), "demo.yaml", NULL, 0, c, e);
}

static void test_defaults(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    assert_int_equal(parse(DATA, &c, &e), 0);
    assert_string_equal(c.run.name, "run");
    assert_int_equal(c.model.vocab, 0);
    assert_int_equal(c.model.dim, 256);
    assert_int_equal(c.model.kv_heads, 4);
    assert_int_equal(c.model.head_dim, 64);
    assert_int_equal(c.model.ffn, 704); /* 682.7 up to a multiple of 32 */
    assert_true(c.model.norm_eps == 1e-5f);
    assert_true(c.model.residual_scale > 0.35355f && c.model.residual_scale < 0.35356f);
    assert_true(c.model.feedback && c.model.in_norm && c.model.gate_norm && c.model.out_norm);
    assert_true(c.model.doc_mask);
    assert_true(c.data.sources[0].weight == 1);
    assert_true(c.train.lambda == 1 && c.train.jitter == 0.02 && c.train.fully_fused == 0.5);
    assert_int_equal(c.train.batch_rows, 16);
    assert_int_equal(c.train.micro_rows, 8);
    assert_int_equal(c.train.phase_count, 2);
    assert_true(c.train.phases[0].from == 0 && c.train.phases[0].share[1] == 1);
    assert_true(c.train.phases[1].from == 0.75 && c.train.phases[1].share[2] == 0.88);
    assert_true(c.train.phases[1].share[3] == 0.12);
    assert_true(c.optim.beta1 == 0.9 && c.optim.beta2 == 0.95 && c.optim.clip_norm == 1);
    assert_true(c.optim.weight_decay == 0.1 && c.optim.cooldown == 0.25);
    assert_int_equal(c.optim.schedule, LR_WSD);
    assert_int_equal(c.optim.warmup_steps, 100);
    assert_int_equal(c.eval.every_steps, c.checkpoint.every_steps);
    assert_int_equal(c.eval.passes, 3);
    assert_int_equal(c.eval.fixed_point_passes, 64);
    for (int i = 0; i < REGIME_COUNT; i++)
        assert_true(c.eval.regimes[i]);
    config_release(&c);
    assert_int_equal(parse("\xef\xbb\xbf" DATA, &c, &e), 0); /* as some editors write */
    config_release(&c);
    assert_int_equal(parse(DATA "model: {feedback: false}\n", &c, &e), 0);
    assert_int_equal(c.train.phase_count, 1);
    assert_true(c.eval.regimes[REGIME_STANDARD] && !c.eval.regimes[REGIME_SOFT]);
    assert_true(c.eval.suites[SUITE_LOSS] && !c.eval.suites[SUITE_FIXED_POINT]);
    config_release(&c);
}

/* A preset fills what is not given; what follows from others follows from the preset's values. */
static void test_preset(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    assert_int_equal(parse(DATA "model: {preset: fbt-1b, ffn: 512, qk_norm: false}\n", &c, &e), 0);
    assert_int_equal(c.model.dim, 1536);
    assert_int_equal(c.model.layers, 24);
    assert_int_equal(c.model.heads, 16);
    assert_int_equal(c.model.kv_heads, 8);
    assert_int_equal(c.model.head_dim, 96);
    assert_int_equal(c.model.ffn, 512);
    assert_int_equal(c.model.qk_norm, 0);
    assert_int_equal(c.model.attn_gate, 1);
    assert_int_equal(c.model.window, 2048);
    assert_int_equal(c.model.full_every, 6);
    assert_true(fabsf(c.model.residual_scale - 0.14433757f) < 1e-7f); /* of 24 layers */
    config_release(&c);
    static const char *const set[] = {"model.preset=fbt-demo", "model.layers=3"};
    assert_int_equal(config_parse(DATA, strlen(DATA), "demo.yaml", set, 2, &c, &e), 0);
    assert_int_equal(c.model.dim, 160);
    assert_int_equal(c.model.layers, 3);
    config_release(&c);
    assert_int_equal(parse(DATA "model: {preset: none}\n", &c, &e), 0);
    assert_int_equal(c.model.dim, 256);
    config_release(&c);
}

/* Each is a valid model; the counts are those that the names promise. */
/* A word is every pass's; of a list the last is the rest's; printing reads back. */
static void test_recompute(void **state)
{
    (void)state;
    static const struct {
        const char *given, *printed;
        enum recompute first, second, last;
    } cases[] = {
        {"train.recompute=layer", "recompute: [\"layer\"]\n", RECOMPUTE_LAYER, RECOMPUTE_LAYER,
            RECOMPUTE_LAYER},
        {"train.recompute=[none, inner]", "recompute: [\"none\", \"inner\"]\n", RECOMPUTE_NONE,
            RECOMPUTE_INNER, RECOMPUTE_INNER},
        {"train.recompute=[inner, none, none]", "recompute: [\"inner\", \"none\"]\n",
            RECOMPUTE_INNER, RECOMPUTE_NONE, RECOMPUTE_NONE},
        {"train.seed=1", "recompute: [\"none\"]\n", RECOMPUTE_NONE, RECOMPUTE_NONE, RECOMPUTE_NONE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct config c;
        struct err e = {0};
        struct buf out = BUF_INIT;
        const char *set[] = {cases[i].given, "train.prefix_sharing=off", "train.precision=bf16"};
        assert_int_equal(config_parse(DATA, strlen(DATA), "y", set, 3, &c, &e), 0);
        assert_int_equal(c.train.precision, PRECISION_BF16);
        assert_string_equal(precision_name(PRECISION_F32), "f32");
        assert_null(precision_name(PRECISION_COUNT));
        assert_int_equal(c.train.recompute[0], cases[i].first);
        assert_int_equal(c.train.recompute[1], cases[i].second);
        assert_int_equal(c.train.recompute[CONFIG_MAX_PASSES - 1], cases[i].last);
        assert_false(c.train.prefix_sharing);
        config_print(&c, &out);
        if (!strstr(out.data, cases[i].printed) || !strstr(out.data, "prefix_sharing: \"off\"\n") ||
            !strstr(out.data, "precision: \"bf16\"\n"))
            fail_msg("no %s in\n%s", cases[i].printed, out.data);
        buf_release(&out);
        config_release(&c);
    }
}

static void test_presets(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t params;
    } cases[] = {{"fbt-demo", 160 * 4096 + 4 * (4 * 160 * 160 + 3 * 160 * 448 + 320) + 160 + 51200},
        {"fbt-30m", 29599104}, {"fbt-124m", 124766976}, {"fbt-350m", 352502784},
        {"fbt-1b", 1121531904}};
    struct err e = {0};
    assert_int_equal(model_preset_count, sizeof cases / sizeof *cases);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct model_preset *p = model_preset_find(cases[i].name);
        struct model_config m = {.vocab = p->vocab,
            .norm_eps = 1e-5f,
            .rope_theta = 10000,
            .residual_scale = 1,
            .feedback = 1};
        model_preset_apply(p, &m);
        assert_int_equal(model_config_check(&m, &e), 0);
        assert_int_equal(model_config_params(&m), cases[i].params);
    }
    assert_null(model_preset_find("fbt-2b"));
}

/* What follows from optim.name. */
static void test_optim(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    assert_int_equal(parse(DATA, &c, &e), 0);
    assert_int_equal(c.optim.kind, OPTIM_ADAMW);
    assert_true(c.optim.lr == 1e-3 && c.optim.adam_lr == 1e-3 && c.optim.weight_decay == 0.1);
    assert_true(c.train.z_loss == 0);
    config_release(&c);
    assert_int_equal(parse(DATA "optim: {name: normuon}\n", &c, &e), 0);
    assert_int_equal(c.optim.kind, OPTIM_NORMUON);
    assert_true(c.optim.lr == 1e-2 && c.optim.adam_lr == 5e-4 && c.optim.weight_decay == 0.01);
    assert_true(c.optim.momentum == 0.95 && c.optim.muon_beta2 == 0.95);
    config_release(&c);
    assert_int_equal(parse(DATA "optim: {name: muon, lr: 0.02, adam_lr: 3e-3}\n", &c, &e), 0);
    assert_true(c.optim.lr == 0.02 && c.optim.adam_lr == 3e-3);
    config_release(&c);
    assert_string_equal(optim_name(OPTIM_MUON), "muon");
    assert_null(optim_name(OPTIM_COUNT));
}

/* Mistakes after DATA, so that the added text begins on line 4. */
static void test_mistakes(void **state)
{
    (void)state;
    static const struct {
        const char *added, *message;
    } cases[] = {
        {"train:\n  stepz: 5\n", "demo.yaml:5: unknown key train.stepz; did you mean train.steps?"},
        {"trian:\n  steps: 5\n", "demo.yaml:4: unknown key trian; did you mean train?"},
        {"train:\n  lr: 5\n", "demo.yaml:5: unknown key train.lr; did you mean optim.lr?"},
        {"wonderful: 5\n", "demo.yaml:4: unknown key wonderful; --help-config lists the keys"},
        {"train:\n  steps:\n    a: 1\n",
            "demo.yaml:5: train.steps: \"a mapping\" is not an integer"},
        {"model:\n  preset: gpt\n",
            "demo.yaml:5: model.preset: \"gpt\" is not a preset; fb-plan --presets lists them"},
        {"train:\n  steps: many\n", "demo.yaml:5: train.steps: \"many\" is not an integer"},
        {"train:\n  steps: 1.5\n", "demo.yaml:5: train.steps: \"1.5\" is not an integer"},
        {"train:\n  steps: \"5\"\n", "demo.yaml:5: train.steps: \"5\" is not an integer"},
        {"train:\n  steps:\n", "demo.yaml:5: train.steps: \"nothing\" is not an integer"},
        {"train:\n  steps: 0\n", "demo.yaml:5: train.steps: 0 is out of range, 1 to 1000000000000"},
        {"train:\n  steps: 99999999999999999999\n",
            "demo.yaml:5: train.steps: 99999999999999999999 is out of range, 1 to 1000000000000"},
        {"train: [1]\n", "demo.yaml:4: train: wanted a section of keys"},
        {"train: 5\n", "demo.yaml:4: train: wanted a section of keys"},
        {"train: {steps: 5, steps: 6}\n", "demo.yaml:4: key steps is given twice, first on line 4"},
        {"train:\n  steps: 5\ntrain.steps: 6\n",
            "demo.yaml:6: train.steps is given twice, first on line 5"},
        {"optim: {lr: fast}\n", "demo.yaml:4: optim.lr: \"fast\" is not a number"},
        {"optim: {lr: nan}\n", "demo.yaml:4: optim.lr: \"nan\" is not a number"},
        {"optim: {lr: 1e999}\n", "demo.yaml:4: optim.lr: 1e999 is out of range, 1e-09 to 10"},
        {"optim: {lr: -1}\n", "demo.yaml:4: optim.lr: -1 is out of range, 1e-09 to 10"},
        {"optim: {schedule: step}\n",
            "demo.yaml:4: optim.schedule: \"step\" is not cosine, wsd or constant"},
        {"optim: {name: sgd}\n", "demo.yaml:4: optim.name: \"sgd\" is not adamw, muon or normuon"},
        {"train: {z_loss: 1e-5}\noptim: {schedule: cosine}\n",
            "demo.yaml: train.z_loss_late: the z-loss would never count: only optim.schedule wsd "
            "has a cooldown; false lets it count in every step"},
        {"optim: {min_lr: 0.1}\n", "demo.yaml:4: optim.min_lr: 0.1 is above optim.lr (0.001)"},
        {"optim: {warmup_steps: 800}\n",
            "demo.yaml:4: optim.warmup_steps: 800 warm-up and 250 cooldown steps are more than "
            "train.steps (1000)"},
        {"model: {feedback: 1}\n", "demo.yaml:4: model.feedback: \"1\" is not true or false"},
        {"model: {heads: 6, kv_heads: 4}\n",
            "demo.yaml:4: model.heads: 6 is not a multiple of model.kv_heads (4)"},
        {"model: {head_dim: 7}\n",
            "demo.yaml:4: model.head_dim: 7 is odd; rotary embedding needs an even one"},
        {"model: {dim: 65536, layers: 1024, head_dim: 64, ffn: 1048576}\n",
            "demo.yaml:4: model.dim: these sizes make 211183676293120 parameters, at most "
            "1099511627776"},
        {"model:\n  feedback: false\ntrain:\n  passes: [{from: 0, passes: {2: 1}}]\n",
            "demo.yaml:7: train.passes: 2 passes need model.feedback: true"},
        {"model: {feedback: false}\neval: {regimes: [standard, soft]}\n",
            "demo.yaml:5: eval.regimes: soft and fused need model.feedback: true"},
        {"model: {feedback: false}\neval: {suites: [fixed_point]}\n",
            "demo.yaml:5: eval.suites: fixed_point needs model.feedback: true"},
        {"train: {prefix_sharing: true}\n",
            "demo.yaml:4: train.prefix_sharing: \"true\" is not auto or off"},
        {"train: {precision: fp16}\n", "demo.yaml:4: train.precision: \"fp16\" is not f32 or bf16"},
        {"train:\n  recompute: some\n",
            "demo.yaml:5: train.recompute: \"some\" is none of none, inner, layer"},
        {"train:\n  recompute: [layer, {a: b}]\n",
            "demo.yaml:5: train.recompute: \"a list or mapping\" is none of none, inner, layer"},
        {"train:\n  recompute: []\n",
            "demo.yaml:5: train.recompute: wanted a list of none, inner, layer"},
        {"train: {micro_rows: 3}\n",
            "demo.yaml:4: train.micro_rows: 3 does not divide train.batch_rows (16)"},
        {"train: {micro_rows: 16}\ndata.seq_len: 1048577\n",
            "demo.yaml:5: data.seq_len: 1048577 is out of range, 2 to 1048576"},
        {"train: {batch_rows: 64, micro_rows: 64}\ndata.seq_len: 1048576\n",
            "demo.yaml:4: train.micro_rows: 64 rows of data.seq_len 1048576 are more than 16777216 "
            "tokens"},
        {"train: {steps: 1000000000000, batch_rows: 1048576, micro_rows: 1}\ndata.seq_len: 4096\n",
            "demo.yaml:4: train.steps: 1000000000000 steps of 1048576 rows of 4096 tokens are more "
            "than 2^60 tokens"},
        {"checkpoint: {every_steps: 100}\neval: {every_steps: 150}\n",
            "demo.yaml:5: eval.every_steps: 150 is not a multiple of checkpoint.every_steps (100)"},
        {"eval: {fixed_point_passes: 256}\n",
            "demo.yaml:4: eval.fixed_point_passes: 256 is not below data.seq_len (256)"},
        {"eval: {suites: [loss, gsm]}\n",
            "demo.yaml:4: eval.suites: \"gsm\" is none of loss, fixed_point"},
        {"eval: {regimes: soft}\n",
            "demo.yaml:4: eval.regimes: wanted a list of standard, soft, fused"},
        {"run: {name: ../x}\n", "demo.yaml:4: run.name: \"../x\" is not a name: letters, digits, "
                                "'.', '_', '-', at most "
                                "100, the first not '.'"},
        {"run: {dir: \"a\\u0001\"}\n", "demo.yaml:4: run.dir: holds a control character"},
        {"run: {dir: \"a\\0b\"}\n", "demo.yaml:4: a value holds a NUL byte"},
        {"train:\n  passes:\n    - {from: 0, passes: {1: 0.5, 2: 0.4}}\n",
            "demo.yaml:6: train.passes[0].passes: the shares sum to 0.9, wanted 1"},
        {"train:\n  passes:\n    - {from: 0.1, passes: {1: 1}}\n",
            "demo.yaml:6: train.passes[0].from: 0.1; the first is 0 and each is above the last"},
        {"train:\n  passes:\n    - {from: 0, passes: {1: 1}}\n    - {from: 0, passes: {2: 1}}\n",
            "demo.yaml:7: train.passes[1].from: 0; the first is 0 and each is above the last"},
        {"train:\n  passes:\n    - {from: 0, passes: {9: 1}}\n",
            "demo.yaml:6: train.passes[0].passes: 9 is not a pass count, 1 to 8"},
        {"train:\n  passes:\n    - {form: 0, passes: {1: 1}}\n",
            "demo.yaml:6: unknown key train.passes[0].form; wanted {from, passes: {count: share, "
            "…}}"},
        {"train:\n  passes:\n    - {passes: {1: 1}}\n",
            "demo.yaml:6: train.passes[0].from is missing; wanted {from, passes: {count: share, "
            "…}}"},
        {"x: &a 1\n", "demo.yaml:4: YAML anchors are not supported; write the value out"},
        {"x: *a\n", "demo.yaml:4: YAML aliases are not supported; write the value out"},
        {"x: !!int 1\n", "demo.yaml:4: YAML tags are not supported; leave the tag out"},
        {"x: [[[[[[[[[1]]]]]]]]]\n", "demo.yaml:4: nested deeper than 8 levels"},
        {"---\nx: 1\n", "demo.yaml:4: a second YAML document; wanted one"},
        {"{a: 1}: 2\n", "demo.yaml:4: a key of a mapping must be a word"},
        {"\tx: 1\n", "demo.yaml:4: not valid YAML: found character that cannot start any token"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char yaml[1024];
        struct config c;
        struct err e = {0};
        snprintf(yaml, sizeof yaml, DATA "%s", cases[i].added);
        assert_int_equal(parse(yaml, &c, &e), ERR_INPUT);
        assert_string_equal(e.msg, cases[i].message);
    }
}

/* Mistakes in the data section itself, or in the whole text. */
static void test_data_mistakes(void **state)
{
    (void)state;
    static const struct {
        const char *yaml, *message;
    } cases[] = {
        {"", "demo.yaml:1: empty"},
        {"# nothing\n", "demo.yaml:1: empty"},
        {"[1]", "demo.yaml:1: the file: wanted a section of keys"},
        {"run: {name: a}\n", "demo.yaml:1: data.tokenizer is missing: tokenizer.json"},
        {"data: {tokenizer: t}\n", "demo.yaml:1: data.sources is missing: list of {name, path, "
                                   "weight}: directories made by "
                                   "fb-ingest; weight is relative, default 1"},
        {"data: {tokenizer: t, sources: []}\n",
            "demo.yaml:1: data.sources: wanted a list of {name, path, weight}"},
        {"data:\n  sources:\n    - {name: a}\n",
            "demo.yaml:3: data.sources[0].path is missing; wanted {name, path, weight}"},
        {"data:\n  sources:\n    - a\n",
            "demo.yaml:3: data.sources[0]: wanted {name, path, weight}"},
        {"data:\n  sources:\n    - {name: a, path: b, wieght: 1}\n",
            "demo.yaml:3: unknown key data.sources[0].wieght; wanted {name, path, weight}"},
        {"data:\n  sources:\n    - {name: a, path: b, weight: 0}\n",
            "demo.yaml:3: data.sources[0].weight: 0 is out of range, 1e-06 to 1000000"},
        {"data:\n  sources:\n    - {name: a, path: b}\n    - {name: a, path: c}\n",
            "demo.yaml:4: data.sources[1].name: a is the name of entry 0 too"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct config c;
        struct err e = {0};
        assert_int_equal(parse(cases[i].yaml, &c, &e), ERR_INPUT);
        assert_string_equal(e.msg, cases[i].message);
    }
}

static void test_overrides(void **state)
{
    (void)state;
    static const struct {
        const char *override, *message; /* NULL: is taken */
    } cases[] = {
        {"train.steps=77", NULL},
        {"train={steps: 77}", NULL},
        {"train.stepz=5",
            "--set train.stepz=5: unknown key train.stepz; did you mean train.steps?"},
        {"train.steps=x", "--set train.steps=x: train.steps: \"x\" is not an integer"},
        {"train.steps", "--set train.steps: wanted key=value"},
        {"=5", "--set =5: wanted key=value"},
        {"train.steps=", "--set train.steps=: the value is missing"},
        {"train.micro_rows=3",
            "--set train.micro_rows=3: train.micro_rows: 3 does not divide train.batch_rows (16)"},
        {"train.passes=[{from: 0, passes: {2: 2}}]",
            "--set train.passes=[{from: 0, passes: {2: 2}}]: train.passes[0].passes.2: 2 is out of "
            "range, 0 to 1"},
    };
    const char *yaml = DATA "train: {steps: 50}\n";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct config c;
        struct err e = {0};
        int rc = config_parse(yaml, strlen(yaml), "demo.yaml", &cases[i].override, 1, &c, &e);
        assert_int_equal(rc, cases[i].message ? ERR_INPUT : 0);
        if (cases[i].message) {
            assert_string_equal(e.msg, cases[i].message);
        } else {
            assert_int_equal(c.train.steps, 77);
            config_release(&c);
        }
    }
    static const char *const two[] = {"train.steps=60", "train.steps=70"};
    struct config c;
    struct err e = {0};
    assert_int_equal(config_parse(yaml, strlen(yaml), "demo.yaml", two, 2, &c, &e), 0);
    assert_int_equal(c.train.steps, 70);
    config_release(&c);
}

static void test_round_trip(void **state)
{
    (void)state;
    static const char *const texts[] = {DATA, DATA
        "run: {name: x-1, dir: \"/tmp/a \\\"b\\\" \\\\c äö\"}\n"
        "model: {dim: 96, heads: 6, kv_heads: 2, head_dim: 16, norm_eps: 3.3e-6}\n"
        "train:\n  seed: 9007199254740991\n  prefix_mixin: {fully_fused: 0.3333333333333333}\n"
        "  passes: [{from: 0, passes: {1: 0.75, 2: 0.22, 3: 0.03}}, {from: 0.1, passes: {8: 1}}]\n"
        "optim: {schedule: cosine, lr: 3.0000000000000004e-4}\n"
        "eval: {suites: [fixed_point], regimes: [fused], every_steps: 0}\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct config c, back;
        struct err e = {0};
        struct buf first = BUF_INIT, second = BUF_INIT;
        assert_int_equal(parse(texts[i], &c, &e), 0);
        config_print(&c, &first);
        assert_int_equal(parse(first.data, &back, &e), 0);
        config_print(&back, &second);
        assert_string_equal(first.data, second.data);
        assert_memory_equal(&c.model, &back.model, sizeof c.model);
        assert_memory_equal(&c.train, &back.train, sizeof c.train);
        assert_memory_equal(&c.optim, &back.optim, sizeof c.optim);
        assert_memory_equal(&c.eval, &back.eval, sizeof c.eval);
        assert_memory_equal(&c.checkpoint, &back.checkpoint, sizeof c.checkpoint);
        assert_memory_equal(&c.process, &back.process, sizeof c.process);
        assert_string_equal(c.run.dir, back.run.dir);
        config_release(&c);
        config_release(&back);
        buf_release(&first);
        buf_release(&second);
    }
}

static void write_file(const char *path, const char *text)
{
    struct err e = {0};
    assert_int_equal(fs_write_atomic(path, text, strlen(text), &e), 0);
}

/* What the config names must exist when it is loaded, and the message says which line named it. */
static void test_missing_files(void **state)
{
    (void)state;
    char *dir = temp_dir_make();
    char *path = mem_printf("%s/c.yaml", dir), *tok = mem_printf("%s/t.json", dir);
    char *yaml =
        mem_printf("data:\n  tokenizer: %s\n  sources:\n    - {name: a, path: %s}\n", tok, dir);
    char *manifest = mem_printf("%s/manifest.json", dir), *want;
    struct config c;
    struct err e = {0};
    assert_int_equal(config_load(path, NULL, 0, &c, &e), ERR_IO);
    assert_non_null(strstr(e.msg, "c.yaml: No such file"));
    write_file(path, yaml);
    assert_int_equal(config_load(path, NULL, 0, &c, &e), ERR_INPUT);
    want = mem_printf(
        "%s:2: data.tokenizer: %s: no such file; fb-tokenizer train makes one", path, tok);
    assert_string_equal(e.msg, want);
    free(want);
    write_file(tok, "{}");
    assert_int_equal(config_load(path, NULL, 0, &c, &e), ERR_INPUT);
    want = mem_printf("%s:3: data.sources: %s: no such file; fb-ingest makes one", path, manifest);
    assert_string_equal(e.msg, want);
    free(want);
    write_file(manifest, "{}");
    assert_int_equal(config_load(path, NULL, 0, &c, &e), 0);
    config_release(&c);
    temp_dir_remove(&dir);
    free(manifest);
    free(yaml);
    free(tok);
    free(path);
}

/* Large texts stop at a bound, not at the end of memory. */
static void test_bounds(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    struct buf text = BUF_INIT;
    buf_add_str(&text, "x: [");
    for (int i = 0; i < 600; i++)
        buf_add_str(&text, "1,");
    buf_add_str(&text, "]\n");
    assert_int_equal(parse(text.data, &c, &e), ERR_INPUT);
    assert_string_equal(e.msg, "demo.yaml:1: more than 512 entries");
    while (text.len <= YAML_MAX_BYTES)
        buf_add_str(&text, "# a line of comment that fills the file\n");
    assert_int_equal(parse(text.data, &c, &e), ERR_INPUT);
    assert_string_equal(e.msg, "demo.yaml: larger than the limit of 1048576 bytes");
    buf_release(&text);
}

static void test_help(void **state)
{
    (void)state;
    struct buf out = BUF_INIT;
    config_help(&out);
    assert_non_null(strstr(out.data, "train.steps  (integer, 1 to 1000000000000, default 1000)\n"
                                     "    optimizer steps\n"));
    assert_non_null(strstr(out.data, "data.tokenizer  (text, required)\n"));
    buf_release(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_preset),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_presets),
        cmocka_unit_test(test_optim),
        cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_data_mistakes),
        cmocka_unit_test(test_overrides),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_missing_files),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_help),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
