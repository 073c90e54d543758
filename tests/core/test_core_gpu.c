// SPDX-License-Identifier: Apache-2.0
//
// The core with requests in the order of clients' streams, over the software driver: what is held
// until a GPU has ended, what a client that does not signal can and cannot keep waiting, and what
// becomes of requests that are refused.
#include <dlfcn.h>
#include <math.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/ring.h"
#include "tests/kits/stream_kit.h"
#include "tests/kits/unit.h"

static char text[KVQ_TEXT_BYTES]; // why the last call was refused

// ---- What the tests do ----

static struct kvq_entry_wire entry_of(struct streamer *s)
{
    return (struct kvq_entry_wire){
        .handle = s->session, .position = kit_of(&s->m, s->session)->tokens, .append = TOKENS};
}

static int begin(struct streamer *s)
{
    return kit_simple(&s->m, KVQ_OP_STEP_BEGIN, 1, entry_of(s), NULL);
}

// An append in the order of the client's stream, which has not signalled yet; or, where there is no
// timeline, in the host's.
static struct kvq_request append_of(struct streamer *s)
{
    struct kvq_request r = kit_of_step(KVQ_OP_APPEND, 1, 1);
    stream_order(s, &r);
    r.k = kit_view(&s->m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&s->m, BUFFER / 2, HEADS, DIM, KVQ_F32);
    return r;
}

static int append(struct streamer *s)
{
    struct kvq_request r = append_of(s);
    struct kvq_entry_wire e = entry_of(s);
    return kit_ask(&s->m, &r, &e);
}

static int attend(struct streamer *s, uint32_t appended)
{
    struct kvq_request r = kit_of_step(KVQ_OP_ATTEND, 1, appended ? 1 : 0);
    struct kvq_entry_wire e = entry_of(s);
    e.append = appended;
    e.queries = 1;
    stream_order(s, &r);
    r.q = kit_view(&s->m, Q_AT, 2 * HEADS, DIM, KVQ_F32);
    r.out = kit_view(&s->m, OUT_AT, 2 * HEADS, DIM, KVQ_F32);
    return kit_ask(&s->m, &r, &e);
}

static void begin_and_append(struct streamer *s)
{
    assert_int_equal(begin(s), 0);
    assert_int_equal(append(s), 0);
}

static int end(struct streamer *s)
{
    const struct kvq_request r = kit_of_step(KVQ_OP_STEP_END, 0, 1);
    return kit_request(&s->m, &r, NULL);
}

// A whole step of TOKENS.
static void commit(struct streamer *s)
{
    const uint64_t before = kit_of(&s->m, s->session)->tokens;
    begin_and_append(s);
    stream_ends(s);
    assert_int_equal(end(s), 0);
    assert_int_equal(kit_of(&s->m, s->session)->tokens, before + TOKENS);
}

static uint32_t buffer_uses(const struct streamer *s)
{
    return kvq__buffer_get(s->m.client, s->m.buffer)->uses;
}

// ---- What is held ----

// Until the GPU has stored them, the tokens' blocks and the buffer they come from are held, and the
// step does not end.
STREAM_TEST(test_append_is_held)
{
    stream_needed();
    begin_and_append(&one);
    const struct kvq__session *s = kit_of(&one.m, one.session);
    assert_false(kvq__queue_gpu_idle(one.m.queue));
    assert_int_equal(s->entries.tail, 1);
    assert_int_equal(s->refs, 1);
    assert_true(buffer_uses(&one) > 0);
    assert_false(kvq__core_idle(kit.core));
    assert_int_equal(end(&one), 1); // waits
    assert_int_equal(stream_done(&one), 0);
    stream_ends(&one);
    assert_int_equal(s->entries.tail, 0);
    assert_int_equal(s->refs, 0);
    assert_int_equal(buffer_uses(&one), 0);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_completion(one.m.queue)->status, 0);
    assert_int_equal(s->tokens, TOKENS);
    assert_int_equal(stream_done(&one), 1);
}

// A session that is dropped meanwhile keeps its blocks from others until the GPU is done with them.
STREAM_TEST(test_dropped_while_under_way)
{
    stream_needed();
    begin_and_append(&one);
    assert_int_equal(attend(&one, TOKENS), 0);
    const uint64_t used = kit.core->pools[1].used_bytes;
    kit_drop(&one.m, one.session);
    assert_int_equal(kit.core->pools[1].used_bytes, used);
    stream_ends(&one);
    assert_int_equal(kit.core->pools[1].used_bytes, 0);
}

// ---- Values that are not finite ----

// The append is answered before anybody has seen them; the end of the step tells, and the session
// stands as before.
STREAM_TEST(test_nan_on_a_stream)
{
    float *k = (float *)(void *)one.m.memory;
    const struct kvq__session *s = kit_of(&one.m, one.session);
    stream_needed();
    k[5] = NAN;
    begin_and_append(&one);
    stream_ends(&one);
    assert_int_equal(end(&one), KVQ_E_NONFINITE);
    assert_int_equal(s->tokens, 0);
    assert_null(s->step);
    k[5] = 1;
    commit(&one);
}

// Counters do not wrap around to "none".
STREAM_TEST(test_very_many_nan)
{
    float *k = (float *)(void *)one.m.memory;
    stream_needed();
    assert_int_equal(begin(&one), 0);
    kit_of(&one.m, one.session)->in_step.counts->host->nonfinite = UINT32_MAX - 15;
    for (int i = 0; i < 16; i++)
        k[i] = NAN;
    assert_int_equal(append(&one), 0);
    stream_ends(&one);
    assert_int_equal(end(&one), KVQ_E_NONFINITE);
}

// ---- Refused requests ----

// They are done behind what was enqueued before them, and the words stay in use until then.
STREAM_TEST(test_refused_are_done_in_order)
{
    struct kvq_request r;
    struct kvq_entry_wire e = entry_of(&one);
    stream_needed();
    begin_and_append(&one);
    r = append_of(&one);
    r.layer = 9;
    assert_int_equal(kit_request(&one.m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].status, KVQ_E_SHAPE);
    r = append_of(&one);
    r.op = KVQ_OP_TRUNCATE; // which takes no streams
    assert_int_equal(kit_request(&one.m, &r, &e), KVQ_E_INVALID);
    assert_int_equal(stream_done(&one), 0);
    kvq_word64_store_release(&one.words[0], 1);
    kit_settle(&one.m);
    assert_int_equal(stream_done(&one), 3);
}

// A queue whose work stream has yet to write `done` is not settled: its timeline cannot go.
STREAM_TEST(test_done_is_under_way)
{
    struct kvq_request r = append_of(&one);
    struct kvq_entry_wire e = entry_of(&one);
    struct kvq_gpu_stream *stream = one.m.client->streams[0]->gpu_stream;
    stream_needed();
    stream_stall(stream, true);
    r.op = KVQ_OP_TRUNCATE;
    assert_int_equal(kit_request(&one.m, &r, &e), KVQ_E_INVALID);
    kvq__core_poll(kit.core);
    assert_false(kvq__queue_gpu_idle(one.m.queue));
    assert_int_equal(stream_done(&one), 0);
    stream_stall(stream, false);
    kit_settle(&one.m);
    assert_int_equal(stream_done(&one), 1);
}

// However many are refused, a client fills no more than its work stream.
STREAM_TEST(test_many_refused)
{
    struct kvq_request r = append_of(&one);
    struct kvq_entry_wire e = entry_of(&one);
    struct kvq_gpu_stream *stream = one.m.client->streams[0]->gpu_stream;
    enum kvq__progress p = KVQ__DONE;
    uint32_t n = 0;
    stream_needed();
    stream_stall(stream, true);
    r.op = KVQ_OP_TRUNCATE;
    for (; n < 2 * KVQ_MAX_GPU_PENDING && p == KVQ__DONE; n++) {
        kit_load(&one.m, &r, &e);
        p = kvq__request_start(one.m.queue);
    }
    assert_int_equal(p, KVQ__GPU);
    assert_int_equal(n, KVQ_MAX_GPU_PENDING + 1);
    stream_stall(stream, false);
    kit_settle(&one.m);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_completion(one.m.queue)->status, KVQ_E_INVALID);
}

// A GPU compares differences: nothing that a queue's end writes would ever reach these.
STREAM_TEST(test_signals_out_of_reach)
{
    struct kvq_request r = append_of(&one);
    struct kvq_entry_wire e = entry_of(&one);
    stream_needed();
    r.signal = (uint64_t)INT64_MAX + 1;
    assert_int_equal(kit_request(&one.m, &r, &e), KVQ_E_INVALID);
    r.signal = UINT64_MAX;
    assert_int_equal(kit_request(&one.m, &r, &e), KVQ_E_INVALID);
}

// A GPU faults where a host would not, and takes everybody's sessions with it.
STREAM_TEST(test_buffer_at_an_odd_address)
{
    struct kvq__buffer_memory memory = {
        .host = one.m.memory + 1, .gpu = (uintptr_t)one.m.memory + 1, .bytes = BUFFER - 1};
    uint32_t odd;
    assert_int_equal(begin(&one), 0);
    assert_int_equal(kvq__buffer_add(one.m.client, &memory, &odd, text), 0);
    struct kvq_request r = append_of(&one);
    struct kvq_entry_wire e = entry_of(&one);
    r.k.buffer = odd;
    assert_int_equal(kit_request(&one.m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].status, KVQ_E_INVALID);
    assert_int_equal(append(&one), 0);
}

// ---- Others ----

// While one client's stream does not signal, another's steps go through.
STREAM_TEST(test_stalled_alone)
{
    stream_needed();
    begin_and_append(&one);
    commit(&two);
    assert_int_equal(stream_done(&one), 0);
}

// While it does not signal, what others' sessions had comes back, on its GPU and on the host.
STREAM_TEST(test_given_back_beside_a_stalled)
{
    struct kvq__session_info info;
    const struct kvq__pool *pools = kit.core->pools;
    struct kvq__session_spec spec = {
        .format = "f16", .place = "host", .layers = &stream_row, .n_layers = 1};
    stream_needed();
    begin_and_append(&one);
    const uint64_t gpu = pools[1].used_bytes, host = pools[0].used_bytes;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kit_step(&two.m, two.session, MANY, HEADS, DIM), 0);
        assert_int_equal(kvq__session_open(two.m.client, &spec, &info, text), 0);
        assert_int_equal(kit_step(&two.m, info.handle, MANY, HEADS, DIM), 0);
        assert_true(pools[1].used_bytes > gpu && pools[0].used_bytes > host);
        kit_drop(&two.m, info.handle);
        kit_drop(&two.m, two.session);
        assert_true(pools[1].used_bytes == gpu && pools[0].used_bytes == host);
        stream_session(&two, "two", "f16");
    }
    assert_int_equal(kvq__session_open(two.m.client, &spec, &info, text), 0);
    assert_int_equal(kit_step(&two.m, info.handle, 1, HEADS, DIM), 0);
    const uint64_t strip = pools[0].used_bytes - host;
    for (int i = 0; i < 64; i++)
        assert_int_equal(kit_step(&two.m, info.handle, 1, HEADS, DIM), 0);
    assert_int_equal(pools[0].used_bytes, host + 4 * strip); // the shorter blocks are gone
    kit_drop(&two.m, info.handle);
    assert_int_equal(stream_done(&one), 0);
}

// A client that goes beside a stalled one is rid of its buffer and its queue as soon as its own
// work stream has ended, whether that was under way when the client went or not.
STREAM_TEST(test_gone_beside_a_stalled)
{
    stream_needed();
    begin_and_append(&one);
    for (int under_way = 0; under_way < 2; under_way++) {
        const uint64_t gone = kit.buffers_gone;
        begin_and_append(&two);
        if (!under_way) {
            stream_ready(&two);
            stream_settle(&two);
        }
        kvq__client_detach(two.m.client);
        assert_int_equal(kvq__queue_gpu_idle(two.m.queue), !under_way);
        assert_int_equal(kit.buffers_gone, gone + !under_way);
        kvq__queue_ending(two.m.queue);
        stream_settle(&two);
        assert_true(kvq__queue_gpu_idle(two.m.queue));
        assert_int_equal(kit.buffers_gone, gone + 1);
        stream_reopen(&two, "two");
    }
    assert_true(kvq__work_stream_busy(one.m.client->streams[0]));
    assert_int_equal(stream_done(&one), 0);
}

// Blocks that a stream may look at by way of a session that is gone stay when a fork that shares
// them goes as well, which nobody looks at.
STREAM_TEST(test_shared_with_a_stalled)
{
    enum { SHEET = (KVQ__SHEET_PAGES + 1) * KVQ_BLOCK_TOKENS };
    const struct kvq__pool *pool = &kit.core->pools[1];
    stream_needed();
    assert_int_equal(kit_step(&one.m, one.session, SHEET, HEADS, DIM), 0);
    uint64_t fork = kit_fork(&one.m, one.session, SHEET);
    assert_int_equal(kvq__page_owners(&kit_of(&one.m, one.session)->layers[0], 0), 2);
    assert_int_equal(attend(&one, 0), 0);
    const uint64_t used = pool->used_bytes;
    kit_drop(&one.m, one.session);
    kit_drop(&one.m, fork);
    assert_int_equal(pool->used_bytes, used);
    stream_ends(&one);
    assert_int_equal(pool->used_bytes, 0);
}

// A kernel that the GPU refuses to start is the end of its own request, which is told, and of
// nothing else.
STREAM_TEST(test_refused_launch)
{
    assert_int_equal(begin(&one), 0);
    stream_refuse("launch", 1, KVQ_GPU_INVALID_VALUE);
    const struct kvq_request refused = append_of(&one);
    const struct kvq_entry_wire e = entry_of(&one);
    assert_int_equal(kit_request(&one.m, &refused, &e), 0);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].status, KVQ_E_UNSUPPORTED);
    assert_int_equal(kit.events[KVQ__EVENT_GPU_REFUSED], 1);
    kvq__core_tick(kit.core);
    assert_null(kvq__gpu_fault(kit.core->pools[1].gpu));
    stream_ready(&one);
    commit(&two);
}

// A client that goes while some of its request is on the host and some on a GPU: what is held there
// is held on.
STREAM_TEST(test_gone_with_work_on_a_gpu)
{
    struct kvq__session_spec spec = {
        .format = "f16", .place = "host", .layers = &stream_row, .n_layers = 1};
    struct kvq_gpu_stream *stream = one.m.client->streams[0]->gpu_stream;
    uint64_t handle = kit_opened(&one.m, &spec);
    struct kvq_entry_wire e[2] = {entry_of(&one), {.handle = handle, .append = TOKENS}};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 2, 1);
    assert_int_equal(kit_request(&one.m, &r, e), 0);
    r = append_of(&one);
    r.count = 2;
    r.flags = 0;
    r.signal = 0;
    stream_stall(stream, true);
    kit_load(&one.m, &r, e);
    assert_int_equal(kvq__request_start(one.m.queue), KVQ__RUN);
    const uint64_t used = kit.core->pools[1].used_bytes;
    kvq__client_detach(one.m.client);
    kit_run_job(&kit, kvq__queue_job(one.m.queue));
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__GPU);
    kvq__core_poll(kit.core);
    assert_int_equal(kit.core->pools[1].used_bytes, used);
    stream_stall(stream, false);
    kit_settle(&one.m);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_completion(one.m.queue)->status, KVQ_E_CANCELLED);
    assert_int_equal(kit.core->pools[1].used_bytes, 0);
    stream_reopen(&one, "one");
}

// A step of a new session, ended while the stream is held back: units of it are due, and their
// packing is under way until the stream is let go on.
static struct kvq_gpu_stream *packing_is_held_back(struct streamer *s)
{
    struct kvq_gpu_stream *stream = s->m.client->streams[0]->gpu_stream;
    struct kvq_request r = append_of(s);
    struct kvq_entry_wire e = {.append = MANY};
    stream_session(s, "packed", "oscar2");
    e.handle = s->session;
    assert_int_equal(kit_simple(&s->m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    assert_int_equal(kit_ask(&s->m, &r, &e), 0);
    stream_ends(s);
    stream_stall(stream, true);
    assert_int_equal(end(s), 0);
    assert_true(kit_of(&s->m, s->session)->layers[0].packed > 0);
    assert_true(kvq__work_stream_busy(s->m.client->streams[0]));
    return stream;
}

// Units that a stream has yet to pack are not copied before they are there.
STREAM_TEST(test_fork_waits_for_packing)
{
    struct kvq_gpu_stream *stream = packing_is_held_back(&one);
    struct kvq_entry_wire e = {.handle = one.session, .position = MANY};
    assert_int_equal(kit_simple(&one.m, KVQ_OP_FORK, 0, e, NULL), 1); // waits
    stream_stall(stream, false);
    stream_settle(&one);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__GPU);
    kit_settle(&one.m);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].status, 0);
}

// Others who read the session do wait, and the log names who keeps them waiting, and with what.
STREAM_TEST(test_stalled_while_packing)
{
    struct kvq_gpu_stream *stream = packing_is_held_back(&one);
    struct kvq__session_spec spec = {.name = "packed", .flags = KVQ__OPEN_READ_ONLY};
    assert_null(kvq__work_stream_withholds(one.m.client->streams[0])); // nobody else has it
    uint64_t handle = kit_opened(&two.m, &spec);
    struct kvq_entry_wire e = {.handle = handle, .position = MANY, .queries = 1};
    struct kvq_request r = kit_attend(&two.m, 0, Q_AT, OUT_AT, 2 * HEADS, DIM);
    assert_int_equal(kit_request(&two.m, &r, &e), 1); // waits
    kit_tick(&kit, 3000000000);
    assert_int_equal(kit.events[KVQ__EVENT_CLIENT_STALLED], 1);
    assert_string_equal(kit.event_session, "packed");
    stream_stall(stream, false);
    stream_settle(&one);
    assert_null(kvq__work_stream_withholds(one.m.client->streams[0]));
    assert_int_equal(kvq__request_continue(two.m.queue), KVQ__GPU);
    kit_settle(&two.m);
    assert_int_equal(kvq__request_continue(two.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_results(two.m.queue)[0].status, 0);
    assert_int_equal(kvq__session_close(two.m.client, handle, text), 0);
}

// Nobody waits for packing, so its client can go: the work stream stays until it has ended, and
// what it reads and writes stays as well.
STREAM_TEST(test_gone_while_packing)
{
    struct kvq_gpu_stream *stream = packing_is_held_back(&one);
    const struct kvq__work_stream *work = one.m.client->streams[0];
    const uint64_t used = kit.core->pools[1].used_bytes;
    kvq__client_detach(one.m.client);
    kvq__queue_ending(one.m.queue);
    assert_true(kvq__queue_gpu_idle(one.m.queue));
    stream_reopen(&one, "one");
    assert_ptr_not_equal(one.m.client->streams[0], work);
    assert_int_equal(kit.core->pools[1].used_bytes, used);
    stream_stall(stream, false);
    while (kvq__work_stream_busy(work))
        kvq__core_poll(kit.core);
    assert_null(work->client);
    assert_ptr_equal(LIST_FIRST(&kit.core->streams.spare), work);
}

// No request holds a session that a stream packs: what it had stays all the same until that ended.
STREAM_TEST(test_dropped_while_packing)
{
    struct kvq_gpu_stream *stream = packing_is_held_back(&one);
    assert_int_equal(kit_of(&one.m, one.session)->refs, 0);
    const uint64_t used = kit.core->pools[1].used_bytes;
    kit_drop(&one.m, one.session);
    assert_int_equal(kit.core->pools[1].used_bytes, used);
    stream_stall(stream, false);
    stream_settle(&one);
    assert_int_equal(kit.core->pools[1].used_bytes, 0);
}

// What a session that nobody reads has been given is packed all the same, and its raw blocks are
// given back: at once, as much as a chunk of the work stream holds, and the rest when there is room
// again.
STREAM_TEST(test_packs_unasked)
{
    enum { MORE = 2000, OWN_HEADS = 1 };
    static const struct kvq__layer_row rows = {OWN_HEADS, OWN_HEADS,     DIM,
                                               DIM,       .kv_from = -1, .repeat = 3};
    kit.core->config.work_stream_bytes = 20 << 10;
    struct streamer three;
    stream_open(&three, "three");
    struct kvq__session_spec spec = {.format = "ott2",
                                     .place = kvq__pool_name(&kit.core->pools[1]),
                                     .layers = &rows,
                                     .n_layers = 1};
    uint64_t handle = kit_opened(&three.m, &spec);
    assert_int_equal(kit_step(&three.m, handle, MORE, OWN_HEADS, DIM), 0);
    const struct kvq__session *s = kit_of(&three.m, handle);
    stream_settle(&three);
    for (uint32_t i = 0; i < s->n_layers; i++) {
        assert_int_equal(s->layers[i].packed, kvq__packed_at(s, &s->layers[i], MORE));
        assert_true(s->layers[i].packed > MORE / 2);
        assert_null(kvq__page(&s->layers[i], 0)->raw.data);
    }
    stream_close(&three);
}

// A client that finds no memory on the GPU is refused at once, whoever is stalled there: to free
// what it got would be to wait for them.
STREAM_TEST(test_no_memory_beside_a_stalled)
{
    struct streamer three = {0};
    struct kvq__session_info info;
    struct kvq__session_spec spec = {.format = "f16",
                                     .place = kvq__pool_name(&kit.core->pools[1]),
                                     .layers = &stream_row,
                                     .n_layers = 1};
    stream_needed();
    begin_and_append(&one);
    assert_int_equal(member_open(&kit, &three.m, 1000, BUFFER), 0);
    stream_refuse("memory_alloc", 2, KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(kvq__session_open(three.m.client, &spec, &info, text), KVQ_E_NO_MEMORY);
    assert_int_equal(kvq__session_open(three.m.client, &spec, &info, text), 0);
    member_close(&three.m);
    assert_false(kvq__queue_gpu_idle(one.m.queue));
}

// An append that the driver had no room for is as if it had not been asked for: the same step can
// append that layer after all.
STREAM_TEST(test_append_again)
{
    assert_int_equal(begin(&one), 0);
    stream_refuse("copy_in", 1, KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(append(&one), KVQ_E_NO_MEMORY);
    stream_ends(&one);
    assert_int_equal(append(&one), 0);
    assert_int_equal(append(&one), KVQ_E_INVALID); // once is enough
    stream_ends(&one);
    assert_int_equal(end(&one), 0);
    assert_int_equal(kit_of(&one.m, one.session)->tokens, TOKENS);
}

// ---- No memory for what orders streams ----

// The stream cannot wait for the client, who is yet to write K and V: the request stores nothing,
// and is done. The same step can append after all.
STREAM_TEST(test_no_memory_to_wait)
{
    stream_needed();
    assert_int_equal(begin(&one), 0);
    stream_refuse("stream_wait64", 1, KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(append(&one), KVQ_E_NO_MEMORY);
    kit_settle(&one.m);
    assert_int_equal(stream_done(&one), 1);
    assert_int_equal(kit_of(&one.m, one.session)->layers[0].append, KVQ__NOT_APPENDED);
    stream_refuse("stream_wait64", 1, KVQ_GPU_OUT_OF_MEMORY);
    assert_int_equal(attend(&one, 0), KVQ_E_NO_MEMORY);
    stream_ends(&one);
    assert_int_equal(append(&one), 0);
    stream_ends(&one);
    assert_int_equal(end(&one), 0);
    assert_int_equal(kit_of(&one.m, one.session)->tokens, TOKENS);
    assert_null(kvq__gpu_fault(kit.core->pools[1].gpu));
}

static void on_wake(void *context)
{
    kvq_word_store_release(context, 1);
}

// A wake-up that could not be asked for is asked for again.
STREAM_TEST(test_no_memory_to_wake)
{
    uint32_t woken = 0;
    stream_needed();
    begin_and_append(&one);
    stream_refuse("launch_host", 1, KVQ_GPU_OUT_OF_MEMORY);
    for (int i = 0; i < 2; i++) {
        assert_true(kvq__core_wake(kit.core, on_wake, &woken));
        assert_int_equal(one.m.client->streams[0]->use->watching, i);
    }
    stream_ends(&one);
    while (!kvq_word_load_acquire(&woken))
        sched_yield();
    assert_null(kvq__gpu_fault(kit.core->pools[1].gpu));
}

static uint64_t writes_of_words(void)
{
    void *symbol = dlsym(kvq__gpu_driver(kit.core->pools[1].gpu)->library, "kvq_soft_calls");
    uint64_t (*calls)(const char *);
    memcpy(&calls, &symbol, sizeof calls);
    return calls("stream_write64");
}

// The word that lets the stream of a client that is gone go on could not be written: it is written
// again, since a store of the host's need not wake a stream.
STREAM_TEST(test_no_memory_to_let_go)
{
    stream_needed();
    begin_and_append(&one);
    struct kvq_gpu_stream *stream = one.m.client->streams[0]->gpu_stream;
    stream_stall(stream, true); // the store does not wake it either
    kvq__client_detach(one.m.client);
    const uint64_t before = writes_of_words();
    stream_refuse("stream_write64", 1, KVQ_GPU_OUT_OF_MEMORY);
    for (uint64_t i = 1; i <= 2; i++) {
        kvq__queue_ending(one.m.queue);
        assert_int_equal(writes_of_words(), before + i);
    }
    assert_null(kvq__gpu_fault(kit.core->pools[1].gpu));
    stream_stall(stream, false);
    kit_settle(&one.m);
    stream_reopen(&one, "one");
}

// Where a signal is refused somebody would wait for ever: for the first one the client's stream,
// and for the second one the daemon, since that is the number of the work. So these are faults,
// also for want of memory. A fault is for good: each has a process of its own, before there is a
// driver in this one.
static const struct refusal {
    const char *call;
    uint64_t n;
    bool by_events;    // the GPU has no memory operations, and hardware queues for no client
    const char *fault; // NULL: the request is served
} refusals[] = {{"stream_write64", 1, false, "signalling a client"},
                {"stream_write64", 2, false, "ending work on the GPU"},
                {"event_record", 1, true, "ending work on the GPU"},
                {"event_create", 1, true, NULL}};
enum { REFUSALS = sizeof refusals / sizeof *refusals };
static int outcomes[REFUSALS];

static void refuse_signal(const struct refusal *r)
{
    if (r->by_events) {
        setenv("KVQ_EMU_LACKS", "memory_ops", 1);
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "5", 1);
    }
    kit_gpus(sim_gpus());
    stream_setup(NULL);
    if (one.alone == r->by_events) // this machine's GPU has no hardware queues for clients
        _exit(0);
    if (begin(&one))
        _exit(1);
    stream_refuse(r->call, r->n, KVQ_GPU_OUT_OF_MEMORY);
    struct kvq_request request = append_of(&one);
    struct kvq_entry_wire e = entry_of(&one);
    kit_load(&one.m, &request, &e);
    kvq__request_start(one.m.queue);
    const char *fault = kvq__gpu_fault(kit.core->pools[1].gpu);
    _exit(r->fault ? !fault || !strstr(fault, r->fault) : fault != NULL);
}

static void refuse_signals(void)
{
    for (int i = 0; i < REFUSALS; i++) {
        pid_t pid = fork();
        if (pid == 0)
            refuse_signal(&refusals[i]);
        waitpid(pid, &outcomes[i], 0);
    }
}

PLAIN_TEST(test_no_memory_to_signal)
{
    for (int i = 0; i < REFUSALS; i++)
        assert_int_equal(outcomes[i], 0);
}

// ---- Codebooks ----

static int give_codebook(void *context, const char *name, uint32_t layer,
                         const struct kvq_format *format, const struct kvq_shape *shape,
                         struct kvq_book *book, void **hold, char *why)
{
    static float smooth[HEADS * DIM], tables[2][HEADS << 14];
    const struct kvq_side *k = &format->k, *v = &format->v;
    const size_t k_floats = (size_t)k->vector << k->bits, v_floats = (size_t)v->vector << v->bits;
    assert_true(shape->kv_heads == HEADS && k_floats <= 1 << 14 && v_floats <= 1 << 14);
    for (uint32_t i = 0; smooth[i % (HEADS * DIM)] == 0.0f; i++)
        smooth[i] = 0.5f + (float)(i % 7) / 4;
    for (uint32_t i = 0; tables[1][0] == 0.0f && i < HEADS << 14; i++) {
        tables[0][i] = kit_float(&kit);
        tables[1][(HEADS << 14) - 1 - i] = kit_float(&kit);
    }
    *book = (struct kvq_book){
        .smooth = smooth, .k = tables[0], .v = tables[1], .k_head = k_floats, .v_head = v_floats};
    *hold = smooth;
    return 0;
}

static void ignore(void *context, void *hold)
{
}

// The last of 400 tokens' attention, from a session at this place.
static void attend_by_book(const char *place, float *out)
{
    struct kvq__session_spec spec = {
        .format = "vecinfer-2@book", .place = place, .layers = &stream_row, .n_layers = 1};
    uint64_t handle = kit_opened(&one.m, &spec);
    assert_int_equal(kit_step(&one.m, handle, MANY, HEADS, DIM), 0);
    struct kvq_entry_wire e = {.handle = handle, .position = MANY, .queries = 1};
    struct kvq_request r = kit_attend(&one.m, 0, Q_AT, OUT_AT, 2 * HEADS, DIM);
    assert_int_equal(kit_ask(&one.m, &r, &e), 0);
    assert_true(kit_of(&one.m, handle)->layers[0].packed > 0);
    memcpy(out, one.m.memory + OUT_AT, 2 * HEADS * DIM * sizeof *out);
}

// A GPU has tables of its own, and gives the same as the host to rounding.
STREAM_TEST(test_codebook)
{
    static float host[2 * HEADS * DIM], gpu[2 * HEADS * DIM];
    double error = 0, size = 0;
    kit.core->config.codebook = give_codebook;
    kit.core->config.codebook_share = kit.core->config.codebook_release = ignore;
    attend_by_book("host", host);
    attend_by_book(kvq__pool_name(&kit.core->pools[1]), gpu);
    for (uint32_t i = 0; i < 2 * HEADS * DIM; i++) {
        error += ((double)host[i] - gpu[i]) * ((double)host[i] - gpu[i]);
        size += (double)host[i] * host[i];
    }
    assert_true(size > 0 && sqrt(error) <= 4e-3 * sqrt(size));
}

// ---- Large batches ----

// n entries of which every `one_in` is fine, and the others name no session.
static void attend_many(uint16_t n, uint32_t one_in)
{
    static struct kvq_entry_wire e[KVQ_MAX_BATCH];
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, n);
    r.q = kit_view(&one.m, Q_AT, 2 * HEADS, DIM, KVQ_F32);
    r.out = kit_view(&one.m, OUT_AT, 2 * HEADS, DIM, KVQ_F32);
    for (uint32_t i = 0; i < n; i++) {
        e[i] = entry_of(&one);
        e[i].append = 0;
        e[i].queries = 1;
        e[i].q_row = i / one_in;
        e[i].handle += i % one_in ? 1ull << 32 : 0;
    }
    assert_int_equal(kit_request(&one.m, &r, e), 0);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvq__queue_results(one.m.queue)[i].status, i % one_in ? KVQ_E_STALE : 0);
}

// More entries than a chunk of the work stream holds at a time.
STREAM_TEST_SMALL(test_more_than_a_chunk)
{
    commit(&one);
    attend_many(24, 1);
}

// What failed takes no room of what the others need.
STREAM_TEST_SMALL(test_many_that_failed)
{
    commit(&one);
    attend_many(400, 20);
}

int main(void)
{
    refuse_signals();
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
