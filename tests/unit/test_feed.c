/* The feed against a loader played by the test, which loses, repeats, spoils and refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/batch.h"
#include "common/clock.h"
#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/temp_dir.h"
#include "trainer/feed.h"

#define SEQ        8
#define MICRO      2
#define BATCH_ROWS 8
#define STEPS      6
#define VOCAB      50
#define EPOCH      3
#define RETRY_MS   40
#define PATIENCE   30.0 /* seconds for what must come */

struct fixture {
    char *dir, sock[600];
    struct plan plan;
    struct bus *bus;
    struct endpoint *loader;
    struct feed *feed;
    char identity[32];       /* the feed's; each has its own */
    int feeds;               /* so far */
    int64_t now;             /* the feed's time; it stands still unless play() has to wait */
    uint64_t asked, answers; /* GETs that came from this feed, messages sent to it */
};

/* A plan of one source with phases up to 3 passes, made by hand. */
static void plan_fill(struct plan *p)
{
    p->c.model.vocab = VOCAB;
    p->c.data.seq_len = SEQ;
    p->c.data.source_count = 1;
    p->c.train.steps = STEPS;
    p->c.train.batch_rows = BATCH_ROWS;
    p->c.train.micro_rows = MICRO;
    p->c.train.seed = 7;
    p->c.train.fully_fused = 0.5;
    p->c.train.phase_count = 1;
    p->c.train.phases[0].share[1] = 0.5;
    p->c.train.phases[0].share[3] = 0.5;
    p->source_count = 1;
    p->sources[0] = (struct plan_source){.name = (char *)"s",
        .path = (char *)"/",
        .weight = 1,
        .train_tokens = 1000,
        .train_samples = 100,
        .quota = 4096};
}

static int setup(void **state)
{
    struct fixture *f = mem_array(1, sizeof *f);
    struct err e;
    f->dir = temp_dir_make();
    snprintf(f->sock, sizeof f->sock, "%s/loader", f->dir);
    plan_fill(&f->plan);
    assert_int_equal(bus_new(&f->bus, &e), 0);
    assert_int_equal(endpoint_bind(f->bus, f->sock, &f->loader, &e), 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    feed_free(&f->feed);
    endpoint_close(&f->loader);
    bus_free(&f->bus);
    temp_dir_remove(&f->dir);
    free(f);
    return 0;
}

static void start(struct fixture *f, int rank, int world, int steps_ahead, size_t byte_cap)
{
    struct feed_settings s = {.plan = &f->plan,
        .rank = rank,
        .world = world,
        .steps_ahead = steps_ahead,
        .byte_cap = byte_cap,
        .retry_ms = RETRY_MS};
    struct err e;
    snprintf(f->identity, sizeof f->identity, "trainer-%d", f->feeds++);
    f->asked = f->answers = 0;
    f->now += 1;
    assert_int_equal(feed_new(f->bus, f->sock, f->identity, &s, &f->feed, &e), 0);
    feed_restart(f->feed, EPOCH, 0);
}

/* The right answer to a request: tokens are a function of ordinal and place. */
static void batch_make(struct fixture *f, const struct batch_request *r, struct batch *b)
{
    assert_int_equal(batch_new((int)(r->hi - r->lo), SEQ, b, NULL), 0);
    b->stream = r->stream;
    b->step = r->step;
    b->lo = r->lo;
    for (int i = 0; i < b->rows; i++) {
        b->sample_ids[i] = plan_train_sample(&f->plan, r->lo + (uint64_t)i).id;
        for (int t = 0; t <= SEQ; t++)
            b->tokens[i * (SEQ + 1) + t] = (uint32_t)((r->lo + (uint64_t)i + (uint64_t)t) % VOCAB);
        b->doc_starts[i * SEQ] = 1;
        b->doc_starts[i * SEQ + 5] = 1;
        b->content += row_digest(b->sample_ids[i], b->tokens + i * (SEQ + 1), SEQ + 1);
    }
}

enum fault { NONE, LOSE, TWICE, SPOIL, OTHER_SAMPLES, OLD_EPOCH, NAK_RETRY, NAK_FINAL };

static void answer(struct fixture *f, const struct message *m, enum fault fault)
{
    struct batch_request r;
    struct batch b;
    struct buf body = BUF_INIT;
    assert_int_equal(batch_request_decode(m->body, m->body_bytes, &r, NULL), 0);
    batch_make(f, &r, &b);
    if (fault == OTHER_SAMPLES) {
        b.content -= row_digest(b.sample_ids[0], b.tokens, SEQ + 1);
        b.sample_ids[0]++;
        b.content += row_digest(b.sample_ids[0], b.tokens, SEQ + 1);
    }
    batch_encode(&b, &body);
    if (fault == SPOIL)
        body.data[body.len - SEQ * MICRO - 3] ^= 1; /* a token: the digest does not hold */
    uint32_t epoch = fault == OLD_EPOCH ? EPOCH - 1 : EPOCH;
    for (int i = fault == LOSE ? 2 : fault == TWICE ? 0 : 1; i < 2; i++) {
        f->answers++;
        if (fault == NAK_RETRY || fault == NAK_FINAL)
            endpoint_send_json(f->loader, m->peer, WIRE_NAK, EPOCH, m->head.request_id,
                json_pack("{s:s, s:b}", "reason", "shard s: block 3", "retry", fault == NAK_RETRY),
                NULL);
        else
            endpoint_send(f->loader, m->peer, WIRE_BATCH, epoch, m->head.request_id, body.data,
                body.len, NULL);
    }
    buf_release(&body);
    batch_release(&b);
}

/* Nothing is on its way between the feed and the loader: only time can bring more. */
static int is_quiet(const struct fixture *f)
{
    const struct feed_stats *s = feed_stats_of(f->feed);
    return s->asked == f->asked &&
           s->batches + s->refused + s->duplicates + s->stale + s->damaged == f->answers;
}

/* Plays the loader and pumps the feed until `step` is held; request n meets faults[n], later ones
 * none. */
static int play(struct fixture *f, int64_t step, const enum fault *faults, int count, struct err *e)
{
    double end = clock_seconds() + PATIENCE;
    int n = 0, rc = 0;
    while (rc == 0 && !feed_ready(f->feed, step)) {
        struct message m;
        if (clock_seconds() > end)
            return err_set(e, ERR_TIMEOUT, "step %d is not held", (int)step);
        rc = feed_pump(f->feed, f->now, e);
        while (rc == 0 && endpoint_recv(f->loader, 2, &m, NULL) == 1) {
            if (m.head.type == WIRE_GET && strcmp(m.peer, f->identity) == 0) {
                f->asked++;
                answer(f, &m, n < count ? faults[n] : NONE);
                n++;
            }
            message_release(&m);
        }
        if (is_quiet(f))
            f->now += RETRY_MS / 2;
    }
    return rc;
}

/* Checks the arrays of one micro-batch against the rule the loader made them by. */
static void check_micro(struct fixture *f, int64_t step, int m, int passes)
{
    struct feed_micro micro;
    feed_micro(f->feed, step, m, passes, &micro);
    uint64_t lo = (uint64_t)step * BATCH_ROWS + (uint64_t)m * MICRO, ids = 0;
    assert_int_equal(micro.rows, MICRO);
    assert_int_equal(micro.seq, SEQ);
    for (int r = 0; r < MICRO; r++) {
        uint64_t id = plan_train_sample(&f->plan, lo + (uint64_t)r).id;
        ids += rng_mix(id);
        for (int t = 0; t < SEQ; t++) {
            assert_int_equal(micro.tokens[r * SEQ + t], (lo + (uint64_t)r + (uint64_t)t) % VOCAB);
            assert_int_equal(
                micro.targets[r * SEQ + t], (lo + (uint64_t)r + (uint64_t)t + 1) % VOCAB);
        }
        for (int pass = 2; pass <= passes; pass++) {
            uint8_t want[SEQ];
            int at = (pass - 2) * MICRO + r;
            plan_fuse_mask(&f->plan, id, pass, micro.doc_starts + r * SEQ, want);
            assert_memory_equal(micro.masks + at * SEQ, want, SEQ);
            assert_int_equal(want[0], 0);
            assert_int_equal(want[5], 0); /* the second document's start */
            assert_true(micro.noise_keys[at] == plan_noise_key(&f->plan, id, pass));
        }
    }
    assert_true(micro.digest.ids == ids);
    assert_true((micro.masks == NULL) == (passes == 1));
}

static void test_all_steps_come_as_the_plan_says(void **state)
{
    struct fixture *f = *state;
    struct err e;
    start(f, 0, 1, 4, 1 << 20);
    for (int64_t step = 0; step < STEPS; step++) {
        assert_int_equal(play(f, step, NULL, 0, &e), 0);
        for (int m = 0; m < BATCH_ROWS / MICRO; m++)
            check_micro(f, step, m, step % 2 ? 3 : 1);
        feed_done(f->feed, step);
    }
    assert_int_equal(feed_stats_of(f->feed)->batches, STEPS * BATCH_ROWS / MICRO);
    assert_false(feed_ready(f->feed, STEPS));
}

static void test_faults_heal(void **state)
{
    static const enum fault faults[] = {
        LOSE, TWICE, SPOIL, OLD_EPOCH, NAK_RETRY, LOSE, LOSE, SPOIL, TWICE, LOSE};
    struct fixture *f = *state;
    struct err e;
    start(f, 0, 1, 4, 1 << 20);
    assert_int_equal(feed_pump(f->feed, f->now, &e), 0);
    f->now += RETRY_MS / 2; /* the answers come later than the requests: then silence is shorter */
    assert_int_equal(play(f, 0, faults, sizeof faults / sizeof *faults, &e), 0);
    for (int64_t step = 0; step < 3; step++)
        assert_int_equal(play(f, step, NULL, 0, &e), 0);
    for (int m = 0; m < BATCH_ROWS / MICRO; m++)
        check_micro(f, 0, m, 2);
    const struct feed_stats *s = feed_stats_of(f->feed);
    assert_true(s->damaged >= 2 && s->duplicates >= 1 && s->stale >= 1 && s->resends >= 2);
    assert_int_equal(s->refused, 1);
}

static void test_a_silent_loader_is_called_again(void **state)
{
    static const enum fault faults[] = {LOSE, LOSE, LOSE, LOSE, LOSE, LOSE, LOSE, LOSE, LOSE, LOSE,
        LOSE, LOSE, LOSE, LOSE, LOSE, LOSE};
    struct fixture *f = *state;
    struct err e;
    start(f, 0, 1, 4, 1 << 20);
    assert_int_equal(play(f, 3, faults, sizeof faults / sizeof *faults, &e), 0);
    assert_true(feed_stats_of(f->feed)->reconnects >= 1);
}

static void test_final_errors(void **state)
{
    static const struct {
        enum fault fault;
        int times, code;
        const char *text;
    } cases[] = {
        {NAK_FINAL, 1, ERR_INPUT, "shard s: block 3"},
        {OTHER_SAMPLES, 1, ERR_MISMATCH, "the plan says"},
        {SPOIL, 100, ERR_CORRUPT, "damaged 5 times"},
    };
    struct fixture *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        enum fault faults[100];
        struct err e = {0};
        for (int k = 0; k < 100; k++)
            faults[k] = cases[i].fault;
        start(f, 0, 1, 1, 1 << 20);
        assert_int_equal(play(f, 0, faults, cases[i].times, &e), cases[i].code);
        if (!strstr(e.msg, cases[i].text))
            fail_msg("\"%s\" lacks \"%s\"", e.msg, cases[i].text);
        feed_free(&f->feed);
    }
}

static void test_ranks_share_the_micro_batches(void **state)
{
    struct fixture *f = *state;
    struct err e;
    uint64_t asked = 0;
    for (int rank = 0; rank < 3; rank++) { /* 4 micro-batches: 0 and 3, 1, 2 */
        start(f, rank, 3, 1, 1 << 20);
        assert_int_equal(play(f, 0, NULL, 0, &e), 0);
        for (int m = rank; m < BATCH_ROWS / MICRO; m += 3)
            check_micro(f, 0, m, 3);
        asked += feed_stats_of(f->feed)->batches;
        feed_free(&f->feed);
    }
    assert_int_equal(asked, BATCH_ROWS / MICRO);
}

/* The run epoch of the next GET of this feed. */
static uint32_t take_get(struct fixture *f)
{
    double end = clock_seconds() + PATIENCE;
    uint32_t epoch = 0;
    while (!epoch && clock_seconds() < end) {
        struct message m;
        if (endpoint_recv(f->loader, 100, &m, NULL) != 1)
            continue;
        if (m.head.type == WIRE_GET && strcmp(m.peer, f->identity) == 0)
            epoch = m.head.run_epoch;
        message_release(&m);
    }
    return epoch;
}

static void test_credit_is_bounded(void **state)
{
    static const struct {
        size_t cap;
        int steps;
    } cases[] = {{1, 1}, {1400, 2}, {1 << 20, 4}};
    struct fixture *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int gets = 0;
        start(f, 0, 1, 4, cases[i].cap);
        for (int epoch = EPOCH; epoch <= EPOCH + 1; epoch++) {
            struct err e;
            feed_restart(f->feed, (uint32_t)epoch, 0);
            assert_int_equal(feed_pump(f->feed, f->now, &e), 0);
        }
        while (take_get(f) == EPOCH) /* the next epoch's come behind all of this one's */
            gets++;
        assert_int_equal(gets, cases[i].steps * BATCH_ROWS / MICRO);
        feed_free(&f->feed);
    }
}

static void test_restart_forgets(void **state)
{
    struct fixture *f = *state;
    struct err e;
    start(f, 0, 1, 2, 1 << 20);
    assert_int_equal(play(f, 1, NULL, 0, &e), 0);
    feed_restart(f->feed, EPOCH, 4);
    assert_false(feed_ready(f->feed, 1));
    assert_false(feed_ready(f->feed, 4));
    assert_int_equal(play(f, 5, NULL, 0, &e), 0);
    check_micro(f, 5, 1, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_all_steps_come_as_the_plan_says, setup, teardown),
        cmocka_unit_test_setup_teardown(test_faults_heal, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_silent_loader_is_called_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_final_errors, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ranks_share_the_micro_batches, setup, teardown),
        cmocka_unit_test_setup_teardown(test_credit_is_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(test_restart_forgets, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
