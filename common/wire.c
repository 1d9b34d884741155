#include "common/wire.h"

#include "common/hash.h"
#include "common/mem.h"

#define WIRE_MAGIC            0x444e4246u /* "FBND" */
#define WIRE_MAX_HEADER_BYTES 4096u       /* what a later minor may grow it to */

/* Where each field lies; the layout is the one in wire.h. */
enum {
    AT_MAGIC = 0,
    AT_MAJOR = 4,
    AT_MINOR = 5,
    AT_TYPE = 6,
    AT_HEADER_BYTES = 8,
    AT_FLAGS = 10,
    AT_RUN_EPOCH = 12,
    AT_SEQUENCE = 16,
    AT_REQUEST_ID = 24,
    AT_BODY_BYTES = 32,
    AT_CRC = 40,
    AT_RESERVED = 44
};

const char *wire_type_name(int type)
{
    static const struct {
        int type;
        const char *name;
    } names[] = {
#define X(name, number) {number, #name},
        WIRE_TYPES(X)
#undef X
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].type == type)
            return names[i].name;
    return NULL;
}

static uint32_t checksum(const uint8_t *header, const void *body, size_t body_bytes)
{
    uint32_t crc = hash_crc32c(0, header, AT_CRC);
    return body_bytes ? hash_crc32c(crc, body, body_bytes) : crc;
}

void wire_encode(const struct wire_header *h, const void *body, uint8_t out[WIRE_HEADER_BYTES])
{
    put_u32(out + AT_MAGIC, WIRE_MAGIC);
    out[AT_MAJOR] = (uint8_t)h->major;
    out[AT_MINOR] = (uint8_t)h->minor;
    put_u16(out + AT_TYPE, (uint16_t)h->type);
    put_u16(out + AT_HEADER_BYTES, WIRE_HEADER_BYTES);
    put_u16(out + AT_FLAGS, h->flags);
    put_u32(out + AT_RUN_EPOCH, h->run_epoch);
    put_u64(out + AT_SEQUENCE, h->sequence);
    put_u64(out + AT_REQUEST_ID, h->request_id);
    put_u64(out + AT_BODY_BYTES, h->body_bytes);
    put_u32(out + AT_CRC, checksum(out, body, (size_t)h->body_bytes));
    put_u32(out + AT_RESERVED, 0);
    put_u64(out + AT_RESERVED + 4, 0);
}

/* Magic, version and header length: what must hold before anything else of the frame means
 * something. */
static int check_frame(const uint8_t *p, size_t n, struct err *e)
{
    if (n < WIRE_HEADER_BYTES)
        return err_set(e, ERR_CORRUPT, "message header: %zu bytes, at least %d expected", n,
            WIRE_HEADER_BYTES);
    if (get_u32(p + AT_MAGIC) != WIRE_MAGIC)
        return err_set(e, ERR_CORRUPT, "message header: magic %08x, %08x expected",
            get_u32(p + AT_MAGIC), WIRE_MAGIC);
    if (p[AT_MAJOR] != WIRE_MAJOR)
        return err_set(e, ERR_MISMATCH,
            "message header: protocol version %d.%d, this program speaks %d.%d", p[AT_MAJOR],
            p[AT_MINOR], WIRE_MAJOR, WIRE_MINOR);
    unsigned header = get_u16(p + AT_HEADER_BYTES);
    if (header < WIRE_HEADER_BYTES || header > WIRE_MAX_HEADER_BYTES)
        return err_set(e, ERR_CORRUPT, "message header: header length %u, %d to %u expected",
            header, WIRE_HEADER_BYTES, WIRE_MAX_HEADER_BYTES);
    if (header != n)
        return err_set(e, ERR_CORRUPT,
            "message header: header length %u, but the frame has %zu bytes", header, n);
    if (header > WIRE_HEADER_BYTES && p[AT_MINOR] <= WIRE_MINOR)
        return err_set(e, ERR_CORRUPT,
            "message header: header length %u at version %d.%d, %d expected", header, p[AT_MAJOR],
            p[AT_MINOR], WIRE_HEADER_BYTES);
    return 0;
}

static int check_body(const uint8_t *p, const struct wire_header *h, const void *body,
    size_t body_bytes, struct err *e)
{
    uint64_t limit = h->type == WIRE_BATCH ? WIRE_MAX_BATCH_BYTES : WIRE_MAX_CONTROL_BYTES;
    if (h->body_bytes != body_bytes)
        return err_set(e, ERR_CORRUPT,
            "message header: body length %llu, but the body has %zu bytes",
            (unsigned long long)h->body_bytes, body_bytes);
    if (h->body_bytes > limit)
        return err_set(e, ERR_CORRUPT,
            "message header: body length %llu, at most %llu expected of type %d",
            (unsigned long long)h->body_bytes, (unsigned long long)limit, h->type);
    uint32_t crc = checksum(p, body, body_bytes);
    if (crc != get_u32(p + AT_CRC))
        return err_set(
            e, ERR_CORRUPT, "message: checksum %08x, %08x expected", get_u32(p + AT_CRC), crc);
    return 0;
}

int wire_decode(const void *frame, size_t n, const void *body, size_t body_bytes,
    struct wire_header *out, struct err *e)
{
    const uint8_t *p = frame;
    int rc = check_frame(p, n, e);
    if (rc < 0)
        return rc;
    struct wire_header h = {
        .type = get_u16(p + AT_TYPE),
        .major = p[AT_MAJOR],
        .minor = p[AT_MINOR],
        .flags = get_u16(p + AT_FLAGS),
        .run_epoch = get_u32(p + AT_RUN_EPOCH),
        .sequence = get_u64(p + AT_SEQUENCE),
        .request_id = get_u64(p + AT_REQUEST_ID),
        .body_bytes = get_u64(p + AT_BODY_BYTES),
    };
    if ((rc = check_body(p, &h, body, body_bytes, e)) < 0)
        return rc;
    /* A later minor may have given the reserved bytes a meaning; ours has not. */
    for (int i = AT_RESERVED; i < WIRE_HEADER_BYTES && h.minor <= WIRE_MINOR; i++)
        if (p[i])
            return err_set(
                e, ERR_CORRUPT, "message header: reserved byte %d is %d, 0 expected", i, p[i]);
    if (!wire_type_name(h.type))
        return err_set(e, ERR_MISMATCH,
            "message header: type %d is not one of version %d.%d (sender: %d.%d)", h.type,
            WIRE_MAJOR, WIRE_MINOR, h.major, h.minor);
    *out = h;
    return 0;
}
