/*
 * Attention cut into blocks of queries: each is computed by attn_block.h, without ever holding more
 * than a block of scores. Here: which blocks there are, and which thread takes which.
 */
#include <math.h>
#include <string.h>

#include "common/check.h"
#include "kernels/cpu/attn_block.h"
#include "kernels/cpu/cpu.h"

static void clear_rows(float *x, int rows, int width, size_t ld)
{
    for (int r = 0; r < rows; r++)
        memset(x + (size_t)r * ld, 0, (size_t)width * sizeof(float));
}

static void check_shape(const struct attn_shape *s)
{
    CHECK(s->heads > 0 && s->kv_heads > 0 && s->head_dim > 0 && s->seq > 0);
    CHECK(s->heads % s->kv_heads == 0);
}

/*
 * Queries of head h from token row q_at on, against the keys whose row starts at token row kv_at.
 * The caller sets rows, last and first.
 */
static struct block block_at(const struct attn_shape *s, const float *q, size_t q_at,
    const float *k, const float *v, size_t kv_at, int h)
{
    size_t hd = (size_t)s->head_dim, kv_head = (size_t)(h / (s->heads / s->kv_heads));
    size_t ld_q = (size_t)s->heads * hd, ld_kv = (size_t)s->kv_heads * hd;
    return (struct block){
        .q = q + q_at * ld_q + (size_t)h * hd,
        .k = k + kv_at * ld_kv + kv_head * hd,
        .v = v + kv_at * ld_kv + kv_head * hd,
        .head_dim = s->head_dim,
        .ld_q = ld_q,
        .ld_kv = ld_kv,
        .scale = 1.0f / sqrtf((float)s->head_dim),
    };
}

/* Queries t0 … of head h in row bi of the batch. */
static struct block batch_block(const struct attn_shape *s, const float *q, const float *k,
    const float *v, const int32_t *first, int bi, int h, int t0)
{
    size_t row = (size_t)bi * (size_t)s->seq;
    struct block b = block_at(s, q, row + (size_t)t0, k, v, row, h);
    b.first = first + row + t0;
    b.last = t0;
    b.rows = s->seq - t0 < Q_BLOCK ? s->seq - t0 : Q_BLOCK;
    return b;
}

/* Threads for queries that see so many keys each. */
static int attn_team(
    const struct device *d, const struct attn_shape *s, int64_t queries, int64_t keys)
{
    return cpu_team(d, 2 * queries * keys * s->heads * s->head_dim);
}

void cpu_attn_fwd(struct device *d, float *out, float *lse, const float *q, const float *k,
    const float *v, const int32_t *first, const struct attn_shape *s)
{
    check_shape(s);
    int team = attn_team(d, s, (int64_t)s->batch * s->seq, s->seq);
    int blocks = (s->seq + Q_BLOCK - 1) / Q_BLOCK, heads = s->heads;
    int64_t parts = (int64_t)s->batch * heads * blocks;
    /* Parts differ in size and are independent, so which thread takes one may be left to chance. */
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t p = 0; p < parts; p++) {
        int t0 = (int)(p % blocks) * Q_BLOCK;
        int h = (int)(p / blocks % heads), bi = (int)(p / blocks / heads);
        struct block b = batch_block(s, q, k, v, first, bi, h, t0);
        float *to = out + (b.q - q); /* out has q's shape */
        cpu_attn_block()->forward(
            &b, to, b.ld_q, lse + ((size_t)bi * (size_t)heads + (size_t)h) * (size_t)s->seq + t0);
    }
}

size_t cpu_attn_bwd_work(struct device *d, const struct attn_shape *s)
{
    (void)d;
    (void)s;
    return 0; /* blocks are on the stack */
}

void cpu_attn_bwd(struct device *d, float *dq, float *dk, float *dv, const float *dout,
    const float *out, const float *lse, const float *q, const float *k, const float *v,
    const int32_t *first, const struct attn_shape *s, float *work)
{
    (void)work;
    check_shape(s);
    int team = attn_team(d, s, (int64_t)s->batch * s->seq, s->seq);
    int group = s->heads / s->kv_heads, kv_heads = s->kv_heads;
    /* One part a key/value head: all that is added to its dk and dv is added in one order. */
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int p = 0; p < s->batch * kv_heads; p++) {
        int bi = p / kv_heads, kvh = p % kv_heads;
        struct block head = batch_block(s, q, k, v, first, bi, kvh * group, 0);
        float *dk_at = dk + (head.k - k), *dv_at = dv + (head.v - v);
        clear_rows(dk_at, s->seq, s->head_dim, head.ld_kv);
        clear_rows(dv_at, s->seq, s->head_dim, head.ld_kv);
        for (int h = kvh * group; h < (kvh + 1) * group; h++) {
            for (int t0 = 0; t0 < s->seq; t0 += Q_BLOCK) {
                struct block b = batch_block(s, q, k, v, first, bi, h, t0);
                size_t lse_at = ((size_t)bi * (size_t)s->heads + (size_t)h) * (size_t)s->seq;
                struct grads g = {.dq = dq + (b.q - q),
                    .dk = dk_at,
                    .dv = dv_at,
                    .dout = dout + (b.q - q),
                    .out = out + (b.q - q),
                    .lse = lse + lse_at + (size_t)t0};
                cpu_attn_block()->backward(&b, &g);
            }
        }
    }
}

/* Queries i … of head h in row bi of the batch, of the chosen ones. */
static struct block rows_block(const struct attn_shape *s, const float *q, const float *k,
    const float *v, const struct attn_rows *r, int bi, int h, int i)
{
    size_t row = (size_t)bi * (size_t)s->seq;
    struct block b = block_at(s, q, (size_t)i, k, v, row, h);
    int left = r->starts[bi + 1] - i;
    b.first = r->first + i;
    b.at = r->rows + i;
    b.base = bi * s->seq;
    b.rows = left < Q_BLOCK ? left : Q_BLOCK;
    return b;
}

void cpu_attn_rows_fwd(struct device *d, float *out, float *lse, const float *q, const float *k,
    const float *v, const struct attn_rows *r, const struct attn_shape *s)
{
    check_shape(s);
    CHECK(r->starts[s->batch] == r->n);
    int team = attn_team(d, s, r->n, s->seq), heads = s->heads;
    int blocks = (s->seq + Q_BLOCK - 1) / Q_BLOCK;
    int64_t parts = (int64_t)s->batch * heads * blocks;
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t p = 0; p < parts; p++) {
        int h = (int)(p / blocks % heads), bi = (int)(p / blocks / heads);
        int i = r->starts[bi] + (int)(p % blocks) * Q_BLOCK;
        if (i >= r->starts[bi + 1])
            continue;
        struct block b = rows_block(s, q, k, v, r, bi, h, i);
        cpu_attn_block()->forward(&b, out + (b.q - q), b.ld_q, lse + (size_t)h * (size_t)r->n + i);
    }
}

size_t cpu_attn_rows_bwd_work(struct device *d, const struct attn_shape *s)
{
    return cpu_attn_bwd_work(d, s);
}

void cpu_attn_rows_bwd(struct device *d, float *dq, float *dk, float *dv, const float *dout,
    const float *out, const float *lse, const float *q, const float *k, const float *v,
    const struct attn_rows *r, const struct attn_shape *s, float *work)
{
    (void)work;
    check_shape(s);
    CHECK(r->starts[s->batch] == r->n);
    int team = attn_team(d, s, r->n, s->seq);
    int group = s->heads / s->kv_heads, kv_heads = s->kv_heads;
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int p = 0; p < s->batch * kv_heads; p++) {
        int bi = p / kv_heads, kvh = p % kv_heads;
        struct block head = block_at(s, q, 0, k, v, (size_t)bi * (size_t)s->seq, kvh * group);
        float *dk_at = dk + (head.k - k), *dv_at = dv + (head.v - v);
        clear_rows(dk_at, s->seq, s->head_dim, head.ld_kv);
        clear_rows(dv_at, s->seq, s->head_dim, head.ld_kv);
        for (int h = kvh * group; h < (kvh + 1) * group; h++) {
            for (int i = r->starts[bi]; i < r->starts[bi + 1]; i += Q_BLOCK) {
                struct block b = rows_block(s, q, k, v, r, bi, h, i);
                struct grads g = {.dq = dq + (b.q - q),
                    .dk = dk_at,
                    .dv = dv_at,
                    .dout = dout + (b.q - q),
                    .out = out + (b.q - q),
                    .lse = lse + (size_t)h * (size_t)r->n + i};
                cpu_attn_block()->backward(&b, &g);
            }
        }
    }
}

/* Length of the run of rows from i on (before end) that are consecutive positions of one slot. */
static int run_length(const int32_t *slot, const int32_t *pos, const int32_t *first, int i, int end)
{
    int j = i + 1;
    while (j < end && slot[j] == slot[i] && pos[j] == pos[j - 1] + 1 && first[j] >= first[j - 1])
        j++;
    return j - i;
}

void cpu_attn_cached(struct device *d, float *out, const float *q, const float *cache_k,
    const float *cache_v, const int32_t *slot, const int32_t *pos, const int32_t *first, int n,
    const struct attn_shape *s)
{
    check_shape(s);
    int64_t keys = 0; /* most that a row sees */
    for (int i = 0; i < n; i++)
        keys = pos[i] - first[i] + 1 > keys ? pos[i] - first[i] + 1 : keys;
    int team = attn_team(d, s, n, keys), blocks = (n + Q_BLOCK - 1) / Q_BLOCK;
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int p = 0; p < blocks * s->heads; p++) {
        int h = p % s->heads, i = p / s->heads * Q_BLOCK;
        int end = n - i < Q_BLOCK ? n : i + Q_BLOCK;
        while (i < end) {
            CHECK(first[i] >= 0 && first[i] <= pos[i] && pos[i] < s->seq);
            size_t kv_at = (size_t)slot[i] * (size_t)s->seq;
            struct block b = block_at(s, q, (size_t)i, cache_k, cache_v, kv_at, h);
            b.first = first + i;
            b.last = pos[i];
            b.rows = run_length(slot, pos, first, i, end);
            cpu_attn_block()->forward(&b, out + (b.q - q), b.ld_q, NULL);
            i += b.rows;
        }
    }
}

void cpu_cache_put(struct device *d, float *cache_k, float *cache_v, const float *k, const float *v,
    const int32_t *slot, const int32_t *pos, int n, const struct attn_shape *s)
{
    (void)d;
    size_t width = (size_t)s->kv_heads * (size_t)s->head_dim;
    for (int i = 0; i < n; i++) {
        CHECK(slot[i] >= 0 && pos[i] >= 0 && pos[i] < s->seq);
        size_t to = ((size_t)slot[i] * (size_t)s->seq + (size_t)pos[i]) * width;
        memcpy(cache_k + to, k + (size_t)i * width, width * sizeof(float));
        memcpy(cache_v + to, v + (size_t)i * width, width * sizeof(float));
    }
}
