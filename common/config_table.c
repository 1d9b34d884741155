#include "common/config_table.h"

#include <stddef.h>
#include <string.h>

#include "common/model_preset.h"

#define AT(field) offsetof(struct config, field)
#define STEPS_MAX 1e12
#define SEED_MAX  9007199254740991.0 /* 2^53 − 1: exact in every JSON reader */

/* name, type, field, min, max, in the plan, default, help. Sections stand together: printing relies
 * on it. */
const struct config_key config_keys[] = {
    {"run.name", CONFIG_NAME, AT(run.name), 0, 0, 0, "run", "name of the run and of its directory"},
    {"run.dir", CONFIG_TEXT, AT(run.dir), 0, 0, 0, "runs", "directory that holds run directories"},

    {"model.preset", CONFIG_PRESET, AT(preset), 0, 0, 0, MODEL_PRESET_NONE,
        "a model by name (fb-plan --presets), for the model keys that are not given"},
    {"model.dim", CONFIG_INT, AT(model.dim), 2, 65536, 1, "256", "width of the residual stream, D"},
    {"model.layers", CONFIG_INT, AT(model.layers), 1, 1024, 1, "4", "number of blocks, L"},
    {"model.heads", CONFIG_INT, AT(model.heads), 1, 1024, 1, "4", "query heads"},
    {"model.kv_heads", CONFIG_INT, AT(model.kv_heads), 1, 1024, 1, "",
        "key/value heads, divides model.heads; default: model.heads"},
    {"model.head_dim", CONFIG_INT, AT(model.head_dim), 2, 1024, 1, "",
        "width of one head, even; default: model.dim / model.heads"},
    {"model.ffn", CONFIG_INT, AT(model.ffn), 1, 1048576, 1, "",
        "width of the SwiGLU; default: 8/3 of model.dim, rounded up to a multiple of 32"},
    {"model.norm_eps", CONFIG_FLOAT, AT(model.norm_eps), 1e-12, 0.1, 1, "1e-5",
        "epsilon of every RMS norm"},
    {"model.rope_theta", CONFIG_REAL, AT(model.rope_theta), 1, 1e12, 1, "10000",
        "base of the rotary embedding"},
    {"model.residual_scale", CONFIG_FLOAT, AT(model.residual_scale), 1e-6, 4, 1, "",
        "factor of each residual branch; default: 1/sqrt(2 layers)"},
    {"model.feedback", CONFIG_BOOL, AT(model.feedback), 0, 1, 1, "true",
        "feed the previous top state back into the input (needed for more than one pass)"},
    {"model.in_norm", CONFIG_BOOL, AT(model.in_norm), 0, 1, 1, "true",
        "RMS norm of the plain token input"},
    {"model.gate_norm", CONFIG_BOOL, AT(model.gate_norm), 0, 1, 1, "true",
        "RMS norm of the token before the fusion gate"},
    {"model.out_norm", CONFIG_BOOL, AT(model.out_norm), 0, 1, 1, "true",
        "RMS norm of the fused input"},
    {"model.qk_norm", CONFIG_BOOL, AT(model.qk_norm), 0, 1, 1, "false",
        "RMS norm of each query and key head before the rotary embedding"},
    {"model.attn_gate", CONFIG_BOOL, AT(model.attn_gate), 0, 1, 1, "false",
        "sigmoid gate on the output of attention, from the block's input"},
    {"model.window", CONFIG_INT, AT(model.window), 0, 16777216, 1, "0",
        "positions that a query sees, itself counted; 0: all before it"},
    {"model.full_every", CONFIG_INT, AT(model.full_every), 0, 1024, 1, "0",
        "with model.window: every n-th layer sees all positions; 0: none does"},

    {"data.tokenizer", CONFIG_TEXT, AT(data.tokenizer), 0, 0, 1, NULL, "tokenizer.json"},
    {"data.sources", CONFIG_SOURCES, AT(data.sources), 0, 0, 1, NULL,
        "list of {name, path, weight}: directories made by fb-ingest; weight is relative, default "
        "1"},
    {"data.seq_len", CONFIG_INT, AT(data.seq_len), 2, 1048576, 1, "256", "tokens of a row, S"},
    {"data.doc_mask", CONFIG_BOOL, AT(model.doc_mask), 0, 1, 1, "true",
        "attention and positions stay inside a document"},

    {"train.steps", CONFIG_INT64, AT(train.steps), 1, STEPS_MAX, 1, "1000", "optimizer steps"},
    {"train.batch_rows", CONFIG_INT, AT(train.batch_rows), 1, 1048576, 1, "16",
        "rows of one step over all ranks"},
    {"train.micro_rows", CONFIG_INT, AT(train.micro_rows), 1, 65536, 1, "",
        "rows of one forward and backward, divides train.batch_rows; default: its largest divisor "
        "up to 8"},
    {"train.seed", CONFIG_INT64, AT(train.seed), 0, SEED_MAX, 1, "1", "seed of everything random"},
    {"train.init_from", CONFIG_TEXT, AT(init_from), 0, 0, 1, "none",
        "directory of a committed checkpoint to begin with the weights of; fusion matrices that it "
        "lacks are fresh"},
    {"train.lambda", CONFIG_REAL, AT(train.lambda), 0, 1000, 1, "1",
        "weight of the mean loss of passes 2 and on"},
    {"train.jitter", CONFIG_REAL, AT(train.jitter), 0, 10, 1, "0.02",
        "uniform noise on the carried state in training, plus or minus"},
    {"train.z_loss", CONFIG_REAL, AT(train.z_loss), 0, 1, 1, "0",
        "weight of the z-loss: the squared log-sum-exp of the logits, in every pass"},
    {"train.z_loss_late", CONFIG_BOOL, AT(train.z_loss_late), 0, 1, 1, "true",
        "the z-loss only in the cooldown of optim.schedule wsd"},
    {"train.prefix_mixin.fully_fused", CONFIG_REAL, AT(train.fully_fused), 0, 1, 1, "0.5",
        "share of documents fused from their second token; the others from a uniform cut"},
    {"train.passes", CONFIG_PHASES, AT(train.phases), 0, 0, 1, "",
        "list of {from: fraction of the run, passes: {count: share}}; default: [{from: 0, passes: "
        "{1: 1}}, {from: 0.75, passes: {2: 0.88, 3: 0.12}}], one pass without model.feedback"},
    {"train.precision", CONFIG_PRECISION, AT(train.precision), 0, 0, 1, "f32",
        "f32, or bf16: linear layers multiply operands rounded to bfloat16 and add in float32"},
    {"train.prefix_sharing", CONFIG_SHARING, AT(train.prefix_sharing), 0, 0, 1, "auto",
        "auto: passes after the first compute only their fused tokens (needs data.doc_mask); off: "
        "every token"},
    {"train.recompute", CONFIG_RECOMPUTE, AT(train.recompute), 0, 0, 0, "none",
        "none, inner or layer: what is dropped after the forward and computed again, the same bits "
        "for less memory; a list gives each pass its own, the last for the rest"},

    {"optim.name", CONFIG_OPTIM, AT(optim.kind), 0, 0, 1, "adamw",
        "adamw, muon or normuon; the latter two are for the blocks' matrices, with Adam for the "
        "rest"},
    {"optim.lr", CONFIG_REAL, AT(optim.lr), 1e-9, 10, 1, "",
        "highest learning rate; default: 1e-3, with muon and normuon 1e-2"},
    {"optim.adam_lr", CONFIG_REAL, AT(optim.adam_lr), 1e-12, 10, 1, "",
        "highest rate of the embedding, norms and fusion, on the same schedule; default: optim.lr, "
        "with muon and normuon a twentieth of it"},
    {"optim.min_lr", CONFIG_REAL, AT(optim.min_lr), 0, 10, 1, "0", "learning rate at the end"},
    {"optim.schedule", CONFIG_SCHEDULE, AT(optim.schedule), 0, 0, 1, "wsd",
        "after the warm-up: wsd (stable, then a linear cooldown), cosine or constant"},
    {"optim.warmup_steps", CONFIG_INT64, AT(optim.warmup_steps), 0, STEPS_MAX, 1, "",
        "steps of linear warm-up; default: 200, at most a tenth of train.steps"},
    {"optim.cooldown", CONFIG_REAL, AT(optim.cooldown), 0, 1, 1, "0.25",
        "wsd: last fraction of the run, in which the rate falls to optim.min_lr"},
    {"optim.beta1", CONFIG_REAL, AT(optim.beta1), 0, 0.9999, 1, "0.9", "Adam, first moment"},
    {"optim.beta2", CONFIG_REAL, AT(optim.beta2), 0, 0.99999, 1, "0.95", "Adam, second moment"},
    {"optim.eps", CONFIG_REAL, AT(optim.eps), 1e-20, 1, 1, "1e-8", "Adam, epsilon"},
    {"optim.momentum", CONFIG_REAL, AT(optim.momentum), 0, 0.9999, 1, "0.95",
        "muon and normuon: Nesterov momentum"},
    {"optim.muon_beta2", CONFIG_REAL, AT(optim.muon_beta2), 0, 0.99999, 1, "0.95",
        "normuon: second moment of each row"},
    {"optim.weight_decay", CONFIG_REAL, AT(optim.weight_decay), 0, 10, 1, "",
        "decoupled decay of matrices (not of norms, the embedding or the fusion); default: 0.1, "
        "with muon and normuon 0.01"},
    {"optim.clip_norm", CONFIG_REAL, AT(optim.clip_norm), 0, 1e9, 1, "1",
        "largest global norm of the gradient; 0: never clip"},
    {"optim.fusion_lr_scale", CONFIG_REAL, AT(optim.fusion_lr_scale), 0, 1000, 1, "1",
        "factor of the fusion matrices' rate, times optim.adam_lr"},

    {"checkpoint.every_steps", CONFIG_INT64, AT(checkpoint.every_steps), 1, STEPS_MAX, 1, "500",
        "steps between checkpoints"},
    {"checkpoint.keep_last", CONFIG_INT, AT(checkpoint.keep_last), 1, 1000000, 0, "3",
        "committed checkpoints kept"},
    {"checkpoint.keep_every", CONFIG_INT64, AT(checkpoint.keep_every), 0, STEPS_MAX, 0, "0",
        "checkpoints at multiples of this are kept too; 0: none"},

    {"eval.every_steps", CONFIG_INT64, AT(eval.every_steps), 0, STEPS_MAX, 1, "",
        "steps between evaluations, a multiple of checkpoint.every_steps; 0: never; default: "
        "checkpoint.every_steps"},
    {"eval.suites", CONFIG_SUITES, AT(eval.suites), 0, 0, 1, "",
        "list of loss, fixed_point; default: [loss], with model.feedback both"},
    {"eval.regimes", CONFIG_REGIMES, AT(eval.regimes), 0, 0, 1, "",
        "list of standard, soft, fused; default: [standard], with model.feedback all"},
    {"eval.rows", CONFIG_INT, AT(eval.rows), 1, 16777216, 1, "64", "validation rows of one job"},
    {"eval.passes", CONFIG_INT, AT(eval.passes), 1, 256, 1, "",
        "passes whose loss is reported; default: the most of train.passes"},
    {"eval.fused_passes", CONFIG_INT, AT(eval.fused_passes), 2, 256, 1, "2",
        "passes over the prompt in the fused regime"},
    {"eval.fixed_point_passes", CONFIG_INT, AT(eval.fixed_point_passes), 2, 256, 1, "",
        "passes of the fixed_point suite, fewer than data.seq_len; default: 64, at most half of "
        "it"},

    {"process.trainers", CONFIG_INT, AT(process.trainers), 1, 1024, 0, "1",
        "trainer processes, which share the rows of a step; more than one need OpenMPI"},
    {"process.trainer_threads", CONFIG_INT, AT(process.trainer_threads), 0, 4096, 0, "0",
        "threads of a trainer; 0: all trainers together take every core"},
    {"process.evaluator_threads", CONFIG_INT, AT(process.evaluator_threads), 0, 4096, 0, "1",
        "threads of an evaluator; 0: every core"},
    {"process.evaluators", CONFIG_INT, AT(process.evaluators), 0, 64, 0, "1",
        "evaluator processes"},
    {"process.heartbeat_seconds", CONFIG_REAL, AT(process.heartbeat_seconds), 0.01, 600, 0, "1",
        "time between heartbeats; three missed mean dead"},
};

const int config_key_count = sizeof config_keys / sizeof *config_keys;
_Static_assert(
    sizeof config_keys / sizeof *config_keys <= CONFIG_MAX_KEYS, "raise CONFIG_MAX_KEYS");

int config_find(const char *name)
{
    for (int i = 0; i < config_key_count; i++)
        if (strcmp(config_keys[i].name, name) == 0)
            return i;
    return -1;
}

/* Edit distance with adjacent swaps; a name over 63 bytes is far from everything. */
static int distance(const char *a, const char *b)
{
    int d[3][64];
    size_t n = strlen(a), m = strlen(b);
    if (n > 63 || m > 63)
        return 1000;
    for (size_t j = 0; j <= m; j++)
        d[0][j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        int *row = d[i % 3], *above = d[(i + 2) % 3], *above2 = d[(i + 1) % 3];
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int best = above[j - 1] + (a[i - 1] != b[j - 1]);
            best = above[j] + 1 < best ? above[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = above2[j - 2] + 1 < best ? above2[j - 2] + 1 : best;
            row[j] = best;
        }
    }
    return d[n % 3][m];
}

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

const char *config_nearest(const char *name, char section[64])
{
    const char *best = NULL;
    int best_distance = (int)strlen(name) / 4 + 2;
    for (int i = 0; i < config_key_count; i++) {
        const char *key = config_keys[i].name;
        int d = distance(name, key);
        if (strcmp(last_part(name), last_part(key)) == 0) /* the right key in the wrong section */
            d = d < 1 ? d : 1;
        if (d < best_distance) {
            best_distance = d;
            best = key;
        }
        const char *dot = strchr(key, '.');
        char head[64];
        size_t n = (size_t)(dot - key);
        memcpy(head, key, n);
        head[n] = 0;
        d = distance(name, head);
        if (d < best_distance) {
            best_distance = d;
            memcpy(section, head, n + 1);
            best = section;
        }
    }
    return best;
}
