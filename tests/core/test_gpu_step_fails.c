// SPDX-License-Identifier: Apache-2.0
//
// Whole steps on a GPU that fail, over the software driver: values that are not finite, which only
// the GPU finds, and calls that the driver refuses. There is no step then, or all of it, and what
// the session keeps, its table and the next step's codes are as if it had been asked for once.
#include <math.h>

#include "kernels/internal.h"
#include "tests/core/step_kit.h"
#include "tests/kits/unit.h"

// ---- Values that are not finite ----

// A request that names the session, and waits for another until its deadline. Meanwhile so many
// steps of the session begin.
static void wait_in_vain(struct streamer *st, uint64_t steps)
{
    struct kvq__session_spec spec = {
        .name = "beside", .format = "f16", .layers = &stream_row, .n_layers = 1};
    uint64_t beside = kit_opened(&st->m, &spec);
    struct kvq__session *s = kit_of(&st->m, beside);
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 2, 77);
    struct kvq_entry_wire e[2] = {
        {.handle = st->session, .position = kit_of(&st->m, st->session)->tokens, .append = 1},
        {.handle = beside, .append = 1}};
    r.deadline_ns = kit.now + 1;
    kvq__session_ref(s);
    s->entries.tail++;
    assert_int_equal(kit_request(&st->m, &r, e), 1);
    kit_of(&st->m, st->session)->in_step.serial += steps;
    kit_pass(&kit, 2);
    assert_int_equal(kit_again(&st->m), KVQ_E_DEADLINE);
    kvq__hold_end(s, 0, true);
    kit_drop(&st->m, beside);
}

// Of a format that learns and competes: nothing of it, its pool or its table has changed, and the
// writer's next request is told once.
STREAM_TEST(test_nan)
{
    static uint8_t before[EXTRAS], after[EXTRAS];
    float *k = (float *)(void *)one.m.memory;
    stream_needed();
    open_layers(&one, "packed", "ott2");
    struct table t = open_table(&one);
    whole_step(&one, OUTLIERS);
    const struct kvq__session *s = kit_of(&one.m, one.session);
    const uint64_t packed = s->layers[2].packed;
    extras_of(&one, before);
    k[7 * HEADS * DIM] = NAN;
    whole_step(&one, OUTLIERS);
    k[7 * HEADS * DIM] = 1;
    assert_true(s->tokens == OUTLIERS && s->layers[2].packed == packed);
    extras_of(&one, after);
    assert_memory_equal(before, after, sizeof before);
    check_page(&t); // the copy was written before anybody knew
    wait_in_vain(&one, 0);
    assert_int_equal(request(&one, 2 * OUTLIERS, 1, true), KVQ_E_NONFINITE);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].value, OUTLIERS);
    whole_step(&one, OUTLIERS);
    assert_true(s->tokens == 2 * OUTLIERS && s->layers[2].packed > packed);
    extras_of(&one, after);
    assert_memory_not_equal(before, after, sizeof before);
    check_table(&t);
    // Where another step has begun since, nobody is told of the one before it.
    k[7 * HEADS * DIM] = NAN;
    whole_step(&one, OUTLIERS);
    k[7 * HEADS * DIM] = 1;
    wait_in_vain(&one, 1);
    whole_step(&one, OUTLIERS);
    assert_int_equal(s->tokens, 3 * OUTLIERS);
    close_table(&t);
}

// ---- What the driver refuses ----

// Packed codes of two sessions that hold the same tokens.
static void same_codes(struct streamer *a, struct streamer *b)
{
    static uint8_t x[MIB], y[MIB];
    struct kvq__gpu *gpu = kit.core->pools[1].gpu;
    const struct kvq__session *s = kit_of(&a->m, a->session), *t = kit_of(&b->m, b->session);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i], *m = &t->layers[i];
        assert_int_equal(l->packed, m->packed);
        for (uint32_t page = 0; page < l->packed / KVQ_BLOCK_TOKENS; page++) {
            size_t n = kvq__packed_block_bytes(l, page);
            assert_in_range(n, 1, sizeof x);
            const uint8_t *p = kvq__page(l, page)->packed.data,
                          *q = kvq__page(m, page)->packed.data;
            assert_int_equal(kvq__gpu_take(gpu, x, (uintptr_t)p, n), 0);
            assert_int_equal(kvq__gpu_take(gpu, y, (uintptr_t)q, n), 0);
            assert_memory_equal(x, y, n);
        }
    }
}

// And what they keep besides blocks: the same outliers, of which each stands there once.
static void same_outliers(struct streamer *a, struct streamer *b)
{
    static uint8_t x[EXTRAS], y[EXTRAS];
    const struct kvq__layer *l = &kit_of(&a->m, a->session)->layers[2];
    if (!l->format->outliers)
        return;
    extras_of(a, x);
    extras_of(b, y);
    for (uint32_t h = 0; h < l->shape.kv_heads; h++) {
        struct kvq__extras p = kvq__extras_of(l->format, &l->shape, x, NULL, h);
        struct kvq__extras q = kvq__extras_of(l->format, &l->shape, y, NULL, h);
        const uint32_t n = q.pool->count;
        assert_true(n >= l->format->outliers);
        assert_int_equal(p.pool->count, n);
        assert_true(p.pool->frozen_at == q.pool->frozen_at);
        assert_memory_equal(p.pool->position, q.pool->position, n * sizeof q.pool->position[0]);
        assert_memory_equal(p.pool->score, q.pool->score, n * sizeof q.pool->score[0]);
        assert_memory_equal(p.pool_k, q.pool_k, (size_t)n * 2 * DIM);
        assert_memory_equal(p.pool_v, q.pool_v, (size_t)n * 2 * DIM);
    }
}

// A step of the twin, in the host's order, and before it one of the session's unless it had that.
static void both_step(struct streamer *twin, bool both)
{
    if (both) {
        whole_step(&one, OUTLIERS);
    }
    assert_int_equal(request(twin, tokens_of(twin), OUTLIERS, false), 0);
    assert_int_equal(tokens_of(twin), tokens_of(&one));
}

// What the driver is to refuse, and of which step of a session.
struct refusal {
    const char *call;
    int result;
    const char *format;
    uint32_t steps; // before it
};

// The n-th call of a step is refused: false if it has fewer. There is no step then, or all of it;
// what was not packed is packed by the next, and the table says what there is. Who is told that
// there is no memory may try again, so then there is no step.
static bool refused_step(const struct refusal *r, uint64_t n)
{
    struct streamer twin = one;
    float *rows = (float *)(void *)one.m.memory;
    for (uint32_t i = 0; i < BUFFER / sizeof *rows; i++) // blocks that were freed hold other codes
        rows[i] = (float)((i + n) * 2654435761u >> 16) / 32768 - 1;
    open_layers(&one, NULL, r->format);
    open_layers(&twin, NULL, r->format);
    struct table t = open_table(&one);
    for (uint32_t i = 0; i < r->steps; i++)
        both_step(&twin, true); // its raw blocks are released when the table has been written
    stream_refuse(r->call, n, r->result);
    const uint64_t before = tokens_of(&one);
    const int rc = step(&one, OUTLIERS);
    const uint64_t value = kvq__queue_results(one.m.queue)[0].value;
    stream_refuse(r->call, 0, 0);
    go_on(&one);
    assert_true(rc == 0 || rc == KVQ_E_UNSUPPORTED || rc == KVQ_E_NO_MEMORY);
    assert_true(rc != KVQ_E_NO_MEMORY || tokens_of(&one) == before);
    assert_true(tokens_of(&one) == before || tokens_of(&one) == value);
    if (rc == 0 || tokens_of(&one) > before)
        both_step(&twin, false);
    both_step(&twin, true);
    both_step(&twin, true);
    stream_settle(&one);
    check_table(&t);
    same_codes(&one, &twin);
    same_outliers(&one, &twin);
    core_check(kit.core);
    close_table(&t);
    kit_drop(&one.m, one.session);
    kit_drop(&one.m, twin.session);
    return rc != 0;
}

// Under AddressSanitizer a call takes five times as long: every third one is refused.
#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define STRIDE 3
#endif
#endif
#ifndef STRIDE
#define STRIDE 1
#endif

// ott2 learns in its first step, and outliers compete in a launch of their own before codes are
// made: whatever is refused behind them, they are there once.
STREAM_TEST(test_refused)
{
    static const struct refusal refusals[] = {
        {"launch", KVQ_GPU_INVALID_VALUE, "oscar2:sink=32", 2},
        {"copy_in", KVQ_GPU_OUT_OF_MEMORY, "oscar2:sink=32", 2},
        {"launch", KVQ_GPU_INVALID_VALUE, "ott2", 0},
        {"launch", KVQ_GPU_INVALID_VALUE, "ott2", 2},
    };
    stream_needed();
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        uint64_t n = 1 + i % STRIDE;
        while (refused_step(&refusals[i], n))
            n += STRIDE;
        assert_true(n > 3); // to store, to pack and to publish
    }
}

// Where there is no table to publish, a step does not fail for want of packing: its units stay due.
STREAM_TEST(test_unpacked)
{
    struct streamer twin = one;
    stream_needed();
    open_layers(&one, NULL, "oscar2:sink=32");
    open_layers(&twin, NULL, "oscar2:sink=32");
    both_step(&twin, true);
    const struct kvq__session *s = kit_of(&one.m, one.session);
    const uint64_t packed = s->layers[0].packed;
    stream_refuse("copy_in", 2, KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(step(&one, OUTLIERS), 0);
    go_on(&one);
    both_step(&twin, false);
    both_step(&twin, true);
    assert_true(s->layers[0].packed > packed);
    same_codes(&one, &twin);
}

// The stream cannot wait for the client: nothing of the step is stored, the session is in none
// afterwards, and the same step can be made again.
STREAM_TEST(test_refused_wait)
{
    stream_needed();
    open_layers(&one, NULL, "oscar2:sink=32");
    struct table t = open_table(&one);
    whole_step(&one, OUTLIERS);
    stream_refuse("stream_wait64", 1, KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(step(&one, OUTLIERS), KVQ_E_NO_MEMORY);
    go_on(&one);
    assert_int_equal(tokens_of(&one), OUTLIERS);
    assert_int_equal(kit.core->n_steps, 0);
    core_check(kit.core);
    whole_step(&one, OUTLIERS);
    assert_int_equal(tokens_of(&one), 2 * OUTLIERS);
    check_table(&t);
    close_table(&t);
}

// The GPU packs nothing any more: a step that only packs fails with the code of that. And the
// background does not try all the time: without its pause this test never comes to an end, since
// the core finds something to do at each look.
STREAM_TEST(test_refused_for_good)
{
    stream_needed();
    open_layers(&one, NULL, "oscar2:sink=32");
    struct table t = open_table(&one);
    stream_refuse_from("launch", 2, KVQ_GPU_INVALID_VALUE);
    assert_int_equal(step(&one, OUTLIERS), KVQ_E_UNSUPPORTED);
    go_on(&one);
    assert_int_equal(tokens_of(&one), OUTLIERS);
    assert_int_equal(step(&one, 0), KVQ_E_UNSUPPORTED);
    go_on(&one);
    stream_refuse("launch", 0, 0);
    whole_step(&one, 0);
    check_table(&t);
    close_table(&t);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
