// SPDX-License-Identifier: Apache-2.0
//
// What is refused of sessions that are to get another number of shards: formats that look across
// heads, what cannot be shared equally, stored numbers that make no sense; and sessions in memory,
// which make way or not.
#include "daemon/core/residency/park.h"
#include "daemon/store/internal.h"
#include "tests/core/reshard_kit.h"

static void refused(const struct set *s, uint32_t shard, int rc, const char *why)
{
    assert_int_equal(restore_shard(s, shard, UINT64_MAX), rc);
    assert_says(text, why);
}

// The set is fed so many tokens of the format, saved and dropped.
static void prepare_set(struct set a, const char *name, uint64_t tokens)
{
    format = name;
    rollback = 0;
    open_all(&a);
    feed(&a, tokens);
    save(&a);
    drop(&a);
}

static void prepare(const char *name, uint32_t shards)
{
    prepare_set(by_heads("it", shards), name, 600);
}

TEST(test_refusals)
{
    for (uint32_t i = 0; i < 3; i++) {
        static const char *const crosses[] = {"oscar2-xh", "oscar4-xh", "quarot4-xh"};
        prepare(i < 2 ? crosses[i] : "oscar2-xh", 2);
        struct set one = by_heads("it", 1);
        refused(&one, 0, KVQ_E_EXISTS, crosses[i < 2 ? i : 0]);
        refused(&one, 0, KVQ_E_EXISTS, "open it with 2");
    }
    prepare("oscar2", 2);
    struct set three = by_heads("it", 3), wrong = by_heads("it", 4), many = by_heads("it", 16);
    refused(&three, 1, KVQ_E_EXISTS, "layer 0 has 8 KV heads in all");
    refused(&many, 1, KVQ_E_EXISTS, "layer 0 has 8 KV heads in all");
    wrong.layers = 5;
    refused(&wrong, 0, KVQ_E_EXISTS, "5 layers are asked for");
    struct kvq__saved *saved = &vault_find(&vault, "it", 1)->saved;
    struct set four = by_heads("it", 4);
    snprintf(saved->layers[1].format.name, KVQ_FORMAT_NAME, "vecinfer-k4b8v4b8@book");
    refused(&four, 2, KVQ_E_EXISTS, "layer 1 is another one in shard 1");
    struct kvq__saved *first = &vault_find(&vault, "it", 0)->saved;
    for (int i = 0; i < 2; i++) {
        struct kvq_format *f = &(i ? first : saved)->layers[1].format;
        f->k.codec = f->v.codec = KVQ_CODEC_BOOK;
        snprintf(f->name, KVQ_FORMAT_NAME, "vecinfer-k4b8v4b8@book");
    }
    refused(&four, 2, KVQ_E_EXISTS, "vecinfer-k4b8v4b8@book of layer 1 has a codebook");
}

TEST(test_refusals_of_stages)
{
    struct set two = by_layers("it", 2), eight = by_layers("it", 8);
    prepare_set(by_layers("it", 4), "ott2", 300);
    refused(&two, 1, KVQ_E_EXISTS, "is another one for a shard's first layers");
    prepare_set(by_layers("it", 4), "oscar2", 300);
    struct kvq__saved *saved = &vault_find(&vault, "it", 1)->saved;
    saved->layers[1].row.kv_from = 0;
    refused(&eight, 3, KVQ_E_EXISTS, "layer 1 of shard 1 reads the cache of a layer that would");
    saved->layers[1].row.kv_from = -1;
    saved->layers[1].format.v.codec = KVQ_CODEC_BOOK;
    refused(&two, 0, KVQ_E_EXISTS, "layer 1 of shard 1 has a codebook");
    struct set three = by_layers("it", 2);
    three.shards = 3;
    refused(&three, 0, KVQ_E_EXISTS, "equal part of the 8 of all");
}

TEST(test_what_does_not_fit)
{
    prepare("oscar2", 2);
    struct vault_session *one = vault_find(&vault, "it", 1);
    struct set four = by_heads("it", 4), all = by_heads("it", 1);
    one->saved.tokens++;
    refused(&four, 2, KVQ_E_DAMAGED, "number of tokens");
    one->saved.tokens--;
    one->saved.path ^= 1;
    refused(&four, 2, KVQ_E_EXISTS, "shard 1 has another attention");
    one->saved.path ^= 1;
    one->saved.stamp++;
    refused(&four, 2, KVQ_E_DAMAGED, "save that it is of");
    one->saved.stamp--;
    one->saved.layers[0].base = 128;
    refused(&four, 2, KVQ_E_EXISTS, "only packed");
    one->saved.layers[0].base = 0;
    one->saved.layers[0].packed = 0; // and raw blocks are gone in the other
    refused(&four, 2, KVQ_E_EXISTS, "packed layer 0 to different counts");
    one->saved.layers[0].packed = 512;
    one->parts[3].bytes += 64;
    refused(&all, 0, KVQ_E_DAMAGED, "of other sizes");
    one->parts[3].bytes -= 64;
    struct kvq__part part = one->parts[3];
    one->parts[3] = one->parts[4];
    one->parts[4] = part;
    refused(&four, 2, KVQ_E_DAMAGED, "order of blocks");
    one->parts[4] = one->parts[3];
    one->parts[3] = part;
    one->n--; // the last block of layer 1
    refused(&four, 2, KVQ_E_DAMAGED, "for page");
    one->n++;
    // One gave raw blocks back that the others still have: they are not needed.
    struct kvq__saved *first = &vault_find(&vault, "it", 0)->saved;
    uint32_t page = first->layers[0].raw_page;
    assert_true(page > 0);
    first->layers[0].raw_page = 0;
    uint64_t floor = first->floor--; // and is held to what the other is
    restore(&four, UINT64_MAX);
    assert_int_equal(shard_of(&four, 0)->layers[0].raw_page, page);
    assert_int_equal(shard_of(&four, 0)->floor, floor);
}

// Changes one thing of what was saved of a shard.
static void spoil(struct vault_session *v)
{
    static const uint64_t steps[] = {1, 32, 128, 256, 1u << 31, UINT64_MAX - 5};
    struct kvq__saved_layer *l = &v->saved.layers[kit_below(&kit, LAYERS)];
    uint64_t *numbers[] = {&v->saved.tokens, &v->saved.floor, &l->base, &l->packed,
                           &v->saved.known};
    uint32_t *smalls[] = {&l->first_page, &l->raw_page, &v->saved.max_rollback, &v->saved.n_layers,
                          &v->saved.shards};
    uint16_t *heads[] = {&l->row.kv_heads, &l->row.q_heads, &l->row.k_dim};
    struct kvq__part *part = &v->parts[kit_below(&kit, v->n)];
    uint64_t by = steps[kit_below(&kit, 6)];
    if (kit_chance(&kit, 30))
        *numbers[kit_below(&kit, 5)] += kit_chance(&kit, 50) ? by : -by;
    else if (kit_chance(&kit, 40))
        *smalls[kit_below(&kit, 5)] += (uint32_t)(kit_chance(&kit, 50) ? by : -by) % 7;
    else if (kit_chance(&kit, 40))
        *heads[kit_below(&kit, 3)] = (uint16_t)kit_random(&kit);
    else if (kit_chance(&kit, 50))
        l->learned ^= 1;
    else
        part->bytes = kit_chance(&kit, 50) ? by : kit_random(&kit);
    v->saved.n_layers = v->saved.n_layers > LAYERS ? LAYERS : v->saved.n_layers;
}

struct untouched {
    struct kvq__saved saved;
    struct kvq__saved_layer layers[LAYERS];
    struct kvq__part *parts;
};

static void keep(const struct vault_session *v, struct untouched *u)
{
    u->saved = v->saved;
    memcpy(u->layers, v->saved.layers, sizeof u->layers);
    u->parts = calloc(v->n, sizeof *u->parts);
    assert_non_null(u->parts);
    memcpy(u->parts, v->parts, v->n * sizeof *u->parts);
}

static void mend(struct vault_session *v, const struct untouched *u)
{
    v->saved = u->saved;
    memcpy(v->saved.layers, u->layers, sizeof u->layers);
    memcpy(v->parts, u->parts, v->n * sizeof *u->parts);
}

// Whatever it is now, it can be used.
static void use(struct set *s)
{
    static uint8_t out[OUT_BYTES];
    if (s->shards == 1 && open_shard(s, 0, 0) == 0 && tokens_of(s) > 0) {
        for (uint32_t i = 0; i < s->layers; i++)
            attend(s, i, out);
        kit_pack(&kit);
        core_check(kit.core);
    }
    assert_int_equal(kvq__session_drop_named(kit.core, &admin, "uid-1000", "it", text), 0);
}

// Whatever stands in a store: refused, or a session that can be used. Half of it stands in both
// shards, so that they agree.
static void check_hostile(const char *name)
{
    static const uint32_t numbers[] = {1, 4, 8};
    uint32_t rounds = long_tier() ? 20000 : 600, refusals = 0, taken = 0;
    prepare(name, 2);
    struct vault_session *from[] = {vault_find(&vault, "it", 0), vault_find(&vault, "it", 1)};
    struct untouched good[2];
    for (uint32_t i = 0; i < 2; i++)
        keep(from[i], &good[i]);
    for (uint32_t i = 0; i < rounds; i++) {
        uint64_t random = kit.random;
        spoil(from[1]);
        if (kit_chance(&kit, 50)) {
            kit.random = random;
            spoil(from[0]);
        }
        struct set s = by_heads("it", numbers[kit_below(&kit, 3)]);
        int rc = restore_shard(&s, kit_below(&kit, s.shards), kit_below(&kit, 900));
        refusals += rc < 0;
        taken += rc == 0;
        if (rc == 0)
            use(&s);
        mend(from[0], &good[0]);
        mend(from[1], &good[1]);
    }
    assert_true(refusals > 100 && taken > 20);
    free(good[0].parts);
    free(good[1].parts);
}

TEST(test_hostile)
{
    check_hostile(OUTLIERS);
    check_hostile("innerq-hybrid");
    check_hostile("f16");
}

TEST(test_no_memory)
{
    prepare(OUTLIERS, 2);
    struct set one = by_heads("it", 1);
    for (uint32_t i = 1; i < 40; i++) {
        kit.fail_one_in = i;
        int rc = restore_shard(&one, 0, UINT64_MAX);
        kit.fail_one_in = 0;
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        if (rc == 0)
            assert_int_equal(kvq__session_drop_named(kit.core, &admin, "uid-1000", "it", text), 0);
    }
    restore(&one, UINT64_MAX);
}

static bool makes_way(const struct kvq__peer *peer, const char *name, uint32_t shards)
{
    const struct vault_session *v = vault_find(&vault, name, 0);
    struct kvq__saved none = {.stamp = 1};
    snprintf(none.name, sizeof none.name, "%s", name);
    return kvq__reshard_make_way(kit.core, peer, "uid-1000", v ? &v->saved : &none, shards);
}

// In memory with one number: it makes way for another if it is saved, and nobody has it open.
TEST(test_makes_way)
{
    struct set a = by_heads("it", 2), four = by_heads("it", 4);
    format = "oscar2";
    rollback = 0;
    kit.core->config.saves = true;
    open_all(&a);
    feed(&a, 300);
    assert_int_equal(open_shard(&four, 3, 0), KVQ_E_EXISTS);
    assert_says(text, "2 shards, 4 are asked for");
    assert_says(text, "kvqctl session save");
    assert_false(makes_way(&admin, "it", 4)); // open
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kvq__session_close(m.client, a.handles[i], text), 0);
    assert_false(makes_way(&admin, "it", 4)); // not saved
    save(&a);
    assert_false(makes_way(&admin, "it", 2)); // it is as asked
    const struct kvq__peer other = {.uid = 2000};
    assert_false(makes_way(&other, "it", 4));
    assert_int_equal(open_shard(&a, 1, 0), 0);
    assert_false(makes_way(&admin, "it", 4));
    assert_int_equal(kvq__session_close(m.client, a.handles[1], text), 0);
    assert_int_equal(kit.core->n_sessions, 2);
    vault_find(&vault, "it", 0)->saved.stamp++; // somebody has replaced what is stored
    assert_false(makes_way(&admin, "it", 4));
    vault_find(&vault, "it", 0)->saved.stamp--;
    assert_true(makes_way(&admin, "it", 4));
    assert_int_equal(kit.core->n_sessions, 0);
    restore(&four, UINT64_MAX);
    assert_int_equal(tokens_of(&four), 300);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(kvq__session_close(m.client, four.handles[i], text), 0);
    // Parked, it is on disk as it is, and stays there.
    struct set parked = by_heads("parked", 2);
    open_all(&parked);
    feed(&parked, 300);
    kit_pack(&kit);
    assert_int_equal(kvq__park_start(kit_of(&m, parked.handles[0]), KVQ__PARK_ASKED, NULL, text),
                     0);
    vault_serve(&vault, kit.core);
    assert_true(kvq__is_offloaded(shard_of(&parked, 1)));
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kvq__session_close(m.client, parked.handles[i], text), 0);
    assert_true(makes_way(&admin, "parked", 8));
    vault_serve(&vault, kit.core);
    parked = by_heads("parked", 8);
    restore(&parked, UINT64_MAX);
    // It is not stored like this.
    assert_false(makes_way(&admin, "it", 2));
}

// A catalog that somebody edited may name any number of shards.
TEST(test_more_shards_than_any_has)
{
    struct kvq__jobs jobs = {.store = NULL}; // which is not asked
    struct kvq__task *t = calloc(1, sizeof *t);
    const struct kvq_store_session s = {.shards = KVQ_MAX_SHARDS + 1};
    struct kvq__found found = {.n_sources = 0};
    assert_non_null(t);
    t->jobs = &jobs;
    snprintf(t->name, sizeof t->name, "it");
    assert_int_equal(kvq__found_reshard(t, &s, &found), KVQ_E_DAMAGED);
    assert_string_equal(t->text, "session \"it\" has 65 shards in the store's catalog; at most 64 "
                                 "are allowed: drop it, or restore it from an export");
    kvq__found_clear(&found);
    free(t);
}

int main(void)
{
    return run_all(NULL, NULL);
}
