// SPDX-License-Identifier: Apache-2.0
//
// Saving and restoring sessions. A connection's commands are carried out one after the other, and
// these take as long as gigabytes take on their way to a disk. So each has a connection of its own,
// while the client's goes on with other calls: an engine that decodes in its own context needs it
// whenever a session gets new memory.
#include "client/internal.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

enum { DISK_MS = 3600000 };

// The generated structures do not know const, but nothing writes through them.
static char *text_of(const char *text)
{
    return (char *)(uintptr_t)text;
}

// What is left of the hour, for a call.
static uint32_t left_ms(uint64_t deadline_ns)
{
    uint64_t now = kvq_now_ns();
    assert(deadline_ns <= now + (uint64_t)DISK_MS * 1000000u);
    return deadline_ns > now ? (uint32_t)((deadline_ns - now + 999999) / 1000000u) : 1;
}

static uint64_t disk_deadline(void)
{
    return kvq_now_ns() + (uint64_t)DISK_MS * 1000000u;
}

// A connection to the run of the daemon that the client is connected to. NULL: none is to be had,
// for whatever reason: the socket's path need not lead there any more.
static kvq_client *connect_again(const kvq_client *client, const char *what)
{
    kvq_client *again = NULL;
    char name[KVQ_NAME_BYTES];
    int n = snprintf(name, sizeof name, "%s (%s)", client->name, what);
    const struct kvq_connect_options o = {.size = sizeof o,
                                          .timeout_ms = client->timeout_ms,
                                          .runtime_dir = client->runtime_dir,
                                          .name = n < (int)sizeof name ? name : client->name};
    int rc = kvq_connect(&o, &again);
    if (rc == KVQ_OK && again->info.epoch != client->info.epoch)
        kvq_disconnect(&again);
    return again;
}

// Whether the daemon hears the client. A cancel that names no request does nothing, but is answered
// in its turn; the daemon may be too busy to do so in time.
static bool is_heard(kvq_client *client)
{
    Kvq__Cancel message = KVQ__CANCEL__INIT;
    struct kvq__call call = {
        .request = KVQ__REQUEST__INIT, .send_fd = -1, .what = "asking for the daemon"};
    call.request.command_case = KVQ__REQUEST__COMMAND_CANCEL;
    call.request.cancel = &message;
    return kvq__ask(client, &call) != KVQ_E_DISCONNECTED;
}

static int ask_disk(kvq_client *client, struct kvq__call *call, uint64_t deadline_ns)
{
    char text[KVQ__TEXT_BYTES];
    kvq_client *again = connect_again(client, call->what);
    call->send_fd = -1;
    call->patience_ms = left_ms(deadline_ns);
    if (!again)
        return kvq__ask(client, call);
    int rc = kvq__ask(again, call);
    snprintf(text, sizeof text, "%s", kvq_error_text());
    kvq_disconnect(&again);
    if (rc == KVQ_E_DISCONNECTED && is_heard(client))
        return kvq__set_error(KVQ_E_CANCELLED,
                              "%s: the connection that it had of its own was closed, and whether "
                              "it was done is not known; the client's is not affected, and the "
                              "call may be made again",
                              call->what);
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
    uint64_t deadline = disk_deadline();
    // Another connection has other handles, so it is asked by name.
    int rc = kvq__session_ask(client, session, &info, left_ms(deadline));
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
    return ask_disk(client, &call, deadline);
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
    return ask_disk(client, &call, disk_deadline());
}
