// SPDX-License-Identifier: Apache-2.0
//
// The AVX2 table of functions (with FMA and F16C, which every CPU with AVX2 of ours has).
#include "kernels/avx2.h"

void kvq__init_avx2(struct kvq_kernels *k)
{
    kvq__init_avx2_rows(k);
    kvq__init_avx2_pack(k);
    kvq__init_avx2_attend(k);
    kvq__init_avx2_packed(k);
    kvq__init_avx2_bytes(k);
    kvq__init_avx2_scalar(k);
    kvq__init_avx2_scalar_quant(k);
    kvq__init_avx2_book(k);
    kvq__init_avx2_book_pack(k);
}
