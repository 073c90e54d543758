// SPDX-License-Identifier: Apache-2.0
//
// Choosing the next token.
#ifndef KVQ_RUN_SAMPLE_H
#define KVQ_RUN_SAMPLE_H

#include <stdint.h>

#include "tools/kvq-run/problem.h"

struct sampler {
    double temperature, top_p;
    uint64_t state; // of the random numbers
    uint32_t vocab;
    struct candidate *order;
};

int sampler_open(struct sampler *s, uint32_t vocab, double temperature, double top_p, uint64_t seed,
                 struct problem *p);
void sampler_close(struct sampler *s);

// Temperature 0: the likeliest, the lowest id of equals.
uint32_t sampler_next(struct sampler *s, const float *logits);

#endif
