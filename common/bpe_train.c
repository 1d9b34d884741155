#include "common/bpe_train.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/bpe_learn.h"
#include "common/fs.h"
#include "common/split.h"
#include "common/tokenizer_impl.h"
#include "common/utf8.h"

#define BLOCK_BYTES ((size_t)2 << 20)  /* read and counted by one thread at a time */
#define ROUND_BYTES ((size_t)32 << 20) /* counted between two mergers of the threads' counts */

struct bpe_trainer {
    struct bpe_train_opts opts;
    struct split_pattern *pattern;
    struct split_scratch *scratch; /* of the thread that owns the trainer */
    struct word_counts words;
    uint64_t text_bytes, forgotten_below;
};

/* Hands out blocks of the files in order, one caller at a time. */
struct reader {
    pthread_mutex_t lock;
    struct bpe_trainer *trainer;
    char *const *paths;
    size_t n_paths, next;
    int fd;           /* of paths[next - 1], or -1 between files */
    struct buf carry; /* read already, but behind the end of the last block */
    size_t round_bytes;
    uint64_t done, total;
    int rc; /* the first error; nothing is handed out after it */
    struct err e;
};

struct worker {
    pthread_t thread;
    struct reader *reader;
    struct word_counts words;
};

int bpe_trainer_new(const struct bpe_train_opts *opts, struct bpe_trainer **out, struct err *e)
{
    if (opts->vocab < BPE_TRAIN_VOCAB_MIN || opts->vocab > BPE_TRAIN_VOCAB_MAX)
        return err_set(e, ERR_INPUT, "vocabulary of %u: must be %d to %u", opts->vocab,
            BPE_TRAIN_VOCAB_MIN, BPE_TRAIN_VOCAB_MAX);
    if (opts->threads < 1 || opts->threads > BPE_TRAIN_MAX_THREADS)
        return err_set(
            e, ERR_INPUT, "%d threads: must be 1 to %d", opts->threads, BPE_TRAIN_MAX_THREADS);
    if (opts->min_count < 1 || opts->max_words < 1 || opts->max_words > UINT32_MAX / 8)
        return err_set(e, ERR_INPUT, "min_count and max_words must be at least 1");
    struct bpe_trainer *t = mem_array(1, sizeof *t);
    t->opts = *opts;
    word_counts_init(&t->words);
    int rc = split_pattern_new(SPLIT_PATTERN_DEFAULT, &t->pattern, e);
    if (rc == 0)
        t->scratch = split_scratch_new(t->pattern);
    *out = t;
    if (rc < 0)
        bpe_trainer_free(out);
    return rc;
}

void bpe_trainer_free(struct bpe_trainer **tp)
{
    struct bpe_trainer *t = *tp;
    if (!t)
        return;
    split_scratch_free(&t->scratch);
    split_pattern_free(&t->pattern);
    word_counts_release(&t->words);
    free(t);
    *tp = NULL;
}

static int count_words(const struct split_pattern *pattern, struct split_scratch *scratch,
    const char *text, size_t n, struct word_counts *words, struct err *e)
{
    struct split_iter it;
    struct split_word w;
    int rc;
    split_begin(&it, pattern, scratch, text, n);
    while ((rc = split_next(&it, &w, e)) > 0)
        if (!w.raw && w.len <= BPE_TRAIN_WORD_MAX)
            word_counts_add(words, w.text, (uint32_t)w.len, 1);
    return rc;
}

/* Keeps the memory bound; done at points that do not depend on the threads. */
static void forget_rare(struct bpe_trainer *t)
{
    uint64_t least = word_counts_prune(&t->words, t->opts.max_words);
    if (least > t->forgotten_below)
        t->forgotten_below = least;
}

int bpe_trainer_add_text(struct bpe_trainer *t, const char *text, size_t n, struct err *e)
{
    int rc = count_words(t->pattern, t->scratch, text, n, &t->words, e);
    t->text_bytes += n;
    forget_rare(t);
    return rc;
}

static int open_next(struct reader *r)
{
    const char *path = r->paths[r->next++];
    r->fd = fs_open_regular(path, &r->e);
    return r->fd < 0 ? r->fd : 0;
}

static void close_file(struct reader *r)
{
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
}

/* Fills block up to BLOCK_BYTES from the open file; closes it at its end. */
static int fill(struct reader *r, struct buf *block)
{
    buf_reserve(block, BLOCK_BYTES);
    while (block->len < BLOCK_BYTES) {
        ssize_t n = read(r->fd, block->data + block->len, BLOCK_BYTES - block->len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_errno(&r->e, "%s", r->paths[r->next - 1]);
        if (n == 0) {
            close_file(r);
            break;
        }
        block->len += (size_t)n;
    }
    return 0;
}

/* Where a full block should end: behind its last line, else before a character that is cut. */
static size_t block_end(const struct buf *block)
{
    const char *newline = memrchr(block->data, '\n', block->len);
    if (newline)
        return (size_t)(newline - block->data) + 1;
    for (size_t back = 1; back < 4; back++) {
        const char *last = block->data + block->len - back;
        if ((*last & 0xc0) == 0x80) /* within a character */
            continue;
        return utf8_char_len(last, back) ? block->len : block->len - back;
    }
    return block->len;
}

/* The next block, not empty: 1, 0 at the end of the round or of the files, or a negative code. */
static int next_block(struct reader *r, struct buf *block)
{
    buf_clear(block);
    while (block->len == 0) {
        if (r->round_bytes >= ROUND_BYTES)
            return 0;
        if (r->trainer->opts.stopped && r->trainer->opts.stopped())
            return err_set(&r->e, ERR_STOPPED, "stopped while counting words");
        if (r->fd < 0 && r->next == r->n_paths)
            return 0;
        int rc = r->fd < 0 ? open_next(r) : 0;
        if (rc < 0)
            return rc;
        buf_add(block, r->carry.data, r->carry.len);
        buf_clear(&r->carry);
        if ((rc = fill(r, block)) < 0)
            return rc;
    }
    if (r->fd >= 0) {
        size_t end = block_end(block);
        buf_add(&r->carry, block->data + end, block->len - end);
        block->len = end;
    }
    r->round_bytes += block->len;
    r->done += block->len;
    if (r->trainer->opts.progress)
        r->trainer->opts.progress(r->trainer->opts.progress_ctx, "bytes", r->done,
            r->done > r->total ? r->done : r->total);
    return 1;
}

/* next_block() for many threads; after an error there are no more blocks. */
static int take_block(struct reader *r, struct buf *block)
{
    pthread_mutex_lock(&r->lock);
    int rc = r->rc < 0 ? 0 : next_block(r, block);
    if (rc < 0)
        r->rc = rc;
    pthread_mutex_unlock(&r->lock);
    return rc;
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct reader *r = w->reader;
    struct split_scratch *scratch = split_scratch_new(r->trainer->pattern);
    struct buf block = BUF_INIT;
    struct err e;
    while (take_block(r, &block) > 0) {
        int rc = count_words(r->trainer->pattern, scratch, block.data, block.len, &w->words, &e);
        if (rc < 0) {
            pthread_mutex_lock(&r->lock);
            r->rc = rc;
            r->e = e;
            pthread_mutex_unlock(&r->lock);
        }
    }
    buf_release(&block);
    split_scratch_free(&scratch);
    return NULL;
}

/* Counts one round of blocks with all threads. */
static int run_round(struct bpe_trainer *t, struct reader *r)
{
    struct worker *workers = mem_array((size_t)t->opts.threads, sizeof *workers);
    int started = 0, rc = 0;
    r->round_bytes = 0;
    for (; started < t->opts.threads; started++) {
        workers[started].reader = r;
        word_counts_init(&workers[started].words);
        rc = pthread_create(&workers[started].thread, NULL, work, &workers[started]);
        if (rc) {
            word_counts_release(&workers[started].words);
            errno = rc;
            rc = err_errno(NULL, "thread");
            break;
        }
    }
    for (int i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
        word_counts_merge(&t->words, &workers[i].words);
        word_counts_release(&workers[i].words);
    }
    free(workers);
    if (started == 0) /* fewer threads than asked for are enough */
        r->rc = err_set(&r->e, rc, "no thread could be started");
    forget_rare(t);
    return r->rc;
}

int bpe_trainer_add_files(struct bpe_trainer *t, char *const *paths, size_t n, struct err *e)
{
    struct reader r = {.trainer = t, .paths = paths, .n_paths = n, .fd = -1, .carry = BUF_INIT};
    pthread_mutex_init(&r.lock, NULL);
    for (size_t i = 0; i < n; i++) {
        struct stat st;
        if (stat(paths[i], &st) == 0) /* what cannot be opened is reported when its turn comes */
            r.total += (uint64_t)st.st_size;
    }
    int rc = 0;
    while (rc == 0 && (r.next < n || r.fd >= 0))
        rc = run_round(t, &r);
    t->text_bytes += r.done;
    if (rc < 0)
        err_set(e, r.e.code, "%s", r.e.msg);
    close_file(&r);
    buf_release(&r.carry);
    pthread_mutex_destroy(&r.lock);
    return rc;
}

int bpe_trainer_finish(
    struct bpe_trainer *t, struct buf *json, struct bpe_train_stats *stats, struct err *e)
{
    if (t->words.len == 0)
        return err_set(e, ERR_INPUT, "no words to train on: the input is empty or not text");
    struct bpe_learned learned;
    int rc = bpe_learn(&t->words, &t->opts, &learned, e);
    if (rc == 0) {
        struct tokenizer_spec spec = {
            .regex = SPLIT_PATTERN_DEFAULT,
            .merges = learned.merges,
            .n_merges = learned.n_merges,
            .bytes = learned.bytes.data,
            .offset = learned.offset,
            .n_ids = learned.n_ids,
        };
        tokenizer_format(&spec, json);
        *stats = (struct bpe_train_stats){
            learned.n_ids, t->text_bytes, t->words.len, t->forgotten_below};
    }
    bpe_learned_release(&learned);
    return rc;
}
