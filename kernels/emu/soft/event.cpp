// SPDX-License-Identifier: Apache-2.0
//
// Events, in this process and across processes.
//
// An event counts its records when they are given, and notes each one when it is reached; waiting
// for it is waiting for the latest record given before. Of an event that others may open, these
// words lie in a page of shared memory, with a generation that changes when the event is destroyed;
// who opened it then waits no more, and neither if its process is dead, or the one that made the
// record that is waited for.
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernels/emu/soft/machine.h"

namespace soft
{
enum { SLOTS = 32, PAGE = 4096 };
static_assert(SLOTS * sizeof(event_words) <= PAGE, "slots fill a page");

// A page of events that others may open.
struct page {
    int fd = -1;
    event_words *words = NULL;
    uint32_t used = 0; // one bit for each slot
    ~page()
    {
        if (words)
            munmap(words, PAGE);
        if (fd >= 0)
            close(fd);
    }
};
typedef std::shared_ptr<page> page_ptr;

// What the 64 bytes of a handle are.
struct event_name {
    char magic[8];
    uint32_t named; // pid that is compared
    int32_t pid;    // and the one that is opened
    int32_t fd;
    uint32_t slot;
    uint64_t inode, generation;
};
static_assert(sizeof(event_name) <= sizeof(kvq_gpu_ipc_event), "a handle has 64 bytes");

static const char event_magic[8] = {'k', 'v', 'q', 'e', 'v', 'e', 'n', 't'};

static page_ptr map_page(int fd)
{
    page_ptr p = std::make_shared<page>();
    p->fd = fd;
    void *at = fd >= 0 ? mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (at == MAP_FAILED)
        return NULL;
    p->words = (event_words *)at;
    return p;
}

static page_ptr new_page()
{
    const int fd = memfd_create("kvq-emu-events", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (ftruncate(fd, PAGE) != 0 ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
        close(fd);
        return NULL;
    }
    return map_page(fd);
}

// A slot of a page that events of this process share. With m.order held.
static bool take_slot(event *e)
{
    static std::weak_ptr<page> newest; // goes with the last of its events
    page_ptr p = newest.lock();
    if (!p || p->used == UINT32_MAX)
        newest = p = new_page();
    if (!p)
        return false;
    const unsigned slot = (unsigned)__builtin_ctz(~p->used);
    p->used |= 1u << slot;
    e->owner = p;
    e->words = p->words + slot;
    e->words->recorded = e->words->recorder = 0;
    for (word &one : e->words->reached)
        one = 0;
    e->generation = e->words->generation;
    e->fd = p->fd;
    e->slot = slot;
    return true;
}

// Whoever waits for it looks again. With m.order held.
static void give_slot(event *e)
{
    page *p = (page *)e->owner.get();
    e->words->generation++;
    for (word &one : e->words->reached)
        publish(&one, one);
    p->used &= ~(1u << e->slot);
}

int event_create(kvq_gpu_event **handle, unsigned flags)
{
    context *c = current();
    const bool shared = flags & KVQ_GPU_EVENT_SHARED;
    if (!c)
        return KVQ_GPU_INVALID_CONTEXT;
    if (flags > 7 || (shared && !(flags & KVQ_GPU_EVENT_UNTIMED)))
        return KVQ_GPU_INVALID_VALUE;
    if (shared && lacks(NO_IPC_EVENTS))
        return KVQ_GPU_NOT_SUPPORTED;
    event_ptr e = std::make_shared<event>();
    e->home = c;
    e->flags = flags;
    guard g(m.order);
    if (!shared) {
        std::shared_ptr<event_words> own = std::make_shared<event_words>();
        e->owner = own;
        e->words = own.get();
    } else if (!take_slot(e.get())) {
        return KVQ_GPU_OUT_OF_MEMORY;
    }
    m.events[e.get()] = e;
    *handle = (kvq_gpu_event *)e.get();
    return KVQ_GPU_OK;
}

int event_destroy(kvq_gpu_event *handle)
{
    guard g(m.order);
    const auto found = m.events.find(handle);
    if (found == m.events.end())
        return KVQ_GPU_INVALID_HANDLE;
    if (found->second->fd >= 0)
        give_slot(found->second.get());
    m.events.erase(found);
    return KVQ_GPU_OK;
}

void destroy_events(context *c)
{
    guard g(m.order);
    for (auto at = m.events.begin(); at != m.events.end();) {
        if (at->second->home != c) {
            ++at;
            continue;
        }
        if (at->second->fd >= 0)
            give_slot(at->second.get());
        at = m.events.erase(at);
    }
}

static int find_event(kvq_gpu_event *handle, event_ptr *found)
{
    guard g(m.order);
    const auto at = m.events.find(handle);
    *found = at != m.events.end() ? at->second : NULL;
    return *found ? KVQ_GPU_OK : KVQ_GPU_INVALID_HANDLE;
}

static uint64_t nanoseconds()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static void reach(event &e, uint64_t number)
{
    e.time = nanoseconds();
    if (e.words->generation != e.generation)
        return; // destroyed, and its slot may be another's
    word &at = e.words->reached[number % RECORDS];
    uint64_t before = at;
    while ((int64_t)(before - number) < 0 && !at.compare_exchange_weak(before, number))
        ;
    publish(&at, at);
}

int event_record(kvq_gpu_event *handle, kvq_gpu_stream *stream)
{
    event_ptr e;
    stream_ptr s;
    work w;
    int result = find_event(handle, &e);
    if (!result)
        result = find_stream(stream, &s);
    if (result)
        return result;
    if (e->home != s->home)
        return KVQ_GPU_INVALID_HANDLE;
    {
        guard g(m.order);
        e->captured = s->recording;
        e->frontier = s->frontier;
        if (s->recording)
            return KVQ_GPU_OK;
    }
    if (e->words->generation != e->generation)
        return KVQ_GPU_OK; // destroyed by its own process
    e->words->recorder = (uint64_t)getpid();
    const uint64_t number = ++e->words->recorded;
    w.run = [=](const run_at &) {
        reach(*e, number);
        return (int)KVQ_GPU_OK;
    };
    result = give(s, std::move(w));
    if (result)
        reach(*e, number); // what is not recorded is not waited for
    return result;
}

// Tells whether a process has ended.
static std::function<bool()> death_of(int pid)
{
    const int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    const std::shared_ptr<void> closes((void *)1, [fd](void *) {
        if (fd >= 0)
            close(fd);
    });
    return [fd, closes] {
        struct pollfd p = {fd, POLLIN, 0};
        return fd < 0 || poll(&p, 1, 0) != 0;
    };
}

static waiting latest(const event_ptr &e)
{
    const uint64_t number = e->words->recorded;
    const int recorder = e->fd >= 0 || e->over ? (int)e->words->recorder : 0;
    std::function<bool()> dead;
    if (recorder && recorder != getpid())
        dead = death_of(recorder);
    const auto over = [e, dead] {
        return e->words->generation != e->generation || (e->over && e->over()) || (dead && dead());
    };
    return {&e->words->reached[number % RECORDS], number, e, over};
}

// Captured, its stream joins the capture of the event. With m.order held.
static int join(const event_ptr &e, const stream_ptr &s)
{
    const capture_ptr c = e->captured.lock();
    if (s->recording && c != s->recording) {
        s->recording->broken = true;
        return KVQ_GPU_CAPTURE_ISOLATION;
    }
    if (!s->recording) {
        s->recording = c;
        s->frontier.clear();
        c->members.push_back(s);
    }
    s->frontier.insert(s->frontier.end(), e->frontier.begin(), e->frontier.end());
    return KVQ_GPU_OK;
}

int stream_wait(kvq_gpu_stream *stream, kvq_gpu_event *handle, unsigned)
{
    event_ptr e;
    stream_ptr s;
    work w;
    int result = find_event(handle, &e);
    if (!result)
        result = find_stream(stream, &s);
    if (result)
        return result;
    {
        guard g(m.order);
        if (s->recording || e->captured.lock())
            return join(e, s);
    }
    w.first.push_back(latest(e));
    return give(s, std::move(w));
}

int event_query(kvq_gpu_event *handle)
{
    event_ptr e;
    const int result = find_event(handle, &e);
    if (result)
        return result;
    if (unsafe_now())
        return KVQ_GPU_CAPTURE_UNSUPPORTED;
    if (e->captured.lock())
        return KVQ_GPU_CAPTURED_EVENT;
    return look_at(latest(e)) == DONE ? KVQ_GPU_OK : KVQ_GPU_NOT_READY;
}

int event_sync(kvq_gpu_event *handle)
{
    event_ptr e;
    const int result = find_event(handle, &e);
    if (result)
        return result;
    return e->captured.lock() ? (int)KVQ_GPU_CAPTURED_EVENT : await(latest(e));
}

int event_elapsed(float *milliseconds, kvq_gpu_event *from, kvq_gpu_event *to)
{
    event_ptr a, b;
    int result = find_event(from, &a);
    if (!result)
        result = find_event(to, &b);
    if (result || ((a->flags | b->flags) & KVQ_GPU_EVENT_UNTIMED) || a->words->recorded == 0 ||
        b->words->recorded == 0)
        return result ? result : KVQ_GPU_INVALID_HANDLE;
    if (look_at(latest(a)) != DONE || look_at(latest(b)) != DONE)
        return KVQ_GPU_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(b->time - a->time) / 1e6);
    return KVQ_GPU_OK;
}

// ---- Across processes ----

int ipc_event_get(kvq_gpu_ipc_event *handle, kvq_gpu_event *event)
{
    event_ptr e;
    struct stat st;
    const int result = find_event(event, &e);
    if (result || e->fd < 0 || fstat(e->fd, &st) != 0)
        return result ? result : KVQ_GPU_INVALID_HANDLE;
    event_name name = {{}, m.set.pid, getpid(), e->fd, e->slot, st.st_ino, e->generation};
    memcpy(name.magic, event_magic, sizeof(event_magic));
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &name, sizeof(name));
    return KVQ_GPU_OK;
}

// The exporter's page, if it is still there; all of the handle may be wrong.
static page_ptr open_page(const event_name &name)
{
    char path[64], link[64];
    struct stat st;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", name.pid, name.fd);
    const ssize_t n = readlink(path, link, sizeof(link) - 1);
    link[n > 0 ? n : 0] = '\0';
    if (strncmp(link, "/memfd:kvq-emu-events", 21) != 0)
        return NULL;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_ino == name.inode && st.st_size == PAGE)
        return map_page(fd);
    if (fd >= 0)
        close(fd);
    return NULL;
}

int ipc_event_open(kvq_gpu_event **handle, kvq_gpu_ipc_event from)
{
    event_name name;
    context *c = current();
    memcpy(&name, &from, sizeof(name));
    if (!c)
        return KVQ_GPU_INVALID_CONTEXT;
    if (lacks(NO_IPC_EVENTS))
        return KVQ_GPU_NOT_SUPPORTED;
    if (memcmp(name.magic, event_magic, sizeof(event_magic)) != 0 || name.slot >= SLOTS)
        return KVQ_GPU_INVALID_HANDLE;
    if (name.named == m.set.pid)
        return KVQ_GPU_INVALID_CONTEXT;
    const page_ptr p = open_page(name);
    if (!p)
        return KVQ_GPU_INVALID_HANDLE;
    event_ptr e = std::make_shared<event>();
    e->home = c;
    e->flags = KVQ_GPU_EVENT_SHARED | KVQ_GPU_EVENT_UNTIMED;
    e->owner = p;
    e->words = p->words + name.slot;
    e->generation = name.generation;
    e->over = death_of(name.pid);
    guard g(m.order);
    m.events[e.get()] = e;
    *handle = (kvq_gpu_event *)e.get();
    return KVQ_GPU_OK;
}
} // namespace soft
