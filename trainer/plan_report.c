#include "trainer/plan_report.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define LABEL   "%-12s"
#define COLUMNS 64 /* of the pictures */

/* "4.9 M" in steps of 1000. */
static const char *scaled(double x, char out[32])
{
    static const char units[] = " kMGTPE";
    int u = 0;
    while (x >= 999.5 && units[u + 1]) {
        x /= 1000;
        u++;
    }
    if (u == 0)
        snprintf(out, 32, "%.0f", x);
    else
        snprintf(out, 32, x < 9.995 ? "%.2f %c" : x < 99.95 ? "%.1f %c" : "%.0f %c", x, units[u]);
    return out;
}

static const char *duration(double s, char out[32])
{
    if (s < 90)
        snprintf(out, 32, "%.0f s", s);
    else if (s < 5400)
        snprintf(out, 32, "%.0f min", s / 60);
    else if (s < 48 * 3600)
        snprintf(out, 32, "%.1f h", s / 3600);
    else
        snprintf(out, 32, "%.1f days", s / 86400);
    return out;
}

static void add_model(const struct plan *p, const struct plan_costs *c, struct buf *out)
{
    const struct model_config *m = &p->c.model;
    char n[32];
    buf_printf(out, LABEL "%.16s\n", "plan", p->hash);
    buf_printf(out,
        LABEL "%d layers, dim %d, heads %d of %d (key/value %d), ffn %d, vocabulary %d\n", "model",
        m->layers, m->dim, m->heads, m->head_dim, m->kv_heads, m->ffn, m->vocab);
    if (m->qk_norm || m->attn_gate || m->window)
        buf_printf(out, LABEL "%s%s", "", m->qk_norm ? "QK-norm, " : "",
            m->attn_gate ? "gated attention, " : "");
    if (m->window)
        buf_printf(out, "window %d, full in %d of %d layers\n", m->window,
            m->full_every ? m->layers / m->full_every : 0, m->layers);
    else if (m->qk_norm || m->attn_gate)
        buf_add_str(out, "full attention\n");
    buf_printf(out, LABEL "%s, %s\n", "parameters", scaled((double)c->params, n),
        m->feedback ? "feedback included, readout tied" : "without feedback, readout tied");
}

static void add_amounts(const struct plan *p, const struct plan_costs *c, struct buf *out)
{
    char a[32], b[32], t[32];
    buf_printf(out, LABEL "%lld of %d rows of %d tokens: %s rows, %s tokens, %s with every pass\n",
        "steps", (long long)p->c.train.steps, p->c.train.batch_rows, p->c.data.seq_len,
        scaled(c->rows, a), scaled(c->tokens, b), scaled(c->token_passes, t));
    buf_printf(out, LABEL, "passes");
    for (int k = 1, first = 1; k <= CONFIG_MAX_PASSES; k++) {
        if (!c->steps[k])
            continue;
        buf_printf(out, "%s%d-pass %lld steps (%.1f %%)", first ? "" : ", ", k,
            (long long)c->steps[k], 100.0 * (double)c->steps[k] / (double)p->c.train.steps);
        first = 0;
    }
    buf_add_char(out, '\n');
}

/* First step of column i. */
static int64_t column_step(const struct plan *p, int i)
{
    return (int64_t)((double)p->c.train.steps * i / COLUMNS);
}

static void add_lr_picture(const struct plan *p, struct buf *out)
{
    enum { ROWS = 6 };
    for (int row = ROWS; row >= 1; row--) {
        if (row == ROWS)
            buf_printf(out, "  lr %-8.3g|", p->c.optim.lr);
        else
            buf_printf(out, "%13s|", "");
        for (int i = 0; i < COLUMNS; i++)
            buf_add_char(out,
                plan_lr(p, column_step(p, i)) >= p->c.optim.lr * (row - 0.5) / ROWS ? '#' : ' ');
        buf_add_str(out, "|\n");
    }
}

/* One line a pass count; the darker a column the more of its steps have it. */
static void add_pass_picture(const struct plan *p, const struct plan_costs *c, struct buf *out)
{
    enum { SAMPLES = 50 };
    static const char shades[] = " .:-=+*%#";
    for (int k = 1; k <= CONFIG_MAX_PASSES; k++) {
        if (!c->steps[k])
            continue;
        buf_printf(out, "  %d-pass%5s|", k, "");
        for (int i = 0; i < COLUMNS; i++) {
            int64_t lo = column_step(p, i), hi = column_step(p, i + 1);
            int64_t stride = (hi - lo) / SAMPLES + 1;
            int n = 0, hits = 0;
            for (int64_t s = lo; s < hi || s == lo; s += stride, n++)
                hits += plan_passes(p, s) == k;
            /* blank: none; the darkest: all */
            buf_add_char(out, hits == n ? shades[8] : shades[(hits * 7 + n - 1) / n]);
        }
        buf_add_str(out, "|\n");
    }
    buf_printf(out, "%13s 0%*lld\n", "step", COLUMNS - 1, (long long)p->c.train.steps);
}

static void add_sources(const struct plan *p, struct buf *out)
{
    char a[32], b[32];
    buf_printf(out, LABEL "%-20s %8s %10s %10s %8s %10s\n", "data", "source", "share", "tokens",
        "drawn", "epochs", "validation");
    for (int s = 0; s < p->source_count; s++) {
        const struct plan_source *src = &p->sources[s];
        uint64_t rows = plan_source_rows(p, s);
        buf_printf(out, LABEL "%-20.20s %6.2f %% %10s", "", src->name,
            100.0 * src->quota / PLAN_BLOCK_SLOTS, scaled((double)src->train_tokens, a));
        buf_printf(out, " %10s %8.2f %10s\n", scaled((double)rows * p->c.data.seq_len, a),
            (double)rows / (double)src->train_samples, scaled((double)src->val_tokens, b));
    }
}

static void add_memory(const struct plan *p, const struct plan_costs *c, struct buf *out)
{
    const struct plan_memory *m = &c->memory;
    char n[32];
    for (int i = 0; i < m->count; i++)
        buf_printf(out, LABEL "%8sB  %s\n", i ? "" : "memory", scaled((double)m->parts[i].bytes, n),
            m->parts[i].what);
    buf_printf(out, LABEL "%8sB  in all\n", "", scaled((double)m->total, n));
    buf_printf(out, LABEL "%s\n", "products",
        p->c.train.precision == PRECISION_BF16
            ? "of operands rounded to bf16, sums in float32 (train.precision)"
            : "float32");
    if (m->passes > 1)
        buf_printf(out, LABEL "%s\n", "prefixes",
            m->sharing ? "shared: passes after the first compute their fused tokens alone"
            : p->c.train.prefix_sharing
                ? "not shared, which needs data.doc_mask: every pass computes every token"
                : "not shared (train.prefix_sharing: off): every pass computes every token");
}

static void add_arithmetic(const struct plan_costs *c, struct buf *out)
{
    char a[32], b[32], t[32];
    buf_printf(out, LABEL, "FLOPs");
    for (int k = 1; k <= CONFIG_MAX_PASSES; k++)
        if (c->steps[k])
            buf_printf(out, "%s a token with %d pass%s, ", scaled(c->flops_token[k], a), k,
                k > 1 ? "es" : "");
    buf_printf(out, "%s in all\n", scaled(c->flops, a));
    buf_printf(out, LABEL "%s for one pass, the further passes add %.1f %%\n", "",
        scaled(c->flops_one_pass, b), 100 * (c->flops / c->flops_one_pass - 1));
    if (c->flops_computed < c->flops)
        buf_printf(out, LABEL "%s computed: about %.0f %% of the further passes, prefixes shared\n",
            "", scaled(c->flops_computed, a), 100 * c->fused_share);
    if (c->flops_optimizer > 0)
        buf_printf(out, LABEL "%s more in the optimizer (%.1f %%)\n", "",
            scaled(c->flops_optimizer, a), 100 * c->flops_optimizer / c->flops);
    buf_printf(out, LABEL "about %s at %.0f %% of %s FLOP/s in matrix products (%s)\n", "time",
        duration(c->seconds, t), 100 * PLAN_EFFICIENCY, scaled(c->matmul_flops, a),
        c->measured ? "measured here" : "as given");
}

void plan_report_text(const struct plan *p, const struct plan_costs *c, struct buf *out)
{
    add_model(p, c, out);
    add_amounts(p, c, out);
    add_lr_picture(p, out);
    add_pass_picture(p, c, out);
    add_sources(p, out);
    add_memory(p, c, out);
    add_arithmetic(c, out);
}

json_t *plan_report_json(const struct plan *p, const struct plan_costs *c)
{
    json_t *steps = json_object(), *token = json_object(), *sources = json_array();
    for (int k = 1; k <= CONFIG_MAX_PASSES; k++) {
        char key[12];
        if (!c->steps[k])
            continue;
        snprintf(key, sizeof key, "%d", k);
        json_object_set_new(steps, key, json_integer(c->steps[k]));
        json_object_set_new(token, key, json_real(c->flops_token[k]));
    }
    for (int s = 0; s < p->source_count; s++) {
        uint64_t rows = plan_source_rows(p, s);
        json_array_append_new(
            sources, json_pack("{s:s, s:f, s:I, s:I, s:I, s:f}", "name", p->sources[s].name,
                         "share", (double)p->sources[s].quota / PLAN_BLOCK_SLOTS, "train_tokens",
                         (json_int_t)p->sources[s].train_tokens, "val_tokens",
                         (json_int_t)p->sources[s].val_tokens, "rows", (json_int_t)rows, "epochs",
                         (double)rows / (double)p->sources[s].train_samples));
    }
    json_t *memory = json_object();
    for (int i = 0; i < c->memory.count; i++)
        json_object_set_new(
            memory, c->memory.parts[i].key, json_integer((json_int_t)c->memory.parts[i].bytes));
    json_object_set_new(memory, "total", json_integer((json_int_t)c->memory.total));
    return json_pack("{s:s, s:o?, s:b, s:I, s:o, s:f, s:f, s:f, s:o, s:o, s:o, s:f, s:f, s:f, s:f, "
                     "s:f, s:b, s:f}",
        "plan_hash", p->hash, "plan", json_loads(p->json, 0, NULL), "prefix_sharing",
        c->memory.sharing, "params", (json_int_t)c->params, "steps", steps, "rows", c->rows,
        "tokens", c->tokens, "token_passes", c->token_passes, "sources", sources, "memory_bytes",
        memory, "flops_per_token", token, "flops", c->flops, "flops_one_pass", c->flops_one_pass,
        "flops_computed", c->flops_computed, "flops_optimizer", c->flops_optimizer,
        "matmul_flops_per_second", c->matmul_flops, "measured", c->measured, "seconds", c->seconds);
}
