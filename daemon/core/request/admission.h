// SPDX-License-Identifier: Apache-2.0
//
// Requests that were refused memory wait until there is room, or are refused (evict.h says how).
#ifndef KVQ_DAEMON_CORE_REQUEST_ADMISSION_H
#define KVQ_DAEMON_CORE_REQUEST_ADMISSION_H

#include "daemon/core/state.h"

// The request is tried, or a FORK goes on: what was in vain before is asked for again.
void kvq__admission_begin(struct kvq__queue *queue);
// Takes the pages that the appended tokens of all entries need. False if the request has to wait
// for room; then no page was taken. An entry that is refused fails.
bool kvq__admission_take(struct kvq__queue *queue);
// The entry has failed: gives back the pages that kvq__admission_take took for its session.
void kvq__admission_untake(struct kvq__queue *queue, uint32_t entry);
// Entry i was refused memory, and has given back what it took: the block `refused` (code 0: what
// was refused is none), and with it `least` bytes. True if the request has to give back everything
// and wait. False if the entry has to fail; the reason was reported.
bool kvq__admission_ask(struct kvq__queue *queue, uint32_t entry,
                        const struct kvq__shortage *refused, uint64_t least);
// Entry i got its blocks: there are so many bytes less that could be had.
void kvq__admission_took(struct kvq__queue *queue, uint32_t entry, uint64_t bytes);
// The request waits, and has given back so many bytes more that a session had there.
void kvq__admission_gave_back(struct kvq__queue *queue, const struct kvq__session *session,
                              uint64_t bytes);
// The same for a session of the request that needs `missing` bytes more in the pool of `refused`,
// and has `whole` bytes there then.
bool kvq__admission_wait(struct kvq__queue *queue, const struct kvq__session *own,
                         const struct kvq__shortage *refused, uint64_t missing, uint64_t whole);
// Reports a refusal. in_the_way NULL: so much could never fit.
void kvq__admission_refuse(struct kvq__core *core, const struct kvq__shortage *shortage,
                           uint64_t missing, const struct kvq__in_the_way *in_the_way);
// Whether it is the turn of a request that waits for room; then it waits no more.
bool kvq__admission_turn(struct kvq__queue *queue);
void kvq__admission_leave(struct kvq__queue *queue); // it has ended
// Bytes of a session's blocks if it had so many tokens.
uint64_t kvq__session_bytes_at(const struct kvq__session *session, const struct kvq__pool *pool,
                               uint64_t tokens);

// Whether `look_at`, when a session becomes old enough, is too late for a request that waits
// `since`.
bool kvq__admission_too_late(uint64_t since, uint64_t look_at);
// A sentence for people about the sessions that could not make room.
void kvq__in_the_way_text(const struct kvq__core *core, const struct kvq__in_the_way *in_the_way,
                          char *text, size_t room);

#endif
