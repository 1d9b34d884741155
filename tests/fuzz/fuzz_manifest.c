/* Any bytes as manifest.json: refused with an error, or a manifest whose sums and root hold. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    struct manifest m;
    struct err e = {0};
    if (manifest_parse((const char *)bytes, n, "manifest", &m, &e) < 0) {
        CHECK(e.code < 0 && e.msg[0] && !m.name);
        return 0;
    }
    char root[SHA256_HEX];
    manifest_root(&m, root);
    CHECK(strcmp(root, m.root) == 0);
    for (int k = 0; k < SPLIT_COUNT; k++) {
        uint64_t tokens = 0;
        for (int i = 0; i < m.splits[k].shard_count; i++) {
            CHECK(!strchr(m.splits[k].shards[i].file, '/') && *m.splits[k].shards[i].file != '.');
            tokens += m.splits[k].shards[i].tokens;
        }
        CHECK(tokens == m.splits[k].tokens);
    }
    manifest_release(&m);
    return 0;
}
