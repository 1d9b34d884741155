#include "trainer/bench_case.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/rng.h"
#include "trainer/bench_clock.h"
#include "trainer/bench_rates.h"
#include "trainer/optimizer.h"
#include "trainer/plan_costs.h"

const struct bench_config bench_configs[] = {
    {"tiny", 64, 2, 4, 176, 512, 64, 4}, /* to try the bench itself */
    {"small", 256, 6, 8, 688, 8192, 256, 8},
    {"larger", 512, 8, 8, 1376, 16384, 512, 4},
    {NULL, 0, 0, 0, 0, 0, 0, 0},
};

void bench_model(const struct bench_config *b, struct model_config *out)
{
    *out = (struct model_config){.vocab = b->vocab,
        .dim = b->dim,
        .layers = b->layers,
        .heads = b->heads,
        .kv_heads = b->heads,
        .head_dim = b->dim / b->heads,
        .ffn = b->ffn,
        .norm_eps = 1e-5f,
        .rope_theta = 10000,
        .residual_scale = (float)(1 / sqrt(2.0 * b->layers)),
        .feedback = 1,
        .in_norm = 1,
        .gate_norm = 1,
        .out_norm = 1,
        .doc_mask = 1};
}

/* --- a batch of random tokens, one document a row --------------------------------------------- */

/* Cuts are uniform, one in each 1/B of the row: a few free draws would fuse far from half of it. */
struct batch_memory {
    int32_t *tokens, *targets;
    uint8_t *starts, *masks;
    uint64_t *keys;
};

static void batch_fill(
    const struct bench_config *b, int passes, struct batch_memory *m, struct model_batch *out)
{
    size_t n = (size_t)b->batch * (size_t)b->seq, extra = (size_t)passes - 1,
           rows = extra * (size_t)b->batch;
    m->tokens = mem_array(n, sizeof *m->tokens);
    m->targets = mem_array(n, sizeof *m->targets);
    m->starts = mem_array(n, 1);
    m->masks = mem_array(extra * n + 1, 1);
    m->keys = mem_array(rows + 1, sizeof *m->keys);
    for (size_t i = 0; i < n; i++) {
        m->tokens[i] = (int32_t)(rng_u64(1, i) % (uint64_t)b->vocab);
        m->targets[i] = (int32_t)(rng_u64(2, i) % (uint64_t)b->vocab);
        m->starts[i] = i % (size_t)b->seq == 0;
    }
    for (size_t r = 0; r < rows; r++) {
        double stratum = (double)(r % (size_t)b->batch), u = (stratum + rng_unit(3, r)) / b->batch;
        size_t plain = 1 + (size_t)(u * b->seq), seq = (size_t)b->seq;
        for (size_t t = plain; t < seq; t++)
            m->masks[r * seq + t] = 1;
        m->keys[r] = rng_key(4, r);
    }
    *out = (struct model_batch){.batch = b->batch,
        .seq = b->seq,
        .tokens = m->tokens,
        .targets = m->targets,
        .doc_starts = m->starts,
        .passes = passes,
        .masks = extra ? m->masks : NULL,
        .jitter = 0.02f,
        .noise_keys = extra ? m->keys : NULL};
}

static void batch_release(struct batch_memory *m)
{
    free(m->tokens);
    free(m->targets);
    free(m->starts);
    free(m->masks);
    free(m->keys);
}

/* --- steps --------------------------------------------------------------------------------------
 */

struct trial {
    struct device *d;
    struct model *m;
    struct optimizer *o;
    struct batch_memory memory;
    struct model_batch batch;
};

static void trial_release(struct trial *t)
{
    batch_release(&t->memory);
    optimizer_free(&t->o);
    model_free(&t->m);
    bench_device_free(&t->d);
}

static struct model_limits limits_of(const struct bench_config *b, struct bench_passes passes)
{
    return (struct model_limits){.batch = b->batch,
        .seq = b->seq,
        .passes = passes.count,
        .train = 1,
        .precision = passes.precision,
        .prefix_sharing = passes.shared};
}

static int trial_prepare(struct trial *t, const struct bench_config *b, struct bench_passes passes,
    const struct bench_effort *effort, struct err *e)
{
    static const struct optimizer_settings settings = {.rest_lr_scale = 1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .weight_decay = 0.1,
        .clip_norm = 1,
        .fusion_lr_scale = 1};
    struct model_limits lim = limits_of(b, passes);
    struct model_config c;
    struct device *cpu;
    bench_model(b, &c);
    int rc = device_cpu_new(effort->threads, &cpu, e);
    if (rc < 0)
        return rc;
    t->d = bench_device_new(cpu);
    if ((rc = model_new(t->d, &c, &lim, &t->m, e)) < 0)
        return rc;
    const struct weight_table *table = model_weights(t->m);
    if ((rc = optimizer_new(t->d, table, &settings, &t->o, e)) < 0)
        return rc;
    weights_init(table, 1, model_params(t->m));
    batch_fill(b, passes.count, &t->memory, &t->batch);
    return 0;
}

/* One step as the trainer does it; returns the objective. */
static double trial_step(struct trial *t)
{
    double sums[8] = {0}, extra = 0;
    struct optimizer_result result;
    int n = t->batch.batch * t->batch.seq;
    float *grads = model_grads(t->m);
    size_t bytes = (size_t)model_weights(t->m)->total * sizeof *grads;
    t->d->ops->zero(t->d, grads, bytes);
    model_train(t->m, &t->batch, 1, 1.0f / (float)n, sums);
    optimizer_update(t->o, model_params(t->m), grads, 1e-3, t->batch.passes, &result);
    for (int k = 1; k < t->batch.passes; k++)
        extra += sums[k];
    return (sums[0] + (t->batch.passes > 1 ? extra / (t->batch.passes - 1) : 0)) / n;
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void trial_steps(struct trial *t, double seconds, struct bench_steps *out)
{
    double taken[BENCH_MAX_STEPS] = {0}, cpu, start;
    int n = 0;
    for (int i = 0; i < BENCH_WARM_STEPS; i++) {
        double loss = trial_step(t);
        out->first_loss = i == 0 ? loss : out->first_loss;
    }
    bench_device_reset(t->d);
    cpu = cpu_seconds();
    start = bench_seconds();
    while (n < BENCH_MIN_STEPS || (n < BENCH_MAX_STEPS && bench_seconds() - start < seconds)) {
        double since = bench_seconds();
        out->last_loss = trial_step(t);
        taken[n++] = bench_seconds() - since;
    }
    out->count = n;
    out->cpu = (cpu_seconds() - cpu) / n;
    qsort(taken, (size_t)n, sizeof *taken, by_value);
    out->median = n % 2 ? taken[n / 2] : (taken[n / 2 - 1] + taken[n / 2]) / 2;
    out->best = taken[0];
}

int bench_case_run(const struct bench_config *b, struct bench_passes passes,
    const struct bench_effort *effort, struct bench_case_result *out, struct err *e)
{
    struct trial t = {0};
    struct rusage u;
    *out = (struct bench_case_result){0};
    int rc = trial_prepare(&t, b, passes, effort, e);
    if (rc == 0) {
        struct model_limits lim = limits_of(b, passes);
        const struct model_config *c = model_config_of(t.m);
        out->threads = t.d->threads;
        out->params = model_config_params(c);
        out->flops = plan_flops_token(c, b->seq, passes.count) * b->batch * b->seq;
        model_memory_estimate(t.d, c, &lim, &out->memory);
        trial_steps(&t, effort->seconds, &out->steps);
        getrusage(RUSAGE_SELF, &u); /* before the products are measured on memory of their own */
        out->steps.peak_bytes = (size_t)u.ru_maxrss * 1024;
        bench_device_counts(t.d, &out->counts);
        if (passes.shared != model_shared(t.m))
            rc = err_set(e, ERR_STATE, "the model did not share prefixes as it was asked to");
    }
    if (rc == 0)
        rc = bench_ceiling_measure(t.d, &out->counts, out->steps.count, &out->ceiling, e);
    trial_release(&t);
    return rc;
}

/* --- a process of its own -----------------------------------------------------------------------
 */

static int write_all(int fd, const void *from, size_t bytes)
{
    const char *p = from;
    while (bytes > 0) {
        ssize_t n = write(fd, p, bytes);
        if (n < 0 && errno != EINTR)
            return -1;
        if (n > 0) {
            p += n;
            bytes -= (size_t)n;
        }
    }
    return 0;
}

static size_t read_all(int fd, void *to, size_t bytes)
{
    size_t got = 0;
    while (got < bytes) {
        ssize_t n = read(fd, (char *)to + got, bytes - got);
        if (n == 0 || (n < 0 && errno != EINTR))
            break;
        got += n > 0 ? (size_t)n : 0;
    }
    return got;
}

int bench_in_child(int (*fn)(void *arg, void *result, struct err *e), void *arg, void *result,
    size_t bytes, struct err *e)
{
    int ends[2], status;
    struct err child = {0};
    if (pipe(ends) < 0)
        return err_errno(e, "pipe");
    pid_t pid = fork();
    if (pid < 0) {
        close(ends[0]);
        close(ends[1]);
        return err_errno(e, "fork");
    }
    if (pid == 0) {
        close(ends[0]);
        child.code = fn(arg, result, &child);
        _exit(write_all(ends[1], &child, sizeof child) || write_all(ends[1], result, bytes));
    }
    close(ends[1]);
    size_t got = read_all(ends[0], &child, sizeof child);
    got += read_all(ends[0], result, bytes);
    close(ends[0]);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (got != sizeof child + bytes)
        return err_set(e, ERR_STATE, "a measurement ended early (%s %d)",
            WIFSIGNALED(status) ? "signal" : "exit status",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    return child.code < 0 ? err_set(e, child.code, "%s", child.msg) : 0;
}
