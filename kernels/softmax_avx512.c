// SPDX-License-Identifier: Apache-2.0
//
// The softmax step of a chunk, AVX-512.
#include "kernels/softmax_avx512.h"

static void softmax_avx512(struct kvq__tile *tile, uint32_t n)
{
    for (uint32_t r = 0; r < tile->rows; r++)
        tile->factor[r] =
            kvq__softmax_row(tile->logits + (size_t)r * KVQ__LOGITS_STRIDE, (int32_t)n, tile->lo[r],
                             tile->hi[r], &tile->m[r], &tile->l[r], (struct kvq__taker){0});
}

void kvq__init_avx512_softmax(struct kvq_kernels *k)
{
    k->softmax = softmax_avx512;
}
