/*
 * A plan and its costs, for people and as JSON.
 */
#ifndef TRAINER_PLAN_REPORT_H
#define TRAINER_PLAN_REPORT_H

#include <jansson.h>

#include "common/mem.h"
#include "trainer/plan_costs.h"

void plan_report_text(const struct plan *p, const struct plan_costs *c, struct buf *out);

/* {plan, plan_hash, params, steps, tokens, memory, flops, …}; the caller's. */
json_t *plan_report_json(const struct plan *p, const struct plan_costs *c);

#endif
