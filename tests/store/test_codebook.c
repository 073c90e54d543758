// SPDX-License-Identifier: Apache-2.0
//
// Codebook files: what was saved is what is opened; nothing damaged, cut or hostile gets in; a
// codebook serves the layers and formats that it was made for, and no others.
#define XXH_INLINE_ALL
#include <math.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "proto/status.h"
#include "storage/codebook.h"
#include "tests/kits/unit.h"

static char folder[] = "/tmp/kvq-codebook-XXXXXX";
static char path[64];
static char text[600];

static struct kvq_format format_of(const char *name)
{
    struct kvq_format f;
    if (kvq_format_parse(name, &f, text, sizeof text))
        fail_msg("%s", text);
    return f;
}

// Numbers that tell where they are from.
static float value(uint32_t layer, int part, size_t i)
{
    return (float)(layer * 4 + (uint32_t)part) + (float)(i % 10007) * 0x1p-14f;
}

static void fill(struct kvq_codebook *book)
{
    bool global = kvq_codebook_head(book)->flags & KVQ_CODEBOOK_GLOBAL;
    for (uint32_t layer = 0; layer < kvq_codebook_head(book)->layers; layer++) {
        struct kvq_codebook_tables t;
        kvq_codebook_tables(book, layer, &t);
        uint32_t tag = global ? 0 : layer;
        for (size_t i = 0; i < t.smooth_n; i++)
            t.smooth[i] = value(layer, 1, i);
        for (size_t i = 0; i < t.k_n; i++)
            t.k[i] = -value(tag, 2, i);
        for (size_t i = 0; i < t.v_n; i++)
            t.v[i] = value(tag, 3, i);
    }
}

static struct kvq_codebook *new_book(const char *format, uint32_t flags,
                                     const struct kvq_codebook_row *rows, uint32_t layers)
{
    struct kvq_format f = format_of(format);
    const struct kvq_codebook_plan plan = {
        .format = &f, .rows = rows, .layers = layers, .flags = flags, .model = "tiny\n1"};
    struct kvq_codebook *book;
    if (kvq_codebook_new(&plan, &book, text, sizeof text))
        fail_msg("%s", text);
    return book;
}

static void save(struct kvq_codebook *book)
{
    if (kvq_codebook_save(book, path, "seed=1", text, sizeof text))
        fail_msg("%s", text);
}

static struct kvq_codebook *reopen(void)
{
    struct kvq_codebook *book;
    if (kvq_codebook_open(path, &book, text, sizeof text))
        fail_msg("%s", text);
    return book;
}

// ---- Round trips ----

// Every table of a layer, found as kernels find it, holds its own numbers.
static void expect_layer(const struct kvq_codebook *book, uint32_t layer)
{
    const struct kvq_codebook_header *h = kvq_codebook_head(book);
    const struct kvq_codebook_row *row = kvq_codebook_row(book, layer);
    uint32_t tag = h->flags & KVQ_CODEBOOK_GLOBAL ? 0 : layer;
    struct kvq_book b;
    kvq_codebook_layer(book, layer, &b);
    assert_int_equal(b.smooth != NULL, (h->flags & KVQ_CODEBOOK_FACTORS) != 0);
    for (size_t i = 0; b.smooth && i < (size_t)row->kv_heads * row->dim; i++)
        assert_true(b.smooth[i] == value(layer, 1, i));
    size_t table = (size_t)h->v_vector << h->v_bits, subs = row->dim / h->v_vector, at = 0;
    for (uint32_t head = 0; head < row->kv_heads; head++) {
        if (!(h->flags & KVQ_CODEBOOK_OWN_HEADS))
            at = 0;
        for (uint32_t m = 0; m < subs; m++) {
            if (m > 0 && !(h->flags & KVQ_CODEBOOK_OWN_SUBS))
                at -= table;
            for (size_t i = 0; i < table; i++, at++)
                assert_true(b.v[head * b.v_head + m * b.v_sub + i] == value(tag, 3, at));
        }
    }
    assert_true(b.k == NULL || b.k[0] == -value(tag, 2, 0));
}

static void round_trip(const char *format, uint32_t flags)
{
    const struct kvq_codebook_row rows[] = {{2, 64}, {0, 0}, {2, 64}, {2, 64}};
    struct kvq_codebook *book = new_book(format, flags, rows, 4), *back;
    fill(book);
    assert_true(kvq_codebook_id(book) == 0);
    save(book);
    back = reopen();
    assert_string_equal(kvq_codebook_format(back), format);
    assert_string_equal(kvq_codebook_head(back)->model, "tiny?1");
    assert_string_equal(kvq_codebook_head(back)->made, "seed=1");
    assert_true(kvq_codebook_id(back) != 0 && kvq_codebook_id(back) == kvq_codebook_id(book));
    assert_int_equal(kvq_codebook_row(back, 1)->kv_heads, 0);
    for (uint32_t layer = 0; layer < 4; layer += layer == 0 ? 2 : 1)
        expect_layer(back, layer);
    kvq_codebook_close(&back);
    kvq_codebook_close(&book);
    assert_null(book);
}

PLAIN_TEST(test_round_trips)
{
    const char *formats[] = {"vecinfer-2", "vecinfer-1.25", "million-4", "int8+vecinfer-2"};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        for (uint32_t flags = 0; flags < KVQ_CODEBOOK_FACTORS; flags++)
            round_trip(formats[i], flags);
}

PLAIN_TEST(test_id_follows_values)
{
    const struct kvq_codebook_row row = {1, 64};
    struct kvq_codebook *book = new_book("vecinfer-2", 0, &row, 1);
    struct kvq_codebook_tables t;
    save(book);
    uint64_t before = kvq_codebook_id(book);
    save(book);
    assert_true(kvq_codebook_id(book) == before);
    kvq_codebook_tables(book, 0, &t);
    t.v[t.v_n - 1] = 0x1p-20f;
    save(book);
    assert_true(kvq_codebook_id(book) != before);
    kvq_codebook_close(&book);
}

// ---- Damage ----

struct bytes {
    uint8_t *at;
    size_t n;
};

// The smallest file there can be.
static struct bytes small_file(void)
{
    const struct kvq_codebook_row row = {1, 64};
    struct kvq_codebook *book = new_book("vecinfer-4", 0, &row, 1);
    fill(book);
    save(book);
    struct bytes b = {.n = kvq_codebook_head(book)->bytes};
    kvq_codebook_close(&book);
    b.at = malloc(b.n + 1);
    FILE *file = fopen(path, "rb");
    assert_true(b.at && file && fread(b.at, 1, b.n + 1, file) == b.n);
    fclose(file);
    return b;
}

static int open_bytes(const uint8_t *data, size_t n)
{
    struct kvq_codebook *book = NULL;
    int fd = memfd_create("book", MFD_CLOEXEC);
    assert_true(fd >= 0 && write(fd, data, n) == (ssize_t)n);
    text[0] = '\0';
    int rc = kvq_codebook_open_fd(fd, "book", &book, text, sizeof text);
    assert_int_equal(rc == KVQ_OK, book != NULL);
    assert_int_equal(rc != KVQ_OK, text[0] != '\0');
    kvq_codebook_close(&book);
    return rc;
}

PLAIN_TEST(test_prefixes)
{
    struct bytes b = small_file();
    assert_int_equal(open_bytes(b.at, b.n), KVQ_OK);
    for (size_t n = 0; n < b.n; n++)
        assert_int_not_equal(open_bytes(b.at, n), KVQ_OK);
    b.at[b.n] = 0;
    assert_int_not_equal(open_bytes(b.at, b.n + 1), KVQ_OK);
    free(b.at);
}

PLAIN_TEST(test_flipped_bits)
{
    struct bytes b = small_file();
    for (size_t i = 0; i < b.n; i++) {
        b.at[i] ^= (uint8_t)(1u << i % 8);
        assert_int_not_equal(open_bytes(b.at, b.n), KVQ_OK);
        b.at[i] ^= (uint8_t)(1u << i % 8);
    }
    assert_int_equal(open_bytes(b.at, b.n), KVQ_OK);
    free(b.at);
}

// Makes the checks right, so that only what the file says can be held against it.
static void mend(struct bytes *b)
{
    struct kvq_codebook_header h;
    memcpy(&h, b->at, sizeof h);
    size_t rows = (h.layers <= KVQ_MAX_LAYERS ? h.layers : 0) * sizeof(struct kvq_codebook_row);
    h.data_check = XXH3_64bits(b->at + sizeof h + rows, b->n - sizeof h - rows);
    h.check = 0;
    memcpy(b->at, &h, sizeof h);
    h.check = XXH3_64bits(b->at, sizeof h + rows);
    memcpy(b->at, &h, sizeof h);
}

static void expect_refused(const struct bytes *good, size_t at, const void *with, size_t n,
                           int code, const char *saying)
{
    struct bytes b = {malloc(good->n), good->n};
    memcpy(b.at, good->at, good->n);
    memcpy(b.at + at, with, n);
    mend(&b);
    int rc = open_bytes(b.at, b.n);
    if (rc != code || !strstr(text, saying))
        fail_msg("expected code %d and \"%s\", got %d and \"%s\"", code, saying, rc, text);
    free(b.at);
}

#define FIELD(name) offsetof(struct kvq_codebook_header, name)

PLAIN_TEST(test_hostile_headers)
{
    struct bytes b = small_file();
    const size_t row = sizeof(struct kvq_codebook_header);
    const struct {
        size_t at, n;
        uint64_t with;
        int code;
        const char *saying;
    } cases[] = {
        {FIELD(magic), 1, 'X', KVQ_E_INVALID, "does not begin with KVQBOOK1"},
        {FIELD(version), 4, 2, KVQ_E_INVALID, "version 2"},
        {FIELD(layers), 4, 0, KVQ_E_LIMIT, "0 layers"},
        {FIELD(layers), 4, 257, KVQ_E_LIMIT, "257 layers"},
        {FIELD(layers), 4, 2, KVQ_OK, ""}, // the zeros are the row of a layer without keys
        {FIELD(flags), 4, 0x28, KVQ_E_INVALID, "flags 0x28"},
        {FIELD(flags), 4, 0x18, KVQ_E_INVALID, "not finished"},
        {FIELD(flags), 4, 0, KVQ_E_FORMAT, "without factors"},
        {FIELD(flags), 4, 10, KVQ_OK, ""}, // of one head the tables are the same
        {FIELD(dtype), 1, 1, KVQ_E_DTYPE, "dtype 1"},
        {FIELD(bytes), 8, 1 << 20, KVQ_E_INVALID, "header says 1048576"},
        {FIELD(k_bits), 1, 12, KVQ_E_FORMAT, "K has 12 bits"},
        {FIELD(v_vector), 1, 0, KVQ_E_FORMAT, "V 8 for 0"},
        {FIELD(k_rotation), 1, 2, KVQ_E_FORMAT, "rotations 2"},
        {FIELD(zero), 1, 1, KVQ_E_INVALID, "has to be 0"},
        {FIELD(format), 1, 'w', KVQ_E_FORMAT, "not known here"},
        {FIELD(format), 1, '\n', KVQ_E_INVALID, "format's name"},
        {FIELD(made) + 100, 1, 'x', KVQ_E_INVALID, "how it was made"},
        {row, 2, 0, KVQ_E_LIMIT, "0 KV heads"},
        {row, 2, 257, KVQ_E_LIMIT, "257 KV heads"},
        {row, 4, 0, KVQ_E_INVALID, "no layer"},
        {row + 2, 2, 96, KVQ_E_LIMIT, "head_dim 96"},
        {row + 2, 2, 128, KVQ_E_INVALID, "its tables need"},
        {row + 4, 1, 1, KVQ_E_INVALID, "check of its tables"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_refused(&b, cases[i].at, &cases[i].with, cases[i].n, cases[i].code, cases[i].saying);
    free(b.at);
}

PLAIN_TEST(test_hostile_values)
{
    struct bytes b = small_file();
    const size_t factors = 1088, tables = factors + 64 * sizeof(float);
    const float bad_factors[] = {0, -1, NAN, INFINITY, 0x1p-25f, 0x1p65f};
    const float bad_centroids[] = {NAN, INFINITY, -INFINITY, -0x1p120f};
    for (size_t i = 0; i < sizeof bad_factors / sizeof *bad_factors; i++)
        expect_refused(&b, factors + 63 * 4, &bad_factors[i], 4, KVQ_E_INVALID,
                       "smoothing factor 63");
    for (size_t i = 0; i < sizeof bad_centroids / sizeof *bad_centroids; i++) {
        expect_refused(&b, tables, &bad_centroids[i], 4, KVQ_E_INVALID, "number 0 of the centr");
        expect_refused(&b, b.n - 4, &bad_centroids[i], 4, KVQ_E_INVALID, "number 1023 of");
    }
    free(b.at);
}

PLAIN_TEST(test_no_files)
{
    struct kvq_codebook *book;
    assert_int_equal(kvq_codebook_open("/nonexistent/x", &book, text, sizeof text), KVQ_E_SYSTEM);
    assert_int_equal(kvq_codebook_open("/dev/zero", &book, text, sizeof text), KVQ_E_INVALID);
    assert_says(text, "is not a file");
    assert_null(book);
}

// ---- Making and saving ----

static void expect_no_plan(const char *name, uint32_t flags, const struct kvq_codebook_row *rows,
                           uint32_t layers, const char *saying)
{
    struct kvq_format f = format_of(name);
    const struct kvq_codebook_plan plan = {&f, rows, layers, flags, NULL};
    struct kvq_codebook *book;
    assert_int_not_equal(kvq_codebook_new(&plan, &book, text, sizeof text), KVQ_OK);
    assert_null(book);
    assert_says(text, saying);
}

PLAIN_TEST(test_impossible_plans)
{
    static struct kvq_codebook_row large[KVQ_MAX_LAYERS];
    const struct kvq_codebook_row fine = {2, 64}, odd = {2, 80}, mixed[] = {{2, 64}, {4, 64}};
    for (int i = 0; i < KVQ_MAX_LAYERS; i++)
        large[i] = (struct kvq_codebook_row){256, 256};
    expect_no_plan("oscar2", 0, &fine, 1, "oscar2 has no codebooks");
    expect_no_plan("vecinfer-2", 0, &odd, 1, "head_dim 80");
    expect_no_plan("vecinfer-2", 0, &fine, 0, "0 layers");
    expect_no_plan("vecinfer-2", KVQ_CODEBOOK_GLOBAL | KVQ_CODEBOOK_OWN_HEADS, mixed, 2,
                   "layer 1 has 4 KV heads");
    expect_no_plan("vecinfer-3", KVQ_CODEBOOK_OWN_HEADS | KVQ_CODEBOOK_OWN_SUBS, large,
                   KVQ_MAX_LAYERS, "1073741824 are allowed");
}

// The first kilobyte can be written, and no more.
static void expect_full_disk(struct kvq_codebook *book)
{
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 1024;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int rc = kvq_codebook_save(book, path, "", text, sizeof text);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(rc, KVQ_E_SYSTEM);
    assert_says(text, "cannot be written");
}

PLAIN_TEST(test_save_keeps_the_old_file)
{
    const struct kvq_codebook_row row = {1, 64};
    struct kvq_codebook *book = new_book("vecinfer-2", 0, &row, 1), *back;
    struct kvq_codebook_tables t;
    char temporary[100];
    save(book);
    uint64_t id = kvq_codebook_id(book);
    kvq_codebook_tables(book, 0, &t);
    t.smooth[3] = 0;
    assert_int_equal(kvq_codebook_save(book, path, "", text, sizeof text), KVQ_E_INVALID);
    assert_says(text, "smoothing factor 3 is 0");
    t.smooth[3] = 1;
    assert_int_equal(kvq_codebook_save(book, folder, "", text, sizeof text), KVQ_E_INVALID);
    assert_int_equal(kvq_codebook_save(book, "/nonexistent/x", "", text, sizeof text),
                     KVQ_E_SYSTEM);
    expect_full_disk(book);
    back = reopen();
    assert_true(kvq_codebook_id(back) == id);
    snprintf(temporary, sizeof temporary, "%s.tmp-%d", path, (int)getpid());
    assert_int_not_equal(access(temporary, F_OK), 0);
    kvq_codebook_close(&back);
    kvq_codebook_close(&book);
}

PLAIN_TEST(test_parts)
{
    const struct kvq_codebook_row row = {1, 64};
    struct kvq_codebook *book = new_book("vecinfer-2", 0, &row, 1), *back;
    assert_int_equal(kvq_codebook_save_part(book, path, "x", text, sizeof text), KVQ_OK);
    assert_int_equal(kvq_codebook_open(path, &back, text, sizeof text), KVQ_E_INVALID);
    assert_says(text, "is not finished");
    assert_int_equal(kvq_codebook_open_part(path, &back, text, sizeof text), KVQ_OK);
    kvq_codebook_close(&back);
    save(book);
    assert_int_equal(kvq_codebook_open_part(path, &back, text, sizeof text), KVQ_E_INVALID);
    back = reopen();
    kvq_codebook_close(&back);
    kvq_codebook_close(&book);
}

// ---- Fitting ----

static struct kvq_shape shape_of(uint16_t kv_heads, uint16_t dim, uint8_t v_rotation)
{
    return (struct kvq_shape){.q_heads = kv_heads,
                              .kv_heads = kv_heads,
                              .k_dim = dim,
                              .v_dim = dim,
                              .dtype = KVQ_F16,
                              .v_rotation = v_rotation,
                              .scale = 1};
}

static void expect_fit(const struct kvq_codebook *book, uint32_t layer, const char *name,
                       struct kvq_shape s, const char *refusal)
{
    struct kvq_format f = format_of(name);
    text[0] = '\0';
    bool fits = kvq_codebook_fits(book, layer, &f, &s, text, sizeof text);
    if (fits != (refusal == NULL) || (refusal && !strstr(text, refusal)))
        fail_msg("%s, layer %u: %s", name, layer, *text ? text : "fits");
}

PLAIN_TEST(test_fits)
{
    const struct kvq_codebook_row rows[] = {{2, 64}, {0, 0}};
    struct kvq_codebook *book = new_book("vecinfer-2", 0, rows, 2);
    struct kvq_shape good = shape_of(2, 64, KVQ_V_ROT_NONE);
    expect_fit(book, 0, "vecinfer-2", good, NULL);
    expect_fit(book, 0, "vecinfer-2", shape_of(2, 64, KVQ_V_ROT_ENGINE), NULL);
    expect_fit(book, 0, "vecinfer-2-w64", good, NULL);
    expect_fit(book, 0, "vecinfer-2+kivi4", good, NULL);
    expect_fit(book, 0, "kivi4+vecinfer-2", good, NULL);
    expect_fit(book, 9, "oscar2", good, NULL);
    expect_fit(book, 2, "vecinfer-2", good, "no layer 2");
    expect_fit(book, 1, "vecinfer-2", good, "layer 1 has 0 KV heads");
    expect_fit(book, 0, "vecinfer-2", shape_of(4, 64, 0), "the session's has 4 of 64");
    expect_fit(book, 0, "vecinfer-2", shape_of(2, 128, 0), "the session's has 2 of 128");
    expect_fit(book, 0, "vecinfer-4", good, "8 bits for 4 channels; the format needs 8 for 2");
    expect_fit(book, 0, "vecinfer-2-norot", good, "rotation 1; the format has 0");
    expect_fit(book, 0, "vecinfer-2-nosmooth", good, "with smoothing");
    expect_fit(book, 0, "vecinfer-2", shape_of(2, 64, KVQ_V_ROT_DAEMON), "values with rotation 0");
    kvq_codebook_close(&book);
    book = new_book("vecinfer-2+kivi4", 0, rows, 2);
    expect_fit(book, 0, "vecinfer-2+kivi4", good, NULL);
    expect_fit(book, 0, "vecinfer-2", good, "no tables for V");
    kvq_codebook_close(&book);
}

// ---- The folder ----

static int set_up(void **unused)
{
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/book", folder);
    return 0;
}

static int tear_down(void **unused)
{
    unlink(path);
    return rmdir(folder); // fails if a temporary file was left behind
}

int main(void)
{
    return run_all(set_up, tear_down);
}
