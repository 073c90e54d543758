// SPDX-License-Identifier: Apache-2.0
//
// kvq-bench attend: attention of one query token, or of a piece of a prompt, layer after layer.
#include <math.h>
#include <stdio.h>

#include "tools/kvq-bench/attend.h"

// A share of the floor above this means that the floor or the time is wrong.
static const double MAX_SHARE = 1.05;

double attend_walk(const struct attend_run *r, struct bench_cache *c, enum kvq_path path)
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
static void time_both(const struct attend_run *r, struct bench_cache *c, enum kvq_path path,
                      double *time, double *baseline)
{
    double a[BENCH_MAX_REPS], b[BENCH_MAX_REPS];
    attend_walk(r, c, path);
    attend_walk(r, r->baseline, KVQ_PATH_EXACT);
    for (uint32_t i = 0; i < r->o->reps; i++) {
        b[i] = attend_walk(r, r->baseline, KVQ_PATH_EXACT);
        a[i] = attend_walk(r, c, path);
    }
    *time = bench_median(a, r->o->reps);
    *baseline = bench_median(b, r->o->reps);
}

static double bytes_per_token_head(const struct bench_cache *c)
{
    struct kvq_layout l = kvq_layout_of(c->format, &c->shape);
    return (double)l.record_bytes / KVQ_BLOCK_TOKENS;
}

// ---- Rows ----

static void add_against(const struct attend_run *r, const struct attend_against *a, cJSON *row)
{
    if (!r->peer) {
        cJSON_AddNullToObject(row, "vs_peer");
        cJSON_AddStringToObject(row, "peer", PEER_NONE);
        return;
    }
    cJSON_AddNumberToObject(row, "vs_peer", a->times[0]);
    cJSON_AddStringToObject(row, "peer", r->peer->version);
    cJSON *all = cJSON_AddObjectToObject(row, "vs_peers");
    for (int i = 0; i < PEERS; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s %s", peer_kinds[i].name, peer_kinds[i].layout_name);
        cJSON_AddNumberToObject(all, name, a->times[i]);
    }
}

static void add_json(const struct attend_run *r, const struct attend_row *x, double gb_per_s,
                     double share)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "format", x->format);
    cJSON_AddStringToObject(row, "isa", x->isa);
    cJSON_AddStringToObject(row, "path", x->path);
    cJSON_AddNumberToObject(row, "threads", r->threads);
    cJSON_AddNumberToObject(row, "tokens", (double)r->baseline->tokens);
    cJSON_AddNumberToObject(row, "queries", r->o->queries);
    cJSON_AddNumberToObject(row, "q_heads", r->o->q_heads);
    cJSON_AddNumberToObject(row, "kv_heads", r->o->kv_heads);
    cJSON_AddNumberToObject(row, "head_dim", r->o->head_dim);
    cJSON_AddNumberToObject(row, "us", x->us);
    cJSON_AddNumberToObject(row, "f16_us", x->f16_us);
    cJSON_AddNumberToObject(row, "gb_per_s", gb_per_s);
    cJSON_AddNumberToObject(row, "floor_gb_per_s", r->floor * 1e-9);
    cJSON_AddNumberToObject(row, "floor_share", share);
    cJSON_AddNumberToObject(row, "vs_f16", x->f16_us / x->us);
    if (x->against)
        add_against(r, x->against, row);
    cJSON_AddNumberToObject(row, "bytes_per_token_head", x->bytes_per_token_head);
    cJSON_AddNumberToObject(row, "bits_per_value", x->bits);
    cJSON_AddNumberToObject(row, "rel_err", x->error);
    cJSON_AddNumberToObject(row, "outliers", x->outliers);
    cJSON_AddNumberToObject(row, "layers", x->layers);
    cJSON_AddNumberToObject(row, "huge_pages", r->huge);
    cJSON_AddItemToArray(r->out->rows, row);
}

static void check_row(struct attend_run *r, const struct attend_row *x, double share)
{
    if (!isfinite(x->us) || !isfinite(x->error)) {
        fprintf(stderr, "kvq-bench: %s %s: no %s\n", x->format, x->path,
                x->against ? "memory" : "time, because of the errors above");
        r->failed = true;
    } else if (share > MAX_SHARE) {
        fprintf(stderr,
                "kvq-bench: %s %s reads %.0f%% of the floor, which cannot be: other work took the "
                "memory while the floor was measured; run it again on a quiet machine\n",
                x->format, x->path, 100 * share);
        r->failed = true;
    }
}

void attend_print(struct attend_run *r, const struct attend_row *x)
{
    double speed = (double)x->layer_bytes / (x->us * 1e-6), share = speed / r->floor;
    char peer[16] = "-";
    if (x->against && r->peer)
        snprintf(peer, sizeof peer, "%.2f", x->against->times[0]);
    else if (x->against)
        snprintf(peer, sizeof peer, "no peer");
    bench_note(r->out, "%-10s %-6s %-6s %7u %8llu %9.1f %7.2f %5.0f%% %7.2f %7s %10.1f %5.2f %8.1e",
               x->format, x->isa, x->path, r->threads, (unsigned long long)r->baseline->tokens,
               x->us, speed * 1e-9, 100 * share, x->f16_us / x->us, peer, x->bytes_per_token_head,
               x->bits, x->error);
    add_json(r, x, speed * 1e-9, share);
    check_row(r, x, share);
}

static void bench_row(struct attend_run *r, struct bench_cache *c, enum kvq_path path)
{
    double time, baseline;
    time_both(r, c, path, &time, &baseline);
    double error = bench_cache_error(c);
    const struct kvq_outliers *outliers = bench_outliers_of(c, 0, 0);
    attend_print(r, &(struct attend_row){.format = c->format->name,
                                         .isa = kvq_kernels_isa(r->k),
                                         .path = path == KVQ_PATH_FAST ? "fast" : "exact",
                                         .against = attend_peers_time(r, c, path),
                                         .us = time * 1e6,
                                         .f16_us = baseline * 1e6,
                                         .error = error,
                                         .bytes_per_token_head = bytes_per_token_head(c),
                                         .bits = kvq_bits_per_value(c->format, &c->shape),
                                         .layer_bytes = c->layer_bytes,
                                         .layers = c->layers,
                                         .outliers = outliers ? outliers->published : 0});
}

static void bench_format(struct attend_run *r, const struct kvq_format *f, uint64_t tokens)
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

static void bench_tokens(struct attend_run *r, uint64_t tokens)
{
    struct bench_cache baseline;
    if (!bench_cache_make(&baseline, r->o, kvq_format_by_name("f16"), tokens)) {
        r->failed = true;
        return;
    }
    r->baseline = &baseline;
    r->huge = bench_huge_share();
    attend_peers_open(r);
    for (uint32_t i = 0; i < r->o->n_formats; i++)
        bench_format(r, r->o->format[i], tokens);
    attend_peers_close(r);
    bench_cache_free(&baseline);
}

static void bench_threads(struct attend_run *r, unsigned threads)
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

static void bench_all(struct attend_run *r)
{
    const struct bench_options *o = r->o;
    bench_note(r->out, "%u query heads, %u KV heads, head_dim %u; median of %u walks, f16 by turns",
               o->q_heads, o->kv_heads, o->head_dim, o->reps);
    if (o->queries > 1)
        bench_note(r->out, "%u query tokens, which see all tokens of the cache", o->queries);
    if (r->peer)
        bench_note(r->out, "peer: %s", r->peer->version);
    bench_note(r->out, "%-10s %-6s %-6s %7s %8s %9s %7s %6s %7s %7s %10s %5s %8s", "format", "isa",
               "path", "threads", "tokens", "us", "GB/s", "floor", "vs f16", "vs peer",
               "B/tok/head", "bits", "error");
    for (uint32_t i = 0; i < o->threads.n; i++)
        bench_threads(r, (unsigned)o->threads.value[i]);
    bench_note(r->out, "%.0f%% of the memory was in huge pages", 100 * r->huge);
    if (!r->peer)
        bench_note(r->out, PEER_NONE);
}

int bench_attend(const struct bench_options *o)
{
    struct bench_output out;
    struct peer peer;
    struct attend_run r = {.o = o, .out = &out, .k = kvq_kernels_get(o->isa)};
    if (o->peer && !peer_open(&peer, o->peer))
        return 1;
    r.peer = o->peer ? &peer : NULL;
    bench_output_open(&out, o->json);
    bench_all(&r);
    bench_output_close(&out);
    if (r.peer)
        peer_close(&peer);
    return r.failed ? 1 : 0;
}
