// SPDX-License-Identifier: Apache-2.0
//
// Eviction: sessions that nobody uses make room for those in use. Admission: requests that were
// refused memory wait until there is room, or are refused.
//
// Who goes. Sessions (a group of shards as one) that nothing uses, that were idle for evict_idle_ns
// and have not come back within it. Among these the session of the highest score goes:
//
//     idle time x bytes that the place gains / (bytes to write + bytes to read back + a fixed cost)
//
// So of two sessions alike the one used longest ago goes, of two idle for as long the saved one.
// A session whose blocks others share stays, unless only forks of each other are left: then one
// after the other goes. Below a namespace's limit only sessions of that namespace help. Among many
// sessions a look visits those used longest ago (`choose`).
//
// Where to. From a GPU to the host's memory, by a move (they are "demoted": `home` says which GPU
// they belong to), or, if the host has no room, to disk (park.h); from the host's memory to disk.
// A request that uses such a session waits until the session is at its home again, and sees nothing
// but the delay. Before any session goes, prompts kept in full precision are packed (exact.c).
//
// When. (1) At once when a request, restore or fetch was refused a block and eviction could help.
// (2) Before a request needs the room: above evict_above percent of a pool, and after park_idle_ns
// of idle time, one session after the other (kvq__evict_tick).
//
// How many. As many sessions as a request needs go side by side, so that the store can write those
// of a namespace in one transaction: at most 16 in a pool at a time (KVQ__EVICT_AT_ONCE), half of
// them for one asking namespace. Each caller has sessions evicted for itself, and waits for no
// other caller's. No eviction begins in a pool beside a demotion, since moves copy one at a time.
//
// Waiting. A request that was refused a block gives back all that it has just taken. It then waits
// if one of these may help it: sessions that have ended and have yet to give their memory back
// (ended.c); an eviction that is under way or can begin; a session that will soon be old enough;
// work that ends by itself and that uses a session, reads one from disk, saves or moves one, or may
// look at blocks that are given back (all of that for two seconds at most; blocks that are given
// back for 200 ms, and only if they are enough). No request waits for what a client holds by a step
// or in its own context. With KVQ_REQ_WAIT_ROOM a request also waits if nothing can be evicted,
// until its deadline. A waiter looks again when a block has become free where it waits or an
// eviction has ended (`freed` of its line), and every 50 ms, or less often if many wait
// (`looks_apart`); but it is tried from the start only if what it needs seems to be there, if it
// would be refused, or once in a while (admission.c). Namespaces share the time for that, so that
// no request waits longer for the many waiters of another namespace (`sharers`). A waiter looks for
// sessions to evict every 5 ms at most (KVQ__LEAST_LOOK_NS), unless the last eviction under way has
// ended and no waiter like it has looked since; and not at all while the evictions that it has
// asked for are enough, or no more may be under way there. A request for what could never fit is
// refused at once, and no session goes for it.
//
// Why nobody waits for ever:
//
// - Waiting requests hold no memory but that of their sessions, so two of them cannot each hold
//   what the other needs. Tickets number them in the order in which they were first refused. A
//   request may have any idle session evicted but its own and those of older requests; so the
//   oldest request gets its room or is refused, and then the next one is the oldest. A session of a
//   younger request may go: that request then waits for its return as well.
// - If the only session that could go is the request's own, none can go, and the request is
//   refused.
// - A session in a step, pinned, or read or mapped by a client stays. So a client that waits while
//   it has a step open in another queue is in its own way, and two groups are in each other's if
//   each has begun the step of one shard and waits for room for the other's. Without
//   KVQ_REQ_WAIT_ROOM they are refused; that flag is taken only with a deadline.
// - Restores and fetches take memory bit by bit. Only the one that has waited longest keeps it
//   while it waits (kvq__restore_take); all others give back what they have and begin anew.
// - A demotion that finds no room on the host fails at once, and the session is parked instead; a
//   way back that finds no room on its GPU fails at once and begins again when there is some. So
//   nothing on the host ever waits for a GPU, and nothing on disk for either.
// - A request that is looked at in its turn and still finds no room is passed by: smaller ones
//   behind it may go first. Otherwise a session that could free memory by going on might stand
//   behind a request that waits for that memory.
// - While the daemon drains no session is evicted, and waiters are answered with KVQ_E_DRAINING.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_EVICT_H
#define KVQ_DAEMON_CORE_RESIDENCY_EVICT_H

#include "daemon/core/request/admission.h"
#include "daemon/core/session/exact.h"
#include "daemon/core/state.h"

// ---- Who (evict.c) ----

// What speaks for evicting a session; times in ns.
struct kvq__score {
    uint64_t idle, gain; // gain: bytes that become free in the pool
    uint64_t write, read;
};
// 0 if the eviction gains nothing.
double kvq__score(const struct kvq__score *score);

// Has sessions evicted to make room, if some can go and the evictions under way are not enough.
enum kvq__help kvq__evict_for(struct kvq__core *core, const struct kvq__eviction_request *asked);
bool kvq__evict_poll(struct kvq__core *core); // notes which evictions have ended; true: any have
void kvq__evict_tick(struct kvq__core *core); // evicts before a request needs the room
// Above a limit that was lowered, gives up prefixes that no session has, and evicts idle sessions.
void kvq__quotas_tick(struct kvq__core *core);
// The session has come back, or is there for the first time: no eviction takes it for a while.
void kvq__evict_back(struct kvq__session *session);

// ---- Demoted sessions (demote.c) ----

// Whether the request is to wait because the session of its entry is away from its home; asks for
// the session's return. If the session cannot return, the entry's no_room says why.
bool kvq__demoted_asks(struct kvq__queue *queue, uint32_t entry, const struct kvq__handle *handle);
// Asks for the session's return, without waiting.
void kvq__demoted_ask(struct kvq__session *session);
void kvq__demoted_refused(struct kvq__session *session); // its home had no room for it
// The session has moved away from the pool `from`.
void kvq__demoted_left(struct kvq__session *session, struct kvq__pool *from, bool demotes);
void kvq__demoted_lost(struct kvq__session *session); // the session ends
#endif
