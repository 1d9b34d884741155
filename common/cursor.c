#include "common/cursor.h"

#include <string.h>

#include "common/field.h"
#include "common/rng.h"

uint64_t row_digest(uint64_t sample_id, const uint32_t *tokens, size_t n)
{
    return hash_xxh64(tokens, n * sizeof *tokens, rng_mix(sample_id));
}

uint64_t plan_ids_digest(const struct plan *p, int64_t step)
{
    uint64_t rows = (uint64_t)p->c.train.batch_rows, sum = 0;
    for (uint64_t i = 0; i < rows; i++)
        sum += rng_mix(plan_train_sample(p, (uint64_t)step * rows + i).id);
    return sum;
}

void cursor_start(struct cursor *c, const struct plan *p)
{
    *c = (struct cursor){0};
    memcpy(c->plan_hash, p->hash, sizeof c->plan_hash);
    memcpy(c->chain, p->hash, sizeof c->chain);
}

static void chain_step(char chain[SHA256_HEX], int64_t step, const struct step_digest *d)
{
    uint8_t link[SHA256_HEX - 1 + 24];
    memcpy(link, chain, SHA256_HEX - 1);
    put_u64(link + 64, (uint64_t)step);
    put_u64(link + 72, d->ids);
    put_u64(link + 80, d->content);
    hash_sha256_hex(link, sizeof link, chain);
}

int cursor_advance(
    struct cursor *c, const struct plan *p, const struct step_digest *d, struct err *e)
{
    if (c->step >= p->c.train.steps)
        return err_set(e, ERR_STATE, "cursor: step %lld is past the last of %lld",
            (long long)c->step, (long long)p->c.train.steps);
    uint64_t rows = (uint64_t)p->c.train.batch_rows, ids = plan_ids_digest(p, c->step);
    if (d->ids != ids)
        return err_set(e, ERR_MISMATCH,
            "step %lld: digest of sample ids %016llx, the plan's is %016llx", (long long)c->step,
            (unsigned long long)d->ids, (unsigned long long)ids);
    for (uint64_t i = 0; i < rows; i++)
        c->source_rows[plan_train_sample(p, c->ordinal + i).source]++;
    chain_step(c->chain, c->step, d);
    c->ordinal += rows;
    c->step++;
    return 0;
}

json_t *cursor_to_json(const struct cursor *c, const struct plan *p)
{
    json_t *rows = json_array();
    for (int s = 0; s < p->source_count; s++)
        json_array_append_new(rows, json_integer((json_int_t)c->source_rows[s]));
    return json_pack("{s:i, s:I, s:I, s:o, s:s, s:s}", "version", CURSOR_VERSION, "step",
        (json_int_t)c->step, "ordinal", (json_int_t)c->ordinal, "source_rows", rows, "plan_hash",
        c->plan_hash, "chain", c->chain);
}

/* Rows drawn from each source when `ordinals` are consumed: whole blocks by quota, then the rest
 * one by one. */
static void count_rows(const struct plan *p, uint64_t ordinals, uint64_t *rows)
{
    uint64_t blocks = ordinals / PLAN_BLOCK_SLOTS;
    for (int s = 0; s < p->source_count; s++)
        rows[s] = blocks * (uint64_t)p->sources[s].quota;
    for (uint64_t i = blocks * PLAN_BLOCK_SLOTS; i < ordinals; i++)
        rows[plan_train_sample(p, i).source]++;
}

static int check_rows(
    const json_t *list, const struct plan *p, const struct cursor *c, struct err *e)
{
    for (int s = 0; s < p->source_count; s++) {
        const json_t *v = json_array_get(list, (size_t)s);
        uint64_t want = c->source_rows[s];
        if (!json_is_integer(v) || (uint64_t)json_integer_value(v) != want)
            return err_set(e, ERR_CORRUPT, "source_rows[%d] (%s): %lld, the plan says %llu", s,
                p->sources[s].name, (long long)json_integer_value(v), (unsigned long long)want);
    }
    return 0;
}

static int read_cursor(const json_t *j, const struct plan *p, struct cursor *out, struct err *e)
{
    int64_t version = 0, ordinal = 0, rows = p->c.train.batch_rows;
    int rc = field_int(j, "version", 0, INT32_MAX, &version, e);
    if (rc == 0 && version != CURSOR_VERSION)
        rc = err_set(e, ERR_MISMATCH, "version %lld, this build reads %d", (long long)version,
            CURSOR_VERSION);
    if (rc == 0)
        rc = field_sha256(j, "plan_hash", out->plan_hash, e);
    if (rc == 0 && strcmp(out->plan_hash, p->hash) != 0)
        rc = err_set(
            e, ERR_MISMATCH, "made under plan %s, this is plan %s", out->plan_hash, p->hash);
    if (rc == 0)
        rc = field_sha256(j, "chain", out->chain, e);
    if (rc == 0)
        rc = field_int(j, "step", 0, p->c.train.steps, &out->step, e);
    if (rc == 0)
        rc = field_int(j, "ordinal", 0, INT64_MAX, &ordinal, e);
    if (rc == 0 && ordinal != out->step * rows)
        rc = err_set(e, ERR_CORRUPT, "ordinal %lld at step %lld of %lld rows", (long long)ordinal,
            (long long)out->step, (long long)rows);
    if (rc < 0)
        return rc;
    out->ordinal = (uint64_t)ordinal;
    count_rows(p, out->ordinal, out->source_rows);
    return check_rows(json_object_get(j, "source_rows"), p, out, e);
}

int cursor_from_json(const json_t *j, const struct plan *p, struct cursor *out, struct err *e)
{
    struct err why = {0};
    *out = (struct cursor){0};
    int rc = read_cursor(j, p, out, &why);
    if (rc == ERR_INPUT) /* we wrote it: a field that is not right is damage */
        rc = ERR_CORRUPT;
    return rc < 0 ? err_set(e, rc, "cursor: %s", why.msg) : 0;
}
