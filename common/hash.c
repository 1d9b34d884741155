#include "common/hash.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "common/fs.h"

static void to_hex(const unsigned char *digest, char out[SHA256_HEX])
{
    sodium_bin2hex(out, SHA256_HEX, digest, crypto_hash_sha256_BYTES);
}

int hash_is_sha256(const char *s)
{
    return s && strlen(s) == SHA256_HEX - 1 && !s[strspn(s, "0123456789abcdef")];
}

void hash_sha256_hex(const void *bytes, size_t n, char out[SHA256_HEX])
{
    unsigned char digest[crypto_hash_sha256_BYTES];
    crypto_hash_sha256(digest, bytes, n);
    to_hex(digest, out);
}

int hash_sha256_file(const char *path, char out[SHA256_HEX], uint64_t *bytes, struct err *e)
{
    static const size_t chunk = 1 << 16;
    unsigned char buf[1 << 16], digest[crypto_hash_sha256_BYTES];
    crypto_hash_sha256_state state;
    uint64_t total = 0;
    int fd = fs_open_regular(path, e);
    if (fd < 0)
        return fd;
    crypto_hash_sha256_init(&state);
    for (;;) {
        ssize_t n = read(fd, buf, chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            int rc = err_errno(e, "%s: read", path);
            close(fd);
            return rc;
        }
        if (n == 0)
            break;
        crypto_hash_sha256_update(&state, buf, (unsigned long long)n);
        total += (uint64_t)n;
    }
    close(fd);
    crypto_hash_sha256_final(&state, digest);
    to_hex(digest, out);
    if (bytes)
        *bytes = total;
    return 0;
}

uint64_t hash_xxh64(const void *bytes, size_t n, uint64_t seed)
{
    return XXH64(bytes, n, seed);
}

/* CRC-32C (Castagnoli, reflected) of every byte; made before main(), so no thread sees it half
 * made. */
static uint32_t crc_table[256];

__attribute__((constructor)) static void crc_table_init(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = c & 1 ? 0x82f63b78u ^ (c >> 1) : c >> 1;
        crc_table[i] = c;
    }
}

uint32_t hash_crc32c(uint32_t crc, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    crc = ~crc;
    while (n--)
        crc = crc_table[(crc ^ *p++) & 0xff] ^ (crc >> 8);
    return ~crc;
}
