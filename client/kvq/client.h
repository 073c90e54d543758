/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvq/client.h: a connection to kvqd. For everybody.
 *
 * Any number of threads may use a kvq_client: calls on a client take turns, and are not for the
 * path of a step.
 *
 * Control calls are those on clients, queues, buffers and sessions. A control call that ends with
 * KVQ_E_DEADLINE holds nothing: the daemon takes back whatever it makes for the call later. Only a
 * named session that the call created stays, as after kvq_session_close. What the call does to a
 * session (move, park, save, drop, pin) may still be done.
 */
#ifndef KVQ_PUBLIC_CLIENT_H
#define KVQ_PUBLIC_CLIENT_H

#include "error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvq_client kvq_client;

struct kvq_connect_options {
    uint32_t size; /* sizeof(struct kvq_connect_options) */
    /* For connecting, and for each control call, calls of other threads that it waits for included;
     * 0: 5000. kvq_buffer_close, kvq_session_save and kvq_session_restore take longer;
     * kvq_queue_close, kvq_local_close, kvq_local_remove and a kvq_local_add that fails wait for
     * calls of other threads as long as these last, and for the daemon no longer than this. */
    uint32_t timeout_ms;
    uint32_t spin_us; /* longest time that a wait spins before it sleeps; 0: adaptive */
    /* NULL: $KVQ_RUNTIME_DIR; else the first of $XDG_RUNTIME_DIR/kvqd and /run/kvqd that has a
     * daemon's socket; else the first of them whose variable is set */
    const char *runtime_dir;
    const char *name; /* shown to operators, e.g. "myengine 1.2"; NULL: the program's name */
};

/* Connects to the daemon. options may be NULL. Release the client with kvq_disconnect.
 * KVQ_E_NO_DAEMON, KVQ_E_PERMISSION, KVQ_E_VERSION, KVQ_E_DRAINING, KVQ_E_LIMIT (the daemon has as
 * many clients as it may have), KVQ_E_INVALID (an option, such as a size of 0). */
KVQ_API KVQ_CHECK int kvq_connect(const struct kvq_connect_options *options, kvq_client **client);

/* Closes the client's queues, buffers, contexts (kvq_local) and session handles (on_detach decides
 * what becomes of each session) and frees the client. Their pointers are then invalid, and are not
 * to be closed again. Buckets (in_context.h) are closed before. Accepts NULL and pointers to NULL.
 * No other thread may be in a call on the client. */
KVQ_API void kvq_disconnect(kvq_client **client);

/* The daemon that answered kvq_connect or kvq_reattach. Thread-safe; sends no request. */
struct kvq_daemon_info {
    uint32_t size; /* sizeof(struct kvq_daemon_info): set before the call */
    uint32_t protocol;
    char version[32];
    char backend[32]; /* "cpu" or "gpu" */
    char isa[32];     /* of its CPU kernels: "amx", "avx512", "avx2", "c" */
    uint64_t epoch;   /* changes with every start of the daemon */
    uint64_t client_id;
};
KVQ_API int kvq_daemon_info(kvq_client *client, struct kvq_daemon_info *info);

/* After KVQ_E_DISCONNECTED: connects again, opens the client's queues and registers its buffers
 * anew (same kvq_queue, same kvq_buffer, same memory). Returns KVQ_OK if the same run of the daemon
 * answered, and KVQ_E_EPOCH if the daemon was restarted; in both cases the client works again, and
 * all session handles are stale. Open named sessions again by name; a session that the daemon still
 * has stands at its last commit. *lost (may be NULL) gets the number of session handles that this
 * client held. Open tickets and steps end with KVQ_E_CANCELLED. If kvq_reattach fails with another
 * code (no daemon yet, ...), the client is as disconnected as before, and the engine may call
 * kvq_reattach again. No other thread may be in a call. */
KVQ_API KVQ_CHECK int kvq_reattach(kvq_client *client, uint32_t *lost);

#ifdef __cplusplus
}
#endif

#endif
