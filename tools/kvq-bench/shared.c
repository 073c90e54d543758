// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench shared: a batch of sessions over one shared cache, as when several samples are drawn
// from one prompt, beside the same number of sessions with a cache each.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/cache.h"

struct run {
    const struct bench_options *o;
    struct bench_output *out;
    const struct kvq_kernels *k;
    struct kvq_pool *pool;
    unsigned threads;
    uint32_t sessions;
};

// One batch. The sessions' queries and outputs are those of the first layers; session i reads the
// cache of layer `first` or, if apart, of layer first + i.
static int attend(const struct run *r, const struct bench_cache *c, uint32_t first, bool apart,
                  enum kvq_path path, uint32_t from, uint32_t n)
{
    struct kvq_attend call[KVQ_TILE_ROWS];
    const struct kvq_attend *batch[KVQ_TILE_ROWS];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t layer = (first + (apart ? from + i : 0)) % c->layers;
        call[i] = c->attends[from + i];
        call[i].pages = c->attends[layer].pages;
        call[i].extras = c->attends[layer].extras;
        call[i].book = c->attends[layer].book;
        call[i].path = (uint8_t)path;
        batch[i] = &call[i];
    }
    return kvq_pool_attend(r->pool, r->k, batch, n);
}

// Seconds a batch, over as many batches as there are layers.
static double walk(const struct run *r, const struct bench_cache *c, bool apart, enum kvq_path path)
{
    double start = bench_seconds();
    for (uint32_t i = 0; i < c->layers; i++)
        if (attend(r, c, apart ? i * r->sessions : i, apart, path, 0, r->sessions))
            return NAN;
    return (bench_seconds() - start) / c->layers;
}

// Whether a batch over a shared cache gives the bits of each session alone.
static bool same_bits(const struct run *r, const struct bench_cache *c, enum kvq_path path)
{
    size_t bytes = sizeof(float) * r->sessions * c->shape.q_heads * kvq_row_dim(&c->shape);
    void *batch = malloc(bytes);
    bool ok = batch && attend(r, c, 0, false, path, 0, r->sessions) == 0;
    if (ok)
        memcpy(batch, c->out, bytes);
    for (uint32_t i = 0; ok && i < r->sessions; i++)
        ok = attend(r, c, 0, false, path, i, 1) == 0;
    ok = ok && memcmp(batch, c->out, bytes) == 0;
    free(batch);
    return ok;
}

static bool bench_row(const struct run *r, const struct bench_cache *c, enum kvq_path path)
{
    double shared[BENCH_MAX_REPS], apart[BENCH_MAX_REPS];
    const char *name = path == KVQ_PATH_FAST ? "fast" : "exact";
    bool same = same_bits(r, c, path);
    walk(r, c, true, path);
    for (uint32_t i = 0; i < r->o->reps; i++) {
        apart[i] = walk(r, c, true, path);
        shared[i] = walk(r, c, false, path);
    }
    double a = bench_median(apart, r->o->reps), s = bench_median(shared, r->o->reps);
    bench_note(r->out, "%-12s %-5s %7u %8llu %8u %10.1f %10.1f %6.2f  %s", c->format->name, name,
               r->threads, (unsigned long long)c->tokens, r->sessions, a * 1e6, s * 1e6, a / s,
               same ? "same bits" : "OTHER BITS");
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "format", c->format->name);
    cJSON_AddStringToObject(row, "path", name);
    cJSON_AddNumberToObject(row, "threads", r->threads);
    cJSON_AddNumberToObject(row, "tokens", (double)c->tokens);
    cJSON_AddNumberToObject(row, "sessions", r->sessions);
    cJSON_AddNumberToObject(row, "apart_us", a * 1e6);
    cJSON_AddNumberToObject(row, "shared_us", s * 1e6);
    cJSON_AddNumberToObject(row, "ratio", a / s);
    cJSON_AddBoolToObject(row, "same_bits", same);
    cJSON_AddItemToArray(r->out->rows, row);
    return same && isfinite(a) && isfinite(s);
}

static bool bench_format(const struct run *r, const struct kvq_format *f, uint64_t tokens)
{
    struct bench_options o = *r->o;
    struct bench_cache c;
    o.layers = r->sessions;
    if (!bench_cache_make(&c, &o, f, tokens))
        return false;
    bool ok = true;
    if (r->o->exact || kvq_is_raw(f))
        ok = bench_row(r, &c, KVQ_PATH_EXACT);
    if (ok && r->o->fast && kvq_kernels_has_fast(r->k, f, &c.shape))
        ok = bench_row(r, &c, KVQ_PATH_FAST);
    bench_cache_free(&c);
    return ok;
}

static bool bench_threads(struct run *r)
{
    bool ok = true;
    for (uint32_t s = 0; s < r->o->sessions.n; s++)
        for (uint32_t t = 0; t < r->o->tokens.n; t++)
            for (uint32_t f = 0; f < r->o->n_formats; f++) {
                r->sessions = (uint32_t)r->o->sessions.value[s];
                if (r->sessions > KVQ_TILE_ROWS) {
                    fprintf(stderr, "kvq-bench: --sessions %u: at most %d\n", r->sessions,
                            KVQ_TILE_ROWS);
                    return false;
                }
                ok &= bench_format(r, r->o->format[f], r->o->tokens.value[t]);
            }
    return ok;
}

int bench_shared(const struct bench_options *o)
{
    struct bench_output out;
    struct run r = {.o = o, .out = &out, .k = kvq_kernels_get(o->isa)};
    bool ok = true;
    bench_output_open(&out, o->json);
    bench_note(&out,
               "%u query heads, %u KV heads, head_dim %u; median of %u walks by turns, us a "
               "batch",
               o->q_heads, o->kv_heads, o->head_dim, o->reps);
    bench_note(&out, "%-12s %-5s %7s %8s %8s %10s %10s %6s", "format", "path", "threads", "tokens",
               "sessions", "apart", "shared", "ratio");
    for (uint32_t i = 0; i < o->threads.n; i++) {
        r.threads = (unsigned)o->threads.value[i];
        int error = kvq_pool_open(&r.pool, r.threads, true);
        if (error)
            fprintf(stderr, "kvq-bench: %u threads cannot be started (error %d)\n", r.threads,
                    -error);
        ok = ok && error == 0 && bench_threads(&r);
        kvq_pool_close(&r.pool);
    }
    bench_output_close(&out);
    return ok ? 0 : 1;
}
