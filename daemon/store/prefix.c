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
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"

enum {
    TRIES = 3, // looks at what changes meanwhile
    MOST = 8,  // sessions of a namespace that are looked at for one prefix
};

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
        rc = found ? kvq_store_find(t->jobs->store, best->session.space, best->session.name, i,
                                    &shard, t->text, sizeof t->text)
                   : KVQ_E_NO_MEMORY;
        rc = rc ? rc : check_shard(t, &shard, found, pages);
        kvq__found_free(&found);
    }
    return rc;
}

// How much of it can be had; task->found is then what it is read from.
static int find_prefix(struct kvq__task *t, const struct best *best, uint32_t *pages)
{
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

// Takes what can be had of a session that was found, if that is more than what there is.
static int take_better(struct kvq__task *t, const struct best *best)
{
    struct kvq__found *had = t->found;
    uint32_t pages = 0;
    assert(best->pages > t->pages && best->pages > t->ask->here);
    t->found = NULL;
    int rc = find_prefix(t, best, &pages);
    if (rc < 0 || pages <= t->pages || pages <= t->ask->here) {
        kvq__found_free(&t->found);
        t->found = had;
        return rc;
    }
    kvq__found_free(&had);
    snprintf(t->ns, sizeof t->ns, "%s", best->session.space);
    snprintf(t->name, sizeof t->name, "%s", best->session.name);
    t->pages = pages;
    t->stored = best->session.id;
    return 0;
}

// Hashes say which pages a session had, not whether they are good, or whether a window has moved on
// past them: others that have the same pages may have more that can be had.
static int ask_space(struct kvq__task *t, uint32_t space, uint8_t (*hashes)[KVQ_PREFIX_BYTES])
{
    const struct kvq__prefix_ask *ask = t->ask;
    uint64_t passed[MOST];
    struct kvq_store_prefix prefix = {.space = ask->spaces[space].name,
                                      .hashes = (const uint8_t(*)[KVQ_PREFIX_BYTES])hashes,
                                      .pages = ask->pages,
                                      .passed = passed};
    kvq__prefix_ask_stored(ask, space, hashes);
    while (prefix.n_passed < MOST) {
        struct best best;
        int rc = kvq_store_match(t->jobs->store, &prefix, &best.pages, &best.session, t->text,
                                 sizeof t->text);
        if (rc < 0 || best.pages <= ask->here || best.pages <= t->pages)
            return rc;
        rc = take_better(t, &best);
        if (rc == KVQ_E_STALE || rc == KVQ_E_NO_MEMORY || (rc == 0 && t->pages == best.pages))
            return rc;
        passed[prefix.n_passed++] = best.session.id;
    }
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
        kvq__task_wake(other);
    }
}

static bool match_pages(struct kvq__task *t)
{
    return kvq__prefix_ask_match(t->ask);
}

// Waits.
static void look_in_memory(struct kvq__task *t, uint32_t from)
{
    kvq__prefix_ask_again(t->ask, from);
    kvq__task_at_poller_in_pieces(t, match_pages);
}

// Nobody waits for it any more, or thinks that it begins.
static void end_beginning(struct kvq__task *t)
{
    TAILQ_REMOVE(&t->jobs->beginning, t, link);
    wake_waiting(t);
}

// Reads the pages that the store has and memory lacks. True once the index shows them, while they
// are still being read; false if it shows less, or they cannot be read (task->rc). Waits.
static bool read_prefix(struct kvq__task *t)
{
    const struct kvq__begin as = {.ns = t->ask->ns,
                                  .place = t->ask->place,
                                  .prefix_tokens = (uint64_t)t->pages * KVQ_BLOCK_TOKENS};
    TAILQ_INSERT_TAIL(&t->jobs->beginning, t, link);
    look_in_memory(t, t->pages);
    if (t->ask->here >= t->pages) { // somebody has put it there while the store was asked
        end_beginning(t);
        return true;
    }
    t->rc = 0;
    kvq__load_begin(t, &as);
    kvq__load_start(t);
    end_beginning(t);
    if (t->reading) {
        look_in_memory(t, t->pages);
        if (t->ask->here >= t->pages) {
            kvq__load_leave(t);
            return true;
        }
        kvq__load_wait(t); // its memory went for something else, and all of it is read first
    }
    return false;
}

// Waits until others have put it there, or does so.
static void look_for_prefix(struct kvq__task *t)
{
    bool again = false; // since something was damaged
    for (;;) {
        t->pages = 0;
        kvq__task_at_poller_in_pieces(t, match_pages);
        if (!t->jobs->store || t->ask->here == t->ask->pages)
            return;
        kvq__task_at_work(t, ask_store);
        if (only_asks(t) || !t->found || t->pages <= t->ask->here)
            return;
        if (who_begins(t->jobs, t)) {
            kvq__found_free(&t->found);
            TAILQ_INSERT_TAIL(&t->jobs->waiting, t, link);
            kvq__task_wait(t);
        } else if (read_prefix(t)) {
            return;
        } else if (again || t->rc != KVQ_E_DAMAGED) {
            look_in_memory(t, t->pages);
            return;
        } else { // it may be good: the store knows now
            again = true;
        }
        kvq__prefix_ask_again(t->ask, 0);
    }
}

static void hash_pages(struct kvq__task *t)
{
    kvq__prefix_ask_hash(t->ask);
}

// Poller's thread.
static void ask_for_prefix(struct kvq__task *t)
{
    const struct kvq__server *server = t->jobs->server;
    struct kvq__dispatch d = {.core = server->core,
                              .identity = &server->identity,
                              .peer = t->peer,
                              .client = t->client,
                              .now_ns = kvq_now_ns()};
    const Kvq__OpenSession *open =
        only_asks(t) ? t->request->lookup_prefix->session : t->request->open_session;
    if (kvq__dispatch_ask(&d, open, t->arena, &t->ask, t->text) < 0)
        t->ask = NULL;
}

void kvq__jobs_prefix(struct kvq__task *t)
{
    t->pages = 0;
    kvq__task_at_poller(t, ask_for_prefix);
    if (t->ask) {
        kvq__task_at_work(t, hash_pages);
        look_for_prefix(t);
    }
    kvq__found_free(&t->found);
    t->rc = 0;
    t->text[0] = 0;
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
}

void kvq__jobs_lookup(struct kvq__task *t)
{
    if (t->before)
        kvq__task_at_work(t, t->before);
    if (t->request->lookup_prefix->session)
        kvq__jobs_prefix(t);
    kvq__task_at_poller(t, answer_prefix);
}
