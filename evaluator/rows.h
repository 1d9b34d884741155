/*
 * Validation rows as the scorers read them, and the client that fetches them from the loader.
 */
#ifndef EVALUATOR_ROWS_H
#define EVALUATOR_ROWS_H

#include <stdatomic.h>

#include "common/bus.h"
#include "common/rundir.h"

/* count rows of seq tokens; owned arrays, rows_release() frees. */
struct rows {
    int count, seq;
    int32_t *tokens;     /* (R, S) inputs */
    int32_t *targets;    /* (R, S) next tokens */
    uint8_t *doc_starts; /* (R, S) */
};

int rows_new(int count, int seq, struct rows *out, struct err *e);
void rows_release(struct rows *r);

/*
 * Asks the run's loader for validation rows 0 … count − 1 (fewer where the run has fewer). Each
 * answer may take timeout_seconds; `stop` becoming non-zero ends it with ERR_STOPPED.
 */
int rows_fetch(struct bus *b, const struct rundir *run, int count, int timeout_seconds,
    const atomic_int *stop, struct rows *out, struct err *e);

#endif
