// SPDX-License-Identifier: Apache-2.0
// Asking the daemon: finds it, sends one request, waits for its reply, and says in plain words
// what to do when that fails.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/runtime_dir.h"
#include "proto/shm.h"
#include "proto/status.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/kvqctl.h"
#include "tools/kvqctl/transport.h"

const char *kvq__ctl_runtime_dir(const char *option)
{
    static char path[4096];
    kvq_runtime_dir(option, KVQ_SYSTEM_RUNTIME_DIR, path, sizeof path);
    return path;
}

const char *kvq__ctl_where(const struct kvq__ctl *ctl)
{
    return ctl->connect ? kvq__ctl_text("at %s", kvq__ctl_clean(ctl->connect))
                        : kvq__ctl_text("in %s", ctl->runtime_dir);
}

void kvq__ctl_at(const struct kvq__ctl *ctl, struct kvq__transport_at *at, char *path, size_t size)
{
    snprintf(path, size, "%s/%s", ctl->runtime_dir, KVQ_CONTROL_SOCKET);
    *at = (struct kvq__transport_at){.path = path, .far = ctl->connect};
}

static void explain_absence(const struct kvq__ctl *ctl, const char *path, int error)
{
    const char *dir = ctl->runtime_dir;
    if (error == -EACCES || error == -EPERM) {
        fprintf(stderr,
                "kvqctl: %s: this user (uid %u) may not connect.\n"
                "Ask whoever runs kvqd to add you to the group that owns the directory.\n",
                path, (unsigned)geteuid());
        return;
    }
    if (error == -ENAMETOOLONG) {
        fprintf(stderr, "kvqctl: %s: longer than a socket's path may be; use a shorter directory\n",
                path);
        return;
    }
    fprintf(stderr, "kvqctl: no daemon answers in %s: %s\n", dir,
            error == -ECONNREFUSED ? "the socket there was left behind by one that is gone"
                                   : strerror(-error));
    fprintf(stderr, "Looked for: %s\n", path);
    if (ctl->told_dir)
        fprintf(stderr, "The directory comes from %s.\n", ctl->told_dir);
    else
        fputs("Neither --runtime-dir nor $KVQ_RUNTIME_DIR names the directory, so it is that of "
              "$XDG_RUNTIME_DIR/kvqd and " KVQ_SYSTEM_RUNTIME_DIR " in which there are sockets.\n",
              stderr);
    if (access(KVQ_SYSTEM_RUNTIME_DIR, X_OK) != 0 && errno == EACCES)
        fprintf(stderr,
                "%s is there, and this user (uid %u) may not enter it: join the group that owns "
                "it, and log in again.\n",
                KVQ_SYSTEM_RUNTIME_DIR, (unsigned)geteuid());
    fprintf(stderr, "Start one:  kvqd --runtime-dir %s%s\n", dir,
            !ctl->told_dir || strcmp(dir, KVQ_SYSTEM_RUNTIME_DIR) == 0
                ? "     (or: systemctl start kvqd)"
                : "");
}

static int explain_silence(const struct kvq__ctl *ctl)
{
    fprintf(stderr,
            "kvqctl: the daemon %s did not answer within %d ms; it may be busy or stopped.\n"
            "Look at its log, or wait longer with --timeout MS.\n",
            kvq__ctl_where(ctl), ctl->timeout_ms);
    return KVQ_EXIT_TIMEOUT;
}

// Nobody knows how far the daemon came with what was asked for.
static int explain_loss(const struct kvq__ctl *ctl)
{
    if (!ctl->ends_it)
        fprintf(stderr,
                "kvqctl: the daemon %s has ended before it answered, or it has ended the "
                "connection.\nIt may have done what it was asked for: look at the result before "
                "you ask again.\n",
                kvq__ctl_where(ctl));
    return KVQ_EXIT_NO_DAEMON;
}

static int explain_far(const struct kvq__ctl *ctl, int error, const char *text)
{
    const char *at = kvq__ctl_clean(ctl->connect), *file = ctl->key_file;
    if (error == -EINVAL) {
        fprintf(stderr, "kvqctl: --connect is a host and a port, as gpu7:9648, not '%s'\n", at);
        return KVQ_EXIT_USAGE;
    }
    if (error == -EACCES) {
        fprintf(
            stderr,
            "kvqctl: the daemon at %s does not know the key in %s.\n"
            "kvqctl key show %s prints what its configuration needs, a section [key NAME]; then "
            "kvqd reads it again: kvqctl config reload.\n",
            at, file, file);
        return KVQ_EXIT_PERMISSION;
    }
    if (error == -EPROTO) {
        fprintf(stderr,
                "kvqctl: what listens at %s does not have the key that %s names as server, or has "
                "no room for another connection.\n"
                "It may be another daemon, or one with a new key: compare with kvqctl key show "
                "FILE there, FILE being its control_key_file.\n",
                at, file);
        return KVQ_EXIT_PERMISSION;
    }
    fprintf(stderr,
            "kvqctl: no daemon answers at %s: %s\n"
            "It listens there if its configuration has control_address and control_key_file.\n",
            at, error == -EHOSTUNREACH && *text ? text : strerror(-error));
    return KVQ_EXIT_NO_DAEMON;
}

int kvq__ctl_explain_connection(const struct kvq__ctl *ctl, const char *path, int error,
                                const char *text)
{
    if (error == -EUSERS)
        return kvq__ctl_refused(KVQ_E_LIMIT, text);
    if (error == -ETIMEDOUT)
        return explain_silence(ctl);
    if (ctl->connect)
        return explain_far(ctl, error, text);
    explain_absence(ctl, path, error);
    return error == -EACCES || error == -EPERM ? KVQ_EXIT_PERMISSION : KVQ_EXIT_NO_DAEMON;
}

// The key for another machine. An exit status, with the complaint printed.
static int take_key(const struct kvq__ctl *ctl, struct kvq_key_file *key)
{
    char text[KVQ_TEXT_BYTES] = "";
    if (!ctl->key_file || !*ctl->key_file) {
        fprintf(stderr, "kvqctl: --connect needs a key: --key FILE, or $KVQ_KEY (kvqctl key make "
                        "--help)\n");
        return KVQ_EXIT_USAGE;
    }
    if (kvq_key_read(ctl->key_file, key, text) != 0) {
        fprintf(stderr, "kvqctl: %s\n", kvq__ctl_clean(text));
        return KVQ_EXIT_USAGE;
    }
    if (key->has_server)
        return KVQ_EXIT_OK;
    fprintf(stderr,
            "kvqctl: %s does not say whose key the daemon's is; add a line\n"
            "  server = what kvqctl key show prints of its control_key_file\n",
            ctl->key_file);
    kvq_key_forget(key);
    return KVQ_EXIT_USAGE;
}

// Connects if this run has not yet. An exit status.
static int connect_once(struct kvq__ctl *ctl)
{
    char path[4096], text[KVQ_TEXT_BYTES] = "";
    struct kvq__transport_at at;
    struct kvq_key_file key;
    if (ctl->transport)
        return KVQ_EXIT_OK;
    kvq__ctl_at(ctl, &at, path, sizeof path);
    int result = ctl->connect ? take_key(ctl, &key) : KVQ_EXIT_OK;
    if (result)
        return result;
    at.key = &key;
    int error = kvq__transport_open(&ctl->transport, &at, ctl->timeout_ms, text);
    if (ctl->connect)
        kvq_key_forget(&key);
    return error ? kvq__ctl_explain_connection(ctl, path, error, text) : KVQ_EXIT_OK;
}

// Packs what the daemon would take. An exit status: what is wrong stands on the command line.
static int pack_request(const Kvq__Request *request, uint8_t data[KVQ_MAX_MESSAGE], size_t *size)
{
    char text[KVQ_TEXT_BYTES] = "";
    if (kvq_request_pack(request, data, KVQ_MAX_MESSAGE, size) != 0) {
        fprintf(stderr, "kvqctl: the request is longer than %d bytes; use a shorter name\n",
                KVQ_MAX_MESSAGE);
        return KVQ_EXIT_USAGE;
    }
    if (kvq_request_check(data, *size, text) == 0)
        return KVQ_EXIT_OK;
    fprintf(stderr, "kvqctl: this cannot be asked for: %s\n", text);
    return KVQ_EXIT_USAGE;
}

// An exit status.
static int send_request(struct kvq__ctl *ctl, const uint8_t *data, size_t size)
{
    int result = kvq__transport_send(ctl->transport, data, size);
    if (result == 0)
        return KVQ_EXIT_OK;
    fprintf(stderr, "kvqctl: the request could not be sent: %s\n", strerror(-result));
    return KVQ_EXIT_FAILED;
}

static int explain_nonsense(const char *text)
{
    fprintf(stderr,
            "kvqctl: the answer cannot be read: %s\n"
            "Are kvqctl and kvqd of one release? kvqctl version shows both.\n",
            kvq__ctl_clean(text));
    return KVQ_EXIT_FAILED;
}

// The arena for the next reply, empty. NULL when there is no memory for it.
static struct kvq_arena *next_arena(struct kvq__ctl *ctl)
{
    static uint8_t *memory[2];
    unsigned which = ctl->next_id % 2;
    if (ctl->page) {
        kvq_arena_init(ctl->page, ctl->page->memory, ctl->page->size);
        return ctl->page;
    }
    if (!memory[which])
        memory[which] = malloc(KVQ_WIRE_ARENA);
    if (!memory[which])
        return NULL;
    kvq_arena_init(&ctl->arenas[which], memory[which], KVQ_WIRE_ARENA);
    return &ctl->arenas[which];
}

// Waits for the reply with the given id; replies to earlier requests are thrown away.
static int receive_reply(struct kvq__ctl *ctl, uint32_t id, Kvq__Reply **reply)
{
    static uint8_t data[KVQ_MAX_MESSAGE];
    char text[KVQ_TEXT_BYTES];
    int64_t end = kvq__ctl_now_ms() + ctl->timeout_ms;
    for (;;) {
        int64_t left = end - kvq__ctl_now_ms();
        int size = kvq__transport_receive(ctl->transport, data, sizeof data,
                                          left > 0 ? (int)left : 0, ctl->stop_fd);
        if (size == -EINTR && left > 0)
            continue;
        if (size == -ECANCELED) // what was asked for is not wanted any more
            return KVQ_EXIT_STOPPED;
        if (size == -ETIMEDOUT || size == -EINTR)
            return explain_silence(ctl);
        if (size == -ECONNRESET)
            return explain_loss(ctl);
        if (size < 0)
            return explain_nonsense(strerror(-size));
        struct kvq_arena *arena = next_arena(ctl);
        if (!arena)
            return explain_nonsense("this program is out of memory");
        if (kvq_reply_unpack(data, (size_t)size, arena, reply, text) != 0)
            return explain_nonsense(text);
        if ((*reply)->id == id)
            return KVQ_EXIT_OK;
        *reply = NULL;
    }
}

int kvq__ctl_refused(int status, const char *text)
{
    fprintf(stderr, "kvqctl: %s (%s)\n",
            kvq__ctl_clean(text && *text ? text : kvq_status_text(status)),
            kvq_status_name(status));
    return kvq__ctl_exit_of(status);
}

// An answer to a request: of a session that the daemon does not know, its name may be cut short.
static int refuse(struct kvq__ctl *ctl, int status, const char *text)
{
    bool told = false;
    if (ctl->quiet)
        return kvq__ctl_exit_of(status);
    if (status == KVQ_E_NO_SESSION && (kvq__ctl_complete_name(ctl, &told) || told))
        return KVQ_EXIT_NOT_FOUND;
    return kvq__ctl_refused(status, text);
}

int kvq__ctl_ask(struct kvq__ctl *ctl, Kvq__Request *request, Kvq__Reply__ResultCase expected,
                 Kvq__Reply **reply)
{
    uint8_t data[KVQ_MAX_MESSAGE];
    size_t size;
    *reply = NULL;
    request->id = ++ctl->next_id;
    request->protocol = KVQ_PROTOCOL_MAX;
    int result = pack_request(request, data, &size);
    if (result == 0)
        result = connect_once(ctl);
    if (result == 0)
        result = send_request(ctl, data, size);
    if (result == 0)
        result = receive_reply(ctl, request->id, reply);
    if (result)
        return result;
    int status = (*reply)->status;
    if (status == KVQ_OK && (*reply)->result_case == expected)
        return KVQ_EXIT_OK;
    if (status == KVQ_OK)
        result = explain_nonsense("it is the answer to another command");
    else
        result = refuse(ctl, status, (*reply)->text);
    *reply = NULL;
    return result;
}

Kvq__SessionRef kvq__ctl_ref(const struct kvq__ctl *ctl, char *name)
{
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    ref.name = name;
    if (ctl->ns)
        ref.namespace_ = (char *)ctl->ns;
    return ref;
}
