// SPDX-License-Identifier: Apache-2.0
//
// What a session's layer learns before it packs, and the competition of its tokens for being kept
// raw: a block of threads for each KV head. What is computed is that of kernels/extras.c; how the
// best are found is not: a candidate's rank is the number of those that win against it.
#include "kernels/cuda/rows.h"

enum {
    KVQ_GPU_CANDIDATES = KVQ_POOL_ENTRIES + KVQ_BLOCK_TOKENS,
    // In shared memory: candidates (score, position low, position high), then the numbers of the
    // best ones.
    KVQ_GPU_CANDIDATE = 12,
    KVQ_GPU_BEST = KVQ_GPU_CANDIDATES * KVQ_GPU_CANDIDATE,
};

// One KV head's extras.
struct kvq_gpu_extras {
    uint16_t *factors;
    kvq_outliers *pool;
    uint16_t *pool_k, *pool_v;
};

KVQ_DEVICE kvq_gpu_extras kvq_gpu_extras_of(const kvq_recipe &r, uint8_t *extras, uint32_t head)
{
    uint8_t *record = extras + (size_t)head * r.extras.record_bytes;
    const kvq_gpu_extras e = {
        (uint16_t *)(record + r.extras.factors), (kvq_outliers *)(record + r.extras.pool),
        (uint16_t *)(record + r.extras.pool_k), (uint16_t *)(record + r.extras.pool_v)};
    return e;
}

// ---- Candidates ----

struct kvq_gpu_candidate {
    float score;
    uint64_t position;
};

KVQ_DEVICE gpu::smem kvq_gpu_candidate_at(uint32_t i)
{
    return gpu::smem_start() + i * KVQ_GPU_CANDIDATE;
}

KVQ_DEVICE kvq_gpu_candidate kvq_gpu_candidate_of(uint32_t i)
{
    const gpu::smem at = kvq_gpu_candidate_at(i);
    const kvq_gpu_candidate c = {kvq_gpu_get(at), gpu::lds32(at + 4) | (uint64_t)gpu::lds32(at + 8)
                                                                           << 32};
    return c;
}

KVQ_DEVICE void kvq_gpu_put_candidate(uint32_t i, float score, uint64_t position)
{
    const gpu::smem at = kvq_gpu_candidate_at(i);
    kvq_gpu_put(at, score);
    gpu::sts32(at + 4, (uint32_t)position);
    gpu::sts32(at + 8, (uint32_t)(position >> 32));
}

KVQ_DEVICE uint32_t kvq_gpu_best(uint32_t rank)
{
    return gpu::lds32(gpu::smem_start() + KVQ_GPU_BEST + 4 * rank);
}

// Puts the numbers of the best `room` of n candidates where kvq_gpu_best finds them, in order.
// Between syncs. Returns how many there are.
KVQ_DEVICE uint32_t kvq_gpu_select(uint32_t n, uint32_t room)
{
    const uint32_t rounds = (n + KVQ_GPU_CACHE_THREADS - 1) / KVQ_GPU_CACHE_THREADS;
    for (uint32_t round = 0; round < rounds; round++) {
        const uint32_t i = round * KVQ_GPU_CACHE_THREADS + gpu::thread();
        const kvq_gpu_candidate own = kvq_gpu_candidate_of(i < n ? i : 0);
        uint32_t rank = 0;
        for (uint32_t k = 0; k < n; k++) {
            const kvq_gpu_candidate other = kvq_gpu_candidate_of(k);
            rank += kvq__wins(other.score, other.position, own.score, own.position);
        }
        if (i < n && rank < room)
            gpu::sts32(gpu::smem_start() + KVQ_GPU_BEST + 4 * rank, i);
    }
    gpu::block_sync();
    return n < room ? n : room;
}

// ---- Scores ----

// A raw number as packing sees it (limit), or as it is.
KVQ_DEVICE float kvq_gpu_number(uint16_t raw, uint8_t dtype, bool limit)
{
    return limit ? kvq__packable(raw, dtype) : kvq__from_raw(raw, dtype);
}

// |K|_1 of a row, for a team.
KVQ_DEVICE float kvq_gpu_score_of(const uint16_t *row, uint32_t dim, uint8_t dtype, bool limit)
{
    float sum = 0.0f;
    for (uint32_t c = kvq_gpu_team_lane(); c < dim; c += KVQ_GPU_TEAM)
        sum += fabsf(kvq_gpu_number(gpu::ldg16(row + c), dtype, limit));
    return kvq__score(kvq_gpu_team_sum(sum));
}

// Tokens of a raw block.
struct kvq_gpu_tokens {
    const uint8_t *block;
    uint32_t head, first, n; // multiples of 32: first, n
};

// Candidates [at, at + n) are the tokens, of which the first is at `position`.
KVQ_DEVICE void kvq_gpu_put_tokens(const kvq_recipe &r, const kvq_gpu_tokens &tokens,
                                   uint64_t position, uint32_t at, bool limit)
{
    const uint32_t n = tokens.n;
    for (uint32_t from = 0; from < n; from += KVQ_GROUP_TOKENS) {
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t t = from + kvq_gpu_team_token(i);
            const uint16_t *row =
                kvq_gpu_raw_rows(r, tokens.block, tokens.head, tokens.first + t, false);
            const float score = kvq_gpu_score_of(row, r.dim, r.dtype, limit);
            if (kvq_gpu_team_lane() == 0)
                kvq_gpu_put_candidate(at + t, score, position + t);
        }
    }
}

// ---- The pool ----

KVQ_DEVICE void kvq_gpu_copy_row(uint16_t *to, const uint16_t *from, uint32_t dim)
{
    for (uint32_t c = gpu::thread(); c < dim; c += KVQ_GPU_CACHE_THREADS)
        gpu::stg16(to + c, gpu::ldg16(from + c));
}

// k, v: the token's rows. The caller counts it.
KVQ_DEVICE void kvq_gpu_add_entry(const kvq_gpu_extras &e, uint32_t dim, uint32_t entry,
                                  kvq_gpu_candidate c, const uint16_t *k, const uint16_t *v)
{
    kvq_gpu_copy_row(e.pool_k + entry * dim, k, dim);
    kvq_gpu_copy_row(e.pool_v + entry * dim, v, dim);
    if (gpu::thread() == 0) {
        e.pool->position[entry] = c.position;
        e.pool->score[entry] = c.score;
    }
}

// ---- Learning ----

struct kvq_gpu_pupil {
    const kvq_recipe &r;
    const kvq_gpu_lesson &lesson;
    uint32_t head;
    kvq_gpu_extras extras;
};

KVQ_DEVICE const uint16_t *kvq_gpu_lesson_row(const kvq_gpu_pupil &p, uint64_t token, bool v)
{
    const uint8_t *block = p.lesson.pages[token / KVQ_BLOCK_TOKENS].raw;
    return kvq_gpu_raw_rows(p.r, block, p.head, token % KVQ_BLOCK_TOKENS, v);
}

KVQ_DEVICE void kvq_gpu_learn_factors(const kvq_gpu_pupil &p)
{
    for (uint32_t c = gpu::thread(); c < p.r.dim; c += KVQ_GPU_CACHE_THREADS) {
        float top = 0.0f;
        for (uint32_t t = p.r.sink_tokens; t < p.lesson.tokens; t++) {
            const uint16_t raw = gpu::ldg16(kvq_gpu_lesson_row(p, t, false) + c);
            const float x = fabsf(kvq_gpu_number(raw, p.r.dtype, false));
            top = x > top ? x : top;
        }
        gpu::stg16(p.extras.factors + c, kvq__factor(top));
    }
}

// The best of all tokens so far compete with those of the next page.
KVQ_DEVICE uint32_t kvq_gpu_rank_lesson(const kvq_gpu_pupil &p)
{
    const uint32_t tokens = p.lesson.tokens;
    uint32_t best = 0;
    for (uint32_t t = p.r.sink_tokens, n; t < tokens; t += n) {
        const uint32_t left = KVQ_BLOCK_TOKENS - t % KVQ_BLOCK_TOKENS;
        n = tokens - t < left ? tokens - t : left;
        const kvq_gpu_tokens own_tokens = {p.lesson.pages[t / KVQ_BLOCK_TOKENS].raw, p.head,
                                           t % KVQ_BLOCK_TOKENS, n};
        kvq_gpu_put_tokens(p.r, own_tokens, t, best, false);
        gpu::block_sync();
        best = kvq_gpu_select(best + n, p.r.outliers);
        // The best become the first candidates of the next round.
        const bool mine = (uint32_t)gpu::thread() < best;
        const kvq_gpu_candidate own = kvq_gpu_candidate_of(kvq_gpu_best(mine ? gpu::thread() : 0));
        gpu::block_sync();
        if (mine)
            kvq_gpu_put_candidate(gpu::thread(), own.score, own.position);
        gpu::block_sync();
    }
    return best;
}

KVQ_DEVICE void kvq_gpu_learn_outliers(const kvq_gpu_pupil &p)
{
    const uint32_t best = kvq_gpu_rank_lesson(p);
    for (uint32_t i = 0; i < best; i++) {
        const kvq_gpu_candidate c = kvq_gpu_candidate_of(i);
        kvq_gpu_add_entry(p.extras, p.r.dim, i, c, kvq_gpu_lesson_row(p, c.position, false),
                          kvq_gpu_lesson_row(p, c.position, true));
    }
    gpu::block_sync();
    if (gpu::thread() == 0)
        p.extras.pool->count = best; // instead of what an earlier try left
}

KVQ_KERNEL(kvq_gpu_learn_all, kvq_gpu_learn_args, a)
{
    const kvq_gpu_lesson &lesson = a.lessons[gpu::block_x()];
    const uint32_t head = gpu::block_y();
    if (!lesson.recipe || head >= lesson.recipe->kv_heads || !KVQ_GPU_GOES(lesson))
        return;
    const kvq_recipe &r = *lesson.recipe;
    const kvq_gpu_pupil p = {r, lesson, head, kvq_gpu_extras_of(r, lesson.extras, head)};
    if (r.k_channel == KVQ_CHANNEL_PROMPT)
        kvq_gpu_learn_factors(p);
    if (r.outliers)
        kvq_gpu_learn_outliers(p);
}

// ---- Competing ----

// How many entries of the pool are of tokens before `start`: those behind them are what an earlier
// try left, behind which the driver refused the launch that makes codes.
KVQ_DEVICE uint32_t kvq_gpu_count_before(const kvq_gpu_extras &e, uint64_t start)
{
    uint32_t count = e.pool->count;
    while (count > 0 && e.pool->position[count - 1] >= start)
        count--;
    return count;
}

// Candidates: the first `count` of the pool, then the unit's tokens. Returns how many there are.
KVQ_DEVICE uint32_t kvq_gpu_gather(const kvq_gpu_unit &u, const kvq_gpu_extras &e, uint32_t head,
                                   uint32_t count)
{
    const kvq_recipe &r = *u.recipe;
    const kvq_gpu_tokens tokens = {u.raw_block, head, u.first, r.unit_tokens};
    for (uint32_t i = gpu::thread(); i < count; i += KVQ_GPU_CACHE_THREADS)
        kvq_gpu_put_candidate(i, e.pool->score[i], e.pool->position[i]);
    kvq_gpu_put_tokens(r, tokens, u.block_start + u.first, count, true);
    gpu::block_sync();
    return count + r.unit_tokens;
}

KVQ_DEVICE void kvq_gpu_compete_unit(const kvq_gpu_unit &u, uint32_t head)
{
    const kvq_recipe &r = *u.recipe;
    const kvq_gpu_extras e = kvq_gpu_extras_of(r, u.extras, head);
    const uint64_t start = u.block_start + u.first;
    if (e.pool->frozen_at < start || start < u.learned)
        return;
    const uint32_t count = kvq_gpu_count_before(e, start);
    const uint32_t best = kvq_gpu_select(kvq_gpu_gather(u, e, head, count), r.outliers);
    uint32_t entering = 0;
    for (uint32_t i = 0; i < best; i++)
        entering += kvq_gpu_best(i) >= count;
    const bool frozen = count + entering > r.pool_room;
    uint32_t entry = count;
    for (uint32_t i = 0; i < best && !frozen; i++) {
        const uint32_t number = kvq_gpu_best(i);
        if (number < count)
            continue;
        const kvq_gpu_candidate c = kvq_gpu_candidate_of(number);
        const uint32_t t = (uint32_t)(c.position - u.block_start);
        kvq_gpu_add_entry(e, r.dim, entry++, c, kvq_gpu_raw_rows(r, u.raw_block, head, t, false),
                          kvq_gpu_raw_rows(r, u.raw_block, head, t, true));
    }
    gpu::block_sync();
    if (gpu::thread() == 0) {
        e.pool->count = entry;
        e.pool->frozen_at = frozen ? start : UINT64_MAX;
    }
    gpu::block_sync();
}

KVQ_KERNEL(kvq_gpu_compete, kvq_gpu_compete_args, a)
{
    const uint32_t head = gpu::block_y();
    for (uint32_t i = a.runs[gpu::block_x()]; i < a.runs[gpu::block_x() + 1]; i++) {
        const kvq_gpu_unit &u = a.units[i];
        if (u.recipe && head < u.recipe->kv_heads && u.recipe->outliers && KVQ_GPU_GOES(u))
            kvq_gpu_compete_unit(u, head);
    }
}
