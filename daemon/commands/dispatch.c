// SPDX-License-Identifier: Apache-2.0
//
// One function a command; see dispatch.h. Messages have passed proto/wire.c, so strings are
// bounded and printable; what they mean is checked by the core.
#include "daemon/commands/dispatch.h"
#include "daemon/core/residency/saved.h"

#include <stdio.h>
#include <string.h>

void kvq__reply_status(Kvq__Reply *reply, struct kvq_arena *arena, int status, const char *text)
{
    const char *plain = status == 0 ? "" : kvq_status_text(status);
    reply->status = status;
    reply->text = kvq_arena_text(arena, status != 0 && *text ? text : plain);
    if (status != 0 && !reply->text[0]) // no room left; packing only reads it
        reply->text = (char *)(uintptr_t)plain;
    reply->result_case = KVQ__REPLY__RESULT__NOT_SET;
}

// ---- Sessions ----

static const char *tier_of(const struct kvq__session_info *info)
{
    return info->offloaded ? "disk" : info->isa[0] && !info->demoted ? "device" : "host";
}

Kvq__Session *kvq__session_message(struct kvq_arena *arena, const struct kvq__session_info *info,
                                   const char *isa)
{
    static const char *const rotations[] = {"none", "engine", "daemon", "mixed"};
    Kvq__Session *s = kvq_arena_alloc(arena, sizeof *s);
    if (!s)
        return NULL;
    kvq__session__init(s);
    s->handle = info->handle;
    s->id = info->id;
    s->namespace_ = kvq_arena_text(arena, info->ns);
    s->name = kvq_arena_text(arena, info->name);
    s->model = kvq_arena_text(arena, info->model);
    s->tokens = info->tokens;
    s->layers = info->layers;
    s->format = kvq_arena_text(arena, info->format);
    s->bits_per_value = info->bits_per_value;
    s->bytes_per_token_head = info->bytes_per_token_head;
    s->bytes_per_token_head_total = info->bytes_per_token_head_total;
    s->full_precision_tokens = info->full_precision_tokens;
    s->compression = info->compression;
    s->packed_bytes = info->packed_bytes;
    s->window_bytes = info->window_bytes;
    s->table_bytes = info->table_bytes;
    s->writer_client = info->writer_client;
    s->readers = info->readers;
    s->step_open = info->step_open;
    s->idle_ms = info->idle_ms;
    s->keep_ms = info->keep_ms;
    // The host has two ways to attend, a GPU has one.
    const char *path = info->path == KVQ_PATH_FAST ? "fast" : "exact";
    s->path = kvq_arena_text(arena, info->isa[0] ? "gpu" : path);
    s->isa = kvq_arena_text(arena, info->isa[0] ? info->isa : isa);
    s->max_rollback = info->max_rollback;
    s->created = info->created;
    s->q_heads = info->q_heads;
    s->kv_heads = info->kv_heads;
    s->head_dim = info->head_dim;
    s->saturated_values = info->saturated_values;
    s->v_rotation = kvq_arena_text(arena, rotations[info->v_rotation % 4]);
    s->layer_formats = kvq_arena_text(arena, info->layer_formats);
    s->place = kvq_arena_text(arena, info->place);
    s->shard = info->shard;
    s->shards = info->shards;
    s->group_tokens = info->group_tokens;
    s->prefix_tokens = info->prefix_tokens;
    s->exact_tokens = info->exact_tokens;
    s->packs_early = info->packs_early;
    s->shared_unknown = info->shared_unknown;
    s->shared_bytes = info->shared_bytes;
    s->loading_layers = info->loading;
    s->saved = info->saved;
    s->tier = kvq_arena_text(arena, tier_of(info));
    s->pinned = info->pinned;
    return s;
}

static void add_shards(const struct kvq__dispatch *d, struct kvq_arena *arena, Kvq__Session *s)
{
    struct kvq__shard_info infos[KVQ_MAX_SHARDS];
    uint32_t n = kvq__session_shards(d->core, d->peer, s->id, infos);
    s->shard_list = kvq_arena_alloc(arena, (n + 1) * sizeof(Kvq__Shard *));
    for (uint32_t i = 0; s->shard_list && i < n; i++) {
        Kvq__Shard *one = kvq_arena_alloc(arena, sizeof *one);
        if (!one)
            return;
        kvq__shard__init(one);
        one->shard = infos[i].shard;
        one->id = infos[i].id;
        one->place = kvq_arena_text(arena, infos[i].place);
        one->tokens = infos[i].tokens;
        one->writer_client = infos[i].writer_client;
        one->ended = infos[i].ended;
        s->shard_list[s->n_shard_list++] = one;
    }
}

static void answer_session(const struct kvq__dispatch *d, struct kvq_arena *arena,
                           const struct kvq__session_info *info, Kvq__Reply *reply)
{
    reply->session = kvq__session_message(arena, info, d->identity->isa);
    if (reply->session) {
        add_shards(d, arena, reply->session);
        reply->result_case = KVQ__REPLY__RESULT_SESSION;
    } else {
        kvq__reply_status(reply, arena, KVQ_E_NO_MEMORY, "no room left for the reply");
    }
}

// The shapes of a session that was opened as it is; layers that are alike stand in one row.
static int add_layers(const struct kvq__dispatch *d, uint64_t handle, struct kvq_arena *arena,
                      Kvq__Session *s, char *text)
{
    uint8_t path;
    uint32_t shards;
    struct kvq__layer_reading *from = kvq_arena_alloc(arena, KVQ_MAX_LAYERS * sizeof *from);
    s->layer_rows = kvq_arena_alloc(arena, KVQ_MAX_LAYERS * sizeof(Kvq__Layer *));
    if (!from || !s->layer_rows)
        return KVQ_E_NO_MEMORY;
    int n = kvq__session_reading(d->client, handle, from, &path, &shards, text);
    for (uint32_t i = 0; (int)i < n; i++) {
        Kvq__Layer *row = s->n_layer_rows ? s->layer_rows[s->n_layer_rows - 1] : NULL;
        bool own = from[i].source == i, same = row && own && row->kv_from_plus1 == 0;
        if (same && kvq_shape_same(&from[i].shape, &from[i - 1].shape)) {
            row->repeat++;
            continue;
        }
        if (!(row = kvq_arena_alloc(arena, sizeof *row)))
            return KVQ_E_NO_MEMORY;
        kvq__layer__init(row);
        row->q_heads = from[i].shape.q_heads;
        row->kv_heads = from[i].shape.kv_heads;
        row->k_dim = from[i].shape.k_dim;
        row->v_dim = from[i].shape.v_dim;
        row->kv_from_plus1 = own ? 0 : from[i].source + 1;
        row->repeat = 1;
        s->layer_rows[s->n_layer_rows++] = row;
    }
    return n < 0 ? n : 0;
}

// A row of the message as the core takes it. KVQ_E_SHAPE for numbers that its fields cannot hold.
static int layer_row(const Kvq__Layer *layer, uint32_t index, struct kvq__layer_row *row,
                     char *text)
{
    const uint32_t most = UINT16_MAX;
    if (layer->q_heads > most || layer->kv_heads > most || layer->k_dim > most ||
        layer->v_dim > most || layer->kv_from_plus1 > KVQ_MAX_LAYERS) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "layer row %u: %u query heads, %u KV heads, head_dim %u and %u, kv_from %u are "
                 "beyond every limit (%d heads, %d layers); kv_from is 0, or 1 + the layer whose "
                 "cache is read",
                 index, layer->q_heads, layer->kv_heads, layer->k_dim, layer->v_dim,
                 layer->kv_from_plus1, KVQ_MAX_HEADS, KVQ_MAX_LAYERS);
        return KVQ_E_SHAPE;
    }
    *row = (struct kvq__layer_row){.q_heads = (uint16_t)layer->q_heads,
                                   .kv_heads = (uint16_t)layer->kv_heads,
                                   .k_dim = (uint16_t)layer->k_dim,
                                   .v_dim = (uint16_t)layer->v_dim,
                                   .window = layer->window,
                                   .softcap = layer->softcap,
                                   .scale = layer->scale,
                                   .format = layer->format,
                                   .kv_from = (int32_t)layer->kv_from_plus1 - 1,
                                   .repeat = layer->repeat};
    return 0;
}

static int layer_rows(const Kvq__OpenSession *open, struct kvq_arena *arena,
                      struct kvq__session_spec *spec, char *text)
{
    if (open->n_layers > KVQ_MAX_LAYERS) {
        snprintf(text, KVQ_TEXT_BYTES, "%zu layer rows; at most %d layers are held", open->n_layers,
                 KVQ_MAX_LAYERS);
        return KVQ_E_LIMIT;
    }
    struct kvq__layer_row *rows = kvq_arena_alloc(arena, (open->n_layers + 1) * sizeof *rows);
    if (!rows)
        return KVQ_E_NO_MEMORY;
    spec->layers = rows;
    spec->n_layers = (uint32_t)open->n_layers;
    int error = 0;
    for (uint32_t i = 0; i < spec->n_layers && !error; i++)
        error = layer_row(open->layers[i], i, &rows[i], text);
    return error;
}

static int spans_of(Kvq__Span *const *from, size_t n, struct kvq_arena *arena,
                    const struct kvq__span **out, uint32_t *n_out, char *text)
{
    if (n > KVQ_MAX_SPANS) {
        snprintf(text, KVQ_TEXT_BYTES, "%zu spans of images or audio; a session has %d at most", n,
                 KVQ_MAX_SPANS);
        return KVQ_E_LIMIT;
    }
    struct kvq__span *spans = kvq_arena_alloc(arena, (n + 1) * sizeof *spans);
    if (!spans)
        return KVQ_E_NO_MEMORY;
    for (size_t i = 0; i < n; i++) {
        if (from[i]->digest.len != sizeof spans->digest) {
            snprintf(text, KVQ_TEXT_BYTES, "span %zu has a digest of %zu bytes; it must have %zu",
                     i, from[i]->digest.len, sizeof spans->digest);
            return KVQ_E_INVALID;
        }
        spans[i] = (struct kvq__span){.first = from[i]->first, .tokens = from[i]->tokens};
        memcpy(spans[i].digest, from[i]->digest.data, sizeof spans->digest);
    }
    *out = spans;
    *n_out = (uint32_t)n;
    return 0;
}

static int prefix_of(const Kvq__Prefix *from, struct kvq_arena *arena,
                     struct kvq__prefix_spec *prefix, char *text)
{
    if (!from)
        return 0;
    prefix->buffer = from->buffer;
    prefix->offset = from->offset;
    prefix->tokens = from->tokens;
    return spans_of(from->spans, from->n_spans, arena, &prefix->spans, &prefix->n_spans, text);
}

// The core counts the kernels' paths from 0, and has 2 for the daemon's choice.
static uint32_t path_of(uint32_t attention)
{
    static const uint32_t paths[] = {2, KVQ_PATH_EXACT, KVQ_PATH_FAST};
    return attention < sizeof paths / sizeof *paths ? paths[attention] : attention;
}

static int spec_of(const Kvq__OpenSession *open, struct kvq_arena *arena,
                   struct kvq__session_spec *spec, char *text)
{
    *spec = (struct kvq__session_spec){
        .ns = open->namespace_,
        .name = open->name,
        .model = open->model,
        .format = open->format,
        .place = open->place,
        .salt = open->salt,
        .adapter = open->adapter,
        .shard = open->shard,
        .shards = open->shards,
        .dtype = open->dtype,
        .v_rotation = open->v_rotation,
        .path = path_of(open->attention),
        .max_rollback = open->max_rollback,
        .on_detach = (uint32_t)open->on_detach,
        .prompt_tokens = open->prompt_tokens,
        .keep_seconds = open->keep_seconds,
        .flags = (open->read_only ? KVQ__OPEN_READ_ONLY : 0) |
                 (open->take_over ? KVQ__OPEN_TAKE_OVER : 0) |
                 (open->must_exist ? KVQ__OPEN_MUST_EXIST : 0) |
                 (open->must_create ? KVQ__OPEN_MUST_CREATE : 0) |
                 (open->exact_prompt ? KVQ__OPEN_EXACT_PROMPT : 0) |
                 (open->packed_prompt ? KVQ__OPEN_PACKED_PROMPT : 0),
    };
    int error = layer_rows(open, arena, spec, text);
    return error ? error : prefix_of(open->prefix, arena, &spec->prefix, text);
}

static int open_session(const struct kvq__dispatch *d, const Kvq__OpenSession *open,
                        struct kvq_arena *arena, struct kvq__session_info *info, char *text)
{
    struct kvq__session_spec spec;
    int error = spec_of(open, arena, &spec, text);
    if (error == 0 && d->place && !open->place[0])
        spec.place = d->place;
    spec.prefix.ask = d->ask;
    return error ? error : kvq__session_open(d->client, &spec, info, text);
}

static Kvq__Move *move_message(struct kvq_arena *arena, const struct kvq__move_info *info)
{
    Kvq__Move *m = kvq_arena_alloc(arena, sizeof *m);
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

static int need_client(const struct kvq__dispatch *d, char *text)
{
    if (d->client)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES, "handles belong to attached clients; name the session instead");
    return KVQ_E_INVALID;
}

static int drop_session(const struct kvq__dispatch *d, const Kvq__DropSession *drop, char *text)
{
    if (drop->which_case == KVQ__DROP_SESSION__WHICH_REF)
        return kvq__session_drop_named(d->core, d->peer, drop->ref->namespace_, drop->ref->name,
                                       text);
    int error = need_client(d, text);
    return error ? error : kvq__session_drop(d->client, drop->handle, text);
}

static int session_info(const struct kvq__dispatch *d, const Kvq__SessionInfo *ask,
                        struct kvq__session_info *info, char *text)
{
    if (ask->which_case == KVQ__SESSION_INFO__WHICH_REF)
        return kvq__session_find(d->core, d->peer, ask->ref->namespace_, ask->ref->name, info,
                                 text);
    int error = need_client(d, text);
    return error ? error : kvq__session_info(d->client, ask->handle, info, text);
}

static int start_move(const struct kvq__dispatch *d, const Kvq__MoveSession *m,
                      struct kvq__move_info *info, char *text)
{
    struct kvq__move_spec spec = {
        .place = m->place, .one_shard = m->one_shard, .shard = m->shard, .wait_ms = m->wait_ms};
    if (m->which_case == KVQ__MOVE_SESSION__WHICH_REF)
        return kvq__session_move_named(d->core, d->peer, m->ref->namespace_, m->ref->name, &spec,
                                       info, text);
    int error = need_client(d, text);
    return error ? error : kvq__session_move(d->client, m->handle, &spec, info, text);
}

static int start_park(const struct kvq__dispatch *d, const Kvq__ParkSession *m,
                      struct kvq__move_info *info, char *text)
{
    if (m->which_case == KVQ__PARK_SESSION__WHICH_REF)
        return kvq__session_park_named(d->core, d->peer, m->ref->namespace_, m->ref->name, info,
                                       text);
    int error = need_client(d, text);
    return error ? error : kvq__session_park(d->client, m->handle, info, text);
}

static int start_prefetch(const struct kvq__dispatch *d, const Kvq__PrefetchSession *m,
                          struct kvq__move_info *info, char *text)
{
    if (m->which_case == KVQ__PREFETCH_SESSION__WHICH_REF)
        return kvq__session_prefetch_named(d->core, d->peer, m->ref->namespace_, m->ref->name, info,
                                           text);
    int error = need_client(d, text);
    return error ? error : kvq__session_prefetch(d->client, m->handle, info, text);
}

static int pin_session(const struct kvq__dispatch *d, const Kvq__PinSession *m, char *text)
{
    if (m->which_case == KVQ__PIN_SESSION__WHICH_REF)
        return kvq__session_pin_named(d->core, d->peer, m->ref->namespace_, m->ref->name, m->pin,
                                      text);
    int error = need_client(d, text);
    return error ? error : kvq__session_pin(d->client, m->handle, m->pin, text);
}

static int run_move(const struct kvq__dispatch *d, const Kvq__Request *request,
                    struct kvq_arena *arena, Kvq__Reply *reply, char *text)
{
    struct kvq__move_info info;
    int error = 0;
    switch (request->command_case) {
    case KVQ__REQUEST__COMMAND_MOVE_SESSION:
        error = start_move(d, request->move_session, &info, text);
        break;
    case KVQ__REQUEST__COMMAND_PARK_SESSION:
        error = start_park(d, request->park_session, &info, text);
        break;
    case KVQ__REQUEST__COMMAND_PREFETCH_SESSION:
        error = start_prefetch(d, request->prefetch_session, &info, text);
        break;
    default:
        error = kvq__move_info(d->core, d->peer, request->ask_move->id, &info, text);
        break;
    }
    if (error)
        return error;
    reply->move = move_message(arena, &info);
    if (!reply->move)
        return KVQ_E_NO_MEMORY;
    reply->result_case = KVQ__REPLY__RESULT_MOVE;
    return 0;
}

// ---- Prefixes ----

static int lookup_prefix(const struct kvq__dispatch *d, const Kvq__LookupPrefix *lookup,
                         struct kvq_arena *arena, Kvq__Reply *reply, char *text)
{
    struct kvq__session_spec spec;
    Kvq__LookupPrefixReply *answer = kvq_arena_alloc(arena, sizeof *answer);
    int error = need_client(d, text);
    if (error == 0 && !lookup->session) {
        snprintf(text, KVQ_TEXT_BYTES, "no session described whose prefix to look up");
        error = KVQ_E_INVALID;
    }
    error = error ? error : answer ? 0 : KVQ_E_NO_MEMORY;
    error = error ? error : spec_of(lookup->session, arena, &spec, text);
    if (error)
        return error;
    spec.prefix.ask = d->ask;
    kvq__lookup_prefix_reply__init(answer);
    error = kvq__prefix_lookup(d->client, &spec, &answer->tokens, text);
    if (error)
        return error;
    reply->lookup_prefix = answer;
    reply->result_case = KVQ__REPLY__RESULT_LOOKUP_PREFIX;
    return 0;
}

int kvq__dispatch_ask(const struct kvq__dispatch *d, const Kvq__OpenSession *open,
                      struct kvq_arena *arena, struct kvq__prefix_ask **ask, char *text)
{
    struct kvq__session_spec spec;
    *ask = NULL;
    int error = need_client(d, text);
    error = error ? error : spec_of(open, arena, &spec, text);
    return error ? error : kvq__prefix_ask(d->client, &spec, ask, text);
}

static int tell_spans(const struct kvq__dispatch *d, const Kvq__TellSpans *tell,
                      struct kvq_arena *arena, char *text)
{
    const struct kvq__span *spans;
    uint32_t n;
    int error = need_client(d, text);
    error = error ? error : spans_of(tell->spans, tell->n_spans, arena, &spans, &n, text);
    return error ? error : kvq__session_spans(d->client, tell->handle, spans, n, text);
}

static int drop_prefixes(const struct kvq__dispatch *d, const Kvq__DropPrefixes *drop,
                         struct kvq_arena *arena, Kvq__Reply *reply, char *text)
{
    Kvq__DropPrefixesReply *r = kvq_arena_alloc(arena, sizeof *r);
    if (!r)
        return KVQ_E_NO_MEMORY;
    kvq__drop_prefixes_reply__init(r);
    int error =
        kvq__core_drop_prefixes(d->core, d->peer, drop->namespace_, &r->pages, &r->bytes, text);
    if (error)
        return error;
    reply->dropped_prefixes = r;
    reply->result_case = KVQ__REPLY__RESULT_DROPPED_PREFIXES;
    return 0;
}

// ---- Administration ----

static void answer_ping(const struct kvq__dispatch *d, struct kvq_arena *arena, Kvq__Reply *reply)
{
    Kvq__Pong *pong = kvq_arena_alloc(arena, sizeof *pong);
    if (!pong)
        return;
    kvq__pong__init(pong);
    pong->version = kvq_arena_text(arena, d->identity->version);
    pong->pid = d->identity->pid;
    pong->uptime_ms = (d->now_ns - d->identity->start_ns) / 1000000;
    reply->pong = pong;
    reply->result_case = KVQ__REPLY__RESULT_PONG;
}

static int answer_status(const struct kvq__dispatch *d, const Kvq__Status *ask,
                         struct kvq_arena *arena, Kvq__Reply *reply, char *text)
{
    struct kvq__status status;
    Kvq__StatusReply *s = kvq_arena_alloc(arena, sizeof *s);
    if (!s)
        return KVQ_E_NO_MEMORY;
    kvq__core_status(d->core, &status);
    kvq__status_reply__init(s);
    s->version = kvq_arena_text(arena, d->identity->version);
    s->pid = d->identity->pid;
    s->uptime_ms = (d->now_ns - d->identity->start_ns) / 1000000;
    s->backend = kvq_arena_text(arena, d->identity->backend);
    s->isa = kvq_arena_text(arena, d->identity->isa);
    s->workers = d->identity->workers;
    s->pool_bytes = status.pool_bytes;
    s->pool_extent_bytes = status.pool_extent_bytes;
    s->pool_used_bytes = status.pool_used_bytes;
    s->pool_largest_free = status.pool_largest_free;
    s->pool_huge_bytes = status.pool_huge_bytes;
    s->sessions = status.sessions;
    s->clients = status.clients;
    s->tokens = status.tokens;
    s->steps = status.steps;
    s->attends = status.attends;
    s->appended_tokens = status.appended_tokens;
    s->refused_requests = status.refused_requests;
    s->kicked_clients = status.kicked_clients;
    s->draining = status.draining;
    s->runtime_dir = kvq_arena_text(arena, d->identity->runtime_dir);
    kvq__dispatch_places(d, arena, s);
    int error = kvq__dispatch_namespaces(d, ask->cursor, arena, s, text);
    if (error)
        return error;
    reply->status_reply = s;
    reply->result_case = KVQ__REPLY__RESULT_STATUS_REPLY;
    return 0;
}

// ---- The table ----

int kvq__dispatch_knows(Kvq__Request__CommandCase command)
{
    return (command >= KVQ__REQUEST__COMMAND_OPEN_SESSION &&
            command <= KVQ__REQUEST__COMMAND_SESSION_INFO) ||
           (command >= KVQ__REQUEST__COMMAND_PING &&
            command <= KVQ__REQUEST__COMMAND_KICK_CLIENT) ||
           command == KVQ__REQUEST__COMMAND_LIST_FORMATS ||
           command == KVQ__REQUEST__COMMAND_LIST_QUOTAS ||
           (command >= KVQ__REQUEST__COMMAND_LOOKUP_PREFIX &&
            command <= KVQ__REQUEST__COMMAND_DROP_PREFIXES) ||
           (command >= KVQ__REQUEST__COMMAND_MOVE_SESSION &&
            command <= KVQ__REQUEST__COMMAND_PIN_SESSION);
}

// Commands about sessions; true if one was answered with a session.
static int run_session(const struct kvq__dispatch *d, const Kvq__Request *request,
                       struct kvq_arena *arena, Kvq__Reply *reply, char *text)
{
    struct kvq__session_info info;
    int error;
    switch (request->command_case) {
    case KVQ__REQUEST__COMMAND_OPEN_SESSION:
        error = need_client(d, text);
        error = error ? error : open_session(d, request->open_session, arena, &info, text);
        break;
    case KVQ__REQUEST__COMMAND_SESSION_INFO:
        error = session_info(d, request->session_info, &info, text);
        break;
    case KVQ__REQUEST__COMMAND_CLOSE_SESSION:
        error = need_client(d, text);
        return error ? error : kvq__session_close(d->client, request->close_session->handle, text);
    default:
        return drop_session(d, request->drop_session, text);
    }
    if (error == 0)
        answer_session(d, arena, &info, reply);
    bool as_it_is = request->command_case == KVQ__REQUEST__COMMAND_OPEN_SESSION &&
                    request->open_session->n_layers == 0;
    if (error == 0 && as_it_is && reply->result_case == KVQ__REPLY__RESULT_SESSION)
        error = add_layers(d, info.handle, arena, reply->session, text);
    return error;
}

void kvq__dispatch_run(const struct kvq__dispatch *d, const Kvq__Request *request,
                       struct kvq_arena *arena, Kvq__Reply *reply)
{
    char text[KVQ_TEXT_BYTES] = "";
    int error = 0;
    bool answers = true; // commands whose success is a result
    switch (request->command_case) {
    case KVQ__REQUEST__COMMAND_OPEN_SESSION:
    case KVQ__REQUEST__COMMAND_CLOSE_SESSION:
    case KVQ__REQUEST__COMMAND_DROP_SESSION:
    case KVQ__REQUEST__COMMAND_SESSION_INFO:
        error = run_session(d, request, arena, reply, text);
        answers = false;
        break;
    case KVQ__REQUEST__COMMAND_PIN_SESSION:
        error = pin_session(d, request->pin_session, text);
        answers = false;
        break;
    case KVQ__REQUEST__COMMAND_MOVE_SESSION:
    case KVQ__REQUEST__COMMAND_ASK_MOVE:
    case KVQ__REQUEST__COMMAND_PARK_SESSION:
    case KVQ__REQUEST__COMMAND_PREFETCH_SESSION:
        error = run_move(d, request, arena, reply, text);
        break;
    case KVQ__REQUEST__COMMAND_PING:
        answer_ping(d, arena, reply);
        break;
    case KVQ__REQUEST__COMMAND_STATUS:
        error = answer_status(d, request->status, arena, reply, text);
        break;
    case KVQ__REQUEST__COMMAND_LIST_SESSIONS:
    case KVQ__REQUEST__COMMAND_LIST_CLIENTS:
    case KVQ__REQUEST__COMMAND_LIST_FORMATS:
    case KVQ__REQUEST__COMMAND_LIST_PREFIXES:
    case KVQ__REQUEST__COMMAND_LIST_QUOTAS:
        error = kvq__dispatch_list(d, request, arena, reply, text);
        break;
    case KVQ__REQUEST__COMMAND_LOOKUP_PREFIX:
        error = lookup_prefix(d, request->lookup_prefix, arena, reply, text);
        answers = false;
        break;
    case KVQ__REQUEST__COMMAND_TELL_SPANS:
        error = tell_spans(d, request->tell_spans, arena, text);
        answers = false;
        break;
    case KVQ__REQUEST__COMMAND_DROP_PREFIXES:
        error = drop_prefixes(d, request->drop_prefixes, arena, reply, text);
        break;
    case KVQ__REQUEST__COMMAND_KICK_CLIENT:
        error = kvq__core_kick(d->core, d->peer, request->kick_client->id, text);
        answers = false;
        break;
    default:
        error = KVQ_E_INVALID;
        snprintf(text, sizeof text, "command %d is not taken on this socket",
                 (int)request->command_case);
        break;
    }
    if (error == 0 && answers && reply->result_case == KVQ__REPLY__RESULT__NOT_SET)
        error = KVQ_E_NO_MEMORY;
    if (error)
        kvq__reply_status(reply, arena, error, text);
}
