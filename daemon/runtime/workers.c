// SPDX-License-Identifier: Apache-2.0
//
// Worker threads and the ring that feeds them.
//
// The ring has one producer, the poller, and many consumers. A consumer reads the entry at head
// and then claims it by moving head on; if another was quicker, or the poller has wrapped around
// and written the entry anew, the swap fails and what was read is thrown away. Entries are single
// words for that reason: a job's slot and an item.
#include "daemon/runtime/workers.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/thread.h"
#include "proto/sync.h"

enum {
    RING = 256,
    AHEAD = 2, // items in the ring for each thread: one that ends its item finds another there
    SPIN_NS = 50000,       // an idle worker looks so long before it sleeps
    SLEEP_NS = 1000000000, // and looks again after so long in any case
};

struct kvq__workers {
    struct kvq__workers_config config;
    struct kvq__work **slots;
    pthread_t *threads;
    void **workspaces; // one a thread
    uint32_t started;
    _Alignas(128) uint32_t head;
    _Alignas(128) uint32_t tail;
    uint64_t ring[RING];
    _Alignas(128) uint32_t sleepers;
    uint32_t wakes; // what sleepers sleep on; counts up
    uint32_t stop;
    uint32_t numbers; // given to threads: the first has 1
};

void *kvq__workspace_new(void)
{
    return aligned_alloc(64, (kvq_workspace_bytes() + 63) & ~(size_t)63);
}

int kvq__pin_thread(uint32_t i)
{
    cpu_set_t usable, one;
    if (sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) == 0)
        return KVQ_E_SYSTEM;
    uint32_t skip = i % (uint32_t)CPU_COUNT(&usable);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &usable) || skip-- > 0)
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return pthread_setaffinity_np(pthread_self(), sizeof one, &one) ? KVQ_E_SYSTEM : 0;
}

bool kvq__work_run(struct kvq__work *work, uint32_t item, void *workspace)
{
    uint32_t n_items = work->n_items;
    uint64_t start = kvq_now_ns();
    assert(item < n_items);
    work->job->run(work->job, item, workspace);
    if (work->share)
        kvq_long_add(&work->share->cost_ns, kvq_now_ns() - start);
    return kvq_word_add(&work->done, 1) == n_items;
}

bool kvq__workers_take(struct kvq__workers *workers, struct kvq__work **work, uint32_t *item)
{
    uint32_t head = kvq_word_load_acquire(&workers->head);
    while (head != kvq_word_load_acquire(&workers->tail)) {
        uint64_t entry = kvq_long_load(&workers->ring[head % RING]);
        if (kvq_word_swap_if(&workers->head, &head, head + 1)) {
            *work = workers->slots[entry >> 32];
            *item = (uint32_t)entry;
            assert(*work && *item < (*work)->n_items);
            return true;
        }
    }
    return false;
}

static void count_awake(struct kvq__workers *w, int change)
{
    kvq_word_add(&w->config.page->awake, (uint32_t)change);
}

// Returns when there may be something to do.
static void rest_worker(struct kvq__workers *w)
{
    uint64_t until = kvq_now_ns() + SPIN_NS;
    while (kvq_ring_may_spin(w->config.page) && kvq_now_ns() < until) {
        if (kvq_word_load(&w->head) != kvq_word_load(&w->tail))
            return;
        kvq_cpu_relax();
    }
    uint32_t wakes = kvq_word_load_acquire(&w->wakes);
    kvq_word_add(&w->sleepers, 1);
    kvq_word_fence();
    if (kvq_word_load(&w->head) == kvq_word_load(&w->tail) && !kvq_word_load(&w->stop)) {
        count_awake(w, -1);
        kvq_word_sleep(&w->wakes, wakes, SLEEP_NS);
        count_awake(w, 1);
    }
    kvq_word_add(&w->sleepers, (uint32_t)-1);
}

static void *worker_main(void *context)
{
    struct kvq__workers *w = context;
    uint32_t number = kvq_word_add(&w->numbers, 1);
    void *workspace = w->workspaces[number - 1];
    if (w->config.pin)
        kvq__pin_thread(number);
    count_awake(w, 1);
    while (!kvq_word_load_acquire(&w->stop)) {
        struct kvq__work *work;
        uint32_t item;
        if (kvq__workers_take(w, &work, &item)) {
            if (kvq__work_run(work, item, workspace))
                w->config.finished(w->config.context);
        } else {
            rest_worker(w);
        }
    }
    count_awake(w, -1);
    return NULL;
}

int kvq__workers_open(const struct kvq__workers_config *config, struct kvq__workers **out,
                      char *text)
{
    assert(config->slots > 0 && config->finished);
    int error = 0;
    struct kvq__workers *w = aligned_alloc(128, (sizeof *w + 127) & ~(size_t)127);
    *out = NULL;
    if (!w) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for the workers");
        return KVQ_E_NO_MEMORY;
    }
    memset(w, 0, sizeof *w);
    w->config = *config;
    w->slots = calloc(config->slots, sizeof(struct kvq__work *));
    w->threads = calloc(config->threads + 1, sizeof(pthread_t));
    w->workspaces = calloc(config->threads + 1, sizeof(void *));
    if (!w->slots || !w->threads || !w->workspaces)
        error = ENOMEM;
    for (uint32_t i = 0; i < config->threads && !error; i++)
        if (!(w->workspaces[i] = kvq__workspace_new()))
            error = ENOMEM;
    for (uint32_t i = 0; i < config->threads && !error; i++) {
        error = kvq_thread_start(&w->threads[i], worker_main, w);
        w->started += !error;
    }
    if (error) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot start %u workers: %s", config->threads,
                 strerror(error));
        kvq__workers_close(&w);
        return KVQ_E_SYSTEM;
    }
    *out = w;
    return 0;
}

void kvq__workers_close(struct kvq__workers **workers)
{
    struct kvq__workers *w = *workers;
    if (!w)
        return;
    kvq_word_store_release(&w->stop, 1);
    kvq_word_add(&w->wakes, 1);
    kvq_word_wake(&w->wakes, INT32_MAX);
    for (uint32_t i = 0; i < w->started; i++)
        pthread_join(w->threads[i], NULL);
    assert(w->head == w->tail && w->started <= w->config.threads);
    for (uint32_t i = 0; w->workspaces && i < w->config.threads; i++)
        free(w->workspaces[i]);
    free(w->workspaces);
    free(w->threads);
    free(w->slots);
    free(w);
    *workers = NULL;
}

uint32_t kvq__workers_room(const struct kvq__workers *w)
{
    uint32_t ahead = w->tail - kvq_word_load_acquire(&w->head);
    uint32_t most = w->config.threads < RING / AHEAD ? AHEAD * w->config.threads : RING;
    assert(ahead <= RING);
    return ahead < most ? most - ahead : 0;
}

void kvq__workers_slot(struct kvq__workers *w, uint32_t slot, struct kvq__work *work)
{
    assert(slot < w->config.slots && work->slot == slot);
    w->slots[slot] = work;
}

void kvq__workers_give(struct kvq__workers *w, struct kvq__work *work, uint32_t item)
{
    assert(w->slots[work->slot] == work && item < work->n_items);
    assert(w->tail - kvq_word_load(&w->head) < RING);
    kvq_long_store(&w->ring[w->tail % RING], (uint64_t)work->slot << 32 | item);
    kvq_word_store_release(&w->tail, w->tail + 1);
}

void kvq__workers_wake(struct kvq__workers *w, uint32_t items)
{
    assert(items > 0 && items <= RING);
    if (!kvq_ring_sleeps(&w->sleepers))
        return;
    kvq_word_add(&w->wakes, 1);
    kvq_word_wake(&w->wakes, (int)items);
}
