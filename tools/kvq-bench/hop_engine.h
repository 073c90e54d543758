// SPDX-License-Identifier: Apache-2.0
//
// The engine of `kvq-bench hop`, as its two files see it: in hop_engine.c attention goes through
// the daemon, in hop_context.c it runs in this process over the daemon's memory.
#ifndef KVQ_TOOLS_BENCH_HOP_ENGINE_H
#define KVQ_TOOLS_BENCH_HOP_ENGINE_H

#include "client/kvq.h"
#include "tools/kvq-bench/hop.h"

// Sessions of their own, since they would have to be looked at anew whenever requests change them.
struct hop_context {
    kvq_queue *queue;
    kvq_local *local;
    kvq_bucket *bucket;
    struct kvq_entry *entries; // [most sessions]
    uint32_t n_entries;
    struct kvq_gpu_exec *step; // a step's attentions, captured
};

struct hop_engine {
    const struct hop_gpu *gpu;
    const struct hop_options *o;
    kvq_client *client;
    char place[48];
    kvq_buffer *buffer;
    uint64_t v_at, fresh_at, q_at, out_at; // K stands first
    uint16_t *tokens;                      // K and V in host memory
    kvq_queue *queue[HOP_ORDERS], *own;    // own: for what is not timed
    struct kvq_entry least, *entries;      // [most sessions]
    uint32_t n_entries;
    struct kvq_work work, least_work;
    struct hop_context context;
};

// A sentence for a call that failed, from the library's; 0 for one that did not. _of: or for the
// first of its sessions that failed.
int hop_fault(int code, const char *what, char *text);
int hop_fault_of(int code, const struct kvq_entry *entries, uint32_t n, const char *what,
                 char *text);
// Opens sessions of the case's shape into entries, and appends its tokens to them. *n: so many.
int hop_open_sessions(struct hop_engine *engine, const struct hop_case *c,
                      struct kvq_entry *entries, uint32_t *n, char *text);

// Called by those of the engine.
int hop_context_fill(struct hop_engine *engine, const struct hop_case *c, char *text);
void hop_context_empty(struct hop_engine *engine);
void hop_context_close(struct hop_engine *engine);

#endif
