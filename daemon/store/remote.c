// SPDX-License-Identifier: Apache-2.0
//
// Commands that have to do with the remote store. Pushes and pulls are answered at once, with a
// ticket that can be asked for; lists and removals when they are done.
//
// Whoever may use a namespace may push, pull, list and remove its sessions: they go to the one
// bucket that the configuration names, under a key that the namespace begins, so nobody reaches
// anything there that is not already his here, nor a place of his own choice.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/commands/cursor.h"
#include "daemon/commands/dispatch.h"
#include "daemon/log/log.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/transfer.h"
#include "proto/sync.h"

// ---- Replies ----

static Kvq__Transfer *transfer_message(struct kvq_arena *arena, const struct kvq__transfer *x)
{
    Kvq__Transfer *m = kvq_arena_alloc(arena, sizeof *m);
    if (!m)
        return NULL;
    bool ended = x->phase == KVQ__TRANSFER_ENDED;
    bool fetched = ended && x->rc == 0;
    kvq__transfer__init(m);
    m->id = x->id;
    m->kind = kvq_arena_text(arena, kvq__transfer_kind(x));
    m->namespace_ = kvq_arena_text(arena, x->ns);
    m->name = kvq_arena_text(arena, x->name);
    m->remote_namespace = kvq_arena_text(arena, x->far_ns);
    m->remote_name = kvq_arena_text(arena, x->far);
    m->phase = kvq_arena_text(arena, kvq__transfer_phase(x));
    m->finished = ended;
    m->again = x->again;
    m->bytes = fetched ? x->moved.bytes : kvq_long_load(&x->all);
    m->moved_bytes = fetched ? x->moved.bytes : kvq_long_load(&x->done);
    m->ms = ((ended ? x->ended : kvq_now_ns()) - x->begun) / 1000000;
    m->text = kvq_arena_text(arena, "");
    if (ended) {
        m->status = x->rc;
        m->sent_bytes = x->moved.transferred;
        m->text = kvq_arena_text(arena, x->text);
    }
    return m;
}

static void answer_transfer(struct kvq__task *t, const struct kvq__transfer *x)
{
    t->reply->transfer = transfer_message(t->arena, x);
    if (t->reply->transfer)
        t->reply->result_case = KVQ__REPLY__RESULT_TRANSFER;
    else
        t->rc = KVQ_E_NO_MEMORY;
}

// The one with the lowest number above `after`: they stand in another order, and are few.
static const struct kvq__transfer *transfer_after(const struct kvq__task *t, uint64_t after)
{
    const struct kvq__transfer *x, *first = NULL;
    TAILQ_FOREACH (x, &t->jobs->desk->transfers, link)
        if (x->id > after && (!first || x->id < first->id) && kvq__transfer_visible(x, t->peer))
            first = x;
    return first;
}

static void list_transfers(struct kvq__task *t, Kvq__RemoteStatusReply *r, uint64_t after)
{
    enum { REST_BYTES = 4096 }; // the endpoint, the bucket, the prefix
    uint64_t epoch = t->jobs->server->identity.epoch;
    const struct kvq__transfer *x;
    size_t bytes = REST_BYTES;
    while ((x = transfer_after(t, after)) && !r->truncated) {
        Kvq__Transfer *m = transfer_message(t->arena, x);
        bytes += m ? kvq__transfer__get_packed_size(m) + 4 : 0;
        r->truncated =
            !m || t->arena->full || bytes > KVQ__LIST_BYTES || r->n_transfers == KVQ_MAX_LIST;
        if (r->truncated)
            break;
        r->transfers[r->n_transfers++] = m;
        after = x->id;
    }
    if (r->truncated && r->n_transfers)
        r->next = kvq__cursor_new(t->arena, epoch, KVQ__REQUEST__COMMAND_REMOTE_STATUS);
    if (r->next)
        r->next->id = after;
}

static void answer_status(struct kvq__task *t)
{
    const struct kvq_config *config = &t->jobs->server->config;
    const Kvq__Cursor *cursor = t->request->remote_status->cursor;
    Kvq__RemoteStatusReply *r = kvq_arena_alloc(t->arena, sizeof *r);
    Kvq__Transfer **transfers = kvq_arena_alloc(t->arena, KVQ_MAX_LIST * sizeof *transfers);
    if (!r || !transfers) {
        t->rc = KVQ_E_NO_MEMORY;
        return;
    }
    kvq__remote_status_reply__init(r);
    r->endpoint = kvq_arena_text(t->arena, config->remote_endpoint);
    r->bucket = kvq_arena_text(t->arena, config->remote_bucket);
    r->prefix = kvq_arena_text(t->arena, config->remote_prefix);
    r->transfers = transfers;
    list_transfers(t, r, cursor ? cursor->id : 0);
    t->reply->remote_status = r;
    t->reply->result_case = KVQ__REPLY__RESULT_REMOTE_STATUS;
}

// ---- Lists ----

struct lister {
    struct kvq_arena *arena;
    Kvq__RemoteList *list;
    size_t bytes;
};

static int on_session(void *context, const char *space, const char *name, uint64_t bytes)
{
    struct lister *l = context;
    Kvq__RemoteList *list = l->list;
    Kvq__RemoteEntry *e = NULL;
    if (list->n_sessions < KVQ_MAX_LIST)
        e = kvq_arena_alloc(l->arena, sizeof *e);
    if (e) {
        kvq__remote_entry__init(e);
        e->namespace_ = kvq_arena_text(l->arena, space);
        e->name = kvq_arena_text(l->arena, name);
        e->bytes = bytes;
        l->bytes += kvq__remote_entry__get_packed_size(e) + 4;
    }
    if (!e || l->bytes > KVQ__LIST_BYTES) {
        list->truncated = true;
        return 1;
    }
    list->sessions[list->n_sessions++] = e;
    return 0;
}

// Behind the last one that is listed.
static Kvq__Cursor *next_of(const struct kvq__task *t, const Kvq__RemoteList *list)
{
    uint64_t epoch = t->jobs->server->identity.epoch;
    if (!list->truncated || list->n_sessions == 0)
        return NULL;
    Kvq__Cursor *next = kvq__cursor_new(t->arena, epoch, KVQ__REQUEST__COMMAND_LIST_REMOTE);
    if (next) {
        next->remote_namespace = list->sessions[list->n_sessions - 1]->namespace_;
        next->remote_name = list->sessions[list->n_sessions - 1]->name;
    }
    return next;
}

int kvq__transfer_list(struct kvq__transfer *x, struct kvq_remote *remote)
{
    struct kvq__task *t = x->asker;
    struct lister l = {.arena = t->arena};
    l.list = kvq_arena_alloc(t->arena, sizeof *l.list);
    if (!l.list)
        return KVQ_E_NO_MEMORY;
    kvq__remote_list__init(l.list);
    l.list->sessions = kvq_arena_alloc(t->arena, KVQ_MAX_LIST * sizeof(Kvq__RemoteEntry *));
    if (!l.list->sessions)
        return KVQ_E_NO_MEMORY;
    const Kvq__Cursor *cursor = t->request->list_remote->cursor;
    struct kvq_remote_name after = {0};
    if (cursor)
        after = (struct kvq_remote_name){cursor->remote_namespace, cursor->remote_name};
    int rc = kvq_remote_sessions(remote, x->far_ns[0] ? x->far_ns : NULL, cursor ? &after : NULL,
                                 on_session, &l, x->text, sizeof x->text);
    if (rc < 0)
        return rc;
    l.list->next = next_of(t, l.list);
    t->reply->remote_list = l.list;
    t->reply->result_case = KVQ__REPLY__RESULT_REMOTE_LIST;
    return 0;
}

// ---- Asking for a transfer ----

static int check_name(const char *name, char *text)
{
    if (name[0] && name[0] != '#')
        return 0;
    snprintf(
        text, KVQ_TEXT_BYTES,
        "only sessions with names are pushed and pulled, since by these they are found again%s%s",
        name[0] ? ", not by " : "", name);
    return KVQ_E_INVALID;
}

// A namespace on the remote store: to administrators it need not be one of this daemon's.
static int check_far(struct kvq__task *t, const char *ns, char *out)
{
    if (t->peer->admin && ns[0]) {
        snprintf(out, KVQ_NAME_BYTES, "%s", ns);
        return 0;
    }
    return kvq__namespace_check(t->jobs->server->core, t->peer, ns, out, t->text);
}

static int resolve_push(struct kvq__task *t, const Kvq__SessionRef *ref)
{
    struct kvq__core *core = t->jobs->server->core;
    struct kvq__transfer *x = t->transfer;
    struct kvq__session_info info;
    const char *name = ref->name;
    int rc;
    if (name[0] == '#') {
        rc = kvq__session_find(core, t->peer, ref->namespace_, name, &info, t->text);
        if (rc < 0)
            return rc;
        snprintf(x->ns, sizeof x->ns, "%s", info.ns);
        name = info.name;
    } else {
        rc = kvq__namespace_check(core, t->peer, ref->namespace_, x->ns, t->text);
    }
    rc = rc ? rc : check_name(name, t->text);
    snprintf(x->name, sizeof x->name, "%s", name);
    snprintf(x->far_ns, sizeof x->far_ns, "%s", x->ns);
    snprintf(x->far, sizeof x->far, "%s", x->name);
    return rc;
}

static int resolve_pull(struct kvq__task *t, const Kvq__PullSession *ask)
{
    struct kvq__core *core = t->jobs->server->core;
    struct kvq__transfer *x = t->transfer;
    const char *ns = ask->into ? ask->into->namespace_ : "", *as = ask->into ? ask->into->name : "";
    int rc = check_far(t, ask->ref->namespace_, x->far_ns);
    snprintf(x->far, sizeof x->far, "%s", ask->ref->name);
    snprintf(x->name, sizeof x->name, "%s", as[0] ? as : ask->ref->name);
    x->replace = ask->replace;
    rc = rc ? rc : check_name(x->far, t->text);
    rc = rc ? rc : check_name(x->name, t->text);
    rc = rc ? rc : kvq__namespace_check(core, t->peer, ns[0] ? ns : x->far_ns, x->ns, t->text);
    if (rc < 0)
        return rc;
    // Before anything is transferred; the import looks again.
    snprintf(t->ns, sizeof t->ns, "%s", x->ns);
    snprintf(t->name, sizeof t->name, "%s", x->name);
    return kvq__jobs_refuse_here(t);
}

// Poller's thread: what names mean, and whether they may be used.
static void resolve(struct kvq__task *t)
{
    const Kvq__Request *r = t->request;
    struct kvq__transfer *x = t->transfer;
    if (x->kind == KVQ__TRANSFER_PUSH) {
        x->again = r->push_session->again;
        t->rc = resolve_push(t, r->push_session->ref);
    } else if (x->kind == KVQ__TRANSFER_PULL) {
        t->rc = resolve_pull(t, r->pull_session);
    } else if (x->kind == KVQ__TRANSFER_REMOVE) {
        t->rc = check_far(t, r->remove_remote->ref->namespace_, x->far_ns);
        t->rc = t->rc ? t->rc : check_name(r->remove_remote->ref->name, t->text);
        snprintf(x->far, sizeof x->far, "%s", r->remove_remote->ref->name);
    } else if (!t->peer->admin || r->list_remote->namespace_[0]) { // administrators see all
        t->rc = check_far(t, r->list_remote->namespace_, x->far_ns);
    }
}

// `ref`: the session that it is about; a list has none. A push or a pull is answered with a ticket
// and goes on, a list or a removal is answered when it is done.
static void ask_for_transfer(struct kvq__task *t, enum kvq__transfer_kind kind,
                             const Kvq__SessionRef *ref)
{
    bool list = kind == KVQ__TRANSFER_LIST;
    if (!list && !ref) {
        snprintf(t->text, sizeof t->text, "no session named; give its name");
        t->rc = KVQ_E_INVALID;
        return;
    }
    struct kvq__transfer *x = calloc(1, sizeof *x);
    if (!x) {
        snprintf(t->text, sizeof t->text, "no memory for a transfer");
        t->rc = KVQ_E_NO_MEMORY;
        return;
    }
    x->kind = kind;
    x->uid = t->peer->uid;
    memcpy(x->key, t->peer->key, sizeof x->key);
    x->asker = list || kind == KVQ__TRANSFER_REMOVE ? t : NULL;
    t->transfer = x;
    kvq__task_at_poller(t, resolve);
    t->transfer = NULL;
    if (t->rc == 0)
        t->rc = kvq__transfer_add(t->jobs->desk, x, t->text);
    if (t->rc < 0)
        free(x);
    else if (x->asker)
        kvq__task_wait(t);
    else
        answer_transfer(t, x);
}

// ---- Commands ----

static void look_at(struct kvq__task *t, uint64_t id, bool cancel)
{
    struct kvq__transfer *x = kvq__transfer_find(t->jobs->desk, id, t->peer);
    if (!x) {
        snprintf(t->text, sizeof t->text,
                 "no transfer %llu that user %u may see; what became of one is told for ten "
                 "minutes",
                 (unsigned long long)id, t->peer->uid);
        t->rc = KVQ_E_NO_SESSION;
        return;
    }
    if (cancel)
        kvq__transfer_cancel(x); // it stays: who ended last is forgotten last
    answer_transfer(t, x);
}

static int check_epoch(struct kvq__task *t, const Kvq__Cursor *cursor)
{
    return kvq__cursor_check(cursor, t->jobs->server->identity.epoch, t->request->command_case,
                             t->text);
}

// Whether the cursor of a list can be gone on from: 0 or a code with a text.
static int check_list_cursor(struct kvq__task *t, const Kvq__Cursor *cursor)
{
    char key[KVQ_REMOTE_KEY_BYTES];
    int rc = check_epoch(t, cursor);
    if (rc || !cursor)
        return rc;
    rc = kvq_remote_session_key(cursor->remote_namespace, cursor->remote_name, key);
    if (rc)
        snprintf(
            t->text, sizeof t->text,
            "the cursor is behind \"%.140s\" of namespace \"%.140s\", which no session can be: "
            "names have 1 to %d bytes; begin the list anew",
            cursor->remote_name, cursor->remote_namespace, KVQ_NAME_BYTES - 1);
    return rc;
}

int kvq__jobs_refuse_remote(struct kvq__task *t)
{
    struct kvq_remote *remote;
    if (kvq_remote_built())
        snprintf(t->text, sizeof t->text,
                 "this daemon has no remote store; set remote_endpoint and remote_bucket in its "
                 "configuration");
    else
        kvq_remote_open(NULL, &remote, t->text, sizeof t->text); // says why
    return KVQ_E_UNSUPPORTED;
}

void kvq__jobs_push(struct kvq__task *t)
{
    ask_for_transfer(t, KVQ__TRANSFER_PUSH, t->request->push_session->ref);
}

void kvq__jobs_pull(struct kvq__task *t)
{
    ask_for_transfer(t, KVQ__TRANSFER_PULL, t->request->pull_session->ref);
}

void kvq__jobs_remove_remote(struct kvq__task *t)
{
    ask_for_transfer(t, KVQ__TRANSFER_REMOVE, t->request->remove_remote->ref);
}

void kvq__jobs_list_remote(struct kvq__task *t)
{
    t->rc = check_list_cursor(t, t->request->list_remote->cursor);
    if (t->rc == 0)
        ask_for_transfer(t, KVQ__TRANSFER_LIST, NULL);
}

void kvq__jobs_ask_transfer(struct kvq__task *t)
{
    look_at(t, t->request->ask_transfer->id, false);
}

void kvq__jobs_cancel_transfer(struct kvq__task *t)
{
    look_at(t, t->request->cancel_transfer->id, true);
}

void kvq__jobs_remote_status(struct kvq__task *t)
{
    t->rc = check_epoch(t, t->request->remote_status->cursor);
    if (t->rc == 0)
        answer_status(t);
}

// ---- Opening and closing ----

// What opening a remote would not find out.
static int check_files(const struct kvq_config *c, char *text)
{
    if (c->remote_ca_file[0] && access(c->remote_ca_file, R_OK) != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "remote_ca_file \"%.200s\" cannot be read",
                 c->remote_ca_file);
        return KVQ_E_INVALID;
    }
    return 0;
}

// Without a remote store nobody goes on with what transfers have left.
static void sweep_for_good(const char *storage_dir)
{
    char folder[KVQ_CONFIG_PATH + 16], quoted[KVQ_CONFIG_PATH + 32];
    snprintf(folder, sizeof folder, "%s/remote", storage_dir);
    uint64_t bytes = kvq_remote_sweep(folder, NULL, 0, 0);
    if (bytes)
        kvq__log(KVQ_LOG_INFO, "leftovers_removed", "folder=%s bytes=%llu",
                 kvq__log_quote(quoted, sizeof quoted, folder), (unsigned long long)bytes);
}

int kvq__jobs_remote_open(struct kvq__jobs *jobs, char *text)
{
    const struct kvq_config *c = &jobs->server->config;
    char why[KVQ_TEXT_BYTES] = "", endpoint[KVQ_CONFIG_PATH + 16];
    struct kvq_remote *remote = NULL;
    if (!c->remote_endpoint[0]) {
        sweep_for_good(c->storage_dir);
        return 0;
    }
    int rc = check_files(c, why);
    rc = rc ? rc : kvq__remote_connect(c, NULL, &remote, why);
    kvq_remote_close(&remote);
    if (rc != 0) {
        snprintf(text, KVQ_TEXT_BYTES, "remote store: %.480s", why);
        return rc;
    }
    struct kvq__desk *desk = calloc(1, sizeof *desk);
    if (!desk) {
        snprintf(text, KVQ_TEXT_BYTES, "no memory");
        return KVQ_E_NO_MEMORY;
    }
    desk->jobs = jobs;
    TAILQ_INIT(&desk->transfers);
    snprintf(desk->folder, sizeof desk->folder, "%s/remote", c->storage_dir);
    kvq_remote_sweep(desk->folder, NULL, KVQ__LEFT_SECONDS, KVQ__LEFT_FILES);
    jobs->desk = desk;
    kvq__log(KVQ_LOG_INFO, "remote", "endpoint=%s bucket=%s",
             kvq__log_quote(endpoint, sizeof endpoint, c->remote_endpoint), c->remote_bucket);
    return 0;
}

void kvq__jobs_remote_close(struct kvq__jobs *jobs)
{
    struct kvq__desk *desk = jobs->desk;
    struct kvq__transfer *x;
    jobs->desk = NULL;
    while (desk && (x = TAILQ_FIRST(&desk->transfers))) {
        TAILQ_REMOVE(&desk->transfers, x, link);
        free(x->path);
        free(x);
    }
    free(desk);
}
