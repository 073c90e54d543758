// SPDX-License-Identifier: Apache-2.0
//
// The AVX-512 table of functions.
#include "kernels/avx512.h"

void kvq__init_avx512(struct kvq_kernels *k)
{
    kvq__init_avx512_rows(k);
    kvq__init_avx512_pack(k);
    kvq__init_avx512_attend(k);
    kvq__init_avx512_raw(k);
    kvq__init_avx512_softmax(k);
    kvq__init_avx512_vnni(k);
    kvq__init_avx512_scalar(k);
    kvq__init_avx512_book(k);
    kvq__init_avx512_book_pack(k);
    kvq__init_avx512_book_pairs(k);
}
