// SPDX-License-Identifier: Apache-2.0
//
// Whole steps in the order of a client's stream, over the software driver: nobody waits for them,
// and whoever goes, closes, drops or takes over meanwhile, the session, the bytes on the GPU and
// the client's page table agree when they have ended. test_gpu_step_fails.c has those that fail.
#include "daemon/core/residency/move.h"
#include "daemon/core/session/table.h"
#include "tests/core/step_kit.h"
#include "tests/kits/unit.h"

static char text[KVQ_TEXT_BYTES]; // why the last call was refused

// ---- In order ----

// It is answered at once with the count that it will have, and nothing is so before the stream has
// signalled; the next one waits on the host, and so does whoever names the new count.
STREAM_TEST(test_settles)
{
    stream_needed();
    stream_session(&one, "packed", "oscar2");
    struct table t = open_table(&one);
    assert_int_equal(step(&one, MANY), 0);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].value, MANY);
    const struct kvq__session *s = kit_of(&one.m, one.session);
    assert_true(s->in_step.committing && s->tokens == 0 && s->layers[0].packed == 0);
    assert_int_equal(t.page->tokens, 0);
    assert_int_equal(request(&one, MANY, 1, true), 1); // waits
    stream_ready(&one);
    stream_settle(&one);
    assert_int_equal(s->tokens, MANY);
    check_table(&t);
    assert_true(s->layers[0].packed > 0 &&
                s->layers[0].packed == kvq__packed_at(s, s->layers, MANY));
    assert_int_equal(stream_done(&one), 1);
    assert_int_equal(kvq__request_continue(one.m.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_results(one.m.queue)[0].status, 0);
    go_on(&one);
    assert_int_equal(s->tokens, MANY + 1);
    check_table(&t);
    close_table(&t);
}

// Readers at the committed count do not wait for the writer's step.
STREAM_TEST(test_readers_go_on)
{
    struct kvq__session_spec spec = {.name = "one", .flags = KVQ__OPEN_READ_ONLY};
    stream_needed();
    whole_step(&one, 100);
    two.session = kit_opened(&two.m, &spec);
    struct table t = open_table(&two);
    assert_int_equal(step(&one, 1), 0);
    assert_int_equal(request(&two, 100, 0, false), 0);
    assert_int_equal(t.page->tokens, 100);
    struct kvq_entry_wire e = {.handle = two.session, .position = 50};
    assert_int_equal(kit_simple(&two.m, KVQ_OP_FORK, 0, e, NULL), 1); // as a change would
    go_on(&one);
    kit_settle(&two.m);
    while (kvq__request_continue(two.m.queue) != KVQ__DONE)
        kit_settle(&two.m);
    assert_int_equal(request(&two, 101, 0, false), 0);
    check_table(&t);
    close_table(&t);
}

// A table is where its session is: a stream that writes into another GPU's memory faults, and takes
// all clients' sessions with it.
STREAM_TEST(test_table_elsewhere)
{
    const uint32_t layers = layers_of(&one);
    uint8_t *page = sim_gpus()->memory_new(kvq_table_bytes(layers, PAGES));
    struct kvq__table_memory memory = {
        .on = kit.core->pools[2].gpu, .gpu = (uintptr_t)page, .layers = layers, .pages = PAGES};
    assert_int_equal(kvq__table_open(one.m.client, one.session, 1ull << 40, &memory, text),
                     KVQ_E_INVALID);
    assert_says(text, kvq__pool_name(&kit.core->pools[1]));
    assert_says(text, kvq__pool_name(&kit.core->pools[2]));
    memory = (struct kvq__table_memory){.host = page, .layers = layers, .pages = PAGES};
    assert_int_equal(kvq__table_open(one.m.client, one.session, 1ull << 40, &memory, text),
                     KVQ_E_INVALID);
    sim_gpus()->memory_free(page);
    struct table t = open_table(&one);
    close_table(&t);
}

// A session that is being moved gets no table, whatever its memory, until it is there.
STREAM_TEST(test_table_of_a_moving_session)
{
    struct kvq__move_spec to = {.place = kvq__pool_name(&kit.core->pools[2])};
    struct kvq__move_info move;
    stream_needed();
    assert_int_equal(kvq__table_ask(one.m.client, one.session, text), 0);
    assert_int_equal(step(&one, 10), 0);
    assert_int_equal(kvq__move_start(kit_of(&one.m, one.session), &to, &move, text), 0);
    assert_int_equal(kvq__table_ask(one.m.client, one.session, text), KVQ_E_BUSY);
    go_on(&one);
    while (kvq__core_moves(kit.core))
        kvq__core_poll(kit.core);
    assert_int_equal(kvq__table_ask(one.m.client, one.session, text), 0);
    assert_int_equal(kvq__table_ask(one.m.client, one.session + 1, text), KVQ_E_STALE);
}

// ---- Beside a stalled client ----

// What happens to a session in use: it packs, a window passes, it goes back, or it moves.
struct use {
    const char *format;
    uint32_t window, goes_back;
    bool moves;
};

static uint64_t used_now(void)
{
    stream_settle(&two);
    while (kvq__core_poll(kit.core))
        continue;
    core_check(kit.core);
    return kit.core->pools[0].used_bytes + kit.core->pools[1].used_bytes;
}

// Bytes that it has after some steps of client two.
static uint64_t holds_after(const struct use *use)
{
    struct kvq__layer_row row = stream_row;
    struct kvq__session_spec spec = {
        .format = use->format, .layers = &row, .n_layers = 1, .max_rollback = 200};
    struct kvq__move_spec to = {.place = "host"};
    struct kvq__move_info move;
    const uint64_t before = used_now();
    row.window = use->window;
    spec.place = kvq__pool_name(&kit.core->pools[1]);
    uint64_t handle = kit_opened(&two.m, &spec);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kit_step(&two.m, handle, MANY, HEADS, DIM), 0);
        stream_settle(&two);
    }
    struct kvq__session *s = kit_of(&two.m, handle);
    if (use->goes_back)
        assert_int_equal(kit_truncate(&two.m, handle, use->goes_back), 0);
    if (use->moves)
        assert_int_equal(kvq__move_start(s, &to, &move, text), 0);
    while (kvq__core_moves(kit.core))
        kvq__core_poll(kit.core);
    const uint64_t held = used_now() - before;
    kit_drop(&two.m, handle);
    assert_int_equal(used_now(), before);
    return held;
}

// No more of what sessions in use give up is kept while another client's stream does not signal.
STREAM_TEST(test_in_use_beside_a_stalled)
{
    static const struct use uses[] = {
        {"oscar2", 0, 0, 0}, {"f16", 200, 0, 0}, {"oscar2", 0, 200, 0}, {"oscar2", 0, 0, 1}};
    uint64_t alone[4];
    stream_needed();
    for (int i = 0; i < 4; i++)
        alone[i] = holds_after(&uses[i]);
    assert_int_equal(step(&one, 1), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(holds_after(&uses[i]), alone[i]);
    assert_int_equal(stream_done(&one), 0);
    go_on(&one);
}

// What client two has of a new session after some steps, which its page table names.
static uint64_t holds_after_steps(void)
{
    const struct kvq__pool *pool = &kit.core->pools[1];
    const uint64_t before = pool->used_bytes;
    open_layers(&two, NULL, "oscar2");
    struct table t = open_table(&two);
    for (int i = 0; i < 3; i++) {
        whole_step(&two, MANY);
    }
    whole_step(&two, 1); // since which the table names no raw tokens
    kvq__core_poll(kit.core);
    const uint64_t held = pool->used_bytes - before;
    close_table(&t);
    kit_drop(&two.m, two.session);
    assert_int_equal(pool->used_bytes, before);
    return held;
}

// While another client's stream does not signal.
STREAM_TEST(test_steps_beside_a_stalled)
{
    stream_needed();
    const uint64_t alone = holds_after_steps();
    assert_int_equal(step(&one, 1), 0);
    assert_int_equal(holds_after_steps(), alone);
    assert_int_equal(stream_done(&one), 0);
    go_on(&one);
}

// ---- Who goes meanwhile ----

// A request that has gone as far as the GPU.
static void to_the_end(struct streamer *s)
{
    while (kvq__request_continue(s->m.queue) == KVQ__GPU)
        kit_settle(&s->m);
}

// A client that dies with a step that its stream has not come to: the named session stands as
// before, whatever lay in the tensors, and what its table named is given back.
STREAM_TEST(test_dies)
{
    static uint8_t before[EXTRAS], after[EXTRAS];
    stream_needed();
    open_layers(&one, "packed", "ott2");
    struct table t = open_table(&one);
    whole_step(&one, OUTLIERS);
    extras_of(&one, before);
    assert_int_equal(step(&one, OUTLIERS), 0);
    uint64_t gone = kit.tables_gone;
    kvq__client_detach(one.m.client);
    kvq__queue_ending(one.m.queue);
    kit_settle(&one.m);
    assert_int_equal(kit.tables_gone, gone + 1);
    free_table(&t);
    stream_reopen(&one, "one");
    stream_session(&one, "packed", NULL);
    assert_int_equal(tokens_of(&one), OUTLIERS);
    extras_of(&one, after);
    assert_memory_equal(before, after, sizeof before);
    whole_step(&one, 1);
    assert_int_equal(tokens_of(&one), OUTLIERS + 1);
}

// Who closes a session does not take the step back that it was promised.
STREAM_TEST(test_closes)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {.name = "one"};
    stream_needed();
    assert_int_equal(step(&one, 100), 0);
    assert_int_equal(kvq__session_close(one.m.client, one.session, text), 0);
    assert_int_equal(kvq__session_open(two.m.client, &spec, &info, text), KVQ_E_BUSY);
    go_on(&one);
    assert_int_equal(kvq__session_open(two.m.client, &spec, &info, text), 0);
    assert_int_equal(info.tokens, 100);
}

// Who takes a session over has it without the step, or, where the GPU was past it already, with it.
STREAM_TEST(test_taken_over)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {.name = "one", .flags = KVQ__OPEN_TAKE_OVER};
    struct kvq_gpu_stream *stream = one.m.client->streams[0]->gpu_stream;
    stream_needed();
    assert_int_equal(step(&one, 100), 0);
    assert_int_equal(kvq__session_open(two.m.client, &spec, &info, text), 0);
    two.session = info.handle;
    assert_int_equal(request(&two, 0, 3, false), 1); // waits for the GPU to have passed it
    go_on(&one);
    assert_int_equal(tokens_of(&two), 0);
    to_the_end(&two);
    assert_int_equal(kvq__queue_results(two.m.queue)[0].status, 0);
    assert_int_equal(tokens_of(&two), 3);
    // The other way: all has run by the time of the next hold, and nobody here has seen it yet.
    spec.name = "another";
    stream_session(&one, "another", "f16");
    stream = one.m.client->streams[0]->gpu_stream;
    assert_int_equal(step(&one, 100), 0);
    stream_ready(&one);
    assert_int_equal(kvq__gpu_driver(kit.core->pools[1].gpu)->stream_sync(stream), 0);
    assert_int_equal(kvq__session_open(two.m.client, &spec, &info, text), 0);
    two.session = info.handle;
    assert_int_equal(info.tokens, 0);
    stream_settle(&one);
    assert_int_equal(tokens_of(&two), 100);
}

// What a table names is not given to others while its step is under way, nor afterwards while the
// client looks: also where the session was dropped.
STREAM_TEST(test_dropped)
{
    uint8_t before[64], after[64];
    struct kvq__gpu *gpu = kit.core->pools[1].gpu;
    stream_needed();
    stream_session(&one, "packed", "oscar2");
    struct table t = open_table(&one);
    whole_step(&one, MANY);
    const uint8_t *block = kvq__page(&kit_of(&one.m, one.session)->layers[0], 0)->packed.data;
    assert_int_equal(kvq__gpu_take(gpu, before, (uintptr_t)block, sizeof before), 0);
    assert_int_equal(step(&one, 50), 0);
    uint64_t used = kit.core->pools[1].used_bytes;
    assert_int_equal(kvq__session_drop_named(kit.core, &two.m.client->peer, NULL, "packed", text),
                     0);
    assert_int_equal(kit.core->pools[1].used_bytes, used);
    go_on(&one);
    assert_true(kit.core->pools[1].used_bytes > 0);
    assert_int_equal(t.page->tokens, MANY); // it was cancelled
    for (uint32_t i = 0; i < 8; i++) {
        stream_session(&two, "", "f16");
        assert_int_equal(request(&two, 0, 1000, false), 0);
    }
    assert_int_equal(kvq__gpu_take(gpu, after, (uintptr_t)block, sizeof after), 0);
    assert_memory_equal(before, after, sizeof before);
    used = kit.core->pools[1].used_bytes;
    kvq__client_detach(one.m.client);
    kvq__queue_ending(one.m.queue);
    kit_settle(&one.m);
    assert_true(kit.core->pools[1].used_bytes < used);
    free_table(&t);
    stream_reopen(&one, "one");
}

// Leaves room in a chunk for one layer at a time.
static void shrink_stream(struct streamer *s)
{
    kit.core->config.work_stream_bytes = KVQ__WAVE_ROOM + 2048;
    stream_open(s, "small");
}

// A step that asks for more than a chunk goes through several, and is one step all the same.
STREAM_TEST(test_cut)
{
    struct streamer small;
    shrink_stream(&small);
    open_layers(&small, "packed", "oscar2");
    struct table t = open_table(&small);
    for (uint32_t i = 1; i <= 3; i++) {
        small.words[0] = small.signal + 1; // it comes to its signal before it asks
        assert_int_equal(step(&small, 300), 0);
        stream_settle(&small);
        assert_int_equal(tokens_of(&small), 300 * i);
        check_table(&t);
        const struct kvq__session *s = kit_of(&small.m, small.session);
        for (uint32_t l = 0; l < s->n_layers; l++)
            assert_int_equal(s->layers[l].packed, kvq__packed_at(s, &s->layers[l], 300 * i));
    }
    close_table(&t);
    stream_close(&small);
}

// Its client dies between two chunks: what has been stored of it is nothing.
STREAM_TEST(test_dies_between_chunks)
{
    struct streamer small;
    shrink_stream(&small);
    open_layers(&small, "packed", "oscar2");
    const uint64_t id = kit_of(&small.m, small.session)->id;
    struct kvq_entry_wire e = {.handle = small.session, .append = 300};
    struct kvq_request r = step_header(&small, 1);
    kit_load(&small.m, &r, &e);
    assert_int_equal(kvq__request_start(small.m.queue), KVQ__GPU);
    const struct kvq__session *s = kit_of(&small.m, small.session);
    assert_true(s->in_step.committing && s->in_step.layers > 0 && s->in_step.layers < 3);
    kit_settle(&small.m); // too late to cancel what has been stored
    kvq__client_detach(small.m.client);
    kit_settle(&small.m);
    to_the_end(&small);
    assert_int_equal(kvq__queue_completion(small.m.queue)->status, KVQ_E_CANCELLED);
    assert_true(s->id == id && s->tokens == 0 && !kvq__in_step(s) && s->n_pages == 0);
    stream_reopen(&small, "small");
    stream_session(&small, "packed", NULL);
    assert_int_equal(request(&small, 0, 10, false), 0);
    assert_int_equal(tokens_of(&small), 10);
    stream_close(&small);
}

// Both sessions of a step are dropped between two chunks, one of them behind its stores: nothing is
// left to be packed, whatever the step before has packed.
STREAM_TEST(test_dropped_between_chunks)
{
    struct streamer small, other;
    shrink_stream(&small);
    open_layers(&small, "stored", "oscar2");
    assert_int_equal(request(&small, 0, 300, false), 0);
    other = small; // the same client and queue
    open_layers(&other, "waiting", "oscar2");
    struct kvq_entry_wire e[] = {{.handle = small.session, .position = 300, .append = 300},
                                 {.handle = other.session, .append = 300}};
    struct kvq_request r = step_header(&small, 2);
    kit_load(&small.m, &r, e);
    const struct kvq__session *stored = kit_of(&small.m, small.session);
    const struct kvq__session *waiting = kit_of(&small.m, other.session);
    assert_int_equal(kvq__request_start(small.m.queue), KVQ__GPU);
    while (stored->in_step.layers < 3 || waiting->in_step.layers == 0) {
        kit_settle(&small.m);
        assert_int_equal(kvq__request_continue(small.m.queue), KVQ__GPU);
    }
    assert_true(waiting->in_step.layers < 3);
    const struct kvq__peer *peer = &small.m.client->peer;
    assert_int_equal(kvq__session_drop_named(kit.core, peer, NULL, "stored", text), 0);
    assert_int_equal(kvq__session_drop_named(kit.core, peer, NULL, "waiting", text), 0);
    to_the_end(&small);
    assert_int_equal(kvq__queue_results(small.m.queue)[0].status, KVQ_E_CANCELLED);
    assert_int_equal(kvq__queue_results(small.m.queue)[1].status, KVQ_E_CANCELLED);
    stream_close(&small);
}

// A closed table is no one's to free while a GPU writes it.
STREAM_TEST(test_table_closed)
{
    stream_needed();
    struct table t = open_table(&one);
    uint64_t gone = kit.tables_gone;
    assert_int_equal(step(&one, 10), 0);
    assert_int_equal(kvq__table_close(one.m.client, one.session, NULL), 0);
    assert_int_equal(kit.tables_gone, gone);
    go_on(&one);
    assert_int_equal(kit.tables_gone, gone + 1);
    assert_int_equal(tokens_of(&one), 10);
    free_table(&t);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
