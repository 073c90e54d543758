// SPDX-License-Identifier: Apache-2.0
//
// Warm ports stand in lists, by member. Cold ones stand in an array of the words to compare, so
// that a look at many of them waits for no pointer.
#include "daemon/runtime/ports.h"

#include <assert.h>

static bool is_warm(const struct kvq__port *port)
{
    return port->cold == UINT32_MAX;
}

void kvq__ports_init(struct kvq__ports *ports)
{
    ports->n = ports->n_cold = ports->next = 0;
    ports->swept_ns = 0;
    TAILQ_INIT(&ports->members);
    for (uint32_t i = 0; i < KVQ_MAX_PORTS; i++)
        ports->free_slots[i] = i;
}

// ---- Warm ports ----

struct kvq__port *kvq__ports_after(const struct kvq__port *port)
{
    struct kvq__port *next = TAILQ_NEXT(port, link);
    assert(is_warm(port));
    return next ? next : TAILQ_FIRST(&port->member->warm);
}

static void enter_warm(struct kvq__ports *ports, struct kvq__port *port)
{
    struct kvq__member *member = port->member;
    assert(TAILQ_EMPTY(&member->warm) == (member->next == NULL));
    if (!member->next) {
        TAILQ_INSERT_TAIL(&ports->members, member, link);
        member->next = port;
    }
    TAILQ_INSERT_TAIL(&member->warm, port, link);
    member->n_warm++;
    port->cold = UINT32_MAX;
}

static void leave_warm(struct kvq__ports *ports, struct kvq__port *port)
{
    struct kvq__member *member = port->member;
    assert(member->n_warm > 0 && member->next && is_warm(port));
    if (member->next == port)
        member->next = kvq__ports_after(port);
    TAILQ_REMOVE(&member->warm, port, link);
    if (--member->n_warm == 0) {
        TAILQ_REMOVE(&ports->members, member, link);
        member->next = NULL;
    }
}

void kvq__ports_join(struct kvq__ports *ports, struct kvq__port *port)
{
    struct kvq__member *member = port->member;
    assert(ports->n < KVQ_MAX_PORTS);
    if (member->n_ports++ == 0) {
        TAILQ_INIT(&member->warm);
        TAILQ_INIT(&member->cold);
    }
    port->work = (struct kvq__work){.share = &member->share, .slot = ports->free_slots[ports->n++]};
    enter_warm(ports, port);
}

void kvq__ports_leave(struct kvq__ports *ports, struct kvq__port *port)
{
    assert(ports->n > 0 && port->member->n_ports > 0 && port->work.slot < KVQ_MAX_PORTS);
    leave_warm(ports, port);
    port->member->n_ports--;
    ports->free_slots[--ports->n] = port->work.slot;
}

// ---- Cold ports ----

void kvq__ports_cool(struct kvq__ports *ports, struct kvq__port *port)
{
    assert(port->state == KVQ__PORT_IDLE && !port->closing && !port->member->broken);
    assert(ports->n_cold < ports->n);
    leave_warm(ports, port);
    TAILQ_INSERT_TAIL(&port->member->cold, port, link);
    port->cold = ports->n_cold++;
    ports->cold[port->cold] = (struct kvq__cold){port->rx.shared_tail, port->rx.head, port};
}

static void move_cold(struct kvq__ports *ports, uint32_t from, uint32_t to)
{
    ports->cold[to] = ports->cold[from];
    ports->cold[to].port->cold = to;
}

void kvq__ports_warm(struct kvq__ports *ports, struct kvq__port *port)
{
    uint32_t hole = port->cold;
    if (is_warm(port))
        return;
    assert(hole < ports->n_cold && ports->cold[hole].port == port);
    // The last one fills the hole, where it must not miss its look: among those still to come.
    if (hole < ports->next) {
        move_cold(ports, --ports->next, hole);
        hole = ports->next;
    }
    if (hole != --ports->n_cold)
        move_cold(ports, ports->n_cold, hole);
    TAILQ_REMOVE(&port->member->cold, port, link);
    enter_warm(ports, port);
}

void kvq__ports_warm_member(struct kvq__ports *ports, struct kvq__member *member)
{
    struct kvq__port *port;
    while ((port = TAILQ_FIRST(&member->cold)))
        kvq__ports_warm(ports, port);
}

// ---- Looks at cold ports ----

static bool look_at_cold(struct kvq__ports *ports, uint32_t looks)
{
    bool any = false;
    assert(looks <= ports->n_cold);
    for (; looks > 0; looks--) {
        if (ports->next >= ports->n_cold)
            ports->next = 0;
        const struct kvq__cold *cold = &ports->cold[ports->next];
        if (kvq_word_load(cold->tail) == cold->head) {
            ports->next++;
        } else {
            kvq__ports_warm(ports, cold->port); // another is at `next` now
            any = true;
        }
    }
    return any;
}

void kvq__ports_sweep(struct kvq__ports *ports, uint64_t now)
{
    uint64_t passed = now - ports->swept_ns;
    uint64_t looks = ports->n_cold;
    assert(now >= ports->swept_ns);
    if (passed < KVQ__COLD_NS) {
        looks = (ports->n_cold * passed + KVQ__COLD_NS - 1) / KVQ__COLD_NS;
        looks = looks > KVQ__COLD_LOOKS ? looks : KVQ__COLD_LOOKS;
    }
    ports->swept_ns = now;
    look_at_cold(ports, looks < ports->n_cold ? (uint32_t)looks : ports->n_cold);
}

bool kvq__ports_sweep_all(struct kvq__ports *ports)
{
    return look_at_cold(ports, ports->n_cold);
}
