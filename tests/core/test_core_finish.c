// SPDX-License-Identifier: Apache-2.0
//
// Sessions that end soon after their last token: others find all whole pages of them, with the
// bytes that a longer session has there. Sessions that stand in the way of others, or that end for
// another reason, leave what was there before.
#include "daemon/core/session/finish.h"
#include "tests/core/prefix_kit.h"

static struct kvq__session_info info;

// A session with so many tokens of which nothing was packed in the background.
static uint64_t feed_unpacked(const struct kvq__session_spec *spec, uint32_t tokens)
{
    struct kvq__session_spec bare = *spec;
    bare.prefix = (struct kvq__prefix_spec){0};
    uint64_t handle = open_as(&one, &bare, NULL);
    for (uint32_t at = 0; at < tokens; at += 200) {
        uint32_t n = tokens - at < 200 ? tokens - at : 200;
        assert_int_equal(kit_step(&one, handle, n, HEADS, DIM), 0);
    }
    return handle;
}

static void close_it(uint64_t handle)
{
    assert_int_equal(kvq__session_close(one.client, handle, text), 0);
    core_check(kit.core);
}

static bool is_finishing(void)
{
    return !TAILQ_EMPTY(&kit.core->finishing);
}

// Packs what has to be, and waits until the memory of sessions that have ended is free.
static void settle(void)
{
    do {
        kit_pack(&kit);
        core_check(kit.core);
    } while (kvq__core_poll(kit.core));
    assert_true(!is_finishing() && TAILQ_EMPTY(&kit.core->freeing.ended));
}

static uint64_t pool_used(void)
{
    return kit.core->pools[0].used_bytes;
}

static struct kvq__namespace *team(void)
{
    static const struct kvq__peer admin = {.admin = true};
    struct kvq__namespace *ns = NULL;
    assert_int_equal(kvq__namespace_get(kit.core, &admin, "team", &ns, text), 0);
    return ns;
}

// Of a prompt of 400 tokens, with an answer that is shorter than what may be taken back.
static struct kvq__session_spec short_answer(void)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    spec.max_rollback = 32;
    return spec;
}

// ---- What others find ----

// The pages that a session leaves are those of one that goes on.
static void leaves_as(const char *format)
{
    struct kvq__session_spec spec = short_answer(), longer;
    spec.format = format;
    longer = spec;
    longer.salt = "longer";
    spec.prompt_tokens = 400;
    close_it(feed_unpacked(&spec, 404));
    settle();
    assert_int_equal(lookup(&one, &spec), 3 * PAGE);
    uint64_t a = open_as(&one, &spec, &info), b = feed(&one, &longer, 1000);
    assert_int_equal(info.tokens, 3 * PAGE);
    const struct kvq__session *s = kit_of(&one, a), *t = kit_of(&one, b);
    for (uint32_t i = 0; i < s->n_layers; i++)
        for (uint32_t p = 0; p < 3; p++) {
            const struct kvq__ref *x = &kvq__page(&s->layers[i], p)->packed;
            const struct kvq__ref *y = &kvq__page(&t->layers[i], p)->packed;
            assert_ptr_not_equal(x->data, y->data);
            assert_memory_equal(x->data, y->data, s->layers[i].packed_bytes);
        }
    uint64_t fork = kit_fork(&one, b, 3 * PAGE);
    for (uint32_t layer = 0; layer < s->n_layers; layer++)
        same_numbers(&one, a, &one, fork, layer);
    drop(&one, a);
    drop(&one, b);
    drop(&one, fork);
    settle();
}

TEST(bytes_of_a_longer_session)
{
    leaves_as("oscar2");
    leaves_as("kivi-sink2"); // whose newest 96 tokens stay in 16 bits
    leaves_as("k8v4");
    leaves_as("kvq2");
}

// What is due already when it ends, and was not packed yet.
TEST(however_nobody_needs_it)
{
    struct kvq__session_spec spec = spec_of(&one, TOKENS), other = spec_of(&two, TOKENS);
    spec.name = "named";
    spec.on_detach = KVQ__DETACH_DROP;
    close_it(feed_unpacked(&spec, 300));
    assert_int_equal(lookup(&one, &spec), 0);
    settle();
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    spec.salt = "its client drops it";
    drop(&one, feed_unpacked(&spec, 300));
    settle();
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    spec.salt = other.salt = "its client ends";
    spec.name = NULL;
    feed_unpacked(&spec, 300);
    kvq__client_leave(one.client);
    settle();
    assert_int_equal(lookup(&two, &other), 2 * PAGE);
}

// While a client may still say what follows, and take some back, all is as it was.
TEST(one_that_lives_waits)
{
    struct kvq__session_spec spec = short_answer();
    uint64_t a = feed_unpacked(&spec, 404), b;
    settle();
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    spec.name = "kept";
    spec.salt = "kept";
    b = feed_unpacked(&spec, 404);
    close_it(b);
    settle();
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    assert_int_equal(kit_truncate(&one, a, 32), 0);
}

// Layers that do not pack, and one whose window has let go of pages.
TEST(other_layers)
{
    static const struct kvq__layer_row mixed[] = {
        {4, HEADS, DIM, DIM, .kv_from = -1, .repeat = 2},
        {4, HEADS, DIM, DIM, .format = "f16", .kv_from = -1},
        {4, HEADS, DIM, DIM, .window = 200, .kv_from = -1},
        {4, HEADS, DIM, DIM, .kv_from = 1},
    };
    struct kvq__session_spec spec = short_answer();
    spec.layers = mixed;
    spec.n_layers = 4;
    close_it(feed_unpacked(&spec, 8 * PAGE));
    settle();
    assert_int_equal(lookup(&one, &spec), 8 * PAGE);
    uint64_t a = open_as(&one, &spec, &info);
    assert_int_equal(info.tokens, 8 * PAGE);
    spec.salt = "in pieces";
    spec.max_rollback = 0; // so that all of it is packed
    uint64_t b = feed(&one, &spec, 8 * PAGE);
    for (uint32_t layer = 0; layer < 5; layer++)
        same_numbers(&one, a, &one, b, layer);
}

// One that began with a prefix adds what it has appended.
TEST(goes_on_from_a_prefix)
{
    struct kvq__session_spec spec = short_answer();
    close_it(feed_unpacked(&spec, 404));
    settle();
    uint64_t a = open_as(&one, &spec, &info);
    assert_int_equal(kit_step(&one, a, 150, HEADS, DIM), 0);
    close_it(a);
    settle();
    assert_int_equal(lookup(&one, &spec), 4 * PAGE);
    // And one that has appended nothing is over at once.
    close_it(open_as(&one, &spec, &info));
    assert_int_equal(info.tokens, 4 * PAGE);
    assert_false(is_finishing());
}

// Pages that the index has lost come again, some in each turn.
TEST(by_turns)
{
    struct kvq__session_spec spec = short_answer();
    uint64_t a = feed(&one, &spec, 1000);
    uint32_t turns = 0;
    assert_int_equal(kit_step(&one, a, 100, HEADS, DIM), 0);
    while (kvq__prefix_reclaim_node(team()))
        ;
    kit.core->config.seal_pages = 2;
    close_it(a);
    for (; is_finishing(); turns++) {
        kit_pack(&kit);
        kvq__core_poll(kit.core);
        core_check(kit.core);
    }
    settle();
    assert_in_range(turns, 4, 8);
    assert_int_equal(lookup(&one, &spec), 8 * PAGE);
}

// Sessions that live are packed first, and those that have ended one after the other.
TEST(in_order)
{
    struct kvq__session_spec spec = short_answer(), other = spec;
    other.salt = "other";
    close_it(feed_unpacked(&spec, 404));
    close_it(feed_unpacked(&other, 404));
    struct kvq__session *first = TAILQ_FIRST(&kit.core->finishing);
    assert_true(kvq__core_poll(kit.core)); // it is prepared
    assert_false(kvq__core_poll(kit.core));
    other.salt = "lives";
    const struct kvq__session *s = kit_of(&one, feed_unpacked(&other, 404));
    for (uint32_t i = 0; i < 2 * s->n_layers; i++) {
        struct kvq__job *job = kvq__background_start(kit.core);
        assert_ptr_equal(kit.core->packing.packer.session, i < s->n_layers ? s : first);
        kit_run_job(&kit, job);
        kvq__background_done(kit.core);
        core_check(kit.core);
    }
    assert_null(kvq__background_start(kit.core)); // the next one is yet to be prepared
    settle();
    other.salt = "other";
    assert_int_equal(lookup(&one, &spec), 3 * PAGE);
    assert_int_equal(lookup(&one, &other), 3 * PAGE);
}

// ---- What is left as it was ----

static void leaves(const struct kvq__session_spec *spec, uint64_t tokens)
{
    assert_false(is_finishing());
    settle();
    assert_int_equal(lookup(&one, spec), tokens);
}

TEST(other_ends)
{
    static const struct kvq__peer admin = {.admin = true};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    spec.name = "named";
    spec.salt = "dropped by name";
    feed_unpacked(&spec, 300);
    assert_int_equal(kvq__session_drop_named(kit.core, &admin, "team", "named", text), 0);
    leaves(&spec, 0);
    spec.salt = "its keep time is over";
    close_it(feed_unpacked(&spec, 300));
    kit_tick(&kit, 6000000000u);
    kit_tick(&kit, 1000000000u);
    assert_int_equal(team()->used[KVQ__SESSIONS], 0);
    leaves(&spec, 0);
    spec.name = NULL;
    spec.salt = "its client is cut off";
    feed_unpacked(&spec, 300);
    kvq__client_distrust(one.client);
    kvq__client_leave(one.client);
    assert_false(is_finishing());
    settle();
    assert_int_equal(team()->prefixes.n_nodes, 0);
}

TEST(cannot_share)
{
    static const struct kvq__layer_row many[] = {{4, HEADS, DIM, DIM, .kv_from = -1, .repeat = 3}};
    struct kvq__session_spec spec = spec_of(&one, TOKENS);
    spec.layers = many;
    spec.format = "ott2"; // outliers are one session's own
    close_it(feed_unpacked(&spec, 500));
    assert_false(is_finishing());
    spec.format = "oscar2";
    spec.model = NULL;
    close_it(feed_unpacked(&spec, 500));
    assert_false(is_finishing());
    spec.model = "llama";
    one.ids_at = 0; // it tells none
    close_it(feed_unpacked(&spec, 500));
    one.ids_at = IDS;
    close_it(feed_unpacked(&spec, PAGE - 1));
    assert_false(is_finishing());
    settle();
    assert_int_equal(team()->prefixes.n_nodes, 0);
    assert_int_equal(pool_used(), 0);
}

// ---- In the way of others ----

// Without room for the page that max_rollback has kept in 16 bits the others come.
TEST(no_room_for_it)
{
    struct kvq__session_spec spec = short_answer();
    spec.prompt_tokens = 400;
    close_it(feed_unpacked(&spec, 404));
    kit_limit(&kit, "team", KVQ__HOST_BYTES, pool_used());
    settle();
    assert_int_equal(lookup(&one, &spec), 2 * PAGE);
    spec.salt = "no memory at all";
    close_it(feed_unpacked(&spec, 300));
    kit.fail_one_in = 1;
    settle();
    kit.fail_one_in = 0;
    assert_int_equal(lookup(&one, &spec), 0);
}

// A step that is refused memory gets that of sessions which are being finished, at any time.
static void step_takes_it(uint32_t jobs)
{
    struct kvq__session_spec spec = short_answer(), other = spec_of(&two, TOKENS);
    uint64_t b =
        open_as(&two,
                &(struct kvq__session_spec){
                    .ns = "team", .format = "oscar2", .layers = other.layers, .n_layers = 1},
                NULL);
    spec.prompt_tokens = 400;
    close_it(feed_unpacked(&spec, 404));
    kvq__core_poll(kit.core);
    for (; jobs > 0; jobs--) {
        kit_run_job(&kit, kvq__background_start(kit.core));
        kvq__background_done(kit.core);
    }
    kit_limit(&kit, "team", KVQ__HOST_BYTES, pool_used() + 64);
    assert_true(is_finishing());
    two.ids_at = 0;
    assert_int_equal(kit_step(&two, b, 200, HEADS, DIM), 0);
    two.ids_at = IDS;
    assert_false(is_finishing());
    core_check(kit.core);
    assert_int_equal(lookup(&one, &spec), 0);
    kit_limit(&kit, "team", KVQ__HOST_BYTES, 0);
    drop(&two, b);
    settle();
    assert_int_equal(pool_used(), 0);
}

TEST(gives_way)
{
    step_takes_it(0);
    step_takes_it(2);
}

// Also while a job packs it.
TEST(gives_way_under_way)
{
    struct kvq__session_spec spec = short_answer();
    close_it(feed_unpacked(&spec, 404));
    kvq__core_poll(kit.core);
    struct kvq__job *job = kvq__background_start(kit.core);
    assert_non_null(job);
    kvq__ended_give_up(kit.core);
    core_check(kit.core);
    kvq__core_poll(kit.core);
    kit_run_job(&kit, job);
    kvq__background_done(kit.core);
    settle();
    assert_int_equal(pool_used(), 0);
}

// And what a namespace may have of bookkeeping memory.
TEST(gives_its_tables)
{
    struct kvq__session_spec spec = short_answer();
    close_it(feed_unpacked(&spec, 404));
    kit_limit(&kit, "team", KVQ__TABLE_BYTES, team()->used[KVQ__TABLE_BYTES]);
    assert_true(is_finishing());
    open_as(&two,
            &(struct kvq__session_spec){
                .ns = "team", .format = "oscar2", .layers = spec.layers, .n_layers = 1},
            NULL);
    leaves(&spec, 0);
}

// Nobody waits for it where the daemon ends.
TEST(drains)
{
    struct kvq__session_spec spec = short_answer();
    uint64_t a = feed_unpacked(&spec, 404);
    spec.salt = "another";
    close_it(feed_unpacked(&spec, 404));
    assert_true(is_finishing());
    kvq__core_drain(kit.core);
    assert_false(is_finishing());
    assert_true(kvq__core_idle(kit.core));
    close_it(a);
    assert_false(is_finishing());
    settle();
    assert_int_equal(pool_used(), 0);
}

TEST(core_closes)
{
    struct kvq__session_spec spec = short_answer();
    close_it(feed_unpacked(&spec, 404));
    close_it(feed_unpacked(&spec, 404));
    kvq__core_poll(kit.core);
    feed_unpacked(&spec, 404); // kit_close ends it
    assert_true(is_finishing());
}

// A request that reads a session when it ends has its blocks until it is done.
TEST(held_by_a_request)
{
    struct kvq__session_spec spec = short_answer();
    uint64_t a = feed_unpacked(&spec, 404);
    struct kvq__session *s = kit_of(&one, a);
    kvq__session_ref(s);
    close_it(a);
    settle();
    assert_int_equal(lookup(&one, &spec), 3 * PAGE);
    kvq__session_unref(s);
    settle();
}

int main(void)
{
    return run_all(NULL, NULL);
}
