#include "kernels/model.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "kernels/model_internal.h"

static int limits_check(const struct model_config *c, const struct model_limits *lim, struct err *e)
{
    if (lim->batch < 1 || lim->seq < 1 || lim->batch > INT_MAX / lim->seq)
        return err_set(e, ERR_INPUT, "micro-batch of %d rows of %d tokens: right is 1 to %d tokens",
            lim->batch, lim->seq, INT_MAX);
    if (c->qk_norm && lim->batch * lim->seq > INT_MAX / c->heads)
        return err_set(e, ERR_INPUT,
            "micro-batch of %d rows of %d tokens and %d heads: right is at most %d rows of heads",
            lim->batch, lim->seq, c->heads, INT_MAX);
    if (lim->passes < 1)
        return err_set(e, ERR_INPUT, "%d passes: right is 1 or more", lim->passes);
    if (lim->train && lim->passes > MODEL_MAX_PASSES)
        return err_set(e, ERR_INPUT, "%d passes of a training step: right is 1 to %d", lim->passes,
            MODEL_MAX_PASSES);
    return 0;
}

int model_shell_new(struct device *d, const struct model_config *c, const struct model_limits *lim,
    struct model **out, struct err *e)
{
    *out = NULL;
    int rc = model_config_check(c, e);
    if (rc == 0)
        rc = limits_check(c, lim, e);
    if (rc < 0)
        return rc;
    struct model *m = mem_array(1, sizeof *m);
    m->d = d;
    m->c = *c;
    m->lim = *lim;
    if ((rc = weight_table_make(c, &m->table, e)) < 0) {
        model_free(&m);
        return rc;
    }
    size_t half = lim->train && lim->precision == PRECISION_BF16 ? sizeof(bf16) : 0;
    m->chunk = logits_chunk(c->vocab, lim->batch * lim->seq, sizeof(float) + half);
    m->w.layers = mem_array((size_t)c->layers, sizeof *m->w.layers);
    m->g.layers = mem_array((size_t)c->layers, sizeof *m->g.layers);
    m->shared_keys = mem_array((size_t)c->layers, sizeof *m->shared_keys);
    m->passes = mem_array((size_t)model_pass_sets(m), sizeof *m->passes);
    for (int k = 0; k < model_pass_sets(m); k++)
        m->passes[k].layers = mem_array((size_t)c->layers, sizeof *m->passes[k].layers);
    *out = m;
    return 0;
}

/* The four allocations; a NULL for what this model does not have. */
static int take_memory(struct model *m, struct err *e)
{
    struct model_memory sizes;
    model_layout(m, &sizes);
    if (sizes.total == SIZE_MAX)
        return err_set(e, ERR_NOMEM, "the model's memory overflows 64 bits");
    size_t bytes[BLOCK_COUNT] = {sizes.weights, sizes.gradients, 0, sizes.workspace};
    for (int k = 0; k < model_pass_sets(m); k++)
        bytes[BLOCK_ACTIVATIONS] += sizes.activations[k];
    for (int i = 0; i < BLOCK_COUNT; i++) {
        m->memory[i] = bytes[i] ? m->d->ops->alloc(m->d, bytes[i]) : NULL;
        if (bytes[i] && !m->memory[i])
            return err_set(e, ERR_NOMEM,
                "no memory for the model: %zu bytes of weights, %zu of gradients, %zu of "
                "activations, %zu of workspace (smaller would be fewer rows in a micro-batch)",
                bytes[BLOCK_WEIGHTS], bytes[BLOCK_GRADIENTS], bytes[BLOCK_ACTIVATIONS],
                bytes[BLOCK_WORKSPACE]);
    }
    model_layout(m, &sizes);
    return 0;
}

int model_new(struct device *d, const struct model_config *c, const struct model_limits *lim,
    struct model **out, struct err *e)
{
    struct model *m;
    int rc = model_shell_new(d, c, lim, &m, e);
    *out = NULL;
    if (rc < 0)
        return rc;
    if ((rc = take_memory(m, e)) < 0) {
        model_free(&m);
        return rc;
    }
    size_t n = (size_t)lim->batch * (size_t)lim->seq,
           table = (size_t)lim->seq * (size_t)c->head_dim / 2;
    m->host_positions = mem_array(n, sizeof *m->host_positions);
    m->host_first = mem_array(n, sizeof *m->host_first);
    m->host_window = mem_array(n, sizeof *m->host_window);
    m->host_index = mem_array(n, sizeof *m->host_index);
    m->host_starts = mem_array((size_t)lim->batch + 1, sizeof *m->host_starts);
    m->host_weights = mem_array(n, sizeof *m->host_weights);
    float *tables = mem_array(2 * table, sizeof *tables);
    rope_table(tables, tables + table, lim->seq, c->head_dim, c->rope_theta);
    d->ops->upload(d, m->cos_table, tables, table * sizeof *tables);
    d->ops->upload(d, m->sin_table, tables + table, table * sizeof *tables);
    rc = d->ops->sync(d, e);
    free(tables);
    if (rc < 0)
        model_free(&m);
    *out = m;
    return rc;
}

void model_free(struct model **pm)
{
    struct model *m = *pm;
    if (!m)
        return;
    for (int i = 0; i < BLOCK_COUNT; i++)
        if (m->memory[i])
            m->d->ops->free(m->d, m->memory[i]);
    for (int k = 0; m->passes && k < model_pass_sets(m); k++)
        free(m->passes[k].layers);
    free(m->passes);
    free(m->w.layers);
    free(m->g.layers);
    free(m->host_positions);
    free(m->host_first);
    free(m->host_window);
    free(m->host_index);
    free(m->host_starts);
    free(m->host_weights);
    free(m->shared_keys);
    weight_table_release(&m->table);
    free(m);
    *pm = NULL;
}

const struct model_config *model_config_of(const struct model *m)
{
    return &m->c;
}

const struct weight_table *model_weights(const struct model *m)
{
    return &m->table;
}

struct device *model_device(const struct model *m)
{
    return m->d;
}

float *model_params(struct model *m)
{
    return m->params;
}

float *model_grads(struct model *m)
{
    return m->grads;
}

int model_shares_prefixes(const struct model *m)
{
    return model_limits_share(&m->c, &m->lim);
}

int model_shared(const struct model *m)
{
    return m->sharing;
}

void model_on_final(struct model *m, model_final_fn *final, void *ctx)
{
    m->final = final;
    m->final_ctx = ctx;
}

/* --- a micro-batch ---------------------------------------------------------------------------- */

static int check_ids(const struct model_config *c, const struct model_batch *b, struct err *e)
{
    for (int64_t i = 0; i < (int64_t)b->batch * b->seq; i++) {
        int row = (int)(i / b->seq), at = (int)(i % b->seq);
        if (b->tokens[i] < 0 || b->tokens[i] >= c->vocab)
            return err_set(e, ERR_INPUT, "token %d of row %d is %d, right is 0 to %d", at, row,
                b->tokens[i], c->vocab - 1);
        if (b->targets && (b->targets[i] < -1 || b->targets[i] >= c->vocab))
            return err_set(e, ERR_INPUT, "target %d of row %d is %d, right is -1 to %d", at, row,
                b->targets[i], c->vocab - 1);
        if (b->doc_starts[i] > 1)
            return err_set(e, ERR_INPUT, "document start %d of row %d is %d, right is 0 or 1", at,
                row, b->doc_starts[i]);
    }
    return 0;
}

static int check_masks(const struct model_config *c, const struct model_batch *b, struct err *e)
{
    int64_t n = (int64_t)b->batch * b->seq;
    for (int k = 0; k + 1 < b->passes; k++)
        for (int64_t i = 0; i < n; i++) {
            int row = (int)(i / b->seq), at = (int)(i % b->seq);
            uint8_t v = b->masks[k * n + i];
            if (v > 1)
                return err_set(e, ERR_INPUT,
                    "mask of pass %d, row %d, position %d is %d, right is "
                    "0 or 1",
                    k + 2, row, at, v);
            if (v && (at == 0 || (c->doc_mask && b->doc_starts[i])))
                return err_set(e, ERR_INPUT,
                    "mask of pass %d, row %d fuses position %d, which "
                    "begins a %s and has no state before it",
                    k + 2, row, at, at == 0 ? "row" : "document");
        }
    return 0;
}

int model_batch_check(const struct model_config *c, const struct model_batch *b, struct err *e)
{
    if (b->batch < 1 || b->seq < 1 || b->batch > INT_MAX / b->seq)
        return err_set(e, ERR_INPUT, "%d rows of %d tokens: right is 1 to %d tokens", b->batch,
            b->seq, INT_MAX);
    if (b->passes < 1)
        return err_set(e, ERR_INPUT, "%d passes: right is 1 or more", b->passes);
    if (b->passes > 1 && !c->feedback)
        return err_set(
            e, ERR_INPUT, "%d passes: a model without feedback weights has 1", b->passes);
    if (b->passes > 1 && !b->masks)
        return err_set(e, ERR_INPUT, "%d passes need masks", b->passes);
    int rc = check_ids(c, b, e);
    return rc < 0 ? rc : check_masks(c, b, e);
}

struct attn_shape model_attn_shape(const struct model *m, const struct model_batch *b)
{
    return (struct attn_shape){b->batch, b->seq, m->c.heads, m->c.kv_heads, m->c.head_dim};
}

struct pass_rows model_all_rows(const struct model *m, const struct model_batch *b)
{
    return (struct pass_rows){.n = b->batch * b->seq,
        .positions = m->positions,
        .targets = m->targets,
        .first = m->first,
        .first_window = m->first_window};
}

const int32_t *model_first(const struct model *m, const struct pass_rows *rows, int layer)
{
    return model_config_window(&m->c, layer) ? rows->first_window : rows->first;
}

/* Position and first visible position of every token. */
static void place_tokens(struct model *m, const struct model_batch *b)
{
    for (int r = 0; r < b->batch; r++) {
        size_t row = (size_t)r * (size_t)b->seq;
        for (int t = 0, start = 0; t < b->seq; t++) {
            if (m->c.doc_mask && b->doc_starts[row + (size_t)t])
                start = t;
            int edge = t - m->c.window + 1; /* non-decreasing, as start is */
            m->host_first[row + (size_t)t] = start;
            m->host_window[row + (size_t)t] = edge > start ? edge : start;
            m->host_positions[row + (size_t)t] = t - start;
        }
    }
}

void model_batch_upload(struct model *m, const struct model_batch *b)
{
    const struct device_ops *o = m->d->ops;
    size_t bytes = (size_t)b->batch * (size_t)b->seq * sizeof(int32_t);
    CHECK(b->batch >= 1 && b->batch <= m->lim.batch && b->seq >= 1 && b->seq <= m->lim.seq);
    CHECK(b->passes == 1 || (b->passes > 1 && m->c.feedback && b->masks));
    place_tokens(m, b);
    o->upload(m->d, m->tokens, b->tokens, bytes);
    if (b->targets)
        o->upload(m->d, m->targets, b->targets, bytes);
    else
        o->zero(m->d, m->targets, bytes);
    o->upload(m->d, m->positions, m->host_positions, bytes);
    o->upload(m->d, m->first, m->host_first, bytes);
    if (m->c.window)
        o->upload(m->d, m->first_window, m->host_window, bytes);
}
