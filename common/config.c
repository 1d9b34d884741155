#include "common/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/config_table.h"
#include "common/fs.h"

/* Where each key was given: line 0 and override NULL where it was not. */
struct place {
    int line;
    const char *override;
};

struct loader {
    const char *name; /* of the file */
    struct config *c;
    struct place places[CONFIG_MAX_KEYS];
    uint8_t given[CONFIG_MAX_KEYS];
    struct err *e;
};

static int unknown_key(const struct config_source *s, int line, const char *name)
{
    char section[64];
    const char *near = config_nearest(name, section);
    if (!near)
        return config_bad(s, line, "unknown key %.100s; --help-config lists the keys", name);
    return config_bad(s, line, "unknown key %.100s; did you mean %s?", name, near);
}

static int read_key(
    struct loader *l, const struct config_source *s, int i, const struct yaml_tree *v)
{
    struct place *place = &l->places[i];
    if (l->given[i] && !s->override)
        return config_bad(
            s, v->line, "%s is given twice, first on line %d", config_keys[i].name, place->line);
    *place = (struct place){s->override ? 0 : v->line, s->override};
    l->given[i] = 1;
    return config_types[config_keys[i].type].read(s, &config_keys[i], v, l->c);
}

static int is_section(const char *path)
{
    size_t n = strlen(path);
    for (int i = 0; i < config_key_count; i++)
        if (strncmp(config_keys[i].name, path, n) == 0 && config_keys[i].name[n] == '.')
            return 1;
    return 0;
}

/* Reads what stands at `path`: a key's value, or a section and all in it ("" is the whole file). */
static int read_path(
    struct loader *l, const struct config_source *s, const char *path, const struct yaml_tree *v)
{
    int rc = 0, i = config_find(path);
    if (i >= 0)
        return read_key(l, s, i, v);
    if (*path && !is_section(path))
        return unknown_key(s, v->line, path);
    if (v->kind == YAML_TREE_SCALAR && !*v->text && !v->quoted)
        return 0; /* an empty section */
    if (v->kind != YAML_TREE_MAP)
        return config_bad(s, v->line, "%s: wanted a section of keys", *path ? path : "the file");
    for (int k = 0; rc == 0 && k < v->count; k++) {
        char *sub = mem_printf("%s%s%s", path, *path ? "." : "", v->items[k].key);
        rc = read_path(l, s, sub, &v->items[k]);
        free(sub);
    }
    return rc;
}

static int read_file(struct loader *l, const char *yaml, size_t n)
{
    struct config_source s = {.file = l->name, .e = l->e};
    struct yaml_tree tree;
    int rc = yaml_tree_parse(yaml, n, l->name, 1, &tree, l->e);
    if (rc < 0)
        return rc;
    rc = read_path(l, &s, "", &tree);
    yaml_tree_release(&tree);
    return rc;
}

static int read_override(struct loader *l, const char *text)
{
    struct config_source s = {.file = l->name, .override = text, .e = l->e};
    const char *equals = strchr(text, '=');
    if (!equals || equals == text)
        return config_bad(&s, 0, "wanted key=value");
    if (!equals[1])
        return config_bad(&s, 0, "the value is missing");
    struct yaml_tree tree;
    char *name = mem_printf("--set %.200s", text);
    char *key = mem_strdup(text);
    key[equals - text] = 0;
    int rc = yaml_tree_parse(equals + 1, strlen(equals + 1), name, 0, &tree, l->e);
    if (rc == 0) {
        rc = read_path(l, &s, key, &tree);
        yaml_tree_release(&tree);
    }
    free(key);
    free(name);
    return rc;
}

/* The table's defaults; a default that does not read is our bug. */
static void read_default(struct config *c, int i)
{
    struct err e = {0};
    struct config_source s = {.file = "default", .e = &e};
    struct yaml_tree tree;
    const char *def = config_keys[i].def;
    CHECK(yaml_tree_parse(def, strlen(def), "default", 0, &tree, &e) == 0);
    CHECK(config_types[config_keys[i].type].read(&s, &config_keys[i], &tree, c) == 0);
    yaml_tree_release(&tree);
}

/* Fails as `key`'s place would: at its line, its override, or the file. */
static int fail_at(const struct loader *l, const char *key, const char *text)
{
    const struct place *place = &l->places[config_find(key)];
    struct config_source s = {.file = l->name, .override = place->override, .e = l->e};
    return config_bad(&s, place->line, "%s: %s", key, text);
}

static int fill_and_check(struct loader *l)
{
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];
        struct config_source s = {.file = l->name, .e = l->e};
        if (!l->given[i] && !k->def)
            return config_bad(&s, 1, "%s is missing: %s", k->name, k->help);
        if (!l->given[i] && *k->def)
            read_default(l->c, i);
    }
    config_derive(l->c, l->given);
    const char *key = NULL;
    struct err inner = {0};
    int rc = config_check(l->c, &key, &inner);
    return rc < 0 ? fail_at(l, key, inner.msg) : 0;
}

/* The files that the data keys name must be there before anything starts. */
static int check_files(const struct loader *l)
{
    const struct config *c = l->c;
    char *text = NULL;
    int rc = 0;
    if (!fs_exists(c->data.tokenizer)) {
        text = mem_printf("%s: no such file; fb-tokenizer train makes one", c->data.tokenizer);
        rc = fail_at(l, "data.tokenizer", text);
    }
    if (rc == 0 && strcmp(c->init_from, "none") != 0) {
        char *manifest = mem_printf("%s/MANIFEST.json", c->init_from);
        if (!fs_exists(manifest)) {
            text = mem_printf("%s: no such file; a committed checkpoint has one", manifest);
            rc = fail_at(l, "train.init_from", text);
        }
        free(manifest);
    }
    for (int i = 0; rc == 0 && i < c->data.source_count; i++) {
        char *manifest = mem_printf("%s/manifest.json", c->data.sources[i].path);
        if (!fs_exists(manifest)) {
            text = mem_printf("%s: no such file; fb-ingest makes one", manifest);
            rc = fail_at(l, "data.sources", text);
        }
        free(manifest);
    }
    free(text);
    return rc;
}

static int parse(const char *yaml, size_t n, const char *name, const char *const *overrides,
    int override_count, int with_files, struct config *out, struct err *e)
{
    struct loader l = {.name = name, .c = out, .e = e};
    memset(out, 0, sizeof *out);
    int rc = read_file(&l, yaml, n);
    for (int i = 0; rc == 0 && i < override_count; i++)
        rc = read_override(&l, overrides[i]);
    if (rc == 0)
        rc = fill_and_check(&l);
    if (rc == 0 && with_files)
        rc = check_files(&l);
    if (rc < 0)
        config_release(out);
    return rc;
}

int config_parse(const char *yaml, size_t n, const char *name, const char *const *overrides,
    int override_count, struct config *out, struct err *e)
{
    return parse(yaml, n, name, overrides, override_count, 0, out, e);
}

int config_load(const char *path, const char *const *overrides, int override_count,
    struct config *out, struct err *e)
{
    struct buf text = BUF_INIT;
    int rc = fs_read(path, YAML_MAX_BYTES, &text, e);
    if (rc == 0)
        rc = parse(text.data, text.len, path, overrides, override_count, 1, out, e);
    buf_release(&text);
    return rc;
}

void config_release(struct config *c)
{
    free(c->run.name);
    free(c->run.dir);
    free(c->preset);
    free(c->data.tokenizer);
    free(c->init_from);
    config_release_sources(c);
    memset(c, 0, sizeof *c);
}

/* Prints the section headers in which `name` stands and `before` did not; returns the depth of the
 * key. */
static int print_sections(const char *name, const char *before, struct buf *out)
{
    int depth = 0, same = 1;
    for (const char *part = name, *dot; (dot = strchr(part, '.')); part = dot + 1, depth++) {
        size_t n = (size_t)(dot - name) + 1;
        same = same && strncmp(name, before, n) == 0;
        if (!same)
            buf_printf(out, "%*s%.*s:\n", depth * 2, "", (int)(dot - part), part);
    }
    return depth;
}

void config_print(const struct config *c, struct buf *out)
{
    const char *before = "";
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];
        int depth = print_sections(k->name, before, out);
        const char *dot = strrchr(k->name, '.');
        buf_printf(out, "%*s%s: ", depth * 2, "", dot ? dot + 1 : k->name);
        config_types[k->type].print(k, c, out);
        buf_add_char(out, '\n');
        before = k->name;
    }
}

void config_help(struct buf *out)
{
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];
        buf_printf(out, "%s  (%s", k->name, config_types[k->type].name);
        if (k->min < k->max && k->type != CONFIG_BOOL)
            buf_printf(out, ", %.16g to %.16g", k->min, k->max);
        if (!k->def)
            buf_add_str(out, ", required");
        else if (*k->def)
            buf_printf(out, ", default %s", k->def);
        buf_printf(out, ")\n    %s\n", k->help);
    }
}

json_t *config_plan_json(const struct config *c)
{
    json_t *root = json_object();
    struct buf text = BUF_INIT;
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *k = &config_keys[i];
        if (!k->plan)
            continue;
        buf_clear(&text);
        config_types[k->type].print(k, c, &text);
        json_t *value = json_loadb(text.data, text.len, JSON_DECODE_ANY, NULL);
        CHECK(value); /* values print as JSON */
        json_object_set_new(root, k->name, value);
    }
    buf_release(&text);
    return root;
}
