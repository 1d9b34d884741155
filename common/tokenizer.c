#include "common/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>

/* The cache of words: direct-mapped, so that its memory is fixed (3.6 MiB a scratch). */
#define CACHE_ENTRIES    32768
#define CACHE_WORD_BYTES 32
#define CACHE_WORD_IDS   18

struct cached_word {
    uint64_t hash;
    uint8_t len, n_ids; /* len 0: free */
    char text[CACHE_WORD_BYTES];
    uint32_t ids[CACHE_WORD_IDS];
};

struct tokenizer_scratch {
    struct split_scratch *split;
    struct bpe_work work;
    struct cached_word *cache;
};

void tokenizer_free(struct tokenizer **tp)
{
    struct tokenizer *t = *tp;
    if (!t)
        return;
    free(t->bytes);
    free(t->offset);
    free(t->special);
    bpe_table_release(&t->merges);
    split_pattern_free(&t->pattern);
    free(t->word_slots);
    free(t);
    *tp = NULL;
}

int tokenizer_vocab(const struct tokenizer *t)
{
    return (int)t->n_ids;
}

int tokenizer_eot(const struct tokenizer *t)
{
    return (int)t->eot;
}

int tokenizer_is_special(const struct tokenizer *t, uint32_t id)
{
    return id < t->n_ids && t->special[id];
}

const char *tokenizer_sha256(const struct tokenizer *t)
{
    return t->sha256;
}

struct tokenizer_scratch *tokenizer_scratch_new(const struct tokenizer *t)
{
    struct tokenizer_scratch *s = mem_array(1, sizeof *s);
    s->split = split_scratch_new(t->pattern);
    s->cache = mem_array(CACHE_ENTRIES, sizeof *s->cache);
    return s;
}

void tokenizer_scratch_free(struct tokenizer_scratch **sp)
{
    struct tokenizer_scratch *s = *sp;
    if (!s)
        return;
    split_scratch_free(&s->split);
    bpe_work_release(&s->work);
    free(s->cache);
    free(s);
    *sp = NULL;
}

uint64_t tokenizer_scratch_steps(const struct tokenizer_scratch *s)
{
    return s->work.steps;
}

static int ids_reserve(struct ids *a, size_t extra, struct err *e)
{
    if (extra <= a->cap - a->len)
        return 0;
    size_t cap = a->len + (extra > a->len / 2 ? extra : a->len / 2), bytes;
    cap = cap < 64 ? 64 : cap;
    uint32_t *data = mem_mul(cap, sizeof *data, &bytes) < 0 ? NULL : realloc(a->data, bytes);
    if (!data)
        return err_set(e, ERR_NOMEM, "no memory for %zu token ids", cap);
    a->data = data;
    a->cap = cap;
    return 0;
}

void ids_add(struct ids *a, uint32_t id)
{
    if (a->len == a->cap) {
        a->cap = a->cap < 64 ? 64 : a->cap + a->cap / 2;
        a->data = mem_grow_array(a->data, a->cap, sizeof *a->data);
    }
    a->data[a->len++] = id;
}

void ids_release(struct ids *a)
{
    free(a->data);
    *a = (struct ids){0};
}

uint32_t tokenizer_find_word(const struct tokenizer *t, const char *text, size_t n)
{
    uint32_t i = (uint32_t)hash_xxh64(text, n, 0) & t->word_mask;
    for (; t->word_slots[i] != BPE_NONE; i = (i + 1) & t->word_mask) {
        size_t len;
        const char *bytes = token_bytes(t, t->word_slots[i], &len);
        if (len == n && !memcmp(bytes, text, n))
            break;
    }
    return t->word_slots[i];
}

/* Appends the ids of one word, merged in place at the end of `out`. */
static int encode_word(const struct tokenizer *t, struct tokenizer_scratch *s, const char *text,
    size_t n, struct ids *out, struct err *e)
{
    if (t->ignore_merges) {
        uint32_t id = tokenizer_find_word(t, text, n);
        if (id != BPE_NONE) {
            ids_add(out, id);
            return 0;
        }
    }
    int rc = ids_reserve(out, n, e);
    if (rc < 0)
        return rc;
    uint32_t *symbols = out->data + out->len;
    for (size_t i = 0; i < n; i++)
        symbols[i] = t->byte_id[(uint8_t)text[i]];
    rc = bpe_merge_word(&t->merges, &s->work, symbols, &n, e);
    if (rc == 0)
        out->len += n;
    return rc;
}

static int encode_cached(const struct tokenizer *t, struct tokenizer_scratch *s,
    const struct split_word *word, struct ids *out, struct err *e)
{
    if (word->len > CACHE_WORD_BYTES)
        return encode_word(t, s, word->text, word->len, out, e);
    uint64_t hash = hash_xxh64(word->text, word->len, 0);
    struct cached_word *c = &s->cache[hash % CACHE_ENTRIES];
    if (c->hash == hash && c->len == word->len && !memcmp(c->text, word->text, word->len)) {
        int rc = ids_reserve(out, c->n_ids, e);
        if (rc < 0)
            return rc;
        memcpy(out->data + out->len, c->ids, c->n_ids * sizeof c->ids[0]);
        out->len += c->n_ids;
        return 0;
    }
    size_t before = out->len;
    int rc = encode_word(t, s, word->text, word->len, out, e);
    size_t n = out->len - before;
    if (rc == 0 && n <= CACHE_WORD_IDS) {
        c->hash = hash;
        c->len = (uint8_t)word->len;
        c->n_ids = (uint8_t)n;
        memcpy(c->text, word->text, word->len);
        memcpy(c->ids, out->data + before, n * sizeof c->ids[0]);
    }
    return rc;
}

int tokenizer_encode(const struct tokenizer *t, struct tokenizer_scratch *s, const char *text,
    size_t n, struct ids *out, struct err *e)
{
    struct split_iter it;
    struct split_word word;
    size_t before = out->len;
    int rc;
    split_begin(&it, t->pattern, s->split, text, n);
    while ((rc = split_next(&it, &word, e)) > 0) {
        if (word.raw)
            ids_add(out, t->byte_id[(uint8_t)word.text[0]]);
        else if ((rc = encode_cached(t, s, &word, out, e)) < 0)
            break;
    }
    if (rc < 0)
        out->len = before;
    return rc;
}

int tokenizer_decode(
    const struct tokenizer *t, const uint32_t *ids, size_t n, struct buf *out, struct err *e)
{
    size_t before = out->len;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= t->n_ids) {
            out->len = before;
            buf_add(out, "", 0); /* ends the text there */
            return err_set(e, ERR_INPUT, "id %u at position %zu: the vocabulary has ids 0 to %u",
                ids[i], i, t->n_ids - 1);
        }
        size_t len;
        const char *bytes = token_bytes(t, ids[i], &len);
        buf_add(out, bytes, len);
    }
    return 0;
}

int tokenizer_bytes_of(const struct tokenizer *t, uint32_t id)
{
    size_t len = 0;
    if (id < t->n_ids && !t->special[id])
        (void)token_bytes(t, id, &len);
    return (int)len;
}
