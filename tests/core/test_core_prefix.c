// SPDX-License-Identifier: Apache-2.0
//
// Prefixes: sessions that begin with the same tokens share blocks, those whose tokens mean
// something else never do, and what only the index keeps gives way before anything fails.
#include "daemon/core/residency/saved.h"
#include "tests/core/prefix_kit.h"

static struct kvq__session_info info; // of the session that was asked for last

static int refused(struct member *m, const struct kvq__session_spec *spec)
{
    uint64_t tokens;
    text[0] = 0;
    int rc = kvq__prefix_lookup(m->client, spec, &tokens, text);
    assert_true(rc < 0 && text[0]);
    return rc;
}

// ---- The same tokens ----

static void check_same_blocks(uint64_t a, uint64_t b, uint32_t pages)
{
    const struct kvq__session *s = kit_of(&one, a), *t = kit_of(&two, b);
    for (uint32_t i = 0; i < s->n_layers; i++)
        for (uint32_t p = 0; p < pages; p++)
            assert_ptr_equal(kvq__page(&s->layers[i], p)->packed.data,
                             kvq__page(&t->layers[i], p)->packed.data);
}

static void shares_as(const char *format)
{
    struct kvq__session_spec spec = spec_of(&one, 1000), other = spec_of(&two, 1000);
    spec.format = other.format = format;
    uint64_t fork, a = feed(&one, &spec, 1000);
    uint64_t used = kit.core->pools[0].used_bytes;
    assert_int_equal(lookup(&one, &spec), 7 * PAGE);
    uint64_t b = open_as(&two, &other, &info);
    assert_int_equal(info.tokens, 7 * PAGE);
    assert_int_equal(info.prefix_tokens, 7 * PAGE);
    assert_int_equal(kit.core->pools[0].used_bytes, used); // not a byte more
    check_same_blocks(a, b, 7);
    core_check(kit.core);
    // The same numbers as a fork at that token has.
    fork = kit_fork(&one, a, 7 * PAGE);
    for (uint32_t layer = 0; layer < 3; layer++)
        same_numbers(&one, fork, &two, b, layer);
    // Both go on, each on its own.
    assert_int_equal(kit_step(&two, b, 104, HEADS, DIM), 0);
    kit_pack(&kit);
    for (uint32_t layer = 0; layer < 3; layer++)
        same_numbers(&two, b, &one, a, layer); // no unit is only partly there
    assert_int_equal(kvq__session_info(two.client, b, &info, text), 0);
    assert_int_equal(info.shared_bytes, info.packed_bytes); // nothing else is packed yet
    drop(&one, a);
    drop(&one, fork);
    drop(&two, b);
}

// With sinks: they go with the first page.
TEST(shares)
{
    shares_as("oscar2");
    shares_as("kivi-sink2");
    shares_as("oscar2-fit-s96");
}

TEST(outlives)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    struct kvq__prefix_info prefix;
    struct kvq__peer peer = {.uid = 1000};
    drop(&one, feed(&one, &spec, 600));
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    assert_int_equal(kvq__core_prefixes(kit.core, &peer, 0, &prefix, 1), 1);
    assert_int_equal(prefix.pages, 4);
    assert_int_equal(prefix.idle_bytes, kit.core->pools[0].used_bytes);
    uint64_t b = open_as(&one, &spec, &info);
    assert_int_equal(info.tokens, 4 * PAGE);
    assert_int_equal(kvq__core_prefixes(kit.core, &peer, 0, &prefix, 1), 1);
    assert_int_equal(prefix.idle_bytes, 0);
    assert_int_equal(prefix.hits, 2);
    assert_int_equal(prefix.lookups, 2);
    assert_int_equal(prefix.hit_tokens, 4 * PAGE);
    peer.uid = 77; // others learn nothing of it
    assert_int_equal(kvq__core_prefixes(kit.core, &peer, 0, &prefix, 1), 0);
    drop(&one, b);
    // Its time passes while nobody uses it.
    kit_tick(&kit, 19000000000u);
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    kit_tick(&kit, 2000000000u);
    assert_int_equal(lookup(&one, &spec), 0);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
}

TEST(whole_steps)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    uint64_t a = feed(&one, &spec, 100);
    assert_int_equal(kit_whole(&one, a, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&one, &spec), 3 * PAGE);
}

// Told at the end of a step instead of its beginning.
static int end_with(uint64_t handle, uint64_t offset, uint32_t q_row, uint16_t n)
{
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_END, n, KIT_STEP);
    struct kvq_entry_wire e = {
        .handle = handle, .position = kit_of(&one, handle)->tokens, .q_row = q_row};
    r.flags = KVQ_REQ_TOKEN_IDS;
    r.list = (struct kvq_wire_view){.offset = offset, .buffer = one.buffer};
    int rc = kit_request(&one, &r, &e);
    return rc || n == 0 ? rc : kvq__queue_results(one.queue)[0].status;
}

TEST(told_at_the_end)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    uint64_t a = feed(&one, &spec, 0);
    one.ids_at = 0;
    for (uint32_t at = 0; at < 600; at += 200) {
        assert_int_equal(kit_begin(&one, a, 200, HEADS, DIM), 0);
        assert_int_equal(end_with(a, BUFFER - 796, 0, 1), KVQ_E_BOUNDS);
        assert_int_equal(end_with(a, UINT64_MAX - 3, 0, 1), KVQ_E_BOUNDS);
        assert_int_equal(end_with(a, IDS + 2, 0, 1), KVQ_E_INVALID);
        assert_int_equal(end_with(a, IDS, 0, 0), KVQ_E_INVALID); // whose?
        assert_int_equal(kit_of(&one, a)->tokens, at);           // it is open all the same
        assert_int_equal(end_with(a, IDS, at, 1), 0);
        kit_pack(&kit);
    }
    assert_int_equal(kit_of(&one, a)->ids.known, 600);
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    one.ids_at = IDS;
}

TEST(forks_know)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    uint64_t fork, a = feed(&one, &spec, 600);
    fork = kit_fork(&one, a, 2 * PAGE);
    for (int32_t i = 2 * PAGE; i < TOKENS; i++)
        ids(&one)[i] = 5; // it goes another way
    assert_int_equal(kit_step(&one, fork, 2 * PAGE, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    spec = spec_of(&two, TOKENS);
    assert_int_equal(lookup(&two, &spec), 4 * PAGE); // and the first one's are there as ever
}

// Of two drafts in one request, whose lists are not in memory at once, the right ids stay.
TEST(accepted_in_waves)
{
    static const uint32_t kept[] = {0, 2, 5, 1, 7};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    spec.max_rollback = 16;
    uint64_t a = feed(&one, &spec, 100), b = feed(&one, &spec, 60);
    assert_int_equal(kit_step(&one, a, 8, HEADS, DIM) | kit_step(&one, b, 8, HEADS, DIM), 0);
    memcpy(one.memory + OUT, kept, sizeof kept);
    struct kvq_request r = kit_header(KVQ_OP_ACCEPT, 2);
    r.list = (struct kvq_wire_view){.offset = OUT, .buffer = one.buffer};
    struct kvq_entry_wire e[] = {
        {.handle = a, .position = 108, .append = 8, .list_token = 3},
        {.handle = b, .position = 68, .append = 8, .list_token = 2, .row = 3}};
    one.queue->arena_bytes = 256; // for one of them
    assert_int_equal(kit_request(&one, &r, e), 0);
    for (int i = 0; i < 2; i++) {
        const struct kvq__ids *s = &kit_of(&one, e[i].handle)->ids;
        uint32_t had = (uint32_t)e[i].position - 8;
        assert_int_equal(s->known, had + e[i].list_token);
        for (uint32_t j = 0; j < e[i].list_token; j++)
            assert_int_equal(*kvq__ids_at(s, had + j), 1000 + 7 * (had + kept[e[i].row + j]));
    }
}

// ---- Other tokens, or other meanings ----

TEST(tokens_differ)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    feed(&one, &spec, 1000);
    for (uint32_t page = 0; page < 7; page++) {
        ids(&one)[page * PAGE + 127 - page] ^= 1;
        assert_int_equal(lookup(&one, &spec), page * PAGE);
        ids(&one)[page * PAGE + 127 - page] ^= 1;
    }
    spec.prefix.tokens = 3 * PAGE - 1; // no more than asked for
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    spec.prefix.tokens = 3 * PAGE;
    assert_int_equal(lookup(&one, &spec), 3 * PAGE);
}

TEST(meanings_differ)
{
    static const struct kvq__layer_row others[][1] = {
        {{2, HEADS, DIM, DIM, .kv_from = -1, .repeat = 3}},
        {{4, HEADS, DIM, DIM, .kv_from = -1, .repeat = 2}},
        {{4, HEADS, DIM, DIM, .softcap = 30, .kv_from = -1, .repeat = 3}}};
    struct kvq__session_spec spec = spec_of(&one, 600), s = spec;
    feed(&one, &spec, 600);
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
#define DIFFERS(field, value)                                                                      \
    s = spec;                                                                                      \
    s.field = value;                                                                               \
    assert_int_equal(lookup(&one, &s), 0)
    DIFFERS(model, "llama with another rope");
    DIFFERS(salt, "pepper");
    DIFFERS(adapter, "lora-7");
    DIFFERS(format, "oscar3");
    DIFFERS(format, "oscar2-xh");
    DIFFERS(dtype, KVQ_BF16);
    DIFFERS(v_rotation, KVQ__V_NONE);
    DIFFERS(v_rotation, KVQ__V_ENGINE);
    DIFFERS(ns, "open");
    DIFFERS(ns, NULL);
    for (uint32_t i = 0; i < 3; i++) {
        DIFFERS(layers, others[i]);
    }
#undef DIFFERS
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
}

TEST(images_differ)
{
    const struct kvq__span cat[] = {{.first = 200, .tokens = 150, .digest = {1}}};
    struct kvq__span other[2] = {cat[0], {.first = 900, .tokens = 1, .digest = {9}}};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    spec.prefix.spans = cat;
    spec.prefix.n_spans = 1;
    feed(&one, &spec, 1000);
    assert_int_equal(lookup(&one, &spec), 7 * PAGE);
    spec.prefix.spans = other;
    spec.prefix.n_spans = 2;
    assert_int_equal(lookup(&one, &spec), 7 * PAGE); // the second lies behind
    spec.prefix.n_spans = 1;
    other[0].digest[31] = 1;
    assert_int_equal(lookup(&one, &spec), PAGE);
    other[0] = cat[0];
    other[0].first--;
    assert_int_equal(lookup(&one, &spec), PAGE);
    other[0] = cat[0];
    other[0].tokens++;
    assert_int_equal(lookup(&one, &spec), 2 * PAGE); // the first page of it is the same
    spec.prefix.n_spans = 0;
    assert_int_equal(lookup(&one, &spec), PAGE);
}

// Told to an open session, before the tokens come.
TEST(spans_of_a_session)
{
    struct kvq__span span = {.first = 100, .tokens = 50, .digest = {3}};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    uint64_t a = feed(&one, &spec, 100);
    assert_int_equal(kvq__session_spans(one.client, a, &span, 1, text), 0);
    assert_int_equal(kit_step(&one, a, 200, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&one, &spec), 0);
    spec.prefix.spans = &span;
    spec.prefix.n_spans = 1;
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    assert_int_equal(kvq__session_spans(one.client, a, &span, 1, text), KVQ_E_POSITION);
    span.tokens = 0;
    span.first = 400;
    assert_int_equal(kvq__session_spans(one.client, a, &span, 1, text), KVQ_E_INVALID);
    span = (struct kvq__span){.first = UINT64_MAX - 3, .tokens = 4};
    assert_int_equal(kvq__session_spans(one.client, a, &span, 1, text), KVQ_E_INVALID);
    for (uint32_t i = 0; i < KVQ_MAX_SPANS; i++) {
        span = (struct kvq__span){.first = 400 + i, .tokens = 1};
        int rc = kvq__session_spans(one.client, a, &span, 1, text);
        assert_int_equal(rc, i + 1 < KVQ_MAX_SPANS ? 0 : KVQ_E_LIMIT);
    }
    assert_int_equal(kvq__session_spans(one.client, a + (1ull << 32), &span, 1, text), KVQ_E_STALE);
}

TEST(cannot_share)
{
    static const char *const own[] = {"ott2", "innerq-base", "oscar2:sink=32:outliers=3"};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    for (uint32_t i = 0; i < 3; i++) {
        spec.format = own[i];
        assert_int_equal(refused(&one, &spec), KVQ_E_UNSUPPORTED);
        assert_says(text, "fork");
    }
    spec = spec_of(&one, TOKENS);
    spec.model = NULL;
    assert_int_equal(refused(&one, &spec), KVQ_E_UNSUPPORTED);
    feed(&one, &spec, 300); // told all the same: of no use, and no harm
    struct kvq__prefix_info none;
    assert_int_equal(kvq__core_prefixes(kit.core, &(struct kvq__peer){.uid = 1000}, 0, &none, 1),
                     0);
}

// ---- What is not known ----

TEST(gaps)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    uint64_t a = feed(&one, &spec, 200);
    one.ids_at = 0;
    assert_int_equal(kit_step(&one, a, 100, HEADS, DIM), 0);
    one.ids_at = IDS;
    assert_int_equal(kit_step(&one, a, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&one, &spec), PAGE);
}

TEST(changes_of_course)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    struct kvq_request r = kit_header(KVQ_OP_ACCEPT, 1);
    spec.max_rollback = 40;
    uint64_t a = feed(&one, &spec, 140);
    // Tokens 100.. were drafts: 5, 7, 9 stay.
    struct kvq_entry_wire e = {.handle = a, .position = 140, .append = 40, .list_token = 3};
    int32_t *list = (int32_t *)(void *)(one.memory + OUT);
    list[0] = 5;
    list[1] = 7;
    list[2] = 9;
    r.list = (struct kvq_wire_view){.offset = OUT, .buffer = one.buffer};
    assert_int_equal(kit_request(&one, &r, &e), 0);
    assert_int_equal(kvq__queue_results(one.queue)[0].value, 103);
    const int32_t *had = kvq__ids_at(&kit_of(&one, a)->ids, 0);
    assert_int_equal(had[100], 1000 + 7 * 105);
    assert_int_equal(had[102], 1000 + 7 * 109);
    // Truncated, and told anew.
    assert_int_equal(kit_truncate(&one, a, 3), 0);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kit_step(&one, a, 100, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    spec.max_rollback = 0; // no part of what is stored
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
}

// ---- Windows ----

TEST(windows)
{
    static const struct kvq__layer_row sliding[] = {
        {4, HEADS, DIM, DIM, .kv_from = -1},
        {4, HEADS, DIM, DIM, .window = 200, .kv_from = -1},
    };
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    spec.layers = sliding;
    spec.n_layers = 2;
    // All at once: by the time its pages are packed the layer has let go of the first ones.
    struct kvq__session_spec bare = spec;
    bare.prefix = (struct kvq__prefix_spec){0};
    uint64_t a = open_as(&one, &bare, NULL);
    assert_int_equal(kit_step(&one, a, 8 * PAGE, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&one, &spec), 8 * PAGE);
    spec.prefix.tokens = 5 * PAGE;
    assert_int_equal(lookup(&one, &spec), 0);
    spec.prefix.tokens = TOKENS;
    uint64_t b = open_as(&one, &spec, &info);
    assert_int_equal(info.tokens, 8 * PAGE);
    uint64_t fork = kit_fork(&one, a, 8 * PAGE);
    for (uint32_t layer = 0; layer < 2; layer++)
        same_numbers(&one, fork, &one, b, layer);
    core_check(kit.core);
    // Step by step a prefix can end at any page.
    spec.salt = "again";
    feed(&one, &spec, 8 * PAGE);
    for (uint32_t page = 1; page <= 8; page++) {
        spec.prefix.tokens = page * PAGE;
        assert_int_equal(lookup(&one, &spec), page * PAGE);
    }
}

TEST(raw_formats)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS), other = spec_of(&two, TOKENS);
    spec.format = other.format = "f16";
    uint64_t a = feed(&one, &spec, 700), b = open_as(&two, &other, NULL);
    assert_int_equal(kit_of(&two, b)->tokens, 5 * PAGE);
    uint64_t fork = kit_fork(&one, a, 5 * PAGE);
    same_numbers(&one, fork, &two, b, 1);
    assert_int_equal(kit_step(&two, b, 60, HEADS, DIM), 0);
    same_numbers(&two, b, &one, a, 1);
}

// What can still be taken back is nobody else's yet, though it fills a page.
TEST(behind_the_rollback)
{
    static const char *const formats[] = {"f16", "oscar2"};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    spec.max_rollback = 200;
    for (uint32_t i = 0; i < 2; i++) {
        spec.format = formats[i];
        uint64_t a = feed(&one, &spec, 2 * PAGE);
        assert_int_equal(lookup(&one, &spec), 0);
        assert_int_equal(kit_truncate(&one, a, 200), 0);
        ids(&one)[100]++; // another token in its place
        assert_int_equal(kit_step(&one, a, 300, HEADS, DIM), 0);
        kit_pack(&kit);
        assert_int_equal(lookup(&one, &spec), PAGE);
        ids(&one)[100]--;
        assert_int_equal(lookup(&one, &spec), 0);
    }
}

// ---- Memory ----

// What a request under way reads stays as it is, though only the index has it by now, and others
// want memory meanwhile: they wait for it.
TEST_BETWEEN(under_way, setup_small, teardown)
{
    static struct member third;
    struct kvq__session_spec spec = spec_of(&one, TOKENS), other;
    float want[4 * DIM];
    spec.ns = NULL;
    uint64_t a = feed(&one, &spec, 12 * PAGE), b;
    attend(&one, a, 2, want);
    memset(one.memory + OUT, 0, sizeof want);
    struct kvq_entry_wire e = {.handle = a, .position = 12 * PAGE, .queries = 1};
    // Of the layer whose blocks would be given out first.
    struct kvq_request r = kit_attend(&one, 2, 0, OUT, 4, DIM);
    kit_load(&one, &r, &e);
    assert_int_equal(kvq__request_start(one.queue), KVQ__RUN);
    drop(&one, a);
    attach(&third, 1000);
    other = spec_of(&third, 0);
    other.ns = NULL;
    other.salt = "other";
    other.format = "f16"; // gives nothing back itself
    b = open_as(&third, &other, NULL);
    int rc = 0;
    for (uint32_t i = 0; i < 40 && rc == 0; i++) {
        rc = kit_step(&third, b, 40, HEADS, DIM);
        core_check(kit.core);
    }
    assert_int_equal(rc, 1);
    assert_int_equal(kvq__request_continue(third.queue), KVQ__WAIT);
    assert_int_equal(kit_go_on(&one, KVQ__RUN), 0);
    assert_memory_equal(one.memory + OUT, want, sizeof want);
    kit_pass(&kit, KVQ__LEAST_LOOK_NS);
    assert_int_equal(kvq__request_continue(third.queue), KVQ__DONE); // and now there is room
    assert_int_equal(kvq__queue_results(third.queue)[0].status, 0);
}

static int setup_pool(void **state)
{
    open_kit(6 * MIB, 0);
    return 0;
}

// The same of the pool, whoever's index has it.
TEST_BETWEEN(pool_is_small, setup_pool, teardown)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    char salt[16];
    spec.salt = salt;
    for (uint32_t i = 0; i < 40; i++) {
        snprintf(salt, sizeof salt, "%u", i);
        spec.ns = i % 2 ? "team" : "open";
        drop(&one, feed(&one, &spec, 1500));
        core_check(kit.core);
    }
    assert_int_equal(kit.events[KVQ__EVENT_MEMORY_FULL], 0);
    assert_int_equal(lookup(&one, &spec), 11 * PAGE);
}

// What no session has goes when it is asked for, and what they have stays.
TEST(dropped)
{
    struct kvq__peer first = {.uid = 1000, .gids = {1000}, .n_gids = 1}, other = {.uid = 77};
    struct kvq__session_spec spec = spec_of(&one, TOKENS), held = spec;
    uint64_t pages, bytes;
    drop(&one, feed(&one, &spec, 600));
    uint64_t idle = kit.core->pools[0].used_bytes;
    held.salt = "held";
    feed(&one, &held, 600);
    uint64_t used = kit.core->pools[0].used_bytes;
    assert_int_equal(kvq__core_drop_prefixes(kit.core, &other, "team", &pages, &bytes, text),
                     KVQ_E_PERMISSION);
    assert_int_equal(kvq__core_drop_prefixes(kit.core, &other, "", &pages, &bytes, text), 0);
    assert_int_equal(kvq__core_drop_prefixes(kit.core, &first, "open", &pages, &bytes, text), 0);
    assert_int_equal(pages, 0);
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    assert_int_equal(kvq__core_drop_prefixes(kit.core, &first, NULL, &pages, &bytes, text), 0);
    assert_int_equal(pages, 4);
    assert_int_equal(bytes, idle);
    assert_int_equal(kit.core->pools[0].used_bytes, used - idle);
    assert_int_equal(lookup(&one, &spec), 0);
    assert_int_equal(lookup(&one, &held), 4 * PAGE);
}

// Once a second, however many pages went and why.
TEST(told)
{
    struct kvq__peer peer = {.uid = 1000, .gids = {1000}, .n_gids = 1};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    uint64_t pages, bytes;
    for (uint32_t i = 0; i < 5; i++) {
        drop(&one, feed(&one, &spec, 300));
        assert_int_equal(kvq__core_drop_prefixes(kit.core, &peer, "team", &pages, &bytes, text), 0);
        kvq__core_tick(kit.core);
        assert_int_equal(kit.events[KVQ__EVENT_PREFIX_EVICTED], 1);
    }
    kit_tick(&kit, 1000000000u);
    assert_int_equal(kit.events[KVQ__EVENT_PREFIX_EVICTED], 2);
    assert_says(kit.event_text, "1024 tokens");
    assert_says(kit.event_text, " 0 tokens for room, 0 that nobody used for long");
    drop(&one, feed(&one, &spec, 300));
    kit_tick(&kit, 30000000000u);
    assert_int_equal(kit.events[KVQ__EVENT_PREFIX_EVICTED], 3);
    assert_says(kit.event_text, "256 tokens");
    assert_says(kit.event_text, " 256 that nobody used for long, 0 dropped");
    kit_tick(&kit, 30000000000u);
    assert_int_equal(kit.events[KVQ__EVENT_PREFIX_EVICTED], 3); // nothing since
}

// Listings say what is shared, of as many sessions as they have time to look at.
TEST(listed)
{
    struct kvq__peer peer = {.uid = 1000, .gids = {1000}, .n_gids = 1};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    struct kvq__session_info list[2], whole;
    struct kvq__list_at first = {0};
    uint64_t budget = KVQ__LIST_LOOKS;
    uint64_t looks = 3 * 7, a = feed(&one, &spec, 800); // 7 pages of 3 layers
    uint64_t b = open_as(&one, &spec, NULL);
    assert_int_equal(kvq__core_sessions(kit.core, &peer, "team", first, &budget, list, 2), 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_false(list[i].shared_unknown);
        assert_true(list[i].shared_bytes > 0);
    }
    assert_int_equal(kvq__session_info(one.client, a, &whole, text), 0);
    assert_int_equal(list[0].id == whole.id ? list[0].shared_bytes : list[1].shared_bytes,
                     whole.shared_bytes);
    kvq__session_count_shared(kit_of(&one, a), &whole, &looks);
    assert_false(whole.shared_unknown);
    assert_int_equal(looks, 0);
    kvq__session_count_shared(kit_of(&one, b), &whole, &looks);
    assert_true(whole.shared_unknown);
}

// ---- Namespaces and shards ----

TEST(across_namespaces)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS), other = spec_of(&two, TOKENS);
    spec.ns = "open";
    uint64_t a = feed(&one, &spec, 600), b = open_as(&two, &other, &info); // "team" may
    assert_int_equal(info.tokens, 4 * PAGE);
    check_same_blocks(a, b, 4);
    core_check(kit.core);
    // What its client could not map it is not offered.
    struct kvq__table_memory memory = {.host = two.memory, .layers = 3, .pages = 16};
    assert_int_equal(kvq__table_open(two.client, b, 0, &memory, text), KVQ_E_UNSUPPORTED);
    // It goes on in its own index.
    assert_int_equal(kit_step(&two, b, 200, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&two, &other), 5 * PAGE);
    assert_int_equal(lookup(&one, &spec), 4 * PAGE); // not the other way round
    drop(&one, a);
    drop(&two, b);
    assert_int_equal(lookup(&two, &other), 5 * PAGE);
    other.ns = NULL; // uid-1001 is not in the list
    assert_int_equal(lookup(&two, &other), 0);
}

TEST(all_shards)
{
    static const struct kvq__layer_row more[] = {{4, HEADS, DIM, DIM, .kv_from = -1, .repeat = 2}};
    struct kvq__session_spec first = spec_of(&one, TOKENS), second = spec_of(&two, TOKENS);
    first.shards = second.shards = 2;
    second.shard = 1;
    second.layers = more; // by layers: a rank has its own
    feed(&one, &first, 900);
    assert_int_equal(lookup(&one, &first), 0); // nothing is there of the second
    feed(&two, &second, 500);
    assert_int_equal(lookup(&one, &first), 3 * PAGE);
    assert_int_equal(lookup(&two, &second), 3 * PAGE);
    first.name = second.name = "pair";
    open_as(&one, &first, &info);
    assert_int_equal(info.tokens, 3 * PAGE);
    uint64_t b = open_as(&two, &second, &info);
    assert_int_equal(info.tokens, 3 * PAGE);
    assert_int_equal(kvq__session_info(two.client, b, &info, text), 0);
    assert_int_equal(info.group_tokens, 3 * PAGE);
}

// ---- Hostile numbers ----

static int begin_with(uint64_t handle, uint64_t offset, uint32_t q_row, uint32_t buffer)
{
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, 5);
    struct kvq_entry_wire e = {.handle = handle, .append = 100, .q_row = q_row};
    r.flags = KVQ_REQ_TOKEN_IDS;
    r.list = (struct kvq_wire_view){.offset = offset, .buffer = buffer};
    return kit_ask(&one, &r, &e);
}

TEST(hostile)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    uint64_t a = feed(&one, &spec, 0);
    assert_int_equal(begin_with(a, BUFFER - 396, 0, one.buffer), KVQ_E_BOUNDS);
    assert_int_equal(begin_with(a, BUFFER - 400, 1, one.buffer), KVQ_E_BOUNDS);
    assert_int_equal(begin_with(a, 0, UINT32_MAX, one.buffer), KVQ_E_BOUNDS);
    assert_int_equal(begin_with(a, UINT64_MAX - 3, 0, one.buffer), KVQ_E_BOUNDS);
    assert_int_equal(begin_with(a, 2, 0, one.buffer), KVQ_E_INVALID);
    assert_int_equal(begin_with(a, 0, 0, one.buffer + 999), KVQ_E_BUFFER);
    assert_int_equal(begin_with(a, BUFFER - 400, 0, one.buffer), 0);
    spec.prefix.tokens = KVQ_MAX_SESSION_TOKENS + 1;
    assert_int_equal(refused(&one, &spec), KVQ_E_LIMIT);
    spec.prefix.tokens = UINT64_MAX;
    assert_int_equal(refused(&one, &spec), KVQ_E_LIMIT);
    spec.prefix.tokens = (BUFFER - IDS) / 4 + 1;
    assert_int_equal(refused(&one, &spec), KVQ_E_BOUNDS);
    spec.prefix.tokens = (BUFFER - IDS) / 4;
    assert_int_equal(lookup(&one, &spec), 0);
    spec.prefix.offset = IDS + 2;
    spec.prefix.tokens = 5;
    assert_int_equal(refused(&one, &spec), KVQ_E_BOUNDS);
    spec.prefix.offset = UINT64_MAX - 3;
    assert_int_equal(refused(&one, &spec), KVQ_E_BOUNDS);
    spec.prefix.buffer += 1000;
    assert_int_equal(refused(&one, &spec), KVQ_E_BUFFER);
    spec = spec_of(&one, TOKENS);
    spec.n_layers = 0;
    assert_int_equal(refused(&one, &spec), KVQ_E_INVALID);
    // A flag that the operation does not take.
    struct kvq_request r = kit_header(KVQ_OP_TRUNCATE, 0);
    r.flags = KVQ_REQ_TOKEN_IDS;
    assert_int_equal(kit_request(&one, &r, NULL), KVQ_E_INVALID);
}

// ---- In pieces ----

// The index is looked at some pages at a time, whatever happens to it in between, and what was
// found is not hashed again when a session is opened with it.
TEST(in_pieces)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS), with = spec;
    struct kvq__prefix_ask *ask;
    uint64_t pages, bytes, a = feed(&one, &spec, 1500);
    assert_int_equal(kvq__prefix_ask(one.client, &spec, &ask, text), 0);
    kvq__prefix_ask_hash(ask);
    assert_false(kvq__prefix_ask_match(ask));
    assert_in_range(ask->here, 1, 10);
    while (!kvq__prefix_ask_match(ask))
        continue;
    assert_int_equal(ask->here, 11);
    with.prefix.ask = ask;
    drop(&one, open_as(&one, &with, &info));
    assert_int_equal(info.prefix_tokens, 11 * PAGE);
    assert_int_equal(lookup(&one, &with), 11 * PAGE);
    // Another layer's format, and it is not what was looked for.
    with.format = "oscar3";
    drop(&one, open_as(&one, &with, &info));
    assert_int_equal(info.prefix_tokens, 0);
    with.format = spec.format;
    // Given up between two pieces.
    kvq__prefix_ask_again(ask, 0);
    assert_false(kvq__prefix_ask_match(ask));
    drop(&one, a);
    assert_int_equal(kvq__core_drop_prefixes(kit.core, &(struct kvq__peer){.admin = true}, "team",
                                             &pages, &bytes, text),
                     0);
    assert_int_equal(pages, 11);
    assert_true(kvq__prefix_ask_match(ask) || kvq__prefix_ask_match(ask));
    drop(&one, open_as(&one, &with, &info));
    assert_int_equal(info.prefix_tokens, 0);
    kvq__prefix_ask_end(&ask);
}

int main(void)
{
    return run_all(NULL, NULL);
}
