// SPDX-License-Identifier: Apache-2.0
//
// See pack_error.h.
#include "daemon/core/request/pack_error.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CHUNK = 32 }; // tokens that are compared at a time

// ---- On the poller's thread ----

void kvq__pack_sample_begin(const struct kvq__session *session, uint32_t layer, uint64_t first,
                            uint64_t end, struct kvq__pack_sample **sample)
{
    struct kvq__core *core = session->core;
    struct kvq__pack_sample *s = &core->packing.sample;
    const struct kvq__layer *l = &session->layers[layer];
    uint32_t unit = l->format->unit_tokens;
    assert(first < end && (end - first) % unit == 0);
    kvq__pack_sample_end(core, sample);
    if (core->config.pack_error_ns == 0 || s->taken || core->now < s->next_at)
        return;
    if (s->skip > 0) { // layers come in their order: else it would always be the first one's turn
        s->skip--;
        return;
    }
    uint64_t which = ++s->number * 0x9e3779b97f4a7c15u >> 32;
    uint64_t token = first + which % ((end - first) / unit) * unit;
    s->skip = (uint32_t)(which % session->n_layers);
    if (token < l->format->sink_tokens) // sinks are kept as they are
        return;
    s->next_at = core->now + core->config.pack_error_ns;
    s->taken = true;
    s->measured = false;
    s->layer = layer;
    s->head = (uint32_t)(s->number % l->shape.kv_heads);
    s->token = token;
    memcpy(s->format, l->format->name, sizeof s->format);
    *sample = s;
}

// When there is no room, the row with the fewest samples goes: formats that a client makes up only
// replace each other.
static struct kvq__pack_error *row_of_sample(struct kvq__core *core,
                                             const struct kvq__pack_sample *s)
{
    uint32_t fewest = 0;
    for (uint32_t i = 0; i < core->packing.n_errors; i++) {
        struct kvq__pack_error *e = &core->packing.errors[i];
        if (e->layer == s->layer && strcmp(e->format, s->format) == 0)
            return e;
        if (e->count < core->packing.errors[fewest].count)
            fewest = i;
    }
    if (core->packing.n_errors < KVQ_MAX_PACK_ERRORS)
        fewest = core->packing.n_errors++;
    struct kvq__pack_error *e = &core->packing.errors[fewest];
    *e = (struct kvq__pack_error){.layer = s->layer};
    memcpy(e->format, s->format, sizeof e->format);
    return e;
}

void kvq__pack_sample_end(struct kvq__core *core, struct kvq__pack_sample **sample)
{
    struct kvq__pack_sample *s = *sample;
    *sample = NULL;
    if (!s)
        return;
    assert(s == &core->packing.sample && s->taken);
    s->taken = false;
    struct kvq__pack_error *e = s->measured ? row_of_sample(core, s) : NULL;
    if (!e)
        return;
    e->count++;
    e->k += s->k;
    e->v += s->v;
}

uint32_t kvq__core_pack_errors(const struct kvq__core *core, const struct kvq__pack_error **out)
{
    *out = core->packing.errors;
    return core->packing.n_errors;
}

// ---- Where it is packed ----

// Squares of values, and of what they differ by.
struct squares {
    double values, differences;
};

static void add_squares(struct squares *s, const float *values, const float *read, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double difference = (double)values[i] - (double)read[i];
        s->values += (double)values[i] * (double)values[i];
        s->differences += difference * difference;
    }
}

static double error_of(const struct squares *s)
{
    return s->values > 0 ? sqrt(s->differences / s->values) : 0;
}

void kvq__pack_sample_measure(struct kvq__pack_sample *s, const struct kvq__core *core,
                              const struct kvq__layer *l, const struct kvq_unit *unit,
                              void *workspace)
{
    _Alignas(64) float values[2][CHUNK * KVQ_MAX_HEAD_DIM], read[2][CHUNK * KVQ_MAX_HEAD_DIM];
    uint16_t end = (uint16_t)(unit->first + l->format->unit_tokens);
    struct kvq_page as_given = {.raw = unit->raw_block, .tokens = end};
    struct kvq_page packed = {
        .raw = unit->raw_block, .packed = unit->packed_block, .tokens = end, .packed_tokens = end};
    struct kvq_reading reading = {.format = l->format,
                                  .shape = &l->shape,
                                  .n_pages = 1,
                                  .first_page = (uint32_t)(unit->block_start / KVQ_BLOCK_TOKENS),
                                  .extras = unit->extras,
                                  .book = unit->book};
    struct squares k = {0}, v = {0};
    assert(s->taken && unit->head == s->head && end <= KVQ_BLOCK_TOKENS);
    for (uint32_t at = unit->first; at < end; at += CHUNK) {
        uint32_t n = end - at < CHUNK ? end - at : CHUNK;
        uint64_t from = unit->block_start + at;
        reading.pages = &as_given;
        kvq_read_rows(core->config.kernels, &reading, from, n, unit->head, values[0], values[1],
                      workspace);
        reading.pages = &packed;
        kvq_read_rows(core->config.kernels, &reading, from, n, unit->head, read[0], read[1],
                      workspace);
        add_squares(&k, values[0], read[0], (size_t)n * l->shape.k_dim);
        add_squares(&v, values[1], read[1], (size_t)n * l->shape.k_dim);
    }
    s->k = error_of(&k);
    s->v = error_of(&v);
    s->measured = isfinite(s->k) && isfinite(s->v); // a file that was imported may hold anything
}
