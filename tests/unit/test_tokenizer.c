// tokenizer: splitting by tables, encoding against a naive twin, any bytes back again, bounded
// work, and every kind of wrong file.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/byte_alphabet.h"
#include "common/rng.h"
#include "common/split.h"
#include "common/utf8.h"
#include "tests/unit/tok_help.h"

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static struct buf json; /* a tokenizer of 420 tokens */
static struct tokenizer *tok;
static struct tokenizer_scratch *scratch;
static struct tok_model model;

static int set_up(void **state)
{
    (void)state;
    struct buf text = BUF_INIT;
    tok_text(&text, 60000, 1);
    tok_train(text.data, text.len, 420, &json);
    tok = tok_parse(json.data, json.len);
    scratch = tokenizer_scratch_new(tok);
    tok_model_read(json.data, json.len, &model);
    buf_release(&text);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    tok_model_release(&model);
    tokenizer_scratch_free(&scratch);
    tokenizer_free(&tok);
    buf_release(&json);
    return 0;
}

/* -- UTF-8 and the alphabet -- */

static int put_utf8(uint32_t c, char out[4])
{
    static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, c >>= 6)
        out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(lead[n] | c);
    return n;
}

static void test_utf8(void **state)
{
    (void)state;
    char s[4];
    for (uint32_t c = 0; c < 0x120000; c++) {
        int n = put_utf8(c, s), want = (c >= 0xd800 && c <= 0xdfff) || c > 0x10ffff ? 0 : n;
        assert_int_equal(utf8_char_len(s, 4), want);
        if (n > 1)
            assert_int_equal(utf8_char_len(s, (size_t)n - 1), 0);
    }
    static const struct {
        const char *text;
        size_t n, valid;
    } cases[] = {{"", 0, 0}, {"plain ascii text", 16, 16}, {"12345678\xff", 9, 8},
        {"\xc0\x80", 2, 0}, {"\xc1\xbf", 2, 0}, {"\xe0\x9f\xbf", 3, 0}, {"\xf0\x8f\xbf\xbf", 4, 0},
        {"a\xc3", 2, 1}, {"\xc3\xa9\x80", 3, 2}, {"\xed\xa0\x80", 3, 0},
        {"\xf5\x80\x80\x80", 4, 0}};
    for (size_t i = 0; i < COUNT(cases); i++)
        assert_int_equal(utf8_valid_prefix(cases[i].text, cases[i].n), cases[i].valid);
}

static void test_alphabet(void **state)
{
    (void)state;
    static const struct {
        int byte;
        const char *spelling;
    } known[] = {
        {' ', "Ġ"}, {'\n', "Ċ"}, {'a', "a"}, {0, "Ā"}, {0x7f, "ġ"}, {0xad, "Ń"}, {0xe9, "é"}};
    struct buf s = BUF_INIT, back = BUF_INIT;
    for (size_t i = 0; i < COUNT(known); i++) {
        char byte = (char)known[i].byte;
        buf_clear(&s);
        byte_alphabet_spell(&s, &byte, 1);
        assert_string_equal(s.data, known[i].spelling);
    }
    buf_clear(&s);
    for (int b = 0; b < 256; b++)
        byte_alphabet_spell(&s, &(char){(char)b}, 1);
    assert_int_equal(byte_alphabet_read(s.data, s.len, &back), 0);
    assert_int_equal(back.len, 256);
    for (int b = 0; b < 256; b++)
        assert_int_equal((uint8_t)back.data[b], b);
    static const char *const foreign[] = {" ", "\n", "日", "\xc2\xad", "ń", "\xc4"};
    for (size_t i = 0; i < COUNT(foreign); i++)
        assert_int_equal(byte_alphabet_read(foreign[i], strlen(foreign[i]), &back), -1);
    buf_release(&s);
    buf_release(&back);
}

/* -- splitting -- */

/* Words of text, set apart by "|"; a raw byte is written as "<xx>". */
static int split_all(const char *regex, const char *text, size_t n, struct buf *out, struct err *e)
{
    struct split_pattern *pattern = NULL;
    struct split_iter it;
    struct split_word w;
    int rc = split_pattern_new(regex, &pattern, e);
    if (rc < 0)
        return rc;
    struct split_scratch *s = split_scratch_new(pattern);
    split_begin(&it, pattern, s, text, n);
    while ((rc = split_next(&it, &w, e)) > 0) {
        if (out->len)
            buf_add_char(out, '|');
        if (w.raw)
            buf_printf(out, "<%02x>", (uint8_t)w.text[0]);
        else
            buf_add(out, w.text, w.len);
    }
    split_scratch_free(&s);
    split_pattern_free(&pattern);
    return rc;
}

static void test_split(void **state)
{
    (void)state;
    static const struct {
        const char *regex, *text, *words;
    } cases[] = {
        {SPLIT_PATTERN_DEFAULT, "I don't, they'll!", "I| don|'t|,| they|'ll|!"},
        {SPLIT_PATTERN_DEFAULT, "'select' 'S x'd", "'select|'| '|S| x|'d"},
        {SPLIT_PATTERN_DEFAULT, "12345 67", "123|45| |67"},
        {SPLIT_PATTERN_DEFAULT, "a  b\n\n  c \n", "a| | b|\n\n| | c| \n"},
        {SPLIT_PATTERN_DEFAULT, "x = {};\n\ty", "x| =| {};\n|\ty"},
        {SPLIT_PATTERN_DEFAULT, "हिन्दी e\u0301a", "हिन्दी| e\u0301a"},
        {SPLIT_PATTERN_DEFAULT, "a\u180e b", "a|\u180e| b"},
        {SPLIT_PATTERN_DEFAULT,
            "a\xff\xfe"
            "b\xc3",
            "a|<ff>|<fe>|b|<c3>"},
        {SPLIT_PATTERN_DEFAULT, "<|endoftext|>", "<||endoftext||>"},
        {SPLIT_PATTERN_BYTE_LEVEL, "I don't 'Sx", "I| don|'t| '|Sx"},
        {SPLIT_PATTERN_BYTE_LEVEL, "12345 67\n\n x", "12345| 67|\n\n| x"},
        {"[0-9]+", "ab12cd3", "ab|12|cd|3"}, /* what no match takes is a word too */
        {"[\\s,]", "a b,c", "a| |b|,|c"},    /* \s in a class */
        {"[\\s,]", "a\u180e,c", "a\u180e|,|c"},
        {"[^]\\s]+", "ab] c", "ab|] |c"},      /* a bracket as the first member */
        {"[[:digit:]\\s]+", "a1 b", "a|1 |b"}, /* a POSIX class in a class */
        {"\\S+", "a\u180e b", "a\u180e| |b"}, {"[\\S]+", "ab c", "ab| |c"},
        {"(?<=a)b", "abb", "a|b|b"}, /* looking behind what was returned */
    };
    struct buf words = BUF_INIT;
    struct err e;
    for (size_t i = 0; i < COUNT(cases); i++) {
        buf_clear(&words);
        assert_int_equal(
            split_all(cases[i].regex, cases[i].text, strlen(cases[i].text), &words, &e), 0);
        assert_string_equal(words.data, cases[i].words);
    }
    buf_release(&words);
}

/* A pattern that is wrong, or that would take forever: an error, never text that is lost. */
static void test_split_errors(void **state)
{
    (void)state;
    static const struct {
        const char *regex;
        int rc;
    } cases[] = {{"(a", ERR_INPUT}, {"a*", ERR_INPUT}, {"(?=a)", ERR_INPUT}, {"", ERR_INPUT},
        {"\\C", ERR_INPUT}, {"(a+)+b|(a|a)+c|.", ERR_UNSUPPORTED}, {"a\\Kb*?", ERR_UNSUPPORTED}};
    struct buf words = BUF_INIT;
    char text[65];
    memset(text, 'a', sizeof text);
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct err e = {0};
        assert_int_equal(split_all(cases[i].regex, text, sizeof text, &words, &e), cases[i].rc);
        assert_true(e.msg[0]);
    }
    buf_release(&words);
}

/* More nesting than the JIT's stack holds: the interpreter goes on, with the same words. */
static void test_split_deep(void **state)
{
    (void)state;
    struct buf text = BUF_INIT, words = BUF_INIT;
    struct err e = {0};
    for (int i = 0; i < 200000; i++)
        buf_add_str(&text, i % 3 ? "a" : "b");
    int rc = split_all("(?:(a)|(b))+(?=!|$)", text.data, text.len, &words, &e);
    assert_true(rc == ERR_UNSUPPORTED || (rc == 0 && words.len == text.len));
    buf_release(&text);
    buf_release(&words);
}

/* -- encoding -- */

static void check_round_trip(
    const struct tokenizer *t, struct tokenizer_scratch *s, const char *text, size_t n)
{
    struct ids ids = {0};
    struct buf back = BUF_INIT;
    struct err e = {0};
    assert_int_equal(tokenizer_encode(t, s, text, n, &ids, &e), 0);
    assert_int_equal(tokenizer_decode(t, ids.data, ids.len, &back, &e), 0);
    assert_int_equal(back.len, n);
    if (n)
        assert_memory_equal(back.data, text, n);
    size_t bytes = 0;
    for (size_t i = 0; i < ids.len; i++)
        bytes += (size_t)tokenizer_bytes_of(t, ids.data[i]);
    assert_int_equal(bytes, n);
    ids_release(&ids);
    buf_release(&back);
}

/* Random bytes; and characters of all lengths with now and then a byte changed or missing. */
static void test_round_trip(void **state)
{
    (void)state;
    char text[512];
    for (uint64_t i = 0; i < 3000; i++) {
        size_t n = rng_u64(11, i) % 300, at = 0;
        for (size_t k = 0; at < n; k++) {
            uint64_t r = rng_u64(rng_key(12, i), k);
            if (i % 2)
                text[at++] = (char)r;
            else
                at += (size_t)put_utf8((uint32_t)((r >> 8) % 0x120000u) >> (r % 21), text + at);
            if (r % 37 == 0)
                text[at - 1] = (char)(r >> 32);
            at -= r % 41 == 0;
        }
        check_round_trip(tok, scratch, text, n);
    }
    static const char *const odd[] = {"", "\xef\xbb\xbf", "a\r\n\r\nb", "\xf0\x9f\x98",
        "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80", "\u2028\u2029\xc2\x85", "\x80\x80\x80",
        "e\u0301", "\x7f\x1b[0m"};
    for (size_t i = 0; i < COUNT(odd); i++)
        check_round_trip(tok, scratch, odd[i], strlen(odd[i]));
    check_round_trip(tok, scratch, "\0a\0\0", 4);
}

static void check_naive(const char *text, size_t n)
{
    struct ids got = {0}, want = {0};
    struct err e = {0};
    assert_int_equal(tokenizer_encode(tok, scratch, text, n, &got, &e), 0);
    tok_naive_encode(&model, text, n, &want);
    assert_int_equal(got.len, want.len);
    if (n)
        assert_memory_equal(got.data, want.data, got.len * sizeof *got.data);
    ids_release(&got);
    ids_release(&want);
}

/* Text like that of training, and words of few letters long enough for the heap. */
static void test_naive_twin(void **state)
{
    (void)state;
    struct buf text = BUF_INIT;
    for (uint64_t i = 0; i < 60; i++) {
        buf_clear(&text);
        tok_text(&text, 200, rng_key(21, i));
        check_naive(text.data, text.len);
    }
    for (uint64_t i = 0; i < 200; i++) {
        size_t n = 1 + rng_u64(22, i) % 120;
        uint64_t letters = 1 + i % 7;
        buf_clear(&text);
        for (size_t k = 0; k < n; k++)
            buf_add_char(&text, (char)('a' + rng_u64(rng_key(23, i), k) % letters));
        check_naive(text.data, text.len);
    }
    buf_release(&text);
}

/* The cache gives what merging gives, also when another word took the place. */
static void test_cache(void **state)
{
    (void)state;
    struct buf text = BUF_INIT;
    struct ids warm = {0}, cold = {0};
    struct err e = {0};
    for (int i = 0; i < 70000; i++) /* more words than the cache has places */
        buf_printf(&text, " %c%c%c%c", 'a' + i % 7, 'a' + i / 7 % 26, 'a' + i / 182 % 26,
            'a' + i / 4732 % 26);
    for (int pass = 0; pass < 2; pass++) {
        warm.len = 0;
        assert_int_equal(tokenizer_encode(tok, scratch, text.data, text.len, &warm, &e), 0);
    }
    for (size_t at = 0; at < text.len; at += 5000) {
        size_t n = text.len - at < 5000 ? text.len - at : 5000;
        struct tokenizer_scratch *fresh = tokenizer_scratch_new(tok);
        assert_int_equal(tokenizer_encode(tok, fresh, text.data + at, n, &cold, &e), 0);
        tokenizer_scratch_free(&fresh);
    }
    assert_int_equal(warm.len, cold.len);
    assert_memory_equal(warm.data, cold.data, warm.len * sizeof *warm.data);
    buf_release(&text);
    ids_release(&warm);
    ids_release(&cold);
}

static void test_special_is_text(void **state)
{
    (void)state;
    static const char text[] = "a<|endoftext|>b <|endoftext|>";
    struct ids ids = {0};
    struct buf out = BUF_INIT;
    struct err e = {0};
    uint32_t eot = (uint32_t)tokenizer_eot(tok);
    assert_int_equal(tokenizer_encode(tok, scratch, text, sizeof text - 1, &ids, &e), 0);
    for (size_t i = 0; i < ids.len; i++)
        assert_int_not_equal(ids.data[i], eot);
    check_round_trip(tok, scratch, text, sizeof text - 1);
    assert_int_equal(tokenizer_decode(tok, &eot, 1, &out, &e), 0);
    assert_string_equal(out.data, TOKENIZER_EOT);
    assert_true(tokenizer_is_special(tok, eot) && !tokenizer_is_special(tok, 'a'));
    assert_int_equal(tokenizer_bytes_of(tok, eot), 0);
    assert_int_equal(tokenizer_bytes_of(tok, 'a'), 1);
    assert_int_equal(tokenizer_bytes_of(tok, 420), 0);
    assert_int_equal(tokenizer_vocab(tok), 420);
    uint32_t beyond[] = {'x', 420};
    assert_int_equal(tokenizer_decode(tok, beyond, 2, &out, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "420"));
    assert_string_equal(out.data, TOKENIZER_EOT);
    ids_release(&ids);
    buf_release(&out);
}

/* Steps of merging n bytes of a repeated unit, which come back. */
static uint64_t steps_for(const char *unit, size_t n)
{
    struct buf text = BUF_INIT;
    while (text.len < n)
        buf_add_str(&text, unit);
    struct tokenizer_scratch *s = tokenizer_scratch_new(tok);
    check_round_trip(tok, s, text.data, text.len);
    uint64_t steps = tokenizer_scratch_steps(s);
    tokenizer_scratch_free(&s);
    buf_release(&text);
    return steps;
}

/* One line of 1 MiB costs 64 times one of 16 KiB and its logarithm, not 4096 times. */
static void test_work_is_bounded(void **state)
{
    (void)state;
    static const char *const units[] = {
        "a", "ab", " ", "\n", "=", "\t", "7", "é", "日", "\xff", "a\xff", "abababab ", "aabab"};
    for (size_t i = 0; i < COUNT(units); i++) {
        uint64_t small = steps_for(units[i], 1 << 14), large = steps_for(units[i], 1 << 20);
        assert_true(large <= small * 64 * 20 / 14 * 5 / 4 + 100);
        assert_true(large <= ((uint64_t)60 << 20));
    }
}

/* -- files -- */

/* json with the first `from` replaced by `to`. */
static void replaced(struct buf *out, const char *from, const char *to)
{
    const char *at = strstr(json.data, from);
    assert_non_null(at);
    buf_clear(out);
    buf_add(out, json.data, (size_t)(at - json.data));
    buf_add_str(out, to);
    buf_add_str(out, at + strlen(from));
}

#define SEQUENCE "\"type\": \"Sequence\",\n    \"pretokenizers\": ["

static void test_wrong_files(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to;
        int rc;
        const char *says;
    } cases[] = {
        {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", ERR_UNSUPPORTED,
            "normalizer"},
        {"\"truncation\": null", "\"truncation\": {}", ERR_UNSUPPORTED, "truncation"},
        {"\"padding\": null", "\"padding\": 1", ERR_UNSUPPORTED, "padding"},
        {"\"padding\": null", "\"polish\": null", ERR_UNSUPPORTED, "polish"},
        {"\"dropout\": null", "\"dropout\": 0.1", ERR_UNSUPPORTED, "model.dropout"},
        {"\"byte_fallback\": false", "\"byte_fallback\": true", ERR_UNSUPPORTED, "byte_fallback"},
        {"\"end_of_word_suffix\": null", "\"end_of_word_suffix\": \"</w>\"", ERR_UNSUPPORTED,
            "suffix"},
        {"\"type\": \"BPE\"", "\"type\": \"Unigram\"", ERR_UNSUPPORTED, "model.type"},
        {"\"behavior\": \"Isolated\"", "\"behavior\": \"Removed\"", ERR_UNSUPPORTED, "behavior"},
        {"\"invert\": false", "\"invert\": true", ERR_UNSUPPORTED, "invert"},
        {"{\"Regex\": ", "{\"String\": ", ERR_UNSUPPORTED, "pattern"},
        {"{\"Regex\": \"", "{\"Regex\": \"(", ERR_INPUT, "pattern"},
        {"\"add_prefix_space\": false", "\"add_prefix_space\": true", ERR_UNSUPPORTED,
            "pretokenizers[1].add_prefix_space"},
        {"\"use_regex\": false", "\"use_regex\": true", ERR_UNSUPPORTED, "use_regex"},
        {SEQUENCE, SEQUENCE "{\"type\": \"Digits\"},", ERR_UNSUPPORTED, "pretokenizers"},
        {"\"type\": \"Sequence\"", "\"type\": \"Metaspace\"", ERR_UNSUPPORTED, "Metaspace"},
        {"\"post_processor\": null", "\"post_processor\": {\"type\": \"TemplateProcessing\"}",
            ERR_UNSUPPORTED, "post_processor"},
        {"\"decoder\": {\"type\": \"ByteLevel\"", "\"decoder\": {\"type\": \"WordPiece\"",
            ERR_UNSUPPORTED, "decoder"},
        {"\"special\": true", "\"special\": false", ERR_UNSUPPORTED, "added_tokens[0].special"},
        {"\"content\": \"<|endoftext|>\"", "\"content\": \"\"", ERR_INPUT,
            "added_tokens[0].content"},
        {"\"id\": 256", "\"id\": 257", ERR_INPUT, "added_tokens[0].id"},
        {"\"content\": \"<|endoftext|>\"", "\"content\": \"<|other|>\"", ERR_INPUT, "id 256"},
        {"\"added_tokens\": [", "\"added_tokens\": 7, \"version\": [", ERR_INPUT, "duplicate"},
        {"\"vocab\": {", "\"vocab\": {\"zz\": 5,", ERR_INPUT, "id 5 belongs to"},
        {"\"vocab\": {", "\"vocab\": {\"zz\": 9999,", ERR_INPUT, "0 to 420"},
        {"\"vocab\": {", "\"vocab\": {\"zz\": -1,", ERR_INPUT, "-1"},
        {"\"vocab\": {", "\"vocab\": {\"zz\": \"1\",", ERR_INPUT, "integer"},
        {"\"vocab\": {", "\"vocab\": {\"\": 420,", ERR_INPUT, "alphabet"},
        {"\"vocab\": {", "\"vocab\": {\"a b\": 420,", ERR_INPUT, "alphabet"},
        {"\"vocab\": {", "\"vocab\": [{", ERR_INPUT, "not JSON"},
        {"\"!\": 33,", "\"!!!!!!!\": 33,", ERR_INPUT, "byte 0x21"},
        {"\"merges\": [", "\"merges\": [\"a zzz\",", ERR_INPUT, "merges[0]: right part \"zzz\""},
        {"\"merges\": [", "\"merges\": [\"zzz a\",", ERR_INPUT, "left part"},
        {"\"merges\": [", "\"merges\": [\"z ~\",", ERR_INPUT, "result \"z~\""},
        {"\"merges\": [", "\"merges\": [\"a\",", ERR_INPUT, "is expected"},
        {"\"merges\": [", "\"merges\": [\"a b c\",", ERR_INPUT, "is expected"},
        {"\"merges\": [", "\"merges\": [[\"a\"],", ERR_INPUT, "is expected"},
        {"\"merges\": [", "\"merges\": [[\"a\", \"b\", \"c\"],", ERR_INPUT, "is expected"},
        {"\"merges\": [", "\"merges\": [[\"<|endoftext|>\", \"b\"],", ERR_INPUT, "special"},
        {"\"merges\": [", "\"merges\": {}, \"vocabulary\": [", ERR_UNSUPPORTED, "vocabulary"},
        {"\"model\": {", "\"model\": [], \"version2\": {", ERR_UNSUPPORTED, "version2"},
    };
    struct buf file = BUF_INIT;
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct tokenizer *t = NULL;
        struct err e = {0};
        replaced(&file, cases[i].from, cases[i].to);
        int rc = tokenizer_parse(file.data, file.len, &t, &e);
        if (rc != cases[i].rc || !strstr(e.msg, cases[i].says))
            fail_msg("%s: %d, %s", cases[i].to, rc, e.msg);
        assert_null(t);
    }
    buf_release(&file);
}

static void test_merge_twice(void **state)
{
    (void)state;
    const char *first = strstr(json.data, "\"merges\": [") + strlen("\"merges\": [");
    char *twice = mem_printf("\"merges\": [%.*s,", (int)(strchr(first, ',') - first), first);
    struct buf file = BUF_INIT;
    struct tokenizer *t = NULL;
    struct err e = {0};
    replaced(&file, "\"merges\": [", twice);
    assert_int_equal(tokenizer_parse(file.data, file.len, &t, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "model.merges[1]: the same as model.merges[0]"));
    free(twice);
    buf_release(&file);
}

static void test_cut_files(void **state)
{
    (void)state;
    for (size_t n = 0; n + 2 < json.len; n += 97) {
        struct tokenizer *t = NULL;
        struct err e = {0};
        char *exact = mem_array(n ? n : 1, 1); /* so that a sanitizer sees a read past its end */
        memcpy(exact, json.data, n);
        assert_int_equal(tokenizer_parse(exact, n, &t, &e), ERR_INPUT);
        free(exact);
    }
    struct tokenizer *t = NULL;
    struct err e = {0};
    assert_int_equal(tokenizer_load("/nonexistent/tokenizer.json", &t, &e), ERR_IO);
    assert_non_null(strstr(e.msg, "/nonexistent/tokenizer.json"));
}

/* Merges as pairs, and model without a type: other spellings of the same. */
static void test_other_spellings(void **state)
{
    (void)state;
    struct buf file = BUF_INIT;
    replaced(&file, "\"type\": \"BPE\",", "");
    char *merges = strstr(file.data, "\"merges\": [") + strlen("\"merges\": [");
    struct buf pairs = BUF_INIT;
    buf_add(&pairs, file.data, (size_t)(merges - file.data));
    for (const char *p = merges; *p; p++) {
        const char *end = *p == '"' ? strchr(p + 1, '\n') : NULL; /* a merge a line */
        if (!end) {
            buf_add_char(&pairs, *p);
            continue;
        }
        const char *gap = memchr(p, ' ', (size_t)(end - p)), *quote = end;
        while (*quote != '"')
            quote--;
        buf_printf(&pairs, "[%.*s\", \"%.*s]", (int)(gap - p), p, (int)(quote - gap), gap + 1);
        p = quote;
    }
    struct tokenizer *t = tok_parse(pairs.data, pairs.len);
    struct tokenizer_scratch *s = tokenizer_scratch_new(t);
    struct buf text = BUF_INIT;
    struct ids a = {0}, b = {0};
    struct err e = {0};
    tok_text(&text, 5000, 31);
    assert_int_equal(tokenizer_encode(t, s, text.data, text.len, &a, &e), 0);
    assert_int_equal(tokenizer_encode(tok, scratch, text.data, text.len, &b, &e), 0);
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.data, b.data, a.len * sizeof *a.data);
    assert_string_not_equal(tokenizer_sha256(t), tokenizer_sha256(tok));
    tokenizer_scratch_free(&s);
    tokenizer_free(&t);
    ids_release(&a);
    ids_release(&b);
    buf_release(&text);
    buf_release(&pairs);
    buf_release(&file);
}

/* GPT-2's way: ByteLevel with its own pattern, which keeps digits together. */
static void test_byte_level_alone(void **state)
{
    (void)state;
    struct buf file = BUF_INIT;
    char *start = strstr(json.data, "\"pre_tokenizer\": {"),
         *end = strstr(json.data, "\"post_processor\"");
    char *old = mem_printf("%.*s", (int)(end - start), start);
    replaced(
        &file, old, "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false},");
    struct tokenizer *t = tok_parse(file.data, file.len);
    struct tokenizer_scratch *s = tokenizer_scratch_new(t);
    check_round_trip(t, s, "it's 12345  \n x", 15);
    tokenizer_scratch_free(&s);
    tokenizer_free(&t);
    free(old);
    buf_release(&file);
}

/* With ignore_merges a word that is a token is that token, however its merges would go. */
static void test_ignore_merges(void **state)
{
    (void)state;
    struct buf file = BUF_INIT;
    replaced(&file, "\"vocab\": {", "\"vocab\": {\"zqz\": 420,");
    char *at = strstr(file.data, "\"ignore_merges\": false");
    struct ids ids = {0};
    struct err e = {0};
    for (int ignore = 0; ignore < 2; ignore++) {
        if (ignore)
            memcpy(at, "\"ignore_merges\":  true", strlen("\"ignore_merges\":  true"));
        struct tokenizer *t = tok_parse(file.data, file.len);
        struct tokenizer_scratch *s = tokenizer_scratch_new(t);
        ids.len = 0;
        assert_int_equal(tokenizer_encode(t, s, "zqz", 3, &ids, &e), 0);
        assert_int_equal(ids.len, ignore ? 1 : 3);
        assert_int_equal(ids.data[0], ignore ? 420 : 'z');
        tokenizer_scratch_free(&s);
        tokenizer_free(&t);
    }
    ids_release(&ids);
    buf_release(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_alphabet),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_split_errors),
        cmocka_unit_test(test_split_deep),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_naive_twin),
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_special_is_text),
        cmocka_unit_test(test_work_is_bounded),
        cmocka_unit_test(test_wrong_files),
        cmocka_unit_test(test_merge_twice),
        cmocka_unit_test(test_cut_files),
        cmocka_unit_test(test_other_spellings),
        cmocka_unit_test(test_byte_level_alone),
        cmocka_unit_test(test_ignore_merges),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
