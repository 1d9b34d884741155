#include "common/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "common/check.h"
#include "common/fs.h"
#include "common/mem.h"

#define HEADER_MAX  ((uint64_t)100 << 20)
#define DATA_ALIGN  64
#define LENGTH_SIZE 8 /* bytes of the header length */

struct safetensors {
    char *name; /* for errors */
    const uint8_t *bytes;
    size_t size;
    int mapped;
    json_t *header; /* owns the names and the metadata */
    const json_t *meta;
    struct st_tensor *items; /* in file order */
    const struct st_tensor **by_name;
    int count;
};

static const struct dtype_info {
    const char *name;
    size_t bytes;
} dtypes[] = {
    [ST_F32] = {"F32", 4},
    [ST_BF16] = {"BF16", 2},
    [ST_F16] = {"F16", 2},
    [ST_F64] = {"F64", 8},
    [ST_I32] = {"I32", 4},
    [ST_I64] = {"I64", 8},
    [ST_U8] = {"U8", 1},
    [ST_BOOL] = {"BOOL", 1},
    [ST_U32] = {"U32", 4},
    [ST_OTHER] = {"other", 0},
};

/* Types that we only skip over: their size is checked all the same. */
static const struct dtype_info other_dtypes[] = {
    {"I8", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"I16", 2},
    {"U16", 2},
    {"U64", 8},
};

#define ARRAY_LEN(a) (sizeof(a) / sizeof(a)[0])

size_t st_dtype_bytes(enum st_dtype t)
{
    return (size_t)t < ARRAY_LEN(dtypes) ? dtypes[t].bytes : 0;
}

const char *st_dtype_name(enum st_dtype t)
{
    return (size_t)t < ARRAY_LEN(dtypes) ? dtypes[t].name : "other";
}

/* The type called `name` and its size; −1 for a name that the format does not know. */
static int dtype_find(const char *name, enum st_dtype *type, size_t *bytes)
{
    for (size_t i = 0; i < ST_OTHER; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *type = (enum st_dtype)i;
            *bytes = dtypes[i].bytes;
            return 0;
        }
    for (size_t i = 0; i < ARRAY_LEN(other_dtypes); i++)
        if (strcmp(other_dtypes[i].name, name) == 0) {
            *type = ST_OTHER;
            *bytes = other_dtypes[i].bytes;
            return 0;
        }
    return -1;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Shape of one entry, and in *bytes its product times the element size. */
static int entry_shape(
    const json_t *shape, size_t element, struct st_tensor *t, size_t *bytes, struct err *e)
{
    if (!json_is_array(shape))
        return err_set(e, ERR_CORRUPT, "shape is missing or not a list");
    if (json_array_size(shape) > ST_MAX_DIMS)
        return err_set(e, ERR_CORRUPT, "%zu dimensions, at most %d are supported",
            json_array_size(shape), ST_MAX_DIMS);
    t->ndim = (int)json_array_size(shape);
    *bytes = element;
    for (int i = 0; i < t->ndim; i++) {
        const json_t *v = json_array_get(shape, (size_t)i);
        if (!json_is_integer(v) || json_integer_value(v) < 0)
            return err_set(e, ERR_CORRUPT, "dimension %d is not a whole number of 0 or more", i);
        t->shape[i] = json_integer_value(v);
        if (mem_mul(*bytes, (size_t)t->shape[i], bytes) < 0)
            return err_set(e, ERR_CORRUPT, "the product of the shape overflows");
    }
    return 0;
}

static int entry_offsets(
    const json_t *pair, uint64_t size, uint64_t *begin, uint64_t *end, struct err *e)
{
    const json_t *v[2] = {json_array_get(pair, 0), json_array_get(pair, 1)};
    if (json_array_size(pair) != 2 || !json_is_integer(v[0]) || !json_is_integer(v[1]))
        return err_set(e, ERR_CORRUPT, "data_offsets is not [begin, end]");
    long long b = json_integer_value(v[0]), n = json_integer_value(v[1]);
    if (b < 0 || n < b || (uint64_t)n > size)
        return err_set(e, ERR_CORRUPT, "data_offsets [%lld, %lld] leave the %llu bytes of data", b,
            n, (unsigned long long)size);
    *begin = (uint64_t)b;
    *end = (uint64_t)n;
    return 0;
}

static int entry_parse(
    const json_t *entry, const uint8_t *data, uint64_t size, struct st_tensor *t, struct err *e)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    size_t element, bytes;
    uint64_t begin = 0, end = 0;
    int rc;
    if (!json_is_object(entry) || !dtype)
        return err_set(e, ERR_CORRUPT, "not an object with dtype, shape and data_offsets");
    if (dtype_find(dtype, &t->dtype, &element) < 0)
        return err_set(e, ERR_CORRUPT, "dtype \"%.32s\" is not one of the format's", dtype);
    if ((rc = entry_shape(json_object_get(entry, "shape"), element, t, &bytes, e)) < 0)
        return rc;
    if ((rc = entry_offsets(json_object_get(entry, "data_offsets"), size, &begin, &end, e)) < 0)
        return rc;
    if (end - begin != bytes)
        return err_set(e, ERR_CORRUPT, "data_offsets span %llu bytes, its shape takes %zu",
            (unsigned long long)(end - begin), bytes);
    t->data = data + begin;
    t->bytes = bytes;
    return 0;
}

static int compare_offset(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q)
        return p < q ? -1 : 1;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1; /* an empty tensor stands before its neighbour */
    return strcmp(x->name, y->name);
}

static int compare_name(const void *a, const void *b)
{
    const struct st_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* Tensors in file order must cover the data without a gap or an overlap. */
static int check_cover(
    const struct safetensors *st, const uint8_t *data, uint64_t size, struct err *e)
{
    uint64_t at = 0;
    for (int i = 0; i < st->count; i++) {
        const struct st_tensor *t = &st->items[i];
        uint64_t begin = (uint64_t)((const uint8_t *)t->data - data);
        if (begin != at)
            return err_set(e, ERR_CORRUPT,
                "%s: tensor %.200s begins at byte %llu of the data, "
                "where %llu was expected (a gap or an overlap)",
                st->name, t->name, (unsigned long long)begin, (unsigned long long)at);
        at += t->bytes;
    }
    if (at != size)
        return err_set(e, ERR_CORRUPT, "%s: %llu bytes of data, its tensors take %llu", st->name,
            (unsigned long long)size, (unsigned long long)at);
    return 0;
}

static int check_meta(struct safetensors *st, struct err *e)
{
    const char *key;
    json_t *value;
    json_t *meta = json_object_get(st->header, "__metadata__");
    st->meta = meta;
    if (!meta)
        return 0;
    if (!json_is_object(meta))
        return err_set(e, ERR_CORRUPT, "%s: __metadata__ is not an object", st->name);
    json_object_foreach (meta, key, value)
        if (!json_is_string(value))
            return err_set(
                e, ERR_CORRUPT, "%s: __metadata__ key \"%.100s\" is not a string", st->name, key);
    return 0;
}

/* Length and JSON of the header; *data_at is where the tensors' bytes begin. */
static int header_load(struct safetensors *st, size_t *data_at, struct err *e)
{
    if (st->size < LENGTH_SIZE)
        return err_set(
            e, ERR_CORRUPT, "%s: %zu bytes, too short for safetensors", st->name, st->size);
    uint64_t n = get_u64(st->bytes);
    if (n > HEADER_MAX || n > st->size - LENGTH_SIZE)
        return err_set(e, ERR_CORRUPT, "%s: header of %llu bytes in a file of %zu (at most %llu)",
            st->name, (unsigned long long)n, st->size, (unsigned long long)HEADER_MAX);
    const char *text = (const char *)st->bytes + LENGTH_SIZE;
    if (n == 0 || text[0] != '{')
        return err_set(e, ERR_CORRUPT, "%s: the header does not begin with '{'", st->name);
    json_error_t je;
    st->header = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &je);
    if (!st->header)
        return err_set(e, ERR_CORRUPT, "%s: header is not JSON: %s at byte %d", st->name, je.text,
            je.position);
    if (!json_is_object(st->header))
        return err_set(e, ERR_CORRUPT, "%s: the header is not a JSON object", st->name);
    *data_at = LENGTH_SIZE + (size_t)n;
    return 0;
}

static int header_parse(struct safetensors *st, struct err *e)
{
    size_t data_at;
    const char *key;
    json_t *entry;
    int rc = header_load(st, &data_at, e);
    if (rc < 0 || (rc = check_meta(st, e)) < 0)
        return rc;
    const uint8_t *data = st->bytes + data_at;
    uint64_t size = st->size - data_at;
    st->items = mem_try_array(json_object_size(st->header), sizeof *st->items);
    st->by_name = mem_try_array(json_object_size(st->header), sizeof *st->by_name);
    if (!st->items || !st->by_name)
        return err_set(e, ERR_NOMEM, "%s: no memory for its table of tensors", st->name);
    json_object_foreach (st->header, key, entry) {
        if (strcmp(key, "__metadata__") == 0)
            continue;
        struct st_tensor *t = &st->items[st->count];
        t->name = key;
        if ((rc = entry_parse(entry, data, size, t, e)) < 0) {
            err_prefix(e, "%s: tensor \"%.200s\"", st->name, key);
            return rc;
        }
        st->count++;
    }
    if (st->count > 0)
        qsort(st->items, (size_t)st->count, sizeof *st->items, compare_offset);
    for (int i = 0; i < st->count; i++)
        st->by_name[i] = &st->items[i];
    if (st->count > 0)
        qsort(st->by_name, (size_t)st->count, sizeof *st->by_name, compare_name);
    return check_cover(st, data, size, e);
}

static int open_bytes(const char *name, const void *bytes, size_t n, int mapped,
    struct safetensors **out, struct err *e)
{
    struct safetensors *st = mem_array(1, sizeof *st);
    st->name = mem_strdup(name);
    st->bytes = bytes;
    st->size = n;
    st->mapped = mapped;
    int rc = header_parse(st, e);
    if (rc < 0) {
        safetensors_close(&st);
        return rc;
    }
    *out = st;
    return 0;
}

int safetensors_open(const char *path, struct safetensors **out, struct err *e)
{
    struct stat s;
    int rc, fd = fs_open_regular(path, e);
    *out = NULL;
    if (fd < 0)
        return fd;
    if (fstat(fd, &s) < 0)
        rc = err_errno(e, "%s", path);
    else if (s.st_size < LENGTH_SIZE)
        rc = err_set(e, ERR_CORRUPT, "%s: %lld bytes, too short for safetensors", path,
            (long long)s.st_size);
    else {
        void *p = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        rc = p == MAP_FAILED ? err_errno(e, "%s: cannot map", path)
                             : open_bytes(path, p, (size_t)s.st_size, 1, out, e);
    }
    close(fd);
    return rc;
}

int safetensors_open_memory(const void *bytes, size_t n, struct safetensors **out, struct err *e)
{
    *out = NULL;
    return open_bytes("safetensors in memory", bytes, n, 0, out, e);
}

void safetensors_close(struct safetensors **st)
{
    struct safetensors *s = *st;
    if (!s)
        return;
    if (s->mapped)
        munmap((void *)(uintptr_t)s->bytes, s->size);
    json_decref(s->header);
    free(s->items);
    free(s->by_name);
    free(s->name);
    free(s);
    *st = NULL;
}

int safetensors_count(const struct safetensors *st)
{
    return st->count;
}

const struct st_tensor *safetensors_at(const struct safetensors *st, int i)
{
    CHECK(i >= 0 && i < st->count);
    return &st->items[i];
}

const struct st_tensor *safetensors_find(const struct safetensors *st, const char *name)
{
    struct st_tensor wanted = {.name = name};
    const struct st_tensor *key = &wanted;
    if (st->count == 0)
        return NULL;
    const struct st_tensor **hit =
        bsearch(&key, st->by_name, (size_t)st->count, sizeof *st->by_name, compare_name);
    return hit ? *hit : NULL;
}

const char *safetensors_meta(const struct safetensors *st, const char *key)
{
    return json_string_value(json_object_get(st->meta, key));
}

/* --- widening --------------------------------------------------------------------------------- */

static float float_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static float widen_bf16(uint16_t v)
{
    return float_of_bits((uint32_t)v << 16);
}

static float widen_f16(uint16_t v)
{
    uint32_t sign = (uint32_t)(v & 0x8000) << 16, exponent = v >> 10 & 31, mantissa = v & 1023;
    if (exponent == 31) /* infinity, NaN */
        return float_of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent)
        return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f; /* zero and subnormals, exact */
    return sign ? -tiny : tiny;
}

int safetensors_read_f32(
    const struct safetensors *st, const char *name, int64_t count, float *out, struct err *e)
{
    const struct st_tensor *t = safetensors_find(st, name);
    if (!t)
        return err_set(e, ERR_INPUT, "has no tensor %s", name);
    if (t->dtype != ST_F32 && t->dtype != ST_BF16 && t->dtype != ST_F16)
        return err_set(e, ERR_INPUT, "tensor %s is %s, right would be F32, BF16 or F16", name,
            st_dtype_name(t->dtype));
    size_t n = t->bytes / st_dtype_bytes(t->dtype);
    if (count < 0 || n != (size_t)count)
        return err_set(
            e, ERR_INPUT, "tensor %s has %zu elements, %lld are needed", name, n, (long long)count);
    if (t->dtype == ST_F32) {
        memcpy(out, t->data, t->bytes);
        return 0;
    }
    float (*widen)(uint16_t) = t->dtype == ST_BF16 ? widen_bf16 : widen_f16;
    const uint8_t *p = t->data;
    for (size_t i = 0; i < n; i++)
        out[i] = widen(get_u16(p + 2 * i));
    return 0;
}

/* --- writing ---------------------------------------------------------------------------------- */

static json_t *meta_json(const char *const *meta)
{
    json_t *o = json_object();
    for (; o && *meta; meta += 2)
        if (json_object_set_new(o, meta[0], json_string(meta[1])) < 0) {
            json_decref(o);
            return NULL;
        }
    return o;
}

/* The header's JSON; NULL with an error for a tensor that cannot be written. */
static json_t *header_json(const char *path, const struct st_tensor *tensors, int count,
    const char *const *meta, struct err *e)
{
    json_t *o = json_object();
    uint64_t at = 0;
    if (meta && json_object_set_new(o, "__metadata__", meta_json(meta)) < 0) {
        err_set(e, ERR_INPUT, "%s: metadata is not UTF-8", path);
        goto fail;
    }
    for (int i = 0; i < count; i++) {
        const struct st_tensor *t = &tensors[i];
        size_t bytes = st_dtype_bytes(t->dtype);
        if (json_object_get(o, t->name)) {
            err_set(e, ERR_INPUT, "%s: tensor name \"%.200s\" is given twice", path, t->name);
            goto fail;
        }
        json_t *shape = json_array();
        for (int k = 0; k < t->ndim; k++) {
            json_array_append_new(shape, json_integer(t->shape[k]));
            CHECK(t->shape[k] >= 0 && mem_mul(bytes, (size_t)t->shape[k], &bytes) == 0);
        }
        CHECK(t->dtype != ST_OTHER && bytes == t->bytes);
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", st_dtype_name(t->dtype), "shape",
            shape, "data_offsets", (json_int_t)at, (json_int_t)(at + bytes));
        if (json_object_set_new(o, t->name, entry) < 0) {
            err_set(e, ERR_INPUT, "%s: tensor name \"%.200s\" is not UTF-8", path, t->name);
            goto fail;
        }
        at += bytes;
    }
    return o;
fail:
    json_decref(o);
    return NULL;
}

int safetensors_write(int fd, const char *path, const struct st_tensor *tensors, int count,
    const char *const *meta, struct err *e)
{
    json_t *o = header_json(path, tensors, count, meta, e);
    if (!o)
        return e ? e->code : ERR_INPUT;
    struct buf head = BUF_INIT;
    uint8_t length[LENGTH_SIZE] = {0};
    char *text = json_dumps(o, JSON_COMPACT);
    json_decref(o);
    if (!text)
        return err_set(e, ERR_NOMEM, "%s: no memory for the header", path);
    buf_add(&head, length, sizeof length);
    buf_add_str(&head, text);
    free(text);
    while (head.len % DATA_ALIGN)
        buf_add_char(&head, ' ');
    put_u64((uint8_t *)head.data, head.len - LENGTH_SIZE);
    int rc = fs_write_all(fd, head.data, head.len, path, e);
    buf_release(&head);
    for (int i = 0; rc == 0 && i < count; i++)
        rc = fs_write_all(fd, tensors[i].data, tensors[i].bytes, path, e);
    return rc;
}
