// SPDX-License-Identifier: Apache-2.0
//
// The poller's loop. One turn of it: deliver mail, look at ports, run some items, and if there was
// nothing to do, spin or sleep.
#include "daemon/runtime/poller.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/runtime/ports.h"
#include "daemon/runtime/workers.h"
#include "kernels/thread.h"
#include "proto/sync.h"

enum {
    TICK_NS = 100000000,      // the core's bookkeeping
    RETRY_NS = 1000000,       // a waiting request looks again
    SLICE_NS = 20000,         // items are run for so long between two looks at the rings, or for
    SLICE_MOST_NS = 10000000, // as long as the look took, up to so long
    MAIL_NS = 1000000,        // and mail is taken for so long
    TURN_UNITS = 64,          // a client's part of a look: each request that begins or goes on
    REQUEST_UNITS = 4,        // counts so many, and one more for each entry
    COUNT_NS = 50000,         // runnable clients are counted anew
    ACTIVE_NS = 1000000,      // a client thread that sent something this recently is runnable
    WARM_NS = 10000000,       // after a request a port is looked at in every turn for so long
    SPIN_FLOOR_NS = 10000,    // after work the poller looks at least so long, if it may spin
    LOST_NS = 100000,         // a turn of an idle spin that takes longer had lost its CPU
    LOST_AGAIN_NS = 2000000,  // lost twice within this time: the CPUs are crowded
    CROWDED_NS = 20000000,    // nobody spins for so long then
    BACKGROUND_SLOT = KVQ_MAX_PORTS,
    EVENTS = 64,
};

struct kvq__poller {
    struct kvq__poller_config config;
    struct kvq__core *core;
    struct kvq__mailbox box;
    struct kvq__workers *workers;
    struct kvq__schedule schedule;
    struct kvq__ports ports;
    struct kvq__work background;
    bool background_open;
    uint64_t background_at; // when it began
    struct kvq__latencies latencies;
    void *workspace;
    int epoll, wake_event;
    pthread_t thread;
    bool started;
    uint32_t stop;
    uint32_t ended;   // jobs and requests that have ended
    uint32_t waiting; // ports in state WAIT
    uint64_t now, tick_at, count_at;
    uint64_t turn_at;    // when the turn began
    uint64_t idle_since; // when there was last something to do
    uint64_t gap_ns;     // how long it usually takes until the next request
    bool gap_open;       // nothing came since the last completion
    uint64_t spun_at;    // last turn of an idle spin; 0: the last turn was none
    uint64_t lost_at, crowded_until;
};

void kvq__poller_spin(struct kvq__poller *p, uint64_t ns)
{
    p->config.spin_ns = ns;
}

struct kvq__mailbox *kvq__poller_box(struct kvq__poller *poller)
{
    return &poller->box;
}

const struct kvq__latencies *kvq__poller_latencies(const struct kvq__poller *poller)
{
    return &poller->latencies;
}

// Any thread: something was done that the poller should see.
static void notify(void *context)
{
    struct kvq__poller *p = context;
    const uint64_t one = 1;
    if (kvq_ring_sleeps(&p->config.page->poller_sleeping)) {
        ssize_t written = write(p->wake_event, &one, sizeof one);
        (void)written; // a counter that is full wakes as well
    }
}

// ---- Ports ----

static void finish_close(struct kvq__poller *p, struct kvq__port *port)
{
    assert(port->closing);
    kvq__ports_leave(&p->ports, port);
    epoll_ctl(p->epoll, EPOLL_CTL_DEL, port->request_event, NULL);
    kvq__queue_close(&port->queue);
    port->closed(port);
}

int kvq__port_add(struct kvq__poller *p, struct kvq__port *port, char *text)
{
    assert(port->queue && port->closed && port->request_event >= 0);
    if (p->ports.n == KVQ_MAX_PORTS) {
        snprintf(text, KVQ_TEXT_BYTES, "%d queues are open already, over all clients",
                 KVQ_MAX_PORTS);
        return KVQ_E_LIMIT;
    }
    // Edge-triggered and never read: a client that plays with the descriptor's flags or counter
    // cannot make the poller wait in a read.
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = port};
    if (epoll_ctl(p->epoll, EPOLL_CTL_ADD, port->request_event, &event) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot watch a queue's eventfd: %s", strerror(errno));
        return KVQ_E_SYSTEM;
    }
    port->state = KVQ__PORT_IDLE;
    port->closing = false;
    port->active_ns = port->warm_until = 0;
    kvq_ring_daemon_side(port->req, port->cq, &port->rx, &port->tx);
    kvq__ports_join(&p->ports, port);
    kvq__workers_slot(p->workers, port->work.slot, &port->work);
    return 0;
}

// Closes the port once nothing of its queue is on a GPU.
static void close_settled(struct kvq__poller *p, struct kvq__port *port)
{
    assert(port->closing && port->state == KVQ__PORT_IDLE);
    if (kvq__queue_gpu_idle(port->queue))
        finish_close(p, port);
    else
        port->state = KVQ__PORT_CLOSING;
}

void kvq__port_remove(struct kvq__poller *p, struct kvq__port *port)
{
    assert(!port->closing);
    kvq__ports_warm(&p->ports, port); // the end of its GPU work is looked for
    port->closing = true;
    kvq__queue_ending(port->queue);
    if (port->state == KVQ__PORT_IDLE)
        close_settled(p, port);
}

static void break_off(struct kvq__poller *p, struct kvq__port *port, const char *text)
{
    struct kvq__member *member = port->member;
    assert(!member->broken); // nothing of it is looked at any more
    member->broken = true;
    kvq__ports_warm_member(&p->ports, member); // what each gave to GPUs is to end
    member->complain(member, text);
}

// ---- Completions ----

static void publish_port(struct kvq__poller *p, struct kvq__port *port)
{
    struct kvq_completion head = *kvq__queue_completion(port->queue);
    size_t bytes = (size_t)head.count * sizeof(struct kvq_result);
    head.slots = (uint16_t)kvq_completion_slots(head.count);
    assert(head.count <= KVQ_MAX_BATCH && head.slots <= KVQ_CQ_MAX_SLOTS);
    kvq_ring_write(&port->tx, 0, &head, sizeof head);
    if (bytes)
        kvq_ring_write(&port->tx, sizeof head, kvq__queue_results(port->queue), bytes);
    kvq_ring_publish(&port->tx, head.slots);
    if (kvq_ring_sleeps(&port->req->client_sleeping)) {
        // A socket, since a write to an eventfd could be made to block by the client, who shares
        // its flags and counter. A full socket is awake already.
        const uint64_t one = 1;
        send(port->client_wake, &one, sizeof one, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    if (head.status == KVQ_E_PROTOCOL)
        break_off(p, port, "a request that breaks the protocol");
}

// The clock is not read for it: it was when the poller looked at the port or ran an item last.
static void note_begun(const struct kvq__poller *p, struct kvq__work *work)
{
    if (work->begun_ns == 0)
        work->begun_ns = p->now;
}

static void note_latency(struct kvq__poller *p, const struct kvq__port *port)
{
    uint8_t op = kvq__queue_header(port->queue)->op;
    uint64_t now = p->config.clock();
    assert(now >= port->work.begun_ns && port->work.begun_ns >= port->taken_ns);
    kvq__histogram_add(&p->latencies.request[op < KVQ_OP_COUNT ? op : KVQ_OP_NOP],
                       now - port->taken_ns);
    kvq__histogram_add(&p->latencies.wait, port->waited_ns);
    kvq__histogram_add(&p->latencies.queue, port->work.begun_ns - port->taken_ns);
}

static void advance(struct kvq__poller *p, struct kvq__port *port, enum kvq__progress progress)
{
    assert(port->state != KVQ__PORT_CLOSING);
    assert(port->state != KVQ__PORT_WAIT || p->waiting > 0);
    if (port->state == KVQ__PORT_WAIT) {
        p->waiting--;
        port->waited_ns += p->now - port->wait_at;
    }
    if (progress != KVQ__WAIT && progress != KVQ__RUN) // of a job's items the first one counts
        note_begun(p, &port->work);
    switch (progress) {
    case KVQ__DONE:
        port->state = KVQ__PORT_IDLE;
        port->warm_until = p->now + WARM_NS;
        p->ended++; // it may have been the step that others wait for
        note_latency(p, port);
        if (!port->closing && !port->member->broken)
            publish_port(p, port);
        p->gap_open = true;
        if (port->closing)
            close_settled(p, port);
        break;
    case KVQ__GPU:
        port->state = KVQ__PORT_GPU;
        break;
    case KVQ__RUN:
        port->state = KVQ__PORT_RUN;
        port->work.job = kvq__queue_job(port->queue);
        port->work.n_items = port->work.job->n_items;
        kvq__schedule_add(&p->schedule, &port->work);
        break;
    case KVQ__WAIT:
    case KVQ__AGAIN:
        port->state = KVQ__PORT_WAIT;
        port->retry_ns = progress == KVQ__AGAIN ? 0 : p->now + RETRY_NS;
        port->seen_ended = p->ended;
        port->wait_at = p->now;
        p->waiting++;
        break;
    }
}

// ---- Requests ----

// Copies the request at the front of the ring. False, with a complaint, if it is none.
static bool copy_request(struct kvq__port *port, uint32_t ready, const char **complaint)
{
    struct kvq_request *header = kvq__queue_header(port->queue);
    *complaint = "less than a request's header published";
    if (ready < KVQ_REQ_HEADER_SLOTS)
        return false;
    kvq_ring_copy(&port->rx, 0, header, sizeof *header);
    size_t entries = (size_t)header->count * sizeof(struct kvq_entry_wire);
    uint32_t layers = header->op == KVQ_OP_STEP ? header->layer : 0;
    *complaint = "more entries in a request than the protocol's limit of 1024";
    if (header->count > KVQ_MAX_BATCH)
        return false;
    *complaint = "more layers in a request than the protocol's limit of 256";
    if (layers > KVQ_MAX_LAYERS)
        return false;
    *complaint = "a request whose length does not match its entries, or is not published whole";
    if (header->slots != kvq_request_slots(header->count, layers) || header->slots > ready)
        return false;
    if (entries)
        kvq_ring_copy(&port->rx, sizeof *header, kvq__queue_entries(port->queue), entries);
    if (layers)
        kvq_ring_copy(&port->rx, (size_t)kvq_request_slots(header->count, 0) * KVQ_SLOT_BYTES,
                      kvq__queue_layers(port->queue), layers * sizeof(struct kvq_step_layer));
    kvq_ring_consume(&port->rx, header->slots);
    return true;
}

// Room for the largest completion is there before a request is taken, so that publishing never
// waits. A client within its credits always leaves it.
static bool take_ring_request(struct kvq__poller *p, struct kvq__port *port, uint32_t ready)
{
    uint32_t room;
    const char *complaint = "the completion ring's head moved where it cannot be";
    bool good = kvq_ring_room(&port->tx, &room) == 0;
    assert(port->state == KVQ__PORT_IDLE && !port->closing);
    if (good && room < KVQ_CQ_MAX_SLOTS) {
        complaint = "more requests in flight than the queue's 8 credits";
        good = false;
    }
    if (!good || !copy_request(port, ready, &complaint)) {
        break_off(p, port, complaint);
        return false;
    }
    port->work.urgency =
        kvq__urgency_of(kvq__queue_header(port->queue), kvq__queue_entries(port->queue));
    return true;
}

static void note_arrival(struct kvq__poller *p, struct kvq__port *port)
{
    port->active_ns = p->now;
    if (p->gap_open) {
        uint64_t gap = p->now - p->idle_since, most = 4 * p->config.spin_ns;
        p->gap_ns = (3 * p->gap_ns + (gap < most ? gap : most)) / 4;
        p->gap_open = false;
    }
}

static uint32_t units_of_port(const struct kvq__port *port)
{
    assert(kvq__queue_header(port->queue)->count <= KVQ_MAX_BATCH);
    return REQUEST_UNITS + kvq__queue_header(port->queue)->count;
}

// A client that lives on may write its signals over ours: they are given again.
static void end_again(struct kvq__poller *p, struct kvq__port *port)
{
    if (p->now < port->retry_ns)
        return;
    kvq__queue_ending(port->queue);
    port->retry_ns = p->now + TICK_NS;
}

// True if there was something to do. What it takes of the client's part is added to *used.
static bool look_idle(struct kvq__poller *p, struct kvq__port *port, uint32_t *used)
{
    uint32_t ready;
    if (port->member->broken) {
        end_again(p, port); // what it gave to GPUs may wait for the client
        return false;
    }
    if (kvq_ring_poll(&port->rx, &ready) != 0) {
        break_off(p, port, "the request ring's tail moved where it cannot be");
        return false;
    }
    if (ready == 0) {
        if (p->now >= port->warm_until)
            kvq__ports_cool(&p->ports, port);
        return false;
    }
    p->now = p->config.clock();
    kvq__core_clock(p->core, p->now);
    note_arrival(p, port);
    if (take_ring_request(p, port, ready)) {
        *used += units_of_port(port);
        port->taken_ns = p->now;
        port->waited_ns = port->work.begun_ns = 0;
        advance(p, port, kvq__request_start(port->queue));
    }
    return true;
}

static bool look_closing(struct kvq__poller *p, struct kvq__port *port)
{
    assert(port->closing);
    if (kvq__queue_gpu_idle(port->queue)) {
        finish_close(p, port);
        return true;
    }
    end_again(p, port);
    return false;
}

static bool look_port(struct kvq__poller *p, struct kvq__port *port, uint32_t *used)
{
    switch (port->state) {
    case KVQ__PORT_IDLE:
        return look_idle(p, port, used);
    case KVQ__PORT_RUN:
        if (kvq_word_load_acquire(&port->work.done) != port->work.n_items)
            return false;
        p->ended++;
        break;
    case KVQ__PORT_WAIT:
        if (port->member->broken)
            kvq__queue_ending(port->queue); // its client goes when nothing of it is left
        else if (!port->closing && port->seen_ended == p->ended && p->now < port->retry_ns)
            return false;
        break;
    case KVQ__PORT_GPU:
        if (!kvq__queue_gpu_idle(port->queue)) {
            if (port->closing || port->member->broken)
                end_again(p, port);
            return false;
        }
        break;
    case KVQ__PORT_CLOSING:
        return look_closing(p, port);
    }
    bool retry = port->state == KVQ__PORT_WAIT;
    *used += units_of_port(port);
    enum kvq__progress progress = kvq__request_continue(port->queue);
    advance(p, port, progress);
    return !(retry && progress == KVQ__WAIT);
}

// Whether other threads are to help with the work.
static bool wants_workers(const struct kvq__poller *p, const struct kvq__work *work)
{
    if (p->config.workers == 1)
        return false;
    bool asleep = kvq_word_load(&p->config.page->awake) <= 1;
    return !asleep || !work->job->brief || !kvq__schedule_only(&p->schedule, work);
}

static void feed_workers(struct kvq__poller *p)
{
    uint32_t room = kvq__workers_room(p->workers), item, given = 0;
    struct kvq__work *work;
    while (given < room && (work = kvq__schedule_pick(&p->schedule, &item))) {
        note_begun(p, work);
        kvq__workers_give(p->workers, work, item);
        given++;
    }
    if (given)
        kvq__workers_wake(p->workers, given);
}

// Looks at the client's warm ports, from where the last look ended, until its part of the turn is
// used.
static bool look_member(struct kvq__poller *p, struct kvq__member *member)
{
    uint32_t used = 0;
    bool busy = false;
    for (uint32_t n = member->n_warm; n > 0 && used < TURN_UNITS; n--) {
        assert(member->next);
        struct kvq__port *port = member->next;
        member->next = kvq__ports_after(port); // before it closes or cools
        busy |= look_port(p, port, &used);
    }
    return busy;
}

static bool look_at_ports(struct kvq__poller *p)
{
    struct kvq__member *member, *next;
    bool busy = false;
    kvq__ports_sweep(&p->ports, p->now);
    for (member = TAILQ_FIRST(&p->ports.members); member; member = next) {
        next = TAILQ_NEXT(member, link); // its last port may close or cool
        busy |= look_member(p, member);
        if (!kvq__schedule_empty(&p->schedule) && kvq_word_load(&p->config.page->awake) > 1)
            feed_workers(p); // who are awake need not wait for the end of the look
    }
    return busy;
}

// ---- Items ----

// A slice of time for items: as long as the turn has taken so far, within its bounds, so that
// whatever clients make the poller look at takes half of its time at most.
static uint64_t slice_end(struct kvq__poller *p)
{
    p->now = p->config.clock();
    uint64_t taken = p->now - p->turn_at;
    uint64_t slice = taken < SLICE_MOST_NS ? taken : SLICE_MOST_NS;
    return p->now + (slice > SLICE_NS ? slice : SLICE_NS);
}

static bool end_background(struct kvq__poller *p)
{
    struct kvq__work *work = &p->background;
    if (!p->background_open || kvq_word_load_acquire(&work->done) != work->n_items)
        return false;
    assert(work->picked == work->n_items);
    p->background_open = false;
    p->ended++;
    kvq__histogram_add(&p->latencies.background, p->config.clock() - p->background_at);
    kvq__background_done(p->core);
    return true;
}

// One item of the background here, and one for each worker that has nothing to do.
static bool run_background_item(struct kvq__poller *p)
{
    struct kvq__work *work = &p->background;
    if (!p->background_open) {
        work->job = kvq__background_start(p->core);
        if (!work->job)
            return false;
        p->background_open = true;
        p->background_at = p->config.clock();
        assert(work->job->n_items > 0);
        work->n_items = work->job->n_items;
        work->picked = work->done = 0;
    }
    uint32_t room = p->config.workers > 1 ? kvq__workers_room(p->workers) : 0, given = 0;
    while (given < room && work->picked + 1 < work->n_items) {
        kvq__workers_give(p->workers, work, work->picked++);
        given++;
    }
    if (given)
        kvq__workers_wake(p->workers, given);
    bool busy = work->picked < work->n_items;
    if (busy)
        kvq__work_run(work, work->picked++, p->workspace);
    return end_background(p) || busy || given;
}

// A request may be waiting for the background work that is under way.
static bool hurry_background(struct kvq__poller *p)
{
    bool busy = true, any = false;
    for (uint64_t until = slice_end(p); busy && p->background_open && p->now < until;
         p->now = p->config.clock()) {
        busy = run_background_item(p);
        any |= busy;
    }
    return any;
}

static bool run_items(struct kvq__poller *p)
{
    struct kvq__work *work;
    uint32_t item;
    bool busy = false;
    uint64_t until = kvq__schedule_empty(&p->schedule) ? 0 : slice_end(p);
    while (!kvq__schedule_empty(&p->schedule)) {
        work = kvq__schedule_pick(&p->schedule, &item);
        if (!work)
            break;
        busy = true;
        note_begun(p, work);
        if (wants_workers(p, work))
            feed_workers(p);
        kvq__work_run(work, item, p->workspace);
        p->now = p->config.clock();
        if (p->now >= until)
            return true;
    }
    // What the workers have not begun yet is as well done here.
    if (!busy && p->config.workers > 1 && kvq__workers_take(p->workers, &work, &item)) {
        kvq__work_run(work, item, p->workspace);
        return true;
    }
    return busy;
}

// ---- Spinning and sleeping ----

// Cold ports had no request lately.
static void count_runnable(struct kvq__poller *p)
{
    const struct kvq__member *member;
    const struct kvq__port *port;
    uint32_t runnable = 0;
    static_assert(WARM_NS >= ACTIVE_NS, "ports whose threads are runnable are warm");
    p->count_at = p->now + COUNT_NS;
    TAILQ_FOREACH (member, &p->ports.members, link)
        TAILQ_FOREACH (port, &member->warm, link) {
            bool recent = port->state != KVQ__PORT_IDLE || p->now - port->active_ns < ACTIVE_NS;
            runnable += recent && kvq_word_load(&port->req->client_sleeping) == 0;
        }
    if (p->now < p->crowded_until)
        runnable = p->config.page->cpus; // too many for anybody to spin
    kvq_ring_set_runnable(p->config.page, runnable);
}

// Programs that we know nothing of may need the CPUs as well. Who spins then loses its CPU to
// them, and often keeps it from the very thread that it waits for, where sleeping would hand it
// over at once.
static void note_spin(struct kvq__poller *p)
{
    if (p->spun_at && p->now - p->spun_at > LOST_NS) {
        if (p->now - p->lost_at < LOST_AGAIN_NS) {
            p->crowded_until = p->now + CROWDED_NS;
            p->count_at = 0;
        }
        p->lost_at = p->now;
    }
    p->spun_at = p->now;
}

static uint64_t spin_window(const struct kvq__poller *p)
{
    if (p->config.spin_ns == 0 || !kvq_ring_may_spin(p->config.page))
        return 0;
    uint64_t window = 2 * p->gap_ns < p->config.spin_ns ? 2 * p->gap_ns : p->config.spin_ns;
    if (p->gap_ns > p->config.spin_ns || window < SPIN_FLOOR_NS)
        window = SPIN_FLOOR_NS < p->config.spin_ns ? SPIN_FLOOR_NS : p->config.spin_ns;
    return window;
}

static bool has_news(const struct kvq__port *port)
{
    if (port->state == KVQ__PORT_IDLE && !port->member->broken)
        return kvq_word_load_acquire(&port->req->tail) != port->rx.head;
    return port->state == KVQ__PORT_RUN &&
           kvq_word_load_acquire(&port->work.done) == port->work.n_items;
}

// Anything that the poller would do if it were awake?
static bool look_before_sleep(struct kvq__poller *p)
{
    const struct kvq__member *member;
    const struct kvq__port *port;
    if (kvq__mailbox_pending(&p->box) || kvq_word_load_acquire(&p->stop) ||
        kvq__ports_sweep_all(&p->ports))
        return true;
    TAILQ_FOREACH (member, &p->ports.members, link)
        TAILQ_FOREACH (port, &member->warm, link)
            if (has_news(port))
                return true;
    return p->background_open &&
           kvq_word_load_acquire(&p->background.done) == p->background.n_items;
}

static void sleep_until_woken(struct kvq__poller *p)
{
    struct epoll_event events[EVENTS];
    int n = 0;
    uint32_t *flag = &p->config.page->poller_sleeping;
    uint64_t until = p->tick_at > p->now ? p->tick_at - p->now : 0;
    if ((p->waiting || kvq__core_moves(p->core)) && until > RETRY_NS)
        until = RETRY_NS;
    count_runnable(p);
    kvq_ring_sleep_begin(flag);
    kvq__core_wake(p->core, notify, p);
    if (!look_before_sleep(p))
        n = epoll_wait(p->epoll, events, EVENTS, (int)((until + 999999) / 1000000));
    kvq_ring_sleep_end(flag);
    for (int i = 0; i < n; i++)
        if (events[i].data.ptr) // NULL: mail
            kvq__ports_warm(&p->ports, events[i].data.ptr);
    p->now = p->config.clock();
    p->count_at = 0;
}

static void rest_poller(struct kvq__poller *p)
{
    p->now = p->config.clock();
    note_spin(p);
    if (p->now >= p->count_at)
        count_runnable(p);
    if (p->now - p->idle_since < spin_window(p)) {
        kvq_cpu_relax();
        return;
    }
    sleep_until_woken(p);
    p->spun_at = 0;
}

// Mail for a while: what comes faster waits behind everybody's items.
static bool deliver_mail(struct kvq__poller *p)
{
    if (!kvq__mailbox_pending(&p->box))
        return false;
    p->now = p->config.clock();
    kvq__core_clock(p->core, p->now);
    uint64_t until = p->now + MAIL_NS;
    while (p->now < until && kvq__mailbox_deliver_one(&p->box))
        p->now = p->config.clock();
    return true;
}

static void *poller_main(void *context)
{
    struct kvq__poller *p = context;
    if (p->config.pin)
        kvq__pin_thread(0);
    while (!kvq_word_load_acquire(&p->stop)) {
        p->turn_at = p->now;
        bool busy = deliver_mail(p);
        if (kvq__core_poll(p->core)) {
            p->ended++;
            busy = true;
        }
        busy |= look_at_ports(p);
        busy |= run_items(p);
        busy |= end_background(p);
        if (p->waiting && p->background_open)
            busy |= hurry_background(p);
        else if (!busy)
            busy |= run_background_item(p);
        if (busy) {
            p->idle_since = p->now = p->config.clock();
            p->spun_at = 0;
        } else {
            rest_poller(p);
        }
        kvq__core_clock(p->core, p->now); // by which deadlines of what waits are over
        if (p->now >= p->tick_at) {
            kvq__core_tick(p->core);
            p->tick_at = p->now + TICK_NS;
        }
    }
    while (p->background_open && !end_background(p)) // workers may hold its items
        if (!run_background_item(p))
            kvq_cpu_relax();
    return NULL;
}

// ---- Opening and closing ----

static int open_events(struct kvq__poller *p)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    p->epoll = epoll_create1(EPOLL_CLOEXEC);
    p->wake_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (p->epoll < 0 || p->wake_event < 0 ||
        epoll_ctl(p->epoll, EPOLL_CTL_ADD, p->wake_event, &event) != 0)
        return -errno;
    return 0;
}

static int start_thread(struct kvq__poller *p)
{
    int error = kvq_thread_start(&p->thread, poller_main, p);
    p->started = error == 0;
    return -error;
}

int kvq__poller_open(const struct kvq__poller_config *config, struct kvq__poller **out, char *text)
{
    struct kvq__poller *p = calloc(1, sizeof *p);
    assert(config->core && config->page && config->workers >= 1);
    *out = NULL;
    if (!p) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory for the poller");
        return KVQ_E_NO_MEMORY;
    }
    p->config = *config;
    p->config.clock = config->clock ? config->clock : kvq_now_ns;
    p->core = config->core;
    p->epoll = p->wake_event = -1;
    p->background.slot = BACKGROUND_SLOT;
    kvq__ports_init(&p->ports);
    kvq__schedule_init(&p->schedule);
    kvq__mailbox_open(&p->box, notify, p);
    struct kvq__workers_config workers = {.threads = config->workers - 1,
                                          .slots = KVQ_MAX_PORTS + 1,
                                          .pin = config->pin,
                                          .page = config->page,
                                          .finished = notify,
                                          .context = p};
    int error = kvq__workers_open(&workers, &p->workers, text);
    if (error == 0) {
        kvq__workers_slot(p->workers, BACKGROUND_SLOT, &p->background);
        p->workspace = kvq__workspace_new();
        int system = p->workspace ? open_events(p) : -ENOMEM;
        system = system ? system : start_thread(p);
        if (system) {
            snprintf(text, KVQ_TEXT_BYTES, "cannot start the poller: %s", strerror(-system));
            error = KVQ_E_SYSTEM;
        }
    }
    if (error)
        kvq__poller_close(&p);
    *out = p;
    return error;
}

static void stop_poller(struct kvq__mail *mail)
{
    (void)mail; // its arrival is enough: the poller looks at its stop word
}

void kvq__poller_close(struct kvq__poller **poller)
{
    struct kvq__poller *p = *poller;
    struct kvq__mail mail;
    if (!p)
        return;
    if (p->started) {
        kvq_word_store_release(&p->stop, 1);
        kvq__mailbox_post(&p->box, &mail, stop_poller);
        pthread_join(p->thread, NULL);
        kvq__core_hush(p->core); // the driver's threads call notify() with this poller
        kvq__mailbox_deliver(&p->box);
    }
    assert(p->ports.n == 0 && TAILQ_EMPTY(&p->ports.members) && p->waiting == 0);
    kvq__workers_close(&p->workers);
    if (p->epoll >= 0)
        close(p->epoll);
    if (p->wake_event >= 0)
        close(p->wake_event);
    free(p->workspace);
    kvq__mailbox_close(&p->box);
    free(p);
    *poller = NULL;
}
