// SPDX-License-Identifier: Apache-2.0
//
// What namespaces use and may use: within a transaction of the catalog, and while a save is put
// together. store.h has what others may ask.
#ifndef KVQ_STORAGE_QUOTA_H
#define KVQ_STORAGE_QUOTA_H

#include "storage/save.h"

// The catalog's number for a namespace, given to it when it has none.
int kvq__space_id(struct kvq_store *s, const char *space, int64_t *id);
// The same of a session's namespace.
int kvq__space_of(struct kvq_store *s, uint64_t session, int64_t *id);
// Adds 1 or -1 to the entries of the namespace that name a block, and to the block's references.
// *bytes changes by what the namespace has more or less by that; kvq__space_add is told the sum.
int kvq__space_use(struct kvq_store *s, int64_t space, uint64_t block, int64_t change,
                   int64_t *bytes);
int kvq__space_add(struct kvq_store *s, int64_t space, int64_t bytes);
// What the namespace has. The caller holds catalog_lock.
int kvq__space_bytes(struct kvq_store *s, const char *space, uint64_t *bytes);

// Notes what a session's namespace has and may have before anything of it is put.
int kvq__quota_begin(struct kvq_save *v, struct kvq__save_session *session,
                     const struct kvq__complaint *c);
// Whether what was put so far fits, even if nothing is left of the session that is replaced. Spares
// writing a large save that is sure to be refused. KVQ_E_QUOTA.
int kvq__quota_put(const struct kvq_save *v, const struct kvq__complaint *c);
// Whether all namespaces of the save are within their limits, or no further above them than
// before. Within the transaction, all sessions being applied.
int kvq__quota_end(struct kvq_save *v, const struct kvq__complaint *c);

#endif
