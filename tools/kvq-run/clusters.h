// SPDX-License-Identifier: Apache-2.0
//
// Means over tokens, and how sure they are. Tokens of one text are no independent draws: what a
// cache lost harms all tokens behind it. So the standard error comes from the sums of blocks of
// CLUSTER_TOKENS tokens, as in kvq.eval. Blocks depend on each other somewhat: it is a lower bound.
#ifndef KVQ_RUN_CLUSTERS_H
#define KVQ_RUN_CLUSTERS_H

#include <stdint.h>

enum { CLUSTER_TOKENS = 128 };

// All zeros at first.
struct clusters {
    double sum, tokens;           // of all that is closed
    double squares, cross, sizes; // sums of s^2, s n and n^2 over blocks of sum s and n tokens
    uint64_t blocks;
    double open; // sum of the block that is being filled
    uint32_t filled;
};

void clusters_add(struct clusters *c, double x); // the next token's number
void clusters_end(struct clusters *c);           // of a text: the next token begins a block
// The mean's standard error over what is closed; NaN if that is less than two blocks.
double clusters_error(const struct clusters *c);

#endif
