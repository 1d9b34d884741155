/*
 * What metrics.jsonl says of a run so far, read as it grows: losses per pass, speed, time to go.
 *
 * The file is the truth and survives its writer, so the live display and the status of a run that
 * is not running both come from here. Lines that are not a step's report are passed over, and a
 * step that is told again (after a roll-back) replaces what came after it.
 */
#ifndef OPS_HISTORY_H
#define OPS_HISTORY_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"
#include "common/plan.h"

#define HISTORY_WINDOW 24 /* reports that the current figures are a mean of */

/* Means over the first and the latest reports of one quantity. */
struct trend {
    double first, recent[HISTORY_WINDOW];
    int64_t count; /* reports so far */
};
double trend_now(const struct trend *t); /* NAN before the first report */

struct history {
    const struct plan *plan; /* must outlive it */
    int64_t step;            /* steps done */
    int passes;              /* of the latest step */
    double lr;
    uint64_t tokens;                          /* of all reports, those that were rolled back too */
    double seconds;                           /* spent on them */
    struct trend loss[CONFIG_MAX_PASSES + 1]; /* by pass */
    struct trend step_seconds[CONFIG_MAX_PASSES + 1]; /* by the number of passes of a step */
    int64_t to_go[CONFIG_MAX_PASSES + 1];             /* steps left, by their number of passes */
    struct trend rate;                                /* tokens per second */
    int64_t offset;                                   /* bytes of the file read */
};

void history_start(struct history *h, const struct plan *plan);

/* Reads what was added to the file; one that does not exist yet is empty. */
int history_read(struct history *h, const char *path, struct err *e);

/* Takes one report; returns 0 when j is not a step's. */
int history_take(struct history *h, const json_t *j);

/* Seconds to the end of the plan, each number of passes at its measured cost; NAN before anything
 * is. */
double history_eta(const struct history *h);

#endif
