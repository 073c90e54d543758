// SPDX-License-Identifier: Apache-2.0
//
// Fork and join over numbered items. Threads claim items one at a time from one counter, spin for
// a moment between jobs because the next one usually comes at once, and then sleep.
//
// A job is handed over by raising `generation`: what was written before it is seen by whoever
// sees the new number. A sleeper counts itself in `sleepers` before it looks at the generation
// for the last time, and a caller raises the generation before it looks at `sleepers`; both are
// sequentially consistent, so one of the two sees the other.
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels/internal.h"
#include "kernels/pool.h"

enum {
    SPINS = 4000,                        // about 50 us; longer than it takes to prepare a job
    ITEMS_PER_THREAD = 8,                // fewer whole items than that, and splits are spread too
    PARTIAL_BYTES_MAX = 64 * 1024 * 1024 // more than that, and splits are not spread
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
    uint32_t n_items;
    atomic_uint next, busy; // next item to claim; started threads not done yet

    atomic_uint generation, sleepers;
    atomic_bool stop, caller_sleeps;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;

    struct plans *plans; // of kvq_pool_attend, kept from call to call
    uint32_t n_plans;
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

static void work(struct kvq_pool *pool, struct worker *w)
{
    uint32_t item;
    while ((item = atomic_fetch_add(&pool->next, 1)) < pool->n_items)
        pool->fn(pool->ctx, item, w->workspace);
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

static void finish_job(struct kvq_pool *pool)
{
    if (atomic_fetch_sub(&pool->busy, 1) != 1 || !atomic_load(&pool->caller_sleeps))
        return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_signal(&pool->done);
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
        seen++;
        if (atomic_load(&pool->stop))
            return NULL;
        work(pool, w);
        finish_job(pool);
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
    for (int i = 0; i < SPINS && atomic_load(&pool->busy); i++)
        relax();
    if (atomic_load(&pool->busy) == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_sleeps, true);
    while (atomic_load(&pool->busy))
        pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->caller_sleeps, false);
    pthread_mutex_unlock(&pool->lock);
}

void kvq_pool_run(struct kvq_pool *pool, kvq_pool_fn *fn, void *ctx, uint32_t n_items)
{
    pool->fn = fn;
    pool->ctx = ctx;
    pool->n_items = n_items;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->busy, pool->started);
    if (pool->started)
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
    int rc = pthread_create(&w->thread, NULL, run_worker, w);
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
    free(pool->plans);
    free(pool->partials);
    free(pool);
}

unsigned kvq_pool_threads(const struct kvq_pool *pool)
{
    return pool->n;
}

// ---- Attention ----

// One session's plan, where its items and its merges start among all, and its partials.
struct plans {
    struct kvq_attend_plan plan;
    uint32_t first_item, first_merge;
    float *partials;
};

struct attending {
    const struct kvq_kernels *k;
    const struct kvq_attend *const *attends;
    struct plans *plans;
    uint32_t n;
};

static uint32_t serial_items(const struct kvq_attend *const *attends, uint32_t n)
{
    struct kvq_attend_plan plan;
    uint32_t items = 0;
    for (uint32_t i = 0; i < n; i++) {
        kvq_attend_plan(attends[i], false, &plan);
        items += plan.items;
    }
    return items;
}

static int grow(struct kvq_pool *pool, uint32_t n, size_t partial_bytes)
{
    if (n > pool->n_plans) {
        struct plans *plans = realloc(pool->plans, n * sizeof *plans);
        if (!plans)
            return -ENOMEM;
        pool->plans = plans;
        pool->n_plans = n;
    }
    if (partial_bytes > pool->partial_bytes) {
        free(pool->partials);
        pool->partial_bytes = 0;
        pool->partials = aligned_alloc(64, (partial_bytes + 63) / 64 * 64);
        if (!pool->partials)
            return -ENOMEM;
        pool->partial_bytes = partial_bytes;
    }
    return 0;
}

// Fills the plans; returns the bytes that partials take and sets the numbers of items and merges.
static size_t plan_all(struct attending *at, bool parallel, uint32_t *items, uint32_t *merges)
{
    size_t bytes = 0;
    *items = *merges = 0;
    for (uint32_t i = 0; i < at->n; i++) {
        struct plans *p = &at->plans[i];
        kvq_attend_plan(at->attends[i], parallel, &p->plan);
        p->first_item = *items;
        p->first_merge = *merges;
        *items += p->plan.items;
        *merges += p->plan.parallel ? at->attends[i]->shape->kv_heads * p->plan.n_tiles : 0;
        bytes += (p->plan.partial_bytes + 63) / 64 * 64;
    }
    return bytes;
}

static void place_partials(struct attending *at, float *partials)
{
    for (uint32_t i = 0; i < at->n; i++) {
        at->plans[i].partials = partials;
        partials += (at->plans[i].plan.partial_bytes + 63) / 64 * 64 / sizeof(float);
    }
}

// The last session that starts at or before `index`. Sessions without merges start where the
// next one starts, so the last is the one meant.
static uint32_t session_of(const struct attending *at, uint32_t index, bool merge)
{
    uint32_t low = 0, high = at->n;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        const struct plans *p = &at->plans[middle];
        if ((merge ? p->first_merge : p->first_item) <= index)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void attend_item(void *ctx, uint32_t item, void *workspace)
{
    struct attending *at = ctx;
    uint32_t i = session_of(at, item, false);
    struct plans *p = &at->plans[i];
    kvq_attend_item(at->k, at->attends[i], &p->plan, item - p->first_item, p->partials, workspace);
}

static void merge_item(void *ctx, uint32_t index, void *workspace)
{
    struct attending *at = ctx;
    uint32_t i = session_of(at, index, true);
    struct plans *p = &at->plans[i];
    kvq_attend_merge(at->k, at->attends[i], &p->plan, index - p->first_merge, p->partials,
                     workspace);
}

int kvq_pool_attend(struct kvq_pool *pool, const struct kvq_kernels *k,
                    const struct kvq_attend *const *attends, uint32_t n)
{
    uint32_t items, merges;
    if (grow(pool, n, 0))
        return -ENOMEM;
    struct attending at = {k, attends, pool->plans, n};
    bool parallel = pool->n > 1 && serial_items(attends, n) < ITEMS_PER_THREAD * pool->n;
    size_t bytes = plan_all(&at, parallel, &items, &merges);
    if (bytes > PARTIAL_BYTES_MAX)
        bytes = plan_all(&at, false, &items, &merges);
    if (grow(pool, n, bytes))
        return -ENOMEM;
    place_partials(&at, pool->partials);
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
