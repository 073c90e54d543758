// SPDX-License-Identifier: Apache-2.0
//
// A whole daemon in a thread of the test program, a client that speaks to its attach socket byte
// by byte, and counting of what must not leak. Whatever the system refuses fails the test.
#ifndef KVQ_TESTS_ATTACH_KIT_H
#define KVQ_TESTS_ATTACH_KIT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/config/config.h"
#include "daemon/runtime/server.h"
#include "proto/wire.h"
#include "tests/kits/request.h"

// Setup and teardown of a test: the daemon, with 2 workers, 8 clients, and 20 MiB of buffers of
// which one client may have 8.
int attach_start(void **state);
int attach_stop(void **state); // if it runs
const struct kvq_config *attach_config(void);
void attach_codebooks(const char *folder); // of daemons started from now on
void attach_gpus(const char *library);     // likewise: with the GPUs of this driver
// Likewise: with a store in the folder, whose files may take so many bytes.
void attach_storage(const char *folder, uint64_t bytes);
const char *attach_directory(void); // of the daemon's sockets

// In the thread of the daemon's loop; returns when it is done.
pthread_t attach_loop_thread(void);
void attach_in_loop(void (*run)(struct kvq__server *server, void *context), void *context);
// The daemon's poller stands still in between.
void attach_hold_poller(void);
void attach_release_poller(void);

// ---- A client ----

struct peer {
    int fd;
    uint32_t next_id; // of the last request
    uint8_t packet[KVQ_MAX_MESSAGE];
    uint8_t memory[KVQ_WIRE_ARENA];
    struct kvq_arena arena;
    int fds[16]; // beside the last reply; closed with the next
    uint32_t n_fds;
    Kvq__Reply *reply; // the last one
    struct peer *next;
};

struct peer *peer_new(void);      // connected
struct peer *peer_attached(void); // hello was said
// Ends the connection from this side and waits until the daemon has let go of it.
void peer_free(struct peer *p);
void peer_free_all(void); // those that are left

void peer_send(struct peer *p, const void *bytes, size_t n, const int *fds, uint32_t n_fds);
// One reply into p->reply and p->fds; false at the end of the connection.
bool peer_receive(struct peer *p);
void peer_close_fds(struct peer *p);
void peer_send_request(struct peer *p, Kvq__Request *request, const int *fds, uint32_t n_fds);
// Sends a request and receives its reply. The reply's status, or 1 at the end of the connection.
int peer_ask(struct peer *p, Kvq__Request *request, const int *fds, uint32_t n_fds);

// Commands, with the status of their reply.
int peer_hello(struct peer *p, uint32_t protocol_min, uint32_t protocol_max);
void peer_send_hello(struct peer *p, uint32_t protocol_min,
                     uint32_t protocol_max); // its first half
int peer_import(struct peer *p, const int *fds, uint32_t n_fds, uint64_t offset, uint64_t bytes);
int peer_create_buffer(struct peer *p, uint64_t bytes);
int peer_close_buffer(struct peer *p, uint32_t buffer);
void peer_send_close(struct peer *p, uint32_t buffer); // its first half
int peer_ping(struct peer *p, uint32_t protocol, const int *fds, uint32_t n_fds);
int peer_open_queue(struct peer *p);
uint32_t peer_queue(struct peer *p);                  // one that can be had
uint32_t peer_buffer(struct peer *p, uint64_t bytes); // likewise
int peer_close_queue(struct peer *p, uint32_t queue);
int peer_open_session(struct peer *p, const char *name); // one small layer of f16
// The same in two parts, with any format: one KV head, head_dim 64.
void peer_send_open(struct peer *p, const char *name, const char *format);
int peer_answer(struct peer *p);
// A page table, for sessions of up to so many tokens. `gpu`: the UUID of the one that has the
// session; zeros: none has.
enum { PEER_TABLE_TOKENS = 100000 };
int peer_open_table(struct peer *p, uint64_t handle, uint32_t layers, ProtobufCBinaryData gpu,
                    bool copy);
void peer_cancel(struct peer *p, uint32_t request); // fails the test if it is refused

// ---- What must not leak ----

// Setup and teardown that count descriptors and mappings of this process, daemon and clients alike:
// there are as many at the end, once those clients have ended that are left, as at the beginning.
int attach_start_counting(void **state);
int attach_stop_counting(void **state);
#define COUNTED_TEST(test) TEST_BETWEEN(test, attach_start_counting, attach_stop_counting)
void begin_counting(void); // anew: what is there now is what stays
int count_mappings(void);  // of rings and buffers

#endif
