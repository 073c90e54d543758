// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench attend: decode attention, one query token, layer after layer.
#include <math.h>
#include <stdio.h>

#include "tools/kvq-bench/cache.h"

// A share of the floor above this means that the floor or the time is wrong.
static const double MAX_SHARE = 1.05;

// What one row of the table is about.
struct run {
    const struct bench_options *o;
    struct bench_output *out;
    const struct kvq_kernels *k;
    struct kvq_pool *pool;
    unsigned threads;
    double floor; // bytes a second
    double huge;  // share of the memory in huge pages
    struct bench_cache *baseline;
    bool failed;
};

// Seconds a layer, over all layers of the cache.
static double walk(const struct run *r, struct bench_cache *c, enum kvq_path path)
{
    for (uint32_t i = 0; i < c->layers; i++)
        c->attends[i].path = (uint8_t)path;
    double start = bench_seconds();
    for (uint32_t i = 0; i < c->layers; i++) {
        const struct kvq_attend *a = &c->attends[i];
        if (kvq_pool_attend(r->pool, r->k, &a, 1))
            return NAN;
    }
    return (bench_seconds() - start) / c->layers;
}

// Times both caches by turns; the medians are comparable even where the machine is not quiet.
static void time_both(const struct run *r, struct bench_cache *c, enum kvq_path path, double *time,
                      double *baseline)
{
    double a[BENCH_MAX_REPS], b[BENCH_MAX_REPS];
    walk(r, c, path);
    walk(r, r->baseline, KVQ_PATH_EXACT);
    for (uint32_t i = 0; i < r->o->reps; i++) {
        b[i] = walk(r, r->baseline, KVQ_PATH_EXACT);
        a[i] = walk(r, c, path);
    }
    *time = bench_median(a, r->o->reps);
    *baseline = bench_median(b, r->o->reps);
}

static double bytes_per_token_head(const struct bench_cache *c)
{
    struct kvq_layout l = kvq_layout_of(c->format, &c->shape);
    return (double)l.record_bytes / KVQ_BLOCK_TOKENS;
}

struct result {
    double us, f16_us, gb_per_s, share, error;
};

static void add_json(const struct run *r, const struct bench_cache *c, const char *path,
                     const struct result *x)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "format", c->format->name);
    cJSON_AddStringToObject(row, "isa", kvq_kernels_isa(r->k));
    cJSON_AddStringToObject(row, "path", path);
    cJSON_AddNumberToObject(row, "threads", r->threads);
    cJSON_AddNumberToObject(row, "tokens", (double)c->tokens);
    cJSON_AddNumberToObject(row, "q_heads", c->shape.q_heads);
    cJSON_AddNumberToObject(row, "kv_heads", c->shape.kv_heads);
    cJSON_AddNumberToObject(row, "head_dim", c->shape.k_dim);
    cJSON_AddNumberToObject(row, "us", x->us);
    cJSON_AddNumberToObject(row, "f16_us", x->f16_us);
    cJSON_AddNumberToObject(row, "gb_per_s", x->gb_per_s);
    cJSON_AddNumberToObject(row, "floor_gb_per_s", r->floor * 1e-9);
    cJSON_AddNumberToObject(row, "floor_share", x->share);
    cJSON_AddNumberToObject(row, "vs_f16", x->f16_us / x->us);
    cJSON_AddNumberToObject(row, "bytes_per_token_head", bytes_per_token_head(c));
    cJSON_AddNumberToObject(row, "bits_per_value", kvq_bits_per_value(c->format, &c->shape));
    cJSON_AddNumberToObject(row, "rel_err", x->error);
    cJSON_AddNumberToObject(row, "layers", c->layers);
    cJSON_AddNumberToObject(row, "huge_pages", r->huge);
    cJSON_AddItemToArray(r->out->rows, row);
}

static void bench_row(struct run *r, struct bench_cache *c, enum kvq_path path)
{
    const char *name = path == KVQ_PATH_FAST ? "fast" : "exact";
    double time, baseline;
    time_both(r, c, path, &time, &baseline);
    struct result x = {.us = time * 1e6,
                       .f16_us = baseline * 1e6,
                       .gb_per_s = (double)c->layer_bytes / time * 1e-9,
                       .share = (double)c->layer_bytes / time / r->floor,
                       .error = bench_cache_error(c)};
    bench_note(r->out, "%-10s %-6s %-5s %7u %8llu %9.1f %7.2f %5.0f%% %7.2f %10.1f %5.2f %8.1e",
               c->format->name, kvq_kernels_isa(r->k), name, r->threads,
               (unsigned long long)c->tokens, x.us, x.gb_per_s, 100 * x.share, x.f16_us / x.us,
               bytes_per_token_head(c), kvq_bits_per_value(c->format, &c->shape), x.error);
    add_json(r, c, name, &x);
    if (!isfinite(time) || !isfinite(x.error)) {
        fprintf(stderr, "kvq-bench: %s %s: no memory\n", c->format->name, name);
        r->failed = true;
    } else if (x.share > MAX_SHARE) {
        fprintf(stderr,
                "kvq-bench: %s %s reads %.0f%% of the floor, which cannot be: other work took the "
                "memory while the floor was measured; run it again on a quiet machine\n",
                c->format->name, name, 100 * x.share);
        r->failed = true;
    }
}

static void bench_format(struct run *r, const struct kvq_format *f, uint64_t tokens)
{
    struct bench_cache own, *c = r->baseline;
    bool same = f == r->baseline->format;
    if (!same) {
        if (!bench_cache_make(&own, r->o, f, tokens)) {
            r->failed = true;
            return;
        }
        c = &own;
    }
    bool has_fast = kvq_kernels_has_fast(r->k, f, &c->shape);
    if (r->o->exact || (kvq_is_raw(f) && r->o->fast))
        bench_row(r, c, KVQ_PATH_EXACT);
    if (r->o->fast && has_fast)
        bench_row(r, c, KVQ_PATH_FAST);
    if (r->o->fast && !has_fast && !kvq_is_raw(f))
        bench_note(r->out, "%-10s %-6s has no fast path", f->name, kvq_kernels_isa(r->k));
    if (!same)
        bench_cache_free(&own);
}

static void bench_tokens(struct run *r, uint64_t tokens)
{
    struct bench_cache baseline;
    if (!bench_cache_make(&baseline, r->o, kvq_format_by_name("f16"), tokens)) {
        r->failed = true;
        return;
    }
    r->baseline = &baseline;
    r->huge = bench_huge_share();
    for (uint32_t i = 0; i < r->o->n_formats; i++)
        bench_format(r, r->o->format[i], tokens);
    bench_cache_free(&baseline);
}

static void bench_threads(struct run *r, unsigned threads)
{
    int error = kvq_pool_open(&r->pool, threads, true);
    if (error) {
        fprintf(stderr, "kvq-bench: %u threads cannot be started (error %d)\n", threads, -error);
        r->failed = true;
        return;
    }
    r->threads = threads;
    r->floor = bench_floor(r->pool);
    if (r->floor > 0) {
        bench_note(r->out, "floor with %u threads: %.2f GB/s (best of 5 reads of 1 GiB)", threads,
                   r->floor * 1e-9);
        for (uint32_t i = 0; i < r->o->tokens.n; i++)
            bench_tokens(r, r->o->tokens.value[i]);
    }
    r->failed |= r->floor <= 0;
    kvq_pool_close(&r->pool);
}

int bench_attend(const struct bench_options *o)
{
    struct bench_output out;
    struct run r = {.o = o, .out = &out, .k = kvq_kernels_get(o->isa)};
    bench_output_open(&out, o->json);
    bench_note(&out, "%u query heads, %u KV heads, head_dim %u; median of %u walks, f16 by turns",
               o->q_heads, o->kv_heads, o->head_dim, o->reps);
    bench_note(&out, "%-10s %-6s %-5s %7s %8s %9s %7s %6s %7s %10s %5s %8s", "format", "isa",
               "path", "threads", "tokens", "us", "GB/s", "floor", "vs f16", "B/tok/head", "bits",
               "error");
    for (uint32_t i = 0; i < o->threads.n; i++)
        bench_threads(&r, (unsigned)o->threads.value[i]);
    bench_note(&out, "%.0f%% of the memory was in huge pages", 100 * r.huge);
    bench_output_close(&out);
    return r.failed ? 1 : 0;
}
