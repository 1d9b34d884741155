/*
 * Checkpoint directories: checkpoints/step-00001000/ with model.safetensors,
 * optimizer-00000-of-00001.safetensors, config.json, tokenizer.json, state.json and MANIFEST.json.
 * MANIFEST.json is the commit: it is written last and lists every file with size and SHA-256.
 * No tensors here: names, commit, verification, choice and retention.
 */
#ifndef COMMON_CHECKPOINT_H
#define COMMON_CHECKPOINT_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"
#include "common/hash.h"
#include "common/mem.h"

struct checkpoint_file {
    char name[64];
    uint64_t bytes;
    char sha256[SHA256_HEX];
};

/* "step-00001000" */
void checkpoint_name(int64_t step, char out[32]);
/* The step of such a name, or −1. */
int64_t checkpoint_step(const char *name);

/*
 * Commits DIR (already holding the listed files, fsynced): adds to the list what else lies in it,
 * checks that sizes match, writes MANIFEST.json {version, step, plan_hash, run_epoch, files}.
 */
int checkpoint_commit(const char *dir, int64_t step, const char *plan_hash, uint32_t run_epoch,
    const struct checkpoint_file *files, int count, struct err *e);

/* Reads MANIFEST.json and checks sizes, and hashes where deep != 0. sha256 (may be NULL): the
 * manifest's own hash. */
int checkpoint_verify(
    const char *dir, int deep, char sha256[SHA256_HEX], int64_t *step, struct err *e);

/* Steps of committed checkpoints under `root`, ascending, to be freed. Returns their number. */
int checkpoint_list(const char *root, int64_t **steps, struct err *e);

/*
 * The newest committed checkpoint that verifies deeply: *step, or −1 when there is none. Damaged
 * ones on the way are described in `damaged`, one line each (empty when none).
 */
int checkpoint_newest(const char *root, int64_t *step, struct buf *damaged, struct err *e);

/*
 * Retention: removes committed checkpoints other than the last `keep_last`, those whose step is a
 * multiple of keep_every (0: none) and those in `pinned`; and uncommitted directories older than
 * the newest commit.
 */
int checkpoint_retain(const char *root, int keep_last, int64_t keep_every, const int64_t *pinned,
    int pinned_count, struct err *e);

#endif
