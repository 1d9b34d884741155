/*
 * What carries the messages of coll.h: a table of functions, in the program or in a shared object
 * that exports it as COLL_TRANSPORT_SYMBOL.
 *
 * After open() all functions are called from the thread that called open(). Between two ranks
 * messages arrive in the order they were sent; sizes of a send and its receive agree. No function
 * but open() and close() waits for another rank.
 */
#ifndef KERNELS_COLL_TRANSPORT_H
#define KERNELS_COLL_TRANSPORT_H

#include <stddef.h>

#define COLL_TRANSPORT_VERSION 1
#define COLL_TRANSPORT_SYMBOL  "fb_coll_transport"
#define COLL_MESSAGE_BYTES     (2u << 20) /* no message is larger */

struct coll_transport {
    int version; /* COLL_TRANSPORT_VERSION */
    /* Meets the other ranks. 0, or −1 with the reason in why. */
    int (*open)(void *ctx, int *rank, int *world, char *why, size_t why_bytes);
    /* Start a message; the memory stays alone until test() has returned 1. 0, or −1. */
    int (*send)(void *ctx, int peer, const void *data, size_t bytes);
    int (*recv)(void *ctx, int peer, void *data, size_t bytes);
    /* 1: all that was started is done; 0: not yet; −1: it failed. */
    int (*test)(void *ctx);
    /* Takes leave of the others. */
    void (*close)(void *ctx);
};

#endif
