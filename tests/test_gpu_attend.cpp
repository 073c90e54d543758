// SPDX-License-Identifier: Apache-2.0
//
// Attention on the GPU, run in the emulator, is what kernels.h promises: for every format, shape
// and way that a batch may look, within 2e-3 of double precision over what the same cache holds,
// and the same to the bit however the work is spread.
#include "tests/gpu_kit.h"

using namespace kit;

static void expect(const char *what, const layer &l, const session &s, const result &r)
{
    const double worst = worst_error(l, s, r);
    if (!(worst <= 1))
        fail_msg("%s: %s, head_dim %u, %u heads for %u, %llu tokens, %llu packed, %u fresh, %u "
                 "query tokens: %.2f of the error allowed",
                 what, l.format.name, l.shape.k_dim, l.shape.q_heads, l.shape.kv_heads,
                 (unsigned long long)s.w.tokens, (unsigned long long)s.w.packed, s.w.fresh,
                 s.w.q_tokens, worst);
}

static void test_first(void **)
{
    std::mt19937 random(3);
    for (const char *format : {"oscar2", "f16", "bf16", "innerq-base"}) {
        const layer l = make_layer(format, 128, 4, 2, KVQ_F16);
        wish w;
        w.tokens = 700;
        w.packed = 640;
        w.fresh = 1;
        session s = make_session(l, w, random);
        const vector<result> r = run(l, {&s}, run_options());
        expect("first", l, s, r[0]);
        print_message("%s %.3f\n", format, worst_error(l, s, r[0]));
    }
}

int main(void)
{
    const CMUnitTest tests[] = {cmocka_unit_test(test_first)};
    return cmocka_run_group_tests(tests, open_device, close_device);
}
