/* Safetensors: what is written reads back, half types widen exactly, every kind of damage is
 * refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "tests/unit/temp_dir.h"

/* A file of the given header text and `data` zero bytes. */
static void file_of(const char *header, size_t data, struct buf *out)
{
    uint8_t length[8];
    put_u64(length, strlen(header));
    buf_clear(out);
    buf_add(out, length, sizeof length);
    buf_add_str(out, header);
    for (size_t i = 0; i < data; i++)
        buf_add_char(out, 0);
}

static const struct refusal {
    const char *header;
    size_t data;
    const char *says;
} refusals[] = {
    {"", 0, "does not begin"},
    {"[]", 0, "does not begin"},
    {"{", 0, "not JSON"},
    {"{}", 4, "its tensors take 0"},
    {"{\"a\":1}", 0, "not an object"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets"},
    {"{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "F33"},
    {"{\"a\":{\"dtype\":\"other\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "other"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, "shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "dimension 0"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4, "dimension 0"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "span 4 bytes"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 4, "leave"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "leave"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "leave"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "gap or an overlap"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 8, "tensors take 4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
     "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[3,5]}}",
        5, "gap or an overlap"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
        2, "duplicate"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775807,4],\"data_offsets\":[0,0]}}", 0,
        "overflow"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
        "9 dimensions"},
    {"{\"__metadata__\":[]}", 0, "__metadata__"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "\"k\""},
};

static void test_refuses(void **state)
{
    (void)state;
    struct buf b = BUF_INIT;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct safetensors *st;
        struct err e = {0};
        file_of(refusals[i].header, refusals[i].data, &b);
        assert_true(safetensors_open_memory(b.data, b.len, &st, &e) < 0);
        assert_null(st);
        if (!strstr(e.msg, refusals[i].says))
            fail_msg("header %s: \"%s\" does not say \"%s\"", refusals[i].header, e.msg,
                refusals[i].says);
    }
    buf_release(&b);
}

static void test_refuses_lengths(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {3, 1u << 30, UINT64_MAX, (uint64_t)1 << 63};
    uint8_t bytes[10] = {0, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    struct safetensors *st;
    struct err e;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        put_u64(bytes, lengths[i]);
        assert_int_equal(safetensors_open_memory(bytes, sizeof bytes, &st, &e), ERR_CORRUPT);
    }
    for (size_t n = 0; n < 8; n++)
        assert_int_equal(safetensors_open_memory(bytes, n, &st, &e), ERR_CORRUPT);
    put_u64(bytes, 2);
    assert_int_equal(safetensors_open_memory(bytes, sizeof bytes, &st, &e), 0);
    assert_int_equal(safetensors_count(st), 0);
    assert_null(safetensors_find(st, "a"));
    assert_null(safetensors_meta(st, "a"));
    safetensors_close(&st);
}

/* Tensors named out of the order of their data, with an empty one between. */
static void test_any_order(void **state)
{
    (void)state;
    struct buf b = BUF_INIT;
    struct safetensors *st;
    struct err e;
    file_of("{\"b\":{\"dtype\":\"I16\",\"shape\":[],\"data_offsets\":[3,5]},"
            "\"e\":{\"dtype\":\"F32\",\"shape\":[2,0],\"data_offsets\":[3,3]},"
            "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}   ",
        5, &b);
    assert_int_equal(safetensors_open_memory(b.data, b.len, &st, &e), 0);
    assert_int_equal(safetensors_count(st), 3);
    assert_string_equal(safetensors_at(st, 0)->name, "a");
    assert_string_equal(safetensors_at(st, 1)->name, "e");
    assert_string_equal(safetensors_at(st, 2)->name, "b");
    assert_int_equal(safetensors_find(st, "b")->dtype, ST_OTHER);
    assert_int_equal(safetensors_find(st, "b")->bytes, 2);
    safetensors_close(&st);
    buf_release(&b);
}

static void test_round_trip(void **state)
{
    (void)state;
    char *dir = temp_dir_make();
    static const float f[6] = {0.f, -1.5f, 3e38f, 1e-40f, 7.f, -0.f};
    static const int32_t ids[3] = {-1, 0, INT32_MAX};
    static const uint8_t none[1] = {0};
    static const char *const meta[] = {"format", "pt", "odd \"key\"", "line\nbreak", NULL};
    const struct st_tensor t[] = {
        {.name = "z.f", .dtype = ST_F32, .ndim = 2, .shape = {2, 3}, .data = f, .bytes = sizeof f},
        {.name = "a.\"ids\"",
            .dtype = ST_I32,
            .ndim = 1,
            .shape = {3},
            .data = ids,
            .bytes = sizeof ids},
        {.name = "none", .dtype = ST_U8, .ndim = 2, .shape = {0, 5}, .data = none, .bytes = 0},
    };
    struct err e;
    char *path = mem_printf("%s/x.safetensors", dir);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(safetensors_write(fileno(file), path, t, 3, meta, &e), 0);
    fclose(file);

    struct safetensors *st;
    if (safetensors_open(path, &st, &e) < 0)
        fail_msg("%s", e.msg);
    assert_int_equal(safetensors_count(st), 3);
    assert_string_equal(safetensors_meta(st, "odd \"key\""), "line\nbreak");
    assert_null(safetensors_meta(st, "absent"));
    for (int i = 0; i < 3; i++) {
        const struct st_tensor *r = safetensors_find(st, t[i].name);
        assert_non_null(r);
        assert_ptr_equal(r, safetensors_at(st, i));
        assert_int_equal(r->dtype, t[i].dtype);
        assert_int_equal(r->ndim, t[i].ndim);
        assert_memory_equal(r->shape, t[i].shape, sizeof(int64_t) * (size_t)r->ndim);
        assert_int_equal(r->bytes, t[i].bytes);
        if (r->bytes)
            assert_memory_equal(r->data, t[i].data, r->bytes);
    }
    assert_int_equal((uintptr_t)safetensors_at(st, 0)->data % 64, 0);
    float out[6];
    assert_int_equal(safetensors_read_f32(st, "z.f", 6, out, &e), 0);
    assert_memory_equal(out, f, sizeof f);
    assert_int_equal(safetensors_read_f32(st, "z.f", 5, out, &e), ERR_INPUT);
    assert_int_equal(safetensors_read_f32(st, "none", 0, out, &e), ERR_INPUT);
    assert_int_equal(safetensors_read_f32(st, "q", 6, out, &e), ERR_INPUT);
    safetensors_close(&st);

    /* One byte short: refused at open. */
    assert_int_equal(truncate(path, fs_size(path, NULL) - 1), 0);
    assert_int_equal(safetensors_open(path, &st, &e), ERR_CORRUPT);
    assert_non_null(strstr(e.msg, path));
    assert_true(safetensors_open(dir, &st, &e) < 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(safetensors_open(path, &st, &e), ERR_IO);
    free(path);
    temp_dir_remove(&dir);
}

static void test_name_twice(void **state)
{
    (void)state;
    static const float f[1] = {1};
    const struct st_tensor t = {"a", ST_F32, 1, {1}, f, 4}, two[] = {t, t};
    struct err e;
    assert_int_equal(safetensors_write(-1, "x", two, 2, NULL, &e), ERR_INPUT);
}

/* binary16 and bfloat16 by their definition, in double. */
static double by_definition(uint16_t v, int exponent_bits)
{
    int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = v >> mantissa_bits & ((1 << exponent_bits) - 1);
    double mantissa = ldexp(v & ((1 << mantissa_bits) - 1), -mantissa_bits);
    double sign = v & 0x8000 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1)
        return mantissa != 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1 + mantissa, exponent - bias) : ldexp(mantissa, 1 - bias));
}

static void test_widening(void **state)
{
    (void)state;
    enum { ALL = 65536 };
    static float out[ALL];
    static const struct {
        const char *dtype;
        int exponent_bits;
    } kinds[] = {{"F16", 5}, {"BF16", 8}};
    for (int k = 0; k < 2; k++) {
        char header[128];
        struct buf b = BUF_INIT;
        struct safetensors *st;
        struct err e;
        snprintf(header, sizeof header,
            "{\"a\":{\"dtype\":\"%s\",\"shape\":[65536],\"data_offsets\":[0,131072]}}",
            kinds[k].dtype);
        file_of(header, 2 * ALL, &b);
        for (uint32_t i = 0; i < ALL; i++)
            put_u16((uint8_t *)b.data + b.len - 2 * ALL + 2 * i, (uint16_t)i);
        assert_int_equal(safetensors_open_memory(b.data, b.len, &st, &e), 0);
        assert_int_equal(safetensors_read_f32(st, "a", ALL, out, &e), 0);
        for (uint32_t i = 0; i < ALL; i++) {
            double right = by_definition((uint16_t)i, kinds[k].exponent_bits);
            if (isnan(right) ? !isnan(out[i])
                             : out[i] != right || !signbit(out[i]) != !signbit(right))
                fail_msg("%s %04x: %g, right %g", kinds[k].dtype, i, out[i], right);
        }
        safetensors_close(&st);
        buf_release(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_refuses_lengths),
        cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_name_twice),
        cmocka_unit_test(test_widening),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
