#include "ops/history.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "common/mem.h"

#define READ_BYTES     (1 << 16)
#define MAX_LINE_BYTES (1 << 20)

static void trend_add(struct trend *t, double x)
{
    t->recent[t->count % HISTORY_WINDOW] = x;
    if (t->count == 0)
        t->first = x;
    t->count++;
}

double trend_now(const struct trend *t)
{
    int n = t->count < HISTORY_WINDOW ? (int)t->count : HISTORY_WINDOW;
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += t->recent[i];
    return n ? sum / n : NAN;
}

void history_start(struct history *h, const struct plan *plan)
{
    memset(h, 0, sizeof *h);
    h->plan = plan;
    for (int64_t s = 0; s < plan->c.train.steps; s++)
        h->to_go[plan_passes(plan, s)]++;
}

/* Moves to `step` steps done, forwards or back. */
static void move_to(struct history *h, int64_t step)
{
    while (h->step < step)
        h->to_go[plan_passes(h->plan, h->step++)]--;
    while (h->step > step)
        h->to_go[plan_passes(h->plan, --h->step)]++;
}

static double number(const json_t *j, const char *key)
{
    return json_number_value(json_object_get(j, key)); /* 0 where absent */
}

int history_take(struct history *h, const json_t *j)
{
    const json_t *step = json_object_get(j, "step"), *losses = json_object_get(j, "losses");
    size_t n = json_array_size(losses);
    if (!json_is_integer(step) || n == 0 || n > CONFIG_MAX_PASSES)
        return 0;
    int64_t s = json_integer_value(step);
    if (s < 0 || s >= h->plan->c.train.steps)
        return 0;
    move_to(h, s + 1);
    h->passes = (int)n;
    h->lr = number(j, "lr");
    for (size_t k = 0; k < n; k++) {
        const json_t *loss = json_array_get(losses, k);
        if (json_is_number(loss)) /* null: it was not finite */
            trend_add(&h->loss[k + 1], json_number_value(loss));
    }
    double seconds = number(j, "seconds") + number(j, "wait_seconds"), tokens = number(j, "tokens");
    h->tokens += tokens > 0 ? (uint64_t)tokens : 0;
    h->seconds += seconds;
    if (seconds > 0) {
        trend_add(&h->step_seconds[n], seconds);
        trend_add(&h->rate, tokens / seconds);
    }
    return 1;
}

/* Takes every complete line of `text`; returns the bytes they fill. */
static size_t take_lines(struct history *h, const char *text, size_t n)
{
    size_t done = 0;
    const char *end;
    while ((end = memchr(text + done, '\n', n - done))) {
        size_t line = (size_t)(end - text) - done;
        json_t *j = json_loadb(text + done, line, 0, NULL);
        history_take(h, j);
        json_decref(j);
        done += line + 1;
    }
    return done;
}

int history_read(struct history *h, const char *path, struct err *e)
{
    struct buf b = BUF_INIT;
    int rc = 0, fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? 0 : err_errno(e, "%s", path);
    for (;;) {
        buf_reserve(&b, READ_BYTES);
        ssize_t got = pread(fd, b.data + b.len, READ_BYTES, h->offset + (int64_t)b.len);
        if (got < 0)
            rc = err_errno(e, "%s", path);
        if (got <= 0)
            break;
        b.len += (size_t)got;
        size_t used = take_lines(h, b.data, b.len);
        if (used == 0 && b.len > MAX_LINE_BYTES) {
            rc = err_set(e, ERR_CORRUPT, "%s: byte %lld: a line over %d bytes", path,
                (long long)h->offset, MAX_LINE_BYTES);
            break;
        }
        memmove(b.data, b.data + used, b.len - used);
        b.len -= used;
        h->offset += (int64_t)used;
    }
    close(fd);
    buf_release(&b);
    return rc;
}

double history_eta(const struct history *h)
{
    double known = NAN, eta = 0;
    int known_passes = 1;
    for (int k = 1; k <= CONFIG_MAX_PASSES; k++) {
        double seconds = trend_now(&h->step_seconds[k]);
        /* Not measured yet: each pass costs about what a pass of a shorter step does. */
        if (isnan(seconds))
            seconds = known * k / known_passes;
        else
            known = seconds, known_passes = k;
        if (h->to_go[k])
            eta += seconds * (double)h->to_go[k];
    }
    return eta;
}
