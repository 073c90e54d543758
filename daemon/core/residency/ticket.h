// SPDX-License-Identifier: Apache-2.0
//
// What is on its way: a session that moves to another place, is parked on disk, or comes back from
// there. Each has a ticket: a number to ask about it by, a phase, and what became of it.
//
//   move    QUEUED > WAITING > RESERVING > COPYING > RELEASING > OVER
//                       |          |          |          |
//                       > OVER     +----------+> DRAINING+        failed, and copies are under way
//   park    QUEUED > WRITING > LEAVING > RELEASING > OVER         and OVER from each of them
//   fetch   QUEUED > READING > OVER
//
// A ticket that is over is kept for a minute, if there is room, so that it can be asked about. A
// move, or a park, begins with its ticket, and is freed with it.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_TICKET_H
#define KVQ_DAEMON_CORE_RESIDENCY_TICKET_H

#include "daemon/core/state.h"

enum kvq__phase {
    KVQ__QUEUED,    // another move copies, or no store job has begun with it
    KVQ__WAITING,   // for the session's step and requests to end
    KVQ__RESERVING, // takes blocks at the other place
    KVQ__COPYING,   // fills them
    KVQ__DRAINING,  // the move has failed; copies are under way
    KVQ__WRITING,   // a store job writes what is not saved; the session is used as ever
    KVQ__LEAVING,   // all is stored; what only packs the session has to end
    KVQ__READING,   // store jobs read the session's shards
    KVQ__RELEASING, // gives blocks back, some at a time
    KVQ__OVER,
    KVQ__PHASES,
};

struct kvq__ticket {
    TAILQ_ENTRY(kvq__ticket) link;
    struct kvq__core *core;
    struct kvq__namespace *ns;
    uint64_t id; // 0: the ticket has not begun
    enum kvq__ticket_kind kind;
    enum kvq__phase phase; // kvq__ticket_enter alone changes it
    size_t size;           // of the struct that begins with the ticket
    const char *place;     // where the session goes
    bool finished; // what was asked for is done, or has failed; blocks may still be given back
    uint64_t finished_at;
    int status;
    uint64_t bytes, moved_bytes, shared_bytes;
    char name[KVQ_NAME_BYTES], text[KVQ_TEXT_BYTES];
};

enum {
    KVQ__MOVE_TICKETS = 1 << KVQ__TICKET_MOVE,
    KVQ__PARK_TICKETS = 1 << KVQ__TICKET_PARK | 1 << KVQ__TICKET_FETCH, // as struct kvq__park
};

// Takes a ticket to another phase; asserts that there is that way.
void kvq__ticket_enter(struct kvq__ticket *ticket, enum kvq__phase to);
// Makes room for a new ticket: forgets the kind's oldest that is over if there are too many.
// KVQ_E_LIMIT with a text if none is over. `evicts`: some tickets are kept for evictions, which
// requests wait for.
int kvq__ticket_room(struct kvq__core *core, enum kvq__ticket_kind kind, bool evicts, char *text);
// Begins a ticket, with a number. Its core, namespace, kind, size, place and name are set.
void kvq__ticket_begin(struct kvq__ticket *ticket);
void kvq__ticket_finish(struct kvq__ticket *ticket, int status);
void kvq__ticket_fill_info(const struct kvq__ticket *ticket, struct kvq__move_info *info);
// The first ticket of one of these kinds (bits 1 << enum kvq__ticket_kind) behind another one, or,
// with NULL, of all. NULL = there is none.
struct kvq__ticket *kvq__ticket_after(const struct kvq__core *core,
                                      const struct kvq__ticket *ticket, uint32_t kinds);
// The ticket of that number; NULL = none.
const struct kvq__ticket *kvq__ticket_find(const struct kvq__core *core, uint64_t id);
void kvq__tickets_tick(struct kvq__core *core); // forgets tickets long over
void kvq__ticket_free(struct kvq__ticket *ticket);

#endif
