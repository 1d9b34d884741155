#include "ops/supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fs.h"
#include "ops/child.h"
#include "ops/control.h"
#include "ops/last_error.h"

#define MAX_CHILDREN   64
#define STATUS_SECONDS 0.5
#define SILENT_SECONDS 5.0   /* without an answer the last status is no longer shown */
#define STOP_SECONDS   180.0 /* a clean stop: the step under way and its checkpoint */
#define LEAVE_SECONDS  15.0  /* the others, after the scheduler has left */
#define TERM_SECONDS   15.0  /* from SIGTERM to SIGKILL */
#define RETURN_SECONDS 10.0  /* a daemon that left before the scheduler did comes back */
#define EVALUATOR_NICE 10

/* In this order: each stage only ever goes on to a later one. */
enum stage { RUNNING, STOPPING, LEAVING, TERMINATING, KILLING };

struct supervisor {
    const struct rundir *run;
    struct view *view;
    struct screen *screen;
    struct control *control;
    struct child kids[MAX_CHILDREN]; /* the first is the scheduler */
    int count;
    char *logs;
    int signals; /* signalfd */
    int ready_fd;
    enum stage stage;
    double deadline;             /* of the stage; beyond it the next begins */
    double next_ask, last_heard; /* status */
    int rc;                      /* what supervise() will return */
    struct err *e;
};

/* -- the daemons -- */

static const char *const programs[] = {"fb-scheduler", "fb-loader", "fb-trainer", "fb-evaluator"};

int supervisor_check(const char *bin_dir, struct err *e)
{
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        char *path = mem_printf("%s/%s", bin_dir, programs[i]);
        int ok = access(path, X_OK) == 0;
        if (!ok)
            err_errno(e, "%s (run make first)", path);
        free(path);
        if (!ok)
            return ERR_STATE;
    }
    return 0;
}

/* Adds `program --run RUN arg value` under `name`. */
static void add(struct supervisor *s, const char *bin_dir, const char *program, const char *name,
    const char *arg, const char *value)
{
    struct child *c = &s->kids[s->count++];
    snprintf(c->name, sizeof c->name, "%s", name);
    c->argv[0] = mem_printf("%s/%s", bin_dir, program);
    c->argv[1] = mem_strdup("--run");
    c->argv[2] = mem_strdup(s->run->path);
    if (arg) {
        c->argv[3] = mem_strdup(arg);
        c->argv[4] = mem_strdup(value);
    }
}

/*
 * Several ranks are one child, mpirun: it starts them on this machine and, when one dies, ends the
 * others, so that all start again together. Ranks may be more than cores; none is bound to one;
 * they speak through shared memory of the plain kind (process_vm_readv is forbidden in many
 * containers).
 */
static void add_ranks(struct supervisor *s, const char *bin_dir, int world)
{
    static const char *const options[] = {"mpirun", "--allow-run-as-root", "--oversubscribe",
        "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,vader", "--mca",
        "btl_vader_single_copy_mechanism", "none", "--mca", "mpi_yield_when_idle", "1", "-n"};
    struct child *c = &s->kids[s->count++];
    size_t n = 0;
    snprintf(c->name, sizeof c->name, "trainers");
    for (; n < sizeof options / sizeof *options; n++)
        c->argv[n] = mem_strdup(options[n]);
    c->argv[n++] = mem_printf("%d", world);
    c->argv[n++] = mem_printf("%s/%s", bin_dir, programs[2]);
    c->argv[n++] = mem_strdup("--run");
    c->argv[n++] = mem_strdup(s->run->path);
    c->argv[n++] = mem_strdup("--world");
    c->argv[n++] = mem_printf("%d", world);
}

static void add_all(struct supervisor *s, const char *bin_dir)
{
    int trainers = s->run->config.process.trainers;
    add(s, bin_dir, programs[0], "scheduler", NULL, NULL);
    add(s, bin_dir, programs[1], "loader", NULL, NULL);
    if (trainers > 1)
        add_ranks(s, bin_dir, trainers);
    else
        add(s, bin_dir, programs[2], "trainer-0", "--rank", "0");
    for (int i = 0; i < s->run->config.process.evaluators && s->count < MAX_CHILDREN; i++) {
        char name[32], number[16];
        snprintf(name, sizeof name, "evaluator-%d", i);
        snprintf(number, sizeof number, "%d", i);
        add(s, bin_dir, programs[3], name, "--rank", number);
        s->kids[s->count - 1].nice = EVALUATOR_NICE;
    }
}

/* -- stages -- */

static void signal_all(const struct supervisor *s, int sig)
{
    for (int i = 0; i < s->count; i++)
        child_signal(&s->kids[i], sig);
}

static void enter(struct supervisor *s, enum stage stage, double seconds)
{
    if (stage <= s->stage)
        return;
    s->stage = stage;
    s->deadline = clock_seconds() + seconds;
    if (stage == TERMINATING)
        signal_all(s, SIGTERM);
    if (stage == KILLING)
        signal_all(s, SIGKILL);
}

static void ask_stop(struct supervisor *s)
{
    screen_say(s->screen, "stopping: the step under way is finished and saved first (again to "
                          "stop at once)");
    enter(s, STOPPING, STOP_SECONDS);
    control_ask_stop(s->control, NULL);
}

static void cut_short(struct supervisor *s, const char *why)
{
    if (s->rc == 0)
        s->rc = err_set(s->e, ERR_STOPPED,
            "stopped at once: %s; resume continues from the last "
            "checkpoint",
            why);
    enter(s, TERMINATING, TERM_SECONDS);
}

static void stage_timed_out(struct supervisor *s)
{
    switch (s->stage) {
    case STOPPING:
        cut_short(s, "the clean stop took too long");
        break;
    case LEAVING:
        enter(s, TERMINATING, TERM_SECONDS);
        break;
    default:
        enter(s, KILLING, TERM_SECONDS);
    }
}

/* -- children -- */

static void fatal(struct supervisor *s, const struct child *c)
{
    struct buf last = BUF_INIT;
    char how[64], *log = mem_printf("%s/%s.log", s->logs, c->name);
    child_end_words(c->status, how);
    last_error(log, c->log_from, &last);
    if (s->rc == 0)
        s->rc = err_set(s->e, ERR_STATE, "%s ended with %s%s and is not to be restarted: %s (%s)",
            c->name, how, c->deaths < CHILD_MAX_DEATHS ? "" : " once too often",
            last.len ? last.data : "it says nothing", log);
    buf_release(&last);
    free(log);
    enter(s, TERMINATING, TERM_SECONDS);
}

static void restart_later(struct supervisor *s, struct child *c, double now)
{
    struct buf last = BUF_INIT;
    char how[64], *log = mem_printf("%s/%s.log", s->logs, c->name);
    child_end_words(c->status, how);
    last_error(log, c->log_from, &last);
    screen_say(s->screen, "%s ended with %s; starting it again in %.1f s: %s (%s)", c->name, how,
        c->restart_at - now, last.len ? last.data : "it says nothing", log);
    buf_release(&last);
    free(log);
}

static void child_gone(struct supervisor *s, struct child *c, int status)
{
    double now = clock_seconds();
    int scheduler = c == &s->kids[0];
    enum child_verdict verdict = child_ended(c, status, now);
    if (s->stage >= LEAVING) {
        c->state = CHILD_OUT;
        return;
    }
    if (verdict == CHILD_FATAL) {
        fatal(s, c);
    } else if (verdict == CHILD_RESTART) {
        restart_later(s, c, now);
    } else if (scheduler) {
        enter(s, LEAVING, LEAVE_SECONDS);
    } else {
        c->state = CHILD_WAITING;
        c->restart_at = now + RETURN_SECONDS;
    }
}

static void reap(struct supervisor *s)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < s->count; i++)
            if (s->kids[i].state == CHILD_RUNNING && s->kids[i].pid == pid)
                child_gone(s, &s->kids[i], status);
}

/* What left when its work was done stays away. */
static int not_needed(const struct supervisor *s, const struct child *c)
{
    static const char *const states[] = {"evaluating", "finished", "stopped", "failed"};
    if (c->status != 0)
        return 0;
    for (size_t i = 0; i < sizeof states / sizeof *states; i++)
        if (strcmp(view_state(s->view), states[i]) == 0)
            return 1;
    return 0;
}

static int start_due(struct supervisor *s)
{
    double now = clock_seconds();
    for (int i = 0; i < s->count && s->stage < LEAVING; i++) {
        struct child *c = &s->kids[i];
        if (c->state == CHILD_WAITING && now >= c->restart_at && not_needed(s, c)) {
            c->state = CHILD_OUT;
        } else if (c->state == CHILD_WAITING && now >= c->restart_at) {
            int rc = child_start(c, s->logs, s->e);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

static int running(const struct supervisor *s)
{
    int n = 0;
    for (int i = 0; i < s->count; i++)
        n += s->kids[i].state == CHILD_RUNNING;
    return n;
}

/* -- events -- */

static void take_signals(struct supervisor *s)
{
    struct signalfd_siginfo info;
    while (read(s->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGCHLD)
            reap(s);
        else if (s->stage == RUNNING)
            ask_stop(s);
        else
            cut_short(s, strsignal((int)info.ssi_signo));
    }
}

static void take_messages(struct supervisor *s)
{
    int type;
    json_t *body;
    while (control_take(s->control, 0, &type, &body, NULL) == 1) {
        s->last_heard = clock_seconds();
        if (type != WIRE_STATUS) {
            json_decref(body);
            continue;
        }
        view_take_status(s->view, body);
        if (s->ready_fd >= 0) {
            if (write(s->ready_fd, "", 1) < 0)
                screen_say(s->screen, "the caller is gone");
            s->ready_fd = -1;
        }
    }
}

static void keep_view(struct supervisor *s)
{
    double now = clock_seconds();
    if (now < s->next_ask)
        return;
    s->next_ask = now + STATUS_SECONDS;
    if (s->kids[0].state == CHILD_RUNNING)
        control_ask_status(s->control, NULL);
    if (now - s->last_heard > SILENT_SECONDS)
        view_take_status(s->view, NULL);
    /* A stop asked for while the scheduler was away is asked for again. */
    if (s->stage == STOPPING)
        control_ask_stop(s->control, NULL);
    struct err e;
    if (view_read(s->view, &e) < 0)
        screen_say(s->screen, "%s", e.msg);
    screen_draw(s->screen, s->view);
}

static int loop(struct supervisor *s)
{
    while (running(s) || s->stage < LEAVING) {
        struct bus_poll items[] = {{control_endpoint(s->control), -1, 0}, {NULL, s->signals, 0}};
        int rc = bus_wait(items, 2, 100, s->e);
        if (rc < 0)
            return rc;
        take_signals(s);
        take_messages(s);
        rc = start_due(s);
        if (rc < 0)
            return rc;
        keep_view(s);
        if (s->stage > RUNNING && clock_seconds() > s->deadline)
            stage_timed_out(s);
    }
    return 0;
}

static int open_signals(struct err *e)
{
    static const int wanted[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        sigaddset(&set, wanted[i]);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    return fd < 0 ? err_errno(e, "signalfd") : fd;
}

/* Leaves no child behind, whatever went wrong before. */
static void end_all(struct supervisor *s)
{
    signal_all(s, SIGKILL);
    for (int i = 0; i < s->count; i++) {
        if (s->kids[i].state == CHILD_RUNNING)
            waitpid(s->kids[i].pid, NULL, 0);
        child_release(&s->kids[i]);
    }
}

int supervise(const struct rundir *run, const struct supervisor_options *o, struct view *v,
    struct screen *screen, struct err *e)
{
    struct supervisor s = {.run = run,
        .view = v,
        .screen = screen,
        .ready_fd = o->ready_fd,
        .signals = -1,
        .last_heard = clock_seconds(),
        .e = e};
    s.logs = rundir_path(run, "logs");
    add_all(&s, o->bin_dir);
    /* Blocked before ZeroMQ starts its thread, which must not take them. */
    int rc = s.signals = open_signals(e);
    if (rc >= 0)
        rc = fs_mkdir_p(s.logs, 0755, e);
    if (rc >= 0)
        rc = control_new(run, &s.control, e);
    for (int i = 0; i < s.count && rc >= 0; i++)
        rc = child_start(&s.kids[i], s.logs, e);
    if (rc >= 0)
        rc = loop(&s);
    end_all(&s);
    view_take_status(v, NULL);
    control_free(&s.control);
    if (s.signals >= 0)
        close(s.signals);
    free(s.logs);
    return rc < 0 ? rc : s.rc;
}
