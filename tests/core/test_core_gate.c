// SPDX-License-Identifier: Apache-2.0
//
// Requests on streams while the gate is up (core/gpu/gate.h): no stream is made to wait for a
// client, and nothing else waits.
#include <sched.h>

#include "daemon/core/gpu/gate.h"
#include "tests/kits/stream_kit.h"
#include "tests/kits/unit.h"

static struct kvq__gate *gate(void)
{
    return kvq__gpu_gate(kit.core->pools[1].gpu);
}

// Nothing waits for a client: work has ended, and a little later the driver says so.
static void await_clear(void)
{
    while (!kvq__gate_is_clear(gate(), NULL))
        sched_yield();
}

static void gate_up(bool up)
{
    kvq_word_store_release(&gate()->up, up);
}

static struct kvq_request append_of(const struct streamer *s)
{
    struct kvq_request r = kit_append(&s->m, 1, 0, HEADS, DIM);
    return r;
}

static void begin(struct streamer *s)
{
    struct kvq_entry_wire e = {.handle = s->session, .append = TOKENS};
    assert_int_equal(kit_simple(&s->m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
}

// An append in the order of the client's stream, as far as it goes at once.
static enum kvq__progress append_behind(struct streamer *s)
{
    struct kvq_entry_wire e = {.handle = s->session, .append = TOKENS};
    struct kvq_request r = append_of(s);
    stream_order(s, &r);
    kit_load(&s->m, &r, &e);
    return kvq__request_start(s->m.queue);
}

STREAM_TEST(test_waits_before_the_gate)
{
    struct kvq_entry_wire e = {.handle = two.session, .append = TOKENS};
    stream_needed();
    begin(&one);
    begin(&two);
    gate_up(true);
    assert_int_equal(append_behind(&one), KVQ__WAIT);
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvq__request_continue(one.m.queue), KVQ__WAIT);
    await_clear();
    struct kvq_request r = append_of(&two); // waits for no client
    assert_int_equal(kit_request(&two.m, &r, &e), 0);
    await_clear();
    gate_up(false);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].status, 0);
    assert_false(kvq__gate_is_clear(gate(), NULL));
    assert_false(kvq__gate_is_clear(gate(), kit.core->pools[1].gpu));
    gate_up(true);
    stream_ready(&one);
    stream_settle(&one);
    assert_int_equal(stream_done(&one), one.signal);
    gate_up(false);
}

// The request of a client that goes meanwhile ends.
STREAM_TEST(test_gone_before_the_gate)
{
    stream_needed();
    begin(&one);
    gate_up(true);
    assert_int_equal(append_behind(&one), KVQ__WAIT);
    kvq__client_detach(one.m.client);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_completion(one.m.queue)->status, KVQ_E_CANCELLED);
    kvq__queue_ending(one.m.queue);
    kit_settle(&one.m);
    gate_up(false);
    stream_reopen(&one, "one");
}

// Memory that is to be freed stays while a stream waits for a client.
STREAM_TEST(test_freed_when_clear)
{
    struct kvq__gpu *gpu = kit.core->pools[1].gpu;
    const struct kvq_gpu_driver *d = kvq__gpu_driver(gpu);
    kvq_gpu_ptr memory, base;
    size_t bytes;
    stream_needed();
    assert_int_equal(kvq__gpu_enter(gpu), 0);
    assert_int_equal(d->memory_alloc(&memory, MIB), 0);
    begin(&one);
    assert_int_equal(append_behind(&one), KVQ__DONE);
    kvq__gpu_free_later(gpu, memory);
    kvq__gpu_sweep(gpu);
    assert_int_equal(d->address_range(&base, &bytes, memory), 0);
    stream_ready(&one);
    stream_settle(&one);
    await_clear();
    kvq__gpu_sweep(gpu);
    assert_int_not_equal(d->address_range(&base, &bytes, memory), 0);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
