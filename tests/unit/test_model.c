/* The model against its float64 twin, gradients against the twin's finite differences. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/model_case.h"
#include "tests/unit/model_twin.h"

#define LAMBDA 0.7f
#define SCALE  0.05f

static struct device *device;

/* --- against the twin ------------------------------------------------------------------------- */

static const struct twin_case {
    const char *name;
    int passes, fused;
    float jitter;
    int in_norm, gate_norm, out_norm, doc_mask, feedback;
    int qk_norm, attn_gate, window, full_every;
} twin_cases[] = {
    {"one pass", 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0},
    {"one pass, no feedback, normed input", 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {"two passes, no norms, whole rows", 2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0},
    {"two passes, gate norm", 2, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0},
    {"two passes, input norm", 2, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0},
    {"three passes, all norms, jitter", 3, 0, 0.3f, 1, 1, 1, 1, 1, 0, 0, 0, 0},
    {"three passes, fused, output norm, jitter", 3, 1, 0.3f, 0, 0, 1, 1, 1, 0, 0, 0, 0},
    {"three passes, fused whole rows, all norms", 3, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0},
    {"one pass, QK-norm", 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0},
    {"one pass, gate of attention", 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0},
    {"one pass, windows, whole rows", 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 3, 0},
    {"two passes, windows in the first layer", 2, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2},
    {"three passes, all of the paper", 3, 1, 0.3f, 1, 1, 1, 0, 1, 1, 1, 3, 2},
};

static struct model_config config_of(const struct twin_case *k)
{
    struct model_config c = small_config();
    c.in_norm = k->in_norm;
    c.gate_norm = k->gate_norm;
    c.out_norm = k->out_norm;
    c.doc_mask = k->doc_mask;
    c.feedback = k->feedback;
    c.qk_norm = k->qk_norm;
    c.attn_gate = k->attn_gate;
    c.window = k->window;
    c.full_every = k->full_every;
    return c;
}

static double *widened(const float *flat, int64_t n)
{
    double *w = mem_array((size_t)n, sizeof *w);
    for (int64_t i = 0; i < n; i++)
        w[i] = (double)flat[i];
    return w;
}

/* Collects what model_forward shows. */
struct seen {
    int passes;
    size_t hidden, tokens;
    float *h;
    double *sums;
};

static int see(void *ctx, const struct model_pass *p)
{
    struct seen *s = ctx;
    assert_int_equal(p->pass, ++s->passes);
    assert_null(p->logits);
    memcpy(s->h + (size_t)(p->pass - 1) * s->hidden, p->hidden, s->hidden * sizeof *s->h);
    for (size_t i = 0; i < s->tokens; i++)
        s->sums[p->pass - 1] += (double)p->losses[i];
    return 0;
}

static void check_forward(const struct twin_case *k, struct model *m, const double *w,
    const struct model_batch *b, const double *train_sums)
{
    const struct model_config *c = model_config_of(m);
    size_t n = (size_t)b->batch * (size_t)b->seq, hidden = n * (size_t)c->dim;
    double sums[3], seen_sums[3] = {0};
    struct twin_result r = {mem_array(3 * hidden, sizeof(double)), sums, NULL};
    struct seen s = {0, hidden, n, mem_array(3 * hidden, sizeof(float)), seen_sums};
    twin_forward(c, model_weights(m), w, b, &r);
    assert_int_equal(model_forward(m, b, MODEL_WANT_HIDDEN | MODEL_WANT_LOSSES, see, &s), 0);
    assert_int_equal(s.passes, k->passes);
    double error = relative_error_d(s.h, r.hidden, (size_t)k->passes * hidden);
    if (error > 2e-6)
        fail_msg("%s: hidden states differ by %g", k->name, error);
    for (int i = 0; i < k->passes; i++)
        if (fabs(seen_sums[i] - sums[i]) > 1e-5 * sums[i] ||
            fabs(train_sums[i] - sums[i]) > 1e-5 * sums[i])
            fail_msg("%s: loss of pass %d: forward %g, train %g, twin %g", k->name, i + 1,
                seen_sums[i], train_sums[i], sums[i]);
    free(r.hidden);
    free(s.h);
}

/* Every element's central difference of the twin, one tensor after the other. */
static void check_gradients(const struct twin_case *k, struct model *m, double *w,
    const struct model_batch *b, const float *grads)
{
    const struct model_config *c = model_config_of(m);
    const struct weight_table *t = model_weights(m);
    const double step = 1e-5;
    for (int i = 0; i < t->count; i++) {
        const struct weight *p = &t->items[i];
        double *right = mem_array((size_t)p->count, sizeof *right);
        for (int64_t j = 0; j < p->count; j++) {
            double *x = w + p->offset + j, was = *x;
            *x = was + step;
            double up = twin_total(c, t, w, b, (double)LAMBDA, (double)SCALE);
            *x = was - step;
            right[j] = (up - twin_total(c, t, w, b, (double)LAMBDA, (double)SCALE)) / (2 * step);
            *x = was;
        }
        double error = relative_error_d(grads + p->offset, right, (size_t)p->count);
        if (!(error < 1e-5))
            fail_msg("%s: gradient of %s differs by %g", k->name, p->name, error);
        free(right);
    }
}

static void run_twin_case(const struct twin_case *k, int prefix_sharing)
{
    struct model_config c = config_of(k);
    struct model_limits lim = {.batch = 3,
        .seq = 9,
        .passes = 3,
        .train = 1,
        .prefix_sharing = prefix_sharing}; /* larger than the batch in every way */
    struct test_batch tb;
    float *flat;
    double sums[3];
    struct model *m = small_model(device, &c, &lim, 5, &flat);
    size_t total = (size_t)model_weights(m)->total;
    float *grads = mem_array(total, sizeof *grads);
    double *w = widened(flat, (int64_t)total);
    test_batch_make(&tb, &c, 2, 7, k->passes, k->fused, k->jitter, 77);
    tb.b.z_loss = k->jitter / 30; /* the cases with jitter have it too */
    model_train(m, &tb.b, LAMBDA, SCALE, sums);
    assert_int_equal(model_shared(m), prefix_sharing && c.doc_mask && k->passes > 1);
    device->ops->download(device, grads, model_grads(m), total * sizeof *grads);
    check_gradients(k, m, w, &tb.b, grads);
    check_forward(k, m, w, &tb.b, sums);

    /* A second run adds the same once more. */
    float *twice = mem_array(total, sizeof *twice);
    model_train(m, &tb.b, LAMBDA, SCALE, sums);
    device->ops->download(device, twice, model_grads(m), total * sizeof *twice);
    for (size_t i = 0; i < total; i++)
        grads[i] *= 2;
    assert_true(relative_error_f(twice, grads, total) < 1e-6);
    test_batch_release(&tb);
    model_free(&m);
    free(flat);
    free(grads);
    free(twice);
    free(w);
}

static void test_twin(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof twin_cases / sizeof *twin_cases; i++)
        for (int sharing = 0; sharing < 2; sharing++)
            run_twin_case(&twin_cases[i], sharing);
}

/* A vocabulary so large that the logits come in several chunks; the slope along the gradient is its
 * norm. */
static void test_chunks(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct model_limits lim = {.batch = 2, .seq = 10, .passes = 2, .train = 1};
    struct test_batch tb;
    float *flat;
    double sums[2], norm = 0;
    c.vocab = 600000; /* 16 rows a chunk, of 20 */
    c.dim = 4;
    struct model *m = small_model(device, &c, &lim, 9, &flat);
    const struct weight_table *t = model_weights(m);
    size_t total = (size_t)t->total;
    float *grads = mem_array(total, sizeof *grads);
    test_batch_make(&tb, &c, 2, 10, 2, 1, 0, 78);
    model_train(m, &tb.b, LAMBDA, SCALE, sums);
    device->ops->download(device, grads, model_grads(m), total * sizeof *grads);
    for (size_t i = 0; i < total; i++)
        norm += (double)grads[i] * (double)grads[i];
    norm = sqrt(norm);
    double slope = 0;
    for (int side = -1; side <= 1; side += 2) {
        double *w = widened(flat, (int64_t)total);
        for (size_t i = 0; i < total; i++)
            w[i] += side * 1e-4 * (double)grads[i] / norm;
        slope += side * twin_total(&c, t, w, &tb.b, (double)LAMBDA, (double)SCALE) / 2e-4;
        free(w);
    }
    if (fabs(slope - norm) > 1e-4 * norm)
        fail_msg("slope along the gradient %g, its norm %g", slope, norm);
    test_batch_release(&tb);
    model_free(&m);
    free(flat);
    free(grads);
}

/* --- micro-batches, λ, repeatability ---------------------------------------------------------- */

static float *train_grads(
    struct model *m, const struct model_batch *b, float lambda, double *sums, int clear)
{
    size_t bytes = (size_t)model_weights(m)->total * sizeof(float);
    float *g = mem_array(bytes, 1);
    if (clear)
        device->ops->zero(device, model_grads(m), bytes);
    model_train(m, b, lambda, SCALE, sums);
    device->ops->download(device, g, model_grads(m), bytes);
    return g;
}

static void test_micro_batches(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct model_limits lim = {.batch = 4, .seq = 7, .passes = 3, .train = 1};
    struct test_batch tb;
    float *flat;
    double whole[3], half[3], sums[3] = {0};
    struct model *m = small_model(device, &c, &lim, 5, &flat);
    size_t total = (size_t)model_weights(m)->total;
    test_batch_make(&tb, &c, 4, 7, 3, 0, 0.1f, 79);
    float *one = train_grads(m, &tb.b, LAMBDA, whole, 1), *parts = NULL;
    for (int i = 0; i < 2; i++) {
        struct test_batch h = tb;
        uint8_t masks[2 * 14];
        uint64_t keys[2 * 2];
        for (int k = 0; k < 2; k++) {
            memcpy(masks + k * 14, tb.masks + k * 28 + i * 14, 14);
            memcpy(keys + k * 2, tb.keys + k * 4 + i * 2, sizeof *keys * 2);
        }
        h.b = (struct model_batch){2, 7, tb.tokens + i * 14, tb.targets + i * 14,
            tb.doc_starts + i * 14, 3, masks, 0.1f, keys, NULL, 0};
        free(parts);
        parts = train_grads(m, &h.b, LAMBDA, half, i == 0);
        for (int k = 0; k < 3; k++)
            sums[k] += half[k];
    }
    assert_true(relative_error_f(parts, one, total) < 1e-6);
    for (int k = 0; k < 3; k++)
        assert_true(fabs(sums[k] - whole[k]) < 1e-5 * whole[k]);
    test_batch_release(&tb);
    model_free(&m);
    free(flat);
    free(one);
    free(parts);
}

/* λ = 0: the gradient of one pass, the losses of all; and the same bits again. */
static void test_lambda_zero_and_bits(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct model_limits lim = {.batch = 2, .seq = 7, .passes = 3, .train = 1};
    struct test_batch tb;
    float *flat;
    double sums[3], full[3];
    struct model *m = small_model(device, &c, &lim, 5, &flat);
    size_t total = (size_t)model_weights(m)->total;
    test_batch_make(&tb, &c, 2, 7, 3, 1, 0, 80);
    float *a = train_grads(m, &tb.b, LAMBDA, full, 1), *b = train_grads(m, &tb.b, LAMBDA, sums, 1);
    assert_memory_equal(a, b, total * sizeof *a);
    float *zero = train_grads(m, &tb.b, 0, sums, 1);
    assert_memory_equal(sums, full, sizeof full);
    assert_true(sums[1] > 0 && sums[2] > 0 && sums[1] != sums[0]);
    tb.b.passes = 1;
    float *one = train_grads(m, &tb.b, LAMBDA, sums, 1);
    assert_true(relative_error_f(zero, one, total) < 1e-6);
    const struct weight *w_u = &model_weights(m)->items[weight_w_u(&c)];
    for (int64_t i = 0; i < w_u->count; i++)
        assert_true(one[w_u->offset + i] == 0);
    test_batch_release(&tb);
    model_free(&m);
    free(flat);
    free(a);
    free(b);
    free(zero);
    free(one);
}

/* visit stops the passes, logits agree with the losses, targets may be absent. */
static int stop_at_two(void *ctx, const struct model_pass *p)
{
    const struct test_batch *tb = ctx;
    int vocab = small_config().vocab;
    assert_null(p->hidden);
    for (int i = 0; i < tb->b.batch * tb->b.seq; i++) {
        double sum = 0;
        for (int v = 0; v < vocab; v++)
            sum += exp((double)p->logits[i * vocab + v]);
        double loss =
            tb->targets[i] < 0 ? 0 : log(sum) - (double)p->logits[i * vocab + tb->targets[i]];
        assert_true(fabs(loss - (double)p->losses[i]) < 1e-4);
    }
    return p->pass == 2 ? 42 : 0;
}

static void test_forward_only(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct model_limits lim = {.batch = 2,
        .seq = 7,
        .passes = 1,
        .train = 0}; /* without training passes are not limited */
    struct test_batch tb;
    float *flat;
    struct model *m = small_model(device, &c, &lim, 5, &flat);
    assert_null(model_grads(m));
    test_batch_make(&tb, &c, 2, 7, 9, 1, 0, 81);
    assert_int_equal(
        model_forward(m, &tb.b, MODEL_WANT_LOGITS | MODEL_WANT_LOSSES, stop_at_two, &tb), 42);
    tb.b.targets = NULL;
    assert_int_equal(model_forward(m, &tb.b, 0, NULL, NULL), 0);
    test_batch_release(&tb);
    model_free(&m);
    free(flat);
}

/* --- memory ----------------------------------------------------------------------------------- */

static const struct device_ops *real_ops;
static size_t alloc_bytes, alloc_calls, free_calls, alloc_limit;

static void *counting_alloc(struct device *d, size_t bytes)
{
    if (alloc_bytes + bytes > alloc_limit)
        return NULL;
    alloc_bytes += bytes;
    alloc_calls++;
    return real_ops->alloc(d, bytes);
}

static void counting_free(struct device *d, void *p)
{
    free_calls++;
    real_ops->free(d, p);
}

static void count_memory(struct device_ops *ops, size_t limit)
{
    real_ops = device->ops;
    *ops = *real_ops;
    ops->alloc = counting_alloc;
    ops->free = counting_free;
    device->ops = ops;
    alloc_bytes = alloc_calls = free_calls = 0;
    alloc_limit = limit;
}

static void test_memory(void **state)
{
    (void)state;
    struct device_ops ops;
    for (int train = 0; train < 2; train++)
        for (int feedback = 0; feedback < 2; feedback++)
            for (int passes = 1; passes <= (feedback ? 3 : 1); passes++) {
                struct model_config c = small_config();
                struct model_limits lim = {.batch = 2, .seq = 7, .passes = passes, .train = train};
                struct model_memory mem;
                struct test_batch tb;
                float *flat;
                double sums[3];
                c.feedback = feedback;
                c.qk_norm = c.attn_gate = passes == 2; /* no more cases, all combinations */
                c.window = passes == 3 ? 4 : 0;
                count_memory(&ops, SIZE_MAX);
                model_memory_estimate(device, &c, &lim, &mem);
                assert_int_equal(alloc_calls, 0);
                struct model *m = small_model(device, &c, &lim, 5, &flat);
                size_t calls = alloc_calls;
                assert_int_equal(alloc_bytes, mem.total);
                assert_true(train ? mem.gradients == mem.weights : mem.gradients == 0);
                test_batch_make(&tb, &c, 2, 7, passes, 0, 0.1f, 82);
                if (train)
                    model_train(m, &tb.b, LAMBDA, SCALE, sums);
                assert_int_equal(model_forward(m, &tb.b, 0, NULL, NULL), 0);
                assert_int_equal(alloc_calls, calls);
                model_free(&m);
                assert_int_equal(free_calls, calls);
                test_batch_release(&tb);
                free(flat);
                device->ops = real_ops;
            }
}

/* Memory that runs out anywhere: an error that says sizes, and everything given back. */
static void test_no_memory(void **state)
{
    (void)state;
    struct device_ops ops;
    struct model_config c = small_config();
    struct model_limits lim = {.batch = 2, .seq = 7, .passes = 3, .train = 1},
                        huge = {.batch = 1 << 15,
                            .seq = 1 << 15,
                            .passes = MODEL_MAX_PASSES,
                            .train = 1};
    struct model_memory mem;
    struct model *m;
    struct err e;
    model_memory_estimate(device, &c, &lim, &mem);
    const size_t limits[] = {0, mem.weights, mem.weights + mem.gradients, mem.total - 1};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        count_memory(&ops, limits[i]);
        assert_int_equal(model_new(device, &c, &lim, &m, &e), ERR_NOMEM);
        assert_null(m);
        assert_int_equal(free_calls, alloc_calls);
        device->ops = real_ops;
    }
    c.ffn = 1 << 20;
    count_memory(&ops, 1 << 20);
    assert_int_equal(model_new(device, &c, &huge, &m, &e), ERR_NOMEM);
    device->ops = real_ops;
}

/* --- what is refused -------------------------------------------------------------------------- */

static void test_limits(void **state)
{
    (void)state;
    static const struct model_limits wrong[] = {
        {.batch = 0, .seq = 7, .passes = 1, .train = 1},
        {.batch = 2, .seq = 0, .passes = 1, .train = 1},
        {.batch = INT_MAX, .seq = 2, .passes = 1, .train = 1},
        {.batch = 2, .seq = 7, .passes = 0, .train = 1},
        {.batch = 2, .seq = 7, .passes = MODEL_MAX_PASSES + 1, .train = 1},
    };
    struct model_config c = small_config();
    struct model *m;
    struct err e;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(model_new(device, &c, &wrong[i], &m, &e), ERR_INPUT);
    struct model_limits lim = {.batch = 2, .seq = 7, .passes = 1, .train = 1};
    c.kv_heads = 3;
    assert_int_equal(model_new(device, &c, &lim, &m, &e), ERR_INPUT);
    struct model_limits many = {.batch = INT_MAX / 7 / 2, .seq = 7, .passes = 1, .train = 1};
    c = small_config();
    c.qk_norm = 1;
    assert_int_equal(model_new(device, &c, &many, &m, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "4 heads"));
}

static void refused(const struct model_config *c, const struct model_batch *b, const char *says)
{
    struct err e = {0};
    assert_int_equal(model_batch_check(c, b, &e), ERR_INPUT);
    if (!strstr(e.msg, says))
        fail_msg("\"%s\" does not say \"%s\"", e.msg, says);
}

static void test_batch_check(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct test_batch tb;
    struct err e;
    test_batch_make(&tb, &c, 2, 7, 3, 1, 0, 83);
    assert_int_equal(model_batch_check(&c, &tb.b, &e), 0);
    tb.tokens[9] = 13;
    refused(&c, &tb.b, "token 2 of row 1 is 13");
    tb.tokens[9] = -1;
    refused(&c, &tb.b, "token 2 of row 1 is -1");
    tb.tokens[9] = 0;
    tb.targets[13] = -2;
    refused(&c, &tb.b, "target 6 of row 1");
    tb.targets[13] = -1;
    tb.doc_starts[3] = 2;
    refused(&c, &tb.b, "document start 3");
    tb.doc_starts[3] = 1;
    tb.masks[3] = 2;
    refused(&c, &tb.b, "mask of pass 2, row 0, position 3 is 2");
    tb.masks[3] = 1;
    refused(&c, &tb.b, "begins a document");
    c.doc_mask = 0;
    assert_int_equal(model_batch_check(&c, &tb.b, &e), 0);
    tb.masks[14 + 7] = 1;
    refused(&c, &tb.b, "mask of pass 3, row 1 fuses position 0, which begins a row");
    tb.b.passes = 0;
    refused(&c, &tb.b, "0 passes");
    tb.b.passes = 2;
    tb.b.masks = NULL;
    refused(&c, &tb.b, "need masks");
    c.feedback = 0;
    refused(&c, &tb.b, "without feedback");
    test_batch_release(&tb);
}

/* --- weights ---------------------------------------------------------------------------------- */

static void test_weight_table(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct weight_table t;
    struct err e;
    assert_int_equal(weight_table_make(&c, &t, &e), 0);
    int64_t count = 0, end = 0;
    for (int i = 0; i < t.count; i++) {
        assert_int_equal(t.items[i].offset % 16, 0);
        assert_true(t.items[i].offset >= end && t.items[i].offset < end + 16);
        end = t.items[i].offset + t.items[i].count;
        count += t.items[i].count;
    }
    assert_true(t.total >= end && t.total < end + 16);
    assert_int_equal(count, model_config_params(&c));
    struct layer_weights w = weight_layer(&c, 1);
    assert_string_equal(t.items[w.k].name, "model.layers.1.self_attn.k_proj.weight");
    assert_int_equal(t.items[w.k].shape[0], 8);
    assert_string_equal(t.items[w.down].name, "model.layers.1.mlp.down_proj.weight");
    assert_int_equal(t.items[w.down].shape[1], 10);
    assert_int_equal(t.items[w.post_norm].group, WEIGHT_VECTOR);
    assert_string_equal(t.items[weight_norm(&c)].name, "model.norm.weight");
    assert_string_equal(t.items[weight_w_g(&c)].name, "feedback.w_g.weight");
    assert_int_equal(t.items[weight_w_u(&c)].group, WEIGHT_FUSION);
    assert_int_equal(t.items[weight_embed()].group, WEIGHT_VECTOR);
    weight_table_release(&t);

    /* The options' tensors, and none of the places that the others had taken. */
    c.qk_norm = c.attn_gate = 1;
    assert_int_equal(weight_table_make(&c, &t, &e), 0);
    for (count = 0, end = 0; end < t.count; end++)
        count += t.items[end].count;
    assert_int_equal(count, model_config_params(&c));
    w = weight_layer(&c, 1);
    assert_string_equal(t.items[w.q_norm].name, "model.layers.1.self_attn.q_norm.weight");
    assert_int_equal(t.items[w.k_norm].count, 4);
    assert_int_equal(t.items[w.k_norm].group, WEIGHT_VECTOR);
    assert_string_equal(t.items[w.attn_gate].name, "model.layers.1.self_attn.g_proj.weight");
    assert_int_equal(t.items[w.attn_gate].shape[0], 16);
    assert_string_equal(t.items[w.down].name, "model.layers.1.mlp.down_proj.weight");
    assert_string_equal(t.items[weight_w_g(&c)].name, "feedback.w_g.weight");
    assert_int_equal(weight_w_g(&c), t.count - 1);
    c.attn_gate = 0;
    assert_int_equal(weight_layer(&c, 0).attn_gate, -1);
    weight_table_release(&t);
}

static void test_init(void **state)
{
    (void)state;
    struct model_config c = small_config(), plain;
    struct weight_table t, tp;
    struct err e;
    c.vocab = 3000;
    c.dim = 64;
    plain = c;
    plain.feedback = 0;
    plain.layers = 1;
    assert_int_equal(weight_table_make(&c, &t, &e), 0);
    assert_int_equal(weight_table_make(&plain, &tp, &e), 0);
    float *a = mem_array((size_t)t.total, sizeof *a), *b = mem_array((size_t)tp.total, sizeof *b);
    weights_init(&t, 3, a);
    weights_init(&tp, 3, b);
    /* Other tensors change none: layer 0 is the same in both. */
    assert_memory_equal(a, b, (size_t)tp.items[weight_layer(&plain, 0).down].offset * sizeof *a);
    for (int i = 0; i < t.count; i++) {
        const struct weight *w = &t.items[i];
        double sq = 0, right = i == weight_embed() ? 0.02 : 1 / sqrt((double)w->shape[1]);
        for (int64_t k = 0; k < w->count; k++)
            sq += (double)a[w->offset + k] * (double)a[w->offset + k];
        double std = sqrt(sq / (double)w->count);
        if (fabs(std / right - 1) > 4 / sqrt(2.0 * (double)w->count) + (w->ndim == 1 ? 0 : 1e-3))
            fail_msg("%s: std %g, right %g", w->name, std, right);
    }
    weights_init(&tp, 4, a);
    assert_true(memcmp(a, b, 64) != 0);
    weight_table_release(&t);
    weight_table_release(&tp);
    free(a);
    free(b);
}

/* Table → tensors → file → table, and what a wrong file is told. */
static void test_load(void **state)
{
    (void)state;
    struct model_config c = small_config(), other;
    struct weight_table t, to;
    struct err e;
    assert_int_equal(weight_table_make(&c, &t, &e), 0);
    float *flat = mem_array((size_t)t.total, sizeof *flat);
    float *back = mem_array((size_t)t.total, sizeof *back);
    struct st_tensor tensors[32];
    char names[32][128];
    weights_init(&t, 3, flat);
    weights_as_tensors(&t, flat, "w.", tensors, names);
    FILE *f = tmpfile();
    assert_non_null(f);
    assert_int_equal(safetensors_write(fileno(f), "x", tensors, t.count, NULL, &e), 0);
    long n = (fseek(f, 0, SEEK_END), ftell(f));
    char *bytes = mem_array((size_t)n, 1);
    rewind(f);
    assert_int_equal(fread(bytes, 1, (size_t)n, f), n);
    fclose(f);
    struct safetensors *st;
    assert_int_equal(safetensors_open_memory(bytes, (size_t)n, &st, &e), 0);
    assert_int_equal(weights_load(&t, st, "w.", 0, back, &e), 0);
    assert_memory_equal(flat, back, (size_t)t.total * sizeof *flat);
    assert_int_equal(weights_load(&t, st, "v.", 0, back, &e), ERR_INPUT);

    other = c;
    other.feedback = 0;
    assert_int_equal(weight_table_make(&other, &to, &e), 0);
    assert_int_equal(weights_load(&to, st, "w.", 0, back, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "feedback.w_u.weight"));
    assert_int_equal(weights_load(&to, st, "w.", 1, back, &e), 0);
    weight_table_release(&to);
    other = c;
    other.ffn = 12;
    assert_int_equal(weight_table_make(&other, &to, &e), 0);
    assert_int_equal(weights_load(&to, st, "w.", 1, back, &e), ERR_MISMATCH);
    assert_non_null(strstr(e.msg, "(12, 8)"));
    weight_table_release(&to);
    weight_table_release(&t);
    safetensors_close(&st);
    free(bytes);
    free(flat);
    free(back);
}

static int setup(void **state)
{
    (void)state;
    return device_cpu_new(2, &device, NULL);
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
        cmocka_unit_test(test_weight_table),
        cmocka_unit_test(test_init),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_batch_check),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_forward_only),
        cmocka_unit_test(test_micro_batches),
        cmocka_unit_test(test_lambda_zero_and_bits),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_twin),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
