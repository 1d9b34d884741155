/*
 * The trainer's life: HELLO → WELCOME → {READY → GRANT → step → STEP} … → FINISH.
 *
 * The scheduler decides everything: which state to load, which step may start, when to write a
 * checkpoint. The trainer feeds itself from the loader, computes and reports. RELOAD, or a second
 * WELCOME under a newer run epoch, drops everything and starts over from the state it names.
 *
 * Three threads: this one (model, feed, decisions), the control socket (uplink.h), the checkpoint
 * writer (saver.h); with several ranks a fourth, which talks to them (kernels/coll.h).
 *
 * Several ranks live and die together. One that is inside a step when the others are lost (a newer
 * run epoch, or a wait that is over) ends with 111 within five seconds, and never waits inside MPI
 * for one that is gone; their supervisor starts all again.
 */
#ifndef TRAINER_LOOP_H
#define TRAINER_LOOP_H

#include "common/err.h"

struct loop_settings {
    const char *run_dir;
    int rank, world;
};

/*
 * Runs until FINISH, a signal, or an error. Returns the exit status of the process: 0 done or asked
 * to leave (one of several ranks: 111); 1 the run directory cannot be used; 100 do not restart me;
 * 111 restart me. Where it is not 0 the reason is in e. Blocks SIGTERM and SIGINT in all threads
 * and reads them itself. With several ranks end the process by _exit(): threads may still hang in
 * MPI.
 */
int loop_run(const struct loop_settings *settings, struct err *e);

#endif
