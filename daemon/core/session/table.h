// SPDX-License-Identifier: Apache-2.0
//
// Page tables of clients that attend in their own context, and the leases behind them (table.c).
#ifndef KVQ_DAEMON_CORE_SESSION_TABLE_H
#define KVQ_DAEMON_CORE_SESSION_TABLE_H

#include "daemon/core/state.h"

// One layer as it was published last.
struct kvq__table_layer {
    struct kvq__pageref *pages; // references to what the entries name
    struct kvq__ref extras;
    uint64_t extras_at;           // as the client has it
    uint32_t first_page, n_pages; // pages with entries
    uint32_t settled;             // entries of pages below it stay as they are
};

struct kvq__table {
    LIST_ENTRY(kvq__table) client_link, session_link;
    struct kvq__client *client;
    struct kvq__namespace *ns;    // that its memory counts for
    struct kvq__session *session; // NULL: it was dropped, or the table is closed
    uint64_t handle;              // that it was opened for, maybe stale by now
    uint64_t pool_at;             // where the client maps the pool
    struct kvq__table_memory memory;
    uint64_t tokens, number; // of the last publication
    uint32_t uses;           // by requests under way
    bool closed;
    struct kvq__table_layer *layers;
    struct kvq__pageref *pages; // of all layers
};

// Where a table's bytes are put: place() gives memory whose `bytes` end up at the offset.
struct kvq__table_writer {
    void *context;
    uint8_t *(*place)(void *context, uint64_t offset, size_t bytes);
};
// Entries [from, to) of a layer that publishing at so many tokens writes, in one place. Besides, it
// writes at most a struct kvq_table_layer for each layer, and 16 bytes.
struct kvq__table_run {
    uint32_t from, to;
};
struct kvq__table_run kvq__table_changes(const struct kvq__table *t, uint32_t layer,
                                         uint64_t tokens);
// Makes the table say what a view at `tokens` tokens reads; these have pages, and what of them is
// read packed is or will be so before the client looks. Drops references to what it no longer
// names.
void kvq__table_publish(struct kvq__table *t, uint64_t tokens,
                        const struct kvq__table_writer *writer);
// The same in parts: each layer that has pages of its own, then the head.
void kvq__table_publish_layer(struct kvq__table *t, uint32_t layer, uint64_t tokens,
                              const struct kvq__table_writer *writer);
void kvq__table_publish_head(struct kvq__table *t, uint64_t tokens,
                             const struct kvq__table_writer *writer);
// What was published last has not come to pass: the next time all is written.
void kvq__table_lost(struct kvq__table *t);
void kvq__table_publish_on_host(struct kvq__table *t); // at what is committed
void kvq__table_unuse(struct kvq__table *t);           // a request that used it has ended

// The session's pages from this one on may be other blocks from now on.
void kvq__tables_dirty(struct kvq__session *s, uint32_t page);
// Whether a table of another client than `but` shows more than so many tokens.
bool kvq__tables_need(const struct kvq__session *s, const struct kvq__client *but, uint64_t tokens);
void kvq__tables_orphan(struct kvq__session *s);    // it ends
void kvq__tables_close(struct kvq__client *client); // it is gone

#endif
