/*
 * The cursor: where a run stands in its data, and the digest chain that proves what it saw.
 *
 * A step's digests are commutative sums (mod 2^64) over its rows, so they do not depend on ranks or
 * order: `ids` over rng_mix(sample id), which the plan alone determines, and `content` over
 * row_digest(id, tokens), which loader and trainer compute apart. The chain is
 * SHA-256(previous hex ‖ step ‖ ids ‖ content), little-endian 64-bit numbers; it starts from the
 * plan hash.
 */
#ifndef COMMON_CURSOR_H
#define COMMON_CURSOR_H

#include <stdint.h>

#include <jansson.h>

#include "common/plan.h"

#define CURSOR_VERSION 1

struct step_digest {
    uint64_t ids, content;
};

struct cursor {
    int64_t step;                             /* steps done; the next step's number */
    uint64_t ordinal;                         /* g: ordinals consumed */
    uint64_t source_rows[CONFIG_MAX_SOURCES]; /* rows drawn from each source so far */
    char plan_hash[SHA256_HEX];
    char chain[SHA256_HEX];
};

uint64_t row_digest(uint64_t sample_id, const uint32_t *tokens, size_t n);
/* What the plan says the ids digest of a step is. */
uint64_t plan_ids_digest(const struct plan *p, int64_t step);

void cursor_start(struct cursor *c, const struct plan *p);
/* Appends one step (must be c->step); ERR_MISMATCH where d->ids is not the plan's. */
int cursor_advance(
    struct cursor *c, const struct plan *p, const struct step_digest *d, struct err *e);
json_t *cursor_to_json(const struct cursor *c, const struct plan *p);
int cursor_from_json(const json_t *j, const struct plan *p, struct cursor *out, struct err *e);

#endif
