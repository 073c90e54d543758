// SPDX-License-Identifier: Apache-2.0
//
// Every status code of kvq, once: name, value, text. 0 is success, failures are negative.
// Values are part of the protocol: never change or reuse one; append at the end.
#ifndef KVQ_PROTO_STATUS_H
#define KVQ_PROTO_STATUS_H

// X(name, value, text)
#define KVQ_STATUS_LIST(X)                                                                         \
    X(OK, 0, "success")                                                                            \
    X(E_INVALID, -1, "an argument is not valid")                                                   \
    X(E_VERSION, -2, "client and daemon speak no common protocol version")                         \
    X(E_NO_DAEMON, -3, "no daemon listens there; start kvqd or name its runtime directory")        \
    X(E_PERMISSION, -4, "this user may not use that namespace or command")                         \
    X(E_NO_SESSION, -5, "no such session")                                                         \
    X(E_STALE, -6, "the handle is stale: its session was closed, dropped or lost")                 \
    X(E_BUSY, -7, "the session has a writer or an open step already")                              \
    X(E_EXISTS, -8, "a session of that name exists with another shape or format")                  \
    X(E_SHAPE, -9, "shape, layer or head count does not match the session's")                      \
    X(E_DTYPE, -10, "data type not supported here")                                                \
    X(E_FORMAT, -11, "unknown format, or one that cannot hold this shape")                         \
    X(E_POSITION, -12, "position is not the session's token count; nothing was appended")          \
    X(E_BOUNDS, -13, "a view reaches outside its buffer")                                          \
    X(E_LIMIT, -14, "more than a limit of the daemon or its configuration")                        \
    X(E_NO_MEMORY, -15, "the cache memory is full")                                                \
    X(E_QUOTA, -16, "the namespace's quota is used up; kvqctl quota get says which limit")         \
    X(E_NONFINITE, -17, "K or V holds NaN or infinity; nothing was appended")                      \
    X(E_NO_STEP, -18, "no such open step, or the session is not in it")                            \
    X(E_INCOMPLETE, -19, "the step lacks K and V of some layer; nothing was committed")            \
    X(E_ROLLBACK, -20, "cannot go back that far; the length kept is given")                        \
    X(E_READ_ONLY, -21, "the session was opened read-only")                                        \
    X(E_DEADLINE, -22, "the deadline passed before it was done")                                   \
    X(E_CANCELLED, -23, "cancelled: client, session or step went away")                            \
    X(E_DISCONNECTED, -24, "the daemon is gone; reattach and see what was lost")                   \
    X(E_EPOCH, -25, "the daemon was restarted; its sessions in memory are lost")                   \
    X(E_PROTOCOL, -26, "malformed request; the connection is closed")                              \
    X(E_CREDITS, -27, "too many requests in flight")                                               \
    X(E_DRAINING, -28, "the daemon is shutting down and takes nothing new")                        \
    X(E_BUFFER, -29, "no such buffer, or its memory cannot be used (seals, size)")                 \
    X(E_SYSTEM, -30, "a system call failed; the text says which")                                  \
    X(E_UNSUPPORTED, -31, "not supported by this build, configuration or backend")                 \
    X(E_TAKEN, -32, "another writer took the session over")                                        \
    X(E_INTERNAL, -33, "internal error: please report it with the daemon's log")                   \
    X(E_NO_CLIENT, -34, "no such client is attached")                                              \
    X(E_NO_SPACE, -35, "the disk, or the cap of the store on it, is full")                         \
    X(E_DAMAGED, -36, "what was stored is damaged; the damaged part is never given out")           \
    X(E_REMOTE, -37, "the remote store was not reached, or failed; the text says why")             \
    X(E_NO_NAMESPACE, -38, "no such namespace; the configuration has no section of that name")

// kvq/error.h, an installed header, has the same list. A file that includes both includes
// kvq/error.h first; then the compiler checks that the lists agree.
#ifdef KVQ_PUBLIC_ERROR_H
#define X(name, value, text) _Static_assert((int)KVQ_##name == (value), "kvq/error.h: KVQ_" #name);
KVQ_STATUS_LIST(X)
#undef X
#else
enum kvq_status {
#define X(name, value, text) KVQ_##name = (value),
    KVQ_STATUS_LIST(X)
#undef X
};
#endif

// The text of a code; never NULL ("unknown status" for others). Thread-safe.
const char *kvq_status_text(int code);
// Its name without prefix, as "E_POSITION"; never NULL.
const char *kvq_status_name(int code);

#endif
