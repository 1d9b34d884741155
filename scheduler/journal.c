#include "scheduler/journal.h"

#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/check.h"
#include "common/field.h"
#include "common/fs.h"
#include "common/lmdb_err.h"
#include "common/mem.h"

#define MAP_BYTES ((size_t)1 << 30) /* address space, not disk */

enum table { META, EVENTS, COMMITS, JOBS, RESULTS, TABLE_COUNT };
static const char *const table_names[TABLE_COUNT] = {
    [META] = "meta",
    [EVENTS] = "events",
    [COMMITS] = "commits",
    [JOBS] = "jobs",
    [RESULTS] = "results",
};

struct journal {
    MDB_env *env;
    MDB_dbi tables[TABLE_COUNT];
    char *dir;
};

/* -- keys and values -- */

struct key {
    uint8_t number[8];
    MDB_val val;
};

static MDB_val *key_number(struct key *k, uint64_t n)
{
    for (int i = 0; i < 8; i++)
        k->number[i] = (uint8_t)(n >> (56 - 8 * i));
    k->val = (MDB_val){sizeof k->number, k->number};
    return &k->val;
}

static uint64_t number_of(const MDB_val *v)
{
    uint64_t n = 0;
    for (size_t i = 0; i < v->mv_size && i < 8; i++)
        n = n << 8 | ((const uint8_t *)v->mv_data)[i];
    return n;
}

/* The text outlives the call: LMDB only reads it. */
static MDB_val *key_text(struct key *k, const char *text)
{
    k->val = (MDB_val){strlen(text), (void *)(uintptr_t)text};
    return &k->val;
}

/* -- transactions -- */

static int begin(struct journal *j, int read_only, MDB_txn **txn, struct err *e)
{
    int rc = mdb_txn_begin(j->env, NULL, read_only ? MDB_RDONLY : 0, txn);
    return rc ? lmdb_err(e, rc, j->dir, "begin") : 0;
}

/* Commits when rc is 0, otherwise gives everything of it up; returns rc or the commit's error. */
static int end(struct journal *j, MDB_txn *txn, int rc, struct err *e)
{
    if (rc < 0) {
        mdb_txn_abort(txn);
        return rc;
    }
    int lmdb = mdb_txn_commit(txn);
    return lmdb ? lmdb_err(e, lmdb, j->dir, "commit") : rc;
}

/* 1: stored; 0: if_absent and there was one. */
static int put(struct journal *j, MDB_txn *txn, enum table t, MDB_val *key, const json_t *value,
    int if_absent, struct err *e)
{
    char *text = json_dumps(value, JSON_COMPACT | JSON_SORT_KEYS | JSON_ENCODE_ANY);
    if (!text)
        return err_set(e, ERR_INPUT, "%s: %s: a value that is not JSON", j->dir, table_names[t]);
    MDB_val v = {strlen(text), text};
    int rc = mdb_put(txn, j->tables[t], key, &v, if_absent ? MDB_NOOVERWRITE : 0);
    free(text);
    if (rc == MDB_KEYEXIST)
        return 0;
    return rc ? lmdb_err(e, rc, j->dir, table_names[t]) : 1;
}

static json_t *parse(const struct journal *j, enum table t, const MDB_val *v, struct err *e)
{
    json_t *out = json_loadb(v->mv_data, v->mv_size, JSON_DECODE_ANY, NULL);
    if (!out)
        err_set(e, ERR_CORRUPT, "%s: %s: an entry is not JSON", j->dir, table_names[t]);
    return out;
}

/* NULL: none, or an error (then e->code is set). */
static json_t *get(struct journal *j, enum table t, MDB_val *key, struct err *e)
{
    MDB_txn *txn;
    MDB_val v;
    json_t *out = NULL;
    if (begin(j, 1, &txn, e) < 0)
        return NULL;
    int rc = mdb_get(txn, j->tables[t], key, &v);
    if (rc == 0)
        out = parse(j, t, &v, e);
    else if (rc != MDB_NOTFOUND)
        lmdb_err(e, rc, j->dir, table_names[t]);
    mdb_txn_abort(txn);
    return out;
}

/* The values of a table in key order, the last `max` of them (0: all). */
static json_t *get_all(struct journal *j, enum table t, int max, struct err *e)
{
    MDB_txn *txn;
    MDB_cursor *cursor = NULL;
    MDB_val key, v;
    json_t *out = json_array();
    if (begin(j, 1, &txn, e) < 0)
        goto fail;
    int rc = mdb_cursor_open(txn, j->tables[t], &cursor);
    for (rc = rc ? rc : mdb_cursor_get(cursor, &key, &v, MDB_LAST); rc == 0;
         rc = mdb_cursor_get(cursor, &key, &v, MDB_PREV)) {
        json_t *value = parse(j, t, &v, e);
        if (!value)
            break;
        json_array_insert_new(out, 0, value);
        if (max && json_array_size(out) == (size_t)max)
            break;
    }
    if (cursor)
        mdb_cursor_close(cursor);
    mdb_txn_abort(txn);
    if (rc == MDB_NOTFOUND || (rc == 0 && max && json_array_size(out) == (size_t)max))
        return out;
    if (rc)
        lmdb_err(e, rc, j->dir, table_names[t]);
fail:
    json_decref(out);
    return NULL;
}

static int put_one(
    struct journal *j, enum table t, MDB_val *key, json_t *value, int if_absent, struct err *e)
{
    MDB_txn *txn;
    int rc = begin(j, 0, &txn, e);
    if (rc == 0)
        rc = end(j, txn, put(j, txn, t, key, value, if_absent, e), e);
    json_decref(value);
    return rc;
}

/* -- opening -- */

static int open_tables(struct journal *j, struct err *e)
{
    MDB_txn *txn;
    int rc = begin(j, 0, &txn, e);
    if (rc < 0)
        return rc;
    for (int t = 0; rc == 0 && t < TABLE_COUNT; t++) {
        int lmdb = mdb_dbi_open(txn, table_names[t], MDB_CREATE, &j->tables[t]);
        if (lmdb)
            rc = lmdb_err(e, lmdb, j->dir, table_names[t]);
    }
    return end(j, txn, rc, e);
}

/*
 * A file that was cut off faults where LMDB reads behind its end. Zeros there are no page of
 * LMDB's: reading one is an error. (Free pages at the end may rightly never have been written.)
 */
static int fill_end(const struct journal *j, struct err *e)
{
    MDB_envinfo info;
    MDB_stat stat;
    mdb_filehandle_t fd;
    int lmdb = mdb_env_info(j->env, &info);
    if (!lmdb)
        lmdb = mdb_env_stat(j->env, &stat);
    if (!lmdb)
        lmdb = mdb_env_get_fd(j->env, &fd);
    if (lmdb)
        return lmdb_err(e, lmdb, j->dir, "open");
    off_t pages = (off_t)(info.me_last_pgno + 1) * stat.ms_psize, end = lseek(fd, 0, SEEK_END);
    if (end < 0 || (end < pages && ftruncate(fd, pages) < 0))
        return err_errno(e, "%s", j->dir);
    return 0;
}

int journal_open(const char *dir, struct journal **out, struct err *e)
{
    struct journal *j = mem_array(1, sizeof *j);
    j->dir = mem_strdup(dir);
    int rc = fs_mkdir_p(dir, 0700, e);
    if (rc == 0) {
        int lmdb = mdb_env_create(&j->env);
        if (!lmdb)
            lmdb = mdb_env_set_maxdbs(j->env, TABLE_COUNT);
        if (!lmdb)
            lmdb = mdb_env_set_mapsize(j->env, MAP_BYTES);
        /* The run's lock keeps other processes out; LMDB's own would survive a kill -9 as garbage.
         */
        if (!lmdb)
            lmdb = mdb_env_open(j->env, dir, MDB_NOLOCK, 0600);
        if (lmdb)
            rc = lmdb_err(e, lmdb, j->dir, "open");
    }
    if (rc == 0)
        rc = fill_end(j, e);
    if (rc == 0)
        rc = open_tables(j, e);
    if (rc == 0)
        *out = j;
    else
        journal_close(&j);
    return rc;
}

void journal_close(struct journal **pj)
{
    struct journal *j = *pj;
    if (!j)
        return;
    if (j->env)
        mdb_env_close(j->env);
    free(j->dir);
    free(j);
    *pj = NULL;
}

/* -- run epoch, state, events -- */

int journal_epoch(struct journal *j, uint32_t *epoch, struct err *e)
{
    struct key k;
    struct err mine = {0};
    json_t *v = get(j, META, key_text(&k, "run_epoch"), &mine);
    int64_t n = json_integer_value(v);
    int bad = v && (!json_is_integer(v) || n < 0 || n > UINT32_MAX);
    json_decref(v);
    if (mine.code)
        return err_set(e, mine.code, "%s", mine.msg);
    if (bad)
        return err_set(e, ERR_CORRUPT, "%s: meta: run_epoch is not one", j->dir);
    *epoch = (uint32_t)n;
    return 0;
}

int journal_next_epoch(struct journal *j, uint32_t above, uint32_t *epoch, struct err *e)
{
    struct key k;
    uint32_t last = 0;
    int rc = journal_epoch(j, &last, e);
    if (last < above)
        last = above;
    if (rc == 0 && last == UINT32_MAX)
        rc = err_set(e, ERR_STATE, "%s: the run epochs are used up", j->dir);
    if (rc == 0)
        rc = put_one(j, META, key_text(&k, "run_epoch"), json_integer((json_int_t)last + 1), 0, e);
    if (rc < 0)
        return rc;
    *epoch = last + 1;
    return 0;
}

static int last_number(
    struct journal *j, MDB_txn *txn, enum table t, uint64_t *number, struct err *e)
{
    MDB_cursor *cursor;
    MDB_val key, v;
    int rc = mdb_cursor_open(txn, j->tables[t], &cursor);
    if (rc)
        return lmdb_err(e, rc, j->dir, table_names[t]);
    rc = mdb_cursor_get(cursor, &key, &v, MDB_LAST);
    *number = rc == 0 ? number_of(&key) : 0;
    mdb_cursor_close(cursor);
    return rc && rc != MDB_NOTFOUND ? lmdb_err(e, rc, j->dir, table_names[t]) : 0;
}

int journal_event(
    struct journal *j, uint32_t run_epoch, const char *kind, const char *text, struct err *e)
{
    MDB_txn *txn;
    struct key k;
    uint64_t last = 0;
    json_t *event = json_pack("{s:I, s:I, s:s, s:o}", "time", (json_int_t)time(NULL), "run_epoch",
        (json_int_t)run_epoch, "kind", kind, "text", json_text(text));
    int rc = begin(j, 0, &txn, e);
    if (rc == 0) {
        rc = last_number(j, txn, EVENTS, &last, e);
        if (rc == 0)
            rc = put(j, txn, EVENTS, key_number(&k, last + 1), event, 0, e);
        rc = end(j, txn, rc, e);
    }
    json_decref(event);
    return rc < 0 ? rc : 0;
}

json_t *journal_events(struct journal *j, int max, struct err *e)
{
    return get_all(j, EVENTS, max, e);
}

int journal_set_state(struct journal *j, const char *state, const char *reason, struct err *e)
{
    struct key k;
    json_t *v = json_pack("{s:s, s:o}", "state", state, "reason", json_text(reason));
    int rc = put_one(j, META, key_text(&k, "state"), v, 0, e);
    return rc < 0 ? rc : 0;
}

json_t *journal_state(struct journal *j, struct err *e)
{
    struct key k;
    return get(j, META, key_text(&k, "state"), e);
}

/* -- commits -- */

int journal_put_commit(struct journal *j, int64_t step, json_t *commit, struct err *e)
{
    struct key k;
    CHECK(step >= 0);
    int rc = put_one(j, COMMITS, key_number(&k, (uint64_t)step), commit, 0, e);
    return rc < 0 ? rc : 0;
}

static int drop_after(struct journal *j, MDB_txn *txn, int64_t step, struct err *e)
{
    MDB_cursor *cursor;
    MDB_val v;
    struct key k;
    int rc = mdb_cursor_open(txn, j->tables[COMMITS], &cursor);
    if (rc)
        return lmdb_err(e, rc, j->dir, "commits");
    key_number(&k, (uint64_t)(step + 1));
    for (rc = mdb_cursor_get(cursor, &k.val, &v, MDB_SET_RANGE); rc == 0;
         rc = mdb_cursor_get(cursor, &k.val, &v, MDB_NEXT))
        if ((rc = mdb_cursor_del(cursor, 0)))
            break;
    mdb_cursor_close(cursor);
    return rc == MDB_NOTFOUND ? 0 : lmdb_err(e, rc, j->dir, "commits");
}

int journal_drop_commits_after(struct journal *j, int64_t step, struct err *e)
{
    MDB_txn *txn;
    int rc = begin(j, 0, &txn, e);
    return rc < 0 ? rc : end(j, txn, drop_after(j, txn, step, e), e);
}

json_t *journal_commit(struct journal *j, int64_t step, struct err *e)
{
    struct key k;
    return get(j, COMMITS, key_number(&k, (uint64_t)step), e);
}

/* -- eval jobs and results -- */

int journal_put_job_if_absent(struct journal *j, const char *id, json_t *job, struct err *e)
{
    struct key k;
    return put_one(j, JOBS, key_text(&k, id), job, 1, e);
}

int journal_put_job(struct journal *j, const char *id, json_t *job, struct err *e)
{
    struct key k;
    int rc = put_one(j, JOBS, key_text(&k, id), job, 0, e);
    return rc < 0 ? rc : 0;
}

json_t *journal_jobs(struct journal *j, struct err *e)
{
    return get_all(j, JOBS, 0, e);
}

int journal_put_result_if_absent(
    struct journal *j, const char *id, json_t *result, json_t *job, struct err *e)
{
    MDB_txn *txn;
    struct key k;
    int stored = 0, rc = begin(j, 0, &txn, e);
    if (rc == 0) {
        rc = stored = put(j, txn, RESULTS, key_text(&k, id), result, 1, e);
        if (rc >= 0)
            rc = put(j, txn, JOBS, key_text(&k, id), job, 0, e);
        rc = end(j, txn, rc < 0 ? rc : 0, e);
    }
    json_decref(result);
    json_decref(job);
    return rc < 0 ? rc : stored;
}

json_t *journal_result(struct journal *j, const char *id, struct err *e)
{
    struct key k;
    return get(j, RESULTS, key_text(&k, id), e);
}
