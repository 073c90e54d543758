// SPDX-License-Identifier: Apache-2.0
//
// The table of formats, what shapes they take, and the sizes that follow.
#include <assert.h>
#include <stdio.h>

#include "kernels/internal.h"

#define OSCAR    "OScaR, section 3 and appendix L.1"
#define OSCAR_XH "OScaR, appendix L.2 and the released code"
#define RAW_ROW(row_id, row_name, dtype)                                                           \
    {                                                                                              \
        .id = (row_id), .name = (row_name), .codec = KVQ_CODEC_RAW, .raw_dtype = (dtype),          \
        .k_bits = 16, .v_bits = 16, .unit_tokens = KVQ_BLOCK_TOKENS, .source = "as handed over"    \
    }
#define AFFINE_ROW(row_id, row_name, scale, bits, from)                                            \
    {                                                                                              \
        .id = (row_id), .name = (row_name), .k_transform = KVQ_K_HADAMARD,                         \
        .k_token_scale = (scale), .codec = KVQ_CODEC_AFFINE, .k_bits = (bits), .v_bits = (bits),   \
        .unit_tokens = KVQ_BLOCK_TOKENS, .source = (from)                                          \
    }

const struct kvq_format kvq_formats[] = {
    RAW_ROW(1, "f16", KVQ_F16),
    RAW_ROW(2, "bf16", KVQ_BF16),
    AFFINE_ROW(3, "oscar2", KVQ_SCALE_L2_HEAD, 2, OSCAR),
    AFFINE_ROW(4, "oscar3", KVQ_SCALE_L2_HEAD, 3, OSCAR),
    AFFINE_ROW(5, "oscar4", KVQ_SCALE_L2_HEAD, 4, OSCAR),
    AFFINE_ROW(6, "oscar2-xh", KVQ_SCALE_L2_CROSS, 2, OSCAR_XH),
    AFFINE_ROW(7, "oscar3-xh", KVQ_SCALE_L2_CROSS, 3, OSCAR_XH),
    AFFINE_ROW(8, "oscar4-xh", KVQ_SCALE_L2_CROSS, 4, OSCAR_XH),
    {0},
};

const struct kvq_format *kvq_format_by_name(const char *name)
{
    for (const struct kvq_format *f = kvq_formats; f->name; f++)
        if (strcmp(f->name, name) == 0)
            return f;
    return NULL;
}

const struct kvq_format *kvq_format_by_id(uint16_t id)
{
    for (const struct kvq_format *f = kvq_formats; f->name; f++)
        if (f->id == id)
            return f;
    return NULL;
}

// ---- Shapes ----

static bool is_head_dim(uint32_t d)
{
    return d == 64 || d == 128 || d == 256;
}

static int check_heads(const struct kvq_shape *s, char *text, size_t n)
{
    if (s->kv_heads == 0 || s->q_heads == 0)
        snprintf(text, n, "the layer has %u query heads and %u KV heads; give at least 1 of each",
                 s->q_heads, s->kv_heads);
    else if (s->q_heads % s->kv_heads)
        snprintf(text, n, "%u query heads are not a multiple of %u KV heads", s->q_heads,
                 s->kv_heads);
    else if (s->q_heads / s->kv_heads > KVQ_MAX_GQA)
        snprintf(text, n, "%u query heads share one KV head; at most %d can",
                 s->q_heads / s->kv_heads, KVQ_MAX_GQA);
    else
        return 0;
    return -1;
}

static int check_dims(const struct kvq_shape *s, char *text, size_t n)
{
    if (s->k_dim != s->v_dim)
        snprintf(text, n,
                 "head_dim is %u for K and %u for V; unequal dims (as in MLA) are not supported",
                 s->k_dim, s->v_dim);
    else if (!is_head_dim(s->k_dim))
        snprintf(text, n, "head_dim %u is not supported; it can be 64, 128 or 256", s->k_dim);
    else
        return 0;
    return -1;
}

static int check_numbers(const struct kvq_shape *s, char *text, size_t n)
{
    if (!isfinite(s->scale) || s->scale == 0.0f)
        snprintf(text, n, "the softmax scale is %g; give a finite number other than 0, usually %g",
                 (double)s->scale, 1 / sqrt((double)s->k_dim));
    else if (!isfinite(s->softcap) || s->softcap < 0.0f)
        snprintf(text, n, "the soft-cap is %g; give a positive number, or 0 for none",
                 (double)s->softcap);
    else
        return 0;
    return -1;
}

static const char *dtype_name(uint8_t dtype)
{
    return dtype == KVQ_F16 ? "fp16" : dtype == KVQ_BF16 ? "bf16" : "fp32";
}

static int check_kinds(const struct kvq_shape *s, const struct kvq_format *f, char *text, size_t n)
{
    if (s->dtype != KVQ_F16 && s->dtype != KVQ_BF16)
        snprintf(text, n, "dtype %u of the window is unknown; it can be fp16 (%d) or bf16 (%d)",
                 s->dtype, KVQ_F16, KVQ_BF16);
    else if (f->raw_dtype && f->raw_dtype != s->dtype)
        snprintf(text, n, "format %s holds %s, but the layer's dtype is %s", f->name,
                 dtype_name(f->raw_dtype), dtype_name(s->dtype));
    else if (s->v_rotation > KVQ_V_ROT_DAEMON)
        snprintf(text, n, "v_rotation %u is unknown; it can be none (%d), engine (%d), daemon (%d)",
                 s->v_rotation, KVQ_V_ROT_NONE, KVQ_V_ROT_ENGINE, KVQ_V_ROT_DAEMON);
    else
        return 0;
    return -1;
}

int kvq_shape_check(const struct kvq_shape *s, const struct kvq_format *f, char *text, size_t n)
{
    if (check_heads(s, text, n) || check_dims(s, text, n) || check_numbers(s, text, n))
        return -1;
    return check_kinds(s, f, text, n);
}

// ---- Sizes ----

struct kvq_layout kvq_layout_raw(const struct kvq_shape *s)
{
    struct kvq_layout l = {0};
    l.v_offset = KVQ_BLOCK_TOKENS * 2u * s->k_dim;
    l.record_bytes = l.v_offset + KVQ_BLOCK_TOKENS * 2u * s->v_dim;
    return l;
}

// Bytes of one group's scales (or zeros): an fp16 per channel of K, and as many for V, which has
// one per token and 32 channels.
static uint32_t params_bytes(uint32_t dim)
{
    return 2u * dim;
}

static uint32_t codes_bytes(uint32_t dim, uint32_t bits)
{
    return KVQ_GROUP_TOKENS * dim * bits / 8;
}

struct kvq_layout kvq_layout_of(const struct kvq_format *f, const struct kvq_shape *s)
{
    if (f->codec == KVQ_CODEC_RAW)
        return kvq_layout_raw(s);
    struct kvq_layout l = {0};
    l.k_scales = codes_bytes(s->k_dim, f->k_bits);
    l.k_zeros = l.k_scales + params_bytes(s->k_dim);
    l.k_norms = l.k_zeros + params_bytes(s->k_dim);
    l.v_codes = l.k_norms + (f->k_token_scale == KVQ_SCALE_NONE ? 0 : 2u * KVQ_GROUP_TOKENS);
    l.v_scales = l.v_codes + codes_bytes(s->v_dim, f->v_bits);
    l.v_zeros = l.v_scales + params_bytes(s->v_dim);
    l.group_bytes = l.v_zeros + params_bytes(s->v_dim);
    l.record_bytes = KVQ_BLOCK_GROUPS * l.group_bytes;
    assert(l.group_bytes % KVQ_RECORD_ALIGN == 0);
    return l;
}

size_t kvq_block_bytes(const struct kvq_layout *l, const struct kvq_shape *s)
{
    return (size_t)l->record_bytes * s->kv_heads;
}

double kvq_bits_per_value(const struct kvq_format *f, const struct kvq_shape *s)
{
    struct kvq_layout l = kvq_layout_of(f, s);
    return 8.0 * l.record_bytes / ((double)KVQ_BLOCK_TOKENS * (s->k_dim + s->v_dim));
}

struct kvq__codec kvq__codec_of(const struct kvq_format *f, const struct kvq_shape *s)
{
    bool affine = f->codec == KVQ_CODEC_AFFINE;
    return (struct kvq__codec){
        .layout = kvq_layout_of(f, s),
        .dim = s->k_dim,
        .k_bits = affine ? f->k_bits : 0,
        .v_bits = affine ? f->v_bits : 0,
        .has_norms = affine && f->k_token_scale != KVQ_SCALE_NONE,
        .raw_dtype = s->dtype,
    };
}
