// SPDX-License-Identifier: Apache-2.0
//
// Prefixes and the store: sessions come back with the ids of their tokens, and begin others; ids
// that were lost or make no sense never stand for anything.
#include "tests/core/prefix_kit.h"

#include "daemon/core/residency/saved_internal.h"

static const struct kvq__span cat = {.first = 200, .tokens = 150, .digest = {1, 2, 3}};

static struct kvq__session_spec with_cat(struct kvq__session_spec spec)
{
    spec.prefix.spans = &cat;
    spec.prefix.n_spans = 1;
    return spec;
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

TEST(comes_back)
{
    struct kvq__session_spec spec = with_cat(named(&one, TOKENS)), other;
    leave_saved(&spec, 1500);
    spec = named(&one, TOKENS); // whose buffer is another
    other = with_cat(spec_of(&two, TOKENS));
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
    assert_ptr_equal(kvq__page(&kit_of(&one, a)->layers[1], 9)->packed.data,
                     kvq__page(&kit_of(&two, b)->layers[1], 9)->packed.data);
    uint64_t fork = kit_fork(&one, a, 11 * PAGE);
    same_numbers(&one, fork, &two, b, 2);
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

TEST(written_once)
{
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
    fork = kit_fork(&one, a, 1500);
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
TEST(behind_the_floor)
{
    struct kvq__session_spec spec = named(&one, TOKENS);
    uint64_t stored[4];
    spec.max_rollback = 100;
    uint64_t a = feed(&one, &spec, 1050);
    save("it");
    assert_int_equal(stored_ids("it", stored), 2);
    assert_int_equal(stored[0], 0);
    assert_int_equal(kit_truncate(&one, a, 50), 0);
    for (int32_t i = 1000; i < TOKENS; i++)
        ids(&one)[i] = 5;
    assert_int_equal(kit_step(&one, a, 50, HEADS, DIM), 0);
    save("it");
    restart();
    const struct kvq__session *s = restore(UINT64_MAX);
    assert_int_equal(s->ids.known, 1050);
    assert_int_equal(*kvq__ids_at(&s->ids, 999), 1000 + 7 * 999);
    assert_int_equal(*kvq__ids_at(&s->ids, 1000), 5);
}

// A span that is told, and whose tokens come after a restart.
TEST(spans_before_tokens)
{
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

TEST(cut)
{
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

// ---- Asking the store ----

// An ask that is hashed and matched; NULL where memory has it all, or nothing is to be looked for.
static struct kvq__prefix_ask *ask_of(struct member *m, const struct kvq__session_spec *spec,
                                      int status)
{
    struct kvq__prefix_ask *ask;
    assert_int_equal(kvq__prefix_ask(m->client, spec, &ask, text), status);
    if (!ask)
        return NULL;
    kvq__prefix_ask_hash(ask);
    while (!kvq__prefix_ask_match(ask))
        continue;
    if (ask->here == ask->pages)
        kvq__prefix_ask_end(&ask);
    return ask;
}

// How many pages a client's ask has in common with what is stored of the session.
static uint32_t matching(struct member *m, const struct kvq__session_spec *spec)
{
    const struct vault_session *s = vault_find(&vault, "it", spec->shard);
    uint32_t best = 0;
    text[0] = 0;
    struct kvq__prefix_ask *ask = ask_of(m, spec, 0);
    if (!ask)
        return 0;
    uint8_t(*hashes)[32] = calloc(ask->pages, sizeof *hashes);
    for (uint32_t space = 0; space < ask->n_spaces; space++) {
        uint32_t n = 0;
        kvq__prefix_ask_stored(ask, space, hashes);
        while (n < ask->pages && n < s->pages && memcmp(hashes[n], s->hashes[n], 32) == 0)
            n++;
        best = n > best ? n : best;
        assert_true(n == 0 || strcmp(ask->spaces[space].name, s->ns) == 0);
    }
    free(hashes);
    kvq__prefix_ask_end(&ask);
    assert_null(ask);
    return best;
}

TEST(known_by)
{
    struct kvq__session_spec spec = with_cat(named(&one, TOKENS)), s;
    leave_saved(&spec, 1500);
    spec = with_cat(spec_of(&two, TOKENS));
    assert_int_equal(matching(&two, &spec), 11);
    assert_true(kvq__saved_can_begin(&vault_find(&vault, "it", 0)->saved, 11 * PAGE));
    assert_false(kvq__saved_can_begin(&vault_find(&vault, "it", 0)->saved, 12 * PAGE));
    ids(&two)[5 * PAGE + 3]++;
    assert_int_equal(matching(&two, &spec), 5);
    ids(&two)[5 * PAGE + 3]--;
    static const struct kvq__layer_row others[] = {
        {2, HEADS, DIM, DIM, .kv_from = -1, .repeat = 3}};
#define DIFFERS(field, value, pages)                                                               \
    s = spec;                                                                                      \
    s.field = value;                                                                               \
    assert_int_equal(matching(&two, &s), pages)
    DIFFERS(model, "llama with another rope", 0);
    DIFFERS(salt, "pepper", 0);
    DIFFERS(adapter, "lora-7", 0);
    DIFFERS(format, "oscar3", 0);
    DIFFERS(dtype, KVQ_BF16, 0);
    DIFFERS(v_rotation, KVQ__V_NONE, 0);
    DIFFERS(v_rotation, KVQ__V_ENGINE, 0);
    DIFFERS(layers, others, 0);
    DIFFERS(ns, NULL, 0);
    DIFFERS(prefix.n_spans, 0, 1);
#undef DIFFERS
    // A store that was copied from a daemon with another key.
    static const uint8_t key[32] = {9};
    kvq__core_prefix_key(kit.core, key);
    assert_int_equal(matching(&two, &spec), 0);
}

TEST(nobody_asked)
{
    struct kvq__session_spec spec = named(&one, TOKENS);
    struct kvq__prefix_ask *ask;
    feed(&one, &spec, 600);
    spec.prefix.tokens = 4 * PAGE + 100; // memory has it all
    spec.name = "other";
    assert_null(ask_of(&one, &spec, 0));
    spec.prefix.tokens = 5 * PAGE;
    ask = ask_of(&one, &spec, 0);
    assert_non_null(ask);
    assert_int_equal(ask->here, 4);
    assert_string_equal(ask->ns, "team");
    kvq__prefix_ask_end(&ask);
    spec.name = "it"; // it is there already
    assert_null(ask_of(&one, &spec, 0));
    spec.name = "other";
    spec.flags = KVQ__OPEN_READ_ONLY; // it is not made
    assert_null(ask_of(&one, &spec, 0));
    spec.flags = 0;
    spec.format = "ott2";
    assert_null(ask_of(&one, &spec, KVQ_E_UNSUPPORTED));
}

// The hashes of what is asked for count for the namespace that asks, up to its limit.
TEST(hashes_count)
{
    struct kvq__session_spec spec = spec_of(&two, 9 * PAGE);
    struct kvq__prefix_ask *few, *many;
    const struct kvq__namespace *ns;
    TAILQ_FOREACH (ns, &kit.core->namespaces, link)
        if (strcmp(ns->name, "team") == 0)
            break;
    uint64_t before = ns->used[KVQ__TABLE_BYTES];
    assert_int_equal(kvq__prefix_ask(two.client, &spec, &many, text), 0);
    uint64_t with_many = ns->used[KVQ__TABLE_BYTES] - before;
    kvq__prefix_ask_end(&many);
    assert_int_equal(ns->used[KVQ__TABLE_BYTES], before);
    spec.prefix.tokens = PAGE;
    assert_int_equal(kvq__prefix_ask(two.client, &spec, &few, text), 0);
    uint64_t with_few = ns->used[KVQ__TABLE_BYTES] - before;
    assert_int_equal((with_many - with_few) % (8 * 32), 0); // in each namespace that may be asked
    assert_true(with_many - with_few >= 8 * 32);
    kvq__prefix_ask_end(&few);
    kit_limit(&kit, "team", KVQ__TABLE_BYTES, before + with_many - 1);
    spec.prefix.tokens = 9 * PAGE;
    assert_int_equal(kvq__prefix_ask(two.client, &spec, &many, text), KVQ_E_QUOTA);
    assert_says(text, "the hashes of a prefix");
    assert_null(many);
    assert_int_equal(ns->used[KVQ__TABLE_BYTES], before);
}

// What may be shared across namespaces is asked for there, too, and nowhere else.
TEST(spaces)
{
    struct kvq__session_spec spec = named(&one, TOKENS);
    spec.ns = "open";
    feed(&one, &spec, 600);
    struct kvq__save_spec how = {.ns = "open", .name = "it"};
    assert_int_equal(vault_save(&vault, kit.core, &how, NULL), 0);
    restart();
    spec = spec_of(&two, TOKENS);
    assert_int_equal(matching(&two, &spec), 4);
    spec.ns = NULL;
    assert_int_equal(matching(&two, &spec), 0);
    // It is read into the namespace of who asks, and is there as if it had been its own.
    struct kvq__restore *r;
    assert_int_equal(
        vault_prefix(&vault, kit.core, "team", vault_find(&vault, "it", 0), 4 * PAGE, &r, text), 0);
    assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, "it", 0)), 0);
    spec = spec_of(&two, TOKENS);
    uint64_t b = open_as(&two, &spec, NULL);
    assert_int_equal(kit_of(&two, b)->tokens, 4 * PAGE);
    assert_false(kit_of(&two, b)->foreign);
    assert_string_equal(
        kvq__page(&kit_of(&two, b)->layers[0], 0)->packed.block->extent->owner->ns->name, "team");
}

// ---- Reading a prefix alone ----

TEST(prefix_alone)
{
    static const char *const formats[] = {"oscar2", "f16", "oscar2-s96"};
    for (uint32_t i = 0; i < 3; i++) {
        struct kvq__session_spec spec = named(&one, TOKENS);
        struct kvq__session_info info;
        struct kvq__restore *r;
        float want[4 * DIM], got[4 * DIM];
        spec.format = formats[i];
        spec.max_rollback = 30;
        uint64_t a = feed(&one, &spec, 1500);
        uint64_t fork = kit_fork(&one, a, 9 * PAGE);
        attend(&one, fork, 1, want);
        save("it");
        restart();
        spec = spec_of(&two, 10 * PAGE - 1);
        spec.format = formats[i];
        struct vault_session *from = vault_find(&vault, "it", 0);
        assert_int_equal(vault_prefix(&vault, kit.core, "team", from, 9 * PAGE, &r, text), 0);
        for (uint32_t layer = 0; layer < 3; layer++) {
            kvq__core_tick(kit.core);
            assert_int_equal(lookup(&two, &spec), 9 * PAGE); // it has its memory
            assert_int_equal(vault_layer(&vault, r, from, layer), 0);
            core_check(kit.core);
        }
        kvq__restore_end(&r, 0);
        core_check(kit.core);
        assert_int_equal(kit.core->n_sessions, 0);
        uint64_t used = kit.core->pools[0].used_bytes;
        assert_int_equal(lookup(&two, &spec), 9 * PAGE);
        uint64_t b = open_as(&two, &spec, &info);
        assert_int_equal(info.tokens, 9 * PAGE);
        assert_int_equal(kit.core->pools[0].used_bytes, used);
        attend(&two, b, 1, got);
        assert_memory_equal(want, got, sizeof want);
        // Nothing more is there than that: 9 pages of 3 layers, whichever they are.
        uint64_t page = kit_of(&two, b)->layers[0].packed_bytes;
        page = page ? page : kit_of(&two, b)->layers[0].raw_bytes;
        assert_int_equal(used, 9 * 3 * page + 3 * kit_of(&two, b)->layers[0].sink_bytes);
        restart();
        vault_close(&vault);
    }
}

// By a window that lets go of pages a prefix can end only where the session had them.
TEST(windows)
{
    static const struct kvq__layer_row sliding[] = {
        {4, HEADS, DIM, DIM, .kv_from = -1},
        {4, HEADS, DIM, DIM, .window = 200, .kv_from = -1},
        {4, HEADS, DIM, DIM, .window = 300, .kv_from = 1},
    };
    struct kvq__session_spec spec = named(&one, TOKENS);
    struct kvq__restore *r;
    spec.layers = sliding;
    spec.n_layers = 3;
    leave_saved(&spec, 10 * PAGE);
    spec = spec_of(&one, TOKENS);
    spec.layers = sliding;
    spec.n_layers = 3;
    struct vault_session *from = vault_find(&vault, "it", 0);
    assert_int_equal(matching(&one, &spec), 10);
    for (uint32_t pages = 1; pages <= 10; pages++) {
        bool can = kvq__saved_can_begin(&from->saved, (uint64_t)pages * PAGE);
        assert_int_equal(can, pages == 10);
        int rc = vault_prefix(&vault, kit.core, "team", from, (uint64_t)pages * PAGE, &r, text);
        assert_int_equal(rc, can ? 0 : KVQ_E_DAMAGED);
    }
    assert_int_equal(vault_rest(&vault, &r, from), 0);
    assert_int_equal(lookup(&one, &spec), 10 * PAGE);
}

// ---- Damage and nonsense ----

// Whatever a store says it has: what counts are the ids that come with it.
TEST(other_ids)
{
    struct kvq__session_spec spec = named(&one, TOKENS);
    struct kvq__restore *r;
    leave_saved(&spec, 1500);
    struct vault_session *from = vault_find(&vault, "it", 0);
    for (uint32_t i = 0; i < vault.n_blocks; i++) {
        int32_t *at = (int32_t *)(void *)vault.blocks[i].data;
        if (vault.blocks[i].bytes == 4096 && at[300] == 1000 + 7 * 300)
            at[300]++;
    }
    assert_int_equal(vault_prefix(&vault, kit.core, "team", from, 11 * PAGE, &r, text), 0);
    assert_int_equal(vault_rest(&vault, &r, from), 0);
    spec = spec_of(&one, TOKENS);
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
}

// A prefix that cannot be read to the end leaves nothing behind.
TEST(read_fails)
{
    struct kvq__session_spec spec = named(&one, TOKENS);
    struct kvq__restore *r;
    leave_saved(&spec, 1500);
    struct vault_session *from = vault_find(&vault, "it", 0);
    static const uint64_t wrong[] = {1, PAGE + 1, 12 * PAGE, 1 << 20, UINT64_MAX / PAGE * PAGE};
    for (uint32_t i = 0; i < 5; i++) {
        text[0] = 0;
        assert_int_equal(vault_prefix(&vault, kit.core, "team", from, wrong[i], &r, text),
                         KVQ_E_DAMAGED);
        assert_true(text[0]);
    }
    assert_int_equal(vault_prefix(&vault, kit.core, "team", from, 11 * PAGE, &r, text), 0);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    kvq__restore_end(&r, KVQ_E_DAMAGED);
    spec = spec_of(&one, TOKENS);
    assert_int_equal(lookup(&one, &spec), 0);
    assert_int_equal(kit.core->n_sessions, 0);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    // Dropped by somebody meanwhile.
    assert_int_equal(vault_prefix(&vault, kit.core, "team", from, 11 * PAGE, &r, text), 0);
    char id[24];
    snprintf(id, sizeof id, "#%llu", (unsigned long long)r->session->id);
    assert_int_equal(
        kvq__session_drop_named(kit.core, &(struct kvq__peer){.admin = true}, "team", id, text), 0);
    assert_true(kvq__restore_lost(r));
    kvq__restore_end(&r, KVQ_E_CANCELLED);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    for (uint32_t i = 1; i < 80; i++) {
        struct kvq__prefix_ask *ask;
        kit.fail_one_in = 1 + i % 40;
        int rc = kvq__prefix_ask(one.client, &spec, &ask, text);
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        kvq__prefix_ask_end(&ask);
        rc = vault_prefix(&vault, kit.core, "team", from, 11 * PAGE, &r, text);
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        struct kvq__session_info info;
        if (rc == 0 && kvq__session_open(one.client, &spec, &info, text) == 0)
            (void)kvq__session_drop(one.client, info.handle, text);
        if (rc == 0)
            vault_rest(&vault, &r, from);
        kit.fail_one_in = 0;
        core_check(kit.core);
    }
}

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

TEST(damage)
{
    struct kvq__session_spec spec = with_cat(named(&one, TOKENS));
    leave_saved(&spec, 1500);
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

TEST(nonsense)
{
    struct kvq__session_spec spec = with_cat(named(&one, TOKENS));
    leave_saved(&spec, 1500);
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

TEST(no_memory)
{
    struct kvq__session_spec spec = with_cat(named(&one, TOKENS));
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

// A prefix is read into memory that is full then: a step that needs it waits until it is in the
// index, which gives way.
TEST(gives_way_once_read)
{
    struct kvq__session_spec spec = named(&one, TOKENS), mine;
    struct kvq__restore *r;
    spec.format = "f16";
    leave_saved(&spec, 1000);
    mine = spec_of(&two, 0);
    mine.prefix = (struct kvq__prefix_spec){0};
    mine.format = "f16";
    mine.model = "another";
    uint64_t handle = open_as(&two, &mine, NULL);
    assert_int_equal(kit_step(&two, handle, PAGE, HEADS, DIM), 0);
    const struct vault_session *from = vault_find(&vault, "it", 0);
    assert_int_equal(vault_prefix(&vault, kit.core, "team", from, 5 * PAGE, &r, text), 0);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    struct kvq__pool *pool = &kit.core->pools[0];
    pool->budget = pool->extents_taken; // 32 blocks: 3 and 15 are taken
    assert_int_equal(pool->used_bytes * 32, pool->budget * 18);
    assert_int_equal(kit_step(&two, handle, 8 * PAGE, HEADS, DIM), 1); // 24
    assert_int_equal(vault_layer(&vault, r, from, 1), 0);
    assert_int_equal(vault_layer(&vault, r, from, 2), 0);
    kvq__restore_end(&r, 0);
    core_check(kit.core);
    kit_pass(&kit, 60000000);
    assert_int_equal(kvq__request_continue(two.queue), KVQ__DONE);
    assert_int_equal(kvq__queue_completion(two.queue)->status, 0);
    assert_int_equal(kvq__queue_results(two.queue)[0].status, 0);
    struct kvq_entry_wire e = {.handle = handle, .position = PAGE};
    assert_int_equal(kit_simple(&two, KVQ_OP_STEP_ABORT, KIT_STEP, e, NULL), 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
