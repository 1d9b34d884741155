#include "ops/screen.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "common/clock.h"

#define DRAW_SECONDS 0.5
#define LINE_SECONDS 10.0
#define USUAL_WIDTH  80

void screen_start(struct screen *s)
{
    memset(s, 0, sizeof *s);
    s->terminal = isatty(STDERR_FILENO);
    s->told = -1;
}

static int screen_width(void)
{
    struct winsize w;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &w) < 0 || w.ws_col < 20)
        return USUAL_WIDTH;
    return w.ws_col;
}

void screen_clear(struct screen *s)
{
    if (s->drawn)
        fprintf(stderr, "\033[%dA\033[J", s->drawn);
    s->drawn = 0;
}

void screen_say(struct screen *s, const char *fmt, ...)
{
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    screen_clear(s);
    fprintf(stderr, "%s\n", text);
    s->next = 0;
}

/* The block in one write, each line cut at the terminal's width so that its height is known. */
static void draw_block(struct screen *s, const char *text, int width)
{
    struct buf out = BUF_INIT;
    if (s->drawn)
        buf_printf(&out, "\033[%dA", s->drawn);
    s->drawn = 0;
    while (*text) {
        const char *end = strchr(text, '\n');
        int n = end ? (int)(end - text) : (int)strlen(text);
        buf_printf(&out, "%.*s\033[K\n", n < width ? n : width - 1, text);
        s->drawn++;
        text += n + (end != NULL);
    }
    buf_add_str(&out, "\033[J");
    fwrite(out.data, 1, out.len, stderr);
    buf_release(&out);
}

/* Without a table on the screen each evaluation is told once, when it is complete. */
static void tell_evaluations(struct screen *s, const struct view *v)
{
    for (int i = 0; i < v->evals.count; i++) {
        const struct eval_row *r = &v->evals.rows[i];
        if (r->step > s->told && eval_row_complete(r, &v->run->config)) {
            struct buf text = BUF_INIT;
            eval_row_print(r, &text);
            fprintf(stderr, "validation at %s\n", text.data);
            buf_release(&text);
            s->told = r->step;
        }
    }
}

void screen_draw(struct screen *s, const struct view *v)
{
    struct buf text = BUF_INIT;
    double now = clock_seconds();
    if (now < s->next)
        return;
    s->next = now + (s->terminal ? DRAW_SECONDS : LINE_SECONDS);
    if (s->terminal) {
        int width = screen_width();
        view_print_live(v, width, &text);
        draw_block(s, text.data, width);
    } else {
        tell_evaluations(s, v);
        view_print_line(v, &text);
        fprintf(stderr, "%s\n", text.data);
    }
    fflush(stderr);
    buf_release(&text);
}
