/* The clock that the bench measures by: the wall's, or the processor time of this process (of all
 * its threads), which other processes on a busy machine hardly change. */
#ifndef TRAINER_BENCH_CLOCK_H
#define TRAINER_BENCH_CLOCK_H

void bench_clock_use_cpu(void); /* from now on, also in processes that are forked */
int bench_clock_is_cpu(void);
double bench_seconds(void);

#endif
