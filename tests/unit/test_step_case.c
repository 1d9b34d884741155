/* Golden case files: what is wrong in one is refused with its name; what fb-step computed compares.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "tests/unit/model_case.h"
#include "trainer/step_case.h"

enum { ROWS = 2, SEQ = 5, PASSES = 2, MAX_TENSORS = 64, META_KEYS = 24 };

static struct device *device;

/* A case file being built: change what a test is about, then case_open(). */
struct case_file {
    const char *meta[2 * META_KEYS + 1];
    struct st_tensor tensors[MAX_TENSORS];
    char names[MAX_TENSORS][128];
    int count;
    struct weight_table table;
    float *weights;
    struct test_batch batch;
    float noise[ROWS * SEQ * 8];
    char *bytes;
};

static const char *const good_meta[] = {"vocab", "13", "dim", "8", "layers", "2", "heads", "4",
    "kv", "2", "ffn", "10", "hd", "4", "eps", "1e-05", "theta", "100.0", "lambda", "0.5", "passes",
    "2", "residual_scale", "0.5", "doc_mask", "True", "in_norm", "True", "gate_norm", "True",
    "out_norm", "True", "jitter", "0.02", "feed", "post", "embed_scale", "1.0", "qk_norm", "False",
    "window", "0", "seed", "3", NULL};

static void case_add(struct case_file *f, const char *name, enum st_dtype dtype, int ndim,
    const int64_t *shape, const void *data)
{
    struct st_tensor *t = &f->tensors[f->count++];
    *t = (struct st_tensor){
        .name = name, .dtype = dtype, .ndim = ndim, .data = data, .bytes = st_dtype_bytes(dtype)};
    for (int i = 0; i < ndim; i++) {
        t->shape[i] = shape[i];
        t->bytes *= (size_t)shape[i];
    }
}

static void case_make(struct case_file *f)
{
    static const int64_t rows[] = {ROWS, SEQ}, masks[] = {1, ROWS, SEQ},
                         noise[] = {1, ROWS, SEQ, 8};
    struct model_config c = small_config();
    struct err e;
    memset(f, 0, sizeof *f);
    memcpy(f->meta, good_meta, sizeof good_meta);
    assert_int_equal(weight_table_make(&c, &f->table, &e), 0);
    f->weights = mem_array((size_t)f->table.total, sizeof *f->weights);
    weights_init(&f->table, 3, f->weights);
    weights_as_tensors(&f->table, f->weights, "w.", f->tensors, f->names);
    f->count = f->table.count;
    test_batch_make(&f->batch, &c, ROWS, SEQ, PASSES, 1, 0, 4);
    f->batch.targets[0] = 1; /* at least one is counted */
    case_add(f, "in.tokens", ST_I32, 2, rows, f->batch.tokens);
    case_add(f, "in.targets", ST_I32, 2, rows, f->batch.targets);
    case_add(f, "in.doc_starts", ST_U8, 2, rows, f->batch.doc_starts);
    case_add(f, "in.masks", ST_U8, 3, masks, f->batch.masks);
    case_add(f, "in.noise", ST_F32, 4, noise, f->noise);
}

static void case_release(struct case_file *f)
{
    weight_table_release(&f->table);
    test_batch_release(&f->batch);
    free(f->weights);
    free(f->bytes);
}

static struct safetensors *case_open(struct case_file *f)
{
    struct safetensors *st;
    struct err e = {0};
    FILE *file = tmpfile();
    assert_non_null(file);
    if (safetensors_write(fileno(file), "case", f->tensors, f->count, f->meta, &e) < 0)
        fail_msg("%s", e.msg);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size_t n = (size_t)ftell(file);
    rewind(file);
    free(f->bytes);
    f->bytes = mem_array(n, 1);
    assert_int_equal(fread(f->bytes, 1, n, file), n);
    fclose(file);
    if (safetensors_open_memory(f->bytes, n, &st, &e) < 0)
        fail_msg("%s", e.msg);
    return st;
}

/* Read, check, run: the first that fails says so. */
static int case_run(struct case_file *f, struct step_result *r, struct err *e)
{
    struct safetensors *st = case_open(f);
    struct step_case sc;
    int rc = step_case_read(st, &sc, e);
    if (rc == 0) {
        rc = step_case_check(&sc, e);
        if (rc == 0)
            rc = step_run(device, &sc, st, r, e);
        step_case_release(&sc);
    }
    safetensors_close(&st);
    return rc;
}

static void expect_refusal(struct case_file *f, int code, const char *says)
{
    struct step_result r;
    struct err e = {0};
    int rc = case_run(f, &r, &e);
    if (rc != code || !strstr(e.msg, says))
        fail_msg("%d \"%s\", not %d \"%s\"", rc, e.msg, code, says);
}

static const struct meta_case {
    const char *key, *value; /* NULL: the key is left out */
    int code;
    const char *says;
} meta_cases[] = {
    {"vocab", NULL, ERR_INPUT, "no \"vocab\""},
    {"lambda", NULL, ERR_INPUT, "no \"lambda\""},
    {"vocab", "", ERR_INPUT, "vocab"},
    {"vocab", "13x", ERR_INPUT, "vocab"},
    {"vocab", "12.5", ERR_INPUT, "vocab"},
    {"vocab", "-13", ERR_INPUT, "vocab"},
    {"vocab", "99999999999", ERR_INPUT, "vocab"},
    {"vocab", "14", ERR_MISMATCH, "embed_tokens"},
    {"dim", "9", ERR_INPUT, "in.noise"},
    {"layers", "0", ERR_INPUT, "model.layers"},
    {"layers", "3", ERR_INPUT, "layers.2"},
    {"layers", "1", ERR_MISMATCH, "layers.1"},
    {"layers", "1024", ERR_INPUT, "layers.2"},
    {"heads", "3", ERR_INPUT, "heads"},
    {"hd", "5", ERR_INPUT, "head_dim"},
    {"ffn", "1000000", ERR_MISMATCH, "gate_proj"},
    {"eps", "0", ERR_INPUT, "eps"},
    {"eps", "nan", ERR_INPUT, "eps"},
    {"theta", "inf", ERR_INPUT, "theta"},
    {"passes", "0", ERR_INPUT, "passes"},
    {"passes", "3", ERR_INPUT, "in.masks"},
    {"passes", "1000000000", ERR_INPUT, "passes"},
    {"doc_mask", "yes", ERR_INPUT, "True or False"},
    {"qk_norm", "True", ERR_INPUT, "q_norm"},
    {"window", "-5", ERR_INPUT, "window"},
    {"feed", "pre", ERR_UNSUPPORTED, "feed"},
    {"embed_scale", "2.0", ERR_UNSUPPORTED, "embed_scale"},
};

static void meta_set(struct case_file *f, const char *key, const char *value)
{
    int i = 0, n = 0;
    while (strcmp(f->meta[i], key) != 0)
        i += 2;
    while (f->meta[n])
        n += 2;
    if (value)
        f->meta[i + 1] = value;
    else
        memmove(f->meta + i, f->meta + i + 2, (size_t)(n - i - 1) * sizeof *f->meta);
}

static void test_metadata(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof meta_cases / sizeof *meta_cases; i++) {
        struct case_file f;
        case_make(&f);
        meta_set(&f, meta_cases[i].key, meta_cases[i].value);
        expect_refusal(&f, meta_cases[i].code, meta_cases[i].says);
        case_release(&f);
    }
}

static struct st_tensor *tensor_of(struct case_file *f, const char *name)
{
    for (int i = 0; i < f->count; i++)
        if (strcmp(f->tensors[i].name, name) == 0)
            return &f->tensors[i];
    fail_msg("no %s", name);
    return NULL;
}

static void test_tensors(void **state)
{
    (void)state;
    static const char *const inputs[] = {
        "in.tokens", "in.targets", "in.doc_starts", "in.masks", "w.model.norm.weight"};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        for (int how = 0; how < 3; how++) {
            struct case_file f;
            case_make(&f);
            struct st_tensor *t = tensor_of(&f, inputs[i]);
            if (how == 0)
                t->name = "w2.other"; /* absent */
            else if (how == 1) {      /* one dimension more */
                t->shape[t->ndim++] = 1;
            } else { /* another type */
                t->dtype = ST_U8;
                t->ndim = 1;
                t->shape[0] = (int64_t)t->bytes;
            }
            expect_refusal(&f, how && i == 4 ? ERR_MISMATCH : ERR_INPUT, inputs[i]);
            case_release(&f);
        }
}

static void test_values(void **state)
{
    (void)state;
    struct case_file f;
    case_make(&f);
    f.batch.masks[0] = 1;
    expect_refusal(&f, ERR_INPUT, "begins a row");
    f.batch.masks[0] = 3;
    expect_refusal(&f, ERR_INPUT, "right is 0 or 1");
    f.batch.masks[0] = 0;
    f.batch.doc_starts[2] = 1;
    f.batch.masks[2] = 1;
    expect_refusal(&f, ERR_INPUT, "begins a document");
    f.batch.masks[2] = 0;
    f.batch.tokens[1] = 13;
    expect_refusal(&f, ERR_INPUT, "token 1 of row 0 is 13");
    f.batch.tokens[1] = 0;
    f.noise[3] = 1.0f / 0.0f;
    expect_refusal(&f, ERR_INPUT, "in.noise");
    f.noise[3] = 0;
    for (int i = 0; i < ROWS * SEQ; i++)
        f.batch.targets[i] = -1;
    expect_refusal(&f, ERR_INPUT, "counts no target");
    f.batch.targets[0] = 1;
    tensor_of(&f, "in.noise")->name = "in.no";
    expect_refusal(&f, ERR_INPUT, "there is no tensor in.noise");
    case_release(&f);
}

/* Our own results pass; one changed element, a missing or an unknown tensor does not. */
static void test_compare(void **state)
{
    (void)state;
    struct case_file f;
    struct step_result r;
    struct step_comparison *list;
    struct err e = {0};
    float odd[1] = {1};
    case_make(&f);
    if (case_run(&f, &r, &e) < 0)
        fail_msg("%s", e.msg);
    assert_true(r.count + f.count < MAX_TENSORS);
    int own = f.count;
    for (int i = 0; i < r.count; i++)
        f.tensors[f.count++] = r.tensors[i];
    struct safetensors *st = case_open(&f);
    int n = step_compare(&r, st, &list, &e);
    assert_int_equal(n, r.count);
    for (int i = 0; i < n; i++)
        assert_true(list[i].pass && list[i].error == 0);
    free(list);
    safetensors_close(&st);

    r.losses[1] *= 1.01f;
    f.tensors[own] = (struct st_tensor){"out.other", ST_F32, 1, {1}, odd, 4};
    f.tensors[own + 1] = (struct st_tensor){"out.losses", ST_F32, 1, {PASSES}, r.losses, 8};
    st = case_open(&f);
    r.losses[1] /= 1.01f;
    n = step_compare(&r, st, &list, &e);
    for (int i = 0; i < n; i++) {
        int wrong =
            strcmp(list[i].name, "out.other") == 0 || strcmp(list[i].name, "out.losses") == 0;
        assert_int_equal(list[i].pass, !wrong);
    }
    free(list);
    safetensors_close(&st);
    f.count = own;
    st = case_open(&f);
    assert_int_equal(step_compare(&r, st, &list, &e), ERR_INPUT);
    safetensors_close(&st);
    step_result_release(&r);
    case_release(&f);
}

static int setup(void **state)
{
    (void)state;
    return device_cpu_new(1, &device, NULL);
}

static int teardown(void **state)
{
    (void)state;
    device_free(&device);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_compare),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
