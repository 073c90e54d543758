// SPDX-License-Identifier: Apache-2.0
//
// Restoring a session: a thread of libuv's looks what the store has, the poller makes the session,
// and while whoever opened it goes on, another thread reads its layers one after the other
// (read.c).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/core/session/group.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/codebooks.h"
#include "daemon/store/internal.h"

enum { TRIES = 3 }; // looks at what changes meanwhile

void kvq__found_free(struct kvq__found **found)
{
    struct kvq__found *f = *found;
    *found = NULL;
    if (!f)
        return;
    kvq__found_clear(f);
    free(f);
}

// ---- Looking, on a thread of libuv's ----

int kvq__found_meta(struct kvq__task *t, const struct kvq_store_session *s, struct kvq__found *f)
{
    struct kvq_arena arena;
    if (s->n_bytes > KVQ__SAVED_BYTES || s->version < KVQ__SAVED_OLDEST ||
        s->version > KVQ__SAVED_NEWEST) {
        snprintf(t->text, sizeof t->text,
                 "session \"%s\" was saved as version %u with %u bytes; this daemon reads "
                 "versions %d to %d: use the version that saved it, or drop it",
                 t->name, s->version, s->n_bytes, KVQ__SAVED_OLDEST, KVQ__SAVED_NEWEST);
        return KVQ_E_VERSION;
    }
    uint8_t *scratch = malloc(KVQ__SAVED_BYTES + KVQ_WIRE_ARENA);
    if (!scratch)
        return KVQ_E_NO_MEMORY;
    kvq_arena_init(&arena, scratch + KVQ__SAVED_BYTES, KVQ_WIRE_ARENA);
    int rc = kvq_store_meta_read(t->jobs->store, s, scratch, t->text, sizeof t->text);
    if (rc == 0)
        rc = kvq__saved_unpack(scratch, s->n_bytes, &arena, &f->saved, t->text);
    free(scratch);
    // An import may have given it another name.
    if (rc == 0)
        snprintf(f->saved.name, sizeof f->saved.name, "%s", s->name);
    if (rc == 0 && (f->saved.shard != s->shard || f->saved.shards != s->shards)) {
        snprintf(t->text, sizeof t->text, "what was stored of session \"%s\" is another shard's",
                 t->name);
        rc = KVQ_E_DAMAGED;
    }
    return rc;
}

static int read_blocks(struct kvq__task *t, const struct kvq_store_session *s, struct kvq__found *f)
{
    size_t n;
    int rc = kvq_store_blocks(t->jobs->store, s, &f->blocks, &n, t->text, sizeof t->text);
    if (rc < 0)
        return rc;
    f->parts = calloc(n + 1, sizeof *f->parts);
    if (!f->parts || n > UINT32_MAX)
        return KVQ_E_NO_MEMORY;
    f->n = (uint32_t)n;
    for (uint32_t i = 0; i < f->n; i++) {
        const struct kvq_stored *b = &f->blocks[i];
        f->parts[i] = (struct kvq__part){.layer = b->place.layer,
                                         .page = b->place.page,
                                         .kind = b->place.kind,
                                         .bytes = b->bytes,
                                         .from = b->place.from,
                                         .id = b->id};
    }
    return 0;
}

// All shards come back at one count.
static int read_good(struct kvq__task *t, const struct kvq_store_session *s, struct kvq__found *f)
{
    int rc = 0;
    f->good = UINT64_MAX;
    for (uint32_t i = 0; i < s->shards && rc == 0; i++) {
        struct kvq_store_session shard = *s;
        uint64_t good = 0;
        if (i != s->shard)
            rc = kvq_store_find(t->jobs->store, t->ns, t->name, i, &shard, t->text, sizeof t->text);
        if (rc == 0)
            rc = kvq_store_good_tokens(t->jobs->store, &shard, &good, t->text, sizeof t->text);
        f->good = good < f->good ? good : f->good;
    }
    return rc;
}

struct ids_of {
    struct kvq__task *task;
    const struct kvq__found *found;
};

static int read_ids_part(void *context, uint32_t part, void *out)
{
    const struct ids_of *of = context;
    return kvq_store_read(of->task->jobs->store, &of->found->blocks[part], out, NULL, 0);
}

// Here and now, since whoever opens the session next may go on to tell more. They are a hundredth
// of its blocks, or less.
static int read_ids(struct kvq__task *t, struct kvq__found *f)
{
    struct ids_of of = {t, f};
    struct kvq__ids_reader reader = {f->parts, f->n, f->good, read_ids_part, &of};
    return kvq__saved_ids_read(&f->saved, &reader);
}

int kvq__found_blocks(struct kvq__task *t, const struct kvq_store_session *s, struct kvq__found *f)
{
    int rc = read_blocks(t, s, f);
    return rc ? rc : read_ids(t, f);
}

int kvq__found_read(struct kvq__task *t, const struct kvq_store_session *s, struct kvq__found *f)
{
    int rc = kvq__found_meta(t, s, f);
    rc = rc ? rc : read_good(t, s, f);
    return rc ? rc : kvq__found_blocks(t, s, f);
}

int kvq__jobs_stamp(struct kvq__task *t, uint64_t *stamp)
{
    struct kvq_store_session s;
    struct kvq__found *f = calloc(1, sizeof *f);
    int rc = f ? kvq_store_find(t->jobs->store, t->ns, t->name, 0, &s, t->text, sizeof t->text)
               : KVQ_E_NO_MEMORY;
    rc = rc ? rc : kvq__found_meta(t, &s, f);
    *stamp = rc ? 0 : f->saved.stamp;
    kvq__found_free(&f);
    return rc;
}

bool kvq__jobs_is_whole(struct kvq__task *t, uint64_t stamp)
{
    struct kvq_store_session s;
    struct kvq__found f = {0};
    uint64_t there;
    int rc = kvq__jobs_stamp(t, &there);
    rc = rc ? rc : kvq_store_find(t->jobs->store, t->ns, t->name, 0, &s, t->text, sizeof t->text);
    rc = rc ? rc : read_good(t, &s, &f);
    return rc == 0 && there == stamp && f.good >= s.tokens;
}

static int find_once(struct kvq__task *t)
{
    struct kvq_store_session s;
    const struct kvq__reshard_as *as = &t->as;
    struct kvq_store *store = t->jobs->store;
    int rc = kvq_store_find(store, t->ns, t->name, as->shard, &s, t->text, sizeof t->text);
    if (rc == KVQ_E_NO_SESSION && as->shard) // it may have fewer
        rc = kvq_store_find(store, t->ns, t->name, 0, &s, t->text, sizeof t->text);
    if (rc == KVQ_E_NO_SESSION || (rc == 0 && s.shard != as->shard && s.shards == as->shards))
        return 0;
    if (rc < 0)
        return rc;
    t->stored = s.id;
    t->found = calloc(1, sizeof *t->found);
    if (!t->found)
        return KVQ_E_NO_MEMORY;
    if (as->shards && as->shards != s.shards)
        rc = kvq__found_reshard(t, &s, t->found);
    else
        rc = kvq__found_read(t, &s, t->found);
    if (rc < 0)
        kvq__found_free(&t->found);
    return rc;
}

void kvq__found_books(struct kvq__task *t)
{
    const struct kvq__saved *saved = &t->found->saved;
    const char *last = "";
    for (uint32_t i = 0; i < saved->n_layers; i++) {
        const char *at = strchr(saved->layers[i].format.name, '@');
        if (at && strcmp(at, last) != 0)
            kvq__codebooks_load(t->jobs->server->codebooks, at + 1);
        last = at ? at : last;
    }
}

static void find_stored(struct kvq__task *t)
{
    t->rc = KVQ_E_STALE;
    if (t->as.shards > KVQ_MAX_SHARDS || (t->as.shards && t->as.shard >= t->as.shards))
        t->rc = 0;                     // whoever opens it is told
    bool again = t->rc == KVQ_E_STALE; // saved again or deleted meanwhile
    for (int i = 0; i < TRIES && again; i++) {
        t->rc = find_once(t);
        again = t->rc == KVQ_E_STALE || t->rc == KVQ_E_NO_SESSION;
    }
    if (t->rc == KVQ_E_NO_MEMORY)
        snprintf(t->text, sizeof t->text, "no memory to restore session \"%s\"", t->name);
    if (t->found)
        kvq__found_books(t);
}

// ---- From queue to end ----

static void tell_loaded(const struct kvq__loading *l)
{
    char text[256];
    uint64_t now = kvq_now_ns();
    const char *name = l->found->saved.name;
    if (l->rc == KVQ_E_CANCELLED)
        return;
    if (l->rc < 0) {
        snprintf(text, sizeof text, "not restored: %.200s", l->text);
        kvq__jobs_tell(l->jobs, KVQ__EVENT_STORAGE_DAMAGED, l->ns, name, text);
        return;
    }
    if (l->fetches) // the core has told
        return;
    if (!l->prefix && l->tokens < l->found->saved.tokens) {
        snprintf(text, sizeof text, "%llu of %llu tokens are good and were restored",
                 (unsigned long long)l->tokens, (unsigned long long)l->found->saved.tokens);
        kvq__jobs_tell(l->jobs, KVQ__EVENT_STORAGE_DAMAGED, l->ns, name, text);
    }
    int used = snprintf(text, sizeof text,
                        "%llu tokens, %llu bytes, first layer after %.1f ms, all after %.1f",
                        (unsigned long long)l->tokens, (unsigned long long)l->bytes,
                        (double)((l->first_ns ? l->first_ns : now) - l->begun) / 1e6,
                        (double)(now - l->begun) / 1e6);
    if (l->found->n_sources)
        snprintf(text + used, sizeof text - (size_t)used, "; shard %u of %u, of %u saved",
                 l->found->saved.shard, l->found->saved.shards, l->found->n_sources);
    kvq__jobs_tell(l->jobs, l->prefix ? KVQ__EVENT_PREFIX_RESTORED : KVQ__EVENT_SESSION_RESTORED,
                   l->ns, name, text);
}

static void ended_on_loop(struct kvq__mail *mail)
{
    struct kvq__loading *l =
        (struct kvq__loading *)((char *)mail - offsetof(struct kvq__loading, mail));
    struct kvq__jobs *jobs = l->jobs;
    struct kvq__task *t = l->task;
    tell_loaded(l);
    if (t) {
        t->rc = l->rc;
        t->reading = NULL;
        snprintf(t->text, sizeof t->text, "%s", l->text);
    }
    TAILQ_REMOVE(&jobs->loadings, l, link);
    kvq__turn_end(&jobs->reads, &l->turn);
    kvq__found_free(&l->found);
    free(l);
    if (t && t->read)
        t->read(t);
}

// Poller's thread.
static void end_restore(struct kvq__mail *mail)
{
    struct kvq__loading *l =
        (struct kvq__loading *)((char *)mail - offsetof(struct kvq__loading, mail));
    kvq__restore_end(&l->restore, l->rc);
    kvq__mailbox_post(&l->jobs->server->box, &l->mail, ended_on_loop);
}

static void all_read(uv_work_t *work, int status)
{
    struct kvq__loading *l = work->data;
    if (status < 0)
        l->rc = KVQ_E_CANCELLED;
    // Whatever kept it from being read, what is in memory now is not the session.
    kvq__mailbox_post(kvq__poller_box(l->jobs->server->poller), &l->mail, end_restore);
}

static void start_reading(struct kvq__write_turn *turn)
{
    struct kvq__loading *l =
        (struct kvq__loading *)((char *)turn - offsetof(struct kvq__loading, turn));
    l->work.data = l;
    if (uv_queue_work(&l->jobs->server->loop, &l->work, kvq__jobs_read, all_read) != 0) {
        l->rc = KVQ_E_SYSTEM;
        all_read(&l->work, 0);
    }
}

// Reads what was begun, if anything was. The task may wait for the end (read), or leave it.
static void load_found(struct kvq__task *t)
{
    struct kvq__jobs *jobs = t->jobs;
    struct kvq__loading *l = t->loading;
    if (!l)
        return;
    t->read = NULL;
    t->reading = l;
    t->loading = NULL;
    l->task = t;
    TAILQ_INSERT_TAIL(&jobs->loadings, l, link);
    kvq__turn_wait(&jobs->reads, &l->turn, l->ns, start_reading);
}

void kvq__jobs_load_wait(struct kvq__task *t, void (*read)(struct kvq__task *task))
{
    t->read = read;
    if (!t->reading)
        read(t);
}

void kvq__jobs_load_leave(struct kvq__task *t)
{
    if (t->reading)
        t->reading->task = NULL;
    t->reading = NULL;
}

// ---- At the poller ----

// Makes the session that was found, if it is not there.
static int begin_loading(struct kvq__task *t, const struct kvq__begin *as)
{
    struct kvq__found *f = t->found;
    struct kvq__restore_spec spec = {.ns = as->ns,
                                     .place = as->place,
                                     .prefix_tokens = as->prefix_tokens,
                                     .saved = &f->saved,
                                     .parts = f->parts,
                                     .n_parts = f->n,
                                     .good_tokens = f->good,
                                     .resharded = f->n_sources > 0,
                                     .ahead = f->ahead};
    struct kvq__loading *l = calloc(1, sizeof *l);
    if (!l) {
        snprintf(t->text, sizeof t->text, "no memory to restore session \"%s\"", t->name);
        return KVQ_E_NO_MEMORY;
    }
    struct kvq__core *core = t->jobs->server->core;
    int rc = t->job ? kvq__fetch_begin(core, t->job->id, &spec, &l->restore, t->text)
                    : kvq__restore_begin(core, t->peer, &spec, &l->restore, t->text);
    if (rc < 0) {
        free(l);
        return rc == KVQ_E_EXISTS ? 0 : rc;
    }
    l->jobs = t->jobs;
    l->fetches = t->job != NULL;
    l->begun = kvq_now_ns();
    l->prefix = as->prefix_tokens > 0;
    snprintf(l->ns, sizeof l->ns, "%s", t->ns);
    t->loading = l;
    return 0;
}

// Takes memory for it, bit by bit: others have their turn in between. Then goes on.
static void reserve_loading(struct kvq__task *t)
{
    struct kvq__loading *l = t->loading;
    int rc = l ? kvq__restore_reserve(l->restore, t->text) : 0;
    if (rc == 1) {
        kvq__task_to_poller(t, reserve_loading);
        return;
    }
    if (rc == 2) {
        kvq__task_later(t, reserve_loading);
        return;
    }
    if (rc < 0) { // also if somebody else has restored it meanwhile
        kvq__restore_end(&l->restore, rc);
        free(l);
        t->loading = NULL;
        t->rc = rc == KVQ_E_EXISTS ? 0 : rc;
    } else if (l) {
        l->tokens = kvq__restore_tokens(l->restore);
        l->found = t->found;
        t->found = NULL;
    }
    t->then(t);
}

// For prefixes: begun() follows on the loop's thread, whatever comes of it.
static void go_load(struct kvq__task *t)
{
    kvq__found_free(&t->found);
    load_found(t);
    t->begun_load(t);
}

static void load_next(struct kvq__task *t)
{
    kvq__task_to_loop(t, go_load);
}

void kvq__jobs_load(struct kvq__task *t, const struct kvq__begin *as,
                    void (*begun)(struct kvq__task *task))
{
    t->rc = begin_loading(t, as);
    t->begun_load = begun;
    t->then = load_next;
    reserve_loading(t);
}

static void opened(struct kvq__task *t)
{
    if (t->rc == 0 && t->reply->status == 0 && t->stored)
        kvq__jobs_used(t->jobs, t->stored);
    else if (t->rc == 0 && t->reply->status == 0 && t->jobs->store)
        kvq__jobs_used_name(t->jobs, t->ns, t->name, t->as.shard); // it was in memory
    kvq__found_free(&t->found);
    load_found(t);
    kvq__jobs_load_leave(t);
    kvq__task_end(t);
}

// Who names no layers wants what shards there are in memory.
static bool is_there_otherwise(struct kvq__task *t)
{
    struct kvq__reshard_as there = t->as;
    struct kvq__core *core = t->jobs->server->core;
    if (t->as.n_layers || !kvq__reshard_there(core, t->peer, t->ns, &t->found->saved, &there) ||
        (t->as.shards && t->as.shards != there.shards))
        return false;
    t->as = there;
    return true;
}

// What is in memory with another number of shards may make room for what is stored, or say how it
// is to come; then that is looked for anew, for it may have been saved meanwhile. Poller's thread.
static bool looks_again(struct kvq__task *t, void (*again)(struct kvq__task *t))
{
    struct kvq__core *core = t->jobs->server->core;
    if (t->rc < 0 || !t->found || t->looked_again)
        return false;
    const struct kvq__saved *stored = &t->found->saved;
    bool goes = t->as.shards && t->found->good >= stored->tokens && // else memory has more
                kvq__reshard_make_way(core, t->peer, t->ns, stored, t->as.shards);
    if (!goes && !is_there_otherwise(t)) {
        if (t->found->saved.shard != t->as.shard) // it has fewer, and is as it was saved
            kvq__found_free(&t->found);
        return false;
    }
    t->looked_again = true;
    kvq__found_free(&t->found);
    kvq__task_to_loop(t, again);
    return true;
}

static void open_now(struct kvq__task *t)
{
    struct kvq__server *server = t->jobs->server;
    struct kvq__dispatch d = {.core = server->core,
                              .identity = &server->identity,
                              .peer = t->peer,
                              .client = t->client,
                              .place = t->ask ? t->ask->place : NULL, // where its prefix is
                              .ask = t->ask,
                              .now_ns = kvq_now_ns()};
    if (t->rc == 0)
        kvq__dispatch_run(&d, t->request, t->arena, t->reply);
    kvq__prefix_ask_end(&t->ask);
    kvq__task_to_loop(t, opened);
}

// Nobody learns whether a namespace has a session that may not use it.
static int refuse_to_create(struct kvq__task *t)
{
    char ns[KVQ_NAME_BYTES];
    int rc = kvq__namespace_check(t->jobs->server->core, t->peer, t->ns, ns, t->text);
    if (rc == 0)
        snprintf(t->text, sizeof t->text,
                 "session \"%s\" exists already, on disk; drop it, or open it without must_create",
                 t->name);
    return rc ? rc : KVQ_E_EXISTS;
}

static void look_in_store_again(struct kvq__task *t);

// What is about to be deleted, or was just now, is not there.
static void check_found(struct kvq__task *t)
{
    if (t->found && kvq__park_forgotten(t->jobs->server->core, t->found->saved.stamp))
        kvq__found_free(&t->found);
}

// Poller's thread.
static void open_session(struct kvq__task *t)
{
    const Kvq__OpenSession *open = t->request->open_session;
    const struct kvq__begin as = {.ns = t->ns, .place = open->place};
    check_found(t);
    if (t->rc == 0 && t->found && open->must_create)
        t->rc = refuse_to_create(t);
    if (t->rc == 0 && !t->found && open->prefix) {
        kvq__jobs_prefix(t, open, open_now);
        return;
    }
    if (looks_again(t, look_in_store_again))
        return;
    if (t->rc == 0 && t->found)
        t->rc = begin_loading(t, &as);
    t->then = open_now;
    reserve_loading(t);
}

static void look_in_store(struct kvq__task *t)
{
    find_stored(t);
}

static void looked_in_store(uv_work_t *work, int status)
{
    (void)status;
    kvq__task_to_poller(kvq__task_of(work), open_session);
}

static void look_in_store_again(struct kvq__task *t)
{
    kvq__task_to_work(t, look_in_store, looked_in_store);
}

static void take_to_open(struct kvq__task *t)
{
    kvq__task_name(t, KVQ__HOLD_LOOK, look_in_store_again);
}

// Poller's thread. What is in memory is opened there, and what the peer may not use is refused;
// else the store is asked, and nobody changes what it has meanwhile.
static void open_if_here(struct kvq__task *t)
{
    char ns[KVQ_NAME_BYTES];
    struct kvq__core *core = t->jobs->server->core;
    if (!t->name[0] || !t->jobs->store)
        open_session(t);
    else if (kvq__namespace_check(core, t->peer, t->ns, ns, NULL) < 0 ||
             kvq__session_here(core, t->peer, t->ns, t->name, t->as.shard, t->as.shards))
        open_now(t);
    else
        kvq__task_to_loop(t, take_to_open);
}

static void read_codebooks(struct kvq__task *t)
{
    t->before(t);
}

static void codebooks_are_read(uv_work_t *work, int status)
{
    (void)status;
    kvq__task_to_poller(kvq__task_of(work), open_if_here);
}

static struct kvq__reshard_as as_asked(const Kvq__OpenSession *open)
{
    struct kvq__reshard_as as = {.shard = open->shard, .shards = open->shards};
    uint64_t layers = 0;
    for (size_t i = 0; i < open->n_layers; i++)
        layers += open->layers[i]->repeat ? open->layers[i]->repeat : 1;
    as.n_layers = layers < UINT32_MAX ? (uint32_t)layers : UINT32_MAX;
    if (as.shards == 0 && as.n_layers)
        as.shards = 1;
    return as;
}

void kvq__jobs_open_session(struct kvq__task *t)
{
    const Kvq__OpenSession *open = t->request->open_session;
    t->as = as_asked(open);
    snprintf(t->name, sizeof t->name, "%s", open->name);
    if (open->namespace_[0])
        snprintf(t->ns, sizeof t->ns, "%s", open->namespace_);
    else
        snprintf(t->ns, sizeof t->ns, "uid-%u", t->peer->uid);
    if (t->before)
        kvq__task_to_work(t, read_codebooks, codebooks_are_read);
    else
        kvq__task_to_poller(t, open_if_here);
}

// ---- By command ----

static void restored(struct kvq__task *t)
{
    if (t->rc == 0)
        kvq__jobs_used(t->jobs, t->stored);
    kvq__found_free(&t->found);
    if (!t->loading) {
        kvq__task_end(t);
        return;
    }
    load_found(t);
    kvq__jobs_load_wait(t, kvq__task_end);
}

static void back_to_loop(struct kvq__task *t)
{
    kvq__task_to_loop(t, restored);
}

static void look_again_to_restore(struct kvq__task *t);

// Poller's thread.
static void restore_now(struct kvq__task *t)
{
    struct kvq__session_info info;
    const struct kvq__begin as = {.ns = t->ns, .place = t->request->restore_session->place};
    struct kvq__core *core = t->jobs->server->core;
    check_found(t);
    if (looks_again(t, look_again_to_restore))
        return;
    bool there = t->rc == 0 && t->as.shards &&
                 kvq__session_find(core, t->peer, t->ns, t->name, &info, NULL) == 0;
    if (there && info.shards != t->as.shards)
        t->rc = kvq__shards_refuse(core, t->name, info.shards, t->as.shards, t->text);
    if (t->rc == 0 && t->found)
        t->rc = begin_loading(t, &as);
    else if (t->rc == 0) // it may be in memory alone
        t->rc = kvq__session_find(core, t->peer, t->ns, t->name, &info, t->text);
    t->then = back_to_loop;
    reserve_loading(t);
}

static void looked_for_restore(uv_work_t *work, int status)
{
    (void)status;
    kvq__task_to_poller(kvq__task_of(work), restore_now);
}

static void look_again_to_restore(struct kvq__task *t)
{
    kvq__task_to_work(t, look_in_store, looked_for_restore);
}

static void take_to_restore(struct kvq__task *t)
{
    kvq__task_name(t, KVQ__HOLD_LOOK, look_again_to_restore);
}

// Poller's thread.
static void restore_if_away(struct kvq__task *t)
{
    if (!t->name[0])
        restore_now(t); // which says that it is missing
    else if (kvq__session_here(t->jobs->server->core, t->peer, t->ns, t->name, t->as.shard,
                               t->as.shards))
        kvq__task_to_loop(t, kvq__task_end);
    else
        kvq__task_to_loop(t, take_to_restore);
}

void kvq__jobs_restore(struct kvq__task *t)
{
    const Kvq__RestoreSession *ask = t->request->restore_session;
    t->as = (struct kvq__reshard_as){.shard = ask->shard, .shards = ask->shards};
    if (ask->shards > KVQ_MAX_SHARDS || (ask->shards && ask->shard >= ask->shards)) {
        snprintf(t->text, sizeof t->text, "shard %u of %u; there can be %d, counted from 0",
                 ask->shard, ask->shards, KVQ_MAX_SHARDS);
        t->rc = KVQ_E_INVALID;
        kvq__task_end(t);
        return;
    }
    kvq__task_to_poller(t, restore_if_away);
}

// ---- Sessions that are parked ----

// Poller's thread. Where reserving has failed the core knows already.
static void fetch_now(struct kvq__task *t)
{
    if (t->rc == 0 && !t->found) {
        snprintf(t->text, sizeof t->text, "nothing is stored of session \"%s\" any more", t->name);
        t->rc = KVQ_E_NO_SESSION;
    }
    if (t->rc == 0)
        t->rc = begin_loading(t, &(struct kvq__begin){0});
    if (t->rc < 0)
        kvq__fetch_failed(t->jobs->server->core, t->job->id, t->rc, t->text);
    t->then = back_to_loop;
    reserve_loading(t);
}

static void look_for_parked(struct kvq__task *t)
{
    t->as = (struct kvq__reshard_as){.shard = t->job->shard};
    find_stored(t);
}

static void looked_for_parked(uv_work_t *work, int status)
{
    (void)status;
    kvq__task_to_poller(kvq__task_of(work), fetch_now);
}

void kvq__jobs_fetch(struct kvq__task *t)
{
    kvq__task_to_work(t, look_for_parked, looked_for_parked);
}
