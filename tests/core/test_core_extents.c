// SPDX-License-Identifier: Apache-2.0
//
// Extents of a GPU that another thread makes and frees (daemon/core/gpu/extents.h). The software
// driver counts the calls of each thread that wait for the device. The thread that runs the core,
// which is the poller's in the daemon, makes none of them while sessions grow, end and take each
// other's memory. The other thread runs when a test says so, and no test waits for it.

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include "daemon/core/gpu/extents.h"
#include "tests/kits/stream_kit.h"
#include "tests/kits/unit.h"

enum {
    EXTENT = 2 * MIB,
    EXTENTS = 12, // that the first GPU's budget has room for
    LAYERS = 8,
    MOST_TOKENS = 1024, // 8 pages, of 512 KiB each: two extents
    SECONDS_11 = 11,
};

static struct member member, stranger; // of another namespace
static uint64_t waits;                 // how often a request found no extent ready
static uint64_t helped;                // calls of the other thread that wait

// ---- The two threads ----

static uint64_t slow_calls(void)
{
    static uint64_t (*count)(int thread);
    void *symbol = dlsym(kvq__gpu_driver(kit.core->pools[1].gpu)->library, "kvq_soft_slow");
    assert_non_null(symbol);
    memcpy(&count, &symbol, sizeof count);
    return count(gettid());
}

static void *work_main(void *context)
{
    uint64_t before = slow_calls();
    while (kvq__reserve_work(context))
        continue;
    helped += slow_calls() - before;
    return NULL;
}

static void others_work(void)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, work_main, kit.core->pools[1].gpu), 0);
    pthread_join(thread, NULL);
}

// As kit_request, while the other thread makes what a request waits for.
static int request(struct member *m, const struct kvq_request *r, const struct kvq_entry_wire *e)
{
    int rc = kit_request(m, r, e);
    while (rc == 1) {
        assert_true(waits++ < 100);
        others_work();
        kit_poll(kit.core);
        enum kvq__progress p = kvq__request_continue(m->queue);
        for (; p == KVQ__GPU || p == KVQ__AGAIN; p = kvq__request_continue(m->queue))
            kit_settle(m);
        assert_true(p == KVQ__WAIT || p == KVQ__DONE);
        rc = p == KVQ__WAIT ? 1 : kvq__queue_completion(m->queue)->status;
    }
    return rc ? rc : kvq__queue_results(m->queue)[0].status;
}

// ---- Sessions ----

static uint64_t session(struct member *m)
{
    struct kvq__layer_row rows[LAYERS];
    for (uint32_t i = 0; i < LAYERS; i++) {
        rows[i] = stream_row;
        rows[i].format = "f16";
    }
    struct kvq__session_spec spec = {
        .layers = rows, .n_layers = LAYERS, .place = kvq__pool_name(&kit.core->pools[1])};
    return kit_opened(m, &spec);
}

// One step of n tokens. 0 or a code of its begin.
static int step(struct member *m, uint64_t handle, uint32_t n)
{
    const struct kvq__session *s = kit_of(m, handle);
    struct kvq_entry_wire e = {.handle = handle, .position = s->tokens, .append = n};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, KIT_STEP);
    int rc = request(m, &r, &e);
    for (uint32_t i = 0; rc == 0 && i < LAYERS; i++) {
        r = kit_of_step(KVQ_OP_APPEND, 1, KIT_STEP);
        r.layer = i;
        r.k = kit_view(m, 0, HEADS, DIM, KVQ_F32);
        r.v = kit_view(m, m->bytes / 2, HEADS, DIM, KVQ_F32);
        rc = request(m, &r, &e);
    }
    r = kit_of_step(KVQ_OP_STEP_END, 1, KIT_STEP);
    return rc ? rc : request(m, &r, &e);
}

static void close_session(struct member *m, uint64_t handle)
{
    char text[KVQ_TEXT_BYTES];
    assert_int_equal(kvq__session_close(m->client, handle, text), 0);
}

// Empty extents go back, as they do some time after they have become empty.
static void pass_time(void)
{
    kit_tick(&kit, SECONDS_11 * 1000000000ull);
}

// ---- Before and after ----

static bool is_refused; // to make extents

static bool may_make(void *context)
{
    (void)context;
    return !is_refused;
}

static int setup_with(uint32_t mark)
{
    sim_begin(0);
    const struct kvq__reserve_config config = {
        .extent_bytes = EXTENT, .mark = mark, .may_make = may_make};
    is_refused = false;
    assert_int_equal(kvq__reserve_open(sim_gpus()->gpus[0], &config), 0);
    kit_open(&kit, 7, 32 * MIB, 0);
    assert_int_equal(member_open(&kit, &member, 1000, BUFFER), 0);
    assert_int_equal(member_open(&kit, &stranger, 1001, BUFFER), 0);
    waits = helped = 0;
    others_work();
    // What a client's first session on a GPU brings with it: a work stream.
    close_session(&member, session(&member));
    close_session(&stranger, session(&stranger));
    return 0;
}

static int setup(void **state)
{
    return setup_with(2);
}

static int setup_none_ready(void **state)
{
    return setup_with(0);
}
#define STARVED_TEST(test) TEST_BETWEEN(test, setup_none_ready, teardown)

static int teardown(void **state)
{
    kit_close(&kit);
    kvq__reserve_close(sim_gpus()->gpus[0]);
    return 0;
}

// ---- Tests ----

// Sessions grow, are forked, and end; all of it without a call that waits.
TEST(test_poller_waits_for_no_driver)
{
    uint64_t handles[4], before = slow_calls();
    for (uint32_t i = 0; i < 4; i++) {
        handles[i] = session(i % 2 ? &stranger : &member);
        for (uint32_t n = 0; n < MOST_TOKENS; n += 128)
            assert_int_equal(step(i % 2 ? &stranger : &member, handles[i], 128), 0);
    }
    struct kvq_entry_wire e = {.handle = handles[0], .position = 100};
    struct kvq_request r = kit_header(KVQ_OP_FORK, 1);
    assert_int_equal(request(&member, &r, &e), 0);
    for (uint32_t i = 0; i < 4; i++)
        close_session(i % 2 ? &stranger : &member, handles[i]);
    pass_time();
    pass_time();
    assert_int_equal(slow_calls(), before);
    assert_int_equal(kvq__reserve_made_in_place(kit.core->pools[1].gpu), 0);
    others_work();
    assert_true(helped > 6); // it has seen what it is there for
}
STARVED_TEST(test_poller_waits_for_no_driver);

// Without a descriptor to spare there is no memory, and no fault. The next tick tries again.
STARVED_TEST(test_no_descriptors)
{
    uint64_t handle = session(&member);
    is_refused = true;
    assert_int_equal(step(&member, handle, 128), KVQ_E_NO_MEMORY);
    assert_null(kvq__gpu_fault(kit.core->pools[1].gpu));
    is_refused = false;
    kvq__core_tick(kit.core);
    assert_int_equal(step(&member, handle, 128), 0);
}

// Of a prompt that needs more extents than are kept ready: they are made in one go, and no more
// than it needs stay when it has gone again.
TEST(test_many_at_once)
{
    uint64_t handles[3];
    for (uint32_t i = 0; i < 3; i++)
        handles[i] = session(&member);
    struct kvq_entry_wire e[3];
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 3, KIT_STEP);
    for (uint32_t i = 0; i < 3; i++)
        e[i] = (struct kvq_entry_wire){.handle = handles[i], .append = MOST_TOKENS};
    assert_int_equal(request(&member, &r, e), 0); // 12 MiB
    assert_int_equal(waits, 1);
    assert_int_equal(kit.core->pools[1].extents_taken, 6 * EXTENT);
    r = kit_of_step(KVQ_OP_STEP_ABORT, 0, KIT_STEP);
    assert_int_equal(kit_request(&member, &r, NULL), 0);
}

// An extent that is empty becomes another namespace's when there is no other: it is freed, and a
// new one is made, which holds zeros.
TEST(test_of_another_namespace)
{
    uint64_t handles[EXTENTS / 2], before = slow_calls();
    for (uint32_t i = 0; i < EXTENTS / 2; i++) {
        handles[i] = session(&member);
        assert_int_equal(step(&member, handles[i], MOST_TOKENS), 0);
    }
    assert_int_equal(kit.core->pools[1].extents_taken, EXTENTS * EXTENT);
    uint64_t other = session(&stranger);
    close_session(&member, handles[0]);
    assert_int_equal(step(&stranger, other, 128), 0);
    assert_int_equal(slow_calls(), before);
    const struct kvq__block *b = kvq__page(&kit_of(&stranger, other)->layers[0], 0)->raw.block;
    const uint8_t *behind = b->extent->memory.base + b->extent->used_bytes; // the software's GPU
    uint64_t n = EXTENT - b->extent->used_bytes;
    assert_true(n > 1 && behind[0] == 0 && memcmp(behind, behind + 1, n - 1) == 0);
}
STARVED_TEST(test_of_another_namespace);

// What the driver refuses is told to whoever asks; it is tried again when somebody asks later.
STARVED_TEST(test_refused)
{
    uint64_t handle = session(&member);
    stream_refuse("memory_create", 1, 2);
    assert_int_equal(step(&member, handle, 128), KVQ_E_NO_MEMORY);
    assert_int_equal(step(&member, handle, 128), KVQ_E_NO_MEMORY);
    pass_time();
    assert_int_equal(step(&member, handle, 128), 0);
    assert_null(kvq__gpu_fault(kit.core->pools[1].gpu));
}

// A block for somebody who cannot come again is had at once, and counted.
STARVED_TEST(test_in_place)
{
    struct kvq__pool *pool = &kit.core->pools[1];
    struct kvq__namespace *ns = kit_of(&member, session(&member))->ns;
    struct kvq__ref refs[EXTENTS + 1] = {0};
    for (uint32_t i = 0; i < EXTENTS; i++)
        assert_int_equal(kvq__block_new(kit.core, ns, pool, EXTENT, NULL, &refs[i]), 0);
    assert_int_equal(kvq__block_new(kit.core, ns, pool, EXTENT, NULL, &refs[EXTENTS]),
                     KVQ_E_NO_MEMORY);
    assert_int_equal(kvq__reserve_made_in_place(pool->gpu), EXTENTS);
    for (uint32_t i = 0; i < EXTENTS; i++)
        kvq__block_drop(kit.core, &refs[i], NULL);
    pass_time(); // given back, and not yet freed
    for (uint32_t i = 0; i < EXTENTS; i++)
        assert_int_equal(kvq__block_new(kit.core, ns, pool, EXTENT, NULL, &refs[i]), 0);
    for (uint32_t i = 0; i < EXTENTS; i++)
        kvq__block_drop(kit.core, &refs[i], NULL);
}

// A request that waits for an extent ends with its deadline, whoever makes the extent.
STARVED_TEST(test_deadline)
{
    uint64_t handle = session(&member);
    struct kvq_entry_wire e = {.handle = handle, .append = 128};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, KIT_STEP);
    r.deadline_ns = kit.now + 1000;
    assert_int_equal(kit_request(&member, &r, &e), 1);
    kit_pass(&kit, 1001);
    assert_int_equal(kvq__request_continue(member.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_completion(member.queue)->status, KVQ_E_DEADLINE);
}

// Several that wait for extents, of different sizes, have them in the order in which they came,
// however many blocks a try takes and gives back.
STARVED_TEST(test_oldest_first)
{
    enum { WAIT = 4 };
    static const uint16_t sessions[WAIT] = {1, 2, 2, 1}; // of two extents each
    static struct member clients[WAIT];
    uint32_t served = 0;
    for (uint32_t i = 0; i < WAIT; i++) {
        assert_int_equal(member_open(&kit, &clients[i], 1000, BUFFER), 0);
        close_session(&clients[i], session(&clients[i]));
        struct kvq_entry_wire e[2] = {0};
        for (uint32_t k = 0; k < sessions[i]; k++)
            e[k] = (struct kvq_entry_wire){.handle = session(&clients[i]), .append = MOST_TOKENS};
        struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, sessions[i], KIT_STEP);
        assert_int_equal(kit_request(&clients[i], &r, e), 1);
        assert_true(clients[i].queue->turn.extents);
    }
    for (uint32_t round = 0; served < WAIT; round++) {
        assert_true(round < 1000);
        others_work();
        kit_poll(kit.core);
        for (uint32_t i = WAIT; i-- > 0;) {
            if (!clients[i].queue->busy || kvq__request_continue(clients[i].queue) != KVQ__DONE)
                continue;
            assert_int_equal(kvq__queue_results(clients[i].queue)[0].status, 0);
            assert_int_equal(i, served++);
        }
        kit_pass(&kit, 50000);
    }
    for (uint32_t i = 0; i < WAIT; i++)
        member_close(&clients[i]);
}

// While the daemon drains open sessions may end their steps, whose memory is yet to be made.
STARVED_TEST(test_drain)
{
    uint64_t handle = session(&member);
    struct kvq_entry_wire e = {.handle = handle, .append = 128};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, KIT_STEP);
    assert_int_equal(kit_request(&member, &r, &e), 1);
    kvq__core_drain(kit.core);
    others_work();
    kit_poll(kit.core);
    assert_int_equal(kvq__request_continue(member.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_completion(member.queue)->status, 0);
    r = kit_of_step(KVQ_OP_STEP_ABORT, 0, KIT_STEP);
    assert_int_equal(kit_request(&member, &r, NULL), 0);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
