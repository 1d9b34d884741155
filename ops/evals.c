#include "ops/evals.h"

#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/checkpoint.h"
#include "common/fs.h"

#define MAX_RESULT_BYTES (64u << 20)
#define MAX_DEPTH        8

static void row_clear(struct eval_row *r, int64_t step)
{
    r->step = step;
    r->contraction = NAN;
    for (int k = 0; k <= CONFIG_MAX_PASSES; k++)
        r->pass_nats[k] = r->pass_bits[k] = NAN;
    for (int g = 0; g < REGIME_COUNT; g++)
        r->nats[g] = r->bits[g] = NAN;
}

/* The row of a step, put in its place when it is new. */
static struct eval_row *row_of(struct evals *t, int64_t step)
{
    int i = 0;
    while (i < t->count && t->rows[i].step < step)
        i++;
    if (i < t->count && t->rows[i].step == step)
        return &t->rows[i];
    t->rows = mem_grow_array(t->rows, (size_t)t->count + 1, sizeof *t->rows);
    memmove(t->rows + i + 1, t->rows + i, (size_t)(t->count - i) * sizeof *t->rows);
    t->count++;
    row_clear(&t->rows[i], step);
    return &t->rows[i];
}

static double number(const json_t *j, const char *key)
{
    const json_t *v = json_object_get(j, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static void take_loss(struct eval_row *r, const char *regime, const json_t *result)
{
    const json_t *passes = json_object_get(result, "passes"), *p;
    size_t i;
    for (int g = 0; regime && g < REGIME_COUNT; g++)
        if (strcmp(regime, regime_name(g)) == 0) {
            r->nats[g] = number(result, "nats_per_token");
            r->bits[g] = number(result, "bits_per_byte");
        }
    json_array_foreach (passes, i, p) {
        json_int_t k = json_integer_value(json_object_get(p, "pass"));
        if (k >= 1 && k <= CONFIG_MAX_PASSES) {
            r->pass_nats[k] = number(p, "nats_per_token");
            r->pass_bits[k] = number(p, "bits_per_byte");
        }
    }
}

/* Takes j when it is {suite, step, regime, …} with the numbers in it or under "result". */
static int take_result(struct evals *t, const json_t *j)
{
    const json_t *result = json_object_get(j, "result"), *step = json_object_get(j, "step");
    const char *suite = json_string_value(json_object_get(j, "suite"));
    if (!suite || !json_is_integer(step) || json_integer_value(step) < 0)
        return 0;
    if (!json_is_object(result))
        result = j;
    if (strcmp(suite, suite_name(SUITE_LOSS)) == 0 && json_object_get(result, "nats_per_token"))
        take_loss(row_of(t, json_integer_value(step)),
            json_string_value(json_object_get(j, "regime")), result);
    else if (json_object_get(result, "contraction"))
        row_of(t, json_integer_value(step))->contraction = number(result, "contraction");
    return 1;
}

static void take_any(struct evals *t, const json_t *j, int depth)
{
    const json_t *part;
    const char *key;
    size_t i;
    if (depth == 0 || take_result(t, j))
        return;
    json_array_foreach (j, i, part)
        take_any(t, part, depth - 1);
    if (json_is_object(j)) {
        /* The iterator is not const; nothing is changed. */
        json_t *object = (json_t *)(uintptr_t)j, *value;
        json_object_foreach (object, key, value)
            take_any(t, value, depth - 1);
    }
}

void evals_take(struct evals *t, const json_t *document)
{
    take_any(t, document, MAX_DEPTH);
}

static double changed_at(const char *path)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return 0;
    return (double)st.st_mtim.tv_sec + (double)st.st_mtim.tv_nsec * 1e-9;
}

void evals_read(struct evals *t, const char *dir)
{
    char *pattern = mem_printf("%s/step-*/*.json", dir);
    struct buf text = BUF_INIT;
    glob_t found;
    if (glob(pattern, 0, NULL, &found) == 0) {
        double newest = t->newest;
        for (size_t i = 0; i < found.gl_pathc; i++) {
            double changed = changed_at(found.gl_pathv[i]);
            if (changed < t->newest)
                continue;
            newest = changed > newest ? changed : newest;
            if (fs_read(found.gl_pathv[i], MAX_RESULT_BYTES, &text, NULL) < 0)
                continue;
            json_t *j = json_loadb(text.data, text.len, 0, NULL);
            evals_take(t, j);
            json_decref(j);
        }
        t->newest = newest;
        globfree(&found);
    }
    buf_release(&text);
    free(pattern);
}

void evals_release(struct evals *t)
{
    free(t->rows);
    memset(t, 0, sizeof *t);
}

int eval_row_complete(const struct eval_row *r, const struct config *c)
{
    int complete = 1;
    for (int g = 0; g < REGIME_COUNT && c->eval.suites[SUITE_LOSS]; g++)
        complete &= !c->eval.regimes[g] || !isnan(r->nats[g]);
    return complete && (!c->eval.suites[SUITE_FIXED_POINT] || !isnan(r->contraction));
}

void eval_row_print(const struct eval_row *r, struct buf *out)
{
    const char *between = ":";
    buf_printf(out, "step %lld", (long long)r->step);
    for (int k = 1; k <= CONFIG_MAX_PASSES; k++)
        if (!isnan(r->pass_nats[k])) {
            buf_printf(out, "%s pass %d %.4f", between, k, r->pass_nats[k]);
            between = ",";
        }
    for (int g = 0; g < REGIME_COUNT; g++)
        if (!isnan(r->nats[g])) {
            buf_printf(out, "%s %s %.4f", between, regime_name(g), r->nats[g]);
            between = ",";
        }
    buf_add_str(out, " nats/token");
}

static void cell(struct buf *out, double x)
{
    if (isnan(x))
        buf_printf(out, " %8s", "-");
    else
        buf_printf(out, " %8.4f", x);
}

void evals_print(const struct evals *t, int max_rows, struct buf *out)
{
    int most = 0, first = t->count > max_rows ? t->count - max_rows : 0;
    for (int i = 0; i < t->count; i++)
        for (int k = most + 1; k <= CONFIG_MAX_PASSES; k++)
            most = isnan(t->rows[i].pass_nats[k]) ? most : k;
    if (t->count == 0)
        return;
    buf_printf(out, "%7s", "step");
    for (int k = 1; k <= most; k++)
        buf_printf(out, "   pass %d", k);
    for (int g = 0; g < REGIME_COUNT; g++)
        buf_printf(out, " %8s", regime_name(g));
    buf_printf(out, " %8s %8s\n", "bits/B", "contract");
    for (int i = first; i < t->count; i++) {
        const struct eval_row *r = &t->rows[i];
        buf_printf(out, "%7lld", (long long)r->step);
        for (int k = 1; k <= most; k++)
            cell(out, r->pass_nats[k]);
        for (int g = 0; g < REGIME_COUNT; g++)
            cell(out, r->nats[g]);
        cell(out, r->pass_bits[1]);
        cell(out, r->contraction);
        buf_add_char(out, '\n');
    }
}
