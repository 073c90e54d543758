// SPDX-License-Identifier: Apache-2.0
//
// Limits of namespaces: set at run time in place of the configuration's, never exceeded, and, when
// they are lowered below what is used, nothing is taken away and nothing grows.
#include "tests/core/core_kit.h"
#include "tests/kits/unit.h"

enum {
    MIB = 1 << 20,
    BUFFER = 2 * MIB,
    DIM = 128,
    PAGE = 128,
    PAGE_BYTES = PAGE * 2 * DIM * 2 * 2, // f16: K and V of two heads
};

static struct kit kit;
static struct member m; // user 1000
static char text[KVQ_TEXT_BYTES];
static struct kvq__session_info info; // of the session that was asked for last
static const struct kvq__peer admin = {.admin = true}, user = {.uid = 1000}, stranger = {.uid = 7};

static int setup(void **state)
{
    static const uint32_t uids[] = {1000};
    const struct kvq__namespace_config team = {
        .name = "team",
        .quota = {.limit = {[KVQ__HOST_BYTES] = 8 * MIB, [KVQ__SESSIONS] = 4}},
        .uids = uids,
        .n_uids = 1};
    kit_open(&kit, 3, 64 * MIB, 0);
    assert_int_equal(kvq__core_namespace(kit.core, &team, text), 0);
    assert_int_equal(member_open(&kit, &m, 1000, BUFFER), 0);
    return 0;
}

static struct kvq__namespace_info info_of(const char *ns)
{
    struct kvq__namespace_info info;
    if (kvq__core_namespace_info(kit.core, &admin, ns, &info, text) < 0)
        fail_msg("%s", text);
    return info;
}

// As the daemon does it, in two steps.
static int change(const struct kvq__peer *peer, const struct kvq__override *change)
{
    struct kvq__override all;
    memset(text, 0, sizeof text);
    core_check(kit.core); // what is there now must not grow if it is above
    int rc = kvq__quota_change(kit.core, peer, change, &all, text);
    return rc ? rc : kvq__quota_apply(kit.core, &all, text);
}

static void set(const char *ns, enum kvq__limit which, uint64_t limit)
{
    struct kvq__override o = {.set = 1u << which};
    o.quota.limit[which] = limit;
    snprintf(o.ns, sizeof o.ns, "%s", ns);
    if (change(&admin, &o) < 0)
        fail_msg("%s", text);
}

static void says(const char *what)
{
    if (!strstr(text, what) || strlen(text) >= sizeof text - 1)
        fail_msg("\"%s\" does not say \"%s\"", text, what);
}

static int open_in(const char *ns, const char *name, struct kvq__session_info *info)
{
    static const struct kvq__layer_row row = {8, 2, DIM, DIM, .format = "f16", .kv_from = -1};
    const struct kvq__session_spec spec = {.ns = ns, .name = name, .layers = &row, .n_layers = 1};
    memset(text, 0, sizeof text);
    return kvq__session_open(m.client, &spec, info, text);
}

static uint64_t fed(const char *ns, const char *name, uint32_t pages)
{
    if (open_in(ns, name, &info) < 0)
        fail_msg("%s", text);
    for (uint32_t i = 0; i < pages; i++)
        assert_int_equal(kit_step(&m, info.handle, PAGE, 2, DIM), 0);
    return info.handle;
}

// ---- Setting ----

KIT_TEST(test_set)
{
    struct kvq__namespace_info info = info_of("team");
    struct kvq__override both = {.ns = "team",
                                 .set = 1u << KVQ__HOST_BYTES | 1u << KVQ__DISK_BYTES};
    assert_int_equal(info.quota.limit[KVQ__HOST_BYTES], 8 * MIB);
    assert_int_equal(info.set, 0);
    both.quota.limit[KVQ__DISK_BYTES] = 5; // and no limit for the host
    assert_int_equal(change(&admin, &both), 0);
    set("team", KVQ__DEVICE_BYTES, 9); // the others stay as they are
    info = info_of("team");
    assert_int_equal(info.set, 7);
    assert_int_equal(info.quota.limit[KVQ__HOST_BYTES], 0);
    assert_int_equal(info.quota.limit[KVQ__DEVICE_BYTES], 9);
    assert_int_equal(info.quota.limit[KVQ__DISK_BYTES], 5);
    assert_int_equal(info.quota.limit[KVQ__SESSIONS], 4); // the configuration's
    assert_int_equal(info.configured.limit[KVQ__HOST_BYTES], 8 * MIB);
    assert_int_equal(change(&admin, &(struct kvq__override){.ns = "team"}), 0); // all deleted
    info = info_of("team");
    assert_int_equal(info.set, 0);
    assert_memory_equal(&info.quota, &info.configured, sizeof info.quota);
    assert_int_equal(info.quota.limit[KVQ__HOST_BYTES], 8 * MIB);
    // A user's own, before that user was ever there.
    set("uid-77", KVQ__SESSIONS, 1);
    assert_int_equal(info_of("uid-77").quota.limit[KVQ__SESSIONS], 1);
}

KIT_TEST(test_refused_settings)
{
    struct kvq__override o = {.ns = "team", .set = 1, .quota = {.limit = {1}}};
    assert_int_equal(change(&user, &o), KVQ_E_PERMISSION); // its own namespace
    says("admin_uids");
    assert_int_equal(change(&stranger, &o), KVQ_E_PERMISSION);
    snprintf(o.ns, sizeof o.ns, "nobody");
    assert_int_equal(change(&user, &o), KVQ_E_PERMISSION);
    assert_int_equal(change(&admin, &o), KVQ_E_NO_NAMESPACE);
    says("there is no namespace \"nobody\"");
    o.ns[0] = 0;
    assert_int_equal(change(&admin, &o), KVQ_E_INVALID);
    snprintf(o.ns, sizeof o.ns, "team");
    o.set = 32;
    assert_int_equal(change(&admin, &o), KVQ_E_INVALID);
    o.set = 1;
    o.quota.limit[0] = KVQ_MAX_QUOTA_BYTES + 1;
    assert_int_equal(change(&admin, &o), KVQ_E_LIMIT);
    says("1125899906842624");
    o.set = 8;
    o.quota.limit[KVQ__SESSIONS] = 1ull << 32;
    assert_int_equal(change(&admin, &o), KVQ_E_LIMIT);
    assert_int_equal(info_of("team").set, 0);
    // What is read back from a file may name a namespace that is no more.
    o.quota.limit[KVQ__SESSIONS] = 5;
    snprintf(o.ns, sizeof o.ns, "gone");
    assert_int_equal(kvq__quota_apply(kit.core, &o, text), KVQ_E_INVALID);
    // Owners see their limits, strangers nothing.
    struct kvq__namespace_info info;
    assert_int_equal(kvq__core_namespace_info(kit.core, &user, "team", &info, text), 0);
    assert_int_equal(kvq__core_namespace_info(kit.core, &stranger, "team", &info, text),
                     KVQ_E_PERMISSION);
}

// ---- Holding to it ----

KIT_TEST(test_never_more)
{
    uint64_t a = fed("team", "a", 2), b = fed("team", "b", 1);
    struct kvq__namespace_info info;
    set("team", KVQ__HOST_BYTES, 5 * PAGE_BYTES - 1);
    assert_int_equal(kit_step(&m, a, 2 * PAGE, 2, DIM), KVQ_E_QUOTA);
    set("team", KVQ__HOST_BYTES, 4 * PAGE_BYTES);
    info = info_of("team");
    assert_int_equal(info.used[KVQ__HOST_BYTES], 3 * PAGE_BYTES); // as before
    assert_int_equal(info.refused[KVQ__HOST_BYTES], 1);
    assert_int_equal(info.last_more, 2 * PAGE_BYTES);
    assert_int_equal(kit_step(&m, a, PAGE, 2, DIM), 0); // to the byte
    assert_int_equal(kit_step(&m, b, 1, 2, DIM), KVQ_E_QUOTA);
    kit_drop(&m, a);
    assert_int_equal(kit_step(&m, b, 3 * PAGE, 2, DIM), 0);
}

// A block that grows with its session counts once, as what it becomes.
KIT_TEST(test_growing)
{
    uint64_t a = fed("team", "a", 0);
    set("team", KVQ__HOST_BYTES, PAGE_BYTES);
    assert_int_equal(kit_step(&m, a, 1, 2, DIM), 0);
    assert_int_equal(kit_step(&m, a, 63, 2, DIM), 0);
    assert_int_equal(info_of("team").used[KVQ__HOST_BYTES], PAGE_BYTES / 2);
    assert_int_equal(kit_step(&m, a, 1, 2, DIM), 0);
    assert_int_equal(info_of("team").used[KVQ__HOST_BYTES], PAGE_BYTES);
    core_check(kit.core);
    assert_int_equal(kit_step(&m, a, PAGE - 64, 2, DIM), KVQ_E_QUOTA);
    set("team", KVQ__HOST_BYTES, PAGE_BYTES - 1);
    kit_drop(&m, a);
    a = fed("team", "a", 0);
    assert_int_equal(kit_step(&m, a, 64, 2, DIM), 0);
    assert_int_equal(kit_step(&m, a, 1, 2, DIM), KVQ_E_QUOTA);
}

KIT_TEST(test_lowered)
{
    uint64_t a = fed("team", "a", 3), b = fed("team", "b", 0), fork;
    struct kvq_entry_wire e = {.handle = a, .position = 3 * PAGE};
    assert_int_equal(kit_step(&m, b, 100, 2, DIM), 0);
    set("team", KVQ__HOST_BYTES, PAGE_BYTES / 2);
    assert_int_equal(kvq__session_info(m.client, a, &info, text), 0);
    assert_int_equal(info.tokens, 3 * PAGE); // nothing is taken away
    assert_int_equal(info_of("team").used[KVQ__HOST_BYTES], 4 * PAGE_BYTES);
    assert_int_equal(kit_step(&m, a, 1, 2, DIM), KVQ_E_QUOTA);
    assert_int_equal(kit_step(&m, b, PAGE - 100, 2, DIM), 0); // into the page that it has
    assert_int_equal(kit_step(&m, b, 1, 2, DIM), KVQ_E_QUOTA);
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), 0); // all of it is shared
    core_check(kit.core);
    assert_int_equal(info_of("team").used[KVQ__HOST_BYTES], 4 * PAGE_BYTES);
    // Below the limit there is room again, but not before.
    set("team", KVQ__HOST_BYTES, 2 * PAGE_BYTES);
    kit_drop(&m, fork);
    assert_int_equal(kit_step(&m, b, 1, 2, DIM), KVQ_E_QUOTA);
    kit_drop(&m, a);
    assert_int_equal(kit_step(&m, b, 1, 2, DIM), 0);
    assert_int_equal(kit_step(&m, b, PAGE, 2, DIM), KVQ_E_QUOTA);
    assert_int_equal(change(&admin, &(struct kvq__override){.ns = "team"}), 0);
    assert_int_equal(kit_step(&m, b, PAGE, 2, DIM), 0);
}

// Pages of other namespaces are none of this one's limit, and the other way round.
KIT_TEST(test_own_alone)
{
    uint64_t a = fed("team", "a", 1), mine = fed(NULL, "mine", 1);
    set("uid-1000", KVQ__HOST_BYTES, PAGE_BYTES);
    assert_int_equal(kit_step(&m, mine, 1, 2, DIM), KVQ_E_QUOTA);
    assert_int_equal(kit_step(&m, a, 4 * PAGE, 2, DIM), 0);
    set("uid-1000", KVQ__HOST_BYTES, 0);
    set("uid-1000", KVQ__DEVICE_BYTES, 1); // of GPUs' memory, which this is not
    assert_int_equal(kit_step(&m, mine, 1, 2, DIM), 0);
}

KIT_TEST(test_sessions)
{
    uint64_t a = fed("team", "a", 1), fork;
    struct kvq_entry_wire e = {.handle = a, .position = PAGE};
    fed("team", "b", 0);
    fed("team", "c", 0);
    set("team", KVQ__SESSIONS, 2);
    assert_int_equal(open_in("team", "d", &info), KVQ_E_QUOTA);
    says("namespace \"team\" may have 2 sessions in memory; it has 3, and 1 more are asked for");
    says("kvqctl quota set team --sessions N");
    assert_int_equal(kit_simple(&m, KVQ_OP_FORK, 0, e, &fork), KVQ_E_QUOTA);
    assert_int_equal(info_of("team").refused[KVQ__SESSIONS], 2);
    assert_int_equal(info_of("team").used[KVQ__SESSIONS], 3); // they are all there
    assert_int_equal(kvq__session_close(m.client, a, text), 0);
    assert_int_equal(open_in("team", "a", &info), 0); // what is there can be opened
    assert_int_equal(kvq__session_drop_named(kit.core, &admin, "team", "b", text), 0);
    assert_int_equal(open_in("team", "d", &info), KVQ_E_QUOTA);
    assert_int_equal(kvq__session_drop_named(kit.core, &admin, "team", "c", text), 0);
    assert_int_equal(open_in("team", "d", &info), 0);
}

// ---- Telling ----

KIT_TEST(test_told)
{
    uint64_t a = fed("team", "a", 1);
    set("team", KVQ__HOST_BYTES, PAGE_BYTES);
    assert_int_equal(kit.events[KVQ__EVENT_QUOTA_REACHED], 0);
    for (int i = 0; i < 10; i++)
        assert_int_equal(kit_step(&m, a, 1, 2, DIM), KVQ_E_QUOTA);
    assert_int_equal(kit.events[KVQ__EVENT_QUOTA_REACHED], 1); // once a second
    assert_int_equal(kit.events[KVQ__EVENT_MEMORY_FULL], 0);
    assert_string_equal(kit.event_text, "131072 of 131072 bytes in the host's memory are used, "
                                        "32768 more were asked for"); // room for 32 tokens
    kvq__core_clock(kit.core, kit.now + 1500000000);
    set("team", KVQ__SESSIONS, 1);
    assert_int_equal(open_in("team", "b", &info), KVQ_E_QUOTA);
    assert_int_equal(kit.events[KVQ__EVENT_QUOTA_REACHED], 2);
    struct kvq__namespace_info ns = info_of("team");
    assert_int_equal(ns.refused[KVQ__HOST_BYTES], 10);
    assert_int_equal(ns.last_refused, KVQ__SESSIONS);
    assert_int_equal(ns.last_more, 1);
    // A pool that is full is another matter.
    set("team", KVQ__HOST_BYTES, 0);
    set("team", KVQ__SESSIONS, 0);
    int rc = 0;
    while (rc == 0)
        rc = kit_step(&m, fed("team", NULL, 0), 8 * PAGE, 2, DIM);
    assert_int_equal(rc, KVQ_E_NO_MEMORY);
    assert_int_equal(kit.events[KVQ__EVENT_MEMORY_FULL], 1);
    assert_int_equal(kit.events[KVQ__EVENT_QUOTA_REACHED], 2);
    assert_says(kit.event_text, "of 67108864 bytes on host are used");
}

KIT_TEST(test_disk)
{
    kvq__disk_used(kit.core, "team", 12345);
    kvq__disk_used(kit.core, "uid-5", 7); // whom nobody has seen yet
    kvq__disk_used(kit.core, "gone", 1);  // and who is no more
    assert_int_equal(info_of("team").used[KVQ__DISK_BYTES], 12345);
    assert_int_equal(info_of("uid-5").used[KVQ__DISK_BYTES], 7);
    kvq__disk_refused(kit.core, "team", "no");
    kvq__disk_refused(kit.core, "gone", "no");
    assert_int_equal(info_of("team").refused[KVQ__DISK_BYTES], 1);
    assert_int_equal(kit.events[KVQ__EVENT_QUOTA_REACHED], 1);
}

// A configuration that is read again changes limits and users, all or nothing.
KIT_TEST(test_reconfigure)
{
    static const uint32_t uids[] = {7};
    static const char *const with[] = {"*"};
    const struct kvq__namespace_config sections[] = {
        {.name = "team",
         .quota = {.limit = {[KVQ__HOST_BYTES] = 16 * MIB, [KVQ__SESSIONS] = 9}},
         .uids = uids,
         .n_uids = 1,
         .share_with = with,
         .n_share_with = 1},
        {.name = "new", .uids = uids, .n_uids = 1},
        {.name = "uid-1000", .quota = {.limit = {[KVQ__HOST_BYTES] = 2 * MIB}}}};
    const struct kvq__core_settings settings = {.quota = {.limit = {[KVQ__HOST_BYTES] = 3 * MIB}},
                                                .namespaces = sections,
                                                .n_namespaces = 3};
    fed("team", "x", 2);
    set("team", KVQ__SESSIONS, 5);
    uint64_t used = info_of("team").used[KVQ__HOST_BYTES];
    info_of("uid-5"), info_of("uid-1000");
    uint64_t before = kit.allocated_out;
    int rc = KVQ_E_NO_MEMORY, refused = 0;
    for (kit.fail_one_in = 2; rc == KVQ_E_NO_MEMORY; refused++) {
        core_check(kit.core);
        rc = kvq__core_reconfigure(kit.core, &settings, text);
        if (rc < 0) { // nothing has changed
            assert_int_equal(kit.allocated_out, before);
            assert_int_equal(info_of("team").quota.limit[KVQ__HOST_BYTES], 8 * MIB);
            assert_int_equal(info_of("uid-5").quota.limit[KVQ__HOST_BYTES], 0);
        }
    }
    kit.fail_one_in = 0;
    assert_true(rc == 0 && refused > 1);
    assert_int_equal(info_of("team").quota.limit[KVQ__HOST_BYTES], 16 * MIB);
    assert_int_equal(info_of("team").quota.limit[KVQ__SESSIONS], 5); // as it was set
    assert_int_equal(info_of("team").configured.limit[KVQ__SESSIONS], 9);
    assert_int_equal(info_of("team").used[KVQ__HOST_BYTES], used);
    assert_int_equal(info_of("uid-5").quota.limit[KVQ__HOST_BYTES], 3 * MIB);
    assert_int_equal(info_of("uid-1000").quota.limit[KVQ__HOST_BYTES], 2 * MIB);
    struct kvq__namespace_info info;
    assert_int_equal(kvq__core_namespace_info(kit.core, &stranger, "team", &info, text), 0);
    assert_int_equal(kvq__core_namespace_info(kit.core, &stranger, "new", &info, text), 0);
    assert_int_equal(kvq__core_namespace_info(kit.core, &user, "team", &info, text),
                     KVQ_E_PERMISSION);
}

int main(void)
{
    return run_all(NULL, NULL);
}
