// SPDX-License-Identifier: Apache-2.0
//
// Control commands against the core: sessions for attached clients, administration for both
// sockets. Knows messages and the core, no sockets and no threads.
#ifndef KVQ_DAEMON_COMMANDS_DISPATCH_H
#define KVQ_DAEMON_COMMANDS_DISPATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core/core.h"
#include "daemon/runtime/server.h"
#include "proto/wire.h"

struct kvq__prefix_ask;

struct kvq__dispatch {
    struct kvq__core *core;
    const struct kvq__identity *identity;
    const struct kvq__peer *peer;
    struct kvq__client *client;        // NULL: not attached
    const char *place;                 // for a session that is opened without a place; or NULL
    const struct kvq__prefix_ask *ask; // the answer about its prefix; or NULL
    uint64_t now_ns;
};

// Whether a command is in dispatch's table. Other commands belong to a socket's room or the store.
bool kvq__dispatch_takes(Kvq__Request__CommandCase command);

// Whether a command of dispatch's or the store's is for attached clients alone, because it gives or
// takes a handle. The control socket refuses it before anything is done for it.
bool kvq__dispatch_is_for_clients(Kvq__Request__CommandCase command);

// 0, or KVQ_E_LIMIT with a text: a name of a session or a namespace, anywhere in the request, is
// longer than such names can be. Both sockets ask this first, because later on names are copied
// into KVQ_NAME_BYTES, and one that was cut may be another's. Any thread.
int kvq__dispatch_check_names(const Kvq__Request *request, char *text);

// Runs one command on the thread that owns the core. Fills reply's status, text and result; what
// they point to is in the arena. The reply was initialized, with id and epoch.
void kvq__dispatch_run(const struct kvq__dispatch *dispatch, const Kvq__Request *request,
                       struct kvq_arena *arena, Kvq__Reply *reply);

// Asks which prefix such a session can begin with (kvq__prefix_ask).
int kvq__dispatch_ask(const struct kvq__dispatch *dispatch, const Kvq__OpenSession *open,
                      struct kvq_arena *arena, struct kvq__prefix_ask **ask, char *text);

// One namespace's limits and what it uses of them, as ListQuotas answers; with an empty name, the
// peer's own. KVQ_E_PERMISSION, KVQ_E_NO_MEMORY.
int kvq__dispatch_quota(const struct kvq__dispatch *dispatch, const char *ns,
                        struct kvq_arena *arena, Kvq__Reply *reply, char *text);

// Makes reply a refusal (or, with status 0, an empty success); the text is copied.
void kvq__reply_status(Kvq__Reply *reply, struct kvq_arena *arena, int status, const char *text);

#endif
