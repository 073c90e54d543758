// SPDX-License-Identifier: Apache-2.0
//
// Streams: queues, each with a thread that does its work in order, and waiting, which is for words
// in memory in all cases: timelines, events, how far a stream has come, and whose turn it is on the
// hardware queue that streams share.
//
// Whoever changes such a word wakes those who wait there (a futex on its lower half), in whatever
// process; whoever waits looks by itself, too, after a while that grows to 2 ms, since not every
// change is told: those by copies, by kernels and by plain stores are not.
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <system_error>
#include <thread>

#include "kernels/emu/soft/machine.h"

namespace soft
{
// ---- Words ----

static void wake(word *at)
{
    syscall(SYS_futex, (uint32_t *)at, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void publish(word *at, uint64_t value)
{
    at->store(value);
    wake(at);
}

static bool reached(const waiting &w)
{
    return (int64_t)(w.at->load() - w.value) >= 0;
}

look look_at(const waiting &w)
{
    if (w.owner)
        return reached(w) || (w.over && w.over()) ? DONE : WAITING;
    memory_use use;
    if (!usable((uintptr_t)w.at, 8, false))
        return GONE;
    return reached(w) ? DONE : WAITING;
}

// The word may change between the look before and this, or its memory may go: then the call
// returns at once.
void doze(const waiting &w, unsigned *turn)
{
    struct timespec t = {0, 20000 << (*turn < 7 ? *turn : 7)};
    uint32_t low;
    t.tv_nsec = t.tv_nsec < 2000000 ? t.tv_nsec : 2000000;
    ++*turn;
    {
        memory_use use;
        if (!w.owner && !usable((uintptr_t)w.at, 8, false))
            return;
        const uint64_t now = w.at->load();
        if ((int64_t)(now - w.value) >= 0)
            return;
        low = (uint32_t)now;
    }
    syscall(SYS_futex, (const uint32_t *)w.at, FUTEX_WAIT, low, &t, NULL, 0);
}

int await(const waiting &w)
{
    for (unsigned turn = 0;;) {
        const look now = look_at(w);
        if (now == DONE)
            return KVQ_GPU_OK;
        if (now == GONE)
            return KVQ_GPU_ILLEGAL_ADDRESS;
        if (const int result = broken())
            return result;
        if (m.in_steps)
            step_for(w);
        else
            doze(w, &turn);
    }
}

waiting until(const stream_ptr &s, uint64_t number)
{
    return {&s->completed, number, s};
}

// ---- A stream's thread ----

static int do_waits(const work &w)
{
    for (const waiting &one : w.first) {
        const int result = await(one);
        if (result == KVQ_GPU_ILLEGAL_ADDRESS)
            fault(result, "a stream waits for a word in memory that is gone");
        if (result)
            return result;
    }
    return KVQ_GPU_OK;
}

// Some delays come before the work's turn on its connection and some behind it, where they hold
// nobody else up.
static bool is_late(uint64_t draw)
{
    return draw & 16;
}

int perform(stream &s, task &t, uint64_t draw)
{
    if (do_waits(t.what) || broken())
        return broken();
    publish(&s.line->begun, t.turn);
    if (!m.in_steps && is_late(draw))
        delay(draw);
    const int result = t.what.run ? t.what.run({s.home->device, draw}) : KVQ_GPU_OK;
    if (result)
        fault(result, "work of a stream failed");
    return result;
}

// What the work held is given back before anybody learns that it is done.
static void do_task(stream &s, task &t)
{
    const uint64_t draw = mix(mix(m.seed, s.number), t.number);
    if (!is_late(draw))
        delay(draw);
    if (await({&s.line->begun, t.turn - 1, s.line}))
        return;
    hold(s, t.number);
    if (perform(s, t, draw))
        return;
    delay(mix(draw, 1));
    t.what = work();
    if (!broken())
        publish(&s.completed, t.number);
}

static void serve(stream_ptr s)
{
    std::unique_lock<std::mutex> l(m.order);
    for (;;) {
        s->tasks->filled.wait(
            l, [&] { return (!m.in_steps && !s->tasks->tasks.empty()) || s->closed; });
        if (m.in_steps || s->tasks->tasks.empty())
            return;
        task t = std::move(s->tasks->tasks.front());
        s->tasks->tasks.pop_front();
        l.unlock();
        do_task(*s, t);
        l.lock();
    }
}

// Signals are for the program's own threads.
static bool begin(const stream_ptr &s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread(serve, s).detach();
        s->begun = true;
    } catch (const std::system_error &) {
        s->begun = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s->begun;
}

// ---- Giving work ----

// A stream takes the first of its context's connections that have fewest streams.
static stream_ptr new_stream(context *c, bool blocking)
{
    stream_ptr s = std::make_shared<stream>();
    if (c->lines.empty())
        for (unsigned i = 0; i < m.set.connections; i++)
            c->lines.push_back(std::make_shared<connection>());
    s->line = c->lines[0];
    for (const connection_ptr &one : c->lines)
        s->line = one->streams < s->line->streams ? one : s->line;
    s->line->streams++;
    s->home = c;
    s->blocking = blocking;
    s->number = 0;
    s->tasks = std::make_shared<stream::queue>();
    return s;
}

static bool is_standard(const stream &s)
{
    return s.home->standard.get() == &s;
}

// With m.order held: what the default stream and those that order themselves with it wait for.
static int add_order(const stream_ptr &s, work *w)
{
    if (!is_standard(*s)) {
        const stream_ptr &standard = s->home->standard;
        if (s->blocking && standard->completed != standard->submitted)
            w->first.push_back(until(standard, standard->submitted));
        return KVQ_GPU_OK;
    }
    for (const auto &other : m.streams) {
        const stream_ptr &o = other.second;
        if (o->home != s->home || !o->blocking)
            continue;
        if (o->recording) {
            o->recording->broken = true;
            return KVQ_GPU_CAPTURE_IMPLICIT;
        }
        if (o->completed != o->submitted)
            w->first.push_back(until(o, o->submitted));
    }
    return KVQ_GPU_OK;
}

// As CUDA's, this waits while its connection is full.
static int await_room(const stream_ptr &s)
{
    uint64_t given;
    {
        guard g(m.order);
        given = s->recording ? 0 : s->line->given;
    }
    return given < m.set.depth ? KVQ_GPU_OK
                               : await({&s->line->begun, given - m.set.depth + 1, s->line});
}

int give(const stream_ptr &s, work &&what, uint64_t *number)
{
    if (const int result = await_room(s))
        return result;
    std::shared_lock<std::shared_mutex> giving(m.giving);
    guard g(m.order);
    if (s->recording)
        return add_node(s, std::move(what));
    if (const int result = add_order(s, &what))
        return result;
    if (!m.in_steps && !s->begun && !begin(s))
        return KVQ_GPU_OUT_OF_MEMORY;
    s->tasks->tasks.push_back({std::move(what), ++s->submitted, ++s->line->given});
    if (m.in_steps)
        add_step(s);
    if (number)
        *number = s->submitted;
    s->tasks->filled.notify_one();
    return KVQ_GPU_OK;
}

// 1 and 2 are CUDA's names for the default stream and a thread's own, which is the same here.
int find_stream(kvq_gpu_stream *handle, stream_ptr *found)
{
    context *c = current();
    guard g(m.order);
    if ((uintptr_t)handle <= 2) {
        *found = c ? c->standard : NULL;
        return c ? KVQ_GPU_OK : KVQ_GPU_INVALID_CONTEXT;
    }
    const auto at = m.streams.find(handle);
    *found = at != m.streams.end() ? at->second : NULL;
    return *found ? KVQ_GPU_OK : KVQ_GPU_INVALID_HANDLE;
}

// Work is given with the stream's own context current.
int give(kvq_gpu_stream *handle, work &&what)
{
    stream_ptr s;
    const int result = find_stream(handle, &s);
    if (result)
        return result;
    if (s->home != current())
        return current() ? KVQ_GPU_INVALID_HANDLE : KVQ_GPU_INVALID_CONTEXT;
    return give(s, std::move(what));
}

// ---- Streams as handles ----

int stream_create(kvq_gpu_stream **handle, unsigned flags)
{
    context *c = current();
    if (!c)
        return KVQ_GPU_INVALID_CONTEXT;
    if (flags > KVQ_GPU_STREAM_OWN)
        return KVQ_GPU_INVALID_VALUE;
    guard g(m.order);
    stream_ptr s = new_stream(c, !(flags & KVQ_GPU_STREAM_OWN));
    s->number = ++m.last_stream;
    m.streams[s.get()] = s;
    *handle = (kvq_gpu_stream *)s.get();
    return KVQ_GPU_OK;
}

// Its work goes on; its thread ends after it. With m.order held.
static void close_stream(const stream_ptr &s)
{
    s->closed = true;
    s->stalled = false;
    s->line->streams--;
    s->tasks->filled.notify_one();
}

int stream_destroy(kvq_gpu_stream *handle)
{
    guard g(m.order);
    const auto found = m.streams.find(handle);
    if (found == m.streams.end())
        return KVQ_GPU_INVALID_HANDLE;
    if (found->second->recording)
        found->second->recording->broken = true;
    close_stream(found->second);
    m.streams.erase(found);
    return KVQ_GPU_OK;
}

void make_standard(context *c)
{
    c->standard = new_stream(c, false);
}

void close_streams(context *c)
{
    guard g(m.order);
    for (auto at = m.streams.begin(); at != m.streams.end();) {
        if (at->second->home != c) {
            ++at;
            continue;
        }
        close_stream(at->second);
        at = m.streams.erase(at);
    }
    close_stream(c->standard);
}

// What has to be reached for a stream to be idle. With m.order held.
static void add_waits(const stream_ptr &s, std::vector<waiting> *to)
{
    if (s->completed != s->submitted)
        to->push_back(until(s, s->submitted));
}

static int collect(const stream_ptr &s, std::vector<waiting> *to)
{
    guard g(m.order);
    if (s->recording) {
        s->recording->broken = true;
        return KVQ_GPU_CAPTURE_UNSUPPORTED;
    }
    add_waits(s, to);
    if (is_standard(*s))
        for (const auto &other : m.streams)
            if (other.second->home == s->home && other.second->blocking)
                add_waits(other.second, to);
    return KVQ_GPU_OK;
}

static int await_all(const std::vector<waiting> &all)
{
    for (const waiting &w : all)
        if (const int result = await(w))
            return result;
    return broken();
}

int sync_stream(const stream_ptr &s)
{
    std::vector<waiting> all;
    const int result = collect(s, &all);
    return result ? result : await_all(all);
}

int sync_device(context *c)
{
    std::vector<waiting> all;
    {
        guard g(m.order);
        if (!c->standard)
            return KVQ_GPU_OK;
        add_waits(c->standard, &all);
        for (const auto &other : m.streams) {
            if (other.second->home != c)
                continue;
            if (other.second->recording && other.second->blocking) {
                other.second->recording->broken = true;
                return KVQ_GPU_CAPTURE_UNSUPPORTED;
            }
            add_waits(other.second, &all);
        }
    }
    return await_all(all);
}

int stream_sync(kvq_gpu_stream *handle)
{
    stream_ptr s;
    const int result = find_stream(handle, &s);
    return result ? result : sync_stream(s);
}

int stream_query(kvq_gpu_stream *handle)
{
    stream_ptr s;
    std::vector<waiting> all;
    int result = find_stream(handle, &s);
    if (!result)
        result = collect(s, &all);
    return result || all.empty() ? result : KVQ_GPU_NOT_READY;
}
} // namespace soft
