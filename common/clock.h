/* The monotonic clock, in seconds: for timeouts and rates, never for what decides a run. */
#ifndef COMMON_CLOCK_H
#define COMMON_CLOCK_H

double clock_seconds(void);

#endif
