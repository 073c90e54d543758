// SPDX-License-Identifier: Apache-2.0
// Commands about clients: list, kick.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/kvqctl/kvqctl.h"

static const struct kvq__ctl_kind clients =
    KVQ__CTL_KIND(CLIENTS, Kvq__ClientList, clients, "clients", "");

static void print_clients(const struct kvq__ctl_list *list)
{
    printf("%8s %-24s %8s %7s %6s %7s %11s %8s %12s %12s\n", "ID", "NAME", "PID", "UID", "QUEUES",
           "BUFFERS", "SHARED", "SESSIONS", "REQUESTS", "CONNECTED");
    for (size_t i = 0; i < list->n; i++) {
        const Kvq__Client *c = (const Kvq__Client *)list->elements[i];
        printf("%8" PRIu64 " %-24s %8" PRIu64 " %7" PRIu32 " %6" PRIu32 " %7" PRIu32
               " %11s %8" PRIu32 " %12" PRIu64 " %12s\n",
               c->id, kvq__ctl_clean(c->name), c->pid, c->uid, c->queues, c->buffers,
               kvq__ctl_bytes(c->buffer_bytes), c->sessions, c->requests,
               kvq__ctl_duration(c->connected_ms));
    }
}

int kvq__ctl_client_list(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListClients command = KVQ__LIST_CLIENTS__INIT;
    struct kvq__ctl_list list;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_CLIENTS;
    request.list_clients = &command;
    int result = kvq__ctl_ask_list(ctl, &request, &command.cursor, &clients, &list);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json_array(list.elements, list.n);
    else if (list.n == 0)
        printf("no clients\n");
    else
        print_clients(&list);
    return kvq__ctl_list_end(&list, &clients);
}

int kvq__ctl_client_kick(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__KickClient command = KVQ__KICK_CLIENT__INIT;
    Kvq__Reply *reply;
    char *end;
    errno = 0;
    command.id = strtoull(args[0], &end, 10);
    if (errno || *end || end == args[0] || args[0][0] == '-') {
        fprintf(stderr, "kvqctl: '%s' is not a client's number; kvqctl client list shows them\n",
                args[0]);
        return KVQ_EXIT_USAGE;
    }
    request.command_case = KVQ__REQUEST__COMMAND_KICK_CLIENT;
    request.kick_client = &command;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT__NOT_SET, &reply);
    if (result)
        return result;
    kvq__ctl_print_done(ctl, "kicked", args[0]);
    return KVQ_EXIT_OK;
}
