/* fb-plan: what a configuration will do and cost, before it runs. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/config.h"
#include "common/model_preset.h"
#include "common/process.h"
#include "common/version.h"
#include "trainer/plan_report.h"

#define MAX_OVERRIDES 256

static const char usage[] =
    "usage: fb-plan CONFIG [--set KEY=VALUE]... [--json] [--rate FLOPS]\n"
    "       fb-plan --help-config | --presets\n"
    "Prints the model, the schedule, the data, the memory, the arithmetic and the time of a run.\n"
    "  --set KEY=VALUE  instead of the file's value; may be given several times\n"
    "  --config         print the resolved configuration as YAML instead\n"
    "  --json           print the plan and its costs as JSON\n"
    "  --rate FLOPS     FLOP/s of matrix products to estimate the time from (default: measured)\n"
    "  --help-config    every key with type, bounds, default and meaning\n"
    "  --presets        the models of model.preset with their parameters\n"
    "  --help, --version\n";

struct options {
    const char *config, *overrides[MAX_OVERRIDES];
    int override_count, json, print_config;
    double rate;
};

static void print_help_config(void)
{
    struct buf out = BUF_INIT;
    config_help(&out);
    fputs(out.data, stdout);
    buf_release(&out);
}

static void print_presets(void)
{
    struct buf out = BUF_INIT;
    model_preset_list(&out);
    fputs(out.data, stdout);
    buf_release(&out);
}

static int usage_error(void)
{
    fputs(usage, stderr);
    return 2;
}

/* Returns −1 to go on, otherwise the exit status. */
static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option longs[] = {{"set", required_argument, NULL, 's'},
        {"json", no_argument, NULL, 'j'}, {"config", no_argument, NULL, 'c'},
        {"rate", required_argument, NULL, 'r'}, {"help-config", no_argument, NULL, 'k'},
        {"presets", no_argument, NULL, 'p'}, {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'}, {NULL, 0, NULL, 0}};
    int c;
    char *end;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1)
        switch (c) {
        case 's':
            if (o->override_count == MAX_OVERRIDES)
                return usage_error();
            o->overrides[o->override_count++] = optarg;
            break;
        case 'j':
            o->json = 1;
            break;
        case 'c':
            o->print_config = 1;
            break;
        case 'r':
            o->rate = strtod(optarg, &end);
            if (*end || end == optarg || !isfinite(o->rate) || o->rate <= 0) {
                fprintf(stderr, "fb-plan: --rate %s: wanted a number above 0\n", optarg);
                return 2;
            }
            break;
        case 'k':
            print_help_config();
            return 0;
        case 'p':
            print_presets();
            return 0;
        case 'h':
            fputs(usage, stdout);
            return 0;
        case 'v':
            puts("fb-plan " FULLBAND_VERSION);
            return 0;
        default:
            return usage_error();
        }
    if (optind != argc - 1 || (o->json && o->print_config))
        return usage_error();
    o->config = argv[optind];
    return -1;
}

static void print_json(const struct plan *p, const struct plan_costs *costs)
{
    json_t *j = plan_report_json(p, costs);
    json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(12));
    putchar('\n');
    json_decref(j);
}

static void print_text(const struct plan *p, const struct plan_costs *costs)
{
    struct buf out = BUF_INIT;
    plan_report_text(p, costs, &out);
    fputs(out.data, stdout);
    buf_release(&out);
}

static void print_config(const struct config *c)
{
    struct buf out = BUF_INIT;
    config_print(c, &out);
    fputs(out.data, stdout);
    buf_release(&out);
}

static int report(const struct options *o, const struct config *c, struct err *e)
{
    struct plan p;
    struct plan_costs costs;
    int rc = plan_make(c, &p, e);
    if (rc < 0)
        return rc;
    rc = plan_costs_make(&p, c, o->rate, &costs, e);
    if (rc == 0 && o->json)
        print_json(&p, &costs);
    else if (rc == 0)
        print_text(&p, &costs);
    plan_release(&p);
    return rc;
}

int main(int argc, char **argv)
{
    struct options o = {0};
    struct config c;
    struct err e = {0};
    process_open_streams();
    int status = parse_options(argc, argv, &o);
    if (status >= 0)
        return status;
    int rc = config_load(o.config, o.overrides, o.override_count, &c, &e);
    if (rc == 0) {
        if (o.print_config)
            print_config(&c);
        else
            rc = report(&o, &c, &e);
        config_release(&c);
    }
    if (rc == 0)
        rc = process_flush_output(&e);
    if (rc < 0)
        fprintf(stderr, "fb-plan: %s\n", e.msg);
    return rc < 0 ? 1 : 0;
}
