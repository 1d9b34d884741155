/*
 * What a model is: the sizes and options that decide its parameters and its mathematics.
 * DESIGN of the model: arXiv 2608.08888; names follow Hugging Face's Llama where one exists.
 */
#ifndef COMMON_MODEL_CONFIG_H
#define COMMON_MODEL_CONFIG_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"

struct model_config {
    int vocab;    /* V: rows of the embedding */
    int dim;      /* D: width of the residual stream */
    int layers;   /* L */
    int heads;    /* H: query heads */
    int kv_heads; /* key/value heads; divides heads */
    int head_dim; /* width of one head; even */
    int ffn;      /* F: width of the SwiGLU */
    float norm_eps;
    double rope_theta;
    float residual_scale;             /* each residual branch times this; 1/sqrt(2L) by default */
    int feedback;                     /* 1: has feedback.w_u, feedback.w_g (D, D) */
    int in_norm, gate_norm, out_norm; /* weightless RMS norms of the fusion, 0 or 1 */
    int doc_mask;                     /* 1: attention and positions stay inside a document */
    int qk_norm;                      /* 1: RMS norm with weight (hd) of each query and key head */
    int attn_gate; /* 1: the heads' output times σ(W a), a the block's normalised input */
    int window;    /* > 0: a query sees itself and the window − 1 positions before it */
    int full_every; /* with a window: layers full_every − 1, 2 full_every − 1 … see all; 0: none */
};

/* The window of a layer; 0 where it sees everything. */
int model_config_window(const struct model_config *c, int layer);

/*
 * What a pass drops after its forward and computes again in its backward, with the same bits.
 * INNER: everything of a layer but its input, attention's output and the sum of the two.
 * LAYER: everything but its input.
 */
/* What a training step multiplies: float32, or operands rounded to bfloat16 (kernels/model.h). */
enum precision { PRECISION_F32, PRECISION_BF16, PRECISION_COUNT };
enum recompute { RECOMPUTE_NONE, RECOMPUTE_INNER, RECOMPUTE_LAYER };

/* Checks sizes and options against each other; the error names the key (`model.heads`). */
int model_config_check(const struct model_config *c, struct err *e);

/* Number of parameters (tied readout counted once). */
int64_t model_config_params(const struct model_config *c);

/*
 * To and from the `config.json` of a checkpoint: the usual Llama keys, with QK-norm Qwen3's,
 * (hidden_size, num_hidden_layers, …, architectures, torch_dtype) beside ours under "fullband".
 * The returned object is the caller's.
 */
json_t *model_config_to_json(const struct model_config *c);
int model_config_from_json(const json_t *j, struct model_config *c, struct err *e);
int model_config_load(const char *path, struct model_config *c, struct err *e); /* config.json */

/*
 * Whether weights of a model `from` are those of `to`, where `to` may have feedback that `from` has
 * not, and another window, rope_theta, document mask or norm of the fusion; the error names the key
 * and both values.
 */
int model_config_continues(
    const struct model_config *from, const struct model_config *to, struct err *e);

#endif
