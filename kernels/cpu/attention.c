/*
 * Attention in blocks of queries and keys with the softmax kept online (after Dao et al. 2022,
 * FlashAttention): memory is one block of scores a thread, on its stack; keys before `first` and
 * after the query are skipped block by block. Products of blocks go through sgemm, so they run at
 * its rate.
 */
#include <math.h>
#include <string.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fast_math.h"

enum { Q_BLOCK = 64, K_BLOCK = 128 };

/*
 * Up to Q_BLOCK queries of one head, in the order of their positions. Row r stands at position
 * at[r] − base, or at last + r where at is NULL, and sees keys first[r] … its own (from k, v on).
 */
struct block {
    const float *q, *k, *v;
    const int32_t *first, *at;
    int last, base, rows, head_dim;
    size_t ld_q, ld_kv; /* floats from a token to the next */
    float scale;
};

/* The last key that row r sees. */
static int position(const struct block *b, int r)
{
    return b->at ? b->at[r] - b->base : b->last + r;
}

/* Which part of the key block at k0 row r sees: [*lo, *hi) within the block; empty when lo ≥ hi. */
static void visible(const struct block *b, int r, int k0, int keys, int *lo, int *hi)
{
    int end = position(b, r) + 1 - k0;
    *lo = b->first[r] > k0 ? b->first[r] - k0 : 0;
    *hi = end < keys ? end : keys;
}

/* Keys k0 … k0 + keys of a block, and the rows [from, to) that see any of them: first and position
 * grow with the row. */
struct key_block {
    int k0, keys, from, to;
};

/* The next block of keys at or after k0 that some row sees; 0: none is left. */
static int next_keys(const struct block *b, int k0, struct key_block *kb)
{
    int from = 0, to;
    while (from < b->rows && position(b, from) < k0)
        from++;
    if (from == b->rows)
        return 0;
    if (b->first[from] > k0) /* keys between two documents' queries are skipped */
        k0 = b->first[from];
    for (to = from + 1; to < b->rows && b->first[to] < k0 + K_BLOCK; to++)
        ;
    int end = position(b, to - 1) + 1;
    kb->k0 = k0;
    kb->keys = end - k0 < K_BLOCK ? end - k0 : K_BLOCK;
    kb->from = from;
    kb->to = to;
    return 1;
}

/* scores of the rows that see kb, row stride K_BLOCK, = scale · q · kᵀ */
static void block_scores(const struct block *b, const struct key_block *kb, float *scores)
{
    cpu_gemm(0, 1, kb->to - kb->from, kb->keys, b->head_dim, b->scale,
        b->q + (size_t)kb->from * b->ld_q, b->ld_q, b->k + (size_t)kb->k0 * b->ld_kv, b->ld_kv,
        0.0f, scores + kb->from * K_BLOCK, K_BLOCK);
}

static void clear_outside(float *row, int lo, int hi, int keys)
{
    if (lo >= hi)
        lo = hi = 0;
    for (int j = 0; j < lo; j++)
        row[j] = 0.0f;
    for (int j = hi; j < keys; j++)
        row[j] = 0.0f;
}

/*
 * Turns row's visible scores into exp(score − max) and the others into 0, where max and sum run
 * over the blocks seen so far. Returns the factor for what was summed before.
 */
static float softmax_step(float *row, int lo, int hi, int keys, float *max, float *sum)
{
    clear_outside(row, lo, hi, keys);
    if (lo >= hi)
        return 1.0f;
    float m = *max, s = 0.0f;
#pragma omp simd reduction(max : m)
    for (int j = lo; j < hi; j++)
        m = row[j] > m ? row[j] : m;
#pragma omp simd reduction(+ : s)
    for (int j = lo; j < hi; j++) {
        row[j] = fast_expf(row[j] - m);
        s += row[j];
    }
    float keep = *max == -INFINITY ? 0.0f : fast_expf(*max - m);
    *sum = *sum * keep + s;
    *max = m;
    return keep;
}

static void scale_row(float *row, float f, int n)
{
#pragma omp simd
    for (int j = 0; j < n; j++)
        row[j] *= f;
}

static void clear_rows(float *x, int rows, int width, size_t ld)
{
    for (int r = 0; r < rows; r++)
        memset(x + (size_t)r * ld, 0, (size_t)width * sizeof(float));
}

/* out (rows, hd) with row stride ld_out; lse (rows) may be NULL. */
static void block_fwd(const struct block *b, float *out, size_t ld_out, float *lse)
{
    float scores[Q_BLOCK * K_BLOCK], max[Q_BLOCK], sum[Q_BLOCK];
    struct key_block kb;
    for (int r = 0; r < b->rows; r++) {
        max[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    clear_rows(out, b->rows, b->head_dim, ld_out);
    for (int k0 = b->first[0]; next_keys(b, k0, &kb); k0 = kb.k0 + kb.keys) {
        block_scores(b, &kb, scores);
        for (int r = kb.from; r < kb.to; r++) {
            int lo, hi;
            visible(b, r, kb.k0, kb.keys, &lo, &hi);
            float keep = softmax_step(scores + r * K_BLOCK, lo, hi, kb.keys, &max[r], &sum[r]);
            if (keep != 1.0f)
                scale_row(out + (size_t)r * ld_out, keep, b->head_dim);
        }
        cpu_gemm(0, 0, kb.to - kb.from, b->head_dim, kb.keys, 1.0f, scores + kb.from * K_BLOCK,
            K_BLOCK, b->v + (size_t)kb.k0 * b->ld_kv, b->ld_kv, 1.0f,
            out + (size_t)kb.from * ld_out, ld_out);
    }
    for (int r = 0; r < b->rows; r++) {
        scale_row(out + (size_t)r * ld_out, 1.0f / sum[r], b->head_dim);
        if (lse)
            lse[r] = max[r] + logf(sum[r]);
    }
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

/* Threads for queries that see so many keys each; oneDNN is told as well. */
static int attn_team(
    const struct device *d, const struct attn_shape *s, int64_t queries, int64_t keys)
{
    int team = cpu_team(d, 2 * queries * keys * s->heads * s->head_dim);
    cpu_use_threads(team);
    return team;
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
        block_fwd(
            &b, to, b.ld_q, lse + ((size_t)bi * (size_t)heads + (size_t)h) * (size_t)s->seq + t0);
    }
}

size_t cpu_attn_bwd_work(struct device *d, const struct attn_shape *s)
{
    (void)d;
    (void)s;
    return 0; /* blocks of scores are on the stack */
}

/* At the first query of the block, with its strides; dk, dv at the row's first key. */
struct grads {
    float *dq, *dk, *dv;
    const float *dout, *out, *lse;
};

/* p: exp(score − lse) where visible, else 0;  dp becomes p · (dp − Σ dout·out) · scale. */
static void score_grad(
    float *p, float *dp, int lo, int hi, int keys, float lse, float delta, float scale)
{
    clear_outside(p, lo, hi, keys);
    clear_outside(dp, lo, hi, keys);
#pragma omp simd
    for (int j = lo; j < hi; j++) {
        p[j] = fast_expf(p[j] - lse);
        dp[j] = p[j] * (dp[j] - delta) * scale;
    }
}

/* delta[r] = Σ dout · out of row r */
static void out_dots(const struct block *b, const struct grads *g, float *delta)
{
    for (int r = 0; r < b->rows; r++) {
        const float *o = g->out + (size_t)r * b->ld_q, *go = g->dout + (size_t)r * b->ld_q;
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int c = 0; c < b->head_dim; c++)
            dot += o[c] * go[c];
        delta[r] = dot;
    }
}

/* dq of the block's queries =; dk, dv of the keys they see += */
static void block_bwd(const struct block *b, const struct grads *g)
{
    float p[Q_BLOCK * K_BLOCK], dp[Q_BLOCK * K_BLOCK], delta[Q_BLOCK] = {0};
    struct key_block kb;
    int hd = b->head_dim;
    out_dots(b, g, delta);
    clear_rows(g->dq, b->rows, hd, b->ld_q);
    for (int k0 = b->first[0]; next_keys(b, k0, &kb); k0 = kb.k0 + kb.keys) {
        int rows = kb.to - kb.from, keys = kb.keys;
        size_t at = (size_t)kb.k0 * b->ld_kv, from = (size_t)kb.from * b->ld_q;
        float *p_at = p + kb.from * K_BLOCK, *dp_at = dp + kb.from * K_BLOCK;
        block_scores(b, &kb, p);
        cpu_gemm(0, 1, rows, keys, hd, 1.0f, g->dout + from, b->ld_q, b->v + at, b->ld_kv, 0.0f,
            dp_at, K_BLOCK);
        for (int r = kb.from; r < kb.to; r++) {
            int lo, hi;
            visible(b, r, kb.k0, keys, &lo, &hi);
            score_grad(
                p + r * K_BLOCK, dp + r * K_BLOCK, lo, hi, keys, g->lse[r], delta[r], b->scale);
        }
        cpu_gemm(1, 0, keys, hd, rows, 1.0f, p_at, K_BLOCK, g->dout + from, b->ld_q, 1.0f,
            g->dv + at, b->ld_kv);
        cpu_gemm(1, 0, keys, hd, rows, 1.0f, dp_at, K_BLOCK, b->q + from, b->ld_q, 1.0f, g->dk + at,
            b->ld_kv);
        cpu_gemm(0, 0, rows, hd, keys, 1.0f, dp_at, K_BLOCK, b->k + at, b->ld_kv, 1.0f,
            g->dq + from, b->ld_q);
    }
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
                block_bwd(&b, &g);
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
        block_fwd(&b, out + (b.q - q), b.ld_q, lse + (size_t)h * (size_t)r->n + i);
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
                block_bwd(&b, &g);
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
            block_fwd(&b, out + (b.q - q), b.ld_q, NULL);
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
