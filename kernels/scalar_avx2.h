// SPDX-License-Identifier: Apache-2.0
//
// What quantizing with scalar codecs needs of AVX2 whatever the lanes are: from bytes to planes.
#ifndef KVQ_KERNELS_SCALAR_AVX2_H
#define KVQ_KERNELS_SCALAR_AVX2_H

#include "kernels/internal.h"

// Codes of a group of 32 tokens, a byte each in [32][dim] (or, by_token, in [dim][32]), become the
// planes of one side (layout.h, 3 to 5), with the third bits of a wide format's first quarter.
void kvq__put_planes_avx2(const struct kvq__side *side, uint32_t dim, const uint8_t *codes,
                          bool by_token, uint8_t *planes, bool v);

// Codes, scales and zeros of K (of V) of any scalar codec, as quant_k (quant_v) of the table.
void kvq__quant_k_avx2(const struct kvq__codec *c, const float *rows, uint8_t *record,
                       uint32_t first);
void kvq__quant_v_avx2(const struct kvq__codec *c, const float *rows, uint8_t *record,
                       uint32_t first);

#endif
