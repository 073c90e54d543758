// SPDX-License-Identifier: Apache-2.0
//
// The state of the core. Only the core's files and tests include this header and its parts: those
// that it includes.
//
// Ownership: the core owns namespaces and clients; a namespace owns its sessions and
// extents; a session owns its layers and formats. Its page table comes in
// sheets, its token ids in parts: forks share those that can change no more. A sheet holds one
// reference to each block that it names, however many have it. Requests in flight hold references
// to sessions and buffers.
//
// What keeps running work safe: of a session that their request references, workers read what never
// changes while it lives (shapes, formats, layouts and codebooks of its layers, and which layer's
// pages each reads), and `learned` of a layer whose packer is their job. They never read its counts
// or page tables: before its job starts a request copies the addresses of the blocks it needs. A
// block that has lost its last reference is free once all requests (their "flights") have ended
// that began before. If only one session had the block, it is free already when no request
// references that session and no stream packs it (kvq__session_quiet).
#ifndef KVQ_DAEMON_CORE_STATE_H
#define KVQ_DAEMON_CORE_STATE_H

#include <sys/queue.h>

#include "daemon/core/core.h"
#include "daemon/core/mem/pool.h"
#include "daemon/core/mem/quota.h"
#include "daemon/core/mem/room.h"
#include "daemon/core/request/request.h"
#include "daemon/core/session/client.h"
#include "daemon/core/session/due.h"
#include "daemon/core/session/ended.h"
#include "daemon/core/session/lookup.h"
#include "daemon/core/session/pages.h"
#include "daemon/core/session/prefix.h"
#include "daemon/core/session/recent.h"
#include "daemon/core/session/session.h"

// ---- Namespaces (namespace.c) ----

RB_HEAD(kvq__session_tree, kvq__session);

struct kvq__namespace {
    TAILQ_ENTRY(kvq__namespace) link; // in the order of their numbers
    struct kvq__core *core;
    uint64_t number; // 1, 2, ..
    char name[KVQ_NAME_BYTES];
    struct kvq__quota quota, base_quota; // base_quota: without what was set at run time
    uint32_t quota_set;                  // which limits were: bits 1 << enum kvq__limit
    uint64_t used[KVQ__LIMITS];
    uint64_t exempt[KVQ__LIMITS]; // the part of `used` that the limits do not count
    struct kvq__refusals refused[KVQ__LIMITS];
    enum kvq__limit last_refused;
    uint32_t *uids, *gids;
    uint32_t n_uids, n_gids;
    struct kvq__demand demands[KVQ__LIMITS];
    // Its requests that wait for room (admission.c).
    struct kvq__line lines[KVQ__LIMITS];                                // below its own limits
    struct kvq__waits at_limit[KVQ__LIMITS], at_pool[1 + KVQ_MAX_GPUS]; // how many, and where
    uint32_t n_waits;                       // for how many of these some wait
    uint64_t full_event_at, quota_event_at; // when its last KVQ__EVENT_MEMORY_FULL was sent, ...
    uint64_t not_parked_event_at;           // and KVQ__EVENT_NOT_PARKED; 0: none yet
    bool configured;
    bool lenient; // table bytes are taken for a moment only: they count, but are not refused
    LIST_HEAD(, kvq__export_record) exports;
    struct kvq__arena arenas[1 + KVQ_MAX_GPUS]; // of each pool
    struct kvq__session_list sessions;          // in the order of their ids
    struct kvq__session_tree by_id;             // the same sessions, as a tree
    struct kvq__session_list fetches; // sessions that are wanted back, in the order of asking
    uint32_t n_reading;               // sessions that store jobs fetch
    struct kvq__prefixes prefixes;
    char (*share_with)[KVQ_NAME_BYTES]; // namespaces whose sessions may begin with its prefixes
    uint32_t n_share_with;
};

bool kvq__namespace_allows(const struct kvq__namespace *ns, const struct kvq__peer *peer);
// Finds the one of that name (NULL or empty: the peer's own, made if need be) and checks that
// the peer may use it. KVQ_E_PERMISSION, or for administrators KVQ_E_NO_NAMESPACE.
int kvq__namespace_get(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                       struct kvq__namespace **ns, char *text);
// The same without making any: *ns is NULL, and 0 is returned, for a user's own that has had
// nothing yet. `full` gets its name.
int kvq__namespace_find(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                        struct kvq__namespace **ns, char full[KVQ_NAME_BYTES], char *text);
// Whether sessions of the namespace of that name may share this one's prefixes.
bool kvq__namespace_shares(const struct kvq__namespace *ns, const char *with);
void kvq__namespaces_close(struct kvq__core *core);
// Reports that a pool has refused so many bytes with KVQ_E_NO_MEMORY or KVQ_E_QUOTA, and why no
// session made room (NULL: unknown). At most one event a second for each namespace. Does nothing
// for other codes.
void kvq__namespace_full(struct kvq__core *core, struct kvq__namespace *ns,
                         const struct kvq__pool *pool, uint64_t bytes, int code, const char *why);

// ---- Exports (export.c) ----

// A client was told of the extents of a namespace in one pool, up to a serial number. It may have
// mapped them, and nothing can unmap them while the client lives, whatever it says it did not hear.
struct kvq__export_record {
    LIST_ENTRY(kvq__export_record) link; // in the namespace
    const struct kvq__client *client;
    const struct kvq__pool *pool;
    uint32_t serial; // told up to this one,
    uint32_t before; // before the last time up to this,
    uint32_t mapped; // and ever up to this
};

void kvq__exports_drop(struct kvq__client *client); // it is gone

// ---- Packing (pack.c) ----

// Packing of one layer that no request waits for.
struct kvq__packer {
    struct kvq__job job;
    struct kvq__flight flight;
    struct kvq__session *session; // referenced; NULL = idle
    uint32_t layer;
    uint64_t first, end; // tokens
    uint8_t *extras;
    struct kvq__pack_sample *sample; // NULL: none
    struct kvq_page *pages;          // KVQ__PACKER_PAGES of them, from the page of `first` on
};
enum { KVQ__PACKER_PAGES = 64 };
static_assert(KVQ__PACKER_PAGES * KVQ_BLOCK_TOKENS >= KVQ_MAX_LEARN, "a prompt is learned at once");

// ---- The core (core.c) ----

TAILQ_HEAD(kvq__client_list, kvq__client);
TAILQ_HEAD(kvq__namespace_list, kvq__namespace);
TAILQ_HEAD(kvq__flight_list, kvq__flight);
struct kvq__staging;
struct kvq__park;
struct kvq__forget;

// An eviction under way: a session, with all its shards, that leaves a pool to make room for others
// (evict.c).
struct kvq__evicting {
    uint64_t ticket;                      // of its move or parking; 0 = none
    uint64_t session, bytes;              // id of its first shard; bytes that the pool gains
    uint64_t asker;                       // ticket of the caller that asked for it; 0: nobody did
    const struct kvq__namespace *ns, *by; // the session's, and the caller's or NULL
    bool demotes;
};

LIST_HEAD(kvq__session_bucket, kvq__session);
enum { KVQ__DUE_SLOTS = 4096 }; // nine minutes

// ---- What is to be deleted of the store (park_orders.c) ----

// What is stored under a name because a session was parked, and is to go now that it has ended.
enum kvq__forget_phase {
    KVQ__FORGET_WAITS,
    KVQ__FORGET_TAKEN,   // an order for it is out
    KVQ__FORGET_IN_LINE, // likewise, but whoever has the order waits for the copy's name
    KVQ__FORGET_LATER,   // that has failed: it waits again from `at` on
    KVQ__FORGET_DONE,    // and is remembered until `at`, see kvq__park_forgotten
    KVQ__FORGET_PHASES,
};

struct kvq__forget {
    RB_ENTRY(kvq__forget) tree;    // by namespace, name and stamp
    TAILQ_ENTRY(kvq__forget) link; // of its phase
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    uint64_t stamp;
    enum kvq__forget_phase phase;
    bool failed; // once at least
    uint64_t at;
};
TAILQ_HEAD(kvq__forget_list, kvq__forget);
RB_HEAD(kvq__forget_tree, kvq__forget);

struct kvq__forgets {
    struct kvq__forget_tree tree;
    struct kvq__forget_list in[KVQ__FORGET_PHASES];
    uint32_t n_out; // TAKEN
};

// Hash tables of sessions, by id and by name. n_buckets is a power of two and grows with the
// sessions.
struct kvq__lookup {
    struct kvq__session_bucket *ids, *names;
    uint32_t n_buckets;
    uint8_t key[16]; // of the hash of names, which clients choose
    uint64_t looks;  // sessions visited so far by searches and lists; for tests
};

// Functions of upper rooms that lower rooms of the core call. core.c fills the table in; the
// headers of the upper rooms document the functions.
struct kvq__upward {
    // Memory calls:
    bool (*block_reclaim)(struct kvq__core *core, const struct kvq__namespace *ns,
                          const struct kvq__pool *pool, int code,
                          bool *later); // kvq__prefix_reclaim
    bool (*table_reclaim)(
        struct kvq__namespace *ns); // kvq__ended_reclaim, kvq__prefix_reclaim_node
    bool (*session_quiet)(const struct kvq__session *session);
    // Sessions call, of requests:
    void (*step_leave)(struct kvq__session *session);
    void (*step_undo)(struct kvq__session *session);
    void (*step_publish)(struct kvq__session *session);
    void (*gpu_commit)(struct kvq__session *session, struct kvq__table *table,
                       struct kvq_result *result);
    // And of residency:
    void (*opened)(struct kvq__session *session); // and is about to be used
    void (*ending)(struct kvq__session *session); // it is about to end
    void (*follow_leave)(struct kvq__session *session);
    int (*follow)(struct kvq__session *session, const struct kvq__node *last);
    bool (*move_asks)(const struct kvq__session *session);
    struct kvq__pool *(*move_place)(const struct kvq__session *session);
    // Requests call:
    bool (*park_asks)(struct kvq__queue *queue, uint32_t entry, struct kvq__session *session);
    bool (*demoted_asks)(struct kvq__queue *queue, uint32_t entry,
                         const struct kvq__handle *handle);
    enum kvq__help (*evict_for)(struct kvq__core *core, const struct kvq__eviction_request *asked);
};

// What is on its way (residency/ticket.h).
enum kvq__ticket_kind {
    KVQ__TICKET_MOVE,
    KVQ__TICKET_PARK,
    KVQ__TICKET_FETCH,
    KVQ__TICKET_KINDS,
};

// The core. What one room keeps stands together, with the file that writes it.
struct kvq__core {
    struct kvq__core_config config;
    const struct kvq__upward *up;
    uint64_t now;
    bool draining, faulted, closing;
    struct kvq__lookup lookup;
    struct kvq__client_list clients;
    struct kvq__namespace_list namespaces;
    uint32_t n_clients, n_sessions, n_steps;
    uint64_t tokens; // of all sessions
    struct kvq__counts counts;
    struct kvq__refused refused; // requests of rings
    // The last number, serial or stamp that was given out. A STEP has one of `check`, by which it
    // finds sessions that stand in several of its entries.
    struct {
        uint64_t flight, namespace, client, session, serial, check, stamp;
    } last;

    // ---- mem/ ----

    struct kvq__pool pools[1 + KVQ_MAX_GPUS]; // the host's first
    uint32_t n_pools;
    struct kvq__flight_list flights; // oldest first
    // Blocks and sessions whose memory is yet to be freed (pool.c, ended.c).
    struct {
        struct kvq__block_row deferred;  // by retired.at; some stand behind others, retired later
        struct kvq__session_list givers; // that may have blocks there (session->giver.given)
        uint32_t n_givers;
        struct kvq__session_list ended; // the oldest first
        uint64_t left;                  // work left for it in this turn
        uint64_t done;                  // work that it has taken in all
        uint64_t shortage_looks;        // calls of kvq__shortage_counts; for tests
    } freeing;

    // ---- gpu/ ----

    uint64_t refusal_event_at; // when a refused launch was told last
    // Work streams (session/work_stream.c).
    struct {
        LIST_HEAD(, kvq__work_stream) used, spare; // spare: no client has them any more
        struct kvq__stream_use *common;            // what they share, for each GPU
    } streams;

    // ---- session/ ----

    // Sessions whose time comes (due.c).
    struct {
        struct kvq__session_bucket lists[KVQ__DUE_SLOTS + 1];
        struct kvq__session_bucket *slots[KVQ__DUE_SLOTS]; // all of these but one,
        struct kvq__session_bucket *now; // of the slot before `slot`, those yet to be looked at
        uint64_t slot;                   // the first slot that may have sessions
    } due;
    // Whose prompts may hold memory (exact.c).
    struct {
        struct kvq__session_list list;
        uint32_t n;
    } prompts;
    struct kvq__session_list seals; // sessions whose next page may be final, and go to the index
    struct kvq__session_list finishing;    // ended sessions, before they are there (finish.c)
    LIST_HEAD(, kvq__table) closed_tables; // that requests under way still use

    // ---- request/ ----

    uint32_t n_prepared;   // sessions that wait for their groups
    uint32_t n_committing; // sessions with a STEP under way on a GPU
    // Packing (pack.c, gpu_pack.c, pack_error.c).
    struct {
        struct kvq__session_list host, gpus;
        struct kvq__queue *queue; // no client's: what nobody asks for goes through it; NULL: no GPU
        struct kvq__packer packer;
        struct kvq__pack_sample sample;
        struct kvq__pack_error *errors; // room for KVQ_MAX_PACK_ERRORS
        uint32_t n_errors;
    } packing;
    // What requests wait for (admission.c).
    struct {
        uint64_t extents_made; // changes when extents that requests wait for are there
        struct kvq__line lines[1 + KVQ_MAX_GPUS]; // of those who wait for room in each pool
        struct kvq__waiters waiters; // in all lines, those of namespaces included; in any order
        uint32_t n_waiting;          // namespaces of which some wait
        uint64_t taken;              // blocks that were taken so far
        uint64_t last_ticket, last_attempt;
        uint64_t counted_layers; // that counts of needs have visited so far; for tests
    } room;

    // ---- residency/ ----

    // Sessions that go to make room (evict.c).
    struct {
        struct kvq__evicting places[1 + KVQ_MAX_GPUS][KVQ__EVICT_AT_ONCE]; // of each pool
        uint32_t n;                                                        // in all of them
        uint64_t ended; // of all that were begun, whatever came of it
        uint64_t looks; // looks for a session that may go,
        uint64_t work;  // and layers and blocks that these have visited so far
        struct kvq__demand demands[1 + KVQ_MAX_GPUS]; // of each pool
        uint64_t demote_after; // there was no room on the host; not before then
    } evict;
    // What is on its way (ticket.c).
    struct {
        TAILQ_HEAD(, kvq__ticket) list; // the oldest first
        uint32_t n[KVQ__TICKET_KINDS];  // of each kind, those over included
        uint64_t last;
    } tickets;
    // Sessions between places (move.c, demote.c).
    struct {
        struct kvq__mover *mover; // made at the first move
        uint32_t n;               // sessions that have a move
        uint32_t n_demoted;       // sessions that have a home elsewhere
    } moving;
    // What has changed since it was saved (unsaved.c).
    struct {
        struct kvq__session_list lists[KVQ__UNSAVED_LISTS]; // KVQ__SAVED is empty
        uint32_t n;                                         // in all of them
        uint64_t asks; // how often kvq__core_unsaved was called
    } unsaved;
    // Between memory and disk (save.c, restore.c, park.c, park_orders.c, staging.c).
    struct {
        LIST_HEAD(, kvq__save) saves;
        LIST_HEAD(, kvq__restore) restores;
        uint32_t n_turning_back;            // of these
        LIST_HEAD(, kvq__staging) stagings; // that nobody uses just now
        struct kvq__forgets forgets;
        uint32_t n_offloaded;         // sessions that are parked
        uint32_t n_wanted, n_reading; // of all namespaces
        uint32_t n_loading;           // sessions with layers that are yet to be read
    } disk;
};

#endif
