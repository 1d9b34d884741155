#include "common/word_count.h"

#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/hash.h"

#define SLOTS_MIN 1024

void word_counts_init(struct word_counts *w)
{
    *w = (struct word_counts){.slot_mask = SLOTS_MIN - 1};
    w->slots = mem_array(SLOTS_MIN, sizeof *w->slots);
    buf_add_str(&w->text, ""); /* never NULL */
}

void word_counts_release(struct word_counts *w)
{
    free(w->entries);
    free(w->slots);
    buf_release(&w->text);
    *w = (struct word_counts){0};
}

static void index_entry(struct word_counts *w, size_t entry)
{
    size_t i = w->entries[entry].hash & w->slot_mask;
    while (w->slots[i])
        i = (i + 1) & w->slot_mask;
    w->slots[i] = (uint32_t)(entry + 1);
}

static void grow(struct word_counts *w)
{
    w->cap = w->cap ? w->cap * 2 : SLOTS_MIN / 2;
    CHECK(w->cap < UINT32_MAX);
    w->entries = mem_grow_array(w->entries, w->cap, sizeof *w->entries);
    free(w->slots);
    w->slot_mask = w->cap * 2 - 1;
    w->slots = mem_array(w->cap * 2, sizeof *w->slots);
    for (size_t i = 0; i < w->len; i++)
        index_entry(w, i);
}

static void add_hashed(
    struct word_counts *w, const char *text, uint32_t len, uint64_t hash, uint64_t count)
{
    for (size_t i = hash & w->slot_mask; w->slots[i]; i = (i + 1) & w->slot_mask) {
        struct word_entry *x = &w->entries[w->slots[i] - 1];
        if (x->hash == hash && x->len == len && !memcmp(w->text.data + x->offset, text, len)) {
            x->count += count;
            return;
        }
    }
    if (w->len == w->cap)
        grow(w);
    w->entries[w->len] = (struct word_entry){hash, count, w->text.len, len};
    buf_add(&w->text, text, len);
    index_entry(w, w->len++);
}

void word_counts_add(struct word_counts *w, const char *text, uint32_t len, uint64_t count)
{
    add_hashed(w, text, len, hash_xxh64(text, len, 0), count);
}

void word_counts_merge(struct word_counts *into, const struct word_counts *from)
{
    for (size_t i = 0; i < from->len; i++) {
        const struct word_entry *x = &from->entries[i];
        add_hashed(into, from->text.data + x->offset, x->len, x->hash, x->count);
    }
}

uint64_t word_counts_prune(struct word_counts *w, size_t max)
{
    uint64_t least = 1;
    for (size_t left = w->len; left > max; least++) {
        left = 0;
        for (size_t i = 0; i < w->len; i++)
            left += w->entries[i].count > least;
    }
    if (least == 1)
        return least;
    struct word_counts kept;
    word_counts_init(&kept);
    for (size_t i = 0; i < w->len; i++) {
        const struct word_entry *x = &w->entries[i];
        if (x->count >= least)
            add_hashed(&kept, w->text.data + x->offset, x->len, x->hash, x->count);
    }
    word_counts_release(w);
    *w = kept;
    return least;
}
