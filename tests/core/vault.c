// SPDX-License-Identifier: Apache-2.0
//
// See vault.h.
#include "tests/core/vault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/residency/park.h"
#include "daemon/core/residency/saved_internal.h"

static const struct kvq__peer admin = {.uid = 1000, .admin = true};

static void forget(struct vault_session *s)
{
    free(s->saved.layers);
    free(s->parts);
    free(s->hashes);
    *s = (struct vault_session){0};
}

void vault_close(struct vault *v)
{
    for (uint32_t i = 0; i < v->n_blocks; i++)
        free(v->blocks[i].data);
    for (uint32_t i = 0; i < v->n_sessions; i++)
        forget(&v->sessions[i]);
    free(v->blocks);
    *v = (struct vault){0};
}

static struct vault_block *block_of(const struct vault *v, uint64_t id)
{
    for (uint32_t i = 0; i < v->n_blocks; i++)
        if (v->blocks[i].id == id)
            return &v->blocks[i];
    return NULL;
}

static uint64_t put(struct vault *v, const void *bytes, uint64_t n)
{
    v->blocks = realloc(v->blocks, (v->n_blocks + 1) * sizeof *v->blocks);
    struct vault_block *b = &v->blocks[v->n_blocks++];
    *b = (struct vault_block){++v->last_id, n, malloc(n)};
    MUST(b->data && bytes);
    memcpy(b->data, bytes, n);
    v->put++;
    return b->id;
}

struct vault_session *vault_find(struct vault *v, const char *name, uint32_t shard)
{
    for (uint32_t i = 0; i < v->n_sessions; i++)
        if (strcmp(v->sessions[i].saved.name, name) == 0 && v->sessions[i].saved.shard == shard)
            return &v->sessions[i];
    return NULL;
}

static void *copy_of(const void *from, size_t bytes)
{
    void *copy = malloc(bytes ? bytes : 1);
    MUST(copy);
    memcpy(copy, from, bytes);
    return copy;
}

static int add_hash(void *context, const uint8_t hash[32])
{
    struct vault_session *s = context;
    s->hashes = realloc(s->hashes, (s->pages + 1) * sizeof *s->hashes);
    MUST(s->hashes);
    memcpy(s->hashes[s->pages++], hash, sizeof *s->hashes);
    return 0;
}

static void write_shard(struct vault *v, struct kvq__save *save, uint32_t shard)
{
    struct kvq__part *parts;
    uint32_t n;
    const struct kvq__saved *saved = kvq__save_shard(save, shard, &parts, &n);
    struct vault_session *s = vault_find(v, saved->name, saved->shard);
    for (uint32_t i = 0; i < n; i++) {
        struct vault_block *b = parts[i].id ? block_of(v, parts[i].id) : NULL;
        MUST(!parts[i].id || (b && b->bytes == parts[i].bytes));
        // What was saved before has not changed since.
        MUST(!b || memcmp(b->data, kvq__save_bytes(save, shard, i), b->bytes) == 0);
        v->kept += b != NULL;
        if (!b)
            parts[i].id = put(v, kvq__save_bytes(save, shard, i), parts[i].bytes);
    }
    if (!s) {
        MUST(v->n_sessions < sizeof v->sessions / sizeof *v->sessions);
        s = &v->sessions[v->n_sessions++];
    }
    forget(s);
    snprintf(s->ns, sizeof s->ns, "%s", kvq__save_namespace(save));
    s->saved = *saved;
    s->saved.layers = copy_of(saved->layers, saved->n_layers * sizeof *saved->layers);
    s->parts = copy_of(parts, n * sizeof *parts);
    s->n = n;
    MUST(kvq__save_prefixes(save, shard, add_hash, s) == 0);
}

// What was saved with another number of shards goes, as in a store.
static void forget_others(struct vault *v, const struct kvq__saved *saved)
{
    for (uint32_t i = v->n_sessions; i-- > 0;) {
        struct vault_session *s = &v->sessions[i];
        if (strcmp(s->saved.name, saved->name) != 0 || s->saved.shards == saved->shards)
            continue;
        forget(s);
        *s = v->sessions[--v->n_sessions];
        v->sessions[v->n_sessions] = (struct vault_session){0};
    }
}

void vault_write(struct vault *v, struct kvq__save **save)
{
    struct kvq__part *parts;
    uint32_t n;
    forget_others(v, kvq__save_shard(*save, 0, &parts, &n));
    for (uint32_t i = 0; i < kvq__save_shards(*save); i++)
        write_shard(v, *save, i);
    kvq__save_end(save, true);
}

struct kvq__save *vault_copied(struct kvq__core *core, const struct kvq__save_spec *spec)
{
    struct kvq__save *save;
    char text[KVQ_TEXT_BYTES] = "";
    MUST(kvq__save_begin(core, &admin, spec, &save, text) == 0 && save);
    MUST(kvq__save_copy(save) == 0);
    kvq__save_copied(save);
    return save;
}

int vault_save(struct vault *v, struct kvq__core *core, const struct kvq__save_spec *spec,
               bool *stored)
{
    struct kvq__save *save;
    char text[KVQ_TEXT_BYTES] = "";
    int rc = kvq__save_begin(core, &admin, spec, &save, text);
    MUST(rc >= 0 || text[0]);
    if (stored)
        *stored = save != NULL;
    if (rc || !save)
        return rc;
    MUST(kvq__save_copy(save) == 0);
    core_check(core);
    kvq__save_copied(save);
    core_check(core);
    vault_write(v, &save);
    return 0;
}

void vault_save_packed(struct vault *v, struct kit *kit, const char *ns, const char *name)
{
    const struct kvq__save_spec spec = {.ns = ns, .name = name};
    int rc;
    while ((rc = vault_save(v, kit->core, &spec, NULL)) == 1)
        kit_pack(kit);
    MUST(rc == 0);
}

struct reading {
    struct vault *vault;
    const struct vault_session *from;
};

static int read_ids(void *context, uint32_t part, void *out)
{
    const struct reading *r = context;
    const struct vault_block *b = block_of(r->vault, r->from->parts[part].id);
    if (!b || b->bytes != r->from->parts[part].bytes)
        return KVQ_E_DAMAGED;
    memcpy(out, b->data, b->bytes);
    return 0;
}

// What waits for room gets it if the vault serves, so that others can go; else it does not.
static int reserve_all(struct vault *v, struct kvq__core *core, struct kvq__restore *restore,
                       char *text)
{
    uint32_t waits = 0, looks = 0;
    int rc;
    while ((rc = kvq__restore_reserve(restore, text)) > 0) {
        if (v->turn)
            v->turn();
        if (restore->fetches) // else nobody sees it yet
            core_check(core);
        if (rc == KVQ__MORE)
            continue;
        int refused = restore->grant.refused.code;             // 0: others had their turn first
        bool making = refused == KVQ_E_BUSY && looks++ < 1000; // of extents
        if (making || !TAILQ_EMPTY(&core->freeing.ended)) {
            kit_poll(core);
            continue;
        }
        if (!v->serves || ++waits == 50)
            return refused ? refused : KVQ_E_NO_MEMORY;
        vault_serve(v, core);
        kit_poll(core);
    }
    return rc;
}

static int restore_as(struct vault *v, struct kvq__core *core, const struct vault_session *s,
                      struct kvq__restore_spec *spec, struct kvq__restore **restore, char *text)
{
    MUST(s);
    struct kvq__saved saved = s->saved;
    struct reading reading = {v, s};
    struct kvq__ids_reader ids = {s->parts, s->n, spec->good_tokens, read_ids, &reading};
    MUST(kvq__saved_ids_read(&saved, &ids) == 0);
    spec->saved = &saved;
    spec->parts = s->parts;
    spec->n_parts = s->n;
    int rc = kvq__restore_begin(core, &admin, spec, restore, text);
    bool begun = rc == 0;
    if (begun)
        rc = reserve_all(v, core, *restore, text);
    if (begun && rc < 0)
        kvq__restore_end(restore, rc);
    kvq__saved_ids_free(&saved);
    return rc;
}

int vault_restore(struct vault *v, struct kvq__core *core, const char *name, uint32_t shard,
                  const char *place, uint64_t good, struct kvq__restore **restore, char *text)
{
    const struct vault_session *s = vault_find(v, name, shard);
    struct kvq__restore_spec spec = {.ns = s ? s->ns : NULL, .place = place, .good_tokens = good};
    return restore_as(v, core, s, &spec, restore, text);
}

int vault_prefix(struct vault *v, struct kvq__core *core, const char *ns,
                 const struct vault_session *from, uint64_t tokens, struct kvq__restore **restore,
                 char *text)
{
    struct kvq__restore_spec spec = {.ns = ns, .good_tokens = tokens, .prefix_tokens = tokens};
    return restore_as(v, core, from, &spec, restore, text);
}

int vault_layer(struct vault *v, struct kvq__restore *restore, const struct vault_session *from,
                uint32_t layer)
{
    struct kvq__wanted w;
    for (uint32_t i = 0; kvq__restore_wanted(restore, i, &w); i++) {
        if (w.layer != layer)
            continue;
        const struct vault_block *b = block_of(v, from->parts[w.part].id);
        void *room = NULL;
        MUST(b && b->bytes == w.bytes);
        if (kvq__restore_rooms(restore, &i, 1, &room) == 0)
            return KVQ_E_NO_MEMORY;
        memcpy(room, b->data, b->bytes);
        int rc = kvq__restore_fill(restore, i);
        if (rc < 0)
            return rc;
    }
    kvq__restore_layer(restore, layer);
    return 0;
}

int vault_rest(struct vault *v, struct kvq__restore **restore, const struct vault_session *from)
{
    int rc = 0;
    for (uint32_t i = 0; i < from->saved.n_layers && rc == 0; i++)
        if (from->saved.layers[i].row.kv_from < 0)
            rc = vault_layer(v, *restore, from, i);
    kvq__restore_end(restore, rc);
    return rc;
}

// ---- Parking ----

void vault_forget(struct vault *v, const char *name, uint64_t stamp)
{
    for (uint32_t i = 0; i < v->n_sessions; i++) {
        struct vault_session *s = &v->sessions[i];
        if (strcmp(s->saved.name, name) != 0 || s->saved.stamp != stamp)
            continue;
        forget(s);
        *s = v->sessions[--v->n_sessions];
        v->sessions[v->n_sessions] = (struct vault_session){0};
        i--;
    }
}

int vault_fetch(struct vault *v, struct kvq__core *core, const struct kvq__store_job *order,
                struct kvq__restore **restore)
{
    char text[KVQ_TEXT_BYTES] = "the vault is broken";
    const struct vault_session *s = vault_find(v, order->name, order->shard);
    int rc = v->fail ? v->fail : s ? 0 : KVQ_E_NO_SESSION;
    if (rc == 0) {
        struct kvq__restore_spec spec = {.saved = &s->saved,
                                         .parts = s->parts,
                                         .n_parts = s->n,
                                         .good_tokens = v->lost_from ? v->lost_from : UINT64_MAX};
        rc = kvq__fetch_begin(core, order->id, &spec, restore, text);
    }
    if (rc < 0) {
        kvq__fetch_failed(core, order->id, rc, text);
        return rc;
    }
    rc = reserve_all(v, core, *restore, text);
    if (rc < 0)
        kvq__restore_end(restore, rc);
    return rc;
}

// 1: something else has to end first.
static int park(struct vault *v, struct kvq__core *core, const struct kvq__store_job *order)
{
    const struct vault_session *s = vault_find(v, order->name, 0);
    bool there = order->stored && s && s->saved.stamp == order->stamp;
    struct kvq__save_spec spec = {
        .name = order->session, .unnamed = true, .parks = true, .again = order->stored && !there};
    int rc = v->fail ? v->fail : there ? 0 : vault_save(v, core, &spec, NULL);
    if (rc <= 0)
        kvq__park_saved(core, order->id, rc, rc ? "the vault is broken" : "");
    return rc;
}

uint32_t vault_serve(struct vault *v, struct kvq__core *core)
{
    struct kvq__store_job order;
    struct kvq__restore *r;
    uint32_t n = 0;
    for (; kvq__park_next(core, &order); n++) {
        core_check(core);
        if (order.kind == KVQ__JOB_FORGET) {
            if (v->fail == 0)
                vault_forget(v, order.name, order.stamp);
            kvq__park_forgot(core, &order, v->fail ? KVQ__FORGET_FAILED : KVQ__FORGET_GONE);
        } else if (order.kind == KVQ__JOB_SAVE) {
            int rc = park(v, core, &order);
            if (rc == 1)
                kvq__park_saved(core, order.id, KVQ_E_BUSY, "it was packed all the time");
        } else if (vault_fetch(v, core, &order, &r) == 0) {
            core_check(core);
            MUST(vault_rest(v, &r, vault_find(v, order.name, order.shard)) == 0);
        }
        while (kvq__parks_poll(core))
            core_check(core);
        core_check(core);
    }
    while (kvq__parks_poll(core))
        core_check(core);
    return n;
}

// ---- With another number of shards ----

static int gather_layer(struct vault *v, struct kvq__restore *restore,
                        const struct kvq__resharded *r, struct vault_session *const *from,
                        uint32_t layer)
{
    struct kvq__wanted w;
    for (uint32_t i = 0; kvq__restore_wanted(restore, i, &w); i++) {
        uint64_t filled = 0;
        void *room;
        if (w.layer != layer)
            continue;
        MUST(kvq__restore_rooms(restore, &i, 1, &room) == 1);
        for (uint32_t k = r->first[w.part]; k < r->first[w.part + 1]; k++) {
            const struct kvq__range *g = &r->ranges[k];
            const struct vault_block *b = block_of(v, from[g->source]->parts[g->part].id);
            MUST(b && g->from + (g->n - 1) * g->from_step + g->bytes <= b->bytes);
            MUST(g->to + (g->n - 1) * g->to_step + g->bytes <= w.bytes);
            kvq__range_copy(g, b->data, room);
            filled += g->n * g->bytes;
        }
        MUST(filled == w.bytes);
        int rc = kvq__restore_fill(restore, i);
        if (rc < 0)
            return rc;
    }
    kvq__restore_layer(restore, layer);
    return 0;
}

static int restore_made(struct vault *v, struct kvq__core *core, const struct kvq__resharded *r,
                        struct vault_session *const *from, uint64_t good, char *text)
{
    struct kvq__restore *restore;
    struct kvq__restore_spec spec = {.ns = from[0]->ns,
                                     .saved = &r->saved,
                                     .parts = r->parts,
                                     .n_parts = r->n_parts,
                                     .good_tokens = good,
                                     .resharded = true,
                                     .ahead = r->ahead};
    int rc = kvq__restore_begin(core, &admin, &spec, &restore, text);
    if (rc < 0)
        return rc;
    while ((rc = kvq__restore_reserve(restore, text)) > 0)
        kit_poll(core);
    for (uint32_t i = 0; i < r->saved.n_layers && rc == 0; i++)
        if (r->saved.layers[i].row.kv_from < 0)
            rc = gather_layer(v, restore, r, from, i);
    kvq__restore_end(&restore, rc);
    return rc;
}

int vault_reshard(struct vault *v, struct kvq__core *core, const char *name,
                  const struct kvq__reshard_as *as, uint64_t good, char *text)
{
    struct vault_session *from[KVQ_MAX_SHARDS];
    struct kvq__saved_shard shards[KVQ_MAX_SHARDS];
    struct kvq__saved saved[KVQ_MAX_SHARDS];
    struct kvq__resharded made;
    uint32_t n = 0;
    while (n < KVQ_MAX_SHARDS && (from[n] = vault_find(v, name, n)))
        n++;
    MUST(n > 0);
    for (uint32_t i = 0; i < n; i++) {
        struct reading reading = {v, from[i]};
        struct kvq__ids_reader ids = {from[i]->parts, from[i]->n, good, read_ids, &reading};
        saved[i] = from[i]->saved;
        MUST(kvq__saved_ids_read(&saved[i], &ids) == 0);
        shards[i] = (struct kvq__saved_shard){&saved[i], from[i]->parts, from[i]->n};
    }
    int rc = kvq__reshard(shards, n, as, &made, text);
    if (rc == 0) {
        rc = restore_made(v, core, &made, from, good, text);
        kvq__resharded_free(&made);
    }
    for (uint32_t i = 0; i < n; i++)
        kvq__saved_ids_free(&saved[i]);
    return rc;
}
