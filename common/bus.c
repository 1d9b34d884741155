#include "common/bus.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include "common/check.h"
#include "common/fs.h"
#include "common/mem.h"

/*
 * Messages a queue holds before a send is refused. Control traffic is far below it; batches are
 * bounded by the trainers' credit.
 */
#define QUEUE_MESSAGES    1024
#define SOCKET_TIMEOUT_MS 1000 /* a net under the non-blocking calls, never reached */
#define RECONNECT_MS      50
#define RECONNECT_MAX_MS  1000
#define BUS_MAX_POLL      64

struct bus {
    void *ctx;
    int *dir_fds; /* of long paths: they live until the I/O thread is gone, which uses them last */
    int dir_fd_count;
};

struct endpoint {
    void *socket;
    int router; /* 1: bound, messages carry an identity frame */
    uint64_t sequence;
    char *path;    /* as given, for errors */
    char *address; /* what ZeroMQ was told */
};

static int zmq_error(struct err *e, const char *what, const char *where)
{
    int code = errno == EAGAIN ? ERR_TIMEOUT : errno == ENOMEM ? ERR_NOMEM : ERR_IO;
    return err_set(e, code, "%s: %s: %s", where, what, zmq_strerror(errno));
}

void message_release(struct message *m)
{
    free(m->body);
    memset(m, 0, sizeof *m);
}

int bus_new(struct bus **out, struct err *e)
{
    void *ctx = zmq_ctx_new();
    if (!ctx)
        return zmq_error(e, "new context", "zmq");
    zmq_ctx_set(ctx, ZMQ_BLOCKY, 0);
    struct bus *b = mem_array(1, sizeof *b);
    b->ctx = ctx;
    *out = b;
    return 0;
}

void bus_free(struct bus **b)
{
    if (!*b)
        return;
    while (zmq_ctx_term((*b)->ctx) < 0 && errno == EINTR)
        ;
    for (int i = 0; i < (*b)->dir_fd_count; i++)
        close((*b)->dir_fds[i]);
    free((*b)->dir_fds);
    free(*b);
    *b = NULL;
}

/* -- opening -- */

static int set_int(struct endpoint *ep, int option, int value, struct err *e)
{
    if (zmq_setsockopt(ep->socket, option, &value, sizeof value) < 0)
        return zmq_error(e, "socket option", ep->path);
    return 0;
}

static int set_options(struct endpoint *ep, struct err *e)
{
    static const struct {
        int option, value;
    } common[] = {
        {ZMQ_LINGER, 0},
        {ZMQ_SNDTIMEO, SOCKET_TIMEOUT_MS},
        {ZMQ_RCVTIMEO, SOCKET_TIMEOUT_MS},
        {ZMQ_SNDHWM, QUEUE_MESSAGES},
        {ZMQ_RCVHWM, QUEUE_MESSAGES},
        {ZMQ_RECONNECT_IVL, RECONNECT_MS},
        {ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS},
    };
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < sizeof common / sizeof *common; i++)
        rc = set_int(ep, common[i].option, common[i].value, e);
    if (rc == 0 && ep->router) {
        rc = set_int(ep, ZMQ_ROUTER_MANDATORY, 1, e);
        if (rc == 0)
            rc = set_int(ep, ZMQ_ROUTER_HANDOVER, 1, e);
    }
    /* Batches only travel towards a DEALER: a larger frame ends the sender's connection. */
    int64_t limit = ep->router ? WIRE_MAX_CONTROL_BYTES : WIRE_MAX_BATCH_BYTES;
    if (rc == 0 && zmq_setsockopt(ep->socket, ZMQ_MAXMSGSIZE, &limit, sizeof limit) < 0)
        rc = zmq_error(e, "ZMQ_MAXMSGSIZE", ep->path);
    return rc;
}

/*
 * "ipc://PATH". A UNIX address holds 107 bytes; a longer path is reached through its directory,
 * which stays open for as long as the I/O thread may bind, reconnect or unlink.
 */
static int make_address(struct bus *b, struct endpoint *ep, struct err *e)
{
    struct sockaddr_un limit;
    if (strlen(ep->path) < sizeof limit.sun_path) {
        ep->address = mem_printf("ipc://%s", ep->path);
        return 0;
    }
    char *dir = fs_dirname(ep->path);
    const char *name = strrchr(ep->path, '/') ? strrchr(ep->path, '/') + 1 : ep->path;
    int fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 ? err_errno(e, "%s", dir) : 0;
    free(dir);
    if (rc < 0)
        return rc;
    b->dir_fds = mem_grow_array(b->dir_fds, (size_t)b->dir_fd_count + 1, sizeof *b->dir_fds);
    b->dir_fds[b->dir_fd_count++] = fd;
    ep->address = mem_printf("ipc:///proc/self/fd/%d/%s", fd, name);
    if (strlen(ep->address) - strlen("ipc://") >= sizeof limit.sun_path)
        return err_set(e, ERR_INPUT, "%s: the socket's name has %zu characters, 80 are possible",
            ep->path, strlen(name));
    return 0;
}

static int check_identity(const char *identity, const char *path, struct err *e)
{
    size_t n = strlen(identity);
    if (n == 0 || n >= BUS_PEER_BYTES)
        return err_set(e, ERR_INPUT, "%s: identity \"%.80s\" has %zu characters, 1 to %d expected",
            path, identity, n, BUS_PEER_BYTES - 1);
    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)identity[i]))
            return err_set(e, ERR_INPUT, "%s: identity holds byte %d, printable ones expected",
                path, (unsigned char)identity[i]);
    return 0;
}

static int endpoint_open(
    struct bus *b, const char *path, const char *identity, struct endpoint **out, struct err *e)
{
    struct endpoint *ep = mem_array(1, sizeof *ep);
    int rc = ERR_IO;
    ep->router = !identity;
    ep->path = mem_strdup(path);
    if (identity && (rc = check_identity(identity, path, e)) < 0)
        goto fail;
    ep->socket = zmq_socket(b->ctx, ep->router ? ZMQ_ROUTER : ZMQ_DEALER);
    if (!ep->socket) {
        rc = zmq_error(e, "new socket", path);
        goto fail;
    }
    if ((rc = set_options(ep, e)) < 0 || (rc = make_address(b, ep, e)) < 0)
        goto fail;
    if (identity && zmq_setsockopt(ep->socket, ZMQ_ROUTING_ID, identity, strlen(identity)) < 0) {
        rc = zmq_error(e, "identity", path);
        goto fail;
    }
    *out = ep;
    return 0;
fail:
    endpoint_close(&ep);
    return rc;
}

/* Takes away what a process that died left there; nothing but a socket. */
static int remove_stale(const char *path, struct err *e)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return errno == ENOENT ? 0 : err_errno(e, "%s", path);
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, ERR_INPUT, "%s: exists and is not a socket; choose another path", path);
    return unlink(path) < 0 ? err_errno(e, "%s: stale socket", path) : 0;
}

int endpoint_bind(struct bus *b, const char *path, struct endpoint **out, struct err *e)
{
    struct endpoint *ep;
    int rc = endpoint_open(b, path, NULL, &ep, e);
    if (rc < 0)
        return rc;
    rc = remove_stale(path, e);
    if (rc == 0 && zmq_bind(ep->socket, ep->address) < 0)
        rc = zmq_error(e, "bind", path);
    if (rc < 0)
        endpoint_close(&ep);
    else
        *out = ep;
    return rc;
}

int endpoint_connect(
    struct bus *b, const char *path, const char *identity, struct endpoint **out, struct err *e)
{
    struct endpoint *ep;
    int rc = endpoint_open(b, path, identity, &ep, e);
    if (rc < 0)
        return rc;
    if (zmq_connect(ep->socket, ep->address) < 0) {
        rc = zmq_error(e, "connect", path);
        endpoint_close(&ep);
        return rc;
    }
    *out = ep;
    return 0;
}

void endpoint_close(struct endpoint **ep)
{
    struct endpoint *p = *ep;
    if (!p)
        return;
    if (p->socket)
        zmq_close(p->socket);
    free(p->path);
    free(p->address);
    free(p);
    *ep = NULL;
}

/* -- sending -- */

static int send_frame(struct endpoint *ep, const void *bytes, size_t n)
{
    int rc;
    do
        rc = zmq_send(ep->socket, bytes, n, ZMQ_DONTWAIT | ZMQ_SNDMORE);
    while (rc < 0 && errno == EINTR);
    return rc;
}

/*
 * Whether the peer exists and has room is decided at the first frame; the others follow it into
 * the same queue. The body is made before, so that want of memory leaves no half message.
 */
static int send_message(struct endpoint *ep, const char *peer, const uint8_t *head, zmq_msg_t *body)
{
    if (peer && send_frame(ep, peer, strlen(peer)) < 0)
        return -1;
    if (send_frame(ep, head, WIRE_HEADER_BYTES) < 0)
        return -1;
    int rc;
    do
        rc = zmq_msg_send(body, ep->socket, ZMQ_DONTWAIT);
    while (rc < 0 && errno == EINTR);
    return rc;
}

int endpoint_send(struct endpoint *ep, const char *peer, int type, uint32_t run_epoch,
    uint64_t request_id, const void *body, size_t n, struct err *e)
{
    const char *name = wire_type_name(type);
    CHECK(name);
    CHECK((peer != NULL) == ep->router);
    size_t limit = type == WIRE_BATCH ? WIRE_MAX_BATCH_BYTES : WIRE_MAX_CONTROL_BYTES;
    if (n > limit)
        return err_set(e, ERR_INPUT, "%s: a %s body of %zu bytes, at most %zu can be sent",
            ep->path, name, n, limit);
    struct wire_header h = {.type = type,
        .major = WIRE_MAJOR,
        .minor = WIRE_MINOR,
        .run_epoch = run_epoch,
        .sequence = ep->sequence + 1,
        .request_id = request_id,
        .body_bytes = n};
    uint8_t head[WIRE_HEADER_BYTES];
    wire_encode(&h, body, head);
    zmq_msg_t frame;
    if (zmq_msg_init_size(&frame, n) < 0)
        return zmq_error(e, name, ep->path);
    if (n)
        memcpy(zmq_msg_data(&frame), body, n);
    if (send_message(ep, peer, head, &frame) < 0) {
        int saved = errno;
        zmq_msg_close(&frame);
        errno = saved;
        if (saved == EHOSTUNREACH)
            return err_set(e, ERR_IO, "%s: peer %s is gone", ep->path, peer ? peer : "");
        return zmq_error(e, name, ep->path);
    }
    ep->sequence++;
    return 0;
}

int endpoint_send_json(struct endpoint *ep, const char *peer, int type, uint32_t run_epoch,
    uint64_t request_id, json_t *j, struct err *e)
{
    char *text = j ? json_dumps(j, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(j);
    if (!text)
        return err_set(e, ERR_INPUT, "%s: the %s body cannot be written as JSON", ep->path,
            wire_type_name(type));
    int rc = endpoint_send(ep, peer, type, run_epoch, request_id, text, strlen(text), e);
    free(text);
    return rc;
}

/* -- receiving -- */

#define MAX_FRAMES 3 /* identity, header, body */

/* Reads one whole ZeroMQ message: *count frames kept, any more read and thrown away but counted. */
static int recv_frames(struct endpoint *ep, zmq_msg_t frames[MAX_FRAMES], int *count)
{
    int more = 1;
    *count = 0;
    while (more) {
        zmq_msg_t extra, *f = *count < MAX_FRAMES ? &frames[*count] : &extra;
        zmq_msg_init(f);
        int rc = zmq_msg_recv(f, ep->socket, ZMQ_DONTWAIT);
        while (rc < 0 && errno == EINTR && *count)
            rc = zmq_msg_recv(f, ep->socket, ZMQ_DONTWAIT);
        if (rc < 0) {
            zmq_msg_close(f);
            return -1;
        }
        more = zmq_msg_more(f);
        if (f == &extra)
            zmq_msg_close(f);
        (*count)++;
    }
    return 0;
}

static int take_peer(zmq_msg_t *f, const char *path, char peer[BUS_PEER_BYTES], struct err *e)
{
    size_t n = zmq_msg_size(f);
    char text[BUS_PEER_BYTES] = {0};
    /* An identity that ZeroMQ made up begins with a zero byte. */
    if (n == 0 || n >= BUS_PEER_BYTES)
        return err_set(e, ERR_CORRUPT,
            "%s: a sender with an identity of %zu bytes, 1 to %d expected", path, n,
            BUS_PEER_BYTES - 1);
    memcpy(text, zmq_msg_data(f), n);
    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)text[i]))
            return err_set(e, ERR_CORRUPT, "%s: a sender without a printable identity (byte %d)",
                path, (unsigned char)text[i]);
    memcpy(peer, text, sizeof text);
    return 0;
}

static int parse_frames(
    struct endpoint *ep, zmq_msg_t *frames, int count, struct message *m, struct err *e)
{
    int first = ep->router, want = first + 2, rc;
    if (first && (rc = take_peer(&frames[0], ep->path, m->peer, e)) < 0)
        return rc;
    if (count != want)
        return err_set(e, ERR_CORRUPT, "%s: a message of %d frames from %s, 2 expected", ep->path,
            count - first, first ? m->peer : "the other side");
    zmq_msg_t *body = &frames[first + 1];
    rc = wire_decode(zmq_msg_data(&frames[first]), zmq_msg_size(&frames[first]), zmq_msg_data(body),
        zmq_msg_size(body), &m->head, e);
    if (rc < 0)
        return err_prefix(e, "%s: from %s", ep->path, first ? m->peer : "the other side");
    size_t n = zmq_msg_size(body);
    m->body = mem_try_array(n + 1, 1); /* a 0 behind it, and never NULL */
    if (!m->body)
        return err_set(e, ERR_CORRUPT, "%s: no memory for a body of %zu bytes", ep->path, n);
    memcpy(m->body, zmq_msg_data(body), n);
    m->body_bytes = n;
    return 0;
}

int endpoint_recv(struct endpoint *ep, int timeout_ms, struct message *m, struct err *e)
{
    zmq_msg_t frames[MAX_FRAMES];
    int count, rc;
    memset(m, 0, sizeof *m);
    for (int waited = 0;; waited = 1) {
        rc = recv_frames(ep, frames, &count);
        if (rc == 0)
            break;
        for (int i = 0; i < count && i < MAX_FRAMES; i++)
            zmq_msg_close(&frames[i]);
        if (errno == EINTR)
            return 0;
        if (errno != EAGAIN)
            return err_set(e, ERR_IO, "%s: receive: %s", ep->path, zmq_strerror(errno));
        if (waited || timeout_ms == 0)
            return 0;
        struct bus_poll item = {.ep = ep, .fd = -1};
        rc = bus_wait(&item, 1, timeout_ms, e);
        if (rc <= 0)
            return rc;
    }
    rc = parse_frames(ep, frames, count, m, e);
    for (int i = 0; i < count && i < MAX_FRAMES; i++)
        zmq_msg_close(&frames[i]);
    if (rc < 0) {
        message_release(m);
        return rc;
    }
    return 1;
}

json_t *message_json(const struct message *m, struct err *e)
{
    const char *name = wire_type_name(m->head.type);
    json_error_t je;
    json_t *j =
        json_loadb(m->body_bytes ? m->body : "", m->body_bytes, JSON_REJECT_DUPLICATES, &je);
    if (!j) {
        err_set(e, ERR_INPUT, "%s body: %s at byte %d", name ? name : "?", je.text, je.position);
        return NULL;
    }
    if (!json_is_object(j)) {
        err_set(e, ERR_INPUT, "%s body: not a JSON object", name ? name : "?");
        json_decref(j);
        return NULL;
    }
    return j;
}

/*
 * zmq_poll takes sockets and descriptors together and looks at a socket's events itself, so the
 * edge-triggered ZMQ_FD never has to be handled here.
 */
int bus_wait(struct bus_poll *items, int count, int timeout_ms, struct err *e)
{
    zmq_pollitem_t poll[BUS_MAX_POLL];
    CHECK(count >= 0 && count <= BUS_MAX_POLL);
    for (int i = 0; i < count; i++) {
        poll[i] = (zmq_pollitem_t){.socket = items[i].ep ? items[i].ep->socket : NULL,
            .fd = items[i].ep ? -1 : items[i].fd,
            .events = ZMQ_POLLIN};
        items[i].ready = 0;
    }
    /* No wait without an end: "for ever" is a second, and the caller asks again. */
    int n = zmq_poll(poll, count, timeout_ms < 0 ? 1000 : timeout_ms);
    if (n < 0)
        return errno == EINTR ? 0 : zmq_error(e, "poll", "bus");
    for (int i = 0; i < count; i++)
        items[i].ready = poll[i].revents != 0;
    return n;
}
