#include "common/model_preset.h"

#include <stdio.h>
#include <string.h>

/* name, vocab, dim, layers, heads, kv_heads, head_dim, ffn, qk_norm, attn_gate, window, full_every.
 * The paper does not state the head size of its model: dim / heads here. */
const struct model_preset model_presets[] = {
    {"fbt-demo", 4096, 160, 4, 5, 5, 32, 448, 0, 0, 0, 0, "minutes on 2 cores"},
    {"fbt-30m", 16384, 384, 12, 6, 6, 64, 1152, 0, 0, 0, 0, "hours on a few cores"},
    {"fbt-124m", 50304, 768, 12, 12, 12, 64, 2048, 0, 0, 0, 0, "the size of GPT-2 small"},
    {"fbt-350m", 50304, 1024, 24, 16, 16, 64, 2688, 0, 0, 0, 0, "the size of GPT-2 medium"},
    {"fbt-1b", 100352, 1536, 24, 16, 8, 96, 6656, 1, 1, 2048, 6, "the paper's, arXiv 2608.08888"},
};
const int model_preset_count = sizeof model_presets / sizeof *model_presets;

const struct model_preset *model_preset_find(const char *name)
{
    for (int i = 0; i < model_preset_count; i++)
        if (strcmp(model_presets[i].name, name) == 0)
            return &model_presets[i];
    return NULL;
}

void model_preset_apply(const struct model_preset *p, struct model_config *c)
{
    c->dim = p->dim;
    c->layers = p->layers;
    c->heads = p->heads;
    c->kv_heads = p->kv_heads;
    c->head_dim = p->head_dim;
    c->ffn = p->ffn;
    c->qk_norm = p->qk_norm;
    c->attn_gate = p->attn_gate;
    c->window = p->window;
    c->full_every = p->full_every;
}

void model_preset_list(struct buf *out)
{
    buf_printf(out, "%-9s %14s %8s %6s %6s %11s %6s  %s\n", "preset", "parameters", "vocab", "dim",
        "layers", "heads", "ffn", "options");
    for (int i = 0; i < model_preset_count; i++) {
        const struct model_preset *p = &model_presets[i];
        struct model_config c = {.vocab = p->vocab, .feedback = 1};
        char heads[32];
        model_preset_apply(p, &c);
        snprintf(heads, sizeof heads, "%d/%d of %d", p->heads, p->kv_heads, p->head_dim);
        buf_printf(out, "%-9s %14lld %8d %6d %6d %11s %6d  ", p->name,
            (long long)model_config_params(&c), p->vocab, p->dim, p->layers, heads, p->ffn);
        if (p->qk_norm)
            buf_add_str(out, "QK-norm, ");
        if (p->attn_gate)
            buf_add_str(out, "gated attention, ");
        if (p->window)
            buf_printf(out, "window %d, full every %d, ", p->window, p->full_every);
        buf_printf(out, "%s\n", p->help);
    }
}
