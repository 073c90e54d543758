// SPDX-License-Identifier: Apache-2.0
//
// Stages of a format by name, as behind the ':' of "NAME:stage=value:stage=value" and in the
// daemon's configuration. docs/formats.md lists them.
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/internal.h"

struct word {
    const char *word;
    uint8_t value;
};

static const struct word rotations[] = {{"none", KVQ_ROTATE_NONE},
                                        {"hadamard", KVQ_ROTATE_HADAMARD},
                                        {"signed", KVQ_ROTATE_SIGNED},
                                        {NULL, 0}};
static const struct word scales[] = {{"none", KVQ_SCALE_NONE},     {"l2", KVQ_SCALE_L2_HEAD},
                                     {"xh", KVQ_SCALE_L2_CROSS},   {"max", KVQ_SCALE_MAX},
                                     {"mean", KVQ_SCALE_MEAN_ABS}, {NULL, 0}};
static const struct word channels[] = {{"none", KVQ_CHANNEL_NONE},
                                       {"prompt", KVQ_CHANNEL_PROMPT},
                                       {"book", KVQ_CHANNEL_BOOK},
                                       {NULL, 0}};
static const struct word axes[] = {
    {"channel", KVQ_PER_CHANNEL}, {"token", KVQ_PER_TOKEN}, {NULL, 0}};
static const struct word zeros[] = {{"integer", KVQ_ZERO_INTEGER},
                                    {"minimum", KVQ_ZERO_MINIMUM},
                                    {"fitted", KVQ_ZERO_FITTED},
                                    {NULL, 0}};
static const struct word codecs[] = {{"affine", KVQ_CODEC_AFFINE},
                                     {"symmetric", KVQ_CODEC_SYMMETRIC},
                                     {"hybrid", KVQ_CODEC_HYBRID},
                                     {"lloyd", KVQ_CODEC_LLOYD},
                                     {NULL, 0}};

// A stage: a byte or 16-bit number of struct kvq_format, or two of them.
struct stage {
    const char *name, *brief; // underscores do not count; brief may be NULL
    const struct word *words; // NULL: a number up to `most`
    size_t offset, second;    // second 0: none
    uint16_t most;
    bool wide; // 16 bits
};

#define AT(field) offsetof(struct kvq_format, field)
static const struct stage stages[] = {
    {"k_channel", "channel", channels, AT(k_channel), 0, 0, false},
    {"token_scale", "scale", scales, AT(k_token_scale), 0, 0, false},
    {"k_rotation", "rot", rotations, AT(k_rotation), 0, 0, false},
    {"v_rotation", "vrot", rotations, AT(v_rotation), 0, 0, false},
    {"k_codec", NULL, codecs, AT(k.codec), 0, 0, false},
    {"v_codec", NULL, codecs, AT(v.codec), 0, 0, false},
    {"k_bits", NULL, NULL, AT(k.bits), 0, 8, false},
    {"v_bits", NULL, NULL, AT(v.bits), 0, 8, false},
    {"k_group", NULL, NULL, AT(k.group), 0, 128, true},
    {"v_group", NULL, NULL, AT(v.group), 0, 128, true},
    {"k_axis", NULL, axes, AT(k.axis), 0, 0, false},
    {"v_axis", NULL, axes, AT(v.axis), 0, 0, false},
    {"zero", NULL, zeros, AT(k.zero), AT(v.zero), 0, false},
    {"k_zero", NULL, zeros, AT(k.zero), 0, 0, false},
    {"v_zero", NULL, zeros, AT(v.zero), 0, 0, false},
    {"k_full", NULL, NULL, AT(k.full), 0, 1, false},
    {"v_full", NULL, NULL, AT(v.full), 0, 1, false},
    {"k_wide", NULL, NULL, AT(k.wide), 0, 1, false},
    {"v_wide", NULL, NULL, AT(v.wide), 0, 1, false},
    {"sink", NULL, NULL, AT(sink_tokens), 0, KVQ_MAX_SINK, true},
    {"recent", NULL, NULL, AT(recent_tokens), 0, 4096, true},
    {"unit", NULL, NULL, AT(unit_tokens), 0, KVQ_BLOCK_TOKENS, true},
    {"outliers", NULL, NULL, AT(outliers), 0, KVQ_POOL_ENTRIES, false},
    {"displaced", NULL, NULL, AT(extra_outliers), 0, KVQ_POOL_ENTRIES, false},
};
enum { STAGES = sizeof stages / sizeof *stages, LONGEST = 32 };

// Whether the first n bytes of `a` are the name `b`, but for underscores.
static bool same_name(const char *a, size_t n, const char *b)
{
    const char *end = a + n;
    for (;; a++, b++) {
        while (a < end && *a == '_')
            a++;
        while (*b == '_')
            b++;
        if (a == end || *b == '\0')
            return a == end && *b == '\0';
        if (*a != *b)
            return false;
    }
}

int kvq_format_stage(const char *name, size_t n)
{
    for (int i = 0; i < STAGES; i++)
        if (same_name(name, n, stages[i].name) ||
            (stages[i].brief && same_name(name, n, stages[i].brief)))
            return i;
    return -1;
}

static void put(struct kvq_format *f, const struct stage *s, size_t offset, uint16_t value)
{
    uint8_t byte = (uint8_t)value;
    if (s->wide)
        memcpy((char *)f + offset, &value, sizeof value);
    else
        memcpy((char *)f + offset, &byte, sizeof byte);
}

// What V is rotated by belongs to the paper's own K rotation, channel factors and codes of V, until
// one of these becomes another. What is said of V's rotation itself is said in place of the paper.
static bool leaves_paper(const struct kvq_format *f, const struct stage *s, uint16_t value)
{
    const size_t own[] = {AT(k_channel), AT(k_rotation), AT(v.codec), AT(v.axis)};
    uint8_t now;
    memcpy(&now, (const char *)f + s->offset, sizeof now);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (s->offset == own[i])
            return now != value;
    return s->offset == AT(v_rotation);
}

static bool value_of(const struct stage *s, const char *text, uint16_t *value)
{
    for (const struct word *w = s->words; w && w->word; w++)
        if (strcmp(w->word, text) == 0) {
            *value = w->value;
            return true;
        }
    char *end;
    errno = 0;
    if (s->words || *text < '0' || *text > '9')
        return false;
    unsigned long x = strtoul(text, &end, 10);
    *value = (uint16_t)x;
    return !errno && !*end && x <= s->most;
}

// ---- Refusals ----

static int refuse_value(const struct stage *s, const char *value, char *text, size_t n)
{
    int used = snprintf(text, n, "stage %s cannot be \"%s\"; it can be ", s->name, value);
    size_t at = used < 0 || (size_t)used >= n ? n : (size_t)used;
    if (!s->words)
        snprintf(text + at, n - at, "0 to %u", s->most);
    for (const struct word *w = s->words; w && w->word && at < n; w++)
        at += (size_t)snprintf(text + at, n - at, "%s%s", w == s->words ? "" : ", ", w->word);
    return -1;
}

static int refuse_stage(const char *name, size_t length, char *text, size_t n)
{
    int used = snprintf(text, n, "there is no stage \"%.*s\"; there are ",
                        (int)(length < LONGEST ? length : LONGEST), name);
    size_t at = used < 0 || (size_t)used >= n ? n : (size_t)used;
    for (int i = 0; i < STAGES && at < n; i++)
        at += (size_t)snprintf(text + at, n - at, "%s%s", i ? ", " : "", stages[i].name);
    return -1;
}

// ---- Changes ----

// Which stages were asked for, of those that are looked at after all changes.
struct asked {
    bool k_zero, v_zero, zero, displaced;
};

static void note_asked(struct asked *asked, const struct stage *s)
{
    asked->zero |= s->second == AT(v.zero);
    asked->k_zero |= s->offset == AT(k.zero) && !s->second;
    asked->v_zero |= s->offset == AT(v.zero);
    asked->displaced |= s->offset == AT(extra_outliers);
}

// Without any room for displaced tokens the first choice of outliers would be the last.
static void make_room(struct kvq_format *f, const struct kvq_format *before,
                      const struct asked *asked)
{
    if (f->outliers && !before->outliers && !f->extra_outliers && !asked->displaced)
        f->extra_outliers = KVQ_POOL_ENTRIES / 2;
}

// Affine codes alone have a choice of zeros; whether a side has these is known after all changes.
static int settle_zeros(struct kvq_format *f, const struct asked *asked, char *text, size_t n)
{
    bool k = f->k.codec == KVQ_CODEC_AFFINE, v = f->v.codec == KVQ_CODEC_AFFINE;
    if ((asked->k_zero && !k) || (asked->v_zero && !v) || (asked->zero && !k && !v)) {
        snprintf(text, n, "stage %s goes with affine codes, and its side has others",
                 asked->k_zero && !k   ? "k_zero"
                 : asked->v_zero && !v ? "v_zero"
                                       : "zero");
        return -1;
    }
    f->k.zero = k ? f->k.zero : 0;
    f->v.zero = v ? f->v.zero : 0;
    return 0;
}

// "stage=value", n bytes of it.
static int change_one(struct kvq_format *f, const char *change, size_t length, struct asked *asked,
                      char *text, size_t n)
{
    const char *equals = memchr(change, '=', length);
    char value[LONGEST];
    uint16_t x;
    if (!equals) {
        snprintf(text, n, "\"%.*s\" should be stage=value",
                 (int)(length < LONGEST ? length : LONGEST), change);
        return -1;
    }
    int i = kvq_format_stage(change, (size_t)(equals - change));
    if (i < 0)
        return refuse_stage(change, (size_t)(equals - change), text, n);
    size_t given = (size_t)(change + length - equals - 1);
    snprintf(value, sizeof value, "%.*s", (int)given, equals + 1);
    if (given >= sizeof value || !value_of(&stages[i], value, &x))
        return refuse_value(&stages[i], value, text, n);
    if (leaves_paper(f, &stages[i], x))
        f->paper_rotates_v = 0;
    put(f, &stages[i], stages[i].offset, x);
    if (stages[i].second)
        put(f, &stages[i], stages[i].second, x);
    note_asked(asked, &stages[i]);
    return 0;
}

int kvq_format_change(struct kvq_format *format, const char *changes, char *text, size_t n)
{
    struct kvq_format f = *format;
    struct asked asked = {0};
    if (kvq_is_raw(&f)) {
        snprintf(text, n, "format %s is raw: it has no stages to change", f.name);
        return -1;
    }
    for (const char *at = changes;; at++) {
        size_t length = strcspn(at, ":");
        if (change_one(&f, at, length, &asked, text, n))
            return -1;
        at += length;
        if (*at == '\0')
            break;
    }
    make_room(&f, format, &asked);
    if (settle_zeros(&f, &asked, text, n))
        return -1;
    *format = f;
    return 0;
}
