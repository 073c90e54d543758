// SPDX-License-Identifier: Apache-2.0
// Commands about clients: list, kick.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/kvqctl/table.h"

static const struct kvq__ctl_kind clients =
    KVQ__CTL_KIND(CLIENTS, Kvq__ClientList, clients, "clients", "");

#define COLUMN(NAME, HEADING, FIELD, SHOW, WIDTH)                                                  \
    {                                                                                              \
        .name = (NAME), .heading = (HEADING), .field = (FIELD), .show = KVQ__CTL_AS_##SHOW,        \
        .width = (WIDTH)                                                                           \
    }
static const struct kvq__ctl_column columns[] = {
    COLUMN("id", "ID", "id", NUMBER, 8),
    COLUMN("name", "NAME", "name", TEXT, -24),
    COLUMN("pid", "PID", "pid", NUMBER, 8),
    COLUMN("uid", "UID", "uid", NUMBER, 7),
    COLUMN("queues", "QUEUES", "queues", NUMBER, 6),
    COLUMN("buffers", "BUFFERS", "buffers", NUMBER, 7),
    COLUMN("shared", "SHARED", "buffer_bytes", BYTES, 11),
    COLUMN("sessions", "SESSIONS", "sessions", NUMBER, 8),
    COLUMN("requests", "REQUESTS", "requests", NUMBER, 12),
    COLUMN("connected", "CONNECTED", "connected_ms", DURATION, 12),
};

const struct kvq__ctl_table kvq__ctl_clients = {
    KVQ__CTL_TABLE(columns, "clients", "no clients", NULL)};

int kvq__ctl_ask_clients(struct kvq__ctl *ctl, struct kvq__ctl_list *list)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListClients command = KVQ__LIST_CLIENTS__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_CLIENTS;
    request.list_clients = &command;
    return kvq__ctl_ask_list(ctl, &request, &command.cursor, &clients, list);
}

int kvq__ctl_client_list(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list list;
    (void)args;
    int result = kvq__ctl_ask_clients(ctl, &list);
    return result ? result : kvq__ctl_show_list(ctl, &list, &clients, &kvq__ctl_clients);
}

int kvq__ctl_client_number(const char *text, uint64_t *id)
{
    char *end;
    errno = 0;
    *id = strtoull(text, &end, 10);
    if (!errno && !*end && end != text && *text != '-')
        return KVQ_EXIT_OK;
    fprintf(stderr, "kvqctl: '%s' is not a client's number; kvqctl client list shows them\n",
            kvq__ctl_clean(text));
    return KVQ_EXIT_USAGE;
}

int kvq__ctl_client_kick(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__KickClient command = KVQ__KICK_CLIENT__INIT;
    Kvq__Reply *reply;
    int result = kvq__ctl_client_number(args[0], &command.id);
    if (result)
        return result;
    request.command_case = KVQ__REQUEST__COMMAND_KICK_CLIENT;
    request.kick_client = &command;
    result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT__NOT_SET, &reply);
    if (result)
        return result;
    kvq__ctl_print_done(ctl, "kicked", args[0]);
    return KVQ_EXIT_OK;
}
