// SPDX-License-Identifier: Apache-2.0
//
// Pools of few extents: what is refused although bytes are free, and how many these may be.
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, EXTENT = 2 * MIB, BUFFER = 32 * MIB, HELD = 4096 };

static struct kit kit;

static struct kvq__pool *pool(void)
{
    return &kit.core->pools[0];
}

static void start(uint64_t seed, uint64_t extents)
{
    snprintf(kit_context, sizeof kit_context, "seed %llu, %llu extents", (unsigned long long)seed,
             (unsigned long long)extents);
    kit_open(&kit, seed, extents * EXTENT, 0);
}

// ---- Blocks of any mix of sizes ----

static const char *const formats[] = {"f16", "int8", "k8v4", "kvq2", "ott2", "kivi-sink2"};

// Sizes of blocks as layers have them: raw, packed, and with extras.
static uint32_t draw_sizes(uint64_t *sizes, uint32_t room)
{
    uint32_t n = 0;
    while (n + 3 <= room) {
        struct kvq_format f;
        char why[KVQ_TEXT_BYTES];
        uint16_t dim = kit_chance(&kit, 50) ? 64 : 128;
        struct kvq_shape s = {.q_heads = 8,
                              .kv_heads = (uint16_t)(1 + kit_below(&kit, 4)),
                              .k_dim = dim,
                              .v_dim = dim};
        const char *name = formats[kit_below(&kit, sizeof formats / sizeof *formats)];
        assert_int_equal(kvq_format_parse(name, &f, why, sizeof why), 0);
        struct kvq_raw_layout raw = kvq_raw_layout_of(&s);
        struct kvq_layout packed = kvq_layout_of(&f, &s);
        sizes[n++] = kvq_raw_bytes(&raw, KVQ_BLOCK_TOKENS);
        if (!kvq_is_raw(&f))
            sizes[n++] = kvq_block_bytes(&packed, &s);
        if (kvq_extras_bytes(&f, &s))
            sizes[n++] = kvq_extras_bytes(&f, &s);
    }
    return n;
}

static struct kvq__ref held[HELD];
static uint32_t n_held;

static int take(struct kvq__namespace *ns, uint64_t bytes)
{
    assert_true(n_held < HELD);
    int rc = kit_chance(&kit, 25)
                 ? kvq__block_new_passing(kit.core, ns, pool(), bytes, NULL, &held[n_held])
                 : kvq__block_new(kit.core, ns, pool(), bytes, NULL, &held[n_held]);
    n_held += rc == 0;
    return rc;
}

static void give(uint32_t i)
{
    kvq__block_drop(kit.core, &held[i], NULL);
    held[i] = held[--n_held];
    held[n_held] = (struct kvq__ref){0};
}

static void give_all(void)
{
    while (n_held)
        give(n_held - 1);
}

static uint64_t free_bytes(void)
{
    return pool()->budget - pool()->used_bytes;
}

// Nothing was given back yet: what is free and refused is one stretch of each extent at most.
PLAIN_TEST(test_fills)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t extents = 1 + seed % 8, sizes[12];
        start(seed, extents);
        struct kvq__namespace *ns = kit_namespace(&kit, 1000);
        uint32_t n = draw_sizes(sizes, 12);
        uint64_t bytes;
        do
            bytes = sizes[kit_below(&kit, n)];
        while (take(ns, bytes) == 0);
        assert_true(free_bytes() < extents * bytes);
        give_all();
        assert_int_equal(pool()->used_bytes, 0);
        kit_close(&kit);
    }
}

// ---- Blocks that come and go ----

// What a namespace has of the pool.
struct share {
    uint64_t free, longest;
    uint32_t extents, blocks;
};

static struct share share_of(const struct kvq__namespace *ns)
{
    struct share share = {0};
    const struct kvq__extent *e;
    const struct kvq__block *b;
    TAILQ_FOREACH (e, &ns->arenas[0].extents, link) {
        share.extents++;
        TAILQ_FOREACH (b, &e->blocks, beside) {
            share.blocks += !b->free;
            share.free += b->free ? b->bytes : 0;
            share.longest = b->free && b->bytes > share.longest ? b->bytes : share.longest;
        }
    }
    return share;
}

// What the header of pools promises of a block that was refused.
static void check_refusal(const struct kvq__namespace *ns, uint64_t bytes)
{
    struct share share = share_of(ns);
    assert_true(share.longest < bytes);
    assert_true(share.free <= bytes * (share.extents + share.blocks));
    assert_true(pool()->extents_taken + EXTENT > pool()->budget);
    assert_true(TAILQ_EMPTY(&pool()->empty)); // nobody was told of any
}

// Half of what is there, as sessions end: neighbours first, or here and there.
static void give_half(void)
{
    uint32_t n = n_held / 2, at = kit_below(&kit, n_held);
    bool together = kit_chance(&kit, 50);
    for (uint32_t i = 0; i < n; i++)
        give(together ? at % n_held : kit_below(&kit, n_held));
}

// Fills the pool and empties half of it again and again. Returns the largest part of the extents of
// who was refused, in thousandths, that was free then.
static uint64_t churn(uint64_t seed, uint32_t namespaces)
{
    struct kvq__namespace *ns[3];
    uint64_t sizes[12], worst = 0;
    start(seed, 1 + seed % 8);
    for (uint32_t i = 0; i < namespaces; i++)
        ns[i] = kit_namespace(&kit, 1000 + i);
    uint32_t n = draw_sizes(sizes, 12);
    for (uint32_t round = 0; round < 20; round++) {
        uint64_t bytes;
        uint32_t i;
        do {
            bytes = sizes[kit_below(&kit, n)];
            i = kit_below(&kit, namespaces);
        } while (take(ns[i], bytes) == 0);
        check_refusal(ns[i], bytes);
        struct share share = share_of(ns[i]);
        uint64_t part = share.extents ? share.free * 1000 / (share.extents * (uint64_t)EXTENT) : 0;
        worst = part > worst ? part : worst;
        give_half();
    }
    give_all();
    kit_close(&kit);
    return worst;
}

PLAIN_TEST(test_churn)
{
    uint64_t sum = 0;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        sum += churn(seed, 1);
        churn(seed, 2 + seed % 2);
    }
    print_message("%llu%% of the pool free at the worst refusal, on average\n",
                  (unsigned long long)sum / 1000);
    assert_true(sum / 100 < 250); // 115 when it was written, 960 with extents of one size each
}

// ---- Sessions ----

static const struct kvq__layer_row rows[][2] = {
    {{1, 1, 64, 64, .format = "kivi2-g64", .kv_from = -1},
     {1, 1, 64, 64, .format = "f16", .kv_from = -1}},
    {{1, 1, 64, 64, .format = "int8", .kv_from = -1},
     {1, 1, 64, 64, .format = "ott2", .kv_from = -1}},
    {{1, 1, 64, 64, .format = "kvq2", .kv_from = -1},
     {1, 1, 64, 64, .format = "kivi-sink2", .kv_from = -1}},
};

// Sessions of six formats, one after the other, take steps until one is refused: by then all of the
// pool is in use but the ends of extents, gaps, and what the refused step has given back.
PLAIN_TEST(test_sessions)
{
    enum { N = sizeof rows / sizeof *rows, STEP = 100, LARGEST = 128 * 64 * 2 * 2 };
    for (uint64_t extents = 1; extents <= 4; extents++) {
        struct member m;
        uint64_t handles[N];
        uint32_t i = 0, steps = 0;
        start(extents, extents);
        assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
        for (uint32_t j = 0; j < N; j++)
            assert_true((handles[j] = kit_session(&m, rows[j], 2, 64 * j)) != 0);
        int rc;
        while ((rc = kit_step(&m, handles[i], STEP, 1, 64)) == 0) {
            kit_pack(&kit);
            i = kit_below(&kit, N);
            steps++;
        }
        assert_int_equal(rc, KVQ_E_NO_MEMORY);
        assert_true(steps > 20 * extents);
        // Two layers take up to two pages of each kind, and raw blocks that longer ones have
        // replaced leave gaps.
        assert_true(free_bytes() < 3 * LARGEST * extents + 2 * 2 * 2 * LARGEST);
        kit_close(&kit);
    }
}

// ---- Long steps ----

enum { HEADS = 8, DIM = 64, LONG = 4000, LARGE = 64 }; // tokens; extents

static const struct kvq__layer_row long_row = {HEADS,        HEADS, DIM, DIM, .format = "kvq2",
                                               .kv_from = -1};

// Empty extents go back, as they do some time after they have become empty.
static void pass_time(void)
{
    kit_tick(&kit, 11 * 1000000000ull);
}

static uint32_t told_of(struct member *m, uint64_t handle, uint64_t *known)
{
    struct kvq__extent_export told[LARGE];
    char text[KVQ_TEXT_BYTES];
    bool more;
    int n = kvq__extents_tell(m->client, handle, told, LARGE, known, &more, text);
    assert_true(n >= 0 && !more);
    return (uint32_t)n;
}

static uint32_t extents_taken(void)
{
    return (uint32_t)(pool()->extents_taken / EXTENT);
}

// The tokens of a long step as they came take five times what is left of them once they are packed.
// The rest goes back to the system, and no client that maps the session's extents keeps it.
PLAIN_TEST(test_long_steps)
{
    struct member m;
    uint64_t handle, known;
    start(1, LARGE);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    assert_true((handle = kit_session(&m, &long_row, 1, 200)) != 0); // two pages stay as they are
    assert_int_equal(kit_step(&m, handle, LONG, HEADS, DIM), 0);
    uint32_t most = extents_taken();
    kit_pack(&kit);
    uint64_t needs = (pool()->used_bytes + EXTENT - 1) / EXTENT;
    assert_true(most >= 3 * needs);
    uint32_t told = told_of(&m, handle, &known);
    pass_time();
    const struct kvq__extent *e;
    TAILQ_FOREACH (e, &kit_of(&m, handle)->ns->arenas[0].extents, link)
        assert_false(e->passing);
    assert_true(extents_taken() <= needs + 1);
    assert_int_equal(told, extents_taken());
    kit_close(&kit);
}

// More extents than one walk finds are told in pieces, the first to be mapped first, each once.
PLAIN_TEST(test_told_in_pieces)
{
    enum { MOST = 50, PIECE = 7 };
    struct member m;
    struct kvq__layer_row row = long_row;
    struct kvq__extent_export told[PIECE];
    bool seen[2 * LARGE] = {false}, more = true;
    uint64_t handle, known = 0;
    char text[KVQ_TEXT_BYTES];
    uint32_t sum = 0;
    start(1, LARGE);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    row.format = "f16";
    row.repeat = 64;
    assert_true((handle = kit_session(&m, &row, 1, 0)) != 0);
    while (extents_taken() < MOST)
        assert_int_equal(kit_step(&m, handle, 128, HEADS, DIM), 0);
    while (more) {
        int n = kvq__extents_tell(m.client, handle, told, PIECE, &known, &more, text);
        assert_in_range(n, 1, PIECE);
        for (int i = 0; i < n; i++) {
            assert_true(told[i].number < 2 * LARGE && !seen[told[i].number]);
            seen[told[i].number] = true;
            sum++;
        }
        assert_int_equal(known, sum); // in their order
    }
    assert_true(sum > 40);
    assert_int_equal(known, kit_of(&m, handle)->ns->arenas[0].last_serial);
    kit_close(&kit);
}

// An extent that a client has mapped is not given back before the client lets go of it. So a long
// step does not put what passes there, though the extent is empty.
PLAIN_TEST(test_passing_is_unseen)
{
    struct member m;
    uint64_t handle, known;
    start(1, LARGE);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    for (int session = 0; session < 2; session++) {
        assert_true((handle = kit_session(&m, &long_row, 1, 200)) != 0);
        assert_int_equal(kit_step(&m, handle, session ? LONG : 1, HEADS, DIM), 0);
        kit_pack(&kit);
        (void)told_of(&m, handle, &known);
        if (session == 0)
            kit_drop(&m, handle);
    }
    uint64_t needs = (pool()->used_bytes + EXTENT - 1) / EXTENT;
    pass_time();
    assert_true(extents_taken() <= needs + 1);
    const struct kvq__extent *e;
    TAILQ_FOREACH (e, &pool()->empty, link)
        assert_false(e->exported);
    kit_close(&kit);
}

// What a client did not hear it is told again, once. It may have mapped it all the same, so no
// extent of that goes back while the client lives.
PLAIN_TEST(test_told_again)
{
    struct member m;
    uint64_t handle, known;
    start(1, LARGE);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    kvq__extents_untell(m.client); // nothing was told
    assert_true((handle = kit_session(&m, &long_row, 1, 200)) != 0);
    assert_int_equal(kit_step(&m, handle, 200, HEADS, DIM), 0);
    uint32_t heard = told_of(&m, handle, &known);
    uint64_t before = known;
    assert_int_equal(told_of(&m, handle, &known), 0);
    kvq__extents_untell(m.client); // of nothing
    assert_int_equal(told_of(&m, handle, &known), 0);
    assert_int_equal(kit_step(&m, handle, LONG, HEADS, DIM), 0);
    uint32_t unheard = told_of(&m, handle, &known);
    assert_true(heard > 0 && unheard > 0 && known > before);
    kvq__extents_untell(m.client);
    kvq__extents_untell(m.client);
    assert_int_equal(told_of(&m, handle, &known), unheard);
    kvq__extents_untell(m.client);
    kit_drop(&m, handle);
    pass_time();
    assert_int_equal(extents_taken(), heard + unheard);
    core_check(kit.core);
    member_close(&m);
    pass_time();
    assert_int_equal(extents_taken(), 0);
    kit_close(&kit);
}

// A page table that names tokens which are yet to be packed, of a prompt that has not ended: its
// client has to know where they lie.
PLAIN_TEST(test_seen_while_passing)
{
    struct member m;
    uint64_t known;
    char text[KVQ_TEXT_BYTES];
    struct kvq__session_info info;
    start(2, LARGE);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    struct kvq__session_spec spec = {.layers = &long_row, .n_layers = 1, .prompt_tokens = LONG + 1};
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    uint64_t handle = info.handle;
    assert_int_equal(kit_step(&m, handle, LONG, HEADS, DIM), 0);
    uint32_t before = told_of(&m, handle, &known);
    struct kvq__table_memory memory = {
        .layers = 1, .pages = LARGE, .host = calloc(1, kvq_table_bytes(1, LARGE))};
    assert_int_equal(kvq__table_open(m.client, handle, 1ull << 40, &memory, text), 0);
    assert_int_equal(kit_whole(&m, handle, 0, HEADS, DIM), 0);
    assert_true(kvq__queue_results(m.queue)[0].extents > known);
    uint32_t after = told_of(&m, handle, &known);
    assert_int_equal(before + after, extents_taken());
    assert_int_equal(kvq__queue_results(m.queue)[0].extents, known);
    kit_close(&kit);
    free(memory.host);
}

// Where half of the pool is taken, what passes and what stays lie side by side again.
PLAIN_TEST(test_apart_while_there_is_room)
{
    for (uint64_t extents = 1; extents <= 8; extents++) {
        start(extents, extents);
        struct kvq__namespace *ns = kit_namespace(&kit, 1000);
        struct kvq__ref stays = {0}, passes = {0};
        assert_int_equal(kvq__block_new(kit.core, ns, pool(), EXTENT / 4, NULL, &stays), 0);
        assert_int_equal(kvq__block_new_passing(kit.core, ns, pool(), EXTENT / 4, NULL, &passes),
                         0);
        assert_int_equal(stays.block->extent == passes.block->extent, extents < 4);
        kvq__block_drop(kit.core, &stays, NULL);
        kvq__block_drop(kit.core, &passes, NULL);
        kit_close(&kit);
    }
}

static int refuse(void *context, size_t bytes, struct kvq__memory *memory)
{
    (void)context, (void)bytes, (void)memory;
    return KVQ_E_NO_MEMORY;
}

// Where the system has no memory for a further extent, either goes where there is room.
PLAIN_TEST(test_together_for_want_of_memory)
{
    for (int first = 0; first < 2; first++) {
        start(3, LARGE);
        struct kvq__namespace *ns = kit_namespace(&kit, 1000);
        struct kvq__ref stays = {0}, passes = {0};
        if (first)
            assert_int_equal(kvq__block_new(kit.core, ns, pool(), EXTENT / 4, NULL, &stays), 0);
        else
            assert_int_equal(
                kvq__block_new_passing(kit.core, ns, pool(), EXTENT / 4, NULL, &passes), 0);
        pool()->memory.acquire = refuse;
        if (first)
            assert_int_equal(
                kvq__block_new_passing(kit.core, ns, pool(), EXTENT / 4, NULL, &passes), 0);
        else
            assert_int_equal(kvq__block_new(kit.core, ns, pool(), EXTENT / 4, NULL, &stays), 0);
        assert_ptr_equal(stays.block->extent, passes.block->extent);
        kvq__block_drop(kit.core, &stays, NULL);
        kvq__block_drop(kit.core, &passes, NULL);
        kit_close(&kit);
    }
}

static int make_later(void *context, size_t bytes, struct kvq__memory *memory)
{
    (void)context, (void)bytes, (void)memory;
    return KVQ_E_BUSY;
}

static void assert_refused(const struct kvq__grant *grant, const struct kvq__namespace *ns,
                           int code)
{
    assert_int_equal(grant->refused.code, code);
    assert_ptr_equal(grant->refused.ns, ns);
    assert_ptr_equal(grant->refused.pool, pool());
    assert_int_equal(grant->refused.bytes, EXTENT);
}

// Who can wait is told that an extent is being made; who cannot has it made at once.
PLAIN_TEST(test_a_grant_says_what_was_refused)
{
    start(5, 2);
    struct kvq__namespace *ns = kit_namespace(&kit, 1000);
    struct kvq__grant waits = {.may_wait = true}, cannot = {0};
    struct kvq__ref refs[3] = {0};
    pool()->memory.take = make_later;
    int rc = kvq__block_new(kit.core, ns, pool(), EXTENT, &waits, &refs[0]);
    assert_int_equal(rc, KVQ_E_BUSY);
    assert_refused(&waits, ns, KVQ_E_BUSY);
    for (int i = 0; i < 2; i++) {
        rc = kvq__block_new(kit.core, ns, pool(), EXTENT, &cannot, &refs[i]);
        assert_int_equal(rc, 0);
        assert_int_equal(cannot.refused.code, 0);
    }
    rc = kvq__block_new(kit.core, ns, pool(), EXTENT, &cannot, &refs[2]);
    assert_int_equal(rc, KVQ_E_NO_MEMORY);
    assert_refused(&cannot, ns, KVQ_E_NO_MEMORY);
    rc = kvq__block_new(kit.core, ns, pool(), EXTENT, NULL, &refs[2]);
    assert_int_equal(rc, KVQ_E_NO_MEMORY);
    // Those who wait for room look again only if they gain by what is dropped.
    uint64_t freed = kit.core->room.lines[0].freed;
    kvq__block_drop_idle(kit.core, &refs[0], false);
    assert_int_equal(kit.core->room.lines[0].freed, freed);
    kvq__block_drop_idle(kit.core, &refs[1], true);
    assert_int_equal(kit.core->room.lines[0].freed, freed + 1);
    assert_int_equal(pool()->used_bytes, 0);
    kit_close(&kit);
}

// Bare extents: who says so takes a block without its pages; for others all of the extent's come.
PLAIN_TEST(test_bare)
{
    start(6, 1);
    struct kvq__namespace *ns = kit_namespace(&kit, 1000);
    struct kvq__grant bare = {.bare = true};
    struct kvq__ref refs[3] = {0};
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), 4096, &bare, &refs[0]), 0);
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), 8192, &bare, &refs[1]), 0);
    assert_int_equal(kit.backed, 0);
    assert_int_equal(pool()->used_bytes, 3 * 4096);
    assert_int_equal(kvq__block_back(pool(), refs[1].block), 0);
    assert_int_equal(kit.backed, 8192);
    memset(refs[1].data, 1, 8192);
    kit.no_pages = true;
    assert_int_equal(kvq__block_back(pool(), refs[0].block), KVQ_E_NO_MEMORY);
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), 64, NULL, &refs[2]), KVQ_E_NO_MEMORY);
    assert_int_equal(pool()->used_bytes, 3 * 4096);
    kit.no_pages = false;
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), 64, NULL, &refs[2]), KVQ_E_NO_MEMORY);
    kit.core->now += 100000000; // it is not tried again before
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), 64, NULL, &refs[2]), 0);
    assert_int_equal(kit.backed, 8192 + EXTENT);
    memset(refs[0].data, 1, 4096);
    memset(refs[2].data, 1, 64);
    for (int i = 0; i < 3; i++)
        kvq__block_drop(kit.core, &refs[i], NULL);
    kit_close(&kit);
}

// A bare extent that gets no more pages keeps nobody from another extent, and goes back to the
// system when it is empty and that one needs its room.
PLAIN_TEST(test_bare_without_pages)
{
    start(8, 2);
    struct kvq__namespace *ns = kit_namespace(&kit, 1000);
    struct kvq__grant bare = {.bare = true};
    struct kvq__ref refs[2] = {0};
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), 4096, &bare, &refs[0]), 0);
    kit.no_pages = true;
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), EXTENT, NULL, &refs[1]), 0);
    memset(refs[1].data, 1, EXTENT);
    kvq__block_drop(kit.core, &refs[0], NULL);
    assert_int_equal(pool()->extents_taken, 2 * EXTENT);
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), EXTENT, NULL, &refs[0]), 0);
    memset(refs[0].data, 1, EXTENT);
    assert_int_equal(pool()->extents_taken, 2 * EXTENT);
    assert_int_equal(kit.backed, 0);
    kit.no_pages = false;
    for (int i = 0; i < 2; i++)
        kvq__block_drop(kit.core, &refs[i], NULL);
    kit_close(&kit);
}

// Blocks that are passed over a bare extent without pages share the next one.
PLAIN_TEST(test_past_a_bare_extent)
{
    start(9, 8);
    struct kvq__namespace *ns = kit_namespace(&kit, 1000);
    struct kvq__grant bare = {.bare = true};
    struct kvq__ref first = {0}, refs[20] = {0};
    assert_int_equal(kvq__block_new(kit.core, ns, pool(), 4096, &bare, &first), 0);
    kit.no_pages = true;
    for (int i = 0; i < 20; i++)
        assert_int_equal(kvq__block_new(kit.core, ns, pool(), 4096, NULL, &refs[i]), 0);
    assert_int_equal(pool()->extents_taken, 2 * EXTENT);
    kit.no_pages = false;
    for (int i = 0; i < 20; i++)
        kvq__block_drop(kit.core, &refs[i], NULL);
    kvq__block_drop(kit.core, &first, NULL);
    kit_close(&kit);
}

// A bare extent that is empty is nothing to be zeroed for another namespace.
PLAIN_TEST(test_bare_for_another)
{
    start(7, 1);
    struct kvq__namespace *one = kit_namespace(&kit, 1000), *other = kit_namespace(&kit, 1001);
    struct kvq__grant bare = {.bare = true};
    struct kvq__ref ref = {0};
    assert_int_equal(kvq__block_new(kit.core, one, pool(), 4096, &bare, &ref), 0);
    kvq__block_drop(kit.core, &ref, NULL);
    assert_int_equal(kvq__block_new(kit.core, other, pool(), EXTENT, NULL, &ref), 0);
    memset(ref.data, 1, EXTENT);
    kvq__block_drop(kit.core, &ref, NULL);
    kit_close(&kit);
}

int main(void)
{
    return run_all(NULL, NULL);
}
