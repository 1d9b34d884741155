/* What the bench prints: tables for people, or one JSON object. */
#ifndef TRAINER_BENCH_REPORT_H
#define TRAINER_BENCH_REPORT_H

#include "trainer/bench_case.h"

/* Rates before and after that differ by more than this share make a run unclean. */
#define BENCH_CLEAN 0.05

struct bench_row {
    const struct bench_config *config;
    struct bench_passes passes;
    struct bench_case_result ours;
    int has_peer;
    struct bench_steps peer;
};

struct bench_run {
    int threads;
    double fma_before, fma_after;
    struct bench_row *rows;
    int count;
    const char *no_peer; /* why there is none; NULL where there is */
    double naive[8];     /* rate of plain loops by configuration, as in bench_configs; 0: none */
};

void bench_print_table(const struct bench_run *r);
/* Time by operation of one row. */
void bench_print_ops(const struct bench_row *row);
void bench_print_json(const struct bench_run *r);

#endif
