/*
 * metrics.jsonl: one line a step {kind: "step", step, run_epoch, …} and one an eval result
 * {kind: "eval", …}, each written whole as it happens. Steps that were rolled back keep their
 * lines: of several with the same step the one of the highest run epoch counts.
 *
 * What cannot be written (a full disk) is kept in memory and written, in order, before the next
 * line, so that the history has no hole.
 */
#ifndef SCHEDULER_METRICS_H
#define SCHEDULER_METRICS_H

#include <jansson.h>

#include "common/err.h"
#include "common/mem.h"

#define METRICS_MAX_WAITING ((size_t)64 << 20) /* bytes; beyond it new lines are lost */

struct metrics {
    int fd;
    char *path;
    struct buf waiting; /* not written yet; may begin within a line */
};

/* Opens for appending; a line that a kill cut short is closed off. */
int metrics_open(struct metrics *m, const char *path, struct err *e);
void metrics_close(struct metrics *m);
/* Steals `line`. After ERR_IO or ERR_NOMEM it waits; ERR_STATE: it is lost, too many wait. */
int metrics_write(struct metrics *m, json_t *line, struct err *e);

#endif
