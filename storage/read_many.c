// SPDX-License-Identifier: Apache-2.0
//
// Reading many blocks: in few large reads past the page cache. A virtual disk takes half a
// millisecond for a read of any size up to a megabyte, and the page cache never asks for enough.
#include <stdlib.h>
#include <string.h>

#include "proto/status.h"
#include "storage/store_internal.h"

enum {
    WINDOW = 8 << 20, // bytes of one read
    GAP = 1 << 20,    // of what nobody asked for between two blocks
};

struct many {
    struct kvq_store *s;
    const struct kvq_stored *blocks;
    void *const *out;
    size_t n;
    uint8_t *window;  // NULL: no memory, each block is read by itself
    uint64_t segment; // that `file` is of
    int file;         // -1: cannot be had, its blocks are read one by one
};

static void open_segment(struct many *m, uint64_t segment)
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

// How many blocks from i on one window can hold, and the pages that they are on.
static size_t choose(const struct many *m, size_t i, uint64_t *from, uint64_t *to)
{
    const struct kvq_stored *b = m->blocks;
    size_t j = i;
    *from = b[i].offset / KVQ_IO_PAGE * KVQ_IO_PAGE;
    *to = *from;
    for (; j < m->n && b[j].segment == b[i].segment && !b[j].bad; j++) {
        uint64_t end = b[j].offset + kvq_record_bytes(b[j].bytes);
        end = (end + KVQ_IO_PAGE - 1) / KVQ_IO_PAGE * KVQ_IO_PAGE;
        if (b[j].offset < *from || end - *from > WINDOW || b[j].offset > *to + GAP)
            break;
        *to = end > *to ? end : *to;
    }
    return j - i;
}

// Copies a block out of the window. False: it is not there as it should be.
static bool take(const struct many *m, size_t i, uint64_t from)
{
    const struct kvq_stored *b = &m->blocks[i];
    memcpy(m->out[i], m->window + (b->offset + KVQ_RECORD_HEAD - from), b->bytes);
    return kvq_checksum_equal(kvq_checksum(m->out[i], b->bytes), b->checksum);
}

// Blocks [i, i + count) lie in a window. Those that cannot be had from it are read by themselves,
// which finds what was moved, and tells what is wrong.
static int read_window(struct many *m, size_t i, size_t count, uint64_t from, uint64_t to,
                       size_t *done, char *text, size_t n)
{
    size_t got = 0;
    int rc = KVQ_OK;
    bool whole = false;
    if (count > 0) {
        open_segment(m, m->blocks[i].segment);
        whole = m->file >= 0 &&
                kvq_io_read(m->s->io, m->file, m->window, to - from, from, &got) == 0 &&
                got == to - from;
    }
    for (size_t j = i; j < i + (count ? count : 1) && rc == KVQ_OK; j++) {
        if (!whole || !take(m, j, from))
            rc = kvq_store_read(m->s, &m->blocks[j], m->out[j], text, n);
        *done += rc == KVQ_OK;
    }
    return rc;
}

int kvq_store_read_many(struct kvq_store *store, const struct kvq_stored *blocks, void *const *out,
                        size_t n, size_t *done, char *text, size_t text_bytes)
{
    struct many m = {.s = store, .blocks = blocks, .out = out, .n = n, .file = -1};
    int rc = KVQ_OK;
    m.window = aligned_alloc(KVQ_IO_PAGE, WINDOW);
    for (*done = 0; *done < n && rc == KVQ_OK;) {
        uint64_t from = 0, to = 0;
        size_t count = m.window ? choose(&m, *done, &from, &to) : 0;
        rc = read_window(&m, *done, count, from, to, done, text, text_bytes);
    }
    if (m.file >= 0)
        store->io->close(store->io, m.file);
    free(m.window);
    return rc;
}
