/* Cached decoding against the same passes computed over the whole sequence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/rng.h"
#include "kernels/decode.h"
#include "tests/unit/model_case.h"

enum { LONGEST = 24, VOCAB = 13, DIM = 8 };
#define TOLERANCE 3e-6

static struct device *device;
static int32_t sequence[LONGEST];

static struct model *model_of(const struct model_config *c, int batch, float **flat)
{
    struct model_limits lim = {.batch = batch, .seq = LONGEST, .passes = 1, .train = 0};
    for (int i = 0; i < LONGEST; i++)
        sequence[i] = (int32_t)(rng_unit(91, (uint64_t)i) * VOCAB);
    return small_model(device, c, &lim, 5, flat);
}

/* Hidden states and logits of the last pass of one row. */
struct last {
    int passes, n;
    float hidden[LONGEST * DIM], logits[LONGEST * VOCAB];
};

static int keep_last(void *ctx, const struct model_pass *p)
{
    struct last *l = ctx;
    if (p->pass == l->passes) {
        memcpy(l->hidden, p->hidden, (size_t)(l->n * DIM) * sizeof(float));
        memcpy(l->logits, p->logits, (size_t)(l->n * VOCAB) * sizeof(float));
    }
    return 0;
}

/* The whole sequence at once: pass k fuses [from[k], n) of the positions behind the first. */
static void whole(struct model *m, int n, int passes, const int *from, struct last *out)
{
    uint8_t starts[LONGEST] = {1};
    uint8_t *masks = mem_array((size_t)passes * (size_t)n, 1);
    for (int k = 1; k < passes; k++)
        for (int t = 1; t < n; t++)
            masks[(k - 1) * n + t] = t >= from[k];
    struct model_batch b = {.batch = 1,
        .seq = n,
        .tokens = sequence,
        .doc_starts = starts,
        .passes = passes,
        .masks = masks};
    out->passes = passes;
    out->n = n;
    assert_int_equal(
        model_forward(m, &b, MODEL_WANT_HIDDEN | MODEL_WANT_LOGITS, keep_last, out), 0);
    free(masks);
}

static void expect_near(const char *what, int pos, const float *a, const float *b, size_t n)
{
    double error = relative_error_f(a, b, n);
    if (!(error < TOLERANCE))
        fail_msg("%s: position %d differs by %g", what, pos, error);
}

/* One generated row; returns its logits. */
static void step(struct decoder *dec, int slot, int pos, int fused, float *logits)
{
    struct decode_row r = {slot, pos, 0, sequence[pos], fused};
    struct err e;
    if (decoder_run(dec, &r, 1, NULL, logits, &e) < 0)
        fail_msg("%s", e.msg);
}

static void prefill(struct decoder *dec, int slot, int n, int passes, float *logits)
{
    struct err e;
    if (decoder_prefill(dec, slot, sequence, n, passes, logits, &e) < 0)
        fail_msg("%s", e.msg);
}

/* A regime over a prompt and generated tokens. */
static const struct regime_case {
    const char *name;
    int prompt_passes; /* decoder_prefill's */
    int fused;         /* generation */
    int max_rows;      /* prompts come in several calls */
} regimes[] = {
    {"standard", 1, 0, 64},
    {"standard, split", 1, 0, 3},
    {"soft", 1, 1, 64},
    {"fused, 2 passes", 2, 1, 64},
    {"fused, 2 passes, split", 2, 1, 4},
    {"fused, 3 passes", 3, 1, 64},
    {"fused, 3 passes, split", 3, 1, 5},
    {"fused, 3 passes, one row a call", 3, 1, 1},
    {"sequential", 0, 1, 64},
};

/* The passes over the whole sequence that a regime's states are the end of. */
static void whole_regime(
    struct model *m, const struct regime_case *k, int prompt, int n, struct last *out)
{
    int plain_prompt = k->prompt_passes == 1, passes = k->prompt_passes, from[LONGEST + 1];
    if (plain_prompt)
        passes =
            1 + (k->fused ? n - prompt : 0); /* a generated token is final a pass after its left */
    else if (passes == 0)
        passes = n; /* sequential: the fixed point */
    for (int p = 0; p < passes; p++)
        from[p] = plain_prompt ? prompt : 1;
    whole(m, n, passes, from, out);
}

static void run_regime(const struct model_config *c, const struct regime_case *k)
{
    enum { PROMPT = 11, ALL = 17 };
    struct decoder *dec;
    struct err e;
    float *flat, logits[VOCAB], h[DIM];
    struct model *m = model_of(c, 1, &flat);
    struct last *right = mem_array(1, sizeof *right);
    assert_int_equal(decoder_new(m, 2, ALL, k->max_rows, &dec, &e), 0);
    prefill(dec, 1, PROMPT, k->prompt_passes, logits);

    /* The prompt: its states and last logits are those of its passes over the prompt alone. */
    whole_regime(m, k, PROMPT, PROMPT, right);
    expect_near(k->name, PROMPT - 1, logits, right->logits + (PROMPT - 1) * VOCAB, VOCAB);
    for (int t = 0; t < PROMPT; t++) {
        decoder_hidden(dec, 1, t, h);
        expect_near(k->name, t, h, right->hidden + t * DIM, DIM);
    }
    /* Generation: exact passes over the whole are known where the prompt is plain or a fixed point.
     */
    if (k->prompt_passes <= 1)
        whole_regime(m, k, PROMPT, ALL, right);
    for (int t = PROMPT; t < ALL && k->prompt_passes <= 1; t++) {
        step(dec, 1, t, k->fused, logits);
        expect_near(k->name, t, logits, right->logits + t * VOCAB, VOCAB);
        decoder_hidden(dec, 1, t, h);
        expect_near(k->name, t, h, right->hidden + t * DIM, DIM);
    }
    decoder_free(&dec);
    model_free(&m);
    free(flat);
    free(right);
}

static void test_regimes(void **state)
{
    (void)state;
    for (int norms = 0; norms < 8; norms += norms == 1 ? 5 : 1) /* 0, 1, 6, 7 */
        for (size_t i = 0; i < sizeof regimes / sizeof *regimes; i++) {
            struct model_config c = small_config();
            c.in_norm = norms & 1;
            c.gate_norm = norms >> 1 & 1;
            c.out_norm = norms >> 2 & 1;
            c.doc_mask = i & 1;
            run_regime(&c, &regimes[i]);
            c.qk_norm = norms > 1;
            c.attn_gate = norms != 6;
            c.window = 4;
            c.full_every = norms & 2;
            run_regime(&c, &regimes[i]);
        }
}

/*
 * FUSED with generation, recomputed over the whole sequence in one fused pass whose carried states
 * are forced, through the given noise, to those that each position has to read: in the prompt the
 * states of the pass before the last, behind it the newest ones.
 */
static void recompute_fused(
    struct model *m, struct decoder *dec, int prompt, int n, int passes, struct last *out)
{
    static const int from[] = {1, 1, 1};
    uint8_t starts[LONGEST] = {1}, masks[LONGEST] = {0};
    float noise[LONGEST * DIM];
    struct last *plain = mem_array(1, sizeof *plain), *before = mem_array(1, sizeof *before);
    whole(m, n, 1, from, plain);
    whole(m, prompt, passes - 1, from, before);
    for (int t = 0; t < n; t++) {
        float *row = noise + t * DIM;
        masks[t] = t > 0;
        if (t < prompt - 1)
            memcpy(row, before->hidden + t * DIM, DIM * sizeof *row);
        else
            decoder_hidden(dec, 0, t, row);
        for (int i = 0; i < DIM; i++)
            row[i] -= plain->hidden[t * DIM + i];
    }
    struct model_batch b = {.batch = 1,
        .seq = n,
        .tokens = sequence,
        .doc_starts = starts,
        .passes = 2,
        .masks = masks,
        .noise = noise};
    out->passes = 2;
    out->n = n;
    assert_int_equal(
        model_forward(m, &b, MODEL_WANT_HIDDEN | MODEL_WANT_LOGITS, keep_last, out), 0);
    free(plain);
    free(before);
}

static void test_fused_generation(void **state)
{
    (void)state;
    enum { PROMPT = 11, ALL = 17 };
    for (int passes = 2; passes <= 3; passes++)
        for (int max_rows = 1; max_rows <= 16; max_rows += 5) {
            struct model_config c = small_config();
            struct decoder *dec;
            struct err e;
            float *flat, logits[VOCAB], h[DIM];
            struct model *m = model_of(&c, 1, &flat);
            struct last *right = mem_array(1, sizeof *right);
            assert_int_equal(decoder_new(m, 1, ALL, max_rows, &dec, &e), 0);
            prefill(dec, 0, PROMPT, passes, NULL);
            for (int t = PROMPT; t < ALL; t++)
                step(dec, 0, t, 1, logits);
            recompute_fused(m, dec, PROMPT, ALL, passes, right);
            for (int t = 0; t < ALL; t++) {
                decoder_hidden(dec, 0, t, h);
                expect_near("fused generation", t, h, right->hidden + t * DIM, DIM);
            }
            expect_near("fused logits", ALL - 1, logits, right->logits + (ALL - 1) * VOCAB, VOCAB);
            decoder_free(&dec);
            model_free(&m);
            free(flat);
            free(right);
        }
}

/* T passes over T fused positions are the sequential recurrence; T − 2 passes are not yet. */
static void test_fixed_point(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct decoder *dec;
    struct err e;
    float *flat, h[LONGEST * DIM];
    int from[LONGEST];
    struct model *m = model_of(&c, 1, &flat);
    struct last *right = mem_array(1, sizeof *right);
    assert_int_equal(decoder_new(m, 1, LONGEST, 1, &dec, &e), 0);
    prefill(dec, 0, LONGEST, 0, NULL);
    for (int t = 0; t < LONGEST; t++) {
        from[t] = 1;
        decoder_hidden(dec, 0, t, h + t * DIM);
    }
    whole(m, LONGEST, LONGEST, from, right);
    expect_near("fixed point", 0, h, right->hidden, LONGEST * DIM);
    whole(m, LONGEST, 2, from, right);
    assert_true(relative_error_f(h, right->hidden, 3 * DIM) > 1e-3);
    decoder_free(&dec);
    model_free(&m);
    free(flat);
    free(right);
}

/* Prompts of different lengths together, in mixed slots, and each alone. */
static void test_batch_is_one_by_one(void **state)
{
    (void)state;
    enum { PROMPTS = 3, GENERATE = 5 };
    static const int lengths[PROMPTS] = {4, 9, 1};
    static const int slots[PROMPTS] = {2, 0, 3};
    for (int soft = 0; soft < 2; soft++) {
        struct model_config c = small_config();
        struct decoder *many, *single;
        struct err e;
        float *flat, together[PROMPTS * VOCAB], alone[VOCAB];
        struct model *m = model_of(&c, 1, &flat);
        assert_int_equal(decoder_new(m, 4, LONGEST, 32, &many, &e), 0);
        assert_int_equal(decoder_new(m, 1, LONGEST, 32, &single, &e), 0);
        struct decode_row rows[32];
        uint8_t pick[32] = {0};
        int n = 0;
        for (int i = 0; i < PROMPTS; i++)
            for (int t = 0; t < lengths[i]; t++) {
                pick[n] = t == lengths[i] - 1;
                rows[n++] = (struct decode_row){slots[i], t, 0, sequence[t + i], 0};
            }
        assert_int_equal(decoder_run(many, rows, n, pick, together, &e), 0);
        for (int i = 0; i < PROMPTS; i++) {
            assert_int_equal(decoder_prefill(single, 0, sequence + i, lengths[i], 1, alone, &e), 0);
            expect_near("prompt", i, together + i * VOCAB, alone, VOCAB);
        }
        for (int g = 0; g < GENERATE; g++) {
            for (int i = 0; i < PROMPTS; i++)
                rows[i] = (struct decode_row){
                    slots[i], lengths[i] + g, 0, sequence[lengths[i] + g + i], soft};
            assert_int_equal(decoder_run(many, rows, PROMPTS, NULL, together, &e), 0);
        }
        for (int i = 0; i < PROMPTS; i++) {
            assert_int_equal(decoder_prefill(single, 0, sequence + i, lengths[i], 1, alone, &e), 0);
            for (int g = 0; g < GENERATE; g++) {
                struct decode_row r = {0, lengths[i] + g, 0, sequence[lengths[i] + g + i], soft};
                assert_int_equal(decoder_run(single, &r, 1, NULL, alone, &e), 0);
            }
            expect_near("generated", i, together + i * VOCAB, alone, VOCAB);
        }
        decoder_free(&many);
        decoder_free(&single);
        model_free(&m);
        free(flat);
    }
}

/* Two documents in one slot: the second sees and continues nothing of the first. */
static void test_documents(void **state)
{
    (void)state;
    enum { FIRST = 6, ALL = 12 };
    struct model_config c = small_config();
    struct decoder *dec;
    struct err e;
    float *flat, both[VOCAB], alone[VOCAB];
    c.window = 3;
    c.qk_norm = 1;
    struct model *m = model_of(&c, 1, &flat);
    assert_int_equal(decoder_new(m, 2, ALL, ALL, &dec, &e), 0);
    for (int t = 0; t < ALL; t++) {
        int first = t < FIRST ? 0 : FIRST;
        struct decode_row r = {0, t, first, sequence[t], t != first};
        assert_int_equal(decoder_run(dec, &r, 1, NULL, both, &e), 0);
    }
    for (int t = FIRST; t < ALL; t++) {
        struct decode_row r = {1, t - FIRST, 0, sequence[t], t != FIRST};
        assert_int_equal(decoder_run(dec, &r, 1, NULL, alone, &e), 0);
    }
    expect_near("second document", ALL - 1, both, alone, VOCAB);
    decoder_free(&dec);
    model_free(&m);
    free(flat);
}

static void test_refuses(void **state)
{
    (void)state;
    enum { CAPACITY = 5 };
    static const struct {
        struct decode_row rows[2];
        int n, code;
        const char *says;
    } cases[] = {
        {{{0, CAPACITY, 0, 1, 0}}, 1, ERR_INPUT, "capacity of 5"},
        {{{0, -1, 0, 1, 0}}, 1, ERR_INPUT, "capacity"},
        {{{2, 0, 0, 1, 0}}, 1, ERR_INPUT, "slot 2"},
        {{{-1, 0, 0, 1, 0}}, 1, ERR_INPUT, "slot -1"},
        {{{0, 0, 0, VOCAB, 0}}, 1, ERR_INPUT, "token 13"},
        {{{0, 0, 0, -1, 0}}, 1, ERR_INPUT, "token -1"},
        {{{0, 0, 1, 1, 0}}, 1, ERR_INPUT, "first visible"},
        {{{0, 0, 0, 1, 1}}, 1, ERR_INPUT, "begins its document"},
        {{{0, 0, 0, 1, 2}}, 1, ERR_INPUT, "right is 0 or 1"},
        {{{0, 1, 0, 1, 0}}, 1, ERR_INPUT, "only 0 were run"},
        {{{0, 0, 0, 1, 0}, {0, 2, 0, 1, 0}}, 2, ERR_INPUT, "right is 1"},
        {{{0, 0, 0, 1, 0}, {0, 0, 0, 1, 0}}, 2, ERR_INPUT, "right is 1"},
        {{{0, 0, 0, 1, 0}}, 0, ERR_INPUT, "0 rows"},
        {{{0, 0, 0, 1, 0}}, 3, ERR_INPUT, "3 rows"},
    };
    struct model_config c = small_config();
    struct decoder *dec;
    struct err e;
    float *flat, logits[VOCAB];
    struct model *m = model_of(&c, 1, &flat);
    assert_true(decoder_new(m, 0, 5, 2, &dec, &e) < 0);
    assert_true(decoder_new(m, 1 << 16, 1 << 16, 2, &dec, &e) < 0);
    assert_int_equal(decoder_new(m, 2, CAPACITY, 2, &dec, &e), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(&e, 0, sizeof e);
        int rc = decoder_run(dec, cases[i].rows, cases[i].n, NULL, NULL, &e);
        if (rc != cases[i].code || !strstr(e.msg, cases[i].says))
            fail_msg("case %zu: %d \"%s\", not \"%s\"", i, rc, e.msg, cases[i].says);
    }
    assert_int_equal(decoder_prefill(dec, 0, sequence, 6, 1, logits, &e), ERR_INPUT);
    assert_int_equal(decoder_prefill(dec, 0, sequence, 0, 1, logits, &e), ERR_INPUT);
    assert_int_equal(decoder_prefill(dec, 0, sequence, 3, -1, logits, &e), ERR_INPUT);
    assert_int_equal(decoder_prefill(dec, 2, sequence, 3, 1, logits, &e), ERR_INPUT);
    /* A refused call leaves the decoder as it was. */
    prefill(dec, 0, CAPACITY, 2, logits);
    decoder_free(&dec);
    model_free(&m);
    free(flat);

    c.feedback = 0;
    m = model_of(&c, 1, &flat);
    assert_int_equal(decoder_new(m, 1, CAPACITY, 2, &dec, &e), 0);
    prefill(dec, 0, 2, 1, logits);
    struct decode_row soft = {0, 2, 0, 1, 1};
    assert_int_equal(decoder_run(dec, &soft, 1, NULL, NULL, &e), ERR_UNSUPPORTED);
    assert_int_equal(decoder_prefill(dec, 0, sequence, 1, 2, NULL, &e), ERR_UNSUPPORTED);
    assert_int_equal(decoder_prefill(dec, 0, sequence, 1, 0, NULL, &e), ERR_UNSUPPORTED);
    step(dec, 0, 2, 0, logits);
    decoder_free(&dec);
    model_free(&m);
    free(flat);
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
        cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_regimes),
        cmocka_unit_test(test_fused_generation),
        cmocka_unit_test(test_fixed_point),
        cmocka_unit_test(test_batch_is_one_by_one),
        cmocka_unit_test(test_documents),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
