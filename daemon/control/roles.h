// SPDX-License-Identifier: Apache-2.0
//
// Who asks by the control socket, and which role a command needs. Everybody may do what he asks for
// with what is his own; whoever has the role, also with what is another's. Thread-safe: functions
// touch only their arguments.
#ifndef KVQ_DAEMON_CONTROL_ROLES_H
#define KVQ_DAEMON_CONTROL_ROLES_H

#include <stddef.h>

#include "daemon/config/config.h"
#include "daemon/core/core.h"
#include "proto/wire.h"

enum { KVQ__ADDRESS_BYTES = 64 };

// A connection's other end.
struct kvq__asker {
    struct kvq__peer peer; // admin: for the request under way, whether the role does for it
    enum kvq__role role;   // when it asked
    // Of somebody from another machine, who is no user here (KVQ__NO_UID); else empty.
    char address[KVQ__ADDRESS_BYTES];
    char key[KVQ_NAME_BYTES]; // what the configuration calls its key now; empty: it has none
};

// The least role whose holder may do this with what is another's. READ: it changes nothing. A
// command that roles.c does not name is for administrators.
enum kvq__role kvq__role_needed(const Kvq__Request *request);

// Whether it only asks, and changes nothing, whatever role it takes.
bool kvq__role_only_asks(const Kvq__Request *request);

// "uid=1000 pid=7" or "key=alice address=10.0.0.7:40100", for a line of the log.
const char *kvq__asker_text(const struct kvq__asker *asker, char *out, size_t size);

// Whether the asker may do it with anything at all: a user may with his own. KVQ_E_PERMISSION with
// a text.
int kvq__role_check(const struct kvq__asker *asker, const Kvq__Request *request, char *text);
// Why the role of a user does not do: who asks, which role it takes, who gives it. KVQ_TEXT_BYTES.
void kvq__role_text(const struct kvq__asker *asker, const Kvq__Request *request, char *text);
// After a refusal: says this in its place, where it is the role that does not do.
void kvq__role_explain(const struct kvq__asker *asker, const Kvq__Request *request,
                       struct kvq_arena *arena, Kvq__Reply *reply);

#endif
