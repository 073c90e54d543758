// SPDX-License-Identifier: Apache-2.0
//
// Seeded numbers, guarded memory, caches and requests for the tests of kernels/.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>
#include <pthread.h>

#include "kernels/pool.h"
#include "tests/kernels/kvtest.h"

// ---- Numbers ----

uint64_t kvt_seed(void)
{
    static uint64_t seed;
    const char *text = getenv("KVQ_SEED");
    if (seed == 0) {
        seed = text ? strtoull(text, NULL, 0) : 20260101;
        seed += seed == 0;
        printf("seed %llu (set KVQ_SEED to choose another)\n", (unsigned long long)seed);
    }
    return seed;
}

bool kvt_lacks_amx(void)
{
    const char *mask = getenv("KVQ_CPU_MASK");
    if (!mask || strcmp(mask, "amx") != 0 ||
        strcmp(kvq_kernels_isa(kvq_kernels_get(KVQ_ISA_BEST)), "amx") == 0)
        return false;
    printf("no AMX here, or no permission for it; skipped\n");
    return true;
}

// What kernels/isa.c asks of the CPU, which a build over SIMDe does not ask.
bool kvt_cpu_has_avx512(void)
{
#ifdef __x86_64__
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

uint64_t kvt_u64(struct kvt_rng *rng)
{
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u; // splitmix64
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint32_t kvt_below(struct kvt_rng *rng, uint32_t n)
{
    return (uint32_t)(kvt_u64(rng) >> 32) % n;
}

// The polar method (Marsaglia, Bray, 1964), which needs no cosine.
static float polar(struct kvt_rng *rng)
{
    double x, y, square;
    do {
        uint64_t bits = kvt_u64(rng);
        x = (double)(int32_t)(uint32_t)bits * 0x1p-31;
        y = (double)(int32_t)(uint32_t)(bits >> 32) * 0x1p-31;
        square = x * x + y * y;
    } while (square >= 1 || square == 0);
    return (float)(x * sqrt(-2 * log(square) / square));
}

static float drawn[1 << 16];

static void draw_all(void)
{
    struct kvt_rng rng = {2}; // numbers that tell one order of sums from another (mutate-gpu.py)
    for (size_t i = 0; i < sizeof drawn / sizeof *drawn; i++)
        drawn[i] = polar(&rng);
}

// One of 65,536 that are drawn once: to draw each anew took a third of the time of these tests.
float kvt_normal(struct kvt_rng *rng)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, draw_all);
    return drawn[kvt_u64(rng) >> 48];
}

static float extreme(struct kvt_rng *rng)
{
    static const float values[] = {0.0f,     -0.0f, 65504.0f, -65504.0f, 0x1p-24f, -0x1p-24f,
                                   0x1p-14f, 1.0f,  -1.0f,    1e-6f,     3e4f,     0x1.ffcp-15f};
    uint32_t i = kvt_below(rng, 2 * sizeof values / sizeof *values);
    return i < sizeof values / sizeof *values ? values[i] : kvt_normal(rng);
}

static float one_of(struct kvt_rng *rng, enum kvt_kind kind, uint32_t token, uint32_t channel)
{
    float x = kvt_normal(rng);
    switch (kind) {
    case KVT_OUTLIERS:
        x += channel % 32 == 5 ? 8.0f : channel % 64 == 40 ? -15.0f : 0.0f;
        return token % 37 == 0 ? x * 0.01f : token % 41 == 3 ? x * 3.0f : x;
    case KVT_OFFSETS:
        return 4.0f + 0.05f * x;
    case KVT_EXTREME:
        return token % 5 == 4 ? 0.25f : extreme(rng);
    case KVT_RISING:
        return x * (token < 128 ? 1e-12f : 0x1p124f);
    default:
        return x;
    }
}

void kvt_fill(struct kvt_rng *rng, enum kvt_kind kind, float *x, uint32_t tokens, uint32_t channels)
{
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t c = 0; c < channels; c++)
            x[(size_t)t * channels + c] = one_of(rng, kind, t, c);
}

// ---- Memory ----

enum { GUARD = 128, PATTERN = 0xa7 };

struct guarded {
    size_t n, offset;
};

void *kvt_guarded(size_t n, size_t offset)
{
    size_t total = (GUARD + offset + n + GUARD + 63) / 64 * 64;
    uint8_t *base = aligned_alloc(64, total);
    assert_non_null(base);
    memset(base, PATTERN, total);
    struct guarded head = {n, offset};
    uint8_t *p = base + GUARD + offset;
    memcpy(base, &head, sizeof head);
    memcpy(p - sizeof head, &head, sizeof head); // to find the base again
    return p;
}

void kvt_guarded_free(void *p)
{
    struct guarded head, first;
    uint8_t *data = p;
    if (!p)
        return;
    memcpy(&head, data - sizeof head, sizeof head);
    uint8_t *base = data - head.offset % GUARD - GUARD;
    memcpy(&first, base, sizeof first);
    assert_memory_equal(&head, &first, sizeof head);
    for (uint8_t *b = base + sizeof head; b < data - sizeof head; b++)
        assert_int_equal(*b, PATTERN);
    for (uint8_t *b = data + head.n; b < data + head.n + GUARD; b++)
        assert_int_equal(*b, PATTERN);
    free(base);
}

void *kvt_workspace(void)
{
    void *w = kvt_guarded(kvq_workspace_bytes(), 0);
    memset(w, 0x7f, kvq_workspace_bytes()); // as fp32: large numbers; nobody may rely on zeros
    return w;
}

// ---- Formats ----

enum { KEPT = 128 };

const struct kvq_format *kvt_format(const char *name)
{
    static struct kvq_format kept[KEPT];
    char text[300] = "";
    const struct kvq_format *row = kvq_format_by_name(name);
    if (row)
        return row;
    for (int i = 0; i < KEPT; i++) {
        if (kept[i].name[0] == '\0' && kvq_format_parse(name, &kept[i], text, sizeof text))
            fail_msg("%s", text);
        if (strcmp(kept[i].name, name) == 0)
            return &kept[i];
    }
    fail_msg("a test uses more than %d formats", KEPT);
    return NULL;
}

bool kvt_has_huge_book(const struct kvq_format *f)
{
    return (f->k.codec == KVQ_CODEC_BOOK && f->k.bits == 16) ||
           (f->v.codec == KVQ_CODEC_BOOK && f->v.bits == 16);
}

const char *kvt_any_format(struct kvt_rng *rng)
{
    static const char *const composed[] = {
        "oscar2-g64",      "oscar3-g128-fm",     "kivi2-g64",           "innerq-hybrid-full",
        "ott2-o0",         "quarot4-g128",       "innerq-small-full",   "vecinfer-k8x10v2x8",
        "kivi1-g64",       "kivi4+innerq-small", "oscar2-noscale-fm",   "turboquant2.5+oscar3",
        "int8-g64",        "innerq-base+int8",   "oscar2-s32-w17",      "oscar4-max",
        "ott2-s32",        "oscar3-mean-norot",  "kvq2:v_bits=3",       "oscar2:v_axis=channel",
        "kvq2:k_group=64", "oscar2-fit-s32",     "ott2:v_axis=channel", "turboquant2.5:k_wide=0"};
    uint32_t rows = 0, n = sizeof composed / sizeof *composed;
    while (kvq_formats[rows].name[0])
        rows++;
    for (;;) {
        uint32_t i = kvt_below(rng, rows + n);
        const char *name = i < rows ? kvq_formats[i].name : composed[i - rows];
        const struct kvq_format *f = kvt_format(name);
        bool large = f->k.codec == KVQ_CODEC_BOOK && (f->k.bits > 8 || f->v.bits > 8);
        if (kvt_has_huge_book(f))
            continue;
        if (!large || kvt_below(rng, 12) == 0) // searching 4,096 centroids in C takes a while
            return name;
    }
}

// Random numbers, as many as the largest tables need.
static const float *noise(size_t n)
{
    static float *x;
    static const size_t most = 65536 * 8 + 4096 * 8;
    assert_true(n <= most);
    if (x)
        return x;
    struct kvt_rng rng = {.state = 77};
    x = malloc(most * sizeof *x);
    for (size_t i = 0; i < most; i++)
        x[i] = kvt_normal(&rng);
    return x;
}

// Tables of 8 bits differ from sub-vector to sub-vector and from head to head, larger ones do not.
const struct kvq_book *kvt_book(const struct kvq_format *f, const struct kvq_shape *s)
{
    static struct kvq_book books[3 * KEPT];
    static float smooth[KVQ_MAX_HEAD_DIM * 64];
    static int n;
    bool k = f->k.codec == KVQ_CODEC_BOOK, v = f->v.codec == KVQ_CODEC_BOOK;
    if (!k && !v)
        return NULL;
    struct kvq_book b = {0};
    size_t table_k = (size_t)f->k.vector << f->k.bits, table_v = (size_t)f->v.vector << f->v.bits;
    for (size_t i = 0; i < sizeof smooth / sizeof *smooth; i++)
        smooth[i] = 0.25f + 1.5f * (float)(i * 37 % 64) / 64.0f;
    if (f->k_channel == KVQ_CHANNEL_BOOK)
        b.smooth = smooth;
    if (k) {
        b.k_sub = f->k.bits == 8 ? table_k : 0;
        b.k_head = f->k.bits == 8 ? 1000 : 8 * f->k.vector;
        b.k = noise(b.k_sub * (s->k_dim / f->k.vector) + b.k_head * s->kv_heads + table_k);
    }
    if (v) {
        b.v_sub = f->v.bits == 8 ? table_v : 0;
        b.v_head = f->v.bits == 8 ? 1000 : 8 * f->v.vector;
        b.v = noise(b.v_sub * (s->v_dim / f->v.vector) + b.v_head * s->kv_heads + table_v);
    }
    for (int i = 0; i < n; i++)
        if (memcmp(&books[i], &b, sizeof b) == 0)
            return &books[i];
    assert_true(n < 3 * KEPT);
    books[n] = b;
    return &books[n++];
}

// ---- A cache ----

struct kvq_shape kvt_shape(uint32_t gqa, uint32_t kv_heads, uint32_t dim, uint8_t dtype)
{
    return (struct kvq_shape){
        .q_heads = (uint16_t)(gqa * kv_heads),
        .kv_heads = (uint16_t)kv_heads,
        .k_dim = (uint16_t)dim,
        .v_dim = (uint16_t)dim,
        .dtype = dtype,
        .scale = (float)(1 / sqrt(dim)),
    };
}

struct kvq_view kvt_view(const float *x, uint32_t heads, uint32_t dim)
{
    return (struct kvq_view){x, (int64_t)sizeof(float) * heads * dim, (int64_t)sizeof(float) * dim,
                             KVQ_F32};
}

void kvt_spoil(const struct kvq_shape *s, const uint8_t *block, uint32_t from, uint32_t to)
{
    struct kvq_raw_layout raw = kvq_raw_layout_of(s);
    for (uint32_t h = 0; h < s->kv_heads; h++)
        for (uint32_t t = from; t < to; t++) {
            memset((uint8_t *)block + kvq_raw_at(&raw, h, t, false), 0xff, raw.row_bytes);
            memset((uint8_t *)block + kvq_raw_at(&raw, h, t, true), 0xff, raw.row_bytes);
        }
}

static void store_all(const struct kvq_kernels *k, struct kvt_cache *c)
{
    struct kvq_raw_layout raw = kvq_raw_layout_of(&c->shape);
    size_t token_values = (size_t)c->shape.kv_heads * c->shape.k_dim;
    for (uint32_t t = 0; t < c->tokens; t += 128)
        for (uint32_t h = 0; h < c->shape.kv_heads; h++) {
            struct kvq_view key =
                kvt_view(c->k + t * token_values, c->shape.kv_heads, c->shape.k_dim);
            struct kvq_view value =
                kvt_view(c->v + t * token_values, c->shape.kv_heads, c->shape.k_dim);
            uint32_t n = c->tokens - t < 128 ? c->tokens - t : 128;
            struct kvq_store_counts counts = {0};
            uint8_t *block = c->raw + t / 128 * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS);
            kvq_store(k, &c->shape, &key, &value, h, 0, n, block, &counts);
        }
}

static void pack_all(const struct kvq_kernels *k, struct kvt_cache *c)
{
    struct kvq_raw_layout raw = kvq_raw_layout_of(&c->shape);
    struct kvq_layout l = kvq_layout_of(c->format, &c->shape);
    void *workspace = kvt_workspace();
    uint32_t learn = kvq_learn_tokens(c->format, c->tokens);
    for (uint32_t h = 0; h < c->shape.kv_heads && learn && learn <= c->tokens; h++)
        kvq_learn(k, c->format, &c->shape, c->pages, learn, h, c->extras, workspace);
    for (uint32_t t = 0; t + c->format->unit_tokens <= c->packed; t += c->format->unit_tokens)
        for (uint32_t h = 0; h < c->shape.kv_heads; h++) {
            struct kvq_unit unit = {
                .raw_block = c->raw + t / 128 * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS),
                .packed_block = c->blocks + t / 128 * kvq_block_bytes(&l, &c->shape),
                .head = h,
                .first = t % 128,
                .block_start = t / 128 * 128,
                .extras = c->extras,
                .learned = learn,
                .book = c->book,
            };
            kvq_pack(k, c->format, &c->shape, &unit, workspace);
        }
    kvt_guarded_free(workspace);
}

static void set_pages(struct kvt_cache *c)
{
    struct kvq_raw_layout raw = kvq_raw_layout_of(&c->shape);
    struct kvq_layout l = kvq_layout_of(c->format, &c->shape);
    for (uint32_t i = 0; i < c->n_pages; i++) {
        uint32_t tokens = c->tokens - i * 128 < 128 ? c->tokens - i * 128 : 128;
        uint32_t packed = c->packed > i * 128 ? c->packed - i * 128 : 0;
        c->pages[i] = (struct kvq_page){
            .packed = c->blocks + i * kvq_block_bytes(&l, &c->shape),
            .raw = c->raw + i * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS),
            .tokens = (uint16_t)tokens,
            .packed_tokens = (uint16_t)(packed < tokens ? packed : tokens),
        };
    }
}

struct kvt_cache kvt_cache_of(const struct kvq_kernels *k, const char *format,
                              struct kvq_shape shape, uint32_t tokens, int packed,
                              kvt_fill_fn *fill, const void *data)
{
    struct kvt_cache c = {.shape = shape, .format = kvt_format(format), .tokens = tokens};
    c.book = kvt_book(c.format, &shape);
    uint32_t channels = (uint32_t)shape.kv_heads * shape.k_dim;
    struct kvq_raw_layout raw = kvq_raw_layout_of(&shape);
    struct kvq_layout l = kvq_layout_of(c.format, &shape);
    c.packed =
        packed < 0 ? tokens / c.format->unit_tokens * c.format->unit_tokens : (uint32_t)packed;
    c.n_pages = (tokens + 127) / 128;
    c.k = kvt_guarded(sizeof(float) * tokens * channels, 4);
    c.v = kvt_guarded(sizeof(float) * tokens * channels, 4);
    c.raw = kvt_guarded(c.n_pages * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS), 0);
    c.blocks = kvt_guarded(c.n_pages * kvq_block_bytes(&l, &shape), 0);
    c.pages = kvt_guarded(c.n_pages * sizeof *c.pages, 0);
    memset(c.raw, 0xff,
           c.n_pages * kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS)); // NaN where nobody stored
    fill(data, &shape, c.k, c.v, tokens);
    if (kvq_extras_bytes(c.format, &shape)) {
        c.extras = kvt_guarded(kvq_extras_bytes(c.format, &shape), 0);
        kvq_extras_init(c.format, &shape, c.extras);
        // Nothing is packed before the format has learned.
        if (c.packed && kvq_learn_tokens(c.format, tokens) > tokens)
            c.packed = 0;
    }
    store_all(k, &c);
    set_pages(&c);
    pack_all(k, &c);
    return c;
}

struct random {
    enum kvt_kind kind;
    uint64_t seed;
};

static void fill_random(const void *data, const struct kvq_shape *s, float *k, float *v,
                        uint32_t tokens)
{
    const struct random *r = data;
    struct kvt_rng rng = {.state = r->seed};
    kvt_fill(&rng, r->kind, k, tokens, (uint32_t)s->kv_heads * s->k_dim);
    kvt_fill(&rng, r->kind, v, tokens, (uint32_t)s->kv_heads * s->k_dim);
}

struct kvt_cache kvt_cache(const struct kvq_kernels *k, const char *format, struct kvq_shape shape,
                           uint32_t tokens, int packed, enum kvt_kind kind, uint64_t seed)
{
    struct random r = {kind, seed};
    return kvt_cache_of(k, format, shape, tokens, packed, fill_random, &r);
}

void kvt_cache_free(struct kvt_cache *c)
{
    kvt_guarded_free(c->k);
    kvt_guarded_free(c->v);
    kvt_guarded_free(c->raw);
    kvt_guarded_free(c->blocks);
    kvt_guarded_free(c->pages);
    kvt_guarded_free(c->extras);
}

struct kvq_reading kvt_reading(const struct kvt_cache *c)
{
    return (struct kvq_reading){.format = c->format,
                                .shape = &c->shape,
                                .pages = c->pages,
                                .n_pages = c->n_pages,
                                .extras = c->extras,
                                .book = c->book};
}

// ---- Requests ----

struct kvt_request kvt_request(const struct kvt_cache *c, uint32_t q_tokens, uint64_t seed)
{
    struct kvt_request r = {0};
    struct kvt_rng rng = {.state = seed};
    uint32_t heads = c->shape.q_heads, dim = c->shape.k_dim;
    size_t n = (size_t)q_tokens * heads;
    r.q = kvt_guarded(sizeof(float) * n * dim, 4);
    r.out = kvt_guarded(sizeof(float) * n * dim, 4);
    r.lse = kvt_guarded(sizeof(float) * n, 4);
    kvt_fill(&rng, KVT_NORMAL, r.q, q_tokens, heads * dim);
    r.a = (struct kvq_attend){
        .format = c->format,
        .shape = &c->shape,
        .pages = c->pages,
        .n_pages = c->n_pages,
        .extras = c->extras,
        .book = c->book,
        .past_tokens = c->tokens >= q_tokens ? c->tokens - q_tokens : 0,
        .step_tokens = c->tokens >= q_tokens ? q_tokens : c->tokens,
        .q_start = c->tokens >= q_tokens ? c->tokens - q_tokens : 0,
        .q_tokens = q_tokens,
        .q = kvt_view(r.q, heads, dim),
        .out = r.out,
        .out_token_stride = (int64_t)sizeof(float) * heads * dim,
        .out_head_stride = (int64_t)sizeof(float) * dim,
        .out_dtype = KVQ_F32,
        .lse = r.lse,
        .lse_token_stride = (int64_t)sizeof(float) * heads,
    };
    return r;
}

void kvt_request_free(struct kvt_request *r)
{
    kvt_guarded_free(r->q);
    kvt_guarded_free(r->out);
    kvt_guarded_free(r->lse);
}

static void attend_as_planned(const struct kvq_kernels *k, struct kvq_attend_job *job)
{
    job->partials = job->plan.partial_bytes ? kvt_guarded(job->plan.partial_bytes, 0) : NULL;
    void *workspace = kvt_workspace();
    for (uint32_t i = job->plan.items; i-- > 0;)
        kvq_attend_item(k, job, i, workspace);
    for (uint32_t i = 0; i < kvq_attend_merges(job); i++)
        kvq_attend_merge(k, job, i, workspace);
    kvt_guarded_free(workspace);
    kvt_guarded_free(job->partials);
}

void kvt_attend(const struct kvq_kernels *k, const struct kvq_attend *a, uint32_t items)
{
    struct kvq_attend_job job = {.call = *a};
    kvq_attend_plan(k, a, items, &job.plan);
    attend_as_planned(k, &job);
}

void kvt_attend_whole(const struct kvq_kernels *k, const struct kvq_attend *a, uint32_t items)
{
    struct kvq_attend_job job = {.call = *a};
    kvq_attend_plan(k, a, items, &job.plan);
    kvq_attend_plan_whole(a, &job.plan);
    attend_as_planned(k, &job);
}

void kvt_attend_threads(const struct kvq_kernels *k, const struct kvq_attend *a, unsigned n)
{
    struct kvq_pool *pool;
    assert_int_equal(kvq_pool_open(&pool, n, false), 0);
    assert_int_equal(kvq_pool_attend(pool, k, &a, 1), 0);
    kvq_pool_close(&pool);
}
