// SPDX-License-Identifier: Apache-2.0
//
// What the files of in-context mode share (kvq/in_context.h).
//
//   gpu_memory.c     pools, tables and codebooks in a GPU's memory
//   pool.c           the daemon's pool, mapped into our addresses extent by extent
//   layers.c         a session's layers from the daemon's reply: shapes, formats, codebooks
//   page_table.c     page tables
//   members.c        the sessions, the members of a step, and the checks of its calls
//   through_daemon.c the same calls through the daemon, where attention cannot run here
//   steps.c          steps: begin, end, abort
//   attend.c         attention in the engine's threads
//   bucket.c         device memory for the attentions of a step
//   stream.c         steps and attention in the order of a stream
//   open.c           opening and closing, taking sessions in
//
// Each of these calls only those above it.
//
// A kvq_local belongs to its queue's thread. Pools and their contents belong to the client, and
// change in turns of its control calls. A mapped extent stays mapped as long as its pool.
#ifndef KVQ_CLIENT_IN_CONTEXT_H
#define KVQ_CLIENT_IN_CONTEXT_H

#include "client/internal.h"
#include "kernels/cuda/attend.h"
#include "kernels/kernels.h"
#include "proto/rows.h"

enum {
    KVQ__LOCAL_TOKENS = 131072, // of a page table, if max_tokens is 0
    KVQ__LOCAL_THREADS = 256,
    KVQ__LOCAL_PARTIALS = 64 << 20, // bytes of partial results; addresses until they are needed
};

// ---- Pools (pool.c) ----

// A codebook's tables, mapped once for all sessions that use it.
struct kvq__book {
    LIST_ENTRY(kvq__book) link;
    uint64_t id, bytes;
    float *values;
    kvq_gpu_ptr there; // a copy in the GPU's memory; 0: none
};

// A format: all sessions of a format point to one row.
struct kvq__row {
    LIST_ENTRY(kvq__row) link;
    struct kvq_format format;
};

struct kvq__pool {
    LIST_ENTRY(kvq__pool) link; // of the client's; of an earlier connection: of none
    uint32_t refs; // the client's, as long as it is linked, and each kvq_local's; under the table
                   // lock
    char place[KVQ__PLACE_BYTES];
    uint64_t span, extent_bytes;
    uint8_t *at;                 // the addresses that are kept for it; never NULL
    void *mapping;               // what is to be unmapped, at most one huge page before `at`
    bool tells_again;            // the daemon, of extents that could not be mapped
    bool broken;                 // some could not be, and are in no later reply
    char cause[KVQ__TEXT_BYTES]; // of that
    // On a GPU: `at` is an address there.
    struct kvq__gpu_context here; // driver NULL: the host
    struct kvq_gpu kernels;
    bool *mapped; // extents, by number
    LIST_HEAD(, kvq__book) books;
    LIST_HEAD(, kvq__row) rows;
};

// Finds or makes the pool of a place. Release with kvq__pool_put. `here`: the GPU's context, which
// is current; NULL: the host. KVQ_E_UNSUPPORTED and KVQ_E_VERSION with a text if attention cannot
// run here; other codes as for any control call.
int kvq__pool_get(kvq_client *client, const char *place, const struct kvq__gpu_context *here,
                  struct kvq__pool **pool);
void kvq__pool_put(kvq_client *client, struct kvq__pool *pool);
// Maps the extents of the session's namespace that are not mapped yet. *known: how many extents the
// daemon says that we have.
int kvq__pool_extend(kvq_client *client, struct kvq__pool *pool, uint64_t handle, uint64_t *known);

// ---- Sessions ----

struct kvq__local_layer {
    const struct kvq_format *format;
    struct kvq_shape shape;
    struct kvq_book book;
    uint32_t source; // layer whose pages it reads
    const struct kvq_table_layer *pages;
    kvq_gpu_ptr pages_there; // on a GPU
};

struct kvq__local_session {
    uint64_t handle;
    bool read_only;
    uint32_t changes, all_changes; // the client's counts when its table was last read
    // The step.
    bool in_step;
    uint64_t past;
    uint32_t append;
    uint8_t appended[KVQ_MAX_LAYERS]; // through the daemon: it has K and V of these layers
    uint8_t lacks[KVQ_MAX_LAYERS];    // here: the last call that gave K and V of these failed
    // Attention here.
    const struct kvq_table_page *table; // a GPU's: its copy on the host. NULL: through the daemon
    size_t table_bytes;
    struct kvq_gpu_piece piece; // a GPU's: the one that kernels read
    uint64_t published;         // on a GPU: the table's count of tokens; UINT64_MAX: unknown
    struct kvq_bucket *bucket;  // of its last step: that bucket's stream may still read it; or NULL
    bool sharded;               // its steps publish no table: other shards may end later
    uint64_t known;             // extents
    bool lacking;               // some extents could not be mapped
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
    struct kvq__gpu_context here;  // of a GPU's sessions; driver NULL: the host's
    struct kvq_bucket *bucket;     // of the step under way, on a GPU
    struct kvq_gpu_stream *stream; // likewise
    LIST_HEAD(, kvq_bucket) buckets;
    void (*parallel)(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg);
    void *parallel_context;
    struct kvq_pool *workers; // our threads; NULL: the engine gave `parallel`, or one is enough
    struct kvq__local_session *sessions[KVQ__HANDLES]; // by the handle's index

    // The step: who is in it, and K and V of its layers as they were given.
    bool stepping;
    uint32_t n_members;
    struct kvq__local_session *members[KVQ_MAX_BATCH];
    uint64_t step; // through the daemon: its number there; 0: none
    uint32_t n_layers;
    bool mixed; // a layer was given twice, differently
    struct kvq_tensor k[KVQ_MAX_LAYERS], v[KVQ_MAX_LAYERS];
    struct kvq_rows given[KVQ_MAX_LAYERS][2]; // rows of K and V that they are, where k has a buffer

    // The first entry that a begin's own requests failed for, and the shard that is the cause.
    uint32_t blamed, blamed_entry;

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

// ---- gpu_memory.c ----

// The GPU's part of opening a pool, mapping an extent, closing a pool and mapping a codebook.
int kvq__pool_gpu_open(struct kvq__pool *pool, const Kvq__OpenPoolReply *reply, int fd);
int kvq__pool_gpu_extent(struct kvq__pool *pool, uint32_t number, int fd);
void kvq__pool_gpu_close(struct kvq__pool *pool);
int kvq__pool_gpu_book(const struct kvq__pool *pool, struct kvq__book *book);
int kvq__page_table_gpu_map(struct kvq_local *local, struct kvq__local_session *session,
                            const Kvq__OpenTableReply *reply, int fd);
// Waits until the GPU has finished this process's work, then unmaps the table.
void kvq__page_table_gpu_unmap(struct kvq_local *local, struct kvq__local_session *session);
// A code and a text for a result of the driver.
int kvq__local_fault(const struct kvq_local *local, int result, const char *what);

// ---- layers.c ----

// From the reply to OpenTable: fills session->layers, path and n_layers.
int kvq__reading_take(struct kvq__pool *pool, const Kvq__OpenTableReply *reply,
                      struct kvq__local_session *session);
// Maps the codebooks that its layers need.
int kvq__reading_books(kvq_client *client, struct kvq__pool *pool,
                       struct kvq__local_session *session);

// ---- page_table.c ----

int kvq__page_table_open(struct kvq_local *local, struct kvq__local_session *session);
// Unmaps the table, and tells the daemon if the connection is the same. Waits for its turn in any
// case, and for the daemon's answer no longer than *patience_ns, of which it takes what it waited.
// With none left it only tells the daemon, and not even that where the connection is full. Callers
// that close many tables have one patience for all of them: kvq__closing_patience at first.
void kvq__page_table_close(struct kvq_local *local, struct kvq__local_session *session,
                           uint64_t *patience_ns);
uint64_t kvq__closing_patience(const kvq_client *client);
// Checks the counts of a table: KVQ_OK or KVQ_E_PROTOCOL.
int kvq__page_table_check(const struct kvq__local_session *session);

// ---- members.c ----

// Whether the kvq_local can be used: KVQ_OK, or a code and a text.
int kvq__local_check(const struct kvq_local *local);
// The session that was taken in under that handle, or NULL.
struct kvq__local_session *kvq__local_find(const struct kvq_local *local, uint64_t handle);
// Explains the first failed entry of a call: `op` and `work` (NULL: none) say what was asked for.
void kvq__local_explain(struct kvq_local *local, unsigned op, const struct kvq_work *work,
                        struct kvq_entry *entries, uint32_t n);
// The checks that all calls of a step make first.
int kvq__local_check_call(const struct kvq_local *local, const char *what,
                          const struct kvq_entry *entries, uint32_t n);
int kvq__local_check_attend(const struct kvq_local *local, const struct kvq_work *work,
                            const struct kvq_entry *entries, uint32_t n);
// Whether its calls are those with a stream: KVQ_OK or KVQ_E_INVALID.
int kvq__local_check_place(const struct kvq_local *local, bool on_stream);
// Whether an entry can be in a step that begins: KVQ_OK or a code.
int kvq__local_judge(const struct kvq_local *local, const struct kvq_entry *entry);
// Whether an entry matches its session's part in the step: KVQ_OK or a code.
int kvq__local_member(const struct kvq_local *local, const struct kvq_entry *entry);
// Adds an entry's session to the step.
void kvq__local_join(struct kvq_local *local, const struct kvq_entry *entry);
// Takes an entry's session out of the step.
void kvq__local_leave(struct kvq_local *local, const struct kvq_entry *entry);
// Notes of which entries a call that ended with rc has, or lacks, K and V that `work` gives.
void kvq__local_gave(struct kvq_local *local, const struct kvq_work *work,
                     const struct kvq_entry *entries, uint32_t n, int rc);
// Whether a session whose end had this code may try again.
bool kvq__local_may_retry(int code);
// After an end: those that may try again stay in the step, and nobody else does.
void kvq__local_keep(struct kvq_local *local, const struct kvq_entry *entries, uint32_t n);
// Ends the step for all its sessions.
void kvq__local_over(struct kvq_local *local);

// ---- through_daemon.c ----

int kvq__through_begin(struct kvq_local *local, struct kvq_entry *entries, uint32_t n);
int kvq__through_attend(struct kvq_local *local, const struct kvq_work *work,
                        struct kvq_entry *entries, uint32_t n);
int kvq__through_end(struct kvq_local *local, const struct kvq_step_work *work,
                     struct kvq_entry *entries, uint32_t n);
void kvq__through_abort(struct kvq_local *local);

// ---- steps.c ----

// As kvq_local_begin and _end, once the call was checked; on local->stream if there is a bucket.
int kvq__local_begin(struct kvq_local *local, struct kvq_entry *entries, uint32_t n);
int kvq__local_end(struct kvq_local *local, const struct kvq_step_work *work,
                   struct kvq_entry *entries, uint32_t n);

// ---- attend.c ----

// Allocates all memory that attention needs, so that no call of a step allocates.
int kvq__attend_open(struct kvq_local *local);
void kvq__attend_close(struct kvq_local *local);

// Whether an entry's part in a call is valid: KVQ_OK or a code.
int kvq__local_check_part(const struct kvq_local *local, const struct kvq_work *work,
                          const struct kvq_entry *entry);
// Whether entry i writes rows that one before it writes, whose status is 0. Rows [*from, *to) are
// those that were written so far; at first UINT64_MAX and 0.
bool kvq__local_row_taken(const struct kvq_entry *entries, uint32_t i, uint64_t *from,
                          uint64_t *to);
// Whether a call writes bytes twice, or over what it reads, for entries whose status is 0: a code
// and a text. Unless it is captured into a graph, whose other layers may use memory by turns, also
// over K and V that earlier layers of the step gave.
int kvq__local_check_outputs(const struct kvq_local *local, const struct kvq_work *work,
                             const struct kvq_entry *entries, uint32_t n, bool captured);
// The call of the kernels for an entry, whose part is valid.
struct kvq_attend kvq__local_call(const struct kvq_local *local, const struct kvq_work *work,
                                  const struct kvq_entry *entry);
// Checks the tensors of a call. KVQ_OK, or a code and a text.
int kvq__local_check_work(const struct kvq_local *local, const struct kvq_work *work);
// Keeps the tensors K and V for the step's end.
void kvq__local_note(struct kvq_local *local, const struct kvq_work *work);
// And which of their rows are read until then: those of the entries whose status is 0.
void kvq__local_note_rows(struct kvq_local *local, const struct kvq_work *work,
                          const struct kvq_entry *entries, uint32_t n);

// ---- bucket.c ----

// The tensors of an attention: K, V and Q, its output and its log-sum-exp.
enum { KVQ__TENSORS = 5 };
struct kvq__tensors {
    const struct kvq_tensor *at[KVQ__TENSORS];
};
struct kvq__tensors kvq__tensors_of(const struct kvq_work *work);

struct kvq_bucket {
    LIST_ENTRY(kvq_bucket) link; // of the kvq_local's
    kvq_local *local;
    uint64_t max_tokens;
    uint32_t max_sessions, max_queries;
    uint32_t n_layers;
    struct kvq__local_layer *layers; // what sessions must have, too
    struct kvq_gpu_attend_limits *limits;
    size_t *batch_at; // of each layer, in bytes; one more: all of them
    kvq_gpu_ptr batch, workspace;
    // Pinned memory that batches are copied from, used by turns.
    struct {
        uint8_t *memory;
        struct kvq_gpu_event *passed;
        bool used;
    } slots[3];
    uint32_t slot;
    bool filled[KVQ_MAX_LAYERS];   // layers whose batches were written to the slot
    struct kvq_gpu_stream *stream; // that it was used on last
    bool used;
    // Noted while a graph was captured; their buffers are kept.
    bool noted[KVQ_MAX_LAYERS];
    struct kvq_work works[KVQ_MAX_LAYERS];
    // Of one layer's batch, max_sessions of each: which entries they are for, sorted so that those
    // that share blocks stand side by side, their calls, and how many tokens each shares with the
    // one before.
    uint32_t *order;
    struct kvq_attend *calls;
    uint64_t *shared;
    uint32_t *narrow_rows; // of each layer's batch, if it is launched by itself
};

// Whether a bucket of the kvq_local has layers that a graph captured: it may be replayed.
bool kvq__buckets_captured(const struct kvq_local *local);
// Notes the tensors that a graph was captured with for a layer.
void kvq__bucket_note(struct kvq_bucket *bucket, const struct kvq_work *work);
// Whether the buffers of all these tensors are still open: KVQ_OK or KVQ_E_BUFFER.
int kvq__bucket_check_noted(const struct kvq_bucket *bucket);
// Makes a stream wait for what was given to the bucket's.
int kvq__bucket_follow(const struct kvq_bucket *bucket, struct kvq_gpu_stream *stream);
// Takes the next slot, which no batch was written to; waits until the stream has copied its earlier
// contents.
int kvq__bucket_turn(struct kvq_bucket *bucket, struct kvq_gpu_stream *stream);
// Writes a layer's batch, of the entries whose status is 0, to the slot, once a turn; copies it, or
// several layers [layer, to) at once when all are written. `captured`: for the launches of a
// graph.
int kvq__bucket_fill(struct kvq_bucket *bucket, const struct kvq_work *work,
                     const struct kvq_entry *entries, uint32_t n, bool captured);
int kvq__bucket_copy(struct kvq_bucket *bucket, uint32_t layer, uint32_t to);
int kvq__bucket_launch(struct kvq_bucket *bucket, uint32_t layer, bool captured,
                       struct kvq_gpu_stream *stream);

#endif
