/*
 * The evaluator's arithmetic against computations made another way: a regime's teacher-forced loss
 * (decoder, token by token) against parallel passes to the fixed point; relative changes against
 * hidden states compared directly; batched generation against one prompt at a time.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/rng.h"
#include "evaluator/generate.h"
#include "evaluator/regime_loss.h"
#include "evaluator/sampler.h"
#include "evaluator/suites.h"

enum { SEQ = 24, ROWS = 11 };

/* A tokenizer of the 256 bytes and <|endoftext|>: ids are the byte values in GPT-2's alphabet
 * order. */
static void byte_tokenizer(struct tokenizer **out)
{
    struct buf b = BUF_INIT;
    struct err e = {0};
    int id = 0, extra = 256;
    buf_add_str(&b,
        "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,"
        "\"added_tokens\":[{\"id\":256,\"content\":\"<|endoftext|>\",\"single_word\":false,"
        "\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}],"
        "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"trim_offsets\":true,\"use_regex\":true},\"post_processor\":null,"
        "\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,"
        "\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
        "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,"
        "\"byte_fallback\":false,\"vocab\":{");
    for (int c = 0; c < 256; c++) {
        int printable = (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || c >= 174;
        buf_printf(&b, "%s\"\\u%04x\":%d", id ? "," : "", printable ? c : extra++, id);
        id++;
    }
    buf_add_str(&b, ",\"<|endoftext|>\":256},\"merges\":[]}}");
    if (tokenizer_parse(b.data, b.len, out, &e) < 0)
        fail_msg("%s", e.msg);
    buf_release(&b);
}

static struct model_config tiny_config(int norms, int doc_mask)
{
    return (struct model_config){.vocab = 257,
        .dim = 16,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 4,
        .ffn = 24,
        .norm_eps = 1e-5f,
        .rope_theta = 10000,
        .residual_scale = 0.5f,
        .feedback = 1,
        .in_norm = norms,
        .gate_norm = norms,
        .out_norm = norms,
        .doc_mask = doc_mask};
}

static void snapshot_make(struct snapshot *s, int doc_mask)
{
    struct err e = {0};
    struct model_limits lim = suite_limits(SEQ);
    memset(s, 0, sizeof *s);
    s->dir = strdup("test");
    s->config = tiny_config(1, doc_mask);
    byte_tokenizer(&s->tokenizer);
    assert_int_equal(device_cpu_new(2, &s->device, &e), 0);
    if (model_new(s->device, &s->config, &lim, &s->model, &e) < 0)
        fail_msg("%s", e.msg);
    const struct weight_table *t = model_weights(s->model);
    float *host = calloc((size_t)t->total, sizeof *host);
    weights_init(t, 7, host);
    for (int64_t i = 0; i < t->items[weight_embed()].count; i++)
        host[t->items[weight_embed()].offset + i] *= 20; /* logits worth ranking */
    s->device->ops->upload(s->device, model_params(s->model), host, (size_t)t->total * 4);
    free(host);
}

static void rows_make(struct rows *r, int with_documents)
{
    struct err e = {0};
    assert_int_equal(rows_new(ROWS, SEQ, r, &e), 0);
    for (int i = 0; i < ROWS * SEQ; i++) {
        r->tokens[i] = (int32_t)(rng_u64(3, (uint64_t)i) % 257);
        r->targets[i] = (int32_t)(rng_u64(3, (uint64_t)i + 1) % 257);
        r->doc_starts[i] = i % SEQ == 0 || (with_documents && rng_u64(5, (uint64_t)i) % 7 == 0);
    }
}

/* Losses of the last of `passes` parallel passes; fused where fused_from ≤ t and no document
 * starts. */
struct last_losses {
    int passes;
    double sum;
    int from;
    int batch;
};

static int keep_last(void *ctx, const struct model_pass *p)
{
    struct last_losses *l = ctx;
    if (p->pass == l->passes)
        for (int i = 0; i < l->batch * SEQ; i++)
            if (i % SEQ >= l->from)
                l->sum += (double)p->losses[i];
    return 0;
}

static double parallel_loss(struct snapshot *s, const struct rows *r, int passes, int fused_from)
{
    double sum = 0;
    uint8_t *masks = calloc((size_t)passes * SEQ, 1);
    for (int row = 0; row < ROWS; row++) {
        size_t at = (size_t)row * SEQ;
        for (int i = 0; i < (passes - 1) * SEQ; i++) {
            int t = i % SEQ;
            int start = t == 0 || (s->config.doc_mask && r->doc_starts[at + (size_t)t]);
            masks[i] = t >= fused_from && !start;
        }
        struct model_batch b = {.batch = 1,
            .seq = SEQ,
            .tokens = r->tokens + at,
            .targets = r->targets + at,
            .doc_starts = r->doc_starts + at,
            .passes = passes,
            .masks = passes > 1 ? masks : NULL};
        struct last_losses l = {.passes = passes, .from = SEQ / 2, .batch = 1};
        model_forward(s->model, &b, MODEL_WANT_LOSSES, keep_last, &l);
        sum += l.sum;
    }
    free(masks);
    return sum;
}

static double regime_nats(struct snapshot *s, const struct rows *r, int regime, int fused_passes)
{
    struct err e = {0};
    double row_nats[ROWS] = {0}, mean = 0;
    struct regime_loss l = {.row_nats = row_nats};
    struct suite_job job = {.snapshot = s,
        .rows = r,
        .suite = SUITE_LOSS,
        .regime = regime,
        .fused_passes = fused_passes};
    if (regime_loss_run(&job, &l, &e) < 0)
        fail_msg("%s", e.msg);
    assert_int_equal(l.tokens, ROWS * (SEQ - SEQ / 2));
    for (int i = 0; i < ROWS; i++)
        mean += row_nats[i] / ROWS;
    assert_true(fabs(mean - l.nats / (double)l.tokens) < 1e-9);
    return l.nats;
}

static void regimes_equal_parallel_fixed_points(void **state)
{
    (void)state;
    for (int documents = 0; documents < 2; documents++) {
        struct snapshot s;
        struct rows r;
        snapshot_make(&s, documents);
        rows_make(&r, documents);
        double standard = parallel_loss(&s, &r, 1, 0);
        double soft = parallel_loss(&s, &r, SEQ + 1, SEQ / 2);
        double fused = parallel_loss(&s, &r, SEQ + 1, 0);
        assert_true(fabs(soft - standard) > 1e-3 && fabs(fused - soft) > 1e-3);
        assert_true(fabs(regime_nats(&s, &r, REGIME_STANDARD, 2) / standard - 1) < 1e-5);
        assert_true(fabs(regime_nats(&s, &r, REGIME_SOFT, 2) / soft - 1) < 1e-5);
        assert_true(fabs(regime_nats(&s, &r, REGIME_FUSED, 0) / fused - 1) < 1e-5);
        /* As many passes as the prompt has tokens are its fixed point too; two are not. */
        assert_true(fabs(regime_nats(&s, &r, REGIME_FUSED, SEQ / 2 + 1) / fused - 1) < 1e-5);
        assert_true(fabs(regime_nats(&s, &r, REGIME_FUSED, 2) / fused - 1) > 1e-5);
        rows_release(&r);
        snapshot_release(&s);
    }
}

static double number(const json_t *j, const char *key)
{
    return json_number_value(json_object_get(j, key));
}

static void loss_suite_reports_passes(void **state)
{
    (void)state;
    struct snapshot s;
    struct rows r;
    struct err e = {0};
    json_t *j = NULL;
    snapshot_make(&s, 1);
    rows_make(&r, 1);
    struct suite_job job = {
        .snapshot = &s, .rows = &r, .suite = SUITE_LOSS, .regime = REGIME_STANDARD, .passes = 3};
    if (suite_run(&job, &j, &e) < 0)
        fail_msg("%s", e.msg);
    double nats = number(j, "nats_per_token");
    assert_true(fabs(nats * ROWS * (SEQ / 2) / parallel_loss(&s, &r, 1, 0) - 1) < 1e-5);
    const json_t *passes = json_object_get(j, "passes");
    assert_int_equal(json_array_size(passes), 3);
    /* bits per byte: a byte tokenizer has one byte a token, none for <|endoftext|> */
    int bytes = 0;
    for (int i = 0; i < ROWS * SEQ; i++)
        bytes += r.targets[i] < 256;
    const json_t *third = json_array_get(passes, 2);
    double bpb = number(third, "nats_per_token") * ROWS * SEQ / bytes / log(2);
    assert_true(fabs(number(third, "bits_per_byte") - bpb) < 1e-9);
    assert_true(
        number(third, "nats_per_token") != number(json_array_get(passes, 0), "nats_per_token"));
    json_decref(j);
    rows_release(&r);
    snapshot_release(&s);
}

/* Hidden states of every pass of one row. */
struct all_hidden {
    float *h; /* (passes, SEQ, dim) */
    int dim;
};

static int keep_hidden(void *ctx, const struct model_pass *p)
{
    struct all_hidden *a = ctx;
    size_t n = (size_t)SEQ * (size_t)a->dim;
    memcpy(a->h + (size_t)(p->pass - 1) * n, p->hidden, n * sizeof *a->h);
    return 0;
}

/* The relative change of pass `pass` by hand. */
static double change_by_hand(struct snapshot *s, const struct rows *r, int pass, int passes)
{
    double diff = 0, was = 0;
    int dim = s->config.dim;
    struct all_hidden a = {malloc((size_t)passes * SEQ * (size_t)dim * sizeof(float)), dim};
    uint8_t *masks = malloc((size_t)passes * SEQ);
    for (int row = 0; row < ROWS; row++) {
        const uint8_t *starts = r->doc_starts + (size_t)row * SEQ;
        for (int i = 0; i < (passes - 1) * SEQ; i++)
            masks[i] = !starts[i % SEQ];
        struct model_batch b = {.batch = 1,
            .seq = SEQ,
            .tokens = r->tokens + (size_t)row * SEQ,
            .targets = r->targets + (size_t)row * SEQ,
            .doc_starts = starts,
            .passes = passes,
            .masks = masks};
        model_forward(s->model, &b, MODEL_WANT_HIDDEN, keep_hidden, &a);
        for (int t = 0, age = 0; t < SEQ; t++) {
            age = starts[t] ? 0 : age + 1;
            for (int d = 0; d < dim && age >= pass - 1; d++) {
                double now =
                    (double)a.h[(((size_t)pass - 1) * SEQ + (size_t)t) * (size_t)dim + (size_t)d];
                double old =
                    (double)a.h[(((size_t)pass - 2) * SEQ + (size_t)t) * (size_t)dim + (size_t)d];
                diff += (now - old) * (now - old);
                was += old * old;
            }
        }
    }
    free(a.h);
    free(masks);
    return sqrt(diff / was);
}

static void fixed_point_measures_open_positions(void **state)
{
    (void)state;
    enum { PASSES = 20 };
    struct snapshot s;
    struct rows r;
    struct err e = {0};
    json_t *j = NULL;
    snapshot_make(&s, 1);
    rows_make(&r, 1);
    struct suite_job job = {
        .snapshot = &s, .rows = &r, .suite = SUITE_FIXED_POINT, .fixed_point_passes = PASSES};
    if (suite_run(&job, &j, &e) < 0)
        fail_msg("%s", e.msg);
    const json_t *passes = json_object_get(j, "passes");
    assert_int_equal(json_array_size(passes), PASSES);
    assert_true(json_is_null(json_object_get(json_array_get(passes, 0), "relative_change")));
    for (int k = 2; k <= 6; k++) {
        double got = number(json_array_get(passes, (size_t)k - 1), "relative_change");
        assert_true(fabs(got / change_by_hand(&s, &r, k, 6) - 1) < 1e-6);
    }
    json_decref(j);
    job.fixed_point_passes = SEQ;
    assert_int_equal(suite_run(&job, &j, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "rows longer"));
    rows_release(&r);
    snapshot_release(&s);
}

static void refusals(void **state)
{
    (void)state;
    struct snapshot s;
    struct rows r;
    struct err e = {0};
    json_t *j = NULL;
    atomic_int stop = 1;
    snapshot_make(&s, 1);
    rows_make(&r, 1);
    struct suite_job job = {.snapshot = &s,
        .rows = &r,
        .suite = SUITE_LOSS,
        .regime = REGIME_STANDARD,
        .passes = 2,
        .stop = &stop};
    assert_int_equal(suite_run(&job, &j, &e), ERR_STOPPED);
    job.stop = NULL;
    s.config.feedback = 0;
    job.regime = REGIME_SOFT;
    assert_int_equal(suite_run(&job, &j, &e), ERR_UNSUPPORTED);
    job.suite = SUITE_FIXED_POINT;
    job.fixed_point_passes = 4;
    assert_int_equal(suite_run(&job, &j, &e), ERR_UNSUPPORTED);
    rows_release(&r);
    snapshot_release(&s);
}

/* -- generation ----------------------------------------------------------------------------------
 */

enum { PROMPTS = 37, NEW = 12 };

static int32_t prompts[PROMPTS][16];
static int prompt_len(int i)
{
    return 1 + i % 15;
}

static void prompts_make(struct generation *g)
{
    memset(g, 0, PROMPTS * sizeof *g);
    for (int i = 0; i < PROMPTS; i++) {
        for (int t = 0; t < 16; t++)
            prompts[i][t] = t ? (int32_t)(rng_u64(11, (uint64_t)(i * 16 + t)) % 256) : 256;
        g[i].prompt = prompts[i];
        g[i].prompt_len = prompt_len(i);
    }
}

static void batch_equals_one_by_one(void **state)
{
    (void)state;
    static const struct {
        int regime, fused_passes;
        float temperature;
    } cases[] = {{REGIME_STANDARD, 2, 0}, {REGIME_SOFT, 2, 0}, {REGIME_FUSED, 2, 0},
        {REGIME_FUSED, 3, 0}, {REGIME_FUSED, 0, 0}};
    struct snapshot s;
    struct err e = {0};
    struct generate_times times;
    snapshot_make(&s, 1);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct generation all[PROMPTS], one[PROMPTS];
        struct generate_options o = {.regime = cases[c].regime,
            .fused_passes = cases[c].fused_passes,
            .max_new = NEW,
            .sampler = {.top_p = 1}};
        prompts_make(all);
        prompts_make(one);
        if (generate(&s, all, PROMPTS, &o, &times, &e) < 0)
            fail_msg("%s", e.msg);
        int made = 0;
        for (int i = 0; i < PROMPTS; i++) {
            assert_int_equal(generate(&s, &one[i], 1, &o, &times, &e), 0);
            assert_int_equal(all[i].len, one[i].len);
            assert_memory_equal(
                all[i].tokens, one[i].tokens, (size_t)all[i].len * sizeof *all[i].tokens);
            made += all[i].len;
            generation_release(&all[i]);
            generation_release(&one[i]);
        }
        assert_true(made > PROMPTS);
    }
    snapshot_release(&s);
}

struct argmax_at {
    int at, best;
    float value;
    double logprob;
};

static int keep_argmax(void *ctx, const struct model_pass *p)
{
    struct argmax_at *a = ctx;
    const float *x = p->logits + (size_t)a->at * 257;
    double sum = 0;
    a->best = 0;
    for (int v = 1; v < 257; v++)
        if (x[v] > x[a->best])
            a->best = v;
    for (int v = 0; v < 257; v++)
        sum += exp((double)x[v] - (double)x[a->best]);
    a->logprob = -log(sum);
    return 0;
}

/* Text from NaN would look like text. */
static void weights_that_are_not_numbers(void **state)
{
    (void)state;
    struct snapshot s;
    struct generate_times times;
    struct generation g[PROMPTS];
    snapshot_make(&s, 1);
    prompts_make(g);
    model_params(s.model)[5] = NAN;
    for (int hot = 0; hot < 2; hot++) {
        struct err e = {0};
        struct generate_options o = {
            .max_new = 4, .sampler = {.top_p = 1, .temperature = (float)hot}};
        assert_int_equal(generate(&s, &g[0], 1, &o, &times, &e), ERR_CORRUPT);
        assert_non_null(strstr(e.msg, "not a number"));
        generation_release(&g[0]);
    }
    snapshot_release(&s);
}

/* Greedy SOFT by recomputing everything, with as many passes as the fixed point needs. */
static void cached_equals_recomputed(void **state)
{
    (void)state;
    struct snapshot s;
    struct err e = {0};
    struct generate_times times;
    struct generation g[PROMPTS];
    snapshot_make(&s, 1);
    prompts_make(g);
    struct generate_options o = {.regime = REGIME_SOFT, .max_new = 8, .sampler = {.top_p = 1}};
    for (int i = 6; i < 12; i++) {
        int n = g[i].prompt_len;
        assert_int_equal(generate(&s, &g[i], 1, &o, &times, &e), 0);
        assert_true(g[i].len > 0);
        int32_t text[SEQ] = {0};
        uint8_t starts[SEQ] = {1}, masks[SEQ * SEQ];
        memcpy(text, g[i].prompt, (size_t)n * sizeof *text);
        for (int k = 0; k < g[i].len && n + k < SEQ; k++) {
            int len = n + k, passes = k + 1;
            for (int m = 0; m < (passes - 1) * len; m++)
                masks[m] = m % len >= n;
            struct model_batch b = {.batch = 1,
                .seq = len,
                .tokens = text,
                .targets = text,
                .doc_starts = starts,
                .passes = passes,
                .masks = passes > 1 ? masks : NULL};
            struct argmax_at a = {.at = len - 1};
            model_forward(s.model, &b, MODEL_WANT_LOGITS, keep_argmax, &a);
            assert_int_equal(a.best, g[i].tokens[k]);
            assert_true(fabs(a.logprob - g[i].logprobs[k]) < 1e-4);
            text[n + k] = g[i].tokens[k];
        }
        generation_release(&g[i]);
    }
    snapshot_release(&s);
}

/* What makes the above hold at every size: the forward product's rows do not depend on their
 * number. */
static void few_rows_have_the_same_bits(void **state)
{
    (void)state;
    enum { M = DEVICE_DECODE_ROWS, N = 83, K = 259 };
    struct device *d;
    struct err e = {0};
    assert_int_equal(device_cpu_new(2, &d, &e), 0);
    float *x = d->ops->alloc(d, sizeof(float[M][K])), *w = d->ops->alloc(d, sizeof(float[N][K]));
    float *all = d->ops->alloc(d, sizeof(float[M][N])),
          *some = d->ops->alloc(d, sizeof(float[M][N]));
    for (int i = 0; i < M * K; i++)
        x[i] = rng_unitf(1, (uint64_t)i) - 0.5f;
    for (int i = 0; i < N * K; i++)
        w[i] = rng_unitf(2, (uint64_t)i) - 0.5f;
    d->ops->matmul(d, 0, 1, M, N, K, 0.7f, x, K, w, K, 0, all, N);
    for (int m = 1; m <= M; m++)
        for (int at = 0; at + m <= M; at++) {
            d->ops->matmul(d, 0, 1, m, N, K, 0.7f, x + at * K, K, w, K, 0, some, N);
            assert_memory_equal(some, all + at * N, (size_t)m * N * sizeof *some);
        }
    d->ops->free(d, x);
    d->ops->free(d, w);
    d->ops->free(d, all);
    d->ops->free(d, some);
    device_free(&d);
}

/* -- sampler --------------------------------------------------------------------------------------
 */

static void sampler_follows_its_distribution(void **state)
{
    (void)state;
    enum { V = 6, DRAWS = 200000 };
    static const float logits[V] = {1.0f, 2.0f, 0.5f, 2.0f, -1.0f, 0.0f};
    static const struct {
        struct sampler s;
        int support; /* how many of the likeliest may come */
    } cases[] = {{{.temperature = 1, .top_p = 1}, 6}, {{.temperature = 0.5f, .top_p = 1}, 6},
        {{.temperature = 1, .top_k = 3, .top_p = 1}, 3}, {{.temperature = 1, .top_p = 0.6f}, 2},
        {{.temperature = 2, .top_k = 4, .top_p = 0.9f}, 4}};
    static const int order[V] = {1, 3, 0, 2, 5, 4};
    int32_t work[V];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        double p[V] = {0}, total = 0, seen[V] = {0};
        for (int i = 0; i < cases[c].support; i++)
            total += p[order[i]] = exp((double)logits[order[i]] / (double)cases[c].s.temperature);
        for (int i = 0; i < DRAWS; i++)
            seen[sampler_choose(&cases[c].s, logits, V, 3, (uint64_t)i, work, NULL)] += 1;
        for (int v = 0; v < V; v++) {
            double want = p[v] / total, got = seen[v] / DRAWS;
            assert_true(want > 0 || seen[v] == 0);
            assert_true(fabs(want - got) < 5 * sqrt(want * (1 - want) / DRAWS) + 1e-12);
        }
    }
    struct sampler greedy = {.top_p = 1};
    double lp, sum = 0;
    for (int v = 0; v < V; v++)
        sum += exp((double)logits[v]);
    assert_int_equal(sampler_choose(&greedy, logits, V, 0, 0, work, &lp), 1);
    assert_true(fabs(lp - log(exp(2.0) / sum)) < 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(regimes_equal_parallel_fixed_points),
        cmocka_unit_test(loss_suite_reports_passes),
        cmocka_unit_test(fixed_point_measures_open_positions),
        cmocka_unit_test(refusals),
        cmocka_unit_test(batch_equals_one_by_one),
        cmocka_unit_test(few_rows_have_the_same_bits),
        cmocka_unit_test(cached_equals_recomputed),
        cmocka_unit_test(weights_that_are_not_numbers),
        cmocka_unit_test(sampler_follows_its_distribution),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
