// Prefix mix-in and jitter: which inputs of a row are fused, and the key of its noise.
#include <string.h>

#include "common/plan.h"
#include "common/plan_keys.h"

static uint64_t row_key(const struct plan *p, enum plan_purpose purpose, uint64_t id, int pass)
{
    return rng_key(rng_key(plan_key(p->c.train.seed, purpose), id), (uint64_t)pass);
}

/* Tokens of a document of `len` that stay plain: only the first, or a uniform cut. */
static int plain_tokens(const struct plan *p, uint64_t key, uint64_t document, int len)
{
    if (rng_unit(key, 2 * document) < p->c.train.fully_fused)
        return 1;
    return 1 + (int)(rng_unit(key, 2 * document + 1) * len);
}

void plan_fuse_mask(
    const struct plan *p, uint64_t sample_id, int pass, const uint8_t *doc_starts, uint8_t *mask)
{
    uint64_t key = row_key(p, PLAN_PREFIX, sample_id, pass);
    int seq = p->c.data.seq_len;
    uint64_t document = 0;
    for (int start = 0, end; start < seq; start = end, document++) {
        end = start + 1;
        while (end < seq && !doc_starts[end])
            end++;
        int plain = plain_tokens(p, key, document, end - start);
        memset(mask + start, 0, (size_t)plain);
        memset(mask + start + plain, 1, (size_t)(end - start - plain));
    }
}

uint64_t plan_noise_key(const struct plan *p, uint64_t sample_id, int pass)
{
    return row_key(p, PLAN_NOISE, sample_id, pass);
}
