#include "trainer/uplink.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/mem.h"

#define FLUSH_MS  1000 /* for what is queued when the thread is told to end */
#define POLL_MS   1000 /* longest wait of the thread */
#define RETRY_MS  20   /* a full queue of the socket is tried again after this */
#define INBOX_MAX 4096 /* more than a correct scheduler ever has on the way */

struct inbound {
    struct message message;
    struct inbound *next;
};

struct outbound {
    int type;
    uint32_t run_epoch;
    json_t *body;
    struct outbound *next;
};

struct uplink {
    struct member *member; /* the thread's, once it runs */
    pthread_t thread;
    int wake_fd;    /* tells the thread that there is something to send, or to end */
    int event_fd;   /* tells the trainer that there is something to take */
    uint32_t epoch; /* this and the next: only through __atomic_ */
    int stopping;
    pthread_mutex_t lock; /* over all below */
    struct inbound *in, **in_tail;
    int in_count;
    struct outbound *out, **out_tail;
    struct err failed; /* code 0: running */
};

static int64_t now_ms(void)
{
    return (int64_t)(clock_seconds() * 1e3);
}

static void event_signal(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void event_clear(int fd)
{
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

/* -- the thread ----------------------------------------------------------------------------- */

static void inbox_put(struct uplink *c, struct message *m)
{
    struct inbound *node = mem_array(1, sizeof *node);
    node->message = *m;
    pthread_mutex_lock(&c->lock);
    int full = c->in_count >= INBOX_MAX;
    if (!full) {
        *c->in_tail = node;
        c->in_tail = &node->next;
        c->in_count++;
    }
    pthread_mutex_unlock(&c->lock);
    if (full) {
        message_release(&node->message);
        free(node);
    }
    event_signal(c->event_fd);
}

static struct outbound *outbox_take(struct uplink *c)
{
    pthread_mutex_lock(&c->lock);
    struct outbound *node = c->out;
    if (node) {
        c->out = node->next;
        if (!c->out)
            c->out_tail = &c->out;
    }
    pthread_mutex_unlock(&c->lock);
    return node;
}

static void outbox_put_back(struct uplink *c, struct outbound *node)
{
    pthread_mutex_lock(&c->lock);
    node->next = c->out;
    c->out = node;
    if (!node->next)
        c->out_tail = &node->next;
    pthread_mutex_unlock(&c->lock);
}

/* Sends what waits. 1: all of it; 0: the socket's queue is full, the rest waits. */
static int outbox_flush(struct uplink *c)
{
    struct outbound *node;
    while ((node = outbox_take(c))) {
        int rc = 0;
        if (node->run_epoch == member_epoch(c->member))
            rc = member_send(c->member, node->type, 0, json_incref(node->body), NULL);
        if (rc == ERR_TIMEOUT) {
            outbox_put_back(c, node);
            return 0;
        }
        json_decref(node->body);
        free(node);
    }
    return 1;
}

/* One turn: what is due, what waits, what came. */
static int turn(struct uplink *c, int longest_ms, int *flushed, struct err *e)
{
    struct message m;
    int rc, wait = member_tick(c->member, e);
    if (wait < 0)
        return wait;
    *flushed = outbox_flush(c);
    wait = wait < longest_ms ? wait : longest_ms;
    if (!*flushed && wait > RETRY_MS)
        wait = RETRY_MS;
    struct bus_poll items[] = {{.ep = member_endpoint(c->member), .fd = -1}, {.fd = c->wake_fd}};
    rc = bus_wait(items, 2, wait, e);
    if (rc < 0)
        return rc;
    if (items[1].ready)
        event_clear(c->wake_fd);
    while ((rc = member_recv(c->member, &m, e)) == 1) {
        __atomic_store_n(&c->epoch, member_epoch(c->member), __ATOMIC_SEQ_CST);
        inbox_put(c, &m);
    }
    return rc;
}

static void *thread_main(void *arg)
{
    struct uplink *c = arg;
    struct err e = {0};
    int rc = 0, flushed = 0;
    while (rc == 0 && !__atomic_load_n(&c->stopping, __ATOMIC_SEQ_CST))
        rc = turn(c, POLL_MS, &flushed, &e);
    for (int64_t end = now_ms() + FLUSH_MS; rc == 0 && now_ms() < end;) {
        rc = turn(c, 0, &flushed, &e);
        if (flushed)
            break;
    }
    if (rc < 0) {
        pthread_mutex_lock(&c->lock);
        c->failed = e;
        pthread_mutex_unlock(&c->lock);
        event_signal(c->event_fd);
    }
    return NULL;
}

/* -- the trainer's side ------------------------------------------------------------------- */

static void uplink_release(struct uplink *c)
{
    while (c->in) {
        struct inbound *node = c->in;
        c->in = node->next;
        message_release(&node->message);
        free(node);
    }
    for (struct outbound *node; (node = outbox_take(c));) {
        json_decref(node->body);
        free(node);
    }
    if (c->wake_fd >= 0)
        close(c->wake_fd);
    if (c->event_fd >= 0)
        close(c->event_fd);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

int uplink_start(struct bus *bus, const struct member_id *id, struct uplink **out, struct err *e)
{
    struct uplink *c = mem_array(1, sizeof *c);
    int rc = 0;
    pthread_mutex_init(&c->lock, NULL);
    c->in_tail = &c->in;
    c->out_tail = &c->out;
    c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->wake_fd < 0 || c->event_fd < 0)
        rc = err_errno(e, "uplink: eventfd");
    if (rc == 0)
        rc = member_new(bus, id, &c->member, e);
    if (rc == 0 && (errno = pthread_create(&c->thread, NULL, thread_main, c)) != 0) {
        rc = err_errno(e, "uplink: thread");
        member_free(&c->member, NULL);
    }
    if (rc < 0) {
        uplink_release(c);
        return rc;
    }
    *out = c;
    return 0;
}

void uplink_stop(struct uplink **pc, const char *reason)
{
    struct uplink *c = *pc;
    if (!c)
        return;
    __atomic_store_n(&c->stopping, 1, __ATOMIC_SEQ_CST);
    event_signal(c->wake_fd);
    pthread_join(c->thread, NULL);
    member_free(&c->member, reason);
    uplink_release(c);
    *pc = NULL;
}

int uplink_fd(const struct uplink *c)
{
    return c->event_fd;
}

int uplink_next(struct uplink *c, struct message *out, struct err *e)
{
    int rc = 0;
    pthread_mutex_lock(&c->lock);
    struct inbound *node = c->in;
    if (node) {
        c->in = node->next;
        if (!c->in)
            c->in_tail = &c->in;
        c->in_count--;
        rc = 1;
    } else if (c->failed.code) {
        rc = err_set(e, c->failed.code, "%s", c->failed.msg);
    } else {
        event_clear(c->event_fd);
    }
    pthread_mutex_unlock(&c->lock);
    if (node) {
        *out = node->message;
        free(node);
    }
    return rc;
}

void uplink_send(struct uplink *c, int type, uint32_t run_epoch, json_t *j)
{
    struct outbound *node = mem_array(1, sizeof *node);
    CHECK(j);
    *node = (struct outbound){.type = type, .run_epoch = run_epoch, .body = j};
    pthread_mutex_lock(&c->lock);
    *c->out_tail = node;
    c->out_tail = &node->next;
    pthread_mutex_unlock(&c->lock);
    event_signal(c->wake_fd);
}

uint32_t uplink_epoch(const struct uplink *c)
{
    return __atomic_load_n(&c->epoch, __ATOMIC_SEQ_CST);
}
