// SPDX-License-Identifier: Apache-2.0
//
// Methods by name, and the bytes they take.
#include <string.h>

#include "kernels/sizes.h"
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

double quality_packed_bytes(const struct quality_method *m, const struct kvq_shape *s)
{
    if (m->kind == QUALITY_DROPPED)
        return 0;
    if (m->kind == QUALITY_INT2)
        return (s->k_dim + s->v_dim) * 2 / 8.0 + 8; // with an fp16 scale and zero for each
    struct kvq_layout l = kvq_layout_of(&m->f, s);
    return (double)l.record_bytes / KVQ_BLOCK_TOKENS;
}

static bool is_raw(const struct quality_method *m)
{
    return m->kind == QUALITY_FORMAT && kvq_is_raw(&m->f);
}

static uint64_t pages_of(uint64_t tokens)
{
    return (tokens + KVQ_BLOCK_TOKENS - 1) / KVQ_BLOCK_TOKENS;
}

// With the first `packed` tokens packed. Blocks are whole, of raw ones all but the newest; packed
// ones have slots for sinks, too, whose rows they stand beside.
static double bytes_with(const struct quality_method *m, const struct kvq_shape *s, uint64_t tokens,
                         uint64_t packed)
{
    struct kvq_layer_bytes one = kvq_layer_bytes_of(&m->f, s);
    struct kvq_raw_layout raw = kvq_raw_layout_of(s);
    uint64_t raws = pages_of(tokens) - packed / KVQ_BLOCK_TOKENS;
    uint64_t bytes = (packed ? one.sinks : 0) + (tokens ? one.extras : 0);
    if (raws)
        bytes += (raws - 1) * one.raw +
                 kvq_raw_bytes(&raw, kvq_raw_room((uint32_t)((tokens - 1) % KVQ_BLOCK_TOKENS) + 1));
    return (double)bytes / s->kv_heads +
           (double)(pages_of(packed) * KVQ_BLOCK_TOKENS) * quality_packed_bytes(m, s);
}

double quality_bytes_at(const struct quality_method *m, const struct kvq_shape *s, uint64_t tokens)
{
    uint64_t packed = tokens > m->f.recent_tokens ? tokens - m->f.recent_tokens : 0;
    bool waits = is_raw(m) || tokens < kvq_learn_tokens(&m->f, 0);
    return bytes_with(m, s, tokens, waits ? 0 : packed / m->f.unit_tokens * m->f.unit_tokens);
}

int64_t quality_window_for(const struct quality_method *m, const struct kvq_shape *s,
                           uint64_t tokens, double budget)
{
    uint64_t unit = m->f.unit_tokens, packed = 0;
    while (bytes_with(m, s, tokens, packed) > budget) {
        packed += unit;
        if (packed > tokens || is_raw(m))
            return -1;
    }
    return (int64_t)(tokens - packed);
}
