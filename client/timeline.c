// SPDX-License-Identifier: Apache-2.0
//
// Requests in the order of a GPU's stream: by words that both sides' streams write and wait for
// (proto/shm.h says how), where those are not to be had by events (events.c), and else by waiting
// on the host.
#include "client/internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "proto/sync.h"

// ---- Which order ----

// What the environment asks for; KVQ_ORDER_NONE: nothing.
static int order_asked(int *order)
{
    const char *text = secure_getenv("KVQ_GPU_ORDER");
    *order = KVQ_ORDER_NONE;
    if (!text || !*text)
        return KVQ_OK;
    if (strcmp(text, "words") == 0)
        *order = KVQ_ORDER_WORDS;
    else if (strcmp(text, "events") == 0)
        *order = KVQ_ORDER_EVENTS;
    else if (strcmp(text, "host") == 0)
        *order = KVQ_ORDER_HOST;
    else
        return kvq__set_error(KVQ_E_INVALID,
                              "KVQ_GPU_ORDER is %.40s: words, events or host is possible", text);
    return KVQ_OK;
}

// ---- Opening ----

static int take_page(struct kvq__timeline *t, int fd)
{
    char text[KVQ__TEXT_BYTES / 2];
    void *mapping;
    kvq_gpu_ptr at = 0;
    assert(!t->page);
    int rc = kvq__map(fd, KVQ_TIMELINE_BYTES, PROT_READ | PROT_WRITE, "a timeline page", &mapping);
    if (rc)
        return rc;
    const struct kvq_timeline_page *page = mapping;
    if (page->magic != KVQ_SHM_MAGIC_TIMELINE)
        rc = kvq__set_error(KVQ_E_PROTOCOL, "the daemon's timeline page has mark %#x, not %#x",
                            page->magic, KVQ_SHM_MAGIC_TIMELINE);
    else if (kvq_gpu_host_register(t->here.driver, mapping, KVQ_TIMELINE_BYTES, &at, text,
                                   sizeof text) != KVQ_GPU_OK)
        rc = kvq__set_error(KVQ_E_UNSUPPORTED, "a timeline page: %s", text);
    if (rc) {
        munmap(mapping, KVQ_TIMELINE_BYTES);
        return rc;
    }
    t->page = mapping;
    t->ready = at + offsetof(struct kvq_timeline_page, ready);
    t->done = at + offsetof(struct kvq_timeline_page, done);
    return KVQ_OK;
}

static int take_timeline(void *to, struct kvq__call *call)
{
    return take_page(to, call->fds[0]);
}

static int ask_daemon(kvq_queue *queue, struct kvq__timeline *t)
{
    Kvq__OpenTimeline message = KVQ__OPEN_TIMELINE__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .send_fd = -1,
                             .want_fds = 1,
                             .want = KVQ__REPLY__RESULT_OPEN_TIMELINE,
                             .what = "opening a queue's timeline",
                             .take = take_timeline,
                             .to = t};
    message.queue = queue->id;
    message.gpu.data = t->here.uuid;
    message.gpu.len = sizeof t->here.uuid;
    call.request.command_case = KVQ__REQUEST__COMMAND_OPEN_TIMELINE;
    call.request.open_timeline = &message;
    return kvq__ask(queue->client, &call);
}

static void release_timeline(struct kvq__timeline *t)
{
    assert(t->here.driver || (!t->page && !t->spare));
    if (t->page) {
        kvq_gpu_host_unregister(t->here.driver, t->page);
        munmap(t->page, KVQ_TIMELINE_BYTES);
    }
    if (t->spare)
        t->here.driver->stream_destroy(t->spare);
    kvq__events_close(t);
    t->page = NULL;
    t->spare = NULL;
}

// Whether a stream can write and wait for words in host memory: some devices and systems say no
// only when asked to. Waits for nothing but the spare stream; unregistering a page just for this
// would wait for all the engine's work.
static bool words_work(const struct kvq__timeline *t)
{
    assert(t->page && t->spare);
    const struct kvq_gpu_driver *driver = t->here.driver;
    const kvq_gpu_ptr at = t->ready + offsetof(struct kvq_timeline_page, trial) -
                           offsetof(struct kvq_timeline_page, ready);
    return driver->stream_write64(t->spare, at, 1, 0) == KVQ_GPU_OK &&
           driver->stream_wait64(t->spare, at, 1, KVQ_GPU_WAIT_AT_LEAST) == KVQ_GPU_OK &&
           driver->stream_sync(t->spare) == KVQ_GPU_OK && kvq_long_load(&t->page->trial) == 1;
}

// Sets the order to WORDS if there can be; what else is in *t is to be given back in any case.
// KVQ_E_UNSUPPORTED if not, as below.
static int try_words(kvq_queue *queue, struct kvq__timeline *t)
{
    int result = t->here.driver->stream_create(&t->spare, KVQ_GPU_STREAM_OWN);
    if (result != KVQ_GPU_OK)
        return kvq__driver_fault(&t->here, result, "making a stream");
    int rc = ask_daemon(queue, t);
    if (rc == KVQ_OK && !words_work(t))
        rc = kvq__set_error(KVQ_E_UNSUPPORTED,
                            "this GPU's streams cannot wait for words in host memory, as "
                            "KVQ_GPU_ORDER=words asks for");
    if (rc == KVQ_OK)
        rc = kvq__watch_start(queue->client);
    if (rc == KVQ_OK)
        t->order = KVQ_ORDER_WORDS;
    return rc;
}

static int try_events(kvq_queue *queue, struct kvq__timeline *t)
{
    int rc = kvq__events_open(queue, t);
    if (rc == KVQ_OK)
        t->order = KVQ_ORDER_EVENTS;
    return rc;
}

// The first that can be, of all or of the one that is asked for.
static int try_orders(kvq_queue *queue, struct kvq__timeline *t, int asked)
{
    static int (*const orders[])(kvq_queue *, struct kvq__timeline *) = {
        [KVQ_ORDER_WORDS] = try_words, [KVQ_ORDER_EVENTS] = try_events};
    int rc = KVQ_E_UNSUPPORTED;
    assert(t->order == KVQ_ORDER_NONE && asked <= KVQ_ORDER_HOST);
    if (asked == KVQ_ORDER_WORDS || asked == KVQ_ORDER_EVENTS)
        return orders[asked](queue, t);
    for (int i = KVQ_ORDER_WORDS; asked != KVQ_ORDER_HOST && i < KVQ_ORDER_HOST; i++) {
        rc = orders[i](queue, t);
        if (rc != KVQ_E_UNSUPPORTED)
            return rc;
    }
    t->order = KVQ_ORDER_HOST;
    return KVQ_OK;
}

static bool is_ordered(const kvq_queue *queue)
{
    return queue->timeline.order == KVQ_ORDER_WORDS || queue->timeline.order == KVQ_ORDER_EVENTS;
}

// With the table's lock: the client's queues whose streams and the daemon's wait for each other.
static void count_timeline(const kvq_queue *queue, int more)
{
    uint32_t *n = &queue->client->timelines;
    assert(more > 0 || !is_ordered(queue) || kvq_word_load(n) > 0);
    if (is_ordered(queue))
        kvq_word_store_release(n, kvq_word_load(n) + (uint32_t)more);
}

// With the table's lock: a request that another queue sent while it was the only one with a
// timeline, and that the daemon may not have enqueued yet. Not of a daemon that is gone.
static bool is_behind(const kvq_queue *other)
{
    const struct kvq__timeline *t = &other->timeline;
    return t->order == KVQ_ORDER_WORDS && kvq_long_load(&t->page->done) != INT64_MAX &&
           !kvq__queue_answered(other, other->before);
}

// With the table's lock, when the queue was counted. Either another queue's thread sees the count
// after it has sent a request (wait_enqueued), or we see that request here: both have a fence
// between.
static void note_others(const kvq_queue *queue)
{
    struct kvq_queue *other;
    kvq_word_fence();
    TAILQ_FOREACH (other, &queue->client->queues, entry)
        other->before = kvq_word_load_acquire(&other->timeline.sent);
}

static bool others_enqueued(const kvq_queue *queue)
{
    struct kvq_queue *other;
    bool behind = false;
    pthread_mutex_lock(&queue->client->table);
    TAILQ_FOREACH (other, &queue->client->queues, entry)
        behind |= other != queue && is_behind(other);
    pthread_mutex_unlock(&queue->client->table);
    return !behind;
}

// The streams of requests that were sent before the queue had a timeline wait for the daemon
// already (see wait_enqueued): until these requests are enqueued, nothing of this queue is sent.
static void wait_for_others(const kvq_queue *queue)
{
    const struct timespec pause = {.tv_nsec = 100 * 1000};
    while (is_ordered(queue) && !others_enqueued(queue))
        nanosleep(&pause, NULL);
}

// In the context of `here`.
static int open_timeline(kvq_queue *queue, const struct kvq__gpu_context *here)
{
    struct kvq__timeline made = {.here = *here};
    int asked, rc = order_asked(&asked);
    if (rc == KVQ_OK)
        rc = try_orders(queue, &made, asked);
    if (rc) {
        release_timeline(&made);
        return rc;
    }
    pthread_mutex_lock(&queue->client->table);
    assert(queue->timeline.order == KVQ_ORDER_NONE && !queue->timeline.page);
    queue->timeline = made;
    count_timeline(queue, 1);
    note_others(queue);
    pthread_mutex_unlock(&queue->client->table);
    wait_for_others(queue);
    return KVQ_OK;
}

int kvq_queue_prepare_streams(kvq_queue *queue)
{
    struct kvq__gpu_context here;
    if (!queue)
        return kvq__set_error(KVQ_E_INVALID, "the queue is NULL");
    if (queue->timeline.order != KVQ_ORDER_NONE)
        return KVQ_OK;
    if (queue->dead)
        return kvq__set_error(queue->dead, "the connection was lost; kvq_reattach connects again");
    int rc = kvq__gpu_here(queue->client, "ordering a queue's requests by streams", &here);
    return rc ? rc : open_timeline(queue, &here);
}

int kvq_queue_order(const kvq_queue *queue)
{
    return queue ? queue->timeline.order : KVQ_ORDER_NONE;
}

int kvq__timeline_again(kvq_queue *queue)
{
    const struct kvq__gpu_context here = queue->timeline.here;
    if (!here.driver)
        return KVQ_OK;
    struct kvq_gpu_context *before = kvq__context_enter(&here);
    int rc = open_timeline(queue, &here);
    kvq__context_leave(&here, before);
    return rc;
}

// ---- Closing ----

void kvq__timeline_close(kvq_queue *queue)
{
    struct kvq__timeline *t = &queue->timeline, gone;
    if (t->order == KVQ_ORDER_NONE)
        return;
    struct kvq_gpu_context *before = kvq__context_enter(&t->here);
    // Streams may still have to pass the words; the watch sees to it if nobody else does. Events
    // must have been passed, too, before the daemon's work stream is asked to come to its end.
    if (t->order != KVQ_ORDER_HOST)
        t->here.driver->context_sync();
    pthread_mutex_lock(&queue->client->table);
    gone = *t;
    count_timeline(queue, -1);
    *t = (struct kvq__timeline){.here = gone.here};
    pthread_mutex_unlock(&queue->client->table);
    release_timeline(&gone);
    kvq__context_leave(&gone.here, before);
}

// ---- Requests ----

static bool has_stream_variant(unsigned op)
{
    return op == KVQ_OP_APPEND || op == KVQ_OP_ATTEND || op == KVQ_OP_APPEND_ATTEND ||
           op == KVQ_OP_READ;
}

// Opens the timeline if need be, and sees whether the stream can be used.
static int check_stream(kvq_queue *queue, unsigned op, struct kvq_gpu_stream *stream)
{
    int status = KVQ_GPU_CAPTURE_NONE;
    if (!queue)
        return kvq__set_error(KVQ_E_INVALID, "the queue is NULL");
    int rc = kvq_queue_prepare_streams(queue);
    if (rc)
        return rc;
    const struct kvq__gpu_context *here = &queue->timeline.here;
    int result = here->driver->stream_capturing(stream, &status);
    if (result != KVQ_GPU_OK)
        return kvq__driver_fault(here, result, "looking at the stream that was given");
    if (status != KVQ_GPU_CAPTURE_NONE)
        return kvq__set_error(KVQ_E_UNSUPPORTED,
                              "%s: the stream is being captured into a graph, and a request of the "
                              "daemon cannot be; make the call between graphs",
                              kvq__op_name(op));
    return KVQ_OK;
}

// The stream could not be made to wait for the request that it has already been sent: the host
// waits instead, until the daemon's stream has finished it or there is no daemon any more.
static int wait_here(kvq_queue *queue, struct kvq__pending *p, int result)
{
    const struct timespec pause = {.tv_nsec = 100 * 1000};
    struct kvq__timeline *t = &queue->timeline;
    assert(t->page && p->ticket);
    int rc = kvq__queue_wait(queue, p, UINT64_MAX);
    p->ticket = 0;
    while (rc == KVQ_OK && (int64_t)(kvq_long_load(&t->page->done) - t->last) < 0) {
        nanosleep(&pause, NULL);
        rc = kvq__queue_take(queue);
    }
    return kvq__driver_fault(&t->here, result, "having the stream wait for the daemon");
}

// All streams of a queue count in one word, and a number there tells the daemon of all numbers
// below. So a stream first waits until the stream of the latest request has told its own number.
// That may be another stream even if the handle is the same: a stream that was destroyed with work
// under way leaves its handle to the next, and CUDA has one handle for each thread's own stream.
static int tell_in_turn(struct kvq__timeline *t, struct kvq_gpu_stream *stream)
{
    const struct kvq_gpu_driver *driver = t->here.driver;
    int result = KVQ_GPU_OK;
    assert(t->order == KVQ_ORDER_WORDS && t->page);
    if ((int64_t)(kvq_long_load(&t->page->ready) - t->last) < 0)
        result = driver->stream_wait64(stream, t->ready, t->last, KVQ_GPU_WAIT_AT_LEAST);
    result = result ? result : driver->stream_write64(stream, t->ready, t->last + 1, 0);
    t->last += result == KVQ_GPU_OK;
    return result;
}

// The daemon works for all queues of a client on one stream. If a request on another queue, on a
// stream that comes behind this one, were enqueued there first, both would wait for ever. So where
// there are several queues the stream waits for the daemon only once this request was enqueued:
// what comes behind the stream then comes behind the request there, too. A queue that becomes the
// second one first waits for what was sent on the first (wait_for_others).
static int wait_enqueued(kvq_queue *queue, struct kvq__pending *p)
{
    int rc = kvq__queue_wait(queue, p, UINT64_MAX);
    if (rc)
        p->ticket = 0;
    return rc;
}

static int send_in_words(kvq_queue *queue, struct kvq__pending *p, struct kvq_gpu_stream *stream)
{
    struct kvq__timeline *t = &queue->timeline;
    p->request.flags |= KVQ_REQ_ON_STREAM;
    p->request.signal = t->last + 1;
    int result = tell_in_turn(t, stream);
    if (result != KVQ_GPU_OK)
        return kvq__driver_fault(&t->here, result,
                                 "having the stream tell the daemon that it has come so far");
    kvq_word_store_release(&t->sent, p->request.seq); // `answered` is no older for who sees it
    int rc = kvq__submit_send(queue, p);              // with a fence behind it
    if (rc == KVQ_OK && kvq_word_load_acquire(&queue->client->timelines) > 1)
        rc = wait_enqueued(queue, p);
    if (rc)
        return rc;
    result = t->here.driver->stream_wait64(stream, t->done, t->last, KVQ_GPU_WAIT_AT_LEAST);
    return result == KVQ_GPU_OK ? KVQ_OK : wait_here(queue, p, result);
}

static int send_by_host(kvq_queue *queue, struct kvq__pending *p, struct kvq_gpu_stream *stream)
{
    const struct kvq__gpu_context *here = &queue->timeline.here;
    int result = here->driver->stream_sync(stream);
    if (result != KVQ_GPU_OK)
        return kvq__driver_fault(here, result, "waiting for the stream");
    int rc = kvq__submit_send(queue, p);
    if (rc == KVQ_OK)
        rc = kvq__queue_wait(queue, p, UINT64_MAX);
    if (rc)
        p->ticket = 0;
    return rc;
}

static int send_in_order(kvq_queue *queue, struct kvq__pending *p, struct kvq_gpu_stream *stream)
{
    static int (*const ways[])(kvq_queue *, struct kvq__pending *,
                               struct kvq_gpu_stream *) = {[KVQ_ORDER_WORDS] = send_in_words,
                                                           [KVQ_ORDER_EVENTS] = kvq__events_send,
                                                           [KVQ_ORDER_HOST] = send_by_host};
    assert(queue->timeline.order > KVQ_ORDER_NONE && queue->timeline.order <= KVQ_ORDER_HOST);
    return ways[queue->timeline.order](queue, p, stream);
}

static int submit_in_order(kvq_queue *queue, unsigned op, struct kvq_work *work,
                           struct kvq_entry *entries, uint32_t n, struct kvq_gpu_stream *stream,
                           kvq_ticket *ticket)
{
    struct kvq__pending *p = NULL;
    if (!has_stream_variant(op))
        return kvq__set_error(KVQ_E_INVALID,
                              "%s cannot run on a stream; append, attend, both and read can",
                              kvq__op_name(op));
    int rc = check_stream(queue, op, stream);
    if (rc == KVQ_OK)
        rc = kvq__submit_make(queue, op, work, entries, n, &p);
    if (rc)
        return rc;
    rc = send_in_order(queue, p, stream);
    *ticket = p->ticket;
    return rc;
}

int kvq__timeline_step(kvq_queue *queue, const struct kvq_step_work *work,
                       struct kvq_entry *entries, uint32_t n, uint32_t *extents,
                       struct kvq_gpu_stream *stream)
{
    struct kvq__pending *p = NULL;
    int rc = check_stream(queue, KVQ_OP_STEP, stream);
    if (rc == KVQ_OK)
        rc = kvq__step_make(queue, work, entries, n, extents, &p);
    if (rc == KVQ_OK)
        rc = send_in_order(queue, p, stream);
    return rc ? rc : kvq_wait(queue, p->ticket, UINT64_MAX);
}

int kvq_submit_on_stream(kvq_queue *queue, enum kvq_operation op, struct kvq_work *work,
                         struct kvq_entry *entries, uint32_t n, void *stream, kvq_ticket *ticket)
{
    if (!ticket)
        return kvq__set_error(KVQ_E_INVALID, "%s: ticket is NULL", kvq__op_name((unsigned)op));
    return submit_in_order(queue, (unsigned)op, work, entries, n, stream, ticket);
}

static int run_on_stream(kvq_queue *queue, unsigned op, const struct kvq_work *work,
                         struct kvq_entry *entries, uint32_t n, void *stream)
{
    kvq_ticket ticket = 0;
    if (!work)
        return kvq__set_error(KVQ_E_INVALID, "%s: work is NULL", kvq__op_name(op));
    struct kvq_work copy = *work;
    int rc = submit_in_order(queue, op, &copy, entries, n, stream, &ticket);
    return rc ? rc : kvq_wait(queue, ticket, UINT64_MAX);
}

int kvq_append_on_stream(kvq_queue *queue, const struct kvq_work *work, struct kvq_entry *entries,
                         uint32_t n, void *stream)
{
    return run_on_stream(queue, KVQ_OP_APPEND, work, entries, n, stream);
}

int kvq_attend_on_stream(kvq_queue *queue, const struct kvq_work *work, struct kvq_entry *entries,
                         uint32_t n, void *stream)
{
    return run_on_stream(queue, KVQ_OP_ATTEND, work, entries, n, stream);
}

int kvq_append_attend_on_stream(kvq_queue *queue, const struct kvq_work *work,
                                struct kvq_entry *entries, uint32_t n, void *stream)
{
    return run_on_stream(queue, KVQ_OP_APPEND_ATTEND, work, entries, n, stream);
}

int kvq_read_on_stream(kvq_queue *queue, const struct kvq_work *work, struct kvq_entry *entries,
                       uint32_t n, void *stream)
{
    return run_on_stream(queue, KVQ_OP_READ, work, entries, n, stream);
}
