#include "common/mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"

int mem_mul(size_t a, size_t b, size_t *out)
{
    return __builtin_mul_overflow(a, b, out) ? -1 : 0;
}

void *mem_try_array(size_t count, size_t size)
{
    size_t bytes;
    if (mem_mul(count, size, &bytes) < 0 || bytes > PTRDIFF_MAX)
        return NULL;
    return calloc(1, bytes ? bytes : 1);
}

static void *or_die(void *p)
{
    if (!p) {
        fputs("out of memory\n", stderr);
        abort();
    }
    return p;
}

void *mem_array(size_t count, size_t size)
{
    return or_die(mem_try_array(count, size));
}

void *mem_grow_array(void *p, size_t count, size_t size)
{
    size_t bytes;
    if (mem_mul(count, size, &bytes) < 0)
        bytes = SIZE_MAX;
    return or_die(bytes > PTRDIFF_MAX ? NULL : realloc(p, bytes ? bytes : 1));
}

char *mem_strdup(const char *s)
{
    return or_die(strdup(s));
}

char *mem_printf(const char *fmt, ...)
{
    va_list ap;
    char *s = NULL;
    va_start(ap, fmt);
    int n = vasprintf(&s, fmt, ap);
    va_end(ap);
    return or_die(n < 0 ? NULL : s);
}

void buf_reserve(struct buf *b, size_t extra)
{
    CHECK(extra < PTRDIFF_MAX - b->len - 1);
    size_t need = b->len + extra + 1;
    if (need <= b->cap)
        return;
    size_t cap = b->cap < 64 ? 64 : b->cap + b->cap / 2;
    b->cap = cap < need ? need : cap;
    b->data = mem_grow_array(b->data, b->cap, 1);
}

void buf_add(struct buf *b, const void *bytes, size_t n)
{
    buf_reserve(b, n);
    if (n)
        memcpy(b->data + b->len, bytes, n);
    b->len += n;
    b->data[b->len] = 0;
}

void buf_add_str(struct buf *b, const char *s)
{
    buf_add(b, s, strlen(s));
}

void buf_add_char(struct buf *b, char c)
{
    buf_add(b, &c, 1);
}

void buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    CHECK(n >= 0);
    buf_reserve(b, (size_t)n);
    va_start(ap, fmt);
    vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)n;
}

void buf_clear(struct buf *b)
{
    b->len = 0;
    if (b->data)
        b->data[0] = 0;
}

void buf_release(struct buf *b)
{
    free(b->data);
    *b = (struct buf)BUF_INIT;
}
