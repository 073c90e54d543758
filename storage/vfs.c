// SPDX-License-Identifier: Apache-2.0
//
// The methods that SQLite calls, each a few lines over the table of I/O functions.
#include "storage/vfs.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

struct vfs_file {
    sqlite3_file base; // first: SQLite knows only this
    struct kvq_io *io;
    int file;         // -1: an empty one that cannot be made
    bool created;     // its name is not durable before the folder is synced
    const char *path; // SQLite keeps the memory until the file is closed
    enum kvq__vfs_kind kind;
    struct kvq__vfs_held *held; // NULL: nothing is held for files of that kind
    bool remove;                // when it is closed
};

static struct vfs_file *file_of(sqlite3_file *base)
{
    return (struct vfs_file *)base;
}

static struct kvq_io *io_of(sqlite3_vfs *vfs)
{
    return ((struct kvq__vfs *)vfs->pAppData)->io;
}

// ---- Files ----

static int file_close(sqlite3_file *base)
{
    struct vfs_file *f = file_of(base);
    assert(!f->held || f->held->file == f->file);
    if (f->held)
        *f->held = (struct kvq__vfs_held){.file = -1};
    if (f->file >= 0)
        f->io->close(f->io, f->file);
    if (f->remove)
        (void)kvq_io_unlink(f->io, f->path);
    return SQLITE_OK;
}

static int file_read(sqlite3_file *base, void *data, int n, sqlite3_int64 at)
{
    struct vfs_file *f = file_of(base);
    size_t got = 0;
    int rc = f->file < 0 ? 0 : kvq_io_read(f->io, f->file, data, (size_t)n, (uint64_t)at, &got);
    if (rc)
        return SQLITE_IOERR_READ;
    if (got == (size_t)n)
        return SQLITE_OK;
    memset((char *)data + got, 0, (size_t)n - got); // SQLite relies on it
    return SQLITE_IOERR_SHORT_READ;
}

static int file_write(sqlite3_file *base, const void *data, int n, sqlite3_int64 at)
{
    struct vfs_file *f = file_of(base);
    assert(f->file >= 0);
    int rc = kvq_io_write(f->io, f->file, data, (size_t)n, (uint64_t)at);
    return rc == 0 ? SQLITE_OK : kvq_io_is_full(rc) ? SQLITE_FULL : SQLITE_IOERR_WRITE;
}

// A WAL without a sound header is an empty one, whatever stands behind it.
static int empty_wal(struct vfs_file *f)
{
    static const uint8_t zeros[32]; // the size of a header
    return kvq_io_write(f->io, f->file, zeros, sizeof zeros, 0);
}

// Truncates, but keeps the space that is held.
static int truncate_held(struct vfs_file *f, uint64_t bytes)
{
    struct kvq__vfs_held *held = f->held;
    struct kvq_io_status status;
    assert(f->file >= 0 && held->file == f->file);
    int rc = kvq_io_status(f->io, f->file, &status);
    if (rc || status.bytes == bytes)
        return rc;
    if (f->kind == KVQ__VFS_WAL && bytes < held->bytes) {
        rc = bytes == 0 && status.bytes > 0 ? empty_wal(f) : 0;
        if (rc == 0 && status.bytes > held->bytes)
            rc = kvq_io_truncate(f->io, f->file, held->bytes);
        return rc;
    }
    rc = kvq_io_truncate(f->io, f->file, bytes);
    if (rc == 0 && bytes < held->bytes && kvq_io_allocate(f->io, f->file, held->bytes))
        held->bytes = bytes;
    return rc;
}

static int file_truncate(sqlite3_file *base, sqlite3_int64 bytes)
{
    struct vfs_file *f = file_of(base);
    int rc = f->held ? truncate_held(f, (uint64_t)bytes)
                     : kvq_io_truncate(f->io, f->file, (uint64_t)bytes);
    return rc ? SQLITE_IOERR_TRUNCATE : SQLITE_OK;
}

static int file_sync(sqlite3_file *base, int flags)
{
    (void)flags;
    struct vfs_file *f = file_of(base);
    if (kvq_io_sync(f->io, f->file))
        return SQLITE_IOERR_FSYNC;
    if (f->created && kvq_io_sync_parent(f->io, f->path))
        return SQLITE_IOERR_DIR_FSYNC;
    f->created = false;
    return SQLITE_OK;
}

static int file_size(sqlite3_file *base, sqlite3_int64 *bytes)
{
    struct vfs_file *f = file_of(base);
    struct kvq_io_status status = {0};
    if (f->file >= 0 && kvq_io_status(f->io, f->file, &status))
        return SQLITE_IOERR_FSTAT;
    *bytes = (sqlite3_int64)status.bytes;
    return SQLITE_OK;
}

// The store's own lock stands for all of SQLite's.
static int file_lock(sqlite3_file *base, int level)
{
    (void)base;
    (void)level;
    return SQLITE_OK;
}

static int file_reserved(sqlite3_file *base, int *held)
{
    (void)base;
    *held = 0;
    return SQLITE_OK;
}

static int file_control(sqlite3_file *base, int operation, void *argument)
{
    (void)base;
    if (operation != SQLITE_FCNTL_PERSIST_WAL)
        return SQLITE_NOTFOUND;
    *(int *)argument = 1;
    return SQLITE_OK;
}

static int file_sector(sqlite3_file *base)
{
    (void)base;
    return KVQ_IO_PAGE;
}

// A write that is cut short leaves the bytes around it alone. Without that promise SQLite pads a
// commit with more frames behind it, and a disk that is full just then leaves a commit in the WAL
// that SQLite has reported as failed.
static int file_traits(sqlite3_file *base)
{
    (void)base;
    return SQLITE_IOCAP_POWERSAFE_OVERWRITE;
}

static const sqlite3_io_methods methods = {
    .iVersion = 1,
    .xClose = file_close,
    .xRead = file_read,
    .xWrite = file_write,
    .xTruncate = file_truncate,
    .xSync = file_sync,
    .xFileSize = file_size,
    .xLock = file_lock,
    .xUnlock = file_lock,
    .xCheckReservedLock = file_reserved,
    .xFileControl = file_control,
    .xSectorSize = file_sector,
    .xDeviceCharacteristics = file_traits,
};

// ---- Names ----

// What cannot be opened to be written is opened to be read, if the file system says so.
static bool open_read_only(struct vfs_file *f, const char *path, int *flags)
{
    f->created = false;
    f->file = kvq_io_open(f->io, path, KVQ_IO_READ);
    if (f->file < 0 && (f->file != -ENOENT || !(*flags & SQLITE_OPEN_WAL)))
        return false;
    *flags = (*flags & ~(SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE)) | SQLITE_OPEN_READONLY;
    return true;
}

static int vfs_open(sqlite3_vfs *vfs, const char *path, sqlite3_file *base, int flags, int *given)
{
    struct vfs_file *f = file_of(base);
    memset(f, 0, sizeof *f);
    if (!path) // a temporary file; the connection keeps these in memory
        return SQLITE_CANTOPEN;
    struct kvq__vfs *v = vfs->pAppData;
    f->io = v->io;
    f->path = path;
    f->kind = flags & SQLITE_OPEN_MAIN_DB ? KVQ__VFS_DATABASE
              : flags & SQLITE_OPEN_WAL   ? KVQ__VFS_WAL
                                          : KVQ__VFS_OTHER;
    f->remove = flags & SQLITE_OPEN_DELETEONCLOSE;
    unsigned how = flags & SQLITE_OPEN_READWRITE ? KVQ_IO_WRITE : KVQ_IO_READ;
    f->file = v->read_only ? -EROFS : kvq_io_open(f->io, path, how);
    if (f->file == -ENOENT && flags & SQLITE_OPEN_CREATE) {
        f->file = kvq_io_open(f->io, path, how | KVQ_IO_CREATE);
        f->created = true;
    }
    bool opened = f->file >= 0 || (f->file == -EROFS && open_read_only(f, path, &flags));
    if (!opened)
        return kvq_io_is_full(f->file) ? SQLITE_FULL : SQLITE_CANTOPEN;
    f->base.pMethods = &methods;
    if (f->kind != KVQ__VFS_OTHER && flags & SQLITE_OPEN_READWRITE) {
        f->held = &v->held[f->kind];
        assert(f->held->file < 0); // one connection opens each of them once
        *f->held = (struct kvq__vfs_held){.file = f->file};
    }
    if (given)
        *given = flags;
    return SQLITE_OK;
}

static int vfs_delete(sqlite3_vfs *vfs, const char *path, int sync)
{
    int rc = kvq_io_unlink(io_of(vfs), path);
    if (rc == -ENOENT)
        return SQLITE_IOERR_DELETE_NOENT;
    if (rc)
        return SQLITE_IOERR_DELETE;
    return sync && kvq_io_sync_parent(io_of(vfs), path) ? SQLITE_IOERR_DIR_FSYNC : SQLITE_OK;
}

static int vfs_access(sqlite3_vfs *vfs, const char *path, int flags, int *yes)
{
    (void)flags;
    struct kvq_io *io = io_of(vfs);
    struct kvq_io_status status = {0};
    int file = kvq_io_open(io, path, KVQ_IO_READ), rc = file < 0 ? file : 0;
    if (file >= 0) {
        rc = kvq_io_status(io, file, &status);
        io->close(io, file);
    }
    *yes = status.bytes > 0; // an empty file is none, as for SQLite's own
    return rc && rc != -ENOENT ? SQLITE_IOERR_ACCESS : SQLITE_OK;
}

static int vfs_path(sqlite3_vfs *vfs, const char *path, int room, char *out)
{
    (void)vfs;
    int n = snprintf(out, (size_t)room, "%s", path);
    return n < 0 || n >= room ? SQLITE_CANTOPEN : SQLITE_OK;
}

static int vfs_random(sqlite3_vfs *vfs, int n, char *out)
{
    struct kvq_io *io = io_of(vfs);
    return kvq_io_random(io, out, (size_t)n) ? 0 : n;
}

static int vfs_sleep(sqlite3_vfs *vfs, int microseconds)
{
    (void)vfs;
    return microseconds; // only who waits for another connection sleeps, and there is none
}

static int vfs_time(sqlite3_vfs *vfs, double *days)
{
    (void)vfs;
    *days = 2440587.5; // 1970: no query asks for the time
    return SQLITE_OK;
}

static int vfs_error(sqlite3_vfs *vfs, int n, char *out)
{
    (void)vfs;
    (void)n;
    (void)out;
    return 0;
}

int kvq__vfs_add(struct kvq__vfs *v, struct kvq_io *io, bool read_only)
{
    assert(io && !v->vfs.zName);
    snprintf(v->name, sizeof v->name, "kvq-%p", (void *)v);
    v->io = io;
    v->read_only = read_only;
    for (int i = 0; i < KVQ__VFS_OTHER; i++)
        v->held[i] = (struct kvq__vfs_held){.file = -1};
    v->vfs = (sqlite3_vfs){
        .iVersion = 1,
        .szOsFile = sizeof(struct vfs_file),
        .mxPathname = 2048,
        .zName = v->name,
        .pAppData = v,
        .xOpen = vfs_open,
        .xDelete = vfs_delete,
        .xAccess = vfs_access,
        .xFullPathname = vfs_path,
        .xRandomness = vfs_random,
        .xSleep = vfs_sleep,
        .xCurrentTime = vfs_time,
        .xGetLastError = vfs_error,
    };
    return sqlite3_vfs_register(&v->vfs, 0);
}

int kvq__vfs_hold(struct kvq__vfs *v, enum kvq__vfs_kind kind, uint64_t bytes)
{
    assert(kind < KVQ__VFS_OTHER);
    struct kvq__vfs_held *held = &v->held[kind];
    if (held->file < 0 || bytes <= held->bytes)
        return 0;
    int rc = kvq_io_allocate(v->io, held->file, bytes);
    if (rc == 0)
        held->bytes = bytes;
    return rc == -EOPNOTSUPP ? 0 : rc;
}

void kvq__vfs_remove(struct kvq__vfs *v)
{
    if (v->vfs.zName)
        (void)sqlite3_vfs_unregister(&v->vfs);
    v->vfs.zName = NULL;
}
