// SPDX-License-Identifier: Apache-2.0
//
// A save under way: its sessions and their blocks.
#ifndef KVQ_STORAGE_SAVE_H
#define KVQ_STORAGE_SAVE_H

#include "storage/store_internal.h"

// A session of the save. The strings of head are zero behind their ends, as in a file.
struct kvq__save_session {
    struct kvq_manifest_head head;
    struct kvq_manifest_entry *entries;
    size_t room_entries;
    uint8_t (*prefixes)[KVQ_PREFIX_BYTES];
    size_t room_prefixes;
    uint8_t *opaque;
    uint64_t bytes; // of its blocks
    // Bytes: the limit of its namespace (0: none), the namespace's usage before the save, what all
    // shards of the session had before (0 but for the first of them in the save), and what was put.
    // old_before and put_before are sums over the earlier sessions of the namespace in the save.
    uint64_t limit, used, old_bytes, put, old_before, put_before;
    bool known; // it replaces a session, and has the id of that
    uint64_t old_manifest;
    uint64_t manifest; // block id of the new one
};

// A shard of a session that is replaced by one with another number of shards.
struct kvq__save_gone {
    uint64_t session, manifest;
    struct kvq__written drop; // its DROP record
};

struct kvq_save {
    struct kvq_store *store;
    struct kvq__save_session *sessions;
    size_t n, room;
    struct kvq__save_gone *gone;
    size_t n_gone, room_gone;
    struct kvq__written *written;
    size_t n_written, room_written;
    uint64_t first_block; // blocks from here on were put in this save
    int failure;          // of a put or a session; 0: none
    size_t failed;        // the session that failed
    bool torn;            // the last record was not written as a whole
};

// Writes a block, without an entry in a session.
int kvq__save_block(struct kvq_save *v, const void *data, size_t bytes, uint64_t *id,
                    const struct kvq__complaint *c);

// The session's rows in the catalog (apply.c), within a transaction of the catalog.
int kvq__apply_session(struct kvq_store *s, struct kvq__save_session *session);
// Takes a session out: its entries, prefixes and row, and the references that they held.
int kvq__apply_drop(struct kvq_store *s, uint64_t session, uint64_t manifest);

#endif
