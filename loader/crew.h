/*
 * A crew of threads over one piece of shared work, while the caller watches.
 *
 * Each thread calls job(arg) once; the job takes work (from an atomic counter in arg, say) until
 * none is left. The caller's tick(arg), may be NULL, runs in the calling thread about ten times a
 * second until all are done.
 */
#ifndef LOADER_CREW_H
#define LOADER_CREW_H

typedef void crew_job(void *arg);
typedef void crew_tick(void *arg);

/* Threads that cannot be started are done without; one job runs in the caller if none can. */
void crew_run(int threads, crew_job *job, crew_tick *tick, void *arg);

#endif
