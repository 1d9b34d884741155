/*
 * The transport of coll.h over MPI: a shared object of its own (fb-coll-mpi.so), so that programs
 * neither need nor load MPI unless there are several ranks. Only messages between two ranks are
 * MPI's; the sums are ours.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/coll_transport.h"

#define TAG 1

static MPI_Request *requests;
static int count, room;

static int mpi_open(void *ctx, int *rank, int *world, char *why, size_t why_bytes)
{
    int provided;
    (void)ctx;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
        snprintf(why, why_bytes, "MPI does not start; was this process started by mpirun?");
        return -1;
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, world);
    return 0;
}

/* Room for one request more; NULL when there is no memory. */
static MPI_Request *next_request(void)
{
    if (count == room) {
        int more = room ? 2 * room : 256;
        MPI_Request *grown = realloc(requests, (size_t)more * sizeof *grown);
        if (!grown)
            return NULL;
        requests = grown;
        room = more;
    }
    return &requests[count];
}

static int mpi_send(void *ctx, int peer, const void *data, size_t bytes)
{
    MPI_Request *r = next_request();
    (void)ctx;
    if (!r || MPI_Isend(data, (int)bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, r) != MPI_SUCCESS)
        return -1;
    count++;
    return 0;
}

static int mpi_recv(void *ctx, int peer, void *data, size_t bytes)
{
    MPI_Request *r = next_request();
    (void)ctx;
    if (!r || MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, r) != MPI_SUCCESS)
        return -1;
    count++;
    return 0;
}

static int mpi_test(void *ctx)
{
    int done = 0;
    (void)ctx;
    if (MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS)
        return -1;
    if (done)
        count = 0;
    return done;
}

static void mpi_close(void *ctx)
{
    (void)ctx;
    MPI_Finalize();
    free(requests);
    requests = NULL;
    count = room = 0;
}

extern const struct coll_transport fb_coll_transport;
const struct coll_transport fb_coll_transport = {
    .version = COLL_TRANSPORT_VERSION,
    .open = mpi_open,
    .send = mpi_send,
    .recv = mpi_recv,
    .test = mpi_test,
    .close = mpi_close,
};
