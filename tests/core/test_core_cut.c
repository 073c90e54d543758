// SPDX-License-Identifier: Apache-2.0
//
// Sessions that were cut, by a fork or by damage, have more packed than those that were not: they
// can be saved as they stand, and come back. Extras that have learned nothing are not taken for
// such that have, and sinks are written once.
#include "tests/core/save_kit.h"

static const char *const formats[] = {"oscar2", "kivi-sink2", "kivi2:outliers=3:recent=64:unit=32",
                                      "innerq-base", "quarot4"};
enum { FORMATS = sizeof formats / sizeof *formats };

static uint64_t make(uint32_t format, uint32_t rollback)
{
    set_rows(formats[format]);
    rows[1].window = 0;
    uint64_t a = fed("it", 1000, rollback);
    kit_pack(&kit);
    return a;
}

TEST(test_cut_and_saved)
{
    for (uint32_t i = 0; i < FORMATS; i++)
        for (uint64_t good = 512; good < 1000; good += 128)
            for (uint32_t back = 0; back < 300; back += 70) {
                uint64_t a = make(i, back);
                save("it");
                drop(a);
                a = restore_up_to("it", good);
                assert_int_equal(kit_of(&m, a)->tokens, good);
                save("it");
                drop(a);
                a = restore("it");
                assert_int_equal(kit_of(&m, a)->tokens, good);
                feed(a, good + 40);
                drop(a);
            }
}

TEST(test_forked_and_saved)
{
    for (uint32_t i = 0; i < FORMATS; i++)
        for (uint64_t at = 352; at < 1000; at += 96) {
            uint64_t a = make(i, 150), fork, twin;
            struct kvq_entry_wire e = {.handle = a, .position = at};
            if (kit_simple(&m, KVQ_OP_FORK, 0, e, &fork) == 0) {
                assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &twin), 0);
                kit_name(kit_of(&m, fork), "fork");
                save("fork");
                drop(fork);
                fork = restore("fork");
                go_on_alike(fork, twin, 0);
                drop(fork);
                drop(twin);
            }
            drop(a);
        }
}

TEST(test_learned_nothing)
{
    uint64_t a = make(3, 0);
    save("it");
    drop(a);
    struct vault_session *from = vault_find(&vault, "it", 0);
    assert_true(from->saved.layers[0].learned && from->saved.layers[0].packed > 0);
    from->saved.layers[0].learned = false;
    restore_refused(KVQ_E_DAMAGED, "layer 0 has packed tokens of which it has not learned");
}

// Blocks that saves write of a session that grows by a token: after the first one, and of one that
// was restored.
static uint64_t written_anew(const char *format)
{
    set_rows(format);
    rows[1].window = 0;
    uint64_t a = fed("it", 1000, 0);
    save("it");
    uint64_t put = vault.put;
    feed(a, 1001);
    save("it");
    drop(a);
    a = restore("it");
    feed(a, 1002);
    save("it");
    put = vault.put - put;
    drop(a);
    return put;
}

// Sinks are final with the first block.
TEST(test_sinks_are_written_once)
{
    assert_int_equal(written_anew("oscar2-s32"), written_anew("oscar2"));
}

int main(void)
{
    return run_all(NULL, NULL);
}
