/*
 * Runs the daemons of one run on this machine until it is finished or stopped: starts them,
 * restarts what dies, stops everything when one says that a restart is no use, passes on SIGINT and
 * SIGTERM as a clean stop, and shows how far the run is.
 */
#ifndef OPS_SUPERVISOR_H
#define OPS_SUPERVISOR_H

#include "common/rundir.h"
#include "ops/screen.h"
#include "ops/view.h"

struct supervisor_options {
    const char *bin_dir; /* where fb-scheduler and the others lie */
    int ready_fd; /* gets one byte when the scheduler has answered; −1 none; stays the caller's */
};

/*
 * 0: the run came to its end or was stopped cleanly. ERR_STATE: a daemon asked not to be restarted
 * (its reason is in e). ERR_STOPPED: cut short by a second signal or because a clean stop took too
 * long. SIGINT, SIGTERM, SIGHUP and SIGCHLD are blocked and taken in here.
 */
int supervise(const struct rundir *run, const struct supervisor_options *o, struct view *v,
    struct screen *screen, struct err *e);

/* The programs exist beside this one, and can be run. */
int supervisor_check(const char *bin_dir, struct err *e);

#endif
