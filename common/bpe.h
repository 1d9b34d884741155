/*
 * Byte-pair merging: the table of merges and the engine that applies it to one word.
 *
 * Merges are applied lowest rank first and, within a rank, from left to right, until none
 * applies. Short words are scanned; long ones go through a heap over a linked list, so a word of
 * n bytes takes O(n log n) whatever it is made of.
 *
 * The table is immutable once filled. `struct bpe_work` is scratch for one thread.
 */
#ifndef COMMON_BPE_H
#define COMMON_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define BPE_NONE UINT32_MAX

/* Merge of rank r: left[r], right[r] become result[r]. */
struct bpe_merge {
    uint32_t left, right, result;
};

struct bpe_table {
    struct bpe_merge *merges;
    uint32_t n_merges;
    uint32_t *slots; /* open addressing over pairs: rank, or BPE_NONE where free */
    uint32_t slot_mask;
};

/* Makes room for n merges; release with bpe_table_release(). */
void bpe_table_init(struct bpe_table *t, uint32_t n);
void bpe_table_release(struct bpe_table *t);
/* Adds the merge of the next rank; returns BPE_NONE, or the rank that already has this pair. */
uint32_t bpe_table_add(struct bpe_table *t, struct bpe_merge m);
/* Rank of a pair, BPE_NONE where it does not merge. */
uint32_t bpe_table_find(const struct bpe_table *t, uint32_t left, uint32_t right);

struct bpe_work {
    uint32_t *prev, *next; /* the linked list of a long word, by position */
    size_t list_cap;
    uint64_t *heap; /* rank << 32 | position */
    size_t heap_len, heap_cap;
    uint64_t steps; /* look-ups and heap moves since the work began: what a test can bound */
};
#define BPE_WORK_INIT                                                                              \
    {                                                                                              \
        0                                                                                          \
    }
void bpe_work_release(struct bpe_work *w);

/* Merges the n symbols in place and sets *n to what is left. ERR_NOMEM, or ERR_INPUT from 2^31. */
int bpe_merge_word(
    const struct bpe_table *t, struct bpe_work *w, uint32_t *symbols, size_t *n, struct err *e);

#endif
