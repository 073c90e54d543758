// SPDX-License-Identifier: Apache-2.0
//
// Attention in the engine's own context on a GPU, the software driver's: sessions whose shards are
// with two clients, and prompts that are attended in full precision, whole and in pieces.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/client/local_gpu_kit.h"

// ---- Ranks ----

static struct {
    struct lg_rig rigs[2]; // of the one that is not `now`
    struct lg_pair pairs[2];
    uint32_t now;
} ranks;

static void use(uint32_t rank)
{
    const uint32_t salt = rig.salt;
    ranks.rigs[ranks.now] = rig;
    rig = ranks.rigs[rank];
    rig.salt = salt;
    ranks.now = rank;
}

static void open_rank(uint32_t rank, uint32_t layers, const char *format)
{
    rig.layers = layers;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    lg_open_shard(format, (int)rank, &ranks.pairs[rank]);
    lg_open_bucket(ranks.pairs[rank].here, 64);
}

// Two clients, as two processes have them, each with a shard: by heads alike, or one with fewer
// layers, as a pipeline's stages.
static void open_ranks(const char *format, uint32_t layers)
{
    ranks.now = 0;
    ranks.rigs[1] = rig;
    open_rank(0, LAYERS, format);
    use(1);
    lg_connect();
    open_rank(1, layers, format);
    use(0);
}

static void close_ranks(void)
{
    lg_close_pair(&ranks.pairs[0]);
    use(1);
    lg_close_pair(&ranks.pairs[1]);
    lg_disconnect();
    use(0);
}

// One step of both ranks, this one first.
static void step_ranks(uint32_t first, uint32_t append, struct kvq_gpu_exec *const *execs)
{
    for (uint32_t i = 0; i < 2; i++) {
        use(first ^ i);
        lg_step(&ranks.pairs[ranks.now], 1, append, execs ? execs[ranks.now] : NULL);
    }
}

static void run_ranks(const char *format, uint32_t layers)
{
    struct kvq_gpu_exec *execs[2];
    open_ranks(format, layers);
    step_ranks(0, 40, NULL);
    step_ranks(1, 100, NULL);
    for (uint32_t i = 0; i < 2; i++) {
        use(i);
        execs[i] = lg_capture(&ranks.pairs[i], 1);
    }
    for (uint32_t i = 0; i < 60; i++)
        step_ranks(i % 2, 1, i % 10 == 7 ? NULL : execs);
    for (uint32_t i = 0; i < 2; i++) {
        use(i);
        lg_end_capture(execs[i]);
    }
    use(0);
    close_ranks();
}

static void test_heads(void **state)
{
    (void)state;
    run_ranks("oscar2", LAYERS);
}

static void test_layers(void **state)
{
    (void)state;
    run_ranks("oscar2", 1);
}

static void test_extras(void **state)
{
    (void)state;
    run_ranks("ott2", LAYERS);
}

// A step of this rank's shard here, without the other side's.
static int step_here(uint64_t position, uint32_t append)
{
    return lg_step_here(&ranks.pairs[ranks.now], position, append);
}

// One rank ends its step, the other one leaves it: nobody has it, who ended it is told, and all go
// on where they were.
static void test_leaves(void **state)
{
    (void)state;
    open_ranks("oscar2", LAYERS);
    step_ranks(0, 60, NULL);
    use(0);
    const uint64_t tokens = ranks.pairs[0].tokens;
    assert_int_equal(step_here(tokens, 1), 0);
    use(1);
    fine(kvq_session_close(rig.client, ranks.pairs[1].here));
    use(0);
    assert_int_equal(step_here(tokens + 1, 1), KVQ_E_CANCELLED);
    assert_non_null(strstr(kvq_error_text(), "shard 1"));
    use(1);
    struct lg_pair again = ranks.pairs[1];
    const struct kvq_session_options o = {.size = sizeof o, .name = "here", .shard = 1};
    fine(kvq_session_open(rig.client, &o, &again.here, NULL));
    fine(kvq_local_add(rig.local, again.here));
    ranks.pairs[1] = again;
    for (uint32_t i = 0; i < 10; i++)
        step_ranks(i % 2, 5, NULL);
    use(0);
    close_ranks();
}

// Values that are not finite at one rank undo the step for both.
static void test_not_finite(void **state)
{
    const float nan = __builtin_nanf("");
    (void)state;
    open_ranks("oscar2", LAYERS);
    step_ranks(0, 60, NULL);
    use(0);
    const uint64_t tokens = ranks.pairs[0].tokens;
    assert_int_equal(step_here(tokens, 1), 0);
    use(1);
    OK(drv.copy_in(rig.at, &nan, sizeof nan, rig.stream));
    int ended = step_here(tokens, 1);
    if (kvq_queue_order(rig.queue) == KVQ_ORDER_HOST) {
        assert_int_equal(ended, KVQ_E_NONFINITE);
    } else {
        assert_int_equal(ended, 0);
        assert_int_equal(step_here(tokens + 1, 1), KVQ_E_NONFINITE);
    }
    use(0);
    assert_int_equal(step_here(tokens + 1, 1), KVQ_E_CANCELLED);
    for (uint32_t i = 0; i < 10; i++)
        step_ranks(i % 2, 5, NULL);
    use(0);
    close_ranks();
}

// One queue that writes both shards and begins one anew before the other has ended would wait for
// itself.
static void test_one_queue(void **state)
{
    struct lg_pair p[2];
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    for (int i = 0; i < 2; i++)
        lg_open_shard("oscar2", i, &p[i]);
    lg_open_bucket(p[0].here, 64);
    lg_step(p, 2, 40, NULL);
    assert_int_equal(lg_step_here(&p[0], 40, 1), 0);
    assert_int_equal(lg_step_here(&p[0], 41, 1), KVQ_E_BUSY);
    assert_int_equal(lg_step_here(&p[1], 40, 1), 0);
    assert_int_equal(lg_step_here(&p[1], 41, 1), 0);
    for (int i = 0; i < 2; i++)
        lg_close_pair(&p[i]);
}

// ---- Prompts in full precision ----

enum { PROMPT = 256, PIECE = 64, AFTER = 5 };

// A prompt in pieces, and what comes after it. Both sides' outputs are compared on the way; those
// of here are left in `out`: all layers', of the prompt and of each token after it.
static void prompt(const char *format, uint32_t piece, uint8_t out[LAYERS * (AFTER + 1) * PART])
{
    struct lg_pair p;
    const size_t row = Q_HEADS * DIM * sizeof(float);
    rig.salt = 1; // the same values every time
    lg_open_pair(format, &p);
    if (!rig.bucket)
        lg_open_bucket(p.here, PROMPT);
    for (uint32_t step = 0; step <= AFTER; step++) {
        lg_fill();
        for (uint32_t at = 0; step == 0 && at < PROMPT; at += piece)
            lg_step_from(&p, 1, piece, at, NULL);
        if (step > 0)
            lg_step_from(&p, 1, 1, 0, NULL);
        for (uint32_t l = 0; l < LAYERS; l++)
            OK(drv.copy_out(out + (l * (AFTER + 1) + step) * PART, rig.at + lg_tensor(3, l).offset,
                            step ? row : PROMPT * row, rig.stream));
        OK(drv.stream_sync(rig.stream));
    }
    lg_close_pair(&p);
}

static void same_prompts(const char *format)
{
    static uint8_t whole[LAYERS * (AFTER + 1) * PART], pieces[sizeof whole];
    prompt(format, PROMPT, whole);
    prompt(format, PIECE, pieces);
    for (uint32_t i = 0; i < sizeof whole; i++)
        if (whole[i] != pieces[i])
            fail_msg("%s: the prompt whole and in pieces differ at layer %u, step %u, byte %u",
                     format, i / PART / (AFTER + 1), i / PART % (AFTER + 1), i % PART);
    kvq_bucket_close(&rig.bucket);
}

// Outputs of a prompt whose length was said do not depend on its pieces, nor on who attends.
static void test_prompts(void **state)
{
    static const char *const formats[] = {"oscar2", "innerq-hybrid", "ott2", "kvq2", "f16"};
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    rig.prompt = PROMPT;
    rig.queries = PROMPT;
    for (uint32_t i = 0; i < sizeof formats / sizeof *formats; i++)
        same_prompts(formats[i]);
}

// A fork in the middle of the prompt goes on in full precision, as its source does.
static void test_forked_prompt(void **state)
{
    struct lg_pair p[2];
    (void)state;
    lg_open_local(KVQ_LOCAL_REQUIRE);
    rig.prompt = PROMPT;
    lg_open_pair("oscar2", &p[0]);
    lg_open_bucket(p[0].here, PIECE);
    lg_step(p, 1, PIECE, NULL);
    lg_step(p, 1, PIECE, NULL);
    lg_fork_pair(&p[0], 2 * PIECE, &p[1]);
    for (uint32_t i = 0; i < 3; i++)
        lg_step(p, 2, PIECE, NULL);
    for (uint32_t i = 0; i < AFTER; i++)
        lg_step(p, 2, 1, NULL);
    for (uint32_t i = 0; i < 2; i++)
        lg_close_pair(&p[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_heads, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_layers, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_extras, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_leaves, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_not_finite, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_one_queue, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_prompts, lg_setup, lg_teardown),
        cmocka_unit_test_setup_teardown(test_forked_prompt, lg_setup, lg_teardown),
    };
    lg_prepare();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return lg_cleanup() || failed;
}
