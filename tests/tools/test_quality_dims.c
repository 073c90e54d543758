// SPDX-License-Identifier: Apache-2.0
//
// The quality bench on heads that are stored with zeros behind: a capture of head_dim 96 has the
// errors of the engine's 96 channels with the engine's scale, held against a model of its own over
// rows that were padded by hand; its bits are those of each of the engine's values; its codebooks
// are those of padded rows; and what cannot be stored is refused with the number.
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/internal.h"
#include "tests/kits/unit.h"
#include "tools/kvq-bench/quality.h"
#include "tools/kvq-bench/quality_model.h"

enum { DIM = 96, STORED = 128, HEADS = 2, GQA = 2, TOKENS = 704, PACKED = 640, QUERIES = 8 };
enum { RAW_BYTES = 2 * 2 * STORED }; // of a token and KV head in full precision
static const double budget_bits = 10;

static char text[KVQ_TEXT_BYTES];

static struct quality_method method(const char *name)
{
    struct quality_method m;
    if (quality_method_parse(name, &m, text, sizeof text))
        fail_msg("%s: %s", name, text);
    return m;
}

static void *take(size_t n, size_t size)
{
    void *p = calloc(n, size);
    assert_non_null(p);
    return p;
}

// Keys and values, and queries of each KV head at the positions that are taken of a capture.
static struct quality_data make(void)
{
    struct quality_data d;
    assert_true(quality_data_take(&d, "given", HEADS, TOKENS, DIM, QUERIES));
    assert_true(quality_fill(&d, "offset-channels", 4, 5));
    quality_aim(&d, 0.5, 6, 0.1);
    for (uint32_t i = 0; i < QUERIES; i++)
        d.position[i] = TOKENS - 1 - i / GQA * (TOKENS / 2 / (QUERIES / GQA));
    d.layer = 0;
    return d;
}

// The same with zeros behind each row.
static struct quality_data pad(const struct quality_data *d)
{
    struct quality_data wide;
    assert_true(quality_data_take(&wide, "padded", HEADS, TOKENS, STORED, QUERIES));
    for (size_t i = 0; i < (size_t)HEADS * TOKENS; i++) {
        memcpy(wide.k + i * STORED, d->k + i * DIM, DIM * sizeof(float));
        memcpy(wide.v + i * STORED, d->v + i * DIM, DIM * sizeof(float));
    }
    for (size_t i = 0; i < (size_t)HEADS * QUERIES; i++)
        memcpy(wide.q + i * STORED, d->q + i * DIM, DIM * sizeof(float));
    memcpy(wide.position, d->position, QUERIES * sizeof *d->position);
    wide.layer = d->layer;
    return wide;
}

// ---- What is expected ----

struct sums {
    double difference, square;
};

static double relative(struct sums s)
{
    return sqrt(s.difference / s.square);
}

static void add(struct sums *s, double is, double was)
{
    s->difference += (is - was) * (is - was);
    s->square += was * was;
}

// One head: rows as they were and as they are seen, [TOKENS][STORED].
struct head {
    float *k, *v, *seen_k, *seen_v;
};

struct expected {
    struct sums k, v, logits, out_windows, out_bytes, out_k;
};

static double logit(const float *q, const float *k, double scale)
{
    double sum = 0;
    for (uint32_t c = 0; c < DIM; c++)
        sum += (double)q[c] * (double)k[c];
    return sum * scale;
}

// Attention over n tokens. Those of [first, last) are as seen, V of them only if `v`.
static void attend(const struct head *h, const float *q, uint32_t n, double scale, uint32_t first,
                   uint32_t last, bool v, double *out)
{
    double total = 0, max = -INFINITY, *l = take(n, sizeof *l);
    for (uint32_t t = 0; t < n; t++) {
        bool seen = t >= first && t < last;
        l[t] = logit(q, (seen ? h->seen_k : h->k) + (size_t)t * STORED, scale);
        max = fmax(max, l[t]);
    }
    memset(out, 0, DIM * sizeof *out);
    for (uint32_t t = 0; t < n; t++) {
        bool seen = v && t >= first && t < last;
        double p = exp(l[t] - max);
        total += p;
        for (uint32_t c = 0; c < DIM; c++)
            out[c] += p * (double)(seen ? h->seen_v : h->v)[(size_t)t * STORED + c];
    }
    for (uint32_t c = 0; c < DIM; c++)
        out[c] /= total;
    free(l);
}

static void expect_logits(struct expected *e, const struct head *h, const float *q, uint32_t n,
                          double scale)
{
    double was[PACKED], is[PACKED], mean_was = 0, mean_is = 0;
    n = n < PACKED ? n : PACKED;
    for (uint32_t t = 0; t < n; t++) {
        mean_was += (was[t] = logit(q, h->k + (size_t)t * STORED, scale)) / n;
        mean_is += (is[t] = logit(q, h->seen_k + (size_t)t * STORED, scale)) / n;
    }
    for (uint32_t t = 0; t < n; t++)
        add(&e->logits, is[t] - mean_is, was[t] - mean_was);
}

// Packed tokens [sink, packed), or fewer of them where the newest are in full precision.
static void expect_head(struct expected *e, const struct head *h, const float *q,
                        const uint32_t *position, double scale, uint32_t sink, uint32_t own,
                        uint32_t budget)
{
    double was[DIM], is[DIM];
    for (uint32_t t = sink; t < PACKED; t++)
        for (size_t i = (size_t)t * STORED; i < (size_t)t * STORED + DIM; i++) {
            add(&e->k, (double)h->seen_k[i], (double)h->k[i]);
            add(&e->v, (double)h->seen_v[i], (double)h->v[i]);
        }
    const struct {
        struct sums *sums;
        uint32_t first, last;
        bool v;
    } outputs[] = {{&e->out_windows, 32, TOKENS - 128, true},
                   {&e->out_bytes, sink, budget, true},
                   {&e->out_k, sink, own, false}};
    for (uint32_t i = 0; i < QUERIES; i++) {
        uint32_t n = position[i] + 1;
        expect_logits(e, h, q + (size_t)i * DIM, n, scale);
        attend(h, q + (size_t)i * DIM, n, scale, n, n, true, was);
        for (int o = 0; o < 3; o++) {
            attend(h, q + (size_t)i * DIM, n, scale, outputs[o].first, outputs[o].last,
                   outputs[o].v, is);
            for (uint32_t c = 0; c < DIM; c++)
                add(outputs[o].sums, is[c], was[c]);
        }
    }
}

// packed_bytes: of a token and KV head with head_dim 128, as docs/formats.md has them.
static struct expected expect(const struct quality_data *d, const char *name, double packed_bytes,
                              double scale)
{
    struct quality_method m = method(name);
    struct quality_data wide = pad(d);
    struct quality_layer l;
    struct expected e = {0};
    const struct kvq_shape s = {.q_heads = HEADS,
                                .kv_heads = HEADS,
                                .k_dim = STORED,
                                .v_dim = STORED,
                                .dtype = KVQ_F16,
                                .scale = 1};
    size_t all = (size_t)TOKENS * STORED;
    float *rows = take((4 + 2 * HEADS) * all, sizeof *rows), *by_token = rows + 4 * all;
    struct head h = {rows, rows + all, rows + 2 * all, rows + 3 * all};
    for (size_t i = 0; i < HEADS * all; i++) {
        size_t head = i / all, t = i / STORED % TOKENS, to = (t * HEADS + head) * STORED;
        by_token[to + i % STORED] = wide.k[i];
        by_token[HEADS * all + to + i % STORED] = wide.v[i];
    }
    assert_int_equal(quality_layer_open(&l, &m, &s, 0, TOKENS, TOKENS, NULL, text, sizeof text), 0);
    quality_layer_append(&l, by_token, by_token + HEADS * all, TOKENS);
    quality_layer_settle(&l, 0);
    assert_int_equal(l.packed, PACKED);
    uint32_t sink = m.f.sink_tokens, unit = m.f.unit_tokens;
    uint32_t own = (TOKENS - m.f.recent_tokens) / unit * unit;
    uint32_t budget = 0; // whole blocks, so that the others are worth no more
    while (budget * packed_bytes + (TOKENS - budget + sink) * (double)RAW_BYTES >
           budget_bits / 8 * 2 * DIM * TOKENS)
        budget += KVQ_BLOCK_TOKENS;
    assert_in_range(budget, 1, PACKED - 1);
    for (uint32_t i = 0; i < HEADS; i++) {
        quality_layer_read(&l, false, i, h.k, h.v);
        quality_layer_read(&l, true, i, h.seen_k, h.seen_v);
        expect_head(&e, &h, d->q + (size_t)i * QUERIES * DIM, d->position, scale, sink,
                    own < PACKED ? own : PACKED, budget);
    }
    quality_layer_close(&l);
    quality_data_free(&wide);
    free(rows);
    return e;
}

// ---- Captures ----

// Of one step of layer 0, [token][head][dim] of its row.
static void write_capture(const char *path, const struct kvq_layer *rows, uint32_t n_rows, float *k,
                          float *v, float *q)
{
    struct kvq_capture_options o = {
        .size = sizeof o, .layers = rows, .n_layers = n_rows, .model = "m", .queries = 1};
    struct kvq_entry e = {.session = 1, .append = TOKENS, .queries = TOKENS};
    kvq_capture *capture;
    size_t row = (size_t)TOKENS * HEADS * sizeof *k;
    kvq_buffer buffers[3] = {{.host = (void *)k, .bytes = row * rows->k_dim, .id = 1},
                             {.host = (void *)v, .bytes = row * rows->v_dim, .id = 2},
                             {.host = (void *)q, .bytes = row * GQA * rows->k_dim, .id = 3}};
    struct kvq_work work = {
        .k = kvq_tensor_make(&buffers[0], 0, HEADS, rows->k_dim, KVQ_DTYPE_F32),
        .v = kvq_tensor_make(&buffers[1], 0, HEADS, rows->v_dim, KVQ_DTYPE_F32),
        .q = kvq_tensor_make(&buffers[2], 0, HEADS * GQA, rows->k_dim, KVQ_DTYPE_F32)};
    assert_int_equal(kvq_capture_open(path, &o, &capture), KVQ_OK);
    assert_int_equal(kvq_capture_append(capture, &work, &e, 1), KVQ_OK);
    assert_int_equal(kvq_capture_close(&capture), KVQ_OK);
}

static void capture_data(const char *path, const struct quality_data *d)
{
    const struct kvq_layer row = {
        .q_heads = HEADS * GQA, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = 1};
    size_t n = (size_t)HEADS * TOKENS * DIM;
    float *k = take((2 + GQA) * n, sizeof *k), *v = k + n, *q = v + n;
    for (size_t h = 0; h < HEADS; h++) {
        for (size_t t = 0; t < TOKENS; t++) {
            size_t from = (h * TOKENS + t) * DIM, to = (t * HEADS + h) * DIM;
            memcpy(k + to, d->k + from, DIM * sizeof *k);
            memcpy(v + to, d->v + from, DIM * sizeof *v);
        }
        for (size_t i = 0; i < QUERIES; i++)
            memcpy(q + ((d->position[i] * HEADS + h) * GQA + i % GQA) * DIM,
                   d->q + (h * QUERIES + i) * DIM, DIM * sizeof *q);
    }
    write_capture(path, &row, 1, k, v, q);
    free(k);
}

struct files {
    char capture[40], results[40];
};

static struct files open_files(void)
{
    struct files f = {"/tmp/kvq-capture-XXXXXX", "/tmp/kvq-results-XXXXXX"};
    int fds[] = {mkstemp(f.capture), mkstemp(f.results)};
    assert_true(fds[0] >= 0 && fds[1] >= 0);
    close(fds[0]);
    close(fds[1]);
    return f;
}

static void close_files(const struct files *f)
{
    unlink(f->capture);
    unlink(f->results);
}

static void run(const struct files *f, const struct quality_options *o,
                int (*part)(const struct quality_options *, struct quality_results *))
{
    struct quality_results r;
    assert_true(quality_results_open(&r, f->results));
    assert_int_equal(part(o, &r), 0);
    quality_results_close(&r);
}

// A number of the line of a method (and of queries, where aim is not negative).
static double number(const struct files *f, const char *name, double aim, const char *field)
{
    char line[2048];
    double x = NAN;
    FILE *file = fopen(f->results, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        cJSON *j = cJSON_Parse(line);
        const cJSON *has = cJSON_GetObjectItem(j, "aim"), *value = cJSON_GetObjectItem(j, field);
        if (strcmp(cJSON_GetObjectItem(j, "method")->valuestring, name) == 0 &&
            (aim < 0 || has->valuedouble == aim) && cJSON_IsNumber(value))
            x = value->valuedouble;
        cJSON_Delete(j);
    }
    fclose(file);
    return x;
}

static void expect_number(const struct files *f, const char *name, double aim, const char *field,
                          struct sums want)
{
    double is = number(f, name, aim, field), was = relative(want);
    if (!(fabs(is - was) < 1e-6 * was) || was < 1e-3)
        fail_msg("%s, aim %g: %s is %.9g and not %.9g", name, aim, field, is, was);
}

// ---- Tests ----

PLAIN_TEST(captured)
{
    static const struct {
        const char *name;
        double packed_bytes;
    } formats[] = {{"oscar2", 98}, {"kvq2", 88}};
    struct files f = open_files();
    struct quality_data d = make();
    struct quality_options o = {.capture = f.capture,
                                .tokens = TOKENS,
                                .queries = QUERIES,
                                .outliers = 1,
                                .budget_bits = budget_bits,
                                .method = {method("oscar2"), method("kvq2")},
                                .n_methods = 2};
    capture_data(f.capture, &d);
    run(&f, &o, quality_part_captured);
    for (int aimed = 0; aimed < 2; aimed++) {
        double aim = aimed ? 0.5 : 0, scale = 1 / sqrt(DIM);
        if (aimed)
            quality_aim(&d, 0.5, 1, scale);
        for (int i = 0; i < 2; i++) {
            const char *name = formats[i].name;
            struct expected e = expect(&d, name, formats[i].packed_bytes, scale);
            expect_number(&f, name, aim, "k", e.k);
            expect_number(&f, name, aim, "v", e.v);
            expect_number(&f, name, aim, "logits", e.logits);
            expect_number(&f, name, aim, "out_k", e.out_k);
            expect_number(&f, name, aim, "out_windows", e.out_windows);
            expect_number(&f, name, aim, "out_bytes", e.out_bytes);
            assert_true(number(&f, name, aim, "head_dim") == DIM);
        }
    }
    quality_data_free(&d);
    close_files(&f);
}

PLAIN_TEST(bits)
{
    struct files f = open_files();
    struct quality_options o = {.head_dim = DIM,
                                .method = {method("kvq2"), method("f16"), method("int2-token")},
                                .n_methods = 3};
    run(&f, &o, quality_part_formats);
    assert_true(number(&f, "kvq2", -1, "bytes") == 88);
    assert_true(fabs(number(&f, "kvq2", -1, "bits") - 11 / 3.0) < 1e-12);
    assert_true(fabs(number(&f, "f16", -1, "bits") - 64 / 3.0) < 1e-12);
    assert_true(number(&f, "int2-token", -1, "bits") == 3);
    // What kvqd says of such a layer is the same.
    struct kvq_shape s = {.q_heads = 1, .kv_heads = 1, .dtype = KVQ_F16, .scale = 1};
    kvq_shape_set_dims(&s, DIM, DIM);
    assert_true(fabs(kvq_bits_per_value(&o.method[0].f, &s) - 11 / 3.0) < 1e-12);
    close_files(&f);
}

static void expect_refused(const struct kvq_layer *rows, uint32_t n_rows, const char *why)
{
    struct files f = open_files();
    struct quality_options o = {.capture = f.capture, .tokens = TOKENS, .queries = QUERIES};
    struct quality_data *layer;
    struct problem p = {0};
    uint32_t layers;
    size_t n = (size_t)TOKENS * HEADS * GQA * 512;
    float *zeros = take(n, sizeof *zeros);
    write_capture(f.capture, rows, n_rows, zeros, zeros, zeros);
    assert_int_equal(quality_layers_make(&o, &layer, &layers, &p), -1);
    if (!strstr(p.text, why))
        fail_msg("'%s' is not in '%s'", why, p.text);
    quality_layers_free(&layer, layers);
    free(zeros);
    close_files(&f);
}

PLAIN_TEST(refused)
{
    const struct kvq_layer good = {
        .q_heads = HEADS * GQA, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = 1};
    struct kvq_layer rows[2] = {good, good};
    rows[0].v_dim = 64;
    expect_refused(rows, 1, "layer 0 has head_dim 96 for K and 64 for V, and kvqd stores equal");
    rows[0].k_dim = rows[0].v_dim = 512;
    expect_refused(rows, 1, "layer 0 has head_dim 512, and kvqd stores up to 256");
    rows[0] = good;
    rows[1].kv_from = 1; // layer 0's
    expect_refused(rows, 2, "layer 1 has 0 KV heads, it reads another layer's cache");
}

// Trained as if the zeros had been handed over, and measured likewise.
PLAIN_TEST(codebooks)
{
    struct quality_method m = method("vecinfer-2");
    struct quality_data d = make(), wide = pad(&d);
    struct quality_book own, padded;
    assert_true(quality_book_train(&own, &m, &d, 1, text, sizeof text));
    assert_true(quality_book_train(&padded, &m, &wide, 1, text, sizeof text));
    assert_memory_equal(own.book.smooth, padded.book.smooth, HEADS * STORED * sizeof(float));
    for (int v = 0; v < 2; v++) {
        const struct kvq_side *side = v ? &m.f.v : &m.f.k;
        size_t bytes = (sizeof(float) * side->vector) << side->bits;
        assert_memory_equal(v ? own.book.v : own.book.k, v ? padded.book.v : padded.book.k, bytes);
    }
    // Zeros of Q hide what K's have become: these errors are the same for both.
    struct quality_error e, want;
    double scale = 1 / sqrt(DIM);
    assert_int_equal(quality_measure(&m, &d, &own.book, scale, 4, &e, text, sizeof text), 0);
    assert_int_equal(quality_measure(&m, &wide, &padded.book, scale, 4, &want, text, sizeof text),
                     0);
    assert_true(fabs(e.logits - want.logits) < 1e-9 && fabs(e.out_k - want.out_k) < 1e-9);
    assert_true(e.logits > 0.01 && e.logits < 1);
    // A capture may be of another model than the one that codebooks are made of.
    const struct quality_books books = {.layer = &own, .book = &own.book, .layers = 1};
    struct problem p = {0};
    assert_int_equal(quality_books_check(&books, &m, &d, 1, &p), 0);
    assert_int_equal(quality_books_check(&books, &m, &d, 2, &p), -1);
    assert_non_null(strstr(p.text, "--model has 1 layers, and what is measured has 2"));
    p = (struct problem){0};
    d.dim = 200;
    assert_int_equal(quality_books_check(&books, &m, &d, 1, &p), -1);
    assert_non_null(strstr(p.text, "2 KV heads stored with head_dim 128, and what is measured 2 "
                                   "with 256"));
    quality_book_free(&own);
    quality_book_free(&padded);
    quality_data_free(&d);
    quality_data_free(&wide);
}

// A model with such heads: its caches in this process have rows as wide as the model's.
PLAIN_TEST(model)
{
    enum { N = 40 };
    const struct config c = {.q_heads = HEADS * GQA,
                             .kv_heads = HEADS,
                             .head_dim = DIM,
                             .layers = 1,
                             .window_from = UINT32_MAX};
    struct quality_method m = method("f16");
    struct quality_data d = make();
    struct quality_cache cache;
    struct engine e;
    struct problem p = {0};
    uint32_t ids[N] = {0};
    assert_int_equal(quality_engine_open(&e, &c, N, &p), 0);
    assert_int_equal(quality_cache_open(&cache, &e, &c, &m, N, NULL, true, &p), 0);
    size_t q = (size_t)N * HEADS * GQA * DIM, kv = (size_t)N * HEADS * DIM;
    for (size_t i = 0; i < q; i++)
        e.q[i] = 0.1f * d.k[i];
    memcpy(e.k, d.k, kv * sizeof *e.k);
    memcpy(e.v, d.v, kv * sizeof *e.v);
    assert_int_equal(cache_begin(&cache.base, ids, N, &p), 0);
    assert_int_equal(cache_attend(&cache.base, 0, &p), 0);
    assert_memory_equal(cache.queries, e.q, q * sizeof *e.q);
    float *k = take((size_t)4 * N * STORED, sizeof *k), *v = k + (size_t)N * STORED;
    for (uint32_t head = 0; head < HEADS * GQA; head++) {
        double out[DIM];
        float *rows = v + (size_t)N * STORED; // K and V of the head, [N][DIM]
        quality_layer_read(&cache.layer[0], true, head / GQA, rows, rows + (size_t)N * DIM);
        for (size_t t = 0; t < N; t++) {
            memcpy(k + t * STORED, rows + t * DIM, DIM * sizeof *k);
            memcpy(v + t * STORED, rows + (N + t) * DIM, DIM * sizeof *v);
            for (size_t i = 0, at = (t * HEADS + head / GQA) * DIM; i < DIM; i++) {
                assert_true(fabsf(k[t * STORED + i] - e.k[at + i]) < 0.01f);
                assert_true(fabsf(v[t * STORED + i] - e.v[at + i]) < 0.01f);
            }
        }
        struct head h = {k, v, k, v};
        attend(&h, e.q + ((size_t)(N - 1) * HEADS * GQA + head) * DIM, N, 1 / sqrt(DIM), 0, 0, true,
               out);
        const float *got = e.out + ((size_t)(N - 1) * HEADS * GQA + head) * DIM;
        for (uint32_t i = 0; i < DIM; i++)
            if (!(fabs((double)got[i] - out[i]) < 1e-4))
                fail_msg("query head %u, channel %u: %g and not %g", head, i, (double)got[i],
                         out[i]);
    }
    free(k);
    quality_cache_close(&cache);
    quality_engine_close(&e);
    quality_data_free(&d);
}

int main(void)
{
    return run_all(NULL, NULL);
}
