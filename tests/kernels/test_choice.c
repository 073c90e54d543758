// SPDX-License-Identifier: Apache-2.0
//
// What choice.h says of formats, against what the code does that it speaks of.
#include "kernels/choice.h"
#include "kernels/cuda/attend.c" // source_of, which nobody else sees
#include "tests/kits/unit.h"

static const struct kvq_shape shape = {
    .q_heads = 1, .kv_heads = 1, .k_dim = 128, .v_dim = 128, .dtype = KVQ_F16, .scale = 1};

static const char *const composed[] = {
    "oscar2-g128",          "kivi2-g64",        "kvq2-s0",
    "innerq-base-g64",      "kvq2+kivi2",       "kivi2+kvq2",
    "oscar3+kivi2",         "oscar4+oscar4-xh", "kivi2-g128:v_group=0",
    "innerq-small-nosmooth"};

static void compare(const struct kvq_format *f)
{
    struct kvq_gpu_attend_args args = {.recipe = kvq_recipe_of(f, &shape)};
    bool apart = kvq_has_centroids(f) && f->k_channel != KVQ_CHANNEL_BOOK; // tables, as million-*
    args.book.k_sub = args.book.v_sub = apart ? 1024 : 0;
    assert_int_equal(kvq_has_gpu_loop(f), source_of(&args) != ANY);
}

PLAIN_TEST(test_gpu_loops)
{
    char text[256];
    struct kvq_format f;
    for (const struct kvq_format *row = kvq_formats; row->name[0]; row++)
        compare(row);
    for (size_t i = 0; i < sizeof composed / sizeof *composed; i++) {
        assert_int_equal(kvq_format_parse(composed[i], &f, text, sizeof text), 0);
        compare(&f);
    }
}

static bool is_one_of(const char *name, const char *const *names)
{
    while (*names && strcmp(*names, name) != 0)
        names++;
    return *names != NULL;
}

// As docs/benchmarks.md and docs/formats.md name them.
PLAIN_TEST(test_fast_paths)
{
    static const char *const fast[] = {"oscar2",     "oscar3",     "oscar4", "oscar2-xh",
                                       "oscar3-xh",  "oscar4-xh",  "kivi2",  "kivi4",
                                       "kivi-sink2", "ott2-oscar", "kvq2",   NULL};
    for (const struct kvq_format *row = kvq_formats; row->name[0]; row++)
        assert_int_equal(kvq_has_fast_path(row), is_one_of(row->name, fast));
}

PLAIN_TEST(test_prefixes)
{
    static const char *const alone[] = {"ott2",          "ott2-oscar",   "innerq-base",
                                        "innerq-hybrid", "innerq-small", NULL};
    for (const struct kvq_format *row = kvq_formats; row->name[0]; row++)
        assert_int_equal(kvq_shares_prefixes(row), !is_one_of(row->name, alone));
}

PLAIN_TEST(test_recommended)
{
    size_t n = 0;
    for (const struct kvq_format *row = kvq_formats; row->name[0]; row++)
        n += kvq_format_is_recommended(row);
    for (const char *const *name = kvq_recommended_formats; *name; name++, n--)
        assert_non_null(kvq_format_by_name(*name));
    assert_int_equal(n, 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
