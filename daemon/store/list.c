// SPDX-License-Identifier: Apache-2.0
//
// Saved sessions, page by page, in the order of the ids that the store gives them.
#include <stdio.h>
#include <stdlib.h>

#include "daemon/commands/cursor.h"
#include "daemon/commands/dispatch.h"
#include "daemon/store/internal.h"

// Whether the request's cursor can be gone on from: 0 or a code with a text.
static int check_saved_cursor(struct kvq__task *t)
{
    const Kvq__Cursor *cursor = t->request->list_saved->cursor;
    int rc = kvq__cursor_check(cursor, t->jobs->server->identity.epoch,
                               KVQ__REQUEST__COMMAND_LIST_SAVED, t->text);
    if (rc || !cursor || cursor->id <= INT64_MAX)
        return rc;
    snprintf(t->text, sizeof t->text,
             "the cursor is behind saved session %llu; no store counts so far: begin the list anew",
             (unsigned long long)cursor->id);
    return KVQ_E_INVALID;
}

static Kvq__SavedEntry *entry_message(struct kvq_arena *arena, const struct kvq_store_session *s)
{
    Kvq__SavedEntry *e = kvq_arena_alloc(arena, sizeof *e);
    if (!e)
        return NULL;
    kvq__saved_entry__init(e);
    e->namespace_ = kvq_arena_text(arena, s->space);
    e->name = kvq_arena_text(arena, s->name);
    e->model = kvq_arena_text(arena, s->model);
    e->formats = kvq_arena_text(arena, s->formats);
    e->shard = s->shard;
    e->shards = s->shards;
    e->tokens = s->tokens;
    e->blocks = s->blocks;
    e->bytes = s->bytes;
    e->saved_at = s->saved_at;
    e->used_at = s->used_at;
    return e;
}

// Adds what was found, but for what is parked and has no name; *after: the last that is done with.
// False once there is no more room.
static bool add_saved(struct kvq_arena *arena, const struct kvq_store_session *found, uint32_t n,
                      Kvq__SavedList *list, size_t *bytes, uint64_t *after)
{
    for (uint32_t i = 0; i < n; i++) {
        Kvq__SavedEntry *e = NULL;
        if (found[i].name[0] != '#') {
            e = entry_message(arena, &found[i]);
            *bytes += e ? kvq__saved_entry__get_packed_size(e) + 4 : KVQ__LIST_BYTES;
            if (*bytes > KVQ__LIST_BYTES || list->n_sessions == KVQ_MAX_LIST)
                return false;
            list->sessions[list->n_sessions++] = e;
        }
        *after = found[i].id;
    }
    return true;
}

// A page: what fits, or as many rows of the store as are read at a time when most have no names.
static void fill_saved(struct kvq__task *t, Kvq__SavedList *list, struct kvq_store_session *s,
                       uint32_t room)
{
    enum { MOST_READS = 16 };
    uint64_t epoch = t->jobs->server->identity.epoch;
    const Kvq__Cursor *cursor = t->request->list_saved->cursor;
    uint64_t after = cursor ? cursor->id : 0;
    uint32_t count = room;
    size_t bytes = 0;
    bool more = true;
    for (int reads = 0; more && count == room && t->rc == 0 && reads < MOST_READS; reads++) {
        t->rc = kvq_store_list(t->jobs->store, t->ns[0] ? t->ns : NULL, after, s, room, &count,
                               t->text, sizeof t->text);
        more = t->rc == 0 && add_saved(t->arena, s, count, list, &bytes, &after);
    }
    list->truncated = !more || count == room;
    if (list->truncated && after)
        list->next = kvq__cursor_new(t->arena, epoch, KVQ__REQUEST__COMMAND_LIST_SAVED);
    if (list->next)
        list->next->id = after;
}

// A page of what is saved, of task->ns or (empty) of all. On a thread of libuv's.
static void list_saved(struct kvq__task *t)
{
    enum { ROOM = 256 };
    struct kvq_store_session *s = calloc(ROOM, sizeof *s);
    Kvq__SavedList *list = kvq_arena_alloc(t->arena, sizeof *list);
    Kvq__SavedEntry **entries = kvq_arena_alloc(t->arena, KVQ_MAX_LIST * sizeof *entries);
    if (!s || !list || !entries) {
        free(s);
        t->rc = KVQ_E_NO_MEMORY;
        return;
    }
    kvq__saved_list__init(list);
    list->sessions = entries;
    fill_saved(t, list, s, ROOM);
    t->reply->saved = list;
    t->reply->result_case = KVQ__REPLY__RESULT_SAVED;
    free(s);
}

void kvq__jobs_list(struct kvq__task *t)
{
    const Kvq__ListSaved *list = t->request->list_saved;
    t->rc = check_saved_cursor(t);
    bool all = t->peer->admin && !list->namespace_[0]; // administrators see all
    if (t->rc == 0 && !all)
        kvq__jobs_resolve(t, list->namespace_, "");
    if (t->rc == 0)
        kvq__task_at_work(t, list_saved);
}
