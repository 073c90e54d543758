// SPDX-License-Identifier: Apache-2.0
//
// What a session's layer holds besides blocks: learned channel factors, outliers that compete, sink
// tokens, what a fork keeps of them; and for every format the same bytes whatever the pieces were
// that the tokens came in.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/kernels.h"
#include "tests/kernels/kvtest.h"

static const struct kvq_kernels *kernels;

// ---- A session that grows ----

struct session {
    const struct kvq_format *f;
    struct kvq_shape s;
    struct kvq_raw_layout raw;
    struct kvq_layout packed;
    uint32_t tokens, done, learn; // stored, packed; how many it learns from
    bool learned, secret;         // secret: publishes no outliers
    uint8_t *raws, *blocks, *extras;
    struct kvq_page *pages;
    const struct kvq_book *book;
    void *workspace;
};

static struct session open_session(const char *format, uint32_t heads, uint32_t dim, uint8_t dtype,
                                   uint32_t room, uint32_t prompt)
{
    struct session x = {.f = kvt_format(format), .s = kvt_shape(1, heads, dim, dtype)};
    if (x.f->raw_dtype)
        x.s.dtype = x.f->raw_dtype;
    size_t n = (room + 127) / 128, extras = kvq_extras_bytes(x.f, &x.s);
    x.raw = kvq_raw_layout_of(&x.s);
    x.packed = kvq_layout_of(x.f, &x.s);
    x.learn = kvq_learn_tokens(x.f, prompt);
    x.book = kvt_book(x.f, &x.s);
    x.raws = kvt_guarded(n * kvq_raw_bytes(&x.raw, KVQ_BLOCK_TOKENS), 0);
    x.blocks = kvt_guarded(n * kvq_block_bytes(&x.packed, &x.s), 0);
    x.pages = kvt_guarded(n * sizeof *x.pages, 0);
    x.extras = extras ? kvt_guarded(extras, 0) : NULL;
    x.workspace = kvt_workspace();
    memset(x.blocks, 0, n * kvq_block_bytes(&x.packed, &x.s));
    if (extras)
        kvq_extras_init(x.f, &x.s, x.extras);
    for (size_t i = 0; i < n; i++)
        x.pages[i] = (struct kvq_page){.packed = x.blocks + i * kvq_block_bytes(&x.packed, &x.s),
                                       .raw = x.raws + i * kvq_raw_bytes(&x.raw, KVQ_BLOCK_TOKENS)};
    return x;
}

static void close_session(struct session *x)
{
    kvt_guarded_free(x->raws);
    kvt_guarded_free(x->blocks);
    kvt_guarded_free(x->pages);
    kvt_guarded_free(x->extras);
    kvt_guarded_free(x->workspace);
}

static void pack_unit(struct session *x, uint32_t first)
{
    size_t page = first / 128;
    for (uint32_t h = 0; h < x->s.kv_heads; h++) {
        struct kvq_unit unit = {.raw_block = x->pages[page].raw,
                                .packed_block =
                                    x->blocks + page * kvq_block_bytes(&x->packed, &x->s),
                                .head = h,
                                .first = first % 128,
                                .block_start = page * 128,
                                .extras = x->extras,
                                .learned = x->learn,
                                .book = x->book};
        kvq_pack(kernels, x->f, &x->s, &unit, x->workspace);
    }
}

// Packs what can be packed, after it has learned what it learns.
static void advance(struct session *x)
{
    if (x->tokens < x->learn)
        return;
    for (uint32_t h = 0; h < x->s.kv_heads && !x->learned && x->learn; h++)
        kvq_learn(kernels, x->f, &x->s, x->pages, x->learn, h, x->extras, x->workspace);
    x->learned = true;
    for (; x->done + x->f->unit_tokens <= x->tokens; x->done += x->f->unit_tokens)
        pack_unit(x, x->done);
    if (!x->secret && x->extras)
        kvq_outliers_publish(x->f, &x->s, x->extras);
    for (uint32_t t = 0; t < x->tokens; t += 128) {
        x->pages[t / 128].tokens = (uint16_t)(x->tokens - t < 128 ? x->tokens - t : 128);
        x->pages[t / 128].packed_tokens = (uint16_t)(x->done <= t        ? 0
                                                     : x->done - t < 128 ? x->done - t
                                                                         : 128);
    }
}

// Appends n tokens of k and v, [tokens][heads][dim] from the session's first token on.
static void append(struct session *x, const float *k, const float *v, uint32_t n)
{
    size_t token = (size_t)x->s.kv_heads * x->s.k_dim;
    for (uint32_t end = x->tokens + n, some; x->tokens < end; x->tokens += some) {
        uint32_t slot = x->tokens % 128;
        struct kvq_view kv = kvt_view(k + x->tokens * token, x->s.kv_heads, x->s.k_dim);
        struct kvq_view vv = kvt_view(v + x->tokens * token, x->s.kv_heads, x->s.k_dim);
        struct kvq_store_counts counts = {0};
        uint8_t *block = (uint8_t *)x->pages[x->tokens / 128].raw;
        some = end - x->tokens < 128 - slot ? end - x->tokens : 128 - slot;
        for (uint32_t h = 0; h < x->s.kv_heads; h++)
            kvq_store(kernels, &x->s, &kv, &vv, h, slot, some, block, &counts);
    }
    advance(x);
}

// ---- Pieces ----

static void check_pieces(const struct kvq_format *f, uint32_t dim, uint32_t tokens)
{
    static const uint32_t pieces[] = {17, 1, 128, 512};
    struct kvt_rng rng = {.state = kvt_seed()};
    size_t n = (size_t)tokens * 2 * dim;
    float *k = malloc(sizeof(float) * n), *v = malloc(sizeof(float) * n);
    kvt_fill(&rng, KVT_OUTLIERS, k, tokens, 2 * dim);
    kvt_fill(&rng, KVT_OUTLIERS, v, tokens, 2 * dim);
    struct session whole = open_session(f->name, 2, dim, KVQ_F16, tokens, 200);
    append(&whole, k, v, tokens);
    assert_int_equal(whole.done, tokens);
    size_t bytes = (tokens + 127) / 128 * kvq_block_bytes(&whole.packed, &whole.s);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        struct session x = open_session(f->name, 2, dim, KVQ_F16, tokens, 200);
        while (x.tokens < tokens)
            append(&x, k, v, tokens - x.tokens < pieces[i] ? tokens - x.tokens : pieces[i]);
        assert_memory_equal(x.blocks, whole.blocks, bytes);
        if (x.extras)
            assert_memory_equal(x.extras, whole.extras, kvq_extras_bytes(f, &x.s));
        close_session(&x);
    }
    close_session(&whole);
    free(k);
    free(v);
}

static void test_pieces(void **state)
{
    static const char *const composed[] = {"oscar2-g64", "innerq-hybrid-g128", "ott2-s32",
                                           "oscar3+innerq-small", "kivi2-s96-w7"};
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        bool large = f->k.codec == KVQ_CODEC_BOOK && (f->k.bits > 8 || f->v.bits > 8);
        if (!kvt_has_huge_book(f))
            check_pieces(f, 64, large ? 256 : 640);
    }
    for (size_t i = 0; i < sizeof composed / sizeof *composed; i++)
        check_pieces(kvt_format(composed[i]), 128, 640);
}

// ---- Channel factors (InnerQ) ----

// The nearest fp16, the even one of two, by search.
static uint16_t to_f16(double x)
{
    uint16_t best = 0;
    for (uint32_t h = 1; h <= 0x7bff; h++) {
        double d = fabs(kvt_f16((uint16_t)h) - x), least = fabs(kvt_f16(best) - x);
        if (d < least || (d == least && h % 2 == 0))
            best = (uint16_t)h;
    }
    return best;
}

// sqrt(max |K_c|) over the prompt behind its sink tokens: what stands in sink tokens, and what
// comes after the tokens to learn from, counts for nothing. Factors below 1e-6 are 1.
static void check_factors(uint32_t tokens, uint32_t prompt, uint32_t learn)
{
    enum { DIM = 64, HEADS = 2 };
    struct session x = open_session("innerq-base", HEADS, DIM, KVQ_BF16, tokens, prompt);
    size_t n = (size_t)tokens * HEADS * DIM;
    float *k = calloc(n, sizeof *k), *v = calloc(n, sizeof *v);
    struct kvt_rng rng = {.state = kvt_seed()};
    assert_int_equal(x.learn, learn);
    kvt_fill(&rng, KVT_NORMAL, k, tokens, HEADS * DIM);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = i / (HEADS * DIM), c = i % DIM;
        k[i] = t < 32 || t >= learn ? 1e6f : k[i];
        k[i] *= c == 0 ? 0.0f : c == 1 ? 1e-13f : c == 2 ? 2e-5f : 1.0f; // 1e-13: below the floor
        if (t == 32 && c == 3)
            k[i] = -77.0f;
        if (t == learn - 1 && c == 4)
            k[i] = 99.0f;
    }
    append(&x, k, v, tokens);
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t c = 0; c < DIM; c++) {
            size_t record = kvq_extras_bytes(x.f, &x.s) / HEADS;
            double most = 0;
            for (uint32_t t = 32; t < learn; t++) {
                const uint8_t *raw = x.pages[t / 128].raw;
                uint16_t half;
                memcpy(&half, raw + kvq_raw_at(&x.raw, h, t % 128, false) + 2 * c, 2);
                most = fmax(most, fabs(kvt_bf16(half)));
            }
            uint16_t want = to_f16(sqrt(most)), got;
            memcpy(&got, x.extras + h * record + 2 * c, 2);
            want = kvt_f16(want) < 1e-6 ? 0x3c00 : want;
            assert_int_equal(got, want);
        }
    free(k);
    free(v);
    close_session(&x);
}

static void test_factors(void **state)
{
    (void)state;
    check_factors(160, 0, 128);
    check_factors(320, 300, 288);
    check_factors(4256, 9000, 4096);
}

// Factors far below 1 and the largest keys: all that is stored, and so all that is read, is finite.
static void test_small_factors(void **state)
{
    static const char *const names[] = {"innerq-base", "innerq-small", "innerq-hybrid-full",
                                        "innerq-base:rot=signed", "innerq-small:rot=hadamard"};
    enum { N = 256, DIM = 64 };
    float *rows = malloc(4 * N * DIM * sizeof *rows);
    struct kvt_rng rng = {.state = kvt_seed()};
    (void)state;
    assert_non_null(rows);
    for (uint32_t i = 0; i < 2; i++)
        kvt_fill(&rng, KVT_RISING, rows + i * N * DIM, N, DIM);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        float *k = rows + 2 * N * DIM, *v = k + N * DIM;
        struct session x = open_session(names[i], 1, DIM, KVQ_BF16, N, 0);
        append(&x, rows, rows + N * DIM, N);
        assert_true(x.learn == 128 && x.done == N);
        assert_true(kvt_f16(((uint16_t *)(void *)x.extras)[0]) < 1e-5);
        const struct kvq_reading r = {
            .format = x.f, .shape = &x.s, .pages = x.pages, .n_pages = 2, .extras = x.extras};
        assert_int_equal(kvq_read_rows(kernels, &r, 0, N, 0, k, v, x.workspace), N);
        for (uint32_t j = 0; j < N * DIM; j++)
            if (!isfinite(k[j]) || !isfinite(v[j]))
                fail_msg("%s: token %u reads back as %g and %g", names[i], j / DIM, (double)k[j],
                         (double)v[j]);
        close_session(&x);
    }
    free(rows);
}

// ---- Outliers (OTT) ----

// One KV head's pool as it should be.
struct model {
    uint32_t count, first, room; // first: how many compete
    bool frozen;
    uint64_t frozen_at, position[64];
    double score[64];
};

struct candidate {
    double score;
    uint64_t position;
};

static int smaller(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->score != y->score)
        return x->score < y->score ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

// The tokens [from, to) compete with the pool for its first places.
static void compete(struct model *m, const double *scores, uint32_t from, uint32_t to)
{
    struct candidate all[5000];
    uint32_t n = 0, entering = 0;
    if (m->frozen)
        return;
    for (uint32_t i = 0; i < m->count; i++)
        all[n++] = (struct candidate){m->score[i], m->position[i]};
    for (uint32_t t = from; t < to; t++)
        all[n++] = (struct candidate){scores[t], t};
    qsort(all, n, sizeof *all, smaller);
    n = n < m->first ? n : m->first;
    for (uint32_t i = 0; i < n; i++)
        entering += all[i].position >= from;
    if (m->count + entering > m->room) {
        m->frozen = true;
        m->frozen_at = from;
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        if (all[i].position >= from) {
            m->score[m->count] = all[i].score;
            m->position[m->count++] = all[i].position;
        }
}

struct ott {
    uint32_t tokens;
    float *k, *v;   // [tokens][2][64]
    double *scores; // [2][tokens]
};

// Keys of small whole multiples of 1/8, so that every order of adding gives the same score and
// ties are common; smaller with time if `falling`, so that newer tokens displace older ones.
static struct ott ott_keys(uint32_t tokens, bool falling, uint64_t seed)
{
    struct ott o = {.tokens = tokens};
    struct kvt_rng rng = {.state = seed};
    o.k = malloc(sizeof(float) * tokens * 128);
    o.v = malloc(sizeof(float) * tokens * 128);
    o.scores = calloc((size_t)2 * tokens, sizeof(double));
    for (uint32_t i = 0; i < tokens * 128; i++) {
        uint32_t t = i / 128, most = falling ? 2 + 40 * (tokens - t) / tokens : 6;
        if (kvt_below(&rng, 50) == 0)
            most /= 2;
        o.k[i] = ((float)kvt_below(&rng, 2 * most + 1) - (float)most) / 8;
        o.v[i] = (float)kvt_below(&rng, 100) / 8;
        o.scores[(size_t)(i / 64 % 2) * tokens + t] += fabs((double)o.k[i]);
    }
    return o;
}

static void free_ott(struct ott *o)
{
    free(o->k);
    free(o->v);
    free(o->scores);
}

static struct model first_choice(const struct session *x, const double *scores)
{
    struct model m = {.first = x->f->outliers, .room = x->f->outliers + x->f->extra_outliers};
    compete(&m, scores, x->f->sink_tokens, x->learn);
    return m;
}

static const struct kvq_outliers *pool_of(const struct session *x, uint32_t head)
{
    size_t record = kvq_extras_bytes(x->f, &x->s) / x->s.kv_heads;
    return (const struct kvq_outliers *)(const void *)(x->extras + head * record);
}

static void assert_pool(const struct session *x, uint32_t head, const struct model *m)
{
    const struct kvq_outliers *p = pool_of(x, head);
    assert_int_equal(p->count, m->count);
    assert_int_equal(p->count, kvq_outliers_published(x->f, &x->s, x->extras, head));
    assert_true(p->frozen_at == (m->frozen ? m->frozen_at : UINT64_MAX));
    for (uint32_t i = 0; i < m->count; i++) {
        assert_int_equal(p->position[i], m->position[i]);
        assert_true(p->score[i] == (float)m->score[i]);
    }
}

// Sink tokens and outliers come back as they were stored, and nothing else does, without any raw
// block.
static void assert_read_back(struct session *x, const struct ott *o, const struct model *m,
                             uint32_t head)
{
    struct kvq_reading reading = {.format = x->f, .shape = &x->s, .extras = x->extras};
    struct kvq_page *pages = malloc(sizeof *pages * (x->tokens / 128 + 1));
    float k[64], v[64];
    for (uint32_t i = 0; i < x->done / 128; i++) {
        pages[i] = x->pages[i];
        pages[i].raw = NULL;
    }
    reading.pages = pages;
    reading.n_pages = x->done / 128;
    for (uint32_t t = 0; t < x->done / 128 * 128; t++) {
        const float *row = o->k + (size_t)t * 128 + head * 64;
        bool exact = t < x->f->sink_tokens;
        for (uint32_t i = 0; i < m->count; i++)
            exact |= m->position[i] == t;
        assert_int_equal(kvq_read_rows(kernels, &reading, t, 1, head, k, v, x->workspace), 1);
        if (exact) {
            assert_memory_equal(k, row, sizeof k);
            assert_memory_equal(v, o->v + (size_t)t * 128 + head * 64, sizeof v);
        } else {
            assert_true(memcmp(v, o->v + (size_t)t * 128 + head * 64, sizeof v) != 0);
        }
    }
    free(pages);
}

static void check_competition(const char *format, uint32_t tokens, bool falling, uint64_t seed)
{
    struct ott o = ott_keys(tokens, falling, seed);
    struct session x = open_session(format, 2, 64, KVQ_F16, tokens, 300);
    struct model m[2];
    append(&x, o.k, o.v, x.learn);
    for (uint32_t h = 0; h < 2; h++) {
        m[h] = first_choice(&x, o.scores + (size_t)h * tokens);
        assert_pool(&x, h, &m[h]);
    }
    for (uint32_t t = x.learn; t + x.f->unit_tokens <= tokens; t += x.f->unit_tokens) {
        append(&x, o.k, o.v, x.f->unit_tokens);
        for (uint32_t h = 0; h < 2; h++) {
            compete(&m[h], o.scores + (size_t)h * tokens, t, t + x.f->unit_tokens);
            assert_pool(&x, h, &m[h]);
        }
    }
    if (falling && x.f->outliers > 1) // one a unit does not fill the room
        assert_true(m[0].frozen && m[0].count > m[0].room - m[0].first);
    assert_read_back(&x, &o, &m[0], 0);
    assert_read_back(&x, &o, &m[1], 1);
    close_session(&x);
    free_ott(&o);
}

static void test_competition(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 4; i++) {
        check_competition("ott2", 3840, false, kvt_seed() + i);
        check_competition("ott2", 3840, true, kvt_seed() + i);
        check_competition("ott2-oscar", 1024, true, kvt_seed() + i);
        check_competition("ott2-oscar", 1024, false, kvt_seed() + i);
        check_competition("ott2-o1", 1280, i % 2, kvt_seed() + i);
        check_competition("ott2-o7-s64", 3840, true, kvt_seed() + i);
    }
}

// Outliers count for readers once they are published, and not before.
static void test_publishing(void **state)
{
    (void)state;
    struct ott o = ott_keys(640, false, kvt_seed());
    struct session x = open_session("ott2", 2, 64, KVQ_F16, 640, 0);
    x.secret = true;
    append(&x, o.k, o.v, 640);
    for (uint32_t h = 0; h < 2; h++) {
        assert_true(pool_of(&x, h)->count >= 3);
        assert_int_equal(kvq_outliers_published(x.f, &x.s, x.extras, h), 0);
    }
    kvq_outliers_publish(x.f, &x.s, x.extras);
    for (uint32_t h = 0; h < 2; h++)
        assert_int_equal(kvq_outliers_published(x.f, &x.s, x.extras, h), pool_of(&x, h)->count);
    close_session(&x);
    free_ott(&o);
}

// A position of a foreign file, far behind the unit that is packed: it is no row to be read, and is
// gone from the pool.
static void test_foreign_positions(void **state)
{
    (void)state;
    struct ott o = ott_keys(768, true, kvt_seed());
    struct session x = open_session("ott2", 2, 64, KVQ_F16, 768, 0);
    append(&x, o.k, o.v, 640);
    for (uint32_t h = 0; h < 2; h++) {
        struct kvq_outliers *p = (struct kvq_outliers *)pool_of(&x, h);
        p->position[0] = h ? 1u << 20 : 640 + 300;
        p->score[0] = -1;
    }
    assert_int_equal(kvq_extras_check(x.f, &x.s, x.extras), 0);
    append(&x, o.k, o.v, 128);
    for (uint32_t h = 0; h < 2; h++)
        for (uint32_t i = 0; i < pool_of(&x, h)->count; i++)
            assert_true(pool_of(&x, h)->position[i] < 768);
    close_session(&x);
    free_ott(&o);
}

// Outliers do not widen the scales of the others: their slots hold the mean of the rest.
static void test_placeholders(void **state)
{
    (void)state;
    struct ott o = ott_keys(128, false, kvt_seed());
    for (uint32_t c = 0; c < 64; c++)
        o.k[(size_t)77 * 128 + c] = c == 0 ? 0.0f : 1e-3f; // the smallest score of head 0
    for (uint32_t c = 0; c < 64; c++)
        o.v[(size_t)77 * 128 + c] = 1000.0f;
    for (uint32_t t = 0; t < 128; t++)
        o.k[(size_t)t * 128] = t == 77 ? 0.0f : 5.0f + (float)(t % 2); // far from zero elsewhere
    struct session x = open_session("ott2-o1", 2, 64, KVQ_F16, 128, 0);
    append(&x, o.k, o.v, 128);
    assert_int_equal(pool_of(&x, 0)->position[0], 77);
    struct kvt_stored k = kvt_stored(x.f, 64, x.blocks, false, 77, 0);
    assert_true(k.zero == 5.0 && fabs(k.scale - 1.0 / 3) < 1e-3);
    double mean = 0;
    for (uint32_t t = 0; t < 128; t++)
        mean += t == 77 ? 0 : o.k[(size_t)t * 128] / 127;
    assert_true(fabs(k.scale * k.code + k.zero - mean) <= k.scale / 2 + 1e-3);
    struct kvt_stored v = kvt_stored(x.f, 64, x.blocks, true, 77, 3);
    assert_true(v.scale * v.code + v.zero < 20);
    close_session(&x);
    free_ott(&o);
}

// ---- Forks ----

static void assert_same_pool(const struct session *x, const uint8_t *a, const uint8_t *b,
                             uint32_t head)
{
    size_t record = kvq_extras_bytes(x->f, &x->s) / x->s.kv_heads;
    size_t rows = (sizeof(struct kvq_outliers) + 63) / 64 * 64, row = 2u * x->s.k_dim;
    size_t room = (size_t)x->f->outliers + x->f->extra_outliers;
    const struct kvq_outliers *p = (const void *)(a + head * record);
    const struct kvq_outliers *q = (const void *)(b + head * record);
    assert_int_equal(p->count, q->count);
    assert_true(p->frozen_at == q->frozen_at);
    assert_memory_equal(p->position, q->position, sizeof(uint64_t) * p->count);
    assert_memory_equal(p->score, q->score, sizeof(float) * p->count);
    for (uint32_t v = 0; v < 2; v++)
        assert_memory_equal((const uint8_t *)p + rows + v * room * row,
                            (const uint8_t *)q + rows + v * room * row, p->count * row);
    size_t sinks = rows + 2 * room * row; // sink rows follow
    assert_memory_equal((const uint8_t *)p + sinks, (const uint8_t *)q + sinks, record - sinks);
}

// Units that are packed once more, after a try that failed behind the competition: the pool and the
// codes are the same, and so are those of a session that learns once more.
static void test_tries(void **state)
{
    static const char *const formats[] = {"ott2", "ott2-oscar", "ott2-s32"};
    enum { TOKENS = 3840 };
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        struct ott o = ott_keys(TOKENS, i != 1, kvt_seed() + i);
        struct session x = open_session(formats[i], 2, 64, KVQ_F16, TOKENS, 300);
        append(&x, o.k, o.v, TOKENS);
        size_t bytes = x.done / 128 * kvq_block_bytes(&x.packed, &x.s);
        size_t extras = kvq_extras_bytes(x.f, &x.s);
        uint8_t *blocks = malloc(bytes), *before = malloc(extras);
        memcpy(blocks, x.blocks, bytes);
        memcpy(before, x.extras, extras);
        const uint32_t again[] = {x.done - 3 * x.f->unit_tokens, x.learn, 0};
        for (uint32_t j = 0; j < 3; j++) {
            x.done = again[j];
            x.learned = again[j] > 0;
            advance(&x);
            for (uint32_t h = 0; h < 2; h++)
                assert_same_pool(&x, before, x.extras, h);
            assert_memory_equal(blocks, x.blocks, bytes);
        }
        free(blocks);
        free(before);
        close_session(&x);
        free_ott(&o);
    }
}

// Of KV head 1's outliers a fork has kept those below `at`, in their order, with their rows.
static void assert_kept(const struct session *whole, const uint8_t *fork, uint32_t at)
{
    size_t record = kvq_extras_bytes(whole->f, &whole->s) / whole->s.kv_heads;
    size_t rows = (sizeof(struct kvq_outliers) + 63) / 64 * 64, row = 2u * whole->s.k_dim;
    size_t room = (size_t)whole->f->outliers + whole->f->extra_outliers;
    const uint8_t *a = whole->extras + record, *b = fork + record;
    const struct kvq_outliers *p = (const void *)a, *q = (const void *)b;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->position[i] >= at)
            continue;
        assert_int_equal(q->position[kept], p->position[i]);
        assert_true(q->score[kept] == p->score[i]);
        assert_memory_equal(b + rows + kept * row, a + rows + i * row, row);
        assert_memory_equal(b + rows + (room + kept) * row, a + rows + (room + i) * row, row);
        kept++;
    }
    assert_int_equal(q->count, kept);
    assert_int_equal(kvq_outliers_published(whole->f, &whole->s, fork, 1), kept);
}

// A fork at the end of any unit has what a session has that saw no more tokens, also where the pool
// froze, and goes on as that session would. Within a unit, it keeps the outliers below that point.
static void check_fork(const char *format, uint32_t tokens)
{
    struct ott o = ott_keys(tokens, true, kvt_seed() + 9);
    struct session whole = open_session(format, 2, 64, KVQ_F16, tokens, 300), x = whole;
    size_t bytes = kvq_extras_bytes(whole.f, &whole.s);
    uint8_t *fork = kvt_guarded(bytes, 0);
    uint32_t unit = whole.f->unit_tokens;
    append(&whole, o.k, o.v, tokens);
    x = open_session(format, 2, 64, KVQ_F16, tokens, 300);
    append(&x, o.k, o.v, x.learn);
    for (;; append(&x, o.k, o.v, unit)) {
        kvq_extras_fork(whole.f, &whole.s, whole.extras, fork, x.tokens);
        for (uint32_t h = 0; h < 2; h++)
            assert_same_pool(&x, fork, x.extras, h);
        if (x.tokens + unit > tokens)
            break;
        for (uint32_t at = x.tokens + 1; at < x.tokens + unit; at += 13) {
            kvq_extras_fork(whole.f, &whole.s, whole.extras, fork, at);
            assert_kept(&whole, fork, at);
        }
    }
    // In place, half way back, and then on again.
    uint32_t half = tokens / 2 / unit * unit;
    kvq_extras_fork(whole.f, &whole.s, whole.extras, fork, UINT64_MAX);
    kvq_extras_fork(whole.f, &whole.s, whole.extras, whole.extras, half);
    whole.done = half;
    advance(&whole);
    for (uint32_t h = 0; h < 2; h++)
        assert_same_pool(&whole, fork, whole.extras, h);
    kvt_guarded_free(fork);
    close_session(&x);
    close_session(&whole);
    free_ott(&o);
}

static void test_forks(void **state)
{
    (void)state;
    check_fork("ott2", 3840);
    check_fork("ott2-oscar", 1024);
    check_fork("ott2-s32", 3840);
}

// Factors and sink tokens go with every fork.
static void test_fork_keeps_the_rest(void **state)
{
    (void)state;
    struct kvt_cache c = kvt_cache(kernels, "innerq-base", kvt_shape(1, 2, 64, KVQ_F16), 256, -1,
                                   KVT_NORMAL, kvt_seed());
    size_t bytes = kvq_extras_bytes(c.format, &c.shape);
    uint8_t *fork = kvt_guarded(bytes, 0);
    kvq_extras_fork(c.format, &c.shape, c.extras, fork, 130);
    assert_memory_equal(fork, c.extras, bytes);
    kvt_guarded_free(fork);
    kvt_cache_free(&c);
}

// ---- Outliers in attention ----

enum { DIM = 128, HEADS = 2, GQA = 4, SEEN = 640, WEIGHTY = 5 };

// Queries that see next to nothing but the tokens with small keys, which are the outliers.
struct weighty {
    float k[SEEN][HEADS][DIM], v[SEEN][HEADS][DIM];
    float q[HEADS * GQA][DIM], out[HEADS * GQA][DIM];
    double want[HEADS][DIM]; // the mean of the outliers' values
};

static void fill_weighty(struct weighty *w)
{
    static const uint32_t outliers[WEIGHTY] = {40, 75, 200, 301, 333};
    struct kvt_rng rng = {.state = kvt_seed()};
    memset(w->want, 0, sizeof w->want);
    for (uint32_t t = 0; t < SEEN; t++)
        for (uint32_t i = 0; i < HEADS * DIM; i++) {
            w->k[t][i / DIM][i % DIM] = 1.0f + 0.25f * fabsf(kvt_normal(&rng));
            w->v[t][i / DIM][i % DIM] = kvt_normal(&rng);
        }
    for (uint32_t n = 0; n < WEIGHTY; n++)
        for (uint32_t i = 0; i < HEADS * DIM; i++) {
            float v = 2.0f + (float)((n + i) % 5);
            w->k[outliers[n]][i / DIM][i % DIM] = 0x1p-16f;
            w->v[outliers[n]][i / DIM][i % DIM] = v;
            w->want[i / DIM][i % DIM] += (double)v / WEIGHTY;
        }
    for (uint32_t i = 0; i < HEADS * GQA * DIM; i++)
        w->q[i / DIM][i % DIM] = -4.0f;
}

static void assert_weighty(const struct weighty *w, const char *isa, uint32_t path)
{
    for (uint32_t h = 0; h < HEADS * GQA; h++)
        for (uint32_t i = 0; i < DIM; i++)
            if (fabs((double)w->out[h][i] - w->want[h / GQA][i]) > 0.02 * w->want[h / GQA][i])
                fail_msg("%s, path %u: %g instead of %g", isa, path, (double)w->out[h][i],
                         w->want[h / GQA][i]);
}

// An outlier counts with its raw row and with nothing else, whoever computes.
static void test_outliers_in_attention(void **state)
{
    struct weighty *w = malloc(sizeof *w);
    const int64_t row = DIM * sizeof(float);
    (void)state;
    fill_weighty(w);
    struct session x = open_session("ott2-oscar", HEADS, DIM, KVQ_F16, SEEN, 0);
    x.s.q_heads = HEADS * GQA;
    append(&x, w->k[0][0], w->v[0][0], SEEN);
    struct kvq_attend a = {.format = x.f,
                           .shape = &x.s,
                           .pages = x.pages,
                           .n_pages = SEEN / KVQ_BLOCK_TOKENS,
                           .extras = x.extras,
                           .past_tokens = SEEN,
                           .q_start = SEEN - 1,
                           .q_tokens = 1,
                           .q = {w->q, HEADS * GQA * row, row, KVQ_F32},
                           .out = w->out,
                           .out_token_stride = HEADS * GQA * row,
                           .out_head_stride = row,
                           .out_dtype = KVQ_F32};
    for (int isa = KVQ_ISA_C; isa <= KVQ_ISA_BEST; isa++)
        for (a.path = KVQ_PATH_EXACT; a.path <= KVQ_PATH_FAST; a.path++) {
            kvt_attend(kvq_kernels_get(isa), &a, 1);
            assert_weighty(w, kvq_kernels_isa(kvq_kernels_get(isa)), a.path);
        }
    close_session(&x);
    free(w);
}

// ---- Sink tokens ----

// They come back to the bit without a raw block, and do not widen the scales of the others.
static void test_sinks(void **state)
{
    static const char *const names[] = {"kivi-sink2", "innerq-base", "oscar2-s32", "kivi2-g128-s96",
                                        "turboquant3-s64"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct session x = open_session(names[i], 2, 64, KVQ_F16, 256, 0);
        struct ott o = ott_keys(256, false, kvt_seed() + i);
        struct model none = {0};
        for (uint32_t e = 0; e < x.f->sink_tokens * 128u; e++)
            o.k[e] *= 4096, o.v[e] *= 512; // still whole multiples that fp16 can hold
        append(&x, o.k, o.v, 256);
        assert_read_back(&x, &o, &none, 0);
        assert_read_back(&x, &o, &none, 1);
        for (uint32_t t = x.f->sink_tokens; t < 128; t++)
            for (uint32_t c = 0; c < 64; c++) {
                assert_true(fabs(kvt_stored(x.f, 64, x.blocks, false, t, c).scale) < 20);
                assert_true(fabs(kvt_stored(x.f, 64, x.blocks, true, t, c).scale) < 20);
            }
        close_session(&x);
        free_ott(&o);
    }
}

// The mean is that of the tokens that stay, however many do not.
static void test_sink_placeholders(void **state)
{
    (void)state;
    struct session x = open_session("kivi2-g128-s96", 2, 64, KVQ_F16, 128, 0);
    struct ott o = ott_keys(128, false, kvt_seed());
    for (uint32_t t = 0; t < 128; t++)
        o.k[(size_t)t * 128] = t < 96 ? 0.0f : 5.0f + (float)(t % 2);
    append(&x, o.k, o.v, 128);
    for (uint32_t t = 0; t < 128; t++) {
        struct kvt_stored k = kvt_stored(x.f, 64, x.blocks, false, t, 0);
        assert_true(k.zero == 5.0 && fabs(k.scale - 1.0 / 3) < 1e-3);
        assert_true(t >= 96 || k.code == 1 || k.code == 2);
    }
    close_session(&x);
    free_ott(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_factors),
        cmocka_unit_test(test_small_factors),
        cmocka_unit_test(test_competition),
        cmocka_unit_test(test_publishing),
        cmocka_unit_test(test_foreign_positions),
        cmocka_unit_test(test_placeholders),
        cmocka_unit_test(test_tries),
        cmocka_unit_test(test_forks),
        cmocka_unit_test(test_fork_keeps_the_rest),
        cmocka_unit_test(test_outliers_in_attention),
        cmocka_unit_test(test_sinks),
        cmocka_unit_test(test_sink_placeholders),
    };
    if (kvt_lacks_amx())
        return 77; // skipped
    kernels = kvq_kernels_get(KVQ_ISA_BEST);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
