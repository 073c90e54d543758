/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/residency.h: where a session's bytes are: calls that move a session between the host and
 * GPUs, park it on disk and fetch it, save and restore it. For engines that decide this themselves;
 * the daemon evicts idle sessions without them.
 */
#ifndef KVQ_PUBLIC_RESIDENCY_H
#define KVQ_PUBLIC_RESIDENCY_H

#include "session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Moves an open session (of a sharded one, this shard) to another place, and returns when the move
 * is done. The bytes stay the same: a move back gives the same bits. The move begins when the
 * session's step and its requests have ended, for which the daemon waits 10 s (then KVQ_E_BUSY).
 * During the move, requests of all clients on the session wait; they go on at the new place. There
 * tensors must lie in memory that the place can access, and calls .._on_stream need a stream of its
 * GPU. Blocks that forks or a cached prefix share are copied, and stay at the old place as well.
 * After KVQ_E_DEADLINE and KVQ_E_DISCONNECTED the move may still go on: kvq_session_info says where
 * the session is. If the call fails otherwise, nothing has changed: KVQ_E_INVALID (no such place),
 * KVQ_E_NO_MEMORY and KVQ_E_QUOTA (no room there), KVQ_E_BUSY (the session is being moved, or a
 * client reads it in its own context), KVQ_E_READ_ONLY, KVQ_E_STALE, KVQ_E_CANCELLED (a client
 * dropped the session meanwhile). */
KVQ_API KVQ_CHECK int kvq_session_move(kvq_client *client, kvq_session session, const char *place);

/* Parks the session with all its shards: the daemon writes the unsaved part to its storage_dir and
 * frees the session's memory; then the call returns. All handles stay valid, those of other clients
 * as well, and read the same tokens: the next request or open loads the session, and waits for the
 * load. The session needs no name; the daemon deletes the stored bytes of an unnamed session with
 * the session. KVQ_E_BUSY (the session stays in memory: it is in a step, in use or pinned, a client
 * reads it in its own context, or a client used it meanwhile), KVQ_E_UNSUPPORTED (the daemon has no
 * storage_dir), KVQ_E_INCOMPLETE (not all shards are open), KVQ_E_NO_SPACE, KVQ_E_READ_ONLY,
 * KVQ_E_STALE, KVQ_E_CANCELLED (a client dropped the session meanwhile).
 * A request that loads a parked session may fail with KVQ_E_NO_MEMORY or KVQ_E_QUOTA: the session
 * then stays on disk, and a later request loads it once there is room. KVQ_E_DAMAGED, as for any
 * restored session: close the handle and open the session again; an unnamed session is lost. */
KVQ_API KVQ_CHECK int kvq_session_park(kvq_client *client, kvq_session session);

/* Starts to load a parked session, and returns at once, so that the next step need not wait.
 * KVQ_E_BUSY (the daemon is just parking the session, or loads it already), KVQ_E_STALE. */
KVQ_API KVQ_CHECK int kvq_session_prefetch(kvq_client *client, kvq_session session);

/* pin not 0: keeps the session with all its shards in memory: the daemon never parks it, and loads
 * it if it is parked. pin 0: the daemon may park it again. KVQ_E_READ_ONLY, KVQ_E_STALE. */
KVQ_API KVQ_CHECK int kvq_session_pin(kvq_client *client, kvq_session session, int pin);

/* Saves the committed tokens of the session with all its shards to the daemon's storage_dir, and
 * returns when the save is durable: it then survives a kill -9 of the daemon and a loss of power.
 * The daemon writes only blocks that are new since the last save. Meanwhile other threads may work
 * with the session, in the middle of a step as well, and make control calls with this client: the
 * save has a connection of its own, which counts as one more client of the daemon's until the call
 * returns. (Where none is to be had the save has the client's own. Control calls of other threads
 * then wait, most of them for kvq_connect_options.timeout_ms at most.) The call waits for an hour
 * at most (KVQ_E_DEADLINE), whatever timeout_ms is.
 * KVQ_E_CANCELLED: the save's connection was closed, as by kvqctl client kick, but the client's was
 * not; whether the session was saved is not known.
 * KVQ_E_UNSUPPORTED (the daemon has no storage_dir), KVQ_E_INVALID (the session has no name),
 * KVQ_E_INCOMPLETE (not all shards are open), KVQ_E_NO_SPACE, KVQ_E_BUSY (the session changed for
 * 10 s without a pause), KVQ_E_STALE, KVQ_E_SYSTEM. */
KVQ_API KVQ_CHECK int kvq_session_save(kvq_client *client, kvq_session session);

/* Loads a saved session (of a sharded one, one shard) into the daemon's memory, and returns when
 * all of it is in memory. It has a connection of its own (KVQ_E_CANCELLED: which was closed), and
 * waits for an hour at most, as kvq_session_save does. Engines need not call this function:
 * kvq_session_open restores a saved session without waiting, and requests wait for the layers that
 * they need. ns NULL: the user's own namespace. A session that is in memory or parked is left as it
 * is (kvq_session_prefetch brings one that is parked back). shards: how many shards the session
 * gets, by KV heads (shards.h); 0: as it was saved.
 * KVQ_E_NO_SESSION, KVQ_E_EXISTS (the session has another number of shards),
 * KVQ_E_DAMAGED, KVQ_E_NO_MEMORY, KVQ_E_QUOTA, KVQ_E_UNSUPPORTED, KVQ_E_FORMAT, KVQ_E_VERSION
 * (another version of kvqd saved the session), KVQ_E_PERMISSION. */
KVQ_API KVQ_CHECK int kvq_session_restore(kvq_client *client, const char *ns, const char *name,
                                          uint32_t shard, uint32_t shards);

#ifdef __cplusplus
}
#endif

#endif
