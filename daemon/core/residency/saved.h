// SPDX-License-Identifier: Apache-2.0
//
// Saves write sessions down, and restores make them again: the core's half, which knows no files.
//
// A save takes hold of a session, or of all its shards, at what is committed. It holds blocks that
// can never change again by reference; whoever runs kvq__save_copy copies the rest, and only for
// that long nothing of the session is packed, truncated or moved. Reading the bytes and writing
// them somewhere may then take long, while the session is used as ever.
//
// A restore makes a session with all its blocks, which hold nothing yet. Its layers come one by
// one; requests on a layer that has not come wait. Nothing can be committed before all layers are
// there, so a session in which damage is found meanwhile ends and nothing is lost: what is stored
// of it up to the damage can be restored.
//
// Threads: the poller's, but for kvq__save_copy, kvq__save_bytes, kvq__restore_rooms and
// kvq__restore_fill, which any one thread may call, and which may block.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_SAVED_H
#define KVQ_DAEMON_CORE_RESIDENCY_SAVED_H

#include "daemon/core/core.h"
#include "daemon/core/residency/advance.h"
#include "daemon/core/session/prefix.h"
#include "daemon/core/session/prefix_ask.h"

// One layer as it stands. Of a layer that reads another's cache there is only the row.
struct kvq__saved_layer {
    struct kvq__layer_row row; // repeat is 1, format is row_format.name
    struct kvq_format format;
    uint8_t v_rotation;            // enum kvq_v_rotation
    uint32_t first_page, raw_page; // pages before first_page are gone; before raw_page not raw
    uint64_t base;                 // a fork's: tokens below are there packed only
    uint64_t packed;               // so many tokens are packed
    bool learned;                  // the extras hold what the format learns
    uint64_t book;                 // its codebook's id; 0 = none, or not said
};

// A session as it stands, but for the bytes of its blocks.
struct kvq__saved {
    char name[KVQ_NAME_BYTES], model[KVQ_FINGERPRINT_BYTES];
    char salt[KVQ_NAME_BYTES], adapter[KVQ_NAME_BYTES];
    char own_format[KVQ_FORMAT_NAME]; // the configuration's that it was opened with, or empty
    char isa[16];                     // instruction set it was computed with, for people
    uint32_t shard, shards, dtype, path, max_rollback, on_detach;
    uint64_t prompt_tokens, exact_tokens, keep_seconds; // exact_tokens: as the session's
    uint64_t tokens, floor, saturated;
    uint64_t stamp; // no other save has the same; 0: from a version without stamps
    uint32_t n_layers;
    struct kvq__saved_layer *layers;
    uint64_t known;                // ids of tokens [0, known) are there
    const int32_t *ids;            // these
    uint32_t n_spans;              // of images or audio among its tokens
    const struct kvq__span *spans; // these
};

// A part is the bytes of one block. Packed and raw blocks are a page's, without sinks; a layer has
// one block of extras at most, which holds the sinks. Ids of tokens come in parts of KVQ__IDS_PART
// tokens, the last of which may have fewer; spans in one part. The parts of ids and spans belong to
// no layer (KVQ__IDS_LAYER), and their `from` is so high that no token is lost without them.
enum kvq__part_kind {
    KVQ__PART_PACKED = 1,
    KVQ__PART_RAW = 2,
    KVQ__PART_EXTRAS = 3,
    KVQ__PART_IDS = 4,
    KVQ__PART_SPANS = 5,
};
enum { KVQ__IDS_LAYER = KVQ_MAX_LAYERS };
struct kvq__part {
    uint32_t layer, page, kind; // enum kvq__part_kind; page: of ids the part's number
    uint64_t bytes;
    uint64_t from; // the first token that is lost without the part; 0: all are
    uint64_t id;   // that the saver gave it; 0: not saved before, or it may have changed since
};
// Lists of parts go by layer, page and kind: below 0 if a comes before b, 0 if they are one part.
static inline int kvq__part_order(const struct kvq__part *a, const struct kvq__part *b)
{
    return a->layer != b->layer ? (a->layer < b->layer ? -1 : 1)
           : a->page != b->page ? (a->page < b->page ? -1 : 1)
                                : (a->kind > b->kind) - (a->kind < b->kind);
}

// ---- Saving ----

struct kvq__save;

// Which session to save, and what is refused.
struct kvq__save_spec {
    const char *ns, *name; // as for kvq__session_find
    bool again;            // also if nothing has changed since the last save
    bool unnamed;          // sessions without a name, too: as "#ID"
    bool parks;            // the save only parks: nobody has asked to keep the session
    bool looks;            // only looks whether there is anything to save
};
enum kvq__save_answer {
    KVQ__SAVE_WAITS = 1,   // something has to end first: ask again soon
    KVQ__SAVE_THERE_IS = 2 // there is something to save: spec->looks
};

// Takes hold of the session with all its shards. *save is NULL if nothing has changed since it was
// saved. 0, an enum kvq__save_answer, KVQ_E_NO_SESSION, KVQ_E_INVALID, KVQ_E_INCOMPLETE (not all
// its shards are there; or they stand at different counts while the daemon drains, when no step
// begins that could change that), KVQ_E_NO_MEMORY, and what kvq__session_find gives.
int kvq__save_begin(struct kvq__core *core, const struct kvq__peer *peer,
                    const struct kvq__save_spec *spec, struct kvq__save **save, char *text);

// The shards to save, and of each the session and its parts. They stay until the save ends; the
// saver may set the parts' ids.
uint32_t kvq__save_shards(const struct kvq__save *save);
const char *kvq__save_namespace(const struct kvq__save *save);
const struct kvq__saved *kvq__save_shard(const struct kvq__save *save, uint32_t shard,
                                         struct kvq__part **parts, uint32_t *n_parts);

// Copies what may change. 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
int kvq__save_copy(struct kvq__save *save);
// Lets the session go on. Called once, after kvq__save_copy, also after its failure.
void kvq__save_copied(struct kvq__save *save);
// A key that parts of several saves have in common if they are the same bytes of a block that
// cannot change any more, which forks share. No other part has it while the saves last. NULL: the
// part may change.
const void *kvq__save_shared(const struct kvq__save *save, uint32_t shard, uint32_t part);
// The bytes of a part, valid until the next call. NULL if a GPU has failed.
const void *kvq__save_bytes(struct kvq__save *save, uint32_t shard, uint32_t part);
// Ends the save and frees it. With `saved`, blocks that cannot change keep the ids of their parts,
// and the session counts as saved. Accepts NULL and pointers to NULL.
void kvq__save_end(struct kvq__save **save, bool saved);

// Sessions with names whose last change is not saved, of any namespace.
struct kvq__unsaved {
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    uint64_t id, tokens; // of its first shard that is there
};
enum kvq__unsaved_which {
    KVQ__UNSAVED_ALL,      // also sessions that lack shards, and cannot be saved
    KVQ__UNSAVED_LEFT = 1, // nobody has it open, and so it is to be saved, or before it goes
    KVQ__UNSAVED_IDLE = 2, // not used for idle_ns
};
// A save that nobody waits for has failed: the session is in no list but ALL for a second, for two
// after the next failure, and for a minute at most; a success starts that anew. Returns whether to
// tell somebody: once a minute.
bool kvq__unsaved_failed(struct kvq__core *core, const char *ns, const char *name);
// Lists at most `max` sessions of either kind (a group once). Returns how many were found; above
// `max` only ALL goes on counting.
uint32_t kvq__core_unsaved(struct kvq__core *core, uint32_t which, uint64_t idle_ns,
                           struct kvq__unsaved *out, uint32_t max);

// Whether the peer may use a namespace, and the namespace's name (KVQ_NAME_BYTES) if `ns` is empty.
// 0 or a code of kvq__session_find's.
int kvq__namespace_check(struct kvq__core *core, const struct kvq__peer *peer, const char *ns,
                         char *name, char *text);

// The hashes by which a store knows the pages of the shard that others can begin with
// (kvq_save_prefix), one after the other. Any thread, until the save ends; stops when each()
// returns < 0, and returns that, or KVQ_E_NO_MEMORY.
int kvq__save_prefixes(const struct kvq__save *save, uint32_t shard,
                       int (*each)(void *context, const uint8_t hash[32]), void *context);
// Whether others can begin with so many tokens, a multiple of 128, by the session's counts alone.
bool kvq__saved_can_begin(const struct kvq__saved *saved, uint64_t tokens);

// ---- Ids of tokens, as they are stored (saved_ids.c) ----

// A span, without padding.
struct kvq__saved_span {
    uint64_t first;
    uint32_t tokens, zero;
    uint8_t digest[32];
};
static_assert(sizeof(struct kvq__saved_span) == 48, "no holes");

// The number of parts of ids and spans, and part i of them, whose id is 0.
uint32_t kvq__saved_ids_parts(const struct kvq__saved *saved);
struct kvq__part kvq__saved_ids_part(const struct kvq__saved *saved, uint32_t i);
// Reads the ids and spans of a session up to `most` tokens by calling read(), which puts the bytes
// of the part at that place of the list into out, and returns 0 or a code. saved->ids and spans are
// then the caller's until kvq__saved_ids_free. A part that is missing, damaged or of a wrong size
// ends what is known: saved->known is lower then, and 0 if spans are lost, without which ids mean
// nothing. 0, or KVQ_E_NO_MEMORY or KVQ_E_STALE, by which read() ends all.
struct kvq__ids_reader {
    const struct kvq__part *parts; // by layer, page and kind
    uint32_t n;
    uint64_t most;
    int (*read)(void *context, uint32_t part, void *out);
    void *context;
};
int kvq__saved_ids_read(struct kvq__saved *saved, const struct kvq__ids_reader *reader);
void kvq__saved_ids_free(struct kvq__saved *saved);
// Gives a restored session the first of the ids and spans that were saved with it, and the parts of
// the list that hold them. 0, KVQ_E_NO_MEMORY, KVQ_E_QUOTA or KVQ_E_DAMAGED with a text.
int kvq__ids_restore(struct kvq__session *session, const struct kvq__saved *saved,
                     const struct kvq__part *parts, uint32_t n, char *text);

// ---- Parking (park.h): what the core wants of whoever saves sessions ----

// SAVE: save the session (kvq__save_spec with `parks` and `unnamed`), then call kvq__park_saved. If
// it is `stored`, look whether the copy is there whole and with that stamp; if not, save it
// `again`. FETCH: read the session back, by kvq__fetch_begin or kvq__fetch_failed. FORGET: delete
// the copy of that name if the order still stands and the copy has that stamp, then call
// kvq__park_forgot.
enum kvq__store_job_kind { KVQ__JOB_SAVE, KVQ__JOB_FETCH, KVQ__JOB_FORGET };
struct kvq__store_job {
    enum kvq__store_job_kind kind;
    uint64_t id;                                   // SAVE: the ticket's; FETCH: the session's
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES]; // the copy's
    char session[24];                              // SAVE: "#ID", for kvq__save_begin
    uint32_t shard;                                // FETCH
    uint64_t stamp;                                // of the copy
    bool stored;                                   // SAVE: nothing has changed since the copy
};
// The next order; false if there is none. Orders of one name come in the order in which they must
// be done.
bool kvq__park_next(struct kvq__core *core, struct kvq__store_job *job);
// Tells how a SAVE has ended, after kvq__save_end. `text` is copied.
void kvq__park_saved(struct kvq__core *core, uint64_t ticket, int status, const char *text);
// Tells how a FORGET has ended or goes on. GONE: the copy was deleted, and counts as gone for a
// while longer. FAILED: the copy counts as gone as long as it is there, and the order comes again a
// while later. IN_USE: the name is in use, and whoever has the order waits for it while other
// orders have their turn, then tells the end. Returns whether this is the copy's first failure,
// which the caller logs. An order that kvq__park_keep has called off is not noted.
enum kvq__forget_outcome { KVQ__FORGET_GONE, KVQ__FORGET_FAILED, KVQ__FORGET_IN_USE };
bool kvq__park_forgot(struct kvq__core *core, const struct kvq__store_job *order,
                      enum kvq__forget_outcome outcome);
// At the daemon's end, after all other orders: a FORGET that is left and whose copy has a name. The
// next start deletes copies without names.
bool kvq__park_last_forget(struct kvq__core *core, struct kvq__store_job *job);
// Whether the copy found in a store is to be forgotten, or was just now; then it counts as not
// there. A FORGET without such a copy does not stand any more.
bool kvq__park_forgotten(const struct kvq__core *core, const char *ns, const char *name,
                         uint64_t stamp);
// From here on the copy of that name was not written to park a session: it was imported, maybe from
// an export of a copy to be forgotten, which has the same stamp, or there is none any more. Calls
// off all FORGETs of the name, also those that were taken.
void kvq__park_keep(struct kvq__core *core, const char *ns, const char *name);
// ---- Restoring ----

struct kvq__restore;

struct kvq__restore_spec {
    const char *ns;
    const char *place;              // as for opening a session; NULL or empty: the daemon's choice
    const struct kvq__saved *saved; // foreign: everything is checked
    const struct kvq__part *parts;  // parts that there are, by layer, page and kind
    uint32_t n_parts;
    uint64_t good_tokens; // tokens that can be had; if less than all, the session is cut
    // Not 0: restores only a prefix of so many tokens, a multiple of 128, that others can begin
    // with. The session has no name, whatever the saved one's is. When it has its memory its pages
    // go to the index of ns, where sessions begin with them at once; when all layers are there it
    // ends.
    uint64_t prefix_tokens;
    bool resharded; // the session is stored otherwise: unsaved (see reshard.h)
    bool ahead;     // extras may know of tokens that are not packed
};

// Begins to make a session that nobody sees yet. What the spec points to stays until
// kvq__restore_reserve has returned KVQ__COMPLETE, or kvq__restore_end was called. KVQ_E_EXISTS if
// a session has that name and shard; KVQ_E_DAMAGED if parts are missing or do not fit;
// KVQ_E_NO_MEMORY, KVQ_E_QUOTA, KVQ_E_FORMAT, KVQ_E_SHAPE, KVQ_E_LIMIT, KVQ_E_INVALID,
// KVQ_E_DRAINING.
int kvq__restore_begin(struct kvq__core *core, const struct kvq__peer *peer,
                       const struct kvq__restore_spec *spec, struct kvq__restore **restore,
                       char *text);
// Takes some of the session's memory, as much as can be had without keeping others waiting for
// long: enum kvq__advance, or the codes above. KVQ__LATER: extents are being made, or others make
// room. KVQ__COMPLETE: the session is there, and nobody has it open yet. Below 0: only
// kvq__restore_end is left to call. Until KVQ__COMPLETE only kvq__restore_reserve may be called.
int kvq__restore_reserve(struct kvq__restore *restore, char *text);
// As kvq__restore_begin, but fills a parked session, given by its id, again. spec->ns and place are
// not looked at. KVQ_E_DAMAGED if the copy is not, to the last token, what was parked;
// KVQ_E_CANCELLED if the session was dropped; KVQ_E_NO_MEMORY. After these kvq__fetch_failed
// follows. If kvq__restore_reserve fails, kvq__restore_end is enough.
int kvq__fetch_begin(struct kvq__core *core, uint64_t session, const struct kvq__restore_spec *spec,
                     struct kvq__restore **restore, char *text);
// A FETCH that kvq__fetch_begin has not begun has failed. With KVQ_E_DAMAGED, KVQ_E_NO_SESSION or
// KVQ_E_VERSION the session ends; else it stays parked. Who waits for it is told.
void kvq__fetch_failed(struct kvq__core *core, uint64_t session, int status, const char *text);
// The tokens of the session: less than were saved if it was cut.
uint64_t kvq__restore_tokens(const struct kvq__restore *restore);

// The parts to read, in this order: all of a layer, then all of the next. `part` is an index in the
// spec's parts. False behind the last.
struct kvq__wanted {
    uint32_t part, layer;
    uint64_t bytes;
};
bool kvq__restore_wanted(const struct kvq__restore *restore, uint32_t i, struct kvq__wanted *out);
// Where the bytes of n of these parts (which[0], ...) go until kvq__restore_fill has taken each
// from there. Returns for how many parts, the first ones, there is room; 0 without memory. Another
// call forgets the earlier rooms.
uint32_t kvq__restore_rooms(struct kvq__restore *restore, const uint32_t *which, uint32_t n,
                            void **rooms);
// 0, KVQ_E_SYSTEM, or KVQ_E_DAMAGED if the bytes cannot be right.
int kvq__restore_fill(struct kvq__restore *restore, uint32_t i);
// Whether the session was dropped: then there is no need to go on. Any thread.
bool kvq__restore_lost(const struct kvq__restore *restore);

// All of a layer is there, and requests on it go on. Called in the order of layers, once each.
void kvq__restore_layer(struct kvq__restore *restore, uint32_t layer);
// Ends the restore and frees it. With a status below 0 before all layers are there, the session
// ends with all its shards, and its handles answer with that status. But a parked session is parked
// again, its open step undone, unless the copy is no good (as for kvq__fetch_failed). Accepts
// pointers to NULL.
void kvq__restore_end(struct kvq__restore **restore, int status);

// ---- What saves and restores hold, for core/check.h ----

// Call see() for each reference of a save, or of a restore, to a block.
void kvq__saves_each_ref(const struct kvq__core *core,
                         void (*see)(void *context, const struct kvq__ref *ref), void *context);
void kvq__restores_each_ref(const struct kvq__core *core,
                            void (*see)(void *context, const struct kvq__ref *ref), void *context);
// Counts, for one of the session's layers, the prefixes that the session began with and of which
// that layer is yet to come.
uint64_t kvq__follows_loading(const struct kvq__session *session, uint32_t layer);

#endif
