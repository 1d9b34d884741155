#include "common/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static const char *log_daemon = "fullband";
static int log_rank = -1;
static enum log_level log_min = LOG_INFO;

void log_init(const char *daemon, int rank)
{
    log_daemon = daemon;
    log_rank = rank;
}

void log_set_level(enum log_level min)
{
    log_min = min;
}

void log_line(enum log_level level, const char *msg, const char *fields, ...)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if (level < log_min)
        return;
    struct timespec now;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    char line[2048], stamp[32];
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &tm);
    int n = snprintf(line, sizeof line, "ts=%s.%03ldZ level=%s daemon=%s", stamp,
        now.tv_nsec / 1000000, names[level], log_daemon);
    if (log_rank >= 0)
        n += snprintf(line + n, sizeof line - (size_t)n, " rank=%d", log_rank);
    n += snprintf(line + n, sizeof line - (size_t)n, " msg=\"%.512s\"", msg);
    if (fields && n < (int)sizeof line - 2) {
        va_list ap;
        va_start(ap, fields);
        line[n++] = ' ';
        n += vsnprintf(line + n, sizeof line - (size_t)n, fields, ap);
        va_end(ap);
    }
    if (n > (int)sizeof line - 2)
        n = (int)sizeof line - 2;
    for (int i = 0; i < n; i++)
        if (line[i] == '\n')
            line[i] = ' ';
    line[n++] = '\n';
    ssize_t ignored = write(STDERR_FILENO, line, (size_t)n);
    (void)ignored;
}
