// SPDX-License-Identifier: Apache-2.0
//
// See save_kit.h.
#include "tests/core/save_kit.h"

static_assert(ROWS * HEADS * DIM * 4 < Q_AT, "K ends before the queries");

struct kit kit;
struct member m;
struct vault vault;
struct kvq__layer_row rows[LAYERS];
char text[KVQ_TEXT_BYTES];
const struct kvq__peer admin = {.admin = true};

void set_rows(const char *format)
{
    for (uint32_t i = 0; i < LAYERS; i++)
        rows[i] =
            (struct kvq__layer_row){2 * HEADS, HEADS, DIM, DIM, .format = format, .kv_from = -1};
    rows[1].window = 300;
    rows[3].kv_from = 0;
}

void open_kit(void)
{
    kit_open(&kit, 7, 64 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    member_fill(&m);
}

int setup(void **state)
{
    set_rows("oscar2");
    open_kit();
    return 0;
}

int teardown(void **state)
{
    kit_close(&kit);
    vault_close(&vault);
    return 0;
}

uint64_t open_as(const char *name, uint32_t n_layers, uint32_t rollback)
{
    struct kvq__session_info info;
    struct kvq__session_spec spec = {
        .name = name, .layers = rows, .n_layers = n_layers, .max_rollback = rollback};
    int rc = kvq__session_open(m.client, &spec, &info, text);
    return rc ? 0 : info.handle;
}

void feed(uint64_t handle, uint64_t to)
{
    while (kit_of(&m, handle)->tokens < to) {
        uint64_t left = to - kit_of(&m, handle)->tokens;
        assert_int_equal(kit_step(&m, handle, left < 97 ? (uint32_t)left : 97, HEADS, DIM), 0);
    }
}

uint64_t fed(const char *name, uint64_t tokens, uint32_t rollback)
{
    uint64_t handle = open_as(name, LAYERS, rollback);
    if (!handle)
        fail_msg("%s: %s", rows[0].format, text);
    feed(handle, tokens);
    return handle;
}

struct kvq_request attend_of(uint32_t layer)
{
    struct kvq_request r = kit_attend(&m, layer, Q_AT, OUT_AT, 2 * HEADS, DIM);
    return r;
}

int attend(uint64_t handle, uint32_t layer, uint8_t out[OUT_BYTES])
{
    struct kvq_entry_wire e = {
        .handle = handle, .position = kit_of(&m, handle)->tokens, .queries = QUERIES};
    struct kvq_request r = attend_of(layer);
    int rc = kit_request(&m, &r, &e);
    memcpy(out, m.memory + OUT_AT, OUT_BYTES);
    return rc ? rc : kvq__queue_results(m.queue)[0].status;
}

void same_bits(uint64_t a, uint64_t b)
{
    static uint8_t x[OUT_BYTES], y[OUT_BYTES];
    assert_int_equal(kit_of(&m, a)->tokens, kit_of(&m, b)->tokens);
    for (uint32_t i = 0; i < LAYERS; i++) {
        assert_int_equal(attend(a, i, x), 0);
        assert_int_equal(attend(b, i, y), 0);
        assert_memory_equal(x, y, OUT_BYTES);
    }
}

void save(const char *name)
{
    vault_save_packed(&vault, &kit, "uid-1000", name);
}

struct vault_session *stored(uint64_t tokens, uint32_t rollback)
{
    uint64_t handle = fed("it", tokens, rollback);
    save("it");
    drop(handle);
    return vault_find(&vault, "it", 0);
}

void restore_refused(int code, const char *words)
{
    struct kvq__restore *r;
    assert_int_equal(vault_restore(&vault, kit.core, "it", 0, NULL, UINT64_MAX, &r, text), code);
    assert_says(text, words);
}

uint64_t restore_up_to(const char *name, uint64_t good)
{
    struct kvq__restore *r;
    assert_int_equal(vault_restore(&vault, kit.core, name, 0, NULL, good, &r, text), 0);
    core_check(kit.core);
    assert_int_equal(vault_rest(&vault, &r, vault_find(&vault, name, 0)), 0);
    core_check(kit.core);
    return open_as(name, 0, 0);
}

uint64_t restore(const char *name)
{
    return restore_up_to(name, UINT64_MAX);
}

uint64_t save_and_restore(uint64_t handle, const char *name)
{
    kit_pack(&kit);
    save(name);
    drop(handle);
    return restore(name);
}

void drop(uint64_t handle)
{
    kit_drop(&m, handle);
}

void truncate_by(uint64_t handle, uint32_t n)
{
    assert_int_equal(kit_truncate(&m, handle, n), 0);
}

void go_on_alike(uint64_t a, uint64_t b, uint32_t rollback)
{
    const uint64_t at = kit_of(&m, a)->tokens;
    same_bits(a, b);
    if (rollback && at > rollback) {
        truncate_by(a, rollback);
        truncate_by(b, rollback);
        same_bits(a, b);
    }
    feed(a, at + 1);
    feed(b, at + 1);
    same_bits(a, b);
    feed(a, at + 290);
    feed(b, at + 290);
    kit_pack(&kit);
    same_bits(a, b);
}

void append_both(uint64_t step, const struct kvq_entry_wire e[2])
{
    struct kvq_request r = kit_of_step(KVQ_OP_APPEND, 2, step);
    r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, BUFFER / 2, HEADS, DIM, KVQ_F32);
    for (r.layer = 0; r.layer < OWNED; r.layer++) {
        assert_int_equal(kit_ask(&m, &r, e), 0);
    }
    r = kit_of_step(KVQ_OP_STEP_END, 2, step);
    assert_int_equal(kit_request(&m, &r, e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[1].status, 0);
}
