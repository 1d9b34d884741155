/*
 * A device that does what another does and keeps count: seconds and calls by operation, and for
 * products how often each shape occurred. For the bench only.
 *
 * Operations that are added to the table and not listed in bench_device.c go straight through:
 * their time shows as the difference between the step and the sum.
 */
#ifndef TRAINER_BENCH_DEVICE_H
#define TRAINER_BENCH_DEVICE_H

#include "kernels/device.h"

enum { BENCH_OPS_MAX = 64, BENCH_SHAPES_MAX = 64 };

/* A row of the table by operation. */
struct bench_op {
    char name[24];
    double seconds;
    double flops; /* of products; 0 elsewhere */
    int64_t calls;
};

/* A product that was asked for, and how often. */
struct bench_shape {
    int ta, tb, m, n, k;
    int accumulates; /* beta != 0 */
    int64_t calls;
    int bf16; /* operands rounded */
};

struct bench_counts {
    struct bench_op ops[BENCH_OPS_MAX];
    int op_count;
    struct bench_shape shapes[BENCH_SHAPES_MAX];
    int shape_count; /* those after the last are counted in ops only */
};

/* Takes `inner` over and frees it with the returned device: bench_device_free(). */
struct device *bench_device_new(struct device *inner);
void bench_device_free(struct device **d);

void bench_device_reset(struct device *d);
void bench_device_counts(const struct device *d, struct bench_counts *out);

#endif
