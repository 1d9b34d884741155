/* Runs a golden case, and compares. */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/mem.h"
#include "trainer/step_case.h"

struct keeper {
    const struct step_case *sc;
    struct step_result *r;
};

/* Keeps copies of one pass's states and logits. */
static int keep_pass(void *ctx, const struct model_pass *p)
{
    struct keeper *k = ctx;
    size_t n = (size_t)k->sc->batch.batch * (size_t)k->sc->batch.seq;
    size_t hidden = n * (size_t)k->sc->model.dim, logits = n * (size_t)k->sc->model.vocab;
    float *h = mem_try_array(hidden, sizeof *h), *l = mem_try_array(logits, sizeof *l);
    k->r->hidden[p->pass - 1] = h;
    k->r->logits[p->pass - 1] = l;
    if (!h || !l)
        return ERR_NOMEM;
    memcpy(h, p->hidden, hidden * sizeof *h);
    memcpy(l, p->logits, logits * sizeof *l);
    return 0;
}

/* L = L_1 + λ · mean(L_2 … L_K), each a mean over the counted targets. */
static void result_losses(struct step_result *r, const struct step_case *sc, const double *sums)
{
    double extra = 0, counted = (double)sc->counted;
    for (int k = 0; k < r->passes; k++) {
        r->losses[k] = (float)(sums[k] / counted);
        extra += k ? sums[k] / counted : 0;
    }
    r->total = (float)(sums[0] / counted +
                       (r->passes > 1 ? (double)sc->lambda * extra / (r->passes - 1) : 0));
}

/* The file's weights; read before anything of the model's size is taken, so that sizes which only
 * the metadata claims are refused here. */
static int weights_read(
    const struct weight_table *t, const struct safetensors *st, float **out, struct err *e)
{
    *out = mem_try_array((size_t)t->total, sizeof **out);
    if (!*out)
        return err_set(e, ERR_NOMEM, "no memory for the weights");
    return weights_load(t, st, "w.", 0, *out, e);
}

static int model_run(
    struct model *m, const struct step_case *sc, struct step_result *r, struct err *e)
{
    struct device *d = model_device(m);
    struct keeper keeper = {sc, r};
    size_t grads = (size_t)r->table.total;
    double *sums = mem_array((size_t)r->passes, sizeof *sums);
    int rc =
        model_forward(m, &sc->batch, MODEL_WANT_HIDDEN | MODEL_WANT_LOGITS, keep_pass, &keeper);
    if (rc < 0)
        err_set(e, rc, "no memory for the states and logits of every pass");
    else {
        model_train(m, &sc->batch, sc->lambda, 1.0f / (float)sc->counted, sums);
        d->ops->download(d, r->grads, model_grads(m), grads * sizeof(float));
        rc = d->ops->sync(d, e);
        result_losses(r, sc, sums);
    }
    free(sums);
    return rc;
}

static void add(struct step_result *r, const char *name, int index, int ndim, const int64_t *shape,
    const float *data)
{
    struct st_tensor *t = &r->tensors[r->count];
    char *text = r->names[r->count++];
    if (index < 0)
        snprintf(text, sizeof *r->names, "%s", name);
    else
        snprintf(text, sizeof *r->names, "%s.%d", name, index);
    *t = (struct st_tensor){
        .name = text, .dtype = ST_F32, .ndim = ndim, .data = data, .bytes = sizeof(float)};
    for (int i = 0; i < ndim; i++) {
        t->shape[i] = shape[i];
        t->bytes *= (size_t)shape[i];
    }
}

static void list_tensors(struct step_result *r, const struct step_case *sc)
{
    int64_t one[] = {1}, passes[] = {r->passes};
    int64_t hidden[] = {sc->batch.batch, sc->batch.seq, sc->model.dim};
    int64_t logits[] = {sc->batch.batch, sc->batch.seq, sc->model.vocab};
    add(r, "out.losses", -1, 1, passes, r->losses);
    add(r, "out.total", -1, 1, one, &r->total);
    for (int k = 0; k < r->passes; k++) {
        add(r, "out.hidden", k, 3, hidden, r->hidden[k]);
        add(r, "out.logits", k, 3, logits, r->logits[k]);
    }
    weights_as_tensors(&r->table, r->grads, "g.", r->tensors + r->count, r->names + r->count);
    r->count += r->table.count;
}

static int result_new(const struct step_case *sc, struct step_result *r, struct err *e)
{
    size_t k = (size_t)sc->batch.passes;
    int rc = weight_table_make(&sc->model, &r->table, e);
    if (rc < 0)
        return rc;
    size_t tensors = 2 + 2 * k + (size_t)r->table.count;
    r->passes = sc->batch.passes;
    r->losses = mem_array(k, sizeof *r->losses);
    r->hidden = mem_array(k, sizeof *r->hidden);
    r->logits = mem_array(k, sizeof *r->logits);
    r->tensors = mem_array(tensors, sizeof *r->tensors);
    r->names = mem_array(tensors, sizeof *r->names);
    r->grads = mem_try_array((size_t)r->table.total, sizeof *r->grads);
    return r->grads ? 0 : err_set(e, ERR_NOMEM, "no memory for the gradients");
}

int step_run(struct device *d, const struct step_case *sc, const struct safetensors *st,
    struct step_result *out, struct err *e)
{
    struct model_limits lim = {.batch = sc->batch.batch,
        .seq = sc->batch.seq,
        .passes = sc->batch.passes,
        .train = 1,
        .prefix_sharing = 1};
    struct model *m = NULL;
    float *weights = NULL;
    memset(out, 0, sizeof *out);
    int rc = result_new(sc, out, e);
    if (rc == 0)
        rc = weights_read(&out->table, st, &weights, e);
    if (rc == 0)
        rc = model_new(d, &sc->model, &lim, &m, e);
    if (rc == 0) {
        d->ops->upload(d, model_params(m), weights, (size_t)out->table.total * sizeof *weights);
        rc = model_run(m, sc, out, e);
    }
    model_free(&m);
    free(weights);
    if (rc == 0)
        list_tensors(out, sc);
    else
        step_result_release(out);
    return rc;
}

void step_result_release(struct step_result *r)
{
    for (int k = 0; k < r->passes; k++) {
        free(r->hidden[k]);
        free(r->logits[k]);
    }
    free(r->hidden);
    free(r->logits);
    free(r->losses);
    free(r->grads);
    free(r->tensors);
    free(r->names);
    weight_table_release(&r->table);
    memset(r, 0, sizeof *r);
}

int step_result_write(const struct step_result *r, const char *path, struct err *e)
{
    static const char *const meta[] = {"program", "fb-step", NULL};
    char *tmp = mem_printf("%s.tmp", path);
    int rc, fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        rc = err_errno(e, "%s", tmp);
    else {
        rc = safetensors_write(fd, tmp, r->tensors, r->count, meta, e);
        if (rc == 0 && fsync(fd) < 0)
            rc = err_errno(e, "%s", tmp);
        close(fd);
        if (rc == 0)
            rc = fs_rename_durable(tmp, path, e);
        if (rc < 0)
            unlink(tmp);
    }
    free(tmp);
    return rc;
}

/* --- comparing -------------------------------------------------------------------------------- */

static const struct st_tensor *ours_called(const struct step_result *r, const char *name)
{
    for (int i = 0; i < r->count; i++)
        if (strcmp(r->tensors[i].name, name) == 0)
            return &r->tensors[i];
    return NULL;
}

static double relative_error(const struct st_tensor *ours, const struct st_tensor *theirs)
{
    double diff = 0, norm = 0;
    const float *a = ours->data;
    if (theirs->dtype != ST_F32 || theirs->bytes != ours->bytes)
        return NAN;
    for (size_t i = 0; i < ours->bytes / sizeof *a; i++) {
        float b;
        memcpy(&b, (const char *)theirs->data + i * sizeof b, sizeof b);
        diff += ((double)a[i] - (double)b) * ((double)a[i] - (double)b);
        norm += (double)b * (double)b;
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

int step_compare(const struct step_result *r, const struct safetensors *st,
    struct step_comparison **out, struct err *e)
{
    struct step_comparison *list = mem_array((size_t)safetensors_count(st), sizeof *list);
    int count = 0;
    for (int i = 0; i < safetensors_count(st); i++) {
        const struct st_tensor *theirs = safetensors_at(st, i);
        if (strncmp(theirs->name, "out.", 4) != 0 && strncmp(theirs->name, "g.", 2) != 0)
            continue;
        const struct st_tensor *ours = ours_called(r, theirs->name);
        double error = ours ? relative_error(ours, theirs) : NAN;
        list[count++] = (struct step_comparison){theirs->name, error, error <= STEP_TOLERANCE};
    }
    if (count == 0) {
        free(list);
        return err_set(e, ERR_INPUT, "has no out.* or g.* tensors to compare with");
    }
    *out = list;
    return count;
}
