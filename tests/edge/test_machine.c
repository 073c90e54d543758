// SPDX-License-Identifier: Apache-2.0
//
// How much memory there is, over a folder that stands for the file system of a machine; and what is
// refused and told of by it.
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/config/machine.h"
#include "daemon/runtime/memory.h"
#include "proto/limits.h"
#include "proto/status.h"
#include "tests/kits/folder.h"
#include "tests/kits/unit.h"

#define MIB (1ull << 20)

static char root[64];
static char text[KVQ_TEXT_BYTES];
static struct kvq__machine machine;
static const struct kvq__machine without_groups = {
    .total = 16384 * MIB, .free = 4096 * MIB, .group = KVQ__UNKNOWN, .group_free = KVQ__UNKNOWN};

// Makes the file and the folders that lead to it.
static void put(const char *path, const char *contents)
{
    char whole[512];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    for (char *at = whole + strlen(root) + 1; (at = strchr(at, '/')); *at++ = '/') {
        *at = 0;
        (void)mkdir(whole, 0755);
    }
    FILE *file = fopen(whole, "w");
    assert_non_null(file);
    assert_true(fputs(contents, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int setup(void **state)
{
    snprintf(root, sizeof root, "/tmp/kvq-test-machine-XXXXXX");
    assert_non_null(mkdtemp(root));
    put("/proc/meminfo", "MemTotal:       16777216 kB\nMemFree:  1 kB\n"
                         "MemAvailable:    4194304 kB\n");
    return 0;
}

static int teardown(void **state)
{
    return remove_folder(root);
}

TEST(test_machine_alone)
{
    kvq__machine_read(root, &machine);
    assert_true(machine.total == 16384 * MIB && machine.free == 4096 * MIB);
    assert_true(machine.group == KVQ__UNKNOWN && machine.group_free == KVQ__UNKNOWN);
    assert_true(kvq__machine_most(&machine) == 16384 * MIB);
}

// The lowest limit on the way up counts, and so does the least that is left; they need not be of
// one group.
TEST(test_groups)
{
    put("/proc/self/cgroup", "1:name=systemd:/x\n0::/a.slice/kvqd.service\n");
    put("/sys/fs/cgroup/a.slice/kvqd.service/memory.max", "max\n");
    put("/sys/fs/cgroup/a.slice/memory.max", "2147483648\n");
    put("/sys/fs/cgroup/a.slice/memory.current", "1610612736\n");
    put("/sys/fs/cgroup/a.slice/memory.stat", "anon 1\ninactive_file 536870912\nfile 3\n");
    put("/sys/fs/cgroup/memory.max", "3221225472\n");
    put("/sys/fs/cgroup/memory.current", "3221225472\n");
    kvq__machine_read(root, &machine);
    assert_true(machine.group == 2048 * MIB);
    assert_string_equal(machine.group_name, "/a.slice");
    assert_true(machine.group_free == 0);
    put("/sys/fs/cgroup/memory.max", "max\n");
    kvq__machine_read(root, &machine);
    assert_true(machine.group_free == 1024 * MIB);
    put("/sys/fs/cgroup/a.slice/kvqd.service/memory.max", "1073741824\n");
    kvq__machine_read(root, &machine);
    assert_true(machine.group == 1024 * MIB);
    assert_string_equal(machine.group_name, "/a.slice/kvqd.service");
    assert_true(kvq__machine_most(&machine) == 1024 * MIB);
}

// In a container, which sees its own group as the one at the top.
TEST(test_container)
{
    put("/proc/self/cgroup", "0::/\n");
    put("/sys/fs/cgroup/memory.max", "536870912\n");
    kvq__machine_read(root, &machine);
    assert_true(machine.group == 512 * MIB && machine.group_free == KVQ__UNKNOWN);
    assert_string_equal(machine.group_name, "/");
}

// What the kernel would never write does no harm.
TEST(test_nonsense)
{
    put("/proc/meminfo", "MemTotal\nMemAvailable: many\n");
    put("/proc/self/cgroup", "10::/x\n");
    put("/sys/fs/cgroup/x/memory.max", "1\n");
    put("/sys/fs/cgroup/memory.max", "-1\n");
    kvq__machine_read(root, &machine);
    assert_true(machine.total > 0 && machine.group == KVQ__UNKNOWN);
}

PLAIN_TEST(test_refusals)
{
    machine = (struct kvq__machine){.total = 16384 * MIB,
                                    .free = 4096 * MIB,
                                    .group = 2048 * MIB,
                                    .group_free = 1024 * MIB,
                                    .group_name = "/a.slice"};
    assert_int_equal(kvq__machine_check(&machine, "pool_bytes", 2048 * MIB, 0, text), 0);
    assert_int_equal(kvq__machine_check(&machine, "pool_bytes", 2049 * MIB, 0, text),
                     KVQ_E_INVALID);
    assert_string_equal(text,
                        "pool_bytes: 2049 MiB are more than the 2048 MiB that the control group "
                        "/a.slice allows (memory.max); lower pool_bytes, or raise that limit "
                        "(MemoryMax= of the service)");
    assert_int_equal(kvq__machine_check(&machine, "pool_bytes", 2049 * MIB, MIB, text), 0);
    assert_int_equal(kvq__machine_check(&machine, "pool_bytes", 16385 * MIB, 16385 * MIB, text),
                     KVQ_E_INVALID);
    assert_string_equal(text, "pool_bytes: 16385 MiB are more than the 16384 MiB that this machine "
                              "has; lower pool_bytes, or set it to 0, and kvqd chooses");
}

PLAIN_TEST(test_tight)
{
    machine = without_groups;
    assert_false(kvq__machine_is_tight(&machine, "pool_bytes", 4096 * MIB, 0, text));
    assert_true(kvq__machine_is_tight(&machine, "pool_bytes", 4097 * MIB, 0, text));
    assert_string_equal(text, "pool_bytes allows 4097 MiB, and 4096 MiB are free here now; lower "
                              "it, or end what takes the rest before caches need it");
    assert_false(kvq__machine_is_tight(&machine, "pool_bytes", 4097 * MIB, MIB, text));
    machine.group_free = 10 * MIB;
    assert_true(kvq__machine_is_tight(&machine, "buffer_bytes", 11 * MIB, 0, text));
    assert_says(text, "10 MiB are free in the control group now");
    machine.free = machine.group_free = KVQ__UNKNOWN;
    assert_false(kvq__machine_is_tight(&machine, "pool_bytes", 16384 * MIB, 0, text));
}

PLAIN_TEST(test_promised_twice)
{
    (void)state;
    machine = without_groups;
    assert_false(kvq__machine_is_promised_twice(&machine, 8192 * MIB, 0, 8192 * MIB, text));
    assert_true(kvq__machine_is_promised_twice(&machine, 8193 * MIB, 0, 8192 * MIB, text));
    assert_non_null(strstr(text, "pool_bytes allows 8193 MiB and buffer_bytes 8192 MiB, together "
                                 "more than the 16384 MiB that the machine has"));
    assert_true(kvq__machine_is_promised_twice(&machine, 0, 0, UINT64_MAX, text));
    assert_true(kvq__machine_is_promised_twice(&machine, 8193 * MIB, MIB, 8192 * MIB, text));
    machine.group = 10 * MIB; // which huge pages that were set aside do not count in
    assert_true(kvq__machine_is_promised_twice(&machine, 8 * MIB, 0, 3 * MIB, text));
    assert_non_null(strstr(text, "10 MiB that the control group has"));
    assert_false(kvq__machine_is_promised_twice(&machine, 8 * MIB, MIB, 3 * MIB, text));
}

PLAIN_TEST(test_set_aside)
{
    struct kvq__memory_source source = {.huge = KVQ__HUGE_AUTO, .pool_bytes = 8 * KVQ__HUGE_PAGE};
    struct kvq__huge_counts counts = {.total = 9, .available = 5};
    assert_true(kvq__memory_set_aside(&source, &counts) == 5 * KVQ__HUGE_PAGE);
    counts.available = 9;
    assert_true(kvq__memory_set_aside(&source, &counts) == 8 * KVQ__HUGE_PAGE);
    source.transparent = true;
    assert_true(kvq__memory_set_aside(&source, &counts) == 0);
    source.huge = KVQ__HUGE_REQUIRE;
    assert_true(kvq__memory_set_aside(&source, &counts) == 8 * KVQ__HUGE_PAGE);
    source.huge = KVQ__HUGE_OFF;
    source.transparent = false;
    assert_true(kvq__memory_set_aside(&source, &counts) == 0);
}

int main(void)
{
    return run_all(NULL, NULL);
}
