// SPDX-License-Identifier: Apache-2.0
//
// The core of kvqd: clients, sessions, block pools, steps and requests. It has no sockets, threads,
// clock or randomness of its own; they are passed in, so that a seeded test runs all of it in one
// process.
//
// Threads: every function here is called on one thread, the poller's, but for one: the `run` of a
// job, which any thread may call, for any item, in any order. Nothing here blocks. Memory is
// allocated when clients, queues and sessions are made, when a session's page tables grow, and for
// jobs (forks, moves, saves, restores) and the index of prefixes. Between a step's begin and end
// the requests of the step allocate nothing; an end that brings token ids allocates room for them,
// and an entry that is refused it fails.
//
// Errors: functions that can fail return 0 or a negative KVQ_E code. Those with a `text` argument
// (KVQ_TEXT_BYTES long) then say there what was wrong, the value, the limit and what to do.
//
// Life of a request, as the poller sees it:
//
//     copy the header to kvq__queue_header(q) and the entries to kvq__queue_entries(q)
//     p = kvq__request_start(q)
//     while p != KVQ__DONE:
//         KVQ__RUN    run all items of kvq__queue_job(q), on any threads, then
//                     p = kvq__request_continue(q)
//         KVQ__WAIT   something else must finish first; after any other job or request of the
//                     core has ended, or a millisecond later, p = kvq__request_continue(q)
//         KVQ__GPU    once kvq__queue_gpu_idle(q), p = kvq__request_continue(q)
//     publish kvq__queue_completion(q) and its kvq__queue_results(q)
#ifndef KVQ_DAEMON_CORE_CORE_H
#define KVQ_DAEMON_CORE_CORE_H

#include "daemon/core/base/base.h"
#include "daemon/core/base/counters.h"
#include "daemon/core/base/statuses.h"

struct kvq__core;
struct kvq__client;
struct kvq__queue;
struct kvq__gpu;
struct kvq__prefix_ask;
struct kvq__table_memory;

// ---- The core ----

// Copies config. 0, KVQ_E_INVALID with a text, or KVQ_E_NO_MEMORY. Release with kvq__core_close.
int kvq__core_open(const struct kvq__core_config *config, struct kvq__core **core, char *text);
// All queues must be closed. Drops every client and session and gives all memory back.
void kvq__core_close(struct kvq__core **core);

// Hashes of prefixes are keyed so from now on; before any client attaches.
void kvq__core_prefix_key(struct kvq__core *core, const uint8_t key[32]);
// Configures a namespace; before any client attaches.
int kvq__core_namespace(struct kvq__core *core, const struct kvq__namespace_config *config,
                        char *text);
// Puts settings in effect, all at once. Namespaces that are configured stay, and have from then on
// what their entry says: who may use them, their limits (except those that were set at run time),
// whom they share with; entries of new names make new namespaces. Namespaces without an entry that
// are not configured get the default limits. Sessions stay as they are: keep_ns and path hold for
// those that are opened later. KVQ_E_NO_MEMORY, and nothing has changed.
int kvq__core_reconfigure(struct kvq__core *core, const struct kvq__core_settings *settings,
                          char *text);

// Tells the time (CLOCK_MONOTONIC). Cheap; the poller calls it before it starts requests or runs
// commands. Deadlines and idle times are measured against the last time told.
void kvq__core_clock(struct kvq__core *core, uint64_t now_ns);
// Drops sessions whose keep time is over and gives back extents long empty. Every 100 ms or so.
void kvq__core_tick(struct kvq__core *core);

// From now on nothing new is taken: attaching, opening sessions and beginning steps answer
// KVQ_E_DRAINING, while open steps may go on to their end.
void kvq__core_drain(struct kvq__core *core);
// True if no step is open and nothing is in flight.
bool kvq__core_idle(const struct kvq__core *core);

// The most extents that the host's pool can come to have.
uint64_t kvq__host_extents_most(uint64_t pool_bytes, uint64_t extent_bytes);

// ---- Clients, queues, buffers ----

// *id is never 0 and never used again.
int kvq__client_attach(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                       struct kvq__client **client, uint64_t *id, char *text);
// The client is cut off for what it did: when it leaves, its sessions end without leaving their
// last pages to the index of prefixes (session/finish.h).
void kvq__client_distrust(struct kvq__client *client);
// The client is gone: aborts its steps, closes its handles (unnamed sessions die, named ones stay
// at their last commit), and opens no others. What a command of the client's that is under way
// needs stays: buffers and queues. May be called again.
void kvq__client_leave(struct kvq__client *client);

// As kvq__client_leave, once no command of the client's is under way, and removes its buffers as
// soon as nothing in flight uses them. The client and its queues stay valid until every queue is
// closed: the poller still ends what is in flight (kvq__request_continue then soon answers
// KVQ__DONE) and closes the queues. Without queues the client is freed at once.
void kvq__client_detach(struct kvq__client *client);

// At most KVQ_MAX_QUEUES. Allocates all that requests of this queue will ever need.
int kvq__queue_open(struct kvq__client *client, struct kvq__queue **queue, char *text);
// No request of it may be in flight. Aborts the steps that were begun through it and have not
// ended; a shard that has ended its step, and waits for the others, goes on waiting. Sets *queue to
// NULL.
void kvq__queue_close(struct kvq__queue **queue);

// Memory that tensors travel in.
struct kvq__buffer_memory {
    uint8_t *host; // where this process sees it; NULL: memory of a GPU
    uint64_t gpu;  // its address for kernels; 0: no GPU can reach it
    uint64_t bytes;
    struct kvq__gpu *on; // whose memory it is; NULL: the host's
    void *owner;         // for buffer_gone()
};

// Registers memory that the caller mapped (and that cannot shrink). *buffer is never 0.
int kvq__buffer_add(struct kvq__client *client, const struct kvq__buffer_memory *memory,
                    uint32_t *buffer, char *text);
// Refuses new uses at once; buffer_gone() follows when nothing in flight uses it, maybe at once.
int kvq__buffer_remove(struct kvq__client *client, uint32_t buffer, char *text);

// The words of a queue's timeline on a GPU, as addresses for its streams; they stay until the queue
// is closed. Once for each queue. Requests with KVQ_REQ_ON_STREAM wait there for `ready` and write
// `done`. `ready_here` is the first one's address in this process. KVQ_E_UNSUPPORTED if the GPU has
// no such words, or no hardware queue left for a stream that waits; events likewise.
int kvq__queue_timeline(struct kvq__queue *queue, struct kvq__gpu *gpu, uint64_t ready,
                        uint64_t done, uint64_t *ready_here, char *text);
// The same by events that the client has opened, too (stream_sync.h), for requests whose `signal`
// is n at n % KVQ_QUEUE_EVENTS. They are the caller's, and stay until the queue is closed. Also for
// a queue that has words which no request has used.
struct kvq_gpu_event;
struct kvq__events {
    struct kvq_gpu_event *ready[KVQ_QUEUE_EVENTS], *done[KVQ_QUEUE_EVENTS];
};
int kvq__queue_events(struct kvq__queue *queue, struct kvq__gpu *gpu,
                      const struct kvq__events *events, char *text);

// ---- Sessions ----

struct kvq__layer_row {
    uint16_t q_heads, kv_heads, k_dim, v_dim; // dims as the client's rows have them
    uint32_t window;
    float softcap, scale;           // scale 0 = 1/sqrt(k_dim)
    const char *format;             // NULL or empty = the session's
    int32_t kv_from;                // layer whose cache this one reads; -1 = its own
    uint32_t repeat;                // this row stands for so many layers; 0 = 1
    const struct kvq_format *exact; // NULL = what the format's name stands for; else that
    uint8_t v_rotation;             // enum kvq__v_asked; BY_PAPER = the session's
};

enum kvq__open_flag {
    KVQ__OPEN_READ_ONLY = 1,
    KVQ__OPEN_TAKE_OVER = 2,
    KVQ__OPEN_MUST_EXIST = 4,
    KVQ__OPEN_MUST_CREATE = 8,
    KVQ__OPEN_EXACT_PROMPT = 16, // refuse an open without prompt_tokens
    KVQ__OPEN_PACKED_PROMPT = 32,
};
// How V is to be rotated. What a session has is resolved when it is opened: enum kvq_v_rotation of
// each of its layers.
enum kvq__v_asked {
    KVQ__V_BY_PAPER, // kvq_v_rotation_by_paper of each layer's format
    KVQ__V_ENGINE,
    KVQ__V_DAEMON,
    KVQ__V_NONE,
};
enum kvq__on_detach {
    KVQ__DETACH_DEFAULT = 0,
    KVQ__DETACH_DROP = 1,
    KVQ__DETACH_KEEP = 2,
    // Keep, and save: only where struct kvq__core_config says that somebody does.
    KVQ__DETACH_SAVE = 3,
};

// Tokens that stand for an image or for audio: the same ids mean something else with another one.
struct kvq__span {
    uint64_t first;
    uint32_t tokens;
    uint8_t digest[32]; // of what they stand for
};

// The beginning of a session: ids of its tokens, as int32 in a buffer of the client's in the host's
// memory, and spans among these and the tokens that follow.
struct kvq__prefix_spec {
    uint32_t buffer;
    uint64_t offset, tokens; // tokens 0: no ids
    const struct kvq__span *spans;
    uint32_t n_spans;
    const struct kvq__prefix_ask *ask; // what was found of them (saved.h); NULL: not looked yet
};

// Zero-initialized fields mean what kvq.proto says of OpenSession. Strings are NULL or end in NUL.
struct kvq__session_spec {
    const char *ns, *name, *model, *format;
    const char *place; // "host", a GPU's UUID ("GPU-..."), or NULL or empty: the daemon's choice
    const struct kvq__layer_row *layers;
    uint32_t n_layers; // rows
    uint32_t shard, shards;
    uint32_t dtype;
    uint32_t v_rotation; // enum kvq__v_asked
    uint32_t path;       // 0 exact, 1 fast, 2 the daemon's choice
    uint32_t max_rollback, on_detach;
    uint64_t prompt_tokens, keep_seconds;
    uint32_t flags;                 // enum kvq__open_flag
    const char *salt, *adapter;     // sessions share prefixes only if these are equal
    struct kvq__prefix_spec prefix; // a session that is created begins with what is there of it
};

enum { KVQ__V_MIXED = KVQ_V_ROT_DAEMON + 1 };

// What kvq.proto calls Session, field by field.
struct kvq__session_info {
    uint64_t handle, id, ns_number; // ns_number: of its namespace
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES], model[KVQ_FINGERPRINT_BYTES];
    char format[KVQ_FORMAT_NAME]; // the configuration's, if it is one; else of most layers
    char place[48];               // "host" or a GPU's UUID: where it belongs
    char isa[16];                 // that its kernels are for on a GPU: "sm_90"; else empty
    char layer_formats[256];      // "0-1:k8v4, 2-31:oscar2"; empty if all layers have one
    uint64_t tokens;
    uint32_t layers;
    double bits_per_value, bytes_per_token_head, bytes_per_token_head_total, compression;
    uint64_t full_precision_tokens, packed_bytes, window_bytes, table_bytes;
    uint64_t writer_client, idle_ms, keep_ms, saturated_values;
    uint32_t readers, max_rollback, q_heads, kv_heads, head_dim;
    uint32_t shard, shards;
    uint64_t group_tokens;  // committed by all shards; 0 while one is missing
    uint32_t loading;       // layers that are yet to be read from a store
    bool saved;             // what is committed is in a store
    bool demoted;           // it is in the host's memory, though `place` is where it belongs
    bool offloaded;         // parked: it has no memory, and comes back when it is used
    bool pinned;            // it is never parked
    uint64_t prefix_tokens; // that it began with
    uint64_t exact_tokens;  // of a prompt that is read in 16 bits until it has ended; 0: none
    bool packs_early;       // of a prompt of which that is no longer so, for room
    uint64_t shared_bytes;  // of packed_bytes, in blocks that others have as well
    bool shared_unknown;    // not counted: the session has more blocks than KVQ__LIST_LOOKS
    uint8_t path;           // enum kvq_path
    uint8_t v_rotation;     // enum kvq_v_rotation, or KVQ__V_MIXED: DAEMON and NONE by layer
    bool step_open, created, read_only;
};

// Opens or creates a session for a client. KVQ_E_EXISTS, KVQ_E_BUSY, KVQ_E_PERMISSION,
// KVQ_E_FORMAT, KVQ_E_SHAPE, KVQ_E_LIMIT, KVQ_E_QUOTA, KVQ_E_NO_SESSION, KVQ_E_DRAINING.
int kvq__session_open(struct kvq__client *client, const struct kvq__session_spec *spec,
                      struct kvq__session_info *info, char *text);
// By handle. KVQ_E_STALE if it is none of this client's. Closing aborts an open step's part.
int kvq__session_close(struct kvq__client *client, uint64_t handle, char *text);
// With all shards of the session.
int kvq__session_drop(struct kvq__client *client, uint64_t handle, char *text);
int kvq__session_info(struct kvq__client *client, uint64_t handle, struct kvq__session_info *info,
                      char *text);
// By namespace and name, or "#ID"; ns NULL or empty = the peer's own. For administration.
int kvq__session_find(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                      const char *name, struct kvq__session_info *info, char *text);
// One shard of a session.
struct kvq__shard_info {
    uint32_t shard;
    uint64_t id, tokens, writer_client;
    const char *place; // lives as long as the core
    bool ended;        // its step has ended and waits for the other shards
};
// The shards of the session of that id that are there, at most KVQ_MAX_SHARDS, if it has several
// and a name. Returns how many.
uint32_t kvq__session_shards(struct kvq__core *core, const struct kvq__peer *peer, uint64_t id,
                             struct kvq__shard_info *out);
// With all its shards.
int kvq__session_drop_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            const char *name, char *text);

// ---- Prefixes (prefix.h) ----

// How many tokens of spec->prefix a session of this spec would begin with: a multiple of 128, and
// of a session of several shards what all of them have. Nothing is held: it may be less a moment
// later. What kvq__session_open answers to a spec that creates, and KVQ_E_BUFFER, KVQ_E_BOUNDS,
// KVQ_E_UNSUPPORTED (sessions of this spec share by forks only).
int kvq__prefix_lookup(struct kvq__client *client, const struct kvq__session_spec *spec,
                       uint64_t *tokens, char *text);
// Says what tokens to come stand for; spans take the place of those that they overlap. KVQ_E_STALE,
// KVQ_E_READ_ONLY, KVQ_E_POSITION, KVQ_E_INVALID, KVQ_E_LIMIT, KVQ_E_NO_MEMORY.
int kvq__session_spans(struct kvq__client *client, uint64_t handle, const struct kvq__span *spans,
                       uint32_t n, char *text);

// A namespace's.
struct kvq__prefix_info {
    char ns[KVQ_NAME_BYTES];
    uint64_t ns_number;
    uint64_t pages;             // of 128 tokens
    uint64_t bytes, idle_bytes; // of their blocks; idle: that no session has
    uint64_t lookups, hits, evicted;
    uint64_t asked_tokens, hit_tokens; // in whole pages: that new sessions were to begin with; did
};
// Gives up what no session has, of a namespace (NULL or empty: of all that the peer may use). An
// index without such blocks is left as it is, pages that have lost theirs included.
// KVQ_E_PERMISSION, or what else a namespace's name may be refused with.
int kvq__core_drop_prefixes(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            uint64_t *pages, uint64_t *bytes, char *text);
// Of namespaces with a number above `after`: as the lists below.
uint32_t kvq__core_prefixes(const struct kvq__core *core, const struct kvq__peer *peer,
                            uint64_t after, struct kvq__prefix_info *out, uint32_t max);

// ---- Attention in a client's own context (table.c, export.c) ----
//
// The client maps extents of its own namespaces read-only and reads blocks by a page table, which a
// STEP request publishes. Blocks that a published table names keep a reference each (a lease) until
// it is published again or closed. An extent that a client was told of never changes its namespace:
// when it is empty and nobody who was told of it is left, its memory is given back.

struct kvq__pool_span {
    uint64_t span, unit;  // an extent's number times `unit` is below `span`
    struct kvq__gpu *gpu; // NULL: the host
};
// place as in struct kvq__session_spec, not empty. KVQ_E_INVALID.
int kvq__pool_span(const struct kvq__core *core, const char *place, struct kvq__pool_span *out,
                   char *text);

// Memory of a table, kvq_table_bytes(layers, pages) long, zeroed.
struct kvq__table_memory {
    uint8_t *host;             // NULL: memory of a GPU
    const struct kvq__gpu *on; // that one; NULL: the host's
    uint64_t gpu;
    uint8_t *copy; // of a GPU's, on the host; NULL: none
    uint32_t layers, pages;
};
// Whether an open session can have a table now, wherever its memory is: 0, KVQ_E_STALE,
// KVQ_E_EXISTS, KVQ_E_BUSY (it is being moved), KVQ_E_UNSUPPORTED.
int kvq__table_ask(struct kvq__client *client, uint64_t handle, char *text);
// Makes the table of an open session, which a STEP then publishes; `pool_at`: where the client maps
// the pool. The memory must stay until table_gone was called. As kvq__table_ask; KVQ_E_INVALID (the
// memory lies elsewhere than the session), KVQ_E_SHAPE (layers), KVQ_E_LIMIT (it has more tokens
// than that), KVQ_E_NO_MEMORY.
int kvq__table_open(struct kvq__client *client, uint64_t handle, uint64_t pool_at,
                    const struct kvq__table_memory *memory, char *text);
// table_gone follows when nothing in flight uses it, maybe at once; closing the session or the
// client's own drop of it closes its table, too. KVQ_E_STALE.
int kvq__table_close(struct kvq__client *client, uint64_t handle, char *text);

struct kvq__extent_export {
    const struct kvq__memory *memory; // the pool's: valid until anything else of the core is called
    uint32_t number;
};
// Up to `max` extents of the pool where the session belongs, which the client was not told of yet.
// *known and *more: see MapExtentsReply. Returns how many, KVQ_E_STALE or KVQ_E_NO_MEMORY.
int kvq__extents_tell(struct kvq__client *client, uint64_t handle, struct kvq__extent_export *out,
                      uint32_t max, uint64_t *known, bool *more, char *text);
// The client did not hear what the last call told: it is told again.
void kvq__extents_untell(struct kvq__client *client);

// How the client reads a session's layers.
struct kvq__layer_reading {
    struct kvq_format format;
    struct kvq_shape shape;
    uint32_t source; // layer whose pages it reads
};
// Fills `out`, KVQ_MAX_LAYERS long, *path (enum kvq_path) and *shards. Returns how many layers
// there are, or KVQ_E_STALE.
int kvq__session_reading(struct kvq__client *client, uint64_t handle,
                         struct kvq__layer_reading *out, uint8_t *path, uint32_t *shards,
                         char *text);
// The codebook of one of its layers, with a hold that the caller gives to codebook_release.
// KVQ_E_STALE, KVQ_E_SHAPE (no such layer), KVQ_E_FORMAT (it has none).
int kvq__session_book(struct kvq__client *client, uint64_t handle, uint32_t layer,
                      struct kvq_book *book, void **hold, char *text);

// ---- Moves between places ----

// To "host", or to a GPU by its UUID.
struct kvq__move_spec {
    const char *place;
    bool one_shard; // only this one; else all that the session has
    uint32_t shard;
    uint64_t wait_ms; // how long its steps and requests may take to end; 0 = 10 s. An hour at most
    bool demotes;     // it goes back when it is used (evict.h)
};
struct kvq__move_info {
    uint64_t id;                             // of this core's run
    const char *phase, *place, *name, *text; // until the core is called again
    bool finished;
    int status;            // once it has finished: 0, or why nothing was moved, and text says more
    uint64_t bytes;        // to be copied
    uint64_t moved_bytes;  // of these, that are there
    uint64_t shared_bytes; // of these, that forks or prefixes share, and that stay there as well
};

// Begins to move a session, which goes on in kvq__core_poll; its requests wait from when its step
// and the requests under way have ended until it is there. All shards move, or none. KVQ_E_INVALID
// (no such place), KVQ_E_NO_MEMORY (no room there), KVQ_E_QUOTA (nor by its namespace's limit),
// KVQ_E_BUSY (it is moved already, or cannot be moved now), KVQ_E_LIMIT, KVQ_E_DRAINING. How it
// ends the info says: 0, these codes, KVQ_E_SYSTEM, or KVQ_E_CANCELLED if the session was dropped.
int kvq__session_move_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            const char *name, const struct kvq__move_spec *spec,
                            struct kvq__move_info *info, char *text);
// The shard of this handle, whose session it may write.
int kvq__session_move(struct kvq__client *client, uint64_t handle,
                      const struct kvq__move_spec *spec, struct kvq__move_info *info, char *text);
// How far a move is; for a minute after its end what became of it.
int kvq__move_info(struct kvq__core *core, const struct kvq__peer *peer, uint64_t id,
                   struct kvq__move_info *info, char *text);
// Whether moves are under way: then kvq__core_poll should be called again soon.
bool kvq__core_moves(const struct kvq__core *core);

// ---- Parking: sessions that go to disk and come back when they are used (park.h) ----
//
// Tickets are those of moves, with "disk" as the place of a session that is parked.

// Sessions that may leave a pool at a time to make room for others; parked, in one transaction.
enum { KVQ__EVICT_AT_ONCE = 16 };
enum kvq__park_reason {
    KVQ__PARK_ASKED, // by somebody
    KVQ__PARK_ROOM,  // its pool was full
    KVQ__PARK_QUOTA, // its namespace was at its limit
    KVQ__PARK_IDLE,  // nobody had used it for long
    KVQ__PARK_REASONS,
};

// Parks a session with all its shards: writes what is not saved yet, and then frees its memory,
// if nobody uses it meanwhile. Its handles stay valid; requests bring it back, and wait for that.
// KVQ_E_BUSY (in use, pinned, or was used meanwhile), KVQ_E_UNSUPPORTED (nothing is saved here),
// KVQ_E_INCOMPLETE (a shard is missing), KVQ_E_DRAINING, KVQ_E_LIMIT, KVQ_E_NO_MEMORY; at its end
// also KVQ_E_NO_SPACE, KVQ_E_SYSTEM, KVQ_E_CANCELLED.
int kvq__session_park_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            const char *name, struct kvq__move_info *info, char *text);
int kvq__session_park(struct kvq__client *client, uint64_t handle, struct kvq__move_info *info,
                      char *text);
// Brings it back before anybody asks. KVQ_E_BUSY while it is being parked; at its end also
// KVQ_E_QUOTA, KVQ_E_DAMAGED.
int kvq__session_prefetch_named(struct kvq__core *core, const struct kvq__peer *peer,
                                const char *ns, const char *name, struct kvq__move_info *info,
                                char *text);
int kvq__session_prefetch(struct kvq__client *client, uint64_t handle, struct kvq__move_info *info,
                          char *text);
// With `stay`, it is never parked from now on, and comes back if it is.
int kvq__session_pin_named(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                           const char *name, bool stay, char *text);
int kvq__session_pin(struct kvq__client *client, uint64_t handle, bool stay, char *text);

// ---- Snapshots ----

struct kvq__status {
    uint64_t pool_bytes, pool_extent_bytes, pool_used_bytes;
    uint64_t pool_largest_free; // the budget that is in no extent or in empty ones
    uint64_t pool_huge_bytes;   // of extents in explicit huge pages
    uint32_t sessions, clients;
    uint64_t tokens;
    bool draining;
};
void kvq__core_status(const struct kvq__core *core, struct kvq__status *status);

// All that is counted (base/counters.h).
void kvq__core_counts(const struct kvq__core *core, struct kvq__counts *counts);
// Requests of rings that were refused: as refused_requests there. One of which some entries were
// refused counts once, under the status of the first of these.
const struct kvq__refused *kvq__core_refused(const struct kvq__core *core);

// What packing lost, of the units that were compared: root of the mean square of K - K', and of
// V - V', where K' is read back from what was packed, by those of K and V. On the host alone.
struct kvq__pack_error {
    char format[KVQ_FORMAT_NAME];
    uint32_t layer;
    uint64_t count; // units
    double k, v;    // sums over them
};
// In the order in which they came; at most KVQ_MAX_PACK_ERRORS, what comes later is not kept.
uint32_t kvq__core_pack_errors(const struct kvq__core *core, const struct kvq__pack_error **out);

struct kvq__place_info {
    const char *place, *name; // live as long as the core
    uint64_t pool_bytes, extent_bytes, used_bytes;
    uint32_t sessions;
};
// Of the GPUs; at most KVQ_MAX_GPUS. Returns how many there are.
uint32_t kvq__core_places(const struct kvq__core *core, struct kvq__place_info *out);

struct kvq__namespace_info {
    uint64_t number;
    char name[KVQ_NAME_BYTES];
    struct kvq__quota quota;      // in effect
    struct kvq__quota configured; // what would be without what was set at run time
    uint32_t set;                 // what was: bits 1 << enum kvq__limit
    uint64_t used[KVQ__LIMITS];
    uint64_t refused[KVQ__LIMITS]; // how often
    // Of the last refusal, if there was one: the limit, how much more was asked for, and when.
    enum kvq__limit last_refused;
    uint64_t last_more, last_ms;
};
struct kvq__client_info {
    uint64_t id;
    char name[KVQ_NAME_BYTES];
    uint32_t pid, uid, queues, buffers, sessions;
    uint64_t buffer_bytes, requests, connected_ms;
};

// Lists come in pieces, in an order that never changes: namespaces in the order in which the core
// came to know them (their numbers), sessions by namespace and then by id, clients by id. Each call
// fills up to `max` elements with what the peer may see, of what stands behind `after` (zeros: of
// all), and returns how many; fewer than `max` are the last. What it costs depends on `max` and on
// how many namespaces (clients) there are, not on the sessions.
struct kvq__list_at {
    uint64_t ns, id; // numbers of a namespace and of a session in it
};
// Numbers of those that came last, here or gone.
struct kvq__newest {
    uint64_t ns, session, client;
};
struct kvq__newest kvq__core_newest(const struct kvq__core *core);
// ns NULL or empty = all. Shared bytes are counted of the first sessions that have no more than
// `looks` blocks together, and of smaller ones behind them: everybody waits meanwhile. What was
// looked at is taken from `looks`, which begins as KVQ__LIST_LOOKS.
enum { KVQ__LIST_LOOKS = 1 << 16 };
// 0, or KVQ_E_NO_NAMESPACE for administrators who name a namespace that there is not. Others get an
// empty list, as of a namespace that they may not use.
int kvq__core_may_list(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                       char *text);
uint32_t kvq__core_sessions(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                            struct kvq__list_at after, uint64_t *looks,
                            struct kvq__session_info *out, uint32_t max);
uint32_t kvq__core_namespaces(const struct kvq__core *core, const struct kvq__peer *peer,
                              uint64_t after, struct kvq__namespace_info *out, uint32_t max);
// One of them, or, with an empty name, the peer's own. KVQ_E_PERMISSION.
int kvq__core_namespace_info(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                             struct kvq__namespace_info *out, char *text);
uint32_t kvq__core_clients(const struct kvq__core *core, const struct kvq__peer *peer,
                           uint64_t after, struct kvq__client_info *out, uint32_t max);
// The formats of the configuration, a row for each range of their layers, then those of the table.
// What is pointed to lives as long as the core.
struct kvq__format_info {
    const char *name;
    const struct kvq_format *row;
    uint32_t first, last; // layers; last UINT32_MAX: those that no other row names
    bool own, others;     // others: there are such rows
};
uint32_t kvq__core_formats(const struct kvq__core *core, struct kvq__format_info *out,
                           uint32_t max);
// Counts a kick and says whether the client exists (else KVQ_E_NO_CLIENT) and the peer may end it
// (else KVQ_E_PERMISSION). The caller then closes its connection and detaches it.
int kvq__core_kick(struct kvq__core *core, const struct kvq__peer *peer, uint64_t id, char *text);

// ---- Limits at run time ----

// What a namespace's limits that were set would be if those of `change` were set as well, or, with
// none in it, if none were. Changes nothing. Only for admins. KVQ_E_PERMISSION, KVQ_E_INVALID,
// KVQ_E_LIMIT.
int kvq__quota_change(struct kvq__core *core, const struct kvq__peer *peer,
                      const struct kvq__override *change, struct kvq__override *out, char *text);
// Puts that in effect, at once: what is above a limit stays, and nothing more is had. KVQ_E_INVALID
// (there is no such namespace), KVQ_E_LIMIT, KVQ_E_NO_MEMORY.
int kvq__quota_apply(struct kvq__core *core, const struct kvq__override *override, char *text);

// Told by who keeps sessions on disk: how many bytes of a namespace's are there, as often as that
// changes; and that more were refused, in words.
void kvq__disk_used(struct kvq__core *core, const char *ns, uint64_t bytes);
void kvq__disk_refused(struct kvq__core *core, const char *ns, const char *text);

// ---- Work ----

// Work that threads may share. While it is under way, run() may be called for each item once;
// it touches only memory that the core holds for it, and the workspace: one for each thread, of
// kvq_workspace_bytes(), 64-byte aligned.
struct kvq__job {
    uint32_t n_items; // at least 1
    void (*run)(struct kvq__job *job, uint32_t item, void *workspace);
    bool brief; // over sooner than a thread that sleeps would be awake
};

// KVQ__GPU: under way on a GPU; kvq__queue_gpu_idle says when to go on. KVQ__AGAIN: part of it is
// done, and others are to have their turn before it goes on.
enum kvq__progress { KVQ__DONE, KVQ__RUN, KVQ__WAIT, KVQ__GPU, KVQ__AGAIN };

// Private memory of the queue that the poller copies a request to before it starts it: one
// header, and room for KVQ_MAX_BATCH entries and KVQ_MAX_LAYERS layers of a STEP. The poller has
// checked header.count against KVQ_MAX_BATCH, and of a STEP header.layer against KVQ_MAX_LAYERS;
// everything else is checked here.
struct kvq_request *kvq__queue_header(struct kvq__queue *queue);
struct kvq_entry_wire *kvq__queue_entries(struct kvq__queue *queue);
struct kvq_step_layer *kvq__queue_layers(struct kvq__queue *queue);

// Validates the request and takes it as far as it goes. One request of a queue at a time.
enum kvq__progress kvq__request_start(struct kvq__queue *queue);
// After KVQ__RUN: every item of the job has been run (the caller's synchronization makes their
// writes visible here). After KVQ__WAIT and KVQ__AGAIN: look again. After KVQ__GPU:
// kvq__queue_gpu_idle.
enum kvq__progress kvq__request_continue(struct kvq__queue *queue);
// Whether all GPU work of the queue's requests has ended, those included that are done and whose
// completions were published. A queue may be closed only then.
bool kvq__queue_gpu_idle(const struct kvq__queue *queue);
// The queue is about to be closed, or its client is going: a request that waits, for room or for
// others, ends as cancelled when it is looked at again, and GPU work that waits for the client
// waits no longer. (With events that is not to be had: it waits until the client's stream goes on,
// or its process ends.)
void kvq__queue_ending(struct kvq__queue *queue);

// After KVQ__RUN: what to run; the same job until kvq__request_continue.
struct kvq__job *kvq__queue_job(struct kvq__queue *queue);
// After KVQ__DONE, until the next start: what to publish. completion->count results follow. The
// poller fills in completion->slots. A status of KVQ_E_PROTOCOL means that it should cut the client
// off.
const struct kvq_completion *kvq__queue_completion(const struct kvq__queue *queue);
const struct kvq_result *kvq__queue_results(const struct kvq__queue *queue);

// Looks how far GPUs have come, lets go of what ended work held, and takes moves further. True if
// anything had ended.
bool kvq__core_poll(struct kvq__core *core);
// Whether GPUs are at work, and if so has `wake` called from a thread of the driver's once some of
// it may have ended. kvq__core_poll looks then.
bool kvq__core_wake(struct kvq__core *core, void (*wake)(void *context), void *context);
// When all clients are gone: returns once nobody calls `wake` any more.
void kvq__core_hush(struct kvq__core *core);

// Packing that no request waits for yet, so that the next one need not. NULL if there is none
// (or one is under way); the poller runs it when there is nothing else to do, and then says so.
struct kvq__job *kvq__background_start(struct kvq__core *core);
void kvq__background_done(struct kvq__core *core);

#endif
