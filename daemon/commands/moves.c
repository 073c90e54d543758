// SPDX-License-Identifier: Apache-2.0
//
// Commands that send a session elsewhere: to another place, to disk, back; and how far that is.
// They return at once.
#include <assert.h>

#include "daemon/commands/internal.h"

static Kvq__Move *move_message(struct kvq_arena *arena, const struct kvq__move_info *info)
{
    Kvq__Move *m = kvq_arena_alloc(arena, sizeof *m);
    assert(info->phase && info->place && info->name && info->text);
    if (!m)
        return NULL;
    kvq__move__init(m);
    m->id = info->id;
    m->session = kvq_arena_text(arena, info->name);
    m->place = kvq_arena_text(arena, info->place);
    m->phase = kvq_arena_text(arena, info->phase);
    m->finished = info->finished;
    m->status = info->status;
    m->text = kvq_arena_text(arena, info->text);
    m->bytes = info->bytes;
    m->moved_bytes = info->moved_bytes;
    m->shared_bytes = info->shared_bytes;
    return m;
}

static int answer_move(struct kvq__call *call, const struct kvq__move_info *info)
{
    Kvq__Move *m = move_message(call->arena, info);
    if (!m)
        return kvq__call_no_room(call);
    call->reply->move = m;
    call->reply->result_case = KVQ__REPLY__RESULT_MOVE;
    return 0;
}

int kvq__run_move_session(struct kvq__call *call)
{
    const struct kvq__dispatch *d = call->d;
    const Kvq__MoveSession *m = call->request->move_session;
    struct kvq__move_spec spec = {
        .place = m->place, .one_shard = m->one_shard, .shard = m->shard, .wait_ms = m->wait_ms};
    struct kvq__move_info info;
    int error = 0;
    if (m->which_case == KVQ__MOVE_SESSION__WHICH_REF) {
        error = kvq__session_move_named(d->core, d->peer, m->ref->namespace_, m->ref->name, &spec,
                                        &info, call->text);
    } else {
        error = kvq__call_needs_client(call);
        error = error ? error : kvq__session_move(d->client, m->handle, &spec, &info, call->text);
    }
    return error ? error : answer_move(call, &info);
}

int kvq__run_park_session(struct kvq__call *call)
{
    const struct kvq__dispatch *d = call->d;
    const Kvq__ParkSession *m = call->request->park_session;
    struct kvq__move_info info;
    int error = 0;
    if (m->which_case == KVQ__PARK_SESSION__WHICH_REF) {
        error = kvq__session_park_named(d->core, d->peer, m->ref->namespace_, m->ref->name, &info,
                                        call->text);
    } else {
        error = kvq__call_needs_client(call);
        error = error ? error : kvq__session_park(d->client, m->handle, &info, call->text);
    }
    return error ? error : answer_move(call, &info);
}

int kvq__run_prefetch_session(struct kvq__call *call)
{
    const struct kvq__dispatch *d = call->d;
    const Kvq__PrefetchSession *m = call->request->prefetch_session;
    struct kvq__move_info info;
    int error = 0;
    if (m->which_case == KVQ__PREFETCH_SESSION__WHICH_REF) {
        error = kvq__session_prefetch_named(d->core, d->peer, m->ref->namespace_, m->ref->name,
                                            &info, call->text);
    } else {
        error = kvq__call_needs_client(call);
        error = error ? error : kvq__session_prefetch(d->client, m->handle, &info, call->text);
    }
    return error ? error : answer_move(call, &info);
}

int kvq__run_ask_move(struct kvq__call *call)
{
    struct kvq__move_info info;
    int error = kvq__move_info(call->d->core, call->d->peer, call->request->ask_move->id, &info,
                               call->text);
    return error ? error : answer_move(call, &info);
}
