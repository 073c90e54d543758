// SPDX-License-Identifier: Apache-2.0
//
// Eviction to disk: by way of the host's memory and without, for room, for a limit and unasked;
// when the store fails; and sessions that come back while others do.
#include "tests/core/evict_kit.h"

static const struct kvq__peer admin = {.admin = true};

static const char *id_of(struct member *member, uint64_t handle)
{
    static char id[24];
    snprintf(id, sizeof id, "#%llu", (unsigned long long)kit_of(member, handle)->id);
    return id;
}

static void leave_step(struct member *member, uint64_t handle)
{
    struct kvq_entry_wire e = entry(member, handle, 0);
    assert_int_equal(kit_simple(member, KVQ_OP_STEP_ABORT, 9, e, NULL), 0);
}

SAVING_TEST(test_disk)
{
    static uint8_t bits[6][LAYERS][OUT_BYTES], now[LAYERS][OUT_BYTES];
    uint64_t handles[6];
    for (uint32_t i = 0; i < 6; i++) {
        handles[i] = fed(&m, "");
        attend(&m, handles[i], bits[i]);
        pass(2 * SECOND);
    }
    for (uint32_t turn = 0; turn < 2; turn++)
        for (uint32_t i = 0; i < 6; i++) {
            same_bits(&m, handles[i], bits[i]);
            assert_true(is_home(&m, handles[i]));
            pass(2 * SECOND);
        }
    struct kvq__counts stats = counts();
    assert_true(stats.parked_room >= 8);
    assert_int_equal(stats.parked_quota + stats.parked_idle, 0);
    assert_int_equal(stats.parked_room_bytes, stats.parked_room * SESSION_BYTES);
    assert_int_equal(stats.fetched, stats.parked_room - 2);
    assert_int_equal(refused(), 0);
    // At the limit of its namespace.
    kit_of(&m, handles[5])->ns->quota.limit[KVQ__HOST_BYTES] = 4 * SESSION_BYTES;
    kit.core->pools[0].budget = 32 * MIB;
    pass(2 * SECOND);
    attend(&m, handles[1], now);
    assert_int_equal(counts().parked_quota, 1);
    // And when nobody needs the room.
    kit.core->config.park_idle_ns = 5 * SECOND;
    pass(6 * SECOND);
    for (uint32_t i = 0; i < 20; i++) {
        kvq__core_tick(kit.core);
        poll_core();
    }
    assert_int_equal(counts().parked_idle, 4);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
}

// A GPU's sessions go to the host's memory while there is room, then to disk; from there they come
// back to the host first, and then home.
SAVING_TEST(test_both)
{
    static uint8_t bits[10][LAYERS][OUT_BYTES];
    uint64_t handles[10];
    home = 1;
    for (uint32_t i = 0; i < 10; i++) { // 4 fit there, 4 on the host
        handles[i] = fed(&m, "");
        attend(&m, handles[i], bits[i]);
        pass(2 * SECOND);
    }
    assert_true(kit.core->counts.demoted >= 4 && counts().parked_room >= 2);
    for (uint32_t i = 0; i < 10; i++) {
        same_bits(&m, handles[i], bits[i]);
        assert_true(is_home(&m, handles[i]));
        pass(2 * SECOND);
    }
    assert_int_equal(refused(), 0);
}

// Memory is full of sessions that share all they have with a fork: alone none of them frees
// anything, and still they make room.
SAVING_TEST(test_forks)
{
    static uint8_t bits[LAYERS][OUT_BYTES];
    uint64_t handles[4], forks[4];
    for (uint32_t i = 0; i < 4; i++) {
        handles[i] = fed(&m, "");
        forks[i] = kit_fork(&m, handles[i], SESSION);
    }
    attend(&m, handles[0], bits);
    pass(2 * SECOND);
    fed(&other, "");
    assert_int_equal(refused(), 0);
    for (uint32_t i = 0; i < 2; i++) {
        pass(2 * SECOND);
        same_bits(&m, i ? forks[0] : handles[0], bits);
    }
    assert_int_equal(refused(), 0);
}

// The host has bytes, but no extent that is this namespace's: it goes to disk instead.
SAVING_TEST(test_no_host)
{
    struct member stranger;
    attach(&stranger, 2000);
    uint64_t theirs = opened(&stranger, "");
    assert_int_equal(step(&stranger, theirs, 1), 0);
    kvq__session_ref(kit_of(&stranger, theirs));
    home = 1;
    for (uint32_t i = 0; i < 4; i++)
        fed(&m, "");
    pass(2 * SECOND);
    assert_int_equal(step(&other, opened(&other, ""), 1), 0);
    assert_int_equal(counts().parked_room, 1);
    assert_int_equal(kit.core->counts.demoted, 0);
    assert_int_equal(kit.core->counts.evictions_failed, 1);
    kvq__session_unref(kit_of(&stranger, theirs));
}

// The store fails: who is refused is told, nobody is tried again and again, and nothing is lost.
SAVING_TEST(test_store_fails)
{
    uint8_t bits[LAYERS][OUT_BYTES];
    uint64_t handles[4];
    fill_home(handles);
    attend(&m, handles[0], bits);
    pass(2 * SECOND);
    vault.fail = KVQ_E_NO_SPACE;
    assert_int_equal(finish(&other, begin(&other, opened(&other, "x"), 9, 1, 0)), KVQ_E_NO_MEMORY);
    assert_int_equal(kit.core->counts.evictions_failed, 4);
    assert_int_equal(finish(&other, begin(&other, opened(&other, "y"), 9, 1, 0)), KVQ_E_NO_MEMORY);
    assert_int_equal(kit.core->counts.evictions_failed, 4);
    same_bits(&m, handles[0], bits);
    vault.fail = 0;
    pass(11 * SECOND);
    assert_int_equal(step(&other, opened(&other, "z"), 1), 0);
    assert_int_equal(counts().parked_room, 1);
}

// Above evict_above percent idle sessions go one at a time, and prefixes before them.
SAVING_TEST(test_above)
{
    kit.core->config.evict_above = 60;
    for (uint32_t i = 0; i < 3; i++)
        fed(&m, "");
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->tickets.n[KVQ__TICKET_PARK], 0); // too young
    pass(2 * SECOND);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->tickets.n[KVQ__TICKET_PARK], 1);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->tickets.n[KVQ__TICKET_PARK], 1); // one at a time
    poll_core();
    kvq__core_tick(kit.core);
    poll_core();
    assert_int_equal(counts().parked_room, 1); // 50 percent now
    assert_int_equal(kit.core->pools[0].used_bytes, 2 * SESSION_BYTES);
}

// ---- Several at a time ----

// As many go side by side as a request needs, and no more; whoever asks beside it has others go.
SAVING_TEST(test_side_by_side)
{
    uint64_t handles[4], x = opened(&other, "x"), y = opened(&m, "y");
    fill_home(handles);
    pass(2 * SECOND);
    assert_int_equal(begin(&other, x, 9, 2 * SESSION, 0), 1);
    assert_int_equal(kit.core->evict.n, 2);
    assert_int_equal(kit.core->tickets.n[KVQ__TICKET_PARK], 2);
    pass(10 * MS);
    assert_int_equal(kit_again(&other), 1);
    assert_int_equal(begin(&m, y, 9, SESSION, 0), 1);
    assert_int_equal(kit.core->evict.n, 3);
    assert_int_equal(finish(&other, 1), 0);
    assert_int_equal(finish(&m, kit_again(&m)), 0);
    assert_int_equal(counts().parked_room, 3);
    assert_int_equal(kit.core->evict.n, 0);
    assert_int_equal(refused(), 0);
    leave_step(&other, x);
    leave_step(&m, y);
}

// A namespace has half of the evictions that a pool may have at a time. Whoever may have no more
// looks at nobody before one of them has ended; nor does a namespace at its limit wait for more.
SAVING_TEST(test_shares)
{
    enum { ALL = 24, HALF = KVQ__EVICT_AT_ONCE / 2 };
    struct member stranger, limited;
    kit.core->pools[0].budget = (ALL + 4) * SESSION_BYTES;
    attach(&stranger, 2000);
    attach(&limited, 2001);
    for (uint32_t i = 0; i < ALL; i++)
        fed(&other, "");
    pass(2 * SECOND);
    const struct kvq__session *its = kit_of(&limited, fed(&limited, ""));
    kit_limit(&kit, "uid-2001", KVQ__HOST_BYTES, SESSION_BYTES);
    pass(2 * SECOND);
    uint64_t x = opened(&m, "x"), y = opened(&stranger, "y");
    assert_int_equal(begin(&m, x, 9, 2 * HALF * SESSION, 0), 1);
    assert_int_equal(kit.core->evict.n, HALF);
    assert_int_equal(begin(&other, opened(&other, "z"), 9, SESSION, 0), 1); // of the same one
    assert_int_equal(kit.core->evict.n, HALF);
    uint64_t looks = kit.core->evict.looks;
    for (uint32_t i = 0; i < 10; i++) {
        pass(60 * MS);
        assert_int_equal(kit_again(&m), 1);
        assert_int_equal(kit_again(&other), 1);
    }
    assert_int_equal(kit.core->evict.looks, looks);
    assert_int_equal(begin(&stranger, y, 9, 2 * HALF * SESSION, 0), 1);
    assert_int_equal(kit.core->evict.n, 2 * HALF);
    assert_int_equal(begin(&limited, opened(&limited, ""), 9, SESSION, 0), 1);
    assert_null(its->park);
    assert_int_equal(finish(&m, kit_again(&m)), 0);
    leave_step(&m, x);
    assert_int_equal(finish(&other, kit_again(&other)), 0);
    assert_int_equal(finish(&stranger, kit_again(&stranger)), 0);
    leave_step(&stranger, y);
    assert_int_equal(finish(&limited, kit_again(&limited)), 0);
    assert_true(kvq__is_offloaded(its));
    assert_int_equal(refused(), 0);
}

// Two sessions come back at once, and only one fits: neither keeps what the other one waits for.
SAVING_TEST(test_two_fetches)
{
    struct kvq__store_job order;
    struct kvq__restore *r[2];
    uint64_t big[2];
    kit.core->pools[0].budget = 4 * MIB;
    for (uint32_t i = 0; i < 2; i++) {
        big[i] = opened(&m, "");
        assert_int_equal(step(&m, big[i], 14 * PAGE), 0);
        assert_int_equal(step(&m, big[i], 14 * PAGE), 0); // 56 blocks of 64 that there can be
        assert_int_equal(kvq__session_park(m.client, big[i], NULL, text), 0);
        rest();
        assert_true(kvq__is_offloaded(kit_of(&m, big[i])));
    }
    for (uint32_t i = 0; i < 2; i++)
        kvq__fetch_ask(kit_of(&m, big[i]));
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(kvq__park_next(kit.core, &order));
        const struct vault_session *s = vault_find(&vault, order.name, order.shard);
        struct kvq__restore_spec spec = {
            .saved = &s->saved, .parts = s->parts, .n_parts = s->n, .good_tokens = UINT64_MAX};
        assert_int_equal(kvq__fetch_begin(kit.core, order.id, &spec, &r[i], text), 0);
    }
    kvq__pools_trim(kit.core, 0, UINT64_MAX);
    // The first takes one extent and some of the other one, the second what is left.
    assert_int_equal(kvq__restore_reserve(r[0], text), KVQ__MORE);
    assert_int_equal(kvq__restore_reserve(r[0], text), KVQ__MORE);
    assert_true(r[0]->reserved > 32 * BLOCK);
    // So it waits, and the first gives back what it has.
    assert_int_equal(kvq__restore_reserve(r[1], text), KVQ__LATER);
    assert_int_equal(kvq__restore_reserve(r[0], text), KVQ__LATER);
    assert_int_equal(r[0]->reserved, 0);
    int rc = KVQ__MORE;
    while (rc == KVQ__MORE) // a turn for each extent that it gets now
        rc = kvq__restore_reserve(r[1], text);
    assert_int_equal(rc, KVQ__COMPLETE);
    char name[KVQ_NAME_BYTES];
    kvq__stored_name(r[1]->session, name);
    assert_int_equal(vault_rest(&vault, &r[1], vault_find(&vault, name, 0)), 0);
    core_check(kit.core);
    // The other one is told that there is no room, once the first has been used for long enough.
    rc = KVQ__LATER;
    for (uint32_t looks = 0; rc == KVQ__LATER && looks < 100; looks++) {
        kvq__evict_back(kit_of(&m, big[1]));
        pass(100 * MS);
        rc = kvq__restore_reserve(r[0], text);
    }
    assert_int_equal(rc, KVQ_E_NO_MEMORY);
    kvq__restore_end(&r[0], rc);
    core_check(kit.core);
    uint8_t out[LAYERS][OUT_BYTES];
    pass(2 * SECOND);
    attend(&m, big[0], out); // and comes when that has gone
    assert_true(kvq__is_offloaded(kit_of(&m, big[1])));
}

// ---- Memory that is taken, and that comes free by itself ----

// All that could go is just being written: it goes when that has ended.
SAVING_TEST(test_beside_a_save)
{
    static uint8_t bits[LAYERS][OUT_BYTES];
    uint64_t handles[4];
    for (uint32_t i = 0; i < 4; i++) {
        handles[i] = fed(&m, "");
        if (i > 0)
            assert_int_equal(
                kvq__session_pin_named(kit.core, &admin, NULL, id_of(&m, handles[i]), true, text),
                0);
    }
    attend(&m, handles[0], bits);
    pass(2 * SECOND);
    struct kvq__save_spec spec = {.name = id_of(&m, handles[0]), .unnamed = true};
    struct kvq__save *save = vault_copied(kit.core, &spec);
    uint64_t x = opened(&other, "");
    assert_int_equal(begin(&other, x, 9, SESSION, 0), 1);
    vault_write(&vault, &save);
    assert_int_equal(finish(&other, 1), 0);
    assert_true(kvq__is_offloaded(kit_of(&m, handles[0])));
    leave_step(&other, x);
    pass(2 * SECOND);
    same_bits(&m, handles[0], bits);
    assert_int_equal(refused(), 0);
}

// A session is being read, and nobody sees it before it has all its blocks: whoever needs those
// waits until it is there, and can go.
SAVING_TEST(test_beside_a_restore)
{
    struct kvq__restore *r;
    kit.core->pools[0].budget = 4 * MIB; // 64 blocks
    uint64_t big = opened(&m, "big");
    assert_int_equal(step(&m, big, 14 * PAGE), 0);
    assert_int_equal(step(&m, big, 14 * PAGE), 0); // 56 of them
    struct kvq__save_spec save = {.name = id_of(&m, big)};
    assert_int_equal(vault_save(&vault, kit.core, &save, NULL), 0);
    kit_drop(&m, big);
    uint64_t x = opened(&other, "");
    assert_int_equal(step(&other, x, PAGE), 0);
    kvq__pools_trim(kit.core, 0, UINT64_MAX);
    const struct vault_session *s = vault_find(&vault, "big", 0);
    struct kvq__restore_spec spec = {.ns = s->ns,
                                     .place = place(0),
                                     .saved = &s->saved,
                                     .parts = s->parts,
                                     .n_parts = s->n,
                                     .good_tokens = UINT64_MAX};
    assert_int_equal(kvq__restore_begin(kit.core, &admin, &spec, &r, text), 0);
    assert_int_equal(kvq__restore_reserve(r, text), KVQ__MORE);
    assert_int_equal(r->reserved, 31 * BLOCK); // of the first extent, and one of the second
    assert_int_equal(begin(&other, x, 9, 20 * PAGE, 0), 1); // 40 of the 31 that are left
    assert_int_equal(kvq__restore_reserve(r, text), KVQ__COMPLETE);
    assert_int_equal(vault_rest(&vault, &r, s), 0);
    core_check(kit.core);
    assert_int_equal(finish(&other, 1), 0);
    assert_int_equal(refused(), 0);
    leave_step(&other, x);
}

// A session of the member that is away, and whose fetch has begun.
static struct kvq__restore *begin_fetch(struct member *member, uint64_t handle)
{
    struct kvq__store_job order;
    struct kvq__restore *r;
    kvq__fetch_ask(kit_of(member, handle));
    assert_true(kvq__park_next(kit.core, &order));
    assert_int_equal(order.id, kit_of(member, handle)->id);
    const struct vault_session *s = vault_find(&vault, order.name, order.shard);
    struct kvq__restore_spec spec = {
        .saved = &s->saved, .parts = s->parts, .n_parts = s->n, .good_tokens = UINT64_MAX};
    assert_int_equal(kvq__fetch_begin(kit.core, order.id, &spec, &r, text), 0);
    return r;
}

static void send_away(struct member *member, uint64_t handle)
{
    assert_int_equal(kvq__session_park(member->client, handle, NULL, text), 0);
    rest();
    assert_true(kvq__is_offloaded(kit_of(member, handle)));
}

// One that waits at its namespace's limit is in nobody's way but its namespace's.
SAVING_TEST(test_beside_a_limit)
{
    struct member stranger;
    attach(&stranger, 2000);
    kit.core->pools[0].budget = 32 * MIB;
    uint64_t a = fed(&m, ""), c = fed(&stranger, "");
    send_away(&m, a);
    send_away(&stranger, c);
    fed(&m, ""); // too young to go
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, SESSION_BYTES);
    struct kvq__restore *first = begin_fetch(&m, a), *second = begin_fetch(&stranger, c);
    assert_int_equal(kvq__restore_reserve(first, text), KVQ__LATER);
    assert_int_equal(first->grant.refused.code, KVQ_E_QUOTA);
    assert_true(first->ticket > 0);
    int rc;
    while ((rc = kvq__restore_reserve(second, text)) == KVQ__MORE)
        continue;
    kvq__restore_end(&first, KVQ_E_CANCELLED);
    kvq__restore_end(&second, KVQ_E_CANCELLED);
    assert_int_equal(rc, KVQ__COMPLETE);
}

static struct kvq__move_info move_info(uint64_t id)
{
    struct kvq__move_info info;
    assert_int_equal(kvq__move_info(kit.core, &admin, id, &info, text), 0);
    return info;
}

// Sessions of a GPU: the last four are there, the first one had to leave.
static void one_too_many(uint64_t handles[5])
{
    kit.core->pools[0].budget = 32 * MIB;
    home = 1;
    for (uint32_t i = 0; i < 5; i++) {
        handles[i] = fed(&m, "");
        pass(2 * SECOND);
    }
    assert_false(is_home(&m, handles[0]));
}

// A move whose session is in a step for as long as a client likes keeps no eviction to the host
// waiting, nor a way home.
SAVING_TEST(test_beside_a_move_that_waits)
{
    struct kvq__move_spec spec = {.place = "host", .wait_ms = KVQ_MAX_MOVE_WAIT_MS};
    struct kvq__move_info info;
    uint8_t out[LAYERS][OUT_BYTES];
    uint64_t handles[5], x;
    one_too_many(handles);
    assert_int_equal(finish(&m, begin(&m, handles[4], 9, 1, 0)), 0);
    rest();
    assert_int_equal(
        kvq__session_move_named(kit.core, &admin, NULL, id_of(&m, handles[4]), &spec, &info, text),
        0);
    x = opened(&other, "");
    pass(2 * SECOND);
    uint64_t demoted = kit.core->counts.demoted;
    assert_int_equal(step(&other, x, SESSION), 0);
    assert_true(kit.core->counts.demoted > demoted);
    assert_string_equal(move_info(info.id).phase, "waiting");
    kit_drop(&other, x);
    attend(&m, handles[0], out);
    assert_true(is_home(&m, handles[0]));
    assert_string_equal(move_info(info.id).phase, "waiting");
    leave_step(&m, handles[4]);
    rest();
    assert_string_equal(move_info(info.id).phase, "done");
}

// A request waits for a way home: it copies before a move that somebody has asked for earlier.
SAVING_TEST(test_way_home_before_a_move)
{
    struct kvq__move_spec spec = {.place = "host", .wait_ms = 1000};
    struct kvq__move_info info;
    uint64_t handles[5];
    one_too_many(handles);
    kit_drop(&m, handles[4]);
    rest();
    assert_int_equal(
        kvq__session_move_named(kit.core, &admin, NULL, id_of(&m, handles[1]), &spec, &info, text),
        0);
    struct kvq_request r = kit_attend(&m, 0, Q_AT, OUT_AT, 2 * HEADS, DIM);
    struct kvq_entry_wire e = entry(&m, handles[0], 0);
    e.queries = QUERIES;
    assert_int_equal(kit_request(&m, &r, &e), 1);
    const struct kvq__move *back = kit_of(&m, handles[0])->move;
    const struct kvq__move *asked = kit_of(&m, handles[1])->move;
    assert_true(back && asked && back->ticket.id > asked->ticket.id);
    while (back->ticket.phase <= KVQ__WAITING && asked->ticket.phase <= KVQ__WAITING)
        poll_core();
    assert_int_equal(asked->ticket.phase, KVQ__WAITING);
    assert_int_equal(finish(&m, 1), 0);
    assert_true(is_home(&m, handles[0]));
    rest();
    assert_string_equal(move_info(info.id).phase, "done");
}

// A session whose sinks stand behind the codes of its first page, which cannot change any more: a
// save has two references to that block as long as it lasts, one for the codes, one for the sinks.
static uint64_t fed_with_sinks(struct kvq__layer_row *row)
{
    const struct kvq__session_spec spec = {.place = place(home), .layers = row, .n_layers = 1};
    *row = rows[0];
    row->format = "oscar2-s32";
    uint64_t handle = kit_opened(&m, &spec);
    assert_int_equal(step(&m, handle, SESSION), 0);
    kit_pack(&kit);
    const struct kvq__layer *l = &kit_of(&m, handle)->layers[0];
    assert_true(l->sink_bytes > 0 && l->first_page == 0 && l->packed >= PAGE);
    return handle;
}

// All blocks of a session that is being written are its own: its eviction gives as much as it has,
// its first page included, and a request that needs just that is not refused.
SAVING_TEST(test_beside_a_save_of_sinks)
{
    struct kvq__layer_row row;
    kit.core->pools[0].budget = 32 * MIB;
    uint64_t a = fed_with_sinks(&row);
    const struct kvq__session_spec alike = {.place = place(home), .layers = &row, .n_layers = 1};
    uint64_t handle = kit_opened(&other, &alike);
    const struct kvq__session *x = kit_of(&other, handle), *s = kit_of(&m, a);
    pass(2 * SECOND);
    struct kvq__save_spec spec = {.name = id_of(&m, a), .unnamed = true};
    struct kvq__save *save = vault_copied(kit.core, &spec);
    assert_int_equal(kvq__page(&s->layers[0], 0)->packed.block->refs, 3);
    uint64_t need = kvq__session_bytes_at(x, x->pool, SESSION);
    uint64_t gain = kvq__session_bytes_at(s, s->pool, SESSION);
    assert_true(need >= gain);
    s->ns->quota.limit[KVQ__HOST_BYTES] = s->ns->used[KVQ__HOST_BYTES] - gain + need;
    assert_int_equal(begin(&other, handle, 9, SESSION, 0), 1);
    vault_write(&vault, &save);
    assert_int_equal(finish(&other, 1), 0);
    assert_true(kvq__is_offloaded(s));
    assert_int_equal(refused(), 0);
    leave_step(&other, handle);
}

static uint64_t begin_move(void)
{
    struct kvq__move_spec spec = {.place = "host", .wait_ms = 1000};
    struct kvq__move_info info;
    home = 1;
    uint64_t a = fed(&m, "");
    assert_int_equal(
        kvq__session_move_named(kit.core, &admin, NULL, id_of(&m, a), &spec, &info, text), 0);
    return a;
}

static const struct kvq__move *move_until(enum kvq__phase phase)
{
    const struct kvq__move *move = kvq__move_after(kit.core, NULL);
    for (uint32_t i = 0; move->ticket.phase < phase; i++) {
        assert_true(i < 1000000);
        poll_core();
    }
    assert_int_equal(move->ticket.phase, phase);
    return move;
}

// A session is on its way here: it can go on to disk once it has come.
SAVING_TEST(test_beside_a_move)
{
    uint64_t x = opened(&other, ""); // on the host: 32 blocks
    assert_int_equal(step(&other, x, 1), 0);
    uint64_t a = begin_move();
    assert_int_equal(move_until(KVQ__COPYING)->reserved_bytes, SESSION_BYTES); // 8 of them
    home = 0;
    assert_int_equal(begin(&other, x, 9, 12 * PAGE, 0), 1); // 24, where 22 are left
    assert_int_equal(finish(&other, 1), 0);
    assert_true(kvq__is_offloaded(kit_of(&m, a)));
    assert_int_equal(refused(), 0);
    leave_step(&other, x);
}

// It has left, and its blocks are yet to be given back.
SAVING_TEST(test_behind_a_move)
{
    home = 1;
    uint64_t x = opened(&other, ""); // on the GPU: 32 blocks
    assert_int_equal(step(&other, x, 1), 0);
    begin_move();
    move_until(KVQ__RELEASING);
    assert_int_equal(begin(&other, x, 9, 12 * PAGE, 0), 1);
    assert_int_equal(finish(&other, 1), 0);
    assert_int_equal(refused(), 0);
    leave_step(&other, x);
}

// ---- What a look costs, and what stops one ----

// Where no ticket can be had nothing is held against the sessions that were to go: one goes as soon
// as there is one.
SAVING_TEST(test_no_ticket)
{
    uint64_t handles[4], x = opened(&other, "x");
    fill_home(handles);
    pass(2 * SECOND);
    uint64_t looks = kit.core->evict.looks;
    kit.fail_one_in = 1;
    assert_int_equal(begin(&other, x, 9, SESSION, 0), 1);
    kit.fail_one_in = 0;
    assert_in_range(kit.core->evict.looks - looks, 1, 2);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(kit_of(&m, handles[i])->evict.try_after, 0);
    pass(10 * MS);
    assert_int_equal(finish(&other, kit_again(&other)), 0);
    assert_int_equal(evicted(), 1);
    leave_step(&other, x);
}

// Whoever has many sessions parked, or brought back, leaves tickets for those that have to go.
SAVING_TEST(test_many_tickets)
{
    enum { N = 64 };
    struct kvq__move_info info;
    kit.core->pools[0].budget = 16 * MIB;
    uint64_t b = fed(&m, "b"), x = opened(&other, "x");
    for (uint32_t i = 0; i < N; i++) { // which nobody writes as yet
        uint64_t a = opened(&m, "");
        assert_int_equal(step(&m, a, 1), 0);
        assert_int_equal(kvq__session_park(m.client, a, NULL, text), 0);
    }
    assert_int_equal(kvq__session_park(m.client, b, &info, text), KVQ_E_LIMIT);
    struct kvq__namespace *ns = kit_of(&m, b)->ns;
    ns->quota.limit[KVQ__HOST_BYTES] = ns->used[KVQ__HOST_BYTES];
    pass(2 * SECOND);
    assert_int_equal(begin(&other, x, 9, SESSION, 0), 1);
    assert_true(kit_of(&m, b)->park);
    assert_int_equal(finish(&other, 1), 0);
    leave_step(&other, x);
}

// A request that waits for sessions in use does not look at them at each turn, nor at any of them
// while one goes.
SAVING_TEST(test_looks)
{
    uint64_t handles[4], x = opened(&other, "x");
    hold_all(handles);
    pass(2 * SECOND);
    assert_int_equal(begin(&other, x, 9, SESSION, 0), 1);
    uint64_t looks = kit.core->evict.looks;
    for (uint32_t i = 0; i < 1000; i++) { // 100 ms, in which blocks come free all the time
        pass(MS / 10);
        something_is_freed();
        assert_int_equal(kit_again(&other), 1);
    }
    assert_in_range(kit.core->evict.looks - looks, 2, 100 / 5 * 2 + 2);
    let_go(handles);
    pass(10 * MS);
    assert_int_equal(kit_again(&other), 1);
    assert_int_equal(kit.core->evict.n, 1);
    looks = kit.core->evict.looks;
    for (uint32_t i = 0; i < 100; i++) {
        pass(10 * MS);
        assert_int_equal(kit_again(&other), 1);
    }
    assert_int_equal(kit.core->evict.looks, looks);
    assert_int_equal(finish(&other, 1), 0);
    leave_step(&other, x);
}

// Many that go end one soon after the other: who waits for somebody to be idle does not look at all
// sessions at each end.
SAVING_TEST(test_looks_while_some_go)
{
    uint64_t handles[4], x = opened(&other, "x"), y = opened(&m, "y");
    fill_home(handles);
    for (uint32_t i = 2; i < 4; i++)
        kvq__session_ref(kit_of(&m, handles[i]));
    pass(2 * SECOND);
    assert_int_equal(begin(&other, x, 9, SESSION, 0), 1);
    assert_int_equal(begin(&m, y, 9, 3 * SESSION, 0), 1);
    assert_int_equal(kit.core->evict.n, 1);
    uint64_t looks = kit.core->evict.looks;
    for (uint32_t i = 0; i < 100; i++) { // 10 ms
        pass(MS / 10);
        something_is_freed();
        kit.core->evict.ended++;
        assert_int_equal(kit_again(&other), 1);
        assert_int_equal(kit_again(&m), 1);
    }
    assert_in_range(kit.core->evict.looks - looks, 1, 10 / 5 * 2 + 2);
    for (uint32_t i = 2; i < 4; i++)
        kvq__session_unref(kit_of(&m, handles[i]));
    assert_int_equal(finish(&other, kit_again(&other)), 0);
    leave_step(&other, x);
    assert_int_equal(finish(&m, kit_again(&m)), 0);
    leave_step(&m, y);
}

// The blocks of a session's step were given up, and a request under way may still read them: the
// flight and a reference to the session. Besides it there are three sessions, which may go.
static struct kvq__session *give_up(uint64_t handles[3], struct kvq__flight *flight)
{
    uint64_t a = opened(&m, "");
    for (uint32_t i = 0; i < 3; i++)
        handles[i] = fed(&m, "");
    pass(2 * SECOND);
    assert_int_equal(begin(&m, a, 9, SESSION, 0), 0);
    struct kvq__session *s = kit_of(&m, a);
    kvq__flight_begin(kit.core, flight);
    kvq__session_ref(s);
    leave_step(&m, a);
    assert_int_equal(s->ns->arenas[0].deferred_bytes, SESSION_BYTES);
    return s;
}

// The request has ended.
static void read_up(struct kvq__session *s, struct kvq__flight *flight)
{
    kvq__session_unref(s);
    kvq__flight_end(kit.core, flight);
}

// Blocks that were given up and may still be read are waited for if they are enough, and not for
// long.
SAVING_TEST(test_given_up)
{
    uint64_t handles[3], x = opened(&other, "x");
    struct kvq__flight flight = {0};
    struct kvq__session *s = give_up(handles, &flight);
    assert_int_equal(begin(&other, x, 9, SESSION, 0), 1); // as much as that
    assert_int_equal(kit.core->tickets.last, 0);
    assert_int_equal(begin(&m, handles[2], 9, SESSION + PAGE, 0), 1); // more
    assert_int_equal(kit.core->tickets.last, 1);
    read_up(s, &flight);
    assert_int_equal(finish(&other, kit_again(&other)), 0);
    leave_step(&other, x);
    assert_int_equal(finish(&m, 1), 0);
    leave_step(&m, handles[2]);
    assert_int_equal(refused(), 0);
}

// Where a limit was lowered they are not waited for.
SAVING_TEST(test_given_up_above_a_limit)
{
    uint64_t handles[3];
    struct kvq__flight flight = {0};
    struct kvq__session *s = give_up(handles, &flight);
    kit_limit(&kit, "uid-1000", KVQ__HOST_BYTES, 3 * SESSION_BYTES);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->evict.n, 1);
    read_up(s, &flight);
    rest();
}

// They may never come free.
SAVING_TEST(test_given_up_for_ever)
{
    uint64_t handles[3], x = opened(&other, "x");
    struct kvq__flight flight = {0};
    struct kvq__session *s = give_up(handles, &flight);
    assert_int_equal(finish(&other, begin(&other, x, 9, SESSION, 0)), 0);
    assert_int_equal(evicted(), 1);
    read_up(s, &flight);
    leave_step(&other, x);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
