// SPDX-License-Identifier: Apache-2.0
//
// A session as it should be: plain arrays of pages in which every token stands raw for ever and
// every unit is packed anew for each question. Attention, reading and the rules of counts
// (what is read packed, how far back one can go) are computed from that, without a look at the
// core, and must agree with it to the bit.
#ifndef KVQ_TESTS_CORE_MODEL_H
#define KVQ_TESTS_CORE_MODEL_H

#include "kernels/kernels.h"

enum { MODEL_LAYERS = 3, MODEL_PAGES = 24 };

struct model_layer {
    const struct kvq_format *format;
    struct kvq_shape shape;
    uint32_t source; // own number, or the layer whose cache it reads
    uint32_t keep;   // tokens that stay readable; 0 = all
    uint64_t base;   // of a fork: below it tokens are packed
    uint32_t learn;  // tokens the format learns from; 0 = none
    uint8_t *extras; // of the last question; NULL if the format has none
    uint8_t *raw[MODEL_PAGES], *packed[MODEL_PAGES];
};

struct model {
    const struct kvq_kernels *kernels;
    void *workspace;
    struct model_layer layers[MODEL_LAYERS];
    uint32_t max_rollback;
    uint64_t tokens, floor;
};

// Rows of the session's own K and V, fp32 [tokens][heads][dim].
void model_write(struct model *m, uint32_t layer, uint64_t position, uint32_t n, const float *k,
                 const float *v, uint32_t row_floats);
void model_commit(struct model *m, uint32_t tokens);
// Tokens that a view at `past` reads packed.
uint64_t model_packed(const struct model *m, uint32_t layer, uint64_t past);
// The first token of the layer that can be read back.
uint64_t model_kept(const struct model *m, uint32_t layer);
// fp32 [q_tokens][q_heads][dim] and [q_tokens][q_heads].
void model_attend(const struct model *m, uint32_t layer, uint64_t past, uint32_t step,
                  uint32_t flags, const struct kvq_view *q, uint32_t q_tokens, float *out,
                  float *lse);
// Tokens [from, from + n) of one head as a view at `past` sees them.
void model_read(const struct model *m, uint32_t layer, uint64_t past, uint64_t from, uint32_t n,
                uint32_t head, float *k, float *v);
// Of the last `append` tokens keeps n at these indices.
void model_accept(struct model *m, uint32_t append, const int32_t *list, uint32_t n);
// The highest count at or below `at` where it can be forked.
uint64_t model_fork_at(const struct model *m, uint64_t at);
void model_fork(const struct model *m, struct model *to, uint64_t at);
void model_free(struct model *m);

#endif
