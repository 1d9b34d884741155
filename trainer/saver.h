/*
 * Writes this rank's files of a checkpoint in the background while training goes on.
 *
 * saver_begin() copies parameters (rank 0) and moments to host memory planned at saver_new() (the
 * only time training waits: stall_seconds) and returns; a thread writes model.safetensors (rank 0)
 * and optimizer-RRRRR-of-WWWWW.safetensors into ROOT/step-XXXXXXXX, each under a temporary name
 * that is synced and renamed, so that all ranks can write there at once. The directory is not a
 * checkpoint yet: the scheduler removes what it does not know, adds its files and commits it with
 * MANIFEST.json.
 *
 * Files of the same step left by an earlier epoch are replaced only while the directory has no
 * MANIFEST.json. After any failure (a full disk, say) this rank's files are removed and the result
 * carries the reason.
 *
 * One save at a time. All functions belong to the owner's thread; the writing thread is internal.
 */
#ifndef TRAINER_SAVER_H
#define TRAINER_SAVER_H

#include <stdint.h>

#include "common/checkpoint.h"
#include "common/err.h"
#include "kernels/device.h"
#include "kernels/weights.h"
#include "trainer/optimizer.h"

#define SAVER_FILES 2 /* at most */

struct saver;

struct saver_settings {
    const char *root;      /* the checkpoints directory; exists */
    const char *plan_hash; /* goes into the metadata */
    int rank, world;
    const struct weight_table *table; /* stays the caller's */
    enum optim_kind optim;
};

/* What is saved: device memory. Only read during saver_begin(). */
struct saver_source {
    struct device *device;
    const float *params;
    const struct optimizer *optimizer;
};

struct saver_result {
    int64_t step;
    uint32_t run_epoch; /* as given to saver_begin() */
    struct checkpoint_file files[SAVER_FILES];
    int file_count;
    double stall_seconds, write_seconds;
    struct err err; /* err.code 0: written */
};

int saver_new(const struct saver_settings *settings, struct saver **out, struct err *e);
/* Waits for a save in progress. */
void saver_free(struct saver **s);

/* Host memory taken for staging by a rank of so many. */
size_t saver_staging_bytes(
    const struct weight_table *table, enum optim_kind optim, int rank, int world);

/* Starts a save of the state after `step` steps. ERR_STATE while one is in progress or its result
 * not fetched. */
int saver_begin(struct saver *s, const struct saver_source *src, int64_t step, uint32_t run_epoch,
    struct err *e);

/* 1 from saver_begin() until the result has been fetched. */
int saver_busy(const struct saver *s);

/* 1: a save has ended and *out describes it (once for each save); 0: none within timeout_ms. */
int saver_poll(struct saver *s, int timeout_ms, struct saver_result *out);

/* A descriptor that is readable when saver_poll(…, 0, …) would return 1. */
int saver_fd(const struct saver *s);

#endif
