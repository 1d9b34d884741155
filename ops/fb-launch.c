/* fb-launch: starts a whole run on this machine, watches over it, and continues one that stopped.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/mem.h"
#include "common/process.h"
#include "common/rundir.h"
#include "common/version.h"
#include "ops/last_error.h"
#include "ops/supervisor.h"
#include "ops/view.h"

#define MAX_OVERRIDES    256
#define READY_TIMEOUT_MS 60000
#define EXIT_USAGE       2

static const char usage[] =
    "usage: fb-launch CONFIG [--set KEY=VALUE]... [--dry-run] [--detach]\n"
    "       fb-launch --resume RUN [--detach]\n"
    "\n"
    "Makes the run directory CONFIG names and trains in it: scheduler, loader, trainer and "
    "evaluators\n"
    "run as processes of their own, and one that dies is started again. A run of the same plan "
    "that\n"
    "exists already is continued from its last checkpoint. Ctrl-C or SIGTERM stops cleanly: the "
    "step\n"
    "under way is finished and saved.\n"
    "\n"
    "  --set KEY=VALUE   a config key, above what the file says; may be repeated\n"
    "  --dry-run         show the plan and its costs, start nothing (fb-plan)\n"
    "  --resume RUN      continue the run in directory RUN as it was configured\n"
    "  --detach          go to the background once the run is up; watch it with ops/status "
    "--watch\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 finished or cleanly stopped, 1 not (the reason is on stderr), 2 usage.\n";

struct arguments {
    const char *config, *resume;
    const char *overrides[MAX_OVERRIDES];
    int override_count;
    int dry_run, detach;
};

static int read_option(struct arguments *a, int opt)
{
    switch (opt) {
    case 's':
        if (a->override_count == MAX_OVERRIDES)
            return -1;
        a->overrides[a->override_count++] = optarg;
        return 0;
    case 'n':
        a->dry_run = 1;
        return 0;
    case 'r':
        a->resume = optarg;
        return 0;
    case 'd':
        a->detach = 1;
        return 0;
    default:
        return -1;
    }
}

/* −1: go on; otherwise the exit status. */
static int read_arguments(int argc, char **argv, struct arguments *a)
{
    static const struct option options[] = {{"set", required_argument, NULL, 's'},
        {"dry-run", no_argument, NULL, 'n'}, {"resume", required_argument, NULL, 'r'},
        {"detach", no_argument, NULL, 'd'}, {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'}, {0}};
    int bad = 0;
    for (int opt; (opt = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (opt == 'h' || opt == 'v') {
            fputs(opt == 'h' ? usage : "fb-launch " FULLBAND_VERSION "\n", stdout);
            return 0;
        }
        bad |= read_option(a, opt) < 0;
    }
    if (optind < argc)
        a->config = argv[optind++];
    if (!bad && optind == argc && !a->config != !a->resume &&
        !(a->resume && (a->override_count || a->dry_run)))
        return -1;
    fputs(usage, stderr);
    return EXIT_USAGE;
}

static int failed(const struct err *e)
{
    fprintf(stderr, "fb-launch: %s\n", e->msg);
    return 1;
}

/* The directory this program lies in. */
static int find_bin_dir(char out[PATH_MAX], struct err *e)
{
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX - 1);
    if (n < 0)
        return err_errno(e, "/proc/self/exe");
    out[n] = 0;
    *strrchr(out, '/') = 0;
    return 0;
}

/* Becomes fb-plan; returns only when that fails. */
static int dry_run(const char *bin_dir, const struct arguments *a, struct err *e)
{
    const char *argv[2 * MAX_OVERRIDES + 3];
    char *program = mem_printf("%s/fb-plan", bin_dir);
    int n = 0;
    argv[n++] = program;
    argv[n++] = a->config;
    for (int i = 0; i < a->override_count; i++) {
        argv[n++] = "--set";
        argv[n++] = a->overrides[i];
    }
    argv[n] = NULL;
    execv(program, (char *const *)argv);
    err_errno(e, "%s", program);
    free(program);
    return e->code;
}

static int open_run(const struct arguments *a, struct rundir *run, struct err *e)
{
    struct config c;
    int existed;
    if (a->resume)
        return rundir_open(a->resume, run, e);
    int rc = config_load(a->config, a->overrides, a->override_count, &c, e);
    if (rc < 0)
        return rc;
    rc = rundir_create(&c, run, &existed, e);
    config_release(&c);
    return rc;
}

/* One supervisor a run; the descriptor holds the lock. */
static int lock_run(const struct rundir *run, struct err *e)
{
    char *path = rundir_path(run, "launch.lock");
    int fd = fs_lock(path, e);
    if (fd < 0)
        err_prefix(e, "%s is running already (see ops/status)", run->path);
    free(path);
    return fd;
}

/*
 * Continues in a background process; *ready_fd is where that tells that the run is up. In the
 * parent *pid is the child's.
 */
static int go_background(const struct rundir *run, pid_t *pid, int *ready_fd, struct err *e)
{
    char *logs = rundir_path(run, "logs"), *path = rundir_path(run, "logs/launch.log");
    int fds[2] = {-1, -1}, log = -1;
    int rc = fs_mkdir_p(logs, 0755, e);
    if (rc == 0 && (log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) < 0)
        rc = err_errno(e, "%s", path);
    if (rc == 0 && pipe2(fds, O_CLOEXEC) < 0)
        rc = err_errno(e, "pipe");
    if (rc == 0 && (*pid = fork()) < 0)
        rc = err_errno(e, "fork");
    if (rc == 0 && *pid == 0) {
        int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
        setsid();
        dup2(null, STDIN_FILENO);
        dup2(log, STDOUT_FILENO);
        dup2(log, STDERR_FILENO);
        close(null);
    }
    *ready_fd = fds[*pid == 0];
    if (fds[0] >= 0)
        close(fds[*pid != 0]);
    if (log >= 0)
        close(log);
    free(path);
    free(logs);
    return rc;
}

/* In the parent: waits until the background process says that the run is up, or ends. */
static int wait_ready(const struct rundir *run, pid_t pid, int fd, struct err *e)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    char byte;
    int n = poll(&p, 1, READY_TIMEOUT_MS);
    if (n == 0)
        return err_set(e, ERR_TIMEOUT, "%s: not up after %d s; see %s/logs", run->path,
            READY_TIMEOUT_MS / 1000, run->path);
    if (n > 0 && read(fd, &byte, 1) == 1) {
        printf("%s runs in the background, process %d\n  ops/status %s --watch\n  ops/stop %s\n",
            run->path, (int)pid, run->path, run->path);
        return 0;
    }
    struct buf last = BUF_INIT;
    char *log = rundir_path(run, "logs/launch.log");
    last_error(log, 0, &last);
    err_set(e, ERR_STATE, "%s", last.len ? last.data : "the background process ended");
    buf_release(&last);
    free(log);
    waitpid(pid, NULL, WNOHANG);
    return e->code;
}

static void print_summary(const struct view *v)
{
    struct buf text = BUF_INIT;
    view_print_summary(v, &text);
    fputs(text.data, stdout);
    fflush(stdout);
    buf_release(&text);
}

static int run_it(const struct rundir *run, const char *bin_dir, int ready_fd, struct view *v)
{
    struct supervisor_options options = {bin_dir, ready_fd};
    struct screen screen;
    struct err e = {0};
    int lock = lock_run(run, &e);
    if (lock < 0)
        return failed(&e);
    screen_start(&screen);
    screen_say(&screen, "%s: %s", run->path, v->checkpoint < 0 ? "a new run" : "continues");
    int rc = supervise(run, &options, v, &screen, &e);
    screen_clear(&screen);
    struct err unread;
    if (view_read(v, &unread) < 0)
        fprintf(stderr, "fb-launch: %s\n", unread.msg);
    print_summary(v);
    close(lock);
    if (rc < 0)
        return failed(&e);
    if (!view_finished(v))
        printf("continue with: ops/resume %s\n", run->path);
    return 0;
}

static int launch(const struct arguments *a, const char *bin_dir, const struct rundir *run)
{
    struct view v;
    struct err e = {0};
    pid_t pid = 0;
    int ready_fd = -1, status;
    view_start(&v, run);
    if (view_read(&v, &e) < 0 || supervisor_check(bin_dir, &e) < 0) {
        status = failed(&e);
    } else if (view_finished(&v)) {
        printf("%s is finished already\n", run->path);
        print_summary(&v);
        status = 0;
    } else if (a->detach && go_background(run, &pid, &ready_fd, &e) < 0) {
        status = failed(&e);
    } else if (pid > 0) {
        status = wait_ready(run, pid, ready_fd, &e) < 0 ? failed(&e) : 0;
    } else {
        status = run_it(run, bin_dir, ready_fd, &v);
    }
    view_release(&v);
    return status;
}

int main(int argc, char **argv)
{
    struct arguments a = {0};
    struct rundir run;
    struct err e = {0};
    char bin_dir[PATH_MAX];
    process_open_streams();
    int status = read_arguments(argc, argv, &a);
    if (status >= 0)
        return status;
    if (find_bin_dir(bin_dir, &e) < 0 || (a.dry_run && dry_run(bin_dir, &a, &e) < 0) ||
        open_run(&a, &run, &e) < 0)
        return failed(&e);
    /* The daemons share the cores: their waiting threads sleep instead of spinning. */
    setenv("OMP_WAIT_POLICY", "passive", 0);
    status = launch(&a, bin_dir, &run);
    rundir_release(&run);
    return status == 0 && process_flush_output(&e) < 0 ? failed(&e) : status;
}
