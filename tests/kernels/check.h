// SPDX-License-Identifier: Apache-2.0
//
// What the two files of the checker share.
#ifndef KVQ_TESTS_CHECK_H
#define KVQ_TESTS_CHECK_H

#include "kernels/internal.h"
#include "tests/kernels/kvtest.h"

struct pair {
    const struct kvq_kernels *c, *k; // the reference, and what is compared with it
    int kind;                        // enum kvq__kind of the entry; -1 = any
};

typedef void check_fn(const struct pair *p, struct kvt_rng *rng);

struct check {
    const char *name;
    size_t offset; // of the entry in struct kvq_kernels; 0 for a whole call
    check_fn *run; // one round; fails the test if anything differs
    int kind;      // enum kvq__kind of the entry; -1 = any
};

extern const struct check check_calls[];
extern const size_t n_check_calls;

// Whether number i of a dtype is NaN. NaN may differ in its payload.
static inline bool is_nan(const void *p, uint8_t dtype, size_t i)
{
    if (dtype == KVQ_F32)
        return isnan(((const float *)p)[i]);
    uint16_t x = ((const uint16_t *)p)[i];
    return isnan(dtype == KVQ_F16 ? kvt_f16(x) : kvt_bf16(x));
}

check_fn check_has_fast, check_prepare_fast, check_attend_chunk_fast;

#endif
