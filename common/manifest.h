/*
 * manifest.json: what a data source (a directory of sealed shards, made by fb-ingest) holds.
 *
 *   {version, name, tokenizer_sha256, vocab, eot, policy, block_tokens, duplicates, fingerprint,
 *    train: {tokens, documents, text_bytes, shards: [{file, bytes, last_pgno, tokens, documents,
 *            blocks, hash, sha256}]},
 *    val: {…}, root}
 *
 * A shard's `hash` rolls up its blocks (see loader/shard_store.h) and `root` rolls up the shards
 * and everything that gives the tokens a meaning, so two sources with the same root feed a run the
 * same samples. Reading checks every field, the sums, and that the root is the one its parts give.
 *
 * Policy "eot-first": every document is the <|endoftext|> id followed by its tokens.
 */
#ifndef COMMON_MANIFEST_H
#define COMMON_MANIFEST_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"
#include "common/hash.h"

#define MANIFEST_VERSION   1
#define MANIFEST_FILE      "manifest.json"
#define MANIFEST_POLICY    "eot-first"
#define MANIFEST_MAX_BYTES (256u << 20)

struct manifest_shard {
    char file[64];      /* within the source's directory */
    uint64_t bytes;     /* size of the file: a truncated one must never be mapped */
    uint64_t last_pgno; /* LMDB's last page number */
    uint64_t tokens, documents, blocks;
    char hash[SHA256_HEX];   /* of the contents: block checksums in order */
    char sha256[SHA256_HEX]; /* of the file's bytes */
};

struct manifest_split {
    struct manifest_shard *shards; /* in the order of the stream */
    int shard_count;
    uint64_t tokens, documents, text_bytes;
};

enum { SPLIT_TRAIN = 0, SPLIT_VAL = 1, SPLIT_COUNT };

struct manifest {
    char *name;
    char tokenizer_sha256[SHA256_HEX];
    int vocab; /* every token id is below it */
    int eot;
    int block_tokens;             /* tokens of every block but a shard's last */
    uint64_t duplicates;          /* documents dropped as exact copies */
    char fingerprint[SHA256_HEX]; /* of what it was made from: inputs' contents and options */
    struct manifest_split splits[SPLIT_COUNT];
    char root[SHA256_HEX];
};

const char *split_name(int split); /* "train", "val" */

/* Reads DIR/manifest.json. On failure nothing needs releasing. */
int manifest_load(const char *dir, struct manifest *out, struct err *e);
/* The same from memory; `where` names it in errors. */
int manifest_parse(
    const char *json, size_t n, const char *where, struct manifest *out, struct err *e);
void manifest_release(struct manifest *m);

/* The root its parts give. */
void manifest_root(const struct manifest *m, char out[SHA256_HEX]);
/* Fills m->root and the splits' token and document sums, and publishes DIR/manifest.json. */
int manifest_write(const char *dir, struct manifest *m, struct err *e);

#endif
