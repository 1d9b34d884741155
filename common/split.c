#define PCRE2_CODE_UNIT_WIDTH 8
#include "common/split.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/utf8.h"

#define PATTERN_MAX_BYTES 8192
#define JIT_STACK_MIN     ((size_t)32 << 10)
#define JIT_STACK_MAX     ((size_t)4 << 20)
/* Steps of backtracking in one match: what a pattern may need that is linear in the text. */
#define MATCH_STEPS          1000000
#define MATCH_STEPS_PER_BYTE 16
#define HEAP_LIMIT_KIB       (64 << 10)

/* Letters take combining marks with them; a contraction is one only where the word ends. */
const char SPLIT_PATTERN_DEFAULT[] =
    "'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])(?![\\p{L}\\p{M}])" /* 's 'd 'm 't 'll 've 're */
    "|[^\\r\\n\\p{L}\\p{M}\\p{N}]?[\\p{L}\\p{M}]+" /* letters, one other character in front */
    "|\\p{N}{1,3}"                                 /* digits in groups of up to three */
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*"        /* punctuation with the newlines after it */
    "|\\s*[\\r\\n]+"                               /* blank up to the last newline */
    "|\\s+(?!\\S)"                                 /* blank but the last before a word */
    "|\\s+";

const char SPLIT_PATTERN_BYTE_LEVEL[] = "'s|'t|'re|'ve|'m|'ll|'d"
                                        "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
                                        "|\\s+(?!\\S)|\\s+";

struct split_pattern {
    pcre2_code *code;
};

struct split_scratch {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *jit_stack;
};

/* White_Space of Unicode, which is what \s means to Oniguruma; as the inside of a class. */
#define WHITE_SPACE "\\t-\\r\\x{85}\\p{Z}"

/* Copies what opens a class at p ("[", "[^", "[]", "[^]"); returns its last character. */
static const char *copy_class_start(const char *p, struct buf *out)
{
    const char *end = p + 1 + (p[1] == '^');
    if (*end != ']') /* a bracket in first place is an ordinary member */
        end--;
    buf_add(out, p, (size_t)(end - p) + 1);
    return end;
}

/* Rewrites \s and \S to White_Space (\S within a class stays: a class holds no complement). */
static void rewrite_blank(const char *regex, struct buf *out)
{
    bool in_class = false;
    for (const char *p = regex; *p; p++) {
        const char *posix_end = in_class && p[0] == '[' && p[1] == ':' ? strstr(p, ":]") : NULL;
        if (p[0] == '\\' && p[1] == 's') {
            buf_add_str(out, in_class ? WHITE_SPACE : "[" WHITE_SPACE "]");
            p++;
        } else if (p[0] == '\\' && p[1] == 'S' && !in_class) {
            buf_add_str(out, "[^" WHITE_SPACE "]");
            p++;
        } else if (p[0] == '\\' && p[1]) {
            buf_add(out, p++, 2);
        } else if (posix_end) { /* [:alpha:] within a class */
            buf_add(out, p, (size_t)(posix_end - p) + 2);
            p = posix_end + 1;
        } else if (p[0] == '[' && !in_class) {
            p = copy_class_start(p, out);
            in_class = true;
        } else {
            in_class = in_class && p[0] != ']';
            buf_add_char(out, *p);
        }
    }
}

int split_pattern_new(const char *regex, struct split_pattern **out, struct err *e)
{
    if (strlen(regex) > PATTERN_MAX_BYTES)
        return err_set(e, ERR_UNSUPPORTED, "pattern of %zu bytes, at most %d are accepted",
            strlen(regex), PATTERN_MAX_BYTES);
    struct buf translated = BUF_INIT;
    buf_add_str(&translated, "");
    rewrite_blank(regex, &translated);
    int code = 0;
    size_t at = 0;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)translated.data, translated.len,
        PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    buf_release(&translated);
    if (!re) {
        char why[256];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return err_set(e, ERR_INPUT, "pattern \"%.200s\": %s", regex, why);
    }
    uint32_t may_be_empty = 0;
    pcre2_pattern_info(re, PCRE2_INFO_MATCHEMPTY, &may_be_empty);
    if (may_be_empty) {
        pcre2_code_free(re);
        return err_set(e, ERR_INPUT,
            "pattern \"%.200s\" may match nothing; each match must take at least one character",
            regex);
    }
    /* Where the system forbids JIT, pcre2_match() interprets the same code. */
    (void)pcre2_jit_compile(re, PCRE2_JIT_COMPLETE);
    *out = mem_array(1, sizeof **out);
    (*out)->code = re;
    return 0;
}

void split_pattern_free(struct split_pattern **p)
{
    if (*p) {
        pcre2_code_free((*p)->code);
        free(*p);
        *p = NULL;
    }
}

static void *or_abort(void *p)
{
    if (!p)
        abort();
    return p;
}

struct split_scratch *split_scratch_new(const struct split_pattern *p)
{
    struct split_scratch *s = mem_array(1, sizeof *s);
    s->match = or_abort(pcre2_match_data_create_from_pattern(p->code, NULL));
    s->context = or_abort(pcre2_match_context_create(NULL));
    s->jit_stack = or_abort(pcre2_jit_stack_create(JIT_STACK_MIN, JIT_STACK_MAX, NULL));
    pcre2_jit_stack_assign(s->context, NULL, s->jit_stack);
    pcre2_set_heap_limit(s->context, HEAP_LIMIT_KIB);
    return s;
}

void split_scratch_free(struct split_scratch **s)
{
    if (*s) {
        pcre2_match_data_free((*s)->match);
        pcre2_match_context_free((*s)->context);
        pcre2_jit_stack_free((*s)->jit_stack);
        free(*s);
        *s = NULL;
    }
}

void split_begin(struct split_iter *it, const struct split_pattern *p, struct split_scratch *s,
    const char *text, size_t n)
{
    *it = (struct split_iter){.pattern = p, .scratch = s, .text = text, .len = n};
}

/* Enters the stretch of valid UTF-8 that starts at pos; it may be empty. */
static void begin_run(struct split_iter *it)
{
    it->run_start = it->pos;
    it->run_end = it->pos + utf8_valid_prefix(it->text + it->pos, it->len - it->pos);
    uint64_t steps = MATCH_STEPS + MATCH_STEPS_PER_BYTE * (uint64_t)(it->run_end - it->pos);
    pcre2_set_match_limit(it->scratch->context, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
}

/* Finds the next match in the current run: 1 with its bounds, 0 where there is none. */
static int find(struct split_iter *it, size_t *start, size_t *end, struct err *e)
{
    PCRE2_SPTR run = (PCRE2_SPTR)(it->text + it->run_start);
    size_t len = it->run_end - it->run_start, from = it->pos - it->run_start;
    int rc = pcre2_match(it->pattern->code, run, len, from, PCRE2_NO_UTF_CHECK, it->scratch->match,
        it->scratch->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter's memory is on the heap */
        rc = pcre2_match(it->pattern->code, run, len, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
            it->scratch->match, it->scratch->context);
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    if (rc < 0) {
        char why[256];
        pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
        return err_set(
            e, ERR_UNSUPPORTED, "splitting failed at byte %zu of %zu: %s", it->pos, it->len, why);
    }
    const size_t *bounds = pcre2_get_ovector_pointer(it->scratch->match);
    *start = it->run_start + bounds[0];
    *end = it->run_start + bounds[1];
    if (*start < it->pos || *end <= *start) /* possible with \K only */
        return err_set(e, ERR_UNSUPPORTED,
            "splitting failed at byte %zu: the pattern matched nothing or backwards", it->pos);
    return 1;
}

static int word_until(struct split_iter *it, size_t end, bool raw, struct split_word *word)
{
    *word = (struct split_word){it->text + it->pos, end - it->pos, raw};
    it->pos = end;
    return 1;
}

int split_next(struct split_iter *it, struct split_word *word, struct err *e)
{
    if (it->match_end) {
        size_t end = it->match_end;
        it->match_end = 0;
        return word_until(it, end, false, word);
    }
    if (it->pos == it->len)
        return 0;
    if (it->pos == it->run_end) {
        begin_run(it);
        if (it->run_end == it->pos) {
            it->run_end = it->run_start = it->pos + 1;
            return word_until(it, it->pos + 1, true, word);
        }
    }
    size_t start, end;
    int rc = find(it, &start, &end, e);
    if (rc < 0)
        return rc;
    if (rc == 0)
        return word_until(it, it->run_end, false, word);
    if (start > it->pos) { /* the stretch before the match is a word too */
        it->match_end = end;
        end = start;
    }
    return word_until(it, end, false, word);
}
