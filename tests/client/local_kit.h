// SPDX-License-Identifier: Apache-2.0
//
// For tests of in-context mode: kvqd as another process, and pairs of sessions that are given the
// same steps, one attended to here and one by the daemon.
#ifndef KVQ_TESTS_LOCAL_KIT_H
#define KVQ_TESTS_LOCAL_KIT_H

#include <stdbool.h>
#include <stdint.h>

#include "client/kvq.h"
#include "tests/kits/daemon_kit.h"

enum { LOCAL_ROWS = 2048, LOCAL_BUFFER = 96 << 20, LOCAL_LAYERS = 8, LOCAL_BATCH = 8 };

// Tests of many steps make a part of them under ThreadSanitizer, which is ten times as slow and
// remembers accesses: a race need not happen to be seen.
#ifdef KVQ_TSAN
enum { LOCAL_PART = 3 };
#else
enum { LOCAL_PART = 1 };
#endif

struct local_rig {
    struct daemon daemon;
    char codebooks[80];
    kvq_client *client;
    kvq_queue *queue;
    kvq_buffer *buffer; // of LOCAL_BUFFER bytes
    kvq_local *local;
    uint64_t seed;
    int files;
};
extern struct local_rig rig;

// Once in a program: the directories, and codebooks "v" (for vecinfer-2) and "m" (for million-4).
// local_cleanup returns what daemon_cleanup does.
void local_prepare(uint32_t layers, uint32_t kv_heads, uint32_t dim);
int local_cleanup(void);

// Setup and teardown of a test: kvqd, a client, a queue, a buffer. Nothing may be left behind.
int local_setup(void **state);
int local_teardown(void **state);

// A random number below n.
uint32_t local_random(uint32_t n);

// Runs items on three threads besides its own.
void local_parallel(void *context, uint32_t n, void (*item)(void *arg, uint32_t i), void *arg);

// What is attended to both ways. Layers are alike in all sessions of a batch.
struct local_pair {
    kvq_session here, there;
    uint64_t tokens;
};
struct local_model {
    struct kvq_layer rows[LOCAL_LAYERS];
    uint32_t layers;
    uint8_t dtype, out_dtype; // of K and V and Q, and of outputs
    uint64_t stride;          // bytes of a row of any tensor
};

// A model of some layers: `q_heads` and `kv_heads` of `dim`; the second has a sliding window of 100
// and a soft-cap, the last one reads the first one's cache.
void local_model(struct local_model *m, uint32_t layers, uint16_t q_heads, uint16_t kv_heads,
                 uint16_t dim);
// Opens both sessions of a pair, and takes one into rig.local.
void local_open_pair(const struct local_model *m, const struct kvq_session_options *options,
                     struct local_pair *pair);
void local_close_pair(struct local_pair *pair);

// One step of n pairs: `append` tokens of each, attended to by up to 64 of them, both ways; the
// outputs must be the same to the bit. append 0: one query behind all tokens. commit false: abort.
void local_step(const struct local_model *m, struct local_pair *pairs, uint32_t n,
                const uint32_t *append, uint32_t flags, bool commit);
// A step without attention: of the one by kvq_step, of the other by requests for each layer.
void local_plain_step(const struct local_model *m, struct local_pair *pair, uint32_t append,
                      bool whole_here);
// K and V of all of a pair's tokens are the same.
void local_same_cache(const struct local_model *m, const struct local_pair *pair);

// A session of 4 query heads and 2 KV heads of 64, kept when it is closed.
kvq_session local_open_small(const char *name, uint32_t flags, uint32_t layers);
// Tensors of one of its layers for up to 512 tokens. All layers have the same.
struct kvq_work local_small_work(const struct local_model *m, uint32_t layer);
// A whole step of it: a code of a call, or the entry's status.
int local_small_step(kvq_local *local, struct kvq_entry *e, uint32_t layers, uint32_t append);

#endif
