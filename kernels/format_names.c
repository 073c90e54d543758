// SPDX-License-Identifier: Apache-2.0
//
// What format names mean beyond the table: suffixes that change single stages, codebook formats
// by their numbers, pairs of formats for K and V, and stages by name (format_stages.c).
//
//   NAME-g32 -g64 -g128     values per scale, K and V
//   NAME-fm                 the smallest value as zero point, not a multiple of the scale
//   NAME-fit                zero point and scale by least squares
//   NAME-full               symmetric and hybrid codecs use all their codes
//   NAME-norot -noscale -nosmooth     without rotation, token scale, channel factors
//   NAME-xh -max -mean      token scale across heads, by maximum, by mean
//   NAME-oN                 N outlier tokens per KV head; 0 for none
//   NAME-sN -wN             N sink tokens, N recent tokens
//   vecinfer-k4x10v8x12     sub-vectors of 4 channels, 10 bits each, for K; of 8 and 12 for V.
//                           The paper's spelling k<4,10>v<8,12> is the same
//   NAME+NAME               K as in the first, V as in the second
//   ANY:stage=value:..      any of the above with these stages changed
#include <stdio.h>
#include <stdlib.h>

#include "kernels/internal.h"

// ---- Numbers ----

// A decimal number right after `prefix`, to the end of the text. -1 if it is none.
static long number_after(const char *text, const char *prefix)
{
    size_t n = strlen(prefix);
    char *end;
    if (strncmp(text, prefix, n) || text[n] < '0' || text[n] > '9')
        return -1;
    long value = strtol(text + n, &end, 10);
    return *end == '\0' && value <= 100000 ? value : -1;
}

// ---- Suffixes ----

static bool is_scalar(const struct kvq_side *side)
{
    return side->codec != KVQ_CODEC_RAW && side->codec != KVQ_CODEC_BOOK;
}

// Changes the group; needs a unit as long as the tokens that share a scale.
static bool set_group(struct kvq_format *f, long group)
{
    struct kvq_side *sides[] = {&f->k, &f->v};
    if (group != 32 && group != 64 && group != 128)
        return false;
    for (int i = 0; i < 2; i++) {
        struct kvq_side *side = sides[i];
        if (!is_scalar(side) || side->codec == KVQ_CODEC_LLOYD)
            return false;
        side->group = (uint16_t)group;
        if (side->axis == KVQ_PER_CHANNEL && f->unit_tokens < group)
            f->unit_tokens = (uint16_t)group;
    }
    return true;
}

static bool set_zero(struct kvq_format *f, enum kvq_zero zero)
{
    if (f->k.codec != KVQ_CODEC_AFFINE && f->v.codec != KVQ_CODEC_AFFINE)
        return false;
    f->k.zero = f->k.codec == KVQ_CODEC_AFFINE ? (uint8_t)zero : f->k.zero;
    f->v.zero = f->v.codec == KVQ_CODEC_AFFINE ? (uint8_t)zero : f->v.zero;
    return true;
}

static bool set_full(struct kvq_format *f)
{
    f->k.full = f->k.codec == KVQ_CODEC_SYMMETRIC || f->k.codec == KVQ_CODEC_HYBRID;
    f->v.full = f->v.codec == KVQ_CODEC_SYMMETRIC || f->v.codec == KVQ_CODEC_HYBRID;
    return f->k.full || f->v.full;
}

static bool set_scale(struct kvq_format *f, enum kvq_token_scale scale)
{
    if (f->k_token_scale == KVQ_SCALE_NONE)
        return false;
    f->k_token_scale = (uint8_t)scale;
    return true;
}

static bool clear_stage(uint8_t *stage)
{
    bool had = *stage != 0;
    *stage = 0;
    return had;
}

static bool set_outliers(struct kvq_format *f, long n)
{
    if (f->outliers == 0 || n + f->extra_outliers > KVQ_POOL_ENTRIES)
        return false;
    f->outliers = (uint8_t)n;
    return true;
}

static bool set_window(uint16_t *tokens, long n, long step, long most)
{
    if (n > most || n % step)
        return false;
    *tokens = (uint16_t)n;
    return true;
}

static bool apply_word(struct kvq_format *f, const char *word)
{
    static const struct {
        const char *word;
        enum kvq_token_scale scale;
    } scales[] = {{"xh", KVQ_SCALE_L2_CROSS}, {"max", KVQ_SCALE_MAX}, {"mean", KVQ_SCALE_MEAN_ABS}};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
        if (strcmp(word, scales[i].word) == 0)
            return set_scale(f, scales[i].scale);
    if (strcmp(word, "fm") == 0)
        return set_zero(f, KVQ_ZERO_MINIMUM);
    if (strcmp(word, "fit") == 0)
        return set_zero(f, KVQ_ZERO_FITTED);
    if (strcmp(word, "full") == 0)
        return set_full(f);
    if (strcmp(word, "norot") == 0) {
        bool k = clear_stage(&f->k_rotation), v = clear_stage(&f->v_rotation);
        f->paper_rotates_v = 0;
        return k || v;
    }
    if (strcmp(word, "noscale") == 0)
        return clear_stage(&f->k_token_scale);
    if (strcmp(word, "nosmooth") == 0)
        return clear_stage(&f->k_channel);
    return false;
}

static bool apply(struct kvq_format *f, const char *word)
{
    long n;
    if (kvq_is_raw(f))
        return false;
    if ((n = number_after(word, "g")) >= 0)
        return set_group(f, n);
    if ((n = number_after(word, "o")) >= 0)
        return set_outliers(f, n);
    if ((n = number_after(word, "s")) >= 0)
        return set_window(&f->sink_tokens, n, KVQ_GROUP_TOKENS, KVQ_MAX_SINK);
    if ((n = number_after(word, "w")) >= 0)
        return set_window(&f->recent_tokens, n, 1, 4096);
    return apply_word(f, word);
}

// ---- One name ----

// Takes `text` off the front of *at.
static bool take(const char **at, const char *text)
{
    size_t n = strlen(text);
    if (strncmp(*at, text, n))
        return false;
    *at += n;
    return true;
}

// Takes a number of 1 to 3 digits, at most 255.
static bool take_number(const char **at, uint8_t *number)
{
    unsigned n = 0, digits = 0;
    for (; **at >= '0' && **at <= '9' && digits < 3; (*at)++, digits++)
        n = 10 * n + (unsigned)(**at - '0');
    *number = (uint8_t)n;
    return digits > 0 && n <= 255;
}

// "4x10", or "<4,10>" if `paper`: channels of a sub-vector and bits of its code.
static bool take_book(const char **at, bool paper, struct kvq_side *side)
{
    return (!paper || take(at, "<")) && take_number(at, &side->vector) &&
           take(at, paper ? "," : "x") && take_number(at, &side->bits) && (!paper || take(at, ">"));
}

// "vecinfer-k<4,10>v<8,12>" or "vecinfer-k4x10v8x12". The rest behind it goes to *rest.
static bool parse_books(const char *name, struct kvq_format *f, const char **rest)
{
    const char *at = name;
    *f = *kvq_format_by_name("vecinfer-2");
    if (!take(&at, "vecinfer-k"))
        return false;
    bool paper = *at == '<';
    if (!take_book(&at, paper, &f->k) || !take(&at, "v") || !take_book(&at, paper, &f->v))
        return false;
    *rest = at;
    return true;
}

// The row with the longest name that `name` starts with, followed by its end or by a suffix.
static bool find_row(const char *name, struct kvq_format *f, const char **rest)
{
    size_t longest = 0;
    for (const struct kvq_format *row = kvq_formats; row->name[0]; row++) {
        size_t n = strlen(row->name);
        bool ends = strncmp(name, row->name, n) == 0 && (name[n] == '\0' || name[n] == '-');
        if (!ends || n <= longest)
            continue;
        longest = n;
        *f = *row;
        *rest = name + n;
    }
    return longest > 0;
}

static int parse_one(const char *name, struct kvq_format *f, char *text, size_t n)
{
    const char *rest = "";
    char word[KVQ_FORMAT_NAME];
    if (!parse_books(name, f, &rest) && !find_row(name, f, &rest)) {
        snprintf(text, n, "format %.80s is unknown", name);
        return -1;
    }
    while (*rest == '-') {
        size_t length = strcspn(++rest, "-");
        snprintf(word, sizeof word, "%.*s", (int)length, rest);
        if (length >= sizeof word || !apply(f, word)) {
            snprintf(text, n, "format %.80s: suffix -%.40s does not go with it", name, word);
            return -1;
        }
        rest += length;
    }
    if (*rest == '\0')
        return 0;
    snprintf(text, n, "format %.80s is unknown from %.40s on", name, rest);
    return -1;
}

// ---- Pairs ----

static uint16_t larger(uint16_t a, uint16_t b)
{
    return a > b ? a : b;
}

int kvq_format_join(struct kvq_format *f, const struct kvq_format *v, char *text, size_t n)
{
    if (f->raw_dtype && v->raw_dtype && f->raw_dtype != v->raw_dtype) {
        snprintf(text, n, "K and V have one 16-bit type, not f16 and bf16");
        return -1;
    }
    f->v = v->v;
    f->v_rotation = v->v_rotation;
    f->paper_rotates_v = v->paper_rotates_v;
    f->unit_tokens = larger(f->unit_tokens, v->unit_tokens);
    f->recent_tokens = larger(f->recent_tokens, v->recent_tokens);
    f->sink_tokens = larger(f->sink_tokens, v->sink_tokens);
    f->source = "K and V of two formats";
    return 0;
}

static int parse_pair(const char *name, struct kvq_format *f, char *text, size_t n)
{
    char first[KVQ_FORMAT_NAME], why[80];
    struct kvq_format second;
    const char *plus = strchr(name, '+');
    if (!plus)
        return parse_one(name, f, text, n);
    snprintf(first, sizeof first, "%.*s", (int)(plus - name), name);
    if (parse_one(first, f, text, n) || parse_one(plus + 1, &second, text, n))
        return -1;
    if (kvq_format_join(f, &second, why, sizeof why) == 0)
        return 0;
    snprintf(text, n, "format %.80s: %s", name, why);
    return -1;
}

static int parse_stages(const char *name, struct kvq_format *f, char *text, size_t n)
{
    char plain[KVQ_FORMAT_NAME];
    size_t length = strcspn(name, ":");
    snprintf(plain, sizeof plain, "%.*s", (int)length, name);
    int rc = parse_pair(plain, f, text, n);
    if (rc == 0 && name[length])
        rc = kvq_format_change(f, name + length + 1, text, n);
    return rc;
}

int kvq_format_parse(const char *name, struct kvq_format *format, char *text, size_t n)
{
    struct kvq_format f;
    if (strlen(name) >= KVQ_FORMAT_NAME) {
        snprintf(text, n, "format name %.20s... has %zu characters; at most %d are allowed", name,
                 strlen(name), KVQ_FORMAT_NAME - 1);
        return -1;
    }
    int rc = parse_stages(name, &f, text, n);
    if (rc)
        return rc;
    snprintf(f.name, sizeof f.name, "%s", name);
    if (kvq_format_check(&f, text, n))
        return -1;
    *format = f;
    return 0;
}

// ---- Whether a row makes sense ----

static const char *check_scalar(const struct kvq_side *s, uint32_t unit)
{
    bool odd_bits = s->bits != 1 && s->bits != 2 && s->bits != 3 && s->bits != 4 && s->bits != 8;
    if (odd_bits || (s->bits == 1 && s->codec != KVQ_CODEC_AFFINE))
        return "codes have 1 (affine only), 2, 3, 4 or 8 bits";
    if (s->codec == KVQ_CODEC_HYBRID && s->bits > 4)
        return "hybrid groups have codes of 2, 3 or 4 bits";
    if (s->codec == KVQ_CODEC_LLOYD && (s->bits > 4 || s->axis != KVQ_PER_TOKEN || s->group))
        return "Lloyd-Max codes have 2, 3 or 4 bits and one scale per token";
    if (s->wide && (s->codec != KVQ_CODEC_LLOYD || s->bits != 2))
        return "only 2-bit Lloyd-Max codes can have a wider quarter";
    if (s->full && s->codec != KVQ_CODEC_SYMMETRIC && s->codec != KVQ_CODEC_HYBRID)
        return "only symmetric and hybrid codes leave a level unused";
    if (s->group != 0 && s->group != 32 && s->group != 64 && s->group != 128)
        return "32, 64 or 128 values share a scale";
    if (s->axis == KVQ_PER_CHANNEL && (s->group == 0 || s->group > unit))
        return "scales per channel serve 32, 64 or 128 tokens, within one unit";
    return NULL;
}

static const char *check_book(const struct kvq_side *s)
{
    if (s->vector != 2 && s->vector != 4 && s->vector != 8)
        return "a codebook's code stands for 2, 4 or 8 channels";
    if (s->bits != 3 && s->bits != 4 && s->bits != 6 && s->bits != 8 && s->bits != 10 &&
        s->bits != 12 && s->bits != 16)
        return "a codebook's codes have 3, 4, 6, 8, 10, 12 or 16 bits";
    if (s->bits < s->vector)
        return "a codebook's code has at least 1 bit for each channel";
    if (s->bits == 16 && s->vector != 8)
        return "a codebook's codes of 16 bits stand for 8 channels";
    if (s->group || s->axis || s->full || s->wide)
        return "a codebook's codes have no scales and no levels";
    return NULL;
}

static const char *check_side(const struct kvq_side *s, uint32_t unit)
{
    if (s->codec == KVQ_CODEC_RAW)
        return NULL;
    if (s->codec > KVQ_CODEC_BOOK)
        return "the codec is unknown";
    return s->codec == KVQ_CODEC_BOOK ? check_book(s) : check_scalar(s, unit);
}

static const char *check_windows(const struct kvq_format *f)
{
    if (f->unit_tokens != 32 && f->unit_tokens != 64 && f->unit_tokens != 128)
        return "units have 32, 64 or 128 tokens";
    if (f->sink_tokens % KVQ_GROUP_TOKENS || f->sink_tokens > KVQ_MAX_SINK)
        return "sink windows have 0, 32, 64 or 96 tokens";
    if (f->recent_tokens > 4096)
        return "recent windows have at most 4096 tokens";
    if (f->outliers + f->extra_outliers > KVQ_POOL_ENTRIES)
        return "at most 64 outlier tokens can be kept";
    return NULL;
}

static const char *check_stages(const struct kvq_format *f)
{
    bool book = f->k.codec == KVQ_CODEC_BOOK;
    if (kvq_is_raw(f) != (f->v.codec == KVQ_CODEC_RAW))
        return "K and V are both raw or both quantized";
    if (kvq_is_raw(f) && (f->k_channel || f->k_rotation || f->k_token_scale || f->v_rotation ||
                          f->sink_tokens || f->outliers))
        return "a raw format has no other stages";
    if (f->k_channel == KVQ_CHANNEL_BOOK && !book)
        return "smoothing factors come with K's codebook, and K has none";
    if (book && f->k_channel == KVQ_CHANNEL_PROMPT)
        return "K's codebook is made before there is a prompt to learn factors from";
    if (book && f->k_token_scale != KVQ_SCALE_NONE)
        return "K's codebook is made of keys that are not divided by a token's scale";
    if (f->k_channel > KVQ_CHANNEL_BOOK || f->k_rotation > KVQ_ROTATE_SIGNED ||
        f->v_rotation > KVQ_ROTATE_SIGNED || f->k_token_scale > KVQ_SCALE_MEAN_ABS)
        return "a stage is unknown";
    return NULL;
}

int kvq_format_check(const struct kvq_format *f, char *text, size_t n)
{
    const char *wrong = check_stages(f);
    const char *side = "";
    if (!wrong)
        wrong = check_windows(f);
    if (!wrong && (wrong = check_side(&f->k, f->unit_tokens)))
        side = "K: ";
    if (!wrong && (wrong = check_side(&f->v, f->unit_tokens)))
        side = "V: ";
    if (!wrong)
        return 0;
    snprintf(text, n, "format %s: %s%s", f->name, side, wrong);
    return -1;
}
