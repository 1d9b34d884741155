#include "loader/serve.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/cursor.h"
#include "common/wire.h"
#include "loader/source.h"

#define CACHE_BLOCKS   32 /* decoded blocks a source keeps */
#define RING_MIN       64
#define RING_MAX       65536
#define AHEAD_REQUESTS 8 /* prefetch: so many requests like the last one */
#define AHEAD_MIN      32

/* A decoded row; its arrays lie in the server's. */
struct row {
    int stream, held;
    uint64_t ordinal, id, digest;
};

struct server {
    const struct plan *plan;
    int seq;
    struct source *sources[CONFIG_MAX_SOURCES];
    size_t ring; /* rows */
    struct row *rows;
    uint32_t *tokens;     /* (ring, S + 1) */
    uint8_t *starts;      /* (ring, S) */
    pthread_mutex_t lock; /* guards all above but plan and seq, and all below */
    pthread_cond_t work;
    pthread_t thread;
    int threaded, stop;
    uint64_t next, end; /* training ordinals to decode ahead */
    struct server_stats stats;
};

/* -- opening -- */

static int open_source(struct server *s, int i, struct err *e)
{
    const struct plan *p = s->plan;
    const struct plan_source *want = &p->sources[i];
    int rc = source_open(want->path, CACHE_BLOCKS, &s->sources[i], e);
    if (rc < 0)
        return err_prefix(e, "source %s", want->name);
    const struct manifest *m = source_manifest(s->sources[i]);
    if (strcmp(m->root, want->manifest_root) != 0)
        return err_set(e, ERR_MISMATCH,
            "source %s: %s has root %.16s, the plan was made with %.16s", want->name, want->path,
            m->root, want->manifest_root);
    if (strcmp(m->tokenizer_sha256, p->tokenizer_sha256) != 0)
        return err_set(e, ERR_MISMATCH, "source %s: tokenizer %.16s, the plan's is %.16s",
            want->name, m->tokenizer_sha256, p->tokenizer_sha256);
    if (source_rows(s->sources[i], SPLIT_TRAIN, s->seq) != want->train_samples ||
        source_rows(s->sources[i], SPLIT_VAL, s->seq) != want->val_samples)
        return err_set(e, ERR_MISMATCH, "source %s: not as many rows as the plan says", want->name);
    return 0;
}

static int new_ring(struct server *s, size_t cache_bytes, struct err *e)
{
    size_t row = ((size_t)s->seq + 1) * 4 + (size_t)s->seq + sizeof *s->rows;
    s->ring = cache_bytes / row;
    s->ring = s->ring < RING_MIN ? RING_MIN : s->ring > RING_MAX ? RING_MAX : s->ring;
    s->rows = mem_try_array(s->ring, sizeof *s->rows);
    s->tokens = mem_try_array(s->ring, ((size_t)s->seq + 1) * sizeof *s->tokens);
    s->starts = mem_try_array(s->ring, (size_t)s->seq);
    if (!s->rows || !s->tokens || !s->starts)
        return err_set(e, ERR_NOMEM, "%zu rows of %d tokens: not enough memory", s->ring, s->seq);
    return 0;
}

static void *prefetch(void *arg);

int server_new(const struct plan *p, size_t cache_bytes, struct server **out, struct err *e)
{
    struct server *s = mem_array(1, sizeof *s);
    int rc = 0;
    s->plan = p;
    s->seq = p->c.data.seq_len;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    for (int i = 0; rc == 0 && i < p->source_count; i++)
        rc = open_source(s, i, e);
    if (rc == 0)
        rc = new_ring(s, cache_bytes, e);
    if (rc == 0 && pthread_create(&s->thread, NULL, prefetch, s) != 0)
        rc = err_set(e, ERR_NOMEM, "cannot start the prefetch thread");
    else if (rc == 0)
        s->threaded = 1;
    if (rc < 0)
        server_free(&s);
    *out = s;
    return rc;
}

void server_free(struct server **ps)
{
    struct server *s = *ps;
    if (!s)
        return;
    if (s->threaded) {
        pthread_mutex_lock(&s->lock);
        s->stop = 1;
        pthread_cond_signal(&s->work);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
    }
    for (int i = 0; i < s->plan->source_count; i++)
        source_close(&s->sources[i]);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    free(s->rows);
    free(s->tokens);
    free(s->starts);
    free(s);
    *ps = NULL;
}

/* -- rows; with the lock held -- */

static struct row *row_place(struct server *s, int stream, uint64_t ordinal)
{
    return &s->rows[(ordinal * 2 + (uint64_t)stream) % s->ring];
}

static int row_held(const struct row *r, int stream, uint64_t ordinal)
{
    return r->held && r->stream == stream && r->ordinal == ordinal;
}

/* Decodes a row into its place in the ring. */
static int row_decode(struct server *s, int stream, uint64_t ordinal, struct err *e)
{
    struct row *r = row_place(s, stream, ordinal);
    size_t at = (size_t)(r - s->rows), seq = (size_t)s->seq;
    uint32_t *tokens = s->tokens + at * (seq + 1);
    struct sample x = stream == BATCH_TRAIN ? plan_train_sample(s->plan, ordinal)
                                            : plan_val_sample(s->plan, ordinal);
    r->held = 0;
    int rc = source_row(s->sources[x.source], stream == BATCH_TRAIN ? SPLIT_TRAIN : SPLIT_VAL,
        x.index, s->seq, tokens, s->starts + at * seq, e);
    if (rc < 0)
        return err_prefix(e, "source %s", s->plan->sources[x.source].name);
    *r = (struct row){.stream = stream,
        .held = 1,
        .ordinal = ordinal,
        .id = x.id,
        .digest = row_digest(x.id, tokens, seq + 1)};
    return 0;
}

/* -- prefetch -- */

static uint64_t train_rows(const struct plan *p)
{
    return (uint64_t)p->c.train.steps * (uint64_t)p->c.train.batch_rows;
}

/* The rows behind a training request, as far as a few like it reach, are wanted next. */
static void want_ahead(struct server *s, const struct batch_request *r)
{
    uint64_t ahead = (r->hi - r->lo) * AHEAD_REQUESTS, total = train_rows(s->plan);
    ahead = ahead < AHEAD_MIN ? AHEAD_MIN : ahead;
    ahead = ahead > s->ring / 4 ? s->ring / 4 : ahead;
    if (s->next < r->hi || s->next > r->hi + ahead) /* elsewhere: a resume, or far behind */
        s->next = r->hi;
    s->end = r->hi + ahead < total ? r->hi + ahead : total;
    if (s->next < s->end)
        pthread_cond_signal(&s->work);
}

/* A row that cannot be read stops the prefetch: the request for it will say why. */
static void *prefetch(void *arg)
{
    struct server *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        if (s->next >= s->end) {
            pthread_cond_wait(&s->work, &s->lock);
            continue;
        }
        uint64_t ordinal = s->next++;
        if (row_held(row_place(s, BATCH_TRAIN, ordinal), BATCH_TRAIN, ordinal))
            continue;
        if (row_decode(s, BATCH_TRAIN, ordinal, NULL) < 0)
            s->end = s->next;
        else
            s->stats.prefetched++;
        pthread_mutex_unlock(&s->lock); /* the asking thread may come between */
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* -- answers -- */

static int check_request(const struct server *s, const struct batch_request *r, struct err *e)
{
    int train = r->stream == BATCH_TRAIN;
    uint64_t total = train ? train_rows(s->plan) : plan_val_rows(s->plan);
    uint64_t row = 8 + ((uint64_t)s->seq + 1) * 4 + (uint64_t)s->seq;
    uint64_t most = (WIRE_MAX_BATCH_BYTES - 4096) / row;
    if (r->lo > r->hi || r->hi > total)
        return err_set(e, ERR_INPUT, "rows [%llu, %llu) of %llu: beyond the %s",
            (unsigned long long)r->lo, (unsigned long long)r->hi, (unsigned long long)total,
            train ? "run" : "validation split");
    if (r->hi - r->lo > most)
        return err_set(e, ERR_INPUT, "%llu rows of %d tokens in one batch, at most %llu fit",
            (unsigned long long)(r->hi - r->lo), s->seq, (unsigned long long)most);
    return 0;
}

static int take_row(
    struct server *s, const struct batch_request *r, struct batch *b, int k, struct err *e)
{
    uint64_t ordinal = r->lo + (uint64_t)k;
    size_t seq = (size_t)s->seq, to = (size_t)k;
    struct row *x = row_place(s, r->stream, ordinal);
    pthread_mutex_lock(&s->lock);
    int held = row_held(x, r->stream, ordinal), rc = 0;
    if (!held)
        rc = row_decode(s, r->stream, ordinal, e);
    if (rc == 0) {
        size_t from = (size_t)(x - s->rows);
        b->sample_ids[k] = x->id;
        b->content += x->digest;
        memcpy(b->tokens + to * (seq + 1), s->tokens + from * (seq + 1), (seq + 1) * 4);
        memcpy(b->doc_starts + to * seq, s->starts + from * seq, seq);
        s->stats.rows++;
        s->stats.hits += (uint64_t)held;
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int server_answer(struct server *s, const struct batch_request *r, struct buf *body, struct err *e)
{
    struct batch b;
    int rc = check_request(s, r, e);
    if (rc < 0 || (rc = batch_new((int)(r->hi - r->lo), s->seq, &b, e)) < 0)
        return rc;
    b.stream = r->stream;
    b.step = r->step;
    b.lo = r->lo;
    for (int k = 0; rc == 0 && k < b.rows; k++)
        rc = take_row(s, r, &b, k, e);
    if (rc == 0)
        batch_encode(&b, body);
    batch_release(&b);
    pthread_mutex_lock(&s->lock);
    s->stats.answers += rc == 0;
    if (rc == 0 && r->stream == BATCH_TRAIN)
        want_ahead(s, r);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void server_stats(struct server *s, struct server_stats *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
    for (int i = 0; i < s->plan->source_count; i++)
        out->rereads += source_rereads(s->sources[i]);
    pthread_mutex_unlock(&s->lock);
}
