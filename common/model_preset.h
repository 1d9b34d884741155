/*
 * Models by name: one table of sizes and options. `model.preset: fbt-124m` takes them for every
 * model key that is not given. Read-only.
 */
#ifndef COMMON_MODEL_PRESET_H
#define COMMON_MODEL_PRESET_H

#include "common/mem.h"
#include "common/model_config.h"

#define MODEL_PRESET_NONE "none"

struct model_preset {
    const char *name;
    int vocab; /* what its parameters are counted with; a run's comes from its tokenizer */
    int dim, layers, heads, kv_heads, head_dim, ffn;
    int qk_norm, attn_gate, window, full_every;
    const char *help;
};

extern const struct model_preset model_presets[];
extern const int model_preset_count;

/* The preset, or NULL. */
const struct model_preset *model_preset_find(const char *name);
/* Its sizes and options over what c has; vocab and the rest stay. */
void model_preset_apply(const struct model_preset *p, struct model_config *c);
/* One line a preset: name, parameters with feedback, sizes. */
void model_preset_list(struct buf *out);

#endif
