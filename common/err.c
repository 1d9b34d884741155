#include "common/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Text from outside is quoted in messages: no line breaks, nothing that drives a terminal. */
static void one_line(char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < ' ' || *s == 0x7f)
            *s = ' ';
}

int err_set(struct err *e, int code, const char *fmt, ...)
{
    if (!e)
        return code;
    char text[sizeof e->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    one_line(text);
    e->code = code;
    memcpy(e->msg, text, sizeof text);
    return code;
}

int err_errno(struct err *e, const char *fmt, ...)
{
    int saved = errno;
    int code = saved == ENOSPC || saved == ENOMEM || saved == EDQUOT ? ERR_NOMEM : ERR_IO;
    if (!e)
        return code;
    char text[sizeof e->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return err_set(e, code, "%s: %s", text, strerror(saved));
}

int err_prefix(struct err *e, const char *fmt, ...)
{
    if (!e)
        return ERR_STATE;
    char head[sizeof e->msg / 2], tail[sizeof e->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    memcpy(tail, e->msg, sizeof tail);
    one_line(head);
    size_t n = strlen(head), room = sizeof e->msg - n - 3;
    memcpy(e->msg, head, n);
    memcpy(e->msg + n, ": ", 2);
    size_t m = strnlen(tail, room);
    memcpy(e->msg + n + 2, tail, m);
    e->msg[n + 2 + m] = 0;
    if (e->code == 0)
        e->code = ERR_STATE;
    return e->code;
}
