/*
 * Reading tokenizer.json: everything in it is checked, and whatever would make ids differ from
 * those of the software that wrote it is refused by name.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "common/byte_alphabet.h"
#include "common/fs.h"
#include "common/tokenizer_impl.h"

#define FILE_MAX_BYTES ((uint64_t)256 << 20)
#define IDS_MAX        (1u << 22)

enum rule {
    ANY,     /* has no influence on ids, or is read elsewhere */
    NOTHING, /* null, or absent */
    NO,      /* false, 0, "" or null, or absent */
};

struct field {
    const char *name;
    enum rule rule;
};

static const struct field top_fields[] = {
    {"version", ANY},
    {"truncation", NOTHING},
    {"padding", NOTHING},
    {"added_tokens", ANY},
    {"normalizer", NOTHING},
    {"pre_tokenizer", ANY},
    {"post_processor", ANY},
    {"decoder", ANY},
    {"model", ANY},
    {NULL, ANY},
};

static const struct field model_fields[] = {
    {"type", ANY},
    {"dropout", NO},
    {"unk_token", ANY}, /* all bytes are tokens: nothing is unknown */
    {"continuing_subword_prefix", NO},
    {"end_of_word_suffix", NO},
    {"fuse_unk", ANY},
    {"byte_fallback", NO},
    {"ignore_merges", ANY},
    {"vocab", ANY},
    {"merges", ANY},
    {NULL, ANY},
};

static const struct field byte_level_fields[] = {
    {"type", ANY},
    {"add_prefix_space", NO},
    {"trim_offsets", ANY},
    {"use_regex", ANY},
    {NULL, ANY},
};

static const struct field split_fields[] = {
    {"type", ANY},
    {"pattern", ANY},
    {"behavior", ANY},
    {"invert", NO},
    {NULL, ANY},
};

struct loading {
    json_t *root, *model, *vocab;
    const char **spelling; /* (n_ids) in the file's alphabet; special tokens as text */
    struct tokenizer *t;
    struct err *e;
};

static bool obeys(const json_t *v, enum rule rule)
{
    if (rule == ANY || !v || json_is_null(v))
        return true;
    if (rule == NOTHING)
        return false;
    return json_is_false(v) || (json_is_number(v) && json_number_value(v) == 0) ||
           (json_is_string(v) && json_string_length(v) == 0);
}

/* Refuses fields that `fields` does not list or whose value would need support. */
static int check_fields(
    json_t *object, const char *where, const struct field *fields, struct err *e)
{
    const char *name;
    json_t *value;
    json_object_foreach (object, name, value) {
        const struct field *f = fields;
        while (f->name && strcmp(f->name, name))
            f++;
        if (!f->name)
            return err_set(
                e, ERR_UNSUPPORTED, "%s%.64s: a field this build does not know", where, name);
        if (!obeys(value, f->rule))
            return err_set(e, ERR_UNSUPPORTED, "%s%s: not supported, must be %s", where, name,
                f->rule == NOTHING ? "null" : "null, false, 0 or \"\"");
    }
    return 0;
}

/* The string member `name` of object, or "" where it is absent or no string. */
static const char *text_of(const json_t *object, const char *name)
{
    const char *s = json_string_value(json_object_get(object, name));
    return s ? s : "";
}

static int parse_root(struct loading *l, const char *text, size_t n)
{
    json_error_t why;
    l->root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    if (!l->root)
        return err_set(l->e, ERR_INPUT, "not JSON: line %d: %.200s", why.line, why.text);
    if (!json_is_object(l->root))
        return err_set(l->e, ERR_INPUT, "an object is expected at the top");
    int rc = check_fields(l->root, "", top_fields, l->e);
    if (rc < 0)
        return rc;
    l->model = json_object_get(l->root, "model");
    if (!json_is_object(l->model))
        return err_set(l->e, ERR_INPUT, "model: an object is expected");
    const char *type = text_of(l->model, "type");
    if (json_object_get(l->model, "type") && strcmp(type, "BPE")) /* old files have no type */
        return err_set(l->e, ERR_UNSUPPORTED, "model.type: \"%.64s\", only BPE is supported", type);
    if ((rc = check_fields(l->model, "model.", model_fields, l->e)) < 0)
        return rc;
    l->vocab = json_object_get(l->model, "vocab");
    if (!json_is_object(l->vocab))
        return err_set(l->e, ERR_INPUT, "model.vocab: an object of token: id is expected");
    l->t->ignore_merges = json_is_true(json_object_get(l->model, "ignore_merges"));
    return 0;
}

/* Gives id to a spelling; each id once, below n_ids. */
static int place(struct loading *l, const char *where, const char *spelling, const json_t *id)
{
    struct tokenizer *t = l->t;
    if (!json_is_integer(id))
        return err_set(l->e, ERR_INPUT, "%s \"%.64s\": the id must be an integer", where, spelling);
    json_int_t v = json_integer_value(id);
    if (v < 0 || v >= t->n_ids)
        return err_set(l->e, ERR_INPUT,
            "%s \"%.64s\": id %lld, but %u tokens must have the ids 0 to %u", where, spelling,
            (long long)v, t->n_ids, t->n_ids - 1);
    if (l->spelling[v])
        return err_set(l->e, ERR_INPUT, "%s: id %lld belongs to \"%.64s\" and \"%.64s\"", where,
            (long long)v, l->spelling[v], spelling);
    l->spelling[v] = spelling;
    return 0;
}

/* The i-th added token: checked, and its content and id returned. */
static int added_token(struct loading *l, size_t i, const char **content, const json_t **id)
{
    const json_t *a = json_array_get(json_object_get(l->root, "added_tokens"), i);
    *content = text_of(a, "content");
    *id = json_object_get(a, "id");
    if (!**content)
        return err_set(l->e, ERR_INPUT, "added_tokens[%zu].content: a text is expected", i);
    if (!json_is_true(json_object_get(a, "special")))
        return err_set(l->e, ERR_UNSUPPORTED,
            "added_tokens[%zu].special: \"%.64s\" is not special; only special ones are supported",
            i, *content);
    const json_t *in_vocab = json_object_get(l->vocab, *content);
    if (in_vocab && (!json_is_integer(*id) || !json_equal(in_vocab, *id)))
        return err_set(l->e, ERR_INPUT,
            "added_tokens[%zu].id: \"%.64s\" has another id in model.vocab", i, *content);
    return 0;
}

/*
 * Every token gets its place: ids are unique and, as there are as many as the largest allows,
 * without holes.
 */
static int place_tokens(struct loading *l)
{
    struct tokenizer *t = l->t;
    const json_t *added = json_object_get(l->root, "added_tokens");
    size_t n_added = json_array_size(added), total = json_object_size(l->vocab);
    const char *content;
    const json_t *id;
    int rc = 0;
    if (added && !json_is_array(added))
        return err_set(l->e, ERR_INPUT, "added_tokens: a list is expected");
    for (size_t i = 0; i < n_added; i++) {
        if ((rc = added_token(l, i, &content, &id)) < 0)
            return rc;
        total += !json_object_get(l->vocab, content);
    }
    if (total == 0 || total > IDS_MAX)
        return err_set(
            l->e, ERR_INPUT, "model.vocab: %zu tokens, 257 to %u are expected", total, IDS_MAX);
    t->n_ids = (uint32_t)total;
    t->special = mem_array(total, sizeof *t->special);
    l->spelling = mem_array(total, sizeof *l->spelling);
    json_t *value;
    json_object_foreach (l->vocab, content, value) {
        if ((rc = place(l, "model.vocab", content, value)) < 0)
            return rc;
    }
    for (size_t i = 0; i < n_added; i++) {
        if ((rc = added_token(l, i, &content, &id)) < 0)
            return rc;
        if (!json_object_get(l->vocab, content) && (rc = place(l, "added_tokens", content, id)) < 0)
            return rc;
        t->special[json_integer_value(id)] = true;
    }
    return 0;
}

static int read_token_bytes(struct loading *l)
{
    struct tokenizer *t = l->t;
    struct buf all = BUF_INIT;
    int rc = 0;
    buf_add_str(&all, "");
    t->offset = mem_array((size_t)t->n_ids + 1, sizeof *t->offset);
    for (uint32_t id = 0; id < t->n_ids; id++) {
        const char *s = l->spelling[id];
        if (t->special[id])
            buf_add_str(&all, s);
        else if (!*s || byte_alphabet_read(s, strlen(s), &all) < 0) {
            rc = err_set(l->e, ERR_INPUT,
                "model.vocab: token %u \"%.64s\" is not spelled in the byte alphabet", id, s);
            break;
        }
        t->offset[id + 1] = all.len;
    }
    t->bytes = all.data; /* ownership moves */
    return rc;
}

static int find_bytes_and_eot(struct loading *l)
{
    struct tokenizer *t = l->t;
    memset(t->byte_id, 0xff, sizeof t->byte_id);
    t->eot = BPE_NONE;
    for (uint32_t id = 0; id < t->n_ids; id++) {
        size_t n;
        const char *bytes = token_bytes(t, id, &n);
        if (!t->special[id] && n == 1)
            t->byte_id[(uint8_t)bytes[0]] = id;
        if (t->special[id] && !strcmp(l->spelling[id], TOKENIZER_EOT))
            t->eot = id;
    }
    for (int b = 0; b < 256; b++)
        if (t->byte_id[b] == BPE_NONE)
            return err_set(l->e, ERR_INPUT,
                "model.vocab: byte 0x%02x has no token; all 256 bytes must have one", b);
    if (t->eot == BPE_NONE)
        return err_set(l->e, ERR_INPUT, "added_tokens: %s is missing; it begins every document",
            TOKENIZER_EOT);
    return 0;
}

/* Splits a merge in either spelling into its two parts; `left` is storage for "a b". */
static int merge_parts(const json_t *m, struct buf *left, const char **right)
{
    buf_clear(left);
    if (json_is_string(m)) {
        const char *s = json_string_value(m), *gap = strchr(s, ' ');
        if (!gap || strchr(gap + 1, ' '))
            return -1;
        buf_add(left, s, (size_t)(gap - s));
        *right = gap + 1;
        return 0;
    }
    const char *s = json_string_value(json_array_get(m, 0));
    *right = json_string_value(json_array_get(m, 1));
    if (!s || !*right || json_array_size(m) != 2)
        return -1;
    buf_add_str(left, s);
    return 0;
}

/* The id of a part or a result of a merge: an ordinary token. */
static int merge_token(
    struct loading *l, size_t i, const char *what, const char *spelling, uint32_t *id)
{
    const json_t *v = json_object_get(l->vocab, spelling);
    if (!v)
        return err_set(l->e, ERR_INPUT, "model.merges[%zu]: %s \"%.64s\" is not in model.vocab", i,
            what, spelling);
    *id = (uint32_t)json_integer_value(v);
    if (l->t->special[*id])
        return err_set(l->e, ERR_INPUT, "model.merges[%zu]: %s \"%.64s\" is a special token", i,
            what, spelling);
    return 0;
}

static int read_merges(struct loading *l)
{
    const json_t *merges = json_object_get(l->model, "merges"), *m;
    if (!json_is_array(merges) || json_array_size(merges) > IDS_MAX)
        return err_set(
            l->e, ERR_INPUT, "model.merges: a list of at most %u merges is expected", IDS_MAX);
    struct buf left = BUF_INIT;
    size_t i;
    int rc = 0;
    bpe_table_init(&l->t->merges, (uint32_t)json_array_size(merges));
    json_array_foreach (merges, i, m) {
        struct bpe_merge ids;
        const char *right;
        if (merge_parts(m, &left, &right) < 0) {
            rc = err_set(
                l->e, ERR_INPUT, "model.merges[%zu]: \"a b\" or [\"a\", \"b\"] is expected", i);
            break;
        }
        if ((rc = merge_token(l, i, "left part", left.data, &ids.left)) < 0 ||
            (rc = merge_token(l, i, "right part", right, &ids.right)) < 0)
            break;
        buf_add_str(&left, right);
        if ((rc = merge_token(l, i, "result", left.data, &ids.result)) < 0)
            break;
        uint32_t same = bpe_table_add(&l->t->merges, ids);
        if (same != BPE_NONE) {
            rc = err_set(
                l->e, ERR_INPUT, "model.merges[%zu]: the same as model.merges[%u]", i, same);
            break;
        }
    }
    buf_release(&left);
    return rc;
}

/* The regular expression of a Split; NULL and an error where it is of another kind. */
static const char *split_regex(json_t *split, struct err *e)
{
    const char *where = "pre_tokenizer.pretokenizers[0].";
    if (check_fields(split, where, split_fields, e) < 0)
        return NULL;
    const char *regex =
        json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    if (!regex)
        err_set(e, ERR_UNSUPPORTED, "%spattern: only {\"Regex\": …} is supported", where);
    else if (strcmp(text_of(split, "behavior"), "Isolated")) {
        err_set(e, ERR_UNSUPPORTED, "%sbehavior: \"%.64s\", only Isolated is supported", where,
            text_of(split, "behavior"));
        return NULL;
    }
    return regex;
}

static int read_pre_tokenizer(struct loading *l)
{
    json_t *pre = json_object_get(l->root, "pre_tokenizer"), *byte_level = pre;
    json_t *list = json_object_get(pre, "pretokenizers");
    const char *where = "pre_tokenizer.", *regex = NULL;
    if (!strcmp(text_of(pre, "type"), "Sequence")) {
        if (json_array_size(list) != 2 || strcmp(text_of(json_array_get(list, 0), "type"), "Split"))
            return err_set(l->e, ERR_UNSUPPORTED,
                "pre_tokenizer.pretokenizers: only Split followed by ByteLevel is supported");
        regex = split_regex(json_array_get(list, 0), l->e);
        if (!regex)
            return ERR_UNSUPPORTED;
        byte_level = json_array_get(list, 1);
        where = "pre_tokenizer.pretokenizers[1].";
    }
    if (strcmp(text_of(byte_level, "type"), "ByteLevel"))
        return err_set(l->e, ERR_UNSUPPORTED, "%stype: \"%.64s\", ByteLevel is expected", where,
            text_of(byte_level, "type"));
    int rc = check_fields(byte_level, where, byte_level_fields, l->e);
    if (rc < 0)
        return rc;
    bool own_regex = !json_is_false(json_object_get(byte_level, "use_regex"));
    if (own_regex == !!regex)
        return err_set(l->e, ERR_UNSUPPORTED, "%suse_regex: must be %s", where,
            regex ? "false behind a Split" : "true without a Split");
    return split_pattern_new(regex ? regex : SPLIT_PATTERN_BYTE_LEVEL, &l->t->pattern, l->e);
}

/* ByteLevel or nothing behind the model: it moves no ids. Decoding has to be ByteLevel's. */
static int check_ends(struct loading *l)
{
    const json_t *post = json_object_get(l->root, "post_processor");
    if (post && !json_is_null(post) && strcmp(text_of(post, "type"), "ByteLevel"))
        return err_set(l->e, ERR_UNSUPPORTED,
            "post_processor.type: \"%.64s\", must be ByteLevel or absent", text_of(post, "type"));
    const char *decoder = text_of(json_object_get(l->root, "decoder"), "type");
    if (strcmp(decoder, "ByteLevel"))
        return err_set(
            l->e, ERR_UNSUPPORTED, "decoder.type: \"%.64s\", must be ByteLevel", decoder);
    return 0;
}

static int index_words(struct loading *l)
{
    struct tokenizer *t = l->t;
    if (!t->ignore_merges)
        return 0;
    size_t slots = 16;
    while (slots < (size_t)t->n_ids * 2)
        slots *= 2;
    t->word_slots = mem_array(slots, sizeof *t->word_slots);
    memset(t->word_slots, 0xff, slots * sizeof *t->word_slots);
    t->word_mask = (uint32_t)(slots - 1);
    for (uint32_t id = 0; id < t->n_ids; id++) {
        size_t n;
        const char *bytes = token_bytes(t, id, &n);
        if (t->special[id])
            continue;
        uint32_t i = (uint32_t)hash_xxh64(bytes, n, 0) & t->word_mask;
        while (t->word_slots[i] != BPE_NONE)
            i = (i + 1) & t->word_mask;
        t->word_slots[i] = id;
    }
    return 0;
}

int tokenizer_parse(const char *json, size_t n, struct tokenizer **out, struct err *e)
{
    static int (*const steps[])(struct loading *) = {place_tokens, read_token_bytes,
        find_bytes_and_eot, read_merges, read_pre_tokenizer, check_ends, index_words};
    struct loading l = {.t = mem_array(1, sizeof *l.t), .e = e};
    int rc = parse_root(&l, json, n);
    for (size_t i = 0; rc == 0 && i < sizeof steps / sizeof steps[0]; i++)
        rc = steps[i](&l);
    if (rc == 0) {
        hash_sha256_hex(json, n, l.t->sha256);
        *out = l.t;
        l.t = NULL;
    }
    tokenizer_free(&l.t);
    free(l.spelling);
    json_decref(l.root);
    return rc;
}

int tokenizer_load(const char *path, struct tokenizer **out, struct err *e)
{
    struct buf file = BUF_INIT;
    int rc = fs_read(path, FILE_MAX_BYTES, &file, e);
    if (rc == 0 && (rc = tokenizer_parse(file.data, file.len, out, e)) < 0)
        err_prefix(e, "%s", path);
    buf_release(&file);
    return rc;
}
