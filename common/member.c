#include "common/member.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/mem.h"
#include "common/version.h"

struct member {
    struct member_id id;
    struct endpoint *ep;
    uint32_t epoch;
    int welcomed;
    double heartbeat;             /* seconds */
    double next_send, last_heard; /* monotonic seconds */
};

int member_new(struct bus *b, const struct member_id *id, struct member **out, struct err *e)
{
    struct member *m = mem_array(1, sizeof *m);
    char name[BUS_PEER_BYTES];
    /* With the pid: a process that was given up must not take its successor's place. */
    snprintf(name, sizeof name, "%s-%d-%d", id->role, id->rank, (int)getpid());
    m->id = *id;
    m->heartbeat = id->run->config.process.heartbeat_seconds;
    m->last_heard = m->next_send = clock_seconds();
    char *path = rundir_path(id->run, "%s", RUNDIR_CONTROL_SOCK);
    int rc = endpoint_connect(b, path, name, &m->ep, e);
    free(path);
    if (rc < 0) {
        free(m);
        return rc;
    }
    *out = m;
    return 0;
}

void member_free(struct member **pm, const char *reason)
{
    struct member *m = *pm;
    if (!m)
        return;
    if (reason && m->welcomed)
        member_send(m, WIRE_BYE, 0, json_pack("{s:s}", "reason", reason), NULL);
    endpoint_close(&m->ep);
    free(m);
    *pm = NULL;
}

struct endpoint *member_endpoint(struct member *m)
{
    return m->ep;
}

static int send_hello(struct member *m, struct err *e)
{
    const struct plan *p = &m->id.run->plan;
    return member_send(m, WIRE_HELLO, 0,
        json_pack("{s:s, s:i, s:i, s:i, s:s, s:s, s:s}", "role", m->id.role, "rank", m->id.rank,
            "world", m->id.world, "pid", (int)getpid(), "version", FULLBAND_VERSION, "plan_hash",
            p->hash, "manifest_root", p->manifest_root),
        e);
}

int member_tick(struct member *m, struct err *e)
{
    double now = clock_seconds(), silent = now - m->last_heard;
    if (silent > m->id.give_up_seconds)
        return err_set(e, ERR_TIMEOUT, "the scheduler has not answered for %.0f s", silent);
    if (now >= m->next_send) {
        m->next_send = now + m->heartbeat;
        /* A full queue or an absent scheduler is seen by its silence, not here. */
        if (m->welcomed && silent < 3 * m->heartbeat)
            member_send(m, WIRE_HEARTBEAT, 0, json_object(), NULL);
        else
            send_hello(m, NULL);
    }
    return (int)ceil((m->next_send - now) * 1000.0);
}

/* Takes in what every member treats alike. 1: hand it to the caller, 0: done with it. */
static int take_in(struct member *m, const struct message *msg, struct err *e)
{
    m->last_heard = clock_seconds();
    if (msg->head.type == WIRE_REFUSE) {
        json_t *j = message_json(msg, NULL);
        const char *reason = json_string_value(json_object_get(j, "reason"));
        int rc = err_set(
            e, ERR_MISMATCH, "refused by the scheduler: %s", reason ? reason : "no reason given");
        json_decref(j);
        return rc;
    }
    if (msg->head.run_epoch < m->epoch)
        return 0;
    if (msg->head.type == WIRE_WELCOME || msg->head.type == WIRE_RELOAD) {
        m->epoch = msg->head.run_epoch;
        m->welcomed = 1;
    }
    return msg->head.type != WIRE_HEARTBEAT;
}

int member_recv(struct member *m, struct message *msg, struct err *e)
{
    for (;;) {
        int rc = endpoint_recv(m->ep, 0, msg, e);
        if (rc == ERR_CORRUPT || rc == ERR_MISMATCH)
            continue;
        if (rc <= 0)
            return rc;
        rc = take_in(m, msg, e);
        if (rc == 1)
            return 1;
        message_release(msg);
        if (rc < 0)
            return rc;
    }
}

int member_send(struct member *m, int type, uint64_t request_id, json_t *j, struct err *e)
{
    CHECK(j);
    return endpoint_send_json(m->ep, NULL, type, m->epoch, request_id, j, e);
}

int member_welcomed(const struct member *m)
{
    return m->welcomed;
}

uint32_t member_epoch(const struct member *m)
{
    return m->epoch;
}
