/* fb-evaluator: scores committed checkpoints while a run trains, or one by hand. */
#include <getopt.h>
#include <stdio.h>

#include "common/args.h"
#include "common/log.h"
#include "common/process.h"
#include "common/rundir.h"
#include "common/version.h"
#include "evaluator/daemon.h"
#include "evaluator/worker.h"

static const char usage[] =
    "usage: fb-evaluator --run DIR [--rank N] [--threads N]\n"
    "       fb-evaluator --run DIR --checkpoint DIR --suite S [--regime R] [--threads N]\n"
    "\n"
    "As a daemon: takes jobs from the scheduler of the run and reports their results.\n"
    "With --checkpoint: scores that checkpoint once and prints the result as JSON; the run's\n"
    "fb-loader must be running (ops/eval starts one).\n"
    "\n"
    "  --run DIR         the run directory (its plan says which validation rows are read)\n"
    "  --rank N          number of this evaluator (default 0)\n"
    "  --checkpoint DIR  score this checkpoint and leave\n"
    "  --suite S         loss or fixed_point\n"
    "  --regime R        standard, soft or fused (for loss; default standard)\n"
    "  --threads N       default: process.evaluator_threads of the run\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 done, 1 wrong input, 2 usage, 100 do not restart me, 111 restart me.\n";

struct arguments {
    const char *run, *checkpoint, *suite, *regime;
    int rank, threads;
};

/* 0: go on; 1: leave with *status. */
static int read_arguments(int argc, char **argv, struct arguments *a, int *status)
{
    static const struct option options[] = {
        {"run", required_argument, NULL, 'r'},
        {"rank", required_argument, NULL, 'n'},
        {"checkpoint", required_argument, NULL, 'c'},
        {"suite", required_argument, NULL, 's'},
        {"regime", required_argument, NULL, 'g'},
        {"threads", required_argument, NULL, 't'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'},
        {0},
    };
    struct err e = {0};
    int rc = 0, index = 0;
    for (int opt; (opt = getopt_long(argc, argv, "", options, &index)) != -1;) {
        *status = 0;
        switch (opt) {
        case 'r':
            a->run = optarg;
            break;
        case 'n':
            rc = arg_int(optarg, 0, 4096, &a->rank, &e);
            break;
        case 'c':
            a->checkpoint = optarg;
            break;
        case 's':
            a->suite = optarg;
            break;
        case 'g':
            a->regime = optarg;
            break;
        case 't':
            rc = arg_int(optarg, 0, 4096, &a->threads, &e);
            break;
        case 'h':
            return fputs(usage, stdout), 1;
        case 'v':
            return puts("fb-evaluator " FULLBAND_VERSION), 1;
        default:
            return *status = 2, fputs(usage, stderr), 1;
        }
        if (rc < 0) {
            fprintf(stderr, "fb-evaluator: --%s %s\n", options[index].name, e.msg);
            return *status = 2, 1;
        }
    }
    *status = 2;
    if (!a->run || optind != argc || !a->checkpoint != !a->suite)
        return fputs(usage, stderr), 1;
    return 0;
}

static int score_once(
    const struct rundir *run, const struct arguments *a, int threads, struct err *e)
{
    struct bus *bus = NULL;
    json_t *result = NULL;
    struct worker_job job = {.suite = name_index(a->suite, suite_name, SUITE_COUNT),
        .regime = name_index(a->regime, regime_name, REGIME_COUNT),
        .checkpoint = (char *)a->checkpoint};
    if (job.suite < 0)
        return err_set(e, ERR_INPUT, "--suite %s: should be loss or fixed_point", a->suite);
    if (job.regime < 0)
        return err_set(e, ERR_INPUT, "--regime %s: should be standard, soft or fused", a->regime);
    int rc = bus_new(&bus, e);
    if (rc == 0)
        rc = worker_score(bus, run, threads, &job, &result, e);
    if (rc == 0) {
        json_dumpf(result, stdout, JSON_INDENT(2));
        putchar('\n');
    }
    json_decref(result);
    bus_free(&bus);
    return rc;
}

int main(int argc, char **argv)
{
    struct arguments a = {.regime = "standard"};
    struct rundir run;
    struct err e = {0};
    int status;
    process_open_streams();
    if (read_arguments(argc, argv, &a, &status))
        return status;
    log_init("evaluator", a.rank);
    if (rundir_open(a.run, &run, &e) < 0) {
        fprintf(stderr, "fb-evaluator: %s\n", e.msg);
        return a.checkpoint ? 1 : 100;
    }
    int threads = a.threads ? a.threads : run.config.process.evaluator_threads;
    if (!a.checkpoint) {
        status = evaluator_daemon(&run, a.rank, threads);
    } else {
        status = score_once(&run, &a, threads, &e) < 0 || process_flush_output(&e) < 0;
        if (status)
            fprintf(stderr, "fb-evaluator: %s\n", e.msg);
    }
    rundir_release(&run);
    return status;
}
