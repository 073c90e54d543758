// SPDX-License-Identifier: Apache-2.0
//
// Scalar codecs, AVX-512: dequantizing and attention's exact path, by scalar_read_tmpl.h.
#include "kernels/lanes_avx512.h"

#include "kernels/scalar_read_tmpl.h"

void kvq__init_avx512_scalar(struct kvq_kernels *k)
{
    enter(k);
}
