/* Checking a whole source: every byte of every shard. */
#include "loader/source.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "loader/shard_store.h"

struct verify {
    const char *dir;
    const struct manifest *m;
    source_progress *progress;
    void *arg;
    uint64_t done, total;
};

static int tick(struct verify *v, struct err *e)
{
    if (v->progress && v->progress(v->arg, v->done, v->total))
        return err_set(e, ERR_STOPPED, "%s: stopped before all was checked", v->dir);
    return 0;
}

static int verify_blocks(
    struct verify *v, struct shard *s, const struct manifest_shard *info, struct err *e)
{
    struct block b = {0};
    struct shard_hash hash = {BUF_INIT};
    uint64_t documents = 0, last_end = 0, base = v->done;
    int rc = 0;
    for (uint64_t i = 0; rc >= 0 && i < info->blocks; i++) {
        rc = shard_block(s, i, 8, &b, e);
        if (rc == 1)
            rc = err_set(e, ERR_CORRUPT, "%s/%s: block %llu: only its second reading was right",
                v->dir, info->file, (unsigned long long)i);
        if (rc == 0) {
            documents += b.end_count;
            last_end = b.end_count ? b.ends[b.end_count - 1] : 0;
            last_end = last_end == b.token_count;
            shard_hash_add(&hash, &b);
            v->done = base + info->bytes * (i + 1) / info->blocks;
            rc = tick(v, e);
        }
    }
    block_release(&b);
    char got[SHA256_HEX];
    shard_hash_final(&hash, got);
    if (rc < 0)
        return rc;
    if (strcmp(got, info->hash) != 0)
        return err_set(e, ERR_CORRUPT, "%s/%s: content hash %.12s…, the manifest says %.12s…",
            v->dir, info->file, got, info->hash);
    if (documents != info->documents || !last_end)
        return err_set(e, ERR_CORRUPT, "%s/%s: %llu whole documents, the manifest says %llu",
            v->dir, info->file, (unsigned long long)documents, (unsigned long long)info->documents);
    return 0;
}

static int verify_shard(struct verify *v, const struct manifest_shard *info, struct err *e)
{
    char sha[SHA256_HEX];
    uint64_t bytes = 0;
    char *path = mem_printf("%s/%s", v->dir, info->file);
    int rc = hash_sha256_file(path, sha, &bytes, e);
    if (rc == 0 && bytes != info->bytes)
        rc = err_set(e, ERR_CORRUPT, "%s: %llu bytes, the manifest says %llu", path,
            (unsigned long long)bytes, (unsigned long long)info->bytes);
    if (rc < 0)
        goto done;
    int damaged = strcmp(sha, info->sha256) != 0;
    v->done += bytes;
    /* Looks at the blocks even so: naming the damaged one says more. Damage outside of them is
     * named below. */
    struct shard *s = NULL;
    rc = shard_open(v->dir, v->m, info, &s, e);
    if (rc == 0)
        rc = verify_blocks(v, s, info, e);
    shard_close(&s);
    if (rc == 0 && damaged)
        rc = err_set(e, ERR_CORRUPT,
            "%s: SHA-256 %.12s…, the manifest says %.12s… (no block is damaged)", path, sha,
            info->sha256);
done:
    free(path);
    return rc;
}

int source_verify(const char *dir, source_progress *progress, void *arg, struct err *e)
{
    struct manifest m;
    struct verify v = {.dir = dir, .m = &m, .progress = progress, .arg = arg};
    int rc = manifest_load(dir, &m, e); /* checks the root against the shards' hashes */
    if (rc < 0)
        return rc;
    for (int k = 0; k < SPLIT_COUNT; k++)
        for (int i = 0; i < m.splits[k].shard_count; i++)
            v.total += 2 * m.splits[k].shards[i].bytes; /* hashed, then decoded */
    for (int k = 0; rc == 0 && k < SPLIT_COUNT; k++)
        for (int i = 0; rc == 0 && i < m.splits[k].shard_count; i++)
            rc = verify_shard(&v, &m.splits[k].shards[i], e);
    manifest_release(&m);
    return rc;
}
