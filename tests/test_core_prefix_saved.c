// SPDX-License-Identifier: Apache-2.0
//
// Prefixes and the store: sessions come back with the ids of their tokens, and begin others; ids
// that were lost or make no sense never stand for anything.
#include "tests/prefix_rig.h"

#include "daemon/saved_internal.h"

static const struct kvq__span cat = {.first = 200, .tokens = 150, .digest = {1, 2, 3}};

// The daemon ends, and another begins with what is stored.
static void restart(void)
{
    core_check(kit.core);
    member_close(&one);
    member_close(&two);
    kit_close(&kit);
    open_kit(64 * MIB, 0);
}

static struct kvq__session_spec named(const struct member *m, uint64_t tokens)
{
    struct kvq__session_spec spec = spec_of(m, tokens);
    spec.name = "it";
    return spec;
}

static void save(const char *name)
{
    struct kvq__save_spec spec = {.ns = "team", .name = name};
    int rc;
    while ((rc = vault_save(&vault, kit.core, &spec, NULL)) == 1)
        kit_pack(&kit);
    assert_int_equal(rc, 0);
}

static struct kvq__restore *begin_restore(uint64_t good)
{
    struct kvq__restore *r;
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, good, &r, text), 0);
    return r;
}

static struct kvq__session *restore(uint64_t good)
{
    struct kvq__restore *r = begin_restore(good);
    struct kvq__session *s = r->session;
    assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, "it", 0)), 0);
    core_check(kit.core);
    return s;
}

static uint64_t open_it(struct member *m)
{
    struct kvq__session_spec spec = {.ns = "team", .name = "it"};
    return open_as(m, &spec, NULL);
}

static void comes_back(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS), other = spec_of(&two, TOKENS);
    float want[4 * DIM], got[4 * DIM];
    uint64_t fork;
    spec.prefix.spans = &cat;
    spec.prefix.n_spans = 1;
    feed(&one, &spec, 1500);
    save("it");
    restart();
    spec = named(&one, TOKENS); // whose buffer is another
    other = spec_of(&two, TOKENS);
    other.prefix.spans = &cat;
    other.prefix.n_spans = 1;
    assert_int_equal(lookup(&two, &other), 0);
    struct kvq__restore *r = begin_restore(UINT64_MAX);
    for (uint32_t layer = 0; layer < 3; layer++) {
        kvq__core_tick(kit.core);
        assert_int_equal(lookup(&two, &other), 0); // not all of its blocks are there
        assert_int_equal(vault_layer(&vault, r, vault_find(&vault, "it", 0), layer), 0);
    }
    kvq__restore_end(&r, 0);
    assert_int_equal(lookup(&two, &other), 11 * PAGE);
    other.prefix.n_spans = 0;
    assert_int_equal(lookup(&two, &other), PAGE); // up to where the image begins
    other.prefix.n_spans = 1;
    uint64_t a = open_it(&one), b = open_as(&two, &other, NULL);
    assert_int_equal(kit_of(&two, b)->tokens, 11 * PAGE);
    assert_ptr_equal(kit_of(&one, a)->layers[1].pages[9].packed.data,
                     kit_of(&two, b)->layers[1].pages[9].packed.data);
    struct kvq_entry_wire e = {.handle = a, .position = 11 * PAGE};
    assert_int_equal(kit_simple(&one, KVQ_OP_FORK, 0, e, &fork), 0);
    attend(&one, fork, 2, want);
    attend(&two, b, 2, got);
    assert_memory_equal(want, got, sizeof want);
    // It goes on to tell, and so does its fork.
    assert_int_equal(kit_step(&one, a, 80, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&two, &other), 12 * PAGE);
    assert_int_equal(kit_of(&one, fork)->ids.known, 11 * PAGE);
}

// The ids in the store of the parts of ids of a save that begins now, and how many there are.
static uint32_t stored_ids(const char *name, uint64_t *out)
{
    struct kvq__save_spec spec = {.ns = "team", .name = name, .again = true, .unnamed = true};
    struct kvq__save *held;
    struct kvq__part *parts;
    uint32_t n, count = 0;
    kit_pack(&kit);
    assert_int_equal(
        kvq__save_begin(kit.core, &(struct kvq__peer){.admin = true}, &spec, &held, text), 0);
    kvq__save_shard(held, 0, &parts, &n);
    for (uint32_t i = 0; i < n; i++)
        if (parts[i].kind == KVQ__PART_IDS)
            out[count++] = parts[i].id;
    kvq__save_end(&held, false);
    return count;
}

static void written_once(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS);
    uint64_t stored[4], again[4], fork, a = feed(&one, &spec, 1500);
    char name[24];
    assert_int_equal(stored_ids("it", stored), 2);
    assert_int_equal(stored[0], 0);
    save("it");
    assert_int_equal(stored_ids("it", stored), 2);
    assert_true(stored[0] != 0);
    assert_int_equal(stored[1], 0); // it may grow
    assert_int_equal(kit_step(&one, a, 20, HEADS, DIM), 0);
    save("it");
    assert_int_equal(stored_ids("it", again), 2);
    assert_int_equal(again[0], stored[0]);
    struct kvq_entry_wire e = {.handle = a, .position = 1500};
    assert_int_equal(kit_simple(&one, KVQ_OP_FORK, 0, e, &fork), 0);
    snprintf(name, sizeof name, "#%llu", (unsigned long long)kit_of(&one, fork)->id);
    assert_int_equal(stored_ids(name, again), 2);
    assert_int_equal(again[0], stored[0]);
    restart();
    restore(UINT64_MAX);
    assert_int_equal(stored_ids("it", again), 2);
    assert_int_equal(again[0], stored[0]);
    assert_int_equal(again[1], 0);
}

// What can still be taken back may be other tokens when it is saved again.
static void behind_the_floor(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS);
    uint64_t stored[4];
    spec.max_rollback = 100;
    uint64_t a = feed(&one, &spec, 1050);
    save("it");
    assert_int_equal(stored_ids("it", stored), 2);
    assert_int_equal(stored[0], 0);
    struct kvq_entry_wire e = {.handle = a, .position = 1050, .list_token = 50};
    assert_int_equal(kit_simple(&one, KVQ_OP_TRUNCATE, 0, e, NULL), 0);
    for (int32_t i = 1000; i < TOKENS; i++)
        ids(&one)[i] = 5;
    assert_int_equal(kit_step(&one, a, 50, HEADS, DIM), 0);
    save("it");
    restart();
    const struct kvq__session *s = restore(UINT64_MAX);
    assert_int_equal(s->ids.known, 1050);
    assert_int_equal(s->ids.at[999], 1000 + 7 * 999);
    assert_int_equal(s->ids.at[1000], 5);
}

// A span that is told, and whose tokens come after a restart.
static void spans_before_tokens(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS);
    uint64_t a = feed(&one, &spec, 100);
    save("it");
    assert_int_equal(kvq__session_spans(one.client, a, &cat, 1, text), 0);
    save("it");
    restart();
    restore(UINT64_MAX);
    assert_int_equal(kit_step(&one, open_it(&one), 400, HEADS, DIM), 0);
    kit_pack(&kit);
    spec = spec_of(&one, TOKENS);
    assert_int_equal(lookup(&one, &spec), PAGE);
    spec.prefix.spans = &cat;
    spec.prefix.n_spans = 1;
    assert_int_equal(lookup(&one, &spec), 3 * PAGE);
}

static void cut(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS);
    uint64_t had = feed(&one, &spec, 1500);
    save("it");
    drop(&one, had);
    restart();
    const struct kvq__session *s = restore(900);
    assert_true(s->tokens <= 900 && s->tokens >= 7 * PAGE);
    assert_int_equal(s->ids.known, s->tokens);
    spec = spec_of(&one, TOKENS);
    assert_int_equal(lookup(&one, &spec), s->floor / PAGE * PAGE);
    uint64_t a = open_it(&one);
    assert_int_equal(kit_step(&one, a, 1200 - (uint32_t)s->tokens, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&one, &spec), 9 * PAGE);
}

// ---- Damage and nonsense ----

// The session's part of ids or spans, in the vault.
static struct vault_block *block_of(uint32_t kind, uint32_t page)
{
    const struct vault_session *s = vault_find(&vault, "it", 0);
    for (uint32_t i = 0; i < s->n; i++)
        for (uint32_t b = 0; b < vault.n_blocks && s->parts[i].kind == kind; b++)
            if (vault.blocks[b].id == s->parts[i].id && (s->parts[i].page == page))
                return &vault.blocks[b];
    fail();
    return NULL;
}

static uint64_t known_after(void)
{
    struct kvq__restore *r = begin_restore(UINT64_MAX);
    struct kvq__session *s = r->session;
    uint64_t known = s->ids.known;
    assert_int_equal(s->tokens, 1500); // whatever becomes of the ids
    kvq__restore_end(&r, KVQ_E_CANCELLED);
    core_check(kit.core);
    return known;
}

static void damage(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS);
    spec.prefix.spans = &cat;
    spec.prefix.n_spans = 1;
    feed(&one, &spec, 1500);
    save("it");
    restart();
    assert_int_equal(known_after(), 1500);
    struct vault_block *second = block_of(KVQ__PART_IDS, 1), *spans;
    second->bytes--; // it cannot be read
    assert_int_equal(known_after(), 1024);
    second->bytes++;
    struct vault_block *first = block_of(KVQ__PART_IDS, 0);
    first->bytes--;
    assert_int_equal(known_after(), 0);
    first->bytes++;
    spans = block_of(KVQ__PART_SPANS, UINT32_MAX);
    spans->bytes--; // ids of images mean nothing without
    assert_int_equal(known_after(), 0);
    spans->bytes++;
    assert_int_equal(known_after(), 1500);
}

static int refusal(void)
{
    struct kvq__restore *r;
    text[0] = 0;
    int rc = vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text);
    if (rc == 0)
        kvq__restore_end(&r, KVQ_E_CANCELLED);
    assert_true(rc == 0 || text[0]);
    core_check(kit.core);
    return rc;
}

static void nonsense(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS);
    spec.prefix.spans = &cat;
    spec.prefix.n_spans = 1;
    feed(&one, &spec, 1500);
    save("it");
    restart();
    struct vault_session *s = vault_find(&vault, "it", 0);
    static const uint64_t wrong[] = {1501, 1499, 1 << 24, UINT64_MAX};
    for (uint32_t i = 0; i < 4; i++) {
        s->saved.known = wrong[i];
        assert_true(known_after() <= 1024);
    }
    s->saved.known = 1500;
    for (uint32_t i = 0; i < 4; i++) {
        s->saved.n_spans = (uint32_t)wrong[i];
        assert_int_equal(known_after(), 0);
    }
    s->saved.n_spans = 1;
    struct kvq__saved_span *span =
        (struct kvq__saved_span *)(void *)block_of(KVQ__PART_SPANS, UINT32_MAX)->data;
    span->tokens = 0;
    assert_int_equal(refusal(), KVQ_E_DAMAGED);
    span->tokens = 5;
    span->first = UINT64_MAX - 2;
    assert_int_equal(refusal(), KVQ_E_DAMAGED);
    span->first = 200;
    assert_int_equal(refusal(), 0);
    // Parts that nobody asked for, of numbers that nobody has.
    for (uint32_t i = 0; i < s->n; i++)
        if (s->parts[i].kind == KVQ__PART_IDS)
            s->parts[i].page += UINT32_MAX - 2;
    assert_int_equal(known_after(), 0);
}

static void no_memory(void **state)
{
    (void)state;
    struct kvq__session_spec spec = named(&one, TOKENS);
    spec.prefix.spans = &cat;
    spec.prefix.n_spans = 1;
    feed(&one, &spec, 1500);
    for (uint32_t i = 1; i < 60; i++) {
        struct kvq__save_spec again = {.ns = "team", .name = "it", .again = true};
        kit.fail_one_in = 1 + i % 30;
        int rc = vault_save(&vault, kit.core, &again, NULL);
        kit.fail_one_in = 0;
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        core_check(kit.core);
    }
    save("it");
    restart();
    for (uint32_t i = 1; i < 60; i++) {
        struct kvq__restore *r;
        kit.fail_one_in = 1 + i % 30;
        int rc = vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text);
        kit.fail_one_in = 0;
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        if (rc == 0)
            kvq__restore_end(&r, KVQ_E_CANCELLED);
        core_check(kit.core);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(comes_back, setup, teardown),
        cmocka_unit_test_setup_teardown(written_once, setup, teardown),
        cmocka_unit_test_setup_teardown(behind_the_floor, setup, teardown),
        cmocka_unit_test_setup_teardown(spans_before_tokens, setup, teardown),
        cmocka_unit_test_setup_teardown(cut, setup, teardown),
        cmocka_unit_test_setup_teardown(damage, setup, teardown),
        cmocka_unit_test_setup_teardown(nonsense, setup, teardown),
        cmocka_unit_test_setup_teardown(no_memory, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
