// SPDX-License-Identifier: Apache-2.0
//
// Moves of sessions between the host and two GPUs of the software driver: the same bytes at the
// other place, the same bits when back, memory accounted for to the byte, and nothing changed when
// something fails, whenever that is.
#include <dlfcn.h>
#include <math.h>
#include <sched.h>

#include "daemon/core/residency/evict.h"
#include "daemon/core/residency/move.h"
#include "daemon/core/residency/park.h"
#include "daemon/core/session/work_stream.h"
#include "tests/core/sim.h"
#include "tests/kits/unit.h"

enum {
    HEADS = 2,
    DIM = 64,
    TOKENS = 740, // with which the host's newest raw blocks are whole ones, as a GPU's are
    LAYERS = 4,
    QUERIES = 4,
    MIB = 1 << 20,
    BUFFER = 4 * MIB,
    Q_AT = BUFFER / 4,
    OUT_AT = Q_AT + 64 * 1024,
    OUT_BYTES = QUERIES * 2 * HEADS * DIM * 4,
};

// Units, windows, extras and outliers of several kinds.
static const struct kvq__layer_row rows[LAYERS] = {
    {4, HEADS, DIM, DIM, .format = "oscar2", .kv_from = -1},
    {4, HEADS, DIM, DIM, .format = "innerq-hybrid", .kv_from = -1},
    {4, HEADS, DIM, DIM, .format = "f16", .window = 200, .kv_from = -1},
    {4, HEADS, DIM, DIM, .format = "ott2", .kv_from = -1}, // which has outliers from some layer on
};

static struct kit kit;
static struct member m, other;
static uint64_t session;
static char text[KVQ_TEXT_BYTES];
static struct kvq__move_info info; // of the last move
static const struct kvq__peer admin = {.admin = true};

static uint64_t fed(const char *name, uint32_t tokens)
{
    struct kvq__session_spec spec = {
        .name = name, .place = "host", .layers = rows, .n_layers = LAYERS, .max_rollback = 10};
    uint64_t handle = kit_opened(&m, &spec);
    for (uint32_t at = 0; at < tokens; at += 200)
        assert_int_equal(kit_step(&m, handle, tokens - at < 200 ? tokens - at : 200, HEADS, DIM),
                         0);
    return handle;
}

static void attach(struct member *member)
{
    assert_int_equal(member_open(&kit, member, 1000, BUFFER), 0);
    member_fill(member);
}

static int setup(void **state)
{
    sim_begin(3);
    kit_open(&kit, 7, 64 * MIB, 0);
    attach(&m);
    attach(&other);
    session = fed("chat", TOKENS);
    kit_pack(&kit);
    return 0;
}

static void poll(void)
{
    if (kvq__core_poll(kit.core))
        core_check(kit.core);
    else
        sched_yield(); // to the driver's threads
}

static void polls(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        poll();
}

static void end_moves(void)
{
    while (kvq__core_moves(kit.core))
        poll();
}

// All that GPUs and moves do has ended.
static void rest(void)
{
    while (kvq__core_moves(kit.core) || !kvq__core_idle(kit.core))
        poll();
}

static int teardown(void **state)
{
    member_close(&m);
    member_close(&other);
    rest();
    kit_close(&kit);
    return 0;
}

static struct kvq__session *it(void)
{
    return kit_of(&m, session);
}

static const char *place(uint32_t pool)
{
    return kvq__pool_name(&kit.core->pools[pool]);
}

static uint64_t used(uint32_t pool)
{
    return kit.core->pools[pool].used_bytes;
}

static void limit(enum kvq__limit which, uint64_t to)
{
    core_check(kit.core);
    it()->ns->quota.limit[which] = to;
}

static int start(uint32_t pool, struct kvq__move_info *info)
{
    struct kvq__move_spec spec = {.place = place(pool)};
    text[0] = 0;
    int rc = kvq__session_move_named(kit.core, &admin, "uid-1000", "chat", &spec, info, text);
    assert_true(rc == 0 || text[0]);
    return rc;
}

static struct kvq__move_info info_of(const struct kvq__move_info *move)
{
    assert_int_equal(kvq__move_info(kit.core, &admin, move->id, &info, text), 0);
    return info;
}

// Moves it all the way; what became of it.
static struct kvq__move_info move_to(uint32_t pool)
{
    assert_int_equal(start(pool, &info), 0);
    end_moves();
    return info_of(&info);
}

// ---- What is compared ----

static void take(const struct kvq__session *s, const struct kvq__ref *ref, uint64_t bytes,
                 uint8_t **to)
{
    if (!ref->data)
        return;
    if (s->pool->gpu)
        assert_int_equal(kvq__gpu_take(s->pool->gpu, *to, (uintptr_t)ref->data, bytes), 0);
    else
        memcpy(*to, ref->data, bytes);
    *to += bytes;
}

enum { IMAGE = 8 * MIB };

// All blocks, as they are; the number of bytes.
static size_t image_of(const struct kvq__session *s, uint8_t *image)
{
    uint8_t *to = image;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        const struct kvq__layer *l = &s->layers[i];
        for (uint32_t p = 0; p < s->n_pages; p++) {
            take(s, &kvq__page(l, p)->raw, l->raw_bytes, &to);
            take(s, &kvq__page(l, p)->packed, kvq__packed_block_bytes(l, p), &to);
        }
        take(s, &l->extras, l->extras_bytes, &to);
        assert_true(to - image < IMAGE);
    }
    return (size_t)(to - image);
}

static struct kvq_request attend_of(struct member *who, uint32_t layer)
{
    struct kvq_request r = kit_attend(who, layer, Q_AT, OUT_AT, 2 * HEADS, DIM);
    return r;
}

static struct kvq_entry_wire entry_of(uint64_t handle)
{
    return (struct kvq_entry_wire){
        .handle = handle, .position = kit_of(&m, handle)->tokens, .queries = QUERIES};
}

static void attend(uint64_t handle, uint8_t out[LAYERS][OUT_BYTES])
{
    struct kvq_entry_wire e = entry_of(handle);
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct kvq_request r = attend_of(&m, i);
        assert_int_equal(kit_ask(&m, &r, &e), 0);
        memcpy(out[i], m.memory + OUT_AT, OUT_BYTES);
    }
}

static uint8_t before[IMAGE], after[IMAGE];
static uint8_t bits[LAYERS][OUT_BYTES], again[LAYERS][OUT_BYTES];

static void same_bits(uint64_t handle)
{
    attend(handle, again);
    assert_memory_equal(bits, again, sizeof bits);
}

// ---- Round trips ----

TEST(test_round_trip)
{
    static const uint32_t ways[] = {1, 2, 1, 0};
    attend(session, bits);
    uint64_t bytes = used(0);
    for (uint32_t i = 0; i < 4; i++) {
        size_t n = image_of(it(), before);
        struct kvq__move_info info = move_to(ways[i]);
        assert_int_equal(info.status, 0);
        assert_string_equal(info.phase, "done");
        assert_string_equal(info.place, place(ways[i]));
        assert_int_equal(info.bytes, n);
        assert_int_equal(info.moved_bytes, n);
        assert_int_equal(info.shared_bytes, 0);
        assert_ptr_equal(it()->pool, &kit.core->pools[ways[i]]);
        for (uint32_t pool = 0; pool < 3; pool++)
            assert_int_equal(used(pool), pool == ways[i] ? bytes : 0);
        assert_int_equal(image_of(it(), after), n);
        assert_memory_equal(before, after, n);
        attend(session, again);
        if (ways[i] == 0)
            assert_memory_equal(bits, again, sizeof bits);
    }
    assert_int_equal(kit.events[KVQ__EVENT_SESSION_MOVED], 4);
    struct kvq__move_info info = move_to(0); // where it is: nothing to do
    assert_true(info.finished && info.bytes == 0 && info.status == 0);
    // It goes on at either place as if it had never moved.
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(move_to(1 - i).status, 0);
        assert_int_equal(kit_step(&m, session, 150, HEADS, DIM), 0);
        rest();
        assert_int_equal(move_to(0).status, 0);
        attend(session, bits); // what a GPU has packed, before the host packs anything
        uint64_t same = fed("same", TOKENS + (i + 1) * 150);
        same_bits(same);
        kit_drop(&m, same);
    }
}

static void find_call(const char *name, void *call)
{
    void *symbol = dlsym(kvq__gpu_driver(kit.core->pools[1].gpu)->library, name);
    assert_non_null(symbol);
    memcpy(call, &symbol, sizeof symbol);
}

// Holds a stream on the first GPU back, or lets it go on.
static void stall_stream(struct kvq_gpu_stream *stream, bool held)
{
    void (*call)(struct kvq_gpu_stream *, bool);
    find_call("kvq_soft_stall", &call);
    call(stream, held);
}

static void stall(struct member *member, bool held)
{
    stall_stream(member->client->streams[0]->gpu_stream, held);
}

// Makes the driver refuse the n-th call of that name for want of memory.
static void refuse(const char *name, uint64_t n)
{
    int (*call)(const char *, uint64_t, bool, int);
    find_call("kvq_soft_fail", &call);
    assert_int_equal(call(name, n, false, KVQ_GPU_OUT_OF_MEMORY), 0);
}

// What a GPU packs before anybody asks is waited for, too.
TEST(test_packing)
{
    struct kvq_request r = kit_header(KVQ_OP_APPEND, 1);
    struct kvq_entry_wire e = {.handle = session, .position = TOKENS, .row = TOKENS, .append = 300};
    assert_int_equal(move_to(1).status, 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    r.step = 5;
    r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, BUFFER / 2, HEADS, DIM, KVQ_F32);
    for (r.layer = 0; r.layer < LAYERS; r.layer++)
        assert_int_equal(kit_request(&m, &r, &e), 0);
    stall(&m, true);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, 5, e, NULL), 0);
    assert_true(it()->layers[0].packed > TOKENS); // or is about to be
    assert_int_equal(start(0, &info), 0);
    polls(50);
    assert_string_equal(info_of(&info).phase, "waiting");
    stall(&m, false);
    rest();
    assert_int_equal(info_of(&info).status, 0);
    attend(session, bits);
    same_bits(fed("same", TOKENS + 300));
}

static void open_with_codebook(void)
{
    static const struct kvq__layer_row row = {
        4, HEADS, DIM, DIM, .format = "vecinfer-2@a", .kv_from = -1, .repeat = LAYERS};
    struct kvq__session_spec spec = {
        .name = "chat", .place = "host", .layers = &row, .n_layers = 1};
    kit_codebooks(&kit);
    kit_drop(&m, session);
    session = kit_opened(&m, &spec);
}

// Codebooks go along: the GPU computes with its own copy, and the host with its own again.
TEST(test_codebooks)
{
    open_with_codebook();
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kit_step(&m, session, 200, HEADS, DIM), 0);
    attend(session, bits);
    const struct kvq__layer *l = &it()->layers[0];
    assert_true(l->packed > 0);
    for (uint32_t to = 2; to > 0; to--) {
        assert_int_equal(move_to(to).status, 0);
        assert_true(l->gpu_book.k && l->gpu_book.k != l->book.k);
        attend(session, again);
        const float *host = (const float *)(const void *)bits;
        const float *gpu = (const float *)(const void *)again;
        for (uint32_t i = 0; i < sizeof bits / sizeof *host; i++)
            assert_true(fabsf(host[i] - gpu[i]) < 0.02f);
    }
    assert_int_equal(move_to(0).status, 0);
    assert_null(l->gpu_book.k);
    same_bits(session);
    kit_drop(&m, session);
    assert_int_equal(kit.holds, 0);
}

// What a fork shares is copied, and stays where it is as well.
TEST(test_shared)
{
    uint64_t fork, bytes = used(0);
    struct kvq_entry_wire e = {.handle = session, .position = TOKENS};
    attend(session, bits);
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), 0);
    uint64_t both = used(0);
    assert_true(both < 2 * bytes);
    struct kvq__move_info info = move_to(1);
    assert_int_equal(info.status, 0);
    assert_int_equal(info.bytes, bytes);
    assert_int_equal(info.shared_bytes, 2 * bytes - both);
    assert_int_equal(used(1), bytes);
    assert_int_equal(used(0), both - bytes + info.shared_bytes);
    same_bits(fork);
    // The limit counts a block that only changes its place once, and one that is doubled twice.
    limit(KVQ__DEVICE_BYTES, bytes);
    assert_int_equal(move_to(2).status, 0);
    assert_int_equal(used(2), bytes);
    limit(KVQ__DEVICE_BYTES, 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), 0);
    limit(KVQ__DEVICE_BYTES, used(2));
    info = move_to(1);
    assert_int_equal(info.status, KVQ_E_QUOTA);
    assert_says(info.text, "forks");
    assert_int_equal(used(1), 0);
    assert_int_equal(it()->ns->exempt[KVQ__DEVICE_BYTES], 0);
}

// Each tier has a limit of its own, and a move to another one is held to the limit there.
TEST(test_tiers)
{
    const uint64_t bytes = used(0);
    limit(KVQ__DEVICE_BYTES, bytes - 1);
    assert_int_equal(start(1, &info), KVQ_E_QUOTA); // it could never fit: said at once
    assert_says(text, "bytes in the memory of GPUs; it has 0, and");
    assert_says(text, "--device-bytes");
    limit(KVQ__DEVICE_BYTES, bytes);
    attend(session, bits);
    assert_int_equal(move_to(1).status, 0);
    assert_int_equal(used(0), 0);
    attend(session, again);
    assert_int_equal(it()->ns->used[KVQ__DEVICE_BYTES], bytes);
    // Lowered below what is there: between GPUs nothing grows, and so it may.
    limit(KVQ__DEVICE_BYTES, bytes / 2);
    assert_int_equal(move_to(2).status, 0);
    assert_int_equal(used(1), 0);
    limit(KVQ__HOST_BYTES, bytes - 1);
    assert_int_equal(start(0, &info), KVQ_E_QUOTA);
    assert_says(text, "--host-bytes");
    assert_int_equal(used(2), bytes);
    // Others have taken of the limit meanwhile: it is seen when blocks are reserved.
    fed("neighbour", 200);
    limit(KVQ__HOST_BYTES, bytes + 1);
    uint64_t host = used(0);
    assert_true(host > 1);
    info = move_to(0);
    assert_int_equal(info.status, KVQ_E_QUOTA);
    assert_says(info.text, "in the host's memory");
    assert_int_equal(used(0), host); // all given back
    assert_int_equal(used(2), bytes);
    assert_int_equal(it()->ns->exempt[KVQ__HOST_BYTES] + it()->ns->exempt[KVQ__DEVICE_BYTES], 0);
    limit(KVQ__HOST_BYTES, bytes + host);
    assert_int_equal(move_to(0).status, 0);
    limit(KVQ__DEVICE_BYTES, 0);
    same_bits(session);
}

// ---- Waiting ----

TEST(test_waits)
{
    struct kvq__move_info info, second;
    struct kvq_entry_wire e = {.handle = session, .position = TOKENS, .row = TOKENS, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    assert_int_equal(start(1, &info), 0);
    assert_int_equal(start(2, &second), KVQ_E_BUSY);
    polls(10);
    assert_string_equal(info_of(&info).phase, "waiting");
    attend(session, bits); // the step goes on meanwhile
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 6, e, NULL), 1); // now it is waited for
    while (kvq__core_moves(kit.core)) {
        poll();
        if (it()->move)
            assert_int_equal(kvq__request_continue(m.queue), KVQ__WAIT);
    }
    assert_int_equal(kvq__request_continue(m.queue), KVQ__DONE); // at the other place
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
    assert_ptr_equal(it()->pool, &kit.core->pools[1]);
    // A step that does not end.
    assert_int_equal(start(0, &info), 0);
    poll();
    kit_pass(&kit, 11000000000u);
    poll();
    assert_int_equal(info_of(&info).status, KVQ_E_BUSY);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 6, e, NULL), 0);
    assert_int_equal(move_to(0).status, 0);
}

// A move whose session is not idle for as long as its client likes keeps no other one waiting, and
// one that others wait for comes first.
TEST(test_side_by_side)
{
    struct kvq__move_info waits, first, second;
    struct kvq__move_spec to = {.place = place(1), .wait_ms = UINT64_MAX}, back = {.place = "host"};
    struct kvq_entry_wire e = {.handle = session, .position = TOKENS, .row = TOKENS, .append = 1};
    uint64_t a = fed("a", 200), b = fed("b", 200);
    assert_int_equal(kvq__session_move(m.client, b, &to, &second, text), 0);
    rest();
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    assert_int_equal(kvq__session_move(m.client, session, &to, &waits, text), 0);
    polls(10);
    assert_string_equal(info_of(&waits).phase, "waiting");
    to.wait_ms = 1000;
    back.demotes = true;
    assert_int_equal(kvq__session_move(m.client, a, &to, &first, text), 0);
    assert_int_equal(kvq__session_move(m.client, b, &back, &second, text), 0);
    poll();
    assert_string_not_equal(info_of(&second).phase, "waiting");
    assert_string_equal(info_of(&first).phase, "waiting");
    struct kvq_entry_wire of_a = {.handle = a, .position = 200, .row = 200, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 6, of_a, NULL), 0); // it is used meanwhile
    kit_pass(&kit, 10 * 1000000000ull);
    while (!info_of(&second).finished)
        poll();
    polls(10);
    assert_string_equal(info_of(&first).phase, "waiting"); // that time does not count
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 6, of_a, NULL), 0);
    while (!info_of(&first).finished)
        poll();
    assert_int_equal(info_of(&first).status, 0);
    assert_int_equal(info_of(&second).status, 0);
    assert_string_equal(info_of(&waits).phase, "waiting");
    polls(10);
    kit_pass(&kit, KVQ_MAX_MOVE_WAIT_MS * 1000000);
    poll();
    assert_int_equal(info_of(&waits).status, KVQ_E_BUSY);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 0);
}

// Copies whose end no event can tell are waited for like others: what they write to is not used
// again before.
TEST(test_copies_without_events)
{
    struct kvq_gpu_stream *copies = kvq__gpu_stream(kit.core->pools[1].gpu, KVQ__GPU_STREAM_COPIES);
    for (uint32_t i = 0; i < 4; i++) {
        size_t n = image_of(it(), before);
        stall_stream(copies, true);
        refuse("event_record", 1 + i / 2);
        assert_int_equal(start((i + 1) % 2, &info), 0);
        polls(200);
        bool finished = info_of(&info).finished;
        stall_stream(copies, false);
        assert_false(finished);
        end_moves();
        assert_int_equal(info_of(&info).status, 0);
        assert_int_equal(image_of(it(), after), n);
        assert_memory_equal(before, after, n);
    }
}

// ---- Failures, after which nothing has changed ----

static void assert_unchanged(size_t n, uint64_t bytes)
{
    end_moves();
    assert_ptr_equal(it()->pool, &kit.core->pools[0]);
    assert_null(it()->move);
    assert_int_equal(kit.core->moving.n, 0);
    assert_int_equal(used(0), bytes);
    assert_int_equal(used(1), 0);
    assert_int_equal(image_of(it(), after), n);
    assert_memory_equal(before, after, n);
    same_bits(session);
}

TEST(test_no_room)
{
    uint64_t bytes = used(0), budget = kit.core->pools[1].budget;
    attend(session, bits);
    size_t n = image_of(it(), before);
    kit.core->pools[1].budget = bytes - 1;
    assert_int_equal(start(1, &info), KVQ_E_NO_MEMORY);
    char said[64];
    snprintf(said, sizeof said, "takes %llu bytes", (unsigned long long)bytes);
    assert_says(text, said);
    assert_says(text, place(1));
    assert_unchanged(n, bytes);
    assert_true(bytes % (2 * MIB) > 0);
    kit.core->pools[1].budget = bytes; // enough, were it not for whole extents
    info = move_to(1);
    assert_int_equal(info.status, KVQ_E_NO_MEMORY);
    assert_says(info.text, "are free");
    assert_unchanged(n, bytes);
    kit.core->pools[1].budget = budget;
    for (uint32_t i = 1; i < 30; i += 3) { // of bookkeeping memory
        kit.fail_one_in = i;
        int rc = start(1, &info);
        while (rc == 0 && kvq__core_moves(kit.core))
            poll();
        kit.fail_one_in = 0;
        if (rc == 0 && info_of(&info).status == 0)
            assert_int_equal(move_to(0).status, 0);
        assert_unchanged(n, bytes);
    }
    struct kvq__move_spec spec = {.place = "GPU-none"};
    assert_int_equal(
        kvq__session_move_named(kit.core, &admin, "uid-1000", "chat", &spec, &info, text),
        KVQ_E_INVALID);
}

// The session goes at every point of its move, each time with the last of its handles or dropped.
TEST(test_dropped)
{
    for (uint32_t turns = 0, over = 0; over == 0 && turns < 200; turns += turns < 4 ? 1 : 11) {
        for (uint32_t to = 0; to < 2; to++) {
            struct kvq__move_info info;
            if (to == 0)
                assert_int_equal(move_to(1).status, 0);
            assert_int_equal(start(to, &info), 0);
            polls(turns);
            over = info_of(&info).finished;
            kit_drop(&m, session);
            assert_int_equal(info_of(&info).status, over ? 0 : KVQ_E_CANCELLED);
            rest();
            assert_int_equal(used(0), 0);
            assert_int_equal(used(1), 0);
            session = fed("chat", 200);
        }
    }
}

// The core closes in the midst of it.
TEST_BETWEEN(test_close, setup, NULL)
{
    assert_int_equal(start(2, &info), 0);
    polls(5);
    assert_string_equal(info_of(&info).phase, "copying");
    kvq__client_detach(m.client);
    kvq__client_detach(other.client);
    kvq__queue_close(&m.queue);
    kvq__queue_close(&other.queue);
    member_free(&m);
    member_free(&other);
    kit_close(&kit);
}

// ---- Groups and handles ----

TEST(test_shards)
{
    struct kvq__session_spec spec = {
        .name = "group", .shards = 2, .place = "host", .layers = rows, .n_layers = LAYERS};
    struct kvq__move_info move;
    struct kvq__move_spec where = {.place = place(1)};
    uint64_t handles[2];
    for (; spec.shard < 2; spec.shard++) {
        handles[spec.shard] = kit_opened(&m, &spec);
    }
    struct kvq_entry_wire e = {.handle = handles[0]};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, 5, e, NULL), 0);
    assert_int_equal(
        kvq__session_move_named(kit.core, &admin, "uid-1000", "group", &where, &move, text), 0);
    polls(5);
    assert_string_equal(info_of(&move).phase, "waiting"); // the step of all is not over
    e.handle = handles[1];
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 6, e, NULL), 0); // so it may go on
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, 6, e, NULL), 0);
    end_moves();
    assert_int_equal(info_of(&move).status, 0);
    for (uint32_t i = 0; i < 2; i++)
        assert_ptr_equal(kit_of(&m, handles[i])->pool, &kit.core->pools[1]);
    // One alone, through its handle.
    where.place = place(2);
    assert_int_equal(kvq__session_move(m.client, handles[1], &where, &move, text), 0);
    end_moves();
    assert_ptr_equal(kit_of(&m, handles[0])->pool, &kit.core->pools[1]);
    assert_ptr_equal(kit_of(&m, handles[1])->pool, &kit.core->pools[2]);
    where = (struct kvq__move_spec){.place = "host", .one_shard = true, .shard = 2};
    assert_int_equal(
        kvq__session_move_named(kit.core, &admin, "uid-1000", "group", &where, &move, text),
        KVQ_E_NO_SESSION);
}

// Whoever opens it while it moves, or has it open, can use it there.
TEST(test_others)
{
    struct kvq__session_spec spec = {.name = "chat", .flags = KVQ__OPEN_READ_ONLY};
    struct kvq__move_info move;
    struct kvq__move_spec where = {.place = place(1)};
    assert_int_equal(start(1, &move), 0);
    polls(4);
    uint64_t handle = kit_opened(&other, &spec);
    assert_int_equal(kvq__session_move(other.client, handle, &where, &move, text), KVQ_E_READ_ONLY);
    end_moves();
    struct kvq_entry_wire e = entry_of(session);
    e.handle = handle;
    struct kvq_request r = attend_of(&other, 0);
    assert_int_equal(kit_ask(&other, &r, &e), 0);
    const struct kvq__peer stranger = {.uid = 2000};
    assert_int_equal(kvq__move_info(kit.core, &stranger, move.id, &move, text), KVQ_E_NO_SESSION);
    kit_tick(&kit, 61000000000u);
    assert_int_equal(kit.core->tickets.n[KVQ__TICKET_MOVE], 0); // it has been told for long enough
}

// ---- Parked sessions ----

static struct vault vault;

static void park(void)
{
    assert_int_equal(kvq__session_park(m.client, session, &info, text), 0);
    vault_serve(&vault, kit.core);
    rest();
    assert_int_equal(info_of(&info).status, 0);
    assert_true(kvq__is_offloaded(it()));
}

// To disk from wherever it is, moved meanwhile, and back on the other place: the same bytes.
TEST(test_parked)
{
    static const uint32_t ways[] = {0, 1, 1, 2, 2, 0};
    kit.core->config.saves = true;
    attend(session, bits);
    for (uint32_t i = 0; i < 6; i++) {
        rest();
        uint64_t bytes = used(0) + used(1) + used(2);
        park();
        assert_int_equal(used(0) + used(1) + used(2), 0);
        assert_int_equal(move_to(ways[i]).status, 0);
        assert_int_equal(used(0) + used(1) + used(2), 0); // it comes back there
        assert_ptr_equal(it()->pool, &kit.core->pools[ways[i]]);
        assert_int_equal(kvq__session_prefetch(m.client, session, &info, text), 0);
        assert_string_equal(info.place, place(ways[i]));
        assert_int_equal(start(1 + ways[i] % 2, &info), KVQ_E_BUSY); // on its way
        vault_serve(&vault, kit.core);
        assert_int_equal(used(ways[i]), bytes);
        attend(session, again);
        if (i % 2 == 0) // where it was
            assert_memory_equal(bits, again, sizeof bits);
        memcpy(bits, again, sizeof bits);
    }
    assert_true(start(1, &info) == 0); // one that is about to move
    struct kvq__move_info parked;
    assert_int_equal(kvq__session_park(m.client, session, &parked, text), KVQ_E_BUSY);
    assert_says(text, "moved");
    rest();
    vault_close(&vault);
}

// While it comes back it begins no move, whoever opens it: neither one that somebody asks for, nor
// its way home.
TEST(test_coming_back)
{
    struct kvq__session_spec spec = {.name = "chat", .flags = KVQ__OPEN_READ_ONLY};
    struct kvq__move_spec demotes = {.place = "host", .demotes = true};
    struct kvq__restore *r;
    struct kvq__store_job job;
    kit.core->config.saves = true;
    for (uint32_t i = 0; i < 2; i++) {
        attend(session, bits);
        if (i == 1) {
            assert_int_equal(move_to(1).status, 0);
            assert_int_equal(kvq__session_move(m.client, session, &demotes, &info, text), 0);
            end_moves();
            assert_ptr_equal(it()->demoted.home, &kit.core->pools[1]);
        }
        park();
        kvq__fetch_ask(it());
        assert_true(kvq__park_next(kit.core, &job));
        assert_int_equal(vault_fetch(&vault, kit.core, &job, &r), 0);
        if (i == 0)
            assert_int_equal(start(1, &info), KVQ_E_BUSY);
        else
            kit_opened(&other, &spec);
        assert_null(it()->move);
        assert_int_equal(kvq__session_prefetch(m.client, session, &info, text), 0);
        assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, "chat", 0)), 0);
        core_check(kit.core);
        assert_int_equal(info_of(&info).status, 0);
        kvq__demoted_ask(it());
        rest();
        assert_ptr_equal(it()->pool, &kit.core->pools[i]);
        attend(session, again);
        if (i == 0) // where it was
            assert_memory_equal(bits, again, sizeof bits);
    }
    vault_close(&vault);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
