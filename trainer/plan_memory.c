#include "trainer/plan_memory.h"

#include <stdio.h>
#include <string.h>

#include "common/check.h"
#include "trainer/feed.h"
#include "trainer/optimizer.h"
#include "trainer/saver.h"

/* The program's pages, its libraries' and their buffers, sockets, stacks: measured as what is left
 * of the peak when everything else is taken off (9 to 12 MB). */
#define PROGRAM_BYTES ((size_t)11 << 20)
#define MPI_BYTES     ((size_t)16 << 20) /* MPI's own, the same way */

struct model_limits plan_model_limits(const struct plan *p, const enum recompute *recompute)
{
    struct model_limits lim = {.batch = p->c.train.micro_rows,
        .seq = p->c.data.seq_len,
        .passes = plan_max_passes(p),
        .train = 1,
        .precision = p->c.train.precision,
        .prefix_sharing = p->c.train.prefix_sharing};
    _Static_assert((int)CONFIG_MAX_PASSES <= (int)MODEL_MAX_PASSES, "the model takes every plan");
    for (int k = 0; k < CONFIG_MAX_PASSES; k++)
        lim.recompute[k] = recompute[k];
    return lim;
}

static void add(struct plan_memory *m, const char *key, const char *what, size_t bytes)
{
    CHECK(m->count < (int)(sizeof m->parts / sizeof *m->parts));
    struct plan_memory_part *part = &m->parts[m->count++];
    snprintf(part->key, sizeof part->key, "%s", key);
    part->what = what;
    part->bytes = bytes;
    if (__builtin_add_overflow(m->total, bytes, &m->total))
        m->total = SIZE_MAX;
}

int plan_memory_make(const struct plan *p, const enum recompute *recompute, struct device *d,
    struct plan_rank rank, struct plan_memory *out, struct err *e)
{
    struct model_limits lim = plan_model_limits(p, recompute);
    struct weight_table table;
    struct model_memory model;
    struct optimizer_memory optim;
    enum optim_kind kind = p->c.optim.kind;
    int rc = weight_table_make(&p->c.model, &table, e);
    memset(out, 0, sizeof *out);
    if (rc < 0)
        return rc;
    model_memory_estimate(d, &p->c.model, &lim, &model);
    optimizer_memory_of(&table, kind, rank.rank, rank.world, &optim);
    out->passes = lim.passes;
    out->sharing = model_limits_share(&p->c.model, &lim);
    add(out, "weights", "weights", model.weights);
    add(out, "gradients", "gradients", model.gradients);
    add(out, "moments", "optimizer moments", optim.moments);
    for (int k = 0; k < lim.passes; k++) {
        char key[24];
        snprintf(key, sizeof key, "activations_%d", k + 1);
        add(out, key, k ? "activations of a further pass" : "activations of the first pass",
            model.activations[k]);
    }
    add(out, "workspace", "workspace", model.workspace + optim.workspace);
    add(out, "checkpoint_copy", "checkpoint copy",
        saver_staging_bytes(&table, kind, rank.rank, rank.world));
    add(out, "loading", "weights or moments on their way in, at start",
        (size_t)table.total * sizeof(float));
    add(out, "feed", "rows of the coming steps", feed_planned_bytes(p, rank.world));
    if (rank.world > 1)
        add(out, "ranks", "what other ranks send", coll_memory_bytes(rank.world) + MPI_BYTES);
    add(out, "program", "program and libraries", PROGRAM_BYTES);
    weight_table_release(&table);
    return 0;
}

size_t plan_memory_of(const struct plan_memory *m, const char *key)
{
    for (int i = 0; i < m->count; i++)
        if (strcmp(m->parts[i].key, key) == 0)
            return m->parts[i].bytes;
    return 0;
}
