#include "ops/view.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/checkpoint.h"
#include "common/field.h"
#include "common/fs.h"

#define LIVE_EVAL_ROWS 6
#define BAR_MIN        10
#define BAR_MAX        40

void view_start(struct view *v, const struct rundir *run)
{
    memset(v, 0, sizeof *v);
    v->run = run;
    v->checkpoint = -1;
    history_start(&v->history, &run->plan);
}

void view_release(struct view *v)
{
    evals_release(&v->evals);
    json_decref(v->status);
    v->status = NULL;
}

int view_read(struct view *v, struct err *e)
{
    char *metrics = rundir_path(v->run, "metrics.jsonl");
    char *evals = rundir_path(v->run, "evals");
    char *checkpoints = rundir_path(v->run, "checkpoints");
    int64_t *steps = NULL;
    int rc = history_read(&v->history, metrics, e);
    evals_read(&v->evals, evals);
    int n = checkpoint_list(checkpoints, &steps, NULL);
    v->checkpoint = n > 0 ? steps[n - 1] : -1;
    free(steps);
    free(checkpoints);
    free(evals);
    free(metrics);
    return rc;
}

void view_take_status(struct view *v, json_t *j)
{
    json_decref(v->status);
    v->status = j;
    evals_take(&v->evals, j);
}

static int64_t steps_of(const struct view *v)
{
    return v->run->plan.c.train.steps;
}

int view_finished(const struct view *v)
{
    char *path = rundir_path(v->run, "summary.json");
    int finished = fs_exists(path);
    free(path);
    return finished;
}

const char *view_state(const struct view *v)
{
    const char *s = json_string_value(json_object_get(v->status, "state"));
    if (s)
        return s;
    return view_finished(v) ? "finished" : "not running";
}

/* -- pieces -- */

/* 83 → "1:23", 3671 → "1:01:11"; "-" where unknown */
static void print_duration(struct buf *out, double seconds)
{
    if (isnan(seconds) || seconds < 0) {
        buf_add_str(out, "-");
        return;
    }
    int64_t s = (int64_t)(seconds + 0.5);
    if (s >= 3600)
        buf_printf(out, "%" PRId64 ":%02d:%02d", s / 3600, (int)(s / 60 % 60), (int)(s % 60));
    else
        buf_printf(out, "%d:%02d", (int)(s / 60), (int)(s % 60));
}

/* 1234567 → "1,234,567" */
static void print_count(struct buf *out, double x)
{
    char digits[32];
    if (isnan(x)) {
        buf_add_str(out, "-");
        return;
    }
    int n = snprintf(digits, sizeof digits, "%.0f", x);
    for (int i = 0; i < n; i++) {
        buf_add_char(out, digits[i]);
        if (n - 1 - i > 0 && (n - 1 - i) % 3 == 0)
            buf_add_char(out, ',');
    }
}

static void print_losses(const struct view *v, struct buf *out)
{
    for (int k = 1; k <= plan_max_passes(&v->run->plan); k++) {
        double loss = trend_now(&v->history.loss[k]);
        if (isnan(loss))
            buf_printf(out, "%spass %d -", k > 1 ? "  " : "", k);
        else
            buf_printf(out, "%spass %d %.4f", k > 1 ? "  " : "", k, loss);
    }
}

static void print_bar(struct buf *out, double share, int width)
{
    int full = (int)(share * width);
    buf_add_char(out, '[');
    for (int i = 0; i < width; i++)
        buf_add_char(out, i < full ? '#' : '-');
    buf_add_char(out, ']');
}

static double tokens_done(const struct view *v)
{
    const struct config *c = &v->run->plan.c;
    return (double)v->history.step * c->train.batch_rows * c->data.seq_len;
}

static double share_done(const struct view *v)
{
    return (double)v->history.step / (double)steps_of(v);
}

/* "scheduler, loader, trainer 0, evaluator 0 (silent for 4 s)" */
static void print_members(const struct view *v, struct buf *out)
{
    const json_t *members = json_object_get(v->status, "members"), *m;
    size_t i;
    buf_add_str(out, "scheduler");
    json_array_foreach (members, i, m) {
        const char *role = json_string_value(json_object_get(m, "role"));
        double age = json_number_value(json_object_get(m, "age_seconds"));
        buf_printf(out, ", %s", role ? role : "?");
        if (age > 3)
            buf_printf(out, " (silent for %.0f s)", age);
    }
}

static void print_jobs(const struct view *v, struct buf *out)
{
    const json_t *jobs = json_object_get(v->status, "jobs");
    json_int_t leased = json_integer_value(json_object_get(jobs, "leased"));
    json_int_t pending = json_integer_value(json_object_get(jobs, "pending"));
    if (leased + pending > 0)
        buf_printf(out, "   evaluations: %lld running, %lld waiting", (long long)leased,
            (long long)pending);
}

static void print_warning(const struct view *v, struct buf *out)
{
    const json_t *warnings = json_object_get(v->status, "warnings");
    size_t n = json_array_size(warnings);
    const char *last = n ? json_string_value(json_array_get(warnings, n - 1)) : NULL;
    if (last)
        buf_printf(out, "warn   %s\n", last);
}

/* -- texts -- */

void view_print_line(const struct view *v, struct buf *out)
{
    const struct history *h = &v->history;
    buf_printf(out, "%s  step %" PRId64 "/%" PRId64 " (%.0f %%)  ", view_state(v), h->step,
        steps_of(v), 100 * share_done(v));
    print_losses(v, out);
    buf_printf(out, "  lr %.2e  ", h->lr);
    print_count(out, trend_now(&h->rate));
    buf_add_str(out, " tokens/s  ETA ");
    print_duration(out, history_eta(h));
    if (v->checkpoint >= 0)
        buf_printf(out, "  saved %" PRId64, v->checkpoint);
    print_jobs(v, out);
}

void view_print_live(const struct view *v, int width, struct buf *out)
{
    const struct history *h = &v->history;
    int bar = width - 60;
    bar = bar < BAR_MIN ? BAR_MIN : bar > BAR_MAX ? BAR_MAX : bar;
    buf_printf(out, "%s  %s", v->run->config.run.name, view_state(v));
    print_jobs(v, out);
    buf_add_char(out, '\n');
    print_bar(out, share_done(v), bar);
    buf_printf(out, " %5.1f %%  step %" PRId64 "/%" PRId64 "  ", 100 * share_done(v), h->step,
        steps_of(v));
    print_count(out, trend_now(&h->rate));
    buf_add_str(out, " tokens/s  ETA ");
    print_duration(out, history_eta(h));
    buf_add_str(out, "\nloss   ");
    print_losses(v, out);
    buf_printf(out, "   lr %.2e   %d-pass step\n", h->lr, h->passes);
    if (v->checkpoint >= 0)
        buf_printf(out, "saved  step %" PRId64, v->checkpoint);
    else
        buf_add_str(out, "saved  nothing yet");
    if (v->status) {
        buf_add_str(out, "   alive ");
        print_members(v, out);
    }
    buf_add_char(out, '\n');
    print_warning(v, out);
    if (v->evals.count) {
        buf_add_str(out, "validation, nats/token\n");
        evals_print(&v->evals, LIVE_EVAL_ROWS, out);
    }
}

static void print_training(const struct view *v, struct buf *out)
{
    const struct history *h = &v->history;
    buf_printf(out, "steps       %" PRId64 " of %" PRId64 ", ", h->step, steps_of(v));
    print_count(out, tokens_done(v));
    buf_add_str(out, " tokens in ");
    print_duration(out, h->seconds);
    buf_add_str(out, " (");
    print_count(out, h->seconds > 0 ? (double)h->tokens / h->seconds : NAN);
    buf_add_str(out, " tokens/s)\n");
    buf_printf(out, "train loss  %8s  %8s  %8s\n", "first", "last", "steps");
    for (int k = 1; k <= plan_max_passes(&v->run->plan); k++) {
        const struct trend *t = &h->loss[k];
        if (t->count)
            buf_printf(out, "  pass %d    %8.4f  %8.4f  %8" PRId64 "\n", k, t->first, trend_now(t),
                t->count);
        else
            buf_printf(out, "  pass %d    %8s  %8s  %8d\n", k, "-", "-", 0);
    }
}

/* Deeper passes are meant to help: say so where they do not. */
static void print_depth_warning(const struct view *v, struct buf *out)
{
    if (v->evals.count == 0)
        return;
    const struct eval_row *r = &v->evals.rows[v->evals.count - 1];
    if (r->pass_nats[3] > r->pass_nats[2])
        buf_printf(out,
            "note: at step %" PRId64 " validation loss of pass 3 is above that of pass 2\n",
            r->step);
}

void view_print_summary(const struct view *v, struct buf *out)
{
    static const char *const paths[][2] = {{"checkpoints", "checkpoints/"},
        {"evaluations", "evals/"}, {"metrics", "metrics.jsonl"}, {"config", "run.yaml"},
        {"logs", "logs/"}};
    buf_printf(out, "\nrun %s: %s\n", v->run->config.run.name, view_state(v));
    print_training(v, out);
    if (v->evals.count) {
        buf_add_str(out,
            "\nvalidation, nats/token (pass k: all positions, teacher-forced; regimes: "
            "the second half of each row)\n");
        evals_print(&v->evals, 1000, out);
        print_depth_warning(v, out);
    }
    buf_add_char(out, '\n');
    if (v->checkpoint >= 0) {
        char name[32];
        checkpoint_name(v->checkpoint, name);
        buf_printf(out, "%-12s%s/checkpoints/%s\n", "last saved", v->run->path, name);
    }
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        buf_printf(out, "%-12s%s/%s\n", paths[i][0], v->run->path, paths[i][1]);
}

/* -- JSON -- */

static json_t *row_json(const struct eval_row *r)
{
    json_t *j = json_pack("{s:I}", "step", (json_int_t)r->step), *passes = json_array();
    for (int k = 1; k <= CONFIG_MAX_PASSES && !isnan(r->pass_nats[k]); k++)
        json_array_append_new(passes, json_real(r->pass_nats[k]));
    json_object_set_new(j, "pass_nats", passes);
    for (int g = 0; g < REGIME_COUNT; g++)
        json_object_set_new(j, regime_name(g),
            json_pack("{s:o, s:o}", "nats_per_token", json_real_or_null(r->nats[g]),
                "bits_per_byte", json_real_or_null(r->bits[g])));
    json_object_set_new(j, "contraction", json_real_or_null(r->contraction));
    return j;
}

json_t *view_json(const struct view *v)
{
    const struct history *h = &v->history;
    json_t *losses = json_array(), *rows = json_array();
    for (int k = 1; k <= plan_max_passes(&v->run->plan); k++)
        json_array_append_new(losses, json_real_or_null(trend_now(&h->loss[k])));
    for (int i = 0; i < v->evals.count; i++)
        json_array_append_new(rows, row_json(&v->evals.rows[i]));
    json_t *j = json_pack("{s:s, s:s, s:s, s:I, s:I, s:i, s:o, s:o, s:o, s:o, s:I, s:o}", "run",
        v->run->config.run.name, "path", v->run->path, "state", view_state(v), "step",
        (json_int_t)h->step, "steps", (json_int_t)steps_of(v), "passes", h->passes, "losses",
        losses, "lr", json_real_or_null(h->lr), "tokens_per_second",
        json_real_or_null(trend_now(&h->rate)), "eta_seconds", json_real_or_null(history_eta(h)),
        "tokens", (json_int_t)tokens_done(v), "evals", rows);
    json_object_set_new(
        j, "checkpoint", v->checkpoint < 0 ? json_null() : json_integer((json_int_t)v->checkpoint));
    json_object_set(j, "scheduler", v->status ? v->status : json_null());
    return j;
}
