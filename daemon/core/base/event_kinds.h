// SPDX-License-Identifier: Apache-2.0
//
// What the daemon tells as it happens, in the log and for those who ask. A row is all that a
// kind of event needs.
#ifndef KVQ_DAEMON_CORE_BASE_EVENT_KINDS_H
#define KVQ_DAEMON_CORE_BASE_EVENT_KINDS_H

#include <stdint.h>

// X(KIND, name, level of its log line, what has happened)
#define KVQ__EVENT_TABLE(X)                                                                        \
    X(SESSION_OPENED, session_opened, INFO, "a session was made")                                  \
    X(SESSION_CLOSED, session_closed, INFO,                                                        \
      "a client has closed a session, or has gone with it open")                                   \
    X(SESSION_DROPPED, session_dropped, INFO, "a session was ended; the text says why")            \
    X(SESSION_MOVED, session_moved, INFO, "a session went to another place, or why it could not")  \
    X(SESSION_PARKED, session_parked, INFO, "a session's memory is free, all of it is on disk")    \
    X(SESSION_FETCHED, session_fetched, INFO, "a parked session is back, or why not")              \
    X(SESSION_SAVED, session_saved, INFO, "a session was saved")                                   \
    X(SESSION_RESTORED, session_restored, INFO, "a saved session is in memory again")              \
    X(SESSION_PUSHED, session_pushed, INFO, "a session is on the remote store")                    \
    X(SESSION_PULLED, session_pulled, INFO, "a session came from the remote store")                \
    X(PREFIX_RESTORED, prefix_restored, INFO, "a prefix was read, for a session that begins so")   \
    X(PREFIX_EVICTED, prefix_evicted, INFO,                                                        \
      "prefixes made room; once a second for each namespace")                                      \
    X(CLIENT_ATTACHED, client_attached, INFO, "a client has attached")                             \
    X(CLIENT_GONE, client_gone, INFO, "a client has detached, or its process has ended")           \
    X(CLIENT_STALLED, client_stalled, WARN, "a GPU waits for the client's stream")                 \
    X(MEMORY_FULL, memory_full, WARN, "a pool is full; once a second for each namespace")          \
    X(QUOTA_REACHED, quota_reached, WARN, "a namespace is at a limit; once a second for each")     \
    X(GPU_REFUSED, gpu_refused, WARN, "a kernel failed, and requests with it; once a second")      \
    X(REQUEST_REFUSED, request_refused, DEBUG,                                                     \
      "a client's requests were refused; once a second for each, in the log alone, at debug")      \
    X(STORAGE_FULL, storage_full, WARN, "the disk is full, or the store is at its cap")            \
    X(STORAGE_FAILED, storage_failed, WARN, "a save failed that nobody waits for")                 \
    X(STORAGE_DAMAGED, storage_damaged, WARN, "what was stored of a session is damaged")           \
    X(NOT_RESTORED, not_restored, WARN, "there was no memory to read a stored session")            \
    X(NOT_PARKED, not_parked, WARN,                                                                \
      "a session could not go to disk, and stays in memory; once a second for each namespace")     \
    X(REMOTE_FAILED, remote_failed, WARN, "a push or a pull failed")                               \
    X(DRAINING, draining, INFO, "the daemon is shutting down")

enum kvq__event_kind {
#define KVQ__EVENT_KIND(KIND, name, level, what) KVQ__EVENT_##KIND,
    KVQ__EVENT_TABLE(KVQ__EVENT_KIND) KVQ__EVENTS
#undef KVQ__EVENT_KIND
};

// Pointers are valid during the call only; never NULL, but maybe empty.
struct kvq__event {
    enum kvq__event_kind kind;
    const char *ns, *session;
    uint64_t client;
    const char *text;
};

#endif
