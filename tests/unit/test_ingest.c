/*
 * Ingest: the same shards for any number of threads and order of inputs; copies, validation split,
 * JSONL and its errors; what an interrupted, repeated or contradicting call does.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "loader/ingest.h"
#include "loader/inspect.h"
#include "loader/source.h"
#include "tests/unit/temp_dir.h"
#include "tests/unit/text_case.h"

static char *dir, *tokenizer_path;

static char *part(const char *name)
{
    return mem_printf("%s/%s", dir, name);
}

static void write_file(const char *name, const char *text, size_t n)
{
    text_case_file(dir, name, text, n);
}

static void write_corpus(const char *under, int count)
{
    text_case_corpus(dir, under, 0, count);
}

static int set_up(void **state)
{
    (void)state;
    dir = temp_dir_make();
    text_case_tokenizer(dir, "tokenizer.json");
    tokenizer_path = part("tokenizer.json");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    temp_dir_remove(&dir);
    free(tokenizer_path);
    return 0;
}

static struct ingest_options options(const char *out, const char *const *inputs, int count)
{
    return (struct ingest_options){.tokenizer = tokenizer_path,
        .out = out,
        .name = "t",
        .inputs = inputs,
        .input_count = count,
        .read = {.field = "text", .threads = 2},
        .val_share = 0.2,
        .seed = 1,
        .shard_bytes = 6000,
        .block_tokens = 512};
}

static struct ingest_report must_ingest(const struct ingest_options *o)
{
    struct ingest_report r;
    struct err e = {0};
    if (ingest_run(o, NULL, NULL, &r, &e) < 0)
        fail_msg("%s", e.msg);
    if (!r.existed && source_verify(o->out, NULL, NULL, &e) < 0)
        fail_msg("%s", e.msg);
    return r;
}

static void assert_same_files(const char *a, const char *b)
{
    struct manifest m;
    assert_int_equal(manifest_load(a, &m, NULL), 0);
    for (int k = 0; k < SPLIT_COUNT; k++)
        for (int i = 0; i < m.splits[k].shard_count; i++) {
            char got[SHA256_HEX], *path = mem_printf("%s/%s", b, m.splits[k].shards[i].file);
            assert_int_equal(hash_sha256_file(path, got, NULL, NULL), 0);
            assert_string_equal(got, m.splits[k].shards[i].sha256);
            free(path);
        }
    manifest_release(&m);
}

static void test_same_for_any_threads(void **state)
{
    (void)state;
    char *a = part("corpus/a"), *b = part("corpus/b"), *c = part("corpus/c"), *out1 = part("one");
    const char *forth[] = {a, b, c}, *back[] = {c, b, a};
    write_corpus("corpus", 60);
    struct ingest_options o = options(out1, forth, 3);
    o.read.threads = 1;
    struct ingest_report first = must_ingest(&o);
    assert_int_equal(first.documents, 60);
    assert_true(first.shards > 3);
    assert_true(first.val_tokens > 0);
    static const int threads[] = {2, 3, 8};
    for (int i = 0; i < 3; i++) {
        char *out = mem_printf("%s/threads-%d", dir, threads[i]);
        struct ingest_options p = options(out, back, 3);
        p.read.threads = threads[i];
        assert_string_equal(must_ingest(&p).root, first.root);
        assert_same_files(out1, out);
        free(out);
    }
    char *other = part("other-seed");
    struct ingest_options q = options(other, forth, 3);
    q.seed = 2;
    assert_string_not_equal(must_ingest(&q).root, first.root);
    free(other);
    free(out1);
    free(a);
    free(b);
    free(c);
}

/* All documents of a split, each as one string in a JSON object (a set). */
static json_t *documents_of(const char *out, int split)
{
    struct source *s;
    struct block b = {0};
    struct buf text = BUF_INIT;
    json_t *set = json_object();
    assert_int_equal(source_open(out, 4, &s, NULL), 0);
    for (uint64_t i = 0; i < source_blocks(s, split); i++) {
        size_t end = 0;
        assert_int_equal(source_block(s, split, i, &b, NULL, NULL, NULL), 0);
        for (size_t k = 0; k < b.token_count; k++) {
            if (b.tokens[k] < 256)
                buf_add_char(&text, (char)b.tokens[k]);
            if (end < b.end_count && b.ends[end] == k + 1) {
                assert_null(json_object_get(set, text.data)); /* no copies */
                json_object_set_new(set, text.data, json_true());
                buf_clear(&text);
                end++;
            }
        }
    }
    assert_int_equal(text.len, 0);
    buf_release(&text);
    block_release(&b);
    source_close(&s);
    return set;
}

/* Copies are dropped wherever they lie; a document keeps its side when the corpus grows. */
static void test_copies_and_split(void **state)
{
    (void)state;
    char *in = part("grow"), *small = part("small"), *large = part("large");
    const char *inputs[] = {in};
    write_corpus("grow", 40);
    write_file("grow/copy.txt", "Document x", 10);
    write_file("grow/z/copy-again.txt", "Document x", 10);
    const char lines[] = "{\"text\": \"Document x\"}\n{\"text\": \"\"}\n";
    write_file("grow/lines.jsonl", lines, strlen(lines));
    write_file("grow/binary.bin", "a\0b", 3);
    write_file("grow/.hidden", "hidden", 6);
    struct ingest_options o = options(small, inputs, 1);
    struct ingest_report r = must_ingest(&o);
    assert_int_equal(r.documents, 41);
    assert_int_equal(r.duplicates, 2);
    assert_int_equal(r.empty, 1);
    assert_int_equal(r.binary_files, 1);
    write_corpus("grow", 80);
    o.out = large;
    assert_int_equal(must_ingest(&o).documents, 81);
    size_t total = 0;
    for (int k = 0; k < SPLIT_COUNT; k++) {
        json_t *few = documents_of(small, k), *many = documents_of(large, k), *v;
        const char *text;
        total += json_object_size(many);
        assert_true(json_object_size(few) > 0);
        json_object_foreach (few, text, v)
            assert_non_null(json_object_get(many, text));
        json_decref(few);
        json_decref(many);
    }
    assert_int_equal(total, 81);
    free(large);
    free(small);
    free(in);
}

static void test_jsonl_errors(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"{\"text\": \"a\"}\n\n{\"text\": \"b\"\n", "bad.jsonl:3: not JSON"},
        {"{\"text\": \"a\"}\n{\"txt\": \"b\"}\n", "bad.jsonl:2: no string \"text\""},
        {"{\"text\": 5}", "bad.jsonl:1: no string \"text\""},
        {"[1]\n", "bad.jsonl:1: no string \"text\""},
        {"\xff\n", "bad.jsonl:1: not JSON"},
    };
    char *in = part("bad.jsonl"), *out = part("bad-out");
    const char *inputs[] = {in};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ingest_options o = options(out, inputs, 1);
        struct ingest_report r;
        struct err e = {0};
        write_file("bad.jsonl", cases[i].text, strlen(cases[i].text));
        assert_int_equal(ingest_run(&o, NULL, NULL, &r, &e), ERR_INPUT);
        if (!strstr(e.msg, cases[i].says))
            fail_msg("case %zu: %s", i, e.msg);
        assert_false(fs_exists(out));
    }
    /* passed over when asked for; \r\n, unicode, a last line without an end, another field */
    const char good[] = "{\"t\": \"caf\\u00e9\"}\r\n{\n{\"t\": \"b\\u0000c\"}";
    write_file("bad.jsonl", good, strlen(good));
    struct ingest_options o = options(out, inputs, 1);
    o.read.field = "t";
    o.read.skip_bad = 1;
    o.val_share = 0;
    struct ingest_report r = must_ingest(&o);
    assert_int_equal(r.documents, 2);
    assert_int_equal(r.bad_lines, 1);
    assert_int_equal(r.text_bytes, 5 + 3);
    assert_int_equal(r.train_tokens, 5 + 3 + 2);
    free(out);
    free(in);
}

static int stop_at_encode(void *arg, const char *what, uint64_t done, uint64_t total)
{
    (void)arg;
    (void)done;
    (void)total;
    return strcmp(what, "encode") == 0;
}

static void test_again(void **state)
{
    (void)state;
    char *in = part("again"), *out = part("again-out"), *left = part("again-out.partial");
    const char *inputs[] = {in};
    struct ingest_report r;
    struct err e = {0};
    write_corpus("again", 20);
    struct ingest_options o = options(out, inputs, 1);
    /* stopped: nothing published; the rest of it is in nobody's way */
    assert_int_equal(ingest_run(&o, stop_at_encode, NULL, &r, &e), ERR_STOPPED);
    assert_false(fs_exists(out));
    assert_true(fs_exists(left));
    write_file("again-out.partial/train-00000.shard", "rubbish", 7);
    struct ingest_report first = must_ingest(&o);
    assert_false(fs_exists(left));
    /* the same again: said, nothing done */
    struct ingest_report second = must_ingest(&o);
    assert_int_equal(second.existed, 1);
    assert_string_equal(second.root, first.root);
    /* other inputs or options: refused, nothing touched */
    write_file("again/new.txt", "new", 3);
    assert_int_equal(ingest_run(&o, NULL, NULL, &r, &e), ERR_STATE);
    assert_int_equal(source_verify(out, NULL, NULL, &e), 0);
    /* a directory that is no source: refused */
    o.out = in;
    assert_int_equal(ingest_run(&o, NULL, NULL, &r, &e), ERR_STATE);
    /* a directory of the user's with the name of ours: refused, not emptied */
    char *other = part("other"), *mine = part("other.partial/mine.txt");
    write_corpus("other.partial", 1);
    write_file("other.partial/mine.txt", "mine", 4);
    o.out = other;
    assert_int_equal(ingest_run(&o, NULL, NULL, &r, &e), ERR_INPUT);
    assert_true(fs_exists(mine));
    free(mine);
    free(other);
    free(left);
    free(out);
    free(in);
}

static void test_limit_and_row(void **state)
{
    (void)state;
    char *in = part("limit"), *out = part("limit-out");
    const char *inputs[] = {in};
    struct source *s;
    struct buf text = BUF_INIT;
    write_corpus("limit", 40);
    struct ingest_options o = options(out, inputs, 1);
    o.max_bytes = 12000;
    struct ingest_report r = must_ingest(&o);
    assert_true(r.text_bytes <= 12000 && r.text_bytes > 6000);
    assert_int_equal(source_open(out, 4, &s, NULL), 0);
    assert_int_equal(inspect_row(s, SPLIT_TRAIN, 0, 64, tokenizer_path, &text, NULL), 0);
    assert_non_null(strstr(text.data, "⟦document⟧Document "));
    source_close(&s);
    buf_release(&text);
    free(out);
    free(in);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_for_any_threads),
        cmocka_unit_test(test_copies_and_split),
        cmocka_unit_test(test_jsonl_errors),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_limit_and_row),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
