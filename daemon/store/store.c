// SPDX-License-Identifier: Apache-2.0
//
// See store.h: the queue of those who write, the commands that only read or tidy, and when
// sessions are saved without being asked for.
#include "daemon/store/store.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/log/log.h"
#include "daemon/runtime/events.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

enum { TICK_MS = 500, DEAD_PERCENT = 30, COMPACT_BYTES = 256 << 20 };

void kvq__jobs_tell(struct kvq__jobs *jobs, enum kvq__event_kind kind, const char *ns,
                    const char *name, const char *text)
{
    struct kvq__event event = {kind, ns, name, 0, text};
    kvq__event_tell(jobs->server, &event);
}

static void finish(uv_work_t *work, int status)
{
    (void)status;
    kvq__task_end(kvq__task_of(work));
}

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

static void go_delete(struct kvq__task *t)
{
    kvq__task_to_work(t, delete_saved, finish);
}

static void dropped(struct kvq__task *t)
{
    if (t->name[0] && (t->rc == 0 || t->rc == KVQ_E_NO_SESSION)) {
        kvq__reply_status(t->reply, t->arena, 0, "");
        kvq__task_queue(t, go_delete);
    } else {
        kvq__task_end(t);
    }
}

// Poller's thread: who is dropped, under the name that it is stored by.
static void name_dropped(struct kvq__task *t, const Kvq__DropSession *drop)
{
    struct kvq__core *core = t->jobs->server->core;
    const Kvq__SessionRef *ref = drop->ref;
    struct kvq__session_info info = {0};
    int rc = KVQ_E_NO_SESSION;
    if (drop->which_case == KVQ__DROP_SESSION__WHICH_REF)
        rc = kvq__session_find(core, t->peer, ref->namespace_, ref->name, &info, NULL);
    else if (drop->which_case == KVQ__DROP_SESSION__WHICH_HANDLE && t->client)
        rc = kvq__session_info(t->client, drop->handle, &info, NULL);
    if (rc == 0) {
        snprintf(t->ns, sizeof t->ns, "%s", info.ns);
        snprintf(t->name, sizeof t->name, "%s", info.name);
    } else if (drop->which_case == KVQ__DROP_SESSION__WHICH_REF && ref->name[0] != '#' &&
               kvq__namespace_check(core, t->peer, ref->namespace_, t->ns, NULL) == 0) {
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
    kvq__task_to_loop(t, dropped);
}

static void go_drop(struct kvq__task *t)
{
    kvq__task_to_poller(t, drop_in_memory);
}

static void take_dropped(struct kvq__task *t)
{
    if (t->name[0])
        kvq__task_name(t, KVQ__HOLD_ALONE, go_drop);
    else
        go_drop(t);
}

static void start_drop(struct kvq__task *t)
{
    name_dropped(t, t->request->drop_session);
    kvq__task_to_loop(t, take_dropped);
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
    r->catalog_bytes = s.catalog_bytes;
    r->physical_bytes = s.physical_bytes;
    r->cap_bytes = s.cap_bytes;
    r->free_bytes = s.free_bytes;
    r->read_only = s.read_only;
    r->queued = t->queued;
    r->working = kvq_arena_text(t->arena, t->working);
    r->why = kvq_arena_text(t->arena, s.why);
    t->reply->storage = r;
    t->reply->result_case = KVQ__REPLY__RESULT_STORAGE;
    return r;
}

static void tell_status(struct kvq__task *t)
{
    storage_reply(t);
}

static void verify(struct kvq__task *t)
{
    struct kvq_store_verified v;
    int rc = kvq_store_verify(t->jobs->store, NULL, NULL, &v, t->text, sizeof t->text);
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

static void tidy(struct kvq__task *t)
{
    struct kvq_store_freed freed = {0}, all = {0};
    const Kvq__Storage *ask = t->request->storage;
    bool compact = ask->action == KVQ__STORAGE_ACTION__STORAGE_COMPACT;
    uint32_t percent = ask->dead_percent ? ask->dead_percent : DEAD_PERCENT;
    int rc;
    do {
        rc = compact ? kvq_store_compact(t->jobs->store, COMPACT_BYTES, percent, &freed, t->text,
                                         sizeof t->text)
                     : kvq_store_gc(t->jobs->store, &freed, t->text, sizeof t->text);
        all.segments += freed.segments;
        all.bytes += freed.bytes;
        all.moved += freed.moved;
    } while (rc == 0 && freed.more);
    Kvq__StorageReply *r = rc == 0 ? storage_reply(t) : NULL;
    t->rc = rc ? rc : t->rc;
    if (!r)
        return;
    r->freed_segments = all.segments;
    r->freed_bytes = all.bytes;
    r->moved_bytes = all.moved;
}

static void go_tidy(struct kvq__task *t)
{
    kvq__task_to_work(t, tidy, finish);
}

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
static int check_stored_name(struct kvq__task *t, const char *name)
{
    if (name[0] != '#')
        return 0;
    snprintf(t->text, sizeof t->text,
             "\"%s\" is the number of a session without a name; only sessions with names are "
             "exported and imported",
             name);
    return KVQ_E_INVALID;
}

static void export_session(struct kvq__task *t)
{
    t->begun = kvq_now_ns();
    t->rc = check_stored_name(t, t->name);
    if (t->rc == 0)
        t->rc = kvq_store_export(t->jobs->store, t->ns, t->name, t->request->export_session->path,
                                 t->text, sizeof t->text);
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
        t->rc = check_stored_name(t, t->name);
}

static void import_session(struct kvq__task *t)
{
    const Kvq__ImportSession *ask = t->request->import_session;
    t->rc = kvq_store_import(t->jobs->store, ask->path, t->ns, t->name, ask->replace, t->text,
                             sizeof t->text);
    if (t->rc == 0 && !save_reply(t))
        t->rc = KVQ_E_NO_MEMORY;
}

static void go_import(struct kvq__task *t)
{
    kvq__task_to_work(t, import_session, finish);
}

static void import_if_away(struct kvq__task *t)
{
    if (t->rc < 0)
        kvq__task_end(t);
    else
        kvq__task_queue(t, go_import);
}

// Poller's thread, with the name held alone.
static void look_in_memory(struct kvq__task *t)
{
    t->rc = kvq__jobs_refuse_here(t);
    kvq__task_to_loop(t, import_if_away);
}

static void go_look_in_memory(struct kvq__task *t)
{
    kvq__task_to_poller(t, look_in_memory);
}

static void imported_name(uv_work_t *work, int status)
{
    struct kvq__task *t = kvq__task_of(work);
    (void)status;
    if (t->rc < 0)
        kvq__task_end(t);
    else
        kvq__task_name(t, KVQ__HOLD_ALONE, go_look_in_memory);
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

// ---- Commands ----

static bool asks_for_a_page(const Kvq__OpenSession *open)
{
    return open->prefix && open->prefix->tokens >= KVQ_BLOCK_TOKENS;
}

bool kvq__jobs_takes(const struct kvq__jobs *jobs, const Kvq__Request *r)
{
    switch (r->command_case) {
    case KVQ__REQUEST__COMMAND_SAVE_SESSION:
    case KVQ__REQUEST__COMMAND_RESTORE_SESSION:
    case KVQ__REQUEST__COMMAND_EXPORT_SESSION:
    case KVQ__REQUEST__COMMAND_IMPORT_SESSION:
    case KVQ__REQUEST__COMMAND_LIST_SAVED:
    case KVQ__REQUEST__COMMAND_STORAGE:
    case KVQ__REQUEST__COMMAND_SET_QUOTA:
    case KVQ__REQUEST__COMMAND_DELETE_QUOTA:
        return true;
    case KVQ__REQUEST__COMMAND_OPEN_SESSION:
        return (jobs->store && r->open_session->name[0]) || asks_for_a_page(r->open_session);
    case KVQ__REQUEST__COMMAND_LOOKUP_PREFIX:
        return true;
    case KVQ__REQUEST__COMMAND_DROP_SESSION:
        return jobs->store != NULL;
    default:
        return kvq__jobs_remote_takes(r);
    }
}

static int refuse(struct kvq__task *t, int code, const char *text)
{
    snprintf(t->text, sizeof t->text, "%s", text);
    t->rc = code;
    kvq__task_end(t);
    return code;
}

// On the poller's thread, for commands that name a session which may be on disk alone.
static void named(struct kvq__task *t)
{
    if (t->rc < 0)
        kvq__task_end(t);
    else if (t->request->command_case == KVQ__REQUEST__COMMAND_LIST_SAVED)
        kvq__task_to_work(t, kvq__jobs_list, finish);
    else if (t->request->command_case == KVQ__REQUEST__COMMAND_EXPORT_SESSION)
        kvq__task_to_work(t, export_session, finish);
    else
        kvq__jobs_restore(t);
}

static void check_namespace(struct kvq__task *t)
{
    char ns[KVQ_NAME_BYTES];
    snprintf(ns, sizeof ns, "%s", t->ns);
    t->rc = kvq__namespace_check(t->jobs->server->core, t->peer, ns, t->ns, t->text);
    kvq__task_to_loop(t, named);
}

static void name_it(struct kvq__task *t, const Kvq__SessionRef *ref)
{
    snprintf(t->ns, sizeof t->ns, "%s", ref ? ref->namespace_ : "");
    snprintf(t->name, sizeof t->name, "%s", ref ? ref->name : "");
    kvq__task_to_poller(t, check_namespace);
}

static void start_storage(struct kvq__task *t)
{
    kvq__jobs_working(t->jobs, t->working, sizeof t->working, &t->queued);
    switch (t->request->storage->action) {
    case KVQ__STORAGE_ACTION__STORAGE_VERIFY:
        kvq__task_to_work(t, verify, finish);
        break;
    case KVQ__STORAGE_ACTION__STORAGE_GC:
    case KVQ__STORAGE_ACTION__STORAGE_COMPACT:
        kvq__task_queue(t, go_tidy);
        break;
    default:
        kvq__task_to_work(t, tell_status, finish);
        break;
    }
}

// Of these memory alone may know all.
static bool is_about_prefixes(const Kvq__Request *r)
{
    return r->command_case == KVQ__REQUEST__COMMAND_LOOKUP_PREFIX ||
           r->command_case == KVQ__REQUEST__COMMAND_OPEN_SESSION;
}

// These need no store.
static bool is_about_quotas(const Kvq__Request *r)
{
    return r->command_case == KVQ__REQUEST__COMMAND_SET_QUOTA ||
           r->command_case == KVQ__REQUEST__COMMAND_DELETE_QUOTA;
}

static bool is_for_admins(const Kvq__Request *r)
{
    return r->command_case == KVQ__REQUEST__COMMAND_EXPORT_SESSION ||
           r->command_case == KVQ__REQUEST__COMMAND_IMPORT_SESSION ||
           (r->command_case == KVQ__REQUEST__COMMAND_STORAGE && r->storage->action != 0);
}

static void start(struct kvq__task *t)
{
    const Kvq__Request *r = t->request;
    switch (r->command_case) {
    case KVQ__REQUEST__COMMAND_OPEN_SESSION:
        kvq__jobs_open_session(t);
        break;
    case KVQ__REQUEST__COMMAND_LOOKUP_PREFIX:
        kvq__jobs_lookup(t);
        break;
    case KVQ__REQUEST__COMMAND_DROP_SESSION:
        kvq__task_to_poller(t, start_drop);
        break;
    case KVQ__REQUEST__COMMAND_SAVE_SESSION:
        t->again = r->save_session->again;
        kvq__jobs_save(t);
        break;
    case KVQ__REQUEST__COMMAND_RESTORE_SESSION:
        name_it(t, r->restore_session->ref);
        break;
    case KVQ__REQUEST__COMMAND_EXPORT_SESSION:
        name_it(t, r->export_session->ref);
        break;
    case KVQ__REQUEST__COMMAND_IMPORT_SESSION:
        kvq__task_to_work(t, name_imported, imported_name);
        break;
    case KVQ__REQUEST__COMMAND_LIST_SAVED:
        if ((t->rc = kvq__jobs_list_check(t)) < 0) {
            kvq__task_end(t);
            break;
        }
        if (t->peer->admin && !r->list_saved->namespace_[0]) {
            kvq__task_to_work(t, kvq__jobs_list, finish);
            break;
        }
        snprintf(t->ns, sizeof t->ns, "%s", r->list_saved->namespace_);
        kvq__task_to_poller(t, check_namespace);
        break;
    default:
        start_storage(t);
        break;
    }
}

void kvq__jobs_start(struct kvq__jobs *jobs, struct kvq__task *t)
{
    t->jobs = jobs;
    t->rc = 0;
    t->text[0] = t->ns[0] = t->name[0] = 0;
    t->writes = t->own = t->again = t->unchanged = t->quiet = false;
    t->looked_again = false;
    t->doing = NULL;
    t->working[0] = 0;
    t->queued = 0;
    t->stored = 0;
    t->save = NULL;
    t->found = NULL;
    t->loading = t->reading = NULL;
    t->transfer = NULL;
    t->job = NULL;
    t->hold = (struct kvq__hold){0};
    t->turn = (struct kvq__write_turn){0};
    t->ask = NULL;
    t->pages = 0;
    jobs->n_tasks++;
    if (jobs->ended)
        refuse(t, KVQ_E_DRAINING, "the daemon is shutting down");
    else if (kvq__jobs_remote_takes(t->request))
        kvq__jobs_remote(t);
    else if (is_about_quotas(t->request))
        kvq__jobs_set_quota(t);
    else if (!jobs->store && !is_about_prefixes(t->request))
        refuse(t, KVQ_E_UNSUPPORTED,
               "this daemon saves no sessions; set storage_dir in its configuration");
    else if (is_for_admins(t->request) && !t->peer->admin)
        refuse(t, KVQ_E_PERMISSION,
               "only root and the daemon's own user may do this: it reads or writes files of the "
               "daemon's, or what is everybody's");
    else
        start(t);
}

// ---- Saves that nobody asks for ----

static const struct kvq__peer self = {.admin = true};

static void end_own(struct kvq__task *t)
{
    struct kvq__jobs *jobs = t->jobs;
    jobs->n_own--;
    free(t);
    kvq__jobs_drain_on(jobs);
}

static void save_one(struct kvq__jobs *jobs, const struct kvq__unsaved *u)
{
    struct kvq__task *t = calloc(1, sizeof *t);
    if (!t)
        return;
    t->jobs = jobs;
    t->peer = &self;
    t->own = true;
    t->done = end_own;
    snprintf(t->ns, sizeof t->ns, "%s", u->ns);
    snprintf(t->name, sizeof t->name, "%s", u->name);
    jobs->n_tasks++;
    jobs->n_own++;
    kvq__jobs_save(t);
}

static struct kvq__jobs *of_unsaved(struct kvq__mail *mail)
{
    return (struct kvq__jobs *)((char *)mail - offsetof(struct kvq__jobs, unsaved_mail));
}

static void told(struct kvq__mail *mail)
{
    struct kvq__jobs *jobs = of_unsaved(mail);
    uint32_t n = jobs->n_unsaved;
    jobs->asking = false;
    if (jobs->ended || jobs->draining)
        n = 0;
    for (uint32_t i = 0; i < n && i < KVQ__KEEPER_UNSAVED; i++)
        save_one(jobs, &jobs->unsaved[i]);
    kvq__jobs_drain_on(jobs);
}

// Poller's thread.
static void ask(struct kvq__mail *mail)
{
    struct kvq__jobs *jobs = of_unsaved(mail);
    const struct kvq__server *server = jobs->server;
    jobs->n_unsaved =
        kvq__core_unsaved(server->core, jobs->which, server->config.save_idle_seconds * 1000000000,
                          jobs->unsaved, KVQ__KEEPER_UNSAVED);
    kvq__mailbox_post(&jobs->server->box, mail, told);
}

static void look(struct kvq__jobs *jobs, uint32_t which)
{
    if (jobs->asking)
        return;
    jobs->which = which;
    jobs->asking = true;
    kvq__mailbox_post(kvq__poller_box(jobs->server->poller), &jobs->unsaved_mail, ask);
}

static void on_tick(uv_timer_t *timer)
{
    struct kvq__jobs *jobs = timer->data;
    bool idle = jobs->server->config.save_idle_seconds > 0;
    if (jobs->n_own == 0 && !jobs->draining)
        look(jobs, KVQ__UNSAVED_LEFT | (idle ? KVQ__UNSAVED_IDLE : 0));
    kvq__jobs_tidy(jobs);
}

// ---- Opening and closing ----

static int open_store(struct kvq__jobs *jobs, char *text)
{
    const struct kvq_config *c = &jobs->server->config;
    struct kvq_store_options options = {.cap_bytes = c->storage_bytes};
    struct kvq_store_report report;
    char why[KVQ_TEXT_BYTES], quoted[KVQ_TEXT_BYTES + 16];
    int rc = kvq_store_open(c->storage_dir, &options, &jobs->store, &report, why, sizeof why);
    if (rc < 0) {
        snprintf(text, KVQ_TEXT_BYTES, "storage_dir: %.460s", why);
        return rc;
    }
    if (report.text[0])
        kvq__log(KVQ_LOG_WARN, "storage", "dir=%s text=%s", c->storage_dir,
                 kvq__log_quote(quoted, sizeof quoted, report.text));
    else
        kvq__log(KVQ_LOG_INFO, "storage", "dir=%s created=%s", c->storage_dir,
                 report.created ? "yes" : "no");
    if (kvq__jobs_sweep(jobs->store, why) < 0) // they take room, and do no harm
        kvq__log(KVQ_LOG_WARN, "storage", "dir=%s text=%s", c->storage_dir,
                 kvq__log_quote(quoted, sizeof quoted, why));
    return 0;
}

// Without one that lasts a random one does, until the daemon ends.
static void use_key(struct kvq__jobs *jobs)
{
    const char *folder = jobs->server->config.storage_dir;
    char text[KVQ_TEXT_BYTES] = "", quoted[KVQ_TEXT_BYTES + 16];
    uint8_t key[KVQ_PREFIX_BYTES];
    if (kvq__prefix_key(folder, key, text) == 0)
        kvq__core_prefix_key(jobs->server->core, key);
    else
        kvq__log(KVQ_LOG_WARN, "prefix_key",
                 "dir=%s text=%s effect=\"prefixes that are stored are not found\"", folder,
                 kvq__log_quote(quoted, sizeof quoted, text));
}

int kvq__jobs_open(struct kvq__server *server, struct kvq__jobs **out, char *text)
{
    struct kvq__jobs *jobs = calloc(1, sizeof *jobs);
    *out = jobs;
    if (!jobs) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
        return KVQ_E_NO_MEMORY;
    }
    jobs->server = server;
    kvq__names_init(&jobs->names);
    kvq__turns_init(&jobs->turns, 1, 1);
    kvq__turns_init(&jobs->reads, KVQ__READ_AT_ONCE, KVQ__READ_AT_ONCE_OF);
    TAILQ_INIT(&jobs->aside);
    TAILQ_INIT(&jobs->loadings);
    TAILQ_INIT(&jobs->beginning);
    TAILQ_INIT(&jobs->waiting);
    TAILQ_INIT(&jobs->roomless);
    bool stores = server->config.storage_dir[0] != 0;
    int rc = stores ? open_store(jobs, text) : 0;
    rc = rc ? rc : kvq__jobs_quotas_open(jobs, text);
    rc = rc || !stores ? rc : kvq__jobs_remote_open(jobs, text);
    if (rc < 0 || !stores)
        return rc;
    use_key(jobs);
    uv_timer_init(&server->loop, &jobs->retry);
    uv_timer_init(&server->loop, &jobs->tick);
    uv_timer_init(&server->loop, &jobs->room);
    jobs->retry.data = jobs->tick.data = jobs->room.data = jobs;
    uv_timer_start(&jobs->tick, on_tick, TICK_MS, TICK_MS);
    jobs->timers = jobs->untidy = true;
    return 0;
}

bool kvq__jobs_idle(const struct kvq__jobs *jobs)
{
    return !jobs || (jobs->n_tasks == 0 && !jobs->asking && TAILQ_EMPTY(&jobs->loadings));
}

void kvq__jobs_end(struct kvq__jobs *jobs)
{
    if (!jobs || jobs->ended)
        return;
    jobs->ended = true;
    kvq__jobs_stop_orders(jobs);
    kvq__transfers_stop(jobs);
    if (jobs->timers)
        uv_timer_stop(&jobs->tick);
}

void kvq__jobs_close(struct kvq__jobs **pointer)
{
    struct kvq__jobs *jobs = *pointer;
    *pointer = NULL;
    if (!jobs)
        return;
    assert(kvq__jobs_idle(jobs));
    kvq__jobs_remote_close(jobs);
    kvq__jobs_note_used(jobs);
    kvq__jobs_quotas_close(jobs);
    kvq_store_close(&jobs->store);
    free(jobs->used);
    free(jobs->named);
    free(jobs);
}
