// SPDX-License-Identifier: Apache-2.0
//
// Attention in the engine's own context, on the host: the same steps there and by the daemon give
// the same bits, for every family of formats, across packing, truncation, forks and threads.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/local_kit.h"

enum { LAYERS = 3, KV_HEADS = 2, DIM = 64 };

static void open_local(uint32_t threads)
{
    struct kvq_local_options o = {.max_tokens = 2048,
                                  .flags = KVQ_LOCAL_REQUIRE,
                                  .threads = threads,
                                  .parallel = threads > 1 ? local_parallel : NULL};
    local_fine(kvq_local_open(rig.queue, &o, &rig.local));
    assert_null(kvq_local_why(rig.local));
}

// ---- The same bits ----

static void long_run(const char *format, uint16_t q_heads, uint32_t prompt, uint32_t steps)
{
    struct local_model m;
    struct local_pair pair;
    struct kvq_session_options o = {.format = format, .prompt_tokens = prompt, .max_rollback = 4};
    local_model(&m, LAYERS, q_heads, KV_HEADS, DIM);
    local_open_pair(&m, &o, &pair);
    local_step(&m, &pair, 1, &prompt, 0, true);
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t append = i % 50 == 49 ? 3 : 1;
        local_step(&m, &pair, 1, &append, 0, true);
    }
    local_same_cache(&m, &pair);
    local_close_pair(&pair);
}

static void test_formats(void **state)
{
    static const char *const formats[] = {"f16",  "oscar2", "kvq2",         "innerq-hybrid",
                                          "ott2", "kivi2",  "vecinfer-2@v", "million-4@m"};
    (void)state;
    open_local(1);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        long_run(formats[i], 4, 150 + 30 * (uint32_t)i, 40);
}

static void test_300_steps(void **state)
{
    (void)state;
    open_local(1);
    long_run("oscar2", 8, 200, 300);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_formats, local_setup, local_teardown),
        cmocka_unit_test_setup_teardown(test_300_steps, local_setup, local_teardown),
    };
    local_prepare(LAYERS, KV_HEADS, DIM);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    local_cleanup();
    return failed ? 1 : 0;
}
