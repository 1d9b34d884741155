/*
 * The process and its system: its standard streams, how it learns that it should stop, and how many
 * cores it has.
 *
 * A program may be started with standard input, output or error closed. The next file it opens then
 * takes the number, and what is meant for the user would be written into a shard. Every main()
 * begins with process_open_streams().
 *
 * A daemon polls a descriptor; call process_signal_fd() before any thread starts, so that all of
 * them inherit the mask. A program without a poll loop calls process_catch_stop() and asks
 * process_stopped() now and then.
 */
#ifndef COMMON_PROCESS_H
#define COMMON_PROCESS_H

#include "common/err.h"

/* Gives the streams that are closed to /dev/null, such that using them fails as before. */
void process_open_streams(void);
/* Writes out standard output; an error when any of it was lost (a full disk, a closed stream). */
int process_flush_output(struct err *e);

/* Blocks SIGTERM and SIGINT; *fd, not blocking and the caller's to close, tells of them (−1 on
 * failure). A broken pipe becomes an error code. */
int process_signal_fd(int *fd, struct err *e);
/* The number of a signal that arrived there, 0 where none did. */
int process_signal_take(int fd);

void process_catch_stop(void);
int process_stopped(void); /* 1 once SIGTERM or SIGINT came */

/* Cores that this process may use, at least 1. */
int process_cores(void);

#endif
