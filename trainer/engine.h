/*
 * What computes: device, model and optimizer of one rank. It knows the plan and nothing of sockets
 * or time.
 *
 * After engine_load() at step s the state is a pure function of (plan, s, checkpoint):
 * engine_step() moves it by exactly one optimizer step. Belongs to one thread. All large memory is
 * taken in engine_new().
 */
#ifndef TRAINER_ENGINE_H
#define TRAINER_ENGINE_H

#include <stdint.h>

#include "common/cursor.h"
#include "common/err.h"
#include "common/plan.h"
#include "kernels/coll.h"
#include "kernels/model.h"
#include "trainer/feed.h"
#include "trainer/plan_memory.h"
#include "trainer/saver.h"

struct engine;

struct engine_settings {
    const struct plan *plan; /* stays the caller's */
    int threads;             /* of the CPU device; 0: every core */
    int rank, world;
    const enum recompute *recompute; /* by pass (CONFIG_MAX_PASSES); NULL: none */
};

/* One finished step, as it is reported. Losses and norm are of all ranks; rows, tokens and digest
 * of this one. */
struct engine_report {
    int64_t step;
    int passes;
    double losses[CONFIG_MAX_PASSES]; /* L_1 … L_K */
    double total;                     /* L_1 + λ · mean(L_2 … L_K) */
    double grad_norm, lr;
    int skipped; /* 1: the gradient was not finite and nothing moved */
    int rows;
    int64_t tokens;
    struct step_digest digest;
};

/* Asked before each micro-batch and while waiting for other ranks: nonzero abandons the step. */
typedef int engine_abandon_fn(void *ctx);

int engine_new(const struct engine_settings *settings, struct engine **out, struct err *e);
void engine_free(struct engine **g);

/* The ranks it computes with; before the first step, and once. The coll stays the caller's. With
 * one rank it may be left out. */
void engine_join(struct engine *g, struct coll *ranks);

/* The weights of the plan's seed, or of the checkpoint that train.init_from names; an optimizer
 * that has done nothing. */
int engine_load_fresh(struct engine *g, struct err *e);
/* Weights and optimizer of a checkpoint directory; both files must be of `step` and of this plan.
 */
int engine_load(struct engine *g, const char *dir, int64_t step, struct err *e);

/*
 * Runs `step` on the rows the feed holds. 1: done, *out filled; 0: abandoned before the update
 * (weights and optimizer are as before). Negative: the other ranks cannot be waited for any longer,
 * and this one is out of step with them: the process has to end. The feed keeps its rows until
 * feed_done().
 */
int engine_step(struct engine *g, struct feed *f, int64_t step, engine_abandon_fn *abandon,
    void *ctx, struct engine_report *out, struct err *e);

/* What the saver copies, and the tables it is laid out by: of the weights, of the second moments.
 */
struct saver_source engine_source(const struct engine *g);
const struct weight_table *engine_weights(const struct engine *g);

/* What was planned. */
void engine_memory(const struct engine *g, struct plan_memory *out);
int engine_threads(const struct engine *g);
/* 1: the device multiplies bf16 in hardware. */
int engine_bf16_native(const struct engine *g);

#endif
