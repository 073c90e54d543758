// SPDX-License-Identifier: Apache-2.0
//
// The table of I/O functions over Linux. It holds no state: a handle is a file descriptor.
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "storage/io.h"

static int result(int value)
{
    assert(value >= 0 || errno > 0);
    return value < 0 ? -errno : value;
}

static int posix_open(struct kvq_io *io, const char *path, unsigned flags)
{
    (void)io;
    int how = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (flags & KVQ_IO_WRITE ? O_RDWR : O_RDONLY);
    if (flags & (KVQ_IO_CREATE | KVQ_IO_NEW))
        how |= O_CREAT;
    if (flags & KVQ_IO_NEW)
        how |= O_EXCL;
    int file = result(open(path, how | (flags & KVQ_IO_DIRECT ? O_DIRECT : 0), 0600));
    if (file == -EINVAL && flags & KVQ_IO_DIRECT) // the file may be made already; open takes it
        file = result(open(path, how & ~O_EXCL, 0600));
    return file;
}

static void posix_close(struct kvq_io *io, int file)
{
    (void)io;
    close(file);
}

static int64_t posix_read(struct kvq_io *io, int file, void *data, size_t n, uint64_t at)
{
    (void)io;
    ssize_t some = pread(file, data, n, (off_t)at);
    return some < 0 ? -errno : some;
}

static int64_t posix_write(struct kvq_io *io, int file, const void *data, size_t n, uint64_t at)
{
    (void)io;
    ssize_t some = pwrite(file, data, n, (off_t)at);
    return some < 0 ? -errno : some;
}

static int posix_sync(struct kvq_io *io, int file)
{
    (void)io;
    return result(fdatasync(file));
}

static int posix_truncate(struct kvq_io *io, int file, uint64_t bytes)
{
    (void)io;
    return result(ftruncate(file, (off_t)bytes));
}

static int posix_allocate(struct kvq_io *io, int file, uint64_t bytes)
{
    (void)io;
    return result(fallocate(file, FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes));
}

static void posix_will_read(struct kvq_io *io, int file, uint64_t at, uint64_t n)
{
    // Of one call Linux reads no more than what it would read ahead by itself.
    enum { STEP = 128 << 10 };
    (void)io;
    for (uint64_t done = 0; done < n; done += STEP)
        (void)posix_fadvise(file, (off_t)(at + done), n - done < STEP ? (off_t)(n - done) : STEP,
                            POSIX_FADV_WILLNEED);
}

static int posix_status(struct kvq_io *io, int file, struct kvq_io_status *status)
{
    (void)io;
    struct stat st;
    if (fstat(file, &st) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode))
        return -EINVAL;
    status->bytes = (uint64_t)st.st_size;
    status->physical = (uint64_t)st.st_blocks * 512;
    return 0;
}

static int posix_lock(struct kvq_io *io, int file)
{
    (void)io;
    return result(flock(file, LOCK_EX | LOCK_NB));
}

static int posix_rename(struct kvq_io *io, const char *from, const char *to)
{
    (void)io;
    return result(rename(from, to));
}

// Where a file system has no such rename, by a second name; where it has no second names either, by
// taking the place first, which a process that is killed leaves empty.
static int posix_rename_new(struct kvq_io *io, const char *from, const char *to)
{
    (void)io;
    int rc = result(renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE));
    if (rc != -EINVAL && rc != -ENOSYS)
        return rc;
    rc = result(link(from, to));
    if (rc == 0) {
        rc = result(unlink(from));
        if (rc)
            (void)unlink(to);
        return rc;
    }
    if (rc != -EPERM && rc != -EOPNOTSUPP && rc != -ENOSYS)
        return rc;
    int place = result(open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (place < 0)
        return place;
    close(place);
    rc = result(rename(from, to));
    if (rc)
        (void)unlink(to);
    return rc;
}

static int posix_unlink(struct kvq_io *io, const char *path)
{
    (void)io;
    return result(unlink(path));
}

static int posix_make_dir(struct kvq_io *io, const char *path)
{
    (void)io;
    return result(mkdir(path, 0700));
}

static int posix_sync_dir(struct kvq_io *io, const char *path)
{
    (void)io;
    int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return -errno;
    int rc = result(fsync(dir));
    close(dir);
    return rc;
}

static int posix_list(struct kvq_io *io, const char *path,
                      int (*each)(void *context, const char *name), void *context)
{
    (void)io;
    DIR *dir;
    do
        dir = opendir(path);
    while (!dir && errno == EINTR);
    if (!dir)
        return -errno;
    int rc = 0;
    struct dirent *entry = NULL;
    do {
        errno = 0;
        entry = readdir(dir);
        if (!entry)
            rc = -errno;
        else if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            rc = each(context, entry->d_name);
    } while (entry && rc == 0);
    closedir(dir);
    return rc;
}

static int posix_space(struct kvq_io *io, const char *path, uint64_t *free_bytes)
{
    (void)io;
    struct statvfs st;
    if (statvfs(path, &st) < 0)
        return -errno;
    *free_bytes = (uint64_t)st.f_bavail * st.f_frsize;
    return 0;
}

static int posix_random(struct kvq_io *io, void *data, size_t n)
{
    (void)io;
    assert(n <= 256); // so many are given at once
    ssize_t got = getrandom(data, n, 0);
    return got == (ssize_t)n ? 0 : got < 0 ? -errno : -EINTR;
}

void *kvq_io_memory(size_t n)
{
    enum { HUGE = 2 << 20 };
    assert(n > 0 && n % KVQ_IO_PAGE == 0);
    if (n < HUGE)
        return aligned_alloc(KVQ_IO_PAGE, n);
    n = (n + HUGE - 1) / HUGE * HUGE;
    void *memory = aligned_alloc(HUGE, n);
    if (memory)
        (void)madvise(memory, n, MADV_HUGEPAGE);
    return memory;
}

struct kvq_io *kvq_io_posix(void)
{
    static struct kvq_io io = {
        .open = posix_open,
        .close = posix_close,
        .read = posix_read,
        .write = posix_write,
        .sync = posix_sync,
        .truncate = posix_truncate,
        .allocate = posix_allocate,
        .will_read = posix_will_read,
        .status = posix_status,
        .lock = posix_lock,
        .rename = posix_rename,
        .rename_new = posix_rename_new,
        .unlink = posix_unlink,
        .make_dir = posix_make_dir,
        .sync_dir = posix_sync_dir,
        .list = posix_list,
        .space = posix_space,
        .random = posix_random,
    };
    return &io;
}
