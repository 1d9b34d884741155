#include "common/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/json_file.h"

#define MANIFEST           "MANIFEST.json"
#define MANIFEST_VERSION   1
#define MANIFEST_MAX_BYTES (16u << 20)
#define MAX_FILES          65536

/* -- names -- */

void checkpoint_name(int64_t step, char out[32])
{
    snprintf(out, 32, "step-%08lld", (long long)step);
}

int64_t checkpoint_step(const char *name)
{
    if (strncmp(name, "step-", 5) != 0)
        return -1;
    const char *digits = name + 5;
    size_t n = strspn(digits, "0123456789");
    if (n < 8 || n > 18 || digits[n])
        return -1;
    int64_t step = strtoll(digits, NULL, 10);
    char canonical[32];
    checkpoint_name(step, canonical);
    return strcmp(canonical, name) == 0 ? step : -1;
}

/* A file's name as a manifest may hold it: it must not lead out of the directory. */
static int name_is_good(const char *name)
{
    size_t n = strlen(name);
    return n > 0 && n < sizeof((struct checkpoint_file *)0)->name && !strchr(name, '/') &&
           name[0] != '.' && strcmp(name, MANIFEST) != 0;
}

/* What fs_write_atomic leaves behind when it is killed. */
static int is_manifest_rest(const char *name)
{
    return strncmp(name, MANIFEST ".tmp.", sizeof MANIFEST ".tmp." - 1) == 0;
}

static int is_committed(const char *root, const char *name)
{
    char *path = mem_printf("%s/%s/" MANIFEST, root, name);
    int yes = fs_exists(path);
    free(path);
    return yes;
}

/* -- committing -- */

struct file_list {
    struct checkpoint_file *files;
    int count;
};

static struct checkpoint_file *list_find(const struct file_list *l, const char *name)
{
    for (int i = 0; i < l->count; i++)
        if (strcmp(l->files[i].name, name) == 0)
            return &l->files[i];
    return NULL;
}

static struct checkpoint_file *list_add(struct file_list *l)
{
    l->files = mem_grow_array(l->files, (size_t)l->count + 1, sizeof *l->files);
    memset(&l->files[l->count], 0, sizeof *l->files);
    return &l->files[l->count++];
}

static int by_name(const void *a, const void *b)
{
    return strcmp(
        ((const struct checkpoint_file *)a)->name, ((const struct checkpoint_file *)b)->name);
}

static int fsync_file(const char *path, struct err *e)
{
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, "%s", path);
    int rc = fsync(fd) < 0 ? err_errno(e, "%s: fsync", path) : 0;
    close(fd);
    return rc;
}

static int check_size(const char *dir, const struct checkpoint_file *f, struct err *e)
{
    char *path = mem_printf("%s/%s", dir, f->name);
    struct stat st;
    int rc = 0;
    if (lstat(path, &st) < 0)
        rc = err_errno(e, "%s", path);
    else if (!S_ISREG(st.st_mode))
        rc = err_set(e, ERR_CORRUPT, "%s: not a regular file", path);
    else if ((uint64_t)st.st_size != f->bytes)
        rc = err_set(e, ERR_CORRUPT, "%s: %llu bytes, %llu expected", path,
            (unsigned long long)st.st_size, (unsigned long long)f->bytes);
    free(path);
    return rc;
}

/* Adds `name` with its size and hash to the list unless it is there. */
static int take_file(const char *dir, const char *name, struct file_list *l, struct err *e)
{
    if (list_find(l, name) || strcmp(name, MANIFEST) == 0 || is_manifest_rest(name))
        return 0;
    if (!name_is_good(name))
        return err_set(e, ERR_INPUT,
            "%s/%s: not a name a checkpoint can hold (1 to 63 characters, no leading dot)", dir,
            name);
    char *path = mem_printf("%s/%s", dir, name);
    struct stat st;
    int rc = 0;
    if (lstat(path, &st) < 0)
        rc = err_errno(e, "%s", path);
    else if (!S_ISREG(st.st_mode))
        rc = err_set(e, ERR_INPUT, "%s: a checkpoint holds regular files only", path);
    if (rc == 0) {
        struct checkpoint_file *f = list_add(l);
        snprintf(f->name, sizeof f->name, "%.63s", name);
        rc = hash_sha256_file(path, f->sha256, &f->bytes, e);
    }
    if (rc == 0)
        rc = fsync_file(path, e);
    free(path);
    return rc;
}

static int take_rest(const char *dir, struct file_list *l, struct err *e)
{
    DIR *d = opendir(dir);
    if (!d)
        return err_errno(e, "%s", dir);
    int rc = 0;
    for (struct dirent *entry; rc == 0 && (entry = readdir(d));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            rc = take_file(dir, entry->d_name, l, e);
    closedir(d);
    return rc;
}

static int write_manifest(const char *dir, int64_t step, const char *plan_hash, uint32_t run_epoch,
    const struct file_list *l, struct err *e)
{
    json_t *files = json_array();
    for (int i = 0; i < l->count; i++)
        json_array_append_new(
            files, json_pack("{s:s, s:I, s:s}", "name", l->files[i].name, "bytes",
                       (json_int_t)l->files[i].bytes, "sha256", l->files[i].sha256));
    json_t *j = json_pack("{s:i, s:I, s:s, s:I, s:o}", "version", MANIFEST_VERSION, "step",
        (json_int_t)step, "plan_hash", plan_hash, "run_epoch", (json_int_t)run_epoch, "files",
        files);
    char *text = j ? json_dumps(j, JSON_INDENT(1)) : NULL;
    json_decref(j);
    if (!text)
        return err_set(e, ERR_INPUT, "%s/" MANIFEST ": a name or the plan hash is not UTF-8", dir);
    char *path = mem_printf("%s/" MANIFEST, dir);
    int rc = fs_write_atomic(path, text, strlen(text), e);
    free(path);
    free(text);
    return rc;
}

int checkpoint_commit(const char *dir, int64_t step, const char *plan_hash, uint32_t run_epoch,
    const struct checkpoint_file *files, int count, struct err *e)
{
    struct file_list l = {NULL, 0};
    int rc = 0;
    for (int i = 0; rc == 0 && i < count; i++) {
        if (!memchr(files[i].name, 0, sizeof files[i].name) || !name_is_good(files[i].name))
            rc = err_set(e, ERR_INPUT, "%s: \"%.63s\" is not a name a checkpoint can hold", dir,
                files[i].name);
        else if (list_find(&l, files[i].name))
            rc = err_set(e, ERR_INPUT, "%s: %s is listed twice", dir, files[i].name);
        else
            *list_add(&l) = files[i];
    }
    for (int i = 0; rc == 0 && i < l.count; i++)
        rc = check_size(dir, &l.files[i], e);
    if (rc == 0)
        rc = take_rest(dir, &l, e);
    if (rc == 0 && l.count == 0)
        rc = err_set(e, ERR_INPUT, "%s: no file to commit", dir);
    if (rc == 0) {
        qsort(l.files, (size_t)l.count, sizeof *l.files, by_name);
        /* The names, the directory's own too, are durable before the manifest vouches for them. */
        rc = fs_fsync_dir(dir, e);
    }
    if (rc == 0) {
        char *parent = fs_dirname(dir);
        rc = fs_fsync_dir(parent, e);
        free(parent);
    }
    if (rc == 0)
        rc = write_manifest(dir, step, plan_hash, run_epoch, &l, e);
    free(l.files);
    return rc;
}

/* -- verifying -- */

static int parse_file(const json_t *j, int index, struct file_list *l, struct err *e)
{
    const char *name = json_string_value(json_object_get(j, "name"));
    const char *sha = json_string_value(json_object_get(j, "sha256"));
    json_t *bytes = json_object_get(j, "bytes");
    if (!name || !name_is_good(name) || !hash_is_sha256(sha) || !json_is_integer(bytes) ||
        json_integer_value(bytes) < 0)
        return err_set(e, ERR_CORRUPT, "files[%d]: {name, bytes, sha256} expected", index);
    if (list_find(l, name))
        return err_set(e, ERR_CORRUPT, "files[%d]: %s is listed twice", index, name);
    struct checkpoint_file *f = list_add(l);
    snprintf(f->name, sizeof f->name, "%.63s", name);
    snprintf(f->sha256, sizeof f->sha256, "%s", sha);
    f->bytes = (uint64_t)json_integer_value(bytes);
    return 0;
}

static int parse_manifest(
    const json_t *j, const char *dir, int64_t *step, struct file_list *l, struct err *e)
{
    json_t *version = json_object_get(j, "version"), *s = json_object_get(j, "step"),
           *files = json_object_get(j, "files");
    if (!json_is_integer(version) || json_integer_value(version) != MANIFEST_VERSION)
        return err_set(e, ERR_MISMATCH, "version %lld, this program reads %d",
            (long long)json_integer_value(version), MANIFEST_VERSION);
    if (!json_is_integer(s) || json_integer_value(s) < 0)
        return err_set(e, ERR_CORRUPT, "step: a number ≥ 0 expected");
    const char *base = strrchr(dir, '/') ? strrchr(dir, '/') + 1 : dir;
    int64_t named = checkpoint_step(base);
    *step = json_integer_value(s);
    if (named >= 0 && named != *step)
        return err_set(
            e, ERR_CORRUPT, "step %lld, but the directory is %s", (long long)*step, base);
    if (!json_is_array(files) || json_array_size(files) == 0 || json_array_size(files) > MAX_FILES)
        return err_set(e, ERR_CORRUPT, "files: a list of 1 to %d expected", MAX_FILES);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < json_array_size(files); i++)
        rc = parse_file(json_array_get(files, i), (int)i, l, e);
    return rc;
}

static int read_manifest(
    const char *dir, char sha256[SHA256_HEX], int64_t *step, struct file_list *l, struct err *e)
{
    char *path = mem_printf("%s/" MANIFEST, dir);
    json_t *j;
    int rc = json_file_read(path, MANIFEST_MAX_BYTES, &j, sha256, e);
    if (rc == 0 && (rc = parse_manifest(j, dir, step, l, e)) < 0)
        rc = err_prefix(e, "%s", path);
    json_decref(j);
    free(path);
    return rc;
}

static int check_hash(const char *dir, const struct checkpoint_file *f, struct err *e)
{
    char *path = mem_printf("%s/%s", dir, f->name), sha[SHA256_HEX];
    int rc = hash_sha256_file(path, sha, NULL, e);
    if (rc == 0 && strcmp(sha, f->sha256) != 0)
        rc = err_set(
            e, ERR_CORRUPT, "%s: SHA-256 %.16s…, the manifest says %.16s…", path, sha, f->sha256);
    free(path);
    return rc;
}

int checkpoint_verify(
    const char *dir, int deep, char sha256[SHA256_HEX], int64_t *step, struct err *e)
{
    struct file_list l = {NULL, 0};
    int64_t found = -1;
    int rc = read_manifest(dir, sha256, &found, &l, e);
    for (int i = 0; rc == 0 && i < l.count; i++)
        rc = check_size(dir, &l.files[i], e);
    for (int i = 0; rc == 0 && deep && i < l.count; i++)
        rc = check_hash(dir, &l.files[i], e);
    if (rc == 0 && step)
        *step = found;
    free(l.files);
    return rc;
}

/* -- choosing and keeping -- */

static int by_step(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Steps of the directories under root: those with a manifest, or those without. */
static int list_steps(const char *root, int committed, int64_t **steps, struct err *e)
{
    *steps = NULL;
    DIR *d = opendir(root);
    if (!d)
        return errno == ENOENT ? 0 : err_errno(e, "%s", root);
    int n = 0;
    for (struct dirent *entry; (entry = readdir(d));) {
        int64_t step = checkpoint_step(entry->d_name);
        if (step < 0 || is_committed(root, entry->d_name) != committed)
            continue;
        *steps = mem_grow_array(*steps, (size_t)n + 1, sizeof **steps);
        (*steps)[n++] = step;
    }
    closedir(d);
    if (n)
        qsort(*steps, (size_t)n, sizeof **steps, by_step);
    return n;
}

int checkpoint_list(const char *root, int64_t **steps, struct err *e)
{
    return list_steps(root, 1, steps, e);
}

int checkpoint_newest(const char *root, int64_t *step, struct buf *damaged, struct err *e)
{
    int64_t *steps;
    int n = checkpoint_list(root, &steps, e);
    *step = -1;
    for (int i = n - 1; i >= 0 && *step < 0; i--) {
        char name[32];
        struct err why = {0};
        checkpoint_name(steps[i], name);
        char *dir = mem_printf("%s/%s", root, name);
        if (checkpoint_verify(dir, 1, NULL, NULL, &why) == 0)
            *step = steps[i];
        else
            buf_printf(damaged, "%s: %s\n", name, why.msg);
        free(dir);
    }
    free(steps);
    return n < 0 ? n : 0;
}

/* The manifest goes first: what a kill leaves of the rest is then an uncommitted directory. */
static int remove_checkpoint(const char *root, int64_t step, struct err *e)
{
    char name[32];
    checkpoint_name(step, name);
    char *dir = mem_printf("%s/%s", root, name), *manifest = mem_printf("%s/" MANIFEST, dir);
    int rc = 0;
    if (unlink(manifest) < 0 && errno != ENOENT)
        rc = err_errno(e, "remove %s", manifest);
    if (rc == 0)
        rc = fs_fsync_dir(dir, e);
    if (rc == 0)
        rc = fs_remove_tree(dir, e);
    free(manifest);
    free(dir);
    return rc;
}

static int is_pinned(int64_t step, const int64_t *pinned, int count)
{
    for (int i = 0; i < count; i++)
        if (pinned[i] == step)
            return 1;
    return 0;
}

int checkpoint_retain(const char *root, int keep_last, int64_t keep_every, const int64_t *pinned,
    int pinned_count, struct err *e)
{
    int64_t *steps = NULL, *loose = NULL;
    int n = checkpoint_list(root, &steps, e), rc = n < 0 ? n : 0;
    if (!steps)
        return rc;
    if (keep_last < 1)
        keep_last = 1;
    for (int i = 0; rc == 0 && i < n - keep_last; i++) {
        int kept = keep_every > 0 && steps[i] % keep_every == 0;
        if (!kept && !is_pinned(steps[i], pinned, pinned_count))
            rc = remove_checkpoint(root, steps[i], e);
    }
    int loose_count = rc == 0 ? list_steps(root, 0, &loose, e) : 0;
    if (loose_count < 0)
        rc = loose_count;
    for (int i = 0; rc == 0 && i < loose_count; i++)
        if (loose[i] < steps[n - 1])
            rc = remove_checkpoint(root, loose[i], e);
    free(loose);
    free(steps);
    return rc;
}
