#include "common/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

int fs_open_regular(const char *path, struct err *e)
{
    struct stat st;
    int rc, fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return err_errno(e, "%s", path);
    if (fstat(fd, &st) < 0)
        rc = err_errno(e, "%s", path);
    else if (!S_ISREG(st.st_mode))
        rc = err_set(e, ERR_INPUT, "%s: not a regular file", path);
    else
        return fd;
    close(fd);
    return rc;
}

int fs_read(const char *path, uint64_t max_bytes, struct buf *out, struct err *e)
{
    int rc, fd = fs_open_regular(path, e);
    buf_clear(out);
    if (fd < 0)
        return fd;
    for (;;) {
        buf_reserve(out, 1 << 16);
        ssize_t n = read(fd, out->data + out->len, 1 << 16);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            rc = err_errno(e, "%s", path);
            goto done;
        }
        if (n == 0)
            break;
        out->len += (size_t)n;
        if (out->len > max_bytes) {
            rc = err_set(e, ERR_INPUT, "%s: larger than the limit of %llu bytes", path,
                (unsigned long long)max_bytes);
            goto done;
        }
    }
    out->data[out->len] = 0;
    rc = 0;
done:
    close(fd);
    return rc;
}

int fs_write_all(int fd, const void *bytes, size_t n, const char *path, struct err *e)
{
    const char *p = bytes;
    while (n) {
        ssize_t w = write(fd, p, n);
        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0)
            return err_errno(e, "%s: write", path);
        p += w;
        n -= (size_t)w;
    }
    return 0;
}

char *fs_dirname(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return mem_strdup(".");
    if (slash == path)
        return mem_strdup("/");
    char *dir = mem_strdup(path);
    dir[slash - path] = 0;
    return dir;
}

int fs_fsync_dir(const char *dir, struct err *e)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, "%s", dir);
    int rc = fsync(fd) < 0 ? err_errno(e, "%s: fsync", dir) : 0;
    close(fd);
    return rc;
}

int fs_rename_durable(const char *from, const char *to, struct err *e)
{
    if (rename(from, to) < 0)
        return err_errno(e, "rename %s to %s", from, to);
    char *dir = fs_dirname(to);
    int rc = fs_fsync_dir(dir, e);
    free(dir);
    return rc;
}

int fs_write_atomic(const char *path, const void *bytes, size_t n, struct err *e)
{
    char *tmp = mem_printf("%s.tmp.%d", path, (int)getpid());
    int rc, fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) {
        rc = err_errno(e, "%s", tmp);
        goto out;
    }
    rc = fs_write_all(fd, bytes, n, tmp, e);
    if (rc == 0 && fsync(fd) < 0)
        rc = err_errno(e, "%s: fsync", tmp);
    if (close(fd) < 0 && rc == 0)
        rc = err_errno(e, "%s: close", tmp);
    if (rc == 0)
        rc = fs_rename_durable(tmp, path, e);
    if (rc < 0)
        unlink(tmp);
out:
    free(tmp);
    return rc;
}

int fs_mkdir_p(const char *path, unsigned mode, struct err *e)
{
    char *p = mem_strdup(path);
    int rc = 0;
    for (char *s = p + (*p == '/'); rc == 0; s++) {
        if (*s && *s != '/')
            continue;
        char saved = *s;
        *s = 0;
        if (mkdir(p, mode) < 0 && errno != EEXIST)
            rc = err_errno(e, "mkdir %s", p);
        *s = saved;
        if (!saved)
            break;
    }
    struct stat st;
    if (rc == 0 && (stat(path, &st) < 0 || !S_ISDIR(st.st_mode)))
        rc = err_set(e, ERR_INPUT, "%s: exists and is not a directory", path);
    free(p);
    return rc;
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

int fs_remove_tree(const char *path, struct err *e)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return errno == ENOENT ? 0 : err_errno(e, "%s", path);
    if (nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) < 0)
        return err_errno(e, "remove %s", path);
    return 0;
}

int fs_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

int64_t fs_size(const char *path, struct err *e)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return err_errno(e, "%s", path);
    return st.st_size;
}

int fs_lock(const char *path, struct err *e)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_errno(e, "%s", path);
    char pid[32] = {0};
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK) {
            int rc = err_errno(e, "lock %s", path);
            close(fd);
            return rc;
        }
        ssize_t n = pread(fd, pid, sizeof pid - 1, 0);
        pid[n > 0 ? n : 0] = 0;
        pid[strcspn(pid, "\n")] = 0;
        close(fd);
        return err_set(e, ERR_STATE, "%s: held by process %s", path, *pid ? pid : "unknown");
    }
    int n = snprintf(pid, sizeof pid, "%d\n", (int)getpid());
    if (ftruncate(fd, 0) < 0 || pwrite(fd, pid, (size_t)n, 0) != n) {
        int rc = err_errno(e, "%s", path);
        close(fd);
        return rc;
    }
    return fd;
}
