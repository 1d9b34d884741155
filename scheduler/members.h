/*
 * Who takes part in the run: HELLO and its checks, and who was last heard when. No sockets: a peer
 * is the name it has on the control socket.
 */
#ifndef SCHEDULER_MEMBERS_H
#define SCHEDULER_MEMBERS_H

#include <stdint.h>

#include <jansson.h>

#include "common/bus.h"
#include "common/plan.h"

#define MEMBERS_MAX_WORLD 4096

enum role { ROLE_TRAINER, ROLE_LOADER, ROLE_EVALUATOR, ROLE_COUNT };
const char *role_name(int role);

struct hello {
    int role, rank, world;
    int64_t pid;
    const char *version, *plan_hash, *manifest_root; /* the message's */
};

struct attendee {
    char peer[BUS_PEER_BYTES];
    int role, rank, world;
    int64_t pid;
    int64_t heard_ms, welcomed_ms;
    int active; /* a trainer that said more than HELLO and heartbeats in this run epoch */
};

struct members {
    struct attendee *list;
    int count;
};

/* Shape and ranges of a HELLO. */
int hello_parse(const json_t *j, struct hello *out, struct err *e);
/* Whether it may take part: version, plan, data. The error is the reason for REFUSE and names both
 * values. */
int hello_check(const struct hello *h, const struct plan *p, struct err *e);

void members_release(struct members *m);
/* The new entry; pointers into the list are void after an add or a remove. */
struct attendee *members_add(
    struct members *m, const char *peer, const struct hello *h, int64_t now_ms);
void members_remove(struct members *m, struct attendee *a);
struct attendee *members_by_peer(const struct members *m, const char *peer);
struct attendee *members_by_rank(const struct members *m, int role, int rank);
int members_count(const struct members *m, int role);
/* Someone not heard for limit_ms, or NULL. */
struct attendee *members_silent(const struct members *m, int64_t now_ms, int64_t limit_ms);
/* We were away for so long (a slow disk): nobody could be heard, so nobody is late. */
void members_forgive(struct members *m, int64_t ms);

#endif
