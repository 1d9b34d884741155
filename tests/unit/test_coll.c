/*
 * kernels/coll: sums in rank order to the bit, whatever the spans; waits that end. The ranks are
 * threads here, and a transport of the test's carries their messages.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/rng.h"
#include "kernels/coll.h"

#define MAX_WORLD 5

/* -- the transport: a queue of copies from each rank to each ------------------------------- */

struct letter {
    struct letter *next;
    size_t bytes;
    char data[];
};

struct wanted {
    int peer;
    void *data;
    size_t bytes;
};

static struct {
    pthread_mutex_t lock;
    int world;
    struct letter *queue[MAX_WORLD][MAX_WORLD]; /* [from][to] */
} post = {.lock = PTHREAD_MUTEX_INITIALIZER};

struct station {
    int rank, claim; /* what open() says */
    int broken;      /* after so many messages sends fail; −1 never */
    struct wanted *wanted;
    int count, room;
    int closed;
};

static int post_open(void *ctx, int *rank, int *world, char *why, size_t why_bytes)
{
    struct station *s = ctx;
    if (s->claim < 0) {
        snprintf(why, why_bytes, "out of order");
        return -1;
    }
    *rank = s->claim;
    *world = post.world;
    return 0;
}

static int post_send(void *ctx, int peer, const void *data, size_t bytes)
{
    struct station *s = ctx;
    assert_true(bytes > 0 && bytes <= COLL_MESSAGE_BYTES);
    if (s->broken == 0)
        return -1;
    s->broken -= s->broken > 0;
    struct letter *l = malloc(sizeof *l + bytes);
    assert_non_null(l);
    *l = (struct letter){.bytes = bytes};
    memcpy(l->data, data, bytes);
    pthread_mutex_lock(&post.lock);
    struct letter **end = &post.queue[s->rank][peer];
    while (*end)
        end = &(*end)->next;
    *end = l;
    pthread_mutex_unlock(&post.lock);
    return 0;
}

static int post_recv(void *ctx, int peer, void *data, size_t bytes)
{
    struct station *s = ctx;
    s->wanted = mem_grow_array(s->wanted, (size_t)s->count + 1, sizeof *s->wanted);
    s->wanted[s->count++] = (struct wanted){peer, data, bytes};
    return 0;
}

/* Takes what has come; of one peer in the order it was wanted. */
static int post_test(void *ctx)
{
    struct station *s = ctx;
    int left = 0, blocked[MAX_WORLD] = {0};
    pthread_mutex_lock(&post.lock);
    for (int i = 0; i < s->count; i++) {
        struct wanted *w = &s->wanted[i];
        struct letter *l = post.queue[w->peer][s->rank];
        if (!l || blocked[w->peer]) {
            blocked[w->peer] = 1;
            s->wanted[left++] = *w;
            continue;
        }
        assert_int_equal(l->bytes, w->bytes);
        memcpy(w->data, l->data, l->bytes);
        post.queue[w->peer][s->rank] = l->next;
        free(l);
    }
    s->count = left;
    pthread_mutex_unlock(&post.lock);
    return left == 0;
}

static void post_close(void *ctx)
{
    ((struct station *)ctx)->closed = 1;
}

static const struct coll_transport transport = {
    COLL_TRANSPORT_VERSION, post_open, post_send, post_recv, post_test, post_close};

static void post_clear(void)
{
    for (int i = 0; i < MAX_WORLD * MAX_WORLD; i++)
        for (struct letter *l; (l = post.queue[i / MAX_WORLD][i % MAX_WORLD]);) {
            post.queue[i / MAX_WORLD][i % MAX_WORLD] = l->next;
            free(l);
        }
}

/* -- ranks as threads ----------------------------------------------------------------------- */

struct rank {
    struct station station;
    pthread_t thread;
    void (*work)(struct rank *r, struct coll *c);
    double timeout;
    float *x;
    double *sums;
    int code, freed; /* of the work's wait, of coll_free() */
    char text[256];
};

static struct coll_settings settings_of(struct rank *r)
{
    return (struct coll_settings){.transport = &transport,
        .ctx = &r->station,
        .rank = r->station.rank,
        .world = post.world,
        .timeout_seconds = r->timeout};
}

static void *rank_main(void *arg)
{
    struct rank *r = arg;
    struct coll_settings s = settings_of(r);
    struct coll *c;
    struct err e = {0};
    r->code = coll_open(&s, &c, &e);
    snprintf(r->text, sizeof r->text, "%.255s", e.msg);
    if (r->code == 0) {
        r->work(r, c);
        r->freed = coll_free(&c);
    }
    return NULL;
}

static void run(struct rank *ranks, int world, void (*work)(struct rank *, struct coll *))
{
    post.world = world;
    for (int r = 0; r < world; r++) {
        ranks[r].station.rank = r;
        ranks[r].work = work;
        if (ranks[r].timeout == 0)
            ranks[r].timeout = 20;
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]), 0);
    }
    for (int r = 0; r < world; r++) {
        pthread_join(ranks[r].thread, NULL);
        free(ranks[r].station.wanted);
    }
    post_clear();
}

static void ranks_new(struct rank ranks[MAX_WORLD])
{
    memset(ranks, 0, MAX_WORLD * sizeof *ranks);
    for (int r = 0; r < MAX_WORLD; r++)
        ranks[r].station = (struct station){.claim = r, .broken = -1};
}

/* -- values --------------------------------------------------------------------------------- */

#define FLOATS 700000 /* more than a message holds */
#define SUMS   37

static float value(int rank, int64_t i)
{
    return (float)(rng_unit(rng_key(17, (uint64_t)rank), (uint64_t)i) * 2 - 1) *
           (i % 11 ? 1.0f : 1e6f);
}

/* Spans of many sizes with holes between them, owners in no order. */
static int make_spans(struct coll_span *out, int world, int longest)
{
    int n = 0;
    uint64_t key = rng_key(5, (uint64_t)world);
    for (int64_t at = 3; n < 40;) {
        int64_t count = n == 7 ? longest : 1 + (int64_t)(rng_unit(key, (uint64_t)n) * 3000);
        if (at + count > FLOATS)
            break;
        out[n] = (struct coll_span){at, count, (int)(rng_mix((uint64_t)n) % (uint64_t)world)};
        at += count + n % 3;
        n++;
    }
    return n;
}

static struct coll_span spans[40];
static int span_count;

static void reduce_and_gather(struct rank *r, struct coll *c)
{
    struct err e = {0};
    assert_int_equal(coll_world(c), post.world);
    assert_int_equal(coll_rank(c), r->station.rank);
    /* In several operations, as buckets come. */
    coll_reduce(c, r->x, spans, span_count / 2);
    coll_sum(c, r->sums, SUMS);
    coll_reduce(c, r->x, spans + span_count / 2, span_count - span_count / 2);
    r->code = coll_wait(c, NULL, NULL, &e);
    if (r->code == 0) {
        coll_gather(c, r->x, spans, span_count);
        r->code = coll_wait(c, NULL, NULL, &e);
    }
    if (r->code == 0)
        r->code = coll_barrier(c, NULL, NULL, &e);
}

static void check_values(struct rank *ranks, int world)
{
    uint8_t *inside = mem_array(FLOATS, 1);
    for (int s = 0; s < span_count; s++)
        memset(inside + spans[s].offset, 1, (size_t)spans[s].count);
    for (int64_t i = 0; i < FLOATS; i++) {
        float sum = value(0, i);
        for (int r = 1; r < world; r++)
            sum += value(r, i);
        for (int r = 0; r < world; r++) {
            float want = inside[i] ? sum : value(r, i);
            if (memcmp(&want, &ranks[r].x[i], sizeof want) != 0)
                fail_msg("world %d, rank %d, float %lld: %g, expected %g", world, r, (long long)i,
                    (double)ranks[r].x[i], (double)want);
        }
    }
    for (int i = 0; i < SUMS; i++) {
        double sum = (double)value(0, i) / 3;
        for (int r = 1; r < world; r++)
            sum += (double)value(r, i) / 3;
        for (int r = 0; r < world; r++)
            assert_memory_equal(&sum, &ranks[r].sums[i], sizeof sum);
    }
    free(inside);
}

static void test_sums_are_in_rank_order(void **state)
{
    (void)state;
    for (int world = 1; world <= MAX_WORLD; world++) {
        struct rank ranks[MAX_WORLD];
        ranks_new(ranks);
        span_count = make_spans(spans, world, 600000);
        assert_int_equal(span_count, 40);
        for (int r = 0; r < world; r++) {
            ranks[r].x = mem_array(FLOATS, sizeof(float));
            ranks[r].sums = mem_array(SUMS, sizeof(double));
            for (int64_t i = 0; i < FLOATS; i++)
                ranks[r].x[i] = value(r, i);
            for (int i = 0; i < SUMS; i++)
                ranks[r].sums[i] = (double)value(r, i) / 3;
        }
        run(ranks, world, reduce_and_gather);
        for (int r = 0; r < world; r++) {
            assert_int_equal(ranks[r].code, 0);
            assert_int_equal(ranks[r].freed, 0);
            assert_int_equal(ranks[r].station.closed, world > 1);
        }
        check_values(ranks, world);
        for (int r = 0; r < world; r++) {
            free(ranks[r].x);
            free(ranks[r].sums);
        }
    }
}

/* -- waits that end --------------------------------------------------------------------------- */

static int give_up_now(void *ctx)
{
    ++*(int *)ctx;
    return 1;
}

/* Rank 1 takes no part. Leaving is quick all the same, and nobody says goodbye. */
static void only_rank_0(struct rank *r, struct coll *c)
{
    static double values[2];
    struct err e = {0};
    if (r->station.rank == 0) {
        coll_sum(c, values, 2);
        r->code = coll_wait(c, NULL, NULL, &e);
    }
}

static int asked;

static void only_rank_0_gives_up(struct rank *r, struct coll *c)
{
    static double values[2];
    struct err e = {0};
    if (r->station.rank == 0) {
        coll_sum(c, values, 2);
        r->code = coll_wait(c, give_up_now, &asked, &e);
    }
}

static void test_a_rank_that_does_not_come(void **state)
{
    struct rank ranks[MAX_WORLD];
    (void)state;
    ranks_new(ranks);
    ranks[0].timeout = 0.1;
    run(ranks, 2, only_rank_0);
    assert_int_equal(ranks[0].code, ERR_TIMEOUT);
    assert_int_equal(ranks[0].freed, ERR_STOPPED);
    assert_false(ranks[0].station.closed);
    assert_true(ranks[1].station.closed);

    ranks_new(ranks);
    asked = 0;
    run(ranks, 2, only_rank_0_gives_up);
    assert_int_equal(ranks[0].code, ERR_STOPPED);
    assert_true(asked > 0);
    assert_int_equal(ranks[0].freed, ERR_STOPPED);
}

static void do_nothing(struct rank *r, struct coll *c)
{
    (void)r;
    (void)c;
}

static void test_a_transport_that_fails(void **state)
{
    struct rank ranks[MAX_WORLD];
    (void)state;
    ranks_new(ranks);
    ranks[0].station.claim = -1;
    ranks[1].timeout = 0.1;
    run(ranks, 2, do_nothing);
    assert_int_equal(ranks[0].code, ERR_IO);
    assert_non_null(strstr(ranks[0].text, "out of order"));
    assert_int_equal(ranks[1].code, ERR_TIMEOUT);

    ranks_new(ranks);
    ranks[1].station.claim = 0;
    ranks[0].timeout = 0.1;
    run(ranks, 2, do_nothing);
    assert_int_equal(ranks[1].code, ERR_MISMATCH);
    assert_non_null(strstr(ranks[1].text, "expected 1 of 2"));

    ranks_new(ranks);
    ranks[0].station.broken = 1; /* the barrier of coll_open() goes through */
    ranks[1].timeout = 0.2;
    run(ranks, 2, only_rank_0);
    assert_int_equal(ranks[0].code, ERR_IO);
}

static void test_missing_object(void **state)
{
    const struct coll_transport *t;
    struct err e = {0};
    (void)state;
    assert_int_equal(coll_load("/nonexistent/fb-coll-x.so", &t, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.msg, "fb-coll-x.so"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_are_in_rank_order),
        cmocka_unit_test(test_a_rank_that_does_not_come),
        cmocka_unit_test(test_a_transport_that_fails),
        cmocka_unit_test(test_missing_object),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
