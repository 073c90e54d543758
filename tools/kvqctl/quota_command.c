// SPDX-License-Identifier: Apache-2.0
// Commands about limits of namespaces: list, get, set, delete.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tools/kvqctl/table.h"

enum { HOST = 1, DEVICE = 2, DISK = 4, SESSIONS = 8, TABLES = 16 }; // bits of SetQuota.which

// ---- Printing ----

// What is used, and of what; a star where the limit was set at run time.
static const char *of(uint64_t used, uint64_t limit, bool bytes, bool set)
{
    return kvq__ctl_text("%s%s", bytes ? kvq__ctl_of_bytes(used, limit) : kvq__ctl_of(used, limit),
                         set     ? limit ? "*" : " of any*"
                         : limit ? " "
                                 : "");
}

static const char *limit_of(uint64_t limit, bool bytes)
{
    if (limit == 0)
        return "none";
    return bytes ? kvq__ctl_bytes(limit) : kvq__ctl_text("%" PRIu64, limit);
}

#define OF(FUNCTION, FIELD, BYTES, BIT)                                                            \
    static const char *FUNCTION(const ProtobufCMessage *message)                                   \
    {                                                                                              \
        const Kvq__QuotaStatus *q = (const Kvq__QuotaStatus *)message;                             \
        bool told = q->used && q->limit;                                                           \
        return told ? of(q->used->FIELD, q->limit->FIELD, BYTES, q->which & (BIT)) : "";           \
    }
#define LIMIT_OF(FUNCTION, FIELD, BYTES)                                                           \
    static const char *FUNCTION(const ProtobufCMessage *message)                                   \
    {                                                                                              \
        const Kvq__QuotaStatus *q = (const Kvq__QuotaStatus *)message;                             \
        return q->limit ? limit_of(q->limit->FIELD, BYTES) : "";                                   \
    }
LIMIT_OF(sessions_limit_text, sessions, false)
LIMIT_OF(host_limit_text, host_bytes, true)
LIMIT_OF(device_limit_text, device_bytes, true)
LIMIT_OF(disk_limit_text, disk_bytes, true)
LIMIT_OF(tables_limit_text, table_bytes, true)
OF(sessions_text, sessions, false, SESSIONS)
OF(host_text, host_bytes, true, HOST)
OF(device_text, device_bytes, true, DEVICE)
OF(disk_text, disk_bytes, true, DISK)
OF(tables_text, table_bytes, true, TABLES)

#define COLUMN(NAME, HEADING, FIELD, SHOW, WIDTH, EXTRA, PEOPLE)                                   \
    {                                                                                              \
        .name = (NAME), .heading = (HEADING), .field = (FIELD), .show = KVQ__CTL_AS_##SHOW,        \
        .width = (WIDTH), .people = (PEOPLE), .extra = (EXTRA)                                     \
    }
static const struct kvq__ctl_column columns[] = {
    {.name = "namespace", .heading = "NAMESPACE", .field = "namespace", .width = -20},
    COLUMN("sessions", "SESSIONS", "used.sessions", NUMBER, 14, false, sessions_text),
    COLUMN("host", "HOST", "used.host_bytes", BYTES, 22, false, host_text),
    COLUMN("gpus", "GPUS", "used.device_bytes", BYTES, 22, false, device_text),
    COLUMN("disk", "DISK", "used.disk_bytes", BYTES, 22, false, disk_text),
    COLUMN("tables", "TABLES", "used.table_bytes", BYTES, 22, false, tables_text),
    COLUMN("sessions-limit", "SESSIONS, LIMIT", "limit.sessions", NUMBER, 14, true,
           sessions_limit_text),
    COLUMN("host-limit", "HOST, LIMIT", "limit.host_bytes", BYTES, 11, true, host_limit_text),
    COLUMN("gpus-limit", "GPUS, LIMIT", "limit.device_bytes", BYTES, 11, true, device_limit_text),
    COLUMN("disk-limit", "DISK, LIMIT", "limit.disk_bytes", BYTES, 11, true, disk_limit_text),
    COLUMN("tables-limit", "TABLES, LIMIT", "limit.table_bytes", BYTES, 11, true,
           tables_limit_text),
    COLUMN("last-refused", "LAST REFUSED", "last_refused", TEXT, -12, true, NULL),
};

static void explain_stars(ProtobufCMessage *const *elements, size_t n)
{
    bool any = false;
    for (size_t i = 0; i < n; i++)
        any |= ((const Kvq__QuotaStatus *)elements[i])->which != 0;
    if (any)
        printf("* set at run time; the others are the configuration's\n");
}

const struct kvq__ctl_table kvq__ctl_quotas = {
    KVQ__CTL_TABLE(columns, "limits", "no namespaces that this user may see", NULL),
    .note = explain_stars};

static void print_limit(const char *what, uint64_t used, uint64_t limit, uint64_t base,
                        uint64_t refused, bool bytes, bool set)
{
    printf("%-10s %s%s", what, bytes ? kvq__ctl_of_bytes(used, limit) : kvq__ctl_of(used, limit),
           limit ? "" : ", no limit");
    if (set && base)
        printf(", set at run time (the configuration says %s)",
               bytes ? kvq__ctl_bytes(base) : kvq__ctl_of(base, 0));
    else if (set)
        printf(", set at run time (the configuration has none)");
    if (limit && used > limit)
        printf("; ABOVE ITS LIMIT, so nothing more is had");
    if (refused)
        printf("; %" PRIu64 " refused", refused);
    printf("\n");
}

static void print_one(const Kvq__QuotaStatus *q)
{
    const Kvq__Quota *u = q->used, *l = q->limit, *c = q->configured, *r = q->refused;
    if (!u || !l || !c || !r)
        return;
    printf("namespace  %s\n", kvq__ctl_clean(q->namespace_));
    print_limit("host", u->host_bytes, l->host_bytes, c->host_bytes, r->host_bytes, true,
                q->which & HOST);
    print_limit("gpus", u->device_bytes, l->device_bytes, c->device_bytes, r->device_bytes, true,
                q->which & DEVICE);
    print_limit("disk", u->disk_bytes, l->disk_bytes, c->disk_bytes, r->disk_bytes, true,
                q->which & DISK);
    print_limit("sessions", u->sessions, l->sessions, c->sessions, r->sessions, false,
                q->which & SESSIONS);
    print_limit("tables", u->table_bytes, l->table_bytes, c->table_bytes, r->table_bytes, true,
                q->which & TABLES);
    if (!q->last_refused[0])
        return;
    printf("refused    last %s ago, by %s", kvq__ctl_duration(q->last_ms),
           kvq__ctl_clean(q->last_refused));
    if (q->last_more)
        printf(": %" PRIu64 " more asked for", q->last_more);
    printf("\n");
}

// ---- Asking ----

static int ask(struct kvq__ctl *ctl, Kvq__Request *request, const Kvq__QuotaList **list)
{
    Kvq__Reply *reply;
    int result = kvq__ctl_ask(ctl, request, KVQ__REPLY__RESULT_QUOTAS, &reply);
    if (result == KVQ_EXIT_OK)
        *list = reply->quotas;
    return result;
}

// One namespace's, as an answer has it.
static int tell_one(const struct kvq__ctl *ctl, const Kvq__QuotaStatus *quota)
{
    if (ctl->json)
        kvq__ctl_print_json(&quota->base);
    else
        print_one(quota);
    return KVQ_EXIT_OK;
}

static int check_one(const Kvq__QuotaList *list)
{
    if (list->n_quotas == 1)
        return KVQ_EXIT_OK;
    fprintf(stderr, "kvqctl: the answer is about %zu namespaces\n", list->n_quotas);
    return KVQ_EXIT_FAILED;
}

static const struct kvq__ctl_kind quotas =
    KVQ__CTL_KIND(QUOTAS, Kvq__QuotaList, quotas, "namespaces", "ask for one by its name");

int kvq__ctl_ask_quotas(struct kvq__ctl *ctl, struct kvq__ctl_list *list)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListQuotas command = KVQ__LIST_QUOTAS__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_QUOTAS;
    request.list_quotas = &command;
    return kvq__ctl_ask_list(ctl, &request, &command.cursor, &quotas, list);
}

int kvq__ctl_quota_list(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list list;
    (void)args;
    int result = kvq__ctl_ask_quotas(ctl, &list);
    return result ? result : kvq__ctl_show_list(ctl, &list, &quotas, &kvq__ctl_quotas);
}

int kvq__ctl_ask_quota(struct kvq__ctl *ctl, char *ns, const Kvq__QuotaStatus **quota)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListQuotas command = KVQ__LIST_QUOTAS__INIT;
    const Kvq__QuotaList *list;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_QUOTAS;
    request.list_quotas = &command;
    command.namespace_ = ns;
    int result = ask(ctl, &request, &list);
    result = result ? result : check_one(list);
    if (result == KVQ_EXIT_OK)
        *quota = list->quotas[0];
    return result;
}

int kvq__ctl_check_namespace(struct kvq__ctl *ctl)
{
    const Kvq__QuotaStatus *quota;
    return ctl->ns ? kvq__ctl_ask_quota(ctl, (char *)ctl->ns, &quota) : KVQ_EXIT_OK;
}

int kvq__ctl_quota_get(struct kvq__ctl *ctl, char **args)
{
    const Kvq__QuotaStatus *quota;
    int result = kvq__ctl_ask_quota(ctl, args[0], &quota);
    return result ? result : tell_one(ctl, quota);
}

int kvq__ctl_check_quota(const struct kvq__ctl *ctl)
{
    if (ctl->quota.which)
        return KVQ_EXIT_OK;
    fprintf(stderr, "kvqctl: say which limits: --host-bytes SIZE, --device-bytes SIZE, "
                    "--disk-bytes SIZE, --table-bytes SIZE, --sessions N; none is no limit\n");
    return KVQ_EXIT_USAGE;
}

int kvq__ctl_quota_set(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__SetQuota command = KVQ__SET_QUOTA__INIT;
    Kvq__Quota limit = KVQ__QUOTA__INIT;
    const Kvq__QuotaList *list;
    const struct kvq__ctl_quota *q = &ctl->quota;
    int result = kvq__ctl_check_quota(ctl);
    if (result)
        return result;
    request.command_case = KVQ__REQUEST__COMMAND_SET_QUOTA;
    request.set_quota = &command;
    command.namespace_ = args[0];
    command.limit = &limit;
    command.which = q->which;
    limit.host_bytes = q->limit[0];
    limit.device_bytes = q->limit[1];
    limit.disk_bytes = q->limit[2];
    limit.sessions = q->limit[3];
    limit.table_bytes = q->limit[4];
    result = ask(ctl, &request, &list);
    result = result ? result : check_one(list);
    if (result == KVQ_EXIT_OK && !list->kept)
        fprintf(stderr, "kvqctl: this holds until the daemon ends: it has no storage_dir to keep "
                        "it in; put it into its configuration, too\n");
    return result ? result : tell_one(ctl, list->quotas[0]);
}

int kvq__ctl_quota_delete(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__DeleteQuota command = KVQ__DELETE_QUOTA__INIT;
    const Kvq__QuotaList *list;
    request.command_case = KVQ__REQUEST__COMMAND_DELETE_QUOTA;
    request.delete_quota = &command;
    command.namespace_ = args[0];
    // Whatever is stored, the configuration's limits are those of the next daemon as well.
    int result = ask(ctl, &request, &list);
    result = result ? result : check_one(list);
    return result ? result : tell_one(ctl, list->quotas[0]);
}

// ---- The command line ----

bool kvq__ctl_quota_option(struct kvq__ctl *ctl, int which, const char *text)
{
    uint64_t *limit = &ctl->quota.limit[which];
    size_t digits = strspn(text, "0123456789");
    ctl->quota.which |= 1u << which;
    *limit = 0;
    if (strcmp(text, "none") == 0)
        return true;
    return (which != 3 || !text[digits]) && kvq__ctl_parse_size(text, limit);
}
