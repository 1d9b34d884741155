#include "common/field.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

int field_int(const json_t *j, const char *key, int64_t lo, int64_t hi, int64_t *out, struct err *e)
{
    const json_t *v = json_object_get(j, key);
    if (!json_is_integer(v))
        return err_set(e, ERR_INPUT, "%s: a whole number expected", key);
    int64_t x = json_integer_value(v);
    if (x < lo || x > hi)
        return err_set(e, ERR_INPUT, "%s: %lld, %lld to %lld expected", key, (long long)x,
            (long long)lo, (long long)hi);
    *out = x;
    return 0;
}

int field_real(const json_t *j, const char *key, double *out, struct err *e)
{
    const json_t *v = json_object_get(j, key);
    if (!json_is_number(v) && !json_is_null(v))
        return err_set(e, ERR_INPUT, "%s: a number or null expected", key);
    *out = json_is_null(v) ? NAN : json_number_value(v);
    return 0;
}

int field_amount(const json_t *j, const char *key, double *out, struct err *e)
{
    const json_t *v = json_object_get(j, key);
    if (!json_is_number(v) || !(json_number_value(v) >= 0))
        return err_set(e, ERR_INPUT, "%s: a number ≥ 0 expected", key);
    *out = json_number_value(v);
    return 0;
}

int field_text(const json_t *j, const char *key, size_t max, const char **out, struct err *e)
{
    const json_t *v = json_object_get(j, key);
    const char *s = json_string_value(v);
    size_t n = json_string_length(v);
    if (!s || n == 0 || n > max || strlen(s) != n)
        return err_set(e, ERR_INPUT, "%s: a text of 1 to %zu bytes expected", key, max);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] < ' ')
            return err_set(e, ERR_INPUT, "%s: holds a control character", key);
    *out = s;
    return 0;
}

int field_hex(const json_t *j, const char *key, uint64_t *out, struct err *e)
{
    const char *s = json_string_value(json_object_get(j, key));
    size_t n = s ? strlen(s) : 0;
    if (n == 0 || n > 16 || strspn(s, "0123456789abcdef") != n)
        return err_set(e, ERR_INPUT, "%s: 1 to 16 hex digits expected", key);
    *out = strtoull(s, NULL, 16);
    return 0;
}

int field_sha256(const json_t *j, const char *key, char out[SHA256_HEX], struct err *e)
{
    const char *s = json_string_value(json_object_get(j, key));
    if (!hash_is_sha256(s))
        return err_set(e, ERR_INPUT, "%s: 64 lower-case hex digits expected", key);
    memcpy(out, s, SHA256_HEX);
    return 0;
}

json_t *json_real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

json_t *json_text(const char *s)
{
    json_t *j = json_string(s);
    if (j)
        return j;
    char *ascii = mem_strdup(s);
    for (char *p = ascii; *p; p++)
        if ((unsigned char)*p >= 0x80)
            *p = '?';
    j = json_string(ascii);
    free(ascii);
    return j;
}
