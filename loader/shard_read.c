/* Reading sealed shards. */
#include "loader/shard_store.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <lmdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/mem.h"

/* Where a block's value lies in the file. */
struct extent {
    uint64_t offset;
    uint32_t bytes;
};

struct shard {
    char *path;
    const struct manifest *m;
    const struct manifest_shard *info;
    MDB_env *env;
    MDB_txn *txn; /* keeps the map valid, as LMDB's rules ask */
    int fd;       /* for the second reading of a damaged block */
    const uint8_t *map;
    struct extent *extents; /* (info->blocks) */
};

static int mdb_error(struct err *e, int rc, const char *path, const char *what)
{
    int code = rc == ENOMEM || rc == ENOSPC ? ERR_NOMEM : rc > 0 ? ERR_IO : ERR_CORRUPT;
    return err_set(e, code, "%s: %s: %s", path, what, mdb_strerror(rc));
}

void shard_close(struct shard **ps)
{
    struct shard *s = *ps;
    if (!s)
        return;
    if (s->txn)
        mdb_txn_abort(s->txn);
    if (s->env)
        mdb_env_close(s->env);
    if (s->fd >= 0)
        close(s->fd);
    free(s->extents);
    free(s->path);
    free(s);
    *ps = NULL;
}

/* A file of another size than the manifest says would open and then fault when it is read. */
static int check_size(const struct shard *s, struct err *e)
{
    struct stat st;
    if (s->fd < 0 || fstat(s->fd, &st) < 0)
        return err_errno(e, "%s", s->path);
    if ((uint64_t)st.st_size != s->info->bytes)
        return err_set(e, ERR_CORRUPT, "%s: %lld bytes, the manifest says %llu", s->path,
            (long long)st.st_size, (unsigned long long)s->info->bytes);
    return 0;
}

static int open_env(struct shard *s, struct err *e)
{
    MDB_envinfo info;
    MDB_stat st;
    int rc = mdb_env_create(&s->env);
    if (rc == 0)
        rc = mdb_env_set_maxdbs(s->env, 2);
    if (rc == 0)
        rc = mdb_env_set_mapsize(s->env, (size_t)s->info->bytes);
    if (rc == 0)
        rc = mdb_env_open(
            s->env, s->path, MDB_RDONLY | MDB_NOSUBDIR | MDB_NOLOCK | MDB_NOTLS | MDB_NORDAHEAD, 0);
    if (rc == 0)
        rc = mdb_env_info(s->env, &info);
    if (rc == 0)
        rc = mdb_env_stat(s->env, &st);
    if (rc != 0)
        return mdb_error(e, rc, s->path, "open");
    if (info.me_last_pgno != s->info->last_pgno ||
        ((uint64_t)info.me_last_pgno + 1) * st.ms_psize > s->info->bytes)
        return err_set(e, ERR_CORRUPT,
            "%s: last page %zu of %u bytes, the manifest says %llu in %llu", s->path,
            info.me_last_pgno, st.ms_psize, (unsigned long long)s->info->last_pgno,
            (unsigned long long)s->info->bytes);
    s->map = info.me_mapaddr;
    return 0;
}

/* Notes one value's place; refuses one that is not inside the file. */
static int note_extent(
    struct shard *s, uint64_t i, const MDB_val *key, const MDB_val *value, struct err *e)
{
    uint8_t want[8];
    for (int k = 0; k < 8; k++)
        want[k] = (uint8_t)(i >> (56 - 8 * k));
    if (i >= s->info->blocks || key->mv_size != 8 || memcmp(key->mv_data, want, 8) != 0)
        return err_set(e, ERR_CORRUPT, "%s: index: entry %llu is not block %llu of %llu", s->path,
            (unsigned long long)i, (unsigned long long)i, (unsigned long long)s->info->blocks);
    uint64_t offset = (uint64_t)((const uint8_t *)value->mv_data - s->map);
    if (offset > s->info->bytes || value->mv_size > s->info->bytes - offset ||
        value->mv_size > UINT32_MAX)
        return err_set(
            e, ERR_CORRUPT, "%s: block %llu lies outside the file", s->path, (unsigned long long)i);
    s->extents[i] = (struct extent){offset, (uint32_t)value->mv_size};
    return 0;
}

static int read_index(struct shard *s, struct err *e)
{
    MDB_dbi dbi;
    MDB_cursor *cursor = NULL;
    MDB_val key, value;
    uint64_t i = 0;
    int rc = mdb_txn_begin(s->env, NULL, MDB_RDONLY, &s->txn);
    if (rc == 0)
        rc = mdb_dbi_open(s->txn, "blocks", 0, &dbi);
    if (rc == 0)
        rc = mdb_cursor_open(s->txn, dbi, &cursor);
    if (rc != 0)
        return mdb_error(e, rc, s->path, "index");
    int bad = 0;
    while (!bad && (rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0)
        bad = note_extent(s, i++, &key, &value, e);
    mdb_cursor_close(cursor);
    if (bad)
        return bad;
    if (rc != MDB_NOTFOUND)
        return mdb_error(e, rc, s->path, "index");
    if (i != s->info->blocks)
        return err_set(e, ERR_CORRUPT, "%s: %llu blocks, the manifest says %llu", s->path,
            (unsigned long long)i, (unsigned long long)s->info->blocks);
    return 0;
}

/* The shard's own word on what its tokens mean: a file moved in from another source is refused. */
static int check_meta(struct shard *s, struct err *e)
{
    MDB_dbi dbi;
    char name[] = "shard";
    MDB_val key = {sizeof name - 1, name}, value;
    int rc = mdb_dbi_open(s->txn, "meta", 0, &dbi);
    if (rc == 0)
        rc = mdb_get(s->txn, dbi, &key, &value);
    if (rc != 0)
        return mdb_error(e, rc, s->path, "meta");
    uint64_t offset = (uint64_t)((const uint8_t *)value.mv_data - s->map);
    if (offset > s->info->bytes || value.mv_size > s->info->bytes - offset)
        return err_set(e, ERR_CORRUPT, "%s: meta lies outside the file", s->path);
    json_t *j = json_loadb(value.mv_data, value.mv_size, 0, NULL);
    const char *tokenizer = json_string_value(json_object_get(j, "tokenizer_sha256"));
    json_int_t vocab = json_integer_value(json_object_get(j, "vocab"));
    json_int_t tokens = json_integer_value(json_object_get(j, "tokens"));
    if (!tokenizer || strcmp(tokenizer, s->m->tokenizer_sha256) != 0 || vocab != s->m->vocab ||
        tokens != (json_int_t)s->info->tokens)
        rc = err_set(e, ERR_MISMATCH,
            "%s: made with tokenizer %.12s, vocabulary %lld, %lld tokens; the manifest says %.12s, "
            "%d, %llu",
            s->path, tokenizer ? tokenizer : "(none)", (long long)vocab, (long long)tokens,
            s->m->tokenizer_sha256, s->m->vocab, (unsigned long long)s->info->tokens);
    json_decref(j);
    return rc;
}

int shard_open(const char *dir, const struct manifest *m, const struct manifest_shard *info,
    struct shard **out, struct err *e)
{
    struct shard *s = mem_array(1, sizeof *s);
    int rc;
    s->path = mem_printf("%s/%s", dir, info->file);
    s->m = m;
    s->info = info;
    s->fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if ((rc = check_size(s, e)) < 0)
        goto fail;
    /* The manifest is from outside too: its counts must not make us allocate what the file cannot
     * hold. */
    s->extents = info->blocks <= info->bytes / BLOCK_HEAD_BYTES
                     ? mem_try_array((size_t)info->blocks, sizeof *s->extents)
                     : NULL;
    if (!s->extents) {
        rc = err_set(e, ERR_CORRUPT, "%s: cannot hold %llu blocks", s->path,
            (unsigned long long)info->blocks);
        goto fail;
    }
    if ((rc = open_env(s, e)) < 0 || (rc = read_index(s, e)) < 0 || (rc = check_meta(s, e)) < 0)
        goto fail;
    *out = s;
    return 0;
fail:
    shard_close(&s);
    return rc;
}

uint64_t shard_block_bytes(const struct shard *s, uint64_t i)
{
    return i < s->info->blocks ? s->extents[i].bytes : 0;
}

/* Advice only: nothing depends on it. */
static void read_ahead(const struct shard *s, uint64_t i, int ahead)
{
    uint64_t last = i + (uint64_t)ahead - 1, page = 4095;
    if (last >= s->info->blocks)
        last = s->info->blocks - 1;
    uint64_t from = s->extents[i].offset, to = s->extents[last].offset + s->extents[last].bytes;
    if (to <= from) /* not laid out in order */
        to = from + s->extents[i].bytes;
    from &= ~page;
    madvise((void *)(uintptr_t)(s->map + from), (size_t)(to - from), MADV_WILLNEED);
}

/* Is this block as long as its place in the shard says? */
static int check_length(const struct shard *s, uint64_t i, const struct block *b, struct err *e)
{
    uint64_t full = (uint64_t)s->m->block_tokens, last = s->info->blocks - 1;
    uint64_t want = i < last ? full : s->info->tokens - last * full;
    if (b->token_count != want)
        return err_set(
            e, ERR_CORRUPT, "%zu tokens, expected %llu", b->token_count, (unsigned long long)want);
    return 0;
}

static int decode(
    const struct shard *s, const void *value, uint64_t i, struct block *out, struct err *e)
{
    int rc = block_decode(value, s->extents[i].bytes, i, s->m->vocab, out, e);
    return rc < 0 ? rc : check_length(s, i, out, e);
}

/* From the disk, as far as the system lets go of its copy. */
static int read_again(const struct shard *s, uint64_t i, struct block *out, struct err *e)
{
    const struct extent *x = &s->extents[i];
    uint8_t *copy = mem_array(x->bytes, 1);
    size_t done = 0;
    int rc = 0;
    posix_fadvise(s->fd, (off_t)x->offset, (off_t)x->bytes, POSIX_FADV_DONTNEED);
    while (rc == 0 && done < x->bytes) {
        ssize_t n = pread(s->fd, copy + done, x->bytes - done, (off_t)(x->offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = err_errno(e, "read");
        else if (n == 0)
            rc = err_set(e, ERR_CORRUPT, "the file ends before it");
        else
            done += (size_t)n;
    }
    if (rc == 0)
        rc = decode(s, copy, i, out, e);
    free(copy);
    return rc;
}

int shard_block(struct shard *s, uint64_t i, int ahead, struct block *out, struct err *e)
{
    if (i >= s->info->blocks)
        return err_set(e, ERR_INPUT, "%s: block %llu of %llu", s->path, (unsigned long long)i,
            (unsigned long long)s->info->blocks);
    read_ahead(s, i, ahead);
    if (decode(s, s->map + s->extents[i].offset, i, out, e) == 0)
        return 0;
    int rc = read_again(s, i, out, e);
    return rc < 0 ? err_prefix(e, "%s: block %llu", s->path, (unsigned long long)i) : 1;
}
