/*
 * Fields of a JSON object from outside, a message's body or a file: each read is a check, and the
 * error (ERR_INPUT) names the field and what would have been right; the caller puts in front where
 * the object came from. Strings stay the object's.
 */
#ifndef COMMON_FIELD_H
#define COMMON_FIELD_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "common/err.h"
#include "common/hash.h"

int field_int(
    const json_t *j, const char *key, int64_t lo, int64_t hi, int64_t *out, struct err *e);
/* A number ≥ 0. */
int field_amount(const json_t *j, const char *key, double *out, struct err *e);
/* A number; NAN where the message says null. */
int field_real(const json_t *j, const char *key, double *out, struct err *e);
/* 1 to max bytes without control characters. */
int field_text(const json_t *j, const char *key, size_t max, const char **out, struct err *e);
/* 1 to 16 lower-case hex digits. */
int field_hex(const json_t *j, const char *key, uint64_t *out, struct err *e);
/* 64 lower-case hex digits. */
int field_sha256(const json_t *j, const char *key, char out[SHA256_HEX], struct err *e);

/* A JSON number, or null where x is not finite. */
json_t *json_real_or_null(double x);
/* A JSON string; bytes that are not UTF-8 (a cut error text, a file's name) become '?'. */
json_t *json_text(const char *s);

#endif
