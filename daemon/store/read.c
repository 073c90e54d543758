// SPDX-License-Identifier: Apache-2.0
//
// Reading a session that is restored, on a thread of libuv's: layer by layer, and the parts of each
// in the order in which they lie on disk.
#include <stdio.h>
#include <stdlib.h>

#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

enum { BATCH_BYTES = 64 << 20 }; // read in one call; a session that is dropped waits for its end

static void layer_there(struct kvq__mail *mail)
{
    struct kvq__layer_mail *m = (struct kvq__layer_mail *)mail; // its first member
    kvq__restore_layer(m->restore, m->layer);
}

// A layer's parts in the order in which they lie in the store, of which a batch is read at a time.
struct reading {
    struct kvq__loading *l;
    uint32_t n, layer;
    uint32_t *which; // in what the restore wants
    struct kvq_stored *blocks;
    void **rooms;
};

struct lying {
    struct kvq_stored block;
    uint32_t which;
};

static int order_by_place(const void *a, const void *b)
{
    const struct lying *x = a, *y = b;
    return kvq_stored_order(&x->block, &y->block);
}

static void reading_free(struct reading *r)
{
    free(r->which);
    free(r->blocks);
    free(r->rooms);
}

// The parts from the i-th on that are of the layer.
static int reading_make(struct reading *r, uint32_t i)
{
    const struct kvq__loading *l = r->l;
    struct kvq__wanted w;
    while (kvq__restore_wanted(l->restore, i + r->n, &w) && w.layer == r->layer)
        r->n++;
    struct lying *all = calloc(r->n + 1, sizeof *all);
    r->which = calloc(r->n + 1, sizeof *r->which);
    r->blocks = calloc(r->n + 1, sizeof *r->blocks);
    r->rooms = calloc(r->n + 1, sizeof *r->rooms);
    bool had = all && r->which && r->blocks && r->rooms;
    for (uint32_t k = 0; had && k < r->n; k++) {
        kvq__restore_wanted(l->restore, i + k, &w);
        all[k] = (struct lying){kvq__found_block(l->found, w.part), i + k};
    }
    if (had && r->n)
        qsort(all, r->n, sizeof *all, order_by_place);
    for (uint32_t k = 0; had && k < r->n; k++) {
        r->which[k] = all[k].which;
        r->blocks[k] = all[k].block;
    }
    free(all);
    return had ? 0 : KVQ_E_NO_MEMORY;
}

static int fill_batch(const struct reading *r, uint32_t from, uint32_t count)
{
    struct kvq__loading *l = r->l;
    int rc = 0;
    for (uint32_t k = from; k < from + count && rc == 0; k++) {
        rc = kvq__restore_fill(l->restore, r->which[k]);
        l->bytes += r->blocks[k].bytes;
    }
    if (rc < 0)
        snprintf(l->task.text, sizeof l->task.text, "layer %u: %s", r->layer,
                 rc == KVQ_E_DAMAGED ? "the outliers that were stored make no sense"
                                     : "a GPU failed");
    return rc;
}

static int read_ranges(const struct reading *r, uint32_t from, uint32_t n)
{
    struct kvq__loading *l = r->l;
    struct kvq__wanted w;
    uint32_t *parts = calloc(n, sizeof *parts);
    int rc = parts ? 0 : KVQ_E_NO_MEMORY;
    for (uint32_t k = 0; k < n && rc == 0; k++) {
        kvq__restore_wanted(l->restore, r->which[from + k], &w);
        parts[k] = w.part;
    }
    if (rc == 0)
        rc = kvq__found_gather(l->task.jobs->store, l->found, parts, n, r->rooms, l->task.text);
    free(parts);
    return rc;
}

// Reads from *from on as many as make a batch.
static int read_batch(const struct reading *r, uint32_t *from)
{
    struct kvq__loading *l = r->l;
    uint32_t n = 0;
    size_t done;
    for (uint64_t bytes = 0; *from + n < r->n && bytes < BATCH_BYTES; n++)
        bytes += r->blocks[*from + n].bytes;
    n = kvq__restore_rooms(l->restore, r->which + *from, n, r->rooms);
    int rc = n ? 0 : KVQ_E_NO_MEMORY;
    if (rc == 0 && l->found->n_sources)
        rc = read_ranges(r, *from, n);
    else if (rc == 0)
        rc = kvq_store_read_many(l->task.jobs->store, r->blocks + *from, r->rooms, n, &done,
                                 l->task.text, sizeof l->task.text);
    if (rc == 0)
        rc = fill_batch(r, *from, n);
    *from += n;
    return rc;
}

// Nobody is left who would use what is read: the session is gone, or the daemon closes.
static bool is_in_vain(const struct kvq__loading *l)
{
    return kvq__restore_lost(l->restore) || kvq_word_load(&l->task.jobs->ended);
}

// The parts of one layer, from the i-th on; *i is then the next layer's first.
static int read_layer(struct kvq__loading *l, uint32_t layer, uint32_t *i)
{
    struct reading r = {.l = l, .layer = layer};
    int rc = reading_make(&r, *i);
    for (uint32_t at = 0; rc == 0 && at < r.n;)
        rc = is_in_vain(l) ? KVQ_E_CANCELLED : read_batch(&r, &at);
    if (rc == KVQ_E_NO_MEMORY)
        snprintf(l->task.text, sizeof l->task.text, "no memory to read layer %u", layer);
    *i += r.n;
    reading_free(&r);
    return rc;
}

void kvq__jobs_read(struct kvq__task *t)
{
    struct kvq__loading *l = (struct kvq__loading *)t; // its first member
    const struct kvq__saved *saved = &l->found->saved;
    uint32_t i = 0;
    for (uint32_t layer = 0; layer < saved->n_layers && t->rc == 0; layer++) {
        if (saved->layers[layer].row.kv_from >= 0)
            continue;
        t->rc = read_layer(l, layer, &i);
        if (t->rc < 0)
            return;
        l->layers[layer].restore = l->restore;
        l->layers[layer].layer = layer;
        kvq__mailbox_post(kvq__poller_box(t->jobs->server->poller), &l->layers[layer].mail,
                          layer_there);
        if (l->first_ns == 0)
            l->first_ns = kvq_now_ns();
    }
}
