#include "trainer/step_case.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

/* --- metadata --------------------------------------------------------------------------------- */

enum meta_kind { META_INT, META_FLAG, META_FLOAT, META_DOUBLE, META_MUST, META_IGNORED };

/* One metadata key: where it goes, or the only value that this build computes. */
struct meta_key {
    const char *name;
    enum meta_kind kind;
    int required;
    size_t offset;    /* into struct meta_values */
    const char *must; /* META_MUST: text of the only value supported */
};

struct meta_values {
    struct model_config model;
    int passes;
    double lambda, jitter;
};

#define AT(field) offsetof(struct meta_values, field)
static const struct meta_key meta_keys[] = {
    {"vocab", META_INT, 1, AT(model.vocab), NULL},
    {"dim", META_INT, 1, AT(model.dim), NULL},
    {"layers", META_INT, 1, AT(model.layers), NULL},
    {"heads", META_INT, 1, AT(model.heads), NULL},
    {"kv", META_INT, 1, AT(model.kv_heads), NULL},
    {"ffn", META_INT, 1, AT(model.ffn), NULL},
    {"hd", META_INT, 1, AT(model.head_dim), NULL},
    {"passes", META_INT, 1, AT(passes), NULL},
    {"eps", META_FLOAT, 1, AT(model.norm_eps), NULL},
    {"theta", META_DOUBLE, 1, AT(model.rope_theta), NULL},
    {"lambda", META_DOUBLE, 1, AT(lambda), NULL},
    {"jitter", META_DOUBLE, 0, AT(jitter), NULL},
    {"residual_scale", META_FLOAT, 0, AT(model.residual_scale), NULL},
    {"doc_mask", META_FLAG, 0, AT(model.doc_mask), NULL},
    {"in_norm", META_FLAG, 0, AT(model.in_norm), NULL},
    {"gate_norm", META_FLAG, 0, AT(model.gate_norm), NULL},
    {"out_norm", META_FLAG, 0, AT(model.out_norm), NULL},
    {"feed", META_MUST, 0, 0, "post"},
    {"embed_scale", META_MUST, 0, 0, "1.0"},
    {"qk_norm", META_FLAG, 0, AT(model.qk_norm), NULL},
    {"attn_gate", META_FLAG, 0, AT(model.attn_gate), NULL},
    {"window", META_INT, 0, AT(model.window), NULL},
    {"full_every", META_INT, 0, AT(model.full_every), NULL},
    {"seed", META_IGNORED, 0, 0, NULL},
};
#define META_COUNT (sizeof meta_keys / sizeof *meta_keys)

static int meta_number(const char *text, double *out)
{
    char *end;
    errno = 0;
    *out = strtod(text, &end);
    return *text && !*end && isfinite(*out) && errno == 0 ? 0 : -1;
}

static int meta_store(
    const struct meta_key *k, const char *text, struct meta_values *v, struct err *e)
{
    char *at = (char *)v + k->offset;
    double x = 0;
    if (k->kind == META_FLAG) {
        int on = strcmp(text, "True") == 0;
        if (!on && strcmp(text, "False") != 0)
            return err_set(
                e, ERR_INPUT, "metadata %s is \"%.40s\", right is True or False", k->name, text);
        *(int *)(void *)at = on;
        return 0;
    }
    if (meta_number(text, &x) < 0)
        return err_set(e, ERR_INPUT, "metadata %s is \"%.40s\", right is a number", k->name, text);
    if (k->kind == META_INT) {
        if (x != floor(x) || x < 0 || x > INT_MAX)
            return err_set(
                e, ERR_INPUT, "metadata %s is \"%.40s\", right is a whole number", k->name, text);
        *(int *)(void *)at = (int)x;
    } else if (k->kind == META_FLOAT)
        *(float *)(void *)at = (float)x;
    else
        *(double *)(void *)at = x;
    return 0;
}

/* One line that names every option of the file that this build does not compute. */
static int refuse_unsupported(const struct safetensors *st, struct err *e)
{
    struct buf list = BUF_INIT;
    for (size_t i = 0; i < META_COUNT; i++) {
        const struct meta_key *k = &meta_keys[i];
        const char *text = k->kind == META_MUST ? safetensors_meta(st, k->name) : NULL;
        if (text && strcmp(text, k->must) != 0)
            buf_printf(
                &list, "%s%s = %.40s (only %s)", list.len ? ", " : "", k->name, text, k->must);
    }
    int rc = list.len
                 ? err_set(e, ERR_UNSUPPORTED, "options this build does not compute: %s", list.data)
                 : 0;
    buf_release(&list);
    return rc;
}

static int meta_read(const struct safetensors *st, struct meta_values *v, struct err *e)
{
    memset(v, 0, sizeof *v);
    v->model.residual_scale = 1;
    v->model.feedback = safetensors_find(st, "w.feedback.w_u.weight") != NULL;
    int rc = refuse_unsupported(st, e);
    for (size_t i = 0; rc == 0 && i < META_COUNT; i++) {
        const struct meta_key *k = &meta_keys[i];
        const char *text = safetensors_meta(st, k->name);
        if (!text && k->required)
            return err_set(e, ERR_INPUT, "metadata has no \"%s\"", k->name);
        if (text && k->kind < META_MUST)
            rc = meta_store(k, text, v, e);
    }
    return rc;
}

/* --- tensors ---------------------------------------------------------------------------------- */

/* A copy of an input tensor of exactly this type and shape; *out stays NULL where it is empty. */
static int input_read(const struct safetensors *st, const char *name, enum st_dtype dtype, int ndim,
    const int64_t *shape, void **out, struct err *e)
{
    const struct st_tensor *t = safetensors_find(st, name);
    int same = t && t->dtype == dtype && t->ndim == ndim;
    if (!t)
        return err_set(e, ERR_INPUT, "has no tensor %s", name);
    for (int i = 0; same && i < ndim; i++)
        same = t->shape[i] == shape[i];
    if (!same) {
        struct buf want = BUF_INIT;
        for (int i = 0; i < ndim; i++)
            buf_printf(&want, "%s%lld", i ? ", " : "", (long long)shape[i]);
        int rc = err_set(
            e, ERR_INPUT, "tensor %s: right is %s (%s)", name, st_dtype_name(dtype), want.data);
        buf_release(&want);
        return rc;
    }
    if (t->bytes == 0)
        return 0;
    *out = mem_try_array(t->bytes, 1);
    if (!*out)
        return err_set(e, ERR_NOMEM, "no memory for tensor %s", name);
    memcpy(*out, t->data, t->bytes);
    return 0;
}

/* B and T come from in.tokens; all others must agree. */
static int batch_read(
    const struct safetensors *st, const struct meta_values *v, struct step_case *sc, struct err *e)
{
    const struct st_tensor *t = safetensors_find(st, "in.tokens");
    if (!t || t->ndim != 2 || t->shape[0] < 1 || t->shape[1] < 1 || t->shape[0] > INT_MAX ||
        t->shape[1] > INT_MAX / t->shape[0])
        return err_set(e, ERR_INPUT, "tensor in.tokens: right is I32 (rows, tokens), not empty");
    if (v->passes < 1 || v->passes > MODEL_MAX_PASSES)
        return err_set(
            e, ERR_INPUT, "metadata passes is %d, right is 1 to %d", v->passes, MODEL_MAX_PASSES);
    int64_t extra = v->passes - 1, b = t->shape[0], n = t->shape[1];
    int64_t rows[] = {b, n}, masks[] = {extra, b, n}, noise[] = {extra, b, n, v->model.dim};
    int given = extra > 0 && safetensors_find(st, "in.noise") != NULL;
    struct {
        const char *name;
        enum st_dtype dtype;
        int ndim, wanted;
        const int64_t *shape;
        void **out;
    } inputs[] = {
        {"in.tokens", ST_I32, 2, 1, rows, (void **)&sc->tokens},
        {"in.targets", ST_I32, 2, 1, rows, (void **)&sc->targets},
        {"in.doc_starts", ST_U8, 2, 1, rows, (void **)&sc->doc_starts},
        {"in.masks", ST_U8, 3, extra > 0, masks, (void **)&sc->masks},
        {"in.noise", ST_F32, 4, given, noise, (void **)&sc->noise},
    };
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        int rc = !inputs[i].wanted ? 0
                                   : input_read(st, inputs[i].name, inputs[i].dtype, inputs[i].ndim,
                                         inputs[i].shape, inputs[i].out, e);
        if (rc < 0)
            return rc;
    }
    if (v->jitter != 0 && extra > 0 && !given)
        return err_set(
            e, ERR_INPUT, "metadata jitter is %g, but there is no tensor in.noise", v->jitter);
    sc->batch = (struct model_batch){
        .batch = (int)b,
        .seq = (int)n,
        .tokens = sc->tokens,
        .targets = sc->targets,
        .doc_starts = sc->doc_starts,
        .passes = v->passes,
        .masks = sc->masks,
        .noise = sc->noise,
    };
    for (int64_t i = 0; i < b * n; i++)
        sc->counted += sc->targets[i] != -1;
    return 0;
}

int step_case_read(const struct safetensors *st, struct step_case *out, struct err *e)
{
    struct meta_values v;
    memset(out, 0, sizeof *out);
    int rc = meta_read(st, &v, e);
    if (rc == 0)
        rc = batch_read(st, &v, out, e);
    if (rc < 0) {
        step_case_release(out);
        return rc;
    }
    out->model = v.model;
    out->lambda = (float)v.lambda;
    return 0;
}

int step_case_check(const struct step_case *sc, struct err *e)
{
    int rc = model_config_check(&sc->model, e);
    if (rc < 0)
        return rc;
    if (sc->counted == 0)
        return err_set(e, ERR_INPUT, "tensor in.targets counts no target: all are -1");
    for (int64_t i = 0; sc->noise && i < (int64_t)(sc->batch.passes - 1) * sc->batch.batch *
                                             sc->batch.seq * sc->model.dim;
         i++)
        if (!isfinite(sc->noise[i]))
            return err_set(
                e, ERR_INPUT, "tensor in.noise: element %lld is not finite", (long long)i);
    return model_batch_check(&sc->model, &sc->batch, e);
}

void step_case_release(struct step_case *sc)
{
    free(sc->tokens);
    free(sc->targets);
    free(sc->masks);
    free(sc->doc_starts);
    free(sc->noise);
    memset(sc, 0, sizeof *sc);
}
