// SPDX-License-Identifier: Apache-2.0
//
// Requests that were refused memory wait until there is room, or are refused (evict.h says how).
#ifndef KVQ_DAEMON_CORE_REQUEST_ADMISSION_H
#define KVQ_DAEMON_CORE_REQUEST_ADMISSION_H

#include "daemon/core/state.h"

// Takes the pages that the appended tokens of all entries need. False if the request is to wait for
// room; then nothing was taken. Entries that are refused have failed.
bool kvq__admission_take(struct kvq__queue *queue);
// The entry came to nothing: gives back what kvq__admission_take took for its session.
void kvq__admission_untake(struct kvq__queue *queue, uint32_t entry);
// Entry i was refused memory, and nothing that it took is held any more; core->shortage, which was
// cleared before it was tried, says whether that was a block. True if the request is to give back
// all that it took and wait. Else the reason was told, and the entry is to fail.
bool kvq__admission_ask(struct kvq__queue *queue, uint32_t entry);
// The same for a session of the request that needs `missing` bytes more, and has `whole` then, in
// the place that core->shortage says.
bool kvq__admission_wait(struct kvq__queue *queue, const struct kvq__session *own, uint64_t missing,
                         uint64_t whole);
// Tells that somebody is refused; in_the_way NULL: it could never fit.
void kvq__admission_refuse(struct kvq__core *core, const struct kvq__shortage *shortage,
                           uint64_t missing, const struct kvq__in_the_way *in_the_way);
// Whether a request that has been waiting is to be looked at again, and then takes it off the list.
bool kvq__admission_turn(struct kvq__queue *queue);
void kvq__admission_leave(struct kvq__queue *queue); // it has ended
// Bytes of a session's blocks if it had so many tokens.
uint64_t kvq__session_bytes_at(const struct kvq__session *session, uint64_t tokens);

// Whether who has waited since then is not to wait for a session that is old enough only then.
bool kvq__admission_too_late(uint64_t since, uint64_t look_at);
// What is in the way, for people.
void kvq__in_the_way_text(const struct kvq__core *core, const struct kvq__in_the_way *in_the_way,
                          char *text, size_t room);

#endif
