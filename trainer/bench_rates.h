/* Rates of this machine and of the library, for the bench to stand beside. */
#ifndef TRAINER_BENCH_RATES_H
#define TRAINER_BENCH_RATES_H

#include "trainer/bench_case.h"

/*
 * Multiply-adds per second (counted as two operations) of independent chains in registers, on
 * `threads` threads: what the processor gives just now. Median of a few short stretches.
 */
double bench_fma_rate(int threads);

/*
 * The products of `counts` (of `steps` steps), each alone on memory of its own: as the device does
 * them, and the best of oneDNN's sgemm, its matmul primitive, and that on weights it has reordered
 * beforehand.
 */
int bench_ceiling_measure(struct device *d, const struct bench_counts *counts, int steps,
    struct bench_ceiling *out, struct err *e);

/*
 * For scale: a linear layer's products, forward and both gradients, as three plain loops over rows
 * shared out among threads, as a first program would be written. Operations per second.
 */
double bench_naive_rate(int threads, int rows, int in, int out);

#endif
