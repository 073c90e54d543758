// SPDX-License-Identifier: Apache-2.0
// Commands about sessions on disk: save, restore, export, import, and the store they are in.
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/status.h"
#include "storage/store.h"
#include "tools/kvqctl/commands.h"
#include "tools/kvqctl/table.h"

enum { LONG_MS = 3600000 }; // gigabytes take their time

// As long as it takes, unless --timeout says otherwise.
static int ask_long(struct kvq__ctl *ctl, Kvq__Request *request, Kvq__Reply__ResultCase expected,
                    Kvq__Reply **reply)
{
    if (!ctl->timeout_given)
        ctl->timeout_ms = LONG_MS;
    return kvq__ctl_ask(ctl, request, expected, reply);
}

// ---- Sessions ----

static int print_save(const struct kvq__ctl *ctl, const Kvq__SaveReply *r)
{
    if (ctl->json) {
        kvq__ctl_print_json(&r->base);
    } else if (r->unchanged) {
        printf("%s is saved already, with %s\n", kvq__ctl_clean(r->name),
               kvq__ctl_count(r->tokens, "token"));
    } else {
        printf("saved %s: %s, %s written in %s, %" PRIu64 " there before, %s\n",
               kvq__ctl_clean(r->name), kvq__ctl_count(r->tokens, "token"),
               kvq__ctl_bytes(r->written_bytes), kvq__ctl_count(r->written_blocks, "block"),
               r->kept_blocks, kvq__ctl_duration(r->ms));
    }
    return KVQ_EXIT_OK;
}

int kvq__ctl_session_save(struct kvq__ctl *ctl, char **args)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__SaveSession command = KVQ__SAVE_SESSION__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, args[0]);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_SAVE_SESSION;
    request.save_session = &command;
    command.which_case = KVQ__SAVE_SESSION__WHICH_REF;
    command.ref = &ref;
    command.again = ctl->again;
    int result = ask_long(ctl, &request, KVQ__REPLY__RESULT_SAVE, &reply);
    return result ? result : print_save(ctl, reply->save);
}

static int restore_shard(struct kvq__ctl *ctl, char *name, uint32_t shard)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__RestoreSession command = KVQ__RESTORE_SESSION__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, name);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_RESTORE_SESSION;
    request.restore_session = &command;
    command.ref = &ref;
    command.shard = shard;
    command.shards = ctl->shards;
    return ask_long(ctl, &request, KVQ__REPLY__RESULT__NOT_SET, &reply);
}

int kvq__ctl_session_restore(struct kvq__ctl *ctl, char **args)
{
    bool all = ctl->shard < 0 && ctl->shards > 0;
    uint32_t first = ctl->shard > 0 ? (uint32_t)ctl->shard : 0;
    int result = restore_shard(ctl, args[0], first);
    for (uint32_t i = 1; all && i < ctl->shards && result == KVQ_EXIT_OK; i++)
        result = restore_shard(ctl, args[0], i);
    if (result == KVQ_EXIT_OK)
        kvq__ctl_print_done(ctl, "restored", args[0]);
    return result;
}

// The daemon has another working directory. NULL, with a word on standard error: it is on another
// machine, where this folder says nothing.
static char *whole_path(const struct kvq__ctl *ctl, const char *path, char out[PATH_MAX])
{
    char folder[PATH_MAX];
    if (path[0] == '/')
        return (char *)path;
    if (ctl->connect) {
        kvq__ctl_bad_usage(
            "with --connect a FILE is one of the daemon's machine, and its path begins "
            "with /, unlike",
            path);
        return NULL;
    }
    if (!realpath(".", folder) || snprintf(out, PATH_MAX, "%s/%s", folder, path) >= PATH_MAX)
        return (char *)path;
    return out;
}

// The daemon has written a file. A service often has a /tmp of its own, a container all folders.
// An exit status: a script that goes on to drop the session must not do so without the file.
static int look_for_export(const struct kvq__ctl *ctl, const char *path)
{
    if (ctl->connect || access(path, F_OK) == 0 || errno != ENOENT)
        return KVQ_EXIT_OK;
    fprintf(stderr,
            "kvqctl: %s is not there for you: the daemon has another folder of that name, as a "
            "service with PrivateTmp=yes or in a container has; name one that both see\n",
            kvq__ctl_clean(path));
    return KVQ_EXIT_FAILED;
}

int kvq__ctl_session_export(struct kvq__ctl *ctl, char **args)
{
    char path[PATH_MAX];
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ExportSession command = KVQ__EXPORT_SESSION__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, args[0]);
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_EXPORT_SESSION;
    request.export_session = &command;
    command.ref = &ref;
    command.replace = ctl->replace;
    if (!(command.path = whole_path(ctl, args[1], path)))
        return KVQ_EXIT_USAGE;
    int result = ask_long(ctl, &request, KVQ__REPLY__RESULT_SAVE, &reply);
    result = result ? result : look_for_export(ctl, command.path);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&reply->save->base);
    else
        printf("exported %s, as it was saved with %s, to %s\n", kvq__ctl_clean(args[0]),
               kvq__ctl_count(reply->save->tokens, "token"), kvq__ctl_clean(command.path));
    return KVQ_EXIT_OK;
}

// Another command than an import, not an option of that: a daemon of an earlier release, which
// knows none of them, refuses it, and does not import.
int kvq__ctl_ask_import_look(struct kvq__ctl *ctl, char *file, const Kvq__ImportLook **look)
{
    char path[PATH_MAX];
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__LookAtImport command = KVQ__LOOK_AT_IMPORT__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, ctl->as ? (char *)ctl->as : "");
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_LOOK_AT_IMPORT;
    request.look_at_import = &command;
    command.ref = &ref;
    command.replace = ctl->replace;
    if (!(command.path = whole_path(ctl, file, path)))
        return KVQ_EXIT_USAGE;
    int result = ask_long(ctl, &request, KVQ__REPLY__RESULT_IMPORT_LOOK, &reply);
    if (result == KVQ_EXIT_OK)
        *look = reply->import_look;
    return result;
}

int kvq__ctl_session_import(struct kvq__ctl *ctl, char **args)
{
    char path[PATH_MAX];
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ImportSession command = KVQ__IMPORT_SESSION__INIT;
    Kvq__SessionRef ref = kvq__ctl_ref(ctl, ctl->as ? (char *)ctl->as : "");
    Kvq__Reply *reply;
    request.command_case = KVQ__REQUEST__COMMAND_IMPORT_SESSION;
    request.import_session = &command;
    command.ref = &ref;
    command.replace = ctl->replace;
    if (!(command.path = whole_path(ctl, args[0], path)))
        return KVQ_EXIT_USAGE;
    int result = ask_long(ctl, &request, KVQ__REPLY__RESULT_SAVE, &reply);
    if (result)
        return result;
    const Kvq__SaveReply *r = reply->save;
    if (ctl->json)
        kvq__ctl_print_json(&r->base);
    else
        printf("imported %s of %s: %s, %s in %s, %s\n", kvq__ctl_clean(r->name),
               kvq__ctl_clean(r->namespace_), kvq__ctl_count(r->tokens, "token"),
               kvq__ctl_bytes(r->written_bytes), kvq__ctl_count(r->written_blocks, "block"),
               kvq__ctl_duration(r->ms));
    return KVQ_EXIT_OK;
}

// ---- The store ----

static const char *label_text(const ProtobufCMessage *message)
{
    const Kvq__SavedEntry *e = (const Kvq__SavedEntry *)message;
    const char *name = kvq__ctl_clean(e->name);
    return e->shards > 1 ? kvq__ctl_text("%s %" PRIu32 "/%" PRIu32, name, e->shard, e->shards)
                         : name;
}

#define COLUMN(NAME, HEADING, FIELD, SHOW, WIDTH, APART, EXTRA)                                    \
    {                                                                                              \
        .name = (NAME), .heading = (HEADING), .field = (FIELD), .show = KVQ__CTL_AS_##SHOW,        \
        .width = (WIDTH), .apart = (APART), .extra = (EXTRA)                                       \
    }
static const struct kvq__ctl_column columns[] = {
    COLUMN("namespace", "NAMESPACE", "namespace", TEXT, -14, false, false),
    {.name = "name", .heading = "NAME", .field = "name", .people = label_text, .width = -20},
    COLUMN("tokens", "TOKENS", "tokens", NUMBER, 9, false, false),
    COLUMN("bytes", "BYTES", "bytes", BYTES, 11, false, false),
    COLUMN("saved", "SAVED", "saved_at", TIME, -16, true, false),
    COLUMN("used", "USED", "used_at", TIME, -16, true, false),
    COLUMN("formats", "FORMATS", "formats", TEXT, -7, true, false),
    COLUMN("model", "MODEL", "model", TEXT, -12, true, true),
    COLUMN("blocks", "BLOCKS", "blocks", NUMBER, 9, false, true),
    COLUMN("shard", "SHARD", "shard", NUMBER, 5, false, true),
    COLUMN("shards", "SHARDS", "shards", NUMBER, 6, false, true),
};

const struct kvq__ctl_table kvq__ctl_saved_sessions = {KVQ__CTL_TABLE(
    columns, "saved sessions", "nothing is saved", "nothing is saved of that namespace")};

static const struct kvq__ctl_kind saved = KVQ__CTL_KIND(
    SAVED, Kvq__SavedList, sessions, "saved sessions", "narrow it with --namespace NAME");

int kvq__ctl_ask_saved(struct kvq__ctl *ctl, struct kvq__ctl_list *list)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__ListSaved command = KVQ__LIST_SAVED__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_LIST_SAVED;
    request.list_saved = &command;
    if (ctl->ns)
        command.namespace_ = (char *)ctl->ns;
    return kvq__ctl_ask_list(ctl, &request, &command.cursor, &saved, list);
}

int kvq__ctl_storage_list(struct kvq__ctl *ctl, char **args)
{
    struct kvq__ctl_list list;
    (void)args;
    int result = kvq__ctl_ask_saved(ctl, &list);
    return result ? result : kvq__ctl_show_list(ctl, &list, &saved, &kvq__ctl_saved_sessions);
}

static int ask_storage(struct kvq__ctl *ctl, Kvq__StorageAction action, Kvq__Reply **reply)
{
    Kvq__Request request = KVQ__REQUEST__INIT;
    Kvq__Storage command = KVQ__STORAGE__INIT;
    request.command_case = KVQ__REQUEST__COMMAND_STORAGE;
    request.storage = &command;
    command.action = action;
    return ask_long(ctl, &request, KVQ__REPLY__RESULT_STORAGE, reply);
}

static void print_storage(const Kvq__StorageReply *r)
{
    printf("folder      %s\n", kvq__ctl_clean(r->folder));
    printf("sessions    %" PRIu64 " (each shard counts)\n", r->sessions);
    printf("blocks      %" PRIu64 ", %" PRIu64 " of them damaged\n", r->blocks, r->bad_blocks);
    printf("on disk     %s", kvq__ctl_bytes(r->physical_bytes));
    if (r->cap_bytes)
        printf(" of %s", kvq__ctl_bytes(r->cap_bytes));
    printf(", %s free on the file system\n", kvq__ctl_bytes(r->free_bytes));
    printf("segments    %" PRIu32 ": %s in use, %s to be had back by compacting\n", r->segments,
           kvq__ctl_bytes(r->live_bytes), kvq__ctl_bytes(r->dead_bytes));
    if (r->working[0])
        printf("working     %s, %" PRIu32 " more waiting to write\n", kvq__ctl_clean(r->working),
               r->queued);
    if (r->read_only)
        printf("READ ONLY   %s\n", kvq__ctl_clean(r->why));
}

int kvq__ctl_ask_storage_status(struct kvq__ctl *ctl, const Kvq__StorageReply **storage)
{
    Kvq__Reply *reply;
    int result = ask_storage(ctl, KVQ__STORAGE_ACTION__STORAGE_STATUS, &reply);
    if (result == KVQ_EXIT_OK)
        *storage = reply->storage;
    return result;
}

int kvq__ctl_storage_status(struct kvq__ctl *ctl, char **args)
{
    const Kvq__StorageReply *storage;
    (void)args;
    int result = kvq__ctl_ask_storage_status(ctl, &storage);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&storage->base);
    else
        print_storage(storage);
    return KVQ_EXIT_OK;
}

// lost: something was, that is not there any more to be read.
static int print_verified(const struct kvq__ctl *ctl, const Kvq__StorageReply *r, bool lost)
{
    bool bad = lost || r->damaged_bytes || r->missing_segments || r->bad_blocks || r->catalog_bad;
    if (ctl->json)
        kvq__ctl_print_json(&r->base);
    else if (!bad)
        printf("%s read in %s: all is good%s%s\n", kvq__ctl_bytes(r->verified_bytes),
               kvq__ctl_count(r->segments, "segment"), r->text && *r->text ? ". " : "",
               kvq__ctl_clean(r->text));
    else
        printf("%s read: %s\n%s lost tokens; opening one brings back what is good of it\n",
               kvq__ctl_bytes(r->verified_bytes), kvq__ctl_clean(r->text),
               kvq__ctl_count(r->cut_sessions, "session"));
    return bad ? KVQ_EXIT_PROBLEM : KVQ_EXIT_OK;
}

// As root, works on as the folder's owner: opening a store may mend it, and its daemon has to be
// able to open what is made. *folder becomes the way there, which the owner may not have.
static int act_as_owner(const char **folder)
{
    struct stat st;
    if (geteuid() != 0 || stat(*folder, &st) != 0 || st.st_uid == 0)
        return 0;
    if (chdir(*folder) || setgroups(0, NULL) || setegid(st.st_gid) || seteuid(st.st_uid))
        return -1;
    if (faccessat(AT_FDCWD, *folder, X_OK, AT_EACCESS)) // errors name it, if they can
        *folder = ".";
    return 0;
}

// Without a daemon. Opening the store mends it, so what it has found is not there to be verified.
static int verify_offline(struct kvq__ctl *ctl)
{
    const char *folder = ctl->offline;
    struct kvq_store *store;
    struct kvq_store_report found;
    struct kvq_store_verified v;
    struct kvq_store_status s;
    char text[KVQ_TEXT_BYTES] = "", all[2 * KVQ_TEXT_BYTES];
    Kvq__StorageReply r = KVQ__STORAGE_REPLY__INIT;
    const struct kvq_store_options options = {.existing_only = true};
    if (act_as_owner(&folder)) {
        fprintf(stderr, "kvqctl: cannot look at %s as its owner: %s\n", ctl->offline,
                strerror(errno));
        return KVQ_EXIT_FAILED;
    }
    int rc = kvq_store_open(folder, &options, &store, &found, text, sizeof text);
    if (rc < 0)
        return kvq__ctl_refused(rc, text);
    rc = kvq_store_verify(store, NULL, NULL, &v, text, sizeof text);
    rc = rc ? rc : kvq_store_status(store, &s, text, sizeof text);
    kvq_store_close(&store);
    if (rc < 0)
        return kvq__ctl_refused(rc, text);
    snprintf(all, sizeof all, "%s%s%s", found.text, found.text[0] && v.text[0] ? " " : "", v.text);
    r.folder = (char *)ctl->offline;
    r.sessions = s.sessions;
    r.blocks = s.blocks;
    r.bad_blocks = s.bad_blocks;
    r.segments = s.segments;
    r.verified_bytes = v.bytes;
    r.damaged_bytes = found.damaged_bytes + v.damaged_bytes;
    r.missing_segments = v.missing;
    r.cut_sessions = v.sessions;
    r.catalog_bad = v.catalog_bad;
    r.text = all;
    return print_verified(ctl, &r,
                          found.lost_sessions || found.bad_blocks || found.missing || found.aside ||
                              found.foreign);
}

int kvq__ctl_storage_verify(struct kvq__ctl *ctl, char **args)
{
    Kvq__Reply *reply;
    (void)args;
    if (ctl->offline)
        return verify_offline(ctl);
    int result = ask_storage(ctl, KVQ__STORAGE_ACTION__STORAGE_VERIFY, &reply);
    return result ? result : print_verified(ctl, reply->storage, false);
}

static int tidy(struct kvq__ctl *ctl, Kvq__StorageAction action)
{
    Kvq__Reply *reply;
    int result = ask_storage(ctl, action, &reply);
    if (result)
        return result;
    if (ctl->json)
        kvq__ctl_print_json(&reply->storage->base);
    else
        printf("%s freed in %s, %s moved together; %s on disk\n",
               kvq__ctl_bytes(reply->storage->freed_bytes),
               kvq__ctl_count(reply->storage->freed_segments, "segment"),
               kvq__ctl_bytes(reply->storage->moved_bytes),
               kvq__ctl_bytes(reply->storage->physical_bytes));
    return KVQ_EXIT_OK;
}

int kvq__ctl_storage_gc(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    return tidy(ctl, KVQ__STORAGE_ACTION__STORAGE_GC);
}

int kvq__ctl_storage_compact(struct kvq__ctl *ctl, char **args)
{
    (void)args;
    return tidy(ctl, KVQ__STORAGE_ACTION__STORAGE_COMPACT);
}
