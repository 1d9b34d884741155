#include "loader/ingest.h"

#include <dirent.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/manifest.h"
#include "common/tokenizer.h"
#include "loader/crew.h"
#include "loader/shard_store.h"

/* Documents are encoded by all threads a window at a time, and written in order. */
#define WINDOW_BYTES     (16u << 20)
#define WINDOW_DOCUMENTS 8192

struct ingest {
    const struct ingest_options *o;
    corpus_watch *watch;
    void *arg;
    struct corpus corpus;
    struct tokenizer *tokenizer;
    struct manifest manifest;
    struct shard_kind kind;
    struct shard_writer *writer;
    struct manifest_shard *shard; /* the one being written */
    char *partial;
    int lock;
    uint64_t text_bytes, done_bytes, stored_bytes;
};

/* -- encoding a window of documents -- */

struct window {
    struct ingest *in;
    size_t *documents; /* indices into the corpus, (count) */
    struct ids *ids;   /* (count) */
    size_t count;
    atomic_size_t next;
    atomic_ullong bytes;
    atomic_int stop, failed;
    struct err failure; /* written by the thread that sets `failed` */
};

static int encode_one(
    struct window *w, size_t i, struct tokenizer_scratch *scratch, struct buf *text, struct err *e)
{
    const struct ingest *in = w->in;
    const struct corpus_document *d = &in->corpus.documents[w->documents[i]];
    struct ids *ids = &w->ids[i];
    buf_clear(text);
    ids->len = 0;
    int rc = corpus_text(&in->corpus, d, in->o->read.field, text, e);
    if (rc < 0)
        return rc;
    ids_add(ids, (uint32_t)in->kind.eot);
    rc = tokenizer_encode(in->tokenizer, scratch, text->data, text->len, ids, e);
    atomic_fetch_add(&w->bytes, d->text_bytes);
    return rc < 0 ? err_prefix(e, "%s", in->corpus.files[d->file].path) : 0;
}

static void encode_job(void *arg)
{
    struct window *w = arg;
    struct tokenizer_scratch *scratch = tokenizer_scratch_new(w->in->tokenizer);
    struct buf text = BUF_INIT;
    struct err e = {0};
    size_t i;
    while (!atomic_load(&w->stop) && (i = atomic_fetch_add(&w->next, 1)) < w->count)
        if (encode_one(w, i, scratch, &text, &e) < 0) {
            if (!atomic_exchange(&w->failed, 1))
                w->failure = e;
            atomic_store(&w->stop, 1);
        }
    buf_release(&text);
    tokenizer_scratch_free(&scratch);
}

static void encode_tick(void *arg)
{
    struct window *w = arg;
    struct ingest *in = w->in;
    uint64_t done = in->done_bytes + atomic_load(&w->bytes);
    if (in->watch && in->watch(in->arg, "encode", done, in->text_bytes))
        atomic_store(&w->stop, 1);
}

static int encode_window(struct window *w, struct err *e)
{
    atomic_store(&w->next, 0);
    atomic_store(&w->bytes, 0);
    crew_run(w->in->o->read.threads, encode_job, encode_tick, w);
    w->in->done_bytes += atomic_load(&w->bytes);
    if (atomic_load(&w->failed))
        return err_set(e, w->failure.code, "%s", w->failure.msg);
    if (atomic_load(&w->stop))
        return err_set(e, ERR_STOPPED, "stopped; nothing was published");
    return 0;
}

/* -- writing -- */

static int seal_shard(struct ingest *in, struct err *e)
{
    if (!in->writer)
        return 0;
    int rc = shard_writer_seal(&in->writer, in->shard, e);
    if (rc == 0)
        in->stored_bytes += in->shard->bytes;
    return rc;
}

static int open_shard(struct ingest *in, int split, struct err *e)
{
    struct manifest_split *p = &in->manifest.splits[split];
    p->shards = mem_grow_array(p->shards, (size_t)p->shard_count + 1, sizeof *p->shards);
    in->shard = &p->shards[p->shard_count];
    memset(in->shard, 0, sizeof *in->shard);
    snprintf(in->shard->file, sizeof in->shard->file, "%s-%05d.shard", split_name(split),
        p->shard_count);
    p->shard_count++;
    char *path = mem_printf("%s/%s", in->partial, in->shard->file);
    int rc = shard_writer_new(path, &in->kind, &in->writer, e);
    free(path);
    return rc;
}

static int write_window(struct ingest *in, const struct window *w, int split, struct err *e)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < w->count; i++) {
        if (!in->writer)
            rc = open_shard(in, split, e);
        if (rc == 0)
            rc = shard_writer_document(in->writer, w->ids[i].data, w->ids[i].len, e);
        if (rc == 0 && shard_writer_bytes(in->writer) >= in->o->shard_bytes)
            rc = seal_shard(in, e);
    }
    return rc;
}

static int write_split(struct ingest *in, struct window *w, int split, struct err *e)
{
    size_t at = 0, count = in->corpus.count;
    int rc = 0;
    while (rc == 0 && at < count) {
        uint64_t bytes = 0;
        for (w->count = 0; at < count && w->count < WINDOW_DOCUMENTS && bytes < WINDOW_BYTES; at++)
            if ((int)in->corpus.documents[at].val == split) {
                bytes += in->corpus.documents[at].text_bytes;
                w->documents[w->count++] = at;
            }
        in->manifest.splits[split].text_bytes += bytes;
        rc = encode_window(w, e);
        if (rc == 0)
            rc = write_window(in, w, split, e);
    }
    return rc < 0 ? rc : seal_shard(in, e);
}

static int write_shards(struct ingest *in, struct err *e)
{
    struct window w = {.in = in};
    int rc = 0;
    w.documents = mem_array(WINDOW_DOCUMENTS, sizeof *w.documents);
    w.ids = mem_array(WINDOW_DOCUMENTS, sizeof *w.ids);
    for (int k = 0; rc == 0 && k < SPLIT_COUNT; k++)
        rc = write_split(in, &w, k, e);
    for (size_t i = 0; i < WINDOW_DOCUMENTS; i++)
        ids_release(&w.ids[i]);
    free(w.documents);
    free(w.ids);
    return rc;
}

/* -- what it is made from, and where it goes -- */

/* Documents in order and every option that changes the result. */
static void fingerprint(const struct ingest *in, char out[SHA256_HEX])
{
    const struct ingest_options *o = in->o;
    struct buf b = BUF_INIT;
    uint64_t chain[2] = {0, 0};
    for (size_t i = 0; i < in->corpus.count; i++)
        for (int k = 0; k < 2; k++)
            chain[k] = hash_xxh64(in->corpus.documents[i].hash, 16, chain[k] + (uint64_t)k);
    buf_printf(&b, "fullband ingest 1\n%s %s %.17g %llu %llu %d %d\n%llu %016llx%016llx\n",
        in->kind.tokenizer_sha256, o->name, o->val_share, (unsigned long long)o->seed,
        (unsigned long long)o->shard_bytes, o->block_tokens, BLOCK_ZSTD_LEVEL,
        (unsigned long long)in->corpus.count, (unsigned long long)chain[0],
        (unsigned long long)chain[1]);
    hash_sha256_hex(b.data, b.len, out);
    buf_release(&b);
}

static int is_empty_dir(const char *path)
{
    DIR *d = opendir(path);
    int entries = 0;
    if (!d)
        return 0;
    for (struct dirent *x; (x = readdir(d));)
        entries += strcmp(x->d_name, ".") != 0 && strcmp(x->d_name, "..") != 0;
    closedir(d);
    return entries == 0;
}

/* 1: OUT is this very result already; 0: it may be made; else an error. */
static int look_at_out(struct ingest *in, struct err *e)
{
    const char *out = in->o->out;
    struct manifest m;
    char *path = mem_printf("%s/%s", out, MANIFEST_FILE);
    int finished = fs_exists(path);
    free(path);
    if (!fs_exists(out) || is_empty_dir(out))
        return 0;
    if (!finished)
        return err_set(e, ERR_STATE, "%s: exists and is not a source; choose another --out", out);
    int rc = manifest_load(out, &m, e);
    if (rc < 0)
        return rc;
    if (strcmp(m.fingerprint, in->manifest.fingerprint) != 0)
        rc = err_set(e, ERR_STATE,
            "%s: made from other inputs, options or tokenizer; remove it or choose another --out",
            out);
    else
        memcpy(in->manifest.root, m.root, sizeof m.root);
    manifest_release(&m);
    return rc < 0 ? rc : 1;
}

/* Locks OUT.partial, which must be new, empty, or the rest of an ingest. */
static int lock_partial(struct ingest *in, struct err *e)
{
    char *path = mem_printf("%s/lock", in->partial);
    struct stat held, there;
    int rc = fs_mkdir_p(in->partial, 0755, e);
    if (rc == 0 && !fs_exists(path) && !is_empty_dir(in->partial))
        rc = err_set(e, ERR_INPUT,
            "%s: exists and is not the rest of an interrupted ingest; remove it or choose another "
            "--out",
            in->partial);
    if (rc == 0)
        in->lock = rc = fs_lock(path, e);
    if (rc == ERR_STATE)
        err_prefix(e, "another ingest is at work");
    /* The other may have published, and taken the lock's file along, just before we got it. */
    else if (rc >= 0 && (fstat(in->lock, &held) < 0 || stat(path, &there) < 0 ||
                            held.st_dev != there.st_dev || held.st_ino != there.st_ino))
        rc = err_set(e, ERR_STATE, "%s: another ingest has just published it", in->o->out);
    free(path);
    return rc < 0 ? rc : 0;
}

/* Takes OUT.partial for us alone and empties it. */
static int take_partial(struct ingest *in, struct err *e)
{
    int rc = lock_partial(in, e);
    if (rc < 0)
        return rc;
    struct dirent **names;
    int n = scandir(in->partial, &names, NULL, NULL);
    if (n < 0)
        return err_errno(e, "%s", in->partial);
    rc = 0;
    for (int i = 0; i < n; i++) {
        const char *name = names[i]->d_name;
        if (rc == 0 && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
            strcmp(name, "lock") != 0) {
            char *old = mem_printf("%s/%s", in->partial, name);
            rc = fs_remove_tree(old, e);
            free(old);
        }
        free(names[i]);
    }
    free(names);
    return rc;
}

static int publish(struct ingest *in, struct err *e)
{
    char *lock = mem_printf("%s/lock", in->o->out);
    int rc = manifest_write(in->partial, &in->manifest, e);
    if (rc == 0) {
        rmdir(in->o->out); /* an empty directory may stand there */
        rc = fs_rename_durable(in->partial, in->o->out, e);
    }
    if (rc == 0)
        unlink(lock); /* moved along, and held until now */
    free(lock);
    return rc;
}

/* -- the whole -- */

static void describe(const struct ingest *in, struct ingest_report *r)
{
    const struct corpus *c = &in->corpus;
    const struct manifest *m = &in->manifest;
    r->files = c->file_count;
    r->documents = c->count;
    r->duplicates = c->duplicates;
    r->empty = c->empty;
    r->binary_files = c->binary_files;
    r->bad_lines = c->bad_lines;
    r->text_bytes = in->text_bytes;
    r->stored_bytes = in->stored_bytes;
    r->train_tokens = m->splits[SPLIT_TRAIN].tokens;
    r->val_tokens = m->splits[SPLIT_VAL].tokens;
    r->shards = m->splits[SPLIT_TRAIN].shard_count + m->splits[SPLIT_VAL].shard_count;
    memcpy(r->root, m->root, sizeof r->root);
}

static int gather(struct ingest *in, struct err *e)
{
    const struct ingest_options *o = in->o;
    struct corpus *c = &in->corpus;
    int rc = corpus_list(o->inputs, o->input_count, c, e);
    if (rc == 0)
        rc = corpus_scan(c, &o->read, in->watch, in->arg, e);
    if (rc < 0)
        return rc;
    corpus_arrange(c, o->seed, o->val_share);
    if (o->max_bytes)
        corpus_limit(c, o->max_bytes);
    size_t train = 0;
    for (size_t i = 0; i < c->count; i++) {
        in->text_bytes += c->documents[i].text_bytes;
        train += !c->documents[i].val;
    }
    if (train == 0)
        return err_set(
            e, ERR_INPUT, "%s: no document to train on among %zu", o->inputs[0], c->count);
    return 0;
}

static int prepare(struct ingest *in, struct err *e)
{
    const struct ingest_options *o = in->o;
    struct manifest *m = &in->manifest;
    int rc = tokenizer_load(o->tokenizer, &in->tokenizer, e);
    if (rc < 0)
        return rc;
    m->name = mem_strdup(o->name);
    m->vocab = tokenizer_vocab(in->tokenizer);
    m->eot = tokenizer_eot(in->tokenizer);
    m->block_tokens = o->block_tokens;
    strcpy(m->tokenizer_sha256, tokenizer_sha256(in->tokenizer));
    /* A shard may grow beyond its size by its last document, at most four bytes a byte of text. */
    in->kind = (struct shard_kind){.tokenizer_sha256 = m->tokenizer_sha256,
        .vocab = m->vocab,
        .eot = m->eot,
        .block_tokens = m->block_tokens,
        .max_bytes = o->shard_bytes + 4ull * CORPUS_MAX_DOCUMENT};
    size_t n = strlen(o->out);
    while (n > 1 && o->out[n - 1] == '/')
        n--;
    in->partial = mem_printf("%.*s.partial", (int)n, o->out);
    return 0;
}

int ingest_run(const struct ingest_options *o, corpus_watch *watch, void *arg,
    struct ingest_report *report, struct err *e)
{
    struct ingest in = {.o = o, .watch = watch, .arg = arg, .lock = -1};
    memset(report, 0, sizeof *report);
    int rc = prepare(&in, e);
    if (rc == 0)
        rc = gather(&in, e);
    if (rc < 0)
        goto done;
    in.manifest.duplicates = in.corpus.duplicates;
    fingerprint(&in, in.manifest.fingerprint);
    rc = look_at_out(&in, e);
    if (rc == 1)
        report->existed = 1;
    if (rc != 0)
        goto done;
    rc = take_partial(&in, e);
    if (rc == 0)
        rc = write_shards(&in, e);
    if (rc == 0)
        rc = publish(&in, e);
done:
    if (rc >= 0)
        describe(&in, report);
    shard_writer_abort(&in.writer);
    if (in.lock >= 0)
        close(in.lock);
    free(in.partial);
    manifest_release(&in.manifest);
    tokenizer_free(&in.tokenizer);
    corpus_release(&in.corpus);
    return rc < 0 ? rc : 0;
}
