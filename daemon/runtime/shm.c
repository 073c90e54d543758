// SPDX-License-Identifier: Apache-2.0
//
// Creating, sealing and checking memfds; see shm.h.
#include "daemon/runtime/shm.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "proto/limits.h"
#include "proto/status.h"

#ifndef MFD_HUGE_2MB // in a header of the kernel that glibc's does not go with
#define MFD_HUGE_2MB (21u << 26)
#endif
#ifndef F_SEAL_FUTURE_WRITE // Linux 5.1; glibc headers of the time lacked it
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

void kvq__shm_close(struct kvq__shm *shm)
{
    assert(!shm->map || shm->bytes > 0);
    if (shm->map)
        munmap(shm->map, shm->bytes);
    if (shm->fd >= 0)
        close(shm->fd);
    *shm = (struct kvq__shm){.fd = -1};
}

static int fail_shm(struct kvq__shm *shm, const char *what, char *text)
{
    int code = errno == ENOMEM || errno == ENOSPC ? KVQ_E_NO_MEMORY : KVQ_E_SYSTEM;
    snprintf(text, KVQ_TEXT_BYTES, "cannot %s %zu bytes of shared memory: %s%s", what, shm->bytes,
             strerror(errno),
             errno == EMFILE ? "; raise the daemon's limit of open files (LimitNOFILE=)" : "");
    kvq__shm_close(shm);
    return code;
}

static int create_shm(struct kvq__shm *shm, const char *name, size_t bytes, unsigned flags,
                      bool read_only, char *text)
{
    assert(bytes > 0);
    // Adding the last seal in the same call is what nobody can take back.
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (read_only ? F_SEAL_FUTURE_WRITE : 0);
    *shm = (struct kvq__shm){.fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags),
                             .bytes = bytes};
    if (shm->fd < 0)
        return fail_shm(shm, "create", text);
    if (ftruncate(shm->fd, (off_t)bytes) != 0)
        return fail_shm(shm, "reserve", text);
    // Our own mapping comes before the seal against writing: it stays writable.
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shm->fd, 0);
    if (map == MAP_FAILED)
        return fail_shm(shm, "map", text);
    shm->map = map;
    if (fcntl(shm->fd, F_ADD_SEALS, seals) != 0)
        return fail_shm(shm, "seal", text);
    return 0;
}

int kvq__shm_create(struct kvq__shm *shm, const char *name, size_t bytes, bool read_only,
                    char *text)
{
    return create_shm(shm, name, bytes, 0, read_only, text);
}

int kvq__shm_create_huge(struct kvq__shm *shm, const char *name, size_t bytes, char *text)
{
    return create_shm(shm, name, bytes, MFD_HUGETLB | MFD_HUGE_2MB, true, text);
}

static int refuse_shm(char *text, const char *why)
{
    snprintf(text, KVQ_TEXT_BYTES, "%s", why);
    return KVQ_E_BUFFER;
}

// Pages of other files could vanish in use (a truncation, a punched hole where huge pages have
// run out), and touching them would then kill the daemon.
static int check_seals(int fd, char *text)
{
    struct statfs fs;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return refuse_shm(text, "the descriptor is not a memfd; make one with memfd_create(name, "
                                "MFD_ALLOW_SEALING)");
    if (!(seals & F_SEAL_SHRINK))
        return refuse_shm(text, "the memfd is not sealed against shrinking; add F_SEAL_SHRINK with "
                                "fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)");
    if (fstatfs(fd, &fs) != 0 || fs.f_type != TMPFS_MAGIC)
        return refuse_shm(text, "a memfd of huge pages cannot be imported; make it without "
                                "MFD_HUGETLB");
    return 0;
}

int kvq__shm_import(struct kvq__shm *shm, int fd, uint64_t offset, uint64_t bytes, char *text)
{
    struct stat st;
    *shm = (struct kvq__shm){.fd = -1, .bytes = bytes};
    int error = check_seals(fd, text);
    if (error)
        return error;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (bytes == 0 || bytes > KVQ_MAX_BUFFER_BYTES || offset % page || offset > INT64_MAX - bytes) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "%llu bytes at offset %llu: the size must be 1 to %llu and the offset a "
                 "multiple of %llu",
                 (unsigned long long)bytes, (unsigned long long)offset, KVQ_MAX_BUFFER_BYTES,
                 (unsigned long long)page);
        return KVQ_E_INVALID;
    }
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < offset + bytes) {
        snprintf(text, KVQ_TEXT_BYTES,
                 "the memfd is %lld bytes long; %llu from offset %llu end "
                 "behind it",
                 (long long)st.st_size, (unsigned long long)bytes, (unsigned long long)offset);
        return KVQ_E_BUFFER;
    }
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (map == MAP_FAILED) {
        snprintf(text, KVQ_TEXT_BYTES, "cannot map the memfd for reading and writing: %s%s",
                 strerror(errno),
                 errno == EPERM || errno == EACCES
                     ? "; it must be open for writing and not sealed against it"
                     : "");
        return KVQ_E_BUFFER;
    }
    shm->map = map;
    return 0;
}
