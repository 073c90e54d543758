// SPDX-License-Identifier: Apache-2.0
//
// SHA-256, and the parts that an object is uploaded in.
#ifndef KVQ_STORAGE_REMOTE_PARTS_H
#define KVQ_STORAGE_REMOTE_PARTS_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVQ__SHA_BYTES = 32,
    KVQ__SHA_HEX = 2 * KVQ__SHA_BYTES + 1, // with a NUL
};

struct kvq__parts {
    uint64_t bytes;
    uint64_t part_bytes;
    uint32_t count;
    uint8_t (*sha)[KVQ__SHA_BYTES]; // by malloc
};

// The SHA-256 of some bytes. 0 or KVQ_E_SYSTEM.
int kvq__sha256(const void *data, size_t n, uint8_t out[KVQ__SHA_BYTES]);
void kvq__sha_hex(const uint8_t sha[KVQ__SHA_BYTES], char out[KVQ__SHA_HEX]);

// Sets the sizes for so many bytes, with no more than KVQ_REMOTE_MAX_PARTS parts, and takes memory
// for the checksums. 0 or KVQ_E_NO_MEMORY; kvq__parts_free frees.
int kvq__parts_make(struct kvq__parts *parts, uint64_t bytes, uint64_t part_bytes);
void kvq__parts_free(struct kvq__parts *parts);
// Bytes of part i.
size_t kvq__part_size(const struct kvq__parts *parts, uint32_t i);

#endif
