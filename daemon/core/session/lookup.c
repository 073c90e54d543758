// SPDX-License-Identifier: Apache-2.0
//
// Sessions by id and by name, and in the order of ids. The tables are lists of <sys/queue.h>, as
// those of prefixes: their memory comes from the core's caller, who can refuse it; then they work
// as they are, only slower.
#include <assert.h>
#include <sodium.h>
#include <string.h>

#include "daemon/core/state.h"

enum { FIRST_BUCKETS = 64 };
static_assert((int)crypto_shorthash_BYTES == (int)sizeof(uint64_t), "a SipHash");
static_assert((int)crypto_shorthash_KEYBYTES == 16, "the key of struct kvq__lookup");

// Of its name and its namespace's; all shards of a session have one.
static uint64_t hash_of(const struct kvq__namespace *ns, const char *name)
{
    uint8_t text[2 * KVQ_NAME_BYTES] = {0};
    uint64_t hash;
    memcpy(text, ns->name, strlen(ns->name));
    memcpy(text + KVQ_NAME_BYTES, name, strnlen(name, KVQ_NAME_BYTES - 1));
    crypto_shorthash((uint8_t *)&hash, text, sizeof text, ns->core->lookup.key);
    return hash;
}

static struct kvq__session_bucket *session_bucket(const struct kvq__lookup *l,
                                                  struct kvq__session_bucket *buckets,
                                                  uint64_t hash)
{
    assert((l->n_buckets & (l->n_buckets - 1)) == 0);
    return &buckets[hash & (l->n_buckets - 1)];
}

static void insert(struct kvq__lookup *l, struct kvq__session *s)
{
    LIST_INSERT_HEAD(session_bucket(l, l->ids, s->id), s, lookup.by_id);
    if (s->name[0])
        LIST_INSERT_HEAD(session_bucket(l, l->names, s->lookup.hash), s, lookup.by_name);
}

// ---- The tables ----

static int make_buckets(struct kvq__core *core, struct kvq__lookup *l, uint32_t n)
{
    l->ids = kvq__allocate(core, n * sizeof *l->ids);
    l->names = kvq__allocate(core, n * sizeof *l->names);
    l->n_buckets = n;
    for (uint32_t i = 0; i < n && l->ids && l->names; i++) {
        LIST_INIT(&l->ids[i]);
        LIST_INIT(&l->names[i]);
    }
    return l->ids && l->names ? 0 : KVQ_E_NO_MEMORY;
}

static void unmake_buckets(struct kvq__core *core, struct kvq__lookup *l)
{
    kvq__deallocate(core, l->ids, l->n_buckets * sizeof *l->ids);
    kvq__deallocate(core, l->names, l->n_buckets * sizeof *l->names);
    l->ids = l->names = NULL;
}

int kvq__lookup_open(struct kvq__core *core)
{
    memcpy(core->lookup.key, core->config.prefix_key, sizeof core->lookup.key);
    return make_buckets(core, &core->lookup, FIRST_BUCKETS);
}

void kvq__lookup_close(struct kvq__core *core)
{
    assert(core->n_sessions == 0);
    unmake_buckets(core, &core->lookup);
}

static void grow(struct kvq__core *core)
{
    struct kvq__lookup *l = &core->lookup, old = *l;
    struct kvq__session *s;
    if (core->n_sessions <= l->n_buckets)
        return;
    if (make_buckets(core, l, 2 * old.n_buckets) < 0) {
        unmake_buckets(core, l);
        *l = old;
        return;
    }
    for (uint32_t i = 0; i < old.n_buckets; i++)
        while ((s = LIST_FIRST(&old.ids[i]))) {
            LIST_REMOVE(s, lookup.by_id);
            if (s->name[0])
                LIST_REMOVE(s, lookup.by_name);
            insert(l, s);
        }
    unmake_buckets(core, &old);
}

// ---- The order of ids ----

static int by_id(struct kvq__session *a, struct kvq__session *b)
{
    return a->id < b->id ? -1 : a->id > b->id;
}

RB_GENERATE_STATIC(kvq__session_tree, kvq__session, lookup.tree, by_id)

// RB_NFIND, which does not say what it looked at.
struct kvq__session *kvq__session_after(struct kvq__namespace *ns, uint64_t id)
{
    struct kvq__session *s = RB_ROOT(&ns->by_id), *found = NULL;
    while (s) {
        ns->core->lookup.looks++;
        if (s->id > id)
            found = s;
        s = s->id > id ? RB_LEFT(s, lookup.tree) : RB_RIGHT(s, lookup.tree);
    }
    return found;
}

// ---- Sessions ----

void kvq__lookup_add(struct kvq__session *s)
{
    assert(s->id > 0 && s->id <= s->core->last.session);
    grow(s->core);
    s->lookup.hash = hash_of(s->ns, s->name);
    insert(&s->core->lookup, s);
    RB_INSERT(kvq__session_tree, &s->ns->by_id, s);
}

void kvq__lookup_remove(struct kvq__session *s)
{
    assert(s->published);
    LIST_REMOVE(s, lookup.by_id);
    if (s->name[0])
        LIST_REMOVE(s, lookup.by_name);
    RB_REMOVE(kvq__session_tree, &s->ns->by_id, s);
}

struct kvq__session *kvq__session_by_id(struct kvq__core *core, uint64_t id)
{
    struct kvq__lookup *l = &core->lookup;
    struct kvq__session *s;
    LIST_FOREACH (s, session_bucket(l, l->ids, id), lookup.by_id) {
        l->looks++;
        if (s->id == id)
            return s;
    }
    return NULL;
}

struct kvq__session *kvq__session_named(struct kvq__namespace *ns, const char *name)
{
    struct kvq__lookup *l = &ns->core->lookup;
    uint64_t hash = hash_of(ns, name);
    struct kvq__session *s;
    LIST_FOREACH (s, session_bucket(l, l->names, hash), lookup.by_name) {
        l->looks++;
        if (s->lookup.hash == hash && s->ns == ns && strcmp(s->name, name) == 0)
            return s;
    }
    return NULL;
}
