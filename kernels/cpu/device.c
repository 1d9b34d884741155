#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "common/process.h"
#include "kernels/cpu/cpu.h"

#define ALIGN 64 /* a cache line, and the widest vector */

static void *cpu_alloc(struct device *d, size_t bytes)
{
    (void)d;
    if (bytes > PTRDIFF_MAX - ALIGN)
        return NULL;
    size_t rounded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (rounded == 0)
        rounded = ALIGN;
    void *p = aligned_alloc(ALIGN, rounded);
    if (p)
        memset(p, 0, rounded);
    return p;
}

static void cpu_free(struct device *d, void *p)
{
    (void)d;
    free(p);
}

static void cpu_copy(struct device *d, void *dst, const void *src, size_t bytes)
{
    (void)d;
    if (bytes)
        memmove(dst, src, bytes);
}

static void cpu_zero(struct device *d, void *dst, size_t bytes)
{
    (void)d;
    if (bytes)
        memset(dst, 0, bytes);
}

static int cpu_sync(struct device *d, struct err *e)
{
    (void)d;
    (void)e;
    return 0;
}

static const struct device_ops cpu_ops = {
    .name = "cpu",
    .release = cpu_bf16_release,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .sync = cpu_sync,
    .matmul = cpu_matmul,
    .bf16_native = cpu_bf16_native,
    .to_bf16 = cpu_to_bf16,
    .matmul_bf16 = cpu_matmul_bf16,
    .embed_fwd = cpu_embed_fwd,
    .embed_bwd = cpu_embed_bwd,
    .rmsnorm_fwd = cpu_rmsnorm_fwd,
    .rmsnorm_bwd = cpu_rmsnorm_bwd,
    .rmsnorm_bwd_work = cpu_rmsnorm_bwd_work,
    .rope = cpu_rope,
    .attn_fwd = cpu_attn_fwd,
    .attn_bwd = cpu_attn_bwd,
    .attn_bwd_work = cpu_attn_bwd_work,
    .attn_rows_fwd = cpu_attn_rows_fwd,
    .attn_rows_bwd = cpu_attn_rows_bwd,
    .attn_rows_bwd_work = cpu_attn_rows_bwd_work,
    .attn_cached = cpu_attn_cached,
    .cache_put = cpu_cache_put,
    .swiglu_fwd = cpu_swiglu_fwd,
    .swiglu_bwd = cpu_swiglu_bwd,
    .swiglu_fwd_bf16 = cpu_swiglu_fwd_bf16,
    .swiglu_bwd_bf16 = cpu_swiglu_bwd_bf16,
    .carry_fwd = cpu_carry_fwd,
    .carry_bwd = cpu_carry_bwd,
    .carry_rows_fwd = cpu_carry_rows_fwd,
    .carry_rows_bwd = cpu_carry_rows_bwd,
    .gate_fwd = cpu_gate_fwd,
    .gate_bwd = cpu_gate_bwd,
    .select_rows = cpu_select_rows,
    .select_rows_bwd = cpu_select_rows_bwd,
    .gather_rows = cpu_gather_rows,
    .scatter_rows = cpu_scatter_rows,
    .scatter_add_rows = cpu_scatter_add_rows,
    .xent = cpu_xent,
    .add = cpu_add,
    .scale = cpu_scale,
    .sum_sq = cpu_sum_sq,
    .sum = cpu_sum,
    .adamw = cpu_adamw,
    .normuon = cpu_normuon,
};

int cpu_team(const struct device *d, int64_t multiply_adds)
{
    return multiply_adds < CPU_SMALL_MADS ? 1 : d->threads;
}

void cpu_use_threads(int threads)
{
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

int device_cpu_new(int threads, struct device **out, struct err *e)
{
    struct device *d = calloc(1, sizeof *d);
    if (d && !(d->own = cpu_bf16_new())) {
        free(d);
        d = NULL;
    }
    if (!d)
        return err_set(e, ERR_NOMEM, "cpu device: no memory");
    d->ops = &cpu_ops;
    d->threads = threads > 0 ? threads : process_cores();
#ifdef _OPENMP
    omp_set_dynamic(0); /* always the team that is asked for: part of what makes results repeat */
    if (d->threads > omp_get_thread_limit())
        d->threads = omp_get_thread_limit();
#else
    d->threads = 1;
#endif
    *out = d;
    return 0;
}

void device_free(struct device **d)
{
    if (*d && (*d)->ops && (*d)->ops->release)
        (*d)->ops->release(*d);
    free(*d);
    *d = NULL;
}
