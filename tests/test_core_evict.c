// SPDX-License-Identifier: Apache-2.0
//
// Eviction and waiting for room: who goes and who never does, that sessions which do not fit all
// at once work in turns to the bit, when a request waits and when it is refused, in what order, and
// that nobody waits for ever.
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/evict.h"
#include "daemon/move.h"
#include "tests/sim.h"

enum {
    HEADS = 2,
    DIM = 64,
    LAYERS = 2,
    QUERIES = 2,
    MIB = 1 << 20,
    PAGE = KVQ_BLOCK_TOKENS,
    SESSION = 8 * PAGE,                              // tokens of most sessions
    BLOCK = 4 * HEADS * DIM * PAGE,                  // bytes of a page of one layer, as f16
    SESSION_BYTES = LAYERS * SESSION / PAGE * BLOCK, // 1 MiB
    GPU = 4 * MIB,                                   // so that 4 of them fit
    BUFFER = 4 * MIB,
    Q_AT = BUFFER / 4,
    OUT_AT = Q_AT + 64 * 1024,
    OUT_BYTES = QUERIES * 2 * HEADS * DIM * 4,
};
#define MS     1000000ull
#define SECOND (1000 * MS)

static const struct kvq__layer_row rows[1] = {
    {4, HEADS, DIM, DIM, .format = "f16", .kv_from = -1, .repeat = LAYERS}};

static struct kit kit;
static struct member m, other;
static char text[KVQ_TEXT_BYTES];

static void attach(struct member *member, uint32_t uid)
{
    assert_int_equal(member_open(&kit, member, uid, BUFFER), 0);
    float *memory = (float *)(void *)member->memory;
    for (uint32_t i = 0; i < BUFFER / sizeof *memory; i++)
        memory[i] = kit_float(&kit);
}

static int setup(void **state)
{
    (void)state;
    sim_begin(5);
    kit_open(&kit, 7, 32 * MIB, 0);
    kit.core->pools[1].budget = GPU;
    attach(&m, 1000);
    attach(&other, 1000);
    return 0;
}

static void poll(void)
{
    if (kvq__core_poll(kit.core))
        core_check(kit.core);
    else
        sched_yield(); // to the driver's threads
}

static void pass(uint64_t ns)
{
    kvq__core_clock(kit.core, kit.now += ns);
}

// All that GPUs, moves and evictions do has ended.
static void rest(void)
{
    for (uint32_t i = 0; kvq__core_moves(kit.core) || !TAILQ_EMPTY(&kit.core->flights); i++) {
        assert_true(i < 1000000);
        poll();
    }
    poll();
}

static int teardown(void **state)
{
    (void)state;
    member_close(&m);
    member_close(&other);
    rest();
    kit_close(&kit);
    return 0;
}

static const char *place(uint32_t pool)
{
    return kvq__pool_name(&kit.core->pools[pool]);
}

static uint64_t opened(struct member *member, const char *name)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {
        .name = name, .place = place(1), .layers = rows, .n_layers = 1};
    assert_int_equal(kvq__session_open(member->client, &spec, &info, text), 0);
    return info.handle;
}

// ---- Requests that may wait ----

// Looks again: 1 if it waits still, else its status.
static int again(struct member *member)
{
    enum kvq__progress p = kvq__request_continue(member->queue);
    while (p == KVQ__RUN || p == KVQ__GPU) {
        if (p == KVQ__RUN)
            kit_run_job(&kit, kvq__queue_job(member->queue));
        else
            kit_settle(member);
        p = kvq__request_continue(member->queue);
    }
    return p == KVQ__WAIT ? 1 : kvq__queue_completion(member->queue)->status;
}

static int status_of(const struct member *member)
{
    const struct kvq_completion *c = kvq__queue_completion(member->queue);
    return c->status ? c->status : kvq__queue_results(member->queue)[0].status;
}

// Until it is answered. A request that waits for ever ends the test.
static int finish(struct member *member, int rc)
{
    for (uint32_t looks = 0; rc == 1; looks++) {
        assert_true(looks < 100000);
        poll();
        pass(MS / 10);
        rc = again(member);
    }
    return rc ? rc : status_of(member);
}

static struct kvq_entry_wire entry(struct member *member, uint64_t handle, uint32_t append)
{
    uint64_t tokens = kit_of(member, handle)->tokens;
    return (struct kvq_entry_wire){
        .handle = handle, .position = tokens, .row = (uint32_t)tokens, .append = append};
}

// Begins to ask for a step; as kit_request.
static int begin(struct member *member, uint64_t handle, uint64_t step, uint32_t n, uint64_t wait)
{
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 1);
    struct kvq_entry_wire e = entry(member, handle, n);
    r.step = step;
    r.flags = wait ? KVQ_REQ_WAIT_ROOM : 0;
    r.deadline_ns = wait ? kit.now + wait : 0;
    return kit_request(member, &r, &e);
}

static int go_on(struct member *member, uint64_t handle, uint32_t n)
{
    struct kvq_entry_wire e = entry(member, handle, n);
    int rc = 0;
    for (uint32_t layer = 0; rc == 0 && layer < LAYERS; layer++) {
        struct kvq_request r = kit_header(KVQ_OP_APPEND, 1);
        r.step = 99;
        r.layer = layer;
        r.k = kit_view(member, 0, HEADS, DIM, KVQ_F32);
        r.v = kit_view(member, BUFFER / 2, HEADS, DIM, KVQ_F32);
        rc = finish(member, kit_request(member, &r, &e));
    }
    return rc ? rc : kit_simple(member, KVQ_OP_STEP_END, 99, e, NULL);
}

static int step(struct member *member, uint64_t handle, uint32_t n)
{
    int rc = finish(member, begin(member, handle, 99, n, 0));
    return rc ? rc : go_on(member, handle, n);
}

// A session of 1 MiB on the first GPU.
static uint64_t fed(struct member *member, const char *name)
{
    uint64_t handle = opened(member, name);
    assert_int_equal(step(member, handle, SESSION), 0);
    rest();
    return handle;
}

// What a token behind the session sees, of all layers.
static void attend(struct member *member, uint64_t handle, uint8_t out[LAYERS][OUT_BYTES])
{
    struct kvq_entry_wire e = entry(member, handle, 0);
    e.queries = QUERIES;
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct kvq_request r = kit_header(KVQ_OP_ATTEND, 1);
        r.layer = i;
        r.q = kit_view(member, Q_AT, 2 * HEADS, DIM, KVQ_F32);
        r.out = kit_view(member, OUT_AT, 2 * HEADS, DIM, KVQ_F32);
        assert_int_equal(finish(member, kit_request(member, &r, &e)), 0);
        memcpy(out[i], member->memory + OUT_AT, OUT_BYTES);
    }
}

static bool is_home(struct member *member, uint64_t handle)
{
    return kit_of(member, handle)->pool == &kit.core->pools[1];
}

// ---- Who ----

static void test_score(void **state)
{
    static const struct {
        struct kvq__score better, worse;
    } pairs[] = {
        // Used longer ago.
        {{20 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}},
        // Saved already.
        {{10 * SECOND, 64 * MIB, 0, 64 * MIB}, {10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}},
        // Its blocks are its own.
        {{10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 8 * MIB, 64 * MIB, 64 * MIB}},
        // Large enough to be worth it.
        {{10 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 4096, 4096, 4096}},
        // Twice as long outweighs that another is saved, just about.
        {{21 * SECOND, 64 * MIB, 64 * MIB, 64 * MIB}, {10 * SECOND, 64 * MIB, 0, 64 * MIB}},
        // Whatever frees nothing is last.
        {{1, 1, 64 * MIB, 64 * MIB}, {3600 * SECOND, 0, 0, 64 * MIB}},
    };
    (void)state;
    for (uint32_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        assert_true(kvq__score(&pairs[i].better) > kvq__score(&pairs[i].worse));
    assert_true(kvq__score(&pairs[5].worse) == 0);
}

// Six sessions where four fit, used in turns by two engines: all of them work, to the bit.
static void test_turns(void **state)
{
    static uint8_t bits[6][LAYERS][OUT_BYTES], now[LAYERS][OUT_BYTES];
    struct member *of[6] = {&m, &other, &m, &other, &m, &other};
    uint64_t handles[6];
    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        char name[8];
        snprintf(name, sizeof name, "s%u", i);
        handles[i] = fed(of[i], name);
        attend(of[i], handles[i], bits[i]);
        pass(2 * SECOND);
    }
    assert_true(kit.core->evicted.demoted >= 2);
    for (uint32_t turn = 0; turn < 3; turn++)
        for (uint32_t i = 0; i < 6; i++) {
            attend(of[i], handles[i], now);
            assert_memory_equal(now, bits[i], sizeof now);
            assert_true(is_home(of[i], handles[i]));
            pass(2 * SECOND);
        }
    assert_true(kit.core->evicted.promoted >= 12);
    assert_int_equal(kit.core->evicted.refused, 0);
    assert_int_equal(kit.core->evicted.demoted_bytes, kit.core->evicted.demoted * SESSION_BYTES);
    assert_int_equal(kit.core->n_demoted, 2);
    // They go on where they are wanted, and are dropped wherever they are.
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(kvq__session_drop(of[i]->client, handles[i], text), 0);
    rest();
    assert_int_equal(kit.core->n_demoted, 0);
}

// The one that was used longest ago goes, one in a step never does.
static void test_who(void **state)
{
    uint64_t a = fed(&m, "a"), b, c, d;
    (void)state;
    b = fed(&m, "b");
    c = fed(&other, "c");
    d = fed(&other, "d");
    pass(2 * SECOND);
    assert_int_equal(finish(&m, begin(&m, a, 99, 1, 0)), 0);
    assert_int_equal(kit.core->evicted.demoted, 1);
    assert_true(is_home(&m, a));
    rest();
    // b, c, d were idle for as long; one of them is gone, and a is in a step.
    uint32_t home = is_home(&m, b) + is_home(&other, c) + is_home(&other, d);
    assert_int_equal(home, 2);
    pass(20 * SECOND);
    uint64_t e = opened(&other, "e");
    for (uint32_t i = 0; i < 2; i++) { // all but a go for it
        assert_int_equal(step(&other, e, SESSION), 0);
        pass(2 * SECOND);
    }
    assert_true(is_home(&m, a) && is_home(&other, e));
    assert_non_null(kit_of(&m, a)->step);
}

// ---- Refusals ----

static uint32_t refused(void)
{
    return (uint32_t)kit.core->evicted.refused;
}

// In steps, mapped or read: nothing can go, and nobody waits.
static void test_in_use(void **state)
{
    uint64_t handles[4];
    (void)state;
    for (uint32_t i = 0; i < 4; i++)
        handles[i] = fed(&m, "");
    for (uint32_t i = 0; i < 3; i++)
        kvq__session_pin(kit_of(&m, handles[i])); // as requests under way do
    pass(2 * SECOND);
    uint64_t moved = kit.core->last_move;
    assert_int_equal(begin(&m, handles[3], 9, 1, 0), 0); // and its own is not to go
    assert_int_equal(status_of(&m), KVQ_E_NO_MEMORY);
    assert_int_equal(refused(), 1);
    assert_int_equal(kit.core->last_move, moved);
    assert_int_equal(kit.events[KVQ__EVENT_MEMORY_FULL], 1);
    for (uint32_t i = 0; i < 3; i++)
        kvq__session_unpin(kit_of(&m, handles[i]));
    assert_int_equal(step(&m, handles[3], 1), 0);
}

// What could never fit is refused at once, and nobody goes for it.
static void test_too_much(void **state)
{
    uint64_t a = fed(&m, "a"), b = fed(&m, "b");
    (void)state;
    (void)a;
    pass(2 * SECOND);
    assert_int_equal(begin(&m, b, 9, 4 * SESSION, 10 * SECOND), 0);
    assert_int_equal(status_of(&m), KVQ_E_NO_MEMORY);
    assert_int_equal(kit.core->evicted.demoted + kit.core->n_moving, 0);
}

// One that was used a moment ago is waited for, but not for ever.
static void test_too_young(void **state)
{
    uint64_t handles[4];
    (void)state;
    for (uint32_t i = 0; i < 4; i++)
        handles[i] = fed(&m, "");
    assert_int_equal(begin(&m, handles[0], 9, 1, 0), 1);
    pass(500 * MS);
    assert_int_equal(again(&m), 1);
    assert_int_equal(kit.core->n_moving, 0);
    pass(501 * MS);
    assert_int_equal(finish(&m, again(&m)), 0);
    assert_int_equal(kit.core->evicted.demoted, 1);
    assert_int_equal(kit.core->evicted.waited, 1);
    // The others are used all the time.
    rest();
    for (uint32_t i = 0; i < 4; i++)
        kit_of(&m, handles[i])->idle_since = kit.now;
    assert_int_equal(begin(&other, opened(&other, "x"), 9, SESSION, 0), 1);
    int rc = 1;
    for (uint32_t i = 0; i < 40 && rc == 1; i++) {
        for (uint32_t j = 0; j < 4; j++)
            kit_of(&m, handles[j])->idle_since = kit.now;
        pass(100 * MS);
        poll();
        rc = again(&other);
    }
    assert_int_equal(rc ? rc : status_of(&other), KVQ_E_NO_MEMORY);
}

// ---- Waiting by request ----

static void test_flag(void **state)
{
    uint64_t handles[4];
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        handles[i] = fed(&m, "");
        kvq__session_pin(kit_of(&m, handles[i]));
    }
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 1);
    struct kvq_entry_wire e = entry(&other, opened(&other, "x"), 1);
    r.step = 9;
    r.flags = KVQ_REQ_WAIT_ROOM;
    assert_int_equal(kit_request(&other, &r, &e), KVQ_E_INVALID); // it needs a deadline
    r.deadline_ns = kit.now + SECOND;
    assert_int_equal(kit_request(&other, &r, &e), 1);
    uint64_t free = kit.core->pools[1].used_bytes;
    for (uint32_t i = 0; i < 9; i++) {
        pass(100 * MS);
        assert_int_equal(again(&other), 1);
        core_check(kit.core);
        assert_int_equal(kit.core->pools[1].used_bytes, free); // it holds nothing meanwhile
    }
    pass(101 * MS);
    assert_int_equal(again(&other), KVQ_E_DEADLINE);
    assert_true(TAILQ_EMPTY(&kit.core->waiters));
    // Somebody frees some.
    r.deadline_ns = kit.now + SECOND;
    assert_int_equal(kit_request(&other, &r, &e), 1);
    for (uint32_t i = 0; i < 4; i++)
        kvq__session_unpin(kit_of(&m, handles[i]));
    assert_int_equal(kvq__session_drop(m.client, handles[0], text), 0);
    assert_int_equal(again(&other), 0);
    assert_int_equal(status_of(&other), 0);
    assert_int_equal(kit.core->evicted.demoted, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    kit_gpus(sim_gpus());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_score), TEST(test_turns),     TEST(test_who),  TEST(test_in_use),
        TEST(test_too_much),          TEST(test_too_young), TEST(test_flag),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
