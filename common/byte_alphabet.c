#include "common/byte_alphabet.h"

#include <stdint.h>

#define FIRST_OTHER 0x100 /* the character of the first byte that does not stand for itself */
#define OTHERS      68

static int stands_for_itself(int byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/* The j-th byte that does not stand for itself. */
static int other_byte(int j)
{
    for (int b = 0; b < 256; b++)
        if (!stands_for_itself(b) && j-- == 0)
            return b;
    return -1;
}

void byte_alphabet_spell(struct buf *out, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++) {
        int c = p[i];
        if (!stands_for_itself(c)) {
            c = FIRST_OTHER;
            for (int b = 0; b < p[i]; b++)
                c += !stands_for_itself(b);
        }
        if (c >= 0x80) {
            buf_add_char(out, (char)(0xc0 | c >> 6));
            c = 0x80 | (c & 0x3f);
        }
        buf_add_char(out, (char)c);
    }
}

int byte_alphabet_read(const char *spelling, size_t n, struct buf *out)
{
    const uint8_t *p = (const uint8_t *)spelling;
    for (size_t i = 0; i < n; i++) {
        int c = p[i];
        if (c >= 0x80) { /* the alphabet ends below U+0800: two bytes at most */
            if ((c & 0xe0) != 0xc0 || i + 1 == n || (p[i + 1] & 0xc0) != 0x80)
                return -1;
            c = (c & 0x1f) << 6 | (p[++i] & 0x3f);
        }
        int byte = c < FIRST_OTHER            ? (stands_for_itself(c) ? c : -1)
                   : c < FIRST_OTHER + OTHERS ? other_byte(c - FIRST_OTHER)
                                              : -1;
        if (byte < 0)
            return -1;
        buf_add_char(out, (char)byte);
    }
    return 0;
}
