// SPDX-License-Identifier: Apache-2.0
//
// catalog.sum: the checksum that the catalog had when the store was closed in order. While the
// catalog still has it, byte by byte, nothing can have happened to a catalog that was sound then,
// and opening need not go through its rows, which takes a hundred times as long as reading them.
//
// The file proves itself, and so need not be durable at any certain moment: whatever it is after a
// crash, it is believed only if it is whole, and if the catalog is what it says, without anything
// in a WAL. It is then the catalog of an orderly end, whenever that was. (Whether the catalog is
// older than the segments is looked at in any case.)
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "storage/store_internal.h"

static const char *const sum_file = "catalog.sum";

// All of the file.
struct closed {
    char magic[8];
    uint64_t bytes;             // of catalog.db
    struct kvq_checksum sum;    // of all of them
    struct kvq_checksum itself; // of what stands before
};

static_assert(sizeof(struct closed) == 48, "the file has no gaps");

static struct kvq_checksum sum_of_itself(const struct closed *it)
{
    return kvq_checksum(it, offsetof(struct closed, itself));
}

// Whether SQLite finds nothing in a WAL or journal: its header is zeros, or there is no file.
static bool is_empty(struct kvq_store *s, const char *name)
{
    static const uint8_t zeros[32];
    uint8_t head[sizeof zeros] = {0};
    char path[KVQ__PATH_BYTES];
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    if (file < 0)
        return file == -ENOENT;
    int rc = kvq_io_read(s->io, file, head, sizeof head, 0, NULL);
    s->io->close(s->io, file);
    return rc == 0 && memcmp(head, zeros, sizeof head) == 0;
}

static int sum_up(struct kvq_store *s, int file, struct closed *it)
{
    struct kvq_io_status status;
    XXH3_state_t state;
    uint8_t *piece = malloc(KVQ__WALK_BYTES);
    int rc = piece ? kvq_io_status(s->io, file, &status) : -ENOMEM;
    size_t got = 0;
    (void)XXH3_128bits_reset(&state);
    it->bytes = rc ? 0 : status.bytes;
    for (uint64_t at = 0; rc == 0 && at < it->bytes; at += got) {
        uint64_t left = it->bytes - at;
        size_t n = left < KVQ__WALK_BYTES ? (size_t)left : KVQ__WALK_BYTES;
        rc = kvq_io_read(s->io, file, piece, n, at, &got);
        if (rc == 0 && got < n)
            rc = -EIO;
        if (rc == 0)
            (void)XXH3_128bits_update(&state, piece, n);
    }
    XXH128_hash_t hash = XXH3_128bits_digest(&state);
    it->sum = (struct kvq_checksum){hash.low64, hash.high64};
    free(piece);
    return rc;
}

// What the file is to say of the catalog as it is now. False: nothing.
static bool describe(struct kvq_store *s, struct closed *it)
{
    char path[KVQ__PATH_BYTES];
    *it = (struct closed){.magic = "kvq-sum"};
    if (!is_empty(s, "catalog.db-wal") || !is_empty(s, "catalog.db-journal"))
        return false;
    kvq__path(s, "catalog.db", path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    int rc = file < 0 ? file : sum_up(s, file, it);
    if (file >= 0)
        s->io->close(s->io, file);
    it->itself = sum_of_itself(it);
    return rc == 0;
}

// False: there is none that makes sense.
static bool read_file(struct kvq_store *s, struct closed *it)
{
    char path[KVQ__PATH_BYTES];
    size_t got = 0;
    kvq__path(s, sum_file, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    if (file < 0)
        return false;
    int rc = kvq_io_read(s->io, file, it, sizeof *it, 0, &got);
    s->io->close(s->io, file);
    return rc == 0 && got == sizeof *it && kvq_checksum_equal(it->itself, sum_of_itself(it));
}

bool kvq__closed_in_order(struct kvq_store *s)
{
    struct closed said, is;
    return read_file(s, &said) && describe(s, &is) && memcmp(&said, &is, sizeof said) == 0;
}

void kvq__closed_forget(struct kvq_store *s)
{
    char path[KVQ__PATH_BYTES];
    kvq__path(s, sum_file, path);
    (void)kvq_io_unlink(s->io, path);
}

// At the cap no file is made, which would take a page.
static bool may_be_made(struct kvq_store *s)
{
    return s->cap_bytes == 0 || kvq__measure_other(s) != 0 ||
           kvq__physical(s) + KVQ_IO_PAGE <= s->cap_bytes;
}

void kvq__closed_note(struct kvq_store *s)
{
    char path[KVQ__PATH_BYTES];
    struct closed it;
    assert(s->sound && !s->read_only && !s->catalog.db);
    if (!describe(s, &it)) {
        kvq__closed_forget(s);
        return;
    }
    kvq__path(s, sum_file, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_WRITE);
    if (file == -ENOENT && may_be_made(s))
        file = kvq_io_open(s->io, path, KVQ_IO_WRITE | KVQ_IO_CREATE);
    int rc = file < 0 ? file : kvq_io_write(s->io, file, &it, sizeof it, 0);
    if (file >= 0)
        s->io->close(s->io, file);
    if (rc && file >= 0)
        kvq__closed_forget(s);
}
