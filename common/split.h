/*
 * Splitting text into the words that byte-pair merges work within.
 *
 * A pattern is a regular expression of the kind tokenizer.json carries. Each match is a word and
 * so is each stretch between matches: nothing is lost. Only valid UTF-8 is matched; every byte
 * that is not part of a valid character is a word of its own, marked `raw`. Cutting invalid
 * bytes out first means that text is checked once and PCRE2's own check, which would run again
 * over the rest of the text at every match, is off.
 *
 * Patterns run under PCRE2 (JIT), written for Oniguruma. `\s` and `\S` outside of a negated
 * use in a class are rewritten to Unicode's White_Space, which differs from PCRE2's by U+180E.
 * Letters and digits follow the Unicode version of the PCRE2 that runs.
 *
 *     struct split_iter it;
 *     split_begin(&it, pattern, scratch, text, n);
 *     while ((rc = split_next(&it, &word, e)) > 0)
 *         ... word.text, word.len ...
 *
 * A pattern is immutable; scratch is for one thread. ERR_INPUT: the pattern does not compile or
 * may match nothing. ERR_UNSUPPORTED: one match needed more steps than a few for each byte, or too
 * much memory; the text names the byte. The patterns here never do.
 */
#ifndef COMMON_SPLIT_H
#define COMMON_SPLIT_H

#include <stdbool.h>
#include <stddef.h>

#include "common/err.h"

/* What tokenizers trained here use: see split.c for its parts. */
extern const char SPLIT_PATTERN_DEFAULT[];
/* What ByteLevel with use_regex stands for: the pattern of GPT-2. */
extern const char SPLIT_PATTERN_BYTE_LEVEL[];

struct split_pattern;
struct split_scratch;

int split_pattern_new(const char *regex, struct split_pattern **out, struct err *e);
void split_pattern_free(struct split_pattern **p);

struct split_scratch *split_scratch_new(const struct split_pattern *p);
void split_scratch_free(struct split_scratch **s);

struct split_word {
    const char *text; /* into the text that is being split */
    size_t len;       /* > 0 */
    bool raw;         /* one byte that is not part of valid UTF-8 */
};

struct split_iter { /* fields are private */
    const struct split_pattern *pattern;
    struct split_scratch *scratch;
    const char *text;
    size_t len;
    size_t pos;                /* everything before it has been returned */
    size_t run_start, run_end; /* the stretch of valid UTF-8 that contains pos */
    size_t match_end;          /* of a match that starts at pos and is already found, else 0 */
};

void split_begin(struct split_iter *it, const struct split_pattern *p, struct split_scratch *s,
    const char *text, size_t n);

/* 1 and the next word, 0 at the end, or a negative code. */
int split_next(struct split_iter *it, struct split_word *word, struct err *e);

#endif
