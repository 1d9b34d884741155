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

/* Writes the block, each line cut at the terminal's width so that its height is known. */
static void draw_block(struct screen *s, const char *text, int width)
{
    screen_clear(s);
    while (*text) {
        const char *end = strchr(text, '\n');
        int n = end ? (int)(end - text) : (int)strlen(text);
        fprintf(stderr, "%.*s\n", n < width ? n : width - 1, text);
        s->drawn++;
        text += n + (end != NULL);
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
        view_print_line(v, &text);
        fprintf(stderr, "%s\n", text.data);
    }
    fflush(stderr);
    buf_release(&text);
}
