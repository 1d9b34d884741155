/*
 * Products of bfloat16 with float32 sums, through oneDNN's matmul primitive. Every size and stride
 * is given at the call: a pass that computes a different number of rows each step needs no new
 * primitive, so that a few serve all shapes (measured: within the noise of ones made for a shape).
 * They are made at their first use and kept by the device.
 */
#include <stdlib.h>

#include <dnnl.h>

#include "common/check.h"
#include "kernels/cpu/cpu.h"

enum { KINDS_MAX = 16, OPERANDS = 3 };

/* What a primitive is made for. */
struct kind {
    int ta, tb, accumulate;
    float alpha;
    dnnl_primitive_t primitive;
};

struct cpu_bf16 {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    struct kind kinds[KINDS_MAX];
    int count, next; /* how many there are; which one goes when there is no place */
    int plain;       /* the processor has nothing that oneDNN could use */
};

int cpu_bf16_native(struct device *d)
{
    (void)d;
    return dnnl_get_effective_cpu_isa() >= dnnl_cpu_isa_avx512_core_bf16;
}

static void done(dnnl_status_t status)
{
    CHECK(status == dnnl_success);
}

/* A matrix (rows, columns) with row stride ld, or the transpose of a (columns, rows) one. */
static dnnl_memory_desc_t matrix(
    dnnl_dim_t rows, dnnl_dim_t columns, dnnl_dim_t ld, int transposed, dnnl_data_type_t type)
{
    dnnl_memory_desc_t md;
    dnnl_dims_t dims = {rows, columns}, strides = {transposed ? 1 : ld, transposed ? ld : 1};
    done(dnnl_memory_desc_init_by_strides(&md, 2, dims, type, strides));
    return md;
}

static void describe(const struct bf16_product *p, int m, int n, int k, dnnl_memory_desc_t *out)
{
    out[0] = matrix(m, k, p->lda, p->ta, dnnl_bf16);
    out[1] = matrix(k, n, p->ldb, p->tb, dnnl_bf16);
    out[2] = matrix(m, n, p->ldc, 0, dnnl_f32);
}

/* NULL where oneDNN has no such product on this processor. */
static dnnl_primitive_t make(dnnl_engine_t engine, const struct kind *x)
{
    const dnnl_dim_t open = DNNL_RUNTIME_DIM_VAL;
    dnnl_memory_desc_t a = matrix(open, open, open, x->ta, dnnl_bf16),
                       b = matrix(open, open, open, x->tb, dnnl_bf16),
                       c = matrix(open, open, open, 0, dnnl_f32);
    dnnl_matmul_desc_t product;
    dnnl_primitive_attr_t attr;
    dnnl_post_ops_t post;
    dnnl_primitive_desc_t description;
    dnnl_primitive_t made = NULL;
    done(dnnl_matmul_desc_init(&product, &a, &b, NULL, &c));
    done(dnnl_primitive_attr_create(&attr));
    done(dnnl_post_ops_create(&post));
    if (x->accumulate)
        done(dnnl_post_ops_append_sum(post, 1));
    done(dnnl_primitive_attr_set_post_ops(attr, post));
    done(dnnl_primitive_attr_set_output_scales(attr, 1, 0, &x->alpha));
    if (dnnl_primitive_desc_create(&description, &product, attr, engine, NULL) == dnnl_success) {
        done(dnnl_primitive_create(&made, description));
        done(dnnl_primitive_desc_destroy(description));
    }
    done(dnnl_post_ops_destroy(post));
    done(dnnl_primitive_attr_destroy(attr));
    return made;
}

struct cpu_bf16 *cpu_bf16_new(void)
{
    return calloc(1, sizeof(struct cpu_bf16));
}

/* What oneDNN needs, once there is something to multiply. */
static struct cpu_bf16 *started(struct device *d)
{
    struct cpu_bf16 *s = d->own;
    if (!s->engine) {
        done(dnnl_engine_create(&s->engine, dnnl_cpu, 0));
        done(dnnl_stream_create(&s->stream, s->engine, dnnl_stream_default_flags));
    }
    return s;
}

static dnnl_primitive_t find(struct cpu_bf16 *s, const struct bf16_product *p)
{
    for (int i = 0; i < s->count; i++) {
        const struct kind *x = &s->kinds[i];
        if (x->ta == p->ta && x->tb == p->tb && x->accumulate == p->accumulate &&
            x->alpha == p->alpha)
            return x->primitive;
    }
    struct kind fresh = {p->ta, p->tb, p->accumulate, p->alpha, NULL};
    fresh.primitive = make(s->engine, &fresh);
    if (!fresh.primitive) {
        s->plain = 1;
        return NULL;
    }
    struct kind *at = &s->kinds[s->next];
    if (s->count == KINDS_MAX)
        done(dnnl_primitive_destroy(at->primitive));
    else
        s->count++;
    s->next = (s->next + 1) % KINDS_MAX;
    *at = fresh;
    return at->primitive;
}

static void execute(struct cpu_bf16 *s, dnnl_primitive_t primitive, const struct bf16_product *p)
{
    const int argument[OPERANDS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    void *const at[OPERANDS] = {(void *)(uintptr_t)p->a, (void *)(uintptr_t)p->b, p->c};
    dnnl_memory_desc_t md[OPERANDS];
    dnnl_memory_t memory[OPERANDS];
    dnnl_exec_arg_t arguments[OPERANDS];
    describe(p, p->m, p->n, p->k, md);
    for (int i = 0; i < OPERANDS; i++) {
        done(dnnl_memory_create(&memory[i], &md[i], s->engine, at[i]));
        arguments[i] = (dnnl_exec_arg_t){argument[i], memory[i]};
    }
    done(dnnl_primitive_execute(primitive, s->stream, OPERANDS, arguments));
    done(dnnl_stream_wait(s->stream));
    for (int i = 0; i < OPERANDS; i++)
        done(dnnl_memory_destroy(memory[i]));
}

void cpu_matmul_bf16(struct device *d, int ta, int tb, int m, int n, int k, float alpha,
    const bf16 *a, int lda, const bf16 *b, int ldb, int accumulate, float *c, int ldc)
{
    const struct bf16_product p = {ta, tb, m, n, k, alpha, a, lda, b, ldb, accumulate, c, ldc};
    CHECK(m >= 0 && n >= 0 && k > 0);
    CHECK(lda >= (ta ? m : k) && ldb >= (tb ? k : n) && ldc >= n);
    if (m == 0 || n == 0)
        return;
    struct cpu_bf16 *s = started(d);
    cpu_use_threads(cpu_team(d, (int64_t)m * n * k));
    dnnl_primitive_t primitive = s->plain ? NULL : find(s, &p);
    if (primitive)
        execute(s, primitive, &p);
    else
        cpu_matmul_bf16_plain(d, &p);
}

void cpu_bf16_release(struct device *d)
{
    struct cpu_bf16 *s = d->own;
    if (!s)
        return;
    for (int i = 0; i < s->count; i++)
        done(dnnl_primitive_destroy(s->kinds[i].primitive));
    if (s->engine) {
        done(dnnl_stream_destroy(s->stream));
        done(dnnl_engine_destroy(s->engine));
    }
    free(s);
    d->own = NULL;
}
