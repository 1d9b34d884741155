#include "trainer/bench_peer.h"

#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>
#include <sys/wait.h>

#include "common/config.h"
#include "common/mem.h"

/* All that the command prints, at most a little. */
static void read_output(FILE *f, struct buf *text)
{
    char part[4096];
    size_t n;
    while ((n = fread(part, 1, sizeof part, f)) > 0)
        if (text->len < 1 << 16)
            buf_add(text, part, n);
}

static int parse_steps(const struct buf *text, struct bench_steps *out, struct err *e)
{
    json_error_t why;
    json_int_t count, peak;
    json_t *j = json_loadb(text->data ? text->data : "", text->len, JSON_DISABLE_EOF_CHECK, &why);
    *out = (struct bench_steps){0};
    int bad =
        !j || json_unpack(j, "{s:I, s:F, s:F, s:F, s:I, s:F, s:F}", "steps", &count, "median_s",
                  &out->median, "best_s", &out->best, "cpu_s", &out->cpu, "peak_bytes", &peak,
                  "first_loss", &out->first_loss, "last_loss", &out->last_loss) < 0;
    json_decref(j);
    if (bad)
        return err_set(e, ERR_INPUT, "the peer printed \"%.80s\", expected its JSON line",
            text->data ? text->data : "");
    out->count = (int)count;
    out->peak_bytes = (size_t)peak;
    return 0;
}

int bench_peer_run(const char *command, const struct bench_config *b, struct bench_passes passes,
    const struct bench_effort *effort, struct bench_steps *out, struct err *e)
{
    struct buf text = BUF_INIT;
    char *line = mem_printf("%s --dim %d --layers %d --heads %d --ffn %d --vocab %d --seq %d "
                            "--batch %d --passes %d --threads %d --seconds %g --precision %s",
        command, b->dim, b->layers, b->heads, b->ffn, b->vocab, b->seq, b->batch, passes.count,
        effort->threads, effort->seconds, precision_name((int)passes.precision));
    FILE *f = popen(line, "r");
    free(line);
    if (!f)
        return err_errno(e, "peer");
    read_output(f, &text);
    int status = pclose(f), rc;
    if (status != 0)
        rc = err_set(e, ERR_STATE, "the peer ended with status %d",
            WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    else
        rc = parse_steps(&text, out, e);
    buf_release(&text);
    return rc;
}
