/*
 * Byte-level BPE tokenizer, in the file format of Hugging Face `tokenizers` (tokenizer.json).
 *
 * Encoding splits text with a PCRE2 pattern, maps bytes to the GPT-2 byte alphabet and merges
 * by rank. Any bytes round-trip: each byte that is not part of valid UTF-8 becomes its own token
 * and takes part in no merge. Special tokens are never produced from plain text: "<|endoftext|>" in
 * a document is encoded as the characters it consists of.
 *
 * What a file may say: model BPE over the byte alphabet, with all 256 bytes and <|endoftext|>;
 * merges as "a b" or ["a", "b"]; pre_tokenizer ByteLevel, or a Sequence of one Split (Regex,
 * Isolated) and ByteLevel without its own pattern; special added tokens; no normalizer. Anything
 * else that would change ids is refused with ERR_UNSUPPORTED naming the field; ERR_INPUT where the
 * file contradicts itself. Where it is accepted, ids equal those of `tokenizers` on text that is
 * valid UTF-8 and does not spell a special token.
 *
 * A loaded tokenizer is immutable. Encoding needs scratch space: one `struct tokenizer_scratch`
 * a thread.
 */
#ifndef COMMON_TOKENIZER_H
#define COMMON_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/hash.h"
#include "common/mem.h"

#define TOKENIZER_EOT "<|endoftext|>" /* begins every document: both BOS and EOS */

struct tokenizer;
struct tokenizer_scratch;

/* A growable array of ids; release with ids_release(). */
struct ids {
    uint32_t *data;
    size_t len, cap;
};

int tokenizer_load(const char *path, struct tokenizer **out, struct err *e);
/* The same from memory (the fuzzer, tests). */
int tokenizer_parse(const char *json, size_t n, struct tokenizer **out, struct err *e);
void tokenizer_free(struct tokenizer **t);

int tokenizer_vocab(const struct tokenizer *t); /* largest id + 1, special tokens included */
int tokenizer_eot(const struct tokenizer *t);   /* id of <|endoftext|> */
int tokenizer_is_special(const struct tokenizer *t, uint32_t id);
const char *tokenizer_sha256(const struct tokenizer *t); /* of the file's bytes, hex */

struct tokenizer_scratch *tokenizer_scratch_new(const struct tokenizer *t);
void tokenizer_scratch_free(struct tokenizer_scratch **s);
/* Merging steps done so far: what a test can bound where time cannot be. */
uint64_t tokenizer_scratch_steps(const struct tokenizer_scratch *s);

/*
 * Appends the ids of n bytes of text. Linear in n but for the logarithm of a word's length. On an
 * error (a foreign pattern that exceeds the matcher's limits, no memory) `out` is as it was before.
 */
int tokenizer_encode(const struct tokenizer *t, struct tokenizer_scratch *s, const char *text,
    size_t n, struct ids *out, struct err *e);

/* Appends the bytes of the ids; ERR_INPUT names an id out of range. Special tokens are written as
 * their text. */
int tokenizer_decode(
    const struct tokenizer *t, const uint32_t *ids, size_t n, struct buf *out, struct err *e);

/* Bytes that token `id` stands for in text (0 for special tokens and ids out of range). */
int tokenizer_bytes_of(const struct tokenizer *t, uint32_t id);

void ids_add(struct ids *a, uint32_t id);
void ids_release(struct ids *a);

#endif
