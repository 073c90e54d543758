// SPDX-License-Identifier: Apache-2.0
//
// Prompts in full precision that give way: to whom, when, and never in vain. What they answer is
// e2e_prompt.py's.
#include "daemon/core/residency/evict.h"
#include "proto/status.h"
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum {
    MIB = 1 << 20,
    HEADS = 2,
    DIM = 64,
    LAYERS = 2,
    BUFFER = 4 * MIB,
    PAGE = KVQ_BLOCK_TOKENS,
    RAW = 4 * HEADS * DIM * PAGE, // bytes of a page of one layer in 16 bits
    POOL = 8 * MIB,               // of 56 pages, each with packed blocks beside it
    PROMPT = 3072,
    FED = 24 * PAGE - 256, // of a prompt that goes on
    QUERIES = 1,
};

static struct kit kit;
static struct member m, other;
static char text[KVQ_TEXT_BYTES];

static const struct kvq__layer_row rows[1] = {
    {4, HEADS, DIM, DIM, .format = "oscar2", .kv_from = -1, .repeat = LAYERS}};

static int setup(void **state)
{
    kit_open(&kit, 3, 64 * MIB, 0);
    kit.core->pools[0].budget = POOL;
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    assert_int_equal(member_open(&kit, &other, 1000, BUFFER), 0);
    return 0;
}

static uint64_t opened(struct member *member, uint64_t prompt, uint32_t flags)
{
    struct kvq__session_spec spec = {
        .layers = rows, .n_layers = 1, .prompt_tokens = prompt, .flags = flags};
    return kit_opened(member, &spec);
}

// A session in the middle of its prompt.
static struct kvq__session *prompt_of(struct member *member, uint64_t *handle)
{
    *handle = opened(member, PROMPT, 0);
    struct kvq__session *s = kit_of(member, *handle);
    assert_int_equal(s->prompt.exact, PROMPT);
    assert_int_equal(kit_step(member, *handle, FED, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(s->layers[0].packed, 0);
    assert_int_equal(s->layers[0].raw_page, 0);
    return s;
}

// Begins a step as kit_request.
static int begin(struct member *member, uint64_t handle, uint32_t n)
{
    struct kvq_request r = kit_header(KVQ_OP_STEP_BEGIN, 1);
    uint64_t tokens = kit_of(member, handle)->tokens;
    struct kvq_entry_wire e = {
        .handle = handle, .position = tokens, .row = (uint32_t)tokens, .append = n};
    r.step = KIT_STEP;
    return kit_ask(member, &r, &e);
}

static int again(struct member *member)
{
    int rc = kit_again(member);
    return rc ? rc : kvq__queue_results(member->queue)[0].status;
}

static void pass(uint64_t ns)
{
    kit_pass(&kit, ns);
}

enum { MORE = 36 * PAGE }; // tokens that have no room beside a prompt that is not packed

KIT_TEST(test_another_session)
{
    uint64_t a, b = opened(&other, 0, 0);
    struct kvq__session *s = prompt_of(&m, &a);
    assert_int_equal(begin(&other, b, MORE), 1);
    assert_int_equal(s->prompt.exact, 0);
    assert_true(s->prompt.packs_early);
    assert_int_equal(kit.core->counts.prompts_packed, 1);
    pass(5000000000ull); // however long it takes
    assert_int_equal(again(&other), 1);
    kit_pack(&kit);
    assert_in_range(s->layers[0].raw_page, 1, FED / PAGE);
    assert_int_equal(kit.core->counts.prompts_packed_bytes,
                     2 * (uint64_t)s->layers[0].raw_page * RAW);
    assert_int_equal(again(&other), 0);
    assert_int_equal(kit.core->counts.refused_for_room, 0);
    assert_int_equal(kit_step(&m, a, 100, HEADS, DIM), 0); // it goes on
}

// The prompt that has no room for its own next piece.
KIT_TEST(test_itself)
{
    uint64_t a, b = opened(&other, 0, 0);
    assert_int_equal(kit_step(&other, b, 16 * PAGE, HEADS, DIM), 0);
    assert_int_equal(begin(&other, b, 8 * PAGE), 0); // held by a step
    struct kvq__session *s = prompt_of(&m, &a);
    assert_int_equal(begin(&m, a, MORE), 1);
    assert_int_equal(s->prompt.exact, 0);
    kit_pack(&kit);
    assert_int_equal(again(&m), 0);
    assert_int_equal(kit.core->counts.refused_for_room, 0);
}

// A session with an open step between two requests of it may give way; while one is under way it
// is waited for.
KIT_TEST(test_in_a_step)
{
    uint64_t a, b = opened(&other, 0, 0);
    struct kvq__session *s = prompt_of(&m, &a);
    assert_int_equal(begin(&m, a, 10), 0);
    struct kvq_entry_wire e = {.handle = a, .position = FED, .append = 10};
    struct kvq_request r = kit_append(&m, KIT_STEP, 0, HEADS, DIM);
    kit_load(&m, &r, &e);
    assert_int_equal(kvq__request_start(m.queue), KVQ__RUN); // its job is yet to run
    assert_int_equal(begin(&other, b, MORE), 1);
    assert_int_equal(s->prompt.exact, PROMPT);
    assert_true(s->prompt.gives_way);
    kit_pack(&kit);
    assert_int_equal(again(&other), 1);
    kit_run_job(&kit, kvq__queue_job(m.queue));
    assert_int_equal(kvq__request_continue(m.queue), KVQ__DONE);
    assert_int_equal(s->prompt.exact, 0);
    assert_true(kvq__in_step(s));
    kit_pack(&kit);
    assert_int_equal(again(&other), 0);
    for (r.layer = 0; r.layer < LAYERS; r.layer++)
        if (r.layer)
            assert_int_equal(kit_request(&m, &r, &e), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, KIT_STEP, e, NULL), 0);
    assert_int_equal(s->tokens, FED + 10);
}

// The one that holds most goes, and no more than are needed.
KIT_TEST(test_one_of_two)
{
    uint64_t a = opened(&m, 1024, 0), b = opened(&m, 2048, 0), c = opened(&other, 0, 0);
    assert_int_equal(kit_step(&m, a, 1000, HEADS, DIM), 0);
    assert_int_equal(kit_step(&m, b, 2000, HEADS, DIM), 0);
    assert_int_equal(begin(&other, c, 34 * PAGE), 1);
    assert_int_equal(kit_of(&m, a)->prompt.exact, 1024);
    assert_int_equal(kit_of(&m, b)->prompt.exact, 0);
    kit_pack(&kit);
    assert_int_equal(again(&other), 0);
    assert_int_equal(kit.core->counts.prompts_packed, 1);
}

// What all shards of a session free counts: no second session goes where those are enough.
KIT_TEST(test_shards)
{
    enum { FED_EACH = 600 };
    const struct kvq__pool *pool = &kit.core->pools[0];
    uint64_t handles[4], b = opened(&other, 0, 0); // of two sessions: 0, 1, 0, 1
    struct kvq_entry_wire e[4];
    for (uint32_t i = 0; i < 4; i++) {
        struct kvq__session_spec spec = {.name = i % 2 ? "y" : "x",
                                         .shard = i / 2,
                                         .shards = 2,
                                         .layers = rows,
                                         .n_layers = 1,
                                         .prompt_tokens = FED_EACH + 24};
        handles[i] = kit_opened(&m, &spec);
        e[i] = (struct kvq_entry_wire){.handle = handles[i], .append = FED_EACH};
    }
    struct kvq_request r = kit_of_step(KVQ_OP_STEP_BEGIN, 4, KIT_STEP);
    assert_int_equal(kit_request(&m, &r, e), 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        r = kit_of_step(KVQ_OP_APPEND, 4, KIT_STEP);
        r.layer = layer;
        r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
        r.v = kit_view(&m, m.bytes / 2, HEADS, DIM, KVQ_F32);
        assert_int_equal(kit_request(&m, &r, e), 0);
    }
    r = kit_of_step(KVQ_OP_STEP_END, 4, KIT_STEP);
    assert_int_equal(kit_request(&m, &r, e), 0);
    uint64_t held = kvq__exact_bytes(kit_of(&m, handles[0]));
    kit.core->pools[0].budget = pool->extents_taken;
    uint64_t need = pool->budget - pool->used_bytes + held + 1;
    assert_int_equal(begin(&other, b, (uint32_t)(need / (LAYERS * RAW) + 1) * PAGE), 1);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(kit_of(&m, handles[i])->prompt.exact, i % 2 ? FED_EACH + 24 : 0);
    kit_pack(&kit);
    assert_int_equal(again(&other), 0);
}

enum { MANY = 40, OF_MANY = 600 };

// Of many some give way at a look, and no look walks over all for each.
KIT_TEST(test_many)
{
    const struct kvq__pool *pool = &kit.core->pools[0];
    uint64_t held = 0, b = opened(&other, 0, 0);
    kit.core->pools[0].budget = 64 * MIB;
    for (uint32_t i = 0; i < MANY; i++) {
        uint64_t a = opened(&m, OF_MANY, 0);
        assert_int_equal(kit_step(&m, a, OF_MANY, HEADS, DIM), 0);
        held += kvq__exact_bytes(kit_of(&m, a));
    }
    kit.core->pools[0].budget = pool->extents_taken;
    uint64_t looks = kit.core->lookup.looks;
    int rc = begin(&other, b, (uint32_t)(held / (LAYERS * RAW) * 8 / 10 * PAGE));
    assert_int_equal(rc, 1);
    assert_in_range(kit.core->lookup.looks - looks, MANY, 4 * MANY);
    assert_in_range(kit.core->counts.prompts_packed, 1, MANY / 2);
    for (uint32_t i = 0; i < 3 && rc == 1; i++) {
        kit_pack(&kit);
        rc = again(&other);
    }
    assert_int_equal(rc, 0);
}

// Of very many some are looked at, and others at the next look, until it is enough.
KIT_TEST(test_very_many)
{
    enum { N = 600, EACH = 160 };
    static const struct kvq__layer_row row = {1, 1, DIM, DIM, .format = "oscar2", .kv_from = -1};
    const struct kvq__pool *pool = &kit.core->pools[0];
    struct kvq__session_spec spec = {.layers = &row, .n_layers = 1, .prompt_tokens = 2 * EACH};
    struct kvq__session_spec plain = {.layers = &row, .n_layers = 1};
    uint64_t held = 0, b = kit_opened(&other, &plain);
    kit.core->pools[0].budget = 64 * MIB;
    for (uint32_t i = 0; i < N; i++) {
        uint64_t a = kit_opened(&m, &spec);
        assert_int_equal(kit_step(&m, a, EACH, 1, DIM), 0);
        held += kvq__exact_bytes(kit_of(&m, a));
    }
    assert_int_equal(kit.core->prompts.n, N);
    kit.core->pools[0].budget = pool->extents_taken;
    uint64_t looks = kit.core->lookup.looks, most = 0;
    int rc = begin(&other, b, (uint32_t)(held * 3 / 4 / (4 * DIM)));
    for (uint32_t i = 0; i < 100 && rc == 1; i++) {
        most = kvq__max(most, kit.core->lookup.looks - looks);
        kit_pack(&kit);
        pass(10 * 1000000);
        looks = kit.core->lookup.looks;
        rc = again(&other);
    }
    assert_int_equal(rc, 0);
    assert_in_range(most, 256, 2 * 256);
}

// At a limit of its namespace a request does not see its own prompt behind so many of others: it
// looks again, and is not refused before.
KIT_TEST(test_behind_those_of_others)
{
    enum { N = 400, EACH = 160 };
    static const struct kvq__layer_row row = {1, 1, DIM, DIM, .format = "oscar2", .kv_from = -1};
    struct kvq__session_spec spec = {.layers = &row, .n_layers = 1, .prompt_tokens = 2 * EACH};
    struct kvq__session_spec plain = {.layers = &row, .n_layers = 1};
    struct member third;
    kit.core->pools[0].budget = 64 * MIB;
    assert_int_equal(member_open(&kit, &third, 2000, BUFFER), 0);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(kit_step(&m, kit_opened(&m, &spec), EACH, 1, DIM), 0);
    uint64_t a = kit_opened(&third, &spec), b = kit_opened(&third, &plain);
    assert_int_equal(kit_step(&third, a, EACH, 1, DIM), 0);
    struct kvq__namespace *ns = kit_of(&third, a)->ns;
    ns->quota.limit[KVQ__HOST_BYTES] = ns->used[KVQ__HOST_BYTES];
    int rc = begin(&third, b, 1);
    assert_int_equal(rc, 1);
    assert_int_equal(kit.core->counts.prompts_packed, 0);
    for (uint32_t i = 0; i < 4 && rc == 1; i++) {
        pass(10 * 1000000);
        rc = again(&third);
        kit_pack(&kit);
    }
    assert_int_equal(rc, 0);
    assert_int_equal(kit.core->counts.prompts_packed, 1);
}

// What cannot be had even so is refused at once, and no prompt is packed for it.
KIT_TEST(test_not_in_vain)
{
    uint64_t a, b = opened(&other, 0, 0), c = opened(&m, 0, 0);
    struct kvq__session *s = prompt_of(&m, &a);
    assert_int_equal(begin(&other, b, 60 * PAGE), KVQ_E_NO_MEMORY); // more than there is
    assert_int_equal(begin(&m, c, 16 * PAGE), 0);                   // held by an open step
    assert_int_equal(begin(&other, b, 45 * PAGE), KVQ_E_NO_MEMORY);
    assert_int_equal(s->prompt.exact, PROMPT);
    assert_int_equal(kit.core->counts.prompts_packed, 0);
}

// At a namespace's limit only prompts of that namespace help; and a prompt counts against it.
KIT_TEST(test_quota)
{
    struct kvq__session_info info;
    uint64_t a, b = opened(&other, 0, 0);
    struct kvq__session *s = prompt_of(&m, &a);
    kit.core->pools[0].budget = 64 * MIB;
    s->ns->quota.limit[KVQ__HOST_BYTES] = s->ns->used[KVQ__HOST_BYTES] + 2 * RAW;
    assert_int_equal(begin(&other, b, 8 * PAGE), 1);
    assert_int_equal(s->prompt.exact, 0);
    kit_pack(&kit);
    assert_int_equal(again(&other), 0);
    s->ns->quota.limit[KVQ__HOST_BYTES] = 2 * (uint64_t)PROMPT / PAGE * LAYERS * RAW;
    struct kvq__session_spec spec = {.layers = rows, .n_layers = 1, .prompt_tokens = PROMPT};
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    assert_int_equal(info.exact_tokens, 0); // with its packed blocks it is more than half
    spec.prompt_tokens = PROMPT / 2;
    assert_int_equal(kvq__session_open(m.client, &spec, &info, text), 0);
    assert_int_equal(info.exact_tokens, PROMPT / 2);
}

// A prompt that has ended holds nothing, and none is kept that was not to be.
KIT_TEST(test_ended)
{
    uint64_t a, b = opened(&other, 0, 0), c = opened(&m, PROMPT, KVQ__OPEN_PACKED_PROMPT);
    struct kvq__session *s = prompt_of(&m, &a);
    assert_int_equal(kit_of(&m, c)->prompt.exact, 0);
    assert_int_equal(kit_step(&m, a, 256 + 1, HEADS, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(kvq__exact_bytes(s), 0);
    assert_int_equal(kit_step(&m, a, 1, HEADS, DIM), 0);
    assert_int_equal(kit.core->prompts.n, 0); // nobody looks at it any more
    assert_int_equal(begin(&other, b, MORE), 0);
    assert_int_equal(kit.core->counts.prompts_packed, 0);
    assert_int_equal(s->prompt.exact, PROMPT);
}

int main(void)
{
    return run_all(NULL, NULL);
}
