/*
 * The inside of a tokenizer: shared by what loads, what encodes and what writes the file.
 * Not for other parts; they use common/tokenizer.h.
 */
#ifndef COMMON_TOKENIZER_IMPL_H
#define COMMON_TOKENIZER_IMPL_H

#include <stdbool.h>

#include "common/bpe.h"
#include "common/split.h"
#include "common/tokenizer.h"

struct tokenizer {
    char sha256[SHA256_HEX];
    uint32_t n_ids;
    uint32_t eot;
    char *bytes;    /* of all tokens, one behind the other */
    size_t *offset; /* (n_ids + 1) into bytes */
    bool *special;  /* (n_ids) */
    uint32_t byte_id[256];
    struct bpe_table merges;
    struct split_pattern *pattern;
    /* With ignore_merges a word that is a token needs no merging: tokens by their bytes. */
    bool ignore_merges;
    uint32_t *word_slots; /* open addressing: id, or BPE_NONE where free */
    uint32_t word_mask;
};

static inline const char *token_bytes(const struct tokenizer *t, uint32_t id, size_t *n)
{
    *n = t->offset[id + 1] - t->offset[id];
    return t->bytes + t->offset[id];
}

/* The id whose bytes these are, special tokens aside; BPE_NONE where there is none. */
uint32_t tokenizer_find_word(const struct tokenizer *t, const char *text, size_t n);

/* What a training run hands over: tokens 0 to 255 are the bytes, 256 is <|endoftext|>. */
struct tokenizer_spec {
    const char *regex;
    const struct bpe_merge *merges;
    uint32_t n_merges;
    const char *bytes; /* as in struct tokenizer; special tokens hold their text */
    const size_t *offset;
    uint32_t n_ids;
};
#define TOKENIZER_TRAINED_EOT 256

/* Appends the tokenizer.json of spec. The same spec gives the same bytes. */
void tokenizer_format(const struct tokenizer_spec *spec, struct buf *out);

#endif
