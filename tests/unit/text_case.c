#include "tests/unit/text_case.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "common/check.h"
#include "common/fs.h"
#include "common/mem.h"
#include "common/rng.h"
#include "common/tokenizer.h"
#include "loader/ingest.h"

void text_case_file(const char *dir, const char *name, const char *text, size_t n)
{
    char *path = mem_printf("%s/%s", dir, name), *parent = fs_dirname(path);
    CHECK(fs_mkdir_p(parent, 0755, NULL) == 0);
    CHECK(fs_write_atomic(path, text, n, NULL) == 0);
    free(parent);
    free(path);
}

void text_case_tokenizer(const char *dir, const char *name)
{
    json_t *vocab = json_object();
    int next = 256;
    for (int b = 0; b < 256; b++) {
        int plain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        int c = plain ? b : next++;
        char utf8[3] = {(char)c, 0, 0};
        if (c >= 128) {
            utf8[0] = (char)(0xc0 | c >> 6);
            utf8[1] = (char)(0x80 | (c & 0x3f));
        }
        json_object_set_new(vocab, utf8, json_integer(b));
    }
    json_t *j = json_pack("{s:[{s:i, s:s, s:b}], s:{s:s, s:b, s:b}, s:{s:s}, s:{s:s, s:o, s:[]}}",
        "added_tokens", "id", 256, "content", TOKENIZER_EOT, "special", 1, "pre_tokenizer", "type",
        "ByteLevel", "add_prefix_space", 0, "use_regex", 1, "decoder", "type", "ByteLevel", "model",
        "type", "BPE", "vocab", vocab, "merges");
    char *text = json_dumps(j, 0);
    text_case_file(dir, name, text, strlen(text));
    free(text);
    json_decref(j);
}

void text_case_corpus(const char *dir, const char *under, int first, int count)
{
    for (int i = first; i < first + count; i++) {
        char *name = mem_printf("%s/%c/doc-%03d.txt", under, 'a' + i % 3, i);
        struct buf text = BUF_INIT;
        buf_printf(&text, "Document %d\n", i);
        for (uint64_t k = rng_u64(7, (uint64_t)i) % 400; k > 0; k--)
            buf_printf(&text, "%llu ", (unsigned long long)(rng_u64((uint64_t)i, k) % 1000));
        text_case_file(dir, name, text.data, text.len);
        buf_release(&text);
        free(name);
    }
}

void text_case_source(const char *dir, const char *name, int first, int count, uint64_t shard_bytes)
{
    char *under = mem_printf("text-%s/corpus", name), *in = mem_printf("%s/%s", dir, under);
    char *out = mem_printf("%s/%s", dir, name), *tokenizer = mem_printf("%s/tokenizer.json", dir);
    const char *inputs[] = {in};
    struct ingest_report r;
    struct err e = {0};
    text_case_corpus(dir, under, first, count);
    struct ingest_options o = {.tokenizer = tokenizer,
        .out = out,
        .name = name,
        .inputs = inputs,
        .input_count = 1,
        .read = {.field = "text", .threads = 2},
        .val_share = 0.2,
        .seed = 1,
        .shard_bytes = shard_bytes,
        .block_tokens = 512};
    if (ingest_run(&o, NULL, NULL, &r, &e) < 0)
        fprintf(stderr, "%s\n", e.msg);
    CHECK(e.code == 0);
    free(tokenizer);
    free(out);
    free(in);
    free(under);
}

char *text_case_bin(void)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(n > 0);
    self[n] = 0;
    char *tests = fs_dirname(self), *bin = mem_printf("%s/../bin", tests);
    free(tests);
    return bin;
}
