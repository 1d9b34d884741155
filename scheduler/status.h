/* clang-format off */
/*
 * The STATUS document: what `ops/status` and the end of a run show. One JSON object:
 *
 *   name              run.name
 *   state             "starting" | "training" | "saving" | "evaluating" | "finished" | "stopped" | "failed"
 *   reason            why it stopped or failed; null while it runs
 *   step, steps       steps done, steps of the whole run
 *   tokens            trained so far (targets of steps done)
 *   tokens_per_second over the recent steps; null before the second one
 *   eta_seconds       until the last step; null when unknown
 *   passes, lr, grad_norm, losses   of the last step; null before the first. losses: [L_1 … L_passes],
 *                     null in place of a value that was not finite
 *   pass_losses       [{passes: k, step, loss}]: the last known loss of each pass
 *   run_epoch, world, plan_hash, pid, uptime_seconds
 *   members           [{role, rank, pid, peer, age_seconds}], age: since it was last heard
 *   last_checkpoint   "step-00000100" or null; its step is last_checkpoint_step (0 without one)
 *   checkpoints       [names] of what lies committed on disk, ascending
 *   evals             [{step, suite, regime, result: {…}} or {…, error}], ascending by step
 *   jobs              {pending, leased}
 *   warnings          [text], the newest last
 *   events            [{time, run_epoch, kind, text}], the last of the journal, the newest last
 *   dropped           messages that were not for it, or not right
 */
/* clang-format on */
#ifndef SCHEDULER_STATUS_H
#define SCHEDULER_STATUS_H

#include <stdint.h>

#include <jansson.h>

struct scheduler;

/* The whole document; the caller's. */
json_t *status_json(const struct scheduler *s, int64_t now_ms);

/* Parts of it that a summary shows too. */
int64_t status_tokens(const struct scheduler *s, int64_t steps_done);
json_t *status_pass_losses(const struct scheduler *s);

#endif
