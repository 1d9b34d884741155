#include "loader/crew.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "common/mem.h"

#define TICK_NS 100000000

struct crew {
    crew_job *job;
    void *arg;
    pthread_mutex_t lock;
    pthread_cond_t done;
    int running;
};

static void *member(void *p)
{
    struct crew *c = p;
    c->job(c->arg);
    pthread_mutex_lock(&c->lock);
    c->running--;
    pthread_cond_signal(&c->done);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static void watch(struct crew *c, crew_tick *tick)
{
    pthread_mutex_lock(&c->lock);
    while (c->running > 0) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += TICK_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&c->done, &c->lock, &until);
        if (tick) {
            pthread_mutex_unlock(&c->lock);
            tick(c->arg);
            pthread_mutex_lock(&c->lock);
        }
    }
    pthread_mutex_unlock(&c->lock);
}

void crew_run(int threads, crew_job *job, crew_tick *tick, void *arg)
{
    struct crew c = {.job = job, .arg = arg};
    pthread_t *ids = mem_array((size_t)threads, sizeof *ids);
    int started = 0;
    pthread_mutex_init(&c.lock, NULL);
    pthread_cond_init(&c.done, NULL);
    c.running = threads;
    while (started < threads && pthread_create(&ids[started], NULL, member, &c) == 0)
        started++;
    pthread_mutex_lock(&c.lock);
    c.running -= threads - started;
    pthread_mutex_unlock(&c.lock);
    if (started == 0)
        job(arg);
    watch(&c, tick);
    for (int i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
    pthread_cond_destroy(&c.done);
    pthread_mutex_destroy(&c.lock);
    free(ids);
}
