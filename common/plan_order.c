// The order of samples: which row of which source a global ordinal stands for. No state, O(1).
#include "common/check.h"
#include "common/plan.h"
#include "common/plan_keys.h"

#define FEISTEL_ROUNDS 6

uint64_t feistel(uint64_t key, uint64_t i, uint64_t n)
{
    CHECK(i < n && n <= (uint64_t)1 << 62);
    int half = 1; /* bits of each half: the smallest even power of two not below n */
    while ((uint64_t)1 << (2 * half) < n)
        half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    /* The network permutes [0, 4^half); walking its cycle until below n permutes [0, n). */
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
            uint64_t next = left ^ (rng_u64(rng_key(key, round), right) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

static uint64_t sample_id(int source, uint64_t epoch, uint64_t index)
{
    return (uint64_t)source << 56 | epoch << 40 | index;
}

struct sample plan_train_sample(const struct plan *p, uint64_t ordinal)
{
    uint64_t block = ordinal / PLAN_BLOCK_SLOTS;
    uint64_t slot = feistel(rng_key(plan_key(p->c.train.seed, PLAN_SLOTS), block),
        ordinal % PLAN_BLOCK_SLOTS, PLAN_BLOCK_SLOTS);
    int s = 0;
    while (slot >= (uint64_t)p->sources[s].quota) /* whose quota the permuted slot falls into */
        slot -= (uint64_t)p->sources[s++].quota;
    uint64_t draw = block * (uint64_t)p->sources[s].quota + slot, n = p->sources[s].train_samples;
    struct sample out = {.source = s, .epoch = draw / n};
    uint64_t key = rng_key(plan_key(p->c.train.seed, PLAN_SOURCE), (uint64_t)s);
    out.index = feistel(rng_key(key, out.epoch), draw % n, n);
    out.id = sample_id(s, out.epoch, out.index);
    return out;
}

uint64_t plan_val_rows(const struct plan *p)
{
    uint64_t rows = 0;
    for (int s = 0; s < p->source_count; s++)
        rows += p->sources[s].val_samples;
    return rows;
}

struct sample plan_val_sample(const struct plan *p, uint64_t i)
{
    uint64_t at = feistel(plan_key(p->c.train.seed, PLAN_VAL), i, plan_val_rows(p));
    int s = 0;
    while (at >= p->sources[s].val_samples)
        at -= p->sources[s++].val_samples;
    return (struct sample){s, PLAN_VAL_EPOCH, at, sample_id(s, PLAN_VAL_EPOCH, at)};
}
