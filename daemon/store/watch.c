// SPDX-License-Identifier: Apache-2.0
//
// What monitors see of the store: server->storage. The figures of the disk are looked at every two
// seconds by a thread of libuv's, which may have to wait for a commit, so nobody who asks for them
// does. What failed is counted where it ends, on the loop's thread, as all who read it are.
#include <stdlib.h>

#include "daemon/store/internal.h"
#include "proto/clock.h"

enum { LOOK_MS = 2000 };

// ---- What has ended ----

// Else whoever asked for it can tell by the answer, and nothing is wrong here.
static bool is_ours(int rc)
{
    switch (rc) {
    case KVQ_E_BUSY:
    case KVQ_E_CANCELLED:
    case KVQ_E_DRAINING:
    case KVQ_E_EXISTS:
    case KVQ_E_NO_SESSION:
    case KVQ_E_STALE:
        return false;
    default:
        return rc < 0;
    }
}

void kvq__jobs_note_end(struct kvq__jobs *jobs, enum kvq__store_time what, int rc)
{
    struct kvq__storage_state *state = &jobs->server->storage;
    if (rc >= 0)
        state->failed[what].went_well = true;
    if (!is_ours(rc))
        return;
    state->failed[what].went_well = false;
    state->failed[what].count++;
    state->failed[what].by_quota += rc == KVQ_E_QUOTA;
    state->failed[what].status = rc;
    state->failed[what].at_ns = kvq_now_ns();
}

// ---- The disk ----

struct look {
    struct kvq__task task;
    struct kvq_store_status status;
};

static struct look *look_of(struct kvq__task *t)
{
    return (struct look *)((char *)t - offsetof(struct look, task));
}

// On a thread of libuv's.
static void look_at_store(struct kvq__task *t)
{
    t->rc = kvq_store_brief(t->jobs->store, &look_of(t)->status, t->text, sizeof t->text);
}

static void watch_store(struct kvq__task *t)
{
    kvq__task_at_work(t, look_at_store);
}

static void watch_done(struct kvq__task *t)
{
    struct look *look = look_of(t);
    struct kvq__storage_state *state = &t->jobs->server->storage;
    const struct kvq_store_status *s = &look->status;
    t->jobs->watching = false;
    state->known = t->rc == 0; // old figures are worse than none
    if (state->known) {
        state->read_only = s->read_only;
        state->sessions = s->sessions;
        state->used_bytes = s->physical_bytes;
        state->limit_bytes = s->cap_bytes;
        state->free_bytes = s->free_bytes;
        state->room_bytes = s->room_bytes;
    }
    free(look);
}

void kvq__jobs_watch(struct kvq__jobs *jobs)
{
    uint64_t now = kvq_now_ns();
    if (jobs->ended || jobs->watching ||
        (jobs->watched_ns && now - jobs->watched_ns < LOOK_MS * 1000000ull))
        return;
    struct look *look = calloc(1, sizeof *look);
    if (!look || kvq__task_make(jobs, &look->task) < 0) {
        free(look);
        return;
    }
    jobs->watching = true;
    jobs->watched_ns = now;
    look->task.done = watch_done;
    kvq__task_start(&look->task, watch_store);
}
