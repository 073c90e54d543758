// SPDX-License-Identifier: Apache-2.0
//
// A timer wheel for keep times. A slot is 134 ms and has the sessions whose keep time ends then.
// The use of a session does not move it: when its slot comes it goes to a later one. A session
// whose time is further ahead than the wheel reaches is visited once a turn of the wheel. A tick
// looks at so many sessions at most; the rest of a slot, and the slots behind it, wait for the
// next.
#include <assert.h>

#include "daemon/core/session/group.h"
#include "daemon/core/state.h"

enum {
    SLOT_BITS = 27,
    AT_ONCE = 512, // sessions that one tick looks at
};
#define LONGEST_NS 1000000000ull // between two looks at one that is kept by something else

void kvq__dues_open(struct kvq__core *core)
{
    for (uint32_t i = 0; i < KVQ__DUE_SLOTS; i++)
        core->due.slots[i] = &core->due.lists[i];
    core->due.now = &core->due.lists[KVQ__DUE_SLOTS];
}

static uint64_t slot_of_time(uint64_t ns)
{
    return ns >> SLOT_BITS;
}

void kvq__due_clear(struct kvq__session *s)
{
    if (s->timer.listed)
        LIST_REMOVE(s, timer.link);
    s->timer.listed = false;
}

// Slots before that of now are over.
static void set_at(struct kvq__session *s, uint64_t at)
{
    at = kvq__max(at, s->core->now);
    kvq__due_clear(s);
    LIST_INSERT_HEAD(s->core->due.slots[slot_of_time(at) % KVQ__DUE_SLOTS], s, timer.link);
    s->timer.listed = true;
}

static void set_one(struct kvq__session *s)
{
    uint64_t left = UINT64_MAX - s->idle_since;
    assert(s->published && !s->dropped);
    if (s->spec.keep_ns)
        set_at(s, s->spec.keep_ns < left ? s->idle_since + s->spec.keep_ns : UINT64_MAX);
}

void kvq__due_set(struct kvq__session *s)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq__session *m = kvq__group_member(s, i);
        if (m)
            set_one(m);
    }
}

// The session is due and cannot end yet: it is being saved or read, or another shard was used
// lately. The longer this lasts the later is the next look, up to LONGEST_NS.
static void put_off(struct kvq__session *s)
{
    uint64_t now = s->core->now, late = now - s->idle_since - s->spec.keep_ns;
    assert(now - s->idle_since >= s->spec.keep_ns);
    set_at(s, now + kvq__min(late, LONGEST_NS));
}

static void act_when_due(struct kvq__session *s)
{
    assert(!s->timer.listed && s->published);
    s->core->lookup.looks++;
    if (kvq__group_expired(s)) { // and then so are its other shards
        kvq__group_end(s, kvq__is_kept(s) ? "the time that it is kept is over; it is saved"
                                          : "the time that it is kept is over");
    } else if (kvq__group_is_open(s)) {
        return; // whoever closes it last sets it again
    } else if (s->core->now - s->idle_since < s->spec.keep_ns) {
        set_one(s);
    } else {
        put_off(s);
        kvq__unsaved_outlived(s);
    }
}

// The slot's list is looked at, and the slot has the empty one: those that are set again are for
// another look.
static void take_slot(struct kvq__core *core, uint64_t at)
{
    struct kvq__session_bucket **slot = &core->due.slots[at % KVQ__DUE_SLOTS],
                               *empty = core->due.now;
    assert(LIST_EMPTY(empty));
    core->due.now = *slot;
    *slot = empty;
}

void kvq__dues_tick(struct kvq__core *core)
{
    uint64_t last = slot_of_time(core->now), at = core->due.slot;
    struct kvq__session *s;
    assert(at <= last);
    if (last - at >= KVQ__DUE_SLOTS)
        at = last - KVQ__DUE_SLOTS + 1;
    for (uint32_t n = 0; n < AT_ONCE;) {
        if ((s = LIST_FIRST(core->due.now))) {
            kvq__due_clear(s);
            act_when_due(s);
            n++;
        } else if (at <= last) {
            take_slot(core, at++);
        } else {
            break;
        }
    }
    core->due.slot = kvq__min(at, last); // the slot of now is not over
}
