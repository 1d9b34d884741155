/* model_on_final(): what is told is final, each weight once, the last layer first. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "tests/unit/model_case.h"
#include "tests/unit/ops_check.h"

struct told {
    struct model *m;
    float *grads; /* as they were when they were told to be final */
    int *times;   /* by weight */
    int last;     /* the weight told before */
};

static void tell(void *ctx, int first, int end)
{
    struct told *t = ctx;
    const struct weight_table *table = model_weights(t->m);
    assert_true(0 <= first && first < end && end <= table->count);
    for (int i = first; i < end; i++) {
        const struct weight *w = &table->items[i];
        memcpy(
            t->grads + w->offset, model_grads(t->m) + w->offset, (size_t)w->count * sizeof(float));
        t->times[i]++;
    }
    if (table->items[first].group != WEIGHT_FUSION) {
        assert_true(first < t->last);
        t->last = first;
    }
}

static void check(int passes, int sharing, enum recompute recompute)
{
    struct model_config c = small_config();
    struct model_limits lim = {
        .batch = 2, .seq = 12, .passes = 3, .train = 1, .prefix_sharing = sharing};
    struct test_batch tb;
    double sums[3];
    float *flat;
    c.layers = 3;
    c.qk_norm = sharing;
    for (int k = 0; k < 3; k++)
        lim.recompute[k] = recompute;
    struct told t = {.m = small_model(test_device(2), &c, &lim, 4, &flat)};
    const struct weight_table *table = model_weights(t.m);
    t.grads = mem_array((size_t)table->total, sizeof *t.grads);
    t.times = mem_array((size_t)table->count, sizeof *t.times);
    t.last = table->count;
    test_batch_make(&tb, &c, 2, 12, passes, 0, 0.1f, 9);
    model_on_final(t.m, tell, &t);
    model_train(t.m, &tb.b, 0.7f, 0.05f, sums);
    for (int i = 0; i < table->count; i++) {
        const struct weight *w = &table->items[i];
        assert_int_equal(t.times[i], w->group != WEIGHT_FUSION || passes > 1);
        assert_memory_equal(
            t.grads + w->offset, model_grads(t.m) + w->offset, (size_t)w->count * sizeof(float));
    }
    test_batch_release(&tb);
    model_free(&t.m);
    free(t.grads);
    free(t.times);
    free(flat);
}

static void test_final_is_final(void **state)
{
    (void)state;
    for (int passes = 1; passes <= 3; passes++)
        for (int sharing = 0; sharing <= 1; sharing++)
            for (int level = 0; level < 3; level++)
                check(passes, sharing, (enum recompute)level);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_final_is_final)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
