// SPDX-License-Identifier: Apache-2.0
//
// The table of formats: what a token costs, what names mean, and which are refused. What the codecs
// do is in test_codecs.c; sink tokens, outliers and learned factors are in test_extras.c.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/sizes.h"
#include "tests/kernels/kvtest.h"

// ---- Sizes ----

static const struct {
    const char *name;
    double bytes; // per token and KV head at head_dim 128, K and V
} sizes[] = {
    {"oscar2", 98},
    {"oscar3", 130},
    {"oscar4", 162},
    {"oscar2-xh", 98},
    {"oscar2-g64", 82},
    {"oscar2-g128", 74},
    {"oscar2-noscale", 96},
    {"oscar2-max", 98},
    {"kivi1", 64},
    {"kivi2", 96},
    {"kivi4", 160},
    {"kivi2-g64", 80},
    {"kivi2-g128", 72},
    {"kivi-sink2", 96},
    {"ott2", 72},
    {"ott2-oscar", 96},
    {"ott2-o0", 72},
    {"innerq-base", 112},
    {"innerq-hybrid", 104},
    {"innerq-small", 96},
    {"innerq-small-full", 96},
    {"vecinfer-4", 128},
    {"vecinfer-3", 96},
    {"vecinfer-2", 64},
    {"vecinfer-1.5", 48},
    {"vecinfer-1.25", 40},
    {"vecinfer-1", 32},
    {"vecinfer-d8b16", 64},
    {"vecinfer-d2b4", 64},
    {"vecinfer-d4b6", 48},
    {"vecinfer-d2b3", 48},
    {"million-4", 128},
    {"million-3", 96},
    {"million-2", 64},
    {"quarot2", 96},
    {"quarot4", 160},
    {"turboquant2.5", 80},
    {"turboquant3", 100},
    {"turboquant4", 132},
    {"turboquant-k4v3", 116},
    {"int8", 272},
    {"k8v4", 216},
    {"kvq2", 88},
    {"oscar3-xh", 130},
    {"oscar4-xh", 162},
    {"f16", 512},
    {"bf16", 512},
    {"oscar2+innerq-small", 90},
    {"vecinfer-k4x10v8x12", 64},
};

static void test_bytes_per_token(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const struct kvq_format *f = kvt_format(sizes[i].name);
        struct kvq_shape s = kvt_shape(4, 8, 128, f->raw_dtype ? f->raw_dtype : KVQ_F16);
        struct kvq_layout l = kvq_layout_of(f, &s);
        if (l.record_bytes != 128 * sizes[i].bytes)
            fail_msg("%s takes %g bytes a token, not %g", f->name, l.record_bytes / 128.0,
                     sizes[i].bytes);
        assert_true(kvq_bits_per_value(f, &s) == sizes[i].bytes / 32);
        assert_int_equal(kvq_block_bytes(&l, &s), 8 * l.record_bytes);
    }
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) { // none is left out
        size_t i = 0;
        while (i < sizeof sizes / sizeof *sizes && strcmp(sizes[i].name, f->name))
            i++;
        if (i == sizeof sizes / sizeof *sizes)
            fail_msg("nobody says what %s should cost", f->name);
    }
}

static void test_windows(void **state)
{
    static const struct {
        const char *name;
        uint16_t unit, recent, sink;
        uint8_t outliers, extra, plain_layers;
    } rows[] = {
        {"oscar2", 128, 0, 0, 0, 0, 0},       {"kivi2", 128, 0, 0, 0, 0, 0},
        {"kivi-sink2", 32, 96, 32, 0, 0, 0},  {"ott2", 128, 32, 0, 3, 32, 2},
        {"ott2-oscar", 32, 128, 0, 5, 32, 2}, {"innerq-base", 32, 96, 32, 0, 0, 0},
        {"vecinfer-2", 128, 0, 0, 0, 0, 0},   {"quarot2", 32, 0, 0, 0, 0, 0},
        {"turboquant3", 32, 0, 0, 0, 0, 0},   {"kvq2", 128, 0, 32, 0, 0, 0},
        {"int8", 32, 0, 0, 0, 0, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct kvq_format *f = kvt_format(rows[i].name);
        assert_int_equal(f->unit_tokens, rows[i].unit);
        assert_int_equal(f->recent_tokens, rows[i].recent);
        assert_int_equal(f->sink_tokens, rows[i].sink);
        assert_int_equal(f->outliers, rows[i].outliers);
        assert_int_equal(f->extra_outliers, rows[i].extra);
        assert_int_equal(f->plain_layers, rows[i].plain_layers);
    }
}

static void test_learn_tokens(void **state)
{
    (void)state;
    assert_int_equal(kvq_learn_tokens(kvt_format("oscar2"), 5000), 0);
    assert_int_equal(kvq_learn_tokens(kvt_format("ott2-o0"), 5000), 0);
    assert_int_equal(kvq_learn_tokens(kvt_format("innerq-base-nosmooth"), 5000), 0);
    assert_int_equal(kvq_learn_tokens(kvt_format("innerq-base"), 0), 128);
    assert_int_equal(kvq_learn_tokens(kvt_format("innerq-base"), 127), 128);
    assert_int_equal(kvq_learn_tokens(kvt_format("innerq-base"), 255), 224);
    assert_int_equal(kvq_learn_tokens(kvt_format("ott2"), 255), 128);
    assert_int_equal(kvq_learn_tokens(kvt_format("ott2"), 4999), 4096);
    assert_int_equal(kvq_learn_tokens(kvt_format("ott2"), 1000000), 4096);
}

// ---- Names ----

static void parse(const char *name, struct kvq_format *f)
{
    char text[300] = "";
    if (kvq_format_parse(name, f, text, sizeof text))
        fail_msg("%s: %s", name, text);
    assert_string_equal(f->name, name);
}

// Whether two formats are the same but for name and source.
static void assert_same_stages(const struct kvq_format *a, const struct kvq_format *b)
{
    struct kvq_format x = *a, y = *b;
    memset(x.name, 0, sizeof x.name);
    memset(y.name, 0, sizeof y.name);
    x.source = y.source = NULL;
    assert_memory_equal(&x, &y, sizeof x);
}

#define SUFFIX(full_name, row_name, change)                                                        \
    do {                                                                                           \
        struct kvq_format got, f = *kvq_format_by_name(row_name);                                  \
        change;                                                                                    \
        parse(full_name, &got);                                                                    \
        assert_same_stages(&got, &f);                                                              \
    } while (0)

static void test_suffixes(void **state)
{
    (void)state;
    for (const struct kvq_format *row = kvq_formats; row->name[0]; row++)
        SUFFIX(row->name, row->name, (void)0);
    SUFFIX("oscar2-g32", "oscar2", (void)0);
    SUFFIX("oscar2-g64", "oscar2", f.k.group = f.v.group = 64);
    SUFFIX("innerq-base-g128", "innerq-base", f.k.group = f.v.group = f.unit_tokens = 128);
    SUFFIX("int8-g64", "int8", f.k.group = f.v.group = 64); // per token: the unit stays
    SUFFIX("oscar2-fm", "oscar2", f.k.zero = f.v.zero = KVQ_ZERO_MINIMUM);
    SUFFIX("oscar2-fit", "oscar2", f.k.zero = f.v.zero = KVQ_ZERO_FITTED);
    SUFFIX("k8v4-fit", "k8v4", f.v.zero = KVQ_ZERO_FITTED);
    SUFFIX("innerq-base-full", "innerq-base", f.k.full = f.v.full = 1);
    SUFFIX("innerq-hybrid-full", "innerq-hybrid", f.k.full = f.v.full = 1);
    SUFFIX("k8v4-full", "k8v4", f.k.full = 1);
    SUFFIX("k8v4-fm", "k8v4", (void)0); // V has it, and K's codes have no zeros
    SUFFIX("oscar2-g064-s032", "oscar2", f.k.group = f.v.group = 64; f.sink_tokens = 32);
    SUFFIX("oscar2-norot", "oscar2", f.k_rotation = KVQ_ROTATE_NONE; f.paper_rotates_v = 0);
    SUFFIX("turboquant3-norot", "turboquant3", f.k_rotation = f.v_rotation = KVQ_ROTATE_NONE);
    SUFFIX("kvq2-norot", "kvq2", f.v_rotation = KVQ_ROTATE_NONE);
    SUFFIX("oscar2-noscale", "oscar2", f.k_token_scale = KVQ_SCALE_NONE);
    SUFFIX("vecinfer-2-nosmooth", "vecinfer-2", f.k_channel = KVQ_CHANNEL_NONE);
    SUFFIX("oscar2-xh", "oscar2", f.k_token_scale = KVQ_SCALE_L2_CROSS);
    SUFFIX("oscar2-max", "oscar2", f.k_token_scale = KVQ_SCALE_MAX);
    SUFFIX("oscar2-mean", "oscar2", f.k_token_scale = KVQ_SCALE_MEAN_ABS);
    SUFFIX("ott2-o0", "ott2", f.outliers = 0);
    SUFFIX("ott2-o32", "ott2", f.outliers = 32);
    SUFFIX("oscar2-s96", "oscar2", f.sink_tokens = 96);
    SUFFIX("innerq-base-s0-w0", "innerq-base", f.sink_tokens = f.recent_tokens = 0);
    SUFFIX("oscar2-w4096", "oscar2", f.recent_tokens = 4096);
    SUFFIX("oscar2-norot-noscale-fm-g128", "oscar2",
           f.k_rotation = f.k_token_scale = f.paper_rotates_v = 0;
           f.k.zero = f.v.zero = KVQ_ZERO_MINIMUM; f.k.group = f.v.group = 128);
}

static void test_pairs_and_books(void **state)
{
    struct kvq_format f, a = *kvq_format_by_name("oscar4"), b = *kvq_format_by_name("innerq-small");
    (void)state;
    parse("oscar4+innerq-small", &f);
    a.v = b.v;
    a.paper_rotates_v = 0; // V's paper is InnerQ's
    a.recent_tokens = 96;  // the longer of all windows and units
    a.sink_tokens = 32;
    assert_same_stages(&f, &a);
    a = *kvq_format_by_name("int8"), b = *kvq_format_by_name("turboquant2.5");
    parse("int8+turboquant2.5", &f);
    a.v = b.v;
    a.v_rotation = KVQ_ROTATE_SIGNED;
    assert_same_stages(&f, &a);
    parse("innerq-base-g64+kivi2", &f);
    assert_int_equal(f.unit_tokens, 128);
    assert_int_equal(f.k.group, 64);
    a = *kvq_format_by_name("vecinfer-2");
    a.k.bits = 10, a.v.vector = 8, a.v.bits = 12;
    parse("vecinfer-k4x10v8x12", &f);
    assert_same_stages(&f, &a);
    parse("vecinfer-k<4,10>v<8,12>", &f);
    assert_same_stages(&f, &a);
    a.k_rotation = KVQ_ROTATE_NONE;
    parse("vecinfer-k<4,10>v<8,12>-norot", &f);
    assert_same_stages(&f, &a);
}

static void test_stages(void **state)
{
    struct kvq_format f;
    char text[400];
    (void)state;
    SUFFIX("oscar2:sink=32:recent=64", "oscar2", f.sink_tokens = 32; f.recent_tokens = 64);
    SUFFIX("oscar2:rot=none:scale=max:kbits=3:zero=minimum", "oscar2",
           f.k_rotation = KVQ_ROTATE_NONE;
           f.paper_rotates_v = 0; f.k_token_scale = KVQ_SCALE_MAX; f.k.bits = 3;
           f.k.zero = f.v.zero = KVQ_ZERO_MINIMUM);
    SUFFIX("oscar2:k_rotation=signed:token_scale=mean:v_bits=4", "oscar2",
           f.k_rotation = KVQ_ROTATE_SIGNED;
           f.paper_rotates_v = 0; f.k_token_scale = KVQ_SCALE_MEAN_ABS; f.v.bits = 4);
    // What is as the paper has it leaves V's rotation as the paper has it.
    SUFFIX("oscar2:rot=hadamard:channel=none:vcodec=affine:vaxis=token", "oscar2", (void)0);
    SUFFIX("oscar2:vrot=none", "oscar2", f.paper_rotates_v = 0);
    SUFFIX("int8:k_codec=affine:k_zero=minimum:k_axis=channel", "int8",
           f.k.codec = KVQ_CODEC_AFFINE;
           f.k.zero = KVQ_ZERO_MINIMUM; f.k.axis = KVQ_PER_CHANNEL);
    SUFFIX("k8v4:zero=integer", "k8v4", f.v.zero = KVQ_ZERO_INTEGER);
    SUFFIX("kvq2-fm-s0", "kvq2", f.k.zero = KVQ_ZERO_MINIMUM; f.sink_tokens = 0);
    SUFFIX("kvq2-fit-s32", "kvq2", (void)0);
    SUFFIX("oscar3-g128-norot-fit-s32+turboquant3:vbits=2", "kvq2", (void)0);
    SUFFIX("kivi2:kcodec=symmetric", "kivi2", f.k.codec = KVQ_CODEC_SYMMETRIC; f.k.zero = 0);
    SUFFIX("innerq-small:zero=minimum:vcodec=affine", "innerq-small", f.v.codec = KVQ_CODEC_AFFINE;
           f.v.zero = KVQ_ZERO_MINIMUM);
    SUFFIX("turboquant3:kbits=2:k_wide=1", "turboquant3", f.k.bits = 2; f.k.wide = 1);
    SUFFIX("kivi2:outliers=3", "kivi2", f.outliers = 3; f.extra_outliers = 32);
    SUFFIX("kivi2:displaced=7:outliers=3", "kivi2", f.outliers = 3; f.extra_outliers = 7);
    SUFFIX("kivi2:displaced=0:outliers=5", "kivi2", f.outliers = 5);
    SUFFIX("kivi2:outliers=5:displaced=0", "kivi2", f.outliers = 5);
    SUFFIX("ott2:outliers=0", "ott2", f.outliers = 0);
    parse("oscar4-g64+int8:vrot=signed:unit=128", &f);
    assert_int_equal(f.v_rotation, KVQ_ROTATE_SIGNED);
    assert_int_equal(f.k.group, 64);
    // A change that is refused changes nothing.
    struct kvq_format before = f;
    assert_int_equal(kvq_format_change(&f, "sink=64:recent=many", text, sizeof text), -1);
    assert_memory_equal(&f, &before, sizeof f);
    // Every stage has one number, whichever way its name is written.
    assert_int_equal(kvq_format_stage("kbits", 5), kvq_format_stage("k_bits=3", 6));
    assert_int_equal(kvq_format_stage("rot", 3), kvq_format_stage("k_rotation", 10));
    assert_int_not_equal(kvq_format_stage("rot", 3), kvq_format_stage("vrot", 4));
    assert_int_equal(kvq_format_stage("", 0), -1);
    assert_int_equal(kvq_format_stage("_", 1), -1);
    assert_int_equal(kvq_format_stage("ro", 2), -1);
}

struct refused_name {
    const char *name, *part;
};

static void assert_refused(const struct refused_name *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct kvq_format f;
        char text[300] = "";
        if (kvq_format_parse(rows[i].name, &f, text, sizeof text) != -1)
            fail_msg("%s was not refused", rows[i].name);
        if (!strstr(text, rows[i].part))
            fail_msg("%s: \"%s\" does not say \"%s\"", rows[i].name, text, rows[i].part);
    }
}

static void test_refused_names(void **state)
{
    static const struct refused_name names[] = {
        {"", "is unknown"},
        {"oscar5", "format oscar5 is unknown"},
        {"oscar2x", "is unknown"},
        {"OSCAR2", "is unknown"},
        {"oscar2-", "suffix - "},
        {"oscar2--fm", "suffix - "},
        {"oscar2-g48", "suffix -g48 does not go with it"},
        {"oscar2-g", "suffix -g "},
        {"oscar2-g32x", "suffix -g32x"},
        {"oscar2-g99999999999999999999", "suffix -g9"},
        {"turboquant3-g32", "suffix -g32"},
        {"vecinfer-2-g32", "suffix -g32"},
        {"innerq-base-fm", "suffix -fm"},
        {"kivi2-full", "suffix -full"},
        {"kivi2-norot", "suffix -norot"},
        {"kivi2-noscale", "suffix -noscale"},
        {"kivi2-xh", "suffix -xh"},
        {"oscar2-nosmooth", "suffix -nosmooth"},
        {"oscar2-o3", "suffix -o3"},
        {"ott2-o33", "suffix -o33"},
        {"oscar2-s33", "suffix -s33"},
        {"oscar2-s128", "suffix -s128"},
        {"oscar2-w4097", "suffix -w4097"},
        {"oscar2-w-1", "suffix -w "},
        {"f16-g32", "suffix -g32"},
        {"f16+oscar2", "both raw or both quantized"},
        {"f16+bf16", "f16 and bf16"},
        {"oscar2+", "is unknown"},
        {"+oscar2", "is unknown"},
        {"oscar2+kivi2+kivi2", "is unknown"},
        {"oscar2 +kivi2", "is unknown"},
        {"vecinfer-k4x264v4x8", "unknown"},
        {"vecinfer-k 4x8v4x8", "unknown"},
        {"vecinfer-k4x8v4x-8", "unknown"},
        {"vecinfer-k<4,8>v<4,8", "unknown"},
        {"vecinfer-k4x8v4", "unknown"},
        {"oscar2-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "at most 63"},
    };
    (void)state;
    assert_refused(names, sizeof names / sizeof *names);
}

static void test_refused_stages(void **state)
{
    static const struct refused_name names[] = {
        {"oscar2:", "should be stage=value"},
        {"oscar2:rot", "\"rot\" should be stage=value"},
        {"oscar2:rot=odd", "stage k_rotation cannot be \"odd\"; it can be none, hadamard, signed"},
        {"oscar2:sink=97", "stage sink cannot be \"97\"; it can be 0 to 96"},
        {"oscar2:sink=-1", "cannot be \"-1\""},
        {"oscar2:sink=00000000000000000000000000000000064", "stage sink cannot be \"000"},
        {"oscar2:sink=0000000000000000000000000000000many", "stage sink cannot be \"000"},
        {"oscar2:sink= 1", "cannot be \" 1\""},
        {"oscar2:sink=99999999999999999999", "it can be 0 to 96"},
        {"oscar2:colour=1", "there is no stage \"colour\"; there are k_channel, token_scale,"},
        {"oscar2:=1", "there is no stage"},
        {"oscar2:sink=32:", "should be stage=value"},
        {"oscar2:sink=33", "sink windows have 0, 32, 64 or 96"},
        {"oscar2:k_bits=5", "K: codes have"},
        {"oscar2:recent=1-w5", "it can be 0 to 4096"},
        {"int8:zero=minimum", "stage zero goes with affine codes"},
        {"k8v4:k_zero=minimum", "stage k_zero goes with affine codes"},
        {"kivi2:v_zero=integer:v_codec=symmetric", "stage v_zero goes with affine codes"},
        {"vecinfer-2:zero=minimum", "stage zero goes with affine codes"},
        {"vecinfer-2:channel=prompt", "before there is a prompt"},
        {"vecinfer-2:scale=l2", "not divided by a token's scale"},
        {"million-2:scale=mean", "not divided by a token's scale"},
        {"f16:sink=32", "is raw"},
        {"oscar9:sink=32", "format oscar9 is unknown"},
    };
    (void)state;
    assert_refused(names, sizeof names / sizeof *names);
}

// Why a code of so many bits cannot stand for so many channels; NULL if it can.
static const char *wrong_code(uint32_t channels, uint32_t bits)
{
    static const bool known[20] = {
        [3] = 1, [4] = 1, [6] = 1, [8] = 1, [10] = 1, [12] = 1, [16] = 1};
    if (channels != 2 && channels != 4 && channels != 8)
        return "a codebook's code stands for 2, 4 or 8 channels";
    if (!known[bits])
        return "a codebook's codes have 3, 4, 6, 8, 10, 12 or 16 bits";
    if (bits < channels)
        return "a codebook's code has at least 1 bit for each channel";
    return bits == 16 && channels < 8 ? "a codebook's codes of 16 bits stand for 8 channels" : NULL;
}

static void test_codes_of_books(void **state)
{
    char name[KVQ_FORMAT_NAME], text[300] = "";
    struct kvq_format f, row;
    (void)state;
    for (uint32_t i = 0; i < 10 * 20; i++) {
        uint32_t channels = i / 20, bits = i % 20;
        const char *wrong = wrong_code(channels, bits);
        for (int v = 0; v < 2; v++) {
            snprintf(name, sizeof name, "vecinfer-k%ux%uv%ux%u", v ? 4 : channels, v ? 8 : bits,
                     v ? channels : 4, v ? bits : 8);
            if (kvq_format_parse(name, &f, text, sizeof text) != (wrong ? -1 : 0))
                fail_msg("%s was%s refused", name, wrong ? " not" : "");
            if (wrong && (!strstr(text, wrong) || !strstr(text, v ? "V: " : "K: ")))
                fail_msg("%s: \"%s\" does not say \"%s\"", name, text, wrong);
        }
        snprintf(name, sizeof name, "vecinfer-d%ub%u", channels, bits);
        if (kvq_format_parse(name, &row, text, sizeof text) == 0) {
            snprintf(name, sizeof name, "vecinfer-k%ux%uv%ux%u", channels, bits, channels, bits);
            parse(name, &f);
            assert_true(kvq_format_same(&row, &f));
        }
    }
}

static void test_longest_name(void **state)
{
    char name[KVQ_FORMAT_NAME + 1] = "oscar2-w";
    struct kvq_format f;
    char text[300];
    (void)state;
    memset(name + 8, '0', KVQ_FORMAT_NAME - 1 - 8);
    assert_int_equal(strlen(name), KVQ_FORMAT_NAME - 1);
    parse(name, &f);
    name[KVQ_FORMAT_NAME - 1] = '0';
    assert_int_equal(kvq_format_parse(name, &f, text, sizeof text), -1);
    assert_non_null(strstr(text, "has 64 characters"));
}

static void garbage(struct kvt_rng *rng, char *name, size_t n)
{
    static const char *const parts[] = {
        "oscar2", "ott2",      "-",      "-g64",      "-g",    "+",
        "-o5",    "-s32",      "-fm",    "int8",      "kivi2", "vecinfer-k4x8v4x8",
        "-w",     "99999",     "x",      "<4,8>",     "-full", "innerq-base",
        "f16",    "-nosmooth", ":sink=", ":k_bits=4", ":unit", "=32"};
    size_t at = 0;
    name[0] = '\0';
    for (uint32_t i = 0, pieces = 1 + kvt_below(rng, 6); i < pieces; i++) {
        char byte[2] = {(char)(1 + kvt_below(rng, 255)), '\0'};
        uint32_t which = kvt_below(rng, 3 + sizeof parts / sizeof *parts);
        at += (size_t)snprintf(name + at, n - at, "%s",
                               which < sizeof parts / sizeof *parts ? parts[which] : byte);
    }
}

// Whatever a name says, it is refused with a reason or it is a format that has a layout.
static void test_garbage_names(void **state)
{
    struct kvt_rng rng = {.state = kvt_seed()};
    uint32_t accepted = 0;
    (void)state;
    for (int round = 0; round < 50000; round++) {
        struct kvq_format f;
        char name[300], text[300] = "";
        garbage(&rng, name, sizeof name);
        if (kvq_format_parse(name, &f, text, sizeof text)) {
            assert_true(strlen(text) > 10);
            continue;
        }
        accepted++;
        assert_int_equal(kvq_format_check(&f, text, sizeof text), 0);
        for (uint32_t dim = 64; dim <= 256; dim *= 2) {
            struct kvq_shape s = kvt_shape(1, 1, dim, f.raw_dtype ? f.raw_dtype : KVQ_F16);
            assert_true(kvq_layout_of(&f, &s).record_bytes % KVQ_RECORD_ALIGN == 0);
            assert_true(kvq_extras_bytes(&f, &s) % KVQ_RECORD_ALIGN == 0);
        }
    }
    assert_true(accepted > 1000);
}

// ---- Rows that somebody composed ----

static void refused_row(struct kvq_format f, const char *part)
{
    char text[300] = "";
    assert_int_equal(kvq_format_check(&f, text, sizeof text), -1);
    if (!strstr(text, part))
        fail_msg("\"%s\" does not say \"%s\"", text, part);
}

static void test_refused_rows(void **state)
{
    struct kvq_format f, row = *kvt_format("kivi2");
    (void)state;
    f = row, f.k.bits = 5, refused_row(f, "K: codes have 1 (affine only), 2, 3, 4 or 8");
    f = row, f.v.bits = 0, refused_row(f, "V: codes have");
    f = *kvt_format("int8"), f.k.bits = 1, refused_row(f, "K: codes have");
    f = *kvt_format("innerq-hybrid"), f.v.bits = 8, refused_row(f, "V: hybrid groups");
    f = *kvt_format("turboquant3"), f.k.bits = 8, refused_row(f, "K: Lloyd-Max");
    f = *kvt_format("turboquant3"), f.v.group = 32, refused_row(f, "V: Lloyd-Max");
    f = *kvt_format("turboquant3"), f.k.wide = 1, refused_row(f, "K: only 2-bit");
    f = *kvt_format("vecinfer-2"), f.k.wide = 1, refused_row(f, "K: a codebook's codes have no");
    f = *kvt_format("vecinfer-2"), f.v.group = 32, refused_row(f, "V: a codebook's codes have no");
    f = row, f.k.full = 1, refused_row(f, "K: only symmetric and hybrid");
    f = row, f.k.group = 48, refused_row(f, "K: 32, 64 or 128 values");
    f = row, f.k.group = 0, refused_row(f, "K: scales per channel serve");
    f = *kvt_format("kivi-sink2"), f.k.group = 64, refused_row(f, "within one unit");
    f = row, f.k.codec = 99, refused_row(f, "K: the codec is unknown");
    f = row, f.unit_tokens = 16, refused_row(f, "units have 32, 64 or 128");
    f = row, f.sink_tokens = 128, refused_row(f, "sink windows have 0, 32, 64 or 96");
    f = row, f.recent_tokens = 5000, refused_row(f, "at most 4096");
    f = *kvt_format("ott2"), f.outliers = 33, refused_row(f, "at most 64 outlier");
    f = row, f.k_channel = KVQ_CHANNEL_BOOK, refused_row(f, "K has none");
    f = row, f.k_channel = 9, refused_row(f, "a stage is unknown");
    f = row, f.v_rotation = 9, refused_row(f, "a stage is unknown");
    f = row, f.k_token_scale = 9, refused_row(f, "a stage is unknown");
    f = *kvt_format("f16"), f.sink_tokens = 32, refused_row(f, "a raw format has no other stages");
}

static uint64_t session_bytes(const char *format, uint64_t tokens, uint64_t *plain)
{
    struct kvq_shape s = kvt_shape(4, 8, 128, KVQ_F16);
    struct kvq_session_bytes b = kvq_session_bytes_of(kvt_format(format), &s, NULL, 32, tokens, 0);
    *plain = b.plain;
    return b.packed + b.window + b.books;
}

// docs/sizing.md: a session in a format that the docs recommend is never larger than one in f16,
// and from 128 tokens on smaller than 16 bits a value alone.
static void test_short_sessions(void **state)
{
    static const char *const names[] = {"kvq2", "oscar2", "oscar3", "oscar4", "kivi2", "kivi4"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (uint64_t n = 1; n <= 4000; n++) {
            uint64_t plain, bytes = session_bytes(names[i], n, &plain);
            if (bytes > session_bytes("f16", n, &plain) || (n >= 128 && bytes >= plain))
                fail_msg("%llu tokens in %s take %llu bytes", (unsigned long long)n, names[i],
                         (unsigned long long)bytes);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_per_token), cmocka_unit_test(test_windows),
        cmocka_unit_test(test_learn_tokens),    cmocka_unit_test(test_suffixes),
        cmocka_unit_test(test_pairs_and_books), cmocka_unit_test(test_stages),
        cmocka_unit_test(test_refused_names),   cmocka_unit_test(test_refused_stages),
        cmocka_unit_test(test_codes_of_books),  cmocka_unit_test(test_longest_name),
        cmocka_unit_test(test_garbage_names),   cmocka_unit_test(test_refused_rows),
        cmocka_unit_test(test_short_sessions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
