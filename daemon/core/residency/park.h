// SPDX-License-Identifier: Apache-2.0
//
// Sessions whose blocks are on disk alone, while their handles stay valid.
//
// A parked session keeps its struct, layers, counts, ids, name and handles, and has no
// block. All of it stands in the store, as it was at its last change. Whoever asks something of it
// waits until it is back: the first request, or an open, asks for that (a "fetch"), and layers
// answer as they come, as those of a session that is restored (saved.h).
//
// The core reads and writes nothing. It keeps what it wants of whoever saves sessions
// (kvq__park_next in saved.h) and is told what became of it.
//
// A session is parked with all its shards, or none of it. Parking is a ticket, asked about as moves
// are (kvq__move_info). On its way it is QUEUED (nobody writes yet), WRITING (and used as ever),
// LEAVING (stored; what only packs it has to end), RELEASING (its blocks go, some at a time). If
// the session is used or changed before it leaves, the ticket ends with KVQ_E_BUSY and nothing is
// lost but the writing: it is saved.
#ifndef KVQ_DAEMON_CORE_RESIDENCY_PARK_H
#define KVQ_DAEMON_CORE_RESIDENCY_PARK_H

#include "daemon/core/residency/ticket.h"

// Parks a session, or brings one back.
struct kvq__park {
    struct kvq__ticket
        ticket; // first: it is freed with it; moved_bytes are those that are free now
    enum kvq__park_reason reason;
    uint32_t n, left;                             // of a fetch: left are not there yet
    struct kvq__session *members[KVQ_MAX_SHARDS]; // shards that take part; NULL: no longer
    uint64_t deadline;                            // for LEAVING
    int failed;                                   // of a fetch: why the first that failed did
};

// The first ticket's park or fetch behind this one's (NULL: of all); NULL = there is none.
struct kvq__park *kvq__park_after(const struct kvq__core *core, const struct kvq__park *park);

// Whether a session, with all its shards, could be parked now: 0, or a code and a text that says
// what is in the way: KVQ_E_UNSUPPORTED (nobody saves sessions here), KVQ_E_DRAINING,
// KVQ_E_INCOMPLETE (a shard is missing), KVQ_E_BUSY (in use, pinned, away already).
int kvq__session_parkable(const struct kvq__session *session, char *text);
// Begins to park it. `info` may be NULL. 0, also if it is away already; else what
// kvq__session_parkable says, KVQ_E_LIMIT or KVQ_E_NO_MEMORY.
int kvq__park_start(struct kvq__session *session, enum kvq__park_reason reason,
                    struct kvq__move_info *info, char *text);
// Begins to bring it back with all its shards. 0, also if it is here; KVQ_E_BUSY while it is being
// parked, KVQ_E_DRAINING, KVQ_E_LIMIT, KVQ_E_NO_MEMORY.
int kvq__prefetch_start(struct kvq__session *session, struct kvq__move_info *info, char *text);
// Bytes that parking it would free: of blocks that nobody else has. With all shards.
uint64_t kvq__park_frees(const struct kvq__session *session);

// ---- For the rest of the core ----

// Asks for what is away of the session and its other shards; nothing if it was asked for already.
void kvq__fetch_ask(struct kvq__session *session);
// Whether the request has to wait until the session of its entry is back. Asks for that. False also
// if that was tried for the request and failed: its entry then fails with the session's
// fetch.error.
bool kvq__park_asks(struct kvq__queue *queue, uint32_t entry, struct kvq__session *session);
// The session is about to end: its tickets do, and what was stored of it only because it was
// parked goes.
void kvq__park_lost(struct kvq__session *session);
// A form of it that nobody has asked for is to go from the store.
void kvq__park_forget(struct kvq__core *core, const struct kvq__namespace *ns, const char *name,
                      uint64_t stamp);
// Whether any of the ticket's sessions is still being read from disk.
bool kvq__park_is_loading(const struct kvq__park *park);
// Whether any of the ticket's sessions has changed since it was stored.
bool kvq__park_unsaved(const struct kvq__park *park);
void kvq__forgets_open(struct kvq__core *core);
void kvq__forgets_tick(struct kvq__core *core);
void kvq__forgets_close(struct kvq__core *core);
void kvq__park_want(struct kvq__core *core); // tells that there are orders
// The name that a session is stored under: its own, or "#ID".
void kvq__stored_name(const struct kvq__session *session, char *name);
// From here on it is away; it has blocks as yet.
void kvq__park_leave(struct kvq__session *session);
// Away with nothing of it in memory: drops what blocks and tables it has.
void kvq__park_empty(struct kvq__session *session);
// A fetch has ended, with 0 once all layers are there. The session is there.
void kvq__fetch_ended(struct kvq__session *session, int status, uint64_t bytes, const char *text);
// Takes tickets further; true if there was something to do.
bool kvq__parks_poll(struct kvq__core *core);
void kvq__parks_close(struct kvq__core *core);
bool kvq__parks_busy(const struct kvq__core *core); // kvq__parks_poll should be called again soon

#endif
