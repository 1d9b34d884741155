#include "scheduler/jobs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/checkpoint.h"
#include "common/config.h"
#include "common/field.h"
#include "common/fs.h"
#include "common/mem.h"

static const char *const state_names[JOB_STATE_COUNT] = {
    [JOB_PENDING] = "pending",
    [JOB_DONE] = "done",
    [JOB_FAILED] = "failed",
    [JOB_DROPPED] = "dropped",
};

static const char *state_name(int state)
{
    return state_names[state];
}

static json_t *job_json(const struct job *job)
{
    return json_pack("{s:s, s:I, s:s, s:s, s:I, s:s, s:s, s:i, s:o}", "id", job->id, "step",
        (json_int_t)job->step, "suite", suite_name(job->suite), "regime", regime_name(job->regime),
        "seed", (json_int_t)job->seed, "manifest_sha256", job->manifest_sha256, "state",
        state_names[job->state], "tries", job->tries, "error",
        job->error ? json_text(job->error) : json_null());
}

static int job_from_json(const json_t *j, struct job *out, struct err *e)
{
    const char *id = "", *sha = "", *suite = "", *regime = "", *state = "";
    int64_t tries = 0, seed = 0;
    int rc = field_text(j, "id", SHA256_HEX - 1, &id, e);
    if (rc == 0)
        rc = field_text(j, "manifest_sha256", SHA256_HEX - 1, &sha, e);
    if (rc == 0)
        rc = field_text(j, "suite", 32, &suite, e);
    if (rc == 0)
        rc = field_text(j, "regime", 32, &regime, e);
    if (rc == 0)
        rc = field_text(j, "state", 32, &state, e);
    if (rc == 0)
        rc = field_int(j, "step", 0, INT64_MAX, &out->step, e);
    if (rc == 0)
        rc = field_int(j, "seed", INT64_MIN, INT64_MAX, &seed, e);
    if (rc == 0)
        rc = field_int(j, "tries", 0, INT32_MAX, &tries, e);
    if (rc < 0)
        return rc;
    out->suite = name_index(suite, suite_name, SUITE_COUNT);
    out->regime = name_index(regime, regime_name, REGIME_COUNT);
    out->state = name_index(state, state_name, JOB_STATE_COUNT);
    if (out->suite < 0 || out->regime < 0 || out->state < 0)
        return err_set(e, ERR_MISMATCH, "%s, %s, %s: not a suite, regime and state known here",
            suite, regime, state);
    out->seed = (uint64_t)seed;
    out->tries = (int)tries;
    const char *error = json_string_value(json_object_get(j, "error"));
    out->error = error ? mem_strdup(error) : NULL;
    snprintf(out->id, sizeof out->id, "%s", id);
    snprintf(out->manifest_sha256, sizeof out->manifest_sha256, "%s", sha);
    return 0;
}

/* Keeps the list ascending by step; equal steps in order of arrival. */
static struct job *insert(struct jobs *q, const struct job *job)
{
    int at = q->count;
    while (at > 0 && q->list[at - 1].step > job->step)
        at--;
    q->list = mem_grow_array(q->list, (size_t)q->count + 1, sizeof *q->list);
    memmove(q->list + at + 1, q->list + at, (size_t)(q->count - at) * sizeof *q->list);
    q->list[at] = *job;
    q->count++;
    return &q->list[at];
}

int jobs_load(struct jobs *q, const struct rundir *run, struct journal *journal, struct err *e)
{
    *q = (struct jobs){.run = run, .journal = journal};
    json_t *all = journal_jobs(journal, e), *j;
    size_t i;
    int rc = all ? 0 : e ? e->code : ERR_IO;
    json_array_foreach (all, i, j) {
        struct job job = {0};
        if (rc == 0 && (rc = job_from_json(j, &job, e)) < 0)
            err_prefix(e, "journal: jobs");
        if (rc == 0)
            insert(q, &job);
    }
    json_decref(all);
    if (rc < 0)
        jobs_release(q);
    return rc;
}

void jobs_release(struct jobs *q)
{
    for (int i = 0; i < q->count; i++)
        free(q->list[i].error);
    free(q->list);
    q->list = NULL;
    q->count = 0;
}

static struct job *by_id(struct jobs *q, const char *id)
{
    for (int i = 0; i < q->count; i++)
        if (strcmp(q->list[i].id, id) == 0)
            return &q->list[i];
    return NULL;
}

/* -- which jobs there are -- */

static void make_id(struct job *job)
{
    char *text = mem_printf("%s\n%s\n%s\n%llu\n", job->manifest_sha256, suite_name(job->suite),
        regime_name(job->regime), (unsigned long long)job->seed);
    hash_sha256_hex(text, strlen(text), job->id);
    free(text);
}

static int add_one(
    struct jobs *q, int64_t step, const char *sha, int suite, int regime, struct err *e)
{
    struct job job = {.step = step,
        .suite = suite,
        .regime = regime,
        .seed = q->run->plan.c.train.seed & INT64_MAX}; /* what a JSON integer holds */
    snprintf(job.manifest_sha256, sizeof job.manifest_sha256, "%s", sha);
    make_id(&job);
    struct job *known = by_id(q, job.id);
    if (known && known->state != JOB_DROPPED)
        return 0;
    /* A job that was dropped with its checkpoint comes back with it. */
    int rc = known ? journal_put_job(q->journal, job.id, job_json(&job), e)
                   : journal_put_job_if_absent(q->journal, job.id, job_json(&job), e);
    if (rc < 0)
        return rc;
    if (known)
        known->state = JOB_PENDING, known->tries = 0;
    else
        insert(q, &job);
    return 1;
}

int jobs_add_for(struct jobs *q, int64_t step, const char *sha, struct err *e)
{
    const struct config *c = &q->run->config; /* what of it is the plan's is the same there */
    int added = 0;
    if (c->eval.every_steps <= 0 || step == 0 ||
        (step % c->eval.every_steps != 0 && step != c->train.steps))
        return 0;
    for (int suite = 0; suite < SUITE_COUNT; suite++)
        for (int regime = 0; regime < REGIME_COUNT; regime++) {
            /* The fixed point is a matter of passes, not of regimes: one job. */
            int wanted =
                suite == SUITE_FIXED_POINT ? regime == REGIME_FUSED : c->eval.regimes[regime];
            int possible = c->model.feedback || (suite == SUITE_LOSS && regime == REGIME_STANDARD);
            if (!c->eval.suites[suite] || !wanted || !possible)
                continue;
            int rc = add_one(q, step, sha, suite, regime, e);
            if (rc < 0)
                return rc;
            added += rc;
        }
    return added;
}

static int set_state(struct jobs *q, struct job *job, int state, struct err *e)
{
    job->state = state;
    job->holder[0] = 0;
    return journal_put_job(q->journal, job->id, job_json(job), e);
}

int jobs_drop_after(struct jobs *q, int64_t step, struct err *e)
{
    int rc = 0;
    for (int i = 0; rc == 0 && i < q->count; i++)
        if (q->list[i].step > step && q->list[i].state == JOB_PENDING)
            rc = set_state(q, &q->list[i], JOB_DROPPED, e);
    return rc;
}

int jobs_drop_without(struct jobs *q, const int64_t *steps, int count, struct err *e)
{
    int rc = 0, k = 0;
    for (int i = 0; rc == 0 && i < q->count; i++) {
        while (k < count && steps[k] < q->list[i].step)
            k++;
        int there = k < count && steps[k] == q->list[i].step;
        if (!there && q->list[i].state == JOB_PENDING)
            rc = set_state(q, &q->list[i], JOB_DROPPED, e);
    }
    return rc;
}

/* -- leases -- */

struct job *jobs_lease(struct jobs *q, const char *peer)
{
    struct job *next = NULL;
    for (int i = 0; i < q->count; i++) {
        struct job *job = &q->list[i];
        if (job->state != JOB_PENDING)
            continue;
        if (strcmp(job->holder, peer) == 0)
            return job;
        if (!job->holder[0] && !next)
            next = job;
    }
    if (next)
        snprintf(next->holder, sizeof next->holder, "%s", peer);
    return next;
}

json_t *job_message(const struct jobs *q, const struct job *job)
{
    if (!job)
        return json_pack("{s:n}", "id");
    char name[32];
    checkpoint_name(job->step, name);
    char *dir = rundir_path(q->run, "checkpoints/%s", name);
    json_t *j = json_pack("{s:s, s:s, s:I, s:s, s:s, s:I}", "id", job->id, "checkpoint", dir,
        "step", (json_int_t)job->step, "suite", suite_name(job->suite), "regime",
        regime_name(job->regime), "seed", (json_int_t)job->seed);
    free(dir);
    return j;
}

static int try_failed(struct jobs *q, struct job *job, const char *error, struct err *e)
{
    free(job->error);
    job->error = mem_strdup(error);
    job->tries++;
    return set_state(q, job, job->tries >= JOB_MAX_TRIES ? JOB_FAILED : JOB_PENDING, e);
}

int jobs_return(struct jobs *q, const char *peer, struct err *e)
{
    int held = 0;
    for (int i = 0; i < q->count; i++)
        if (q->list[i].state == JOB_PENDING && strcmp(q->list[i].holder, peer) == 0) {
            int rc = try_failed(q, &q->list[i], "the evaluator left before it had a result", e);
            if (rc < 0)
                return rc;
            held = 1;
        }
    return held;
}

/* -- results -- */

static json_t *table_entry(const struct jobs *q, const struct job *job)
{
    json_t *j = json_pack("{s:s, s:I, s:s, s:s, s:I, s:s}", "id", job->id, "step",
        (json_int_t)job->step, "suite", suite_name(job->suite), "regime", regime_name(job->regime),
        "seed", (json_int_t)job->seed, "manifest_sha256", job->manifest_sha256);
    json_t *result = job->state == JOB_DONE ? journal_result(q->journal, job->id, NULL) : NULL;
    if (result)
        json_object_set_new(j, "result", result);
    else
        json_object_set_new(j, "error", json_text(job->error ? job->error : "no result"));
    return j;
}

/* evals/step-00000100/summary.json: {"loss.soft": {…}, …} of all that is known of the step. */
static int write_summary(const struct jobs *q, int64_t step, struct err *e)
{
    char name[32];
    json_t *all = json_object();
    for (int i = 0; i < q->count; i++) {
        const struct job *job = &q->list[i];
        if (job->step != step || (job->state != JOB_DONE && job->state != JOB_FAILED))
            continue;
        char *key = mem_printf("%s.%s", suite_name(job->suite), regime_name(job->regime));
        json_object_set_new(all, key, table_entry(q, job));
        free(key);
    }
    checkpoint_name(step, name);
    char *dir = rundir_path(q->run, "evals/%s", name), *path = mem_printf("%s/summary.json", dir);
    char *text = json_dumps(all, JSON_INDENT(1) | JSON_SORT_KEYS);
    int rc = text ? fs_mkdir_p(dir, 0755, e) : err_set(e, ERR_INPUT, "%s: not JSON", path);
    if (rc == 0)
        rc = fs_write_atomic(path, text, strlen(text), e);
    free(text);
    free(path);
    free(dir);
    json_decref(all);
    return rc;
}

int jobs_result(struct jobs *q, const char *id, json_t *result, struct err *summary, struct err *e)
{
    struct job *job = by_id(q, id);
    if (!job)
        return err_set(e, ERR_INPUT, "id: no job \"%.64s\"", id);
    if (job->state == JOB_DONE)
        return 0;
    job->state = JOB_DONE;
    job->holder[0] = 0;
    int rc = journal_put_result_if_absent(q->journal, id, json_incref(result), job_json(job), e);
    if (rc < 0) {
        job->state = JOB_PENDING;
        return rc;
    }
    write_summary(q, job->step, summary);
    return rc;
}

int jobs_error(struct jobs *q, const char *id, const char *error, struct err *e)
{
    struct job *job = by_id(q, id);
    if (!job)
        return err_set(e, ERR_INPUT, "id: no job \"%.64s\"", id);
    if (job->state != JOB_PENDING)
        return 0;
    int rc = try_failed(q, job, error, e);
    if (rc == 0 && job->state == JOB_FAILED)
        rc = write_summary(q, job->step, e);
    return rc;
}

int jobs_pending(const struct jobs *q)
{
    int n = 0;
    for (int i = 0; i < q->count; i++)
        n += q->list[i].state == JOB_PENDING;
    return n;
}

int jobs_leased(const struct jobs *q)
{
    int n = 0;
    for (int i = 0; i < q->count; i++)
        n += q->list[i].state == JOB_PENDING && q->list[i].holder[0];
    return n;
}

int jobs_steps(const struct jobs *q, int64_t **steps)
{
    int n = 0;
    *steps = NULL;
    for (int i = 0; i < q->count; i++) {
        if (q->list[i].state != JOB_PENDING || (n && (*steps)[n - 1] == q->list[i].step))
            continue;
        *steps = mem_grow_array(*steps, (size_t)n + 1, sizeof **steps);
        (*steps)[n++] = q->list[i].step;
    }
    return n;
}

json_t *jobs_table(const struct jobs *q)
{
    json_t *all = json_array();
    for (int i = 0; i < q->count; i++)
        if (q->list[i].state == JOB_DONE || q->list[i].state == JOB_FAILED)
            json_array_append_new(all, table_entry(q, &q->list[i]));
    return all;
}
