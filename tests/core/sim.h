// SPDX-License-Identifier: Apache-2.0
//
// The seeded simulation of the whole core: what its files share.
//
// Actors are clients that open, step, fork, truncate, accept, read, attend and die at any moment,
// with requests of several clients under way at once, items run in random order, and memory that
// runs out. Tracks are sessions as they should be. An operation's outcome is predicted from the
// tracks alone, at the moment the core takes hold of what it needs, and compared when it ends.
#ifndef KVQ_TESTS_SIM_H
#define KVQ_TESTS_SIM_H

#include "tests/core/core_kit.h"
#include "tests/core/core_model.h"
#include "tests/core/vault.h"

enum {
    SIM_ACTORS = 4,
    SIM_TRACKS = 64,
    SIM_HANDLES = 12, // of one actor
    SIM_BATCH = 3,
    SIM_MAX_STEP = 300,
    SIM_MAX_TOKENS = 1800,
    SIM_MAX_QUERIES = 24,
    SIM_HEADS = 4,
    SIM_DIM = 64,
    SIM_VARIANTS = 7,              // kinds of sessions, see track_rows
    SIM_ROW = SIM_HEADS * SIM_DIM, // floats of a row of any tensor
    SIM_ROWS = SIM_BATCH * SIM_MAX_STEP,
};

// Floats of the regions of an actor's buffer, and numbers of its lists.
enum {
    SIM_TENSOR = SIM_ROWS * SIM_ROW,
    SIM_QUERY_ROWS = SIM_BATCH * SIM_MAX_QUERIES,
    SIM_QUERIES = SIM_QUERY_ROWS * SIM_ROW,
    SIM_LSES = SIM_QUERY_ROWS * SIM_HEADS,
    SIM_LISTS = SIM_BATCH * SIM_MAX_STEP,
};

struct actor;

struct track {
    bool used, alive, named;
    bool on_gpu;  // its numbers are right to rounding, not to the bit
    bool streams; // on the first GPU, where timelines are
    uint64_t id;
    char name[32];
    uint32_t shard, shards, variant;
    struct model model;
    struct actor *writer; // who has it open for writing
    uint32_t readers;
    struct actor *stepper; // whose step it is in; NULL = none
    uint64_t step_serial;  // changes with every beginning and end of a step
    uint32_t step_tokens;
    uint64_t joined;    // sessions stand in a step in the order of this, the last one first
    bool prepared;      // has ended its step, and waits for the other shard
    uint32_t undone_by; // as the session's
    uint8_t appended[MODEL_LAYERS]; // 0 not, 1 under way, 2 done
    bool spoiled;                   // K and V were handed to a layer that has no cache of its own
    uint64_t detached_at;
    bool untold;    // its writer has yet to hear that values of its last step were not finite
    uint32_t story; // whose ids its steps bring, mostly
    uint64_t known; // of its ids; the core may know less
    bool step_told; // those of the open step, and all before
    int32_t ids[SIM_MAX_TOKENS]; // the open step's included
};

struct hold {
    bool used, read_only, taken;
    struct track *track; // NULL if taken
    uint64_t handle;
    struct kvq_table_page *table; // NULL = none
};

// One entry of the operation under way.
struct part {
    struct hold *hold;
    struct track *track; // NULL if the handle was stale
    int expect;          // predicted status
    uint64_t value;      // predicted value, where there is one
    bool any_value;
    uint64_t past, serial;
    bool on_gpu;                        // where it was when the core took hold of it
    bool torn;                          // the end of a step that the other shard ends elsewhere
    bool poisoned;                      // its K or V holds a NaN or an infinity
    bool refused;                       // and the core has seen it
    bool whole;                         // a whole step that has yet to commit
    bool committed;                     // it has
    bool heard;                         // that an earlier one had values that were not finite
    const struct kvq_table_page *table; // that it publishes; NULL = none
    struct track *forked;               // not alive until the fork is done
    uint64_t from;                      // read: the first token that is there
};

// OWED: answered, but the GPU waits for the client's signal, which has yet to be given.
enum phase { IDLE, WAITING, RUNNING, ON_GPU, OWED };

struct actor {
    struct member member;
    bool present, gone;        // gone: detached, its queue still to be closed
    bool closing;              // its queue is about to be closed, and another one opened
    uint64_t *timeline;        // [2]: ready and done, on the first GPU; NULL = its queue has none
    struct sim_events *events; // in between; NULL = the words are the queue's
    uint64_t signal;           // of the last request on a stream
    struct hold holds[SIM_HANDLES];
    uint64_t step;  // number of its open step; 0 = none
    uint64_t steps; // numbers used
    enum phase phase;
    struct kvq_request header;
    struct kvq_entry_wire entries[SIM_BATCH];
    struct part parts[SIM_BATCH];
    int32_t lists[SIM_BATCH][SIM_MAX_STEP];
    uint32_t *order, n_items, next_item; // items still to run
};

// One save and one restore at a time.
struct keep {
    struct vault vault;
    struct kvq__save *save;
    bool copied;
    struct kvq__restore *restore;
    const struct vault_session *from;
    uint32_t layer; // that comes next
    struct kvq__store_job order;
    bool ordered, fetches; // an order's save is yet to end; the restore is of one
    uint32_t tries;
    uint64_t saves, restores, read_prefixes;
};

struct sim {
    struct kit kit;
    struct actor actors[SIM_ACTORS];
    struct track tracks[SIM_TRACKS];
    void *workspace;
    uint32_t *order, n_items, next_item; // of the background job
    struct kvq__job *background;
    struct keep keep;
    struct kvq__counts counts;
    bool limits; // change in this run
    uint64_t joins;
    uint64_t tables, checked, checked_gpu, streamed, committed, refused, failed_memory, deaths,
        forks, pairs, undone, moved;
    uint64_t prefixes, shared; // that it did something; shared: tokens that sessions began with
    uint32_t events;
    uint64_t trace;          // of all that has happened: equal if it was the same
    uint64_t closed;         // queues, in the middle of a step
    uint64_t lowered, above; // limits set below what was used, and what limits have refused
};

// ---- sim_host.c, sim_gpu.c, sim_soft.c ----

// The GPUs that sessions live on besides the host; NULL = none.
const struct kit_gpus *sim_gpus(void);
// Whether their streams run by themselves, so that signals may come late.
bool sim_runs_late(void);
// Seeds that are run if nobody says.
uint32_t sim_seeds(void);
// What tests begin with that have streams with threads: they are delayed as the seed says.
void sim_begin(uint64_t seed);
// What each seed of the simulation begins with: nothing happens but what the seed decides.
void sim_in_steps(uint64_t seed);
// Then: extents of GPUs are made and freed beside the core, when the seed says (extents.h).
void sim_reserves(uint64_t seed);

// ---- sim.c ----

// Adds to the run's trace what has come of something.
void sim_trace(struct sim *sim, uint64_t value);
void sim_trace_bytes(struct sim *sim, const void *bytes, size_t n);

// ---- sim_order.c ----

void order_open(struct sim *sim, struct actor *a);
void order_ask(struct actor *a);      // before a request on a stream
void order_answered(struct actor *a); // its completion is there
void order_end(struct actor *a);      // dies: a driver ends what it recorded
void order_close(struct actor *a);

// ---- sim_tracks.c ----

struct track *track_new(struct sim *sim, bool named, uint32_t variant, uint32_t max_rollback);
void track_die(struct sim *sim, struct track *t);
void track_leave_step(struct track *t); // as it was before the step
// The other shard, if it is there; NULL for sessions of one.
struct track *track_sibling(struct sim *sim, const struct track *t);
// Leaves its step, and the other shard with it.
void track_leave(struct sim *sim, struct track *t);
// The same for all tracks of an actor's step.
void track_leave_all(struct sim *sim, const struct actor *a);
// The one that joined the actor's step last; NULL: it has none.
struct track *track_last_joined(struct sim *sim, const struct actor *a);
// Where tracks are by now: moves end when they end.
void track_places(struct sim *sim);
struct kvq__session *find_session(const struct sim *sim, uint64_t id);
// The layers of a variant, as the core is asked for them.
void track_rows(uint32_t variant, struct kvq__layer_row *rows);
// The session's format of a variant, or NULL; and the configuration's only one.
const char *track_format(uint32_t variant);
const struct kvq__own_format *track_formats(void);

// ---- sim_ids.c ----
//
// Where ids are told, K and V are a function of the ids up to their token and of the story's salt,
// and of nothing else: whoever has the same prefix must see the same.

enum { SIM_STORIES = 6 };
int32_t story_id(uint32_t story, uint64_t token);
const char *story_salt(uint32_t story);
// K (side 0) or V of one layer, of tokens [from, from + n) of a track: rows of SIM_ROW floats.
void ids_rows(const struct track *t, uint32_t layer, uint32_t side, uint64_t from, uint32_t n,
              float *rows);
// The track begins with the first tokens of its story, which another one stored.
void ids_begin(struct track *t, uint64_t tokens);
void ids_shorten(struct track *t); // the model has

// ---- sim_check.c ----

// What an entry got is what its track says.
void sim_check_attend(struct sim *sim, struct actor *a, uint32_t i);
void sim_check_read(struct sim *sim, struct actor *a, uint32_t i);
// Prints how often what has happened in so many seeds.
void sim_print(const struct sim *total, uint64_t seeds);
// A simulation in which nothing happened proves nothing. gpus: those of the machine, or NULL;
// requests are on streams where one may wait for its client.
bool sim_all_happened(const struct sim *total, const struct kit_gpus *gpus);

// ---- sim_build.c ----

// Builds a random operation for an idle actor; false if it has nothing to do.
bool op_build(struct sim *sim, struct actor *a);

// ---- sim_keep.c ----

void keep_happen(struct sim *sim);
bool keep_reads_prefix(const struct sim *sim); // a session that is no track's, for a while
void keep_end(struct sim *sim);                // ends what is under way

// ---- sim_park.c ----

void park_any(struct sim *sim);   // parks one, brings it back, or pins it
bool park_serve(struct sim *sim); // does some of what the core wants; false if there is nothing
void park_written(struct sim *sim, bool good);
bool park_fails(struct sim *sim); // the restore has ended for a disk that fails
bool park_waits(const struct sim *sim);
// What a request on it fails with since it could not be brought back; 0 if it is here.
int park_predict(const struct sim *sim, const struct track *t);

// ---- sim_quota.c ----

void quota_begin(struct sim *sim, bool limits);             // limits: they change in this run
void quota_happen(struct sim *sim);                         // changes them
void quota_end(struct sim *sim);                            // counts refusals
bool quota_is_full(struct sim *sim, enum kvq__limit which); // not one more
bool quota_was_met(struct sim *sim);                        // anything was refused by a limit

// ---- sim_ops.c ----

bool actor_has_step(const struct sim *sim, const struct actor *a);
bool track_is_complete(const struct track *t);
bool actor_all_complete(const struct sim *sim, const struct actor *a);
bool op_appends(uint8_t op);
bool op_attends(uint8_t op);
bool op_on_stream(const struct actor *a);
// Predicts each entry's outcome; called when the core has taken hold of what it needs.
void op_acquired(struct sim *sim, struct actor *a);
// Storing refuses tokens, and commits whole steps, before the request as a whole is done; looks
// whether it did. Also when its client is gone.
void op_went_on(struct sim *sim, struct actor *a);
// Compares and applies to the tracks.
void op_done(struct sim *sim, struct actor *a);

// ---- sim_whole.c ----

// Whole steps: tensors of all layers; what becomes of entry i; that it has begun; which of them
// have committed by now; and what the answer must be then.
void whole_fill(struct actor *a);
int whole_predict(struct actor *a, uint32_t i);
void whole_began(struct actor *a, uint32_t i);
void whole_follow(struct sim *sim, struct actor *a);
void whole_done(struct sim *sim, struct actor *a, uint32_t i, const struct kvq_result *r);
void table_open(struct sim *sim, struct actor *a, struct hold *h);
void table_close(struct actor *a, struct hold *h);
void table_free(void *context, const struct kvq__table_memory *memory); // when it is gone

// Floats of the actor's buffer, by region.
float *actor_k(struct actor *a);
float *actor_v(struct actor *a);
float *actor_q(struct actor *a);
float *actor_out(struct actor *a);
float *actor_lse(struct actor *a);
int32_t *actor_ids(struct actor *a); // SIM_MAX_TOKENS
uint64_t actor_bytes(void);

#endif
