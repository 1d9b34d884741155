// Reading and printing of one configuration value, by type.
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/config_table.h"
#include "common/json_canonical.h"
#include "common/model_preset.h"
#include "common/number.h"

int config_bad(const struct config_source *s, int line, const char *fmt, ...)
{
    char text[768];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (s->override)
        return err_set(s->e, ERR_INPUT, "--set %.200s: %s", s->override, text);
    if (line)
        return err_set(s->e, ERR_INPUT, "%s:%d: %s", s->file, line, text);
    return err_set(s->e, ERR_INPUT, "%s: %s", s->file, text);
}

/* The words of a value in a message. */
static const char *shown(const struct yaml_tree *v)
{
    if (v->kind == YAML_TREE_MAP)
        return "a mapping";
    if (v->kind == YAML_TREE_LIST)
        return "a list";
    return v->text && *v->text ? v->text : "nothing";
}

static int wrong_type(
    const struct config_source *s, const char *what, const struct yaml_tree *v, const char *wanted)
{
    return config_bad(s, v->line, "%s: \"%.80s\" is not %s", what, shown(v), wanted);
}

/* Characters that YAML takes for line breaks or does not print would not read back. */
static int unprintable(const unsigned char *p)
{
    return *p < 0x20 || *p == 0x7f || (p[0] == 0xc2 && p[1] < 0xa0) ||
           (p[0] == 0xe2 && p[1] == 0x80 && (p[2] == 0xa8 || p[2] == 0xa9)) ||
           (p[0] == 0xef && p[1] == 0xbb && p[2] == 0xbf) ||
           (p[0] == 0xef && p[1] == 0xbf && p[2] >= 0xbe);
}

int config_read_text(
    const struct config_source *s, const char *what, const struct yaml_tree *v, char **out)
{
    if (v->kind != YAML_TREE_SCALAR || !*v->text)
        return wrong_type(s, what, v, "text");
    if (strlen(v->text) > 4095)
        return config_bad(s, v->line, "%s: longer than 4095 bytes", what);
    for (const char *p = v->text; *p; p++)
        if (unprintable((const unsigned char *)p))
            return config_bad(s, v->line, "%s: holds a control character", what);
    free(*out);
    *out = mem_strdup(v->text);
    return 0;
}

int config_read_int64(const struct config_source *s, const char *what, const struct yaml_tree *v,
    double min, double max, int64_t *out)
{
    const char *digits = v->text ? v->text + strspn(v->text, "+-") : "";
    char *end = NULL;
    errno = 0;
    long long n = *digits >= '0' && *digits <= '9' ? strtoll(v->text, &end, 10) : 0;
    if (v->quoted || !end || *end)
        return wrong_type(s, what, v, "an integer");
    if (errno || (double)n < min || (double)n > max)
        return config_bad(
            s, v->line, "%s: %s is out of range, %.16g to %.16g", what, v->text, min, max);
    *out = n;
    return 0;
}

int config_read_real(const struct config_source *s, const char *what, const struct yaml_tree *v,
    double min, double max, double *out)
{
    static const char allowed[] = "0123456789+-.eE";
    int number = v->text && *v->text && !v->quoted && !v->text[strspn(v->text, allowed)];
    char *end = NULL;
    double x = number ? strtod(v->text, &end) : 0;
    if (!number || end == v->text || *end)
        return wrong_type(s, what, v, "a number");
    if (!isfinite(x) || x < min || x > max)
        return config_bad(
            s, v->line, "%s: %.40s is out of range, %.16g to %.16g", what, v->text, min, max);
    *out = x;
    return 0;
}

void config_print_text(const char *text, struct buf *out)
{
    json_canonical_text(text, strlen(text), out);
}

void config_print_real(double x, struct buf *out)
{
    char text[NUMBER_TEXT];
    number_text(x, text);
    buf_add_str(out, text);
}

/* -- the types of single fields -- */

static void *field(const struct config_key *k, struct config *c)
{
    return (char *)c + k->offset;
}
static const void *field_of(const struct config_key *k, const struct config *c)
{
    return (const char *)c + k->offset;
}

static int read_int(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int64_t n = 0;
    int rc = config_read_int64(s, k->name, v, k->min, k->max, &n);
    if (rc == 0)
        *(int *)field(k, c) = (int)n;
    return rc;
}
static void print_int(const struct config_key *k, const struct config *c, struct buf *out)
{
    buf_printf(out, "%d", *(const int *)field_of(k, c));
}

static int read_int64(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    return config_read_int64(s, k->name, v, k->min, k->max, field(k, c));
}
static void print_int64(const struct config_key *k, const struct config *c, struct buf *out)
{
    buf_printf(out, "%lld", (long long)*(const int64_t *)field_of(k, c));
}

static int read_real(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    return config_read_real(s, k->name, v, k->min, k->max, field(k, c));
}
static void print_real(const struct config_key *k, const struct config *c, struct buf *out)
{
    config_print_real(*(const double *)field_of(k, c), out);
}

static int read_float(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    double x = 0;
    int rc = config_read_real(s, k->name, v, k->min, k->max, &x);
    if (rc == 0)
        *(float *)field(k, c) = (float)x;
    return rc;
}
static void print_float(const struct config_key *k, const struct config *c, struct buf *out)
{
    config_print_real(number_from_float(*(const float *)field_of(k, c)), out);
}

static int read_bool(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int yes = v->text && strcmp(v->text, "true") == 0;
    if (v->quoted || !v->text || (!yes && strcmp(v->text, "false") != 0))
        return wrong_type(s, k->name, v, "true or false");
    *(int *)field(k, c) = yes;
    return 0;
}
static void print_bool(const struct config_key *k, const struct config *c, struct buf *out)
{
    buf_add_str(out, *(const int *)field_of(k, c) ? "true" : "false");
}

static int read_text(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    return config_read_text(s, k->name, v, field(k, c));
}
static void print_text(const struct config_key *k, const struct config *c, struct buf *out)
{
    config_print_text(*(char *const *)field_of(k, c), out);
}

/* A name becomes a directory: nothing in it may lead elsewhere. */
static int read_name(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    if (!v->text || !*v->text || *v->text == '.' || strlen(v->text) > 100 ||
        v->text[strspn(v->text, allowed)])
        return wrong_type(s, k->name, v,
            "a name: letters, digits, '.', '_', '-', at most 100, the first not '.'");
    return config_read_text(s, k->name, v, field(k, c));
}

static int read_preset(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    if (v->text && (strcmp(v->text, MODEL_PRESET_NONE) == 0 || model_preset_find(v->text)))
        return config_read_text(s, k->name, v, field(k, c));
    return wrong_type(s, k->name, v, "a preset; fb-plan --presets lists them");
}

static const char *const schedules[] = {
    [LR_COSINE] = "cosine", [LR_WSD] = "wsd", [LR_CONSTANT] = "constant"};

static const char *const optims[] = {
    [OPTIM_ADAMW] = "adamw", [OPTIM_MUON] = "muon", [OPTIM_NORMUON] = "normuon"};

const char *optim_name(int kind)
{
    return kind >= 0 && kind < OPTIM_COUNT ? optims[kind] : NULL;
}

/* Index of v's text among words, or −1. */
static int word_of(const struct yaml_tree *v, const char *const *words, size_t count)
{
    for (size_t i = 0; v->text && i < count; i++)
        if (strcmp(v->text, words[i]) == 0)
            return (int)i;
    return -1;
}

static int read_schedule(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int i = word_of(v, schedules, sizeof schedules / sizeof *schedules);
    if (i < 0)
        return wrong_type(s, k->name, v, "cosine, wsd or constant");
    *(enum lr_schedule *)field(k, c) = (enum lr_schedule)i;
    return 0;
}
static int read_optim(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int i = word_of(v, optims, OPTIM_COUNT);
    if (i < 0)
        return wrong_type(s, k->name, v, "adamw, muon or normuon");
    *(enum optim_kind *)field(k, c) = (enum optim_kind)i;
    return 0;
}
static void print_optim(const struct config_key *k, const struct config *c, struct buf *out)
{
    config_print_text(optims[*(const enum optim_kind *)field_of(k, c)], out);
}
static void print_schedule(const struct config_key *k, const struct config *c, struct buf *out)
{
    config_print_text(schedules[*(const enum lr_schedule *)field_of(k, c)], out);
}

static const char *const precisions[PRECISION_COUNT] = {
    [PRECISION_F32] = "f32", [PRECISION_BF16] = "bf16"};

const char *precision_name(int precision)
{
    return precision >= 0 && precision < PRECISION_COUNT ? precisions[precision] : NULL;
}

static int read_precision(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int i = word_of(v, precisions, PRECISION_COUNT);
    if (i < 0)
        return wrong_type(s, k->name, v, "f32 or bf16");
    *(enum precision *)field(k, c) = (enum precision)i;
    return 0;
}
static void print_precision(const struct config_key *k, const struct config *c, struct buf *out)
{
    config_print_text(precisions[*(const enum precision *)field_of(k, c)], out);
}

/* auto and off. */
static int read_sharing(const struct config_source *s, const struct config_key *k,
    const struct yaml_tree *v, struct config *c)
{
    int on = v->text && strcmp(v->text, "auto") == 0;
    if (!on && (!v->text || strcmp(v->text, "off") != 0))
        return wrong_type(s, k->name, v, "auto or off");
    *(int *)field(k, c) = on;
    return 0;
}
static void print_sharing(const struct config_key *k, const struct config *c, struct buf *out)
{
    config_print_text(*(const int *)field_of(k, c) ? "auto" : "off", out);
}

const struct config_type_ops config_types[CONFIG_TYPE_COUNT] = {
    [CONFIG_INT] = {"integer", read_int, print_int},
    [CONFIG_INT64] = {"integer", read_int64, print_int64},
    [CONFIG_REAL] = {"number", read_real, print_real},
    [CONFIG_FLOAT] = {"number", read_float, print_float},
    [CONFIG_BOOL] = {"true or false", read_bool, print_bool},
    [CONFIG_TEXT] = {"text", read_text, print_text},
    [CONFIG_NAME] = {"name", read_name, print_text},
    [CONFIG_PRESET] = {"name", read_preset, print_text},
    [CONFIG_SCHEDULE] = {"word", read_schedule, print_schedule},
    [CONFIG_OPTIM] = {"word", read_optim, print_optim},
    [CONFIG_SHARING] = {"word", read_sharing, print_sharing},
    [CONFIG_PRECISION] = {"word", read_precision, print_precision},
    [CONFIG_SOURCES] = {"list", config_read_sources, config_print_sources},
    [CONFIG_PHASES] = {"list", config_read_phases, config_print_phases},
    [CONFIG_SUITES] = {"list", config_read_suites, config_print_suites},
    [CONFIG_REGIMES] = {"list", config_read_regimes, config_print_regimes},
    [CONFIG_RECOMPUTE] = {"word or list", config_read_recompute, config_print_recompute},
};
