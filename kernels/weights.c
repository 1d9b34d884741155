#include "kernels/weights.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/rng.h"

#define ALIGN_FLOATS 16 /* every tensor begins on a cache line */

/* The sizes that a tensor's rows and columns are named by. */
enum extent { X_NONE, X_VOCAB, X_DIM, X_QUERY, X_KEY, X_HEAD, X_FFN };

struct tensor_kind {
    const char *suffix;
    enum extent rows, columns; /* (out, in); a vector has X_NONE columns */
    enum weight_group group;
    size_t option; /* of the model's flag that it needs, 0 for none */
};
#define WITH(flag) offsetof(struct model_config, flag)

/* One layer's tensors, in the order of struct layer_weights. */
static const struct tensor_kind layer_kinds[] = {
    {"input_layernorm.weight", X_DIM, X_NONE, WEIGHT_VECTOR, 0},
    {"self_attn.q_proj.weight", X_QUERY, X_DIM, WEIGHT_MATRIX, 0},
    {"self_attn.k_proj.weight", X_KEY, X_DIM, WEIGHT_MATRIX, 0},
    {"self_attn.v_proj.weight", X_KEY, X_DIM, WEIGHT_MATRIX, 0},
    {"self_attn.o_proj.weight", X_DIM, X_QUERY, WEIGHT_MATRIX, 0},
    {"self_attn.q_norm.weight", X_HEAD, X_NONE, WEIGHT_VECTOR, WITH(qk_norm)},
    {"self_attn.k_norm.weight", X_HEAD, X_NONE, WEIGHT_VECTOR, WITH(qk_norm)},
    {"self_attn.g_proj.weight", X_QUERY, X_DIM, WEIGHT_MATRIX, WITH(attn_gate)},
    {"post_attention_layernorm.weight", X_DIM, X_NONE, WEIGHT_VECTOR, 0},
    {"mlp.gate_proj.weight", X_FFN, X_DIM, WEIGHT_MATRIX, 0},
    {"mlp.up_proj.weight", X_FFN, X_DIM, WEIGHT_MATRIX, 0},
    {"mlp.down_proj.weight", X_DIM, X_FFN, WEIGHT_MATRIX, 0},
};
#define LAYER_KINDS ((int)(sizeof layer_kinds / sizeof *layer_kinds))
_Static_assert(
    sizeof layer_kinds / sizeof *layer_kinds == sizeof(struct layer_weights) / sizeof(int),
    "struct layer_weights and the table name the same tensors");

static const struct tensor_kind embed_kind = {
    "model.embed_tokens.weight", X_VOCAB, X_DIM, WEIGHT_VECTOR, 0};
static const struct tensor_kind norm_kind = {"model.norm.weight", X_DIM, X_NONE, WEIGHT_VECTOR, 0};
static const struct tensor_kind w_u_kind = {"feedback.w_u.weight", X_DIM, X_DIM, WEIGHT_FUSION, 0};
static const struct tensor_kind w_g_kind = {"feedback.w_g.weight", X_DIM, X_DIM, WEIGHT_FUSION, 0};

static int64_t extent_of(const struct model_config *c, enum extent x)
{
    switch (x) {
    case X_NONE:
        return 1;
    case X_VOCAB:
        return c->vocab;
    case X_DIM:
        return c->dim;
    case X_QUERY:
        return (int64_t)c->heads * c->head_dim;
    case X_KEY:
        return (int64_t)c->kv_heads * c->head_dim;
    case X_HEAD:
        return c->head_dim;
    case X_FFN:
        return c->ffn;
    }
    return 0;
}

static int has_kind(const struct model_config *c, const struct tensor_kind *kind)
{
    return kind->option == 0 || *(const int *)((const char *)c + kind->option);
}

static int kinds_of_a_layer(const struct model_config *c)
{
    int n = 0;
    for (int i = 0; i < LAYER_KINDS; i++)
        n += has_kind(c, &layer_kinds[i]);
    return n;
}

static void table_add(
    struct weight_table *t, const struct model_config *c, const struct tensor_kind *kind, int layer)
{
    if (!has_kind(c, kind))
        return;
    struct weight *w = &t->items[t->count++];
    if (layer < 0)
        snprintf(w->name, sizeof w->name, "%s", kind->suffix);
    else
        snprintf(w->name, sizeof w->name, "model.layers.%d.%s", layer, kind->suffix);
    w->ndim = kind->columns == X_NONE ? 1 : 2;
    w->shape[0] = extent_of(c, kind->rows);
    w->shape[1] = extent_of(c, kind->columns);
    w->count = w->shape[0] * w->shape[1]; /* each below 2^31: no overflow */
    w->offset = t->total;
    w->group = kind->group;
    t->total += (w->count + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

int weight_table_make(const struct model_config *c, struct weight_table *out, struct err *e)
{
    memset(out, 0, sizeof *out);
    int rc = model_config_check(c, e);
    if (rc < 0)
        return rc;
    out->items = mem_array((size_t)c->layers * LAYER_KINDS + 4, sizeof *out->items);
    table_add(out, c, &embed_kind, -1);
    for (int l = 0; l < c->layers; l++)
        for (int i = 0; i < LAYER_KINDS; i++)
            table_add(out, c, &layer_kinds[i], l);
    table_add(out, c, &norm_kind, -1);
    if (c->feedback) {
        table_add(out, c, &w_u_kind, -1);
        table_add(out, c, &w_g_kind, -1);
    }
    return 0;
}

void weight_table_release(struct weight_table *t)
{
    free(t->items);
    memset(t, 0, sizeof *t);
}

struct layer_weights weight_layer(const struct model_config *c, int layer)
{
    CHECK(layer >= 0 && layer < c->layers);
    int next = 1 + layer * kinds_of_a_layer(c), at[LAYER_KINDS];
    struct layer_weights w;
    for (int i = 0; i < LAYER_KINDS; i++)
        at[i] = has_kind(c, &layer_kinds[i]) ? next++ : -1;
    memcpy(&w, at, sizeof w);
    return w;
}

int weight_embed(void)
{
    return 0;
}

int weight_norm(const struct model_config *c)
{
    return 1 + c->layers * kinds_of_a_layer(c);
}

int weight_w_u(const struct model_config *c)
{
    return c->feedback ? weight_norm(c) + 1 : -1;
}

int weight_w_g(const struct model_config *c)
{
    return c->feedback ? weight_norm(c) + 2 : -1;
}

void weights_init(const struct weight_table *t, uint64_t seed, float *flat)
{
    memset(flat, 0, (size_t)t->total * sizeof *flat);
    for (int i = 0; i < t->count; i++) {
        const struct weight *w = &t->items[i];
        float *p = flat + w->offset;
        uint64_t key = rng_key(seed, hash_xxh64(w->name, strlen(w->name), 0));
        double std = i == weight_embed() ? 0.02 : 1 / sqrt((double)w->shape[1]);
        for (int64_t k = 0; k < w->count; k++)
            p[k] = w->ndim == 1 ? 1.0f : (float)(std * rng_normal(key, (uint64_t)k));
    }
}

int weight_load(const struct weight *w, const struct safetensors *st, const char *name, float *flat,
    struct err *e)
{
    const struct st_tensor *t = safetensors_find(st, name);
    int same = t && t->ndim == w->ndim;
    for (int k = 0; same && k < w->ndim; k++)
        same = t->shape[k] == w->shape[k];
    if (t && !same) {
        char shape[64];
        if (w->ndim == 1)
            snprintf(shape, sizeof shape, "(%lld)", (long long)w->shape[0]);
        else
            snprintf(shape, sizeof shape, "(%lld, %lld)", (long long)w->shape[0],
                (long long)w->shape[1]);
        return err_set(
            e, ERR_MISMATCH, "tensor %s has another shape than the model's %s", name, shape);
    }
    return safetensors_read_f32(st, name, w->count, flat + w->offset, e);
}

static int is_extra(const struct weight_table *t, const char *name)
{
    for (int i = 0; i < t->count; i++)
        if (strcmp(t->items[i].name, name) == 0)
            return 0;
    return 1;
}

int weights_load(const struct weight_table *t, const struct safetensors *st, const char *prefix,
    int allow_extra, float *flat, struct err *e)
{
    size_t n = strlen(prefix);
    for (int i = 0; i < t->count; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s%s", prefix, t->items[i].name);
        int rc = weight_load(&t->items[i], st, name, flat, e);
        if (rc < 0)
            return rc;
    }
    for (int i = 0; !allow_extra && i < safetensors_count(st); i++) {
        const char *name = safetensors_at(st, i)->name;
        if (strncmp(name, prefix, n) == 0 && is_extra(t, name + n))
            return err_set(e, ERR_MISMATCH, "tensor %.200s is not one of this model's", name);
    }
    return 0;
}

void weights_as_tensors(const struct weight_table *t, const float *flat, const char *prefix,
    struct st_tensor *out, char (*names)[128])
{
    for (int i = 0; i < t->count; i++) {
        const struct weight *w = &t->items[i];
        snprintf(names[i], sizeof names[i], "%s%s", prefix, w->name);
        out[i] = (struct st_tensor){.name = names[i],
            .dtype = ST_F32,
            .ndim = w->ndim,
            .shape = {w->shape[0], w->shape[1]},
            .data = flat + w->offset,
            .bytes = (size_t)w->count * sizeof(float)};
    }
}
