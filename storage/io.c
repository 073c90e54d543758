// SPDX-License-Identifier: Apache-2.0
//
// Calls through the table of I/O functions, with interruptions and short transfers dealt with.
#include "storage/io.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

// The call again for as long as it is interrupted.
#define PERSIST(result, call)                                                                      \
    do                                                                                             \
        (result) = (call);                                                                         \
    while ((result) == -EINTR)

int kvq_io_open(struct kvq_io *io, const char *path, unsigned flags)
{
    int file;
    PERSIST(file, io->open(io, path, flags));
    return file;
}

int kvq_io_read(struct kvq_io *io, int file, void *data, size_t n, uint64_t at, size_t *got)
{
    size_t done = 0;
    assert(file >= 0);
    int64_t some = 1;
    while (done < n && some > 0) {
        PERSIST(some, io->read(io, file, (char *)data + done, n - done, at + done));
        assert(some <= (int64_t)(n - done));
        if (some > 0)
            done += (size_t)some;
    }
    if (got)
        *got = done;
    return some < 0 ? (int)some : 0;
}

int kvq_io_write(struct kvq_io *io, int file, const void *data, size_t n, uint64_t at)
{
    size_t done = 0;
    assert(file >= 0);
    while (done < n) {
        int64_t some;
        PERSIST(some, io->write(io, file, (const char *)data + done, n - done, at + done));
        assert(some <= (int64_t)(n - done));
        if (some <= 0)
            return some < 0 ? (int)some : -EIO;
        done += (size_t)some;
    }
    return 0;
}

int kvq_io_sync(struct kvq_io *io, int file)
{
    assert(file >= 0);
    int rc;
    PERSIST(rc, io->sync(io, file));
    return rc;
}

int kvq_io_truncate(struct kvq_io *io, int file, uint64_t bytes)
{
    assert(file >= 0);
    int rc;
    PERSIST(rc, io->truncate(io, file, bytes));
    return rc;
}

int kvq_io_allocate(struct kvq_io *io, int file, uint64_t bytes)
{
    assert(file >= 0);
    int rc;
    PERSIST(rc, io->allocate(io, file, bytes));
    return rc;
}

int kvq_io_status(struct kvq_io *io, int file, struct kvq_io_status *status)
{
    assert(file >= 0);
    int rc;
    PERSIST(rc, io->status(io, file, status));
    return rc;
}

int kvq_io_lock(struct kvq_io *io, int file)
{
    assert(file >= 0);
    int rc;
    PERSIST(rc, io->lock(io, file));
    return rc;
}

int kvq_io_unlink(struct kvq_io *io, const char *path)
{
    int rc;
    PERSIST(rc, io->unlink(io, path));
    return rc;
}

int kvq_io_rename(struct kvq_io *io, const char *from, const char *to)
{
    int rc;
    PERSIST(rc, io->rename(io, from, to));
    return rc;
}

int kvq_io_rename_new(struct kvq_io *io, const char *from, const char *to)
{
    int rc;
    PERSIST(rc, io->rename_new(io, from, to));
    return rc;
}

int kvq_io_sync_dir(struct kvq_io *io, const char *path)
{
    int rc;
    PERSIST(rc, io->sync_dir(io, path));
    return rc;
}

int kvq_io_make_dir(struct kvq_io *io, const char *path)
{
    int rc;
    PERSIST(rc, io->make_dir(io, path));
    return rc;
}

int kvq_io_space(struct kvq_io *io, const char *path, uint64_t *free_bytes)
{
    int rc;
    PERSIST(rc, io->space(io, path, free_bytes));
    return rc;
}

int kvq_io_random(struct kvq_io *io, void *data, size_t n)
{
    assert(n > 0);
    int rc;
    PERSIST(rc, io->random(io, data, n));
    return rc;
}

int kvq_io_sync_parent(struct kvq_io *io, const char *path)
{
    char folder[4096];
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    while (n > 0 && path[n - 1] != '/')
        n--;
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n >= sizeof folder)
        return -ENAMETOOLONG;
    snprintf(folder, sizeof folder, "%.*s", n ? (int)n : 1, n ? path : ".");
    return kvq_io_sync_dir(io, folder);
}

static int write_new_file(struct kvq_io *io, const char *path, const void *data, size_t n)
{
    int rc = kvq_io_unlink(io, path); // of a process that was killed
    int file = rc && rc != -ENOENT ? rc : kvq_io_open(io, path, KVQ_IO_WRITE | KVQ_IO_NEW);
    if (file < 0)
        return file;
    rc = kvq_io_write(io, file, data, n, 0);
    rc = rc ? rc : kvq_io_sync(io, file);
    io->close(io, file);
    return rc;
}

int kvq_io_replace(struct kvq_io *io, const char *path, const void *data, size_t n, bool *placed)
{
    char fresh[4096];
    *placed = false;
    if ((size_t)snprintf(fresh, sizeof fresh, "%s.new", path) >= sizeof fresh)
        return -ENAMETOOLONG;
    int rc = write_new_file(io, fresh, data, n);
    rc = rc ? rc : kvq_io_rename(io, fresh, path);
    *placed = rc == 0;
    if (rc)
        (void)kvq_io_unlink(io, fresh);
    return rc ? rc : kvq_io_sync_parent(io, path);
}

bool kvq_io_is_full(int error)
{
    return error == -ENOSPC || error == -EDQUOT;
}
