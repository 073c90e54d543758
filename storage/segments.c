// SPDX-License-Identifier: Apache-2.0
//
// The table of segments that exist: readers pin them, and what they take on disk is added up.
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/store_internal.h"

// Index of the first with at least that number.
static size_t place_of(const struct kvq_store *s, uint64_t number)
{
    size_t low = 0, high = s->n_segments;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (s->segments[middle]->number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct kvq__segment *find_segment(const struct kvq_store *s, uint64_t number)
{
    size_t i = place_of(s, number);
    return i < s->n_segments && s->segments[i]->number == number ? s->segments[i] : NULL;
}

struct kvq__segment *kvq__segment_add(struct kvq_store *s, uint64_t number, uint64_t salt)
{
    struct kvq__segment *segment = calloc(1, sizeof *segment);
    if (!segment)
        return NULL;
    *segment = (struct kvq__segment){.number = number, .salt = salt, .file = -1};
    pthread_mutex_lock(&s->lock);
    if (s->n_segments == s->room_segments) {
        size_t room = s->room_segments ? 2 * s->room_segments : 16;
        struct kvq__segment **more = realloc(s->segments, room * sizeof(struct kvq__segment *));
        if (!more)
            goto error;
        s->segments = more;
        s->room_segments = room;
    }
    size_t i = place_of(s, number);
    assert(s->n_segments < s->room_segments);
    assert(i == s->n_segments || s->segments[i]->number != number);
    memmove(s->segments + i + 1, s->segments + i, (s->n_segments - i) * sizeof *s->segments);
    s->segments[i] = segment;
    s->n_segments++;
    pthread_mutex_unlock(&s->lock);
    return segment;
error:
    pthread_mutex_unlock(&s->lock);
    free(segment);
    return NULL;
}

static void free_segment(struct kvq_store *s, struct kvq__segment *segment)
{
    assert(segment->pins == 0);
    if (segment->file >= 0)
        s->io->close(s->io, segment->file);
    free(segment);
}

void kvq__segment_remove(struct kvq_store *s, uint64_t number)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    pthread_mutex_lock(&s->lock);
    size_t i = place_of(s, number);
    if (i < s->n_segments && s->segments[i]->number == number) {
        struct kvq__segment *segment = s->segments[i];
        assert(!segment->gone && segment != s->writer.segment);
        s->n_segments--;
        memmove(s->segments + i, s->segments + i + 1, (s->n_segments - i) * sizeof *s->segments);
        segment->gone = true;
        if (segment->pins == 0)
            free_segment(s, segment);
    }
    pthread_mutex_unlock(&s->lock);
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    (void)kvq_io_unlink(s->io, path);
    s->names_unsynced = true;
}

// Closes a file that nobody reads, if too many are open. The caller holds the lock.
static void close_one(struct kvq_store *s, const struct kvq__segment *but)
{
    size_t open = 0;
    struct kvq__segment *idle = NULL;
    for (size_t i = 0; i < s->n_segments; i++) {
        struct kvq__segment *g = s->segments[i];
        open += g->file >= 0;
        if (g->file >= 0 && g->pins == 0 && g != but)
            idle = g;
    }
    if (open <= KVQ__OPEN_FILES || !idle)
        return;
    s->io->close(s->io, idle->file);
    idle->file = -1;
}

int kvq__segment_pin(struct kvq_store *s, uint64_t number, struct kvq__segment **out,
                     const struct kvq__complaint *c)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    int rc = 0;
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    pthread_mutex_lock(&s->lock);
    struct kvq__segment *segment = find_segment(s, number);
    *out = segment;
    if (segment && segment->file < 0) {
        segment->file = rc = kvq_io_open(s->io, path, KVQ_IO_READ);
        close_one(s, segment);
    }
    if (segment && rc >= 0) {
        assert(segment->file >= 0 && !segment->gone);
        segment->pins++;
    }
    pthread_mutex_unlock(&s->lock);
    if (!segment)
        return kvq__complain(c, KVQ_E_NO_SESSION, "%s is not there any more", name);
    return rc < 0 ? kvq__io_complain(c, rc, name, "opened") : KVQ_OK;
}

void kvq__segment_unpin(struct kvq_store *s, struct kvq__segment *segment)
{
    pthread_mutex_lock(&s->lock);
    assert(segment->pins > 0);
    if (--segment->pins == 0 && segment->gone)
        free_segment(s, segment);
    pthread_mutex_unlock(&s->lock);
}

uint64_t kvq__segment_after(struct kvq_store *s, uint64_t number)
{
    pthread_mutex_lock(&s->lock);
    size_t i = place_of(s, number + 1);
    uint64_t next = i < s->n_segments ? s->segments[i]->number : 0;
    pthread_mutex_unlock(&s->lock);
    return next;
}

bool kvq__segment_missing(struct kvq_store *s, uint64_t number)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    assert(number > 0);
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    if (file >= 0)
        s->io->close(s->io, file);
    return file == -ENOENT;
}

int kvq__segment_set_aside(struct kvq_store *s, uint64_t number, const struct kvq__complaint *c)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES], to[KVQ__PATH_BYTES + 8];
    assert(!s->read_only && number > 0);
    kvq__segment_name(number, name);
    kvq__path(s, name, path);
    snprintf(to, sizeof to, "%s.bad", path);
    int rc = kvq_io_rename(s->io, path, to);
    return rc ? kvq__io_complain(c, rc, name, "set aside") : KVQ_OK;
}

bool kvq__segment_sick(struct kvq_store *s, uint64_t number, bool now)
{
    pthread_mutex_lock(&s->lock);
    struct kvq__segment *g = find_segment(s, number);
    bool sick = g && g->sick;
    if (g && now && !sick)
        s->n_sick++;
    if (g && now)
        g->sick = true;
    pthread_mutex_unlock(&s->lock);
    return sick || (g && now);
}

void kvq__segments_free(struct kvq_store *s)
{
    for (size_t i = 0; i < s->n_segments; i++)
        free_segment(s, s->segments[i]);
    free(s->segments);
    s->segments = NULL;
    s->n_segments = s->room_segments = 0;
}

// ---- What it takes on disk ----

static uint64_t physical_of(struct kvq_store *s, const char *name)
{
    char path[KVQ__PATH_BYTES];
    struct kvq_io_status status = {0};
    kvq__path(s, name, path);
    int file = kvq_io_open(s->io, path, KVQ_IO_READ);
    if (file < 0)
        return 0;
    if (kvq_io_status(s->io, file, &status))
        status.physical = 0;
    s->io->close(s->io, file);
    return status.physical;
}

uint64_t kvq__physical_catalog(struct kvq_store *s)
{
    return physical_of(s, "catalog.db") + physical_of(s, "catalog.db-wal");
}

uint64_t kvq__segment_physical(struct kvq_store *s, uint64_t number)
{
    pthread_mutex_lock(&s->lock);
    const struct kvq__segment *g = find_segment(s, number);
    uint64_t bytes = g ? g->bytes : 0; // without the space that is taken in advance
    if (g && g->physical < bytes)
        bytes = g->physical;
    pthread_mutex_unlock(&s->lock);
    return bytes;
}

struct others {
    struct kvq_store *s;
    uint64_t bytes;
};

// Adds up what neither is a segment nor belongs to the catalog in use.
static int measure_file(void *context, const char *name)
{
    static const char *const of_catalog[] = {"catalog.db", "catalog.db-wal", "catalog.db-journal"};
    struct others *o = context;
    bool ours = kvq__segment_number(name) != 0;
    for (int i = 0; i < 3; i++)
        ours |= strcmp(name, of_catalog[i]) == 0;
    if (!ours && strlen(name) < KVQ__NAME_BYTES)
        o->bytes += physical_of(o->s, name);
    return 0;
}

int kvq__measure_other(struct kvq_store *s)
{
    struct others o = {.s = s};
    int rc = s->io->list(s->io, s->folder, measure_file, &o);
    if (rc)
        return rc;
    pthread_mutex_lock(&s->lock);
    s->other_bytes = o.bytes;
    pthread_mutex_unlock(&s->lock);
    return 0;
}

uint64_t kvq__physical(struct kvq_store *s)
{
    uint64_t sum = kvq__physical_catalog(s);
    pthread_mutex_lock(&s->lock);
    sum += s->other_bytes;
    for (size_t i = 0; i < s->n_segments; i++)
        sum += s->segments[i]->physical;
    pthread_mutex_unlock(&s->lock);
    return sum;
}
