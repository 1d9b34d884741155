/*
 * The byte alphabet of byte-level BPE files: each byte is written as one printable character.
 * Printable Latin-1 bytes (! to ~, ¡ to ¬, ® to ÿ) stand for themselves; the other 68, in
 * order, are U+0100, U+0101, … So a space is "Ġ" and a newline "Ċ".
 */
#ifndef COMMON_BYTE_ALPHABET_H
#define COMMON_BYTE_ALPHABET_H

#include <stddef.h>

#include "common/mem.h"

/* Appends the spelling (UTF-8) of n bytes. */
void byte_alphabet_spell(struct buf *out, const void *bytes, size_t n);

/* Appends the bytes that a spelling of n bytes of UTF-8 stands for; -1 for a foreign character. */
int byte_alphabet_read(const char *spelling, size_t n, struct buf *out);

#endif
