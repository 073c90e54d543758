// SPDX-License-Identifier: Apache-2.0
//
// Connections of the attach socket. attach.c has their life, commands.c the way of a command and
// the table of its parts; hello.c, queues.c, buffers.c, sessions.c and in_context.c have these
// parts; memory.c makes queues and buffers, gpu.c memory of GPUs, return.c gives it all back, and
// let_go.c what the driver takes back only when no client keeps a stream waiting.
//
// A connection runs one command at a time:
//
//   1. The loop's thread receives and checks it, and makes system objects.
//   2. A thread of libuv's does what may take long: reads codebooks, shares memory with a GPU.
//   3. The connection's mail takes it to the poller's thread, where the core does its part.
//   4. The mail brings it back to the loop's thread, which sends the reply.
//
// During 2 and 3 the loop's thread touches nothing that is marked "with the command".
//
// What takes long to give back, large buffers too, is given back on a thread of libuv's as well.
// The connection ends when everything is given back except what let_go.c has: nobody waits for host
// memory that GPUs reach, and for imports by handle only a while.
#ifndef KVQ_DAEMON_ATTACH_INTERNAL_H
#define KVQ_DAEMON_ATTACH_INTERNAL_H

#include <sys/queue.h>

#include "daemon/core/gpu/gpu.h"
#include "daemon/log/log.h"
#include "daemon/runtime/listen.h"
#include "daemon/runtime/packet.h"
#include "daemon/runtime/server.h"
#include "daemon/store/codebooks.h"
#include "daemon/store/store.h"
#include "kernels/cuda/share.h"

struct kvq__connection;

// Something that a thread of libuv's gives back; one at a time. Zero-initialize.
struct kvq__return {
    STAILQ_ENTRY(kvq__return) link;
    struct kvq__connection *connection;
    bool awaited;                           // the command under way waits for it
    void (*run)(struct kvq__return *what);  // on that thread
    void (*done)(struct kvq__return *what); // on the loop's
};

// What GPUs have yet to let go of: registered host memory, or an import by handle. The driver waits
// for all work on them then, which may wait for a client that never signals (gpu/gate.h). Made with
// the memory, so that letting go cannot fail. Loop's thread, except memory, import and link of
// those that are under way.
struct kvq__letting_go {
    STAILQ_ENTRY(kvq__letting_go) link;
    struct kvq__connection *connection; // its owner; NULL: that is gone
    struct kvq__connection *awaiting;   // whose command or end waits for it; NULL: nobody's
    uint32_t uid;
    uint64_t client;
    bool timeline, done; // done: GPUs have let go of it
    struct kvq__shm shm;
    struct kvq__import *import;
    uint64_t counted; // bytes of it that count against the limits of its client and of all clients
    // Before: of a timeline that a queue has.
    uint64_t *ready; // NULL: it is none
    LIST_ENTRY(kvq__letting_go) timeline_link;
};
STAILQ_HEAD(kvq__letting_gos, kvq__letting_go);

// Host memory that is registered with GPUs.
struct kvq__pinned {
    struct kvq__shm shm;
    kvq_gpu_ptr at;                     // 0: they cannot reach it
    struct kvq__letting_go *letting_go; // for unregistering it; NULL: it is not registered
};

// Events that order a queue's requests, and the handles by which other processes open them.
struct kvq__line_events {
    struct kvq__gpu *gpu;
    struct kvq__events all;
    struct kvq_gpu_ipc_event ready[KVQ_QUEUE_EVENTS], done[KVQ_QUEUE_EVENTS];
};

// A queue's memory and descriptors.
struct kvq__line {
    struct kvq__port port;
    struct kvq__mail mail;
    struct kvq__connection *connection;
    LIST_ENTRY(kvq__line) link; // poller's
    uint32_t id;
    struct kvq__shm request, reply;
    struct kvq__pinned timeline;     // its map is NULL if there is none
    struct kvq__line_events *events; // or NULL
    int request_event;               // both sides: the client writes it
    int wake_ours, wake_theirs;
    struct kvq__return back; // of the timeline and the events
};

// A client's allocation in a GPU's memory. It is opened once for all buffers that lie in it. Loop's
// thread, except the piece while it is being opened or closed.
struct kvq__import {
    LIST_ENTRY(kvq__import) link; // of its connection
    struct kvq__gpu *gpu;
    bool by_handle, closing;
    struct kvq_gpu_ipc_memory handle;
    struct kvq__letting_go *letting_go; // for closing it, if it is by handle
    uint64_t number, bytes; // what the client says; bytes: only if it is not opened by handle
    uint32_t users;
    struct kvq_gpu_piece piece;
};

// GPU memory of a closed buffer. The client may still have a descriptor or a mapping of it, so it
// counts until the client is gone, and only that client gets it again.
struct kvq__spare {
    LIST_ENTRY(kvq__spare) link; // of its connection
    struct kvq__gpu *gpu;
    struct kvq_gpu_piece piece;
};

// A buffer's memory: host memory, GPU memory that was made here, or a client's allocation.
struct kvq__region {
    struct kvq__mail mail;
    struct kvq__connection *connection;
    LIST_ENTRY(kvq__region) link; // poller's
    uint32_t id;
    uint64_t bytes, counted;    // counted: against the client's limit
    struct kvq__pinned host;    // the host's
    struct kvq__gpu *gpu;       // whose memory it is; NULL: the host's
    kvq_gpu_ptr at;             // for kernels; 0: no GPU can reach it
    struct kvq_gpu_piece piece; // made here
    bool shared;                // a descriptor of the piece was made
    int fd;                     // of a piece made here, or by which a client's is opened
    struct kvq__import *import; // a client's
    uint64_t offset;            // in it
    bool large;                 // it is being given back, and its memory on the host counts on
    struct kvq__return back;
};

enum kvq__connection_state {
    KVQ__CONNECTION_HELLO, // has not said hello yet
    KVQ__CONNECTION_READY,
    KVQ__CONNECTION_BUSY,   // its command is at the poller, or does what takes long before
    KVQ__CONNECTION_ENDING, // its client is being taken down at the poller
};

struct kvq__connection {
    struct kvq__attach *attach;
    struct kvq__server *server;
    TAILQ_ENTRY(kvq__connection) link;       // loop's list of all
    LIST_ENTRY(kvq__connection) client_link; // poller's list of those with a client
    enum kvq__connection_state state;
    int fd, pidfd;
    uv_poll_t poll, pid_poll;
    uv_timer_t timer;
    int handles;                                        // open in the loop
    struct kvq_log_budget asked_budget, refused_budget; // at level debug
    bool end_when_back;                                 // ended while a command was at the poller
    bool is_late;                                       // with its hello
    bool end_is_late;                                   // it waits for no imports any more
    uint32_t end_seen;                                  // 1: the poller knows that it has ended
    struct kvq__peer peer;
    uint64_t id; // the client's; 0: none yet
    char name[KVQ_NAME_BYTES];
    uint32_t protocol;
    uint64_t buffer_bytes;
    uint32_t unread_fds; // in replies: so many at most
    uint32_t n_lines;    // with those that are not given back yet
    LIST_HEAD(, kvq__import) imports;
    LIST_HEAD(, kvq__spare) spares;
    LIST_HEAD(, kvq__letting_go) timelines;
    uint32_t giving_back; // things of this client that are being given back
    uint32_t awaited;     // those of them that the command waits for
    bool finish_due;      // the command is done when `awaited` is 0
    bool gone_due;        // the connection is gone when `giving_back` is 0
    struct kvq__return back;
    struct { // what the last command made, and how a cancel gives it back; back NULL: nothing
        uint32_t request;
        Kvq__Request__CommandCase closed_by;
        uint64_t what;
    } made;

    // With the command.
    struct kvq__mail mail;
    uv_work_t work; // for the part that takes long
    struct kvq__task task;
    int error; // of that part, with its text
    char text[KVQ_TEXT_BYTES];
    bool unsent; // its first reply, for the reason in `text`: what it made is being given back
    Kvq__Request *request;
    Kvq__Reply reply;
    struct kvq_arena arena;
    int fds[KVQ_MAX_PACKET_FDS]; // to send beside the reply; not closed then
    uint32_t n_fds;
    struct kvq__line *line;          // being opened or closed
    struct kvq__region *region;      // being added or removed
    struct kvq__region *table;       // being opened
    void *book;                      // a hold on the codebook that the reply tells of; NULL: none
    struct kvq__book_holds books;    // those that a session which is being opened names
    struct kvq__gpu *gpu;            // of the timeline
    struct kvq__pinned timeline;     // being opened
    struct kvq__line_events *events; // the same

    // The poller's.
    struct kvq__member member;
    struct kvq__client *client;
    uint64_t client_id;
    LIST_HEAD(, kvq__line) lines;
    LIST_HEAD(, kvq__region) regions, tables;
    uint32_t next_line;
    bool detaching, holding;
    struct kvq__mail broken_mail, ended_mail;
    char broken_text[128];

    uint8_t arena_memory[KVQ_WIRE_ARENA]; // last: most of it is never touched
};

TAILQ_HEAD(kvq__connections, kvq__connection);

struct kvq__attach {
    struct kvq__server *server;
    struct kvq__door door;
    struct kvq_log_budget log_budget, stranger_budget; // stranger: ends of those that said no hello
    STAILQ_HEAD(, kvq__return) returns;                // the first is being given back
    uv_work_t return_work;
    bool returning;
    struct kvq__letting_gos letting_go, let_go; // let_go: those that are under way
    uv_work_t letting_go_work;
    uint32_t n_letting_go; // of both
    struct kvq__connections connections;
    uint32_t count, n_lines;
    uint64_t buffer_bytes;                 // of all clients
    struct kvq__shm bundles[KVQ_MAX_GPUS]; // kernels of each GPU; fd -1: none that are handed over
    LIST_HEAD(, kvq__connection) clients;  // poller's
    struct kvq__packet packet;             // the one being looked at
    uint8_t out[KVQ_MAX_MESSAGE];
};

// ---- attach.c ----

// Sends connection->reply with its descriptors; ends the connection if it cannot be sent. 0, or
// KVQ_E_LIMIT with a text: it was not sent, since no descriptors can be, but one without any can.
int kvq__connection_reply(struct kvq__connection *connection, char *text);
// The client is gone or has to go.
void kvq__connection_end(struct kvq__connection *connection, const char *reason);
// Its command has come back and was answered: look at the socket again, or end it.
void kvq__connection_back(struct kvq__connection *connection);
// Nothing of it is left at the poller.
void kvq__connection_gone(struct kvq__connection *connection);

// Poller's thread. Posts the connection's end to the loop once nothing of the client is left there.
void kvq__connection_check_gone(struct kvq__connection *connection);
// Posts the taking-down of the client; kvq__connection_gone follows on the loop's thread.
void kvq__connection_detach(struct kvq__connection *connection);

// ---- commands.c ----

// Takes one packet's request. Its descriptors are used up or closed.
void kvq__connection_request(struct kvq__connection *connection, struct kvq__packet *packet);
// Poller's thread: the core's part of the command is done.
void kvq__connection_to_loop(struct kvq__connection *connection);
// Loop's thread: something of the connection was given back.
void kvq__connection_gave_back(struct kvq__connection *connection, bool awaited);
// Says that a reply does not fit its arena; returns KVQ_E_NO_MEMORY.
int kvq__attach_no_room(char *text);

// ---- The parts of each command: what a part does and on which thread is said in commands.c ----

enum { KVQ__COMES_BACK = 1 }; // of a run: kvq__connection_to_loop follows

typedef int kvq__prepare(struct kvq__connection *c, char *text);
typedef bool kvq__is_slow(const struct kvq__connection *c);
typedef int kvq__run(struct kvq__connection *c, char *text);
typedef void kvq__part(struct kvq__connection *c);
typedef uint64_t kvq__made(const struct kvq__connection *c);

// hello.c
kvq__prepare kvq__hello_prepare;
kvq__run kvq__hello_run;
// The version of both ranges, or KVQ_E_VERSION with a text.
int kvq__attach_agree(uint32_t min, uint32_t max, uint32_t our_min, uint32_t our_max,
                      const char *what, uint32_t *agreed, char *text);

// queues.c; timelines are made in gpu.c, and what no queue took is given back in return.c
kvq__prepare kvq__open_queue_prepare, kvq__open_timeline_prepare, kvq__open_events_prepare;
kvq__part kvq__open_timeline_make, kvq__open_events_make;
kvq__run kvq__open_queue_run, kvq__close_queue_run, kvq__open_timeline_run, kvq__open_events_run;
kvq__part kvq__open_timeline_put, kvq__open_events_put;
kvq__part kvq__open_queue_sent, kvq__open_timeline_sent;
kvq__part kvq__open_queue_undo, kvq__stream_sync_undo;
kvq__made kvq__open_queue_made;
// Destroys the events; no stream may wait for them any more. NULL is fine.
void kvq__line_events_close(struct kvq__line_events **events);

// buffers.c
kvq__prepare kvq__create_buffer_prepare, kvq__import_buffer_prepare;
kvq__is_slow kvq__buffer_is_slow;
kvq__part kvq__buffer_make;
kvq__run kvq__buffer_run, kvq__close_buffer_run;
kvq__part kvq__create_buffer_put, kvq__import_buffer_put, kvq__create_buffer_sent, kvq__buffer_undo;
kvq__made kvq__buffer_made;

// sessions.c
kvq__is_slow kvq__session_needs_codebooks;
kvq__part kvq__session_read_codebooks;
kvq__made kvq__open_session_made;

// in_context.c
kvq__prepare kvq__open_pool_prepare, kvq__open_table_prepare, kvq__map_extents_prepare,
    kvq__map_book_prepare;
kvq__is_slow kvq__open_table_is_slow;
kvq__part kvq__open_table_make;
kvq__run kvq__open_table_look, kvq__open_pool_run, kvq__open_table_run, kvq__close_table_run,
    kvq__map_extents_run, kvq__map_extents_unsay, kvq__map_book_run;
kvq__part kvq__open_pool_put, kvq__open_table_put;
kvq__part kvq__open_table_sent, kvq__map_book_sent, kvq__open_table_undo;
kvq__made kvq__open_table_made, kvq__map_extents_made;
// The bundles of kernels, one for each GPU, that clients map.
void kvq__bundles_open(struct kvq__attach *attach);
void kvq__bundles_close(struct kvq__attach *attach);

// ---- memory.c ----

// Loop's thread. What a user's connections hold together.
struct kvq__held {
    uint32_t connections, queues;
};
struct kvq__held kvq__attach_held(const struct kvq__attach *attach, uint32_t uid);
// Whether the user may have so many descriptors more. KVQ_E_LIMIT with a text.
int kvq__attach_check_files(const struct kvq__attach *attach, const struct kvq__peer *peer,
                            uint32_t more, char *text);
// Loop's thread. A line or region with its system objects, or NULL with a code and a text.
struct kvq__line *kvq__line_new(struct kvq__connection *connection, int *error, char *text);
void kvq__line_free(struct kvq__line *line);
struct kvq__region *kvq__region_new(struct kvq__connection *connection, uint64_t bytes, int *error,
                                    char *text);
struct kvq__region *kvq__region_import(struct kvq__connection *connection, int fd, uint64_t offset,
                                       uint64_t bytes, int *error, char *text);
// Memory of a page table, which clients map for reading only.
struct kvq__region *kvq__region_new_table(struct kvq__connection *connection, uint64_t bytes,
                                          int *error, char *text);
// A region of so many bytes, of which `counted` count against the limits, without any memory yet.
struct kvq__region *kvq__region_alloc(struct kvq__connection *connection, uint64_t bytes,
                                      uint64_t counted, int *error, char *text);
// Adds memory on the host, as a copy, to a region of GPU memory that was counted. If this fails the
// region is as before.
int kvq__region_add_copy(struct kvq__region *region, uint64_t bytes, char *text);
// Adds to the counted bytes of a client and of all clients, and subtracts.
void kvq__connection_count(struct kvq__connection *connection, uint64_t more, uint64_t less);
// The same with a region's counted bytes.
void kvq__region_count(struct kvq__region *region);
void kvq__region_uncount(struct kvq__region *region);
// Closes the region's descriptors: the reply has carried them, or nobody needs them.
void kvq__region_close_fd(struct kvq__region *region);

// ---- gpu.c ----

// Loop's thread. The GPU of that UUID. KVQ_E_UNSUPPORTED or KVQ_E_INVALID with a text.
int kvq__attach_gpu(const struct kvq__connection *connection, const ProtobufCBinaryData *uuid,
                    struct kvq__gpu **gpu, char *text);
// As in memory.c, for memory of a GPU. The import takes the descriptor over if there is one
// and it succeeds (fd -1: by handle).
struct kvq__region *kvq__region_new_on(struct kvq__connection *connection, uint64_t bytes,
                                       const ProtobufCBinaryData *uuid, int *error, char *text);
struct kvq__region *kvq__region_import_on(struct kvq__connection *connection, int fd,
                                          const Kvq__ImportBuffer *import, int *error, char *text);
// A thread of libuv's: the part that may take long. Sets connection->error and text.
void kvq__region_make(struct kvq__region *region);

// ---- return.c ----

// Loop's thread. Gives the region or line back, at once or on a thread of libuv's, and frees it. A
// region must have been counted.
void kvq__region_give_back(struct kvq__region *region);
void kvq__line_give_back(struct kvq__line *line);
// Loop's thread. Gives back what is left of a client that is gone.
void kvq__spares_give_back(struct kvq__connection *connection);

// ---- let_go.c ----

// Loop's thread, all of these. Takes the memory away from its connection.
void kvq__let_go_of_pinned(struct kvq__connection *connection, struct kvq__pinned *pinned,
                           uint64_t counted, bool timeline);
// Takes an import by handle away from its connection, whose command or end waits for its close.
void kvq__let_go_of_import(struct kvq__connection *connection, struct kvq__import *import);
// The client has ended, and waits for none of its imports any more.
void kvq__imports_leave(struct kvq__connection *connection);
// Whether more host memory of the user may be registered with GPUs, or more be imported by handle.
// Not while GPUs have yet to let go of much that the user has closed: KVQ_E_LIMIT with a text.
int kvq__attach_check_pins(const struct kvq__connection *connection, char *text);
// The connection is about to be freed.
void kvq__pins_leave(const struct kvq__connection *connection);
// A queue has this timeline. Until GPUs are to let go of it, kvq__timelines_end gives all signals
// of it, by stores alone.
void kvq__timeline_note(struct kvq__connection *connection, const struct kvq__pinned *pinned);
void kvq__timelines_end(struct kvq__connection *connection);

#endif
