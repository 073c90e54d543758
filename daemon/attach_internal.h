// SPDX-License-Identifier: Apache-2.0
//
// Connections of the attach socket, shared by attach.c (their life), attach_commands.c (what they
// ask for) and attach_memory.c (queues and buffers).
//
// A connection runs one command at a time. On the loop's thread it is received, checked, and what
// needs the system is done (codebooks are read on a thread of libuv's); then its mail takes it to
// the poller, where the core does its part; then the mail brings it back, and the reply is sent.
// While it is at the poller the loop's thread touches nothing that is marked "with the command".
#ifndef KVQ_DAEMON_ATTACH_INTERNAL_H
#define KVQ_DAEMON_ATTACH_INTERNAL_H

#include <sys/queue.h>

#include "daemon/log.h"
#include "daemon/packet.h"
#include "daemon/server.h"

struct kvq__connection;

// A queue's memory and descriptors.
struct kvq__line {
    struct kvq__port port;
    struct kvq__connection *connection;
    LIST_ENTRY(kvq__line) link; // poller's
    uint32_t id;
    struct kvq__shm request, reply;
    int request_event; // both sides: the client writes it
    int wake_ours, wake_theirs;
};

// A buffer's mapping.
struct kvq__region {
    struct kvq__mail mail;
    struct kvq__connection *connection;
    LIST_ENTRY(kvq__region) link; // poller's
    uint32_t id;
    struct kvq__shm shm;
};

enum kvq__connection_state {
    KVQ__CONNECTION_HELLO, // has not said hello yet
    KVQ__CONNECTION_READY,
    KVQ__CONNECTION_BUSY,   // its command is at the poller, or reads codebooks before
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
    int handles;        // open in the loop
    bool end_when_back; // ended while a command was at the poller
    struct kvq__peer peer;
    uint64_t id; // the client's; 0: none yet
    char name[KVQ_NAME_BYTES];
    uint32_t protocol;
    uint64_t buffer_bytes;
    struct kvq_log_budget log_budget;
    struct { // what the last command made, and the command that gives it back; or 0
        uint32_t request;
        Kvq__Request__CommandCase back;
        uint64_t what;
    } made;

    // With the command.
    struct kvq__mail mail;
    uv_work_t reading; // of codebooks
    Kvq__Request *request;
    Kvq__Reply reply;
    struct kvq_arena arena;
    int fds[KVQ_MAX_PACKET_FDS]; // to send beside the reply; not closed then
    uint32_t n_fds;
    struct kvq__line *line;     // being opened or closed
    struct kvq__region *region; // being added or removed

    // The poller's.
    struct kvq__member member;
    struct kvq__client *client;
    uint64_t client_id;
    LIST_HEAD(, kvq__line) lines;
    LIST_HEAD(, kvq__region) regions;
    uint32_t next_line;
    bool detaching, holding;
    struct kvq__mail broken_mail;
    char broken_text[128];

    uint8_t arena_memory[KVQ_WIRE_ARENA]; // last: most of it is never touched
};

TAILQ_HEAD(kvq__connections, kvq__connection);

struct kvq__attach {
    struct kvq__server *server;
    int fd;
    uv_poll_t poll;
    uv_timer_t pause; // while there are no descriptors to accept with
    bool listening;
    struct kvq__connections connections;
    uint32_t count;
    uint64_t buffer_bytes;                // of all clients
    LIST_HEAD(, kvq__connection) clients; // poller's
    struct kvq__packet packet;            // the one being looked at
    uint8_t out[KVQ_MAX_MESSAGE];
};

// ---- attach.c ----

// Sends connection->reply with its descriptors; ends the connection if it cannot be sent.
void kvq__connection_reply(struct kvq__connection *connection);
// The client is gone or has to go.
void kvq__connection_end(struct kvq__connection *connection, const char *reason);
// Its command has come back and was answered: look at the socket again, or end it.
void kvq__connection_back(struct kvq__connection *connection);
// Nothing of it is left at the poller.
void kvq__connection_gone(struct kvq__connection *connection);

// ---- attach_commands.c ----

// Takes one packet's request. Its descriptors are used up or closed.
void kvq__connection_request(struct kvq__connection *connection, struct kvq__packet *packet);
// Posts the taking-down of the client; kvq__connection_gone follows on the loop's thread.
void kvq__connection_detach(struct kvq__connection *connection);

// ---- attach_memory.c ----

// Loop's thread. A line or region with its system objects, or NULL with a code and a text.
struct kvq__line *kvq__line_new(struct kvq__connection *connection, int *error, char *text);
void kvq__line_free(struct kvq__line *line);
struct kvq__region *kvq__region_new(struct kvq__connection *connection, uint64_t bytes, int *error,
                                    char *text);
struct kvq__region *kvq__region_import(struct kvq__connection *connection, int fd, uint64_t offset,
                                       uint64_t bytes, int *error, char *text);
void kvq__region_free(struct kvq__region *region);
// Adds its bytes to what its client and all clients have, and takes them away again.
void kvq__region_count(struct kvq__region *region);
void kvq__region_uncount(struct kvq__region *region);

#endif
