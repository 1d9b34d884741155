#include "scheduler/commits.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/check.h"
#include "common/field.h"
#include "common/fs.h"
#include "common/json_file.h"

#define MAX_FILES_A_RANK    64
#define MAX_TOKENIZER_BYTES (256u << 20)
#define MAX_STATE_BYTES     (16u << 20)

/* The scheduler's own files of a checkpoint; a trainer's list must not name them. */
static const char *const own_files[] = {"config.json", "tokenizer.json", "state.json"};

static int is_own(const char *name)
{
    for (size_t i = 0; i < sizeof own_files / sizeof *own_files; i++)
        if (strcmp(name, own_files[i]) == 0)
            return 1;
    return 0;
}

/* -- SAVED -- */

static int parse_file(const json_t *j, struct checkpoint_file *out, struct err *e)
{
    const char *name = "";
    int64_t bytes = 0;
    int rc = field_text(j, "name", sizeof out->name - 1, &name, e);
    if (rc == 0)
        rc = field_sha256(j, "sha256", out->sha256, e);
    if (rc == 0)
        rc = field_int(j, "bytes", 0, INT64_MAX, &bytes, e);
    if (rc < 0)
        return rc;
    if (strchr(name, '/') || name[0] == '.' || is_own(name))
        return err_set(e, ERR_INPUT, "name: \"%s\" is not a name for a trainer's file", name);
    snprintf(out->name, sizeof out->name, "%s", name);
    out->bytes = (uint64_t)bytes;
    return 0;
}

int saved_parse(const json_t *j, const struct plan *p, struct saved_report *out, struct err *e)
{
    memset(out, 0, sizeof *out);
    int rc = field_int(j, "step", 1, p->c.train.steps, &out->step, e);
    if (rc < 0)
        return rc;
    if (json_object_get(j, "error"))
        return field_text(j, "error", 4096, &out->error, e);
    const json_t *files = json_object_get(j, "files");
    size_t n = json_array_size(files);
    if (n == 0 || n > MAX_FILES_A_RANK)
        return err_set(e, ERR_INPUT, "files: a list of 1 to %d expected", MAX_FILES_A_RANK);
    if ((rc = field_amount(j, "stall_seconds", &out->stall_seconds, e)) < 0 ||
        (rc = field_amount(j, "write_seconds", &out->write_seconds, e)) < 0)
        return rc;
    out->files = mem_array(n, sizeof *out->files);
    out->count = (int)n;
    for (size_t i = 0; rc == 0 && i < n; i++)
        if ((rc = parse_file(json_array_get(files, i), &out->files[i], e)) < 0)
            err_prefix(e, "files[%zu]", i);
    if (rc < 0)
        saved_release(out);
    return rc;
}

void saved_release(struct saved_report *r)
{
    free(r->files);
    memset(r, 0, sizeof *r);
}

/* -- checkpoints on their way -- */

struct pending *commits_find(const struct commits *c, int64_t step)
{
    for (int i = 0; i < c->count; i++)
        if (c->list[i].step == step)
            return &c->list[i];
    return NULL;
}

void commits_expect(struct commits *c, int64_t step, int world)
{
    CHECK(world > 0);
    if (commits_find(c, step))
        return;
    c->list = mem_grow_array(c->list, (size_t)c->count + 1, sizeof *c->list);
    c->list[c->count++] =
        (struct pending){.step = step, .world = world, .answered = mem_array((size_t)world, 1)};
}

void commits_forget(struct commits *c, struct pending *p)
{
    free(p->answered);
    free(p->files);
    *p = c->list[--c->count];
}

void commits_forget_all(struct commits *c)
{
    while (c->count)
        commits_forget(c, &c->list[c->count - 1]);
}

void commits_cursor(struct commits *c, const struct cursor *cursor)
{
    struct pending *p = commits_find(c, cursor->step);
    if (p) {
        p->cursor = *cursor;
        p->has_cursor = 1;
    }
}

int commits_saved(struct pending *p, int rank, const struct saved_report *r)
{
    CHECK(rank >= 0 && rank < p->world);
    if (p->answered[rank])
        return 0;
    p->answered[rank] = 1;
    p->answers++;
    if (r->error && !p->error[0])
        snprintf(p->error, sizeof p->error, "rank %d: %s", rank, r->error);
    p->files = mem_grow_array(p->files, (size_t)(p->count + r->count) + 1, sizeof *p->files);
    for (int i = 0; i < r->count; i++)
        p->files[p->count++] = r->files[i];
    return 1;
}

int pending_complete(const struct pending *p)
{
    return p->answers == p->world && p->has_cursor;
}

/* -- committing -- */

static int write_json(const char *dir, const char *name, json_t *j, struct err *e)
{
    char *text = j ? json_dumps(j, JSON_INDENT(1) | JSON_SORT_KEYS) : NULL;
    char *path = mem_printf("%s/%s", dir, name);
    int rc = text ? fs_write_atomic(path, text, strlen(text), e)
                  : err_set(e, ERR_INPUT, "%s: a value is not JSON", path);
    free(path);
    free(text);
    json_decref(j);
    return rc;
}

static int write_tokenizer(const struct commits *c, const char *dir, struct err *e)
{
    char *path = mem_printf("%s/tokenizer.json", dir);
    int rc = fs_write_atomic(path, c->tokenizer.data, c->tokenizer.len, e);
    free(path);
    return rc;
}

/* What an earlier try or another world size left in the directory must not be committed with it. */
static int remove_strangers(const struct pending *p, const char *dir, struct err *e)
{
    DIR *d = opendir(dir);
    if (!d)
        return err_errno(e, "%s", dir);
    int rc = 0;
    for (struct dirent *entry; rc == 0 && (entry = readdir(d));) {
        int known = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
        for (int i = 0; !known && i < p->count; i++)
            known = strcmp(entry->d_name, p->files[i].name) == 0;
        if (known)
            continue;
        char *path = mem_printf("%s/%s", dir, entry->d_name);
        rc = fs_remove_tree(path, e);
        free(path);
    }
    closedir(d);
    return rc;
}

static int write_own(const struct commits *c, const struct pending *p, const char *dir,
    uint32_t run_epoch, struct err *e)
{
    const struct plan *plan = &c->run->plan;
    json_t *state = json_pack("{s:I, s:o, s:I, s:i, s:s}", "step", (json_int_t)p->step, "cursor",
        cursor_to_json(&p->cursor, plan), "run_epoch", (json_int_t)run_epoch, "world", p->world,
        "plan_hash", plan->hash);
    int rc = write_json(dir, "state.json", state, e);
    if (rc == 0)
        rc = write_json(dir, "config.json", model_config_to_json(&plan->c.model), e);
    return rc == 0 ? write_tokenizer(c, dir, e) : rc;
}

static int put_in_journal(const struct commits *c, int64_t step, const struct cursor *cursor,
    uint32_t run_epoch, const char *sha, struct err *e)
{
    return journal_put_commit(c->journal, step,
        json_pack("{s:I, s:I, s:s, s:I, s:o}", "step", (json_int_t)step, "run_epoch",
            (json_int_t)run_epoch, "manifest_sha256", sha, "time", (json_int_t)time(NULL), "cursor",
            cursor_to_json(cursor, &c->run->plan)),
        e);
}

/* A manifest that the run goes on without must not stand: it would be a commit. */
static void take_back(const char *dir)
{
    char *manifest = mem_printf("%s/MANIFEST.json", dir);
    unlink(manifest);
    free(manifest);
}

int commits_commit(struct commits *c, struct pending *p, uint32_t run_epoch, struct err *e)
{
    char name[32], sha[SHA256_HEX];
    CHECK(pending_complete(p) && !p->error[0]);
    CHECK(p->cursor.step == p->step);
    checkpoint_name(p->step, name);
    char *dir = mem_printf("%s/%s", c->root, name);
    int rc = remove_strangers(p, dir, e);
    if (rc == 0)
        rc = write_own(c, p, dir, run_epoch, e);
    if (rc == 0)
        rc = checkpoint_commit(dir, p->step, c->run->plan.hash, run_epoch, p->files, p->count, e);
    if (rc == 0)
        rc = checkpoint_verify(dir, 0, sha, NULL, e);
    if (rc == 0)
        rc = put_in_journal(c, p->step, &p->cursor, run_epoch, sha, e);
    if (rc < 0)
        take_back(dir);
    free(dir);
    if (rc < 0)
        return rc;
    c->last = p->step;
    c->cursor = p->cursor;
    c->run_epoch = run_epoch;
    memcpy(c->manifest_sha256, sha, sizeof sha);
    commits_forget(c, p);
    return 0;
}

int commits_retain(struct commits *c, const int64_t *pinned, int pinned_count, struct err *e)
{
    const struct config *config = &c->run->config;
    return checkpoint_retain(c->root, config->checkpoint.keep_last, config->checkpoint.keep_every,
        pinned, pinned_count, e);
}

/* -- where the run stands -- */

static int ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

/* step-X.tmp, and step-X without a manifest. */
static int is_uncommitted(const char *root, const char *name)
{
    if (strncmp(name, "step-", 5) != 0)
        return 0;
    if (ends_with(name, ".tmp"))
        return 1;
    char *manifest = mem_printf("%s/%s/MANIFEST.json", root, name);
    int yes = checkpoint_step(name) >= 0 && !fs_exists(manifest);
    free(manifest);
    return yes;
}

static int remove_uncommitted(const char *root, struct err *e)
{
    DIR *d = opendir(root);
    if (!d)
        return err_errno(e, "%s", root);
    int rc = 0;
    for (struct dirent *entry; rc == 0 && (entry = readdir(d));) {
        if (!is_uncommitted(root, entry->d_name))
            continue;
        char *path = mem_printf("%s/%s", root, entry->d_name);
        rc = fs_remove_tree(path, e);
        free(path);
    }
    closedir(d);
    return rc;
}

/* Checkpoints beyond the chosen one are damaged; they make room for the new ones of their step. */
static int move_aside(const char *root, int64_t chosen, struct err *e)
{
    int64_t *steps;
    int n = checkpoint_list(root, &steps, e), rc = n < 0 ? n : 0;
    for (int i = 0; rc == 0 && i < n; i++) {
        if (steps[i] <= chosen)
            continue;
        char name[32];
        checkpoint_name(steps[i], name);
        char *from = mem_printf("%s/%s", root, name), *to = mem_printf("%s/damaged-%s", root, name);
        rc = fs_remove_tree(to, e);
        if (rc == 0)
            rc = fs_rename_durable(from, to, e);
        free(to);
        free(from);
    }
    free(steps);
    return rc;
}

static int read_state(struct commits *c, const char *dir, struct err *e)
{
    char *path = mem_printf("%s/state.json", dir);
    int64_t step = -1, epoch = 0;
    json_t *j;
    int rc = json_file_read(path, MAX_STATE_BYTES, &j, NULL, e);
    if (rc < 0)
        goto out;
    rc = field_int(j, "step", 0, INT64_MAX, &step, e);
    if (rc == 0)
        rc = field_int(j, "run_epoch", 0, UINT32_MAX, &epoch, e);
    if (rc == 0)
        rc = cursor_from_json(json_object_get(j, "cursor"), &c->run->plan, &c->cursor, e);
    if (rc == 0 && (step != c->last || c->cursor.step != c->last))
        rc = err_set(e, ERR_MISMATCH, "step %lld and a cursor behind %lld steps, %lld expected",
            (long long)step, (long long)c->cursor.step, (long long)c->last);
    if (rc < 0)
        err_prefix(e, "%s", path);
    c->run_epoch = (uint32_t)epoch;
out:
    json_decref(j);
    free(path);
    return rc;
}

/* The manifest is the commit: where the journal says otherwise it is the journal that learns. */
static int agree(struct commits *c, struct err *e)
{
    struct err mine = {0};
    json_t *known = journal_commit(c->journal, c->last, &mine);
    const char *sha = json_string_value(json_object_get(known, "manifest_sha256"));
    int same = sha && strcmp(sha, c->manifest_sha256) == 0;
    json_decref(known);
    int rc = journal_drop_commits_after(c->journal, c->last, e);
    if (rc == 0 && !same)
        rc = put_in_journal(c, c->last, &c->cursor, c->run_epoch, c->manifest_sha256, e);
    return rc;
}

static int take_newest(struct commits *c, struct buf *damaged, struct err *e)
{
    int64_t step;
    int rc = checkpoint_newest(c->root, &step, damaged, e);
    if (rc == 0)
        rc = move_aside(c->root, step, e);
    if (rc < 0)
        return rc;
    if (step < 0) {
        cursor_start(&c->cursor, &c->run->plan);
        return journal_drop_commits_after(c->journal, -1, e);
    }
    char name[32];
    checkpoint_name(step, name);
    char *dir = mem_printf("%s/%s", c->root, name);
    c->last = step;
    rc = checkpoint_verify(dir, 0, c->manifest_sha256, NULL, e);
    if (rc == 0)
        rc = read_state(c, dir, e);
    free(dir);
    return rc == 0 ? agree(c, e) : rc;
}

static int read_tokenizer(struct commits *c, struct err *e)
{
    const struct plan *p = &c->run->plan;
    char sha[SHA256_HEX];
    int rc = fs_read(p->c.data.tokenizer, MAX_TOKENIZER_BYTES, &c->tokenizer, e);
    if (rc < 0)
        return err_prefix(e, "tokenizer");
    hash_sha256_hex(c->tokenizer.data, c->tokenizer.len, sha);
    if (strcmp(sha, p->tokenizer_sha256) == 0)
        return 0;
    return err_set(e, ERR_MISMATCH, "tokenizer: %s has SHA-256 %s, the plan was made with %s",
        p->c.data.tokenizer, sha, p->tokenizer_sha256);
}

int commits_open(struct commits *c, const struct rundir *run, struct journal *journal,
    struct buf *damaged, struct err *e)
{
    *c = (struct commits){.run = run, .journal = journal};
    c->root = rundir_path(run, "checkpoints");
    int rc = read_tokenizer(c, e);
    if (rc == 0)
        rc = fs_mkdir_p(c->root, 0755, e);
    if (rc == 0)
        rc = remove_uncommitted(c->root, e);
    if (rc == 0)
        rc = take_newest(c, damaged, e);
    if (rc < 0)
        commits_release(c);
    return rc;
}

void commits_release(struct commits *c)
{
    commits_forget_all(c);
    buf_release(&c->tokenizer);
    free(c->list);
    free(c->root);
    memset(c, 0, sizeof *c);
}
