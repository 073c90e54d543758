// SPDX-License-Identifier: Apache-2.0
//
// Parked sessions and the rest of the core: what is stored of them and when it goes, clients that
// die, groups of shards, forks, prefixes, and the end of the daemon.
#include "tests/core/park_kit.h"

static struct kvq__move_info info; // of the last move

static struct kvq__store_job order; // that the core gave last

// Of a copy in the namespace of all of them.
static bool is_forgotten(const char *name, uint64_t stamp)
{
    return kvq__park_forgotten(kit.core, "uid-1000", name, stamp);
}

// ---- What is stored of it ----

SAVING_TEST(test_forgotten)
{
    struct kvq__session_spec dropping = {
        .name = "drop", .layers = rows, .n_layers = LAYERS, .on_detach = KVQ__DETACH_DROP};
    uint64_t a = open_as("it", LAYERS, 0), b = open_as("", LAYERS, 0);
    uint64_t kept = open_as("kept", LAYERS, 0), asked = open_as("asked", LAYERS, 0);
    uint64_t handle = kit_opened(&m, &dropping);
    uint64_t all[] = {a, b, handle, kept, asked};
    for (uint32_t i = 0; i < 5; i++)
        feed(all[i], 300);
    save("kept");
    for (uint32_t i = 0; i < 5; i++)
        away(all[i]);
    assert_int_equal(vault.n_sessions, 5);
    save("asked"); // there is nothing to write, but from now on it is to stay
    uint64_t stamp = vault_find(&vault, "it", 0)->saved.stamp;
    assert_false(is_forgotten("it", stamp));
    drop(a);
    assert_true(is_forgotten("it", stamp));
    drop(kept);
    drop(asked);
    assert_int_equal(kvq__session_close(m.client, b, text), 0);
    assert_int_equal(kvq__session_close(m.client, handle, text), 0);
    assert_int_equal(kit.core->disk.n_offloaded, 0);
    assert_int_equal(vault_serve(&vault, kit.core), 3);
    assert_int_equal(vault.n_sessions, 2);
    assert_true(vault_find(&vault, "kept", 0) && vault_find(&vault, "asked", 0));
    assert_true(is_forgotten("it", stamp)); // for whoever has found it before
    kit_tick(&kit, 100000000000u);
    assert_false(is_forgotten("it", stamp));
    // One that ends while it is written, and one whose time is over.
    a = fed("", 300, 0);
    kit_pack(&kit);
    struct kvq__save *save = begin_writing(a, &order, &stamp);
    drop(a);
    end_writing(save, &order);
    assert_int_equal(ask(stamp).status, KVQ_E_CANCELLED);
    assert_int_equal(vault_serve(&vault, kit.core), 1);
    a = fed("old", 300, 0);
    away(a);
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    kit_tick(&kit, 100000000000u);
    assert_int_equal(kit.core->n_sessions, 0);
    settle();
    assert_int_equal(vault.n_sessions, 2);
}

// The disk fails while what is stored of it is to go: it stays hidden, and goes later.
SAVING_TEST(test_not_forgotten)
{
    uint64_t a = fed("it", 300, 0);
    away(a);
    uint64_t stamp = vault_find(&vault, "it", 0)->saved.stamp;
    vault.fail = KVQ_E_SYSTEM;
    drop(a);
    assert_int_equal(vault_serve(&vault, kit.core), 1);
    assert_int_equal(vault_serve(&vault, kit.core), 0); // not at once again
    for (uint32_t i = 0; i < 3; i++) {
        kit_tick(&kit, 100000000000u);
        assert_true(is_forgotten("it", stamp));
        assert_true(kvq__park_next(kit.core, &order));
        assert_int_equal(order.kind, KVQ__JOB_FORGET);
        assert_int_equal(order.stamp, stamp);
        assert_false(kvq__park_next(kit.core, &order));                       // while it is tried
        assert_false(kvq__park_forgot(kit.core, &order, KVQ__FORGET_FAILED)); // that was told
    }
    assert_int_equal(vault.n_sessions, 1);
    vault.fail = 0;
    kit_tick(&kit, 100000000000u);
    assert_int_equal(vault_serve(&vault, kit.core), 1);
    assert_int_equal(vault.n_sessions, 0);
    assert_true(is_forgotten("it", stamp));
    kit_tick(&kit, 100000000000u);
    assert_false(is_forgotten("it", stamp));
    assert_int_equal(vault_serve(&vault, kit.core), 0);
    // The first failure is told, and a copy that somebody uses is none.
    a = fed("it", 300, 0);
    away(a);
    drop(a);
    assert_true(kvq__park_next(kit.core, &order));
    const struct kvq__store_job in_line = order;
    assert_false(kvq__park_forgot(kit.core, &in_line, KVQ__FORGET_IN_USE));
    kit_tick(&kit, 100000000000u);
    assert_false(kvq__park_next(kit.core, &order)); // whoever has it goes on by himself
    assert_true(kvq__park_forgot(kit.core, &in_line, KVQ__FORGET_FAILED));
    kit_tick(&kit, 100000000000u);
    assert_true(kvq__park_next(kit.core, &order));
    kvq__park_forgot(kit.core, &order, KVQ__FORGET_IN_USE);
    kvq__park_forgot(kit.core, &order, KVQ__FORGET_GONE);
    kit_tick(&kit, 100000000000u);
    assert_false(kvq__park_next(kit.core, &order));
    assert_false(is_forgotten("it", order.stamp));
}

// Of many that end at once a few are deleted at a time, in the order in which they ended.
SAVING_TEST(test_many_forgotten)
{
    enum { MANY = 10, OUT = 4 };
    uint64_t handles[MANY], stamps[MANY], ids[MANY];
    struct kvq__store_job third = {0};
    char name[16];
    for (uint32_t i = 0; i < MANY; i++) {
        handles[i] = fed("", 130, 0);
        away(handles[i]);
        stamps[i] = session_of(handles[i])->saving.stamp;
        ids[i] = session_of(handles[i])->id;
    }
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(kvq__session_close(m.client, handles[i], text), 0);
    for (uint32_t i = 0; i < OUT; i++) {
        assert_true(kvq__park_next(kit.core, &order));
        assert_int_equal(order.stamp, stamps[i]);
        third = i == 2 ? order : third;
    }
    assert_false(kvq__park_next(kit.core, &order));
    kvq__park_forgot(kit.core, &third, KVQ__FORGET_IN_USE); // it keeps no other one waiting
    assert_true(kvq__park_next(kit.core, &order));
    assert_int_equal(order.stamp, stamps[OUT]);
    assert_false(kvq__park_next(kit.core, &order));
    // Its turn comes again, behind the others.
    kvq__park_forgot(kit.core, &third, KVQ__FORGET_FAILED);
    assert_false(kvq__park_next(kit.core, &order));
    for (uint32_t i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "#%llu", (unsigned long long)ids[i]);
        assert_true(is_forgotten(name, stamps[i]));
    }
    vault_forget(&vault, order.name, order.stamp);
    kvq__park_forgot(kit.core, &order, KVQ__FORGET_GONE);
    assert_int_equal(vault_serve(&vault, kit.core), MANY - OUT - 1);
    kit_tick(&kit, 100000000000u);
    assert_true(kvq__park_next(kit.core, &order));
    assert_int_equal(order.stamp, stamps[2]);
    assert_false(kvq__park_next(kit.core, &order));
    snprintf(name, sizeof name, "#%llu", (unsigned long long)ids[OUT]);
    assert_false(is_forgotten(name, stamps[OUT]));
}

// Something else was put under its name, with the same stamp, as an import of an export does: it
// stays and is seen, however far the deletion of the copy before it has come.
SAVING_TEST(test_kept_after_all)
{
    for (uint32_t phase = 0; phase < KVQ__FORGET_PHASES; phase++) {
        uint64_t a = fed("it", 300, 0);
        away(a);
        uint64_t stamp = session_of(a)->saving.stamp;
        drop(a);
        assert_true(is_forgotten("it", stamp));
        assert_false(is_forgotten("other", stamp)); // the export went there
        assert_false(kvq__park_forgotten(kit.core, "uid-1001", "it", stamp));
        if (phase != KVQ__FORGET_WAITS)
            assert_true(kvq__park_next(kit.core, &order));
        if (phase == KVQ__FORGET_IN_LINE)
            kvq__park_forgot(kit.core, &order, KVQ__FORGET_IN_USE);
        if (phase == KVQ__FORGET_LATER)
            kvq__park_forgot(kit.core, &order, KVQ__FORGET_FAILED);
        if (phase == KVQ__FORGET_DONE)
            kvq__park_forgot(kit.core, &order, KVQ__FORGET_GONE);
        kvq__park_keep(kit.core, "uid-1000", "its");
        kvq__park_keep(kit.core, "uid-1000", "i");
        kvq__park_keep(kit.core, "uid-1001", "it");
        assert_true(is_forgotten("it", stamp));
        kvq__park_keep(kit.core, "uid-1000", "it");
        assert_false(is_forgotten("it", stamp));
        if (phase == KVQ__FORGET_TAKEN || phase == KVQ__FORGET_IN_LINE) // its end comes late
            assert_false(kvq__park_forgot(kit.core, &order, KVQ__FORGET_FAILED));
        kit_tick(&kit, 100000000000u);
        assert_false(kvq__park_next(kit.core, &order));
        assert_false(kvq__park_last_forget(kit.core, &order));
        assert_false(is_forgotten("it", stamp));
    }
}

// At the daemon's end the rest of them: those with names, which the next start would find.
SAVING_TEST(test_last_forgets)
{
    enum { MANY = 12 };
    uint64_t handles[MANY];
    char name[16];
    for (uint32_t i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "s%u", i);
        handles[i] = fed(i % 2 ? name : "", 130, 0);
        away(handles[i]);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        if (i % 2)
            drop(handles[i]);
        else
            assert_int_equal(kvq__session_close(m.client, handles[i], text), 0);
    }
    assert_true(kvq__park_next(kit.core, &order));
    assert_true(kvq__park_forgot(kit.core, &order, KVQ__FORGET_FAILED));
    assert_true(kvq__park_next(kit.core, &order));
    assert_string_equal(order.name, "s1");
    kvq__park_forgot(kit.core, &order, KVQ__FORGET_IN_USE);
    kvq__park_forgot(kit.core, &order, KVQ__FORGET_FAILED);
    for (uint32_t i = 0; i < MANY / 2; i++) {
        assert_true(kvq__park_last_forget(kit.core, &order));
        assert_int_equal(order.kind, KVQ__JOB_FORGET);
        snprintf(name, sizeof name, "s%u", i < MANY / 2 - 1 ? 2 * i + 3 : 1);
        assert_string_equal(order.name, name);
    }
    assert_false(kvq__park_last_forget(kit.core, &order));
}

// Its client goes while it is away, and while it comes back.
SAVING_TEST(test_client_goes)
{
    struct member other;
    struct kvq__session_spec spec = {.layers = rows, .n_layers = LAYERS};
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(member_open(&kit, &other, 1000, BUFFER), 0);
        memcpy(other.memory, m.memory, BUFFER);
        uint64_t handle = kit_opened(&other, &spec);
        assert_int_equal(kit_step(&other, handle, 300, HEADS, DIM), 0);
        kit_pack(&kit);
        struct kvq__move_info moved;
        struct kvq__restore *r = NULL;
        assert_int_equal(kvq__session_park(other.client, handle, &moved, text), 0);
        settle();
        assert_int_equal(kit.core->disk.n_offloaded, 1);
        if (i > 0)
            assert_int_equal(kvq__session_prefetch(other.client, handle, &moved, text), 0);
        if (i > 1) {
            assert_true(kvq__park_next(kit.core, &order));
            assert_int_equal(vault_fetch(&vault, kit.core, &order, &r), 0);
        }
        member_close(&other);
        core_check(kit.core);
        if (r)
            kvq__restore_end(&r, KVQ_E_CANCELLED);
        settle();
        assert_int_equal(vault.n_sessions, 0);
        assert_int_equal(kit.core->n_sessions, 0);
    }
}

// It is dropped while memory is taken for it.
SAVING_TEST(test_dropped_before_it_has_room)
{
    struct kvq__restore *r;
    uint64_t a = fed("", 300, 0);
    away(a);
    kvq__fetch_ask(kit_of(&m, a));
    assert_true(kvq__park_next(kit.core, &order));
    const struct vault_session *from = vault_find(&vault, order.name, 0);
    struct kvq__restore_spec spec = {
        .saved = &from->saved, .parts = from->parts, .n_parts = from->n, .good_tokens = UINT64_MAX};
    assert_int_equal(kvq__fetch_begin(kit.core, order.id, &spec, &r, text), 0);
    core_check(kit.core);
    drop(a);
    assert_int_equal(kvq__restore_reserve(r, text), KVQ_E_CANCELLED);
    kvq__restore_end(&r, KVQ_E_CANCELLED);
    core_check(kit.core);
    assert_int_equal(kvq__fetch_begin(kit.core, order.id, &spec, &r, text), KVQ_E_CANCELLED);
    settle();
    assert_int_equal(vault.n_sessions, 0);
}

// It is wanted back while its blocks still go.
SAVING_TEST(test_wanted_while_it_goes)
{
    uint64_t a = fed("", 700, 0);
    kit_pack(&kit);
    assert_int_equal(kvq__session_park(m.client, a, &info, text), 0);
    struct kvq__park *ticket = kit_of(&m, a)->park;
    kvq__park_leave(kit_of(&m, a));        // what a poll does, but for the rest of it
    ticket->ticket.phase = KVQ__RELEASING; // no writing, no leaving
    kvq__session_saved(kit_of(&m, a), kit_of(&m, a)->saving.commits);
    kit_of(&m, a)->saving.stored = true;
    kvq__fetch_ask(kit_of(&m, a));
    assert_false(kvq__park_next(kit.core, &order));
    while (kvq__parks_poll(kit.core))
        core_check(kit.core);
    assert_true(kvq__park_next(kit.core, &order));
    assert_int_equal(order.kind, KVQ__JOB_FETCH);
}

// It is asked to be parked while it comes back: once it is there, if it ever is.
SAVING_TEST(test_parked_while_it_comes_back)
{
    struct kvq__store_job order, none;
    struct kvq__restore *r;
    uint64_t a = fed("", 700, 0), b = fed("", 700, 0);
    for (uint32_t fails = 0; fails < 2; fails++) {
        away(a);
        kvq__fetch_ask(kit_of(&m, a));
        assert_true(kvq__park_next(kit.core, &order));
        assert_int_equal(kvq__session_park(m.client, a, &info, text), KVQ_E_BUSY);
        assert_int_equal(vault_fetch(&vault, kit.core, &order, &r), 0);
        assert_int_equal(kvq__session_parkable(session_of(a), text), KVQ_E_BUSY);
        assert_int_equal(kvq__session_park(m.client, a, &info, text), 0);
        assert_false(kvq__park_next(kit.core, &none));
        if (fails)
            kvq__restore_end(&r, KVQ_E_SYSTEM);
        else
            assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, order.name, 0)), 0);
        core_check(kit.core);
        assert_int_equal(kvq__is_offloaded(session_of(a)), fails);
        settle();
        assert_true(kvq__is_offloaded(session_of(a)));
        assert_int_equal(ask(info.id).status, fails ? KVQ_E_SYSTEM : 0);
        wake(a);
        go_on_alike(a, b, 0);
    }
}

// ---- Shards ----

static uint64_t open_shard(uint32_t shard)
{
    struct kvq__session_spec spec = {
        .name = "group", .layers = rows, .n_layers = LAYERS, .shard = shard, .shards = 2};
    return kit_opened(&m, &spec);
}

static void step_both(const uint64_t handles[2], uint32_t n)
{
    struct kvq_entry_wire e[2];
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 2);
    uint64_t at = session_of(handles[0])->tokens;
    for (int i = 0; i < 2; i++)
        e[i] = (struct kvq_entry_wire){
            .handle = handles[i], .position = at, .row = (uint32_t)at, .append = n};
    r.step = 8;
    int rc = kit_request(&m, &r, e);
    if (rc == 1) {
        settle();
        assert_int_equal(kvq__request_continue(m.queue), KVQ__DONE);
        assert_int_equal(kvq__queue_results(m.queue)[1].status, 0);
    }
    append_both(8, e);
}

SAVING_TEST(test_groups)
{
    uint64_t h[2] = {open_shard(0)};
    refused(h[0], KVQ_E_INCOMPLETE, "shard 1");
    h[1] = open_shard(1);
    step_both(h, 600);
    kit_pack(&kit);
    struct kvq_entry_wire e = {.handle = h[1], .position = 600, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    refused(h[0], KVQ_E_BUSY, "step"); // the other shard is
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 0);
    away(h[0]);
    assert_true(kvq__is_offloaded(session_of(h[1])));
    assert_int_equal(kit.core->disk.n_offloaded, 2);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    step_both(h, 100); // all are asked for at once
    assert_int_equal(session_of(h[1])->tokens, 700);
    away(h[1]);
    assert_int_equal(kvq__session_prefetch(m.client, h[0], &info, text), 0);
    struct kvq__restore *r[2];
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(kvq__park_next(kit.core, &order));
        assert_int_equal(order.shard, i);
        assert_int_equal(vault_fetch(&vault, kit.core, &order, &r[i]), 0);
        core_check(kit.core);
    }
    assert_int_equal(vault_rest(&vault, &r[0], vault_find(&vault, "group", 0)), 0);
    assert_false(ask(info.id).finished);
    assert_int_equal(vault_rest(&vault, &r[1], vault_find(&vault, "group", 1)), 0);
    assert_true(ask(info.id).finished);
    away(h[0]); // one is back, and was changed: all have to be, to be saved
    r[0] = begin_fetch(h[0], &order);
    assert_int_equal(vault_rest(&vault, &r[0], vault_find(&vault, "group", 0)), 0);
    kvq__session_changed(kit_of(&m, h[0]));
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "group"};
    assert_int_equal(vault_save(&vault, kit.core, &spec, NULL), 1);
    settle();
    bool stored;
    assert_int_equal(vault_save(&vault, kit.core, &spec, &stored), 0);
    assert_true(stored);
    away(h[0]); // one shard is damaged: both go
    vault.lost_from = 100;
    kvq__fetch_ask(kit_of(&m, h[0]));
    settle();
    assert_int_equal(kit.core->n_sessions, 0);
    assert_int_equal(vault.n_sessions, 2);
}

// ---- With everything else ----

// Blocks that others have stay with them; what comes back has its own.
SAVING_TEST(test_forks)
{
    uint64_t fork;
    rows[1].window = 0;
    uint64_t a = fed("", 900, 5), b = fed("", 900, 5);
    kit_pack(&kit);
    struct kvq_entry_wire e = {.handle = a, .position = 384};
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), 0);
    assert_true(kvq__park_frees(session_of(a)) < kit.core->pools[0].used_bytes);
    away(a);
    feed(fork, 500);
    away(fork);
    e.handle = a; // forking what is away brings it back
    struct kvq_request r = kit_header(KVQ_OP_FORK, 1);
    assert_int_equal(kit_request(&m, &r, &e), 1);
    settle();
    assert_int_equal(kit_again(&m), 0);
    uint64_t again = kvq__queue_results(m.queue)[0].value;
    feed(again, 500);
    wake(fork);
    same_bits(fork, again);
    go_on_alike(a, b, 5);
}

static uint64_t open_with(uint64_t prefix)
{
    struct kvq__session_spec spec = {
        .model = "m",
        .layers = rows,
        .n_layers = LAYERS,
        .prefix = {.buffer = m.buffer, .offset = m.ids_at, .tokens = prefix}};
    return kit_opened(&m, &spec);
}

static void reclaim(struct kvq__namespace *ns)
{
    while (kvq__prefix_reclaim(kit.core, ns, &kit.core->pools[0], KVQ_E_QUOTA, NULL))
        continue;
}

// A prefix's blocks stay with the index; a session that is away, or whose layers are not there yet,
// adds nothing to it.
SAVING_TEST(test_prefix)
{
    struct kvq__restore *r;
    set_rows("f16");
    rows[1].window = 0;
    m.ids_at = 64; // any numbers will do
    uint64_t a = open_with(0), b = open_with(0);
    feed(a, 600);
    feed(b, 600);
    struct kvq__namespace *ns = kit_of(&m, a)->ns;
    kvq__core_tick(kit.core);
    assert_int_equal(ns->prefixes.n_nodes, 4);
    away(a);
    drop(b);
    reclaim(ns);
    kit_of(&m, a)->ids.sealed = 0; // as if there had been no memory for it
    kvq__prefix_note(kit_of(&m, a));
    kvq__core_tick(kit.core);
    assert_int_equal(ns->prefixes.n_nodes, 0);
    r = begin_fetch(a, &order);
    kvq__core_tick(kit.core);
    assert_int_equal(ns->prefixes.n_nodes, 0);
    assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, order.name, 0)), 0);
    kvq__core_tick(kit.core);
    assert_int_equal(ns->prefixes.n_nodes, 4);
    away(a);
    kit_of(&m, a)->foreign = true; // as if some had been another namespace's
    b = open_with(600);            // its blocks are there all the same
    assert_int_equal(session_of(b)->tokens, 512);
    feed(b, 600);
    wake(a);
    assert_false(session_of(a)->foreign);
    same_bits(a, b);
}

SAVING_TEST(test_core_closes)
{
    uint64_t a = fed("", 300, 0), b = fed("it", 300, 0);
    away(a);
    away(b);
    fed("", 300, 0);
    kvq__fetch_ask(kit_of(&m, a));
    assert_true(kvq__park_next(kit.core, &order));
    kit_close(&kit); // tickets, orders and what is away go; what is stored stays
    assert_int_equal(vault.n_sessions, 2);
    open_kit();
}

// A session that is only kept is saved before it leaves memory; if that cannot be done it goes a
// minute later, and one that could never be saved at once. Each time the log says why.
SAVING_TEST(test_kept_till_saved)
{
    const uint64_t second = 1000000000u;
    struct kvq__unsaved list[4];
    for (int can = 0; can < 2; can++) {
        uint64_t a = fed("it", 10, 0);
        assert_int_equal(kvq__session_close(m.client, a, text), 0);
        assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_LEFT, 0, list, 4), 0);
        kit_pass(&kit, kit.core->config.keep_ns);
        for (int i = 0; i < 2; i++) { // however long the save waits for its turn
            kvq__core_tick(kit.core);
            assert_int_equal(kit.core->n_sessions, 1);
            assert_int_equal(kvq__core_unsaved(kit.core, KVQ__UNSAVED_LEFT, 0, list, 4), 1);
            kit_pass(&kit, 100 * second);
        }
        if (can)
            save("it");
        else
            kvq__unsaved_failed(kit.core, list[0].ns, "it");
        kvq__core_tick(kit.core);
        assert_int_equal(kit.core->n_sessions, 0);
    }
    uint64_t a = fed("it", 10, 0);
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    kit_pass(&kit, kit.core->config.keep_ns);
    kvq__unsaved_failed(kit.core, list[0].ns, "it");
    kit_tick(&kit, 59 * second);
    assert_int_equal(kit.core->n_sessions, 1);
    kit_tick(&kit, second);
    assert_int_equal(kit.core->n_sessions, 0);
    a = open_as("empty", LAYERS, 0);
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    kit_tick(&kit, kit.core->config.keep_ns);
    assert_int_equal(kit.core->n_sessions, 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
