// SPDX-License-Identifier: Apache-2.0
//
// The table of formats, what shapes they take, and the sizes that follow. What names mean beyond
// the table is in format_names.c.
#include <assert.h>
#include <stdio.h>

#include "kernels/internal.h"

// ---- Sides ----

#define AFFINE(nbits, ax, z, g)                                                                    \
    {                                                                                              \
        .codec = KVQ_CODEC_AFFINE, .bits = (nbits), .axis = (ax), .zero = (z), .group = (g)        \
    }
#define SYMMETRIC(nbits, ax, g)                                                                    \
    {                                                                                              \
        .codec = KVQ_CODEC_SYMMETRIC, .bits = (nbits), .axis = (ax), .group = (g)                  \
    }
#define LLOYD(nbits, more)                                                                         \
    {                                                                                              \
        .codec = KVQ_CODEC_LLOYD, .bits = (nbits), .axis = KVQ_PER_TOKEN, .wide = (more)           \
    }
#define BOOK(channels, nbits)                                                                      \
    {                                                                                              \
        .codec = KVQ_CODEC_BOOK, .bits = (nbits), .vector = (channels)                             \
    }
#define RAW                                                                                        \
    {                                                                                              \
        .codec = KVQ_CODEC_RAW, .bits = 16                                                         \
    }

// ---- Families ----

#define OSCAR_ROW(row_name, nbits, scale, from)                                                    \
    {                                                                                              \
        .name = (row_name), .source = (from), .k_rotation = KVQ_ROTATE_HADAMARD,                   \
        .k_token_scale = (scale), .paper_rotates_v = 1,                                            \
        .k = AFFINE(nbits, KVQ_PER_CHANNEL, KVQ_ZERO_INTEGER, 32),                                 \
        .v = AFFINE(nbits, KVQ_PER_TOKEN, KVQ_ZERO_INTEGER, 32), .unit_tokens = 128                \
    }
#define OSCAR    "OScaR, section 3 and appendix L.1"
#define OSCAR_XH "OScaR, appendix L.2 and the released code"

#define KIVI_SIDES(nbits, g)                                                                       \
    .k = AFFINE(nbits, KVQ_PER_CHANNEL, KVQ_ZERO_MINIMUM, g),                                      \
    .v = AFFINE(nbits, KVQ_PER_TOKEN, KVQ_ZERO_MINIMUM, g)
#define KIVI_ROW(row_name, nbits)                                                                  \
    {                                                                                              \
        .name = (row_name), .source = "KIVI, section 4", KIVI_SIDES(nbits, 32), .unit_tokens = 128 \
    }

// NOLINTBEGIN(bugprone-macro-parentheses): initializers have none
#define INNERQ_ROW(row_name, v_side)                                                               \
    {                                                                                              \
        .name = (row_name), .source = "InnerQ, sections 4 and 5", .k_channel = KVQ_CHANNEL_PROMPT, \
        .k = SYMMETRIC(3, KVQ_PER_TOKEN, 32), .v = v_side, .unit_tokens = 32, .recent_tokens = 96, \
        .sink_tokens = 32                                                                          \
    }
#define HYBRID                                                                                     \
    {                                                                                              \
        .codec = KVQ_CODEC_HYBRID, .bits = 2, .axis = KVQ_PER_CHANNEL, .group = 32                 \
    }
// NOLINTEND(bugprone-macro-parentheses)

#define VECINFER_ROW(row_name, kd, kb, vd, vb)                                                     \
    {                                                                                              \
        .name = (row_name), .source = "VecInfer, sections 3 and 4", .k_channel = KVQ_CHANNEL_BOOK, \
        .k_rotation = KVQ_ROTATE_HADAMARD, .k = BOOK(kd, kb), .v = BOOK(vd, vb),                   \
        .unit_tokens = 128                                                                         \
    }
#define MILLION_ROW(row_name, channels, nbits)                                                     \
    {                                                                                              \
        .name = (row_name), .source = "MILLION, section 3", .k = BOOK(channels, nbits),            \
        .v = BOOK(channels, nbits), .unit_tokens = 128                                             \
    }

#define QUAROT_ROW(row_name, nbits)                                                                \
    {                                                                                              \
        .name = (row_name), .source = "QuaRot, section 4 (KV cache)",                              \
        .k_rotation = KVQ_ROTATE_HADAMARD, .paper_rotates_v = 1,                                   \
        .k = AFFINE(nbits, KVQ_PER_TOKEN, KVQ_ZERO_INTEGER, 32),                                   \
        .v = AFFINE(nbits, KVQ_PER_TOKEN, KVQ_ZERO_INTEGER, 32), .unit_tokens = 32                 \
    }
#define TURBO_ROW(row_name, k_bits, v_bits, more)                                                  \
    {                                                                                              \
        .name = (row_name), .source = "TurboQuant, section 3.1 (without QJL)",                     \
        .k_rotation = KVQ_ROTATE_SIGNED, .v_rotation = KVQ_ROTATE_SIGNED,                          \
        .k = LLOYD(k_bits, more), .v = LLOYD(v_bits, more), .unit_tokens = 32                      \
    }

const struct kvq_format kvq_formats[] = {
    {.name = "f16",
     .source = "as handed over",
     .raw_dtype = KVQ_F16,
     .k = RAW,
     .v = RAW,
     .unit_tokens = 128},
    {.name = "bf16",
     .source = "as handed over",
     .raw_dtype = KVQ_BF16,
     .k = RAW,
     .v = RAW,
     .unit_tokens = 128},
    OSCAR_ROW("oscar2", 2, KVQ_SCALE_L2_HEAD, OSCAR),
    OSCAR_ROW("oscar3", 3, KVQ_SCALE_L2_HEAD, OSCAR),
    OSCAR_ROW("oscar4", 4, KVQ_SCALE_L2_HEAD, OSCAR),
    OSCAR_ROW("oscar2-xh", 2, KVQ_SCALE_L2_CROSS, OSCAR_XH),
    OSCAR_ROW("oscar3-xh", 3, KVQ_SCALE_L2_CROSS, OSCAR_XH),
    OSCAR_ROW("oscar4-xh", 4, KVQ_SCALE_L2_CROSS, OSCAR_XH),
    KIVI_ROW("kivi1", 1),
    KIVI_ROW("kivi2", 2),
    KIVI_ROW("kivi4", 4),
    {.name = "kivi-sink2",
     .source = "InnerQ, section 5.1 (KIVI with a sink window)",
     KIVI_SIDES(2, 32),
     .unit_tokens = 32,
     .recent_tokens = 96,
     .sink_tokens = 32},
    {.name = "ott2",
     .source = "OTT, sections 3 and 4",
     KIVI_SIDES(2, 128),
     .outliers = 3,
     .extra_outliers = 32,
     .plain_layers = 2,
     .unit_tokens = 128,
     .recent_tokens = 32},
    {.name = "ott2-oscar",
     .source = "OTT as the OScaR paper sets it (section 4.1)",
     KIVI_SIDES(2, 32),
     .outliers = 5,
     .extra_outliers = 32,
     .plain_layers = 2,
     .unit_tokens = 32,
     .recent_tokens = 128},
    INNERQ_ROW("innerq-base", SYMMETRIC(3, KVQ_PER_CHANNEL, 32)),
    INNERQ_ROW("innerq-hybrid", HYBRID),
    INNERQ_ROW("innerq-small", SYMMETRIC(2, KVQ_PER_CHANNEL, 32)),
    VECINFER_ROW("vecinfer-4", 2, 8, 2, 8),
    VECINFER_ROW("vecinfer-3", 4, 12, 4, 12),
    VECINFER_ROW("vecinfer-2", 4, 8, 4, 8),
    VECINFER_ROW("vecinfer-1.5", 8, 12, 8, 12),
    VECINFER_ROW("vecinfer-1.25", 8, 12, 8, 8),
    VECINFER_ROW("vecinfer-1", 8, 8, 8, 8),
    VECINFER_ROW("vecinfer-d8b16", 8, 16, 8, 16),
    VECINFER_ROW("vecinfer-d2b4", 2, 4, 2, 4),
    VECINFER_ROW("vecinfer-d4b6", 4, 6, 4, 6),
    VECINFER_ROW("vecinfer-d2b3", 2, 3, 2, 3),
    MILLION_ROW("million-4", 2, 8),
    MILLION_ROW("million-3", 4, 12),
    MILLION_ROW("million-2", 4, 8),
    QUAROT_ROW("quarot2", 2),
    QUAROT_ROW("quarot4", 4),
    TURBO_ROW("turboquant2.5", 2, 2, 1),
    TURBO_ROW("turboquant3", 3, 3, 0),
    TURBO_ROW("turboquant4", 4, 4, 0),
    TURBO_ROW("turboquant-k4v3", 4, 3, 0),
    {.name = "int8",
     .source = "rounding to 8 bits, a scale per token and 32 channels",
     .k = SYMMETRIC(8, KVQ_PER_TOKEN, 32),
     .v = SYMMETRIC(8, KVQ_PER_TOKEN, 32),
     .unit_tokens = 32},
    {.name = "k8v4",
     .source = "K as in int8, V as in kivi4",
     .k = SYMMETRIC(8, KVQ_PER_TOKEN, 32),
     .v = AFFINE(4, KVQ_PER_TOKEN, KVQ_ZERO_MINIMUM, 32),
     .unit_tokens = 32},
    {.name = "kvq2",
     .source = "OScaR's norms and KIVI's channels with 3 bits, fitted, TurboQuant's values with 2: "
               "see quality.md",
     .v_rotation = KVQ_ROTATE_SIGNED,
     .k_token_scale = KVQ_SCALE_L2_HEAD,
     .k = AFFINE(3, KVQ_PER_CHANNEL, KVQ_ZERO_FITTED, KVQ_BLOCK_TOKENS),
     .v = LLOYD(2, 0),
     .unit_tokens = KVQ_BLOCK_TOKENS,
     .sink_tokens = 32},
    {.name = ""},
};

const struct kvq_format *kvq_format_by_name(const char *name)
{
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++)
        if (strcmp(f->name, name) == 0)
            return f;
    return NULL;
}

uint32_t kvq_learn_tokens(const struct kvq_format *f, uint64_t prompt_tokens)
{
    uint64_t n = prompt_tokens;
    if (f->k_channel != KVQ_CHANNEL_PROMPT && f->outliers == 0)
        return 0;
    if (n < KVQ_BLOCK_TOKENS)
        n = KVQ_BLOCK_TOKENS;
    if (n > KVQ_MAX_LEARN)
        n = KVQ_MAX_LEARN;
    return (uint32_t)(n / f->unit_tokens * f->unit_tokens);
}

// ---- Shapes ----

uint16_t kvq_stored_dim(uint32_t row_dim)
{
    if (row_dim == 0 || row_dim > KVQ_MAX_HEAD_DIM)
        return 0;
    return row_dim <= 64 ? 64 : row_dim <= 128 ? 128 : 256;
}

void kvq_shape_set_dims(struct kvq_shape *s, uint16_t k_dim, uint16_t v_dim)
{
    uint16_t stored = k_dim == v_dim ? kvq_stored_dim(k_dim) : 0;
    s->k_dim = stored ? stored : k_dim;
    s->v_dim = stored ? stored : v_dim;
    s->head_dim = stored > k_dim ? k_dim : 0;
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
    else if (!kvq_stored_dim(s->k_dim))
        snprintf(text, n, "head_dim %u is not supported; it can be 1 to %d", s->k_dim,
                 KVQ_MAX_HEAD_DIM);
    else if (kvq_stored_dim(s->k_dim) != s->k_dim)
        snprintf(text, n, "head_dim %u is stored as %u; give 64, 128 or 256 here", s->k_dim,
                 kvq_stored_dim(s->k_dim));
    else if (s->head_dim && (s->head_dim == s->k_dim || kvq_stored_dim(s->head_dim) != s->k_dim))
        snprintf(text, n, "rows of head_dim %u are not stored with %u", s->head_dim, s->k_dim);
    else if (s->head_dim && s->v_rotation == KVQ_V_ROT_ENGINE)
        snprintf(text, n,
                 "an engine rotates V (v_rotation engine) with a head_dim of 64, 128 or 256 alone, "
                 "not %u; let the daemon do it",
                 s->head_dim);
    else
        return 0;
    return -1;
}

static int check_numbers(const struct kvq_shape *s, char *text, size_t n)
{
    if (!isfinite(s->scale) || s->scale == 0.0f)
        snprintf(text, n, "the softmax scale is %g; give a finite number other than 0, usually %g",
                 (double)s->scale, 1 / sqrt((double)kvq_row_dim(s)));
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

static bool same_side(const struct kvq_side *a, const struct kvq_side *b)
{
    return a->codec == b->codec && a->bits == b->bits && a->axis == b->axis && a->zero == b->zero &&
           a->full == b->full && a->wide == b->wide && a->vector == b->vector &&
           a->group == b->group;
}

enum kvq_v_rotation kvq_v_rotation_by_paper(const struct kvq_format *f)
{
    return f->paper_rotates_v && !kvq_is_raw(f) ? KVQ_V_ROT_DAEMON : KVQ_V_ROT_NONE;
}

bool kvq_format_same(const struct kvq_format *a, const struct kvq_format *b)
{
    return a->k_channel == b->k_channel && a->k_rotation == b->k_rotation &&
           a->k_token_scale == b->k_token_scale && a->v_rotation == b->v_rotation &&
           a->raw_dtype == b->raw_dtype && a->outliers == b->outliers &&
           a->extra_outliers == b->extra_outliers && a->plain_layers == b->plain_layers &&
           a->unit_tokens == b->unit_tokens && a->recent_tokens == b->recent_tokens &&
           a->sink_tokens == b->sink_tokens && same_side(&a->k, &b->k) && same_side(&a->v, &b->v);
}

bool kvq_shape_same(const struct kvq_shape *a, const struct kvq_shape *b)
{
    return a->q_heads == b->q_heads && a->kv_heads == b->kv_heads && a->k_dim == b->k_dim &&
           a->v_dim == b->v_dim && a->head_dim == b->head_dim && a->dtype == b->dtype &&
           a->v_rotation == b->v_rotation && a->window == b->window && a->softcap == b->softcap &&
           a->scale == b->scale;
}

int kvq_shape_check(const struct kvq_shape *s, const struct kvq_format *f, char *text, size_t n)
{
    if (check_heads(s, text, n) || check_dims(s, text, n) || check_numbers(s, text, n))
        return -1;
    return check_kinds(s, f, text, n);
}

// ---- Sizes ----

struct kvq_raw_layout kvq_raw_layout_of(const struct kvq_shape *s)
{
    struct kvq_raw_layout l = {.row_bytes = 2u * s->k_dim};
    assert(s->k_dim == s->v_dim);
    l.v_offset = KVQ_GROUP_TOKENS * l.row_bytes;
    l.part_bytes = 2 * l.v_offset;
    l.strip_bytes = l.part_bytes * s->kv_heads;
    return l;
}

// Channels (or tokens) that share a scale.
static uint32_t group_of(const struct kvq_side *side, uint32_t dim)
{
    if (side->axis == KVQ_PER_CHANNEL)
        return side->group;
    return side->group == 0 || side->group > dim ? dim : side->group;
}

static bool has_zeros(const struct kvq_side *side)
{
    return side->codec == KVQ_CODEC_AFFINE || side->codec == KVQ_CODEC_HYBRID;
}

// Bytes of the codes of one group of 32 tokens.
static uint32_t codes_bytes(const struct kvq_side *side, uint32_t dim)
{
    if (side->codec == KVQ_CODEC_BOOK)
        return KVQ_GROUP_TOKENS * (dim / side->vector) * side->bits / 8;
    return KVQ_GROUP_TOKENS * dim * side->bits / 8 + (side->wide ? dim : 0);
}

// Bytes of one set of scales (or of zeros).
static uint32_t scales_bytes(const struct kvq_side *side, uint32_t dim)
{
    if (side->codec == KVQ_CODEC_BOOK)
        return 0;
    if (side->axis == KVQ_PER_CHANNEL)
        return 2 * dim;
    return 2 * KVQ_GROUP_TOKENS * (dim / group_of(side, dim)) * (side->wide ? 2 : 1);
}

// One side's parts of a group, from `at` on; what stands before the groups takes no room here.
struct parts {
    uint32_t codes, scales, zeros, end;
    uint32_t set, span;
};

static struct parts parts_of(const struct kvq_side *side, uint32_t dim, uint32_t at)
{
    uint32_t scales = scales_bytes(side, dim), zeros = has_zeros(side) ? scales : 0;
    struct parts p = {.codes = at, .scales = at + codes_bytes(side, dim)};
    bool apart = scales && side->axis == KVQ_PER_CHANNEL && side->group > KVQ_GROUP_TOKENS;
    p.zeros = p.scales + (apart ? 0 : scales);
    p.end = p.zeros + (apart ? 0 : zeros);
    p.set = apart ? scales + zeros : 0;
    p.span = apart ? side->group : KVQ_GROUP_TOKENS;
    return p;
}

struct kvq_layout kvq_layout_of(const struct kvq_format *f, const struct kvq_shape *s)
{
    if (kvq_is_raw(f)) // its blocks are raw ones, of which a head has so much
        return (struct kvq_layout){.record_bytes =
                                       KVQ_BLOCK_TOKENS * 2u * (s->k_dim + (uint32_t)s->v_dim)};
    struct parts k = parts_of(&f->k, s->k_dim, 0);
    uint32_t norms = f->k_token_scale == KVQ_SCALE_NONE ? 0 : 2u * KVQ_GROUP_TOKENS;
    struct parts v = parts_of(&f->v, s->v_dim, k.end + norms);
    struct kvq_layout l = {
        .k_codes = k.codes,
        .k_scales = k.scales,
        .k_zeros = k.zeros,
        .k_norms = k.end,
        .v_codes = v.codes,
        .v_scales = v.scales,
        .v_zeros = v.zeros,
        .group_bytes = v.end,
        .k_set = k.set,
        .v_set = v.set,
        .k_span = k.span,
        .v_span = v.span,
    };
    l.v_sets = k.set * (KVQ_BLOCK_TOKENS / k.span);
    l.groups = l.v_sets + v.set * (KVQ_BLOCK_TOKENS / v.span);
    l.record_bytes = l.groups + KVQ_BLOCK_GROUPS * l.group_bytes;
    assert(l.group_bytes % KVQ_RECORD_ALIGN == 0 && l.groups % KVQ_RECORD_ALIGN == 0);
    return l;
}

size_t kvq_block_bytes(const struct kvq_layout *l, const struct kvq_shape *s)
{
    return (size_t)l->record_bytes * s->kv_heads;
}

double kvq_bits_per_value(const struct kvq_format *f, const struct kvq_shape *s)
{
    struct kvq_layout l = kvq_layout_of(f, s);
    return 8.0 * l.record_bytes / ((double)KVQ_BLOCK_TOKENS * 2 * kvq_row_dim(s));
}

// ---- Codecs ----

// The best quantizers of the normal distribution N(0, 1) (Lloyd and Max).
// tests/kernels/test_codecs.c computes them again. The inner levels of 2 bits are 0.4527800 there;
// 3 / 10 of the outer ones lets all four be small whole numbers, at the same error.
static const float lloyd2[] = {
    -KVQ__LLOYD2_OUTER * KVQ__LLOYD2_UNIT, -KVQ__LLOYD2_INNER *KVQ__LLOYD2_UNIT,
    KVQ__LLOYD2_INNER *KVQ__LLOYD2_UNIT, KVQ__LLOYD2_OUTER *KVQ__LLOYD2_UNIT};
static const float lloyd3[] = {-2.1519457f, -1.3439093f, -0.7560053f, -0.2450942f,
                               0.2450942f,  0.7560053f,  1.3439093f,  2.1519457f};
static const float lloyd4[] = {-2.7325896f, -2.0690172f, -1.6180464f, -1.2562312f,
                               -0.9423405f, -0.6567591f, -0.3880483f, -0.1283950f,
                               0.1283950f,  0.3880483f,  0.6567591f,  0.9423405f,
                               1.2562312f,  1.6180464f,  2.0690172f,  2.7325896f};

const float *kvq__lloyd(uint32_t bits)
{
    return bits == 2 ? lloyd2 : bits == 3 ? lloyd3 : lloyd4;
}

static enum kvq__kind kind_of(const struct kvq_side *side, uint32_t group)
{
    if (side->codec == KVQ_CODEC_BOOK)
        return KVQ__BOOK;
    if (side->codec == KVQ_CODEC_LLOYD && side->bits == 2 && !side->wide)
        return KVQ__FOUR_LEVELS;
    if (side->codec != KVQ_CODEC_AFFINE || side->bits < 2 || side->bits > 4)
        return KVQ__SCALAR;
    if (side->axis == KVQ_PER_CHANNEL)
        return group == 32 ? KVQ__PER_CHANNEL_32 : KVQ__PER_CHANNEL;
    return group == 32 ? KVQ__PER_TOKEN_32 : KVQ__SCALAR;
}

static struct kvq__side side_of(const struct kvq_side *row, uint32_t dim)
{
    struct kvq__side side = {.row = *row, .span = KVQ_GROUP_TOKENS};
    if (row->codec == KVQ_CODEC_RAW)
        return side;
    side.row.group = (uint16_t)group_of(row, dim);
    side.kind = (uint8_t)kind_of(row, side.row.group);
    if (row->codec != KVQ_CODEC_BOOK && row->axis == KVQ_PER_CHANNEL)
        side.span = row->group;
    if (row->codec == KVQ_CODEC_LLOYD) {
        side.levels = kvq__lloyd(row->bits);
        side.wide_levels = row->wide ? kvq__lloyd(row->bits + 1u) : NULL;
    }
    return side;
}

struct kvq__codec kvq__codec_of(const struct kvq_format *f, const struct kvq_shape *s,
                                const struct kvq_book *book, uint32_t head)
{
    bool raw = kvq_is_raw(f);
    struct kvq__codec c = {
        .layout = kvq_layout_of(f, s),
        .dim = s->k_dim,
        .k_bits = raw ? 0 : f->k.bits,
        .v_bits = raw ? 0 : f->v.bits,
        .has_norms = !raw && f->k_token_scale != KVQ_SCALE_NONE,
        .raw_dtype = s->dtype,
        .k = side_of(&f->k, s->k_dim),
        .v = side_of(&f->v, s->v_dim),
    };
    if (book) {
        c.k.book = book->k ? book->k + head * book->k_head : NULL;
        c.v.book = book->v ? book->v + head * book->v_head : NULL;
        c.k.book_sub = book->k_sub;
        c.v.book_sub = book->v_sub;
    }
    return c;
}
