// SPDX-License-Identifier: Apache-2.0
//
// Taking completions off the ring, and waiting for them: spin for a while if CPUs are to spare,
// then sleep on the queue's waker and on the attach socket, by which a daemon that dies wakes us at
// once.
#include "client/internal.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

enum {
    SPIN_FREE = 64,            // first spins, before the clock is looked at
    SPIN_CHECK = 16,           // spins between looks at the clock
    SPIN_MIN_NS = 20 * 1000,   // window of a queue whose answers take long
    SPIN_MAX_NS = 1000 * 1000, // nobody spins longer than this of their own accord
    GAP_START_NS = 50 * 1000,
    ALIVE_NS = 10 * 1000 * 1000, // a long spin looks at the socket so often
    RESULTS_AT_ONCE = 32,
};

static void fail_entries(struct kvq__pending *p, int code)
{
    for (uint32_t i = 0; p->entries && i < p->n; i++) {
        p->entries[i].status = code;
        p->entries[i].value = 0;
    }
}

int kvq__queue_kill(kvq_queue *queue, int code)
{
    assert(code != KVQ_OK);
    for (int i = 0; i < KVQ__PENDING; i++) {
        struct kvq__pending *p = &queue->pending[i];
        if (!p->ticket || p->done)
            continue;
        p->done = true;
        p->status = code;
        fail_entries(p, code);
    }
    kvq_word_store(&queue->answered, queue->seq); // no answer to any is waited for
    if (!queue->dead)
        queue->dead = code;
    return code;
}

static int fail_damaged(kvq_queue *queue, const char *what, uint64_t value)
{
    return kvq__queue_kill(
        queue, kvq__set_error(KVQ_E_PROTOCOL,
                              "queue %u: the daemon's completion ring makes no sense: %s "
                              "%llu; kvq_reattach connects again",
                              queue->id, what, (unsigned long long)value));
}

static int fail_lost(kvq_queue *queue)
{
    return kvq__queue_kill(queue,
                           kvq__set_error(KVQ_E_DISCONNECTED,
                                          "the daemon is gone or has closed this connection; its "
                                          "log says why; kvq_reattach connects again"));
}

// ---- Completions ----

static struct kvq__pending *find_pending(kvq_queue *queue, uint32_t seq)
{
    for (int i = 0; i < KVQ__PENDING; i++) {
        struct kvq__pending *p = &queue->pending[i];
        if (p->ticket && !p->done && p->request.seq == seq)
            return p;
    }
    return NULL;
}

static bool changes_session(unsigned op)
{
    return op == KVQ_OP_STEP_END || op == KVQ_OP_TRUNCATE || op == KVQ_OP_ACCEPT ||
           op == KVQ_OP_STEP;
}

static int take_result(kvq_queue *queue, struct kvq__pending *p, uint32_t index,
                       const struct kvq_result *result)
{
    assert(index < p->n);
    struct kvq_entry *entry = &p->entries[index];
    entry->status = result->status;
    entry->value = result->value;
    if (p->extents && result->status == KVQ_OK)
        p->extents[index] = result->extents;
    if (result->status && !p->any_failed)
        p->shard = result->shard;
    p->any_failed |= result->status != KVQ_OK;
    if (changes_session(p->request.op))
        kvq__note_change(queue->client, entry->session);
    if (p->request.op == KVQ_OP_FORK && result->status == KVQ_OK)
        return kvq__handle_fork(queue->client, entry->session, result->value);
    return KVQ_OK;
}

static int take_results(kvq_queue *queue, struct kvq__pending *p)
{
    struct kvq_result results[RESULTS_AT_ONCE];
    for (uint32_t from = 0; from < p->n; from += RESULTS_AT_ONCE) {
        uint32_t n = p->n - from < RESULTS_AT_ONCE ? p->n - from : RESULTS_AT_ONCE;
        kvq_ring_copy(&queue->rx, sizeof(struct kvq_completion) + from * sizeof results[0], results,
                      n * sizeof results[0]);
        for (uint32_t i = 0; i < n; i++) {
            int rc = results[i].status > 0 ? fail_damaged(queue, "a result's status is above zero:",
                                                          (uint32_t)results[i].status)
                                           : take_result(queue, p, from + i, &results[i]);
            if (rc)
                return rc;
        }
    }
    return KVQ_OK;
}

static int take_completion(kvq_queue *queue, uint32_t ready, uint32_t *slots)
{
    struct kvq_completion head;
    assert(ready > 0);
    kvq_ring_copy(&queue->rx, 0, &head, sizeof head);
    struct kvq__pending *p = find_pending(queue, head.seq);
    *slots = kvq_completion_slots(head.count);
    if (!p)
        return fail_damaged(queue, "it answers a request that is not open,", head.seq);
    if (head.slots != *slots || *slots > ready)
        return fail_damaged(queue, "a message's length in slots is", head.slots);
    if (head.count != p->n && !(head.count == 0 && head.status))
        return fail_damaged(queue, "the number of results is", head.count);
    if (head.status > 0)
        return fail_damaged(queue, "a status is above zero:", (uint32_t)head.status);
    if (head.count) {
        int rc = take_results(queue, p);
        if (rc)
            return kvq__queue_kill(queue, rc);
    } else {
        fail_entries(p, head.status);
    }
    if (p->n == 0 && changes_session(p->request.op))
        kvq_word_add(&queue->client->all_changes, 1);
    p->status = head.status;
    p->done = true;
    kvq_word_store(&queue->answered, head.seq); // before its slots are given back
    return KVQ_OK;
}

int kvq__queue_take(kvq_queue *queue)
{
    uint32_t ready;
    if (queue->dead)
        return queue->dead;
    if (kvq_ring_poll(&queue->rx, &ready))
        return fail_damaged(queue, "its tail is at", queue->cq->tail);
    while (ready > 0) {
        uint32_t slots;
        int rc = take_completion(queue, ready, &slots);
        if (rc)
            return rc;
        assert(slots > 0 && slots <= ready);
        kvq_ring_consume(&queue->rx, slots);
        ready -= slots;
    }
    return KVQ_OK;
}

// Whether a request has been answered when that one has: no more than the credits are in flight,
// and they are answered in their order.
static bool is_past(uint32_t answered, uint32_t seq)
{
    return seq - answered - 1 >= KVQ_QUEUE_CREDITS;
}

// What the queue's thread has not taken yet is looked for on the ring. That thread may take it
// meanwhile, and the daemon write other completions over it: then what was read says nothing.
bool kvq__queue_answered(const kvq_queue *queue, uint32_t seq)
{
    const uint32_t head = kvq_word_load_acquire(&queue->req->cq_head);
    struct kvq_ring_rx rx = {
        (const uint8_t *)(queue->cq + 1), KVQ_CQ_SLOTS, head, head, NULL, &queue->cq->tail};
    struct kvq_completion completion;
    uint32_t ready = 0;
    bool found = false;
    if (is_past(kvq_word_load(&queue->answered), seq))
        return true;
    if (kvq_ring_poll(&rx, &ready))
        return false;
    while (!found && ready > 0) {
        kvq_ring_copy(&rx, 0, &completion, sizeof completion);
        found = is_past(completion.seq, seq);
        if (completion.slots == 0 || completion.slots > ready)
            break;
        rx.head += completion.slots;
        ready -= completion.slots;
    }
    kvq_word_fence();
    return found && kvq_word_load(&queue->req->cq_head) == head;
}

// ---- Waiting ----

// Did the daemon close the connection? What it published before it died still counts.
static int check_alive(kvq_queue *queue, short revents)
{
    if (!(revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)))
        return KVQ_OK;
    int rc = kvq__queue_take(queue);
    return rc ? rc : fail_lost(queue);
}

static int look_at_socket(kvq_queue *queue)
{
    struct pollfd p = {.fd = queue->client->socket, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 ? check_alive(queue, p.revents) : KVQ_OK;
}

static uint64_t spin_window(const kvq_queue *queue)
{
    if (queue->client->spin_us)
        return (uint64_t)queue->client->spin_us * 1000;
    uint64_t gap = queue->gap_ns ? queue->gap_ns : GAP_START_NS;
    return gap > SPIN_MAX_NS / 2 ? SPIN_MIN_NS : gap * 2 > SPIN_MIN_NS ? gap * 2 : SPIN_MIN_NS;
}

static void learn_gap(kvq_queue *queue, uint64_t ns)
{
    queue->gap_ns = queue->gap_ns ? (queue->gap_ns * 7 + ns) / 8 : ns;
}

// Spins until p is done, the window is over or there are too few CPUs. 0 or the queue's death.
static int spin_for(kvq_queue *queue, struct kvq__pending *p, uint64_t start, uint64_t deadline_ns)
{
    const struct kvq_daemon_page *page = queue->client->page;
    uint64_t end = start + spin_window(queue), alive = start + ALIVE_NS;
    end = end < deadline_ns ? end : deadline_ns;
    while (kvq_ring_may_spin(page)) {
        for (int i = 0; i < SPIN_CHECK; i++) {
            int rc = kvq__queue_take(queue);
            if (rc || p->done)
                return rc;
            kvq_cpu_relax();
        }
        uint64_t now = kvq_now_ns();
        if (now >= end)
            break;
        if (now >= alive) {
            int rc = look_at_socket(queue);
            if (rc)
                return rc;
            alive = now + ALIVE_NS;
        }
    }
    return KVQ_OK;
}

// Takes what woke us out of the queue's waker, a socket. False if its other end is closed.
static bool drain_wakeups(int fd)
{
    uint64_t words[16];
    ssize_t n;
    do {
        n = read(fd, words, sizeof words);
    } while (n == (ssize_t)sizeof words || (n < 0 && errno == EINTR));
    return n != 0;
}

// Sleeps until woken, or the time is over. Completions are left to the caller.
static int sleep_once(kvq_queue *queue, uint64_t left_ns)
{
    assert(queue->wake_client >= 0);
    struct pollfd p[2] = {{.fd = queue->wake_client, .events = POLLIN},
                          {.fd = queue->client->socket, .events = POLLRDHUP}};
    struct timespec t = {(time_t)(left_ns / 1000000000u), (long)(left_ns % 1000000000u)};
    int n = ppoll(p, 2, left_ns == UINT64_MAX ? NULL : &t, NULL);
    if (n < 0 && errno != EINTR) // the answer would be written where no caller waits any more
        return kvq__queue_kill(queue, kvq__set_error_errno("cannot wait for the daemon"));
    if (n <= 0)
        return KVQ_OK;
    if (p[0].revents && !drain_wakeups(queue->wake_client))
        return check_alive(queue, POLLHUP);
    return check_alive(queue, p[1].revents);
}

static int sleep_until(kvq_queue *queue, struct kvq__pending *p, uint64_t deadline_ns)
{
    int rc = KVQ_OK;
    while (rc == KVQ_OK && !p->done) {
        uint64_t now = deadline_ns == UINT64_MAX ? 0 : kvq_now_ns();
        if (now >= deadline_ns) {
            rc = look_at_socket(queue); // who only ever polls learns of the daemon's end too
            return rc || p->done ? rc : KVQ_E_DEADLINE;
        }
        kvq_ring_sleep_begin(&queue->req->client_sleeping);
        rc = kvq__queue_take(queue);
        if (rc == KVQ_OK && !p->done)
            rc = sleep_once(queue, deadline_ns == UINT64_MAX ? UINT64_MAX : deadline_ns - now);
        kvq_ring_sleep_end(&queue->req->client_sleeping);
        if (rc == KVQ_OK)
            rc = kvq__queue_take(queue);
    }
    return rc;
}

int kvq__queue_wait(kvq_queue *queue, struct kvq__pending *p, uint64_t deadline_ns)
{
    assert(p->ticket);
    bool may_spin = deadline_ns && kvq_ring_may_spin(queue->client->page);
    for (int i = 0; may_spin && i < SPIN_FREE; i++) {
        int rc = kvq__queue_take(queue);
        if (rc || p->done)
            return rc;
        kvq_cpu_relax();
    }
    uint64_t start = kvq_now_ns();
    int rc = may_spin ? spin_for(queue, p, start, deadline_ns) : kvq__queue_take(queue);
    if (rc == KVQ_OK && !p->done)
        rc = sleep_until(queue, p, deadline_ns);
    learn_gap(queue, kvq_now_ns() - start);
    return rc;
}

int kvq__queue_await_credit(kvq_queue *queue)
{
    for (;;) {
        struct kvq__pending *oldest = NULL;
        int in_flight = 0;
        for (int i = 0; i < KVQ__PENDING; i++) {
            struct kvq__pending *p = &queue->pending[i];
            if (!p->ticket || p->done)
                continue;
            in_flight++;
            if (!oldest || (int32_t)(p->request.seq - oldest->request.seq) < 0)
                oldest = p;
        }
        if (in_flight < KVQ_QUEUE_CREDITS)
            return KVQ_OK;
        int rc = kvq__queue_wait(queue, oldest, UINT64_MAX);
        if (rc)
            return rc;
    }
}
