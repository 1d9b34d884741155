/*
 * The plan: everything that decides a run, as canonical JSON with a SHA-256, and the pure functions
 * of (plan, step) that follow from it: passes, learning rate, sample ids, prefix cuts, jitter keys.
 * Two processes with the same plan hash agree on all of them without a word.
 */
#ifndef COMMON_PLAN_H
#define COMMON_PLAN_H

#include <stdint.h>

#include "common/config.h"
#include "common/hash.h"

#define PLAN_VERSION     4
#define PLAN_BLOCK_SLOTS 4096    /* ordinals of a block, over which the weights hold exactly */
#define PLAN_VAL_EPOCH   0xffffu /* of a validation sample's id; training stays below */

/* One source of the plan: what its manifest said when the plan was made. */
struct plan_source {
    char *name, *path; /* path is absolute */
    double weight;
    char manifest_root[SHA256_HEX];
    uint64_t train_tokens, val_tokens;
    /* Rows of S + 1 tokens, neighbours sharing one: floor((tokens − 1) / S). */
    uint64_t train_samples, val_samples;
    int quota; /* slots of each 4,096-slot block; sum over sources is 4,096 */
};

struct plan {
    struct config c; /* its plan keys (model, data, train, optim, eval …) */
    struct plan_source sources[CONFIG_MAX_SOURCES];
    int source_count;
    char tokenizer_sha256[SHA256_HEX];
    char init_sha256[SHA256_HEX];   /* of the MANIFEST.json of train.init_from; "" without */
    char hash[SHA256_HEX];          /* SHA-256 of the canonical JSON */
    char manifest_root[SHA256_HEX]; /* SHA-256 over the sources' roots: what HELLO compares */
    char *json;                     /* the canonical JSON (sorted keys, compact) */
};

/* Reads the manifests and the tokenizer named by the config, and makes the plan. The config stays
 * the caller's. */
int plan_make(const struct config *c, struct plan *out, struct err *e);
/* Reads plan.json back; refuses another version and a text whose values do not pass config's
 * checks. */
int plan_load(const char *path, struct plan *out, struct err *e);
int plan_parse(const char *json, size_t n, const char *name, struct plan *out, struct err *e);
void plan_release(struct plan *p);

/* -- the schedule. Steps count from 0 to steps − 1. -- */
int plan_passes(const struct plan *p, int64_t step); /* 1 … CONFIG_MAX_PASSES */
int plan_max_passes(const struct plan *p);           /* over all phases */
double plan_lr(const struct plan *p, int64_t step);
double plan_z_loss(const struct plan *p, int64_t step); /* weight of the z-loss */

/* -- the order of samples. Global ordinals of step s: [s·batch_rows, (s+1)·batch_rows). -- */

/* What one ordinal stands for. id: source (8 bits) · epoch (16) · index (40), unique in a run. */
struct sample {
    int source;
    uint64_t epoch, index;
    uint64_t id;
};
struct sample plan_train_sample(const struct plan *p, uint64_t ordinal);
/* The i-th validation row, i < plan_val_rows(): sources in proportion, order fixed by the seed. */
struct sample plan_val_sample(const struct plan *p, uint64_t i);
uint64_t plan_val_rows(const struct plan *p);

/* A permutation of [0, n) under key, O(1) memory (Feistel network with cycle walking). */
uint64_t feistel(uint64_t key, uint64_t i, uint64_t n);

/* -- prefix mix-in and jitter -- */

/* mask (S bytes) of one row for `pass` (2 … K): 1 where the input is fused. doc_starts (S), row 0
 * always a start. */
void plan_fuse_mask(
    const struct plan *p, uint64_t sample_id, int pass, const uint8_t *doc_starts, uint8_t *mask);
/* Key of the jitter noise of a row in `pass`. */
uint64_t plan_noise_key(const struct plan *p, uint64_t sample_id, int pass);

#endif
