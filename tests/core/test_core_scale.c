// SPDX-License-Identifier: Apache-2.0
//
// Many sessions, and long ones: what each of them takes and how many of them are looked at, counted
// and not timed.
#include "daemon/core/residency/saved.h"
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, DIM = 64, HEADS = 1, TOKENS = 8000, BUFFER = 8 * MIB };

static struct kit kit;
static struct member m;
static char text[KVQ_TEXT_BYTES];
static struct kvq__session_info info; // of the session that was asked for last

static const struct kvq__layer_row rows[] = {
    {1, HEADS, DIM, DIM, .format = "kivi2-g64", .kv_from = -1, .repeat = 2},
    {1, HEADS, DIM, DIM, .format = "f16", .kv_from = -1},
};

static int setup(void **state)
{
    kit_open(&kit, 5, 64 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    return 0;
}

// ---- Forks ----

// A session with ids for all of its tokens.
static uint64_t make(uint32_t tokens)
{
    uint64_t handle = kit_session(&m, rows, 2, 0);
    assert_true(handle != 0);
    m.ids_at = BUFFER / 2 - (uint64_t)TOKENS * sizeof(int32_t);
    for (int32_t i = 0; i < TOKENS; i++)
        ((int32_t *)(void *)(m.memory + m.ids_at))[i] = 3 * i;
    for (uint32_t at = 0; at < tokens; at += 400) {
        assert_int_equal(kit_step(&m, handle, tokens - at < 400 ? tokens - at : 400, HEADS, DIM),
                         0);
        kit_pack(&kit);
    }
    return handle;
}

// Bookkeeping bytes that a fork takes, which stays.
static uint64_t cost_of(uint64_t handle, uint64_t tokens)
{
    uint64_t before = kit.allocated_out;
    kit_fork(&m, handle, tokens);
    return kit.allocated_out - before;
}

// Of page tables and ids a fork has its own end, however long the beginning is.
KIT_TEST(test_forks_share)
{
    uint64_t a = make(TOKENS);
    kit_fork(&m, a, 2048); // whatever is made once
    uint64_t small = cost_of(a, 2048), large = cost_of(a, 7168);
    assert_in_range(large, small, small + 1024); // the ids alone are 20,480 bytes more
    assert_int_equal(kvq__session_info(m.client, a, &info, text), 0);
    assert_true(info.table_bytes < 8 * small); // and what is shared counts in part
}

static void same_view(uint64_t a, uint64_t b, uint64_t tokens)
{
    static struct kvq_page x[TOKENS / KVQ_BLOCK_TOKENS + 1], y[TOKENS / KVQ_BLOCK_TOKENS + 1];
    for (uint32_t layer = 0; layer < 3; layer++) {
        uint32_t n = kvq__pages_view(kit_of(&m, a), layer, tokens, tokens, x);
        assert_int_equal(kvq__pages_view(kit_of(&m, b), layer, tokens, tokens, y), n);
        for (uint32_t p = 0; p < n - 8; p++)
            assert_true(x[p].packed == y[p].packed && x[p].raw == y[p].raw);
    }
}

// Whoever ends first, and whatever is forked from what: the others have what they had.
KIT_TEST(test_forks_live_on)
{
    uint64_t a = make(4000), b = kit_fork(&m, a, 3968), c = kit_fork(&m, b, 3968),
             d = kit_fork(&m, a, 1024);
    uint64_t used = kit.core->pools[0].used_bytes;
    same_view(b, c, 3968);
    core_check(kit.core);
    kit_drop(&m, a);
    core_check(kit.core);
    assert_int_equal(*kvq__ids_at(&kit_of(&m, c)->ids, 3967), 3 * 3967);
    assert_int_equal(*kvq__ids_at(&kit_of(&m, c)->ids, 5), 3 * 5);
    for (int i = 0; i < 3; i++) // each goes on by itself
        assert_int_equal(kit_step(&m, i ? b : c, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    core_check(kit.core);
    same_view(b, c, 3968);
    kit_drop(&m, b);
    assert_int_equal(kit_truncate(&m, c, 0), 0);
    core_check(kit.core);
    kit_drop(&m, c);
    assert_true(kit.core->pools[0].used_bytes < used / 2); // what one alone had is free
    assert_int_equal(kit_of(&m, d)->tokens, 1024);
}

static struct kvq__namespace_info info_of(void)
{
    static const struct kvq__peer admin = {.admin = true};
    struct kvq__namespace_info info;
    assert_int_equal(kvq__core_namespace_info(kit.core, &admin, "uid-1000", &info, text), 0);
    return info;
}

// Many forks in one request are made in pieces, so that others have their turn; between two of them
// their session goes on, or ends, and so may the client.
enum { MANY = 256 };

static struct kvq_request load_many(uint64_t handle, uint64_t at, struct kvq_entry_wire *e)
{
    for (uint32_t i = 0; i < MANY; i++)
        e[i] = (struct kvq_entry_wire){.handle = handle, .position = at};
    return kit_header(KVQ_OP_FORK, MANY);
}

KIT_TEST(test_forks_in_pieces)
{
    static struct kvq_entry_wire e[MANY];
    uint64_t a = make(7000), tokens = 6912;
    const struct kvq__session *s = kit_of(&m, a);
    uint64_t work = s->n_sheets + tokens / KVQ__IDS_PART;
    struct kvq_request r = load_many(a, tokens, e);
    kit.core->config.fork_work = (uint32_t)(4 * work);
    kit.again = 0;
    assert_int_equal(kit_request(&m, &r, e), 0);
    assert_in_range(kit.again, MANY / 5, MANY);
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(kvq__queue_results(m.queue)[i].status, 0);
    assert_int_equal(kit.core->n_sessions, 1 + MANY);
    core_check(kit.core);
    for (uint32_t i = 0; i < MANY; i++)
        kit_drop(&m, kvq__queue_results(m.queue)[i].value);
}

// Of a prompt that is kept exact nothing is shared by the sheet: each page is visited, and is work.
KIT_TEST(test_forks_of_a_prompt)
{
    static struct kvq_entry_wire e[MANY];
    enum { PROMPT = 4096, AT = 3968, FEW = 16 };
    const struct kvq__session_spec spec = {.layers = rows, .n_layers = 2, .prompt_tokens = PROMPT};
    uint64_t a = kit_opened(&m, &spec);
    for (uint32_t at = 0; at < AT; at += 496)
        assert_int_equal(kit_step(&m, a, 496, HEADS, DIM), 0);
    const struct kvq__session *s = kit_of(&m, a);
    assert_true(s->prompt.exact >= AT);
    struct kvq_request r = load_many(a, AT, e);
    r = kit_header(KVQ_OP_FORK, FEW);
    kit.core->config.fork_work = s->n_owned * AT / KVQ_BLOCK_TOKENS; // one new session's pages
    kit.again = 0;
    assert_int_equal(kit_request(&m, &r, e), 0);
    assert_in_range(kit.again, FEW - 2, FEW);
    core_check(kit.core);
}

// Another client's handle of the session, which may only read it.
static uint64_t read_as(struct member *other, uint64_t handle)
{
    struct kvq__session_spec spec = {.name = "it", .flags = KVQ__OPEN_READ_ONLY};
    kit_name(kit_of(&m, handle), spec.name);
    assert_int_equal(member_open(&kit, other, 1000, 65536), 0);
    return kit_opened(other, &spec);
}

// A step of the session takes its floor beyond where the rest would be forked: that is told. Then
// it ends: so is that.
KIT_TEST(test_forks_meanwhile)
{
    static struct kvq_entry_wire e[MANY];
    struct member other;
    uint64_t a = make(3000), reader = read_as(&other, a);
    struct kvq_request r = load_many(reader, 2944, e);
    kit.core->config.fork_work = 8;
    kit_load(&other, &r, e);
    assert_int_equal(kvq__request_start(other.queue), KVQ__AGAIN);
    assert_int_equal(kit_step(&m, a, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(kvq__request_continue(other.queue), KVQ__AGAIN);
    kit_drop(&m, a);
    assert_int_equal(kit_again(&other), 0);
    uint32_t good = 0, gone = 0;
    for (uint32_t i = 0; i < MANY; i++) {
        int status = kvq__queue_results(other.queue)[i].status;
        good += status == 0;
        gone += status == KVQ_E_CANCELLED;
        if (status == 0)
            assert_int_equal(kit_of(&other, kvq__queue_results(other.queue)[i].value)->tokens,
                             2944);
    }
    assert_true(good >= 1 && gone > MANY / 2);
}

// Nothing stays of new sessions that nobody has seen, whose client has gone or that found no room.
KIT_TEST(test_forks_undone)
{
    static struct kvq_entry_wire e[MANY];
    struct member other;
    uint64_t a = make(3000), reader = read_as(&other, a);
    struct kvq_request r = load_many(reader, 2944, e);
    uint64_t used = kit.core->pools[0].used_bytes, tables = info_of().used[KVQ__TABLE_BYTES];
    kit.core->config.fork_work = 8;
    kit_load(&other, &r, e);
    assert_int_equal(kvq__request_start(other.queue), KVQ__AGAIN);
    assert_int_equal(kvq__request_continue(other.queue), KVQ__AGAIN);
    assert_true(info_of().used[KVQ__TABLE_BYTES] > tables);
    kvq__client_detach(other.client);
    assert_int_equal(kvq__request_continue(other.queue), KVQ__AGAIN); // in pieces as well
    assert_int_equal(kvq__request_continue(other.queue), KVQ__DONE);
    assert_int_equal(kit.core->pools[0].used_bytes, used);
    assert_int_equal(info_of().used[KVQ__TABLE_BYTES], tables);
    assert_int_equal(kit.core->n_sessions, 1);
    core_check(kit.core);
    kvq__queue_close(&other.queue);
    member_free(&other);
    kit_drop(&m, a);
}

// Nor of those of a request whose deadline passes while it waits for what packs their source.
KIT_TEST(test_forks_late)
{
    static struct kvq_entry_wire e[MANY];
    static uint8_t data[1];
    uint64_t a = make(3000);
    struct kvq__session *s = kit_of(&m, a);
    struct kvq_request r = load_many(a, 2944, e);
    uint64_t used = kit.core->pools[0].used_bytes;
    r.deadline_ns = kit.now + 1000;
    kit.core->config.fork_work = 8;
    kit_load(&m, &r, e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__AGAIN);
    s->layers[0].packer = &r;
    s->layers[0].extras.data = data; // as if there were some
    assert_int_equal(kvq__request_continue(m.queue), KVQ__WAIT);
    kit_pass(&kit, 1001);
    assert_int_equal(kit_again(&m), 1); // it is undone, and then refused
    int rc = kit_again(&m);
    s->layers[0].packer = NULL;
    s->layers[0].extras.data = NULL;
    assert_int_equal(rc, KVQ_E_DEADLINE);
    assert_int_equal(kit.core->pools[0].used_bytes, used);
    assert_int_equal(kit.core->n_sessions, 1);
}

// ---- What has ended ----

// Between two looks at the rings so much is given back, and a sheet or a session's own memory more.
enum { PIECE = 64, PIECE_MOST = PIECE + 64 };

static uint64_t piece(void)
{
    uint64_t before = kit.core->freeing.done;
    kit_poll(kit.core);
    return kit.core->freeing.done - before;
}

// Polls until nothing is left, and returns the pieces. None is larger than it may be.
static uint32_t all_pieces(void)
{
    uint32_t n = 0;
    for (uint64_t work; (work = piece()) > 0; n++) {
        assert_true(work <= PIECE_MOST);
        core_check(kit.core);
    }
    return n;
}

static void fork_many(struct member *who, uint64_t handle, uint64_t at)
{
    static struct kvq_entry_wire e[MANY];
    struct kvq_request r = load_many(handle, at, e);
    assert_int_equal(kit_request(who, &r, e), 0);
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(kvq__queue_results(who->queue)[i].status, 0);
    kit.core->config.release_work = PIECE;
    while (piece() > 0)
        ;
}

// A client dies with many forks, closes them or drops them: they are gone at once for everybody,
// and their memory comes back in pieces. So does that of the session they came from.
KIT_TEST(test_forks_end_in_pieces)
{
    struct member other;
    uint64_t tables = info_of().used[KVQ__TABLE_BYTES], used = kit.core->pools[0].used_bytes;
    uint64_t a = make(7000), reader = read_as(&other, a);
    uint64_t with_a = info_of().used[KVQ__TABLE_BYTES];
    for (int way = 0; way < 3; way++) {
        struct member *who = way == 2 ? &other : &m;
        fork_many(who, way == 2 ? reader : a, 6912);
        uint64_t before = kit.core->freeing.done;
        for (uint32_t i = 0; way < 2 && i < MANY; i++) {
            uint64_t fork = kvq__queue_results(m.queue)[i].value;
            assert_int_equal(way ? kvq__session_drop(m.client, fork, text)
                                 : kvq__session_close(m.client, fork, text),
                             0);
        }
        if (way == 2)
            kvq__client_detach(other.client);
        assert_true(kit.core->freeing.done - before <= PIECE_MOST);
        assert_int_equal(kit.core->n_sessions, 1);
        assert_int_equal(info_of().used[KVQ__SESSIONS], 1);
        assert_true(all_pieces() > MANY / 8);
        assert_int_equal(info_of().used[KVQ__TABLE_BYTES], with_a);
    }
    kvq__queue_close(&other.queue);
    member_free(&other);
    kit_drop(&m, a);
    assert_true(all_pieces() > 3);
    assert_int_equal(info_of().used[KVQ__TABLE_BYTES], tables);
    assert_int_equal(kit.core->pools[0].used_bytes, used);
}

// Who needs the room waits for these pieces instead of being refused, and a session that nobody
// uses has not to go for it.
KIT_TEST(test_room_of_what_ended)
{
    uint64_t a = make(7000), b = kit_session(&m, rows, 2, 0), idle = make(300);
    struct kvq_entry_wire e = {.handle = b, .append = 400};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, KIT_STEP);
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, info_of().used[KVQ__HOST_BYTES]);
    kit.core->config.release_work = 8;
    kit_poll(kit.core);
    kit_drop(&m, a);
    kit_load(&m, &r, &e);
    enum kvq__progress p = kvq__request_start(m.queue);
    uint32_t waits = 0;
    for (; p == KVQ__WAIT && waits < 1000; waits++) {
        kit_poll(kit.core);
        p = kvq__request_continue(m.queue);
    }
    assert_true(waits > 0);
    assert_int_equal(p, KVQ__DONE);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
    assert_non_null(kit_of(&m, idle));
}

// Who is refused by a limit of its own looks at none of the many sessions that others have ended.
KIT_TEST(test_refused_beside_what_ended)
{
    struct member other;
    uint64_t a = make(7000);
    assert_int_equal(member_open(&kit, &other, 2000, BUFFER), 0);
    uint64_t idle = kit_session(&other, rows, 2, 0), asks = kit_session(&other, rows, 2, 0);
    struct kvq_entry_wire e = {.handle = asks, .append = 200};
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, KIT_STEP);
    assert_int_equal(kit_step(&other, idle, 400, HEADS, DIM), 0);
    kit_limit(&kit, "uid-2000", KVQ__HOST_BYTES, kit_of(&other, idle)->ns->used[KVQ__HOST_BYTES]);
    kit_pass(&kit, 60000000000);
    fork_many(&m, a, 6912);
    for (uint32_t i = 0; i < MANY; i++)
        kit_drop(&m, kvq__queue_results(m.queue)[i].value);
    assert_true(kit.core->pools[0].n_ended > MANY / 2);
    core_check(kit.core);
    uint64_t looks = kit.core->freeing.shortage_looks;
    kit_load(&other, &r, &e);
    assert_int_equal(kvq__request_start(other.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_results(other.queue)[0].status, KVQ_E_QUOTA);
    looks = kit.core->freeing.shortage_looks - looks;
    assert_true(all_pieces() > MANY / 8);
    assert_int_equal(kit.core->pools[0].n_ended, 0);
    member_close(&other);
    assert_in_range(looks, 1, 8);
}

// Page tables: what has ended makes room for them at once.
KIT_TEST(test_tables_of_what_ended)
{
    uint64_t fork;
    uint64_t a = make(3000), b = kit_fork(&m, a, 2944);
    kit_limit(&kit, "uid-1000", KVQ__TABLE_BYTES, info_of().used[KVQ__TABLE_BYTES]);
    struct kvq_entry_wire e = {.handle = a, .position = 2944};
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), KVQ_E_QUOTA);
    kit.core->config.release_work = 1;
    kit_poll(kit.core);
    kit_drop(&m, b);
    assert_false(TAILQ_EMPTY(&kit.core->freeing.ended));
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), 0);
}

// Where memory is missing nothing is left behind, wherever it is.
KIT_TEST(test_forks_fail)
{
    uint64_t a = make(3000), before = kit.allocated_out, used = kit.core->pools[0].used_bytes;
    uint32_t failed = 0;
    struct kvq_entry_wire e = {.handle = a, .position = 2944};
    for (int i = 0; i < 200; i++) {
        uint64_t fork;
        kit.fail_one_in = 20;
        int rc = kit_simple(&m, KVQ_OP_FORK, 0, e, &fork);
        kit.fail_one_in = 0;
        failed += rc == KVQ_E_NO_MEMORY;
        if (rc == 0)
            kit_drop(&m, fork);
        kit_poll(kit.core);
        assert_true(kit.allocated_out - before < 8192); // handles come in chunks
        assert_int_equal(kit.core->pools[0].used_bytes, used);
    }
    assert_in_range(failed, 10, 199);
}

// ---- What all of it takes ----

static void limit_tables(uint64_t bytes)
{
    kit_limit(&kit, "uid-1000", KVQ__TABLE_BYTES, bytes);
}

static int open_named(const char *name, uint32_t layers, uint64_t *handle)
{
    struct kvq__layer_row many = rows[0];
    const struct kvq__session_spec spec = {.name = name, .layers = &many, .n_layers = 1};
    many.repeat = layers;
    text[0] = 0;
    int rc = kvq__session_open(m.client, &spec, &info, text);
    *handle = info.handle;
    return rc;
}

// Named sessions of many layers stay when nobody has them open: their limit ends it.
KIT_TEST(test_empty_sessions_count)
{
    enum { LIMIT = 4 * MIB };
    uint64_t handle, before = kit.allocated_out;
    uint32_t n = 0;
    char name[32];
    int rc;
    limit_tables(LIMIT);
    do {
        snprintf(name, sizeof name, "s%u", n++);
        rc = open_named(name, KVQ_MAX_LAYERS, &handle);
        if (rc == 0)
            assert_int_equal(kvq__session_close(m.client, handle, text), 0);
    } while (rc == 0 && n < 1000);
    assert_int_equal(rc, KVQ_E_QUOTA);
    assert_says(text, "--table-bytes");
    assert_says(text, "4194304");
    assert_true(n > 10 && kit.allocated_out - before < LIMIT + 65536); // handles come besides
    struct kvq__namespace_info info = info_of();
    assert_in_range(info.used[KVQ__TABLE_BYTES], LIMIT - LIMIT / 8, LIMIT);
    assert_int_equal(info.used[KVQ__HOST_BYTES], 0);
    assert_int_equal(info.refused[KVQ__TABLE_BYTES], 1);
    assert_int_equal(info.last_refused, KVQ__TABLE_BYTES);
    // What is there can be had, by who says which layers it has, too.
    assert_int_equal(open_named("s0", KVQ_MAX_LAYERS, &handle), 0);
    kit_drop(&m, handle);
    assert_int_equal(open_named(name, KVQ_MAX_LAYERS, &handle), 0); // there is room for one again
    kit_drop(&m, handle);
}

// Each thing that grows is refused by the limit's code, and works once there is room.
KIT_TEST(test_growth_counts)
{
    uint64_t a = make(1000), used = info_of().used[KVQ__TABLE_BYTES], fork;
    assert_int_equal(kvq__session_info(m.client, a, &info, text), 0);
    assert_int_equal(info.table_bytes, used);
    limit_tables(used);
    struct kvq_entry_wire e = {.handle = a, .position = 1000};
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), KVQ_E_QUOTA);
    assert_int_equal(kit_step(&m, a, 20, HEADS, DIM), 0); // into what it has
    assert_int_equal(kit_step(&m, a, 400, HEADS, DIM), KVQ_E_QUOTA);
    core_check(kit.core);
    assert_int_equal(info_of().used[KVQ__TABLE_BYTES], used);
    assert_in_range(info_of().refused[KVQ__TABLE_BYTES], 2, 9);
    limit_tables(0);
    assert_int_equal(kit_step(&m, a, 400, HEADS, DIM), 0);
    assert_true(info_of().used[KVQ__TABLE_BYTES] > used);
    kit_fork(&m, a, kit_of(&m, a)->tokens);
    kit_drop(&m, a);
    assert_true(info_of().used[KVQ__TABLE_BYTES] > 0); // the fork's
}

// ---- How many are looked at ----

static uint32_t count_of(uint32_t small, uint32_t large)
{
    return long_tier() ? large : small;
}

static void tick(uint64_t ms)
{
    kit_tick(&kit, ms * 1000000);
}

// Many named sessions that nobody has open: what is opened is found without looking at the others,
// and time passes without it, until theirs is over.
KIT_TEST(test_idle_sessions)
{
    struct kvq__lookup *l = &kit.core->lookup;
    uint32_t n = count_of(10000, 100000);
    uint64_t handle, looks;
    char name[32];
    for (uint32_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "session %u", i);
        assert_int_equal(open_named(name, 1, &handle), 0);
        assert_int_equal(kvq__session_close(m.client, handle, text), 0);
    }
    assert_in_range(l->looks, 0, 4 * n); // of others in its bucket, and of those there once
    looks = l->looks;
    for (uint32_t i = 0; i < n; i++) {
        static const struct kvq__peer peer = {.uid = 1000};
        snprintf(name, sizeof name, "session %u", n - 1 - i);
        assert_int_equal(kvq__session_find(kit.core, &peer, "", name, &info, text), 0);
        assert_string_equal(info.name, name);
        snprintf(name, sizeof name, "#%llu", (unsigned long long)info.id);
        assert_int_equal(kvq__session_find(kit.core, &peer, "", name, &info, text), 0);
    }
    assert_in_range(l->looks - looks, 2 * n, 8 * n);
    tick(1);
    looks = l->looks;
    for (int i = 0; i < 40; i++) // the kit's keep time is 5 s
        tick(100);
    assert_int_equal(l->looks, looks);
    assert_int_equal(kit.core->n_sessions, n);
    tick(800);
    assert_int_equal(kit.core->n_sessions, n); // not before their time
    tick(300);
    for (uint32_t left = n; left > 0; tick(100)) { // some in each tick
        assert_in_range(left - kit.core->n_sessions, 1, 512);
        left = kit.core->n_sessions;
    }
    assert_in_range(l->looks - looks, n, 2 * n);
}

// More sessions than a tick looks at, each to be visited once a turn of the wheel: those behind
// have their time all the same.
KIT_TEST(test_late_ones_hold_up_nobody)
{
    enum { LATE = 2000 };
    struct kvq__layer_row row = rows[0];
    struct kvq__session_spec spec = {
        .layers = &row, .n_layers = 1, .on_detach = KVQ__DETACH_KEEP, .keep_seconds = 2000};
    char name[32];
    row.repeat = 1;
    spec.name = name;
    for (uint32_t i = 0; i <= LATE; i++) {
        snprintf(name, sizeof name, "session %u", i);
        spec.keep_seconds = i < LATE ? 2000 : 600;
        assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
        assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
    }
    for (uint32_t ms = 0; ms < 599000; ms += 1000)
        tick(1000);
    assert_int_equal(kit.core->n_sessions, LATE + 1);
    for (int i = 0; i < 6; i++)
        tick(1000);
    assert_int_equal(kit.core->n_sessions, LATE);
}

// A session that is used goes later; one of another time goes before it; one that is open stays.
KIT_TEST(test_order_of_ends)
{
    struct kvq__layer_row row = rows[0];
    uint64_t open, late, soon;
    struct kvq__session_spec spec = {.layers = &row, .n_layers = 1, .on_detach = KVQ__DETACH_KEEP};
    static const struct kvq__peer peer = {.uid = 1000};
    row.repeat = 1;
    assert_int_equal(open_named("open", 1, &open), 0);
    spec.name = "late";
    spec.on_detach = KVQ__DETACH_DEFAULT; // counts for all that are kept
    spec.keep_seconds = 2000;             // beyond the wheel
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    late = info.handle;
    spec.name = "soon";
    spec.on_detach = KVQ__DETACH_KEEP;
    spec.keep_seconds = 1;
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    soon = info.handle;
    tick(1);
    assert_int_equal(kvq__session_close(m.client, late, text), 0);
    assert_int_equal(kvq__session_close(m.client, soon, text), 0);
    tick(999);
    assert_int_equal(kit.core->n_sessions, 3);
    tick(1);
    assert_int_equal(kit.core->n_sessions, 2);
    for (int i = 0; i < 19; i++)
        tick(100000);
    tick(98990);
    assert_int_equal(kvq__session_find(kit.core, &peer, "", "late", &info, text), 0);
    tick(100);
    assert_int_equal(kvq__session_find(kit.core, &peer, "", "late", &info, text), KVQ_E_NO_SESSION);
    assert_int_equal(kvq__session_find(kit.core, &peer, "", "open", &info, text), 0);
    assert_int_equal(kvq__session_close(m.client, open, text), 0);
    tick(5001);
    assert_int_equal(kit.core->n_sessions, 0);
}

// One that was used since, and whose time comes a little later in the same slot, is looked at once
// a tick.
KIT_TEST(test_due_in_the_same_slot)
{
    struct kvq__layer_row row = rows[0];
    const struct kvq__session_spec spec = {.name = "s",
                                           .layers = &row,
                                           .n_layers = 1,
                                           .on_detach = KVQ__DETACH_KEEP,
                                           .keep_seconds = 1};
    for (uint32_t round = 0; round < 8; round++) {
        assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
        struct kvq__session *s = kit_of(&m, info.handle);
        tick(1);
        assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
        tick(20);
        kvq__session_used(s);
        tick(970);
        uint64_t looks = kit.core->lookup.looks;
        tick(15); // 5 ms before its end
        assert_int_equal(kit.core->n_sessions, 1);
        assert_in_range(kit.core->lookup.looks - looks, 0, 4);
        tick(20);
        assert_int_equal(kit.core->n_sessions, 0);
        tick(37);
    }
}

// ---- Sessions that do not matter ----

// Of so many idle ones, what is asked for every few moments looks at those that it is about.
KIT_TEST(test_unsaved_looks)
{
    enum { N = 3000 };
    const struct kvq__lookup *l = &kit.core->lookup;
    struct kvq__unsaved list[4];
    struct kvq__status status;
    uint64_t handles[N], looks;
    char name[32];
    for (uint32_t i = 0; i < N; i++) {
        snprintf(name, sizeof name, "session %u", i);
        assert_int_equal(open_named(name, 1, &handles[i]), 0);
    }
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_ALL, 0, list, 4), N);
    looks = l->looks;
    uint32_t which = KVQ__UNSAVED_LEFT | KVQ__UNSAVED_IDLE;
    tick(1000);
    assert_int_equal(kvq__core_unsaved(kit.core, which, 2000000000, list, 4), 0);
    assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_LEFT, 0, list, 4), 0);
    assert_in_range(l->looks - looks, 0, 1); // all are too young, and open
    looks = l->looks;
    for (uint32_t i = 1; i < N; i++) // all but one are used
        kvq__session_used(kit_of(&m, handles[i]));
    tick(1000);
    assert_int_equal(kvq__core_unsaved(kit.core, which, 2000000000, list, 4), 1);
    assert_string_equal(list[0].name, "session 0");
    assert_in_range(l->looks - looks, 1, 2);
    (void)kvq__unsaved_failed(kit.core, "uid-1000", "session 0");
    assert_int_equal(kvq__core_unsaved(kit.core, which, 2000000000, list, 4), 0);
    kit_of(&m, handles[7])->spec.save_on_detach = true;
    assert_int_equal(kvq__session_close(m.client, handles[7], text), 0);
    looks = l->looks;
    assert_int_equal(kvq__core_unsaved(kit.core, which, 2000000000, list, 4), 1);
    assert_string_equal(list[0].name, "session 7");
    assert_in_range(l->looks - looks, 1, 3);
    tick(1000); // what has failed is tried again
    assert_int_equal(kvq__core_unsaved(kit.core, which, 3000000000, list, 4), 2);
    looks = l->looks;
    kvq__core_status(kit.core, &status);
    assert_int_equal(status.sessions, N);
    assert_int_equal(l->looks, looks);
}

// A request that is refused has as many idle sessions looked at as it takes, and not all.
KIT_TEST(test_evict_looks)
{
    enum { N = 1700, TOKENS = 65 }; // which a whole raw block has room for
    static const struct kvq__layer_row row = {1, HEADS, DIM, DIM, .format = "f16", .kv_from = -1};
    const struct kvq__lookup *l = &kit.core->lookup;
    uint64_t handle = 0, got;
    for (uint32_t i = 0; i < N; i++) {
        handle = kit_session(&m, &row, 1, 0);
        assert_true(handle != 0);
        assert_int_equal(kit_step(&m, handle, TOKENS, HEADS, DIM), 0);
    }
    for (uint32_t i = 0; i < N; i++) // as many without blocks, which are passed by once
        assert_true(kit_session(&m, &row, 1, 0) != 0);
    struct kvq_entry_wire e = {.handle = handle, .position = TOKENS, .append = 60000};
    uint64_t looks = 0;
    for (uint64_t i = 0; i < 5; i++) {
        tick(2000);
        looks = l->looks;
        int rc = kit_simple(&m, KVQ_OP_STEP_BEGIN, 1 + i, e, &got);
        if (rc != 1)
            assert_int_equal(rc, KVQ_E_NO_MEMORY);
        assert_in_range(l->looks - looks, 1, 1000);
        if (rc == 1) { // it waits: for others to be looked at
            tick(5000);
            assert_int_equal(kvq__request_continue(m.queue), KVQ__DONE);
        }
    }
}

int main(void)
{
    return run_all(NULL, NULL);
}
