// SPDX-License-Identifier: Apache-2.0
//
// Rotation of V over saves and restores: what a session was opened with it keeps, layer by layer,
// whatever the default has become since.
#include "daemon/store/saved_wire.h"
#include "tests/core/save_kit.h"

// What is written of it, and read again: that is what is in the vault now. Returns the version.
static uint32_t by_wire(const char *name)
{
    static uint8_t scratch[KVQ__SAVED_BYTES + KVQ_WIRE_ARENA], bytes[KVQ__SAVED_BYTES];
    struct kvq__saved *saved = &vault_find(&vault, name, 0)->saved, read = {0};
    struct kvq_arena arena;
    size_t n;
    kvq_arena_init(&arena, scratch, sizeof scratch);
    assert_int_equal(kvq__saved_pack(saved, &arena, bytes, &n, text), 0);
    uint32_t version = kvq__saved_version(saved);
    kvq_arena_init(&arena, scratch, sizeof scratch);
    assert_int_equal(kvq__saved_unpack(bytes, n, &arena, &read, text), 0);
    assert_int_equal(read.n_layers, saved->n_layers);
    for (uint32_t i = 0; i < read.n_layers; i++)
        saved->layers[i].v_rotation = read.layers[i].v_rotation;
    free(read.layers);
    return version;
}

static uint64_t open_rotated(const char *name, uint32_t asked)
{
    const struct kvq__session_spec spec = {
        .name = name, .layers = rows, .n_layers = LAYERS, .v_rotation = asked};
    return kit_opened(&m, &spec);
}

static void check_rotations(const uint8_t *rotations, uint32_t asked, uint32_t version)
{
    uint64_t a = open_rotated("it", asked), twin = open_rotated("", asked);
    feed(a, 700);
    feed(twin, 700);
    save("it");
    assert_int_equal(by_wire("it"), version);
    drop(a);
    a = restore("it");
    for (uint32_t i = 0; i < LAYERS; i++)
        assert_int_equal(kit_of(&m, a)->layers[i].shape.v_rotation, rotations[i]);
    go_on_alike(a, twin, 0);
    drop(a);
    drop(twin);
}

// A session comes back with the rotation that it had, whatever is the default by then. Only what
// the first version cannot say is written as the second.
TEST(test_rotations)
{
    enum { NO = KVQ_V_ROT_NONE, BY_ENGINE = KVQ_V_ROT_ENGINE, YES = KVQ_V_ROT_DAEMON };
    check_rotations((const uint8_t[LAYERS]){YES, YES, YES, YES}, KVQ__V_BY_PAPER, 1);
    check_rotations((const uint8_t[LAYERS]){NO, NO, NO, NO}, KVQ__V_NONE, 1); // as it used to be
    check_rotations((const uint8_t[LAYERS]){BY_ENGINE, BY_ENGINE, BY_ENGINE, BY_ENGINE},
                    KVQ__V_ENGINE, 1);
    rows[1].format = "k8v4";
    check_rotations((const uint8_t[LAYERS]){YES, NO, YES, YES}, KVQ__V_BY_PAPER, 2);
    rows[0].format = rows[3].format = "k8v4";
    rows[1].format = "oscar2";
    check_rotations((const uint8_t[LAYERS]){NO, YES, YES, NO}, KVQ__V_BY_PAPER, 2);
}

int main(void)
{
    return run_all(NULL, NULL);
}
