/*
 * A JSON document from a file.
 */
#ifndef COMMON_JSON_FILE_H
#define COMMON_JSON_FILE_H

#include <stdint.h>

#include <jansson.h>

#include "common/err.h"
#include "common/hash.h"

/*
 * Reads a file of at most max_bytes; *out is the caller's. Keys that come twice are refused.
 * sha256, unless NULL, becomes the hash of the file's bytes. ERR_CORRUPT names path and line where
 * it is not JSON.
 */
int json_file_read(
    const char *path, uint64_t max_bytes, json_t **out, char sha256[SHA256_HEX], struct err *e);

#endif
