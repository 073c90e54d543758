// SPDX-License-Identifier: Apache-2.0
//
// logits: the likeliest tokens after a prompt, with their logits.
#include <stdio.h>
#include <stdlib.h>

#include <cjson/cJSON.h>

#include "tools/kvq-run/commands.h"
#include "tools/kvq-run/model.h"
#include "tools/kvq-run/prompt.h"

static const float *order_by;

static int by_logit(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    if (order_by[x] != order_by[y])
        return order_by[x] < order_by[y] ? 1 : -1;
    return x < y ? -1 : 1;
}

static int print(const struct options *o, const float *logits, uint32_t vocab, struct problem *p)
{
    uint32_t *order = malloc(vocab * sizeof *order);
    if (!order)
        return problem_set(p, RUN_FAILED, "out of memory");
    for (uint32_t i = 0; i < vocab; i++)
        order[i] = i;
    order_by = logits;
    qsort(order, vocab, sizeof *order, by_logit);
    uint32_t n = o->top < vocab ? o->top : vocab;
    printf(o->json ? "{\"top\": [" : "");
    for (uint32_t i = 0; i < n; i++)
        printf(o->json ? "%s{\"id\": %u, \"logit\": %.9g}" : "%s%6u %12.6f\n",
               o->json && i ? ", " : "", order[i], (double)logits[order[i]]);
    printf(o->json ? "]}\n" : "");
    free(order);
    return 0;
}

int run_logits(const struct options *o, struct problem *p)
{
    struct model model;
    struct engine engine = {0};
    struct cache cache = {0};
    struct ids ids = {0};
    float *logits = NULL;
    struct cache_options co = {
        .format = o->format,
        .attention = o->attention,
    };
    int rc = -1;
    if (model_open(&model, o->model, CACHE_STEP_TOKENS, p))
        goto out;
    co.v_rotation = options_fold(o, model.config.head_dim) ? KVQ_V_ROTATION_ENGINE : o->v_rotation;
    if (ids_from_options(o, &model.config, &ids, p) ||
        engine_open(&engine, &model.config, o->runtime_dir, o->in_context, CACHE_STEP_TOKENS, p) ||
        cache_open(&cache, &engine, &model.config, &co, p) ||
        (cache.rotated && model_fold(&model, p)))
        goto out;
    logits = malloc(model.config.vocab * sizeof *logits);
    if (!logits) {
        problem_set(p, RUN_FAILED, "out of memory");
        goto out;
    }
    for (uint64_t at = 0; at < ids.count; at += CACHE_STEP_TOKENS) {
        uint64_t rest = ids.count - at;
        uint32_t n = rest < CACHE_STEP_TOKENS ? (uint32_t)rest : CACHE_STEP_TOKENS;
        if (model_step(&model, &cache, ids.list + at, n, at + n == ids.count, logits, p))
            goto out;
    }
    rc = print(o, logits, model.config.vocab, p);
out:
    free(logits);
    if (engine.client)
        cache_close(&cache);
    engine_close(&engine);
    ids_free(&ids);
    model_close(&model);
    return rc;
}
