/*
 * What a daemon's log says went wrong, for those who do not read logs.
 */
#ifndef OPS_LAST_ERROR_H
#define OPS_LAST_ERROR_H

#include <sys/types.h>

#include "common/mem.h"

/*
 * The last line behind byte `from` that tells of an error (level=error, or "fb-name: …"), else the
 * last line; empty where there is none. Of a line in logfmt only the words: its msg and its reason.
 */
void last_error(const char *path, off_t from, struct buf *out);

#endif
