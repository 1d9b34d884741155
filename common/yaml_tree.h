/*
 * A small, bounded reading of YAML: mappings, lists and scalars with their lines. Anchors, aliases,
 * tags, several documents, deep nesting and very large texts are refused, so what is read is no
 * larger than what was written. A mapping's keys are scalars and differ.
 *
 * The tree owns its strings; yaml_tree_release() frees them.
 */
#ifndef COMMON_YAML_TREE_H
#define COMMON_YAML_TREE_H

#include <stddef.h>

#include "common/err.h"

#define YAML_MAX_BYTES (1u << 20)
#define YAML_MAX_DEPTH 8
#define YAML_MAX_ITEMS 512 /* entries of one mapping or list */
#define YAML_MAX_NODES 8192

enum yaml_kind { YAML_TREE_SCALAR, YAML_TREE_MAP, YAML_TREE_LIST };

struct yaml_tree {
    enum yaml_kind kind;
    int line;                /* from 1 */
    char *key;               /* in a mapping: this entry's key; line is then the key's */
    char *text;              /* scalar: its value, without NUL bytes */
    int quoted;              /* scalar: written in quotes or as a block */
    struct yaml_tree *items; /* mapping or list */
    int count;
};

/* Errors begin "name:line: ", or "name: " alone where lines are 0 (a value given on the command
 * line). */
int yaml_tree_parse(
    const char *yaml, size_t n, const char *name, int lines, struct yaml_tree *out, struct err *e);
void yaml_tree_release(struct yaml_tree *t);

/* The entry of a mapping, or NULL. */
const struct yaml_tree *yaml_tree_get(const struct yaml_tree *map, const char *key);

#endif
