#include "scheduler/training.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/field.h"
#include "scheduler/summary.h"

static int64_t steps_of(const struct scheduler *s)
{
    return s->run->plan.c.train.steps;
}

static int is_training(const struct scheduler *s)
{
    return s->state < RUN_EVALUATING;
}

/* -- run epochs -- */

static void forget_progress(struct scheduler *s)
{
    s->progress.recent_count = 0;
    s->retry_at_ms = 0;
}

void training_join(struct scheduler *s, int world)
{
    if (s->steps.world != world)
        steps_reset(&s->steps, &s->commits.cursor, world);
}

static void finish_stop(struct scheduler *s)
{
    char why[sizeof s->reason];
    memcpy(why, s->reason, sizeof why);
    conclude(s, RUN_STOPPED, 0, "%s; %lld of %lld steps are done and committed", why,
        (long long)s->commits.last, (long long)steps_of(s));
}

/* Everyone goes back to the last commit, under an epoch that makes all that is on its way void. */
static void new_epoch(struct scheduler *s, const char *why)
{
    struct err e = {0};
    int world = members_count(&s->members, ROLE_TRAINER) ? s->steps.world : 0;
    int64_t lost = s->steps.granted - s->commits.last;
    if (journal_next_epoch(s->journal, s->epoch, &s->epoch, &e) < 0) {
        conclude(s, RUN_FAILED, EXIT_RESTART, "the run epoch cannot be recorded: %s", e.msg);
        return;
    }
    commits_forget_all(&s->commits);
    steps_reset(&s->steps, &s->commits.cursor, world);
    forget_progress(s);
    for (int i = 0; i < s->members.count; i++)
        s->members.list[i].active = 0;
    json_t *body = position_json(s);
    json_object_set_new(body, "reason", json_text(why));
    post_all(s, ROLE_TRAINER, WIRE_RELOAD, body);
    json_decref(body);
    say(s, LOG_WARN, "rollback", "%s: run epoch %u begins at step %lld, %lld steps are taken back",
        why, s->epoch, (long long)s->commits.last, (long long)lost);
    s->state = RUN_STARTING;
    if (s->stopping)
        finish_stop(s);
}

void training_lost(struct scheduler *s, const char *why, int64_t now_ms)
{
    (void)now_ms;
    if (is_training(s))
        new_epoch(s, why);
    else if (members_count(&s->members, ROLE_TRAINER) == 0)
        s->steps.world = 0;
}

/* -- grants -- */

static void grant(struct scheduler *s)
{
    int64_t step;
    while (is_training(s) && steps_grant(&s->steps, &step)) {
        int save = steps_checkpoint_after(&s->steps, step);
        if (save)
            commits_expect(&s->commits, step + 1, s->steps.world);
        json_t *body = json_pack("{s:I, s:b}", "step", (json_int_t)step, "checkpoint", save);
        post_all(s, ROLE_TRAINER, WIRE_GRANT, body);
        json_decref(body);
        s->state = s->steps.granted == s->steps.limit ? RUN_SAVING : RUN_TRAINING;
    }
}

void training_ready(struct scheduler *s, int rank, const json_t *body)
{
    struct err e = {0};
    int64_t step;
    if (field_int(body, "step", 0, INT64_MAX, &step, &e) < 0 ||
        steps_ready(&s->steps, rank, step, &e) < 0) {
        complain(s, "READY of rank %d: %s", rank, e.msg);
        return;
    }
    grant(s);
}

/* -- checkpoints -- */

/* The checkpoint that the end of the run, or a stop, waits for. */
static int64_t final_step(const struct scheduler *s)
{
    return s->stopping ? s->steps.limit : steps_of(s);
}

void training_retain(struct scheduler *s)
{
    struct err e = {0};
    int64_t *pinned = NULL, *kept = NULL;
    /* Without an evaluator no job will ever be taken, and none may keep a checkpoint from going. */
    int count = s->run->config.process.evaluators > 0 ? jobs_steps(&s->jobs, &pinned) : 0;
    int rc = commits_retain(&s->commits, pinned, count, &e);
    if (rc == 0) {
        count = checkpoint_list(s->commits.root, &kept, &e);
        rc = count < 0 ? count : jobs_drop_without(&s->jobs, kept, count, &e);
    }
    if (rc < 0)
        say(s, LOG_WARN, "retention", "%s", e.msg);
    free(kept);
    free(pinned);
}

static void after_commit(struct scheduler *s)
{
    struct err e = {0};
    if (jobs_add_for(&s->jobs, s->commits.last, s->commits.manifest_sha256, &e) < 0)
        say(s, LOG_WARN, "journal", "no eval jobs for step %lld: %s", (long long)s->commits.last,
            e.msg);
    training_retain(s);
}

static void checkpoint_failed(
    struct scheduler *s, struct pending *p, const char *why, int64_t now_ms)
{
    int64_t step = p->step;
    int final = step == final_step(s);
    commits_forget(&s->commits, p);
    if (final && s->retries >= s->tuning.retries) {
        conclude(s, RUN_FAILED, EXIT_STAY_DOWN,
            "the checkpoint of step %lld failed %d times: %s; the last good one is of step %lld",
            (long long)step, s->retries + 1, why, (long long)s->commits.last);
        return;
    }
    if (final)
        s->retry_at_ms = now_ms + s->tuning.retry_pause_ms * ++s->retries;
    say(s, LOG_WARN, "checkpoint",
        "the checkpoint of step %lld failed: %s; %s, the last good one "
        "is of step %lld",
        (long long)step, why, final ? "it is tried again soon" : "training goes on",
        (long long)s->commits.last);
}

static void try_commit(struct scheduler *s, int64_t step, int64_t now_ms)
{
    struct err e = {0};
    struct pending *p = commits_find(&s->commits, step);
    if (!p || !pending_complete(p))
        return;
    if (p->error[0]) {
        char why[sizeof p->error];
        memcpy(why, p->error, sizeof why);
        checkpoint_failed(s, p, why, now_ms);
        return;
    }
    if (commits_commit(&s->commits, p, s->epoch, &e) < 0) {
        checkpoint_failed(s, p, e.msg, now_ms);
        return;
    }
    s->retries = 0;
    say(s, LOG_INFO, "commit", "step %lld is committed, digest chain %.16s", (long long)step,
        s->commits.cursor.chain);
    after_commit(s);
    if (s->stopping && step == s->steps.limit) {
        finish_stop(s);
    } else if (step == steps_of(s)) {
        s->state = RUN_EVALUATING;
        s->evaluator_seen_ms = now_ms;
        training_tick(s, now_ms);
    }
}

void training_saved(struct scheduler *s, int rank, const json_t *body, int64_t now_ms)
{
    struct err e = {0};
    struct saved_report r;
    if (saved_parse(body, &s->run->plan, &r, &e) < 0) {
        complain(s, "SAVED of rank %d: %s", rank, e.msg);
        return;
    }
    struct pending *p = commits_find(&s->commits, r.step);
    if (p && commits_saved(p, rank, &r))
        try_commit(s, r.step, now_ms);
    saved_release(&r);
}

/* Asks for a checkpoint behind `step`, which is the last one granted. */
static void ask_checkpoint(struct scheduler *s, int64_t step)
{
    json_t *body = json_pack("{s:I}", "step", (json_int_t)step);
    commits_expect(&s->commits, step, s->steps.world);
    commits_cursor(&s->commits, &s->steps.cursor);
    post_all(s, ROLE_TRAINER, WIRE_CHECKPOINT, body);
    json_decref(body);
}

/* -- finished steps -- */

static json_t *losses_json(const struct step_report *r)
{
    json_t *list = json_array();
    for (int k = 0; k < r->passes; k++)
        json_array_append_new(list, json_real_or_null(r->losses[k]));
    return list;
}

static void write_metrics(struct scheduler *s, const struct step_report *r)
{
    char ids[20], content[20];
    snprintf(ids, sizeof ids, "%016llx", (unsigned long long)r->digest.ids);
    snprintf(content, sizeof content, "%016llx", (unsigned long long)r->digest.content);
    json_t *line = json_pack(
        "{s:s, s:I, s:I, s:i, s:o, s:o, s:o, s:f, s:I, s:I, s:f, s:f, s:b, s:s, "
        "s:s, s:s}",
        "kind", "step", "step", (json_int_t)r->step, "run_epoch", (json_int_t)s->epoch, "passes",
        r->passes, "losses", losses_json(r), "total", json_real_or_null(r->total), "grad_norm",
        json_real_or_null(r->grad_norm), "lr", r->lr, "tokens", (json_int_t)r->tokens, "rows",
        (json_int_t)r->rows, "seconds", r->seconds, "wait_seconds", r->wait_seconds, "skipped",
        r->skipped, "ids", ids, "content", content, "chain", s->steps.cursor.chain);
    record(s, line);
}

static void note_progress(struct scheduler *s, const struct step_report *r, int64_t now_ms)
{
    struct progress *p = &s->progress;
    p->last = *r;
    p->has_last = 1;
    int at = p->recent_count++ % RECENT_STEPS;
    p->recent[at].at_ms = now_ms;
    p->recent[at].step = r->step;
    p->recent[at].passes = r->passes;
    for (int k = 0; k < r->passes; k++) {
        p->pass[k].step = r->step;
        p->pass[k].loss = r->losses[k];
    }
}

static int is_finite_report(const struct step_report *r)
{
    for (int k = 0; k < r->passes; k++)
        if (!isfinite(r->losses[k]))
            return 0;
    return isfinite(r->total);
}

static void step_done(struct scheduler *s, const struct step_report *r, int64_t now_ms)
{
    write_metrics(s, r);
    note_progress(s, r, now_ms);
    if (!is_finite_report(r)) {
        conclude(s, RUN_FAILED, EXIT_STAY_DOWN,
            "the loss of step %lld is not finite; the last good checkpoint is of step %lld",
            (long long)r->step, (long long)s->commits.last);
        return;
    }
    if (r->skipped)
        say(s, LOG_WARN, "skipped update", "step %lld: the gradient was not finite",
            (long long)r->step);
    commits_cursor(&s->commits, &s->steps.cursor);
    try_commit(s, r->step + 1, now_ms);
    grant(s);
}

void training_step(struct scheduler *s, int rank, const json_t *body, int64_t now_ms)
{
    struct err e = {0};
    struct step_report r, done;
    if (step_report_parse(body, &s->run->plan, &r, &e) < 0) {
        complain(s, "STEP of rank %d: %s", rank, e.msg);
        return;
    }
    int granted = r.step < s->steps.granted;
    int rc = steps_report(&s->steps, rank, &r, &done, &e);
    if (rc == 1)
        step_done(s, &done, now_ms);
    else if (rc == ERR_STATE && granted)
        new_epoch(s, e.msg); /* a report was lost: the history would have a hole */
    else if (rc == ERR_STATE)
        complain(s, "STEP: %s", e.msg);
    else if (rc < 0)
        conclude(s, RUN_FAILED, EXIT_STAY_DOWN, "%s; the last good checkpoint is of step %lld",
            e.msg, (long long)s->commits.last);
}

/* -- stopping and finishing -- */

int64_t training_stop_step(const struct scheduler *s)
{
    return is_training(s) ? s->steps.granted : s->commits.last;
}

void training_stop(struct scheduler *s, const char *reason, int64_t now_ms)
{
    if (scheduler_done(s) || s->stopping)
        return;
    int64_t target = training_stop_step(s);
    s->stopping = 1;
    s->stop_deadline_ms = now_ms + s->tuning.stop_wait_ms;
    snprintf(s->reason, sizeof s->reason, "%s", reason);
    say(s, LOG_INFO, "stop", "%s: steps below %lld are finished and committed", reason,
        (long long)target);
    if (!is_training(s) || target == s->commits.last) {
        finish_stop(s);
        return;
    }
    s->steps.limit = target;
    s->state = RUN_SAVING;
    /* Its last step may carry the order for a checkpoint already, or one may be due to be retried.
     */
    if (!commits_find(&s->commits, target) && !s->retry_at_ms)
        ask_checkpoint(s, target);
}

static void retry_if_due(struct scheduler *s, int64_t now_ms)
{
    if (!s->retry_at_ms || now_ms < s->retry_at_ms || !is_training(s))
        return;
    s->retry_at_ms = 0;
    ask_checkpoint(s, final_step(s));
}

static void finish_if_done(struct scheduler *s, int64_t now_ms)
{
    int waiting = jobs_pending(&s->jobs);
    if (s->state != RUN_EVALUATING)
        return;
    if (members_count(&s->members, ROLE_EVALUATOR) > 0)
        s->evaluator_seen_ms = now_ms;
    int wanted = s->run->config.process.evaluators > 0 && waiting > 0;
    if (wanted && now_ms - s->evaluator_seen_ms < s->tuning.evaluator_wait_ms)
        return;
    if (wanted)
        say(s, LOG_WARN, "evaluation",
            "%d eval jobs are left, but there was no evaluator for %lld s", waiting,
            (long long)(s->tuning.evaluator_wait_ms / 1000));
    struct err e = {0};
    if (summary_write(s, &e) < 0)
        say(s, LOG_WARN, "summary", "%s", e.msg);
    conclude(s, RUN_FINISHED, 0, "all %lld steps are done and committed", (long long)steps_of(s));
}

void training_tick(struct scheduler *s, int64_t now_ms)
{
    if (scheduler_done(s))
        return;
    retry_if_due(s, now_ms);
    if (s->stopping && !scheduler_done(s) && now_ms > s->stop_deadline_ms)
        conclude(s, RUN_FAILED, EXIT_STAY_DOWN,
            "stopping: no checkpoint of step %lld within %lld s; the last good one is of step %lld",
            (long long)s->steps.limit, (long long)(s->tuning.stop_wait_ms / 1000),
            (long long)s->commits.last);
    finish_if_done(s, now_ms);
}
