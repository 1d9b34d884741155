/*
 * Memory and growable byte buffers.
 *
 * mem_* multiply with an overflow check and stop the program when host memory for
 * small bookkeeping is exhausted; large or outside-controlled sizes go through
 * mem_try_array(), which returns NULL instead.
 */
#ifndef COMMON_MEM_H
#define COMMON_MEM_H

#include <stddef.h>
#include <stdint.h>

void *mem_array(size_t count, size_t size);               /* zeroed; never NULL */
void *mem_try_array(size_t count, size_t size);           /* zeroed; NULL on overflow or want */
void *mem_grow_array(void *p, size_t count, size_t size); /* realloc; never NULL; not zeroed */
char *mem_strdup(const char *s);                          /* never NULL */
char *mem_printf(const char *fmt, ...) __attribute__((format(printf, 1, 2))); /* caller frees */

/* Returns 0 and *out = a*b, or -1 when that overflows. */
int mem_mul(size_t a, size_t b, size_t *out);

/*
 * A byte buffer that grows. `data` always has a 0 byte behind `len` once anything
 * was added, so a text buffer can be used as a string. Caller-owned storage:
 * `struct buf b = BUF_INIT; ... buf_release(&b);`
 */
struct buf {
    char *data;
    size_t len, cap;
};
#define BUF_INIT                                                                                   \
    {                                                                                              \
        NULL, 0, 0                                                                                 \
    }

void buf_reserve(struct buf *b, size_t extra); /* room for `extra` more bytes */
void buf_add(struct buf *b, const void *bytes, size_t n);
void buf_add_str(struct buf *b, const char *s);
void buf_add_char(struct buf *b, char c);
void buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_clear(struct buf *b); /* len = 0, keeps the storage */
void buf_release(struct buf *b);

/* Little-endian by shifts: what every file and message of ours uses. */
static inline void put_u16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}
static inline void put_u32(uint8_t *p, uint32_t v)
{
    put_u16(p, (uint16_t)v);
    put_u16(p + 2, (uint16_t)(v >> 16));
}
static inline void put_u64(uint8_t *p, uint64_t v)
{
    put_u32(p, (uint32_t)v);
    put_u32(p + 4, (uint32_t)(v >> 32));
}
static inline uint16_t get_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}
static inline uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)get_u16(p) | (uint32_t)get_u16(p + 2) << 16;
}
static inline uint64_t get_u64(const uint8_t *p)
{
    return (uint64_t)get_u32(p) | (uint64_t)get_u32(p + 4) << 32;
}

#endif
