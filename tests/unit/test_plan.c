// plan: the canonical text and its hash, the order of samples, pass shares, learning rates, masks.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/fs.h"
#include "common/json_canonical.h"
#include "common/manifest.h"
#include "common/plan.h"
#include "common/rng.h"
#include "tests/unit/temp_dir.h"

#define SHA "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

/* A plan of `extra` YAML and sources given as tokens; sources are named s0, s1, … with these
 * weights. */
struct fixture {
    const char *extra;
    int sources;
    double weights[4];
    long train[4], val[4];
};

static json_t *fixture_json(const struct fixture *f)
{
    struct buf yaml = BUF_INIT;
    struct config c;
    struct err e = {0};
    json_t *sources = json_array();
    buf_add_str(&yaml, "data.tokenizer: /t.json\ndata.sources:\n");
    for (int i = 0; i < f->sources; i++) {
        buf_printf(&yaml, "  - {name: s%d, path: /d/s%d, weight: %.17g}\n", i, i, f->weights[i]);
        json_array_append_new(
            sources, json_pack("{s:s+, s:s, s:I, s:I}", "name", "s",
                         i == 0   ? "0"
                         : i == 1 ? "1"
                                  : "2",
                         "manifest_root", SHA, "train_tokens", (json_int_t)f->train[i],
                         "val_tokens", (json_int_t)f->val[i]));
    }
    buf_add_str(&yaml, f->extra);
    int rc = config_parse(yaml.data, yaml.len, "fixture", NULL, 0, &c, &e);
    if (rc < 0)
        print_error("%s\n", e.msg);
    assert_int_equal(rc, 0);
    json_t *j = json_pack("{s:i, s:o, s:o, s:{s:s, s:i}}", "version", PLAN_VERSION, "config",
        config_plan_json(&c), "sources", sources, "tokenizer", "sha256", SHA, "vocab", 1000);
    config_release(&c);
    buf_release(&yaml);
    return j;
}

static int try_plan(const json_t *j, struct plan *p, struct err *e)
{
    char *text = json_dumps(j, JSON_INDENT(3)); /* layout does not matter */
    int rc = plan_parse(text, strlen(text), "plan.json", p, e);
    free(text);
    return rc;
}

static void make(const struct fixture *f, struct plan *p)
{
    struct err e = {0};
    json_t *j = fixture_json(f);
    int rc = try_plan(j, p, &e);
    if (rc < 0)
        print_error("%s\n", e.msg);
    assert_int_equal(rc, 0);
    json_decref(j);
}

static const struct fixture small = {
    .extra = "data.seq_len: 16\neval: {fixed_point_passes: 8}\n"
             "train: {steps: 400, batch_rows: 32, micro_rows: 4, seed: 7}\n",
    .sources = 3,
    .weights = {5, 2, 1},
    .train = {16 * 1000 + 1, 16 * 333 + 9, 16 * 50 + 1},
    .val = {16 * 40 + 1, 16 * 10 + 1, 17},
};

static void test_canonical(void **state)
{
    (void)state;
    json_t *j =
        json_loads("{ \"b\": [1, 2.50, 1e-5, 3.0, true, null], \"a\": {\"z\": \"q\\\"\\\\\\n/ö\","
                   " \"Z\": -0.1}, \"\": 12345678901234567 }",
            0, NULL);
    struct buf out = BUF_INIT;
    json_canonical(j, &out);
    assert_string_equal(out.data,
        "{\"\":12345678901234567,\"a\":{\"Z\":-0.1,\"z\":\"q\\\"\\\\\\u000a/"
        "ö\"},\"b\":[1,2.5,1e-05,3.0,true,null]}");
    buf_release(&out);
    json_decref(j);
}

/* The text and the hash are part of every checkpoint: they may change only with PLAN_VERSION. The
 * numbers were checked against a twin in another language. */
static void test_golden(void **state)
{
    (void)state;
    struct plan p, again;
    struct err e = {0};
    make(&small, &p);
    assert_string_equal(p.hash, "7166a7573c5b2e7387ce52e71dd211e09b2c3e25c418c046e76bf0efe940452e");
    assert_int_equal(plan_parse(p.json, strlen(p.json), "x", &again, &e), 0);
    assert_string_equal(p.json, again.json);
    assert_string_equal(p.hash, again.hash);
    assert_string_equal(p.manifest_root, again.manifest_root);
    plan_release(&again);
    /* what the pure functions give is part of the version too */
    static const uint64_t ids[] = {0x200000003d4, 0x200000001f8, 0x9e, 0x1000200000000c7,
        0x200040000000006, 0x100040000000084};
    for (uint64_t i = 0; i < sizeof ids / sizeof *ids; i++)
        assert_int_equal(plan_train_sample(&p, i * 1000).id, ids[i]);
    assert_int_equal(plan_noise_key(&p, 12345, 2), 0x5504b1561277ba50u);
    plan_release(&p);
}

static void test_feistel(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 100, 4096, 5000};
    uint8_t seen[5000];
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (uint64_t key = 0; key < 4; key++) {
            memset(seen, 0, sizeof seen);
            for (uint64_t i = 0; i < sizes[s]; i++) {
                uint64_t at = feistel(key, i, sizes[s]);
                assert_true(at < sizes[s]);
                assert_false(seen[at]);
                seen[at] = 1;
            }
        }
    assert_true(feistel(1, (1ull << 40) - 2, (1ull << 40) - 1) < (1ull << 40) - 1);
    /* neither the identity nor the same under another key: about one fixed point is expected */
    int fixed = 0, same = 0;
    for (uint64_t i = 0; i < 4096; i++) {
        fixed += feistel(1, i, 4096) == i;
        same += feistel(1, i, 4096) == feistel(2, i, 4096);
    }
    assert_true(fixed < 10 && same < 10);
}

/* In every block each source has its quota; the draws of an epoch are all its rows, each once. */
/* The z-loss counts in the cooldown, or always. */
static void test_z_loss(void **state)
{
    (void)state;
    struct fixture f = small;
    struct plan p;
    f.extra = "data.seq_len: 16\neval: {fixed_point_passes: 8}\n"
              "train: {steps: 400, batch_rows: 32, micro_rows: 4, z_loss: 1e-4}\n"
              "optim: {cooldown: 0.2}\n";
    make(&f, &p);
    for (int64_t s = 0; s < 400; s++)
        assert_true(plan_z_loss(&p, s) == (s >= 320 ? 1e-4 : 0));
    p.c.train.z_loss_late = 0;
    assert_true(plan_z_loss(&p, 0) == 1e-4 && plan_z_loss(&p, 399) == 1e-4);
    plan_release(&p);
}

static void test_order(void **state)
{
    (void)state;
    struct plan p;
    make(&small, &p);
    assert_int_equal(p.sources[0].quota, 2560);
    assert_int_equal(p.sources[1].quota, 1024);
    assert_int_equal(p.sources[2].quota, 512);
    assert_int_equal(p.sources[1].train_samples, 333);
    enum { BLOCKS = 3 };
    uint64_t draws[3] = {0};
    uint16_t *count[3];
    for (int s = 0; s < 3; s++)
        count[s] = mem_array((size_t)p.sources[s].train_samples * 64, sizeof *count[s]);
    for (uint64_t b = 0; b < BLOCKS; b++) {
        int in_block[3] = {0}, first_half[3] = {0};
        for (uint64_t i = 0; i < PLAN_BLOCK_SLOTS; i++) {
            struct sample x = plan_train_sample(&p, b * PLAN_BLOCK_SLOTS + i);
            assert_true(x.epoch < 64 && x.index < p.sources[x.source].train_samples);
            assert_int_equal(x.id, (uint64_t)x.source << 56 | x.epoch << 40 | x.index);
            count[x.source][x.epoch * p.sources[x.source].train_samples + x.index]++;
            in_block[x.source]++;
            first_half[x.source] += i < PLAN_BLOCK_SLOTS / 2;
            draws[x.source]++;
        }
        for (int s = 0; s < 3; s++) {
            assert_int_equal(in_block[s], p.sources[s].quota);
            assert_true(abs(2 * first_half[s] - in_block[s]) < 300); /* mixed, not in runs */
        }
    }
    for (int s = 0; s < 3; s++) {
        uint64_t n = p.sources[s].train_samples, i;
        for (i = 0; i < draws[s] / n * n; i++)
            assert_int_equal(count[s][i], 1); /* whole epochs */
        uint64_t rest = 0;
        for (; i < n * 64; i++) {
            assert_true(count[s][i] <= 1);
            rest += count[s][i];
        }
        assert_int_equal(rest, draws[s] % n);
        free(count[s]);
    }
    plan_release(&p);
}

/* Micro-batch m of a step goes to rank m mod W: the union over ranks is the step, whatever W. */
static void test_ranks(void **state)
{
    (void)state;
    struct plan p;
    make(&small, &p);
    int rows = p.c.train.batch_rows, micro = p.c.train.micro_rows;
    for (int64_t step = 0; step < 5; step++) {
        uint64_t whole = 0;
        for (int i = 0; i < rows; i++)
            whole += rng_mix(plan_train_sample(&p, (uint64_t)(step * rows + i)).id);
        for (int world = 1; world <= 8; world++) {
            uint64_t sum = 0;
            for (int rank = 0; rank < world; rank++)
                for (int m = rank; m < rows / micro; m += world)
                    for (int i = m * micro; i < (m + 1) * micro; i++)
                        sum += rng_mix(plan_train_sample(&p, (uint64_t)(step * rows + i)).id);
            assert_int_equal(sum, whole);
        }
    }
    plan_release(&p);
}

/* Other seeds give other orders; other epochs of one source too. */
static void test_seeds(void **state)
{
    (void)state;
    struct plan a, b;
    struct fixture other = small;
    other.extra = "data.seq_len: 16\neval: {fixed_point_passes: 8}\n"
                  "train: {steps: 400, batch_rows: 32, micro_rows: 4, seed: 8}\n";
    make(&small, &a);
    make(&other, &b);
    assert_string_not_equal(a.hash, b.hash);
    int same = 0, pass_same = 0;
    for (uint64_t i = 0; i < 1000; i++)
        same += plan_train_sample(&a, i).id == plan_train_sample(&b, i).id;
    assert_true(same < 20);
    for (int64_t i = 300; i < 400; i++)
        pass_same += plan_passes(&a, i) == plan_passes(&b, i);
    assert_true(pass_same < 100);
    plan_release(&a);
    plan_release(&b);
}

static void test_val(void **state)
{
    (void)state;
    struct plan p;
    make(&small, &p);
    uint8_t seen[3][64] = {0};
    assert_int_equal(plan_val_rows(&p), 51);
    for (uint64_t i = 0; i < 51; i++) {
        struct sample x = plan_val_sample(&p, i);
        assert_int_equal(x.epoch, PLAN_VAL_EPOCH);
        assert_true(x.index < p.sources[x.source].val_samples);
        assert_int_equal(seen[x.source][x.index]++, 0);
    }
    plan_release(&p);
}

/* Over a phase, and over any stretch of it, shares are met to within a few steps. */
static void test_passes(void **state)
{
    (void)state;
    struct fixture f = small;
    f.extra =
        "data.seq_len: 16\neval: {fixed_point_passes: 8}\n"
        "train: {steps: 10000, batch_rows: 4, passes: [{from: 0, passes: {1: 1}}, {from: 0.25, "
        "passes: {1: 0.75, 2: 0.22, 3: 0.03}}, {from: 0.75, passes: {2: 0.88, 3: 0.12}}]}\n";
    struct plan p;
    make(&f, &p);
    assert_int_equal(plan_max_passes(&p), 3);
    static const struct {
        int64_t lo, hi;
        double share[4];
    } spans[] = {
        {0, 2500, {0, 1, 0, 0}},
        {2500, 7500, {0, 0.75, 0.22, 0.03}},
        {3000, 3500, {0, 0.75, 0.22, 0.03}},
        {7500, 10000, {0, 0, 0.88, 0.12}},
        {9000, 9100, {0, 0, 0.88, 0.12}},
    };
    for (size_t i = 0; i < sizeof spans / sizeof *spans; i++) {
        int64_t n[4] = {0};
        for (int64_t s = spans[i].lo; s < spans[i].hi; s++)
            n[plan_passes(&p, s)]++;
        for (int k = 1; k <= 3; k++) {
            double want = spans[i].share[k] * (double)(spans[i].hi - spans[i].lo);
            assert_true(fabs((double)n[k] - want) <= (want > 0 && spans[i].share[k] < 1 ? 4 : 0));
        }
    }
    plan_release(&p);
}

static void test_lr(void **state)
{
    (void)state;
    static const char wsd[] = "optim: {lr: 1, min_lr: 0.1, warmup_steps: 10, cooldown: 0.2}\n",
                      cosine[] =
                          "optim: {lr: 1, min_lr: 0.1, warmup_steps: 10, schedule: cosine}\n",
                      constant[] = "optim: {lr: 1, warmup_steps: 0, schedule: constant}\n";
    static const struct {
        const char *optim;
        int64_t step;
        double lr;
    } cases[] = {
        {wsd, 0, 0.1},
        {wsd, 4, 0.5},
        {wsd, 9, 1},
        {wsd, 10, 1},
        {wsd, 79, 1},
        {wsd, 80, 1},
        {wsd, 90, 0.55},
        {wsd, 99, 0.145},
        {cosine, 9, 1},
        {cosine, 10, 1},
        {cosine, 55, 0.55},
        {cosine, 40, 0.1 + 0.45 * 1.5},
        {cosine, 70, 0.1 + 0.45 * 0.5},
        {constant, 0, 1},
        {constant, 99, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture f = small;
        struct plan p;
        char extra[400];
        snprintf(extra, sizeof extra,
            "data.seq_len: 16\neval: {fixed_point_passes: 8}\ntrain: {steps: 100}\n%s",
            cases[i].optim);
        f.extra = extra;
        make(&f, &p);
        assert_true(fabs(plan_lr(&p, cases[i].step) - cases[i].lr) < 1e-12);
        plan_release(&p);
    }
}

/* Masks: a document's first token never, then one unbroken suffix; cuts uniform; half fully fused.
 */
static void test_masks(void **state)
{
    (void)state;
    enum { S = 64, ROWS = 4000 };
    static const int starts[] = {0, 10, 11, 14, S};
    struct fixture f = small;
    f.extra = "data.seq_len: 64\n";
    struct plan p;
    make(&f, &p);
    uint8_t doc_starts[S] = {0}, mask[S], again[S];
    for (int d = 0; d < 4; d++)
        doc_starts[starts[d]] = 1;
    doc_starts[0] = 0; /* row 0 is a start whether marked or not */
    int full = 0, quarter[4] = {0}, cuts = 0, differs = 0;
    for (uint64_t id = 0; id < ROWS; id++) {
        plan_fuse_mask(&p, id, 2, doc_starts, mask);
        plan_fuse_mask(&p, id, 2, doc_starts, again);
        assert_memory_equal(mask, again, S);
        plan_fuse_mask(&p, id, 3, doc_starts, again);
        differs += memcmp(mask, again, S) != 0;
        for (int d = 0; d < 4; d++) {
            assert_int_equal(mask[starts[d]], 0);
            for (int i = starts[d] + 2; i < starts[d + 1]; i++)
                assert_true(mask[i] == 1 || (mask[i] == 0 && mask[i - 1] == 0));
        }
        int plain = 0;
        while (plain < 50 && !mask[14 + plain])
            plain++;
        full += plain == 1;
        if (plain > 1) {
            quarter[(plain - 1) * 4 / 50]++;
            cuts++;
        }
    }
    /* half of the documents, and one uniform cut in fifty */
    assert_true(abs(full - (ROWS / 2 + ROWS / 100)) < 150);
    for (int i = 0; i < 4; i++)
        assert_true(abs(quarter[i] - cuts / 4) < 100);
    assert_true(differs > ROWS * 9 / 10);
    assert_true(plan_noise_key(&p, 1, 2) != plan_noise_key(&p, 1, 3));
    assert_true(plan_noise_key(&p, 1, 2) != plan_noise_key(&p, 2, 2));
    plan_release(&p);
}

/* Quotas of random weights: whole, sum to a block, within one slot of the share. */
static void test_quotas(void **state)
{
    (void)state;
    for (uint64_t round = 0; round < 50; round++) {
        struct fixture f = small;
        double sum = 0;
        for (int s = 0; s < 3; s++)
            sum += f.weights[s] = 0.01 + rng_unit(99, round * 3 + (uint64_t)s);
        struct plan p;
        make(&f, &p);
        int total = 0;
        for (int s = 0; s < 3; s++) {
            total += p.sources[s].quota;
            assert_true(fabs(p.sources[s].quota - f.weights[s] / sum * PLAN_BLOCK_SLOTS) < 1);
        }
        assert_int_equal(total, PLAN_BLOCK_SLOTS);
        plan_release(&p);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *path, *value, *message; /* "a/b": key b of object a; value JSON */
    } cases[] = {
        {"version", "2", "plan.json: plan version 2, this build reads 4"},
        {"config", "[]", "plan.json: config: wanted an object"},
        {"config/train.steps", "0",
            "plan.json: config:1: train.steps: 0 is out of range, 1 to 1000000000000"},
        {"config/train.steps", "null",
            "plan.json: config:1: train.steps: \"null\" is not an integer"},
        {"config/optim.lr", "1",
            "plan.json: config: not the complete keys of a plan; fb-plan --json prints one"},
        {"config/run.name", "\"x\"",
            "plan.json: config: not the complete keys of a plan; fb-plan --json prints one"},
        {"tokenizer/sha256", "\"00\"",
            "plan.json: tokenizer: sha256: 64 lower-case hex digits expected"},
        {"tokenizer/vocab", "-1", "plan.json: tokenizer: vocab: -1, 0 to 16777216 expected"},
        {"tokenizer/vocab", "0", "plan.json: model.vocab: 0 is out of range, 1 to 16777216"},
        {"sources", "[]", "plan.json: sources: 0 entries, data.sources has 3"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *j = fixture_json(&small), *at = j;
        const char *slash = strchr(cases[i].path, '/'), *key = cases[i].path;
        if (slash) {
            char head[32];
            snprintf(head, sizeof head, "%.*s", (int)(slash - cases[i].path), cases[i].path);
            at = json_object_get(j, head);
            key = slash + 1;
        }
        json_object_set_new(at, key, json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
        struct plan p;
        struct err e = {0};
        assert_true(try_plan(j, &p, &e) < 0);
        assert_string_equal(e.msg, cases[i].message);
        json_decref(j);
    }
    static const struct {
        struct fixture f;
        const char *message;
    } data[] = {
        {{"", 1, {1}, {256}, {600}},
            "plan.json: source s0: 256 training tokens do not fill one row of 256"},
        {{"", 2, {1, 1e-6}, {1000, 1000}, {600, 600}},
            "plan.json: source s1: weight 1e-06 of 1 is less than one slot of 4096; raise it"},
        {{"", 1, {1}, {257}, {256}}, "plan.json: no source has a validation row of 256 tokens; "
                                     "ingest with a validation share, "
                                     "or set eval.every_steps: 0"},
        {{"train: {steps: 100000}\n", 1, {1}, {257}, {257}},
            "plan.json: source s0: its 1 rows would be repeated more than 65534 times"},
    };
    for (size_t i = 0; i < sizeof data / sizeof *data; i++) {
        json_t *j = fixture_json(&data[i].f);
        struct plan p;
        struct err e = {0};
        assert_true(try_plan(j, &p, &e) < 0);
        assert_string_equal(e.msg, data[i].message);
        json_decref(j);
    }
}

/* -- plan_make, from files -- */

static void write_manifest(const char *dir, const char *tokenizer_sha256)
{
    struct err e = {0};
    struct manifest_shard train = {.file = "train-0",
                              .bytes = 8192,
                              .last_pgno = 1,
                              .tokens = 5001,
                              .documents = 9,
                              .blocks = 1,
                              .hash = SHA,
                              .sha256 = SHA},
                          val = train;
    strcpy(val.file, "val-0");
    val.tokens = 600;
    char name[] = "a";
    struct manifest m = {.name = name,
        .vocab = 300,
        .eot = 299,
        .block_tokens = 32768,
        .fingerprint = SHA,
        .splits = {{&train, 1, 0, 0, 20000}, {&val, 1, 0, 0, 3000}}};
    memcpy(m.tokenizer_sha256, tokenizer_sha256, SHA256_HEX);
    assert_int_equal(fs_mkdir_p(dir, 0700, &e), 0);
    assert_int_equal(manifest_write(dir, &m, &e), 0);
}

static void test_make(void **state)
{
    (void)state;
    char *dir = temp_dir_make(), sha[SHA256_HEX];
    char *tok = mem_printf("%s/t.json", dir), *src = mem_printf("%s/a", dir);
    char *yaml = mem_printf("data: {tokenizer: %s, sources: [{name: a, path: %s}]}\n", tok, src);
    char *path = mem_printf("%s/plan.json", dir), *want;
    struct config c;
    struct plan p, back;
    struct err e = {0};
    assert_int_equal(fs_write_atomic(tok, "{}", 2, &e), 0);
    assert_int_equal(hash_sha256_file(tok, sha, NULL, &e), 0);
    write_manifest(src, sha);
    assert_int_equal(config_parse(yaml, strlen(yaml), "c", NULL, 0, &c, &e), 0);
    int rc = plan_make(&c, &p, &e);
    if (rc < 0)
        print_error("%s\n", e.msg);
    assert_int_equal(rc, 0);
    assert_int_equal(p.c.model.vocab, 300);
    assert_string_equal(p.tokenizer_sha256, sha);
    assert_int_equal(p.sources[0].train_samples, 19); /* (5001 − 1) / 256 */
    assert_int_equal(p.sources[0].quota, PLAN_BLOCK_SLOTS);
    assert_int_equal(fs_write_atomic(path, p.json, strlen(p.json), &e), 0);
    assert_int_equal(plan_load(path, &back, &e), 0);
    assert_string_equal(p.hash, back.hash);
    assert_int_equal(back.c.model.vocab, 300);
    plan_release(&back);
    plan_release(&p);

    write_manifest(src, SHA);
    assert_int_equal(plan_make(&c, &p, &e), ERR_MISMATCH);
    want = mem_printf(
        "source a: made with tokenizer %s, data.tokenizer is %s; ingest it again", SHA, sha);
    assert_string_equal(e.msg, want);
    assert_int_equal(fs_remove_tree(src, &e), 0);
    assert_int_equal(plan_make(&c, &p, &e), ERR_IO);
    config_release(&c);
    temp_dir_remove(&dir);
    free(want);
    free(path);
    free(yaml);
    free(src);
    free(tok);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_canonical),
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_feistel),
        cmocka_unit_test(test_z_loss),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_val),
        cmocka_unit_test(test_passes),
        cmocka_unit_test(test_lr),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_quotas),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_make),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
