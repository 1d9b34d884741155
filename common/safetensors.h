/*
 * Safetensors files: 8-byte little-endian header length, JSON header, tensor bytes.
 *
 * Reading maps the file; tensors point into the map and live until safetensors_close().
 * The whole header is validated at open: offsets in range, contiguous and not overlapping, size =
 * product of the shape times the type, names unique, header at most 100 MB. Errors of opening and
 * writing name the file and the tensor; those of reading a tensor name the tensor, and the caller
 * puts the file in front.
 */
#ifndef COMMON_SAFETENSORS_H
#define COMMON_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

enum st_dtype { ST_F32, ST_BF16, ST_F16, ST_F64, ST_I32, ST_I64, ST_U8, ST_BOOL, ST_U32, ST_OTHER };

#define ST_MAX_DIMS 8

struct st_tensor {
    const char *name;
    enum st_dtype dtype;
    int ndim;
    int64_t shape[ST_MAX_DIMS];
    const void *data; /* not necessarily aligned beyond 1 byte */
    size_t bytes;
};

struct safetensors; /* an open file */

int safetensors_open(const char *path, struct safetensors **out, struct err *e);
/* The same over memory the caller keeps (used by the fuzzer and tests). */
int safetensors_open_memory(const void *bytes, size_t n, struct safetensors **out, struct err *e);
void safetensors_close(struct safetensors **st);

int safetensors_count(const struct safetensors *st);
const struct st_tensor *safetensors_at(const struct safetensors *st, int i); /* in file order */
const struct st_tensor *safetensors_find(
    const struct safetensors *st, const char *name);                         /* or NULL */
const char *safetensors_meta(const struct safetensors *st, const char *key); /* or NULL */

/* Copies an F32 (or BF16, F16: widened) tensor of exactly `count` elements into out. */
int safetensors_read_f32(
    const struct safetensors *st, const char *name, int64_t count, float *out, struct err *e);

/*
 * Writing: every tensor given at once, streamed to a descriptor in the given order, 64-byte-aligned
 * header. meta is NULL-terminated pairs {key, value, key, value, NULL}, may be NULL.
 * Does not fsync. `path` is for errors only.
 */
int safetensors_write(int fd, const char *path, const struct st_tensor *tensors, int count,
    const char *const *meta, struct err *e);

size_t st_dtype_bytes(enum st_dtype t); /* 0 for ST_OTHER */
const char *st_dtype_name(enum st_dtype t);

#endif
