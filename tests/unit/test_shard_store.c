/*
 * The shard store against a naive concatenation of the same documents: rows over block and shard
 * borders, document starts, both token widths; and damage of every kind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/rng.h"
#include "loader/shard_store.h"
#include "loader/source.h"
#include "tests/unit/temp_dir.h"

enum { EOT = 3 };

/* What the store should hold: the stream and where documents begin. */
struct naive {
    uint32_t *tokens;
    uint8_t *starts;
    size_t count;
};

static struct naive corpus[SPLIT_COUNT];
static char *dir;

static char *part(const char *name)
{
    return mem_printf("%s/%s", dir, name);
}

static void make_dir(void)
{
    dir = temp_dir_make();
}

static void drop_dir(void)
{
    temp_dir_remove(&dir);
    for (int k = 0; k < SPLIT_COUNT; k++) {
        free(corpus[k].tokens);
        free(corpus[k].starts);
        memset(&corpus[k], 0, sizeof corpus[k]);
    }
}

static void naive_add(struct naive *n, const uint32_t *ids, size_t len)
{
    n->tokens = mem_grow_array(n->tokens, n->count + len, sizeof *n->tokens);
    n->starts = mem_grow_array(n->starts, n->count + len, 1);
    memcpy(n->tokens + n->count, ids, len * sizeof *ids);
    memset(n->starts + n->count, 0, len);
    n->starts[n->count] = 1;
    n->count += len;
}

/* Documents of 1 to 3 blocks' length; some are a lone eot, some end exactly on a block's border,
 * and eot stands inside of documents too: starts must come from the recorded ends. */
static size_t document(uint64_t key, size_t i, int vocab, size_t block, size_t fill, uint32_t *ids)
{
    size_t n = 1 + (size_t)(rng_u64(key, i) % (3 * block));
    if (i % 7 == 0)
        n = 1;
    if (i % 5 == 0)
        n = block - fill % block;
    ids[0] = EOT;
    for (size_t k = 1; k < n; k++)
        ids[k] = k % 11 == 0 ? EOT : (uint32_t)(rng_u64(key + i + 1, k) % (uint64_t)vocab);
    if (n > 1)
        ids[n - 1] = (uint32_t)vocab - 1; /* the largest id is there */
    return n;
}

static void build(int vocab, int block, const int shards[SPLIT_COUNT], int documents)
{
    struct manifest m = {
        .name = mem_strdup("t"), .vocab = vocab, .eot = EOT, .block_tokens = block};
    struct shard_kind kind = {.tokenizer_sha256 = m.tokenizer_sha256,
        .vocab = vocab,
        .eot = EOT,
        .block_tokens = block,
        .max_bytes = 1 << 20};
    uint32_t *ids = mem_array(4 * (size_t)block, sizeof *ids);
    struct err e = {0};
    memset(m.tokenizer_sha256, 'a', SHA256_HEX - 1);
    memset(m.fingerprint, 'b', SHA256_HEX - 1);
    make_dir();
    for (int k = 0; k < SPLIT_COUNT; k++) {
        m.splits[k].shard_count = shards[k];
        m.splits[k].shards = mem_array((size_t)shards[k], sizeof *m.splits[k].shards);
        for (int s = 0; s < shards[k]; s++) {
            struct manifest_shard *info = &m.splits[k].shards[s];
            struct shard_writer *w;
            size_t fill = 0;
            snprintf(info->file, sizeof info->file, "%s-%d.shard", split_name(k), s);
            char *path = part(info->file);
            assert_int_equal(shard_writer_new(path, &kind, &w, &e), 0);
            for (int d = 0; d < documents; d++) {
                size_t n =
                    document((uint64_t)(100 * k + s), (size_t)d, vocab, (size_t)block, fill, ids);
                fill += n;
                naive_add(&corpus[k], ids, n);
                assert_int_equal(shard_writer_document(w, ids, n, &e), 0);
            }
            assert_int_equal(shard_writer_seal(&w, info, &e), 0);
            free(path);
        }
    }
    assert_int_equal(manifest_write(dir, &m, &e), 0);
    manifest_release(&m);
    free(ids);
}

/* Visits every row once, not in order. */
static uint64_t scattered(uint64_t i, uint64_t rows)
{
    return (i * 7919 + 13) % rows;
}

static int compare_rows(int split, int seq, int cache)
{
    struct source *s;
    struct err e = {0};
    uint32_t *tokens = mem_array((size_t)seq + 1, sizeof *tokens);
    uint8_t *starts = mem_array((size_t)seq, 1);
    const struct naive *n = &corpus[split];
    assert_int_equal(source_open(dir, cache, &s, &e), 0);
    uint64_t rows = source_rows(s, split, seq);
    assert_int_equal(rows, (n->count - 1) / (size_t)seq);
    for (uint64_t i = 0; i < rows; i++) {
        uint64_t row = scattered(i, rows);
        size_t at = (size_t)row * (size_t)seq;
        if (source_row(s, split, row, seq, tokens, starts, &e) < 0)
            fail_msg("%s", e.msg);
        assert_memory_equal(tokens, n->tokens + at, ((size_t)seq + 1) * 4);
        assert_int_equal(starts[0], 1);
        assert_memory_equal(starts + 1, n->starts + at + 1, (size_t)seq - 1);
    }
    assert_int_equal(source_row(s, split, rows, seq, tokens, starts, &e), ERR_INPUT);
    source_close(&s);
    free(tokens);
    free(starts);
    return (int)rows;
}

static void test_rows(void **state)
{
    (void)state;
    static const struct {
        int vocab, block, shards[SPLIT_COUNT], documents;
    } cases[] = {{1000, 64, {3, 1}, 40}, {65536, 32, {1, 1}, 30}, {65537, 64, {2, 1}, 20},
        {200000, 8, {4, 2}, 9}, {300, 1, {2, 1}, 12}};
    static const int seqs[] = {1, 2, 7, 32, 64, 65, 200};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        build(cases[c].vocab, cases[c].block, cases[c].shards, cases[c].documents);
        for (size_t q = 0; q < sizeof seqs / sizeof *seqs; q++)
            for (int split = 0; split < SPLIT_COUNT; split++)
                if (corpus[split].count > (size_t)seqs[q])
                    assert_true(compare_rows(split, seqs[q], q % 2 ? 2 : 16) > 0);
        struct err e = {0};
        if (source_verify(dir, NULL, NULL, &e) != 0)
            fail_msg("%s", e.msg);
        drop_dir();
    }
}

/* Two bytes a token up to 65,536 ids, four beyond, as the file itself says. */
static void test_dtype(void **state)
{
    (void)state;
    static const struct {
        int vocab, dtype;
    } cases[] = {{300, 2}, {65536, 2}, {65537, 4}, {100352, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t ids[3] = {EOT, 7, (uint32_t)cases[i].vocab - 1}, ends[1] = {3};
        struct block b = {.tokens = ids, .ends = ends, .token_count = 3, .end_count = 1}, got = {0};
        struct buf v = BUF_INIT;
        struct err e = {0};
        assert_int_equal(block_dtype(cases[i].vocab), cases[i].dtype);
        assert_int_equal(block_encode(&b, 5, cases[i].dtype, &v, &e), 0);
        assert_int_equal(v.data[6], cases[i].dtype);
        assert_int_equal(block_decode(v.data, v.len, 5, cases[i].vocab, &got, &e), 0);
        assert_memory_equal(got.tokens, ids, sizeof ids);
        assert_int_equal(got.ends[0], 3);
        /* a smaller vocabulary refuses the id; another number refuses the block */
        assert_int_equal(block_decode(v.data, v.len, 5, cases[i].vocab - 1, &got, &e), ERR_CORRUPT);
        assert_non_null(strstr(e.msg, "token id"));
        assert_int_equal(block_decode(v.data, v.len, 6, cases[i].vocab, &got, &e), ERR_CORRUPT);
        block_release(&got);
        buf_release(&v);
    }
}

/* Every bit of an encoded block, flipped alone, is noticed; so is every shorter length. */
static void test_block_damage(void **state)
{
    (void)state;
    uint32_t ids[40], ends[3] = {5, 17, 40};
    for (int i = 0; i < 40; i++)
        ids[i] = (uint32_t)(i * i % 50);
    struct block b = {.tokens = ids, .ends = ends, .token_count = 40, .end_count = 3}, got = {0};
    struct buf v = BUF_INIT;
    struct err e = {0};
    assert_int_equal(block_encode(&b, 1, 2, &v, &e), 0);
    for (size_t bit = 0; bit < v.len * 8; bit++) {
        v.data[bit / 8] ^= (char)(1 << bit % 8);
        assert_true(block_decode(v.data, v.len, 1, 50, &got, &e) < 0);
        v.data[bit / 8] ^= (char)(1 << bit % 8);
    }
    for (size_t n = 0; n < v.len; n++)
        assert_true(block_decode(v.data, n, 1, 50, &got, &e) < 0);
    assert_int_equal(block_decode(v.data, v.len, 1, 50, &got, &e), 0);
    block_release(&got);
    buf_release(&v);
}

static void write_byte(const char *path, off_t at, int flip)
{
    uint8_t c;
    chmod(path, 0644);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &c, 1, at), 1);
    c ^= (uint8_t)flip;
    assert_int_equal(pwrite(fd, &c, 1, at), 1);
    close(fd);
}

/* A flip anywhere in the file fails `verify`, and no row that reads well differs from what was
 * written. */
static void test_file_damage(void **state)
{
    (void)state;
    static const int shards[SPLIT_COUNT] = {1, 0};
    enum { SEQ = 50 };
    uint32_t tokens[SEQ + 1];
    uint8_t starts[SEQ];
    struct err e = {0};
    build(1000, 256, shards, 30);
    char *path = part("train-0.shard");
    int64_t size = fs_size(path, &e);
    int refused = 0;
    for (int64_t at = 0; at < size; at += 211) {
        struct source *s;
        write_byte(path, at, 0x10);
        assert_true(source_verify(dir, NULL, NULL, &e) < 0);
        assert_int_equal(source_open(dir, 4, &s, &e), 0);
        for (uint64_t i = 0; i < source_rows(s, SPLIT_TRAIN, SEQ); i += 3)
            if (source_row(s, SPLIT_TRAIN, i, SEQ, tokens, starts, &e) == 0)
                assert_memory_equal(tokens, corpus[0].tokens + i * SEQ, sizeof tokens);
            else
                refused++;
        source_close(&s);
        write_byte(path, at, 0x10);
    }
    assert_true(refused > 0);
    assert_int_equal(source_verify(dir, NULL, NULL, &e), 0);
    free(path);
    drop_dir();
}

static void test_truncated(void **state)
{
    (void)state;
    static const int shards[SPLIT_COUNT] = {1, 0};
    static const int64_t cut[] = {1, 4096, 100000};
    uint32_t tokens[9];
    uint8_t starts[8];
    struct err e = {0};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        struct source *s;
        build(1000, 256, shards, 60);
        char *path = part("train-0.shard");
        int64_t size = fs_size(path, &e);
        chmod(path, 0644);
        assert_true(size > cut[i]);
        assert_int_equal(truncate(path, size - cut[i]), 0);
        assert_int_equal(source_open(dir, 4, &s, &e), 0);
        assert_int_equal(source_row(s, SPLIT_TRAIN, 0, 8, tokens, starts, &e), ERR_CORRUPT);
        assert_non_null(strstr(e.msg, "train-0.shard"));
        assert_int_equal(source_verify(dir, NULL, NULL, &e), ERR_CORRUPT);
        source_close(&s);
        free(path);
        drop_dir();
    }
}

/* Cut off while it is open: reading a map of it would end the process. */
static void test_cut_while_open(void **state)
{
    (void)state;
    static const int shards[SPLIT_COUNT] = {1, 0};
    struct source *s;
    struct err e = {0};
    struct block b = {0};
    build(1000, 256, shards, 60);
    char *path = part("train-0.shard");
    chmod(path, 0644);
    assert_int_equal(source_open(dir, 4, &s, &e), 0);
    assert_int_equal(source_block(s, SPLIT_TRAIN, 0, &b, NULL, NULL, &e), 0);
    assert_int_equal(truncate(path, 4096), 0);
    assert_int_equal(source_block(s, SPLIT_TRAIN, 1, &b, NULL, NULL, &e), ERR_CORRUPT);
    assert_non_null(strstr(e.msg, "train-0.shard: block 1: the file has become shorter"));
    block_release(&b);
    source_close(&s);
    free(path);
    drop_dir();
}

/* The error names shard and block; other blocks stay readable. */
static void test_names_block(void **state)
{
    (void)state;
    static const int shards[SPLIT_COUNT] = {2, 0};
    struct source *s;
    struct err e = {0};
    struct block b = {0};
    build(1000, 256, shards, 30);
    char *path = part("train-1.shard");
    struct buf file = BUF_INIT;
    assert_int_equal(fs_read(path, 1 << 30, &file, &e), 0);
    /* a header in the middle, found by its magic */
    const char *p = file.data;
    for (int k = 0; k < 3; k++) {
        p = memmem(p, file.len - (size_t)(p - file.data), "FBBK", 4);
        assert_non_null(p);
        p += 4;
    }
    write_byte(path, p - file.data + 60, 1);
    assert_int_equal(source_open(dir, 4, &s, &e), 0);
    int failures = 0;
    for (uint64_t i = 0; i < source_blocks(s, SPLIT_TRAIN); i++)
        if (source_block(s, SPLIT_TRAIN, i, &b, NULL, NULL, &e) < 0)
            failures++;
    assert_int_equal(failures, 1);
    assert_non_null(strstr(e.msg, "train-1.shard: block "));
    assert_non_null(strstr(e.msg, "checksum"));
    block_release(&b);
    buf_release(&file);
    source_close(&s);
    free(path);
    drop_dir();
}

/* The manifest refuses what does not fit together, naming the key. */
static void test_manifest(void **state)
{
    (void)state;
    static const int shards[SPLIT_COUNT] = {2, 1};
    static const struct {
        const char *from, *to, *says;
    } cases[] = {{"\"version\": 1", "\"version\": 2", "version"},
        {"\"vocab\": 1000", "\"vocab\": 1001", "root"}, {"\"eot\": 3", "\"eot\": 1000", "eot"},
        {"\"policy\": \"eot-first\"", "\"policy\": \"x\"", "policy"},
        {"train-0.shard", "../0.shard", "file"}, {"\"tokens\": ", "\"tokens\": -", "tokens"},
        {"\"hash\": \"", "\"hash\": \"z", "hash"}, {"\"blocks\": ", "\"blocks\": 1", "blocks"},
        {"\"documents\": 40", "\"documents\": 41", "sums"}, {"{", "[", "JSON"}};
    struct buf text = BUF_INIT;
    struct err e = {0};
    build(1000, 64, shards, 20);
    char *path = part(MANIFEST_FILE);
    assert_int_equal(fs_read(path, 1 << 20, &text, &e), 0);
    struct manifest m;
    assert_int_equal(manifest_parse(text.data, text.len, "m", &m, &e), 0);
    manifest_release(&m);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *at = strstr(text.data, cases[i].from);
        if (!at)
            fail_msg("case %zu: not in the manifest", i);
        char *changed = mem_printf(
            "%.*s%s%s", (int)(at - text.data), text.data, cases[i].to, at + strlen(cases[i].from));
        int rc = manifest_parse(changed, strlen(changed), "m", &m, &e);
        if (rc == 0 || !strstr(e.msg, cases[i].says))
            fail_msg("case %zu: %s", i, rc ? e.msg : "accepted");
        free(changed);
    }
    buf_release(&text);
    free(path);
    drop_dir();
}

/* The root follows contents and order, and nothing else. */
static void test_root(void **state)
{
    (void)state;
    static const int shards[SPLIT_COUNT] = {2, 1};
    struct manifest m;
    char first[SHA256_HEX], root[SHA256_HEX];
    struct err e = {0};
    for (int again = 0; again < 2; again++) {
        build(1000, 64, shards, 20);
        assert_int_equal(manifest_load(dir, &m, &e), 0);
        if (again)
            assert_string_equal(m.root, first);
        memcpy(first, m.root, sizeof first);
        drop_dir();
        if (!again)
            manifest_release(&m);
    }
    struct manifest_shard t = m.splits[0].shards[0];
    m.splits[0].shards[0] = m.splits[0].shards[1];
    m.splits[0].shards[1] = t;
    manifest_root(&m, root);
    assert_string_not_equal(root, first);
    manifest_release(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_dtype),
        cmocka_unit_test(test_block_damage),
        cmocka_unit_test(test_file_damage),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_cut_while_open),
        cmocka_unit_test(test_names_block),
        cmocka_unit_test(test_manifest),
        cmocka_unit_test(test_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
