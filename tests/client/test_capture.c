// SPDX-License-Identifier: Apache-2.0
//
// Capture files: what libkvq writes is what storage reads, whatever the layout of the tensors;
// steps done again and truncated sessions become new sequences; damaged files are refused.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/internal.h"
#include "proto/capture.h"
#include "storage/capture.h"

enum { DIM = 64, KV_HEADS = 2, Q_HEADS = 4, LAYERS = 3, ROWS = 64, PAGES = 32 };

static char path[] = "/tmp/kvq-capture-XXXXXX";
static char text[400];

// K, V and Q of ROWS tokens in a buffer as an engine holds them. Numbers tell where they are from
// and are exact in fp16: token % 64 in the ones, head in steps of 64, part in steps of 512.
struct tensors {
    float *memory;
    kvq_buffer buffer;
    struct kvq_work work;
};

static float number(int part, uint32_t head, uint64_t token, uint32_t channel)
{
    return (float)(part * 512 + (int)head * 64 + (int)(token % 64)) + (channel == 5 ? 0.5f : 0);
}

static void fill(float *to, int part, uint32_t heads, uint64_t first)
{
    for (uint32_t t = 0; t < ROWS; t++)
        for (uint32_t h = 0; h < heads; h++)
            for (uint32_t c = 0; c < DIM; c++)
                to[((size_t)t * heads + h) * DIM + c] = number(part, h, first + t, c);
}

// Row r of each tensor holds the numbers of token `first` + r.
static void make_tensors(struct tensors *x, uint64_t first)
{
    size_t k = (size_t)ROWS * KV_HEADS * DIM, q = (size_t)ROWS * Q_HEADS * DIM;
    memset(x, 0, sizeof *x);
    x->memory = malloc((2 * k + q) * sizeof(float));
    assert_non_null(x->memory);
    x->buffer =
        (kvq_buffer){.host = (void *)x->memory, .bytes = (2 * k + q) * sizeof(float), .id = 1};
    fill(x->memory, 0, KV_HEADS, first);
    fill(x->memory + k, 1, KV_HEADS, first);
    fill(x->memory + 2 * k, 2, Q_HEADS, first);
    x->work.k = kvq_tensor_make(&x->buffer, 0, KV_HEADS, DIM, KVQ_DTYPE_F32);
    x->work.v = kvq_tensor_make(&x->buffer, k * sizeof(float), KV_HEADS, DIM, KVQ_DTYPE_F32);
    x->work.q = kvq_tensor_make(&x->buffer, 2 * k * sizeof(float), Q_HEADS, DIM, KVQ_DTYPE_F32);
}

static struct kvq_layer layer_row(void)
{
    return (struct kvq_layer){
        .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = LAYERS};
}

static kvq_capture *start(uint64_t max_tokens)
{
    struct kvq_layer row = layer_row();
    struct kvq_capture_options o = {.size = sizeof o,
                                    .layers = &row,
                                    .n_layers = 1,
                                    .model = "m",
                                    .max_tokens = max_tokens,
                                    .queries = 1};
    kvq_capture *c;
    assert_int_equal(kvq_capture_open(path, &o, &c), KVQ_OK);
    return c;
}

// One step of one session in `layers` layers, from row 0 of the tensors.
static void step(kvq_capture *c, kvq_session session, uint64_t position, uint32_t tokens,
                 uint32_t layers)
{
    struct tensors x;
    make_tensors(&x, position);
    struct kvq_entry e = {
        .session = session, .position = position, .append = tokens, .queries = (uint16_t)tokens};
    for (uint32_t layer = 0; layer < layers; layer++) {
        x.work.layer = layer;
        assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_OK);
    }
    free(x.memory);
}

static struct kvq_capture_file *reopen(void)
{
    struct kvq_capture_file *f;
    if (kvq_capture_file_open(path, &f, text, sizeof text))
        fail_msg("%s", text);
    return f;
}

// Tokens [from, from + n) of every part and head are those of positions `position` on.
static void expect_numbers(struct kvq_capture_file *f, uint32_t sequence, uint64_t from, uint64_t n,
                           uint64_t position)
{
    float *out = malloc(n * DIM * sizeof *out);
    assert_non_null(out);
    for (int part = 0; part < 3; part++)
        for (uint32_t h = 0; h < (part == 2 ? Q_HEADS : KV_HEADS); h++)
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                assert_int_equal(kvq_capture_file_read(f, sequence, layer,
                                                       (enum kvq_capture_part)part, h, from, n, out,
                                                       text, sizeof text),
                                 KVQ_OK);
                for (uint64_t i = 0; i < n * DIM; i++)
                    assert_true(out[i] == number(part, h, position + i / DIM, i % DIM));
            }
    free(out);
}

static void test_round_trip(void **unused)
{
    (void)unused;
    kvq_capture *c = start(0);
    step(c, 7, 0, 20, LAYERS);
    step(c, 9, 5, 1, LAYERS); // another session between, from position 5 on
    step(c, 7, 20, 1, LAYERS);
    step(c, 7, 21, 64, LAYERS);
    assert_int_equal(kvq_capture_tokens(c), 86);
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    assert_null(c);
    struct kvq_capture_file *f = reopen();
    const struct kvq_capture_info *info = kvq_capture_file_info(f);
    assert_int_equal(info->layers, LAYERS);
    assert_int_equal(info->sequences, 2);
    assert_int_equal(info->tokens, 86);
    assert_true(info->closed && info->has_queries && info->torn_bytes == 0);
    assert_string_equal(info->model, "m");
    assert_int_equal(kvq_capture_file_row(f, 2)->q_heads, Q_HEADS);
    assert_int_equal(kvq_capture_file_tokens(f, 0), 85);
    assert_int_equal(kvq_capture_file_tokens(f, 1), 1);
    expect_numbers(f, 0, 0, 85, 0);
    expect_numbers(f, 0, 19, 3, 19); // over three chunks
    expect_numbers(f, 0, 84, 1, 84);
    expect_numbers(f, 1, 0, 1, 5);
    float out[DIM];
    assert_int_equal(
        kvq_capture_file_read(f, 0, 0, KVQ_CAPTURE_K, 0, 85, 1, out, text, sizeof text),
        KVQ_E_BOUNDS);
    assert_int_equal(kvq_capture_file_read(f, 0, 0, KVQ_CAPTURE_K, KV_HEADS, 0, 1, out, text, 0),
                     KVQ_E_BOUNDS);
    assert_int_equal(kvq_capture_file_read(f, 2, 0, KVQ_CAPTURE_K, 0, 0, 1, out, text, 10),
                     KVQ_E_BOUNDS);
    kvq_capture_file_close(&f);
    assert_null(f);
}

// The sum of a number's steps over dtypes: fp16 and bf16 are widened exactly.
static void test_dtypes(void **unused)
{
    (void)unused;
    static const uint16_t f16[] = {0x3c00, 0xc000, 0x0001, 0x8400, 0x7bff, 0x7c00, 0x0000, 0x3555};
    static const float want16[] = {
        1, -2, 0x1p-24f, -0x1p-14f, 65504, (float)(1e30 * 1e30), 0, 0.333251953125f};
    static const uint16_t bf16[] = {0x3f80, 0xc000, 0x0001, 0x8080, 0x7f7f, 0, 0, 0};
    static const float wantb[] = {1, -2, 0x1p-133f, -0x1p-126f, 0x1.fep127f, 0, 0, 0};
    uint16_t memory[2 * DIM] = {0};
    memcpy(memory, f16, sizeof f16);
    memcpy(memory + DIM, bf16, sizeof bf16);
    kvq_buffer b = {.host = (void *)memory, .bytes = sizeof memory, .id = 1};
    struct kvq_layer row = {.q_heads = 1, .kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    struct kvq_capture_options o = {.size = sizeof o, .layers = &row, .n_layers = 1};
    struct kvq_work w = {.k = kvq_tensor_make(&b, 0, 1, DIM, KVQ_DTYPE_F16),
                         .v = kvq_tensor_make(&b, 2 * DIM, 1, DIM, KVQ_DTYPE_BF16)};
    struct kvq_entry e = {.session = 1, .append = 1};
    kvq_capture *c;
    assert_int_equal(kvq_capture_open(path, &o, &c), KVQ_OK);
    assert_int_equal(kvq_capture_append(c, &w, &e, 1), KVQ_OK);
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    struct kvq_capture_file *f = reopen();
    float out[DIM];
    assert_int_equal(kvq_capture_file_read(f, 0, 0, KVQ_CAPTURE_K, 0, 0, 1, out, text, 0), KVQ_OK);
    assert_memory_equal(out, want16, sizeof want16);
    assert_int_equal(kvq_capture_file_read(f, 0, 0, KVQ_CAPTURE_V, 0, 0, 1, out, text, 0), KVQ_OK);
    assert_memory_equal(out, wantb, sizeof wantb);
    assert_int_equal(kvq_capture_file_read(f, 0, 0, KVQ_CAPTURE_Q, 0, 0, 1, out, text, 0),
                     KVQ_E_BOUNDS);
    kvq_capture_file_close(&f);
}

static void test_limit(void **unused)
{
    (void)unused;
    kvq_capture *c = start(30);
    step(c, 1, 0, 20, LAYERS);
    step(c, 1, 20, 20, LAYERS); // 10 of them
    step(c, 1, 40, 1, LAYERS);  // none
    step(c, 2, 0, 5, LAYERS);
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    struct kvq_capture_file *f = reopen();
    assert_int_equal(kvq_capture_file_info(f)->sequences, 1);
    assert_int_equal(kvq_capture_file_tokens(f, 0), 30);
    expect_numbers(f, 0, 0, 30, 0);
    kvq_capture_file_close(&f);
}

// A step aborted after one layer and done again; a session truncated and gone on.
static void test_going_back(void **unused)
{
    (void)unused;
    kvq_capture *c = start(0);
    step(c, 1, 0, 8, LAYERS);
    step(c, 1, 8, 8, 1);
    step(c, 1, 8, 8, LAYERS);
    step(c, 1, 16, 8, LAYERS);
    step(c, 1, 4, 2, LAYERS);
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    struct kvq_capture_file *f = reopen();
    assert_int_equal(kvq_capture_file_info(f)->sequences, 3);
    assert_int_equal(kvq_capture_file_tokens(f, 0), 8);
    assert_int_equal(kvq_capture_file_tokens(f, 1), 16);
    assert_int_equal(kvq_capture_file_tokens(f, 2), 2);
    expect_numbers(f, 1, 0, 16, 8);
    expect_numbers(f, 2, 0, 2, 4);
    kvq_capture_file_close(&f);
}

// Pages in any order, strides with gaps, memory that the engine sees elsewhere.
static void test_pages(void **unused)
{
    (void)unused;
    enum { PAGE_TOKENS = 4, TOKENS = 11, SKIP = 2, ROW = KV_HEADS * DIM + 16 };
    size_t floats = (size_t)PAGES * PAGE_TOKENS * ROW;
    size_t list_at = 4096 + 2 * floats * sizeof(float);
    uint8_t *m = calloc(1, list_at + 4096);
    assert_non_null(m);
    const int32_t list[] = {-1, 17, 3, 31, 0}; // the entry's starts at element 1
    memcpy(m + list_at, list, sizeof list);
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t i = 0; i < 2 * KV_HEADS * DIM; i++) {
            uint32_t part = i / (KV_HEADS * DIM), at = (uint32_t)list[1 + (t + SKIP) / PAGE_TOKENS];
            uint32_t row = at * PAGE_TOKENS + (t + SKIP) % PAGE_TOKENS, in = i % (KV_HEADS * DIM);
            float x = number((int)part, in / DIM, t, in % DIM);
            memcpy(m + 4096 + (part * floats + (size_t)row * ROW + in) * sizeof x, &x, sizeof x);
        }
    kvq_buffer b = {.memfd = -1, .host = m + 4096, .bytes = list_at, .id = 1};
    struct kvq_layer row = layer_row();
    struct kvq_capture_options o = {.size = sizeof o, .layers = &row, .n_layers = 1};
    struct kvq_work w = {.k = {&b, 0, ROW * sizeof(float), DIM * sizeof(float), KVQ_DTYPE_F32},
                         .pages = {PAGE_TOKENS, PAGE_TOKENS * ROW * sizeof(float),
                                   PAGE_TOKENS * ROW * sizeof(float), &b, list_at - 4096}};
    w.v = w.k;
    w.v.offset = floats * sizeof(float);
    struct kvq_entry e = {.session = 1, .row = 1, .append = TOKENS, .list_token = SKIP};
    kvq_capture *c;
    assert_int_equal(kvq_capture_open(path, &o, &c), KVQ_OK);
    for (w.layer = 0; w.layer < LAYERS; w.layer++)
        assert_int_equal(kvq_capture_append(c, &w, &e, 1), KVQ_OK);
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    struct kvq_capture_file *f = reopen();
    float out[TOKENS * DIM];
    for (int part = 0; part < 2; part++)
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            assert_int_equal(kvq_capture_file_read(f, 0, 2, (enum kvq_capture_part)part, h, 0,
                                                   TOKENS, out, text, sizeof text),
                             KVQ_OK);
            for (uint32_t i = 0; i < TOKENS * DIM; i++)
                assert_true(out[i] == number(part, h, i / DIM, i % DIM));
        }
    kvq_capture_file_close(&f);
    free(m);
}

static void test_refusals(void **unused)
{
    (void)unused;
    struct kvq_layer row = layer_row();
    struct kvq_capture_options o = {.size = sizeof o, .layers = &row, .n_layers = 1, .queries = 1};
    kvq_capture *c = NULL;
    assert_int_equal(kvq_capture_open("/no/such/place", &o, &c), KVQ_E_SYSTEM);
    assert_null(c);
    row.k_dim = 2000;
    assert_int_equal(kvq_capture_open(path, &o, &c), KVQ_E_SHAPE);
    row = layer_row();
    row.repeat = 257;
    assert_int_equal(kvq_capture_open(path, &o, &c), KVQ_E_LIMIT);
    o.n_layers = 0;
    assert_int_equal(kvq_capture_open(path, &o, &c), KVQ_E_INVALID);
    assert_int_equal(kvq_capture_open(NULL, &o, &c), KVQ_E_INVALID);
    c = start(0);
    struct tensors x;
    make_tensors(&x, 0);
    struct kvq_entry e = {.session = 1, .append = 60, .queries = 3};
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_E_INVALID);
    e.queries = 60;
    x.work.layer = LAYERS;
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_E_SHAPE);
    x.work.layer = 0;
    x.work.q.buffer = NULL;
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_E_BUFFER);
    e.status = KVQ_E_POSITION; // failed entries leave nothing
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    free(x.memory);
}

// A tensor that ends too early ends the capture in the middle of a step: what came before can be
// read.
static void test_bounds(void **unused)
{
    (void)unused;
    kvq_capture *c = start(0);
    step(c, 1, 0, 8, LAYERS);
    struct tensors x;
    make_tensors(&x, 8);
    struct kvq_entry e = {.session = 1, .position = 8, .append = 8, .queries = 8};
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_OK);
    x.work.layer = 1;
    e.q_row = 1 << 20;
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_E_BOUNDS);
    e.q_row = 0;
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_E_BOUNDS);
    assert_int_equal(kvq_capture_close(&c), KVQ_E_BOUNDS);
    struct kvq_capture_file *f = reopen();
    assert_false(kvq_capture_file_info(f)->closed);
    assert_int_equal(kvq_capture_file_tokens(f, 0), 8);
    expect_numbers(f, 0, 0, 8, 0);
    kvq_capture_file_close(&f);
    free(x.memory);
}

// The file system has no room in the middle of a chunk: what came before can be read.
static void test_no_room(void **unused)
{
    (void)unused;
    struct rlimit old, small;
    kvq_capture *c = start(0);
    step(c, 1, 0, 8, LAYERS);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){(rlim_t)st.st_size + 100, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    struct tensors x;
    make_tensors(&x, 8);
    struct kvq_entry e = {.session = 1, .position = 8, .append = 8, .queries = 8};
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_E_SYSTEM);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(kvq_capture_append(c, &x.work, &e, 1), KVQ_E_SYSTEM);
    assert_int_equal(kvq_capture_close(&c), KVQ_E_SYSTEM);
    struct kvq_capture_file *f = reopen();
    assert_false(kvq_capture_file_info(f)->closed);
    assert_int_equal(kvq_capture_file_tokens(f, 0), 8);
    expect_numbers(f, 0, 0, 8, 0);
    kvq_capture_file_close(&f);
    free(x.memory);
}

// ---- Damage ----

static uint8_t *whole_file(size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    uint8_t *bytes = malloc(1 << 20);
    assert_non_null(bytes);
    *n = fread(bytes, 1, 1 << 20, f);
    fclose(f);
    return bytes;
}

// Opens the bytes as a file; frees nothing.
static int open_bytes(const uint8_t *bytes, size_t n, struct kvq_capture_file **f)
{
    int fd = memfd_create("capture", MFD_CLOEXEC);
    assert_int_equal(write(fd, bytes, n), (ssize_t)n);
    return kvq_capture_file_open_fd(fd, "bytes", f, text, sizeof text);
}

static uint8_t *small_file(size_t *n)
{
    kvq_capture *c = start(0);
    step(c, 1, 0, 2, LAYERS);
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    return whole_file(n);
}

// Any bit of a closed file that is turned over is noticed, but for the zeros that fill up.
static void test_every_bit(void **unused)
{
    (void)unused;
    size_t n,
        missed = 0,
        zeros =
            64 - (sizeof(struct kvq_capture_header) + LAYERS * sizeof(struct kvq_capture_row)) % 64;
    uint8_t *bytes = small_file(&n);
    for (size_t i = 0; i < n; i++) {
        struct kvq_capture_file *f;
        bytes[i] ^= (uint8_t)(1u << i % 8);
        missed += open_bytes(bytes, n, &f) == KVQ_OK;
        kvq_capture_file_close(&f);
        bytes[i] ^= (uint8_t)(1u << i % 8);
    }
    assert_int_equal(missed, zeros);
    free(bytes);
}

// A closed file of any other length is refused; one that was not closed is read as far as it goes.
static void test_every_length(void **unused)
{
    (void)unused;
    size_t n, first = kvq_capture_first_chunk(LAYERS);
    uint8_t *bytes = small_file(&n);
    struct kvq_capture_file *f;
    for (size_t i = 0; i < n; i += 7)
        assert_int_not_equal(open_bytes(bytes, i, &f), KVQ_OK);
    free(bytes);
    kvq_capture *c = start(0);
    step(c, 1, 0, 2, LAYERS);
    bytes = whole_file(&n); // not closed
    size_t chunk = (n - first) / LAYERS;
    for (size_t i = first; i <= n; i += 61) {
        assert_int_equal(open_bytes(bytes, i, &f), KVQ_OK);
        assert_int_equal(kvq_capture_file_info(f)->torn_bytes, (i - first) % chunk);
        assert_int_equal(kvq_capture_file_info(f)->tokens, 0);
        kvq_capture_file_close(&f);
    }
    assert_int_equal(kvq_capture_close(&c), KVQ_OK);
    free(bytes);
}

static void test_texts(void **unused)
{
    (void)unused;
    size_t n;
    uint8_t *bytes = small_file(&n);
    struct kvq_capture_file *f;
    bytes[0] = 'X';
    assert_int_equal(open_bytes(bytes, n, &f), KVQ_E_INVALID);
    assert_non_null(strstr(text, "bytes: is no capture file"));
    assert_int_equal(kvq_capture_file_open("/no/such/file", &f, text, sizeof text), KVQ_E_SYSTEM);
    assert_non_null(strstr(text, "/no/such/file: cannot be opened"));
    assert_int_equal(kvq_capture_file_open("/dev", &f, text, sizeof text), KVQ_E_INVALID);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_limit),      cmocka_unit_test(test_going_back),
        cmocka_unit_test(test_pages),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bounds),     cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_every_bit),  cmocka_unit_test(test_every_length),
        cmocka_unit_test(test_texts),
    };
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    signal(SIGXFSZ, SIG_IGN);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
