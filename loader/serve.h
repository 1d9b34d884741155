/*
 * What the loader answers: the rows of a GET, from the plan and its sources.
 *
 * A server holds no state that a restart would lose: which row an ordinal is follows from the plan.
 * Rows are kept in a ring once decoded, and a thread decodes those that follow a training request
 * ahead of time. One thread asks; the prefetch thread is the server's own.
 */
#ifndef LOADER_SERVE_H
#define LOADER_SERVE_H

#include <stddef.h>
#include <stdint.h>

#include "common/batch.h"
#include "common/err.h"
#include "common/mem.h"
#include "common/plan.h"

struct server;

struct server_stats {
    uint64_t answers, rows, hits; /* hits: rows that were decoded before they were asked for */
    uint64_t prefetched, rereads; /* rereads: blocks only right at the second reading */
};

/*
 * Opens every source of the plan and compares its manifest with what the plan was made from:
 * ERR_MISMATCH names both. cache_bytes bounds the ring. The plan must outlive the server.
 */
int server_new(const struct plan *p, size_t cache_bytes, struct server **out, struct err *e);
void server_free(struct server **s);

/*
 * Appends the body of the BATCH that answers r. ERR_INPUT: the request is not possible (rows beyond
 * the run, too many); ERR_CORRUPT: damaged data, naming shard and block; ERR_IO, ERR_NOMEM: may
 * pass.
 */
int server_answer(struct server *s, const struct batch_request *r, struct buf *body, struct err *e);

void server_stats(struct server *s, struct server_stats *out);

#endif
