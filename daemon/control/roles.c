// SPDX-License-Identifier: Apache-2.0
//
// See roles.h.
#include "daemon/control/roles.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/log/log.h"
#include "proto/status.h"

#define NEEDS(name, role) [KVQ__REQUEST__COMMAND_##name] = KVQ__ROLE_##role

enum { ONLY_ASKS = 0x80 }; // beside a role that is not READ: it changes nothing all the same

// 0, KVQ__ROLE_NONE: not named here.
static const uint8_t needs[] = {
    NEEDS(PING, READ),
    NEEDS(STATUS, READ),
    NEEDS(DOCTOR, READ),
    NEEDS(LIST_SESSIONS, READ),
    NEEDS(LIST_CLIENTS, READ),
    NEEDS(LIST_FORMATS, READ),
    NEEDS(LIST_PREFIXES, READ),
    NEEDS(LIST_QUOTAS, READ),
    NEEDS(LIST_SAVED, READ),
    NEEDS(LIST_REMOTE, READ),
    NEEDS(REMOTE_STATUS, READ),
    NEEDS(SESSION_INFO, READ),
    NEEDS(ASK_MOVE, READ),
    NEEDS(ASK_TRANSFER, READ),
    NEEDS(GET_CONFIG, READ),
    NEEDS(LIST_EVENTS, READ),

    NEEDS(KICK_CLIENT, OPERATE),
    NEEDS(DROP_SESSION, OPERATE),
    NEEDS(DROP_PREFIXES, OPERATE),
    NEEDS(MOVE_SESSION, OPERATE),
    NEEDS(PARK_SESSION, OPERATE),
    NEEDS(PREFETCH_SESSION, OPERATE),
    NEEDS(PIN_SESSION, OPERATE),
    NEEDS(SAVE_SESSION, OPERATE),
    NEEDS(RESTORE_SESSION, OPERATE),
    NEEDS(PUSH_SESSION, OPERATE),
    NEEDS(PULL_SESSION, OPERATE), // within a namespace
    NEEDS(REMOVE_REMOTE, OPERATE),
    NEEDS(CANCEL_TRANSFER, OPERATE),
    NEEDS(STORAGE, OPERATE), // its status: READ

    // Files of the daemon's, limits, and the daemon itself.
    NEEDS(EXPORT_SESSION, ADMIN),
    NEEDS(IMPORT_SESSION, ADMIN),
    NEEDS(LOOK_AT_IMPORT, ADMIN) | ONLY_ASKS,
    NEEDS(SET_QUOTA, ADMIN),
    NEEDS(DELETE_QUOTA, ADMIN),
    NEEDS(SET_CONFIG, ADMIN),
    NEEDS(RELOAD_CONFIG, ADMIN),
    NEEDS(LOOK_AT_RELOAD, ADMIN) | ONLY_ASKS,
    NEEDS(DRAIN, ADMIN),
};

// A pull from one namespace into another gives somebody the K and V of others, as an import does.
static bool crosses_namespaces(const Kvq__PullSession *pull)
{
    return !pull->ref || !pull->into || !pull->ref->namespace_[0] ||
           strcmp(pull->ref->namespace_, pull->into->namespace_) != 0;
}

// Its row; 0: it has none.
static unsigned needs_of(const Kvq__Request *request)
{
    size_t command = (size_t)request->command_case;
    return command < sizeof needs / sizeof *needs ? needs[command] : 0;
}

enum kvq__role kvq__role_needed(const Kvq__Request *request)
{
    unsigned role = needs_of(request) & ~(unsigned)ONLY_ASKS;
    if (request->command_case == KVQ__REQUEST__COMMAND_PULL_SESSION &&
        crosses_namespaces(request->pull_session))
        return KVQ__ROLE_ADMIN;
    if (request->command_case == KVQ__REQUEST__COMMAND_STORAGE &&
        request->storage->action == KVQ__STORAGE_ACTION__STORAGE_STATUS)
        return KVQ__ROLE_READ;
    return role != KVQ__ROLE_NONE ? (enum kvq__role)role : KVQ__ROLE_ADMIN;
}

bool kvq__role_only_asks(const Kvq__Request *request)
{
    return needs_of(request) & ONLY_ASKS || kvq__role_needed(request) == KVQ__ROLE_READ;
}

const char *kvq__asker_text(const struct kvq__asker *asker, char *out, size_t size)
{
    char name[2 * KVQ_NAME_BYTES + 3];
    if (asker->address[0])
        snprintf(out, size, "key=%s address=%s",
                 kvq__log_quote(name, sizeof name, asker->key[0] ? asker->key : "?"),
                 asker->address);
    else
        snprintf(out, size, "uid=%u pid=%u", asker->peer.uid, asker->peer.pid);
    return out;
}

int kvq__role_check(const struct kvq__asker *asker, const Kvq__Request *request, char *text)
{
    enum kvq__role needed = kvq__role_needed(request);
    assert(!asker->address[0] || asker->peer.uid == KVQ__NO_UID);
    if (!asker->address[0] || asker->role >= needed)
        return 0;
    if (asker->role == KVQ__ROLE_NONE)
        snprintf(text, KVQ_TEXT_BYTES, "the configuration does not have this key any more");
    else
        snprintf(text, KVQ_TEXT_BYTES,
                 "the key \"%s\" has the role %s, and this needs the role %s; [key %s] in kvqd's "
                 "configuration says which it has",
                 asker->key, kvq__role_name(asker->role), kvq__role_name(needed), asker->key);
    return KVQ_E_PERMISSION;
}

// Whether it takes the role whatever it is about, and not only where it is about what is another's.
static bool takes_role_always(const Kvq__Request *request)
{
    switch (request->command_case) {
    case KVQ__REQUEST__COMMAND_KICK_CLIENT:
    case KVQ__REQUEST__COMMAND_GET_CONFIG:
    case KVQ__REQUEST__COMMAND_LIST_EVENTS:
        return true;
    case KVQ__REQUEST__COMMAND_STORAGE:
        return kvq__role_needed(request) != KVQ__ROLE_READ;
    case KVQ__REQUEST__COMMAND_PULL_SESSION:
        return false;
    default:
        return kvq__role_needed(request) == KVQ__ROLE_ADMIN;
    }
}

void kvq__role_text(const struct kvq__asker *asker, const Kvq__Request *request, char *text)
{
    const char *needed = kvq__role_name(kvq__role_needed(request));
    const bool none = asker->role == KVQ__ROLE_NONE;
    assert(asker->role < kvq__role_needed(request));
    snprintf(text, KVQ_TEXT_BYTES,
             "user %u has %s%s, and this%s takes the role %s, which %s_uids and %s_gids in kvqd's "
             "configuration give to users and groups",
             asker->peer.uid, none ? "no role" : "the role ",
             none ? "" : kvq__role_name(asker->role),
             takes_role_always(request) ? "" : ", with what is another's,", needed, needed, needed);
}

void kvq__role_explain(const struct kvq__asker *asker, const Kvq__Request *request,
                       struct kvq_arena *arena, Kvq__Reply *reply)
{
    char text[KVQ_TEXT_BYTES];
    // To who has no role a namespace is nobody's or another's: its refusal says which are his.
    bool is_about_role = asker->role != KVQ__ROLE_NONE || takes_role_always(request);
    if (reply->status != KVQ_E_PERMISSION || asker->role >= kvq__role_needed(request) ||
        !is_about_role)
        return;
    kvq__role_text(asker, request, text);
    char *told = kvq_arena_text(arena, text);
    reply->text = *told ? told : reply->text;
}
