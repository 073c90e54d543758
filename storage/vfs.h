// SPDX-License-Identifier: Apache-2.0
//
// SQLite over the table of I/O functions, so that one fault double breaks segments and catalog.
//
// For one connection in one process: this VFS locks nothing and has no shared memory, which SQLite
// accepts in WAL mode with locking_mode=EXCLUSIVE (the index of the WAL is then on the heap). The
// store's own lock keeps other processes out.
//
// A disk may become full at any moment, and deleting must work then. So kvq__vfs_hold reserves
// space on disk for the database and its WAL beyond their length, and a truncation by SQLite does
// not give that space back. When the database is closed, the WAL stays with its space, and with a
// header that marks it as empty.
//
// On a file system that is read-only, files are opened to be read, and a WAL that is not there is
// an empty one: SQLite insists on opening it. A WAL that is there is read into that index, so that
// nothing of what was committed is missing. (SQLite's own way, immutable=1, looks at no WAL, and
// after a kill -9 the last commits are there alone.)
#ifndef KVQ_STORAGE_VFS_H
#define KVQ_STORAGE_VFS_H

#include <sqlite3.h>

#include "storage/io.h"

enum kvq__vfs_kind { KVQ__VFS_DATABASE, KVQ__VFS_WAL, KVQ__VFS_OTHER };

struct kvq__vfs {
    sqlite3_vfs vfs;
    struct kvq_io *io;
    bool read_only; // as a file system that is: nothing is opened to be written
    char name[32];
    struct kvq__vfs_held {
        int file;       // -1: it is not open, or not to be written
        uint64_t bytes; // on disk there is space for the first so many bytes of the file
    } held[KVQ__VFS_OTHER];
};

// Registers v with SQLite under v->name, which is unique. v must stay where it is until
// kvq__vfs_remove. 0 or an SQLite code.
int kvq__vfs_add(struct kvq__vfs *v, struct kvq_io *io, bool read_only);
void kvq__vfs_remove(struct kvq__vfs *v);

// Reserves space on disk for the first `bytes` bytes of a file, without changing its length. 0 or a
// negative errno: then the earlier reservation stays. 0 also if the file system cannot reserve, or
// the file is not open; held[kind].bytes says what is reserved. SQLite must be in no call.
int kvq__vfs_hold(struct kvq__vfs *v, enum kvq__vfs_kind kind, uint64_t bytes);

#endif
