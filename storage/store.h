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
//   - A save for which kvq_save_commit returned 0 survives a kill -9 or a loss of power at any
//     moment. Of any other save the store has, afterwards, all of it or nothing: then the version
//     before it. All sessions of one save (the shards of a group) appear together.
//   - No call returns a byte whose checksum is wrong. The store marks a damaged block, and
//     kvq_store_good_tokens counts the tokens of the session that can still be restored.
//   - Physical bytes of all files, the catalog's included, never exceed the cap.
//   - A full or failing disk ends the call with a text. The store goes on, or is read-only from
//     then on and says so; either way committed sessions stay readable.
//
// Threads: all calls block. One thread at a time writes (saves, deletes, gc, compaction, import);
// the store refuses a second writer with KVQ_E_BUSY, also between kvq_save_begin and the end of
// that save. Meanwhile any number of threads may read (find, list, blocks, read, status, verify,
// export). Different threads may make the calls of one save, one after the other.
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
    bool existing_only;     // KVQ_E_INVALID, and nothing is made, where no store is
};

enum { KVQ_STORE_MIN_CAP = 16 << 20 }; // bytes; the catalog needs some of it to be able to delete

// What kvq_store_open found and did. All 0 but `checked` if nothing was wrong.
struct kvq_store_report {
    bool created;
    bool checked;              // all of the catalog was: it was not as an orderly end had left it
    bool rebuilt;              // the catalog was rebuilt from the segments
    uint32_t tails;            // segments with bytes behind the committed ones, which were cut
    uint64_t tail_bytes;       // of these
    uint32_t removed;          // segments that no committed transaction had reached
    uint32_t foreign;          // files of other stores, or of other numbers, which are now .bad
    uint32_t aside;            // segments whose front is damaged, in a rebuild; now .bad
    uint32_t missing;          // segments of the catalog that do not exist or are too short
    uint64_t bad_blocks;       // blocks lost with them, or that a rebuild found damaged
    uint64_t damaged_bytes;    // that a rebuild could not read
    uint64_t lost_sessions;    // that a rebuild found damaged as a whole
    char text[KVQ_TEXT_BYTES]; // the same in a sentence; empty if nothing was wrong
};

// Opens or creates the store in a folder; creates the folder if its parent exists. Cuts off bytes
// that were not committed. Checks all rows of the catalog, unless it is to the byte what the last
// run had left when it closed the store. Renames a catalog that is missing, damaged, or older than
// the segments to catalog.db.bad, and rebuilds the catalog from the segments, which reads all of
// them. report may be NULL. Release with kvq_store_close. KVQ_E_BUSY: another process has the store
// open. KVQ_E_VERSION: a newer version made the store; it is left as it is. On a read-only file
// system the store opens read-only, and the report says so: calls that find, read, verify or export
// work, and calls that write fail with KVQ_E_READ_ONLY. If the catalog would have to be rebuilt
// there, the open fails with that code. Marks of damaged blocks then last until the store is
// closed.
int kvq_store_open(const char *folder, const struct kvq_store_options *options,
                   struct kvq_store **store, struct kvq_store_report *report, char *text, size_t n);
// The store's own number, which no other store has: not one that was begun anew in its folder.
void kvq_store_id(const struct kvq_store *store, uint8_t id[KVQ_STORE_ID_BYTES]);
// Closes the store; aborts a save that is open. No other thread may be in a call on the store.
// Accepts NULL and pointers to NULL.
void kvq_store_close(struct kvq_store **store);

// ---- Saving ----

// Where a block belongs in its session. The caller defines the values of `kind`.
struct kvq_place {
    uint32_t layer, page, kind;
    uint64_t from; // the first token that needs the block; 0: all tokens do
};

// A session to save. Strings end with a NUL within their arrays' bounds.
struct kvq_store_meta {
    const char *space, *name; // namespace; both below KVQ_NAME_BYTES and not empty
    const char *model;        // fingerprint, below KVQ_FINGERPRINT_BYTES
    const char *formats;      // to show and to search for, below KVQ_FINGERPRINT_BYTES
    uint32_t shard, shards;   // shard < shards <= KVQ_MAX_SHARDS
    uint64_t tokens;          // at most KVQ_MAX_SESSION_TOKENS
    int64_t saved_at;         // seconds since 1970, by the caller's clock
    uint32_t version;         // of the opaque bytes
    const void *bytes;
    size_t n_bytes; // below KVQ_MAX_STORE_META
};

// Begins a save of one or more sessions. kvq_save_commit or kvq_save_abort ends *save.
int kvq_save_begin(struct kvq_store *store, struct kvq_save **save, char *text, size_t n);
// Adds a session to the save; the next blocks belong to it. The commit replaces an existing session
// of that namespace, name and shard; of its blocks the new one has only those given to
// kvq_save_keep. The commit also deletes all shards of an existing session of that name with
// another number of shards.
int kvq_save_session(struct kvq_save *save, const struct kvq_store_meta *meta, char *text,
                     size_t n);
// Writes a block, and returns its id (never 0, never used again in this store). Copies the bytes,
// which may change after the call. A session has at most one block at a place.
int kvq_save_put(struct kvq_save *save, const struct kvq_place *place, const void *data,
                 size_t bytes, uint64_t *id, char *text, size_t n);
// Adds a block to the session that the store has already, or that was put in this save: a block
// that is unchanged since the last save, or that another session shares. KVQ_E_NO_SESSION: the
// store has no such block (any more). KVQ_E_DAMAGED: the block is damaged. After these two the save
// is as before and may go on: put the block.
int kvq_save_keep(struct kvq_save *save, const struct kvq_place *place, uint64_t id, char *text,
                  size_t n);
// Adds the keyed hash of all tokens up to the end of a page, for kvq_store_match: one call for each
// page, from page 0 on.
enum { KVQ_PREFIX_BYTES = 32 };
int kvq_save_prefix(struct kvq_save *save, const uint8_t hash[KVQ_PREFIX_BYTES], char *text,
                    size_t n);
// kvq_save_count returns how many sessions the save has, each shard counted. kvq_save_cut removes
// all but the first `sessions` of them, with their failures, so that a session that cannot be saved
// does not undo the others; later sessions of the save may still keep the blocks that were put for
// them. Returns false if the save cannot go on, since a record was not written as a whole: a commit
// then fails as before.
uint32_t kvq_save_count(const struct kvq_save *save);
bool kvq_save_cut(struct kvq_save *save, uint32_t sessions);
// Makes all sessions of the save durable and visible, or none, and ends the save in any case. If a
// call of the save failed before, the commit fails with the same code.
int kvq_save_commit(struct kvq_save **save, char *text, size_t n);
void kvq_save_abort(struct kvq_save **save); // accepts NULL and pointers to NULL

// ---- Looking up ----

struct kvq_store_session {
    uint64_t id;   // the same for all saves of the session, until it is deleted
    uint64_t save; // number of the save that the other fields are of
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
// Calls that take a struct kvq_store_session return KVQ_E_STALE if the session was saved again
// since it was found: find it again.

// The opaque bytes, session->n_bytes of them.
int kvq_store_meta_read(struct kvq_store *store, const struct kvq_store_session *session, void *out,
                        char *text, size_t n);
// Sets used_at of sessions, all in one transaction. Skips sessions that were deleted.
struct kvq_store_use {
    uint64_t session;
    int64_t used_at; // seconds since 1970
};
int kvq_store_touch(struct kvq_store *store, const struct kvq_store_use *uses, size_t count,
                    char *text, size_t n);

// What kvq_store_match looks for. hashes[i] covers pages 0 to i. Sessions whose ids are among
// `passed` do not count: those that were found before, and are damaged, say.
struct kvq_store_prefix {
    const char *space;
    const uint8_t (*hashes)[KVQ_PREFIX_BYTES];
    uint32_t pages;
    const uint64_t *passed;
    uint32_t n_passed;
};
// Finds the session of the namespace that shares the longest prefix: *matched is the number of
// leading pages, and *out the session, the oldest of those that have so many. *matched 0: no
// session has the first page; *out is zeros.
int kvq_store_match(struct kvq_store *store, const struct kvq_store_prefix *prefix,
                    uint32_t *matched, struct kvq_store_session *out, char *text, size_t n);

// A block of a session. segment, offset and checksum say where it lies, as a hint to
// kvq_store_read.
struct kvq_stored {
    uint64_t id;
    struct kvq_place place;
    uint64_t bytes;
    bool bad;
    uint64_t segment, offset;
    struct kvq_checksum checksum;
};
// Below 0 if a lies before b on disk, 0 if both lie at one place.
static inline int kvq_stored_order(const struct kvq_stored *a, const struct kvq_stored *b)
{
    return a->segment != b->segment ? (a->segment > b->segment) - (a->segment < b->segment)
                                    : (a->offset > b->offset) - (a->offset < b->offset);
}

// Lists all blocks of a session by layer, page, kind. The caller releases *blocks with free().
int kvq_store_blocks(struct kvq_store *store, const struct kvq_store_session *session,
                     struct kvq_stored **blocks, size_t *count, char *text, size_t n);
// Lists the prefix hashes of a session, page by page. The caller releases *hashes with free().
int kvq_store_prefixes(struct kvq_store *store, const struct kvq_store_session *session,
                       uint8_t (**hashes)[KVQ_PREFIX_BYTES], uint32_t *pages, char *text, size_t n);

// Reads block->bytes bytes into out and checks them, also if compaction has moved the block since.
// A deleted block can be read until its segment is removed. KVQ_E_DAMAGED: the store marks the
// block, and out holds nothing of use. KVQ_E_SYSTEM: the disk cannot read it, now or for ever; only
// kvq_store_verify marks it for that. KVQ_E_NO_SESSION: the block was deleted, and its segment was
// removed.
int kvq_store_read(struct kvq_store *store, const struct kvq_stored *block, void *out, char *text,
                   size_t n);

// Reads n blocks, each into its out[i]: much faster than single reads if the blocks are sorted by
// segment and offset. *done is the number of blocks that were read; the error is about the next
// one.
int kvq_store_read_many(struct kvq_store *store, const struct kvq_stored *blocks, void *const *out,
                        size_t n, size_t *done, char *text, size_t text_bytes);

// Counts the tokens that need no bad block: `tokens` of the session, or the lowest `from` of its
// bad blocks. Reads and kvq_store_verify mark blocks as bad.
int kvq_store_good_tokens(struct kvq_store *store, const struct kvq_store_session *session,
                          uint64_t *tokens, char *text, size_t n);

// ---- Removing ----

// Deletes all shards of a session, and the blocks that no other session has. gc and compaction free
// the space of these blocks, in whole segments.
int kvq_store_delete(struct kvq_store *store, const char *space, const char *name, char *text,
                     size_t n);

// Names of sessions that nobody can ask for once the run that saved them is over: a number behind
// #, which no session of users has.
#define KVQ_STORE_LEFT_FROM  "#"
#define KVQ_STORE_LEFT_BELOW "$"

// Deletes sessions of such names, of a namespace or, with NULL, of all, that were last saved before
// the store was opened: up to `most` shards in one transaction. *deleted says how many; 0: there
// are none.
int kvq_store_sweep(struct kvq_store *store, const char *space, uint32_t most, uint32_t *deleted,
                    char *text, size_t n);

struct kvq_store_freed {
    uint32_t segments; // files removed
    uint64_t bytes;    // physical, of these
    uint64_t moved;    // bytes of records copied to the last segment
    bool more;         // there is more to do: call again
};

// Removes segments in which no record is alive. Needs no space.
int kvq_store_gc(struct kvq_store *store, struct kvq_store_freed *freed, char *text, size_t n);
// Copies live records out of segments, the worst first, and removes the segments that are then
// empty. Takes segments of which at least `dead_percent` is dead, and more than an eighth of a full
// segment's size. Copies about `budget` bytes in one call, at least one record. A crash at any
// moment loses nothing.
int kvq_store_compact(struct kvq_store *store, uint64_t budget, uint32_t dead_percent,
                      struct kvq_store_freed *freed, char *text, size_t n);

// ---- Status and verify ----

struct kvq_store_status {
    uint64_t sessions, blocks, bad_blocks;
    uint32_t segments;
    uint64_t live_bytes, dead_bytes; // of records in segments
    uint64_t empty_bytes;            // physical: what kvq_store_gc would free now
    uint64_t catalog_bytes;          // physical
    uint64_t physical_bytes;         // of all files, what the cap is about
    uint64_t cap_bytes, free_bytes;  // free: of the file system
    uint64_t room_bytes;             // of records, that one more save can write, as cap and file
                                     // system are now: less what the catalog is to have for it. The
                                     // catalog takes half a KiB more for each block of a save
    bool read_only;                  // since a failure, or by the file system: see `why`
    char why[KVQ_TEXT_BYTES];
};
int kvq_store_status(struct kvq_store *store, struct kvq_store_status *status, char *text,
                     size_t n);
// The same without what takes long to count in a large store: of the catalog's figures `sessions`
// alone, the others are 0.
int kvq_store_brief(struct kvq_store *store, struct kvq_store_status *status, char *text, size_t n);

struct kvq_store_verified {
    uint32_t segments;
    uint64_t bytes;         // read
    uint64_t damaged_bytes; // in records that are not as they were written, dead ones included
    uint64_t bad_blocks;    // newly marked
    uint64_t good_again;    // marked before, sound now: their marks are removed
    uint32_t missing;       // segments that are not there, or shorter than the catalog says
    bool catalog_bad;       // it is damaged, or its rows disagree; the next open makes it anew
    uint64_t sessions;      // that lack tokens by bad blocks, also of earlier runs
    char text[KVQ_TEXT_BYTES];
};
// Reads every segment, each record's header and payload, and marks blocks that are damaged or that
// the disk cannot read. Removes the
// marks of blocks that are sound now (their file was restored, or the disk failed for a while). May
// run beside readers and a writer; checks what was committed when the call reached the segment.
// progress() (may be NULL) gets the bytes done and all; if it returns something else than 0, the
// call ends with KVQ_E_CANCELLED. Returns 0 also if it finds damage: look at *verified.
int kvq_store_verify(struct kvq_store *store,
                     int (*progress)(void *context, uint64_t done, uint64_t all), void *context,
                     struct kvq_store_verified *verified, char *text, size_t n);

// ---- Namespaces ----

// *bytes: payload of the blocks of the namespace's sessions, each block counted once even if
// several sessions share it. *sessions: how many sessions, a group of shards counted once.
int kvq_store_usage(struct kvq_store *store, const char *space, uint64_t *bytes, uint64_t *sessions,
                    char *text, size_t n);
// The bytes of all namespaces that have, or had, a session. The caller releases *spaces with
// free().
struct kvq_store_space {
    char space[KVQ_NAME_BYTES];
    uint64_t bytes;
};
int kvq_store_spaces(struct kvq_store *store, struct kvq_store_space **spaces, size_t *count,
                     char *text, size_t n);
// Limits the bytes of a namespace to `bytes` (0: no limit): from now on a save or import that would
// exceed the limit fails with KVQ_E_QUOTA and the figures, and earlier saves stay. If the namespace
// is above its limit already, saves that add no bytes succeed. `space` NULL: the limit of all
// namespaces without one of their own. The store keeps limits in memory only. Any thread.
int kvq_store_limit(struct kvq_store *store, const char *space, uint64_t bytes, char *text,
                    size_t n);
// From now on the namespace has no limit of its own, whether or not it had one. Any thread.
void kvq_store_limit_forget(struct kvq_store *store, const char *space);

// ---- Moving sessions between stores ----

// Writes all shards of a session into one file (format: segment.h, manifest.h), synced, then
// renamed to path: over a file that is there with `replace`, else KVQ_E_EXISTS. Until then its name
// is the path with a number and .kvq.tmp behind it; such files that a process has left which was
// killed are removed. Refuses a session with damaged blocks (KVQ_E_DAMAGED). KVQ_E_STALE: the
// session was saved again meanwhile, and what it had before is gone; export it again.
int kvq_store_export(struct kvq_store *store, const char *space, const char *name, const char *path,
                     bool replace, char *text, size_t n);
// Reads the names, shards and tokens of the first session in an exported file; the rest of *out is
// zeros. Does not check the rest of the file.
int kvq_store_exported(struct kvq_store *store, const char *path, struct kvq_store_session *out,
                       char *text, size_t n);
// What a whole file holds: of the session, names and shards as above, tokens, blocks and bytes of
// all shards together, and the first shard's opaque bytes, to be freed with free().
struct kvq_store_file {
    struct kvq_store_session session;
    void *opaque; // session.version, session.n_bytes
};
// Reads and checks the file as an import does, and saves nothing. watch: as below.
struct kvq_store_watch;
int kvq_store_look(struct kvq_store *store, const char *path, const struct kvq_store_watch *watch,
                   struct kvq_store_file *out, char *text, size_t n);
// Then whether an import as this session may have the name (KVQ_E_EXISTS), and as the store is now
// the room for it (KVQ_E_QUOTA, KVQ_E_READ_ONLY, KVQ_E_NO_SPACE): about, since what is dead
// counts as room.
int kvq_store_look_name(struct kvq_store *store, const char *path,
                        const struct kvq_store_file *file, const char *space, const char *name,
                        bool replace, char *text, size_t n);
int kvq_store_look_room(struct kvq_store *store, const struct kvq_store_file *file,
                        const char *space, const char *name, char *text, size_t n);
// Saves the session of an exported file. space and name, if not NULL, replace those of the file.
// KVQ_E_EXISTS without `replace` if the store has such a session. The file is foreign: the import
// checks everything, and saves all of it or nothing.
int kvq_store_import(struct kvq_store *store, const char *path, const char *space, const char *name,
                     bool replace, char *text, size_t n);

// The same with a watcher: tell() gets the bytes done and all now and then; if it returns something
// else than 0, the call ends with KVQ_E_CANCELLED, and nothing has changed. watch may be NULL.
struct kvq_store_watch {
    int (*tell)(void *context, uint64_t done, uint64_t all);
    void *context;
};
int kvq_store_export_watched(struct kvq_store *store, const char *space, const char *name,
                             const char *path, bool replace, const struct kvq_store_watch *watch,
                             char *text, size_t n);
int kvq_store_import_watched(struct kvq_store *store, const char *path, const char *space,
                             const char *name, bool replace, const struct kvq_store_watch *watch,
                             char *text, size_t n);

#endif
