#include "common/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"

#define BAR_CELLS     20
#define DRAW_SECONDS  0.1
#define PLAIN_SECONDS 5.0

static void draw_bar(double share, char *out)
{
    /* eighths of a cell */
    static const char *const part[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    int eighths = (int)(share * BAR_CELLS * 8), cells = eighths / 8;
    out[0] = 0;
    for (int i = 0; i < cells; i++)
        strcat(out, "█");
    strcat(out, part[eighths % 8]);
    for (int i = cells + (eighths % 8 != 0); i < BAR_CELLS; i++)
        strcat(out, " ");
}

static void draw(struct progress *p, double now)
{
    char line[512], bar[BAR_CELLS * 3 + 1], eta[32] = "";
    double seconds = now - p->started, rate = seconds > 0 ? (double)p->done / seconds : 0;
    int n;
    if (p->total) {
        double share = p->done < p->total ? (double)p->done / (double)p->total : 1;
        double left = rate > 0 && p->done < p->total ? (double)(p->total - p->done) / rate : 0;
        draw_bar(share, bar);
        if (left < 360000)
            snprintf(eta, sizeof eta, "  ETA %d:%02d", (int)left / 60, (int)left % 60);
        n = snprintf(line, sizeof line, "%-8s %3.0f%% %s %.1f/%.1f %s  %.1f %s/s%s", p->what,
            100 * share, p->terminal ? bar : "", (double)p->done / p->scale,
            (double)p->total / p->scale, p->unit, rate / p->scale, p->unit, eta);
    } else {
        n = snprintf(line, sizeof line, "%-8s %.1f %s  %.1f %s/s", p->what,
            (double)p->done / p->scale, p->unit, rate / p->scale, p->unit);
    }
    if (n >= (int)sizeof line)
        n = (int)sizeof line - 1;
    fprintf(stderr, p->terminal ? "\r%.*s\x1b[K" : "%.*s\n", n, line);
    fflush(stderr);
    p->drawn = now;
    p->drew = 1;
}

void progress_start(
    struct progress *p, const char *what, uint64_t total, const char *unit, double scale)
{
    *p = (struct progress){.what = what,
        .unit = unit,
        .total = total,
        .scale = scale,
        .started = clock_seconds(),
        .terminal = isatty(STDERR_FILENO)};
    p->drawn = p->started;
}

void progress_at(struct progress *p, uint64_t done)
{
    double now = clock_seconds();
    p->done = done;
    if (now - p->drawn >= (p->terminal ? DRAW_SECONDS : PLAIN_SECONDS))
        draw(p, now);
}

void progress_end(struct progress *p)
{
    if (!p->drew && !p->terminal)
        return; /* over before the first plain line was due */
    draw(p, clock_seconds());
    if (p->terminal)
        fputc('\n', stderr);
}
