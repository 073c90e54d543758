// SPDX-License-Identifier: Apache-2.0
//
// Whole steps in the order of a client's stream, over the software driver: nobody waits for them,
// and whoever fails, goes, closes, drops or takes over meanwhile, the session, the bytes on the GPU
// and the client's page table agree when they have ended.
#include <math.h>

#include "daemon/core/residency/move.h"
#include "daemon/core/session/table.h"
#include "kernels/internal.h"
#include "tests/kits/stream_kit.h"
#include "tests/kits/unit.h"

static char text[KVQ_TEXT_BYTES]; // why the last call was refused

enum {
    PAGES = 16,
    OUTLIERS = 300, // tokens from which ott2 has packed some
    EXTRAS = MIB,
};

// A session of three layers: ott2 keeps outliers from its third one on.
static void open_layers(struct streamer *s, const char *name, const char *format)
{
    struct kvq__layer_row row = stream_row;
    struct kvq__session_spec spec = {.name = name,
                                     .format = format,
                                     .place = kvq__pool_name(&kit.core->pools[1]),
                                     .layers = &row,
                                     .n_layers = 1};
    row.repeat = 3;
    s->session = kit_opened(&s->m, &spec);
}

static uint32_t layers_of(struct streamer *s)
{
    return kit_of(&s->m, s->session)->n_layers;
}

// A page table of a session, in memory that the GPU reaches.
struct table {
    struct streamer *s;
    struct kvq_table_page *page;
    uint8_t *copy; // on the host
};

static struct table open_table(struct streamer *s)
{
    uint32_t layers = layers_of(s);
    struct table t = {s, sim_gpus()->memory_new(kvq_table_bytes(layers, PAGES)),
                      calloc(1, kvq_table_bytes(layers, PAGES))};
    memset(t.page, 0, kvq_table_bytes(layers, PAGES));
    struct kvq__table_memory memory = {.on = kit.core->pools[1].gpu,
                                       .gpu = (uintptr_t)t.page,
                                       .copy = t.copy,
                                       .layers = layers,
                                       .pages = PAGES};
    assert_int_equal(kvq__table_open(s->m.client, s->session, 1ull << 40, &memory, text), 0);
    return t;
}

static struct kvq_table_layer head_of(const struct table *t, uint32_t layer)
{
    struct kvq_table_layer head;
    memcpy(&head, (const uint8_t *)(t->page + 1) + layer * kvq_table_layer_bytes(PAGES),
           sizeof head);
    return head;
}

static struct kvq_table_entry entry_of(const struct table *t, uint32_t layer, uint32_t page)
{
    const uint8_t *at = (const uint8_t *)(t->page + 1) + layer * kvq_table_layer_bytes(PAGES) +
                        sizeof(struct kvq_table_layer);
    struct kvq_table_entry entries[PAGES];
    memcpy(entries, at, sizeof entries);
    return entries[page];
}

// Says of all pages what the session's own view at its count says.
static void check_page(const struct table *t)
{
    struct kvq__session *s = kit_of(&t->s->m, t->s->session);
    struct kvq_page pages[PAGES];
    assert_int_equal(t->page->tokens, s->tokens);
    for (uint32_t l = 0; l < s->n_layers; l++) {
        uint32_t n = kvq__pages_view(s, l, s->tokens, s->tokens, pages);
        struct kvq_table_layer head = head_of(t, l);
        assert_int_equal(head.n_pages, n);
        assert_int_equal(!head.extras, !kvq__extras_view(s, &s->layers[l], s->tokens));
        for (uint32_t i = 0; i < n; i++) {
            struct kvq_table_entry e = entry_of(t, l, i);
            assert_int_equal(e.tokens, pages[i].tokens);
            assert_int_equal(e.packed_tokens, pages[i].packed_tokens);
            assert_int_equal(e.packed % (2 * MIB), (uintptr_t)pages[i].packed % (2 * MIB));
            assert_true(e.packed_tokens == e.tokens || e.raw);
        }
    }
}

// And so does its copy on the host.
static void check_table(const struct table *t)
{
    check_page(t);
    assert_memory_equal(t->copy, t->page, kvq_table_bytes(layers_of(t->s), PAGES));
}

static uint64_t tokens_of(struct streamer *s)
{
    return kit_of(&s->m, s->session)->tokens;
}

// Of a STEP of all layers, whose tensors lie in the client's buffer.
static struct kvq_request step_header(struct streamer *s, uint16_t entries)
{
    struct kvq_request r = kit_header(KVQ_OP_STEP, entries);
    r.layer = layers_of(s);
    r.slots = (uint16_t)kvq_request_slots(r.count, r.layer);
    for (uint32_t i = 0; i < r.layer; i++)
        s->m.layers[i] = (struct kvq_step_layer){kit_view(&s->m, 0, HEADS, DIM, KVQ_F32),
                                                 kit_view(&s->m, BUFFER / 2, HEADS, DIM, KVQ_F32)};
    return r;
}

static int request(struct streamer *s, uint64_t position, uint32_t n, bool on_stream)
{
    struct kvq_entry_wire e = {.handle = s->session, .position = position, .append = n};
    struct kvq_request r = step_header(s, 1);
    r.flags = on_stream ? KVQ_REQ_ON_STREAM : 0;
    r.signal = on_stream ? ++s->signal : 0;
    return kit_ask(&s->m, &r, &e);
}

// In the order of the stream, which has yet to signal; without a timeline in the host's.
static int step(struct streamer *s, uint32_t n)
{
    return request(s, tokens_of(s), n, s->alone);
}

static void go_on(struct streamer *s)
{
    stream_ready(s);
    stream_settle(s);
}

static void whole_step(struct streamer *s, uint32_t n)
{
    assert_int_equal(step(s, n), 0);
    go_on(s);
}

// A request that has gone as far as the GPU.
static void to_the_end(struct streamer *s)
{
    while (kvq__request_continue(s->m.queue) == KVQ__GPU)
        kit_settle(&s->m);
}

// What a session keeps besides its blocks, as the GPU has it.
static void extras_of(struct streamer *s, uint8_t bytes[EXTRAS])
{
    const struct kvq__layer *l = &kit_of(&s->m, s->session)->layers[2];
    size_t n = kvq_extras_bytes(l->format, &l->shape);
    assert_in_range(n, 1, EXTRAS);
    memset(bytes, 0, EXTRAS);
    assert_int_equal(kvq__gpu_take(kit.core->pools[1].gpu, bytes, (uintptr_t)l->extras.data, n), 0);
}

static void free_table(const struct table *t)
{
    sim_gpus()->memory_free(t->page);
    free(t->copy);
}

static void close_table(struct table *t)
{
    uint64_t gone = kit.tables_gone;
    assert_int_equal(kvq__table_close(t->s->m.client, t->s->session, NULL), 0);
    stream_settle(t->s);
    assert_int_equal(kit.tables_gone, gone + 1);
    free_table(t);
}

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
        uint64_t n = 1;
        while (refused_step(&refusals[i], n))
            n++;
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

// The GPU packs nothing any more: a step that only packs fails with the code of that.
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

// ---- Who goes meanwhile ----

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
