// SPDX-License-Identifier: Apache-2.0
//
// Reading many blocks: in few large reads past the page cache. A virtual disk takes half a
// millisecond for a read of any size up to a megabyte, and the page cache never asks for enough.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/thread.h"
#include "proto/status.h"
#include "storage/store_internal.h"

enum {
    WINDOW = 8 << 20, // bytes of one read
    GAP = 1 << 20,    // of what nobody asked for between two blocks
};

// Blocks [first, first + count), read in one piece: pages [from, to) of `file`.
struct window {
    struct kvq_io *io;
    int file;
    uint8_t *bytes;
    size_t first, count;
    uint64_t from, to;
    bool whole; // it was read
};

struct many {
    struct kvq_store *s;
    const struct kvq_stored *blocks;
    void *const *out;
    size_t n;
    uint64_t segment; // that `file` is of
    int file;         // -1: cannot be had, its blocks are read one by one
    struct window window[2];
};

static void use_segment(struct many *m, uint64_t segment)
{
    char name[KVQ__NAME_BYTES], path[KVQ__PATH_BYTES];
    if (m->segment == segment)
        return;
    if (m->file >= 0)
        m->s->io->close(m->s->io, m->file);
    kvq__segment_name(segment, name);
    kvq__path(m->s, name, path);
    m->segment = segment;
    m->file = kvq_io_open(m->s->io, path, KVQ_IO_READ | KVQ_IO_DIRECT);
}

// The blocks from `first` on that one window can hold, at least one.
static void choose_window(struct many *m, struct window *w, size_t first)
{
    const struct kvq_stored *b = m->blocks;
    size_t j = first;
    w->first = first;
    w->from = w->to = first < m->n ? b[first].offset / KVQ_IO_PAGE * KVQ_IO_PAGE : 0;
    for (; j < m->n && b[j].segment == b[first].segment && !b[j].bad; j++) {
        uint64_t end = b[j].offset + kvq_record_bytes(b[j].bytes);
        end = (end + KVQ_IO_PAGE - 1) / KVQ_IO_PAGE * KVQ_IO_PAGE;
        if (b[j].offset < w->from || end - w->from > WINDOW || b[j].offset > w->to + GAP)
            break;
        w->to = end > w->to ? end : w->to;
    }
    assert(w->from <= w->to && w->to - w->from <= WINDOW && w->from % KVQ_IO_PAGE == 0);
    w->count = j > first ? j - first : first < m->n;
    if (w->count)
        use_segment(m, b[first].segment);
    w->file = j > first && w->bytes ? m->file : -1; // else they are read one by one
}

static void *read_window(void *argument)
{
    struct window *w = argument;
    size_t got = 0;
    assert(w->file < 0 || w->bytes);
    w->whole = w->file >= 0 &&
               kvq_io_read(w->io, w->file, w->bytes, w->to - w->from, w->from, &got) == 0 &&
               got == w->to - w->from;
    return NULL;
}

// Copies a block out of a window. False: it is not there as it should be.
static bool copy_block(const struct many *m, const struct window *w, size_t i)
{
    const struct kvq_stored *b = &m->blocks[i];
    assert(b->offset >= w->from && b->offset + KVQ_RECORD_HEAD + b->bytes <= w->to);
    memcpy(m->out[i], w->bytes + (b->offset + KVQ_RECORD_HEAD - w->from), b->bytes);
    return kvq_checksum_equal(kvq_checksum(m->out[i], b->bytes), b->checksum);
}

// What cannot be had from the window is read by itself, which finds what was moved and tells what
// is wrong.
static int copy_blocks(const struct many *m, const struct window *w, size_t *done, char *text,
                       size_t n)
{
    int rc = KVQ_OK;
    assert(w->first + w->count <= m->n);
    for (size_t i = w->first; i < w->first + w->count && rc == KVQ_OK; i++) {
        if (!w->whole || !copy_block(m, w, i))
            rc = kvq_store_read(m->s, &m->blocks[i], m->out[i], text, n);
        *done += rc == KVQ_OK;
    }
    return rc;
}

// Copies from one window while the next one is read by a thread of its own: some microseconds
// for milliseconds of reading.
static int read_windows(struct many *m, size_t *done, char *text, size_t n)
{
    struct window *now = &m->window[0], *next = &m->window[1];
    int rc = KVQ_OK;
    choose_window(m, now, 0);
    (void)read_window(now);
    while (now->count > 0 && rc == KVQ_OK) {
        pthread_t thread;
        choose_window(m, next, now->first + now->count);
        bool beside = next->file >= 0 && kvq_thread_start(&thread, read_window, next) == 0;
        rc = copy_blocks(m, now, done, text, n);
        if (beside)
            pthread_join(thread, NULL);
        else
            (void)read_window(next);
        struct window *copied = now;
        now = next;
        next = copied;
    }
    return rc;
}

int kvq_store_read_many(struct kvq_store *store, const struct kvq_stored *blocks, void *const *out,
                        size_t n, size_t *done, char *text, size_t text_bytes)
{
    struct many m = {.s = store, .blocks = blocks, .out = out, .n = n, .file = -1};
    for (int i = 0; i < 2; i++) {
        m.window[i].io = store->io;
        m.window[i].bytes = kvq_io_memory(WINDOW);
    }
    *done = 0;
    int rc = read_windows(&m, done, text, text_bytes);
    assert(rc ? *done < n : *done == n);
    if (m.file >= 0)
        store->io->close(store->io, m.file);
    free(m.window[0].bytes);
    free(m.window[1].bytes);
    return rc;
}
