#include "common/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "common/rng.h"

#define SHORT_WORD_SYMBOLS 24 /* up to here scanning beats the heap */
#define WORD_MAX_SYMBOLS   ((size_t)1 << 31)

void bpe_table_init(struct bpe_table *t, uint32_t n)
{
    size_t slots = 16;
    while (slots < (size_t)n * 2)
        slots *= 2;
    *t = (struct bpe_table){0};
    t->merges = mem_array(n, sizeof *t->merges);
    t->slots = mem_array(slots, sizeof *t->slots);
    memset(t->slots, 0xff, slots * sizeof *t->slots);
    t->slot_mask = (uint32_t)(slots - 1);
}

void bpe_table_release(struct bpe_table *t)
{
    free(t->merges);
    free(t->slots);
    *t = (struct bpe_table){0};
}

/* The slot of a pair: the one that holds it or the free one where it would go. */
static uint32_t *slot_of(const struct bpe_table *t, uint32_t left, uint32_t right)
{
    uint64_t h = rng_mix((uint64_t)left << 32 | right);
    for (uint32_t i = (uint32_t)h & t->slot_mask;; i = (i + 1) & t->slot_mask) {
        uint32_t rank = t->slots[i];
        if (rank == BPE_NONE || (t->merges[rank].left == left && t->merges[rank].right == right))
            return &t->slots[i];
    }
}

uint32_t bpe_table_add(struct bpe_table *t, struct bpe_merge m)
{
    uint32_t *slot = slot_of(t, m.left, m.right);
    if (*slot != BPE_NONE)
        return *slot;
    CHECK(t->n_merges <= t->slot_mask / 2);
    *slot = t->n_merges;
    t->merges[t->n_merges++] = m;
    return BPE_NONE;
}

uint32_t bpe_table_find(const struct bpe_table *t, uint32_t left, uint32_t right)
{
    return *slot_of(t, left, right);
}

void bpe_work_release(struct bpe_work *w)
{
    free(w->prev);
    free(w->next);
    free(w->heap);
    *w = (struct bpe_work)BPE_WORK_INIT;
}

static size_t merge_short(
    const struct bpe_table *t, struct bpe_work *w, uint32_t *symbols, size_t n)
{
    uint32_t ranks[SHORT_WORD_SYMBOLS]; /* of the pair that starts at each symbol */
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = bpe_table_find(t, symbols[i], symbols[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best])
                best = i;
        w->steps += n;
        if (ranks[best] == BPE_NONE)
            break;
        symbols[best] = t->merges[ranks[best]].result;
        n--;
        memmove(symbols + best + 1, symbols + best + 2, (n - best - 1) * sizeof *symbols);
        memmove(ranks + best, ranks + best + 1, (n - best - 1) * sizeof *ranks);
        if (best > 0)
            ranks[best - 1] = bpe_table_find(t, symbols[best - 1], symbols[best]);
        if (best + 1 < n)
            ranks[best] = bpe_table_find(t, symbols[best], symbols[best + 1]);
    }
    return n;
}

static void heap_push(struct bpe_work *w, uint64_t x)
{
    size_t i = w->heap_len++;
    for (; i > 0 && w->heap[(i - 1) / 2] > x; i = (i - 1) / 2, w->steps++)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = x;
    w->steps++;
}

static uint64_t heap_pop(struct bpe_work *w)
{
    uint64_t top = w->heap[0], x = w->heap[--w->heap_len];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < w->heap_len; i = child, w->steps++) {
        if (child + 1 < w->heap_len && w->heap[child + 1] < w->heap[child])
            child++;
        if (w->heap[child] >= x)
            break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = x;
    w->steps++;
    return top;
}

/* Room for a word of n symbols. A merge takes one entry off the heap and adds at most two. */
static int work_reserve(struct bpe_work *w, size_t n, struct err *e)
{
    if (n <= w->list_cap)
        return 0;
    uint64_t steps = w->steps;
    bpe_work_release(w);
    w->steps = steps;
    size_t cap = n + n / 2;
    w->prev = mem_try_array(cap, sizeof *w->prev);
    w->next = mem_try_array(cap, sizeof *w->next);
    w->heap = mem_try_array(cap, 2 * sizeof *w->heap);
    w->heap_cap = 2 * cap;
    w->list_cap = cap;
    if (w->prev && w->next && w->heap)
        return 0;
    w->list_cap = 0;
    return err_set(e, ERR_NOMEM, "no memory to merge a word of %zu bytes", n);
}

static void push_pair(
    const struct bpe_table *t, struct bpe_work *w, const uint32_t *symbols, uint32_t at)
{
    uint32_t rank = bpe_table_find(t, symbols[at], symbols[w->next[at]]);
    w->steps++;
    if (rank == BPE_NONE)
        return;
    CHECK(w->heap_len < w->heap_cap);
    heap_push(w, (uint64_t)rank << 32 | at);
}

static size_t merge_long(const struct bpe_table *t, struct bpe_work *w, uint32_t *symbols, size_t n)
{
    w->heap_len = 0;
    for (uint32_t i = 0; i < n; i++) {
        w->prev[i] = i ? i - 1 : BPE_NONE;
        w->next[i] = i + 1 < n ? i + 1 : BPE_NONE;
    }
    for (uint32_t i = 0; i + 1 < n; i++)
        push_pair(t, w, symbols, i);
    while (w->heap_len) {
        uint64_t top = heap_pop(w);
        uint32_t at = (uint32_t)top, right = w->next[at];
        const struct bpe_merge *m = &t->merges[top >> 32];
        /* An entry is stale once either of its symbols was merged into another. */
        if (right == BPE_NONE || symbols[at] != m->left || symbols[right] != m->right)
            continue;
        symbols[at] = m->result;
        symbols[right] = BPE_NONE;
        w->next[at] = w->next[right];
        w->next[right] = BPE_NONE;
        if (w->next[at] != BPE_NONE) {
            w->prev[w->next[at]] = at;
            push_pair(t, w, symbols, at);
        }
        if (w->prev[at] != BPE_NONE)
            push_pair(t, w, symbols, w->prev[at]);
    }
    size_t kept = 0;
    for (uint32_t i = 0; i != BPE_NONE; i = w->next[i])
        symbols[kept++] = symbols[i];
    return kept;
}

int bpe_merge_word(
    const struct bpe_table *t, struct bpe_work *w, uint32_t *symbols, size_t *n, struct err *e)
{
    if (*n <= SHORT_WORD_SYMBOLS) {
        *n = merge_short(t, w, symbols, *n);
        return 0;
    }
    if (*n >= WORD_MAX_SYMBOLS)
        return err_set(e, ERR_INPUT, "a word of %zu bytes, at most %zu can be merged", *n,
            WORD_MAX_SYMBOLS - 1);
    int rc = work_reserve(w, *n, e);
    if (rc == 0)
        *n = merge_long(t, w, symbols, *n);
    return rc;
}
