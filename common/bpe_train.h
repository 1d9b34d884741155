/*
 * Training a byte-level BPE tokenizer.
 *
 * Words are counted by several threads, then the most frequent pair of neighbours is merged again
 * and again; counts are kept up to date in the words that contain the pair only. Of pairs equally
 * frequent the one with the smaller left, then the smaller right id is taken, so the result
 * depends on the text and the options alone, not on threads or on the order of files (as long as
 * no word had to be forgotten, see below).
 *
 * Ids: 0 to 255 are the bytes, 256 is <|endoftext|>, then the merged tokens in the order found.
 *
 * Text is split as in encoding (SPLIT_PATTERN_DEFAULT). Words over BPE_TRAIN_WORD_MAX bytes
 * (encoded data, mostly) and bytes that are not UTF-8 do not count. Files are read in blocks that
 * end at a line's end, so a word that spans the end of a block of 2 MiB may be counted as two.
 *
 * Memory: at most max_words distinct words are kept after every 32 MiB of text (the rarest are
 * forgotten, all of a count at once), each taking about 150 bytes at default word lengths: 300 MB
 * for the default of 2 million; and the words of 32 MiB of text, typically 50 MB, at worst 700 MB.
 *
 *     struct bpe_trainer *t = bpe_trainer_new(&opts);
 *     rc = bpe_trainer_add_files(t, paths, n, e);
 *     if (rc == 0)
 *         rc = bpe_trainer_finish(t, &json, &stats, e);
 *     bpe_trainer_free(&t);
 *
 * A trainer belongs to one thread. progress() and stopped() may be called from threads of its own,
 * but never two at once.
 */
#ifndef COMMON_BPE_TRAIN_H
#define COMMON_BPE_TRAIN_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/mem.h"

#define BPE_TRAIN_VOCAB_MIN   257
#define BPE_TRAIN_VOCAB_MAX   (1u << 20)
#define BPE_TRAIN_WORD_MAX    256
#define BPE_TRAIN_MAX_WORDS   2000000
#define BPE_TRAIN_MAX_THREADS 256

struct bpe_train_opts {
    uint32_t vocab;     /* tokens wanted, bytes and <|endoftext|> included */
    int threads;        /* 1 to BPE_TRAIN_MAX_THREADS */
    uint64_t min_count; /* pairs rarer than this are not merged; at least 1 */
    size_t max_words;
    /* May be NULL. `done` of `total` bytes of text counted, or tokens made. */
    void (*progress)(void *ctx, const char *phase, uint64_t done, uint64_t total);
    void *progress_ctx;
    /* May be NULL. Asked often; ERR_STOPPED follows where it returns nonzero. */
    int (*stopped)(void);
};
#define BPE_TRAIN_OPTS_DEFAULT                                                                     \
    {                                                                                              \
        .vocab = 8192, .threads = 1, .min_count = 2, .max_words = BPE_TRAIN_MAX_WORDS              \
    }

struct bpe_train_stats {
    uint32_t vocab; /* may be less than asked for where the text is small */
    uint64_t text_bytes, distinct_words;
    uint64_t forgotten_below; /* words rarer than this were forgotten; 0 or 1: none */
};

struct bpe_trainer;

int bpe_trainer_new(const struct bpe_train_opts *opts, struct bpe_trainer **out, struct err *e);
void bpe_trainer_free(struct bpe_trainer **t);

/* Counts the words of one text, or of regular files. */
int bpe_trainer_add_text(struct bpe_trainer *t, const char *text, size_t n, struct err *e);
int bpe_trainer_add_files(struct bpe_trainer *t, char *const *paths, size_t n, struct err *e);

/* Merges, and appends the tokenizer.json. ERR_INPUT where no text was added. */
int bpe_trainer_finish(
    struct bpe_trainer *t, struct buf *json, struct bpe_train_stats *stats, struct err *e);

#endif
