/*
 * What an operator sees of a run: its files (metrics, evaluations, checkpoints) and, while it runs,
 * the scheduler's own word. And the texts made of it: live display, log line, summary, JSON.
 */
#ifndef OPS_VIEW_H
#define OPS_VIEW_H

#include <jansson.h>

#include "common/mem.h"
#include "common/rundir.h"
#include "ops/evals.h"
#include "ops/history.h"

struct view {
    const struct rundir *run; /* must outlive it */
    struct history history;
    struct evals evals;
    int64_t checkpoint; /* newest committed step, −1 none */
    json_t *status;     /* the scheduler's last word; NULL: it has not answered */
};

void view_start(struct view *v, const struct rundir *run);
void view_release(struct view *v);

/* Reads what the files gained. */
int view_read(struct view *v, struct err *e);
/* Takes the scheduler's status, or NULL when it is gone; steals j. */
void view_take_status(struct view *v, json_t *j);

/* "running", "stopping", … as the scheduler calls it; "finished" or "not running" without one. */
const char *view_state(const struct view *v);
/* Every step is done, committed and evaluated: the scheduler has written summary.json. */
int view_finished(const struct view *v);

/* Several lines for a terminal of `width` columns. */
void view_print_live(const struct view *v, int width, struct buf *out);
/* One line without a newline. */
void view_print_line(const struct view *v, struct buf *out);
/* What came of it, at the end. */
void view_print_summary(const struct view *v, struct buf *out);
/* The same for programs; the caller's to decref. */
json_t *view_json(const struct view *v);

#endif
