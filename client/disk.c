// SPDX-License-Identifier: Apache-2.0
//
// Saving and restoring sessions. A connection's commands are carried out one after the other, and
// these take as long as gigabytes take on their way to a disk. So each has a connection of its own,
// while the client's goes on with other calls: an engine that decodes in its own context needs it
// whenever a session gets new memory.
#include "client/internal.h"

#include <stdio.h>
#include <string.h>

enum { DISK_MS = 3600000 };

// The generated structures do not know const, but nothing writes through them.
static char *text_of(const char *text)
{
    return (char *)(uintptr_t)text;
}

// A connection like the client's, to the same run of the daemon.
static int connect_again(const kvq_client *client, const char *what, kvq_client **again)
{
    const struct kvq_connect_options o = {.size = sizeof o,
                                          .timeout_ms = client->timeout_ms,
                                          .runtime_dir = client->runtime_dir,
                                          .name = client->name};
    int rc = kvq_connect(&o, again);
    bool other = rc == KVQ_OK && (*again)->info.epoch != client->info.epoch;
    if (rc != KVQ_E_NO_DAEMON && !other)
        return rc;
    kvq_disconnect(again);
    return kvq__set_error(KVQ_E_DISCONNECTED,
                          "%s: the daemon that this client was connected to is gone; kvq_reattach "
                          "connects again",
                          what);
}

static int ask_disk(kvq_client *client, struct kvq__call *call)
{
    char text[KVQ__TEXT_BYTES];
    kvq_client *again = NULL;
    call->send_fd = -1;
    call->patience_ms = DISK_MS;
    int rc = connect_again(client, call->what, &again);
    if (rc == KVQ_E_LIMIT || rc == KVQ_E_DRAINING) // there is none to be had
        return kvq__ask(client, call);
    if (rc)
        return rc;
    rc = kvq__ask(again, call);
    snprintf(text, sizeof text, "%s", kvq_error_text());
    kvq_disconnect(&again);
    return rc ? kvq__set_error(rc, "%s", text) : KVQ_OK;
}

int kvq_session_save(kvq_client *client, kvq_session session)
{
    struct kvq_session_info info = {.size = sizeof info};
    Kvq__SaveSession message = KVQ__SAVE_SESSION__INIT;
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .want = KVQ__REPLY__RESULT_SAVE, .what = "saving a session"};
    if (!client)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_save: an argument is NULL");
    int rc = kvq_session_info(client, session, &info); // another connection has other handles
    if (rc)
        return rc;
    if (!*info.name)
        return kvq__set_error(KVQ_E_INVALID,
                              "saving a session: the session has no name, by which it could be "
                              "found again; only sessions with names are saved");
    ref.namespace_ = info.ns;
    ref.name = info.name;
    message.which_case = KVQ__SAVE_SESSION__WHICH_REF;
    message.ref = &ref;
    call.request.command_case = KVQ__REQUEST__COMMAND_SAVE_SESSION;
    call.request.save_session = &message;
    return ask_disk(client, &call);
}

static bool is_name(const char *name)
{
    return strlen(name) < KVQ_NAME_BYTES && kvq_text_valid(name, strlen(name));
}

int kvq_session_restore(kvq_client *client, const char *ns, const char *name, uint32_t shard,
                        uint32_t shards)
{
    Kvq__RestoreSession message = KVQ__RESTORE_SESSION__INIT;
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    struct kvq__call call = {.request = KVQ__REQUEST__INIT,
                             .want = KVQ__REPLY__RESULT__NOT_SET,
                             .what = "restoring a session"};
    if (!client || !name)
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_restore: an argument is NULL");
    if (!is_name(name) || (ns && !is_name(ns)))
        return kvq__set_error(KVQ_E_INVALID, "kvq_session_restore: a name is no short text");
    ref.name = text_of(name);
    ref.namespace_ = text_of(ns ? ns : "");
    message.ref = &ref;
    message.shard = shard;
    message.shards = shards;
    call.request.command_case = KVQ__REQUEST__COMMAND_RESTORE_SESSION;
    call.request.restore_session = &message;
    return ask_disk(client, &call);
}
