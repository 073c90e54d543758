// SPDX-License-Identifier: Apache-2.0
//
// Methods by name, and the bytes they take.
#include <math.h>
#include <string.h>

#include "tools/kvq-bench/quality.h"

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
    // Methods may have longer names than formats.
    if (changes && kvq_format_change(&m->f, changes, text, n))
        return -1;
    return kvq_format_check(&m->f, text, n);
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
