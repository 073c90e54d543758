// SPDX-License-Identifier: Apache-2.0
//
// See prefix_kit.h.
#include "tests/core/prefix_kit.h"

static const struct kvq__layer_row rows[] = {{4, HEADS, DIM, DIM, .kv_from = -1, .repeat = 3}};

struct kit kit;
struct member one, two;
struct vault vault;
char text[KVQ_TEXT_BYTES];

int32_t *ids(struct member *m)
{
    return (int32_t *)(void *)(m->memory + IDS);
}

void attach(struct member *m, uint32_t uid)
{
    assert_int_equal(member_open(&kit, m, uid, BUFFER), 0);
    float *memory = (float *)(void *)m->memory;
    for (uint32_t i = 0; i < IDS / sizeof *memory; i++)
        memory[i] = i < BUFFER / 8 || i >= IDS / 4 ? kit_float(&kit) : memory[i - BUFFER / 8];
    for (int32_t i = 0; i < TOKENS; i++)
        ids(m)[i] = 1000 + 7 * i;
    m->ids_at = IDS;
}

void open_kit(uint64_t pool, uint64_t limit)
{
    static const uint32_t uids[] = {1000, 1001};
    static const char *const with[] = {"team"};
    struct kvq__namespace_config team = {.name = "team", .uids = uids, .n_uids = 2};
    struct kvq__namespace_config open = {
        .name = "open", .uids = uids, .n_uids = 1, .share_with = with, .n_share_with = 1};
    kit_open(&kit, 11, pool, limit);
    assert_int_equal(kvq__core_namespace(kit.core, &team, text), 0);
    assert_int_equal(kvq__core_namespace(kit.core, &open, text), 0);
    attach(&one, 1000);
    attach(&two, 1001);
    memcpy(two.memory, one.memory, IDS);
}

int setup(void **state)
{
    open_kit(64 * MIB, 0);
    return 0;
}

int setup_small(void **state)
{
    open_kit(64 * MIB, 3 * MIB / 2);
    return 0;
}

int teardown(void **state)
{
    kit_close(&kit);
    vault_close(&vault);
    return 0;
}

struct kvq__session_spec spec_of(const struct member *m, uint64_t tokens)
{
    return (struct kvq__session_spec){
        .ns = "team",
        .model = "llama",
        .format = "oscar2",
        .layers = rows,
        .n_layers = 1,
        .prefix = {.buffer = m->buffer, .offset = IDS, .tokens = tokens}};
}

uint64_t open_as(struct member *m, const struct kvq__session_spec *spec,
                 struct kvq__session_info *info)
{
    struct kvq__session_info own;
    info = info ? info : &own;
    text[0] = 0;
    int rc = kvq__session_open(m->client, spec, info, text);
    if (rc < 0)
        print_error("%s\n", text);
    assert_int_equal(rc, 0);
    return info->handle;
}

uint64_t lookup(struct member *m, const struct kvq__session_spec *spec)
{
    uint64_t tokens;
    text[0] = 0;
    assert_int_equal(kvq__prefix_lookup(m->client, spec, &tokens, text), 0);
    return tokens;
}

uint64_t feed(struct member *m, const struct kvq__session_spec *spec, uint32_t tokens)
{
    struct kvq__session_spec bare = *spec;
    bare.prefix =
        (struct kvq__prefix_spec){.spans = spec->prefix.spans, .n_spans = spec->prefix.n_spans};
    uint64_t handle = open_as(m, &bare, NULL);
    for (uint32_t at = 0; at < tokens; at += 200) {
        assert_int_equal(kit_step(m, handle, tokens - at < 200 ? tokens - at : 200, HEADS, DIM), 0);
        kit_pack(&kit);
    }
    return handle;
}

void drop(struct member *m, uint64_t handle)
{
    kit_drop(m, handle);
}

void attend(struct member *m, uint64_t handle, uint32_t layer, float *out)
{
    struct kvq_entry_wire e = {
        .handle = handle, .position = kit_of(m, handle)->tokens, .queries = 1};
    struct kvq_request r = kit_attend(m, layer, 0, OUT, 4, DIM);
    assert_int_equal(kit_ask(m, &r, &e), 0);
    memcpy(out, m->memory + OUT, 4 * DIM * sizeof *out);
}

void same_numbers(struct member *m, uint64_t a, struct member *n, uint64_t b, uint32_t layer)
{
    float want[4 * DIM], got[4 * DIM];
    attend(m, a, layer, want);
    attend(n, b, layer, got);
    assert_memory_equal(want, got, sizeof want);
}

void restart(void)
{
    kit_close(&kit);
    open_kit(64 * MIB, 0);
}

struct kvq__session_spec named(const struct member *m, uint64_t tokens)
{
    struct kvq__session_spec spec = spec_of(m, tokens);
    spec.name = "it";
    return spec;
}

void save(const char *name)
{
    vault_save_packed(&vault, &kit, "team", name);
}

void leave_saved(const struct kvq__session_spec *spec, uint32_t tokens)
{
    feed(&one, spec, tokens);
    save("it");
    restart();
}
