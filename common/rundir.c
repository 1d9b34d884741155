#include "common/rundir.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/json_canonical.h"
#include "common/process.h"

#define RUN_YAML           "run.yaml"
#define PLAN_JSON          "plan.json"
#define RUN_YAML_MAX_BYTES (1u << 20)
#define DIFFERENCES_SHOWN  3

/* Sockets and keys are the owner's alone. */
static const struct {
    const char *name;
    mode_t mode;
} parts[] = {{"journal", 0755}, {"logs", 0755}, {"sock", 0700}, {"keys", 0700}, {"evals", 0755},
    {"checkpoints", 0755}};

/* The trainers share the cores. */
static int threads_each(int trainers)
{
    int each = process_cores() / trainers;
    return each > 0 ? each : 1;
}

/* The config as the run keeps it: absolute paths, thread counts as numbers. */
static int write_yaml(const char *dir, const char *parent, const struct config *c,
    const struct plan *p, struct err *e)
{
    struct config resolved = *c; /* borrows c's and p's strings */
    char *parent_copy = mem_strdup(parent), *path = mem_printf("%s/" RUN_YAML, dir);
    struct buf text = BUF_INIT;
    resolved.run.dir = parent_copy;
    resolved.data = p->c.data;
    if (!resolved.process.trainer_threads)
        resolved.process.trainer_threads = threads_each(resolved.process.trainers);
    if (!resolved.process.evaluator_threads)
        resolved.process.evaluator_threads = process_cores();
    config_print(&resolved, &text);
    int rc = fs_write_atomic(path, text.data, text.len, e);
    buf_release(&text);
    free(path);
    free(parent_copy);
    return rc;
}

static int write_plan(const char *dir, const struct plan *p, struct err *e)
{
    char *path = mem_printf("%s/" PLAN_JSON, dir);
    int rc = fs_write_atomic(path, p->json, strlen(p->json), e);
    free(path);
    return rc;
}

static int make_parts(const char *dir, struct err *e)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < sizeof parts / sizeof *parts; i++) {
        char *path = mem_printf("%s/%s", dir, parts[i].name);
        rc = fs_mkdir_p(path, parts[i].mode, e);
        if (rc == 0 && chmod(path, parts[i].mode) < 0) /* whatever the umask */
            rc = err_errno(e, "chmod %s", path);
        free(path);
    }
    return rc;
}

/* Builds the directory under a temporary name and renames it, so that it is there whole or not at
 * all. */
static int build(const char *path, const char *parent, const struct config *c, const struct plan *p,
    struct err *e)
{
    char *tmp = mem_printf("%s/.%s.tmp.%d", parent, c->run.name, (int)getpid());
    int rc = fs_remove_tree(tmp, e);
    if (rc == 0)
        rc = fs_mkdir_p(tmp, 0755, e);
    if (rc == 0)
        rc = make_parts(tmp, e);
    if (rc == 0)
        rc = write_yaml(tmp, parent, c, p, e);
    if (rc == 0)
        rc = write_plan(tmp, p, e);
    if (rc == 0)
        rc = fs_rename_durable(tmp, path, e);
    if (rc < 0)
        fs_remove_tree(tmp, NULL);
    free(tmp);
    /* Another launch was quicker: its directory is as good as ours, or refused by what is in it. */
    return rc < 0 && fs_exists(path) ? 0 : rc;
}

/* Adds " (train.steps: 100 there, 200 here; …)" for keys that differ between two plans, a few of
 * them. */
static void name_differences(const char *theirs, const char *ours, struct buf *out)
{
    json_t *a = json_loads(theirs, 0, NULL), *b = json_loads(ours, 0, NULL), *value;
    const json_t *there = json_object_get(a, "config");
    const char *key;
    int count = 0;
    json_object_foreach (json_object_get(b, "config"), key, value) {
        const json_t *other = json_object_get(there, key);
        if (json_equal(other, value) || ++count > DIFFERENCES_SHOWN)
            continue;
        char *x = other ? json_dumps(other, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
        char *y = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        buf_printf(out, "%s%s: %.60s there, %.60s here", count == 1 ? " (" : "; ", key,
            x ? x : "nothing", y ? y : "nothing");
        free(x);
        free(y);
    }
    if (count > 0)
        buf_add_str(out, count > DIFFERENCES_SHOWN ? "; and more)" : ")");
    json_decref(a);
    json_decref(b);
}

/* An existing directory may be resumed only as the run that it is. */
static int open_same(const char *path, const struct plan *p, struct rundir *out, struct err *e)
{
    int rc = rundir_open(path, out, e);
    if (rc < 0 || strcmp(out->plan.hash, p->hash) == 0)
        return rc;
    struct buf what = BUF_INIT;
    name_differences(out->plan.json, p->json, &what);
    rc = err_set(e, ERR_STATE,
        "%s: holds a run of plan %s, this config makes plan %s%s; choose another run.name", path,
        out->plan.hash, p->hash, what.len ? what.data : "");
    buf_release(&what);
    rundir_release(out);
    return rc;
}

int rundir_create(const struct config *c, struct rundir *out, int *existed, struct err *e)
{
    struct plan p;
    *out = (struct rundir){0};
    *existed = 0;
    int rc = plan_make(c, &p, e);
    if (rc < 0)
        return rc;
    char *parent = NULL, *path = NULL;
    rc = fs_mkdir_p(c->run.dir, 0755, e);
    if (rc == 0 && !(parent = realpath(c->run.dir, NULL)))
        rc = err_errno(e, "run.dir %s", c->run.dir);
    if (rc < 0)
        goto out;
    path = mem_printf("%s/%s", parent, c->run.name);
    *existed = fs_exists(path);
    if (*existed) {
        rc = open_same(path, &p, out, e);
    } else {
        rc = build(path, parent, c, &p, e);
        if (rc == 0)
            rc = open_same(path, &p, out, e);
    }
out:
    free(path);
    free(parent);
    plan_release(&p);
    return rc;
}

/* run.yaml may be edited where it does not change the plan (threads, retention); the rest must
 * agree. */
static int check_same(const struct rundir *r, struct err *e)
{
    json_t *yaml = config_plan_json(&r->config), *plan = config_plan_json(&r->plan.c), *value;
    const char *key;
    int rc = 0;
    json_object_foreach (yaml, key, value) {
        struct buf a = BUF_INIT, b = BUF_INIT;
        json_canonical(value, &a);
        json_canonical(json_object_get(plan, key), &b);
        if (rc == 0 && strcmp(a.data, b.data) != 0)
            rc = err_set(e, ERR_MISMATCH,
                "%s/" RUN_YAML ": %s: %.200s, but " PLAN_JSON
                " says %.200s; it is fixed once the run "
                "exists",
                r->path, key, a.data, b.data);
        buf_release(&a);
        buf_release(&b);
    }
    json_decref(yaml);
    json_decref(plan);
    return rc;
}

static int read_both(struct rundir *r, struct err *e)
{
    char *yaml = rundir_path(r, RUN_YAML), *plan = rundir_path(r, PLAN_JSON);
    struct buf text = BUF_INIT;
    int rc = 0;
    if (!fs_exists(plan))
        rc = err_set(e, ERR_STATE, "%s: not a run directory, it has no " PLAN_JSON, r->path);
    if (rc == 0)
        rc = plan_load(plan, &r->plan, e);
    if (rc == 0)
        rc = fs_read(yaml, RUN_YAML_MAX_BYTES, &text, e);
    if (rc == 0)
        rc = config_parse(text.data, text.len, yaml, NULL, 0, &r->config, e);
    if (rc == 0)
        rc = check_same(r, e);
    if (rc == 0)
        r->config.model.vocab = r->plan.c.model.vocab;
    buf_release(&text);
    free(yaml);
    free(plan);
    return rc;
}

int rundir_open(const char *path, struct rundir *out, struct err *e)
{
    *out = (struct rundir){.path = realpath(path, NULL)};
    if (!out->path)
        return err_errno(e, "%s", path);
    int rc = read_both(out, e);
    if (rc < 0)
        rundir_release(out);
    return rc;
}

void rundir_release(struct rundir *r)
{
    config_release(&r->config);
    plan_release(&r->plan);
    free(r->path);
    *r = (struct rundir){0};
}

char *rundir_path(const struct rundir *r, const char *fmt, ...)
{
    va_list ap;
    char *part = NULL;
    va_start(ap, fmt);
    int n = vasprintf(&part, fmt, ap);
    va_end(ap);
    char *path = mem_printf("%s/%s", r->path, n < 0 ? "" : part);
    free(part);
    return path;
}
