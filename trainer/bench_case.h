/*
 * What the bench measures: the configurations, one training run of some steps on random tokens, and
 * what is kept of it.
 *
 * Each measurement runs in a process of its own (bench_in_child), so that its peak memory is its
 * own and the parent never starts threads.
 */
#ifndef TRAINER_BENCH_CASE_H
#define TRAINER_BENCH_CASE_H

#include <stddef.h>

#include "common/err.h"
#include "kernels/model.h"
#include "trainer/bench_device.h"

struct bench_config {
    const char *name;
    int dim, layers, heads, ffn, vocab, seq, batch;
};
/* Ends with a name NULL. */
extern const struct bench_config bench_configs[];

void bench_model(const struct bench_config *b, struct model_config *out);

/* A step's products, its passes, and whether those after the first compute only what their masks
 * fuse. */
struct bench_passes {
    int count, shared;
    enum precision precision;
};

/* How long to measure. */
struct bench_effort {
    int threads;    /* 0: every core */
    double seconds; /* of timed steps; at least BENCH_MIN_STEPS of them */
};
enum { BENCH_WARM_STEPS = 2, BENCH_MIN_STEPS = 3, BENCH_MAX_STEPS = 512 };

/* Steps of one side: ours, or a peer's. Seconds are of one step. */
struct bench_steps {
    int count;
    double median, best; /* of the clock */
    double cpu;          /* of all threads, mean */
    double first_loss, last_loss;
    size_t peak_bytes; /* resident set, of the process */
};

/* Products of the run, again and alone. */
struct bench_ceiling {
    double flops;         /* of the products of one step */
    double seconds;       /* of one step's products, each at the best rate the library reached */
    double alone_seconds; /* the same as the device does them */
};

struct bench_case_result {
    struct bench_steps steps;
    struct bench_counts counts; /* of all timed steps together */
    struct bench_ceiling ceiling;
    struct model_memory memory;
    int threads;
    int64_t params;
    double flops; /* of one step: products and attention's visible half */
};

int bench_case_run(const struct bench_config *b, struct bench_passes passes,
    const struct bench_effort *effort, struct bench_case_result *out, struct err *e);

/* Calls fn(arg, result, e) in a child process; `result` (bytes) is what it left there. */
int bench_in_child(int (*fn)(void *arg, void *result, struct err *e), void *arg, void *result,
    size_t bytes, struct err *e);

#endif
