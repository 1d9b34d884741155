#include "common/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/check.h"

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

int log_is_told(uint64_t n)
{
    return n <= 20 || (n & (n - 1)) == 0;
}

/* -- one line -- */

#define LINE_BYTES 2048

struct line {
    char text[LINE_BYTES];
    size_t len; /* below LINE_BYTES: what does not fit is cut off */
};

static void put(struct line *l, char c)
{
    if (l->len < LINE_BYTES - 1)
        l->text[l->len++] = c;
}

/* At most `max` bytes of s; between quotation marks what would end the value is escaped. */
static void put_text(struct line *l, const char *s, size_t max, int quoted)
{
    for (; *s && max > 0; s++, max--) {
        if (quoted && (*s == '"' || *s == '\\'))
            put(l, '\\');
        put(l, (unsigned char)*s < ' ' ? ' ' : *s);
    }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* taken apart from a checked format */

/* The value of `spec`, which ends in its conversion, from the arguments. */
static void put_number(struct line *l, const char *spec, va_list *ap)
{
    char text[400]; /* %f of the largest double */
    char conversion = spec[strlen(spec) - 1];
    if (strchr("efgEG", conversion))
        snprintf(text, sizeof text, spec, va_arg(*ap, double));
    else if (strstr(spec, "ll"))
        snprintf(text, sizeof text, spec, va_arg(*ap, long long));
    else if (strchr(spec, 'l'))
        snprintf(text, sizeof text, spec, va_arg(*ap, long));
    else if (strchr(spec, 'z'))
        snprintf(text, sizeof text, spec, va_arg(*ap, size_t));
    else
        snprintf(text, sizeof text, spec, va_arg(*ap, int));
    put_text(l, text, sizeof text, 0);
}

#pragma GCC diagnostic pop

/*
 * printf by hand, for the sake of %s: a text in quotation marks is escaped. Knows what numbers and
 * texts need; no width or precision from the arguments.
 */
static void put_fields(struct line *l, const char *fmt, va_list *ap)
{
    for (const char *p = fmt; *p; p++) {
        char spec[24];
        if (*p != '%') {
            put(l, *p);
            continue;
        }
        size_t n = 1 + strspn(p + 1, "-+ #0123456789.hlz");
        char conversion = p[n];
        CHECK(strchr("sdiuxXcefgEG%", conversion) && conversion && n + 2 <= sizeof spec);
        memcpy(spec, p, n + 1);
        spec[n + 1] = 0;
        const char *precision = strchr(spec, '.');
        if (conversion == '%')
            put(l, '%');
        else if (conversion == 's')
            put_text(l, va_arg(*ap, const char *),
                precision ? strtoul(precision + 1, NULL, 10) : LINE_BYTES, p > fmt && p[-1] == '"');
        else
            put_number(l, spec, ap);
        p += n;
    }
}

static void put_format(struct line *l, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    put_fields(l, fmt, &ap);
    va_end(ap);
}

void log_line(enum log_level level, const char *msg, const char *fields, ...)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if (level < log_min)
        return;
    struct timespec now;
    struct tm tm;
    struct line l = {.len = 0};
    char stamp[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &tm);
    put_format(&l, "ts=%s.%03ldZ level=%s daemon=%s", stamp, now.tv_nsec / 1000000, names[level],
        log_daemon);
    if (log_rank >= 0)
        put_format(&l, " rank=%d", log_rank);
    put_format(&l, " msg=\"%.512s\"", msg);
    if (fields) {
        va_list ap;
        va_start(ap, fields);
        put(&l, ' ');
        put_fields(&l, fields, &ap);
        va_end(ap);
    }
    l.text[l.len++] = '\n';
    ssize_t ignored = write(STDERR_FILENO, l.text, l.len);
    (void)ignored;
}
