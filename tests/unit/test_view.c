/* ops/history, ops/evals and ops/view: what an operator is shown of a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fs.h"
#include "ops/evals.h"
#include "ops/history.h"
#include "ops/view.h"
#include "tests/unit/temp_dir.h"

static char *dir;

static int make_dir(void **state)
{
    (void)state;
    dir = temp_dir_make();
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    temp_dir_remove(&dir);
    return 0;
}

/* 40 steps: 20 of one pass, then 20 of two. */
static void make_plan(struct plan *p)
{
    memset(p, 0, sizeof *p);
    p->c.train.steps = 40;
    p->c.train.phase_count = 2;
    p->c.train.phases[0].share[1] = 1;
    p->c.train.phases[1].from = 0.5;
    p->c.train.phases[1].share[2] = 1;
}

static void append(const char *path, const char *text)
{
    FILE *f = fopen(path, "a");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void append_step(const char *path, int step, double l1, double l2, double seconds)
{
    char *losses = step < 20 ? mem_printf("[%.3f]", l1) : mem_printf("[%.3f,%.3f]", l1, l2);
    char *line = mem_printf("{\"step\":%d,\"losses\":%s,\"lr\":0.001,\"tokens\":100,"
                            "\"seconds\":%.3f}\n",
        step, losses, seconds);
    append(path, line);
    free(line);
    free(losses);
}

static void near(double a, double b)
{
    if (!(fabs(a - b) < 1e-9 * (1 + fabs(b))))
        fail_msg("%g, expected %g", a, b);
}

static void reads_as_it_grows(void **state)
{
    struct plan plan;
    struct history h;
    struct err e;
    char *path = mem_printf("%s/metrics.jsonl", dir);
    (void)state;
    make_plan(&plan);
    history_start(&h, &plan);
    assert_int_equal(h.to_go[1], 20);
    assert_int_equal(h.to_go[2], 20);
    assert_int_equal(history_read(&h, path, &e), 0); /* not there yet */
    assert_true(isnan(history_eta(&h)));

    append_step(path, 0, 8, 0, 0.5);
    append_step(path, 1, 6, 0, 0.5);
    append(path, "{\"event\":\"checkpoint\",\"step\":2}\nnot json\n");
    append(path, "{\"step\":2,\"losses\":[5.0],"); /* half a line */
    assert_int_equal(history_read(&h, path, &e), 0);
    assert_int_equal(h.step, 2);
    near(h.loss[1].first, 8);
    near(trend_now(&h.loss[1]), 7);
    near(trend_now(&h.rate), 200);
    /* 18 steps of one pass at 0.5 s, 20 of two at twice that as long as none was seen */
    near(history_eta(&h), 18 * 0.5 + 20 * 1.0);

    append(path, "\"lr\":0.002,\"tokens\":100,\"seconds\":0.5}\n");
    for (int s = 3; s < 22; s++)
        append_step(path, s, 4, 3, s < 20 ? 0.5 : 0.8);
    assert_int_equal(history_read(&h, path, &e), 0);
    assert_int_equal(h.step, 22);
    assert_int_equal(h.passes, 2);
    assert_int_equal(h.tokens, 2200);
    near(trend_now(&h.loss[2]), 3);
    near(history_eta(&h), 18 * 0.8);

    append_step(path, 10, 4, 0, 0.5); /* rolled back to step 10 */
    assert_int_equal(history_read(&h, path, &e), 0);
    assert_int_equal(h.step, 11);
    assert_int_equal(h.to_go[1], 9);
    assert_int_equal(h.to_go[2], 20);
    free(path);
}

static void refuses_what_is_no_step(void **state)
{
    static const char *const lines[] = {"[]", "3", "{\"step\":1}", "{\"step\":1,\"losses\":[]}",
        "{\"step\":40,\"losses\":[1]}", "{\"step\":-1,\"losses\":[1]}",
        "{\"step\":1,\"losses\":[1,2,3,4,5,6,7,8,9]}", "{\"step\":\"1\",\"losses\":[1]}"};
    struct plan plan;
    struct history h;
    (void)state;
    make_plan(&plan);
    history_start(&h, &plan);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        json_t *j = json_loads(lines[i], JSON_DECODE_ANY, NULL);
        assert_int_equal(history_take(&h, j), 0);
        json_decref(j);
    }
    assert_int_equal(h.step, 0);
}

static const char results[] =
    "{\"evals\": ["
    "{\"step\": 20, \"suite\": \"loss\", \"regime\": \"standard\", \"result\": "
    "{\"nats_per_token\": 2.5,"
    "  \"bits_per_byte\": 1.25, \"passes\": [{\"pass\": 1, \"nats_per_token\": 2.0, "
    "\"bits_per_byte\":"
    "  1.0}, {\"pass\": 2, \"nats_per_token\": 1.5, \"bits_per_byte\": 0.75}]}},"
    "{\"step\": 10, \"suite\": \"loss\", \"regime\": \"soft\", \"nats_per_token\": 3.5,"
    "  \"bits_per_byte\": 1.75},"
    "{\"step\": 20, \"suite\": \"fixed_point\", \"result\": {\"contraction\": 0.5}},"
    "{\"step\": 20, \"suite\": \"loss\", \"regime\": \"fused\", \"error\": \"no memory\"},"
    "{\"suite\": \"loss\"}, {\"step\": 20, \"suite\": \"other\", \"result\": {}}, 7]}";

static void eval_table(void **state)
{
    struct evals t = {0};
    struct buf text = BUF_INIT;
    json_t *j = json_loads(results, 0, NULL);
    (void)state;
    assert_non_null(j);
    evals_take(&t, j);
    evals_take(&t, j); /* the same again changes nothing */
    evals_take(&t, NULL);
    json_decref(j);
    assert_int_equal(t.count, 2);
    assert_int_equal(t.rows[0].step, 10);
    near(t.rows[0].nats[REGIME_SOFT], 3.5);
    assert_true(isnan(t.rows[0].nats[REGIME_STANDARD]));
    near(t.rows[1].nats[REGIME_STANDARD], 2.5);
    near(t.rows[1].pass_nats[2], 1.5);
    near(t.rows[1].pass_bits[1], 1);
    near(t.rows[1].contraction, 0.5);
    assert_true(isnan(t.rows[1].nats[REGIME_FUSED]));
    evals_print(&t, 10, &text);
    assert_string_equal(text.data,
        "   step   pass 1   pass 2 standard     soft    fused   bits/B contract\n"
        "     10        -        -        -   3.5000        -        -        -\n"
        "     20   2.0000   1.5000   2.5000        -        -   1.0000   0.5000\n");
    buf_clear(&text);
    eval_row_print(&t.rows[1], &text);
    assert_string_equal(
        text.data, "step 20: pass 1 2.0000, pass 2 1.5000, standard 2.5000 nats/token");
    struct config c = {0};
    c.eval.suites[SUITE_LOSS] = c.eval.suites[SUITE_FIXED_POINT] = 1;
    c.eval.regimes[REGIME_STANDARD] = 1;
    assert_true(eval_row_complete(&t.rows[1], &c));
    assert_false(eval_row_complete(&t.rows[0], &c)); /* no standard, no contraction */
    c.eval.regimes[REGIME_FUSED] = 1;
    assert_false(eval_row_complete(&t.rows[1], &c));
    buf_release(&text);
    evals_release(&t);
}

static void files_and_texts(void **state)
{
    struct rundir run = {0};
    struct view v;
    struct err e;
    struct buf text = BUF_INIT;
    (void)state;
    run.path = mem_printf("%s/run", dir);
    make_plan(&run.plan);
    run.config.run.name = (char *)(uintptr_t) "tiny";
    run.config.eval.every_steps = 10;
    run.config.process.evaluators = 1;
    char *evals = rundir_path(&run, "evals/step-00000020"),
         *metrics = rundir_path(&run, "metrics.jsonl");
    char *summary = mem_printf("%s/summary.json", evals);
    assert_int_equal(fs_mkdir_p(evals, 0755, &e), 0);
    assert_int_equal(fs_write_atomic(summary, results, strlen(results), &e), 0);
    append_step(metrics, 0, 8, 0, 0.5);
    append_step(metrics, 1, 8, 0, 0.5);

    view_start(&v, &run);
    assert_int_equal(view_read(&v, &e), 0);
    assert_int_equal(v.evals.count, 2);
    assert_int_equal(v.checkpoint, -1);
    assert_string_equal(view_state(&v), "not running");
    view_print_line(&v, &text);
    assert_string_equal(text.data, "not running  step 2/40 (5 %)  pass 1 8.0000  pass 2 -  lr "
                                   "1.00e-03  200 tokens/s  ETA 0:29");
    view_take_status(&v, json_loads("{\"state\": \"training\", \"members\": [{\"role\": \"loader\","
                                    "\"age_seconds\": 0.2}, {\"role\": \"trainer\","
                                    "\"age_seconds\": 5}], \"warnings\": [\"a\", \"b\"]}",
                             0, NULL));
    buf_clear(&text);
    view_print_live(&v, 80, &text);
    assert_non_null(strstr(text.data, "tiny  training\n"));
    assert_non_null(strstr(text.data, "alive scheduler, loader, trainer (silent for 5 s)\n"));
    assert_non_null(strstr(text.data, "warn   b\n"));
    json_t *j = view_json(&v);
    assert_int_equal(json_integer_value(json_object_get(j, "steps")), 40);
    assert_true(json_is_null(json_array_get(json_object_get(j, "losses"), 1)));
    assert_int_equal(json_array_size(json_object_get(j, "evals")), 2);
    json_decref(j);
    buf_release(&text);
    view_release(&v);
    free(summary);
    free(metrics);
    free(evals);
    free(run.path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_as_it_grows),
        cmocka_unit_test(refuses_what_is_no_step),
        cmocka_unit_test(eval_table),
        cmocka_unit_test(files_and_texts),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
