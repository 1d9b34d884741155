#include "ops/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"

#define FIRST_DELAY    0.5
#define LONGEST_DELAY  30.0
#define SETTLED        60.0
#define EXIT_RESTART   111
#define EXIT_SIGNALLED 128 /* and the signal's number */

static int log_open(const char *log_dir, const char *name, struct err *e)
{
    char *path = mem_printf("%s/%s.log", log_dir, name);
    char *old = mem_printf("%s.1", path);
    struct stat st;
    if (stat(path, &st) == 0 && st.st_size > (off_t)CHILD_LOG_BYTES)
        rename(path, old);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0)
        fd = err_errno(e, "%s", path);
    free(old);
    free(path);
    return fd;
}

/* In the child, between fork and exec: only async-signal-safe calls. */
static void become(const struct child *c, int log, pid_t parent)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(EXIT_RESTART);
    (void)!nice(c->nice); /* refused, it runs at the parent's priority */
    int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(log, 1);
    dup2(log, 2);
    execvp(c->argv[0], c->argv);
    dprintf(2, "%s: %s\n", c->argv[0], strerror(errno));
    _exit(1);
}

int child_start(struct child *c, const char *log_dir, struct err *e)
{
    int log = log_open(log_dir, c->name, e);
    struct stat st;
    if (log < 0)
        return log;
    c->log_from = fstat(log, &st) == 0 ? st.st_size : 0;
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        become(c, log, parent);
    close(log);
    if (pid < 0)
        return err_errno(e, "%s: cannot start a process", c->name);
    c->pid = pid;
    c->state = CHILD_RUNNING;
    c->started_at = clock_seconds();
    return 0;
}

enum child_verdict child_ended(struct child *c, int status, double now)
{
    c->pid = 0;
    c->status = status;
    c->state = CHILD_OUT;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return CHILD_LEFT;
    if (WIFEXITED(status) && WEXITSTATUS(status) != EXIT_RESTART &&
        WEXITSTATUS(status) <= EXIT_SIGNALLED)
        return CHILD_FATAL;
    if (c->delay <= 0 || now - c->started_at >= SETTLED) {
        c->delay = FIRST_DELAY;
        c->deaths = 0;
    }
    if (++c->deaths >= CHILD_MAX_DEATHS)
        return CHILD_FATAL;
    c->state = CHILD_WAITING;
    c->restart_at = now + c->delay;
    c->delay = c->delay * 2 < LONGEST_DELAY ? c->delay * 2 : LONGEST_DELAY;
    return CHILD_RESTART;
}

void child_signal(const struct child *c, int sig)
{
    if (c->state == CHILD_RUNNING && c->pid > 0)
        kill(c->pid, sig);
}

void child_release(struct child *c)
{
    for (int i = 0; i < CHILD_MAX_ARGS; i++)
        free(c->argv[i]);
    memset(c, 0, sizeof *c);
}

void child_end_words(int status, char out[64])
{
    if (WIFSIGNALED(status))
        snprintf(out, 64, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(out, 64, "exit %d", WEXITSTATUS(status));
}
