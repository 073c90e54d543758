// SPDX-License-Identifier: Apache-2.0
//
// See evict_kit.h.
#include "tests/core/evict_kit.h"

const struct kvq__layer_row rows[1] = {
    {4, HEADS, DIM, DIM, .format = "f16", .kv_from = -1, .repeat = LAYERS}};

struct kit kit;
struct member m, other;
struct vault vault;
char text[KVQ_TEXT_BYTES];
uint32_t home = 1;

void attach(struct member *member, uint32_t uid)
{
    assert_int_equal(member_open(&kit, member, uid, BUFFER), 0);
    member_fill(member);
}

int setup(void **state)
{
    sim_in_steps(5);
    kit_open(&kit, 7, 32 * MIB, 0);
    kit.core->pools[1].budget = GPU;
    attach(&m, 1000);
    attach(&other, 1000);
    return 0;
}

int setup_saves(void **state)
{
    kit_saves(true);
    setup(state);
    kit.core->pools[0].budget = GPU;
    vault.serves = true;
    home = 0;
    return 0;
}

void poll_core(void)
{
    bool served = kit.core->config.saves && vault_serve(&vault, kit.core) > 0;
    kit_poll(kit.core);
    if (served)
        core_check(kit.core);
}

void pass(uint64_t ns)
{
    kit_pass(&kit, ns);
}

void rest(void)
{
    for (uint32_t i = 0; kvq__core_moves(kit.core) || !TAILQ_EMPTY(&kit.core->flights); i++) {
        assert_true(i < 1000000);
        poll_core();
    }
    poll_core();
}

int teardown(void **state)
{
    member_close(&m);
    member_close(&other);
    rest();
    kit_close(&kit);
    vault_close(&vault);
    vault = (struct vault){0};
    home = 1;
    kit_saves(false);
    return 0;
}

const char *place(uint32_t pool)
{
    return kvq__pool_name(&kit.core->pools[pool]);
}

void something_is_freed(void)
{
    kvq__freed_note(kit_namespace(&kit, 1000), &kit.core->pools[home]);
}

uint64_t opened(struct member *member, const char *name)
{
    struct kvq__session_spec spec = {
        .name = name, .place = place(home), .layers = rows, .n_layers = 1};
    return kit_opened(member, &spec);
}

// ---- Requests that may wait ----

int status_of(const struct member *member)
{
    const struct kvq_completion *c = kvq__queue_completion(member->queue);
    return c->status ? c->status : kvq__queue_results(member->queue)[0].status;
}

int finish(struct member *member, int rc)
{
    for (uint32_t looks = 0; rc == 1; looks++) {
        assert_true(looks < 100000);
        poll_core();
        pass(MS / 10);
        rc = kit_again(member);
    }
    return rc ? rc : status_of(member);
}

struct kvq_entry_wire entry(struct member *member, uint64_t handle, uint32_t append)
{
    uint64_t tokens = kit_of(member, handle)->tokens;
    return (struct kvq_entry_wire){
        .handle = handle, .position = tokens, .row = (uint32_t)tokens, .append = append};
}

int begin(struct member *member, uint64_t handle, uint64_t step, uint32_t n, uint64_t wait)
{
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 1, step);
    struct kvq_entry_wire e = entry(member, handle, n);
    r.flags = wait ? KVQ_REQ_WAIT_ROOM : 0;
    r.deadline_ns = wait ? kit.now + wait : 0;
    return kit_request(member, &r, &e);
}

int go_on(struct member *member, uint64_t handle, uint32_t n)
{
    struct kvq_entry_wire e = entry(member, handle, n);
    int rc = 0;
    for (uint32_t layer = 0; rc == 0 && layer < LAYERS; layer++) {
        struct kvq_request r = kit_append(member, 99, layer, HEADS, DIM);
        rc = finish(member, kit_request(member, &r, &e));
    }
    return rc ? rc : kit_simple(member, KVQ_OP_STEP_END, 99, e, NULL);
}

int step(struct member *member, uint64_t handle, uint32_t n)
{
    int rc = finish(member, begin(member, handle, 99, n, 0));
    return rc ? rc : go_on(member, handle, n);
}

uint64_t fed(struct member *member, const char *name)
{
    uint64_t handle = opened(member, name);
    assert_int_equal(step(member, handle, SESSION), 0);
    rest();
    return handle;
}

void fill_home(uint64_t handles[4])
{
    for (uint32_t i = 0; i < 4; i++)
        handles[i] = fed(&m, "");
}

void hold_all(uint64_t handles[4])
{
    fill_home(handles);
    for (uint32_t i = 0; i < 4; i++)
        kvq__session_ref(kit_of(&m, handles[i]));
}

void let_go(const uint64_t handles[4])
{
    for (uint32_t i = 0; i < 4; i++)
        kvq__session_unref(kit_of(&m, handles[i]));
}

void attend(struct member *member, uint64_t handle, uint8_t out[LAYERS][OUT_BYTES])
{
    struct kvq_entry_wire e = entry(member, handle, 0);
    e.queries = QUERIES;
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct kvq_request r = kit_attend(member, i, Q_AT, OUT_AT, 2 * HEADS, DIM);
        assert_int_equal(finish(member, kit_request(member, &r, &e)), 0);
        memcpy(out[i], member->memory + OUT_AT, OUT_BYTES);
    }
}

void same_bits(struct member *member, uint64_t handle, uint8_t then[LAYERS][OUT_BYTES])
{
    static uint8_t now[LAYERS][OUT_BYTES];
    attend(member, handle, now);
    assert_memory_equal(now, then, sizeof now);
}

bool is_home(struct member *member, uint64_t handle)
{
    const struct kvq__session *s = kit_of(member, handle);
    return s->pool == &kit.core->pools[home] && !kvq__is_offloaded(s);
}

struct kvq__counts counts(void)
{
    struct kvq__counts counts;
    kvq__core_counts(kit.core, &counts);
    return counts;
}

uint64_t evicted(void)
{
    const struct kvq__counts stats = counts();
    return kit.core->counts.demoted + stats.parked_room + stats.parked_quota;
}

uint32_t refused(void)
{
    return (uint32_t)kit.core->counts.refused_for_room;
}
