// SPDX-License-Identifier: Apache-2.0
//
// A disk in memory, behind storage's table of I/O functions, that breaks on demand.
//
// Every file has a content as programs see it, and the writes since its last sync in the order in
// which they came; the same holds for names and the folder's sync. fault_crash() makes of that what
// a loss of power may leave: each write that was not synced survives, is lost, or is torn at
// sectors of 512 bytes, whatever became of those before it; names likewise.
//
// A sync that fails loses some of what it was to write for good, as on Linux: the file shows it
// until the next crash, and no later sync brings it to the disk.
//
// To crash at a moment, set crash_at_sync or crash_at_change and run the program on: from then on
// every call fails with EIO and changes nothing. Then close the program's objects, call
// fault_crash(), and open them again.
#ifndef KVQ_TESTS_FAULT_IO_H
#define KVQ_TESTS_FAULT_IO_H

#include <pthread.h>

#include "storage/io.h"

enum {
    FAULT_FILES = 128, // names at a time
    FAULT_HANDLES = 64,
    FAULT_PATH = 256,
    FAULT_SECTOR = 512,
};

struct fault_write {
    struct fault_write *next;
    bool truncate;
    uint64_t at, n;
    uint8_t *bytes;
};

struct fault_file {
    uint8_t *data, *synced;
    uint64_t bytes, synced_bytes, allocated;
    struct fault_write *writes, **last; // since the last sync
    uint32_t uses;                      // names, durable names, changes of names, handles
    bool locked;
};

struct fault_name {
    char path[FAULT_PATH];
    struct fault_file *file; // NULL: no such name
};

// A change of names since the folder's last sync: path is file from now on, or (NULL) is gone.
struct fault_change {
    struct fault_change *next;
    struct fault_name name;
    uint32_t group; // changes of one rename come or go together
};

struct fault_io {
    struct kvq_io io; // first
    pthread_mutex_t lock;
    uint64_t random; // state of the generator
    struct fault_name now[FAULT_FILES], durable[FAULT_FILES];
    struct fault_change *changes, **last;
    uint32_t groups;
    struct fault_file *handles[FAULT_HANDLES];
    bool locks[FAULT_HANDLES];
    bool crashed;

    // Counted since fault_reset_counts.
    uint64_t n_syncs, n_changes, n_writes, n_reads;

    // What is to go wrong; 0: nothing. Numbers count from 1.
    uint64_t crash_at_sync, crash_at_change;
    uint64_t capacity;                         // bytes of all files; more: full_with
    int full_with;                             // errno; 0: ENOSPC
    bool no_new;                               // a file cannot be made: full_with
    uint64_t fail_write, fail_sync, fail_read; // that one and those after it
    uint64_t fail_count;                       // how many of them; 0: all
    int fail_with;                             // errno
    const struct fault_file *sick;             // reads of this file's byte sick_at fail with EIO
    uint64_t sick_at;
    uint32_t interrupt_percent, short_percent; // EINTR, and transfers of a part
    bool read_only;                            // EROFS for all that changes anything
    bool lose_all;                             // a crash keeps nothing that was not synced
    // A folder that is not there until it is made (NULL: all are), and the one above it: a crash
    // before that was synced takes the folder away, with all that is in it.
    const char *new_folder, *above;
    bool folder_made, folder_synced;
    uint64_t peak; // physical bytes, the most there were
};

void fault_open(struct fault_io *f, uint64_t seed);
void fault_close(struct fault_io *f);
void fault_reset_counts(struct fault_io *f);
void fault_crash(struct fault_io *f); // no handle may be open any more but those that leaked
uint64_t fault_physical(struct fault_io *f);
// The file of a name, NULL if there is none: for tests that change bytes behind the program's back.
// What they change counts as synced if they call fault_settle afterwards.
struct fault_file *fault_find(struct fault_io *f, const char *path);
void fault_settle(struct fault_file *file);
uint64_t fault_number(struct fault_io *f, uint64_t below); // random

#endif
