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
// Waiting. A request that was refused a block gives back all that it has just taken and waits, if
// sessions that have ended have yet to give their memory back (ended.c), or
// an eviction that may help it is under way or can be begun, or will be once a session is old
// enough, or once work under way has ended that uses a session, reads one from disk, saves or moves
// one, or may look at blocks which are given back (for two seconds at most). What a client holds,
// by a step or in its own context, is not waited for. With KVQ_REQ_WAIT_ROOM it also waits if
// nothing can be evicted, until its deadline. It is looked at again, from the start, when a block
// has become free or an eviction has ended (core->freed), and every 50 ms. What could never fit is
// refused at once, and nobody has to go for it.
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

#include "daemon/core/state.h"

// ---- Who (evict.c) ----

// What speaks for evicting a session; times in ns.
struct kvq__score {
    uint64_t idle, gain; // gain: bytes that the place has more of afterwards
    uint64_t write, read;
};
// 0 if it gains nothing.
double kvq__score(const struct kvq__score *score);

// Sessions that could not help a request, by what is in the way.
struct kvq__in_the_way {
    uint32_t in_use, pinned, young, nowhere; // nowhere: there is no place where they could go
};

enum kvq__help {
    KVQ__HELP_NONE,  // nothing that could go would help
    KVQ__HELP_LATER, // something is not old enough yet
    KVQ__HELP_NOW,   // an eviction is under way, or what has ended gives its memory back;
                     // core->freed changes by it
};

// Somebody who was refused a block.
struct kvq__plea {
    const struct kvq__shortage *shortage;
    uint64_t need;                  // bytes that are missing there, at most
    uint64_t ticket;                // sessions of requests with the same or a lower one stay
    const struct kvq__session *own; // stays, with its group; NULL = none
    const struct kvq__queue *queue; // whose request asks; NULL: none does
    struct kvq__in_the_way *in_the_way;
    uint64_t *look_at; // KVQ__HELP_LATER: when
};
// Whether a session's blocks count where somebody was refused one.
bool kvq__shortage_counts(const struct kvq__shortage *shortage, const struct kvq__session *session);
uint64_t kvq__shortage_limit(
    const struct kvq__shortage *shortage); // bytes that there can be at all
// Has a session evicted that makes room, if there is one and none is being evicted there already.
enum kvq__help kvq__evict_for(struct kvq__core *core, const struct kvq__plea *plea);
// Whether who has waited since then is not to wait for a session that is old enough only then.
bool kvq__evict_too_late(uint64_t since, uint64_t look_at);
// What is in the way, for people.
void kvq__in_the_way_text(const struct kvq__core *core, const struct kvq__in_the_way *in_the_way,
                          char *text, size_t room);

bool kvq__evict_poll(struct kvq__core *core); // looks what has ended; true if anything has
void kvq__evict_tick(struct kvq__core *core); // before anybody needs the room
// The session has come back, or is there for the first time: it stays for a while.
void kvq__evict_back(struct kvq__session *session);

// ---- Prompts in full precision (exact.c) ----

// How many tokens of a new session's prompt are kept in 16 bits until it has ended: all, or none
// where that takes more than a share of its place or of its namespace's limit.
uint64_t kvq__exact_fits(const struct kvq__session *session, uint64_t prompt_tokens);
// Bytes of a session that such a prompt has and would not have if it were packed as it comes.
uint64_t kvq__exact_bytes(const struct kvq__session *session);
// Has prompts packed that hold what is missing, those first that hold most, if that is enough with
// the bytes that are free and those that others may give. KVQ__HELP_NOW while some are being
// packed, KVQ__HELP_LATER if requests under way or a GPU come first, KVQ__HELP_NONE if there is
// nothing to be had of them.
enum kvq__help kvq__exact_give_way(struct kvq__core *core, const struct kvq__plea *plea,
                                   uint64_t free, uint64_t others);

// ---- Demoted sessions (home.c) ----

// Whether the request is to wait since the session of its entry is not where it belongs; has it
// brought back. If that cannot be, the entry's no_room says why.
bool kvq__home_asks(struct kvq__queue *queue, uint32_t entry, struct kvq__session *session);
// Asks for its way back, without waiting.
void kvq__home_ask(struct kvq__session *session);
void kvq__home_refused(struct kvq__session *session); // there was no room at its home
// It has come from one place to another.
void kvq__home_left(struct kvq__session *session, struct kvq__pool *from, bool demotes);
void kvq__home_lost(struct kvq__session *session); // it ends
// Where a session belongs: the GPU that it was demoted from, or where it is.
static inline struct kvq__pool *kvq__home_of(const struct kvq__session *s)
{
    return s->home ? s->home : s->pool;
}

// ---- Waiting for room (admission.c) ----

// Takes the pages that the appended tokens of all entries need. False if the request is to wait for
// room; then nothing was taken. Entries that are refused have failed.
bool kvq__room_take(struct kvq__queue *queue);
// The entry came to nothing: gives back what kvq__room_take took for its session.
void kvq__room_untake(struct kvq__queue *queue, uint32_t entry);
// Entry i was refused memory, and nothing that it took is held any more; core->shortage, which was
// cleared before it was tried, says whether that was a block. True if the request is to give back
// all that it took and wait. Else the reason was told, and the entry is to fail.
bool kvq__room_ask(struct kvq__queue *queue, uint32_t entry);
// The same for a session of the request that needs `missing` bytes more, and has `whole` then, in
// the place that core->shortage says.
bool kvq__room_wait(struct kvq__queue *queue, const struct kvq__session *own, uint64_t missing,
                    uint64_t whole);
// Tells that somebody is refused; in_the_way NULL: it could never fit.
void kvq__room_refuse(struct kvq__core *core, const struct kvq__shortage *shortage,
                      uint64_t missing, const struct kvq__in_the_way *in_the_way);
// Whether a request that has been waiting is to be looked at again, and then takes it off the list.
bool kvq__room_turn(struct kvq__queue *queue);
void kvq__room_leave(struct kvq__queue *queue); // it has ended
// Bytes of a session's blocks if it had so many tokens.
uint64_t kvq__room_bytes(const struct kvq__session *session, uint64_t tokens);

#endif
