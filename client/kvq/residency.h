/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/residency.h: where a session's bytes are: moving it between the host and GPUs, parking it on
 * disk and fetching it, saving and restoring it. For engines that steer this themselves; the daemon
 * makes room by itself.
 */
#ifndef KVQ_PUBLIC_RESIDENCY_H
#define KVQ_PUBLIC_RESIDENCY_H

#include "session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Moves the session (of several shards this one) to another place while it is open, and returns
 * when it is there: the same bytes, so that moving back gives the same bits. It begins when the
 * session's step and the requests on it have ended, for which it waits 10 s (then KVQ_E_BUSY);
 * from then on requests of all clients wait for it, and go on at the new place. There tensors must
 * lie where that place can reach them, and calls .._on_stream need a stream of its GPU. Blocks that
 * forks or a kept prefix share are copied, and stay where they were as well. Nothing has changed if
 * it fails: KVQ_E_INVALID (no such place), KVQ_E_NO_MEMORY and KVQ_E_QUOTA (no room there),
 * KVQ_E_BUSY (it is being moved, or read by a client in its own context), KVQ_E_READ_ONLY,
 * KVQ_E_STALE, KVQ_E_CANCELLED (it was dropped meanwhile). */
KVQ_API KVQ_CHECK int kvq_session_move(kvq_client *client, kvq_session session, const char *place);

/* Parks the session with all its shards: what is not saved of it is written to the daemon's
 * storage_dir, then its memory is freed, and the call returns. Handles, also those of others, stay
 * valid and say the same: whoever uses it next, or opens it, brings it back and only waits for
 * that. It need not have a name; what is stored of it then goes with it. KVQ_E_BUSY (it is in a
 * step or in use, pinned, read by a client in its own context, or was used meanwhile: it stays in
 * memory), KVQ_E_UNSUPPORTED (the daemon has no storage_dir), KVQ_E_INCOMPLETE (not all shards are
 * open), KVQ_E_NO_SPACE, KVQ_E_READ_ONLY, KVQ_E_STALE, KVQ_E_CANCELLED (it was dropped meanwhile).
 * Requests that bring it back may fail with KVQ_E_NO_MEMORY or KVQ_E_QUOTA: it then stays on disk,
 * and comes back once there is room. KVQ_E_DAMAGED, as of any handle of a session that was
 * restored: close it, and open the session again; one without a name is lost. */
KVQ_API KVQ_CHECK int kvq_session_park(kvq_client *client, kvq_session session);

/* Begins to bring a parked session back, and returns at once: by the time of the next step it may
 * be there. KVQ_E_BUSY (it is just being parked, or on its way already), KVQ_E_STALE. */
KVQ_API KVQ_CHECK int kvq_session_prefetch(kvq_client *client, kvq_session session);

/* With `pin`, the session stays in memory: it is never parked, and comes back if it is. Else it may
 * be. Of all shards. KVQ_E_READ_ONLY, KVQ_E_STALE. */
KVQ_API KVQ_CHECK int kvq_session_pin(kvq_client *client, kvq_session session, int pin);

/* Saves the session with all its shards, at what is committed, to the daemon's storage_dir, and
 * returns when that is durable: it then survives a kill -9 of the daemon and a loss of power. Only
 * blocks that are new since the last save are written; nothing if nothing has changed. Other
 * threads may go on with it meanwhile, in the middle of a step as well. Waits for as long as it
 * takes. KVQ_E_UNSUPPORTED (the daemon has no storage_dir), KVQ_E_INVALID (it has no name),
 * KVQ_E_INCOMPLETE (not all shards are open), KVQ_E_NO_SPACE, KVQ_E_BUSY (it was changed for 10 s
 * without a break), KVQ_E_STALE, KVQ_E_SYSTEM. */
KVQ_API KVQ_CHECK int kvq_session_save(kvq_client *client, kvq_session session);

/* Reads a saved session (of several shards that one) into the daemon's memory, and returns when all
 * of it is there, or was already. Not needed: opening a saved session restores it, and waits for
 * nothing; requests wait for the layers that they need. ns NULL: the user's own. shards: how many
 * it is to have, by KV heads (shards.h); 0: as it was saved. KVQ_E_NO_SESSION,
 * KVQ_E_EXISTS (not with so many shards), KVQ_E_DAMAGED, KVQ_E_NO_MEMORY, KVQ_E_QUOTA,
 * KVQ_E_UNSUPPORTED, KVQ_E_FORMAT, KVQ_E_VERSION (of another version), KVQ_E_PERMISSION. */
KVQ_API KVQ_CHECK int kvq_session_restore(kvq_client *client, const char *ns, const char *name,
                                          uint32_t shard, uint32_t shards);

#ifdef __cplusplus
}
#endif

#endif
