// SPDX-License-Identifier: Apache-2.0
//
// Sessions that are saved with one number of shards and opened with another: to the bit as if they
// had always had that number, for every format that knows its heads one by one; the others, and
// what does not fit together, are refused.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/park.h"
#include "daemon/saved_internal.h"
#include "tests/vault.h"

enum {
    HEADS = 8, // of all shards
    RATIO = 2,
    DIM = 64,
    LAYERS = 3,
    QUERIES = 3,
    MIB = 1 << 20,
    BUFFER = 8 * MIB,
    ROWS = 1700,
    Q_AT = BUFFER / 2 - 128 * 1024,
    OUT_AT = Q_AT + 64 * 1024,
    OUT_BYTES = QUERIES * RATIO * HEADS * DIM * 4,
};
static_assert(ROWS * HEADS * DIM * 4 < Q_AT, "K ends before the queries");

static struct kit kit;
static struct member m;
static struct vault vault;
static char text[KVQ_TEXT_BYTES];
static const struct kvq__peer admin = {.admin = true};

// One session with all its shards, by KV heads or by layers.
struct set {
    char name[32];
    uint32_t shards, layers; // of each
    uint32_t heads;          // of each
    uint64_t handles[HEADS];
    bool stages; // shards are layers
};

static int setup(void **state)
{
    (void)state;
    kit_open(&kit, 11, 256 * MIB, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    float *memory = (float *)(void *)m.memory;
    for (uint32_t i = 0; i < BUFFER / sizeof *memory; i++)
        memory[i] = kit_float(&kit);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    core_check(kit.core);
    member_close(&m);
    kit_close(&kit);
    vault_close(&vault);
    return 0;
}

// ---- Sets ----

static const char *format = "oscar2";
static uint32_t rollback;

// Layer 1 has a window, layer 2 reads layer 0 if shards are heads.
static void set_rows(const struct set *s, struct kvq__layer_row *rows)
{
    for (uint32_t i = 0; i < s->layers; i++) {
        rows[i] = (struct kvq__layer_row){.q_heads = (uint16_t)(RATIO * s->heads),
                                          .kv_heads = (uint16_t)s->heads,
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

static int open_shard(struct set *s, uint32_t i, uint32_t flags)
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
    set_rows(s, rows);
    int rc = kvq__session_open(m.client, &spec, &info, text);
    s->handles[i] = rc ? 0 : info.handle;
    return rc;
}

static void open_all(struct set *s)
{
    for (uint32_t i = 0; i < s->shards; i++)
        if (open_shard(s, i, 0))
            fail_msg("%s, shard %u of %u: %s", format, i, s->shards, text);
}

static struct set by_heads(const char *name, uint32_t shards)
{
    struct set s = {.shards = shards, .layers = LAYERS, .heads = HEADS / shards};
    snprintf(s.name, sizeof s.name, "%s", name);
    return s;
}

static struct set by_layers(const char *name, uint32_t shards)
{
    struct set s = {.shards = shards, .layers = HEADS / shards, .heads = 2, .stages = true};
    snprintf(s.name, sizeof s.name, "%s", name);
    return s;
}

static const struct kvq__session *shard_of(const struct set *s, uint32_t i)
{
    return kit_of(&m, s->handles[i]);
}

static uint64_t tokens_of(const struct set *s)
{
    return shard_of(s, 0)->tokens;
}

static void drop(const struct set *s)
{
    assert_int_equal(kvq__session_drop(m.client, s->handles[0], text), 0);
}

// ---- Steps ----

// Where a shard's part of a tensor of all heads starts. Stages have the heads that their layer is.
static uint64_t part_at(const struct set *s, uint32_t shard, uint32_t layer, uint32_t ratio)
{
    uint32_t first = s->stages ? (shard * s->layers + layer) % 4 : shard * s->heads;
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
    assert_int_equal(kit_request(&m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
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

static void feed(const struct set *s, uint64_t to)
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

static void truncate_by(const struct set *s, uint32_t n)
{
    for (uint32_t i = 0; i < s->shards; i++) {
        struct kvq_entry_wire e = {
            .handle = s->handles[i], .position = shard_of(s, i)->tokens, .list_token = n};
        assert_int_equal(kit_simple(&m, KVQ_OP_TRUNCATE, 0, e, NULL), 0);
    }
}

static void attend_shard(const struct set *s, uint32_t shard, uint32_t layer, uint64_t out_at)
{
    struct kvq_request r = kit_header(KVQ_OP_ATTEND, 1);
    struct kvq_entry_wire e = {
        .handle = s->handles[shard], .position = tokens_of(s), .queries = QUERIES};
    uint64_t at = part_at(s, shard, layer, RATIO);
    r.layer = layer;
    r.q = kit_view(&m, Q_AT + at, RATIO * HEADS, DIM, KVQ_F32);
    r.out = kit_view(&m, out_at + at, RATIO * HEADS, DIM, KVQ_F32);
    assert_int_equal(kit_request(&m, &r, &e), 0);
    assert_int_equal(kvq__queue_results(m.queue)[0].status, 0);
}

// All heads of layer i of the model.
static void attend(const struct set *s, uint32_t i, uint8_t out[OUT_BYTES])
{
    memset(m.memory + OUT_AT, 0, OUT_BYTES);
    if (s->stages)
        attend_shard(s, i / s->layers, i % s->layers, OUT_AT);
    for (uint32_t shard = 0; shard < s->shards && !s->stages; shard++)
        attend_shard(s, shard, i, OUT_AT);
    memcpy(out, m.memory + OUT_AT, OUT_BYTES);
}

static void same_bits(const struct set *a, const struct set *b)
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

// The same is packed, and kept, to the byte.
static void same_blocks(const struct set *a, const struct set *b)
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
                assert_memory_equal(x->pages[p].packed.data, y->pages[p].packed.data,
                                    x->packed_bytes);
        }
}

// ---- Saving and restoring ----

static void save(const struct set *s)
{
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = s->name};
    int rc;
    while ((rc = vault_save(&vault, kit.core, &spec, NULL)) == 1)
        kit_pack(&kit);
    assert_int_equal(rc, 0);
}

static int restore_shard(const struct set *s, uint32_t i, uint64_t good)
{
    const struct kvq__reshard_as as = {i, s->shards, s->layers};
    text[0] = 0;
    int rc = vault_reshard(&vault, kit.core, s->name, &as, good, text);
    core_check(kit.core);
    assert_true(rc == 0 || text[0]);
    return rc;
}

static void restore(struct set *s, uint64_t good)
{
    for (uint32_t i = 0; i < s->shards; i++)
        if (restore_shard(s, i, good))
            fail_msg("%s, shard %u of %u: %s", format, i, s->shards, text);
    open_all(s);
}

static void go_on_alike(const struct set *a, const struct set *b)
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
    same_bits(a, b);
    same_blocks(a, b);
    same_bits(a, b);
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
    open_all(&a);
    open_all(&b);
    feed(&a, tokens);
    feed(&b, tokens);
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

static bool full(void)
{
    return getenv("KVQ_FULL") != NULL;
}

static bool is_dealt(const struct kvq_format *f)
{
    return f->k.codec != KVQ_CODEC_BOOK && f->v.codec != KVQ_CODEC_BOOK &&
           f->k_token_scale != KVQ_SCALE_L2_CROSS;
}

// The same as the row before, but for its bits.
static bool is_like_last(const struct kvq_format *f)
{
    size_t n = strcspn(f->name, "0123456789");
    return f > kvq_formats && strncmp(f[-1].name, f->name, n) == 0 && f->name[n] &&
           strcmp(f[-1].name + n + 1, f->name + n + 1) == 0;
}

// Those of the table have no outliers in a model's first layers; these have.
#define OUTLIERS "kivi2:outliers=3:displaced=32:recent=32"

static void test_all_formats(void **state)
{
    static const uint64_t counts[] = {40, 513, 300, 640};
    uint32_t n = 0;
    (void)state;
    for (const struct kvq_format *f = kvq_formats; f->name[0]; f++) {
        if (!is_dealt(f) || (!full() && is_like_last(f)))
            continue;
        format = f->outliers ? OUTLIERS : f->name;
        rollback = n % 2 ? 11 : 0;
        check(false, counts[n % 4], pairs[n % PAIRS][0], pairs[n % PAIRS][1]);
        n++;
    }
    assert_true(n > 10);
}

// Of each kind of format, every number to every other; without KVQ_FULL some of them.
static void test_all_numbers(void **state)
{
    static const char *const kinds[] = {"f16", "kivi-sink2", OUTLIERS, "innerq-hybrid"};
    (void)state;
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t p = 0; p < PAIRS; p++) {
            if (!full() && p % 4 != i)
                continue;
            format = kinds[i];
            rollback = p % 3 * 20;
            check(false, 500 + 13 * p, pairs[p][0], pairs[p][1]);
            check_back(false, pairs[p][0]);
        }
}

static void test_stages(void **state)
{
    static const char *const kinds[] = {"f16", "oscar2-xh", "quarot4", "innerq-hybrid"};
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        format = kinds[i];
        rollback = i * 7;
        check(true, 400, pairs[i][0], pairs[i][1]);
        check_back(true, pairs[i][0]);
    }
}

// Stages' blocks stay as they are, so that they need not be written anew.
static void test_stages_keep_blocks(void **state)
{
    struct set a = by_layers("it", 4);
    (void)state;
    format = "oscar2";
    rollback = 0;
    open_all(&a);
    feed(&a, 1000);
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
    open_all(&a);
    open_all(&b);
    feed(&a, 800);
    feed(&b, 800);
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

static void test_packed_differently(void **state)
{
    static const char *const kinds[] = {"oscar2", OUTLIERS, "kivi2",
                                        "kivi4:outliers=5:unit=32:recent=128", "innerq-base"};
    (void)state;
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
    open_all(&a);
    open_all(&b);
    feed(&a, 1100);
    feed(&b, 1100);
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

static void test_cut(void **state)
{
    static const char *const kinds[] = {"f16", "oscar2", OUTLIERS, "kivi-sink2", "innerq-small"};
    (void)state;
    for (uint32_t i = 0; i < 5; i++) {
        format = kinds[i];
        rollback = i % 2 ? 0 : 5;
        check_cut(896);
        check_cut(100);
    }
}

static void refused(const struct set *s, uint32_t shard, int rc, const char *why)
{
    assert_int_equal(restore_shard(s, shard, UINT64_MAX), rc);
    if (!strstr(text, why))
        fail_msg("\"%s\" does not say \"%s\"", text, why);
}

static void prepare(const char *name, uint32_t shards)
{
    struct set a = by_heads("it", shards);
    format = name;
    rollback = 0;
    open_all(&a);
    feed(&a, 600);
    save(&a);
    drop(&a);
}

static void test_refusals(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        static const char *const crosses[] = {"oscar2-xh", "oscar4-xh", "quarot4-xh"};
        prepare(i < 2 ? crosses[i] : "oscar2-xh", 2);
        struct set one = by_heads("it", 1);
        refused(&one, 0, KVQ_E_EXISTS, crosses[i < 2 ? i : 0]);
        refused(&one, 0, KVQ_E_EXISTS, "open it with 2");
    }
    prepare("oscar2", 2);
    struct set three = by_heads("it", 3), wrong = by_heads("it", 4), many = by_heads("it", 16);
    refused(&three, 1, KVQ_E_EXISTS, "layer 0 has 8 KV heads in all");
    refused(&many, 1, KVQ_E_EXISTS, "layer 0 has 8 KV heads in all");
    wrong.layers = 5;
    refused(&wrong, 0, KVQ_E_EXISTS, "5 layers are asked for");
    struct kvq__saved *saved = &vault_find(&vault, "it", 1)->saved;
    struct set four = by_heads("it", 4);
    snprintf(saved->layers[1].format.name, KVQ_FORMAT_NAME, "vecinfer-k4b8v4b8@book");
    refused(&four, 2, KVQ_E_EXISTS, "layer 1 is another one in shard 1");
    struct kvq__saved *first = &vault_find(&vault, "it", 0)->saved;
    for (int i = 0; i < 2; i++) {
        struct kvq_format *f = &(i ? first : saved)->layers[1].format;
        f->k.codec = f->v.codec = KVQ_CODEC_BOOK;
        snprintf(f->name, KVQ_FORMAT_NAME, "vecinfer-k4b8v4b8@book");
    }
    refused(&four, 2, KVQ_E_EXISTS, "vecinfer-k4b8v4b8@book of layer 1 has a codebook");
}

static void prepare_stages(const char *name)
{
    struct set a = by_layers("it", 4);
    format = name;
    rollback = 0;
    open_all(&a);
    feed(&a, 300);
    save(&a);
    drop(&a);
}

static void test_refusals_of_stages(void **state)
{
    struct set two = by_layers("it", 2), eight = by_layers("it", 8);
    (void)state;
    prepare_stages("ott2");
    refused(&two, 1, KVQ_E_EXISTS, "is another one for a shard's first layers");
    prepare_stages("oscar2");
    struct kvq__saved *saved = &vault_find(&vault, "it", 1)->saved;
    saved->layers[1].row.kv_from = 0;
    refused(&eight, 3, KVQ_E_EXISTS, "layer 1 of shard 1 reads the cache of a layer that would");
    saved->layers[1].row.kv_from = -1;
    saved->layers[1].format.v.codec = KVQ_CODEC_BOOK;
    refused(&two, 0, KVQ_E_EXISTS, "layer 1 of shard 1 has a codebook");
    struct set three = by_layers("it", 2);
    three.shards = 3;
    refused(&three, 0, KVQ_E_EXISTS, "equal part of the 8 of all");
}

static void test_what_does_not_fit(void **state)
{
    (void)state;
    prepare("oscar2", 2);
    struct vault_session *one = vault_find(&vault, "it", 1);
    struct set four = by_heads("it", 4), all = by_heads("it", 1);
    one->saved.tokens++;
    refused(&four, 2, KVQ_E_DAMAGED, "number of tokens");
    one->saved.tokens--;
    one->saved.floor--;
    refused(&four, 2, KVQ_E_DAMAGED, "can go back to");
    one->saved.floor++;
    one->saved.path ^= 1;
    refused(&four, 2, KVQ_E_DAMAGED, "attention");
    one->saved.path ^= 1;
    one->saved.stamp++;
    refused(&four, 2, KVQ_E_DAMAGED, "save that it is of");
    one->saved.stamp--;
    one->saved.layers[0].base = 128;
    refused(&four, 2, KVQ_E_EXISTS, "only packed");
    one->saved.layers[0].base = 0;
    one->saved.layers[0].packed = 0; // and raw blocks are gone in the other
    refused(&four, 2, KVQ_E_EXISTS, "packed layer 0 to different counts");
    one->saved.layers[0].packed = 512;
    one->parts[3].bytes += 64;
    refused(&all, 0, KVQ_E_DAMAGED, "of other sizes");
    one->parts[3].bytes -= 64;
    struct kvq__part part = one->parts[3];
    one->parts[3] = one->parts[4];
    one->parts[4] = part;
    refused(&four, 2, KVQ_E_DAMAGED, "order of blocks");
    one->parts[4] = one->parts[3];
    one->parts[3] = part;
    one->n--; // the last block of layer 1
    refused(&four, 2, KVQ_E_DAMAGED, "for page");
    one->n++;
    // One gave raw blocks back that the others still have: they are not needed.
    struct kvq__saved *first = &vault_find(&vault, "it", 0)->saved;
    uint32_t page = first->layers[0].raw_page;
    assert_true(page > 0);
    first->layers[0].raw_page = 0;
    restore(&four, UINT64_MAX);
    assert_int_equal(shard_of(&four, 0)->layers[0].raw_page, page);
}

// Whatever stands in a store: refused, or a session that can be used.
static void test_hostile(void **state)
{
    uint32_t refusals = 0, taken = 0;
    (void)state;
    prepare(OUTLIERS, 2);
    struct vault_session *from = vault_find(&vault, "it", 1);
    const struct kvq__saved good = from->saved;
    struct kvq__saved_layer layers[LAYERS];
    memcpy(layers, good.layers, sizeof layers);
    for (uint32_t i = 0; i < 1500; i++) {
        static const uint64_t steps[] = {1, 32, 128, 256, 1u << 31, UINT64_MAX - 5};
        struct kvq__saved_layer *l = &from->saved.layers[kit_below(&kit, LAYERS)];
        uint64_t *numbers[] = {&from->saved.tokens, &from->saved.floor, &l->base, &l->packed,
                               &from->saved.known};
        uint32_t *smalls[] = {&l->first_page, &l->raw_page, &from->saved.max_rollback,
                              &from->saved.n_layers, &from->saved.shards};
        uint16_t *heads[] = {&l->row.kv_heads, &l->row.q_heads, &l->row.k_dim};
        struct kvq__part *part = &from->parts[kit_below(&kit, from->n)], was = *part;
        uint64_t by = steps[kit_below(&kit, 6)];
        if (kit_chance(&kit, 30))
            *numbers[kit_below(&kit, 5)] += kit_chance(&kit, 50) ? by : -by;
        else if (kit_chance(&kit, 40))
            *smalls[kit_below(&kit, 5)] += (uint32_t)(kit_chance(&kit, 50) ? by : -by) % 7;
        else if (kit_chance(&kit, 40))
            *heads[kit_below(&kit, 3)] = (uint16_t)kit_random(&kit);
        else if (kit_chance(&kit, 50))
            l->learned ^= 1;
        else
            part->bytes = kit_chance(&kit, 50) ? by : kit_random(&kit);
        from->saved.n_layers = from->saved.n_layers > LAYERS ? LAYERS : from->saved.n_layers;
        struct set s = by_heads("it", 1u << kit_below(&kit, 4));
        uint32_t shard = kit_below(&kit, s.shards);
        if (s.shards == 2)
            s = by_heads("it", 1);
        int rc = restore_shard(&s, shard % s.shards, kit_below(&kit, 900));
        refusals += rc < 0;
        taken += rc == 0;
        if (rc == 0)
            assert_int_equal(kvq__session_drop_named(kit.core, &admin, "uid-1000", "it", text), 0);
        *part = was;
        from->saved = good;
        memcpy(from->saved.layers, layers, sizeof layers);
    }
    assert_true(refusals > 200 && taken > 20);
}

// A save waits until all shards have packed what is due; else they would part.
static void test_save_waits_for_packing(void **state)
{
    struct set a = by_heads("it", 2);
    struct kvq__save_spec spec = {.ns = "uid-1000", .name = "it"};
    (void)state;
    format = "oscar2";
    rollback = 0;
    open_all(&a);
    feed(&a, 600);
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
static void test_ids(void **state)
{
    struct set a = by_heads("it", 2);
    (void)state;
    format = "oscar2";
    rollback = 0;
    open_all(&a);
    feed(&a, 300);
    for (uint32_t i = 0; i < 2; i++) {
        struct kvq__session *s = (struct kvq__session *)shard_of(&a, i);
        assert_int_equal(kvq__ids_grow(s, 300), 0);
        for (uint32_t k = 0; k < 300; k++)
            s->ids.at[k] = (int32_t)(1000 * i + k);
        s->ids.known = i ? 280 : 140;
    }
    save(&a);
    drop(&a);
    a = by_heads("it", 4);
    restore(&a, UINT64_MAX);
    for (uint32_t i = 0; i < 4; i++) {
        const struct kvq__ids *ids = &shard_of(&a, i)->ids;
        assert_int_equal(ids->known, 280);
        assert_int_equal(ids->at[0], 1000);
        assert_int_equal(ids->at[279], 1279);
    }
    drop(&a);
    a = by_heads("it", 1);
    restore(&a, 250); // cut
    assert_int_equal(shard_of(&a, 0)->ids.known, tokens_of(&a));
}

static void test_no_memory(void **state)
{
    (void)state;
    prepare(OUTLIERS, 2);
    struct set one = by_heads("it", 1);
    for (uint32_t i = 1; i < 40; i++) {
        kit.fail_one_in = i;
        int rc = restore_shard(&one, 0, UINT64_MAX);
        kit.fail_one_in = 0;
        assert_true(rc == 0 || rc == KVQ_E_NO_MEMORY);
        if (rc == 0)
            assert_int_equal(kvq__session_drop_named(kit.core, &admin, "uid-1000", "it", text), 0);
    }
    restore(&one, UINT64_MAX);
}

// In memory with one number: it makes way for another if it is saved, and nobody has it open.
static void test_makes_way(void **state)
{
    struct set a = by_heads("it", 2), four = by_heads("it", 4);
    (void)state;
    format = "oscar2";
    rollback = 0;
    kit.core->config.saves = true;
    open_all(&a);
    feed(&a, 300);
    assert_int_equal(open_shard(&four, 3, 0), KVQ_E_EXISTS);
    assert_non_null(strstr(text, "2 shards, 4 are asked for"));
    assert_non_null(strstr(text, "kvqctl session save"));
    assert_false(kvq__reshard_make_way(kit.core, &admin, "uid-1000", "it", 4)); // open
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kvq__session_close(m.client, a.handles[i], text), 0);
    assert_false(kvq__reshard_make_way(kit.core, &admin, "uid-1000", "it", 4)); // not saved
    save(&a);
    assert_false(kvq__reshard_make_way(kit.core, &admin, "uid-1000", "it", 2)); // it is as asked
    const struct kvq__peer other = {.uid = 2000};
    assert_false(kvq__reshard_make_way(kit.core, &other, "uid-1000", "it", 4));
    assert_int_equal(open_shard(&a, 1, 0), 0);
    assert_false(kvq__reshard_make_way(kit.core, &admin, "uid-1000", "it", 4));
    assert_int_equal(kvq__session_close(m.client, a.handles[1], text), 0);
    assert_int_equal(kit.core->n_sessions, 2);
    assert_true(kvq__reshard_make_way(kit.core, &admin, "uid-1000", "it", 4));
    assert_int_equal(kit.core->n_sessions, 0);
    restore(&four, UINT64_MAX);
    assert_int_equal(tokens_of(&four), 300);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(kvq__session_close(m.client, four.handles[i], text), 0);
    // Parked, it is on disk as it is, and stays there.
    struct set parked = by_heads("parked", 2);
    open_all(&parked);
    feed(&parked, 300);
    kit_pack(&kit);
    assert_int_equal(kvq__park_start(kit_of(&m, parked.handles[0]), KVQ__PARK_ASKED, NULL, text),
                     0);
    vault_serve(&vault, kit.core);
    assert_true(shard_of(&parked, 1)->away);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(kvq__session_close(m.client, parked.handles[i], text), 0);
    assert_true(kvq__reshard_make_way(kit.core, &admin, "uid-1000", "parked", 8));
    vault_serve(&vault, kit.core);
    parked = by_heads("parked", 8);
    restore(&parked, UINT64_MAX);
    // It is not stored like this.
    assert_false(kvq__reshard_make_way(kit.core, &admin, "uid-1000", "it", 2));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_all_formats),
        TEST(test_all_numbers),
        TEST(test_stages),
        TEST(test_stages_keep_blocks),
        TEST(test_packed_differently),
        TEST(test_cut),
        TEST(test_refusals),
        TEST(test_refusals_of_stages),
        TEST(test_what_does_not_fit),
        TEST(test_hostile),
        TEST(test_no_memory),
        TEST(test_save_waits_for_packing),
        TEST(test_ids),
        TEST(test_makes_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
