// SPDX-License-Identifier: Apache-2.0
//
// What the files of the store share. store.h is for the others.
//
// Who may touch what
//   lock          the table of segments, limits, `writing`, `why`; held for moments, no sync
//   catalog_lock  the catalog; held over its transactions. Taken before `lock`, never inside it
//   the writer    the thread that set `writing`: everything below "the writer's"
#ifndef KVQ_STORAGE_STORE_INTERNAL_H
#define KVQ_STORAGE_STORE_INTERNAL_H

#include <pthread.h>

#include "storage/catalog.h"
#include "storage/complain.h"
#include "storage/manifest.h"
#include "storage/store.h"

enum {
    KVQ__NAME_BYTES = 40,        // of files in the folder
    KVQ__OPEN_FILES = 64,        // segments open for reading at a time
    KVQ__STEP_BYTES = 64 << 20,  // space of a segment is taken in advance in such steps,
    KVQ__STEP_LEAST = 1 << 20,   // or on a disk with less, in smaller ones down to this
    KVQ__RESERVE = 4 << 20,      // of the cap, for the catalog and for deleting,
    KVQ__RESERVE_ROW = 512,      // and for each row that a save will write into the catalog
    KVQ__RESERVE_FREE = 1 << 20, // the same for what frees space
    KVQ__RESERVE_FREE_ROW = 256,
    // Space on disk that only the catalog can have, so that deleting works on a full disk. In the
    // WAL: KVQ__RESERVE, KVQ__RESERVE_BLOCK for each block of the largest session (deleting one
    // takes about 90 bytes, docs/storage.md), and KVQ__RESERVE_HASH for each page of tokens of the
    // longest session (a hash may have a page of the database to itself). Pages that no checkpoint
    // has copied yet take up to KVQ__WAL_BACKLOG of that. Behind the end of the database:
    // KVQ__CATALOG_SPARE.
    KVQ__RESERVE_BLOCK = 128,
    KVQ__RESERVE_HASH = 4200,
    KVQ__HASH_TOKENS = 128,
    KVQ__WAL_BACKLOG = 1 << 20,
    KVQ__CATALOG_SPARE = 256 << 10,
    KVQ__READ_AHEAD = 16 << 20,
    KVQ__WALK_BYTES = 1 << 20, // buffer to walk through segments with
};

#define KVQ__PATH_BYTES (KVQ_MAX_STORE_FOLDER + KVQ__NAME_BYTES)

// A segment that exists. `number` and `salt` never change.
struct kvq__segment {
    uint64_t number, salt;
    uint64_t bytes;    // committed; what stands behind them does not count
    uint64_t end;      // the writer's: end of a segment that the transaction finished; else 0
    uint64_t physical; // on disk
    uint64_t length;   // of its file when the store was opened
    bool sealed;       // nothing is written to it any more
    uint32_t pins;     // readers
    bool gone;         // removed; freed with the last pin
    int file;          // for reading, -1: not open
    uint64_t ahead;    // the system was told that bytes up to here will be read
    bool sick;         // compaction could not read all of it: others are compacted first
};

// The largest sessions, which take most space to delete.
struct kvq__largest {
    uint64_t blocks; // of the one that has most
    uint64_t hashes; // of the longest: at most one for each page of its tokens
};

// A thread that writes one buffer while the caller fills the next. The first full buffer starts it.
struct kvq__flusher {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    bool made, started, busy, stop;
    struct kvq_io *io;
    int file;
    const uint8_t *data;
    size_t n;
    uint64_t at;
    int error; // the first since the last flush_wait, a negative errno
};

// A record in a segment that the transaction puts into the catalog.
struct kvq__written {
    uint64_t id, segment, offset, length;
    enum kvq_record_kind kind;
    struct kvq_checksum checksum;
};

// How many bytes of blocks a namespace may have; 0: no limit.
struct kvq__limit {
    char space[KVQ_NAME_BYTES];
    uint64_t bytes;
};

// Where records are appended. Offsets of writes, their sizes and memory are multiples of a page.
struct kvq__writer {
    struct kvq__segment *segment; // NULL: none is open for writing
    int file;
    uint64_t at;        // where the next record goes
    uint64_t allocated; // space taken for the file
    uint64_t step;      // how much is to be taken in advance, less where the disk is nearly full
    uint8_t *buffer[2];
    unsigned current;
    size_t used; // buffer[current] holds [at - used, at)
    struct kvq__flusher flusher;
    // Of the transaction that is being written.
    struct kvq__segment *begun; // the one that it found open, NULL: none
    uint64_t first_new;         // the number of the first segment that it makes
    struct kvq__written commit; // its COMMIT record
    uint64_t rows;              // of the catalog that it will change, about
    struct kvq__largest largest;
    uint64_t records;           // appended
    bool frees;                 // the transaction frees space: it may use the reserve
    bool broken;                // a write or sync failed: what is on disk is unknown
    struct kvq__written *drops; // DROP records of the sessions in `owed`
    size_t n_drops, room_drops;
};

struct kvq_store {
    struct kvq_io *io;
    char folder[KVQ_MAX_STORE_FOLDER];
    uint64_t segment_bytes, cap_bytes;
    uint32_t buffer_bytes;
    int lock_file;
    uint8_t id[KVQ_STORE_ID_BYTES];

    pthread_mutex_t lock;
    uint64_t other_bytes;           // physical, of files that are neither segments nor the catalog
    struct kvq__segment **segments; // by number
    size_t n_segments, room_segments;
    struct kvq__limit *limits;
    size_t n_limits, room_limits;
    uint64_t default_limit; // of namespaces that have none of these
    bool writing;
    bool read_only;
    char why[KVQ_TEXT_BYTES];

    pthread_mutex_t catalog_lock;
    struct kvq__catalog catalog;
    bool sound;       // it was when it was opened,
    uint32_t doubted; // and a word: something has said otherwise since

    // The writer's.
    struct kvq__writer writer;
    uint64_t *owed; // sessions that were deleted without a DROP record, as in the catalog
    size_t n_owed, room_owed;
    uint32_t n_sick;     // times that a segment has turned out to be that
    bool names_unsynced; // a removed file may come back after a loss of power: sync the folder
    uint64_t last_transaction;  // in the catalog
    uint64_t found_transaction; // that, when the store was opened
    uint64_t next_transaction, next_block, next_session, next_segment;
};

// ---- store.c: names, errors, who writes ----

void kvq__path(const struct kvq_store *s, const char *name, char path[KVQ__PATH_BYTES]);
void kvq__segment_name(uint64_t number, char name[KVQ__NAME_BYTES]);
// The number in a segment's name, 0 if it is none.
uint64_t kvq__segment_number(const char *name);

// Where a call's complaints about the store go.
static inline struct kvq__complaint kvq__store_complaint(const struct kvq_store *s, char *text,
                                                         size_t n)
{
    return (struct kvq__complaint){s->folder, text, n};
}
// Complains about a call of the table of I/O functions: "NAME cannot be VERBED: why".
int kvq__io_complain(const struct kvq__complaint *c, int error, const char *name, const char *verb);
// Complains about a failure of the catalog with what SQLite said.
int kvq__catalog_complain(struct kvq_store *s, int code, const struct kvq__complaint *c);
// It may be damaged, or contradict itself: the next opening is to check all of it. Any thread.
void kvq__catalog_doubt(struct kvq_store *s);

// Makes the caller the writer, until kvq__write_end. KVQ_E_BUSY, KVQ_E_READ_ONLY.
int kvq__write_begin(struct kvq_store *s, const struct kvq__complaint *c);
void kvq__write_end(struct kvq_store *s);
// Refuses all writers until the store is opened again.
void kvq__set_read_only(struct kvq_store *s, const char *why);

// ---- segments.c: the table of segments ----

// Adds a segment with 0 committed bytes. NULL: no memory.
struct kvq__segment *kvq__segment_add(struct kvq_store *s, uint64_t number, uint64_t salt);
// Takes a segment out of the table and removes its file. Readers that pinned it may finish. A file
// that cannot be removed stays until the store is opened again.
void kvq__segment_remove(struct kvq_store *s, uint64_t number);
// Keeps a file that is no segment of this store under another name, with .bad behind it.
int kvq__segment_set_aside(struct kvq_store *s, uint64_t number, const struct kvq__complaint *c);
// Pins a segment and opens it for reading. KVQ_E_NO_SESSION: there is none (any more).
int kvq__segment_pin(struct kvq_store *s, uint64_t number, struct kvq__segment **out,
                     const struct kvq__complaint *c);
void kvq__segment_unpin(struct kvq_store *s, struct kvq__segment *segment);
// The lowest number of a segment above `number`, 0 if there is none.
uint64_t kvq__segment_after(struct kvq_store *s, uint64_t number);
void kvq__segments_free(struct kvq_store *s);
// Whether there is no file of that segment.
bool kvq__segment_missing(struct kvq_store *s, uint64_t number);
// Whether a segment is known to be sick; `now`: it has turned out to be.
bool kvq__segment_sick(struct kvq_store *s, uint64_t number, bool now);
// Bytes on disk of what was committed in a segment; 0: there is none of that number.
uint64_t kvq__segment_physical(struct kvq_store *s, uint64_t number);
// Looks what other files take in the folder now: people put some there, and remove some. 0 or a
// negative errno, after which the last figure stays.
int kvq__measure_other(struct kvq_store *s);
// Physical bytes of all files, others as they were measured.
uint64_t kvq__physical(struct kvq_store *s);
uint64_t kvq__physical_catalog(struct kvq_store *s);

// ---- writer.c: appending records ----

int kvq__writer_make(struct kvq_store *s, const struct kvq__complaint *c);
void kvq__writer_free(struct kvq_store *s);
// Begins a transaction of records. `frees`: the transaction deletes or compacts. `rows`: rows of
// the catalog that it will change besides those of its records.
int kvq__writer_begin(struct kvq_store *s, bool frees, uint64_t rows,
                      const struct kvq__complaint *c);
// Appends a record; *out says where it is.
int kvq__append(struct kvq_store *s, enum kvq_record_kind kind, uint64_t id, const void *data,
                uint64_t n, struct kvq__written *out, const struct kvq__complaint *c);
// Appends the DROP records that are owed and COMMIT, then writes and syncs everything, names of new
// files included.
int kvq__writer_sync(struct kvq_store *s, uint64_t sessions, const struct kvq__complaint *c);
// The catalog has the records: they count from now on.
void kvq__writer_done(struct kvq_store *s);
// Seals the open segment, between transactions.
void kvq__writer_retire(struct kvq_store *s);
// Gives back the space that was taken in advance. All appended records have been synced.
void kvq__writer_spare(struct kvq_store *s);
// Bytes of records that a save without rows may write, with so many used of the cap and free on the
// file system: the same sum that refuses it. Holding the catalog's lock, or by the writer.
uint64_t kvq__room(const struct kvq_store *s, uint64_t used, uint64_t free_bytes);
// Takes back the records that were appended since kvq__writer_begin.
void kvq__writer_undo(struct kvq_store *s);

// Makes room for an element more than n, of `size` bytes each. False: no memory.
bool kvq__grow(void **array, size_t *room, size_t n, size_t size);

// ---- commit.c: one transaction of the catalog ----

// Reserves the space on disk that deleting the largest sessions will need. A save without that
// space is refused. KVQ_E_NO_SPACE.
int kvq__catalog_hold(struct kvq_store *s, const struct kvq__largest *largest,
                      const struct kvq__complaint *c);
// Reserves as much of that space as there is: a store opens on a full disk, too.
void kvq__catalog_hold_some(struct kvq_store *s);
// Begins a transaction and takes catalog_lock, which the caller holds until kvq__catalog_end.
int kvq__catalog_begin(struct kvq_store *s, const struct kvq__complaint *c);
// Puts records of the transaction into the table `blocks`.
int kvq__catalog_blocks(struct kvq_store *s, const struct kvq__written *w, size_t n);
// The same for a record that the store itself references: DROP, COMMIT.
int kvq__catalog_own(struct kvq_store *s, const struct kvq__written *w);
int kvq__catalog_free_blocks(struct kvq_store *s); // blocks without references
// Puts the segments as the writer left them, and the counters; before the blocks.
int kvq__catalog_segments(struct kvq_store *s);
int kvq__catalog_counters(struct kvq_store *s, uint64_t transaction);
// Commits if rc is 0, else rolls back; then the transaction's records count, or do not. Releases
// catalog_lock.
int kvq__catalog_end(struct kvq_store *s, int rc, const struct kvq__complaint *c);

// ---- compact.c ----

// Bytes on disk of the segments that kvq_store_gc would remove now. The caller holds catalog_lock.
int kvq__empty_bytes(struct kvq_store *s, uint64_t *bytes);

// ---- recover.c, rebuild.c ----

int kvq__recover(struct kvq_store *s, struct kvq_store_report *report,
                 const struct kvq__complaint *c);
// Compares two uint64_t, for qsort and bsearch.
int kvq__by_number(const void *a, const void *b);
// Fills the catalog, which is open and empty, from the segments of these numbers, ascending, and
// the table of segments with those that could be read.
int kvq__rebuild(struct kvq_store *s, const uint64_t *numbers, size_t n,
                 struct kvq_store_report *report, const struct kvq__complaint *c);

// ---- closed.c: catalog.sum, what the catalog is after an orderly end ----

// Whether the catalog, which is not open, is to the byte what an orderly end has left.
bool kvq__closed_in_order(struct kvq_store *s);
// Notes what it is now, after it was closed. Of one that is sound, as far as is known.
void kvq__closed_note(struct kvq_store *s);
// It has turned out to be damaged: the next opening is to check all of it.
void kvq__closed_forget(struct kvq_store *s);

// ---- read.c ----

// Finds a block: where it is, whether it is damaged, and the kind of its record. The caller holds
// catalog_lock. KVQ_E_NO_SESSION: there is no such block.
int kvq__block_find(struct kvq_store *s, uint64_t id, struct kvq_stored *out,
                    enum kvq_record_kind *kind);
void kvq__session_row(sqlite3_stmt *rows, struct kvq_store_session *out, uint64_t *manifest);
// kvq_store_read. past_errors: what the disk cannot read (EIO) counts as damaged and is marked.
int kvq__block_read(struct kvq_store *s, const struct kvq_stored *block, void *out,
                    bool past_errors, const struct kvq__complaint *c);
// Marks a block as bad, unless it has moved meanwhile. Takes catalog_lock.
void kvq__block_mark(struct kvq_store *s, uint64_t id, uint64_t segment, uint64_t offset);

#endif
