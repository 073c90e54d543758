// SPDX-License-Identifier: Apache-2.0
//
// Making codebooks: k-means finds what was planted, splits where a cluster lost its points and
// takes the first of equals; factors are those of the paper; the errors that training reports are
// those that packing makes; and the program writes the same bytes again, also when taken up.
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/internal.h"
#include "proto/status.h"
#include "tests/kernels/kvtest.h"
#include "tools/kvq-codebook/kmeans.h"
#include "tools/kvq-codebook/train.h"

enum { TOKENS = 256, HEADS = 2, DIM = 64 };

extern char **environ;
static char text[1200];

// ---- k-means ----

static void test_planted_clusters(void **unused)
{
    (void)unused;
    enum { K = 32, EACH = 50, D = 4 };
    static float centre[K][D], points[K * EACH][D], found[K][D];
    struct kvt_rng rng = {.state = kvt_seed()};
    struct kmeans_result result;
    for (int j = 0; j < K; j++)
        for (int i = 0; i < D; i++)
            centre[j][i] = 10 * kvt_normal(&rng);
    for (int p = 0; p < K * EACH; p++)
        for (int i = 0; i < D; i++)
            points[p][i] = centre[p % K][i] + 1e-3f * kvt_normal(&rng);
    const struct kmeans_job job = {
        .points = points[0], .count = K * EACH, .dim = D, .k = K, .rounds = 30, .seed = 5};
    assert_int_equal(kmeans(&job, found[0], &result), 0);
    double error = 0;
    for (int p = 0; p < K * EACH; p++) {
        double least = INFINITY;
        for (int j = 0; j < K; j++) {
            double d = 0;
            for (int i = 0; i < D; i++)
                d += pow((double)points[p][i] - (double)found[j][i], 2);
            least = d < least ? d : least;
        }
        error += least;
    }
    assert_true(fabs(result.error - error) <= 1e-3 * error);
    assert_true(error <= 1.01 * K * EACH * D * 1e-6 * 1.2);
}

// Of two equal starts the first takes all; the other, and one that is far from everything, are
// given the farthest points of the largest cluster.
static void test_empty_clusters(void **unused)
{
    (void)unused;
    const float points[] = {0, 0, 0, 1, 0, 2, 0, 9, 100, 0, 101, 0};
    const float starts[] = {0, 1, 0, 1, 1e6f, 1e6f, 100, 0};
    struct kmeans_job job = {
        .points = points, .count = 6, .dim = 2, .k = 4, .rounds = 1, .starts = starts};
    struct kmeans_result result;
    float found[8];
    assert_int_equal(kmeans(&job, found, &result), 0);
    // Round one: cluster 0 has 4 points, 3 has 2. (0, 9) goes to 1, then of the three left the
    // farthest, of equals the first, (0, 0), to 2.
    const float want[] = {0, 1.5f, 0, 9, 0, 0, 100.5f, 0};
    for (int i = 0; i < 8; i++)
        assert_true(found[i] == want[i]);
    assert_int_equal(result.rounds, 1);
    assert_true(result.error == 0.25 + 0.25 + 0.25 + 0.25);
}

static void test_fewer_points_than_clusters(void **unused)
{
    (void)unused;
    const float points[] = {3, 3, 3, 3, 5, 5, 3, 3, -1, 2};
    const struct kmeans_job job = {
        .points = points, .count = 5, .dim = 2, .k = 16, .rounds = 30, .seed = 1};
    struct kmeans_result result;
    float found[32];
    assert_int_equal(kmeans(&job, found, &result), 0);
    assert_true(result.error == 0);
    for (int i = 0; i < 32; i++)
        assert_true(isfinite(found[i]));
}

static void test_more_rounds_are_no_worse(void **unused)
{
    (void)unused;
    static float points[3000];
    struct kvt_rng rng = {.state = kvt_seed()};
    float found[64 * 2];
    double last = INFINITY;
    for (int i = 0; i < 3000; i++)
        points[i] = kvt_normal(&rng);
    for (uint32_t rounds = 1; rounds <= 30; rounds += 7) {
        const struct kmeans_job job = {
            .points = points, .count = 1500, .dim = 2, .k = 64, .rounds = rounds, .seed = 9};
        struct kmeans_result result;
        assert_int_equal(kmeans(&job, found, &result), 0);
        assert_true(result.rounds <= rounds && result.error <= last);
        last = result.error;
    }
}

struct watched {
    uint32_t calls;
    double error;
};

static void watch_round(void *context, const struct kmeans_result *so_far)
{
    struct watched *w = context;
    assert_int_equal(so_far->rounds, w->calls++);
    assert_true(so_far->error <= w->error);
    w->error = so_far->error;
}

// More clusters than starts are drawn for: what parts are passed over for has to be what a look at
// all centroids finds, with every point counted once.
static void test_many_clusters(void **unused)
{
    enum { COUNT = 9001, K = KMEANS_MOST_DRAWN + 104 };
    (void)unused;
    for (uint32_t dim = 2; dim <= 8; dim += 6) {
        float *points = malloc(sizeof(float) * COUNT * dim);
        float *found = malloc(sizeof(float) * K * dim), *again = malloc(sizeof(float) * K * dim);
        struct kvt_rng rng = {.state = kvt_seed() + dim};
        struct kmeans_result result;
        struct watched w = {0, INFINITY};
        double error = 0;
        for (uint32_t i = 0; i < COUNT * dim; i++)
            points[i] = kvt_normal(&rng) * (i / dim % 3 ? 1.0f : 4.0f);
        struct kmeans_job job = {.points = points, .count = COUNT, .dim = dim, .k = K, .rounds = 3};
        job.seed = 11, job.round = watch_round, job.context = &w;
        assert_int_equal(kmeans(&job, found, &result), 0);
        assert_int_equal(w.calls, result.rounds + 1);
        for (uint32_t p = 0; p < COUNT; p++) {
            float least = INFINITY;
            for (uint32_t j = 0; j < K; j++) {
                float sum = 0;
                for (uint32_t i = 0; i < dim; i++) {
                    float d = points[p * dim + i] - found[j * dim + i];
                    sum += d * d;
                }
                least = fminf(least, sum);
            }
            error += (double)least;
        }
        assert_true(fabs(result.error - error) <= 1e-9 * error);
        job.round = NULL;
        assert_int_equal(kmeans(&job, again, &result), 0);
        assert_memory_equal(found, again, sizeof(float) * K * dim);
        free(points);
        free(found);
        free(again);
    }
}

// ---- Training ----

// K and V of every layer: some channels large, one of K always 0. All fit fp16 exactly.
struct tensors {
    float k[2][HEADS][TOKENS][DIM], v[2][HEADS][TOKENS][DIM];
};

static struct tensors *make_tensors(uint64_t seed)
{
    struct tensors *x = malloc(sizeof *x);
    struct kvt_rng rng = {.state = seed};
    assert_non_null(x);
    for (int l = 0; l < 2; l++)
        for (int h = 0; h < HEADS; h++)
            for (int t = 0; t < TOKENS; t++)
                for (int c = 0; c < DIM; c++) {
                    float scale = c == 7 ? 16 : 1;
                    x->k[l][h][t][c] = c == 9 ? 0 : scale * rintf(64 * kvt_normal(&rng)) / 64;
                    x->v[l][h][t][c] = rintf(64 * kvt_normal(&rng)) / 64;
                }
    return x;
}

static int read_tensors(void *context, uint32_t layer, bool v, uint32_t head, uint64_t from,
                        uint64_t tokens, float *out, char *why, size_t n)
{
    const struct tensors *x = context;
    (void)why;
    (void)n;
    assert_true(layer < 2 && head < HEADS && from + tokens <= TOKENS);
    memcpy(out, v ? x->v[layer][head][from] : x->k[layer][head][from], tokens * DIM * sizeof *out);
    return KVQ_OK;
}

static struct kvq_codebook *new_book(const char *format, uint32_t flags)
{
    const struct kvq_codebook_row rows[] = {{HEADS, DIM}, {HEADS, DIM}};
    const struct kvq_codebook_plan plan = {kvt_format(format), rows, 2, flags, "m"};
    struct kvq_codebook *book;
    if (kvq_codebook_new(&plan, &book, text, sizeof text))
        fail_msg("%s", text);
    return book;
}

// Errors of K and V as training reports them, summed over a layer's tables.
struct errors {
    double k, v;
    uint32_t tables;
    uint64_t points; // of all
};

static void add_error(void *context, const struct train_table *table)
{
    struct errors *e = context;
    *(table->v ? &e->v : &e->k) += table->error / table->tables;
    e->tables++;
    e->points += table->points;
}

// Every sub-vector is a sample, so that nothing is left to chance.
static void train(struct kvq_codebook *book, uint32_t layer, struct tensors *x, struct errors *e)
{
    const struct train_source source = {x, TOKENS, read_tensors};
    const struct train_options options = {.seed = 3,
                                          .rounds = 30,
                                          .samples = TRAIN_MOST_SAMPLES,
                                          .progress = e ? add_error : NULL,
                                          .context = e};
    if (train_layer(book, layer, &source, &options, text, sizeof text))
        fail_msg("%s", text);
}

static void test_factors(void **unused)
{
    (void)unused;
    struct tensors *x = make_tensors(kvt_seed());
    struct kvq_codebook *book = new_book("vecinfer-2", 0);
    struct kvq_book b;
    train(book, 1, x, NULL);
    kvq_codebook_layer(book, 1, &b);
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < DIM; c++) {
            float most = 0;
            for (int t = 0; t < TOKENS; t++)
                most = fmaxf(most, fabsf(x->k[1][h][t][c]));
            assert_true(b.smooth[h * DIM + c] == (c == 9 ? 1e-5f : sqrtf(most)));
        }
    kvq_codebook_layer(book, 0, &b);
    assert_true(b.smooth[0] == 1); // the other layer is as it was
    x->k[0][1][40][2] = NAN;
    const struct train_source source = {x, TOKENS, read_tensors};
    const struct train_options options = {.rounds = 1};
    assert_int_equal(train_layer(book, 0, &source, &options, text, sizeof text), KVQ_E_NONFINITE);
    assert_non_null(strstr(text, "layer 0, KV head 1, token 40: K"));
    kvq_codebook_close(&book);
    free(x);
}

// Relative squared errors of what is read back after packing with the book's tables; K's in the
// smoothed basis (a rotation changes no length).
static struct errors packed_errors(const char *format, const struct kvq_book *book, uint32_t layer,
                                   struct tensors *x)
{
    const struct kvq_kernels *kernels = kvq_kernels_get(KVQ_ISA_BEST);
    const struct kvq_format *f = kvt_format(format);
    struct kvq_shape s = kvt_shape(1, HEADS, DIM, KVQ_F16);
    struct kvq_raw_layout raw_layout = kvq_raw_layout_of(&s);
    struct kvq_layout layout = kvq_layout_of(f, &s);
    struct kvq_store_counts counts = {0};
    struct kvq_page pages[TOKENS / 128];
    double wrong[2] = {0}, all[2] = {0};
    void *workspace = kvt_workspace();
    static float rows[2][TOKENS][DIM];
    for (uint32_t i = 0; i < TOKENS / 128; i++) {
        uint8_t *raw = kvt_guarded(kvq_raw_bytes(&raw_layout, KVQ_BLOCK_TOKENS), 0);
        uint8_t *packed = kvt_guarded(kvq_block_bytes(&layout, &s), 0);
        memset(packed, 0, kvq_block_bytes(&layout, &s));
        pages[i] = (struct kvq_page){.packed = packed, .raw = raw, .tokens = 128};
        pages[i].packed_tokens = 128;
        for (uint32_t h = 0; h < HEADS; h++) {
            struct kvq_view k = {x->k[layer][h][128 * i], DIM * sizeof(float), 0, KVQ_F32};
            struct kvq_view v = {x->v[layer][h][128 * i], DIM * sizeof(float), 0, KVQ_F32};
            kvq_store(kernels, &s, &k, &v, h, 0, 128, raw, &counts);
        }
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t t = 0; t < 128; t += f->unit_tokens) {
                const struct kvq_unit unit = {.raw_block = raw,
                                              .packed_block = packed,
                                              .head = h,
                                              .first = t,
                                              .block_start = 128u * i,
                                              .book = book};
                kvq_pack(kernels, f, &s, &unit, workspace);
            }
    }
    const struct kvq_reading reading = {
        .format = f, .shape = &s, .pages = pages, .n_pages = TOKENS / 128, .book = book};
    for (uint32_t h = 0; h < HEADS; h++) {
        assert_int_equal(
            kvq_read_rows(kernels, &reading, 0, TOKENS, h, rows[0][0], rows[1][0], workspace),
            TOKENS);
        for (int t = 0; t < TOKENS; t++)
            for (int c = 0; c < DIM; c++) {
                double by = book->smooth ? (double)book->smooth[h * DIM + (size_t)c] : 1;
                double k = (double)x->k[layer][h][t][c], v = (double)x->v[layer][h][t][c];
                wrong[0] += pow(((double)rows[0][t][c] - k) / by, 2);
                all[0] += pow(k / by, 2);
                wrong[1] += pow((double)rows[1][t][c] - v, 2);
                all[1] += v * v;
            }
    }
    for (uint32_t i = 0; i < TOKENS / 128; i++) {
        kvt_guarded_free((uint8_t *)(uintptr_t)pages[i].packed);
        kvt_guarded_free((uint8_t *)(uintptr_t)pages[i].raw);
    }
    kvt_guarded_free(workspace);
    return (struct errors){.k = wrong[0] / all[0], .v = wrong[1] / all[1]};
}

// Shared tables' errors are exact; sums over several tables are weighted alike, which Gaussian
// data of one scale nearly has.
static void expect_errors(const char *format, uint32_t flags, uint32_t tables, double tolerance)
{
    struct tensors *x = make_tensors(kvt_seed());
    struct kvq_codebook *book = new_book(format, flags);
    struct errors reported = {0};
    struct kvq_book b;
    uint32_t layer = flags & KVQ_CODEBOOK_GLOBAL ? 0 : 1;
    train(book, layer, x, &reported);
    assert_int_equal(reported.tables, tables);
    // Every table has the sub-vectors that it serves, and no others.
    uint64_t values = HEADS * TOKENS * DIM * (flags & KVQ_CODEBOOK_GLOBAL ? 2 : 1);
    assert_int_equal(reported.points * kvt_format(format)->k.vector, 2 * values);
    kvq_codebook_layer(book, layer, &b);
    struct errors packed = packed_errors(format, &b, layer, x);
    if (fabs(packed.v - reported.v) > tolerance * packed.v)
        fail_msg("%s: V %g when packed, %g when trained", format, packed.v, reported.v);
    // Sub-vectors with and without the large channel are no longer alike.
    bool alike = !(flags & KVQ_CODEBOOK_OWN_SUBS);
    if (alike && fabs(packed.k - reported.k) > tolerance * packed.k)
        fail_msg("%s: K %g when packed, %g when trained", format, packed.k, reported.k);
    assert_true(packed.k < 0.2 && packed.v < 0.2);
    kvq_codebook_close(&book);
    free(x);
}

static void test_errors_are_those_of_packing(void **unused)
{
    (void)unused;
    expect_errors("vecinfer-2", 0, 2, 1e-3);
    expect_errors("million-4", 0, 2, 1e-3);
    expect_errors("vecinfer-2", KVQ_CODEBOOK_OWN_HEADS, 4, 0.02);
    expect_errors("million-2", KVQ_CODEBOOK_OWN_SUBS, 32, 0.02);
    expect_errors("million-4", KVQ_CODEBOOK_OWN_SUBS, 64, 0.02);
    expect_errors("vecinfer-4", KVQ_CODEBOOK_GLOBAL, 2, 0.05);
    expect_errors("vecinfer-4", KVQ_CODEBOOK_OWN_HEADS | KVQ_CODEBOOK_OWN_SUBS, 128, 0.05);
}

static void test_too_few_tokens(void **unused)
{
    (void)unused;
    struct tensors *x = make_tensors(1);
    struct kvq_codebook *book = new_book("vecinfer-2", 0);
    const struct train_source source = {x, 4, read_tensors};
    const struct train_options options = {.rounds = 1};
    assert_int_equal(train_layer(book, 0, &source, &options, text, sizeof text), KVQ_E_LIMIT);
    assert_non_null(strstr(text, "128 sub-vectors of K for 256 centroids"));
    kvq_codebook_close(&book);
    free(x);
}

// ---- The program ----

static char folder[] = "/tmp/kvq-codebook-XXXXXX";

static const char *in_folder(const char *name)
{
    static char paths[8][80];
    static int next;
    char *to = paths[next++ % 8];
    snprintf(to, sizeof paths[0], "%s/%s", folder, name);
    return to;
}

// Exit status; what it said on standard error goes to text.
static int run(const char *arguments, ...)
{
    char command[700], program[300], *words[32];
    const char *bin = getenv("KVQ_BIN_DIR");
    va_list list;
    va_start(list, arguments);
    vsnprintf(command, sizeof command, arguments, list);
    va_end(list);
    snprintf(program, sizeof program, "%s/kvq-codebook", bin ? bin : "bin");
    int n = 0, status = -1;
    char *rest = command;
    words[n++] = program;
    for (char *word; n < 31 && (word = strtok_r(rest, " ", &rest));)
        words[n++] = word;
    words[n] = NULL;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, in_folder("out"), O_CREAT | O_TRUNC | O_WRONLY,
                                     0600);
    posix_spawn_file_actions_addopen(&actions, 2, in_folder("err"), O_CREAT | O_TRUNC | O_WRONLY,
                                     0600);
    pid_t pid;
    if (posix_spawn(&pid, program, &actions, NULL, words, environ) == 0)
        waitpid(pid, &status, 0);
    posix_spawn_file_actions_destroy(&actions);
    FILE *file = fopen(in_folder("err"), "r");
    size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[got] = '\0';
    if (file)
        fclose(file);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void expect_run(int status, const char *command)
{
    int got = run("%s", command);
    if (got != status)
        fail_msg("'%s' ended with %d: %s", command, got, text);
}

// A capture of both layers, as an engine writes it.
static void write_capture(const char *path, struct tensors *x)
{
    struct kvq_layer row = {
        .q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .repeat = 2};
    struct kvq_capture_options o = {
        .size = sizeof o, .layers = &row, .n_layers = 1, .model = "tiny"};
    struct kvq_entry e = {.session = 1, .append = TOKENS};
    kvq_buffer buffer = {.host = (void *)x, .bytes = sizeof *x, .id = 1};
    kvq_capture *capture;
    assert_int_equal(kvq_capture_open(path, &o, &capture), KVQ_OK);
    for (uint32_t layer = 0; layer < 2; layer++) {
        struct kvq_work work = {.layer = layer};
        size_t k = (size_t)((uint8_t *)x->k[layer] - (uint8_t *)x);
        size_t v = (size_t)((uint8_t *)x->v[layer] - (uint8_t *)x);
        work.k = kvq_tensor_make(&buffer, k, HEADS, DIM, KVQ_DTYPE_F32);
        work.v = kvq_tensor_make(&buffer, v, HEADS, DIM, KVQ_DTYPE_F32);
        work.k.token_stride = work.v.token_stride = DIM * sizeof(float);
        work.k.head_stride = work.v.head_stride = TOKENS * DIM * sizeof(float);
        assert_int_equal(kvq_capture_append(capture, &work, &e, 1), KVQ_OK);
    }
    assert_int_equal(kvq_capture_close(&capture), KVQ_OK);
}

static bool same_files(const char *a, const char *b)
{
    FILE *f = fopen(in_folder(a), "rb"), *g = fopen(in_folder(b), "rb");
    assert_true(f && g);
    int x, y;
    do {
        x = getc(f);
        y = getc(g);
    } while (x == y && x != EOF);
    fclose(f);
    fclose(g);
    return x == y;
}

static void make(int status, const char *out, const char *more)
{
    char command[500];
    snprintf(command, sizeof command, "make --capture %s --format vecinfer-2 --out %s %s",
             in_folder("kv"), in_folder(out), more);
    expect_run(status, command);
}

static void test_program_is_deterministic(void **unused)
{
    (void)unused;
    make(0, "a", "");
    assert_non_null(strstr(text, "layer 1 of 2: table 1 of 1 for V: 8192 sub-vectors"));
    make(0, "b", "--quiet");
    assert_string_equal(text, "");
    assert_true(same_files("a", "b"));
    make(0, "b", "--seed 2");
    assert_false(same_files("a", "b"));
    make(0, "b", "--scope global --heads own --subs own --iterations 2 --samples 300");
    char command[300];
    snprintf(command, sizeof command, "show %s --json", in_folder("b"));
    expect_run(0, command);
    snprintf(command, sizeof command, "verify %s", in_folder("b"));
    expect_run(0, command);
}

// A checkpoint with layer 0 as it has to be, or not quite.
static void write_checkpoint(const char *of, float change)
{
    struct kvq_codebook *whole, *part;
    struct kvq_codebook_tables from, to;
    char made[KVQ_CODEBOOK_MADE_BYTES];
    assert_int_equal(kvq_codebook_open(in_folder(of), &whole, text, sizeof text), KVQ_OK);
    const struct kvq_codebook_header *h = kvq_codebook_head(whole);
    const struct kvq_codebook_plan plan = {kvt_format(h->format), kvq_codebook_row(whole, 0), 2, 0,
                                           h->model};
    assert_int_equal(kvq_codebook_new(&plan, &part, text, sizeof text), KVQ_OK);
    kvq_codebook_tables(whole, 0, &from);
    kvq_codebook_tables(part, 0, &to);
    memcpy(to.smooth, from.smooth, to.smooth_n * sizeof(float));
    memcpy(to.k, from.k, to.k_n * sizeof(float));
    memcpy(to.v, from.v, to.v_n * sizeof(float));
    to.k[0] += change;
    snprintf(made, sizeof made, "%.600s done=1", h->made);
    if (kvq_codebook_save_part(part, in_folder("part"), made, text, sizeof text))
        fail_msg("%s", text);
    kvq_codebook_close(&part);
    kvq_codebook_close(&whole);
}

static void test_program_resumes(void **unused)
{
    (void)unused;
    char resume[120];
    snprintf(resume, sizeof resume, "--resume %s", in_folder("part"));
    make(0, "a", resume);
    assert_int_not_equal(access(in_folder("part"), F_OK), 0); // not needed any more
    write_checkpoint("a", 0);
    make(0, "b", resume);
    assert_non_null(strstr(text, "1 of 2 layers are in"));
    assert_null(strstr(text, "layer 0 of 2"));
    assert_true(same_files("a", "b"));
    write_checkpoint("a", 0.5f); // is believed, so layer 0 was not made again
    make(0, "b", resume);
    assert_false(same_files("a", "b"));
    write_checkpoint("a", 0);
    strncat(resume, " --seed 2", sizeof resume - strlen(resume) - 1);
    make(1, "b", resume);
    assert_non_null(strstr(text, "checkpoint of another run"));
    unlink(in_folder("part"));
}

static void test_program_refuses(void **unused)
{
    (void)unused;
    char command[300];
    make(2, "a", "--iterations 31");
    assert_non_null(strstr(text, "1 to 30 are possible"));
    make(2, "a", "--heads some");
    make(2, "a", "--sed 1");
    make(1, "a", "--format oscar2");
    assert_non_null(strstr(text, "oscar2 has no codebooks"));
    make(1, "a", "--capture /nonexistent");
    make(1, "a", "--samples 200");
    assert_non_null(strstr(text, "200 sub-vectors of K for 256 centroids"));
    expect_run(2, "make --format vecinfer-2");
    expect_run(2, "");
    snprintf(command, sizeof command, "verify %s", in_folder("kv"));
    expect_run(1, command);
    assert_non_null(strstr(text, "is no codebook"));
}

// Where the codebook cannot be written, nothing is computed first.
static void test_program_tries_its_files_first(void **unused)
{
    (void)unused;
    const char *outs[] = {"--out /proc/none/book", "--resume /proc/none/part"};
    for (size_t i = 0; i < sizeof outs / sizeof *outs; i++) {
        make(1, "b", outs[i]);
        assert_non_null(strstr(text, "cannot be created: No such file or directory"));
        assert_null(strstr(text, "iteration"));
    }
    make(0, "new/folder/book", "--iterations 1");
    assert_int_equal(unlink(in_folder("new/folder/book")), 0);
    assert_int_equal(rmdir(in_folder("new/folder")), 0);
    assert_int_equal(rmdir(in_folder("new")), 0);
}

static int set_up(void **unused)
{
    (void)unused;
    if (!mkdtemp(folder))
        return -1;
    struct tensors *x = make_tensors(kvt_seed());
    write_capture(in_folder("kv"), x);
    free(x);
    return 0;
}

static int tear_down(void **unused)
{
    (void)unused;
    const char *names[] = {"kv", "a", "b", "part", "out", "err"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unlink(in_folder(names[i]));
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_planted_clusters),
        cmocka_unit_test(test_empty_clusters),
        cmocka_unit_test(test_fewer_points_than_clusters),
        cmocka_unit_test(test_more_rounds_are_no_worse),
        cmocka_unit_test(test_many_clusters),
        cmocka_unit_test(test_factors),
        cmocka_unit_test(test_errors_are_those_of_packing),
        cmocka_unit_test(test_too_few_tokens),
        cmocka_unit_test(test_program_is_deterministic),
        cmocka_unit_test(test_program_resumes),
        cmocka_unit_test(test_program_refuses),
        cmocka_unit_test(test_program_tries_its_files_first),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
