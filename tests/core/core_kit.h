// SPDX-License-Identifier: Apache-2.0
//
// What the tests of the daemon's core share: a core on heap memory that can be made to fail,
// clients with one buffer and one queue, requests driven inline in random order of items, and a
// check that walks all of the core and counts everything anew.
#ifndef KVQ_TESTS_CORE_KIT_H
#define KVQ_TESTS_CORE_KIT_H

#include "daemon/core/state.h"

struct kit {
    struct kvq__core *core;
    uint64_t random; // state of the generator
    uint64_t now;
    void *workspace;
    uint32_t fail_one_in; // allocations and extents that fail; 0 = none
    bool no_pages;        // a bare extent gets none just now,
    bool frees_pages;     // before an extent is released
    uint64_t backed;      // bytes of bare extents whose pages were taken
    uint64_t extents_out, allocated_out;
    uint64_t again; // how often a request that kit_request drives gave others a turn
    void (*table_gone)(void *context, const struct kvq__table_memory *memory); // may be NULL
    struct kit_member *members;                                                // that are there
    bool unchecked; // kit_close does not count all anew
    uint64_t buffers_gone, tables_gone, events[KVQ__EVENTS];
    int holds;         // of codebooks
    uint64_t book_id;  // theirs
    uint32_t bookless; // this layer is given none; 0: all are
    char event_session[KVQ_NAME_BYTES], event_text[KVQ_TEXT_BYTES]; // of the last one but refusals
    char refusal_session[KVQ_NAME_BYTES], refusal_text[KVQ_TEXT_BYTES]; // of the last refusal
};

// A client of the kit with a queue and a buffer.
struct member {
    struct kit *kit;
    struct kvq__client *client;
    struct kvq__queue *queue;
    uint64_t id, bytes;
    uint8_t *memory;
    uint32_t buffer;
    struct kvq_step_layer layers[KVQ_MAX_LAYERS]; // of its next STEP
    uint64_t ids_at; // where ids of tokens stand in its buffer, for kit_step; 0: it tells none
};

uint64_t kit_random(struct kit *kit);
uint32_t kit_below(struct kit *kit, uint32_t n); // 0 .. n - 1
bool kit_chance(struct kit *kit, uint32_t percent);
float kit_float(struct kit *kit); // about -2 .. 2

// The configuration's formats of the cores that are opened from now on.
void kit_formats(const struct kvq__own_format *formats, uint32_t n);
// Whether somebody saves and parks sessions of the cores that are opened from now on.
void kit_saves(bool saves);
// How large extents of the cores become that are opened from now on; 2 MiB unless told, as the
// smallest are.
void kit_extents(uint64_t bytes);
// The instruction set of cores opened from now on, at most; the best there is unless told.
void kit_isa(int isa);
// GPUs of the cores that are opened from now on, and memory that both they and the host can reach.
struct kit_gpus {
    struct kvq__gpu *const *gpus;
    uint32_t n;
    void *(*memory_new)(size_t bytes);
    void (*memory_free)(void *memory);
    bool (*step)(void); // streams without threads: some of their work; NULL = they have some
};
void kit_gpus(const struct kit_gpus *gpus); // NULL = none
void kit_open(struct kit *kit, uint64_t seed, uint64_t pool_bytes, uint64_t limit_bytes);
// Checks the core, closes the members that are left, of whose requests nothing may be in flight,
// and asserts that all memory came back.
void kit_close(struct kit *kit);
int kit_teardown(void **state); // of a test: closes the kit that was opened last
#define KIT_TEST(name) TEST_BETWEEN(name, setup, kit_teardown) // behind the file's setup

// So many ns pass; and the core does what is due by then.
void kit_pass(struct kit *kit, uint64_t ns);
void kit_tick(struct kit *kit, uint64_t ns);

// 0 or the core's code.
int member_open(struct kit *kit, struct member *m, uint32_t uid, uint64_t bytes);
// Another buffer over the first bytes of the member's memory. 0 or the core's code.
int kit_buffer(struct member *m, uint64_t bytes, uint32_t *buffer);
// The member's memory holds numbers from now on.
void member_fill(struct member *m);
void member_close(struct member *m); // nothing may be in flight
void member_free(struct member *m);  // after a detach, when its queue is closed

// Runs all items of a job in random order.
void kit_run_job(struct kit *kit, struct kvq__job *job);
// Packs all that is due.
void kit_pack(struct kit *kit);
// Looks at the GPUs, which may go on.
void kit_poll(struct kvq__core *core);
// Looks at the GPUs until all of the queue's work there has ended.
void kit_settle(struct member *m);
// Copies the request to the member's queue.
void kit_load(struct member *m, const struct kvq_request *header,
              const struct kvq_entry_wire *entries);
// Drives a request to its end, or as far as it goes without others: then returns 1. Otherwise its
// status; results in kvq__queue_results().
int kit_request(struct member *m, const struct kvq_request *header,
                const struct kvq_entry_wire *entries);
// The same; if that is 0, the status of its first entry.
int kit_ask(struct member *m, const struct kvq_request *header, const struct kvq_entry_wire *entry);
// The same of a request that has begun: from there, or from what it comes to when it is asked.
int kit_go_on(struct member *m, enum kvq__progress p);
int kit_again(struct member *m);
struct kvq_request kit_header(uint8_t op, uint16_t count);
// The same of a step.
struct kvq_request kit_of_step(uint8_t op, uint16_t count, uint64_t step);
struct kvq_wire_view kit_view(const struct member *m, uint64_t offset, uint32_t heads, uint32_t dim,
                              uint8_t dtype);
// An APPEND of one entry: K from the beginning of the member's buffer, V from its middle.
struct kvq_request kit_append(const struct member *m, uint64_t step, uint32_t layer, uint32_t heads,
                              uint32_t dim);
// An ATTEND of one entry, of queries and to outputs that lie there in the member's buffer.
struct kvq_request kit_attend(const struct member *m, uint32_t layer, uint64_t q_at,
                              uint64_t out_at, uint32_t q_heads, uint32_t dim);

// ---- One session, fed from one tensor ----

// Opens an unnamed session of these layers for writing; 0 if that failed.
uint64_t kit_session(struct member *m, const struct kvq__layer_row *rows, uint32_t n_rows,
                     uint32_t max_rollback);
// Gives each layer that wants one a codebook of made-up numbers; kit->holds counts who has it.
void kit_codebooks(struct kit *kit);
// Opens one that can be opened, or aborts with what the core said.
uint64_t kit_opened(struct member *m, const struct kvq__session_spec *spec);
void kit_drop(struct member *m, uint64_t handle); // which can be dropped
// A fork of a session that can be forked there.
uint64_t kit_fork(struct member *m, uint64_t handle, uint64_t tokens);
// Takes the last n tokens of a session back. 0 or the first code.
int kit_truncate(struct member *m, uint64_t handle, uint32_t n);
// So much a namespace may have of a resource (bytes, sessions) from now on.
void kit_limit(struct kit *kit, const char *ns, uint32_t resource, uint64_t most);
// The namespace of a user.
struct kvq__namespace *kit_namespace(struct kit *kit, uint32_t uid);
struct kvq__session *kit_of(struct member *m, uint64_t handle);
// Gives a session, which has none, a name.
static inline void kit_name(struct kvq__session *s, const char *name)
{
    kvq__lookup_remove(s);
    for (size_t i = 0; i < KVQ_NAME_BYTES && (s->name[i] = name[i]); i++)
        ;
    kvq__lookup_add(s);
    kvq__unsaved_note(s);
}
// One step of n tokens: K and V of every layer are rows [position, position + n) of the fp32
// tensors [rows][heads][dim] at offset 0 and at half of the buffer. 0 or the first code.
int kit_step(struct member *m, uint64_t handle, uint32_t n, uint32_t heads, uint32_t dim);
// The same but for its end; the step's number is KIT_STEP.
int kit_begin(struct member *m, uint64_t handle, uint32_t n, uint32_t heads, uint32_t dim);
enum { KIT_STEP = 99 };
// The same in one STEP. n 0: publishes only.
int kit_whole(struct member *m, uint64_t handle, uint32_t n, uint32_t heads, uint32_t dim);
// One entry's request without tensors: truncate, fork, ... 0 or its status; *value its value.
int kit_simple(struct member *m, uint8_t op, uint64_t step, struct kvq_entry_wire entry,
               uint64_t *value);

// Walks the core: references, bytes, counters, limits (what is above one must not be more than when
// it was last looked at). Aborts with a message if anything is off.
void core_check(const struct kvq__core *core);
// Aborts with the text if the condition does not hold.
#define MUST(condition) ((condition) ? (void)0 : kit_die(__FILE__, __LINE__, #condition))
void kit_die(const char *file, int line, const char *what);
// What kit_die prints besides, for instance the seed.
extern char kit_context[256];

#endif
