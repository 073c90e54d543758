// SPDX-License-Identifier: Apache-2.0
//
// What the files of in-context mode share (kvq.h, "In the engine's own context").
//
//   local.c         opening and closing, taking sessions in
//   local_pool.c    the daemon's pool in our addresses, and its extents
//   local_reading.c what the daemon tells of a session's layers: shapes, formats, codebooks
//   local_table.c   page tables
//   local_step.c    steps: begin, end, abort
//   local_attend.c  attention in the engine's threads
//   local_daemon.c  the same calls through the daemon, where attention cannot be here
//
// A kvq_local belongs to its queue's thread. Pools, with what they hold, are the client's; they
// change under its control lock. Nothing that was mapped there is unmapped before the pool goes.
#ifndef KVQ_CLIENT_LOCAL_H
#define KVQ_CLIENT_LOCAL_H

#include "client/internal.h"
#include "kernels/kernels.h"

enum {
    KVQ__LOCAL_TOKENS = 131072, // of a page table, if nobody says
    KVQ__LOCAL_THREADS = 1024,
    KVQ__LOCAL_PARTIALS = 64 << 20, // bytes of partial results; addresses until they are needed
};

// ---- Pools (local_pool.c) ----

// A codebook's tables, as they are shared.
struct kvq__book {
    LIST_ENTRY(kvq__book) link;
    uint64_t id, bytes;
    float *values;
};

// A format, once: sessions of one format point to one row.
struct kvq__row {
    LIST_ENTRY(kvq__row) link;
    struct kvq_format format;
};

struct kvq__pool {
    LIST_ENTRY(kvq__pool) link; // of the client's; of an earlier connection: of none
    uint32_t refs;              // the client's, as long as it is linked, and each kvq_local's
    char place[KVQ__PLACE_BYTES];
    uint64_t span, extent_bytes;
    uint8_t *at;   // the addresses that are kept for it; never NULL
    void *mapping; // what is to be unmapped, at most one huge page before `at`
    bool broken;   // an extent could not be mapped
    LIST_HEAD(, kvq__book) books;
    LIST_HEAD(, kvq__row) rows;
};

// Finds or makes it. KVQ_E_UNSUPPORTED and KVQ_E_VERSION with a text if this cannot be; other codes
// as for any control call. Give it back with kvq__pool_put.
int kvq__pool_get(kvq_client *client, const char *place, struct kvq__pool **pool);
void kvq__pool_put(kvq_client *client, struct kvq__pool *pool);
// Maps the extents of the session's namespace that are not mapped yet. *known: how many the daemon
// counts that we have.
int kvq__pool_extend(kvq_client *client, struct kvq__pool *pool, uint64_t handle, uint64_t *known);
// Maps what one of our descriptors holds, read-only, over [at, at + bytes); at NULL: anywhere.
// `fd` stays the caller's. *bytes is what the memory has, at least what it was.
int kvq__pool_map(int fd, void *at, const char *what, size_t *bytes, void **mapping);

// ---- Sessions ----

struct kvq__local_layer {
    const struct kvq_format *format;
    struct kvq_shape shape;
    struct kvq_book book;
    uint32_t source; // layer whose pages it reads
    const struct kvq_table_layer *pages;
};

struct kvq__local_session {
    uint64_t handle;
    bool read_only;
    uint32_t changes, all_changes; // the client's counts when it was last looked at
    // The step.
    bool in_step;
    uint64_t past;
    uint32_t append;
    uint8_t appended[KVQ_MAX_LAYERS]; // through the daemon: these layers' K and V are there
    // Attention here.
    const struct kvq_table_page *table; // NULL: through the daemon
    size_t table_bytes;
    uint64_t known; // extents
    bool lacking;   // there are more, which could not be mapped when it was looked at
    uint8_t path;
    uint32_t n_layers;
    struct kvq__local_layer *layers;
};

struct kvq_local {
    LIST_ENTRY(kvq_local) link; // of the client's, under its table lock
    kvq_client *client;
    kvq_queue *queue;
    uint64_t connection;    // that it was opened on
    struct kvq__pool *pool; // NULL: through the daemon from the start
    char place[KVQ__PLACE_BYTES];
    const struct kvq_kernels *kernels;
    char why[KVQ__TEXT_BYTES]; // not empty: through the daemon
    uint64_t max_tokens;
    uint32_t flags, threads;
    void (*parallel)(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg);
    void *parallel_context;
    struct kvq__local_session *sessions[KVQ__HANDLES]; // by the handle's index

    // The step: who is in it, and K and V of its layers as they were given.
    bool stepping;
    uint32_t n_members;
    struct kvq__local_session *members[KVQ_MAX_BATCH];
    uint64_t step; // through the daemon: its number there; 0: none
    uint32_t n_layers;
    bool mixed; // a layer was given twice, differently
    struct kvq_tensor k[KVQ_MAX_LAYERS], v[KVQ_MAX_LAYERS];

    // Scratch.
    struct kvq_entry some[KVQ_MAX_BATCH], others[KVQ_MAX_BATCH];
    uint32_t some_of[KVQ_MAX_BATCH], others_of[KVQ_MAX_BATCH]; // which of the caller's they are
    uint32_t extents[KVQ_MAX_BATCH];
    uint32_t first_item[KVQ_MAX_BATCH + 1];
    struct kvq_attend_job *sorted[KVQ_MAX_BATCH];
    struct kvq_attend_job *jobs; // KVQ_MAX_BATCH of them
    uint8_t *partials;           // KVQ__LOCAL_PARTIALS bytes
    uint8_t *workspaces;         // one for each thread
};

// ---- local.c ----

// Whether it can be used: KVQ_OK, or a code and a text.
int kvq__local_check(const struct kvq_local *local);
// The session that was taken in under that handle, or NULL.
struct kvq__local_session *kvq__local_find(const struct kvq_local *local, uint64_t handle);
// Takes it out. Only members of no step.
void kvq__local_forget(struct kvq_local *local, struct kvq__local_session *session);
// Goes through the daemon from now on, with this text.
int kvq__local_give_up(struct kvq_local *local, const char *why);

// ---- local_reading.c ----

// From the reply to OpenTable: fills session->layers, path and n_layers. Under the control lock.
int kvq__reading_take(struct kvq__pool *pool, const Kvq__OpenTableReply *reply,
                      struct kvq__local_session *session);
// Maps the codebooks that its layers need. Takes the control lock.
int kvq__reading_books(kvq_client *client, struct kvq__pool *pool,
                       struct kvq__local_session *session);

// ---- local_table.c ----

int kvq__table_open(struct kvq_local *local, struct kvq__local_session *session);
// Tells the daemon, too, if the connection is the same.
void kvq__table_close(struct kvq_local *local, struct kvq__local_session *session);
// Whether its counts make sense: KVQ_OK or KVQ_E_PROTOCOL.
int kvq__table_check(const struct kvq__local_session *session);

// ---- local_step.c ----

// Explains the first failed entry of a call: `op` and `work` (NULL: none) say what was asked for.
void kvq__local_explain(struct kvq_local *local, unsigned op, const struct kvq_work *work,
                        struct kvq_entry *entries, uint32_t n);
// What all calls of a step check first.
int kvq__local_check_call(const struct kvq_local *local, const char *what,
                          const struct kvq_entry *entries, uint32_t n);
int kvq__local_check_attend(const struct kvq_local *local, const struct kvq_work *work,
                            const struct kvq_entry *entries, uint32_t n);
// Why an entry cannot be in a step that begins: a code, whoever attends.
int kvq__local_judge(const struct kvq_local *local, const struct kvq_entry *entry);
// Why an entry is not what was begun: a code.
int kvq__local_member(const struct kvq_local *local, const struct kvq_entry *entry);
void kvq__local_join(struct kvq_local *local, const struct kvq_entry *entry);
// The step is over for all that are still in it.
void kvq__local_over(struct kvq_local *local);

// ---- local_attend.c ----

// Takes the memory that attention needs, so that no call of a step has to.
int kvq__attend_open(struct kvq_local *local);
void kvq__attend_close(struct kvq_local *local);

// ---- local_daemon.c ----

int kvq__through_begin(struct kvq_local *local, struct kvq_entry *entries, uint32_t n);
int kvq__through_attend(struct kvq_local *local, const struct kvq_work *work,
                        struct kvq_entry *entries, uint32_t n);
int kvq__through_end(struct kvq_local *local, const struct kvq_step_work *work,
                     struct kvq_entry *entries, uint32_t n);
void kvq__through_abort(struct kvq_local *local);

#endif
