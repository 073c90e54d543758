// SPDX-License-Identifier: Apache-2.0
//
// Scalar codecs, AVX-512: quantizing, by scalar_quant_tmpl.h.
#include "kernels/lanes_avx512.h"

#include "kernels/scalar_quant_tmpl.h"

void kvq__init_avx512_scalar_quant(struct kvq_kernels *k)
{
    enter(k);
}
