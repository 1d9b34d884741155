/*
 * A snapshot: a checkpoint opened for scoring or sampling: its model on a device, its tokenizer
 * and its identity. Several snapshots may be open; each owns its device.
 */
#ifndef EVALUATOR_SNAPSHOT_H
#define EVALUATOR_SNAPSHOT_H

#include "common/hash.h"
#include "common/tokenizer.h"
#include "kernels/model.h"

struct snapshot {
    char *dir;
    struct model_config config;
    struct device *device;
    struct model *model;
    struct tokenizer *tokenizer;
    int64_t step;            /* −1 where the directory has no manifest */
    char sha256[SHA256_HEX]; /* of MANIFEST.json; "" without one */
};

/*
 * Reads config.json, model.safetensors and tokenizer.json of dir. Where MANIFEST.json is present
 * every file is verified against it first. `limits` sizes the model (not for training).
 */
int snapshot_open(const char *dir, int threads, const struct model_limits *limits,
    struct snapshot *out, struct err *e);
void snapshot_release(struct snapshot *s);

#endif
