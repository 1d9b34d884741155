#include "common/utf8.h"

#include <string.h>

/* A row of the standard's table of well-formed sequences: the bounds of the first two bytes. */
static const struct {
    uint8_t lead_lo, lead_hi, second_lo, second_hi;
    int len;
} forms[] = {
    {0xc2, 0xdf, 0x80, 0xbf, 2},
    {0xe0, 0xe0, 0xa0, 0xbf, 3},
    {0xe1, 0xec, 0x80, 0xbf, 3},
    {0xed, 0xed, 0x80, 0x9f, 3},
    {0xee, 0xef, 0x80, 0xbf, 3},
    {0xf0, 0xf0, 0x90, 0xbf, 4},
    {0xf1, 0xf3, 0x80, 0xbf, 4},
    {0xf4, 0xf4, 0x80, 0x8f, 4},
};

int utf8_char_len(const char *p, size_t n)
{
    const uint8_t *s = (const uint8_t *)p;
    if (s[0] < 0x80)
        return 1;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        if (s[0] < forms[i].lead_lo || s[0] > forms[i].lead_hi)
            continue;
        int len = forms[i].len;
        if (n < (size_t)len || s[1] < forms[i].second_lo || s[1] > forms[i].second_hi)
            return 0;
        for (int k = 2; k < len; k++)
            if ((s[k] & 0xc0) != 0x80)
                return 0;
        return len;
    }
    return 0;
}

size_t utf8_valid_prefix(const char *p, size_t n)
{
    size_t i = 0;
    while (i < n) {
        uint64_t eight;
        if (n - i >= 8) {
            memcpy(&eight, p + i, 8);
            if (!(eight & 0x8080808080808080u)) {
                i += 8;
                continue;
            }
        }
        int len = utf8_char_len(p + i, n - i);
        if (!len)
            break;
        i += (size_t)len;
    }
    return i;
}
