#include "trainer/saver.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/fs.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/safetensors.h"

struct saver {
    char *root, *plan_hash;
    int rank, world;
    const struct weight_table *table;
    struct shards shards;
    float *params, *m, *v; /* staging: host copies; params, of rank 0, table->total floats */
    size_t m_floats, v_floats;
    enum optim_kind optim;
    int64_t updates[OPTIMIZER_GROUPS];
    struct st_tensor *tensors; /* 2 · count: room for the optimizer's */
    char (*names)[128];
    int event_fd;
    int busy;
    pthread_t thread;
    struct saver_result result; /* the thread's until it has signalled event_fd */
};

size_t saver_staging_bytes(
    const struct weight_table *table, enum optim_kind optim, int rank, int world)
{
    struct shards shards;
    size_t floats, bytes;
    shards_make(table, optim, world, &shards);
    floats = (size_t)shards.totals[rank] + (size_t)shards.second_totals[rank];
    shards_release(&shards);
    floats += rank == 0 ? (size_t)table->total : 0;
    CHECK(mem_mul(floats, sizeof(float), &bytes) == 0);
    return bytes;
}

/* Host memory, its pages touched so that the first save does not wait for them. */
static float *staging_new(size_t floats)
{
    float *p = mem_try_array(floats, sizeof *p);
    if (p)
        memset(p, 0, floats * sizeof *p);
    return p;
}

int saver_new(const struct saver_settings *settings, struct saver **out, struct err *e)
{
    struct saver *s = mem_array(1, sizeof *s);
    int rc;
    s->root = mem_strdup(settings->root);
    s->plan_hash = mem_strdup(settings->plan_hash);
    s->rank = settings->rank;
    s->world = settings->world;
    s->table = settings->table;
    s->optim = settings->optim;
    shards_make(s->table, s->optim, s->world, &s->shards);
    s->m_floats = (size_t)s->shards.totals[s->rank];
    s->v_floats = (size_t)s->shards.second_totals[s->rank];
    size_t room = 2 * (size_t)(s->table->count + s->shards.count);
    s->tensors = mem_array(room, sizeof *s->tensors);
    s->names = mem_array(room, sizeof *s->names);
    s->params = s->rank == 0 ? staging_new((size_t)s->table->total) : NULL;
    s->m = staging_new(s->m_floats);
    s->v = staging_new(s->v_floats);
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if ((s->params || s->rank != 0) && s->m && s->v && s->event_fd >= 0) {
        *out = s;
        return 0;
    }
    if (s->event_fd < 0)
        rc = err_errno(e, "saver: eventfd");
    else
        rc = err_set(e, ERR_NOMEM, "saver: no memory for %zu bytes of staging",
            saver_staging_bytes(s->table, s->optim, s->rank, s->world));
    saver_free(&s);
    return rc;
}

void saver_free(struct saver **ps)
{
    struct saver *s = *ps;
    if (!s)
        return;
    if (s->busy)
        pthread_join(s->thread, NULL);
    if (s->event_fd >= 0)
        close(s->event_fd);
    free(s->v);
    free(s->m);
    free(s->params);
    free(s->names);
    free(s->tensors);
    shards_release(&s->shards);
    free(s->plan_hash);
    free(s->root);
    free(s);
    *ps = NULL;
}

/* -- the writing thread ------------------------------------------------------------------- */

/* One file of the checkpoint: what goes in, under which name. */
struct part {
    char name[64];
    int count;
    const char *meta[16];
};

static int write_tensors(
    const struct saver *s, const char *path, const struct part *p, struct err *e)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    int rc = fd < 0 ? err_errno(e, "%s", path) : 0;
    if (rc == 0)
        rc = safetensors_write(fd, path, s->tensors, p->count, p->meta, e);
    if (rc == 0 && fsync(fd) < 0)
        rc = err_errno(e, "%s: fsync", path);
    if (fd >= 0 && close(fd) < 0 && rc == 0)
        rc = err_errno(e, "%s: close", path);
    return rc;
}

static int check_uncommitted(const char *dir, struct err *e)
{
    char *manifest = mem_printf("%s/MANIFEST.json", dir);
    int rc = fs_exists(manifest)
                 ? err_set(e, ERR_STATE, "%s: already committed, refusing to replace it", dir)
                 : 0;
    free(manifest);
    return rc;
}

/* The name until it is renamed is this process's own: a zombie of an earlier epoch may be writing
 * the same file. */
static int write_file(struct saver *s, const char *dir, const struct part *p, struct err *e)
{
    struct checkpoint_file *out = &s->result.files[s->result.file_count];
    char *path = mem_printf("%s/%s", dir, p->name);
    char *tmp = mem_printf("%s.%d.tmp", path, (int)getpid());
    int rc = write_tensors(s, tmp, p, e);
    if (rc == 0)
        rc = hash_sha256_file(tmp, out->sha256, &out->bytes, e);
    if (rc == 0)
        rc = check_uncommitted(dir, e);
    if (rc == 0)
        rc = fs_rename_durable(tmp, path, e);
    if (rc == 0) {
        snprintf(out->name, sizeof out->name, "%s", p->name);
        s->result.file_count++;
    } else {
        unlink(tmp);
    }
    free(tmp);
    free(path);
    return rc;
}

static int write_model(struct saver *s, const char *dir, const char *step_text, struct err *e)
{
    struct part p = {.name = "model.safetensors",
        .count = s->table->count,
        .meta = {"format", "pt", "step", step_text, "plan_hash", s->plan_hash}};
    weights_as_tensors(s->table, s->params, "", s->tensors, s->names);
    return write_file(s, dir, &p, e);
}

static int write_optimizer(struct saver *s, const char *dir, const char *step_text, struct err *e)
{
    struct part p = {.meta = {"format", "pt", "step", step_text, "plan_hash", s->plan_hash}};
    struct optimizer_meta counts;
    int at = 6;
    optimizer_meta_make(s->optim, s->updates, &counts);
    for (int i = 0; counts.pairs[i]; i++)
        p.meta[at++] = counts.pairs[i];
    CHECK(at < (int)(sizeof p.meta / sizeof *p.meta));
    snprintf(p.name, sizeof p.name, OPTIMIZER_FILE, s->rank, s->world);
    p.count = optimizer_as_tensors(&s->shards, s->rank, s->m, s->v, s->tensors, s->names);
    return write_file(s, dir, &p, e);
}

/* Takes back what this rank wrote; the directory goes with the last file. */
static void withdraw(const struct saver *s, const char *dir)
{
    for (int i = 0; i < s->result.file_count; i++) {
        char *path = mem_printf("%s/%s", dir, s->result.files[i].name);
        unlink(path);
        free(path);
    }
    rmdir(dir);
}

static int save(struct saver *s, struct err *e)
{
    char name[32], step_text[24];
    checkpoint_name(s->result.step, name);
    snprintf(step_text, sizeof step_text, "%" PRId64, s->result.step);
    char *dir = mem_printf("%s/%s", s->root, name);
    int rc = 0;
    if (mkdir(dir, 0755) < 0 && errno != EEXIST)
        rc = err_errno(e, "mkdir %s", dir);
    if (rc == 0)
        rc = fs_fsync_dir(s->root, e);
    if (rc == 0)
        rc = check_uncommitted(dir, e);
    if (rc == 0 && s->rank == 0)
        rc = write_model(s, dir, step_text, e);
    if (rc == 0)
        rc = write_optimizer(s, dir, step_text, e);
    if (rc < 0 && rc != ERR_STATE)
        withdraw(s, dir);
    free(dir);
    return rc;
}

static void *save_main(void *arg)
{
    struct saver *s = arg;
    double start = clock_seconds();
    s->result.err.code = save(s, &s->result.err);
    s->result.write_seconds = clock_seconds() - start;
    uint64_t one = 1;
    CHECK(write(s->event_fd, &one, sizeof one) == (ssize_t)sizeof one);
    return NULL;
}

/* -- the owner's side --------------------------------------------------------------------- */

int saver_begin(struct saver *s, const struct saver_source *src, int64_t step, uint32_t run_epoch,
    struct err *e)
{
    if (s->busy)
        return err_set(
            e, ERR_STATE, "saver: step %" PRId64 " is still being written", s->result.step);
    const struct device_ops *ops = src->device->ops;
    double start = clock_seconds();
    s->result = (struct saver_result){.step = step, .run_epoch = run_epoch};
    if (s->params)
        ops->download(src->device, s->params, src->params, (size_t)s->table->total * sizeof(float));
    ops->download(src->device, s->m, optimizer_m(src->optimizer), s->m_floats * sizeof(float));
    ops->download(src->device, s->v, optimizer_v(src->optimizer), s->v_floats * sizeof(float));
    for (int g = 0; g < OPTIMIZER_GROUPS; g++)
        s->updates[g] = optimizer_updates(src->optimizer, (enum weight_group)g);
    int rc = ops->sync(src->device, e);
    if (rc < 0)
        return rc;
    s->result.stall_seconds = clock_seconds() - start;
    int failed = pthread_create(&s->thread, NULL, save_main, s);
    if (failed) {
        errno = failed;
        return err_errno(e, "saver: thread");
    }
    s->busy = 1;
    return 0;
}

int saver_busy(const struct saver *s)
{
    return s->busy;
}

int saver_poll(struct saver *s, int timeout_ms, struct saver_result *out)
{
    struct pollfd p = {.fd = s->event_fd, .events = POLLIN};
    uint64_t count;
    if (!s->busy || poll(&p, 1, timeout_ms) <= 0)
        return 0;
    if (read(s->event_fd, &count, sizeof count) != (ssize_t)sizeof count)
        return 0;
    pthread_join(s->thread, NULL);
    s->busy = 0;
    *out = s->result;
    return 1;
}

int saver_fd(const struct saver *s)
{
    return s->event_fd;
}
