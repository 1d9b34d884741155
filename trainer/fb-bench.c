/* fb-bench: how fast a training step is on this machine, and what it could be. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/args.h"
#include "common/config.h"
#include "common/mem.h"
#include "common/process.h"
#include "common/version.h"
#include "trainer/bench_clock.h"
#include "trainer/bench_peer.h"
#include "trainer/bench_rates.h"
#include "trainer/bench_report.h"

static const char usage[] =
    "usage: fb-bench train [OPTION]...\n"
    "Trains models of fixed sizes on random tokens for some seconds and says how fast, what the\n"
    "products alone would take, where the time goes and how much memory it took.\n"
    "  --config NAME     small, larger or tiny; several with commas (default small,larger)\n"
    "  --passes LIST     pass counts (default 1,2,3); each but 1 also with shared prefixes\n"
    "  --precision P     f32 (default) or bf16; f32,bf16 measures both in turn\n"
    "  --seconds S       of timed steps for each (default 5)\n"
    "  --rounds N        measure everything N times in turn and keep the fastest (default 2)\n"
    "  --threads N       threads to compute with (default: every core)\n"
    "  --clock cpu       measure by processor time, for a busy machine; one thread\n"
    "  --peer COMMAND    run the same with this command, beside ours in each round\n"
    "  --no-peer WHY     say why there is none\n"
    "  --json            one JSON object instead of tables\n"
    "  --help, --version\n";

enum { PASSES_MAX = 8, CONFIGS_MAX = 4 };

struct options {
    const struct bench_config *configs[CONFIGS_MAX];
    int config_count, passes[PASSES_MAX], pass_count, rounds, json;
    int precisions[PRECISION_COUNT]; /* 1: measured */
    struct bench_effort effort;
    const char *peer, *no_peer;
};

static const struct bench_config *find_config(const char *name, size_t length)
{
    for (const struct bench_config *b = bench_configs; b->name; b++)
        if (strlen(b->name) == length && strncmp(b->name, name, length) == 0)
            return b;
    return NULL;
}

static int parse_configs(const char *text, struct options *o, struct err *e)
{
    o->config_count = 0;
    for (const char *p = text;; p++) {
        size_t n = strcspn(p, ",");
        const struct bench_config *b = find_config(p, n);
        if (!b || o->config_count == CONFIGS_MAX)
            return err_set(e, ERR_INPUT, "%.*s: small, larger or tiny expected", (int)n, p);
        o->configs[o->config_count++] = b;
        p += n;
        if (!*p)
            return 0;
    }
}

static int parse_passes(const char *text, struct options *o, struct err *e)
{
    char one[8];
    o->pass_count = 0;
    for (const char *p = text;; p++) {
        size_t n = strcspn(p, ",");
        snprintf(one, sizeof one, "%.*s", (int)n, p);
        if (o->pass_count == PASSES_MAX)
            return err_set(e, ERR_INPUT, "at most %d pass counts expected", PASSES_MAX);
        int rc = arg_int(one, 1, 8, &o->passes[o->pass_count++], e);
        p += n;
        if (rc < 0 || !*p)
            return rc;
    }
}

static int parse_precisions(const char *text, struct options *o, struct err *e)
{
    memset(o->precisions, 0, sizeof o->precisions);
    for (const char *p = text;; p++) {
        char one[8];
        size_t n = strcspn(p, ",");
        snprintf(one, sizeof one, "%.*s", (int)n, p);
        int found = 0;
        for (int i = 0; i < PRECISION_COUNT; i++)
            if (strcmp(one, precision_name(i)) == 0)
                o->precisions[i] = found = 1;
        if (!found)
            return err_set(e, ERR_INPUT, "%.*s: f32 or bf16 expected", (int)n, p);
        p += n;
        if (!*p)
            return 0;
    }
}

static int usage_error(const struct err *e)
{
    fprintf(stderr, "fb-bench: %s\n", e->msg);
    return 2;
}

/* −1: go on; otherwise the exit status. */
static int parse(int argc, char **argv, struct options *o)
{
    static const struct option longs[] = {{"config", required_argument, NULL, 'c'},
        {"precision", required_argument, NULL, 'P'}, {"passes", required_argument, NULL, 'k'},
        {"seconds", required_argument, NULL, 's'}, {"rounds", required_argument, NULL, 'r'},
        {"threads", required_argument, NULL, 't'}, {"clock", required_argument, NULL, 'u'},
        {"peer", required_argument, NULL, 'p'}, {"no-peer", required_argument, NULL, 'n'},
        {"json", no_argument, NULL, 'j'}, {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'}, {0}};
    struct err e = {0};
    int c, rc = 0;
    *o = (struct options){.rounds = 2, .effort = {.threads = process_cores(), .seconds = 5}};
    parse_configs("small,larger", o, &e);
    parse_passes("1,2,3", o, &e);
    parse_precisions("f32", o, &e);
    while (rc == 0 && (c = getopt_long(argc, argv, "", longs, NULL)) != -1)
        switch (c) {
        case 'c':
            rc = parse_configs(optarg, o, &e);
            break;
        case 'k':
            rc = parse_passes(optarg, o, &e);
            break;
        case 'P':
            rc = parse_precisions(optarg, o, &e);
            break;
        case 's':
            rc = arg_double(optarg, 0.01, 3600, &o->effort.seconds, &e);
            break;
        case 'r':
            rc = arg_int(optarg, 1, 100, &o->rounds, &e);
            break;
        case 't':
            rc = arg_int(optarg, 1, 1024, &o->effort.threads, &e);
            break;
        case 'u':
            if (strcmp(optarg, "cpu") != 0 && strcmp(optarg, "wall") != 0)
                rc = err_set(&e, ERR_INPUT, "--clock %.20s: cpu or wall expected", optarg);
            else if (*optarg == 'c')
                bench_clock_use_cpu();
            break;
        case 'p':
            o->peer = optarg;
            break;
        case 'n':
            o->no_peer = optarg;
            break;
        case 'j':
            o->json = 1;
            break;
        case 'h':
            fputs(usage, stdout);
            return 0;
        case 'v':
            puts("fb-bench " FULLBAND_VERSION);
            return 0;
        default:
            fputs(usage, stderr);
            return 2;
        }
    if (bench_clock_is_cpu())
        o->effort.threads = 1;
    if (rc < 0)
        return usage_error(&e);
    if (optind + 1 != argc || strcmp(argv[optind], "train") != 0) {
        fputs(usage, stderr);
        return 2;
    }
    return -1;
}

/* --- measurements, each in a child process ------------------------------------------------------
 */

static int rate_child(void *arg, void *result, struct err *e)
{
    (void)e;
    *(double *)result = bench_fma_rate(*(const int *)arg);
    return 0;
}

struct case_arg {
    const struct bench_config *config;
    struct bench_passes passes;
    const struct bench_effort *effort;
};

static int case_child(void *arg, void *result, struct err *e)
{
    const struct case_arg *a = arg;
    return bench_case_run(a->config, a->passes, a->effort, result, e);
}

static int naive_child(void *arg, void *result, struct err *e)
{
    const struct case_arg *a = arg;
    (void)e;
    *(double *)result = bench_naive_rate(
        a->effort->threads, a->config->batch * a->config->seq, a->config->dim, a->config->ffn);
    return 0;
}

static int keep_faster(struct bench_row *row, const struct bench_case_result *r)
{
    if (row->ours.steps.count == 0 || r->steps.median < row->ours.steps.median)
        row->ours = *r;
    return 0;
}

/* One round of a row: ours, then the peer. */
static int measure(const struct options *o, struct bench_row *row, struct err *e)
{
    struct case_arg arg = {row->config, row->passes, &o->effort};
    struct bench_case_result *r = mem_array(1, sizeof *r);
    struct bench_steps peer;
    int rc = bench_in_child(case_child, &arg, r, sizeof *r, e);
    if (rc == 0)
        keep_faster(row, r);
    free(r);
    if (rc < 0 || !o->peer)
        return rc;
    rc = bench_peer_run(o->peer, row->config, row->passes, &o->effort, &peer, e);
    if (bench_clock_is_cpu())
        peer.median = peer.best = peer.cpu;
    if (rc == 0 && (!row->has_peer || peer.median < row->peer.median)) {
        row->peer = peer;
        row->has_peer = 1;
    }
    return rc;
}

static int measure_all(const struct options *o, struct bench_run *run, struct err *e)
{
    int threads = o->effort.threads, rc;
    rc = bench_in_child(rate_child, &threads, &run->fma_before, sizeof run->fma_before, e);
    for (int i = 0; rc == 0 && i < o->config_count; i++) {
        struct case_arg arg = {o->configs[i], {1, 0, PRECISION_F32}, &o->effort};
        double *naive = &run->naive[o->configs[i] - bench_configs];
        rc = bench_in_child(naive_child, &arg, naive, sizeof *naive, e);
    }
    for (int round = 0; rc == 0 && round < o->rounds; round++)
        for (int i = 0; rc == 0 && i < run->count; i++) {
            const struct bench_passes *p = &run->rows[i].passes;
            fprintf(stderr, "fb-bench: round %d of %d, %s, %s, K = %d%s\n", round + 1, o->rounds,
                run->rows[i].config->name, precision_name((int)p->precision), p->count,
                p->shared ? ", shared prefixes" : "");
            rc = measure(o, &run->rows[i], e);
        }
    if (rc == 0)
        rc = bench_in_child(rate_child, &threads, &run->fma_after, sizeof run->fma_after, e);
    return rc;
}

/* Each pass count whole, and each but the first with shared prefixes, in each precision. */
static void list_rows(const struct options *o, struct bench_run *run)
{
    run->rows = mem_array(
        (size_t)(o->config_count * o->pass_count * 2 * PRECISION_COUNT), sizeof *run->rows);
    for (int i = 0; i < o->config_count; i++)
        for (int k = 0; k < o->pass_count; k++)
            for (int shared = 0; shared <= (o->passes[k] > 1); shared++)
                for (int p = 0; p < PRECISION_COUNT; p++)
                    if (o->precisions[p])
                        run->rows[run->count++] = (struct bench_row){.config = o->configs[i],
                            .passes = {o->passes[k], shared, (enum precision)p}};
}

int main(int argc, char **argv)
{
    struct options o;
    struct err e = {0};
    int rc = parse(argc, argv, &o);
    if (rc >= 0)
        return rc;
    struct bench_run run = {.threads = o.effort.threads, .no_peer = o.no_peer};
    list_rows(&o, &run);
    rc = measure_all(&o, &run, &e);
    if (rc < 0)
        fprintf(stderr, "fb-bench: %s\n", e.msg);
    else if (o.json)
        bench_print_json(&run);
    else
        bench_print_table(&run);
    for (int i = 0; rc == 0 && !o.json && i < run.count; i++)
        bench_print_ops(&run.rows[i]);
    free(run.rows);
    return rc < 0 ? 1 : 0;
}
