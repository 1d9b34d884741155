#include "scheduler/steps.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/field.h"
#include "common/rng.h"

void steps_init(struct steps *s, const struct plan *p, int64_t save_every)
{
    memset(s, 0, sizeof *s);
    s->plan = p;
    s->save_every = save_every;
    s->limit = p->c.train.steps;
    cursor_start(&s->cursor, p);
}

void steps_release(struct steps *s)
{
    free(s->ready);
    free(s->next);
    memset(s, 0, sizeof *s);
}

void steps_reset(struct steps *s, const struct cursor *cursor, int world)
{
    size_t ranks = world > 0 ? (size_t)world : 1;
    free(s->ready);
    free(s->next);
    s->cursor = *cursor;
    s->granted = cursor->step;
    s->world = world;
    s->ready = mem_array(ranks, STEPS_WINDOW);
    s->next = mem_array(ranks, sizeof *s->next);
    for (size_t r = 0; r < ranks; r++)
        s->next[r] = cursor->step;
    memset(s->slots, 0, sizeof s->slots);
}

/* -- READY and grants -- */

static uint8_t *ready_flag(struct steps *s, int rank, int64_t step)
{
    return &s->ready[(size_t)rank * STEPS_WINDOW + (size_t)(step % STEPS_WINDOW)];
}

int steps_ready(struct steps *s, int rank, int64_t step, struct err *e)
{
    CHECK(rank >= 0 && rank < s->world);
    if (step >= s->plan->c.train.steps || step >= s->granted + STEPS_WINDOW)
        return err_set(e, ERR_INPUT, "step: %lld is too far ahead, the next to start is %lld",
            (long long)step, (long long)s->granted);
    if (step >= s->granted)
        *ready_flag(s, rank, step) = 1;
    return 0;
}

int steps_grant(struct steps *s, int64_t *step)
{
    int64_t next = s->granted;
    if (s->world == 0 || next >= s->limit || next >= s->cursor.step + STEPS_AHEAD)
        return 0;
    for (int r = 0; r < s->world; r++)
        if (!*ready_flag(s, r, next))
            return 0;
    for (int r = 0; r < s->world; r++)
        *ready_flag(s, r, next) = 0; /* the slot belongs to step next + STEPS_WINDOW now */
    memset(&s->slots[next % STEPS_WINDOW], 0, sizeof *s->slots);
    s->granted++;
    *step = next;
    return 1;
}

int steps_checkpoint_after(const struct steps *s, int64_t step)
{
    int64_t done = step + 1;
    return done == s->plan->c.train.steps || (s->save_every > 0 && done % s->save_every == 0);
}

/* -- STEP -- */

static int parse_losses(const json_t *j, struct step_report *out, struct err *e)
{
    const json_t *list = json_object_get(j, "losses");
    if (json_array_size(list) != (size_t)out->passes)
        return err_set(e, ERR_INPUT, "losses: %d numbers expected", out->passes);
    for (int k = 0; k < out->passes; k++) {
        const json_t *v = json_array_get(list, (size_t)k);
        if (!json_is_number(v) && !json_is_null(v))
            return err_set(e, ERR_INPUT, "losses[%d]: a number or null expected", k);
        out->losses[k] = json_is_null(v) ? NAN : json_number_value(v);
    }
    return 0;
}

int step_report_parse(const json_t *j, const struct plan *p, struct step_report *out, struct err *e)
{
    int64_t passes = 0;
    memset(out, 0, sizeof *out);
    int rc = field_int(j, "step", 0, p->c.train.steps - 1, &out->step, e);
    if (rc == 0)
        rc = field_int(j, "passes", 1, CONFIG_MAX_PASSES, &passes, e);
    out->passes = (int)passes;
    if (rc == 0 && passes != plan_passes(p, out->step))
        rc = err_set(e, ERR_INPUT, "passes: %lld, the plan says %d for step %lld",
            (long long)passes, plan_passes(p, out->step), (long long)out->step);
    if (rc == 0)
        rc = parse_losses(j, out, e);
    const struct {
        const char *key;
        double *value;
        int (*read)(const json_t *, const char *, double *, struct err *);
    } reals[] = {
        {"total", &out->total, field_real},
        {"grad_norm", &out->grad_norm, field_real},
        {"lr", &out->lr, field_amount},
        {"seconds", &out->seconds, field_amount},
        {"wait_seconds", &out->wait_seconds, field_amount},
    };
    for (size_t i = 0; rc == 0 && i < sizeof reals / sizeof *reals; i++)
        rc = reals[i].read(j, reals[i].key, reals[i].value, e);
    if (rc == 0)
        rc = field_int(j, "tokens", 0, INT64_MAX, &out->tokens, e);
    if (rc == 0)
        rc = field_int(j, "rows", 0, p->c.train.batch_rows, &out->rows, e);
    if (rc == 0)
        rc = field_hex(j, "ids", &out->digest.ids, e);
    if (rc == 0)
        rc = field_hex(j, "content", &out->digest.content, e);
    out->skipped = json_is_true(json_object_get(j, "skipped"));
    return rc;
}

/* The plan's ids digest of the rows that are `rank`'s in a step. */
static uint64_t rank_ids(const struct steps *s, int rank, int64_t step, int64_t *rows)
{
    const struct plan *p = s->plan;
    uint64_t batch = (uint64_t)p->c.train.batch_rows, micro = (uint64_t)p->c.train.micro_rows;
    uint64_t first = (uint64_t)step * batch, sum = 0;
    *rows = 0;
    for (uint64_t i = 0; i < batch; i++)
        if (i / micro % (uint64_t)s->world == (uint64_t)rank) {
            sum += rng_mix(plan_train_sample(p, first + i).id);
            ++*rows;
        }
    return sum;
}

static int check_digest(const struct steps *s, int rank, const struct step_report *r, struct err *e)
{
    int64_t rows;
    uint64_t ids = rank_ids(s, rank, r->step, &rows);
    if (r->rows != rows)
        return err_set(e, ERR_MISMATCH, "step %lld, rank %d: trained %lld rows, the plan says %lld",
            (long long)r->step, rank, (long long)r->rows, (long long)rows);
    if (r->digest.ids != ids)
        return err_set(e, ERR_MISMATCH,
            "step %lld, rank %d: sample digest %016llx, the plan says %016llx", (long long)r->step,
            rank, (unsigned long long)r->digest.ids, (unsigned long long)ids);
    return 0;
}

/* Losses and norms are of the whole step, the same on every rank; rows and times add up. */
static void add_report(struct step_slot *slot, const struct step_report *r)
{
    struct step_report *sum = &slot->report;
    if (slot->reported++ == 0) {
        *sum = *r;
        return;
    }
    sum->tokens += r->tokens;
    sum->rows += r->rows;
    sum->digest.ids += r->digest.ids;
    sum->digest.content += r->digest.content;
    sum->skipped |= r->skipped;
    sum->seconds = fmax(sum->seconds, r->seconds);
    sum->wait_seconds = fmax(sum->wait_seconds, r->wait_seconds);
    for (int k = 0; k < sum->passes; k++)
        if (isnan(r->losses[k]))
            sum->losses[k] = NAN;
    if (isnan(r->total))
        sum->total = NAN;
}

int steps_report(
    struct steps *s, int rank, const struct step_report *r, struct step_report *done, struct err *e)
{
    CHECK(rank >= 0 && rank < s->world);
    if (r->step >= s->granted)
        return err_set(e, ERR_STATE,
            "step %lld, rank %d: reported, but only steps below %lld may run", (long long)r->step,
            rank, (long long)s->granted);
    if (r->step < s->next[rank])
        return 0; /* said before */
    if (r->step > s->next[rank])
        return err_set(e, ERR_STATE, "step %lld, rank %d: the report of step %lld is missing",
            (long long)r->step, rank, (long long)s->next[rank]);
    int rc = check_digest(s, rank, r, e);
    if (rc < 0)
        return rc;
    struct step_slot *slot = &s->slots[r->step % STEPS_WINDOW];
    add_report(slot, r);
    s->next[rank]++;
    if (slot->reported < s->world)
        return 0;
    /* Ranks report in order, so the step that becomes complete is the cursor's. */
    CHECK(r->step == s->cursor.step);
    *done = slot->report;
    rc = cursor_advance(&s->cursor, s->plan, &done->digest, e);
    return rc < 0 ? rc : 1;
}
