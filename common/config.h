/*
 * The configuration of a run: one YAML file, one table of keys (common/config_table.c) with type,
 * bounds, default and help. Unknown keys, wrong types and values out of range are errors that name
 * file, line and the nearest known key.
 *
 * Ownership: strings and arrays belong to the config; config_release() frees them.
 */
#ifndef COMMON_CONFIG_H
#define COMMON_CONFIG_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"
#include "common/mem.h"
#include "common/model_config.h"

#define CONFIG_MAX_PASSES  8 /* passes of one training step */
#define CONFIG_MAX_SOURCES 64
#define CONFIG_MAX_PHASES  16

enum lr_schedule { LR_COSINE, LR_WSD, LR_CONSTANT };
enum optim_kind { OPTIM_ADAMW, OPTIM_MUON, OPTIM_NORMUON, OPTIM_COUNT };
enum regime { REGIME_STANDARD, REGIME_SOFT, REGIME_FUSED, REGIME_COUNT };
enum suite { SUITE_LOSS, SUITE_FIXED_POINT, SUITE_COUNT };

const char *regime_name(int regime);       /* "standard", … ; NULL out of range */
const char *suite_name(int suite);         /* "loss", "fixed_point" */
const char *optim_name(int kind);          /* "adamw", "muon", "normuon" */
const char *precision_name(int precision); /* "f32", "bf16" */
/* The i < count whose name_of(i) is `name`; −1 where there is none or name is NULL. */
int name_index(const char *name, const char *(*name_of)(int), int count);

struct source_config {
    char *name, *path; /* path: a directory with manifest.json */
    double weight;     /* > 0, relative */
};

/* From fraction `from` of the run on, a step has k passes with probability share[k]. */
struct pass_phase {
    double from;
    double share[CONFIG_MAX_PASSES + 1]; /* sums to 1; share[0] unused */
};

struct config {
    struct {
        char *name; /* run.name */
        char *dir;  /* run.dir: parent of the run directory */
    } run;
    char *preset;              /* model.preset: where model keys that were not given come from */
    char *init_from;           /* train.init_from: a checkpoint's directory, or none */
    struct model_config model; /* vocab 0 until the plan fills it from the tokenizer */
    struct {
        char *tokenizer; /* data.tokenizer: tokenizer.json */
        struct source_config sources[CONFIG_MAX_SOURCES];
        int source_count;
        int seq_len; /* S: tokens of a row */
    } data;
    struct {
        int64_t steps;
        int batch_rows; /* rows of one optimizer step over all ranks */
        int micro_rows; /* rows of one forward/backward; divides batch_rows */
        uint64_t seed;
        double lambda; /* weight of the mean of L_2 … L_K */
        double jitter;
        double z_loss;      /* weight of the squared log-sum-exp of the logits */
        int z_loss_late;    /* only in the cooldown */
        double fully_fused; /* train.prefix_mixin.fully_fused: share of documents */
        enum precision precision;
        int prefix_sharing; /* 1: auto, where the model and the masks allow it; 0: off */
        enum recompute recompute[CONFIG_MAX_PASSES]; /* by pass */
        struct pass_phase phases[CONFIG_MAX_PHASES];
        int phase_count;
    } train;
    struct {
        enum optim_kind kind; /* optim.name */
        double lr, min_lr, beta1, beta2, eps, weight_decay, clip_norm;
        double adam_lr;              /* highest rate of what is not a matrix of a block */
        double momentum, muon_beta2; /* muon, normuon */
        double fusion_lr_scale;      /* times adam_lr */
        int64_t warmup_steps;
        enum lr_schedule schedule;
        double cooldown; /* wsd: last fraction of the run */
    } optim;
    struct {
        int64_t every_steps;
        int keep_last;      /* committed checkpoints kept */
        int64_t keep_every; /* and every step divisible by this; 0 none */
    } checkpoint;
    struct {
        int64_t every_steps;     /* a multiple of checkpoint.every_steps; 0 never */
        int suites[SUITE_COUNT]; /* 1 where asked for */
        int regimes[REGIME_COUNT];
        int rows;         /* validation rows a job reads */
        int passes;       /* passes the loss suite reports */
        int fused_passes; /* total passes over the prompt in FUSED, ≥ 2 */
        int fixed_point_passes;
    } eval;
    struct {
        int trainers;                           /* ranks */
        int trainer_threads, evaluator_threads; /* 0: every core; resolved at the run's creation */
        int evaluators;                         /* processes; 0 none */
        double heartbeat_seconds;               /* 1; dead after 3 */
    } process;
};

/*
 * Parses a YAML file, then `overrides` ("train.steps=100", later wins), fills defaults, checks each
 * value and their relations. Relative paths of data.* are taken from the current directory;
 * config_load also checks that the files they name are there.
 * On failure nothing needs releasing.
 */
int config_load(const char *path, const char *const *overrides, int override_count,
    struct config *out, struct err *e);
int config_parse(const char *yaml, size_t n, const char *name, const char *const *overrides,
    int override_count, struct config *out, struct err *e);
void config_release(struct config *c);

/* The resolved config as YAML that config_parse reads back to the same values. */
void config_print(const struct config *c, struct buf *out);

/* The most passes of a step in any phase. */
int config_max_passes(const struct config *c);

/* The keys that belong to the plan ("train.steps": 100, …), flat; config_parse reads its text back.
 * The caller's. */
json_t *config_plan_json(const struct config *c);

/* Every key with type, bounds, default and help, for --help-config. */
void config_help(struct buf *out);

#endif
