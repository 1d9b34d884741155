/*
 * Logs: logfmt on stderr, one line an event. Metrics are not logs.
 *
 *     log_info("checkpoint written", "step=%u bytes=%zu", step, bytes);
 *  →  ts=2026-01-02T03:04:05.678Z level=info daemon=trainer rank=0 msg="checkpoint written" step=…
 *
 * Only daemons and mains log; libraries return errors. Thread-safe: one write a line.
 */
#ifndef COMMON_LOG_H
#define COMMON_LOG_H

#include <stdint.h>

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

/* Sets the identity printed in each line; rank < 0 leaves it out. */
void log_init(const char *daemon, int rank);
void log_set_level(enum log_level min);

/*
 * fields is a printf format of `key=value` pairs, may be NULL. A text goes in quotation marks,
 * key=\"%s\", and is escaped there. Widths and precisions are numbers in the format, not arguments.
 */
void log_line(enum log_level level, const char *msg, const char *fields, ...)
    __attribute__((format(printf, 3, 4)));

/* Whether the n-th of a kind that may come in floods (from 1) is told: ever fewer are. */
int log_is_told(uint64_t n);

#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)
#define log_info(...)  log_line(LOG_INFO, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_WARN, __VA_ARGS__)
#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)

#endif
