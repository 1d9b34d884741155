// Values that follow from others, and the relations between values.
#include <math.h>
#include <string.h>

#include "common/config_table.h"
#include "common/model_preset.h"

#define MAX_ROWS         ((int64_t)1 << 60)
#define MAX_MICRO_TOKENS (1 << 24) /* of one forward; keeps a batch message below its limit */

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Derived defaults, one function a key: called where the key was not given. */
static void derive_kv_heads(struct config *c)
{
    c->model.kv_heads = c->model.heads;
}
static void derive_head_dim(struct config *c)
{
    c->model.head_dim = c->model.dim / c->model.heads;
}
static void derive_ffn(struct config *c)
{
    c->model.ffn = (c->model.dim * 8 + 95) / 96 * 32;
}
static void derive_residual_scale(struct config *c)
{
    c->model.residual_scale = (float)(1 / sqrt(2.0 * c->model.layers));
}
static void derive_micro_rows(struct config *c)
{
    int rows = c->train.batch_rows < 8 ? c->train.batch_rows : 8;
    while (c->train.batch_rows % rows)
        rows--;
    c->train.micro_rows = rows;
}
static void derive_phases(struct config *c)
{
    c->train.phases[0] = (struct pass_phase){.from = 0, .share = {[1] = 1}};
    c->train.phase_count = 1;
    if (c->model.feedback)
        c->train.phases[c->train.phase_count++] =
            (struct pass_phase){.from = 0.75, .share = {[2] = 0.88, [3] = 0.12}};
}
static void derive_lr(struct config *c)
{
    c->optim.lr = c->optim.kind == OPTIM_ADAMW ? 1e-3 : 1e-2;
}
static void derive_adam_lr(struct config *c)
{
    c->optim.adam_lr = c->optim.kind == OPTIM_ADAMW ? c->optim.lr : c->optim.lr / 20;
}
static void derive_weight_decay(struct config *c)
{
    c->optim.weight_decay = c->optim.kind == OPTIM_ADAMW ? 0.1 : 0.01;
}
static void derive_warmup(struct config *c)
{
    c->optim.warmup_steps = min64(200, c->train.steps / 10);
}
static void derive_eval_every(struct config *c)
{
    c->eval.every_steps = c->checkpoint.every_steps;
}
static void derive_suites(struct config *c)
{
    c->eval.suites[SUITE_LOSS] = 1;
    c->eval.suites[SUITE_FIXED_POINT] = c->model.feedback;
}
static void derive_regimes(struct config *c)
{
    c->eval.regimes[REGIME_STANDARD] = 1;
    c->eval.regimes[REGIME_SOFT] = c->eval.regimes[REGIME_FUSED] = c->model.feedback;
}
int config_max_passes(const struct config *c)
{
    int most = 1;
    for (int i = 0; i < c->train.phase_count; i++)
        for (int k = 1; k <= CONFIG_MAX_PASSES; k++)
            if (c->train.phases[i].share[k] > 0 && k > most)
                most = k;
    return most;
}
static void derive_eval_passes(struct config *c)
{
    c->eval.passes = config_max_passes(c);
}
static void derive_fixed_point(struct config *c)
{
    int half = c->data.seq_len / 2;
    c->eval.fixed_point_passes = half < 2 ? 2 : half < 64 ? half : 64;
}

/* In the order in which they may use each other. */
static const struct {
    const char *key;
    void (*derive)(struct config *c);
} derived[] = {
    {"model.kv_heads", derive_kv_heads},
    {"model.head_dim", derive_head_dim},
    {"model.ffn", derive_ffn},
    {"model.residual_scale", derive_residual_scale},
    {"train.micro_rows", derive_micro_rows},
    {"train.passes", derive_phases},
    {"optim.lr", derive_lr},
    {"optim.adam_lr", derive_adam_lr},
    {"optim.weight_decay", derive_weight_decay},
    {"optim.warmup_steps", derive_warmup},
    {"eval.every_steps", derive_eval_every},
    {"eval.suites", derive_suites},
    {"eval.regimes", derive_regimes},
    {"eval.passes", derive_eval_passes},
    {"eval.fixed_point_passes", derive_fixed_point},
};

/* The model keys that a preset speaks of. */
static const char *const preset_keys[] = {"model.dim", "model.layers", "model.heads",
    "model.kv_heads", "model.head_dim", "model.ffn", "model.qk_norm", "model.attn_gate",
    "model.window", "model.full_every"};

/* What was not given becomes the preset's, and counts as given. */
static void take_preset(struct config *c, uint8_t *given)
{
    const struct model_preset *p = model_preset_find(c->preset);
    if (!p)
        return;
    struct config from = *c;
    model_preset_apply(p, &from.model);
    for (size_t i = 0; i < sizeof preset_keys / sizeof *preset_keys; i++) {
        int k = config_find(preset_keys[i]);
        size_t at = config_keys[k].offset; /* all are int */
        if (!given[k])
            memcpy((char *)c + at, (const char *)&from + at, sizeof(int));
        given[k] = 1;
    }
}

void config_derive(struct config *c, uint8_t *given)
{
    take_preset(c, given);
    for (size_t i = 0; i < sizeof derived / sizeof *derived; i++)
        if (!given[config_find(derived[i].key)])
            derived[i].derive(c);
}

static int check_train(const struct config *c, const char **key, struct err *e)
{
    int64_t rows;
    *key = "train.micro_rows";
    if (c->train.batch_rows % c->train.micro_rows)
        return err_set(e, ERR_INPUT, "%d does not divide train.batch_rows (%d)",
            c->train.micro_rows, c->train.batch_rows);
    if ((int64_t)c->train.micro_rows * c->data.seq_len > MAX_MICRO_TOKENS)
        return err_set(e, ERR_INPUT, "%d rows of data.seq_len %d are more than %d tokens",
            c->train.micro_rows, c->data.seq_len, MAX_MICRO_TOKENS);
    *key = "train.steps";
    if (__builtin_mul_overflow(c->train.steps, (int64_t)c->train.batch_rows, &rows) ||
        rows > MAX_ROWS / c->data.seq_len)
        return err_set(e, ERR_INPUT, "%lld steps of %d rows of %d tokens are more than 2^60 tokens",
            (long long)c->train.steps, c->train.batch_rows, c->data.seq_len);
    *key = "train.passes";
    if (config_max_passes(c) > 1 && !c->model.feedback)
        return err_set(e, ERR_INPUT, "%d passes need model.feedback: true", config_max_passes(c));
    return 0;
}

static int check_optim(const struct config *c, const char **key, struct err *e)
{
    *key = "optim.min_lr";
    if (c->optim.min_lr > c->optim.lr)
        return err_set(e, ERR_INPUT, "%g is above optim.lr (%g)", c->optim.min_lr, c->optim.lr);
    *key = "train.z_loss_late";
    if (c->train.z_loss > 0 && c->train.z_loss_late && c->optim.schedule != LR_WSD)
        return err_set(e, ERR_INPUT,
            "the z-loss would never count: only optim.schedule wsd has a cooldown; "
            "false lets it count in every step");
    *key = "optim.warmup_steps";
    double cooldown =
        c->optim.schedule == LR_WSD ? floor(c->optim.cooldown * (double)c->train.steps) : 0;
    if ((double)c->optim.warmup_steps + cooldown > (double)c->train.steps)
        return err_set(e, ERR_INPUT,
            "%lld warm-up and %.0f cooldown steps are more than train.steps "
            "(%lld)",
            (long long)c->optim.warmup_steps, cooldown, (long long)c->train.steps);
    return 0;
}

static int check_eval(const struct config *c, const char **key, struct err *e)
{
    *key = "eval.every_steps";
    if (c->eval.every_steps % c->checkpoint.every_steps)
        return err_set(e, ERR_INPUT, "%lld is not a multiple of checkpoint.every_steps (%lld)",
            (long long)c->eval.every_steps, (long long)c->checkpoint.every_steps);
    *key = "checkpoint.keep_every";
    if (c->checkpoint.keep_every % c->checkpoint.every_steps)
        return err_set(e, ERR_INPUT, "%lld is not a multiple of checkpoint.every_steps (%lld)",
            (long long)c->checkpoint.keep_every, (long long)c->checkpoint.every_steps);
    *key = "eval.regimes";
    if (!c->model.feedback && (c->eval.regimes[REGIME_SOFT] || c->eval.regimes[REGIME_FUSED]))
        return err_set(e, ERR_INPUT, "soft and fused need model.feedback: true");
    *key = "eval.suites";
    if (!c->model.feedback && c->eval.suites[SUITE_FIXED_POINT])
        return err_set(e, ERR_INPUT, "fixed_point needs model.feedback: true");
    *key = "eval.passes";
    if (!c->model.feedback && c->eval.passes > 1)
        return err_set(e, ERR_INPUT, "%d passes need model.feedback: true", c->eval.passes);
    *key = "eval.fixed_point_passes";
    if (c->eval.suites[SUITE_FIXED_POINT] && c->eval.fixed_point_passes >= c->data.seq_len)
        return err_set(e, ERR_INPUT, "%d is not below data.seq_len (%d)",
            c->eval.fixed_point_passes, c->data.seq_len);
    return 0;
}

static int check_process(const struct config *c, const char **key, struct err *e)
{
    int micros = c->train.batch_rows / c->train.micro_rows;
    *key = "process.trainers";
    if (c->process.trainers > micros)
        return err_set(e, ERR_INPUT,
            "%d are more than the micro-batches of a step (%d: train.batch_rows / "
            "train.micro_rows)",
            c->process.trainers, micros);
    return 0;
}

/* The model's own check names its key first: "model.heads: 6 is not …". */
static int check_model(const struct config *c, const char **key, struct err *e)
{
    struct model_config m = c->model;
    struct err inner = {0};
    if (!m.vocab) /* known only when the plan is made */
        m.vocab = 1;
    int rc = model_config_check(&m, &inner);
    if (rc == 0)
        return 0;
    char *colon = strchr(inner.msg, ':');
    if (colon)
        *colon = 0;
    int i = config_find(inner.msg);
    *key = config_keys[i < 0 ? config_find("model.dim") : i].name;
    return err_set(e, rc, "%s", colon ? colon + 2 : inner.msg);
}

int config_check(const struct config *c, const char **key, struct err *e)
{
    int rc = check_model(c, key, e);
    if (rc == 0)
        rc = check_train(c, key, e);
    if (rc == 0)
        rc = check_optim(c, key, e);
    if (rc == 0)
        rc = check_process(c, key, e);
    return rc < 0 ? rc : check_eval(c, key, e);
}
