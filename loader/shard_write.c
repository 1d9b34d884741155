/* Building shards; and the content hash that readers and writers share. */
#include "loader/shard_store.h"

#include <errno.h>
#include <fcntl.h>
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/check.h"
#include "common/fs.h"
#include "common/lmdb_err.h"
#include "common/mem.h"

#define COMMIT_BLOCKS 256 /* blocks of one LMDB transaction */

/* Zeros behind the last page. LMDB follows 16-bit offsets and key lengths without checking them:
 * with this tail the damaged ones among them still lead into the file. */
#define TAIL_BYTES (192 << 10)

struct shard_writer {
    char *path;
    const struct shard_kind *kind;
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi blocks_db, meta_db;
    struct block block; /* being filled */
    struct buf value;
    struct shard_hash hash;
    uint64_t blocks, tokens, documents, bytes;
};

/* -- content hash -- */

void shard_hash_add(struct shard_hash *h, const struct block *b)
{
    uint8_t row[24];
    put_u32(row, (uint32_t)b->token_count);
    put_u32(row + 4, (uint32_t)b->end_count);
    put_u64(row + 8, b->raw_hash);
    put_u64(row + 16, b->ends_hash);
    buf_add(&h->rows, row, sizeof row);
}

void shard_hash_final(struct shard_hash *h, char out[SHA256_HEX])
{
    hash_sha256_hex(h->rows.data, h->rows.len, out);
    buf_release(&h->rows);
}

/* -- writing -- */

static void writer_free(struct shard_writer *w)
{
    if (w->txn)
        mdb_txn_abort(w->txn);
    if (w->env)
        mdb_env_close(w->env);
    block_release(&w->block);
    buf_release(&w->value);
    buf_release(&w->hash.rows);
    free(w->path);
    free(w);
}

void shard_writer_abort(struct shard_writer **w)
{
    if (!*w)
        return;
    unlink((*w)->path);
    writer_free(*w);
    *w = NULL;
}

int shard_writer_new(
    const char *path, const struct shard_kind *kind, struct shard_writer **out, struct err *e)
{
    struct shard_writer *w = mem_array(1, sizeof *w);
    size_t map = (size_t)kind->max_bytes * 2 + ((size_t)1 << 30); /* addresses, not disk */
    w->path = mem_strdup(path);
    w->kind = kind;
    w->block.tokens = mem_array((size_t)kind->block_tokens, sizeof *w->block.tokens);
    w->block.ends = mem_array((size_t)kind->block_tokens, sizeof *w->block.ends);
    int rc = mdb_env_create(&w->env);
    if (rc == 0)
        rc = mdb_env_set_maxdbs(w->env, 2);
    if (rc == 0)
        rc = mdb_env_set_mapsize(w->env, map);
    if (rc == 0) /* one process writes, and the file counts only when sealed */
        rc = mdb_env_open(w->env, path, MDB_NOSUBDIR | MDB_NOLOCK | MDB_NOSYNC, 0644);
    if (rc == 0)
        rc = mdb_txn_begin(w->env, NULL, 0, &w->txn);
    if (rc == 0)
        rc = mdb_dbi_open(w->txn, "blocks", MDB_CREATE, &w->blocks_db);
    if (rc == 0)
        rc = mdb_dbi_open(w->txn, "meta", MDB_CREATE, &w->meta_db);
    if (rc != 0) {
        rc = lmdb_err(e, rc, path, "create");
        writer_free(w);
        return rc;
    }
    *out = w;
    return 0;
}

uint64_t shard_writer_bytes(const struct shard_writer *w)
{
    return w->bytes;
}

static int commit(struct shard_writer *w, int more)
{
    int rc = mdb_txn_commit(w->txn);
    w->txn = NULL;
    return rc == 0 && more ? mdb_txn_begin(w->env, NULL, 0, &w->txn) : rc;
}

static int flush_block(struct shard_writer *w, struct err *e)
{
    if (w->block.token_count == 0)
        return 0;
    buf_clear(&w->value);
    int rc = block_encode(&w->block, w->blocks, block_dtype(w->kind->vocab), &w->value, e);
    if (rc < 0)
        return err_prefix(e, "%s", w->path);
    const uint8_t *v = (const uint8_t *)w->value.data;
    w->block.raw_hash = get_u64(v + 24);
    w->block.ends_hash = get_u64(v + 32);
    shard_hash_add(&w->hash, &w->block);
    uint8_t key[8];
    for (int k = 0; k < 8; k++)
        key[k] = (uint8_t)(w->blocks >> (56 - 8 * k));
    MDB_val mk = {sizeof key, key}, mv = {w->value.len, w->value.data};
    rc = mdb_put(w->txn, w->blocks_db, &mk, &mv, MDB_APPEND);
    w->bytes += w->value.len;
    w->blocks++;
    if (rc == 0 && w->blocks % COMMIT_BLOCKS == 0)
        rc = commit(w, 1);
    w->block.token_count = w->block.end_count = 0;
    return rc == 0 ? 0 : lmdb_err(e, rc, w->path, "write");
}

int shard_writer_document(struct shard_writer *w, const uint32_t *ids, size_t n, struct err *e)
{
    struct block *b = &w->block;
    size_t full = (size_t)w->kind->block_tokens;
    CHECK(n >= 1 && ids[0] == (uint32_t)w->kind->eot);
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= (uint32_t)w->kind->vocab)
            return err_set(
                e, ERR_INPUT, "token id %u, the vocabulary has %d", ids[i], w->kind->vocab);
    w->tokens += n;
    w->documents++;
    while (n) {
        size_t room = full - b->token_count, take = n < room ? n : room;
        memcpy(b->tokens + b->token_count, ids, take * sizeof *ids);
        b->token_count += take;
        ids += take;
        n -= take;
        if (n == 0)
            b->ends[b->end_count++] = (uint32_t)b->token_count;
        int rc = b->token_count == full ? flush_block(w, e) : 0;
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int put_meta(struct shard_writer *w, struct err *e)
{
    char *text = mem_printf("{\"version\":%d,\"tokenizer_sha256\":\"%s\",\"vocab\":%d,\"eot\":%d,"
                            "\"policy\":\"%s\",\"block_tokens\":%d,\"tokens\":%llu,"
                            "\"documents\":%llu,\"blocks\":%llu}",
        MANIFEST_VERSION, w->kind->tokenizer_sha256, w->kind->vocab, w->kind->eot, MANIFEST_POLICY,
        w->kind->block_tokens, (unsigned long long)w->tokens, (unsigned long long)w->documents,
        (unsigned long long)w->blocks);
    char key[] = "shard";
    MDB_val mk = {sizeof key - 1, key}, mv = {strlen(text), text};
    int rc = mdb_put(w->txn, w->meta_db, &mk, &mv, 0);
    free(text);
    return rc == 0 ? 0 : lmdb_err(e, rc, w->path, "write");
}

/* Durable, read-only, and exactly as long as its page count says. */
static int seal_file(const char *path, uint64_t bytes, struct err *e)
{
    int rc = 0, fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0 || fchmod(fd, 0444) < 0 || fsync(fd) < 0)
        rc = err_errno(e, "%s: seal", path);
    if (fd >= 0)
        close(fd);
    return rc;
}

static int finish_file(struct shard_writer *w, struct manifest_shard *info, struct err *e)
{
    MDB_envinfo env;
    MDB_stat st;
    int rc = flush_block(w, e);
    if (rc == 0)
        rc = put_meta(w, e);
    if (rc < 0)
        return rc;
    if ((rc = commit(w, 0)) != 0 || (rc = mdb_env_sync(w->env, 1)) != 0 ||
        (rc = mdb_env_info(w->env, &env)) != 0 || (rc = mdb_env_stat(w->env, &st)) != 0)
        return lmdb_err(e, rc, w->path, "seal");
    mdb_env_close(w->env);
    w->env = NULL;
    info->last_pgno = env.me_last_pgno;
    info->bytes = (info->last_pgno + 1) * st.ms_psize + TAIL_BYTES;
    return seal_file(w->path, info->bytes, e);
}

int shard_writer_seal(struct shard_writer **pw, struct manifest_shard *info, struct err *e)
{
    struct shard_writer *w = *pw;
    CHECK(w->documents > 0);
    int rc = finish_file(w, info, e);
    if (rc == 0)
        rc = hash_sha256_file(w->path, info->sha256, NULL, e);
    if (rc == 0) {
        info->tokens = w->tokens;
        info->documents = w->documents;
        info->blocks = w->blocks;
        shard_hash_final(&w->hash, info->hash);
    }
    writer_free(w);
    *pw = NULL;
    return rc;
}
