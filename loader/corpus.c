#include "loader/corpus.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/hash.h"
#include "common/rng.h"
#include "loader/crew.h"

#define READ_CHUNK (1u << 20)

/* Chooses validation. A constant: a document is on the same side in every source ever made. */
#define VAL_KEY 0x76616c696461746eu

void corpus_release(struct corpus *c)
{
    for (size_t i = 0; i < c->file_count; i++)
        free(c->files[i].path);
    free(c->files);
    free(c->documents);
    memset(c, 0, sizeof *c);
}

/* -- finding files -- */

static int is_jsonl(const char *path)
{
    size_t n = strlen(path);
    return n > 6 && strcmp(path + n - 6, ".jsonl") == 0;
}

static void add_file(struct corpus *c, const char *path, uint64_t bytes, int given)
{
    if ((c->file_count & (c->file_count - 1)) == 0)
        c->files =
            mem_grow_array(c->files, c->file_count ? 2 * c->file_count : 1, sizeof *c->files);
    c->files[c->file_count++] = (struct corpus_file){
        .path = mem_strdup(path), .jsonl = is_jsonl(path), .given = given, .bytes = bytes};
    c->file_bytes += bytes;
}

static int not_hidden(const struct dirent *d)
{
    return d->d_name[0] != '.';
}

static int walk(struct corpus *c, const char *dir, struct err *e)
{
    struct dirent **names;
    int rc = 0, n = scandir(dir, &names, not_hidden, alphasort);
    if (n < 0)
        return err_errno(e, "%s", dir);
    for (int i = 0; i < n; i++) {
        char *path = mem_printf("%s/%s", dir, names[i]->d_name);
        struct stat st;
        if (rc == 0 && lstat(path, &st) < 0)
            rc = err_errno(e, "%s", path);
        else if (rc == 0 && S_ISDIR(st.st_mode))
            rc = walk(c, path, e);
        else if (rc == 0 && S_ISREG(st.st_mode) && st.st_size > 0)
            add_file(c, path, (uint64_t)st.st_size, 0);
        free(path);
        free(names[i]);
    }
    free(names);
    return rc;
}

int corpus_list(const char *const *inputs, int count, struct corpus *out, struct err *e)
{
    int rc = 0;
    memset(out, 0, sizeof *out);
    for (int i = 0; rc == 0 && i < count; i++) {
        struct stat st;
        if (stat(inputs[i], &st) < 0)
            rc = err_errno(e, "%s", inputs[i]);
        else if (S_ISDIR(st.st_mode))
            rc = walk(out, inputs[i], e);
        else if (S_ISREG(st.st_mode))
            add_file(out, inputs[i], (uint64_t)st.st_size, 1);
        else
            rc = err_set(e, ERR_INPUT, "%s: neither a file nor a directory", inputs[i]);
    }
    if (rc == 0 && out->file_count == 0)
        rc = err_set(e, ERR_INPUT, "%s: no file with text in it", inputs[0]);
    if (rc < 0)
        corpus_release(out);
    return rc;
}

/* -- scanning -- */

struct scan {
    struct corpus *c;
    const struct corpus_options *o;
    corpus_watch *watch;
    void *arg;
    atomic_size_t next;
    atomic_ullong done;
    atomic_int stop;
    pthread_mutex_t lock; /* what follows, and the corpus */
    size_t failed_file;
    struct err failure;
};

/* What one thread found in one file. */
struct found {
    struct corpus_document *documents;
    size_t count, cap;
    uint64_t empty, bad_lines, binary;
};

static void note(struct found *f, size_t file, uint64_t offset, size_t bytes, const char *text,
    size_t text_bytes)
{
    if (text_bytes == 0) {
        f->empty++;
        return;
    }
    if (f->count == f->cap) {
        f->cap = f->cap ? 2 * f->cap : 16;
        f->documents = mem_grow_array(f->documents, f->cap, sizeof *f->documents);
    }
    f->documents[f->count++] = (struct corpus_document){
        .hash = {hash_xxh64(text, text_bytes, 0), hash_xxh64(text, text_bytes, VAL_KEY)},
        .file = (uint32_t)file,
        .offset = offset,
        .bytes = (uint32_t)bytes,
        .text_bytes = (uint32_t)text_bytes};
}

/* The text of one line; *j holds it and is the caller's to drop. */
static const char *line_text(
    const char *line, size_t n, const char *field, json_t **j, size_t *len, struct err *e)
{
    json_error_t je;
    *j = json_loadb(line, n, JSON_ALLOW_NUL, &je);
    const json_t *v = json_object_get(*j, field);
    if (!*j)
        err_set(e, ERR_INPUT, "not JSON: %s", je.text);
    else if (!json_is_string(v))
        err_set(e, ERR_INPUT, "no string \"%s\" (see --field)", field);
    else {
        *len = json_string_length(v);
        return json_string_value(v);
    }
    json_decref(*j);
    *j = NULL;
    return NULL;
}

static int scan_line(const struct scan *s, struct found *f, size_t file, uint64_t offset,
    uint64_t number, const char *line, size_t n, struct err *e)
{
    json_t *j = NULL;
    size_t len = 0;
    while (n && (line[n - 1] == '\r' || line[n - 1] == ' '))
        n--;
    if (n == 0)
        return 0;
    const char *text = line_text(line, n, s->o->field, &j, &len, e);
    if (text) {
        note(f, file, offset, n, text, len);
        json_decref(j);
        return 0;
    }
    f->bad_lines++;
    return s->o->skip_bad
               ? 0
               : err_prefix(e, "%s:%llu", s->c->files[file].path, (unsigned long long)number);
}

/* Takes the whole lines at the front of `b`; the rest moves to its front. */
static int scan_lines(const struct scan *s, struct found *f, size_t file, struct buf *b,
    uint64_t *offset, uint64_t *number, struct err *e)
{
    size_t at = 0;
    int rc = 0;
    for (const char *nl; rc == 0 && (nl = memchr(b->data + at, '\n', b->len - at));) {
        size_t n = (size_t)(nl - (b->data + at));
        rc = scan_line(s, f, file, *offset, ++*number, b->data + at, n, e);
        at += n + 1;
        *offset += n + 1;
    }
    memmove(b->data, b->data + at, b->len - at);
    b->len -= at;
    if (rc == 0 && b->len > CORPUS_MAX_DOCUMENT)
        rc = err_set(e, ERR_INPUT, "%s:%llu: a line of more than %u bytes", s->c->files[file].path,
            (unsigned long long)*number + 1, CORPUS_MAX_DOCUMENT);
    return rc;
}

static int scan_jsonl(struct scan *s, struct found *f, size_t file, struct err *e)
{
    const char *path = s->c->files[file].path;
    struct buf b = BUF_INIT;
    uint64_t offset = 0, number = 0;
    int rc = 0, fd = fs_open_regular(path, e);
    if (fd < 0)
        return fd;
    while (rc == 0 && !atomic_load(&s->stop)) {
        buf_reserve(&b, READ_CHUNK);
        ssize_t n = read(fd, b.data + b.len, READ_CHUNK);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = err_errno(e, "%s", path);
        if (n <= 0)
            break;
        b.len += (size_t)n;
        atomic_fetch_add(&s->done, (unsigned long long)n);
        rc = scan_lines(s, f, file, &b, &offset, &number, e);
    }
    if (rc == 0 && b.len) /* the last line has no newline */
        rc = scan_line(s, f, file, offset, number + 1, b.data, b.len, e);
    close(fd);
    buf_release(&b);
    return rc;
}

int corpus_is_binary(const struct corpus_file *f)
{
    char head[8192];
    int fd = f->given ? -1 : fs_open_regular(f->path, NULL);
    ssize_t n = fd < 0 ? -1 : read(fd, head, sizeof head);
    if (fd >= 0)
        close(fd);
    return n > 0 && memchr(head, 0, (size_t)n) != NULL;
}

static int scan_text(struct scan *s, struct found *f, size_t file, struct err *e)
{
    const struct corpus_file *p = &s->c->files[file];
    struct buf b = BUF_INIT;
    if (corpus_is_binary(p)) {
        f->binary++;
        atomic_fetch_add(&s->done, p->bytes);
        return 0;
    }
    int rc = fs_read(p->path, CORPUS_MAX_DOCUMENT, &b, e);
    int binary = rc == 0 && b.len && memchr(b.data, 0, b.len);
    if (rc == ERR_INPUT)
        err_prefix(e, "one document a file (split it, or use .jsonl)");
    else if (binary && p->given)
        rc = err_set(e, ERR_INPUT, "%s: not text: it has a NUL byte", p->path);
    else if (binary)
        f->binary++;
    else if (rc == 0)
        note(f, file, 0, b.len, b.data, b.len);
    atomic_fetch_add(&s->done, (unsigned long long)b.len);
    buf_release(&b);
    return rc;
}

static void scan_take(struct scan *s, struct found *f)
{
    struct corpus *c = s->c;
    if (c->count + f->count > c->cap) {
        c->cap = c->count + f->count + c->cap / 2;
        c->documents = mem_grow_array(c->documents, c->cap, sizeof *c->documents);
    }
    if (f->count)
        memcpy(c->documents + c->count, f->documents, f->count * sizeof *f->documents);
    c->count += f->count;
    c->empty += f->empty;
    c->bad_lines += f->bad_lines;
    c->binary_files += f->binary;
}

/* Files are taken in order: when one fails all before it were taken, so the first failure wins. */
static void scan_job(void *arg)
{
    struct scan *s = arg;
    for (;;) {
        size_t i = atomic_fetch_add(&s->next, 1);
        if (i >= s->c->file_count || atomic_load(&s->stop))
            return;
        struct found f = {0};
        struct err e = {0};
        int rc = s->c->files[i].jsonl ? scan_jsonl(s, &f, i, &e) : scan_text(s, &f, i, &e);
        pthread_mutex_lock(&s->lock);
        if (rc == 0) {
            scan_take(s, &f);
        } else if (i < s->failed_file) {
            s->failed_file = i;
            s->failure = e;
            atomic_store(&s->next, s->c->file_count);
        }
        pthread_mutex_unlock(&s->lock);
        free(f.documents);
    }
}

static void scan_tick(void *arg)
{
    struct scan *s = arg;
    if (s->watch && s->watch(s->arg, "scan", atomic_load(&s->done), s->c->file_bytes))
        atomic_store(&s->stop, 1);
}

int corpus_scan(
    struct corpus *c, const struct corpus_options *o, corpus_watch *watch, void *arg, struct err *e)
{
    struct scan s = {.c = c, .o = o, .watch = watch, .arg = arg, .failed_file = SIZE_MAX};
    if (c->file_count > UINT32_MAX)
        return err_set(e, ERR_INPUT, "%zu files are too many", c->file_count);
    pthread_mutex_init(&s.lock, NULL);
    crew_run(o->threads, scan_job, scan_tick, &s);
    pthread_mutex_destroy(&s.lock);
    if (atomic_load(&s.stop))
        return err_set(e, ERR_STOPPED, "stopped while reading the inputs");
    if (s.failed_file != SIZE_MAX)
        return err_set(e, s.failure.code, "%s", s.failure.msg);
    return 0;
}

/* -- order -- */

static int by_hash(const void *a, const void *b)
{
    return memcmp(((const struct corpus_document *)a)->hash,
        ((const struct corpus_document *)b)->hash, sizeof((struct corpus_document *)0)->hash);
}

static int by_order(const void *a, const void *b)
{
    uint64_t x = ((const struct corpus_document *)a)->order;
    uint64_t y = ((const struct corpus_document *)b)->order;
    return x != y ? (x < y ? -1 : 1) : by_hash(a, b);
}

void corpus_arrange(struct corpus *c, uint64_t seed, double val_share)
{
    size_t kept = 0;
    if (c->count)
        qsort(c->documents, c->count, sizeof *c->documents, by_hash);
    for (size_t i = 0; i < c->count; i++) {
        struct corpus_document *d = &c->documents[i];
        if (kept && by_hash(d, &c->documents[kept - 1]) == 0)
            continue;
        d->order = rng_key(rng_key(seed, d->hash[0]), d->hash[1]);
        d->val = rng_unit(rng_key(VAL_KEY, d->hash[0]), 0) < val_share;
        c->documents[kept++] = *d;
    }
    c->duplicates += c->count - kept;
    c->count = kept;
    if (kept)
        qsort(c->documents, kept, sizeof *c->documents, by_order);
}

void corpus_limit(struct corpus *c, uint64_t max_bytes)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < c->count; i++) {
        bytes += c->documents[i].text_bytes;
        if (bytes > max_bytes && i > 0) {
            c->count = i;
            return;
        }
    }
}

/* -- reading one document -- */

static int read_range(const char *path, uint64_t offset, size_t n, struct buf *out, struct err *e)
{
    size_t done = 0;
    int fd = fs_open_regular(path, e);
    if (fd < 0)
        return fd;
    buf_reserve(out, n);
    while (done < n) {
        ssize_t r = pread(fd, out->data + out->len + done, n - done, (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            break;
        done += (size_t)r;
    }
    int rc = done == n ? 0 : err_set(e, ERR_STATE, "%s: has changed while it was read", path);
    close(fd);
    out->len += done;
    return rc;
}

int corpus_text(const struct corpus *c, const struct corpus_document *d, const char *field,
    struct buf *out, struct err *e)
{
    const struct corpus_file *f = &c->files[d->file];
    size_t start = out->len;
    int rc = read_range(f->path, d->offset, d->bytes, out, e);
    if (rc == 0 && f->jsonl) {
        json_t *j = NULL;
        size_t len = 0;
        const char *text = line_text(out->data + start, d->bytes, field, &j, &len, e);
        out->len = start;
        if (text)
            buf_add(out, text, len);
        json_decref(j);
        if (!text)
            return err_prefix(e, "%s: has changed while it was read", f->path);
    }
    if (rc == 0 && (out->len - start != d->text_bytes ||
                       hash_xxh64(out->data + start, d->text_bytes, 0) != d->hash[0]))
        rc = err_set(e, ERR_STATE, "%s: has changed while it was read", f->path);
    return rc;
}
