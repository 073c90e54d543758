// SPDX-License-Identifier: Apache-2.0
//
// A thread for each client whose streams wait for the daemon's: if the daemon goes, it lets them
// go. The engine's own threads may all be waiting for those streams then, inside the driver.
//
// Work of the daemon that is still on the GPU may write an older number over the word that lets
// streams go, so the thread looks again until it is stopped.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kernels/thread.h"

enum { AGAIN_MS = 5 };

// A store of the host alone may not wake a stream that waits; a write of another stream does. The
// store is for waits that begin later, and for contexts that do nothing any more. It comes first:
// the driver's call may have to wait for a thread that waits for the stream. If the driver has no
// memory for the write, it is made again.
static void let_stream_go(struct kvq__timeline *t)
{
    if (!t->page || (t->let_go && kvq_long_load(&t->page->done) == INT64_MAX))
        return;
    assert(t->spare && t->done);
    kvq_long_store(&t->page->done, INT64_MAX);
    struct kvq_gpu_context *before = kvq__context_enter(&t->here);
    t->let_go =
        t->here.driver->stream_write64(t->spare, t->done, INT64_MAX, 0) != KVQ_GPU_OUT_OF_MEMORY;
    kvq__context_leave(&t->here, before);
}

static void let_all_go(kvq_client *client)
{
    struct kvq_queue *queue;
    pthread_mutex_lock(&client->table);
    TAILQ_FOREACH (queue, &client->queues, entry)
        let_stream_go(&queue->timeline);
    pthread_mutex_unlock(&client->table);
}

static void *watch(void *context)
{
    kvq_client *client = context;
    struct kvq__watch *w = &client->watch;
    struct pollfd p[2] = {{.fd = w->wake, .events = POLLIN},
                          {.fd = client->socket, .events = POLLRDHUP}};
    bool lost = false;
    while (!kvq_word_load_acquire(&w->stop)) {
        uint64_t count;
        if (poll(p, lost ? 1 : 2, lost ? AGAIN_MS : -1) < 0 && errno != EINTR)
            lost = true; // nobody could tell us
        if (p[0].revents && read(w->wake, &count, sizeof count) < 0)
            p[0].revents = 0;
        lost = lost || p[1].revents || kvq_word_load_acquire(&w->lost);
        if (lost)
            let_all_go(client);
    }
    return NULL;
}

static void wake(struct kvq__watch *w)
{
    assert(w->wake >= 0);
    const uint64_t one = 1;
    while (write(w->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static int start_watching(kvq_client *client)
{
    assert(client->watch.wake >= 0 && client->socket >= 0);
    return kvq_thread_start(&client->watch.thread, watch, client);
}

int kvq__watch_start(kvq_client *client)
{
    struct kvq__watch *w = &client->watch;
    int rc = KVQ_OK;
    pthread_mutex_lock(&client->own);
    if (!w->running) {
        w->stop = w->lost = 0;
        w->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        int error = w->wake < 0 ? errno : start_watching(client);
        if (error) {
            if (w->wake >= 0)
                close(w->wake);
            rc = kvq__set_error(KVQ_E_SYSTEM, "cannot start the thread that watches the daemon: %s",
                                strerror(error));
        }
        w->running = error == 0;
    }
    pthread_mutex_unlock(&client->own);
    return rc;
}

void kvq__watch_give_up(kvq_client *client)
{
    if (!client->watch.running)
        return;
    kvq_word_store_release(&client->watch.lost, 1);
    wake(&client->watch);
}

void kvq__watch_stop(kvq_client *client)
{
    struct kvq__watch *w = &client->watch;
    if (!w->running)
        return;
    kvq_word_store_release(&w->stop, 1);
    wake(w);
    pthread_join(w->thread, NULL);
    close(w->wake);
    w->running = false;
}
