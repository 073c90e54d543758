// SPDX-License-Identifier: Apache-2.0
//
// Sessions that begin with a prefix while it is read from a store: layers answer as they come, and
// what cannot be read ends them.
#include "tests/core/prefix_kit.h"

#include "daemon/core/residency/saved_internal.h"

// Saves a session, and starts anew; want[] is what each of its layers says of so many pages.
static void want_all(uint32_t pages, float want[3][4 * DIM])
{
    struct kvq__session_spec spec = named(&one, TOKENS);
    uint64_t a = feed(&one, &spec, 1500);
    uint64_t fork = kit_fork(&one, a, (uint64_t)pages * PAGE);
    for (uint32_t layer = 0; layer < 3; layer++)
        attend(&one, fork, layer, want[layer]);
    save("it");
    restart();
}

static struct kvq__restore *begin_prefix(uint32_t pages)
{
    struct kvq__restore *r;
    assert_int_equal(vault_prefix(&vault, kit.core, "team", vault_find(&vault, "it", 0),
                                  (uint64_t)pages * PAGE, &r, text),
                     0);
    return r;
}

// An attention that waits for its layer.
static void ask_layer(struct member *m, uint64_t handle, uint32_t layer)
{
    struct kvq_entry_wire e = {
        .handle = handle, .position = kit_of(m, handle)->tokens, .queries = 1};
    struct kvq_request r = kit_attend(m, layer, 0, OUT, 4, DIM);
    assert_int_equal(kit_request(m, &r, &e), 1);
    assert_int_equal(kvq__request_continue(m->queue), KVQ__WAIT);
}

static void answer_layer(struct member *m, int status)
{
    assert_int_equal(kit_again(m), 0);
    assert_int_equal(kvq__queue_results(m->queue)[0].status, status);
}

// A session begins with what is yet to be read: each layer answers when it has come, with the bits
// of the session that was saved. Blocks are there once, whoever began when.
TEST(begins_at_once)
{
    float want[3][4 * DIM], got[4 * DIM];
    want_all(9, want);
    struct kvq__restore *r = begin_prefix(9);
    const struct vault_session *from = vault_find(&vault, "it", 0);
    struct kvq__session_spec spec = spec_of(&two, 10 * PAGE - 1);
    uint64_t used = kit.core->pools[0].used_bytes, a = open_as(&two, &spec, NULL);
    assert_int_equal(kit_of(&two, a)->tokens, 9 * PAGE);
    assert_int_equal(kit_of(&two, a)->n_loading, 3);
    core_check(kit.core);
    ask_layer(&two, a, 0);
    assert_int_equal(vault_layer(&vault, r, from, 0), 0);
    answer_layer(&two, 0);
    attend(&two, a, 0, got);
    assert_memory_equal(got, want[0], sizeof got);
    spec = spec_of(&one, 10 * PAGE - 1);
    uint64_t b = open_as(&one, &spec, NULL); // later: it waits for two layers
    assert_int_equal(kit_of(&one, b)->n_loading, 2);
    attend(&one, b, 0, got);
    assert_memory_equal(got, want[0], sizeof got);
    uint64_t c = open_as(&one, &spec, NULL);
    drop(&one, c); // and one that does not wait for the end
    core_check(kit.core);
    ask_layer(&two, a, 2);
    assert_int_equal(vault_layer(&vault, r, from, 1), 0);
    assert_int_equal(kvq__request_continue(two.queue), KVQ__WAIT);
    assert_int_equal(vault_layer(&vault, r, from, 2), 0);
    answer_layer(&two, 0);
    assert_int_equal(kit.core->disk.n_loading, 0);
    kvq__restore_end(&r, 0);
    core_check(kit.core);
    assert_int_equal(kit.core->pools[0].used_bytes, used);
    for (uint32_t layer = 1; layer < 3; layer++) {
        attend(&two, a, layer, got);
        assert_memory_equal(got, want[layer], sizeof got);
        attend(&one, b, layer, got);
        assert_memory_equal(got, want[layer], sizeof got);
    }
    assert_int_equal(kit_step(&one, b, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(lookup(&two, &spec), 9 * PAGE);
}

// Two that are read side by side: who begins with pages of both waits for both.
TEST(follows_two)
{
    float want[3][4 * DIM], got[4 * DIM];
    want_all(9, want);
    const struct vault_session *from = vault_find(&vault, "it", 0);
    struct kvq__restore *few = begin_prefix(4), *all = begin_prefix(9);
    struct kvq__session_spec spec = spec_of(&two, 9 * PAGE);
    uint64_t a = open_as(&two, &spec, NULL);
    assert_int_equal(kit_of(&two, a)->tokens, 9 * PAGE);
    assert_int_equal(kit_of(&two, a)->layers[0].loading, 2);
    ask_layer(&two, a, 0);
    assert_int_equal(vault_layer(&vault, all, from, 0), 0);
    core_check(kit.core);
    assert_int_equal(kvq__request_continue(two.queue), KVQ__WAIT);
    assert_int_equal(vault_layer(&vault, few, from, 0), 0);
    answer_layer(&two, 0);
    attend(&two, a, 0, got);
    assert_memory_equal(got, want[0], sizeof got);
    for (uint32_t layer = 1; layer < 3; layer++) {
        assert_int_equal(vault_layer(&vault, all, from, layer), 0);
        assert_int_equal(vault_layer(&vault, few, from, layer), 0);
    }
    kvq__restore_end(&all, 0);
    core_check(kit.core);
    kvq__restore_end(&few, 0);
    assert_int_equal(kit.core->disk.n_loading, 0);
    for (uint32_t layer = 0; layer < 3; layer++) {
        attend(&two, a, layer, got);
        assert_memory_equal(got, want[layer], sizeof got);
    }
}

// What cannot be read ends those that began with it, with its code, and is in the index no more;
// whatever the way in which it ends.
TEST(reading_fails)
{
    static const struct kvq__peer peer = {.admin = true};
    float want[3][4 * DIM];
    char id[24];
    want_all(9, want);
    const struct vault_session *from = vault_find(&vault, "it", 0);
    for (uint32_t way = 0; way < 2; way++) {
        struct kvq__restore *r = begin_prefix(9);
        struct kvq__session_spec spec = spec_of(&two, 9 * PAGE);
        spec.name = "mine";
        uint64_t a = open_as(&two, &spec, NULL);
        assert_int_equal(vault_layer(&vault, r, from, 0), 0);
        ask_layer(&two, a, 1);
        snprintf(id, sizeof id, "#%llu", (unsigned long long)r->session->id);
        if (way == 1)
            assert_int_equal(kvq__session_drop_named(kit.core, &peer, "team", id, text), 0);
        else
            kvq__restore_end(&r, KVQ_E_DAMAGED);
        core_check(kit.core);
        answer_layer(&two, way == 1 ? KVQ_E_CANCELLED : KVQ_E_DAMAGED);
        if (way == 1)
            kvq__restore_end(&r, KVQ_E_CANCELLED);
        core_check(kit.core);
        assert_int_equal(kit.core->n_sessions, 0);
        assert_int_equal(kit.core->disk.n_loading, 0);
        assert_int_equal(lookup(&two, &spec), 0);
        spec.name = "other"; // it begins without, and goes on
        uint64_t b = open_as(&two, &spec, NULL);
        assert_int_equal(kit_of(&two, b)->tokens, 0);
        drop(&two, b);
        assert_int_equal(kit.core->pools[0].used_bytes, 0);
    }
}

// ---- What the index itself takes ----

static struct kvq__namespace_info team_info(void)
{
    static const struct kvq__peer admin = {.admin = true};
    struct kvq__namespace_info info;
    assert_int_equal(kvq__core_namespace_info(kit.core, &admin, "team", &info, text), 0);
    return info;
}

static void limit_tables(uint64_t bytes)
{
    kit_limit(&kit, "team", KVQ__TABLE_BYTES, bytes);
}

static const struct kvq__prefixes *team_index(void)
{
    const struct kvq__namespace *ns;
    TAILQ_FOREACH (ns, &kit.core->namespaces, link)
        if (strcmp(ns->name, "team") == 0)
            return &ns->prefixes;
    return NULL;
}

// Pages of the index count under the limit of bookkeeping bytes. At the limit they go for sessions,
// whoever else has their blocks, and none comes in but for another one.
TEST(index_counts)
{
    struct kvq__session_spec spec = spec_of(&one, 1000);
    const struct kvq__prefixes *p = team_index();
    struct kvq__session_info info;
    drop(&one, feed(&one, &spec, 1000));
    kit_poll(kit.core);
    uint64_t node = sizeof(struct kvq__node) + 3 * sizeof(struct kvq__pageref);
    uint64_t used = team_info().used[KVQ__TABLE_BYTES];
    assert_int_equal(p->n_nodes, 7);
    assert_int_equal(used, 7 * node + p->n_buckets * sizeof *p->buckets);
    limit_tables(used + 6000);
    uint64_t handle = open_as(&one, &spec, &info); // its prefix goes last
    assert_true(p->n_nodes < 7);
    assert_true(p->evicted > 0);
    assert_true(team_info().used[KVQ__TABLE_BYTES] <= used + 6000);
    core_check(kit.core);
    drop(&one, handle);
    limit_tables(0);
    for (int32_t i = 0; i < TOKENS; i++)
        ids(&one)[i] = 5 * i;
    handle = feed(&one, &spec, 1000); // others' pages make room for it
    used = team_info().used[KVQ__TABLE_BYTES];
    uint32_t n = p->n_nodes;
    limit_tables(used);
    assert_int_equal(kit_step(&one, handle, 300, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_true(team_info().used[KVQ__TABLE_BYTES] <= used && p->n_nodes <= n);
    assert_int_equal(kit_of(&one, handle)->tokens, 1300);
    core_check(kit.core);
    limit_tables(1); // what is above a limit that was lowered goes
    kvq__core_tick(kit.core);
    assert_int_equal(p->n_nodes, 0);
    core_check(kit.core);
    assert_int_equal(kit_of(&one, handle)->tokens, 1300);
    limit_tables(0);
    drop(&one, handle);
}

int main(void)
{
    return run_all(NULL, NULL);
}
