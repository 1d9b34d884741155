#include "evaluator/snapshot.h"

#include <stdlib.h>
#include <string.h>

#include "common/checkpoint.h"
#include "common/fs.h"
#include "common/mem.h"

static int read_config(const char *dir, struct model_config *out, struct err *e)
{
    char *path = mem_printf("%s/config.json", dir);
    int rc = model_config_load(path, out, e);
    free(path);
    return rc;
}

static int read_weights(const char *dir, struct model *m, struct err *e)
{
    const struct weight_table *t = model_weights(m);
    struct device *d = model_device(m);
    char *path = mem_printf("%s/model.safetensors", dir);
    struct safetensors *st = NULL;
    float *host = mem_try_array((size_t)t->total, sizeof *host);
    int rc = host ? 0 : err_set(e, ERR_NOMEM, "%s: no memory for its weights", path);
    if (rc == 0)
        rc = safetensors_open(path, &st, e);
    if (rc == 0 && weights_load(t, st, "", 0, host, e) < 0)
        rc = err_prefix(e, "%s", path);
    if (rc == 0)
        d->ops->upload(d, model_params(m), host, (size_t)t->total * sizeof *host);
    safetensors_close(&st);
    free(host);
    free(path);
    return rc;
}

static int read_tokenizer(const char *dir, struct snapshot *s, struct err *e)
{
    char *path = mem_printf("%s/tokenizer.json", dir);
    int rc = tokenizer_load(path, &s->tokenizer, e);
    if (rc == 0 && tokenizer_vocab(s->tokenizer) != s->config.vocab)
        rc = err_set(e, ERR_MISMATCH, "%s: has %d tokens, the model's vocabulary is %d", path,
            tokenizer_vocab(s->tokenizer), s->config.vocab);
    free(path);
    return rc;
}

static int verify(const char *dir, struct snapshot *s, struct err *e)
{
    char *path = mem_printf("%s/MANIFEST.json", dir);
    int rc = 0;
    s->step = -1;
    if (fs_exists(path))
        rc = checkpoint_verify(dir, 1, s->sha256, &s->step, e);
    free(path);
    return rc;
}

int snapshot_open(const char *dir, int threads, const struct model_limits *limits,
    struct snapshot *out, struct err *e)
{
    struct snapshot s = {.dir = mem_strdup(dir)};
    int rc = verify(dir, &s, e);
    if (rc == 0)
        rc = read_config(dir, &s.config, e);
    if (rc == 0)
        rc = read_tokenizer(dir, &s, e);
    if (rc == 0)
        rc = device_cpu_new(threads, &s.device, e);
    if (rc == 0)
        rc = model_new(s.device, &s.config, limits, &s.model, e);
    if (rc == 0)
        rc = read_weights(dir, s.model, e);
    if (rc < 0) {
        snapshot_release(&s);
        return rc;
    }
    *out = s;
    return 0;
}

void snapshot_release(struct snapshot *s)
{
    if (s->model)
        model_free(&s->model);
    if (s->device)
        device_free(&s->device);
    if (s->tokenizer)
        tokenizer_free(&s->tokenizer);
    free(s->dir);
    memset(s, 0, sizeof *s);
}
