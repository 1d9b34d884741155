/*
 * The progress of a long job on stderr: one line redrawn in place on a terminal, else a plain line
 * every few seconds.
 *
 *     struct progress p;
 *     progress_start(&p, "ingest", total, "MB", 1e6);
 *     progress_at(&p, done);          // as often as you like: it draws ten times a second at most
 *     progress_end(&p);
 *
 *     ingest   43% ███████▌            8.6/20.0 MB   4.1 MB/s  ETA 0:03
 *
 * For mains. One thread.
 */
#ifndef COMMON_PROGRESS_H
#define COMMON_PROGRESS_H

#include <stdint.h>

struct progress {
    const char *what, *unit;
    uint64_t total, done; /* total 0: not known */
    double scale;         /* so many of `done` are one unit */
    double started, drawn;
    int terminal, drew;
};

void progress_start(
    struct progress *p, const char *what, uint64_t total, const char *unit, double scale);
void progress_at(struct progress *p, uint64_t done);
/* Draws the last state and ends the line. */
void progress_end(struct progress *p);

#endif
