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
    uint64_t handle;              // it was opened for this one, which may be stale by now
    uint64_t pool_at;             // where the client maps the pool
    struct kvq__table_memory memory;
    uint64_t tokens, number; // of the last publication
    uint32_t uses;           // by requests under way
    bool closed;
    struct kvq__table_layer *layers;
    struct kvq__pageref *pages; // of all layers
};

// Writes into a table: place() returns memory for `bytes` that belong at the offset.
struct kvq__table_writer {
    void *context;
    uint8_t *(*place)(void *context, uint64_t offset, size_t bytes);
};
// The entries [from, to) of a layer that publishing at so many tokens writes, with one call of
// place(). It also writes at most one struct kvq_table_layer for each layer, and 16 bytes of the
// head.
struct kvq__table_run {
    uint32_t from, to;
};
struct kvq__table_run kvq__table_changes(const struct kvq__table *t, uint32_t layer,
                                         uint64_t tokens);
// Makes the table name the blocks that a view at `tokens` tokens reads. These tokens have pages,
// and units that are read packed are packed before the client looks. Drops the references to blocks
// that the table names no more.
void kvq__table_publish(struct kvq__table *t, uint64_t tokens,
                        const struct kvq__table_writer *writer);
// The same in parts: each layer with pages of its own, then the head.
void kvq__table_publish_layer(struct kvq__table *t, uint32_t layer, uint64_t tokens,
                              const struct kvq__table_writer *writer);
void kvq__table_publish_head(struct kvq__table *t, uint64_t tokens,
                             const struct kvq__table_writer *writer);
// The last publication did not happen: the next one writes everything.
void kvq__table_lost(struct kvq__table *t);
void kvq__table_publish_on_host(struct kvq__table *t, uint64_t tokens);
void kvq__table_unuse(struct kvq__table *t); // a request that used it has ended

// From this page on the session may have other blocks: the next publication writes these entries.
void kvq__tables_dirty(struct kvq__session *s, uint32_t page);
// Whether a table of another client than `but` shows more than so many tokens.
bool kvq__tables_need(const struct kvq__session *s, const struct kvq__table *but, uint64_t tokens);
void kvq__tables_orphan(struct kvq__session *s);    // the session ends
void kvq__tables_close(struct kvq__client *client); // the client is gone

#endif
