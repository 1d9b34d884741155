#include "kernels/decode.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "kernels/model_internal.h"

#define HOST_INTS 7 /* arrays of integers of a call's rows */

struct decoder {
    struct model *m;
    struct device *d;
    int slots, capacity, max_rows, chunk;
    void *memory; /* the one device allocation */

    float **cache_k, **cache_v; /* host arrays (layers) of (slots, capacity, kv_heads, hd) */
    float *hidden;              /* (slots · capacity, D) newest state of every position */
    float *border[2]; /* (D) prefill: the pass before's state at the border of two calls */
    float *cos_table, *sin_table;

    struct layer_acts layer; /* max_rows rows; x0 is also the block's output */
    struct pass_acts pass;
    struct input_acts in;
    struct products mul; /* float32 */
    float *norm, *act, *picked, *logits;
    float *gated;                                         /* (max_rows, Q) with attn_gate */
    int32_t *tokens, *slot, *pos, *first, *turn, *gather; /* (max_rows) */
    int32_t *first_window;                                /* first inside the window too */

    int *filled; /* host (slots): positions below it hold this sequence */
    int *last;   /* host (slots): last position of the rows being checked, −1 none */
    int32_t *host[HOST_INTS];
    uint8_t *host_mask;
    struct decode_row *prefill_rows; /* host (max_rows) */
};

/* Sizes and hands out; with dec->memory NULL it only measures. Returns the bytes. */
static size_t decoder_layout(struct decoder *dec)
{
    const struct model_config *c = &dec->m->c;
    struct arena a = {dec->memory, 0};
    size_t n = (size_t)dec->max_rows, dim = (size_t)c->dim, half = (size_t)c->head_dim / 2;
    size_t places = (size_t)dec->slots * (size_t)dec->capacity;
    for (int l = 0; l < c->layers; l++) {
        dec->cache_k[l] = arena_floats(&a, places, (size_t)c->kv_heads * (size_t)c->head_dim);
        dec->cache_v[l] = arena_floats(&a, places, (size_t)c->kv_heads * (size_t)c->head_dim);
    }
    dec->hidden = arena_floats(&a, places, dim);
    dec->border[0] = arena_floats(&a, 1, dim);
    dec->border[1] = arena_floats(&a, 1, dim);
    dec->cos_table = arena_floats(&a, (size_t)dec->capacity, half);
    dec->sin_table = arena_floats(&a, (size_t)dec->capacity, half);
    layer_acts_take(&a, c, n, &dec->layer);
    struct pass_acts *p = &dec->pass;
    float **wide[] = {&p->h, &p->carried, &p->u, &p->prod, &dec->in.e, &dec->norm, &dec->picked,
        c->in_norm ? &dec->in.plain : NULL, gate_own_norm(c) ? &dec->in.gate_in : NULL, &dec->in.g};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (wide[i])
            *wide[i] = arena_floats(&a, n, dim);
    if (!c->in_norm)
        dec->in.plain = dec->in.e;
    gate_source(c, &dec->in);
    float **thin[] = {&p->rstd, &p->rstd_prod, &dec->in.rstd_in, &dec->in.rstd_gate};
    for (size_t i = 0; i < sizeof thin / sizeof *thin; i++)
        *thin[i] = arena_floats(&a, n, 1);
    int32_t **ints[] = {&dec->tokens, &dec->slot, &dec->pos, &dec->first, &dec->turn, &dec->gather,
        &dec->first_window};
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++)
        *ints[i] = arena_ints(&a, n);
    p->mask = arena_bytes(&a, n);
    dec->act = arena_floats(&a, n, (size_t)c->ffn);
    if (c->attn_gate)
        dec->gated = arena_floats(&a, n, (size_t)c->heads * (size_t)c->head_dim);
    dec->logits = arena_floats(&a, (size_t)dec->chunk, (size_t)c->vocab);
    return a.used;
}

static void host_new(struct decoder *dec)
{
    size_t n = (size_t)dec->max_rows, slots = (size_t)dec->slots;
    dec->filled = mem_array(slots, sizeof *dec->filled);
    dec->last = mem_array(slots, sizeof *dec->last);
    dec->cache_k = mem_array((size_t)dec->m->c.layers, sizeof *dec->cache_k);
    dec->cache_v = mem_array((size_t)dec->m->c.layers, sizeof *dec->cache_v);
    for (int i = 0; i < HOST_INTS; i++)
        dec->host[i] = mem_array(n, sizeof *dec->host[i]);
    dec->host_mask = mem_array(n, 1);
    dec->prefill_rows = mem_array(n, sizeof *dec->prefill_rows);
    for (int i = 0; i < dec->slots; i++)
        dec->last[i] = -1;
}

static void rope_upload(struct decoder *dec)
{
    const struct model_config *c = &dec->m->c;
    size_t n = (size_t)dec->capacity * (size_t)c->head_dim / 2;
    float *tables = mem_array(2 * n, sizeof *tables);
    rope_table(tables, tables + n, dec->capacity, c->head_dim, c->rope_theta);
    dec->d->ops->upload(dec->d, dec->cos_table, tables, n * sizeof *tables);
    dec->d->ops->upload(dec->d, dec->sin_table, tables + n, n * sizeof *tables);
    dec->d->ops->sync(dec->d, NULL);
    free(tables);
}

int decoder_new(
    struct model *m, int slots, int capacity, int max_rows, struct decoder **out, struct err *e)
{
    *out = NULL;
    if (slots < 1 || capacity < 1 || max_rows < 1 || slots > INT_MAX / capacity ||
        max_rows > INT_MAX / m->c.heads)
        return err_set(e, ERR_INPUT,
            "decoder of %d slots of %d tokens, %d rows: right is 1 or more "
            "of each, and slots times tokens at most %d",
            slots, capacity, max_rows, INT_MAX);
    struct decoder *dec = mem_array(1, sizeof *dec);
    dec->m = m;
    dec->d = m->d;
    dec->mul = (struct products){.d = m->d};
    dec->slots = slots;
    dec->capacity = capacity;
    dec->max_rows = max_rows;
    dec->chunk = logits_chunk(m->c.vocab, max_rows, sizeof(float));
    host_new(dec);
    size_t bytes = decoder_layout(dec);
    dec->memory = bytes == SIZE_MAX ? NULL : dec->d->ops->alloc(dec->d, bytes);
    if (!dec->memory) {
        decoder_free(&dec);
        return err_set(e, ERR_NOMEM, "no memory for a decoder of %d slots of %d tokens: %zu bytes",
            slots, capacity, bytes);
    }
    decoder_layout(dec);
    rope_upload(dec);
    *out = dec;
    return 0;
}

void decoder_free(struct decoder **pdec)
{
    struct decoder *dec = *pdec;
    if (!dec)
        return;
    if (dec->memory)
        dec->d->ops->free(dec->d, dec->memory);
    for (int i = 0; i < HOST_INTS; i++)
        free(dec->host[i]);
    free(dec->host_mask);
    free(dec->prefill_rows);
    free(dec->filled);
    free(dec->last);
    free(dec->cache_k);
    free(dec->cache_v);
    free(dec);
    *pdec = NULL;
}

/* --- the rows of a call ----------------------------------------------------------------------- */

static int refuse_fused(struct err *e)
{
    return err_set(e, ERR_UNSUPPORTED,
        "this model has no feedback weights: SOFT and FUSED "
        "decoding need them, STANDARD is possible");
}

static int check_row(const struct decoder *dec, const struct decode_row *r, struct err *e)
{
    const struct model_config *c = &dec->m->c;
    if (r->slot < 0 || r->slot >= dec->slots)
        return err_set(e, ERR_INPUT, "slot %d, right is 0 to %d", r->slot, dec->slots - 1);
    if (r->pos < 0 || r->pos >= dec->capacity)
        return err_set(e, ERR_INPUT, "position %d is past the decoder's capacity of %d tokens",
            r->pos, dec->capacity);
    if (r->first < 0 || r->first > r->pos)
        return err_set(e, ERR_INPUT, "first visible position %d of position %d, right is 0 to %d",
            r->first, r->pos, r->pos);
    if (r->token < 0 || r->token >= c->vocab)
        return err_set(e, ERR_INPUT, "token %d, right is 0 to %d", r->token, c->vocab - 1);
    if (r->fused != 0 && r->fused != 1)
        return err_set(e, ERR_INPUT, "fused is %d, right is 0 or 1", r->fused);
    if (r->fused && !c->feedback)
        return refuse_fused(e);
    if (r->fused && r->pos == r->first)
        return err_set(e, ERR_INPUT, "position %d begins its document and cannot be fused", r->pos);
    int last = dec->last[r->slot];
    if (last >= 0 && r->pos != last + 1)
        return err_set(e, ERR_INPUT,
            "position %d follows position %d of slot %d in one call, "
            "right is %d",
            r->pos, last, r->slot, last + 1);
    if (last < 0 && r->pos > dec->filled[r->slot])
        return err_set(e, ERR_INPUT, "position %d of slot %d: only %d were run before it", r->pos,
            r->slot, dec->filled[r->slot]);
    return 0;
}

/* All rows; on success the slots' lengths are those after the call. */
static int check_rows(struct decoder *dec, const struct decode_row *rows, int n, struct err *e)
{
    int rc = 0, i;
    if (n < 1 || n > dec->max_rows)
        return err_set(e, ERR_INPUT, "%d rows in a call, right is 1 to %d", n, dec->max_rows);
    for (i = 0; rc == 0 && i < n; i++) {
        rc = check_row(dec, &rows[i], e);
        if (rc == 0)
            dec->last[rows[i].slot] = rows[i].pos;
    }
    int seen = rc == 0 ? n : i - 1;
    for (i = 0; i < seen; i++) {
        if (rc == 0)
            dec->filled[rows[i].slot] = rows[i].pos + 1;
        dec->last[rows[i].slot] = -1;
    }
    return rc;
}

/* Uploads the rows; returns how many are fused. */
static int upload_rows(struct decoder *dec, const struct decode_row *rows, int n)
{
    const struct device_ops *o = dec->d->ops;
    int32_t *device[] = {
        dec->tokens, dec->slot, dec->pos, dec->first, dec->turn, dec->gather, dec->first_window};
    int fused = 0;
    for (int i = 0; i < n; i++) {
        const struct decode_row *r = &rows[i];
        int before = r->pos > 0 ? r->pos - 1 : 0; /* a plain row's is not used */
        dec->host[0][i] = r->token;
        dec->host[1][i] = r->slot;
        dec->host[2][i] = r->pos;
        dec->host[3][i] = r->first;
        dec->host[4][i] = dec->m->c.doc_mask ? r->pos - r->first : r->pos;
        dec->host[5][i] = r->slot * dec->capacity + before;
        int edge = r->pos - dec->m->c.window + 1;
        dec->host[6][i] = edge > r->first ? edge : r->first;
        dec->host_mask[i] = (uint8_t)r->fused;
        fused += r->fused;
    }
    for (int i = 0; i < HOST_INTS; i++)
        o->upload(dec->d, device[i], dec->host[i], (size_t)n * sizeof(int32_t));
    if (fused)
        o->upload(dec->d, dec->pass.mask, dec->host_mask, (size_t)n);
    return fused;
}

static float *hidden_at(const struct decoder *dec, int slot, int pos)
{
    size_t row = (size_t)slot * (size_t)dec->capacity + (size_t)pos;
    return dec->hidden + row * (size_t)dec->m->c.dim;
}

/* New states into their places: one copy for each run of positions of one slot. */
static void store_hidden(struct decoder *dec, const struct decode_row *rows, int n)
{
    size_t dim = (size_t)dec->m->c.dim;
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && rows[end].slot == rows[i].slot; end++)
            ;
        dec->d->ops->copy(dec->d, hidden_at(dec, rows[i].slot, rows[i].pos),
            dec->pass.h + (size_t)i * dim, (size_t)(end - i) * dim * sizeof(float));
    }
}

/* --- running ---------------------------------------------------------------------------------- */

/* Rows to their states in pass.h. border: the state before row 0, if it is not the newest one. */
static void run_rows(struct decoder *dec, const struct decode_row *rows, int n, const float *border)
{
    struct model *m = dec->m;
    const struct model_config *c = &m->c;
    const struct device_ops *o = dec->d->ops;
    struct block_run r = {dec->d, c, &m->w, &dec->mul, n, dec->turn, dec->cos_table, dec->sin_table,
        dec->norm, dec->act, dec->gated};
    struct attn_shape shape = {dec->slots, dec->capacity, c->heads, c->kv_heads, c->head_dim};
    struct layer_acts *a = &dec->layer;
    struct pass_acts *p = &dec->pass;
    size_t bytes = (size_t)c->dim * sizeof(float);
    int fused = upload_rows(dec, rows, n);
    plain_input(&r, dec->tokens, &dec->in, fused > 0);
    if (fused) {
        o->embed_fwd(
            dec->d, p->carried, dec->gather, dec->hidden, n, c->dim, dec->slots * dec->capacity);
        if (border)
            o->copy(dec->d, p->carried, border, bytes);
        fused_input(&r, &dec->in, p, a->x0);
    } else
        o->copy(dec->d, a->x0, dec->in.plain, (size_t)n * bytes);
    for (int l = 0; l < c->layers; l++) {
        block_qkv(&r, l, a);
        o->cache_put(
            dec->d, dec->cache_k[l], dec->cache_v[l], a->k, a->v, dec->slot, dec->pos, n, &shape);
        o->attn_cached(dec->d, a->att, a->q, dec->cache_k[l], dec->cache_v[l], dec->slot, dec->pos,
            model_config_window(c, l) ? dec->first_window : dec->first, n, &shape);
        block_finish(&r, l, a, a->x0);
    }
    o->rmsnorm_fwd(dec->d, p->h, p->rstd, a->x0, m->w.norm, n, c->dim, c->norm_eps);
    store_hidden(dec, rows, n);
}

/* Logits of the rows asked for, packed, in chunks that fit the workspace. */
static void read_logits(struct decoder *dec, int n, const uint8_t *row_logits, float *logits)
{
    const struct model_config *c = &dec->m->c;
    const struct device_ops *o = dec->d->ops;
    const float *h = dec->pass.h;
    int count = 0;
    for (int i = 0; row_logits && i < n; i++)
        if (row_logits[i])
            dec->host[0][count++] = i;
    if (!row_logits)
        count = n;
    else if (count > 0) {
        o->upload(dec->d, dec->gather, dec->host[0], (size_t)count * sizeof(int32_t));
        o->embed_fwd(dec->d, dec->picked, dec->gather, h, count, c->dim, n);
        h = dec->picked;
    }
    for (int at = 0; at < count; at += dec->chunk) {
        int rows = count - at < dec->chunk ? count - at : dec->chunk;
        struct operand part =
            operand(&dec->mul, NULL, h + (size_t)at * (size_t)c->dim, rows, c->dim);
        linear(&dec->mul, dec->logits, part, dec->m->w.embed, rows, c->vocab, c->dim, 1, 0);
        o->download(dec->d, logits + (size_t)at * (size_t)c->vocab, dec->logits,
            (size_t)rows * (size_t)c->vocab * sizeof(float));
    }
}

int decoder_run(struct decoder *dec, const struct decode_row *rows, int n,
    const uint8_t *row_logits, float *logits, struct err *e)
{
    int rc = check_rows(dec, rows, n, e);
    if (rc < 0)
        return rc;
    run_rows(dec, rows, n, NULL);
    if (logits)
        read_logits(dec, n, row_logits, logits);
    return dec->d->ops->sync(dec->d, e);
}

void decoder_hidden(struct decoder *dec, int slot, int pos, float *out)
{
    CHECK(slot >= 0 && slot < dec->slots && pos >= 0 && pos < dec->filled[slot]);
    dec->d->ops->download(
        dec->d, out, hidden_at(dec, slot, pos), (size_t)dec->m->c.dim * sizeof(float));
}

/* One pass over a prompt. */
struct prefill {
    int slot, n;
    const int32_t *tokens;
    int fused;      /* all but position 0 */
    int sequential; /* one position a call, each from the newest state */
};

/* Runs positions [at, end), reading the older state of the left neighbour where calls meet. */
static int prefill_call(
    struct decoder *dec, const struct prefill *p, int at, int end, struct err *e)
{
    size_t bytes = (size_t)dec->m->c.dim * sizeof(float);
    struct decode_row *rows = dec->prefill_rows;
    int older = p->fused && !p->sequential;
    for (int i = at; i < end; i++)
        rows[i - at] = (struct decode_row){p->slot, i, 0, p->tokens[i], p->fused && i > 0};
    int rc = check_rows(dec, rows, end - at, e);
    if (rc < 0)
        return rc;
    if (older) /* the next call needs it, this one overwrites it */
        dec->d->ops->copy(dec->d, dec->border[1], hidden_at(dec, p->slot, end - 1), bytes);
    run_rows(dec, rows, end - at, older && at > 0 ? dec->border[0] : NULL);
    float *swap = dec->border[0];
    dec->border[0] = dec->border[1];
    dec->border[1] = swap;
    return 0;
}

/* All positions, in calls of at most max_rows. Logits (V) of the last one, or NULL. */
static int prefill_pass(struct decoder *dec, const struct prefill *p, float *logits, struct err *e)
{
    int step = p->sequential ? 1 : dec->max_rows, at = 0, end = 0;
    for (; end < p->n; at = end) {
        end = p->n - at < step ? p->n : at + step;
        int rc = prefill_call(dec, p, at, end, e);
        if (rc < 0)
            return rc;
        if (end == p->n && logits) {
            memset(dec->host_mask, 0, (size_t)(end - at));
            dec->host_mask[end - at - 1] = 1;
            read_logits(dec, end - at, dec->host_mask, logits);
        }
    }
    return dec->d->ops->sync(dec->d, e);
}

int decoder_prefill(struct decoder *dec, int slot, const int32_t *tokens, int n, int passes,
    float *logits, struct err *e)
{
    struct prefill p = {slot, n, tokens, passes == 0, passes == 0};
    if (n < 1 || n > dec->capacity)
        return err_set(e, ERR_INPUT,
            "prompt of %d tokens, right is 1 to the decoder's capacity of "
            "%d",
            n, dec->capacity);
    if (passes < 0)
        return err_set(e, ERR_INPUT, "%d passes, right is 0 (sequential) or more", passes);
    if (passes != 1 && !dec->m->c.feedback)
        return refuse_fused(e);
    int rc = 0, left = passes ? passes : 1;
    for (; rc == 0 && left > 0; left--) {
        rc = prefill_pass(dec, &p, left == 1 ? logits : NULL, e);
        p.fused = 1;
    }
    return rc;
}
