#include "evaluator/generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/config.h"
#include "common/mem.h"
#include "kernels/decode.h"

/* One turn: up to GENERATE_SLOTS prompts, prompt base + i in slot i. */
struct turn {
    struct snapshot *snap;
    const struct generate_options *o;
    struct generate_times *times;
    struct decoder *dec;
    struct generation *items;
    int base, count;
    int *alive; /* (count): slots still generating, packed */
    int alive_count;
    struct decode_row *rows; /* (count) */
    float *logits;           /* (count, V): of the alive slots, in order */
    int32_t *work;           /* (V) */
};

static int stopped(const struct turn *t, struct err *e)
{
    if (t->o->stop && atomic_load(t->o->stop))
        return err_set(e, ERR_STOPPED, "stopped while generating");
    return 0;
}

static int prefill(struct turn *t, struct err *e)
{
    int passes = t->o->regime == REGIME_FUSED ? t->o->fused_passes : 1, rc = 0;
    size_t vocab = (size_t)t->snap->config.vocab;
    double start = clock_seconds();
    for (int i = 0; rc == 0 && i < t->count; i++) {
        struct generation *g = &t->items[t->base + i];
        rc = decoder_prefill(
            t->dec, i, g->prompt, g->prompt_len, passes, t->logits + (size_t)i * vocab, e);
        t->alive[i] = i;
        t->times->prefill_tokens += g->prompt_len;
        if (rc == 0)
            rc = stopped(t, e);
    }
    t->alive_count = t->count;
    t->times->prefill_seconds += clock_seconds() - start;
    return rc;
}

static int all_finite(const float *x, int n)
{
    for (int i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return 0;
    return 1;
}

/* Takes a token for every alive slot from its logits; drops those that ended. */
static int choose(struct turn *t, struct err *e)
{
    int vocab = t->snap->config.vocab, kept = 0, eot = tokenizer_eot(t->snap->tokenizer);
    for (int k = 0; k < t->alive_count; k++) {
        int slot = t->alive[k];
        struct generation *g = &t->items[t->base + slot];
        const float *logits = t->logits + (size_t)k * (size_t)vocab;
        if (!all_finite(logits, vocab))
            return err_set(e, ERR_CORRUPT,
                "%s: its output at token %d is not a number: the weights are damaged, or the "
                "training diverged",
                t->snap->dir, g->len + 1);
        int32_t id = sampler_choose(&t->o->sampler, logits, vocab, (uint64_t)(t->base + slot),
            (uint64_t)g->len, t->work, &g->logprobs[g->len]);
        if (id == eot) {
            g->ended = 1;
            continue;
        }
        g->tokens[g->len++] = id;
        t->times->decode_tokens++;
        if (t->o->on_token)
            t->o->on_token(t->o->ctx, t->base + slot, id);
        if (g->len < t->o->max_new)
            t->alive[kept++] = slot;
    }
    t->alive_count = kept;
    return 0;
}

static int advance(struct turn *t, struct err *e)
{
    for (int k = 0; k < t->alive_count; k++) {
        const struct generation *g = &t->items[t->base + t->alive[k]];
        t->rows[k] = (struct decode_row){.slot = t->alive[k],
            .pos = g->prompt_len + g->len - 1,
            .first = 0,
            .token = g->tokens[g->len - 1],
            .fused = t->o->regime != REGIME_STANDARD};
    }
    return decoder_run(t->dec, t->rows, t->alive_count, NULL, t->logits, e);
}

static int run_turn(struct turn *t, struct err *e)
{
    int rc = prefill(t, e);
    double start = clock_seconds();
    while (rc == 0 && t->alive_count > 0) {
        rc = choose(t, e);
        if (rc == 0 && t->alive_count > 0)
            rc = advance(t, e);
        if (rc == 0)
            rc = stopped(t, e);
    }
    t->times->decode_seconds += clock_seconds() - start;
    return rc;
}

/* Checks the prompts and gives each its arrays; *longest: of the prompts. */
static int prepare(struct snapshot *snap, struct generation *items, int count,
    const struct generate_options *o, int *longest, struct err *e)
{
    if (o->regime != REGIME_STANDARD && !snap->config.feedback)
        return err_set(e, ERR_UNSUPPORTED, "%s: regime %s needs feedback weights, it has none",
            snap->dir, regime_name(o->regime));
    for (int i = 0; i < count; i++) {
        struct generation *g = &items[i];
        if (g->prompt_len < 1)
            return err_set(e, ERR_INPUT, "prompt %d is empty", i + 1);
        *longest = g->prompt_len > *longest ? g->prompt_len : *longest;
        g->tokens = mem_array((size_t)o->max_new, sizeof *g->tokens);
        g->logprobs = mem_array((size_t)o->max_new, sizeof *g->logprobs);
    }
    return 0;
}

int generate(struct snapshot *snap, struct generation *items, int count,
    const struct generate_options *o, struct generate_times *times, struct err *e)
{
    enum { PREFILL_ROWS = 256 };
    int longest = 0, slots = count < GENERATE_SLOTS ? count : GENERATE_SLOTS;
    memset(times, 0, sizeof *times);
    int rc = prepare(snap, items, count, o, &longest, e);
    struct turn t = {.snap = snap, .o = o, .times = times, .items = items};
    if (rc == 0)
        rc = decoder_new(snap->model, slots, longest + o->max_new, PREFILL_ROWS, &t.dec, e);
    if (rc < 0)
        return rc;
    t.alive = mem_array((size_t)slots, sizeof *t.alive);
    t.rows = mem_array((size_t)slots, sizeof *t.rows);
    t.logits = mem_array((size_t)slots * (size_t)snap->config.vocab, sizeof *t.logits);
    t.work = mem_array((size_t)snap->config.vocab, sizeof *t.work);
    for (t.base = 0; rc == 0 && t.base < count; t.base += slots) {
        t.count = count - t.base < slots ? count - t.base : slots;
        rc = run_turn(&t, e);
    }
    free(t.alive);
    free(t.rows);
    free(t.logits);
    free(t.work);
    decoder_free(&t.dec);
    return rc;
}

void generation_release(struct generation *g)
{
    free(g->tokens);
    free(g->logprobs);
    g->tokens = NULL;
    g->logprobs = NULL;
}
