// SPDX-License-Identifier: Apache-2.0
//
// Methods by name, and the bytes they take.
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

// ---- Stages by name ----

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
static const struct word zeros[] = {
    {"integer", KVQ_ZERO_INTEGER}, {"minimum", KVQ_ZERO_MINIMUM}, {NULL, 0}};
static const struct word codecs[] = {{"affine", KVQ_CODEC_AFFINE},
                                     {"symmetric", KVQ_CODEC_SYMMETRIC},
                                     {"hybrid", KVQ_CODEC_HYBRID},
                                     {"lloyd", KVQ_CODEC_LLOYD},
                                     {NULL, 0}};

// A stage: a byte or 16-bit number of struct kvq_format, or two of them.
struct stage {
    const char *name;
    const struct word *words; // NULL: a number up to `most`
    size_t offset, second;    // second 0: none
    uint16_t most;
    bool wide; // 16 bits
};

#define AT(field) offsetof(struct kvq_format, field)
static const struct stage stages[] = {
    {"rot", rotations, AT(k_rotation), 0, 0, false},
    {"vrot", rotations, AT(v_rotation), 0, 0, false},
    {"scale", scales, AT(k_token_scale), 0, 0, false},
    {"channel", channels, AT(k_channel), 0, 0, false},
    {"kcodec", codecs, AT(k.codec), 0, 0, false},
    {"vcodec", codecs, AT(v.codec), 0, 0, false},
    {"kbits", NULL, AT(k.bits), 0, 8, false},
    {"vbits", NULL, AT(v.bits), 0, 8, false},
    {"kgroup", NULL, AT(k.group), 0, 256, true},
    {"vgroup", NULL, AT(v.group), 0, 256, true},
    {"kaxis", axes, AT(k.axis), 0, 0, false},
    {"vaxis", axes, AT(v.axis), 0, 0, false},
    {"zero", zeros, AT(k.zero), AT(v.zero), 0, false},
    {"kzero", zeros, AT(k.zero), 0, 0, false},
    {"vzero", zeros, AT(v.zero), 0, 0, false},
    {"kfull", NULL, AT(k.full), 0, 1, false},
    {"vfull", NULL, AT(v.full), 0, 1, false},
    {"sink", NULL, AT(sink_tokens), 0, KVQ_MAX_SINK, true},
    {"recent", NULL, AT(recent_tokens), 0, 1024, true},
    {"unit", NULL, AT(unit_tokens), 0, KVQ_BLOCK_TOKENS, true},
    {"outliers", NULL, AT(outliers), 0, 32, false},
};

static void put(struct kvq_format *f, const struct stage *s, size_t offset, uint16_t value)
{
    uint8_t byte = (uint8_t)value;
    if (s->wide)
        memcpy((char *)f + offset, &value, sizeof value);
    else
        memcpy((char *)f + offset, &byte, sizeof byte);
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
    unsigned long x = strtoul(text, &end, 10);
    *value = (uint16_t)x;
    return !s->words && !errno && end != text && !*end && *text != '-' && x <= s->most;
}

static int change_stage(struct kvq_format *f, const char *name, const char *value, char *text,
                        size_t n)
{
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        uint16_t x;
        if (strcmp(stages[i].name, name) != 0)
            continue;
        if (!value_of(&stages[i], value, &x)) {
            snprintf(text, n, "stage %s cannot be \"%s\"", name, value);
            return -1;
        }
        put(f, &stages[i], stages[i].offset, x);
        if (stages[i].second)
            put(f, &stages[i], stages[i].second, x);
        return 0;
    }
    snprintf(text, n, "there is no stage \"%s\"; rot, vrot, scale, channel, kbits, .. there are",
             name);
    return -1;
}

// "stage=value:stage=value"; changes the text.
static int change_stages(struct kvq_format *f, char *changes, char *text, size_t n)
{
    char *rest = NULL;
    for (char *part = strtok_r(changes, ":", &rest); part; part = strtok_r(NULL, ":", &rest)) {
        char *value = strchr(part, '=');
        if (!value) {
            snprintf(text, n, "\"%s\" should be stage=value", part);
            return -1;
        }
        *value++ = 0;
        if (change_stage(f, part, value, text, n))
            return -1;
    }
    return kvq_format_check(f, text, n);
}

// ---- Names ----

int quality_method_parse(const char *name, struct quality_method *m, char *text, size_t n)
{
    char copy[sizeof m->name];
    *m = (struct quality_method){.kind = QUALITY_FORMAT};
    if (strlen(name) >= sizeof copy) {
        snprintf(text, n, "the method's name has %zu bytes; at most %zu are allowed", strlen(name),
                 sizeof copy - 1);
        return -1;
    }
    memcpy(m->name, name, strlen(name) + 1);
    memcpy(copy, name, strlen(name) + 1);
    if (strcmp(name, "dropped") == 0)
        m->kind = QUALITY_DROPPED;
    else if (strcmp(name, "int2-token") == 0)
        m->kind = QUALITY_INT2;
    char *changes = strchr(copy, ':');
    if (changes)
        *changes++ = 0;
    if (kvq_format_parse(m->kind == QUALITY_FORMAT ? copy : "f16", &m->f, text, n))
        return -1;
    return changes ? change_stages(&m->f, changes, text, n) : 0;
}

// ---- Bytes ----

static double raw_token_bytes(const struct kvq_shape *s)
{
    return 2.0 * (s->k_dim + s->v_dim);
}

double quality_packed_bytes(const struct quality_method *m, const struct kvq_shape *s)
{
    if (m->kind == QUALITY_DROPPED)
        return 0;
    if (m->kind == QUALITY_INT2)
        return (s->k_dim + s->v_dim) * 2 / 8.0 + 8; // with an fp16 scale and zero for each
    struct kvq_layout l = kvq_layout_of(&m->f, s);
    return (double)l.record_bytes / KVQ_BLOCK_TOKENS;
}

// What one KV head keeps besides blocks: factors, outliers and sinks. The sinks' bytes are in it.
static double extras_bytes(const struct quality_method *m, const struct kvq_shape *s)
{
    return (double)kvq_extras_bytes(&m->f, s) / s->kv_heads;
}

// Tokens in full precision: in the recent window and the unit that is being filled.
static double window_tokens(const struct quality_method *m)
{
    bool raw = m->kind == QUALITY_FORMAT && kvq_is_raw(&m->f);
    return raw ? 0 : m->f.recent_tokens + (m->f.unit_tokens - 1) / 2.0;
}

double quality_bytes_at(const struct quality_method *m, const struct kvq_shape *s, double tokens)
{
    double window = fmin(tokens, window_tokens(m) + m->f.sink_tokens);
    double recent = fmin(tokens, window_tokens(m));
    return (tokens - window) * quality_packed_bytes(m, s) + recent * raw_token_bytes(s) +
           extras_bytes(m, s);
}

int64_t quality_window_for(const struct quality_method *m, const struct kvq_shape *s,
                           uint64_t tokens, double budget)
{
    double packed = quality_packed_bytes(m, s), raw = raw_token_bytes(s);
    double sinks = m->f.sink_tokens;
    double left = budget - extras_bytes(m, s) - ((double)tokens - sinks) * packed;
    if (left < 0)
        return -1;
    double window = packed < raw ? floor(left / (raw - packed)) : 0;
    return (int64_t)fmin(window, (double)tokens - sinks);
}
