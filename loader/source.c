#include "loader/source.h"

#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/mem.h"
#include "loader/shard_store.h"

struct cached {
    struct block block;
    int split;
    uint64_t number; /* within the split */
    uint64_t used;   /* clock at the last use; 0: empty */
};

/* Where a shard begins in its split's stream. */
struct start {
    uint64_t token, block;
};

struct source {
    char *dir;
    struct manifest m;
    struct shard **shards[SPLIT_COUNT]; /* NULL until opened */
    struct start *starts[SPLIT_COUNT];  /* (shard_count + 1) */
    struct cached *cache;
    int cache_count;
    uint64_t clock, rereads;
};

int source_open(const char *dir, int cache_blocks, struct source **out, struct err *e)
{
    CHECK(cache_blocks >= 2);
    struct source *s = mem_array(1, sizeof *s);
    int rc = manifest_load(dir, &s->m, e);
    if (rc < 0) {
        free(s);
        return rc;
    }
    s->dir = mem_strdup(dir);
    s->cache_count = cache_blocks;
    s->cache = mem_array((size_t)cache_blocks, sizeof *s->cache);
    for (int k = 0; k < SPLIT_COUNT; k++) {
        const struct manifest_split *p = &s->m.splits[k];
        s->shards[k] = mem_array((size_t)p->shard_count, sizeof *s->shards[k]);
        s->starts[k] = mem_array((size_t)p->shard_count + 1, sizeof *s->starts[k]);
        for (int i = 0; i < p->shard_count; i++) {
            s->starts[k][i + 1].token = s->starts[k][i].token + p->shards[i].tokens;
            s->starts[k][i + 1].block = s->starts[k][i].block + p->shards[i].blocks;
        }
    }
    *out = s;
    return 0;
}

void source_close(struct source **ps)
{
    struct source *s = *ps;
    if (!s)
        return;
    for (int k = 0; k < SPLIT_COUNT; k++) {
        for (int i = 0; i < s->m.splits[k].shard_count; i++)
            shard_close(&s->shards[k][i]);
        free(s->shards[k]);
        free(s->starts[k]);
    }
    for (int i = 0; i < s->cache_count; i++)
        block_release(&s->cache[i].block);
    free(s->cache);
    manifest_release(&s->m);
    free(s->dir);
    free(s);
    *ps = NULL;
}

const struct manifest *source_manifest(const struct source *s)
{
    return &s->m;
}

uint64_t source_rows(const struct source *s, int split, int seq)
{
    uint64_t tokens = s->m.splits[split].tokens;
    return tokens ? (tokens - 1) / (uint64_t)seq : 0;
}

uint64_t source_rereads(const struct source *s)
{
    return s->rereads;
}

uint64_t source_blocks(const struct source *s, int split)
{
    return s->starts[split][s->m.splits[split].shard_count].block;
}

static struct shard *open_shard(struct source *s, int split, int i, struct err *e)
{
    struct shard **slot = &s->shards[split][i];
    if (!*slot && shard_open(s->dir, &s->m, &s->m.splits[split].shards[i], slot, e) < 0)
        return NULL;
    return *slot;
}

/* The shard whose range holds x; of tokens (by_token) or blocks. x is below the split's total. */
static int find_shard(const struct source *s, int split, uint64_t x, int by_token)
{
    int lo = 0, hi = s->m.splits[split].shard_count;
    while (hi - lo > 1) {
        int mid = lo + (hi - lo) / 2;
        const struct start *at = &s->starts[split][mid];
        if ((by_token ? at->token : at->block) <= x)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static int read_block(struct source *s, int split, int shard, uint64_t local, int ahead,
    struct block *out, struct err *e)
{
    struct shard *h = open_shard(s, split, shard, e);
    if (!h)
        return e ? e->code : ERR_IO;
    int rc = shard_block(h, local, ahead, out, e);
    s->rereads += rc == 1;
    return rc < 0 ? rc : 0;
}

int source_block(struct source *s, int split, uint64_t i, struct block *out, int *shard,
    uint64_t *stored_bytes, struct err *e)
{
    CHECK(i < source_blocks(s, split));
    int k = find_shard(s, split, i, 0);
    uint64_t local = i - s->starts[split][k].block;
    int rc = read_block(s, split, k, local, 8, out, e);
    if (shard)
        *shard = k;
    if (rc == 0 && stored_bytes)
        *stored_bytes = shard_block_bytes(s->shards[split][k], local);
    return rc;
}

/* The block from the cache, read into its least recently used place if need be; NULL on failure. */
static const struct block *cached_block(
    struct source *s, int split, int shard, uint64_t local, struct err *e)
{
    uint64_t number = s->starts[split][shard].block + local;
    struct cached *oldest = &s->cache[0];
    for (int i = 0; i < s->cache_count; i++) {
        struct cached *c = &s->cache[i];
        if (c->used && c->split == split && c->number == number) {
            c->used = ++s->clock;
            return &c->block;
        }
        if (c->used < oldest->used)
            oldest = c;
    }
    oldest->used = 0; /* whatever happens, it no longer holds what it did */
    if (read_block(s, split, shard, local, 1, &oldest->block, e) < 0)
        return NULL;
    oldest->split = split;
    oldest->number = number;
    oldest->used = ++s->clock;
    return &oldest->block;
}

/* Index of the first document end > x. */
static size_t first_end_after(const struct block *b, size_t x)
{
    size_t lo = 0, hi = b->end_count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (b->ends[mid] <= x)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

int source_row(struct source *s, int split, uint64_t index, int seq, uint32_t *tokens,
    uint8_t *doc_starts, struct err *e)
{
    uint64_t rows = source_rows(s, split, seq);
    if (index >= rows)
        return err_set(e, ERR_INPUT, "%s: %s row %llu of %llu", s->dir, split_name(split),
            (unsigned long long)index, (unsigned long long)rows);
    uint64_t at = index * (uint64_t)seq;
    size_t have = 0, want = (size_t)seq + 1;
    memset(doc_starts, 0, (size_t)seq);
    while (have < want) {
        int k = find_shard(s, split, at, 1);
        uint64_t local = at - s->starts[split][k].token, size = (uint64_t)s->m.block_tokens;
        const struct block *b = cached_block(s, split, k, local / size, e);
        if (!b)
            return e ? e->code : ERR_IO;
        size_t from = (size_t)(local % size), n = b->token_count - from;
        n = n < want - have ? n : want - have;
        memcpy(tokens + have, b->tokens + from, n * sizeof *tokens);
        /* The token behind a document's end begins the next, also where that is the next block's
         * first. */
        for (size_t i = first_end_after(b, from); i < b->end_count && b->ends[i] <= from + n; i++)
            if (have + (b->ends[i] - from) < (size_t)seq)
                doc_starts[have + (b->ends[i] - from)] = 1;
        have += n;
        at += n;
    }
    doc_starts[0] = 1;
    return 0;
}
