/* fb-scheduler: runs a run. See --help. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "common/log.h"
#include "common/process.h"
#include "common/rundir.h"
#include "common/version.h"
#include "scheduler/serve.h"

static const char usage[] =
    "usage: fb-scheduler --run DIR\n"
    "\n"
    "Leads the run in DIR (made by fb-plan or ops/launch): welcomes loaders, trainers and\n"
    "evaluators on DIR/sock/control, grants steps, commits checkpoints, hands out eval jobs, and\n"
    "writes metrics.jsonl, evals/ and summary.json.\n"
    "\n"
    "  --run DIR   the run directory\n"
    "  --help, --version\n"
    "\n"
    "SIGTERM and SIGINT stop cleanly: steps under way are finished and committed.\n"
    "Exit: 0 finished or stopped, 1 DIR cannot be used, 2 usage, 100 do not restart, 111 "
    "restart.\n";

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"run", required_argument, NULL, 'r'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'},
        {0},
    };
    const char *dir = NULL;
    process_open_streams();
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (o == 'h' || o == 'v') {
            fputs(o == 'h' ? usage : "fb-scheduler " FULLBAND_VERSION "\n", stdout);
            return 0;
        }
        if (o != 'r') {
            fputs(usage, stderr);
            return 2;
        }
        dir = optarg;
    }
    if (!dir || optind != argc) {
        fputs(usage, stderr);
        return 2;
    }
    struct rundir run;
    struct err e = {0};
    if (rundir_open(dir, &run, &e) < 0) {
        fprintf(stderr, "fb-scheduler: %s\n", e.msg);
        return 1;
    }
    log_init("scheduler", -1);
    int status = scheduler_serve(&run);
    rundir_release(&run);
    return status;
}
