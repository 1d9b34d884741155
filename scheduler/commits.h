/*
 * From SAVED to a commit: which checkpoints are being written, and what is added when every rank
 * has written its part: config.json, tokenizer.json, state.json, then MANIFEST.json. Nothing here
 * decides what happens next.
 *
 * The order of a commit is files → MANIFEST.json → journal. A kill in between leaves either an
 * uncommitted directory, removed at the next start, or a commit that the journal learns of then.
 */
#ifndef SCHEDULER_COMMITS_H
#define SCHEDULER_COMMITS_H

#include <stdint.h>

#include <jansson.h>

#include "common/checkpoint.h"
#include "common/cursor.h"
#include "common/mem.h"
#include "common/rundir.h"
#include "scheduler/journal.h"

/* What a rank says of its part. */
struct saved_report {
    int64_t step;
    struct checkpoint_file *files; /* owned; saved_release() */
    int count;
    double stall_seconds, write_seconds;
    const char *error; /* the message's, or NULL */
};

/* A checkpoint on its way. */
struct pending {
    int64_t step;
    int world;
    uint8_t *answered; /* (world) */
    int answers;
    struct checkpoint_file *files;
    int count;
    struct cursor cursor; /* behind exactly `step` steps; valid once has_cursor */
    int has_cursor;
    char error[512]; /* the first rank's that failed */
};

struct commits {
    const struct rundir *run;
    struct journal *journal;
    char *root; /* checkpoints/ */
    struct pending *list;
    int count;
    int64_t last;         /* step of the last commit; 0: none */
    struct cursor cursor; /* of the last commit */
    uint32_t run_epoch;   /* that made it */
    char manifest_sha256[SHA256_HEX];
    struct buf tokenizer; /* the file's bytes: every checkpoint holds a copy */
};

int saved_parse(const json_t *j, const struct plan *p, struct saved_report *out, struct err *e);
void saved_release(struct saved_report *r);

/*
 * Reads the tokenizer, which must be the plan's (ERR_MISMATCH naming both hashes). Finds where the
 * run stands: removes what was never committed, takes the newest checkpoint that
 * verifies (damaged ones are described in `damaged`, a line each, and moved aside), reads its
 * cursor, and makes the journal agree. run and journal must outlive it.
 */
int commits_open(struct commits *c, const struct rundir *run, struct journal *journal,
    struct buf *damaged, struct err *e);
void commits_release(struct commits *c);

/* Expects a checkpoint of `step` steps from `world` ranks; known ones stay as they are. */
void commits_expect(struct commits *c, int64_t step, int world);
struct pending *commits_find(const struct commits *c, int64_t step);
void commits_forget(struct commits *c, struct pending *p); /* one */
void commits_forget_all(struct commits *c);

/* Takes the cursor as it is behind `cursor->step` steps, for a checkpoint that needs it. */
void commits_cursor(struct commits *c, const struct cursor *cursor);
/* 1: taken; 0: this rank had answered. */
int commits_saved(struct pending *p, int rank, const struct saved_report *r);
/* Every rank has answered and the cursor is there. */
int pending_complete(const struct pending *p);

/*
 * Commits p (complete, without an error) and forgets it. After a failure p is still there, its
 * directory has no manifest, and the last commit is what it was.
 */
int commits_commit(struct commits *c, struct pending *p, uint32_t run_epoch, struct err *e);

/* Retention; steps in `pinned` stay. */
int commits_retain(struct commits *c, const int64_t *pinned, int pinned_count, struct err *e);

#endif
