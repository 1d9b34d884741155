/*
 * Errors with context.
 *
 * A function that can fail returns 0 or a negative ERR_ code and takes a
 * `struct err *` as its last parameter. Where it fails it says what, where and
 * what would have been right; each caller may put its own context in front:
 *
 *     if (block_read(store, i, &block, e) < 0)
 *         return err_prefix(e, "shard %s: block %llu", store->name, i);
 *
 * The text is one line without a newline. `e` may be NULL when the caller only
 * needs the code. Not thread-safe per object; use one per thread.
 */
#ifndef COMMON_ERR_H
#define COMMON_ERR_H

enum err_code {
    ERR_INPUT = -1,       /* what came from outside is wrong (config, file, message) */
    ERR_IO = -2,          /* the system refused: errno is in the text */
    ERR_CORRUPT = -3,     /* a checksum or a structure does not hold */
    ERR_MISMATCH = -4,    /* two sides differ: version, plan, manifest, tokenizer */
    ERR_NOMEM = -5,       /* memory or disk space is exhausted */
    ERR_TIMEOUT = -6,     /* a wait ran out */
    ERR_STATE = -7,       /* not possible now (locked, not a run directory, finished) */
    ERR_UNSUPPORTED = -8, /* valid, but not something this build can do */
    ERR_STOPPED = -9,     /* asked to stop (SIGTERM, SIGINT) */
};

struct err {
    int code;
    char msg[1024];
};

/* Records code and text, replacing what was there; returns code. */
int err_set(struct err *e, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Like err_set with ": strerror(errno)" appended; ENOSPC and ENOMEM become ERR_NOMEM. */
int err_errno(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Puts "context: " in front of the text; returns its code (ERR_STATE if none or e NULL). */
int err_prefix(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
