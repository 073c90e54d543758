// SPDX-License-Identifier: Apache-2.0
//
// As much of ggml as the backend uses, and what the backend asks the library for.
#ifndef KVQ_TESTS_GGML_KIT_H
#define KVQ_TESTS_GGML_KIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/client/ggml/ggml-backend-impl.h"

enum { KIT_DIM = 64, KIT_STRIDE = 2 * KIT_DIM, KIT_CELLS = 1024 }; // of K and V
#define KIT_SCALE 0.2f // not what kvqd takes unless it is told
#define KIT_CAP   3.0f

struct ggml_cgraph {
    int n;
    struct ggml_tensor *nodes[16];
};

struct ggml_kit {
    size_t buffer_size;         // of all buffers
    bool other_version;         // of ggml, than the backend was built for
    int opens_before_one_fails; // of sessions; below 0: none does
    int tables;                 // page tables that were mapped when one failed
    int names;                  // sessions with a name that were opened
    bool without_room;          // kvqd has none for a step
    int aborts;                 // of steps
    uint64_t seed;
};
extern struct ggml_kit ggml_kit;

// By chance; fp16 holds it.
float kit_value(void);
// A tensor of these dimensions without gaps, and a view of all of one, as the result of an op.
struct ggml_tensor kit_tensor(enum ggml_type type, void *data, int64_t a, int64_t b, int64_t c,
                              int64_t d);
struct ggml_tensor kit_view(struct ggml_tensor *of, enum ggml_op op);
// Attention of one query over the first tokens of a KV head, in a plain loop.
void kit_attend(const float *keys, const float *values, int64_t seen, const float *q, double *out);

#endif
