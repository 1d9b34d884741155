#include "common/manifest.h"

#include <stdlib.h>
#include <string.h>

#include "common/field.h"
#include "common/fs.h"
#include "common/mem.h"

static const char *const split_names[SPLIT_COUNT] = {"train", "val"};

/* Bounds that make every later sum and product fit 64 bits with room. */
#define MAX_COUNT ((uint64_t)1 << 50)

const char *split_name(int split)
{
    return split >= 0 && split < SPLIT_COUNT ? split_names[split] : "?";
}

void manifest_release(struct manifest *m)
{
    free(m->name);
    for (int s = 0; s < SPLIT_COUNT; s++)
        free(m->splits[s].shards);
    memset(m, 0, sizeof *m);
}

void manifest_root(const struct manifest *m, char out[SHA256_HEX])
{
    struct buf b = BUF_INIT;
    buf_printf(&b, "fullband manifest %d\n%s %d %d %s %d\n", MANIFEST_VERSION, m->tokenizer_sha256,
        m->vocab, m->eot, MANIFEST_POLICY, m->block_tokens);
    for (int s = 0; s < SPLIT_COUNT; s++)
        for (int i = 0; i < m->splits[s].shard_count; i++) {
            const struct manifest_shard *h = &m->splits[s].shards[i];
            buf_printf(&b, "%s %llu %s\n", split_names[s], (unsigned long long)h->tokens, h->hash);
        }
    hash_sha256_hex(b.data, b.len, out);
    buf_release(&b);
}

/* -- reading -- */

static int read_count(
    const json_t *j, const char *key, uint64_t lo, uint64_t hi, uint64_t *out, struct err *e)
{
    int64_t n = 0;
    int rc = field_int(j, key, (int64_t)lo, (int64_t)hi, &n, e);
    *out = (uint64_t)n;
    return rc;
}

/* A plain name: nothing that leads out of the directory. */
static int read_file_name(const json_t *j, struct manifest_shard *out, struct err *e)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    const char *s = json_string_value(json_object_get(j, "file"));
    if (!s || !*s || *s == '.' || strlen(s) >= sizeof out->file || s[strspn(s, plain)])
        return err_set(e, ERR_INPUT, "file: not a plain file name of fewer than %zu characters",
            sizeof out->file);
    strcpy(out->file, s);
    return 0;
}

static int read_shard(const json_t *j, int block_tokens, struct manifest_shard *out, struct err *e)
{
    const struct {
        const char *key;
        uint64_t *to;
    } counts[] = {{"bytes", &out->bytes}, {"last_pgno", &out->last_pgno}, {"tokens", &out->tokens},
        {"documents", &out->documents}, {"blocks", &out->blocks}};
    int rc = read_file_name(j, out, e);
    for (size_t i = 0; rc == 0 && i < sizeof counts / sizeof *counts; i++)
        rc = read_count(j, counts[i].key, 1, MAX_COUNT, counts[i].to, e);
    if (rc == 0)
        rc = field_sha256(j, "hash", out->hash, e);
    if (rc == 0)
        rc = field_sha256(j, "sha256", out->sha256, e);
    if (rc < 0)
        return rc;
    uint64_t blocks = (out->tokens + (uint64_t)block_tokens - 1) / (uint64_t)block_tokens;
    if (blocks != out->blocks)
        return err_set(e, ERR_INPUT, "blocks: %llu, but %llu tokens make %llu blocks",
            (unsigned long long)out->blocks, (unsigned long long)out->tokens,
            (unsigned long long)blocks);
    return 0;
}

static int read_split(const json_t *j, int block_tokens, struct manifest_split *out, struct err *e)
{
    const json_t *shards = json_object_get(j, "shards");
    uint64_t tokens = 0, documents = 0;
    int rc;
    if ((rc = read_count(j, "tokens", 0, MAX_COUNT, &out->tokens, e)) < 0 ||
        (rc = read_count(j, "documents", 0, MAX_COUNT, &out->documents, e)) < 0 ||
        (rc = read_count(j, "text_bytes", 0, MAX_COUNT, &out->text_bytes, e)) < 0)
        return rc;
    if (!json_is_array(shards))
        return err_set(e, ERR_INPUT, "shards: a list expected");
    out->shards = mem_array(json_array_size(shards), sizeof *out->shards);
    for (size_t i = 0; i < json_array_size(shards); i++) {
        struct manifest_shard *s = &out->shards[out->shard_count++];
        if (read_shard(json_array_get(shards, i), block_tokens, s, e) < 0)
            return err_prefix(e, "shards[%zu]", i);
        tokens += s->tokens;
        documents += s->documents;
        if (tokens > MAX_COUNT || documents > MAX_COUNT) /* so that no sum wraps */
            break;
    }
    if (tokens != out->tokens || documents != out->documents)
        return err_set(e, ERR_INPUT, "tokens and documents are not the sums over its shards");
    return 0;
}

static int read_fields(const json_t *j, struct manifest *m, struct err *e)
{
    uint64_t version = 0, vocab = 0, eot = 0, block = 0;
    int rc;
    const char *name = json_string_value(json_object_get(j, "name"));
    const char *policy = json_string_value(json_object_get(j, "policy"));
    if (!json_is_object(j))
        return err_set(e, ERR_INPUT, "not a JSON object");
    if ((rc = read_count(j, "version", 0, INT32_MAX, &version, e)) < 0)
        return rc;
    if (version != MANIFEST_VERSION)
        return err_set(e, ERR_UNSUPPORTED, "version %llu; this build reads version %d",
            (unsigned long long)version, MANIFEST_VERSION);
    if (!name || !policy || strcmp(policy, MANIFEST_POLICY) != 0)
        return err_set(e, ERR_INPUT, "needs a name and the policy \"%s\"", MANIFEST_POLICY);
    if ((rc = read_count(j, "vocab", 2, INT32_MAX, &vocab, e)) < 0 ||
        (rc = read_count(j, "eot", 0, vocab - 1, &eot, e)) < 0 ||
        (rc = read_count(j, "block_tokens", 1, 1 << 24, &block, e)) < 0 ||
        (rc = read_count(j, "duplicates", 0, MAX_COUNT, &m->duplicates, e)) < 0 ||
        (rc = field_sha256(j, "tokenizer_sha256", m->tokenizer_sha256, e)) < 0 ||
        (rc = field_sha256(j, "fingerprint", m->fingerprint, e)) < 0 ||
        (rc = field_sha256(j, "root", m->root, e)) < 0)
        return rc;
    m->name = mem_strdup(name);
    m->vocab = (int)vocab;
    m->eot = (int)eot;
    m->block_tokens = (int)block;
    for (int s = 0; s < SPLIT_COUNT; s++)
        if (read_split(json_object_get(j, split_names[s]), m->block_tokens, &m->splits[s], e) < 0)
            return err_prefix(e, "%s", split_names[s]);
    char root[SHA256_HEX];
    manifest_root(m, root);
    if (strcmp(root, m->root) != 0)
        return err_set(e, ERR_CORRUPT, "root %.12s…, but its shards give %.12s…", m->root, root);
    return 0;
}

int manifest_parse(
    const char *json, size_t n, const char *where, struct manifest *out, struct err *e)
{
    json_error_t je;
    struct err why = {0};
    memset(out, 0, sizeof *out);
    json_t *j = json_loadb(json, n, JSON_REJECT_DUPLICATES, &je);
    if (!j)
        return err_set(e, ERR_INPUT, "%s:%d: not JSON: %s", where, je.line, je.text);
    int rc = read_fields(j, out, &why);
    json_decref(j);
    if (rc == 0)
        return 0;
    manifest_release(out);
    return err_set(e, why.code, "%s: %s", where, why.msg);
}

int manifest_load(const char *dir, struct manifest *out, struct err *e)
{
    char *path = mem_printf("%s/%s", dir, MANIFEST_FILE);
    struct buf text = BUF_INIT;
    int rc = fs_read(path, MANIFEST_MAX_BYTES, &text, e);
    if (rc == 0)
        rc = manifest_parse(text.data, text.len, path, out, e);
    buf_release(&text);
    free(path);
    return rc;
}

/* -- writing -- */

static json_t *split_to_json(const struct manifest_split *s)
{
    json_t *shards = json_array();
    for (int i = 0; i < s->shard_count; i++) {
        const struct manifest_shard *h = &s->shards[i];
        json_array_append_new(
            shards, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:s}", "file", h->file, "bytes",
                        (json_int_t)h->bytes, "last_pgno", (json_int_t)h->last_pgno, "tokens",
                        (json_int_t)h->tokens, "documents", (json_int_t)h->documents, "blocks",
                        (json_int_t)h->blocks, "hash", h->hash, "sha256", h->sha256));
    }
    return json_pack("{s:I, s:I, s:I, s:o}", "tokens", (json_int_t)s->tokens, "documents",
        (json_int_t)s->documents, "text_bytes", (json_int_t)s->text_bytes, "shards", shards);
}

int manifest_write(const char *dir, struct manifest *m, struct err *e)
{
    for (int s = 0; s < SPLIT_COUNT; s++) {
        struct manifest_split *p = &m->splits[s];
        p->tokens = p->documents = 0;
        for (int i = 0; i < p->shard_count; i++) {
            p->tokens += p->shards[i].tokens;
            p->documents += p->shards[i].documents;
        }
    }
    manifest_root(m, m->root);
    json_t *j = json_pack("{s:i, s:s, s:s, s:i, s:i, s:s, s:i, s:I, s:s, s:o, s:o, s:s}", "version",
        MANIFEST_VERSION, "name", m->name, "tokenizer_sha256", m->tokenizer_sha256, "vocab",
        m->vocab, "eot", m->eot, "policy", MANIFEST_POLICY, "block_tokens", m->block_tokens,
        "duplicates", (json_int_t)m->duplicates, "fingerprint", m->fingerprint, "train",
        split_to_json(&m->splits[SPLIT_TRAIN]), "val", split_to_json(&m->splits[SPLIT_VAL]), "root",
        m->root);
    char *text = j ? json_dumps(j, JSON_INDENT(2)) : NULL;
    char *path = mem_printf("%s/%s", dir, MANIFEST_FILE);
    int rc = text ? fs_write_atomic(path, text, strlen(text), e)
                  : err_set(e, ERR_INPUT, "%s: name: not UTF-8", path);
    free(path);
    free(text);
    json_decref(j);
    return rc;
}
