// SPDX-License-Identifier: Apache-2.0
//
// What namespaces use and may use: within a transaction of the catalog, and during a save. store.h
// has the calls for others.
#ifndef KVQ_STORAGE_QUOTA_H
#define KVQ_STORAGE_QUOTA_H

#include "storage/save.h"

// The catalog's number for a namespace; adds the namespace if it is new.
int kvq__space_id(struct kvq_store *s, const char *space, int64_t *id);
// The number of a session's namespace; 0 if there is no such session.
int kvq__space_of(struct kvq_store *s, uint64_t session, int64_t *id);
// Adds `change`, 1 or -1, to the count of the namespace's entries that name a block, and to the
// block's references. Adds to *bytes by how much the namespace grows or shrinks; the caller gives
// the sum to kvq__space_add.
int kvq__space_use(struct kvq_store *s, int64_t space, uint64_t block, int64_t change,
                   int64_t *bytes);
int kvq__space_add(struct kvq_store *s, int64_t space, int64_t bytes);
// The bytes of the namespace. The caller holds catalog_lock.
int kvq__space_bytes(struct kvq_store *s, const char *space, uint64_t *bytes);

// Notes the usage and the limit of a session's namespace before the session's first block is put.
int kvq__quota_begin(struct kvq_save *v, struct kvq__save_session *session,
                     const struct kvq__complaint *c);
// Whether the blocks put so far fit the limit, even if the new session keeps no block of the old
// one. Refuses a save early that could never be committed. KVQ_E_QUOTA.
int kvq__quota_put(const struct kvq_save *v, const struct kvq__complaint *c);
// Whether all namespaces of the save are within their limits, or no further above them than before.
// Within the transaction, after all sessions were applied. KVQ_E_QUOTA.
int kvq__quota_end(struct kvq_save *v, const struct kvq__complaint *c);

#endif
