/* summary.json of a finished run: what was trained and the table of its evaluations. */
#ifndef SCHEDULER_SUMMARY_H
#define SCHEDULER_SUMMARY_H

#include "scheduler/core.h"

int summary_write(const struct scheduler *s, struct err *e);

#endif
