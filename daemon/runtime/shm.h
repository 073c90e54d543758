// SPDX-License-Identifier: Apache-2.0
//
// Memory shared with clients: memfds of our own, sealed so that no client can take a page away
// under us, and memfds of clients that are sealed likewise.
#ifndef KVQ_DAEMON_RUNTIME_SHM_H
#define KVQ_DAEMON_RUNTIME_SHM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvq__shm {
    int fd;    // -1: none
    void *map; // NULL: none
    size_t bytes;
};

// Zeroed memory of that size, mapped read-write here, its size sealed. read_only: clients may map
// it for reading only. 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM with a text.
int kvq__shm_create(struct kvq__shm *shm, const char *name, size_t bytes, bool read_only,
                    char *text);
// The same in huge pages that were set aside (vm.nr_hugepages), clients may only read them; bytes
// is a multiple of 2 MiB.
int kvq__shm_create_huge(struct kvq__shm *shm, const char *name, size_t bytes, char *text);
// Unmaps and closes what is there.
void kvq__shm_close(struct kvq__shm *shm);

// Maps bytes from offset of a client's memfd, which must be sealed against shrinking, and
// writable. On success the mapping is the caller's and fd is not needed any more. 0, KVQ_E_BUFFER
// or KVQ_E_INVALID with a text that says what to do.
int kvq__shm_import(struct kvq__shm *shm, int fd, uint64_t offset, uint64_t bytes, char *text);

#endif
