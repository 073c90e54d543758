// SPDX-License-Identifier: Apache-2.0
//
// Restoring a session: a thread of libuv's looks what the store has, the poller makes the session,
// and while whoever opened it goes on, another thread reads its layers one after the other
// (read.c).
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/core/session/group.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/codebooks.h"
#include "daemon/store/internal.h"

enum {
    TRIES = 3,   // looks at what changes meanwhile
    ROOM_MS = 3, // so often a session that waits for room in memory is tried again
};

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

// A catalog that was made anew may have an older form of a shard whose last one is damaged.
static int check_same_save(struct kvq__task *t, const struct kvq_store_session *shard,
                           const struct kvq__saved *first)
{
    struct kvq__found *other = calloc(1, sizeof *other);
    int rc = other ? kvq__found_meta(t, shard, other) : KVQ_E_NO_MEMORY;
    if (rc == 0 && other->saved.stamp != first->stamp) {
        snprintf(t->text, sizeof t->text,
                 "shards %u and %u of session \"%s\" are from different saves, since what was "
                 "saved last of one of them is damaged: take the session from an export or from "
                 "the remote store, or drop it",
                 first->shard, shard->shard, t->name);
        rc = KVQ_E_DAMAGED;
    }
    kvq__found_free(&other);
    return rc;
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
        if (rc == 0 && i != s->shard)
            rc = check_same_save(t, &shard, &f->saved);
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
    struct kvq__found f = {.saved.stamp = stamp}; // that all shards have to have
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
    for (uint32_t i = 0; i < saved->n_layers; i++) {
        const char *at = strchr(saved->layers[i].format.name, '@');
        if (at)
            kvq__codebooks_load(t->jobs->server->codebooks, at + 1, &t->found->books);
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

// ---- Reading, beside the task that has asked for it ----

static void tell_loaded(const struct kvq__loading *l)
{
    char text[256];
    uint64_t now = kvq_now_ns();
    const char *name = l->found->saved.name;
    enum kvq__store_time what = l->fetches  ? KVQ__TIME_FETCH
                                : l->prefix ? KVQ__TIME_PREFIX
                                            : KVQ__TIME_RESTORE;
    kvq__jobs_note_end(l->task.jobs, what, l->task.rc);
    if (l->task.rc == KVQ_E_CANCELLED)
        return;
    if (l->task.rc < 0) {
        snprintf(text, sizeof text, "not restored: %.200s", l->task.text);
        enum kvq__event_kind kind =
            l->task.rc == KVQ_E_NO_MEMORY ? KVQ__EVENT_NOT_RESTORED : KVQ__EVENT_STORAGE_DAMAGED;
        kvq__jobs_tell(l->task.jobs, kind, l->task.ns, name, text);
        return;
    }
    kvq__histogram_add(&l->task.jobs->times.of[what], now - l->task.begun);
    if (l->fetches) // the core has told
        return;
    if (!l->prefix && l->tokens < l->found->saved.tokens) {
        snprintf(text, sizeof text, "%llu of %llu tokens are good and were restored",
                 (unsigned long long)l->tokens, (unsigned long long)l->found->saved.tokens);
        kvq__jobs_tell(l->task.jobs, KVQ__EVENT_STORAGE_DAMAGED, l->task.ns, name, text);
    }
    int used = snprintf(text, sizeof text,
                        "%llu tokens, %llu bytes, first layer after %.1f ms, all after %.1f",
                        (unsigned long long)l->tokens, (unsigned long long)l->bytes,
                        (double)((l->first_ns ? l->first_ns : now) - l->task.begun) / 1e6,
                        (double)(now - l->task.begun) / 1e6);
    if (l->found->n_sources)
        snprintf(text + used, sizeof text - (size_t)used, "; shard %u of %u, of %u saved",
                 l->found->saved.shard, l->found->saved.shards, l->found->n_sources);
    kvq__jobs_tell(l->task.jobs,
                   l->prefix ? KVQ__EVENT_PREFIX_RESTORED : KVQ__EVENT_SESSION_RESTORED, l->task.ns,
                   name, text);
}

// Poller's thread. Whatever kept it from being read, what is in memory then is not the session.
static void end_restore(struct kvq__task *t)
{
    struct kvq__loading *l = (struct kvq__loading *)t; // its first member
    kvq__restore_end(&l->restore, t->rc);
}

static void read_loading(struct kvq__task *t)
{
    kvq__task_take_turn_of(t, &t->jobs->reads, t->ns);
    kvq__task_at_work(t, kvq__jobs_read);
    kvq__task_at_poller(t, end_restore);
    tell_loaded((struct kvq__loading *)t);
}

static void end_loading(struct kvq__task *t)
{
    struct kvq__loading *l = (struct kvq__loading *)t;
    struct kvq__task *asker = l->asker;
    bool awaited = l->awaited;
    if (asker) {
        assert(asker->reading == l);
        asker->rc = t->rc;
        asker->reading = NULL;
        snprintf(asker->text, sizeof asker->text, "%s", t->text);
    }
    kvq__found_free(&l->found);
    free(l);
    if (awaited)
        kvq__task_wake(asker);
}

void kvq__load_start(struct kvq__task *t)
{
    struct kvq__loading *l = t->loading;
    if (!l)
        return;
    t->reading = l;
    t->loading = NULL;
    l->asker = t;
    kvq__task_start(&l->task, read_loading);
}

void kvq__load_wait(struct kvq__task *t)
{
    if (!t->reading)
        return;
    t->reading->awaited = true;
    kvq__task_wait(t);
    assert(!t->reading);
}

void kvq__load_leave(struct kvq__task *t)
{
    if (t->reading)
        t->reading->asker = NULL;
    t->reading = NULL;
}

// ---- Making the session ----

static void free_loading(struct kvq__loading *l)
{
    if (l)
        kvq__fiber_unmake(&l->task.jobs->fibers, &l->task.fiber);
    free(l);
}

// NULL with a text: no memory.
static struct kvq__loading *new_loading(struct kvq__task *t)
{
    struct kvq__loading *l = calloc(1, sizeof *l);
    if (l && kvq__task_make(t->jobs, &l->task) < 0) {
        free(l);
        l = NULL;
    }
    if (!l)
        snprintf(t->text, sizeof t->text, "no memory to restore session \"%s\"", t->name);
    return l;
}

// Makes the session that was found, if it is not there. Poller's thread.
static void begin_loading(struct kvq__task *t)
{
    struct kvq__found *f = t->found;
    const struct kvq__begin *as = t->begin;
    struct kvq__restore_spec spec = {.ns = as->ns,
                                     .place = as->place,
                                     .prefix_tokens = as->prefix_tokens,
                                     .saved = &f->saved,
                                     .parts = f->parts,
                                     .n_parts = f->n,
                                     .good_tokens = f->good,
                                     .resharded = f->n_sources > 0,
                                     .ahead = f->ahead};
    struct kvq__loading *l = new_loading(t);
    struct kvq__core *core = t->jobs->server->core;
    if (!l)
        t->rc = KVQ_E_NO_MEMORY;
    else if (t->job)
        t->rc = kvq__fetch_begin(core, t->job->id, &spec, &l->restore, t->text);
    else
        t->rc = kvq__restore_begin(core, t->peer, &spec, &l->restore, t->text);
    if (t->rc == KVQ_E_EXISTS)
        t->rc = 0;
    else if (t->rc == 0)
        t->loading = l;
    if (t->rc < 0 && t->job)
        kvq__fetch_failed(core, t->job->id, t->rc, t->text);
    if (!t->loading) {
        free_loading(l);
        return;
    }
    l->fetches = t->job != NULL;
    l->prefix = as->prefix_tokens > 0;
    l->task.done = end_loading;
    l->task.begun = kvq_now_ns();
    snprintf(l->task.ns, sizeof l->task.ns, "%s", t->ns);
}

// Takes some memory for it. Poller's thread. True once it has all, or has failed, or has to wait
// for room.
static bool reserve_loading(struct kvq__task *t)
{
    if (!t->loading)
        begin_loading(t);
    if (t->rc == 0 && t->loading)
        t->rc = kvq__restore_reserve(t->loading->restore, t->text);
    if (t->rc < 0 && t->loading) { // also if somebody else has restored it meanwhile
        kvq__restore_end(&t->loading->restore, t->rc);
        free_loading(t->loading);
        t->loading = NULL;
        t->rc = t->rc == KVQ_E_EXISTS ? 0 : t->rc;
    } else if (t->rc == 0 && t->loading) {
        t->loading->tokens = kvq__restore_tokens(t->loading->restore);
        t->loading->found = t->found;
        t->found = NULL;
    }
    bool goes_on = t->rc == KVQ__MORE;
    t->rc = goes_on ? 0 : t->rc;
    if (!goes_on && t->rc != KVQ__LATER && t->begin->then)
        t->begin->then(t);
    return !goes_on;
}

void kvq__load_begin(struct kvq__task *t, const struct kvq__begin *as)
{
    assert(t->found && t->rc == 0 && !t->loading && !t->reading);
    t->begin = as;
    kvq__task_at_poller_in_pieces(t, reserve_loading);
    while (t->rc == KVQ__LATER) {
        t->rc = 0;
        kvq__task_sleep(t, ROOM_MS);
        kvq__task_at_poller_in_pieces(t, reserve_loading);
    }
    kvq__found_free(&t->found);
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
static bool has_to_look_again(struct kvq__task *t)
{
    struct kvq__core *core = t->jobs->server->core;
    const struct kvq__saved *stored = &t->found->saved;
    bool goes = t->as.shards && t->found->good >= stored->tokens && // else memory has more
                kvq__reshard_make_way(core, t->peer, t->ns, stored, t->as.shards);
    return goes || is_there_otherwise(t);
}

// Looks what the store has of the session, which nobody changes meanwhile, and then at the poller
// what to do with it: look() sets task->again if it is to be looked for anew, once. Waits.
static void find_session(struct kvq__task *t, void (*look)(struct kvq__task *task))
{
    kvq__task_take_name(t, KVQ__HOLD_LOOK);
    kvq__task_at_work(t, find_stored);
    kvq__task_at_poller(t, look);
    if (!t->again)
        return;
    kvq__found_free(&t->found);
    kvq__task_at_work(t, find_stored);
    kvq__task_at_poller(t, look);
}

// Poller's thread. What is stored is about to be deleted, or was just now.
static bool is_forgotten(const struct kvq__task *t)
{
    return kvq__park_forgotten(t->jobs->server->core, t->ns, t->name, t->found->saved.stamp);
}

// Poller's thread. task->found is then what is to be loaded, NULL: nothing is, or not yet.
static void check_found(struct kvq__task *t)
{
    bool looked_again = t->again;
    t->again = false;
    if (t->rc < 0 || !t->found)
        return;
    bool forgotten = is_forgotten(t), has_fewer = false;
    if (!forgotten && !looked_again) {
        t->again = has_to_look_again(t);
        has_fewer = !t->again && t->found->saved.shard != t->as.shard; // and is as it was saved
    }
    if (forgotten || has_fewer)
        kvq__found_free(&t->found);
}

// ---- Opening ----

// Poller's thread.
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
}

// Poller's thread. What is in memory is opened there, and what the peer may not use is refused.
static void open_if_here(struct kvq__task *t)
{
    char ns[KVQ_NAME_BYTES];
    struct kvq__core *core = t->jobs->server->core;
    t->answered = kvq__namespace_check(core, t->peer, t->ns, ns, NULL) < 0 ||
                  kvq__session_here(core, t->peer, t->ns, t->name, t->as.shard, t->as.shards);
    if (t->answered)
        open_now(t);
}

// Poller's thread. Nobody learns whether a namespace has a session that may not use it.
static void refuse_if_stored(struct kvq__task *t)
{
    char ns[KVQ_NAME_BYTES];
    if (t->rc < 0 || !t->found || is_forgotten(t))
        return;
    t->rc = kvq__namespace_check(t->jobs->server->core, t->peer, t->ns, ns, t->text);
    if (t->rc < 0)
        return;
    t->rc = KVQ_E_EXISTS;
    snprintf(t->text, sizeof t->text,
             "session \"%s\" exists already, on disk; drop it, or open it without must_create",
             t->name);
}

// Poller's thread. What is stored nowhere is made here and now.
static void look_to_open(struct kvq__task *t)
{
    const Kvq__OpenSession *open = t->request->open_session;
    if (open->must_create)
        refuse_if_stored(t);
    check_found(t);
    t->answered = t->rc == 0 && !t->found && !t->again && !open->prefix;
    if (t->answered)
        open_now(t);
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

// Of a session that is not in memory: begins to load what the store has of it, or of its prefix,
// and then opens it. Waits.
static void open_from_store(struct kvq__task *t)
{
    const Kvq__OpenSession *open = t->request->open_session;
    const struct kvq__begin as = {.ns = t->ns, .place = open->place, .then = open_now};
    if (t->name[0] && t->jobs->store)
        find_session(t, look_to_open);
    if (t->answered || t->rc < 0)
        return;
    if (t->found) {
        kvq__load_begin(t, &as);
        return;
    }
    if (open->prefix)
        kvq__jobs_prefix(t);
    kvq__task_at_poller(t, open_now);
}

static void note_opened(struct kvq__task *t)
{
    if (t->rc < 0 || t->reply->status < 0)
        return;
    if (t->stored)
        kvq__jobs_used(t->jobs, t->stored);
    else if (t->jobs->store) // it was in memory
        kvq__jobs_used_name(t->jobs, t->ns, t->name, t->as.shard);
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
        kvq__task_at_work(t, t->before);
    if (t->name[0] && t->jobs->store)
        kvq__task_at_poller(t, open_if_here);
    if (!t->answered)
        open_from_store(t);
    note_opened(t);
    kvq__found_free(&t->found);
    kvq__load_start(t);
    kvq__load_leave(t);
}

// ---- By command ----

// Poller's thread.
static void look_in_memory_to_restore(struct kvq__task *t)
{
    t->answered = kvq__session_here(t->jobs->server->core, t->peer, t->ns, t->name, t->as.shard,
                                    t->as.shards);
}

// Poller's thread. What is not stored may be in memory alone; if it is in neither, that is said.
static void look_to_restore(struct kvq__task *t)
{
    struct kvq__session_info info;
    struct kvq__core *core = t->jobs->server->core;
    check_found(t);
    if (t->rc < 0 || t->again)
        return;
    bool there = t->as.shards && kvq__session_find(core, t->peer, t->ns, t->name, &info, NULL) == 0;
    if (there && info.shards != t->as.shards)
        t->rc = kvq__shards_refuse(core, t->name, info.shards, t->as.shards, t->text);
    if (t->rc == 0 && !t->found)
        t->rc = kvq__session_find(core, t->peer, t->ns, t->name, &info, t->text);
}

void kvq__jobs_restore(struct kvq__task *t)
{
    const Kvq__RestoreSession *ask = t->request->restore_session;
    const struct kvq__begin as = {.ns = t->ns, .place = ask->place};
    t->as = (struct kvq__reshard_as){.shard = ask->shard, .shards = ask->shards};
    if (ask->shards > KVQ_MAX_SHARDS || (ask->shards && ask->shard >= ask->shards)) {
        snprintf(t->text, sizeof t->text, "shard %u of %u; there can be %d, counted from 0",
                 ask->shard, ask->shards, KVQ_MAX_SHARDS);
        t->rc = KVQ_E_INVALID;
        return;
    }
    if (t->name[0])
        kvq__task_at_poller(t, look_in_memory_to_restore);
    if (t->answered)
        return;
    if (t->name[0])
        find_session(t, look_to_restore);
    else // which says that it is missing
        kvq__task_at_poller(t, look_to_restore);
    if (t->rc == 0 && t->found)
        kvq__load_begin(t, &as);
    if (t->rc == 0)
        kvq__jobs_used(t->jobs, t->stored);
    kvq__found_free(&t->found);
    kvq__load_start(t);
    kvq__load_wait(t);
}

// ---- Sessions that are parked ----

// Poller's thread.
static void tell_not_fetched(struct kvq__task *t)
{
    kvq__fetch_failed(t->jobs->server->core, t->job->id, t->rc, t->text);
}

void kvq__jobs_fetch(struct kvq__task *t)
{
    const struct kvq__begin as = {0}; // the core knows
    t->as = (struct kvq__reshard_as){.shard = t->job->shard};
    kvq__task_at_work(t, find_stored);
    if (t->rc == 0 && !t->found) {
        snprintf(t->text, sizeof t->text, "nothing is stored of session \"%s\" any more", t->name);
        t->rc = KVQ_E_NO_SESSION;
    }
    if (t->rc == 0)
        kvq__load_begin(t, &as);
    else
        kvq__task_at_poller(t, tell_not_fetched);
    if (t->rc == 0)
        kvq__jobs_used(t->jobs, t->stored);
    kvq__found_free(&t->found);
    kvq__load_start(t);
    kvq__load_wait(t);
}
