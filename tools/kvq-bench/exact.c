// SPDX-License-Identifier: Apache-2.0
//
// What attention over a cache should give, in double precision.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvq-bench/cache.h"

static bool is_outlier(const struct bench_exact *e, uint64_t t)
{
    const struct kvq_outliers *all = bench_outliers_of(e->c, e->layer, e->head);
    for (uint32_t i = 0; all && i < all->published; i++)
        if (all->position[i] == t)
            return true;
    return false;
}

// The row of token t in one of the two arrays of rows.
static const float *row_of(const struct bench_exact *e, const float *const *rows, uint64_t t)
{
    uint32_t page = (uint32_t)(t / KVQ_BLOCK_TOKENS), dim = e->c->shape.k_dim;
    size_t at = (size_t)bench_source_of(e->layer, page) * KVQ_BLOCK_TOKENS + t % KVQ_BLOCK_TOKENS;
    bool packed =
        bench_page_packed(e->c, page) && t >= e->c->format->sink_tokens && !is_outlier(e, t);
    return rows[packed] + at * dim;
}

// One query head; `logits` is for all tokens.
static void attend_head(const struct bench_exact *e, const float *q, double *logits, double *sums)
{
    uint32_t dim = kvq_row_dim(&e->c->shape);
    double max = -INFINITY, sum = 0;
    for (uint64_t t = 0; t < e->c->tokens; t++) {
        const float *k = row_of(e, e->k, t);
        double dot = 0;
        for (uint32_t i = 0; i < dim; i++)
            dot += (double)q[i] * (double)k[i];
        logits[t] = dot * (double)e->c->shape.scale;
        max = fmax(max, logits[t]);
    }
    memset(sums, 0, dim * sizeof *sums);
    for (uint64_t t = 0; t < e->c->tokens; t++) {
        const float *v = row_of(e, e->v, t);
        double p = exp(logits[t] - max);
        sum += p;
        for (uint32_t i = 0; i < dim; i++)
            sums[i] += p * (double)v[i];
    }
    for (uint32_t i = 0; i < dim; i++)
        sums[i] /= sum;
}

double bench_exact_error(const struct bench_exact *e)
{
    const struct kvq_shape *s = &e->c->shape;
    uint32_t dim = kvq_row_dim(s);
    uint32_t group = s->q_heads / s->kv_heads, first = e->head * group;
    double error = 0, size = 0, *logits = malloc((e->c->tokens + dim) * sizeof *logits);
    if (!logits)
        return NAN;
    double *sums = logits + e->c->tokens;
    for (uint32_t h = first; h < first + group; h++) {
        attend_head(e, e->q + (size_t)h * dim, logits, sums);
        for (uint32_t i = 0; i < dim; i++) {
            double want = sums[i], got = (double)e->out[(size_t)h * dim + i];
            error += (got - want) * (got - want);
            size += want * want;
        }
    }
    free(logits);
    return sqrt(error / size);
}

double bench_cache_error(const struct bench_cache *c)
{
    struct bench_memory m;
    size_t n = (size_t)BENCH_SOURCES * KVQ_BLOCK_TOKENS * c->shape.k_dim;
    if (!bench_memory_take(&m, kvq_workspace_bytes() + 4 * n * sizeof(float)))
        return NAN;
    float *k = (float *)(void *)((char *)m.data + kvq_workspace_bytes()), *v = k + 2 * n;
    for (uint32_t packed = 0; packed < (kvq_is_raw(c->format) ? 1u : 2u); packed++)
        bench_cache_rows(c, 0, packed, k + packed * n, v + packed * n, m.data);
    double error = bench_exact_error(&(struct bench_exact){
        .c = c, .k = {k, k + n}, .v = {v, v + n}, .q = c->queries, .out = c->out});
    bench_memory_give(&m);
    return error;
}
