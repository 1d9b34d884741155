/* Who gets which device memory. One layout, run twice: to measure and to hand out. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "kernels/model_internal.h"

#define ARENA_ALIGN 64

static void *arena_take(struct arena *a, size_t rows, size_t columns, size_t element)
{
    size_t bytes;
    if (mem_mul(rows, columns, &bytes) < 0 || mem_mul(bytes, element, &bytes) < 0 ||
        bytes > SIZE_MAX - ARENA_ALIGN - a->used || a->used == SIZE_MAX) {
        a->used = SIZE_MAX;
        return NULL;
    }
    void *p = a->base ? a->base + a->used : NULL;
    a->used += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    return p;
}

float *arena_floats(struct arena *a, size_t rows, size_t columns)
{
    return arena_take(a, rows, columns, sizeof(float));
}

int32_t *arena_ints(struct arena *a, size_t count)
{
    return arena_take(a, count, 1, sizeof(int32_t));
}

bf16 *arena_halves(struct arena *a, size_t rows, size_t columns)
{
    return arena_take(a, rows, columns, sizeof(bf16));
}

uint8_t *arena_bytes(struct arena *a, size_t count)
{
    return arena_take(a, count, 1, 1);
}

int logits_chunk(int vocab, int max_rows, size_t element)
{
    size_t rows = LOGITS_BYTES / ((size_t)vocab * element);
    if (rows < 16)
        rows = 16;
    return rows < (size_t)max_rows ? (int)rows : max_rows;
}

int model_pass_sets(const struct model *m)
{
    return m->lim.train ? m->lim.passes : 1;
}

/* --- activations ------------------------------------------------------------------------------ */

enum width { W_ONE, W_DIM, W_QUERY, W_KEY, W_HEADS, W_KV_HEADS, W_FFN };

static size_t width_of(const struct model_config *c, enum width w)
{
    size_t heads = (size_t)c->heads, kv_heads = (size_t)c->kv_heads, hd = (size_t)c->head_dim;
    const size_t widths[] = {[W_ONE] = 1,
        [W_DIM] = (size_t)c->dim,
        [W_QUERY] = heads * hd,
        [W_KEY] = kv_heads * hd,
        [W_HEADS] = heads,
        [W_KV_HEADS] = kv_heads,
        [W_FFN] = (size_t)c->ffn};
    return widths[w];
}

#define NEVER  (RECOMPUTE_LAYER + 1)
#define OF(f)  offsetof(struct layer_acts, f)
#define OPT(f) offsetof(struct model_config, f)

/* Kept with which precision. */
enum form { ALWAYS, IN_F32, IN_BF16 };

/* What a layer keeps: how wide, which option of the model it needs (0: none), the lowest level
 * of recompute that drops it, and the precision that has it. */
static const struct act {
    size_t at;
    enum width width;
    size_t option;
    int dropped;
    enum form form;
} acts[] = {
    {OF(x0), W_DIM, 0, NEVER, ALWAYS},
    {OF(rstd1), W_ONE, 0, NEVER, ALWAYS},
    {OF(q), W_QUERY, 0, RECOMPUTE_INNER, ALWAYS},
    {OF(k), W_KEY, 0, RECOMPUTE_INNER, ALWAYS},
    {OF(v), W_KEY, 0, RECOMPUTE_INNER, ALWAYS},
    {OF(q_raw), W_QUERY, OPT(qk_norm), RECOMPUTE_INNER, ALWAYS},
    {OF(k_raw), W_KEY, OPT(qk_norm), RECOMPUTE_INNER, ALWAYS},
    {OF(rstd_q), W_HEADS, OPT(qk_norm), RECOMPUTE_INNER, ALWAYS},
    {OF(rstd_k), W_KV_HEADS, OPT(qk_norm), RECOMPUTE_INNER, ALWAYS},
    {OF(att_gate), W_QUERY, OPT(attn_gate), RECOMPUTE_INNER, ALWAYS},
    {OF(att), W_QUERY, 0, RECOMPUTE_LAYER, ALWAYS},
    {OF(lse), W_HEADS, 0, RECOMPUTE_LAYER, ALWAYS},
    {OF(x1), W_DIM, 0, RECOMPUTE_LAYER, ALWAYS},
    {OF(rstd2), W_ONE, 0, NEVER, ALWAYS},
    {OF(gate), W_FFN, 0, RECOMPUTE_INNER, IN_F32},
    {OF(up), W_FFN, 0, RECOMPUTE_INNER, IN_F32},
    {OF(gate16), W_FFN, 0, RECOMPUTE_INNER, IN_BF16},
    {OF(up16), W_FFN, 0, RECOMPUTE_INNER, IN_BF16},
};
_Static_assert(sizeof acts / sizeof *acts == sizeof(struct layer_acts) / sizeof(float *),
    "the table names every tensor of struct layer_acts");

/* Those dropped at levels from … to. */
static void acts_take(struct arena *a, const struct model_config *c, enum precision precision,
    size_t n, int from, int to, struct layer_acts *l)
{
    enum form other = precision == PRECISION_BF16 ? IN_F32 : IN_BF16;
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++) {
        const struct act *x = &acts[i];
        if (x->form == other || (x->option && !*(const int *)((const char *)c + x->option)))
            continue;
        if (x->dropped < from || x->dropped > to)
            continue;
        void *p = arena_take(
            a, n, width_of(c, x->width), x->form == IN_BF16 ? sizeof(bf16) : sizeof(float));
        memcpy((char *)l + x->at, &p, sizeof p);
    }
}

void layer_acts_take(struct arena *a, const struct model_config *c, size_t n, struct layer_acts *l)
{
    acts_take(a, c, PRECISION_F32, n, 0, NEVER, l);
}

static enum precision precision_of(const struct model *m)
{
    return m->lim.train ? m->lim.precision : PRECISION_F32;
}

/* One layer of what any pass drops. */
static void remade_take(struct arena *a, struct model *m, size_t n)
{
    int level = RECOMPUTE_NONE;
    for (int k = 0; m->lim.train && k < m->lim.passes; k++)
        if ((int)m->lim.recompute[k] > level)
            level = (int)m->lim.recompute[k];
    acts_take(a, &m->c, precision_of(m), n, RECOMPUTE_INNER, level, &m->remade);
}

static void layers_take(
    struct arena *a, const struct model *m, size_t n, int k, struct pass_acts *p)
{
    int keys = k == 0 && model_limits_share(&m->c, &m->lim); /* the later passes need pass 1's */
    for (int l = 0; l < m->c.layers; l++) {
        struct layer_acts *x = &p->layers[l];
        if (l > 0 && !m->lim.train) {
            *x = p->layers[0];
            continue;
        }
        *x = m->remade;
        acts_take(a, &m->c, precision_of(m), n, (int)p->recompute + 1, NEVER, x);
        if (keys && p->recompute > RECOMPUTE_NONE) {
            x->k = arena_floats(a, n, width_of(&m->c, W_KEY));
            x->v = arena_floats(a, n, width_of(&m->c, W_KEY));
        }
    }
}

static void pass_take(struct arena *a, const struct model *m, size_t n, int k, struct pass_acts *p)
{
    size_t dim = (size_t)m->c.dim;
    p->recompute = m->lim.train ? m->lim.recompute[k] : RECOMPUTE_NONE;
    layers_take(a, m, n, k, p);
    p->x_out = arena_floats(a, n, dim);
    p->rstd = arena_floats(a, n, 1);
    p->h = arena_floats(a, n, dim);
    p->losses = arena_floats(a, n, 1);
    if (!m->c.feedback)
        return;
    if (precision_of(m) == PRECISION_BF16)
        p->carried16 = arena_halves(a, n, dim);
    else
        p->carried = arena_floats(a, n, dim);
    p->u = arena_floats(a, n, dim);
    p->mask = arena_bytes(a, n);
    if (m->c.out_norm) {
        p->prod = arena_floats(a, n, dim);
        p->rstd_prod = arena_floats(a, n, 1);
    }
    for (int i = 0; i < COMPACT_COUNT && k > 0 && model_limits_share(&m->c, &m->lim); i++)
        p->compact[i] = arena_ints(a, i == COMPACT_STARTS ? (size_t)m->lim.batch + 1 : n);
}

static void input_take(
    struct arena *a, const struct model_config *c, size_t n, struct input_acts *in)
{
    size_t dim = (size_t)c->dim;
    in->e = arena_floats(a, n, dim);
    in->plain = in->e;
    if (c->in_norm) {
        in->plain = arena_floats(a, n, dim);
        in->rstd_in = arena_floats(a, n, 1);
    }
    if (!c->feedback)
        return;
    if (gate_own_norm(c)) {
        in->gate_in = arena_floats(a, n, dim);
        in->rstd_gate = arena_floats(a, n, 1);
    }
    gate_source(c, in);
    in->g = arena_floats(a, n, dim);
}

/* The union: each member starts at the same place; the arena ends behind the largest. */
static void union_mlp(struct arena *a, const struct model *m, size_t n, struct scratch *s)
{
    size_t ffn = (size_t)m->c.ffn;
    s->act = arena_floats(a, n, ffn);
    if (m->lim.train) { /* for bf16 act is where gate and up land to be rounded */
        s->dgate = precision_of(m) == PRECISION_BF16 ? s->act : arena_floats(a, n, ffn);
        s->dup = arena_floats(a, n, ffn);
    }
}

static void union_attn(struct arena *a, const struct model *m, size_t n, struct scratch *s)
{
    const struct model_config *c = &m->c;
    size_t q = (size_t)c->heads * (size_t)c->head_dim;
    size_t kv = (size_t)c->kv_heads * (size_t)c->head_dim;
    struct attn_shape shape = {m->lim.batch, m->lim.seq, c->heads, c->kv_heads, c->head_dim};
    if (c->attn_gate)
        s->gated = arena_floats(a, n, q);
    if (!m->lim.train)
        return;
    s->datt = arena_floats(a, n, q);
    s->dq = arena_floats(a, n, q);
    s->dk = arena_floats(a, n, kv);
    s->dv = arena_floats(a, n, kv);
    size_t whole = m->d->ops->attn_bwd_work(m->d, &shape);
    size_t rows = m->d->ops->attn_rows_bwd_work(m->d, &shape);
    s->attn_work = arena_floats(a, whole > rows ? whole : rows, 1);
    if (model_limits_share(c, &m->lim)) {
        s->k_all = arena_floats(a, n, kv);
        s->v_all = arena_floats(a, n, kv);
    }
}

static void union_fusion(struct arena *a, const struct model *m, size_t n, struct scratch *s)
{
    size_t dim = (size_t)m->c.dim;
    if (!m->lim.train || !m->c.feedback)
        return;
    s->du = arena_floats(a, n, dim);
    s->dg_pass = arena_floats(a, n, dim);
    s->dcarried = arena_floats(a, n, dim);
    if (model_limits_share(&m->c, &m->lim))
        s->dh_all = arena_floats(a, n, dim);
}

static void union_noise(struct arena *a, const struct model *m, size_t n, struct scratch *s)
{
    if (m->c.feedback)
        s->noise = arena_floats(a, n, (size_t)m->c.dim);
    if (model_limits_share(&m->c, &m->lim))
        s->h_all = arena_floats(a, n, (size_t)m->c.dim);
}

static void union_logits(struct arena *a, const struct model *m, size_t n, struct scratch *s)
{
    (void)n;
    s->logits = arena_floats(a, (size_t)m->chunk, (size_t)m->c.vocab);
    if (precision_of(m) == PRECISION_BF16)
        s->logits16 = arena_halves(a, (size_t)m->chunk, (size_t)m->c.vocab);
}

/* The norms of the residual stream, and those of n rows of heads. */
static size_t norm_work_floats(const struct model *m, size_t n)
{
    size_t wide = m->d->ops->rmsnorm_bwd_work(m->d, (int)n, m->c.dim);
    int heads = (int)n * m->c.heads; /* limits_check() keeps it in int */
    size_t head = m->c.qk_norm ? m->d->ops->rmsnorm_bwd_work(m->d, heads, m->c.head_dim) : 0;
    return wide > head ? wide : head;
}

/* What bf16 takes: the rounded weights, and a product's rounded sides. */
static void products_take(struct arena *a, struct model *m, size_t n)
{
    size_t q = width_of(&m->c, W_QUERY), widest = width_of(&m->c, W_FFN);
    widest = q > widest ? q : widest;
    widest = width_of(&m->c, W_DIM) > widest ? width_of(&m->c, W_DIM) : widest;
    m->mul = (struct products){.d = m->d, .params = m->params};
    if (precision_of(m) != PRECISION_BF16)
        return;
    m->mul.weights = arena_halves(a, (size_t)m->table.total, 1);
    m->mul.x = arena_halves(a, n, widest);
    m->mul.dy = arena_halves(a, n, widest);
}

static void scratch_take(struct arena *a, const struct model *m, size_t n, struct scratch *s)
{
    static void (*const members[])(struct arena *, const struct model *, size_t,
        struct scratch *) = {union_mlp, union_attn, union_fusion, union_noise, union_logits};
    size_t dim = (size_t)m->c.dim;
    s->norm = arena_floats(a, n, dim);
    if (m->lim.train) {
        s->dx = arena_floats(a, n, dim);
        s->dh = arena_floats(a, n, dim);
        s->dnorm = arena_floats(a, n, dim);
        s->dplain = arena_floats(a, n, dim);
        s->dg = m->c.feedback ? arena_floats(a, n, dim) : NULL;
        s->norm_work = arena_floats(a, norm_work_floats(m, n), 1);
    }
    if (model_limits_share(&m->c, &m->lim)) {
        s->dh_first = arena_floats(a, n, dim);
        s->row_weights = arena_floats(a, n, 1);
    }
    size_t end = a->used;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        struct arena member = *a;
        members[i](&member, m, n, s);
        end = member.used > end ? member.used : end;
    }
    a->used = end;
}

static void tensors_point(const struct model *m, float *flat, struct tensors *t)
{
    const struct weight *w = m->table.items;
    if (!flat)
        return;
    t->embed = flat + w[weight_embed()].offset;
    t->norm = flat + w[weight_norm(&m->c)].offset;
    if (m->c.feedback) {
        t->w_u = flat + w[weight_w_u(&m->c)].offset;
        t->w_g = flat + w[weight_w_g(&m->c)].offset;
    }
    for (int l = 0; l < m->c.layers; l++) {
        struct layer_weights i = weight_layer(&m->c, l);
        t->layers[l] = (struct layer_tensors){
            .q_norm = i.q_norm < 0 ? NULL : flat + w[i.q_norm].offset,
            .k_norm = i.k_norm < 0 ? NULL : flat + w[i.k_norm].offset,
            .attn_gate = i.attn_gate < 0 ? NULL : flat + w[i.attn_gate].offset,
            .input_norm = flat + w[i.input_norm].offset,
            .q = flat + w[i.q].offset,
            .k = flat + w[i.k].offset,
            .v = flat + w[i.v].offset,
            .o = flat + w[i.o].offset,
            .post_norm = flat + w[i.post_norm].offset,
            .gate = flat + w[i.gate].offset,
            .up = flat + w[i.up].offset,
            .down = flat + w[i.down].offset,
        };
    }
}

void model_layout(struct model *m, struct model_memory *sizes)
{
    struct arena a[BLOCK_COUNT];
    size_t n = (size_t)m->lim.batch * (size_t)m->lim.seq, half = (size_t)m->c.head_dim / 2;
    for (int i = 0; i < BLOCK_COUNT; i++)
        a[i] = (struct arena){m->memory[i], 0};
    m->params = arena_floats(&a[BLOCK_WEIGHTS], (size_t)m->table.total, 1);
    tensors_point(m, m->params, &m->w);
    if (m->lim.train)
        m->grads = arena_floats(&a[BLOCK_GRADIENTS], (size_t)m->table.total, 1);
    tensors_point(m, m->grads, &m->g);

    struct arena *work = &a[BLOCK_WORKSPACE];
    memset(sizes, 0, sizeof *sizes);
    remade_take(work, m, n);
    for (int k = 0; k < model_pass_sets(m); k++) {
        size_t before = a[BLOCK_ACTIVATIONS].used;
        pass_take(&a[BLOCK_ACTIVATIONS], m, n, k, &m->passes[k]);
        sizes->activations[k] = a[BLOCK_ACTIVATIONS].used - before;
    }
    for (int l = 0; l < m->c.layers && model_limits_share(&m->c, &m->lim); l++) {
        m->shared_keys[l].dk = arena_floats(work, n, width_of(&m->c, W_KEY));
        m->shared_keys[l].dv = arena_floats(work, n, width_of(&m->c, W_KEY));
    }
    input_take(work, &m->c, n, &m->in);
    m->cos_table = arena_floats(work, (size_t)m->lim.seq, half);
    m->sin_table = arena_floats(work, (size_t)m->lim.seq, half);
    m->tokens = arena_ints(work, n);
    m->targets = arena_ints(work, n);
    m->positions = arena_ints(work, n);
    m->first = arena_ints(work, n);
    m->first_window = m->c.window ? arena_ints(work, n) : m->first;
    products_take(work, m, n);
    scratch_take(work, m, n, &m->s);
    for (int k = 0; k < model_pass_sets(m) && m->mul.weights; k++)
        m->passes[k].carried = m->s.dnorm; /* free in forward */
    sizes->weights = a[BLOCK_WEIGHTS].used;
    sizes->gradients = a[BLOCK_GRADIENTS].used;
    sizes->workspace = work->used;
    for (int i = 0; i < BLOCK_COUNT; i++)
        if (a[i].used == SIZE_MAX ||
            __builtin_add_overflow(sizes->total, a[i].used, &sizes->total)) {
            sizes->total = SIZE_MAX;
            break;
        }
}

void model_memory_estimate(struct device *d, const struct model_config *c,
    const struct model_limits *lim, struct model_memory *out)
{
    struct model *m;
    memset(out, 0, sizeof *out);
    if (model_shell_new(d, c, lim, &m, NULL) < 0)
        return; /* model_new() says why */
    model_layout(m, out);
    model_free(&m);
}
