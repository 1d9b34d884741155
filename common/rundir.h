/*
 * The run directory: where everything of a run lies (see README).
 *
 *   run.yaml plan.json lock journal/ metrics.jsonl logs/ sock/ evals/ checkpoints/
 *
 * rundir_create() makes it from a config (run.yaml resolved, plan.json); rundir_open() reads both
 * back.
 */
#ifndef COMMON_RUNDIR_H
#define COMMON_RUNDIR_H

#include "common/config.h"
#include "common/plan.h"

struct rundir {
    char *path;           /* absolute */
    struct config config; /* run.yaml: thread counts and retention come from here */
    struct plan plan;     /* plan.json */
};

/* Makes DIR/NAME. ERR_STATE when it exists with another plan (naming both hashes); 0 with *existed
 * = 1 when it exists with the same plan: then the run is to be resumed. */
int rundir_create(const struct config *c, struct rundir *out, int *existed, struct err *e);
int rundir_open(const char *path, struct rundir *out, struct err *e);
void rundir_release(struct rundir *r);

/* path/part, to be freed: rundir_path(r, "sock/control"). */
char *rundir_path(const struct rundir *r, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

#define RUNDIR_CONTROL_SOCK "sock/control"
#define RUNDIR_LOADER_SOCK  "sock/loader"

#endif
