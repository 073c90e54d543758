// SPDX-License-Identifier: Apache-2.0
//
// Extents: small pages, huge pages that were set aside, and what happens when these run out. The
// tests that need some use what is free, or with KVQ_TEST_SYSCTL=1 set vm.nr_hugepages for their
// time; else they are skipped.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "daemon/log/log.h"
#include "daemon/runtime/memory.h"
#include "daemon/runtime/shm.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, EXTENT = 4 * MIB, NEEDED = 4 };

static const char sysctl[] = "/proc/sys/vm/nr_hugepages";
static char text[KVQ_TEXT_BYTES];
static uint64_t before;
static bool changed;

static void set_pages(uint64_t n)
{
    char number[32];
    int fd = open(sysctl, O_WRONLY | O_CLOEXEC);
    int length = snprintf(number, sizeof number, "%llu\n", (unsigned long long)n);
    if (fd >= 0 && write(fd, number, (size_t)length) != length)
        print_message("cannot write %s\n", sysctl);
    if (fd >= 0)
        close(fd);
}

static struct kvq__memory_ops ops_of(struct kvq__memory_source *source, enum kvq__huge_pages huge,
                                     bool transparent)
{
    *source = (struct kvq__memory_source){
        .huge = huge, .transparent = transparent, .pool_bytes = 64 * MIB};
    return kvq__memory_ops(source);
}

// What every extent must be, however it was got.
static void check_extent(const struct kvq__memory *m)
{
    struct stat st;
    struct statfs fs;
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    assert_int_equal(m->bytes, EXTENT);
    assert_int_equal(fstat(m->fd, &st), 0);
    assert_int_equal(fstatfs(m->fd, &fs), 0);
    assert_int_equal(st.st_size, EXTENT);
    assert_int_equal(st.st_blocks, EXTENT / 512); // all pages are there
    assert_int_equal(fs.f_type, m->huge ? HUGETLBFS_MAGIC : TMPFS_MAGIC);
    assert_int_equal(fcntl(m->fd, F_GET_SEALS) & seals, seals);
    assert_int_equal(ftruncate(m->fd, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal((uintptr_t)m->base % (m->huge ? KVQ__HUGE_PAGE : 4096), 0);
    for (size_t i = 0; i < m->bytes; i += 512)
        assert_int_equal(m->base[i], 0);
    // As a client maps it.
    const uint8_t *theirs = mmap(NULL, m->bytes, PROT_READ, MAP_SHARED, m->fd, 0);
    assert_true(theirs != MAP_FAILED);
    m->base[0] = 1, m->base[m->bytes - 1] = 2;
    assert_int_equal(theirs[0], 1);
    assert_int_equal(theirs[m->bytes - 1], 2);
    assert_int_equal(munmap((void *)(uintptr_t)theirs, m->bytes), 0);
}

PLAIN_TEST(test_small)
{
    struct kvq__memory_source source;
    struct kvq__memory m;
    for (int i = 0; i < 2; i++) {
        // Where the kernel gives huge pages by itself none are taken from those set aside.
        struct kvq__memory_ops ops =
            i ? ops_of(&source, KVQ__HUGE_AUTO, true) : ops_of(&source, KVQ__HUGE_OFF, false);
        assert_int_equal(ops.acquire(ops.context, EXTENT, &m), 0);
        assert_false(m.huge);
        check_extent(&m);
        ops.zero(ops.context, &m);
        check_extent(&m);
        ops.release(ops.context, &m);
        assert_false(source.told);
    }
}

// What is only reserved has no pages; then it has those that were asked for, and in the end all.
static void check_reserved(const struct kvq__memory_ops *ops, struct kvq__memory *m)
{
    struct stat st;
    const blkcnt_t page = m->huge ? KVQ__HUGE_PAGE : 4096;
    assert_int_equal(fstat(m->fd, &st), 0);
    assert_int_equal(st.st_blocks, 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ops->back(m, (uint64_t)page + 64, 64), 0);
        assert_int_equal(fstat(m->fd, &st), 0);
        assert_int_equal(st.st_blocks, page / 512);
    }
    assert_int_equal(ops->back(m, (uint64_t)page - 64, 128), 0);
    assert_int_equal(fstat(m->fd, &st), 0);
    assert_int_equal(st.st_blocks, 2 * page / 512);
    assert_int_equal(ops->back(m, 0, m->bytes), 0);
    check_extent(m);
}

PLAIN_TEST(test_reserved)
{
    struct kvq__memory_source source;
    struct kvq__memory m;
    struct kvq__memory_ops ops = ops_of(&source, KVQ__HUGE_OFF, false);
    assert_int_equal(ops.reserve(ops.context, EXTENT, &m), 0);
    check_reserved(&ops, &m);
    ops.release(ops.context, &m);
}

PLAIN_TEST(test_check)
{
    struct kvq__memory_source source = {.pool_bytes = 64 * MIB, .huge = KVQ__HUGE_REQUIRE};
    struct kvq__huge_counts counts = {.total = 40, .available = 31};
    assert_int_equal(kvq__memory_check(&source, &counts, text), KVQ_E_NO_MEMORY);
    assert_says(text, "the pool of 64 MiB needs 32 huge pages of 2 MiB, and 31 are");
    assert_says(text, "set vm.nr_hugepages to 41");
    counts.available = 32;
    assert_int_equal(kvq__memory_check(&source, &counts, text), 0);
    counts.available = 0;
    source.huge = KVQ__HUGE_AUTO;
    assert_int_equal(kvq__memory_check(&source, &counts, text), 0);
}

// True, and said, if the tests that follow cannot be run.
static bool lacks_pages(void)
{
    struct kvq__huge_counts counts = kvq__huge_counts();
    if (counts.available >= NEEDED)
        return false;
    print_message("SKIPPED: %llu huge pages are available and %d are needed; set "
                  "vm.nr_hugepages, or KVQ_TEST_SYSCTL=1 as root\n",
                  (unsigned long long)counts.available, NEEDED);
    return true;
}

PLAIN_TEST(test_huge)
{
    struct kvq__memory_source source;
    struct kvq__memory m;
    if (lacks_pages())
        skip();
    for (int i = 0; i < 2; i++) {
        struct kvq__memory_ops ops =
            ops_of(&source, i ? KVQ__HUGE_REQUIRE : KVQ__HUGE_AUTO, i != 0);
        assert_int_equal(ops.acquire(ops.context, EXTENT, &m), 0);
        assert_true(m.huge);
        check_extent(&m);
        ops.zero(ops.context, &m); // and its pages stay its own
        check_extent(&m);
        uint64_t available = kvq__huge_counts().available;
        ops.release(ops.context, &m);
        available += EXTENT / KVQ__HUGE_PAGE;
        assert_int_equal(kvq__huge_counts().available, available);
        // Those that are reserved cannot run out.
        assert_int_equal(ops.reserve(ops.context, EXTENT, &m), 0);
        assert_int_equal(kvq__huge_counts().available, available - EXTENT / KVQ__HUGE_PAGE);
        check_reserved(&ops, &m);
        ops.release(ops.context, &m);
        assert_int_equal(kvq__huge_counts().available, available);
        assert_false(source.told);
    }
}

// Takes all there are: then small ones are given and it is said once, or none.
PLAIN_TEST(test_run_out)
{
    enum { MOST = 512 };
    static struct kvq__memory m[MOST];
    struct kvq__memory_source source, strict;
    struct kvq__memory_ops ops = ops_of(&source, KVQ__HUGE_AUTO, false);
    struct kvq__memory_ops require = ops_of(&strict, KVQ__HUGE_REQUIRE, false);
    struct kvq__memory none;
    int n = 0;
    if (lacks_pages() || kvq__huge_counts().available > MOST)
        skip();
    uint64_t available = kvq__huge_counts().available;
    do
        assert_int_equal(ops.acquire(ops.context, EXTENT, &m[n++]), 0);
    while (m[n - 1].huge && n < MOST);
    assert_int_equal(n - 1, available / (EXTENT / KVQ__HUGE_PAGE));
    assert_true(source.told);
    check_extent(&m[n - 1]);
    assert_int_equal(require.acquire(require.context, EXTENT, &none), KVQ_E_NO_MEMORY);
    while (n > 0)
        ops.release(ops.context, &m[--n]);
    assert_int_equal(kvq__huge_counts().available, available); // what failed left nothing behind
    assert_int_equal(require.acquire(require.context, EXTENT, &none), 0);
    require.release(require.context, &none);
}

// Without any, a session's first extent is small, and how to change that is logged.
PLAIN_TEST(test_told_once)
{
    char path[] = "/tmp/kvq-huge-XXXXXX", log[4096] = "";
    struct kvq__memory_source source;
    struct kvq__memory_ops ops = ops_of(&source, KVQ__HUGE_AUTO, false);
    struct kvq__memory m[2];
    int fd = mkstemp(path);
    // More than any machine has set aside.
    const size_t bytes = (size_t)(kvq__huge_counts().available + 1) * KVQ__HUGE_PAGE;
    if (bytes > 256 * MIB)
        skip();
    assert_int_equal(kvq__log_open(path, KVQ_LOG_INFO, text), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ops.acquire(ops.context, bytes, &m[i]), 0);
        assert_false(m[i].huge);
    }
    kvq__log_close();
    assert_true(read(fd, log, sizeof log - 1) > 0);
    char *line = strstr(log, "event=small_pages");
    assert_non_null(line);
    assert_null(strstr(line + 1, "event=small_pages"));
    assert_says(line, "pool_needs=32");
    assert_says(line, "sysctl vm.nr_hugepages=");
    for (int i = 0; i < 2; i++)
        ops.release(ops.context, &m[i]);
    close(fd);
    unlink(path);
}

static int set_up(void **state)
{
    const char *may = getenv("KVQ_TEST_SYSCTL");
    struct kvq__huge_counts counts = kvq__huge_counts();
    before = counts.total;
    changed = may && strcmp(may, "1") == 0 && counts.available < NEEDED;
    if (changed)
        set_pages(before + NEEDED);
    return 0;
}

static int tear_down(void **state)
{
    if (changed)
        set_pages(before);
    return 0;
}

int main(void)
{
    int failed = run_all(set_up, tear_down);
    return failed ? failed : !changed && lacks_pages() ? 77 : 0;
}
