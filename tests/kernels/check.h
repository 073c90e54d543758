// SPDX-License-Identifier: Apache-2.0
//
// What the files of the checker share.
#ifndef KVQ_TESTS_CHECK_H
#define KVQ_TESTS_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

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

static const float TOLERANCE = 1e-5f;

static inline void assert_close(float got, float want, float scale)
{
    bool same = got == want || (isnan(got) && isnan(want));
    if (!same && !(fabsf(got - want) <= TOLERANCE * scale + 1e-30f))
        fail_msg("got %.9g, C has %.9g, allowed difference %.3g", (double)got, (double)want,
                 (double)(TOLERANCE * scale));
}

// A codec that the pair's kind of entry takes; a record of random groups.
struct kvq__codec any_codec(const struct pair *p, struct kvt_rng *rng, uint32_t rows, bool v);
uint8_t *any_record(struct kvt_rng *rng, const struct pair *p, const struct kvq__codec *c);

// In check_attend.c.
check_fn check_qk_packed, check_dot_rows, check_qk_raw, check_softcap, check_softmax,
    check_pv_packed, check_sum_rows, check_pv_raw, check_attend_chunk, check_attend_chunk_tall,
    check_qk_chunk, check_pv_chunk;
// In check_calls.c.
check_fn check_has_fast, check_prepare_fast, check_attend_chunk_fast;

#endif
