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

check_fn check_has_fast, check_prepare_fast, check_attend_chunk_fast;

#endif
