/* fb-trainer: one rank of a run. See loop.h. */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "common/args.h"
#include "common/log.h"
#include "common/process.h"
#include "common/version.h"
#include "trainer/loop.h"

#define EXIT_USAGE   2
#define EXIT_RESTART 111

static const char usage[] =
    "usage: fb-trainer --run DIR [--rank R] [--world W]\n"
    "\n"
    "Trains as rank R of W under the scheduler of the run directory DIR, on rows of its loader.\n"
    "\n"
    "  --run DIR    the run directory (plan.json, run.yaml, sock/)\n"
    "  --rank R     this rank, 0 by default; with several ranks the one that mpirun gives\n"
    "  --world W    number of ranks, 1 by default; several are started by mpirun -n W\n"
    "  --help       this text\n"
    "  --version    the version\n"
    "\n"
    "Exit status: 0 the run finished, or SIGTERM asked it to leave (one of several ranks: 111); 1 "
    "the\n"
    "run directory cannot be used; 2 usage; 100 do not restart me; 111 restart me.\n";

/* mpirun starts all ranks with the same arguments and tells each its number here. */
static int rank_of_mpirun(void)
{
    const char *text = getenv("OMPI_COMM_WORLD_RANK");
    int rank = 0;
    return text && arg_int(text, 0, 1 << 20, &rank, NULL) == 0 ? rank : 0;
}

/* The ranks go with their mpirun, however it ends: one left behind would wait for the others. */
static void die_with_parent(void)
{
    pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(EXIT_RESTART);
}

/* −1: go on; otherwise the exit status. */
static int parse(int argc, char **argv, struct loop_settings *s)
{
    static const struct option options[] = {{"run", required_argument, NULL, 'd'},
        {"rank", required_argument, NULL, 'r'}, {"world", required_argument, NULL, 'w'},
        {"help", no_argument, NULL, 'h'}, {"version", no_argument, NULL, 'v'}, {0}};
    int c, bad = 0;
    *s = (struct loop_settings){.rank = -1, .world = 1};
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 'd':
            s->run_dir = optarg;
            break;
        case 'r':
            bad |= arg_int(optarg, 0, 1 << 20, &s->rank, NULL);
            break;
        case 'w':
            bad |= arg_int(optarg, 0, 1 << 20, &s->world, NULL);
            break;
        case 'h':
            fputs(usage, stdout);
            return 0;
        case 'v':
            puts("fb-trainer " FULLBAND_VERSION);
            return 0;
        default:
            bad = 1;
        }
    }
    if (s->rank < 0)
        s->rank = s->world > 1 ? rank_of_mpirun() : 0;
    if (!bad && s->run_dir && optind == argc && s->world >= 1 && s->rank < s->world)
        return -1;
    fputs(usage, stderr);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    struct loop_settings settings;
    struct err e = {0};
    process_open_streams();
    int status = parse(argc, argv, &settings);
    if (status >= 0)
        return status;
    log_init("trainer", settings.rank);
    if (settings.world > 1)
        die_with_parent();
    status = loop_run(&settings, &e);
    if (status != 0)
        fprintf(stderr, "fb-trainer: %s\n", e.msg);
    if (settings.world > 1)
        _exit(status);
    return status;
}
