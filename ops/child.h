/*
 * One daemon under the supervisor: started with its log, ended, restarted with back-off.
 *
 *     child_start(&c, log_dir, &e);
 *     … waitpid(c.pid, &status, WNOHANG) …
 *     if (child_ended(&c, status, now) == CHILD_RESTART)
 *         … when now ≥ c.restart_at: child_start() again
 *
 * What an exit means: 0 it left; 111 or a signal (of its own or, from mpirun, 128 + that of a
 * rank): restart it, until it has died too often one after the other; anything else (1, 2, 100): do
 * not, and the run stops. A child dies with its
 * parent and leaves its terminal's Ctrl-C to the parent.
 */
#ifndef OPS_CHILD_H
#define OPS_CHILD_H

#include <sys/types.h>

#include "common/err.h"
#include "common/mem.h"

#define CHILD_MAX_ARGS   32
#define CHILD_MAX_DEATHS 20          /* in about eight minutes */
#define CHILD_LOG_BYTES  (16u << 20) /* a log over this is moved to NAME.log.1 at the next start */

enum child_state { CHILD_OUT, CHILD_RUNNING, CHILD_WAITING };
enum child_verdict { CHILD_LEFT, CHILD_RESTART, CHILD_FATAL };

struct child {
    char name[32];              /* names its log: "trainer-0" */
    char *argv[CHILD_MAX_ARGS]; /* NULL-terminated; argv[0] is a path, or a name looked for in PATH;
                                   owned */
    int nice;                   /* added to the niceness */
    enum child_state state;
    pid_t pid;
    int status;                    /* of waitpid, when it ended last */
    int deaths;                    /* one after the other, none a minute after its start */
    off_t log_from;                /* where in its log this life begins */
    double delay;                  /* back-off before the next restart, seconds */
    double started_at, restart_at; /* clock_seconds() */
};

/* Starts it with stdout and stderr appended to log_dir/NAME.log and stdin empty. */
int child_start(struct child *c, const char *log_dir, struct err *e);

/*
 * Takes in the status of its end at `now`: state and, for CHILD_RESTART, restart_at. The back-off
 * is 0.5 s doubling to 30 s; a child that ran for a minute starts over at 0.5 s.
 */
enum child_verdict child_ended(struct child *c, int status, double now);

void child_signal(const struct child *c, int sig); /* nothing when it is not running */
void child_release(struct child *c);               /* frees argv */

/* "exit 111", "signal 9 (Killed)" */
void child_end_words(int status, char out[64]);

#endif
