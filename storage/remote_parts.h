// SPDX-License-Identifier: Apache-2.0
//
// The parts that a session's file is transferred in, and the text that names them, the object
// SPACE/NAME/head of remote.h. Lines end with a newline, numbers are decimal:
//
//   kvq-session 1
//   bytes BYTES            of the file, at least 1
//   part BYTES             of every part but the last, which has what is left
//   HEX                    for each part, 64 digits: its SHA-256
//   end
//
// There is one text for one file and size of parts, so that its SHA-256 names the data.
#ifndef KVQ_STORAGE_REMOTE_PARTS_H
#define KVQ_STORAGE_REMOTE_PARTS_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVQ__SHA_BYTES = 32,
    KVQ__SHA_HEX = 2 * KVQ__SHA_BYTES + 1, // with a NUL
    KVQ__PARTS_TEXT = 1 << 20,             // more than the text of KVQ_REMOTE_MAX_PARTS parts
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

// Sets the sizes for a file, with no more than KVQ_REMOTE_MAX_PARTS parts, and takes memory for the
// checksums. 0 or KVQ_E_NO_MEMORY; kvq__parts_free frees.
int kvq__parts_make(struct kvq__parts *parts, uint64_t bytes, uint64_t part_bytes);
void kvq__parts_free(struct kvq__parts *parts);
// Bytes of part i.
size_t kvq__part_size(const struct kvq__parts *parts, uint32_t i);

// *text by malloc, *n bytes without a NUL. 0 or KVQ_E_NO_MEMORY.
int kvq__parts_write(const struct kvq__parts *parts, char **text, size_t *n);
// Reads a text, which is foreign and need not end with a NUL. 0; or KVQ_E_VERSION, KVQ_E_DAMAGED,
// KVQ_E_NO_MEMORY with the end of a sentence in *why.
int kvq__parts_read(const char *text, size_t n, struct kvq__parts *parts, const char **why);

#endif
