// The list-valued keys: data.sources, train.passes, train.recompute, eval.suites, eval.regimes.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/config_table.h"

const char *regime_name(int regime)
{
    static const char *const names[REGIME_COUNT] = {"standard", "soft", "fused"};
    return regime >= 0 && regime < REGIME_COUNT ? names[regime] : NULL;
}

const char *suite_name(int suite)
{
    static const char *const names[SUITE_COUNT] = {"loss", "fixed_point"};
    return suite >= 0 && suite < SUITE_COUNT ? names[suite] : NULL;
}

int name_index(const char *name, const char *(*name_of)(int), int count)
{
    for (int i = 0; name && i < count; i++)
        if (strcmp(name, name_of(i)) == 0)
            return i;
    return -1;
}

static int check_list(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, int max, const char *of)
{
    if (v->kind != YAML_TREE_LIST || v->count < 1)
        return config_bad(s, v->line, "%s: wanted a list of %s", k->name, of);
    if (v->count > max)
        return config_bad(s, v->line, "%s: %d entries, at most %d", k->name, v->count, max);
    return 0;
}

/* Refuses an entry that is not a mapping, or has a key not in the NULL-terminated list. */
static int check_keys(const struct config_source *s, const char *what, const struct yaml_tree *v,
    const char *const *known, const char *wanted)
{
    if (v->kind != YAML_TREE_MAP)
        return config_bad(s, v->line, "%s: wanted %s", what, wanted);
    for (int i = 0; i < v->count; i++) {
        int found = 0;
        for (const char *const *p = known; *p; p++)
            found |= strcmp(*p, v->items[i].key) == 0;
        if (!found)
            return config_bad(s, v->items[i].line, "unknown key %s.%.80s; wanted %s", what,
                v->items[i].key, wanted);
    }
    return 0;
}

/* -- data.sources -- */

void config_release_sources(struct config *c)
{
    for (int i = 0; i < c->data.source_count; i++) {
        free(c->data.sources[i].name);
        free(c->data.sources[i].path);
    }
    memset(c->data.sources, 0, sizeof c->data.sources);
    c->data.source_count = 0;
}

static int read_source(const struct config_source *s, const char *what, const struct yaml_tree *v,
    struct source_config *out)
{
    static const char *const known[] = {"name", "path", "weight", NULL};
    static const char wanted[] = "{name, path, weight}";
    char part[80];
    int rc = check_keys(s, what, v, known, wanted);
    if (rc < 0)
        return rc;
    const struct yaml_tree *name = yaml_tree_get(v, "name"), *path = yaml_tree_get(v, "path"),
                           *weight = yaml_tree_get(v, "weight");
    if (!name || !path)
        return config_bad(
            s, v->line, "%s.%s is missing; wanted %s", what, name ? "path" : "name", wanted);
    snprintf(part, sizeof part, "%s.name", what);
    rc = config_read_text(s, part, name, &out->name);
    snprintf(part, sizeof part, "%s.path", what);
    if (rc == 0)
        rc = config_read_text(s, part, path, &out->path);
    snprintf(part, sizeof part, "%s.weight", what);
    out->weight = 1;
    if (rc == 0 && weight)
        rc = config_read_real(s, part, weight, 1e-6, 1e6, &out->weight);
    return rc;
}

int config_read_sources(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int rc = check_list(s, k, v, CONFIG_MAX_SOURCES, "{name, path, weight}");
    if (rc < 0)
        return rc;
    config_release_sources(c);
    for (int i = 0; i < v->count; i++) {
        char what[64];
        snprintf(what, sizeof what, "%s[%d]", k->name, i);
        c->data.source_count = i + 1; /* so that a half-read one is released */
        rc = read_source(s, what, &v->items[i], &c->data.sources[i]);
        if (rc < 0)
            return rc;
        for (int j = 0; j < i; j++)
            if (strcmp(c->data.sources[j].name, c->data.sources[i].name) == 0)
                return config_bad(s, v->items[i].line, "%s.name: %.80s is the name of entry %d too",
                    what, c->data.sources[i].name, j);
    }
    return 0;
}

void config_print_sources(const struct config_key *k, const struct config *c, struct buf *out)
{
    (void)k;
    for (int i = 0; i < c->data.source_count; i++) {
        const struct source_config *src = &c->data.sources[i];
        buf_add_str(out, i ? ", {\"name\": " : "[{\"name\": ");
        config_print_text(src->name, out);
        buf_add_str(out, ", \"path\": ");
        config_print_text(src->path, out);
        buf_add_str(out, ", \"weight\": ");
        config_print_real(src->weight, out);
        buf_add_char(out, '}');
    }
    buf_add_char(out, ']');
}

/* -- train.passes -- */

static int read_shares(const struct config_source *s, const char *what, const struct yaml_tree *v,
    struct pass_phase *out)
{
    double sum = 0;
    if (!v || v->kind != YAML_TREE_MAP || v->count < 1)
        return config_bad(s, v ? v->line : 0, "%s.passes: wanted {count: share, …}", what);
    for (int i = 0; i < v->count; i++) {
        const struct yaml_tree *item = &v->items[i];
        char part[80];
        int passes = item->key[0] - '0';
        if (!item->key[0] || item->key[1] || passes < 1 || passes > CONFIG_MAX_PASSES)
            return config_bad(s, item->line, "%s.passes: %.40s is not a pass count, 1 to %d", what,
                item->key, CONFIG_MAX_PASSES);
        snprintf(part, sizeof part, "%s.passes.%d", what, passes);
        int rc = config_read_real(s, part, item, 0, 1, &out->share[passes]);
        if (rc < 0)
            return rc;
        sum += out->share[passes];
    }
    if (fabs(sum - 1) > 1e-9)
        return config_bad(s, v->line, "%s.passes: the shares sum to %.9g, wanted 1", what, sum);
    return 0;
}

int config_read_phases(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    static const char *const known[] = {"from", "passes", NULL};
    static const char wanted[] = "{from, passes: {count: share, …}}";
    int rc = check_list(s, k, v, CONFIG_MAX_PHASES, wanted);
    if (rc < 0)
        return rc;
    memset(c->train.phases, 0, sizeof c->train.phases);
    c->train.phase_count = v->count;
    for (int i = 0; i < v->count; i++) {
        const struct yaml_tree *item = &v->items[i], *from = yaml_tree_get(item, "from");
        struct pass_phase *phase = &c->train.phases[i];
        char what[64], part[80];
        snprintf(what, sizeof what, "%s[%d]", k->name, i);
        rc = check_keys(s, what, item, known, wanted);
        if (rc < 0)
            return rc;
        if (!from)
            return config_bad(s, item->line, "%s.from is missing; wanted %s", what, wanted);
        snprintf(part, sizeof part, "%s.from", what);
        rc = config_read_real(s, part, from, 0, 1, &phase->from);
        if (rc == 0)
            rc = read_shares(s, what, yaml_tree_get(item, "passes"), phase);
        if (rc < 0)
            return rc;
        if (i == 0 ? phase->from != 0 : phase->from <= c->train.phases[i - 1].from)
            return config_bad(s, from->line, "%s: %g; the first is 0 and each is above the last",
                part, phase->from);
    }
    return 0;
}

void config_print_phases(const struct config_key *k, const struct config *c, struct buf *out)
{
    (void)k;
    for (int i = 0; i < c->train.phase_count; i++) {
        const struct pass_phase *phase = &c->train.phases[i];
        buf_add_str(out, i ? ", {\"from\": " : "[{\"from\": ");
        config_print_real(phase->from, out);
        buf_add_str(out, ", \"passes\": {");
        for (int p = 1, first = 1; p <= CONFIG_MAX_PASSES; p++) {
            if (phase->share[p] == 0)
                continue;
            buf_printf(out, "%s\"%d\": ", first ? "" : ", ", p);
            config_print_real(phase->share[p], out);
            first = 0;
        }
        buf_add_str(out, "}}");
    }
    buf_add_char(out, ']');
}

/* -- lists of words: eval.suites, eval.regimes -- */

static int read_words(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, const char *(*name)(int), const char *wanted, int *flags)
{
    int rc = check_list(s, k, v, 16, wanted);
    if (rc < 0)
        return rc;
    for (int i = 0; name(i); i++)
        flags[i] = 0;
    for (int i = 0; i < v->count; i++) {
        const struct yaml_tree *item = &v->items[i];
        int w = 0;
        while (name(w) && (!item->text || strcmp(name(w), item->text) != 0))
            w++;
        if (!name(w))
            return config_bad(s, item->line, "%s: \"%.80s\" is none of %s", k->name,
                item->text ? item->text : "a list or mapping", wanted);
        flags[w] = 1;
    }
    return 0;
}

static void print_words(const char *(*name)(int), const int *flags, struct buf *out)
{
    int first = 1;
    buf_add_char(out, '[');
    for (int i = 0; name(i); i++) {
        if (!flags[i])
            continue;
        buf_printf(out, "%s\"%s\"", first ? "" : ", ", name(i));
        first = 0;
    }
    buf_add_char(out, ']');
}

int config_read_suites(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    return read_words(s, k, v, suite_name, "loss, fixed_point", c->eval.suites);
}
void config_print_suites(const struct config_key *k, const struct config *c, struct buf *out)
{
    (void)k;
    print_words(suite_name, c->eval.suites, out);
}

int config_read_regimes(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    return read_words(s, k, v, regime_name, "standard, soft, fused", c->eval.regimes);
}
void config_print_regimes(const struct config_key *k, const struct config *c, struct buf *out)
{
    (void)k;
    print_words(regime_name, c->eval.regimes, out);
}

/* -- train.recompute: a word, or a list of one a pass -- */

static const char *const levels[] = {
    [RECOMPUTE_NONE] = "none", [RECOMPUTE_INNER] = "inner", [RECOMPUTE_LAYER] = "layer"};

static int read_level(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, enum recompute *out)
{
    for (size_t i = 0; v->text && i < sizeof levels / sizeof *levels; i++)
        if (strcmp(v->text, levels[i]) == 0) {
            *out = (enum recompute)i;
            return 0;
        }
    return config_bad(s, v->line, "%s: \"%.80s\" is none of none, inner, layer", k->name,
        v->text ? v->text : "a list or mapping");
}

int config_read_recompute(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int list = v->kind == YAML_TREE_LIST;
    int rc = list ? check_list(s, k, v, CONFIG_MAX_PASSES, "none, inner, layer") : 0;
    for (int i = 0; i < CONFIG_MAX_PASSES && rc == 0; i++)
        if (i == 0 || (list && i < v->count))
            rc = read_level(s, k, list ? &v->items[i] : v, &c->train.recompute[i]);
        else
            c->train.recompute[i] = c->train.recompute[i - 1];
    return rc;
}

void config_print_recompute(const struct config_key *k, const struct config *c, struct buf *out)
{
    const enum recompute *of = c->train.recompute;
    int n = CONFIG_MAX_PASSES;
    (void)k;
    while (n > 1 && of[n - 1] == of[n - 2])
        n--;
    for (int i = 0; i < n; i++)
        buf_printf(out, "%s\"%s\"", i ? ", " : "[", levels[of[i]]);
    buf_add_char(out, ']');
}
