#include "ops/last_error.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TAIL_BYTES 65536

/* Reads what lies behind `from`, the last TAIL_BYTES of it; what cannot be read is empty. */
static void read_tail(const char *path, off_t from, struct buf *out)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && st.st_size - from > TAIL_BYTES)
        from = st.st_size - TAIL_BYTES;
    buf_reserve(out, TAIL_BYTES + 1);
    ssize_t n;
    while (out->len < TAIL_BYTES &&
           (n = pread(fd, out->data + out->len, TAIL_BYTES - out->len, from + (off_t)out->len)) > 0)
        out->len += (size_t)n;
    out->data[out->len] = 0;
    close(fd);
}

static int tells_error(const char *line)
{
    return strstr(line, "level=error") || strncmp(line, "fb-", 3) == 0 || strstr(line, ": bug: ") ||
           strstr(line, "ERROR: ");
}

/* Adds the value of `key` in a logfmt line, unescaped. 1: it has one. */
static int add_value(const char *line, const char *key, struct buf *out)
{
    size_t n = strlen(key);
    int quoted = 0;
    for (const char *p = line; *p; p++) {
        if (*p == '\\' && quoted && p[1]) {
            p++;
        } else if (*p == '"') {
            quoted = !quoted;
        } else if (!quoted && (p == line || p[-1] == ' ') && strncmp(p, key, n) == 0 &&
                   strncmp(p + n, "=\"", 2) == 0) {
            for (p += n + 2; *p && *p != '"'; p++) {
                if (*p == '\\' && p[1])
                    p++;
                buf_add_char(out, *p);
            }
            return 1;
        }
    }
    return 0;
}

static void add_words(const char *line, struct buf *out)
{
    static const char *const reasons[] = {"why", "text", "error", "reason"};
    if (strncmp(line, "ts=", 3) != 0 || !add_value(line, "msg", out)) {
        buf_add_str(out, line);
        return;
    }
    buf_add_str(out, ": ");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (add_value(line, reasons[i], out))
            return;
    out->len -= 2; /* there is no reason */
    out->data[out->len] = 0;
}

void last_error(const char *path, off_t from, struct buf *out)
{
    struct buf tail = BUF_INIT;
    const char *best = "";
    char *save = NULL;
    int best_is_error = 0;
    read_tail(path, from, &tail);
    for (char *line = tail.len ? strtok_r(tail.data, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save)) {
        int is_error = tells_error(line);
        if (is_error || !best_is_error)
            best = line;
        best_is_error |= is_error;
    }
    buf_clear(out);
    add_words(best, out);
    buf_release(&tail);
}
