#include "scheduler/status.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/field.h"
#include "scheduler/core.h"

#define EVENTS_SHOWN 32   /* the last of the journal */
#define ETA_SAMPLES  1000 /* of the steps to come, when there are more */

int64_t status_tokens(const struct scheduler *s, int64_t steps_done)
{
    const struct config *c = &s->run->plan.c;
    return steps_done * c->train.batch_rows * c->data.seq_len;
}

json_t *status_pass_losses(const struct scheduler *s)
{
    json_t *list = json_array();
    for (int k = 0; k < CONFIG_MAX_PASSES; k++)
        if (s->progress.pass[k].step >= 0)
            json_array_append_new(list, json_pack("{s:i, s:I, s:o}", "passes", k + 1, "step",
                                            (json_int_t)s->progress.pass[k].step, "loss",
                                            json_real_or_null(s->progress.pass[k].loss)));
    return list;
}

/*
 * Seconds of one pass of one step over the recent steps, and the steps a second. A step of K passes
 * counts as K: that is near enough for an estimate.
 */
static void recent_pace(const struct scheduler *s, double *pass_seconds, double *steps_a_second)
{
    const struct progress *p = &s->progress;
    int n = p->recent_count < RECENT_STEPS ? p->recent_count : RECENT_STEPS;
    int first = p->recent_count - n, passes = 0;
    *pass_seconds = *steps_a_second = NAN;
    if (n < 2)
        return;
    for (int i = first + 1; i < p->recent_count; i++)
        passes += p->recent[i % RECENT_STEPS].passes;
    double seconds = (double)(p->recent[(p->recent_count - 1) % RECENT_STEPS].at_ms -
                              p->recent[first % RECENT_STEPS].at_ms) /
                     1000.0;
    if (seconds <= 0)
        return;
    *pass_seconds = seconds / passes;
    *steps_a_second = (n - 1) / seconds;
}

static double eta_seconds(const struct scheduler *s, double pass_seconds)
{
    const struct plan *p = &s->run->plan;
    int64_t from = s->steps.cursor.step, left = p->c.train.steps - from;
    int64_t stride = left / ETA_SAMPLES + 1, seen = 0, passes = 0;
    for (int64_t i = 0; i < left; i += stride, seen++)
        passes += plan_passes(p, from + i);
    return left <= 0 ? 0 : pass_seconds * (double)passes * (double)left / (double)seen;
}

static json_t *members_json(const struct scheduler *s, int64_t now_ms)
{
    json_t *list = json_array();
    for (int i = 0; i < s->members.count; i++) {
        const struct attendee *a = &s->members.list[i];
        json_array_append_new(
            list, json_pack("{s:s, s:i, s:I, s:s, s:f}", "role", role_name(a->role), "rank",
                      a->rank, "pid", (json_int_t)a->pid, "peer", a->peer, "age_seconds",
                      (double)(now_ms - a->heard_ms) / 1000.0));
    }
    return list;
}

static json_t *checkpoints_json(const struct scheduler *s)
{
    int64_t *steps;
    json_t *list = json_array();
    int n = checkpoint_list(s->commits.root, &steps, NULL);
    for (int i = 0; i < n; i++) {
        char name[32];
        checkpoint_name(steps[i], name);
        json_array_append_new(list, json_string(name));
    }
    free(steps);
    return list;
}

/* The last step's own numbers; null before the first. */
static void add_last_step(const struct scheduler *s, json_t *j)
{
    const struct step_report *r = &s->progress.last;
    int has = s->progress.has_last;
    json_t *losses = has ? json_array() : json_null();
    for (int k = 0; has && k < r->passes; k++)
        json_array_append_new(losses, json_real_or_null(r->losses[k]));
    json_object_set_new(j, "losses", losses);
    json_object_set_new(j, "passes", has ? json_integer(r->passes) : json_null());
    json_object_set_new(j, "lr", has ? json_real_or_null(r->lr) : json_null());
    json_object_set_new(j, "grad_norm", has ? json_real_or_null(r->grad_norm) : json_null());
    json_object_set_new(j, "pass_losses", status_pass_losses(s));
}

static void add_pace(const struct scheduler *s, json_t *j)
{
    double pass_seconds, steps_a_second;
    recent_pace(s, &pass_seconds, &steps_a_second);
    json_object_set_new(
        j, "tokens_per_second", json_real_or_null(steps_a_second * (double)status_tokens(s, 1)));
    json_object_set_new(j, "eta_seconds", json_real_or_null(eta_seconds(s, pass_seconds)));
}

static void add_commits(const struct scheduler *s, json_t *j)
{
    char name[32];
    checkpoint_name(s->commits.last, name);
    json_object_set_new(
        j, "last_checkpoint", s->commits.last > 0 ? json_string(name) : json_null());
    json_object_set_new(j, "last_checkpoint_step", json_integer(s->commits.last));
    json_object_set_new(j, "checkpoints", checkpoints_json(s));
}

json_t *status_json(const struct scheduler *s, int64_t now_ms)
{
    const struct plan *p = &s->run->plan;
    int leased = jobs_leased(&s->jobs);
    json_t *warnings = json_array();
    for (int i = 0; i < s->warning_count; i++)
        json_array_append_new(warnings, json_text(s->warnings[i]));
    json_t *j =
        json_pack("{s:o, s:s, s:o, s:I, s:I, s:I, s:I, s:i, s:s, s:i, s:f, s:o, s:o, s:{s:i, "
                  "s:i}, s:o, s:I}",
            "name", json_text(s->run->config.run.name), "state", run_state_name(s->state), "reason",
            s->reason[0] ? json_text(s->reason) : json_null(), "step",
            (json_int_t)s->steps.cursor.step, "steps", (json_int_t)p->c.train.steps, "tokens",
            (json_int_t)status_tokens(s, s->steps.cursor.step), "run_epoch", (json_int_t)s->epoch,
            "world", s->steps.world, "plan_hash", p->hash, "pid", (int)getpid(), "uptime_seconds",
            (double)(now_ms - s->started_ms) / 1000.0, "members", members_json(s, now_ms), "evals",
            jobs_table(&s->jobs), "jobs", "pending", jobs_pending(&s->jobs) - leased, "leased",
            leased, "warnings", warnings, "dropped", (json_int_t)s->dropped);
    json_t *events = journal_events(s->journal, EVENTS_SHOWN, NULL);
    json_object_set_new(j, "events", events ? events : json_array());
    add_last_step(s, j);
    add_pace(s, j);
    add_commits(s, j);
    return j;
}
