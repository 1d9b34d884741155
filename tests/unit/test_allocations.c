/*
 * A training step allocates nothing: malloc and its kin are replaced by counting ones, by who
 * calls. What oneDNN and OpenMP take inside a call for themselves is counted apart; it must be
 * given back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <malloc.h>

#include <cmocka.h>

#include "common/mem.h"
#include "tests/unit/model_case.h"
#include "tests/unit/ops_check.h"
#include "trainer/optimizer.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define REPLACED 0 /* the sanitizer has replaced them already */
#else
#define REPLACED 1
#endif

static int counting;
static volatile long ours, libraries,
    live; /* calls by this program's code, by others, not given back yet */

#if REPLACED
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);
void __libc_free(void *p);
extern char __executable_start, etext; /* the linker's: where this program's code lies */

static void *counted(void *p, const void *caller)
{
    if (!__atomic_load_n(&counting, __ATOMIC_RELAXED))
        return p;
    int own = (const char *)caller >= &__executable_start && (const char *)caller < &etext;
    __atomic_add_fetch(own ? &ours : &libraries, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&live, p != NULL, __ATOMIC_RELAXED);
    return p;
}

__attribute__((noinline)) void *malloc(size_t n)
{
    return counted(__libc_malloc(n), __builtin_return_address(0));
}
__attribute__((noinline)) void *calloc(size_t n, size_t size)
{
    return counted(__libc_calloc(n, size), __builtin_return_address(0));
}
__attribute__((noinline)) void *realloc(void *old, size_t n)
{
    if (old && __atomic_load_n(&counting, __ATOMIC_RELAXED))
        __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
    return counted(__libc_realloc(old, n), __builtin_return_address(0));
}
__attribute__((noinline)) void *aligned_alloc(size_t align, size_t n)
{
    return counted(__libc_memalign(align, n), __builtin_return_address(0));
}
__attribute__((noinline)) void *memalign(size_t align, size_t n)
{
    return counted(__libc_memalign(align, n), __builtin_return_address(0));
}
__attribute__((noinline)) int posix_memalign(void **out, size_t align, size_t n)
{
    *out = counted(__libc_memalign(align, n), __builtin_return_address(0));
    return *out ? 0 : 12;
}
__attribute__((noinline)) void free(void *p)
{
    if (p && __atomic_load_n(&counting, __ATOMIC_RELAXED))
        __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
    __libc_free(p);
}
#endif

struct rig {
    struct device *d;
    struct model *m;
    struct optimizer *o;
    float *flat;
};

static void rig_init(struct rig *r, const struct model_limits *lim)
{
    struct model_config c = small_config();
    struct optimizer_settings s = {.beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .weight_decay = 0.1,
        .clip_norm = 1,
        .fusion_lr_scale = 1};
    struct err e = {0};
    c.dim = 64; /* large enough for more than one thread */
    c.head_dim = 16;
    c.ffn = 160;
    c.vocab = 500;
    c.qk_norm = c.attn_gate = 1;
    c.window = 20;
    c.full_every = 2;
    r->d = test_device(2);
    r->m = small_model(r->d, &c, lim, 5, &r->flat);
    assert_int_equal(optimizer_new(r->d, model_weights(r->m), &s, &r->o, &e), 0);
}

static void step(struct rig *r, const struct model_batch *b)
{
    double sums[3];
    struct optimizer_result result;
    r->d->ops->zero(r->d, model_grads(r->m), (size_t)model_weights(r->m)->total * sizeof(float));
    model_train(r->m, b, 1, 0.01f, sums);
    optimizer_update(r->o, model_params(r->m), model_grads(r->m), 1e-4, b->passes, &result);
    assert_false(result.skipped);
}

/* Steps of 1, 2 and 3 passes in turn; the first round may warm libraries up. */
static void check_steps(int sharing, enum recompute recompute, enum precision precision)
{
    struct model_limits lim = {.batch = 4,
        .seq = 96,
        .passes = 3,
        .train = 1,
        .precision = precision,
        .prefix_sharing = sharing,
        .recompute = {recompute, recompute, recompute}};
    struct test_batch tb[3];
    struct rig r;
    long before = 0;
    rig_init(&r, &lim);
    for (int k = 0; k < 3; k++)
        test_batch_make(&tb[k], model_config_of(r.m), 4, 96, k + 1, 0, 0.1f, 77 + (uint64_t)k);
    ours = libraries = live = 0;
    for (int round = 0; round < 3; round++) {
        before = live;
        __atomic_store_n(&counting, 1, __ATOMIC_SEQ_CST);
        for (int k = 0; k < 3; k++)
            step(&r, &tb[k].b);
        __atomic_store_n(&counting, 0, __ATOMIC_SEQ_CST);
    }
    print_message("allocations in 9 steps: %ld of ours, %ld inside libraries\n", ours, libraries);
    assert_int_equal(ours, 0);
    assert_int_equal(live, before); /* the last round gave back what it took */
    for (int k = 0; k < 3; k++)
        test_batch_release(&tb[k]);
    optimizer_free(&r.o);
    model_free(&r.m);
    free(r.flat);
}

static void test_steps_allocate_nothing(void **state)
{
    (void)state;
    if (!REPLACED)
        skip();
    for (int sharing = 0; sharing < 2; sharing++)
        for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_LAYER; level++)
            for (int p = PRECISION_F32; p < PRECISION_COUNT; p++)
                check_steps(sharing, (enum recompute)level, (enum precision)p);
}

/* The counting itself: an allocation of ours is seen. */
static void test_counting_counts(void **state)
{
    (void)state;
    if (!REPLACED)
        skip();
    ours = live = 0;
    __atomic_store_n(&counting, 1, __ATOMIC_SEQ_CST); /* atomic, so that it is not moved */
    void *volatile p = malloc(10);
    void *volatile q = calloc(1, 10);
    free(p);
    __atomic_store_n(&counting, 0, __ATOMIC_SEQ_CST);
    free(q);
    assert_int_equal(ours, 2);
    assert_int_equal(live, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counting_counts),
        cmocka_unit_test(test_steps_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
