// SPDX-License-Identifier: Apache-2.0
//
// What the files that pack scalar codes share, AVX-512: codes between quantizer and planes.
//
// A quad is the codes of four tokens and 16 channels, a byte each: 128-bit lane L holds channels
// 4 L to 4 L + 3, token after token. Quads of a group of 32 tokens stand in [8 sets][dim / 16].
// Set i has the tokens 4 i to 4 i + 3 of K; of V those of the set (i / 2, i % 2) of layout.h, 5.
#ifndef KVQ_KERNELS_PACK_AVX512_H
#define KVQ_KERNELS_PACK_AVX512_H

#include "kernels/internal.h"

enum {
    KVQ__SETS = KVQ_GROUP_TOKENS / 4,
    KVQ__QUADS = KVQ_GROUP_TOKENS * KVQ_MAX_HEAD_DIM, // bytes
};

// First token of a set; the others follow in steps.
KVQ_INLINE uint32_t kvq__set_token(uint32_t set, bool v)
{
    return v ? 8 * (set / 2) + set % 2 : 4 * set;
}

KVQ_INLINE uint32_t kvq__set_step(bool v)
{
    return v ? 2 : 1;
}

// The planes of one side (layout.h, 3 to 5), with the third bits of a wide format's first quarter.
void kvq__put_planes_avx512(const struct kvq__side *side, uint32_t dim, const uint8_t *quads,
                            uint8_t *planes, bool v);

#endif
