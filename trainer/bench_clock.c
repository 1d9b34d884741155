#include "trainer/bench_clock.h"

#include <time.h>

static clockid_t clock_in_use = CLOCK_MONOTONIC;

void bench_clock_use_cpu(void)
{
    clock_in_use = CLOCK_PROCESS_CPUTIME_ID;
}

int bench_clock_is_cpu(void)
{
    return clock_in_use != CLOCK_MONOTONIC;
}

double bench_seconds(void)
{
    struct timespec t;
    clock_gettime(clock_in_use, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
