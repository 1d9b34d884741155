/*
 * Attention of one block of queries, forward and backward: what attention.c cuts the work into.
 *
 * The same source (attn_block.inc) is compiled for AVX-512 and for AVX2; cpu_attn_block() gives the
 * better one that this processor runs. No threads, nothing allocated: scores of Q_BLOCK queries and
 * K_BLOCK keys are on the stack.
 */
#ifndef KERNELS_CPU_ATTN_BLOCK_H
#define KERNELS_CPU_ATTN_BLOCK_H

#include <stddef.h>
#include <stdint.h>

enum { Q_BLOCK = 128, K_BLOCK = 64, HEAD_DIM_MAX = 1024 };

/*
 * Up to Q_BLOCK queries of one head, in the order of their positions. Row r stands at position
 * at[r] − base, or at last + r where at is NULL, and sees keys first[r] … its own (from k, v on).
 */
struct block {
    const float *q, *k, *v;
    const int32_t *first, *at;
    int last, base, rows, head_dim;
    size_t ld_q, ld_kv; /* floats from a token to the next */
    float scale;
};

/* At the first query of the block, with its strides; dk, dv at the row's first key. */
struct grads {
    float *dq, *dk, *dv;
    const float *dout, *out, *lse;
};

struct attn_block {
    const char *name;
    /* out (rows, hd) with row stride ld_out = ; lse (rows) may be NULL. */
    void (*forward)(const struct block *b, float *out, size_t ld_out, float *lse);
    /* dq of the block's queries =; dk, dv of the keys they see += */
    void (*backward)(const struct block *b, const struct grads *g);
};

extern const struct attn_block cpu_attn_block_v3, cpu_attn_block_v4;
const struct attn_block *cpu_attn_block(void);
/* For tests: that one from now on; NULL: the better one again. */
void cpu_attn_block_choose(const struct attn_block *b);

#endif
