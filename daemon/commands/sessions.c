// SPDX-License-Identifier: Apache-2.0
//
// Commands of sessions: what they are opened with, what is told of them, and their prefixes.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/commands/internal.h"
#include "daemon/core/session/prefix_ask.h"

static const char *tier_of(const struct kvq__session_info *info)
{
    return info->offloaded ? "disk" : info->isa[0] && !info->demoted ? "device" : "host";
}

Kvq__Session *kvq__session_message(struct kvq_arena *arena, const struct kvq__session_info *info,
                                   const char *isa)
{
    static const char *const rotations[] = {"none", "engine", "daemon", "mixed"};
    Kvq__Session *s = kvq_arena_alloc(arena, sizeof *s);
    assert(info->v_rotation < sizeof rotations / sizeof *rotations);
    assert(info->shard < info->shards && info->layers > 0);
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
    assert(s->id > 0);
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

static int answer_session(struct kvq__call *call, const struct kvq__session_info *info)
{
    Kvq__Session *s = kvq__session_message(call->arena, info, call->d->identity->isa);
    if (!s)
        return kvq__call_no_room(call);
    add_shards(call->d, call->arena, s);
    call->reply->session = s;
    call->reply->result_case = KVQ__REPLY__RESULT_SESSION;
    return 0;
}

// The shapes of a session that was opened as it is; layers that are alike stand in one row.
static int add_layer_rows(struct kvq__call *call, uint64_t handle)
{
    struct kvq_arena *arena = call->arena;
    Kvq__Session *s = call->reply->session;
    uint8_t path;
    uint32_t shards;
    struct kvq__layer_reading *from = kvq_arena_alloc(arena, KVQ_MAX_LAYERS * sizeof *from);
    assert(call->d->client && call->reply->session);
    s->layer_rows = kvq_arena_alloc(arena, KVQ_MAX_LAYERS * sizeof(Kvq__Layer *));
    if (!from || !s->layer_rows)
        return KVQ_E_NO_MEMORY;
    int n = kvq__session_reading(call->d->client, handle, from, &path, &shards, call->text);
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
        row->k_dim = kvq_row_dim(&from[i].shape);
        row->v_dim = kvq_row_dim(&from[i].shape);
        row->window = from[i].shape.window;
        row->softcap = from[i].shape.softcap;
        row->scale = from[i].shape.scale;
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

int kvq__run_open_session(struct kvq__call *call)
{
    const struct kvq__dispatch *d = call->d;
    const Kvq__OpenSession *open = call->request->open_session;
    struct kvq__session_spec spec;
    struct kvq__session_info info;
    int error = kvq__call_needs_client(call);
    error = error ? error : spec_of(open, call->arena, &spec, call->text);
    if (error)
        return error;
    if (d->place && !open->place[0])
        spec.place = d->place;
    spec.prefix.ask = d->ask;
    error = kvq__session_open(d->client, &spec, &info, call->text);
    error = error ? error : answer_session(call, &info);
    bool as_it_is = open->n_layers == 0;
    return error || !as_it_is ? error : add_layer_rows(call, info.handle);
}

int kvq__run_close_session(struct kvq__call *call)
{
    int error = kvq__call_needs_client(call);
    return error ? error
                 : kvq__session_close(call->d->client, call->request->close_session->handle,
                                      call->text);
}

int kvq__run_drop_session(struct kvq__call *call)
{
    const Kvq__DropSession *drop = call->request->drop_session;
    if (drop->which_case == KVQ__DROP_SESSION__WHICH_REF)
        return kvq__session_drop_named(call->d->core, call->d->peer, drop->ref->namespace_,
                                       drop->ref->name, call->text);
    int error = kvq__call_needs_client(call);
    return error ? error : kvq__session_drop(call->d->client, drop->handle, call->text);
}

int kvq__run_session_info(struct kvq__call *call)
{
    const struct kvq__dispatch *d = call->d;
    const Kvq__SessionInfo *ask = call->request->session_info;
    struct kvq__session_info info;
    int error = 0;
    if (ask->which_case == KVQ__SESSION_INFO__WHICH_REF) {
        error = kvq__session_find(d->core, d->peer, ask->ref->namespace_, ask->ref->name, &info,
                                  call->text);
    } else {
        error = kvq__call_needs_client(call);
        error = error ? error : kvq__session_info(d->client, ask->handle, &info, call->text);
    }
    return error ? error : answer_session(call, &info);
}

int kvq__run_pin_session(struct kvq__call *call)
{
    const struct kvq__dispatch *d = call->d;
    const Kvq__PinSession *m = call->request->pin_session;
    if (m->which_case == KVQ__PIN_SESSION__WHICH_REF)
        return kvq__session_pin_named(d->core, d->peer, m->ref->namespace_, m->ref->name, m->pin,
                                      call->text);
    int error = kvq__call_needs_client(call);
    return error ? error : kvq__session_pin(d->client, m->handle, m->pin, call->text);
}

// ---- Prefixes ----

int kvq__run_lookup_prefix(struct kvq__call *call)
{
    const Kvq__LookupPrefix *lookup = call->request->lookup_prefix;
    struct kvq__session_spec spec;
    Kvq__LookupPrefixReply *answer = kvq_arena_alloc(call->arena, sizeof *answer);
    int error = kvq__call_needs_client(call);
    if (error == 0 && !lookup->session) {
        snprintf(call->text, sizeof call->text, "no session described whose prefix to look up");
        error = KVQ_E_INVALID;
    }
    error = error ? error : answer ? 0 : kvq__call_no_room(call);
    error = error ? error : spec_of(lookup->session, call->arena, &spec, call->text);
    if (error)
        return error;
    spec.prefix.ask = call->d->ask;
    kvq__lookup_prefix_reply__init(answer);
    call->reply->lookup_prefix = answer;
    call->reply->result_case = KVQ__REPLY__RESULT_LOOKUP_PREFIX;
    return kvq__prefix_lookup(call->d->client, &spec, &answer->tokens, call->text);
}

int kvq__dispatch_ask(const struct kvq__dispatch *d, const Kvq__OpenSession *open,
                      struct kvq_arena *arena, struct kvq__prefix_ask **ask, char *text)
{
    struct kvq__session_spec spec;
    *ask = NULL;
    if (!d->client)
        return KVQ_E_INVALID;
    int error = spec_of(open, arena, &spec, text);
    return error ? error : kvq__prefix_ask(d->client, &spec, ask, text);
}

int kvq__run_tell_spans(struct kvq__call *call)
{
    const Kvq__TellSpans *tell = call->request->tell_spans;
    const struct kvq__span *spans;
    uint32_t n;
    int error = kvq__call_needs_client(call);
    error =
        error ? error : spans_of(tell->spans, tell->n_spans, call->arena, &spans, &n, call->text);
    return error ? error : kvq__session_spans(call->d->client, tell->handle, spans, n, call->text);
}

int kvq__run_drop_prefixes(struct kvq__call *call)
{
    const Kvq__DropPrefixes *drop = call->request->drop_prefixes;
    Kvq__DropPrefixesReply *r = kvq_arena_alloc(call->arena, sizeof *r);
    if (!r)
        return kvq__call_no_room(call);
    kvq__drop_prefixes_reply__init(r);
    call->reply->dropped_prefixes = r;
    call->reply->result_case = KVQ__REPLY__RESULT_DROPPED_PREFIXES;
    return kvq__core_drop_prefixes(call->d->core, call->d->peer, drop->namespace_, &r->pages,
                                   &r->bytes, call->text);
}
