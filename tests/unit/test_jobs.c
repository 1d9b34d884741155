/* Eval jobs: from a commit to a result on disk, whatever happens to the evaluators. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "common/fs.h"
#include "common/mem.h"
#include "tests/unit/scheduler_rig.h"

#define WITH_EVAL                                                                                  \
    "eval: {every_steps: 4, suites: [loss, fixed_point], regimes: [standard, soft, fused], "       \
    "fixed_point_passes: 4}\n"                                                                     \
    "process.evaluators: 1"
#define JOBS 4 /* loss in three regimes, and the fixed point */

static void join_evaluator(struct rig *r, int rank)
{
    const char *peer = rank ? "evaluator-1" : "evaluator-0";
    rig_say_epoch(r, peer, WIRE_HELLO, 0, rig_hello(r, "evaluator", rank, 1));
    rig_expect(r, peer, WIRE_WELCOME);
}

/* Asks for a job; its body, "id" null when there is none. */
static json_t *get_job(struct rig *r, const char *peer)
{
    rig_say(r, peer, WIRE_JOB_GET, json_object());
    json_t *j = rig_take(r, peer, WIRE_JOB);
    assert_non_null(j);
    return j;
}

static const char *text(const json_t *j, const char *key)
{
    return json_string_value(json_object_get(j, key));
}

static void give_result(struct rig *r, const char *peer, const json_t *job, double nats)
{
    rig_say(r, peer, WIRE_RESULT,
        json_pack("{s:s, s:{s:f, s:[{s:i, s:f}, {s:i, s:f}, {s:i, s:f}]}}", "id", text(job, "id"),
            "result", "nats_per_token", nats, "passes", "pass", 1, "nats_per_token", 3.0, "pass", 2,
            "nats_per_token", 2.0, "pass", 3, "nats_per_token", nats));
    json_t *ack = rig_take(r, peer, WIRE_RESULT_ACK);
    assert_non_null(ack);
    assert_string_equal(text(ack, "id"), text(job, "id"));
    json_decref(ack);
}

static void expect_no_job(struct rig *r, const char *peer)
{
    json_t *j = get_job(r, peer);
    assert_true(json_is_null(json_object_get(j, "id")));
    json_decref(j);
}

static json_t *read_summary(const struct rig *r, const char *name)
{
    struct err e = {0};
    struct buf b = BUF_INIT;
    char *path = mem_printf("%s/%s", r->dir, name);
    if (fs_read(path, 1 << 20, &b, &e) < 0)
        fail_msg("%s", e.msg);
    json_t *j = json_loadb(b.data, b.len, 0, NULL);
    assert_non_null(j);
    buf_release(&b);
    free(path);
    return j;
}

static void start(struct rig *r, int64_t steps)
{
    rig_open(r, WITH_EVAL);
    rig_join(r, 1);
    rig_train(r, 1, steps);
    join_evaluator(r, 0);
}

static void test_from_commit_to_summary(void **state)
{
    (void)state;
    static const char *const keys[JOBS] = {
        "loss.standard", "loss.soft", "loss.fused", "fixed_point.fused"};
    struct rig r;
    start(&r, 4);
    for (int i = 0; i < JOBS; i++) {
        json_t *job = get_job(&r, "evaluator-0");
        assert_int_equal(strlen(text(job, "id")), 64);
        assert_string_equal(strrchr(text(job, "checkpoint"), '/'), "/step-00000004");
        assert_true(text(job, "checkpoint")[0] == '/');
        assert_int_equal(json_integer_value(json_object_get(job, "step")), 4);
        give_result(&r, "evaluator-0", job, 1.5 + i);
        json_decref(job);
    }
    expect_no_job(&r, "evaluator-0");
    json_t *j = read_summary(&r, "evals/step-00000004/summary.json");
    assert_int_equal(json_object_size(j), JOBS);
    for (int i = 0; i < JOBS; i++) {
        json_t *result = json_object_get(json_object_get(j, keys[i]), "result");
        assert_true(json_number_value(json_object_get(result, "nats_per_token")) == 1.5 + i);
    }
    json_decref(j);
    rig_close(&r);
}

/* More passes that make it worse are worth a warning. */
static void test_pass_warning(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 4);
    json_t *job = get_job(&r, "evaluator-0");
    give_result(&r, "evaluator-0", job, 2.5);
    assert_int_equal(r.s->warning_count, 0); /* one pass so far: the others are untrained */
    json_decref(job);
    rig_close(&r);

    start(&r, 4);
    r.run.plan.c.train.phases[0].share[1] = 0;
    r.run.plan.c.train.phases[0].share[3] = 1;
    job = get_job(&r, "evaluator-0");
    give_result(&r, "evaluator-0", job, 2.5);
    assert_int_equal(r.s->warning_count, 1);
    assert_non_null(strstr(r.s->warnings[0], "pass 3 (2.5000) is above that of pass 2 (2.0000)"));
    json_decref(job);
    rig_close(&r);
}

static void test_leases(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 4);
    join_evaluator(&r, 1);
    json_t *a = get_job(&r, "evaluator-0"), *again = get_job(&r, "evaluator-0");
    json_t *b = get_job(&r, "evaluator-1");
    assert_string_equal(text(a, "id"), text(again, "id"));
    assert_string_not_equal(text(a, "id"), text(b, "id"));
    assert_int_equal(jobs_leased(&r.s->jobs), 2);
    /* One dies: the other is given its job next. */
    rig_say(&r, "evaluator-0", WIRE_BYE, json_object());
    give_result(&r, "evaluator-1", b, 1);
    json_t *returned = get_job(&r, "evaluator-1");
    assert_string_equal(text(returned, "id"), text(a, "id"));
    json_decref(a);
    json_decref(again);
    json_decref(b);
    json_decref(returned);
    rig_close(&r);
}

/* The evaluator that was given up has a result after all, and the one after it too: the first
 * counts. */
static void test_put_if_absent(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    start(&r, 4);
    json_t *job = get_job(&r, "evaluator-0");
    give_result(&r, "evaluator-0", job, 1.25);
    give_result(&r, "evaluator-0", job, 9.0); /* its RESULT_ACK was lost: acknowledged again */
    json_t *kept = journal_result(r.s->journal, text(job, "id"), &e);
    assert_true(json_number_value(json_object_get(kept, "nats_per_token")) == 1.25);
    json_decref(kept);
    /* After a restart as well, under a newer epoch than the evaluator knows. */
    uint32_t old = r.s->epoch;
    rig_restart(&r);
    join_evaluator(&r, 0);
    rig_say_epoch(&r, "evaluator-0", WIRE_RESULT, old,
        json_pack("{s:s, s:{s:f}}", "id", text(job, "id"), "result", "nats_per_token", 7.0));
    rig_expect(&r, "evaluator-0", WIRE_RESULT_ACK);
    kept = journal_result(r.s->journal, text(job, "id"), &e);
    assert_true(json_number_value(json_object_get(kept, "nats_per_token")) == 1.25);
    json_decref(kept);
    json_decref(job);
    rig_close(&r);
}

static void test_restart_keeps_the_queue(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 8);
    assert_int_equal(jobs_pending(&r.s->jobs), 2 * JOBS);
    json_t *job = get_job(&r, "evaluator-0");
    give_result(&r, "evaluator-0", job, 1);
    json_decref(get_job(&r, "evaluator-0")); /* leased when it is killed */
    rig_restart(&r);
    assert_int_equal(jobs_pending(&r.s->jobs), 2 * JOBS - 1);
    assert_int_equal(jobs_leased(&r.s->jobs), 0);
    json_decref(job);
    rig_close(&r);
}

static void test_errors_are_bounded(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 4);
    json_t *first = get_job(&r, "evaluator-0");
    for (int i = 0; i < JOB_MAX_TRIES; i++) {
        json_t *job = get_job(&r, "evaluator-0");
        assert_string_equal(text(job, "id"), text(first, "id"));
        rig_say(&r, "evaluator-0", WIRE_RESULT,
            json_pack("{s:s, s:s}", "id", text(job, "id"), "error", "out of memory"));
        rig_expect(&r, "evaluator-0", WIRE_RESULT_ACK);
        json_decref(job);
    }
    json_t *next = get_job(&r, "evaluator-0");
    assert_string_not_equal(text(next, "id"), text(first, "id"));
    json_t *j = read_summary(&r, "evals/step-00000004/summary.json");
    assert_string_equal(text(json_object_get(j, "loss.standard"), "error"), "out of memory");
    json_decref(j);
    json_decref(next);
    json_decref(first);
    rig_close(&r);
}

static void test_bad_results(void **state)
{
    (void)state;
    struct rig r;
    start(&r, 4);
    json_t *job = get_job(&r, "evaluator-0");
    rig_say(&r, "evaluator-0", WIRE_RESULT, json_pack("{s:s}", "id", text(job, "id")));
    rig_say(&r, "evaluator-0", WIRE_RESULT, json_pack("{s:i}", "id", 3));
    rig_say(&r, "evaluator-0", WIRE_RESULT, json_pack("{s:s, s:{}}", "id", "unknown", "result"));
    rig_say(&r, "evaluator-0", WIRE_RESULT,
        json_pack("{s:s, s:i}", "id", text(job, "id"), "result", 3));
    assert_int_equal(jobs_pending(&r.s->jobs), JOBS);
    rig_say(&r, "trainer-0", WIRE_JOB_GET, json_object());
    rig_expect_none(&r, "trainer-0", WIRE_JOB);
    json_decref(job);
    rig_close(&r);
}

/* A checkpoint that jobs still need stays, however many come after it. */
static void test_jobs_pin_checkpoints(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    int64_t *steps;
    rig_open(&r, WITH_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 12);
    assert_int_equal(checkpoint_list(r.s->commits.root, &steps, &e), 3);
    free(steps);
    join_evaluator(&r, 0);
    for (int i = 0; i < JOBS; i++) {
        json_t *job = get_job(&r, "evaluator-0");
        assert_int_equal(json_integer_value(json_object_get(job, "step")), 4);
        give_result(&r, "evaluator-0", job, 1);
        json_decref(job);
    }
    assert_int_equal(checkpoint_list(r.s->commits.root, &steps, &e), 2);
    assert_int_equal(steps[0], 8);
    free(steps);
    rig_close(&r);
}

static void test_the_end_waits_for_results(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, WITH_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 12);
    join_evaluator(&r, 0);
    assert_int_equal(r.s->state, RUN_EVALUATING);
    for (int i = 0; i < 3 * JOBS; i++) {
        assert_false(scheduler_done(r.s));
        json_t *job = get_job(&r, "evaluator-0");
        give_result(&r, "evaluator-0", job, 1);
        json_decref(job);
    }
    assert_int_equal(r.s->state, RUN_FINISHED);
    rig_expect(&r, "evaluator-0", WIRE_FINISH);
    rig_expect(&r, "trainer-0", WIRE_FINISH);
    json_t *j = read_summary(&r, "summary.json");
    assert_int_equal(json_array_size(json_object_get(j, "evals")), 3 * JOBS);
    json_decref(j);
    rig_close(&r);
}

static void test_the_end_without_evaluators(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, WITH_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 12);
    rig_wait(&r, 19 * RIG_BEAT);
    assert_int_equal(r.s->state, RUN_EVALUATING);
    rig_wait(&r, 2 * RIG_BEAT);
    assert_int_equal(r.s->state, RUN_FINISHED);
    assert_non_null(strstr(r.s->warnings[r.s->warning_count - 1], "12 eval jobs are left"));
    rig_close(&r);
}

/* Trained, but the evaluations are not done: a restart goes on with them. */
static void test_restart_while_evaluating(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, WITH_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 12);
    rig_restart(&r);
    assert_int_equal(r.s->state, RUN_EVALUATING);
    rig_say_epoch(&r, "trainer-0", WIRE_HELLO, 0, rig_hello(&r, "trainer", 0, 1));
    assert_int_equal(json_step(rig_take(&r, "trainer-0", WIRE_WELCOME)), 12);
    uint32_t epoch = r.s->epoch;
    scheduler_unreachable(r.s, "trainer-0", r.now); /* no longer needed */
    assert_int_equal(r.s->epoch, epoch);
    join_evaluator(&r, 0);
    json_t *job = get_job(&r, "evaluator-0");
    give_result(&r, "evaluator-0", job, 1);
    json_decref(job);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_from_commit_to_summary),
        cmocka_unit_test(test_pass_warning),
        cmocka_unit_test(test_leases),
        cmocka_unit_test(test_put_if_absent),
        cmocka_unit_test(test_restart_keeps_the_queue),
        cmocka_unit_test(test_errors_are_bounded),
        cmocka_unit_test(test_bad_results),
        cmocka_unit_test(test_jobs_pin_checkpoints),
        cmocka_unit_test(test_the_end_waits_for_results),
        cmocka_unit_test(test_the_end_without_evaluators),
        cmocka_unit_test(test_restart_while_evaluating),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
