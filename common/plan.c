#include "common/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/field.h"
#include "common/fs.h"
#include "common/json_canonical.h"
#include "common/manifest.h"
#include "common/plan_init.h"

#define PLAN_MAX_BYTES (4u << 20)
#define MAX_TOKENS     ((int64_t)1 << 56)  /* of one source */
#define MAX_SAMPLES    ((uint64_t)1 << 40) /* of one source: an id's index has 40 bits */

/* -- from the config and the sources to JSON -- */

static char *absolute(const char *path, struct err *e)
{
    char *full = realpath(path, NULL);
    if (!full)
        err_errno(e, "%s", path);
    return full;
}

/* One entry of the plan's "sources", checked against the tokenizer. NULL on failure. */
static json_t *source_json(
    const struct source_config *src, const char *tokenizer_sha256, int *vocab, struct err *e)
{
    struct manifest m;
    json_t *out = NULL;
    if (manifest_load(src->path, &m, e) < 0) {
        err_prefix(e, "source %s", src->name);
        return NULL;
    }
    if (strcmp(m.tokenizer_sha256, tokenizer_sha256) != 0)
        err_set(e, ERR_MISMATCH,
            "source %s: made with tokenizer %s, data.tokenizer is %s; ingest it again", src->name,
            m.tokenizer_sha256, tokenizer_sha256);
    else if (*vocab && m.vocab != *vocab)
        err_set(e, ERR_MISMATCH, "source %s: vocabulary %d, the first source has %d", src->name,
            m.vocab, *vocab);
    else if (m.splits[SPLIT_TRAIN].tokens > (uint64_t)MAX_TOKENS ||
             m.splits[SPLIT_VAL].tokens > (uint64_t)MAX_TOKENS)
        err_set(e, ERR_INPUT, "source %s: more than 2^56 tokens", src->name);
    else
        out = json_pack("{s:s, s:s, s:I, s:I}", "name", src->name, "manifest_root", m.root,
            "train_tokens", (json_int_t)m.splits[SPLIT_TRAIN].tokens, "val_tokens",
            (json_int_t)m.splits[SPLIT_VAL].tokens);
    *vocab = m.vocab;
    manifest_release(&m);
    return out;
}

/* The config's plan keys with absolute paths; NULL on failure. */
static json_t *config_json(const struct config *c, struct err *e)
{
    json_t *j = config_plan_json(c);
    const struct {
        const char *key, *path;
    } files[] = {{"data.tokenizer", c->data.tokenizer}, {"train.init_from", c->init_from}};
    int ok = 1;
    for (size_t i = 0; ok && i < sizeof files / sizeof *files; i++) {
        if (strcmp(files[i].path, PLAN_INIT_NONE) == 0)
            continue;
        char *path = absolute(files[i].path, e);
        ok = path != NULL;
        json_object_set_new(j, files[i].key, json_string(ok ? path : ""));
        free(path);
    }
    json_t *list = json_object_get(j, "data.sources");
    for (int i = 0; ok && i < c->data.source_count; i++) {
        char *path = absolute(c->data.sources[i].path, e);
        ok = path != NULL;
        json_object_set_new(json_array_get(list, (size_t)i), "path", json_string(ok ? path : ""));
        free(path);
    }
    if (ok)
        return j;
    json_decref(j);
    return NULL;
}

static json_t *plan_json(const struct config *c, struct err *e)
{
    char sha[SHA256_HEX];
    int vocab = 0;
    if (hash_sha256_file(c->data.tokenizer, sha, NULL, e) < 0) {
        err_prefix(e, "data.tokenizer");
        return NULL;
    }
    json_t *config = config_json(c, e), *sources = json_array();
    int ok = config != NULL;
    for (int i = 0; ok && i < c->data.source_count; i++) {
        json_t *source = source_json(&c->data.sources[i], sha, &vocab, e);
        ok = source != NULL;
        if (ok)
            json_array_append_new(sources, source);
    }
    json_t *init = NULL;
    if (ok && strcmp(c->init_from, PLAN_INIT_NONE) != 0)
        ok = (init = plan_init_json(c->init_from, sha, e)) != NULL;
    if (!ok) {
        json_decref(config);
        json_decref(sources);
        return NULL;
    }
    return json_pack("{s:i, s:o, s:o, s:o*, s:{s:s, s:i}}", "version", PLAN_VERSION, "config",
        config, "sources", sources, "init", init, "tokenizer", "sha256", sha, "vocab", vocab);
}

/* -- from JSON to the plan: what plan_make and plan_load share -- */

static int read_count(const json_t *j, const char *key, int64_t max, uint64_t *out, struct err *e)
{
    int64_t n = 0;
    int rc = field_int(j, key, 0, max, &n, e);
    *out = (uint64_t)n;
    return rc;
}

static uint64_t rows_of(uint64_t tokens, int seq_len)
{
    return tokens ? (tokens - 1) / (uint64_t)seq_len : 0;
}

static int read_source(const json_t *j, const struct source_config *src, int seq_len,
    struct plan_source *out, struct err *e)
{
    out->name = mem_strdup(src->name);
    out->path = mem_strdup(src->path);
    out->weight = src->weight;
    int rc = field_sha256(j, "manifest_root", out->manifest_root, e);
    if (rc == 0)
        rc = read_count(j, "train_tokens", MAX_TOKENS, &out->train_tokens, e);
    if (rc == 0)
        rc = read_count(j, "val_tokens", MAX_TOKENS, &out->val_tokens, e);
    out->train_samples = rows_of(out->train_tokens, seq_len);
    out->val_samples = rows_of(out->val_tokens, seq_len);
    if (rc == 0 && out->train_samples == 0)
        rc = err_set(e, ERR_INPUT, "%llu training tokens do not fill one row of %d",
            (unsigned long long)out->train_tokens, seq_len);
    if (rc == 0 && (out->train_samples > MAX_SAMPLES || out->val_samples > MAX_SAMPLES))
        rc = err_set(e, ERR_INPUT, "more than 2^40 rows; raise data.seq_len");
    return rc < 0 ? err_prefix(e, "source %s", src->name) : 0;
}

/* Whole slots nearest to the weights' shares: the largest remainders are rounded up. */
static int set_quotas(struct plan *p, struct err *e)
{
    double sum = 0, rest[CONFIG_MAX_SOURCES];
    int left = PLAN_BLOCK_SLOTS;
    for (int s = 0; s < p->source_count; s++)
        sum += p->sources[s].weight;
    for (int s = 0; s < p->source_count; s++) {
        double exact = p->sources[s].weight / sum * PLAN_BLOCK_SLOTS;
        p->sources[s].quota = (int)exact;
        rest[s] = exact - floor(exact);
        left -= p->sources[s].quota;
    }
    for (; left > 0; left--) {
        int most = 0;
        for (int s = 1; s < p->source_count; s++)
            if (rest[s] > rest[most])
                most = s;
        p->sources[most].quota++;
        rest[most] = -1;
    }
    CHECK(left == 0);
    for (int s = 0; s < p->source_count; s++)
        if (p->sources[s].quota == 0)
            return err_set(e, ERR_INPUT,
                "source %s: weight %g of %g is less than one slot of %d; raise it",
                p->sources[s].name, p->sources[s].weight, sum, PLAN_BLOCK_SLOTS);
    return 0;
}

/* An id's epoch has 16 bits, the last value of which marks validation rows. */
static int check_epochs(const struct plan *p, struct err *e)
{
    uint64_t ordinals = (uint64_t)p->c.train.steps * (uint64_t)p->c.train.batch_rows;
    uint64_t blocks = ordinals / PLAN_BLOCK_SLOTS + 1;
    for (int s = 0; s < p->source_count; s++)
        if (blocks * (uint64_t)p->sources[s].quota / p->sources[s].train_samples >= PLAN_VAL_EPOCH)
            return err_set(e, ERR_INPUT,
                "source %s: its %llu rows would be repeated more than %u times", p->sources[s].name,
                (unsigned long long)p->sources[s].train_samples, PLAN_VAL_EPOCH - 1);
    if (p->c.eval.every_steps && plan_val_rows(p) == 0)
        return err_set(e, ERR_INPUT,
            "no source has a validation row of %d tokens; ingest with a validation share, or set "
            "eval.every_steps: 0",
            p->c.data.seq_len);
    return 0;
}

static int read_sources(const json_t *list, struct plan *p, struct err *e)
{
    struct buf roots = BUF_INIT;
    int rc = 0;
    if (json_array_size(list) != (size_t)p->c.data.source_count)
        return err_set(e, ERR_INPUT, "sources: %zu entries, data.sources has %d",
            json_array_size(list), p->c.data.source_count);
    for (int i = 0; rc == 0 && i < p->c.data.source_count; i++) {
        p->source_count = i + 1;
        rc = read_source(json_array_get(list, (size_t)i), &p->c.data.sources[i], p->c.data.seq_len,
            &p->sources[i], e);
        buf_add_str(&roots, p->sources[i].manifest_root);
    }
    hash_sha256_hex(roots.data, roots.len, p->manifest_root);
    buf_release(&roots);
    if (rc == 0)
        rc = set_quotas(p, e);
    return rc < 0 ? rc : check_epochs(p, e);
}

/* The config must be complete and as config_plan_json writes it: no default may decide what the
 * hash does not say. */
static int read_config(const json_t *j, struct plan *p, struct err *e)
{
    struct buf text = BUF_INIT, again = BUF_INIT;
    if (!json_is_object(j))
        return err_set(e, ERR_INPUT, "config: wanted an object");
    json_canonical(j, &text);
    int rc = config_parse(text.data, text.len, "config", NULL, 0, &p->c, e);
    if (rc == 0) {
        json_t *full = config_plan_json(&p->c);
        json_canonical(full, &again);
        json_decref(full);
        if (strcmp(text.data, again.data) != 0)
            rc = err_set(
                e, ERR_INPUT, "config: not the complete keys of a plan; fb-plan --json prints one");
    }
    buf_release(&text);
    buf_release(&again);
    return rc;
}

static int read_tokenizer(const json_t *j, struct plan *p, struct err *e)
{
    int64_t vocab = 0;
    int rc = field_sha256(j, "sha256", p->tokenizer_sha256, e);
    if (rc == 0)
        rc = field_int(j, "vocab", 0, 1 << 24, &vocab, e);
    p->c.model.vocab = (int)vocab;
    return rc < 0 ? err_prefix(e, "tokenizer") : 0;
}

static int plan_from_json(const json_t *j, struct plan *p, struct err *e)
{
    struct buf text = BUF_INIT;
    *p = (struct plan){0};
    json_int_t version = json_integer_value(json_object_get(j, "version"));
    if (version != PLAN_VERSION)
        return err_set(e, ERR_MISMATCH, "plan version %lld, this build reads %d",
            (long long)version, PLAN_VERSION);
    json_canonical(j, &text);
    hash_sha256_hex(text.data, text.len, p->hash);
    p->json = mem_strdup(text.data);
    buf_release(&text);
    int rc = read_config(json_object_get(j, "config"), p, e);
    if (rc == 0)
        rc = read_tokenizer(json_object_get(j, "tokenizer"), p, e);
    if (rc == 0)
        rc = model_config_check(&p->c.model, e);
    if (rc == 0)
        rc = read_sources(json_object_get(j, "sources"), p, e);
    if (rc == 0)
        rc = plan_init_read(json_object_get(j, "init"), p, e);
    if (rc < 0)
        plan_release(p);
    return rc;
}

int plan_make(const struct config *c, struct plan *out, struct err *e)
{
    struct err inner = {0};
    json_t *j = plan_json(c, &inner);
    if (!j)
        return err_set(e, inner.code, "%s", inner.msg);
    int rc = plan_from_json(j, out, e);
    json_decref(j);
    struct model_config from;
    if (rc == 0 && plan_has_init(out) && (rc = plan_init_verify(out, 0, &from, e)) < 0)
        plan_release(out);
    return rc;
}

int plan_parse(const char *json, size_t n, const char *name, struct plan *out, struct err *e)
{
    json_error_t why;
    json_t *j = json_loadb(json, n, JSON_REJECT_DUPLICATES, &why);
    if (!j)
        return err_set(e, ERR_INPUT, "%s:%d: not valid JSON: %s", name, why.line, why.text);
    int rc = plan_from_json(j, out, e);
    json_decref(j);
    return rc < 0 ? err_prefix(e, "%s", name) : 0;
}

int plan_load(const char *path, struct plan *out, struct err *e)
{
    struct buf text = BUF_INIT;
    int rc = fs_read(path, PLAN_MAX_BYTES, &text, e);
    if (rc == 0)
        rc = plan_parse(text.data, text.len, path, out, e);
    buf_release(&text);
    return rc;
}

void plan_release(struct plan *p)
{
    for (int i = 0; i < p->source_count; i++) {
        free(p->sources[i].name);
        free(p->sources[i].path);
    }
    config_release(&p->c);
    free(p->json);
    memset(p, 0, sizeof *p);
}
