// SPDX-License-Identifier: Apache-2.0
//
// Eviction: sessions that nobody uses make room for those that somebody does. And admission:
// requests that were refused memory wait until there is room, or are refused.
//
// Who goes. Sessions that nothing uses (a group of shards as one), that were idle for
// evict_idle_ns and have not come back within it. Among those the one of the highest score:
//
//     idle time x bytes that the place gains / (bytes to write + bytes to read back + a fixed cost)
//
// so that of two sessions alike the one used longest ago goes, of two idle for as long the one that
// is saved already goes, and one whose blocks others share stays, unless only forks of each other
// are left: then one after the other goes. Under a namespace's limit only sessions of that
// namespace help. Where there are many, those used longest ago are looked at (`choose`).
//
// Where to. From a GPU to the host's memory, by a move (they are "demoted": `home` says which GPU
// they belong to), or, where there is no room, to disk (park.h); from the host's memory to disk.
// Whoever uses one waits until it is back at its home. Requests see nothing of it but the delay.
//
// Before anybody goes, prompts that are kept in full precision are packed (exact.c).
//
// When. (1) A request, restore or fetch was refused a block: at once, if it could help. (2) Above
// evict_above percent of a pool, and after park_idle_ns of idle time, one session after the other
// goes before anybody needs the room (kvq__evict_tick).
//
// How many. As many as a request needs go side by side, so that the store can write those of a
// namespace in one transaction: 16 in a pool at a time (KVQ__EVICT_AT_ONCE), half of them for one
// namespace that asks. Each caller has sessions evicted for itself, and none waits for those of
// another. None begins beside one that goes to the host, since moves copy one at a time.
//
// Waiting. A request that was refused a block gives back all that it has just taken and waits, if
// sessions that have ended have yet to give their memory back (ended.c), or an eviction that may
// help it is under way or can be begun, or will be once a session is old enough, or once work under
// way has ended that uses a session, reads one from disk, saves or moves one, or may look at blocks
// which are given back (for two seconds at most; the last of these, for 200 ms, and only if they
// are enough). What a client holds, by a step or in its own context, is not waited for. With
// KVQ_REQ_WAIT_ROOM it also waits if nothing can be evicted, until its deadline. It is looked at
// again when a block has become free where it waits or an eviction has ended (`freed` of its line),
// and every 50 ms (every n ms, if n requests wait there and n is over 50); but it is tried from the
// start only if what it needs seems to be there, or it would be refused, or once in a while
// (admission.c). Namespaces share the time for that, so that nobody waits longer for the many that
// wait in another one (`sharers`). Who may go is looked for every 5 ms at most
// (KVQ__LEAST_LOOK_NS) unless the last eviction under way has ended and nobody who waits like it
// has looked since, and not at all while those that it has asked for are enough, or no more may be
// under way there. What could never fit is refused at once, and nobody has to go for it.
//
// Why nobody waits for ever:
//
// - Requests hold no memory while they wait but that of their sessions, so two of them cannot each
//   hold what the other needs. They have tickets, in the order in which they first were refused. A
//   request may have any idle session evicted but its own and those of requests that came before
//   it; so the oldest gets its room or is refused, and then the next one is the oldest. A session
//   of a request that came later may go: that request then waits for its return as well.
// - If the only session that could go is its own, nothing can go: it is refused.
// - Whatever is in a step, pinned, read or mapped by a client stays. A client that waits while it
//   has a step open in another queue, and two groups of which each has begun the step of one shard
//   and waits for room for the other's, are in each other's way like that: without the flag they
//   are refused, with it they have a deadline, without which the flag is not taken.
// - Restores and fetches take memory bit by bit, and keep it while they wait; but only the one that
//   has waited longest (kvq__restore_take). All others give back what they have and begin anew.
// - A demotion that finds no room on the host fails at once, and the session is parked instead; a
//   way back that finds none on its GPU fails at once and is begun again when there is some. So
//   nothing on the host ever waits for a GPU, and nothing on disk for either.
// - A request that is looked at in its turn and still finds no room is passed by: smaller ones
//   behind it may go first. Otherwise a session that could free memory by going on might stand
//   behind one that waits for that.
// - While the daemon drains nothing is evicted any more, and what waits is answered with
//   KVQ_E_DRAINING.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_EVICT_H
#define KVQ_DAEMON_CORE_RESIDENCY_EVICT_H

#include "daemon/core/request/admission.h"
#include "daemon/core/session/exact.h"
#include "daemon/core/state.h"

// ---- Who (evict.c) ----

// What speaks for evicting a session; times in ns.
struct kvq__score {
    uint64_t idle, gain; // gain: bytes that the place has more of afterwards
    uint64_t write, read;
};
// 0 if it gains nothing.
double kvq__score(const struct kvq__score *score);

// Has sessions evicted that make room, if there are some and those that go already are not enough.
enum kvq__help kvq__evict_for(struct kvq__core *core, const struct kvq__eviction_request *asked);
bool kvq__evict_poll(struct kvq__core *core); // looks what has ended; true if anything has
void kvq__evict_tick(struct kvq__core *core); // before anybody needs the room
// Where more is used than may be, gives up prefixes that no session has and has sessions evicted
// that nobody uses.
void kvq__quotas_tick(struct kvq__core *core);
// The session has come back, or is there for the first time: it stays for a while.
void kvq__evict_back(struct kvq__session *session);

// ---- Demoted sessions (demote.c) ----

// Whether the request is to wait since the session of its entry is not where it belongs; has it
// brought back. If that cannot be, the entry's no_room says why.
bool kvq__demoted_asks(struct kvq__queue *queue, uint32_t entry, const struct kvq__handle *handle);
// Asks for its way back, without waiting.
void kvq__demoted_ask(struct kvq__session *session);
void kvq__demoted_refused(struct kvq__session *session); // there was no room at its home
// It has come from one place to another.
void kvq__demoted_left(struct kvq__session *session, struct kvq__pool *from, bool demotes);
void kvq__demoted_lost(struct kvq__session *session); // it ends
#endif
