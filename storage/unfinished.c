// SPDX-License-Identifier: Apache-2.0
//
// Files that get their name when they are whole: see unfinished.h.
#include "storage/unfinished.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/status.h"

enum { TRIES = 16 };

// Files of exports to one path that are not finished.
struct unfinished {
    struct kvq_io *io;
    const char *path, *base; // its last name
};

static bool is_unfinished(const struct unfinished *u, const char *name)
{
    char end[32];
    unsigned long long number;
    size_t n = strlen(u->base);
    if (strncmp(name, u->base, n) != 0 || strlen(name + n) >= sizeof end ||
        sscanf(name + n, "-%16llx", &number) != 1) // NOLINT(cert-err34-c): checked below
        return false;
    snprintf(end, sizeof end, "-%016llx.kvq.tmp", number);
    return strcmp(name + n, end) == 0;
}

// Who writes one has it locked until its end, or the process's. (Other machines' locks are not seen
// on all file systems: two of them are not to export to one path at a time.)
static int remove_left(void *context, const char *name)
{
    const struct unfinished *u = context;
    char path[KVQ__FILE_PATH];
    int folder = (int)(u->base - u->path);
    if (!is_unfinished(u, name) ||
        snprintf(path, sizeof path, "%.*s%s", folder, u->path, name) >= (int)sizeof path)
        return 0;
    int file = kvq_io_open(u->io, path, KVQ_IO_WRITE);
    if (file < 0)
        return 0;
    if (kvq_io_lock(u->io, file) == 0)
        (void)kvq_io_unlink(u->io, path);
    u->io->close(u->io, file);
    return 0;
}

// Removes what processes that were killed in an export to this path have left. A file that cannot
// be opened or locked stays.
static void remove_unfinished(struct kvq_io *io, const char *path)
{
    char folder[KVQ__FILE_PATH];
    const char *slash = strrchr(path, '/');
    struct unfinished u = {io, path, slash ? slash + 1 : path};
    int n = (int)(u.base - path);
    snprintf(folder, sizeof folder, "%.*s", n > 1 ? n - 1 : n, path);
    (void)io->list(io, *folder ? folder : ".", remove_left, &u);
}

// Between being made and being locked, another export to the path may take a file for one that was
// left: then it is lost, and a new one is made.
int kvq__make_unfinished(struct kvq_io *io, const char *path, char name[KVQ__FILE_PATH])
{
    remove_unfinished(io, path);
    for (int i = 0; i < TRIES; i++) {
        uint64_t random = 0;
        int rc = kvq_io_random(io, &random, sizeof random);
        int n = snprintf(name, KVQ__FILE_PATH, "%s-%016" PRIx64 ".kvq.tmp", path, random);
        if (n < 0 || n >= KVQ__FILE_PATH)
            return -ENAMETOOLONG;
        int file = rc ? rc : kvq_io_open(io, name, KVQ_IO_WRITE | KVQ_IO_NEW);
        if (file < 0)
            return file;
        rc = kvq_io_lock(io, file); // where there are locks
        int there = rc == -EWOULDBLOCK ? -ENOENT : kvq_io_open(io, name, KVQ_IO_READ);
        if (there >= 0)
            io->close(io, there);
        if (there != -ENOENT)
            return file;
        io->close(io, file);
    }
    return -EBUSY;
}

int kvq__place_finished(struct kvq_io *io, const char *from, const char *path, bool replace,
                        const struct kvq__complaint *c)
{
    int rc = replace ? kvq_io_rename(io, from, path) : kvq_io_rename_new(io, from, path);
    if (rc == -EEXIST)
        return kvq__complain(c, KVQ_E_EXISTS, "is there; give another name, or replace it");
    if (rc)
        return kvq__io_complain(c, rc, "the file", "renamed");
    rc = kvq_io_sync_parent(io, path);
    if (rc && !replace) // for the next try to find its place free
        (void)kvq_io_unlink(io, path);
    return rc ? kvq__io_complain(c, rc, "the folder of the file", "synced") : KVQ_OK;
}
