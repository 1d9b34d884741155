/*
 * A corpus: the documents of files and directories, found, hashed, freed of copies and put in
 * order.
 *
 * A plain file is one document; a `.jsonl` file is one a line. Directories are searched
 * recursively; in them hidden names, links and files with a NUL byte are passed over (and counted).
 *
 * Everything that decides the result depends on the documents' contents alone, through a 128-bit
 * hash (two XXH64): copies have the same hash; validation is chosen by it, so a document stays on
 * its side when the corpus grows and is on the same side in every source; the order is by a keyed
 * mix of seed and hash. So neither the number of threads nor the order of the inputs matters.
 * Memory: 48 bytes a document.
 *
 * After corpus_list() and corpus_scan(), a corpus is read-only and may be used from several
 * threads.
 */
#ifndef LOADER_CORPUS_H
#define LOADER_CORPUS_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/mem.h"

#define CORPUS_MAX_DOCUMENT (64u << 20) /* bytes of one document, or of one line */

struct corpus_document {
    uint64_t hash[2]; /* of the text */
    uint64_t order;
    uint64_t offset; /* in the file */
    uint32_t file;
    uint32_t bytes; /* there: the whole file, or a line */
    uint32_t text_bytes;
    uint32_t val; /* 1: validation; set by corpus_arrange() */
};

struct corpus_file {
    char *path;
    int jsonl;
    int given; /* named by the user, not found in a directory */
    uint64_t bytes;
};

struct corpus {
    struct corpus_file *files;
    size_t file_count;
    struct corpus_document *documents;
    size_t count, cap;
    uint64_t file_bytes; /* of all files */
    uint64_t duplicates, empty, binary_files, bad_lines;
};

struct corpus_options {
    const char *field; /* of JSONL lines: the text */
    int threads;
    int skip_bad; /* 1: lines that are not right are counted, not errors */
};

/* Called about ten times a second; a value ≠ 0 stops the work with ERR_STOPPED. */
typedef int corpus_watch(void *arg, const char *what, uint64_t done, uint64_t total);

/* Finds the files. Errors name the input. */
int corpus_list(const char *const *inputs, int count, struct corpus *out, struct err *e);
/* Was it found in a directory, and begins with something else than text (a NUL byte)? One that
 * cannot be read is not: who reads it says why. */
int corpus_is_binary(const struct corpus_file *f);
/* Reads them all and notes every document. The first error in the order of the files wins. */
int corpus_scan(struct corpus *c, const struct corpus_options *o, corpus_watch *watch, void *arg,
    struct err *e);
/* Drops copies, chooses validation and sorts by order, validation and training mixed. */
void corpus_arrange(struct corpus *c, uint64_t seed, double val_share);
/* Keeps the first documents in order up to max_bytes of text. */
void corpus_limit(struct corpus *c, uint64_t max_bytes);

/* The text of a document, appended to `out`. ERR_STATE when the file has changed since the scan. */
int corpus_text(const struct corpus *c, const struct corpus_document *d, const char *field,
    struct buf *out, struct err *e);

void corpus_release(struct corpus *c);

#endif
