// bpe_train: the same merges as a naive trainer that counts everything anew each time, whatever the
// number of threads, the order of files and the way they are cut.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/bpe_train.h"
#include "common/fs.h"
#include "common/rng.h"
#include "common/split.h"
#include "common/word_count.h"
#include "tests/unit/temp_dir.h"
#include "tests/unit/tok_help.h"

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* -- the naive twin: every word of the text, in order, as ids; nothing is kept between merges -- */

struct twin {
    uint32_t *symbols; /* words one behind the other, each ended by UINT32_MAX */
    size_t n;
    char *token[2048]; /* with its length in front: bytes may be 0 */
    size_t token_len[2048];
    uint32_t n_tokens;
    uint32_t merge[2048][2];
    size_t n_merges;
};

static void twin_read(struct twin *t, const char *text, size_t n)
{
    struct split_pattern *pattern = NULL;
    struct split_iter it;
    struct split_word w;
    assert_int_equal(split_pattern_new(SPLIT_PATTERN_DEFAULT, &pattern, NULL), 0);
    struct split_scratch *s = split_scratch_new(pattern);
    t->symbols = mem_array(2 * n + 1, sizeof *t->symbols);
    split_begin(&it, pattern, s, text, n);
    while (split_next(&it, &w, NULL) > 0) {
        if (w.raw || w.len > BPE_TRAIN_WORD_MAX)
            continue;
        for (size_t i = 0; i < w.len; i++)
            t->symbols[t->n++] = (uint8_t)w.text[i];
        t->symbols[t->n++] = UINT32_MAX;
    }
    split_scratch_free(&s);
    split_pattern_free(&pattern);
    for (t->n_tokens = 0; t->n_tokens < 257; t->n_tokens++) {
        t->token[t->n_tokens] = mem_printf("%c", (int)t->n_tokens);
        t->token_len[t->n_tokens] = t->n_tokens < 256 ? 1 : 0;
    }
}

/* The most frequent pair, of equals the one with the smallest ids; its count. */
static uint64_t twin_best(const struct twin *t, uint32_t best[2])
{
    uint64_t *count = mem_array((size_t)t->n_tokens * t->n_tokens, sizeof *count), most = 0;
    for (size_t i = 0; i + 1 < t->n; i++)
        if (t->symbols[i] != UINT32_MAX && t->symbols[i + 1] != UINT32_MAX)
            count[(size_t)t->symbols[i] * t->n_tokens + t->symbols[i + 1]]++;
    for (size_t k = 0; k < (size_t)t->n_tokens * t->n_tokens; k++) {
        if (count[k] <= most)
            continue;
        most = count[k];
        best[0] = (uint32_t)(k / t->n_tokens);
        best[1] = (uint32_t)(k % t->n_tokens);
    }
    free(count);
    return most;
}

static uint32_t twin_join(struct twin *t, const uint32_t m[2])
{
    size_t a = t->token_len[m[0]], n = a + t->token_len[m[1]];
    char *both = mem_array(n, 1);
    memcpy(both, t->token[m[0]], a);
    memcpy(both + a, t->token[m[1]], n - a);
    for (uint32_t id = 0; id < t->n_tokens; id++) {
        if (t->token_len[id] != n || memcmp(t->token[id], both, n))
            continue;
        free(both);
        return id;
    }
    t->token[t->n_tokens] = both;
    t->token_len[t->n_tokens] = n;
    return t->n_tokens++;
}

static void twin_train(struct twin *t, uint32_t vocab, uint64_t min_count)
{
    uint32_t m[2];
    while (t->n_tokens < vocab && twin_best(t, m) >= min_count) {
        uint32_t joined = twin_join(t, m);
        size_t kept = 0;
        for (size_t i = 0; i < t->n; i++) {
            int here = i + 1 < t->n && t->symbols[i] == m[0] && t->symbols[i + 1] == m[1];
            t->symbols[kept++] = here ? joined : t->symbols[i];
            i += (size_t)here;
        }
        t->n = kept;
        memcpy(t->merge[t->n_merges++], m, sizeof m);
    }
}

static void twin_release(struct twin *t)
{
    for (uint32_t i = 0; i < t->n_tokens; i++)
        free(t->token[i]);
    free(t->symbols);
}

static void check_twin(const char *text, size_t n, uint32_t vocab)
{
    struct buf json = BUF_INIT;
    struct tok_model got;
    struct twin *want = mem_array(1, sizeof *want);
    tok_train(text, n, vocab, &json);
    tok_model_read(json.data, json.len, &got);
    twin_read(want, text, n);
    twin_train(want, vocab, 2);
    assert_int_equal(got.n_tokens, want->n_tokens);
    assert_int_equal(got.n_merges, want->n_merges);
    assert_memory_equal(got.merge, want->merge, got.n_merges * sizeof *got.merge);
    twin_release(want);
    free(want);
    tok_model_release(&got);
    buf_release(&json);
}

static void test_naive_twin(void **state)
{
    (void)state;
    struct buf text = BUF_INIT;
    tok_text(&text, 20000, 41);
    check_twin(text.data, text.len, 600);
    static const char *const small[] = {"a", "aaaa", "aaaaaaaaa aaa aa", "abab abab aabb",
        "abc abc bc bc ab ab", "xyxyxyx yxyxy xx yy", "\xff\xfe bad bytes \xff bad",
        "日本日本 日本"};
    for (size_t i = 0; i < COUNT(small); i++)
        check_twin(small[i], strlen(small[i]), 400);
    /* Few letters: the same token is made from different parts, and pairs overlap. */
    for (uint64_t i = 0; i < 60; i++) {
        buf_clear(&text);
        for (uint64_t k = 0; k < 800; k++) {
            uint64_t r = rng_u64(rng_key(42, i), k);
            buf_add_char(&text, r % 11 ? (char)('a' + (r >> 8) % (1 + i % 4)) : ' ');
        }
        check_twin(text.data, text.len, 300 + (uint32_t)i * 5);
    }
    buf_release(&text);
}

/* -- files -- */

static void train_files(char *const *paths, size_t n, int threads, size_t max_words,
    struct buf *json, struct bpe_train_stats *stats)
{
    struct bpe_train_opts opts = BPE_TRAIN_OPTS_DEFAULT;
    struct bpe_trainer *t = NULL;
    struct err e = {0};
    opts.vocab = 700;
    opts.threads = threads;
    opts.max_words = max_words;
    assert_int_equal(bpe_trainer_new(&opts, &t, &e), 0);
    assert_int_equal(bpe_trainer_add_files(t, paths, n, &e), 0);
    buf_clear(json);
    assert_int_equal(bpe_trainer_finish(t, json, stats, &e), 0);
    bpe_trainer_free(&t);
}

/* Files smaller and larger than a block, one without a line's end, one empty. */
static void test_threads_and_order(void **state)
{
    (void)state;
    static const size_t sizes[] = {100, 5 << 20, 0, 700000, 3 << 20};
    char *dir = temp_dir_make(), *paths[COUNT(sizes)], *backwards[COUNT(sizes)];
    struct buf text = BUF_INIT, all = BUF_INIT, first = BUF_INIT, other = BUF_INIT;
    struct bpe_train_stats stats = {0};
    struct err e = {0};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        buf_clear(&text);
        if (i == 4)
            for (size_t k = 0; k < sizes[i]; k += 3)
                buf_add_str(&text, "é0");
        else
            tok_text(&text, sizes[i], 50 + i);
        buf_add(&all, text.data, text.len);
        paths[i] = mem_printf("%s/%zu.txt", dir, i);
        backwards[COUNT(sizes) - 1 - i] = paths[i];
        assert_int_equal(fs_write_atomic(paths[i], text.data, text.len, &e), 0);
    }
    train_files(paths, COUNT(sizes), 1, 100000, &first, &stats);
    assert_int_equal(stats.text_bytes, all.len);
    assert_int_equal(stats.forgotten_below, 1);
    for (int threads = 2; threads <= 7; threads += 5) {
        train_files(paths, COUNT(sizes), threads, 100000, &other, &stats);
        assert_string_equal(other.data, first.data);
    }
    train_files(backwards, COUNT(sizes), 3, 100000, &other, &stats);
    assert_string_equal(other.data, first.data);
    /* With words forgotten the result is another, but the same for any number of threads. */
    train_files(paths, COUNT(sizes), 1, 500, &first, &stats);
    assert_true(stats.forgotten_below > 1 && stats.distinct_words <= 500);
    train_files(paths, COUNT(sizes), 3, 500, &other, &stats);
    assert_string_equal(other.data, first.data);
    for (size_t i = 0; i < COUNT(sizes); i++)
        free(paths[i]);
    temp_dir_remove(&dir);
    buf_release(&text);
    buf_release(&all);
    buf_release(&first);
    buf_release(&other);
}

/* A character across the end of a block is counted: here it is one of the two that are needed. */
static void test_cut_character(void **state)
{
    (void)state;
    char *dir = temp_dir_make(), *path = mem_printf("%s/one-line.txt", dir);
    struct buf text = BUF_INIT, json = BUF_INIT;
    struct bpe_train_stats stats;
    struct tok_model m;
    struct err e = {0};
    for (int i = 0; i < (2 << 20) - 2; i++)
        buf_add_char(&text, '1');
    buf_add_str(&text, "日111日1");
    assert_int_equal(fs_write_atomic(path, text.data, text.len, &e), 0);
    train_files(&path, 1, 2, 1000, &json, &stats);
    tok_model_read(json.data, json.len, &m);
    assert_int_not_equal(tok_model_find(&m, "æĹ¥"), UINT32_MAX); /* the bytes e6 97 a5 */
    tok_model_release(&m);
    temp_dir_remove(&dir);
    free(path);
    buf_release(&text);
    buf_release(&json);
}

static int at_once(void)
{
    return 1;
}

static void test_errors(void **state)
{
    (void)state;
    struct bpe_train_opts good = BPE_TRAIN_OPTS_DEFAULT, opts = good;
    struct bpe_trainer *t = NULL;
    struct bpe_train_stats stats;
    struct buf json = BUF_INIT;
    struct err e = {0};
    opts.vocab = 256;
    assert_int_equal(bpe_trainer_new(&opts, &t, &e), ERR_INPUT);
    opts = good;
    opts.threads = 0;
    assert_int_equal(bpe_trainer_new(&opts, &t, &e), ERR_INPUT);
    assert_null(t);
    assert_int_equal(bpe_trainer_new(&good, &t, &e), 0);
    assert_int_equal(bpe_trainer_finish(t, &json, &stats, &e), ERR_INPUT);
    char name[] = "/nonexistent/a", root[] = "/", *missing[] = {name}, *folder[] = {root};
    assert_int_equal(bpe_trainer_add_files(t, missing, 1, &e), ERR_IO);
    assert_non_null(strstr(e.msg, "/nonexistent/a"));
    assert_int_equal(bpe_trainer_add_files(t, folder, 1, &e), ERR_INPUT);
    bpe_trainer_free(&t);
    opts = good;
    opts.stopped = at_once;
    assert_int_equal(bpe_trainer_new(&opts, &t, &e), 0);
    assert_int_equal(bpe_trainer_add_files(t, missing, 1, &e), ERR_STOPPED);
    bpe_trainer_free(&t);
    buf_release(&json);
}

/* The smallest vocabulary is the bytes and <|endoftext|>; a small text ends early. */
static void test_sizes(void **state)
{
    (void)state;
    struct buf json = BUF_INIT;
    tok_train("hello hello", 11, 257, &json);
    struct tokenizer *t = tok_parse(json.data, json.len);
    assert_int_equal(tokenizer_vocab(t), 257);
    assert_int_equal(tokenizer_eot(t), 256);
    tokenizer_free(&t);
    buf_clear(&json);
    tok_train("hello hello", 11, 1000, &json);
    t = tok_parse(json.data, json.len);
    assert_int_equal(tokenizer_vocab(t), 257 + 4); /* " hello" occurs once: only "hello" grows */
    tokenizer_free(&t);
    buf_release(&json);
}

static void test_prune(void **state)
{
    (void)state;
    struct word_counts w;
    char word[16];
    word_counts_init(&w);
    for (int i = 0; i < 3000; i++) {
        int n = snprintf(word, sizeof word, "w%d", i);
        word_counts_add(&w, word, (uint32_t)n, 1 + (uint64_t)(i % 10));
    }
    word_counts_add(&w, "w0", 2, 8); /* 9 now */
    assert_int_equal(w.len, 3000);
    assert_int_equal(word_counts_prune(&w, 3000), 1);
    assert_int_equal(word_counts_prune(&w, 700), 9); /* 300 with 10, 300 + 1 with 9 */
    assert_int_equal(w.len, 601);
    word_counts_add(&w, "w9", 2, 1);
    assert_int_equal(w.len, 601);
    uint64_t sum = 0;
    for (size_t i = 0; i < w.len; i++)
        sum += w.entries[i].count;
    assert_int_equal(sum, 300 * 10 + 301 * 9 + 1);
    word_counts_release(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_naive_twin),
        cmocka_unit_test(test_threads_and_order),
        cmocka_unit_test(test_cut_character),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_prune),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
