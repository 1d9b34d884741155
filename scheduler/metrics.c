#include "scheduler/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/mem.h"

/* 1 where the file's last byte is not the end of a line. */
static int is_cut(int fd)
{
    char last;
    off_t end = lseek(fd, 0, SEEK_END);
    return end > 0 && pread(fd, &last, 1, end - 1) == 1 && last != '\n';
}

/* Writes what waits; what does not go in stays. */
static int flush(struct metrics *m, struct err *e)
{
    size_t done = 0;
    int rc = 0;
    while (rc == 0 && done < m->waiting.len) {
        ssize_t n = write(m->fd, m->waiting.data + done, m->waiting.len - done);
        if (n >= 0)
            done += (size_t)n;
        else if (errno != EINTR)
            rc = err_errno(e, "%s: write", m->path);
    }
    if (done)
        memmove(m->waiting.data, m->waiting.data + done, m->waiting.len - done);
    m->waiting.len -= done;
    return rc;
}

int metrics_open(struct metrics *m, const char *path, struct err *e)
{
    int rc = 0;
    m->path = mem_strdup(path);
    m->fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (m->fd < 0)
        rc = err_errno(e, "%s", path);
    else if (is_cut(m->fd))
        rc = fs_write_all(m->fd, "\n", 1, path, e);
    if (rc < 0)
        metrics_close(m);
    return rc;
}

void metrics_close(struct metrics *m)
{
    flush(m, NULL);
    if (m->fd >= 0)
        close(m->fd);
    buf_release(&m->waiting);
    free(m->path);
    *m = (struct metrics){.fd = -1};
}

int metrics_write(struct metrics *m, json_t *line, struct err *e)
{
    char *text = json_dumps(line, JSON_COMPACT);
    json_decref(line);
    if (!text)
        return err_set(e, ERR_INPUT, "%s: a line that is not JSON", m->path);
    flush(m, NULL);
    int rc = 0;
    if (m->waiting.len > METRICS_MAX_WAITING)
        rc = err_set(e, ERR_STATE, "%s: a line is lost, too many wait", m->path);
    else
        buf_printf(&m->waiting, "%s\n", text);
    free(text);
    return rc == 0 ? flush(m, e) : rc;
}
