/*
 * Text for tests: a tokenizer whose ids are the bytes' values, and documents made by a rule.
 */
#ifndef TESTS_UNIT_TEXT_CASE_H
#define TESTS_UNIT_TEXT_CASE_H

#include <stddef.h>
#include <stdint.h>

#define TEXT_CASE_EOT 256 /* the id of <|endoftext|>; the vocabulary is 257 */

/* Writes dir/name and the directories on the way. */
void text_case_file(const char *dir, const char *name, const char *text, size_t n);
/* tokenizer.json without merges. */
void text_case_tokenizer(const char *dir, const char *name);
/* Documents first … first + count − 1 in three directories under dir/under; the i-th is always the
 * same. */
void text_case_corpus(const char *dir, const char *under, int first, int count);
/* Ingests documents first … first + count − 1 into the source dir/name, of shards of about
 * shard_bytes; dir/tokenizer.json must be there. */
void text_case_source(
    const char *dir, const char *name, int first, int count, uint64_t shard_bytes);

/* build/FLAVOUR/bin of the test that runs, to be freed. */
char *text_case_bin(void);

#endif
