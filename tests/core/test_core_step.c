// SPDX-License-Identifier: Apache-2.0
//
// Steps, windows and packing: what is stored depends on the tokens alone, a step commits whole or
// not at all, and going back is as if one had never gone.
#include <math.h>

#include "daemon/core/request/request.h"
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum {
    HEADS = 2,
    DIM = 64,
    TOKENS = 1100,
    QUERIES = 4,
    MIB = 1 << 20,
    TENSOR_BYTES = TOKENS * HEADS * DIM * 4,
    BUFFER = 4 * MIB,
    Q_AT = BUFFER / 4,
    OUT_AT = Q_AT + 64 * 1024,
    LSE_AT = OUT_AT + 64 * 1024,
};
static_assert(TENSOR_BYTES <= Q_AT, "the tensors lie apart");

static const struct kvq__layer_row two_layers[] = {
    {4, HEADS, DIM, DIM, .format = "oscar2", .kv_from = -1},
    {2, HEADS, DIM, DIM, .format = "f16", .kv_from = -1},
};

static struct kit kit;
static struct member m;

static int setup(void **state)
{
    kit_open(&kit, 7, 128 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    member_fill(&m);
    return 0;
}

static uint64_t fed(uint32_t piece, uint32_t tokens, uint32_t max_rollback)
{
    uint64_t handle = kit_session(&m, two_layers, 2, max_rollback);
    assert_true(handle != 0);
    for (uint32_t at = 0; at < tokens; at += piece) {
        uint32_t n = tokens - at < piece ? tokens - at : piece;
        assert_int_equal(kit_step(&m, handle, n, HEADS, DIM), 0);
    }
    return handle;
}

static void put_views(struct kvq_request *r)
{
    r->q = kit_view(&m, Q_AT, 4, DIM, KVQ_F32);
    r->out = kit_view(&m, OUT_AT, 4, DIM, KVQ_F32);
    r->lse = kit_view(&m, LSE_AT, 4, 1, KVQ_F32);
}

static void attend(uint64_t handle, uint32_t layer, uint16_t queries, uint16_t flags)
{
    struct kvq_entry_wire e = {
        .handle = handle, .position = kit_of(&m, handle)->tokens, .queries = queries};
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, 1);
    r.layer = layer;
    r.flags = flags;
    put_views(&r);
    memset(m.memory + OUT_AT, 0, 64 * 1024);
    assert_int_equal(kit_ask(&m, &r, &e), 0);
    assert_true(*(float *)(void *)(m.memory + OUT_AT) != 0.0f); // it was written
}

static void copy_out(uint64_t handle, uint32_t layer, uint8_t out[64 * 1024])
{
    attend(handle, layer, QUERIES, 0);
    memcpy(out, m.memory + OUT_AT, 64 * 1024);
}

static void assert_same_attention(uint64_t a, uint64_t b)
{
    static uint8_t first[64 * 1024], second[64 * 1024];
    for (uint32_t layer = 0; layer < 2; layer++) {
        copy_out(a, layer, first);
        copy_out(b, layer, second);
        assert_memory_equal(first, second, sizeof first);
    }
}

static void assert_same_bytes(uint64_t a, uint64_t b)
{
    const struct kvq__session *s = kit_of(&m, a), *t = kit_of(&m, b);
    const struct kvq__layer *x = &s->layers[0], *y = &t->layers[0];
    assert_int_equal(s->tokens, t->tokens);
    assert_int_equal(x->packed, y->packed);
    assert_true(x->packed > 0);
    assert_int_equal(x->raw_page, y->raw_page);
    for (uint32_t p = 0; p < x->packed / KVQ_BLOCK_TOKENS; p++)
        assert_memory_equal(kvq__page(x, p)->packed.data, kvq__page(y, p)->packed.data,
                            x->packed_bytes);
}

// Readers of whom each begins before the last has ended: raw pages go all the same, and none that
// one of them may read.
KIT_TEST(test_unbroken_readers)
{
    uint64_t handle = fed(256, 256, 0);
    struct kvq__session *s = kit_of(&m, handle);
    const struct kvq__layer *l = &s->layers[0];
    uint8_t last = 0;
    for (uint32_t i = 0; i < 6; i++) {
        const uint64_t floor = s->floor;
        kvq__session_ref(s);
        const uint8_t reading = kvq__reading_begin(s);
        assert_int_equal(kit_step(&m, handle, KVQ_BLOCK_TOKENS, HEADS, DIM), 0);
        kit_pack(&kit);
        if (last)
            kvq__hold_end(s, last, false);
        last = reading;
        assert_true(kvq__release_floor(s) <= floor);
        for (uint32_t page = l->raw_page; page < s->n_pages; page++)
            assert_non_null(kvq__page(l, page)->raw.data);
        assert_true((uint64_t)l->raw_page * KVQ_BLOCK_TOKENS <= kvq__packed_at(s, l, floor));
        assert_true(l->raw_page + 1 >= i);
    }
    kvq__hold_end(s, last, false);
    assert_int_equal(kvq__release_floor(s), s->floor);
    assert_int_equal(l->raw_page, l->packed / KVQ_BLOCK_TOKENS);
}

KIT_TEST(test_pieces)
{
    static const uint32_t pieces[] = {1, 17, 128, 512};
    uint64_t whole = fed(TOKENS, TOKENS, 0);
    kit_pack(&kit);
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t other = fed(pieces[i], TOKENS, 0);
        kit_pack(&kit);
        assert_same_bytes(whole, other);
        assert_same_attention(whole, other);
    }
}

// The same bits alone, in a batch of 64, and however finely the work is cut.
KIT_TEST(test_batch)
{
    static uint8_t alone[64 * 1024];
    struct kvq_entry_wire entries[64];
    uint64_t first = fed(300, 1000, 0);
    copy_out(first, 0, alone);
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, 64);
    put_views(&r);
    for (uint32_t i = 0; i < 64; i++) {
        uint64_t handle = i == 40 ? first : fed(200, 30 + i, 0);
        entries[i] = (struct kvq_entry_wire){.handle = handle,
                                             .position = kit_of(&m, handle)->tokens,
                                             .queries = QUERIES,
                                             .q_row = i == 40 ? 0 : 8};
    }
    for (uint32_t workers = 1; workers <= 16; workers += 5) {
        kit.core->config.workers = workers; // 1 cuts nothing, 16 all
        r.count = workers == 16 ? 1 : 64;
        r.slots = (uint16_t)kvq_request_slots(r.count, 0);
        memset(m.memory + OUT_AT, 0, 64 * 1024);
        assert_int_equal(kit_request(&m, &r, workers == 16 ? &entries[40] : entries), 0);
        size_t bytes = QUERIES * 4 * DIM * sizeof(float);
        assert_memory_equal(m.memory + OUT_AT, alone, bytes);
    }
}

// A long session among short ones has most of the items, for no worker to be left with all of it.
KIT_TEST(test_items_by_work)
{
    struct kvq_entry_wire entries[16];
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, 16);
    r.q = kit_view(&m, Q_AT, 4, DIM, KVQ_F32);
    r.out = kit_view(&m, OUT_AT, 4, DIM, KVQ_F32);
    for (uint32_t i = 0; i < 16; i++) {
        uint64_t handle = i == 15 ? fed(512, TOKENS, 0) : fed(30, 30, 0);
        entries[i] = (struct kvq_entry_wire){
            .handle = handle, .position = kit_of(&m, handle)->tokens, .queries = 4, .q_row = 4 * i};
    }
    kit.core->config.workers = 4;
    assert_int_equal(kit_request(&m, &r, entries), 0);
    assert_true(m.queue->work[15].attend.plan.items >= 3);
    for (uint32_t i = 0; i < 15; i++)
        assert_int_equal(m.queue->work[i].attend.plan.items, 1);
}

// Attention is brief for few tokens and few queries, and then in one piece.
KIT_TEST(test_brief)
{
    kit.core->config.workers = 2;
    for (uint32_t tokens = 1024; tokens <= 1025; tokens++)
        for (uint16_t queries = 1; queries <= 13; queries += 6) {
            uint64_t handle = fed(205, tokens, 0);
            struct kvq_entry_wire e = {.handle = handle, .position = tokens, .queries = queries};
            struct kvq_request r = kit_attend(&m, 0, Q_AT, OUT_AT, 4, DIM);
            assert_int_equal(kit_request(&m, &r, &e), 0);
            uint32_t work = tokens * HEADS * (1 + queries); // 7 queries of 1,024 tokens: 16,384
            assert_int_equal(m.queue->job.brief, work <= 16384);
            assert_int_equal(m.queue->work[0].attend.plan.parallel, work > 16384);
        }
}

KIT_TEST(test_truncate)
{
    uint64_t value;
    uint64_t plain = fed(90, 500, 40), drafted = fed(90, 500, 40);
    assert_int_equal(kit_step(&m, drafted, 40, HEADS, DIM), 0);
    kit_pack(&kit);
    struct kvq_entry_wire e = {.handle = drafted, .position = 540, .list_token = 41};
    assert_int_equal(kit_simple(&m, KVQ_OP_TRUNCATE, 0, e, &value), KVQ_E_ROLLBACK);
    assert_int_equal(value, 500);
    assert_int_equal(kit_of(&m, drafted)->tokens, 540);
    e.list_token = 40;
    assert_int_equal(kit_simple(&m, KVQ_OP_TRUNCATE, 0, e, &value), 0);
    assert_int_equal(value, 500);
    assert_same_attention(plain, drafted); // with as much packed as if it had never been
    // Going on, the tokens that were drafted do not matter, and what is packed is the same.
    assert_int_equal(kit_step(&m, plain, 300, HEADS, DIM), 0);
    assert_int_equal(kit_step(&m, drafted, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_same_bytes(plain, drafted);
    assert_same_attention(plain, drafted);
}

// Accepting tokens 0, 2, 5 of a draft is the same as appending just these.
KIT_TEST(test_accept)
{
    static const int32_t kept[] = {0, 2, 5};
    uint64_t drafted = fed(125, 125, 8);
    assert_int_equal(kit_step(&m, drafted, 8, HEADS, DIM), 0); // crosses a page
    memcpy(m.memory + Q_AT, kept, sizeof kept);
    struct kvq_request r = kit_header(KVQ_OP_ACCEPT, 1);
    r.list = (struct kvq_wire_view){.offset = Q_AT, .buffer = m.buffer};
    struct kvq_entry_wire e = {.handle = drafted, .position = 133, .append = 8, .list_token = 3};
    assert_int_equal(kit_ask(&m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].value, 128);
    float *k = (float *)(void *)m.memory, *v = (float *)(void *)(m.memory + BUFFER / 2);
    for (uint32_t j = 0; j < 3; j++) {
        size_t row = HEADS * DIM;
        memmove(k + (125 + j) * row, k + (125 + (uint32_t)kept[j]) * row, row * sizeof *k);
        memmove(v + (125 + j) * row, v + (125 + (uint32_t)kept[j]) * row, row * sizeof *v);
    }
    assert_same_attention(fed(128, 128, 8), drafted);
}

KIT_TEST(test_fork)
{
    uint64_t value;
    uint64_t source = fed(200, 600, 0), used = kit.core->pools[0].used_bytes;
    kit_pack(&kit);
    struct kvq_entry_wire e = {.handle = source, .position = 300};
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &value), KVQ_E_ROLLBACK);
    assert_int_equal(value, 256); // cuts into a packed unit
    e.position = 256;
    used = kit.core->pools[0].used_bytes;
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &value), 0);
    assert_int_equal(kit.core->pools[0].used_bytes, used); // all of it shared
    uint64_t fork = value, same = fed(256, 256, 0);
    assert_same_attention(fork, same);
    assert_int_equal(kit_step(&m, fork, 200, HEADS, DIM), 0);
    assert_int_equal(kit_step(&m, same, 200, HEADS, DIM), 0);
    assert_same_attention(fork, same);
    assert_same_attention(source, fed(600, 600, 0)); // which nobody touched
}

// A client that stops at layer l, in any of the ways there are, leaves the session at its last
// commit, with the memory it had.
KIT_TEST(test_stop_at_layer)
{
    static uint8_t before[64 * 1024], after[64 * 1024];
    uint64_t handle = fed(130, 130, 0);
    copy_out(handle, 0, before);
    uint64_t used = kit.core->pools[0].used_bytes;
    for (uint32_t layers = 0; layers < 2; layers++) {
        for (uint8_t op = KVQ_OP_STEP_END; op <= KVQ_OP_STEP_ABORT; op++) {
            struct kvq_entry_wire e = {
                .handle = handle, .position = 130, .row = 130, .append = 200};
            assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
            assert_true(kit.core->pools[0].used_bytes > used);
            struct kvq_request r = kit_append(&m, 5, 0, HEADS, DIM);
            if (layers)
                assert_int_equal(kit_request(&m, &r, &e), 0);
            int expect = op == KVQ_OP_STEP_END ? KVQ_E_INCOMPLETE : 0;
            assert_int_equal(kit_simple(&m, op, 5, e, NULL), expect);
            assert_int_equal(kit_of(&m, handle)->tokens, 130);
            assert_int_equal(kit.core->pools[0].used_bytes, used);
            copy_out(handle, 0, after);
            assert_memory_equal(before, after, sizeof before);
        }
    }
}

KIT_TEST(test_nonfinite)
{
    uint64_t handle = fed(50, 50, 0);
    float *k = (float *)(void *)m.memory;
    for (uint32_t row = 50; row < 60; row += 9) {
        float *at = &k[(row * HEADS + 1) * DIM + 63], good = *at;
        *at = row == 50 ? NAN : INFINITY;
        assert_int_equal(kit_step(&m, handle, 10, HEADS, DIM), KVQ_E_NONFINITE);
        assert_int_equal(kit_of(&m, handle)->tokens, 50);
        assert_null(kit_of(&m, handle)->step);
        *at = good;
    }
    assert_int_equal(kit_step(&m, handle, 10, HEADS, DIM), 0);
    assert_same_attention(handle, fed(60, 60, 0));
}

// The step that does not fit fails at its beginning, and nothing else changes.
KIT_TEST(test_memory_full)
{
    uint64_t handle = kit_session(&m, two_layers, 2, 0);
    kit.core->pools[0].budget = 6 * MIB; // three extents: one for each size of block
    struct kvq_entry_wire e = {.handle = handle, .append = 60000};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), KVQ_E_NO_MEMORY);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    assert_int_equal(kit.events[KVQ__EVENT_MEMORY_FULL], 1);
    assert_int_equal(kit_step(&m, handle, 100, HEADS, DIM), 0);
    uint64_t used = kit.core->pools[0].used_bytes;
    e.position = 100;
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), KVQ_E_NO_MEMORY);
    assert_int_equal(kit.core->pools[0].used_bytes, used);
    kit.core->pools[0].budget = 128 * MIB;
}

// A reader stands at the committed count while a step is open, and packs what it needs itself.
KIT_TEST(test_readers)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {.name = "shared", .layers = two_layers, .n_layers = 2};
    char text[KVQ_TEXT_BYTES];
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    uint64_t writer = info.handle, same = fed(300, 300, 0);
    assert_int_equal(kit_step(&m, writer, 300, HEADS, DIM), 0);
    spec.flags = KVQ__OPEN_READ_ONLY;
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    struct kvq_entry_wire e = {.handle = writer, .position = 300, .append = 50};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    assert_same_attention(info.handle, same);
    assert_int_equal(kit_of(&m, writer)->layers[0].packed, 256);
    e.handle = info.handle;
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 2, e, NULL), KVQ_E_READ_ONLY);
    e.handle = writer;
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 1, e, NULL), 0);
}

// Blocks wholly behind a layer's window are freed, and what is left attends as before.
KIT_TEST(test_window)
{
    static const struct kvq__layer_row rows[] = {
        {4, HEADS, DIM, DIM, .window = 100, .format = "oscar4", .kv_from = -1}};
    uint64_t handle = kit_session(&m, rows, 1, 0), most = 0;
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(kit_step(&m, handle, 50, HEADS, DIM), 0);
        kit_pack(&kit);
        most = kit.core->pools[0].used_bytes > most ? kit.core->pools[0].used_bytes : most;
    }
    const struct kvq__layer *l = &kit_of(&m, handle)->layers[0];
    assert_int_equal(l->first_page, (1000 + 1 - 100) / 128);
    assert_true(most <= 3 * (l->raw_bytes + l->packed_bytes));
    attend(handle, 0, 1, 0);
}

// A session that stands in two entries: one of them is refused, whichever appends.
KIT_TEST(test_begin_twice)
{
    for (uint32_t tokens = 0; tokens <= 128; tokens += 64)
        for (uint32_t which = 0; which < 4; which++) {
            uint64_t handle = tokens ? fed(tokens, tokens, 0) : kit_session(&m, two_layers, 2, 0);
            uint64_t used = kit.core->pools[0].used_bytes;
            struct kvq_entry_wire e[2] = {{.handle = handle, .position = tokens},
                                          {.handle = handle, .position = tokens}};
            struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 2);
            e[0].append = which & 1 ? 300 : 0;
            e[1].append = which & 2 ? 1 : 0;
            r.step = 5;
            assert_int_equal(kit_ask(&m, &r, e), 0);
            assert_int_equal(kvq__queue_results(m.queue)[1].status, KVQ_E_BUSY);
            core_check(kit.core);
            assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e[0], NULL), 0);
            assert_int_equal(kit.core->pools[0].used_bytes, used);
        }
}

// The entry that was to pack what is due fails: the other one of the session packs it, and reads
// what was written there.
KIT_TEST(test_packer_fails)
{
    static uint8_t before[64 * 1024], after[64 * 1024];
    uint64_t handle = fed(300, 300, 0), twin = fed(300, 300, 0);
    float *bad = (float *)(void *)m.memory + (size_t)300 * HEADS * DIM, value = *bad;
    copy_out(twin, 0, before); // which packs
    struct kvq_entry_wire e[2] = {{.handle = handle,
                                   .position = 300,
                                   .row = 300,
                                   .append = 1,
                                   .queries = 1,
                                   .q_row = QUERIES},
                                  {.handle = handle, .position = 300, .queries = QUERIES}};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e[0], NULL), 0);
    struct kvq_request r = kit_of_step(KVQ_OP_APPEND_ATTEND, 2, 5);
    r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, BUFFER / 2, HEADS, DIM, KVQ_F32);
    put_views(&r);
    *bad = (float)NAN;
    memset(m.memory + OUT_AT, 0, 64 * 1024);
    assert_int_equal(kit_request(&m, &r, e), 0);
    *bad = value;
    assert_int_equal(kvq__queue_results(m.queue)[0].status, KVQ_E_NONFINITE);
    assert_int_equal(kvq__queue_results(m.queue)[1].status, 0);
    memcpy(after, m.memory + OUT_AT, sizeof after);
    assert_memory_equal(before, after, sizeof before);
    assert_true(kit_of(&m, handle)->layers[0].packed > 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
