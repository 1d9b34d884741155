#include "evaluator/daemon.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/field.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/member.h"
#include "common/process.h"
#include "evaluator/worker.h"

enum { EXIT_REFUSED = 100, EXIT_RESTART = 111 };

static const double ask_seconds = 1, resend_seconds = 2, give_up_seconds = 60;

struct daemon {
    const struct rundir *run;
    struct bus *bus;
    struct member *member;
    struct worker *worker;
    int signals;
    char *job_id;     /* of the job being scored or reported; NULL: idle */
    json_t *report;   /* RESULT's body until it is acknowledged */
    double next_send; /* when to ask for a job, or to report again */
    int done, status;
};

static void leave(struct daemon *d, int status)
{
    d->done = 1;
    d->status = status;
}

static void report(struct daemon *d, json_t *body)
{
    json_decref(d->report);
    d->report = body;
    d->next_send = 0;
}

static void report_error(struct daemon *d, const char *why)
{
    log_error("job failed", "id=%s why=\"%s\"", d->job_id, why);
    report(d, json_pack("{s:s, s:o}", "id", d->job_id, "error", json_text(why)));
}

static void on_job(struct daemon *d, const struct message *m)
{
    struct err e = {0};
    json_t *j = message_json(m, &e);
    const char *id = json_string_value(json_object_get(j, "id"));
    const char *dir = json_string_value(json_object_get(j, "checkpoint"));
    const char *suite = json_string_value(json_object_get(j, "suite"));
    const char *regime = json_string_value(json_object_get(j, "regime"));
    struct worker_job job = {.suite = name_index(suite, suite_name, SUITE_COUNT),
        .regime = name_index(regime, regime_name, REGIME_COUNT)};
    if (!id || d->job_id || worker_busy(d->worker)) {
        json_decref(j); /* nothing to do, or a second answer while busy */
        return;
    }
    d->job_id = mem_strdup(id);
    if (!dir || job.suite < 0 || (job.suite == SUITE_LOSS && job.regime < 0)) {
        report_error(d, "a job this evaluator does not know: no checkpoint, suite or regime");
    } else {
        job.checkpoint = mem_strdup(dir);
        log_info("job", "id=%s checkpoint=%s suite=%s regime=%s", id, dir, suite,
            regime ? regime : "none");
        worker_start(d->worker, &job);
    }
    json_decref(j);
}

static void on_ack(struct daemon *d, const struct message *m)
{
    json_t *j = message_json(m, NULL);
    const char *id = json_string_value(json_object_get(j, "id"));
    if (id && d->report && d->job_id && strcmp(id, d->job_id) == 0) {
        json_decref(d->report);
        d->report = NULL;
        free(d->job_id);
        d->job_id = NULL;
        d->next_send = 0;
    }
    json_decref(j);
}

static void on_finish(struct daemon *d, const struct message *m)
{
    json_t *j = message_json(m, NULL);
    const char *reason = json_string_value(json_object_get(j, "reason"));
    log_info("the run is over", "reason=\"%s\"", reason ? reason : "");
    json_decref(j);
    leave(d, 0);
}

static const struct {
    int type;
    void (*handle)(struct daemon *d, const struct message *m);
} handlers[] = {
    {WIRE_JOB, on_job},
    {WIRE_RESULT_ACK, on_ack},
    {WIRE_FINISH, on_finish},
};

static void take_messages(struct daemon *d)
{
    struct message m;
    struct err e = {0};
    int rc;
    while (!d->done && (rc = member_recv(d->member, &m, &e)) != 0) {
        if (rc < 0) {
            log_error(e.msg, NULL);
            leave(d, rc == ERR_MISMATCH ? EXIT_REFUSED : EXIT_RESTART);
            return;
        }
        for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
            if (handlers[i].type == m.head.type)
                handlers[i].handle(d, &m);
        message_release(&m);
    }
}

static void take_result(struct daemon *d)
{
    struct err e = {0};
    json_t *result = NULL;
    if (worker_finish(d->worker, &result, &e) < 0) {
        report_error(d, e.msg);
        return;
    }
    log_info("scored", "id=%s seconds=%.1f", d->job_id,
        json_real_value(json_object_get(result, "seconds")));
    report(d, json_pack("{s:s, s:o}", "id", d->job_id, "result", result));
}

/* Asks for work when idle, repeats a result that was not acknowledged. */
static void send_due(struct daemon *d)
{
    double now = clock_seconds();
    if (!member_welcomed(d->member) || now < d->next_send || worker_busy(d->worker))
        return;
    if (d->report) {
        member_send(d->member, WIRE_RESULT, 0, json_incref(d->report), NULL);
        d->next_send = now + resend_seconds;
    } else {
        member_send(d->member, WIRE_JOB_GET, 0, json_object(), NULL);
        d->next_send = now + ask_seconds;
    }
}

static void take_signal(struct daemon *d)
{
    int sig = process_signal_take(d->signals);
    if (sig) {
        log_info("stopping", "signal=%d", sig);
        leave(d, 0);
    }
}

static void loop(struct daemon *d)
{
    struct err e = {0};
    while (!d->done) {
        int wait = member_tick(d->member, &e);
        if (wait < 0) {
            log_error(e.msg, NULL);
            leave(d, EXIT_RESTART);
            return;
        }
        send_due(d);
        struct bus_poll items[] = {{.ep = member_endpoint(d->member), .fd = -1}, {.fd = d->signals},
            {.fd = worker_fd(d->worker)}};
        if (bus_wait(items, 3, wait, &e) < 0) {
            log_error(e.msg, NULL);
            leave(d, EXIT_RESTART);
            return;
        }
        if (items[1].ready)
            take_signal(d);
        if (items[2].ready)
            take_result(d);
        take_messages(d);
    }
}

static int open_daemon(struct daemon *d, int rank, int threads, struct err *e)
{
    struct member_id id = {.role = "evaluator",
        .rank = rank,
        .world = 1,
        .give_up_seconds = give_up_seconds,
        .run = d->run};
    int rc = process_signal_fd(&d->signals, e);
    if (rc == 0)
        rc = bus_new(&d->bus, e);
    if (rc == 0)
        rc = member_new(d->bus, &id, &d->member, e);
    if (rc == 0)
        rc = worker_new(d->bus, d->run, threads, &d->worker, e);
    return rc;
}

int evaluator_daemon(const struct rundir *run, int rank, int threads)
{
    struct daemon d = {.run = run, .signals = -1};
    struct err e = {0};
    if (open_daemon(&d, rank, threads, &e) < 0) {
        log_error(e.msg, NULL);
        d.status = EXIT_RESTART;
    } else {
        log_info("ready", "run=%s threads=%d", run->path, threads);
        loop(&d);
    }
    member_free(&d.member, "leaving");
    /* The worker stops between two batches; should one hang, the process still ends. */
    alarm(20);
    worker_free(&d.worker);
    bus_free(&d.bus);
    if (d.signals >= 0)
        close(d.signals);
    json_decref(d.report);
    free(d.job_id);
    return d.status;
}
