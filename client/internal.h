// SPDX-License-Identifier: Apache-2.0
//
// What the files of libkvq share.
//
// Two locks, taken in this order and never held by the hot path:
//   control   a control call on the attach socket, from request to reply, and what it changes
//   table     handles, shapes and the lists of queues and buffers; held for moments only
// The hot path (submit, wait) touches only the queue, which belongs to one thread, and fields of
// client and buffers that change in kvq_reattach alone, when no other thread may be in a call.
#ifndef KVQ_CLIENT_INTERNAL_H
#define KVQ_CLIENT_INTERNAL_H

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <sys/queue.h>

#include "client/kvq.h"

#include "proto/limits.h"
#include "proto/ring.h"
#include "proto/shm.h"
#include "proto/status.h"
#include "proto/wire.h"

enum {
    KVQ__PATH_BYTES = 256,
    KVQ__TEXT_BYTES = 1024,
    KVQ__HANDLES = KVQ_MAX_OPEN + 1, // the daemon's indices start at 0 or 1
};

// ---- Objects ----

// The shapes of a session's layers, for explaining refusals. Shared by forks.
struct kvq__shape {
    uint32_t refs, layers;
    struct {
        uint16_t q_heads, kv_heads, k_dim, v_dim;
    } layer[];
};

// One session handle, at its index. handle 0: free.
struct kvq__handle {
    uint64_t handle;
    bool read_only;
    struct kvq__shape *shape; // NULL: opened as it was, shape not known here
};

struct kvq_buffer {
    TAILQ_ENTRY(kvq_buffer) entry;
    kvq_client *client;
    uint32_t id; // the daemon's; 0 while it is not registered
    int memfd;   // our own descriptor of it
    uint64_t offset;
    size_t bytes;
    void *data; // NULL for an imported one
};

// A request in flight, or done and not waited for.
struct kvq__pending {
    kvq_ticket ticket; // 0: free
    bool done;
    int status;
    uint32_t n;
    struct kvq_entry *entries;
    struct kvq_request request; // as sent
};

struct kvq_queue {
    TAILQ_ENTRY(kvq_queue) entry;
    kvq_client *client;
    uint32_t id;
    int dead; // 0 or the code that every call answers until kvq_reattach
    struct kvq_req_page *req;
    const struct kvq_cq_page *cq;
    struct kvq_ring_tx tx;
    struct kvq_ring_rx rx;
    int wake_daemon, wake_client; // an eventfd to write; a socket to wait for
    uint32_t seq, steps;
    uint64_t tickets;
    uint64_t gap_ns; // how long waits took lately
    struct kvq__pending pending[KVQ_QUEUE_CREDITS];
};

TAILQ_HEAD(kvq__queues, kvq_queue);
TAILQ_HEAD(kvq__buffers, kvq_buffer);

struct kvq_client {
    pthread_mutex_t control, table;
    int socket; // -1 when there is no connection
    uint32_t timeout_ms, spin_us;
    uint32_t next_id;
    const struct kvq_daemon_page *page; // NULL when there is no connection
    struct kvq_daemon_info info;
    struct kvq__queues queues;
    struct kvq__buffers buffers;
    uint32_t open_handles;
    struct kvq__handle handles[KVQ__HANDLES];
    char runtime_dir[KVQ__PATH_BYTES];
    char name[KVQ_NAME_BYTES];
    void *arena_memory;
    struct kvq_arena arena; // the last reply lives here, under the control lock
    uint8_t packet[KVQ_MAX_MESSAGE];
};

// ---- error.c ----

// Sets the thread's error text and returns code.
int kvq__fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
// The same with strerror(errno) behind the text; code KVQ_E_SYSTEM.
int kvq__fail_errno(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- socket.c: packets with file descriptors ----

// CLOCK_MONOTONIC.
uint64_t kvq__now_ns(void);

int kvq__socket_connect(const char *runtime_dir, uint32_t timeout_ms, int *fd);
// send_fd -1: none.
int kvq__packet_send(int fd, const void *bytes, size_t n, int send_fd, uint64_t deadline_ns);
// Fills fds (KVQ_MAX_PACKET_FDS of them) with what travelled beside the packet; the caller owns
// them. On an error there are none.
int kvq__packet_receive(int fd, void *bytes, size_t size, size_t *n, int *fds, uint32_t *n_fds,
                        uint64_t deadline_ns);
void kvq__close_fds(int *fds, uint32_t n);
// Waits until the peer has closed its end, at most timeout_ms.
void kvq__socket_finish(int fd, uint32_t timeout_ms);

// Maps a memfd of the daemon: at least `bytes` long and sealed against shrinking, else
// KVQ_E_PROTOCOL. prot as for mmap.
int kvq__map(int memfd, size_t bytes, int prot, const char *what, void **mapping);

// ---- control.c: calls on the attach socket, under the control lock ----

struct kvq__call {
    Kvq__Request request;        // in: command and its message; id and protocol are filled in
    int send_fd;                 // in: descriptor to travel beside it; -1: none
    uint32_t want_fds;           // in: how many must come back on success
    Kvq__Reply__ResultCase want; // in: what the reply must hold
    const char *what;            // in: for error texts, "opening a queue"
    Kvq__Reply *reply;           // out: in the client's arena, until the next call
    int fds[KVQ_MAX_PACKET_FDS]; // out: the caller's, want_fds of them
};

// KVQ_OK, the daemon's refusal with its text, KVQ_E_DISCONNECTED, KVQ_E_DEADLINE or KVQ_E_PROTOCOL.
int kvq__exchange(kvq_client *client, struct kvq__call *call);
// Has the daemon give back what the last exchange made there, for a caller that cannot use it.
// Waits for nothing. Under the control lock.
void kvq__give_back(kvq_client *client);

// ---- client.c, queue.c, buffer.c: what kvq_reattach makes anew ----

int kvq__queue_attach(kvq_queue *queue);
// Unmaps the rings; every open ticket ends with `code`.
void kvq__queue_detach(kvq_queue *queue, int code);
void kvq__queue_free(kvq_queue *queue);
int kvq__buffer_register(kvq_buffer *buffer);
void kvq__buffer_free(kvq_buffer *buffer);

// ---- table.c: session handles ----

struct kvq__shape *kvq__shape_make(const struct kvq_layer *rows, uint32_t n_rows);
void kvq__shape_unref(struct kvq__shape *shape);
// Takes over a reference to shape. KVQ_E_PROTOCOL if the daemon's handle makes no sense.
int kvq__handle_add(kvq_client *client, uint64_t handle, bool read_only, struct kvq__shape *shape);
void kvq__handle_remove(kvq_client *client, uint64_t handle);
// A handle that shares the shape of another: a fork.
int kvq__handle_fork(kvq_client *client, uint64_t source, uint64_t handle);
// Forgets all; returns how many there were.
uint32_t kvq__handle_clear(kvq_client *client);
// The record at the handle's index if it is open, else NULL. Under the table lock.
const struct kvq__handle *kvq__handle_find(const kvq_client *client, uint64_t handle);

// ---- wait.c ----

// Takes the completions that are there. 0, or the code that the queue died with.
int kvq__queue_take(kvq_queue *queue);
// Waits until `pending` is done, the deadline (KVQ_E_DEADLINE; 0 has passed already, UINT64_MAX
// never comes), or the end of the connection.
int kvq__queue_wait(kvq_queue *queue, struct kvq__pending *pending, uint64_t deadline_ns);
// From now on every call on the queue answers code; open tickets too.
int kvq__queue_kill(kvq_queue *queue, int code);

// ---- explain.c ----

const char *kvq__op_name(unsigned op);
// Sets the error text to what is known about a request that is done: about its own failure, else
// about its first failed entry. Leaves the text alone if neither failed.
void kvq__explain(kvq_queue *queue, const struct kvq__pending *pending);

#endif
