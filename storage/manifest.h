// SPDX-License-Identifier: Apache-2.0
//
// The payload of a MANIFEST record: one session as it was saved, so that a catalog can be made anew
// from the segments alone, and so that an exported file describes itself.
//
//   0     4    version, 1
//   4     4    version of the opaque bytes
//   8     8    session: its id
//   16    8    tokens
//   24    8    saved at, seconds since 1970
//   32    4    shard
//   36    4    shards
//   40    4    entries
//   44    4    prefix hashes
//   48    4    opaque bytes
//   52    4    zero
//   56    128  namespace, NUL-terminated, zeros behind
//   184   128  name
//   312   256  model
//   568   256  formats
//   824   32   for each entry: block 8, from 8, layer 4, page 4, kind 4, zero 4; ascending in
//              layer, page, kind
//   ..    32   for each prefix hash: the hash
//   ..         the opaque bytes
//
// Numbers are little-endian.
#ifndef KVQ_STORAGE_MANIFEST_H
#define KVQ_STORAGE_MANIFEST_H

#include "storage/complain.h"
#include "storage/store.h"

enum { KVQ_MANIFEST_VERSION = 1 };

struct kvq_manifest_head {
    uint32_t version, opaque_version;
    uint64_t session, tokens;
    int64_t saved_at;
    uint32_t shard, shards, entries, prefixes, opaque_bytes, zero;
    char space[KVQ_NAME_BYTES], name[KVQ_NAME_BYTES];
    char model[KVQ_FINGERPRINT_BYTES], formats[KVQ_FINGERPRINT_BYTES];
};

struct kvq_manifest_entry {
    uint64_t block, from;
    uint32_t layer, page, kind, zero;
};

static_assert(offsetof(struct kvq_manifest_head, session) == 8, "session");
static_assert(offsetof(struct kvq_manifest_head, shard) == 32, "shard");
static_assert(offsetof(struct kvq_manifest_head, space) == 56, "namespace");
static_assert(offsetof(struct kvq_manifest_head, model) == 312, "model");
static_assert(sizeof(struct kvq_manifest_head) == 824, "entries start at byte 824");
static_assert(sizeof(struct kvq_manifest_entry) == 32, "an entry is 32 bytes");

// Parts of a manifest, within one piece of memory.
struct kvq_manifest {
    const struct kvq_manifest_head *head;
    const struct kvq_manifest_entry *entries;
    const uint8_t (*prefixes)[KVQ_PREFIX_BYTES];
    const uint8_t *opaque;
};

uint64_t kvq_manifest_bytes(const struct kvq_manifest_head *head);

// Checks foreign bytes (aligned to 8) and finds the parts in them. 0, KVQ_E_INVALID or
// KVQ_E_VERSION with a sentence; the memory is then as little trusted as before.
int kvq_manifest_read(const void *data, uint64_t n, struct kvq_manifest *m,
                      const struct kvq__complaint *c);

// The bytes of a manifest made of parts, to be freed. NULL: no memory.
void *kvq_manifest_make(const struct kvq_manifest *m);

// -1, 0, 1: layer, then page, then kind.
int kvq_manifest_order(const struct kvq_manifest_entry *a, const struct kvq_manifest_entry *b);

#endif
