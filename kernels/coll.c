#include "kernels/coll.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/mem.h"

#define PIECE        ((int64_t)(COLL_MESSAGE_BYTES / sizeof(float))) /* floats of one message */
#define SUM_FLOATS   1024                                            /* summed at a time */
#define NAP_FIRST_NS 20000   /* between two looks at the transport: from here … */
#define NAP_LAST_NS  1000000 /* … doubling to here */
#define LOOK_MS      20      /* the waiting caller asks give_up this often */
#define LEAVE_WAIT_S 5       /* for the others, in coll_free() */

enum op_kind { OP_REDUCE, OP_GATHER, OP_SUM };

struct op {
    enum op_kind kind;
    float *base;
    const struct coll_span *spans;
    double *values;
    int n; /* spans or values */
};

struct coll {
    struct coll_settings settings;
    int rank, world;
    float *work; /* (world − 1, PIECE): what the others sent */
    struct coll_span *group;
    int group_room;
    double here; /* coll_barrier()'s */

    pthread_t thread;
    int threaded;
    pthread_mutex_t lock; /* over all below */
    pthread_cond_t changed;
    struct op *ops; /* those before `done` are done; emptied when all are */
    int queued, done, room;
    int met, leaving, left;
    struct err failed; /* code 0: all is well */
};

/* -- the thread ----------------------------------------------------------------------------- */

static int is_leaving(struct coll *c)
{
    pthread_mutex_lock(&c->lock);
    int yes = c->leaving;
    pthread_mutex_unlock(&c->lock);
    return yes;
}

/* Until what was started is done. It asks instead of waiting inside the transport, where a dead
 * peer would hold it for ever. */
static int settle(struct coll *c, struct err *e)
{
    struct timespec nap = {.tv_nsec = NAP_FIRST_NS};
    for (;;) {
        int rc = c->settings.transport->test(c->settings.ctx);
        if (rc > 0)
            return 0;
        if (rc < 0)
            return err_set(e, ERR_IO, "collectives: the transport failed");
        if (is_leaving(c))
            return err_set(e, ERR_STOPPED, "collectives: left with an operation under way");
        nanosleep(&nap, NULL);
        nap.tv_nsec = 2 * nap.tv_nsec < NAP_LAST_NS ? 2 * nap.tv_nsec : NAP_LAST_NS;
    }
}

static int give(struct coll *c, int peer, const void *data, size_t bytes, struct err *e)
{
    return c->settings.transport->send(c->settings.ctx, peer, data, bytes) == 0
               ? 0
               : err_set(e, ERR_IO, "collectives: cannot send to rank %d", peer);
}

static int take(struct coll *c, int peer, void *data, size_t bytes, struct err *e)
{
    return c->settings.transport->recv(c->settings.ctx, peer, data, bytes) == 0
               ? 0
               : err_set(e, ERR_IO, "collectives: cannot receive from rank %d", peer);
}

/*
 * Cuts the spans into pieces and gathers the next ones that together are at most PIECE floats, so
 * that their contributions fit into c->work. *span and *at are where the next call goes on; 0: none
 * is left. Every rank cuts alike.
 */
static int next_group(struct coll *c, const struct op *op, int *span, int64_t *at)
{
    int n = 0;
    for (int64_t room = PIECE; *span < op->n && room > 0;) {
        const struct coll_span *s = &op->spans[*span];
        int64_t left = s->count - *at, count = left < room ? left : room;
        if (n == c->group_room) {
            c->group_room = c->group_room ? 2 * c->group_room : 64;
            c->group = mem_grow_array(c->group, (size_t)c->group_room, sizeof *c->group);
        }
        c->group[n++] = (struct coll_span){s->offset + *at, count, s->owner};
        room -= count;
        *at += count;
        if (*at == s->count) {
            ++*span;
            *at = 0;
        }
    }
    return n;
}

/* own = Σ over ranks, in their order; others (world − 1, PIECE) starts at `from` of each row. */
static void add_up(struct coll *c, float *own, int64_t from, int64_t count)
{
    float sum[SUM_FLOATS];
    for (int64_t i = 0; i < count; i += SUM_FLOATS) {
        int n = (int)(count - i < SUM_FLOATS ? count - i : SUM_FLOATS);
        for (int r = 0; r < c->world; r++) {
            const float *x =
                r == c->rank ? own + i : c->work + (r - (r > c->rank)) * PIECE + from + i;
            for (int k = 0; k < n; k++)
                sum[k] = r == 0 ? x[k] : sum[k] + x[k];
        }
        memcpy(own + i, sum, (size_t)n * sizeof *sum);
    }
}

static int start_reduce(struct coll *c, float *base, int n, struct err *e)
{
    int rc = 0;
    int64_t from = 0;
    for (int i = 0; i < n; from += c->group[i++].count) {
        const struct coll_span *s = &c->group[i];
        size_t bytes = (size_t)s->count * sizeof(float);
        if (s->owner != c->rank)
            rc = give(c, s->owner, base + s->offset, bytes, e);
        for (int r = 0; rc == 0 && s->owner == c->rank && r < c->world; r++)
            if (r != c->rank)
                rc = take(c, r, c->work + (r - (r > c->rank)) * PIECE + from, bytes, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int start_gather(struct coll *c, float *base, int n, struct err *e)
{
    int rc = 0;
    for (int i = 0; i < n; i++) {
        const struct coll_span *s = &c->group[i];
        size_t bytes = (size_t)s->count * sizeof(float);
        if (s->owner != c->rank)
            rc = take(c, s->owner, base + s->offset, bytes, e);
        for (int r = 0; rc == 0 && s->owner == c->rank && r < c->world; r++)
            if (r != c->rank)
                rc = give(c, r, base + s->offset, bytes, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int run_spans(struct coll *c, const struct op *op, struct err *e)
{
    int span = 0, n;
    int64_t at = 0;
    while ((n = next_group(c, op, &span, &at)) > 0) {
        int rc = op->kind == OP_REDUCE ? start_reduce(c, op->base, n, e)
                                       : start_gather(c, op->base, n, e);
        if (rc == 0)
            rc = settle(c, e);
        if (rc < 0)
            return rc;
        int64_t from = 0;
        for (int i = 0; i < n && op->kind == OP_REDUCE; from += c->group[i++].count)
            if (c->group[i].owner == c->rank)
                add_up(c, op->base + c->group[i].offset, from, c->group[i].count);
    }
    return 0;
}

static int run_sum(struct coll *c, const struct op *op, struct err *e)
{
    const int most = (int)(COLL_MESSAGE_BYTES / sizeof(double));
    for (int at = 0; at < op->n; at += most) {
        int n = op->n - at < most ? op->n - at : most, rc = 0;
        double *own = op->values + at;
        for (int r = 0; rc == 0 && r < c->world; r++) {
            if (r == c->rank)
                continue;
            rc = take(c, r, c->work + (r - (r > c->rank)) * PIECE, (size_t)n * sizeof *own, e);
            if (rc == 0)
                rc = give(c, r, own, (size_t)n * sizeof *own, e);
        }
        if (rc == 0)
            rc = settle(c, e);
        if (rc < 0)
            return rc;
        for (int i = 0; i < n; i++) {
            double sum = 0;
            for (int r = 0; r < c->world; r++) {
                double x = own[i];
                if (r != c->rank)
                    memcpy(&x,
                        (char *)(c->work + (r - (r > c->rank)) * PIECE) + (size_t)i * sizeof x,
                        sizeof x);
                sum = r == 0 ? x : sum + x;
            }
            own[i] = sum;
        }
    }
    return 0;
}

static int meet(struct coll *c, struct err *e)
{
    int rank = -1, world = -1;
    char why[512] = "no reason given";
    if (c->settings.transport->open(c->settings.ctx, &rank, &world, why, sizeof why) < 0)
        return err_set(e, ERR_IO, "collectives: %s", why);
    if (rank != c->rank || world != c->world)
        return err_set(e, ERR_MISMATCH,
            "collectives: this is rank %d of %d to the transport, expected %d of %d (mpirun -n %d)",
            rank, world, c->rank, c->world, c->world);
    return 0;
}

/* With the lock held: the next operation, or 0 when it is time to go. */
static int next_op(struct coll *c, struct op *out)
{
    while (!c->leaving && c->done == c->queued)
        pthread_cond_wait(&c->changed, &c->lock);
    if (c->leaving || c->failed.code)
        return 0;
    *out = c->ops[c->done];
    return 1;
}

static void *thread_main(void *arg)
{
    struct coll *c = arg;
    struct err e = {0};
    struct op op;
    int rc = meet(c, &e);
    pthread_mutex_lock(&c->lock);
    c->met = 1;
    c->failed = e;
    pthread_cond_broadcast(&c->changed);
    while (rc == 0 && next_op(c, &op)) {
        pthread_mutex_unlock(&c->lock);
        rc = op.kind == OP_SUM ? run_sum(c, &op, &e) : run_spans(c, &op, &e);
        pthread_mutex_lock(&c->lock);
        c->done += rc == 0;
        c->failed = e;
        pthread_cond_broadcast(&c->changed);
    }
    int in_step = rc == 0 && c->done == c->queued;
    pthread_mutex_unlock(&c->lock);
    if (in_step)
        c->settings.transport->close(c->settings.ctx);
    pthread_mutex_lock(&c->lock);
    c->left = in_step;
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* -- the caller's side -------------------------------------------------------------------- */

static void queue(struct coll *c, struct op op)
{
    if (c->world == 1 || op.n == 0)
        return;
    pthread_mutex_lock(&c->lock);
    if (c->done == c->queued)
        c->done = c->queued = 0;
    if (c->queued == c->room) {
        c->room = c->room ? 2 * c->room : 64;
        c->ops = mem_grow_array(c->ops, (size_t)c->room, sizeof *c->ops);
    }
    c->ops[c->queued++] = op;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

void coll_reduce(struct coll *c, float *base, const struct coll_span *spans, int n)
{
    queue(c, (struct op){.kind = OP_REDUCE, .base = base, .spans = spans, .n = n});
}

void coll_gather(struct coll *c, float *base, const struct coll_span *spans, int n)
{
    queue(c, (struct op){.kind = OP_GATHER, .base = base, .spans = spans, .n = n});
}

void coll_sum(struct coll *c, double *values, int n)
{
    queue(c, (struct op){.kind = OP_SUM, .values = values, .n = n});
}

/* With the lock held. */
static void look_later(struct coll *c)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += LOOK_MS * 1000000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&c->changed, &c->lock, &t);
}

int coll_wait(struct coll *c, coll_give_up_fn *give_up, void *ctx, struct err *e)
{
    double start = clock_seconds();
    int rc = 0;
    if (c->world == 1)
        return 0;
    pthread_mutex_lock(&c->lock);
    while (rc == 0 && !c->failed.code && (!c->met || c->done < c->queued)) {
        look_later(c);
        pthread_mutex_unlock(&c->lock);
        if (give_up && give_up(ctx))
            rc = err_set(e, ERR_STOPPED,
                "collectives: rank %d of %d gave up waiting for the others", c->rank, c->world);
        else if (clock_seconds() - start > c->settings.timeout_seconds)
            rc = err_set(e, ERR_TIMEOUT, "collectives: rank %d of %d waited %.0f s for the others",
                c->rank, c->world, c->settings.timeout_seconds);
        pthread_mutex_lock(&c->lock);
    }
    if (c->failed.code)
        rc = err_set(e, c->failed.code, "%s", c->failed.msg);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int coll_barrier(struct coll *c, coll_give_up_fn *give_up, void *ctx, struct err *e)
{
    c->here = 1;
    coll_sum(c, &c->here, 1);
    return coll_wait(c, give_up, ctx, e);
}

static int start_thread(struct coll *c, struct err *e)
{
    pthread_condattr_t monotonic;
    size_t bytes = coll_memory_bytes(c->world);
    c->work = mem_try_array(bytes, 1);
    if (!c->work)
        return err_set(e, ERR_NOMEM, "collectives: no memory for %zu bytes", bytes);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&c->lock, NULL);
    errno = pthread_create(&c->thread, NULL, thread_main, c);
    if (errno)
        return err_errno(e, "collectives: thread");
    c->threaded = 1;
    return coll_barrier(c, NULL, NULL, e);
}

int coll_open(const struct coll_settings *settings, struct coll **out, struct err *e)
{
    struct coll *c = mem_array(1, sizeof *c);
    CHECK(settings->world >= 1 && settings->rank >= 0 && settings->rank < settings->world);
    CHECK(settings->world == 1 || settings->transport);
    c->settings = *settings;
    c->rank = settings->rank;
    c->world = settings->world;
    int rc = c->world > 1 ? start_thread(c, e) : 0;
    if (rc < 0)
        coll_free(&c);
    *out = c;
    return rc;
}

int coll_free(struct coll **pc)
{
    struct coll *c = *pc;
    int went_well = 1;
    if (!c)
        return 0;
    *pc = NULL;
    if (c->threaded) {
        struct timespec end;
        pthread_mutex_lock(&c->lock);
        c->leaving = 1;
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->lock);
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec += LEAVE_WAIT_S;
        if (pthread_timedjoin_np(c->thread, NULL, &end) != 0)
            return ERR_TIMEOUT; /* the thread hangs in the transport and keeps its memory */
        went_well = c->left;
    }
    free(c->ops);
    free(c->group);
    free(c->work);
    free(c);
    return went_well ? 0 : ERR_STOPPED;
}

int coll_rank(const struct coll *c)
{
    return c->rank;
}

int coll_world(const struct coll *c)
{
    return c->world;
}

size_t coll_memory_bytes(int world)
{
    return (size_t)(world - 1) * COLL_MESSAGE_BYTES;
}

int coll_load(const char *path, const struct coll_transport **out, struct err *e)
{
    /* Global, so that what the transport loads later finds its symbols; never closed. */
    void *object = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!object)
        return err_set(e, ERR_UNSUPPORTED, "collectives: %s", dlerror());
    *out = dlsym(object, COLL_TRANSPORT_SYMBOL);
    if (!*out || (*out)->version != COLL_TRANSPORT_VERSION)
        return err_set(e, ERR_UNSUPPORTED, "collectives: %s: not a transport of version %d", path,
            COLL_TRANSPORT_VERSION);
    return 0;
}
