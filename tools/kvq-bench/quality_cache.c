// SPDX-License-Identifier: Apache-2.0
//
// The caches of a model in this process: what tools/kvq-run/cache.c does with kvqd.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/quality_model.h"

// ---- Areas ----

int quality_engine_open(struct engine *e, const struct config *c, uint32_t step_tokens,
                        struct problem *p)
{
    size_t dim = c->head_dim, q = (size_t)step_tokens * c->q_heads * dim;
    size_t kv = (size_t)step_tokens * c->kv_heads * dim;
    *e = (struct engine){.step_tokens = step_tokens};
    e->q = malloc((2 * q + 2 * kv) * sizeof *e->q);
    if (!e->q)
        return problem_set(p, RUN_FAILED, "out of memory");
    e->out = e->q + q;
    e->k = e->out + q;
    e->v = e->k + kv;
    return 0;
}

void quality_engine_close(struct engine *e)
{
    free(e->q);
    *e = (struct engine){0};
}

// ---- Caches ----

static struct kvq_shape shape_of(const struct config *c, uint32_t layer)
{
    struct kvq_shape s = {.q_heads = (uint16_t)c->q_heads,
                          .kv_heads = (uint16_t)c->kv_heads,
                          .dtype = KVQ_F16,
                          .window = layer >= c->window_from ? c->window : 0,
                          .scale = 1.0f / sqrtf((float)c->head_dim)};
    kvq_shape_set_dims(&s, (uint16_t)c->head_dim, (uint16_t)c->head_dim);
    return s;
}

int quality_cache_open(struct quality_cache *q, struct engine *e, const struct config *c,
                       const struct quality_method *m, uint64_t room, const struct kvq_book *books,
                       bool keep_queries, struct problem *p)
{
    char text[400];
    *q = (struct quality_cache){.base = {.engine = e}, .layers = c->layers, .room = room};
    q->layer = calloc(c->layers, sizeof *q->layer);
    if (keep_queries)
        q->queries = malloc(c->layers * room * c->q_heads * c->head_dim * sizeof(float));
    if (!q->layer || (keep_queries && !q->queries))
        return problem_set(p, RUN_FAILED, "out of memory");
    for (uint32_t i = 0; i < c->layers; i++) {
        struct kvq_shape s = shape_of(c, i);
        if (quality_layer_open(&q->layer[i], m, &s, i, room, 0, books ? &books[i] : NULL, text,
                               sizeof text))
            return problem_set(p, RUN_FAILED, "%s", text);
    }
    return 0;
}

void quality_cache_close(struct quality_cache *q)
{
    for (uint32_t i = 0; q->layer && i < q->layers; i++)
        quality_layer_close(&q->layer[i]);
    free(q->layer);
    free(q->queries);
    *q = (struct quality_cache){0};
}

void quality_cache_clear(struct quality_cache *q)
{
    for (uint32_t i = 0; i < q->layers; i++)
        quality_layer_clear(&q->layer[i]);
    q->base.tokens = 0;
}

// ---- What model.c calls ----

// struct cache is the first member.
static struct quality_cache *mine(struct cache *k)
{
    return (struct quality_cache *)k;
}

// Units become packed at the first step that finds them behind the recent window.
int cache_begin(struct cache *k, const uint32_t *ids, uint32_t tokens, struct problem *p)
{
    (void)ids;
    struct quality_cache *q = mine(k);
    if (k->tokens + tokens > q->room)
        return problem_set(p, RUN_FAILED, "the cache has room for %llu tokens",
                           (unsigned long long)q->room);
    for (uint32_t i = 0; i < q->layers; i++)
        quality_layer_settle(&q->layer[i], q->layer[i].m.f.recent_tokens);
    k->step_tokens = tokens;
    return 0;
}

int cache_attend(struct cache *k, uint32_t layer, struct problem *p)
{
    (void)p;
    struct quality_cache *q = mine(k);
    struct quality_layer *l = &q->layer[layer];
    const struct engine *e = k->engine;
    quality_layer_append(l, e->k, e->v, k->step_tokens);
    quality_layer_attend(l, e->q, k->step_tokens, e->out);
    size_t row = (size_t)l->shape.q_heads * kvq_row_dim(&l->shape);
    if (q->queries)
        memcpy(q->queries + (layer * q->room + k->tokens) * row, e->q,
               k->step_tokens * row * sizeof(float));
    return 0;
}

int cache_end(struct cache *k, struct problem *p)
{
    (void)p;
    k->tokens += k->step_tokens;
    return 0;
}

// A step that failed ends the measurement; nothing has to be put back.
void engine_layer(struct engine *e, uint32_t layer)
{
    (void)e; // one place serves all layers
    (void)layer;
}

void cache_abort(struct cache *k)
{
    (void)k;
}
