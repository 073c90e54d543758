// SPDX-License-Identifier: Apache-2.0
//
// A store: sessions on disk. A folder with segment files (segment.h), a catalog (SQLite) that says
// what in them counts, and a lock. docs/storage.md tells what it promises and why that holds.
//
// A session is found by (namespace, name, shard). It has a few columns that are searched, opaque
// bytes of the caller's ("meta", with a version of their own), and blocks: opaque bytes each, at a
// place {layer, page, kind}. Blocks are shared by reference count: a fork names the blocks of the
// session that it came from.
//
// Promises
//   - What kvq_save_commit said 0 to is there after a kill -9 or a loss of power at any moment;
//     what it did not say 0 to is there as a whole or not at all, the version before it instead.
//     All sessions of one save come and go together (the shards of a group).
//   - No byte is given out whose checksum is wrong. A block that is damaged is marked, and
//     kvq_store_good_tokens says up to where the session can still be had.
//   - Physical bytes of all files, the catalog's included, never exceed the cap.
//   - A full or failing disk ends the call with a text. The store goes on, or is read-only from
//     then on and says so; either way what was committed stays readable.
//
// Threads: everything blocks. One thread at a time writes (saves, deletes, gc, compaction, import);
// a second one is refused with KVQ_E_BUSY, as is anything that writes between kvq_save_begin and
// its end. Meanwhile any number of threads may read (find, list, blocks, read, status, verify,
// export). The parts of one save may come from different threads, one after the other.
//
// Functions return 0 or a negative KVQ_E code, with a sentence in text[n], and accept n = 0:
//   E_NO_SESSION  no such session or block     E_BUSY       another writer, or another process
//   E_NO_SPACE    cap or disk is full          E_DAMAGED    checksums are wrong
//   E_READ_ONLY   the store or file system is  E_VERSION    made by a newer version
//   E_SYSTEM      a call of the system failed  E_NO_MEMORY  no memory
//   E_STALE       saved again since it was found
//   E_QUOTA       the namespace would have more than it may
//   E_EXISTS, E_INVALID, E_LIMIT               the caller's fault, or of the file it imports
#ifndef KVQ_STORAGE_STORE_H
#define KVQ_STORAGE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/limits.h"
#include "storage/io.h"
#include "storage/segment.h"

struct kvq_store;
struct kvq_save;

// ---- Opening ----

struct kvq_store_options {
    struct kvq_io *io;      // NULL: the operating system's
    uint64_t segment_bytes; // 0: 1 GiB, or an eighth of the cap where that is less. A segment is
                            // sealed when the next record would exceed it
    uint64_t cap_bytes;     // physical, of all files; 0: none; at least KVQ_STORE_MIN_CAP
    uint32_t buffer_bytes;  // 0: 4 MiB; of one write; a multiple of KVQ_IO_PAGE
};

enum { KVQ_STORE_MIN_CAP = 16 << 20 }; // bytes; the catalog needs some of it to be able to delete

// What open found and did. All 0 where nothing was wrong.
struct kvq_store_report {
    bool created;
    bool rebuilt;           // the catalog was made anew from the segments
    uint32_t tails;         // segments with something behind what was committed, cut
    uint64_t tail_bytes;    // of these
    uint32_t removed;       // segments that no committed transaction had reached
    uint32_t missing;       // segments that the catalog names and that are not there or too short
    uint64_t bad_blocks;    // blocks that were lost by that, or that a rebuild found damaged
    uint64_t damaged_bytes; // a rebuild could not make sense of
    uint64_t lost_sessions; // that a rebuild found damaged as a whole
    char text[KVQ_TEXT_BYTES]; // the same in a sentence; empty where nothing was wrong
};

// Opens or makes the store in a folder, which is made too if its parent is there. Cuts off what was
// not committed. A catalog that is missing, damaged, or older than the segments is set aside as
// catalog.db.bad and made anew from the segments; that reads all of them. *report may be NULL.
// KVQ_E_BUSY: another process has it. KVQ_E_VERSION: made by a newer version, and left as it is.
// On a file system that is read-only it is opened read-only and the report says so: what is in it
// can be found, read, verified and exported, and what would write fails with KVQ_E_READ_ONLY. A
// catalog that would have to be made anew is refused with that code then. What is found damaged is
// marked until it is closed.
int kvq_store_open(const char *folder, const struct kvq_store_options *options,
                   struct kvq_store **store, struct kvq_store_report *report, char *text, size_t n);
// Aborts a save that is open. Nobody else may be in a call. Accepts NULL and pointers to NULL.
void kvq_store_close(struct kvq_store **store);

// ---- Saving ----

// Where a block belongs in its session. Whatever `kind` means is the caller's affair.
struct kvq_place {
    uint32_t layer, page, kind;
    uint64_t from; // the first token that cannot be had without it; 0: none can
};

// A session as it is to be saved. Strings end with a NUL within their arrays' bounds.
struct kvq_store_meta {
    const char *space, *name; // namespace; both below KVQ_NAME_BYTES and not empty
    const char *model;        // fingerprint, below KVQ_FINGERPRINT_BYTES
    const char *formats;      // for people and searches, below KVQ_FINGERPRINT_BYTES
    uint32_t shard, shards;   // shard < shards <= KVQ_MAX_SHARDS
    uint64_t tokens;
    int64_t saved_at; // seconds since 1970, by the caller's clock
    uint32_t version; // of the opaque bytes
    const void *bytes;
    size_t n_bytes; // below KVQ_MAX_STORE_META
};

// Begins a save of one or more sessions. *save is ended by commit or abort.
int kvq_save_begin(struct kvq_store *store, struct kvq_save **save, char *text, size_t n);
// The blocks that follow belong to this session. It replaces the session of that namespace, name
// and shard, if there is one; nothing of it is taken over but what is named by kvq_save_keep. What
// is there of that name with another number of shards goes as a whole, whichever shards it has.
int kvq_save_session(struct kvq_save *save, const struct kvq_store_meta *meta, char *text,
                     size_t n);
// Writes a block, and gives it an id (never 0, never used again in this store). The bytes are
// copied and may change after the call. A place may be given once in a session.
int kvq_save_put(struct kvq_save *save, const struct kvq_place *place, const void *data,
                 size_t bytes, uint64_t *id, char *text, size_t n);
// The session has a block that is in the store already, or was put in this save: unchanged since
// the last save, or shared with another session. KVQ_E_NO_SESSION: it is not there (any more),
// KVQ_E_DAMAGED: it is damaged; put it again. The save is as it was then and may go on.
int kvq_save_keep(struct kvq_save *save, const struct kvq_place *place, uint64_t id, char *text,
                  size_t n);
// The keyed hash of all tokens up to the end of a page, for kvq_store_match. Pages count from 0,
// one after the other.
enum { KVQ_PREFIX_BYTES = 32 };
int kvq_save_prefix(struct kvq_save *save, const uint8_t hash[KVQ_PREFIX_BYTES], char *text,
                    size_t n);
// How many sessions the save has, shards counted one by one; and takes back those behind the first
// `sessions`, with what failed of them, so that one that cannot be saved does not undo the others.
// Blocks that were put for them can still be kept by sessions that follow. False if the save cannot
// go on without them, since a record was not written as a whole: a commit then fails as before.
uint32_t kvq_save_count(const struct kvq_save *save);
bool kvq_save_cut(struct kvq_save *save, uint32_t sessions);
// Makes it durable and visible, all of it or nothing, and ends it in any case. Having failed, a put
// or a session makes a commit fail with the same code.
int kvq_save_commit(struct kvq_save **save, char *text, size_t n);
void kvq_save_abort(struct kvq_save **save); // accepts NULL and pointers to NULL

// ---- Looking up ----

struct kvq_store_session {
    uint64_t id;   // the same for all saves of it, until it is deleted
    uint64_t save; // which save this was; what follows belongs to it
    char space[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    char model[KVQ_FINGERPRINT_BYTES], formats[KVQ_FINGERPRINT_BYTES];
    uint32_t shard, shards;
    uint64_t tokens;
    uint64_t blocks, bytes; // of its blocks, shared ones included
    int64_t saved_at, used_at;
    uint32_t version;
    uint32_t n_bytes; // of the opaque bytes, see kvq_store_meta_read
};

int kvq_store_find(struct kvq_store *store, const char *space, const char *name, uint32_t shard,
                   struct kvq_store_session *out, char *text, size_t n);
// Sessions with an id above `after`, in the order of ids, of a namespace or (NULL) of all.
int kvq_store_list(struct kvq_store *store, const char *space, uint64_t after,
                   struct kvq_store_session *out, uint32_t room, uint32_t *count, char *text,
                   size_t n);
// The calls that take a session that was found give KVQ_E_STALE if it was saved again since: what
// was found and what they would tell would not belong together. Find it again then.

// The opaque bytes, session->n_bytes of them.
int kvq_store_meta_read(struct kvq_store *store, const struct kvq_store_session *session, void *out,
                        char *text, size_t n);
// Sets used_at of sessions, all in one transaction. Sessions that are not there any more are passed
// over.
struct kvq_store_use {
    uint64_t session;
    int64_t used_at; // seconds since 1970
};
int kvq_store_touch(struct kvq_store *store, const struct kvq_store_use *uses, size_t count,
                    char *text, size_t n);

// Of the pages whose hashes are given (each covers all pages before it), how many of the first some
// session of the namespace has, and that session (the oldest of them). 0: none; *out is zeros then.
int kvq_store_match(struct kvq_store *store, const char *space,
                    const uint8_t (*hashes)[KVQ_PREFIX_BYTES], uint32_t pages, uint32_t *matched,
                    struct kvq_store_session *out, char *text, size_t n);

// A block of a session. What follows `bytes` says where it lies, as a hint to kvq_store_read.
struct kvq_stored {
    uint64_t id;
    struct kvq_place place;
    uint64_t bytes;
    bool bad;
    uint64_t segment, offset;
    struct kvq_checksum checksum;
};

// All blocks of a session by layer, page, kind. *blocks is freed by the caller with free().
int kvq_store_blocks(struct kvq_store *store, const struct kvq_store_session *session,
                     struct kvq_stored **blocks, size_t *count, char *text, size_t n);
// The prefix hashes of a session, page by page, freed by the caller with free().
int kvq_store_prefixes(struct kvq_store *store, const struct kvq_store_session *session,
                       uint8_t (**hashes)[KVQ_PREFIX_BYTES], uint32_t *pages, char *text, size_t n);

// Reads block->bytes bytes into out and checks them.
// Blocks that compaction has moved meanwhile are found. KVQ_E_DAMAGED: the block is marked from
// now on, and out holds nothing of use. KVQ_E_NO_SESSION: it was deleted meanwhile,
// and its segment is gone; until then its bytes are given as they were.
int kvq_store_read(struct kvq_store *store, const struct kvq_stored *block, void *out, char *text,
                   size_t n);

// The same for many blocks, each into its own out[i], much faster where they lie one after the
// other: sort them by segment and offset. *done says how many of the first were read; if that is
// not all, the next one is what the error is about.
int kvq_store_read_many(struct kvq_store *store, const struct kvq_stored *blocks, void *const *out,
                        size_t n, size_t *done, char *text, size_t text_bytes);

// Tokens that can be had with the blocks that are not marked as bad: `tokens` of the session, or
// the lowest `from` of a bad block. Marks come from reads and kvq_store_verify.
int kvq_store_good_tokens(struct kvq_store *store, const struct kvq_store_session *session,
                          uint64_t *tokens, char *text, size_t n);

// ---- Removing ----

// Deletes all shards of a session. Blocks that no other session has are gone with it; their space
// comes back with whole segments, by gc and compaction.
int kvq_store_delete(struct kvq_store *store, const char *space, const char *name, char *text,
                     size_t n);

struct kvq_store_freed {
    uint32_t segments; // files removed
    uint64_t bytes;    // physical, of these
    uint64_t moved;    // bytes of records copied to the last segment
    bool more;         // there is more to do: call again
};

// Removes segments in which nothing is alive. Needs no space.
int kvq_store_gc(struct kvq_store *store, struct kvq_store_freed *freed, char *text, size_t n);
// Copies what is alive out of segments of which at least `dead_percent` is dead, and more than an
// eighth of a full segment's size, the worst first, at most about `budget` bytes in one call (a
// record at least), and removes those that are empty then. A crash at any moment loses nothing.
int kvq_store_compact(struct kvq_store *store, uint64_t budget, uint32_t dead_percent,
                      struct kvq_store_freed *freed, char *text, size_t n);

// ---- Status and verify ----

struct kvq_store_status {
    uint64_t sessions, blocks, bad_blocks;
    uint32_t segments;
    uint64_t live_bytes, dead_bytes; // of records in segments
    uint64_t catalog_bytes;          // physical
    uint64_t physical_bytes;         // of all files, what the cap is about
    uint64_t cap_bytes, free_bytes;  // free: of the file system
    bool read_only;                  // since a failure, or always; `why` says which
    char why[KVQ_TEXT_BYTES];
};
int kvq_store_status(struct kvq_store *store, struct kvq_store_status *status, char *text,
                     size_t n);

struct kvq_store_verified {
    uint32_t segments;
    uint64_t bytes;         // looked at
    uint64_t damaged_bytes; // in records that are not as they were written, dead ones included
    uint64_t bad_blocks;    // newly marked
    uint64_t good_again;    // marked before, and as they were written now: their marks are gone
    uint32_t missing;       // segments that are not there, or shorter than the catalog says
    bool catalog_bad;       // SQLite finds the catalog damaged; the next open makes it anew
    uint64_t sessions;      // that are cut by bad blocks, also of earlier runs
    char text[KVQ_TEXT_BYTES];
};
// Reads every segment, each record's header and payload, and marks blocks that are damaged. Marks
// of blocks that read well now, since their file was brought back or the disk was at fault for a
// while, are taken off. May run beside readers and a writer; sees what was committed when it came
// to a segment. progress() (may be NULL) is told bytes done and all; something else than 0 from it
// ends the call with KVQ_E_CANCELLED. Returns 0 also where it finds damage: look at *verified.
int kvq_store_verify(struct kvq_store *store,
                     int (*progress)(void *context, uint64_t done, uint64_t all), void *context,
                     struct kvq_store_verified *verified, char *text, size_t n);

// ---- Namespaces ----

// What a namespace has: bytes of the blocks of its sessions (payload, each block once, however many
// of its sessions share it), and how many sessions (a group of shards once).
int kvq_store_usage(struct kvq_store *store, const char *space, uint64_t *bytes, uint64_t *sessions,
                    char *text, size_t n);
// The bytes of all namespaces that have, or had, anything there. *spaces is freed with free().
struct kvq_store_space {
    char space[KVQ_NAME_BYTES];
    uint64_t bytes;
};
int kvq_store_spaces(struct kvq_store *store, struct kvq_store_space **spaces, size_t *count,
                     char *text, size_t n);
// Saves and imports that are not committed yet and would bring these bytes above `bytes` (0: no
// limit) fail with KVQ_E_QUOTA and the figures, and what was saved before stays. Where it is above
// already, saves that add nothing go through. `space` NULL: of all namespaces that were given none.
// Not kept on disk. Any thread.
int kvq_store_limit(struct kvq_store *store, const char *space, uint64_t bytes, char *text,
                    size_t n);

// ---- Moving sessions between stores ----

// Writes all shards of a session into one file (format: segment.h, manifest.h), synced, then
// renamed over path. Refuses a session with damaged blocks (KVQ_E_DAMAGED).
int kvq_store_export(struct kvq_store *store, const char *space, const char *name, const char *path,
                     char *text, size_t n);
// What an exported file is of: the names, shards and tokens of its first session; the rest of *out
// is zeros. Of what follows in the file nothing is checked.
int kvq_store_exported(struct kvq_store *store, const char *path, struct kvq_store_session *out,
                       char *text, size_t n);
// Saves what a file holds, under another namespace and name where they are given (may be NULL).
// KVQ_E_EXISTS without `replace` if there is such a session. The file is foreign: everything is
// checked, and nothing is visible unless all of it is good.
int kvq_store_import(struct kvq_store *store, const char *path, const char *space, const char *name,
                     bool replace, char *text, size_t n);

// The same, told bytes done and all now and then; something else than 0 from tell() ends the call
// with KVQ_E_CANCELLED, and nothing has changed. NULL: nobody looks on.
struct kvq_store_watch {
    int (*tell)(void *context, uint64_t done, uint64_t all);
    void *context;
};
int kvq_store_export_watched(struct kvq_store *store, const char *space, const char *name,
                             const char *path, const struct kvq_store_watch *watch, char *text,
                             size_t n);
int kvq_store_import_watched(struct kvq_store *store, const char *path, const char *space,
                             const char *name, bool replace, const struct kvq_store_watch *watch,
                             char *text, size_t n);

#endif
