/*
 * The table of configuration keys, and the reading and printing of one value. Internal to
 * common/config*.c.
 *
 * A key has a type; a type has two functions (config_types in config_value.c and config_list.c).
 * Everything else (help, printing, the plan's JSON, nearest-key hints) walks the table.
 */
#ifndef COMMON_CONFIG_TABLE_H
#define COMMON_CONFIG_TABLE_H

#include "common/config.h"
#include "common/yaml_tree.h"

enum config_type {
    CONFIG_INT,    /* int */
    CONFIG_INT64,  /* int64_t, uint64_t below 2^63 */
    CONFIG_REAL,   /* double */
    CONFIG_FLOAT,  /* float */
    CONFIG_BOOL,   /* int, 0 or 1 */
    CONFIG_TEXT,   /* char *, owned */
    CONFIG_NAME,   /* char *, owned: a file name of letters, digits, '.', '_', '-' */
    CONFIG_PRESET, /* char *, owned: a name of common/model_preset.h */
    CONFIG_SCHEDULE,
    CONFIG_OPTIM,
    CONFIG_SHARING,
    CONFIG_PRECISION,
    CONFIG_SOURCES, /* those below read several fields of the config */
    CONFIG_PHASES,
    CONFIG_SUITES,
    CONFIG_REGIMES,
    CONFIG_RECOMPUTE,
    CONFIG_TYPE_COUNT,
};

struct config_key {
    const char *name;
    enum config_type type;
    size_t offset;   /* of the field in struct config */
    double min, max; /* of numbers, inclusive */
    int plan;        /* 1: decides the run's content and so belongs to the plan */
    const char *def; /* YAML; "" : derived from other keys, as help says; NULL: must be given */
    const char *help;
};

extern const struct config_key config_keys[];
extern const int config_key_count;
#define CONFIG_MAX_KEYS 80

/* Where a value came from, for messages. */
struct config_source {
    const char *file;     /* "demo.yaml" */
    const char *override; /* "train.steps=5" when it was given by --set, else NULL */
    struct err *e;
};

/* Sets the error "demo.yaml:12: …" or "--set train.steps=5: …"; line 0 leaves the line out. */
int config_bad(const struct config_source *s, int line, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

struct config_type_ops {
    const char *name; /* for help: "integer" */
    int (*read)(const struct config_source *s, const struct config_key *k,
        const struct yaml_tree *v, struct config *c);
    /* Appends the value as one line of YAML that is JSON too. */
    void (*print)(const struct config_key *k, const struct config *c, struct buf *out);
};
extern const struct config_type_ops config_types[CONFIG_TYPE_COUNT];

/* Reading of one scalar inside a list; `what` names it in errors ("data.sources[0].weight"). */
int config_read_text(
    const struct config_source *s, const char *what, const struct yaml_tree *v, char **out);
int config_read_real(const struct config_source *s, const char *what, const struct yaml_tree *v,
    double min, double max, double *out);
int config_read_int64(const struct config_source *s, const char *what, const struct yaml_tree *v,
    double min, double max, int64_t *out);
void config_print_text(const char *text, struct buf *out);
void config_print_real(double x, struct buf *out);

/* config_list.c */
int config_read_sources(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c);
int config_read_phases(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c);
int config_read_suites(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c);
int config_read_regimes(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c);
int config_read_recompute(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c);
void config_print_recompute(const struct config_key *k, const struct config *c, struct buf *out);
void config_print_sources(const struct config_key *k, const struct config *c, struct buf *out);
void config_print_phases(const struct config_key *k, const struct config *c, struct buf *out);
void config_print_suites(const struct config_key *k, const struct config *c, struct buf *out);
void config_print_regimes(const struct config_key *k, const struct config *c, struct buf *out);
void config_release_sources(struct config *c);

/* The key's index, or −1. */
int config_find(const char *name);
/* The known key or section most like `name`, or NULL when none is near. Static storage of the
 * table's names; a section is written into `section`. */
const char *config_nearest(const char *name, char section[64]);

/* config_check.c: fills what was not given from the preset and from other keys (given[i] = 1: key i
 * was given; what the preset gave is marked too), then checks relations. On failure *key names the
 * key at fault. */
void config_derive(struct config *c, uint8_t *given);
int config_check(const struct config *c, const char **key, struct err *e);

#endif
