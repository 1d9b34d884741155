#include "ops/control.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/clock.h"

struct control {
    struct bus *bus;
    struct endpoint *ep;
    uint64_t request;
};

int control_new(const struct rundir *run, struct control **out, struct err *e)
{
    struct control *c = mem_array(1, sizeof *c);
    char *path = rundir_path(run, RUNDIR_CONTROL_SOCK);
    char identity[BUS_PEER_BYTES];
    snprintf(identity, sizeof identity, "operator-%d", (int)getpid());
    int rc = bus_new(&c->bus, e);
    if (rc == 0)
        rc = endpoint_connect(c->bus, path, identity, &c->ep, e);
    free(path);
    *out = c;
    if (rc < 0)
        control_free(out);
    return rc;
}

void control_free(struct control **c)
{
    if (!*c)
        return;
    endpoint_close(&(*c)->ep);
    bus_free(&(*c)->bus);
    free(*c);
    *c = NULL;
}

struct endpoint *control_endpoint(struct control *c)
{
    return c->ep;
}

static int ask(struct control *c, int type, struct err *e)
{
    return endpoint_send_json(c->ep, NULL, type, 0, ++c->request, json_object(), e);
}

int control_ask_status(struct control *c, struct err *e)
{
    return ask(c, WIRE_STATUS_GET, e);
}

int control_ask_stop(struct control *c, struct err *e)
{
    return ask(c, WIRE_STOP, e);
}

int control_take(struct control *c, int timeout_ms, int *type, json_t **body, struct err *e)
{
    for (;;) {
        struct message m;
        int rc = endpoint_recv(c->ep, timeout_ms, &m, e);
        timeout_ms = 0;
        if (rc == ERR_CORRUPT || rc == ERR_MISMATCH)
            continue;
        if (rc <= 0)
            return rc;
        *type = m.head.type;
        *body = *type == WIRE_STATUS || *type == WIRE_STOP_ACK ? message_json(&m, NULL) : NULL;
        message_release(&m);
        if (*body)
            return 1;
    }
}

json_t *control_status(struct control *c, int timeout_ms)
{
    double until = clock_seconds() + timeout_ms / 1e3;
    int type;
    json_t *body = NULL;
    if (control_ask_status(c, NULL) < 0)
        return NULL;
    for (;;) {
        int left = (int)((until - clock_seconds()) * 1e3);
        if (left <= 0 || control_take(c, left, &type, &body, NULL) < 0)
            return NULL;
        if (body && type == WIRE_STATUS)
            return body;
        json_decref(body);
        body = NULL;
    }
}
