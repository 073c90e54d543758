// SPDX-License-Identifier: Apache-2.0
//
// SQLite over the table of I/O functions, so that one fault double breaks segments and catalog.
//
// Made for one connection in one process: it locks nothing and has no shared memory, which SQLite
// accepts in WAL mode with locking_mode=EXCLUSIVE (the index of the WAL is on the heap then). The
// store's own lock keeps other processes out.
//
// On a file system that is read-only, files are opened to be read, and a WAL that is not there is
// an empty one: SQLite insists on opening it. A WAL that is there is read into that index, so that
// nothing of what was committed is missing. (SQLite's own way, immutable=1, looks at no WAL, and
// after a kill -9 the last commits are there alone.)
#ifndef KVQ_STORAGE_VFS_H
#define KVQ_STORAGE_VFS_H

#include <sqlite3.h>

#include "storage/io.h"

struct kvq__vfs {
    sqlite3_vfs vfs;
    struct kvq_io *io;
    char name[32];
};

// Makes it known to SQLite under v->name, which no other has. v stays where it is until
// kvq__vfs_remove. 0 or an SQLite code.
int kvq__vfs_add(struct kvq__vfs *v, struct kvq_io *io);
void kvq__vfs_remove(struct kvq__vfs *v);

#endif
