// SPDX-License-Identifier: Apache-2.0
//
// The state of the software driver, shared by the files of this folder.
//
// Locks, in the order in which they are taken: memory_use (shared by whatever touches device
// memory, alone for what unmaps it), machine.lock (memory and handles), machine.order (streams,
// events and graphs). None is held while something is waited for.
#ifndef KVQ_KERNELS_EMU_SOFT_MACHINE_H
#define KVQ_KERNELS_EMU_SOFT_MACHINE_H

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "kernels/cuda/driver.h"
#include "kernels/emu/function.h"
#include "kernels/emu/soft.h"

namespace soft
{
enum { MAX_DEVICES = 8 };
const size_t BLOCK = 2 << 20; // unit of device memory

// What KVQ_EMU_LACKS can name.
enum {
    NO_MAPPING = 1,
    NO_FD = 2,
    NO_MEMORY_OPS = 4,
    NO_IPC_EVENTS = 8,
    NO_REGISTER = 16,
    NO_LEGACY = 32
};

// Rows of the table, and kernels.
enum call {
#define KVQ_SOFT_ID(field, symbol, args) CALL_##field,
    KVQ_GPU_CALLS(KVQ_SOFT_ID)
#undef KVQ_SOFT_ID
        CALL_kernel,
    CALLS
};

typedef std::atomic<uint64_t> word;
typedef std::lock_guard<std::mutex> guard;

struct settings {
    int devices;             // that this process sees
    int number[MAX_DEVICES]; // of each, in the machine
    unsigned lacks;
    unsigned connections; // hardware queues of a context
    uint64_t depth;       // work that one of them takes before it keeps the caller waiting
    uint32_t pid;         // that handles name
    kvq_emu_options gpu;
};

// ---- Memory ----

// Device memory itself: a memfd. It lives as long as any process has a descriptor or maps it.
struct physical {
    int fd = -1;
    size_t bytes = 0;
    int number = 0;  // of the device in the machine
    int taken = -1;  // device whose budget it is taken from; -1: another process's
    bool fd_allowed; // to be exported as a descriptor
    ~physical();
};
typedef std::shared_ptr<physical> physical_ptr;

// A handle of it, which is released as often as it was given.
struct held {
    physical_ptr memory;
    unsigned count;
};

enum region_kind { ALLOCATION, MAPPING, IMPORT, HOST, REGISTERED };

// A range of addresses that device pointers may have.
struct region {
    region_kind kind;
    size_t bytes;
    int device;
    uint64_t buffer; // its number, never used again
    physical_ptr memory;
    uint64_t group = 0;             // the reservation of a MAPPING
    uint32_t readable = 0;          // by which devices; of a MAPPING
    uint32_t writable = 0;          //
    uintptr_t returned = 0;         // of an IMPORT: what open gave, inside
    unsigned opened = 0;            // how often
    kvq_gpu_ipc_memory handle = {}; // of an IMPORT
};

// 2 MiB or more of physical memory that memory_alloc divides.
struct block {
    physical_ptr memory;
    int device;
    std::map<size_t, size_t> pieces; // offset and room of each
};

// ---- Streams ----

// Something to be waited for: (int64_t)(*at - value) >= 0.
struct waiting {
    const word *at;
    uint64_t value;
    std::shared_ptr<void> owner;          // of the word; none: it lies in device memory
    std::function<bool()> over = nullptr; // it need not be waited for any more
};

struct run_at {
    int device;
    uint64_t draw; // decides what a seed decides
};

// What is given to a stream: waits, then something to do. Either may be missing.
struct work {
    std::vector<waiting> first;
    std::function<int(const run_at &)> run = nullptr; // a result but OK is sticky
};

struct node {
    work what;
    std::vector<int> after;
};
typedef std::vector<node> node_list;

struct stream;

// What a stream has been given. Ran: done, but nobody was told yet; of steps only.
struct task {
    work what;
    uint64_t number;
    uint64_t turn; // on its connection
    bool ran = false;
};

// A capture under way.
struct capture {
    node_list nodes;
    stream *origin;
    int mode; // CUDA's: 0 forbids what is unsafe to all threads, 1 to its own, 2 to none
    std::thread::id thread;
    bool broken = false;
    std::vector<std::shared_ptr<stream>> members;
};
typedef std::shared_ptr<capture> capture_ptr;

struct context;

// A hardware queue, which streams share: work begins in the order in which it was given, whatever
// stream it was given to. What has to wait keeps all that was given later from beginning.
struct connection {
    uint64_t given = 0; // guarded by m.order, as the next
    unsigned streams = 0;
    word begun{0};
};
typedef std::shared_ptr<connection> connection_ptr;

struct stream {
    context *home;
    connection_ptr line;
    unsigned number; // in order of creation; 0: a default stream
    bool blocking;   // orders itself with the default stream
    bool closed = false, begun = false;
    bool stepping = false; // in the middle of a step
    uint64_t submitted = 0;
    word completed{0};
    std::atomic<bool> stalled{false};
    struct queue { // guarded by m.order
        std::deque<task> tasks;
        std::condition_variable filled;
    };
    std::shared_ptr<queue> tasks;
    capture_ptr recording;
    std::vector<int> frontier; // nodes that the next one comes after
};
typedef std::shared_ptr<stream> stream_ptr;

// What other processes may see of an event. Records on different streams may be reached in another
// order than they were made in, so each has a word of its own, for a while.
enum { RECORDS = 13 };
struct event_words {
    word generation;       // changes when the event is destroyed
    word recorded;         // how often
    word recorder;         // pid of who made the latest record
    word reached[RECORDS]; // of record n, counted from 1, at n % RECORDS: n or a later one
};

struct event {
    context *home;
    unsigned flags;
    event_words *words;
    std::shared_ptr<void> owner; // of the words
    uint64_t generation;
    std::function<bool()> over;      // its exporter is gone, or destroyed it
    word time{0};                    // of the latest record reached, in ns
    std::weak_ptr<capture> captured; // its latest record was captured
    std::vector<int> frontier;
    int fd = -1; // of the page, if other processes may open it
    unsigned slot = 0;
};
typedef std::shared_ptr<event> event_ptr;

struct graph {
    std::shared_ptr<const node_list> nodes;
    waiting last; // the launch before
};
typedef std::shared_ptr<graph> graph_ptr;

struct context {
    int device;
    int retained;
    stream_ptr standard; // the default stream
    std::vector<connection_ptr> lines;
    size_t stack; // bytes of a thread's; 0: as at first
};

struct machine {
    settings set = {};
    std::vector<kvq_gpu_function> functions;
    std::atomic<pid_t> pid{0}; // that called init; 0: nobody
    std::atomic<bool> ended{false};
    const void *last_change = nullptr; // keeps all from memory when the process ends
    std::atomic<int> sticky{0};
    std::atomic<bool> in_steps{false}; // streams have no threads
    std::atomic<uint64_t> brought{0};  // bytes, by copies of kernels
    std::atomic<uint64_t> seed{0}, used[MAX_DEVICES] = {};

    std::mutex lock;
    std::map<uintptr_t, region> regions;
    std::map<uintptr_t, block> blocks;
    std::map<kvq_gpu_memory, held> memories;
    std::map<uintptr_t, size_t> reservations;
    uint64_t last_buffer = 0, last_memory = 0, modules = 0;
    context contexts[MAX_DEVICES] = {};

    // Held by whoever gives work to a stream, and alone by whoever frees memory that streams may
    // use, until all of them have ended: as CUDA's calls do, on an H100 at least.
    std::shared_mutex giving;
    std::mutex order;
    std::map<const void *, stream_ptr> streams;
    std::map<const void *, event_ptr> events;
    std::map<const void *, graph_ptr> graphs, execs;
    unsigned last_stream = 0;
};
extern machine &m; // never destroyed: threads may outlive everything

// ---- device.cpp ----

context *current();                      // of this thread; NULL if none
int find_device(int number);             // ordinal of a device of the machine, -1 if it is not seen
bool lacks(unsigned what);               // KVQ_EMU_LACKS
int read_settings(char *text, size_t n); // settings.cpp: KVQ_GPU_OK, or why not in text

// ---- fault.cpp ----

int enter(call row);                     // before every call: KVQ_GPU_OK, or what it returns
int count(call row);                     // the same for what is asked for by kvq_soft_fail
void fault(int result, const char *why); // the first one stays
void refuse(const char *format, ...) __attribute__((format(printf, 1, 2))); // text of this thread
const char *last_text(int result);                                          // why, or NULL
int parse_failures(const char *list, char *text, size_t n);                 // KVQ_EMU_FAIL
int open_control(const char *path);                                         // KVQ_EMU_CONTROL
bool in_host_function();
void run_host_function(void (*function)(void *), void *data);

// ---- order.cpp: delays and stalls ----

uint64_t mix(uint64_t a, uint64_t b);
void delay(uint64_t draw);                               // a while, often none; none without a seed
void hold(stream &s, uint64_t number);                   // while the stream is stalled
int parse_stall(const char *spec, char *text, size_t n); // KVQ_EMU_STALL

// ---- steps.cpp: streams without threads ----

void add_step(const stream_ptr &s); // it has been given work; with order held
bool take_step();                   // false: all that there is waits for something
void take_steps();                  // none, some or many
void step_for(const waiting &w);    // one towards this; a fault if there is none

// ---- memory.cpp ----

// While one lives, memory stays mapped.
struct memory_use {
    memory_use();
    ~memory_use();
};
// Nobody uses memory while one lives.
struct memory_change {
    memory_change();
    ~memory_change();
};

physical_ptr new_physical(const char *kind, size_t bytes, int device, int *result);
std::map<uintptr_t, region>::iterator find_region(kvq_gpu_ptr at); // with lock held; or end()
bool usable(kvq_gpu_ptr at, size_t bytes, bool write);
bool pinned(const void *at, size_t bytes);
void add_region(uintptr_t at, const region &r); // with lock held
void free_allocations(int device);              // and imports

// ---- stream.cpp ----

void publish(word *at, uint64_t value); // stores and wakes whoever waits there
enum look { WAITING, DONE, GONE };
look look_at(const waiting &w);
int await(const waiting &w); // KVQ_GPU_OK; KVQ_GPU_ILLEGAL_ADDRESS; else sticky, ended
void doze(const waiting &w, unsigned *turn); // a while, longer each time
int broken(); // the sticky error, or that the process ends, or KVQ_GPU_OK

int perform(stream &s, task &t, uint64_t draw); // what a task is; KVQ_GPU_OK, or a fault

int find_stream(kvq_gpu_stream *handle, stream_ptr *found);
int give(const stream_ptr &s, work &&what, uint64_t *number = nullptr);
int give(kvq_gpu_stream *handle, work &&what);
waiting until(const stream_ptr &s, uint64_t number);
int sync_stream(const stream_ptr &s);
int sync_device(context *c);
void make_standard(context *c);
void close_streams(context *c);

// ---- event.cpp, graph.cpp ----

void destroy_events(context *c);
int run_graph(const node_list &nodes, const run_at &at);
int add_node(const stream_ptr &s, work &&what); // to what it records, with order held
bool unsafe_now(); // a capture forbids what may synchronize; and is broken by this

// ---- The calls themselves, by the names of the table ----
#define KVQ_SOFT_DECLARE(field, symbol, args) int field args;
KVQ_GPU_CALLS(KVQ_SOFT_DECLARE)
#undef KVQ_SOFT_DECLARE
} // namespace soft

#endif
