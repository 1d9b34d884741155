/*
 * The memory of one trainer, by purpose, as it is planned at start: printed by fb-plan and logged
 * by fb-trainer. tests/run/memory.sh holds the sum against the peak that the kernel counted.
 */
#ifndef TRAINER_PLAN_MEMORY_H
#define TRAINER_PLAN_MEMORY_H

#include "common/plan.h"
#include "kernels/model.h"

/* Share of a rank of so many. */
struct plan_rank {
    int rank, world;
};

struct plan_memory_part {
    char key[24];     /* "activations_2" */
    const char *what; /* "activations of a pass" */
    size_t bytes;
};

struct plan_memory {
    struct plan_memory_part parts[9 + CONFIG_MAX_PASSES];
    int count;
    size_t total;
    int passes;  /* sets of activations */
    int sharing; /* 1: passes after the first compute their fused tokens alone (kernels/model.h) */
};

/* What a trainer asks of its model; recompute by pass (CONFIG_MAX_PASSES). */
struct model_limits plan_model_limits(const struct plan *p, const enum recompute *recompute);

/* d: its operations say how much scratch they need. */
int plan_memory_make(const struct plan *p, const enum recompute *recompute, struct device *d,
    struct plan_rank rank, struct plan_memory *out, struct err *e);

/* Bytes of a part, 0 where there is none. */
size_t plan_memory_of(const struct plan_memory *m, const char *key);

#endif
