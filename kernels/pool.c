// SPDX-License-Identifier: Apache-2.0
//
// Fork and join over numbered items. Threads claim items one at a time from one word, spin for a
// moment between jobs because the next one usually comes at once, and then sleep.
//
// A job has ended when its items are done, whoever did them: a thread that wakes up late, because
// an engine's own threads have its CPU, holds nobody up. So such a thread may look at any job. The
// word that it claims from holds the number of items as well: a claim below that number is an item
// of a job that cannot end before it is done, so that what the job is stays as it is meanwhile; and
// what was written before the word is seen by whoever claims.
//
// `generation` only says that there is something new. A sleeper counts itself in `sleepers` before
// it looks at the generation for the last time, and a caller raises the generation before it looks
// at `sleepers`; both are sequentially consistent, so one of the two sees the other.
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels/internal.h"
#include "kernels/pool.h"
#include "kernels/thread.h"

enum {
    SPINS = 4000,                        // about 50 us; longer than it takes to prepare a job
    PARTIAL_BYTES_MAX = 64 * 1024 * 1024 // more than that, and nothing is shared
};

struct worker {
    struct kvq_pool *pool;
    pthread_t thread;
    void *workspace;
    int cpu; // -1: wherever the system likes
};

struct kvq_pool {
    unsigned n, started; // threads with the caller; those that were started
    struct worker *workers;
    bool pinned;
    cpu_set_t before; // the caller's CPUs before it was pinned

    kvq_pool_fn *fn;
    void *ctx;
    atomic_ullong claims; // the job's items, above 32 bits; below them the next one to claim
    atomic_uint left;     // items that are not done

    atomic_uint generation, sleepers;
    atomic_bool stop, caller_sleeps;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;

    struct seat *seats; // of kvq_pool_attend, kept from call to call
    struct kvq_attend_job **jobs;
    uint32_t n_seats;
    float *partials;
    size_t partial_bytes;
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// ---- Threads ----

static void finish_item(struct kvq_pool *pool)
{
    if (atomic_fetch_sub(&pool->left, 1) != 1 || !atomic_load(&pool->caller_sleeps))
        return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_signal(&pool->done);
    pthread_mutex_unlock(&pool->lock);
}

static void work(struct kvq_pool *pool, struct worker *w)
{
    for (;;) {
        unsigned long long claim = atomic_fetch_add(&pool->claims, 1);
        uint32_t item = (uint32_t)claim;
        if (item >= claim >> 32)
            return;
        pool->fn(pool->ctx, item, w->workspace);
        finish_item(pool);
    }
}

static void sleep_until_new(struct kvq_pool *pool, unsigned seen)
{
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->generation) == seen)
        pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
}

static void pin(pthread_t thread, int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

static void *run_worker(void *arg)
{
    struct worker *w = arg;
    struct kvq_pool *pool = w->pool;
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool->generation) == seen; i++)
            relax();
        if (atomic_load(&pool->generation) == seen)
            sleep_until_new(pool, seen);
        seen = atomic_load(&pool->generation);
        if (atomic_load(&pool->stop))
            return NULL;
        work(pool, w);
    }
}

static void raise_generation(struct kvq_pool *pool)
{
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleepers) == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

static void wait_until_done(struct kvq_pool *pool)
{
    for (int i = 0; i < SPINS && atomic_load(&pool->left); i++)
        relax();
    if (atomic_load(&pool->left) == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_sleeps, true);
    while (atomic_load(&pool->left))
        pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->lock);
}

void kvq_pool_run(struct kvq_pool *pool, kvq_pool_fn *fn, void *ctx, uint32_t n_items)
{
    assert(atomic_load(&pool->left) == 0);
    pool->fn = fn;
    pool->ctx = ctx;
    atomic_store(&pool->left, n_items);
    atomic_store(&pool->claims, (unsigned long long)n_items << 32);
    if (pool->started && n_items > 1)
        raise_generation(pool);
    work(pool, &pool->workers[0]);
    wait_until_done(pool);
}

// ---- Opening and closing ----

// Gives the n-th thread the n-th CPU that the process may use, if there are so many.
static void choose_cpus(struct kvq_pool *pool)
{
    unsigned n = 0;
    if (pthread_getaffinity_np(pthread_self(), sizeof pool->before, &pool->before) ||
        CPU_COUNT(&pool->before) < (int)pool->n)
        return;
    for (int cpu = 0; cpu < CPU_SETSIZE && n < pool->n; cpu++)
        if (CPU_ISSET(cpu, &pool->before))
            pool->workers[n++].cpu = cpu;
    pool->pinned = true;
    pin(pthread_self(), pool->workers[0].cpu);
}

static int start_worker(struct kvq_pool *pool, struct worker *w)
{
    int rc = kvq_thread_start(&w->thread, run_worker, w);
    if (rc)
        return -rc;
    pool->started++;
    if (w->cpu >= 0)
        pin(w->thread, w->cpu);
    return 0;
}

static int make_workers(struct kvq_pool *pool, bool pinned)
{
    size_t bytes = (kvq_workspace_bytes() + 63) / 64 * 64;
    pool->workers = calloc(pool->n, sizeof *pool->workers);
    if (!pool->workers)
        return -ENOMEM;
    for (unsigned i = 0; i < pool->n; i++) {
        pool->workers[i].pool = pool;
        pool->workers[i].cpu = -1;
        pool->workers[i].workspace = aligned_alloc(64, bytes);
        if (!pool->workers[i].workspace)
            return -ENOMEM;
    }
    if (pinned)
        choose_cpus(pool);
    int rc = 0;
    for (unsigned i = 1; i < pool->n && rc == 0; i++)
        rc = start_worker(pool, &pool->workers[i]);
    return rc;
}

int kvq_pool_open(struct kvq_pool **out, unsigned threads, bool pinned)
{
    *out = NULL;
    if (threads == 0 || threads > KVQ_POOL_MAX_THREADS)
        return -EINVAL;
    struct kvq_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pool->n = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    int rc = make_workers(pool, pinned);
    if (rc)
        kvq_pool_close(&pool);
    *out = pool;
    return rc;
}

void kvq_pool_close(struct kvq_pool **p)
{
    struct kvq_pool *pool = *p;
    *p = NULL;
    if (!pool)
        return;
    atomic_store(&pool->stop, true);
    raise_generation(pool);
    for (unsigned i = 1; i <= pool->started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    if (pool->pinned)
        pthread_setaffinity_np(pthread_self(), sizeof pool->before, &pool->before);
    for (unsigned i = 0; pool->workers && i < pool->n; i++)
        free(pool->workers[i].workspace);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool->seats);
    free(pool->jobs);
    free(pool->partials);
    free(pool);
}

unsigned kvq_pool_threads(const struct kvq_pool *pool)
{
    return pool->n;
}

// ---- Attention ----

// What kvq_pool_attend needs for each session: its job, and where its items and its merges start
// among all. The job comes first, for the sorted pointers to be pointers to these.
struct seat {
    struct kvq_attend_job job;
    uint32_t first_item, first_merge;
};

struct attending {
    const struct kvq_kernels *k;
    struct seat *seats;
    uint32_t n;
};

static int grow_seats(struct kvq_pool *pool, uint32_t n)
{
    if (n <= pool->n_seats)
        return 0;
    free(pool->seats);
    free(pool->jobs);
    pool->n_seats = 0;
    pool->seats = malloc(n * sizeof *pool->seats);
    pool->jobs = malloc(n * sizeof *pool->jobs);
    if (!pool->seats || !pool->jobs)
        return -ENOMEM;
    pool->n_seats = n;
    return 0;
}

static int grow_partials(struct kvq_pool *pool, size_t bytes)
{
    if (bytes <= pool->partial_bytes)
        return 0;
    free(pool->partials);
    pool->partial_bytes = 0;
    pool->partials = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!pool->partials)
        return -ENOMEM;
    pool->partial_bytes = bytes;
    return 0;
}

static size_t partial_room(const struct kvq_attend_job *job)
{
    return (job->plan.partial_bytes + 63) / 64 * 64;
}

// Plans all sessions. Returns the bytes that partials take, of plans that share nothing no more
// than PARTIAL_BYTES_MAX.
static size_t plan_all(struct kvq_pool *pool, const struct kvq_kernels *k,
                       const struct kvq_attend *const *attends, uint32_t n, bool share)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        pool->jobs[i] = &pool->seats[i].job;
        pool->jobs[i]->call = *attends[i];
    }
    kvq_attend_plan_batch(k, pool->jobs, n, pool->n);
    bool shares = n > 1 && share && kvq_attend_share(pool->jobs, n);
    for (uint32_t i = 0; i < n; i++) {
        struct kvq_attend_job *job = &pool->seats[i].job;
        if (!shares && bytes + partial_room(job) > PARTIAL_BYTES_MAX)
            kvq_attend_plan_whole(&job->call, &job->plan);
        bytes += partial_room(job);
    }
    return bytes;
}

// Numbers items and merges, and hands out the memory for partials.
static void number_all(struct kvq_pool *pool, uint32_t n, uint32_t *items, uint32_t *merges)
{
    size_t at = 0; // in the memory for partials, of which there may be none
    *items = *merges = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct seat *s = &pool->seats[i];
        s->first_item = *items;
        s->first_merge = *merges;
        s->job.partials = pool->partials ? (uint8_t *)pool->partials + at : NULL;
        *items += s->job.plan.items;
        *merges += kvq_attend_merges(&s->job);
        at += partial_room(&s->job);
    }
}

// The last session that starts at or before `index`. Sessions without merges (or items) start
// where the next one starts, so the last is the one meant.
static uint32_t session_of(const struct attending *at, uint32_t index, bool merge)
{
    uint32_t low = 0, high = at->n;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        const struct seat *s = &at->seats[middle];
        if ((merge ? s->first_merge : s->first_item) <= index)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void attend_item(void *ctx, uint32_t item, void *workspace)
{
    struct attending *at = ctx;
    struct seat *s = &at->seats[session_of(at, item, false)];
    kvq_attend_item(at->k, &s->job, item - s->first_item, workspace);
}

static void merge_item(void *ctx, uint32_t index, void *workspace)
{
    struct attending *at = ctx;
    struct seat *s = &at->seats[session_of(at, index, true)];
    kvq_attend_merge(at->k, &s->job, index - s->first_merge, workspace);
}

int kvq_pool_attend(struct kvq_pool *pool, const struct kvq_kernels *k,
                    const struct kvq_attend *const *attends, uint32_t n)
{
    uint32_t items, merges;
    if (n == 0)
        return 0;
    if (grow_seats(pool, n))
        return -ENOMEM;
    size_t bytes = plan_all(pool, k, attends, n, true);
    if (bytes > PARTIAL_BYTES_MAX)
        bytes = plan_all(pool, k, attends, n, false);
    if (grow_partials(pool, bytes))
        return -ENOMEM;
    number_all(pool, n, &items, &merges);
    struct attending at = {k, pool->seats, n};
    kvq_pool_run(pool, attend_item, &at, items);
    if (merges)
        kvq_pool_run(pool, merge_item, &at, merges);
    return 0;
}

// ---- Packing ----

struct packing {
    const struct kvq_kernels *k;
    const struct kvq_pack_job *jobs;
    uint32_t heads;
};

static void pack_item(void *ctx, uint32_t item, void *workspace)
{
    const struct packing *p = ctx;
    const struct kvq_pack_job *job = &p->jobs[item / p->heads];
    struct kvq_unit unit = job->unit;
    unit.head = item % p->heads;
    kvq_pack(p->k, job->format, job->shape, &unit, workspace);
}

void kvq_pool_pack(struct kvq_pool *pool, const struct kvq_kernels *k,
                   const struct kvq_pack_job *jobs, uint32_t n)
{
    if (n == 0)
        return;
    struct packing p = {k, jobs, jobs[0].shape->kv_heads};
    for (uint32_t i = 1; i < n; i++)
        assert(jobs[i].shape->kv_heads == p.heads);
    kvq_pool_run(pool, pack_item, &p, n * p.heads);
}
