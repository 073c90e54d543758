// SPDX-License-Identifier: Apache-2.0
//
// See reshard_kit.h.
#include "tests/core/reshard_kit.h"

static_assert(ROWS * HEADS * DIM * 4 < Q_AT, "K ends before the queries");

struct kit kit;
struct member m;
struct vault vault;
char text[KVQ_TEXT_BYTES];
const struct kvq__peer admin = {.admin = true};

int setup(void **state)
{
    kit_open(&kit, 11, 256 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    member_fill(&m);
    return 0;
}

int teardown(void **state)
{
    kit_close(&kit);
    vault_close(&vault);
    return 0;
}

// ---- Sets ----

const char *format = "oscar2";
uint32_t rollback;

// Layer 1 has a window, layer 2 reads layer 0 if shards are heads.
static void set_rows(const struct set *s, uint32_t shard, struct kvq__layer_row *rows)
{
    uint32_t heads = s->heads - (shard == 0 ? s->more : 0);
    heads += shard + 1 == s->shards ? s->more : 0;
    for (uint32_t i = 0; i < s->layers; i++) {
        rows[i] = (struct kvq__layer_row){.q_heads = (uint16_t)(RATIO * heads),
                                          .kv_heads = (uint16_t)heads,
                                          .k_dim = DIM,
                                          .v_dim = DIM,
                                          .format = format,
                                          .kv_from = -1};
        if (!s->stages) {
            rows[i].window = i == 1 ? 300 : 0;
            rows[i].kv_from = i == 2 ? 0 : -1;
        }
    }
}

int open_shard(struct set *s, uint32_t i, uint32_t flags)
{
    struct kvq__layer_row rows[HEADS];
    struct kvq__session_info info;
    struct kvq__session_spec spec = {.name = s->name,
                                     .layers = rows,
                                     .n_layers = s->layers,
                                     .shard = i,
                                     .shards = s->shards,
                                     .max_rollback = rollback,
                                     .flags = flags};
    set_rows(s, i, rows);
    int rc = kvq__session_open(m.client, &spec, &info, text);
    s->handles[i] = rc ? 0 : info.handle;
    return rc;
}

void open_all(struct set *s)
{
    for (uint32_t i = 0; i < s->shards; i++)
        if (open_shard(s, i, 0))
            fail_msg("%s, shard %u of %u: %s", format, i, s->shards, text);
}

struct set by_heads(const char *name, uint32_t shards)
{
    struct set s = {.shards = shards, .layers = LAYERS, .heads = HEADS / shards};
    snprintf(s.name, sizeof s.name, "%s", name);
    return s;
}

struct set by_layers(const char *name, uint32_t shards)
{
    struct set s = {.shards = shards, .layers = HEADS / shards, .heads = 2, .stages = true};
    snprintf(s.name, sizeof s.name, "%s", name);
    return s;
}

const struct kvq__session *shard_of(const struct set *s, uint32_t i)
{
    return kit_of(&m, s->handles[i]);
}

uint64_t tokens_of(const struct set *s)
{
    return shard_of(s, 0)->tokens;
}

void drop(const struct set *s)
{
    kit_drop(&m, s->handles[0]);
}

// ---- Steps ----

// Where a shard's part of a tensor of all heads starts. Stages have the heads that their layer is.
static uint64_t part_at(const struct set *s, uint32_t shard, uint32_t layer, uint32_t ratio)
{
    uint32_t first = shard * s->heads - (shard ? s->more : 0);
    first = s->stages ? (shard * s->layers + layer) % 4 : first;
    return (uint64_t)first * ratio * DIM * 4;
}

static void append(const struct set *s, uint32_t shard, uint32_t layer, uint32_t n)
{
    struct kvq_request r = kit_header(KVQ_OP_APPEND, 1);
    struct kvq_entry_wire e = {.handle = s->handles[shard],
                               .position = tokens_of(s),
                               .row = (uint32_t)tokens_of(s),
                               .append = n};
    uint64_t at = part_at(s, shard, layer, 1);
    if (!kvq__layer_owns(shard_of(s, shard), layer))
        return;
    r.step = 8;
    r.layer = layer;
    r.k = kit_view(&m, at, HEADS, DIM, KVQ_F32);
    r.v = kit_view(&m, BUFFER / 2 + at, HEADS, DIM, KVQ_F32);
    assert_int_equal(kit_ask(&m, &r, &e), 0);
}

// The step's beginning or end, of all shards in one request.
static void step_all(const struct set *s, uint8_t op, uint32_t n)
{
    struct kvq_request r = kit_header(op, (uint16_t)s->shards);
    struct kvq_entry_wire e[HEADS];
    r.step = 8;
    for (uint32_t i = 0; i < s->shards; i++)
        e[i] =
            (struct kvq_entry_wire){.handle = s->handles[i], .position = tokens_of(s), .append = n};
    assert_int_equal(kit_request(&m, &r, e), 0);
    for (uint32_t i = 0; i < s->shards; i++)
        assert_int_equal(kvq__queue_results(m.queue)[i].status, 0);
}

void feed(const struct set *s, uint64_t to)
{
    while (tokens_of(s) < to) {
        uint64_t left = to - tokens_of(s);
        uint32_t n = left < 97 ? (uint32_t)left : 97;
        step_all(s, KVQ_OP_STEP_BEGIN, n);
        for (uint32_t i = 0; i < s->shards; i++)
            for (uint32_t layer = 0; layer < s->layers; layer++)
                append(s, i, layer, n);
        step_all(s, KVQ_OP_STEP_END, n);
    }
}

void truncate_by(const struct set *s, uint32_t n)
{
    for (uint32_t i = 0; i < s->shards; i++)
        assert_int_equal(kit_truncate(&m, s->handles[i], n), 0);
}

void attend_shard(const struct set *s, uint32_t shard, uint32_t layer, uint64_t out_at)
{
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, 1);
    struct kvq_entry_wire e = {
        .handle = s->handles[shard], .position = tokens_of(s), .queries = QUERIES};
    uint64_t at = part_at(s, shard, layer, RATIO);
    r.layer = layer;
    r.q = kit_view(&m, Q_AT + at, RATIO * HEADS, DIM, KVQ_F32);
    r.out = kit_view(&m, out_at + at, RATIO * HEADS, DIM, KVQ_F32);
    assert_int_equal(kit_ask(&m, &r, &e), 0);
}

void attend(const struct set *s, uint32_t i, uint8_t out[OUT_BYTES])
{
    memset(m.memory + OUT_AT, 0, OUT_BYTES);
    if (s->stages)
        attend_shard(s, i / s->layers, i % s->layers, OUT_AT);
    for (uint32_t shard = 0; shard < s->shards && !s->stages; shard++)
        attend_shard(s, shard, i, OUT_AT);
    memcpy(out, m.memory + OUT_AT, OUT_BYTES);
}

void same_bits(const struct set *a, const struct set *b)
{
    static uint8_t x[OUT_BYTES], y[OUT_BYTES], zero[OUT_BYTES];
    assert_int_equal(tokens_of(a), tokens_of(b));
    for (uint32_t i = 0; i < (a->stages ? HEADS : LAYERS) && tokens_of(a); i++) {
        attend(a, i, x);
        attend(b, i, y);
        assert_memory_not_equal(x, zero, OUT_BYTES);
        if (memcmp(x, y, OUT_BYTES) != 0)
            fail_msg("%s: layer %u at %llu tokens, %u shards", format, i,
                     (unsigned long long)tokens_of(a), a->shards);
    }
}

void same_blocks(const struct set *a, const struct set *b)
{
    kit_pack(&kit);
    for (uint32_t i = 0; i < a->shards; i++)
        for (uint32_t layer = 0; layer < a->layers; layer++) {
            const struct kvq__layer *x = &shard_of(a, i)->layers[layer];
            const struct kvq__layer *y = &shard_of(b, i)->layers[layer];
            if (!kvq__layer_owns(shard_of(a, i), layer))
                continue;
            assert_int_equal(x->packed, y->packed);
            assert_int_equal(x->first_page, y->first_page);
            assert_int_equal(x->raw_page, y->raw_page);
            assert_int_equal(x->base, y->base);
            assert_int_equal(x->learned, y->learned);
            for (uint32_t p = x->first_page; x->packed_bytes && p < x->packed / KVQ_BLOCK_TOKENS;
                 p++)
                assert_memory_equal(kvq__page(x, p)->packed.data, kvq__page(y, p)->packed.data,
                                    x->packed_bytes);
        }
}

// ---- Saving and restoring ----

void save(const struct set *s)
{
    vault_save_packed(&vault, &kit, "uid-1000", s->name);
}

int restore_shard(const struct set *s, uint32_t i, uint64_t good)
{
    const struct kvq__reshard_as as = {i, s->shards, s->layers};
    text[0] = 0;
    int rc = vault_reshard(&vault, kit.core, s->name, &as, good, text);
    core_check(kit.core);
    assert_true(rc == 0 || text[0]);
    return rc;
}

void restore(struct set *s, uint64_t good)
{
    for (uint32_t i = 0; i < s->shards; i++)
        if (restore_shard(s, i, good))
            fail_msg("%s, shard %u of %u: %s", format, i, s->shards, text);
    open_all(s);
}

void go_on_alike(const struct set *a, const struct set *b)
{
    same_bits(a, b);
    if (rollback && tokens_of(a) > rollback) {
        truncate_by(a, rollback);
        truncate_by(b, rollback);
        same_bits(a, b);
    }
    uint64_t at = tokens_of(a);
    feed(a, at + 1);
    feed(b, at + 1);
    same_bits(a, b);
    feed(a, at + 170);
    feed(b, at + 170);
    same_blocks(a, b);
    same_bits(a, b);
}
