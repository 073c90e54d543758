// SPDX-License-Identifier: Apache-2.0
//
// An orderly end saves all named sessions that are not saved, many in one transaction. A session
// that cannot be saved is taken out of the transaction and named; one that something under way
// still changes is looked at again in the next round.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log/log.h"
#include "daemon/runtime/service.h"
#include "daemon/runtime/workers.h"
#include "daemon/store/internal.h"
#include "proto/sync.h"

enum {
    BATCH = 256,         // sessions in one transaction
    PATIENCE_MS = 10000, // in which no session could be taken hold of,
    AGAIN_MS = 3,        // looked at again so often
    // What a task's rc is beside 0, KVQ__SAVE_WAITS and codes: the transaction had no room for it.
    NEXT_BATCH = KVQ__SAVE_THERE_IS + 1,
};
static_assert(BATCH * 4 <= KVQ_MAX_STORE_SESSIONS, "most sessions have fewer than four shards");

static const struct kvq__peer self = {.admin = true};

struct drain {
    struct kvq__task task;      // whose turn to write it is
    struct kvq__unsaved *list;  // of this round
    uint32_t n, room, found;    // in it; and that the core found
    uint32_t at, kept;          // the next one; and of those before, for the next round
    struct kvq__unsaved *given; // up
    uint32_t n_given, room_given;
    struct kvq__task *tasks[BATCH];
    struct kvq__batch batch; // of these
    bool moved, any;         // some were saved or given up in this round; since the core was asked
    uint64_t begun;
    uint32_t saved;
};

static struct drain *drain_of(struct kvq__task *t)
{
    return (struct drain *)((char *)t - offsetof(struct drain, task));
}

// On a thread of libuv's.
static void write_drained(struct kvq__task *task)
{
    struct drain *d = drain_of(task);
    kvq__batch_copy(&d->batch);
    kvq__batch_write(&d->batch);
}

// ---- A batch ----

static void keep(struct drain *d, const struct kvq__task *t)
{
    struct kvq__unsaved *u = &d->list[d->kept++];
    *u = (struct kvq__unsaved){.id = t->stored, .tokens = t->tokens};
    snprintf(u->ns, sizeof u->ns, "%s", t->ns);
    snprintf(u->name, sizeof u->name, "%s", t->name);
}

static void give_up(struct drain *d, const struct kvq__unsaved *u, const char *text)
{
    char ns[KVQ_NAME_BYTES + 16], name[KVQ_NAME_BYTES + 16], why[KVQ_TEXT_BYTES + 16];
    kvq__log(KVQ_LOG_WARN, "not_saved", "namespace=%s session=%s tokens=%llu text=%s",
             kvq__log_quote(ns, sizeof ns, u->ns), kvq__log_quote(name, sizeof name, u->name),
             (unsigned long long)u->tokens, kvq__log_quote(why, sizeof why, text));
    if (d->n_given == d->room_given) {
        uint32_t room = d->room_given ? 2 * d->room_given : BATCH;
        struct kvq__unsaved *more = realloc(d->given, room * sizeof *more);
        if (!more) { // it is tried and named again
            d->any = false;
            return;
        }
        d->given = more;
        d->room_given = room;
    }
    d->given[d->n_given++] = *u;
    d->task.jobs->server->drain.not_saved = d->n_given;
}

static void end_one(struct drain *d, struct kvq__task *t)
{
    const struct kvq__unsaved u = {.id = t->stored, .tokens = t->tokens};
    kvq__name_give(&d->task.jobs->names, &t->hold);
    if (t->rc == NEXT_BATCH || t->rc == KVQ__SAVE_WAITS) {
        d->moved |= t->rc == NEXT_BATCH;
        keep(d, t);
    } else if (t->rc == 0) {
        d->moved = d->any = true;
        d->saved += !t->unchanged;
        t->jobs->server->drain.unsaved -= t->jobs->server->drain.unsaved > 0;
        t->jobs->server->drain.saved = d->saved;
        t->quiet = t->unchanged;
        kvq__jobs_tell_saved(t);
    } else if (t->rc != KVQ_E_NO_SESSION) { // that it was dropped meanwhile
        struct kvq__unsaved named = u;
        snprintf(named.ns, sizeof named.ns, "%s", t->ns);
        snprintf(named.name, sizeof named.name, "%s", t->name);
        d->moved = true;
        kvq__jobs_note_end(t->jobs, KVQ__TIME_SAVE, t->rc);
        kvq__jobs_tell_saved(t);
        give_up(d, &named, t->text);
    }
    free(t);
}

// Poller's thread.
static void end_saves(struct kvq__task *task)
{
    struct drain *d = drain_of(task);
    for (uint32_t i = 0; i < d->batch.n; i++)
        kvq__save_end(&d->batch.tasks[i]->save, d->batch.tasks[i]->rc == 0);
}

// Poller's thread.
static void take_hold_of_unsaved(struct kvq__task *task)
{
    struct drain *d = drain_of(task);
    uint64_t bytes = 0;
    uint32_t sessions = 0;
    for (uint32_t i = 0; i < d->batch.n; i++) {
        struct kvq__task *t = d->batch.tasks[i];
        const struct kvq__save_spec spec = {.ns = t->ns, .name = t->name};
        if (bytes >= KVQ__BATCH_BYTES || sessions > KVQ_MAX_STORE_SESSIONS - KVQ_MAX_SHARDS) {
            t->rc = NEXT_BATCH;
            continue;
        }
        t->rc = kvq__save_begin(task->jobs->server->core, &self, &spec, &t->save, t->text);
        t->unchanged = t->rc == 0 && !t->save;
        t->needed = t->save ? kvq__jobs_unsaved_bytes(t) : 0;
        bytes += t->needed;
        sessions += t->save ? kvq__save_shards(t->save) : 0;
    }
}

static void drain_has_name(struct kvq__hold *hold)
{
    (void)hold; // who asked looks whether it is held
}

// Takes the names that can be had at once: nobody waits for one while he has others.
static void take_names(struct drain *d)
{
    struct kvq__jobs *jobs = d->task.jobs;
    for (; d->at < d->n && d->batch.n < BATCH; d->at++) {
        const struct kvq__unsaved u = d->list[d->at];
        struct kvq__task *t = calloc(1, sizeof *t);
        if (!t) {
            give_up(d, &u, "no memory to save it");
            continue;
        }
        t->jobs = jobs;
        t->own = true;
        t->stored = u.id; // in memory
        t->tokens = u.tokens;
        snprintf(t->ns, sizeof t->ns, "%s", u.ns);
        snprintf(t->name, sizeof t->name, "%s", u.name);
        t->hold.kind = KVQ__HOLD_ALONE;
        kvq__name_take(&jobs->names, &t->hold, t->ns, t->name, drain_has_name);
        if (t->hold.held) {
            d->batch.tasks[d->batch.n++] = t;
        } else {
            kvq__name_give(&jobs->names, &t->hold);
            keep(d, t);
            free(t);
        }
    }
}

// What the full disk has refused is tried again if transfers have left files, which go now. Waits.
static void make_room_for_refused(struct drain *d)
{
    uint64_t bytes = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < d->batch.n; i++)
        if (d->batch.tasks[i]->save && d->batch.tasks[i]->rc == KVQ_E_NO_SPACE) {
            bytes += d->batch.tasks[i]->needed;
            n++;
        }
    if (n == 0 || !kvq__transfers_make_room(&d->task, bytes))
        return;
    d->batch.full = false;
    for (uint32_t i = 0; i < d->batch.n; i++)
        if (d->batch.tasks[i]->save && d->batch.tasks[i]->rc == KVQ_E_NO_SPACE)
            d->batch.tasks[i]->rc = NEXT_BATCH;
}

// Saves those whose names it has. Waits.
static void save_batch(struct drain *d)
{
    struct kvq__task *task = &d->task;
    kvq__task_take_turn(task);
    kvq__task_at_poller(task, take_hold_of_unsaved);
    kvq__task_at_work(task, write_drained);
    make_room_for_refused(d);
    kvq__task_at_poller(task, end_saves);
    kvq__task_step_aside(task);
    for (uint32_t i = 0; i < d->batch.n; i++)
        end_one(d, d->batch.tasks[i]);
    d->batch.n = 0;
}

// ---- Rounds ----

// Gives up the sessions that are left, but for those that another command uses. Such a command
// ends, even if it is a save of the session that takes minutes, and then the session's later tokens
// can be saved. Returns whether it has given up some.
static bool give_up_waiting(struct drain *d)
{
    char text[KVQ_TEXT_BYTES];
    uint32_t n = 0;
    snprintf(text, sizeof text,
             "it was changed, packed, moved or read from disk for %g s without a break",
             PATIENCE_MS / 1000.0);
    for (uint32_t i = 0; i < d->n; i++) {
        const struct kvq__unsaved u = d->list[i];
        if (kvq__name_is_free(&d->task.jobs->names, u.ns, u.name))
            give_up(d, &u, text);
        else
            d->list[n++] = u;
    }
    bool some = n < d->n;
    d->n = n;
    return some;
}

// All of the list, and those that something under way still changes again. False if some of them
// cannot be had, or the time is up. Waits.
static bool save_list(struct drain *d)
{
    uint64_t waits_since = kvq_now_ns(); // nothing has moved
    bool all = true;
    while (d->n > 0 && !d->task.jobs->ended) {
        d->moved = false;
        for (d->at = d->kept = 0; d->at < d->n && !d->task.jobs->ended;) {
            take_names(d);
            if (d->batch.n > 0)
                save_batch(d);
        }
        d->n = d->kept;
        uint64_t now = kvq_now_ns();
        if (d->moved)
            waits_since = now;
        if (d->n > 0 && now - waits_since >= PATIENCE_MS * 1000000ull) {
            all &= !give_up_waiting(d);
            waits_since = now;
        }
        if (d->n > 0 && !d->moved)
            kvq__task_sleep(&d->task, AGAIN_MS);
    }
    return all && d->n == 0;
}

// ---- What there is to be saved ----

static bool is_given_up(const struct drain *d, uint64_t id)
{
    for (uint32_t i = 0; i < d->n_given; i++)
        if (d->given[i].id == id)
            return true;
    return false;
}

// Poller's thread.
static void ask_what_is_unsaved(struct kvq__task *task)
{
    struct drain *d = drain_of(task);
    d->found = kvq__core_unsaved(task->jobs->server->core, KVQ__UNSAVED_ALL, 0, d->list, d->room);
}

// Puts what is unsaved and was not given up into the list. Waits.
static void list_unsaved(struct drain *d)
{
    struct kvq__unsaved *more;
    kvq__task_at_poller(&d->task, ask_what_is_unsaved);
    while (d->found > d->room && (more = realloc(d->list, d->found * sizeof *more))) {
        d->list = more;
        d->room = d->found;
        kvq__task_at_poller(&d->task, ask_what_is_unsaved);
    }
    d->n = 0;
    for (uint32_t i = 0; i < d->found && i < d->room; i++)
        if (!is_given_up(d, d->list[i].id))
            d->list[d->n++] = d->list[i];
    d->task.jobs->server->drain.unsaved = d->n;
    if (d->n == 0)
        return;
    kvq__log(KVQ_LOG_INFO, "saving", "sessions=%u", d->n);
    kvq__service_saving(d->task.jobs->server->service);
}

// ---- From beginning to end ----

static void drain(struct kvq__task *task)
{
    struct drain *d = drain_of(task);
    d->begun = kvq_now_ns();
    do {
        d->any = false;
        list_unsaved(d);
    } while (save_list(d) && d->any); // more may have come since
    if (d->saved > 0 || d->n_given > 0)
        kvq__log(d->n_given ? KVQ_LOG_WARN : KVQ_LOG_INFO, "all_saved",
                 "sessions=%u transactions=%u not_saved=%u ms=%llu", d->saved,
                 d->batch.transactions, d->n_given,
                 (unsigned long long)((kvq_now_ns() - d->begun) / 1000000));
    task->rc = 0;
    task->writes = d->batch.transactions > 0;
}

static void end_drain(struct kvq__task *task)
{
    struct drain *d = drain_of(task);
    struct kvq__jobs *jobs = task->jobs;
    void (*drained)(struct kvq__server *) = jobs->drained;
    jobs->drained = NULL;
    free(d->list);
    free(d->given);
    free(d);
    drained(jobs->server);
}

void kvq__jobs_drain_on(struct kvq__jobs *jobs)
{
    void (*drained)(struct kvq__server *) = jobs->drained;
    if (!drained || jobs->drain_begun || jobs->n_own > 0 || jobs->asking)
        return;
    struct drain *d = calloc(1, sizeof *d);
    jobs->drain_begun = true;
    if (!d || kvq__task_make(jobs, &d->task) < 0) {
        free(d);
        kvq__log(KVQ_LOG_WARN, "not_saved", "text=\"no memory to save what is not saved\"");
        jobs->drained = NULL;
        drained(jobs->server);
        return;
    }
    d->batch = (struct kvq__batch){.jobs = jobs, .tasks = d->tasks};
    d->task.done = end_drain;
    d->task.doing = "saving what is not saved";
    kvq__task_start(&d->task, drain);
}

void kvq__jobs_drain(struct kvq__jobs *jobs, void (*done)(struct kvq__server *server))
{
    assert(!jobs->drained && !jobs->ended);
    kvq_word_store(&jobs->leaving, 1);
    kvq__transfers_stop(jobs);
    if (!jobs->store || !jobs->server->config.save_on_drain) {
        done(jobs->server);
        return;
    }
    jobs->draining = true;
    jobs->drained = done;
    kvq__jobs_drain_on(jobs);
}
