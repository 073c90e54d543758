// SPDX-License-Identifier: Apache-2.0
//
// kvq-run's readers of foreign files: what a good one yields and how a bad one is refused.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tools/kvq-run/clusters.h"
#include "tools/kvq-run/config.h"
#include "tools/kvq-run/fingerprint.h"
#include "tools/kvq-run/fold.h"
#include "tools/kvq-run/linear.h"
#include "tools/kvq-run/rope.h"
#include "tools/kvq-run/sample.h"
#include "tools/kvq-run/tensors.h"

// A safetensors file in memory: header text padded to 8 bytes, then bytes that count up.
struct file {
    uint8_t *bytes;
    uint64_t size;
};

static struct file make_file(const char *header, uint64_t data_bytes)
{
    uint64_t n = (strlen(header) + 7) / 8 * 8;
    struct file f = {malloc(8 + n + data_bytes), 8 + n + data_bytes};
    assert_non_null(f.bytes);
    for (int i = 0; i < 8; i++)
        f.bytes[i] = (uint8_t)(n >> 8 * i);
    memset(f.bytes + 8, ' ', n);
    memcpy(f.bytes + 8, header, strlen(header));
    for (uint64_t i = 0; i < data_bytes; i++)
        f.bytes[8 + n + i] = (uint8_t)i;
    return f;
}

static int parse(const char *header, uint64_t data_bytes, struct problem *p)
{
    struct file f = make_file(header, data_bytes);
    struct tensors *t = tensors_new();
    int rc = tensors_parse(t, "f", f.bytes, f.size, p);
    tensors_close(&t);
    free(f.bytes);
    return rc;
}

static void good_file(void **state)
{
    (void)state;
    struct problem p = {0};
    struct file f = make_file("{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                              "\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]},"
                              "\"__metadata__\":{\"x\":\"y\"}}  ",
                              16);
    struct tensors *t = tensors_new();
    assert_int_equal(tensors_parse(t, "f", f.bytes, f.size, &p), 0);
    const struct tensor *b = tensors_find(t, "b");
    assert_non_null(b);
    assert_int_equal(b->dims, 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->dtype, TENSOR_BF16);
    assert_int_equal(*(const uint8_t *)b->data, 4);
    assert_non_null(tensors_find(t, "a"));
    assert_null(tensors_find(t, "c"));
    tensors_close(&t);
    free(f.bytes);
}

struct bad {
    const char *header, *says;
};

static void bad_files(void **state)
{
    (void)state;
    static const struct bad list[] = {
        {"", "not a JSON object"},
        {"[1]", "not a JSON object"},
        {"{\"a\":3}", "not described by an object"},
        {"{\"a\":{\"dtype\":\"I8\",\"shape\":[2],\"data_offsets\":[0,2]}}", "dtype I8"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,2]}}", "dtype (none)"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,2]}}",
         "5 dimensions"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[-1],\"data_offsets\":[0,2]}}", "not a usable size"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[1.5],\"data_offsets\":[0,2]}}", "not a usable size"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[4294967296,4294967296,4294967296],"
         "\"data_offsets\":[0,2]}}",
         "not a usable size"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0]}}", "not two sizes"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[4,0]}}", "cut short"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[200],\"data_offsets\":[0,400]}}", "cut short"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[0,4]}}", "asks for 6 bytes"},
        {"{\"a\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,2]},"
         "\"a\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,2]}}",
         "there twice"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        struct problem p = {0};
        assert_int_equal(parse(list[i].header, 64, &p), -1);
        if (!strstr(p.text, list[i].says))
            fail_msg("case %zu says '%s', not '%s'", i, p.text, list[i].says);
    }
}

static void bad_lengths(void **state)
{
    (void)state;
    struct problem p = {0};
    struct tensors *t = tensors_new();
    uint8_t huge[16] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    assert_int_equal(tensors_parse(t, "f", huge, sizeof huge, &p), -1);
    assert_non_null(strstr(p.text, "cut short"));
    p = (struct problem){0};
    assert_int_equal(tensors_parse(t, "f", huge, 7, &p), -1);
    assert_non_null(strstr(p.text, "too few"));
    tensors_close(&t);
}

static void widening(void **state)
{
    (void)state;
    static const uint16_t half[] = {0x3c00, 0xc000, 0x0001, 0x83ff, 0x7bff, 0x7c00, 0xfc00, 0x0000};
    static const float expect[] = {1, -2, 0x1p-24f, -0x3ffp-24f, 65504.0f, INFINITY, -INFINITY, 0};
    struct tensor t = {.data = half, .dtype = TENSOR_F16, .dims = 1, .shape = {8}};
    float out[8];
    tensor_widen(&t, 0, 8, out);
    for (int i = 0; i < 8; i++)
        assert_true(out[i] == expect[i]);
    static const uint16_t nan16 = 0x7e00;
    t.data = &nan16;
    tensor_widen(&t, 0, 1, out);
    assert_true(isnan(out[0]));
    static const uint16_t brain = 0xc0a0;
    t = (struct tensor){.data = &brain, .dtype = TENSOR_BF16, .dims = 1, .shape = {1}};
    tensor_widen(&t, 0, 1, out);
    assert_true(out[0] == -5.0f);
}

// Every way through the product: one token and several, bias or none, several panels.
static void products(void **state)
{
    (void)state;
    enum { ROWS = 700, COLS = 300, TOKENS = 5 };
    struct problem p = {0};
    struct linear_scratch s;
    assert_int_equal(linear_scratch_open(&s, COLS, &p), 0);
    static uint16_t w[ROWS * COLS], b[ROWS];
    static float x[TOKENS * COLS], y[TOKENS * ROWS];
    for (int i = 0; i < ROWS * COLS; i++)
        w[i] = (uint16_t)(0x3f00 + i % 97); // bf16 near 0.5
    for (int i = 0; i < ROWS; i++)
        b[i] = (uint16_t)(0x4000 + i % 31);
    for (int i = 0; i < TOKENS * COLS; i++)
        x[i] = (float)((i * 7919) % 201 - 100) / 64;
    struct tensor tw = {.data = w, .dtype = TENSOR_BF16, .dims = 2, .shape = {ROWS, COLS}};
    struct tensor tb = {.data = b, .dtype = TENSOR_BF16, .dims = 1, .shape = {ROWS}};
    for (int tokens = 1; tokens <= TOKENS; tokens += TOKENS - 1) {
        linear(&s, &tw, &tb, x, (uint32_t)tokens, y);
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < ROWS; r++) {
                float wide[COLS], bias;
                tensor_widen(&tw, (uint64_t)r * COLS, COLS, wide);
                tensor_widen(&tb, (uint64_t)r, 1, &bias);
                double sum = bias;
                for (int c = 0; c < COLS; c++)
                    sum += (double)wide[c] * x[t * COLS + c];
                assert_true(fabs(sum - y[t * ROWS + r]) < 1e-3);
            }
    }
    linear_scratch_close(&s);
}

// V H / sqrt(dim) in each KV head, with the bias, and what reads it in each query head undoes it.
static void folding(void **state)
{
    (void)state;
    enum { KV = 2, Q = 6, DIM = 8, HIDDEN = 5 };
    static float wv[KV * DIM * HIDDEN], bias[KV * DIM], wo[HIDDEN * Q * DIM];
    struct problem p = {0};
    struct linear_scratch s;
    for (int i = 0; i < KV * DIM * HIDDEN; i++)
        wv[i] = (float)((i * 7919) % 201 - 100) / 64;
    for (int i = 0; i < KV * DIM; i++)
        bias[i] = (float)((i * 31) % 17 - 8) / 4;
    for (int i = 0; i < HIDDEN * Q * DIM; i++)
        wo[i] = (float)((i * 104729) % 301 - 150) / 128;
    struct tensor v = {.data = wv, .dims = 2, .shape = {KV * DIM, HIDDEN}}, fv, fb, fo;
    struct tensor b = {.data = bias, .dims = 1, .shape = {KV * DIM}};
    struct tensor o = {.data = wo, .dims = 2, .shape = {HIDDEN, Q * DIM}};
    assert_int_equal(fold_rows(&v, DIM, &fv, &p), 0);
    assert_int_equal(fold_rows(&b, DIM, &fb, &p), 0);
    assert_int_equal(fold_columns(&o, DIM, &fo, &p), 0);
    assert_int_equal(linear_scratch_open(&s, Q * DIM, &p), 0);
    const float x[HIDDEN] = {1, -2, 0.5f, 3, -0.25f};
    float plain[KV * DIM], turned[KV * DIM], heads[2][Q * DIM], y[2][HIDDEN];
    linear(&s, &v, &b, x, 1, plain);
    linear(&s, &fv, &fb, x, 1, turned);
    for (int i = 0; i < KV * DIM; i++) {
        double want = 0;
        for (int j = 0; j < DIM; j++)
            want += (__builtin_parity((unsigned)(i % DIM & j)) ? -1 : 1) *
                    (double)plain[i / DIM * DIM + j];
        assert_true(fabs(want / sqrt(DIM) - (double)turned[i]) < 1e-5);
    }
    for (int i = 0; i < Q * DIM; i++) { // each query head attends to one token of its KV head
        int from = i / DIM / (Q / KV) * DIM + i % DIM;
        heads[0][i] = plain[from];
        heads[1][i] = turned[from];
    }
    linear(&s, &o, NULL, heads[0], 1, y[0]);
    linear(&s, &fo, NULL, heads[1], 1, y[1]);
    for (int i = 0; i < HIDDEN; i++)
        assert_true(fabsf(y[0][i] - y[1][i]) < 1e-4f);
    linear_scratch_close(&s);
    fold_free(&fv);
    fold_free(&fb);
    fold_free(&fo);
}

#define SHAPE                                                                                      \
    "\"hidden_size\":512,\"intermediate_size\":1024,\"num_hidden_layers\":2,"                      \
    "\"num_attention_heads\":4,\"vocab_size\":257"

static int read_config(const char *text, struct config *c, struct problem *p)
{
    *p = (struct problem){0};
    return config_parse(text, strlen(text), c, p);
}

static void good_config(void **state)
{
    (void)state;
    struct problem p;
    struct config c;
    assert_int_equal(read_config("{\"model_type\":\"llama\"," SHAPE ",\"num_key_value_heads\":2,"
                                 "\"bos_token_id\":256,\"rope_theta\":500000,\"rope_scaling\":"
                                 "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
                                 "\"high_freq_factor\":4,"
                                 "\"original_max_position_embeddings\":8192}}",
                                 &c, &p),
                     0);
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(c.kv_heads, 2);
    assert_int_equal(c.bos, 256);
    assert_true(c.bytes);
    assert_int_equal(c.rope.kind, ROPE_LLAMA3);
    assert_int_equal(
        read_config("{\"model_type\":\"mistral\"," SHAPE ",\"sliding_window\":100}", &c, &p), 0);
    assert_int_equal(c.window, 100);
    assert_int_equal(c.kv_heads, 4);
}

static void bad_configs(void **state)
{
    (void)state;
    static const struct bad list[] = {
        {"", "not a JSON object"},
        {"{}", "model_type '(none)'"},
        {"{\"model_type\":\"gpt2\"," SHAPE "}", "model_type 'gpt2'"},
        {"{\"model_type\":\"llama\",\"hidden_size\":1e30}", "hidden_size is 1e+30"},
        {"{\"model_type\":\"llama\",\"hidden_size\":-4}", "hidden_size is -4"},
        {"{\"model_type\":\"llama\"," SHAPE ",\"num_key_value_heads\":3}", "do not fit"},
        {"{\"model_type\":\"llama\"," SHAPE ",\"hidden_act\":\"gelu\"}", "hidden_act 'gelu'"},
        {"{\"model_type\":\"llama\"," SHAPE ",\"quantization_config\":{}}", "quantized weights"},
        {"{\"model_type\":\"llama\"," SHAPE ",\"num_local_experts\":8}", "mixtures of experts"},
        {"{\"model_type\":\"llama\"," SHAPE ",\"rope_scaling\":{\"type\":\"dynamic\"}}",
         "'dynamic' is not supported"},
        {"{\"model_type\":\"llama\"," SHAPE ",\"rope_theta\":0}", "rope_theta is 0"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        struct problem p;
        struct config c;
        assert_int_equal(read_config(list[i].header, &c, &p), -1);
        if (!strstr(p.text, list[i].says))
            fail_msg("case %zu says '%s', not '%s'", i, p.text, list[i].says);
    }
}

// Frequencies of Llama 3.1 (head_dim 128, theta 500000): the first pairs stand, the last are
// divided by the factor; YaRN likewise at its ends.
static void frequencies(void **state)
{
    (void)state;
    struct rope_config r = {.kind = ROPE_LLAMA3,
                            .theta = 500000,
                            .factor = 8,
                            .low_freq_factor = 1,
                            .high_freq_factor = 4,
                            .original_positions = 8192};
    float f[64], plain[64];
    rope_frequencies(&r, 128, f);
    r.kind = ROPE_PLAIN;
    rope_frequencies(&r, 128, plain);
    assert_true(f[0] == 1 && plain[0] == 1);
    assert_true(fabs(f[63] * 8 / plain[63] - 1) < 1e-6);
    r = (struct rope_config){.kind = ROPE_YARN,
                             .theta = 10000,
                             .factor = 4,
                             .beta_fast = 32,
                             .beta_slow = 1,
                             .original_positions = 4096};
    rope_frequencies(&r, 128, f);
    r.kind = ROPE_PLAIN;
    rope_frequencies(&r, 128, plain);
    assert_true(f[0] == plain[0]);
    assert_true(fabs(f[63] * 4 / plain[63] - 1) < 1e-6);
}

static void rotation(void **state)
{
    (void)state;
    struct rope_config r = {.theta = 100};
    float f[2], c[2], s[2], x[4] = {1, 2, 3, 4};
    rope_frequencies(&r, 4, f);
    rope_tables(&r, f, 2, 3, 1, c, s);
    rope_apply(x, 1, 2, c, s);
    assert_true(fabs(x[0] - (cos(3) - 3 * sin(3))) < 1e-6);
    assert_true(fabs(x[2] - (3 * cos(3) + sin(3))) < 1e-6);
    assert_true(fabs(x[3] - (4 * cos(0.3) + 2 * sin(0.3))) < 1e-5);
}

static void sampling(void **state)
{
    (void)state;
    struct problem p = {0};
    struct sampler s;
    static const float logits[] = {0, 3, 3, -1};
    assert_int_equal(sampler_open(&s, 4, 0, 1, 1, &p), 0);
    assert_int_equal(sampler_next(&s, logits), 1);
    sampler_close(&s);
    assert_int_equal(sampler_open(&s, 4, 1, 0.6, 1, &p), 0);
    int seen[4] = {0};
    for (int i = 0; i < 200; i++)
        seen[sampler_next(&s, logits)]++;
    sampler_close(&s);
    assert_true(seen[1] > 50 && seen[2] > 50 && !seen[0] && !seen[3]);
}

// A checkpoint of one layer and of all tensors that a layer may have, as model_open binds it: small
// ones of SMALL values, and large ones.
enum { FILE_TENSORS = 21, SMALL = 60, LARGE = 300 * 200 };

struct checkpoint {
    struct model model;
    struct layer_weights layer;
    struct tensor tensor[FILE_TENSORS];
    float *data[FILE_TENSORS];
    uint64_t values[FILE_TENSORS];
};

static void bind_checkpoint(struct checkpoint *c, struct model *m, struct layer_weights *w)
{
    const struct tensor **to[FILE_TENSORS] = {
        &m->embed, &m->norm, &m->head,   &w->norm_in, &w->norm_mlp,  &w->q,       &w->k,
        &w->v,     &w->o,    &w->q_bias, &w->k_bias,  &w->v_bias,    &w->q_norm,  &w->k_norm,
        &w->gate,  &w->up,   &w->down,   &w->o_bias,  &w->gate_bias, &w->up_bias, &w->down_bias};
    for (int i = 0; i < FILE_TENSORS; i++)
        *to[i] = &c->tensor[i];
    m->layers = w;
}

static void make_checkpoint(struct checkpoint *c)
{
    *c = (struct checkpoint){
        .model.config = {
            .family = "llama", .layers = 1, .hidden = 200, .rope = {.theta = 10000, .factor = 1}}};
    for (int i = 0; i < FILE_TENSORS; i++) {
        bool large = i % 2;
        c->values[i] = large ? LARGE : SMALL;
        c->data[i] = calloc(c->values[i], sizeof **c->data);
        assert_non_null(c->data[i]);
        for (uint64_t j = 0; j < c->values[i]; j++)
            c->data[i][j] = (float)(j % 1009);
        struct tensor *t = &c->tensor[i];
        *t = (struct tensor){.data = c->data[i], .dims = large ? 2 : 1, .dtype = TENSOR_F32};
        snprintf(t->name, sizeof t->name, "tensor %d", i);
        t->shape[0] = large ? 300 : SMALL;
        t->shape[1] = large ? 200 : 0;
    }
    bind_checkpoint(c, &c->model, &c->layer);
}

static void expect_other(struct checkpoint *c, bool other, const char *what, int which)
{
    static char first[sizeof c->model.fingerprint];
    char now[sizeof first];
    if (!*first)
        fingerprint_model(&c->model, first, sizeof first);
    fingerprint_model(&c->model, now, sizeof now);
    if (other != (strcmp(first, now) != 0))
        fail_msg("%s (%d): the fingerprint is %s", what, which, other ? "the same" : "another");
}

// One value of a tensor, wherever it stands; and all of RoPE.
static void fingerprints(void **state)
{
    (void)state;
    struct checkpoint c;
    make_checkpoint(&c);
    expect_other(&c, false, "nothing", 0);
    for (int i = 0; i < FILE_TENSORS; i++) {
        float *value = &c.data[i][(uint64_t)i * 7919 % c.values[i]];
        *value += 0.5f;
        expect_other(&c, true, "a value of a tensor", i);
        *value -= 0.5f;
        c.tensor[i].name[0] = 'T';
        expect_other(&c, true, "name of a tensor", i);
        c.tensor[i].name[0] = 't';
    }
    expect_other(&c, false, "nothing", 1);
    struct rope_config *r = &c.model.config.rope;
    double *numbers[] = {
        &r->theta,     &r->factor,    &r->low_freq_factor,  &r->high_freq_factor,
        &r->beta_fast, &r->beta_slow, &r->attention_factor, &c.model.config.norm_eps};
    for (int i = 0; i < (int)(sizeof numbers / sizeof *numbers); i++) {
        double was = *numbers[i];
        *numbers[i] += 1e-5;
        expect_other(&c, true, "a number of the configuration", i);
        *numbers[i] = was;
    }
    r->original_positions = 8192;
    expect_other(&c, true, "positions", 0);
    r->original_positions = 0;
    memset((uint8_t *)r + 1, 0xa5, offsetof(struct rope_config, theta) - 1); // padding
    expect_other(&c, false, "bytes between fields", 0);
    for (int i = 0; i < FILE_TENSORS; i++)
        free(c.data[i]);
}

// Numbers that are the same within each block say as much as one of them; a text that ends within a
// block ends it. Reference values: kvq.eval.stats.mean over the same windows.
static void clusters(void **state)
{
    (void)state;
    struct clusters c = {0};
    enum { BLOCKS = 10 };
    double sum = 0, squares = 0;
    assert_true(isnan(clusters_error(&c)));
    for (int b = 0; b < BLOCKS; b++) {
        double x = 0.01 * (b * 7 % 11);
        sum += x;
        squares += x * x;
        for (int i = 0; i < CLUSTER_TOKENS; i++)
            clusters_add(&c, x);
    }
    double want = sqrt((squares - sum * sum / BLOCKS) / (BLOCKS - 1) / BLOCKS);
    assert_true(fabs(clusters_error(&c) / want - 1) < 1e-9);
    assert_true(fabs(c.sum / c.tokens - sum / BLOCKS) < 1e-12);
    c = (struct clusters){0};
    for (int window = 0; window < 3; window++) {
        for (int i = 0; i < 200; i++)
            clusters_add(&c, window + 0.01 * i);
        clusters_end(&c);
        clusters_end(&c);
    }
    assert_int_equal(c.blocks, 6);
    assert_true(fabs(clusters_error(&c) - 0.431571540612523) < 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_file),   cmocka_unit_test(bad_files),
        cmocka_unit_test(bad_lengths), cmocka_unit_test(widening),
        cmocka_unit_test(products),    cmocka_unit_test(good_config),
        cmocka_unit_test(bad_configs), cmocka_unit_test(frequencies),
        cmocka_unit_test(rotation),    cmocka_unit_test(sampling),
        cmocka_unit_test(folding),     cmocka_unit_test(fingerprints),
        cmocka_unit_test(clusters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
