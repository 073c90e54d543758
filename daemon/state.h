// SPDX-License-Identifier: Apache-2.0
//
// The state of the core, shared by its files and its tests; nobody else includes this.
//
// Ownership: the core owns namespaces and clients; a namespace owns its sessions and its size
// classes, these their extents; a session owns its layers, formats and page tables, and these hold
// one reference to each block they name. Requests in flight hold pins on sessions and buffers.
//
// What keeps running work safe: workers never look at sessions or page tables. A request copies
// the addresses it needs before its job starts, and as long as any request (a "flight") that
// started earlier is under way, no block that lost its last reference is given out again.
#ifndef KVQ_DAEMON_STATE_H
#define KVQ_DAEMON_STATE_H

#include <sys/queue.h>

#include "daemon/core.h"
#include "daemon/formats.h"
#include "daemon/gpu.h"
#include "daemon/prefix.h"

enum {
    KVQ__HANDLE_CHUNK = 64, // handles allocated at a time
    KVQ__HANDLE_CHUNKS = KVQ_MAX_OPEN / KVQ__HANDLE_CHUNK,
    KVQ__ARENA_BYTES = 4 << 20, // scratch of a queue besides partial results
    KVQ__WAVE_ROOM = 17 << 10,  // of a chunk, for what a wave needs whatever its entries
};

// ---- Pool (pool.c) ----

struct kvq__block {
    uint32_t refs;
    bool exempt;    // its namespace's limit does not count it: a move has copied it, or is about to
    uint64_t saved; // the store's id of its bytes, which do not change any more; 0 = none
    struct kvq__extent *extent;
    uint64_t retired_at; // when it last lost a reference: the last flight that may look at it
    STAILQ_ENTRY(kvq__block) link; // in its extent's free list, or in limbo
};
STAILQ_HEAD(kvq__block_list, kvq__block);

// A counted reference to a block; data NULL = none.
struct kvq__ref {
    uint8_t *data;
    struct kvq__block *block;
};

struct kvq__extent {
    TAILQ_ENTRY(kvq__extent) link; // in its class's list, or the pool's list of empty ones
    struct kvq__memory memory;
    uint32_t number;             // in its pool
    struct kvq__class *owner;    // NULL while empty
    struct kvq__namespace *last; // whose bytes it holds; NULL = zeroed
    uint32_t serial;             // it was the namespace's so-many-th extent of the pool
    bool told;                   // to a client: it will never be another namespace's
    struct kvq__block *blocks;
    uint32_t n_blocks, used; // used: referenced or in limbo
    uint64_t empty_since;
    struct kvq__block_list free;
};
TAILQ_HEAD(kvq__extent_list, kvq__extent);

// The extents of one pool and namespace that are cut into blocks of one size.
struct kvq__class {
    LIST_ENTRY(kvq__class) link;
    struct kvq__namespace *ns;
    struct kvq__pool *pool;
    uint64_t block_bytes;
    struct kvq__extent_list extents; // those with free blocks first
};

// The memory of one place: the host's or a GPU's. Blocks of a GPU have its addresses, which nobody
// here looks behind.
struct kvq__pool {
    struct kvq__gpu *gpu; // NULL: the host's
    struct kvq__memory_ops memory;
    uint64_t budget, extent_bytes;
    uint64_t extents_taken; // bytes of extents, the empty ones included
    uint64_t used_bytes;    // of blocks, limbo included
    uint64_t huge_bytes;    // of extents in explicit huge pages
    uint64_t *numbers;      // a bit for each number, set if an extent has it
    struct kvq__extent_list empty;
};

// Something whose jobs run; see the top of this file.
struct kvq__flight {
    TAILQ_ENTRY(kvq__flight) link;
    uint64_t number; // 0 = not under way
};

const char *kvq__pool_name(const struct kvq__pool *pool);              // "host" or the GPU's UUID
static inline uint32_t kvq__pool_extents(const struct kvq__pool *pool) // that it may have
{
    return (uint32_t)(pool->budget / pool->extent_bytes);
}
int kvq__block_new(struct kvq__core *core, struct kvq__namespace *ns, struct kvq__pool *pool,
                   uint64_t bytes, struct kvq__ref *ref);
struct kvq__ref kvq__block_share(struct kvq__ref ref);
// Says whether the limit of the block's namespace is to count it; until it is freed.
void kvq__block_exempt(struct kvq__block *block, bool exempt);
// Gives the reference up and clears it. Accepts none.
void kvq__block_drop(struct kvq__core *core, struct kvq__ref *ref);
void kvq__flight_begin(struct kvq__core *core, struct kvq__flight *flight);
void kvq__flight_end(struct kvq__core *core, struct kvq__flight *flight);
// `to` becomes the flight that `from` was; `from` is then not under way.
void kvq__flight_move(struct kvq__core *core, struct kvq__flight *from, struct kvq__flight *to);
// Gives back extents that have been empty since before `now - age`.
void kvq__pools_trim(struct kvq__core *core, uint64_t age_ns);

// ---- Namespaces (namespace.c) ----

LIST_HEAD(kvq__class_list, kvq__class);
TAILQ_HEAD(kvq__session_list, kvq__session);

struct kvq__namespace {
    TAILQ_ENTRY(kvq__namespace) link;
    char name[KVQ_NAME_BYTES];
    uint64_t limit_bytes, used_bytes;
    uint64_t exempt_bytes; // of used_bytes, that the limit does not count
    uint32_t limit_sessions, n_sessions;
    uint32_t *uids, *gids;
    uint32_t n_uids, n_gids;
    uint64_t told_full_at; // when its last KVQ__EVENT_MEMORY_FULL was sent
    bool configured;
    uint32_t extents[1 + KVQ_MAX_GPUS]; // that it ever had of each pool
    LIST_HEAD(, kvq__telling) tellings;
    struct kvq__class_list classes;
    struct kvq__session_list sessions;
    struct kvq__prefixes prefixes;
    char (*share_with)[KVQ_NAME_BYTES]; // namespaces whose sessions may begin with its prefixes
    uint32_t n_share_with;
};

bool kvq__namespace_allows(const struct kvq__namespace *ns, const struct kvq__peer *peer);
// Finds the one of that name (NULL or empty: the peer's own, made if need be) and checks that
// the peer may use it.
int kvq__namespace_get(struct kvq__core *core, const struct kvq__peer *peer, const char *name,
                       struct kvq__namespace **ns, char *text);
void kvq__namespaces_close(struct kvq__core *core);
// Tells that memory ran out, at most once a second for each namespace.
void kvq__namespace_full(struct kvq__core *core, struct kvq__namespace *ns, int code);

// ---- Exports (export.c) ----

// A client that was told of a namespace's extents of one pool, up to a serial number, and so may
// have them mapped as long as it is there.
struct kvq__telling {
    LIST_ENTRY(kvq__telling) link; // in the namespace
    const struct kvq__client *client;
    const struct kvq__pool *pool;
    uint32_t serial;
};

// Whether a client that is still there was told of it.
bool kvq__extent_is_told(const struct kvq__extent *extent, const struct kvq__pool *pool);
void kvq__tellings_drop(struct kvq__client *client); // it is gone

// ---- Sessions (session.c) and their pages (pages.c) ----

// Blocks of 128 positions of one layer.
struct kvq__pageref {
    struct kvq__ref packed, raw;
};

enum kvq__append_state { KVQ__NOT_APPENDED, KVQ__APPENDING, KVQ__APPENDED };

struct kvq__layer {
    const struct kvq_format *format; // a row of the table, or one of the session's own
    struct kvq_shape shape;
    struct kvq_layout layout, raw_layout;
    struct kvq_book book;             // codebook formats
    struct kvq_book gpu_book;         // its copy on the session's GPU; zeros without
    void *book_hold;                  // keeps its tables; NULL = none
    uint64_t packed_bytes, raw_bytes; // of a block; packed_bytes 0 for raw formats
    uint32_t source;                  // layer whose pages it reads: its own number, or kv_from
    uint32_t learn;                   // tokens the format learns from; 0 = none
    uint32_t keep;                    // tokens that must stay readable behind the newest; 0 = all
    // The rest is meaningful for layers that have their own pages.
    struct kvq__pageref *pages;
    struct kvq__ref extras;      // formats that keep some; from the first page on
    bool learned;                // its extras know what the format learns
    uint32_t first_page;         // pages before it are behind the window and freed
    uint32_t raw_page;           // raw blocks of pages before it are released
    uint64_t base;               // a fork's: tokens below it are only there packed
    uint64_t packed;             // tokens [0, packed) are packed
    uint64_t enqueued;           // will be so if the STEP under way on a GPU commits; 0 = none
    const void *packer;          // the request or packer whose job is packing it; NULL = none
    struct kvq__lane *pack_lane; // on a GPU: where units were packed last
    uint64_t pack_number;        // and the work's number there
    uint8_t append;              // enum kvq__append_state, in the open step
    bool loading;                // its blocks are yet to be read from a store
};

struct kvq__handle {
    struct kvq__client *client;
    struct kvq__session *session; // NULL if free or taken
    uint32_t index, generation;
    bool used, taken, read_only;
    int lost; // taken because its session could not be read from a store: why; else 0
    struct kvq__table *table;     // NULL = none
    LIST_ENTRY(kvq__handle) link; // in its session's handles, or its client's free ones
};
LIST_HEAD(kvq__handle_list, kvq__handle);

struct kvq__session {
    TAILQ_ENTRY(kvq__session) link; // in its namespace
    struct kvq__core *core;
    struct kvq__namespace *ns;
    struct kvq__pool *pool; // where all its blocks lie
    uint64_t id;
    char name[KVQ_NAME_BYTES], model[KVQ_FINGERPRINT_BYTES];
    char salt[KVQ_NAME_BYTES], adapter[KVQ_NAME_BYTES];
    struct kvq__layer *layers;
    uint32_t n_layers, n_owned;       // n_owned: layers with their own pages
    struct kvq_format *formats;       // composed ones, each once; NULL = none
    uint32_t n_formats;               // of n_layers that there is room for
    char own_format[KVQ_FORMAT_NAME]; // the configuration's that it was opened with, or empty
    uint32_t shard, shards, max_rollback;
    uint64_t prompt_tokens, keep_ns;
    uint8_t path, v_rotation, dtype;
    bool drop_on_detach, save_on_detach, dropped;

    uint64_t tokens; // committed
    uint64_t floor;  // truncation cannot go below
    uint64_t saturated;
    uint64_t commits, saved_commits; // number of the last change, and of the last that is saved
    uint32_t n_loading;              // layers
    struct kvq__restore *restore;    // that reads them; NULL = none
    struct kvq__ids ids;             // of its tokens, as far as they are known
    uint64_t prefix_tokens;          // that it began with
    bool foreign;                    // some of its blocks are another namespace's
    uint32_t n_pages, page_capacity; // of every layer's table
    struct kvq__pageref *table;      // memory of all layers' tables

    struct kvq__handle_list handles;
    LIST_HEAD(, kvq__table) tables;
    struct kvq__handle *writer;
    uint32_t readers;
    uint64_t idle_since; // last use; while nobody has it open, the keep time counts from here

    struct kvq__step *step; // the open step it is in
    LIST_ENTRY(kvq__session) step_link;
    uint32_t step_tokens, step_layers; // layers appended
    uint64_t step_serial;              // changes with every beginning and end of a step
    uint64_t step_queue;               // number of the queue that began it
    bool settling;                     // a STEP's work is under way on a GPU, see settle.h
    bool untold;                       // its writer has yet to hear that values were not finite

    struct kvq__group *group; // of named sessions with several shards; else NULL
    struct kvq__move *move;   // to another place, under way or queued; NULL = none
    bool prepared;            // its step has ended and waits for those of the other shards
    uint32_t undone_by;       // 1 + shard that ended its last step by leaving; 0 = none

    // Held by requests under way.
    uint32_t pins;
    struct kvq__gpu_counts *counts; // of the open step, on a GPU; NULL on the host
    uint32_t reading;               // entries that read committed tokens
    uint64_t reading_floor;         // lowest count they may stand at; meaningless if reading is 0
    bool release_due;               // pages were kept for them
    uint32_t tail_use;              // entries that write or read the open step's tokens
    struct kvq__queue *exclusive;   // the request that changes what is committed

    bool pack_queued;
    TAILQ_ENTRY(kvq__session) pack_link;
};

// A session with zeroed layers that nobody sees yet; NULL without memory. End it by
// kvq__session_free before and by kvq__session_end after it was published.
struct kvq__session *kvq__session_new(struct kvq__core *core, struct kvq__namespace *ns,
                                      uint32_t n_layers);
void kvq__session_free(struct kvq__session *session);
// Takes what a session needs besides blocks where its pool is a GPU's, once its layers are built.
// 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
int kvq__session_place(struct kvq__session *session);
void kvq__session_publish(struct kvq__session *session);
// The first of that name, whichever shard it is; NULL = none.
struct kvq__session *kvq__session_named(struct kvq__namespace *ns, const char *name);
// As kvq__session_find.
int kvq__session_get(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                     const char *name, struct kvq__session **s, char *text);
// Takes it out of its namespace, makes its handles stale, gives its blocks back.
void kvq__session_end(struct kvq__session *session);
void kvq__session_pin(struct kvq__session *session);
void kvq__session_unpin(struct kvq__session *session);
// Nobody has it open any more: drops it or starts its keep time.
void kvq__session_detached(struct kvq__session *session);
int kvq__namespace_room(struct kvq__namespace *ns, char *text); // for one more session
void kvq__session_fill_info(const struct kvq__session *session, struct kvq__session_info *info);

static inline bool kvq__layer_owns(const struct kvq__session *s, uint32_t layer)
{
    return s->layers[layer].source == layer;
}

// Tokens that a view at `past` tokens reads packed: a function of counts alone.
uint64_t kvq__packed_at(const struct kvq__session *s, const struct kvq__layer *layer,
                        uint64_t past);
// The first token that a view at or above `floor` may still need: what is behind is freed.
uint64_t kvq__first_kept(const struct kvq__layer *layer, uint64_t floor);
// What a view at `past` tokens needs of the layer besides pages: NULL while nothing is packed.
const uint8_t *kvq__extras_view(const struct kvq__session *s, const struct kvq__layer *layer,
                                uint64_t past);
// Outliers that count for each KV head, in the queue's arena; NULL into *counts if the format has
// none. False if there is no room left in this wave.
bool kvq__outliers_view(struct kvq__queue *q, const struct kvq__layer *layer,
                        const uint8_t **counts);
// What a layer's extras block holds at first, and what of another's a fork keeps below
// to->packed. On a GPU these wait for copies (session.c). 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
int kvq__extras_init(const struct kvq__session *s, const struct kvq__layer *layer);
int kvq__extras_fork(const struct kvq__session *s, const struct kvq__layer *from,
                     const struct kvq__layer *to);
// Makes the tables long enough for so many pages.
int kvq__pages_grow(struct kvq__session *s, uint32_t pages);
// Makes room for `tokens` tokens in all layers, or changes nothing.
int kvq__pages_reserve(struct kvq__session *s, uint64_t tokens);
// Gives back the pages that `tokens` tokens do not need, and with the last page the extras.
void kvq__pages_trim(struct kvq__session *s, uint64_t tokens);
// Releases what no view at or above the floor can read any more.
void kvq__pages_release(struct kvq__session *s);
// The pages of `tokens` tokens as a view at `past` tokens sees them. Returns their number.
uint32_t kvq__pages_view(const struct kvq__session *s, uint32_t layer, uint64_t past,
                         uint64_t tokens, struct kvq_page *pages);
// How many of the first `tokens` tokens the page holds.
static inline uint16_t kvq__page_part(uint64_t tokens, uint32_t page)
{
    uint64_t start = (uint64_t)page * KVQ_BLOCK_TOKENS;
    if (tokens <= start)
        return 0;
    return (uint16_t)(tokens - start < KVQ_BLOCK_TOKENS ? tokens - start : KVQ_BLOCK_TOKENS);
}
static inline uint32_t kvq__pages_of(uint64_t tokens)
{
    return (uint32_t)((tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS);
}

// The pool of a place. NULL with a text if there is none of that name.
struct kvq__pool *kvq__place_find(struct kvq__core *core, const char *place, char *text);

// ---- Saving and restoring (save.c, restore.c; see saved.h) ----

// The session is about to end: what reads its blocks may stop.
void kvq__restore_drop(struct kvq__session *session);
// Whether what the request asks of the session waits for layers that are yet to be read.
bool kvq__is_loading(const struct kvq__queue *queue, const struct kvq__session *session);
static inline bool kvq__is_unsaved(const struct kvq__session *s)
{
    return s->commits != s->saved_commits;
}

// ---- Clients (client.c) ----

struct kvq__buffer {
    uint32_t id; // 0 = free
    uint32_t generation;
    struct kvq__buffer_memory memory;
    uint32_t uses; // by requests under way
    bool removed;
};

// Some of a client's buffers, by their places.
struct kvq__buffer_set {
    uint64_t bits[KVQ_MAX_BUFFERS / 64];
};

struct kvq__step {
    uint64_t number; // the client's; 0 = free
    struct kvq__client *client;
    LIST_HEAD(, kvq__session) sessions;
};

struct kvq__lane;

struct kvq__client {
    TAILQ_ENTRY(kvq__client) link;
    struct kvq__core *core;
    struct kvq__peer peer;
    char name[KVQ_NAME_BYTES];
    uint64_t id, requests, connected_at;
    bool gone;
    uint32_t n_queues, n_buffers, n_handles, n_steps;
    uint64_t buffer_bytes;
    struct kvq__handle *handles[KVQ__HANDLE_CHUNKS];
    struct kvq__handle_list free_handles;
    LIST_HEAD(, kvq__table) tables;
    struct kvq__lane *lanes[KVQ_MAX_GPUS]; // in the order of the core's GPUs; NULL = none yet
    struct kvq__buffer buffers[KVQ_MAX_BUFFERS];
    struct kvq__step steps[KVQ_MAX_STEPS];
};

// 0, KVQ_E_STALE or KVQ_E_TAKEN.
int kvq__handle_get(struct kvq__client *client, uint64_t value, struct kvq__handle **handle);
// KVQ_E_LIMIT or KVQ_E_NO_MEMORY. The handle has no session yet.
int kvq__handle_new(struct kvq__client *client, struct kvq__handle **handle);
void kvq__handle_free(struct kvq__handle *handle);
// Ties a new handle to a session, as its writer or as a reader.
void kvq__handle_attach(struct kvq__handle *handle, struct kvq__session *session, bool read_only);
// Takes the handle off its session (with its part of an open step); the handle stays.
void kvq__handle_detach(struct kvq__handle *handle);
// Detaches and frees it; the session goes by its on_detach if this was the last handle.
void kvq__handle_close(struct kvq__handle *handle);
static inline uint64_t kvq__handle_value(const struct kvq__handle *handle)
{
    return (uint64_t)handle->generation << 32 | handle->index;
}
struct kvq__buffer *kvq__buffer_get(struct kvq__client *client, uint32_t id); // NULL = none
// Uses a buffer until the set is released; a buffer that is in it already only once. NULL is fine.
void kvq__buffer_use(struct kvq__client *client, struct kvq__buffer *buffer,
                     struct kvq__buffer_set *set);
// Lets go of all of them, and empties the set.
void kvq__buffers_unuse(struct kvq__client *client, struct kvq__buffer_set *set);

// ---- Steps (step.c) ----

struct kvq__step *kvq__step_find(struct kvq__client *client, uint64_t number); // NULL = none
// It is in a step, or has ended it and waits for the other shards of its group.
static inline bool kvq__in_step(const struct kvq__session *s)
{
    return s->step || s->prepared || s->settling;
}
// Takes a session out of its step, as it was before, and all shards of its group out of theirs.
// Accepts sessions without a step: their groups' steps end all the same.
void kvq__step_leave(struct kvq__session *session);
// A step of a queue's own, which no client can name; opening an open one does nothing.
void kvq__step_open(struct kvq__step *step, struct kvq__client *client);
void kvq__step_join(struct kvq__step *step, struct kvq__session *session, uint32_t tokens,
                    uint64_t queue);
void kvq__step_close_if_empty(struct kvq__step *step);
// This session alone, which is in a step.
void kvq__step_undo(struct kvq__session *session);
// Ends the session's open step. Alone it commits; a shard of a group is prepared, and the last one
// commits all of them. 0, KVQ_E_NONFINITE, KVQ_E_INCOMPLETE, or KVQ_E_POSITION if another shard of
// the group stands elsewhere: after these the session, and its group, are as before the step.
// `result` gets the status and what goes with it; its value on success is the token count that the
// session has, or will have once the group has committed.
int kvq__step_commit(struct kvq__session *session, struct kvq_result *result);
// What became of a session that kvq__step_commit prepared, once the whole request has been looked
// at: another of its entries may have undone it.
void kvq__step_recheck(const struct kvq__session *session, struct kvq_result *result);
// Makes the tokens of a step that was checked the session's.
void kvq__step_publish(struct kvq__session *session);

// ---- Requests (request.c and the files of the operations) ----

enum {
    KVQ__VIEW_K,
    KVQ__VIEW_V,
    KVQ__VIEW_Q,
    KVQ__VIEW_OUT,
    KVQ__VIEW_LSE,
    KVQ__VIEW_LIST,
    KVQ__VIEWS
};

// A block to be copied for a fork: `tokens` tokens of every head.
struct kvq__copy {
    const uint8_t *from;
    uint8_t *to;
    uint32_t layer, tokens;
    bool packed;
};

// Where K and V of an entry's tokens come from.
struct kvq__source {
    const uint8_t *k, *v; // of head 0 and the first token; paged: of page 0
    const struct kvq_wire_view *k_view, *v_view;
    const int32_t *list; // of the engine's pages; NULL = not paged
};

// Units of one layer to pack, among those of others.
struct kvq__layer_pack {
    uint32_t layer, first_item;
    uint64_t first, end;    // tokens
    struct kvq_page *pages; // from the page of `first` on
    uint8_t *extras;
};

// One entry's part of a request under way.
struct kvq__entry {
    struct kvq__session *session; // NULL if the entry failed before it got that far
    struct kvq__handle *handle;   // valid while the request starts, never later
    bool pinned, reading, tail_use, exclusive, packing; // what it holds of the session
    bool packing_all;                                   // layers whose packer is the request
    struct kvq__table *table; // of a STEP, used until it ends; NULL = none
    bool told;                // that values of an earlier STEP were not finite
    bool settles;             // a STEP of its session is under way on a GPU for it
    struct {                  // of a STEP on a GPU: layers of the wave, of the pass under way
        uint32_t from, to;
        size_t room;
        bool more; // layers from `to` on are left for the next wave
    } part;
    uint64_t step_serial;
    uint64_t past; // committed tokens when it started
    uint32_t n_items;
    uint32_t n_pages;
    struct kvq_page *pages;
    struct {           // readback.c
        uint64_t from; // first token that is there
        uint32_t tokens;
        const uint8_t *extras, *pool; // as in struct kvq_reading
    } read;
    union {      // of the pass under way
        struct { // store.c
            struct kvq__source source;
            int32_t *list;
            struct kvq_store_counts *counts; // one for each item
        } store;
        struct {                             // whole.c
            struct kvq__source *sources;     // of each layer
            int32_t *list;                   // NULL = not paged
            struct kvq_store_counts *counts; // one for each item: [layer][page]
        } all;
        struct { // pack.c, all layers
            struct kvq__layer_pack *packs;
            uint32_t n;
        } packs;
        struct {                 // pack.c
            uint64_t first, end; // tokens to pack
            uint8_t *extras;
            uint32_t first_page;
        } pack;
        struct kvq_attend_job attend; // attend.c
        struct {                      // accept.c
            int32_t *list;
        } accept;
        struct { // fork.c
            struct kvq__copy *copies;
            uint32_t room; // copies allocated
            uint64_t handle;
        } fork;
    };
    struct kvq__session *forked; // the new session, pinned; else NULL
};

// Units of any layers and sessions that a wave packs on a GPU (gpu_wave.h).
struct kvq__packs {
    struct kvq__queue *queue; // with an open chunk
    STAILQ_HEAD(, kvq__pack_part) parts;
    uint32_t n_parts, n_units, n_lessons;
    size_t room; // of the chunk, that launching takes
    bool cut;    // there was no room for some
};

// How the entries of a request are worked on: in waves, as many entries at once as the arena
// holds. The stages of a wave run one after the other.
struct kvq__stage {
    uint32_t (*count)(const struct kvq__entry *w); // items of one entry
    void (*item)(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace);
};
struct kvq__pass {
    // Takes what entry i needs from the arena, and may fail the entry. False if there is no room
    // left in this wave; then it has changed nothing.
    bool (*prepare)(struct kvq__queue *q, uint32_t i);
    void (*gather)(struct kvq__queue *q); // once the wave is full; may be NULL
    struct kvq__stage stages[2];
    uint32_t n_stages;
    // On a GPU instead of the stages: enqueues the work of the wave's entries. 0 or a code, by
    // which all of them fail. And the bytes of the arena that it will take for an entry at most.
    int (*gpu_wave)(struct kvq__queue *q);
    size_t (*gpu_room)(const struct kvq__queue *q, uint32_t i);
    void (*finish)(struct kvq__queue *q, uint32_t i); // after the stages; may be NULL
    bool late; // finish comes when all of the request's work has ended, on GPUs as well
};

// What a queue waits for whose request is under way on a GPU.
enum kvq__gpu_wait {
    KVQ__GPU_NONE,
    KVQ__GPU_ROOM, // for its lane to have room again; then the wave is filled
    KVQ__GPU_END,  // for all its work; then the request ends
};

struct kvq__queue {
    struct kvq__core *core;
    struct kvq__client *client;
    uint64_t number; // of this core's run
    struct kvq_request header;
    struct kvq_completion completion;
    struct kvq__buffer *buffers[KVQ__VIEWS]; // of the views in use
    struct kvq__buffer_set held_buffers;
    struct kvq__step *step; // valid while the request starts, never later
    struct kvq__flight flight;
    struct kvq__job job;
    bool busy, running; // running: passes are under way
    enum kvq__gpu_wait gpu_wait;
    struct kvq__gpu *gpu;         // that the wave is for; NULL: the host
    struct kvq__lane *lane;       // with an open chunk, which is the arena then
    bool told;                    // that the client is ready, this request
    uint64_t given[KVQ_MAX_GPUS]; // number of its last work on each lane
    struct {
        struct kvq__gpu *gpu; // NULL: none
        kvq_gpu_ptr ready, done;
        const struct kvq__events *events; // instead of these words, if not NULL
        bool used;
    } timeline;
    uint8_t *own_arena;
    size_t own_arena_bytes;
    bool holding;   // of sessions
    uint32_t items; // attend: what each entry is cut into, at least
    const struct kvq__pass *passes[3];
    struct kvq__packs packs; // that the wave of a STEP has taken in, on a GPU
    bool wave_more;          // the wave's last entry goes on in the next one
    uint32_t n_passes, pass, stage, wave_from, wave_to;
    uint8_t *arena;
    size_t arena_used, arena_bytes;
    size_t wave_start; // of the arena
    size_t wave_room;  // that the wave's GPU work will take
    uint32_t first_item[KVQ_MAX_BATCH + 1];
    struct kvq_step_layer layers[KVQ_MAX_LAYERS]; // of a STEP
    struct kvq__buffer *layer_buffers[KVQ_MAX_LAYERS][2];
    struct kvq__step own_step;
    struct kvq_entry_wire entries[KVQ_MAX_BATCH];
    struct kvq_result results[KVQ_MAX_BATCH];
    struct kvq__entry work[KVQ_MAX_BATCH];
};

// An operation: checks all entries, then takes hold of all that it needs, or of nothing and
// answers KVQ__WAIT; it is then called again from the start. Never blocks.
typedef enum kvq__progress kvq__operation(struct kvq__queue *q);
kvq__operation kvq__op_step_begin, kvq__op_step_end, kvq__op_step_abort, kvq__op_append,
    kvq__op_attend, kvq__op_append_attend, kvq__op_truncate, kvq__op_fork, kvq__op_accept,
    kvq__op_read, kvq__op_step;

// Ends the request with this status.
enum kvq__progress kvq__request_end(struct kvq__queue *q, int status);
// Runs the passes, skipping failed entries, and ends the request.
enum kvq__progress kvq__request_run(struct kvq__queue *q, const struct kvq__pass *const *passes,
                                    uint32_t n);
// Sets an entry's result and returns code.
int kvq__entry_fail(struct kvq__queue *q, uint32_t i, int code, uint64_t value);
// The same of a failure that another shard of the session's group is the cause of.
int kvq__entry_fail_by(struct kvq__queue *q, uint32_t i, int code, uint64_t value, uint32_t shard);
// True if the entry has not failed.
static inline bool kvq__entry_alive(const struct kvq__queue *q, uint32_t i)
{
    return q->results[i].status == 0 && q->work[i].session;
}
// Looks up the entry's handle (and that it may write). Fails the entry if need be.
int kvq__entry_open(struct kvq__queue *q, uint32_t i, bool write);
// The same, and that the session is in the request's step, if it names one, and stands at the
// entry's position.
int kvq__entry_open_at(struct kvq__queue *q, uint32_t i, bool write);
// Finds the request's step: 0, also if it names none, or KVQ_E_NO_STEP.
int kvq__request_step(struct kvq__queue *q);
// Takes hold of the entry's session until the request ends.
void kvq__hold(struct kvq__queue *q, uint32_t i);
void kvq__hold_reading(struct kvq__queue *q, uint32_t i);
void kvq__hold_tail(struct kvq__queue *q, uint32_t i);
void kvq__hold_exclusive(struct kvq__queue *q, uint32_t i);
void kvq__hold_buffers(struct kvq__queue *q);
void kvq__drop_exclusive(struct kvq__queue *q, uint32_t i);
// Lets go of a session that was held and pinned.
void kvq__hold_end(struct kvq__session *session, bool reading, bool tail_use);
// On a GPU: what the values were like that the open step's stores met. Only what has ended counts.
bool kvq__step_nonfinite(const struct kvq__session *s);
// Work of the open step is still under way on a GPU.
static inline bool kvq__step_under_way(const struct kvq__session *s)
{
    return s->pool->gpu && s->tail_use > 0;
}
void kvq__request_release(struct kvq__queue *q);
// For entries that read committed tokens: true if another request changes them just now, or packs
// what this entry would have to pack first.
bool kvq__read_must_wait(const struct kvq__queue *q, uint32_t i, uint32_t layer);
// Holds the session for reading, and the layer for packing if units are due.
void kvq__hold_layer(struct kvq__queue *q, uint32_t i, uint32_t layer);
// Holds all layers for packing that a view at so many tokens reads packed and are not; nobody else
// packs them.
void kvq__hold_packing(struct kvq__queue *q, uint32_t i, uint64_t tokens);
void kvq__packing_release(struct kvq__queue *q, struct kvq__entry *w);
// 64-byte aligned memory until the wave ends; NULL if the arena is used up.
void *kvq__arena_take(struct kvq__queue *q, size_t bytes);

extern const struct kvq__pass kvq__pass_store, kvq__pass_pack, kvq__pass_attend, kvq__pass_read,
    kvq__pass_accept, kvq__pass_fork, kvq__pass_store_all, kvq__pass_pack_all, kvq__pass_publish;
// Lets go of an entry's new session, if there is one.
void kvq__fork_release(struct kvq__queue *q, struct kvq__entry *w);
// What storing needs of the request, of an entry (which kvq__entry_open_at found), and what it
// holds of the entry's session.
int kvq__append_open(struct kvq__queue *q);
int kvq__append_check(struct kvq__queue *q, uint32_t i);
void kvq__append_hold(struct kvq__queue *q, uint32_t i);
// The request ends and the entry has failed: a layer that it has not come to store is as before.
void kvq__append_failed(struct kvq__queue *q, uint32_t i);
// Whether an entry's tensors of a layer are there and can be reached. 0 or a code.
int kvq__append_reach(const struct kvq__queue *q, uint32_t i, const struct kvq_shape *s);
// Takes memory for the entry's page list, NULL if it is not paged; false if there is no room.
bool kvq__store_list(struct kvq__queue *q, uint32_t i, int32_t **list);
// Copies the list out of the client's reach; kvq__paged_check then judges it. 0 or KVQ_E_BOUNDS.
int kvq__list_copy(struct kvq__queue *q, uint32_t i, int32_t *list);
// Where the K and V views' tensors of an entry lie.
struct kvq__source kvq__store_source(const struct kvq__queue *q, uint32_t i, const int32_t *list);
// Stores what one page and KV head have of an entry's tokens. Any thread.
struct kvq__store_part {
    const struct kvq__layer *layer;
    const struct kvq__source *source;
    uint8_t *raw;        // the page's raw block
    uint32_t page, head; // page: counted from that of the entry's first token
};
void kvq__store_page(const struct kvq__queue *q, uint32_t i, const struct kvq__store_part *part,
                     struct kvq_store_counts *counts);

// ---- Views of a request (views.c) ----

uint32_t kvq__dtype_bytes(uint8_t dtype); // 0 if unknown
// What does not depend on an entry: the buffer, dtype, alignment, reserved bytes. 0, KVQ_E_BUFFER,
// KVQ_E_DTYPE, KVQ_E_INVALID, KVQ_E_BOUNDS.
int kvq__view_open(struct kvq__queue *q, uint32_t view);
// Rows [row, row + n) of heads x dim: strides of at least one row where there are several, every
// byte inside the buffer. 0, KVQ_E_INVALID, KVQ_E_BOUNDS.
int kvq__view_rows(const struct kvq__queue *q, uint32_t view, uint32_t heads, uint32_t dim,
                   uint64_t row, uint64_t n);
// Where the row lies, as the place sees it that the wave's sessions are on.
uint8_t *kvq__view_data(const struct kvq__queue *q, uint32_t view, uint64_t row);
// Whether the place of the session can reach the view's buffer: 0, KVQ_E_BUFFER, or KVQ_E_INVALID
// if it is a GPU and the buffer does not start at a multiple of the view's dtype.
int kvq__view_reach(const struct kvq__queue *q, uint32_t view, const struct kvq__session *s);
const struct kvq_wire_view *kvq__view(const struct kvq__queue *q, uint32_t view);
// Paged K and V: pages of the entry's tokens, and that all of them lie inside the buffers. The
// list is the daemon's own copy.
uint32_t kvq__paged_count(const struct kvq_request *r, const struct kvq_entry_wire *e);
int kvq__paged_check(const struct kvq__queue *q, const struct kvq_entry_wire *e,
                     const struct kvq_shape *s, const int32_t *list);
// The list view: as above; n elements of it, NULL if they reach outside. Clients may write there
// at any time: copy, then check.
int kvq__list_open(struct kvq__queue *q);
const int32_t *kvq__list_at(const struct kvq__queue *q, uint64_t element, uint64_t n);

// ---- Packing (pack.c) ----

// Queues the session for packing in the background if any layer has whole units to pack.
void kvq__pack_queue(struct kvq__session *s);
// What of a layer is to be packed at what is committed.
uint64_t kvq__pack_due(const struct kvq__session *s, uint32_t layer);
// Enqueues the packing of queued sessions on GPUs, behind their writers' work (gpu_pack.c). What
// has no room there, or must wait for something, stays queued.
void kvq__pack_on_gpus(struct kvq__core *core);
void kvq__pack_unqueue(struct kvq__session *s);

// Packing of one layer that no request waits for.
struct kvq__packer {
    struct kvq__job job;
    struct kvq__flight flight;
    struct kvq__session *session; // pinned; NULL = idle
    uint32_t layer;
    uint64_t first, end; // tokens
    uint8_t *extras;
    struct kvq_page *pages; // KVQ__PACKER_PAGES of them, from the page of `first` on
};
enum { KVQ__PACKER_PAGES = 64 };
static_assert(KVQ__PACKER_PAGES * KVQ_BLOCK_TOKENS >= KVQ_MAX_LEARN, "a prompt is learned at once");

// ---- The core (core.c) ----

TAILQ_HEAD(kvq__client_list, kvq__client);
TAILQ_HEAD(kvq__namespace_list, kvq__namespace);
TAILQ_HEAD(kvq__flight_list, kvq__flight);
TAILQ_HEAD(kvq__move_list, kvq__move);
struct kvq__ferry;

struct kvq__core {
    struct kvq__core_config config;
    struct kvq__pool pools[1 + KVQ_MAX_GPUS]; // the host's first
    uint32_t n_pools;
    struct kvq__block_list limbo; // ordered by retired_at
    uint64_t now;
    bool draining, faulted;
    struct kvq__client_list clients;
    struct kvq__namespace_list namespaces;
    struct kvq__flight_list flights;           // oldest first
    LIST_HEAD(, kvq__lane) lanes, spare_lanes; // of clients, and of nobody
    uint64_t last_flight, last_client, last_session, last_queue;
    struct kvq__session_list pack_queue, gpu_packs; // on the host, on GPUs
    LIST_HEAD(, kvq__table) closed_tables;          // that requests under way still use
    struct kvq__queue *errands; // of nobody: by it lanes are given such work; NULL without GPUs
    struct kvq__packer packer;
    uint32_t n_clients, n_sessions, n_steps;
    uint32_t n_prepared; // sessions that wait for their groups
    uint32_t n_settling; // sessions with a STEP under way on a GPU
    uint32_t n_moving;   // sessions that have a move
    uint32_t n_moves;    // those included that are over
    uint64_t last_move;
    struct kvq__move_list moves;
    struct kvq__mover *mover; // made at the first move
    uint32_t n_loading;       // sessions with layers that are yet to be read
    LIST_HEAD(, kvq__save) saves;
    LIST_HEAD(, kvq__restore) restores;
    LIST_HEAD(, kvq__ferry) ferries; // that nobody uses just now
    uint64_t steps, attends, appended_tokens, refused_requests, kicked_clients;
};

void *kvq__allocate(struct kvq__core *core, size_t bytes); // zeroed; NULL if there is none
void kvq__deallocate(struct kvq__core *core, void *memory, size_t bytes);
void kvq__event(struct kvq__core *core, enum kvq__event_kind kind, const char *ns,
                const char *session, uint64_t client, const char *text);
// Writes a text (KVQ_TEXT_BYTES; NULL is accepted) and returns code.
int kvq__fail(char *text, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
