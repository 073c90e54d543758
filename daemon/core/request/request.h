// SPDX-License-Identifier: Apache-2.0
//
// Requests under way: what their operations share; see request.c and entries.c. Part of state.h.
#ifndef KVQ_DAEMON_CORE_REQUEST_REQUEST_H
#define KVQ_DAEMON_CORE_REQUEST_REQUEST_H

#include "daemon/core/mem/room.h"
#include "daemon/core/request/step.h"
#include "daemon/core/session/client.h"

enum {
    KVQ__ARENA_BYTES = 4 << 20, // scratch of a queue besides partial results
    KVQ__WAVE_ROOM = 17 << 10,  // of a chunk, for what a wave needs whatever its entries
};

enum {
    KVQ__VIEW_K,
    KVQ__VIEW_V,
    KVQ__VIEW_Q,
    KVQ__VIEW_OUT,
    KVQ__VIEW_LSE,
    KVQ__VIEW_LIST,
    KVQ__VIEWS
};

// Where K and V of an entry's tokens come from.
struct kvq__source {
    const uint8_t *k, *v; // of head 0 and the first token; paged: of page 0
    const struct kvq_wire_view *k_view, *v_view;
    const int32_t *list; // of the engine's pages; NULL = not paged
};

// A unit whose error is measured where it is packed (pack_error.h). One at a time: the poller
// begins and ends it, and in between it is the job's.
struct kvq__pack_sample {
    bool taken, measured;
    char format[KVQ_FORMAT_NAME];
    uint32_t layer, head;
    uint64_t token; // the unit's first
    double k, v;
    uint64_t next_at, number;
    uint32_t skip; // so many jobs before the next one, once it is time
};

// Units of one layer to pack; the entry's items [first_item, ..) are theirs.
struct kvq__layer_pack {
    uint32_t layer, first_item;
    uint64_t first, end;    // tokens
    struct kvq_page *pages; // from the page of `first` on
    uint8_t *extras;
};

// One entry's part of a request under way.
struct kvq__entry {
    struct kvq__session *session;      // NULL if the entry failed before it got that far
    struct kvq__handle *handle;        // valid only while the request starts
    bool held;                         // it has a reference to the session,
    uint8_t reading;                   // and reads it (kvq__reading_begin); 0: it does not
    bool tail_use, exclusive, packing; // and holds this of it
    bool packing_all;                  // layers whose packer is the request
    struct kvq__table *table;          // of a STEP, used until it ends; NULL = none
    bool reports_nonfinite;            // it reports that values of an earlier STEP were not finite
    uint64_t reported_serial;          // the session's step then: in_step.serial
    bool fetch_asked;                  // the request waits for a session that is parked
    uint64_t fetch_serial;             // the session's when it began to
    int no_room;                       // why its session cannot come back to its GPU; 0: it can
    struct kvq__pack_sample *sample;   // taken for a unit that it packs; NULL: none
    bool commits_on_gpu;               // a STEP of its session is under way on a GPU for it
    bool unpacked;                     // units that the STEP has made due could not be packed
    struct { // on a GPU, of the wave: layers of a STEP, or tokens of a READ
        uint32_t from, to;
        size_t room;
        uint32_t ops;
        bool more; // the next wave goes on from `to`
    } part;
    struct kvq__need need;   // admission.c: of pages, in the attempt under way
    struct kvq__claim claim; // while the request waits for room
    uint64_t step_serial;
    uint64_t past;        // committed tokens when it started
    uint64_t attend_work; // what kvq_attend_work says of it, of work_of_all
    uint32_t n_items;
    uint32_t n_pages;
    struct kvq_page *pages;
    struct {           // read.c
        uint64_t from; // first token that is there
        uint32_t tokens;
        const uint8_t *extras, *pool; // as in struct kvq_reading
    } read;
    union {      // of the pass under way
        struct { // append.c
            struct kvq__source source;
            int32_t *list;
            struct kvq_store_counts *counts; // one for each item
        } store;
        struct {                             // step_all.c
            struct kvq__source *sources;     // of each layer
            int32_t *list;                   // NULL = not paged
            struct kvq_store_counts *counts; // one for each item: [layer][page]
        } all;
        struct { // pack.c, all layers
            struct kvq__layer_pack *packs;
            uint32_t n;
        } packs;
        struct {                 // pack.c
            uint64_t first, end; // tokens to pack
            uint8_t *extras;
            uint32_t first_page;
        } pack;
        struct kvq_attend_job attend; // attend.c
        struct {                      // truncate.c
            int32_t *list;
        } accept;
        struct { // fork.c
            struct kvq__copy *copies;
            uint32_t room;  // copies allocated
            uint64_t work;  // that making it was, and giving it back would be
            uint64_t bytes; // of blocks that it took
            uint64_t handle;
        } fork;
    };
    struct kvq__session *forked; // the new session, referenced; else NULL
};

// Units of any layers and sessions that a wave packs on a GPU (gpu_wave.h).
struct kvq__packs {
    struct kvq__queue *queue; // with an open chunk; NULL: nothing was begun, the rest is stale
    STAILQ_HEAD(, kvq__pack_part) parts;
    uint32_t n_parts, n_units, n_lessons;
    size_t room; // of the chunk, that launching takes
    bool cut;    // there was no room for some
};

// A pass over the entries of a request goes in waves: each takes as many entries as the arena has
// room for. The stages of a wave run one after the other.
struct kvq__stage {
    uint32_t (*count)(const struct kvq__entry *w); // items of one entry
    void (*item)(const struct kvq__queue *q, uint32_t i, uint32_t item, void *workspace);
};
struct kvq__pass {
    // Takes the memory for entry i from the arena; may fail the entry. False if this wave has no
    // room left; then nothing has changed.
    bool (*prepare)(struct kvq__queue *q, uint32_t i);
    void (*gather)(struct kvq__queue *q); // called when the wave is full; may be NULL
    struct kvq__stage stages[2];
    uint32_t n_stages;
    // On a GPU, instead of the stages: enqueues the work of the wave's entries. 0, or a code with
    // which all of them fail. gpu_room: bytes of the arena that this takes for an entry at most.
    int (*gpu_wave)(struct kvq__queue *q);
    size_t (*gpu_room)(const struct kvq__queue *q, uint32_t i);
    // Operations that it will take for an entry at most, besides KVQ__WAVE_OPS; NULL: none.
    uint32_t (*gpu_ops)(const struct kvq__queue *q, uint32_t i);
    // Called after the stages; on a GPU, when the work is enqueued. Memory of the arena is still
    // valid. May be NULL.
    void (*finish)(struct kvq__queue *q, uint32_t i);
    // Called when all work of the request has ended, also on GPUs. Memory of the arena is not valid
    // any more: later waves, and on a GPU other queues, have used it. May be NULL.
    void (*end)(struct kvq__queue *q, uint32_t i);
};

// What a queue waits for whose request is under way on a GPU.
enum kvq__gpu_wait {
    KVQ__GPU_NONE,
    KVQ__GPU_ROOM, // until its work stream has room; then the next wave is filled
    KVQ__GPU_GATE, // until streams may be made to wait for clients (gpu/gate.h); it tries again
    KVQ__GPU_END,  // until all its work has ended; then the request ends
};

// A request's turn among those that wait for room (admission.c).
struct kvq__turn {
    uint64_t ticket;    // smaller ones came earlier; 0: it does not wait
    bool in_line;       // among core->room.waiters and in its line, until its request ends
    bool listed;        // it waits
    uint64_t since;     // when it began to wait
    bool extents;       // it waits for extents that are being made, not for memory of others
    uint64_t seen;      // its line's `freed` (or core->room.extents_made) when it was tried last
    uint64_t look_at;   // when it is tried again even if nothing was freed
    uint64_t looked;    // when it last looked for sessions that may go; 0 = never
    uint64_t look_work; // layers and blocks that this visited
    const struct kvq__pool *place; // where it found no room,
    struct kvq__namespace *ns;
    bool quota;                     // for it is at its limit there
    struct kvq__line *line;         // so it stands here,
    struct kvq__waits *waits;       // and is one of these
    uint32_t entry;                 // the one that was refused, unless refused.code is 0
    struct kvq__shortage refused;   // what it was refused
    struct kvq__need need;          // without which it is not tried again before its time
    uint64_t tried;                 // when it was tried last, from the start
    const struct kvq__waits *hoped; // that was since there seemed to be room here; NULL: it was not
    bool claims;                    // its entries claim their sessions: while it waits
    uint64_t work;                  // what the last try took: layers visited, and more for blocks
    uint64_t taken;                 // core->room.taken before it, or before its last turn;
    uint64_t took;                  // blocks that it took in the turns before that
    uint64_t attempt;               // to take pages (struct kvq__demand)
    bool counted, swept;            // in it: the entries' needs are counted, deferred frees ended
};

struct kvq__queue {
    struct kvq__core *core;
    struct kvq__client *client;
    struct kvq_request header;
    struct kvq_completion completion;
    struct kvq__buffer *buffers[KVQ__VIEWS]; // of the views in use
    struct kvq__buffer_set held_buffers;
    struct kvq__step *step; // valid only while the request starts
    struct kvq__flight flight;
    struct kvq__job job;
    bool busy, running; // running: passes are under way
    bool ending;        // closed, or its client is going: nothing waits any more
    enum kvq__gpu_wait gpu_wait;
    struct kvq__gpu *gpu;            // that the wave is for; NULL: the host
    struct kvq__work_stream *stream; // with an open chunk, which is the arena then
    bool stream_noted;               // the work stream knows of the request's wait for the client
    uint64_t given[KVQ_MAX_GPUS];    // number of the queue's last work on each work stream
    struct {
        struct kvq__gpu *gpu; // NULL: none
        kvq_gpu_ptr ready, done;
        uint64_t *ready_here;             // the same memory as `ready`, for this process
        const struct kvq__events *events; // instead of these words, if not NULL
        bool used;
    } timeline;
    uint8_t *own_arena;
    size_t own_arena_bytes;
    bool holding; // its request holds sessions
    struct kvq__turn turn;
    TAILQ_ENTRY(kvq__queue) waiter_link, line_link;
    uint64_t work_of_all; // attend: of the entries that were checked
    uint32_t n_written;
    uint16_t written[KVQ_MAX_BATCH]; // entries whose outputs were checked, by their rows
    const struct kvq__pass *passes[3];
    struct kvq__packs packs; // units that the wave of a STEP packs, on a GPU
    bool wave_more;          // the wave's last entry goes on in the next one
    bool cloning;            // FORK: new sessions are being made, up to entry `cloned`
    bool undoing;            // or are being given back
    uint32_t cloned;
    uint32_t n_passes, pass, stage, wave_from, wave_to;
    uint8_t *arena;
    size_t arena_used, arena_bytes;
    size_t wave_start; // of the arena
    size_t wave_room;  // bytes that the wave's GPU work will take
    uint32_t wave_ops; // operations that it will be
    uint32_t first_item[KVQ_MAX_BATCH + 1];
    struct kvq_step_layer layers[KVQ_MAX_LAYERS]; // of a STEP
    struct kvq__buffer *layer_buffers[KVQ_MAX_LAYERS][2];
    struct kvq__step own_step;
    struct kvq_entry_wire entries[KVQ_MAX_BATCH];
    struct kvq_result results[KVQ_MAX_BATCH];
    struct kvq__entry work[KVQ_MAX_BATCH];
};

// An operation: checks all entries, then holds everything that it needs. If it has to wait it holds
// nothing and returns KVQ__WAIT, and is called again from the start. Never blocks.
typedef enum kvq__progress kvq__operation(struct kvq__queue *q);
kvq__operation kvq__op_step_begin, kvq__op_step_end, kvq__op_step_abort, kvq__op_append,
    kvq__op_attend, kvq__op_append_attend, kvq__op_truncate, kvq__op_fork, kvq__op_accept,
    kvq__op_read, kvq__op_step;

// Ends the request with this status.
enum kvq__progress kvq__request_end(struct kvq__queue *q, int status);
// Runs the passes, skipping failed entries, and ends the request.
enum kvq__progress kvq__request_run(struct kvq__queue *q, const struct kvq__pass *const *passes,
                                    uint32_t n);
// Whether the request's deadline has passed.
bool kvq__request_is_late(const struct kvq__queue *queue);
// Whether it runs in the order of its client's stream.
static inline bool kvq__is_on_stream(const struct kvq__queue *q)
{
    return q->header.flags & KVQ_REQ_ON_STREAM;
}
// Sets an entry's result and returns code.
int kvq__entry_fail(struct kvq__queue *q, uint32_t i, int code, uint64_t value);
// The same for a failure that another shard of the session's group has caused.
int kvq__entry_fail_by(struct kvq__queue *q, uint32_t i, int code, uint64_t value, uint32_t shard);
// True if the entry has not failed.
static inline bool kvq__entry_alive(const struct kvq__queue *q, uint32_t i)
{
    return q->results[i].status == 0 && q->work[i].session;
}
// Looks up the entry's handle (and that it may write). Fails the entry if need be.
int kvq__entry_open(struct kvq__queue *q, uint32_t i, bool write);
// The same, and that the session is in the request's step, if it names one, and stands at the
// entry's position.
int kvq__entry_open_at(struct kvq__queue *q, uint32_t i, bool write);
// Finds the request's step: 0, also if it names none, or KVQ_E_NO_STEP.
int kvq__request_step(struct kvq__queue *q);
// Takes hold of the entry's session until the request ends.
void kvq__hold(struct kvq__queue *q, uint32_t i);
void kvq__hold_reading(struct kvq__queue *q, uint32_t i);
void kvq__hold_tail(struct kvq__queue *q, uint32_t i);
void kvq__hold_exclusive(struct kvq__queue *q, uint32_t i);
void kvq__hold_buffers(struct kvq__queue *q);
void kvq__request_release(struct kvq__queue *q);
// For entries that read committed tokens: true if another request is changing these tokens, or is
// packing units that the entry would have to pack first.
bool kvq__read_must_wait(const struct kvq__queue *q, uint32_t i, uint32_t layer);
// Holds the session for reading, and the layer for packing if units are due.
void kvq__hold_layer(struct kvq__queue *q, uint32_t i, uint32_t layer);

// Whether further workers would save less of the attention than it takes to wake them.
bool kvq__attend_brief(const struct kvq__queue *q);

extern const struct kvq__pass kvq__pass_store, kvq__pass_pack, kvq__pass_attend, kvq__pass_read,
    kvq__pass_accept, kvq__pass_fork, kvq__pass_store_all, kvq__pass_pack_all, kvq__pass_publish;

#endif
