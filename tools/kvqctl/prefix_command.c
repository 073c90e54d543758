// SPDX-License-Identifier: Apache-2.0
// What namespaces keep of prefixes, and what it was good for.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tools/kvqctl/table.h"

enum { PAGE_TOKENS = 128 };

static const struct kvq__ctl_kind prefixes =
    KVQ__CTL_KIND(PREFIXES, Kvq__PrefixList, prefixes, "namespaces with prefixes", "");

static uint64_t tokens_of(const ProtobufCMessage *message)
{
    return ((const Kvq__PrefixStatus *)message)->pages * PAGE_TOKENS;
}

static uint64_t evicted_of(const ProtobufCMessage *message)
{
    return ((const Kvq__PrefixStatus *)message)->evicted * PAGE_TOKENS;
}

#define COLUMN(NAME, HEADING, FIELD, SHOW, WIDTH)                                                  \
    {                                                                                              \
        .name = (NAME), .heading = (HEADING), .field = (FIELD), .show = KVQ__CTL_AS_##SHOW,        \
        .width = (WIDTH)                                                                           \
    }
static const struct kvq__ctl_column columns[] = {
    COLUMN("namespace", "NAMESPACE", "namespace", TEXT, -24),
    {.name = "tokens",
     .heading = "TOKENS",
     .whole = tokens_of,
     .show = KVQ__CTL_AS_NUMBER,
     .width = 10},
    COLUMN("bytes", "BYTES", "bytes", BYTES, 11),
    COLUMN("idle", "IDLE", "idle_bytes", BYTES, 11),
    COLUMN("lookups", "LOOKUPS", "lookups", NUMBER, 9),
    COLUMN("hits", "HITS", "hits", NUMBER, 9),
    COLUMN("hit-tokens", "HIT TOKENS", "hit_tokens", NUMBER, 12),
    {.name = "evicted",
     .heading = "EVICTED",
     .whole = evicted_of,
     .show = KVQ__CTL_AS_NUMBER,
     .width = 9},
};

const struct kvq__ctl_table kvq__ctl_prefixes = {
    KVQ__CTL_TABLE(columns, "namespaces with prefixes", "no prefixes: no engine has told token ids",
                   "no prefixes in this namespace: no engine has told token ids")};

int kvq__ctl_ask_prefixes(struct kvq__ctl *ctl, struct kvq__ctl_list *list)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListPrefixes command = KVQ__LIST_PREFIXES__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_PREFIXES;
    request.list_prefixes = &command;
    return kvq__ctl_ask_list(ctl, &request, &command.cursor, &prefixes, list);
}

// The daemon tells of all namespaces that the user may see; there are few.
static void keep_of_namespace(struct kvq__ctl_list *list, const char *ns)
{
    size_t kept = 0;
    for (size_t i = 0; i < list->n; i++)
        if (strcmp(((const Kvq__PrefixStatus *)list->elements[i])->namespace_, ns) == 0)
            list->elements[kept++] = list->elements[i];
    list->n = kept;
}

int kvq__ctl_prefix_status(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list list;
    (void)args;
    int result = kvq__ctl_check_namespace(ctl);
    result = result ? result : kvq__ctl_ask_prefixes(ctl, &list);
    if (result == KVQ_EXIT_OK && ctl->ns)
        keep_of_namespace(&list, ctl->ns);
    return result ? result : kvq__ctl_show_list(ctl, &list, &prefixes, &kvq__ctl_prefixes);
}

int kvq__ctl_prefix_drop(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__DropPrefixes command = KVQ__DROP_PREFIXES__INIT;
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_DROP_PREFIXES;
    request.drop_prefixes = &command;
    if (ctl->ns)
        command.namespace_ = (char *)ctl->ns;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_DROPPED_PREFIXES, &reply);
    if (result)
        return result;
    const Kvq__DropPrefixesReply *r = reply->dropped_prefixes;
    if (ctl->json)
        kvq__ctl_print_json(&r->base);
    else
        printf("gave up prefixes of %" PRIu64 " tokens; %s free now\n", r->pages * PAGE_TOKENS,
               kvq__ctl_bytes(r->bytes));
    return KVQ_EXIT_OK;
}
