// SPDX-License-Identifier: Apache-2.0
//
// Saves and restores by format: sessions of every row of the table, of codebooks and of formats of
// the configuration go on to the bit as twins that never stopped, and what a name has come to stand
// for since they were saved changes none of them.
#include "tests/core/save_kit.h"

static void check_format(const char *format, uint64_t tokens, uint32_t rollback)
{
    set_rows(format);
    uint64_t a = fed("it", tokens, rollback), b = fed("", tokens, rollback);
    a = save_and_restore(a, "it");
    go_on_alike(a, b, rollback);
    save("it"); // once more, in another state
    drop(a);
    a = restore("it");
    go_on_alike(a, b, rollback);
    drop(a);
    drop(b);
    core_check(kit.core);
}

TEST(test_all_formats)
{
    static const uint64_t counts[] = {40, 513, 1100};
    uint32_t n = 0;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        if (kvq_has_centroids(f))
            continue;
        check_format(f->name, counts[n % 3], n % 2 ? 11 : 0);
        n++;
    }
    assert_true(n > 10);
    for (uint32_t tokens = 0; tokens < 3; tokens++)
        check_format("oscar2", tokens, 0);
    check_format("ott2", 700, 0);
    check_format("ott2-oscar", 200, 0); // it has learned from more tokens than are packed
    check_format("innerq-hybrid", 700, 150);
    check_format("kivi2-fit-s32", 700, 3);
}

// ---- Codebooks ----

// Codes of a codebook come back and mean the same, and every hold is given back. Searching 4096
// centroids takes its time: KVQ_FULL=1 takes these formats, too. The kit's codebook has no
// room for 65,536.
TEST(test_codebook_formats)
{
    uint32_t n = 0;
    kit_codebooks(&kit);
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        char name[KVQ_FORMAT_NAME];
        if (!kvq_has_centroids(f) || f->k.bits == 16 ||
            (f->k.bits + f->v.bits > 16 && !long_tier()))
            continue;
        assert_true(snprintf(name, sizeof name, "%s@a", f->name) < (int)sizeof name);
        check_format(name, n % 2 ? 40 : 513, n % 2 ? 11 : 0);
        while (kit.holds > 0 && kvq__ended_poll(kit.core)) // what has ended goes bit by bit
            continue;
        assert_int_equal(kit.holds, 0);
        n++;
    }
    assert_true(n >= 3);
}

// A codebook that was made anew under its old name would make other values of the codes.
TEST(test_another_codebook)
{
    kit_codebooks(&kit);
    set_rows("vecinfer-2@a");
    stored(300, 0);
    kit.book_id++;
    restore_refused(KVQ_E_FORMAT, "another codebook");
    assert_int_equal(kit.holds, 0);
    kit.book_id--;
    drop(restore("it"));
    assert_int_equal(kit.holds, 0);
}

// ---- Names that stand for something else by now ----

static void configure(struct kvq__own_format *own, const char *row)
{
    char why[256];
    *own = (struct kvq__own_format){.name = "mine", .has_rest = true};
    assert_int_equal(kvq_format_parse(row, &own->rest, why, sizeof why), 0);
    snprintf(own->rest.name, sizeof own->rest.name, "mine");
    kit_close(&kit);
    kit_formats(own, 1);
    open_kit();
}

// A session keeps its stages where the table has others under that name by now.
TEST(test_formats_of_an_older_table)
{
    char why[256];
    set_rows("kvq2-fm-s0");
    fed("it", 600, 0);
    save("it");
    struct vault_session *from = vault_find(&vault, "it", 0);
    for (uint32_t i = 0; i < from->saved.n_layers; i++)
        snprintf(from->saved.layers[i].format.name, KVQ_FORMAT_NAME, "kvq2");
    kit_close(&kit);
    open_kit();
    uint64_t a = restore("it");
    const struct kvq_format *had = kit_of(&m, a)->layers[0].format;
    struct kvq_format named;
    assert_int_equal(kvq_format_parse("kvq2", &named, why, sizeof why), 0);
    assert_string_equal(had->name, "kvq2");
    assert_false(kvq_format_same(had, &named));
    assert_int_equal(had->sink_tokens, 0);
    feed(a, 900);
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    set_rows("kvq2");
    assert_true(open_as("it", LAYERS, 0) != 0); // who asks for it by name has it
}

// What the configuration says of a format now must be what it said then, or nothing.
TEST(test_formats_of_the_configuration)
{
    struct kvq__own_format own;
    configure(&own, "kivi2");
    set_rows("mine");
    fed("it", 600, 0);
    save("it");
    configure(&own, "kivi4");
    restore_refused(KVQ_E_FORMAT, "mine");
    kit_close(&kit);
    kit_formats(NULL, 0);
    open_kit();
    uint64_t a = restore("it");
    assert_int_equal(kit_of(&m, a)->tokens, 600);
    assert_int_equal(kit_of(&m, a)->layers[0].format->k.bits, 2);
    feed(a, 900);
}

int main(void)
{
    return run_all(NULL, NULL);
}
