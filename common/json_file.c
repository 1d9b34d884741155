#include "common/json_file.h"

#include "common/fs.h"
#include "common/mem.h"

int json_file_read(
    const char *path, uint64_t max_bytes, json_t **out, char sha256[SHA256_HEX], struct err *e)
{
    struct buf text = BUF_INIT;
    json_error_t where;
    *out = NULL;
    int rc = fs_read(path, max_bytes, &text, e);
    if (rc == 0 && !(*out = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &where)))
        rc = err_set(e, ERR_CORRUPT, "%s:%d: %s", path, where.line, where.text);
    if (rc == 0 && sha256)
        hash_sha256_hex(text.data, text.len, sha256);
    buf_release(&text);
    return rc;
}
