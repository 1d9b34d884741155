/*
 * Branching a run off a committed checkpoint: `train.init_from` names its directory, the plan holds
 * the hash of its MANIFEST.json, so another checkpoint in its place is refused. The run begins at
 * step 0 with that checkpoint's weights and a new optimizer; fusion matrices that it does not have
 * are fresh.
 */
#ifndef COMMON_PLAN_INIT_H
#define COMMON_PLAN_INIT_H

#include "common/plan.h"

#define PLAN_INIT_NONE "none"

/* The plan's entry for a checkpoint directory, {manifest_sha256, step}; NULL on failure. Files are
 * checked for their size only. tokenizer_sha256: what its tokenizer must be. */
json_t *plan_init_json(const char *dir, const char *tokenizer_sha256, struct err *e);
/* Reads that entry into the plan: there exactly if train.init_from names a directory. */
int plan_init_read(const json_t *entry, struct plan *p, struct err *e);

/* Checks the checkpoint against the plan: its hash, with `deep` that of each file, and that its
 * model is one that this run's can go on from. *from: its model. */
int plan_init_verify(const struct plan *p, int deep, struct model_config *from, struct err *e);
int plan_has_init(const struct plan *p);

#endif
