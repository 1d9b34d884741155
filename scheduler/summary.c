#include "scheduler/summary.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/fs.h"
#include "scheduler/status.h"

int summary_write(const struct scheduler *s, struct err *e)
{
    const struct plan *p = &s->run->plan;
    char name[32];
    checkpoint_name(s->commits.last, name);
    json_t *j = json_pack("{s:s, s:I, s:I, s:s, s:s, s:s, s:I, s:I, s:o, s:o}", "name",
        s->run->config.run.name, "steps", (json_int_t)s->commits.last, "tokens",
        (json_int_t)status_tokens(s, s->commits.last), "checkpoint", name, "plan_hash", p->hash,
        "chain", s->commits.cursor.chain, "run_epoch", (json_int_t)s->epoch, "finished_at",
        (json_int_t)time(NULL), "pass_losses", status_pass_losses(s), "evals",
        jobs_table(&s->jobs));
    char *text = j ? json_dumps(j, JSON_INDENT(1)) : NULL,
         *path = rundir_path(s->run, "summary.json");
    json_decref(j);
    int rc = text ? fs_write_atomic(path, text, strlen(text), e)
                  : err_set(e, ERR_INPUT, "%s: a value is not JSON", path);
    free(text);
    free(path);
    return rc;
}
