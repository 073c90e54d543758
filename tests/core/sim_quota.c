// SPDX-License-Identifier: Apache-2.0
//
// The simulation's namespace has limits that change while everything else goes on, also to less
// than it has: nothing may be taken away then, and nothing may grow (core_check looks, after every
// turn and for every limit).
#include <stdio.h>

#include "tests/core/sim.h"

static const struct kvq__peer admin = {.uid = 0, .admin = true};
static const char name[] = "uid-1000"; // of all actors

static struct kvq__namespace_info info_of(struct sim *sim)
{
    struct kvq__namespace_info info;
    char text[KVQ_TEXT_BYTES];
    MUST(kvq__core_namespace_info(sim->kit.core, &admin, name, &info, text) == 0);
    return info;
}

// Around what is used, and sometimes none.
static uint64_t new_limit(struct sim *sim, uint64_t used, uint32_t step)
{
    if (kit_chance(&sim->kit, 25))
        return 0;
    uint64_t change = (uint64_t)step * kit_below(&sim->kit, 16); // and seldom whole blocks
    change += step > 1 ? kit_below(&sim->kit, step) : 0;
    uint64_t limit =
        kit_chance(&sim->kit, 40) ? used - (change < used ? change : 0) : used + change;
    return limit ? limit : 1;
}

// So that it is there, whatever fails later.
void quota_begin(struct sim *sim, bool limits)
{
    info_of(sim);
    sim->limits = limits;
}

void quota_happen(struct sim *sim)
{
    struct kvq__namespace_info info = info_of(sim);
    struct kvq__override change = {.ns = "uid-1000"}, all;
    char text[KVQ_TEXT_BYTES];
    for (int i = 0; i < KVQ__LIMITS; i++) {
        if (i == KVQ__DISK_BYTES || i == KVQ__TABLE_BYTES || !kit_chance(&sim->kit, 50) ||
            kit_chance(&sim->kit, 30))
            continue;
        change.set |= 1u << i;
        change.quota.limit[i] = new_limit(sim, info.used[i], i == KVQ__SESSIONS ? 1 : 256 * 1024);
    }
    core_check(sim->kit.core); // what is there from now on must not grow if it is above
    MUST(kvq__quota_change(sim->kit.core, &admin, &change, &all, text) == 0);
    MUST(kvq__quota_apply(sim->kit.core, &all, text) == 0);
    info = info_of(sim);
    MUST(info.set == (change.set ? info.set | change.set : 0));
    for (int i = 0; i < KVQ__LIMITS; i++) {
        uint64_t base = info.configured.limit[i];
        MUST(info.quota.limit[i] == (change.set >> i & 1 ? change.quota.limit[i]
                                     : all.set >> i & 1  ? all.quota.limit[i]
                                                         : base));
        sim->lowered += info.quota.limit[i] && info.used[i] > info.quota.limit[i];
    }
}

void quota_end(struct sim *sim)
{
    struct kvq__namespace_info info = info_of(sim);
    for (int i = 0; i < KVQ__LIMITS; i++)
        sim->above += info.refused[i];
}

bool quota_is_full(struct sim *sim, enum kvq__limit which)
{
    struct kvq__namespace_info info = info_of(sim);
    return info.quota.limit[which] && info.used[which] >= info.quota.limit[which];
}

bool quota_was_met(struct sim *sim)
{
    struct kvq__namespace_info info = info_of(sim);
    bool met = false;
    for (int i = 0; i < KVQ__LIMITS; i++)
        met |= info.refused[i] > 0;
    return met;
}
