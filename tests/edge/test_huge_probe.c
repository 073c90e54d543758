// SPDX-License-Identifier: Apache-2.0
//
// A control group may let the daemon map huge pages and give it none. An extent that is reserved
// for a session that is read from disk takes one page at once, so that this is known before anybody
// sees the session. Runs on any machine: here huge pages are small ones, and the test says what the
// system gives.
#include <errno.h>
#include <fcntl.h>

#include "daemon/log/log.h"
#include "daemon/runtime/memory.h"
#include "daemon/runtime/shm.h"
#include "tests/kits/unit.h"

enum { MIB = 1 << 20, EXTENT = 4 * MIB };

static int huge_fd; // of the last mapping of huge pages that was made
static bool gives;  // pages for it
static uint32_t asked;

int __wrap_kvq__shm_create_huge(struct kvq__shm *shm, const char *name, size_t bytes, char *why);

int __wrap_kvq__shm_create_huge(struct kvq__shm *shm, const char *name, size_t bytes, char *why)
{
    int rc = kvq__shm_create(shm, name, bytes, true, why);
    huge_fd = shm->fd;
    return rc;
}

int __real_fallocate(int fd, int mode, off_t at, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t at, off_t bytes);

int __wrap_fallocate(int fd, int mode, off_t at, off_t bytes)
{
    if (fd != huge_fd)
        return __real_fallocate(fd, mode, at, bytes);
    asked += bytes > 0;
    errno = ENOMEM;
    return gives ? 0 : -1;
}

static int reserve(enum kvq__huge_pages huge, struct kvq__memory *m)
{
    static struct kvq__memory_source source;
    source = (struct kvq__memory_source){.huge = huge, .pool_bytes = 64 * MIB};
    struct kvq__memory_ops ops = kvq__memory_ops(&source);
    huge_fd = -1;
    asked = 0;
    int rc = ops.reserve(ops.context, EXTENT, m);
    if (rc == 0)
        ops.release(ops.context, m);
    return rc;
}

PLAIN_TEST(test_a_page_is_taken_at_once)
{
    struct kvq__memory m;
    gives = true;
    assert_int_equal(reserve(KVQ__HUGE_AUTO, &m), 0);
    assert_true(m.huge);
    assert_int_equal(asked, 1);
}

// Small pages do, unless the configuration asks for huge ones.
PLAIN_TEST(test_mapped_and_none_given)
{
    struct kvq__memory m;
    gives = false;
    assert_int_equal(reserve(KVQ__HUGE_AUTO, &m), 0);
    assert_false(m.huge);
    assert_int_equal(asked, 1);
    assert_int_equal(fcntl(huge_fd, F_GETFD), -1); // nothing is left of what was mapped
    assert_int_equal(reserve(KVQ__HUGE_REQUIRE, &m), KVQ_E_NO_MEMORY);
    assert_int_equal(fcntl(huge_fd, F_GETFD), -1);
}

int main(void)
{
    kvq__log_open(NULL, KVQ_LOG_ERROR, NULL);
    return run_all(NULL, NULL);
}
