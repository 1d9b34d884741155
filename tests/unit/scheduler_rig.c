#include "tests/unit/scheduler_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fs.h"
#include "common/mem.h"
#include "common/rng.h"
#include "common/version.h"
#include "tests/unit/temp_dir.h"

#define SHA "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static const char base[] =
    "run: {name: rig, dir: /tmp}\n"
    "data: {tokenizer: /tokenizer.json, seq_len: 16, sources: [{name: a, path: /a}]}\n"
    "train: {steps: 12, batch_rows: 8, micro_rows: 2}\n"
    "checkpoint: {every_steps: 4, keep_last: 2}\n"
    "%s\n";

static const struct scheduler_tuning tuning = {.heartbeat_ms = RIG_BEAT,
    .evaluator_wait_ms = 20000,
    .retry_pause_ms = 2000,
    .retries = 2,
    .stop_wait_ms = 60000};

static void make_run(struct rig *r, const char *more)
{
    struct err e = {0};
    char sha[SHA256_HEX];
    char *tokenizer = mem_printf("%s/tokenizer.json", r->dir);
    char *yaml = mem_printf(base, more);
    assert_int_equal(fs_write_atomic(tokenizer, "{}", 2, &e), 0);
    hash_sha256_hex("{}", 2, sha);
    if (config_parse(yaml, strlen(yaml), "rig", NULL, 0, &r->run.config, &e) < 0)
        fail_msg("%s", e.msg);
    json_t *j = json_pack("{s:i, s:o, s:[{s:s, s:i, s:i}], s:{s:s, s:i}}", "version", PLAN_VERSION,
        "config", config_plan_json(&r->run.config), "sources", "manifest_root", SHA, "train_tokens",
        5000, "val_tokens", 2000, "tokenizer", "sha256", sha, "vocab", 100);
    char *text = json_dumps(j, 0);
    if (plan_parse(text, strlen(text), "plan", &r->run.plan, &e) < 0)
        fail_msg("%s", e.msg);
    r->run.config.model.vocab = 100;
    /* Only now, so that the plan and its hash are the same in every directory. */
    free(r->run.plan.c.data.tokenizer);
    r->run.plan.c.data.tokenizer = mem_strdup(tokenizer);
    r->run.path = mem_strdup(r->dir);
    free(text);
    json_decref(j);
    free(yaml);
    free(tokenizer);
}

static void collect(struct rig *r)
{
    struct outgoing o;
    while (scheduler_next(r->s, &o)) {
        r->got = mem_grow_array(r->got, (size_t)r->count + 1, sizeof *r->got);
        r->got[r->count++] = o;
    }
}

static void forget(struct rig *r)
{
    for (int i = 0; i < r->count; i++)
        json_decref(r->got[i].body);
    free(r->got);
    r->got = NULL;
    r->count = 0;
}

int rig_try_start(struct rig *r, struct err *e)
{
    return scheduler_open(&r->run, &tuning, r->now, &r->s, e);
}

void rig_prepare(struct rig *r, const char *yaml)
{
    memset(r, 0, sizeof *r);
    r->now = 1000;
    log_set_level(LOG_ERROR + 1);
    /* In memory where that is possible: everything here is synced, and nobody pulls the plug. */
    r->dir = temp_dir_make_in_memory();
    make_run(r, yaml);
}

void rig_open(struct rig *r, const char *yaml)
{
    struct err e = {0};
    rig_prepare(r, yaml);
    if (rig_try_start(r, &e) < 0)
        fail_msg("%s", e.msg);
}

void rig_close(struct rig *r)
{
    scheduler_free(&r->s);
    forget(r);
    rundir_release(&r->run);
    temp_dir_remove(&r->dir);
}

void rig_restart(struct rig *r)
{
    struct err e = {0};
    scheduler_free(&r->s);
    forget(r);
    if (rig_try_start(r, &e) < 0)
        fail_msg("%s", e.msg);
}

void rig_say_epoch(struct rig *r, const char *peer, int type, uint32_t epoch, json_t *body)
{
    struct wire_header h = {.type = type, .major = WIRE_MAJOR, .run_epoch = epoch};
    scheduler_message(r->s, peer, &h, body, r->now);
    json_decref(body);
    collect(r);
}

void rig_say(struct rig *r, const char *peer, int type, json_t *body)
{
    rig_say_epoch(r, peer, type, r->s->epoch, body);
}

void rig_wait(struct rig *r, int64_t ms)
{
    for (int64_t end = r->now + ms; r->now < end;) {
        r->now += end - r->now < RIG_BEAT ? end - r->now : RIG_BEAT;
        scheduler_tick(r->s, r->now);
        collect(r);
    }
}

json_t *rig_take(struct rig *r, const char *peer, int type)
{
    for (int i = 0; i < r->count; i++)
        if (r->got[i].type == type && strcmp(r->got[i].peer, peer) == 0) {
            json_t *body = r->got[i].body;
            memmove(r->got + i, r->got + i + 1, (size_t)(r->count - i - 1) * sizeof *r->got);
            r->count--;
            return body;
        }
    return NULL;
}

void rig_expect(struct rig *r, const char *peer, int type)
{
    json_t *j = rig_take(r, peer, type);
    if (!j)
        fail_msg("no %s to %s", wire_type_name(type), peer);
    json_decref(j);
}

void rig_expect_none(struct rig *r, const char *peer, int type)
{
    json_t *j = rig_take(r, peer, type);
    if (j)
        fail_msg("%s to %s: %s", wire_type_name(type), peer, json_dumps(j, 0));
}

int64_t json_step(json_t *j)
{
    assert_non_null(j);
    const json_t *step = json_object_get(j, "step");
    assert_true(json_is_integer(step));
    int64_t n = json_integer_value(step);
    json_decref(j);
    return n;
}

json_t *rig_hello(const struct rig *r, const char *role, int rank, int world)
{
    return json_pack("{s:s, s:i, s:i, s:i, s:s, s:s, s:s}", "role", role, "rank", rank, "world",
        world, "pid", 100 + rank, "version", FULLBAND_VERSION, "plan_hash", r->run.plan.hash,
        "manifest_root", r->run.plan.manifest_root);
}

static const char *trainer(int rank)
{
    static char names[8][32];
    snprintf(names[rank], sizeof names[rank], "trainer-%d", rank);
    return names[rank];
}

void rig_join(struct rig *r, int world)
{
    for (int rank = 0; rank < world; rank++)
        rig_say_epoch(r, trainer(rank), WIRE_HELLO, 0, rig_hello(r, "trainer", rank, world));
    for (int rank = 0; rank < world; rank++)
        rig_expect(r, trainer(rank), WIRE_WELCOME);
}

void rig_ready(struct rig *r, int rank, int64_t step)
{
    rig_say(r, trainer(rank), WIRE_READY, json_pack("{s:I}", "step", (json_int_t)step));
}

json_t *rig_step_body(const struct rig *r, int rank, int world, int64_t step)
{
    const struct plan *p = &r->run.plan;
    uint64_t ids = 0, batch = (uint64_t)p->c.train.batch_rows, rows = 0;
    for (uint64_t i = 0; i < batch; i++)
        if (i / (uint64_t)p->c.train.micro_rows % (uint64_t)world == (uint64_t)rank) {
            ids += rng_mix(plan_train_sample(p, (uint64_t)step * batch + i).id);
            rows++;
        }
    char hex[20], content[20];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)ids);
    snprintf(content, sizeof content, "%llx", (unsigned long long)(step * 1000 + rank));
    json_t *losses = json_array();
    int passes = plan_passes(p, step);
    for (int k = 0; k < passes; k++)
        json_array_append_new(losses, json_real(3.0 - 0.1 * (double)step));
    return json_pack("{s:I, s:i, s:o, s:f, s:f, s:f, s:I, s:I, s:f, s:f, s:s, s:s}", "step",
        (json_int_t)step, "passes", passes, "losses", losses, "total", 3.0, "grad_norm", 1.0, "lr",
        1e-3, "tokens", (json_int_t)(rows * 16), "rows", (json_int_t)rows, "seconds", 0.5,
        "wait_seconds", 0.0, "ids", hex, "content", content);
}

void rig_step(struct rig *r, int rank, int world, int64_t step)
{
    rig_say(r, trainer(rank), WIRE_STEP, rig_step_body(r, rank, world, step));
}

json_t *rig_saved_body(const struct rig *r, int rank, int world, int64_t step)
{
    struct err e = {0};
    char name[32], file[64], sha[SHA256_HEX], text[64];
    checkpoint_name(step, name);
    char *dir = mem_printf("%s/checkpoints/%s", r->dir, name);
    assert_int_equal(fs_mkdir_p(dir, 0755, &e), 0);
    snprintf(file, sizeof file, "optimizer-%05d-of-%05d.safetensors", rank, world);
    snprintf(text, sizeof text, "rank %d at step %lld", rank, (long long)step);
    char *path = mem_printf("%s/%s", dir, file);
    assert_int_equal(fs_write_atomic(path, text, strlen(text), &e), 0);
    hash_sha256_hex(text, strlen(text), sha);
    free(path);
    free(dir);
    return json_pack("{s:I, s:[{s:s, s:I, s:s}], s:f, s:f}", "step", (json_int_t)step, "files",
        "name", file, "bytes", (json_int_t)strlen(text), "sha256", sha, "stall_seconds", 0.0,
        "write_seconds", 0.1);
}

void rig_saved(struct rig *r, int rank, int world, int64_t step)
{
    rig_say(r, trainer(rank), WIRE_SAVED, rig_saved_body(r, rank, world, step));
}

void rig_train(struct rig *r, int world, int64_t until)
{
    for (int64_t step = r->s->steps.cursor.step; step < until; step++) {
        int save = 0;
        for (int rank = 0; rank < world; rank++)
            rig_ready(r, rank, step);
        for (int rank = 0; rank < world; rank++) {
            json_t *g = rig_take(r, trainer(rank), WIRE_GRANT);
            assert_non_null(g);
            save = json_is_true(json_object_get(g, "checkpoint"));
            assert_int_equal(json_step(g), step);
        }
        for (int rank = 0; rank < world; rank++)
            rig_step(r, rank, world, step);
        for (int rank = 0; save && rank < world; rank++)
            rig_saved(r, rank, world, step + 1);
    }
}
