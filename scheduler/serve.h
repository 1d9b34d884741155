/*
 * The scheduler's process: the run's lock, the control socket and signals around the core.
 */
#ifndef SCHEDULER_SERVE_H
#define SCHEDULER_SERVE_H

#include "common/rundir.h"

/*
 * Runs until the run is finished, stopped or failed. Returns the process's exit code: 0, 1 (the run
 * directory cannot be used), 100 or 111. What went wrong is logged.
 */
int scheduler_serve(const struct rundir *run);

#endif
