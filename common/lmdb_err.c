#include "common/lmdb_err.h"

#include <errno.h>
#include <lmdb.h>
#include <stdint.h>
#include <sys/statvfs.h>

#define DISK_FULL_BYTES (1u << 20) /* less than this left: a write failed for want of room */

/* LMDB takes a write that was cut short, as by a full disk, for a failing device. */
static int is_full_disk(int code, const char *path)
{
    struct statvfs disk;
    return code == EIO && statvfs(path, &disk) == 0 &&
           (uint64_t)disk.f_bavail * disk.f_frsize < DISK_FULL_BYTES;
}

int lmdb_err(struct err *e, int code, const char *path, const char *what)
{
    int ours = code > 0 ? ERR_IO : ERR_CORRUPT;
    if (is_full_disk(code, path))
        code = ENOSPC;
    if (code == ENOMEM || code == ENOSPC || code == EDQUOT || code == MDB_MAP_FULL)
        ours = ERR_NOMEM;
    else if (code == MDB_VERSION_MISMATCH)
        ours = ERR_MISMATCH;
    return err_set(e, ours, "%s: %s: %s", path, what, mdb_strerror(code));
}
