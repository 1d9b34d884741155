#include "trainer/plan_costs.h"

#include <string.h>

#include "common/clock.h"
#include "kernels/device.h"
#include "trainer/saver.h"

#define COUNTED_STEPS   10000000 /* more steps than this are sampled evenly */
#define MEASURE_SECONDS 0.2
#define MEASURE_ROWS    512

/* On average over a row: half of it, or less inside a window. */
static double positions_seen(int seq, int window)
{
    double t = seq, w = window && window < seq ? window : seq;
    return w < t ? w - w * w / (2 * t) : t / 2;
}

/*
 * A weight of a matrix costs a product and a sum in the forward pass and twice that in the
 * backward: 6 a token. Per pass: the blocks' matrices and the readout; the scores and values of
 * attention, 12 · heads · head size for each position that a query sees; and for each pass but the
 * first W_U and W_G.
 */
double plan_flops_token(const struct model_config *m, int seq, int passes)
{
    double d = m->dim, q = (double)m->heads * m->head_dim, kv = (double)m->kv_heads * m->head_dim;
    double block = d * ((m->attn_gate ? 3 : 2) * q + 2 * kv) + 3 * d * m->ffn, seen = 0;
    for (int l = 0; l < m->layers; l++)
        seen += positions_seen(seq, model_config_window(m, l));
    double pass = 6 * (m->layers * block + d * m->vocab) + 12 * seen * q;
    return passes * pass + (passes - 1) * 12 * d * d;
}

static void count_steps(const struct plan *p, struct plan_costs *c)
{
    int64_t steps = p->c.train.steps, stride = steps / COUNTED_STEPS + 1;
    for (int64_t s = 0; s < steps; s += stride)
        c->steps[plan_passes(p, s)] += s + stride <= steps ? stride : steps - s;
}

static void count_flops(const struct plan *p, struct plan_costs *c)
{
    double step_tokens = (double)p->c.train.batch_rows * p->c.data.seq_len;
    c->rows = (double)p->c.train.steps * p->c.train.batch_rows;
    c->tokens = c->rows * p->c.data.seq_len;
    for (int k = 1; k <= CONFIG_MAX_PASSES; k++) {
        c->flops_token[k] = plan_flops_token(&p->c.model, p->c.data.seq_len, k);
        c->token_passes += k * step_tokens * (double)c->steps[k];
        c->flops += c->flops_token[k] * step_tokens * (double)c->steps[k];
    }
    c->flops_one_pass = c->flops_token[1] * c->tokens;
}

/* With shared prefixes a document that is not fully fused has a uniform cut: half of it is
 * computed. (Its attention is 2/3, for later queries see more; left out, as it is a small part.) */
static void count_shared(const struct plan *p, struct plan_costs *c)
{
    double full = p->c.train.fully_fused;
    c->fused_share = c->memory.sharing ? full + (1 - full) / 2 : 1;
    c->flops_computed = c->flops_one_pass + c->fused_share * (c->flops - c->flops_one_pass);
}

static int count_optimizer(const struct plan *p, struct plan_costs *c, struct err *e)
{
    struct weight_table table;
    int rc = weight_table_make(&p->c.model, &table, e);
    if (rc < 0)
        return rc;
    c->flops_optimizer = optimizer_flops(&table, p->c.optim.kind) * (double)p->c.train.steps;
    weight_table_release(&table);
    return 0;
}

/* Rate of x (rows, dim) times a (dim, ffn) matrix, the largest kind of product in a block. */
static int measure(const struct model_config *m, struct device *d, double *rate, struct err *e)
{
    int k = m->dim < 4096 ? m->dim : 4096, n = m->ffn < 8192 ? m->ffn : 8192;
    size_t xs = (size_t)MEASURE_ROWS * (size_t)k, ws = (size_t)k * (size_t)n,
           ys = (size_t)MEASURE_ROWS * (size_t)n;
    float *x = d->ops->alloc(d, (xs + ws + ys) * sizeof(float));
    if (!x)
        return err_set(e, ERR_NOMEM, "no memory to measure matrix products; give --rate");
    double start = 0, now = 0;
    int64_t count = -1; /* the first warms up and is not counted */
    for (; count < 1 || now - start < MEASURE_SECONDS; count++) {
        d->ops->matmul(d, 0, 1, MEASURE_ROWS, n, k, 1, x, k, x + xs, k, 0, x + xs + ws, n);
        now = clock_seconds();
        if (count < 0)
            start = now;
    }
    *rate = 2.0 * MEASURE_ROWS * n * k * (double)count / (now - start);
    d->ops->free(d, x);
    return 0;
}

int plan_costs_make(const struct plan *p, const struct config *run, double rate,
    struct plan_costs *out, struct err *e)
{
    struct device *d;
    *out = (struct plan_costs){.matmul_flops = rate, .measured = rate == 0};
    out->params = model_config_params(&p->c.model);
    int rc = device_cpu_new(run->process.trainer_threads, &d, e);
    if (rc < 0)
        return rc;
    count_steps(p, out);
    count_flops(p, out);
    rc = plan_memory_make(
        p, run->train.recompute, d, (struct plan_rank){0, run->process.trainers}, &out->memory, e);
    if (rc == 0)
        rc = count_optimizer(p, out, e);
    if (rc == 0 && out->measured)
        rc = measure(&p->c.model, d, &out->matmul_flops, e);
    count_shared(p, out);
    out->seconds =
        (out->flops_computed + out->flops_optimizer) / (out->matmul_flops * PLAN_EFFICIENCY);
    device_free(&d);
    return rc;
}

uint64_t plan_source_rows(const struct plan *p, int s)
{
    uint64_t ordinals = (uint64_t)p->c.train.steps * (uint64_t)p->c.train.batch_rows;
    uint64_t blocks = ordinals / PLAN_BLOCK_SLOTS, rows = blocks * (uint64_t)p->sources[s].quota;
    for (uint64_t i = blocks * PLAN_BLOCK_SLOTS; i < ordinals; i++)
        rows += plan_train_sample(p, i).source == s;
    return rows;
}
