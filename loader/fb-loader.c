/* fb-loader: serves the rows of a run's plan to its trainers and evaluators. Stateless. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/args.h"
#include "common/batch.h"
#include "common/bus.h"
#include "common/field.h"
#include "common/fs.h"
#include "common/log.h"
#include "common/member.h"
#include "common/process.h"
#include "common/rundir.h"
#include "common/version.h"
#include "loader/serve.h"

#define GIVE_UP_SECONDS   60 /* without a scheduler */
#define ANSWERS_PER_ROUND 64 /* before the control socket and signals get their turn */
#define IDLE_MS           60000

enum { EXIT_DONE = 0, EXIT_INPUT = 1, EXIT_USAGE = 2, EXIT_FINAL = 100, EXIT_RESTART = 111 };

static const char usage[] =
    "usage: fb-loader --run DIR [options]\n"
    "\n"
    "Serves training and validation rows of the run to its trainers and evaluators.\n"
    "Started by ops/launch.\n"
    "\n"
    "  --run DIR       the run's directory\n"
    "  --standalone    serve without a scheduler, until told to stop (for ops/eval)\n"
    "  --sock PATH     the socket to serve on (default: DIR/" RUNDIR_LOADER_SOCK ")\n"
    "  --cache-mb N    memory for rows decoded ahead, 1 to 65536 (default: 64)\n"
    "  --help, --version\n"
    "\n"
    "Exit codes: 0 finished or asked to stop; 1 wrong input; 2 usage; 100 do not restart me;\n"
    "111 restart me.\n";

struct options {
    const char *run, *sock;
    int standalone;
    size_t cache_bytes;
};

struct loader {
    const struct options *o;
    struct rundir run;
    struct bus *bus;
    struct endpoint *serving;
    struct member *member; /* NULL when standalone */
    struct server *server;
    struct buf body;
    char *sock;
    int signals, lock;
    uint64_t naks, rereads, dropped;
};

/* -- command line -- */

static const struct option long_options[] = {
    {"run", required_argument, NULL, 'r'},
    {"standalone", no_argument, NULL, 's'},
    {"sock", required_argument, NULL, 'k'},
    {"cache-mb", required_argument, NULL, 'c'},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'v'},
    {0},
};

/* −1: go on; else the exit code. */
static int parse(int argc, char **argv, struct options *o)
{
    uint64_t mb = 64;
    struct err e = {0};
    for (int opt; (opt = getopt_long(argc, argv, "", long_options, NULL)) != -1;) {
        if (opt == 'h') {
            fputs(usage, stdout);
            return EXIT_DONE;
        }
        if (opt == 'v') {
            puts("fb-loader " FULLBAND_VERSION);
            return EXIT_DONE;
        }
        if (opt == '?')
            return EXIT_USAGE;
        if (opt == 'r')
            o->run = optarg;
        if (opt == 'k')
            o->sock = optarg;
        if (opt == 's')
            o->standalone = 1;
        if (opt == 'c' && arg_u64(optarg, 1, 65536, &mb, &e) < 0) {
            fprintf(stderr, "fb-loader: --cache-mb %s\n", e.msg);
            return EXIT_USAGE;
        }
    }
    o->cache_bytes = (size_t)mb << 20;
    if (!o->run || optind != argc) {
        fprintf(
            stderr, "fb-loader: --run DIR and nothing else is expected; see fb-loader --help\n");
        return EXIT_USAGE;
    }
    return -1;
}

/* -- opening -- */

/* One loader a socket: binding would take it away from one that is alive. */
static int open_socket(struct loader *l, struct err *e)
{
    l->sock = l->o->sock ? mem_strdup(l->o->sock) : rundir_path(&l->run, "%s", RUNDIR_LOADER_SOCK);
    char *dir = fs_dirname(l->sock), *lock = mem_printf("%s.lock", l->sock);
    int rc = fs_mkdir_p(dir, 0700, e);
    if (rc == 0)
        l->lock = rc = fs_lock(lock, e);
    free(dir);
    free(lock);
    if (rc == ERR_STATE)
        return err_prefix(e, "another loader serves here");
    return rc < 0 ? rc : endpoint_bind(l->bus, l->sock, &l->serving, e);
}

static int loader_open(struct loader *l, struct err *e)
{
    int rc = rundir_open(l->o->run, &l->run, e);
    if (rc < 0)
        return rc;
    if ((rc = process_signal_fd(&l->signals, e)) < 0)
        return rc;
    if ((rc = server_new(&l->run.plan, l->o->cache_bytes, &l->server, e)) < 0)
        return rc;
    if ((rc = bus_new(&l->bus, e)) < 0 || (rc = open_socket(l, e)) < 0)
        return rc;
    if (l->o->standalone)
        return 0;
    struct member_id id = {.role = "loader",
        .rank = 0,
        .world = 1,
        .give_up_seconds = GIVE_UP_SECONDS,
        .run = &l->run};
    return member_new(l->bus, &id, &l->member, e);
}

static void loader_close(struct loader *l)
{
    member_free(&l->member, "leaving");
    endpoint_close(&l->serving);
    bus_free(&l->bus);
    server_free(&l->server);
    if (l->signals >= 0)
        close(l->signals);
    if (l->lock >= 0)
        close(l->lock);
    buf_release(&l->body);
    free(l->sock);
    rundir_release(&l->run);
}

/* -- serving -- */

static void send_nak(struct loader *l, const struct message *m, const struct err *why)
{
    int retry = why->code == ERR_IO || why->code == ERR_NOMEM;
    json_t *j = json_pack("{s:o, s:b}", "reason", json_text(why->msg), "retry", retry);
    if (log_is_told(++l->naks))
        log_warn("request refused", "peer=%s retry=%d reason=\"%s\" refused=%llu", m->peer, retry,
            why->msg, (unsigned long long)l->naks);
    endpoint_send_json(
        l->serving, m->peer, WIRE_NAK, m->head.run_epoch, m->head.request_id, j, NULL);
}

static void note_rereads(struct loader *l)
{
    struct server_stats st;
    server_stats(l->server, &st);
    if (st.rereads > l->rereads)
        log_warn("blocks were right only at the second reading", "blocks=%llu",
            (unsigned long long)st.rereads);
    l->rereads = st.rereads;
}

/* Answers one message. An answer that cannot be sent is dropped: the asker asks again. */
static void answer(struct loader *l, const struct message *m)
{
    struct batch_request r;
    struct err e = {0};
    int rc = m->head.type == WIRE_GET ? batch_request_decode(m->body, m->body_bytes, &r, &e)
                                      : err_set(&e, ERR_INPUT, "the loader answers GET, not %s",
                                            wire_type_name(m->head.type));
    buf_clear(&l->body);
    if (rc == 0)
        rc = server_answer(l->server, &r, &l->body, &e);
    if (rc < 0)
        send_nak(l, m, &e);
    else if (endpoint_send(l->serving, m->peer, WIRE_BATCH, m->head.run_epoch, m->head.request_id,
                 l->body.data, l->body.len, &e) < 0)
        log_warn("answer dropped", "peer=%s reason=\"%s\"", m->peer, e.msg);
    note_rereads(l);
}

/* Returns 0, or the socket's failure. */
static int serve_requests(struct loader *l, struct err *e)
{
    for (int i = 0; i < ANSWERS_PER_ROUND; i++) {
        struct message m;
        int rc = endpoint_recv(l->serving, 0, &m, e);
        if (rc == ERR_CORRUPT || rc == ERR_MISMATCH || rc == ERR_INPUT) {
            if (log_is_told(++l->dropped))
                log_warn("message dropped", "reason=\"%s\" dropped=%llu", e->msg,
                    (unsigned long long)l->dropped);
            continue;
        }
        if (rc <= 0)
            return rc;
        answer(l, &m);
        message_release(&m);
    }
    return 0;
}

/* −1: go on; else the exit code. */
static int control(struct loader *l, struct err *e)
{
    struct message m;
    int rc;
    while ((rc = member_recv(l->member, &m, e)) == 1) {
        int type = m.head.type;
        message_release(&m);
        if (type == WIRE_WELCOME)
            log_info("welcomed", "epoch=%u", member_epoch(l->member));
        if (type == WIRE_FINISH) {
            log_info("the run is over", NULL);
            return EXIT_DONE;
        }
    }
    if (rc == 0)
        return -1;
    log_error(e->msg, NULL);
    return rc == ERR_MISMATCH ? EXIT_FINAL : EXIT_RESTART;
}

static int loader_serve(struct loader *l, struct err *e)
{
    struct bus_poll items[3] = {{.ep = l->serving, .fd = -1}, {.fd = l->signals},
        {.ep = l->member ? member_endpoint(l->member) : NULL, .fd = -1}};
    for (;;) {
        int wait = l->member ? member_tick(l->member, e) : IDLE_MS;
        if (wait < 0) {
            log_error(e->msg, NULL);
            return EXIT_RESTART;
        }
        if (bus_wait(items, l->member ? 3 : 2, wait, e) < 0 || serve_requests(l, e) < 0) {
            log_error(e->msg, NULL);
            return EXIT_RESTART;
        }
        if (process_signal_take(l->signals)) {
            log_info("asked to stop", NULL);
            return EXIT_DONE;
        }
        int code = l->member ? control(l, e) : -1;
        if (code >= 0)
            return code;
    }
}

static void log_stats(struct loader *l)
{
    struct server_stats st;
    server_stats(l->server, &st);
    log_info("served",
        "answers=%llu rows=%llu ahead=%llu prefetched=%llu refused=%llu rereads=%llu",
        (unsigned long long)st.answers, (unsigned long long)st.rows, (unsigned long long)st.hits,
        (unsigned long long)st.prefetched, (unsigned long long)l->naks,
        (unsigned long long)st.rereads);
}

/* What a failed start means to the supervisor: only what may pass by itself is tried again. */
static int start_failure(int rc)
{
    return rc == ERR_IO || rc == ERR_NOMEM || rc == ERR_TIMEOUT ? EXIT_RESTART
           : rc == ERR_INPUT                                    ? EXIT_INPUT
                                                                : EXIT_FINAL;
}

int main(int argc, char **argv)
{
    struct options o = {0};
    struct err e = {0};
    process_open_streams();
    int code = parse(argc, argv, &o);
    if (code >= 0)
        return code;
    struct loader l = {.o = &o, .signals = -1, .lock = -1, .body = BUF_INIT};
    log_init("loader", -1);
    int rc = loader_open(&l, &e);
    if (rc < 0) {
        fprintf(stderr, "fb-loader: %s\n", e.msg);
        code = start_failure(rc);
    } else {
        log_info("ready", "sock=%s sources=%d standalone=%d", l.sock, l.run.plan.source_count,
            o.standalone);
        code = loader_serve(&l, &e);
        log_stats(&l);
    }
    loader_close(&l);
    return code;
}
