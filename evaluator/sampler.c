#include "evaluator/sampler.h"

#include <math.h>
#include <stdlib.h>

#include "common/rng.h"

static int32_t argmax(const float *x, int n)
{
    int32_t best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

static double log_sum_exp(const float *x, int n, double top)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += exp((double)x[i] - top);
    return log(sum) + top;
}

/* Descending by logit, ascending by id among equals. */
static int by_logit(const void *a, const void *b, void *ctx)
{
    const float *x = ctx;
    int32_t i = *(const int32_t *)a, k = *(const int32_t *)b;
    if (x[i] != x[k])
        return x[i] > x[k] ? -1 : 1;
    return i < k ? -1 : i > k;
}

static int32_t draw(
    const struct sampler *s, const float *logits, int vocab, double u, int32_t *order)
{
    for (int i = 0; i < vocab; i++)
        order[i] = i;
    qsort_r(order, (size_t)vocab, sizeof *order, by_logit, (void *)logits);
    int keep = s->top_k > 0 && s->top_k < vocab ? s->top_k : vocab;
    double top = (double)logits[order[0]], total = 0, mass = 0;
    for (int i = 0; i < keep; i++)
        total += exp(((double)logits[order[i]] - top) / (double)s->temperature);
    double kept = 0;
    int n = 0;
    while (n < keep && (n == 0 || kept < (double)s->top_p * total))
        kept += exp(((double)logits[order[n++]] - top) / (double)s->temperature);
    for (int i = 0; i < n; i++) {
        mass += exp(((double)logits[order[i]] - top) / (double)s->temperature);
        if (mass > u * kept)
            return order[i];
    }
    return order[n - 1];
}

int32_t sampler_choose(const struct sampler *s, const float *logits, int vocab, uint64_t prompt,
    uint64_t position, int32_t *work, double *logprob)
{
    int32_t best = argmax(logits, vocab), id = best;
    if (s->temperature > 0)
        id = draw(s, logits, vocab, rng_unit(rng_key(s->seed, prompt), position), work);
    if (logprob)
        *logprob = (double)logits[id] - log_sum_exp(logits, vocab, (double)logits[best]);
    return id;
}
