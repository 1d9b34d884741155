/*
 * Inside the model: what model.c, model_memory.c, model_forward.c, model_backward.c, model_share.c
 * and decode.c share. Nobody else includes this.
 *
 * Shapes: N = B·T rows, D width, Q = heads·hd, KV = kv_heads·hd, F width of the SwiGLU. Every
 * pointer is device memory inside one of the model's four allocations, unless it says host.
 */
#ifndef KERNELS_MODEL_INTERNAL_H
#define KERNELS_MODEL_INTERNAL_H

#include "kernels/model.h"

/* A run of device memory handed out in 64-byte steps. With base NULL it only measures. */
struct arena {
    char *base;
    size_t used; /* bytes; SIZE_MAX once something overflowed */
};
float *arena_floats(struct arena *a, size_t rows, size_t columns);
int32_t *arena_ints(struct arena *a, size_t count);
bf16 *arena_halves(struct arena *a, size_t rows, size_t columns);
uint8_t *arena_bytes(struct arena *a, size_t count);

/* The tensors of one layer, of the weights or of the gradients; NULL where there is none. */
struct layer_tensors {
    float *input_norm, *q, *k, *v, *o, *q_norm, *k_norm, *attn_gate, *post_norm, *gate, *up, *down;
};
struct tensors {
    float *embed, *norm, *w_u, *w_g; /* w_u, w_g NULL without feedback */
    struct layer_tensors *layers;
};

/*
 * What one layer keeps from forward to backward. The normalised inputs and the SwiGLU's output are
 * not kept: they cost one elementwise sweep to make again.
 */
struct layer_acts {
    float *x0;              /* (N, D) the block's input */
    float *rstd1;           /* (N) of its first norm */
    float *q, *k, *v;       /* (N, Q), (N, KV), (N, KV), rotated */
    float *q_raw, *k_raw;   /* with QK-norm (N, Q), (N, KV): before it */
    float *rstd_q, *rstd_k; /*   (N · heads), (N · kv_heads) */
    float *att, *lse;       /* (N, Q), (B, heads, T) */
    float *att_gate;        /* with the gate (N, Q): before σ */
    float *x1;              /* (N, D) after attention */
    float *rstd2;           /* (N) */
    float *gate, *up;       /* (N, F) */
    bf16 *gate16, *up16;    /* in their place with precision bf16 */
};

/*
 * The rows that a pass computes: all tokens of the batch (n = N) or, where it shares its prefixes
 * with pass 1, its fused ones alone, compacted. Everything of the pass is n rows long then.
 */
struct pass_rows {
    int n, shared;
    const int32_t *positions, *targets;  /* (n) */
    const int32_t *first, *first_window; /* (n) */
    const int32_t *index, *starts;       /* shared: (n) rows of the batch; (B + 1) */
};

/* The integers of compacted rows, each (N) but the starts. */
enum {
    COMPACT_INDEX,
    COMPACT_STARTS, /* (B + 1) */
    COMPACT_POSITIONS,
    COMPACT_TARGETS,
    COMPACT_FIRST,
    COMPACT_WINDOW,
    COMPACT_COUNT
};

struct pass_acts {
    struct layer_acts *layers; /* without training all layers share one set; what recompute drops
                                  is one set in the workspace */
    enum recompute recompute;
    struct pass_rows rows;
    int32_t *compact[COMPACT_COUNT]; /* memory of rows where shared */
    float *losses;                   /* (N) */
    float *x_out, *rstd;             /* (N, D) after the last block, and of the final norm (N) */
    float *h;                        /* (N, D) the state that is read out and carried */
    float *carried, *u;              /* (N, D) h of the pass before, moved right; W_U carried */
    bf16 *carried16;                 /* carried with precision bf16; carried is scratch then */
    float *prod, *rstd_prod;         /* (N, D) u ⊙ σ(g), (N): with out_norm */
    uint8_t *mask;                   /* (N) */
};

/* The plain input and the gate, the same in every pass. Without its norm a buffer is its source. */
struct input_acts {
    float *e, *plain, *rstd_in; /* (N, D) E[x], (N, D) n(E[x]), (N) */
    float *gate_in, *rstd_gate; /* (N, D) what the gate reads, (N) */
    float *g;                   /* (N, D) W_G gate_in */
};

/* Scratch. Members of one union never live at the same time, and overlap in memory. */
struct scratch {
    float *norm;              /* (N, D) a block's normalised input */
    float *dx, *dh, *dnorm;   /* (N, D) of the residual, of h, of a normalised input */
    float *dplain, *dg;       /* (N, D) of the plain input and of g, summed over passes */
    float *norm_work;         /* rmsnorm_bwd */
    float *dh_first;          /* with sharing (N, D): dL/dh of pass 1, summed over passes */
    float *row_weights;       /*   (N) of pass 1's losses */
    float *act, *dgate, *dup; /* union: (N, F) */
    float *gated; /* union: (N, Q) the gated output of attention, then the gate's gradient */
    float *datt, *dq, *dk, *dv; /*   with it: (N, Q), (N, Q), (N, KV), (N, KV) */
    float *attn_work;           /*   with them: attn_bwd */
    float *k_all, *v_all;       /*   and with sharing (N, KV): merged keys and values */
    float *du, *dg_pass;        /* union: (N, D); du becomes the gradient of carried's product */
    float *dcarried;            /*   with them: (N, D) */
    float *dh_all;  /*   and with sharing (N, D): dL/dh of all rows of the pass before */
    float *noise;   /* union: (N, D) given noise */
    float *h_all;   /*   with it, with sharing (N, D): merged states */
    float *logits;  /* union: (chunk, V) */
    bf16 *logits16; /*   with it, precision bf16: their gradient */
};

enum model_block {
    BLOCK_WEIGHTS,
    BLOCK_GRADIENTS,
    BLOCK_ACTIVATIONS,
    BLOCK_WORKSPACE,
    BLOCK_COUNT
};

/* With sharing: what later passes ask of pass 1's keys and values of one layer, summed; (N, KV). */
struct shared_keys {
    float *dk, *dv;
};

/* How linear layers multiply: float32, or bf16 where there are weights for it. */
struct products {
    struct device *d;
    const float *params; /* all weights … */
    bf16 *weights;       /*   and the same rounded, or NULL */
    bf16 *x, *dy;        /* places for a rounded input (N, widest) and a rounded gradient */
};
/* One side of a product, in one of the two forms. */
struct operand {
    const float *f;
    const bf16 *h;
};

struct model {
    struct device *d;
    struct model_config c;
    struct model_limits lim;
    struct weight_table table;
    void *memory[BLOCK_COUNT];
    float *params, *grads;
    model_final_fn *final; /* with final_ctx */
    void *final_ctx;
    struct tensors w, g;
    struct pass_acts *passes; /* host: lim.passes of them, one without training */
    struct input_acts in;
    struct scratch s;
    struct products mul;
    struct layer_acts remade;        /* one layer of what recompute drops */
    struct shared_keys *shared_keys; /* host: (layers) */
    int sharing;                     /* the batch at hand shares prefixes */
    float *cos_table, *sin_table;    /* (lim.seq, hd/2) */
    int32_t *tokens, *targets;       /* (N) */
    int32_t *positions, *first;      /* (N) of the row's document where doc_mask */
    int32_t *first_window;           /* (N) inside the window too; first without windows */
    float z_loss;                    /* of the batch in training */
    int chunk;                       /* rows of logits at a time */
    int32_t *host_positions, *host_first, *host_window; /* host: (N) */
    int32_t *host_index, *host_starts;                  /* host: (N), (B + 1) */
    float *host_weights;                                /* host: (N) */
};

/* Most bytes that a chunk of logits may take; rows of such a chunk, at most max_rows, of so many
 * bytes an element. */
#define LOGITS_BYTES ((size_t)32 << 20)
int logits_chunk(int vocab, int max_rows, size_t element);

/* Host side of a model without device memory; then the layout fills pointers from m->memory and
 * says the sizes. With m->memory all NULL it only measures. */
int model_shell_new(struct device *d, const struct model_config *c, const struct model_limits *lim,
    struct model **out, struct err *e);
void model_layout(struct model *m, struct model_memory *sizes);
int model_pass_sets(const struct model *m);
void layer_acts_take(struct arena *a, const struct model_config *c, size_t n, struct layer_acts *l);

/* --- linear layers, y = x wᵀ; model_linear.c ------------------------------------------------- */

/* The weights changed: rounds them again where they are multiplied so. */
void products_begin(const struct products *p, size_t count);
/* x (n, width) as an operand, for bf16 rounded into `place` (p->x or p->dy). */
struct operand operand(const struct products *p, bf16 *place, const float *x, int n, int width);
/* y (n, out) = alpha · x (n, in) wᵀ, += where accumulate */
void linear(const struct products *p, float *y, struct operand x, const float *w, int n, int out,
    int in, float alpha, int accumulate);
/* dw (out, in) += alpha · dyᵀ x */
void linear_dw(const struct products *p, float *dw, struct operand dy, struct operand x, int n,
    int out, int in, float alpha);
/* dx (n, in) = alpha · dy w, += where accumulate */
void linear_dx(const struct products *p, float *dx, struct operand dy, const float *w, int n,
    int out, int in, float alpha, int accumulate);

/* --- blocks, shared by the model and the decoder ---------------------------------------------- */

/* A set of rows on its way through the blocks. */
struct block_run {
    struct device *d;
    const struct model_config *c;
    const struct tensors *w;
    const struct products *mul;
    int n;                    /* rows */
    const int32_t *positions; /* (n) */
    const float *cos_table, *sin_table;
    float *norm, *act; /* scratch (n, D), (n, F) */
    float *gated;      /* scratch (n, Q), with attn_gate; may overlap act */
};
void block_qkv(const struct block_run *r, int layer, struct layer_acts *a);
/* From a->att to a->x1, from there to a->gate and a->up, from there to x_next (n, D). */
void block_attn_out(const struct block_run *r, int layer, struct layer_acts *a);
void block_mlp_in(const struct block_run *r, int layer, struct layer_acts *a);
/* silu(gate) · up (n, F), in r->act or for bf16 in r->mul->x. */
struct operand swiglu(const struct block_run *r, const struct layer_acts *a);
/* The three in turn: from a->att to the block's output x_next (n, D), which may be a->x0. */
void block_finish(const struct block_run *r, int layer, struct layer_acts *a, float *x_next);

/*
 * The gate reads n(E[x]) with gate_norm, E[x] without, whatever in_norm does to the plain input.
 * With both norms its input is the plain input; with gate_norm alone it has a buffer of its own.
 * gate_source() points in->gate_in at the one that it shares.
 */
int gate_own_norm(const struct model_config *c);
void gate_source(const struct model_config *c, struct input_acts *in);

/* The plain input of r->n tokens and, where `gate` is set, the gate; both into `in`. */
void plain_input(const struct block_run *r, const int32_t *tokens, struct input_acts *in, int gate);
/* p->carried, g (n, D) → out (n, D): the fused input of every row. */
void fuse(const struct block_run *r, const float *g, struct pass_acts *p, float *out);
/* The same where p->mask is 1, the plain input elsewhere. */
void fused_input(
    const struct block_run *r, const struct input_acts *in, struct pass_acts *p, float *out);

/* --- one pass of a batch ---------------------------------------------------------------------- */

struct attn_shape model_attn_shape(const struct model *m, const struct model_batch *b);
void model_batch_upload(struct model *m, const struct model_batch *b);
/* All tokens of the batch. */
struct pass_rows model_all_rows(const struct model *m, const struct model_batch *b);
/* First visible positions of a layer. */
const int32_t *model_first(const struct model *m, const struct pass_rows *rows, int layer);
struct block_run model_block_run(struct model *m, const struct pass_rows *rows);

/* Noise of pass k (from 0) > 0: the given one on the device, the keys of the drawn one, or neither.
 */
struct pass_noise {
    const float *given;
    const uint64_t *keys;
};
struct pass_noise model_noise(struct model *m, const struct model_batch *b, int k);

/* Pass k (from 0) into p, whose rows are set; prev is the pass before (may be p itself). */
void model_pass_forward(struct model *m, const struct model_batch *b, int k,
    const struct pass_acts *prev, struct pass_acts *p);
/* What p->recompute dropped of a layer, into m->remade. */
void model_layer_remake(
    struct model *m, const struct model_batch *b, struct pass_acts *p, int layer);

/*
 * Reads out p->h chunk by chunk: losses into p->losses. Where dscale != 0 also the gradients of
 * dscale · Σ weights · losses (weights NULL: all 1): dh (n, D) +=, the embedding's +=. Where host
 * is given logits are copied there.
 */
void model_readout(struct model *m, struct pass_acts *p, float dscale, const float *weights,
    float *dh, float *host);

/* --- prefix sharing (model_share.c) -------------------------------------------------------------
 */

/* Decides m->sharing for the batch and sets the rows of its passes. */
void share_begin(struct model *m, const struct model_batch *b, float lambda);
/* The carried state of pass k > 0, compacted, and its fused input into x. */
void share_feed_back(
    struct model *m, const struct block_run *r, const struct model_batch *b, int k, float *x);
void share_attend(struct model *m, const struct model_batch *b, struct pass_acts *p, int layer);
/* From s.datt: s.dq, and the gradients of the pass's own keys and values into s.k_all, s.v_all. */
void share_attend_backward(
    struct model *m, const struct model_batch *b, const struct pass_acts *p, int layer);
/* Clears what later passes add to for pass 1. */
void share_backward_begin(struct model *m, const struct model_batch *b);
/* From s.dcarried of pass k > 0: what it asks of the states of pass k − 1 (its rows into s.dh) and
 * of pass 1 (s.dh_first). */
void share_carry_backward(struct model *m, const struct model_batch *b, int k);
/* Sums of losses of all passes, from the losses of their own rows. */
void share_loss_sums(struct model *m, const struct model_batch *b, double *loss_sums);

#endif
