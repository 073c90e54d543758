// SPDX-License-Identifier: Apache-2.0
//
// Sessions that are saved with one number of shards and opened with another: to the bit as if they
// had always had that number, for every format that knows its heads one by one.
#include "tests/core/reshard_kit.h"

// All of its shards, with so many tokens.
static void begin(struct set *set, uint32_t tokens)
{
    open_all(set);
    feed(set, tokens);
}

static struct set make(bool stages, const char *name, uint32_t shards)
{
    return stages ? by_layers(name, shards) : by_heads(name, shards);
}

// Opened with the first number again, where it is saved as of the second.
static void check_back(bool stages, uint32_t from)
{
    struct set a = make(stages, "it", from), c = make(stages, "third", from);
    restore(&a, UINT64_MAX);
    open_all(&c);
    feed(&c, tokens_of(&a));
    same_bits(&a, &c);
    drop(&a);
    drop(&c);
}

static void check(bool stages, uint64_t tokens, uint32_t from, uint32_t to)
{
    struct set a = make(stages, "it", from), b = make(stages, "twin", to);
    begin(&a, tokens);
    begin(&b, tokens);
    save(&a);
    drop(&a);
    a = make(stages, "it", to);
    restore(&a, UINT64_MAX);
    assert_true(kvq__is_unsaved(shard_of(&a, 0)));
    go_on_alike(&a, &b);
    save(&a); // now as they are
    assert_int_equal(vault_find(&vault, "it", 0)->saved.shards, to);
    assert_null(vault_find(&vault, "it", to));
    drop(&a);
    drop(&b);
}

// ---- Tests ----

static const uint32_t pairs[][2] = {{2, 1}, {2, 4}, {2, 8}, {4, 2}, {1, 2}, {8, 1}, {1, 8}};
enum { PAIRS = sizeof pairs / sizeof *pairs };

static bool is_dealt(const struct kvq_format *f)
{
    return !kvq_has_centroids(f) && f->k_token_scale != KVQ_SCALE_L2_CROSS;
}

// The same as the row before, but for its bits.
static bool is_like_last(const struct kvq_format *f)
{
    size_t n = strcspn(f->name, "0123456789");
    return f > kvq_formats && strncmp(f[-1].name, f->name, n) == 0 && f->name[n] &&
           strcmp(f[-1].name + n + 1, f->name + n + 1) == 0;
}

TEST(test_all_formats)
{
    static const uint64_t counts[] = {40, 513, 300, 640};
    uint32_t n = 0;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        if (!is_dealt(f) || (!long_tier() && is_like_last(f)))
            continue;
        format = f->outliers ? OUTLIERS : f->name;
        rollback = n % 2 ? 11 : 0;
        check(false, counts[n % 4], pairs[n % PAIRS][0], pairs[n % PAIRS][1]);
        n++;
    }
    assert_true(n > 10);
}

// Of each kind of format, every number to every other; without KVQ_FULL some of them.
TEST(test_all_numbers)
{
    static const char *const kinds[] = {"f16", "kivi-sink2", OUTLIERS, "innerq-hybrid"};
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t p = 0; p < PAIRS; p++) {
            if (!long_tier() && p % 4 != i)
                continue;
            format = kinds[i];
            rollback = p % 3 * 20;
            check(false, 500 + 13 * p, pairs[p][0], pairs[p][1]);
            check_back(false, pairs[p][0]);
        }
}

// Shards that had unequal parts become such that have equal ones.
TEST(test_unequal)
{
    for (uint32_t to = 1; to <= 8; to += to == 1 ? 3 : 4) { // 1, 4, 8
        struct set a = by_heads("it", 2), b = by_heads("twin", to);
        format = to < 4 ? OUTLIERS : "oscar3";
        rollback = 5;
        a.more = 3; // 1 and 7
        begin(&a, 500);
        begin(&b, 500);
        save(&a);
        drop(&a);
        a = by_heads("it", to);
        restore(&a, UINT64_MAX);
        go_on_alike(&a, &b);
        drop(&a);
        drop(&b);
    }
}

TEST(test_stages)
{
    static const char *const kinds[] = {"f16", "oscar2-xh", "quarot4", "innerq-hybrid"};
    for (uint32_t i = 0; i < 4; i++) {
        format = kinds[i];
        rollback = i * 7;
        check(true, 400, pairs[i][0], pairs[i][1]);
        check_back(true, pairs[i][0]);
    }
}

// Stages' blocks stay as they are, so that they need not be written anew.
TEST(test_stages_keep_blocks)
{
    struct set a = by_layers("it", 4);
    format = "oscar2";
    rollback = 0;
    begin(&a, 1000);
    kit_pack(&kit);
    save(&a);
    drop(&a);
    a = by_layers("it", 2);
    restore(&a, UINT64_MAX);
    uint64_t put = vault.put, kept = vault.kept;
    save(&a);
    assert_true(vault.kept - kept >= HEADS * 6 && vault.put - put <= HEADS * 4);
}

// One shard was packed before it was truncated, the others were not.
static void check_ahead(uint32_t from, uint32_t to)
{
    struct set a = by_heads("it", from), b = by_heads("twin", to);
    uint32_t back = rollback;
    begin(&a, 800);
    begin(&b, 800);
    for (uint32_t i = 0; i < LAYERS; i++)
        attend_shard(&a, 0, i, OUT_AT);
    truncate_by(&a, back);
    truncate_by(&b, back);
    rollback = 0; // not again
    save(&a);
    assert_true(shard_of(&a, 0)->layers[0].packed > shard_of(&a, 1)->layers[0].packed);
    drop(&a);
    a = by_heads("it", to);
    rollback = back;
    restore(&a, UINT64_MAX);
    rollback = 0;
    same_bits(&a, &b);
    feed(&a, 1300);
    feed(&b, 1300);
    same_bits(&a, &b);
    same_blocks(&a, &b);
    drop(&a);
    drop(&b);
}

TEST(test_packed_differently)
{
    static const char *const kinds[] = {"oscar2", OUTLIERS, "kivi2",
                                        "kivi4:outliers=5:unit=32:recent=128", "innerq-base"};
    for (uint32_t i = 0; i < 5; i++) {
        format = kinds[i];
        rollback = 200;
        check_ahead(2, i % 2 ? 1 : 4);
    }
}

// Cut sessions have a base. Those that are cut while they get another number, as those that had it.
static void check_cut(uint64_t good)
{
    struct set a = by_heads("it", 2), b = by_heads("twin", 4);
    begin(&a, 1100);
    begin(&b, 1100);
    kit_pack(&kit);
    save(&a);
    save(&b);
    drop(&a);
    drop(&b);
    a = by_heads("it", 4);
    restore(&a, good);
    for (uint32_t i = 0; i < 4; i++) {
        struct kvq__restore *r;
        assert_int_equal(vault_restore(&vault, kit.core, "twin", i, NULL, good, &r, text), 0);
        assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, "twin", i)), 0);
    }
    open_all(&b);
    assert_true(tokens_of(&a) <= good && tokens_of(&a) == tokens_of(&b));
    go_on_alike(&a, &b);
    save(&a); // once more, with a base
    drop(&a);
    a = by_heads("it", 1);
    restore(&a, UINT64_MAX);
    assert_int_equal(tokens_of(&a), tokens_of(&b));
    drop(&a);
    drop(&b);
}

TEST(test_cut)
{
    static const char *const kinds[] = {"f16", "oscar2", OUTLIERS, "kivi-sink2", "innerq-small"};
    for (uint32_t i = 0; i < 5; i++) {
        format = kinds[i];
        rollback = i % 2 ? 0 : 5;
        check_cut(896);
        check_cut(100);
    }
}

// A save waits until all shards have packed what is due; else they would part.
TEST(test_save_waits_for_packing)
{
    struct set a = by_heads("it", 2);
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "it"};
    format = "oscar2";
    rollback = 0;
    begin(&a, 600);
    attend_shard(&a, 0, 0, OUT_AT); // packs this one, whose raw blocks go
    assert_int_equal(shard_of(&a, 0)->layers[0].raw_page, 4);
    assert_int_equal(shard_of(&a, 1)->layers[0].packed, 0);
    assert_int_equal(vault_save(&vault, kit.core, &spec, NULL), 1);
    kit_pack(&kit);
    assert_int_equal(vault_save(&vault, kit.core, &spec, NULL), 0);
    drop(&a);
    a = by_heads("it", 4);
    restore(&a, UINT64_MAX);
}

// Ids of tokens come from the shard that knows most of them.
TEST(test_ids)
{
    struct set a = by_heads("it", 2);
    format = "oscar2";
    rollback = 0;
    begin(&a, 300);
    for (uint32_t i = 0; i < 2; i++) {
        struct kvq__session *s = (struct kvq__session *)shard_of(&a, i);
        assert_int_equal(kvq__ids_grow(s, 300), 0);
        for (uint32_t k = 0; k < 300; k++)
            *kvq__ids_at(&s->ids, k) = (int32_t)(1000 * i + k);
        s->ids.known = i ? 280 : 140;
    }
    save(&a);
    drop(&a);
    a = by_heads("it", 4);
    restore(&a, UINT64_MAX);
    for (uint32_t i = 0; i < 4; i++) {
        const struct kvq__ids *ids = &shard_of(&a, i)->ids;
        assert_int_equal(ids->known, 280);
        assert_int_equal(*kvq__ids_at(ids, 0), 1000);
        assert_int_equal(*kvq__ids_at(ids, 279), 1279);
    }
    drop(&a);
    a = by_heads("it", 1);
    restore(&a, 250); // cut
    assert_int_equal(shard_of(&a, 0)->ids.known, tokens_of(&a));
}

int main(void)
{
    return run_all(NULL, NULL);
}
