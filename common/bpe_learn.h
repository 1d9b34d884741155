/*
 * Learning merges from word counts: the second half of training (bpe_train.h says by what rule).
 *
 * Each pair of neighbours has its count and the words that contain (or once contained) it, so a
 * merge touches those words only. A heap holds the candidates; its entries may be out of date and
 * are put back with the current count when they come up.
 */
#ifndef COMMON_BPE_LEARN_H
#define COMMON_BPE_LEARN_H

#include "common/bpe.h"
#include "common/bpe_train.h"
#include "common/word_count.h"

struct bpe_learned {
    struct bpe_merge *merges;
    uint32_t n_merges;
    struct buf bytes; /* of all tokens, <|endoftext|> with its text */
    size_t *offset;   /* (vocab + 1) */
    uint32_t n_ids;
};

/* ERR_STOPPED where opts->stopped() says so. Release `out` in any case. */
int bpe_learn(const struct word_counts *words, const struct bpe_train_opts *opts,
    struct bpe_learned *out, struct err *e);
void bpe_learned_release(struct bpe_learned *l);

#endif
