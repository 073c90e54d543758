// SPDX-License-Identifier: Apache-2.0
//
// Sessions and their layers: what they are, their life, what can be told about them (session.c).
// Their pages: pages.h. The lists that they stand in: recent.h, due.h, lookup.h, ended.h, finish.h.
// Part of state.h.
#ifndef KVQ_DAEMON_CORE_SESSION_SESSION_H
#define KVQ_DAEMON_CORE_SESSION_SESSION_H

#include <sys/queue.h>
#include <uv/tree.h>

#include "daemon/core/gpu/gpu.h"
#include "daemon/core/mem/pool.h"
#include "daemon/core/session/claims.h"
#include "daemon/core/session/formats.h"
#include "daemon/core/session/prefix.h"

enum kvq__append_state { KVQ__NOT_APPENDED, KVQ__APPENDING, KVQ__APPENDED };

struct kvq__layer {
    const struct kvq_format *format; // a row of the table, or one of the session's own
    struct kvq_shape shape;
    struct kvq_layout layout;
    struct kvq_raw_layout raw_layout;
    struct kvq_book book;             // codebook formats
    struct kvq_book gpu_book;         // its copy on the session's GPU; zeros without
    void *book_hold;                  // keeps its tables; NULL = none
    uint64_t packed_bytes, raw_bytes; // of a block; packed_bytes 0 for raw formats
    uint64_t sink_bytes;              // of the sinks behind the first page's codes; 0 = none there
    uint64_t extras_bytes;            // of its extras block; 0 = none
    uint32_t source;                  // layer whose pages it reads: its own number, or kv_from
    uint32_t learn;                   // tokens the format learns from; 0 = none
    uint32_t keep;                    // tokens that stay readable before the newest one; 0 = all
    // The rest is meaningful for layers that have their own pages.
    struct kvq__sheet **sheets; // the session's
    uint32_t slot;              // its place in each of them
    struct kvq__ref extras;     // if extras_bytes; from the first page on
    bool learned;               // its extras know what the format learns
    uint32_t first_page;        // pages before it are behind the window and freed
    uint32_t raw_page;          // raw blocks of pages before it are released
    uint64_t base;              // of a fork: tokens below it exist in packed form only
    uint64_t packed;            // tokens [0, packed) are packed
    uint64_t enqueued;          // becomes `packed` if the STEP under way on a GPU commits; 0 = none
    // Who alone may pack it: a request (struct kvq__queue) or the core's struct kvq__packer with a
    // job for it, a struct kvq__save that copies it, or a struct kvq__restore that is yet to read
    // it. It is only compared. NULL = nobody.
    const void *packer;
    struct kvq__work_stream *pack_stream; // on a GPU: the work stream that packed units last
    uint64_t pack_number;                 // and the number of that work
    uint8_t append;                       // enum kvq__append_state, in the open step
    uint32_t loading;                     // restores that are yet to read blocks of it from a store
};

struct kvq__handle {
    struct kvq__client *client;
    struct kvq__session *session; // NULL if free or taken
    uint32_t index, generation;
    bool used, taken, read_only;
    int lost; // why its session could not be read from a store; 0: that is not why it was taken
    struct kvq__table *table;     // NULL = none
    LIST_ENTRY(kvq__handle) link; // in its session's handles, or its client's free ones
};
LIST_HEAD(kvq__handle_list, kvq__handle);

// The list that a named session stands in while its last change is not saved.
enum kvq__unsaved_list {
    KVQ__SAVED,           // in none: it is saved, has no name, or is not published
    KVQ__UNSAVED_IN_USE,  // in the order of their last use, or of when they were opened again
    KVQ__UNSAVED_AT_ONCE, // to be saved now: nobody has it open any more, or its keep time is over
    KVQ__UNSAVED_PUT_OFF, // saving it has failed: later again
    KVQ__UNSAVED_LISTS,
};

// Where a session's blocks are. See residency.h, whose kvq__residency_set alone changes it.
enum kvq__residency {
    KVQ__RESIDENT,     // in memory
    KVQ__LOADING,      // it was restored: its layers are being read from a store
    KVQ__OFFLOADED,    // in a store alone (park.h)
    KVQ__FETCH_WANTED, // there as well; somebody has asked for it
    KVQ__FETCH_TAKEN,  // there as well; a store job is about to read it
    KVQ__FETCHING,     // that job reads its layers
    KVQ__TURNING_BACK, // a layer could not be read: offloaded again once nobody reads the others
    KVQ__ENDED,        // the session ends
    KVQ__RESIDENCIES,
};

// An ended session whose last pages are to go to the index of prefixes stands in core->finishing,
// and the first one there in a phase other than QUEUED.
enum kvq__finish {
    KVQ__FINISH_NOT,    // it lives, or its memory goes
    KVQ__FINISH_QUEUED, // others come first
    KVQ__FINISH_PACKS,  // units are yet to be packed
    KVQ__FINISH_SEALS,  // pages are yet to go to the index
};

// Those who read committed tokens. What is below the floor is kept for them as it was when they
// began. They stand in two groups, so that an unbroken row of readers keeps no page for ever: while
// the older group reads, new ones join the newer; once the older has ended, the next one that finds
// a higher floor begins a group anew.
struct kvq__readers {
    struct {
        uint32_t n;
        uint64_t floor; // of the session when the first of them began; if n > 0
    } group[2];
    uint8_t newer;    // the group that new ones join
    bool release_due; // pages below the session's floor were kept for them
};

struct kvq__session {
    TAILQ_ENTRY(kvq__session) link; // in its namespace; among those that have ended
    struct kvq__core *core;
    struct kvq__namespace *ns;
    struct kvq__pool *pool; // where all its blocks lie
    uint64_t id;
    uint64_t serial; // of all that were made, published or not
    char name[KVQ_NAME_BYTES];
    struct { // as it was opened
        char model[KVQ_FINGERPRINT_BYTES], salt[KVQ_NAME_BYTES], adapter[KVQ_NAME_BYTES];
        bool drop_on_detach, save_on_detach;
        uint64_t keep_ns; // how long it stays when nobody has it open; 0 = for ever
    } spec;
    uint32_t shard, shards, max_rollback;
    uint8_t path, dtype;
    uint8_t v_rotation; // of its layers: enum kvq_v_rotation, or KVQ__V_MIXED
    bool published;     // lookups find it
    bool dropped;
    struct kvq__layer *layers;
    uint32_t n_layers, n_owned;     // n_owned: layers with their own pages
    struct {                        // formats.c
        struct kvq_format *formats; // each once; NULL = none
        uint32_t n;                 // there is room for n_layers
        char name[KVQ_FORMAT_NAME]; // the configuration's that it was opened with, or empty
    } composed;

    // What is committed.
    uint64_t tokens;
    uint64_t floor; // truncation cannot go below
    uint64_t saturated;
    struct kvq__ids ids;           // of its tokens, as far as they are known
    uint64_t prefix_tokens;        // tokens of the prefix that it began with
    bool foreign;                  // some of its blocks belong to another namespace
    uint32_t n_pages;              // of each layer
    uint32_t n_sheets, sheet_room; // length of `sheets`; its room
    struct kvq__sheet **sheets;    // the page table

    // Who has it.
    struct kvq__handle_list handles;
    LIST_HEAD(, kvq__table) tables;
    struct kvq__handle *writer;
    uint32_t readers;
    struct kvq__group *group; // of named sessions with several shards; else NULL
    uint64_t idle_since;      // time of its last use, from which its keep time counts

    // What is done with it. activity.h says what forbids what.
    uint32_t refs;                // requests, moves, saves and restores that hold its blocks
    struct kvq__queue *exclusive; // the request that changes committed tokens; NULL = none
    struct kvq__step *step;       // the open step it is in
    struct {                      // step.c
        LIST_ENTRY(kvq__session) link;
        uint32_t tokens, layers;   // layers appended
        bool spoiled;              // an append was refused for good: the step cannot commit
        uint64_t serial;           // changes when a step begins or ends
        bool committing;           // a STEP is under way on a GPU, see gpu_commit.h
        bool nonfinite_unreported; // the writer does not know yet that values were not finite
        bool prepared;             // its step has ended and waits for those of the other shards
        uint32_t undone_by;        // 1 + shard that ended its last step by leaving; 0 = none
        struct kvq__gpu_counts *counts; // of the open step, on a GPU; NULL on the host
    } in_step;
    struct {                         // entries of requests under way
        struct kvq__readers readers; // that read committed tokens
        uint32_t tail;               // that write or read the open step's tokens
        uint64_t seen;               // step_all.c: number of the last check that met one
    } entries;
    struct kvq__move *move;             // to another place, under way or queued; NULL = none
    struct kvq__park *park;             // to disk, or back; NULL = none
    struct kvq__restore *restore;       // reads its layers; NULL = none
    uint32_t n_loading;                 // layers that are yet to be read
    LIST_HEAD(, kvq__follower) follows; // prefixes that it began with and that are being read
    enum kvq__residency residency;      // kvq__residency_set alone changes it
    bool pinned;                        // it is never parked
    struct {                            // park.c: bringing it back
        TAILQ_ENTRY(kvq__session) link; // while FETCH_WANTED
        uint64_t at;                    // when it became FETCH_WANTED
        uint64_t serial;                // fetches that have failed
        uint64_t failed_at;             // when the last of them did
        int error;                      // its code
    } fetch;

    // Lists that it stands in, each with its owner.
    struct { // lookup.c
        RB_ENTRY(kvq__session) tree;
        LIST_ENTRY(kvq__session) by_id;
        LIST_ENTRY(kvq__session) by_name; // if it has a name
        uint64_t hash;                    // of the name
    } lookup;
    struct { // due.c: a moment when it is looked at
        LIST_ENTRY(kvq__session) link;
        bool listed;
    } timer;
    struct { // recent.c
        TAILQ_ENTRY(kvq__session) link;
        bool listed; // it stands in its arena's list
    } last_used;
    struct { // pages.c: of those with units to be packed
        TAILQ_ENTRY(kvq__session) link;
        bool queued;
    } pack;
    struct { // prefix.c: of those with pages for the index of prefixes
        TAILQ_ENTRY(kvq__session) link;
        bool listed;
    } seal;
    struct { // recent.c, save.c: what is saved of it
        TAILQ_ENTRY(kvq__session) link;
        enum kvq__unsaved_list list;
        uint64_t ask;            // number of the last kvq__core_unsaved that has visited its group
        uint64_t commits, saved; // number of the last change, and of the last that is saved
        uint64_t after, wait;    // after a failure: when to save again; how long that is put off
        uint64_t failure_event_at; // when the last event said that saving fails; 0: never
        uint64_t stamp;            // of its last save
        bool stored, kept;         // a store has some state of it; and keeps it after its end
    } saving;
    struct {             // exact.c
        uint64_t tokens; // its length, as the client said; 0: unknown
        uint64_t exact; // nothing is packed before so many tokens are final; 0: packed as they come
        TAILQ_ENTRY(kvq__session) link; // among sessions whose prompts may hold raw blocks
        bool listed;
        bool packs_early; // exact became 0 to make room for others
        bool gives_way;   // it does so when the requests that read it have ended
    } prompt;
    struct {                            // evict.c
        const struct kvq__queue *taker; // the request that is taking pages for it; NULL = none
        uint64_t back_at;               // when it last came back; 0 = never
        uint64_t try_after;             // after a failed eviction: not tried again before
        uint64_t look;                  // number of the last look that has visited its group
        struct kvq__claims claims;      // of requests that wait for room (claims.h)
        uint32_t n_claims;
    } evict;
    struct {                    // demote.c
        struct kvq__pool *home; // the GPU that it goes back to when it is used; NULL = none
        uint64_t refused;       // 1 + core->evict.ended when the GPU had no room; 0 = never
        uint64_t refused_at;
    } demoted;
    struct { // state.h: deferred frees that end once it is quiet
        struct kvq__given_list given;
        TAILQ_ENTRY(kvq__session) link;
        bool listed; // it stands in core->freeing.givers
    } giver;
    struct {     // ended.c
        struct { // finish.c: before its memory goes
            enum kvq__finish phase;
            bool wanted;     // it is to be finished when it ends
            uint64_t due;    // from PACKS on: tokens to be packed, of whole pages
            uint32_t sealed; // in SEALS: pages that the index had after the last turn
        } finish;
        bool listed;              // it stands in core->freeing.ended
        uint64_t flight;          // the last flight that began before its end
        struct kvq__arena *arena; // counts it in n_ended while it still has pages; else NULL
    } ended;
};

// It has no blocks in memory: only a store has its bytes.
static inline bool kvq__is_offloaded(const struct kvq__session *s)
{
    return s->residency >= KVQ__OFFLOADED && s->residency <= KVQ__FETCH_TAKEN;
}
// It was offloaded, and is on its way back; or, turning back, is about to be offloaded again.
static inline bool kvq__is_fetching(const struct kvq__session *s)
{
    return s->residency >= KVQ__FETCH_WANTED && s->residency <= KVQ__TURNING_BACK;
}
static inline bool kvq__is_turning_back(const struct kvq__session *s)
{
    return s->residency == KVQ__TURNING_BACK;
}

// Where a session belongs: the GPU that it was demoted from, or where it is.
static inline struct kvq__pool *kvq__home_of(const struct kvq__session *s)
{
    return s->demoted.home ? s->demoted.home : s->pool;
}
static inline bool kvq__is_unsaved(const struct kvq__session *s)
{
    return s->saving.commits != s->saving.saved;
}
// Whether a store has all of it, and keeps it after its end.
static inline bool kvq__is_kept(const struct kvq__session *s)
{
    return s->saving.kept && s->saving.stored && !kvq__is_unsaved(s);
}
static inline bool kvq__layer_owns(const struct kvq__session *s, uint32_t layer)
{
    return s->layers[layer].source == layer;
}
// The layer whose pages it reads: itself, unless it reads another one's.
static inline struct kvq__layer *kvq__source_layer(const struct kvq__session *s, uint32_t layer)
{
    return &s->layers[s->layers[layer].source];
}

// ---- Life ----

// A session with zeroed layers that nobody sees yet. 0, or as kvq__ns_allocate. End it by
// kvq__session_free before and by kvq__session_end after it was published.
int kvq__session_new(struct kvq__namespace *ns, uint32_t n_layers, struct kvq__session **out);
void kvq__session_free(struct kvq__session *session);
// Frees what is left of it; it has no pages, sheets or parts of ids.
void kvq__session_dispose(struct kvq__session *session);
// Takes what a session on a GPU needs besides blocks: counters and codebooks. Its layers are built.
// Nothing on the host. 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
int kvq__session_place(struct kvq__session *session);
// Moves a session without blocks to another pool, with what kvq__session_place has taken, and fails
// as that does.
int kvq__session_replace(struct kvq__session *session, struct kvq__pool *to);
// Initialize a layer's extras block: as for a new session, or with what a fork keeps of another
// layer's extras below to->packed. On a GPU both wait for a copy (session.c). 0, KVQ_E_NO_MEMORY or
// KVQ_E_SYSTEM.
int kvq__extras_init(const struct kvq__session *s, const struct kvq__layer *layer);
int kvq__extras_fork(const struct kvq__session *s, const struct kvq__layer *from,
                     const struct kvq__layer *to);
void kvq__session_publish(struct kvq__session *session);
// Nobody has it open any more: drops it or starts its keep time. sound: it was not left by a client
// that was cut off for a fault, so that its last pages may go to the index of prefixes.
void kvq__session_detached(struct kvq__session *session, bool sound);
// Ends the session: takes it out of its namespace, makes its handles stale, frees its memory. The
// event says why.
void kvq__session_end(struct kvq__session *session, const char *why);
// Ends the session with all its shards; handles answer with the status, and stay.
void kvq__session_give_up(struct kvq__session *session, int status);

// ---- Who uses it ----

void kvq__session_ref(struct kvq__session *session);
void kvq__session_unref(struct kvq__session *session);
// Somebody who has a reference begins to read its pages. Returns what ends that, not 0.
uint8_t kvq__reading_begin(struct kvq__session *session);
// A request or a work stream no longer reads its pages (or the tokens of its open step).
void kvq__reading_end(struct kvq__session *session, uint8_t reading);
void kvq__tail_end(struct kvq__session *session);
// Ends a hold: both of the above, as it was held, and the reference.
void kvq__hold_end(struct kvq__session *session, uint8_t reading, bool tail_use);
static inline bool kvq__is_read(const struct kvq__session *session)
{
    return session->entries.readers.group[0].n + session->entries.readers.group[1].n > 0;
}
// Down to here the session's pages may be released: its floor, or what that was when the oldest
// group of readers began.
uint64_t kvq__release_floor(const struct kvq__session *session);
// Whether nothing under way reads its blocks: no request holds the session, and no stream packs it.
// Blocks that it gives up are free at once then, even while the stream of some client hangs.
bool kvq__session_quiet(const struct kvq__session *session);
// As kvq__drop_by, for what the session gives up now. If it is quiet no flight reads that.
struct kvq__drop kvq__session_drop_by(struct kvq__session *session, uint64_t last);

// ---- Telling ----

// Bytes of the blocks that a session has; 0 of an offloaded one.
uint64_t kvq__session_held_bytes(const struct kvq__session *s);
// Whether freeing the session's blocks helps against this shortage.
bool kvq__shortage_counts(const struct kvq__shortage *shortage, const struct kvq__session *session);
void kvq__session_fill_info(const struct kvq__session *session, struct kvq__session_info *info);
// Counts the session's shared bytes, which takes a look at each of its blocks. If it has more than
// *looks blocks the shared bytes stay unknown; else *looks becomes fewer by them.
void kvq__session_count_shared(const struct kvq__session *session, struct kvq__session_info *info,
                               uint64_t *looks);

// ---- By handle, by name ----

// As kvq__handle_get, with a text. Also the code by which its session was lost.
int kvq__handle_attached(struct kvq__client *client, uint64_t value, struct kvq__handle **handle,
                         char *text);
// As kvq__session_find.
int kvq__session_get(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                     const char *name, struct kvq__session **s, char *text);

#endif
