// SPDX-License-Identifier: Apache-2.0
//
// The simulation's token ids, and K and V that depend on them.
#include "tests/core/sim.h"

// Stories have beginnings in common, and go different ways at pages' ends and between them.
int32_t story_id(uint32_t story, uint64_t token)
{
    uint32_t way = token < 200 ? story / 4 : token < 512 ? story / 2 : story;
    struct kit dice = {.random = token * 64 + way};
    return (int32_t)(kit_random(&dice) % 50000);
}

// The last two have the same ids, and mean something else.
const char *story_salt(uint32_t story)
{
    return story + 2 < SIM_STORIES ? "" : story % 2 ? "one" : "two";
}

static uint64_t salted(uint32_t story)
{
    uint64_t hash = 7;
    for (const char *c = story_salt(story); *c; c++)
        hash = hash * 31 + (uint64_t)*c;
    return hash;
}

void ids_rows(const struct track *t, uint32_t layer, uint32_t side, uint64_t from, uint32_t n,
              float *rows)
{
    uint64_t hash = salted(t->story);
    for (uint64_t at = 0; at < from + n; at++) {
        hash = (hash ^ (uint32_t)t->ids[at]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
        struct kit dice = {.random = hash + 2 * layer + side};
        for (uint32_t i = 0; at >= from && i < SIM_ROW; i++)
            rows[(at - from) * SIM_ROW + i] = kit_float(&dice);
    }
}

void ids_begin(struct track *t, uint64_t tokens)
{
    static float k[KVQ_BLOCK_TOKENS * SIM_ROW], v[KVQ_BLOCK_TOKENS * SIM_ROW];
    struct model *m = &t->model;
    for (uint64_t at = 0; at < tokens; at++)
        t->ids[at] = story_id(t->story, at);
    t->known = m->tokens = m->floor = tokens;
    for (uint32_t l = 0; l < MODEL_LAYERS; l++) {
        if (m->layers[l].source != l)
            continue;
        for (uint64_t at = 0; at < tokens; at += KVQ_BLOCK_TOKENS) {
            ids_rows(t, l, 0, at, KVQ_BLOCK_TOKENS, k);
            ids_rows(t, l, 1, at, KVQ_BLOCK_TOKENS, v);
            model_write(m, l, at, KVQ_BLOCK_TOKENS, k, v, SIM_ROW);
        }
        m->layers[l].base = kvq_is_raw(m->layers[l].format) ? 0 : tokens;
    }
}

void ids_shorten(struct track *t)
{
    t->known = t->known < t->model.tokens ? t->known : t->model.tokens;
}
