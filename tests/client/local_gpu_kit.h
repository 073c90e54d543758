// SPDX-License-Identifier: Apache-2.0
//
// For tests of in-context mode on a GPU, the software driver's: kvqd as another process, and pairs
// of sessions that are given the same steps, one attended to here and one by the daemon.
#ifndef KVQ_TESTS_LOCAL_GPU_KIT_H
#define KVQ_TESTS_LOCAL_GPU_KIT_H

#include <stdbool.h>
#include <stdint.h>

#include "client/kvq.h"
#include "tests/kits/daemon_kit.h"
#include "tests/kits/soft_kit.h"

enum {
    DIM = 64,
    Q_HEADS = 2,
    KV_HEADS = 1,
    LAYERS = 2,
    MAX = 512,      // tokens of a session
    ROWS = 256,     // of a step
    PART = 1 << 17, // bytes of one tensor
    ARENA = 1 << 22,
    SESSIONS = 2,
};

extern struct lg_rig {
    struct daemon daemon;
    kvq_client *client;
    kvq_queue *queue;
    kvq_local *local;
    kvq_bucket *bucket;
    kvq_buffer *buffer, *host;
    kvq_gpu_ptr at;
    void *mapping;    // the engine's of `host`; NULL: kvq_buffer_data
    uint32_t on_host; // bits of the parts that the calls here have in the host's memory
    uint32_t layers, prompt, queries; // of sessions, and at most of a step's tokens
    uint16_t q_heads, kv_heads[LAYERS];
    uint32_t window; // of the second layer
    char gpu[48];
    struct kvq_gpu_stream *stream;
    struct kvq_soft_counts before;
    int files;
    uint64_t waits;   // for the GPU, of the last step here
    uint64_t brought; // bytes by its kernels
    uint32_t salt;
} rig;

// Once in a program: the daemon's directory. lg_cleanup returns what daemon_cleanup does.
void lg_prepare(void);
int lg_cleanup(void);

// Setup and teardown of a test: kvqd, a client with a queue, a stream and a buffer there. Nothing
// may be left behind.
int lg_setup(void **state);
int lg_teardown(void **state);
// The client's part of both, with what rig has then.
void lg_connect(void);
void lg_disconnect(void);

void lg_open_local(uint32_t flags);
void lg_open_bucket(kvq_session session, uint32_t queries);

// Two sessions with the same steps.
struct lg_pair {
    kvq_session here, there;
    uint64_t tokens;
};

// Shard 0 or 1 of a session of two, or a session of its own (-1). rig.layers layers, with
// rig.kv_heads KV heads, the second one with a window.
void lg_open_shard(const char *format, int shard, struct lg_pair *p);
void lg_open_pair(const char *format, struct lg_pair *p);
// Both sides of `of`, up to so many tokens.
void lg_fork_pair(const struct lg_pair *of, uint64_t tokens, struct lg_pair *p);
void lg_close_pair(struct lg_pair *p);

// The buffer: K, V and Q of each layer, then both sides' outputs.
struct kvq_tensor lg_tensor(uint32_t part, uint32_t layer);
struct kvq_work lg_work_of(uint32_t layer, bool here);
uint8_t *lg_host_memory(void);
// Other values in every step.
void lg_fill(void);
void lg_compare(uint32_t rows, uint64_t tokens);

struct lg_batch {
    struct kvq_entry entries[4];
    uint32_t n, rows, q_rows;
};

struct lg_batch lg_batch_of(const struct lg_pair *p, uint32_t n, uint32_t append, bool here);
void lg_all_fine(int rc, const struct lg_batch *b);
// A step of the daemon's.
void lg_step_there(struct lg_batch *b);
int lg_begin(struct lg_batch *b);
int lg_attend(const struct kvq_work *w, struct lg_batch *b);
// A step of a session here, whose other side has none: the entry's status.
int lg_step_here(const struct lg_pair *p, uint64_t position, uint32_t append);

// How often this process has waited for the GPU.
uint64_t lg_waits(void);

// A step of both sides, whose outputs must be the same, with new values. With a graph the
// attentions are replayed, else launched one by one.
void lg_step(struct lg_pair *p, uint32_t n, uint32_t append, struct kvq_gpu_exec *exec);
// The same with the values that are there, from this row of the tensors on.
void lg_step_from(struct lg_pair *p, uint32_t n, uint32_t append, uint32_t row,
                  struct kvq_gpu_exec *exec);
struct kvq_gpu_exec *lg_capture(struct lg_pair *p, uint32_t n);
// Once the stream has ended its work.
void lg_end_capture(struct kvq_gpu_exec *exec);

#endif
