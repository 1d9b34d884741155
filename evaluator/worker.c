#include "evaluator/worker.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/check.h"
#include "common/mem.h"
#include "evaluator/suites.h"

enum { ROWS_TIMEOUT_SECONDS = 60 };

/* What stays between jobs. */
struct bench {
    struct bus *bus;
    const struct rundir *run;
    int threads;
    struct snapshot snapshot; /* dir NULL: none open */
    struct rows rows;         /* count 0: not fetched */
    atomic_int stop;
};

struct worker {
    struct bench bench;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int fd;
    int has_job, busy; /* has_job: not yet taken by the thread; busy: until worker_finish */
    struct worker_job job;
    json_t *result;
    int code;
    struct err error;
};

void worker_job_release(struct worker_job *j)
{
    free(j->checkpoint);
    j->checkpoint = NULL;
}

/* The snapshot of the job, reopened only when it is another than the last. */
static int open_snapshot(struct bench *b, const char *dir, struct err *e)
{
    struct model_limits limits = suite_limits(b->run->plan.c.data.seq_len);
    if (b->snapshot.dir && strcmp(b->snapshot.dir, dir) == 0)
        return 0;
    snapshot_release(&b->snapshot);
    int rc = snapshot_open(dir, b->threads, &limits, &b->snapshot, e);
    if (rc == 0 && b->snapshot.config.vocab != b->run->plan.c.model.vocab) {
        rc = err_set(e, ERR_MISMATCH, "%s: vocabulary of %d, the run's data has %d", dir,
            b->snapshot.config.vocab, b->run->plan.c.model.vocab);
        snapshot_release(&b->snapshot);
    }
    return rc;
}

static int score(struct bench *b, const struct worker_job *j, json_t **result, struct err *e)
{
    const struct config *c = &b->run->config;
    int rc = open_snapshot(b, j->checkpoint, e);
    if (rc == 0 && b->rows.count == 0)
        rc = rows_fetch(b->bus, b->run, c->eval.rows, ROWS_TIMEOUT_SECONDS, &b->stop, &b->rows, e);
    struct suite_job job = {.snapshot = &b->snapshot,
        .rows = &b->rows,
        .suite = j->suite,
        .regime = j->regime,
        .passes = c->eval.passes,
        .fused_passes = c->eval.fused_passes,
        .fixed_point_passes = c->eval.fixed_point_passes,
        .stop = &b->stop};
    return rc < 0 ? rc : suite_run(&job, result, e);
}

static void bench_release(struct bench *b)
{
    snapshot_release(&b->snapshot);
    rows_release(&b->rows);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->has_job && !atomic_load(&w->bench.stop))
            pthread_cond_wait(&w->wake, &w->lock);
        if (atomic_load(&w->bench.stop))
            break;
        w->has_job = 0;
        pthread_mutex_unlock(&w->lock);
        json_t *result = NULL;
        struct err error = {0};
        int code = score(&w->bench, &w->job, &result, &error);
        pthread_mutex_lock(&w->lock);
        w->result = result;
        w->code = code;
        w->error = error;
        uint64_t one = 1;
        ssize_t n = write(w->fd, &one, sizeof one);
        CHECK(n == sizeof one);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

int worker_new(
    struct bus *b, const struct rundir *run, int threads, struct worker **out, struct err *e)
{
    struct worker *w = mem_array(1, sizeof *w);
    w->bench = (struct bench){.bus = b, .run = run, .threads = threads};
    w->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (w->fd < 0) {
        int rc = err_errno(e, "eventfd");
        free(w);
        return rc;
    }
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    if (pthread_create(&w->thread, NULL, work, w) != 0) {
        int rc = err_set(e, ERR_NOMEM, "no thread for the evaluator's work");
        close(w->fd);
        free(w);
        return rc;
    }
    *out = w;
    return 0;
}

void worker_free(struct worker **pw)
{
    struct worker *w = *pw;
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    atomic_store(&w->bench.stop, 1);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    close(w->fd);
    worker_job_release(&w->job);
    json_decref(w->result);
    bench_release(&w->bench);
    free(w);
    *pw = NULL;
}

void worker_start(struct worker *w, struct worker_job *job)
{
    CHECK(!w->busy);
    pthread_mutex_lock(&w->lock);
    w->busy = w->has_job = 1;
    w->job = *job;
    memset(job, 0, sizeof *job);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

int worker_busy(const struct worker *w)
{
    return w->busy;
}

int worker_fd(const struct worker *w)
{
    return w->fd;
}

int worker_finish(struct worker *w, json_t **result, struct err *e)
{
    uint64_t count;
    ssize_t n = read(w->fd, &count, sizeof count);
    CHECK(n == sizeof count);
    pthread_mutex_lock(&w->lock);
    int code = w->code;
    *result = w->result;
    w->result = NULL;
    if (code < 0)
        err_set(e, code, "%s", w->error.msg);
    worker_job_release(&w->job);
    w->busy = 0;
    pthread_mutex_unlock(&w->lock);
    return code;
}

int worker_score(struct bus *b, const struct rundir *run, int threads, const struct worker_job *job,
    json_t **result, struct err *e)
{
    struct bench bench = {.bus = b, .run = run, .threads = threads};
    int rc = score(&bench, job, result, e);
    bench_release(&bench);
    return rc;
}
