// SPDX-License-Identifier: Apache-2.0
//
// The simulation's sessions are parked at any moment, whoever has them open, and come back when
// somebody asks: what the core wants of the store jobs is done as slowly as everything else, and
// fails at times.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/residency/park.h"
#include "daemon/core/residency/saved_internal.h"
#include "daemon/core/session/activity.h"
#include "tests/core/sim.h"

static const struct kvq__peer admin = {.uid = 1000, .admin = true};

// Nothing that a client or anybody else does is in the way, of this shard.
static bool is_free(const struct kvq__session *s)
{
    return s && !kvq__session_uses(s, KVQ__USES_EVICT) && !s->pinned && !s->park &&
           !kvq__is_offloaded(s) && !kvq__is_fetching(s);
}

static void park(struct sim *sim, struct track *t)
{
    struct kvq__session *s = find_session(sim, t->id);
    const struct track *other = track_sibling(sim, t);
    struct kvq__move_info info;
    char text[KVQ_TEXT_BYTES] = "";
    bool free = is_free(s) && (t->shards == 1 || (other && is_free(find_session(sim, other->id))));
    int rc = kvq__park_start(s, (enum kvq__park_reason)kit_below(&sim->kit, KVQ__PARK_REASONS),
                             &info, text);
    MUST(rc == 0 || text[0]);
    MUST(rc == 0 || rc == KVQ_E_BUSY || rc == KVQ_E_INCOMPLETE || rc == KVQ_E_LIMIT ||
         (rc == KVQ_E_NO_MEMORY && sim->kit.fail_one_in));
    MUST(rc != KVQ_E_BUSY || !free);
    MUST(rc < 0 || !(t->stepper || t->prepared));
}

static void prefetch(struct sim *sim, struct track *t)
{
    char text[KVQ_TEXT_BYTES] = "";
    int rc = kvq__prefetch_start(find_session(sim, t->id), NULL, text);
    MUST(rc == 0 || text[0]);
    MUST(rc == 0 || rc == KVQ_E_BUSY || rc == KVQ_E_LIMIT ||
         (rc == KVQ_E_NO_MEMORY && sim->kit.fail_one_in));
}

static void stay(struct sim *sim, struct track *t)
{
    char id[24], text[KVQ_TEXT_BYTES];
    snprintf(id, sizeof id, "#%llu", (unsigned long long)t->id);
    MUST(kvq__session_pin_named(sim->kit.core, &admin, NULL, id, kit_chance(&sim->kit, 25), text) ==
         0);
}

void park_any(struct sim *sim)
{
    struct track *t = &sim->tracks[kit_below(&sim->kit, SIM_TRACKS)];
    for (uint32_t i = 0; i < 8 && !(t->used && t->alive); i++)
        t = &sim->tracks[kit_below(&sim->kit, SIM_TRACKS)];
    if (!t->used || !t->alive)
        return;
    uint32_t what = kit_below(&sim->kit, 10);
    if (what < 7)
        park(sim, t);
    else if (what < 9)
        prefetch(sim, t);
    else
        stay(sim, t);
}

// ---- What the core wants ----

// What is stored of sessions without a name that somebody asked for, and that are gone.
static void tidy(struct sim *sim)
{
    struct vault *v = &sim->keep.vault;
    for (uint32_t i = v->n_sessions; v->n_sessions > 40 && i-- > 0;) {
        const struct kvq__saved *s = &v->sessions[i].saved;
        if (s->name[0] == '#' && !find_session(sim, strtoull(s->name + 1, NULL, 10)))
            vault_forget(v, s->name, s->stamp);
    }
}

static void saved(struct sim *sim, int status)
{
    struct keep *k = &sim->keep;
    k->ordered = false;
    kvq__park_saved(sim->kit.core, k->order.id, status, status ? "as it happens" : "");
}

// Again and again while something has to end first.
static void save_ordered(struct sim *sim)
{
    struct keep *k = &sim->keep;
    const struct vault_session *there = vault_find(&k->vault, k->order.name, 0);
    char text[KVQ_TEXT_BYTES] = "";
    if (k->order.stored && there && there->saved.stamp == k->order.stamp) {
        saved(sim, 0);
        return;
    }
    struct kvq__save_spec spec = {
        .name = k->order.session, .unnamed = true, .parks = true, .again = k->order.stored};
    int rc = kvq__save_begin(sim->kit.core, &admin, &spec, &k->save, text);
    MUST(rc == 1 || rc == 0 || rc == KVQ_E_NO_SESSION || rc == KVQ_E_INCOMPLETE ||
         rc == KVQ_E_NO_MEMORY);
    if (rc == 1 && k->tries++ < 20)
        return;
    if (rc || !k->save)
        saved(sim, rc == 1 ? KVQ_E_BUSY : rc);
}

static void fetch(struct sim *sim)
{
    struct keep *k = &sim->keep;
    k->vault.fail = kit_chance(&sim->kit, 5) ? KVQ_E_SYSTEM : 0;
    int rc = vault_fetch(&k->vault, sim->kit.core, &k->order, &k->restore);
    k->vault.fail = 0;
    MUST(rc == 0 || rc == KVQ_E_SYSTEM || rc == KVQ_E_CANCELLED || rc == KVQ_E_NO_MEMORY ||
         rc == KVQ_E_QUOTA);
    if (rc)
        return;
    k->fetches = true;
    k->from = vault_find(&k->vault, k->order.name, k->order.shard);
    k->layer = 0;
}

// What cannot be deleted comes again.
static void forget_ordered(struct sim *sim)
{
    struct keep *k = &sim->keep;
    bool gone = !kit_chance(&sim->kit, 5);
    if (gone)
        vault_forget(&k->vault, k->order.name, k->order.stamp);
    kvq__park_forgot(sim->kit.core, &k->order, gone ? KVQ__FORGET_GONE : KVQ__FORGET_FAILED);
    MUST(kvq__park_forgotten(sim->kit.core, k->order.ns, k->order.name, k->order.stamp));
}

bool park_serve(struct sim *sim)
{
    struct keep *k = &sim->keep;
    if (k->ordered) {
        save_ordered(sim);
        return true;
    }
    tidy(sim);
    if (!kvq__park_next(sim->kit.core, &k->order))
        return false;
    if (k->order.kind == KVQ__JOB_FORGET) {
        forget_ordered(sim);
    } else if (k->order.kind == KVQ__JOB_FETCH) {
        fetch(sim);
    } else {
        k->ordered = true;
        k->tries = 0;
        save_ordered(sim);
    }
    return true;
}

void park_written(struct sim *sim, bool good)
{
    if (sim->keep.ordered)
        saved(sim, good ? 0 : KVQ_E_NO_SPACE);
}

static struct track *track_of(struct sim *sim, const struct kvq__session *s)
{
    struct track *t = sim->tracks;
    while (!t->used || !t->alive || t->id != s->id)
        t++;
    MUST(t < sim->tracks + SIM_TRACKS);
    return t;
}

// The disk fails to be read, where nobody has begun a step of the session. The other shard may be
// in one, and is as before it where somebody could have begun one of this shard.
bool park_fails(struct sim *sim)
{
    struct keep *k = &sim->keep;
    const struct kvq__session *s = k->restore->session;
    if (!k->fetches || s->dropped || kvq__in_step(s) || s->n_loading == 0 ||
        !kit_chance(&sim->kit, 4))
        return false;
    if (k->restore->entered)
        track_leave(sim, track_of(sim, s));
    kvq__restore_end(&k->restore, KVQ_E_SYSTEM);
    MUST(kvq__is_offloaded(s) || kvq__is_turning_back(s)); // once nobody looks at it
    return true;
}

int park_predict(const struct sim *sim, const struct track *t)
{
    const struct kvq__session *s = find_session(sim, t->id);
    return kvq__is_offloaded(s) || kvq__is_turning_back(s) ? s->fetch.error : 0;
}

bool park_waits(const struct sim *sim)
{
    return sim->kit.core->disk.n_wanted || sim->keep.ordered;
}
