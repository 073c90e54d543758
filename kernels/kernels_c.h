// SPDX-License-Identifier: Apache-2.0
//
// The parts of the C table that live in files of their own.
#ifndef KVQ_KERNELS_KERNELS_C_H
#define KVQ_KERNELS_KERNELS_C_H

#include "kernels/internal.h"

void kvq__dequant_k_c(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows);
void kvq__dequant_v_c(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows);

// Row t *= its norm, if the record has norms.
void kvq__apply_norms(const struct kvq__codec *c, const struct kvq_packed *packed, float *rows);

// The code of sub-vector m (of `subs`) and token t among a group's codebook codes (book_c.c).
void kvq__put_book_code(uint8_t *codes, uint32_t bits, uint32_t subs, uint32_t m, uint32_t t,
                        uint32_t code);

// Sum of squares of one row, as the table's sumsq adds it up. n is a multiple of 16.
float kvq__sumsq(const float *row, uint32_t n);

// Codes of scalar codecs, one byte each in [32][dim], to planes and back (planes_c.c).
void kvq__put_k_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *codes,
                      uint8_t *planes);
void kvq__get_k_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *planes,
                      uint8_t *codes);
void kvq__put_v_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *codes,
                      uint8_t *planes);
void kvq__get_v_codes(const struct kvq__side *side, uint32_t dim, const uint8_t *planes,
                      uint8_t *codes);

void kvq__init_quant_c(struct kvq_kernels *k);  // quant_c.c
void kvq__init_book_c(struct kvq_kernels *k);   // book_c.c
void kvq__init_attend_c(struct kvq_kernels *k); // attend_c.c

#endif
