// SPDX-License-Identifier: Apache-2.0
//
// Parking against a store in memory: a session whose memory was freed goes on to the bit as its
// twin that never left, waits are told apart from failures, and who is in use stays.
#include "tests/core/park_kit.h"

static struct kvq__store_job order; // that the core gave last

// ---- There and back ----

static void check_format(const char *format, uint64_t tokens, uint32_t rollback, const char *name)
{
    set_rows(format);
    uint64_t a = fed(name, tokens, rollback), b = fed("", tokens, rollback);
    for (uint32_t round = 0; round < 2; round++) { // once more in another state
        kit_pack(&kit);
        uint64_t used = kit.core->pools[0].used_bytes;
        away(a);
        assert_true(tokens == 0 || kit.core->pools[0].used_bytes < used);
        wake(a);
        go_on_alike(a, b, rollback);
    }
    drop(a);
    drop(b);
    settle();
    assert_int_equal(vault.n_sessions, 0);
}

SAVING_TEST(test_all_formats)
{
    static const uint64_t counts[] = {40, 513, 1100};
    uint32_t n = 0;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        if (kvq_has_centroids(f))
            continue;
        check_format(f->name, counts[n % 3], n % 2 ? 11 : 0, n % 4 < 2 ? "it" : "");
        n++;
    }
    assert_true(n > 10);
    for (uint32_t tokens = 1; tokens < 3; tokens++)
        check_format("oscar2", tokens, 0, "");
    check_format("ott2", 700, 0, "it");
    check_format("kivi2:sink=32", 700, 3, "");
}

// A prompt in full precision holds no memory while it is away.
SAVING_TEST(test_prompt)
{
    struct kvq__session_spec spec = {
        .layers = rows, .n_layers = LAYERS, .prompt_tokens = 1500, .max_rollback = 0};
    uint64_t a = kit_opened(&m, &spec), b = kit_opened(&m, &spec);
    feed(a, 700);
    feed(b, 700);
    assert_int_equal(session_of(a)->prompt.exact, 1500);
    assert_int_equal(kit.core->prompts.n, 2);
    away(a);
    assert_int_equal(kit.core->prompts.n, 1);
    wake(a);
    assert_int_equal(kit.core->prompts.n, 2);
    go_on_alike(a, b, 0);
}

// All that is counted while it is away, and what it keeps.
SAVING_TEST(test_what_is_away)
{
    struct kvq__session_info info;
    struct kvq__counts stats;
    uint64_t a = fed("it", 900, 0);
    assert_int_equal(kvq__session_info(m.client, a, &info, text), 0);
    assert_false(info.offloaded);
    uint64_t held = kvq__park_frees(session_of(a));
    assert_int_equal(held, kit.core->pools[0].used_bytes);
    away(a);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    assert_int_equal(kvq__session_info(m.client, a, &info, text), 0);
    assert_true(info.offloaded && info.saved);
    assert_int_equal(info.packed_bytes + info.window_bytes + info.shared_bytes, 0);
    assert_int_equal(info.tokens, 900);
    assert_true(info.table_bytes < 16384);
    kvq__core_counts(kit.core, &stats);
    assert_int_equal(stats.offloaded_now, 1);
    assert_int_equal(stats.parked_asked, 1);
    assert_int_equal(kit.events[KVQ__EVENT_SESSION_PARKED], 1);
    wake(a);
    kvq__core_counts(kit.core, &stats);
    assert_int_equal(stats.offloaded_now, 0);
    assert_int_equal(stats.fetched, 1);
    assert_true(stats.fetched_bytes > 0);
    assert_int_equal(kit.events[KVQ__EVENT_SESSION_FETCHED], 1);
    assert_int_equal(kvq__session_info(m.client, a, &info, text), 0);
    assert_false(info.offloaded);
}

// What is saved and unchanged needs no writing; blocks that are stored are not written again.
SAVING_TEST(test_nothing_to_write)
{
    struct kvq__move_info info;
    uint64_t a = fed("it", 900, 0);
    save("it");
    uint64_t put = vault.put;
    assert_int_equal(kvq__session_park(m.client, a, &info, text), 0);
    settle();
    assert_true(kvq__is_offloaded(session_of(a)));
    assert_int_equal(vault.put, put);
    wake(a);
    vault_find(&vault, "it", 0)->saved.stamp = 5; // what is stored is another one
    away(a);
    assert_true(vault.put > put); // what cannot change is there all the same
    wake(a);
    put = vault.put;
    feed(a, 901);
    away(a);
    assert_true(vault.put - put <= 2 * OWNED); // the page that is being filled, of each layer
    assert_int_equal(park(a), 0);              // it is away
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    a = open_as("it", 0, 0); // which asks for it
    assert_int_equal(vault_serve(&vault, kit.core), 1);
    assert_false(kvq__is_offloaded(session_of(a)));
}

// Requests on layers that are there go on, others wait.
SAVING_TEST(test_layers_answer_as_they_come)
{
    static uint8_t x[OUT_BYTES], y[OUT_BYTES];
    uint64_t a = fed("", 700, 0), b = fed("", 700, 0);
    away(a);
    struct kvq__restore *r = begin_fetch(a, &order);
    assert_true(order.name[0] == '#');
    core_check(kit.core);
    const struct vault_session *from = vault_find(&vault, order.name, 0);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    assert_int_equal(attend(a, 0, x), 0);
    assert_int_equal(attend(b, 0, y), 0);
    assert_memory_equal(x, y, OUT_BYTES);
    assert_int_equal(attend(a, 3, x), 0); // reads layer 0's
    assert_int_equal(attend(a, 1, x), 1);
    core_check(kit.core);
    assert_int_equal(vault_layer(&vault, r, from, 1), 0);
    assert_int_equal(kit_again(&m), 0);
    assert_int_equal(vault_layer(&vault, r, from, 2), 0);
    kvq__restore_end(&r, 0);
    go_on_alike(a, b, 0);
}

// ---- Who stays ----

SAVING_TEST(test_in_use)
{
    struct kvq__save *save;
    struct kvq__move_info info;
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "it"};
    struct kvq__session_info read;
    struct kvq__session_spec reader = {.name = "it", .flags = KVQ__OPEN_READ_ONLY};
    uint64_t a = fed("it", 300, 0);
    kit_pack(&kit);
    struct kvq_entry_wire e = {.handle = a, .position = 300, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    refused(a, KVQ_E_BUSY, "step of client");
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 0);
    assert_int_equal(kvq__save_begin(kit.core, &admin, &spec, &save, text), 0);
    refused(a, KVQ_E_BUSY, "saves it");
    assert_int_equal(kvq__save_copy(save), 0);
    kvq__save_end(&save, false);
    struct kvq__table_memory memory = {.layers = LAYERS, .pages = 8};
    assert_non_null(memory.host = calloc(1, kvq_table_bytes(LAYERS, 8)));
    assert_int_equal(kvq__table_open(m.client, a, 1ull << 40, &memory, text), 0);
    refused(a, KVQ_E_BUSY, "own context");
    assert_int_equal(kvq__table_close(m.client, a, text), 0);
    free(memory.host);
    assert_int_equal(kvq__session_pin(m.client, a, true, text), 0);
    refused(a, KVQ_E_BUSY, "pinned");
    assert_int_equal(kvq__session_pin_named(kit.core, &admin, "uid-1000", "it", false, text), 0);
    assert_int_equal(kvq__session_open(m.client, &reader, &read, text), 0);
    assert_int_equal(kvq__session_park(m.client, read.handle, &info, text), KVQ_E_READ_ONLY);
    assert_int_equal(kvq__session_pin(m.client, read.handle, true, text), KVQ_E_READ_ONLY);
    // Both at once: the second is told.
    assert_int_equal(kvq__session_park(m.client, a, &info, text), 0);
    refused(a, KVQ_E_BUSY, "already");
    settle();
    assert_true(kvq__is_offloaded(session_of(a)));
    assert_int_equal(kvq__session_prefetch(m.client, read.handle, &info, text), 0);
    assert_int_equal(kvq__session_park(m.client, a, &info, text), KVQ_E_BUSY);
    settle();
    assert_false(kvq__is_offloaded(session_of(a)));
    kvq__core_drain(kit.core);
    refused(a, KVQ_E_DRAINING, "shutting down");
    kit_close(&kit);
    kit_saves(false);
    open_kit();
    refused(open_as("it", LAYERS, 0), KVQ_E_UNSUPPORTED, "storage_dir");
}

// Between the writing and the end somebody uses it: it stays, and is saved.
SAVING_TEST(test_used_meanwhile)
{
    uint64_t ticket;
    uint64_t a = open_as("", LAYERS, 0), b = open_as("", LAYERS, 0);
    for (uint32_t changes = 0; changes < 2; changes++) {
        feed(a, 300 + changes);
        feed(b, 300 + changes);
        kit_pack(&kit);
        struct kvq__save *save = begin_writing(a, &order, &ticket);
        uint64_t at = session_of(a)->tokens;
        struct kvq_entry_wire e = {.handle = a, .position = at, .append = 1};
        if (changes) {
            feed(a, at + 1);
            feed(b, at + 1);
        } else {
            assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
        }
        end_writing(save, &order);
        assert_false(kvq__is_offloaded(session_of(a)));
        struct kvq__move_info info = ask(ticket);
        assert_int_equal(info.status, KVQ_E_BUSY);
        assert_true(info.finished && strstr(info.text, changes ? "changed" : "step"));
        if (!changes)
            assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 0);
    }
    go_on_alike(a, b, 0);
}

// Packing that nobody asked for is no use, but has to end first.
SAVING_TEST(test_packed_meanwhile)
{
    uint64_t ticket;
    uint64_t a = fed("", 700, 0), b = fed("", 700, 0);
    struct kvq__save *save = begin_writing(a, &order, &ticket);
    struct kvq__job *job = kvq__background_start(kit.core);
    assert_non_null(job);
    assert_ptr_equal(kit.core->packing.packer.session, session_of(a));
    end_writing(save, &order);
    assert_false(kvq__is_offloaded(session_of(a)));
    assert_false(ask(ticket).finished);
    kit_run_job(&kit, job);
    kvq__background_done(kit.core);
    settle();
    assert_true(kvq__is_offloaded(session_of(a)));
    wake(a);
    go_on_alike(a, b, 0);
}

// The disk is full: it stays as it was, and works on.
SAVING_TEST(test_no_space)
{
    uint64_t a = fed("", 600, 0), b = fed("", 600, 0);
    vault.fail = KVQ_E_NO_SPACE;
    assert_int_equal(park(a), KVQ_E_NO_SPACE);
    assert_says(text, "broken");
    assert_false(kvq__is_offloaded(session_of(a)));
    assert_int_equal(park(a), KVQ_E_NO_SPACE);
    assert_int_equal(kit.events[KVQ__EVENT_SESSION_PARKED], 0);
    assert_int_equal(kit.events[KVQ__EVENT_NOT_PARKED], 1); // not for each time
    kit_pass(&kit, 1000000000);
    assert_int_equal(park(a), KVQ_E_NO_SPACE);
    assert_int_equal(kit.events[KVQ__EVENT_NOT_PARKED], 2);
    vault.fail = 0;
    go_on_alike(a, b, 0);
    away(a);
    assert_int_equal(kit.events[KVQ__EVENT_SESSION_PARKED], 1);
    wake(a);
    go_on_alike(a, b, 0);
}

// ---- What keeps it from coming back ----

static int ask_in_vain(uint64_t handle)
{
    struct kvq_entry_wire e = {
        .handle = handle, .position = session_of(handle)->tokens, .queries = QUERIES};
    struct kvq_request r = attend_of(0);
    assert_int_equal(kit_request(&m, &r, &e), 1);
    settle();
    assert_int_equal(kvq__request_continue(m.queue), KVQ__DONE);
    return kvq__queue_results(m.queue)[0].status;
}

// Who waits is told; the session stays where it is, and comes back when there is room.
SAVING_TEST(test_no_room)
{
    struct kvq__counts stats;
    uint64_t a = open_as("", LAYERS, 0), b = open_as("", LAYERS, 0);
    m.ids_at = 64; // any numbers will do
    feed(a, 1500);
    m.ids_at = 0;
    feed(b, 1500);
    away(a);
    away(b);
    struct kvq__pool *pool = &kit.core->pools[0];
    uint64_t budget = pool->budget, known = kit_of(&m, a)->ids.known;
    assert_int_equal(known, 1500);
    kvq__pools_trim(kit.core, 0, UINT64_MAX);
    pool->budget = pool->extent_bytes - 1; // for no extent
    assert_int_equal(ask_in_vain(a), KVQ_E_NO_MEMORY);
    assert_true(kvq__is_offloaded(session_of(a)));
    assert_int_equal(ask_in_vain(a), KVQ_E_NO_MEMORY); // asked for anew
    kvq__core_counts(kit.core, &stats);
    assert_int_equal(stats.fetch_failed, 2);
    assert_int_equal(pool->used_bytes, 0);
    pool->budget = budget;
    wake(a);
    wake(b);
    assert_int_equal(kit_of(&m, a)->ids.known, known);
    go_on_alike(a, b, 0);
    away(a);
    struct kvq__namespace *ns = kit_of(&m, a)->ns;
    ns->quota.limit[KVQ__HOST_BYTES] = ns->used[KVQ__HOST_BYTES];
    assert_int_equal(ask_in_vain(a), KVQ_E_QUOTA);
    ns->quota.limit[KVQ__HOST_BYTES] = 0;
    for (uint32_t i = 1; i < 40; i++) {
        kit.fail_one_in = i;
        kvq__fetch_ask(kit_of(&m, a));
        settle();
        kit.fail_one_in = 0;
        if (!kvq__is_offloaded(session_of(a)))
            away(a);
    }
    wake(a);
    go_on_alike(a, b, 0);
}

// The disk fails to be read for a while: nothing is lost. What is damaged stays so: handles say
// so, and opening it again brings back what is good.
SAVING_TEST(test_damage)
{
    struct kvq__session_info info;
    uint64_t a = fed("it", 700, 0), b = fed("", 700, 0);
    away(a);
    away(b);
    vault.fail = KVQ_E_SYSTEM;
    assert_int_equal(ask_in_vain(a), KVQ_E_SYSTEM);
    assert_true(kvq__is_offloaded(session_of(a)));
    vault.fail = 0;
    vault.lost_from = 600;
    assert_int_equal(kit.core->n_sessions, 2);
    assert_int_equal(ask_in_vain(a), KVQ_E_DAMAGED);
    assert_int_equal(kit.core->n_sessions, 1);
    assert_int_equal(kvq__session_info(m.client, a, &info, text), KVQ_E_DAMAGED);
    assert_says(text, "open the session again");
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    settle();
    assert_non_null(vault_find(&vault, "it", 0));
    a = restore_up_to("it", 600);
    assert_true(session_of(a)->tokens <= 600);
    feed(a, 700);
    // One without a name is gone for good, and so is what was stored of it.
    assert_int_equal(ask_in_vain(b), KVQ_E_DAMAGED);
    settle();
    assert_int_equal(vault.n_sessions, 1);
}

// One layer is there, in the middle of a fetch.
static struct kvq__restore *begin_reading(uint64_t handle)
{
    away(handle);
    struct kvq__restore *r = begin_fetch(handle, &order);
    assert_int_equal(vault_layer(&vault, r, vault_find(&vault, order.name, 0), 0), 0);
    return r;
}

static void is_whole(uint64_t a, uint64_t b)
{
    assert_true(kvq__is_offloaded(session_of(a)));
    assert_null(session_of(a)->restore);
    core_check(kit.core);
    assert_int_equal(vault.n_sessions, 1);
    wake(a);
    go_on_alike(a, b, 0);
}

// The disk fails while layers come, whoever is there: it is away again, and only an open step is
// lost.
SAVING_TEST(test_fails_midway)
{
    uint64_t a = fed("", 700, 0), b = fed("", 700, 0);
    struct kvq__restore *r = begin_reading(a);
    kvq__restore_end(&r, KVQ_E_SYSTEM);
    is_whole(a, b);
    r = begin_reading(a);
    struct kvq_entry_wire e = {.handle = a, .position = session_of(a)->tokens, .append = 1};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    kvq__restore_end(&r, KVQ_E_NO_MEMORY); // a step was begun on what is not there
    assert_true(kvq__is_offloaded(session_of(a)));
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 1); // has it brought back
    settle();
    assert_int_equal(kit_again(&m), KVQ_E_NO_STEP);
    go_on_alike(a, b, 0);
    r = begin_reading(a);
    drop(a);
    core_check(kit.core);
    kvq__restore_end(&r, KVQ_E_CANCELLED);
    settle();
    assert_int_equal(vault.n_sessions, 0);
}

// The same beside a request that reads what has come: that ends first, and others wait.
SAVING_TEST(test_fails_beside_a_request)
{
    static uint8_t x[OUT_BYTES];
    uint64_t a = fed("", 700, 0), b = fed("", 700, 0);
    for (uint32_t i = 0; i < 2; i++) {
        struct kvq__restore *r = begin_reading(a);
        kvq__session_ref(kit_of(&m, a)); // as requests under way do
        kvq__restore_end(&r, KVQ_E_SYSTEM);
        assert_null(r);
        assert_int_equal(attend(a, 0, x), 1);
        core_check(kit.core);
        assert_false(kvq__parks_poll(kit.core));
        assert_true(kvq__core_moves(kit.core)); // it is looked at again
        if (i == 1)
            break;
        kvq__session_unref(kit_of(&m, a));
        assert_true(kvq__parks_poll(kit.core));
        core_check(kit.core);
        assert_int_equal(kit_again(&m), 1); // it asks for it anew
        settle();
        assert_int_equal(kit_again(&m), 0);
        go_on_alike(a, b, 0);
    }
    struct kvq__session *s = kit_of(&m, a);
    drop(a);
    assert_int_equal(kit_again(&m), 0);
    kvq__session_unref(s);
    assert_true(kvq__parks_poll(kit.core));
    settle();
    assert_int_equal(vault.n_sessions, 0);
}

// A client's stream may keep what has come for ever. Then the fetch has ended all the same: its
// place is another one's, its ticket says so, and a request that waits is answered.
SAVING_TEST(test_fails_beside_a_stream_that_stands)
{
    enum { MOST = 16 };
    static uint8_t x[OUT_BYTES];
    uint64_t handles[MOST + 1];
    struct kvq__store_job jobs[MOST + 1];
    struct kvq__move_info info;
    for (uint32_t i = 0; i <= MOST; i++) {
        handles[i] = fed("", 3, 0);
        away(handles[i]);
    }
    struct kvq__session *s = kit_of(&m, handles[0]);
    assert_int_equal(kvq__session_prefetch(m.client, handles[0], &info, text), 0);
    for (uint32_t i = 1; i <= MOST; i++)
        kvq__fetch_ask(kit_of(&m, handles[i]));
    for (uint32_t i = 0; i < MOST; i++)
        assert_true(kvq__park_next(kit.core, &jobs[i]));
    assert_false(kvq__park_next(kit.core, &jobs[MOST]));
    struct kvq__restore *r;
    assert_int_equal(jobs[0].id, s->id);
    assert_int_equal(vault_fetch(&vault, kit.core, &jobs[0], &r), 0);
    assert_int_equal(vault_layer(&vault, r, vault_find(&vault, jobs[0].name, 0), 0), 0);
    kvq__session_ref(s); // as a request on such a stream does
    kvq__restore_end(&r, KVQ_E_SYSTEM);
    assert_true(kvq__park_next(kit.core, &jobs[MOST]));
    assert_int_equal(ask(info.id).status, KVQ_E_SYSTEM);
    refused(handles[0], KVQ_E_BUSY, "could not be read back");
    assert_int_equal(kvq__session_prefetch(m.client, handles[0], &info, text), KVQ_E_BUSY);
    assert_int_equal(attend(handles[0], 0, x), 1);
    kit_pass(&kit, 1900000000u);
    assert_int_equal(kit_again(&m), 1);
    kit_pass(&kit, 200000000u);
    assert_int_equal(kit_again(&m), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, KVQ_E_SYSTEM);
    kvq__session_unref(s);
    assert_true(kvq__parks_poll(kit.core));
    assert_true(kvq__is_offloaded(s));
    for (uint32_t i = 1; i <= MOST; i++)
        kvq__fetch_failed(kit.core, jobs[i].id, KVQ_E_SYSTEM, "it failed");
    wake(handles[0]);
}

enum { OF_ONE = 18, OF_ALL = 3 * OF_ONE };

// The orders to read something back that there are: of two namespaces.
static uint32_t take_fetches(struct kvq__store_job *jobs, uint32_t *n, const char *ns)
{
    uint32_t of_it = 0;
    for (; kvq__park_next(kit.core, &jobs[*n]); ++*n) {
        assert_int_equal(jobs[*n].kind, KVQ__JOB_FETCH);
        of_it += strcmp(jobs[*n].ns, ns) == 0;
    }
    return of_it;
}

// Sessions of three namespaces, all of which are parked.
static void many_away(struct member *others, struct kvq__session *sessions[OF_ALL])
{
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(member_open(&kit, &others[i], 2000 + i, BUFFER), 0);
        member_fill(&others[i]);
    }
    for (uint32_t i = 0; i < OF_ALL; i++) {
        struct member *of = i < OF_ONE ? &m : &others[i / OF_ONE - 1];
        uint64_t handle = kit_session(of, rows, LAYERS, 0);
        assert_int_equal(kit_step(of, handle, 3, HEADS, DIM), 0);
        sessions[i] = kit_of(of, handle);
        assert_int_equal(kvq__park_start(sessions[i], KVQ__PARK_ASKED, NULL, text), 0);
        settle();
        assert_true(kvq__is_offloaded(sessions[i]));
    }
}

// Of many that are wanted some are read at a time, and one namespace leaves some of it to others.
SAVING_TEST(test_many_fetches)
{
    static struct kvq__store_job jobs[OF_ALL];
    struct kvq__session *s[OF_ALL];
    struct member others[2];
    uint32_t n = 0;
    many_away(others, s);
    for (uint32_t i = 0; i < OF_ONE; i++)
        kvq__fetch_ask(s[i]);
    assert_int_equal(take_fetches(jobs, &n, "uid-1000"), 16);
    for (uint32_t i = OF_ONE; i < OF_ALL; i++)
        kvq__fetch_ask(s[i]);
    assert_int_equal(take_fetches(jobs, &n, "uid-2000"), 8);
    assert_int_equal(n, 32);
    kvq__fetch_failed(kit.core, jobs[0].id, KVQ_E_SYSTEM, "it failed");
    assert_int_equal(take_fetches(jobs, &n, "uid-1000"), 0); // it has the most
    assert_int_equal(n, 33);
    kvq__session_end(s[OF_ONE], "one that is read");
    kvq__session_end(s[OF_ALL - 1], "one that waits");
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(kvq__park_next(kit.core, &jobs[n]));
        assert_int_equal(jobs[n].kind, KVQ__JOB_FORGET);
        vault_forget(&vault, jobs[n].name, jobs[n].stamp);
        kvq__park_forgot(kit.core, &jobs[n], KVQ__FORGET_GONE);
    }
    take_fetches(jobs, &n, "uid-1000");
    assert_int_equal(n, 34);
    for (uint32_t i = 1; i < n; i++)
        kvq__fetch_failed(kit.core, jobs[i].id, KVQ_E_SYSTEM, "it failed");
    settle(); // the others
    assert_int_equal(kit.core->disk.n_offloaded, 33);
    assert_int_equal(kit.core->disk.n_wanted + kit.core->disk.n_reading, 0);
    member_close(&others[0]);
    member_close(&others[1]);
}

// Of namespaces that have as many under way the one that asked first comes first.
SAVING_TEST(test_equal_namespaces)
{
    struct kvq__store_job job;
    struct kvq__session *s[OF_ALL];
    struct member others[2];
    many_away(others, s);
    const uint32_t asked[] = {OF_ONE, 0, 2 * OF_ONE, 1, 2 * OF_ONE + 1, OF_ONE + 1};
    for (uint32_t i = 0; i < 6; i++) {
        kvq__fetch_ask(s[asked[i]]);
        kit_pass(&kit, 1000000);
    }
    for (uint32_t i = 0; i < 6; i++) {
        assert_true(kvq__park_next(kit.core, &job));
        assert_int_equal(job.id, s[asked[i]]->id);
    }
    for (uint32_t i = 0; i < 6; i++)
        kvq__fetch_failed(kit.core, s[asked[i]]->id, KVQ_E_SYSTEM, "it failed");
    member_close(&others[0]);
    member_close(&others[1]);
    settle();
}

// Somebody has put another session of that name into the store.
SAVING_TEST(test_replaced)
{
    uint64_t a = fed("it", 700, 0);
    away(a);
    vault_find(&vault, "it", 0)->saved.stamp++;
    assert_int_equal(ask_in_vain(a), KVQ_E_DAMAGED);
    assert_non_null(vault_find(&vault, "it", 0));
}

int main(void)
{
    return run_all(NULL, NULL);
}
