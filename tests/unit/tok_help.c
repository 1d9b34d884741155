#include "tests/unit/tok_help.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "common/bpe_train.h"
#include "common/check.h"
#include "common/rng.h"
#include "common/split.h"

static const char *const pieces[] = {" ", " ", " ", " ", "\n", "  ", ", ", ". ", "'s ", "\r\n",
    "12345 ", "aaaaaaa", "\t\t", "=====", "é", "日本", "ंत", "🙂", " \n ", "abababab", "don't ",
    "\n\n"};

void tok_text(struct buf *out, size_t n, uint64_t key)
{
    size_t end = out->len + n;
    for (uint64_t i = 0; out->len < end; i++) {
        double u = rng_unit(key, 3 * i);
        uint64_t word = (uint64_t)(u * u * u * 300); /* small numbers are more frequent */
        int len = 2 + (int)(rng_u64(7, word) % 9);
        for (int k = 0; k < len; k++)
            buf_add_char(out, (char)('a' + rng_u64(8, word * 16 + (uint64_t)k) % 7));
        buf_add_str(out, pieces[rng_u64(key, 3 * i + 1) % (sizeof pieces / sizeof pieces[0])]);
    }
}

void tok_train(const char *text, size_t n, uint32_t vocab, struct buf *json)
{
    struct bpe_train_opts opts = BPE_TRAIN_OPTS_DEFAULT;
    struct bpe_train_stats stats;
    struct bpe_trainer *t = NULL;
    struct err e = {0};
    opts.vocab = vocab;
    CHECK(bpe_trainer_new(&opts, &t, &e) == 0);
    CHECK(bpe_trainer_add_text(t, text, n, &e) == 0);
    CHECK(bpe_trainer_finish(t, json, &stats, &e) == 0);
    bpe_trainer_free(&t);
}

struct tokenizer *tok_parse(const char *json, size_t n)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (tokenizer_parse(json, n, &t, &e) < 0)
        fprintf(stderr, "%s\n", e.msg);
    CHECK(t);
    return t;
}

uint32_t tok_model_find(const struct tok_model *m, const char *spelling)
{
    for (uint32_t id = 0; id < m->n_tokens; id++)
        if (m->token[id] && !strcmp(m->token[id], spelling))
            return id;
    return UINT32_MAX;
}

void tok_model_read(const char *json, size_t n, struct tok_model *m)
{
    json_t *root = json_loadb(json, n, 0, NULL), *model = json_object_get(root, "model"), *id, *s;
    json_t *merges = json_object_get(model, "merges");
    const char *token;
    size_t rank;
    CHECK(json_object_size(json_object_get(model, "vocab")) > 256);
    m->n_tokens = json_object_size(json_object_get(model, "vocab"));
    m->n_merges = json_array_size(merges);
    m->token = mem_array(m->n_tokens, sizeof *m->token);
    m->merge = mem_array(m->n_merges, sizeof *m->merge);
    json_object_foreach (json_object_get(model, "vocab"), token, id)
        m->token[json_integer_value(id)] = mem_strdup(token);
    json_array_foreach (merges, rank, s) {
        char *left = mem_strdup(json_string_value(s)), *right = strchr(left, ' ');
        *right++ = 0;
        m->merge[rank][0] = tok_model_find(m, left);
        m->merge[rank][1] = tok_model_find(m, right);
        free(left);
    }
    json_decref(root);
}

void tok_model_release(struct tok_model *m)
{
    for (size_t i = 0; i < m->n_tokens; i++)
        free(m->token[i]);
    free(m->token);
    free(m->merge);
}

static uint32_t byte_token(int byte)
{
    return (uint32_t)byte; /* how trained files are numbered */
}

/* Merges `rank` at its leftmost place; 0 when it has none. */
static int merge_once(const struct tok_model *m, size_t rank, uint32_t *s, size_t *n)
{
    for (size_t i = 0; i + 1 < *n; i++) {
        if (s[i] != m->merge[rank][0] || s[i + 1] != m->merge[rank][1])
            continue;
        char *both = mem_printf("%s%s", m->token[s[i]], m->token[s[i + 1]]);
        s[i] = tok_model_find(m, both);
        free(both);
        memmove(s + i + 1, s + i + 2, (*n - i - 2) * sizeof *s);
        --*n;
        return 1;
    }
    return 0;
}

void tok_naive_encode(const struct tok_model *m, const char *text, size_t n, struct ids *out)
{
    struct split_pattern *pattern = NULL;
    CHECK(split_pattern_new(SPLIT_PATTERN_DEFAULT, &pattern, NULL) == 0);
    struct split_scratch *scratch = split_scratch_new(pattern);
    struct split_iter it;
    struct split_word w;
    split_begin(&it, pattern, scratch, text, n);
    while (split_next(&it, &w, NULL) > 0) {
        uint32_t *s = mem_array(w.len, sizeof *s);
        size_t len = w.len;
        for (size_t i = 0; i < len; i++)
            s[i] = byte_token((uint8_t)w.text[i]);
        for (size_t rank = 0; !w.raw && rank < m->n_merges;)
            rank = merge_once(m, rank, s, &len) ? 0 : rank + 1;
        for (size_t i = 0; i < len; i++)
            ids_add(out, s[i]);
        free(s);
    }
    split_scratch_free(&scratch);
    split_pattern_free(&pattern);
}
