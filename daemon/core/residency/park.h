// SPDX-License-Identifier: Apache-2.0
//
// Sessions whose blocks are on disk alone, while their handles stay valid.
//
// A parked session keeps its struct, layers, counts, ids, name and handles, and has no block. The
// store has all of it as it was at its last change. A request on the session, or an open, waits
// until the session is back; the first one asks for that (a "fetch"). Layers answer as they come,
// like those of a restored session (saved.h).
//
// The core reads and writes no files. It keeps what it wants of whoever saves sessions
// (kvq__park_next in saved.h) and is told what became of that.
//
// A session is parked with all its shards, or not at all. Parking is a ticket, asked about as moves
// are (kvq__move_info). Its phases: QUEUED (no save has begun), WRITING (the session is used as
// ever), LEAVING (all is stored; saves and packing have to end), RELEASING (the blocks go, some at
// a time). If the session is used or changed before it leaves, the ticket ends with KVQ_E_BUSY;
// only the writing is lost, and the session is saved.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_PARK_H
#define KVQ_DAEMON_CORE_RESIDENCY_PARK_H

#include "daemon/core/residency/ticket.h"

// Parks a session, or brings one back.
struct kvq__park {
    struct kvq__ticket
        ticket; // first, since they are freed as one; moved_bytes are those that are free now
    enum kvq__park_reason reason;
    uint32_t n, left;                             // left: of a fetch, members not there yet
    struct kvq__session *members[KVQ_MAX_SHARDS]; // shards that take part; NULL: no longer
    uint64_t deadline;                            // for LEAVING
    int failed;                                   // of a fetch: the status of the first failure
};

// The first ticket's park or fetch behind this one's (NULL: of all); NULL = there is none.
struct kvq__park *kvq__park_after(const struct kvq__core *core, const struct kvq__park *park);

// Whether a session, with all its shards, could be parked now: 0, or a code and a text that says
// what is in the way: KVQ_E_UNSUPPORTED (nobody saves sessions here), KVQ_E_DRAINING,
// KVQ_E_INCOMPLETE (a shard is missing), KVQ_E_BUSY (in use, pinned, away already).
int kvq__session_parkable(const struct kvq__session *session, char *text);
// Begins to park the session. `info` may be NULL. 0, also if the session is away already; else what
// kvq__session_parkable says, KVQ_E_LIMIT or KVQ_E_NO_MEMORY.
int kvq__park_start(struct kvq__session *session, enum kvq__park_reason reason,
                    struct kvq__move_info *info, char *text);
// Begins to bring the session back with all its shards. 0, also if it is here; KVQ_E_BUSY while it
// is being parked or turns back, KVQ_E_DRAINING, KVQ_E_LIMIT, KVQ_E_NO_MEMORY.
int kvq__prefetch_start(struct kvq__session *session, struct kvq__move_info *info, char *text);
// Bytes of blocks that only the session has: parking frees them. With all shards.
uint64_t kvq__park_frees(const struct kvq__session *session);

// ---- For the rest of the core ----

// Asks for those of the session's shards that are away and were not asked for.
void kvq__fetch_ask(struct kvq__session *session);
// Whether the request has to wait until the session of its entry is back; asks for that. False also
// if that was tried for the request and failed: the entry then fails with the session's
// fetch.error.
bool kvq__park_asks(struct kvq__queue *queue, uint32_t entry, struct kvq__session *session);
// The session is about to end: its tickets end, and so does a stored copy that exists only because
// the session was parked.
void kvq__park_lost(struct kvq__session *session);
// Has the copy of that name and stamp, which nobody has asked for, deleted from the store.
void kvq__park_forget(struct kvq__core *core, const struct kvq__namespace *ns, const char *name,
                      uint64_t stamp);
// Whether any of the ticket's sessions is still being read from disk.
bool kvq__park_is_loading(const struct kvq__park *park);
// Whether any of the ticket's sessions has changed since it was stored.
bool kvq__park_unsaved(const struct kvq__park *park);
void kvq__forgets_open(struct kvq__core *core);
void kvq__forgets_tick(struct kvq__core *core);
void kvq__forgets_close(struct kvq__core *core);
void kvq__park_want(struct kvq__core *core); // tells whoever saves sessions that there are orders
// The name that a session is stored under: its own, or "#ID".
void kvq__stored_name(const struct kvq__session *session, char *name);
// From here on the session is away; it still has blocks.
void kvq__park_leave(struct kvq__session *session);
// Drops what blocks and tables the session has.
void kvq__park_empty(struct kvq__session *session);
// A fetch has ended, with status 0 once all layers are there. The session is still there.
void kvq__fetch_ended(struct kvq__session *session, int status, uint64_t bytes, const char *text);
// Takes tickets further; true if there was something to do.
bool kvq__parks_poll(struct kvq__core *core);
void kvq__parks_close(struct kvq__core *core);
bool kvq__parks_busy(const struct kvq__core *core); // kvq__parks_poll should be called again soon

#endif
