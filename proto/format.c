// SPDX-License-Identifier: Apache-2.0
//
// See format.h.
#include "proto/format.h"

// ---- Into a message ----

static Kvq__TableSide *side_message(struct kvq_arena *arena, const struct kvq_side *from)
{
    Kvq__TableSide *side = kvq_arena_alloc(arena, sizeof *side);
    if (!side)
        return NULL;
    kvq__table_side__init(side);
    side->codec = from->codec;
    side->bits = from->bits;
    side->axis = from->axis;
    side->zero = from->zero;
    side->full = from->full;
    side->wide = from->wide;
    side->vector = from->vector;
    side->group = from->group;
    return side;
}

Kvq__TableFormat *kvq_format_message(struct kvq_arena *arena, const struct kvq_format *from)
{
    Kvq__TableFormat *format = kvq_arena_alloc(arena, sizeof *format);
    if (!format)
        return NULL;
    kvq__table_format__init(format);
    format->k_channel = from->k_channel;
    format->k_rotation = from->k_rotation;
    format->k_token_scale = from->k_token_scale;
    format->v_rotation = from->v_rotation;
    format->raw_dtype = from->raw_dtype;
    format->outliers = from->outliers;
    format->extra_outliers = from->extra_outliers;
    format->plain_layers = from->plain_layers;
    format->unit_tokens = from->unit_tokens;
    format->recent_tokens = from->recent_tokens;
    format->sink_tokens = from->sink_tokens;
    format->k = side_message(arena, &from->k);
    format->v = side_message(arena, &from->v);
    return format->k && format->v ? format : NULL;
}

// ---- Out of one ----

static void take_side(struct kvq_narrow *n, const Kvq__TableSide *m, struct kvq_side *side)
{
    n->wrong |= !m;
    if (!m)
        return;
    side->codec = kvq_narrow_byte(n, m->codec, KVQ_LAST_CODEC);
    side->bits = kvq_narrow_byte(n, m->bits, 16);
    side->axis = kvq_narrow_byte(n, m->axis, KVQ_LAST_AXIS);
    side->zero = kvq_narrow_byte(n, m->zero, KVQ_LAST_ZERO);
    side->full = kvq_narrow_byte(n, m->full, 1);
    side->wide = kvq_narrow_byte(n, m->wide, 1);
    side->vector = kvq_narrow_byte(n, m->vector, 8);
    side->group = kvq_narrow_short(n, m->group);
}

bool kvq_format_of_message(const Kvq__TableFormat *m, struct kvq_format *f)
{
    struct kvq_narrow n = {false};
    if (!m)
        return false;
    f->k_channel = kvq_narrow_byte(&n, m->k_channel, KVQ_LAST_CHANNEL);
    f->k_rotation = kvq_narrow_byte(&n, m->k_rotation, KVQ_LAST_ROTATION);
    f->k_token_scale = kvq_narrow_byte(&n, m->k_token_scale, KVQ_LAST_TOKEN_SCALE);
    f->v_rotation = kvq_narrow_byte(&n, m->v_rotation, KVQ_LAST_ROTATION);
    f->raw_dtype = kvq_narrow_byte(&n, m->raw_dtype, KVQ_BF16);
    f->outliers = kvq_narrow_byte(&n, m->outliers, KVQ_POOL_ENTRIES);
    f->extra_outliers = kvq_narrow_byte(&n, m->extra_outliers, KVQ_POOL_ENTRIES);
    f->plain_layers = kvq_narrow_byte(&n, m->plain_layers, UINT8_MAX);
    take_side(&n, m->k, &f->k);
    take_side(&n, m->v, &f->v);
    f->unit_tokens = kvq_narrow_short(&n, m->unit_tokens);
    f->recent_tokens = kvq_narrow_short(&n, m->recent_tokens);
    f->sink_tokens = kvq_narrow_short(&n, m->sink_tokens);
    return !n.wrong && (f->k.codec == KVQ_CODEC_RAW) == (f->v.codec == KVQ_CODEC_RAW);
}
