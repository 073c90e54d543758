// SPDX-License-Identifier: Apache-2.0
//
// How the kernels of all vector instruction sets are written: once for every number of rows and of
// bits, and specialized by constant arguments.
#ifndef KVQ_KERNELS_SIMD_H
#define KVQ_KERNELS_SIMD_H

#include "kernels/internal.h"

// Constant arguments only pay if the compiler really inlines. (A build that is for tests alone and
// need not be fast says otherwise: tests/CMakeLists.txt.)
#ifndef KVQ__INLINE
#define KVQ__INLINE static inline __attribute__((always_inline))
#endif

// Lines into the second level cache; attend_chunk.c says when. Inlined by force, as everything that
// only prefetches has to be: gcc 12 takes such a function for one without effects, and drops the
// calls.
KVQ__INLINE void kvq__fetch(const uint8_t *at)
{
    __builtin_prefetch(at, 0, 2);
}

KVQ__INLINE void kvq__fetch_bytes(const uint8_t *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        kvq__fetch(at + i);
}

// What stands beside K's codes in the group ahead: its norms, and the scales and zeros of a record
// that has them before its groups. Each group asks for these, and the first one brings them. They
// are as far from the group ahead as packed->k_scales is from packed->group.
KVQ__INLINE void kvq__fetch_beside_k(const struct kvq__tile *tile, const struct kvq_packed *packed)
{
    const struct kvq_layout *l = &tile->codec->layout;
    if (!tile->ahead)
        return;
    kvq__fetch(tile->ahead + l->k_norms);
    kvq__fetch_bytes(tile->ahead + (packed->k_scales - packed->group), l->k_set);
}

// A loop whose bounds are constants, to be written out whole.
#ifdef __clang__
#define KVQ__UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVQ__UNROLL _Pragma("GCC unroll 32")
#endif

// Calls something with ROWS as a constant: how many of the next four rows there are.
#define KVQ__BY_ROWS(left, call)                                                                   \
    do {                                                                                           \
        switch (left) {                                                                            \
        case 1: {                                                                                  \
            enum { ROWS = 1 };                                                                     \
            call;                                                                                  \
        } break;                                                                                   \
        case 2: {                                                                                  \
            enum { ROWS = 2 };                                                                     \
            call;                                                                                  \
        } break;                                                                                   \
        case 3: {                                                                                  \
            enum { ROWS = 3 };                                                                     \
            call;                                                                                  \
        } break;                                                                                   \
        default: {                                                                                 \
            enum { ROWS = 4 };                                                                     \
            call;                                                                                  \
        }                                                                                          \
        }                                                                                          \
    } while (0)

// The same for BITS of a code, 2 to 4.
#define KVQ__BY_BITS(bits, call)                                                                   \
    do {                                                                                           \
        switch (bits) {                                                                            \
        case 2: {                                                                                  \
            enum { BITS = 2 };                                                                     \
            call;                                                                                  \
        } break;                                                                                   \
        case 3: {                                                                                  \
            enum { BITS = 3 };                                                                     \
            call;                                                                                  \
        } break;                                                                                   \
        default: {                                                                                 \
            enum { BITS = 4 };                                                                     \
            call;                                                                                  \
        }                                                                                          \
        }                                                                                          \
    } while (0)

// And for DIM, a head_dim.
#define KVQ__BY_DIM(dim, call)                                                                     \
    do {                                                                                           \
        if ((dim) == 64) {                                                                         \
            enum { DIM = 64 };                                                                     \
            call;                                                                                  \
        } else if ((dim) == 128) {                                                                 \
            enum { DIM = 128 };                                                                    \
            call;                                                                                  \
        } else {                                                                                   \
            enum { DIM = 256 };                                                                    \
            call;                                                                                  \
        }                                                                                          \
    } while (0)

enum {
    KVQ__TILE4 = 4,       // query rows that share one unpacking
    KVQ__SLAB = 128,      // channels in a slab
    KVQ__ROW_BYTES = 128, // a row of a plane
};

#endif
