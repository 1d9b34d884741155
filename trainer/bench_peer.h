/* The same model in another program, measured by a command of ours (tests/peer/torch_bench.py). */
#ifndef TRAINER_BENCH_PEER_H
#define TRAINER_BENCH_PEER_H

#include "trainer/bench_case.h"

/* Runs "COMMAND --dim … --passes K …" through the shell and reads the steps from its JSON line. For
 * precision bf16 it is asked for its own ("--precision bf16": autocast). */
int bench_peer_run(const char *command, const struct bench_config *b, struct bench_passes passes,
    const struct bench_effort *effort, struct bench_steps *out, struct err *e);

#endif
