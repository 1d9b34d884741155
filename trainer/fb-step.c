/* fb-step: one batch and weights in; losses, states and every gradient out, or compared. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "common/args.h"
#include "common/config.h"
#include "common/fs.h"
#include "common/process.h"
#include "common/version.h"
#include "trainer/step_case.h"

#define CONFIG_BYTES ((uint64_t)16 << 20)

static const char usage[] =
    "usage: fb-step --case IN.safetensors [--out OUT.safetensors] [--config CONFIG]\n"
    "       fb-step --check IN.safetensors\n"
    "Runs one batch forward and backward through all its passes.\n"
    "  --case FILE     weights (w.*) and batch (in.*), configuration in the metadata\n"
    "  --out FILE      write losses, states, logits (out.*) and gradients (g.*)\n"
    "  --check FILE    compare with the file's own out.* and g.*: one line a tensor with the\n"
    "                  relative error; exit 1 where one is above 1e-4\n"
    "  --config FILE   model and train.lambda from this run configuration instead\n"
    "  --threads N     threads to compute with (default: every core)\n"
    "  --json          --case: losses as JSON; --check: comparisons as JSON\n"
    "  --help, --version\n";

struct options {
    const char *file, *out, *config;
    int check, threads, json;
};

/* Returns −1 to go on, otherwise the exit status. */
static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option longs[] = {{"case", required_argument, NULL, 'c'},
        {"check", required_argument, NULL, 'k'}, {"out", required_argument, NULL, 'o'},
        {"config", required_argument, NULL, 'f'}, {"threads", required_argument, NULL, 't'},
        {"json", no_argument, NULL, 'j'}, {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'}, {NULL, 0, NULL, 0}};
    int c, files = 0;
    struct err e = {0};
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1)
        switch (c) {
        case 'c':
        case 'k':
            o->file = optarg;
            o->check = c == 'k';
            files++;
            break;
        case 'o':
            o->out = optarg;
            break;
        case 'f':
            o->config = optarg;
            break;
        case 't':
            if (arg_int(optarg, 1, 1024, &o->threads, &e) < 0) {
                fprintf(stderr, "fb-step: --threads %s\n", e.msg);
                return 2;
            }
            break;
        case 'j':
            o->json = 1;
            break;
        case 'h':
            fputs(usage, stdout);
            return 0;
        case 'v':
            puts("fb-step " FULLBAND_VERSION);
            return 0;
        default:
            fputs(usage, stderr);
            return 2;
        }
    if (files != 1 || optind != argc || (o->check && o->out)) {
        fputs(usage, stderr);
        return 2;
    }
    return -1;
}

/* Model and λ from a run's configuration; the vocabulary stays the case's. */
static int apply_config(const char *path, struct step_case *sc, struct err *e)
{
    struct buf text = BUF_INIT;
    struct config c = {0};
    int rc = fs_read(path, CONFIG_BYTES, &text, e);
    if (rc == 0)
        rc = config_parse(text.data, text.len, path, NULL, 0, &c, e);
    buf_release(&text);
    if (rc < 0)
        return rc;
    int vocab = c.model.vocab ? c.model.vocab : sc->model.vocab;
    sc->model = c.model;
    sc->model.vocab = vocab;
    sc->lambda = (float)c.train.lambda;
    config_release(&c);
    return 0;
}

static void print_losses(const struct step_result *r, int json)
{
    printf(json ? "{\"losses\": [" : "losses");
    for (int k = 0; k < r->passes; k++)
        printf("%s%.9g", !json ? " " : k ? ", " : "", (double)r->losses[k]);
    printf(json ? "], \"total\": %.9g}\n" : " total %.9g\n", (double)r->total);
}

static void print_comparisons(const struct step_comparison *list, int count)
{
    for (int i = 0; i < count; i++)
        printf("%-56s %.3e %s\n", list[i].name, list[i].error, list[i].pass ? "pass" : "fail");
}

/* A tensor that cannot be compared has no "error": JSON has no NaN. */
static void print_comparisons_json(const struct step_comparison *list, int count)
{
    json_t *all = json_array();
    for (int i = 0; i < count; i++) {
        json_t *one = json_pack("{s:s, s:b}", "name", list[i].name, "pass", list[i].pass);
        if (!isnan(list[i].error))
            json_object_set_new(one, "error", json_real(list[i].error));
        json_array_append_new(all, one);
    }
    json_dumpf(all, stdout, JSON_INDENT(1));
    putchar('\n');
    json_decref(all);
}

/* Prints; ERR_MISMATCH where a tensor differs. */
static int check(const struct step_result *r, const struct safetensors *st, int json, struct err *e)
{
    struct step_comparison *list = NULL;
    int failed = 0, count = step_compare(r, st, &list, e);
    if (count < 0)
        return count;
    if (json)
        print_comparisons_json(list, count);
    else
        print_comparisons(list, count);
    for (int i = 0; i < count; i++)
        failed += !list[i].pass;
    free(list);
    return failed ? err_set(e, ERR_MISMATCH, "%d of %d tensors differ by more than %g", failed,
                        count, STEP_TOLERANCE)
                  : 0;
}

/* A case from an open file. */
static int step_file(const struct options *o, const struct safetensors *st, struct err *e)
{
    struct device *d = NULL;
    struct step_case sc = {0};
    struct step_result r = {0};
    int rc = step_case_read(st, &sc, e);
    if (rc == 0 && o->config)
        rc = apply_config(o->config, &sc, e);
    if (rc == 0)
        rc = step_case_check(&sc, e);
    if (rc == 0)
        rc = device_cpu_new(o->threads, &d, e);
    if (rc == 0)
        rc = step_run(d, &sc, st, &r, e);
    if (rc == 0 && o->check)
        rc = check(&r, st, o->json, e);
    else if (rc == 0)
        print_losses(&r, o->json);
    if (rc == 0 && o->out)
        rc = step_result_write(&r, o->out, e);
    step_result_release(&r);
    step_case_release(&sc);
    device_free(&d);
    return rc;
}

static int step(const struct options *o, struct err *e)
{
    struct safetensors *st = NULL;
    int rc = safetensors_open(o->file, &st, e);
    if (rc < 0)
        return rc;
    rc = step_file(o, st, e);
    if (rc < 0)
        err_prefix(e, "%s", o->file);
    safetensors_close(&st);
    return rc;
}

int main(int argc, char **argv)
{
    struct options o = {0};
    struct err e = {0};
    process_open_streams();
    int status = parse_options(argc, argv, &o);
    if (status >= 0)
        return status;
    int rc = step(&o, &e);
    if (rc == 0)
        rc = process_flush_output(&e);
    if (rc < 0)
        fprintf(stderr, "fb-step: %s\n", e.msg);
    return rc < 0 ? 1 : 0;
}
