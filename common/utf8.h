/*
 * UTF-8 by the Unicode standard: no overlong forms, no surrogates, nothing above U+10FFFF.
 */
#ifndef COMMON_UTF8_H
#define COMMON_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Length in bytes (1 to 4) of the character that starts at p, 0 where it is not valid; n > 0. */
int utf8_char_len(const char *p, size_t n);

/* Length of the longest valid prefix of n bytes. */
size_t utf8_valid_prefix(const char *p, size_t n);

#endif
