/* The scheduler's core: barrier, grants, deaths, epochs, commits, stops. Eval jobs: test_jobs.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/fs.h"
#include "common/mem.h"
#include "common/rng.h"
#include "scheduler/status.h"
#include "tests/unit/scheduler_rig.h"

#define NO_EVAL "eval.every_steps: 0"

static json_t *number(const char *key, int64_t n)
{
    return json_pack("{s:I}", key, (json_int_t)n);
}

static void expect_state(const struct rig *r, int state, int exit_code, const char *says)
{
    assert_string_equal(run_state_name(r->s->state), run_state_name(state));
    assert_int_equal(r->s->exit_code, exit_code);
    if (!strstr(r->s->reason, says))
        fail_msg("\"%s\" does not say \"%s\"", r->s->reason, says);
}

static void expect_warning(const struct rig *r, const char *says)
{
    for (int i = 0; i < r->s->warning_count; i++)
        if (strstr(r->s->warnings[i], says))
            return;
    fail_msg("no warning says \"%s\"", says);
}

/* The chain of a run that nothing ever happened to. */
static void undisturbed_chain(int world, int64_t steps, char out[SHA256_HEX])
{
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, world);
    rig_train(&r, world, steps);
    memcpy(out, r.s->steps.cursor.chain, SHA256_HEX);
    rig_close(&r);
}

/* -- who may take part -- */

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value, *says;
    } cases[] = {
        {"plan_hash", "deadbeef", "plan deadbeef, this run has "},
        {"manifest_root", "cafe", "manifest root cafe, this run has "},
        {"version", "9.9.9", "version 9.9.9, this run has "},
        {"role", "operator", "role"},
        {"role", NULL, "role"},
        {"rank", "zero", "rank"},
        {"pid", NULL, "pid"},
    };
    struct rig r;
    rig_open(&r, NO_EVAL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *j = rig_hello(&r, "trainer", 0, 1);
        if (cases[i].value)
            json_object_set_new(j, cases[i].key, json_string(cases[i].value));
        else
            json_object_del(j, cases[i].key);
        rig_say_epoch(&r, "trainer-0", WIRE_HELLO, 0, j);
        json_t *refusal = rig_take(&r, "trainer-0", WIRE_REFUSE);
        assert_non_null(refusal);
        const char *reason = json_string_value(json_object_get(refusal, "reason"));
        if (!strstr(reason, cases[i].says))
            fail_msg("%s", reason);
        json_decref(refusal);
        rig_expect_none(&r, "trainer-0", WIRE_WELCOME);
    }
    assert_int_equal(r.s->members.count, 0);
    rig_say_epoch(&r, "a", WIRE_HELLO, 0, rig_hello(&r, "trainer", 2, 2));
    rig_expect(&r, "a", WIRE_REFUSE); /* rank 2 of 2 */
    rig_close(&r);
}

static void test_strangers_are_not_heard(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_say(&r, "trainer-0", WIRE_READY, number("step", 0));
    rig_say(&r, "trainer-0", WIRE_HEARTBEAT, json_object());
    rig_say(&r, "trainer-0", WIRE_GRANT, number("step", 0));
    rig_say(&r, "trainer-0", WIRE_JOB_GET, json_object());
    assert_int_equal(r.count, 0); /* silence makes it say HELLO again */
    assert_int_equal(r.s->dropped, 4);
    rig_say(&r, "operator", WIRE_STATUS_GET, json_object());
    rig_expect(&r, "operator", WIRE_STATUS);
    rig_close(&r);
}

static void test_hello_twice(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    uint32_t epoch = r.s->epoch;
    rig_say_epoch(&r, "trainer-0", WIRE_HELLO, 0, rig_hello(&r, "trainer", 0, 1));
    rig_expect_none(&r, "trainer-0", WIRE_WELCOME); /* one answer is enough for what queued up */
    rig_wait(&r, RIG_BEAT);
    rig_say_epoch(&r, "trainer-0", WIRE_HELLO, 0, rig_hello(&r, "trainer", 0, 1));
    rig_expect(&r, "trainer-0", WIRE_WELCOME); /* but it was lost, perhaps */
    assert_int_equal(r.s->epoch, epoch);
    assert_int_equal(r.s->members.count, 1);
    rig_train(&r, 1, 2);
    rig_wait(&r, RIG_BEAT);
    rig_say(&r, "trainer-0", WIRE_HELLO, rig_hello(&r, "trainer", 0, 1));
    rig_expect(&r, "trainer-0", WIRE_WELCOME); /* it is at work, and only heard nothing of us */
    assert_int_equal(r.s->epoch, epoch);
    rig_train(&r, 1, 3);
    rig_say_epoch(&r, "trainer-0", WIRE_HELLO, 0, rig_hello(&r, "trainer", 0, 1));
    json_t *w = rig_take(&r, "trainer-0", WIRE_WELCOME); /* it began anew: so does the epoch */
    assert_int_equal(json_step(w), 0);
    assert_int_equal(r.s->epoch, epoch + 1);
    rig_close(&r);
}

static void test_worlds_do_not_mix(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_say_epoch(&r, "trainer-0", WIRE_HELLO, 0, rig_hello(&r, "trainer", 0, 2));
    rig_expect(&r, "trainer-0", WIRE_WELCOME);
    rig_say_epoch(&r, "other", WIRE_HELLO, 0, rig_hello(&r, "trainer", 1, 3));
    rig_expect(&r, "other", WIRE_REFUSE);
    rig_close(&r);
}

/* -- grants -- */

static void test_barrier(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    rig_ready(&r, 0, 0);
    rig_ready(&r, 0, 1);
    rig_expect_none(&r, "trainer-0", WIRE_GRANT);
    rig_ready(&r, 1, 1); /* not what is needed first */
    rig_expect_none(&r, "trainer-0", WIRE_GRANT);
    rig_ready(&r, 1, 0);
    for (int rank = 0; rank < 2; rank++)
        for (int64_t step = 0; step < 2; step++)
            assert_int_equal(
                json_step(rig_take(&r, rank ? "trainer-1" : "trainer-0", WIRE_GRANT)), step);
    rig_close(&r);
}

static void test_grant_window(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    for (int64_t step = 0; step < 12; step++) {
        rig_ready(&r, 0, step);
        rig_ready(&r, 1, step);
    }
    for (int64_t step = 0; step < STEPS_AHEAD; step++)
        assert_int_equal(json_step(rig_take(&r, "trainer-0", WIRE_GRANT)), step);
    rig_expect_none(&r, "trainer-0", WIRE_GRANT);
    rig_step(&r, 0, 2, 0);
    rig_expect_none(&r, "trainer-0", WIRE_GRANT); /* one rank's report is not enough */
    rig_step(&r, 1, 2, 0);
    assert_int_equal(json_step(rig_take(&r, "trainer-0", WIRE_GRANT)), STEPS_AHEAD);
    rig_expect_none(&r, "trainer-0", WIRE_GRANT);
    rig_close(&r);
}

static void test_duplicates(void **state)
{
    (void)state;
    struct rig r;
    char want[SHA256_HEX];
    undisturbed_chain(1, 6, want);
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    for (int64_t step = 0; step < 6; step++) {
        for (int twice = 0; twice < 2; twice++)
            rig_ready(&r, 0, step);
        assert_int_equal(json_step(rig_take(&r, "trainer-0", WIRE_GRANT)), step);
        rig_expect_none(&r, "trainer-0", WIRE_GRANT);
        for (int twice = 0; twice < 2; twice++)
            rig_step(&r, 0, 1, step);
        if (step > 0)
            rig_step(&r, 0, 1, step - 1);
        if (step + 1 == 4)
            for (int twice = 0; twice < 2; twice++)
                rig_saved(&r, 0, 1, 4);
    }
    assert_int_equal(r.s->steps.cursor.step, 6);
    assert_string_equal(r.s->steps.cursor.chain, want);
    assert_int_equal(r.s->commits.last, 4);
    rig_close(&r);
}

static void test_digest_mismatch(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value, *says;
    } cases[] = {
        {"ids", "1234", "step 2, rank 1: sample digest"},
        {"rows", NULL, "step 2, rank 1: trained 3 rows, the plan says 4"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct rig r;
        rig_open(&r, NO_EVAL);
        rig_join(&r, 2);
        rig_train(&r, 2, 2);
        rig_ready(&r, 0, 2);
        rig_ready(&r, 1, 2);
        rig_step(&r, 0, 2, 2);
        json_t *bad = rig_step_body(&r, 1, 2, 2);
        json_object_set_new(
            bad, cases[i].key, cases[i].value ? json_string(cases[i].value) : json_integer(3));
        rig_say(&r, "trainer-1", WIRE_STEP, bad);
        expect_state(&r, RUN_FAILED, EXIT_STAY_DOWN, cases[i].says);
        rig_expect(&r, "trainer-0", WIRE_FINISH);
        rig_close(&r);
    }
}

static void test_ungranted_step(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_step(&r, 0, 1, 0);
    assert_int_equal(r.s->steps.cursor.step, 0);
    expect_warning(&r, "only steps below 0 may run");
    rig_ready(&r, 0, 500);
    expect_warning(&r, "too far ahead");
    rig_train(&r, 1, 2);
    rig_close(&r);
}

/* A report that got lost would leave a hole in the history. */
static void test_missing_report(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    uint32_t epoch = r.s->epoch;
    rig_ready(&r, 0, 0);
    rig_ready(&r, 0, 1);
    rig_step(&r, 0, 1, 1);
    assert_int_equal(r.s->epoch, epoch + 1);
    assert_int_equal(json_step(rig_take(&r, "trainer-0", WIRE_RELOAD)), 0);
    rig_close(&r);
}

static void test_loss_not_finite(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 5);
    rig_ready(&r, 0, 5);
    json_t *bad = rig_step_body(&r, 0, 1, 5);
    json_array_set_new(json_object_get(bad, "losses"), 0, json_null());
    rig_say(&r, "trainer-0", WIRE_STEP, bad);
    expect_state(&r, RUN_FAILED, EXIT_STAY_DOWN, "the loss of step 5 is not finite");
    assert_int_equal(r.s->commits.last, 4);
    rig_close(&r);
}

/* -- deaths -- */

static void test_death_rolls_back(void **state)
{
    (void)state;
    struct rig r;
    char want[SHA256_HEX];
    undisturbed_chain(2, 12, want);
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    rig_train(&r, 2, 6);
    uint32_t old = r.s->epoch;
    for (int i = 0; i < 6; i++) { /* trainer-1 falls silent */
        rig_wait(&r, RIG_BEAT);
        rig_say(&r, "trainer-0", WIRE_HEARTBEAT, json_object());
    }
    assert_int_equal(r.s->epoch, old + 1);
    assert_int_equal(r.s->steps.cursor.step, 4);
    json_t *reload = rig_take(&r, "trainer-0", WIRE_RELOAD);
    assert_string_equal(json_string_value(json_object_get(reload, "checkpoint")), "step-00000004");
    assert_int_equal(json_step(reload), 4);
    rig_expect_none(&r, "trainer-1", WIRE_RELOAD);
    /* A zombie, and the survivor's messages that were on their way. */
    uint64_t dropped = r.s->dropped;
    rig_say_epoch(&r, "trainer-0", WIRE_STEP, old, rig_step_body(&r, 0, 2, 6));
    rig_say_epoch(&r, "trainer-1", WIRE_STEP, old, rig_step_body(&r, 1, 2, 6));
    rig_say_epoch(&r, "trainer-0", WIRE_READY, old, number("step", 4));
    assert_int_equal(r.s->dropped, dropped + 3);
    rig_say_epoch(&r, "trainer-1", WIRE_HELLO, 0, rig_hello(&r, "trainer", 1, 2));
    rig_expect(&r, "trainer-1", WIRE_WELCOME);
    assert_int_equal(r.s->epoch, old + 1); /* the death was counted already */
    rig_train(&r, 2, 12);
    assert_string_equal(r.s->steps.cursor.chain, want);
    expect_state(&r, RUN_FINISHED, 0, "all 12 steps");
    rig_close(&r);
}

static void test_bye_and_replacement(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    rig_train(&r, 2, 3);
    uint32_t epoch = r.s->epoch;
    rig_say(&r, "trainer-1", WIRE_BYE, json_pack("{s:s}", "reason", "leaving"));
    assert_int_equal(r.s->epoch, epoch + 1);
    rig_expect(&r, "trainer-0", WIRE_RELOAD);
    rig_say_epoch(&r, "trainer-1", WIRE_HELLO, 0, rig_hello(&r, "trainer", 1, 2));
    rig_expect(&r, "trainer-1", WIRE_WELCOME);
    rig_train(&r, 2, 2);
    /* Another process for the same rank: the old one is sent away. */
    rig_say_epoch(&r, "newcomer", WIRE_HELLO, 0, rig_hello(&r, "trainer", 1, 2));
    rig_expect(&r, "newcomer", WIRE_WELCOME);
    rig_expect(&r, "trainer-1", WIRE_FINISH);
    rig_expect(&r, "trainer-0", WIRE_RELOAD);
    assert_int_equal(r.s->epoch, epoch + 2);
    assert_int_equal(r.s->members.count, 2);
    scheduler_unreachable(r.s, "newcomer", r.now);
    assert_int_equal(r.s->epoch, epoch + 3);
    rig_close(&r);
}

/* We were away, not they: after a stall of ours nobody is declared dead. */
static void test_our_own_stall(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    uint32_t epoch = r.s->epoch;
    r.now += 30 * RIG_BEAT;
    scheduler_tick(r.s, r.now);
    assert_int_equal(r.s->epoch, epoch);
    assert_int_equal(r.s->members.count, 1);
    rig_wait(&r, 5 * RIG_BEAT);
    assert_int_equal(r.s->members.count, 0);
    rig_close(&r);
}

static void test_world_changes(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    rig_train(&r, 2, 5);
    rig_wait(&r, 5 * RIG_BEAT); /* both gone */
    assert_int_equal(r.s->members.count, 0);
    rig_join(&r, 1);
    assert_int_equal(r.s->steps.world, 1);
    rig_train(&r, 1, 12);
    expect_state(&r, RUN_FINISHED, 0, "all 12 steps");
    rig_close(&r);
}

/* -- commits -- */

static json_t *read_json(const struct rig *r, const char *name)
{
    struct err e = {0};
    struct buf text = BUF_INIT;
    char *path = mem_printf("%s/%s", r->dir, name);
    if (fs_read(path, 1 << 20, &text, &e) < 0)
        fail_msg("%s", e.msg);
    json_t *j = json_loadb(text.data, text.len, 0, NULL);
    assert_non_null(j);
    buf_release(&text);
    free(path);
    return j;
}

static void test_commit(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    struct cursor c;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    rig_train(&r, 2, 4);
    char *dir = mem_printf("%s/checkpoints/step-00000004", r.dir);
    assert_int_equal(checkpoint_verify(dir, 1, NULL, NULL, &e), 0);
    free(dir);
    json_t *j = read_json(&r, "checkpoints/step-00000004/state.json");
    assert_int_equal(json_integer_value(json_object_get(j, "world")), 2);
    assert_int_equal(cursor_from_json(json_object_get(j, "cursor"), &r.run.plan, &c, &e), 0);
    assert_int_equal(c.step, 4);
    assert_string_equal(c.chain, r.s->steps.cursor.chain);
    json_decref(j);
    json_decref(read_json(&r, "checkpoints/step-00000004/config.json"));
    json_decref(read_json(&r, "checkpoints/step-00000004/tokenizer.json"));
    j = journal_commit(r.s->journal, 4, &e);
    assert_string_equal(
        json_string_value(json_object_get(j, "manifest_sha256")), r.s->commits.manifest_sha256);
    json_decref(j);
    rig_train(&r, 2, 11);
    int64_t *steps;
    assert_int_equal(checkpoint_list(r.s->commits.root, &steps, &e), 2);
    free(steps);
    rig_close(&r);
}

/* SAVED may arrive before another rank's STEP; the commit waits for both. */
static void test_commit_waits_for_all(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    rig_train(&r, 2, 3);
    rig_ready(&r, 0, 3);
    rig_ready(&r, 1, 3);
    rig_step(&r, 0, 2, 3);
    rig_saved(&r, 0, 2, 4);
    rig_saved(&r, 0, 2, 4); /* said twice, counted once */
    assert_int_equal(r.s->commits.last, 0);
    rig_step(&r, 1, 2, 3);
    assert_int_equal(r.s->commits.last, 0);
    rig_saved(&r, 1, 2, 4);
    assert_int_equal(r.s->commits.last, 4);
    rig_close(&r);
}

/* What was saved before a rollback is no part of the checkpoint that comes after it. */
static void test_rollback_forgets_saves(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 2);
    rig_train(&r, 2, 3);
    rig_ready(&r, 0, 3);
    rig_ready(&r, 1, 3);
    rig_step(&r, 0, 2, 3);
    rig_step(&r, 1, 2, 3);
    rig_saved(&r, 0, 2, 4);
    scheduler_unreachable(r.s, "trainer-1", r.now);
    rig_say_epoch(&r, "trainer-1", WIRE_HELLO, 0, rig_hello(&r, "trainer", 1, 2));
    while (r.count)
        json_decref(r.got[--r.count].body);
    rig_train(&r, 2, 3);
    rig_ready(&r, 0, 3);
    rig_ready(&r, 1, 3);
    rig_step(&r, 0, 2, 3);
    rig_step(&r, 1, 2, 3);
    rig_saved(&r, 1, 2, 4);
    assert_int_equal(r.s->commits.last, 0);
    rig_saved(&r, 0, 2, 4);
    assert_int_equal(r.s->commits.last, 4);
    rig_close(&r);
}

static void failed_save(struct rig *r, int64_t step)
{
    rig_say(r, "trainer-0", WIRE_SAVED,
        json_pack("{s:I, s:s}", "step", (json_int_t)step, "error", "No space left on device"));
}

static void test_checkpoint_fails(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    for (int64_t step = 0; step < 12; step++) {
        rig_ready(&r, 0, step);
        rig_expect(&r, "trainer-0", WIRE_GRANT);
        rig_step(&r, 0, 1, step);
        if (step + 1 == 4)
            failed_save(&r, 4);
        if (step + 1 == 8)
            rig_saved(&r, 0, 1, 8);
    }
    expect_warning(&r, "step 4 failed: rank 0: No space left on device; training goes on");
    assert_int_equal(r.s->commits.last, 8);
    failed_save(&r, 12);
    rig_expect_none(&r, "trainer-0", WIRE_CHECKPOINT);
    expect_warning(&r, "step 12 failed: rank 0: No space left on device; it is tried again soon");
    for (int i = 0; i < 3; i++) {
        rig_wait(&r, RIG_BEAT);
        rig_say(&r, "trainer-0", WIRE_HEARTBEAT, json_object());
    }
    assert_int_equal(json_step(rig_take(&r, "trainer-0", WIRE_CHECKPOINT)), 12);
    rig_saved(&r, 0, 1, 12);
    expect_state(&r, RUN_FINISHED, 0, "all 12 steps");
    rig_close(&r);
}

static void test_last_checkpoint_fails_for_good(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 11);
    rig_ready(&r, 0, 11);
    rig_expect(&r, "trainer-0", WIRE_GRANT);
    rig_step(&r, 0, 1, 11);
    failed_save(&r, 12);
    for (int i = 0; i < 12 && !scheduler_done(r.s); i++) {
        rig_wait(&r, RIG_BEAT);
        rig_say(&r, "trainer-0", WIRE_HEARTBEAT, json_object());
        json_t *again = rig_take(&r, "trainer-0", WIRE_CHECKPOINT);
        if (again)
            failed_save(&r, json_step(again));
    }
    expect_state(&r, RUN_FAILED, EXIT_STAY_DOWN, "failed 3 times: rank 0: No space left");
    assert_int_equal(r.s->commits.last, 8);
    rig_close(&r);
}

/* A file that is not what SAVED said: no commit, the run goes on. */
static void test_saved_lies(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 3);
    rig_ready(&r, 0, 3);
    rig_step(&r, 0, 1, 3);
    rig_say(&r, "trainer-0", WIRE_SAVED,
        json_pack("{s:i, s:[{s:s, s:i, s:s}], s:f, s:f}", "step", 4, "files", "name",
            "model.safetensors", "bytes", 7, "sha256",
            "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", "stall_seconds",
            0.0, "write_seconds", 0.0));
    assert_int_equal(r.s->commits.last, 0);
    expect_warning(&r, "step 4 failed");
    rig_close(&r);
}

/* -- stopping, restarting -- */

static void test_stop(void **state)
{
    (void)state;
    struct rig r;
    char want[SHA256_HEX];
    undisturbed_chain(1, 12, want);
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 5);
    rig_ready(&r, 0, 5);
    rig_expect(&r, "trainer-0", WIRE_GRANT); /* step 5 is under way */
    rig_say(&r, "operator", WIRE_STOP, json_object());
    assert_int_equal(json_step(rig_take(&r, "operator", WIRE_STOP_ACK)), 6);
    assert_int_equal(json_step(rig_take(&r, "trainer-0", WIRE_CHECKPOINT)), 6);
    rig_ready(&r, 0, 6);
    rig_expect_none(&r, "trainer-0", WIRE_GRANT);
    rig_step(&r, 0, 1, 5);
    rig_saved(&r, 0, 1, 6);
    expect_state(&r, RUN_STOPPED, 0, "stopped by the operator; 6 of 12 steps");
    rig_expect(&r, "trainer-0", WIRE_FINISH);
    rig_restart(&r);
    assert_int_equal(r.s->commits.last, 6);
    rig_join(&r, 1);
    rig_train(&r, 1, 12);
    assert_string_equal(r.s->steps.cursor.chain, want);
    expect_state(&r, RUN_FINISHED, 0, "all 12 steps");
    rig_close(&r);
}

/* The last step that was granted carries the order for a checkpoint already. */
static void test_stop_at_a_checkpoint(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 3);
    rig_ready(&r, 0, 3);
    scheduler_stop(r.s, "SIGTERM", r.now);
    rig_step(&r, 0, 1, 3);
    rig_expect_none(&r, "trainer-0", WIRE_CHECKPOINT);
    rig_saved(&r, 0, 1, 4);
    expect_state(&r, RUN_STOPPED, 0, "4 of 12");
    rig_close(&r);
}

static void test_stop_with_nothing_to_wait_for(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    scheduler_stop(r.s, "SIGTERM", r.now);
    expect_state(&r, RUN_STOPPED, 0, "0 of 12");
    rig_restart(&r);
    rig_join(&r, 1);
    rig_train(&r, 1, 5);
    rig_ready(&r, 0, 5);
    scheduler_stop(r.s, "SIGTERM", r.now);
    assert_false(scheduler_done(r.s));
    scheduler_unreachable(r.s, "trainer-0", r.now); /* dies while we wait for it */
    expect_state(&r, RUN_STOPPED, 0, "4 of 12");
    rig_close(&r);
}

static void test_stop_is_bounded(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 5);
    rig_ready(&r, 0, 5);
    scheduler_stop(r.s, "SIGTERM", r.now);
    for (int i = 0; i < 62 && !scheduler_done(r.s); i++) {
        rig_wait(&r, RIG_BEAT);
        rig_say(&r, "trainer-0", WIRE_HEARTBEAT, json_object());
    }
    expect_state(&r, RUN_FAILED, EXIT_STAY_DOWN, "no checkpoint of step 6");
    rig_close(&r);
}

/* Killed at every step, again and again: the committed history is that of an undisturbed run. */
static void test_killed_at_every_step(void **state)
{
    (void)state;
    struct rig r;
    char want[SHA256_HEX];
    undisturbed_chain(2, 12, want);
    rig_open(&r, NO_EVAL);
    uint32_t epoch = r.s->epoch;
    for (int64_t until = 1; until <= 12; until++) {
        rig_join(&r, 2);
        rig_train(&r, 2, until);
        if (until % 4 == 2) { /* a checkpoint that is half written */
            char *half = mem_printf("%s/checkpoints/step-00000012.tmp", r.dir);
            assert_int_equal(mkdir(half, 0755), 0);
            free(half);
        }
        if (until < 12) {
            rig_restart(&r);
            assert_int_equal(r.s->commits.last, until / 4 * 4);
            assert_int_equal(r.s->epoch, ++epoch);
        }
    }
    assert_string_equal(r.s->commits.cursor.chain, want);
    expect_state(&r, RUN_FINISHED, 0, "all 12 steps");
    json_decref(read_json(&r, "summary.json"));
    rig_restart(&r);
    expect_state(&r, RUN_FINISHED, 0, "finished before: 12 steps");
    assert_int_equal(r.s->epoch, epoch);
    rig_close(&r);
}

static void test_damaged_checkpoint(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    char want[SHA256_HEX];
    undisturbed_chain(1, 12, want);
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 9);
    char *path =
        mem_printf("%s/checkpoints/step-00000008/optimizer-00000-of-00001.safetensors", r.dir);
    assert_int_equal(fs_write_atomic(path, "something else!!", 16, &e), 0);
    free(path);
    rig_restart(&r);
    assert_int_equal(r.s->commits.last, 4);
    expect_warning(&r, "step-00000008: ");
    json_t *gone = journal_commit(r.s->journal, 8, &e);
    assert_null(gone);
    rig_join(&r, 1);
    rig_train(&r, 1, 12);
    assert_string_equal(r.s->steps.cursor.chain, want);
    expect_state(&r, RUN_FINISHED, 0, "all 12 steps");
    rig_close(&r);
}

/* Killed between MANIFEST.json and the journal: the journal learns of the commit. */
static void test_journal_behind_the_manifest(void **state)
{
    (void)state;
    struct rig r;
    struct err e = {0};
    rig_open(&r, NO_EVAL);
    rig_join(&r, 1);
    rig_train(&r, 1, 4);
    assert_int_equal(journal_drop_commits_after(r.s->journal, 0, &e), 0);
    rig_restart(&r);
    assert_int_equal(r.s->commits.last, 4);
    json_t *j = journal_commit(r.s->journal, 4, &e);
    assert_non_null(j);
    json_decref(j);
    rig_close(&r);
}

/* -- what comes from outside -- */

static void test_status(void **state)
{
    (void)state;
    static const char *const keys[] = {"name", "state", "step", "steps", "tokens",
        "tokens_per_second", "eta_seconds", "passes", "losses", "lr", "grad_norm", "pass_losses",
        "run_epoch", "world", "plan_hash", "pid", "members", "last_checkpoint", "checkpoints",
        "evals", "jobs", "warnings", "events"};
    struct rig r;
    rig_open(&r, NO_EVAL);
    json_t *j = status_json(r.s, r.now);
    assert_true(json_is_null(json_object_get(j, "losses")));
    json_decref(j);
    rig_join(&r, 1);
    for (int64_t until = 1; until <= 6; until++) {
        rig_train(&r, 1, until);
        rig_wait(&r, 500);
    }
    rig_say(&r, "operator", WIRE_STATUS_GET, json_object());
    j = rig_take(&r, "operator", WIRE_STATUS);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!json_object_get(j, keys[i]))
            fail_msg("no %s", keys[i]);
    assert_string_equal(json_string_value(json_object_get(j, "state")), "training");
    assert_string_equal(json_string_value(json_object_get(j, "name")), "rig");
    assert_string_equal(json_string_value(json_object_get(j, "last_checkpoint")), "step-00000004");
    assert_int_equal(json_integer_value(json_object_get(j, "tokens")), 6 * 8 * 16);
    double rate = json_number_value(json_object_get(j, "tokens_per_second"));
    assert_true(rate > 255 && rate < 257); /* a step of 128 tokens in half a second */
    json_decref(j);
    rig_close(&r);
}

/* A value that takes a field's place, chosen by a number. */
static json_t *odd_value(uint64_t n)
{
    switch (n % 9) {
    case 0:
        return json_null();
    case 1:
        return json_integer(-1);
    case 2:
        return json_integer(INT64_MAX);
    case 3:
        return json_real(1e300);
    case 4:
        return json_string("");
    case 5:
        return json_string("\n");
    case 6:
        return json_array();
    case 7:
        return json_pack("[{}, [], null]");
    default:
        return json_object();
    }
}

/* Messages with fields replaced or missing, of every type: dropped or refused, never a crash, and
 * the run goes on. */
static void test_malformed(void **state)
{
    (void)state;
    static const int types[] = {WIRE_HELLO, WIRE_READY, WIRE_STEP, WIRE_SAVED, WIRE_JOB_GET,
        WIRE_RESULT, WIRE_STATUS_GET, WIRE_HEARTBEAT, WIRE_GRANT, WIRE_BATCH};
    struct rig r;
    rig_open(&r, NO_EVAL);
    for (uint64_t i = 0; i < 2000; i++) {
        if (!members_by_peer(&r.s->members, "trainer-0"))
            rig_join(&r, 1);
        int64_t step = r.s->steps.cursor.step;
        json_t *bodies[] = {rig_hello(&r, "trainer", 0, 1), rig_step_body(&r, 0, 1, step),
            json_pack("{s:i, s:s, s:[{s:s}]}", "step", 4, "id", "x", "files", "name", "a")};
        json_t *j = json_deep_copy(bodies[rng_u64(1, i) % 3]), *value;
        const char *key;
        void *next;
        json_object_foreach_safe(j, next, key, value) switch (
            rng_u64(2, i * 64 + (uint64_t)key[0]) % 4)
        {
        case 0:
            json_object_set_new(j, key, odd_value(rng_u64(3, i)));
            break;
        case 1:
            json_object_del(j, key);
            break;
        default:
            break;
        }
        int type = types[rng_u64(4, i) % (sizeof types / sizeof *types)];
        /* A change in ids or rows is a mismatch, and ends the run as it must: not what is tested.
         */
        if (type == WIRE_STEP)
            json_object_set_new(j, "passes", json_integer(99));
        rig_say(&r, "trainer-0", type, i % 16 ? j : NULL);
        if (i % 16 == 0)
            json_decref(j);
        for (int k = 0; k < 3; k++)
            json_decref(bodies[k]);
    }
    assert_false(scheduler_done(r.s));
    rig_wait(&r, 10 * RIG_BEAT);
    while (r.count)
        json_decref(r.got[--r.count].body);
    rig_join(&r, 1);
    rig_train(&r, 1, 12);
    expect_state(&r, RUN_FINISHED, 0, "all 12 steps");
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_strangers_are_not_heard),
        cmocka_unit_test(test_hello_twice),
        cmocka_unit_test(test_worlds_do_not_mix),
        cmocka_unit_test(test_barrier),
        cmocka_unit_test(test_grant_window),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_digest_mismatch),
        cmocka_unit_test(test_ungranted_step),
        cmocka_unit_test(test_missing_report),
        cmocka_unit_test(test_loss_not_finite),
        cmocka_unit_test(test_death_rolls_back),
        cmocka_unit_test(test_bye_and_replacement),
        cmocka_unit_test(test_our_own_stall),
        cmocka_unit_test(test_world_changes),
        cmocka_unit_test(test_commit),
        cmocka_unit_test(test_commit_waits_for_all),
        cmocka_unit_test(test_rollback_forgets_saves),
        cmocka_unit_test(test_checkpoint_fails),
        cmocka_unit_test(test_last_checkpoint_fails_for_good),
        cmocka_unit_test(test_saved_lies),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_stop_at_a_checkpoint),
        cmocka_unit_test(test_stop_with_nothing_to_wait_for),
        cmocka_unit_test(test_stop_is_bounded),
        cmocka_unit_test(test_killed_at_every_step),
        cmocka_unit_test(test_damaged_checkpoint),
        cmocka_unit_test(test_journal_behind_the_manifest),
        cmocka_unit_test(test_status),
        cmocka_unit_test(test_malformed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
