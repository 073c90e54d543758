// SPDX-License-Identifier: Apache-2.0
//
// A decoder-only model of the Llama family: RMSNorm, rotary embedding, grouped-query attention,
// SwiGLU; biases of any projection and Qwen3's q and k norms where the checkpoint has them.
#ifndef KVQ_RUN_MODEL_H
#define KVQ_RUN_MODEL_H

#include "tools/kvq-run/cache.h"
#include "tools/kvq-run/config.h"
#include "tools/kvq-run/linear.h"
#include "tools/kvq-run/tensors.h"

struct layer_weights {
    const struct tensor *norm_in, *norm_mlp;
    const struct tensor *q, *k, *v, *o;
    const struct tensor *q_bias, *k_bias, *v_bias, *o_bias; // NULL if there are none
    const struct tensor *q_norm, *k_norm;                   // likewise
    const struct tensor *gate, *up, *down;
    const struct tensor *gate_bias, *up_bias, *down_bias; // likewise
    struct tensor folded[3]; // v, v_bias and o with V's rotation in them; data NULL: not made
};

struct model {
    struct config config;
    struct tensors *tensors;
    struct layer_weights *layers;
    const struct tensor *embed, *norm, *head;
    char fingerprint[128]; // of config and weights as they are in the file, for the daemon
    bool folded;           // model_fold
    // Working memory for one step.
    uint32_t step_tokens;
    float *x, *h, *gate, *up; // residual stream, normed input, projections
    float *freq;              // rotary frequencies [head_dim / 2]
    float *cos, *sin;         // of one step [tokens][head_dim / 2]
    struct linear_scratch scratch;
};

// Opens dir's checkpoint for steps of at most step_tokens. Release with model_close, also after
// a failure.
int model_open(struct model *m, const char *dir, uint32_t step_tokens, struct problem *p);
void model_close(struct model *m);

// Rotates V in the weights, for sessions with KVQ_V_ROTATION_ENGINE: all caches of later steps must
// be such. Done once, however often it is called. Takes the memory of W_V and W_O in fp32.
int model_fold(struct model *m, struct problem *p);

// One step: appends `n` tokens to the cache and writes the logits of the last `want` of them
// (0 to n) to logits[want][vocab]. On failure nothing was committed.
int model_step(struct model *m, struct cache *cache, const uint32_t *ids, uint32_t n, uint32_t want,
               float *logits, struct problem *p);

#endif
