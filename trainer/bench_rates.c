#include "trainer/bench_rates.h"

#include <stdlib.h>
#include <string.h>

#include <dnnl.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "common/mem.h"
#include "trainer/bench_clock.h"

/* --- the processor ------------------------------------------------------------------------------
 */

enum { CHAINS = 16, FMA_ROUNDS = 1 << 17, FMA_STRETCHES = 9 };

typedef float wide __attribute__((vector_size(64)));

#if defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define CLONES
#endif

/* 2 · CHAINS · 16 · FMA_ROUNDS operations; returns something that depends on all of them. */
CLONES static float fma_chains(float seed)
{
    wide x[CHAINS], sum = {0};
    for (int c = 0; c < CHAINS; c++)
        x[c] = (wide){0} + seed + (float)c;
    for (int r = 0; r < FMA_ROUNDS; r++)
        for (int c = 0; c < CHAINS; c++)
            x[c] = x[c] * 0.999f + 0.001f;
    for (int c = 0; c < CHAINS; c++)
        sum += x[c];
    return sum[0] + sum[15];
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_fma_rate(int threads)
{
    double seconds[FMA_STRETCHES] = {0};
    volatile float sink = 0;
    for (int i = -1; i < FMA_STRETCHES; i++) {
        double since = bench_seconds();
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int t = 0; t < threads; t++)
            sink = fma_chains((float)t);
        if (i >= 0) /* the first starts the threads */
            seconds[i] = bench_seconds() - since;
    }
    (void)sink;
    qsort(seconds, FMA_STRETCHES, sizeof *seconds, by_value);
    return 2.0 * CHAINS * 16 * FMA_ROUNDS * threads / seconds[FMA_STRETCHES / 2];
}

/* --- the library --------------------------------------------------------------------------------
 */

/* Memory that every product fits in. */
struct operands {
    float *a, *b, *c;
};

struct primitive {
    dnnl_primitive_desc_t description;
    dnnl_primitive_t primitive;
    dnnl_memory_t memory[3];
    dnnl_exec_arg_t arguments[3];
    dnnl_stream_t stream;
};

struct product {
    struct device *d;
    const struct bench_shape *shape;
    const struct operands *on;
    struct primitive p;
};

static void by_device(struct product *x)
{
    const struct bench_shape *s = x->shape;
    if (s->bf16) { /* the operands' memory is large enough; what lies in it are numbers too */
        x->d->ops->matmul_bf16(x->d, s->ta, s->tb, s->m, s->n, s->k, 1, (const void *)x->on->a,
            s->ta ? s->m : s->k, (const void *)x->on->b, s->tb ? s->k : s->n, s->accumulates,
            x->on->c, s->n);
        return;
    }
    x->d->ops->matmul(x->d, s->ta, s->tb, s->m, s->n, s->k, 1, x->on->a, s->ta ? s->m : s->k,
        x->on->b, s->tb ? s->k : s->n, (float)s->accumulates, x->on->c, s->n);
}

static void by_sgemm(struct product *x)
{
    const struct bench_shape *s = x->shape;
    dnnl_sgemm(s->ta ? 'T' : 'N', s->tb ? 'T' : 'N', s->m, s->n, s->k, 1, x->on->a,
        s->ta ? s->m : s->k, x->on->b, s->tb ? s->k : s->n, (float)s->accumulates, x->on->c, s->n);
}

static void by_primitive(struct product *x)
{
    dnnl_primitive_execute(x->p.primitive, x->p.stream, 3, x->p.arguments);
    dnnl_stream_wait(x->p.stream);
}

static void primitive_release(struct primitive *p)
{
    for (int i = 0; i < 3; i++)
        if (p->memory[i])
            dnnl_memory_destroy(p->memory[i]);
    if (p->primitive)
        dnnl_primitive_destroy(p->primitive);
    if (p->description)
        dnnl_primitive_desc_destroy(p->description);
    memset(p, 0, sizeof *p);
}

/* A matrix (rows, columns), or the transpose of a (columns, rows) one. */
static int matrix(
    dnnl_memory_desc_t *md, int rows, int columns, int transposed, dnnl_data_type_t type)
{
    dnnl_dims_t dims = {rows, columns};
    dnnl_dims_t strides = {transposed ? 1 : columns, transposed ? rows : 1};
    return dnnl_memory_desc_init_by_strides(md, 2, dims, type, strides) == dnnl_success;
}

static int describe(
    struct primitive *p, const struct bench_shape *s, int packed, dnnl_engine_t engine)
{
    dnnl_memory_desc_t a, b, c;
    dnnl_matmul_desc_t md;
    dnnl_primitive_attr_t attr;
    dnnl_post_ops_t post;
    dnnl_dims_t any = {s->k, s->n};
    dnnl_data_type_t type = s->bf16 ? dnnl_bf16 : dnnl_f32;
    int ok = matrix(&a, s->m, s->k, s->ta, type) && matrix(&b, s->k, s->n, s->tb, type) &&
             matrix(&c, s->m, s->n, 0, dnnl_f32);
    if (packed)
        ok = ok &&
             dnnl_memory_desc_init_by_tag(&b, 2, any, type, dnnl_format_tag_any) == dnnl_success;
    if (!ok || dnnl_matmul_desc_init(&md, &a, &b, NULL, &c) != dnnl_success ||
        dnnl_primitive_attr_create(&attr) != dnnl_success)
        return 0;
    if (s->accumulates && dnnl_post_ops_create(&post) == dnnl_success) {
        dnnl_post_ops_append_sum(post, 1);
        dnnl_primitive_attr_set_post_ops(attr, post);
        dnnl_post_ops_destroy(post);
    }
    ok = dnnl_primitive_desc_create(&p->description, &md, attr, engine, NULL) == dnnl_success;
    dnnl_primitive_attr_destroy(attr);
    return ok && dnnl_primitive_create(&p->primitive, p->description) == dnnl_success;
}

/* 0 where the library has no such primitive. */
static int primitive_make(struct product *x, int packed, dnnl_engine_t engine, dnnl_stream_t stream)
{
    const dnnl_query_t which[3] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md};
    const int argument[3] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    void *at[3] = {x->on->a, packed ? DNNL_MEMORY_ALLOCATE : (void *)x->on->b, x->on->c};
    struct primitive *p = &x->p;
    if (!describe(p, x->shape, packed, engine))
        return 0;
    p->stream = stream;
    for (int i = 0; i < 3; i++) {
        const dnnl_memory_desc_t *md = dnnl_primitive_desc_query_md(p->description, which[i], 0);
        if (dnnl_memory_create(&p->memory[i], md, engine, at[i]) != dnnl_success)
            return 0;
        p->arguments[i] = (dnnl_exec_arg_t){argument[i], p->memory[i]};
    }
    if (packed) { /* zeros multiply as fast as anything else, uninitialised denormals do not */
        const dnnl_memory_desc_t *md =
            dnnl_primitive_desc_query_md(p->description, dnnl_query_weights_md, 0);
        void *weights = NULL;
        dnnl_memory_get_data_handle(p->memory[1], &weights);
        memset(weights, 0, dnnl_memory_desc_get_size(md));
    }
    return 1;
}

#define PRODUCT_SECONDS 0.04

/* Seconds of the fastest call. */
static double best_of(struct product *x, void (*run)(struct product *))
{
    double best = 1e30, start = bench_seconds(), since = start;
    run(x);
    for (int calls = 0; calls < 3 || since - start < PRODUCT_SECONDS; calls++) {
        since = bench_seconds();
        run(x);
        double t = bench_seconds() - since;
        best = t < best ? t : best;
    }
    return best;
}

static int operands_take(const struct bench_counts *c, struct device *d, struct operands *out)
{
    size_t a = 0, b = 0, r = 0;
    for (int i = 0; i < c->shape_count; i++) {
        const struct bench_shape *s = &c->shapes[i];
        size_t m = (size_t)s->m, n = (size_t)s->n, k = (size_t)s->k;
        a = m * k > a ? m * k : a;
        b = k * n > b ? k * n : b;
        r = m * n > r ? m * n : r;
    }
    out->a = d->ops->alloc(d, a * sizeof(float));
    out->b = d->ops->alloc(d, b * sizeof(float));
    out->c = d->ops->alloc(d, r * sizeof(float));
    for (size_t i = 0; out->a && i < a; i++)
        out->a[i] = (float)(i % 13) - 6;
    for (size_t i = 0; out->b && i < b; i++)
        out->b[i] = (float)(i % 11) - 5;
    return out->a && out->b && out->c;
}

static void measure_shape(
    struct product *x, dnnl_engine_t engine, dnnl_stream_t stream, double *device, double *best)
{
    *device = best_of(x, by_device);
    double t = x->shape->bf16 ? *device : best_of(x, by_sgemm);
    *best = t < *device ? t : *device;
    for (int packed = 0; packed < 2; packed++) {
        if (primitive_make(x, packed, engine, stream)) {
            t = best_of(x, by_primitive);
            *best = t < *best ? t : *best;
        }
        primitive_release(&x->p);
    }
}

int bench_ceiling_measure(struct device *d, const struct bench_counts *counts, int steps,
    struct bench_ceiling *out, struct err *e)
{
    struct operands on = {0};
    dnnl_engine_t engine = NULL;
    dnnl_stream_t stream = NULL;
    int rc = 0;
    *out = (struct bench_ceiling){0};
    if (!operands_take(counts, d, &on))
        rc = err_set(e, ERR_NOMEM, "no memory to measure the products alone");
    else if (dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success ||
             dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success)
        rc = err_set(e, ERR_STATE, "oneDNN has no engine for this processor");
#ifdef _OPENMP
    omp_set_num_threads(d->threads);
#endif
    for (int i = 0; rc == 0 && i < counts->shape_count; i++) {
        struct product x = {.d = d, .shape = &counts->shapes[i], .on = &on};
        double device, best, calls = (double)x.shape->calls / steps;
        measure_shape(&x, engine, stream, &device, &best);
        out->flops += calls * 2.0 * x.shape->m * x.shape->n * x.shape->k;
        out->seconds += calls * best;
        out->alone_seconds += calls * device;
    }
    if (stream)
        dnnl_stream_destroy(stream);
    if (engine)
        dnnl_engine_destroy(engine);
    d->ops->free(d, on.a);
    d->ops->free(d, on.b);
    d->ops->free(d, on.c);
    return rc;
}

/* --- plain loops --------------------------------------------------------------------------------
 */

/* y (rows, out) = x wᵀ;  dx (rows, in) = dy w;  dw (out, in) += dyᵀ x */
static void naive_forward(
    float *y, const float *x, const float *w, int threads, int rows, int in, int out)
{
#pragma omp parallel for num_threads(threads)
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < out; o++) {
            float sum = 0;
            for (int i = 0; i < in; i++)
                sum +=
                    x[(size_t)r * (size_t)in + (size_t)i] * w[(size_t)o * (size_t)in + (size_t)i];
            y[(size_t)r * (size_t)out + (size_t)o] = sum;
        }
}

static void naive_backward(float *dx, float *dw, const float *dy, const float *x, const float *w,
    int threads, int rows, int in, int out)
{
#pragma omp parallel for num_threads(threads)
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < out; o++) {
            float g = dy[(size_t)r * (size_t)out + (size_t)o];
            for (int i = 0; i < in; i++)
                dx[(size_t)r * (size_t)in + (size_t)i] += g * w[(size_t)o * (size_t)in + (size_t)i];
        }
#pragma omp parallel for num_threads(threads)
    for (int o = 0; o < out; o++)
        for (int r = 0; r < rows; r++) {
            float g = dy[(size_t)r * (size_t)out + (size_t)o];
            for (int i = 0; i < in; i++)
                dw[(size_t)o * (size_t)in + (size_t)i] += g * x[(size_t)r * (size_t)in + (size_t)i];
        }
}

double bench_naive_rate(int threads, int rows, int in, int out)
{
    size_t xs = (size_t)rows * (size_t)in, ws = (size_t)out * (size_t)in,
           ys = (size_t)rows * (size_t)out;
    float *x = mem_array(2 * (xs + ws) + ys, sizeof *x), *w = x + xs, *y = w + ws, *dx = y + ys,
          *dw = dx + xs;
    double since = 0;
    for (size_t i = 0; i < xs + ws; i++)
        x[i] = (float)(i % 13) * 0.1f - 0.6f;
    for (int i = 0; i < 2; i++) { /* the first starts threads and touches memory */
        since = bench_seconds();
        naive_forward(y, x, w, threads, rows, in, out);
        naive_backward(dx, dw, y, x, w, threads, rows, in, out);
    }
    double seconds = bench_seconds() - since;
    free(x);
    return 6.0 * rows * in * out / seconds;
}
