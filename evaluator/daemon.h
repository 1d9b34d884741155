/*
 * fb-evaluator as a daemon: asks the scheduler for jobs, scores them, reports until each result is
 * acknowledged. Never decides anything about the run and never holds up training.
 */
#ifndef EVALUATOR_DAEMON_H
#define EVALUATOR_DAEMON_H

#include "common/rundir.h"

/* Returns the process's exit status: 0 finished or told to stop, 100 refused, 111 restart me. */
int evaluator_daemon(const struct rundir *run, int rank, int threads);

#endif
