// SPDX-License-Identifier: Apache-2.0
//
// The file of limits that were set at run time: what is written is read back, also when power fails
// at any moment, and whatever else stands there is refused with its line.
#include "daemon/store/quota_file.h"
#include "tests/kits/fault_io.h"
#include "tests/kits/unit.h"

static struct fault_io disk;
static struct kvq__override read_back[KVQ_MAX_OVERRIDES];
static char text[KVQ_TEXT_BYTES];
static const char *const path = "/q/" KVQ__QUOTA_FILE;

static int setup(void **state)
{
    fault_open(&disk, 5);
    return 0;
}

static int teardown(void **state)
{
    fault_close(&disk);
    return 0;
}

static struct kvq__override some(const char *ns, uint64_t host, uint64_t sessions)
{
    struct kvq__override o = {.set = 1u << KVQ__HOST_BYTES | 1u << KVQ__SESSIONS};
    snprintf(o.ns, sizeof o.ns, "%s", ns);
    o.quota.limit[KVQ__HOST_BYTES] = host;
    o.quota.limit[KVQ__SESSIONS] = sessions;
    return o;
}

static uint32_t read_file(void)
{
    uint32_t n = 0;
    memset(text, 0, sizeof text);
    memset(read_back, 0, sizeof read_back);
    if (kvq__quota_file_read(&disk.io, "/q", read_back, &n, text) < 0)
        fail_msg("%s", text);
    return n;
}

static bool same(const struct kvq__override *a, const struct kvq__override *b)
{
    return strcmp(a->ns, b->ns) == 0 && a->set == b->set &&
           memcmp(&a->quota, &b->quota, sizeof a->quota) == 0;
}

TEST(test_round)
{
    struct kvq__override all[3] = {some("team-a", 5ull << 30, 3), some("none", 1, 1),
                                   some("größe", KVQ_MAX_QUOTA_BYTES, UINT32_MAX)};
    assert_int_equal(read_file(), 0); // there is none yet
    all[0].set = 15;
    all[0].quota.limit[KVQ__DISK_BYTES] = 0; // explicitly none
    all[1].set = 0;                          // is left out
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", all, 3, text), 0);
    assert_int_equal(read_file(), 2);
    assert_true(same(&read_back[0], &all[0]));
    assert_true(same(&read_back[1], &all[2]));
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", all, 0, text), 0);
    assert_int_equal(read_file(), 0);
}

// As many as there may be, with the longest names that a file can hold, fit and come back.
TEST(test_most)
{
    static struct kvq__override all[KVQ_MAX_OVERRIDES];
    for (uint32_t i = 0; i < KVQ_MAX_OVERRIDES; i++) {
        char ns[64];
        snprintf(ns, sizeof ns, "a-namespace-with-a-long-name-%08u", i);
        all[i] = some(ns, KVQ_MAX_QUOTA_BYTES - i, UINT32_MAX - i);
        all[i].set = 15;
        all[i].quota.limit[KVQ__DEVICE_BYTES] = all[i].quota.limit[KVQ__DISK_BYTES] =
            KVQ_MAX_QUOTA_BYTES;
    }
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", all, KVQ_MAX_OVERRIDES, text), 0);
    assert_int_equal(read_file(), KVQ_MAX_OVERRIDES);
    for (uint32_t i = 0; i < KVQ_MAX_OVERRIDES; i++)
        assert_true(same(&read_back[i], &all[i]));
}

// ---- Power and disks ----

// Whatever was interrupted: all of the old, or all of the new.
TEST(test_power)
{
    struct kvq__override old[2] = {some("a", 1000, 1), some("b", 2000, 2)};
    struct kvq__override new[2] = {some("a", 7777, 7), some("c", 3000, 3)};
    uint32_t olds = 0, news = 0;
    for (uint64_t seed = 1; seed < 200; seed++) {
        fault_close(&disk);
        fault_open(&disk, seed);
        assert_int_equal(kvq__quota_file_write(&disk.io, "/q", old, 2, text), 0);
        fault_reset_counts(&disk);
        *(seed % 2 ? &disk.crash_at_change : &disk.crash_at_sync) = 1 + seed / 2 % 6;
        int rc = kvq__quota_file_write(&disk.io, "/q", new, 2, text);
        fault_crash(&disk);
        assert_int_equal(read_file(), 2);
        bool is_old = same(&read_back[0], &old[0]) && same(&read_back[1], &old[1]);
        bool is_new = same(&read_back[0], &new[0]) && same(&read_back[1], &new[1]);
        assert_true(is_old != is_new);
        assert_true(is_new || rc < 0); // what was said to be kept is
        olds += is_old;
        news += is_new;
    }
    assert_true(olds > 10 && news > 10);
}

static void fails(int error, int code)
{
    const struct kvq__override old = some("a", 1000, 1), new = some("a", 2, 2);
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", &old, 1, text), 0);
    fault_reset_counts(&disk);
    disk.fail_write = 1;
    disk.fail_with = error;
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", &new, 1, text), code);
    assert_says(text, path);
    assert_says(text, "no limit was changed");
    disk.fail_write = 0;
    assert_int_equal(kvq_io_open(&disk.io, "/q/" KVQ__QUOTA_FILE ".new", KVQ_IO_READ), -ENOENT);
    assert_int_equal(read_file(), 1);
    assert_true(same(&read_back[0], &old));
}

TEST(test_disk_fails)
{
    const struct kvq__override new = some("a", 2, 2);
    fails(ENOSPC, KVQ_E_NO_SPACE);
    fails(EIO, KVQ_E_SYSTEM);
    disk.read_only = true;
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", &new, 1, text), KVQ_E_READ_ONLY);
    disk.read_only = false;
    // The new file is in place when its folder cannot be synced, and nobody says that it is not.
    fault_reset_counts(&disk);
    disk.fail_sync = 2;
    disk.fail_with = EIO;
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", &new, 1, text), KVQ_E_SYSTEM);
    assert_null(strstr(text, "no limit was changed"));
    assert_says(text, "it has the new limits, which do not hold before kvqd starts");
    assert_int_equal(read_file(), 1);
    assert_true(same(&read_back[0], &new));
    fault_reset_counts(&disk);
    // What a write that failed has left is no hindrance.
    assert_int_equal(kvq__quota_file_write(&disk.io, "/q", &new, 1, text), 0);
    assert_int_equal(read_file(), 1);
    assert_true(same(&read_back[0], &new));
    // Interruptions and short transfers are no failures.
    disk.interrupt_percent = disk.short_percent = 50;
    for (int i = 0; i < 20; i++) {
        const struct kvq__override o = some("a", 10 + (uint64_t)i, 2);
        assert_int_equal(kvq__quota_file_write(&disk.io, "/q", &o, 1, text), 0);
        assert_int_equal(read_file(), 1);
        assert_true(same(&read_back[0], &o));
    }
    fault_reset_counts(&disk);
    disk.fail_read = 1;
    disk.fail_with = EIO;
    uint32_t n;
    assert_int_equal(kvq__quota_file_read(&disk.io, "/q", read_back, &n, text), KVQ_E_SYSTEM);
}

// ---- What else may stand there ----

static void refused(const char *contents, const char *says)
{
    uint32_t n = 77;
    memset(text, 0, sizeof text);
    int rc = kvq__quota_file_parse("f", contents, read_back, &n, text);
    assert_int_equal(rc, KVQ_E_INVALID);
    assert_int_equal(n, 0);
    if (!strstr(text, says) || !strstr(text, "remove the file"))
        fail_msg("\"%s\" does not say \"%s\"", text, says);
}

TEST(test_hostile)
{
    char many[64 * (KVQ_MAX_OVERRIDES + 1)], *at = many;
    uint32_t n;
    refused("host_bytes = 1\n", "f:1: host_bytes stands below []");
    refused("[team]\nhost_bytes = 1\n", "f:2: host_bytes stands below [team]");
    refused("[namespace a]\nbytes = 1\n", "f:2: bytes is not known; known are host_bytes");
    refused("[namespace a]\nhost_bytes = 1\nhost_bytes = 2\n", "f:3: host_bytes is set twice");
    refused("[namespace a]\nhost_bytes = -1\n", "f:2: host_bytes is \"-1\"");
    refused("[namespace a]\nhost_bytes = 1e9\n", "1e9");
    refused("[namespace a]\nhost_bytes =\n", "f:2");
    refused("[namespace a]\nhost_bytes = 99999999999999999999999\n", "f:2");
    refused("[namespace a]\nhost_bytes = 1125899906842625\n", "at most 1125899906842624");
    refused("[namespace a]\nmax_sessions = 4294967296\n", "at most 4294967295");
    refused("[namespace ]\nhost_bytes = 1\n", "f:2");
    refused("[namespace #1]\nhost_bytes = 1\n", "no name of one");
    refused("[namespace a b]\nhost_bytes = 1\n", "no name of one");
    refused("[namespace a/b]\nhost_bytes = 1\n", "no name of one");
    refused("[namespace \xff\xfe]\nhost_bytes = 1\n", "no name of one");
    refused("[namespace a\nhost_bytes = 1\n", "f:1");
    refused("[namespace a]\nhost_bytes\n", "f:2");
    refused("[namespace a-name-that-is-much-too-long-to-be-taken-whole]\nhost_bytes = 1\n",
            "f:1: a section's name is longer");
    for (int i = 0; i <= KVQ_MAX_OVERRIDES; i++)
        at += snprintf(at, 64, "[namespace n%d]\nmax_sessions = 1\n", i);
    refused(many, "more than 1024 namespaces");
    // And what is well.
    assert_int_equal(kvq__quota_file_parse("f", "; by hand\n[namespace a]\nhost_bytes = 2gb\n\n",
                                           read_back, &n, text),
                     0);
    assert_int_equal(n, 1);
    assert_int_equal(read_back[0].set, 1);
    assert_int_equal(read_back[0].quota.limit[0], 2ull << 30);
}

static void put_file(const void *data, size_t n)
{
    int file = kvq_io_open(&disk.io, path, KVQ_IO_WRITE | KVQ_IO_CREATE);
    assert_true(file >= 0);
    assert_int_equal(kvq_io_write(&disk.io, file, data, n, 0), 0);
    disk.io.close(&disk.io, file);
}

TEST(test_no_text)
{
    static char big[KVQ_MAX_CONFIG + 10];
    uint32_t n;
    put_file("[namespace a]\n\0host_bytes = 1\n", 30);
    assert_int_equal(kvq__quota_file_read(&disk.io, "/q", read_back, &n, text), KVQ_E_INVALID);
    assert_says(text, "NUL");
    memset(big, '\n', sizeof big);
    put_file(big, sizeof big);
    assert_int_equal(kvq__quota_file_read(&disk.io, "/q", read_back, &n, text), KVQ_E_INVALID);
    assert_says(text, "longer than");
}

int main(void)
{
    return run_all(NULL, NULL);
}
