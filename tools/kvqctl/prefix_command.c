// SPDX-License-Identifier: Apache-2.0
// What namespaces keep of prefixes, and what it was good for.
#include <inttypes.h>
#include <stdio.h>

#include "tools/kvqctl/kvqctl.h"

static const struct kvq__ctl_kind prefixes =
    KVQ__CTL_KIND(PREFIXES, Kvq__PrefixList, prefixes, "namespaces with prefixes", "");

static void print_prefixes(const struct kvq__ctl_list *list)
{
    printf("%-24s %10s %11s %11s %9s %9s %12s %9s\n", "NAMESPACE", "TOKENS", "BYTES", "IDLE",
           "LOOKUPS", "HITS", "HIT TOKENS", "EVICTED");
    for (size_t i = 0; i < list->n; i++) {
        const Kvq__PrefixStatus *p = (const Kvq__PrefixStatus *)list->elements[i];
        printf("%-24s %10" PRIu64 " %11s %11s %9" PRIu64 " %9" PRIu64 " %12" PRIu64 " %9" PRIu64
               "\n",
               kvq__ctl_clean(p->namespace_), p->pages * 128, kvq__ctl_bytes(p->bytes),
               kvq__ctl_bytes(p->idle_bytes), p->lookups, p->hits, p->hit_tokens, p->evicted * 128);
    }
}

int kvq__ctl_prefix_status(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListPrefixes command = KVQ__LIST_PREFIXES__INIT;
    struct kvq__ctl_list list;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_PREFIXES;
    request.list_prefixes = &command;
    int result = kvq__ctl_ask_list(ctl, &request, &command.cursor, &prefixes, &list);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json_array(list.elements, list.n);
    else if (list.n == 0)
        printf("no prefixes: no engine has told token ids\n");
    else
        print_prefixes(&list);
    return kvq__ctl_list_end(&list, &prefixes);
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
        printf("gave up prefixes of %" PRIu64 " tokens; %s are free now\n", r->pages * 128,
               kvq__ctl_bytes(r->bytes));
    return KVQ_EXIT_OK;
}
