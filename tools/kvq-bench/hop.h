// SPDX-License-Identifier: Apache-2.0
//
// What the files of `kvq-bench hop` share. The engine's side (hop_engine.c) knows libkvq, the local
// kernel (hop_local.c) knows the kernels, and hop.c neither: their names overlap.
//
// Functions return 0, or -1 with a sentence in text (HOP_TEXT bytes).
#ifndef KVQ_TOOLS_BENCH_HOP_H
#define KVQ_TOOLS_BENCH_HOP_H

#include "kernels/cuda/driver.h"
#include "tools/kvq-bench/bench.h"

enum { HOP_TEXT = 1280, HOP_ORDERS = 3 };

struct hop_options {
    struct bench_list tokens, sessions;
    uint32_t q_heads, kv_heads, head_dim, layers, reps;
    const char *format, *driver, *kvqd;
    bool json;
};

// 0: go on; 1: help was printed; -1: complained.
int hop_options_read(struct hop_options *o, int argc, char **argv);

// The bench's own context and stream, which are the engine's as well.
struct hop_gpu {
    struct kvq_gpu_driver driver;
    struct kvq_gpu_context *context;
    struct kvq_gpu_stream *stream;
    int device;
    bool software; // no GPU: times mean nothing
    char name[96];
};

// A batch of sessions, all with the same tokens in all layers, and one query token each.
struct hop_case {
    uint32_t sessions;
    uint64_t tokens;
    uint64_t packed;              // of the tokens, the first, as the daemon has them
    const uint16_t *k, *v;        // f16 [tokens][kv_heads][head_dim], in host memory
    kvq_gpu_ptr fresh_k, fresh_v; // one token more, the same for all sessions
    kvq_gpu_ptr q, out;           // f16 and fp32 [sessions][q_heads][head_dim]
};

// ---- hop_local.c: the plain kernel in this process ----

struct hop_local;
int hop_local_open(struct hop_local **local, const struct hop_gpu *gpu, const struct hop_options *o,
                   char *text);
// Makes the case's caches, one for each session and layer, and the launches.
int hop_local_fill(struct hop_local *local, const struct hop_case *c, char *text);
// Attention of all sessions over a layer, on the stream; with the fresh token or without.
int hop_local_attend(struct hop_local *local, uint32_t layer, bool fresh, char *text);
void hop_local_empty(struct hop_local *local);
void hop_local_close(struct hop_local **local);

// ---- hop_engine.c: the same through the daemon ----

struct hop_engine;
int hop_engine_open(struct hop_engine **engine, const struct hop_gpu *gpu,
                    const struct hop_options *o, const char *folder, char *text);
// Opens the sessions, appends the case's tokens, and tells the rest of the case.
int hop_engine_fill(struct hop_engine *engine, struct hop_case *c, char *text);
void hop_engine_empty(struct hop_engine *engine);
void hop_engine_close(struct hop_engine **engine);
// A queue whose streams are ordered so ("words", "events", "host"), number i of HOP_ORDERS.
int hop_engine_order(struct hop_engine *engine, uint32_t i, const char *order, char *text);
// Requests on the stream in the order of queue i: over the case's sessions, or over one token of
// one head; and between begin and end of a step, with a token for each session.
int hop_engine_attend(struct hop_engine *engine, uint32_t i, uint32_t layer, char *text);
int hop_engine_least(struct hop_engine *engine, uint32_t i, char *text);
int hop_engine_begin(struct hop_engine *engine, uint32_t i, char *text);
int hop_engine_append(struct hop_engine *engine, uint32_t i, uint32_t layer, char *text);
int hop_engine_end(struct hop_engine *engine, uint32_t i, char *text);

// ---- hop_context.c: in this process's own context, over the daemon's memory ----

int hop_context_open(struct hop_engine *engine, char *text); // before sessions are opened
// A step of the case's sessions; append: with a token for each. Its layers one by one, or all of
// them replayed (append alone). It has ended when the daemon has published it.
int hop_context_begin(struct hop_engine *engine, bool append, char *text);
int hop_context_attend(struct hop_engine *engine, uint32_t layer, bool append, char *text);
int hop_context_replay(struct hop_engine *engine, char *text);
int hop_context_end(struct hop_engine *engine, bool append, char *text);

#endif
