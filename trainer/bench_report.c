#include "trainer/bench_report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "common/config.h"
#include "common/version.h"
#include "trainer/bench_clock.h"
#include "trainer/plan_costs.h"

#define MIB (1024.0 * 1024.0)

static int clean(const struct bench_run *r)
{
    double high = fmax(r->fma_before, r->fma_after);
    return high > 0 && fabs(r->fma_before - r->fma_after) <= BENCH_CLEAN * high;
}

static double tokens(const struct bench_row *row)
{
    return (double)row->config->batch * row->config->seq;
}

static double ceiling_rate(const struct bench_row *row)
{
    return row->ours.ceiling.flops / row->ours.ceiling.seconds;
}

/* Seconds of a step inside products, as measured in it. */
static double product_seconds(const struct bench_row *row)
{
    const struct bench_counts *c = &row->ours.counts;
    double s = 0;
    for (int i = 0; i < c->op_count; i++)
        s += c->ops[i].flops > 0 ? c->ops[i].seconds : 0;
    return s / row->ours.steps.count;
}

/* All operations of the mean step, and the rest that is not in any of them. */
static double mean_step(const struct bench_row *row)
{
    double s = 0;
    for (int i = 0; i < row->ours.counts.op_count; i++)
        s += row->ours.counts.ops[i].seconds;
    return s / row->ours.steps.count;
}

static void print_config(const struct bench_config *b, int64_t params)
{
    printf("\n%s: d %d, %d layers, %d heads, ffn %d, V %d, T %d, B %d; %.1f M parameters\n",
        b->name, b->dim, b->layers, b->heads, b->ffn, b->vocab, b->seq, b->batch,
        (double)params / 1e6);
    printf(
        "  K                tok/s  ms/step  CPU s  GFLOP/s  ceiling  share  in products     MiB");
    printf("   peer tok/s  CPU s     MiB  faster  by CPU  memory\n");
}

static void print_row(const struct bench_row *row)
{
    const struct bench_steps *s = &row->ours.steps, *p = &row->peer;
    double rate = row->ours.flops / s->median;
    printf("  %d %-4s %-7s %7.0f %8.1f %6.3f %8.1f %8.1f %5.0f%% %11.0f%% %8.0f", row->passes.count,
        precision_name((int)row->passes.precision), row->passes.shared ? "shared" : "",
        tokens(row) / s->median, 1e3 * s->median, s->cpu, rate / 1e9, ceiling_rate(row) / 1e9,
        100 * rate / ceiling_rate(row), 100 * product_seconds(row) / mean_step(row),
        (double)s->peak_bytes / MIB);
    if (row->has_peer)
        printf(" %12.0f %6.3f %7.0f %6.2fx %6.2fx %6.2fx", tokens(row) / p->median, p->cpu,
            (double)p->peak_bytes / MIB, p->median / s->median, p->cpu / s->cpu,
            (double)s->peak_bytes / (double)p->peak_bytes);
    printf("\n");
}

static void print_naive(const struct bench_config *b, double rate)
{
    struct model_config c;
    bench_model(b, &c);
    if (rate > 0)
        printf(
            "  for scale: plain loops do a layer's products at %.1f GFLOP/s, at most %.0f tok/s\n",
            rate / 1e9, rate / plan_flops_token(&c, b->seq, 1));
}

void bench_print_table(const struct bench_run *r)
{
    printf("fb-bench %s, %d thread%s%s\n", FULLBAND_VERSION, r->threads, r->threads > 1 ? "s" : "",
        bench_clock_is_cpu() ? ", by processor time" : "");
    printf("multiply-adds %.0f GFLOP/s before, %.0f after: %s\n", r->fma_before / 1e9,
        r->fma_after / 1e9,
        clean(r) ? "clean"
                 : "UNCLEAN, the processor was not ours alone; compare CPU seconds, or repeat");
    if (r->no_peer)
        printf("no peer: %s\n", r->no_peer);
    for (int i = 0; i < r->count; i++) {
        const struct bench_config *b = r->rows[i].config;
        if (i == 0 || r->rows[i - 1].config != b)
            print_config(b, r->rows[i].ours.params);
        print_row(&r->rows[i]);
        if (i + 1 == r->count || r->rows[i + 1].config != b)
            print_naive(b, r->naive[b - bench_configs]);
    }
    printf("\nceiling: the step's products alone, each in the fastest form that oneDNN has; share: "
           "of it,\nby all operations that the model asks for (attention: the visible half)\n");
}

static int by_seconds(const void *a, const void *b)
{
    const struct bench_op *x = a, *y = b;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

void bench_print_ops(const struct bench_row *row)
{
    struct bench_counts c = row->ours.counts;
    double steps = row->ours.steps.count, sum = mean_step(row);
    printf("\n%s, %s, %d pass%s%s: time by operation, mean of %d steps\n", row->config->name,
        precision_name((int)row->passes.precision), row->passes.count,
        row->passes.count > 1 ? "es" : "", row->passes.shared ? ", shared prefixes" : "",
        row->ours.steps.count);
    qsort(c.ops, (size_t)c.op_count, sizeof *c.ops, by_seconds);
    for (int i = 0; i < c.op_count && c.ops[i].calls > 0; i++) {
        printf("  %-18s %8.2f ms %5.1f%% %6.0f calls", c.ops[i].name,
            1e3 * c.ops[i].seconds / steps, 100 * c.ops[i].seconds / steps / sum,
            (double)c.ops[i].calls / steps);
        if (c.ops[i].flops > 0)
            printf(" %8.1f GFLOP/s", c.ops[i].flops / c.ops[i].seconds / 1e9);
        printf("\n");
    }
    printf("  products alone: %.2f ms as the device does them, %.2f ms at the library's best\n",
        1e3 * row->ours.ceiling.alone_seconds, 1e3 * row->ours.ceiling.seconds);
    const struct model_memory *m = &row->ours.memory;
    printf("  memory: %.1f MiB weights, %.1f gradients, %.1f moments, %.1f workspace, activations",
        (double)m->weights / MIB, (double)m->gradients / MIB, 2 * (double)m->weights / MIB,
        (double)m->workspace / MIB);
    for (int k = 0; k < row->passes.count; k++)
        printf(" %.1f", (double)m->activations[k] / MIB);
    printf("\n");
}

static json_t *steps_json(const struct bench_row *row, const struct bench_steps *s)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:i, s:I, s:f, s:f}", "tokens_per_second",
        tokens(row) / s->median, "median_s", s->median, "best_s", s->best, "cpu_s", s->cpu, "steps",
        s->count, "peak_bytes", (json_int_t)s->peak_bytes, "first_loss", s->first_loss, "last_loss",
        s->last_loss);
}

static json_t *ops_json(const struct bench_row *row)
{
    json_t *ops = json_object();
    double steps = row->ours.steps.count;
    for (int i = 0; i < row->ours.counts.op_count; i++) {
        const struct bench_op *o = &row->ours.counts.ops[i];
        if (o->calls > 0)
            json_object_set_new(ops, o->name,
                json_pack("{s:f, s:f, s:f}", "seconds", o->seconds / steps, "calls",
                    (double)o->calls / steps, "flops", o->flops / steps));
    }
    return ops;
}

static json_t *row_json(const struct bench_row *row)
{
    const struct bench_case_result *o = &row->ours;
    json_t *j = json_pack("{s:s, s:s, s:i, s:b, s:I, s:f, s:o, s:o, s:{s:f, s:f, s:f}}", "config",
        row->config->name, "precision", precision_name((int)row->passes.precision), "passes",
        row->passes.count, "shared", row->passes.shared, "params", (json_int_t)o->params, "flops",
        o->flops, "steps", steps_json(row, &o->steps), "by_op", ops_json(row), "products", "flops",
        o->ceiling.flops, "best_seconds", o->ceiling.seconds, "alone_seconds",
        o->ceiling.alone_seconds);
    if (row->has_peer)
        json_object_set_new(j, "peer", steps_json(row, &row->peer));
    return j;
}

void bench_print_json(const struct bench_run *r)
{
    json_t *rows = json_array(), *naive = json_object();
    for (int i = 0; i < r->count; i++)
        json_array_append_new(rows, row_json(&r->rows[i]));
    for (int i = 0; bench_configs[i].name; i++)
        if (r->naive[i] > 0)
            json_object_set_new(naive, bench_configs[i].name, json_real(r->naive[i]));
    json_t *j = json_pack("{s:s, s:i, s:f, s:f, s:b, s:o, s:o}", "version", FULLBAND_VERSION,
        "threads", r->threads, "multiply_adds_before", r->fma_before, "multiply_adds_after",
        r->fma_after, "clean", clean(r), "naive_flops_per_second", naive, "rows", rows);
    if (r->no_peer)
        json_object_set_new(j, "no_peer", json_string(r->no_peer));
    json_dumpf(j, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    printf("\n");
    json_decref(j);
}
