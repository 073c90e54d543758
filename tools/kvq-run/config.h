// SPDX-License-Identifier: Apache-2.0
//
// What kvq-run needs of a Hugging Face config.json, checked. Model families and what is refused:
// docs/models.md.
#ifndef KVQ_RUN_CONFIG_H
#define KVQ_RUN_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "tools/kvq-run/problem.h"

enum {
    CONFIG_MAX_LAYERS = 256,
    CONFIG_MAX_WIDTH = 1 << 20, // hidden and intermediate sizes, vocabulary
    CONFIG_MAX_HEADS = 256,
};

enum rope_kind { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };

struct rope_config {
    uint8_t kind; // enum rope_kind
    double theta;
    double factor;
    double low_freq_factor, high_freq_factor; // llama3
    double beta_fast, beta_slow;              // yarn
    double attention_factor;                  // yarn; multiplies q and k
    uint32_t original_positions;              // llama3, yarn
};

struct config {
    char family[32]; // model_type
    uint32_t hidden, intermediate, layers, q_heads, kv_heads, head_dim, vocab, positions;
    double norm_eps;
    struct rope_config rope;
    uint32_t window; // sliding window in tokens, of layers from window_from on; 0: none
    uint32_t window_from;
    bool tied_head;
    int64_t bos; // -1: none
    bool bytes;  // byte vocabulary: text in, text out
};

// Reads dir/config.json. A model of another kind is refused with the reason.
int config_read(const char *dir, struct config *c, struct problem *p);

// Parses the text of a config.json; for tests.
int config_parse(const char *text, uint64_t bytes, struct config *c, struct problem *p);

#endif
