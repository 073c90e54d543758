// SPDX-License-Identifier: Apache-2.0
//
// See saved_wire.h.
#include "daemon/store/saved_wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/commands/dispatch.h"
#include "proto/format.h"

// ---- Packing ----

uint32_t kvq__saved_version(const struct kvq__saved *saved)
{
    for (uint32_t i = 1; i < saved->n_layers; i++)
        if (saved->layers[i].v_rotation != saved->layers[0].v_rotation)
            return 2;
    return 1;
}

static Kvq__SavedLayer *layer_message(struct kvq_arena *arena, const struct kvq__saved_layer *from,
                                      uint8_t v_rotation)
{
    Kvq__SavedLayer *layer = kvq_arena_alloc(arena, sizeof *layer);
    Kvq__Layer *row = kvq_arena_alloc(arena, sizeof *row);
    if (!layer || !row)
        return NULL;
    kvq__saved_layer__init(layer);
    kvq__layer__init(row);
    row->q_heads = from->row.q_heads;
    row->kv_heads = from->row.kv_heads;
    row->k_dim = from->row.k_dim;
    row->v_dim = from->row.v_dim;
    row->window = from->row.window;
    row->softcap = from->row.softcap;
    row->scale = from->row.scale;
    row->format = kvq_arena_text(arena, from->format.name);
    row->kv_from_plus1 = (uint32_t)(from->row.kv_from + 1);
    row->repeat = 1;
    layer->row = row;
    layer->format = kvq_format_message(arena, &from->format);
    layer->first_page = from->first_page;
    layer->raw_page = from->raw_page;
    layer->packed_base = from->base;
    layer->packed = from->packed;
    layer->learned = from->learned;
    layer->book = from->book;
    layer->v_rotation_plus1 = from->v_rotation == v_rotation ? 0 : 1u + from->v_rotation;
    return layer->format ? layer : NULL;
}

static Kvq__SavedSession *session_message(struct kvq_arena *arena, const struct kvq__saved *from)
{
    Kvq__SavedSession *s = kvq_arena_alloc(arena, sizeof *s);
    Kvq__SavedLayer **layers = kvq_arena_alloc(arena, from->n_layers * sizeof *layers);
    if (!s || !layers)
        return NULL;
    kvq__saved_session__init(s);
    s->version = kvq__saved_version(from);
    s->layout = KVQ_LAYOUT_ID;
    s->name = kvq_arena_text(arena, from->name);
    s->model = kvq_arena_text(arena, from->model);
    s->salt = kvq_arena_text(arena, from->salt);
    s->adapter = kvq_arena_text(arena, from->adapter);
    s->own_format = kvq_arena_text(arena, from->own_format);
    s->isa = kvq_arena_text(arena, from->isa);
    s->shard = from->shard;
    s->shards = from->shards;
    s->dtype = from->dtype;
    s->v_rotation = from->n_layers ? from->layers[0].v_rotation : KVQ_V_ROT_NONE;
    s->path = from->path;
    s->max_rollback = from->max_rollback;
    s->on_detach = from->on_detach;
    s->prompt_tokens = from->prompt_tokens;
    s->exact_tokens = from->exact_tokens;
    s->keep_seconds = from->keep_seconds;
    s->tokens = from->tokens;
    s->floor = from->floor;
    s->saturated = from->saturated;
    s->stamp = from->stamp;
    s->known = from->known;
    s->spans = from->n_spans;
    s->layers = layers;
    for (; s->n_layers < from->n_layers; s->n_layers++)
        if (!(layers[s->n_layers] =
                  layer_message(arena, &from->layers[s->n_layers], (uint8_t)s->v_rotation)))
            return NULL;
    return s;
}

int kvq__saved_pack(const struct kvq__saved *saved, struct kvq_arena *arena, void *out,
                    size_t *length, char *text)
{
    arena->used = 0;
    Kvq__SavedSession *message = session_message(arena, saved);
    int rc = message ? kvq_saved_pack(message, out, KVQ__SAVED_BYTES, length) : KVQ_E_NO_MEMORY;
    if (rc < 0)
        snprintf(text, KVQ_TEXT_BYTES, "session \"%s\" has too much to tell of its %u layers",
                 saved->name, saved->n_layers);
    return rc;
}

// ---- Unpacking ----

static bool copy_text(char *out, size_t room, const char *from)
{
    return (size_t)snprintf(out, room, "%s", from) < room;
}

static void take_layer(struct kvq_narrow *n, const Kvq__SavedLayer *m, uint32_t v_rotation,
                       struct kvq__saved_layer *layer)
{
    const Kvq__Layer *row = m->row;
    n->wrong |= !row || row->kv_from_plus1 > KVQ_MAX_LAYERS;
    if (n->wrong)
        return;
    layer->row = (struct kvq__layer_row){
        .q_heads = kvq_narrow_short(n, row->q_heads),
        .kv_heads = kvq_narrow_short(n, row->kv_heads),
        .k_dim = kvq_narrow_short(n, row->k_dim),
        .v_dim = kvq_narrow_short(n, row->v_dim),
        .window = row->window,
        .softcap = row->softcap,
        .scale = row->scale,
        .kv_from = (int32_t)row->kv_from_plus1 - 1,
        .repeat = 1,
    };
    n->wrong |= !kvq_format_of_message(m->format, &layer->format) ||
                !copy_text(layer->format.name, sizeof layer->format.name, row->format);
    layer->format.source = "as it was saved";
    layer->row.format = layer->format.name;
    layer->first_page = m->first_page;
    layer->raw_page = m->raw_page;
    layer->base = m->packed_base;
    layer->packed = m->packed;
    layer->learned = m->learned;
    layer->book = m->book;
    v_rotation = m->v_rotation_plus1 ? m->v_rotation_plus1 - 1 : v_rotation;
    layer->v_rotation = kvq_narrow_byte(n, v_rotation, KVQ_V_ROT_DAEMON);
}

static int check_version(const Kvq__SavedSession *m, char *text)
{
    if (m->version >= KVQ__SAVED_OLDEST && m->version <= KVQ__SAVED_NEWEST &&
        m->layout == KVQ_LAYOUT_ID)
        return 0;
    snprintf(text, KVQ_TEXT_BYTES,
             "session \"%s\" was saved as version %u with block layout %u; this daemon reads "
             "versions %d to %d with layout %d: use the version that saved it",
             m->name, m->version, m->layout, KVQ__SAVED_OLDEST, KVQ__SAVED_NEWEST, KVQ_LAYOUT_ID);
    return KVQ_E_VERSION;
}

static bool take_session(const Kvq__SavedSession *m, struct kvq__saved *saved)
{
    struct kvq_narrow n = {false};
    *saved = (struct kvq__saved){
        .shard = m->shard,
        .shards = m->shards,
        .dtype = m->dtype,
        .path = m->path,
        .max_rollback = m->max_rollback,
        .on_detach = m->on_detach,
        .prompt_tokens = m->prompt_tokens,
        .exact_tokens = m->exact_tokens,
        .keep_seconds = m->keep_seconds,
        .tokens = m->tokens,
        .floor = m->floor,
        .saturated = m->saturated,
        .stamp = m->stamp,
        .known = m->known,
        .n_spans = m->spans,
        .n_layers = (uint32_t)m->n_layers,
        .layers = saved->layers,
    };
    n.wrong = !copy_text(saved->name, sizeof saved->name, m->name) ||
              !copy_text(saved->model, sizeof saved->model, m->model) ||
              !copy_text(saved->salt, sizeof saved->salt, m->salt) ||
              !copy_text(saved->adapter, sizeof saved->adapter, m->adapter) ||
              !copy_text(saved->own_format, sizeof saved->own_format, m->own_format) ||
              !copy_text(saved->isa, sizeof saved->isa, m->isa);
    for (uint32_t i = 0; i < saved->n_layers && !n.wrong; i++) {
        take_layer(&n, m->layers[i], m->v_rotation, &saved->layers[i]);
        n.wrong |= saved->layers[i].row.kv_from == (int32_t)i; // who has a cache is written as -1
    }
    return !n.wrong;
}

int kvq__saved_unpack(const void *bytes, size_t length, struct kvq_arena *arena,
                      struct kvq__saved *saved, char *text)
{
    Kvq__SavedSession *m;
    char why[KVQ_TEXT_BYTES] = "a number is out of range";
    arena->used = 0;
    if (kvq_saved_unpack(bytes, length, arena, &m, why) < 0) {
        snprintf(text, KVQ_TEXT_BYTES, "what was stored of a session makes no sense: %.300s", why);
        return KVQ_E_DAMAGED;
    }
    int rc = check_version(m, text);
    if (rc < 0)
        return rc;
    bool few = m->n_layers > 0 && m->n_layers <= KVQ_MAX_LAYERS;
    saved->layers = few ? calloc(m->n_layers, sizeof *saved->layers) : NULL;
    if (saved->layers && take_session(m, saved))
        return 0;
    rc = few && !saved->layers ? KVQ_E_NO_MEMORY : KVQ_E_DAMAGED;
    free(saved->layers);
    saved->layers = NULL;
    snprintf(text, KVQ_TEXT_BYTES, "what was stored of session \"%s\" makes no sense: %.300s",
             m->name, rc == KVQ_E_NO_MEMORY ? "no memory" : why);
    return rc;
}
