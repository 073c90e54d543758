// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a segment file, and of a file that a session is exported to.
//
// A file is a row of records, each starting at a multiple of 64 bytes. All numbers are
// little-endian. A record is a header of 64 bytes, its payload, and zeros up to the next multiple
// of 64.
//
//   0   4   magic "KVQR"
//   4   2   version of the format, 1
//   6   2   kind, see enum kvq_record_kind
//   8   8   length of the payload in bytes
//   16  8   id: what it is the record of, by kind
//   24  8   transaction that wrote it; grows from one to the next, within a store never used twice
//   32  16  XXH3-128 of the payload, low half first
//   48  16  XXH3-128 of bytes 0 to 47, seeded with the file's salt, low half first
//
// The first record of a file is a FILE record; its own header is seeded with 0. Payload, 4032
// bytes, so that data starts at byte 4096:
//
//   0   16  id of the store, random; of an export, the store that it came from
//   16  8   number of the segment (as in its name); 0 in an export
//   24  8   salt, random; of an export, a hash of the store's and its sessions' ids
//   32  4000 zeros
//
// The salt keeps bytes that a client chose (a block's payload may be any bytes) from being taken
// for records when a damaged file is searched for the next good one.
//
// Kinds            id       payload
//   BLOCK     2    its own  opaque
//   MANIFEST  3    its own  a session as it was saved, see manifest.h
//   DROP      4    its own  8 bytes: the session that was deleted
//   COMMIT    5    its own  struct kvq_commit below
//   PAD       6    0        zeros; fills up to a multiple of 4096 bytes
//
// A transaction's records count only if its COMMIT record is there, in this segment or a later one.
// It names the transaction before it, so that a catalog which has lost transactions is noticed.
// Everything up to the length that the catalog has for a segment was synced before the catalog said
// so and is never written again; everything behind it belongs to no session and is cut off.
// After a COMMIT the file is padded to a multiple of 4096 bytes: the next transaction writes
// whole pages and never a page again that holds committed bytes.
//
// Compaction copies records that are alive to the end, under the same id and a new transaction. It
// copies DROP records, and COMMIT records of transactions that reach over several segments, for as
// long as there is a segment before theirs.
#ifndef KVQ_STORAGE_SEGMENT_H
#define KVQ_STORAGE_SEGMENT_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "storage/io.h"

#define KVQ_RECORD_MAGIC "KVQR"

enum {
    KVQ_RECORD_VERSION = 1,
    KVQ_RECORD_HEAD = 64, // bytes of a header, and what records are aligned to
    KVQ_SEGMENT_FRONT = KVQ_IO_PAGE,
    KVQ_STORE_ID_BYTES = 16,
};

// Ids, transactions, sessions and segments are below that: it leaves counters room in SQLite's 64
// bits with a sign.
#define KVQ_MAX_STORE_NUMBER (1ull << 62)

enum kvq_record_kind {
    KVQ_RECORD_FILE = 1,
    KVQ_RECORD_BLOCK = 2,
    KVQ_RECORD_MANIFEST = 3,
    KVQ_RECORD_DROP = 4,
    KVQ_RECORD_COMMIT = 5,
    KVQ_RECORD_PAD = 6,
};

struct kvq_checksum {
    uint64_t low, high;
};

struct kvq_record {
    char magic[4];
    uint16_t version, kind;
    uint64_t length, id, transaction;
    struct kvq_checksum payload, head;
};

static_assert(sizeof(struct kvq_record) == KVQ_RECORD_HEAD, "a header is 64 bytes");
static_assert(offsetof(struct kvq_record, version) == 4, "version");
static_assert(offsetof(struct kvq_record, kind) == 6, "kind");
static_assert(offsetof(struct kvq_record, length) == 8, "length");
static_assert(offsetof(struct kvq_record, id) == 16, "id");
static_assert(offsetof(struct kvq_record, transaction) == 24, "transaction");
static_assert(offsetof(struct kvq_record, payload) == 32, "checksum of the payload");
static_assert(offsetof(struct kvq_record, head) == 48, "checksum of the header");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "files are little-endian, as all we run on");

struct kvq_file_head {
    uint8_t store[KVQ_STORE_ID_BYTES];
    uint64_t number, salt;
    uint8_t zeros[KVQ_SEGMENT_FRONT - KVQ_RECORD_HEAD - 32];
};

static_assert(sizeof(struct kvq_file_head) == 4032, "data starts at byte 4096");
static_assert(offsetof(struct kvq_file_head, number) == 16, "number");
static_assert(offsetof(struct kvq_file_head, salt) == 24, "salt");

// The transaction that is committed (a copy's header names the one that copied it), the one that
// the catalog had last when it was made (0: none), how many sessions it is about, and how many
// records of other kinds than PAD it has besides this one.
struct kvq_commit {
    uint64_t transaction, before, sessions, records;
};

static_assert(sizeof(struct kvq_commit) == 32, "payload of COMMIT");

// Bytes that a record with such a payload takes in a file.
static inline uint64_t kvq_record_bytes(uint64_t payload)
{
    return KVQ_RECORD_HEAD + (payload + KVQ_RECORD_HEAD - 1) / KVQ_RECORD_HEAD * KVQ_RECORD_HEAD;
}

struct kvq_checksum kvq_checksum(const void *data, size_t n);
bool kvq_checksum_equal(struct kvq_checksum a, struct kvq_checksum b);

// The checksum that a header has to have.
struct kvq_checksum kvq_record_checksum(const struct kvq_record *r, uint64_t salt);
// Fills in everything but the payload's bytes.
void kvq_record_make(struct kvq_record *r, enum kvq_record_kind kind, uint64_t id,
                     uint64_t transaction, uint64_t length, struct kvq_checksum payload,
                     uint64_t salt);

// Whether 64 bytes that were read are a header that was written under the salt. Of version it says
// nothing: a header of a newer version is sound as well.
bool kvq_record_sound(const struct kvq_record *r, uint64_t salt);

// Whether a sound header, and the payload of a COMMIT, say what a segment's can: a kind that there
// is, and numbers within their bounds. A checksum alone keeps nobody from making up others.
bool kvq_record_sane(const struct kvq_record *r);
bool kvq_commit_sane(const struct kvq_commit *c);

// ---- Reading a file record by record ----

// What a walk finds. A piece of damage reaches from a record that is not sound to the next one that
// is, or to the end.
enum kvq_walk_find {
    KVQ_WALK_END,
    KVQ_WALK_RECORD,  // header and payload are as they were written
    KVQ_WALK_PAYLOAD, // the header is sound, the payload is not
    KVQ_WALK_DAMAGE,  // no header where one should be
};

// A walk over [at, end) of a file. It trusts nothing that it reads.
struct kvq_walk {
    struct kvq_io *io;
    int file;
    uint64_t salt, end;
    uint64_t next; // where the next record starts
    // What was found last: where, how many bytes, and the header of a record.
    uint64_t at, bytes;
    struct kvq_record record;
    // Where to go on behind damage, if the caller knows: the first record at or behind an offset,
    // or UINT64_MAX for none. NULL: the file is searched for the next sound header.
    uint64_t (*known)(void *context, uint64_t from);
    void *context;
    // Payloads of so many bytes and more are KVQ_WALK_PAYLOAD, and are not read; 0: none.
    uint64_t too_long;
    bool past_errors;    // what the disk cannot read (EIO) is damage as any other
    uint8_t *buffer;     // of the caller, what payloads are read through
    size_t buffer_bytes; // at least KVQ_IO_PAGE, a multiple of it
};

// The next find, or a negative errno (-EIO not with past_errors). KVQ_WALK_DAMAGE at the very front
// means that this is no segment, or another one.
int kvq_walk_next(struct kvq_walk *w);

// Reads and checks the FILE record. 0, a negative errno, or a KVQ_WALK_* of what is there instead;
// *version is that of the format, also of one that we cannot read (0: none).
int kvq_segment_front(struct kvq_io *io, int file, struct kvq_file_head *head, uint16_t *version);

#endif
