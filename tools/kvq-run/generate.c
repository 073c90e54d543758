// SPDX-License-Identifier: Apache-2.0
//
// generate: prefill with progress, then one token a step, streamed as it comes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "tools/kvq-run/commands.h"
#include "tools/kvq-run/model.h"
#include "tools/kvq-run/prompt.h"
#include "tools/kvq-run/sample.h"

struct generation {
    const struct options *o;
    struct model model;
    struct engine engine;
    struct cache cache;
    kvq_capture *capture;
    struct sampler sampler;
    struct ids prompt;
    float *logits;
    uint32_t *produced;
    uint32_t n;
    double open_seconds; // of the session, which may be read from disk, or its beginning
    double prefill_seconds, decode_seconds;
    uint64_t restored; // tokens the session already had
};

static void progress(const struct generation *g, uint64_t done)
{
    if (!g->o->quiet && isatty(STDERR_FILENO))
        fprintf(stderr, "\rprefill: %llu of %llu tokens%s", (unsigned long long)done,
                (unsigned long long)g->prompt.count, done == g->prompt.count ? "\n" : "");
}

static int prefill(struct generation *g, struct problem *p)
{
    double start = run_seconds();
    for (uint64_t at = g->cache.prefix; at < g->prompt.count;) {
        uint64_t rest = g->prompt.count - at;
        uint32_t n = rest < g->model.step_tokens ? (uint32_t)rest : g->model.step_tokens;
        if (model_step(&g->model, &g->cache, g->prompt.list + at, n, at + n == g->prompt.count,
                       g->logits, p))
            return -1;
        at += n;
        progress(g, at);
        if (atomic_load(&run_interrupted))
            return problem_set(p, RUN_FAILED, "interrupted during prefill");
    }
    g->prefill_seconds = run_seconds() - start;
    return 0;
}

static void show(const struct generation *g, uint32_t id)
{
    if (g->o->json)
        return;
    if (!g->model.config.bytes)
        printf("%s%u", g->n ? "," : "", id);
    else if (id < 256)
        putchar((int)id);
    fflush(stdout);
}

static int decode(struct generation *g, struct problem *p)
{
    double start = run_seconds();
    while (g->n < g->o->tokens && !atomic_load(&run_interrupted)) {
        uint32_t id = sampler_next(&g->sampler, g->logits);
        show(g, id);
        g->produced[g->n++] = id;
        if (model_step(&g->model, &g->cache, &id, 1, 1, g->logits, p))
            return -1;
    }
    g->decode_seconds = run_seconds() - start;
    return 0;
}

static double rate(uint64_t n, double seconds)
{
    return seconds > 0 ? (double)n / seconds : 0;
}

static uint64_t prefilled(const struct generation *g)
{
    return g->prompt.count - g->cache.prefix;
}

static void report_json(const struct generation *g, const struct kvq_session_info *info)
{
    cJSON *j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "format", info->format);
    cJSON_AddStringToObject(j, "attention", info->attention);
    cJSON_AddNumberToObject(j, "bits_per_value", info->bits_per_value);
    cJSON_AddNumberToObject(j, "tokens_in_cache", (double)info->tokens);
    cJSON_AddNumberToObject(j, "tokens_found", (double)g->restored);
    cJSON_AddNumberToObject(j, "bytes_per_token_head", info->bytes_per_token_head);
    cJSON_AddNumberToObject(j, "bytes_per_token_head_total", info->bytes_per_token_head_total);
    cJSON_AddNumberToObject(j, "prompt_tokens", (double)g->prompt.count);
    cJSON_AddNumberToObject(j, "prefix_tokens", (double)g->cache.prefix);
    cJSON_AddNumberToObject(j, "open_seconds", g->open_seconds);
    cJSON_AddNumberToObject(j, "prefill_seconds", g->prefill_seconds);
    cJSON_AddNumberToObject(j, "prefill_tokens_per_s", rate(prefilled(g), g->prefill_seconds));
    cJSON_AddNumberToObject(j, "generated_tokens", g->n);
    cJSON_AddNumberToObject(j, "tokens_per_s", rate(g->n, g->decode_seconds));
    cJSON *ids = cJSON_AddArrayToObject(j, "ids");
    for (uint32_t i = 0; i < g->n; i++)
        cJSON_AddItemToArray(ids, cJSON_CreateNumber(g->produced[i]));
    char *text = cJSON_Print(j);
    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(j);
}

static int report(struct generation *g, struct problem *p)
{
    struct kvq_session_info info = {.size = sizeof info};
    if (cache_info(&g->cache, &info, p))
        return -1;
    if (g->o->json) {
        report_json(g, &info);
        return 0;
    }
    putchar('\n');
    fflush(stdout);
    if (!g->o->quiet && g->o->prefix)
        fprintf(stderr,
                "%llu of %llu prompt tokens were there, in %.3f s; the others took %.2f s\n",
                (unsigned long long)g->cache.prefix, (unsigned long long)g->prompt.count,
                g->open_seconds, g->prefill_seconds);
    if (!g->o->quiet)
        fprintf(stderr,
                "%llu prompt tokens, %.0f tokens/s; %u generated, %.1f tokens/s; %s (%.2f bits "
                "per value), %.0f bytes per token and KV head with windows\n",
                (unsigned long long)g->prompt.count, rate(prefilled(g), g->prefill_seconds), g->n,
                rate(g->n, g->decode_seconds), info.format, info.bits_per_value,
                info.bytes_per_token_head_total);
    return 0;
}

static int open_all(struct generation *g, struct problem *p)
{
    const struct options *o = g->o;
    struct cache_options co = {
        .format = o->format,
        .session = o->session,
        .ns = o->ns,
        .model = g->model.fingerprint,
        .attention = o->attention,
        .may_unfold = !o->v_rotation,
        .keep = o->keep,
    };
    if (model_open(&g->model, o->model, CACHE_STEP_TOKENS, p))
        return -1;
    co.model = g->model.fingerprint;
    co.v_rotation =
        options_fold(o, g->model.config.head_dim) ? KVQ_V_ROTATION_ENGINE : o->v_rotation;
    const struct capture_options captured = {o->capture, co.model, o->capture_tokens};
    if (capture_open(&captured, &g->model.config, &g->capture, p))
        return -1;
    co.capture = g->capture;
    if (ids_from_options(o, &g->model.config, &g->prompt, p) ||
        engine_open(&g->engine, &g->model.config, o->runtime_dir, o->in_context, CACHE_STEP_TOKENS,
                    p))
        return -1;
    kvq_queue_wait_for_room(g->engine.queue, o->wait_room * 1000000000u);
    co.prompt_tokens = g->prompt.count;
    if (o->prefix) {
        co.prompt = g->prompt.list;
        co.prompt_ids = g->prompt.count;
    }
    double start = run_seconds();
    if (cache_open(&g->cache, &g->engine, &g->model.config, &co, p))
        return -1;
    g->open_seconds = run_seconds() - start;
    if (g->cache.rotated && model_fold(&g->model, p))
        return -1;
    if (sampler_open(&g->sampler, g->model.config.vocab, o->temperature, o->top_p, o->seed, p))
        return -1;
    g->restored = g->cache.tokens - g->cache.prefix;
    if (g->restored && ids_go_on(&g->prompt, p))
        return -1;
    g->logits = malloc(g->model.config.vocab * sizeof *g->logits);
    g->produced = malloc(((size_t)o->tokens + 1) * sizeof *g->produced);
    if (!g->logits || !g->produced)
        return problem_set(p, RUN_FAILED, "out of memory");
    return 0;
}

int run_generate(const struct options *o, struct problem *p)
{
    struct generation g = {.o = o};
    int rc = -1;
    if (open_all(&g, p) || prefill(&g, p) || decode(&g, p))
        goto out;
    rc = report(&g, p);
out:
    if (capture_close(&g.capture, p))
        rc = -1;
    free(g.produced);
    free(g.logits);
    sampler_close(&g.sampler);
    if (g.engine.client)
        cache_close(&g.cache);
    engine_close(&g.engine);
    ids_free(&g.prompt);
    model_close(&g.model);
    return rc;
}
