/* Threads for the kernels: pieces of work are taken by whoever is running, and nobody waits for a thread that is not.
 *
 * An OpenMP region ends when every thread of the team has come; on a machine that has other things to do one of
 * them may be off the core for milliseconds, and a decode step has two hundred regions. Here the caller takes
 * pieces itself and waits only for pieces that a worker has begun.
 *
 * Workers are made when they are first needed. They watch for work for about 10 us after the last job, so that the
 * regions of a layer find them awake, then sleep: where two "cores" are threads of one, a watching worker takes
 * from the one that computes (20 times as long made a step a third slower). One job at a time: a second caller (another engine in another
 * thread) works alone. After a fork the child starts with no workers.
 */
#define _GNU_SOURCE
#include "kernels.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_WORKERS = 255, SPINS = 400 };

typedef struct {
    _Atomic int64_t next;
    int64_t items, pieces;
    Range run;
    void *context;
    int workers; /* how many may help */
} Job;

static struct {
    atomic_flag taken;
    _Atomic(Job *) job;
    _Atomic uint32_t epoch; /* changes with every job; what sleepers watch */
    _Atomic int inside;     /* workers that may hold a pointer to the job */
    _Atomic int sleeping;
    int num_workers;
} pool = {.taken = ATOMIC_FLAG_INIT};

static void take_pieces(Job *job, int worker) {
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->pieces;)
        job->run(job->context, job->items * i / job->pieces, job->items * (i + 1) / job->pieces, worker);
}

static void wait_for_epoch_after(uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool.epoch, memory_order_acquire) != seen) return;
        _mm_pause();
    }
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.epoch) == seen) syscall(SYS_futex, &pool.epoch, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleeping, 1);
}

static void *work(void *number) {
    const int worker = (int)(intptr_t)number;
    uint32_t seen = 0;
    for (;;) {
        wait_for_epoch_after(seen);
        seen = atomic_load(&pool.epoch);
        atomic_fetch_add(&pool.inside, 1); /* before the job is read: the caller keeps it until nobody is inside */
        Job *job = atomic_load(&pool.job);
        if (job && worker <= job->workers) take_pieces(job, worker);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static void forget_workers(void) { /* in the child of a fork */
    atomic_flag_clear(&pool.taken);
    atomic_store(&pool.job, NULL);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.sleeping, 0);
    pool.num_workers = 0;
}

static void make_workers(int count) {
    if (pool.num_workers == 0) {
        static atomic_flag asked = ATOMIC_FLAG_INIT;
        if (!atomic_flag_test_and_set(&asked)) pthread_atfork(NULL, NULL, forget_workers);
    }
    while (pool.num_workers < min_i64(count, MAX_WORKERS)) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)(pool.num_workers + 1))) return; /* fewer, then */
        pthread_setname_np(thread, "deepinfer");
        pthread_detach(thread);
        pool.num_workers++;
    }
}

void deepinfer_parallel(int64_t items, int64_t pieces, Range run, void *context, int threads) {
    if (pieces > items) pieces = items;
    if (threads <= 1 || pieces <= 1 || atomic_flag_test_and_set(&pool.taken)) {
        if (items > 0) run(context, 0, items, 0);
        return;
    }
    Job job = {.items = items, .pieces = pieces, .run = run, .context = context, .workers = threads - 1};
    make_workers(job.workers);
    atomic_store(&pool.job, &job);
    atomic_fetch_add(&pool.epoch, 1);
    if (atomic_load(&pool.sleeping)) syscall(SYS_futex, &pool.epoch, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    take_pieces(&job, 0);
    atomic_store(&pool.job, NULL);
    for (int i = 0; atomic_load(&pool.inside); i++) {
        if (i < SPINS)
            _mm_pause();
        else
            sched_yield();
    }
    atomic_flag_clear(&pool.taken);
}
