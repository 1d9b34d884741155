#include "common/json_canonical.h"

#include <stdlib.h>
#include <string.h>

#include "common/number.h"

void json_canonical_text(const char *s, size_t n, struct buf *out)
{
    buf_add_char(out, '"');
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c < 0x20) {
            buf_printf(out, "\\u%04x", c);
            continue;
        }
        if (c == '"' || c == '\\')
            buf_add_char(out, '\\');
        buf_add_char(out, (char)c);
    }
    buf_add_char(out, '"');
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void add_object(const json_t *j, struct buf *out)
{
    size_t count = json_object_size(j), n = 0;
    const char **keys = mem_array(count, sizeof *keys), *key;
    json_t *value;
    json_object_foreach ((json_t *)j, key, value)
        keys[n++] = key;
    qsort(keys, n, sizeof *keys, compare_keys);
    buf_add_char(out, '{');
    for (size_t i = 0; i < n; i++) {
        if (i)
            buf_add_char(out, ',');
        json_canonical_text(keys[i], strlen(keys[i]), out);
        buf_add_char(out, ':');
        json_canonical(json_object_get(j, keys[i]), out);
    }
    buf_add_char(out, '}');
    free(keys);
}

static void add_array(const json_t *j, struct buf *out)
{
    buf_add_char(out, '[');
    for (size_t i = 0; i < json_array_size(j); i++) {
        if (i)
            buf_add_char(out, ',');
        json_canonical(json_array_get(j, i), out);
    }
    buf_add_char(out, ']');
}

void json_canonical(const json_t *j, struct buf *out)
{
    char text[NUMBER_TEXT];
    switch (json_typeof(j)) {
    case JSON_OBJECT:
        add_object(j, out);
        break;
    case JSON_ARRAY:
        add_array(j, out);
        break;
    case JSON_STRING:
        json_canonical_text(json_string_value(j), json_string_length(j), out);
        break;
    case JSON_INTEGER:
        buf_printf(out, "%lld", (long long)json_integer_value(j));
        break;
    case JSON_REAL:
        number_text(json_real_value(j), text);
        buf_add_str(out, text);
        break;
    case JSON_TRUE:
        buf_add_str(out, "true");
        break;
    case JSON_FALSE:
        buf_add_str(out, "false");
        break;
    case JSON_NULL:
        buf_add_str(out, "null");
        break;
    }
}
