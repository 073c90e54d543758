// SPDX-License-Identifier: Apache-2.0
// See dry_run.h.
#include <cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "proto/json.h"
#include "proto/limits.h"
#include "proto/status.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/dry_run.h"
#include "tools/kvqctl/kvqctl.h"

// ---- Telling ----

struct plan {
    const struct kvq__ctl *ctl;
    cJSON *items; // with --json
    size_t n;
    uint64_t bytes;
};

struct item {
    const char *action, *what, *ns, *name;
    uint64_t bytes;
    const char *note; // in words, or ""
    bool is_within;   // name is the place where it lies
    bool is_refused;  // as the note says: there are no bytes
};

static void tell(struct plan *plan, const struct item *item)
{
    plan->n++;
    plan->bytes += item->bytes;
    if (!plan->ctl->json) {
        printf("would %s %s %s%s", item->action, item->what, item->is_within ? "in " : "",
               kvq__ctl_clean(item->name));
        if (*item->ns)
            printf(" of %s", kvq__ctl_clean(item->ns));
        if (!item->is_refused)
            printf(": %s", kvq__ctl_bytes(item->bytes));
        printf("%s%s\n", *item->note ? ", " : "", item->note);
        return;
    }
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "action", item->action);
    cJSON_AddStringToObject(object, "what", item->what);
    cJSON_AddStringToObject(object, "namespace", item->ns);
    cJSON_AddStringToObject(object, "name", item->name);
    cJSON_AddItemToObject(object, "bytes", kvq_json_of_whole(item->bytes));
    cJSON_AddStringToObject(object, "note", item->note);
    cJSON_AddItemToArray(plan->items, object);
}

static struct plan begin(const struct kvq__ctl *ctl)
{
    return (struct plan){.ctl = ctl, .items = ctl->json ? cJSON_CreateArray() : NULL};
}

static void end(struct plan *plan)
{
    if (!plan->ctl->json) {
        if (plan->n == 0)
            printf("nothing would go\n");
        printf("this was a dry run: nothing was done\n");
        return;
    }
    cJSON *object = cJSON_CreateObject();
    cJSON_AddBoolToObject(object, "dry_run", true);
    cJSON_AddItemToObject(object, "bytes", kvq_json_of_whole(plan->bytes));
    cJSON_AddItemToObject(object, "would", plan->items);
    char *text = cJSON_Print(object);
    printf("%s\n", text ? text : "null");
    cJSON_free(text);
    cJSON_Delete(object);
}

static const char *own_namespace(void)
{
    static char name[32]; // not one of kvq__ctl_text's buffers: it is needed for longer
    snprintf(name, sizeof name, "uid-%u", (unsigned)geteuid());
    return name;
}

// ---- Sessions ----

static uint64_t session_bytes(const Kvq__Session *s)
{
    return s->packed_bytes + s->window_bytes + s->table_bytes;
}

// `more`: what else is to be said of it, or "".
static void tell_session(struct plan *plan, const char *action, const Kvq__Session *s,
                         const char *more)
{
    const char *user = s->writer_client
                           ? kvq__ctl_text("; client %" PRIu64 " has it open", s->writer_client)
                       : s->readers ? "; it is open for reading"
                                    : "";
    tell(plan, &(struct item){
                   .action = action,
                   .what = "session",
                   .ns = s->namespace_,
                   .name = kvq__ctl_session_label(s),
                   .bytes = session_bytes(s),
                   .note = kvq__ctl_text("%s%s%s", kvq__ctl_count(s->tokens, "token"), user, more),
               });
}

static void tell_saved(struct plan *plan, const char *action, const Kvq__SavedEntry *e)
{
    const char *shard =
        e->shards > 1 ? kvq__ctl_text(", shard %" PRIu32 "/%" PRIu32, e->shard, e->shards) : "";
    tell(plan, &(struct item){
                   .action = action,
                   .what = "saved session",
                   .ns = e->namespace_,
                   .name = e->name,
                   .bytes = e->bytes,
                   .note = kvq__ctl_text("%s%s", kvq__ctl_count(e->tokens, "token"), shard),
               });
}

// What is saved under that name. Without a storage, nothing.
static void tell_all_saved(struct kvq__ctl *ctl, struct plan *plan, const char *action,
                           const char *ns, const char *name)
{
    struct kvq__ctl_list list;
    const char *given = ctl->ns;
    ctl->ns = ns;
    ctl->quiet = true;
    int result = kvq__ctl_ask_saved(ctl, &list);
    ctl->quiet = false;
    ctl->ns = given;
    for (size_t i = 0; result == KVQ_EXIT_OK && i < list.n; i++) {
        const Kvq__SavedEntry *e = (const Kvq__SavedEntry *)list.elements[i];
        if (strcmp(e->name, name) == 0)
            tell_saved(plan, action, e);
    }
    if (result == KVQ_EXIT_OK)
        kvq__ctl_list_free(&list);
}

static bool is_named(const Kvq__Session *s, const char *name)
{
    char *end = NULL;
    if (*name != '#')
        return strcmp(s->name, name) == 0;
    return s->id == strtoull(name + 1, &end, 10) && !*end;
}

// Under which names a drop looks. Of a session in memory the daemon knows them, also where a number
// is given, or no namespace; what is only saved has no number.
static int find_dropped(struct kvq__ctl *ctl, char *given, char ns[KVQ_NAME_BYTES],
                        char name[KVQ_NAME_BYTES])
{
    const Kvq__Session *s = NULL;
    bool number = *given == '#';
    ctl->quiet = !number;
    int result = kvq__ctl_ask_session(ctl, given, &s);
    ctl->quiet = false;
    snprintf(ns, KVQ_NAME_BYTES, "%s", s ? s->namespace_ : ctl->ns ? ctl->ns : own_namespace());
    snprintf(name, KVQ_NAME_BYTES, "%s", s && s->name[0] ? s->name : given);
    return number ? result : KVQ_EXIT_OK;
}

// Its shards in memory and what is saved of it; if there is neither, the daemon says so.
int kvq__ctl_preview_drop(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list list;
    const char *given = ctl->ns;
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    int result = find_dropped(ctl, args[0], ns, name);
    if (result)
        return result;
    ctl->ns = ns;
    result = kvq__ctl_ask_sessions(ctl, &list);
    ctl->ns = given;
    if (result)
        return result;
    struct plan plan = begin(ctl);
    for (size_t i = 0; i < list.n; i++) {
        const Kvq__Session *s = (const Kvq__Session *)list.elements[i];
        if (is_named(s, name))
            tell_session(&plan, "drop", s, "");
    }
    kvq__ctl_list_free(&list);
    tell_all_saved(ctl, &plan, "drop", ns, name);
    if (plan.n == 0) {
        cJSON_Delete(plan.items);
        result = kvq__ctl_ask_session(ctl, args[0], NULL);
        return result ? result : KVQ_EXIT_NOT_FOUND;
    }
    end(&plan);
    return KVQ_EXIT_OK;
}

// What a namespace may still keep on disk, and what its sessions that fit alone want of that.
struct share {
    const char *ns;
    bool limited;
    uint64_t room, wanted;
};

// How a daemon ends: whether it saves, as it does with a storage that it can write to unless
// save_on_drain is off, and for how many bytes storage and namespaces have room.
struct ending {
    bool saves;
    uint64_t room, wanted;
    struct kvq__ctl_list quotas;
    struct share *shares;
    size_t n_shares, last; // last: the one that was found last
};

// As the daemon counts when it refuses a save, and what is empty, which goes first.
static uint64_t room_of(const Kvq__StorageReply *r)
{
    return r->room_bytes + r->empty_bytes;
}

// What a save of it takes of the storage, at most: blocks with their heads, and the catalog's rows.
static uint64_t need_of(const Kvq__Session *s)
{
    enum { A_BLOCK = 512 + 2 * 64 + 128, A_PAGE = 4200, KINDS = 2, BESIDE = 4 };
    uint64_t pages = (s->tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS;
    return session_bytes(s) + pages * A_PAGE + s->layers * (KINDS * pages + BESIDE) * A_BLOCK;
}

static int ask_shares(struct kvq__ctl *ctl, struct ending *ending)
{
    int result = kvq__ctl_ask_quotas(ctl, &ending->quotas);
    if (result)
        return result;
    ending->shares = calloc(ending->quotas.n + 1, sizeof *ending->shares);
    if (!ending->shares) {
        kvq__ctl_list_free(&ending->quotas);
        return kvq__ctl_refused(KVQ_E_NO_MEMORY, "no memory for a list of namespaces");
    }
    for (size_t i = 0; i < ending->quotas.n; i++) {
        const Kvq__QuotaStatus *q = (const Kvq__QuotaStatus *)ending->quotas.elements[i];
        uint64_t limit = q->limit ? q->limit->disk_bytes : 0;
        uint64_t used = q->used ? q->used->disk_bytes : 0;
        ending->shares[ending->n_shares++] = (struct share){
            .ns = q->namespace_, .limited = limit > 0, .room = limit > used ? limit - used : 0};
    }
    return KVQ_EXIT_OK;
}

static void free_shares(struct ending *ending)
{
    if (ending->shares)
        kvq__ctl_list_free(&ending->quotas);
    free(ending->shares);
}

// NULL: nothing limits it. Sessions of a namespace stand one after the other.
static struct share *share_of(struct ending *ending, const char *ns)
{
    for (size_t i = 0; i < ending->n_shares; i++) {
        size_t at = (ending->last + i) % ending->n_shares;
        if (strcmp(ending->shares[at].ns, ns) != 0)
            continue;
        ending->last = at;
        return ending->shares[at].limited ? &ending->shares[at] : NULL;
    }
    return NULL;
}

static int ask_how_it_ends(struct kvq__ctl *ctl, struct ending *ending)
{
    const Kvq__StorageReply *storage;
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__GetConfig command = KVQ__GET_CONFIG__INIT;
    Kvq__Reply *reply;
    command.name = (char *)"save_on_drain";
    request.command_case = KVQ__REQUEST__COMMAND_GET_CONFIG;
    request.get_config = &command;
    int result = kvq__ctl_ask(ctl, &request, KVQ__REPLY__RESULT_CONFIG, &reply);
    if (result)
        return result;
    bool saves =
        reply->config->n_options == 1 && strcmp(reply->config->options[0]->value, "yes") == 0;
    ctl->quiet = true;
    result = kvq__ctl_ask_storage_status(ctl, &storage);
    ctl->quiet = false;
    *ending = (struct ending){0};
    if (result || !saves || storage->read_only)
        return KVQ_EXIT_OK;
    *ending = (struct ending){.saves = true, .room = room_of(storage)};
    return ask_shares(ctl, ending);
}

// A session without a name is not saved, nor one of which a shard is missing.
static bool can_be_saved(const Kvq__Session *s)
{
    bool whole = s->shards < 2 || s->group_tokens > 0 || s->tokens == 0;
    return s->name[0] && whole;
}

// What those want together that fit alone: who does not fit alone is refused, and the others have
// its room.
static void count_wanted(struct ending *ending, const Kvq__Session *s)
{
    struct share *share = share_of(ending, s->namespace_);
    uint64_t need = need_of(s), bytes = session_bytes(s);
    if (!ending->saves || !can_be_saved(s))
        return;
    ending->wanted += need <= ending->room ? need : 0;
    if (share)
        share->wanted += bytes <= share->room ? bytes : 0;
}

// Why it may be lost, or "". Where there is not room for all, nobody knows who is saved first. What
// is saved of it already needs no room, and how much that is only the save finds out.
static const char *why_lost(struct ending *ending, const Kvq__Session *s)
{
    const struct share *share = share_of(ending, s->namespace_);
    if (need_of(s) > ending->room || ending->wanted > ending->room)
        return kvq__ctl_text("; it may be lost: the storage has room for %s%s",
                             kvq__ctl_bytes(ending->room),
                             need_of(s) > ending->room ? "" : ", less than all of them need");
    if (share && (session_bytes(s) > share->room || share->wanted > share->room))
        return kvq__ctl_text("; it may be lost: its namespace has room for %s on disk%s "
                             "(disk-bytes of kvqctl quota set)",
                             kvq__ctl_bytes(share->room),
                             session_bytes(s) > share->room ? "" : ", less than all of its need");
    return "";
}

static void tell_end_of(struct plan *plan, const Kvq__Session *s, struct ending *ending)
{
    bool tries = ending->saves && can_be_saved(s);
    tell_session(plan, tries ? "save" : "lose", s, tries ? why_lost(ending, s) : "");
}

static void tell_ends(struct plan *plan, const struct kvq__ctl_list *sessions,
                      struct ending *ending, bool counts)
{
    for (size_t i = 0; i < sessions->n; i++) {
        const Kvq__Session *s = (const Kvq__Session *)sessions->elements[i];
        if (s->saved)
            continue;
        if (counts)
            count_wanted(ending, s);
        else
            tell_end_of(plan, s, ending);
    }
}

static int preview_end(struct kvq__ctl *ctl, struct ending *ending)
{
    struct kvq__ctl_list sessions;
    int result = kvq__ctl_ask_sessions(ctl, &sessions);
    if (result)
        return result;
    struct plan plan = begin(ctl);
    tell_ends(&plan, &sessions, ending, true);
    tell_ends(&plan, &sessions, ending, false);
    kvq__ctl_list_free(&sessions);
    end(&plan);
    return KVQ_EXIT_OK;
}

int kvq__ctl_preview_drain(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    struct ending ending;
    int result = ask_how_it_ends(ctl, &ending);
    if (result)
        return result;
    result = preview_end(ctl, &ending);
    free_shares(&ending);
    return result;
}

int kvq__ctl_preview_shutdown(struct kvq__ctl *ctl, char **args)
{
    struct ending at_once = {0};
    return ctl->now ? preview_end(ctl, &at_once) : kvq__ctl_preview_drain(ctl, args);
}

// Imports and pulls replace what is saved under the name that they end up with.
static int preview_replace(struct kvq__ctl *ctl, const char *ns, const char *name)
{
    struct plan plan = begin(ctl);
    if (ctl->replace)
        tell_all_saved(ctl, &plan, "replace", ns, name);
    end(&plan);
    return KVQ_EXIT_OK;
}

// The file as it is seen from here. The daemon may see another one: look_for_export
// (storage_commands.c) has why.
int kvq__ctl_preview_export(struct kvq__ctl *ctl, char **args)
{
    struct stat there;
    struct kvq__ctl_list list;
    const char *given = ctl->ns;
    bool saved = false, explained = false;
    ctl->ns = given ? given : own_namespace();
    int result = kvq__ctl_ask_saved(ctl, &list);
    ctl->ns = given;
    if (result)
        return result;
    for (size_t i = 0; i < list.n && !saved; i++)
        saved = strcmp(((const Kvq__SavedEntry *)list.elements[i])->name, args[0]) == 0;
    kvq__ctl_list_free(&list);
    if (!saved && (kvq__ctl_complete_name(ctl, &explained) || explained))
        return KVQ_EXIT_NOT_FOUND;
    if (!saved)
        return kvq__ctl_refused(KVQ_E_NO_SESSION,
                                kvq__ctl_text("no session \"%s\" is saved", args[0]));
    struct plan plan = begin(ctl);
    if (ctl->connect)
        fprintf(stderr, "kvqctl: whether %s is there already only that machine knows\n",
                kvq__ctl_clean(args[1]));
    else if (stat(args[1], &there) == 0)
        tell(&plan, &(struct item){.action = ctl->replace ? "overwrite" : "not overwrite",
                                   .what = "the file",
                                   .ns = "",
                                   .name = args[1],
                                   .bytes = ctl->replace ? (uint64_t)there.st_size : 0,
                                   .note = ctl->replace ? "" : "and fail: --replace overwrites it",
                                   .is_refused = !ctl->replace});
    end(&plan);
    return KVQ_EXIT_OK;
}

// What an import would do, as found by the daemon. A question asked meanwhile would take its place.
struct import {
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    uint64_t bytes, tokens;
    int status; // that the import would fail with; 0: it would not
};

static void tell_import(struct plan *plan, const struct import *i, const char *action,
                        const char *note)
{
    tell(plan, &(struct item){.action = action,
                              .what = "session",
                              .ns = i->ns,
                              .name = i->name,
                              .bytes = i->status ? 0 : i->bytes,
                              .note = note,
                              .is_refused = i->status != 0});
}

// All that stands in the way of the import, or how it would end.
static void tell_look(struct plan *plan, const Kvq__ImportLook *look, struct import *i)
{
    const char *opening = NULL;
    for (size_t k = 0; k < look->n_obstacles; k++) {
        const Kvq__Obstacle *o = look->obstacles[k];
        if (o->opening) {
            opening = kvq__ctl_clean(o->text);
            continue;
        }
        i->status = i->status ? i->status : o->status;
        tell_import(plan, i, "not import", kvq__ctl_text("and fail: %s", kvq__ctl_clean(o->text)));
    }
    if (i->status && opening)
        tell_import(plan, i, "not open", kvq__ctl_text("were it imported: %s", opening));
    else if (!i->status)
        tell_import(plan, i, "import",
                    kvq__ctl_text("%s%s%s", kvq__ctl_count(i->tokens, "token"),
                                  opening ? "; it could not be opened: " : "",
                                  opening ? opening : ""));
}

// Ends as the import would.
int kvq__ctl_preview_import(struct kvq__ctl *ctl, char **args)
{
    const Kvq__ImportLook *look;
    int result = kvq__ctl_ask_import_look(ctl, args[0], &look);
    if (result)
        return result;
    struct import i = {.bytes = look->bytes, .tokens = look->tokens};
    snprintf(i.ns, sizeof i.ns, "%s", look->namespace_);
    snprintf(i.name, sizeof i.name, "%s", look->name);
    struct plan plan = begin(ctl);
    tell_look(&plan, look, &i);
    if (ctl->replace && !i.status)
        tell_all_saved(ctl, &plan, "replace", i.ns, i.name);
    end(&plan);
    return i.status ? kvq__ctl_exit_of(i.status) : KVQ_EXIT_OK;
}

// An element of the remote store's list, told if it is asked for. An exit status.
static int find_remote(struct kvq__ctl *ctl, const char *name, struct plan *plan, bool *found)
{
    struct kvq__ctl_list list;
    const char *given = ctl->ns;
    ctl->ns = ctl->from ? ctl->from : given ? given : own_namespace();
    int result = kvq__ctl_ask_remote(ctl, &list);
    ctl->ns = given;
    *found = false;
    for (size_t i = 0; result == KVQ_EXIT_OK && i < list.n; i++) {
        const Kvq__RemoteEntry *e = (const Kvq__RemoteEntry *)list.elements[i];
        if (strcmp(e->name, name) != 0)
            continue;
        *found = true;
        if (plan)
            tell(plan, &(struct item){
                           .action = "remove",
                           .what = "session on the remote store",
                           .ns = e->namespace_,
                           .name = e->name,
                           .bytes = e->bytes,
                           .note = "",
                       });
    }
    if (result == KVQ_EXIT_OK)
        kvq__ctl_list_free(&list);
    bool told = false;
    if (result || *found || kvq__ctl_complete_name(ctl, &told))
        return result ? result : *found ? KVQ_EXIT_OK : KVQ_EXIT_NOT_FOUND;
    return told ? KVQ_EXIT_NOT_FOUND
                : kvq__ctl_refused(KVQ_E_NO_SESSION,
                                   kvq__ctl_text("the remote store has no session \"%s\"", name));
}

int kvq__ctl_preview_pull(struct kvq__ctl *ctl, char **args)
{
    bool found;
    int result = find_remote(ctl, args[0], NULL, &found);
    if (result)
        return result;
    return preview_replace(ctl, ctl->ns ? ctl->ns : own_namespace(), ctl->as ? ctl->as : args[0]);
}

int kvq__ctl_preview_remove(struct kvq__ctl *ctl, char **args)
{
    bool found;
    struct plan plan = begin(ctl);
    int result = find_remote(ctl, args[0], &plan, &found);
    if (result)
        cJSON_Delete(plan.items);
    else
        end(&plan);
    return result;
}

// ---- Prefixes, limits, the storage, clients ----

int kvq__ctl_preview_prefix_drop(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list list;
    (void)args;
    int result = kvq__ctl_check_namespace(ctl);
    if (result == KVQ_EXIT_OK)
        result = kvq__ctl_ask_prefixes(ctl, &list);
    if (result)
        return result;
    struct plan plan = begin(ctl);
    for (size_t i = 0; i < list.n; i++) {
        const Kvq__PrefixStatus *p = (const Kvq__PrefixStatus *)list.elements[i];
        if ((!ctl->ns || strcmp(ctl->ns, p->namespace_) == 0) && p->idle_bytes)
            tell(&plan, &(struct item){.action = "drop",
                                       .what = "prefixes that no session has",
                                       .ns = "",
                                       .name = p->namespace_,
                                       .is_within = true,
                                       .bytes = p->idle_bytes,
                                       .note = ""});
    }
    kvq__ctl_list_free(&list);
    end(&plan);
    return KVQ_EXIT_OK;
}

static void tell_limit(struct plan *plan, const char *ns, int which, uint64_t before,
                       uint64_t after)
{
    static const char *const names[] = {"host-bytes", "device-bytes", "disk-bytes", "sessions",
                                        "table-bytes"};
    bool bytes = which != 3;
    const char *was = bytes ? kvq__ctl_bytes(before) : kvq__ctl_of(before, 0);
    const char *is = bytes ? kvq__ctl_bytes(after) : kvq__ctl_of(after, 0);
    const char *note = kvq__ctl_text("from %s to %s", before ? was : "none", after ? is : "none");
    if (!plan->ctl->json) {
        plan->n++;
        printf("would change limit %s of %s %s\n", names[which], kvq__ctl_clean(ns), note);
    } else {
        tell(plan, &(struct item){
                       .action = "change",
                       .what = "limit",
                       .ns = ns,
                       .name = names[which],
                       .bytes = 0,
                       .note = note,
                   });
    }
}

static void limits_of(const Kvq__Quota *q, uint64_t limits[5])
{
    limits[0] = q->host_bytes;
    limits[1] = q->device_bytes;
    limits[2] = q->disk_bytes;
    limits[3] = q->sessions;
    limits[4] = q->table_bytes;
}

static int preview_quota(struct kvq__ctl *ctl, char *ns, bool set)
{
    const Kvq__QuotaStatus *q;
    uint64_t before[5], after[5];
    int result = kvq__ctl_ask_quota(ctl, ns, &q);
    if (result)
        return result;
    struct plan plan = begin(ctl);
    if (q->limit && q->configured) {
        uint32_t which = set ? ctl->quota.which : q->which;
        limits_of(q->limit, before);
        limits_of(q->configured, after);
        for (int i = 0; i < 5; i++) {
            uint64_t next = set ? ctl->quota.limit[i] : after[i];
            if (which >> i & 1 && next != before[i])
                tell_limit(&plan, q->namespace_, i, before[i], next);
        }
    }
    end(&plan);
    return KVQ_EXIT_OK;
}

int kvq__ctl_preview_quota_set(struct kvq__ctl *ctl, char **args)
{
    int result = kvq__ctl_check_quota(ctl);
    return result ? result : preview_quota(ctl, args[0], true);
}

int kvq__ctl_preview_quota_delete(struct kvq__ctl *ctl, char **args)
{
    return preview_quota(ctl, args[0], false);
}

// gc removes what is empty. Which segments compaction takes is decided when it is done: bytes that
// nothing needs are the most that can go.
static int preview_tidy(struct kvq__ctl *ctl, bool compacts, const char *note)
{
    const Kvq__StorageReply *r;
    int result = kvq__ctl_ask_storage_status(ctl, &r);
    if (result)
        return result;
    struct plan plan = begin(ctl);
    uint64_t bytes = compacts ? r->dead_bytes : r->empty_bytes;
    if (bytes)
        tell(&plan, &(struct item){.action = "remove",
                                   .what = "what no session needs",
                                   .ns = "",
                                   .name = r->folder,
                                   .is_within = true,
                                   .bytes = bytes,
                                   .note = note});
    end(&plan);
    return KVQ_EXIT_OK;
}

int kvq__ctl_preview_gc(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    return preview_tidy(ctl, false, "in files that hold nothing else");
}

int kvq__ctl_preview_compact(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    return preview_tidy(ctl, true, "at most: a segment with little of it stays");
}

int kvq__ctl_preview_kick(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list clients, sessions;
    uint64_t id;
    int result = kvq__ctl_client_number(args[0], &id);
    if (result == KVQ_EXIT_OK)
        result = kvq__ctl_ask_clients(ctl, &clients);
    if (result)
        return result;
    struct plan plan = begin(ctl);
    for (size_t i = 0; i < clients.n; i++) {
        const Kvq__Client *c = (const Kvq__Client *)clients.elements[i];
        if (c->id == id)
            tell(&plan, &(struct item){
                            .action = "kick",
                            .what = "client",
                            .ns = "",
                            .name = c->name,
                            .bytes = c->buffer_bytes,
                            .note = kvq__ctl_text("pid %" PRIu64 "; what it opened with on_detach "
                                                  "drop goes with it",
                                                  c->pid),
                        });
    }
    kvq__ctl_list_free(&clients);
    if (plan.n == 0) {
        cJSON_Delete(plan.items);
        return kvq__ctl_refused(KVQ_E_NO_CLIENT, "no such client; kvqctl client list shows them");
    }
    ctl->ns = NULL;
    result = kvq__ctl_ask_sessions(ctl, &sessions);
    for (size_t i = 0; result == KVQ_EXIT_OK && i < sessions.n; i++) {
        const Kvq__Session *s = (const Kvq__Session *)sessions.elements[i];
        if (s->writer_client == id && !*s->name)
            tell_session(&plan, "drop", s, "");
    }
    if (result == KVQ_EXIT_OK)
        kvq__ctl_list_free(&sessions);
    end(&plan);
    return result;
}
