// SPDX-License-Identifier: Apache-2.0
//
// How much the core gives to streams of the software driver, whose hardware queues take 1,024
// pieces of work that have not begun, as a GPU's do: then the call that gives another one waits,
// and here that is the poller. So no request may fill a queue, whatever it asks for, while its
// client's stream stands still.
#include "tests/kits/stream_kit.h"
#include "tests/kits/unit.h"

static struct kvq_entry_wire entry_of(uint64_t session, uint32_t append)
{
    return (struct kvq_entry_wire){.handle = session, .append = append};
}

// Tokens of the streamer's session: n, in one step.
static void write_tokens(struct streamer *s, uint64_t session, uint32_t n)
{
    struct kvq_entry_wire e = entry_of(session, n);
    struct kvq_request r = kit_append(&s->m, 1, 0, HEADS, DIM);
    assert_int_equal(kit_simple(&s->m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    assert_int_equal(kit_ask(&s->m, &r, &e), 0);
    r = kit_of_step(KVQ_OP_STEP_END, 0, 1);
    assert_int_equal(kit_request(&s->m, &r, NULL), 0);
    assert_int_equal(kit_of(&s->m, session)->tokens, n);
}

// Another client gets through a step.
static void others_work(struct streamer *s)
{
    stream_session(s, "others", "f16");
    write_tokens(s, s->session, TOKENS);
}

static struct kvq_request read_on_stream(struct streamer *s, uint32_t n)
{
    struct kvq_request r = kit_header(KVQ_OP_READ, n);
    stream_order(s, &r);
    r.k = kit_view(&s->m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&s->m, BUFFER / 2, HEADS, DIM, KVQ_F32);
    return r;
}

// A READ on the stream of the client, which has not come to it; then it does. Nobody waited for it.
static void read_behind(struct streamer *s, const struct kvq_entry_wire *e, uint32_t n)
{
    struct kvq_request r = read_on_stream(s, n);
    memset(s->m.memory, 0, BUFFER);
    kit_load(&s->m, &r, e);
    enum kvq__progress progress = kvq__request_start(s->m.queue);
    assert_int_equal(progress, KVQ__GPU); // it goes on once something has ended
    assert_true(s->m.client->streams[0]->use->ops <= KVQ_MAX_GPU_OPS);
    others_work(&two);
    stream_ready(s);
    while (progress != KVQ__DONE) {
        kvq__core_poll(kit.core);
        if (kvq__queue_gpu_idle(s->m.queue))
            progress = kvq__request_continue(s->m.queue);
        assert_true(progress == KVQ__DONE || progress == KVQ__GPU);
        assert_true(s->m.client->streams[0]->use->ops <= KVQ_MAX_GPU_OPS + KVQ__CHUNK_OPS);
    }
    stream_settle(s);
    assert_int_equal(s->m.client->streams[0]->use->ops, 0);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(kvq__queue_results(s->m.queue)[i].status, 0);
        assert_int_equal(kvq__queue_results(s->m.queue)[i].value, e[i].append);
    }
}

// What the rows of K are that begin at `row` and were appended as n rows from row 0.
static void rows_are(const struct streamer *s, const float *were, uint32_t row, uint32_t n)
{
    const float *k = (const float *)(void *)s->m.memory + (size_t)row * HEADS * DIM;
    for (uint32_t i = 0; i < n * HEADS * DIM; i++) {
        const float error = k[i] - were[i];
        assert_true(error > -2e-3 && error < 2e-3);
    }
}

// So many pieces that each of them as a copy and two launches would be more than a queue takes.
STREAM_TEST(test_many_pieces)
{
    enum { PIECES = 400, PIECE = 1 };
    static float were[PIECES * HEADS * DIM];
    memcpy(were, one.m.memory, sizeof were);
    write_tokens(&one, one.session, PIECES);
    kit.core->config.work_stream_workspace = PIECE * HEADS * DIM * 2 * sizeof(float);
    const struct kvq_entry_wire e = entry_of(one.session, PIECES);
    read_behind(&one, &e, 1);
    rows_are(&one, were, 0, PIECES);
}

// Sessions of so many tokens, and entries that read them one behind the other.
static void open_many(struct kvq_entry_wire *e, uint32_t sessions, uint32_t each)
{
    for (uint32_t i = 0; i < sessions; i++) {
        stream_session(&one, "", "f16");
        write_tokens(&one, one.session, each);
        e[i] = entry_of(one.session, each);
        e[i].row = i * each;
    }
}

// The same of as many sessions.
STREAM_TEST(test_many_sessions)
{
    enum { SESSIONS = 180, EACH = 2 };
    static float were[EACH * HEADS * DIM];
    static struct kvq_entry_wire e[SESSIONS];
    memcpy(were, one.m.memory, sizeof were);
    open_many(e, SESSIONS, EACH);
    kit.core->config.work_stream_workspace = HEADS * DIM * 2 * sizeof(float);
    read_behind(&one, e, SESSIONS);
    for (uint32_t i = 0; i < SESSIONS; i++)
        rows_are(&one, were, i * EACH, EACH);
}

// Where the workspace has room for all of them they are read by two launches, or less than eight.
STREAM_TEST(test_read_together)
{
    enum { SESSIONS = 100, EACH = 2 };
    static struct kvq_entry_wire e[SESSIONS];
    open_many(e, SESSIONS, EACH);
    struct kvq_request r = read_on_stream(&one, SESSIONS);
    assert_int_equal(kit_request(&one.m, &r, e), 0);
    const struct kvq__work_stream *stream = one.m.client->streams[0];
    assert_true(stream->n == 1 && stream->pending[stream->first].ops < 64);
    stream_ready(&one);
    stream_settle(&one);
}

// ---- Calls that are cut ----

enum { CUT = 16, CUT_QUERIES = 8 };

// `queries` query tokens of a session, n times in one request.
static void attend_all(uint64_t session, uint64_t tokens, uint32_t n, uint16_t queries, float *out)
{
    static struct kvq_entry_wire e[CUT];
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, n);
    const size_t bytes = (size_t)n * queries * 2 * HEADS * DIM * sizeof *out;
    assert_true(n <= CUT && bytes <= BUFFER / 2);
    r.q = kit_view(&one.m, Q_AT, 2 * HEADS, DIM, KVQ_F32);
    r.out = kit_view(&one.m, BUFFER / 2, 2 * HEADS, DIM, KVQ_F32);
    for (uint32_t i = 0; i < n; i++)
        e[i] = (struct kvq_entry_wire){
            .handle = session, .position = tokens, .queries = queries, .q_row = i * queries};
    memset(one.m.memory + BUFFER / 2, 0, bytes);
    assert_int_equal(kit_request(&one.m, &r, e), 0);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvq__queue_results(one.m.queue)[i].status, 0);
    memcpy(out, one.m.memory + BUFFER / 2, bytes);
}

// A call whose partial results are more than the workspace is launched query token by query token,
// each with a batch of its own: the chunk has to have room for all of these.
STREAM_TEST_SMALL(test_room_of_cut_calls)
{
    enum { LONG = 700, VALUES = CUT * CUT_QUERIES * 2 * HEADS * DIM };
    static float whole[VALUES], cut[VALUES];
    stream_session(&one, "long", "f16");
    assert_int_equal(kit_step(&one.m, one.session, LONG, HEADS, DIM), 0);
    attend_all(one.session, LONG, CUT, CUT_QUERIES, whole);
    kit.core->config.work_stream_workspace = 4096;
    attend_all(one.session, LONG, CUT, CUT_QUERIES, cut);
    assert_memory_equal(cut, whole, sizeof cut);
    float size = 0;
    for (uint32_t i = 0; i < VALUES; i++)
        size += cut[i] * cut[i];
    assert_true(size > 0);
}

// An entry whose sums are too many for one token alone is refused, and the others of its request
// have the outputs that they have alone. So is one that appends, before its tokens are stored.
STREAM_TEST(test_too_long_for_one_token)
{
    enum { LONG = 700, VALUES = 2 * HEADS * DIM };
    static float alone[VALUES], beside[2 * VALUES];
    struct kvq_entry_wire e[2];
    stream_session(&one, "short", "f16");
    const uint64_t short_one = one.session;
    assert_int_equal(kit_step(&one.m, short_one, TOKENS, HEADS, DIM), 0);
    stream_session(&one, "long", "f16");
    assert_int_equal(kit_step(&one.m, one.session, LONG, HEADS, DIM), 0);
    attend_all(short_one, TOKENS, 1, 1, alone);
    kit.core->config.work_stream_workspace = 1024;
    e[0] = (struct kvq_entry_wire){.handle = one.session, .position = LONG, .queries = 1};
    e[1] =
        (struct kvq_entry_wire){.handle = short_one, .position = TOKENS, .queries = 1, .q_row = 1};
    struct kvq_request r =
        kit_attend(&one.m, 0, Q_AT - VALUES * sizeof(float), BUFFER / 2, 2 * HEADS, DIM);
    r.count = 2;
    assert_int_equal(kit_request(&one.m, &r, e), 0);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].status, KVQ_E_LIMIT);
    assert_int_equal(kvq__queue_results(one.m.queue)[1].status, 0);
    memcpy(beside, one.m.memory + BUFFER / 2, sizeof beside);
    assert_memory_equal(beside + VALUES, alone, sizeof alone);
    assert_int_equal(
        kit_simple(&one.m, KVQ_OP_STEP_BEGIN, 1,
                   (struct kvq_entry_wire){.handle = one.session, .position = LONG, .append = 1},
                   NULL),
        0);
    e[0].append = 1;
    r = kit_attend(&one.m, 0, Q_AT, BUFFER / 2, 2 * HEADS, DIM);
    r.op = KVQ_OP_APPEND_ATTEND;
    r.step = 1;
    r.k = kit_view(&one.m, 0, HEADS, DIM, KVQ_F32);
    r.v = r.k;
    assert_int_equal(kit_ask(&one.m, &r, e), KVQ_E_LIMIT);
    assert_int_equal(kit_of(&one.m, one.session)->layers[0].append, KVQ__NOT_APPENDED);
}

// What is cut has the bits of the whole: its parts stay on the wide kernels, and in splits as long
// as those of many rows are, whatever rows they have themselves.
STREAM_TEST(test_bits_of_cut_calls)
{
    enum { LONG = 700, QUERIES = 40, VALUES = QUERIES * 2 * HEADS * DIM };
    static float whole[VALUES], cut[VALUES];
    stream_session(&one, "long", "oscar2");
    assert_int_equal(kit_step(&one.m, one.session, LONG, HEADS, DIM), 0);
    attend_all(one.session, LONG, 1, QUERIES, whole);
    for (uint64_t workspace = 32 << 10; workspace >= 4 << 10; workspace /= 2) {
        kit.core->config.work_stream_workspace = workspace;
        attend_all(one.session, LONG, 1, QUERIES, cut);
        assert_memory_equal(cut, whole, sizeof cut);
    }
}

// A call that is launched 256 times takes nearly as many operations as a queue takes, and no more.
STREAM_TEST(test_many_cut_queries)
{
    enum { LONG = 700, QUERIES = 256 };
    stream_session(&one, "long", "f16");
    assert_int_equal(kit_step(&one.m, one.session, LONG, HEADS, DIM), 0);
    struct kvq_entry_wire e = {.handle = one.session, .position = LONG, .queries = QUERIES};
    struct kvq_request r = kit_attend(&one.m, 0, Q_AT, BUFFER / 2, 2 * HEADS, DIM);
    kit.core->config.work_stream_workspace = 4096;
    assert_int_equal(kit_ask(&one.m, &r, &e), 0);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
