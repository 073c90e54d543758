// SPDX-License-Identifier: Apache-2.0
//
// The one table of functions through which storage/ reaches a disk.
//
// kvq_io_posix() is the operating system's. Tests have another one that keeps files in memory,
// loses, tears and reorders what was not synced, and fails on demand (tests/kits/fault_io.h).
// SQLite goes through the same table (storage/vfs.c), so that both halves of a store break
// together.
//
// Rules of the table
//   - Failures are a negative errno: the caller must tell a full disk from a broken one.
//   - Any function but list may give -EINTR; read and write may transfer less than asked for. The
//     kvq_io_* wrappers below deal with both, and nothing in storage/ calls the table past them but
//     for close and will_read, which cannot fail, and list, which cannot be begun again.
//   - Written bytes are durable after sync() of their file returned 0, and only then. A name that
//     was created, renamed or removed is durable after sync_dir() of its folder returned 0.
//   - After a sync() that failed, what is on disk is unknown; a second sync() proves nothing.
//   - Paths are absolute or relative to the process; names of a folder are below 256 bytes.
//   - Functions may be called by several threads at the same time, also for the same file.
#ifndef KVQ_STORAGE_IO_H
#define KVQ_STORAGE_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVQ_IO_PAGE = 4096, // offsets, sizes and memory of direct writes are multiples of it
};

enum kvq_io_flag {
    KVQ_IO_READ = 0,
    KVQ_IO_WRITE = 1,  // and read
    KVQ_IO_CREATE = 2, // if it is not there
    KVQ_IO_NEW = 4,    // -EEXIST if it is there
    KVQ_IO_DIRECT = 8, // past the page cache, where the file system can do that
};

struct kvq_io_status {
    uint64_t bytes;    // how long the file is
    uint64_t physical; // what it takes on disk, space taken in advance included
};

struct kvq_io {
    // A handle of 0 or more, closed on exec. Creates with mode 0600.
    int (*open)(struct kvq_io *io, const char *path, unsigned flags);
    void (*close)(struct kvq_io *io, int file);
    // Bytes transferred; read gives 0 at the end of the file only.
    int64_t (*read)(struct kvq_io *io, int file, void *data, size_t n, uint64_t at);
    int64_t (*write)(struct kvq_io *io, int file, const void *data, size_t n, uint64_t at);
    int (*sync)(struct kvq_io *io, int file);
    // Sets the length, and gives back space that was taken behind it.
    int (*truncate)(struct kvq_io *io, int file, uint64_t bytes);
    // Takes space for [0, bytes) without changing the length. -EOPNOTSUPP where that is not known.
    int (*allocate)(struct kvq_io *io, int file, uint64_t bytes);
    // [at, at + n) will be read soon. May do nothing.
    void (*will_read)(struct kvq_io *io, int file, uint64_t at, uint64_t n);
    int (*status)(struct kvq_io *io, int file, struct kvq_io_status *status);
    // Takes the file for this handle alone; -EWOULDBLOCK if another one has it. Closing gives it
    // back, and so does the end of the process.
    int (*lock)(struct kvq_io *io, int file);
    int (*rename)(struct kvq_io *io, const char *from, const char *to); // over what is there
    // -EEXIST, and nothing has changed, if `to` is there.
    int (*rename_new)(struct kvq_io *io, const char *from, const char *to);
    int (*unlink)(struct kvq_io *io, const char *path);
    int (*make_dir)(struct kvq_io *io, const char *path); // mode 0700
    int (*sync_dir)(struct kvq_io *io, const char *path);
    // Calls each() for every name in the folder but . and .., in any order, until each() returns
    // something else than 0, which list() returns.
    int (*list)(struct kvq_io *io, const char *path, int (*each)(void *context, const char *name),
                void *context);
    int (*space)(struct kvq_io *io, const char *path, uint64_t *free_bytes); // for this user
    int (*random)(struct kvq_io *io, void *data, size_t n);
};

// The operating system's. Never NULL, stateless, for any number of threads.
struct kvq_io *kvq_io_posix(void);

// Memory for direct transfers, freed with free(). In huge pages where there are some: a device
// takes only so many pieces of memory at a time, and small pages make many.
void *kvq_io_memory(size_t n);

// ---- Wrappers: the same, with interruptions and short transfers dealt with ----

int kvq_io_open(struct kvq_io *io, const char *path, unsigned flags);
// All n bytes, 0; or a negative errno. *got (may be NULL) says how many there were: fewer than n
// with 0 returned means that the file ends there.
int kvq_io_read(struct kvq_io *io, int file, void *data, size_t n, uint64_t at, size_t *got);
int kvq_io_write(struct kvq_io *io, int file, const void *data, size_t n, uint64_t at);
int kvq_io_sync(struct kvq_io *io, int file);
int kvq_io_truncate(struct kvq_io *io, int file, uint64_t bytes);
int kvq_io_allocate(struct kvq_io *io, int file, uint64_t bytes);
int kvq_io_status(struct kvq_io *io, int file, struct kvq_io_status *status);
int kvq_io_lock(struct kvq_io *io, int file);
int kvq_io_unlink(struct kvq_io *io, const char *path);
int kvq_io_rename(struct kvq_io *io, const char *from, const char *to);
int kvq_io_rename_new(struct kvq_io *io, const char *from, const char *to);
int kvq_io_make_dir(struct kvq_io *io, const char *path);
int kvq_io_sync_dir(struct kvq_io *io, const char *path);
int kvq_io_space(struct kvq_io *io, const char *path, uint64_t *free_bytes);
int kvq_io_random(struct kvq_io *io, void *data, size_t n);
// Syncs the folder that has the last name of a path, which may end with slashes or have no folder.
int kvq_io_sync_parent(struct kvq_io *io, const char *path);
// Puts n bytes into the file of that name, all or none: they are written and synced as PATH.new,
// which is then renamed over what is there, and the folder is synced. 0 or a negative errno.
// *placed says whether the file has the new bytes; with an errno they may be lost with the power.
int kvq_io_replace(struct kvq_io *io, const char *path, const void *data, size_t n, bool *placed);
// Whether an error says that there is no room: the disk is full, or the user's quota on it is.
bool kvq_io_is_full(int error);

#endif
