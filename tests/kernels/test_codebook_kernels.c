// SPDX-License-Identifier: Apache-2.0
//
// Codebook kernels of every instruction set against C: every size of codebook and every vector,
// tables that sub-vectors share or have of their own, all head_dims. Codes are the same bytes, ties
// and sums beyond fp32 included; logits and sums agree within 1e-5, and those of a row are the same
// bits whichever rows stand beside it.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernels/internal.h"
#include "tests/kernels/kvtest.h"

static const float TOLERANCE = 1e-5f;

// Who has a table. ODD: of each sub-vector, and they do not follow one another closely.
enum tables { SHARED, OWN, ODD, TABLES };

struct setup {
    const struct kvq_kernels *k; // compared with C
    struct kvt_rng rng;
    char name[KVQ_FORMAT_NAME];
    struct kvq_format format;
    struct kvq_shape shape;
    struct kvq_book book;
    struct kvq__codec codec;
    uint8_t *record;
    struct kvq_packed packed;
};

// Numbers for any table; coarse ones are small integers, so that many are the same.
static const float *numbers(bool coarse)
{
    static float *x[2];
    const size_t n = (size_t)KVQ_MAX_HEAD_DIM * 65536 + 64 * KVQ_MAX_HEAD_DIM;
    struct kvt_rng rng = {.state = 5};
    if (x[coarse])
        return x[coarse];
    x[coarse] = malloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        x[coarse][i] = coarse ? (float)kvt_below(&rng, 4) - 1 : kvt_normal(&rng);
    return x[coarse];
}

static struct setup setup_of(const struct kvq_kernels *k, uint32_t bits, uint32_t vector,
                             uint32_t dim, enum tables tables, bool coarse)
{
    struct setup s = {.k = k, .rng = {kvt_seed() + 64 * bits + 8 * vector + dim + tables}};
    char text[200];
    snprintf(s.name, sizeof s.name, "vecinfer-k%ux%uv%ux%u", vector, bits, vector, bits);
    if (kvq_format_parse(s.name, &s.format, text, sizeof text))
        fail_msg("%s", text);
    size_t table = (size_t)vector << bits;
    s.shape = kvt_shape(1, 1, dim, KVQ_F16);
    s.book.k = numbers(coarse);
    s.book.v = numbers(coarse) + 3; // aligned to a number only
    s.book.k_sub = s.book.v_sub = tables == SHARED ? 0 : tables == OWN ? table : table + 7;
    s.codec = kvq__codec_of(&s.format, &s.shape, &s.book, 0);
    s.record = kvt_guarded(s.codec.layout.record_bytes, 0);
    for (uint32_t i = 0; i < s.codec.layout.record_bytes; i++)
        s.record[i] = (uint8_t)kvt_u64(&s.rng);
    s.packed = kvq_packed_at(&s.codec.layout, s.record, 1);
    return s;
}

// Every codec there is, and every table.
static void for_each(bool coarse, void (*run)(struct setup *s))
{
    static const struct {
        uint32_t vector, bits;
    } codes[] = {{2, 3}, {2, 4},  {2, 6},  {2, 8}, {2, 10}, {2, 12}, {4, 4}, {4, 6},
                 {4, 8}, {4, 10}, {4, 12}, {8, 8}, {8, 10}, {8, 12}, {8, 16}};
    for (int isa = kvt_lowest_isa(KVQ_ISA_AVX2); isa <= KVQ_ISA_BEST; isa++) {
        const struct kvq_kernels *k = kvq_kernels_get(isa);
        for (size_t i = 0; i < sizeof codes / sizeof *codes && k->isa == isa; i++)
            for (uint32_t dim = 64; dim <= 256; dim *= 2)
                for (enum tables t = SHARED; t < TABLES; t++) {
                    struct setup s = setup_of(k, codes[i].bits, codes[i].vector, dim, t, coarse);
                    run(&s);
                    kvt_guarded_free(s.record);
                }
    }
}

static const struct kvq_kernels *plain(void)
{
    return kvq_kernels_get(KVQ_ISA_C);
}

// ---- Attention ----

enum { MOST_ROWS = 11 };

struct bench {
    struct kvq__tile tile;
    float *q, *logits, *o, *group;
};

static float *floats(size_t n)
{
    float *x = kvt_guarded(n * sizeof *x, 0);
    memset(x, 0, n * sizeof *x);
    return x;
}

static struct bench bench_of(const struct setup *s, uint32_t rows)
{
    uint32_t dim = s->codec.dim;
    struct bench b = {.q = floats((size_t)rows * dim),
                      .logits = floats((size_t)rows * KVQ__LOGITS_STRIDE),
                      .o = floats((size_t)rows * dim),
                      .group = floats((size_t)KVQ_GROUP_TOKENS * dim)};
    struct kvt_rng rng = s->rng;
    kvt_fill(&rng, KVT_NORMAL, b.q, rows, dim);
    kvt_fill(&rng, KVT_NORMAL, b.o, rows, dim);
    kvt_fill(&rng, KVT_NORMAL, b.logits, rows, KVQ__LOGITS_STRIDE);
    b.tile = (struct kvq__tile){.codec = &s->codec, .rows = rows, .dim = dim};
    b.tile.group_f32 = b.group;
    return b;
}

static void free_bench(struct bench *b)
{
    kvt_guarded_free(b->q);
    kvt_guarded_free(b->logits);
    kvt_guarded_free(b->o);
    kvt_guarded_free(b->group);
}

// Rows [from, from + rows) of what stands in b.
static void attend_rows(const struct kvq_kernels *k, const struct setup *s, struct bench *b,
                        uint32_t from, uint32_t rows, bool v)
{
    struct kvq__tile tile = b->tile;
    float *logits = b->logits + (size_t)from * KVQ__LOGITS_STRIDE;
    tile.rows = rows;
    tile.q = tile.qt = b->q + (size_t)from * tile.dim;
    tile.o = tile.ot = b->o + (size_t)from * tile.dim;
    tile.ahead = rows > 2 ? s->record : NULL;
    if (v)
        kvq__pv_packed(k, &tile, &s->packed, logits);
    else
        kvq__qk_packed(k, &tile, &s->packed, logits);
}

static float length(const float *x, uint32_t n)
{
    float sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrtf(sum);
}

static void assert_close(const struct setup *s, const float *got, const float *want, size_t n,
                         float scale)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(got[i] - want[i]) <= TOLERANCE * scale))
            fail_msg("%s %s, head_dim %u, tables %zu apart: %.9g, C has %.9g",
                     kvq_kernels_isa(s->k), s->name, s->codec.dim, s->book.k_sub, (double)got[i],
                     (double)want[i]);
}

static void compare_rows(const struct setup *s, uint32_t rows, bool v)
{
    uint32_t dim = s->codec.dim, stride = v ? dim : KVQ__LOGITS_STRIDE;
    struct bench c = bench_of(s, rows), all = bench_of(s, rows), alone = bench_of(s, rows);
    attend_rows(plain(), s, &c, 0, rows, v);
    attend_rows(s->k, s, &all, 0, rows, v);
    for (uint32_t r = 0; r < rows; r++)
        attend_rows(s->k, s, &alone, r, 1, v);
    const float *got = v ? all.o : all.logits, *want = v ? c.o : c.logits;
    for (uint32_t r = 0; r < rows; r++) {
        const float *row = want + (size_t)r * stride;
        // A value has the size of 1, and so have the weights; a logit adds up dim products.
        float scale = v ? length(row, dim) : length(c.q + (size_t)r * dim, dim) * sqrtf((float)dim);
        assert_close(s, got + (size_t)r * stride, row, v ? dim : KVQ_GROUP_TOKENS, scale);
    }
    assert_memory_equal(got, v ? alone.o : alone.logits, (size_t)rows * stride * sizeof *got);
    free_bench(&c);
    free_bench(&all);
    free_bench(&alone);
}

static void compare_attention(struct setup *s)
{
    for (uint32_t rows = 1; rows <= MOST_ROWS; rows += rows < 6 ? 1 : 5) {
        compare_rows(s, rows, false);
        compare_rows(s, rows, true);
    }
}

static void test_attention(void **state)
{
    (void)state;
    for_each(false, compare_attention);
}

// Formats that scale keys by a norm have it multiplied in.
static void compare_norms(struct setup *s)
{
    s->format.k_token_scale = KVQ_SCALE_L2_HEAD;
    s->codec = kvq__codec_of(&s->format, &s->shape, &s->book, 0);
    uint8_t *record = kvt_guarded(s->codec.layout.record_bytes, 0);
    memset(record, 0x33, s->codec.layout.record_bytes); // norms of 0.225
    s->packed = kvq_packed_at(&s->codec.layout, record, 2);
    uint16_t *norms = (uint16_t *)(void *)(s->packed.group + s->codec.layout.k_norms);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        norms[t] = (uint16_t)(norms[t] + 50 * t);
    compare_rows(s, 6, false);
    kvt_guarded_free(record);
}

static void test_norms(void **state)
{
    (void)state;
    for_each(false, compare_norms);
}

// ---- Chunks ----

enum { GROUPS = 5 };

// Packed groups with a raw one among them, so that an even and an odd number are packed.
static struct kvq__chunk chunk_of(const struct setup *s, uint32_t groups, uint32_t raw)
{
    struct kvq__chunk chunk = {.groups = groups};
    for (uint32_t i = 0; i < groups; i++)
        if (i != raw) {
            chunk.group[i].packed = kvq_packed_at(&s->codec.layout, s->record, i % 4);
            chunk.group[i].packed_tokens = KVQ_GROUP_TOKENS;
        }
    return chunk;
}

// Rows [from, from + rows) by the loop over chunks; false if there is none for this codec.
static bool attend_chunk(const struct setup *s, struct bench *b, const struct kvq__chunk *chunk,
                         uint32_t from, uint32_t rows, bool v)
{
    struct kvq__tile tile = b->tile;
    uint8_t *scratch = kvt_guarded(KVQ__SCRATCH_BYTES, 0);
    tile.rows = rows;
    tile.logits = b->logits + (size_t)from * KVQ__LOGITS_STRIDE;
    tile.q = tile.qt = b->q + (size_t)from * tile.dim;
    tile.o = tile.ot = b->o + (size_t)from * tile.dim;
    tile.scratch = scratch;
    bool (*run)(struct kvq__tile *, const struct kvq__chunk *) =
        v ? s->k->pv_chunk[KVQ__BOOK] : s->k->qk_chunk[KVQ__BOOK];
    bool done = run && run(&tile, chunk);
    kvt_guarded_free(scratch);
    return done;
}

static void compare_chunk(const struct setup *s, uint32_t rows, uint32_t raw, bool v)
{
    struct kvq__chunk next = chunk_of(s, GROUPS - 1, 0), chunk = chunk_of(s, GROUPS, raw);
    uint32_t dim = s->codec.dim, stride = v ? dim : KVQ__LOGITS_STRIDE;
    struct bench c = bench_of(s, rows), all = bench_of(s, rows), alone = bench_of(s, rows);
    chunk.next = &next;
    if (attend_chunk(s, &all, &chunk, 0, rows, v)) {
        c.tile.qt = c.q;
        c.tile.ot = c.o;
        for (uint32_t i = 0; i < GROUPS; i++)
            if (i != raw && v)
                kvq__pv_packed(plain(), &c.tile, &chunk.group[i].packed, c.logits + 32 * i);
            else if (i != raw)
                kvq__qk_packed(plain(), &c.tile, &chunk.group[i].packed, c.logits + 32 * i);
        for (uint32_t r = 0; r < rows; r++)
            attend_chunk(s, &alone, &chunk, r, 1, v);
        const float *got = v ? all.o : all.logits, *want = v ? c.o : c.logits;
        for (uint32_t r = 0; r < rows; r++) {
            const float *row = want + (size_t)r * stride;
            float q = length(c.q + (size_t)r * dim, dim) * sqrtf((float)dim);
            assert_close(s, got + (size_t)r * stride, row, stride, v ? length(row, dim) : q);
        }
        assert_memory_equal(got, v ? alone.o : alone.logits, (size_t)rows * stride * sizeof *got);
    }
    free_bench(&c);
    free_bench(&all);
    free_bench(&alone);
}

static void compare_chunks(struct setup *s)
{
    for (uint32_t rows = 1; rows <= 6; rows++)
        for (uint32_t raw = 1; raw <= GROUPS; raw += GROUPS - 1) {
            compare_chunk(s, rows, raw, false);
            compare_chunk(s, rows, raw, true);
        }
}

static void test_chunks(void **state)
{
    (void)state;
    for_each(false, compare_chunks);
}

// The first groups of a chunk, or the last, are missing where no row of the tile sees them. That
// gives the bits that weights of 0 give.
static void compare_missing(struct setup *s)
{
    for (uint32_t first = 0; first <= 5; first++) {
        uint32_t end = GROUPS - first % 2;
        struct bench all = bench_of(s, 3), part = bench_of(s, 3);
        struct kvq__chunk whole = chunk_of(s, GROUPS, GROUPS), chunk = whole;
        for (uint32_t i = 0; i < GROUPS; i++) {
            if (i >= first && i < end)
                continue;
            chunk.group[i] = (struct kvq__group){0};
            for (uint32_t r = 0; r < 3; r++)
                memset(all.logits + r * KVQ__LOGITS_STRIDE + 32 * i, 0, 32 * sizeof(float));
        }
        attend_chunk(s, &all, &whole, 0, 3, true);
        attend_chunk(s, &part, &chunk, 0, 3, true);
        assert_memory_equal(part.o, all.o, sizeof(float) * 3 * s->codec.dim);
        free_bench(&all);
        free_bench(&part);
    }
}

static void test_missing_groups(void **state)
{
    (void)state;
    for_each(false, compare_missing);
}

// ---- Codes ----

// The middle between a centroid of K and the one nearest to it: which of the two is nearer is a
// matter of rounding, and of nothing else.
static void set_middle(struct setup *s, uint32_t m, float *x)
{
    uint32_t vector = s->format.k.vector, count = 1u << s->format.k.bits, other = 0;
    const float *table = s->book.k + m * s->book.k_sub;
    const float *one = table + (size_t)kvt_below(&s->rng, count) * vector;
    float least = INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        float sum = 0;
        for (uint32_t j = 0; j < vector; j++)
            sum += (one[j] - table[i * vector + j]) * (one[j] - table[i * vector + j]);
        if (sum > 0 && sum < least) {
            least = sum;
            other = i;
        }
    }
    for (uint32_t j = 0; j < vector; j++)
        x[j] = (one[j] + table[other * vector + j]) / 2;
}

// Rows of many kinds, a pair of tokens each.
static void fill_rows(struct setup *s, float *rows, bool coarse)
{
    uint32_t dim = s->codec.dim;
    kvt_fill(&s->rng, KVT_NORMAL, rows, KVQ_GROUP_TOKENS, dim);
    for (uint32_t i = 0; i < KVQ_GROUP_TOKENS * dim; i++) {
        if (coarse)
            rows[i] = rintf(2 * rows[i]) / 2; // halfway between centroids
        else if (i / dim % 16 == 3)
            rows[i] *= 1e19f; // squares beyond fp32, some of them
        else if (i / dim % 16 == 7)
            rows[i] = i % 5 ? 0.0f : NAN;
    }
    for (uint32_t t = 9; t < KVQ_GROUP_TOKENS && !coarse; t += 4)
        for (uint32_t m = 0; m < dim / s->format.k.vector; m++)
            set_middle(s, m, rows + t * dim + m * s->format.k.vector);
}

static void compare_codes(struct setup *s)
{
    const struct kvq__codec *c = &s->codec;
    if (c->k.row.bits >= 12 && c->dim > 64)
        return; // C takes its time, and no kernel looks at head_dim but for counting sub-vectors
    size_t n = c->layout.record_bytes;
    float *rows = floats((size_t)KVQ_GROUP_TOKENS * c->dim);
    uint8_t *a = kvt_guarded(n, 0), *b = kvt_guarded(n, 0);
    memcpy(a, s->record, n);
    memcpy(b, s->record, n);
    fill_rows(s, rows, s->book.k == numbers(true));
    plain()->quant_k[KVQ__BOOK](c, rows, a, 1);
    s->k->quant_k[KVQ__BOOK](c, rows, b, 1);
    plain()->quant_v[KVQ__BOOK](c, rows, a, 2);
    s->k->quant_v[KVQ__BOOK](c, rows, b, 2);
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i])
            fail_msg("%s %s, head_dim %u, tables %zu apart: byte %zu is %u, C has %u",
                     kvq_kernels_isa(s->k), s->name, c->dim, s->book.k_sub, i, b[i], a[i]);
    kvt_guarded_free(rows);
    kvt_guarded_free(a);
    kvt_guarded_free(b);
}

static void test_codes(void **state)
{
    (void)state;
    for_each(false, compare_codes);
}

static void test_ties(void **state)
{
    (void)state;
    for_each(true, compare_codes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention), cmocka_unit_test(test_norms),
        cmocka_unit_test(test_chunks),    cmocka_unit_test(test_codes),
        cmocka_unit_test(test_ties),      cmocka_unit_test(test_missing_groups),
    };
    if (kvq_kernels_get(KVQ_ISA_BEST)->isa == KVQ_ISA_C) {
        printf("no instruction set to compare with C\n");
        return 77;
    }
    if (kvt_lowest_isa(KVQ_ISA_AVX2) > KVQ_ISA_AVX512) {
        printf("AMX has no codebook kernels of its own, and this CPU has AVX-512\n");
        return 77;
    }
    return cmocka_run_group_tests_name("book", tests, NULL, NULL);
}
