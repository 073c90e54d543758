// SPDX-License-Identifier: Apache-2.0
// See choice.h.
#include "kernels/choice.h"

#include <string.h>

#include "kernels/internal.h"
#include "kernels/sizes.h"

static const struct kvq_shape usual = {.q_heads = 1, .kv_heads = 1, .k_dim = 128, .v_dim = 128};

const char *const kvq_recommended_formats[] = {"kvq2", "oscar3", "kivi4", "oscar4", NULL};

bool kvq_format_is_recommended(const struct kvq_format *f)
{
    for (const char *const *name = kvq_recommended_formats; *name; name++)
        if (strcmp(f->name, *name) == 0)
            return true;
    return false;
}

bool kvq_has_fast_path(const struct kvq_format *f)
{
    struct kvq__codec codec = kvq__codec_of(f, &usual, NULL, 0);
    return kvq__fits_bytes(&codec);
}

// ---- GPUs: as source_of of kernels/cuda/attend.c chooses (test_choice compares both) ----

static bool is_affine(const struct kvq_side *s, uint8_t axis, uint32_t bits, uint16_t group)
{
    return s->codec == KVQ_CODEC_AFFINE && s->axis == axis && s->bits == bits && s->group == group;
}

// Affine, scales of 32 values on both sides, 2 to 4 bits.
static bool is_affine_pair(const struct kvq_format *f)
{
    uint8_t bits = f->k.bits;
    return bits >= 2 && bits <= 4 && is_affine(&f->k, KVQ_PER_CHANNEL, bits, 32) &&
           is_affine(&f->v, KVQ_PER_TOKEN, bits, 32);
}

// K's scales serve a block, V's a token.
static bool is_shared(const struct kvq_format *f)
{
    const struct kvq_side *v = &f->v;
    bool all = v->group == 0 || v->group >= usual.v_dim;
    if (v->axis != KVQ_PER_TOKEN || v->bits != 2 || v->wide || !all)
        return false;
    return (v->codec == KVQ_CODEC_AFFINE && is_affine(&f->k, KVQ_PER_CHANNEL, 2, 128)) ||
           (v->codec == KVQ_CODEC_LLOYD && is_affine(&f->k, KVQ_PER_CHANNEL, 3, 128));
}

static bool is_innerq(const struct kvq_format *f)
{
    const struct kvq_side *k = &f->k, *v = &f->v;
    bool hybrid = v->codec == KVQ_CODEC_HYBRID && v->bits == 2;
    bool symmetric = v->codec == KVQ_CODEC_SYMMETRIC && (v->bits == 2 || v->bits == 3);
    return k->codec == KVQ_CODEC_SYMMETRIC && k->bits == 3 && k->axis == KVQ_PER_TOKEN &&
           k->group == 32 && (hybrid || symmetric) && v->axis == KVQ_PER_CHANNEL &&
           v->group == 32 && f->k_token_scale == KVQ_SCALE_NONE;
}

static bool is_small_book(const struct kvq_side *s)
{
    return s->codec == KVQ_CODEC_BOOK && s->bits == 8 && s->vector == 4;
}

// Only with smoothing factors do a head's sub-vectors share a table.
static bool is_small_books(const struct kvq_format *f)
{
    return is_small_book(&f->k) && is_small_book(&f->v) && f->k_token_scale == KVQ_SCALE_NONE &&
           f->k_channel == KVQ_CHANNEL_BOOK;
}

bool kvq_has_gpu_loop(const struct kvq_format *f)
{
    return kvq_is_raw(f) || is_affine_pair(f) || is_shared(f) || is_innerq(f) || is_small_books(f);
}

bool kvq_shares_prefixes(const struct kvq_format *f)
{
    return kvq_layer_bytes_of(f, &usual).extras == 0;
}
