/*
 * What the tests of the tokenizer share: text to train on, trained tokenizers, and naive twins of
 * byte-pair merging that know nothing of the library but how text is split.
 */
#ifndef TESTS_UNIT_TOK_HELP_H
#define TESTS_UNIT_TOK_HELP_H

#include <stddef.h>
#include <stdint.h>

#include "common/tokenizer.h"

/* About n bytes of made-up text: words of a skewed vocabulary, numbers, runs, other scripts. */
void tok_text(struct buf *out, size_t n, uint64_t key);

/* tokenizer.json trained on text with one thread and min_count 2. */
void tok_train(const char *text, size_t n, uint32_t vocab, struct buf *json);
struct tokenizer *tok_parse(const char *json, size_t n);

/* Tokens and merges of a tokenizer.json, read without the library. */
struct tok_model {
    char **token; /* by id, in the byte alphabet */
    size_t n_tokens;
    uint32_t (*merge)[2]; /* by rank: ids of both parts */
    size_t n_merges;
};
void tok_model_read(const char *json, size_t n, struct tok_model *m);
void tok_model_release(struct tok_model *m);
/* The id spelled so, or UINT32_MAX. */
uint32_t tok_model_find(const struct tok_model *m, const char *spelling);

/* Ids of text by merging the pair of lowest rank, leftmost first, found anew each time. */
void tok_naive_encode(const struct tok_model *m, const char *text, size_t n, struct ids *out);

#endif
