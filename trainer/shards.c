#include "trainer/shards.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"

#define ALIGN_FLOATS 16 /* parts begin on a cache line, as tensors do */

static int64_t align_up(int64_t n)
{
    return (n + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

/* Matrices of the vector group are tables of rows (the embedding): updated element by element. */
static int can_be_cut(const struct weight *w)
{
    return w->group == WEIGHT_VECTOR && w->ndim == 2;
}

static int least_loaded(const int64_t *loads, int world)
{
    int best = 0;
    for (int r = 1; r < world; r++)
        if (loads[r] < loads[best])
            best = r;
    return best;
}

static void add_part(struct shards *s, int weight, int64_t from, int64_t count, int owner)
{
    s->spans = mem_grow_array(s->spans, (size_t)s->count + 1, sizeof *s->spans);
    s->weight = mem_grow_array(s->weight, (size_t)s->count + 1, sizeof *s->weight);
    s->spans[s->count] = (struct coll_span){s->table->items[weight].offset + from, count, owner};
    s->weight[s->count++] = weight;
}

/*
 * The level that `amount` more fills the loads to, as water would: Σ max(0, level − load) is at
 * least amount.
 */
static int64_t fill_level(const int64_t *loads, int world, int64_t amount)
{
    int64_t low = 0, high = amount;
    for (int r = 0; r < world; r++)
        high = high < loads[r] + amount ? loads[r] + amount : high;
    while (low < high) {
        int64_t level = low + (high - low) / 2, held = 0;
        for (int r = 0; r < world; r++)
            held += level > loads[r] ? level - loads[r] : 0;
        if (held >= amount)
            high = level;
        else
            low = level + 1;
    }
    return low;
}

static void cut(struct shards *s, int weight, int64_t *loads)
{
    int64_t left = s->table->items[weight].count, from = 0;
    int64_t level = fill_level(loads, s->world, left);
    for (int r = 0; r < s->world && left > 0; r++) {
        int64_t count = level > loads[r] ? align_up(level - loads[r]) : 0;
        count = count < left ? count : left;
        if (count > 0)
            add_part(s, weight, from, count, r);
        loads[r] += count;
        from += count;
        left -= count;
    }
    CHECK(left == 0);
}

int shards_is_muon(enum optim_kind optim, const struct weight *w)
{
    return optim != OPTIM_ADAMW && w->group == WEIGHT_MATRIX;
}

/* Where each part lies in its owner's arrays: in order, each aligned, as in the flat array. */
static void place(const struct shards *s, const int64_t *counts, int64_t *local, int64_t *totals)
{
    for (int i = 0; i < s->count; i++) {
        int64_t *total = &totals[s->spans[i].owner];
        local[i] = *total;
        *total += align_up(counts[i]);
    }
}

static void place_all(struct shards *s, enum optim_kind optim)
{
    size_t count = (size_t)s->count, world = (size_t)s->world;
    int64_t *counts = mem_array(count, sizeof *counts);
    s->second_count = mem_array(count, sizeof *s->second_count);
    for (int i = 0; i < s->count; i++) {
        const struct weight *w = &s->table->items[s->weight[i]];
        counts[i] = s->second_count[i] = s->spans[i].count;
        if (shards_is_muon(optim, w))
            s->second_count[i] = optim == OPTIM_NORMUON ? w->shape[0] : 0;
    }
    s->local = mem_array(count, sizeof *s->local);
    s->totals = mem_array(world, sizeof *s->totals);
    place(s, counts, s->local, s->totals);
    s->second_local = mem_array(count, sizeof *s->second_local);
    s->second_totals = mem_array(world, sizeof *s->second_totals);
    place(s, s->second_count, s->second_local, s->second_totals);
    free(counts);
}

void shards_make(
    const struct weight_table *table, enum optim_kind optim, int world, struct shards *out)
{
    int64_t *loads = mem_array((size_t)world, sizeof *loads);
    int *owners = mem_array((size_t)table->count, sizeof *owners);
    *out = (struct shards){.table = table, .world = world};
    out->first = mem_array((size_t)table->count + 1, sizeof *out->first);
    for (int w = 0; w < table->count; w++) {
        if (world > 1 && can_be_cut(&table->items[w]))
            continue; /* fills up what the whole ones leave uneven */
        owners[w] = least_loaded(loads, world);
        loads[owners[w]] += align_up(table->items[w].count);
    }
    for (int w = 0; w < table->count; w++) {
        out->first[w] = out->count;
        if (world > 1 && can_be_cut(&table->items[w]))
            cut(out, w, loads);
        else
            add_part(out, w, 0, table->items[w].count, owners[w]);
    }
    out->first[table->count] = out->count;
    place_all(out, optim);
    free(owners);
    free(loads);
}

void shards_release(struct shards *s)
{
    free(s->spans);
    free(s->weight);
    free(s->local);
    free(s->first);
    free(s->totals);
    free(s->second_count);
    free(s->second_local);
    free(s->second_totals);
    memset(s, 0, sizeof *s);
}

int shards_is_whole(const struct shards *s, int i)
{
    return s->spans[i].count == s->table->items[s->weight[i]].count;
}

void shards_name(const struct shards *s, int i, const char *prefix, char out[128])
{
    const struct weight *w = &s->table->items[s->weight[i]];
    int64_t from = s->spans[i].offset - w->offset;
    int n = shards_is_whole(s, i) ? snprintf(out, 128, "%s%s", prefix, w->name)
                                  : snprintf(out, 128, "%s%s[%" PRId64 ":%" PRId64 "]", prefix,
                                        w->name, from, from + s->spans[i].count);
    CHECK(n < 128);
}

int shards_tensors_of(const struct shards *s, int rank)
{
    int n = 0;
    for (int i = 0; i < s->count; i++)
        n += s->spans[i].owner == rank ? 1 + (s->second_count[i] > 0) : 0;
    return n;
}
