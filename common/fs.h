/*
 * Files: whole-file reads, and writes that are either complete or absent.
 *
 * Publishing is always: write a temporary name → fsync → rename → fsync the
 * directory. Paths are plain C strings; every error names the path.
 */
#ifndef COMMON_FS_H
#define COMMON_FS_H

#include <stdint.h>

#include "common/err.h"
#include "common/mem.h"

/*
 * Opens a regular file for reading. Anything else is refused at once: a FIFO would wait for ever
 * for a writer. Returns a descriptor, or a negative code.
 */
int fs_open_regular(const char *path, struct err *e);

/* Reads all of a regular file into `out` (cleared first). Files over max_bytes are refused. */
int fs_read(const char *path, uint64_t max_bytes, struct buf *out, struct err *e);

/* Publishes `n` bytes at `path` atomically and durably. */
int fs_write_atomic(const char *path, const void *bytes, size_t n, struct err *e);

/* Writes all n bytes to an open descriptor, retrying short writes and EINTR. */
int fs_write_all(int fd, const void *bytes, size_t n, const char *path, struct err *e);

int fs_fsync_dir(const char *dir, struct err *e);
int fs_rename_durable(
    const char *from, const char *to, struct err *e); /* + fsync of to's directory */
int fs_mkdir_p(const char *path, unsigned mode, struct err *e);
int fs_remove_tree(const char *path, struct err *e); /* absent is fine; never follows links */
int fs_exists(const char *path);                     /* 1 or 0 */
int64_t fs_size(const char *path, struct err *e);    /* bytes, or a negative code */

/*
 * Takes an exclusive lock on `path` (created, mode 0600) and writes our pid into it.
 * Returns a descriptor to keep open, or ERR_STATE naming the holder's pid.
 */
int fs_lock(const char *path, struct err *e);

/* Directory of path ("." if none), to be freed. */
char *fs_dirname(const char *path);

#endif
