/*
 * Hashes. SHA-256 (libsodium) where a name must be unforgeable: plans, manifests,
 * files. XXH64 where damage is to be noticed: blocks, rows. CRC-32C on the wire.
 */
#ifndef COMMON_HASH_H
#define COMMON_HASH_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define SHA256_HEX 65 /* 64 hex digits and the end of string */

/* 1 when s is 64 lower-case hex digits; s may be NULL. */
int hash_is_sha256(const char *s);
void hash_sha256_hex(const void *bytes, size_t n, char out[SHA256_HEX]);
int hash_sha256_file(const char *path, char out[SHA256_HEX], uint64_t *bytes, struct err *e);

uint64_t hash_xxh64(const void *bytes, size_t n, uint64_t seed);
uint32_t hash_crc32c(uint32_t crc, const void *bytes, size_t n); /* start with crc 0; chains */

#endif
