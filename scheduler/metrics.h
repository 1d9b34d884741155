/*
 * metrics.jsonl: one line a step {kind: "step", step, run_epoch, …} and one an eval result
 * {kind: "eval", …}, each written whole as it happens. Steps that were rolled back keep their
 * lines: of several with the same step the one of the highest run epoch counts.
 */
#ifndef SCHEDULER_METRICS_H
#define SCHEDULER_METRICS_H

#include <jansson.h>

#include "common/err.h"

struct metrics {
    int fd;
    char *path;
};

/* Opens for appending; a line that a kill cut short is closed off. */
int metrics_open(struct metrics *m, const char *path, struct err *e);
void metrics_close(struct metrics *m);
/* Steals `line`. */
int metrics_write(struct metrics *m, json_t *line, struct err *e);

#endif
