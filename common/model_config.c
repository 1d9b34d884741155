#include "common/model_config.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "common/json_file.h"
#include "common/number.h"

/* Limits that keep every product of two sizes far inside 64 bits, and indices of one row inside
 * int. */
#define MAX_VOCAB    (1 << 24)
#define MAX_DIM      (1 << 16)
#define MAX_LAYERS   1024
#define MAX_HEADS    1024
#define MAX_HEAD_DIM 1024
#define MAX_FFN      (1 << 20)
#define MAX_WINDOW   (1 << 24)
#define MAX_PARAMS   ((int64_t)1 << 40)

/* The integer sizes: our key, the name in config.json, place, largest value. */
struct size_field {
    const char *key, *json;
    size_t offset;
    int max;
};
static const struct size_field sizes[] = {
    {"model.vocab", "vocab_size", offsetof(struct model_config, vocab), MAX_VOCAB},
    {"model.dim", "hidden_size", offsetof(struct model_config, dim), MAX_DIM},
    {"model.layers", "num_hidden_layers", offsetof(struct model_config, layers), MAX_LAYERS},
    {"model.heads", "num_attention_heads", offsetof(struct model_config, heads), MAX_HEADS},
    {"model.kv_heads", "num_key_value_heads", offsetof(struct model_config, kv_heads), MAX_HEADS},
    {"model.head_dim", "head_dim", offsetof(struct model_config, head_dim), MAX_HEAD_DIM},
    {"model.ffn", "intermediate_size", offsetof(struct model_config, ffn), MAX_FFN},
};

/* The switches, which config.json holds under "fullband". */
enum flag_kind { FLAG_MUST, FLAG_MAY, FLAG_BY_TYPE /* model_type says it */ };
struct flag_field {
    const char *json;
    size_t offset;
    enum flag_kind kind;
    int same; /* 1: weights of a model with it are of no use to one without */
};
static const struct flag_field flags[] = {
    {"feedback", offsetof(struct model_config, feedback), FLAG_MUST, 1},
    {"in_norm", offsetof(struct model_config, in_norm), FLAG_MUST, 1},
    {"gate_norm", offsetof(struct model_config, gate_norm), FLAG_MUST, 0},
    {"out_norm", offsetof(struct model_config, out_norm), FLAG_MUST, 0},
    {"doc_mask", offsetof(struct model_config, doc_mask), FLAG_MUST, 0},
    {"attn_gate", offsetof(struct model_config, attn_gate), FLAG_MAY, 1},
    {"qk_norm", offsetof(struct model_config, qk_norm), FLAG_BY_TYPE, 1},
};

/* Whole numbers under "fullband", 0 where absent. */
struct extra_field {
    const char *json;
    size_t offset;
    int max;
};
static const struct extra_field extras[] = {
    {"window", offsetof(struct model_config, window), MAX_WINDOW},
    {"full_every", offsetof(struct model_config, full_every), MAX_LAYERS},
};

/* The two architectures whose names our tensors have; they differ in QK-norm. */
static const struct {
    const char *type, *architecture;
} types[] = {{"llama", "LlamaForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"}}; /* by qk_norm */

#define COUNT(a) (sizeof(a) / sizeof *(a))

static int *int_at(struct model_config *c, size_t offset)
{
    return (int *)((char *)c + offset);
}

static int get_int(const struct model_config *c, size_t offset)
{
    return *(const int *)((const char *)c + offset);
}

int model_config_check(const struct model_config *c, struct err *e)
{
    for (size_t i = 0; i < COUNT(sizes); i++) {
        int v = get_int(c, sizes[i].offset);
        if (v < 1 || v > sizes[i].max)
            return err_set(
                e, ERR_INPUT, "%s: %d is out of range, 1 to %d", sizes[i].key, v, sizes[i].max);
    }
    for (size_t i = 0; i < COUNT(flags); i++) {
        int v = get_int(c, flags[i].offset);
        if (v != 0 && v != 1)
            return err_set(e, ERR_INPUT, "model.%s: %d is neither 0 nor 1", flags[i].json, v);
    }
    for (size_t i = 0; i < COUNT(extras); i++) {
        int v = get_int(c, extras[i].offset);
        if (v < 0 || v > extras[i].max)
            return err_set(e, ERR_INPUT, "model.%s: %d is out of range, 0 to %d", extras[i].json, v,
                extras[i].max);
    }
    if (c->heads % c->kv_heads)
        return err_set(e, ERR_INPUT, "model.heads: %d is not a multiple of model.kv_heads (%d)",
            c->heads, c->kv_heads);
    if (c->head_dim % 2)
        return err_set(e, ERR_INPUT,
            "model.head_dim: %d is odd; rotary embedding needs an even one", c->head_dim);
    if (!(c->norm_eps > 0 && c->norm_eps <= 0.1f))
        return err_set(e, ERR_INPUT, "model.norm_eps: %g is out of range, above 0 to 0.1",
            (double)c->norm_eps);
    if (!(c->rope_theta >= 1 && c->rope_theta <= 1e12))
        return err_set(
            e, ERR_INPUT, "model.rope_theta: %g is out of range, 1 to 1e12", c->rope_theta);
    if (!(c->residual_scale > 0 && c->residual_scale <= 4))
        return err_set(e, ERR_INPUT, "model.residual_scale: %g is out of range, above 0 to 4",
            (double)c->residual_scale);
    int64_t params = model_config_params(c);
    if (params > MAX_PARAMS)
        return err_set(e, ERR_INPUT, "model.dim: these sizes make %lld parameters, at most %lld",
            (long long)params, (long long)MAX_PARAMS);
    return 0;
}

int model_config_window(const struct model_config *c, int layer)
{
    return c->full_every && (layer + 1) % c->full_every == 0 ? 0 : c->window;
}

int64_t model_config_params(const struct model_config *c)
{
    int64_t d = c->dim, f = c->ffn;
    int64_t q = (int64_t)c->heads * c->head_dim, kv = (int64_t)c->kv_heads * c->head_dim;
    int64_t layer = d * (2 * q + 2 * kv) + 3 * d * f + 2 * d;
    layer += (c->qk_norm ? 2 * c->head_dim : 0) + (c->attn_gate ? q * d : 0);
    return c->vocab * d + c->layers * layer + d + (c->feedback ? 2 * d * d : 0);
}

/* How Qwen3 says what a window is. */
static void add_qwen3(const struct model_config *c, json_t *j)
{
    json_t *kinds = json_array();
    for (int l = 0; l < c->layers; l++)
        json_array_append_new(
            kinds, json_string(model_config_window(c, l) ? "sliding_attention" : "full_attention"));
    json_object_set_new(j, "layer_types", kinds);
    json_object_set_new(j, "use_sliding_window", json_boolean(c->window));
    json_object_set_new(j, "sliding_window", c->window ? json_integer(c->window) : json_null());
}

json_t *model_config_to_json(const struct model_config *c)
{
    json_t *own = json_pack(
        "{s:i, s:f}", "version", 1, "residual_scale", number_from_float(c->residual_scale));
    for (size_t i = 0; i < COUNT(flags); i++)
        if (flags[i].kind != FLAG_BY_TYPE)
            json_object_set_new(own, flags[i].json, json_boolean(get_int(c, flags[i].offset)));
    for (size_t i = 0; i < COUNT(extras); i++)
        json_object_set_new(own, extras[i].json, json_integer(get_int(c, extras[i].offset)));
    json_t *j = json_pack("{s:[s], s:s, s:s, s:s, s:b, s:b, s:b, s:f, s:f, s:f, s:o}",
        "architectures", types[c->qk_norm].architecture, "model_type", types[c->qk_norm].type,
        "hidden_act", "silu", "torch_dtype", "float32", "tie_word_embeddings", 1, "attention_bias",
        0, "mlp_bias", 0, "attention_dropout", 0.0, "rms_norm_eps", number_from_float(c->norm_eps),
        "rope_theta", c->rope_theta, "fullband", own);
    if (c->qk_norm)
        add_qwen3(c, j);
    for (size_t i = 0; i < COUNT(sizes); i++)
        json_object_set_new(j, sizes[i].json, json_integer(get_int(c, sizes[i].offset)));
    return j;
}

/* obj[key] as a number; where it is absent and `absent` is not NAN, that. */
static int read_number(
    const json_t *obj, const char *key, double absent, double *out, struct err *e)
{
    const json_t *v = json_object_get(obj, key);
    if (!v && !isnan(absent)) {
        *out = absent;
        return 0;
    }
    if (!json_is_number(v))
        return err_set(
            e, ERR_INPUT, "%s: %s, wanted a number", key, v ? "not a number" : "missing");
    *out = json_number_value(v);
    return 0;
}

static int read_sizes(const json_t *j, struct model_config *c, struct err *e)
{
    for (size_t i = 0; i < COUNT(sizes); i++) {
        const json_t *v = json_object_get(j, sizes[i].json);
        int *out = int_at(c, sizes[i].offset);
        if (!v && out == &c->kv_heads) { /* older files leave these two out */
            *out = c->heads;
            continue;
        }
        if (!v && out == &c->head_dim && c->heads > 0) {
            *out = c->dim / c->heads;
            continue;
        }
        if (!json_is_integer(v))
            return err_set(e, ERR_INPUT, "%s: %s, wanted an integer", sizes[i].json,
                v ? "not an integer" : "missing");
        json_int_t n = json_integer_value(v);
        if (n < 1 || n > sizes[i].max)
            return err_set(e, ERR_INPUT, "%s: %lld is out of range, 1 to %d", sizes[i].json,
                (long long)n, sizes[i].max);
        *out = (int)n;
    }
    return 0;
}

static int read_flags(const json_t *own, struct model_config *c, struct err *e)
{
    for (size_t i = 0; i < COUNT(flags); i++) {
        const json_t *v = json_object_get(own, flags[i].json);
        if (flags[i].kind == FLAG_BY_TYPE)
            continue;
        if (own && !json_is_boolean(v) && (v || flags[i].kind == FLAG_MUST))
            return err_set(e, ERR_INPUT, "fullband.%s: %s, wanted true or false", flags[i].json,
                v ? "not a boolean" : "missing");
        *int_at(c, flags[i].offset) = json_is_true(v);
    }
    return 0;
}

static int read_extras(const json_t *own, struct model_config *c, struct err *e)
{
    for (size_t i = 0; i < COUNT(extras); i++) {
        const json_t *v = json_object_get(own, extras[i].json);
        json_int_t n = json_integer_value(v);
        if (v && (!json_is_integer(v) || n < 0 || n > extras[i].max))
            return err_set(e, ERR_INPUT, "fullband.%s: wanted an integer, 0 to %d", extras[i].json,
                extras[i].max);
        *int_at(c, extras[i].offset) = (int)n;
    }
    return 0;
}

static int read_type(const json_t *j, struct model_config *c, struct err *e)
{
    const char *type = json_string_value(json_object_get(j, "model_type"));
    for (size_t i = 0; type && i < COUNT(types); i++)
        if (strcmp(type, types[i].type) == 0) {
            c->qk_norm = (int)i;
            return 0;
        }
    return err_set(e, ERR_UNSUPPORTED, "model_type: %s, wanted \"%s\" or \"%s\"",
        type ? type : "missing", types[0].type, types[1].type);
}

/* Refuses what this model does not compute: another activation, biases, an untied readout. */
static int read_fixed(const json_t *j, struct err *e)
{
    const char *act = json_string_value(json_object_get(j, "hidden_act"));
    if (!act || strcmp(act, "silu") != 0)
        return err_set(
            e, ERR_UNSUPPORTED, "hidden_act: %s, wanted \"silu\"", act ? act : "missing");
    if (json_is_true(json_object_get(j, "use_sliding_window")) && !json_object_get(j, "fullband"))
        return err_set(e, ERR_UNSUPPORTED,
            "use_sliding_window: true, wanted false; a window of ours is fullband.window");
    if (!json_is_true(json_object_get(j, "tie_word_embeddings")))
        return err_set(
            e, ERR_UNSUPPORTED, "tie_word_embeddings: not true; the readout is tied here");
    static const char *const off[] = {"attention_bias", "mlp_bias"};
    for (size_t i = 0; i < COUNT(off); i++) {
        const json_t *v = json_object_get(j, off[i]);
        if (v && !json_is_false(v))
            return err_set(
                e, ERR_UNSUPPORTED, "%s: not false; linear layers have no bias here", off[i]);
    }
    const json_t *scaling = json_object_get(j, "rope_scaling");
    if (scaling && !json_is_null(scaling))
        return err_set(e, ERR_UNSUPPORTED, "rope_scaling: wanted null");
    return 0;
}

int model_config_from_json(const json_t *j, struct model_config *c, struct err *e)
{
    *c = (struct model_config){0};
    if (!json_is_object(j))
        return err_set(e, ERR_INPUT, "config.json: not an object");
    const json_t *own = json_object_get(j, "fullband");
    if (own && !json_is_object(own))
        return err_set(e, ERR_INPUT, "fullband: not an object");
    double version = 1, eps = 0, scale = 1;
    int rc = read_type(j, c, e);
    if (rc == 0)
        rc = read_fixed(j, e);
    if (rc == 0)
        rc = read_sizes(j, c, e);
    if (rc == 0)
        rc = read_flags(own, c, e);
    if (rc == 0)
        rc = read_extras(own, c, e);
    if (rc == 0)
        rc = read_number(own, "version", 1, &version, e);
    if (rc == 0 && version != 1)
        rc = err_set(e, ERR_UNSUPPORTED, "fullband.version: %g, this build reads 1", version);
    if (rc == 0)
        rc = read_number(j, "rms_norm_eps", NAN, &eps, e);
    if (rc == 0)
        rc = read_number(j, "rope_theta", 10000, &c->rope_theta, e);
    if (rc == 0) /* a plain Llama does not scale its branches */
        rc = read_number(own, "residual_scale", 1, &scale, e);
    if (rc < 0)
        return rc;
    c->norm_eps = (float)eps;
    c->residual_scale = (float)scale;
    return model_config_check(c, e);
}

int model_config_load(const char *path, struct model_config *c, struct err *e)
{
    json_t *j;
    int rc = json_file_read(path, 1 << 20, &j, NULL, e);
    if (rc == 0 && (rc = model_config_from_json(j, c, e)) < 0)
        err_prefix(e, "%s", path);
    json_decref(j);
    return rc;
}

int model_config_continues(
    const struct model_config *from, const struct model_config *to, struct err *e)
{
    const struct {
        const char *key;
        double from, to;
    } reals[] = {{"model.norm_eps", (double)from->norm_eps, (double)to->norm_eps},
        {"model.residual_scale", (double)from->residual_scale, (double)to->residual_scale}};
    for (size_t i = 0; i < COUNT(sizes); i++)
        if (get_int(from, sizes[i].offset) != get_int(to, sizes[i].offset))
            return err_set(e, ERR_MISMATCH, "%s: %d, the checkpoint's model has %d", sizes[i].key,
                get_int(to, sizes[i].offset), get_int(from, sizes[i].offset));
    for (size_t i = 0; i < COUNT(flags); i++) {
        int a = get_int(from, flags[i].offset), b = get_int(to, flags[i].offset);
        int gains = flags[i].offset == offsetof(struct model_config, feedback) && b;
        if (a != b && flags[i].same && !gains)
            return err_set(e, ERR_MISMATCH, "model.%s: %s, the checkpoint's model has %s",
                flags[i].json, b ? "true" : "false", a ? "true" : "false");
    }
    for (size_t i = 0; i < COUNT(reals); i++)
        if (fabs(reals[i].from - reals[i].to) > 1e-6 * reals[i].to)
            return err_set(e, ERR_MISMATCH, "%s: %g, the checkpoint's model has %g", reals[i].key,
                reals[i].to, reals[i].from);
    return 0;
}
