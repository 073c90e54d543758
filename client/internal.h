// SPDX-License-Identifier: Apache-2.0
//
// What the files of libkvq share.
//
// The files, bottom first; each calls only those before it:
//
//   error sized socket control    error texts, and packets to and from the daemon
//   gpu watch                     the driver, and streams that wait for a dead daemon
//   table gpu_buffer buffer       session handles; memory that holds tensors
//   wait request explain submit   a request: its completion, bytes, error text, ticket
//   step work                     the calls that wait
//   events timeline               the calls in the order of a stream
//   queue                         opening and closing queues
//   spans session                 control calls on sessions
//   capture merge                 apart from all that: capture files, and arithmetic
//   in_context/                   attention in this process; in_context.h lists its files
//   client                        connecting and disconnecting
//   disk                          saving and restoring, which have a connection of their own
//
// Three locks, taken in this order:
//   turn      the attach socket: one control call at a time has it, from request to reply. Others
//             stand in a queue for it, no longer than their own time lasts; those that close what
//             must not stay open, for as long as it takes
//   own       what this process does without the daemon: pinning buffers, starting the watch
//   table     handles, shapes, the lists of queues, buffers and pools, and the queues' timelines as
//             the watch sees them; held for moments only
// The hot path (submit, wait) touches only the queue, which belongs to one thread, and fields of
// client and buffers that only kvq_reattach changes, when no other thread may be in a call. A step
// of in-context mode makes a control call where the daemon tells of extents that are new to us.
#ifndef KVQ_CLIENT_INTERNAL_H
#define KVQ_CLIENT_INTERNAL_H

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <sys/queue.h>

#include "client/kvq.h"
#include "kernels/cuda/share.h"
#include "proto/clock.h"
#include "proto/limits.h"
#include "proto/ring.h"
#include "proto/shm.h"
#include "proto/status.h"
#include "proto/sync.h"
#include "proto/wire.h"

enum {
    KVQ__PATH_BYTES = 256,
    KVQ__TEXT_BYTES = 1024,
    KVQ__HANDLES = KVQ_MAX_OPEN + 1, // the daemon's indices start at 0 or 1
    KVQ__UUID_BYTES = 16,
    KVQ__PLACE_BYTES = 48,
};
#define KVQ__ANY_FDS     UINT32_MAX
#define KVQ__NO_DEADLINE UINT64_MAX
enum { KVQ__MAX_TOLD = 240 }; // of the 278 packets of few bytes that a socket takes by default

// ---- Objects ----

// The shapes of a session's layers, for explaining refusals. Shared by forks.
struct kvq__shape {
    uint32_t refs, layers;
    struct {
        uint16_t q_heads, kv_heads, k_dim, v_dim;
        uint32_t window;
        float softcap, scale;
        uint32_t source; // layer whose cache it reads
    } layer[];
};

// One session handle, at its index. handle 0: free.
struct kvq__handle {
    uint64_t handle;
    bool read_only;
    struct kvq__shape *shape; // NULL: opened as it was, shape not known here
    char *shown;              // what texts call the session; NULL: of a fork, or no memory for it
};

enum { KVQ__SHOWN_BYTES = KVQ_NAME_BYTES + 32 }; // \0 included

// A thread's current CUDA context, and its GPU.
struct kvq__gpu_context {
    const struct kvq_gpu_driver *driver;
    struct kvq_gpu_context *context;
    int device;
    uint8_t uuid[KVQ__UUID_BYTES];
};

enum kvq__buffer_kind {
    KVQ__BUFFER_HOST,
    KVQ__BUFFER_ARENA,  // in a GPU's memory, made by the daemon
    KVQ__BUFFER_TENSOR, // in a GPU's memory, the engine's
};

struct kvq_buffer {
    TAILQ_ENTRY(kvq_buffer) entry;
    kvq_client *client;
    enum kvq__buffer_kind kind;
    uint32_t id; // the daemon's; 0 while it is not registered
    int memfd;   // our own descriptor of it; an arena's: of its memory; a tensor's: -1
    uint64_t offset;
    size_t bytes;
    uint64_t allocation_bytes;    // an arena's: of the memory behind memfd
    void *data;                   // NULL for an imported one, and on GPUs
    uint8_t *host;                // where the library itself sees it; NULL on GPUs
    struct kvq__gpu_context here; // on GPUs: where it was made; on the host: where it was pinned
    kvq_gpu_ptr at;               // on GPUs: its first byte
    struct kvq_gpu_piece piece;   // an arena's mapping
    uint64_t number;              // a tensor's: CUDA's number of its allocation
    // On the host: its first byte for the GPUs that this process uses; 0: not registered with them.
    uint64_t reach;
    bool pinned;   // the library registered it with them
    uint32_t refs; // under the table lock: the engine's, and of tensors that graphs captured
    bool closed;   // by the engine; only who has kept it may still look
};

// A queue's: those that have a ticket, and the last one for kvq_step_abort, which needs none.
enum { KVQ__PENDING = KVQ_QUEUE_CREDITS + 1 };

// A request in flight, or done and not yet collected by kvq_wait.
struct kvq__pending {
    kvq_ticket ticket; // 0: free
    bool done;
    int status;
    uint32_t n;
    struct kvq_entry *entries;
    struct kvq_request request;       // as sent
    const struct kvq_step_work *step; // STEP: the caller's; else NULL
    uint32_t *extents;                // STEP: for each entry, its result's; may be NULL
    bool any_failed;
    uint32_t shard; // of the first entry that failed; as in struct kvq_result
};

// How a queue orders its requests and streams.
struct kvq__timeline {
    int order; // KVQ_ORDER_..
    struct kvq__gpu_context here;
    // With words.
    struct kvq_timeline_page *page;
    kvq_gpu_ptr ready, done;      // its words, for streams
    struct kvq_gpu_stream *spare; // never waits: lets the others go when the daemon is gone
    bool let_go;                  // it has been asked to
    // With events.
    uint32_t n_events;
    struct kvq_gpu_event *ready_events[KVQ_QUEUE_EVENTS], *done_events[KVQ_QUEUE_EVENTS];
    uint64_t last; // number of the latest request
    uint32_t sent; // a word, with words: `seq` of the latest request, for other threads
};

struct kvq_queue {
    TAILQ_ENTRY(kvq_queue) entry;
    kvq_client *client;
    struct kvq__timeline timeline;
    uint32_t id;
    int dead; // 0 or the code that every call returns until kvq_reattach
    struct kvq_req_page *req;
    const struct kvq_cq_page *cq;
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    int wake_daemon, wake_client; // an eventfd to write; a socket to wait for
    uint32_t seq, steps;
    uint32_t answered; // a word: `seq` of the latest completion that was taken, for other threads
    uint32_t before;   // under the table lock: `seq` of the last request before another timeline
    uint64_t tickets;
    uint64_t gap_ns;  // how long waits took lately
    uint32_t shard;   // of the latest request that kvq_wait collected, as in struct kvq__pending
    uint64_t room_ns; // how long requests wait for room; 0: they are refused at once
    struct kvq__pending pending[KVQ__PENDING];
};

TAILQ_HEAD(kvq__queues, kvq_queue);
TAILQ_HEAD(kvq__buffers, kvq_buffer);
LIST_HEAD(kvq__pools, kvq__pool);
LIST_HEAD(kvq__locals, kvq_local);

// A thread that ends the waits of streams when the daemon is gone; see watch.c.
struct kvq__watch {
    bool running;
    pthread_t thread;
    int wake;      // eventfd
    uint32_t stop; // the thread is to end
    uint32_t lost; // end the waits, whether the daemon is gone or not
};

struct kvq__daemon_gpu {
    uint8_t uuid[KVQ__UUID_BYTES];
    char name[64];
    uint32_t orders; // as the daemon's HelloReply has it
};

// Who may use the attach socket. Threads get it in the order in which they asked.
TAILQ_HEAD(kvq__turn_waits, kvq__turn_wait);
struct kvq__turn {
    pthread_mutex_t mutex; // held for moments only
    pthread_cond_t passed;
    bool taken;
    struct kvq__turn_waits waits;
};

struct kvq_client {
    struct kvq__turn turn;
    pthread_mutex_t own, table;
    int socket; // -1 when there is no connection
    uint32_t timeout_ms, spin_us;
    uint32_t next_id;
    uint32_t given_up; // 0 or a request that the daemon has yet to be told to undo
    uint64_t sent_ns;  // when the last packet went into the socket
    uint32_t told;     // requests of kvq__tell whose replies were not taken off the socket yet
    const struct kvq_daemon_page *page; // NULL when there is no connection
    struct kvq_daemon_info info;
    uint64_t epoch; // of the daemon that was connected to last, all of the way
    struct kvq__daemon_gpu gpus[KVQ_MAX_GPUS];
    uint32_t n_gpus;
    struct kvq__watch watch;
    struct kvq__queues queues;
    struct kvq__buffers buffers;
    uint32_t timelines; // a word: queues whose streams and the daemon's wait for each other
    uint32_t open_handles;
    struct kvq__handle handles[KVQ__HANDLES];
    // In-context mode (in_context/).
    uint64_t connection; // how often it was attached
    bool leaving;        // kvq_disconnect: the daemon closes with the connection what belongs to it
    struct kvq__pools pools;        // of this connection, under the table lock
    struct kvq__locals locals;      // under the table lock
    uint32_t changes[KVQ__HANDLES]; // words: changes of each handle's session that we asked for
    uint32_t all_changes;           // a word: likewise, of sessions that were not named
    char runtime_dir[KVQ__PATH_BYTES];
    char name[KVQ_NAME_BYTES];
    void *arena_memory;
    struct kvq_arena arena; // the last reply lives here, as long as its call has the turn
    uint8_t packet[KVQ_MAX_MESSAGE];
};

// ---- error.c: codes and texts ----

// Sets the thread's error text and returns code.
int kvq__set_error(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
// The same with strerror(errno) behind the text; code KVQ_E_SYSTEM.
int kvq__set_error_errno(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- sized.c: structures that begin with their size ----

// Copies a caller's structure to ours, of `known` bytes; fields that an earlier caller lacks become
// zero. KVQ_E_INVALID if the size was not set, KVQ_E_UNSUPPORTED if the caller sets a field that
// this library does not know; then *to is unchanged.
int kvq__sized_take(void *to, size_t known, const void *from, const char *name);
// Checks the size of a caller's structure that the library will fill: KVQ_OK or KVQ_E_INVALID.
int kvq__sized_check(const void *to, const char *name);
// Fills the fields that both sides know, and the rest with zeros. The size stays.
void kvq__sized_give(void *to, const void *from, size_t known);
#define KVQ__SIZED_TAKE(to, from, name) kvq__sized_take(to, sizeof *(to), from, name)

// ---- socket.c: packets with file descriptors, and memory that came so ----

int kvq__socket_connect(const char *runtime_dir, uint32_t timeout_ms, int *fd);
// send_fd -1: none.
int kvq__socket_send(int fd, const void *bytes, size_t n, int send_fd, uint64_t deadline_ns);
// Fills fds (room for KVQ_MAX_PACKET_FDS) with the descriptors beside the packet; the caller owns
// them. On an error there are none. *lost: there were more of them than this process may have.
int kvq__socket_receive(int fd, void *bytes, size_t size, size_t *n, int *fds, uint32_t *n_fds,
                        bool *lost, uint64_t deadline_ns);
void kvq__close_fds(int *fds, uint32_t n);
// Shuts our end and waits until the peer has closed its end, at most timeout_ms.
void kvq__socket_finish(int fd, uint32_t timeout_ms);

// Whether a memfd of the daemon is at least `bytes` long and sealed against shrinking, else
// KVQ_E_PROTOCOL. what: for texts.
int kvq__check_memfd(int memfd, size_t bytes, const char *what);
// Maps such a memfd. prot as for mmap.
int kvq__map(int memfd, size_t bytes, int prot, const char *what, void **mapping);

// ---- control.c: calls on the attach socket ----

struct kvq__call {
    Kvq__Request request;        // in: command and its message; id and protocol are filled in
    int send_fd;                 // in: descriptor to travel beside it; -1: none
    uint32_t want_fds;           // in: how many must come back on success; or KVQ__ANY_FDS
    Kvq__Reply__ResultCase want; // in: what the reply must hold
    const char *what;            // in: for error texts, "opening a queue"
    uint32_t patience_ms;        // in: wait so long for it; 0: the client's timeout_ms
    // in: takes over what the reply holds, in the call's turn; NULL: nothing is needed of it. It
    // keeps descriptors by setting them to -1; the others are closed. If it fails, the daemon is
    // asked to undo the call.
    int (*take)(void *to, struct kvq__call *call);
    void *to;
    Kvq__Reply *reply;           // for `take`
    int fds[KVQ_MAX_PACKET_FDS]; // for `take`: want_fds of them
    uint32_t n_fds;              // that is
};

// Sends a request, waits for its reply, and has call->take look at it. KVQ_OK, the daemon's refusal
// with its text, KVQ_E_DISCONNECTED, KVQ_E_DEADLINE or KVQ_E_PROTOCOL; KVQ_E_SYSTEM if this process
// may not have the descriptors beside the reply: what the request made is given back then; or what
// `take` returned. KVQ_E_DEADLINE also where the call's turn did not come in time: it was not sent
// then.
int kvq__ask(kvq_client *client, struct kvq__call *call);
// The same for callers that can neither fail nor try again: it waits for its turn without a limit,
// for whoever has the turn ends, and for the daemon as long as ever.
int kvq__ask_in_any_case(kvq_client *client, struct kvq__call *call);
// The same for a caller that has the turn.
int kvq__exchange(kvq_client *client, struct kvq__call *call, uint64_t deadline_ns);
// Sends a request whose reply nobody needs, in the caller's turn, and waits for nothing. Where
// earlier requests fill the connection it is not sent, nor where the replies of KVQ__MAX_TOLD are
// out: the daemon ends a connection that has no room for its replies.
void kvq__tell(kvq_client *client, struct kvq__call *call);
// Waits for the turn until the deadline (KVQ_E_DEADLINE; one that has passed waits for nothing), or
// KVQ__NO_DEADLINE. what: for the text.
int kvq__turn_take(kvq_client *client, const char *what, uint64_t deadline_ns);
void kvq__turn_pass(kvq_client *client);
// When a control call that begins now has to end.
uint64_t kvq__deadline(const kvq_client *client);
void kvq__turn_open(struct kvq__turn *turn);
void kvq__turn_close(struct kvq__turn *turn);

// ---- gpu.c: the driver, and GPUs by name ----

// The driver's table; the first call loads and initializes the driver.
int kvq__driver_load(const struct kvq_gpu_driver **driver);
// A KVQ_E code for a result of the driver.
int kvq__gpu_code(int result);
// The same with a text that says what failed, "making a stream".
int kvq__driver_fault(const struct kvq__gpu_context *here, int result, const char *what);
// The calling thread's current context, whose GPU must be one of the daemon's. what: for texts.
int kvq__gpu_here(kvq_client *client, const char *what, struct kvq__gpu_context *here);
// Makes a context current in the calling thread; returns the one that was current.
struct kvq_gpu_context *kvq__context_enter(const struct kvq__gpu_context *here);
void kvq__context_leave(const struct kvq__gpu_context *here, struct kvq_gpu_context *before);
// "GPU-01234567-..", or "MIG-.." of a part of a GPU; place has KVQ__PLACE_BYTES.
void kvq__gpu_place(const kvq_client *client, const uint8_t *uuid, char *place);
// Takes over the daemon's list of GPUs. KVQ_E_PROTOCOL.
int kvq__gpus_learn(kvq_client *client, const Kvq__HelloReply *hello);

// ---- watch.c: the thread that ends the waits of streams when the daemon is gone ----

// Starts the thread, unless it runs already.
int kvq__watch_start(kvq_client *client);
// Ends all waits of streams from now on, until kvq__watch_stop.
void kvq__watch_give_up(kvq_client *client);
void kvq__watch_stop(kvq_client *client);

// ---- table.c: session handles ----

struct kvq__shape *kvq__shape_make(const struct kvq_layer *rows, uint32_t n_rows);
void kvq__shape_unref(struct kvq__shape *shape);
// Takes over a reference to shape. KVQ_E_PROTOCOL if the daemon's handle is out of range.
// `shown`: what texts call the session; copied.
int kvq__handle_add(kvq_client *client, uint64_t handle, bool read_only, struct kvq__shape *shape,
                    const char *shown);
void kvq__handle_remove(kvq_client *client, uint64_t handle);
// Adds the handle of a fork, which shares the shape of its source.
int kvq__handle_fork(kvq_client *client, uint64_t source, uint64_t handle);
// Removes all handles; returns how many there were.
uint32_t kvq__handle_clear(kvq_client *client);
// The record at the handle's index if it is open, else NULL. Under the table lock.
const struct kvq__handle *kvq__handle_find(const kvq_client *client, uint64_t handle);
// "session "chat"", as kvqctl shows it, or its handle where nothing else is known. Under the table
// lock. Returns `text`, of KVQ__SHOWN_BYTES.
const char *kvq__handle_shown(const kvq_client *client, uint64_t handle, char *text);

// The index of a handle, which is its lower half; closed handles had the same index before.
static inline uint32_t kvq__handle_index(uint64_t handle)
{
    return (uint32_t)handle % KVQ__HANDLES;
}

// Notes, for in-context mode, that a session was changed or its handle closed. Any thread.
static inline void kvq__note_change(kvq_client *client, uint64_t handle)
{
    kvq_word_add(&client->changes[kvq__handle_index(handle)], 1);
}

// ---- gpu_buffer.c: the GPU's side of buffers ----

// Maps an arena, whose memory is behind buffer->memfd. `here` is current.
int kvq__gpu_buffer_map(kvq_buffer *buffer);
// Describes the memory for the daemon. The descriptor of an arena stays the buffer's; any other
// becomes the caller's. The buffer's context is current.
int kvq__gpu_buffer_export(const kvq_buffer *buffer, struct kvq_gpu_export *e);
// Waits for the work of the buffer's context, and unmaps or unpins the memory.
void kvq__gpu_buffer_release(kvq_buffer *buffer);
// Pins a buffer on the host, once, so that kernels of this process read and write it in place.
// `here` is current. Takes the lock `own`; not for hot paths.
int kvq__gpu_buffer_reach(const kvq_buffer *buffer, const struct kvq__gpu_context *here);
// Whether the buffer is pinned.
bool kvq__gpu_buffer_reached(const kvq_buffer *buffer);
// A buffer's first byte for kernels of this process in that context; 0: they cannot use it.
kvq_gpu_ptr kvq__gpu_buffer_at(const kvq_buffer *buffer, const struct kvq__gpu_context *here);
// Copies n bytes out of a buffer on a GPU, after all work of its context: the default stream does
// not wait for streams like PyTorch's.
int kvq__gpu_buffer_read(const kvq_buffer *buffer, uint64_t offset, void *to, size_t n);

// ---- buffer.c: buffers, and telling the daemon ----

// Tells the daemon of the buffer's memory, and learns its id.
int kvq__buffer_register(kvq_buffer *buffer);
void kvq__buffer_free(kvq_buffer *buffer);
// Keeps the struct, not the memory, until kvq__buffer_let_go: what a graph was captured with may be
// closed before the next replay, and `closed` says so. NULL is fine.
void kvq__buffer_keep(const kvq_buffer *buffer);
void kvq__buffer_let_go(const kvq_buffer *buffer);

// ---- wait.c: completions ----

// Takes all completions off the ring. 0, or the code that the queue died with.
int kvq__queue_take(kvq_queue *queue);
// Waits until `pending` is done, the deadline (KVQ_E_DEADLINE; 0 has passed already, UINT64_MAX
// never comes), or the end of the connection.
int kvq__queue_wait(kvq_queue *queue, struct kvq__pending *pending, uint64_t deadline_ns);
// Waits until the daemon takes one more request.
int kvq__queue_await_credit(kvq_queue *queue);
// Whether the daemon has answered that request and those before it. For threads that the queue does
// not belong to, while it cannot be detached.
bool kvq__queue_answered(const kvq_queue *queue, uint32_t seq);
// From now on every call on the queue returns `code`; open tickets too. Returns `code`.
int kvq__queue_kill(kvq_queue *queue, int code);

// ---- request.c: from the caller's structures to the bytes of the ring ----

const char *kvq__op_name(unsigned op);
// Whether an operation cannot be without a kvq_work.
bool kvq__op_takes_work(unsigned op);
// Checks a tensor and fills its view. Without a buffer: leaves the view, and fails if `need`.
int kvq__put_view(const kvq_queue *queue, unsigned op, const char *name, bool need,
                  const struct kvq_tensor *tensor, struct kvq_wire_view *view);
// The tensors, layer, step and flags of a request whose operation is set.
int kvq__put_work(const kvq_queue *queue, const struct kvq_work *work, struct kvq_request *request);
// The views of one layer of a step, whose tensors were checked.
struct kvq_step_layer kvq__step_layer(const kvq_queue *queue, const struct kvq_step_work *work,
                                      uint32_t layer);
// Writes the request, its entries and a step's layers to the ring, which has room for them.
void kvq__request_write(kvq_queue *queue, const struct kvq__pending *pending);

// ---- explain.c: texts for what failed on a ring ----

// Sets the error text for a request that is done: for its own failure, else for its first failed
// entry. Leaves the text as it is if neither failed.
void kvq__explain(kvq_queue *queue, const struct kvq__pending *pending);

// ---- submit.c: tickets ----

// Makes a request of the caller's structures in a free slot. Sends nothing.
int kvq__submit_make(kvq_queue *queue, unsigned op, struct kvq_work *work,
                     struct kvq_entry *entries, uint32_t n, struct kvq__pending **pending);
// Sends the request and opens its ticket; closes the ticket if that fails.
int kvq__submit_send(kvq_queue *queue, struct kvq__pending *pending);

// ---- step.c: whole steps in one request ----

// As kvq__submit_make, for a step; `work` must stay until it is done. extents: n of them, for each
// entry what kvq_result has; may be NULL.
int kvq__step_make(kvq_queue *queue, const struct kvq_step_work *work, struct kvq_entry *entries,
                   uint32_t n, uint32_t *extents, struct kvq__pending **pending);
int kvq__step_run(kvq_queue *queue, const struct kvq_step_work *work, struct kvq_entry *entries,
                  uint32_t n, uint32_t *extents);

// ---- work.c: the calls that wait ----

// kvq_step_end with the ids of the tokens.
int kvq__step_end_ids(kvq_queue *queue, uint64_t step, const struct kvq_ids *ids,
                      struct kvq_entry *entries, uint32_t n);

// ---- events.c: streams that wait for each other by events ----

// Opens the queue's events. KVQ_E_UNSUPPORTED if processes cannot share events. After a failure the
// caller closes the events that were opened so far.
int kvq__events_open(kvq_queue *queue, struct kvq__timeline *timeline);
void kvq__events_close(struct kvq__timeline *timeline);
// Sends a request, and makes the stream wait for its work.
int kvq__events_send(kvq_queue *queue, struct kvq__pending *pending, struct kvq_gpu_stream *stream);

// ---- timeline.c: calls in the order of a stream ----

// Waits until the GPU has finished this process's work, and closes the timeline, if there is one.
void kvq__timeline_close(kvq_queue *queue);
// As kvq__step_run, in the order of a stream: returns when the daemon has enqueued the work.
int kvq__timeline_step(kvq_queue *queue, const struct kvq_step_work *work,
                       struct kvq_entry *entries, uint32_t n, uint32_t *extents,
                       struct kvq_gpu_stream *stream);
// Opens the timeline again for the GPU that it was open for; for kvq_reattach.
int kvq__timeline_again(kvq_queue *queue);

// ---- queue.c: queues, and what kvq_reattach makes anew ----

int kvq__queue_attach(kvq_queue *queue);
// Unmaps the rings; every open ticket ends with `code`.
void kvq__queue_detach(kvq_queue *queue, int code);
void kvq__queue_free(kvq_queue *queue);

// ---- spans.c: spans of tokens in messages ----

// Spans of a message. They point to the caller's digests.
struct kvq__spans {
    Kvq__Span *spans, **pointers;
};
int kvq__spans_put(struct kvq__spans *s, const struct kvq_span *spans, uint32_t n);
void kvq__spans_free(struct kvq__spans *s);

// ---- session.c ----

// kvq_session_info, with the call's patience_ms.
int kvq__session_ask(kvq_client *client, kvq_session session, struct kvq_session_info *info,
                     uint32_t patience_ms);

// ---- in_context/pool.c ----

// The connection is gone: drops the client's references to pools; each kvq_local keeps its
// own.
void kvq__pools_leave(kvq_client *client);

#endif
