/*
 * The trainer's side of the loader: asks for the rows of the coming steps and holds them until they
 * are used.
 *
 * Of each step, rank r of W reads the micro-batches m ≡ r (mod W); one GET asks for one
 * micro-batch. The GETs outstanding or held are the credit: `steps_ahead` steps, and no further
 * step once byte_cap would be passed (but always one). Lost requests and answers are asked for
 * again; after a silence the connection is made anew. Answers that come twice, or late, or from
 * before feed_restart() change nothing.
 *
 * Every batch is checked: its structure, token ids and content digest (batch_decode), and that its
 * sample ids are those of the plan. A feed belongs to one thread.
 */
#ifndef TRAINER_FEED_H
#define TRAINER_FEED_H

#include <stddef.h>
#include <stdint.h>

#include "common/bus.h"
#include "common/cursor.h"
#include "common/err.h"
#include "common/plan.h"

struct feed;

struct feed_settings {
    const struct plan *plan; /* stays the caller's */
    int rank, world;
    int steps_ahead; /* the credit in steps, ≥ 1 */
    size_t byte_cap; /* the credit in bytes of batches */
    int retry_ms;    /* first wait before asking again; doubles up to 8 times of it */
};

struct feed_stats {
    uint64_t asked;                      /* GETs sent */
    uint64_t batches, bytes;             /* taken */
    uint64_t resends, reconnects;        /* asked again; connections made anew */
    uint64_t refused;                    /* NAKs */
    uint64_t duplicates, stale, damaged; /* answers dropped */
};

/* One micro-batch as the model takes it. Arrays belong to the feed and live until the next
 * feed_micro(). */
struct feed_micro {
    int rows, seq;              /* B, T */
    const int32_t *tokens;      /* (B, T) */
    const int32_t *targets;     /* (B, T) */
    const uint8_t *doc_starts;  /* (B, T) */
    const uint8_t *masks;       /* (K−1, B, T); NULL when K = 1 */
    const uint64_t *noise_keys; /* (K−1, B); NULL when K = 1 */
    struct step_digest digest;  /* over these rows, computed here */
};

/* Connects to `sock` under `identity`; asks for nothing before feed_restart(). */
int feed_new(struct bus *bus, const char *sock, const char *identity,
    const struct feed_settings *settings, struct feed **out, struct err *e);
void feed_free(struct feed **f);

/* Forgets everything and starts at `step` under a run epoch. */
void feed_restart(struct feed *f, uint32_t run_epoch, int64_t step);

/* Does what can be done without waiting: sends, receives, asks again. now_ms: of any monotonic
 * clock, above 0. An error is final: a refusal by the loader, or rows that are not the plan's. */
int feed_pump(struct feed *f, int64_t now_ms, struct err *e);

/* For bus_wait(). It changes with a reconnect: ask each time. */
struct endpoint *feed_endpoint(const struct feed *f);

/* 1 when every micro-batch of this rank for `step` is held. */
int feed_ready(const struct feed *f, int64_t step);

/* Micro-batches of one step, over all ranks; rank r takes r, r + W, … */
int feed_micros(const struct feed *f);
/* The arrays of micro-batch m of `step` (held) for a step of `passes` passes. */
void feed_micro(struct feed *f, int64_t step, int m, int passes, struct feed_micro *out);

/* Steps up to and including `step` are done: their rows are let go. */
void feed_done(struct feed *f, int64_t step);

const struct feed_stats *feed_stats_of(const struct feed *f);
/* What a trainer's feed is given: its credit. */
#define FEED_STEPS_AHEAD 4
#define FEED_BYTE_CAP    ((size_t)64 << 20)
/* Bytes that the feed of a rank takes with that credit: its arrays and the most batches held. */
size_t feed_planned_bytes(const struct plan *p, int world);

#endif
