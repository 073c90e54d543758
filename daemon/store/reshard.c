// SPDX-License-Identifier: Apache-2.0
//
// Restoring a session with another number of shards than it was saved with: what the store has of
// all of its shards, and reading the ranges of their blocks that make up one part.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/internal.h"

// ---- Looking ----

static int find_shard(struct kvq__task *t, uint32_t shard, uint32_t shards,
                      struct kvq_store_session *out)
{
    int rc = kvq_store_find(t->jobs->store, t->ns, t->name, shard, out, t->text, sizeof t->text);
    if (rc != KVQ_E_NO_SESSION && (rc < 0 || out->shards == shards))
        return rc;
    snprintf(t->text, sizeof t->text,
             "shard %u of session \"%s\" is not in the store, of %u that were saved; drop it, or "
             "restore it from an export",
             shard, t->name, shards);
    return KVQ_E_DAMAGED;
}

// All shards, as one save left them.
static int read_sources(struct kvq__task *t, uint32_t n, struct kvq__found *found)
{
    struct kvq_store_session shard;
    uint64_t saves[KVQ_MAX_SHARDS];
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        rc = find_shard(t, i, n, &shard);
        saves[i] = shard.save;
        rc = rc ? rc : kvq__found_read(t, &shard, &found->sources[i]);
        if (rc == 0 && (i == 0 || found->sources[i].good < found->good))
            found->good = found->sources[i].good;
    }
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        rc = find_shard(t, i, n, &shard);
        if (rc == 0 && shard.save != saves[i]) // saved again meanwhile
            rc = KVQ_E_STALE;
    }
    return rc;
}

int kvq__found_reshard(struct kvq__task *t, const struct kvq_store_session *s,
                       struct kvq__found *found)
{
    struct kvq__saved_shard shards[KVQ_MAX_SHARDS];
    struct kvq__resharded made;
    if (s->shards > KVQ_MAX_SHARDS) { // an edited catalog, on a file system that is read-only
        snprintf(t->text, sizeof t->text,
                 "session \"%s\" has %u shards in the store's catalog; at most %d are allowed: "
                 "drop it, or restore it from an export",
                 t->name, s->shards, KVQ_MAX_SHARDS);
        return KVQ_E_DAMAGED;
    }
    found->sources = calloc(s->shards, sizeof *found->sources);
    if (!found->sources)
        return KVQ_E_NO_MEMORY;
    found->n_sources = s->shards;
    int rc = read_sources(t, s->shards, found);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < s->shards; i++)
        shards[i] = (struct kvq__saved_shard){&found->sources[i].saved, found->sources[i].parts,
                                              found->sources[i].n};
    rc = kvq__reshard(shards, s->shards, &t->as, &made, t->text);
    if (rc < 0)
        return rc;
    found->saved = made.saved;
    found->parts = made.parts;
    found->n = made.n_parts;
    found->ranges = made.ranges;
    found->first = made.first;
    found->ahead = made.ahead;
    return 0;
}

static void clear_one(struct kvq__found *f)
{
    if (f->n_sources == 0) // else they are a source's
        kvq__saved_ids_free(&f->saved);
    free(f->saved.layers);
    free(f->blocks);
    free(f->parts);
    free(f->ranges);
    free(f->first);
}

void kvq__found_clear(struct kvq__found *f)
{
    kvq__codebooks_let_go(&f->books);
    for (uint32_t i = 0; i < f->n_sources; i++)
        clear_one(&f->sources[i]);
    clear_one(f);
    free(f->sources);
    *f = (struct kvq__found){0};
}

// ---- Reading ----

struct kvq_stored kvq__found_block(const struct kvq__found *found, uint32_t part)
{
    if (found->n_sources == 0)
        return found->blocks[part];
    const struct kvq__range *r = &found->ranges[found->first[part]];
    struct kvq_stored block = found->sources[r->source].blocks[r->part];
    block.bytes = found->parts[part].bytes;
    return block;
}

// A block of a source that is read as a whole: to where it belongs, or first to scratch memory.
struct piece {
    struct kvq_stored block;
    const struct kvq__range *range;
    uint8_t *room;    // of the part that is made
    uint8_t *scratch; // NULL: all of the block is wanted
};

struct gathering {
    struct piece *pieces;
    struct kvq_stored *blocks;
    void **out;
    uint8_t *scratch;
    uint32_t n;
};

static int sources_by_place(const void *a, const void *b)
{
    const struct piece *x = a, *y = b;
    return kvq_stored_order(&x->block, &y->block);
}

static size_t source_bytes(const struct kvq__found *f, uint32_t part)
{
    size_t bytes = 0;
    for (uint32_t k = f->first[part]; k < f->first[part + 1]; k++)
        bytes += f->sources[f->ranges[k].source].blocks[f->ranges[k].part].bytes;
    return bytes;
}

static int reserve_found(struct gathering *g, const struct kvq__found *f, const uint32_t *parts,
                         uint32_t n)
{
    size_t count = 0, bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        count += f->first[parts[i] + 1] - f->first[parts[i]];
        bytes += source_bytes(f, parts[i]);
    }
    g->pieces = calloc(count + 1, sizeof *g->pieces);
    g->blocks = calloc(count + 1, sizeof *g->blocks);
    g->out = calloc(count + 1, sizeof *g->out);
    g->scratch = malloc(bytes + 1); // what of it is not needed is never touched
    return g->pieces && g->blocks && g->out && g->scratch ? 0 : KVQ_E_NO_MEMORY;
}

static void list_pieces(struct gathering *g, const struct kvq__found *f, const uint32_t *parts,
                        uint32_t n, void *const *rooms)
{
    uint8_t *scratch = g->scratch;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = f->first[parts[i]]; k < f->first[parts[i] + 1]; k++) {
            const struct kvq__range *r = &f->ranges[k];
            struct piece *p = &g->pieces[g->n++];
            *p = (struct piece){
                .block = f->sources[r->source].blocks[r->part], .range = r, .room = rooms[i]};
            if (kvq__range_is_whole(r, p->block.bytes))
                continue;
            p->scratch = scratch;
            scratch += p->block.bytes;
        }
    if (g->n)
        qsort(g->pieces, g->n, sizeof *g->pieces, sources_by_place);
    for (uint32_t i = 0; i < g->n; i++) {
        g->blocks[i] = g->pieces[i].block;
        g->out[i] = g->pieces[i].scratch ? g->pieces[i].scratch
                                         : g->pieces[i].room + g->pieces[i].range->to;
    }
}

static int gather(struct kvq_store *store, const struct kvq__found *f, const uint32_t *parts,
                  uint32_t n, void *const *rooms, char *text)
{
    struct gathering g = {0};
    size_t done;
    int rc = reserve_found(&g, f, parts, n);
    if (rc == 0) {
        list_pieces(&g, f, parts, n, rooms);
        rc = kvq_store_read_many(store, g.blocks, g.out, g.n, &done, text, KVQ_TEXT_BYTES);
    }
    for (uint32_t i = 0; i < g.n && rc == 0; i++)
        if (g.pieces[i].scratch)
            kvq__range_copy(g.pieces[i].range, g.pieces[i].scratch, g.pieces[i].room);
    free(g.pieces);
    free(g.blocks);
    free(g.out);
    free(g.scratch);
    return rc;
}

int kvq__found_gather(struct kvq_store *store, const struct kvq__found *f, const uint32_t *parts,
                      uint32_t n, void *const *rooms, char *text)
{
    enum { SCRATCH = 64 << 20 };
    int rc = 0;
    for (uint32_t i = 0, some; i < n && rc == 0; i += some) {
        size_t bytes = 0;
        for (some = 0; i + some < n && bytes < SCRATCH; some++)
            bytes += source_bytes(f, parts[i + some]);
        rc = gather(store, f, parts + i, some, rooms + i, text);
    }
    return rc;
}
