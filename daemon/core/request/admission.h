// SPDX-License-Identifier: Apache-2.0
//
// Requests that were refused memory wait until there is room, or are refused (evict.h says how).
#ifndef KVQ_DAEMON_CORE_REQUEST_ADMISSION_H
#define KVQ_DAEMON_CORE_REQUEST_ADMISSION_H

#include "daemon/core/state.h"

// The request is tried: this attempt asks again for what was in vain before.
void kvq__admission_begin(struct kvq__queue *queue);
// As kvq__admission_begin, for a FORK that goes on in another turn; and a turn of it is over.
void kvq__admission_go_on(struct kvq__queue *queue);
void kvq__admission_pause(struct kvq__queue *queue);
// Takes the pages that the appended tokens of all entries need. False if the request has to wait
// for room; then no page was taken. An entry that is refused fails.
bool kvq__admission_take(struct kvq__queue *queue);
// The entry has failed: gives back the pages that kvq__admission_take took for its session.
void kvq__admission_untake(struct kvq__queue *queue, uint32_t entry);
// The entry was refused the block `refused` (code 0: what was refused is not a block) and has given
// back what it took; it lacks `least` bytes at least, the block included. True if the request has
// to give back everything and wait. False if the entry has to fail; the reason was reported.
bool kvq__admission_ask(struct kvq__queue *queue, uint32_t entry,
                        const struct kvq__shortage *refused, uint64_t least);
// The entry got its blocks: so many bytes less can be had for others.
void kvq__admission_took(struct kvq__queue *queue, uint32_t entry, uint64_t bytes);
// The request waits, and has given back another `bytes` of the session's memory.
void kvq__admission_gave_back(struct kvq__queue *queue, const struct kvq__session *session,
                              uint64_t bytes);
// As kvq__admission_ask, for a session of the request that lacks `missing` bytes in the pool of
// `refused`, and will have `whole` bytes there.
bool kvq__admission_wait(struct kvq__queue *queue, const struct kvq__session *own,
                         const struct kvq__shortage *refused, uint64_t missing, uint64_t whole);
// Reports a refusal. in_the_way NULL: so much could never fit.
void kvq__admission_refuse(struct kvq__core *core, const struct kvq__shortage *shortage,
                           uint64_t missing, const struct kvq__in_the_way *in_the_way);
// True if the request's turn for room has come; then the request waits no more.
bool kvq__admission_turn(struct kvq__queue *queue);
void kvq__admission_leave(struct kvq__queue *queue); // the request has ended
// Bytes of a session's blocks if it had so many tokens.
uint64_t kvq__session_bytes_at(const struct kvq__session *session, const struct kvq__pool *pool,
                               uint64_t tokens);

// Whether `look_at`, when a session becomes old enough, is too late for a request that has waited
// since `since`.
bool kvq__admission_too_late(uint64_t since, uint64_t look_at);
// A sentence for people about the sessions that could not make room.
void kvq__in_the_way_text(const struct kvq__core *core, const struct kvq__in_the_way *in_the_way,
                          char *text, size_t room);

#endif
