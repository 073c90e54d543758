// SPDX-License-Identifier: Apache-2.0
//
// Sessions as the control plane sees them: opening, comparing, holds, limits, keeping and
// dropping, and the numbers that are told.
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, BUFFER = 2 * MIB, DIM = 128 };

static struct kit kit;
static struct member m, other; // users 1000 and 1001
static char text[KVQ_TEXT_BYTES];
static struct kvq__session_info info; // of the session that was asked for last

static struct kvq__layer_row row_of(const char *format)
{
    return (struct kvq__layer_row){8, 2, DIM, DIM, .format = format, .kv_from = -1};
}

static void parse(const char *name, const char *as, struct kvq_format *f)
{
    if (kvq_format_parse(name, f, text, sizeof text))
        fail_msg("%s", text);
    snprintf(f->name, sizeof f->name, "%s", as);
}

// "mymix": layer 0 as k8v4, 2 to 4 as kivi2-g64, others 3 bits for K. "part" has layer 1 alone.
static struct kvq__own_format *own_formats(void)
{
    static struct kvq__own_format own[2];
    own[0] = (struct kvq__own_format){.name = "mymix", .has_rest = true, .n_ranges = 2};
    own[1] = (struct kvq__own_format){.name = "part", .n_ranges = 1};
    parse("ott2:k_bits=3", "mymix", &own[0].rest);
    own[0].ranges[1].first = 2, own[0].ranges[1].last = 4;
    own[1].ranges[0].first = own[1].ranges[0].last = 1;
    parse("k8v4", "k8v4", &own[0].ranges[0].row);
    parse("kivi2-g64", "kivi2-g64", &own[0].ranges[1].row);
    parse("vecinfer-2", "vecinfer-2", &own[1].ranges[0].row);
    return own;
}

static int setup(void **state)
{
    static const uint32_t uids[] = {1000, 1001};
    const struct kvq__namespace_config team = {
        .name = "team",
        .quota = {.limit = {[KVQ__HOST_BYTES] = 4 * MIB, [KVQ__SESSIONS] = 2}},
        .uids = uids,
        .n_uids = 2};
    kit_formats(own_formats(), 2);
    kit_open(&kit, 3, 64 * MIB, 0);
    assert_int_equal(kvq__core_namespace(kit.core, &team, text), 0);
    assert_int_equal(kvq__core_namespace(kit.core, &team, text), KVQ_E_EXISTS);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    assert_int_equal(member_open(&kit, &other, 1001, BUFFER), 0);
    return 0;
}

static int open_as(struct member *who, const struct kvq__session_spec *spec,
                   struct kvq__session_info *info)
{
    memset(text, 0, sizeof text);
    int rc = kvq__session_open(who->client, spec, info, text);
    if (rc < 0)
        assert_true(strlen(text) > 20 && strlen(text) < sizeof text - 1); // a sentence, not cut
    return rc;
}

KIT_TEST(test_shapes)
{
    static const struct {
        struct kvq__layer_row row;
        int code;
        const char *says;
    } refused[] = {
        {{8, 2, DIM, DIM, .format = "oscar9", .kv_from = -1},
         KVQ_E_FORMAT,
         "oscar9 is unknown; did you mean 'oscar2'? kvqctl format list shows all"},
        {{8, 2, 272, 272, .kv_from = -1}, KVQ_E_SHAPE, "head_dim 272 is not supported"},
        {{8, 2, DIM, 64, .kv_from = -1}, KVQ_E_SHAPE, "unequal"},
        {{7, 2, DIM, DIM, .kv_from = -1}, KVQ_E_SHAPE, "multiple"},
        {{8, 0, DIM, DIM, .kv_from = -1}, KVQ_E_SHAPE, "at least 1"},
        {{300, 300, DIM, DIM, .kv_from = -1}, KVQ_E_LIMIT, "256"},
        {{8, 2, DIM, DIM, .kv_from = -1, .repeat = UINT32_MAX}, KVQ_E_LIMIT, "256"},
        {{8, 2, DIM, DIM, .kv_from = 5}, KVQ_E_SHAPE, "kv_from"},
        // A raw block of 4 MiB in extents of 2 MiB.
        {{64, 64, DIM, DIM, .kv_from = -1}, KVQ_E_LIMIT, "extent"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const struct kvq__session_spec spec = {
            .layers = &refused[i].row, .n_layers = 1, .format = "oscar2"};
        assert_int_equal(open_as(&m, &spec, &info), refused[i].code);
        assert_says(text, refused[i].says);
    }
    assert_int_equal(kit.core->n_sessions, 0);
}

KIT_TEST(test_numbers_of_spec)
{
    const struct kvq__layer_row row = row_of("f16");
    struct kvq__session_spec good = {.layers = &row, .n_layers = 1};
    char long_name[KVQ_NAME_BYTES + 1] = {0};
    memset(long_name, 'x', KVQ_NAME_BYTES);
    const struct {
        struct kvq__session_spec spec;
        int code;
    } refused[] = {
        {WITH(good, name = long_name), KVQ_E_LIMIT},
        {WITH(good, name = "line\nbreak"), KVQ_E_INVALID},
        {WITH(good, name = "#7"), KVQ_E_INVALID},
        {WITH(good, max_rollback = KVQ_MAX_ROLLBACK + 1), KVQ_E_LIMIT},
        {WITH(WITH(good, shards = 2), shard = 2), KVQ_E_INVALID},
        {WITH(good, v_rotation = KVQ__V_NONE + 1), KVQ_E_INVALID},
        {WITH(good, dtype = KVQ_BF16), KVQ_E_SHAPE},               // f16 does not hold it
        {WITH(good, on_detach = KVQ__DETACH_KEEP), KVQ_E_INVALID}, // unnamed
        {WITH(WITH(good, flags = KVQ__OPEN_MUST_EXIST | KVQ__OPEN_MUST_CREATE), name = "a"),
         KVQ_E_INVALID},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        assert_int_equal(open_as(&m, &refused[i].spec, &info), refused[i].code);
    assert_int_equal(open_as(&m, &good, &info), 0);
}

// With words in the text.
static void refuses(const struct kvq__session_spec *spec, int code, const char *words)
{
    assert_int_equal(open_as(&m, spec, &info), code);
    assert_says(text, words);
}

KIT_TEST(test_open_again)
{
    struct kvq__layer_row rows[2] = {row_of("oscar2"), row_of("f16")};
    struct kvq__session_spec spec = {
        .name = "chat", .model = "llama", .layers = rows, .n_layers = 2};
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_true(info.created);
    assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
    assert_int_equal(kvq__session_close(m.client, info.handle, text), KVQ_E_STALE);
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_false(info.created);
    assert_int_equal(open_as(&m, &spec, &info), KVQ_E_BUSY);
    spec.flags = KVQ__OPEN_MUST_CREATE;
    assert_int_equal(open_as(&m, &spec, &info), KVQ_E_EXISTS);
    spec.flags = KVQ__OPEN_READ_ONLY;
    rows[1].window = 64;
    refuses(&spec, KVQ_E_EXISTS, "window in layer 1 (0 there, 64 asked for)");
    rows[1] = row_of("oscar2");
    refuses(&spec, KVQ_E_EXISTS, "f16 there, oscar2 asked");
    spec.n_layers = 0;
    spec.model = "mistral";
    assert_int_equal(open_as(&m, &spec, &info), KVQ_E_EXISTS);
    spec.model = NULL;
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_string_equal(info.model, "llama");
    assert_int_equal(info.layers, 2);
    spec.name = "nobody";
    assert_int_equal(open_as(&m, &spec, &info), KVQ_E_NO_SESSION);
}

// A handle of one attachment names no session of another, of this run or of the next.
KIT_TEST(test_handles_of_attachments)
{
    enum { ATTACHMENTS = 50, HANDLES = 3 };
    struct kvq__layer_row row = row_of("f16");
    struct kvq__session_spec spec = {.layers = &row, .n_layers = 1};
    uint64_t old[ATTACHMENTS * HANDLES], n = 0;
    for (uint32_t i = 0; i < ATTACHMENTS; i++) {
        if (i == ATTACHMENTS / 2) { // another run, whose clients have the same ids
            assert_int_equal(kit_teardown(NULL), 0);
            assert_int_equal(setup(NULL), 0);
            kit.core->config.run++;
        }
        member_close(&m);
        assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
        for (uint32_t j = 0; j < HANDLES; j++)
            assert_int_equal(open_as(&m, &spec, &info), 0);
        for (uint64_t j = 0; j < n; j++)
            assert_int_equal(kvq__session_close(m.client, old[j], text), KVQ_E_STALE);
        assert_int_equal(m.client->n_handles, HANDLES);
        for (uint32_t j = 0; j < HANDLES; j++)
            old[n++] = kvq__handle_value(&m.client->handles[0][j]);
    }
}

// No generation is 0, which in front of index 0 would be the handle that is none.
KIT_TEST(test_handle_generations_wrap)
{
    struct kvq__handle *h;
    m.client->first_generation = UINT32_MAX;
    assert_int_equal(kvq__handle_new(m.client, &h), 0);
    assert_int_equal(kvq__handle_value(h), (uint64_t)UINT32_MAX << 32);
    kvq__handle_free(h);
    assert_int_equal(kvq__handle_new(m.client, &h), 0);
    assert_int_equal(kvq__handle_value(h), 1ull << 32);
    kvq__handle_free(h);
}

KIT_TEST(test_take_over)
{
    struct kvq__layer_row row = row_of("f16");
    struct kvq__session_info first, second;
    struct kvq__session_spec spec = {.ns = "team", .name = "x", .layers = &row, .n_layers = 1};
    assert_int_equal(open_as(&m, &spec, &first), 0);
    struct kvq_entry_wire e = {.handle = first.handle, .append = 10};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    assert_int_equal(open_as(&other, &spec, &second), KVQ_E_BUSY);
    spec.flags = KVQ__OPEN_TAKE_OVER;
    assert_int_equal(open_as(&other, &spec, &second), 0);
    assert_int_equal(second.writer_client, other.id);
    assert_false(second.step_open); // the old writer's step is void
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, 1, e, NULL), KVQ_E_NO_STEP);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 2, e, NULL), KVQ_E_TAKEN);
    assert_int_equal(kvq__session_close(m.client, first.handle, text), 0);
    e.handle = second.handle;
    assert_int_equal(kit_simple(&other, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 2, e, NULL), KVQ_E_STALE); // not m's
}

// A client that is gone while a command of it is still under way: its step is undone, others may
// write, and the command opens nothing for it.
KIT_TEST(test_leave)
{
    struct kvq__layer_row row = row_of("f16");
    struct kvq__session_info first, second;
    struct kvq__session_spec spec = {.ns = "team", .name = "x", .layers = &row, .n_layers = 1};
    assert_int_equal(open_as(&m, &spec, &first), 0);
    assert_int_equal(kit_step(&m, first.handle, 20, 2, DIM), 0);
    struct kvq_entry_wire e = {.handle = first.handle, .position = 20, .append = 10};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    kvq__client_leave(m.client);
    assert_int_equal(open_as(&other, &spec, &second), 0);
    assert_int_equal(second.tokens, 20);
    assert_false(second.step_open);
    assert_int_equal(open_as(&m, &spec, &first), KVQ_E_DISCONNECTED);
    assert_int_equal(kvq__session_info(m.client, e.handle, &first, text), KVQ_E_STALE);
    assert_int_equal(kit.buffers_gone, 0);
    kvq__client_leave(m.client);
    member_close(&m);
    assert_int_equal(kit.buffers_gone, 1);
}

// The first page of all namespaces.
static uint32_t listed(const struct kvq__peer *peer, struct kvq__session_info *list, uint32_t max)
{
    uint64_t looks = KVQ__LIST_LOOKS;
    return kvq__core_sessions(kit.core, peer, NULL, (struct kvq__list_at){0}, &looks, list, max);
}

KIT_TEST(test_permission)
{
    struct kvq__layer_row row = row_of("f16");
    struct kvq__session_info info, list[4];
    struct kvq__session_spec spec = {.name = "mine", .layers = &row, .n_layers = 1};
    const struct kvq__peer stranger = {.uid = 2000}, admin = {.uid = 0, .admin = true};
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_string_equal(info.ns, "uid-1000");
    spec.ns = "uid-1000";
    assert_int_equal(open_as(&other, &spec, &info), KVQ_E_PERMISSION);
    spec.ns = "secret"; // does not exist: the same answer
    assert_int_equal(open_as(&other, &spec, &info), KVQ_E_PERMISSION);
    assert_int_equal(kvq__core_may_list(kit.core, &stranger, "secret", text), 0);
    assert_int_equal(kvq__core_may_list(kit.core, &stranger, "uid-1000", text), 0);
    assert_int_equal(kvq__core_may_list(kit.core, &admin, "secret", text), KVQ_E_NO_NAMESPACE);
    assert_int_equal(kvq__core_may_list(kit.core, &admin, "uid-4711", text), 0); // a user's own
    assert_int_equal(kvq__core_may_list(kit.core, &admin, "uid-1000", text), 0);
    assert_int_equal(kvq__core_may_list(kit.core, &admin, NULL, text), 0);
    assert_int_equal(kvq__session_drop_named(kit.core, &admin, "secret", "mine", text),
                     KVQ_E_NO_NAMESPACE);
    assert_int_equal(listed(&stranger, list, 4), 0);
    assert_int_equal(listed(&admin, list, 4), 1);
    assert_int_equal(kvq__session_drop_named(kit.core, &stranger, "uid-1000", "mine", text),
                     KVQ_E_PERMISSION);
    assert_int_equal(kvq__session_drop_named(kit.core, &stranger, "", "#1", text),
                     KVQ_E_NO_SESSION);
    assert_int_equal(kvq__core_kick(kit.core, &stranger, m.id, text), KVQ_E_PERMISSION);
    assert_int_equal(kvq__core_kick(kit.core, &admin, 999, text), KVQ_E_NO_CLIENT);
    assert_int_equal(kit.core->counts.kicked_clients, 0);
    assert_int_equal(kvq__session_drop_named(kit.core, &admin, "", "#1", text), 0);
    assert_int_equal(kit.core->n_sessions, 0);
}

KIT_TEST(test_quota)
{
    struct kvq__layer_row row = row_of("f16");
    struct kvq__session_spec spec = {.ns = "team", .layers = &row, .n_layers = 1};
    assert_int_equal(open_as(&m, &spec, &info), 0);
    // 128 KiB a page and layer; the namespace has 4 MiB, the pool much more.
    struct kvq_entry_wire e = {.handle = info.handle, .append = 33 * 128};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), KVQ_E_QUOTA);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    e.append = 32 * 128;
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    assert_int_equal(kit.core->pools[0].used_bytes, 4 * MIB);
    assert_int_equal(open_as(&other, &spec, &info), 0);
    assert_int_equal(open_as(&other, &spec, &info), KVQ_E_QUOTA); // the third session
    struct kvq__namespace_info ns[4];
    assert_int_equal(kvq__core_namespaces(kit.core, &m.client->peer, 0, ns, 4), 1);
    assert_int_equal(ns[0].used[KVQ__SESSIONS], 2);
    assert_int_equal(ns[0].used[KVQ__HOST_BYTES], 4 * MIB);
    assert_int_equal(ns[0].quota.limit[KVQ__HOST_BYTES], 4 * MIB);
}

KIT_TEST(test_keep)
{
    struct kvq__layer_row row = row_of("f16");
    struct kvq__session_spec spec = {.name = "kept", .layers = &row, .n_layers = 1};
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(kit_step(&m, info.handle, 20, 2, DIM), 0);
    struct kvq_entry_wire e = {.handle = info.handle, .position = 20, .append = 10};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    spec.name = NULL; // an unnamed one beside it
    assert_int_equal(open_as(&m, &spec, &info), 0);
    member_close(&m); // dies in the middle of its step
    assert_int_equal(kit.core->n_sessions, 1);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    spec.name = "kept";
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(info.tokens, 20);
    kvq__core_clock(kit.core, 3000000000u);
    assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
    kvq__core_clock(kit.core, 7000000000u); // kept for 5 seconds
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->n_sessions, 1);
    kvq__core_clock(kit.core, 8000000000u);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.core->n_sessions, 0);
    assert_int_equal(kit.core->pools[0].used_bytes, 0);
    assert_true(kit.extents_out > 0);
    kvq__core_clock(kit.core, 30000000000u);
    kvq__core_tick(kit.core);
    assert_int_equal(kit.extents_out, 0); // empty extents go back after a while
}

KIT_TEST(test_info)
{
    struct kvq__layer_row rows[2] = {row_of("oscar2"), row_of("oscar2")};
    struct kvq__session_spec spec = {.layers = rows, .n_layers = 2};
    struct kvq__status status;
    assert_int_equal(open_as(&m, &spec, &info), 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(kit_step(&m, info.handle, 128, 2, DIM), 0);
    assert_int_equal(kit_step(&m, info.handle, 60, 2, DIM), 0);
    kit_pack(&kit);
    assert_int_equal(kvq__session_info(m.client, info.handle, &info, text), 0);
    assert_int_equal(info.tokens, 700);
    assert_int_equal(info.full_precision_tokens, 60);
    assert_true(info.bytes_per_token_head <= 98);
    assert_true(info.bits_per_value > 2 && info.bits_per_value < 3.1);
    assert_true(info.bytes_per_token_head_total > info.bytes_per_token_head);
    assert_true(info.compression > 1 && info.compression < 16 / info.bits_per_value);
    assert_string_equal(info.format, "oscar2");
    kvq__core_status(kit.core, &status);
    assert_int_equal(status.pool_used_bytes, info.packed_bytes + info.window_bytes);
    assert_int_equal(status.tokens, 700);
    assert_int_equal(kit.core->counts.appended_tokens, 700);
    assert_int_equal(kit.core->counts.steps, 6);
    assert_int_equal(status.sessions, 1);
    assert_int_equal(status.clients, 2);
}

// A cache is kept as far back as the layer that looks back farthest.
KIT_TEST(test_shared_cache)
{
    struct kvq__layer_row rows[5];
    for (uint32_t i = 0; i < 5; i++)
        rows[i] = row_of("f16");
    rows[0].window = rows[2].window = 100;
    rows[1].kv_from = 0; // looks back without end
    rows[3].kv_from = 2;
    rows[3].window = 300;
    rows[4].kv_from = 2;
    rows[4].window = 50;
    const struct kvq__session *s = kit_of(&m, kit_session(&m, rows, 5, 0));
    assert_int_equal(s->n_owned, 2);
    assert_int_equal(s->layers[0].keep, 0);
    assert_int_equal(s->layers[2].keep, 300);
}

static void expect_format(uint64_t handle, uint32_t layer, const char *name)
{
    assert_string_equal(kit_of(&m, handle)->layers[layer].format->name, name);
}

KIT_TEST(test_own_formats)
{
    struct kvq__layer_row rows[3] = {row_of(NULL), row_of(NULL), row_of("int8")};
    struct kvq__session_info info, fork;
    struct kvq__session_spec spec = {.name = "a", .format = "mymix", .layers = rows, .n_layers = 3};
    rows[0].repeat = 6;
    rows[1].kv_from = 3; // layer 6 reads layer 3's cache, and so has its format
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_string_equal(info.format, "mymix");
    assert_string_equal(info.layer_formats,
                        "0:k8v4, 1:mymix:outliers=0, 2-4:kivi2-g64, 5:mymix, 6:kivi2-g64, 7:int8");
    const struct kvq__session *s = kit_of(&m, info.handle);
    assert_ptr_equal(s->layers[0].format, kvq_format_by_name("k8v4"));
    assert_int_equal(s->layers[1].format->outliers, 0); // the first layers go without
    assert_int_equal(s->layers[5].format->outliers, 3);
    assert_int_equal(s->layers[5].format->k.bits, 3);
    assert_int_equal(s->composed.n, 3);
    assert_int_equal(kit_step(&m, info.handle, 10, 2, DIM), 0);
    uint64_t forked = kit_fork(&m, info.handle, 10);
    assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
    assert_int_equal(kvq__session_drop_named(kit.core, &m.client->peer, NULL, "a", text), 0);
    assert_int_equal(kvq__session_info(m.client, forked, &fork, text), 0);
    assert_string_equal(fork.format, "mymix"); // its formats outlive those of the first
    assert_string_equal(fork.layer_formats, info.layer_formats);
    assert_int_equal(kit_step(&m, forked, 10, 2, DIM), 0);
}

// A session opened by the names that an own format stands for is the same session.
KIT_TEST(test_own_formats_again)
{
    struct kvq__layer_row rows[2] = {row_of(NULL), row_of(NULL)};
    struct kvq__session_spec spec = {.name = "a",
                                     .format = "mymix",
                                     .layers = rows,
                                     .n_layers = 2,
                                     .flags = KVQ__OPEN_TAKE_OVER};
    rows[1].format = "kivi2-g64";
    assert_int_equal(open_as(&m, &spec, &info), 0);
    rows[0].format = "k8v4";
    spec.format = NULL;
    assert_int_equal(open_as(&m, &spec, &info), 0);
    rows[1].format = "kivi2:k_group=64:v_group=64"; // the same stages by another name
    assert_int_equal(open_as(&m, &spec, &info), KVQ_E_EXISTS);
    spec.format = "part";
    spec.name = "b";
    rows[0].format = rows[1].format = NULL;
    refuses(&spec, KVQ_E_FORMAT, "format part says nothing of layer 0");
    rows[0].format = "int8";
    refuses(&spec, KVQ_E_FORMAT, "format vecinfer-2 needs a codebook");
    spec.format = "part@mine";
    refuses(&spec, KVQ_E_FORMAT, "no codebooks"); // the name got as far as the folder
    rows[0].format = "mymix-g64";
    refuses(&spec, KVQ_E_FORMAT,
            "mymix-g64 is unknown; 'mymix' of the configuration takes nothing");
}

// Pairs and stages keep their meaning where outliers are taken away.
KIT_TEST(test_plain_layers)
{
    static const struct {
        const char *format, *plain;
    } cases[] = {{"ott2", "ott2-o0"},
                 {"ott2-s32", "ott2-s32-o0"},
                 {"ott2+kivi4", "ott2-o0+kivi4"},
                 {"ott2:recent=64", "ott2:recent=64:outliers=0"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kvq__layer_row row = row_of(cases[i].format);
        struct kvq_format same;
        uint64_t handle;
        row.repeat = 3;
        assert_true((handle = kit_session(&m, &row, 1, 0)));
        expect_format(handle, 1, cases[i].plain);
        expect_format(handle, 2, cases[i].format);
        parse(cases[i].plain, cases[i].plain, &same);
        assert_int_equal(same.outliers, 0);
    }
}

// However many formats clients make up, others still get theirs, and all memory comes back.
KIT_TEST(test_made_up_formats)
{
    enum { SESSIONS = 700 };
    uint64_t handles[SESSIONS];
    uint64_t before = kit.allocated_out;
    for (uint32_t i = 0; i < SESSIONS; i++) {
        char name[KVQ_FORMAT_NAME];
        snprintf(name, sizeof name, "oscar2-w%u", i);
        struct kvq__layer_row row = row_of(name);
        assert_true((handles[i] = kit_session(&m, &row, 1, 0)));
        assert_int_equal(kit_of(&m, handles[i])->layers[0].format->recent_tokens, i);
    }
    struct kvq__layer_row row = row_of("kivi2-g128");
    uint64_t handle = kit_session(&other, &row, 1, 0);
    assert_true(handle);
    assert_int_equal(kvq__session_close(other.client, handle, text), 0);
    for (uint32_t i = 0; i < SESSIONS; i++)
        assert_int_equal(kvq__session_close(m.client, handles[i], text), 0);
    // Handles stay allocated for the next ones; sessions and their formats do not.
    assert_true(kit.allocated_out - before < SESSIONS * sizeof(struct kvq_format));
}

// ---- Codebooks ----

// Each layer holds its codebook as long as its session lives, however that came to be.
KIT_TEST(test_codebook_holds)
{
    struct kvq__layer_row rows[2] = {row_of("vecinfer-2@a"), row_of("kivi2")};
    struct kvq__session_info info, again;
    struct kvq__session_spec spec = {.name = "a", .layers = rows, .n_layers = 2};
    kit_codebooks(&kit);
    rows[0].repeat = 2;
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(kit.holds, 2);
    spec.flags = KVQ__OPEN_READ_ONLY;
    assert_int_equal(open_as(&m, &spec, &again), 0); // what was asked for is compared and dropped
    assert_int_equal(kit.holds, 2);
    kit_fork(&m, info.handle, 0);
    assert_int_equal(kit.holds, 4);
    kit_drop(&m, info.handle);
    assert_int_equal(kit.holds, 2);
    rows[1] = rows[0]; // layer 2 is refused after two were got
    kit.bookless = 2;
    spec = (struct kvq__session_spec){.layers = rows, .n_layers = 2};
    assert_int_equal(open_as(&m, &spec, &info), KVQ_E_FORMAT);
    assert_int_equal(kit.holds, 2);
    rows[1].repeat = 1;
    rows[1].kv_from = 0; // reads layer 0's cache, and so with its codebook
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(kit.holds, 5);
    member_close(&m);
    assert_int_equal(kit.holds, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
}

// What a client is told that attends in its own context.
KIT_TEST(test_reading)
{
    struct kvq__layer_row rows[2] = {row_of("vecinfer-2@a"), row_of("vecinfer-2@a")};
    struct kvq__session_spec spec = {.layers = rows, .n_layers = 2, .path = 1, .dtype = 2};
    struct kvq__layer_reading layers[KVQ_MAX_LAYERS];
    struct kvq_book book;
    void *hold = NULL;
    uint8_t path;
    uint32_t shards = 0;
    kit_codebooks(&kit);
    rows[1].kv_from = 0;
    rows[1].window = 300;
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(kvq__session_reading(m.client, info.handle, layers, &path, &shards, text), 2);
    assert_int_equal(shards, 1);
    assert_int_equal(path, info.path);
    assert_string_equal(layers[0].format.name, "vecinfer-2@a");
    assert_int_equal(layers[0].shape.dtype, KVQ_BF16);
    assert_int_equal(layers[1].shape.window, 300);
    assert_int_equal(layers[1].source, 0);
    int before = kit.holds;
    assert_int_equal(kvq__session_book(m.client, info.handle, 0, &book, &hold, text), 0);
    assert_true(book.k != NULL && hold && kit.holds == before + 1);
    kit.core->config.codebook_release(&kit, hold);
    assert_int_equal(kvq__session_book(m.client, info.handle, 2, &book, &hold, text), KVQ_E_SHAPE);
    kit_drop(&m, info.handle);
    assert_int_equal(kvq__session_reading(m.client, info.handle, layers, &path, &shards, text),
                     KVQ_E_STALE);
    assert_int_equal(kvq__session_book(m.client, info.handle, 0, &book, &hold, text), KVQ_E_STALE);
    spec.n_layers = 1;
    rows[0] = row_of("kivi2");
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(kvq__session_book(m.client, info.handle, 0, &book, &hold, text), KVQ_E_FORMAT);
    member_close(&m);
    assert_int_equal(kit.holds, 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
}

KIT_TEST(test_list_of_formats)
{
    static struct kvq__format_info list[100];
    uint32_t n = kvq__core_formats(kit.core, list, 100);
    assert_true(n > 4 + 30 && n <= 100);
    assert_string_equal(list[1].name, "mymix");
    assert_string_equal(list[1].row->name, "kivi2-g64");
    assert_int_equal(list[1].first, 2);
    assert_int_equal(list[1].last, 4);
    assert_true(list[2].own && list[2].others && list[2].last == UINT32_MAX);
    assert_string_equal(list[3].name, "part");
    assert_string_equal(list[4].name, "kvq2"); // the recommended ones come first
    assert_false(list[4].own);
    assert_string_equal(list[8].name, "f16");
    assert_string_equal(list[n - 1].name, "k8v4");
    for (uint32_t i = 4; i < n; i++) // each once
        for (uint32_t j = 4; j < i; j++)
            assert_string_not_equal(list[i].name, list[j].name);
    assert_int_equal(kvq__core_formats(kit.core, list, 1), n);
}

KIT_TEST(test_drain)
{
    struct kvq__layer_row row = row_of("f16");
    struct kvq__session_spec spec = {.layers = &row, .n_layers = 1};
    struct member late;
    assert_int_equal(open_as(&m, &spec, &info), 0);
    struct kvq_entry_wire e = {.handle = info.handle};
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 1, e, NULL), 0);
    kvq__core_drain(kit.core);
    assert_false(kvq__core_idle(kit.core));
    assert_int_equal(open_as(&m, &spec, &info), KVQ_E_DRAINING);
    assert_int_equal(member_open(&kit, &late, 1, 64), KVQ_E_DRAINING);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_BEGIN, 2, e, NULL), KVQ_E_DRAINING);
    assert_int_equal(kit_simple(&m, KVQ_OP_STEP_END, 1, e, NULL), 0);
    assert_true(kvq__core_idle(kit.core));
}

// ---- Rotation of V ----

static uint8_t rotation_of(const char *format, uint32_t asked)
{
    const struct kvq__layer_row row = row_of(format);
    const struct kvq__session_spec spec = {.layers = &row, .n_layers = 1, .v_rotation = asked};
    if (open_as(&m, &spec, &info))
        fail_msg("%s: %s", format, text);
    assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
    return info.v_rotation;
}

// Who says nothing gets what the format's paper does, and is told what that is.
KIT_TEST(test_rotation_by_paper)
{
    static const char *const rotated[] = {
        "oscar2",       "oscar4-xh",     "quarot4", "oscar2-g128-fm", "oscar3:sink=32:recent=64",
        "kivi2+oscar2", "oscar2-noscale"};
    static const char *const not [] = {"f16",
                                       "kivi2",
                                       "innerq-hybrid",
                                       "ott2",
                                       "turboquant3",
                                       "k8v4",
                                       "kvq2",
                                       "oscar2-norot",
                                       "oscar2:vrot=none",
                                       "oscar2+kivi2",
                                       "oscar2:vrot=signed",
                                       "quarot2:rot=signed",
                                       "oscar2:vaxis=channel",
                                       "oscar2:channel=prompt"};
    for (uint32_t i = 0; i < sizeof rotated / sizeof *rotated; i++)
        assert_int_equal(rotation_of(rotated[i], KVQ__V_BY_PAPER), KVQ_V_ROT_DAEMON);
    for (uint32_t i = 0; i < sizeof not / sizeof *not ; i++)
        if (rotation_of(not [i], KVQ__V_BY_PAPER) != KVQ_V_ROT_NONE)
            fail_msg("%s is rotated", not [i]);
    assert_int_equal(rotation_of("oscar2", KVQ__V_ENGINE), KVQ_V_ROT_ENGINE);
    assert_int_equal(rotation_of("oscar2", KVQ__V_NONE), KVQ_V_ROT_NONE);
    assert_int_equal(rotation_of("kivi2", KVQ__V_DAEMON), KVQ_V_ROT_DAEMON);
    const struct kvq__layer_row rows[] = {row_of("k8v4"), row_of("oscar2")};
    struct kvq__session_spec spec = {.layers = rows, .n_layers = 2};
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(info.v_rotation, KVQ__V_MIXED);
    assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
    spec.v_rotation = KVQ__V_DAEMON; // in all of them
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_int_equal(info.v_rotation, KVQ_V_ROT_DAEMON);
    assert_int_equal(kvq__session_close(m.client, info.handle, text), 0);
}

// What an engine cannot see it need not ask for; what it sees must be what it asks for.
KIT_TEST(test_rotation_of_existing)
{
    static const struct {
        uint8_t there, asked, reported;
        bool opens;
    } rows[] = {
        {KVQ__V_NONE, KVQ__V_BY_PAPER, KVQ_V_ROT_NONE, true},
        {KVQ__V_BY_PAPER, KVQ__V_BY_PAPER, KVQ_V_ROT_DAEMON, true},
        {KVQ__V_BY_PAPER, KVQ__V_DAEMON, KVQ_V_ROT_DAEMON, true},
        {KVQ__V_NONE, KVQ__V_DAEMON, 0, false},
        {KVQ__V_DAEMON, KVQ__V_NONE, 0, false},
        {KVQ__V_ENGINE, KVQ__V_BY_PAPER, 0, false},
        {KVQ__V_BY_PAPER, KVQ__V_ENGINE, 0, false},
        {KVQ__V_ENGINE, KVQ__V_ENGINE, KVQ_V_ROT_ENGINE, true},
    };
    const struct kvq__layer_row row = row_of("oscar2");
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct kvq__session_info first, again;
        struct kvq__session_spec spec = {
            .name = "there", .layers = &row, .n_layers = 1, .v_rotation = rows[i].there};
        assert_int_equal(open_as(&m, &spec, &first), 0);
        assert_int_equal(kvq__session_close(m.client, first.handle, text), 0);
        spec.v_rotation = rows[i].asked;
        int rc = open_as(&m, &spec, &again);
        assert_int_equal(rc, rows[i].opens ? 0 : KVQ_E_EXISTS);
        if (rc < 0) {
            assert_says(text, "v_rotation");
            spec.n_layers = 0; // as it is
            assert_int_equal(open_as(&m, &spec, &again), 0);
        } else {
            assert_int_equal(again.v_rotation, rows[i].reported);
        }
        kit_drop(&m, again.handle);
        assert_int_equal(kvq__session_close(m.client, again.handle, text), KVQ_E_STALE);
    }
}

// A row that is as the one before makes a layer of its own, as it would without that one.
KIT_TEST(test_rows_that_repeat)
{
    struct kvq__layer_row three = row_of("ott2"), rows[6] = {0};
    struct kvq__session_spec spec = {.layers = rows, .n_layers = 6};
    three.repeat = 3;
    rows[0] = rows[4] = rows[5] = three;
    rows[1] = rows[2] = rows[3] = row_of("kivi2-g64");
    rows[2].window = 512;
    assert_int_equal(open_as(&m, &spec, &info), 0);
    assert_string_equal(info.format, "ott2");
    const struct kvq__session *s = kit_of(&m, info.handle);
    assert_int_equal(s->n_layers, 12);
    for (uint32_t i = 0; i < 12; i++) {
        const struct kvq__layer *l = &s->layers[i];
        struct kvq_layer_bytes bytes = kvq_layer_bytes_of(l->format, &l->shape);
        assert_string_equal(l->format->name, i < 2              ? "ott2-o0"
                                             : i >= 3 && i <= 5 ? "kivi2-g64"
                                                                : "ott2");
        assert_int_equal(l->shape.window, i == 4 ? 512 : 0);
        assert_int_equal(l->source, i);
        assert_true(l->raw_bytes == bytes.raw && l->packed_bytes == bytes.packed &&
                    l->extras_bytes == bytes.extras);
    }
}

int main(void)
{
    return run_all(NULL, NULL);
}
