// SPDX-License-Identifier: Apache-2.0
//
// The kernels with classic dequantization, which tools/gpu-check.sh compares with, give the same
// results to rounding as those without; so what the comparison shows is the price of the codes'
// way alone. This program has the classic ones for head_dim 128.
#include "tests/gpu/gpu_kit.h"

using namespace kit;

static void test_classic(void **)
{
    std::mt19937 random(51);
    for (const char *format : {"oscar2", "oscar3", "oscar4", "kivi2"})
        for (const int gqa : {4, 12}) { // 8 and 16 query rows
            layer l = make_layer(format, 128, gqa, 1, KVQ_F16);
            l.shape.softcap = gqa == 12 ? 20 : 0;
            wish w;
            w.tokens = 700;
            w.packed = 650;
            w.fresh = 1;
            session s = make_session(l, w, random);
            const double error = worst_error(l, s, run(l, {&s}, run_options())[0]);
            print_message("%s, %d heads: %.2f of the error allowed\n", format, gqa, error);
            assert_true(error <= 1);
        }
}

int main(void)
{
    const CMUnitTest tests[] = {cmocka_unit_test(test_classic)};
    return cmocka_run_group_tests(tests, open_device, close_device);
}
