#include "common/plan_init.h"

#include <stdlib.h>
#include <string.h>

#include "common/checkpoint.h"
#include "common/field.h"

int plan_has_init(const struct plan *p)
{
    return strcmp(p->c.init_from, PLAN_INIT_NONE) != 0;
}

static int check_tokenizer(const char *dir, const char *want, struct err *e)
{
    char *path = mem_printf("%s/tokenizer.json", dir), sha[SHA256_HEX];
    int rc = hash_sha256_file(path, sha, NULL, e);
    if (rc == 0 && strcmp(sha, want) != 0)
        rc = err_set(e, ERR_MISMATCH, "%s: has hash %s, data.tokenizer %s", path, sha, want);
    free(path);
    return rc;
}

json_t *plan_init_json(const char *dir, const char *tokenizer_sha256, struct err *e)
{
    char sha[SHA256_HEX];
    int64_t step = 0;
    int rc = checkpoint_verify(dir, 0, sha, &step, e);
    if (rc == 0)
        rc = check_tokenizer(dir, tokenizer_sha256, e);
    if (rc == 0)
        return json_pack("{s:s, s:I}", "manifest_sha256", sha, "step", (json_int_t)step);
    err_prefix(e, "train.init_from");
    return NULL;
}

int plan_init_read(const json_t *entry, struct plan *p, struct err *e)
{
    if (!entry && !plan_has_init(p))
        return 0;
    if (!entry || !plan_has_init(p))
        return err_set(e, ERR_INPUT, "init: must be there exactly if train.init_from names one");
    int rc = field_sha256(entry, "manifest_sha256", p->init_sha256, e);
    return rc < 0 ? err_prefix(e, "init") : 0;
}

int plan_init_verify(const struct plan *p, int deep, struct model_config *from, struct err *e)
{
    const char *dir = p->c.init_from;
    char sha[SHA256_HEX];
    int64_t step;
    char *path = mem_printf("%s/config.json", dir);
    int rc = checkpoint_verify(dir, deep, sha, &step, e);
    if (rc == 0 && strcmp(sha, p->init_sha256) != 0)
        rc = err_set(e, ERR_MISMATCH, "%s: its MANIFEST.json has hash %s, the plan's %s", dir, sha,
            p->init_sha256);
    if (rc == 0)
        rc = model_config_load(path, from, e);
    if (rc == 0 && (rc = model_config_continues(from, &p->c.model, e)) < 0)
        err_prefix(e, "%s", dir);
    free(path);
    return rc < 0 ? err_prefix(e, "train.init_from") : 0;
}
