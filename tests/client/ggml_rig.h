// SPDX-License-Identifier: Apache-2.0
//
// A context of llama.cpp over the backend and a real kvqd: its caches, and forwards as llama.cpp's
// graphs have them, whose outputs are held against a plain loop.
#ifndef KVQ_TESTS_GGML_RIG_H
#define KVQ_TESTS_GGML_RIG_H

#include "tests/client/ggml_kit.h"
#include "tests/kits/daemon_kit.h"

enum { LAYERS = 3, Q_HEADS = 4, KV_HEADS = 2, DIM = KIT_DIM, KV = KIT_STRIDE, Q = Q_HEADS * DIM };
enum { CELLS = KIT_CELLS, STREAMS = 2, MOST = 512 }; // of a forward: tokens
enum { ZERO = 0, HIDDEN = 0xfc00, PER_LAYER = 3 };   // a mask's values; nodes of a layer

struct layer {
    struct ggml_tensor k_cache, v_cache, k_rows, v_rows, set_k, set_v, q, k, v, attention;
    float given_k[MOST * KV], given_v[MOST * KV], queries[MOST * Q], out[MOST * Q];
    float all_k[STREAMS][CELLS][KV], all_v[STREAMS][CELLS][KV]; // what was handed over
};

struct rig {
    struct daemon daemon;
    ggml_backend_dev_t device;
    ggml_backend_t backend;
    struct layer layers[LAYERS];
    struct ggml_tensor cells, mask, shift;
    int64_t cell[MOST];
    uint16_t visible[MOST * CELLS];
    struct ggml_cgraph graph;
    float near; // of outputs, for K and V are rounded to 16 bits
};
extern struct rig rig;

ggml_backend_reg_t ggml_backend_init(void);

// The tensors that live as long as a context.
void make_caches(void);
// The graph of a forward of `each` tokens of n streams, the first of which is `stream`.
void make_graph(int64_t each, int64_t n, int64_t stream);
// New K, V and Q for tokens at `first` and behind, in the cells of `stream`, by rows from `row` on.
void make_tokens(int64_t stream, int64_t first, int64_t each, int64_t row);

bool takes(const struct ggml_tensor *node);
// Asks about all nodes as ggml does before it computes a graph; how many are taken.
int ask(void);
enum ggml_status compute(void);
// The outputs of tokens at `first` and behind, in rows from `row` on.
void check(int64_t stream, int64_t first, int64_t each, int64_t row);
// A forward of one stream, computed and checked; and one that must be refused.
void forward(int64_t stream, int64_t first, int64_t each);
void refused_forward(int64_t stream, int64_t first, int64_t each);

// What stderr has said since, which goes on to the tests' own.
void listen_to_words(void);
// Ends that. How often it said these words.
int heard(const char *words);

// A backend of a new context that has planned; its end.
void begin_backend(void);
void end_backend(void);
// Of a test: with a daemon, and with a backend in f16.
int setup(void **state);
int teardown(void **state);

#endif
