// SPDX-License-Identifier: Apache-2.0
//
// Working out recipes.
#include "kernels/recipe.h"
#include "kernels/internal.h"

static void copy_levels(const float *levels, uint32_t bits, float *to)
{
    if (levels)
        memcpy(to, levels, sizeof *levels << bits);
}

static struct kvq_recipe_side side_of(const struct kvq__side *side, enum kvq_rotation rotation)
{
    struct kvq_recipe_side r = {
        .row = side->row, .span = (uint16_t)side->span, .rotation = (uint8_t)rotation};
    r.has_zeros = side->row.codec == KVQ_CODEC_AFFINE || side->row.codec == KVQ_CODEC_HYBRID;
    copy_levels(side->levels, side->row.bits, r.levels[0]);
    copy_levels(side->wide_levels, side->row.bits + 1u, r.levels[1]);
    return r;
}

struct kvq_recipe kvq_recipe_of(const struct kvq_format *f, const struct kvq_shape *s)
{
    struct kvq__codec codec = kvq__codec_of(f, s, NULL, 0);
    struct kvq_recipe r = {
        .layout = codec.layout,
        .raw = kvq_raw_layout_of(s),
        .k = side_of(&codec.k, f->k_rotation),
        .v = side_of(&codec.v, kvq__v_rotation(f, s)),
        .dim = s->k_dim,
        .kv_heads = s->kv_heads,
        .unit_tokens = f->unit_tokens,
        .sink_tokens = f->sink_tokens,
        .outliers = f->outliers,
        .is_raw = kvq_is_raw(f),
        .dtype = s->dtype,
        .k_channel = f->k_channel,
        .k_token_scale = f->k_token_scale,
    };
    if (!r.is_raw)
        r.extras = kvq__extras_layout(f, s);
    r.pool_room = f->outliers ? (uint32_t)f->outliers + f->extra_outliers : 0;
    memcpy(r.signs[0], kvq_signs_before, sizeof r.signs[0]);
    memcpy(r.signs[1], kvq_signs_after, sizeof r.signs[1]);
    return r;
}
