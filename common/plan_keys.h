/* The purposes for which a plan draws random numbers: each has its own key. Part of the plan's
 * version. */
#ifndef COMMON_PLAN_KEYS_H
#define COMMON_PLAN_KEYS_H

#include "common/rng.h"

enum plan_purpose {
    PLAN_SLOTS = 1,  /* order of the slots of a block */
    PLAN_SOURCE = 2, /* order of a source's rows in an epoch */
    PLAN_VAL = 3,    /* order of the validation rows */
    PLAN_PASSES = 4, /* pass count of a step */
    PLAN_PREFIX = 5, /* plain prefix of a document */
    PLAN_NOISE = 6,  /* jitter */
};

static inline uint64_t plan_key(uint64_t seed, enum plan_purpose purpose)
{
    return rng_key(rng_mix(seed), (uint64_t)purpose);
}

#endif
