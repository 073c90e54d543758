// SPDX-License-Identifier: Apache-2.0
//
// Sessions of a batch whose pages start with the same blocks: forks, samples of one prompt. What
// they share is unpacked once for the query rows of all of them.
#include "kernels/attend.h"

static bool same_book(const struct kvq_book *a, const struct kvq_book *b)
{
    return a == b || (a && b && memcmp(a, b, sizeof *a) == 0);
}

// Whether it pays: for what is read as it is, for codebooks, and for byte products. The exact loops
// over scalar codes unpack for every four rows anyway.
static bool gains(const struct kvq_attend *a)
{
    struct kvq__codec c = kvq__codec_of(a->format, a->shape, a->book, 0);
    if (kvq_is_raw(a->format) || c.k.kind == KVQ__BOOK || c.v.kind == KVQ__BOOK)
        return true;
    return a->path == KVQ_PATH_FAST && kvq__fits_bytes(&c);
}

// Whether rows of both may stand in one item, if the blocks are the same.
static bool may_share(const struct kvq_attend_job *x, const struct kvq_attend_job *y)
{
    const struct kvq_attend *a = &x->call, *b = &y->call;
    return a->format == b->format && a->path == b->path && a->q_tokens == b->q_tokens &&
           x->plan.split_tokens == y->plan.split_tokens && !x->plan.tall &&
           kvq_extras_shared(a->format, a->extras, b->extras) &&
           kvq_shape_same(a->shape, b->shape) && same_book(a->book, b->book);
}

static bool same_page(const struct kvq_page *a, const struct kvq_page *b)
{
    return a->packed == b->packed && a->raw == b->raw && a->tokens == b->tokens &&
           a->packed_tokens == b->packed_tokens && a->tokens == KVQ_BLOCK_TOKENS;
}

// Splits whose keys lie in blocks of both sessions, from the first on.
static uint32_t common_splits(const struct kvq_attend_job *x, const struct kvq_attend_job *y)
{
    const struct kvq_attend *a = &x->call, *b = &y->call;
    uint32_t n = a->n_pages < b->n_pages ? a->n_pages : b->n_pages, i = 0;
    while (i < n && same_page(&a->pages[i], &b->pages[i]))
        i++;
    uint64_t tokens = (uint64_t)i * KVQ_BLOCK_TOKENS;
    if (a->fresh_tokens && a->fresh_start < tokens)
        tokens = a->fresh_start;
    if (b->fresh_tokens && b->fresh_start < tokens)
        tokens = b->fresh_start;
    return tokens >= x->plan.split_tokens && may_share(x, y)
               ? (uint32_t)(tokens / x->plan.split_tokens)
               : 0;
}

static void make_member(struct kvq_attend_job *job, uint32_t splits)
{
    job->plan.parallel = true;
    job->plan.first_split = splits;
    kvq__count_items(&job->call, &job->plan);
}

// All splits may be shared ones: then a session has no items of its own, but its merges.
static void join(struct kvq_attend_job **members, uint32_t n, uint32_t splits)
{
    const struct kvq_attend *a = &members[0]->call;
    struct kvq_attend_plan *p = &members[0]->plan;
    for (uint32_t i = 0; i < n; i++)
        make_member(members[i], splits);
    uint32_t rows = kvq__tile_rows(a, p), fit = KVQ_TILE_ROWS / rows, tiles = n * p->n_tiles;
    p->members = members;
    p->n_members = n;
    p->stack_tiles = tiles < fit ? tiles : fit;
    p->stacks = (tiles + p->stack_tiles - 1) / p->stack_tiles;
    p->shared_heads = fit / p->stack_tiles;
    if (p->shared_heads > p->heads)
        p->shared_heads = p->heads;
    uint32_t groups = (a->shape->kv_heads + p->shared_heads - 1) / p->shared_heads;
    p->shared_items = groups * p->stacks * splits;
    p->items += p->shared_items;
}

// How many splits to share with the first job: those that save most of the work, given what each
// of the others has in common with it (for now in first_split).
static uint32_t choose_splits(struct kvq_attend_job *const *jobs, uint32_t n)
{
    uint32_t best = 0;
    uint64_t most = 0;
    for (uint32_t i = 1; i < n; i++) {
        uint32_t splits = jobs[i]->plan.first_split, others = 0;
        if (splits == 0 || splits == best)
            continue;
        for (uint32_t j = 1; j < n; j++)
            others += jobs[j]->plan.first_split >= splits;
        if ((uint64_t)others * splits > most) {
            most = (uint64_t)others * splits;
            best = splits;
        }
    }
    return best;
}

// Moves those that share with the first job to its side. Returns how many there are with it.
static uint32_t gather(struct kvq_attend_job **jobs, uint32_t n)
{
    uint32_t members = 1;
    if (!gains(&jobs[0]->call))
        return members;
    for (uint32_t i = 1; i < n; i++)
        jobs[i]->plan.first_split = common_splits(jobs[0], jobs[i]);
    uint32_t splits = choose_splits(jobs, n);
    for (uint32_t i = 1; i < n; i++) {
        struct kvq_attend_job *job = jobs[i];
        if (splits > 0 && job->plan.first_split >= splits) {
            jobs[i] = jobs[members];
            jobs[members++] = job;
        }
        job->plan.first_split = 0;
    }
    if (members > 1)
        join(jobs, members, splits);
    return members;
}

bool kvq_attend_share(struct kvq_attend_job **jobs, uint32_t n)
{
    uint32_t at = 0, groups = 0;
    for (; at < n; groups++)
        at += gather(jobs + at, n - at);
    return groups < n;
}
