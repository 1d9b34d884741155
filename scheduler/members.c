#include "scheduler/members.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/field.h"
#include "common/version.h"

static const char *const role_names[ROLE_COUNT] = {
    [ROLE_TRAINER] = "trainer",
    [ROLE_LOADER] = "loader",
    [ROLE_EVALUATOR] = "evaluator",
};

const char *role_name(int role)
{
    CHECK(role >= 0 && role < ROLE_COUNT);
    return role_names[role];
}

static int parse_role(const json_t *j, int *role, struct err *e)
{
    const char *s;
    int rc = field_text(j, "role", 32, &s, e);
    if (rc < 0)
        return rc;
    for (*role = 0; *role < ROLE_COUNT; (*role)++)
        if (strcmp(s, role_names[*role]) == 0)
            return 0;
    return err_set(e, ERR_INPUT, "role: \"%s\", trainer, loader or evaluator expected", s);
}

int hello_parse(const json_t *j, struct hello *out, struct err *e)
{
    int64_t rank = 0, world = 1;
    int rc = parse_role(j, &out->role, e);
    if (rc == 0)
        rc = field_int(j, "world", 1, MEMBERS_MAX_WORLD, &world, e);
    if (rc == 0)
        rc = field_int(
            j, "rank", 0, out->role == ROLE_TRAINER ? world - 1 : MEMBERS_MAX_WORLD - 1, &rank, e);
    if (rc == 0)
        rc = field_int(j, "pid", 1, INT32_MAX, &out->pid, e);
    if (rc == 0)
        rc = field_text(j, "version", 64, &out->version, e);
    if (rc == 0)
        rc = field_text(j, "plan_hash", 128, &out->plan_hash, e);
    if (rc == 0)
        rc = field_text(j, "manifest_root", 128, &out->manifest_root, e);
    out->rank = (int)rank;
    out->world = (int)world;
    return rc;
}

int hello_check(const struct hello *h, const struct plan *p, struct err *e)
{
    const struct {
        const char *what, *theirs, *ours;
    } same[] = {
        {"program version", h->version, FULLBAND_VERSION},
        {"plan", h->plan_hash, p->hash},
        {"data manifest root", h->manifest_root, p->manifest_root},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (strcmp(same[i].theirs, same[i].ours) != 0)
            return err_set(e, ERR_MISMATCH, "%s %s, this run has %s", same[i].what, same[i].theirs,
                same[i].ours);
    return 0;
}

void members_release(struct members *m)
{
    free(m->list);
    memset(m, 0, sizeof *m);
}

struct attendee *members_add(
    struct members *m, const char *peer, const struct hello *h, int64_t now_ms)
{
    m->list = mem_grow_array(m->list, (size_t)m->count + 1, sizeof *m->list);
    struct attendee *a = &m->list[m->count++];
    *a = (struct attendee){.role = h->role,
        .rank = h->rank,
        .world = h->world,
        .pid = h->pid,
        .heard_ms = now_ms,
        .welcomed_ms = now_ms};
    snprintf(a->peer, sizeof a->peer, "%s", peer);
    return a;
}

void members_remove(struct members *m, struct attendee *a)
{
    CHECK(a >= m->list && a < m->list + m->count);
    *a = m->list[--m->count];
}

struct attendee *members_by_peer(const struct members *m, const char *peer)
{
    for (int i = 0; i < m->count; i++)
        if (strcmp(m->list[i].peer, peer) == 0)
            return &m->list[i];
    return NULL;
}

struct attendee *members_by_rank(const struct members *m, int role, int rank)
{
    for (int i = 0; i < m->count; i++)
        if (m->list[i].role == role && m->list[i].rank == rank)
            return &m->list[i];
    return NULL;
}

int members_count(const struct members *m, int role)
{
    int n = 0;
    for (int i = 0; i < m->count; i++)
        n += m->list[i].role == role;
    return n;
}

struct attendee *members_silent(const struct members *m, int64_t now_ms, int64_t limit_ms)
{
    for (int i = 0; i < m->count; i++)
        if (now_ms - m->list[i].heard_ms > limit_ms)
            return &m->list[i];
    return NULL;
}

void members_forgive(struct members *m, int64_t ms)
{
    for (int i = 0; i < m->count; i++)
        m->list[i].heard_ms += ms;
}
