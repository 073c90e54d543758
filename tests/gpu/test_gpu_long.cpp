// SPDX-License-Identifier: Apache-2.0
//
// Attention on the GPU over contexts so long that splits hold many blocks: each warp then sends
// several groups, or tiles, through the same stages of shared memory. Also under other seeds and
// with sums that are cut.
#include "tests/gpu/gpu_kit.h"

using namespace kit;

struct length {
    const char *format;
    uint64_t tokens, packed; // splits of 512, 1,024 and 2,048 tokens
    uint32_t window;         // which ends within a group, at an odd token
};

static const length lengths[] = {
    {"oscar2", 8300, 8192, 0},        {"oscar3", 16500, 16384, 0},
    {"oscar4", 8300, 8192, 7777},     {"oscar2", 33000, 32896, 0},
    {"quarot2", 8300, 8192, 0},       {"f16", 8300, 8192, 0},
    {"innerq-base", 8300, 8192, 0},   {"innerq-hybrid", 8300, 8192, 6001},
    {"vecinfer-2", 8300, 8192, 5002}, {"oscar2-bf16", 8300, 640, 0}, // most of it raw
};

static void test_long(void **)
{
    std::mt19937 random(21);
    for (const length &n : lengths) {
        const bool raw_bf16 = strcmp(n.format, "oscar2-bf16") == 0;
        layer l = make_layer(raw_bf16 ? "oscar2" : n.format, 64, 2, 1,
                             raw_bf16 ? KVQ_BF16 : KVQ_F16, KVQ_V_ROT_NONE, true);
        l.shape.window = n.window;
        wish w;
        w.tokens = n.tokens;
        w.packed = n.packed;
        w.fresh = 1;
        session s = make_session(l, w, random);
        run_options options;
        const result first = run(l, {&s}, options)[0];
        const double error = worst_error(l, s, first);
        print_message("%s, %llu tokens: %.2f of the error allowed\n", n.format,
                      (unsigned long long)n.tokens, error);
        assert_true(error <= 1);
        options.seed = 77;
        options.blocks = 7;
        assert_true(run(l, {&s}, options)[0] == first);
        if (n.tokens < 10000) {
            options.truncate = true;
            assert_true(worst_error(l, s, run(l, {&s}, options)[0]) <= 1);
        }
    }
}

int main(void)
{
    const CMUnitTest tests[] = {cmocka_unit_test(test_long)};
    return cmocka_run_group_tests(tests, open_device, close_device);
}
