// SPDX-License-Identifier: Apache-2.0
//
// Whole steps in one request, and what a client reads by the page tables that they publish: the
// same as by requests for each layer, to the bit, and as long as it looks. On the host, and, linked
// with GPUs, on one of them.
#include <math.h>

#include "daemon/core/session/table.h"
#include "kernels/cuda/attend.h"
#include "tests/core/sim.h"
#include "tests/kits/unit.h"

static char text[KVQ_TEXT_BYTES]; // why the last call was refused

enum {
    HEADS = 2,
    DIM = 64,
    TOKENS = 1400,
    MIB = 1 << 20,
    BUFFER = 8 * MIB,
    TENSOR_BYTES = TOKENS * HEADS * DIM * 4,
    Q_AT = BUFFER / 4,
    OUT_AT = Q_AT + 64 * 1024,
    LSE_AT = OUT_AT + 64 * 1024,
    LAYERS = 5,
    PAGES = 16,
    UNIT = 2 * MIB, // of numbers of extents
};
static_assert(TENSOR_BYTES <= Q_AT, "the tensors lie apart");
static const uint64_t POOL_AT = 0x700000000000; // nothing is there: the test reads by number

#define ROW(name, from, w)                                                                         \
    {                                                                                              \
        4, HEADS, DIM, DIM, .format = (name), .kv_from = (from), .window = (w)                     \
    }
static const struct kvq__layer_row rows[LAYERS] = {ROW("oscar2", -1, 0), ROW("f16", -1, 0),
                                                   ROW("oscar2", 0, 0), ROW("kivi2", -1, 200),
                                                   ROW("innerq-hybrid", -1, 0)};

static const struct kvq__layer_row raw_rows[] = {ROW("f16", -1, 0)};

static struct kit kit;
static struct member m;

// The emulator takes its time.
static uint32_t fewer(uint32_t on_host, uint32_t on_gpu)
{
    return kit.core->n_pools > 1 ? on_gpu : on_host;
}

// Where sessions are.
static struct kvq__pool *pool(void)
{
    return &kit.core->pools[kit.core->n_pools > 1];
}

static int setup(void **state)
{
    kit_open(&kit, 11, 128 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    member_fill(&m);
    return 0;
}

static uint64_t open_named(struct member *member, const char *name, uint32_t rollback,
                           uint32_t flags)
{
    struct kvq__session_spec spec = {.name = name,
                                     .place = kvq__pool_name(pool()),
                                     .layers = rows,
                                     .n_layers = LAYERS,
                                     .max_rollback = rollback,
                                     .flags = flags};
    return kit_opened(member, &spec);
}

// One whose tokens are only copied.
static uint64_t open_raw(struct member *member)
{
    struct kvq__session_spec spec = {
        .place = kvq__pool_name(pool()), .layers = raw_rows, .n_layers = 1};
    return kit_opened(member, &spec);
}

// ---- The client's side ----

// A page table, and where the units of its extents are, as a client has them.
struct mapping {
    struct member *member;
    uint64_t handle;
    uint8_t *table;
    uint8_t *extents[256];
    uint64_t known;
};

static void map_extents(struct mapping *map)
{
    struct kvq__extent_export told[2];
    bool more = true;
    while (more) {
        int n =
            kvq__extents_tell(map->member->client, map->handle, told, 2, &map->known, &more, text);
        assert_true(n >= 0);
        for (int i = 0; i < n; i++)
            for (uint64_t at = 0; at < told[i].memory->bytes; at += UNIT) {
                assert_true(told[i].number + at / UNIT < 256);
                map->extents[told[i].number + at / UNIT] = told[i].memory->base + at;
            }
    }
}

static uint8_t *new_page(size_t bytes)
{
    void *table = pool()->gpu ? sim_gpus()->memory_new(bytes) : malloc(bytes);
    return memset(table, 0, bytes);
}

static void free_page(uint8_t *table)
{
    if (pool()->gpu)
        sim_gpus()->memory_free(table);
    else
        free(table);
}

static int try_map(struct member *member, uint64_t handle, struct mapping *map, uint32_t pages)
{
    *map = (struct mapping){.member = member, .handle = handle};
    map->table = new_page(kvq_table_bytes(LAYERS, pages));
    struct kvq__table_memory memory = {.on = pool()->gpu, .layers = LAYERS, .pages = pages};
    if (memory.on)
        memory.gpu = (uintptr_t)map->table;
    else
        memory.host = map->table;
    int rc = kvq__table_open(member->client, handle, POOL_AT, &memory, text);
    if (rc < 0)
        free_page(map->table);
    return rc;
}

static void open_map(struct member *member, uint64_t handle, struct mapping *map)
{
    assert_int_equal(try_map(member, handle, map, PAGES), 0);
    assert_int_equal(kit_whole(member, handle, 0, HEADS, DIM), 0);
    map_extents(map);
}

static void close_map(struct mapping *map)
{
    uint64_t gone = kit.tables_gone;
    assert_int_equal(kvq__table_close(map->member->client, map->handle, NULL), 0);
    assert_int_equal(kit.tables_gone, gone + 1);
    free_page(map->table);
}

static const struct kvq_table_page *head_of(const struct mapping *map)
{
    return (const struct kvq_table_page *)(const void *)map->table;
}

static const struct kvq_table_layer *layer_of(const struct mapping *map, uint32_t layer)
{
    return (const void *)(map->table + sizeof(struct kvq_table_page) +
                          layer * kvq_table_layer_bytes(PAGES));
}

static uint8_t *at(const struct mapping *map, uint64_t address)
{
    uint64_t offset = address - POOL_AT;
    if (!address)
        return NULL;
    assert_true(offset / UNIT < 256 && map->extents[offset / UNIT]);
    return map->extents[offset / UNIT] + offset % UNIT;
}

// As an engine would on its own stream.
static void attend_on_gpu(const struct kvq_attend *call, const struct kvq_page *pages)
{
    const struct kvq_gpu_driver *d = kvq__gpu_driver(pool()->gpu);
    uint8_t *memory = sim_gpus()->memory_new(MIB), *batch = memory + MIB / 2;
    struct kvq_gpu_attend_limits needs;
    struct kvq_attend own = *call;
    char text[KVQ_GPU_TEXT];
    memset(memory, 0, MIB);
    own.pages = memcpy(memory, pages, call->n_pages * sizeof *pages);
    own.out = memory + MIB / 4;
    own.lse = (float *)(void *)(memory + MIB / 4 + 4 * DIM * sizeof(float));
    own.pool = NULL;
    struct kvq_gpu_layer layer = {.format = call->format, .shape = call->shape};
    assert_int_equal(kvq__gpu_enter(pool()->gpu), 0);
    assert_int_equal(kvq_gpu_attend_needs(&layer, &own, NULL, 1, &needs, text, sizeof text), 0);
    assert_true(kvq_gpu_attend_batch_bytes(&needs) <= MIB / 4);
    assert_true(kvq_gpu_attend_workspace_bytes(&layer, &needs) <= MIB / 4);
    assert_int_equal(kvq_gpu_attend_fill(&layer, &own, NULL, 1, &needs, batch, text, sizeof text),
                     0);
    struct kvq_gpu_attend_launch l = {.layer = layer,
                                      .limits = needs,
                                      .batch = (uintptr_t)batch,
                                      .workspace = (uintptr_t)(memory + 3 * (MIB / 4))};
    assert_int_equal(kvq_gpu_attend(kvq__gpu_kernels(pool()->gpu), &l, text, sizeof text), 0);
    assert_int_equal(d->stream_sync(NULL), 0);
    memcpy(call->out, own.out, 4 * DIM * sizeof(float));
    memcpy(call->lse, own.lse, 4 * sizeof(float));
    sim_gpus()->memory_free(memory);
}

static void attend_on_host(const struct kvq_attend *call)
{
    struct kvq_attend_job job = {.call = *call};
    kvq_attend_plan(kit.core->config.kernels, &job.call, 1, &job.plan);
    for (uint32_t i = 0; i < job.plan.items; i++)
        kvq_attend_item(kit.core->config.kernels, &job, i, kit.workspace);
}

// One query over the table and `fresh` tokens that only the client has, of rows from `tokens` on.
static void attend_here(const struct mapping *map, uint32_t layer, uint32_t fresh, float *out,
                        float *lse)
{
    const struct kvq__session *s = kit_of(map->member, map->handle);
    const struct kvq__layer *l = &s->layers[layer], *own = &s->layers[l->source];
    const struct kvq_table_layer *t = layer_of(map, l->source);
    const struct kvq_table_entry *e = (const void *)(t + 1);
    uint64_t past = head_of(map)->tokens;
    struct kvq_page pages[PAGES];
    for (uint32_t i = 0; i < t->n_pages; i++)
        pages[i] = (struct kvq_page){at(map, e[i].packed), at(map, e[i].raw), e[i].tokens,
                                     e[i].packed_tokens};
    size_t row = HEADS * DIM * 4;
    struct kvq_attend a = {
        .format = l->format,
        .shape = &l->shape,
        .pages = pages,
        .n_pages = t->n_pages,
        .path = s->path,
        .extras = at(map, t->extras),
        .pool = t->outliers,
        .book = &own->book,
        .past_tokens = past,
        .step_tokens = fresh,
        .fresh_start = past,
        .fresh_tokens = fresh,
        .fresh_k = {map->member->memory + past * row, (int64_t)row, DIM * 4, KVQ_F32},
        .fresh_v = {map->member->memory + BUFFER / 2 + past * row, (int64_t)row, DIM * 4, KVQ_F32},
        .q_start = past + (fresh ? fresh - 1 : 0),
        .q_tokens = 1,
        .q = {map->member->memory + Q_AT, 4 * DIM * 4, DIM * 4, KVQ_F32},
        .out = out,
        .out_token_stride = 4 * DIM * 4,
        .out_head_stride = DIM * 4,
        .out_dtype = KVQ_F32,
        .lse = lse,
        .lse_token_stride = 16,
    };
    if (pool()->gpu)
        attend_on_gpu(&a, pages);
    else
        attend_on_host(&a);
}

// What memory that a table names holds.
static void look(const struct mapping *map, uint64_t address, uint8_t bytes[64])
{
    uint8_t *from = at(map, address);
    if (pool()->gpu)
        assert_int_equal(kvq__gpu_take(pool()->gpu, bytes, (uintptr_t)from, 64), 0);
    else
        memcpy(bytes, from, 64);
}

// The same by requests, in a step that is then aborted.
static void attend_there(uint64_t handle, uint32_t layer, uint32_t fresh, float *out, float *lse)
{
    const struct kvq__session *s = kit_of(&m, handle);
    struct kvq_entry_wire e = {.handle = handle,
                               .position = s->tokens,
                               .row = (uint32_t)s->tokens,
                               .append = fresh,
                               .queries = 1};
    uint32_t own = s->layers[layer].source;
    if (fresh)
        assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 5, e, NULL), 0);
    for (uint32_t l = own; l <= layer; l += layer > own ? layer - own : 1) {
        bool append = fresh && l == own, attend = l == layer;
        struct kvq_request r = kit_header(!append  ? KVQ_OP_ATTEND
                                          : attend ? KVQ_OP_APPEND_ATTEND
                                                   : KVQ_OP_APPEND,
                                          1);
        r.step = fresh ? 5 : 0;
        r.layer = l;
        if (append) {
            r.k = kit_view(&m, 0, HEADS, DIM, KVQ_F32);
            r.v = kit_view(&m, BUFFER / 2, HEADS, DIM, KVQ_F32);
        }
        r.q = kit_view(&m, Q_AT, 4, DIM, KVQ_F32);
        r.out = kit_view(&m, OUT_AT, 4, DIM, KVQ_F32);
        r.lse = (struct kvq_wire_view){LSE_AT, 16, 4, m.buffer, KVQ_F32, {0}};
        assert_int_equal(kit_ask(&m, &r, &e), 0);
    }
    memcpy(out, m.memory + OUT_AT, 4 * DIM * sizeof *out);
    memcpy(lse, m.memory + LSE_AT, 4 * sizeof *lse);
    if (fresh)
        assert_int_equal(kit_simple(&m, KVQ_OP_STEP_ABORT, 5, e, NULL), 0);
}

static void compare(const struct mapping *map, uint64_t twin, uint32_t fresh)
{
    float here[4 * DIM], there[4 * DIM], lse_here[4], lse_there[4];
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        if (kit_chance(&kit, fewer(0, 60)))
            continue;
        attend_here(map, layer, fresh, here, lse_here);
        attend_there(twin, layer, fresh, there, lse_there);
        assert_memory_equal(here, there, sizeof here);
        assert_memory_equal(lse_here, lse_there, sizeof lse_here);
    }
}

// ---- Tests ----

KIT_TEST(test_same_as_layer_by_layer)
{
    struct mapping map;
    uint64_t one = open_named(&m, "one", 3, 0), twin = open_named(&m, "twin", 3, 0);
    open_map(&m, one, &map);
    uint32_t step = 300;
    while (kit_of(&m, one)->tokens + step < fewer(TOKENS, 560) - 8) {
        assert_int_equal(kit_whole(&m, one, step, HEADS, DIM), 0);
        assert_int_equal(kit_step(&m, twin, step, HEADS, DIM), 0);
        assert_int_equal(kvq__queue_results(m.queue)[0].value, kit_of(&m, one)->tokens);
        assert_int_equal(kit_of(&m, one)->tokens, kit_of(&m, twin)->tokens);
        assert_int_equal(head_of(&map)->tokens, kit_of(&m, one)->tokens);
        map_extents(&map);
        compare(&map, twin, 1 + kit_below(&kit, 4));
        compare(&map, twin, 0);
        if (kit_chance(&kit, 20))
            kit_pack(&kit);
        step = kit_chance(&kit, fewer(10, 100)) ? 150 : 1 + kit_below(&kit, 40);
    }
    core_check(kit.core);
    close_map(&map);
}

KIT_TEST(test_back_and_forth)
{
    struct mapping map;
    uint64_t one = open_named(&m, "one", 40, 0), twin = open_named(&m, "twin", 40, 0);
    open_map(&m, one, &map);
    for (uint32_t i = 0; i < fewer(40, 4); i++) {
        uint32_t n = 20 + kit_below(&kit, 20), back = kit_below(&kit, n);
        assert_int_equal(kit_whole(&m, one, n, HEADS, DIM), 0);
        assert_int_equal(kit_step(&m, twin, n, HEADS, DIM), 0);
        assert_int_equal(kit_truncate(&m, one, back), 0);
        assert_int_equal(kit_truncate(&m, twin, back), 0);
        assert_int_equal(kit_whole(&m, one, 0, HEADS, DIM), 0);
        map_extents(&map);
        compare(&map, twin, 2);
        core_check(kit.core);
    }
    close_map(&map);
}

static int setup_growing(void **state)
{
    kit_extents(4 * MIB);
    int rc = setup(state);
    kit_extents(2 * MIB);
    return rc;
}

// Extents of several units each have all of their numbers' places.
TEST_BETWEEN(test_large_extents, setup_growing, kit_teardown)
{
    struct mapping map;
    if (pool()->gpu) // whose extents have one size
        skip();
    pool()->sizes[0].most = 1; // so that a larger one comes in a pool as small as this
    uint64_t one = open_named(&m, "one", 3, 0), twin = open_named(&m, "twin", 3, 0);
    open_map(&m, one, &map);
    while (kit_of(&m, one)->tokens + 300 < TOKENS) {
        assert_int_equal(kit_whole(&m, one, 300, HEADS, DIM), 0);
        assert_int_equal(kit_step(&m, twin, 300, HEADS, DIM), 0);
        map_extents(&map);
        compare(&map, twin, 1);
    }
    const struct kvq__extent *e;
    uint32_t seen[2] = {0};
    TAILQ_FOREACH (e, &kit_of(&m, one)->ns->arenas[0].extents, link)
        seen[e->size - pool()->sizes]++;
    assert_true(seen[0] && seen[1]);
    core_check(kit.core);
    close_map(&map);
}

// What a table names stays as it is, whoever drops the session, and goes when it is closed.
KIT_TEST(test_leases)
{
    const uint32_t n = fewer(700, 300);
    struct mapping map;
    struct member other;
    assert_int_equal(member_open(&kit, &other, 1000, BUFFER), 0);
    uint64_t one = open_named(&m, "one", 0, 0);
    assert_int_equal(kit_whole(&m, one, n, HEADS, DIM), 0);
    open_map(&m, one, &map);
    struct kvq__session copy = *kit_of(&m, one);
    const struct kvq_table_entry *e = (const void *)(layer_of(&map, 0) + 1);
    uint8_t first[64], later[64];
    look(&map, e[0].packed, first);
    assert_int_equal(kvq__session_drop_named(kit.core, &other.client->peer, NULL, "one", text), 0);
    assert_null(kit_of(&m, one));
    core_check(kit.core);
    // Another session takes all there is, but for those blocks.
    member_fill(&other);
    uint64_t next = open_named(&other, "next", 0, 0);
    assert_int_equal(kit_whole(&other, next, n, HEADS, DIM), 0);
    look(&map, e[0].packed, later);
    assert_memory_equal(first, later, sizeof first);
    assert_int_equal(copy.tokens, n);
    const uint64_t *used = &copy.ns->used[kvq__pool_limit(copy.pool)], before = *used;
    close_map(&map);
    assert_true(*used < before);
}

// Others see tokens where they are, so they are not taken back under their eyes.
KIT_TEST(test_readers)
{
    struct mapping mine, theirs;
    struct member reader;
    float before[4 * DIM], after[4 * DIM], lse[4];
    assert_int_equal(member_open(&kit, &reader, 1000, BUFFER), 0);
    memcpy(reader.memory, m.memory, BUFFER);
    uint64_t one = open_named(&m, "one", 64, 0);
    assert_int_equal(kit_whole(&m, one, 200, HEADS, DIM), 0);
    uint64_t seen = open_named(&reader, "one", 64, KVQ__OPEN_READ_ONLY | KVQ__OPEN_MUST_EXIST);
    open_map(&m, one, &mine);
    open_map(&reader, seen, &theirs);
    assert_int_equal(head_of(&theirs)->tokens, 200);
    attend_here(&theirs, 0, 0, before, lse);
    assert_int_equal(kit_whole(&reader, seen, 1, HEADS, DIM), KVQ_E_READ_ONLY);
    assert_int_equal(kit_truncate(&m, one, 10), KVQ_E_BUSY);
    assert_int_equal(kit_whole(&m, one, 30, HEADS, DIM), 0); // what was there stays
    assert_int_equal(kit_truncate(&m, one, 10), 0);
    assert_int_equal(head_of(&theirs)->tokens, 200);
    attend_here(&theirs, 0, 0, after, lse);
    assert_memory_equal(before, after, sizeof before);
    assert_int_equal(kit_whole(&reader, seen, 0, HEADS, DIM), 0);
    assert_int_equal(head_of(&theirs)->tokens, 220);
    close_map(&mine);
    close_map(&theirs);
}

// Another handle of the writer's own client is another reader as well: two threads have them.
KIT_TEST(test_own_reader)
{
    struct mapping map;
    uint64_t one = open_named(&m, "one", 64, 0);
    assert_int_equal(kit_whole(&m, one, 200, HEADS, DIM), 0);
    uint64_t seen = open_named(&m, "one", 64, KVQ__OPEN_READ_ONLY | KVQ__OPEN_MUST_EXIST);
    open_map(&m, seen, &map);
    assert_int_equal(kit_truncate(&m, one, 10), KVQ_E_BUSY);
    close_map(&map);
    assert_int_equal(kit_truncate(&m, one, 10), 0);
}

// The writer goes on while a reader's request packs, so far that more is due to be packed, and that
// the table has no room for it: the table shows what the request has packed for, and no more, and
// what that reads stays there.
KIT_TEST(test_overtaken)
{
    struct mapping theirs;
    struct member reader;
    if (pool()->gpu) // there all of the request's work is enqueued when it begins
        return;
    assert_int_equal(member_open(&kit, &reader, 1000, BUFFER), 0);
    uint64_t one = open_named(&m, "one", 0, 0);
    assert_int_equal(kit_step(&m, one, 250, HEADS, DIM), 0);
    uint64_t seen = open_named(&reader, "one", 0, KVQ__OPEN_READ_ONLY | KVQ__OPEN_MUST_EXIST);
    assert_int_equal(try_map(&reader, seen, &theirs, 2), 0);
    struct kvq_request r = kit_header(KVQ_OP_STEP, 1);
    struct kvq_entry_wire e = {.handle = seen, .position = 250};
    r.layer = LAYERS;
    r.slots = (uint16_t)kvq_request_slots(r.count, r.layer);
    memset(reader.layers, 0, sizeof reader.layers);
    kit_load(&reader, &r, &e);
    assert_int_equal(kvq__request_start(reader.queue), KVQ__RUN);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(kit_step(&m, one, 100, HEADS, DIM), 0);
        kit_pack(&kit);
    }
    assert_int_equal(kit_go_on(&reader, KVQ__RUN), 0);
    assert_int_equal(kvq__queue_results(reader.queue)[0].status, 0);
    assert_int_equal(kvq__queue_results(reader.queue)[0].value, 250);
    assert_int_equal(head_of(&theirs)->tokens, 250);
    core_check(kit.core);
    close_map(&theirs);
}

static int begin_long(struct member *member, uint64_t handle, uint64_t step)
{
    struct kvq_entry_wire e = {.handle = handle, .append = 4000};
    return kit_simple(member, KVQ_OP_STEP_BEGIN, step, e, NULL);
}

// An extent that a client was told of is never another namespace's; when nobody is left to look,
// its memory makes room for others.
KIT_TEST(test_extents_stay)
{
    struct member stranger;
    struct mapping map;
    kit_close(&kit);
    kit_open(&kit, 12, 32 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    uint64_t one = open_named(&m, "one", 0, 0);
    assert_int_equal(kit_whole(&m, one, 300, HEADS, DIM), 0);
    open_map(&m, one, &map);
    close_map(&map);
    assert_int_equal(kvq__session_drop_named(kit.core, &m.client->peer, NULL, "one", text), 0);
    kit.now += 3600u * 1000000000ull; // long empty
    kvq__core_clock(kit.core, kit.now);
    kvq__core_tick(kit.core);
    uint64_t taken = pool()->extents_taken, budget = pool()->budget;
    assert_true(taken > 0); // kept for who may have it mapped
    assert_int_equal(member_open(&kit, &stranger, 1001, BUFFER), 0);
    uint64_t next = open_raw(&stranger), step = 1;
    while (begin_long(&stranger, next, step++) == 0) // which takes the memory of its tokens
        next = open_raw(&stranger);
    assert_int_equal(pool()->extents_taken, budget);
    const struct kvq__extent *e;
    uint32_t theirs = 0;
    const struct kvq__namespace *ns = kit_of(&stranger, next)->ns;
    TAILQ_FOREACH (e, &ns->arenas[pool() - kit.core->pools].extents, link) {
        assert_false(e->exported);
        theirs++;
    }
    assert_true(theirs > 0 && theirs * 2 * MIB + taken <= budget);
    kvq__client_detach(m.client);
    kvq__queue_close(&m.queue);
    member_free(&m);
    assert_int_equal(kit_whole(&stranger, next, 1000, HEADS, DIM), 0);
}

KIT_TEST(test_refusals)
{
    struct mapping map;
    uint64_t one = open_named(&m, "one", 0, 0);
    assert_int_equal(kit_whole(&m, one, 100, HEADS, DIM), 0);
    assert_int_equal(try_map(&m, one, &map, 0), KVQ_E_LIMIT);
    assert_int_equal(try_map(&m, one + 1, &map, PAGES), KVQ_E_STALE);
    open_map(&m, one, &map);
    struct mapping again;
    assert_int_equal(try_map(&m, one, &again, PAGES), KVQ_E_EXISTS);
    float *k = (float *)(void *)m.memory, value = k[100 * HEADS * DIM];
    k[100 * HEADS * DIM] = (float)INFINITY;
    assert_int_equal(kit_whole(&m, one, 5, HEADS, DIM), KVQ_E_NONFINITE);
    k[100 * HEADS * DIM] = value;
    assert_int_equal(kit_of(&m, one)->tokens, 100);
    assert_int_equal(head_of(&map)->tokens, 100);
    assert_null(kit_of(&m, one)->step);
    struct kvq_request r = kit_header(KVQ_OP_STEP, 1);
    struct kvq_entry_wire e = {.handle = one, .position = 100, .row = 100, .append = 1};
    r.layer = LAYERS - 1;
    r.slots = (uint16_t)kvq_request_slots(r.count, r.layer);
    assert_int_equal(kit_request(&m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, KVQ_E_SHAPE);
    r.layer++;
    r.slots++;
    m.layers[1] = (struct kvq_step_layer){0}; // one that is needed
    assert_int_equal(kit_request(&m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, KVQ_E_INCOMPLETE);
    e.position = 99;
    assert_int_equal(kit_request(&m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, KVQ_E_POSITION);
    assert_int_equal(kvq__queue_results(m.queue)[0].value, 100);
    r.slots--;
    assert_int_equal(kit_request(&m, &r, &e), KVQ_E_PROTOCOL);
    close_map(&map);
    assert_int_equal(try_map(&m, one, &map, 1), 0);
    assert_int_equal(kit_whole(&m, one, 29, HEADS, DIM), KVQ_E_LIMIT); // 129 tokens, one page
    assert_int_equal(kit_whole(&m, one, 28, HEADS, DIM), 0);
    close_map(&map);
}

// A session that stands in two entries, with units that are due: one entry is refused, so that
// nothing is published before it is packed.
KIT_TEST(test_twice)
{
    struct mapping map;
    uint64_t one = open_named(&m, "one", 0, 0);
    assert_int_equal(kit_step(&m, one, 300, HEADS, DIM), 0); // not packed yet
    open_map(&m, one, &map);
    for (uint32_t swapped = 0; swapped < 2; swapped++) {
        uint64_t past = kit_of(&m, one)->tokens;
        struct kvq_entry_wire e[2] = {
            {.handle = one, .position = past, .row = (uint32_t)past, .append = swapped ? 128 : 0},
            {.handle = one, .position = past, .row = (uint32_t)past, .append = swapped ? 0 : 128}};
        struct kvq_request r = kit_header(KVQ_OP_STEP, 2);
        r.layer = LAYERS;
        r.slots = (uint16_t)(r.slots + LAYERS);
        for (uint32_t i = 0; i < LAYERS; i++)
            m.layers[i] = (struct kvq_step_layer){
                kit_view(&m, 0, rows[i].kv_from < 0 ? HEADS : 0, DIM, KVQ_F32),
                kit_view(&m, m.bytes / 2, rows[i].kv_from < 0 ? HEADS : 0, DIM, KVQ_F32)};
        m.layers[2] = (struct kvq_step_layer){0};
        assert_int_equal(kit_request(&m, &r, e), 0);
        assert_int_equal(kvq__queue_results(m.queue)[swapped].status, KVQ_E_BUSY);
        assert_int_equal(kvq__queue_results(m.queue)[!swapped].status, 0);
        assert_int_equal(kit_of(&m, one)->tokens, past + 128);
        core_check(kit.core);
    }
    close_map(&map);
}

// Of entries that only publish one session the first one does, unless another entry appends to it.
KIT_TEST(test_published_twice)
{
    uint64_t one = open_named(&m, "one", 0, 0), two = open_named(&m, "two", 0, 0);
    struct kvq_entry_wire e[5] = {
        {.handle = two}, {.handle = one}, {.handle = one}, {.handle = two}, {.handle = one}};
    struct kvq_request r = kit_header(KVQ_OP_STEP, 5);
    r.layer = LAYERS;
    r.slots = (uint16_t)kvq_request_slots(5, LAYERS);
    memset(m.layers, 0, sizeof m.layers);
    assert_int_equal(kit_request(&m, &r, e), 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(kvq__queue_results(m.queue)[i].status, i < 2 ? 0 : KVQ_E_BUSY);
    e[4].handle = two;
    assert_int_equal(kit_request(&m, &r, e), 0); // and again
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(kvq__queue_results(m.queue)[i].status, i < 2 ? 0 : KVQ_E_BUSY);
}

// A page table counts for the session's namespace, up to its limit.
KIT_TEST(test_counts)
{
    struct mapping map;
    uint64_t one = open_named(&m, "one", 0, 0);
    const struct kvq__namespace *ns = kit_of(&m, one)->ns;
    uint64_t before = ns->used[KVQ__TABLE_BYTES];
    assert_int_equal(try_map(&m, one, &map, PAGES), 0);
    uint64_t with = ns->used[KVQ__TABLE_BYTES];
    assert_true(with - before >= (uint64_t)PAGES * sizeof(struct kvq__pageref));
    close_map(&map);
    assert_int_equal(ns->used[KVQ__TABLE_BYTES], before);
    kit_limit(&kit, ns->name, KVQ__TABLE_BYTES, with - 1);
    assert_int_equal(try_map(&m, one, &map, PAGES), KVQ_E_QUOTA);
    assert_int_equal(ns->used[KVQ__TABLE_BYTES], before);
}

// All of it or nothing, also where memory ends in the middle.
KIT_TEST(test_no_room)
{
    uint64_t one = open_named(&m, "one", 0, 0), good = 0;
    struct mapping map;
    open_map(&m, one, &map);
    kit.fail_one_in = 3;
    for (uint32_t i = 0; i < fewer(200, 80) && kit_of(&m, one)->tokens < TOKENS - 40; i++) {
        uint64_t before = kit_of(&m, one)->tokens;
        int rc = kit_whole(&m, one, 20, HEADS, DIM);
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        assert_int_equal(kit_of(&m, one)->tokens, before + (rc ? 0 : 20));
        good += rc == 0;
        core_check(kit.core);
    }
    kit.fail_one_in = 0;
    assert_true(good > 10);
    close_map(&map);
}

int main(void)
{
    kit_gpus(sim_gpus());
    return run_all(NULL, NULL);
}
