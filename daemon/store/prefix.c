// SPDX-License-Identifier: Apache-2.0
//
// Prefixes, before a session is looked up or opened with one. A thread of libuv's hashes the pages,
// the poller looks at the index piece by piece, and a thread asks the store for what memory lacks;
// if the store has more, those pages get memory and go to the index, and while they are read the
// session begins with them as with any that are there (restore_follow.c). Nothing fails for want of
// it: the engine computes what was not to be had.
//
// Any number of prefixes is read at a time, in the order of queue.h. Whoever wants what
// another one is about to put into the index waits for that moment, and then finds it there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

enum { TRIES = 3 }; // looks at what changes meanwhile

static bool only_asks(const struct kvq__task *t)
{
    return t->request->command_case == KVQ__REQUEST__COMMAND_LOOKUP_PREFIX;
}

// ---- Asking the store, on a thread of libuv's ----

// The best that was found in a namespace: whose pages, and how many.
struct best {
    struct kvq_store_session session;
    uint32_t pages;
};

// Fewer pages if that is all that is good of a shard; 0 if nobody can begin with them.
static int check_shard(struct kvq__task *t, const struct kvq_store_session *s,
                       struct kvq__found *found, uint32_t *pages)
{
    uint64_t good = 0;
    int rc = kvq__found_meta(t, s, found);
    rc = rc ? rc : kvq_store_good_tokens(t->jobs->store, s, &good, t->text, sizeof t->text);
    if (rc < 0)
        return rc;
    if (good / KVQ_BLOCK_TOKENS < *pages)
        *pages = (uint32_t)(good / KVQ_BLOCK_TOKENS);
    found->good = (uint64_t)*pages * KVQ_BLOCK_TOKENS;
    if (!kvq__saved_can_begin(&found->saved, found->good))
        *pages = 0;
    return 0;
}

// All shards that the session had begin at one count.
static int check_others(struct kvq__task *t, const struct best *best, uint32_t *pages)
{
    int rc = 0;
    for (uint32_t i = 0; i < best->session.shards && rc == 0 && *pages > 0; i++) {
        struct kvq_store_session shard;
        struct kvq__found *found;
        if (i == best->session.shard)
            continue;
        found = calloc(1, sizeof *found);
        rc = found ? kvq_store_find(t->jobs->store, t->ns, t->name, i, &shard, t->text,
                                    sizeof t->text)
                   : KVQ_E_NO_MEMORY;
        rc = rc ? rc : check_shard(t, &shard, found, pages);
        kvq__found_free(&found);
    }
    return rc;
}

// How much of it can be had; task->found is then what it is read from.
static int find_prefix(struct kvq__task *t, const struct best *best, uint32_t *pages)
{
    snprintf(t->ns, sizeof t->ns, "%s", best->session.space);
    snprintf(t->name, sizeof t->name, "%s", best->session.name);
    *pages = best->pages;
    int rc = check_others(t, best, pages);
    t->found = rc ? NULL : calloc(1, sizeof *t->found);
    if (!t->found)
        return rc ? rc : KVQ_E_NO_MEMORY;
    rc = check_shard(t, &best->session, t->found, pages);
    if (rc == 0 && *pages > t->ask->here && !only_asks(t))
        rc = kvq__found_blocks(t, &best->session, t->found);
    return rc;
}

static int ask_space(struct kvq__task *t, uint32_t space, uint8_t (*hashes)[KVQ_PREFIX_BYTES])
{
    const struct kvq__prefix_ask *ask = t->ask;
    struct best best;
    uint32_t pages = 0;
    kvq__prefix_ask_stored(ask, space, hashes);
    int rc = kvq_store_match(t->jobs->store, ask->spaces[space].name,
                             (const uint8_t(*)[KVQ_PREFIX_BYTES])hashes, ask->pages, &best.pages,
                             &best.session, t->text, sizeof t->text);
    if (rc < 0 || best.pages <= ask->here || best.pages <= t->pages)
        return rc;
    struct kvq__found *had = t->found;
    t->found = NULL;
    rc = find_prefix(t, &best, &pages);
    if (rc < 0 || pages <= t->pages || pages <= ask->here) {
        kvq__found_free(&t->found);
        t->found = had;
        return rc;
    }
    kvq__found_free(&had);
    t->pages = pages;
    t->stored = best.session.id;
    return 0;
}

static void ask_store(struct kvq__task *t)
{
    uint8_t(*hashes)[KVQ_PREFIX_BYTES] = calloc(t->ask->pages, sizeof *hashes);
    for (uint32_t i = 0; i < t->ask->n_spaces && hashes; i++) {
        int rc = KVQ_E_STALE;
        for (int tries = 0; tries < TRIES && rc == KVQ_E_STALE; tries++)
            rc = ask_space(t, i, hashes);
    }
    free(hashes);
    if (t->found)
        kvq__found_books(t);
}

// ---- There and back ----

static void look_in_memory(struct kvq__task *t);

// Poller's thread. The ask goes with the command, which ends it.
static void go_on_with_prefix(struct kvq__task *t)
{
    t->rc = 0;
    t->text[0] = 0;
    t->next(t);
}

// What another one is about to put into the index is what this one wants. NULL: nobody does.
static struct kvq__task *who_begins(const struct kvq__jobs *jobs, const struct kvq__task *t)
{
    struct kvq__task *other;
    TAILQ_FOREACH (other, &jobs->beginning, link)
        if (other->pages == t->pages && kvq__prefix_ask_same(other->ask, t->ask, t->pages))
            return other;
    return NULL;
}

// Whoever waited for it looks anew.
static void wake_waiting(const struct kvq__task *t)
{
    struct kvq__jobs *jobs = t->jobs;
    struct kvq__task *other = TAILQ_FIRST(&jobs->waiting), *next;
    for (; other; other = next) {
        next = TAILQ_NEXT(other, link);
        if (other->pages != t->pages || !kvq__prefix_ask_same(other->ask, t->ask, t->pages))
            continue;
        TAILQ_REMOVE(&jobs->waiting, other, link);
        kvq__prefix_ask_again(other->ask, 0);
        kvq__task_to_poller(other, look_in_memory);
    }
}

// The index has less of it than was to be read, or it could not be begun.
static void has_read(struct kvq__task *t)
{
    bool less = t->rc == KVQ_E_DAMAGED && !t->asked_again; // may be good: the store knows now
    t->asked_again |= less;
    t->has_asked = !less;
    kvq__prefix_ask_again(t->ask, less ? 0 : t->pages);
    kvq__task_to_poller(t, look_in_memory);
}

static void is_shown(struct kvq__task *t);
static void is_not_shown(struct kvq__task *t);

// Poller's thread.
static void look_at_begun(struct kvq__task *t)
{
    if (!kvq__prefix_ask_match(t->ask))
        kvq__task_to_poller(t, look_at_begun);
    else
        kvq__task_to_loop(t, t->ask->here >= t->pages ? is_shown : is_not_shown);
}

// All of it has memory, and is in the index unless that went for something else. It is read while
// the session goes on.
static void has_begun(struct kvq__task *t)
{
    TAILQ_REMOVE(&t->jobs->beginning, t, link);
    wake_waiting(t);
    if (!t->reading) {
        has_read(t);
        return;
    }
    kvq__prefix_ask_again(t->ask, t->pages);
    kvq__task_to_poller(t, look_at_begun);
}

static void is_shown(struct kvq__task *t)
{
    kvq__jobs_load_leave(t);
    kvq__task_to_poller(t, go_on_with_prefix);
}

static void is_not_shown(struct kvq__task *t)
{
    kvq__jobs_load_wait(t, has_read);
}

// Somebody has put it there while the store was asked.
static void is_there(struct kvq__task *t)
{
    TAILQ_REMOVE(&t->jobs->beginning, t, link);
    wake_waiting(t);
    kvq__found_free(&t->found);
    kvq__task_to_poller(t, go_on_with_prefix);
}

// Poller's thread.
static void read_prefix(struct kvq__task *t)
{
    if (!kvq__prefix_ask_match(t->ask)) {
        kvq__task_to_poller(t, read_prefix);
        return;
    }
    if (t->ask->here >= t->pages) {
        kvq__task_to_loop(t, is_there);
        return;
    }
    const struct kvq__begin as = {.ns = t->ask->ns,
                                  .place = t->ask->place,
                                  .prefix_tokens = (uint64_t)t->pages * KVQ_BLOCK_TOKENS};
    kvq__jobs_load(t, &as, has_begun);
}

static void asked(uv_work_t *work, int status)
{
    struct kvq__task *t = kvq__task_of(work);
    struct kvq__jobs *jobs = t->jobs;
    (void)status;
    bool reads = !only_asks(t) && t->found && t->pages > t->ask->here;
    if (reads && !who_begins(jobs, t)) {
        TAILQ_INSERT_TAIL(&jobs->beginning, t, link);
        kvq__prefix_ask_again(t->ask, t->pages);
        kvq__task_to_poller(t, read_prefix);
        return;
    }
    kvq__found_free(&t->found);
    if (reads)
        TAILQ_INSERT_TAIL(&jobs->waiting, t, link);
    else
        kvq__task_to_poller(t, go_on_with_prefix);
}

static void go_ask(struct kvq__task *t)
{
    kvq__task_to_work(t, ask_store, asked);
}

// Poller's thread. A piece at a time: others are served in between.
static void look_in_memory(struct kvq__task *t)
{
    if (!kvq__prefix_ask_match(t->ask))
        kvq__task_to_poller(t, look_in_memory);
    else if (t->has_asked || !t->jobs->store || t->ask->here == t->ask->pages)
        go_on_with_prefix(t);
    else {
        t->pages = 0;
        kvq__task_to_loop(t, go_ask);
    }
}

static void hash(struct kvq__task *t)
{
    kvq__prefix_ask_hash(t->ask);
}

static void hashed(uv_work_t *work, int status)
{
    (void)status;
    kvq__task_to_poller(kvq__task_of(work), look_in_memory);
}

static void go_hash(struct kvq__task *t)
{
    kvq__task_to_work(t, hash, hashed);
}

// Poller's thread.
void kvq__jobs_prefix(struct kvq__task *t, const Kvq__OpenSession *open,
                      void (*next)(struct kvq__task *task))
{
    const struct kvq__server *server = t->jobs->server;
    struct kvq__dispatch d = {.core = server->core,
                              .identity = &server->identity,
                              .peer = t->peer,
                              .client = t->client,
                              .now_ns = kvq_now_ns()};
    t->next = next;
    t->asked_again = t->has_asked = false;
    t->pages = 0;
    if (kvq__dispatch_ask(&d, open, t->arena, &t->ask, t->text) < 0 || !t->ask)
        go_on_with_prefix(t);
    else
        kvq__task_to_loop(t, go_hash);
}

// ---- Lookups ----

// Poller's thread.
static void answer_prefix(struct kvq__task *t)
{
    const struct kvq__server *server = t->jobs->server;
    struct kvq__dispatch d = {.core = server->core,
                              .identity = &server->identity,
                              .peer = t->peer,
                              .client = t->client,
                              .ask = t->ask,
                              .now_ns = kvq_now_ns()};
    uint64_t on_disk = (uint64_t)t->pages * KVQ_BLOCK_TOKENS;
    kvq__dispatch_run(&d, t->request, t->arena, t->reply);
    kvq__prefix_ask_end(&t->ask);
    if (t->reply->status == 0 && t->reply->lookup_prefix->tokens < on_disk)
        t->reply->lookup_prefix->tokens = on_disk;
    kvq__task_to_loop(t, kvq__task_end);
}

static void look_up(struct kvq__task *t)
{
    const Kvq__OpenSession *session = t->request->lookup_prefix->session;
    if (session)
        kvq__jobs_prefix(t, session, answer_prefix);
    else
        answer_prefix(t);
}

static void read_prefix_codebooks(struct kvq__task *t)
{
    if (t->before)
        t->before(t);
}

static void prefix_codebooks_are_read(uv_work_t *work, int status)
{
    (void)status;
    kvq__task_to_poller(kvq__task_of(work), look_up);
}

void kvq__jobs_lookup(struct kvq__task *t)
{
    kvq__task_to_work(t, read_prefix_codebooks, prefix_codebooks_are_read);
}
