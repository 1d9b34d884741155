// Any bytes as tokenizer.json: an error, or a tokenizer with which text comes back as it was. The
// text is the end of the input itself, so that it meets the merges of the file.
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/tokenizer.h"

#define TEXT_BYTES 200

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void round_trip(const struct tokenizer *t, const char *text, size_t n)
{
    struct tokenizer_scratch *s = tokenizer_scratch_new(t);
    struct ids ids = {0};
    struct buf back = BUF_INIT;
    struct err e = {0};
    int rc = tokenizer_encode(t, s, text, n, &ids, &e);
    if (rc < 0) { /* a pattern of the file's that needs too many steps */
        CHECK(rc == ERR_UNSUPPORTED && e.msg[0] && ids.len == 0);
    } else {
        for (size_t i = 0; i < ids.len; i++)
            CHECK(!tokenizer_is_special(t, ids.data[i]));
        CHECK(tokenizer_decode(t, ids.data, ids.len, &back, &e) == 0);
        CHECK(back.len == n && (n == 0 || memcmp(back.data, text, n) == 0));
    }
    ids_release(&ids);
    buf_release(&back);
    tokenizer_scratch_free(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char plain[] = "It's 12345 <|endoftext|>\n\n  aaaa \xff\xc3 日本 e\u0301";
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (tokenizer_parse((const char *)data, size, &t, &e) < 0) {
        CHECK(e.msg[0] && !strchr(e.msg, '\n') && !t);
        return 0;
    }
    size_t n = size < TEXT_BYTES ? size : TEXT_BYTES;
    round_trip(t, (const char *)data + size - n, n);
    round_trip(t, plain, sizeof plain - 1);
    CHECK(tokenizer_eot(t) >= 0 && tokenizer_eot(t) < tokenizer_vocab(t));
    tokenizer_free(&t);
    return 0;
}
