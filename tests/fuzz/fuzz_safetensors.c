/* Any bytes as a safetensors file: refused with an error, or every tensor readable in full. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    struct safetensors *st;
    struct err e;
    if (safetensors_open_memory(bytes, n, &st, &e) < 0) {
        CHECK(!st && e.code < 0 && e.msg[0]);
        return 0;
    }
    size_t sum = 0;
    for (int i = 0; i < safetensors_count(st); i++) {
        const struct st_tensor *t = safetensors_at(st, i);
        CHECK(safetensors_find(st, t->name) == t);
        CHECK(
            (const uint8_t *)t->data >= bytes && (const uint8_t *)t->data + t->bytes <= bytes + n);
        sum += t->bytes;
        size_t size = st_dtype_bytes(t->dtype);
        if (t->dtype == ST_F32 || t->dtype == ST_BF16 || t->dtype == ST_F16) {
            float *f = malloc(t->bytes / size * sizeof *f + 1);
            CHECK(f && safetensors_read_f32(st, t->name, (int64_t)(t->bytes / size), f, &e) == 0);
            free(f);
        }
    }
    CHECK(sum < n);
    safetensors_close(&st);
    return 0;
}
