// SPDX-License-Identifier: Apache-2.0
//
// Walking a chunk with prefetches; the exact path as it is, the fast path with its own steps.
#ifndef KVQ_KERNELS_WALK_AVX512_H
#define KVQ_KERNELS_WALK_AVX512_H

#include <immintrin.h>

#include "kernels/avx512.h"

// Stands first in the tile's scratch memory, whatever else a path keeps there.
struct kvq__walk {
    const struct kvq_kernels *steps;
    const struct kvq__chunk *chunk;
    const struct kvq__chunk *announced; // the chunk whose K was prefetched
    bool ready;                         // whether that was this one
};

// kvq__attend_chunk with the functions of `steps`, and prefetching.
void kvq__walk_chunk(const struct kvq_kernels *steps, struct kvq__tile *tile,
                     const struct kvq__chunk *chunk);

#endif
