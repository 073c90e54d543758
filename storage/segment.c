// SPDX-License-Identifier: Apache-2.0
//
// Records: making headers, and walking through a file that may be damaged anywhere.
#define XXH_STATIC_LINKING_ONLY // the streaming state on the stack
#include "storage/segment.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <xxhash.h>

static struct kvq_checksum of_hash(XXH128_hash_t h)
{
    return (struct kvq_checksum){h.low64, h.high64};
}

struct kvq_checksum kvq_checksum(const void *data, size_t n)
{
    return of_hash(XXH3_128bits(data, n));
}

bool kvq_checksum_equal(struct kvq_checksum a, struct kvq_checksum b)
{
    return a.low == b.low && a.high == b.high;
}

struct kvq_checksum kvq_record_checksum(const struct kvq_record *r, uint64_t salt)
{
    return of_hash(XXH3_128bits_withSeed(r, offsetof(struct kvq_record, head), salt));
}

void kvq_record_make(struct kvq_record *r, enum kvq_record_kind kind, uint64_t id,
                     uint64_t transaction, uint64_t length, struct kvq_checksum payload,
                     uint64_t salt)
{
    assert(kind >= KVQ_RECORD_FILE && kind <= KVQ_RECORD_PAD);
    memcpy(r->magic, KVQ_RECORD_MAGIC, sizeof r->magic);
    r->version = KVQ_RECORD_VERSION;
    r->kind = (uint16_t)kind;
    r->length = length;
    r->id = id;
    r->transaction = transaction;
    r->payload = payload;
    r->head = kvq_record_checksum(r, salt);
}

bool kvq_record_sound(const struct kvq_record *r, uint64_t salt)
{
    return memcmp(r->magic, KVQ_RECORD_MAGIC, sizeof r->magic) == 0 &&
           kvq_checksum_equal(r->head, kvq_record_checksum(r, salt));
}

bool kvq_record_sane(const struct kvq_record *r)
{
    bool pad = r->kind == KVQ_RECORD_PAD;
    bool known = pad || (r->kind >= KVQ_RECORD_BLOCK && r->kind <= KVQ_RECORD_COMMIT);
    return known && pad == (r->id == 0) && r->id < KVQ_MAX_STORE_NUMBER &&
           r->transaction < KVQ_MAX_STORE_NUMBER;
}

bool kvq_commit_sane(const struct kvq_commit *c)
{
    return c->before < c->transaction && c->transaction < KVQ_MAX_STORE_NUMBER;
}

// ---- Walking ----

// What the disk cannot read is not there, if the walk goes past errors.
static int walk_read(const struct kvq_walk *w, void *data, size_t n, uint64_t at, size_t *got)
{
    int rc = kvq_io_read(w->io, w->file, data, n, at, got);
    return rc == -EIO && w->past_errors ? 0 : rc;
}

// Whether a sound header stands at `at`, whose record ends within the walk. Negative errno.
static int header_at(struct kvq_walk *w, uint64_t at)
{
    size_t got;
    assert(at <= w->end);
    int rc = walk_read(w, &w->record, sizeof w->record, at, &got);
    if (rc)
        return rc;
    return got == sizeof w->record && kvq_record_sound(&w->record, w->salt) &&
           w->record.length <= w->end - at && kvq_record_bytes(w->record.length) <= w->end - at;
}

// Hashes the payload and the zeros behind it. 1: as written, 0: not, or a negative errno.
static int payload_sound(struct kvq_walk *w, uint64_t at)
{
    static const uint8_t zeros[KVQ_RECORD_HEAD];
    XXH3_state_t state;
    uint64_t left = w->record.length;
    uint64_t behind = kvq_record_bytes(left) - KVQ_RECORD_HEAD - left;
    size_t n = 1, got = 1;
    assert(behind < KVQ_RECORD_HEAD);
    (void)XXH3_128bits_reset(&state);
    while (left > 0 && got == n) {
        n = left < w->buffer_bytes ? (size_t)left : w->buffer_bytes;
        int rc = walk_read(w, w->buffer, n, at, &got);
        if (rc)
            return rc;
        (void)XXH3_128bits_update(&state, w->buffer, got);
        at += got;
        left -= got;
    }
    if (left > 0 || !kvq_checksum_equal(of_hash(XXH3_128bits_digest(&state)), w->record.payload))
        return 0;
    int rc = walk_read(w, w->buffer, (size_t)behind, at, &got);
    return rc ? rc : got == behind && memcmp(w->buffer, zeros, (size_t)behind) == 0;
}

// Looks at every multiple of 64 from `at` for a sound header. Leaves w->next at it, or at the end.
// Past errors, it goes page by page over a piece that the disk cannot read as a whole.
static int search_header(struct kvq_walk *w, uint64_t at)
{
    uint64_t careful = at; // so far
    assert(at % KVQ_RECORD_HEAD == 0);
    while (at < w->end) {
        size_t most = at < careful ? KVQ_IO_PAGE - at % KVQ_IO_PAGE : w->buffer_bytes, got;
        size_t n = w->end - at < most ? (size_t)(w->end - at) : most;
        int rc = kvq_io_read(w->io, w->file, w->buffer, n, at, &got);
        if (rc == -EIO && w->past_errors) {
            at += at < careful ? n : 0;
            careful = at < careful ? careful : at + n;
            continue;
        }
        if (rc)
            return rc;
        for (size_t i = 0; i + KVQ_RECORD_HEAD <= got; i += KVQ_RECORD_HEAD) {
            if (memcmp(w->buffer + i, KVQ_RECORD_MAGIC, 4) != 0)
                continue;
            rc = header_at(w, at + i);
            if (rc < 0)
                return rc;
            if (rc == 1) {
                w->next = at + i;
                return 0;
            }
        }
        if (got < n)
            break;
        at += n;
    }
    w->next = w->end;
    return 0;
}

static int skip_damage(struct kvq_walk *w)
{
    uint64_t from = (w->at + KVQ_RECORD_HEAD) / KVQ_RECORD_HEAD * KVQ_RECORD_HEAD;
    if (w->known) {
        uint64_t next = w->known(w->context, from);
        w->next = next < w->end ? next : w->end;
    } else {
        int rc = search_header(w, from);
        if (rc)
            return rc;
    }
    assert(w->next > w->at && w->next <= w->end);
    w->bytes = w->next - w->at;
    return KVQ_WALK_DAMAGE;
}

int kvq_walk_next(struct kvq_walk *w)
{
    assert(w->buffer_bytes >= KVQ_IO_PAGE && w->buffer_bytes % KVQ_RECORD_HEAD == 0);
    w->at = w->next;
    w->bytes = 0;
    if (w->at >= w->end)
        return KVQ_WALK_END;
    int rc = header_at(w, w->at);
    if (rc < 0)
        return rc;
    if (rc == 0)
        return skip_damage(w);
    w->bytes = kvq_record_bytes(w->record.length);
    w->next = w->at + w->bytes;
    assert(w->next <= w->end);
    if (w->too_long && w->record.length >= w->too_long)
        return KVQ_WALK_PAYLOAD;
    rc = payload_sound(w, w->at + KVQ_RECORD_HEAD);
    return rc < 0 ? rc : rc ? KVQ_WALK_RECORD : KVQ_WALK_PAYLOAD;
}

int kvq_segment_front(struct kvq_io *io, int file, struct kvq_file_head *head, uint16_t *version)
{
    struct kvq_record r;
    size_t got;
    *version = 0;
    int rc = kvq_io_read(io, file, &r, sizeof r, 0, &got);
    if (rc)
        return rc;
    if (got != sizeof r || !kvq_record_sound(&r, 0) || r.kind != KVQ_RECORD_FILE)
        return KVQ_WALK_DAMAGE;
    *version = r.version;
    if (r.version != KVQ_RECORD_VERSION || r.length != sizeof *head)
        return KVQ_WALK_DAMAGE;
    rc = kvq_io_read(io, file, head, sizeof *head, sizeof r, &got);
    if (rc)
        return rc;
    return got == sizeof *head && kvq_checksum_equal(kvq_checksum(head, sizeof *head), r.payload)
               ? 0
               : KVQ_WALK_PAYLOAD;
}
