/*
 * The parameters of a model as one flat float32 array, and the table that names its ranges.
 * Order, names and layouts are Hugging Face Llama's ((out, in) matrices; Qwen3's q_norm and k_norm;
 * self_attn.g_proj.weight for the gate of attention), then feedback.w_u.weight and
 * feedback.w_g.weight (D, D).
 */
#ifndef KERNELS_WEIGHTS_H
#define KERNELS_WEIGHTS_H

#include <stdint.h>

#include "common/err.h"
#include "common/model_config.h"
#include "common/safetensors.h"

enum weight_group {
    WEIGHT_MATRIX, /* decayed */
    WEIGHT_VECTOR, /* norms and the embedding: not decayed */
    WEIGHT_FUSION, /* W_U, W_G: own learning-rate scale, not decayed, not moved by 1-pass steps */
};

struct weight {
    char name[96];
    int ndim;
    int64_t shape[2];
    int64_t count, offset; /* floats; offset into the flat array, a multiple of 16 */
    enum weight_group group;
};

struct weight_table {
    struct weight *items;
    int count;
    int64_t total; /* floats of the flat array, padding included (padding stays 0) */
};

/* Indices into the table, so that the model finds its tensors without names. */
struct layer_weights { /* −1 for what the model does not have */
    int input_norm, q, k, v, o, q_norm, k_norm, attn_gate, post_norm, gate, up, down;
};
int weight_table_make(const struct model_config *c, struct weight_table *out, struct err *e);
void weight_table_release(struct weight_table *t);
struct layer_weights weight_layer(const struct model_config *c, int layer);
int weight_embed(void);                        /* model.embed_tokens.weight */
int weight_norm(const struct model_config *c); /* model.norm.weight */
int weight_w_u(const struct model_config *c);  /* −1 without feedback */
int weight_w_g(const struct model_config *c);

/*
 * Fresh weights: normal, keyed by (seed, tensor name), so adding a tensor changes no other. Std:
 * embedding 0.02, matrices in^−1/2, fusion D^−1/2; norms 1.
 */
void weights_init(const struct weight_table *t, uint64_t seed, float *flat);

/* Reads tensor `name`, which must have w's shape, to its place in flat. */
int weight_load(const struct weight *w, const struct safetensors *st, const char *name, float *flat,
    struct err *e);
/* Reads every tensor of the table from `prefix` + name; extra tensors are refused unless
 * allow_extra. */
int weights_load(const struct weight_table *t, const struct safetensors *st, const char *prefix,
    int allow_extra, float *flat, struct err *e);

/* Fills `out` (t->count entries) with tensors that point into flat; names are prefix + name, kept
 * in *names. */
void weights_as_tensors(const struct weight_table *t, const float *flat, const char *prefix,
    struct st_tensor *out, char (*names)[128]);

#endif
