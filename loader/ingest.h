/*
 * Ingest: from text to a sealed source (a directory of shards with manifest.json).
 *
 * Everything is built in OUT.partial, which is renamed to OUT when complete: an interrupted ingest
 * leaves only that directory, and the next one starts over. The result depends on the documents,
 * the tokenizer and the options, not on threads or the order of the inputs.
 */
#ifndef LOADER_INGEST_H
#define LOADER_INGEST_H

#include <stdint.h>

#include "common/err.h"
#include "common/hash.h"
#include "loader/corpus.h"

struct ingest_options {
    const char *tokenizer; /* tokenizer.json */
    const char *out, *name;
    const char *const *inputs;
    int input_count;
    struct corpus_options read;
    double val_share;
    uint64_t seed;
    uint64_t shard_bytes; /* a shard ends with the document that reaches so many stored bytes */
    uint64_t max_bytes;   /* of text; 0: all */
    int block_tokens;
};

struct ingest_report {
    int existed; /* 1: OUT was there already, made from the same inputs */
    uint64_t files, documents, duplicates, empty, binary_files, bad_lines;
    uint64_t text_bytes, stored_bytes, train_tokens, val_tokens;
    int shards;
    char root[SHA256_HEX];
};

/*
 * ERR_STATE: OUT holds something else, or another ingest is writing it. ERR_STOPPED: watch asked
 * to. watch (may be NULL) sees "scan" and then "encode", in bytes.
 */
int ingest_run(const struct ingest_options *o, corpus_watch *watch, void *arg,
    struct ingest_report *report, struct err *e);

#endif
