/*
 * Collectives of the ranks of one run, behind one small header: what data-parallel training needs
 * and no more. The values are the same whatever carries them: every sum is formed here, rank by
 * rank from 0 up, so that a run repeats bit for bit.
 *
 *     coll_reduce(c, grads, spans, n);            // returns at once; backward goes on
 *     coll_sum(c, losses, k);
 *     if (coll_wait(c, give_up, ctx, &e) < 0) …   // all that was queued is done, or never will be
 *
 * Operations are queued and carried out in order by a thread of the object's own, the only one that
 * talks to the transport. What they read or write must stay alone until coll_wait() has returned.
 * All ranks must queue the same operations with the same spans in the same order. After a failure
 * the ranks are out of step for good: leave the process.
 *
 * Waiting takes no processor time: the transport is asked at growing intervals of up to a
 * millisecond. The caller's functions belong to one thread. Memory is host memory.
 */
#ifndef KERNELS_COLL_H
#define KERNELS_COLL_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "kernels/coll_transport.h"

struct coll;

/* A run of floats that one rank owns. */
struct coll_span {
    int64_t offset, count; /* floats from the operation's base */
    int owner;
};

struct coll_settings {
    const struct coll_transport *transport; /* NULL: one rank, `self` */
    void *ctx;                              /* the transport's */
    int rank, world;                        /* the transport must agree */
    double timeout_seconds;                 /* the longest wait for the others */
};

/*
 * Meets the other ranks. ERR_TIMEOUT when they do not come, ERR_MISMATCH when the transport has
 * another rank or world. With world 1 there is no thread and nothing is ever waited for.
 */
int coll_open(const struct coll_settings *settings, struct coll **out, struct err *e);
/*
 * After coll_wait() has succeeded the ranks take leave of each other, for a few seconds at most;
 * after a failure, or with operations under way, without a word. 0: this went well.
 */
int coll_free(struct coll **c);

int coll_rank(const struct coll *c);
int coll_world(const struct coll *c);
size_t coll_memory_bytes(int world); /* taken at coll_open() by a rank of so many */

/* Reduce-scatter: the owner of each span gets the sum over ranks, elsewhere the span stays. */
void coll_reduce(struct coll *c, float *base, const struct coll_span *spans, int n);
/* All-gather: everyone gets each span from its owner. */
void coll_gather(struct coll *c, float *base, const struct coll_span *spans, int n);
/* All-reduce: everyone gets the sums. For floats: coll_reduce() and coll_gather() of one span. */
void coll_sum(struct coll *c, double *values, int n);

/* Asked several times a second while waiting: nonzero gives up. */
typedef int coll_give_up_fn(void *ctx);

/* Until all that was queued is done. ERR_STOPPED: given up; ERR_TIMEOUT; ERR_IO: the transport. */
int coll_wait(struct coll *c, coll_give_up_fn *give_up, void *ctx, struct err *e);
/* Until every rank is here. */
int coll_barrier(struct coll *c, coll_give_up_fn *give_up, void *ctx, struct err *e);

/* The transport of a shared object beside the program (fb-coll-mpi.so), which stays loaded.
 * ERR_UNSUPPORTED: it is not there or cannot be loaded. */
int coll_load(const char *path, const struct coll_transport **out, struct err *e);

#endif
