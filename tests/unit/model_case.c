#include "tests/unit/model_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "common/rng.h"

struct model_config small_config(void)
{
    return (struct model_config){
        .vocab = 13,
        .dim = 8,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 4,
        .ffn = 10,
        .norm_eps = 1e-5f,
        .rope_theta = 100,
        .residual_scale = 0.5f,
        .feedback = 1,
        .in_norm = 1,
        .gate_norm = 1,
        .out_norm = 1,
        .doc_mask = 1,
    };
}

struct model *small_model(struct device *d, const struct model_config *c,
    const struct model_limits *lim, uint64_t seed, float **flat)
{
    struct model *m;
    struct err e = {0};
    CHECK(model_new(d, c, lim, &m, &e) == 0);
    const struct weight_table *t = model_weights(m);
    float *w = mem_array((size_t)t->total, sizeof *w);
    weights_init(t, seed, w);
    for (int i = 0; i < t->count; i++)
        for (int64_t k = 0; k < t->items[i].count; k++) {
            float *p = w + t->items[i].offset + k;
            if (i == weight_embed())
                *p *= 30;
            else if (t->items[i].ndim == 1)
                *p += 0.3f * (float)rng_normal(seed + 1, (uint64_t)(t->items[i].offset + k));
        }
    d->ops->upload(d, model_params(m), w, (size_t)t->total * sizeof *w);
    CHECK(d->ops->sync(d, &e) == 0);
    *flat = w;
    return m;
}

void test_batch_make(struct test_batch *t, const struct model_config *c, int batch, int seq,
    int passes, int fused, float jitter, uint64_t seed)
{
    size_t n = (size_t)batch * (size_t)seq, extra = (size_t)(passes - 1);
    t->tokens = mem_array(n, sizeof *t->tokens);
    t->targets = mem_array(n, sizeof *t->targets);
    t->doc_starts = mem_array(n, 1);
    t->masks = mem_array(extra * n, 1);
    t->keys = mem_array(extra * (size_t)batch, sizeof *t->keys);
    for (size_t i = 0; i < n; i++) {
        t->tokens[i] = (int32_t)(rng_unit(seed, i) * c->vocab);
        t->targets[i] = (int32_t)(rng_unit(seed + 1, i) * (c->vocab + 2)) - 1;
        if (t->targets[i] >= c->vocab)
            t->targets[i] = -1;
        t->doc_starts[i] = i % (size_t)seq == 0 || rng_unit(seed + 2, i) < 0.25;
    }
    for (size_t k = 0; k < extra; k++) {
        for (size_t i = 0, prefix = 0; i < n; i++) {
            int start = i % (size_t)seq == 0 || (c->doc_mask && t->doc_starts[i]);
            if (start)
                prefix = fused ? 1 : 1 + (size_t)(rng_unit(seed + 3 + k, i) * 4);
            t->masks[k * n + i] = prefix == 0;
            prefix -= prefix > 0;
        }
        for (size_t r = 0; r < (size_t)batch; r++)
            t->keys[k * (size_t)batch + r] = rng_key(seed, 1000 + k * 100 + r);
    }
    t->b = (struct model_batch){batch, seq, t->tokens, t->targets, t->doc_starts, passes,
        extra ? t->masks : NULL, jitter, t->keys, NULL, 0};
}

void test_batch_release(struct test_batch *t)
{
    free(t->tokens);
    free(t->targets);
    free(t->doc_starts);
    free(t->masks);
    free(t->keys);
    memset(t, 0, sizeof *t);
}

double relative_error_f(const float *a, const float *b, size_t n)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

double relative_error_d(const float *a, const double *b, size_t n)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}
