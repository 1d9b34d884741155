#include "common/yaml_tree.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "common/mem.h"

struct reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the current one; owned until the next */
    int has_event;
    const char *name;
    int lines, nodes;
    struct err *e;
};

__attribute__((format(printf, 3, 4))) static int bad(
    struct reader *r, size_t line, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (!r->lines)
        return err_set(r->e, ERR_INPUT, "%s: %s", r->name, text);
    return err_set(r->e, ERR_INPUT, "%s:%zu: %s", r->name, line, text);
}

static size_t event_line(const struct reader *r)
{
    return r->event.start_mark.line + 1;
}

static int next(struct reader *r)
{
    if (r->has_event)
        yaml_event_delete(&r->event);
    r->has_event = 0;
    if (!yaml_parser_parse(&r->parser, &r->event)) {
        const char *what = r->parser.problem ? r->parser.problem : "not YAML";
        return bad(r, r->parser.problem_mark.line + 1, "not valid YAML: %s", what);
    }
    r->has_event = 1;
    return 0;
}

/* Refuses what would make the tree larger or other than the text: anchors, tags, aliases. */
static int check_plain(struct reader *r)
{
    const yaml_char_t *anchor = NULL, *tag = NULL;
    switch (r->event.type) {
    case YAML_ALIAS_EVENT:
        return bad(r, event_line(r), "YAML aliases are not supported; write the value out");
    case YAML_SCALAR_EVENT:
        anchor = r->event.data.scalar.anchor;
        tag = r->event.data.scalar.tag;
        break;
    case YAML_SEQUENCE_START_EVENT:
        anchor = r->event.data.sequence_start.anchor;
        tag = r->event.data.sequence_start.tag;
        break;
    case YAML_MAPPING_START_EVENT:
        anchor = r->event.data.mapping_start.anchor;
        tag = r->event.data.mapping_start.tag;
        break;
    default:
        break;
    }
    if (anchor)
        return bad(r, event_line(r), "YAML anchors are not supported; write the value out");
    if (tag)
        return bad(r, event_line(r), "YAML tags are not supported; leave the tag out");
    return 0;
}

static int scalar_text(struct reader *r, char **out)
{
    const char *text = (const char *)r->event.data.scalar.value;
    if (strlen(text) != r->event.data.scalar.length)
        return bad(r, event_line(r), "a value holds a NUL byte");
    *out = mem_strdup(text);
    return 0;
}

static int read_node(struct reader *r, int depth, struct yaml_tree *out);

static struct yaml_tree *add_item(struct yaml_tree *t)
{
    if ((t->count & (t->count - 1)) == 0) /* room doubles at each power of two */
        t->items = mem_grow_array(t->items, t->count ? 2 * (size_t)t->count : 1, sizeof *t->items);
    struct yaml_tree *item = &t->items[t->count++];
    *item = (struct yaml_tree){0};
    return item;
}

static int read_key(struct reader *r, const struct yaml_tree *map, struct yaml_tree *item)
{
    int rc = check_plain(r);
    if (rc < 0)
        return rc;
    if (r->event.type != YAML_SCALAR_EVENT)
        return bad(r, event_line(r), "a key of a mapping must be a word");
    rc = scalar_text(r, &item->key);
    if (rc < 0)
        return rc;
    const struct yaml_tree *first = yaml_tree_get(map, item->key);
    if (first != item)
        return bad(
            r, event_line(r), "key %.80s is given twice, first on line %d", item->key, first->line);
    item->line = (int)event_line(r);
    return next(r);
}

/* Reads the entries of a mapping or list; the current event is its first. Leaves the end event
 * current. */
static int read_items(struct reader *r, int depth, yaml_event_type_t end, struct yaml_tree *out)
{
    int rc = 0;
    while (rc == 0 && r->event.type != end) {
        if (out->count == YAML_MAX_ITEMS)
            return bad(r, event_line(r), "more than %d entries", YAML_MAX_ITEMS);
        struct yaml_tree *item = add_item(out);
        if (out->kind == YAML_TREE_MAP)
            rc = read_key(r, out, item);
        if (rc == 0)
            rc = read_node(r, depth + 1, item);
        if (rc == 0)
            rc = next(r);
    }
    return rc;
}

static int read_node(struct reader *r, int depth, struct yaml_tree *out)
{
    int rc = check_plain(r);
    if (rc < 0)
        return rc;
    if (depth > YAML_MAX_DEPTH)
        return bad(r, event_line(r), "nested deeper than %d levels", YAML_MAX_DEPTH);
    if (++r->nodes > YAML_MAX_NODES)
        return bad(r, event_line(r), "more than %d values", YAML_MAX_NODES);
    if (!out->line)
        out->line = (int)event_line(r);
    yaml_event_type_t end = YAML_NO_EVENT;
    switch (r->event.type) {
    case YAML_SCALAR_EVENT:
        out->quoted = r->event.data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
        return scalar_text(r, &out->text);
    case YAML_MAPPING_START_EVENT:
        out->kind = YAML_TREE_MAP;
        end = YAML_MAPPING_END_EVENT;
        break;
    case YAML_SEQUENCE_START_EVENT:
        out->kind = YAML_TREE_LIST;
        end = YAML_SEQUENCE_END_EVENT;
        break;
    default:
        return bad(r, event_line(r), "a value is missing");
    }
    rc = next(r);
    return rc < 0 ? rc : read_items(r, depth, end, out);
}

static int read_document(struct reader *r, struct yaml_tree *out)
{
    int rc = next(r); /* stream start */
    if (rc == 0)
        rc = next(r);
    if (rc == 0 && r->event.type != YAML_DOCUMENT_START_EVENT)
        return bad(r, 1, "empty");
    if (rc == 0)
        rc = next(r);
    if (rc == 0)
        rc = read_node(r, 0, out);
    if (rc == 0)
        rc = next(r); /* document end */
    if (rc == 0)
        rc = next(r);
    if (rc == 0 && r->event.type != YAML_STREAM_END_EVENT)
        return bad(r, event_line(r), "a second YAML document; wanted one");
    return rc;
}

int yaml_tree_parse(
    const char *yaml, size_t n, const char *name, int lines, struct yaml_tree *out, struct err *e)
{
    struct reader r = {.name = name, .lines = lines, .e = e};
    *out = (struct yaml_tree){0};
    if (n > YAML_MAX_BYTES)
        return err_set(e, ERR_INPUT, "%s: larger than the limit of %u bytes", name, YAML_MAX_BYTES);
    if (!yaml_parser_initialize(&r.parser))
        return err_set(e, ERR_NOMEM, "%s: out of memory", name);
    if (n >= 3 && memcmp(yaml, "\xef\xbb\xbf", 3) == 0) { /* the mark some editors begin with */
        yaml += 3;
        n -= 3;
    }
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)yaml, n);
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    int rc = read_document(&r, out);
    if (r.has_event)
        yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    if (rc < 0)
        yaml_tree_release(out);
    return rc;
}

void yaml_tree_release(struct yaml_tree *t)
{
    for (int i = 0; i < t->count; i++)
        yaml_tree_release(&t->items[i]);
    free(t->items);
    free(t->key);
    free(t->text);
    *t = (struct yaml_tree){0};
}

const struct yaml_tree *yaml_tree_get(const struct yaml_tree *map, const char *key)
{
    for (int i = 0; map->kind == YAML_TREE_MAP && i < map->count; i++)
        if (map->items[i].key && strcmp(map->items[i].key, key) == 0)
            return &map->items[i];
    return NULL;
}
