/*
 * What a long command shows on stderr: on a terminal a block of lines that is redrawn in place,
 * with messages above it; elsewhere plain lines.
 */
#ifndef OPS_SCREEN_H
#define OPS_SCREEN_H

#include "common/mem.h"
#include "ops/view.h"

struct screen {
    int terminal; /* 1: redraw in place */
    int drawn;    /* lines of the block that is on the terminal now */
    int64_t told; /* evaluations up to this step have had their line */
    double next;  /* when it is time to draw again, clock_seconds() */
};

void screen_start(struct screen *s);

/* A line of its own, above the block. */
void screen_say(struct screen *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Draws the view when its time has come: every half second, or a line every 10 s. */
void screen_draw(struct screen *s, const struct view *v);

/* Takes the block away. */
void screen_clear(struct screen *s);

#endif
