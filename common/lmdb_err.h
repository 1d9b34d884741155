/*
 * LMDB's codes become ours here and nowhere else.
 */
#ifndef COMMON_LMDB_ERR_H
#define COMMON_LMDB_ERR_H

#include "common/err.h"

/*
 * The error of an LMDB call that gave `code` (not 0), as "path: what: why". ERR_NOMEM: no room in
 * memory, in the map or on the disk; ERR_MISMATCH: of another version of LMDB; ERR_CORRUPT: not
 * what LMDB would have written, or an entry that has to be there is not; ERR_IO: the system's.
 */
int lmdb_err(struct err *e, int code, const char *path, const char *what);

#endif
