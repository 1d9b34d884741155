/* Reading sealed shards. */
#include "loader/shard_store.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <lmdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/lmdb_err.h"
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
    int fd;
    struct extent *extents; /* (info->blocks) */
};

/* LMDB, open only while the index is read. */
struct index {
    MDB_env *env;
    MDB_txn *txn;
    size_t page_bytes;
};

void shard_close(struct shard **ps)
{
    struct shard *s = *ps;
    if (!s)
        return;
    if (s->fd >= 0)
        close(s->fd);
    free(s->extents);
    free(s->path);
    free(s);
    *ps = NULL;
}

/* A file of another size than the manifest says would open and then fault in LMDB's map. */
static int check_size(const struct shard *s, struct err *e)
{
    struct stat st;
    if (fstat(s->fd, &st) < 0)
        return err_errno(e, "%s", s->path);
    if ((uint64_t)st.st_size != s->info->bytes)
        return err_set(e, ERR_CORRUPT, "%s: %lld bytes, the manifest says %llu", s->path,
            (long long)st.st_size, (unsigned long long)s->info->bytes);
    return 0;
}

/*
 * The bytes of one value. Not through a map of the file: what is cut off or cannot be read any more
 * is then an error with a name, where a map would end the process.
 */
static int read_value(const struct shard *s, const struct extent *x, struct buf *out, struct err *e)
{
    buf_reserve(out, x->bytes);
    while (out->len < x->bytes) {
        ssize_t n =
            pread(s->fd, out->data + out->len, x->bytes - out->len, (off_t)(x->offset + out->len));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_errno(e, "read");
        if (n == 0)
            return err_set(e, ERR_CORRUPT, "the file has become shorter");
        out->len += (size_t)n;
    }
    return 0;
}

static int index_open(const struct shard *s, struct index *x, struct err *e)
{
    MDB_envinfo info;
    MDB_stat st;
    int rc = mdb_env_create(&x->env);
    if (rc == 0)
        rc = mdb_env_set_maxdbs(x->env, 2);
    if (rc == 0)
        rc = mdb_env_set_mapsize(x->env, (size_t)s->info->bytes);
    if (rc == 0)
        rc = mdb_env_open(
            x->env, s->path, MDB_RDONLY | MDB_NOSUBDIR | MDB_NOLOCK | MDB_NOTLS | MDB_NORDAHEAD, 0);
    if (rc == 0)
        rc = mdb_env_info(x->env, &info);
    if (rc == 0)
        rc = mdb_env_stat(x->env, &st);
    if (rc != 0)
        return lmdb_err(e, rc, s->path, "open");
    if (info.me_last_pgno != s->info->last_pgno ||
        ((uint64_t)info.me_last_pgno + 1) * st.ms_psize > s->info->bytes)
        return err_set(e, ERR_CORRUPT,
            "%s: last page %zu of %u bytes, the manifest says %llu in %llu", s->path,
            info.me_last_pgno, st.ms_psize, (unsigned long long)s->info->last_pgno,
            (unsigned long long)s->info->bytes);
    x->page_bytes = st.ms_psize;
    rc = mdb_txn_begin(x->env, NULL, MDB_RDONLY, &x->txn);
    return rc == 0 ? 0 : lmdb_err(e, rc, s->path, "open");
}

static void index_close(struct index *x)
{
    if (x->txn)
        mdb_txn_abort(x->txn);
    if (x->env)
        mdb_env_close(x->env);
}

/*
 * Where in the file a value lies. LMDB gives an address in its own map; every page begins with its
 * number (8 bytes), so number and offset in the page say where. A damaged number leads outside,
 * which is refused here, or to bytes whose checksum fails.
 */
static int locate(
    const struct shard *s, const struct index *x, const MDB_val *value, struct extent *out)
{
    size_t in_page = (size_t)((uintptr_t)value->mv_data & (x->page_bytes - 1));
    uint64_t page, bytes = s->info->bytes;
    memcpy(&page, (const uint8_t *)value->mv_data - in_page, sizeof page);
    if (page > s->info->last_pgno || value->mv_size > UINT32_MAX)
        return -1;
    *out = (struct extent){page * x->page_bytes + in_page, (uint32_t)value->mv_size};
    return out->offset > bytes || out->bytes > bytes - out->offset ? -1 : 0;
}

/* Notes one value's place; refuses one that is not inside the file. */
static int note_extent(struct shard *s, const struct index *x, uint64_t i, const MDB_val *key,
    const MDB_val *value, struct err *e)
{
    uint8_t want[8];
    for (int k = 0; k < 8; k++)
        want[k] = (uint8_t)(i >> (56 - 8 * k));
    if (i >= s->info->blocks || key->mv_size != 8 || memcmp(key->mv_data, want, 8) != 0)
        return err_set(e, ERR_CORRUPT, "%s: index: entry %llu is not block %llu of %llu", s->path,
            (unsigned long long)i, (unsigned long long)i, (unsigned long long)s->info->blocks);
    if (locate(s, x, value, &s->extents[i]) < 0)
        return err_set(
            e, ERR_CORRUPT, "%s: block %llu lies outside the file", s->path, (unsigned long long)i);
    return 0;
}

static int read_index(struct shard *s, const struct index *x, struct err *e)
{
    MDB_dbi dbi;
    MDB_cursor *cursor = NULL;
    MDB_val key, value;
    uint64_t i = 0;
    int bad = 0, rc = mdb_dbi_open(x->txn, "blocks", 0, &dbi);
    if (rc == 0)
        rc = mdb_cursor_open(x->txn, dbi, &cursor);
    if (rc != 0)
        return lmdb_err(e, rc, s->path, "index");
    while (!bad && (rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0)
        bad = note_extent(s, x, i++, &key, &value, e);
    mdb_cursor_close(cursor);
    if (bad)
        return bad;
    if (rc != MDB_NOTFOUND)
        return lmdb_err(e, rc, s->path, "index");
    if (i != s->info->blocks)
        return err_set(e, ERR_CORRUPT, "%s: %llu blocks, the manifest says %llu", s->path,
            (unsigned long long)i, (unsigned long long)s->info->blocks);
    return 0;
}

/* The shard's own word on what its tokens mean: a file moved in from another source is refused. */
static int check_meta(const struct shard *s, const struct index *x, struct err *e)
{
    MDB_dbi dbi;
    char name[] = "shard";
    MDB_val key = {sizeof name - 1, name}, value;
    struct extent at;
    int rc = mdb_dbi_open(x->txn, "meta", 0, &dbi);
    if (rc == 0)
        rc = mdb_get(x->txn, dbi, &key, &value);
    if (rc != 0)
        return lmdb_err(e, rc, s->path, "meta");
    if (locate(s, x, &value, &at) < 0)
        return err_set(e, ERR_CORRUPT, "%s: meta lies outside the file", s->path);
    struct buf text = BUF_INIT;
    if ((rc = read_value(s, &at, &text, e)) < 0) {
        buf_release(&text);
        return err_prefix(e, "%s: meta", s->path);
    }
    json_t *j = json_loadb(text.len ? text.data : "", text.len, 0, NULL);
    buf_release(&text);
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

static int take_index(struct shard *s, struct err *e)
{
    struct index x = {0};
    int rc = index_open(s, &x, e);
    if (rc == 0)
        rc = read_index(s, &x, e);
    if (rc == 0)
        rc = check_meta(s, &x, e);
    index_close(&x);
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
    if ((rc = s->fd = fs_open_regular(s->path, e)) < 0 || (rc = check_size(s, e)) < 0)
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
    if ((rc = take_index(s, e)) < 0)
        goto fail;
    posix_fadvise(s->fd, 0, 0, POSIX_FADV_RANDOM); /* read_ahead() knows better */
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
    uint64_t last = i + (uint64_t)ahead - 1;
    if (last >= s->info->blocks)
        last = s->info->blocks - 1;
    uint64_t from = s->extents[i].offset, to = s->extents[last].offset + s->extents[last].bytes;
    if (to <= from) /* not laid out in order */
        to = from + s->extents[i].bytes;
    posix_fadvise(s->fd, (off_t)from, (off_t)(to - from), POSIX_FADV_WILLNEED);
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

static int read_decode(const struct shard *s, uint64_t i, struct block *out, struct err *e)
{
    const struct extent *x = &s->extents[i];
    struct buf value = BUF_INIT;
    int rc = read_value(s, x, &value, e);
    if (rc == 0)
        rc = block_decode(value.data, x->bytes, i, s->m->vocab, out, e);
    buf_release(&value);
    return rc < 0 ? rc : check_length(s, i, out, e);
}

/* From the disk, as far as the system lets go of its copy. */
static int read_again(const struct shard *s, uint64_t i, struct block *out, struct err *e)
{
    const struct extent *x = &s->extents[i];
    posix_fadvise(s->fd, (off_t)x->offset, (off_t)x->bytes, POSIX_FADV_DONTNEED);
    return read_decode(s, i, out, e);
}

int shard_block(struct shard *s, uint64_t i, int ahead, struct block *out, struct err *e)
{
    if (i >= s->info->blocks)
        return err_set(e, ERR_INPUT, "%s: block %llu of %llu", s->path, (unsigned long long)i,
            (unsigned long long)s->info->blocks);
    read_ahead(s, i, ahead);
    if (read_decode(s, i, out, e) == 0)
        return 0;
    int rc = read_again(s, i, out, e);
    return rc < 0 ? err_prefix(e, "%s: block %llu", s->path, (unsigned long long)i) : 1;
}
