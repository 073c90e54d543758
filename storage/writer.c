// SPDX-License-Identifier: Apache-2.0
//
// Appending records to the last segment: large writes of whole pages, past the page cache, one
// buffer being filled while the one before it is written.
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/thread.h"
#include "proto/status.h"
#include "storage/store_internal.h"

// ---- The flusher ----

static void *flusher_main(void *argument)
{
    struct kvq__flusher *f = argument;
    pthread_mutex_lock(&f->lock);
    for (;;) {
        while (!f->busy && !f->stop)
            pthread_cond_wait(&f->moved, &f->lock);
        if (!f->busy)
            break;
        assert(f->data && f->n > 0 && f->n % KVQ_IO_PAGE == 0 && f->at % KVQ_IO_PAGE == 0);
        pthread_mutex_unlock(&f->lock);
        int rc = kvq_io_write(f->io, f->file, f->data, f->n, f->at);
        pthread_mutex_lock(&f->lock);
        f->error = f->error ? f->error : rc;
        f->busy = false;
        pthread_cond_broadcast(&f->moved);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

// Waits until nothing is being written; gives the first failure since the last time, once.
static int flush_wait(struct kvq__flusher *f)
{
    assert(f->made);
    pthread_mutex_lock(&f->lock);
    while (f->busy)
        pthread_cond_wait(&f->moved, &f->lock);
    int rc = f->error;
    f->error = 0;
    pthread_mutex_unlock(&f->lock);
    return rc;
}

// Hands a buffer over; it is free again after the next flush_wait.
static int flush_buffer(struct kvq__flusher *f, int file, const uint8_t *data, size_t n,
                        uint64_t at)
{
    assert(file >= 0 && n > 0);
    int rc = flush_wait(f);
    if (rc)
        return rc;
    if (!f->started)
        f->started = kvq_thread_start(&f->thread, flusher_main, f) == 0;
    if (!f->started) // no thread to be had: slower
        return kvq_io_write(f->io, file, data, n, at);
    pthread_mutex_lock(&f->lock);
    assert(!f->busy && !f->stop);
    f->file = file;
    f->data = data;
    f->n = n;
    f->at = at;
    f->busy = true;
    pthread_cond_broadcast(&f->moved);
    pthread_mutex_unlock(&f->lock);
    return 0;
}

// ---- Making and freeing ----

int kvq__writer_make(struct kvq_store *s, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    assert(!w->flusher.made && s->buffer_bytes > 0 && s->buffer_bytes % KVQ_IO_PAGE == 0);
    w->file = -1;
    pthread_mutex_init(&w->flusher.lock, NULL);
    pthread_cond_init(&w->flusher.moved, NULL);
    w->flusher.made = true;
    w->flusher.io = s->io;
    for (int i = 0; i < 2; i++) {
        w->buffer[i] = kvq_io_memory(s->buffer_bytes);
        if (!w->buffer[i])
            return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory for two buffers of %u bytes",
                                 s->buffer_bytes);
    }
    return KVQ_OK;
}

static void close_segment(struct kvq_store *s)
{
    struct kvq__writer *w = &s->writer;
    assert((w->file >= 0) == (w->segment != NULL));
    if (w->file >= 0)
        s->io->close(s->io, w->file);
    w->file = -1;
    w->segment = NULL;
    w->used = 0;
}

void kvq__writer_free(struct kvq_store *s)
{
    struct kvq__writer *w = &s->writer;
    struct kvq__flusher *f = &w->flusher;
    if (!f->made)
        return;
    (void)flush_wait(f);
    if (f->started) {
        pthread_mutex_lock(&f->lock);
        f->stop = true;
        pthread_cond_broadcast(&f->moved);
        pthread_mutex_unlock(&f->lock);
        pthread_join(f->thread, NULL);
    }
    if (w->segment && !s->read_only) // give back the space that was taken in advance
        (void)kvq_io_truncate(s->io, w->file, w->segment->bytes);
    close_segment(s);
    pthread_cond_destroy(&f->moved);
    pthread_mutex_destroy(&f->lock);
    free(w->buffer[0]);
    free(w->buffer[1]);
    free(w->drops);
    memset(w, 0, sizeof *w);
}

// A failed write leaves nobody knowing what is on disk, but for one that found no room.
static int note_write_failure(struct kvq_store *s, int error, const char *verb,
                              const struct kvq__complaint *c)
{
    if (!kvq_io_is_full(error))
        s->writer.broken = true;
    return kvq__io_complain(c, error, "a segment", verb);
}

// ---- Space ----

// What the segment takes on disk now, as the system says.
static void measure_segment(struct kvq_store *s)
{
    struct kvq_io_status status;
    assert(s->writer.segment && s->writer.file >= 0);
    if (kvq_io_status(s->io, s->writer.file, &status))
        return;
    uint64_t least = s->writer.allocated;
    pthread_mutex_lock(&s->lock);
    s->writer.segment->physical = status.physical > least ? status.physical : least;
    pthread_mutex_unlock(&s->lock);
}

// Of the bytes that the catalog is to have, those that it does not hold yet.
static uint64_t catalog_share(const struct kvq_store *s, uint64_t bytes)
{
    uint64_t held = s->catalog.vfs.held[KVQ__VFS_WAL].bytes; // a part of what is used
    uint64_t has = held > KVQ__WAL_BACKLOG ? held - KVQ__WAL_BACKLOG : 0;
    has = has < KVQ__RESERVE - KVQ__WAL_BACKLOG ? has : KVQ__RESERVE - KVQ__WAL_BACKLOG;
    return bytes - (has < bytes ? has : bytes);
}

uint64_t kvq__room(const struct kvq_store *s, uint64_t used, uint64_t free_bytes)
{
    uint64_t share = catalog_share(s, KVQ__RESERVE),
             cap = s->cap_bytes > used ? s->cap_bytes : used;
    uint64_t room = s->cap_bytes && cap - used < free_bytes ? cap - used : free_bytes;
    return room > share ? room - share : 0;
}

// Whether the cap allows `more` bytes, the catalog's needs included.
static int check_cap(struct kvq_store *s, uint64_t more, const struct kvq__complaint *c)
{
    const struct kvq__writer *w = &s->writer;
    uint64_t catalog =
        catalog_share(s, w->frees ? KVQ__RESERVE_FREE + w->rows * KVQ__RESERVE_FREE_ROW
                                  : KVQ__RESERVE + w->rows * KVQ__RESERVE_ROW);
    uint64_t used = s->cap_bytes ? kvq__physical(s) : 0;
    if (s->cap_bytes && used + catalog + more > s->cap_bytes && kvq__measure_other(s) == 0)
        used = kvq__physical(s); // files may have gone that somebody was told to remove
    if (s->cap_bytes == 0 || used + catalog + more <= s->cap_bytes)
        return KVQ_OK;
    return kvq__complain(c, KVQ_E_NO_SPACE,
                         "the cap is %llu bytes, %llu are used, and this needs %llu more and %llu "
                         "for the catalog: delete sessions and compact, or raise the cap",
                         (unsigned long long)s->cap_bytes, (unsigned long long)used,
                         (unsigned long long)more, (unsigned long long)catalog);
}

// Gives back all space behind what was written. Where there is not enough, file systems leave the
// file with all that there was.
static int give_back(struct kvq_store *s)
{
    struct kvq__writer *w = &s->writer;
    assert(w->at >= w->used && (w->at - w->used) % KVQ_IO_PAGE == 0);
    int rc = flush_wait(&w->flusher);
    if (rc == 0)
        rc = kvq_io_truncate(s->io, w->file, w->at - w->used);
    w->allocated = w->at - w->used;
    measure_segment(s);
    return rc;
}

void kvq__writer_spare(struct kvq_store *s)
{
    struct kvq__writer *w = &s->writer;
    if (w->segment && give_back(s)) // also what a process that was killed had taken
        w->broken = true;
}

static int allocate_segment(struct kvq_store *s, uint64_t bytes, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    assert(bytes > w->allocated && bytes % KVQ_IO_PAGE == 0);
    int rc = check_cap(s, bytes - w->allocated, c);
    if (rc)
        return rc;
    rc = kvq_io_allocate(s->io, w->file, bytes);
    if (rc && rc != -EOPNOTSUPP) {
        int failed = give_back(s);
        return failed ? note_write_failure(s, failed, "written", c)
                      : kvq__io_complain(c, rc, "a segment", "made longer");
    }
    w->allocated = bytes;
    measure_segment(s);
    return KVQ_OK;
}

// Has space for the segment's first `upto` bytes: the largest step that there is room for.
static int take_room(struct kvq_store *s, uint64_t upto, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    if (upto <= w->allocated)
        return KVQ_OK;
    uint64_t least = (upto + KVQ_IO_PAGE - 1) / KVQ_IO_PAGE * KVQ_IO_PAGE;
    int rc = KVQ_E_NO_SPACE;
    while (rc == KVQ_E_NO_SPACE && w->step >= KVQ__STEP_LEAST) {
        uint64_t most = w->allocated + w->step;
        most = most < s->segment_bytes ? most : s->segment_bytes;
        if (most <= least)
            break;
        rc = allocate_segment(s, most, c);
        w->step = rc == KVQ_E_NO_SPACE ? w->step / 4 : w->step;
    }
    return rc == KVQ_E_NO_SPACE ? allocate_segment(s, least, c) : rc;
}

// ---- Bytes ----

// The last one of a transaction is waited for anyway, so no other thread writes it.
static int write_buffer(struct kvq_store *s, bool last, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    const uint8_t *data = w->buffer[w->current];
    uint64_t at = w->at - w->used;
    size_t n = w->used;
    int rc = KVQ_OK;
    assert(n % KVQ_IO_PAGE == 0 && at % KVQ_IO_PAGE == 0);
    assert(n <= s->buffer_bytes && w->at >= n);
    if (last)
        rc = flush_wait(&w->flusher);
    if (rc == 0 && n > 0)
        rc = last ? kvq_io_write(s->io, w->file, data, n, at)
                  : flush_buffer(&w->flusher, w->file, data, n, at);
    w->current ^= 1;
    w->used = 0;
    return rc ? note_write_failure(s, rc, "written", c) : KVQ_OK;
}

// Appends n bytes, or n zeros.
static int put_bytes(struct kvq_store *s, const uint8_t *data, uint64_t n,
                     const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    assert(w->segment && w->used < s->buffer_bytes);
    int rc = KVQ_OK;
    while (n > 0 && rc == KVQ_OK) {
        size_t room = s->buffer_bytes - w->used, some = n < room ? (size_t)n : room;
        uint8_t *to = w->buffer[w->current] + w->used;
        if (data)
            memcpy(to, data, some);
        else
            memset(to, 0, some);
        w->used += some;
        w->at += some;
        data = data ? data + some : NULL;
        n -= some;
        if (w->used == s->buffer_bytes)
            rc = write_buffer(s, false, c);
    }
    return rc;
}

static int put_record(struct kvq_store *s, enum kvq_record_kind kind, uint64_t id, uint64_t salt,
                      const void *data, uint64_t n, struct kvq_checksum sum,
                      const struct kvq__complaint *c)
{
    struct kvq_record r;
    kvq_record_make(&r, kind, id, s->next_transaction, n, sum, salt);
    uint64_t behind = kvq_record_bytes(n) - sizeof r - n;
    assert(behind < KVQ_RECORD_HEAD && s->writer.at % KVQ_RECORD_HEAD == 0);
    int rc = put_bytes(s, (const uint8_t *)&r, sizeof r, c);
    if (rc == KVQ_OK)
        rc = put_bytes(s, data, n, c);
    return rc ? rc : put_bytes(s, NULL, behind, c);
}

// Fills up to a whole page; everything is written when it returns.
static int pad_page(struct kvq_store *s, const struct kvq__complaint *c)
{
    static const uint8_t zeros[KVQ_IO_PAGE];
    struct kvq__writer *w = &s->writer;
    uint64_t gap = (KVQ_IO_PAGE - w->at % KVQ_IO_PAGE) % KVQ_IO_PAGE;
    int rc = KVQ_OK;
    assert(w->segment && gap % KVQ_RECORD_HEAD == 0);
    if (gap > 0) {
        uint64_t n = gap - KVQ_RECORD_HEAD;
        rc =
            put_record(s, KVQ_RECORD_PAD, 0, w->segment->salt, zeros, n, kvq_checksum(zeros, n), c);
    }
    return rc ? rc : write_buffer(s, true, c);
}

// ---- Segments ----

// Writes and syncs everything of the segment, and ends it with its last byte.
static int finish_segment(struct kvq_store *s, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    assert(!w->segment->sealed && w->segment->end == 0);
    int rc = pad_page(s, c);
    if (rc)
        return rc;
    assert(w->used == 0 && w->at % KVQ_IO_PAGE == 0);
    rc = kvq_io_truncate(s->io, w->file, w->at);
    if (rc == 0)
        rc = kvq_io_sync(s->io, w->file);
    if (rc)
        return note_write_failure(s, rc, "written", c);
    w->allocated = w->at;
    measure_segment(s);
    pthread_mutex_lock(&s->lock);
    w->segment->sealed = true;
    w->segment->end = w->at;
    pthread_mutex_unlock(&s->lock);
    close_segment(s);
    return KVQ_OK;
}

static int make_segment(struct kvq_store *s, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    struct kvq_file_head head = {.number = s->next_segment};
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    assert(!w->segment && head.number > 0);
    memcpy(head.store, s->id, sizeof head.store);
    int rc = kvq_io_random(s->io, &head.salt, sizeof head.salt);
    if (rc)
        return kvq__io_complain(c, rc, "a random number", "had");
    kvq__segment_name(head.number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_WRITE | KVQ_IO_NEW | KVQ_IO_DIRECT);
    s->next_segment++;
    if (file < 0)
        return kvq__io_complain(c, file, name, "made");
    struct kvq__segment *segment = kvq__segment_add(s, head.number, head.salt);
    if (!segment) {
        s->io->close(s->io, file);
        (void)kvq_io_unlink(s->io, path);
        return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory for another segment");
    }
    w->segment = segment;
    w->file = file;
    w->at = w->allocated = w->used = 0;
    rc = take_room(s, KVQ_SEGMENT_FRONT, c);
    return rc ? rc
              : put_record(s, KVQ_RECORD_FILE, head.number, 0, &head, sizeof head,
                           kvq_checksum(&head, sizeof head), c);
}

// The last segment, if it can take more.
static int reopen_segment(struct kvq_store *s, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    struct kvq__segment *last = s->n_segments ? s->segments[s->n_segments - 1] : NULL;
    assert(!w->segment);
    if (!last || last->sealed || last->bytes % KVQ_IO_PAGE || last->bytes >= s->segment_bytes)
        return KVQ_OK;
    kvq__segment_name(last->number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_WRITE | KVQ_IO_DIRECT);
    if (file < 0)
        return kvq__io_complain(c, file, name, "opened");
    w->segment = last;
    w->file = file;
    w->at = w->allocated = last->bytes;
    w->used = 0;
    return KVQ_OK;
}

// ---- Transactions ----

// What was removed is gone for good before anything new is written: a segment that comes back after
// a loss of power would bring back what later segments had done away with, if these are gone.
static int sync_names(struct kvq_store *s, const struct kvq__complaint *c)
{
    int rc = s->names_unsynced ? kvq_io_sync_dir(s->io, s->folder) : 0;
    if (rc)
        return kvq__io_complain(c, rc, "the folder", "synced");
    s->names_unsynced = false;
    return KVQ_OK;
}

int kvq__writer_begin(struct kvq_store *s, bool frees, uint64_t rows,
                      const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    assert(s->writing && w->used == 0);
    w->first_new = s->next_segment;
    w->rows = rows;
    w->step = KVQ__STEP_BYTES;
    w->records = 0;
    w->frees = frees;
    w->broken = false;
    w->n_drops = 0;
    int rc = w->segment ? KVQ_OK : reopen_segment(s, c);
    w->begun = w->segment;
    return rc ? rc : sync_names(s, c);
}

// A segment that the record fits in. A record larger than a segment has one for itself.
static int fit_segment(struct kvq_store *s, uint64_t bytes, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    int rc = KVQ_OK;
    if (w->segment && w->at > KVQ_SEGMENT_FRONT && w->at + bytes > s->segment_bytes)
        rc = finish_segment(s, c);
    if (rc == KVQ_OK && !w->segment)
        rc = make_segment(s, c);
    if (rc)
        return rc;
    assert(w->segment && !w->segment->sealed);
    return take_room(s, w->at + bytes, c);
}

int kvq__append(struct kvq_store *s, enum kvq_record_kind kind, uint64_t id, const void *data,
                uint64_t n, struct kvq__written *out, const struct kvq__complaint *c)
{
    assert(s->writing && kind >= KVQ_RECORD_BLOCK && kind <= KVQ_RECORD_COMMIT);
    int rc = fit_segment(s, kvq_record_bytes(n) + KVQ_IO_PAGE, c); // a page more: what pads it
    if (rc)
        return rc;
    assert(s->writer.at + kvq_record_bytes(n) <= s->writer.allocated);
    *out = (struct kvq__written){.id = id,
                                 .segment = s->writer.segment->number,
                                 .offset = s->writer.at,
                                 .length = n,
                                 .kind = kind,
                                 .checksum = kvq_checksum(data, (size_t)n)};
    s->writer.rows += 2;
    s->writer.records++;
    return put_record(s, kind, id, s->writer.segment->salt, data, n, out->checksum, c);
}

static int write_owed(struct kvq_store *s, const struct kvq__complaint *c)
{
    struct kvq__writer *w = &s->writer;
    assert(w->n_drops == 0);
    int rc = KVQ_OK;
    for (size_t i = 0; i < s->n_owed && rc == KVQ_OK; i++) {
        if (!kvq__grow((void **)&w->drops, &w->room_drops, w->n_drops, sizeof *w->drops))
            return kvq__complain(c, KVQ_E_NO_MEMORY, "no memory");
        rc = kvq__append(s, KVQ_RECORD_DROP, s->next_block++, &s->owed[i], sizeof s->owed[i],
                         &w->drops[w->n_drops], c);
        w->n_drops += rc == KVQ_OK;
    }
    return rc;
}

int kvq__writer_sync(struct kvq_store *s, uint64_t sessions, const struct kvq__complaint *c)
{
    assert(s->writing && !s->read_only);
    struct kvq__writer *w = &s->writer;
    int rc = write_owed(s, c);
    const struct kvq_commit commit = {s->next_transaction, s->last_transaction, sessions,
                                      w->records};
    if (rc == KVQ_OK)
        rc = kvq__append(s, KVQ_RECORD_COMMIT, s->next_block++, &commit, sizeof commit, &w->commit,
                         c);
    if (rc == KVQ_OK)
        rc = pad_page(s, c);
    if (rc)
        return rc;
    assert(w->segment && w->used == 0);
    rc = kvq_io_sync(s->io, w->file);
    if (rc == 0 && s->next_segment != w->first_new)
        rc = kvq_io_sync_dir(s->io, s->folder);
    if (rc)
        return note_write_failure(s, rc, "synced", c);
    measure_segment(s);
    return KVQ_OK;
}

void kvq__writer_done(struct kvq_store *s)
{
    struct kvq__writer *w = &s->writer;
    assert(s->writing && (w->n_drops == 0 || w->n_drops == s->n_owed));
    s->n_owed = w->n_drops ? 0 : s->n_owed;
    pthread_mutex_lock(&s->lock);
    for (size_t i = s->n_segments; i-- > 0;) {
        struct kvq__segment *g = s->segments[i];
        if (g->number < w->first_new && g != w->begun)
            break;
        assert(g == w->segment || g->end > 0);
        g->bytes = g == w->segment ? w->at : g->end;
        g->end = 0;
    }
    pthread_mutex_unlock(&s->lock);
}

void kvq__writer_retire(struct kvq_store *s)
{
    struct kvq__writer *w = &s->writer;
    struct kvq__segment *last = s->n_segments ? s->segments[s->n_segments - 1] : NULL;
    assert(s->writing && w->used == 0);
    if (w->segment) { // the space that was taken in advance
        (void)kvq_io_truncate(s->io, w->file, w->segment->bytes);
        w->allocated = w->segment->bytes;
        measure_segment(s);
    }
    close_segment(s);
    pthread_mutex_lock(&s->lock);
    if (last)
        last->sealed = true;
    pthread_mutex_unlock(&s->lock);
}

// Cuts the segment that the transaction found open back to what is committed. It is written to
// again only if that worked and nothing else failed.
static void cut_begun(struct kvq_store *s)
{
    struct kvq__segment *begun = s->writer.begun;
    assert(begun && !s->writer.segment);
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    kvq__segment_name(begun->number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_WRITE);
    int rc = file < 0 ? file : kvq_io_truncate(s->io, file, begun->bytes);
    struct kvq_io_status status = {.physical = begun->physical};
    if (file >= 0) {
        (void)kvq_io_status(s->io, file, &status);
        s->io->close(s->io, file);
    }
    pthread_mutex_lock(&s->lock);
    begun->sealed = rc < 0 || s->writer.broken;
    begun->physical = status.physical;
    begun->end = 0;
    pthread_mutex_unlock(&s->lock);
}

void kvq__writer_undo(struct kvq_store *s)
{
    struct kvq__writer *w = &s->writer;
    assert(s->writing);
    if (flush_wait(&w->flusher))
        w->broken = true;
    close_segment(s);
    s->next_transaction++; // its records may stay where they are, if they cannot be cut off
    if (s->read_only)      // the catalog may name what was written; the next open sees to it
        return;
    for (uint64_t n = kvq__segment_after(s, w->first_new - 1); n > 0; n = kvq__segment_after(s, n))
        kvq__segment_remove(s, n);
    if (w->begun)
        cut_begun(s);
    w->begun = NULL;
}
