// SPDX-License-Identifier: Apache-2.0
//
// The parts of a session's file on a remote store: the object SPACE/NAME/head of remote.h. Content
// decides where the file is cut into chunks, so that two files that differ in a few places have
// most chunks in common. Each chunk lies in a pack, an object SPACE/NAME/data/DIGEST that one push
// has uploaded. Lines end with a newline, numbers are decimal:
//
//   kvq-session 2
//   bytes BYTES            of the file, at least 1
//   packs N
//   DIGEST BYTES           for each: 64 digits, and how long it is
//   chunks N
//   SIZE PACK AT HEX       for each, in the order of the file: which pack it lies in, counted from
//                          0, where, and its SHA-256
//   end
//
// kvq also reads heads that were pushed before there were packs: one object, named by the SHA-256
// of the head, in parts of one size.
//
//   kvq-session 1
//   bytes BYTES
//   part BYTES             of every part but the last, which has what is left
//   HEX                    for each part: its SHA-256
//   end
#ifndef KVQ_STORAGE_REMOTE_INDEX_H
#define KVQ_STORAGE_REMOTE_INDEX_H

#include <stdbool.h>

#include "storage/remote_parts.h"

enum {
    KVQ__INDEX_TEXT = 4 << 20, // more than the text of so many chunks and packs
    KVQ__INDEX_CHUNKS = 1 << 15,
    KVQ__INDEX_PACKS = 64,
};

struct kvq__pack {
    char digest[KVQ__SHA_HEX];
    uint64_t bytes;
};

struct kvq__chunk {
    uint64_t size, at; // in the pack
    uint32_t pack;
    uint8_t sha[KVQ__SHA_BYTES];
};

struct kvq__index {
    uint64_t bytes;
    struct kvq__pack packs[KVQ__INDEX_PACKS];
    uint32_t n_packs;
    struct kvq__chunk *chunks; // by malloc
    uint32_t n_chunks, room;
};

void kvq__index_free(struct kvq__index *index); // zeros are fine

// The average size of chunks for a file of `bytes` bytes, a power of two. A chunk has a quarter of
// that at least (but the last one), and kvq__chunk_most at most: four times that, or 256 MiB, which
// is all that a reader takes. The average grows with the file by doubling, so that a file that
// grows keeps most chunks.
uint64_t kvq__chunk_about(uint64_t bytes, uint64_t part_bytes);
size_t kvq__chunk_most(uint64_t about);
// The length of the first chunk of n > 0 bytes, if no more bytes follow: 1 to n.
size_t kvq__chunk_end(const uint8_t *data, size_t n, uint64_t about);
// Adds a chunk that is in no pack yet. 0, KVQ_E_NO_MEMORY or KVQ_E_SYSTEM.
int kvq__index_add(struct kvq__index *index, const void *data, size_t n);

// Gives each chunk of `to` its place: chunks that `had` has stay in their packs, the others lie one
// after the other in a new pack, the last of `to`. If more bytes of the packs would be dead than
// alive, or there would be too many packs, all chunks go to the new pack. *fresh: bytes of the new
// pack, which has no digest yet; 0: there is none. `had` may be NULL. 0 or KVQ_E_NO_MEMORY.
int kvq__index_place(struct kvq__index *to, const struct kvq__index *had, uint64_t *fresh);

// *text by malloc, *n bytes without a NUL. 0 or KVQ_E_NO_MEMORY.
int kvq__index_write(const struct kvq__index *index, char **text, size_t *n);
// Reads a text, which is foreign and need not end with a NUL. 0; or KVQ_E_VERSION, KVQ_E_DAMAGED,
// KVQ_E_NO_MEMORY, KVQ_E_SYSTEM with the end of a sentence in *why.
int kvq__index_read(const char *text, size_t n, struct kvq__index *index, const char **why);

#endif
