// SPDX-License-Identifier: Apache-2.0
// Commands about the remote store: push, pull, list, remove, and what is under way.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/status.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/table.h"

enum { SHORTEST_NS = 1000000, LONGEST_NS = 100000000 }; // between two looks

static Kvq__SessionRef ref_of(const char *ns, char *name)
{
    Kvq__SessionRef ref = KVQ__SESSION_REF__INIT;
    ref.name = name;
    if (ns)
        ref.namespace_ = (char *)ns;
    return ref;
}

// ---- Transfers ----

static int ask_transfer(struct kvq__ctl *ctl, uint64_t id, Kvq__Reply **reply)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__AskTransfer command = KVQ__ASK_TRANSFER__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_ASK_TRANSFER;
    request.ask_transfer = &command;
    command.id = id;
    return kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_TRANSFER, reply);
}

// On a terminal, one line that is written over.
static void show_progress(const Kvq__Transfer *x)
{
    fprintf(stderr, "\r%-10s %s", kvq__ctl_clean(x->phase), kvq__ctl_bytes(x->moved_bytes));
    if (x->bytes)
        fprintf(stderr, " of %s", kvq__ctl_bytes(x->bytes));
    fprintf(stderr, " (transfer %" PRIu64 ")    ", x->id);
}

static void print_done(const Kvq__Transfer *x, const char *done)
{
    printf("%s %s: %s, %s of them transferred, %s\n", done, kvq__ctl_clean(x->name),
           kvq__ctl_bytes(x->bytes), kvq__ctl_bytes(x->sent_bytes), kvq__ctl_duration(x->ms));
}

// A daemon of an earlier release sends what is new alone, whatever it is asked for.
static bool did_as_asked(const Kvq__Request *request, const Kvq__Transfer *x)
{
    return request->command_case != KVQ__REQUEST__COMMAND_PUSH_SESSION ||
           !request->push_session->again || x->again;
}

// Says how it has ended. With --json stdout has what the daemon says, also of a failure.
static int tell_end(struct kvq__ctl *ctl, const Kvq__Request *request, const Kvq__Transfer *x,
                    const char *done)
{
    if (ctl->json)
        kvq__ctl_print_json(&x->base);
    if (x->status)
        return kvq__ctl_refused(x->status, x->text);
    if (!did_as_asked(request, x)) {
        fprintf(stderr,
                "kvqctl: this daemon does not know --again, and has sent what was new alone: use a "
                "newer one, or remove the session from the remote store (kvqctl remote remove) and "
                "push it\n");
        return KVQ_EXIT_FAILED;
    }
    if (!ctl->json)
        print_done(x, done);
    return KVQ_EXIT_OK;
}

// Sends the request and follows what it began to its end.
static int follow(struct kvq__ctl *ctl, Kvq__Request *request, const char *done)
{
    struct timespec pause = {.tv_nsec = SHORTEST_NS};
    bool terminal = !ctl->json && isatty(STDERR_FILENO);
    Kvq__Reply *reply;
    int result = kvq__ctl_ask(ctl, request, KVQ__REPLY__RESULT_TRANSFER, &reply);
    while (result == KVQ_EXIT_OK && !reply->transfer->finished) {
        if (terminal)
            show_progress(reply->transfer);
        nanosleep(&pause, NULL);
        pause.tv_nsec = pause.tv_nsec < LONGEST_NS / 2 ? 2 * pause.tv_nsec : LONGEST_NS;
        result = ask_transfer(ctl, reply->transfer->id, &reply);
    }
    if (terminal)
        fprintf(stderr, "\r%76s\r", "");
    if (result)
        return result;
    return tell_end(ctl, request, reply->transfer, done);
}

// ---- Names that are cut short ----

// Whether the list has the name; so it is taken to be where there is no list.
static bool is_listed(struct kvq__ctl *ctl, const char *ns, bool remote)
{
    char own[32];
    struct kvq__ctl_list list;
    const char *given = ctl->ns;
    int timeout_ms = ctl->timeout_ms;
    bool found = false;
    snprintf(own, sizeof own, "uid-%u", (unsigned)geteuid());
    ctl->ns = ns ? ns : own;
    int result = (remote ? kvq__ctl_ask_remote : kvq__ctl_ask_saved)(ctl, &list);
    ctl->ns = given;
    ctl->timeout_ms = timeout_ms;
    if (result)
        return true;
    for (size_t i = 0; i < list.n && !found; i++) {
        const char *name = remote ? ((const Kvq__RemoteEntry *)list.elements[i])->name
                                  : ((const Kvq__SavedEntry *)list.elements[i])->name;
        found = strcmp(name, ctl->named) == 0;
    }
    kvq__ctl_list_free(&list);
    return found;
}

// The daemon notes a transfer of whatever name it gets, and that it failed. So what the name stands
// for is found first. Not KVQ_EXIT_OK: it was completed, or somebody was told why not.
static int find_name(struct kvq__ctl *ctl, char *name, bool remote)
{
    const Kvq__Session *session;
    bool told = false;
    if (!ctl->named || ctl->exact || *name == '#')
        return KVQ_EXIT_OK;
    ctl->quiet = true;
    bool there = (!remote && kvq__ctl_ask_session(ctl, name, &session) == KVQ_EXIT_OK) ||
                 is_listed(ctl, remote && ctl->from ? ctl->from : ctl->ns, remote);
    ctl->quiet = false;
    if (!there && (kvq__ctl_complete_name(ctl, &told) || told))
        return KVQ_EXIT_NOT_FOUND;
    return KVQ_EXIT_OK;
}

int kvq__ctl_session_push(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__PushSession command = KVQ__PUSH_SESSION__INIT;
    Kvq__SessionRef ref = ref_of(ctl->ns, args[0]);
    request.command_case = KVQ__REQUEST__COMMAND_PUSH_SESSION;
    request.push_session = &command;
    command.ref = &ref;
    command.again = ctl->again;
    int result = find_name(ctl, args[0], false);
    return result ? result : follow(ctl, &request, "pushed");
}

int kvq__ctl_session_pull(struct kvq__ctl *ctl, char **args)
{
    char own[32];
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__PullSession command = KVQ__PULL_SESSION__INIT;
    Kvq__SessionRef ref = ref_of(ctl->from ? ctl->from : ctl->ns, args[0]);
    Kvq__SessionRef into = ref_of(ctl->ns, ctl->as ? (char *)ctl->as : args[0]);
    request.command_case = KVQ__REQUEST__COMMAND_PULL_SESSION;
    request.pull_session = &command;
    snprintf(own, sizeof own, "uid-%u", (unsigned)geteuid());
    if (ctl->from && !ctl->ns)
        into.namespace_ = own;
    command.ref = &ref;
    command.into = &into;
    command.replace = ctl->replace;
    int result = find_name(ctl, args[0], true);
    return result ? result : follow(ctl, &request, "pulled");
}

// ---- What is there ----

static void be_patient(struct kvq__ctl *ctl)
{
    enum { LONG_MS = 600000 }; // a remote store that hardly answers is asked several times
    if (!ctl->timeout_given)
        ctl->timeout_ms = LONG_MS;
}

static const struct kvq__ctl_column columns[] = {
    {.name = "namespace", .heading = "NAMESPACE", .field = "namespace", .width = -20},
    {.name = "bytes", .heading = "BYTES", .field = "bytes", .show = KVQ__CTL_AS_BYTES, .width = 11},
    {.name = "name", .heading = "NAME", .field = "name", .width = -4, .apart = true},
};

const struct kvq__ctl_table kvq__ctl_remote_sessions = {
    KVQ__CTL_TABLE(columns, "sessions on the remote store", "there is nothing",
                   "there is nothing of that namespace")};

static const struct kvq__ctl_kind stored = KVQ__CTL_KIND(
    REMOTE_LIST, Kvq__RemoteList, sessions, "stored sessions", "narrow it with --namespace NAME");

int kvq__ctl_ask_remote(struct kvq__ctl *ctl, struct kvq__ctl_list *list)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListRemote command = KVQ__LIST_REMOTE__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_REMOTE;
    request.list_remote = &command;
    if (ctl->ns)
        command.namespace_ = (char *)ctl->ns;
    be_patient(ctl);
    return kvq__ctl_ask_list(ctl, &request, &command.cursor, &stored, list);
}

int kvq__ctl_remote_list(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list list;
    (void)args;
    int result = kvq__ctl_ask_remote(ctl, &list);
    return result ? result : kvq__ctl_show_list(ctl, &list, &stored, &kvq__ctl_remote_sessions);
}

int kvq__ctl_remote_remove(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__RemoveRemote command = KVQ__REMOVE_REMOTE__INIT;
    Kvq__SessionRef ref = ref_of(ctl->ns, args[0]);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_REMOVE_REMOTE;
    request.remove_remote = &command;
    command.ref = &ref;
    be_patient(ctl);
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT__NOT_SET, &reply);
    if (result == KVQ_EXIT_OK)
        kvq__ctl_print_done(ctl, "removed", args[0]);
    return result;
}

// ---- What is under way ----

static void print_transfer(const Kvq__Transfer *x)
{
    printf("%5" PRIu64 "  %-5s %-14s %-20s %-10s %11s of %-11s %s\n", x->id,
           kvq__ctl_clean(x->kind), kvq__ctl_clean(x->namespace_), kvq__ctl_clean(x->name),
           kvq__ctl_clean(x->phase), kvq__ctl_bytes(x->moved_bytes), kvq__ctl_bytes(x->bytes),
           kvq__ctl_duration(x->ms));
    if (x->status)
        printf("       %s (%s)\n", kvq__ctl_clean(x->text), kvq_status_name(x->status));
}

int kvq__ctl_remote_status(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    static const struct kvq__ctl_kind transfers =
        KVQ__CTL_KIND(REMOTE_STATUS, Kvq__RemoteStatusReply, transfers, "transfers", "");
    Kvq__RemoteStatus command = KVQ__REMOTE_STATUS__INIT;
    struct kvq__ctl_list list;
    (void)args;
    request.command_case = KVQ__REQUEST__COMMAND_REMOTE_STATUS;
    request.remote_status = &command;
    int result = kvq__ctl_ask_list(ctl, &request, &command.cursor, &transfers, &list);
    if (result)
        return result;
    Kvq__RemoteStatusReply *r = list.reply->remote_status;
    r->transfers = (Kvq__Transfer **)list.elements;
    r->n_transfers = list.n;
    r->truncated = list.truncated;
    r->next = NULL;
    if (ctl->json) {
        kvq__ctl_print_json(&r->base);
        return kvq__ctl_list_end(&list, &transfers);
    }
    printf("endpoint    %s\nbucket      %s\nprefix      %s\n", kvq__ctl_clean(r->endpoint),
           kvq__ctl_clean(r->bucket), kvq__ctl_clean(r->prefix));
    if (r->n_transfers)
        printf("transfers   of the last ten minutes and under way:\n");
    else
        printf("transfers   none\n");
    for (size_t i = 0; i < r->n_transfers; i++)
        print_transfer(r->transfers[i]);
    return kvq__ctl_list_end(&list, &transfers);
}

int kvq__ctl_remote_cancel(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__CancelTransfer command = KVQ__CANCEL_TRANSFER__INIT;
    Kvq__Reply *reply;
    char *end;
    errno = 0;
    command.id = strtoull(args[0], &end, 10);
    if (errno || *end || end == args[0] || args[0][0] == '-') {
        fprintf(stderr, "kvqctl: '%s' is no transfer's number; kvqctl remote status lists them\n",
                kvq__ctl_clean(args[0]));
        return KVQ_EXIT_USAGE;
    }
    request.command_case = KVQ__REQUEST__COMMAND_CANCEL_TRANSFER;
    request.cancel_transfer = &command;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_TRANSFER, &reply);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&reply->transfer->base);
    else
        printf("transfer %s ends: what was transferred is kept\n", args[0]);
    return KVQ_EXIT_OK;
}
