#include "common/bpe_learn.h"

#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/hash.h"
#include "common/rng.h"
#include "common/tokenizer_impl.h"

#define PAIRS_MIN (1u << 14)
#define ASK_EVERY 64 /* merges between two calls to progress() and stopped() */

struct pair {
    uint64_t key, count; /* left << 32 | right */
    uint32_t *words;     /* that contain it; some no longer do */
    uint32_t n_words, cap;
    int changed; /* is in learner.changed */
};

struct candidate {
    uint64_t count, key;
};

struct word {
    size_t start; /* of its symbols */
    uint32_t len;
    uint64_t count;
};

struct learner {
    struct word *words;
    uint32_t *symbols;
    struct pair *pairs;
    uint32_t n_pairs, pairs_cap;
    uint32_t *pair_slots; /* open addressing: index + 1, 0 where free */
    uint32_t pair_mask;
    struct candidate *heap;
    size_t heap_len, heap_cap;
    uint32_t *changed; /* pairs whose count grew in the current merge */
    size_t n_changed, changed_cap;
    uint32_t *token_slots; /* tokens by their bytes: id + 1, 0 where free */
    uint32_t token_mask;
    struct bpe_learned *out;
};

/* Makes room for one more element in an array with `len` used of `*cap`. */
static void *room(void *array, size_t len, size_t *cap, size_t size)
{
    if (len < *cap)
        return array;
    *cap = *cap ? *cap * 2 : 1024;
    return mem_grow_array(array, *cap, size);
}

static int better(struct candidate a, struct candidate b)
{
    return a.count > b.count || (a.count == b.count && a.key < b.key);
}

static void heap_push(struct learner *l, struct candidate c)
{
    l->heap = room(l->heap, l->heap_len, &l->heap_cap, sizeof *l->heap);
    size_t i = l->heap_len++;
    for (; i > 0 && better(c, l->heap[(i - 1) / 2]); i = (i - 1) / 2)
        l->heap[i] = l->heap[(i - 1) / 2];
    l->heap[i] = c;
}

static struct candidate heap_pop(struct learner *l)
{
    struct candidate top = l->heap[0], c = l->heap[--l->heap_len];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < l->heap_len; i = child) {
        if (child + 1 < l->heap_len && better(l->heap[child + 1], l->heap[child]))
            child++;
        if (better(c, l->heap[child]))
            break;
        l->heap[i] = l->heap[child];
    }
    l->heap[i] = c;
    return top;
}

static uint32_t *pair_slot(const struct learner *l, uint64_t key)
{
    uint32_t i = (uint32_t)rng_mix(key) & l->pair_mask;
    while (l->pair_slots[i] && l->pairs[l->pair_slots[i] - 1].key != key)
        i = (i + 1) & l->pair_mask;
    return &l->pair_slots[i];
}

static void pairs_grow(struct learner *l)
{
    l->pairs_cap = l->pairs_cap ? l->pairs_cap * 2 : PAIRS_MIN;
    CHECK(l->pairs_cap < 1u << 31);
    l->pairs = mem_grow_array(l->pairs, l->pairs_cap, sizeof *l->pairs);
    free(l->pair_slots);
    l->pair_mask = l->pairs_cap * 2 - 1;
    l->pair_slots = mem_array((size_t)l->pairs_cap * 2, sizeof *l->pair_slots);
    for (uint32_t i = 0; i < l->n_pairs; i++)
        *pair_slot(l, l->pairs[i].key) = i + 1;
}

static struct pair *pair_of(struct learner *l, uint64_t key)
{
    uint32_t *slot = pair_slot(l, key);
    if (*slot)
        return &l->pairs[*slot - 1];
    if (l->n_pairs == l->pairs_cap) {
        pairs_grow(l);
        slot = pair_slot(l, key);
    }
    l->pairs[l->n_pairs] = (struct pair){.key = key};
    *slot = ++l->n_pairs;
    return &l->pairs[l->n_pairs - 1];
}

static uint64_t key_of(uint32_t left, uint32_t right)
{
    return (uint64_t)left << 32 | right;
}

/* Word w, which stands for `count` words, has one more of this pair. */
static void pair_add(struct learner *l, uint32_t left, uint32_t right, uint32_t w, uint64_t count)
{
    struct pair *p = pair_of(l, key_of(left, right));
    p->count += count;
    if (!p->n_words || p->words[p->n_words - 1] != w) {
        if (p->n_words == p->cap) {
            p->cap = p->cap ? p->cap * 2 : 4;
            p->words = mem_grow_array(p->words, p->cap, sizeof *p->words);
        }
        p->words[p->n_words++] = w;
    }
    if (!p->changed) {
        p->changed = 1;
        l->changed = room(l->changed, l->n_changed, &l->changed_cap, sizeof *l->changed);
        l->changed[l->n_changed++] = (uint32_t)(p - l->pairs);
    }
}

static void pair_remove(struct learner *l, uint32_t left, uint32_t right, uint64_t count)
{
    struct pair *p = pair_of(l, key_of(left, right));
    CHECK(p->count >= count);
    p->count -= count;
}

/* Every pair whose count grew becomes a candidate with its new count. */
static void push_changed(struct learner *l)
{
    for (size_t i = 0; i < l->n_changed; i++) {
        struct pair *p = &l->pairs[l->changed[i]];
        p->changed = 0;
        heap_push(l, (struct candidate){p->count, p->key});
    }
    l->n_changed = 0;
}

/*
 * Replaces left right by result in word w, from left to right. Each place takes away the pair in
 * it, the pair before it, and the pair behind it unless another place follows at once, which
 * takes that away itself; what comes instead likewise.
 */
static void merge_in_word(struct learner *l, uint32_t w, const struct bpe_merge *m)
{
    struct word *word = &l->words[w];
    uint32_t *s = l->symbols + word->start, n = word->len, kept = 0;
    uint64_t count = word->count;
    for (uint32_t i = 0; i < n; i++) {
        if (i + 1 == n || s[i] != m->left || s[i + 1] != m->right) {
            s[kept++] = s[i];
            continue;
        }
        if (i > 0) {
            pair_remove(l, s[i - 1], s[i], count);
            pair_add(l, s[kept - 1], m->result, w, count);
        }
        pair_remove(l, m->left, m->right, count);
        int another = i + 3 < n && s[i + 2] == m->left && s[i + 3] == m->right;
        if (i + 2 < n && !another) {
            pair_remove(l, s[i + 1], s[i + 2], count);
            pair_add(l, m->result, s[i + 2], w, count);
        }
        s[kept++] = m->result;
        i++;
    }
    word->len = kept;
}

/* The slot of the token with these bytes, or the free one where it would go. */
static uint32_t *token_slot(const struct learner *l, const char *bytes, size_t n)
{
    const struct bpe_learned *o = l->out;
    uint32_t i = (uint32_t)hash_xxh64(bytes, n, 0) & l->token_mask;
    for (; l->token_slots[i]; i = (i + 1) & l->token_mask) {
        uint32_t id = l->token_slots[i] - 1;
        if (o->offset[id + 1] - o->offset[id] == n &&
            !memcmp(o->bytes.data + o->offset[id], bytes, n))
            break;
    }
    return &l->token_slots[i];
}

/* The id of the two tokens' bytes put together: a new one, unless other parts made it before. */
static uint32_t joined_token(struct learner *l, uint32_t left, uint32_t right)
{
    struct bpe_learned *o = l->out;
    size_t n_left = o->offset[left + 1] - o->offset[left];
    size_t n = n_left + o->offset[right + 1] - o->offset[right], end = o->bytes.len;
    buf_reserve(&o->bytes, n);
    buf_add(&o->bytes, o->bytes.data + o->offset[left], n_left);
    buf_add(&o->bytes, o->bytes.data + o->offset[right], n - n_left);
    uint32_t *slot = token_slot(l, o->bytes.data + end, n);
    if (*slot) {
        o->bytes.len = end;
        return *slot - 1;
    }
    *slot = ++o->n_ids;
    o->offset[o->n_ids] = o->bytes.len;
    return o->n_ids - 1;
}

static void first_tokens(struct learner *l)
{
    struct bpe_learned *o = l->out;
    for (uint32_t id = 0; id <= TOKENIZER_TRAINED_EOT; id++) {
        if (id < 256) {
            buf_add_char(&o->bytes, (char)id);
            *token_slot(l, o->bytes.data + id, 1) = id + 1;
        } else {
            /* Not among the tokens found by their bytes: nothing may merge into it. */
            buf_add_str(&o->bytes, TOKENIZER_EOT);
        }
        o->offset[id + 1] = o->bytes.len;
    }
    o->n_ids = TOKENIZER_TRAINED_EOT + 1;
}

static void learner_init(
    struct learner *l, const struct word_counts *counts, uint32_t vocab, struct bpe_learned *out)
{
    uint32_t slots = 1024;
    while (slots < vocab * 2)
        slots *= 2;
    *l = (struct learner){.out = out, .token_mask = slots - 1};
    *out = (struct bpe_learned){.bytes = BUF_INIT};
    out->offset = mem_array((size_t)vocab + 1, sizeof *out->offset);
    l->token_slots = mem_array(slots, sizeof *l->token_slots);
    first_tokens(l);
    pairs_grow(l);
    l->words = mem_array(counts->len, sizeof *l->words);
    l->symbols = mem_array(counts->text.len, sizeof *l->symbols);
    for (size_t i = 0; i < counts->text.len; i++)
        l->symbols[i] = (uint8_t)counts->text.data[i];
    for (uint32_t w = 0; w < counts->len; w++) {
        const struct word_entry *x = &counts->entries[w];
        l->words[w] = (struct word){x->offset, x->len, x->count};
        const uint32_t *s = l->symbols + x->offset;
        for (uint32_t i = 0; i + 1 < x->len; i++)
            pair_add(l, s[i], s[i + 1], w, x->count);
    }
    push_changed(l);
}

static void learner_release(struct learner *l)
{
    for (uint32_t i = 0; i < l->n_pairs; i++)
        free(l->pairs[i].words);
    free(l->pairs);
    free(l->pair_slots);
    free(l->words);
    free(l->symbols);
    free(l->heap);
    free(l->changed);
    free(l->token_slots);
}

static void merge_everywhere(struct learner *l, struct pair *p, size_t *merges_cap)
{
    struct bpe_learned *o = l->out;
    uint32_t left = (uint32_t)(p->key >> 32), right = (uint32_t)p->key;
    struct bpe_merge m = {left, right, joined_token(l, left, right)};
    uint32_t *words = p->words, n = p->n_words;
    p->words = NULL; /* the pair disappears: its list is ours; p may move from here on */
    p->n_words = p->cap = 0;
    for (uint32_t i = 0; i < n; i++)
        merge_in_word(l, words[i], &m);
    free(words);
    o->merges = room(o->merges, o->n_merges, merges_cap, sizeof *o->merges);
    o->merges[o->n_merges++] = m;
    push_changed(l);
}

int bpe_learn(const struct word_counts *words, const struct bpe_train_opts *opts,
    struct bpe_learned *out, struct err *e)
{
    struct learner l;
    size_t merges_cap = 0;
    int rc = 0;
    learner_init(&l, words, opts->vocab, out);
    while (out->n_ids < opts->vocab && l.heap_len) {
        struct candidate c = heap_pop(&l);
        struct pair *p = pair_of(&l, c.key);
        if (p->count < opts->min_count)
            continue;
        if (p->count != c.count) { /* where it grew there is another entry with more */
            if (p->count < c.count)
                heap_push(&l, (struct candidate){p->count, c.key});
            continue;
        }
        merge_everywhere(&l, p, &merges_cap);
        if (out->n_merges % ASK_EVERY)
            continue;
        if (opts->progress)
            opts->progress(opts->progress_ctx, "tokens", out->n_ids, opts->vocab);
        if (opts->stopped && opts->stopped()) {
            rc = err_set(e, ERR_STOPPED, "stopped after %u tokens", out->n_ids);
            break;
        }
    }
    learner_release(&l);
    return rc;
}

void bpe_learned_release(struct bpe_learned *l)
{
    free(l->merges);
    free(l->offset);
    buf_release(&l->bytes);
    *l = (struct bpe_learned){.bytes = BUF_INIT};
}
