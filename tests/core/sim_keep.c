// SPDX-License-Identifier: Apache-2.0
//
// The simulation's sessions go to a store in memory and come back: saves begin at any moment, and
// are copied and written while everything else goes on; sessions that nobody has open are saved,
// dropped, and restored layer by layer while clients open them and ask.
#include <stdio.h>
#include <string.h>

#include "daemon/core/residency/saved_internal.h"
#include "tests/core/sim.h"

static const struct kvq__peer admin = {.uid = 1000, .admin = true};

// ---- Saves beside everything else ----

static void begin_save(struct sim *sim)
{
    const struct track *t = &sim->tracks[kit_below(&sim->kit, SIM_TRACKS)];
    char id[24], text[KVQ_TEXT_BYTES] = "";
    for (uint32_t i = 0; i < 8 && !(t->used && t->alive); i++)
        t = &sim->tracks[kit_below(&sim->kit, SIM_TRACKS)];
    if (!t->used || !t->alive)
        return;
    snprintf(id, sizeof id, "#%llu", (unsigned long long)t->id);
    struct kvq__save_spec spec = {.name = id, .unnamed = true, .again = kit_chance(&sim->kit, 20)};
    int rc = kvq__save_begin(sim->kit.core, &admin, &spec, &sim->keep.save, text);
    MUST(rc == 1 || rc == 0 || rc == KVQ_E_INCOMPLETE || rc == KVQ_E_NO_MEMORY);
    MUST(rc >= 0 || text[0]);
}

static void go_on_saving(struct sim *sim)
{
    struct keep *k = &sim->keep;
    if (!k->copied) {
        int rc = kvq__save_copy(k->save);
        MUST(rc == 0 || rc == KVQ_E_NO_MEMORY); // of pinned memory
        kvq__save_copied(k->save);
        k->copied = rc == 0;
        if (rc) {
            kvq__save_end(&k->save, false);
            park_written(sim, false);
        }
        return;
    }
    k->copied = false;
    bool good = !kit_chance(&sim->kit, 20); // else the disk is full
    if (good)
        vault_write(&k->vault, &k->save);
    else
        kvq__save_end(&k->save, false);
    k->saves += good;
    park_written(sim, good);
}

// ---- Away and back ----

// Nobody has it open, nothing uses it, and it is whole by itself.
static struct kvq__session *idle_session(struct sim *sim, struct track *t)
{
    struct kvq__namespace *ns;
    struct kvq__session *s;
    if (!t->used || !t->alive || !t->named || t->shards > 1)
        return NULL;
    TAILQ_FOREACH (ns, &sim->kit.core->namespaces, link)
        TAILQ_FOREACH (s, &ns->sessions, link)
            if (s->id == t->id)
                return LIST_EMPTY(&s->handles) && !s->group && !s->move && s->refs == 0 ? s : NULL;
    return NULL;
}

static void come_back(struct sim *sim, struct track *t, const char *place, uint64_t known)
{
    struct keep *k = &sim->keep;
    char text[KVQ_TEXT_BYTES];
    int rc =
        vault_restore(&k->vault, sim->kit.core, t->name, 0, place, UINT64_MAX, &k->restore, text);
    MUST(rc == 0 || rc == KVQ_E_NO_MEMORY || rc == KVQ_E_QUOTA);
    if (rc) {
        track_die(sim, t);
        return;
    }
    MUST(k->restore->session->ids.known == known);
    t->id = k->restore->session->id;
    t->detached_at = sim->kit.now;
    k->from = vault_find(&k->vault, t->name, 0);
    k->layer = 0;
    k->fetches = false;
    k->restores++;
}

static void go_away(struct sim *sim)
{
    uint32_t first = kit_below(&sim->kit, SIM_TRACKS);
    const struct kvq__session *s = NULL;
    struct track *t = NULL;
    char text[KVQ_TEXT_BYTES], id[24];
    for (uint32_t i = 0; i < SIM_TRACKS && !s; i++) {
        t = &sim->tracks[(first + i) % SIM_TRACKS];
        s = idle_session(sim, t);
    }
    if (!s)
        return;
    const char *place = kvq__pool_name(s->pool);
    uint64_t known = s->ids.known;
    snprintf(id, sizeof id, "#%llu", (unsigned long long)t->id);
    struct kvq__save_spec spec = {.name = id, .again = true};
    int rc = vault_save(&sim->keep.vault, sim->kit.core, &spec, NULL);
    MUST(rc == 1 || rc == 0 || rc == KVQ_E_NO_MEMORY);
    if (rc)
        return;
    MUST(kvq__session_drop_named(sim->kit.core, &admin, NULL, id, text) == 0);
    come_back(sim, t, place, known);
}

// Of what was ever saved, the beginning that others can have, for the index. Whatever has become of
// its session: ids say what it is.
static void read_prefix(struct sim *sim)
{
    struct keep *k = &sim->keep;
    char text[KVQ_TEXT_BYTES] = "";
    const struct vault_session *from = NULL;
    uint32_t n = k->vault.n_sessions, first = n ? kit_below(&sim->kit, n) : 0;
    for (uint32_t i = 0; i < n && !(from && from->pages); i++)
        from = &k->vault.sessions[(first + i) % n];
    if (!from)
        return;
    uint32_t pages = from->pages ? 1 + kit_below(&sim->kit, from->pages) : 0;
    uint64_t tokens = (uint64_t)pages * KVQ_BLOCK_TOKENS;
    if (pages == 0 || !kvq__saved_can_begin(&from->saved, tokens))
        return;
    int rc = vault_prefix(&k->vault, sim->kit.core, from->ns, from, tokens, &k->restore, text);
    MUST(rc == 0 || rc == KVQ_E_NO_MEMORY || rc == KVQ_E_QUOTA);
    MUST(rc == 0 || text[0]);
    if (rc)
        return;
    k->from = from;
    k->layer = 0;
    k->fetches = false;
    k->read_prefixes++;
}

static void go_on_loading(struct sim *sim)
{
    struct keep *k = &sim->keep;
    if (park_fails(sim))
        return;
    if (k->layer == k->from->saved.n_layers) {
        kvq__restore_end(&k->restore, 0);
        return;
    }
    if (k->from->saved.layers[k->layer].row.kv_from < 0)
        MUST(vault_layer(&k->vault, k->restore, k->from, k->layer) == 0);
    k->layer++;
}

bool keep_reads_prefix(const struct sim *sim)
{
    const struct kvq__restore *r = sim->keep.restore;
    return r && r->spec.prefix_tokens && !r->session->dropped;
}

// ---- What happens ----

void keep_happen(struct sim *sim)
{
    struct keep *k = &sim->keep;
    if (k->restore)
        go_on_loading(sim);
    else if (k->save)
        go_on_saving(sim);
    else if (park_serve(sim))
        return;
    else if (kit_chance(&sim->kit, 40))
        park_any(sim);
    else if (kit_chance(&sim->kit, 20))
        read_prefix(sim);
    else if (kit_chance(&sim->kit, 60))
        begin_save(sim);
    else
        go_away(sim);
}

void keep_end(struct sim *sim)
{
    while (sim->keep.restore || sim->keep.save || sim->keep.ordered)
        keep_happen(sim);
    vault_close(&sim->keep.vault);
}
