#include "scheduler/serve.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/bus.h"
#include "common/clock.h"
#include "common/fs.h"
#include "common/log.h"
#include "common/process.h"
#include "scheduler/core.h"

#define MESSAGES_A_TURN  1024 /* then the timers have their turn */
#define LEAVE_MS         3000 /* how long the members may take to say BYE at the end */
#define WATCHDOG_SECONDS 10

struct server {
    const struct rundir *run;
    int lock_fd, signal_fd;
    struct bus *bus;
    struct endpoint *control;
    struct scheduler *core;
};

static int64_t now_ms(void)
{
    return (int64_t)(clock_seconds() * 1000.0);
}

/* -- opening and closing -- */

static int open_lock(struct server *v, struct err *e)
{
    char *path = rundir_path(v->run, "lock");
    v->lock_fd = fs_lock(path, e);
    free(path);
    if (v->lock_fd == ERR_STATE)
        return err_prefix(e, "another scheduler is at work on this run");
    return v->lock_fd < 0 ? v->lock_fd : 0;
}

static int open_socket(struct server *v, struct err *e)
{
    char *path = rundir_path(v->run, "%s", RUNDIR_CONTROL_SOCK), *dir = fs_dirname(path);
    int rc = fs_mkdir_p(dir, 0700, e);
    if (rc == 0)
        rc = bus_new(&v->bus, e);
    if (rc == 0)
        rc = endpoint_bind(v->bus, path, &v->control, e);
    free(dir);
    free(path);
    return rc;
}

/* The damage of a long start (hashing the newest checkpoint) is done before anyone may connect. */
static int open_all(struct server *v, struct err *e)
{
    int rc = process_signal_fd(&v->signal_fd, e);
    if (rc == 0)
        rc = open_lock(v, e);
    if (rc == 0)
        rc = scheduler_open(v->run, NULL, now_ms(), &v->core, e);
    if (rc == 0 && !scheduler_done(v->core))
        rc = open_socket(v, e);
    return rc;
}

static void close_all(struct server *v)
{
    scheduler_free(&v->core);
    endpoint_close(&v->control);
    alarm(WATCHDOG_SECONDS); /* should the sockets not close, the process still ends */
    bus_free(&v->bus);
    alarm(0);
    if (v->signal_fd >= 0)
        close(v->signal_fd);
    if (v->lock_fd >= 0)
        close(v->lock_fd);
}

/* -- the loop -- */

static void take_signals(struct server *v)
{
    for (int sig; (sig = process_signal_take(v->signal_fd));)
        scheduler_stop(
            v->core, sig == SIGINT ? "stopped by SIGINT" : "stopped by SIGTERM", now_ms());
}

static int take_messages(struct server *v, struct err *e)
{
    for (int i = 0; i < MESSAGES_A_TURN; i++) {
        struct message m;
        int rc = endpoint_recv(v->control, 0, &m, e);
        if (rc == ERR_CORRUPT || rc == ERR_MISMATCH) {
            complain(v->core, "%s", e->msg);
            continue;
        }
        if (rc <= 0)
            return rc;
        json_t *body = message_json(&m, NULL);
        scheduler_message(v->core, m.peer, &m.head, body, now_ms());
        json_decref(body);
        message_release(&m);
    }
    return 0;
}

static void send_messages(struct server *v)
{
    struct outgoing o;
    while (scheduler_next(v->core, &o)) {
        struct err e = {0};
        if (endpoint_send_json(v->control, o.peer, o.type, o.run_epoch, o.request_id, o.body, &e) <
            0) {
            log_warn(
                "not delivered", "to=%s type=%s why=\"%s\"", o.peer, wire_type_name(o.type), e.msg);
            scheduler_unreachable(v->core, o.peer, now_ms());
        }
    }
}

static int turn(struct server *v, int64_t wait_ms, struct err *e)
{
    struct bus_poll items[] = {{.ep = v->control, .fd = -1}, {.fd = v->signal_fd}};
    int rc = bus_wait(items, 2, (int)wait_ms, e);
    if (rc < 0)
        return rc;
    if (items[1].ready)
        take_signals(v);
    /* Before the timers: what has arrived while we were busy is no one's silence. */
    if ((rc = take_messages(v, e)) < 0)
        return rc;
    scheduler_tick(v->core, now_ms());
    send_messages(v);
    return 0;
}

/* Everyone was told to leave; those who are slow are not waited for. */
static void see_off(struct server *v)
{
    struct err e = {0};
    int64_t until = now_ms() + LEAVE_MS, left;
    while (v->core->members.count && (left = until - now_ms()) > 0)
        if (turn(v, left < 100 ? left : 100, &e) < 0)
            return;
}

static int loop(struct server *v)
{
    struct err e = {0};
    send_messages(v);
    while (!scheduler_done(v->core))
        if (turn(v, scheduler_wait_ms(v->core, now_ms()), &e) < 0) {
            log_error("the control socket is unusable", "why=\"%s\"", e.msg);
            return EXIT_RESTART;
        }
    see_off(v);
    return v->core->exit_code;
}

/* What a failure to start means for whoever would start it again. */
static int exit_code(int code)
{
    switch (code) {
    case ERR_NOMEM:
    case ERR_TIMEOUT:
        return EXIT_RESTART;
    case ERR_STATE:
    case ERR_CORRUPT:
    case ERR_MISMATCH:
        return EXIT_STAY_DOWN;
    default:
        return 1;
    }
}

int scheduler_serve(const struct rundir *run)
{
    struct server v = {.run = run, .lock_fd = -1, .signal_fd = -1};
    struct err e = {0};
    int rc = open_all(&v, &e), status;
    if (rc < 0) {
        log_error("cannot start", "why=\"%s\"", e.msg);
        status = exit_code(rc);
    } else if (scheduler_done(v.core)) {
        log_info(v.core->reason, "run=%s", run->path);
        status = 0;
    } else {
        log_info("ready", "run=%s run_epoch=%u step=%lld", run->path, v.core->epoch,
            (long long)v.core->commits.last);
        status = loop(&v);
        log_info("leaving", "state=%s exit=%d", run_state_name(v.core->state), status);
    }
    close_all(&v);
    return status;
}
