// SPDX-License-Identifier: Apache-2.0
//
// What the two halves of `attend` share: our rows (attend.c), and those of a peer and what we are
// to it (attend_peers.c).
#ifndef KVQ_TOOLS_BENCH_ATTEND_H
#define KVQ_TOOLS_BENCH_ATTEND_H

#include "tools/kvq-bench/peer_ggml.h"

// How many times as fast as each of the peer's caches one row of ours is; NAN where there is none.
struct attend_against {
    char name[KVQ_FORMAT_NAME + 8]; // format and path
    double times[PEERS];
};

struct attend_run {
    const struct bench_options *o;
    struct bench_output *out;
    const struct kvq_kernels *k;
    struct kvq_pool *pool;
    unsigned threads;
    double floor; // bytes a second
    double huge;  // share of the memory in huge pages
    struct bench_cache *baseline;
    struct peer *peer;               // NULL: there is none
    struct peer_cache theirs[PEERS]; // p is NULL in those that cannot be timed
    struct attend_against against[1 + 2 * BENCH_MAX_LIST]; // the baseline's first
    uint32_t n_against;
    bool failed;
};

// One line of the table.
struct attend_row {
    const char *format, *isa, *path;
    const struct attend_against *against; // NULL: a row of the peer's
    double us, f16_us, error;
    double bytes_per_token_head, bits;
    size_t layer_bytes;
    uint32_t layers;
    uint32_t outliers; // of a KV head
};
void attend_print(struct attend_run *r, const struct attend_row *row);

// Seconds a layer of one of our caches, over all its layers.
double attend_walk(const struct attend_run *r, struct bench_cache *c, enum kvq_path path);

// Makes the peer's caches beside the baseline, has each checked, and prints a row for each.
void attend_peers_open(struct attend_run *r);
void attend_peers_close(struct attend_run *r); // prints what we are to them

// Times a cache of ours by turns with each of the peer's, and keeps and returns what came of it.
const struct attend_against *attend_peers_time(struct attend_run *r, struct bench_cache *c,
                                               enum kvq_path path);

#endif
