// SPDX-License-Identifier: Apache-2.0
//
// The parts of the C table that live in files of their own.
#ifndef KVQ_KERNELS_KERNELS_C_H
#define KVQ_KERNELS_KERNELS_C_H

#include "kernels/internal.h"

void kvq__dequant_k_c(const struct kvq__codec *c, const uint8_t *group, float *rows);
void kvq__dequant_v_c(const struct kvq__codec *c, const uint8_t *group, float *rows);

void kvq__init_quant_c(struct kvq_kernels *k);  // quant_c.c
void kvq__init_attend_c(struct kvq_kernels *k); // attend_c.c

#endif
