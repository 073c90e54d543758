// SPDX-License-Identifier: Apache-2.0
//
// The commands that the store jobs take, and the short ones among them: those that drop, that only
// read, or that tidy.
#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/commands/dispatch.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"
#include "proto/sync.h"

enum { DEAD_PERCENT = 30, COMPACT_BYTES = 256 << 20 };

// ---- Dropping ----

static void delete_saved(struct kvq__task *t)
{
    struct kvq_store_freed freed;
    char text[KVQ_TEXT_BYTES] = "";
    int rc = kvq_store_delete(t->jobs->store, t->ns, t->name, text, sizeof text);
    if (rc == KVQ_E_NO_SESSION) // it was in memory alone, or nowhere: that is known already
        return;
    t->rc = rc;
    if (rc < 0)
        snprintf(t->text, sizeof t->text,
                 "session \"%s\" is out of memory, and what is saved of it is still on disk, from "
                 "where the next open brings it back; drop it again once this is mended: %.230s",
                 t->name, text);
    else
        kvq_store_gc(t->jobs->store, &freed, NULL, 0);
}

void kvq__jobs_keep(struct kvq__task *t)
{
    assert(t->hold.held && t->hold.kind == KVQ__HOLD_ALONE);
    kvq__park_keep(t->jobs->server->core, t->ns, t->name);
}

// Poller's thread: who is dropped, under the name that it is stored by.
static void find_dropped(struct kvq__task *t)
{
    const Kvq__DropSession *drop = t->request->drop_session;
    struct kvq__core *core = t->jobs->server->core;
    const Kvq__SessionRef *ref = drop->ref;
    struct kvq__session_info info = {0};
    int rc = KVQ_E_NO_SESSION, of_space;
    if (drop->which_case == KVQ__DROP_SESSION__WHICH_REF)
        rc = kvq__session_find(core, t->peer, ref->namespace_, ref->name, &info, NULL);
    else if (drop->which_case == KVQ__DROP_SESSION__WHICH_HANDLE && t->client)
        rc = kvq__session_info(t->client, drop->handle, &info, NULL);
    if (rc == 0) {
        snprintf(t->ns, sizeof t->ns, "%s", info.ns);
        snprintf(t->name, sizeof t->name, "%s", info.name);
    } else if (drop->which_case == KVQ__DROP_SESSION__WHICH_REF && ref->name[0] != '#') {
        of_space = kvq__namespace_check(core, t->peer, ref->namespace_, t->ns, NULL);
        if (of_space == KVQ_E_NO_NAMESPACE && ref->namespace_[0]) // it may be no more, but on disk
            snprintf(t->ns, sizeof t->ns, "%s", ref->namespace_);
        if (of_space == 0 || of_space == KVQ_E_NO_NAMESPACE)
            snprintf(t->name, sizeof t->name, "%s", ref->name);
    }
}

// Poller's thread, with the name held alone: nobody has it in memory again before it is gone from
// the store.
static void drop_in_memory(struct kvq__task *t)
{
    struct kvq__server *server = t->jobs->server;
    struct kvq__dispatch d = {.core = server->core,
                              .identity = &server->identity,
                              .peer = t->peer,
                              .client = t->client,
                              .now_ns = kvq_now_ns()};
    kvq__dispatch_run(&d, t->request, t->arena, t->reply);
    t->rc = t->reply->status;
    if (t->rc < 0)
        snprintf(t->text, sizeof t->text, "%s", t->reply->text);
}

// It may still be on disk where memory has none.
static bool is_refused(int rc)
{
    return rc < 0 && rc != KVQ_E_NO_SESSION && rc != KVQ_E_NO_NAMESPACE;
}

static void drop_everywhere(struct kvq__task *t)
{
    kvq__task_at_poller(t, find_dropped);
    if (t->name[0])
        kvq__task_take_name(t, KVQ__HOLD_ALONE);
    kvq__task_at_poller(t, drop_in_memory);
    if (!t->name[0] || is_refused(t->rc))
        return;
    kvq__reply_status(t->reply, t->arena, 0, "");
    kvq__task_take_turn(t);
    kvq__task_at_work(t, delete_saved);
    if (!is_refused(t->rc)) // else it is still there
        kvq__task_at_poller(t, kvq__jobs_keep);
}

// ---- What only reads, or tidies ----

static Kvq__StorageReply *storage_reply(struct kvq__task *t)
{
    struct kvq_store_status s;
    Kvq__StorageReply *r = kvq_arena_alloc(t->arena, sizeof *r);
    t->rc = r ? kvq_store_status(t->jobs->store, &s, t->text, sizeof t->text) : KVQ_E_NO_MEMORY;
    if (t->rc < 0)
        return NULL;
    kvq__storage_reply__init(r);
    r->folder = kvq_arena_text(t->arena, t->jobs->server->config.storage_dir);
    r->sessions = s.sessions;
    r->blocks = s.blocks;
    r->bad_blocks = s.bad_blocks;
    r->segments = s.segments;
    r->live_bytes = s.live_bytes;
    r->dead_bytes = s.dead_bytes;
    r->empty_bytes = s.empty_bytes;
    r->catalog_bytes = s.catalog_bytes;
    r->physical_bytes = s.physical_bytes;
    r->cap_bytes = s.cap_bytes;
    r->free_bytes = s.free_bytes;
    r->room_bytes = s.room_bytes;
    r->read_only = s.read_only;
    r->queued = t->queued;
    r->working = kvq_arena_text(t->arena, t->working);
    r->why = kvq_arena_text(t->arena, s.why);
    t->reply->storage = r;
    t->reply->result_case = KVQ__REPLY__RESULT_STORAGE;
    return r;
}

static void tell_store_status(struct kvq__task *t)
{
    storage_reply(t);
}

int kvq__jobs_look_for_end(void *context, uint64_t done, uint64_t all)
{
    const struct kvq__jobs *jobs = context;
    (void)done;
    (void)all;
    return kvq_word_load(&jobs->ended) != 0;
}

int kvq__jobs_look_for_leave(void *context, uint64_t done, uint64_t all)
{
    const struct kvq__jobs *jobs = context;
    (void)done;
    (void)all;
    return kvq_word_load(&jobs->leaving) != 0;
}

static void verify_store(struct kvq__task *t)
{
    struct kvq_store_verified v;
    int rc = kvq_store_verify(t->jobs->store, kvq__jobs_look_for_end, t->jobs, &v, t->text,
                              sizeof t->text);
    Kvq__StorageReply *r = rc == 0 ? storage_reply(t) : NULL;
    t->rc = rc ? rc : t->rc;
    if (!r)
        return;
    r->verified_bytes = v.bytes;
    r->damaged_bytes = v.damaged_bytes;
    r->missing_segments = v.missing;
    r->cut_sessions = v.sessions;
    r->catalog_bad = v.catalog_bad;
    r->text = kvq_arena_text(t->arena, v.text);
}

// One pass: for a large store compaction takes many.
static void tidy_pass(struct kvq__task *t)
{
    const Kvq__Storage *ask = t->request->storage;
    uint32_t percent = ask->dead_percent ? ask->dead_percent : DEAD_PERCENT;
    t->rc = ask->action == KVQ__STORAGE_ACTION__STORAGE_COMPACT
                ? kvq_store_compact(t->jobs->store, COMPACT_BYTES, percent, t->freed, t->text,
                                    sizeof t->text)
                : kvq_store_gc(t->jobs->store, t->freed, t->text, sizeof t->text);
}

static void tell_freed(struct kvq__task *t)
{
    Kvq__StorageReply *r = storage_reply(t);
    if (!r)
        return;
    r->freed_segments = t->freed->segments;
    r->freed_bytes = t->freed->bytes;
    r->moved_bytes = t->freed->moved;
}

// Saves have their turn between two passes, and a daemon that ends waits for one pass alone.
static void tidy_store(struct kvq__task *t)
{
    struct kvq_store_freed all = {0}, pass = {.more = true};
    while (t->rc == 0 && pass.more && !t->jobs->ended && !t->jobs->draining) {
        t->freed = &pass;
        kvq__task_take_turn(t);
        kvq__task_at_work(t, tidy_pass);
        kvq__task_end_turn(t);
        all.segments += pass.segments;
        all.bytes += pass.bytes;
        all.moved += pass.moved;
    }
    t->freed = &all;
    if (t->rc == 0)
        kvq__task_at_work(t, tell_freed);
    t->freed = NULL;
}

static void run_storage(struct kvq__task *t)
{
    // Names of sessions may be secrets.
    kvq__jobs_working(t->jobs, t->peer->admin, t->working, sizeof t->working, &t->queued);
    switch (t->request->storage->action) {
    case KVQ__STORAGE_ACTION__STORAGE_VERIFY:
        kvq__task_take_turn_of(t, &t->jobs->scans, "");
        kvq__task_at_work(t, verify_store);
        break;
    case KVQ__STORAGE_ACTION__STORAGE_GC:
    case KVQ__STORAGE_ACTION__STORAGE_COMPACT:
        if (t->request->storage->action == KVQ__STORAGE_ACTION__STORAGE_GC)
            t->doing = "removing empty segments";
        tidy_store(t);
        break;
    default:
        kvq__task_at_work(t, tell_store_status);
        break;
    }
}

// ---- To files and back ----

// What the store has of the session, all shards together.
static Kvq__SaveReply *save_reply(struct kvq__task *t)
{
    Kvq__SaveReply *r = kvq_arena_alloc(t->arena, sizeof *r);
    struct kvq_store_session s = {.shards = 1};
    if (!r)
        return NULL;
    kvq__save_reply__init(r);
    r->namespace_ = kvq_arena_text(t->arena, t->ns);
    r->name = kvq_arena_text(t->arena, t->name);
    for (uint32_t i = 0; i < s.shards; i++) {
        if (kvq_store_find(t->jobs->store, t->ns, t->name, i, &s, NULL, 0) < 0)
            break;
        r->tokens = s.tokens;
        r->written_blocks += s.blocks;
        r->written_bytes += s.bytes;
    }
    r->ms = (kvq_now_ns() - t->begun) / 1000000;
    t->reply->save = r;
    t->reply->result_case = KVQ__REPLY__RESULT_SAVE;
    return r;
}

// What is stored under a number was parked, and goes when its session ends.
int kvq__jobs_check_name(struct kvq__task *t, const char *name)
{
    if (name[0] != '#')
        return 0;
    snprintf(t->text, sizeof t->text,
             "\"%s\" is the number of a session without a name; only sessions with names are "
             "exported and imported",
             name);
    return KVQ_E_INVALID;
}

// Before all is written. Nobody's file that comes later is overwritten unasked either.
static int refuse_existing(struct kvq__task *t, const char *path)
{
    struct stat there;
    if (lstat(path, &there) != 0)
        return 0;
    snprintf(t->text, sizeof t->text, "%.400s is %s", path,
             stat(path, &there) == 0 && S_ISDIR(there.st_mode)
                 ? "a folder; name a file"
                 : "there already; give another name, or --replace, which overwrites it");
    return KVQ_E_EXISTS;
}

// Of one that a watcher has ended: the daemon alone does so, and only at its end.
static void say_leaving(struct kvq__task *t, const char *what)
{
    assert(t->rc == KVQ_E_CANCELLED && t->jobs->leaving);
    t->rc = KVQ_E_DRAINING;
    snprintf(t->text, sizeof t->text, "the daemon is shutting down; nothing is %s", what);
}

static void export_to_file(struct kvq__task *t)
{
    enum { TRIES = 3 }; // where it is saved again while it is exported
    const Kvq__ExportSession *ask = t->request->export_session;
    const struct kvq_store_watch watch = {kvq__jobs_look_for_end, t->jobs};
    t->begun = kvq_now_ns();
    int rc = kvq__jobs_check_name(t, t->name);
    if (rc == 0 && !ask->replace)
        rc = refuse_existing(t, ask->path);
    bool again = rc == 0;
    for (int tries = 0; tries < TRIES && again; tries++) {
        rc = kvq_store_export_watched(t->jobs->store, t->ns, t->name, ask->path, ask->replace,
                                      &watch, t->text, sizeof t->text);
        again = rc == KVQ_E_STALE;
    }
    t->rc = rc;
    if (t->rc == 0 && !save_reply(t))
        t->rc = KVQ_E_NO_MEMORY;
}

// Whose session it will be: the file's, unless somebody says otherwise.
static void name_imported(struct kvq__task *t)
{
    const Kvq__ImportSession *ask = t->request->import_session;
    const char *ns = ask->ref ? ask->ref->namespace_ : "", *name = ask->ref ? ask->ref->name : "";
    struct kvq_store_session of = {0};
    t->begun = kvq_now_ns();
    t->rc = kvq_store_exported(t->jobs->store, ask->path, &of, t->text, sizeof t->text);
    snprintf(t->ns, sizeof t->ns, "%s", ns[0] ? ns : of.space);
    snprintf(t->name, sizeof t->name, "%s", name[0] ? name : of.name);
    if (t->rc == 0)
        t->rc = kvq__jobs_check_name(t, t->name);
}

static int import_file(struct kvq__task *t)
{
    const Kvq__ImportSession *ask = t->request->import_session;
    const struct kvq_store_watch watch = {kvq__jobs_look_for_leave, t->jobs};
    return kvq_store_import_watched(t->jobs->store, ask->path, t->ns, t->name, ask->replace, &watch,
                                    t->text, sizeof t->text);
}

static void read_import(struct kvq__task *t)
{
    struct stat st;
    t->rc = import_file(t);
    if ((t->rc == KVQ_E_NO_SPACE || t->rc == KVQ_E_QUOTA) &&
        stat(t->request->import_session->path, &st) == 0) {
        t->written_bytes = (uint64_t)st.st_size;
        if (kvq__jobs_help(t, t->written_bytes))
            t->rc = import_file(t);
    }
    if (t->rc == 0 && !save_reply(t))
        t->rc = KVQ_E_NO_MEMORY;
}

// Poller's thread, with the name held alone.
static void refuse_if_in_memory(struct kvq__task *t)
{
    t->rc = kvq__jobs_refuse_here(t);
}

// Poller's thread.
static void check_namespace(struct kvq__task *t)
{
    char ns[KVQ_NAME_BYTES];
    snprintf(ns, sizeof ns, "%s", t->ns);
    t->rc = kvq__namespace_check(t->jobs->server->core, t->peer, ns, t->ns, t->text);
}

// Poller's thread. In a namespace that there is not nobody could open it, nor drop it.
void kvq__jobs_check_imported(struct kvq__task *t)
{
    check_namespace(t);
    size_t used = strlen(t->text);
    if (t->rc == KVQ_E_NO_NAMESPACE)
        snprintf(t->text + used, sizeof t->text - used,
                 "; import it into another one (--namespace), or add that section");
}

static void import_session(struct kvq__task *t)
{
    kvq__task_at_work(t, name_imported);
    if (t->rc == 0)
        kvq__task_at_poller(t, kvq__jobs_check_imported);
    if (t->rc < 0)
        return;
    kvq__task_take_name(t, KVQ__HOLD_ALONE);
    kvq__task_at_poller(t, refuse_if_in_memory);
    if (t->rc < 0)
        return;
    kvq__task_take_turn(t);
    t->rc = t->jobs->leaving ? KVQ_E_CANCELLED : 0; // before a file is opened that may be far away
    if (t->rc == 0)
        kvq__task_at_work(t, read_import);
    if (t->rc == KVQ_E_NO_SPACE && kvq__transfers_make_room(t, t->written_bytes))
        kvq__task_at_work(t, read_import);
    if (t->rc == 0)
        kvq__task_at_poller(t, kvq__jobs_keep);
    if (t->rc == KVQ_E_CANCELLED)
        say_leaving(t, "imported");
}

int kvq__jobs_refuse_here(struct kvq__task *t)
{
    struct kvq__session_info info;
    if (kvq__session_find(t->jobs->server->core, t->peer, t->ns, t->name, &info, NULL) < 0)
        return 0;
    snprintf(t->text, sizeof t->text,
             "session \"%s\" of \"%s\" is in memory, or parked for it, and is not replaced there: "
             "drop it, or use another name",
             t->name, t->ns);
    return KVQ_E_EXISTS;
}

// ---- Sessions that may be on disk alone ----

void kvq__jobs_resolve(struct kvq__task *t, const char *ns, const char *name)
{
    snprintf(t->ns, sizeof t->ns, "%s", ns);
    snprintf(t->name, sizeof t->name, "%s", name);
    kvq__task_at_poller(t, check_namespace);
}

static void save_session(struct kvq__task *t)
{
    t->again = t->request->save_session->again;
    kvq__jobs_save(t);
}

static void restore_session(struct kvq__task *t)
{
    const Kvq__SessionRef *ref = t->request->restore_session->ref;
    kvq__jobs_resolve(t, ref ? ref->namespace_ : "", ref ? ref->name : "");
    if (t->rc == 0)
        kvq__jobs_restore(t);
}

static void export_session(struct kvq__task *t)
{
    const Kvq__SessionRef *ref = t->request->export_session->ref;
    kvq__jobs_resolve(t, ref ? ref->namespace_ : "", ref ? ref->name : "");
    if (t->rc == 0) {
        kvq__task_take_turn_of(t, &t->jobs->scans, t->ns);
        kvq__task_at_work(t, export_to_file);
    }
    if (t->rc == KVQ_E_CANCELLED)
        say_leaving(t, "exported");
}

static void drain_daemon(struct kvq__task *t)
{
    struct kvq__server *server = t->jobs->server;
    Kvq__DrainReply *r = kvq_arena_alloc(t->arena, sizeof *r);
    uint64_t meant = t->request->drain->epoch;
    t->rc = !r ? KVQ_E_NO_MEMORY : server->end ? 0 : KVQ_E_UNSUPPORTED;
    if (t->rc == 0 && meant && meant != server->identity.epoch) {
        t->rc = KVQ_E_EPOCH;
        snprintf(t->text, sizeof t->text, "the daemon that was to end is gone; this is another");
    }
    if (t->rc < 0)
        return;
    server->end(server, t->request->drain->now);
    kvq__drain_reply__init(r);
    r->phase = server->drain.phase;
    r->complete = server->drain.complete;
    r->saved = server->drain.saved;
    r->not_saved = server->drain.not_saved;
    r->unsaved = server->drain.unsaved;
    t->reply->drain = r;
    t->reply->result_case = KVQ__REPLY__RESULT_DRAIN;
}

// ---- The table ----

// STORE: the store on disk. DESK: the remote store. LASTING_STORE and REMOTE are STORE and DESK of
// a daemon that is not shutting down.
enum needs { NOTHING, STORE, LASTING_STORE, DESK, REMOTE };

struct command {
    void (*run)(struct kvq__task *task);
    enum needs needs;
    const char *doing; // of a task that writes; NULL: it says so itself
    bool (*takes)(const struct kvq__jobs *jobs, const Kvq__Request *r); // NULL: always
    bool (*is_for_admins)(const Kvq__Request *r);                       // NULL: it never is
};

static bool always(const Kvq__Request *r)
{
    (void)r;
    return true;
}

// Its status may be asked for by everybody.
static bool is_storage_action(const Kvq__Request *r)
{
    return r->storage->action != 0;
}

static bool takes_drop(const struct kvq__jobs *jobs, const Kvq__Request *r)
{
    (void)r;
    return jobs->store != NULL;
}

// The store may have tokens of a session with a name, and pages of a prefix that fills one.
static bool takes_open(const struct kvq__jobs *jobs, const Kvq__Request *r)
{
    const Kvq__OpenSession *open = r->open_session;
    bool asks_for_a_page = open->prefix && open->prefix->tokens >= KVQ_BLOCK_TOKENS;
    return (jobs->store && open->name[0]) || asks_for_a_page;
}

#define COMMAND(name) [KVQ__REQUEST__COMMAND_##name]

static const struct command commands[] = {
    COMMAND(OPEN_SESSION) = {.run = kvq__jobs_open_session, .takes = takes_open},
    COMMAND(LOOKUP_PREFIX) = {.run = kvq__jobs_lookup},
    COMMAND(DROP_SESSION) = {.run = drop_everywhere,
                             .needs = STORE,
                             .doing = "deleting",
                             .takes = takes_drop},
    COMMAND(SAVE_SESSION) = {.run = save_session, .needs = STORE, .doing = "saving"},
    COMMAND(RESTORE_SESSION) = {.run = restore_session, .needs = STORE},
    COMMAND(EXPORT_SESSION) = {.run = export_session, .needs = STORE, .is_for_admins = always},
    COMMAND(IMPORT_SESSION) = {.run = import_session,
                               .needs = LASTING_STORE,
                               .doing = "importing",
                               .is_for_admins = always},
    COMMAND(
        LOOK_AT_IMPORT) = {.run = kvq__jobs_look, .needs = LASTING_STORE, .is_for_admins = always},
    COMMAND(LIST_SAVED) = {.run = kvq__jobs_list, .needs = STORE},
    COMMAND(STORAGE) = {.run = run_storage,
                        .needs = STORE,
                        .doing = "compacting",
                        .is_for_admins = is_storage_action},
    COMMAND(SET_QUOTA) = {.run = kvq__jobs_set_quota},
    COMMAND(DELETE_QUOTA) = {.run = kvq__jobs_set_quota},
    COMMAND(PUSH_SESSION) = {.run = kvq__jobs_push, .needs = REMOTE},
    COMMAND(PULL_SESSION) = {.run = kvq__jobs_pull, .needs = REMOTE},
    COMMAND(LIST_REMOTE) = {.run = kvq__jobs_list_remote, .needs = REMOTE},
    COMMAND(REMOVE_REMOTE) = {.run = kvq__jobs_remove_remote, .needs = REMOTE},
    COMMAND(ASK_TRANSFER) = {.run = kvq__jobs_ask_transfer, .needs = DESK},
    COMMAND(CANCEL_TRANSFER) = {.run = kvq__jobs_cancel_transfer, .needs = REMOTE},
    COMMAND(REMOTE_STATUS) = {.run = kvq__jobs_remote_status, .needs = REMOTE},
    COMMAND(GET_CONFIG) = {.run = kvq__jobs_get_config, .is_for_admins = always},
    COMMAND(SET_CONFIG) = {.run = kvq__jobs_set_config, .is_for_admins = always},
    COMMAND(DRAIN) = {.run = drain_daemon, .is_for_admins = always},
    COMMAND(RELOAD_CONFIG) = {.run = kvq__jobs_reload_config, .is_for_admins = always},
    COMMAND(LOOK_AT_RELOAD) = {.run = kvq__jobs_look_at_reload, .is_for_admins = always},
};

static const struct command *find_job_command(Kvq__Request__CommandCase command)
{
    bool inside = (size_t)command < sizeof commands / sizeof *commands;
    return inside && commands[command].run ? &commands[command] : NULL;
}

bool kvq__jobs_knows(Kvq__Request__CommandCase command)
{
    return find_job_command(command) != NULL;
}

bool kvq__jobs_takes(const struct kvq__jobs *jobs, const Kvq__Request *r)
{
    const struct command *command = find_job_command(r->command_case);
    return command && (!command->takes || command->takes(jobs, r));
}

const char *kvq__jobs_doing(const struct kvq__task *t)
{
    const struct command *command = t->request ? find_job_command(t->request->command_case) : NULL;
    if (t->doing)
        return t->doing;
    if (!t->request) // a save of the store jobs' own
        return "saving";
    return command && command->doing ? command->doing : "writing";
}

// 0, or why the task is not begun, with a text.
static int check_command(struct kvq__task *t, const struct command *command)
{
    const struct kvq__jobs *jobs = t->jobs;
    bool lasts = command->needs == LASTING_STORE || command->needs == REMOTE;
    const char *why = NULL;
    int code = 0;
    if (jobs->ended) {
        code = KVQ_E_DRAINING;
        why = "the daemon is shutting down";
    } else if (command->needs >= DESK && !jobs->desk) {
        return kvq__jobs_refuse_remote(t);
    } else if (lasts && jobs->server->draining) {
        code = KVQ_E_DRAINING;
        why = command->needs == REMOTE ? "the daemon is shutting down; nothing is transferred"
                                       : "the daemon is shutting down; nothing is imported";
    } else if (command->needs >= STORE && !jobs->store) {
        code = KVQ_E_UNSUPPORTED;
        why = "this daemon saves no sessions; set storage_dir in its configuration";
    } else if (command->is_for_admins && command->is_for_admins(t->request) && !t->peer->admin) {
        code = KVQ_E_PERMISSION;
        why = "this takes a role that the user does not have"; // which, the control socket says
    }
    snprintf(t->text, sizeof t->text, "%s", why ? why : "");
    return code;
}

void kvq__jobs_start(struct kvq__jobs *jobs, struct kvq__task *t)
{
    const struct command *command = find_job_command(t->request->command_case);
    assert(command && t->done && t->reply);
    t->jobs = jobs;
    t->rc = check_command(t, command);
    if (t->rc == 0)
        t->rc = kvq__task_make(jobs, t);
    if (t->rc == 0) {
        kvq__task_start(t, command->run);
    } else {
        kvq__reply_status(t->reply, t->arena, t->rc, t->text);
        t->done(t);
    }
}
