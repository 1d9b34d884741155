/*
 * Canonical JSON: one text for one value, so that its hash names the value. Keys sorted by bytes,
 * no spaces, integers as such, reals as the shortest decimal that reads back (common/number.h),
 * strings in UTF-8 with only '"', '\' and control characters escaped. Independent of the JSON
 * library's version.
 */
#ifndef COMMON_JSON_CANONICAL_H
#define COMMON_JSON_CANONICAL_H

#include <jansson.h>

#include "common/mem.h"

/* Both append. */
void json_canonical(const json_t *j, struct buf *out);
void json_canonical_text(const char *s, size_t n, struct buf *out); /* a string, in quotes */

#endif
