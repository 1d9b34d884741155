/*
 * train.init_from: a feedback run begins with the weights of a committed standard checkpoint and
 * fresh fusion matrices; another checkpoint, model, tokenizer or a damaged file is refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/checkpoint.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/plan.h"
#include "common/safetensors.h"
#include "tests/unit/temp_dir.h"
#include "tests/unit/text_case.h"
#include "trainer/engine.h"

static char *dir, *init;
static const char *tokenizer_end = ""; /* behind a checkpoint's copy: another tokenizer */

/* A plan of a small model with these keys beside; 0 or the error. */
static int make_plan(const char *model, const char *train, struct plan *out, struct err *e)
{
    struct config c;
    char *yaml = mem_printf("model: {dim: 16, layers: 2, heads: 2, %s}\n"
                            "data: {tokenizer: %s/tokenizer.json, seq_len: 32,"
                            " sources: [{name: one, path: %s/one}]}\n"
                            "train: {steps: 10, batch_rows: 4, %s}\neval: {every_steps: 0}\n",
        model, dir, dir, train);
    int rc = config_parse(yaml, strlen(yaml), "test", NULL, 0, &c, e);
    if (rc == 0) {
        rc = plan_make(&c, out, e);
        config_release(&c);
    }
    free(yaml);
    return rc;
}

static float *weights_of(const struct plan *p, int *rc, struct err *e)
{
    struct engine_settings s = {.plan = p, .threads = 1, .world = 1};
    struct engine *g;
    assert_int_equal(engine_new(&s, &g, e), 0);
    size_t bytes = (size_t)engine_weights(g)->total * sizeof(float);
    float *out = mem_array(bytes, 1);
    *rc = engine_load_fresh(g, e);
    memcpy(out, engine_source(g).params, bytes); /* the CPU device's memory is the host's */
    engine_free(&g);
    return out;
}

static void put(const char *name, const void *bytes, size_t n)
{
    char *path = mem_printf("%s/%s", init, name);
    struct err e = {0};
    if (fs_write_atomic(path, bytes, n, &e) < 0)
        fail_msg("%s", e.msg);
    free(path);
}

static void copy_tokenizer(void)
{
    char *path = mem_printf("%s/tokenizer.json", dir);
    struct buf text = BUF_INIT;
    struct err e = {0};
    assert_int_equal(fs_read(path, 1 << 20, &text, &e), 0);
    buf_add_str(&text, tokenizer_end);
    put("tokenizer.json", text.data, text.len);
    buf_release(&text);
    free(path);
}

/* Commits the weights of a plan as step 7; to be freed. */
static float *commit(const struct plan *p)
{
    struct err e = {0};
    struct weight_table t;
    int rc;
    float *w = weights_of(p, &rc, &e);
    assert_int_equal(rc, 0);
    assert_int_equal(weight_table_make(&p->c.model, &t, &e), 0);
    struct st_tensor *tensors = mem_array((size_t)t.count, sizeof *tensors);
    char(*names)[128] = mem_array((size_t)t.count, sizeof *names);
    weights_as_tensors(&t, w, "", tensors, names);
    assert_int_equal(fs_remove_tree(init, &e), 0);
    assert_int_equal(fs_mkdir_p(init, 0755, &e), 0);
    char *path = mem_printf("%s/model.safetensors", init);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(safetensors_write(fileno(f), path, tensors, t.count, NULL, &e), 0);
    fclose(f);
    json_t *j = model_config_to_json(&p->c.model);
    char *config = json_dumps(j, 0);
    put("config.json", config, strlen(config));
    copy_tokenizer();
    if (checkpoint_commit(init, 7, p->hash, 1, NULL, 0, &e) < 0)
        fail_msg("%s", e.msg);
    json_decref(j);
    free(config);
    free(path);
    free(names);
    free(tensors);
    weight_table_release(&t);
    return w;
}

static char *train_keys(void)
{
    return mem_printf("seed: 2, init_from: %s", init);
}

static void test_branches(void **state)
{
    (void)state;
    struct plan standard, branch, fresh, again;
    struct err e = {0};
    struct weight_table t, of_standard;
    int rc;
    assert_int_equal(make_plan("feedback: false", "seed: 1", &standard, &e), 0);
    float *from = commit(&standard);
    char *train = train_keys();
    if (make_plan("feedback: true", train, &branch, &e) < 0)
        fail_msg("%s", e.msg);
    assert_int_equal(make_plan("feedback: true", "seed: 2", &fresh, &e), 0);
    assert_int_equal(fresh.init_sha256[0], 0);
    float *got = weights_of(&branch, &rc, &e), *drawn = weights_of(&fresh, &rc, &e);
    assert_int_equal(weight_table_make(&branch.c.model, &t, &e), 0);
    assert_int_equal(weight_table_make(&standard.c.model, &of_standard, &e), 0);
    size_t fusion = (size_t)t.items[weight_w_u(&branch.c.model)].offset;
    assert_int_equal(fusion, of_standard.total);
    assert_memory_equal(got, from, fusion * sizeof *got);
    assert_memory_equal(got + fusion, drawn + fusion, ((size_t)t.total - fusion) * sizeof *got);
    assert_memory_not_equal(got, drawn, fusion * sizeof *got);

    /* The plan says which checkpoint, and reads back. */
    assert_string_not_equal(branch.hash, fresh.hash);
    assert_int_equal(plan_parse(branch.json, strlen(branch.json), "p", &again, &e), 0);
    assert_string_equal(again.init_sha256, branch.init_sha256);
    assert_int_equal(strlen(again.init_sha256), SHA256_HEX - 1);
    plan_release(&again);

    /* A feedback checkpoint goes on with its own fusion matrices. */
    float *second = commit(&branch);
    assert_memory_equal(second, got, (size_t)t.total * sizeof *got);
    struct plan next;
    assert_int_equal(make_plan("feedback: true, window: 8, rope_theta: 5000", train, &next, &e), 0);
    float *third = weights_of(&next, &rc, &e);
    assert_memory_equal(third, got, (size_t)t.total * sizeof *got);

    /* The first plan's checkpoint is another now. */
    free(weights_of(&branch, &rc, &e));
    assert_int_equal(rc, ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "its MANIFEST.json has hash"));
    float *all[] = {from, got, drawn, second, third};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    struct plan *plans[] = {&standard, &branch, &fresh, &next};
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        plan_release(plans[i]);
    weight_table_release(&t);
    weight_table_release(&of_standard);
    free(train);
}

static void test_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *model, *says;
    } cases[] = {
        {"ffn: 96", "model.ffn: 96, the checkpoint's model has 64"},
        {"kv_heads: 1", "model.kv_heads: 1, the checkpoint's model has 2"},
        {"qk_norm: true", "model.qk_norm: true, the checkpoint's model has false"},
        {"attn_gate: true", "model.attn_gate: true, the checkpoint's model has false"},
        {"in_norm: false", "model.in_norm: false, the checkpoint's model has true"},
        {"residual_scale: 1", "model.residual_scale: 1, the checkpoint's model has 0.5"},
        {"norm_eps: 1e-6", "model.norm_eps: 1e-06, the checkpoint's model has 1e-05"},
    };
    struct plan standard, p;
    struct err e = {0};
    int rc;
    assert_int_equal(make_plan("feedback: false, ffn: 64", "seed: 1", &standard, &e), 0);
    free(commit(&standard));
    char *train = train_keys();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *model =
            mem_printf("%s%s", strstr(cases[i].model, "ffn") ? "" : "ffn: 64, ", cases[i].model);
        assert_int_equal(make_plan(model, train, &p, &e), ERR_MISMATCH);
        if (!strstr(e.msg, cases[i].says) || strncmp(e.msg, "train.init_from: ", 17) != 0)
            fail_msg("\"%s\" does not say \"%s\"", e.msg, cases[i].says);
        free(model);
    }
    /* Fusion matrices are not dropped in silence. */
    struct plan feedback;
    assert_int_equal(make_plan("feedback: true, ffn: 64", "seed: 1", &feedback, &e), 0);
    free(commit(&feedback));
    assert_int_equal(make_plan("feedback: false, ffn: 64", train, &p, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "model.feedback: false, the checkpoint's model has true"));

    /* A byte changed behind the manifest: seen when the weights are read. */
    assert_int_equal(make_plan("ffn: 64", train, &p, &e), 0);
    char *path = mem_printf("%s/model.safetensors", init);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -5, SEEK_END), 0);
    fputc('!', f);
    fclose(f);
    free(path);
    free(weights_of(&p, &rc, &e));
    assert_true(rc < 0);
    assert_non_null(strstr(e.msg, "model.safetensors"));
    plan_release(&p);

    tokenizer_end = "\n";
    free(commit(&standard));
    tokenizer_end = "";
    assert_int_equal(make_plan("ffn: 64", train, &p, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "tokenizer.json: has hash"));
    plan_release(&standard);
    plan_release(&feedback);
    free(train);
    assert_true(make_plan("ffn: 64", "init_from: /nowhere", &p, &e) < 0);
}

static int setup(void **state)
{
    (void)state;
    dir = temp_dir_make();
    init = mem_printf("%s/step-00000007", dir);
    text_case_tokenizer(dir, "tokenizer.json");
    text_case_source(dir, "one", 0, 20, 1 << 20);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    temp_dir_remove(&dir);
    free(init);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_branches),
        cmocka_unit_test(test_refuses),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
