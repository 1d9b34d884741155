/*
 * Counts of distinct words. About 72 bytes and the word's text for each.
 *
 * One writer at a time. The order of entries depends on the order of adding; what is counted
 * does not.
 */
#ifndef COMMON_WORD_COUNT_H
#define COMMON_WORD_COUNT_H

#include <stddef.h>
#include <stdint.h>

#include "common/mem.h"

struct word_entry {
    uint64_t hash, count;
    size_t offset; /* of the text in words.text */
    uint32_t len;
};

struct word_counts {
    struct word_entry *entries;
    size_t len, cap;
    uint32_t *slots; /* open addressing: index of an entry + 1, 0 where free */
    size_t slot_mask;
    struct buf text;
};

void word_counts_init(struct word_counts *w);
void word_counts_release(struct word_counts *w);

void word_counts_add(struct word_counts *w, const char *text, uint32_t len, uint64_t count);
void word_counts_merge(struct word_counts *into, const struct word_counts *from);

/*
 * Drops the rarest words, all of a count at once, until at most max are left. Which words
 * stay depends on the counts alone. Returns the smallest count that stayed.
 */
uint64_t word_counts_prune(struct word_counts *w, size_t max);

#endif
