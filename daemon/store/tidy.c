// SPDX-License-Identifier: Apache-2.0
//
// What is done to the store without being asked, while nothing else is to be done: the store jobs
// note when sessions were used, and have what is dead on disk copied away bit by bit. And what it
// does first when there is no room for a save.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/log/log.h"
#include "daemon/store/internal.h"

enum {
    USED_LEAST = 32,        // sessions that there is room for, to be noted in one go,
    USED_MOST = 4096,       // and the most; those after them are not noted
    DEAD_PERCENT = 50,      // of a segment, to be compacted in the background,
    DEAD_PERCENT_FULL = 10, // and for a save that has no room
    GO_BYTES = 32 << 20,    // copied in one go: what a save that comes then may have to wait for
    FULL_BYTES = 256 << 20, // and in one of those that a save waits for anyway
};

// ---- When sessions were used ----

void kvq__jobs_used(struct kvq__jobs *jobs, uint64_t session)
{
    struct kvq_store_use *used = jobs->used;
    if (session == 0)
        return;
    for (uint32_t i = 0; i < jobs->n_used; i++)
        if (used[i].session == session) {
            used[i].used_at = time(NULL);
            return;
        }
    if (jobs->n_used == jobs->room_used) {
        uint32_t room = jobs->room_used ? 2 * jobs->room_used : USED_LEAST;
        used = room <= USED_MOST ? realloc(used, room * sizeof *used) : NULL;
        if (!used)
            return;
        jobs->used = used;
        jobs->room_used = room;
    }
    used[jobs->n_used++] = (struct kvq_store_use){session, time(NULL)};
}

// A session that was in memory, of which the store jobs do not know what the store calls it.
struct kvq__used_name {
    char ns[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    uint32_t shard;
    int64_t at;
};

void kvq__jobs_used_name(struct kvq__jobs *jobs, const char *ns, const char *name, uint32_t shard)
{
    struct kvq__used_name *named = jobs->named;
    if (!name[0])
        return;
    for (uint32_t i = 0; i < jobs->n_named; i++)
        if (named[i].shard == shard && strcmp(named[i].name, name) == 0 &&
            strcmp(named[i].ns, ns) == 0) {
            named[i].at = time(NULL);
            return;
        }
    if (jobs->n_named == jobs->room_named) {
        uint32_t room = jobs->room_named ? 2 * jobs->room_named : USED_LEAST;
        named = room <= USED_MOST ? realloc(named, room * sizeof *named) : NULL;
        if (!named)
            return;
        jobs->named = named;
        jobs->room_named = room;
    }
    named = &jobs->named[jobs->n_named++];
    *named = (struct kvq__used_name){.shard = shard, .at = time(NULL)};
    snprintf(named->ns, sizeof named->ns, "%s", ns);
    snprintf(named->name, sizeof named->name, "%s", name);
}

// Writes both down. A session that was deleted meanwhile, or was never saved, needs no note. On any
// thread.
static void touch(struct kvq_store *store, const struct kvq_store_use *used, uint32_t n,
                  const struct kvq__used_name *named, uint32_t n_named)
{
    struct kvq_store_use *found = n_named ? calloc(n_named, sizeof *found) : NULL;
    struct kvq_store_session s;
    uint32_t n_found = 0;
    for (uint32_t i = 0; found && i < n_named; i++)
        if (kvq_store_find(store, named[i].ns, named[i].name, named[i].shard, &s, NULL, 0) == 0)
            found[n_found++] = (struct kvq_store_use){s.id, named[i].at};
    if (n)
        (void)kvq_store_touch(store, used, n, NULL, 0);
    if (n_found)
        (void)kvq_store_touch(store, found, n_found, NULL, 0);
    free(found);
}

void kvq__jobs_note_used(struct kvq__jobs *jobs)
{
    if (jobs->store)
        touch(jobs->store, jobs->used, jobs->n_used, jobs->named, jobs->n_named);
    jobs->n_used = jobs->n_named = 0;
}

// ---- A go ----

struct chore {
    struct kvq__task task;
    struct kvq_store_use *used;
    uint32_t n_used;
    struct kvq__used_name *named;
    uint32_t n_named;
    bool compact;
    struct kvq_store_freed freed;
};

static struct chore *chore_of(struct kvq__task *t)
{
    return (struct chore *)((char *)t - offsetof(struct chore, task));
}

// On a thread of libuv's.
static void do_chore(struct kvq__task *t)
{
    struct chore *c = chore_of(t);
    struct kvq_store *store = t->jobs->store;
    touch(store, c->used, c->n_used, c->named, c->n_named);
    if (c->compact)
        t->rc =
            kvq_store_compact(store, GO_BYTES, DEAD_PERCENT, &c->freed, t->text, sizeof t->text);
}

static void tidy_up(struct kvq__task *t)
{
    kvq__task_take_turn(t);
    kvq__task_at_work(t, do_chore);
}

// Whatever hinders it, it is not tried again before something has been written. A store that is
// read-only says so itself.
static void tidy_done(struct kvq__task *t)
{
    struct chore *c = chore_of(t);
    char quoted[KVQ_TEXT_BYTES + 16];
    if (c->compact)
        t->jobs->untidy = t->rc == 0 && c->freed.more;
    if (t->rc < 0 && t->rc != KVQ_E_READ_ONLY)
        kvq__log(KVQ_LOG_WARN, "not_compacted", "text=%s",
                 kvq__log_quote(quoted, sizeof quoted, t->text));
    else if (c->freed.segments > 0)
        kvq__log(KVQ_LOG_INFO, "compacted", "segments=%u freed=%llu moved=%llu", c->freed.segments,
                 (unsigned long long)c->freed.bytes, (unsigned long long)c->freed.moved);
    free(c->used);
    free(c->named);
    free(c);
}

void kvq__jobs_tidy(struct kvq__jobs *jobs)
{
    if (jobs->ended || jobs->draining || jobs->reads.under_way > 0 || jobs->turns.now)
        return;
    if (jobs->n_used == 0 && jobs->n_named == 0 && !jobs->untidy)
        return;
    struct chore *c = calloc(1, sizeof *c);
    if (!c || kvq__task_make(jobs, &c->task) < 0) {
        free(c);
        return;
    }
    c->task.done = tidy_done;
    c->task.doing = "compacting";
    c->compact = jobs->untidy;
    c->used = jobs->used;
    c->n_used = jobs->n_used;
    jobs->used = NULL;
    jobs->n_used = jobs->room_used = 0;
    c->named = jobs->named;
    c->n_named = jobs->n_named;
    jobs->named = NULL;
    jobs->n_named = jobs->room_named = 0;
    kvq__task_start(&c->task, tidy_up);
}

// ---- Room for a save ----

bool kvq__jobs_make_room(struct kvq__jobs *jobs, uint64_t bytes)
{
    struct kvq_store_freed freed;
    uint64_t sum = 0;
    (void)kvq__jobs_sweep_all(jobs, NULL);
    if (kvq_store_gc(jobs->store, &freed, NULL, 0) < 0)
        return false;
    sum = freed.bytes;
    do {
        if (sum >= bytes + KVQ__SPARE_BYTES ||
            kvq_store_compact(jobs->store, FULL_BYTES, DEAD_PERCENT_FULL, &freed, NULL, 0) < 0)
            break;
        sum += freed.bytes > freed.moved ? freed.bytes - freed.moved : 0;
    } while (freed.more);
    return sum > 0;
}

bool kvq__jobs_help(const struct kvq__task *t, uint64_t bytes)
{
    if (t->rc == KVQ_E_QUOTA)
        return kvq__jobs_sweep_all(t->jobs, t->ns) > 0;
    return t->rc == KVQ_E_NO_SPACE && kvq__jobs_make_room(t->jobs, bytes);
}

// ---- What it is doing ----

void kvq__jobs_working(const struct kvq__jobs *jobs, bool names, char *out, size_t n,
                       uint32_t *queued)
{
    struct kvq__write_turn *now = jobs->turns.now;
    const struct kvq__task *first = now ? kvq__task_of_turn(now) : NULL, *t;
    size_t used = 0;
    out[0] = '\0';
    *queued = jobs->turns.n;
    TAILQ_FOREACH (t, &jobs->sleepers, sleep_link)
        *queued += t->set_aside;
    if (first && first->at_poller) // which may be finding out whose it is
        first = NULL;
    if (first && first->name[0] && names)
        used = (size_t)snprintf(out, n, "%s %s/%s", kvq__jobs_doing(first), first->ns, first->name);
    else if (first)
        used = (size_t)snprintf(out, n, "%s", kvq__jobs_doing(first));
    if (jobs->reads.under_way > 0 && used < n)
        snprintf(out + used, n - used, "%srestoring %u session%s", used ? ", " : "",
                 jobs->reads.under_way, jobs->reads.under_way == 1 ? "" : "s");
}
