// SPDX-License-Identifier: Apache-2.0
//
// The data plane's shared memory, byte by byte. All fields little-endian, fixed width; offsets,
// never pointers. Atomics on these words live in proto/ring.h alone.
//
// Five kinds of memory. All but page tables on a GPU are memfds made by the daemon and sealed
// against shrinking and growing:
//
//   daemon page   one per daemon, clients map it read-only (sealed against their writing)
//   request ring  one per queue, client writes: struct kvq_req_page, then KVQ_REQ_SLOTS slots
//   reply ring    one per queue, daemon writes, client maps it read-only:
//                 struct kvq_cq_page, then KVQ_CQ_SLOTS slots
//   timeline page one per queue with requests in the order of a stream, both sides write it
//                 and register it with their GPU: struct kvq_timeline_page
//   page table    one for each session and client that attends to it in its own context, clients
//                 map it read-only: struct kvq_table_page, in host memory or a GPU's
//
// Indices are free-running 32-bit slot counts; index & (slots - 1) is the slot. A message is a
// whole number of 64-byte slots and may wrap around the end of the ring. Each side trusts
// only its own index; the other's is checked: 0 <= tail - head <= slots, or the peer is cut off.
// Everything the client writes is copied once into private memory and validated there.
//
// Waking: a side that wants to sleep sets its own flag, fences, polls again, and sleeps on its
// waker; a side that published a message fences, reads the peer's flag, and writes the peer's waker
// if the flag is set. Only the sleeper writes its flag. The poller's flag is in the daemon page,
// and its wakers are the eventfds of all queues. The client waits for its waker and the attach
// socket, so that a dead daemon wakes it. The client's waker is a socket and no eventfd: a client
// could fill an eventfd and change its flags, and the daemon's write would block; a send with
// MSG_DONTWAIT never blocks. The poller never reads its eventfds: it waits for edges.
#ifndef KVQ_PROTO_SHM_H
#define KVQ_PROTO_SHM_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/limits.h"

#define KVQ_SHM_MAGIC_DAEMON   0x4456514bu // "KVQD"
#define KVQ_SHM_MAGIC_REQUEST  0x5256514bu // "KVQR"
#define KVQ_SHM_MAGIC_REPLY    0x4356514bu // "KVQC"
#define KVQ_SHM_MAGIC_TIMELINE 0x5456514bu // "KVQT"
#define KVQ_SHM_MAGIC_TABLE    0x4c56514bu // "KVQL"

// Files in the daemon's runtime directory.
#define KVQ_ATTACH_SOCKET  "attach.sock"  // Unix SEQPACKET, for libkvq
#define KVQ_CONTROL_SOCKET "control.sock" // ZeroMQ ROUTER, for kvqctl
#define KVQ_HTTP_SOCKET    "http.sock"    // HTTP, for monitors
#define KVQ_ADMIN_DIR      "admin"        // for the daemon's own user alone
#define KVQ_LOCK_FILE      "kvqd.lock"    // held by the daemon that runs here

// Version of this file and of the attach messages. Client and daemon send ranges.
enum { KVQ_PROTOCOL_MIN = 1, KVQ_PROTOCOL_MAX = 1 };

struct kvq_daemon_page {
    uint32_t magic;
    uint32_t version;
    uint64_t epoch; // random for each start of the daemon
    uint32_t cpus;  // CPUs the daemon may use
    uint32_t awake; // its poller, and those of its workers that do not sleep
    uint8_t pad0[128 - 24];
    uint32_t poller_sleeping; // 1 while the poller sleeps; only the poller writes it
    uint8_t pad1[124];
    uint32_t runnable_clients; // client threads that were active lately: no thread spins while
                               // awake + runnable_clients exceed cpus; the poller sets it to
                               // cpus when other programs use up the CPUs
    uint8_t pad2[124];
};
static_assert(sizeof(struct kvq_daemon_page) == 384, "layout");
static_assert(offsetof(struct kvq_daemon_page, epoch) == 8, "layout");
static_assert(offsetof(struct kvq_daemon_page, poller_sleeping) == 128, "layout");
static_assert(offsetof(struct kvq_daemon_page, runnable_clients) == 256, "layout");

struct kvq_req_page { // written by the client
    uint32_t magic;   // the daemon fills these three once, before it hands the memfd over
    uint32_t version;
    uint32_t slots;
    uint8_t pad0[116];
    uint32_t tail; // slots published
    uint8_t pad1[124];
    uint32_t cq_head; // completion slots consumed
    uint8_t pad2[124];
    uint32_t client_sleeping; // 1 while the client's thread sleeps
    uint8_t pad3[124];
};
static_assert(sizeof(struct kvq_req_page) == 512, "layout");
static_assert(offsetof(struct kvq_req_page, tail) == 128, "layout");
static_assert(offsetof(struct kvq_req_page, cq_head) == 256, "layout");
static_assert(offsetof(struct kvq_req_page, client_sleeping) == 384, "layout");

struct kvq_cq_page { // written by the daemon
    uint32_t magic;
    uint32_t version;
    uint32_t slots;
    uint8_t pad0[116];
    uint32_t tail; // completion slots published
    uint8_t pad1[124];
    uint32_t req_head; // request slots consumed
    uint8_t pad2[124];
};
static_assert(sizeof(struct kvq_cq_page) == 384, "layout");
static_assert(offsetof(struct kvq_cq_page, tail) == 128, "layout");
static_assert(offsetof(struct kvq_cq_page, req_head) == 256, "layout");

// How a client's stream and the daemon's stream wait for each other while neither host waits.
// Request number n (1, 2, ...) of a queue with KVQ_REQ_ON_STREAM has signal = n. The client's
// stream writes n to `ready` before the request; the daemon's stream waits for n there, does the
// work and writes n to `done`; the client's stream waits for that. All streams of the queue share
// `ready`: if request n is on another stream than request n - 1, that stream first waits for n - 1
// in `ready`. Both sides compare as GPUs do: (int64_t)(word - n) >= 0. INT64_MAX ends all waits: a
// side whose peer is gone writes INT64_MAX to the word that its own stream waits for. The words
// serve nothing but waiting.
enum { KVQ_TIMELINE_BYTES = 4096 };
struct kvq_timeline_page {
    uint32_t magic; // the daemon fills these two once
    uint32_t version;
    uint8_t pad0[120];
    uint64_t ready; // written on the client's stream
    uint8_t pad1[120];
    uint64_t done; // written on the daemon's stream
    uint8_t pad2[120];
    uint64_t trial; // the client's: tests whether its streams can write and wait for words
    uint8_t pad3[KVQ_TIMELINE_BYTES - 392];
};
static_assert(sizeof(struct kvq_timeline_page) == KVQ_TIMELINE_BYTES, "layout");
static_assert(offsetof(struct kvq_timeline_page, ready) == 128, "layout");
static_assert(offsetof(struct kvq_timeline_page, done) == 256, "layout");
static_assert(offsetof(struct kvq_timeline_page, trial) == 384, "layout");

// Page tables of clients that attend in their own context. Addresses are the client's: OpenTable's
// pool_at says where the client maps the pool, and extent number i of the pool lies i times
// OpenPoolReply's extent_bytes behind that. The daemon writes a table only while it carries out a
// STEP request of the same client with that session, and the client does not read the table
// meanwhile. A table on a GPU may have a copy on the host, which the daemon writes when it enqueues
// the write of the table.
//
//     struct kvq_table_page
//     layers x layer_bytes: struct kvq_table_layer, then `pages` x struct kvq_table_entry
//
// The table layer of a layer that reads another layer's cache is never written.
enum { KVQ_TABLE_VERSION_MIN = 1, KVQ_TABLE_VERSION_MAX = 1 };

struct kvq_table_page {
    uint32_t magic; // the daemon fills these once
    uint32_t version;
    uint32_t layers;
    uint32_t pages; // entries of each layer, each of KVQ_BLOCK_TOKENS tokens
    uint64_t layer_bytes;
    uint8_t pad0[104];
    uint64_t tokens; // the committed count that the table was published at
    uint64_t number; // of publications
    uint8_t pad1[112];
};
static_assert(sizeof(struct kvq_table_page) == 256, "layout");
static_assert(offsetof(struct kvq_table_page, tokens) == 128, "layout");

struct kvq_table_layer {
    uint64_t extras;  // 0 = none, on the host also as long as nothing is packed; of sinks alone as
                      // long as the first page has no packed block, and when it is gone
    uint32_t n_pages; // of `tokens` tokens
    uint32_t pad;
    uint8_t outliers[KVQ_MAX_HEADS]; // how many to use, for each KV head; on a GPU: all
    uint8_t pad1[48];
};
static_assert(sizeof(struct kvq_table_layer) == 320, "layout");
static_assert(offsetof(struct kvq_table_layer, outliers) == 16, "layout");

// As the kernels take pages.
struct kvq_table_entry {
    uint64_t packed, raw; // 0 = none
    uint16_t tokens, packed_tokens;
    uint32_t pad;
};
static_assert(sizeof(struct kvq_table_entry) == 24, "layout");

static inline uint64_t kvq_table_layer_bytes(uint64_t pages)
{
    return (sizeof(struct kvq_table_layer) + pages * sizeof(struct kvq_table_entry) + 63) / 64 * 64;
}
static inline uint64_t kvq_table_bytes(uint64_t layers, uint64_t pages)
{
    return sizeof(struct kvq_table_page) + layers * kvq_table_layer_bytes(pages);
}

// ---- Requests ----

enum kvq_op {
    KVQ_OP_NOP = 0,        // answered with success; measures the ring, validated like any other
    KVQ_OP_STEP_BEGIN = 1, // entries: handle, position, append (tokens of the step)
    KVQ_OP_APPEND = 2,     // one layer's K and V of the step's tokens (all of them)
    KVQ_OP_ATTEND = 3,     // one layer's attention
    KVQ_OP_APPEND_ATTEND = 4,
    KVQ_OP_STEP_END = 5,   // commit; entries optional (none = every session of the step)
    KVQ_OP_STEP_ABORT = 6, // likewise
    KVQ_OP_TRUNCATE = 7,   // position: token count now; list_token: tokens to drop from the end
    KVQ_OP_FORK = 8,       // position: where to fork; the result's value is the new handle
    KVQ_OP_ACCEPT = 9,     // of the last `append` tokens keep those at the listed indices
    KVQ_OP_READ = 10,      // K and V of tokens [position, position + append) of one layer
    KVQ_OP_STEP = 11,      // a whole step: begin, append of all layers, commit; packs what is due
                           // and publishes the client's page tables. append 0: publishes only.
    KVQ_OP_COUNT
};

enum kvq_req_flag {
    KVQ_REQ_PAST_ONLY = 1, // attend: only to tokens before the step
    KVQ_REQ_PAGED_KV = 2,  // K and V lie in the engine's paged cache, see pages below
    KVQ_REQ_ON_STREAM = 4, // in the order of the client's stream, by the queue's timeline: APPEND,
    // ATTEND, APPEND_ATTEND, READ, STEP. Completed when the work is enqueued.
    // The daemon writes `done` in any case, also if it refuses the request.
    KVQ_REQ_TOKEN_IDS = 8,  // STEP_BEGIN, STEP_END, STEP: the ids of an entry's tokens of the step
                            // stand in `list`, as int32 from element q_row on
    KVQ_REQ_WAIT_ROOM = 16, // STEP_BEGIN, STEP, FORK: if memory is short and nothing can be
                            // evicted, wait until memory is free. Needs a deadline.
};

// A strided tensor [rows][heads][head_dim] in a registered buffer; strides in bytes, may not
// be negative, and every byte touched must lie inside the buffer.
struct kvq_wire_view {
    uint64_t offset;
    uint64_t token_stride;
    uint64_t head_stride;
    uint32_t buffer; // id given at registration; 0 = no tensor
    uint8_t dtype;   // 1 f16, 2 bf16, 3 f32
    uint8_t pad[3];  // zero
};
static_assert(sizeof(struct kvq_wire_view) == 32, "layout");

struct kvq_request {
    uint8_t op;           // enum kvq_op
    uint8_t pad0;         // zero
    uint16_t flags;       // enum kvq_req_flag
    uint16_t count;       // entries that follow, at most KVQ_MAX_BATCH
    uint16_t slots;       // length of the whole message, this header included
    uint32_t seq;         // client's number; comes back in the completion
    uint32_t layer;       // STEP: how many layers the sessions have
    uint64_t step;        // client's number of the step, from its STEP_BEGIN
    uint64_t deadline_ns; // CLOCK_MONOTONIC; 0 = none. Checked before work starts.
    // Paged K and V (KVQ_REQ_PAGED_KV): token t of an entry lies in page list[t / page_tokens],
    // at k.offset + page * k_page_stride + (t % page_tokens) * k.token_stride. The list of an
    // entry starts at element `row` of `list`, as int32; t counts from the entry's list_token.
    uint32_t page_tokens;
    uint32_t pad1; // zero
    uint64_t k_page_stride, v_page_stride;
    uint64_t signal;           // ON_STREAM: its number in the queue's timeline; else 0
    struct kvq_wire_view k, v; // APPEND: sources. READ: destinations.
    struct kvq_wire_view q, out;
    struct kvq_wire_view lse;  // fp32, head_stride 4 is usual; optional
    struct kvq_wire_view list; // int32 lists: pages (PAGED_KV), indices (ACCEPT), token ids
};
static_assert(sizeof(struct kvq_request) == 256, "layout");
static_assert(offsetof(struct kvq_request, seq) == 8, "layout");
static_assert(offsetof(struct kvq_request, step) == 16, "layout");
static_assert(offsetof(struct kvq_request, deadline_ns) == 24, "layout");
static_assert(offsetof(struct kvq_request, page_tokens) == 32, "layout");
static_assert(offsetof(struct kvq_request, k_page_stride) == 40, "layout");
static_assert(offsetof(struct kvq_request, signal) == 56, "layout");
static_assert(offsetof(struct kvq_request, k) == 64, "layout");
static_assert(offsetof(struct kvq_request, list) == 224, "layout");

struct kvq_entry_wire {
    uint64_t handle;     // low 32 bits index, high 32 bits generation; of this client's table
    uint64_t position;   // the session's committed token count, as the client believes
    uint32_t row;        // first row of this session in k and v (PAGED_KV, ACCEPT: in list)
    uint32_t q_row;      // first row in q, out and lse (TOKEN_IDS: in list)
    uint32_t append;     // tokens
    uint16_t queries;    // query tokens
    uint16_t list_token; // PAGED_KV: tokens to skip in the first page; ACCEPT: indices listed;
                         // TRUNCATE: tokens to drop from the end
};
static_assert(sizeof(struct kvq_entry_wire) == 32, "layout");
static_assert(offsetof(struct kvq_entry_wire, row) == 16, "layout");
static_assert(offsetof(struct kvq_entry_wire, queries) == 28, "layout");

// STEP: one for each layer of the sessions, behind the entries (from the next whole slot on); the
// header's own k and v are zero. A layer that reads another one's cache has zeros.
struct kvq_step_layer {
    struct kvq_wire_view k, v;
};
static_assert(sizeof(struct kvq_step_layer) == KVQ_SLOT_BYTES, "layout");

enum {
    KVQ_REQ_HEADER_SLOTS = sizeof(struct kvq_request) / KVQ_SLOT_BYTES,
    KVQ_REQ_MAX_SLOTS = KVQ_REQ_HEADER_SLOTS + KVQ_MAX_BATCH * 32 / KVQ_SLOT_BYTES + KVQ_MAX_LAYERS,
};
static_assert(KVQ_REQ_MAX_SLOTS * 4 <= KVQ_REQ_SLOTS, "several of the largest fit");

// The length of a request with so many entries, and layers of a STEP, in slots.
static inline uint32_t kvq_request_slots(uint32_t entries, uint32_t layers)
{
    size_t bytes = entries * sizeof(struct kvq_entry_wire);
    return KVQ_REQ_HEADER_SLOTS + (uint32_t)((bytes + KVQ_SLOT_BYTES - 1) / KVQ_SLOT_BYTES) +
           layers;
}

// ---- Completions ----

struct kvq_completion {
    uint32_t seq;
    int32_t status; // of the whole request; 0 if it ran, though sessions may have failed
    uint16_t count; // results that follow, one for each entry in order
    uint16_t slots;
    uint32_t pad0;
    uint64_t value; // STEP_BEGIN: the step; else 0
    uint8_t pad[40];
};
static_assert(sizeof(struct kvq_completion) == 64, "layout");

struct kvq_result {
    int32_t status;
    union {
        uint32_t extents; // STEP: MapExtents.known of the session as it would be now; else 0
        uint32_t shard;   // of a failure: 1 + the other shard of the session that caused it; else 0
    };
    uint64_t value; // token count afterwards; FORK: the new handle; READ: tokens read
};
static_assert(sizeof(struct kvq_result) == 16, "layout");

enum {
    KVQ_CQ_MAX_SLOTS = 1 + KVQ_MAX_BATCH * 16 / KVQ_SLOT_BYTES,
};
static_assert(KVQ_CQ_MAX_SLOTS * KVQ_QUEUE_CREDITS <= KVQ_CQ_SLOTS,
              "a completion's slots are there before its request is taken");

// The length of a completion with so many results, in slots.
static inline uint32_t kvq_completion_slots(uint32_t results)
{
    size_t bytes = results * sizeof(struct kvq_result);
    return 1 + (uint32_t)((bytes + KVQ_SLOT_BYTES - 1) / KVQ_SLOT_BYTES);
}

#endif
