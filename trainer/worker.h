/*
 * What computes: device, model and optimizer of one rank. It knows the plan and nothing of sockets
 * or time.
 *
 * After worker_load() at step s the state is a pure function of (plan, s, checkpoint):
 * worker_step() moves it by exactly one optimizer step. Belongs to one thread. All large memory is
 * taken in worker_new().
 */
#ifndef TRAINER_WORKER_H
#define TRAINER_WORKER_H

#include <stdint.h>

#include "common/cursor.h"
#include "common/err.h"
#include "common/plan.h"
#include "kernels/model.h"
#include "trainer/feed.h"
#include "trainer/saver.h"

struct worker;

struct worker_settings {
    const struct plan *plan; /* stays the caller's */
    int threads;             /* of the CPU device; 0: every core */
    int rank, world;
};

/* One finished step, as it is reported. Losses are means over this rank's counted targets. */
struct worker_report {
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

/* Asked before each micro-batch: nonzero abandons the step. */
typedef int worker_abandon_fn(void *ctx);

int worker_new(const struct worker_settings *settings, struct worker **out, struct err *e);
void worker_free(struct worker **w);

/* The weights of the plan's seed, an optimizer that has done nothing. */
int worker_load_fresh(struct worker *w, struct err *e);
/* Weights and optimizer of a checkpoint directory; both files must be of `step` and of this plan.
 */
int worker_load(struct worker *w, const char *dir, int64_t step, struct err *e);

/*
 * Runs `step` on the rows the feed holds. 1: done, *out filled; 0: abandoned before the update
 * (weights and optimizer are as before). The feed keeps its rows until feed_done().
 */
int worker_step(struct worker *w, struct feed *f, int64_t step, worker_abandon_fn *abandon,
    void *ctx, struct worker_report *out);

/* What the saver copies, and the table it is laid out by. */
struct saver_source worker_source(const struct worker *w);
const struct weight_table *worker_weights(const struct worker *w);

/* Memory by purpose, bytes. */
struct worker_memory {
    struct model_memory model;
    size_t moments;
    int passes; /* sets of activations */
};
void worker_memory(const struct worker *w, struct worker_memory *out);
int worker_threads(const struct worker *w);

#endif
