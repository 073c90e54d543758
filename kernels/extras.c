// SPDX-License-Identifier: Apache-2.0
//
// What a session's layer holds besides blocks: sink tokens, outliers, learned channel factors; and
// the transforms that packing, attention and reading share.
#include <assert.h>

#include "kernels/internal.h"

// ---- Layout ----

static uint32_t pool_room(const struct kvq_format *f)
{
    return f->outliers ? (uint32_t)f->outliers + f->extra_outliers : 0;
}

static uint32_t aligned(uint32_t bytes)
{
    return (bytes + KVQ_RECORD_ALIGN - 1) / KVQ_RECORD_ALIGN * KVQ_RECORD_ALIGN;
}

struct kvq_extras_layout kvq__extras_layout(const struct kvq_format *f, const struct kvq_shape *s)
{
    struct kvq_extras_layout l = {0};
    uint32_t row = 2u * s->k_dim, room = pool_room(f);
    l.pool = f->k_channel == KVQ_CHANNEL_PROMPT ? row : 0;
    l.pool_k = l.pool + (room ? aligned(sizeof(struct kvq_outliers)) : 0);
    l.pool_v = l.pool_k + room * row;
    l.sink_k = l.pool_v + room * row;
    l.sink_v = l.sink_k + f->sink_tokens * row;
    l.record_bytes = l.sink_v + f->sink_tokens * row;
    return l;
}

size_t kvq_extras_bytes(const struct kvq_format *f, const struct kvq_shape *s)
{
    return kvq_is_raw(f) ? 0 : (size_t)kvq__extras_layout(f, s).record_bytes * s->kv_heads;
}

bool kvq_extras_are_sinks(const struct kvq_format *f)
{
    return !kvq_is_raw(f) && f->sink_tokens && !f->outliers && f->k_channel != KVQ_CHANNEL_PROMPT;
}

struct kvq__extras kvq__extras_of(const struct kvq_format *f, const struct kvq_shape *s,
                                  const uint8_t *extras, const uint8_t *pool, uint32_t head)
{
    struct kvq__extras e = {0};
    struct kvq_extras_layout l = kvq__extras_layout(f, s);
    if (!extras || kvq_is_raw(f))
        return e;
    uint8_t *record = (uint8_t *)extras + (size_t)head * l.record_bytes;
    if (f->k_channel == KVQ_CHANNEL_PROMPT)
        e.factors = (uint16_t *)(void *)(record + l.factors);
    if (f->outliers) {
        e.pool = (struct kvq_outliers *)(void *)(record + l.pool);
        e.pool_k = (uint16_t *)(void *)(record + l.pool_k);
        e.pool_v = (uint16_t *)(void *)(record + l.pool_v);
        e.pool_count = pool ? pool[head] : e.pool->count;
    }
    if (f->sink_tokens) {
        e.sink_k = (uint16_t *)(void *)(record + l.sink_k);
        e.sink_v = (uint16_t *)(void *)(record + l.sink_v);
    }
    return e;
}

void kvq_extras_init(const struct kvq_format *f, const struct kvq_shape *s, uint8_t *extras)
{
    memset(extras, 0, kvq_extras_bytes(f, s));
    for (uint32_t h = 0; h < s->kv_heads; h++) {
        struct kvq__extras e = kvq__extras_of(f, s, extras, NULL, h);
        if (e.pool)
            e.pool->frozen_at = UINT64_MAX;
    }
}

void kvq_outliers_publish(const struct kvq_format *f, const struct kvq_shape *s, uint8_t *extras)
{
    for (uint32_t h = 0; h < s->kv_heads && f->outliers; h++) {
        struct kvq_outliers *pool = kvq__extras_of(f, s, extras, NULL, h).pool;
        pool->published = pool->count;
    }
}

uint32_t kvq_outliers_published(const struct kvq_format *f, const struct kvq_shape *s,
                                const uint8_t *extras, uint32_t head)
{
    const struct kvq_outliers *pool = kvq__extras_of(f, s, extras, NULL, head).pool;
    return pool ? pool->published : 0;
}

int kvq_extras_check(const struct kvq_format *f, const struct kvq_shape *s, const uint8_t *extras)
{
    bool good = true;
    for (uint32_t h = 0; h < s->kv_heads && f->outliers && !kvq_is_raw(f); h++) {
        const struct kvq_outliers *pool = kvq__extras_of(f, s, extras, NULL, h).pool;
        good &= pool->count <= pool_room(f) && pool->published <= pool->count;
    }
    return good ? 0 : -1;
}

// Leaves out the entries at positions from `at` on.
static void forget(const struct kvq__extras *e, uint32_t dim, uint64_t at)
{
    struct kvq_outliers *p = e->pool;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->position[i] >= at)
            continue;
        if (kept == i) {
            kept++;
            continue;
        }
        p->position[kept] = p->position[i];
        p->score[kept] = p->score[i];
        memmove(e->pool_k + (size_t)kept * dim, e->pool_k + (size_t)i * dim, 2 * dim);
        memmove(e->pool_v + (size_t)kept * dim, e->pool_v + (size_t)i * dim, 2 * dim);
        kept++;
    }
    p->count = kept;
    p->published = p->published < kept ? p->published : kept;
    if (p->frozen_at >= at)
        p->frozen_at = UINT64_MAX;
}

void kvq_extras_fork(const struct kvq_format *f, const struct kvq_shape *s, const uint8_t *from,
                     uint8_t *to, uint64_t at)
{
    memmove(to, from, kvq_extras_bytes(f, s));
    for (uint32_t h = 0; h < s->kv_heads; h++) {
        struct kvq__extras e = kvq__extras_of(f, s, to, NULL, h);
        if (e.pool) {
            forget(&e, s->k_dim, at);
            e.pool->published = e.pool->count;
        }
    }
}

void kvq_sinks_copy(const struct kvq_format *f, const struct kvq_shape *s, const uint8_t *from,
                    uint8_t *to, uint32_t tokens)
{
    size_t bytes = (size_t)tokens * 2 * s->k_dim;
    assert(kvq_extras_are_sinks(f) && tokens <= f->sink_tokens);
    for (uint32_t h = 0; h < s->kv_heads; h++) {
        struct kvq__extras a = kvq__extras_of(f, s, from, NULL, h);
        struct kvq__extras b = kvq__extras_of(f, s, to, NULL, h);
        memcpy(b.sink_k, a.sink_k, bytes);
        memcpy(b.sink_v, a.sink_v, bytes);
    }
}

// ---- Transforms ----

void kvq__rotate(const struct kvq_kernels *k, enum kvq_rotation rotation, float *rows, uint32_t n,
                 uint32_t dim, bool back)
{
    if (rotation == KVQ_ROTATE_NONE)
        return;
    const uint32_t *before = back ? kvq_signs_after : kvq_signs_before;
    const uint32_t *after = back ? kvq_signs_before : kvq_signs_after;
    bool changes = rotation == KVQ_ROTATE_SIGNED;
    k->hadamard(rows, n, dim, changes ? before : NULL, changes ? after : NULL);
}

enum kvq_rotation kvq__v_rotation(const struct kvq_format *f, const struct kvq_shape *s)
{
    if (kvq_is_raw(f))
        return KVQ_ROTATE_NONE;
    if (f->v_rotation != KVQ_ROTATE_NONE)
        return f->v_rotation;
    return s->v_rotation == KVQ_V_ROT_DAEMON ? KVQ_ROTATE_HADAMARD : KVQ_ROTATE_NONE;
}

bool kvq__factors(const struct kvq_kernels *k, const struct kvq_format *f,
                  const struct kvq__extras *e, const struct kvq_book *book, uint32_t head,
                  uint32_t dim, float *factors)
{
    if (f->k_channel == KVQ_CHANNEL_PROMPT && e->factors) { // before anything is learned: none
        k->load(e->factors, KVQ_F16, factors, dim);
        return true;
    }
    if (f->k_channel == KVQ_CHANNEL_BOOK && book && book->smooth) {
        memcpy(factors, book->smooth + (size_t)head * dim, dim * sizeof *factors);
        return true;
    }
    return false;
}

// ---- Outliers (OTT, sections 3 and 4) ----

// The tokens that compete best, in ascending order.
struct ranking {
    uint32_t count, room;
    uint64_t position[KVQ_POOL_ENTRIES];
    float score[KVQ_POOL_ENTRIES];
};

static void rank(struct ranking *r, float score, uint64_t position)
{
    uint32_t i = r->count < r->room ? r->count++ : r->room;
    for (; i > 0 && kvq__wins(score, position, r->score[i - 1], r->position[i - 1]); i--)
        if (i < r->room) {
            r->score[i] = r->score[i - 1];
            r->position[i] = r->position[i - 1];
        }
    if (i < r->room) {
        r->score[i] = score;
        r->position[i] = position;
    }
}

static void add_entry(const struct kvq__extras *e, uint32_t dim, float score, uint64_t position,
                      const uint16_t *k, const uint16_t *v)
{
    struct kvq_outliers *p = e->pool;
    p->position[p->count] = position;
    p->score[p->count] = score;
    memcpy(e->pool_k + (size_t)p->count * dim, k, 2 * dim);
    memcpy(e->pool_v + (size_t)p->count * dim, v, 2 * dim);
    p->count++;
}

void kvq__compete(const struct kvq_format *f, const struct kvq__extras *e, uint32_t dim,
                  const struct kvq_unit *unit, const float *scores,
                  const struct kvq_raw_layout *raw)
{
    struct kvq_outliers *p = e->pool;
    struct ranking best = {.room = f->outliers};
    uint64_t start = unit->block_start + unit->first;
    uint32_t entering = 0;
    if (p->frozen_at < start || start < unit->learned)
        return;
    forget(e, dim, start); // left by a try on a GPU that failed, or of a foreign file
    p->frozen_at = UINT64_MAX;
    for (uint32_t i = 0; i < p->count; i++)
        rank(&best, p->score[i], p->position[i]);
    for (uint32_t t = 0; t < f->unit_tokens; t++) // no sink tokens: those are learned from
        rank(&best, scores[t], start + t);
    for (uint32_t i = 0; i < best.count; i++)
        entering += best.position[i] >= start;
    if (p->count + entering > pool_room(f)) {
        p->frozen_at = start;
        return;
    }
    for (uint32_t i = 0; i < best.count; i++) {
        if (best.position[i] < start)
            continue;
        uint32_t t = (uint32_t)(best.position[i] - unit->block_start);
        const uint8_t *k = unit->raw_block + kvq_raw_at(raw, unit->head, t, false);
        const uint8_t *v = unit->raw_block + kvq_raw_at(raw, unit->head, t, true);
        add_entry(e, dim, best.score[i], best.position[i], (const uint16_t *)(const void *)k,
                  (const uint16_t *)(const void *)v);
    }
}

// ---- Learning ----

struct lesson {
    const struct kvq_kernels *k;
    const struct kvq_shape *s;
    const struct kvq_page *pages;
    struct kvq_raw_layout raw;
    uint32_t head, tokens, sink;
    float *row;
};

// K (or V) of one token as handed over.
static const uint16_t *raw_row(const struct lesson *l, uint32_t token, bool v)
{
    const uint8_t *block = l->pages[token / KVQ_BLOCK_TOKENS].raw;
    block += kvq_raw_at(&l->raw, l->head, token % KVQ_BLOCK_TOKENS, v);
    return (const uint16_t *)(const void *)block;
}

// From max |K_c| over the tokens behind the sink.
static void learn_factors(const struct lesson *l, uint16_t *factors)
{
    float top[KVQ_MAX_HEAD_DIM] = {0};
    uint32_t dim = l->s->k_dim;
    for (uint32_t t = l->sink; t < l->tokens; t++) {
        l->k->load(raw_row(l, t, false), l->s->dtype, l->row, dim);
        for (uint32_t c = 0; c < dim; c++)
            top[c] = fabsf(l->row[c]) > top[c] ? fabsf(l->row[c]) : top[c];
    }
    for (uint32_t c = 0; c < dim; c++)
        factors[c] = kvq__factor(top[c]);
}

static void learn_outliers(const struct lesson *l, const struct kvq_format *f,
                           const struct kvq__extras *e)
{
    struct ranking best = {.room = f->outliers};
    uint32_t dim = l->s->k_dim;
    float sum;
    for (uint32_t t = l->sink; t < l->tokens; t++) {
        l->k->load(raw_row(l, t, false), l->s->dtype, l->row, dim);
        l->k->sum_abs(l->row, 1, dim, &sum);
        rank(&best, kvq__score(sum), t);
    }
    e->pool->count = 0; // a try on a GPU that failed may have left some
    for (uint32_t i = 0; i < best.count; i++) {
        uint32_t t = (uint32_t)best.position[i];
        add_entry(e, dim, best.score[i], t, raw_row(l, t, false), raw_row(l, t, true));
    }
}

void kvq_learn(const struct kvq_kernels *k, const struct kvq_format *f, const struct kvq_shape *s,
               const struct kvq_page *pages, uint32_t learn_tokens, uint32_t head, uint8_t *extras,
               void *workspace)
{
    struct kvq__workspace *w = workspace;
    struct kvq__extras e = kvq__extras_of(f, s, extras, NULL, head);
    struct lesson l = {.k = k,
                       .s = s,
                       .pages = pages,
                       .raw = kvq_raw_layout_of(s),
                       .head = head,
                       .tokens = learn_tokens,
                       .sink = f->sink_tokens,
                       .row = w->group_f32};
    if (e.factors)
        learn_factors(&l, e.factors);
    if (e.pool)
        learn_outliers(&l, f, &e);
}
